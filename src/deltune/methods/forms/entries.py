"""Forms that change few entries of the frozen weight."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..parser import Share, Size
from .base import Place, Specs, Tensors, TensorSpec, Widths, parameter_specs
from .starts import random_entries
from .weights import ChangeForm

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, repr=False)
class SHiRA(ChangeForm):
    """W + v at r (d_in + d_out) random entries, as many as a low rank has (Bhardwaj et al. 2024; PEFT: ShiraConfig).

    Tensors: values v (n,), 0; the buffer entries (n,), their positions in W, as PEFT's random mask has them.

    Args:
        rank: r, at least 1.
        seed: The seed of the positions.
    """

    rank: Size
    seed: int = 0

    def _number(self, widths: Widths) -> int:
        return self.rank * (widths.in_width + widths.out_width)

    def incompatibility(self, widths: Widths) -> str | None:
        number, size = self._number(widths), widths.in_width * widths.out_width
        return f"rank={self.rank}: {number} entries are more than the {size} of the weight" if number > size else None

    def tensors(self, widths: Widths) -> Specs:
        number = self._number(widths)
        entries = TensorSpec((number,), trained=False, below=widths.in_width * widths.out_width)
        return parameter_specs({"values": (number,)}) | {"entries": entries}

    def initialize(self, tensors: Tensors, at: Place | None) -> None:
        assert at is not None
        tensors["values"].zero_()
        entries = random_entries(at.weight.numel(), len(tensors["values"]), self.seed)
        tensors["entries"].copy_(entries.sort().values)

    def change(self, tensors: Tensors, at: Place) -> torch.Tensor:
        return scattered(tensors, at)


@dataclass(frozen=True, repr=False)
class SuperTuning(ChangeForm):
    """W + v at the entries of W of the greatest or smallest magnitude (PEFT: SupertuningConfig).

    Tensors: values v (n,), 0; the buffer entries (n,), their positions in W.

    Args:
        sparsity: The share of the entries that stay as they are.
        largest: Whether the greatest entries are trained, and not the smallest.

    Raises:
        DeltuneError: The sparsity is not between 0 and 1.
    """

    sparsity: Share = 0.99
    largest: bool = field(default=True, kw_only=True)

    def incompatibility(self, widths: Widths) -> str | None:
        size = widths.in_width * widths.out_width
        return None if self._number(size) else f"sparsity={self.sparsity} leaves no entry of {size}"

    def _number(self, size: int) -> int:
        return int(size * (1 - self.sparsity))

    def tensors(self, widths: Widths) -> Specs:
        size = widths.in_width * widths.out_width
        number = self._number(size)
        return parameter_specs({"values": (number,)}) | {"entries": TensorSpec((number,), trained=False, below=size)}

    def initialize(self, tensors: Tensors, at: Place | None) -> None:
        assert at is not None
        tensors["values"].zero_()
        magnitudes = at.weight.abs().flatten()
        tensors["entries"].copy_(magnitudes.topk(len(tensors["values"]), largest=self.largest).indices)

    def change(self, tensors: Tensors, at: Place) -> torch.Tensor:
        return scattered(tensors, at)


def scattered(tensors: Tensors, at: Place) -> torch.Tensor:
    """Return the matrix that has values at its entries, and is 0 elsewhere."""
    flat = tensors["values"].new_zeros(at.weight.numel())
    return flat.index_put((tensors["entries"],), tensors["values"]).view(at.weight.shape)
