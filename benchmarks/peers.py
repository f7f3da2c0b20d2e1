"""The methods that PEFT has too: our expression beside its configuration, on models that share their frozen weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import deltune
from deltune.studies.jobs.timed_model import TimedModel

from .shapes import Shape, batch, build


@dataclass(frozen=True)
class Pair:
    """The same method in both libraries. peft: PEFT's configuration for a shape, None where it cannot."""

    name: str
    ours: str
    peft: Callable[[Shape], Any]


def _config(kind: str, **options: Any) -> Any:
    import peft

    return getattr(peft, kind)(**options)


def _inner(shape: Shape) -> dict[str, Any]:
    """IA3 as in its paper, where PEFT's default for BERT also takes the output of the attention."""
    if shape.kind == "decoder":
        return {}
    down = r".*layer\.\d+\.output\.dense"
    return {"target_modules": rf"{down}|.*\.(key|value)", "feedforward_modules": down}


PAIRS = (
    Pair("lora, r=8", "lora(rank=8)", lambda s: _config("LoraConfig", task_type=s.task, r=8, lora_alpha=8)),
    Pair(
        "layernorm",
        "layernorm",
        lambda s: _config(
            "LNTuningConfig", task_type=s.task, target_modules=["LayerNorm"] if s.kind == "encoder" else None
        ),
    ),
    Pair(
        "prefix, l=16",
        "prefix(length=16)",
        lambda s: _config("PrefixTuningConfig", task_type=s.task, num_virtual_tokens=16),
    ),
    Pair("ia3", "ia3", lambda s: _config("IA3Config", task_type=s.task, **_inner(s))),
    Pair(
        "prompt, l=20",
        "prompt(length=20)",
        lambda s: _config("PromptTuningConfig", task_type=s.task, num_virtual_tokens=20),
    ),
    Pair(
        "biases of linears",
        "bitfit(which='linear')",
        lambda s: (
            _config("BeftConfig", task_type=s.task, target_modules=r".*layer\.\d+.*(query|key|value|dense)")
            if s.kind == "encoder"
            else None  # BEFT takes no transposed linears
        ),
    ),
)


def _field(ours: str, kind: str, **options: Any) -> Pair:
    at = ["query", "value"]
    return Pair(ours, ours, lambda s: _config(kind, task_type=s.task, target_modules=at, **options))


FIELD = (
    *(pair for pair in PAIRS if pair.name.startswith(("layernorm", "prefix", "ia3", "prompt"))),
    Pair(
        "trainable_tokens",
        "trainable_tokens(tokens=(5, 7))",
        lambda s: _config("TrainableTokensConfig", task_type=s.task, token_indices=[5, 7]),
    ),
    _field("lora(rank=8)", "LoraConfig", r=8, lora_alpha=8),
    _field("dora(rank=8)", "LoraConfig", r=8, lora_alpha=8, use_dora=True),
    _field("pissa(rank=8)", "LoraConfig", r=8, lora_alpha=8, init_lora_weights="pissa"),
    _field("olora(rank=8)", "LoraConfig", r=8, lora_alpha=8, init_lora_weights="olora"),
    _field("mica(rank=8)", "LoraConfig", r=8, lora_alpha=8, init_lora_weights="mica"),
    _field("adalora(rank=8, initial_rank=12)", "AdaLoraConfig", init_r=12, target_r=8, total_step=1000),
    _field("vera(rank=64)", "VeraConfig", r=64),
    _field("randlora(rank=32)", "RandLoraConfig", r=32),
    _field("vblora(rank=4, vectors=256, length=64)", "VBLoRAConfig", r=4, num_vectors=256, vector_length=64),
    _field("unilora(rank=8, length=1000)", "UniLoraConfig", r=8, theta_d_length=1000),
    _field("tinylora(rank=8, parameters=16)", "TinyLoraConfig", r=8, u=16),
    _field("loha(rank=8)", "LoHaConfig", r=8, alpha=8),
    _field("lokr(rank=8)", "LoKrConfig", r=8, alpha=8),
    _field("hira(rank=8)", "HiraConfig", r=8),
    _field("glora(rank=4)", "GloraConfig", r=4),
    _field("deft(rank=8)", "DeftConfig", r=8),
    _field("peanut(rank=16)", "PeanutConfig", r=16),
    _field("delora(rank=8)", "DeloraConfig", r=8),
    _field("oft(block_size=32)", "OFTConfig", oft_block_size=32),
    _field("boft(block_size=4)", "BOFTConfig", boft_block_size=4),
    _field("hra(rank=8)", "HRAConfig", r=8),
    _field("psoft(rank=16)", "PsoftConfig", r=16, psoft_alpha=16),
    _field("road(group_size=64)", "RoadConfig", group_size=64),
    _field("c3a(block_size=64)", "C3AConfig", block_size=64),
    _field("fourierft(frequencies=1000)", "FourierFTConfig", n_frequency=1000),
    _field("waveft(frequencies=1000)", "WaveFTConfig", n_frequency=1000),
    _field("miss(rank=64)", "MissConfig", r=64),
    _field("gralora(rank=32)", "GraloraConfig", r=32, gralora_k=2),
    _field("adamss(rank=2, clusters=8)", "AdamssConfig", r=100, num_subspaces=8, subspace_rank=2),
    _field("frod(density=0.02)", "FrodConfig", sparse_rate=0.02, progressbar=False),
    _field("osf", "OSFConfig"),
    _field("shira(rank=8)", "ShiraConfig", r=8),
    _field("supertuning(sparsity=0.98)", "SupertuningConfig", sparsity=0.98),
    _field("beft(at=('query', 'value'))", "BeftConfig"),
)
"""Methods that PEFT has, mostly at query and value of an encoder, with its defaults where an expression has none."""


def theirs(pair: Pair, shape: Shape, like: nn.Module) -> TimedModel | None:
    """PEFT's side; None where PEFT cannot."""
    import peft

    config = pair.peft(shape)
    if config is None:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(build(shape, like), config)
    return TimedModel(model, *batch(shape), [p for p in model.parameters() if p.requires_grad])


def ours(method: str, shape: Shape, like: nn.Module) -> TimedModel:
    """Our side."""
    model = build(shape, like)
    tuned = deltune.attach(model, method)
    return TimedModel(model, *batch(shape), list(tuned.trainable_parameters()))


def bare(shape: Shape, like: nn.Module) -> TimedModel:
    """The model without any method; nothing trains."""
    return TimedModel(build(shape, like).requires_grad_(False), *batch(shape), [])


def full(shape: Shape) -> TimedModel:
    """Everything trains, on a model of its own."""
    model = build(shape)
    return TimedModel(model, *batch(shape), list(model.parameters()))


def merged(method: str, shape: Shape, like: nn.Module) -> TimedModel:
    """Ours, folded into the weights."""
    made = ours(method, shape, like)
    tuned = deltune.tuned(made.model)
    with torch.no_grad():
        for parameter in tuned.trainable_parameters():
            parameter.add_(0.01)
    tuned.merge()
    return made
