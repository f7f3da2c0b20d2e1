"""Schedules: a penalty, a projection or the allocation of ranks, beside the steps of the optimizer.

A form has a schedule as its attribute `schedule`. The state of a schedule belongs to the delta and is in checkpoints of
the model, not in a saved delta.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..errors import DeltuneError
from .parser import Size, check_fields, to_expression

if TYPE_CHECKING:
    import torch

_ROUNDING = 1e-9
"""Shares of the training are quotients of whole numbers, and equal up to this."""


@dataclass(frozen=True)
class Schedule:
    """A penalty, a projection or both for the tensors of a term, beside the steps of the optimizer.

    A form of your own has one as its property `schedule`; subclasses write what they need of its methods.
    """

    def penalty(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """Compute what is added to the loss of each step, as the mean over the places of the term.

        Args:
            tensors: The trained tensors of one place by name.

        Returns:
            A number, or None for no penalty.
        """
        return None

    def project(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Change tensors in place after each step, so that they keep what they must have.

        Args:
            tensors: The trained tensors of one place by name.
        """


@dataclass(frozen=True, repr=False)
class RankSchedule(Schedule):
    """Give each place as many ranks as matter there (AdaLoRA, Zhang et al. 2023).

    The importance of a parameter is the product of two moving averages, of its sensitivity |w ∂L/∂w| and of how much
    that varies. The importance of a rank is the importance of its value plus the mean importances of its two vectors.
    From `start` on the number of all ranks falls with a cubic to `target` for each place in the mean at `stop`; the
    values of the least important ranks are set to 0, and stay 0 from `stop` on.

    Args:
        target: The mean number of ranks of a place in the end.
        start: The share of the training without pruning at its beginning.
        stop: The share of the training after which the ranks are final, above `start`.
        every: After how many steps ranks are pruned.
        beta1: Of the moving average of the sensitivity.
        beta2: Of the moving average of its variation.
        orthogonality: Of the penalty ‖A Aᵀ - 1‖ + ‖Bᵀ B - 1‖, halved.

    Raises:
        DeltuneError: An argument is out of its range.
    """

    axes: ClassVar[Mapping[str, int]] = {"values": 0, "down": 0, "up": 1}
    """Which axis of a tensor has the ranks; the first tensor is set to 0."""

    target: Size = 8
    start: float = 0.1
    stop: float = 0.7
    every: Size = 1
    beta1: float = 0.85
    beta2: float = 0.85
    orthogonality: float = 0.5

    def __post_init__(self) -> None:
        check_fields(self)
        problems = [
            f"{name}={value}: must lie between 0 and 1"
            for name, value in (("beta1", self.beta1), ("beta2", self.beta2))
            if not 0 < value < 1
        ]
        if not 0 <= self.start < self.stop <= 1:
            problems.append(f"start={self.start}, stop={self.stop}: shares of the training, 0 ≤ start < stop ≤ 1")
        if self.orthogonality < 0:
            problems.append(f"orthogonality={self.orthogonality}: must not be negative")
        if problems:
            raise DeltuneError("; ".join(problems))

    def __repr__(self) -> str:
        return to_expression(self)

    def penalty(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        if not self.orthogonality:
            return None
        distances = _distance_from_orthogonal(tensors["down"]) + _distance_from_orthogonal(tensors["up"].t())
        return self.orthogonality / 2 * distances

    def is_before(self, share: float, of: float) -> bool:
        """Return whether one share of the training is less than another, rounding apart."""
        return share < of - _ROUNDING

    def budget(self, share: float, total: int, places: int) -> int:
        """Return how many ranks all places have together after a share of the training."""
        target = self.target * places
        if not self.is_before(self.start, share):
            return total
        left = max(0.0, 1 - (share - self.start) / (self.stop - self.start))
        return int((total - target) * left**3 + target + _ROUNDING)


USUAL = RankSchedule()


def _distance_from_orthogonal(rows: torch.Tensor) -> torch.Tensor:
    """Return the Frobenius norm of A Aᵀ - 1."""
    import torch

    return torch.linalg.matrix_norm(rows @ rows.t() - torch.eye(len(rows), dtype=rows.dtype, device=rows.device))
