"""Forms that act on a whole stack: on all its hidden states, or at its input embeddings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch.nn import functional as F

from ..errors import DeltuneError, unknown_name
from .arguments import check_fields
from .masks import Factor
from .parser import to_expression

Tensors = Mapping[str, torch.Tensor]
Shapes = dict[str, tuple[int, ...]]
Init = Literal["lora", "bert"]

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "identity": lambda u: u,
}


@dataclass(frozen=True)
class Widths:
    """The sizes a form needs: of u, of h, of x (what the frozen sub-module reads), and of the attention's heads.

    `states`: how many hidden states there are to mix, at the site that has them all.
    """

    in_width: int
    out_width: int
    x_width: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_width: int = 0
    value_width: int = 0
    states: int = 0


@dataclass(frozen=True, repr=False)
class Form:
    """A functional form of Δh. `needs`: what a site must offer: "hidden" (one representation), "attention" (the inside
    of one), "tokens" (the input embeddings), "states" (all layers' outputs). `multiplies`: the name
    of w where, reading h, h + Δh is w ⊙ h. `replaces`: h + Δh does not depend on h, so that whatever changed h at the
    same place before would be lost."""

    needs: ClassVar[str] = "hidden"
    multiplies: ClassVar[str | None] = None
    replaces: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_fields(self)

    def __repr__(self) -> str:
        return to_expression(self)

    def incompatibility(self, widths: Widths) -> str | None:
        """Why it cannot act between these widths, or None."""
        return None

    @property
    def starts_at_zero(self) -> bool:
        """Whether Δh = 0 at the start whatever u is."""
        return True

    def shapes(self, widths: Widths) -> Shapes:
        """Shapes of the tensors that are kept."""
        raise NotImplementedError

    def trained(self, widths: Widths) -> Shapes:
        """Shapes of the tensors that are trained at one place; the kept ones unless there is a reparameterisation."""
        return self.shapes(widths)

    def shared(self, widths: Widths) -> Shapes:
        """Shapes of tensors trained once for all places of one attention kind, folded away when saved."""
        return {}

    def initialize(self, tensors: Tensors) -> None:
        """Fill trained (or shared) tensors with their initial values, in place."""
        raise NotImplementedError

    def fold(self, trained: Tensors, shared: Tensors, widths: Widths) -> Tensors:
        """The kept tensors computed from the trained and shared ones."""
        return trained

    @property
    def shift(self) -> int:
        """By how many places the positions of its stack's tokens move on."""
        return 0

    def product(self, widths: Widths) -> Product | None:
        """The two factors that share a rank, so that masks can be drawn jointly; None where each tensor acts alone."""
        return None

    def fill_untrained(self, tensors: Tensors) -> None:
        """Fill, in place, what a mask leaves out: zero, or the value that changes nothing."""
        for tensor in tensors.values():
            tensor.zero_()

    def affine(self, tensors: Tensors) -> Affine | None:
        """(A, b) where Δh = A u + b and no more, so that it folds into a weight.

        A (d_out, d_in), or (d,) for a diagonal; either may be None for zero.
        """
        return None

    def inner(self, tensors: Tensors, u: torch.Tensor, training: bool) -> torch.Tensor | None:
        """v where Δh = v W_up + b_up, with the tensors up and, by choice, up_bias; None for other forms."""
        return None

    def __call__(self, tensors: Tensors, u: torch.Tensor, training: bool) -> torch.Tensor:
        """Δh from u and the kept tensors."""
        inner = self.inner(tensors, u, training)
        assert inner is not None
        return _up_projection(tensors, inner)

    def add_to(
        self,
        h: torch.Tensor,
        tensors: Tensors,
        u: torch.Tensor,
        training: bool,
        scale: float,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """h + s Δh in h's own precision, a last product added as it is made.

        out: h itself where it may be overwritten, else None.
        """
        if self.multiplies is not None and u is h and scale == 1:
            return (h.mul if out is None else out.mul_)(tensors[self.multiplies].to(h.dtype))
        inner = None if "up_bias" in tensors else self.inner(tensors, u, training)
        if inner is None or h.dtype != inner.dtype:
            delta = self(tensors, u, training) if inner is None else _up_projection(tensors, inner)
            # Δh may be a view of u, which may be h: it is not overwritten while it is read
            return (h.add if out is None or u is h else out.add_)(delta.to(h.dtype), alpha=scale)
        up, v = tensors["up"], inner.flatten(0, -2)
        up = up if up.dtype == v.dtype else up.to(v.dtype)
        if out is None:
            return torch.addmm(h.flatten(0, -2), v, up.t(), alpha=scale).view(h.shape)
        out.view(-1, out.shape[-1]).addmm_(v, up.t(), alpha=scale)  # out= must be contiguous where it is compiled
        return out

    def per_head(self, tensors: Tensors, query: torch.Tensor, scaling: float) -> torch.Tensor:
        """Δh (B, n, N_h, d_v) from the model's own query (B, N_h, n, d_h); for forms that need an attention."""
        raise NotImplementedError


Affine = tuple[torch.Tensor | None, torch.Tensor | None]

Product = tuple[int, tuple[Factor, ...], tuple[Factor, ...]]
"""A shared rank, and the sides below and above it."""


def _down_up_product(rank: int, widths: Widths) -> Product:
    """down (r, d_in) and up (d_out, r)."""
    down, up = Factor("down", widths.in_width, widths.in_width, 1), Factor("up", widths.out_width, 1, rank)
    return rank, (down,), (up,)


def _up_projection(tensors: Tensors, inner: torch.Tensor) -> torch.Tensor:
    """v W_up + b_up."""
    bias = tensors["up_bias"].to(inner.dtype) if "up_bias" in tensors else None
    return F.linear(inner, tensors["up"].to(inner.dtype), bias)


def check_positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise DeltuneError(f"{name}={size}: must be a whole number of at least 1")


def check_share(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise DeltuneError(f"{name}={value}: must lie in [0, 1)")


def init_down_up(down: torch.Tensor, up: torch.Tensor, init: Init, zero_up: bool) -> None:
    """lora: Kaiming uniform (a = sqrt 5) down, zero up (Hu et al. 2021). bert: N(0, 0.02) down, up zero or the same."""
    if init == "lora":
        torch.nn.init.kaiming_uniform_(down, a=math.sqrt(5))
    else:
        torch.nn.init.normal_(down, std=0.02)
    torch.nn.init.zeros_(up) if zero_up else torch.nn.init.normal_(up, std=0.02)


@dataclass(frozen=True, repr=False)
class Bottleneck(Form):
    """Δh = f(u W_down + b_down) W_up + b_up, biases and an input LayerNorm by choice (UV eq. 4).

    rank r >= 1; activation f; dropout on f's output; init "bert" or "lora"; zero_up: Δh = 0 at the start.
    Tensors: down (r, d_in), up (d_out, r).
    """

    rank: int
    activation: str = "relu"
    bias: bool = False
    layer_norm: bool = False
    dropout: float = 0.0
    init: Init = "bert"
    zero_up: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(rank=self.rank)
        check_share("dropout", self.dropout)
        if self.activation not in ACTIVATIONS:
            raise DeltuneError(unknown_name("activation", self.activation, ACTIVATIONS))

    @property
    def starts_at_zero(self) -> bool:
        return self.zero_up

    def shapes(self, widths: Widths) -> Shapes:
        shapes: Shapes = {"down": (self.rank, widths.in_width), "up": (widths.out_width, self.rank)}
        if self.bias:
            shapes |= {"down_bias": (self.rank,), "up_bias": (widths.out_width,)}
        if self.layer_norm:
            shapes |= {"norm_gain": (widths.in_width,), "norm_bias": (widths.in_width,)}
        return shapes

    def initialize(self, tensors: Tensors) -> None:
        init_down_up(tensors["down"], tensors["up"], self.init, self.zero_up)
        for name, tensor in tensors.items():
            if name not in ("down", "up"):
                torch.nn.init.constant_(tensor, 1.0 if name == "norm_gain" else 0.0)

    def product(self, widths: Widths) -> Product:
        if self.layer_norm:
            raise DeltuneError("a masked adapter has no LayerNorm of its own: give layer_norm=False")
        rank, down, up = _down_up_product(self.rank, widths)
        biases = (Factor("down_bias", 1, 1, 1, constant=True),) if self.bias else ()
        return rank, (*down, *biases), up

    def inner(self, tensors: Tensors, u: torch.Tensor, training: bool) -> torch.Tensor:
        t = {name: tensor.to(u.dtype) for name, tensor in tensors.items() if not name.startswith("up")}
        if self.layer_norm:
            u = F.layer_norm(u, u.shape[-1:], t["norm_gain"], t["norm_bias"])
        inner = ACTIVATIONS[self.activation](F.linear(u, t["down"], t.get("down_bias")))
        return F.dropout(inner, self.dropout) if self.dropout and training else inner


@dataclass(frozen=True, repr=False)
class LowRank(Form):
    """Δh = dropout(u) W_down W_up (UV eq. 6; Hu et al. 2021). rank r >= 1. Tensors: down (r, d_in), up (d_out, r)."""

    rank: int
    dropout: float = 0.0
    init: Init = "lora"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(rank=self.rank)
        check_share("dropout", self.dropout)

    def shapes(self, widths: Widths) -> Shapes:
        return {"down": (self.rank, widths.in_width), "up": (widths.out_width, self.rank)}

    def initialize(self, tensors: Tensors) -> None:
        init_down_up(tensors["down"], tensors["up"], self.init, zero_up=True)

    def product(self, widths: Widths) -> Product:
        return _down_up_product(self.rank, widths)

    def affine(self, tensors: Tensors) -> Affine:
        return tensors["up"] @ tensors["down"], None

    def inner(self, tensors: Tensors, u: torch.Tensor, training: bool) -> torch.Tensor:
        u = F.dropout(u, self.dropout) if self.dropout and training else u
        return F.linear(u, tensors["down"].to(u.dtype))


@dataclass(frozen=True, repr=False)
class Vector(Form):
    """Δh = b, a constant d_out-vector, 0 at the start (a bias).

    where: "all" places, those with a bias already ("biased"), or those without one ("unbiased").
    """

    where: Literal["all", "biased", "unbiased"] = "all"

    def shapes(self, widths: Widths) -> Shapes:
        return {"vector": (widths.out_width,)}

    def initialize(self, tensors: Tensors) -> None:
        torch.nn.init.zeros_(tensors["vector"])

    def affine(self, tensors: Tensors) -> Affine:
        return None, tensors["vector"]

    def __call__(self, tensors: Tensors, u: torch.Tensor, training: bool) -> torch.Tensor:
        return tensors["vector"].to(u.dtype)


@dataclass(frozen=True, repr=False)
class Rescale(Form):
    """Δh = w ⊙ u - u with w = 1 at the start, so that h + Δh = w ⊙ h (Liu et al. 2022). Tensor: gain (d,)."""

    multiplies: ClassVar[str | None] = "gain"

    def shapes(self, widths: Widths) -> Shapes:
        return {"gain": (widths.out_width,)}

    def initialize(self, tensors: Tensors) -> None:
        torch.nn.init.ones_(tensors["gain"])

    def incompatibility(self, widths: Widths) -> str | None:
        if widths.in_width == widths.out_width:
            return None
        return f"Rescale needs u as wide as h, here they are {widths.in_width} and {widths.out_width}"

    def fill_untrained(self, tensors: Tensors) -> None:
        self.initialize(tensors)

    def affine(self, tensors: Tensors) -> Affine:
        return tensors["gain"] - 1, None

    def __call__(self, tensors: Tensors, u: torch.Tensor, training: bool) -> torch.Tensor:
        return tensors["gain"].to(u.dtype) * u - u


@dataclass(frozen=True, repr=False)
class Mixture(Form):
    """γ ⊙ Σ_l α_l h_l + β over the L + 1 hidden states, in place of the last (3V; LN table 1).

    Tensors: layers α (L + 1,), 1 for the last and 0 for the others; gain γ (d,) 1; bias β (d,) 0: the identity.
    """

    needs: ClassVar[str] = "states"
    replaces: ClassVar[bool] = True

    def shapes(self, widths: Widths) -> Shapes:
        return {"layers": (widths.states,), "gain": (widths.out_width,), "bias": (widths.out_width,)}

    def initialize(self, tensors: Tensors) -> None:
        torch.nn.init.zeros_(tensors["layers"])
        tensors["layers"][-1] = 1
        torch.nn.init.ones_(tensors["gain"])
        torch.nn.init.zeros_(tensors["bias"])

    def fill_untrained(self, tensors: Tensors) -> None:
        self.initialize(tensors)

    def __call__(self, tensors: Tensors, u: torch.Tensor, training: bool) -> torch.Tensor:
        """u (L + 1, B, n, d) -> Δh (B, n, d) to the last state."""
        t = {name: tensor.to(u.dtype) for name, tensor in tensors.items()}
        return t["gain"] * torch.einsum("l,l...->...", t["layers"], u) + t["bias"] - u[-1]


@dataclass(frozen=True, repr=False)
class Prompt(Form):
    """l vectors before the input embeddings (Lester et al. 2021). Tensor: rows (l, d), N(0, 0.02) or the embeddings of
    `init_from` (token ids, repeated up to l). positions "shift": they take positions 0 ... l-1 and the text moves on;
    "none": they have no position and the text keeps its own (the released code of UV; absolute positions only)."""

    needs: ClassVar[str] = "tokens"
    length: int
    init_from: tuple[int, ...] | None = None
    positions: Literal["shift", "none"] = "shift"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(length=self.length)
        if self.positions not in ("shift", "none"):
            raise DeltuneError(unknown_name("positions", self.positions, ("shift", "none")))
        if self.init_from == ():
            raise DeltuneError("init_from is empty; give token ids, or None for random rows")

    @property
    def starts_at_zero(self) -> bool:
        return False

    def shapes(self, widths: Widths) -> Shapes:
        return {"rows": (self.length, widths.in_width)}

    def initialize(self, tensors: Tensors) -> None:
        torch.nn.init.normal_(tensors["rows"], std=0.02)
