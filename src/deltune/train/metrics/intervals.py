"""Intervals of scores over examples: Wilson's for shares of right answers, the jackknife's for every other score."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import NormalDist

import numpy as np

from .base import ComputeScore, Score

MAX_GROUPS = 100
"""The most times that a score is computed anew for its jackknife."""


NO_SPREAD = 1e-9
"""A standard error up to that is the rounding of equal numbers."""


def standard_error(rows: np.ndarray, compute_score: ComputeScore) -> float:
    """Return the standard error of a score by the jackknife, which leaves out one example at a time.

    SE² = (n − 1)/n · Σ (θ₍₋ᵢ₎ − θ̄)². Equal examples are left out once and counted as often as they occur. Where more
    than `MAX_GROUPS` differ, n is the number of groups of examples that are left out together (Quenouille 1956; Efron
    and Tibshirani 1993, chapter 11).
    """
    distinct, first, count = np.unique(rows, axis=0, return_index=True, return_counts=True)
    if len(distinct) <= MAX_GROUPS:
        left_out = [np.array([index]) for index in first]
    else:
        groups = np.arange(len(rows)) % MAX_GROUPS
        left_out, count = [np.flatnonzero(groups == group) for group in range(MAX_GROUPS)], np.ones(MAX_GROUPS, int)
    scores = np.array([compute_score(np.delete(rows, indices, axis=0)) for indices in left_out])
    n = count.sum()
    mean = (count * scores).sum() / n
    return float(np.sqrt((n - 1) / n * (count * (scores - mean) ** 2).sum()))


def share_interval(right: int, rows: int, level: float = 0.95) -> tuple[float, float]:
    """Return Wilson's interval of a share."""
    from scipy.stats import binomtest

    ends = binomtest(right, rows).proportion_ci(level, method="wilson")
    return float(ends.low), float(ends.high)


def interval(score: Score, bounds: tuple[float, float], level: float = 0.95) -> tuple[float, float] | None:
    """Return the interval of a score over independent examples; None for fewer than two, or without spread."""
    n = len(score.statistics)
    if n < 2 or not math.isfinite(score.value):
        return None
    if score.per_example is not None and set(score.per_example) <= {0.0, 1.0}:
        return share_interval(int(sum(score.per_example)), n, level)
    if score.per_example is not None:
        error = float(np.std(score.per_example, ddof=1)) / math.sqrt(n)
    else:
        error = standard_error(score.statistics, score.compute_score)
    normal = _normal_interval(score.value, error, level)
    return None if normal is None else (max(bounds[0], normal[0]), min(bounds[1], normal[1]))


def _normal_interval(value: float, error: float, level: float) -> tuple[float, float] | None:
    """Return the ends of a normal interval around a value; None where its standard error shows no spread."""
    if not NO_SPREAD < error < math.inf:
        return None
    half = NormalDist().inv_cdf((1 + level) / 2) * error
    return value - half, value + half


def score_intervals(scores: Mapping[str, Score], bounds: Mapping[str, tuple[float, float]]) -> dict[str, list[float]]:
    """Return the intervals of those scores that have one, by metric."""
    ends = {name: interval(score, bounds[name]) for name, score in scores.items()}
    return {name: list(pair) for name, pair in ends.items() if pair is not None}


def difference_interval(one: Score, two: Score, level: float = 0.95) -> tuple[float, float] | None:
    """Return the interval of `one.value - two.value` for two sets of predictions of the same examples.

    The examples are left out of both scores together, so that what is hard for both cancels.
    """
    columns = one.statistics.shape[1]
    rows = np.hstack([one.statistics, two.statistics])
    if len(rows) < 2:
        return None
    error = standard_error(
        rows, lambda both: one.compute_score(both[:, :columns]) - two.compute_score(both[:, columns:])
    )
    return _normal_interval(one.value - two.value, error, level)
