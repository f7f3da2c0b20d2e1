"""Modules of which deltas have tensors of their own, while each row of a batch uses its own delta."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..anatomy.trace import observing
from ..errors import DeltuneError
from .uses import Use, joined


class RowTap:
    """It runs again with each delta's tensors, on its rows."""

    def __init__(self, module: nn.Module, uses: Sequence[Use]) -> None:
        self.uses = [use for use in uses if module in use.own]
        self.rest = len({row for use in self.uses for row in use.rows or ()}) < uses[0].of
        # first of all, so that what edits add is added to this
        self.handle = module.register_forward_hook(self.after, with_kwargs=True, prepend=True)

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if observing():
            return None
        parts: dict[Use, torch.Tensor] = {}
        for use in self.uses:
            with use.lending(module):
                mine = [use.pick(a) if isinstance(a, torch.Tensor) else a for a in args]
                named = {k: use.pick(a) if isinstance(a, torch.Tensor) else a for k, a in kwargs.items()}
                parts[use] = module.forward(*mine, **named)
        if not isinstance(output, torch.Tensor):
            raise DeltuneError(f"a {type(module).__name__} gives no plain tensor, so its rows cannot differ")
        widths = [part.shape[-1] for part in parts.values()] + ([output.shape[-1]] if self.rest else [])
        whole = _widened(output[..., : max(widths)], max(widths))
        return joined(whole, {use: _widened(part, max(widths)) for use, part in parts.items()})

    def remove(self) -> None:
        self.handle.remove()


class NormTap:
    """A LayerNorm: g ⊙ n(x) + b, with the g and b of each row, at once for all deltas. Equal to the norm to rounding,
    since its own kernel does not round n(x)."""

    def __init__(self, module: nn.Module, uses: Sequence[Use]) -> None:
        self.uses = [use for use in uses if module in use.own]
        self.known: dict[tuple[int, torch.device], torch.Tensor] = {}
        # first of all, so that what edits add is added to this
        self.handle = module.register_forward_hook(self.after, with_kwargs=True, prepend=True)

    @staticmethod
    def fits(module: nn.Module) -> bool:
        """Whether it is torch's own norm of one axis, and runs as that does."""
        own = type(module) is nn.LayerNorm and len(module.normalized_shape) == 1
        return own and "forward" not in module.__dict__

    def after(self, module: nn.LayerNorm, args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor) -> Any:
        if observing():
            return None
        x = args[0] if args else kwargs["input"]
        wide = torch.promote_types(x.dtype, torch.float32)  # in which the norm's own kernel computes
        found = nn.functional.layer_norm(x.to(wide), module.normalized_shape, None, None, module.eps)
        gain, bias = self._of_rows(module, "weight", x), self._of_rows(module, "bias", x)
        found = found if gain is None else found * gain
        return (found if bias is None else found + bias).to(output.dtype)

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
            self.known[size, device] = which
        return self.known[size, device]

    def remove(self) -> None:
        self.handle.remove()


def _widened(logits: torch.Tensor, width: int) -> torch.Tensor:
    """Logits up to a number of labels; those that a head does not have are -inf."""
    return nn.functional.pad(logits, (0, width - logits.shape[-1]), value=-torch.inf)
