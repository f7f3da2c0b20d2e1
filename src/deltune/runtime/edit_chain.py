"""What changes one tensor of a pass: edits in their order, those of a fused projection's parts together."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, pairwise

import torch
from torch import nn

from .modules import Again, Edit
from .rows import DeltaRows, combine_rows, is_single

Inputs = dict[Edit, torch.Tensor]
"""What other modules read in a pass, by the edit that uses it; an edit takes its own out."""


@dataclass(frozen=True)
class Parts:
    """Edits of a fused projection's parts: its output is taken apart and put together once for all of them.

    groups: equal blocks of the output; ends: where the parts of a block end, but for the last; edits: of each part.
    multiplying: that is all they do, so they act on a vector of ones, by which the output is multiplied as a whole.
    """

    groups: int
    ends: tuple[int, ...]
    edits: tuple[tuple[int, tuple[Edit, ...]], ...]
    multiplying: bool

    @classmethod
    def of(cls, edits: Sequence[Edit], groups: int) -> Parts:
        """The columns of query, key and value do not overlap."""
        columns = [edit.place.target.columns for edit in edits]
        chosen = [part for part in dict.fromkeys(columns) if part is not None]
        ends = sorted({end for part in chosen for end in (part.start, part.stop)} - {0})
        own = (tuple(edit for edit, its in zip(edits, columns, strict=True) if its == part) for part in chosen)
        numbered = tuple(zip([bisect(ends, part.start) for part in chosen], own, strict=True))
        return cls(groups, tuple(ends), numbered, all(edit.multiplies() for edit in edits))

    def apply_to(
        self, h: torch.Tensor, again: Again, inputs: Inputs, read: torch.Tensor | None, out: torch.Tensor | None
    ) -> torch.Tensor:
        """h with the edits of all parts; the arguments, and what `out` is, are those of an edit."""
        if self.multiplying:
            factors = self._changed(h.new_ones(h.shape[-1]), again, inputs, read)
            return h * factors if out is None else out.mul_(factors)
        if out is None or self.groups > 1:
            return self._changed(h, again, inputs, read)
        return self._overwritten(out, again, inputs, read)

    def _overwritten(self, h: torch.Tensor, again: Again, inputs: Inputs, read: torch.Tensor | None) -> torch.Tensor:
        parts = h.split(self._widths(h), dim=-1)
        for number, own in self.edits:
            for edit in own:
                changed = edit.apply_to(parts[number], again, inputs, read, parts[number])
                if changed is not parts[number]:
                    parts[number].copy_(changed)
        return h

    def _changed(self, h: torch.Tensor, again: Again, inputs: Inputs, read: torch.Tensor | None) -> torch.Tensor:
        blocks = self._in_blocks(h)
        parts = list(blocks.split(self._widths(blocks), dim=-1))
        for number, own in self.edits:
            part = self._flat(parts[number])
            for edit in own:
                part = edit.apply_to(part, again, inputs, read, None)
            parts[number] = self._in_blocks(part)
        return self._flat(torch.cat(parts, dim=-1))

    def _in_blocks(self, flat: torch.Tensor) -> torch.Tensor:
        return flat if self.groups == 1 else flat.unflatten(-1, (self.groups, -1))

    def _flat(self, blocks: torch.Tensor) -> torch.Tensor:
        return blocks if self.groups == 1 else blocks.flatten(-2)

    def _widths(self, block: torch.Tensor) -> list[int]:
        return [stop - start for start, stop in pairwise((0, *self.ends, block.shape[-1]))]


def chained(edits: Iterable[Edit]) -> list[Edit | Parts]:
    """Edits at one side of a module, in their order, those of parts that follow one another together."""
    found: list[Edit | Parts] = []
    for groups, some in groupby(edits, key=_groups):
        own = list(some)
        found += [Parts.of(own, groups)] if groups else own
    return found


def _groups(edit: Edit) -> int:
    columns = edit.place.target.columns
    return 0 if columns is None else columns.groups


class EditChain:
    """The edits in use that write at one side of a module. What can be said of them before a pass is said here: a
    compiled graph does not break where they are looped over."""

    def __init__(self, edits: Sequence[tuple[Edit, DeltaRows]]) -> None:
        own = {use: [edit for edit, its in edits if its is use] for use in dict.fromkeys(use for _, use in edits)}
        alike = is_single(tuple(own))
        self.of_all = [one for some in own.values() for one in chained(some)] if alike else []
        # with whether any of its edits reads what the module reads
        self.of_each = [] if alike else [(u, any(e.at_home for e in some), chained(some)) for u, some in own.items()]

    def applied(
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
        if self.of_each:
            return self._row_by_row(h, module, inputs, read)
        whole = h
        for one in self.of_all:  # what an edit made of h may be anybody's: it is not overwritten
            h = one.apply_to(h, module.forward, inputs, read, h if in_place and h is whole else None)
        return h

    def _row_by_row(
        self, h: torch.Tensor, module: nn.Module, inputs: Inputs, read: torch.Tensor | None
    ) -> torch.Tensor:
        parts: dict[DeltaRows, torch.Tensor] = {}
        for use, reads, chain in self.of_each:
            part = use.pick(h)
            its = use.pick(read) if reads and read is not None else None
            again = partial(_forward_of, use, module)
            for one in chain:
                part = one.apply_to(part, again, inputs, its, None)
            parts[use] = part
        return combine_rows(h, parts)


def _forward_of(use: DeltaRows, module: nn.Module, h: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = use.forward_of(module)(h)
    return output
