"""A tensor that several edits read: picked once, and their projections of it made as one product."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch

from ..mathematics.forms import Form


class Reader(Protocol):
    """What this file needs of an edit."""

    form: Form
    training: bool

    def tensors(self) -> Mapping[str, torch.Tensor]: ...


Projected = tuple[Mapping[str, torch.Tensor], torch.Tensor]
"""An edit's tensors, and u W, with which its form begins."""

Pick = Callable[[torch.Tensor], torch.Tensor]


class SharedInput:
    """One u that several edits read, and u W of all of them, W being the first projection of each.

    Who acts first computes it for all; the others take theirs. It is let go when all have, for it holds the graph.
    """

    def __init__(self, readers: Iterable[Reader]) -> None:
        self.readers = tuple(readers)
        # what is known before a pass: Python between products costs several times what it does in a loop of its own
        self.names = {training: self._names(training) for training in (False, True)}
        self._forget()

    def _names(self, training: bool) -> tuple[str, ...] | None:
        """Of each one's W; None where a dropout comes first."""
        names = tuple(reader.form.projects(training) for reader in self.readers)
        return None if None in names else names  # type: ignore[return-value]

    def _forget(self) -> None:
        self.whole: torch.Tensor | None = None
        self.u: torch.Tensor | None = None
        self.waiting: dict[Reader, Projected] = {}

    def picked(self, whole: torch.Tensor, pick: Pick) -> torch.Tensor:
        """u: the rows of a tensor that the edits are for, the same one for all that read this tensor."""
        if self.whole is not whole or self.u is None:
            self.whole, self.u, self.waiting = whole, pick(whole), {}
        return self.u

    def projected(self, reader: Reader, u: torch.Tensor) -> Projected | None:
        """For one of the edits; None where it must compute its own: a dropout comes first."""
        if not self.waiting or self.u is not u:
            self.u, self.waiting = u, self._projected(u)
        found = self.waiting.pop(reader, None)
        if not self.waiting:
            self._forget()
        return found

    def _projected(self, u: torch.Tensor) -> dict[Reader, Projected]:
        """Of all, in one product; of none where a dropout comes first. v (positions, r)."""
        names = self.names[self.readers[0].training]
        if names is None:
            return {}
        tensors = [reader.tensors() for reader in self.readers]
        weights = [own[name] for own, name in zip(tensors, names, strict=True)]
        joined = torch.cat(weights)
        joined = joined if joined.dtype == u.dtype else joined.to(u.dtype)
        product = u.flatten(0, -2) @ joined.t()
        parts = product.split([weight.shape[0] for weight in weights], dim=-1)
        return {reader: (own, v) for reader, own, v in zip(self.readers, tensors, parts, strict=True)}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "whole": None, "u": None, "waiting": {}}
