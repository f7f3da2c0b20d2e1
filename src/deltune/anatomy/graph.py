"""The recorded graph of one forward pass, and walking up and down in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(eq=False)
class Node:
    """One recorded step. kind: linear, norm, embedding, attention, add, mix, view, pass, op, input.

    path: of its module, "" where it is none; argument: the name of an input.
    """

    kind: str
    parents: list[Node]
    order: int
    path: str = ""
    argument: str = ""
    module: Any = None
    inputs: list[torch.Tensor] = field(default_factory=list)
    sources: list[Node | None] = field(default_factory=list)  # who had produced each input by then
    outputs: list[torch.Tensor] = field(default_factory=list)
    transposed: bool = False
    children: list[Node] = field(default_factory=list)


@dataclass
class Trace:
    """The recorded graph: nodes in order of execution, and the modules entered with the names of their arguments.

    Attributes:
        runs: How often each module ran, by path.
        began: How many nodes there were when each module was first entered.
        ended: How many nodes there were when each module last returned.
        attended: Paths of the modules that called the attention interface.
        parameters: Names of the model's parameters by the identity that they have in this pass.
    """

    nodes: list[Node]
    entered: dict[str, tuple[torch.nn.Module, set[str]]]
    runs: dict[str, int]
    began: dict[str, int] = field(default_factory=dict)
    ended: dict[str, int] = field(default_factory=dict)
    attended: set[str] = field(default_factory=set)
    parameters: dict[int, str] = field(default_factory=dict)

    def around(self, paths: Sequence[str], proper: bool = False) -> str:
        """The innermost module that ran and holds all the paths (`proper`: strictly holds them, and ran once)."""
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
        return [node for node in self.nodes if node.kind == kind]


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in a value made of tuples, lists and dictionaries."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def back(nodes: Iterable[Node], through: set[str], stop: set[str]) -> list[Node]:
    """Nodes of a kind in `stop` reached by going up from `nodes` (inclusive) through kinds in `through`."""
    return _reached(list(nodes), through, stop, lambda node: node.parents)


def forth(node: Node, through: set[str], stop: set[str]) -> list[Node]:
    """Nodes of a kind in `stop` reached by going down from `node` (exclusive) through kinds in `through`."""
    return _reached(list(node.children), through, stop, lambda child: child.children)


def _reached(queue: list[Node], through: set[str], stop: set[str], beyond: Callable[[Node], list[Node]]) -> list[Node]:
    found, seen = [], set()
    while queue:
        node = queue.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if node.kind in stop:
            found.append(node)
        elif node.kind in through:
            queue.extend(beyond(node))
    return sorted(found, key=lambda n: n.order)
