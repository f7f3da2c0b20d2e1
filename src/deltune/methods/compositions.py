"""How the change Δh of a form joins the hidden states h: added, scaled or gated (the composition of UV's design space).

Shapes: h and Δh (B, n, ...); x (B, n, d), what the frozen sub-module reads.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from ..errors import DeltuneError, excerpt
from .forms.base import MethodPart, Specs, TensorSpec, Widths
from .parser import check_fields, to_expression

if TYPE_CHECKING:
    import torch


class Composition(MethodPart):
    """How Δh joins h. The base class adds it; subclasses may have tensors of their own.

    Arguments of its methods:
        widths: The sizes at the place.
        tensors: Its tensors by name; in `initialize`, some or all of them.
        h: The hidden states (B, n, ...).
        delta: Δh, of the shape of h.
        x: What the frozen sub-module reads (B, n, d); None where `reads_x` is false.
    """

    in_softmax: ClassVar[bool] = False
    """Whether it joins a prefix inside the attention function, by one softmax over the prefix and the model's keys."""

    def __post_init__(self) -> None:
        check_fields(self)

    def __repr__(self) -> str:
        return to_expression(self)

    @property
    def reads_x(self) -> bool:
        """Whether it needs x even where the form does not."""
        return False

    def tensors(self, widths: Widths) -> Specs:
        """Return what the tensors are that it trains at one place.

        Returns:
            Their specifications by name.
        """
        return {}

    def initialize(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Fill its tensors with their initial values, in place."""

    def factor(self, tensors: Mapping[str, torch.Tensor]) -> float | torch.Tensor | None:
        """Return s where the result is h + s Δh with one s for every input, so that Δh can be merged into a weight.

        Returns:
            s as a number or a tensor of shape (); None for other compositions.
        """
        return None

    def __call__(
        self, h: torch.Tensor, delta: torch.Tensor, tensors: Mapping[str, torch.Tensor], x: torch.Tensor | None
    ) -> torch.Tensor:
        """Join Δh to h.

        Returns:
            The new hidden states, of the shape of h.
        """
        return h + delta


@dataclass(frozen=True, repr=False)
class Add(Composition):
    """Add the change: h + Δh."""

    def factor(self, tensors: Mapping[str, torch.Tensor]) -> float:
        return 1.0


@dataclass(frozen=True, repr=False)
class Scale(Composition):
    """Add the change times a fixed or trained scale: h + s Δh.

    Args:
        value: s, or where s starts if it is learned.
        learned: Whether s is trained, one scalar for each place.

    Raises:
        DeltuneError: s is 0 and not learned, so that nothing would be trained.
    """

    value: float = 1.0
    learned: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.value and not self.learned:
            raise DeltuneError("scale 0 switches the term off: nothing of it would be trained; give another number")

    def tensors(self, widths: Widths) -> Specs:
        return {"scale": TensorSpec(())} if self.learned else {}

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
        return h.add(delta, alpha=self.value)


@dataclass(frozen=True, repr=False)
class Gate(Composition):
    """Join a prefix by the softmax mass λ on it: (1 - λ) h + λ Δh (UV eq. 8), for a prefix at the heads only.

    The attention function computes it, as one softmax over the prefix and the model's own keys.
    """

    in_softmax = True


@dataclass(frozen=True, repr=False)
class SigmoidGate(Composition):
    """Add the change times a learned gate: h + g Δh, g = σ(x · w_g) (UniPELT; Mao et al. 2022).

    There is one gate for each position. The authors take the mean over the tokens, which would make a row's output
    depend on its padding, and in a decoder on later tokens.

    Args:
        name: In one term, gates of the same name in one sub-module share one vector w_g (d,), which is 0 at the start,
            so that every gate starts at 1/2. Letters, digits, "-" and "_", at most 100.

    Raises:
        DeltuneError: The name has other characters or is too long.
    """

    name: str

    tensor: ClassVar[str] = "gate"
    """The name of w_g among the tensors of a delta."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,100}", self.name):
            raise DeltuneError(
                f"{type(self).__name__}: name={excerpt(self.name)}: use letters, digits, '-' and '_', 1 to 100 of them"
            )

    @property
    def reads_x(self) -> bool:
        return True

    def tensors(self, widths: Widths) -> Specs:
        return {self.tensor: TensorSpec((widths.x_width,), shared="sublayer")}

    def initialize(self, tensors: Mapping[str, torch.Tensor]) -> None:
        if self.tensor in tensors:
            tensors[self.tensor].zero_()

    def __call__(
        self, h: torch.Tensor, delta: torch.Tensor, tensors: Mapping[str, torch.Tensor], x: torch.Tensor | None
    ) -> torch.Tensor:
        assert x is not None
        gate = self.gates(tensors, x).to(h.dtype)
        return h + gate.reshape(gate.shape + (1,) * (h.dim() - gate.dim())) * delta

    def gates(self, tensors: Mapping[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """Return the gates.

        Returns:
            g (B, n).
        """
        return (x @ tensors[self.tensor].to(x.dtype)).sigmoid()


@dataclass(frozen=True, repr=False)
class PrefixGate(SigmoidGate):
    """Multiply a prefix's keys and values by a learned gate g = σ(x · w_g): softmax(q [g P_k; K]ᵀ) [g P_v; V].

    UniPELT has this gate (Mao et al. 2022). As in `Gate`, the prefix and the model's own keys share a softmax. There is
    one gate for each position of the query.

    Args:
        name: As for `SigmoidGate`.

    Raises:
        DeltuneError: The name has other characters or is too long.
    """

    in_softmax = True
    tensor = "prefix_gate"  # `SigmoidGate` is another function of its own tensor
