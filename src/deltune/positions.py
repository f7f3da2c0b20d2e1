"""Positions of the tokens moved on, for a prefix that counts as a cache's content does (PEFT's variant)."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import Any

import torch
from torch import nn

from .anatomy import Anatomy
from .errors import DeltuneError
from .trace import observing
from .uses import Use, edits_of


class PositionTap:
    """Moves the position_ids of one stack's tokens on by what the edits in use take before them."""

    def __init__(self, model: nn.Module, anatomy: Anatomy, path: str) -> None:
        self.stack = next(s for s in anatomy.stacks if s.entry == path)
        self.table = model.get_submodule(self.stack.positions) if self.stack.positions else None
        entry = model.get_submodule(path)
        self.arguments = list(signature(entry.forward).parameters)
        self.shifts: list[tuple[Use, int]] = []
        self.handle = entry.register_forward_pre_hook(self.before, with_kwargs=True)

    def serve(self, uses: Sequence[Use]) -> None:
        own = [(e, u) for e, u in edits_of(uses) if e.place.moves == self.stack.name]
        each = {(u, e.origin): e.modification.form.shift for e, u in own}
        self.shifts = [(use, sum(n for (u, _), n in each.items() if u is use)) for use in uses]
        self.shifts = [(use, shift) for use, shift in self.shifts if shift]

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """position_ids as given, or as the family would count them, plus the shift."""
        if not self.shifts or observing():
            return None
        given = {**dict(zip(self.arguments, args, strict=False)), **kwargs}
        positions = given.get("position_ids")
        tokens = given["input_ids"] if given.get("input_ids") is not None else given["inputs_embeds"]
        if positions is None:
            cache = given.get("past_key_values")
            start = first_position(self.table) + (int(cache.get_seq_length()) if cache is not None else 0)
            positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)[None]
        for use, shift in self.shifts:
            if use.rows is not None:
                positions = positions.expand(tokens.shape[0], -1)
            positions = use.put(positions, use.pick(positions) + shift)
        self.check(positions)
        return (), {**given, "position_ids": positions}

    def check(self, positions: torch.Tensor) -> None:
        rows = None if self.table is None else self.table.get_parameter("weight").shape[0]
        needed = 0 if rows is None else int(positions.max()) + 1 + getattr(self.table, "offset", 0)
        if rows is not None and needed > rows:
            longest = max(shift for _, shift in self.shifts)
            raise DeltuneError(
                f"with shift_positions, these tokens and a prefix of {longest} take {needed} positions, and this "
                f"model has {rows}; shorten the text or the prefix, or leave shift_positions out"
            )

    def remove(self) -> None:
        self.handle.remove()


def first_position(table: nn.Module | None) -> int:
    """The position of the first token where position_ids count it: RoBERTa's come after the padding's row."""
    if table is None or hasattr(table, "offset"):
        return 0
    return unused(table)


def unused(table: Any) -> int:
    """Rows of a position table that stand before the first position: BART's and OPT's offset, RoBERTa's padding."""
    padding = getattr(table, "padding_idx", None)
    return int(getattr(table, "offset", 0 if padding is None else padding + 1))
