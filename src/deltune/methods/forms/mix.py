"""Forms that mix products which are not trained: their weights are, as numbers or by attention, or nothing is."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

from ...errors import check_choice
from ..parser import Positive, Size, argument_types, parse_expression
from .base import FactorForm, Form, Place, Routed, Shapes, Specs, Tensors, TensorSpec, Widths, parameter_specs
from .hidden import ACTIVATIONS, activate
from .routed import XLoRA
from .starts import at_least_float32, buffer_specs, kaiming_

if TYPE_CHECKING:
    import torch


def _products(number: int, rank: int, widths: Widths) -> Specs:
    """Return the specifications of n products: A (n, r, d_in) and B (n, d_out, r)."""
    shapes = {"down": (number, rank, widths.in_width), "up": (number, widths.out_width, rank)}
    return {name: TensorSpec(shape, trained=False) for name, shape in shapes.items()}


def _draw(tensors: Tensors) -> None:
    """Fill the products with random ones, where there are none to mix."""
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
        _draw(tensors)
        self.start(tensors)

    def start(self, tensors: Tensors) -> None:
        """Initialize the tensors other than the low-rank factors."""
        tensors["weights"].fill_(0.0 if self.softmax else 1 / self.number)

    def factors(self, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        weights = tensors["weights"].softmax(0) if self.softmax else tensors["weights"]
        up = weights[:, None, None] * tensors["up"]
        return tensors["down"].flatten(0, 1), up.movedim(0, 1).flatten(1)


@dataclass(frozen=True, repr=False)
class AdapterFusion(Form):
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
        _draw(tensors)
        for name in ("down_bias", "up_bias") if self.bias else ():
            tensors[name].zero_()
        self.start(tensors)

    def start(self, tensors: Tensors) -> None:
        """Initialize the tensors other than the low-rank factors."""
        kaiming_(tensors["query"])
        tensors["key"].zero_()
        if self.values:
            tensors["values"].zero_().fill_diagonal_(1.0)

    def __call__(self, tensors: Tensors, u: torch.Tensor, at: Place) -> torch.Tensor:
        import torch

        t = {name: tensor.to(u.dtype) for name, tensor in tensors.items()}
        inner = torch.einsum("...d,nrd->...nr", u, t["down"]) + t.get("down_bias", 0)
        changes = torch.einsum("...nr,nor->...no", activate(self.activation, inner), t["up"]) + t.get("up_bias", 0)
        scores = torch.einsum("...k,...nk->...n", u @ t["query"].t(), changes @ t["key"].t())
        mixed = torch.einsum("...n,...no->...o", scores.softmax(-1), changes)
        return mixed @ t["values"].t() if self.values else mixed


@dataclass(frozen=True, repr=False)
class Arrow(Routed):
    """Products that are not trained, of which each token takes those nearest to it (Arrow, Ostapenko et al. 2024).

    Δh = Σ_i softmax_i(|p_i · u| / τ) B_i A_i u over the k products with the greatest |p_i · u|, where p_i is the first
    right singular vector of B_i A_i. Nothing is trained. PEFT: ArrowConfig.

    Tensors: the buffers down A (n, r, d_in), up B (n, d_out, r) and prototypes p (n, d_in).

    Args:
        number: n, at least 1.
        rank: r, at least 1; products of lower rank end in zeros.
        top_k: k; all products where there are fewer.
        temperature: τ, above 0.
    """

    number: Size
    rank: Size = 8
    _: KW_ONLY
    top_k: Size = 3
    temperature: Positive = 1.0

    @property
    def starts_at_zero(self) -> bool:
        return False

    def tensors(self, widths: Widths) -> Specs:
        return _products(self.number, self.rank, widths) | buffer_specs({"prototypes": (self.number, widths.in_width)})

    def initialize(self, tensors: Tensors, at: Place | None) -> None:
        _draw(tensors)
        self.start(tensors)

    def start(self, tensors: Tensors) -> None:
        """Set the prototypes: the first right singular vector of B A is the first of B R times Q, where A is R Q.

        A product that is 0, as of a delta that does not change this place, has the prototype 0.
        """
        import torch

        q, r = torch.linalg.qr(at_least_float32(tensors["down"]).mT)
        small = at_least_float32(tensors["up"]) @ r.mT
        first = torch.linalg.svd(small, full_matrices=False).Vh[:, 0, :, None]
        is_zero = (small == 0).flatten(1).all(1)
        tensors["prototypes"].copy_((q @ first).squeeze(-1).masked_fill(is_zero[:, None], 0))

    def weights(self, tensors: Tensors, u: torch.Tensor, at: Place) -> torch.Tensor:
        import torch

        near = (u @ tensors["prototypes"].t().to(u.dtype)).abs() / self.temperature
        near = near.masked_fill((tensors["prototypes"] == 0).all(1), torch.finfo(u.dtype).min)  # no token takes them
        values, chosen = near.topk(min(self.top_k, self.number), dim=-1)
        return torch.zeros_like(near).scatter(-1, chosen, values.softmax(-1))


Weights = Literal["scalar", "softmax", "attention", "fusion", "arrow", "xlora"]


def mix_form(
    number: int, rank: int, mixing: Weights | str, activation: str = "identity", *, bias: bool = False
) -> Mix | AdapterFusion | Arrow | XLoRA:
    """Return the form that mixes so many changes by weights of a kind; an activation or a bias needs attention.

    Args:
        mixing: One of `Weights`, or such as "arrow(top_k=2, temperature=0.5)" or "xlora(depth=2)".

    Raises:
        DeltuneError: There is no such kind.
    """
    kinds: dict[str, partial[Any]] = {
        "arrow": partial(Arrow, number, rank), "xlora": partial(XLoRA, number, rank, frozen=True),
    }  # fmt: skip
    if isinstance(mixing, str) and mixing.partition("(")[0] in kinds:
        for make in kinds.values():
            make.__annotations__ = argument_types(make.func)
        return parse_expression(mixing, kinds)
    check_choice("mixing", mixing, get_args(Weights))
    if mixing in ("scalar", "softmax"):
        return Mix(number, rank, softmax=mixing == "softmax")
    whole = mixing == "fusion"
    return AdapterFusion(number, rank, None if whole else 16, activation, bias=bias, values=whole)
