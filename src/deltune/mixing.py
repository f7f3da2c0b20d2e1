"""Mixed batches: each row of one batch with a delta of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from .edits import Delta, Labels, slot_key
from .errors import DeltuneError, all_problems, unknown
from .taps import RowTap
from .uses import Own, Use

if TYPE_CHECKING:
    from .handle import Tuned

BY_ROW = ("norm.gain", "norm.bias", "linear.weight", "linear.bias")
"""Roles of tensors whose module reads a batch row by row."""


@contextlib.contextmanager
def mixed(tuned: Tuned, names: Sequence[str | None]) -> Iterator[None]:
    """Inside the context, row i of a batch uses names[i]."""
    uses = _uses(tuned, tuple(names))
    model, before = tuned.model, tuned.active
    tuned.use(None)
    taps: list[Any] = []
    try:
        tuned.mixed = tuple(names)
        for use in uses:
            _train(use.delta)
        for tap in tuned.taps.values():
            tap.serve(uses)
        taps += [RowTap(module, uses) for module in dict.fromkeys(module for use in uses for module in use.own)]
        labels = [use.delta.labels or tuned.base_labels for use in uses]
        labels += [tuned.base_labels] if None in names else []
        if tuned.anatomy.head:
            tuned.label(model, max(labels, key=lambda known: len(known.id2label)))
            taps.append(model.register_forward_pre_hook(_Checked(labels), with_kwargs=True))
        yield
    finally:
        for tap in taps:
            tap.remove()
        for use in uses:
            use.delta.requires_grad_(False)
        tuned.mixed = ()
        tuned.use(before)


def _uses(tuned: Tuned, names: tuple[str | None, ...]) -> list[Use]:
    """One use for each delta that is named. Errors: names that are not there, deltas that cannot differ by row."""
    if not names:
        raise DeltuneError("rows() wants a delta's name, or None, for each row of the batch; it got none")
    known = [name for name in dict.fromkeys(names) if name is not None]
    problems = [unknown("delta", name, tuned.names) for name in known if name not in tuned.deltas]
    uses = []
    for name in known if not problems else []:
        delta = tuned.delta(name)
        shared = _shared(tuned, delta)
        if shared:
            more = f" and {len(shared) - 2} more" if len(shared) > 2 else ""
            problems.append(
                f"{name!r} ({delta.method!r}) trains {', '.join(shared[:2])}{more}, which all rows of a batch share; "
                f"use({name!r}) it for a batch of its own"
            )
        rows = tuple(i for i, other in enumerate(names) if other == name)
        uses.append(Use(delta, rows, len(names), _own(tuned, delta)))
    if problems:
        raise all_problems("these rows cannot be in one batch", problems)
    return uses


def _shared(tuned: Tuned, delta: Delta) -> list[str]:
    """Names of a delta's own tensors that cannot differ from row to row."""
    own = {*delta.owned, *(name for name, _ in delta.masked())}
    return [t.name for t in tuned.anatomy.tensors if t.name in own and t.role not in BY_ROW and t.area != "head"]


def _own(tuned: Tuned, delta: Delta) -> dict[nn.Module, Own]:
    """The delta's own values of the model's tensors, by the modules that hold them."""
    found: dict[nn.Module, dict[str, Any]] = {}
    for name in delta.owned:
        for module, leaf in tuned.slots[name]:
            found.setdefault(module, {})[leaf] = lambda name=name: delta.held[slot_key(name)]
    for name, sparse in delta.masked():
        for module, leaf in tuned.slots[name]:
            rest = tuned.original(name)
            found.setdefault(module, {})[leaf] = lambda sparse=sparse, rest=rest: sparse.on(rest.detach())
    return found  # type: ignore[return-value]


def _train(delta: Delta) -> None:
    """Its parameters train, those of a frozen head that it does not select do not."""
    delta.requires_grad_(True)
    for frozen in delta.head if delta.head_mode == "freeze" else ():
        delta.held[slot_key(frozen)].requires_grad_(frozen in delta.selected)


class _Checked:
    """Before a forward pass with labels: one loss must be right for all rows."""

    def __init__(self, labels: Sequence[Labels]) -> None:
        sizes = {len(known.id2label) for known in labels}
        types = {known.problem_type for known in labels}
        self.wrong = (1 in sizes and len(sizes) > 1) or len(types - {None}) > 1
        self.wrong |= "multi_label_classification" in types and len(sizes) > 1

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.wrong and kwargs.get("labels") is not None:
            raise DeltuneError(
                "the rows of this batch have different kinds of labels (classes, numbers, several at once), for which "
                "the model has no common loss; leave labels out and take the loss of each row's logits"
            )
