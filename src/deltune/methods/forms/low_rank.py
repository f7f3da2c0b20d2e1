"""The form that is a product of two thin matrices, and what such products share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from ...errors import DeltuneError
from ..masks import Factor
from .base import FactorForm, Place, Product, Specs, Tensors, Widths, check_positive, check_share, trained

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
        init: "lora" (down Kaiming uniform) or "bert" (down N(0, 0.02)).

    Raises:
        DeltuneError: An argument is out of its range.
    """

    acts_on_weights: ClassVar[bool] = True
    reads_ids: ClassVar[bool] = True
    rank: int
    dropout: float = 0.0
    init: Init = "lora"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(rank=self.rank)
        check_share("dropout", self.dropout)

    def incompatibility(self, widths: Widths) -> str | None:
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
        return trained({"down": (*experts, self.rank, widths.in_width), "up": (*experts, widths.out_width, self.rank)})

    def initialize(self, tensors: Tensors, at: Place | None) -> None:
        init_down_up(tensors["down"], tensors["up"], self.init, zero_up=True)

    def product(self, widths: Widths) -> Product:
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
