"""Finds the sub-layers of a traced pass: what stands behind each residual addition, and which norms belong to it.

A residual addition has an operand that comes from one linear. That linear closes an attention when it reads one, an FFN
when it reads, through an activation, linears that read the hidden states.
"""

from __future__ import annotations

import torch

from ..errors import DeltuneError
from .tracing import Node, Trace, ancestors, descendants
from .types import Columns, Kind, Place

_ALONG = {"view", "pass"}  # what hands a tensor on unchanged up to shape and scale
_INSIDE = {"view", "pass", "op", "add", "norm"}  # what may stand between two linears of one sub-layer


class SubLayer:
    """A residual addition's sub-layer while it is being read: its output linear and what that linear reads."""

    def __init__(self, add: Node, output: Node, attention: Node | None, inputs: list[Node]) -> None:
        self.add, self.output, self.attention, self.inputs = add, output, attention, inputs
        self.projections: dict[str, tuple[Node, Columns | None]] = {}
        self.kind: Kind = "self"

    @property
    def reads(self) -> Node:
        return self.projections["query"][0] if "query" in self.projections else self.inputs[0]


def find_sublayers(trace: Trace) -> list[SubLayer]:
    """Every sub-layer of a trace, in the order of execution."""
    found: dict[int, SubLayer] = {}
    for add in trace.of_kind("add"):
        sources = [_source(node) for node in add.sources]
        if _one_linear(add, sources):
            continue  # x + f(x) inside an activation, or a rotation
        if any(n.kind in ("attention", "mix") for n in descendants(add, _INSIDE, {"linear", "attention", "mix"})):
            continue  # a rotary embedding or a score, not the residual stream
        for output in sources:
            if output is not None and id(output) not in found:
                sub = _sub_layer(add, output)
                if sub is not None:
                    found[id(output)] = sub
    return sorted(found.values(), key=lambda s: s.output.order)


def _one_linear(add: Node, sources: list[Node | None]) -> bool:
    """Both operands are made, element by element, from the same linear's output."""
    stops = {"linear", "add", "norm", "mix", "attention", "embedding"}
    reached = [ancestors([node] if node else [], _ALONG | {"op"}, stops) for node in add.sources]
    return any(s in reached[1 - i] for i, s in enumerate(sources) if s is not None)


def _source(producer: Node | None) -> Node | None:
    """The one linear that a residual operand comes from, or None."""
    stops = {"linear", "add", "op", "mix", "attention", "embedding", "input"}
    found = ancestors([producer], _ALONG | {"norm"}, stops) if producer else []
    return found[0] if len(found) == 1 and found[0].kind == "linear" else None


def _sub_layer(add: Node, output: Node) -> SubLayer | None:
    found = ancestors(output.parents, _INSIDE, {"attention", "mix", "linear", "embedding"})
    attention = next((n for n in found if n.kind == "attention"), None)
    if attention is not None:
        sub = SubLayer(add, output, attention, [])
        reads = zip(attention.inputs, attention.sources, strict=True)
        for role, (tensor, source) in zip(("query", "key", "value"), reads, strict=True):
            sub.projections[role] = _projection(tensor, source)
        sub.kind = "self" if _stream(sub, "key") is _stream(sub, "query") else "cross"
        return sub
    if any(n.kind == "mix" for n in found):
        inputs = ancestors([n for n in found if n.kind == "mix"], _INSIDE | {"mix"}, {"linear", "embedding"})
        inputs = [n for n in inputs if n.kind == "linear"]
        return SubLayer(add, output, found[0], inputs) if inputs else None
    if found and all(n.kind == "linear" for n in found):
        return SubLayer(add, output, None, found)
    return None


def _projection(tensor: torch.Tensor, producer: Node | None) -> tuple[Node, Columns | None]:
    found = ancestors([producer] if producer else [], _INSIDE, {"linear", "attention"})
    linears = [n for n in found if n.kind == "linear"]
    if len(linears) != 1:
        raise DeltuneError("an attention's query, key or value does not come from one linear projection")
    linear = linears[0]
    return linear, _columns(linear, _parts(tensor, producer, linear))


def _stream(sub: SubLayer, role: str) -> Node:
    """The node whose output a projection reads."""
    nodes = ancestors(sub.projections[role][0].parents, {"view"}, {"linear", "add", "norm", "op", "pass", "embedding"})
    return nodes[0]


def norm_position(node: Node, group: list[SubLayer]) -> tuple[Place, list[SubLayer]]:
    """Where a norm stands in its layer, and the sub-layers it belongs to."""
    above = ancestors(node.parents, _ALONG, {"linear", "add", "norm", "op", "mix", "attention", "embedding"})
    below = descendants(node, _ALONG, {"linear", "add", "attention", "op", "mix"})
    readers = [s for s in group if any(n in below for n in _entries(s))]
    adds = {id(s.add) for s in group}
    summed = any(n.kind == "add" for n in below)
    for sub in group:  # query and key norms stand between a projection and the attention
        sides: tuple[Place, ...] = ("query", "key")
        for role in sides:
            if role in sub.projections and sub.projections[role][0] in above:
                return role, [sub]
    outputs = [s for s in group if s.output in above]
    if outputs:
        return "output", outputs
    sums = [s for s in group if s.add in above]
    if sums and id(sums[0].add) in adds and (summed or not readers):
        return "post", sums
    if readers:
        return "pre", readers
    for sub in group:
        inner = [sub.attention] if sub.attention else sub.inputs
        if any(n in ancestors(node.parents, _INSIDE, {"attention", "linear", "mix"}) for n in inner):
            return "inner", [sub]
    return "unknown", []


def _entries(sub: SubLayer) -> list[Node]:
    return [node for node, _ in sub.projections.values()] or sub.inputs


def _parts(tensor: torch.Tensor, source: Node | None, linear: Node) -> list[torch.Tensor]:
    """What reaches `tensor` from the linear's output: the last tensors on each way that still lie in its storage."""
    storage = linear.outputs[0].untyped_storage()._cdata
    found: list[torch.Tensor] = []
    seen: set[int] = set()
    queue = [(tensor, source)]
    while queue:
        tensor, source = queue.pop()
        if id(tensor) in seen or source is None or source.order < linear.order:
            continue
        seen.add(id(tensor))
        if tensor.untyped_storage()._cdata == storage:
            found.append(tensor)
        else:
            queue.extend(zip(source.inputs, source.sources, strict=True))
    return found


def _columns(linear: Node, views: list[torch.Tensor]) -> Columns | None:
    """Which of the linear's outputs the views cover, read from their offsets and strides."""
    width = linear.outputs[0].shape[-1]
    if not views:
        return None
    covered: set[int] = set()
    for view in (v for v in views if v.numel()):
        total = linear.outputs[0].untyped_storage().nbytes() // view.element_size()
        index = torch.arange(total, device="cpu").as_strided(view.shape, view.stride(), view.storage_offset())
        covered |= set((index.flatten() % width).unique().tolist())
    if len(covered) == width:
        return None
    ordered = sorted(covered)
    runs = [i for i, c in enumerate(ordered) if i == 0 or c != ordered[i - 1] + 1]
    groups, size = len(runs), len(ordered) // len(runs)
    block = width // groups
    start = ordered[0]
    expected = [g * block + start + k for g in range(groups) for k in range(size)]
    if expected != ordered or width % groups:
        raise DeltuneError(f"the fused projection {linear.path!r} is cut into parts of irregular shape")
    return Columns(groups, start, start + size)
