"""Claims decided on a study's outcomes: holds, does not hold, undecided, each with its effect and interval."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from ..engine.outcomes import Outcome
from .cells import DATA, Cells, Lacking
from .claims import Claim
from .effects import Check, Comparison
from .readings import Asked, opened
from .stats import Estimate, holm, holm_levels, paired

Verdict = Literal["holds", "does not hold", "undecided"]


@dataclass(frozen=True)
class Part:
    """One comparison of a finding: what was measured, its interval, and the region in which the claim is true of it.

    interval: None where the number is exact.
    """

    text: str
    effect: float
    interval: tuple[float, float] | None
    unit: str
    region: tuple[float, float]


@dataclass(frozen=True)
class Finding:
    """What a study says of a claim.

    effect, interval, unit: of the comparison that decides, in the claim's words positive for the claim where it says
    "beats". The interval has the level at which Holm's procedure tested the claim, so it decides as `p_adjusted` does.
    p: two-sided, against the nearest border of the region in which the claim is true; of several comparisons that must
    all be true, the largest; if one of them seems false, the smallest times their number. None: nothing was tested.
    units: pairs of seeds, over all settings. note: what the numbers rest on, or why nothing was decided.
    """

    claim: Claim
    verdict: Verdict
    effect: float | None = None
    interval: tuple[float, float] | None = None
    unit: str = ""
    p: float | None = None
    p_adjusted: float | None = None
    units: int = 0
    note: str = ""
    parts: tuple[Part, ...] = ()


@dataclass(frozen=True)
class _Tested:
    """A claim's comparisons with their estimates; p, and the one that decides."""

    checks: tuple[Check, ...]
    estimates: tuple[Estimate | None, ...]
    p: float | None
    decides: int
    seems: bool
    note: str
    units: int


def findings(
    claims: Sequence[Claim],
    outcomes: Sequence[Outcome],
    metric: str | Mapping[str, str],
    lower: bool = False,
    alpha: float = 0.05,
) -> list[Finding]:
    """A finding for each claim, in order: Holm's procedure over all that could be tested keeps errors of the study.

    metric: the score that counts, in general or for each task. lower: lower is better, where METRICS does not say so.
    The chance that any "holds" or "does not hold" of the study is wrong is at most alpha (Holm 1979; for the directions
    Shaffer 1980: only one of them is wrong, at half of a two-sided test's level). A comparison with one seed, or with a
    cell that is missing or failed, is undecided and its note says which. Raises DeltuneError for two outcomes of one
    cell.
    """
    grid = Cells(opened(outcomes), Asked(metric, lower))
    results = [_tested(claim, grid) for claim in claims]
    tested = [i for i, result in enumerate(results) if isinstance(result, _Tested) and result.p is not None]
    given = [_p(results[i]) for i in tested]
    adjusted = dict(zip(tested, holm(given).tolist(), strict=True))
    levels = dict(zip(tested, holm_levels(given, alpha).tolist(), strict=True))
    return [
        Finding(claim, "undecided", note=result)
        if isinstance(result, str)
        else _finding(claim, result, adjusted.get(i), levels.get(i, alpha), alpha)
        for i, (claim, result) in enumerate(zip(claims, results, strict=True))
    ]


def _p(result: _Tested | str) -> float:
    assert isinstance(result, _Tested) and result.p is not None
    return result.p


def _tested(claim: Claim, grid: Cells) -> _Tested | str:
    """A claim's comparisons made, or why they cannot be."""
    try:
        checks = tuple(claim.form.checks(grid.without(claim.off)))
    except Lacking as lacking:
        return str(lacking)
    made = [_estimate(check) if isinstance(check, Comparison) else None for check in checks]
    p = {i: _border(check, e) for i, (check, e) in enumerate(zip(checks, made, strict=True)) if e is not None}
    true = [_inside(check, e) for check, e in zip(checks, made, strict=True)]
    false = [i for i, t in enumerate(true) if not t]
    exact = [i for i in false if i not in p]
    if exact or not p:  # a count that is too large refutes the claim without any test
        return _Tested(checks, tuple(made), None, exact[0] if exact else 0, not exact, "counts, without a test", 0)
    if false:
        decides = min(false, key=lambda i: p[i])
        value = min(1.0, len(p) * p[decides])
    else:
        decides = max(p, key=lambda i: p[i])
        value = p[decides]
    comparisons = [check for check in checks if isinstance(check, Comparison)]
    units = [sum(len(seeds) for seeds in check.units.values()) for check in comparisons]
    note = _basis(comparisons)
    if value == 1.0 and (spread := _without_spread(made)):
        note = f"every seed gave the same ({spread}): no spread to judge by"
    return _Tested(checks, tuple(made), value, decides, not false, note, max(units))


def _estimate(check: Comparison) -> Estimate:
    strata: list[np.ndarray] = []
    tests: list[Hashable] = []
    slack = 0.0
    for setting, seeds in check.units.items():
        numbers = list(seeds.values())
        rows = [number.examples for number in numbers if number.examples is not None]
        whole = len(rows) == len(numbers) and len({len(row) for row in rows}) == 1
        strata.append(np.stack(rows) if whole else np.array([number.value for number in numbers]))
        tests.append((tuple((a, v) for a, v in setting if a in DATA), strata[-1].shape[1:]))
        slack += sum(number.slack for number in numbers) / len(numbers) / len(check.units)
    return replace(paired(strata, tests), slack=slack)


def _border(check: Check, found: Estimate) -> float:
    assert isinstance(check, Comparison)
    return found.p(*(b for b in (check.low, check.high) if math.isfinite(b)))


def _inside(check: Check, found: Estimate | None) -> bool:
    if isinstance(check, Comparison) and found is not None:
        return check.low < found.mean < check.high
    return not isinstance(check, Comparison) and check.true


def _basis(comparisons: Sequence[Comparison]) -> str:
    """What an interval rests on: 8 settings × 3 seeds, with examples."""
    settings = {len(c.units) for c in comparisons}
    seeds = {len(s) for c in comparisons for s in c.units.values()}
    crossed = {number.examples is not None for c in comparisons for s in c.units.values() for number in s.values()}
    kind = "seeds, and examples where there are any"
    if len(crossed) == 1:
        kind = "seeds and examples" if crossed == {True} else "seeds alone"
    several = f"{len(comparisons)} comparisons, " if len(comparisons) > 1 else ""
    return f"{several}{_span(settings, 'setting')} × {_span(seeds, 'seed')}, spread of {kind}"


def _span(sizes: set[int], word: str) -> str:
    low, high = min(sizes), max(sizes)
    return f"{low if low == high else f'{low} to {high}'} {word}{'' if high == 1 else 's'}"


def _without_spread(made: Sequence[Estimate | None]) -> str:
    means = [e.mean for e in made if e is not None and not math.isfinite(e.interval()[0])]
    return ", ".join(f"{mean:.4g}" for mean in means[:3])


def _finding(claim: Claim, result: _Tested, adjusted: float | None, level: float, alpha: float) -> Finding:
    """The verdict at the level at which Holm tested the claim; where it seems false each comparison has its share."""
    decided = adjusted is None or adjusted <= alpha
    verdict: Verdict = "undecided" if not decided else "holds" if result.seems else "does not hold"
    compared = sum(e is not None for e in result.estimates)
    share = level if result.seems else level / max(1, compared)
    parts = []
    for check, found in zip(result.checks, result.estimates, strict=True):
        if isinstance(check, Comparison) and found is not None:
            parts.append(Part(check.text, found.mean, found.interval(share), check.unit, (check.low, check.high)))
        elif not isinstance(check, Comparison):
            parts.append(Part(check.text, check.value, None, check.unit, (-math.inf, check.most)))
    first = parts[result.decides]
    note = f"{result.note}; {first.text}" if len(parts) > 1 else result.note
    return Finding(
        claim, verdict, first.effect, first.interval, first.unit, result.p, adjusted, result.units, note,
        tuple(parts) if len(parts) > 1 else (),
    )  # fmt: skip
