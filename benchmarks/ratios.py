"""Ratios of times that were measured side by side, with their intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Ratio:
    """The median over rounds of a ratio of times, with its 95 % interval."""

    figure: float
    low: float
    high: float
    rounds: int


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Return the median over rounds of ours / theirs, with its interval (`median_interval`).

    Args:
        ours: Seconds in each round.
        theirs: Seconds in the same rounds.
    """
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return Ratio(statistics.median(ratios), *median_interval(ratios), len(ratios))


def median_interval(values: Iterable[float], level: float = 0.95) -> tuple[float, float]:
    """Return the sign test's interval for a median: from the k-th smallest value to the k-th greatest.

    k is the greatest with 2 P(Binomial(n, 1/2) < k) <= 1 - level. The interval assumes nothing about the noise but that
    rounds are independent. Fewer than 6 values cannot give 95 %: their interval is their whole range.
    """
    from scipy import stats  # here, because AdapterHub's side of the benchmarks runs without it

    ordered = sorted(values)
    interval = stats.quantile_test(ordered, p=0.5).confidence_interval(level)
    low, high = float(interval.low), float(interval.high)
    return ordered[0] if math.isnan(low) else low, ordered[-1] if math.isnan(high) else high
