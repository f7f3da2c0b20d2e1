"""Deciding claims on a study's outcomes: each holds, does not hold or is undecided, with its effect and interval."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from ..engine.outcomes import Outcome
from .claims import Claim
from .comparisons import DATA_AXES, Cells, Check, Comparison, MissingCells
from .measurements import MetricChoice, with_derived_axes
from .statistics import Estimate, holm, holm_levels, paired_estimate

Verdict = Literal["holds", "does not hold", "undecided"]


@dataclass(frozen=True)
class ComparisonResult:
    """One comparison of a finding.

    Attributes:
        text: What was compared.
        effect: The measured effect, in `unit`.
        interval: Its interval; None if the number is exact.
        unit: The unit of effect and interval.
        region: The open interval of effects in which the claim is true.
    """

    text: str
    effect: float
    interval: tuple[float, float] | None
    unit: str
    region: tuple[float, float]


@dataclass(frozen=True)
class Finding:
    """What a study says of a claim.

    Attributes:
        claim: The claim.
        verdict: Whether it holds, does not hold, or is undecided.
        effect: The effect of the comparison that decides, positive for the claim where the claim says "beats"; None if
            nothing could be compared.
        interval: Its interval, of the level at which Holm's procedure tested the claim, so that it decides as
            `p_adjusted` does; None if the effect is exact.
        unit: The unit of effect and interval.
        p: The two-sided p value against the nearest border of the region in which the claim is true. Of several
            comparisons that must all be true it is the largest p; if one of them appears false, the smallest times
            their number. None if nothing was tested.
        p_adjusted: p after Holm's procedure over all claims of the study.
        n_pairs: How many pairs of seeds were compared, over all settings.
        note: What the numbers rest on, or why nothing was decided.
        comparisons: The comparisons, if there are several.
    """

    claim: Claim
    verdict: Verdict
    effect: float | None = None
    interval: tuple[float, float] | None = None
    unit: str = ""
    p: float | None = None
    p_adjusted: float | None = None
    n_pairs: int = 0
    note: str = ""
    comparisons: tuple[ComparisonResult, ...] = ()

    @property
    def remark(self) -> str:
        """The note, with the unit of the effect."""
        return "; ".join(text for text in (self.note, self.unit and f"in {self.unit}") if text)


@dataclass(frozen=True)
class _Test:
    """A claim's comparisons with their estimates, their p value, and the index of the one that decides."""

    checks: tuple[Check, ...]
    estimates: tuple[Estimate | None, ...]
    p: float | None
    decides: int
    appears_true: bool
    note: str
    n_pairs: int


def decide_claims(
    claims: Sequence[Claim],
    outcomes: Sequence[Outcome],
    metric: str | Mapping[str, str],
    lower: bool = False,
    alpha: float = 0.05,
) -> list[Finding]:
    """Decide claims, with Holm's procedure over all that can be tested.

    The chance that any "holds" or "does not hold" of the study is wrong is at most alpha (Holm 1979; for the directions
    Shaffer 1980: only one of them is wrong, at half of a two-sided test's level). A comparison with one seed, or with a
    cell that is missing or failed, is undecided and its note says which.

    Args:
        claims: The claims.
        outcomes: The study's outcomes.
        metric: The score that counts, or task -> score.
        lower: Whether lower is better, for scores of which `METRICS` does not say so.
        alpha: The level of the study.

    Returns:
        A finding for each claim, in order.

    Raises:
        DeltuneError: Two outcomes belong to one cell.
    """
    cells = Cells(with_derived_axes(outcomes), MetricChoice(metric, lower))
    results = [_test(claim, cells) for claim in claims]
    p_values = {i: test.p for i, test in enumerate(results) if isinstance(test, _Test) and test.p is not None}
    adjusted = dict(zip(p_values, holm(list(p_values.values())).tolist(), strict=True))
    levels = dict(zip(p_values, holm_levels(list(p_values.values()), alpha).tolist(), strict=True))
    return [
        Finding(claim, "undecided", note=result)
        if isinstance(result, str)
        else _finding(claim, result, adjusted.get(i), levels.get(i, alpha), alpha)
        for i, (claim, result) in enumerate(zip(claims, results, strict=True))
    ]


def _test(claim: Claim, cells: Cells) -> _Test | str:
    """Make a claim's comparisons, or say why they cannot be made."""
    try:
        checks = tuple(claim.form.checks(cells.excluding(claim.exclude)))
    except MissingCells as lacking:
        return str(lacking)
    estimates = tuple(_estimate(check) if isinstance(check, Comparison) else None for check in checks)
    pairs = list(zip(checks, estimates, strict=True))
    p = {i: _p_value(check, estimate) for i, (check, estimate) in enumerate(pairs) if estimate is not None}
    false = [i for i, (check, estimate) in enumerate(pairs) if not _appears_true(check, estimate)]
    exact = [i for i in false if i not in p]
    if exact or not p:  # a count that is too large refutes the claim without any test
        return _Test(checks, estimates, None, exact[0] if exact else 0, not exact, "counts, without a test", 0)
    if false:
        decides = min(false, key=lambda i: p[i])
        value = min(1.0, len(p) * p[decides])
    else:
        decides = max(p, key=lambda i: p[i])
        value = p[decides]
    comparisons = [check for check in checks if isinstance(check, Comparison)]
    n_pairs = max(sum(len(seeds) for seeds in check.effects.values()) for check in comparisons)
    note = _basis(comparisons)
    if value == 1.0 and (means := _means_without_spread(estimates)):
        note = f"every seed gave the same ({means}): no spread to judge by"
    return _Test(checks, estimates, value, decides, not false, note, n_pairs)


def _estimate(check: Comparison) -> Estimate:
    strata: list[np.ndarray] = []
    tests: list[Hashable] = []
    slack = 0.0
    for setting, seeds in check.effects.items():
        numbers = list(seeds.values())
        examples = [number.examples for number in numbers if number.examples is not None]
        aligned = len(examples) == len(numbers) and len({len(row) for row in examples}) == 1
        strata.append(np.stack(examples) if aligned else np.array([number.value for number in numbers]))
        tests.append((tuple((axis, label) for axis, label in setting if axis in DATA_AXES), strata[-1].shape[1:]))
        slack += sum(number.slack for number in numbers) / len(numbers) / len(check.effects)
    return replace(paired_estimate(strata, tests), slack=slack)


def _p_value(check: Check, estimate: Estimate) -> float:
    assert isinstance(check, Comparison)
    return estimate.p(*(border for border in (check.low, check.high) if math.isfinite(border)))


def _appears_true(check: Check, estimate: Estimate | None) -> bool:
    if isinstance(check, Comparison) and estimate is not None:
        return check.low < estimate.mean < check.high
    return not isinstance(check, Comparison) and check.is_true


def _basis(comparisons: Sequence[Comparison]) -> str:
    """Say what an interval rests on: "8 settings × 3 seeds, spread of seeds and examples"."""
    settings = {len(c.effects) for c in comparisons}
    seeds = {len(s) for c in comparisons for s in c.effects.values()}
    by_example = {number.examples is not None for c in comparisons for s in c.effects.values() for number in s.values()}
    spread = "seeds, and examples where there are any"
    if len(by_example) == 1:
        spread = "seeds and examples" if by_example == {True} else "seeds alone"
    prefix = f"{len(comparisons)} comparisons, " if len(comparisons) > 1 else ""
    return f"{prefix}{_range(settings, 'setting')} × {_range(seeds, 'seed')}, spread of {spread}"


def _range(sizes: set[int], word: str) -> str:
    low, high = min(sizes), max(sizes)
    return f"{low if low == high else f'{low} to {high}'} {word}{'' if high == 1 else 's'}"


def _means_without_spread(estimates: Sequence[Estimate | None]) -> str:
    means = [e.mean for e in estimates if e is not None and not math.isfinite(e.interval()[0])]
    return ", ".join(f"{mean:.4g}" for mean in means[:3])


def _finding(claim: Claim, test: _Test, adjusted: float | None, level: float, alpha: float) -> Finding:
    """Decide at the level at which Holm tested the claim; where it appears false, each comparison has its share."""
    decided = adjusted is None or adjusted <= alpha
    verdict: Verdict = "undecided" if not decided else "holds" if test.appears_true else "does not hold"
    tested = sum(estimate is not None for estimate in test.estimates)
    share = level if test.appears_true else level / max(1, tested)
    results = []
    for check, estimate in zip(test.checks, test.estimates, strict=True):
        if isinstance(check, Comparison) and estimate is not None:
            region = (check.low, check.high)
            results.append(ComparisonResult(check.text, estimate.mean, estimate.interval(share), check.unit, region))
        elif not isinstance(check, Comparison):
            results.append(ComparisonResult(check.text, check.value, None, check.unit, (-math.inf, check.maximum)))
    deciding = results[test.decides]
    several = len(results) > 1
    return Finding(
        claim,
        verdict,
        deciding.effect,
        deciding.interval,
        deciding.unit,
        test.p,
        adjusted,
        test.n_pairs,
        f"{test.note}; {deciding.text}" if several else test.note,
        tuple(results) if several else (),
    )
