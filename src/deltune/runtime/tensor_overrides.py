"""Run modules with tensors of deltas instead of their own: partly trained tensors, or different ones for each row.

`module.forward` is replaced by an object that computes with the tensors the pass needs. The module keeps its own
tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from ..compat import exporting, remove_hooks
from ..errors import DeltuneError
from .hard_concrete import GatedDifference
from .rows import DeltaRows, combine_rows, forward_with
from .sparse_params import SparseParameter


class TensorOverride(Protocol):
    """Runs a module with tensors that are not its own."""

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...


class Assignment(Protocol):
    """The part of `RowAssignment` that is used here."""

    @property
    def tensors(self) -> Mapping[str, TensorOverride]: ...


class HasAssignment(Protocol):
    """The part of `PassManager` that is used here."""

    def assignment(self) -> Assignment: ...


class ForwardOverride:
    """Replaces the `forward` of a module for which some delta has its own tensors.

    Args:
        passes: The pass manager of the model.
        path: The module's path in the model.
        module: The module.
    """

    of_live_model = True

    def __init__(self, passes: HasAssignment, path: str, module: nn.Module) -> None:
        self.passes, self.path, self.module = passes, path, module

    def install(self) -> None:
        if "forward" in self.module.__dict__:
            raise DeltuneError(
                f"the forward of {self.path!r} was replaced by something else (offloading does that), so it cannot run "
                "with tensors of a delta: attach before it is replaced, or remove the replacement"
            )
        self.module.__dict__["forward"] = self
        self.module.register_forward_pre_hook(self.check_installed)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        override = self.passes.assignment().tensors.get(self.path)
        if override is None:
            return type(self.module).forward(self.module, *args, **kwargs)
        return override.run(self.module, args, kwargs)

    def check_installed(self, module: nn.Module, args: Any) -> None:
        """Raise an error if the module's forward was replaced later by one that does not call this one."""
        attributes = module.__dict__
        if (
            attributes.get("forward") is not self and attributes.get("_old_forward") is not self
        ):  # accelerate keeps the previous forward in _old_forward
            raise DeltuneError(
                f"the forward of {self.path!r} was replaced after a delta was attached that trains its tensors: "
                "detach, replace it, and attach again"
            )

    def remove(self) -> None:
        remove_hooks(self.module, self)
        if self.module.__dict__.get("forward") is self:
            del self.module.__dict__["forward"]


def runs_class_forward(module: nn.Module) -> bool:
    """Whether a module's forward is that of its class, or a ForwardOverride."""
    forward = module.__dict__.get("forward")
    return forward is None or isinstance(forward, ForwardOverride)


class MaskedOverride:
    """Runs a module with partly trained tensors: its own, with the trained entries replaced."""

    def __init__(self, parts: Mapping[str, SparseParameter | GatedDifference]) -> None:
        self.parts = dict(parts)

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = {}
        for leaf, part in self.parts.items():
            base = module._parameters[leaf]
            assert base is not None
            tensors[leaf] = part.on(base.detach())
        return forward_with(module, tensors, *args, **kwargs)


def override_by_row(module: nn.Module, groups: Sequence[DeltaRows]) -> TensorOverride:
    """Return how to run a module for which deltas have their own tensors, while each row uses its own delta."""
    if type(module) is nn.LayerNorm and len(module.normalized_shape) == 1:
        return NormByRow(module, groups)
    return ModuleByRow(module, groups)


class ModuleByRow:
    """Runs the module once more for each delta, with its tensors, on its rows."""

    def __init__(self, module: nn.Module, groups: Sequence[DeltaRows]) -> None:
        self.groups = [group for group in groups if module in group.overrides]
        self.has_other_rows = len({row for group in self.groups for row in group.rows or ()}) < groups[0].batch_size

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        output = type(module).forward(module, *args, **kwargs)
        if not isinstance(output, torch.Tensor):
            raise DeltuneError(
                f"rows() needs modules that return one tensor where deltas have their own, and {type(module).__name__} "
                "does not"
            )
        parts: dict[DeltaRows, torch.Tensor] = {}
        for group in self.groups:
            positional = [group.select(a) if isinstance(a, torch.Tensor) else a for a in args]
            keywords = {k: group.select(a) if isinstance(a, torch.Tensor) else a for k, a in kwargs.items()}
            parts[group] = group.forward_of(module)(*positional, **keywords)
        widths = [part.shape[-1] for part in parts.values()] + ([output.shape[-1]] if self.has_other_rows else [])
        whole = _pad_logits(output[..., : max(widths)], max(widths))
        return combine_rows(whole, {group: _pad_logits(part, max(widths)) for group, part in parts.items()})


class NormByRow:
    """Runs a LayerNorm once for all deltas: g ⊙ n(x) + b with the g and b of each row.

    The result differs from torch's kernel by rounding only, since that does not round n(x).
    """

    def __init__(self, module: nn.Module, groups: Sequence[DeltaRows]) -> None:
        self.groups = [group for group in groups if module in group.overrides]
        self._indices: dict[tuple[int, torch.device], torch.Tensor] = {}

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        assert isinstance(module, nn.LayerNorm)
        x: torch.Tensor = args[0] if args else kwargs["input"]
        precision = torch.promote_types(x.dtype, torch.float32)  # as in torch's kernel
        normed = nn.functional.layer_norm(x.to(precision), module.normalized_shape, None, None, module.eps)
        gain, bias = self._values_by_row(module, "weight", x), self._values_by_row(module, "bias", x)
        normed = normed if gain is None else normed * gain
        dtype = x.dtype
        if torch.is_autocast_enabled(x.device.type):  # the dtype that torch returns then differs by device
            dtype = type(module).forward(module, x[:0]).dtype
        return (normed if bias is None else normed + bias).to(dtype)

    def _values_by_row(self, module: nn.LayerNorm, leaf: str, x: torch.Tensor) -> torch.Tensor | None:
        """The values of each row (rows, 1, …, d), or the module's own parameter where no delta has its own."""
        base = module._parameters[leaf]
        if base is None or not any(leaf in group.overrides[module] for group in self.groups):
            return base
        every = [
            base,
            *(group.overrides[module][leaf]() if leaf in group.overrides[module] else base for group in self.groups),
        ]
        values = torch.stack(every)[self._group_of_rows(x.shape[0], x.device)]
        return values.view(x.shape[0], *(1,) * (x.dim() - 2), -1)

    def _group_of_rows(self, size: int, device: torch.device) -> torch.Tensor:
        """The number of each row's group, counted from 1; 0 for rows outside every group."""
        if (size, device) not in self._indices:
            with torch.inference_mode(False):  # the tensor is also used in training
                numbers = torch.zeros(size, dtype=torch.long, device=device)
                for number, group in enumerate(self.groups, start=1):
                    numbers[group.index(size, device)] = number
            if exporting():  # such a tensor has no values, so it is not cached
                return numbers
            self._indices[size, device] = numbers
        return self._indices[size, device]


def _pad_logits(logits: torch.Tensor, width: int) -> torch.Tensor:
    """Pad logits to `width` labels with -inf."""
    return nn.functional.pad(logits, (0, width - logits.shape[-1]), value=-torch.inf)
