"""Hooks on observed modules: a tap reads what an edit needs or writes what it changes, at one side of one module.

Hooks are bound methods of taps, and taps are reached through the tuned object, so that deepcopy and pickle carry both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _global_forward_hooks
from transformers.pytorch_utils import Conv1D

from ..anatomy.trace import PORT, observing
from ..anatomy.values import Anatomy
from .chains import Writes
from .edits import Edit
from .gates import Change
from .uses import Use, edits_of, single
from .weights import Sparse


class InputTap:
    """All edits in use that read or write what a module is given."""

    def __init__(self, model: nn.Module, anatomy: Anatomy, path: str) -> None:
        self.path = path
        self.reads: list[tuple[Edit, Use]] = []
        self.writes = Writes([])
        self.handle = model.get_submodule(path).register_forward_pre_hook(self.before, with_kwargs=True)

    def serve(self, uses: Sequence[Use]) -> None:
        """Take over the edits in use that concern this side of the module."""
        self.reads = [(e, u) for e, u in edits_of(uses) if e.elsewhere == self.path]
        self.writes = Writes.at(self.path, "input", uses)

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Change the module's input, then note it for the edits that read it: x is what the module really reads."""
        if not (self.reads or self.writes.edits):
            return None
        key = None if args else next(iter(kwargs))
        h = args[0] if key is None else kwargs[key]
        h = self.writes.applied(h, module)
        for edit, use in self.reads:
            edit.seen.x = use.pick(h)
        if not self.writes.edits:
            return None
        return ((h, *args[1:]), kwargs) if key is None else (args, {**kwargs, key: h})

    def remove(self) -> None:
        self.handle.remove()


class OutputTap:
    """All edits in use that write what a module gives."""

    def __init__(self, model: nn.Module, anatomy: Anatomy, path: str) -> None:
        module = model.get_submodule(path)
        self.path = path
        self.makes_anew = type(module) in (nn.Linear, Conv1D)
        self.writes = Writes([])
        self.handle = module.register_forward_hook(self.after, with_kwargs=True)

    def serve(self, uses: Sequence[Use]) -> None:
        self.writes = Writes.at(self.path, "output", uses)

    def after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Change the module's output (its first element, when it is a tuple)."""
        if not self.writes.edits:
            return None
        read = args[0] if args else next(iter(kwargs.values()), None)
        h = output if isinstance(output, torch.Tensor) else output[0]
        h = self.writes.applied(h, module, read, in_place=self._is_ours(module))
        return h if isinstance(output, torch.Tensor) else (h, *output[1:])

    def _is_ours(self, module: nn.Module) -> bool:
        """Whether no other hook or wrapper holds the module's output, and nothing will differentiate or map it."""
        if torch.is_grad_enabled() or not self.makes_anew or "forward" in module.__dict__:
            return False
        alone = len(module._forward_hooks) == 1 and not _global_forward_hooks
        return alone and not torch._C._are_functorch_transforms_active()

    def remove(self) -> None:
        self.handle.remove()


class AttentionPort:
    """The edits in use inside one attention; the attention function finds them through the module."""

    def __init__(self, model: nn.Module, anatomy: Anatomy, path: str) -> None:
        self.path, self.module = path, model.get_submodule(path)
        self.active: list[tuple[Edit, Use]] = []
        self.served: str | None = None  # how the last pass attended to a prefix, for prefix_report
        self.module.__dict__[PORT] = self

    def serve(self, uses: Sequence[Use]) -> None:
        here = [(e, u) for e, u in edits_of(uses) if e.place.target.path == self.path]
        self.active = [(e, u) for e, u in here if e.place.target.side == "attention"]
        self.served = None

    def edits(self) -> list[tuple[Edit, Use]]:
        return self.active

    def mark(self) -> None:
        for edit, _ in self.active:
            edit.mark()

    def remove(self) -> None:
        self.module.__dict__.pop(PORT, None)


class StatesTap:
    """The edits in use that read all hidden states of a stack and change the last, at the module around its layers."""

    def __init__(self, model: nn.Module, anatomy: Anatomy, path: str) -> None:
        stack = next(s for s in anatomy.stacks if s.container == path)
        container = model.get_submodule(path)
        self.active: list[tuple[Edit, Use]] = []
        self.states: list[torch.Tensor] | None = None
        self.handles = [container.register_forward_pre_hook(self.open), container.register_forward_hook(self.close)]
        for layer in anatomy.layers:
            if layer.stack == stack.name:
                module = model.get_submodule(layer.path)
                self.handles.append(module.register_forward_pre_hook(self.collect, with_kwargs=True))

    def serve(self, uses: Sequence[Use]) -> None:
        self.active = [(e, u) for e, u in edits_of(uses) if e.place.target.side == "states"]

    def open(self, module: nn.Module, args: Any) -> None:
        self.states = [] if self.active else None

    def collect(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A layer's input is the state before it; outside the container's own pass (recomputation) nothing is kept."""
        if self.states is not None:
            self.states.append(args[0] if args else next(iter(kwargs.values())))

    def close(self, module: nn.Module, args: Any, output: Any) -> Any:
        """The container's first output is the last state."""
        states, self.states = self.states, None
        if not states:
            return None
        if observing():
            for edit, _ in self.active:
                edit.mark()
            return None
        before = last = output if isinstance(output, torch.Tensor) else output[0]
        states = [*(h[:, -last.shape[1] :] for h in states), last]
        for edit, use in self.active:
            whole = torch.stack([use.pick(h) for h in states])
            last = use.put(last, edit.change(whole[-1], edit.modification.form(edit.tensors(), whole, edit.training)))
        return _replaced(output, before, last)

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "states": None}


class WeightTap:
    """A tensor trained in part: while a module of it runs, the base's value with the trained entries is in its slot."""

    def __init__(self, model: nn.Module, anatomy: Anatomy, path: str) -> None:
        tensor = next(t for t in anatomy.tensors if t.name == path)
        self.name = path
        self.sparse: Sparse | Change | None = None
        self.displaced: dict[str, nn.Parameter | None] = {}
        self.handles = []
        for name in (tensor.name, *tensor.aliases):
            owner = model.get_submodule(name.rpartition(".")[0])
            # first of all: an edit that reads what the module is given may run it again
            self.handles.append(owner.register_forward_pre_hook(self.before, prepend=True))
            self.handles.append(owner.register_forward_hook(self.after, always_call=True))

    def serve(self, uses: Sequence[Use]) -> None:
        """Rows that differ are served by a RowTap."""
        self.sparse = dict(uses[0].delta.masked()).get(self.name) if uses and single(uses) else None

    def before(self, module: nn.Module, args: Any) -> None:
        if self.sparse is not None and not observing():
            leaf = self.name.rpartition(".")[2]
            self.displaced[leaf] = own = module._parameters[leaf]
            assert own is not None
            module._parameters[leaf] = self.sparse.on(own.detach())  # type: ignore[assignment]

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        for leaf, own in self.displaced.items():
            module._parameters[leaf] = own
        self.displaced = {}

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()


def _replaced(output: Any, before: torch.Tensor, after: torch.Tensor) -> Any:
    """The output with one tensor in place of another wherever it stands: alone, in a tuple, among the hidden states."""
    if output is before:
        return after
    if isinstance(output, tuple | list):
        return type(output)(_replaced(value, before, after) for value in output)
    if isinstance(output, dict):
        for name, value in output.items():
            output[name] = _replaced(value, before, after)
    return output
