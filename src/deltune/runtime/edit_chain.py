"""What changes one tensor of a pass: edits in their order, those of a fused projection's parts together."""

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
"""What other modules read in a pass, by the edit that uses it; an edit takes its own out."""


@dataclass(frozen=True)
class FusedEdits:
    """Edits of a fused projection's parts: its output is taken apart and put together once for all of them.

    groups: equal blocks of the output; ends: where the parts of a block end, but for the last; edits: of each part.
    multiplying: that is all they do, so they act on a vector of ones, by which the output is multiplied as a whole.
    """

    groups: int
    ends: tuple[int, ...]
    edits: tuple[tuple[int, tuple[Edit, ...]], ...]
    multiplying: bool

    @classmethod
    def of(cls, edits: Sequence[Edit], groups: int) -> FusedEdits:
        """The columns of query, key and value do not overlap."""
        columns = [edit.place.target.columns for edit in edits]
        chosen = [part for part in dict.fromkeys(columns) if part is not None]
        ends = sorted({end for part in chosen for end in (part.start, part.stop)} - {0})
        own = (tuple(edit for edit, its in zip(edits, columns, strict=True) if its == part) for part in chosen)
        numbered = tuple(zip([bisect(ends, part.start) for part in chosen], own, strict=True))
        return cls(groups, tuple(ends), numbered, all(edit.only_scales() for edit in edits))

    def apply_to(
        self, h: torch.Tensor, again: RerunModule, inputs: Inputs, read: torch.Tensor | None, out: torch.Tensor | None
    ) -> torch.Tensor:
        """h with the edits of all parts; the arguments, and what `out` is, are those of an edit."""
        if self.multiplying:
            factors = self._apply(h.new_ones(h.shape[-1]), again, inputs, read)
            return h * factors if out is None else out.mul_(factors)
        if out is None or self.groups > 1:
            return self._apply(h, again, inputs, read)
        return self._apply_in_place(out, again, inputs, read)

    def _apply_in_place(
        self, h: torch.Tensor, again: RerunModule, inputs: Inputs, read: torch.Tensor | None
    ) -> torch.Tensor:
        parts = h.split(self._widths(h), dim=-1)
        for number, own in self.edits:
            for edit in own:
                changed = edit.apply_to(parts[number], again, inputs, read, parts[number])
                if changed is not parts[number]:
                    parts[number].copy_(changed)
        return h

    def _apply(self, h: torch.Tensor, again: RerunModule, inputs: Inputs, read: torch.Tensor | None) -> torch.Tensor:
        blocks = self._to_blocks(h)
        parts = list(blocks.split(self._widths(blocks), dim=-1))
        for number, own in self.edits:
            part = self._from_blocks(parts[number])
            for edit in own:
                part = edit.apply_to(part, again, inputs, read, None)
            parts[number] = self._to_blocks(part)
        return self._from_blocks(torch.cat(parts, dim=-1))

    def _to_blocks(self, flat: torch.Tensor) -> torch.Tensor:
        return flat if self.groups == 1 else flat.unflatten(-1, (self.groups, -1))

    def _from_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        return blocks if self.groups == 1 else blocks.flatten(-2)

    def _widths(self, block: torch.Tensor) -> list[int]:
        return [stop - start for start, stop in pairwise((0, *self.ends, block.shape[-1]))]


def group_fused(edits: Iterable[Edit]) -> list[Edit | FusedEdits]:
    """Edits at one side of a module, in their order, those of parts that follow one another together."""
    found: list[Edit | FusedEdits] = []
    for groups, some in groupby(edits, key=_block_count):
        own = list(some)
        found += [FusedEdits.of(own, groups)] if groups else own
    return found


def _block_count(edit: Edit) -> int:
    columns = edit.place.target.columns
    return 0 if columns is None else columns.groups


class EditChain:
    """The edits in use that write at one side of a module. What can be said of them before a pass is said here: a
    compiled graph does not break where they are looped over."""

    def __init__(self, edits: Sequence[tuple[Edit, DeltaRows]]) -> None:
        own = {
            group: [edit for edit, its in edits if its is group] for group in dict.fromkeys(group for _, group in edits)
        }
        alike = all_rows_alike(tuple(own))
        self.for_all_rows = [one for some in own.values() for one in group_fused(some)] if alike else []
        # with whether any of its edits reads what the module reads
        self.by_group = (
            [] if alike else [(u, any(e.reads_own_input for e in some), group_fused(some)) for u, some in own.items()]
        )

    def apply(
        self,
        h: torch.Tensor,
        module: nn.Module,
        inputs: Inputs,
        read: torch.Tensor | None = None,
        in_place: bool = False,
    ) -> torch.Tensor:
        """h with the edits, each in the rows that use it.

        Args:
            inputs: What other modules read in this pass, for the edits that use it.
            read: What the module itself read.
            in_place: h may be overwritten.
        """
        if self.by_group:
            return self._row_by_row(h, module, inputs, read)
        whole = h
        for one in self.for_all_rows:  # what an edit made of h may be anybody's: it is not overwritten
            h = one.apply_to(h, module.forward, inputs, read, h if in_place and h is whole else None)
        return h

    def _row_by_row(
        self, h: torch.Tensor, module: nn.Module, inputs: Inputs, read: torch.Tensor | None
    ) -> torch.Tensor:
        parts: dict[DeltaRows, torch.Tensor] = {}
        for group, reads, chain in self.by_group:
            part = group.select(h)
            its = group.select(read) if reads and read is not None else None
            again = partial(_forward_of, group, module)
            for one in chain:
                part = one.apply_to(part, again, inputs, its, None)
            parts[group] = part
        return combine_rows(h, parts)


def _forward_of(group: DeltaRows, module: nn.Module, h: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = group.forward_of(module)(h)
    return output
