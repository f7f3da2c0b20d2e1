"""Claims as values, and deciding them on a study's outcomes: each holds, does not hold or is undecided.

Each form of a claim is a comparison of cells and the region of effects in which the claim is true.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from ...errors import DeltuneError
from ..engine.jobs import Cell, Outcome
from .comparisons import (
    COUNT,
    DATA_AXES,
    EVERY,
    SCORE,
    Cells,
    CellSelector,
    Check,
    Comparison,
    Exact,
    Key,
    Measurement,
    MetricChoice,
    MissingCells,
    Number,
    Term,
    combine_numbers,
    describe_cell,
    mean_terms,
    one_seed_reason,
    paired_differences,
    seeds_of,
    trend_weights,
    weighted_effects,
    weighted_sum,
    with_derived_axes,
)
from .statistics import Estimate, holm, holm_levels, paired_estimate


@dataclass(frozen=True)
class Beats:
    """mean(better) − mean(worse) > margin, in the better direction, paired over all other axes and seeds.

    Attributes:
        better: The cells that are claimed to be better.
        worse: The cells that they are compared with; both name the same axes.
        margin: By how much, in units of the measurement.
        measurement: What is compared.
    """

    better: CellSelector
    worse: CellSelector
    margin: float = 0.0
    measurement: Measurement = SCORE

    def __post_init__(self) -> None:
        _same_axes(self.better, self.worse)

    def checks(self, cells: Cells) -> list[Check]:
        """Return the comparisons to test. Raises `MissingCells` if cells are missing."""
        effects = paired_differences(cells, self.better, self.worse, self.measurement)
        text = f"{describe_cell(self.better)} − {describe_cell(self.worse)}"
        return [Comparison(text, effects, self.margin, math.inf, self.measurement.unit)]


@dataclass(frozen=True)
class Within:
    """mean(cells) − mean(reference) > −points: at most so much worse.

    Attributes:
        what: The cells.
        reference: The cells that they are compared with; both name the same axes.
        points: The margin, in units of the measurement.
        both: Whether they may not be better either: |difference| < points.
        measurement: What is compared.
    """

    what: CellSelector
    reference: CellSelector
    points: float
    both: bool = False
    measurement: Measurement = SCORE

    def __post_init__(self) -> None:
        _same_axes(self.what, self.reference)

    def checks(self, cells: Cells) -> list[Check]:
        """Return the comparisons to test. Raises `MissingCells` if cells are missing."""
        effects = paired_differences(cells, self.what, self.reference, self.measurement)
        text = f"{describe_cell(self.what)} − {describe_cell(self.reference)}"
        return [Comparison(text, effects, -self.points, self.points if self.both else math.inf, self.measurement.unit)]


@dataclass(frozen=True)
class Rises:
    """The least-squares slope along an axis, per decade (factor of ten) of its labels, > margin.

    Attributes:
        axis: The axis: numbers, or models by their size.
        of: The cells whose mean is taken at each label.
        minus: Cells whose slope is subtracted, if any.
        margin: In units of the measurement per decade.
        measurement: What is measured.
    """

    axis: str
    of: CellSelector = field(default_factory=dict)
    minus: CellSelector | None = None
    margin: float = 0.0
    measurement: Measurement = SCORE

    def checks(self, cells: Cells) -> list[Check]:
        """Return the comparisons to test. Raises `MissingCells` if cells are missing."""
        return [self._comparison(cells, self.margin, math.inf)]

    def _comparison(self, cells: Cells, low: float, high: float) -> Comparison:
        selectors = [self.of] if self.minus is None else [self.of, self.minus]

        def terms(setting: Key, members: Sequence[Outcome]) -> list[Term]:
            weighted: list[Term] = []
            for selector, sign in zip(selectors, (1.0, -1.0), strict=False):
                for label, weight in trend_weights(cells, self.axis, selector, members, setting):
                    weighted += mean_terms(
                        cells.select({**selector, self.axis: label}, members, setting), sign * weight
                    )
            return weighted

        text = f"slope along {self.axis}" + "".join(
            f"{' −' if i else ''} of {describe_cell(s)}" for i, s in enumerate(selectors) if s
        )
        effects = weighted_effects(
            cells, [{**selector, self.axis: EVERY} for selector in selectors], terms, self.measurement
        )
        return Comparison(text, effects, low, high, f"{self.measurement.unit} a decade of {self.axis}")


@dataclass(frozen=True)
class Falls(Rises):
    """The slope of `Rises` < margin."""

    def checks(self, cells: Cells) -> list[Check]:
        """Return the comparisons to test. Raises `MissingCells` if cells are missing."""
        return [self._comparison(cells, -math.inf, self.margin)]


@dataclass(frozen=True)
class GapShrinks:
    """The gap between the best and the worst label of an axis shrinks along another: its slope per decade < 0.

    For each seed the other seeds decide which labels are the best and the worst, and the gap is measured on this seed.
    The largest less the smallest of noisy means would lie above the true gap, the more the noisier, and would shrink
    with the noise alone. This one lies at or below the true gap, and at 0 where there is none.

    Attributes:
        over: The axis of the gap, such as "method".
        along: The axis along which it shrinks, such as "model".
        of: The cells that are considered.
        measurement: What is measured.
    """

    over: str
    along: str
    of: CellSelector = field(default_factory=dict)
    measurement: Measurement = SCORE

    def checks(self, cells: Cells) -> list[Check]:
        """Return the comparisons to test. Raises `MissingCells` if cells are missing."""
        selector = {**self.of, self.over: self.of.get(self.over, EVERY), self.along: EVERY}
        effects, reasons = {}, []
        for setting, members in cells.strata([selector]):
            try:
                effects[setting] = self._slopes(cells, selector, members, setting)
            except MissingCells as lacking:
                reasons += lacking.reasons
        if reasons:
            raise MissingCells(reasons)
        text = f"slope along {self.along} of the gap over {self.over}"
        return [Comparison(text, effects, -math.inf, 0.0, f"{self.measurement.unit} a decade of {self.along}")]

    def _slopes(
        self, cells: Cells, selector: CellSelector, members: Sequence[Outcome], setting: Key
    ) -> dict[Hashable, Number]:
        seeds = seeds_of(members)
        if len(seeds) < 2:
            raise MissingCells([one_seed_reason(setting)])
        gaps: dict[Hashable, list[tuple[float, Number]]] = {seed: [] for seed in seeds}
        for label, weight in trend_weights(cells, self.along, selector, members, setting):
            groups: dict[Any, list[Cell]] = {}
            for cell in cells.select({**selector, self.along: label}, members, setting):
                groups.setdefault(cell[self.over], []).append(cell)
            if len(groups) < 2:
                raise MissingCells([f"one {self.over} at {self.along}={label}: no gap"])
            numbers = {
                seed: [weighted_sum(cells, mean_terms(group), self.measurement, seed) for group in groups.values()]
                for seed in seeds
            }
            values = np.array([[number.value for number in numbers[seed]] for seed in seeds])
            for i, seed in enumerate(seeds):
                others = np.delete(values, i, axis=0).mean(axis=0)
                gap = combine_numbers([(1.0, numbers[seed][others.argmax()]), (-1.0, numbers[seed][others.argmin()])])
                gaps[seed].append((weight, gap))
        return {seed: combine_numbers(terms) for seed, terms in gaps.items()}


@dataclass(frozen=True)
class FewerParameters:
    """trained(fewer) ≤ ratio · trained(more) in every setting. Counts are exact, so that one seed is enough.

    Attributes:
        fewer: The cells that are claimed to train fewer parameters.
        more: The cells that they are compared with; both name the same axes.
        ratio: The largest ratio.
    """

    fewer: CellSelector
    more: CellSelector
    ratio: float = 1.0

    def __post_init__(self) -> None:
        _same_axes(self.fewer, self.more)

    def checks(self, cells: Cells) -> list[Check]:
        """Return the comparisons to test. Raises `MissingCells` if cells are missing."""
        largest = 0.0
        for setting, members in cells.strata([self.fewer, self.more]):
            counts = []
            for selector in (self.fewer, self.more):
                selected, seed = cells.select(selector, members, setting), seeds_of(members)[0]
                counts.append(sum(cells.measure(COUNT, cell, seed).value for cell in selected) / len(selected))
            largest = max(largest, counts[0] / counts[1] if counts[1] else math.inf)
        text = f"trained scalars of {describe_cell(self.fewer)} / {describe_cell(self.more)}, the largest"
        return [Exact(text, largest, self.ratio, "times")]


@dataclass(frozen=True)
class Best:
    """Cells beat those with every other label of an axis.

    Attributes:
        what: The cells.
        over: The axis.
        exclude: Labels that they are not compared with.
        measurement: What is compared.
    """

    what: CellSelector
    over: str
    exclude: tuple[Any, ...] = ()
    measurement: Measurement = SCORE

    def checks(self, cells: Cells) -> list[Check]:
        """Return the comparisons to test. Raises `MissingCells` if cells are missing."""
        rest = {axis: label for axis, label in self.what.items() if axis != self.over}
        rivals = [r for r in cells.labels(self.over, rest) if r not in (self.what[self.over], *self.exclude)]
        if not rivals:
            raise MissingCells([f"nothing to compare {describe_cell(self.what)} with"])
        return _all_checks(
            cells, [Beats(self.what, {**self.what, self.over: rival}, measurement=self.measurement) for rival in rivals]
        )


@dataclass(frozen=True)
class AllWithin:
    """Any two labels of an axis differ by less than some points.

    Attributes:
        over: The axis.
        points: The margin, in units of the measurement.
        of: The cells that are considered.
        measurement: What is compared.
    """

    over: str
    points: float
    of: CellSelector = field(default_factory=dict)
    measurement: Measurement = SCORE

    def checks(self, cells: Cells) -> list[Check]:
        """Return the comparisons to test. Raises `MissingCells` if cells are missing."""
        selector = {**self.of, self.over: self.of.get(self.over, EVERY)}
        pairs = list(itertools.combinations(cells.labels(self.over, selector), 2))
        if not pairs:
            raise MissingCells([f"no two labels of {self.over} to compare"])
        sides = [({**self.of, self.over: a}, {**self.of, self.over: b}) for a, b in pairs]
        return _all_checks(
            cells, [Within(a, b, self.points, both=True, measurement=self.measurement) for a, b in sides]
        )


@dataclass(frozen=True)
class AllOf:
    """Several forms at once: the claim holds if all of them are true."""

    parts: tuple[Form, ...]

    def checks(self, cells: Cells) -> list[Check]:
        """Return the comparisons to test. Raises `MissingCells` if cells are missing."""
        return _all_checks(cells, self.parts)


Form = Beats | Within | Rises | GapShrinks | FewerParameters | Best | AllWithin | AllOf


@dataclass(frozen=True)
class Claim:
    """A sentence of a paper and its form.

    Attributes:
        text: The sentence.
        source: Where the paper makes it.
        form: The comparisons that decide it.
        exclude: Axis -> labels that it is not about.
    """

    text: str
    source: str
    form: Form
    exclude: CellSelector = field(default_factory=dict)


def _all_checks(cells: Cells, forms: Sequence[Form]) -> list[Check]:
    checks: list[Check] = []
    reasons: list[str] = []
    for form in forms:
        try:
            checks += form.checks(cells)
        except MissingCells as lacking:
            reasons += lacking.reasons
    if reasons:
        raise MissingCells(reasons)
    return checks


def _same_axes(one: CellSelector, other: CellSelector) -> None:
    if one.keys() != other.keys() or not one:
        raise DeltuneError(
            f"both sides of a comparison must name the same axes: {describe_cell(one)!r}, {describe_cell(other)!r}."
        )


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
    return estimate.p_value(*(border for border in (check.low, check.high) if math.isfinite(border)))


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
