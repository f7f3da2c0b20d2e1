"""One row per method: every name of the catalogue, and every variant that computes something else.

A row says what a family must have for it, by a property; where the family lacks it, the law is a clear refusal.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest

from deltune.methods.registry import GROUPS

from .families import FAMILIES, SITES, Family


@dataclass(frozen=True)
class Need:
    """A property of the family, and what the refusal must say where it is missing."""

    name: str
    holds: Callable[[Family], bool]
    says: str
    bare: bool = True  # the bare base model lacks it too, not only the class the family is mostly used as


INTERFACE = Need("interface", lambda f: f.interface, "attention interface")
ABSOLUTE = Need("absolute", lambda f: f.positions == "absolute", "absolute position embeddings")
OWN_LAYERS = Need("own layers", lambda f: not f.shared, "shares one set of modules between its layers")
BIAS = Need("bias", lambda f: bool(f.biases), r"no bias in .*tensors there: .*norm\.gain")
LAYER_BIAS = Need("layer bias", lambda f: bool(f.biases), r"no norm\.bias or linear\.bias in layers; .*norm\.gain")
LINEAR_BIAS = Need("linear bias", lambda f: bool({*f.biases} - {"norm"}), r"no linear\.bias in layers; .*norm\.gain")
NORM_BIAS = Need("norm bias", lambda f: "norm" in f.biases, "no norm of this model has a bias")
QUERY_BIAS = Need("query bias", lambda f: "query" in f.biases, "no query of this model has a bias")
UP_BIAS = Need("ffn_up bias", lambda f: "ffn_up" in f.biases, "no ffn_up of this model has a bias")
UP_BIAS_OF_FFN = Need(
    "bias of the FFN", lambda f: "ffn_up" in f.biases, r"no linear\.bias in layers of the ffn; .*norm\.gain"
)


ONE_STACK = Need("one stack", lambda f: len(f.stacks) == 1, "a model with one stack of layers")
NUMBERED = Need("numbered", lambda f: f.numbered, "absolute positions, which the .* of this model does not have")
VALUE_BIAS = Need("value bias", lambda f: "value" in f.biases, "no value of this model has a bias")
EVERY_BIAS = Need("every bias", lambda f: {*f.biases} >= {*SITES} - {"norm"}, "no bias")
GATED = Need("gated", lambda f: f.gated, "no FFN of this model shows a gate")
HEADS = Need("heads", lambda f: f.interface, "an attention whose heads can be seen")
NO_WORDS = Need("labels", lambda f: f.kind == "encoder", "answers in words", bare=False)


@dataclass(frozen=True)
class Row:
    """A method.

    identity: it leaves the outputs as they are until it is trained; None: to rounding. merges: it folds into the
    weights, where the family has what `merging` says. trains: it has parameters.
    """

    text: str
    identity: bool | None = True
    merges: bool = False
    trains: bool = True
    needs: tuple[Need, ...] = ()
    merging: tuple[Need, ...] = ()

    @property
    def traits(self) -> tuple[str, ...]:
        """The groups of its methods, with which families are paired."""
        return tuple(group for group, names in GROUPS.items() if {*names} & {*re.findall(r"\w+", self.text)})

    def lacking(self, family: Family) -> list[Need]:
        return [need for need in self.needs if not need.holds(family)]


ROWS = (
    Row("full", merges=True),
    Row("head", merges=True),
    Row("layernorm", merges=True),
    Row("layernorm(terms='gain')", merges=True),
    Row("layernorm(terms='bias')", merges=True, needs=(NORM_BIAS,)),
    Row("layernorm(of='attention')", merges=True),
    Row("layernorm(of='ffn')", merges=True),
    Row("layernorm(layers='lower half')", merges=True, needs=(OWN_LAYERS,)),
    Row("layernorm(embedding=False, final=False)", merges=True),
    Row("bitfit", merges=True, needs=(BIAS,)),
    Row("bitfit(which='layers')", merges=True, needs=(LAYER_BIAS,)),
    Row("bitfit(which='linear')", merges=True, needs=(LINEAR_BIAS,)),
    Row("bitfit(which='query+ffn_up')", merges=True, needs=(QUERY_BIAS, UP_BIAS)),
    Row("bitfit(which='ffn')", merges=True, needs=(UP_BIAS_OF_FFN,)),
    Row("bitfit(which='norm')", merges=True, needs=(NORM_BIAS,)),
    Row("adapter(rank=4)"),
    Row("adapter(rank=4, bias=True, layer_norm=True, activation='gelu')"),
    Row("adapter(style='pfeiffer', rank=4)"),
    Row("adapter(style='pfeiffer', rank=4, bias=True, layer_norm=True)"),
    Row("parallel_adapter(rank=4)"),
    Row("parallel_adapter(at='attention', rank=4, bias=True)"),
    Row("parallel_adapter(at='heads', rank=4)"),
    Row("parallel_adapter(at=('ffn', 'attention', 'heads'), rank=4, scale='learned(4)', layer_norm=True)"),
    Row("parallel_adapter(at=('ffn', 'attention'), rank=4, x='residual')"),
    Row("scaled_parallel_adapter(rank=4)"),
    Row("scaled_parallel_adapter(rank=4, scale='learned', x='residual')"),
    Row("prefix(length=3)", identity=False, needs=(INTERFACE,)),
    Row("prefix(length=3, reparameterise=8)", identity=False, needs=(INTERFACE,)),
    Row("prefix(length=3, gate=False)", identity=False, needs=(INTERFACE,)),
    Row("prefix(length=3, shift_positions=True)", identity=False, needs=(INTERFACE, NUMBERED)),
    Row("prompt(length=3)", identity=False),
    Row("prompt(length=3, init_from=(7, 8))", identity=False),
    Row("prompt(length=3, positions='none')", identity=False, needs=(ABSOLUTE,)),
    Row("lora(rank=2)", merges=True),
    *(Row(f"lora(rank=2, at={site!r}, scale=3)", merges=True) for site in ("query", "key", "value")),
    *(Row(f"lora(rank=2, at={site!r})", merges=True) for site in ("output", "ffn_up", "ffn_down")),
    Row("lora(rank=2, at='ffn', alpha=6)", merges=True),
    Row("lora(rank=2, at=('gate_proj', 'up_proj'))", merges=True, needs=(GATED,)),
    Row("trainable_tokens(tokens=(5, 7))", merges=True),
    Row("dora(rank=2)", merges=True),
    Row("dora(rank=2, alpha=6, at='ffn')", merges=True),
    Row("adalora(rank=2, initial_rank=3, orthogonality=0)", merges=True),  # a penalty is of the step, not of the rows
    Row("hira(rank=2)", merges=True),
    Row("glora(rank=2)", merges=True),
    Row("glora(rank=2, bias='vector')", merges=True),
    Row("deft(rank=2)", merges=True),
    Row("peanut(rank=2)", merges=True),
    Row("peanut(rank=2, depth=1, activation='tanh', scale=2)", merges=True),
    Row("delora(rank=2)", merges=True),
    Row("osf", merges=True),
    Row("loha(rank=2, scale=2)", merges=True),
    Row("lokr(rank=1)", merges=True),
    Row("lokr(rank=1, factor=2, decompose_both=True)", merges=True),
    Row("miss(rank=3)", merges=True),
    Row("miss(rank=4, mini_rank=2)", merges=True),
    Row("gralora(rank=2)", merges=True),
    Row("c3a(block_size=2)", merges=True),
    Row("fourierft(frequencies=20)", merges=True),
    Row("shira(rank=1)", merges=True),
    Row("waveft(frequencies=20)", merges=True),
    Row("supertuning(sparsity=0.9, largest=False)", merges=True),
    Row("vera(rank=4)", merges=True),
    Row("randlora(rank=4)", merges=True),
    Row("vblora(rank=2, vectors=6, length=2)", identity=False, merges=True),
    Row("unilora(rank=2, length=20)", identity=False, merges=True),
    Row("tinylora(parameters=3)", merges=True),
    Row("tinylora(parameters=3, tied=True)", merges=True),
    Row("nola(rank=2, bases=5)", merges=True),
    Row("lora_xs(rank=2)", identity=False, merges=True),
    Row("adamss(rank=2, clusters=3, singular_values=6)", merges=True),
    Row("frod(density=0.05)", merges=True),
    Row("svft", merges=True),
    Row("svft(band=2)", merges=True),
    Row("lora_fa(rank=2)", merges=True),
    Row("poly(rank=2, skills=3, splits=2)"),
    Row("mtl_lora(rank=2, ups=2, scale=2)"),
    Row("xlora(number=3, rank=2)", needs=(ONE_STACK,)),
    Row("xlora(number=3, rank=2, depth=2, width=4, by_place=True, top_k=2, first=0.5)", needs=(ONE_STACK,)),
    Row("mica(rank=2)", merges=True),
    Row("pissa(rank=2, scale=2)", merges=True),
    Row("olora(rank=2)", merges=True),
    Row("oft(block_size=4)", merges=True),
    Row("oft(block_size=4, terms=0, shared_block=True)", merges=True),
    Row("boft(block_size=4)", merges=True),
    Row("boft(block_size=4, factors=2)", merges=True),
    Row("hra(rank=2)", identity=None, merges=True),
    Row("psoft(rank=3)", merges=True),
    Row("psoft(rank=3, scales=False)", merges=True),
    *(Row(f"road(variant={n}, group_size=2)", merges=True) for n in (1, 2, 4)),
    Row("ssf", merges=True, merging=(EVERY_BIAS,)),
    Row("beft", merges=True, merging=(VALUE_BIAS,)),
    Row("compacter(rank=4, divisions=2)"),
    # a row of each batch has the invocation; queries and keys behind it reach no head that reads the first token
    Row("alora(invocation=(26, 46), rank=2, at='value')", needs=(ONE_STACK,)),
    Row("loreft(rank=2)"),
    Row("loreft(rank=2, positions='first 1 + last 2')", needs=(ONE_STACK,)),
    Row("Modification('value', HiRA(2), positions='first 1 + last 2')", needs=(ONE_STACK,)),
    Row(
        "Modification('query', Mix(2, 3)) + Modification('value', Mix(2, 3, softmax=True))", identity=False, merges=True
    ),
    Row("Modification('query', AdapterFusion(2, 3, 4))", identity=False),
    Row("Modification('query', Arrow(3, 2, top_k=2))", identity=False, trains=False),
    Row("lora(rank=2) + dora(rank=2) + hira(rank=2) + oft(block_size=4)", merges=True),
    Row("mam(length=3, rank=4)", identity=False, needs=(INTERFACE,)),
    Row("prefix(length=3) + layernorm", identity=False, needs=(INTERFACE,)),
    Row("prefix(length=3) + lora(rank=2) + layernorm", identity=False, needs=(INTERFACE,)),
    Row("lora(rank=2, at='output') + layernorm", merges=True),
    Row("p_tuning_v2(length=3)", identity=False, needs=(INTERFACE,)),
    Row("prefix_layernorm(length=3)", identity=False, needs=(INTERFACE,)),
    Row("multi_head_parallel_adapter(length=3)", needs=(INTERFACE,)),
    Row("multi_head_parallel_adapter(length=3, own_down=True)", needs=(HEADS,)),
    Row("unipelt(length=2, rank=2, bottleneck=4)", identity=False, needs=(INTERFACE,)),
    Row("ia3", merges=True),
    Row("three_vectors", needs=(NO_WORDS,)),
    Row("ladder(width=4, heads=2)", needs=(ONE_STACK,)),
    Row("diff_pruning(sparsity=0.02)", merges=True),
    Row("apet(lora(rank=2, at='output') + layernorm, parameters=41)", merges=True),
    Row("apet(adapter(rank=4, bias=True, activation='gelu'), parameters=57, pattern='adjacent')"),
    Row("apet(adapter(rank=4, activation='gelu'), parameters=57, pattern='adjacent', along='columns')"),
    Row("apet(ia3, parameters=20)", merges=True),
    Row("apet(prefix(length=3), parameters=57)", identity=False, needs=(INTERFACE,)),
    Row("apet(layernorm(embedding=False, final=False), parameters=31, pattern='adjacent')", merges=True),
)

METHODS = {row.text: row for row in ROWS}


def product(*axes: Iterable[Any]) -> list[Any]:
    """The product of the parameters of a law, each case with a readable name."""
    return [pytest.param(*case, id=", ".join(map(_named, case))) for case in itertools.product(*axes)]


def _named(value: Any) -> str:
    """A value in the name of a case."""
    if isinstance(value, Row):
        return value.text
    return " ".join(value) if isinstance(value, tuple) else getattr(value, "__name__", str(value))


def cells(*texts: str, families: Callable[[Family], bool] = lambda f: True) -> pytest.MarkDecorator:
    """Parametrise `family` and `row`: every method (or those of the texts) on every family that can have it."""
    chosen = [METHODS[text] for text in texts] or list(ROWS)
    pairs = [(f, row) for f in FAMILIES.values() if families(f) for row in chosen if not row.lacking(f)]
    return _marked(pairs)


def refused() -> pytest.MarkDecorator:
    """Parametrise `family` and `row`: every method on every family that lacks something it needs."""
    return _marked([(f, row) for f in FAMILIES.values() for row in ROWS if row.lacking(f)])


def _marked(pairs: list[tuple[Family, Row]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("family", "row"), pairs, ids=[f"{f.name}: {row.text}" for f, row in pairs])
