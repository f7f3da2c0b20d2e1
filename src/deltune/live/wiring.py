"""Which taps a model's deltas need, and where."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

from transformers import PreTrainedModel

from ..anatomy.graph import Trace
from ..anatomy.structure import base_modules
from ..anatomy.values import Anatomy
from .assignment import owners
from .edits import Delta, Edit
from .model_methods import METHODS, WHOLE_MODEL_METHODS
from .own_tensors import OwnForward
from .passes import Passes
from .positions import PositionTap
from .prompting import TokenTap
from .taps import AttentionPort, InputTap, OutputTap, PassEntry, StatesTap


class AnyTap(Protocol):
    """What stands in a model while deltas are attached; `remove` is right wherever `install` was interrupted."""

    def install(self) -> None: ...

    def remove(self) -> None: ...


TAPS: dict[str, Any] = {
    "input": InputTap, "output": OutputTap, "attention": AttentionPort, "states": StatesTap, "tokens": TokenTap,
}  # fmt: skip
"""What serves a side of a place."""


def taps_of(passes: Passes, anatomy: Anatomy, deltas: Iterable[Delta]) -> dict[tuple[str, str], Callable[[], AnyTap]]:
    """What must stand where: by path and what it serves there, how it is made."""
    needed: dict[tuple[str, str], Callable[[], AnyTap]] = {}
    entries = {path: False for layer in anatomy.layers for path in [layer.path]}
    entries |= {stack.container: False for stack in anatomy.stacks}
    for delta in deltas:
        for edit in delta.all_edits():
            target = edit.place.target
            needed[target.path, target.side] = partial(TAPS[target.side], passes, anatomy, target.path)
            if edit.elsewhere is not None:
                needed[edit.elsewhere, "input"] = partial(InputTap, passes, anatomy, edit.elsewhere)
                entries.setdefault(_around(target.path, edit.elsewhere), False)
            if edit.place.moves:
                entry = anatomy.stack(edit.place.moves).entry
                needed[entry, "positions"] = partial(PositionTap, passes, anatomy, entry)
        for tensor, _ in delta.masked():
            for path, _ in owners(anatomy, tensor):
                module = passes.model.get_submodule(path)
                needed[path, "tensors"] = partial(OwnForward, passes, path, module)
    entries |= {"": True} | {stack.entry: True for stack in anatomy.stacks}
    needed |= {(path, "pass"): partial(PassEntry, passes, path, opens) for path, opens in entries.items()}
    for path, module in base_modules(passes.model):
        if isinstance(module, PreTrainedModel):  # also one inside the model, such as its encoder
            kinds = {name: kind for name, kind in METHODS.items() if hasattr(type(module), name)}
            needed |= {(path, name): partial(kind, passes, path, name) for name, kind in kinds.items()}
    needed |= {("", name): partial(kind, passes, "", name) for name, kind in WHOLE_MODEL_METHODS.items()}
    return needed


def _around(one: str, other: str) -> str:
    """The innermost module that holds both."""
    shared = []
    for name, same in zip(one.split("."), other.split("."), strict=False):
        if name != same:
            break
        shared.append(name)
    return ".".join(shared)


def unreached(trace: Trace, delta: Delta) -> list[str]:
    """The places of a delta that a pass does not reach, by name."""
    return [edit.place.name for edit in delta.all_edits() if not _reached(trace, edit)]


def _reached(trace: Trace, edit: Edit) -> bool:
    """Whether the module that an edit is at runs, and after the one that it reads, if that is another."""
    target = edit.place.target
    if target.side == "attention":
        ran = target.path in trace.attended
    else:
        ran = target.path in trace.ended or target.side == "tokens"
    source = edit.elsewhere
    return ran and (source is None or (source in trace.began and trace.began[source] <= trace.ended[target.path]))
