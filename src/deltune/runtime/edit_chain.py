"""Applies all edits of one tensor in their order; those of the parts of a fused projection are applied together."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, pairwise

import torch
from torch import nn

from .modules import Edit, RerunModule
from .rows import DeltaRows, all_rows_alike, combine_rows

Inputs = dict[Edit, torch.Tensor]
"""The inputs of other modules in a pass, by the edit that uses them; an edit removes its own."""


@dataclass(frozen=True)
class FusedEdits:
    """Edits of the parts of a fused projection, whose output is split and concatenated once for all of them.

    Attributes:
        groups: The number of equal blocks of the output.
        ends: Where the parts of a block end, except for the last.
        edits: The edits of each part, with the part's number.
        multiplying: Whether all edits only scale. They are then applied to a vector of ones, and the output is
            multiplied by the result.
    """

    groups: int
    ends: tuple[int, ...]
    edits: tuple[tuple[int, tuple[Edit, ...]], ...]
    multiplying: bool

    @classmethod
    def of(cls, edits: Sequence[Edit], groups: int) -> FusedEdits:
        """Group the edits of a fused projection by part; the columns of query, key and value do not overlap."""
        columns = [edit.place.target.columns for edit in edits]
        chosen = [part for part in dict.fromkeys(columns) if part is not None]
        ends = sorted({end for part in chosen for end in (part.start, part.stop)} - {0})
        edits_of_parts = (
            tuple(edit for edit, other in zip(edits, columns, strict=True) if other == part) for part in chosen
        )
        numbered = tuple(zip([bisect(ends, part.start) for part in chosen], edits_of_parts, strict=True))
        return cls(groups, tuple(ends), numbered, all(edit.only_scales() for edit in edits))

    def apply_to(
        self,
        h: torch.Tensor,
        rerun: RerunModule,
        inputs: Inputs,
        module_input: torch.Tensor | None,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return h with the edits of all parts; the arguments are those of `Edit.apply_to`."""
        if self.multiplying:
            factors = self._apply(h.new_ones(h.shape[-1]), rerun, inputs, module_input)
            return h * factors if out is None else out.mul_(factors)
        if out is None or self.groups > 1:
            return self._apply(h, rerun, inputs, module_input)
        return self._apply_in_place(out, rerun, inputs, module_input)

    def _apply_in_place(
        self, h: torch.Tensor, rerun: RerunModule, inputs: Inputs, module_input: torch.Tensor | None
    ) -> torch.Tensor:
        parts = h.split(self._widths(h), dim=-1)
        for number, edits in self.edits:
            for edit in edits:
                changed = edit.apply_to(parts[number], rerun, inputs, module_input, parts[number])
                if changed is not parts[number]:
                    parts[number].copy_(changed)
        return h

    def _apply(
        self, h: torch.Tensor, rerun: RerunModule, inputs: Inputs, module_input: torch.Tensor | None
    ) -> torch.Tensor:
        blocks = self._to_blocks(h)
        parts = list(blocks.split(self._widths(blocks), dim=-1))
        for number, edits in self.edits:
            part = self._from_blocks(parts[number])
            for edit in edits:
                part = edit.apply_to(part, rerun, inputs, module_input, None)
            parts[number] = self._to_blocks(part)
        return self._from_blocks(torch.cat(parts, dim=-1))

    def _to_blocks(self, flat: torch.Tensor) -> torch.Tensor:
        return flat if self.groups == 1 else flat.unflatten(-1, (self.groups, -1))

    def _from_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        return blocks if self.groups == 1 else blocks.flatten(-2)

    def _widths(self, block: torch.Tensor) -> list[int]:
        return [stop - start for start, stop in pairwise((0, *self.ends, block.shape[-1]))]


def group_fused(edits: Iterable[Edit]) -> list[Edit | FusedEdits]:
    """Group consecutive edits of the parts of a fused projection; the order is kept."""
    chain: list[Edit | FusedEdits] = []
    for block_count, group in groupby(edits, key=_block_count):
        group_edits = list(group)
        chain += [FusedEdits.of(group_edits, block_count)] if block_count else group_edits
    return chain


def _block_count(edit: Edit) -> int:
    columns = edit.place.target.columns
    return 0 if columns is None else columns.groups


class EditChain:
    """The edits in use that change the input or the output of one module.

    Everything that is known before a pass is computed here, so that torch.compile can unroll the loop over them.
    """

    def __init__(self, edits: Sequence[tuple[Edit, DeltaRows]]) -> None:
        edits_of_groups = {
            group: [edit for edit, its in edits if its is group] for group in dict.fromkeys(group for _, group in edits)
        }
        alike = all_rows_alike(tuple(edits_of_groups))
        self.for_all_rows = [one for some in edits_of_groups.values() for one in group_fused(some)] if alike else []
        # with whether any of its edits reads the module's own input
        self.by_group = (
            []
            if alike
            else [(u, any(e.reads_own_input for e in some), group_fused(some)) for u, some in edits_of_groups.items()]
        )

    def apply(
        self,
        h: torch.Tensor,
        module: nn.Module,
        inputs: Inputs,
        module_input: torch.Tensor | None = None,
        in_place: bool = False,
    ) -> torch.Tensor:
        """Return h with the edits applied, each to the rows that use it.

        Args:
            h: The input or output of the module.
            module: The module.
            inputs: The inputs of other modules in this pass.
            module_input: The input of the module itself.
            in_place: Whether h may be overwritten.
        """
        if self.by_group:
            return self._row_by_row(h, module, inputs, module_input)
        whole = h
        for one in self.for_all_rows:  # only h itself may be overwritten, not the result of an edit
            h = one.apply_to(h, module.forward, inputs, module_input, h if in_place and h is whole else None)
        return h

    def _row_by_row(
        self, h: torch.Tensor, module: nn.Module, inputs: Inputs, module_input: torch.Tensor | None
    ) -> torch.Tensor:
        parts: dict[DeltaRows, torch.Tensor] = {}
        for group, reads, chain in self.by_group:
            part = group.select(h)
            its = group.select(module_input) if reads and module_input is not None else None
            rerun = partial(_forward_of, group, module)
            for one in chain:
                part = one.apply_to(part, rerun, inputs, its, None)
            parts[group] = part
        return combine_rows(h, parts)


def _forward_of(group: DeltaRows, module: nn.Module, h: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = group.forward_of(module)(h)
    return output
