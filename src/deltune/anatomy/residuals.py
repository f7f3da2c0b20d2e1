"""Finds the attentions, FFNs and experts of a traced forward pass by its residual additions, and places its norms.

A residual addition adds the output of a sub-layer to the hidden states. The last linear of the sub-layer is followed
back: if its input comes from an attention, the sub-layer is an attention; if it comes, through an activation, from
linears whose input is the hidden states, the sub-layer is an FFN. If the output comes from a module with experts inside
whose input is the hidden states, the sub-layer is a mixture of experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..compat import storage_id
from .graph import (
    Node,
    Read,
    Trace,
    ancestors,
    depends_on,
    descendants,
    nodes_above,
    numeric_ancestors,
    reads_above,
    walk,
)
from .types import AttentionKind, Columns, NormPosition

_PASS_THROUGH = {"view", "pass"}  # nodes that change a tensor's shape or scale only
_SOFTMAX = {"_softmax", "softmax", "_safe_softmax"}
_WITHIN_SUBLAYER = {"view", "pass", "op", "add", "norm"}  # nodes between two linears of one sub-layer


class SubLayer:
    """A sub-layer in the recorded pass: its residual addition, its output linear or experts, and its first linears."""

    def __init__(self, add: Node, output: Node, attention: Node | None, inputs: list[Node]) -> None:
        self.add, self.output, self.attention, self.inputs = add, output, attention, inputs
        self.projections: dict[str, tuple[Node, Columns | None]] = {}
        self.reused: tuple[str, ...] = ()  # "key" or "value", if an earlier attention has projected it
        self.kind: AttentionKind = "self"
        self.block = ""

    @property
    def input_node(self) -> Node:
        """The linear that reads the hidden states first."""
        return self.projections["query"][0] if "query" in self.projections else self.inputs[0]

    @property
    def mixes_tokens(self) -> bool:
        """Return whether tokens see each other in it."""
        return self.attention is not None

    @property
    def role(self) -> str:
        """The owner of its norms: "attention", which any mixer of tokens counts as, or "ffn"."""
        return "attention" if self.mixes_tokens else "ffn"

    @property
    def paths(self) -> list[str]:
        """The paths of its modules; of a mixture of experts, the one around it."""
        if self.block:
            return [self.block]
        read = [node.path for node, _ in self.projections.values()] or [n.path for n in self.inputs]
        return [*read, self.output.path]


def find_sublayers(trace: Trace) -> list[SubLayer]:
    """Return every sub-layer of a trace, in the order of execution."""
    sublayers: dict[Node, SubLayer] = {}
    expert_paths = {node.path for node in trace.of_kind("experts")}
    for add in trace.of_kind("add"):
        sources = [_source_linear(node) for node in add.sources]
        if _share_one_linear(add, sources):
            continue  # x + f(x) inside an activation, or a rotation
        readers = descendants(add, _WITHIN_SUBLAYER, {"linear", "attention", "mix"})
        if any(n.kind in ("attention", "mix") for n in readers) and not _is_residual(add):
            continue  # a rotary embedding or a score
        for number, output in enumerate(sources):
            if output in sublayers:
                continue
            sublayer = _sub_layer(add, output) if output is not None else None
            if sublayer is None and expert_paths:
                sublayer = _experts(trace, add, number, expert_paths)
            if sublayer is not None:
                sublayers[sublayer.output] = sublayer
    projected: set[Node] = set()
    for sub in sorted(sublayers.values(), key=lambda s: s.output.order):
        sub.reused = tuple(r for r in ("key", "value") if sub.projections.get(r, (None,))[0] in projected)
        for role in sub.reused:  # an earlier layer's, read once more
            del sub.projections[role]
            sub.kind = "self"
        projected |= {node for node, _ in sub.projections.values()}
    blocks = tuple(f"{sub.block}." for sub in sublayers.values() if sub.block)
    outside = [sub for sub in sublayers.values() if sub.block or not sub.output.path.startswith(blocks)]
    return sorted(outside, key=lambda s: s.output.order)


def _experts(trace: Trace, add: Node, number: int, expert_paths: set[str]) -> SubLayer | None:
    """Return the mixture of experts that an operand of a residual addition is the output of, or None.

    The operand depends on the other one, the residual stream, which the outputs of earlier layers do not.
    """
    operands = add.reads
    if len(operands) != 2:
        return None
    operand, (_, stream) = operands[number % 2], operands[(number + 1) % 2]
    if not _reads_stream(operand[1], stream):
        return None
    for tensor, node in walk([operand], _carried_reads):
        for path in trace.returned.get(id(tensor), ()):
            inside = [n for n in trace.nodes[trace.began[path] :] if n.path.startswith(f"{path}.")]
            if any(n.kind == "attention" for n in inside):
                return None  # experts that project queries or values
            if any(n.path in expert_paths for n in inside):
                reading = [n for n in inside if n.kind in ("linear", "experts", "op")]
                sub = SubLayer(add, node, None, reading)
                sub.block = path
                return sub
        if node.kind == "experts":  # the layer calls its router and its experts itself
            sub = SubLayer(add, node, None, [node])
            sub.block = node.path
            return sub
    return None


def _carried_reads(read: Read) -> list[Read]:
    """Return what a step reads and changes in shape or scale alone, or normalises."""
    node = read[1]
    if node.kind in (*_PASS_THROUGH, "norm"):
        return node.reads
    carried = _carried(node)
    return [(t, n) for t, n in node.reads if n is carried]


def shared_experts(nodes: list[Node]) -> list[SubLayer]:
    """Return the FFNs among the steps inside a mixture of experts, those that every token goes through."""
    linears = [node for node in nodes if node.kind == "linear"]
    ffns = []
    for output in linears:
        sources = ancestors(output.parents, {"view", "pass", "op", "norm"}, {"linear", "mix", "attention", "add"})
        if sources and set(linears).issuperset(sources):
            ffns.append(SubLayer(output, output, None, sources))
    return ffns


def _is_residual(add: Node) -> bool:
    """Return whether one operand of an addition is computed from the other."""
    first, second = (node for node in add.sources if node is not None)
    return _reads_stream(first, second) or _reads_stream(second, first)


def _reads_stream(node: Node, stream: Node) -> bool:
    """Return whether a step is computed from another, or from the streams that this one mixes (hyper-connections)."""
    streams = (source for source in walk([stream], _mixed) if source is stream or source.kind in ("add", "embedding"))
    return any(depends_on(node, source) for source in streams)


def _mixed(node: Node) -> list[Node]:
    """Return the steps whose outputs a step that is no addition mixes, or carries on."""
    if node.kind in (*_PASS_THROUGH, "mix"):
        return node.parents
    carried = None if node.kind in ("add", "embedding") else _carried(node)
    return [] if carried is None else [carried]


def _carried(node: Node) -> Node | None:
    """Return the step whose output an operation only scales or adds something of its own to; None for any other.

    These are a product with one number for each token, such as the weight of a stream, or with one vector for all, and
    x + f(x), where f may be a convolution.
    """
    factors = node.reads
    if len(factors) != 2:
        return None
    if node.operation == "mul":
        wide = [(t, n) for t, n in factors if t.dim() > 1 and t.shape[-1] > 1]
        # of images, whose channels come first, the last axis is no feature
        return wide[0][1] if len(wide) == 1 and wide[0][0].shape[:2] == node.outputs[0].shape[:2] else None
    if node.kind == "add":
        stops = {"linear", "add", "norm", "mix", "attention", "experts", "embedding"}
        for number, (_, operand) in enumerate(factors):
            source = ancestors([operand], _PASS_THROUGH, stops)
            reached = ancestors([factors[1 - number][1]], _PASS_THROUGH | {"op"}, stops)
            if len(source) == 1 and source == reached:
                return operand
    return None


def _share_one_linear(add: Node, sources: list[Node | None]) -> bool:
    """Return whether both operands come, by operations on single elements, from the same linear."""
    stops = {"linear", "add", "norm", "mix", "attention", "embedding"}
    reached = [ancestors([node] if node else [], _PASS_THROUGH | {"op"}, stops) for node in add.sources]
    return any(s in reached[1 - i] for i, s in enumerate(sources) if s is not None)


def _source_linear(producer: Node | None) -> Node | None:
    """Return the one linear that a residual operand comes from, or None."""
    stops = {"linear", "add", "op", "mix", "attention", "experts", "embedding", "input"}
    while producer is not None:
        sources = ancestors([producer], _PASS_THROUGH | {"norm"}, stops)
        if len(sources) != 1:
            return None
        if sources[0].kind == "linear":
            return sources[0]
        producer = _carried(sources[0])
    return None


def _sub_layer(add: Node, output: Node) -> SubLayer | None:
    sources = ancestors(output.parents, _WITHIN_SUBLAYER, {"attention", "mix", "linear", "embedding", "experts"})
    inside = nodes_above(output.parents, _WITHIN_SUBLAYER | {"mix"})
    attention = next((n for n in inside if n.kind == "attention"), None)
    if attention is not None:
        linears = [n for n in nodes_above(attention.parents, _WITHIN_SUBLAYER | {"mix"}) if n.kind == "linear"]
        sublayer = SubLayer(add, output, attention, linears)
        reads = zip(attention.inputs, attention.sources, strict=True)
        for role, (tensor, source) in zip(("query", "key", "value"), reads, strict=True):
            projection = _projection(tensor, source)
            if projection is not None:
                sublayer.projections[role] = projection
        _drop_unclear(sublayer.projections)
        query, key = (_streams(source) for source in attention.sources[:2])
        sublayer.kind = "cross" if query and key and query.isdisjoint(key) else "self"
        return sublayer if linears else None
    mixing = [n for n in inside if n.kind == "mix" or _convolves(n)]
    linears = [n for n in inside if n.kind == "linear"]
    if mixing and linears:
        sublayer = SubLayer(add, output, mixing[0], linears)
        if not any(n.operation in _SOFTMAX for n in mixing):
            sublayer.kind = "mixer"
            return sublayer
        sublayer.projections = _projections_of_products(output)
        query, key = (_streams(sublayer.projections.get(role, (None,))[0]) for role in ("query", "key"))
        sublayer.kind = "cross" if query and key and query.isdisjoint(key) else "self"
        return sublayer
    # an FFN returns as many tokens as it reads; Swin's downsampling, which joins four, is none
    if sources and all(n.kind == "linear" and _tokens(n) == _tokens(output) for n in sources):
        return SubLayer(add, output, None, sources)
    return None


def _tokens(node: Node) -> int:
    """Return the number of tokens in the whole batch of which a linear returns hidden states."""
    return node.outputs[0].numel() // max(1, node.outputs[0].shape[-1])


def _drop_unclear(projections: dict[str, tuple[Node, Columns | None]]) -> None:
    """Forget the roles of a linear that was cut otherwise than by views, or that is one projection for several."""
    nodes = [linear for linear, _ in projections.values()]
    for role, (linear, columns) in list(projections.items()):
        if columns is None and sum(linear is other for other in nodes) > 1:
            del projections[role]


def _projections_of_products(output: Node) -> dict[str, tuple[Node, Columns | None]]:
    """Return query, key and value of an attention that is written as products, softmax(q k^T) v.

    The product above the output linear has the softmax on one side and v on the other. Of the products that the softmax
    is computed from, the first one whose sides come from one linear each is q k^T: what follows are terms of positions.
    """
    for product in ancestors(output.parents, _WITHIN_SUBLAYER, {"mix"})[::-1]:
        sides = _sides(product)
        for number, (_, source) in enumerate(sides):
            softmax = next(iter(ancestors([source], _WITHIN_SUBLAYER, {"mix"})), None)
            if softmax is None or softmax.operation not in _SOFTMAX:
                continue
            projections: dict[str, tuple[Node, Columns | None]] = {}
            if value := _projection(*sides[1 - number]):
                projections["value"] = value
            for scores in numeric_ancestors(softmax, _WITHIN_SUBLAYER, {"mix", "linear", "attention"}):
                from_linears = [_projection(*side) for side in _sides(scores)]
                if len(from_linears) == 2 and all(from_linears) and from_linears[0] != from_linears[1]:
                    projections["query"], projections["key"] = from_linears  # type: ignore[assignment]
                    break
            _drop_unclear(projections)
            return projections
    return {}


def _sides(product: Node) -> list[tuple[torch.Tensor, Node]]:
    """Return the two factors of a product of activations with the steps that they come from; none of another step."""
    factors = list(zip(product.inputs, product.sources, strict=True))[-2:]
    known = [(tensor, source) for tensor, source in factors if source is not None]
    return known if product.operation not in _SOFTMAX and len(known) == 2 else []


def _convolves(node: Node) -> bool:
    """Return whether a step is a convolution over the tokens."""
    if node.operation == "convolution":
        weights = node.inputs[1]
        return weights.dim() == 3 and weights.shape[-1] > 1
    return isinstance(node.module, torch.nn.Conv1d) and max(node.module.kernel_size) > 1


def _projection(tensor: torch.Tensor, producer: Node | None) -> tuple[Node, Columns | None] | None:
    """Return the linear that a query, key or value comes from, and its columns; None where it comes from several."""
    sources = ancestors([producer] if producer else [], _WITHIN_SUBLAYER, {"linear", "attention"})
    linears = [n for n in sources if n.kind == "linear"]
    if len(linears) != 1:
        return None
    try:
        return linears[0], _columns(linears[0], _views_of_output(tensor, producer, linears[0]))
    except _IrregularColumns:
        return None


def _streams(node: Node | None) -> set[Node]:
    """Return the sums and embeddings that a query or key is projected from: its residual stream."""
    first = ancestors([node] if node else [], _WITHIN_SUBLAYER, {"linear"})
    parents = [parent for linear in first for parent in linear.parents]
    stops = {"add", "embedding", "input", "attention"}
    return set(ancestors(parents, {"linear", "norm", "view", "pass", "op"}, stops))


def norm_position(node: Node, group: Sequence[SubLayer]) -> tuple[NormPosition, list[SubLayer]]:
    """Return where a norm stands in its layer, and the sub-layers that it belongs to."""
    stops = {"linear", "add", "op", "mix", "attention", "experts"}
    above = ancestors(node.parents, _PASS_THROUGH, stops | {"norm", "embedding"})
    below = descendants(node, _PASS_THROUGH, stops)
    readers = [s for s in group if any(n in below for n in _input_linears(s))]
    summed = any(n.kind == "add" for n in below)
    for sub in group:  # query and key norms stand between a projection and the attention
        sides: tuple[NormPosition, ...] = ("query", "key")
        for role in sides:
            if role in sub.projections and sub.projections[role][0] in above:
                return role, [sub]
    outputs = [s for s in group if s.output in above]
    if outputs:
        return "output", outputs
    sums = [s for s in group if s.add in above]
    if sums and (summed or not readers):
        return "post", sums
    if readers:
        return "pre", readers
    for sub in group:
        inner = [sub.attention] if sub.attention else sub.inputs
        if any(n in ancestors(node.parents, _WITHIN_SUBLAYER, {"attention", "linear", "mix"}) for n in inner):
            return "inner", [sub]
    return "unknown", []


def _input_linears(sub: SubLayer) -> list[Node]:
    known = [node for node, _ in sub.projections.values()]
    return known if len(known) == 3 else [*known, *sub.inputs]


def features_are_last(trace: Trace, output: torch.Tensor, linear: Node) -> bool:
    """Return whether the last axis of a layer's output has the features of its last linear, and not rows of pixels.

    The axis is followed back through views, by its stride, and through steps that keep the shape. Where that does not
    show, it is taken for the features.
    """
    node = next((n for n in reversed(trace.nodes) if any(t is output for t in n.outputs)), None)
    tensor, axis = output, output.dim() - 1
    while node is not None and node is not linear:
        step = next(((t, source) for t, source in node.reads if depends_on(source, linear)), None)
        if step is None:
            return True
        below, source = step
        if storage_id(below) == storage_id(tensor):
            alike = [i for i in range(below.dim()) if below.stride(i) == tensor.stride(axis)]
            axis = max(alike, key=lambda i: (below.shape[i] == tensor.shape[axis], i), default=below.dim() - 1)
        elif below.shape != tensor.shape:
            if axis != tensor.dim() - 1 or below.shape[-1] != tensor.shape[-1]:
                return True
            axis = below.dim() - 1
        tensor, node = below, source
    return axis == tensor.dim() - 1


def gate_and_up(sub: SubLayer) -> dict[str, tuple[Node, Columns | None]]:
    """Return the two projections of a gated FFN, by role: "gate", which an activation follows, and "up".

    What the output linear reads is the product of the two. One of them comes from its linear by views alone.
    """
    for product in nodes_above(sub.output.parents, {"view", "pass", "op", "norm"})[::-1]:
        factors = product.reads
        if product.operation != "mul" or len(factors) != 2:
            continue
        from_linears = [_projection(*factor) for factor in factors]
        if not all(from_linears) or from_linears[0] == from_linears[1]:
            continue
        plain = [
            any(n.kind == "linear" for n in ancestors([n], {"view"}, {"linear", "op", "pass"})) for _, n in factors
        ]
        if sum(plain) != 1:
            return {}
        up, gate = (from_linears[plain.index(True)], from_linears[plain.index(False)])
        if up is None or gate is None or (up[0] is gate[0] and None in (up[1], gate[1])):
            return {}
        return {"gate": gate, "up": up}
    return {}


def _views_of_output(tensor: torch.Tensor, source: Node | None, linear: Node) -> list[torch.Tensor]:
    """Return the views of the linear's output that `tensor` is computed from: on each way, the last in its storage."""
    storage, start = storage_id(linear.outputs[0]), [] if source is None else [(tensor, source)]
    reads = reads_above(start, lambda t, node: node.order >= linear.order and storage_id(t) != storage)
    return [t for t, node in reads if node.order >= linear.order and storage_id(t) == storage]


class _IrregularColumns(Exception):
    """A fused projection is cut into parts that no `Columns` describes."""


def _columns(linear: Node, views: list[torch.Tensor]) -> Columns | None:
    """Return which of the linear's columns the views cover, by their offsets and strides; None for all of them."""
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
        raise _IrregularColumns
    return Columns(groups, start, start + size)
