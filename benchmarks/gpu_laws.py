"""Laws of a delta on an accelerator: what must be exact is, and what is rounded differs by rounding alone.

Every figure is a largest difference, relative to the largest value of what it is compared with. Random weights.
"""

from __future__ import annotations

import contextlib
import gc
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)

import deltune

from .frame import Piece
from .rows import Row, Target, missing

METHODS = (
    "layernorm",
    "bitfit",
    "lora(rank=4)",
    "prefix(length=4)",
    "prompt(length=4)",
    "parallel_adapter(rank=4)",
    "ia3",
    "mam(length=4, rank=4)",
    "prefix_layernorm(length=4)",
    "three_vectors",
    "diff_pruning(sparsity=0.01)",
)
MIXED = ("layernorm", "lora(rank=4)", "prefix(length=4)", "parallel_adapter(rank=4)")
ROUNDING = {"float32": 2.0**-23, "bf16": 2.0**-7, "autocast": 2.0**-7}
"""Precision -> distance from 1 to the next number of the type that the products are computed in."""
EXACT = Target(0.0)


@dataclass(frozen=True)
class Family:
    """A model type of transformers and the kind of its head."""

    name: str
    kind: str  # causal, seq2seq or encoder
    sizes: Callable[[int], dict[str, Any]]


def _usual(width: int) -> dict[str, Any]:
    return {
        "hidden_size": width, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 2 * width,
        "vocab_size": 256, "max_position_embeddings": 128, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
    }  # fmt: skip


def _grouped(width: int) -> dict[str, Any]:
    return {**_usual(width), "num_key_value_heads": 2, "head_dim": width // 4}


def _gpt2(width: int) -> dict[str, Any]:
    return {
        "n_embd": width, "n_layer": 2, "n_head": 4, "vocab_size": 256, "n_positions": 128, "pad_token_id": 1,
        "bos_token_id": 0, "eos_token_id": 2,
    }  # fmt: skip


def _t5(width: int) -> dict[str, Any]:
    return {
        "d_model": width, "d_kv": width // 4, "d_ff": 2 * width, "num_layers": 2, "num_heads": 4, "vocab_size": 256,
        "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
    }  # fmt: skip


def _bart(width: int) -> dict[str, Any]:
    return {
        "d_model": width, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 2 * width, "decoder_ffn_dim": 2 * width, "vocab_size": 256,
        "max_position_embeddings": 128, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
        "decoder_start_token_id": 2, "forced_eos_token_id": None,
    }  # fmt: skip


FAMILIES = (
    Family("bert", "encoder", _usual),
    Family("roberta", "encoder", _usual),
    Family("modernbert", "encoder", lambda w: {**_usual(w), "cls_token_id": 0, "sep_token_id": 2}),
    Family("gpt2", "causal", _gpt2),
    Family("llama", "causal", _grouped),
    Family("qwen3", "causal", _grouped),
    Family("bart", "seq2seq", _bart),
    Family("t5", "seq2seq", _t5),
)
AUTO = {
    "causal": AutoModelForCausalLM,
    "seq2seq": AutoModelForSeq2SeqLM,
    "encoder": AutoModelForSequenceClassification,
}


@contextlib.contextmanager
def full_float32() -> Iterator[None]:
    """Compute float32 products without TF32 inside the block."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def build(family: Family, device: str, precision: str, width: int) -> PreTrainedModel:
    """Make a family's model of random weights, the same on every device."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family.name, **family.sizes(width))
    model: nn.Module = AUTO[family.kind].from_config(config)
    model.to(device=device, dtype=torch.bfloat16 if precision == "bf16" else torch.float32).eval()
    assert isinstance(model, PreTrainedModel)
    return model


def batch(family: Family, device: str) -> dict[str, torch.Tensor]:
    """Make four rows of twelve tokens, padded on the right, with labels."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 256, (4, 12), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 9:] = mask[3, 5:] = 0
    ids = ids.masked_fill(mask == 0, 1)
    labels = torch.tensor([0, 1, 0, 1]) if family.kind == "encoder" else ids.masked_fill(mask == 0, -100)
    return {k: v.to(device) for k, v in {"input_ids": ids, "attention_mask": mask, "labels": labels}.items()}


def randomise(tuned: deltune.Tuned, seed: int) -> None:
    """Move every trained tensor away from where it starts, by the same amounts on every device."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in tuned.trainable_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(0.05 * noise.to(device=parameter.device, dtype=parameter.dtype))


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the largest difference of two tensors, relative to the largest value of the second."""
    a, b = a.detach().double().cpu(), b.detach().double().cpu()
    return ((a - b).abs().max() / b.abs().max().clamp_min(1e-30)).item()


class Law:
    """One family in one precision on one device: makes models and passes, and collects rows."""

    def __init__(self, family: Family, device: str, precision: str, width: int) -> None:
        self.family, self.device, self.precision, self.width = family, device, precision, width
        self.inputs = batch(family, device)
        self.rows: list[Row] = []
        # Sums of up to a thousand products in another order differ by about the root of their number.
        self.bound = Target(32 * ROUNDING[precision])

    def model(self, device: str | None = None) -> PreTrainedModel:
        return build(self.family, device or self.device, self.precision, self.width)

    def logits(self, model: PreTrainedModel, inputs: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
        with torch.no_grad(), self.cast(model.device.type):
            return model(**(inputs or self.inputs)).logits.float()

    def cast(self, device: str) -> contextlib.AbstractContextManager[Any]:
        on = self.precision == "autocast"
        return torch.autocast(device, torch.bfloat16) if on else contextlib.nullcontext()

    def add(self, what: str, figure: float, target: Target | None) -> None:
        self.rows.append(Row(f"{self.family.name}, {self.precision}: {what}", figure, target, unit=""))

    def check(self, what: str, work: Callable[[], None]) -> None:
        """Run one check; what it raises becomes a row that says so, so that the others still run."""
        try:
            work()
        except Exception as error:
            text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            row = missing(f"{self.family.name}, {self.precision}: {what}", text[:300])
            self.rows.append(row)
        gc.collect()

    def devices_agree(self, method: str | None) -> None:
        """The outputs here beside those of the CPU; of the bare model, this is what rounding alone makes."""
        outputs = []
        for device in (self.device, "cpu"):
            model = self.model(device)
            if method is not None:
                randomise(deltune.attach(model, method), 2)
            inputs = {name: tensor.to(device) for name, tensor in self.inputs.items()}
            outputs.append(self.logits(model, inputs))
        self.add(f"{method or 'bare model'}, {self.device} beside cpu", difference(*outputs), None)

    def comes_and_goes(self, method: str) -> None:
        """Attach, save, load and detach: all exact."""
        model = self.model()
        before, bare = {k: v.clone() for k, v in model.state_dict().items()}, self.logits(model)
        tuned = deltune.attach(model, method)
        randomise(tuned, 3)
        expected = self.logits(model)
        with tempfile.TemporaryDirectory() as folder:
            tuned.save(Path(folder) / "delta")
            tuned.detach()
            after = model.state_dict()
            changed = sum(not torch.equal(before[name], after[name]) for name in before)
            self.add(f"{method}, tensors that detach left changed", changed, EXACT)
            self.add(f"{method}, outputs after detach", difference(self.logits(model), bare), EXACT)
            deltune.load(model, Path(folder) / "delta")
            self.add(f"{method}, outputs after load", difference(self.logits(model), expected), EXACT)

    def merges(self, method: str) -> None:
        model = self.model()
        tuned = deltune.attach(model, method)
        randomise(tuned, 4)
        expected = self.logits(model)
        self.add(f"{method}, outputs after merge", difference(self.logits(tuned.merge()), expected), self.bound)

    def mixes(self) -> None:
        """Each row of a mixed batch beside the same batch with that delta alone."""
        model = self.model()
        for i, method in enumerate(MIXED):
            tuned = deltune.attach(model, method, name=f"d{i}")
            randomise(tuned, 5 + i)
        alone = []
        for i in range(len(MIXED)):
            tuned.use(f"d{i}")
            alone.append(self.logits(model)[i])
        with tuned.rows([f"d{i}" for i in range(len(MIXED))]):
            mixed = self.logits(model)
        self.add("four methods in one batch beside each alone", difference(mixed, torch.stack(alone)), self.bound)

    def gradients(self, method: str) -> None:
        """Gradients are there and finite, and the same with gradient checkpointing."""
        model = self.model()
        tuned = deltune.attach(model, method)
        randomise(tuned, 6)
        model.train()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0

        def run() -> list[torch.Tensor]:
            model.zero_grad(set_to_none=True)
            torch.manual_seed(0)  # the gates of diff pruning are drawn in every pass
            with self.cast(self.device.partition(":")[0]):
                loss = model(**self.inputs).loss
            loss.backward()
            return [p.grad.clone() for p in tuned.trainable_parameters() if p.grad is not None]

        plain = run()
        lost = sum(1 for _ in tuned.trainable_parameters()) - len(plain)
        bad = sum(not torch.isfinite(gradient).all().item() for gradient in plain)
        self.add(f"{method}, gradients that are missing or not finite", lost + bad, EXACT)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        again = run()
        worst = max(difference(a, b) for a, b in zip(again, plain, strict=True))
        self.add(f"{method}, gradients with checkpointing", worst, self.bound)

    def generates(self, method: str) -> None:
        """Tokens with a cache beside those without one, greedy and with beams."""
        model = self.model()
        randomise(deltune.attach(model, method), 8)
        ids = {name: self.inputs[name][:1] for name in ("input_ids", "attention_mask")}
        for beams in (1, 3):
            with torch.no_grad(), self.cast(self.device.partition(":")[0]):
                options: dict[str, Any] = {**ids, "max_new_tokens": 8, "num_beams": beams, "do_sample": False}
                with_cache, without = (model.generate(**options, use_cache=cached) for cached in (True, False))  # type: ignore[operator]
            length = min(with_cache.shape[1], without.shape[1])
            different = (with_cache[:, :length] != without[:, :length]).sum().item()
            # In half precision a tie of two words may fall either way, so this is a law of float32 alone.
            target = EXACT if self.precision == "float32" else None
            self.add(f"{method}, {beams} beam{'s' * (beams > 1)}: tokens that the cache changes", different, target)

    def compiles(self, method: str) -> None:
        """The compiled model beside the model as it is, in one graph."""
        torch.compiler.reset()
        model = self.model()
        randomise(deltune.attach(model, method), 9)
        expected = self.logits(model)
        model.compile(fullgraph=True)
        self.add(f"{method}, compiled in one piece", difference(self.logits(model), expected), self.bound)


def _exists(model: PreTrainedModel, method: str) -> bool:
    """Whether a family can have a method: Llama has no biases, and three vectors need a head of labels."""
    try:
        deltune.count(model, method)
    except deltune.DeltuneError:
        return False
    return True


def measure(
    family: Family, device: str, precision: str, width: int, methods: Sequence[str] = METHODS, compiled: bool = True
) -> list[Row]:
    """Check every law of one family in one precision."""
    law = Law(family, device, precision, width)
    methods = [method for method in methods if _exists(law.model("cpu"), method)]
    with full_float32():
        law.check("bare model", lambda: law.devices_agree(None))
        for method in methods:
            law.check(f"{method}, beside cpu", lambda m=method: law.devices_agree(m))  # type: ignore[misc]
            law.check(f"{method}, attach, save, load, detach", lambda m=method: law.comes_and_goes(m))  # type: ignore[misc]
            law.check(f"{method}, gradients", lambda m=method: law.gradients(m))  # type: ignore[misc]
        for method in ("lora(rank=4)", "layernorm"):
            law.check(f"{method}, merge", lambda m=method: law.merges(m))  # type: ignore[misc]
        law.check("four methods in one batch", law.mixes)
        if family.kind != "encoder":
            for method in MIXED:
                law.check(f"{method}, generate", lambda m=method: law.generates(m))  # type: ignore[misc]
        if compiled:
            for method in MIXED[:2]:
                law.check(f"{method}, compiled", lambda m=method: law.compiles(m))  # type: ignore[misc]
    return law.rows


def pieces(device: str, width: int = 256, compiled: bool = True) -> list[Piece]:
    return [
        Piece(
            f"laws: {family.name}, {precision}",
            lambda f=family, p=precision: measure(f, device, p, width, compiled=compiled),  # type: ignore[misc]
            12.0,
        )
        for family in FAMILIES
        for precision in ROUNDING
    ]
