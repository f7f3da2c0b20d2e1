"""From outcomes to the numbers that tables and figures show: mean ± standard deviation over seeds, and what is missing.

Tables and figures only lay these numbers out.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...errors import DeltuneError
from ...train import METRICS
from ..claims.comparisons import has_labels, is_at_chance
from ..claims.selectors import describe_cell
from ..jobs.job import Cell, Outcome
from .figure_spec import DISPLAY_NAMES, Label, LabelFilter, Numbers, ViewSpec, as_tuple

SEED, METRIC, CURVE = "seed", "metric", "curve"

Labels = tuple[Label, ...]
"""A label on each of some axes."""


@dataclass(frozen=True)
class NumberFormat:
    """The form in which a number is shown.

    Without `digits` three significant ones are shown.
    """

    factor: float = 1.0
    digits: int | None = None
    lower: bool = False
    name: str = ""

    def show(self, value: float | None) -> str:
        """Return the number as text; a dash if there is none."""
        if value is None:
            return "–"
        scaled = value * self.factor
        if self.digits is None:
            return f"{scaled:,.0f}" if abs(scaled) >= 100 else f"{scaled:.3g}"
        text = f"{scaled:.{self.digits}f}"
        return "0" + text[2:] if text.startswith("-0") and not float(text) else text


def number_format(name: str, view: ViewSpec) -> NumberFormat:
    """Return how a view shows a number.

    Metrics in [0, 1] are shown times 100, metrics of texts with two digits and others with one, as in the papers.
    """
    bare = name.removeprefix("eval_")
    shown = view.display(bare).replace("_", " ")
    if getattr(view, "diagonal", False):
        return NumberFormat(1.0, 1, _lower(bare, view), f"{shown}, relative (%)")
    if bare not in METRICS:
        return NumberFormat(1.0, None, _lower(bare, view), shown)
    metric = METRICS[bare]
    digits = 2 if metric.input_type in ("texts", "log-likelihoods") else 1
    return NumberFormat(100.0 if metric.range[1] == 1.0 else 1.0, digits, metric.better == "lower", shown)


def _lower(name: str, view: ViewSpec) -> bool:
    return METRICS[name].better == "lower" if name in METRICS else name == "loss" or view.lower


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation over seeds.

    Attributes:
        mean: The mean, or the median where the view says so; None if no seed has a number.
        std: The standard deviation (n − 1); None below two seeds.
        n: How many seeds have a number.
        failed: Why other seeds failed.
        absent: Which seeds did not run.
        at_chance: Which seeds are no better than chance, though they have a number.
        planned: How many seeds there should be; 0 if each lacking one has an entry in `failed` or `absent`.
    """

    mean: float | None
    std: float | None = None
    n: int = 0
    failed: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    at_chance: tuple[str, ...] = ()
    planned: int = 0


MISSING = Spread(None, absent=("not run",))


@dataclass(frozen=True)
class Observation:
    """One number of one outcome, or the reason why there is none.

    Its cell is the outcome's, extended by an entry's keys, the metric and x.
    """

    cell: Cell
    value: float | None
    error: str | None
    metric: str
    waiting: bool = False
    at_chance: bool = False


AT_CHANCE = "no better than chance"


@dataclass(frozen=True)
class Aggregates:
    """Spreads by their labels on some axes.

    `metrics` has the name of the number for the same labels; `excluded` are outcomes that lack an axis, each with the
    reason.
    """

    axes: tuple[str, ...]
    spreads: Mapping[Labels, Spread]
    metrics: Mapping[Labels, str]
    excluded: tuple[str, ...]

    def __getitem__(self, key: Labels) -> Spread:
        return self.spreads.get(key, MISSING)

    def labels(self, axis: str, view: ViewSpec) -> tuple[Label, ...]:
        """Return the labels of an axis in the view's order, then the others: numbers by size, names as they occur.

        A text such as "0.05" is a number too: budgets are named like this.
        """
        at = self.axes.index(axis)
        seen = dict.fromkeys(key[at] for key in self.spreads)
        ordered = view.order.get(axis, ())
        rest = [label for label in seen if label not in ordered]
        with contextlib.suppress(ValueError):
            rest.sort(key=lambda label: float(str(label)))
        return (*ordered, *rest)

    def combinations(self, axes: Sequence[str], view: ViewSpec) -> list[Labels]:
        """Return the combinations of labels to show: those that occur and those in the view's order, sorted by axis.

        An axis alone in the order (methods, but not models) is expected beside everything that occurs on the others.
        """
        at, labels = [self.axes.index(axis) for axis in axes], [self.labels(axis, view) for axis in axes]
        shown = dict.fromkeys(tuple(key[i] for i in at) for key in self.spreads)
        if axes and all(axis in view.order for axis in axes):
            shown |= dict.fromkeys(itertools.product(*(view.order[axis] for axis in axes)))
        else:
            for i, axis in enumerate(axes):
                ordered = view.order.get(axis, ())
                shown |= dict.fromkeys((*key[:i], label, *key[i + 1 :]) for key in shown for label in ordered)
        return sorted(shown, key=lambda key: tuple(labels[i].index(label) for i, label in enumerate(key)))


def select_outcomes(outcomes: Iterable[Outcome], where: LabelFilter) -> list[Outcome]:
    """Return the outcomes whose cells have these labels."""
    return [outcome for outcome in outcomes if has_labels(outcome, where)]


def read_number(outcome: Outcome, name: str, entry: Mapping[str, Any] | None = None) -> float | None:
    """Return a number of an outcome by its name: of an entry, its scores, its cell, its count, or its seconds."""
    seconds = {"seconds": outcome.seconds}
    for source in (entry or {}, outcome.scores, outcome.cell, outcome.count, seconds):
        value = source.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
    return None


def observations(
    view: ViewSpec, outcomes: Iterable[Outcome], numbers: Numbers, axes: Sequence[str], x: str
) -> list[Observation]:
    """Return an observation for each outcome, or for each of its entries and scores where the view shows those."""
    number_names, result, selected = as_tuple(numbers), [], select_outcomes(outcomes, view.where)
    if METRIC in axes and not number_names:
        number_names = tuple(dict.fromkeys(name for outcome in selected for name in outcome.scores))
    for outcome in selected:
        entries: Sequence[Mapping[str, Any]] = [{}]
        if view.entries and not outcome.error:
            all_entries = outcome.curve if view.entries == CURVE else outcome.extra.get(view.entries, ())
            # A line of a log without this number (a loss where scores are shown) is not a missing score. Of two lines
            # of one step, as a resumed run may write, the later counts.
            shown = [entry for entry in all_entries if any(name in entry for name in number_names)]
            entries = list({entry["step"]: entry for entry in shown}.values()) if view.entries == CURVE else shown
        error = outcome.error
        if not entries:
            entries, error = [{}], f"no {' or '.join(number_names)} in its {view.entries}"
        for entry in entries:
            cell = {**outcome.cell, **{k: v for k, v in entry.items() if k not in number_names}}
            position = read_number(outcome, x, entry) if x and x not in cell else None
            if position is not None:
                cell[x] = position
            if METRIC not in axes:
                result.append(_observe(cell, outcome, entry, number_names, error))
                continue
            for name in number_names or ("",):
                lacking = None if name in outcome.scores else f"no {name} among its scores" if name else "no scores"
                labels = {**cell, METRIC: name} if name else cell
                result.append(_observe(labels, outcome, entry, (name,), error or lacking))
    return result


def _observe(
    cell: Cell, outcome: Outcome, entry: Mapping[str, Any], numbers: Sequence[str], error: str | None
) -> Observation:
    if error:
        return Observation(cell, None, error, "", outcome.waiting)
    for name in numbers:
        value = read_number(outcome, name, entry)
        if value is not None:
            return (
                Observation(cell, value, None, name, at_chance=is_at_chance(outcome))
                if math.isfinite(value)
                else Observation(cell, None, f"{name} is {value}", "")
            )
    return Observation(cell, None, f"no {' or '.join(numbers)} among its scores", "")


def _place_failed(observed: Sequence[Observation], x: str) -> list[Observation]:
    """Give failed observations the x of their other seeds, which their own count would have said."""

    def labels_without_x(observation: Observation) -> tuple[tuple[str, str], ...]:
        return tuple((axis, str(label)) for axis, label in observation.cell.items() if axis not in (SEED, x))

    positions = {labels_without_x(one): {x: one.cell[x]} for one in observed if x in one.cell}
    return [replace(one, cell={**positions.get(labels_without_x(one), {}), **one.cell}) for one in observed]


def aggregate(
    view: ViewSpec, outcomes: Iterable[Outcome], numbers: Numbers, axes: Sequence[str], x: str = ""
) -> Aggregates:
    """Aggregate a number over seeds; where the view says so, averaged over axes.

    Several numbers mean the first that there is; `x` is a number that becomes an axis, unless the cell has it already.
    Two outcomes of one seed with the same labels are an error, which names the axes that the view forgot.
    """
    inner = tuple(dict.fromkeys((*axes, *view.average_over)))
    collected = observations(view, outcomes, numbers, inner, x)
    collected = _place_failed(collected, x) if x else collected
    seeds = list(dict.fromkeys(observation.cell[SEED] for observation in collected if SEED in observation.cell))
    groups: dict[Labels, list[Observation]] = {}
    excluded: list[str] = []
    names = {**DISPLAY_NAMES, **view.display_names}
    for observation in collected:
        lacking = [axis for axis in inner if axis not in observation.cell]
        if lacking:
            reason = f"no {', '.join(lacking)}" if not observation.error else observation.error
            excluded.append(f"{describe_cell(observation.cell, names)}: {reason}")
        else:
            groups.setdefault(tuple(observation.cell[axis] for axis in inner), []).append(observation)
    spreads = {key: _spread(group, seeds, view.median) for key, group in groups.items()}
    metrics = {key: next((f.metric for f in group if f.metric), "") for key, group in groups.items()}
    if view.average_over:
        spreads, metrics = _average_over(view, inner, len(axes), spreads, metrics)
    return Aggregates(tuple(axes), spreads, metrics, tuple(dict.fromkeys(excluded)))


def relative_spreads(spreads: Mapping[Labels, Spread], base: Callable[[Labels], Labels]) -> dict[Labels, Spread]:
    """Return every spread in percent of the mean at other labels; missing with the reason if there is none."""
    result = {}
    for key, spread in spreads.items():
        reference = spreads.get(base(key), MISSING).mean
        if spread.mean is None:
            result[key] = spread
        elif not reference:
            reason = f"nothing to compare with at {', '.join(str(label) for label in base(key))}"
            result[key] = Spread(None, failed=(*spread.failed, reason), absent=spread.absent)
        else:
            std = None if spread.std is None else 100 * spread.std / abs(reference)
            result[key] = replace(spread, mean=100 * spread.mean / reference, std=std)
    return result


def _spread(observed: Sequence[Observation], seeds: Sequence[Any], median: bool) -> Spread:
    """Aggregate observations of the same labels; `seeds` are all of the view, so that absent ones show."""
    present = [observation.cell.get(SEED) for observation in observed]
    if len(set(map(str, present))) < len(present):
        axes = dict.fromkeys(axis for observation in observed for axis in observation.cell)
        labels = {axis: {str(observation.cell.get(axis)) for observation in observed} for axis in axes}
        differing = [axis for axis in axes if len(labels[axis]) > 1 and axis != SEED]
        where = f"differ in {', '.join(differing)}: name the axis in the view" if differing else "are of the same cell"
        raise DeltuneError(f"{len(present)} outcomes have the same labels in the view; they {where}.")
    values = [observation.value for observation in observed if observation.value is not None]
    errors = [(o.cell.get(SEED), str(o.error), o.waiting) for o in observed if o.error]
    reasons, waiting = (
        _reasons([(seed, why) for seed, why, waits in errors if waits == state], len(seeds) > 1)
        for state in (False, True)
    )
    absent = tuple(f"seed {seed} not run" for seed in seeds if seed not in present) if present != [None] else ()
    absent = (*waiting, *absent)
    if not values:
        return Spread(None, failed=reasons, absent=absent)
    std = statistics.stdev(values) if len(values) > 1 else None
    middle = statistics.median(values) if median else statistics.fmean(values)
    at_chance = _reasons([(o.cell.get(SEED), AT_CHANCE) for o in observed if o.at_chance], len(seeds) > 1)
    planned = len(observed) + sum(seed not in present for seed in seeds if present != [None])
    return Spread(middle, std, len(values), reasons, absent, at_chance, planned)


def _reasons(failed: Sequence[tuple[Any, str]], several: bool) -> tuple[str, ...]:
    """Return why seeds have no number, each reason once with its seeds."""
    reasons: dict[str, list[str]] = {}
    for seed, why in failed:
        reasons.setdefault(why, []).append(str(seed))
    plural = {why: "s" if len(seeds) > 1 else "" for why, seeds in reasons.items()}
    return tuple(f"seed{plural[why]} {', '.join(seeds)}: {why}" if several else why for why, seeds in reasons.items())


def _average_over(
    view: ViewSpec, inner: tuple[str, ...], kept: int, spreads: Mapping[Labels, Spread], metrics: Mapping[Labels, str]
) -> tuple[dict[Labels, Spread], dict[Labels, str]]:
    """Average over the last axes; what some labels lack of the combinations that occur anywhere is reported."""
    combinations = list(dict.fromkeys(key[kept:] for key in spreads))
    averages, names = {}, {}
    for outer in dict.fromkeys(key[:kept] for key in spreads):
        averaged = {rest: spreads.get((*outer, *rest), MISSING) for rest in combinations}
        means = [spread.mean for spread in averaged.values() if spread.mean is not None]
        failed: list[str] = []
        absent: list[str] = []
        for rest, spread in averaged.items():
            where = ", ".join(view.display(label) for label in rest)
            failed += [f"{where}: {why}" for why in spread.failed]
            absent += [f"{where}: {why}" for why in spread.absent]
        averages[outer] = Spread(
            statistics.fmean(means) if means else None, None, len(means), tuple(failed), tuple(absent)
        )
        names[outer] = next((metrics[(*outer, *rest)] for rest in combinations if metrics.get((*outer, *rest))), "")
    return averages, names
