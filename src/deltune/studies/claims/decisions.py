"""Deciding claims on a study's outcomes, and on a paper's printed tables: each holds, does not hold or is undecided.

What its own set-up would decide is not testable: a sentence about models far larger than those that were run, tasks on
which full tuning does not beat the floor, runs that end before they are at their best.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from ...errors import check_booleans, number_range
from ..jobs.job import Outcome
from .claims import Claim
from .comparisons import (
    MIN_VALIDATIONS,
    NOT_RUN,
    Cells,
    Comparison,
    Exact,
    MetricChoice,
    MissingCells,
    can_be_at_chance,
    is_a_guess,
    is_at_chance,
    with_derived_axes,
)
from .floors import FloorCheck, check_floors
from .selectors import DATA_AXES, EDGE, Names
from .statistics import Estimate, holm, holm_levels, paired_estimate

Verdict = Literal["holds", "does not hold", "undecided", "not testable"]

CAPPED = 0.5
"""The share of capped runs from which their cap binds."""
GUESSES = 0.9
"""The share of runs no better than chance from which a comparison of them says nothing."""

POWER = 0.8
"""The chance to decide an effect with which the smallest decidable effect is stated."""


@dataclass(frozen=True)
class SettingResult:
    """A comparison in one setting.

    Its interval of 95 % is for itself alone: it describes and decides nothing.
    """

    setting: str
    effect: float
    interval: tuple[float, float]
    agrees: bool


@dataclass(frozen=True)
class ComparisonResult:
    """One comparison of a finding.

    `effect` and `interval` are in `unit`; an exact number has no interval. The claim is true in the open interval
    `region`, to which its upper end belongs if it is `closed`, as for a number of parameters. `subject` is what was
    measured; `rows_covered` says whether the interval covers the chance of test rows: in all settings, in some, or in
    none. `by_setting` is empty where there is one setting.
    """

    text: str
    effect: float
    interval: tuple[float, float] | None
    unit: str
    region: tuple[float, float]
    subject: str = ""
    is_difference: bool = True
    by_setting: tuple[SettingResult, ...] = ()
    closed: bool = False
    rows_covered: Literal["all", "some", "none"] = "none"

    @property
    def agrees(self) -> bool:
        """True if the effect lies where the claim is true; a number of parameters may lie on the border."""
        low, high = self.region
        return low < self.effect < high or (self.closed and self.effect == high)


@dataclass(frozen=True)
class PartVerdict:
    """The verdict on one part of a claim that is about a score and about a number of parameters."""

    verdict: Verdict
    result: ComparisonResult | None


@dataclass(frozen=True)
class Finding:
    """A study's verdict on a claim, with the numbers behind it.

    Attributes:
        p: The two-sided p value against the nearest border of the region in which the claim is true. Of several
            comparisons that must all be true it is the largest p; if one of them appears false, the smallest times
            their number. None if nothing was tested.
        p_adjusted: p after Holm's procedure over all claims of the study.
        settings: How many settings and seeds were compared; empty if nothing was tested.
        note: Which spread the interval covers, or why nothing was decided.
        deciding: The comparison that decides; None if nothing could be compared. Of a claim about a score and a number
            of parameters it is the score's. Of several numbers that are no differences, each of them where the claim is
            true, it is the nearest to its bound.
        parts: The verdicts on the score and on the number of parameters, if the claim is about both.
        resolution: What this run could have decided; empty if the claim is decided or its spread is not known.
        at_chance: How many of the `n_runs` runs that were compared are no better than chance.
        reason: Why the claim is not testable.
        floor: The score of the best floor where the deciding comparison was made, in points; None if it was not run.
        capped: The share of the runs that were compared whose last validation is the best.
        at_edge: The share whose learning rate is the lowest or the highest of those that were tried.
    """

    claim: Claim
    verdict: Verdict
    p: float | None = None
    p_adjusted: float | None = None
    settings: str = ""
    note: str = ""
    comparisons: tuple[ComparisonResult, ...] = ()
    deciding: ComparisonResult | None = None
    parts: tuple[PartVerdict, ...] = ()
    resolution: str = ""
    at_chance: int = 0
    n_runs: int = 0
    reason: str = ""
    floor: float | None = None
    full: float | None = None
    capped: float = 0.0
    at_edge: float = 0.0

    @property
    def effect(self) -> float | None:
        """The effect of the comparison that decides, in a reader's direction."""
        return None if self.deciding is None else self.deciding.effect

    @property
    def interval(self) -> tuple[float, float] | None:
        """Its interval, of the level at which Holm's procedure tested the claim; None if the effect is exact."""
        return None if self.deciding is None else self.deciding.interval

    @property
    def unit(self) -> str:
        """The unit of effect and interval."""
        return "" if self.deciding is None else self.deciding.unit


@dataclass(frozen=True)
class PrintedTable:
    """Numbers that a paper prints, as outcomes of a study without seeds."""

    name: str
    outcomes: tuple[Outcome, ...]
    metric: str | Mapping[str, str]


@dataclass(frozen=True)
class PrintedFinding:
    """A paper's printed numbers beside one of its claims.

    `agrees` is None if the paper prints no numbers to compare. The comparison that decides is the nearest to being
    false, or the furthest from being true; where it agrees it is one of scores, if there are any, as the comparison of
    a `Finding` is.
    """

    claim: Claim
    agrees: bool | None
    deciding: ComparisonResult | None = None
    source: str = ""
    comparisons: tuple[ComparisonResult, ...] = ()


@dataclass(frozen=True)
class Paper:
    """A paper that is reproduced."""

    abbreviation: str
    title: str
    citation: str


@dataclass(frozen=True)
class PaperStatements:
    """A paper's statements about a study.

    `choices` say where it disagrees with itself or is silent, and what was chosen; `rerun` which runs of small scale
    were repeated after results had been seen.
    """

    paper: Paper | None = None
    claims: tuple[Claim, ...] = ()
    tables: tuple[PrintedTable, ...] = ()
    choices: tuple[str, ...] = ()
    rerun: str = ""


def check_printed(claim: Claim, tables: Sequence[PrintedTable], names: Names | None = None) -> PrintedFinding:
    """Compare a claim with the numbers that its paper prints, as they are printed.

    The first table that has all cells of the claim counts.
    """
    for table in (one for one in tables if claim.printed_in in ("", one.name)):
        cells = Cells(with_derived_axes(table.outcomes), MetricChoice(table.metric), names)
        try:
            comparisons = claim.form.comparisons(cells.excluding(claim.exclude))
        except MissingCells:
            continue
        results = tuple(_printed_result(one, cells) for one in comparisons)
        deciding = min(results, key=lambda result: (result.agrees, result.agrees and result.closed, _margin(result)))
        return PrintedFinding(claim, all(result.agrees for result in results), deciding, table.name, results)
    return PrintedFinding(claim, None)


def _printed_result(compared: Comparison | Exact, cells: Cells) -> ComparisonResult:
    if isinstance(compared, Exact):
        return _exact_result(compared)
    means = {s: float(np.mean([number.value for number in seeds.values()])) for s, seeds in compared.effects.items()}
    by_setting = tuple(
        SettingResult(cells.describe_setting(setting), effect, (effect, effect), compared.low < effect < compared.high)
        for setting, effect in means.items()
    )
    # Printed decimals have no sum in binary fractions: 79.8 − 78.8 is not 1.
    effect = round(float(np.mean([w * one for w, one in zip(_weights(compared), means.values(), strict=True)])), 9)
    return _result_of(compared, cells, effect=effect, interval=None, by_setting=by_setting if len(means) > 1 else ())


def _result_of(compared: Comparison, cells: Cells, **numbers: Any) -> ComparisonResult:
    """Return the result of a comparison, with the words and the region that it has itself."""
    return ComparisonResult(
        text=compared.text,
        unit=compared.measurement.unit,
        region=(compared.low, compared.high),
        subject=compared.measurement.name or cells.metrics(compared.effects),
        is_difference=compared.is_difference,
        **numbers,
    )


def _margin(result: ComparisonResult) -> float:
    """Return the distance of an effect from the border of its region; negative outside."""
    low, high = result.region
    return min(result.effect - low, high - result.effect)


def _exact_result(count: Exact) -> ComparisonResult:
    return ComparisonResult(
        count.text, count.value, None, "times as many", (-math.inf, count.maximum), "trained parameters",
        is_difference=False, closed=True,
    )  # fmt: skip


@dataclass
class _Test:
    """A claim's comparisons with their estimates, and the test of them. Without a p value nothing was tested."""

    comparisons: tuple[Comparison, ...] = ()
    estimates: tuple[Estimate, ...] = ()
    counts: tuple[Exact, ...] = ()
    has_scores: bool = True
    p: float | None = None
    decides: int = 0
    """The index of the comparison that decides."""
    appears_true: bool = False
    note: str = ""
    compared: tuple[Outcome, ...] = ()
    p_adjusted: float | None = None
    level: float = 0.05
    """The level at which Holm's procedure tested the claim."""
    untestable: str = ""
    """Why what was run leaves nothing to compare."""


@check_booleans
def decide_claims(
    claims: Sequence[Claim],
    outcomes: Sequence[Outcome],
    metric: str | Mapping[str, str],
    *,
    lower: bool = False,
    alpha: float = 0.05,
    names: Names | None = None,
    printed: Sequence[PrintedFinding] = (),
    small: bool = False,
    repetition: str = "seed",
) -> list[Finding]:
    """Decide claims, with Holm's procedure over all that can be tested.

    The chance that any "holds" or "does not hold" of the study is wrong is at most alpha (Holm 1979; for the directions
    Shaffer 1980: only one of them is wrong, at half of a two-sided test's level). A comparison with one seed, or with a
    cell that is missing or failed, is undecided and its note says which. Numbers of parameters are exact: they refute
    a claim without a test, and its score is tested all the same. What is not testable is tested as the others are, so
    that its interval is one of theirs, and has no verdict. Tasks on which full tuning does not beat the floor decide
    nothing, and a mean over tasks of different metrics is not taken: the claim has to be true by each. `printed` is
    what the paper's tables say of each claim; their effects are those that a larger run is to decide.
    """
    checks = check_floors(outcomes, MetricChoice(metric, lower), names)
    problems = {pair: check.problem for pair, check in checks.items() if check.problem}
    count_only, scored = (
        [one for one in with_derived_axes(outcomes) if (_model_and_task(one) in problems) is fails]
        for fails in (True, False)
    )
    cells = Cells(scored, MetricChoice(metric, lower), names, count_only)
    left_out = "; ".join(problems.values())
    tests = [_test(claim, cells, left_out) for claim in claims]
    tested = [test for test in tests if test.p is not None]
    p = [test.p for test in tested if test.p is not None]
    for test, adjusted, level in zip(tested, holm(p).tolist(), holm_levels(p, alpha).tolist(), strict=True):
        test.p_adjusted, test.level = adjusted, level
    theirs = printed or [PrintedFinding(claim, None) for claim in claims]
    return [
        _finding(test, one, cells, checks, alpha=alpha, small=small, repetition=repetition)
        for test, one in zip(tests, theirs, strict=True)
    ]


@check_booleans
def decidable_effects(
    claims: Sequence[Claim],
    outcomes: Sequence[Outcome],
    metric: str | Mapping[str, str],
    seeds: int,
    *,
    lower: bool = False,
) -> list[tuple[float, str] | None]:
    """Return for each claim the smallest effect that a run of so many seeds decides with the chance `POWER`.

    The spread is taken from the outcomes so far, and the level is the strictest of Holm's procedure. An effect is the
    distance from the border of the claim, with its unit; None where nothing is known of the spread.
    """
    cells = Cells(with_derived_axes(outcomes), MetricChoice(metric, lower))
    return [_decidable_effect(_test(claim, cells), seeds, 0.05 / len(claims)) for claim in claims]


def _decidable_effect(test: _Test, seeds: int, alpha: float) -> tuple[float, str] | None:
    if not test.estimates:
        return None
    compared, estimate = test.comparisons[test.decides], test.estimates[test.decides]
    so_far = min(len(numbers) for numbers in compared.effects.values())
    smallest = estimate.enlarged((so_far, seeds)).smallest_decidable(alpha, POWER)
    return (smallest, compared.measurement.unit) if math.isfinite(smallest) else None


def _model_and_task(outcome: Outcome) -> tuple[str, str]:
    return str(outcome.cell.get("model")), str(outcome.cell.get("task"))


def _by_metric(compared: Comparison, metrics: str | Mapping[str, str]) -> list[Comparison]:
    """Divide a comparison of scores by the metric of its tasks: points of one are not those of another."""
    groups: dict[str, dict[Any, Any]] = {}
    for setting, seeds in compared.effects.items():
        task = dict(setting).get("task")
        metric = "" if isinstance(metrics, str) or compared.measurement.name else metrics.get(str(task), "")
        groups.setdefault(metric, {})[setting] = seeds
    return [replace(compared, effects=effects) for effects in groups.values()]


def _test(claim: Claim, cells: Cells, left_out: str = "") -> _Test:
    """Make a claim's comparisons and test them, or say why they cannot be made; `left_out` are problems of floors."""
    reasons: list[str] = []
    untestable = ""
    remaining = cells.excluding(claim.exclude)
    remaining.used.clear()
    try:
        made = claim.form.comparisons(remaining)
    except MissingCells as lacking:
        made, reasons = lacking.comparisons, lacking.reasons
        if lacking.nothing_to_see:
            untestable = "; ".join(dict.fromkeys(reason.partition(": ")[2].partition(": ")[0] for reason in reasons))
        elif left_out and not any(reason.startswith(NOT_RUN) for reason in reasons):
            untestable = left_out
    counts = tuple(one for one in made if isinstance(one, Exact))
    scored = [one for one in made if isinstance(one, Comparison)]
    comparisons = tuple(one for whole in scored for one in _by_metric(whole, cells.metric.metric))
    for setting in dict.fromkeys(s for one in comparisons for s, seeds in one.effects.items() if len(seeds) < 2):
        where = f" {cells.describe_setting(setting)}" if setting else ""
        reasons = [*reasons, f"one seed{where}: no claim from one seed"]
    if reasons:
        return _Test(counts=counts, note=str(MissingCells(reasons)), untestable=untestable)
    if not comparisons:
        return _Test(counts=counts, has_scores=False, note="numbers of parameters, without a test")
    estimates = tuple(_estimate(one) for one in comparisons)
    pairs = list(zip(comparisons, estimates, strict=True))
    p = [estimate.p_value(*one.borders) for one, estimate in pairs]
    false = [i for i, (one, estimate) in enumerate(pairs) if not one.low < estimate.mean < one.high]
    if false:
        decides = min(false, key=lambda i: p[i])
        value = min(1.0, len(p) * p[decides])
    else:
        decides = max(range(len(p)), key=lambda i: p[i])
        value = p[decides]
    note = _basis(comparisons)
    if value == 1.0 and (means := _means_without_spread(estimates)):
        note = f"every seed gave the same ({means}): no spread to judge by"
    used = tuple(remaining.used.values())
    return _Test(comparisons, estimates, counts, True, value, decides, not false, note, used)


def _estimate(compared: Comparison) -> Estimate:
    strata: list[np.ndarray] = []
    tests: list[Hashable] = []
    slack = 0.0
    for (setting, seeds), weight in zip(compared.effects.items(), _weights(compared), strict=True):
        numbers = list(seeds.values())
        examples = [number.examples for number in numbers if number.examples is not None]
        aligned = len(examples) == len(numbers) and len({len(row) for row in examples}) == 1
        differences = np.stack(examples) if aligned else np.array([number.value for number in numbers])
        strata.append(weight * differences)
        tests.append((tuple((axis, label) for axis, label in setting if axis in DATA_AXES), strata[-1].shape[1:]))
        slack += weight * sum(number.slack for number in numbers) / len(numbers) / len(compared.effects)
    return replace(paired_estimate(strata, tests), slack=slack)


def _weights(compared: Comparison) -> list[float]:
    """Return how much each setting counts in the mean over settings; a single one is what it is."""
    if len(compared.effects) == 1:
        return [1.0]
    return [next(iter(seeds.values())).weight for seeds in compared.effects.values()]


def _by_example(*comparisons: Comparison) -> set[bool]:
    """Return whether numbers are known for each example: of all of them, of none, or both."""
    return {number.examples is not None for one in comparisons for s in one.effects.values() for number in s.values()}


def _basis(comparisons: Sequence[Comparison]) -> str:
    """Say which spread an interval covers: "spread of seeds and examples"."""
    by_example = _by_example(*comparisons)
    spread = "seeds, and examples where there are any"
    if len(by_example) == 1:
        spread = "seeds and examples" if by_example == {True} else "seeds alone"
    return f"spread of {spread}"


def _settings(comparisons: Sequence[Comparison], repetition: str) -> str:
    """Say how much was compared: "8 settings × 3 seeds"."""
    settings = {len(one.effects) for one in comparisons}
    seeds = {len(s) for one in comparisons for s in one.effects.values()}
    return f"{_range(settings, 'setting')} × {_range(seeds, repetition)}" if comparisons else ""


def _range(sizes: set[int], word: str) -> str:
    return f"{number_range(sizes)} {word}{'' if sizes == {1} else 's'}"


def _means_without_spread(estimates: Sequence[Estimate]) -> str:
    means = [e.mean for e in estimates if not math.isfinite(e.interval()[0])]
    return ", ".join(f"{mean:.4g}" for mean in means[:3])


def _not_testable(test: _Test, cells: Cells, capped: float, score: Verdict) -> str:
    """Say why what was run cannot test a claim; empty if it can."""
    if test.untestable or not test.comparisons:
        return test.untestable
    measurement = test.comparisons[test.decides].measurement
    if capped >= CAPPED and measurement.only_uncapped:
        return (
            f"the number of training steps decides it: {capped:.0%} of the runs converge at their last validation or "
            f"have fewer than {MIN_VALIDATIONS}"
        )
    if capped >= CAPPED and score != "undecided" and test.comparisons[test.decides].is_trend:
        return (
            f"further steps may change the trend either way: {capped:.0%} of the runs are at their best when they end"
        )
    if capped >= CAPPED and score == "does not hold":
        return f"the runs are too short to speak against it: {capped:.0%} of them are at their best when they end"
    judged = [is_a_guess(one) for one in test.compared if not measurement.is_reference(one)]
    if judged and sum(judged) >= GUESSES * len(judged):
        return f"{sum(judged)} of the {len(judged)} runs that are compared are no better than chance"
    return ""


def _mean_score(scores: Sequence[float | None]) -> float | None:
    known = [score for score in scores if score is not None]
    return float(np.mean(known)) if known and len(known) == len(scores) else None


def _finding(
    test: _Test, printed: PrintedFinding, cells: Cells, checks: Mapping[tuple[str, str], FloorCheck], *, alpha: float,
    small: bool, repetition: str,
) -> Finding:  # fmt: skip
    """Decide at the level at which Holm tested the claim; where it appears false, each comparison has its share."""
    share = test.level if test.appears_true else test.level / max(1, len(test.estimates))
    pairs = zip(test.comparisons, test.estimates, strict=True)
    scores = [_comparison_result(compared, estimate, cells, share) for compared, estimate in pairs]
    counts = [_exact_result(one) for one in test.counts]
    score, count = _score_verdict(test, alpha), _count_verdict(test, small)
    verdict = score if test.has_scores and count != "does not hold" else count
    capped_runs = [
        any(one.measurement.is_capped(run, cells.metric) for one in test.comparisons[:1]) for run in test.compared
    ]
    capped = sum(capped_runs) / max(1, len(capped_runs))
    reason = printed.claim.untestable if small else ""
    if not reason and (count != "does not hold" or not test.counts):
        reason = _not_testable(test, cells, capped, score)
    if reason:
        verdict = "not testable"
    if verdict == "not testable" and not reason:
        reason = "the number of layers decides the number of parameters"
    of_score, of_count = scores[test.decides] if scores else None, min(counts, key=_margin, default=None)
    deciding = of_score or of_count
    if scores and score == "holds" and not any(result.is_difference for result in scores):
        deciding = min(scores, key=_margin)
    settings = [dict(setting) for setting in test.comparisons[test.decides].effects] if scores else []
    compared_with = [
        checks[model, task]
        for model, task in dict.fromkeys(map(_model_and_task, test.compared))
        if (model, task) in checks and deciding is not None and deciding.unit == "points" and any(
            (model, task) == (str(one.get("model", model)), str(one.get("task", task))) for one in settings
        )
    ]  # fmt: skip
    has_parts, is_open = test.has_scores and counts, score == "undecided" and verdict != "not testable"
    return Finding(
        printed.claim,
        verdict,
        p=test.p,
        p_adjusted=test.p_adjusted,
        settings=_settings(test.comparisons, repetition),
        note=test.note,
        comparisons=(*scores, *counts),
        deciding=deciding,
        parts=(PartVerdict(score, of_score), PartVerdict(count, of_count)) if has_parts else (),
        resolution=_resolution(test, share, printed, repetition) if scores and is_open else "",
        at_chance=sum(map(is_at_chance, test.compared)),
        n_runs=sum(map(can_be_at_chance, test.compared)),
        reason=reason if verdict == "not testable" else "",
        floor=_mean_score([check.floor for check in compared_with]),
        full=_mean_score([check.full for check in compared_with]),
        capped=capped,
        at_edge=sum(bool(run.extra.get(EDGE)) for run in test.compared) / max(1, len(test.compared)),
    )


def _count_verdict(test: _Test, small: bool) -> Verdict:
    """Decide numbers of parameters; on small models not those that depend on the number of layers."""
    decisive = [one for one in test.counts if not (small and one.depends_on_depth)]
    if test.counts and not decisive:
        return "not testable"
    return "holds" if all(_exact_result(one).agrees for one in decisive) else "does not hold"


def _score_verdict(test: _Test, alpha: float) -> Verdict:
    if test.p_adjusted is None or test.p_adjusted > alpha:
        return "undecided"
    return "holds" if test.appears_true else "does not hold"


def _resolution(test: _Test, alpha: float, printed: PrintedFinding, repetition: str) -> str:
    """Say which effect a run of this size decides, and whether it excludes one as large as the paper's."""
    compared, estimate, theirs = test.comparisons[test.decides], test.estimates[test.decides], printed.deciding
    if not estimate.parts:
        return ""
    unit, (low, high) = compared.measurement.unit, estimate.interval(alpha)
    borders = " or ".join(f"{border:g}".replace("-", "−") for border in compared.borders)
    beyond = "" if compared.borders == (0.0,) else f" beyond {borders}"
    sample = f"{repetition}s and test rows" if True in _by_example(compared) else f"{repetition}s"
    effect = f"{estimate.smallest_decidable(alpha, POWER):.3g} {unit}".rstrip()
    text = f"With these {sample} an effect of {effect}{beyond} is decided in {POWER:.0%} of cases."
    if printed.agrees and theirs is not None and theirs.unit == unit and not low <= theirs.effect <= high:
        text += " The interval excludes an effect as large as the paper's."
    return text


def _comparison_result(compared: Comparison, estimate: Estimate, cells: Cells, alpha: float) -> ComparisonResult:
    by_setting: list[SettingResult] = []
    for setting, seeds in compared.effects.items() if len(compared.effects) > 1 else ():
        one = _estimate(replace(compared, effects={setting: seeds}))
        agrees = compared.low < one.mean < compared.high
        by_setting.append(SettingResult(cells.describe_setting(setting), one.mean, one.interval(), agrees))
    by_example = _by_example(compared)
    return _result_of(
        compared,
        cells,
        effect=estimate.mean,
        interval=estimate.interval(alpha),
        by_setting=tuple(by_setting),
        rows_covered="some" if len(by_example) > 1 else "all" if by_example == {True} else "none",
    )
