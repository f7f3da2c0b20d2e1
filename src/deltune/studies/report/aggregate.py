"""What outcomes say: mean ± standard deviation over seeds at every place of a view, and what is missing there.

The one place where outcomes become numbers to show; tables and plots only lay them out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...errors import DeltuneError
from ...metrics.registry import METRICS
from ..engine.outcomes import Cell, Outcome
from .figure_spec import Label, Numbers, Selector, View, names

SEED, METRIC, CURVE = "seed", "metric", "curve"

Place = tuple[Label, ...]


@dataclass(frozen=True)
class Unit:
    """How a number is shown: times `factor`, with `digits` after the point (None: three significant ones)."""

    factor: float = 1.0
    digits: int | None = None
    lower: bool = False
    name: str = ""

    def show(self, value: float | None) -> str:
        if value is None:
            return "–"
        scaled = value * self.factor
        if self.digits is None:
            return f"{scaled:,.0f}" if abs(scaled) >= 100 else f"{scaled:.3g}"
        text = f"{scaled:.{self.digits}f}"
        return "0" + text[2:] if text.startswith("-0") and not float(text) else text


def unit(name: str, view: View) -> Unit:
    """Metrics in [0, 1] are shown times 100, texts' with two digits and the others with one, as in the papers."""
    digits, bare = view.digits, name.removeprefix("eval_")
    if view.relative or getattr(view, "diagonal", False):
        return Unit(
            1.0,
            1 if digits is None else digits,
            _lower(bare, view),
            f"{view.write(bare).replace('_', ' ')}, relative (%)",
        )
    if bare not in METRICS:
        return Unit(1.0, digits, view.lower, view.write(bare).replace("_", " "))
    metric = METRICS[bare]
    usual = 2 if metric.input_type in ("texts", "log-likelihoods") else 1
    factor = 100.0 if metric.range[1] == 1.0 else 1.0
    return Unit(
        factor, usual if digits is None else digits, metric.better == "lower", view.write(bare).replace("_", " ")
    )


def _lower(name: str, view: View) -> bool:
    return METRICS[name].better == "lower" if name in METRICS else view.lower


@dataclass(frozen=True)
class Spread:
    """mean ± std over n seeds; std (n − 1) is None below two. failed: why others gave nothing; absent: not run."""

    mean: float | None
    std: float | None = None
    n: int = 0
    failed: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        return self.mean is not None and not self.failed and not self.absent


MISSING = Spread(None, absent=("not run",))


@dataclass(frozen=True)
class Fact:
    """One number of one outcome, or why it is not there."""

    cell: Cell
    value: float | None
    error: str | None
    metric: str
    waiting: bool = False


@dataclass(frozen=True)
class Aggregates:
    """spreads: by the labels of `axes`. metrics: which score each is of. left: what has no place there, and why."""

    axes: tuple[str, ...]
    spreads: Mapping[Place, Spread]
    metrics: Mapping[Place, str]
    left: tuple[str, ...]

    def __getitem__(self, place: Place) -> Spread:
        return self.spreads.get(place, MISSING)

    def labels(self, axis: str, view: View) -> tuple[Label, ...]:
        """The labels of an axis: in the view's order, others after it; numbers by size, names as they come."""
        at = self.axes.index(axis)
        seen = dict.fromkeys(place[at] for place in self.spreads)
        asked = view.order.get(axis, ())
        rest = [label for label in seen if label not in asked]
        if rest and all(isinstance(label, (int, float)) for label in rest):
            rest.sort(key=lambda label: float(label or 0))
        return (*asked, *rest)


def select_outcomes(outcomes: Iterable[Outcome], where: Selector) -> list[Outcome]:
    """The outcomes whose cells have these labels."""

    def fits(cell: Cell) -> bool:
        return all(
            cell.get(axis) in label if isinstance(label, (tuple, list, set)) else cell.get(axis) == label
            for axis, label in where.items()
        )

    return [outcome for outcome in outcomes if fits(outcome.cell)]


def number(outcome: Outcome, name: str, entry: Mapping[str, Any] | None = None) -> float | None:
    """A number of an outcome by its name: of an entry, a score, of its cell or count, or its seconds."""
    own = {"seconds": outcome.seconds}
    for place in (entry or {}, outcome.scores, outcome.cell, outcome.count, own):
        value = place.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
    return None


def expand(view: View, outcomes: Iterable[Outcome], number_names: Numbers, axes: Sequence[str], x: str) -> list[Fact]:
    """One fact for each outcome, or for each of its entries and scores where the view is over them.

    x: a number that becomes an axis, unless the cell has it.
    """
    wanted, facts, picked = names(number_names), [], select_outcomes(outcomes, view.where)
    if METRIC in axes and not wanted:
        wanted = tuple(dict.fromkeys(name for outcome in picked for name in outcome.scores))
    for outcome in picked:
        entries: Sequence[Mapping[str, Any]] = [{}]
        if view.over and not outcome.error:
            held = outcome.curve if view.over == CURVE else outcome.extra.get(view.over, ())
            # A line of a log without this number (a loss where scores are asked for) is no missing score; of two lines
            # of one step, as a resumed run may write, the later counts.
            kept = [entry for entry in held if any(name in entry for name in wanted)]
            entries = list({entry["step"]: entry for entry in kept}.values()) if view.over == CURVE else kept
        error = outcome.error
        if not entries:
            entries, error = [{}], f"no {' or '.join(wanted)} in its {view.over}"
        for entry in entries:
            cell = {**outcome.cell, **{k: v for k, v in entry.items() if k not in wanted}}
            place = number(outcome, x, entry) if x and x not in cell else None
            if place is not None:
                cell[x] = place
            if METRIC in axes:
                for name in wanted or ("",):
                    if not name:
                        facts.append(Fact(cell, None, error or "no scores", "", outcome.waiting))
                        continue
                    has = name in outcome.scores or error
                    why = error if has else f"no {name} among its scores"
                    facts.append(_fact({**cell, METRIC: name}, outcome, entry, (name,), why))
            else:
                facts.append(_fact(cell, outcome, entry, wanted, error))
    return facts


def _fact(cell: Cell, outcome: Outcome, entry: Mapping[str, Any], wanted: Sequence[str], error: str | None) -> Fact:
    if error:
        return Fact(cell, None, error, "", outcome.waiting)
    for name in wanted:
        value = number(outcome, name, entry)
        if value is not None:
            return Fact(cell, value, None, name) if math.isfinite(value) else Fact(cell, None, f"{name} is {value}", "")
    return Fact(cell, None, f"no {' or '.join(wanted)} among its scores", "")


def _placed(facts: Sequence[Fact], x: str) -> list[Fact]:
    """Failed facts at the x of their other seeds: what a count would have said, had they one."""

    def others(fact: Fact) -> tuple[tuple[str, str], ...]:
        return tuple((axis, str(label)) for axis, label in fact.cell.items() if axis not in (SEED, x))

    known = {others(fact): fact.cell[x] for fact in facts if x in fact.cell} if x else {}
    return [
        replace(fact, cell={**fact.cell, x: known[others(fact)]})
        if x and x not in fact.cell and others(fact) in known
        else fact
        for fact in facts
    ]


def aggregate(view: View, outcomes: Iterable[Outcome], wanted: Numbers, axes: Sequence[str], x: str = "") -> Aggregates:
    """The spreads over seeds of a number (or the first of several) at the labels of the axes.

    Where the view says so, in percent of another place, then averaged over the pooled axes.
    Errors: two outcomes of one seed in one place, with the axes they differ in (an axis that the view forgot).
    """
    inner = tuple(dict.fromkeys((*axes, *view.pooled)))
    facts = expand(view, outcomes, wanted, inner, x)
    facts = _placed(facts, x)
    seeds = list(dict.fromkeys(fact.cell[SEED] for fact in facts if SEED in fact.cell))
    groups: dict[Place, list[Fact]] = {}
    left: list[str] = []
    for fact in facts:
        lacking = [axis for axis in inner if axis not in fact.cell]
        if lacking:
            told = f"no {', '.join(lacking)}" if not fact.error else fact.error
            left.append(f"{describe(fact.cell, view)}: {told}")
        else:
            groups.setdefault(tuple(fact.cell[axis] for axis in inner), []).append(fact)
    spreads = {place: _spread(group, seeds) for place, group in groups.items()}
    metrics = {place: next((f.metric for f in group if f.metric), "") for place, group in groups.items()}
    if view.relative:
        away = [axis for axis in view.relative if axis not in inner]
        if away:
            raise DeltuneError(f"relative to {_said(view.relative)}: the view has no axis {', '.join(away)}.")
        spreads = relative(
            spreads, lambda place: tuple(view.relative.get(a, v) for a, v in zip(inner, place, strict=True))
        )
    if view.pooled:
        spreads, metrics = _pool(view, inner, len(axes), spreads, metrics)
    return Aggregates(tuple(axes), spreads, metrics, tuple(dict.fromkeys(left)))


def relative(spreads: Mapping[Place, Spread], base: Callable[[Place], Place]) -> dict[Place, Spread]:
    """Every spread in percent of the mean at another place; without that, missing with the reason."""
    found = {}
    for place, spread in spreads.items():
        whole = spreads.get(base(place), MISSING).mean
        if spread.mean is None:
            found[place] = spread
        elif not whole:
            reason = f"nothing to compare with at {', '.join(str(label) for label in base(place))}"
            found[place] = Spread(None, failed=(*spread.failed, reason), absent=spread.absent)
        else:
            std = None if spread.std is None else 100 * spread.std / abs(whole)
            found[place] = Spread(100 * spread.mean / whole, std, spread.n, spread.failed, spread.absent)
    return found


def _spread(facts: Sequence[Fact], seeds: Sequence[Any]) -> Spread:
    """Over the seeds of one place. `seeds`: those met anywhere in the view, so that one that was not run is seen."""
    told = [fact.cell.get(SEED) for fact in facts]
    if len(set(map(str, told))) < len(told):
        axes = dict.fromkeys(axis for fact in facts for axis in fact.cell)
        differing = [axis for axis in axes if len({str(fact.cell.get(axis)) for fact in facts}) > 1 and axis != SEED]
        where = f"differ in {', '.join(differing)}: name it in the view" if differing else "are of the same cell"
        raise DeltuneError(f"{len(told)} outcomes would share one place of the view; they {where}.")
    values = [fact.value for fact in facts if fact.value is not None]
    lacking = [fact for fact in facts if fact.error]
    reasons, waiting = (
        _reasons([(fact.cell.get(SEED), str(fact.error)) for fact in lacking if fact.waiting == still], len(seeds) > 1)
        for still in (False, True)
    )
    absent = tuple(f"seed {seed} not run" for seed in seeds if seed not in told) if told != [None] else ()
    absent = (*waiting, *absent)
    if not values:
        return Spread(None, failed=reasons, absent=absent)
    std = statistics.stdev(values) if len(values) > 1 else None
    return Spread(statistics.fmean(values), std, len(values), reasons, absent)


def _reasons(failed: Sequence[tuple[Any, str]], several: bool) -> tuple[str, ...]:
    """Why seeds gave nothing, each reason once with its seeds."""
    found: dict[str, list[str]] = {}
    for seed, why in failed:
        found.setdefault(why, []).append(str(seed))
    plural = {why: "s" if len(own) > 1 else "" for why, own in found.items()}
    return tuple(f"seed{plural[why]} {', '.join(own)}: {why}" if several else why for why, own in found.items())


def _pool(
    view: View, inner: tuple[str, ...], kept: int, spreads: Mapping[Place, Spread], metrics: Mapping[Place, str]
) -> tuple[dict[Place, Spread], dict[Place, str]]:
    """Means over the last axes of the places; what one place lacks of the combinations met anywhere is said."""
    every = list(dict.fromkeys(place[kept:] for place in spreads))
    pooled, named = {}, {}
    for outer in dict.fromkeys(place[:kept] for place in spreads):
        found = {rest: spreads.get((*outer, *rest), MISSING) for rest in every}
        means = [spread.mean for spread in found.values() if spread.mean is not None]
        failed: list[str] = []
        absent: list[str] = []
        for rest, spread in found.items():
            at = ", ".join(view.write(label) for label in rest)
            failed += [f"{at}: {why}" for why in spread.failed]
            absent += [f"{at}: {why}" for why in spread.absent]
        pooled[outer] = Spread(
            statistics.fmean(means) if means else None, None, len(means), tuple(failed), tuple(absent)
        )
        named[outer] = next((metrics[(*outer, *rest)] for rest in every if metrics.get((*outer, *rest))), "")
    return pooled, named


def describe(cell: Cell, view: View | None = None) -> str:
    """A cell in words: "method lora, task sick, seed 0"."""
    return ", ".join(f"{axis} {view.write(label) if view else label}" for axis, label in cell.items())


def _said(selector: Selector) -> str:
    return ", ".join(f"{axis} {label}" for axis, label in selector.items())
