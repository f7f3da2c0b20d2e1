"""Forms that mix products which are not trained: their weights alone are, as numbers or by attention."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from ...errors import check_choice
from ..parser import Size
from .base import FactorForm, Form, Place, Specs, Tensors, TensorSpec, Widths
from .starts import kaiming_

if TYPE_CHECKING:
    import torch


def _products(number: int, rank: int, widths: Widths) -> Specs:
    """Return the specifications of n products: A (n, r, d_in) and B (n, d_out, r)."""
    shapes = {"down": (number, rank, widths.in_width), "up": (number, widths.out_width, rank)}
    return {name: TensorSpec(shape, trained=False) for name, shape in shapes.items()}


def _start(tensors: Tensors) -> None:
    kaiming_(tensors["down"])
    tensors["up"].normal_(std=0.02)


@dataclass(frozen=True, repr=False)
class Mix(FactorForm):
    """A weighted sum of products that are not trained, Σ_i w_i B_i A_i x (LoRA soups, Prabhakar et al. 2025).

    Tensors: weights w (n,), 1/n, or their logarithms, 0; the buffers down A (n, r, d_in) and up B (n, d_out, r).

    Args:
        number: n, at least 1.
        rank: r, at least 1; products of lower rank end in zeros.
        softmax: Whether the weights are positive and add up to 1.
    """

    number: Size
    rank: Size = 8
    softmax: bool = field(default=False, kw_only=True)

    @property
    def starts_at_zero(self) -> bool:
        return False

    def tensors(self, widths: Widths) -> Specs:
        return {"weights": TensorSpec((self.number,))} | _products(self.number, self.rank, widths)

    def initialize(self, tensors: Tensors, at: Place | None) -> None:
        tensors["weights"].fill_(0.0 if self.softmax else 1 / self.number)
        _start(tensors)

    def factors(self, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        weights = tensors["weights"].softmax(0) if self.softmax else tensors["weights"]
        up = weights[:, None, None] * tensors["up"]
        return tensors["down"].flatten(0, 1), up.movedim(0, 1).flatten(1)


@dataclass(frozen=True, repr=False)
class AttentionMix(Form):
    """Products that are not trained, weighted for each token by attention (AdapterFusion, Pfeiffer et al. 2021).

    Δh = Σ_i softmax_i((Q x) · (K Δh_i)) Δh_i with Δh_i = B_i A_i x; the values are not changed.

    Tensors: query Q (k, d_in), Kaiming uniform; key K (k, d_out), 0, so that it starts as a mean; the buffers down A
        (n, r, d_in) and up B (n, d_out, r).

    Args:
        number: n, at least 1.
        rank: r, at least 1; products of lower rank end in zeros.
        width: k, at least 1.
    """

    number: Size
    rank: Size = 8
    width: Size = 16

    @property
    def starts_at_zero(self) -> bool:
        return False

    def tensors(self, widths: Widths) -> Specs:
        shapes = {"query": (self.width, widths.in_width), "key": (self.width, widths.out_width)}
        trained = {name: TensorSpec(shape) for name, shape in shapes.items()}
        return trained | _products(self.number, self.rank, widths)

    def initialize(self, tensors: Tensors, at: Place | None) -> None:
        kaiming_(tensors["query"])
        tensors["key"].zero_()
        _start(tensors)

    def __call__(self, tensors: Tensors, u: torch.Tensor, at: Place) -> torch.Tensor:
        import torch

        t = {name: tensor.to(u.dtype) for name, tensor in tensors.items()}
        changes = torch.einsum("...d,nrd,nor->...no", u, t["down"], t["up"])
        scores = torch.einsum("...k,...nk->...n", u @ t["query"].t(), changes @ t["key"].t())
        return torch.einsum("...n,...no->...o", scores.softmax(-1), changes)


Weights = Literal["scalar", "softmax", "attention"]


def mix_form(number: int, rank: int, mixing: Weights) -> Form:
    """Return the form that mixes so many products by weights of a kind.

    Raises:
        DeltuneError: There is no such kind.
    """
    check_choice("mixing", mixing, ("scalar", "softmax", "attention"))
    return AttentionMix(number, rank) if mixing == "attention" else Mix(number, rank, softmax=mixing == "softmax")
