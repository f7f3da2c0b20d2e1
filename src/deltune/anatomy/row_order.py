"""Finds the modules whose input does not have the rows of the batch, in their order, as its first axis.

The forward pass is traced with a batch of one row. Hidden states of shape (length, batch, width) then have a second
axis of size 1. The tokens that a router sends to an expert are taken out of the batch by their indices, which the trace
records, and stay a selection until they are put back or added to the residual stream.
"""

from __future__ import annotations

from .graph import Node, Trace, ancestors

_PUTTING = {
    "index_add", "index_put", "_index_put_impl", "index_copy", "index_reduce", "scatter", "scatter_add",
    "scatter_reduce", "masked_scatter",
}  # fmt: skip
"""Operations that put a selection of tokens back into a tensor whose order stays."""

_TOKENS, _ROWS_OF_AXIS = "tokens", "rows of an axis"
"""The two kinds of selections: tokens that a condition chooses, and parts of a first axis that is not the batch."""


def modules_not_by_row(trace: Trace) -> tuple[str, ...]:
    """Return the paths of modules whose tensors cannot be split into the rows of the batch along the first axis."""
    lengths = {t.shape[1] for node in trace.of_kind("input") for t in node.outputs if t.dim() > 1 and t.shape[0] == 1}
    selections = _selections(trace)
    last = {id(tensor): node for node in trace.nodes for tensor in node.outputs}
    paths: dict[str, None] = {}
    for node in trace.nodes:
        if node.path and node.kind != "input" and (_sequence_first(node, lengths) or _of_selection(node, selections)):
            paths[node.path] = None
    for key, modules in trace.returned.items():
        returning = last.get(key)
        if returning is not None and (
            _sequence_first(returning, lengths, (key,))
            or _is_selection(returning.outputs[0].shape, selections.get(returning))
        ):
            paths.update(dict.fromkeys(modules))
    return tuple(paths)


def _sequence_first(node: Node, lengths: set[int], keys: tuple[int, ...] = ()) -> bool:
    """Return whether a step's first input or output, or its outputs with given ids, has the shape (length, 1, …)."""
    tensors = [t for t in node.outputs if id(t) in keys] if keys else [*node.inputs[:1], *node.outputs[:1]]
    return any(
        t.dim() > 2 and t.shape[0] in lengths - {1} and t.shape[1] == 1 and t.is_floating_point() for t in tensors
    )


def _of_selection(node: Node, selections: dict[Node, str]) -> bool:
    """Return whether an input of a step is a selection of tokens."""
    return any(_is_selection(t.shape, selections.get(n)) for t, n in node.reads if t.is_floating_point())


def _is_selection(shape: tuple[int, ...], selection: str | None) -> bool:
    """Return whether a tensor of a shape is a selection; one whose first axis is the batch again is none."""
    return selection == _TOKENS or (selection == _ROWS_OF_AXIS and not (len(shape) > 2 and shape[0] == 1))


def _selections(trace: Trace) -> dict[Node, str]:
    """Return which steps return a selection of what the batch has, and what it is a selection of."""
    selections: dict[Node, str] = {}
    for node in trace.nodes:
        if node.operation in _PUTTING:
            read = [] if node.sources[0] is None else [node.sources[0]]
        else:
            read = [source for source in node.sources if source is not None]
        kinds = {selections.get(parent) for parent in read}
        if node.kind == "add" and None in kinds:
            continue  # it is added to states that are whole, so it is whole as well
        kind = _TOKENS if _TOKENS in kinds else _ROWS_OF_AXIS if _ROWS_OF_AXIS in kinds else None
        if node.picks is not None and node.sources[0] in trace.of_batch:
            kind = _picked(node) or kind
        if kind is not None:
            selections[node] = kind
    return selections


def _picked(node: Node) -> str | None:
    """Return what a step that picks by indices selects; None where it takes rows, or something out of each row."""
    read = node.inputs[0]
    if node.picks == 0 and read.shape[0] == 1 and node.outputs[0].dim() == read.dim():
        return None  # whole rows, such as those in one language; that they are fewer is noticed when they run
    conditions = ancestors([source for source in node.sources[1:] if source is not None], {"view", "pass"}, {"op"})
    if any(not t.is_floating_point() and t.element_size() == 1 for t in node.inputs[1:]) or any(
        source.operation == "nonzero" for source in conditions
    ):
        return _TOKENS
    return _ROWS_OF_AXIS if node.picks == 0 and read.shape[0] != 1 else None
