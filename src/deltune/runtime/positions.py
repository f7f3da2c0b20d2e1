"""Positions of the tokens moved on, for a prefix that counts as a cache's content does (PEFT's variant)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..anatomy.types import Anatomy
from ..compat import remove_hooks
from ..errors import DeltuneError
from .pass_manager import PassManager
from .row_assignment import parameter_names
from .rows import forward_with


class PositionHook:
    """Moves the positions of one stack's tokens on by what the edits in use take before them.

    Where they are looked up in a table, the table is read that much further down, however the family counts; else its
    position_ids grow.
    """

    def __init__(self, passes: PassManager, anatomy: Anatomy, path: str) -> None:
        stack = next(s for s in anatomy.stacks if s.entry == path)
        self.passes, self.stack = passes, stack.name
        self.table = passes.model.get_submodule(stack.positions) if stack.positions else None
        self.entry = passes.model.get_submodule(path)
        self.arguments = parameter_names(self.entry)

    def install(self) -> None:
        self.entry.register_forward_pre_hook(self.before, with_kwargs=True)
        if self.table is not None:
            self.table.register_forward_hook(self.looked_up, with_kwargs=True)

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """position_ids as they came, or as counted, plus the shift; with a table, only a look at its length."""
        shifts = self.passes.assignment().shifts.get(self.stack)
        if not shifts:
            return None
        arguments = {**dict(zip(self.arguments, args, strict=False)), **kwargs}
        tokens = arguments["input_ids"] if arguments.get("input_ids") is not None else arguments["inputs_embeds"]
        cache = arguments.get("past_key_values")
        seen = int(cache.get_seq_length()) if cache is not None else 0
        if self.table is not None:
            self.passes.current_pass().batch_size = tokens.shape[0]
            self.check(self.table, seen + tokens.shape[1], max(shift for _, shift in shifts))
            return None
        positions = arguments.get("position_ids")
        if positions is None:
            positions = torch.arange(seen, seen + tokens.shape[1], device=tokens.device)[None]
        for group, shift in shifts:
            if group.rows is not None:
                positions = positions.expand(tokens.shape[0], -1)
            positions = group.replace(positions, group.select(positions) + shift)
        return (), {**arguments, "position_ids": positions}

    def looked_up(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor) -> Any:
        """What the table gives when it begins that much further down."""
        shifts = self.passes.assignment().shifts.get(self.stack)
        if not shifts:
            return None
        weight = module._parameters["weight"]
        assert weight is not None
        for group, shift in shifts:
            moved = forward_with(module, {"weight": weight[shift:]}, *args, **kwargs)
            if group.rows is not None:  # it may have looked up one row, (n, d) or (1, n, d), for all
                output = output.expand(self.passes.current_pass().batch_size, *output.shape[-2:])
            output = group.replace(output, group.select(moved.expand(output.shape)))
        return output

    def check(self, table: nn.Module, tokens: int, longest: int) -> None:
        """The table must hold the tokens' moved positions."""
        rows = table.get_parameter("weight").shape[0] - unused_position_rows(table)
        if tokens + longest > rows:
            raise DeltuneError(
                f"with shift_positions, {tokens} tokens and a prefix of {longest} take {tokens + longest} positions, "
                f"and this model has {rows}; shorten the text or the prefix, or leave shift_positions out"
            )

    def remove(self) -> None:
        for module in (self.entry, self.table):
            remove_hooks(module, self)


def first_position(table: nn.Module | None) -> int:
    """The position of the first token where position_ids count it: RoBERTa's come after the padding's row."""
    if table is None or hasattr(table, "offset"):
        return 0
    return unused_position_rows(table)


def unused_position_rows(table: Any) -> int:
    """Rows of a position table that stand before the first position: BART's and OPT's offset, RoBERTa's padding."""
    padding = getattr(table, "padding_idx", None)
    return int(getattr(table, "offset", 0 if padding is None else padding + 1))
