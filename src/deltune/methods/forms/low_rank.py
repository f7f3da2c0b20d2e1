"""The form that is a product of two thin matrices, and what such products share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from ...errors import DeltuneError
from ..masks import Factor
from ..parser import Share, Size
from .base import FactorForm, Place, Product, Specs, Statistic, Tensors, Widths, parameter_specs
from .starts import rank_above, singular

if TYPE_CHECKING:
    import torch

Init = Literal["lora", "bert"]


@dataclass(frozen=True, repr=False)
class LowRank(FactorForm):
    """Two projections without an activation, Δh = dropout(u) W_down W_up (UV eq. 6; Hu et al. 2021).

    Tensors: down (r, d_in) and up (d_out, r), which is 0 at the start; at the weights of E experts (E, r, d_in) and
        (E, d_out, r).

    Args:
        rank: r, at least 1.
        dropout: The probability of dropping a value of u while training.
        init: "lora" (down Kaiming uniform), "bert" (down N(0, 0.02)), "eva" (down has the first principal components of
            what the projection reads; Paischer et al. 2024) or "loftq" (up and down have the first singular vectors of
            what quantisation took from W, with the roots of the singular values; Li et al. 2023).
    """

    acts_on_weights: ClassVar[bool] = True
    reads_ids: ClassVar[bool] = True
    rank: Size
    dropout: Share = 0.0
    init: Init | Literal["eva", "loftq"] = "lora"

    @property
    def starts_at_zero(self) -> bool:
        return self.init != "loftq"

    @property
    def statistic(self) -> Statistic | None:
        return {"eva": "covariance", "loftq": "quantisation error"}.get(self.init)  # type: ignore[return-value]

    def incompatibility(self, widths: Widths) -> str | None:
        if self.statistic and (short := rank_above(self.rank, widths)):
            return short
        if self.dropout and widths.lookup:
            return "dropout drops values of x, and token ids have none: give dropout=0 at the embedding"
        return None

    def waste(self, widths: Widths) -> str | None:
        full = min(widths.in_width, widths.out_width)
        if self.rank <= full:
            return None
        return (
            f"a matrix of {widths.out_width} × {widths.in_width} has a rank of {full} at most, so that rank={full} "
            "reaches every change that this one reaches, with fewer parameters"
        )

    def tensors(self, widths: Widths) -> Specs:
        experts = (widths.experts,) if widths.experts else ()
        return parameter_specs(
            {"down": (*experts, self.rank, widths.in_width), "up": (*experts, widths.out_width, self.rank)}
        )

    def initialize(self, tensors: Tensors, at: Place | None) -> None:
        statistic = None if at is None else at.statistic
        if self.init == "eva":
            assert statistic is not None
            tensors["down"].copy_(singular(statistic, slice(self.rank)).v)
            tensors["up"].zero_()
        elif self.init == "loftq":
            assert statistic is not None
            u, s, v = singular(statistic, slice(self.rank))
            tensors["down"].copy_(s.sqrt()[:, None] * v)
            tensors["up"].copy_(u * s.sqrt())
        else:
            init_down_up(tensors["down"], tensors["up"], self.init, zero_up=True)

    def mask_factors(self, widths: Widths) -> Product:
        if widths.experts:
            raise DeltuneError("a mask is drawn on one product, and experts have one each: mask other sites")
        return down_up_product(self.rank, widths)

    def factors(self, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        return tensors["down"], tensors["up"]


def down_up_product(rank: int, widths: Widths) -> Product:
    """Return the product of down (r, d_in) and up (d_out, r)."""
    down, up = Factor("down", widths.in_width, widths.in_width, 1), Factor("up", widths.out_width, 1, rank)
    return rank, (down,), (up,)


def init_down_up(down: torch.Tensor, up: torch.Tensor, init: Init, zero_up: bool) -> None:
    """Initialise the two projections of a bottleneck in place.

    Args:
        down: The down projection.
        up: The up projection.
        init: "lora": down Kaiming uniform with a = sqrt 5 (Hu et al. 2021). "bert": down N(0, 0.02).
        zero_up: Whether the up projection is 0; else it is N(0, 0.02).
    """
    import torch

    if init == "lora":
        for matrix in down if down.dim() == 3 else (down,):  # one for each expert
            torch.nn.init.kaiming_uniform_(matrix, a=math.sqrt(5))
    else:
        torch.nn.init.normal_(down, std=0.02)
    torch.nn.init.zeros_(up) if zero_up else torch.nn.init.normal_(up, std=0.02)
