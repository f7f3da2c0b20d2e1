"""A tensor that several edits read: picked once, and their projections of it made as one product."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from ..algebra.sites import Place
from ..mathematics.forms import Form

Projected = tuple[Mapping[str, torch.Tensor], torch.Tensor]
"""An edit's tensors, and u W, with which its form begins."""

Pick = Callable[[torch.Tensor], torch.Tensor]


class Reader(Protocol):
    """What this file needs of an edit."""

    form: Form
    place: Place
    training: bool
    sharing: SharedInput | None

    def projects(self) -> bool: ...
    def tensors(self) -> Mapping[str, torch.Tensor]: ...


class SharedInput:
    """One u that several edits read, and, without gradients, u W of all of them, W being the first projection of each.

    The first of them makes it in each pass, the others take theirs if they read that very u; else each makes its own,
    as all do where a dropout comes first. It is let go when all have taken theirs. With gradients each makes its own:
    one product in place of two is not measurably faster there, and the backward pass would keep all W's once more.
    """

    def __init__(self, readers: Sequence[Reader]) -> None:
        """readers: in the order in which they act."""
        self.readers = tuple(readers)
        # what is known before a pass: Python between products costs several times what it does in a loop of its own
        self.names = {training: [r.form.projects(training) for r in readers] for training in (False, True)}
        self._forget()

    def _forget(self) -> None:
        self.whole: torch.Tensor | None = None
        self.u: torch.Tensor | None = None
        self.waiting: dict[Reader, Projected] = {}

    def picked(self, reader: Reader, whole: torch.Tensor, pick: Pick) -> torch.Tensor:
        """u: the rows of a tensor that the edits are for, the same one for all that read this tensor."""
        if reader is self.readers[0]:
            self.whole, self.u = whole, pick(whole)
        return self.u if self.u is not None and self.whole is whole else pick(whole)

    def projected(self, reader: Reader, u: torch.Tensor) -> Projected | None:
        """For one of the edits; None where it must make its own."""
        if torch.is_grad_enabled():
            if reader is self.readers[-1]:
                self._forget()
            return None
        if reader is self.readers[0]:
            self.u, self.waiting = u, self._projected(u)
        known = self.u is u
        found = self.waiting.pop(reader, None)
        if not self.waiting:
            self._forget()
        return found if known else None

    def _projected(self, u: torch.Tensor) -> dict[Reader, Projected]:
        """Of all, in one product; of none where a dropout comes first. u W (positions, r)."""
        names = self.names[any(reader.training for reader in self.readers)]
        if None in names:
            return {}
        tensors = [reader.tensors() for reader in self.readers]
        weights = [own[name] for own, name in zip(tensors, names, strict=True) if name is not None]
        joined = torch.cat(weights)
        joined = joined if joined.dtype == u.dtype else joined.to(u.dtype)
        product = u.flatten(0, -2) @ joined.t()
        parts = product.split([weight.shape[0] for weight in weights], dim=-1)
        return {reader: (own, v) for reader, own, v in zip(self.readers, tensors, parts, strict=True)}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "whole": None, "u": None, "waiting": {}}


def share(reads: Mapping[Reader, torch.Tensor | None]) -> None:
    """Let the edits of a sub-layer that read one tensor share it, where all begin by projecting it.

    reads: what each was seen to read, in the order in which they act.
    """
    together: dict[tuple[str, int], list[Reader]] = {}
    for reader, read in reads.items():
        if read is not None and reader.projects():
            together.setdefault((reader.place.sublayer, id(read)), []).append(reader)
    for readers in together.values():
        shared = SharedInput(readers) if len(readers) > 1 else None
        for reader in readers:
            reader.sharing = shared


def unshare(readers: Iterable[Reader]) -> None:
    """Edits and what they share hold one another: so they are gone at once, and not when garbage is collected."""
    for reader in readers:
        reader.sharing = None
