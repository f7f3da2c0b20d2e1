"""Groups of batch rows that use the same delta, and tensor operations on the rows of a group.

A row of the batch may be several consecutive rows of a tensor: the beams of generation, or a batch whose rows and
tokens are one axis.
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
from .modules import Delta, Edit

TensorGetters = Mapping[str, Callable[[], torch.Tensor]]
"""By parameter name, functions that return a delta's own values of a module's parameters."""


def forward_with(module: nn.Module, tensors: Mapping[str, torch.Tensor], *args: Any, **kwargs: Any) -> Any:
    """Run a module's forward with other tensors in place of some of its parameters.

    The module itself is not changed, so other threads may run it at the same time: a copy of its attributes is run.
    """
    twin = object.__new__(type(module))
    twin.__dict__.update(module.__dict__)
    twin.__dict__["_parameters"] = {**module._parameters, **tensors}
    return type(module).forward(twin, *args, **kwargs)


@dataclass(eq=False)
class DeltaRows:
    """A delta and the rows of the batch that use it.

    Attributes:
        delta: The delta.
        rows: The numbers of the rows, or None for all rows.
        batch_size: The number of rows of the batch; 0 where all rows use the delta.
        overrides: Where only some rows use the delta, its own values of the parameters of modules.
    """

    delta: Delta
    rows: tuple[int, ...] | None = None
    batch_size: int = 0
    overrides: Mapping[nn.Module, TensorGetters] = field(default_factory=dict)
    _indices: dict[tuple[int, torch.device], torch.Tensor] = field(default_factory=dict)

    def index(self, size: int, device: torch.device) -> torch.Tensor:
        """Return the indices of these rows in a tensor of `size` rows.

        Raises:
            DeltuneError: `size` is not a multiple of the batch's size.
        """
        assert self.rows is not None
        if (size, device) not in self._indices:
            if size % self.batch_size:
                raise DeltuneError(
                    f"rows() was given {self.batch_size} names, but a tensor has {size} rows: give one name (or None) "
                    "for each row of the batch"
                )
            repeats = size // self.batch_size
            positions = [row * repeats + i for row in self.rows for i in range(repeats)]
            with torch.inference_mode(False):  # the index is also used in training
                index = torch.tensor(positions, device=device)
            if exporting():  # such a tensor has no values, so it is not cached
                return index
            self._indices[size, device] = index
        return self._indices[size, device]

    def select(self, whole: torch.Tensor) -> torch.Tensor:
        """Return these rows of a tensor."""
        return whole if self.rows is None else whole.index_select(0, self.index(whole.shape[0], whole.device))

    def replace(self, whole: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        """Return the tensor with these rows replaced by `part`."""
        if self.rows is None:
            return part
        return whole.index_copy(0, self.index(whole.shape[0], whole.device), part)

    def forward_of(self, module: nn.Module) -> Callable[..., Any]:
        """Return the module's forward with the delta's own tensors, to be called with these rows only."""
        if self.rows is None:
            return module.forward
        tensors = {leaf: value() for leaf, value in self.overrides.get(module, {}).items()}
        return partial(forward_with, module, tensors)


def all_rows_alike(groups: Sequence[DeltaRows]) -> bool:
    """Whether all rows of the batch use the same delta."""
    return all(group.rows is None for group in groups)


def combine_rows(whole: torch.Tensor, parts: Mapping[DeltaRows, torch.Tensor]) -> torch.Tensor:
    """Return the tensor with the rows of every group replaced, in one copy for any number of groups."""
    index = torch.cat([group.index(whole.shape[0], whole.device) for group in parts])
    return whole.index_copy(0, index, torch.cat(tuple(parts.values())))


def stack_by_row(
    parts: Sequence[tuple[DeltaRows, torch.Tensor]], size: int, at_end: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Stack a tensor of each group into one tensor with an entry for every row, padded to the longest.

    Args:
        parts: The groups, each with its tensor (l_i, …).
        size: The number of rows.
        at_end: Pad the shorter tensors at the beginning, so that they end together.

    Returns:
        The tensor (size, l, …), with l the greatest l_i, and which entries are no padding, (size, l), or None where
        all are not. Rows outside every group are all padding.
    """
    if all_rows_alike([group for group, _ in parts]):
        ((_, only),) = parts
        return only.expand(size, *only.shape), None
    longest = max(part.shape[0] for _, part in parts)
    device = parts[0][1].device
    numbers = torch.full((size,), len(parts), device=device)
    padded, present = [], []
    for number, (group, part) in enumerate(parts):
        numbers[group.index(size, device)] = number
        padding = longest - part.shape[0]
        padded.append(nn.functional.pad(part, (0, 0) * (part.dim() - 1) + ((padding, 0) if at_end else (0, padding))))
        columns = torch.arange(longest, device=device)
        present.append(columns >= padding if at_end else columns < part.shape[0])
    padded.append(torch.zeros_like(padded[0]))
    present.append(torch.zeros_like(present[0]))
    return torch.stack(padded)[numbers], torch.stack(present)[numbers]


def active_edits(groups: Sequence[DeltaRows]) -> list[tuple[Edit, DeltaRows]]:
    """The edits of all groups, each with its group."""
    return [(edit, group) for group in groups for edit in group.delta.all_edits()]


_LATE_GRADIENT = (
    "a backward pass computed a gradient for a delta that is not in use any more: run the backward pass of a mixed "
    "batch inside its rows(), and that of any other batch before the next use()"
)


def refuse_frozen(groups: Iterable[DeltaRows]) -> None:
    """Raise an error if a delta of a forward pass is frozen when a part of the pass is recomputed in the backward pass.

    The delta would be treated as a constant, and its gradient would be lost silently.
    """
    if any(group.delta.saved_requires_grad is not None for group in groups):
        raise DeltuneError(_LATE_GRADIENT)


def refuse_late_gradients(delta: Delta) -> None:
    """Make it an error when a gradient arrives after a delta was frozen, since it would be lost silently."""
    for parameter in delta.parameters():
        hooks = (parameter._backward_hooks or {}).values()
        if parameter.requires_grad and not any(type(hook) is _LateGradientCheck for hook in hooks):
            parameter.register_hook(_LateGradientCheck(parameter))


class _LateGradientCheck:
    """The hook that `refuse_late_gradients` registers on a parameter."""

    __torch_unserializable__ = True  # a copy registers its own when it needs one

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = weakref.ref(
            parameter
        )  # the parameter refers to this hook, so a strong reference would be a cycle

    def __call__(self, gradient: torch.Tensor) -> None:
        parameter = self.parameter()
        if parameter is not None and not parameter.requires_grad:
            raise DeltuneError(_LATE_GRADIENT)
