"""Shifts the positions of tokens for prefixes that take up positions, as in PEFT."""

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
    """Shifts the positions of one stack's tokens by the length of the prefixes in use.

    If the model has a position table, the table is read from a later row on, however the family counts positions;
    otherwise position_ids are increased.
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
        """Shift position_ids; with a position table only check that it is long enough."""
        shifts = self.passes.assignment().shifts.get(self.stack)
        if not shifts:
            return None
        arguments = {**dict(zip(self.arguments, args, strict=False)), **kwargs}
        tokens = arguments["input_ids"] if arguments.get("input_ids") is not None else arguments["inputs_embeds"]
        cache = arguments.get("past_key_values")
        cached_tokens = int(cache.get_seq_length()) if cache is not None else 0
        if self.table is not None:
            self.passes.current_pass().batch_size = tokens.shape[0]
            self.check(self.table, cached_tokens + tokens.shape[1], max(shift for _, shift in shifts))
            return None
        positions = arguments.get("position_ids")
        if positions is None:
            positions = torch.arange(cached_tokens, cached_tokens + tokens.shape[1], device=tokens.device)[None]
        for group, shift in shifts:
            if group.rows is not None:
                positions = positions.expand(tokens.shape[0], -1)
            positions = group.replace(positions, group.select(positions) + shift)
        return (), {**arguments, "position_ids": positions}

    def looked_up(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor) -> Any:
        """Return what the table gives when it is read from the shifted row on."""
        shifts = self.passes.assignment().shifts.get(self.stack)
        if not shifts:
            return None
        weight = module._parameters["weight"]
        assert weight is not None
        for group, shift in shifts:
            moved = forward_with(module, {"weight": weight[shift:]}, *args, **kwargs)
            if group.rows is not None:  # the table may have been read once for all rows, (n, d) or (1, n, d)
                output = output.expand(self.passes.current_pass().batch_size, *output.shape[-2:])
            output = group.replace(output, group.select(moved.expand(output.shape)))
        return output

    def check(self, table: nn.Module, tokens: int, longest: int) -> None:
        """Raise an error if the table does not have the shifted positions."""
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
    """Return the position_id of the first token; RoBERTa's positions begin after the row of padding."""
    if table is None or hasattr(table, "offset"):
        return 0
    return unused_position_rows(table)


def unused_position_rows(table: Any) -> int:
    """Return the number of table rows before the first position: BART's and OPT's offset, RoBERTa's padding."""
    padding = getattr(table, "padding_idx", None)
    return int(getattr(table, "offset", 0 if padding is None else padding + 1))
