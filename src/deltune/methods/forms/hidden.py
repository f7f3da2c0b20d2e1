"""The forms of a change Δh of hidden states: bottleneck, vector, rescaling, and the mixture of all layers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from ...errors import DeltuneError, check_choice
from ..masks import Factor
from ..parser import Share, Size
from .base import (
    Affine,
    BeforeUp,
    Form,
    Place,
    Product,
    Shapes,
    Specs,
    Tensors,
    TwoLayers,
    Widths,
    parameter_specs,
)
from .low_rank import Init, down_up_product, init_down_up

if TYPE_CHECKING:
    import torch

ACTIVATIONS = ("relu", "gelu", "silu", "tanh", "sigmoid", "identity")
"""The activations of a bottleneck, as `torch.nn.functional` calls them but for the last one, which does nothing."""


def activate(activation: str, inner: torch.Tensor) -> torch.Tensor:
    """Apply one of `ACTIVATIONS`."""
    from torch.nn import functional as F

    return inner if activation == "identity" else getattr(F, activation)(inner)


@dataclass(frozen=True, repr=False)
class Bottleneck(Form):
    """Two projections with an activation between them, Δh = f(u W_down + b_down) W_up + b_up (UV eq. 4).

    Tensors: down (r, d_in) and up (d_out, r); with `bias` down_bias (r,) and up_bias (d_out,), 0 at the start; with
    `layer_norm` norm_gain and norm_bias (d_in,).

    Args:
        rank: r, at least 1.
        activation: f: "relu", "gelu", "silu", "tanh", "sigmoid" or "identity".
        bias: Whether both projections have biases.
        layer_norm: Whether a LayerNorm stands before the down projection.
        dropout: The probability of dropping an output of f while training.
        init: "bert" (down N(0, 0.02)) or "lora" (down Kaiming uniform).
        zero_up: Whether W_up starts at 0, so that Δh = 0 at the start; else N(0, 0.02).

    Raises:
        DeltuneError: An argument is out of its range, or the activation does not exist.
    """

    rank: Size
    activation: str = "relu"
    bias: bool = field(default=False, kw_only=True)
    layer_norm: bool = field(default=False, kw_only=True)
    dropout: Share = 0.0
    init: Init = "bert"
    zero_up: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("activation", self.activation, ACTIVATIONS)

    @property
    def starts_at_zero(self) -> bool:
        return self.zero_up

    def tensors(self, widths: Widths) -> Specs:
        shapes: Shapes = {"down": (self.rank, widths.in_width), "up": (widths.out_width, self.rank)}
        if self.bias:
            shapes |= {"down_bias": (self.rank,), "up_bias": (widths.out_width,)}
        if self.layer_norm:
            shapes |= {"norm_gain": (widths.in_width,), "norm_bias": (widths.in_width,)}
        return parameter_specs(shapes)

    def initialize(self, tensors: Tensors, at: Place | None) -> None:
        import torch

        init_down_up(tensors["down"], tensors["up"], self.init, self.zero_up)
        for name, tensor in tensors.items():
            if name not in ("down", "up"):
                torch.nn.init.constant_(tensor, 1.0 if name == "norm_gain" else 0.0)

    def mask_factors(self, widths: Widths) -> Product:
        if self.layer_norm:
            raise DeltuneError("a masked adapter has no LayerNorm of its own: give layer_norm=False")
        rank, down, up = down_up_product(self.rank, widths)
        biases = (Factor("down_bias", 1, 1, 1, constant=True),) if self.bias else ()
        return rank, (*down, *biases), up

    def two_layers(self, tensors: Tensors) -> TwoLayers | None:
        if self.layer_norm:
            return None
        biases = tensors.get("down_bias"), tensors.get("up_bias")
        return TwoLayers(tensors["down"], biases[0], self.activation, tensors["up"], biases[1])

    def split_at_up(self, tensors: Tensors, u: torch.Tensor, at: Place) -> BeforeUp:
        from torch.nn import functional as F

        t = {name: tensor.to(u.dtype) for name, tensor in tensors.items() if not name.startswith("up")}
        if self.layer_norm:
            u = F.layer_norm(u, u.shape[-1:], t["norm_gain"], t["norm_bias"])
        inner = activate(self.activation, F.linear(u, t["down"], t.get("down_bias")))
        inner = F.dropout(inner, self.dropout) if self.dropout and at.training else inner
        return inner, tensors["up"], tensors.get("up_bias")


@dataclass(frozen=True, repr=False)
class Vector(Form):
    """A trained vector, Δh = b (d_out,), which is 0 at the start (a bias).

    Args:
        where: "all" places, "biased" (those that have a bias already) or "unbiased" (those that have none).
    """

    reads_ids: ClassVar[bool] = True
    where: Literal["all", "biased", "unbiased"] = "all"

    def tensors(self, widths: Widths) -> Specs:
        return parameter_specs({"vector": (widths.out_width,)})

    def initialize(self, tensors: Tensors, at: Place | None) -> None:
        import torch

        torch.nn.init.zeros_(tensors["vector"])

    def affine(self, tensors: Tensors, at: Place | None) -> Affine:
        return None, tensors["vector"]

    def __call__(self, tensors: Tensors, u: torch.Tensor, at: Place) -> torch.Tensor:
        return tensors["vector"].to(u.dtype) if u.is_floating_point() else tensors["vector"]


@dataclass(frozen=True, repr=False)
class Rescale(Form):
    """Multiply by a trained vector, Δh = w ⊙ u - u, so that h + Δh = w ⊙ h where u is h (Liu et al. 2022).

    Tensor: gain w (d,), which is 1 at the start.
    """

    multiplies: ClassVar[str | None] = "gain"

    def tensors(self, widths: Widths) -> Specs:
        return parameter_specs({"gain": (widths.out_width,)})

    def initialize(self, tensors: Tensors, at: Place | None) -> None:
        import torch

        torch.nn.init.ones_(tensors["gain"])

    def incompatibility(self, widths: Widths) -> str | None:
        if widths.in_width == widths.out_width:
            return None
        return f"Rescale needs u as wide as h, here they are {widths.in_width} and {widths.out_width}"

    def fill_untrained(self, tensors: Tensors, buffers: Tensors) -> None:
        self.initialize(tensors, None)

    def affine(self, tensors: Tensors, at: Place | None) -> Affine:
        return tensors["gain"] - 1, None

    def __call__(self, tensors: Tensors, u: torch.Tensor, at: Place) -> torch.Tensor:
        return tensors["gain"].to(u.dtype) * u - u


@dataclass(frozen=True, repr=False)
class Mixture(Form):
    """Mix all hidden states in place of the last, γ ⊙ Σ_l α_l h_l + β over the L + 1 of them (3V; LN table 1).

    Tensors: layers α (L + 1,), 1 for the last state and 0 for the others at the start; gain γ (d,), 1 at the start;
        bias β
    (d,), 0 at the start. So the last hidden state is unchanged at the start.
    """

    needs: ClassVar[str] = "states"
    replaces: ClassVar[bool] = True

    def tensors(self, widths: Widths) -> Specs:
        return parameter_specs({"layers": (widths.states,), "gain": (widths.out_width,), "bias": (widths.out_width,)})

    def initialize(self, tensors: Tensors, at: Place | None) -> None:
        import torch

        torch.nn.init.zeros_(tensors["layers"])
        tensors["layers"][-1] = 1
        torch.nn.init.ones_(tensors["gain"])
        torch.nn.init.zeros_(tensors["bias"])

    def fill_untrained(self, tensors: Tensors, buffers: Tensors) -> None:
        self.initialize(tensors, None)

    def __call__(self, tensors: Tensors, u: torch.Tensor, at: Place) -> torch.Tensor:
        """Compute Δh (B, n, d) of the last hidden state from all of them (L + 1, B, n, d)."""
        import torch

        t = {name: tensor.to(u.dtype) for name, tensor in tensors.items()}
        return t["gain"] * torch.einsum("l,l...->...", t["layers"], u) + t["bias"] - u[-1]
