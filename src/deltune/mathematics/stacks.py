"""Forms that act on a whole stack: on all its hidden states, or at its input embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from ..errors import DeltuneError, unknown
from .forms import Form, Shapes, Tensors, Widths, positive


@dataclass(frozen=True, repr=False)
class Mixture(Form):
    """γ ⊙ Σ_l α_l h_l + β over the L + 1 hidden states, in place of the last (3V; LN table 1).

    Tensors: layers α (L + 1,), 1 for the last and 0 for the others; gain γ (d,) 1; bias β (d,) 0: the identity.
    """

    needs: ClassVar[str] = "states"
    replaces: ClassVar[bool] = True

    def shapes(self, widths: Widths) -> Shapes:
        return {"layers": (widths.states,), "gain": (widths.out_width,), "bias": (widths.out_width,)}

    def start(self, tensors: Tensors) -> None:
        torch.nn.init.zeros_(tensors["layers"])
        tensors["layers"][-1] = 1
        torch.nn.init.ones_(tensors["gain"])
        torch.nn.init.zeros_(tensors["bias"])

    def rest(self, tensors: Tensors) -> None:
        self.start(tensors)

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
        positive(length=self.length)
        if self.positions not in ("shift", "none"):
            raise DeltuneError(unknown("positions", self.positions, ("shift", "none")))
        if self.init_from == ():
            raise DeltuneError("init_from is empty; give token ids, or None for random rows")

    @property
    def silent(self) -> bool:
        return False

    def shapes(self, widths: Widths) -> Shapes:
        return {"rows": (self.length, widths.in_width)}

    def start(self, tensors: Tensors) -> None:
        torch.nn.init.normal_(tensors["rows"], std=0.02)
