"""Mixed batches: each row of one batch with a delta of its own."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import signature
from typing import Any, Protocol

import torch
from torch import nn

from ..anatomy.values import Tensor
from ..errors import DeltuneError, all_problems, unknown
from .edits import Delta, Labels, slot_key
from .rowwise import NormTap, RowTap
from .uses import Own, Use

READ = ("input_ids", "inputs_embeds", "decoder_input_ids")
"""Arguments that have a row for each row of the batch."""
REPEATS = {"past_key_values", "encoder_outputs", "use_cache"}
"""Arguments that `generate` gives, which repeats rows for its beams."""

Slots = Mapping[str, list[tuple[nn.Module, str]]]
"""For every parameter of a model, the modules and leaves that hold it."""

BY_ROW = ("norm.gain", "norm.bias", "linear.weight", "linear.bias")
"""Roles of tensors whose module reads a batch row by row."""


class Hook(Protocol):
    """What stands in the model while rows differ."""

    def remove(self) -> None: ...


Rowwise = tuple[list[Use], list[Hook]]
"""What a mixed batch needs while it lasts."""


def begin(model: nn.Module, uses: list[Use], labels: Sequence[Labels], rows: int) -> Rowwise:
    """Let every delta of a mixed batch train, and the modules whose tensors differ run by rows."""
    for use in uses:
        use.delta.wake()
        for parameter in use.delta.parameters():
            if parameter.requires_grad and not any(
                type(h) is _InTime for h in (parameter._backward_hooks or {}).values()
            ):
                parameter.register_hook(_InTime(parameter))
    own = dict.fromkeys(module for use in uses for module in use.own)
    taps: list[Hook] = [(NormTap if NormTap.fits(module) else RowTap)(module, uses) for module in own]
    taps.append(model.register_forward_pre_hook(_Checked(model, labels, rows), with_kwargs=True))
    return uses, taps


def end(rowwise: Rowwise) -> None:
    uses, taps = rowwise
    for tap in taps:
        tap.remove()
    for use in uses:
        use.delta.rest()


def uses_of(
    names: Sequence[str | None],
    deltas: Mapping[str, Delta],
    tensors: Sequence[Tensor],
    slots: Slots,
    original: Callable[[str], nn.Parameter],
) -> list[Use]:
    """One use for each delta that is named. Errors: names that are not there, deltas that cannot differ by row."""
    if not names or isinstance(names, str):
        got = repr(names) if names else "none"
        raise DeltuneError(f"rows() wants a list with a delta's name, or None, for each row of the batch; it got {got}")
    known = [name for name in dict.fromkeys(names) if name is not None]
    problems = [unknown("delta", name, deltas) for name in known if name not in deltas]
    uses = []
    for name in known if not problems else []:
        delta = deltas[name]
        own = {*delta.owned, *(tensor for tensor, _ in delta.masked())}
        shared = [t.name for t in tensors if t.name in own and (t.common or t.role not in BY_ROW) and t.area != "head"]
        if shared:
            more = f" and {len(shared) - 2} more" if len(shared) > 2 else ""
            problems.append(
                f"{name!r} ({delta.method!r}) trains {', '.join(shared[:2])}{more}, which all rows of a batch share; "
                f"use({name!r}) it for a batch of its own"
            )
        rows = tuple(i for i, other in enumerate(names) if other == name)
        uses.append(Use(delta, rows, len(names), _own(delta, slots, original)))
    if problems:
        raise all_problems("these rows cannot be in one batch", problems)
    return uses


def _own(delta: Delta, slots: Slots, original: Callable[[str], nn.Parameter]) -> dict[nn.Module, Own]:
    """The delta's own values of the model's tensors, by the modules that hold them."""
    found: dict[nn.Module, dict[str, Callable[[], torch.Tensor]]] = {}
    for name in delta.owned:
        for module, leaf in slots[name]:
            found.setdefault(module, {})[leaf] = partial(delta.held.__getitem__, slot_key(name))
    for name, sparse in delta.masked():
        for module, leaf in slots[name]:
            found.setdefault(module, {})[leaf] = partial(sparse.on, original(name).detach())
    return {**found}


class _InTime:
    """A gradient that comes after its delta was put to rest would be dropped without a word: it is an error."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = weakref.ref(parameter)  # which holds this

    def __call__(self, gradient: torch.Tensor) -> None:
        parameter = self.parameter()
        if parameter is not None and not parameter.requires_grad:
            raise DeltuneError(
                "a gradient came for a delta that is not in use any more: do the backward pass of a mixed batch inside "
                "its rows(), that of another before the next use()"
            )


class _Checked:
    """Before a pass of the whole model: as many rows as names, and one loss that is right for all of them."""

    def __init__(self, model: nn.Module, labels: Sequence[Labels], rows: int) -> None:
        sizes = {len(known.id2label) for known in labels}
        types = {known.problem_type for known in labels}
        self.arguments, self.rows = list(signature(model.forward).parameters), rows
        self.wrong = (1 in sizes and len(sizes) > 1) or len(types - {None}) > 1
        self.unequal = len(sizes) > 1

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = {**dict(zip(self.arguments, args, strict=False)), **kwargs}
        first = next((t for n, t in given.items() if n in READ and isinstance(t, torch.Tensor)), None)
        if (
            first is not None
            and first.shape[0] != self.rows
            and (first.shape[0] % self.rows or not REPEATS & set(given))
        ):
            raise DeltuneError(
                f"rows() names the deltas of {self.rows} rows, and a batch of {first.shape[0]} came: give one name (or "
                "None) for each row of the batch"
            )
        labels = given.get("labels")
        several = isinstance(labels, torch.Tensor) and labels.is_floating_point() and self.unequal
        if labels is not None and (self.wrong or several):
            raise DeltuneError(
                "the rows of this batch have different kinds of labels (classes, numbers, several at once), for which "
                "the model has no common loss; leave labels out and take the loss of each row's logits"
            )
