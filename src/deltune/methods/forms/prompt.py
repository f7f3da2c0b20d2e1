"""The form that stands before the input embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from ...errors import DeltuneError, check_choice
from ..parser import Size
from .base import Form, Place, Specs, Tensors, Widths, parameter_specs


@dataclass(frozen=True, repr=False)
class Prompt(Form):
    """l trained vectors before the input embeddings (Lester et al. 2021).

    Tensor: rows (l, d).

    Args:
        length: l, at least 1.
        init_from: Token ids whose embeddings the vectors start from, repeated up to l; None: N(0, 0.02).
        positions: "shift": the vectors take positions 0 to l - 1 and the text follows. "none": they have no position
            and the text keeps its own, as in UV's code; for absolute positions only.

    Raises:
        DeltuneError: An argument is out of its range.
    """

    needs: ClassVar[str] = "tokens"
    length: Size
    init_from: tuple[int, ...] | None = None
    positions: Literal["shift", "none"] = "shift"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("positions", self.positions, ("shift", "none"))
        if self.init_from == ():
            raise DeltuneError("init_from is empty; give token ids, or None for random rows")

    @property
    def starts_at_zero(self) -> bool:
        return False

    def tensors(self, widths: Widths) -> Specs:
        return parameter_specs({"rows": (self.length, widths.in_width)})

    def initialize(self, tensors: Tensors, at: Place | None) -> None:
        """Fill `rows` with N(0, 0.02), in place; `init_from` is applied later, when the delta is attached."""
        import torch

        torch.nn.init.normal_(tensors["rows"], std=0.02)
