"""Schedules: a penalty, a projection or the allocation of ranks, beside the steps of the optimizer.

A form has a schedule as its attribute `schedule`. The state of a schedule belongs to the delta and is in checkpoints of
the model, not in a saved delta.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..errors import DeltuneError
from .parser import Positive, Size, check_fields, to_expression

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
class Allocation(Schedule):
    """Base of rank and cluster schedules: ever fewer units train, and the least important ones leave first.

    The importance of a parameter is the product of two moving averages, of its sensitivity |w ∂L/∂w| and of how much
    that varies. A unit, such as a rank, has some entries of several tensors.

    Args:
        target: How many units are left in the end.
        start: The share of the training at whose end the first units may leave.
        stop: The share of the training after which all that are to leave have left, above `start`.
        every: After how many steps units are chosen.
        beta1: Of the moving average of the sensitivity.
        beta2: Of the moving average of its variation.

    Raises:
        DeltuneError: An argument is out of its range.
    """

    axes: ClassVar[Mapping[str, int]]
    """The tensors, and which axis of each has the units, or rows that each belong to one."""
    variation_first: ClassVar[bool] = False
    """Whether the variation is measured from the average sensitivity before the step's own enters it."""

    target: Size = 8
    start: float = 0.1
    stop: float = 0.7
    every: Size = 1
    beta1: float = 0.85
    beta2: float = 0.85

    def __post_init__(self) -> None:
        check_fields(self)
        problems = [
            f"{name}={value}: must lie between 0 and 1"
            for name, value in (("beta1", self.beta1), ("beta2", self.beta2))
            if not 0 < value < 1
        ]
        if not 0 <= self.start < self.stop <= 1:
            problems.append(f"start={self.start}, stop={self.stop}: shares of the training, 0 ≤ start < stop ≤ 1")
        if problems:
            raise DeltuneError("; ".join(problems))

    def __repr__(self) -> str:
        return to_expression(self)

    def is_before(self, share: float, of: float) -> bool:
        """Return whether one share of the training is less than another, rounding apart."""
        return share < of - _ROUNDING

    def left(self, share: float, total: int, target: int, exponent: float = 3) -> int:
        """Return how many of all units are left after a share of the training, of which `target` are in the end."""
        if not self.is_before(self.start, share):
            return total
        ahead = max(0.0, 1 - (share - self.start) / (self.stop - self.start))
        return int((total - target) * ahead**exponent + target + _ROUNDING)

    def scores(self, importance: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Compute how much each unit of a place matters.

        Args:
            importance: The importance of each entry of the tensors of `axes`.
            tensors: All tensors of the place.

        Returns:
            A number for each unit.
        """
        raise NotImplementedError


@dataclass(frozen=True, repr=False)
class RankSchedule(Allocation):
    """Give each place as many ranks as matter there (AdaLoRA, Zhang et al. 2023).

    The importance of a rank is the importance of its value plus the mean importances of its two vectors. From `start`
    on the number of all ranks falls with a cubic to `target` for each place in the mean at `stop`; the values of the
    least important ranks are set to 0, and stay 0 from `stop` on.

    Args:
        orthogonality: Of the penalty ‖A Aᵀ - 1‖ + ‖Bᵀ B - 1‖, halved.

    Raises:
        DeltuneError: An argument is out of its range.
    """

    axes: ClassVar[Mapping[str, int]] = {"values": 0, "down": 0, "up": 1}
    """Which axis of a tensor has the ranks; the first tensor is set to 0."""

    orthogonality: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.orthogonality < 0:
            raise DeltuneError(f"orthogonality={self.orthogonality}: must not be negative")

    def penalty(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        if not self.orthogonality:
            return None
        distances = _distance_from_orthogonal(tensors["down"]) + _distance_from_orthogonal(tensors["up"].t())
        return self.orthogonality / 2 * distances

    def scores(self, importance: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return importance["values"] + importance["down"].mean(1) + importance["up"].mean(0)


@dataclass(frozen=True, repr=False)
class ClusterSchedule(Allocation):
    """Train ever fewer clusters of AdaMSS, over all places (PEFT: use_asa, adaptive subspace allocation).

    From `start` to `stop` the number of clusters that train falls to `target`. Every so many steps those whose
    importance is below stay as they are from then on, and the averages begin again; as in PEFT, of the clusters that
    train those remain whose importance is above the one of rank `target`, so that one fewer trains.

    Args:
        exponent: By which power their number falls.

    Raises:
        DeltuneError: An argument is out of its range.
    """

    axes: ClassVar[Mapping[str, int]] = {"down": 0, "up": 0}
    variation_first: ClassVar[bool] = True

    exponent: Positive = 3.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target < 2:
            raise DeltuneError(f"target={self.target}: must be at least 2, since one fewer trains in the end")

    def units(self, name: str, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the cluster of each row of a tensor."""
        import torch

        clusters = tensors["clusters"]
        return clusters if name == "up" else torch.arange(len(tensors["down"]), device=clusters.device)

    def scores(self, importance: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        number, rank, width = tensors["down"].shape
        sizes = tensors["clusters"].bincount(minlength=number)
        ranks = sizes.clamp(max=min(rank, width))  # the others are 0
        of_up = importance["up"].sum(1)
        ups = of_up.new_zeros(number).index_add(0, tensors["clusters"], of_up)
        return importance["down"].flatten(1).sum(1) / (ranks * width) + ups / (ranks * sizes)


USUAL = RankSchedule()


def _distance_from_orthogonal(rows: torch.Tensor) -> torch.Tensor:
    """Return the Frobenius norm of A Aᵀ - 1."""
    import torch

    return torch.linalg.matrix_norm(rows @ rows.t() - torch.eye(len(rows), dtype=rows.dtype, device=rows.device))
