"""Modules that run with tensors of deltas in place of their own: trained in part, or different for each row.

What stands in `module.forward` computes with the tensors that the pass needs; the module itself keeps its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from ..compat import exporting, remove_hooks
from ..errors import DeltuneError
from .gates import Change
from .uses import Use, joined, run_with
from .weights import Sparse


class Substitute(Protocol):
    """How a module runs with tensors that are not its own."""

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...


class Assignment(Protocol):
    """Which delta each row uses."""

    @property
    def tensors(self) -> Mapping[str, Substitute]: ...


class Assigned(Protocol):
    """What knows it in every pass."""

    def assignment(self) -> Assignment: ...


class OwnForward:
    """Stands as `forward` of a module of which some delta has tensors of its own."""

    of_live_model = True

    def __init__(self, passes: Assigned, path: str, module: nn.Module) -> None:
        self.passes, self.path, self.module = passes, path, module

    def install(self) -> None:
        if "forward" in self.module.__dict__:
            raise DeltuneError(
                f"the forward of {self.path!r} was replaced (offloading does that), so it cannot run with tensors of a "
                "delta: attach before it is replaced, or take the replacement off"
            )
        self.module.__dict__["forward"] = self
        self.module.register_forward_pre_hook(self.still_stands)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        substitute = self.passes.assignment().tensors.get(self.path)
        if substitute is None:
            return type(self.module).forward(self.module, *args, **kwargs)
        return substitute.run(self.module, args, kwargs)

    def still_stands(self, module: nn.Module, args: Any) -> None:
        """Refuse to run a module whose forward was replaced afterwards by one that does not call this one."""
        held = module.__dict__
        if held.get("forward") is not self and held.get("_old_forward") is not self:  # the latter is accelerate's
            raise DeltuneError(
                f"the forward of {self.path!r} was replaced after deltune attached a delta that trains tensors of it: "
                "detach, replace it, and attach again"
            )

    def remove(self) -> None:
        remove_hooks(self.module, self)
        if self.module.__dict__.get("forward") is self:
            del self.module.__dict__["forward"]


def runs_class_forward(module: nn.Module) -> bool:
    """Whether nobody but us replaced a module's forward."""
    forward = module.__dict__.get("forward")
    return forward is None or isinstance(forward, OwnForward)


class MaskedTensors:
    """Tensors trained in part: the model's own with the trained entries in their places."""

    def __init__(self, parts: Mapping[str, Sparse | Change]) -> None:
        self.parts = dict(parts)

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = {}
        for leaf, part in self.parts.items():
            base = module._parameters[leaf]
            assert base is not None
            tensors[leaf] = part.on(base.detach())
        return run_with(module, tensors, *args, **kwargs)


def rowwise(module: nn.Module, uses: Sequence[Use]) -> Substitute:
    """How a module runs of which deltas have tensors of their own, while each row uses its own delta."""
    if type(module) is nn.LayerNorm and len(module.normalized_shape) == 1:
        return NormByRow(module, uses)
    return ModuleByRow(module, uses)


class ModuleByRow:
    """The module runs again with each delta's tensors, on its rows."""

    def __init__(self, module: nn.Module, uses: Sequence[Use]) -> None:
        self.uses = [use for use in uses if module in use.own]
        self.rest = len({row for use in self.uses for row in use.rows or ()}) < uses[0].of

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        output = type(module).forward(module, *args, **kwargs)
        if not isinstance(output, torch.Tensor):
            raise DeltuneError(f"a {type(module).__name__} gives no plain tensor, so its rows cannot differ")
        parts: dict[Use, torch.Tensor] = {}
        for use in self.uses:
            mine = [use.pick(a) if isinstance(a, torch.Tensor) else a for a in args]
            named = {k: use.pick(a) if isinstance(a, torch.Tensor) else a for k, a in kwargs.items()}
            parts[use] = use.forward_of(module)(*mine, **named)
        widths = [part.shape[-1] for part in parts.values()] + ([output.shape[-1]] if self.rest else [])
        whole = _widened(output[..., : max(widths)], max(widths))
        return joined(whole, {use: _widened(part, max(widths)) for use, part in parts.items()})


class NormByRow:
    """A LayerNorm: g ⊙ n(x) + b, with the g and b of each row, at once for all deltas. Equal to the norm to rounding,
    since its own kernel does not round n(x)."""

    def __init__(self, module: nn.Module, uses: Sequence[Use]) -> None:
        self.uses = [use for use in uses if module in use.own]
        self.known: dict[tuple[int, torch.device], torch.Tensor] = {}

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        assert isinstance(module, nn.LayerNorm)
        x: torch.Tensor = args[0] if args else kwargs["input"]
        wide = torch.promote_types(x.dtype, torch.float32)  # in which the norm's own kernel computes
        normed = nn.functional.layer_norm(x.to(wide), module.normalized_shape, None, None, module.eps)
        gain, bias = self._of_rows(module, "weight", x), self._of_rows(module, "bias", x)
        normed = normed if gain is None else normed * gain
        dtype = x.dtype
        if torch.is_autocast_enabled(x.device.type):  # what torch's norm gives then differs by device
            dtype = type(module).forward(module, x[:0]).dtype
        return (normed if bias is None else normed + bias).to(dtype)

    def _of_rows(self, module: nn.LayerNorm, leaf: str, x: torch.Tensor) -> torch.Tensor | None:
        """Each row's own values (rows, 1, …, d); those of the model where no delta has any."""
        base = module._parameters[leaf]
        if base is None or not any(leaf in use.own[module] for use in self.uses):
            return base
        every = [base, *(use.own[module][leaf]() if leaf in use.own[module] else base for use in self.uses)]
        own = torch.stack(every)[self._which(x.shape[0], x.device)]
        return own.view(x.shape[0], *(1,) * (x.dim() - 2), -1)

    def _which(self, size: int, device: torch.device) -> torch.Tensor:
        """The number of each row's use, from 1 on; 0 for those without."""
        if (size, device) not in self.known:
            with torch.inference_mode(False):  # it is used in training too
                which = torch.zeros(size, dtype=torch.long, device=device)
                for number, use in enumerate(self.uses, start=1):
                    which[use.index(size, device)] = number
            if exporting():  # it has no numbers, so it is not kept
                return which
            self.known[size, device] = which
        return self.known[size, device]


def _widened(logits: torch.Tensor, width: int) -> torch.Tensor:
    """Logits up to a number of labels; those that a head does not have are -inf."""
    return nn.functional.pad(logits, (0, width - logits.shape[-1]), value=-torch.inf)
