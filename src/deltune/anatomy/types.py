"""What a transformer is made of: layers, attentions, projections, FFNs, norms, embeddings, pooler, head.

Plain values; observe.py reads them off one traced forward pass. A path is the dotted name of a sub-module.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

StackName = Literal["encoder", "decoder"]
Kind = Literal["self", "cross"]
Place = Literal["pre", "post", "output", "query", "key", "inner", "embedding", "final", "unknown"]


@dataclass(frozen=True)
class Columns:
    """Part of a fused projection's outputs: of `groups` equal blocks, the columns start:stop of each.

    GPT-2's key: 1 group, d:2d. GPT-NeoX's key: one group a head, d_h:2d_h.
    """

    groups: int
    start: int
    stop: int


@dataclass(frozen=True)
class Linear:
    """A projection in_width -> out_width; `columns`: None when it is all of it; `transposed`: weight (in, out)."""

    path: str
    in_width: int
    out_width: int
    bias: bool
    transposed: bool = False
    columns: Columns | None = None


@dataclass(frozen=True)
class Attention:
    """One attention. query, key, value and the head facts are None where the family hides them (no interface).

    `reads`: the module whose first input is x, what the attention reads. `pre`, `post`: paths of its norms.
    """

    path: str
    kind: Kind
    reads: str
    output: Linear
    query: Linear | None = None
    key: Linear | None = None
    value: Linear | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_width: int | None = None
    value_width: int | None = None
    causal: bool = False
    pre: str | None = None
    post: str | None = None


@dataclass(frozen=True)
class FFN:
    """A feed-forward network: x -> inputs -> activation (times a gate) -> output."""

    path: str
    reads: str
    inputs: tuple[Linear, ...]
    output: Linear
    gated: bool
    pre: str | None = None
    post: str | None = None


@dataclass(frozen=True)
class Norm:
    """A norm. `of`: the sub-layers it belongs to.

    place: pre (a sub-layer reads it), post (normalises the residual sum), output (normalises the sub-layer's output
    before the sum), query, key, inner, embedding, final.
    """

    path: str
    width: int
    gain: bool
    bias: bool
    place: Place
    of: tuple[str, ...] = ()


@dataclass(frozen=True)
class Layer:
    """One layer of a stack. `passes` > 1: the same modules run that many times (ALBERT)."""

    stack: StackName
    index: int
    path: str
    attentions: tuple[Attention, ...]
    ffns: tuple[FFN, ...]
    norms: tuple[Norm, ...]
    passes: int = 1


@dataclass(frozen=True)
class Stack:
    """A stack of layers. `entry`: the module that takes input_ids / inputs_embeds; `container`: the innermost module
    around its layers; `width`: of the hidden states; `position_ids`: the entry takes them."""

    name: StackName
    entry: str
    container: str
    depth: int
    width: int
    causal: bool
    words: str | None = None
    positions: str | None = None
    position_ids: bool = False


@dataclass(frozen=True)
class Tensor:
    """A parameter. area: embedding, layers, pooler, final, vocabulary, head, other.

    role: norm.gain, norm.bias, linear.weight, linear.bias, embedding, weight, bias. `layer`: index into Anatomy.layers.
    `aliases`: its other names; `common`: its module reads nothing of the batch (a table of relative positions);
    `direct`: the model reads it past the forward of its module; `computed`: a table that the model's class fills and
    gives no gradient (sinusoids), so that nothing can train it.
    """

    name: str
    shape: tuple[int, ...]
    area: str
    role: str
    layer: int | None = None
    aliases: tuple[str, ...] = ()
    common: bool = False
    direct: bool = False
    computed: bool = False

    @property
    def numel(self) -> int:
        total = 1
        for size in self.shape:
            total *= size
        return total


@dataclass(frozen=True)
class Anatomy:
    """The whole model. `base`: path of the base model inside the model given ("" when it is the base model itself).

    `answers`: what the model gives: "states", "labels" (a head), "choices" (a head over choices) or "words".
    """

    family: str
    model: str
    base: str
    stacks: tuple[Stack, ...]
    layers: tuple[Layer, ...]
    norms: tuple[Norm, ...]
    pooler: str | None
    head: tuple[str, ...]
    tensors: tuple[Tensor, ...]
    hidden: tuple[str, ...] = ()
    answers: str = "states"

    def __deepcopy__(self, memo: dict[int, Any]) -> Anatomy:
        return self  # a value; copies of a tuned model share it

    @property
    def shared(self) -> bool:
        """True when one set of modules serves several layers."""
        return any(layer.passes > 1 for layer in self.layers)

    def stack(self, name: str) -> Stack:
        return next(stack for stack in self.stacks if stack.name == name)

    def all_norms(self) -> Iterator[tuple[Layer | None, Norm]]:
        """Every norm with its layer; those outside the layers with None."""
        for norm in self.norms:
            yield None, norm
        for layer in self.layers:
            for norm in layer.norms:
                yield layer, norm

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def _lines(anatomy: Anatomy) -> Iterator[str]:
    total = sum(t.numel for t in anatomy.tensors if t.area != "head")
    yield f"{anatomy.model} ({anatomy.family}): {total:,} parameters" + (
        f", base model at {anatomy.base}" if anatomy.base else ""
    )
    for fact in anatomy.hidden:
        yield f"  not visible: {fact}"
    for stack in anatomy.stacks:
        causal = ", causal" if stack.causal else ""
        yield f"├─ {stack.name}: {stack.depth} layers, width {stack.width}{causal} [{stack.entry or '(the model)'}]"
        for norm in anatomy.norms:
            if norm.place == "embedding" and norm.path.startswith(stack.entry):
                yield f"│  ├─ norm {_norm(norm)}"
        for layer in anatomy.layers:
            if layer.stack == stack.name:
                yield from (f"│  {line}" for line in _layer_lines(layer))
        for norm in anatomy.norms:
            if norm.place == "final" and norm.path.startswith(stack.entry):
                yield f"│  └─ norm {_norm(norm)}"
    if anatomy.pooler:
        yield f"├─ pooler [{anatomy.pooler}]"
    for path in anatomy.head:
        yield f"└─ head [{path}]"


def _layer_lines(layer: Layer) -> Iterator[str]:
    times = f" × {layer.passes} passes" if layer.passes > 1 else ""
    yield f"├─ layer {layer.index}{times} [{layer.path}]"
    for a in layer.attentions:
        heads = f"{a.heads} heads × {a.head_width}" if a.heads else "heads not visible"
        groups = f", {a.kv_heads} key-value heads" if a.kv_heads != a.heads else ""
        yield f"│  ├─ {a.kind} attention: {heads}{groups}{', causal' if a.causal else ''} [{a.path}]"
        for role in ("query", "key", "value", "output"):
            linear = getattr(a, role)
            if linear is not None:
                yield f"│  │  ├─ {role:<6} {_linear(linear)}"
    for f in layer.ffns:
        yield f"│  ├─ ffn{' (gated)' if f.gated else ''} [{f.path}]"
        for linear in f.inputs:
            yield f"│  │  ├─ input  {_linear(linear)}"
        yield f"│  │  └─ output {_linear(f.output)}"
    for norm in layer.norms:
        yield f"│  ├─ norm {_norm(norm)}"


def _linear(linear: Linear) -> str:
    part = f" columns {linear.columns.start}:{linear.columns.stop}" if linear.columns else ""
    per = f" of each of {linear.columns.groups} groups" if linear.columns and linear.columns.groups > 1 else ""
    bias = "" if linear.bias else ", no bias"
    return f"{linear.in_width} -> {linear.out_width}{part}{per}{bias} [{linear.path}]"


def _norm(norm: Norm) -> str:
    terms = "gain and bias" if norm.gain and norm.bias else "gain" if norm.gain else "no parameters"
    return f"{norm.place}{' of ' + ' and '.join(norm.of) if norm.of else ''}, {terms}, {norm.width} [{norm.path}]"
