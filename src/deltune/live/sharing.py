"""A tensor that several edits read: picked once, and their projections of it made as one product."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch

from ..algebra.elements import Modification


class Reader(Protocol):
    """What this file needs of an edit."""

    modification: Modification
    training: bool

    def tensors(self) -> Mapping[str, torch.Tensor]: ...


Projected = tuple[Mapping[str, torch.Tensor], torch.Tensor]
"""An edit's tensors, and u W, with which its form begins."""


class SharedInput:
    """One u that several edits read, and u W of all of them, W being the first projection of each.

    Who acts first computes it for all; the others take theirs. It is let go when all have, for it holds the graph.
    """

    def __init__(self, readers: Iterable[Reader]) -> None:
        self.readers = tuple(readers)
        self._forget()

    def _forget(self) -> None:
        self.whole: torch.Tensor | None = None
        self.u: torch.Tensor | None = None
        self.waiting: dict[Reader, Projected] = {}

    def read(self, whole: torch.Tensor, pick: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """u: the rows of a tensor that the edits are for, the same one for all that read this tensor."""
        if self.whole is not whole or self.u is None:
            self.whole, self.u, self.waiting = whole, pick(whole), {}
        return self.u

    def projected(self, reader: Reader, u: torch.Tensor) -> Projected | None:
        """For one of the edits; None where it must compute its own: a dropout comes first, or u is another one."""
        if u is not self.u:
            return None
        if not self.waiting:
            self.waiting = self._projected(u)
        found = self.waiting.pop(reader, None)
        if not self.waiting:
            self._forget()
        return found

    def _projected(self, u: torch.Tensor) -> dict[Reader, Projected]:
        """Of all, in one product; of none where a dropout comes first."""
        found: dict[Reader, Mapping[str, torch.Tensor]] = {}
        weights: list[torch.Tensor] = []
        for reader in self.readers:
            first = reader.modification.form.projects(reader.training)
            if first is None:
                return {}
            found[reader] = reader.tensors()
            weights.append(found[reader][first].to(u.dtype))
        product = torch.nn.functional.linear(u, torch.cat(weights))
        parts = product.split([weight.shape[0] for weight in weights], dim=-1)
        return {reader: (own, part) for (reader, own), part in zip(found.items(), parts, strict=True)}

    def __getstate__(self) -> dict[str, Any]:
        return {"readers": self.readers, "whole": None, "u": None, "waiting": {}}
