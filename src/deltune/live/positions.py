"""Positions of the tokens moved on, for a prefix that counts as a cache's content does (PEFT's variant)."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import Any

import torch
from torch import nn

from ..anatomy.trace import observing
from ..anatomy.values import Anatomy
from ..errors import DeltuneError
from .uses import Use, edits_of


class PositionTap:
    """Moves the positions of one stack's tokens on by what the edits in use take before them.

    Where they are looked up in a table, the table is read that much further down, however the family counts; else its
    position_ids grow.
    """

    def __init__(self, model: nn.Module, anatomy: Anatomy, path: str) -> None:
        stack = next(s for s in anatomy.stacks if s.entry == path)
        self.name = stack.name
        self.table = model.get_submodule(stack.positions) if stack.positions else None
        entry = model.get_submodule(path)
        self.arguments = list(signature(entry.forward).parameters)
        self.shifts: list[tuple[Use, int]] = []
        self.size = 0  # rows of the batch under way
        self.handles = [entry.register_forward_pre_hook(self.before, with_kwargs=True)]
        if self.table is not None:
            self.handles.append(self.table.register_forward_hook(self.looked_up, with_kwargs=True))

    def serve(self, uses: Sequence[Use]) -> None:
        own = [(e, u) for e, u in edits_of(uses) if e.place.moves == self.name]
        each = {(u, e.origin): e.modification.form.shift for e, u in own}
        self.shifts = [(use, sum(n for (u, _), n in each.items() if u is use)) for use in uses]
        self.shifts = [(use, shift) for use, shift in self.shifts if shift]

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """position_ids as given, or as counted, plus the shift; with a table, only a look at its length."""
        if not self.shifts or observing():
            return None
        given = {**dict(zip(self.arguments, args, strict=False)), **kwargs}
        tokens = given["input_ids"] if given.get("input_ids") is not None else given["inputs_embeds"]
        cache = given.get("past_key_values")
        seen = int(cache.get_seq_length()) if cache is not None else 0
        self.size = tokens.shape[0]
        if self.table is not None:
            self.check(self.table, seen + tokens.shape[1])
            return None
        positions = given.get("position_ids")
        if positions is None:
            positions = torch.arange(seen, seen + tokens.shape[1], device=tokens.device)[None]
        for use, shift in self.shifts:
            if use.rows is not None:
                positions = positions.expand(tokens.shape[0], -1)
            positions = use.put(positions, use.pick(positions) + shift)
        return (), {**given, "position_ids": positions}

    def looked_up(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor) -> Any:
        """What the table gives when it begins that much further down."""
        if not self.shifts or observing():
            return None
        weight = module._parameters["weight"]
        assert weight is not None
        for use, shift in self.shifts:
            try:
                module._parameters["weight"] = weight[shift:]  # type: ignore[assignment]
                moved = module.forward(*args, **kwargs)
            finally:
                module._parameters["weight"] = weight
            if use.rows is not None:  # it may have looked up one row, (n, d) or (1, n, d), for all
                output = output.expand(self.size, *output.shape[-2:])
            output = use.put(output, use.pick(moved.expand(output.shape)))
        return output

    def check(self, table: nn.Module, tokens: int) -> None:
        """The table must hold the tokens' moved positions."""
        longest = max(shift for _, shift in self.shifts)
        rows = table.get_parameter("weight").shape[0] - unused(table)
        if tokens + longest > rows:
            raise DeltuneError(
                f"with shift_positions, {tokens} tokens and a prefix of {longest} take {tokens + longest} positions, "
                f"and this model has {rows}; shorten the text or the prefix, or leave shift_positions out"
            )

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()


def first_position(table: nn.Module | None) -> int:
    """The position of the first token where position_ids count it: RoBERTa's come after the padding's row."""
    if table is None or hasattr(table, "offset"):
        return 0
    return unused(table)


def unused(table: Any) -> int:
    """Rows of a position table that stand before the first position: BART's and OPT's offset, RoBERTa's padding."""
    padding = getattr(table, "padding_idx", None)
    return int(getattr(table, "offset", 0 if padding is None else padding + 1))
