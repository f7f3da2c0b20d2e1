"""Tests and intervals as pure functions of arrays: paired differences over seeds and examples, Holm, slopes, ranks."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import optimize, stats


@dataclass(frozen=True)
class Estimate:
    """mean ± √(Σ t(df)² variance) over the parts of its variance, with `slack` on both sides.

    parts: independent estimates of parts of the mean's variance, each with its degrees of freedom. The sum of squares
    covers with at least the level asked, whatever the parts' true sizes (Banerjee 1960); Satterthwaite's degrees of
    freedom for the sum do not: with 2 seeds and many examples they reject a true mean in 11 of 100 cases instead of 5.
    slack: by how much the mean may be off besides, for sure and whatever the number of seeds (a threshold known only up
    to the width of its bisection). Without any part nothing is known about the spread: the interval is the line.
    """

    mean: float
    parts: tuple[tuple[float, float], ...]
    slack: float = 0.0

    def interval(self, alpha: float = 0.05) -> tuple[float, float]:
        """The interval of level 1 − alpha."""
        half = self._half(alpha) + self.slack
        return self.mean - half, self.mean + half

    def p(self, *boundaries: float) -> float:
        """The level at which the interval meets the nearest boundary; with one part 2 · P(T > distance / error)."""
        distance = min(abs(self.mean - b) for b in boundaries) - self.slack
        if not self.parts or distance <= 0:
            return 1.0
        if len(self.parts) == 1:
            ((variance, df),) = self.parts
            return float(2 * stats.t.sf(distance / np.sqrt(variance), df))
        tiny = 1e-12
        if self._half(tiny) <= distance:
            return tiny
        found = optimize.brentq(lambda log: self._half(np.exp(log)) - distance, np.log(tiny), 0.0, xtol=1e-9)
        return float(np.exp(found))

    def _half(self, alpha: float) -> float:
        if not self.parts:
            return np.inf
        return float(np.sqrt(sum(stats.t.isf(alpha / 2, df) ** 2 * variance for variance, df in self.parts)))


def paired(strata: Sequence[np.ndarray], tests: Sequence[Hashable] | None = None) -> Estimate:
    """Mean over strata of the mean paired difference, with the variance of seeds and that of examples.

    strata: for each fixed setting (a task, a model) the differences of its seeds, (seeds,), or of its seeds on each
    example of its test split, (seeds, examples), an example in the same column for every seed.
    tests: for each stratum the name of its test split, where several strata (two models on one task) share theirs.

    d[t, s, i] = μ[t] + S[t, s] + E[t, i] + R[t, s, i]: a seed's training moves all examples, an example moves all
    seeds, for the test split is one and the same. Seeds and examples are crossed: the examples of three seeds are not
    three times as many examples. With n_s seeds, n_i examples,

        A = variance of the seeds' means / n_s                          estimates  σ_S²/n_s + σ_R²/(n_s n_i)
        B = variance of the examples' means / n_i − σ̂_R²/(n_s n_i)      estimates  σ_E²/n_i

    and Var(mean of T strata) = (Σ A + Σ B) / T², each sum with Satterthwaite's (1946) degrees of freedom,
    (Σ v)² / Σ v²/df. Strata on one test split have one B together, of the examples' sums over them.

    Strata are fixed: the mean is about these tasks and models, not about tasks in general. Assumed: seeds independent,
    S about normal (with 3 seeds that cannot be seen, and no test without it gives p < 0.25: a sign flip of 3 pairs has
    8 outcomes); examples independent and many enough for a normal mean. The model is that of random readers (seeds)
    and cases (examples): Gallas 2006, Hillis 2007. Seeds without any spread (all gave the same) leave no parts.
    Raises ValueError for no strata, a stratum with one seed, or with one example.
    """
    _check(strata)
    seeds: list[tuple[float, int]] = []
    examples: list[tuple[float, int]] = []
    residuals: list[tuple[float, int]] = []
    for together in _by_test(strata, tests):
        sums: list[np.ndarray] = []
        residual = 0.0
        for d in together:
            n = len(d)
            rows = d if d.ndim == 1 else d.mean(axis=1)
            own = 0.0
            if d.ndim == 2:
                m = d.shape[1]
                sums.append(d.mean(axis=0))
                rest = d - rows[:, None] - d.mean(axis=0) + d.mean()
                own = float((rest**2).sum()) / ((n - 1) * (m - 1)) / (n * m)
                residual += own
            seeds.append((float(rows.var(ddof=1)) / n, n - 1))
            residuals.append((own, n - 1))
        if sums:
            columns = np.sum(sums, axis=0)
            m = len(columns)
            examples.append((max(0.0, float(columns.var(ddof=1)) / m - residual), m - 1))
    size = max(float(np.abs(d).max()) for d in strata)
    tiny = (1e-9 * size) ** 2  # what rounding leaves of equal differences (0.1 + 0.2 − 0.3) is no spread
    if sum(v for v, _ in seeds) <= tiny:  # seeds right equally often, but not on the same examples: A has R in it
        seeds = residuals
    parts = []
    for shares in (seeds, examples):
        total = sum(v for v, _ in shares)
        if total > tiny:
            parts.append((total / len(strata) ** 2, total**2 / sum(v**2 / df for v, df in shares)))
        elif shares is seeds:
            break
    return Estimate(float(np.mean([np.mean(d) for d in strata])), tuple(parts))


def _by_test(strata: Sequence[np.ndarray], tests: Sequence[Hashable] | None) -> list[list[np.ndarray]]:
    names = range(len(strata)) if tests is None else tests
    found: dict[Hashable, list[np.ndarray]] = {}
    for name, d in zip(names, strata, strict=True):
        found.setdefault(name, []).append(d)
    if any(len({d.shape[1] for d in together if d.ndim == 2}) > 1 for together in found.values()):
        raise ValueError("strata on one test split differ in their number of examples")
    return list(found.values())


def _check(strata: Sequence[np.ndarray]) -> None:
    if not strata or any(d.ndim not in (1, 2) or min(d.shape) < 2 for d in strata):
        raise ValueError(f"paired differences need 2 seeds and 2 examples: {[d.shape for d in strata]}")


def holm(p: Sequence[float]) -> np.ndarray:
    """p̃(k) = max over j ≤ k of min(1, (m − j + 1) p(j)), in the order given: Holm's step-down (1979)."""
    given = np.asarray(p, dtype=float)
    order = np.argsort(given, kind="stable")
    steps = np.minimum(1.0, given[order] * np.arange(len(given), 0, -1))
    adjusted = np.empty_like(given)
    adjusted[order] = np.maximum.accumulate(steps)
    return adjusted


def holm_levels(p: Sequence[float], alpha: float = 0.05) -> np.ndarray:
    """alpha / (m − k + 1): the level at which each hypothesis was tested, k its rank, or that of the first one kept.

    An interval of that level leaves out the boundary exactly where `holm` gives less than alpha; for the hypotheses
    that are kept the level is that of the step at which Holm's procedure stopped.
    """
    given, adjusted = np.asarray(p, dtype=float), holm(p)
    ranks = np.empty(len(given), dtype=int)
    ranks[np.argsort(given, kind="stable")] = np.arange(len(given))
    rejected = int((adjusted <= alpha).sum())
    return np.asarray(alpha / (len(given) - np.minimum(ranks, rejected).clip(max=max(0, len(given) - 1))))


def wilson(successes: int, n: int, alpha: float = 0.05) -> tuple[float, float]:
    """(p̂ + z²/2n ± z √(p̂(1 − p̂)/n + z²/4n²)) / (1 + z²/n): the score interval of a proportion (Wilson 1927)."""
    z, share = float(stats.norm.isf(alpha / 2)), successes / n
    centre, half = share + z**2 / (2 * n), z * np.sqrt(share * (1 - share) / n + z**2 / (4 * n**2))
    return max(0.0, float((centre - half) / (1 + z**2 / n))), min(1.0, float((centre + half) / (1 + z**2 / n)))


def slope_weights(x: Sequence[float]) -> np.ndarray:
    """w = (x − x̄) / Σ (x − x̄)²: the least-squares slope of y on x is w · y.

    The test of a trend is `paired` on the slopes of the seeds: each seed's slope is one difference. Raises ValueError
    for fewer than two different x.
    """
    centred = np.asarray(x, dtype=float) - np.mean(x)
    square = float((centred**2).sum())
    if len(centred) < 2 or not square > 0:
        raise ValueError(f"a slope needs two different places, not {list(x)}")
    return centred / square


def average_ranks(values: np.ndarray, lower: Sequence[bool]) -> np.ndarray:
    """Mean over metrics (rows) of each method's (column's) rank among the methods: 1 is best, ties share their mean.

    lower: for each metric whether lower values are better.
    """
    signs = np.where(np.asarray(lower, dtype=bool), 1.0, -1.0)[:, None]
    return np.asarray(stats.rankdata(np.asarray(values, dtype=float) * signs, axis=1).mean(axis=0))
