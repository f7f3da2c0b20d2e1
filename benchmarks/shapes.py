"""Models of random weights and batches of random tokens, in the shapes that are measured.

Nothing but torch and transformers, of any version since 4.57: AdapterHub's environment imports this too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    GPT2Config,
    PreTrainedModel,
)

VOCABULARY = 8192
"""Of decoders: GPT-2's own 50,257 words would make the logits the greater part of a step, the same for everybody."""


@dataclass(frozen=True)
class Shape:
    """A model and a batch. padded: one row of all tokens, the others of random lengths from a quarter."""

    name: str
    width: int
    layers: int
    kind: str  # encoder: BERT with a head for two labels; decoder: GPT-2 with its logits
    rows: int = 16
    tokens: int = 64
    padded: bool = False
    dropout: float = 0.1

    @property
    def task(self) -> str:
        """PEFT's name of what is trained."""
        return "SEQ_CLS" if self.kind == "encoder" else "CAUSAL_LM"

    def __str__(self) -> str:
        padding = "padded" if self.padded else "no padding"
        return f"{self.name} {self.kind}, {self.rows} × {self.tokens}, {padding}, dropout {self.dropout:g}"


def minilm(kind: str, padded: bool = False, dropout: float = 0.1, rows: int = 16) -> Shape:
    return Shape("MiniLM", 384, 6, kind, rows, 64, padded, dropout)


def base(kind: str, padded: bool = False, dropout: float = 0.1) -> Shape:
    """Fewer rows than MiniLM's: a step of 8 takes seconds."""
    return Shape("base", 768, 12, kind, 2, 64, padded, dropout)


def tiny(kind: str, padded: bool = False, dropout: float = 0.1) -> Shape:
    """For tests: the code runs, the figures mean nothing."""
    return Shape("tiny", 24, 2, kind, 2, 8, padded, dropout)


def heads(shape: Shape) -> int:
    return {384: 12, 768: 12, 24: 2}[shape.width]


def build(shape: Shape, like: nn.Module | None = None) -> PreTrainedModel:
    """A model of a shape, its weights those of `like`, in the same memory."""
    torch.manual_seed(0)
    if shape.kind == "encoder":
        model = AutoModelForSequenceClassification.from_config(
            BertConfig(
                vocab_size=VOCABULARY, hidden_size=shape.width, num_hidden_layers=shape.layers,
                num_attention_heads=heads(shape), intermediate_size=4 * shape.width,
                hidden_dropout_prob=shape.dropout, attention_probs_dropout_prob=shape.dropout,
            )
        )  # fmt: skip
    else:
        model = AutoModelForCausalLM.from_config(
            GPT2Config(
                vocab_size=VOCABULARY, n_embd=shape.width, n_layer=shape.layers, n_head=heads(shape),
                embd_pdrop=shape.dropout, resid_pdrop=shape.dropout, attn_pdrop=shape.dropout,
                bos_token_id=0, eos_token_id=0, pad_token_id=0,
            )
        )  # fmt: skip
        model.config.use_cache = False
    if like is not None:
        model.load_state_dict({name: tensor.detach() for name, tensor in like.state_dict().items()}, assign=True)
        model.tie_weights()
    return model


def batch(shape: Shape) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """input_ids and attention_mask (rows, tokens), and labels."""
    made = torch.Generator().manual_seed(1)
    ids = torch.randint(5, VOCABULARY, (shape.rows, shape.tokens), generator=made)
    mask = torch.ones_like(ids)
    if shape.padded:
        for row in range(1, shape.rows):
            length = int(torch.randint(shape.tokens // 4, shape.tokens, (1,), generator=made))
            mask[row, length:] = 0
            ids[row, length:] = 0
    if shape.kind == "encoder":
        return {"input_ids": ids, "attention_mask": mask}, torch.randint(0, 2, (shape.rows,), generator=made)
    return {"input_ids": ids, "attention_mask": mask}, ids.masked_fill(mask == 0, -100)
