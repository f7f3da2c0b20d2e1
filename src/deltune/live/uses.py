"""Who uses which delta: every row of a batch the same one, or each row its own.

A row of the batch may stand for several rows of a tensor, one after the other: the beams of generation, or a batch
whose rows and tokens are one axis.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from ..compat import exporting
from ..errors import DeltuneError
from .edits import Delta, Edit

OwnTensors = Mapping[str, Callable[[], torch.Tensor]]
"""The tensors of a module of which a delta has values of its own, by leaf; called for the value."""


def run_with(module: nn.Module, tensors: Mapping[str, torch.Tensor], *args: Any, **kwargs: Any) -> Any:
    """Run a module's forward with other tensors in place of some of its parameters.

    The module is not touched, so that other threads may run it meanwhile: what runs is a copy of its attributes.
    """
    twin = object.__new__(type(module))
    twin.__dict__.update(module.__dict__)
    twin.__dict__["_parameters"] = {**module._parameters, **tensors}
    return type(module).forward(twin, *args, **kwargs)


@dataclass(eq=False)
class Use:
    """A delta in use by all rows (`rows` None), or by some of `of` rows.

    own: where it is in use by some rows, its own values of the tensors of modules.
    """

    delta: Delta
    rows: tuple[int, ...] | None = None
    of: int = 0
    own: Mapping[nn.Module, OwnTensors] = field(default_factory=dict)
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
            places = [row * each + i for row in self.rows for i in range(each)]
            with torch.inference_mode(False):  # it is used in training too
                index = torch.tensor(places, device=device)
            if exporting():  # it has no numbers, so it is not kept
                return index
            self.known[size, device] = index
        return self.known[size, device]

    def pick(self, whole: torch.Tensor) -> torch.Tensor:
        """Its rows of a tensor."""
        return whole if self.rows is None else whole.index_select(0, self.index(whole.shape[0], whole.device))

    def put(self, whole: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        """The tensor with its rows replaced."""
        if self.rows is None:
            return part
        return whole.index_copy(0, self.index(whole.shape[0], whole.device), part)

    def forward_of(self, module: nn.Module) -> Callable[..., Any]:
        """The module's forward with the delta's own tensors, for its rows alone."""
        if self.rows is None:
            return module.forward
        tensors = {leaf: value() for leaf, value in self.own.get(module, {}).items()}
        return partial(run_with, module, tensors)


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


def edits_of(uses: Sequence[Use]) -> list[tuple[Edit, Use]]:
    """The edits of all that is in use, each with whose it is."""
    return [(edit, use) for use in uses for edit in use.delta.all_edits()]


_TOO_LATE = (
    "a gradient came for a delta that is not in use any more: do the backward pass of a mixed batch inside its rows(), "
    "that of another before the next use()"
)


def refuse_at_rest(uses: Iterable[Use]) -> None:
    """Check that what a forward pass used still trains, when a part of it is computed again in the backward pass.

    A delta that was put to rest would be computed with as a constant, and its gradient dropped without a word.
    """
    if any(use.delta.flags is not None for use in uses):
        raise DeltuneError(_TOO_LATE)


def refuse_late_gradients(delta: Delta) -> None:
    """Make it an error when a gradient comes after a delta was put to rest: it would be dropped without a word."""
    for parameter in delta.parameters():
        hooks = (parameter._backward_hooks or {}).values()
        if parameter.requires_grad and not any(type(hook) is _InTime for hook in hooks):
            parameter.register_hook(_InTime(parameter))


class _InTime:
    __torch_unserializable__ = True  # a copy has one when its rows need it

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = weakref.ref(parameter)  # which holds this

    def __call__(self, gradient: torch.Tensor) -> None:
        parameter = self.parameter()
        if parameter is not None and not parameter.requires_grad:
            raise DeltuneError(_TOO_LATE)
