"""How Δh joins h: UV's fourth dimension, each value with the tensors it trains.

Shapes: h and Δh (B, n, ...), x (B, n, d) what the frozen sub-module reads.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..errors import DeltuneError, excerpt
from .arguments import check_fields
from .forms import Shapes, Widths
from .parser import to_expression


@dataclass(frozen=True, repr=False)
class Composition:
    """How Δh joins h. `shapes`: tensors of one place; `tied`: tensors that a sub-module's places share under a name."""

    def __post_init__(self) -> None:
        check_fields(self)

    def __repr__(self) -> str:
        return to_expression(self)

    @property
    def reads_x(self) -> bool:
        """Whether it needs x even where the form does not."""
        return False

    def shapes(self, widths: Widths) -> Shapes:
        return {}

    def tied(self, widths: Widths) -> Shapes:
        return {}

    def initialize(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Fill those of its tensors that are given with their initial values, in place."""

    def factor(self, tensors: Mapping[str, torch.Tensor]) -> float | torch.Tensor | None:
        """s where it is h + s Δh with the same s for every input, so that Δh folds into a weight; else None."""
        return None

    def __call__(
        self, h: torch.Tensor, delta: torch.Tensor, tensors: Mapping[str, torch.Tensor], x: torch.Tensor | None
    ) -> torch.Tensor:
        return h + delta


@dataclass(frozen=True, repr=False)
class Add(Composition):
    """h + Δh."""

    def factor(self, tensors: Mapping[str, torch.Tensor]) -> float:
        return 1.0


@dataclass(frozen=True, repr=False)
class Scale(Composition):
    """h + s Δh; s a number, or one learned scalar per place that starts at `value`."""

    value: float = 1.0
    learned: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.value and not self.learned:
            raise DeltuneError("scale 0 switches the term off: nothing of it would be trained; give another number")

    def shapes(self, widths: Widths) -> Shapes:
        return {"scale": ()} if self.learned else {}

    def initialize(self, tensors: Mapping[str, torch.Tensor]) -> None:
        if "scale" in tensors:
            tensors["scale"].fill_(self.value)

    def factor(self, tensors: Mapping[str, torch.Tensor]) -> float | torch.Tensor:
        return tensors["scale"] if self.learned else self.value

    def __call__(
        self, h: torch.Tensor, delta: torch.Tensor, tensors: Mapping[str, torch.Tensor], x: torch.Tensor | None
    ) -> torch.Tensor:
        if self.learned:
            return h + tensors["scale"].to(h.dtype) * delta
        return torch.add(h, delta, alpha=self.value)


@dataclass(frozen=True, repr=False)
class Gate(Composition):
    """(1 - λ) h + λ Δh with λ the softmax mass on the prefix (UV eq. 8); for a prefix at the heads only.

    The attention function does it, as one softmax over prefix and own keys.
    """


@dataclass(frozen=True, repr=False)
class SigmoidGate(Composition):
    """h + σ(x · w_g) Δh (UniPELT; Mao et al. 2022), with one value a position (ours): a mean over the tokens, as
    the authors take it, would make a row's output depend on its padding.

    name: the gates of one name in one sub-module are one d-vector w_g, 0 at the start (so that every gate is 1/2).
    """

    name: str

    def __post_init__(self) -> None:
        super().__post_init__()
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,100}", self.name):
            raise DeltuneError(
                f"SigmoidGate: name={excerpt(self.name)}: use letters, digits, '-' and '_', 1 to 100 of them"
            )

    @property
    def reads_x(self) -> bool:
        return True

    def tied(self, widths: Widths) -> Shapes:
        return {"gate": (widths.x_width,)}

    def initialize(self, tensors: Mapping[str, torch.Tensor]) -> None:
        if "gate" in tensors:
            tensors["gate"].zero_()

    def __call__(
        self, h: torch.Tensor, delta: torch.Tensor, tensors: Mapping[str, torch.Tensor], x: torch.Tensor | None
    ) -> torch.Tensor:
        assert x is not None
        gate = torch.sigmoid(x @ tensors["gate"].to(x.dtype)).to(h.dtype)
        return h + gate.reshape(gate.shape + (1,) * (h.dim() - gate.dim())) * delta
