"""Hooks on observed modules: a Tap reads what an edit needs and writes what it changes, at one module.

Hooks are bound methods of taps, and taps are reached through the tuned object, so that deepcopy and pickle carry both.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from .edits import Edit
from .trace import PORT, observing


class Tap:
    """All edits in use that read or write at one module."""

    def __init__(self, module: nn.Module, path: str) -> None:
        self.path = path
        self.reads: list[Edit] = []
        self.writes_input: list[Edit] = []
        self.writes_output: list[Edit] = []
        self.handles = [
            module.register_forward_pre_hook(self.before, with_kwargs=True),
            module.register_forward_hook(self.after, with_kwargs=True),
        ]

    def serve(self, edits: Iterable[Edit]) -> None:
        """Take over the edits that concern this module; those of the delta in use, none when none is."""
        edits = list(edits)
        sources = [(e, e.place.source) for e in edits]
        self.reads = [e for e, port in sources if port is not None and port.path == self.path]
        own = [e for e in edits if e.place.target.path == self.path]
        self.writes_input = [e for e in own if e.place.target.side == "input"]
        self.writes_output = [e for e in own if e.place.target.side == "output"]

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Change the module's input, then note it for the edits that read it: x is what the module really reads."""
        if not (self.reads or self.writes_input):
            return None
        key = None if args else next(iter(kwargs))
        h = args[0] if key is None else kwargs[key]
        for edit in self.writes_input:
            h = self.mark(edit, h) if observing() else edit.apply_to(h, module)
        for edit in self.reads:
            edit.seen = h
        if not self.writes_input:
            return None
        return ((h, *args[1:]), kwargs) if key is None else (args, {**kwargs, key: h})

    def after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Change the module's output (its first element, when it is a tuple)."""
        if not self.writes_output:
            return None
        h = output if isinstance(output, torch.Tensor) else output[0]
        for edit in self.writes_output:
            h = self.mark(edit, h) if observing() else edit.apply_to(h, module)
        return h if isinstance(output, torch.Tensor) else (h, *output[1:])

    @staticmethod
    def mark(edit: Edit, h: torch.Tensor) -> torch.Tensor:
        """While the model is only looked at: the edit fired, if what it reads had been seen."""
        edit.fired |= edit.place.source is None or edit.seen is not None
        edit.seen = None
        return h

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()


class AttentionPort:
    """The edits in use inside one attention; the attention function finds them through the module."""

    def __init__(self, module: nn.Module, path: str) -> None:
        self.path, self.module, self.active = path, module, list[Edit]()
        module.__dict__[PORT] = self

    def serve(self, edits: Iterable[Edit]) -> None:
        self.active = [e for e in edits if e.place.target.path == self.path and e.place.target.side == "attention"]

    def edits(self) -> list[Edit]:
        return self.active

    def mark(self) -> None:
        for edit in self.active:
            edit.fired = True

    def remove(self) -> None:
        self.module.__dict__.pop(PORT, None)
