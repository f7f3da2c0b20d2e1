"""What a row is answered, and what it contributes to the loss, does not depend on the other rows of its batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch.nn import functional
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from deltune.errors import DeltuneError
from deltune.models import LANGUAGE_MODEL_HEADS
from deltune.runtime.causal_loss import causal_loss
from deltune.runtime.padding import padding_side, supports_left_padding
from deltune.train.tasks import classification, generation, token_classification
from deltune.train.tasks.base import InferenceContext, TaskKind, TaskOptions
from deltune.train.tasks.encoding import IGNORE_INDEX, LengthGroupedBatches, collate
from runtime.identity import specimens as identity
from tables.families import FAMILIES, Family
from tables.specimens import build, roles

LABELS = ("w1", "w2")
KINDS: dict[str, tuple[TaskKind, ...]] = {
    "sequence": (classification.CLASSIFICATION,),
    "tokens": (token_classification.TAGGING,),
    "choice": (classification.CHOICE,),
    "causal": (
        generation.LANGUAGE_MODELING, generation.CAUSAL_GENERATION, classification.CAUSAL_CLASSIFICATION,
        classification.CAUSAL_CHOICE,
    ),
    "seq2seq": (
        generation.SEQ2SEQ_GENERATION, classification.SEQ2SEQ_CLASSIFICATION, classification.SEQ2SEQ_CHOICE,
        token_classification.SEQ2SEQ_TAGGING,
    ),
}  # fmt: skip
TEXTS = ("w5", "w6 w7 w8 w9 w10 w11 w12 w13 w14", "w15 w16 w17", "", "w18 w19 w20 w21 w22 w23")
OTHERS = (
    "Xlnet", "RoFormer", "FNet", "ConvBert", "Funnel", "Nystromformer", "Mamba", "Mamba2", "RecurrentGemma",
    "OpenAIGPT", "CTRL", "GPTNeo", "Falcon", "Mpt", "XGLM", "Jamba", "Bart", "T5Gemma", "MobileBert",
)  # fmt: skip
"""Families beyond the table that treat padding in other ways, by the beginning of their classes."""
FAULTS_OF_TRANSFORMERS = {
    "FunnelForTokenClassification": "it cannot read a text as short as some of these",
    "RecurrentGemmaForCausalLM": "a prompt of one token goes on from the state of the prompt before it",
}
TRIED = [
    entry for entry in identity.entries()
    if entry.role in KINDS and any(entry.class_name.lower().startswith(f"{name.lower()}for") for name in OTHERS)
    and entry.class_name not in FAULTS_OF_TRANSFORMERS
]  # fmt: skip


def tokenizer(side: str, framed: bool) -> PreTrainedTokenizerFast:
    """A word a token; the begin, padding and end of the tiny configurations, written around a text if it is framed."""
    words = ["<s>", "<pad>", "</s>", "<unk>", ":", ";", "none", *(f"w{i}" for i in range(90))]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if framed:
        made.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", pair="<s> $A </s> $B:0 </s>:0", special_tokens=[("<s>", 0), ("</s>", 2)]
        )
    names = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, padding_side=side, **names)


def columns(kind: TaskKind) -> dict[str, list[Any]]:
    words = [text.split() or ["w4"] for text in TEXTS]
    return {
        "classification": {"text": list(TEXTS), "pair": list(reversed(TEXTS)), "label": [0, 1, 0, 1, 1]},
        "tagging": {"tokens": words, "tags": [[i % 2 for i in range(len(row))] for row in words]},
        "choice": {"question": list(TEXTS), "choices": [["w1 w2 w3", "w4"]] * 5, "answer": [0, 1, 1, 0, 0]},
        "generation": {"source": list(TEXTS), "targets": [["w1"], ["w2 w3 w4"], ["w5"], ["w6 w7"], [""]]},
        "language": {"text": list(TEXTS)},
    }[kind.name]  # fmt: skip


def check(model: PreTrainedModel, kind: TaskKind, side: str) -> None:
    """Predictions, scores, loss and gradients of a batch are those of its rows alone."""
    tags = kind.name == "tagging" and kind.word_key is not None
    words = {"O": "", "B-A": "w1"} if tags else {label: label for label in LABELS}
    limits = TaskOptions(max_length=24, max_target_length=4, label_words=words)
    tokens, labels = tokenizer(side, framed=kind.head != "causal-lm"), ("O", "B-A") if tags else LABELS
    encoded = kind.encode(tokens, model, columns(kind), limits, False)
    in_batch, alone = (
        kind.predict(InferenceContext(model, tokens, labels, limits, size), encoded) for size in (len(encoded), 1)
    )
    assert in_batch.predictions == pytest.approx(alone.predictions, rel=1e-4) if kind.name == "language" else (
        in_batch.predictions == alone.predictions
    )  # fmt: skip
    for one, other in zip(in_batch.scores, alone.scores, strict=True):
        assert one == (other if other is None or isinstance(other, str) else pytest.approx(other, rel=1e-4))
    assert in_batch.loss == pytest.approx(alone.loss, rel=1e-4)
    rows = kind.encode(tokens, model, columns(kind), limits, True)
    same_length = padding_side(model) is None
    batches = list(LengthGroupedBatches(rows.lengths, len(rows), 0, same_length=same_length))
    assert sorted(i for batch in batches for i in batch) == list(range(len(rows)))
    assert len(batches) == (len(set(rows.lengths)) if same_length else 1)
    assert gradient(model, kind, tokens, rows, batches) == pytest.approx(
        gradient(model, kind, tokens, rows, [[i] for i in range(len(rows))]), rel=1e-4, abs=1e-6
    )


def gradient(model: PreTrainedModel, kind: TaskKind, tokens: Any, rows: Any, batches: list[list[int]]) -> list[float]:
    """The loss, summed over what it is the mean of, and the sizes of the gradients of some weights."""
    weights = [weight.requires_grad_() for weight in model.parameters() if weight.is_floating_point()][-8:]
    model.zero_grad()
    total = 0.0
    for batch in batches:
        inputs = collate(tokens, model, [rows[i] for i in batch])
        items = inputs["labels"][..., 1:] if kind.head == "causal-lm" else inputs["labels"]
        loss = causal_loss(model, inputs) if kind.head in LANGUAGE_MODEL_HEADS else model(**inputs).loss
        loss = loss * (items != IGNORE_INDEX).sum()
        loss.backward()
        total += loss.item()
    return [total, *(0.0 if weight.grad is None else float(weight.grad.norm()) for weight in weights)]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
@pytest.mark.sample(12)
def test_in_every_family(family: Family, side: str) -> None:
    """Whatever side the tokenizer's file names."""
    for role in roles(family):
        if role in KINDS and not (role == "causal" and family.kind != "decoder"):
            model = build(family, role, torch.float32)  # in float64 fully masked rows become NaN
            for kind in KINDS[role]:
                check(model, kind, side)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("entry", TRIED, ids=str)
@pytest.mark.sample(8)
def test_in_families_that_treat_padding_otherwise(entry: identity.Entry, side: str) -> None:
    """Those that padding changes on the right, on the left or on both sides, and that remember it."""
    model = identity.build(entry)
    for kind in KINDS[entry.role]:
        if entry.role == "choice" and padding_side(model) is None:
            with pytest.raises(DeltuneError, match=f"{entry.class_name} answers otherwise beside padding"):
                check(model, kind, side)
        else:
            check(model, kind, side)


SIDES = {
    "GPT2ForSequenceClassification": "right",
    "BertForTokenClassification": "right",
    "BartForSequenceClassification": "right",
    "MambaForCausalLM": "right",
    "XLNetForSequenceClassification": "left",
    "RoFormerForMultipleChoice": "left",
    "FNetForSequenceClassification": None,
    "ConvBertForMultipleChoice": None,
}
PROMPTS = {"GPT2LMHeadModel": True, "BloomForCausalLM": True, "MambaForCausalLM": True, "OPTForCausalLM": True,
           "BartForCausalLM": False, "RwkvForCausalLM": False}  # fmt: skip


def test_the_side_is_measured() -> None:
    """As the families' own sources have it: XLNet reads the last column, FNet has no mask, ConvBERT convolves."""
    entries = {entry.class_name: entry for entry in identity.entries()}
    assert {name: padding_side(identity.build(entries[name])) for name in SIDES} == SIDES
    assert {name: supports_left_padding(identity.build(entries[name])) for name in PROMPTS} == PROMPTS


@pytest.mark.parametrize(
    "options", [{"repetition_penalty": 5.0}, {"no_repeat_ngram_size": 1}, {"min_length": 9}], ids=str
)
def test_options_that_look_at_the_prompt_see_no_padding(options: dict[str, Any]) -> None:
    """Padded with the end-of-text token, which would be penalised, or counted."""
    model, tokens, kind = (
        build(FAMILIES["gpt2"], "causal"),
        tokenizer("left", framed=False),
        generation.CAUSAL_GENERATION,
    )
    tokens.pad_token = tokens.eos_token
    with torch.no_grad():
        model.lm_head.weight[2] = model.lm_head.weight[40:50].mean(0) * 3  # the end is likely
    limits = TaskOptions(max_length=24, max_target_length=6, generate_kwargs=options)
    encoded = kind.encode(tokens, model, {"source": list(TEXTS)}, limits, False)
    in_batch, alone = (
        kind.predict(InferenceContext(model, tokens, (), limits, n), encoded).predictions for n in (8, 1)
    )
    assert in_batch == alone


DECODERS = ("Bart", "MBart", "Marian", "Pegasus", "BlenderbotSmall", "Whisper", "TrOCR", "Llama", "Mixtral", "Falcon")


@pytest.mark.parametrize("name", DECODERS)
@torch.no_grad()
def test_language_models_learn_the_next_token(name: str) -> None:
    """Of the classes whose own loss compares tokens with themselves, it is not used; others add at most a router's."""
    (entry,) = (entry for entry in identity.entries() if entry.class_name == f"{name}ForCausalLM")
    model = identity.build(entry)
    tokens = torch.tensor([[5, 6, 7, 8, 9, 10, 11], [12, 13, 14, 15, 16, 17, 18]])
    logits = model(input_ids=tokens).logits
    next_tokens = functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    assert causal_loss(model, {"input_ids": tokens, "labels": tokens}).item() == pytest.approx(
        next_tokens.item(), rel=0.02
    )
