"""The statistics of claims as functions of arrays: paired differences over seeds and examples, Holm, slopes, ranks.

Student's t and ranks are scipy's. The estimate for crossed seeds and examples is our own, because no library here has
it, and so is Holm's procedure: statsmodels runs a full garbage collection each time, half of the time of a report.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import optimize, special, stats


@dataclass(frozen=True)
class Estimate:
    """An estimated mean, with the interval mean ± √(Σ t(df)² variance) ± slack over the parts of its variance.

    The sum of squares covers with at least the level that was asked, whatever the true sizes of the parts (Banerjee
    1960). Satterthwaite's degrees of freedom for the sum do not: with 2 seeds and many examples they reject a true mean
    in 11 of 100 cases instead of 5.

    Attributes:
        mean: The mean.
        parts: Independent estimates of parts of the mean's variance, each with its degrees of freedom: of the
            seeds, then of the examples if there are any. Without any part, nothing is known about the spread, and
            the interval is the whole line.
        slack: How far the mean may be off for sure besides, whatever the number of seeds (a threshold is known only up
            to a step of its grid).
    """

    mean: float
    parts: tuple[tuple[float, float], ...]
    slack: float = 0.0

    def interval(self, alpha: float = 0.05) -> tuple[float, float]:
        """Return the interval of level 1 − alpha."""
        half = self._half(alpha) + self.slack
        return self.mean - half, self.mean + half

    def p_value(self, *boundaries: float) -> float:
        """Return the p-value against the nearest boundary: the level at which the interval just reaches it."""
        distance = min(abs(self.mean - b) for b in boundaries) - self.slack
        if not self.parts or distance <= 0:
            return 1.0
        if len(self.parts) == 1:
            ((variance, df),) = self.parts
            return float(2 * stats.t.sf(distance / np.sqrt(variance), df))
        tiny = 1e-12
        if self._half(tiny) <= distance:
            return tiny
        log_alpha = optimize.brentq(lambda log: self._half(np.exp(log)) - distance, np.log(tiny), 0.0, xtol=1e-9)
        return float(np.exp(log_alpha))

    def power(self, distance: float, alpha: float = 0.05) -> float:
        """Return the chance to decide a boundary that the true mean is `distance` beyond.

        That is the chance that the interval of level 1 − alpha lies beyond it, if the true variance of the mean is Σ
        variance and each part is estimated with its degrees of freedom. With one part it is the power of Student's
        test, a tail of the noncentral t; with several it is averaged over quantiles of the parts' χ².
        """
        if not self.parts:
            return 0.0
        error = np.sqrt(sum(variance for variance, _ in self.parts))
        if len(self.parts) == 1:
            ((_, df),) = self.parts
            return float(stats.nct.sf(special.stdtrit(df, 1 - alpha / 2), df, (distance - self.slack) / error))
        squares = np.zeros(())
        for (variance, df), n in zip(self.parts, (64, 16), strict=True):
            ratios = 2 * special.gammaincinv(df / 2, (np.arange(n) + 0.5) / n) / df  # quantiles of χ²/df
            squares = np.add.outer(squares, special.stdtrit(df, alpha / 2) ** 2 * variance * ratios)
        return float(special.ndtr((distance - self.slack - np.sqrt(squares)) / error).mean())

    def smallest_decidable(self, alpha: float = 0.05, power: float = 0.8) -> float:
        """Return the distance from a boundary that is decided with a given power (Bloom 1995: "minimum detectable").

        It is infinite if nothing is known about the spread.
        """
        if not self.parts:
            return np.inf
        far = self.slack + self._half(alpha)
        while self.power(far, alpha) < power:
            far *= 2
        return float(optimize.brentq(lambda distance: self.power(distance, alpha) - power, 0.0, far, rtol=1e-6))

    def enlarged(self, seeds: tuple[int, int]) -> Estimate:
        """Return what a study of more seeds would have: how many there are, and how many there would be.

        The first part of the variance is of the seeds, and falls with their number (see `paired_estimate`).
        """
        now, then = seeds
        parts = [(variance * now / then, df * (then - 1) / (now - 1)) for variance, df in self.parts[:1]]
        return replace(self, parts=(*parts, *self.parts[1:]))

    def _half(self, alpha: float) -> float:
        if not self.parts:
            return np.inf
        return float(np.sqrt(sum(stats.t.isf(alpha / 2, df) ** 2 * variance for variance, df in self.parts)))


def paired_estimate(strata: Sequence[np.ndarray], tests: Sequence[Hashable] | None = None) -> Estimate:
    """Estimate the mean over strata of the mean paired difference, with the variances of seeds and of examples.

    d[t, s, i] = μ[t] + S[t, s] + E[t, i] + R[t, s, i]: a seed's training moves all examples, an example moves all
    seeds, for the test split is one and the same. Seeds and examples are crossed: the examples of three seeds are not
    three times as many examples. With n_s seeds, n_i examples,

        A = variance of the seeds' means / n_s                          estimates  σ_S²/n_s + σ_R²/(n_s n_i)
        B = variance of the examples' means / n_i − σ̂_R²/(n_s n_i)      estimates  σ_E²/n_i

    and Var(mean of T strata) = (Σ A + Σ B) / T², each sum with Satterthwaite's (1946) degrees of freedom,
    (Σ v)² / Σ v²/df. Strata on one test split have one B together, of the examples' sums over them.

    Strata are fixed: the mean is about these tasks and models, not about tasks in general. Assumed: seeds independent,
    S about normal (with 3 seeds that cannot be seen, and no test without it gives p < 0.25: a sign flip of 3 pairs has
    8 outcomes); examples independent and many enough for a normal mean. The model has random readers (seeds)
    and cases (examples): Gallas 2006, Hillis 2007. Seeds without any spread (all gave the same) leave no parts.
    """
    _check_shapes(strata)
    seeds: list[tuple[float, int]] = []
    examples: list[tuple[float, int]] = []
    residuals: list[tuple[float, int]] = []
    for group in _group_by_test(strata, tests):
        sums: list[np.ndarray] = []
        residual = 0.0
        for d in group:
            n = len(d)
            rows = d if d.ndim == 1 else d.mean(axis=1)
            share = 0.0
            if d.ndim == 2:
                m = d.shape[1]
                sums.append(d.mean(axis=0))
                rest = d - rows[:, None] - d.mean(axis=0) + d.mean()
                share = float((rest**2).sum()) / ((n - 1) * (m - 1)) / (n * m)
                residual += share
            seeds.append((float(rows.var(ddof=1)) / n, n - 1))
            residuals.append((share, n - 1))
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


def _group_by_test(strata: Sequence[np.ndarray], tests: Sequence[Hashable] | None) -> list[list[np.ndarray]]:
    names = range(len(strata)) if tests is None else tests
    groups: dict[Hashable, list[np.ndarray]] = {}
    for name, d in zip(names, strata, strict=True):
        groups.setdefault(name, []).append(d)
    if any(len({d.shape[1] for d in group if d.ndim == 2}) > 1 for group in groups.values()):
        raise ValueError("strata on one test split differ in their number of examples")
    return list(groups.values())


def _check_shapes(strata: Sequence[np.ndarray]) -> None:
    if not strata or any(d.ndim not in (1, 2) or min(d.shape) < 2 for d in strata):
        raise ValueError(f"paired differences need 2 seeds and 2 examples: {[d.shape for d in strata]}")


def holm(p: Sequence[float]) -> np.ndarray:
    """Adjust p values by Holm's step-down procedure (1979): p̃(k) = max over j ≤ k of min(1, (m − j + 1) p(j))."""
    values = np.asarray(p, dtype=float)
    order = np.argsort(values, kind="stable")
    adjusted = np.empty(len(values))
    adjusted[order] = np.maximum.accumulate(values[order] * np.arange(len(values), 0, -1)).clip(max=1.0)
    return adjusted


def holm_levels(p: Sequence[float], alpha: float = 0.05) -> np.ndarray:
    """Return the level at which Holm's procedure tested each hypothesis: alpha / (m − k + 1), k its rank.

    An interval of that level excludes the boundary exactly where `holm` gives at most alpha. For hypotheses that are
    kept it is the level of the step at which the procedure stopped.
    """
    p_values, adjusted = np.asarray(p, dtype=float), holm(p)
    ranks = np.empty(len(p_values), dtype=int)
    ranks[np.argsort(p_values, kind="stable")] = np.arange(len(p_values))
    rejected = int((adjusted <= alpha).sum())
    return np.asarray(alpha / (len(p_values) - np.minimum(ranks, rejected).clip(max=max(0, len(p_values) - 1))))


def slope_weights(x: Sequence[float]) -> np.ndarray:
    """Return the weights w = (x − x̄) / Σ (x − x̄)²: the least-squares slope of y on x is w · y.

    The test of a trend is `paired_estimate` on the slopes of the seeds: each seed's slope is one difference.
    """
    centred = np.asarray(x, dtype=float) - np.mean(x)
    square = float((centred**2).sum())
    if len(centred) < 2 or not square > 0:
        raise ValueError(f"a slope needs two different places, not {list(x)}")
    return centred / square


def average_ranks(values: np.ndarray, lower: Sequence[bool]) -> np.ndarray:
    """Return each method's rank among the methods, averaged over metrics: 1 is best, ties share their mean rank.

    A row of `values` is a metric, for which `lower` says whether lower values are better; a column is a method.
    """
    signs = np.where(np.asarray(lower, dtype=bool), 1.0, -1.0)[:, None]
    return np.asarray(stats.rankdata(np.asarray(values, dtype=float) * signs, axis=1).mean(axis=0))
