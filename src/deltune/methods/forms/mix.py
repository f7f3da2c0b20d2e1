"""Forms that mix products which are not trained: their weights alone are, as numbers or by attention."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from ...errors import check_choice
from ..parser import Size
from .base import FactorForm, Form, Place, Shapes, Specs, Tensors, TensorSpec, Widths, parameter_specs
from .hidden import ACTIVATIONS, activate
from .starts import buffer_specs, kaiming_

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
    """Changes that are not trained, weighted for each token by attention (AdapterFusion, Pfeiffer et al. 2021).

    Δh = V Σ_i softmax_i((Q u) · (K Δh_i)) Δh_i with Δh_i = B_i f(A_i u + a_i) + b_i; products have no f, a_i and b_i.

    Tensors: query Q (k, d_in), Kaiming uniform; key K (k, d_out), 0, so that it starts as a mean; with `values` V
        (d_out, d_out), 1 at first; the buffers down A (n, r, d_in) and up B (n, d_out, r), with `bias` down_bias a (n,
        r) and up_bias b (n, d_out).

    Args:
        number: n, at least 1.
        rank: r, at least 1; changes of lower rank end in zeros.
        width: k, at least 1; None: d_out.
        activation: f: "relu", "gelu", "silu", "tanh", "sigmoid" or "identity".
        bias: Whether there are biases.
        values: Whether there is V.

    Raises:
        DeltuneError: The activation does not exist.
    """

    number: Size
    rank: Size = 8
    width: Size | None = 16
    activation: str = "identity"
    bias: bool = field(default=False, kw_only=True)
    values: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("activation", self.activation, ACTIVATIONS)

    @property
    def starts_at_zero(self) -> bool:
        return False

    def tensors(self, widths: Widths) -> Specs:
        width, d_out = self.width or widths.out_width, widths.out_width
        shapes: Shapes = {"query": (width, widths.in_width), "key": (width, d_out)}
        shapes |= {"values": (d_out, d_out)} if self.values else {}
        biases: Shapes = {"down_bias": (self.number, self.rank), "up_bias": (self.number, d_out)} if self.bias else {}
        return parameter_specs(shapes) | _products(self.number, self.rank, widths) | buffer_specs(biases)

    def initialize(self, tensors: Tensors, at: Place | None) -> None:
        kaiming_(tensors["query"])
        for name in ("key", "values", "down_bias", "up_bias"):
            if name in tensors:
                tensors[name].zero_()
        if self.values:
            tensors["values"].fill_diagonal_(1.0)
        _start(tensors)

    def __call__(self, tensors: Tensors, u: torch.Tensor, at: Place) -> torch.Tensor:
        import torch

        t = {name: tensor.to(u.dtype) for name, tensor in tensors.items()}
        inner = torch.einsum("...d,nrd->...nr", u, t["down"]) + t.get("down_bias", 0)
        changes = torch.einsum("...nr,nor->...no", activate(self.activation, inner), t["up"]) + t.get("up_bias", 0)
        scores = torch.einsum("...k,...nk->...n", u @ t["query"].t(), changes @ t["key"].t())
        mixed = torch.einsum("...n,...no->...o", scores.softmax(-1), changes)
        return mixed @ t["values"].t() if self.values else mixed


Weights = Literal["scalar", "softmax", "attention", "fusion"]


def mix_form(number: int, rank: int, mixing: Weights, activation: str = "identity", *, bias: bool = False) -> Form:
    """Return the form that mixes so many changes by weights of a kind; an activation or a bias needs attention.

    Raises:
        DeltuneError: There is no such kind.
    """
    check_choice("mixing", mixing, ("scalar", "softmax", "attention", "fusion"))
    if mixing in ("scalar", "softmax"):
        return Mix(number, rank, softmax=mixing == "softmax")
    whole = mixing == "fusion"
    return AttentionMix(number, rank, None if whole else 16, activation, bias=bias, values=whole)
