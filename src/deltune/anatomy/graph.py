"""The record of a forward pass: a graph of steps, and named queries over it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch

T = TypeVar("T")
Read = tuple[torch.Tensor, "Node"]
"""A tensor that a node reads, with the node that returned it."""


@dataclass(eq=False)
class Node:
    """One recorded step of the forward pass: a call of a module, or an operation outside of such modules."""

    # "linear", "norm", "embedding", "attention", "experts" (weights of three dimensions, one FFN for each index of the
    # first), "add" (of two activations), "mix" (a product of two activations), "view", "pass" (a change of scale, or
    # dropout), "input", or "op" (anything else)
    kind: str
    parents: list[Node]  # the nodes whose outputs are its inputs
    order: int  # its number in the order of execution
    path: str = ""  # the path of the module that was called, "" for an operation
    operation: str = ""  # the name of the operation, such as "add"; "" for a module
    argument: str = ""  # for an "input", the name of the argument of the model's forward
    module: Any = None  # the module of the live model that was called, None for an operation
    inputs: list[torch.Tensor] = field(default_factory=list)
    # the node that returned each input, None for tensors such as parameters, which no node has returned. Later writes
    # to the same tensor do not count.
    sources: list[Node | None] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)
    transposed: bool = False  # whether the weight of a "linear" has the shape (in, out)
    children: list[Node] = field(default_factory=list)  # the nodes whose inputs are its outputs
    steps: int = 0  # for a module, how many operations ran inside, without views
    # of an operation that picks by indices or by a condition, the first axis that it picks from; else None
    picks: int | None = None
    # of an attention, what it reads beside query, key and value, such as a bias that is added to its scores: tensors,
    # each with the node that returned it. These nodes are not among the parents.
    other_reads: list[tuple[torch.Tensor, Node | None]] = field(default_factory=list)

    @property
    def all_inputs(self) -> list[torch.Tensor]:
        """All tensors that it reads, also what an attention reads beside query, key and value."""
        return [*self.inputs, *(tensor for tensor, _ in self.other_reads)]

    @property
    def reads(self) -> list[Read]:
        """The inputs that nodes have returned, each with its node."""
        return [(t, node) for t, node in zip(self.inputs, self.sources, strict=True) if node is not None]

    @property
    def states(self) -> torch.Tensor | None:
        """The first input of floating-point numbers."""
        return first_states(self.inputs)

    @property
    def numeric_parents(self) -> list[Node]:
        """The nodes whose floating-point numbers it computes with; nodes that choose places or masks are none."""
        reads = [*self.reads, *self.other_reads]
        sources = {node for _, node in reads}
        numeric = [node for tensor, node in reads if node is not None and tensor.is_floating_point()]
        return [*numeric, *(parent for parent in self.parents if parent not in sources)]


@dataclass
class Trace:
    """A recorded forward pass."""

    nodes: list[Node] = field(default_factory=list)  # all steps, in the order of execution
    # the modules that were called, by path, each with the names of the arguments of its first call
    entered: dict[str, tuple[torch.nn.Module, set[str]]] = field(default_factory=dict)
    runs: dict[str, int] = field(default_factory=dict)  # the number of calls of each module, by path
    # the number of nodes recorded before the first call of each module, by path
    began: dict[str, int] = field(default_factory=dict)
    # the number of nodes recorded up to the end of the last call of each module, by path
    ended: dict[str, int] = field(default_factory=dict)
    # the paths of the modules that called transformers' attention interface
    attended: set[str] = field(default_factory=set)
    # the names of the model's parameters, by the `id` of the tensor that stands for each in this pass
    parameters: dict[int, str] = field(default_factory=dict)
    # the paths of the modules that returned a tensor, by the tensor's `id`, inner modules first. Modules that are
    # recorded as one node are left out.
    returned: dict[int, list[str]] = field(default_factory=dict)
    # the nodes that returned the outputs of the pass; of one that `trace_tower` stopped short, every node after the
    # tower
    results: list[Node] = field(default_factory=list)
    on_zeros: str = ""  # why the pass ran on zeros instead of the meta device; "" if it ran on the meta device
    stopped: bool = False  # whether the pass raised an error after the tower that it was to run through
    compared: list[int] = field(default_factory=list)  # the numbers that the pass compared the token ids with
    # the first tensor that each module was called with, by path
    arguments: dict[str, torch.Tensor] = field(default_factory=dict)
    # the first tensor that each module has returned, by path
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)

    def around(self, paths: Sequence[str], proper: bool = False) -> str:
        """Return the path of the innermost module that was called and contains all the paths, "" for the whole model.

        A `proper` one is none of the paths itself, and was called once only.
        """
        shared: list[str] = []
        for names in zip(*(path.split(".") for path in paths), strict=False):
            if len(set(names)) > 1:
                break
            shared.append(names[0])
        if proper and ".".join(shared) in paths:
            shared.pop()
        while shared and (".".join(shared) not in self.entered or (proper and self.runs[".".join(shared)] > 1)):
            shared.pop()
        return ".".join(shared)

    def of_kind(self, kind: str) -> list[Node]:
        """Return the nodes of a kind, in the order of execution."""
        return [node for node in self.nodes if node.kind == kind]

    @cached_property
    def differentiable(self) -> set[Node]:
        """The nodes that the outputs depend on by floating-point numbers, so that gradients reach them."""
        return set(walk(self.results, lambda node: node.numeric_parents))

    @cached_property
    def of_batch(self) -> set[Node]:
        """The nodes that depend on the inputs."""
        return downstream(self.of_kind("input"))


def first_states(tensors: Iterable[torch.Tensor]) -> torch.Tensor | None:
    """Return the first tensor of floating-point numbers."""
    return next((t for t in tensors if t.is_floating_point()), None)


def walk(start: Iterable[T], onwards: Callable[[T], Iterable[T]]) -> Iterator[T]:
    """Yield some items, and what `onwards` leads to from each of them, everything once."""
    queue, seen = list(start), set()
    while queue:
        item = queue.pop()
        if item not in seen:
            seen.add(item)
            yield item
            queue.extend(onwards(item))


def upstream(nodes: Iterable[Node]) -> set[Node]:
    """Return some nodes and everything that they depend on."""
    return set(walk(nodes, lambda node: node.parents))


def downstream(nodes: Iterable[Node]) -> set[Node]:
    """Return some nodes and everything that depends on them."""
    return set(walk(nodes, lambda node: node.children))


def nodes_above(nodes: Iterable[Node], through: set[str]) -> list[Node]:
    """Return all nodes reached from `nodes` (inclusive) by going up through nodes of the kinds `through`, in order."""
    return _in_order(walk(nodes, lambda node: node.parents if node.kind in through else ()))


def ancestors(nodes: Iterable[Node], through: set[str], stop: set[str]) -> list[Node]:
    """Return the nodes of a kind in `stop` reached from `nodes` (inclusive) by going up through `through`."""
    return [node for node in nodes_above(nodes, through - stop) if node.kind in stop]


def numeric_ancestors(node: Node, through: set[str], stop: set[str]) -> list[Node]:
    """Return the nodes of a kind in `stop` whose numbers a step is computed from by steps of the kinds `through`."""
    above = walk(node.numeric_parents, lambda n: n.numeric_parents if n.kind in through - stop else ())
    return _in_order(n for n in above if n.kind in stop)


def descendants(node: Node, through: set[str], stop: set[str]) -> list[Node]:
    """Return the nodes of a kind in `stop` reached from `node` (exclusive) by going down through `through`."""
    below = walk(node.children, lambda child: child.children if child.kind in through - stop else ())
    return _in_order(child for child in below if child.kind in stop)


def depends_on(node: Node, source: Node) -> bool:
    """Return whether a node reads, directly or through others, what another node has returned."""
    return source in walk([node], lambda n: n.parents if n.order > source.order else ())


def reads_above(reads: Iterable[Read], through: Callable[[torch.Tensor, Node], bool]) -> Iterator[Read]:
    """Yield tensors with the nodes that returned them, and what these nodes have read, as far as `through` allows."""
    return walk(reads, lambda read: read[1].reads if through(*read) else ())


def _in_order(nodes: Iterable[Node]) -> list[Node]:
    return sorted(nodes, key=lambda node: node.order)
