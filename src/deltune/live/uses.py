"""Who uses which delta: every row of a batch the same one, or each row its own.

A row of the batch may stand for several rows of a tensor, one after the other: the beams of generation, or a batch
whose rows and tokens are one axis.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from ..errors import DeltuneError
from .edits import Delta, Edit

Own = Mapping[str, Callable[[], torch.Tensor]]
"""A module's tensors of which a delta has values of its own, by leaf."""


@dataclass(eq=False)
class Use:
    """A delta in use by all rows (`rows` None), or by some of `of` rows.

    own: where it is in use by some rows, its own values of the tensors of modules.
    """

    delta: Delta
    rows: tuple[int, ...] | None = None
    of: int = 0
    own: Mapping[nn.Module, Own] = field(default_factory=dict)
    known: dict[tuple[int, torch.device], torch.Tensor] = field(default_factory=dict)

    def index(self, size: int, device: torch.device) -> torch.Tensor:
        """Its rows in a tensor of `size` rows. Error: a tensor that does not have the batch's rows."""
        assert self.rows is not None
        if (size, device) not in self.known:
            if size % self.of:
                raise DeltuneError(
                    f"rows() names the deltas of {self.of} rows, and a tensor of {size} rows came: give one name (or "
                    "None) for each row of the batch"
                )
            each = size // self.of
            found = [row * each + i for row in self.rows for i in range(each)]
            with torch.inference_mode(False):  # it is used in training too
                self.known[size, device] = torch.tensor(found, device=device)
        return self.known[size, device]

    def pick(self, whole: torch.Tensor) -> torch.Tensor:
        """Its rows of a tensor."""
        return whole if self.rows is None else whole.index_select(0, self.index(whole.shape[0], whole.device))

    def put(self, whole: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        """The tensor with its rows replaced."""
        if self.rows is None:
            return part
        return whole.index_copy(0, self.index(whole.shape[0], whole.device), part)

    @contextlib.contextmanager
    def lending(self, module: nn.Module) -> Iterator[None]:
        """The module with the delta's own tensors in its slots."""
        own = self.own.get(module, {})
        before = {leaf: module._parameters[leaf] for leaf in own}
        try:
            for leaf, value in own.items():
                module._parameters[leaf] = value()  # type: ignore[assignment]
            yield
        finally:
            module._parameters.update(before)


def edits_of(uses: Sequence[Use]) -> list[tuple[Edit, Use]]:
    """The edits of all that is in use, each with whose it is."""
    return [(edit, use) for use in uses for edit in use.delta.all_edits()]


def single(uses: Sequence[Use]) -> bool:
    """Whether all rows are alike."""
    return all(use.rows is None for use in uses)


def joined(whole: torch.Tensor, parts: Mapping[Use, torch.Tensor]) -> torch.Tensor:
    """The tensor with the rows of every use replaced, in one copy whatever the number of uses."""
    index = torch.cat([use.index(whole.shape[0], whole.device) for use in parts])
    return whole.index_copy(0, index, torch.cat(tuple(parts.values())))


def by_row(
    parts: Sequence[tuple[Use, torch.Tensor]], size: int, at_end: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Each use's tensor (l, …) at its rows: (size, l, …), and which of them are there, (size, l) or None for all.

    l is the greatest; the shorter ones begin with it, or end with it (`at_end`). Rows without a use have nothing.
    """
    if single([use for use, _ in parts]):
        ((_, only),) = parts
        return only.expand(size, *only.shape), None
    longest = max(part.shape[0] for _, part in parts)
    device = parts[0][1].device
    which = torch.full((size,), len(parts), device=device)
    padded, there = [], []
    for number, (use, part) in enumerate(parts):
        which[use.index(size, device)] = number
        left = longest - part.shape[0]
        padded.append(nn.functional.pad(part, (0, 0) * (part.dim() - 1) + ((left, 0) if at_end else (0, left))))
        is_there = torch.arange(longest, device=device)
        there.append(is_there >= left if at_end else is_there < part.shape[0])
    padded.append(torch.zeros_like(padded[0]))
    there.append(torch.zeros_like(there[0]))
    return torch.stack(padded)[which], torch.stack(there)[which]
