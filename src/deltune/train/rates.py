"""The learning rate of a run that gives none, and every rule by which one of several rates or values is chosen.

A run has its method's rate for the number of steps. A series (`search`) chooses by validation, and so does a study,
under two seeds; `deltune choose` chooses by training rows that are held out.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..methods.registry import default_learning_rate
from .config import RunConfig
from .data.loading import TaskData
from .presets import DEFAULT

PASSES_OF_A_STEP = 3
"""A row of a training step takes as long as that many rows that are only scored: forward, and twice that backward."""

FINALISTS = 2
"""The number of rates that a study tries under a second seed. One seed's validation rows may prefer, by a hair, a rate
that diverges under others: of two rates within a point the mean over two seeds tells more."""


def first_peak(rank_of: Callable[[int], tuple[float, ...]], count: int) -> int:
    """Try values in order until one ranks no higher than the one before, which is chosen; -inf is passed over."""
    chosen, best = 0, rank_of(0)
    for i in range(1, count):
        rank = rank_of(i)
        if math.isfinite(best[0]) and rank <= best:
            break
        chosen, best = i, rank
    return chosen


def finalists(totals: Sequence[float], places: Sequence[int]) -> list[int]:
    """Return the places that go on to the next seed, the highest total first; of equal ones the first."""
    return sorted(places, key=lambda i: -totals[i])[:FINALISTS]


@dataclass(frozen=True)
class Slice:
    """The training rows that a search uses.

    Attributes:
        rows: How many rows the tries train on.
        held_out: How many other rows the tries are compared on.
        seed: Draws both.
    """

    rows: int
    held_out: int
    seed: int

    def __call__(self, data: TaskData) -> TaskData:
        """Return the data set of the tries: the held-out rows take the place of validation."""
        train = data.splits["train"]
        order = random.Random(self.seed).sample(range(len(train)), self.held_out + self.rows)
        parts = {"train": order[self.held_out :], "validation": order[: self.held_out]}
        splits = {split: train.select(sorted(indices)) for split, indices in parts.items()}
        return replace(data, splits=splits, fingerprint=f"{data.fingerprint} {self}")


def with_default_rate(config: RunConfig, steps: int) -> RunConfig:
    """Return a config with its method's learning rate for that many steps, where it has none and asks for no search."""
    if config.optim.lr is not None:
        return config
    return config.replace(lr=usual_rate(config, steps), lr_source=DEFAULT)


def usual_rate(config: RunConfig, steps: int | None) -> float:
    """Return the learning rate of a config's method for that many steps; a policy takes a twentieth of it.

    TRL's own defaults are 2e-5 for SFT and 1e-6 for DPO, KTO, ORPO and GRPO.
    """
    share = 1.0 if config.objective.kind in ("sft", "reward") else 0.05
    return share * default_learning_rate(config.method.expression, steps)
