"""Comparisons of cells: the numbers that claims compare, and their paired effects for each setting and seed.

The numbers are scores, ranks, steps to converge, thresholds, changes of norms and transfer. Where an effect cannot be
computed there are the reasons.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...errors import DeltuneError, check_booleans
from ...train import METRICS, RunConfig
from ..jobs.job import Cell, Outcome
from .selectors import (
    DATA_AXES,
    EVERY,
    FLOOR,
    LARGEST,
    SECOND_SMALLEST,
    SEED,
    SMALLEST,
    CellSelector,
    Key,
    Names,
    SymbolicLabel,
    describe_cell,
)
from .statistics import average_ranks, slope_weights

NOT_RUN = "not run yet"
"""Beginning of a reason that a run will remove."""

NOTHING_TO_SEE = "nothing to see"
"""Beginning of a reason that further runs of the same kind do not remove."""

CONVERGED = 0.95
"""A curve has converged where it has come this share of the way to the lower of the compared curves' bests."""

MIN_VALIDATIONS = 8
"""The fewest validations of a run from which a time to converge is read: with fewer, their spacing decides it."""

NEAR_OUTPUT = 14 / 24
"""The share of layers that are close to the input: of BERT-large's 24, all but layers 15 to 24 (LN §4)."""

TYPES = {
    "sst2": "sentiment", "imdb": "sentiment", "rotten_tomatoes": "sentiment",
    "mnli": "inference", "qnli": "inference", "rte": "inference", "snli": "inference", "cb": "inference",
    "sick": "inference", "mrpc": "paraphrase", "qqp": "paraphrase", "nq_open": "questions",
    "samsum": "summaries", "multi_news": "summaries", "xsum": "summaries",
}  # fmt: skip
"""Task -> its type: as in AP's appendix A, and for other papers' tasks in the same words."""


@dataclass(frozen=True)
class Number:
    """A measured number.

    `examples` has a number for each example of the test split, of which `value` is the mean. `slack` is how far the
    value may be off for sure, such as half the width of a bracket. `weight` is how much it counts in a mean over
    settings; 1 for all but ranks.
    """

    value: float
    examples: np.ndarray | None = None
    slack: float = 0.0
    weight: float = 1.0


@dataclass(frozen=True)
class MetricChoice:
    """The score that counts.

    It is a score's name, or task -> name; `lower` is for scores of which `METRICS` does not say so.
    """

    metric: str | Mapping[str, str]
    lower: bool = False

    def metric_name(self, outcome: Outcome) -> str:
        """Return the name of an outcome's score."""
        if isinstance(self.metric, str):
            return self.metric
        return self.metric.get(str(outcome.cell.get("target", outcome.cell.get("task"))), "no metric")

    def sign(self, metric: str) -> float:
        """Return −1 if lower values of a score are better, else 1."""
        return -1.0 if self.lower or (metric in METRICS and METRICS[metric].better == "lower") else 1.0


GUESSES_BELOW = 1.645
"""√n · Matthews' correlation over n rows is about standard normal if answers and labels are independent; a guess lies
below this in 95 % of cases."""


def can_be_at_chance(outcome: Outcome) -> bool:
    """Return whether it makes sense to ask of a run whether it `is_at_chance`.

    It makes none for runs on another task than their own, nor for runs of a search along N, which begins at chance.
    """
    cell = outcome.cell
    return cell.get("target", cell.get("task")) == cell.get("task") and (
        "N" not in cell or cell.get("method") == "full"
    )


def is_at_chance(outcome: Outcome) -> bool:
    """Return whether a run is no better than chance on the test split of its own task."""
    return can_be_at_chance(outcome) and is_a_guess(outcome)


def is_a_guess(outcome: Outcome) -> bool:
    """Return whether scores are no better than those of a guess, on whatever task.

    A classifier is, if its Matthews correlation is what a guess may have. Where its rows are not stored they are as
    many as were asked for; without a number it has to be 0, as it is for the same answer to every row. A tagger or a
    writer of texts is, if it gets nothing right.
    """
    scores = outcome.scores
    rows = max(map(len, outcome.examples.values()), default=0) or int(outcome.spec.get("test_rows") or 0)
    matthews = scores.get("matthews")
    if matthews is not None:
        return matthews == 0 or (rows > 0 and math.sqrt(rows) * matthews < GUESSES_BELOW)
    return any(scores.get(name) == 0 for name in ("entity_f1", "exact"))


def ends_at_its_best(outcome: Outcome, choice: MetricChoice) -> bool:
    """Return whether the best of several validations of a run is its last one: with more steps it may be better."""
    steps = [line["step"] for line in outcome.curve if any(str(name).startswith("eval_") for name in line)]
    return len(steps) > 1 and outcome.extra.get("best", {}).get("step") == steps[-1]


Read = Callable[[Sequence[Outcome], MetricChoice], list[Number | str]]
"""Measures several outcomes together: a number for each, or the reason why there is none."""


@dataclass(frozen=True)
class Measurement:
    """A kind of number that outcomes have.

    Attributes:
        read: Measures outcomes.
        unit: The unit of the numbers.
        lower: Whether lower is better.
        over: The axes along which outcomes are measured together, if the number of one depends on the others (a rank
            among methods).
        name: What is measured; empty for the score that counts, which is named after the metric.
        is_reference: Whether an outcome is what the others of its group are measured by, such as full tuning, so that
            it is compared with them.
        is_capped: Whether an outcome's number is one that the number of training steps decided.
        only_uncapped: Whether numbers that the steps decided say nothing at all; others still speak for a claim.
    """

    read: Read
    unit: str
    lower: bool = False
    over: tuple[str, ...] = ()
    name: str = ""
    is_reference: Callable[[Outcome], bool] = lambda outcome: False
    is_capped: Callable[[Outcome, MetricChoice], bool] = lambda outcome, choice: False
    only_uncapped: bool = False


def _each(read: Callable[[Outcome, MetricChoice], Number | str]) -> Read:
    return lambda group, choice: [read(outcome, choice) for outcome in group]


def points(metric: str) -> float:
    """Return the factor that turns a metric's value into points: 100 if its maximum is 1, else 1."""
    return 100.0 if metric in METRICS and METRICS[metric].range[1] == 1.0 else 1.0


def _score(outcome: Outcome, choice: MetricChoice) -> Number | str:
    name = choice.metric_name(outcome)
    if name not in outcome.scores:
        return f"no {name}"
    scale = points(name) * choice.sign(name)
    value, per_example = outcome.scores[name] * scale, outcome.examples.get(name)
    if per_example is None or len(per_example) < 2:
        return Number(value)
    examples = np.asarray(per_example, dtype=float) * scale
    if abs(float(examples.mean()) - value) > 1e-6 * max(1.0, abs(value)):
        return Number(value)  # a metric that is not the mean of these numbers: only seeds show its spread
    return Number(value, examples)


SCORE = Measurement(_each(_score), "points", is_capped=ends_at_its_best)
"""The study's metric in points, turned so that higher is better."""


@check_booleans
def score(name: str, unit: str = "points", *, lower: bool = False, title: str = "") -> Measurement:
    """Return the measurement of a score by its name, without any scaling."""

    def read(outcome: Outcome, choice: MetricChoice) -> Number | str:
        return Number(float(outcome.scores[name])) if name in outcome.scores else f"no {name}"

    return Measurement(_each(read), unit, lower, name=title or name)


def _ranks(group: Sequence[Outcome], choice: MetricChoice) -> list[Number | str]:
    by_task: dict[Any, list[Outcome]] = {}
    for outcome in group:
        by_task.setdefault(outcome.cell.get("task"), []).append(outcome)
    names = {
        task: sorted({name for one in outcomes for name in one.scores if name in METRICS})
        for task, outcomes in by_task.items()
    }
    usual = sum(map(len, names.values())) / len(names)
    numbers: dict[int, Number | str] = {}
    for task, outcomes in by_task.items():
        lacking = [str(o.cell.get("method")) for o in outcomes if any(name not in o.scores for name in names[task])]
        if lacking or not names[task]:
            reason = f"no rank: metrics are missing of {', '.join(lacking) or 'all'}"
            numbers |= {id(one): reason for one in outcomes}
            continue
        values = np.array([[outcome.scores[name] for outcome in outcomes] for name in names[task]])
        ranks = average_ranks(values, [METRICS[name].better == "lower" for name in names[task]])
        weight = len(names[task]) / usual
        numbers |= {id(one): Number(float(rank), weight=weight) for one, rank in zip(outcomes, ranks, strict=True)}
    return [numbers[id(outcome)] for outcome in group]


RANK = Measurement(
    _ranks, "ranks", lower=True, over=("method", "task"), name="average rank", is_capped=ends_at_its_best
)
"""The rank among all methods of the same task and seed, averaged over metrics.

A task counts by its number of metrics, so that the mean over tasks is the mean over all metrics (LN table 2).
"""


def _steps(group: Sequence[Outcome], choice: MetricChoice) -> list[Number | str]:
    curves = [_curve(outcome, choice) for outcome in group]
    if not all(curves):
        return ["no curve of evaluations"] * len(group)
    lowest = min(value for curve in curves for _, value in curve)
    highest = min(max(value for _, value in curve) for curve in curves)
    return [Number(math.log2(max(1, _step_to_converge(curve, lowest, highest)))) for curve in curves]


def _step_to_converge(curve: Sequence[tuple[int, float]], lowest: float, highest: float) -> int:
    """Return the step at which a curve has first come `CONVERGED` of the way from one value to another."""
    return next(step for step, value in curve if value >= lowest + CONVERGED * (highest - lowest))


def _curve(outcome: Outcome, choice: MetricChoice) -> list[tuple[int, float]]:
    """Return (step, value) at each validation, with higher being better; of the loss if the metric is not logged."""
    metric = choice.metric_name(outcome)
    name, sign = f"eval_{metric}", choice.sign(metric)
    if not any(name in line for line in outcome.curve):
        name, sign = "eval_loss", -1.0
    return [(int(line["step"]), sign * float(line[name])) for line in outcome.curve if name in line]


def _converges_last(outcome: Outcome, choice: MetricChoice) -> bool:
    """Return whether a curve comes 95 % of the way to its best only at the last of its validations, or has too few."""
    curve = _curve(outcome, choice)
    values = [value for _, value in curve]
    return 0 < len(curve) < MIN_VALIDATIONS or (
        bool(curve) and _step_to_converge(curve, min(values), max(values)) == curve[-1][0]
    )


STEPS = Measurement(
    _steps, "doublings", lower=True, over=("structure",), name="steps to converge", is_capped=_converges_last,
    only_uncapped=True,
)  # fmt: skip
"""log2 of the first validated step at which a curve has come 95 % of the way to the lower of the structures' bests.

The target is the same for both structures, else a curve that ends low would converge early. A difference of 1 means
half the steps.
"""


def _times(group: Sequence[Outcome], choice: MetricChoice) -> list[Number | str]:
    seconds = [_seconds_to_converge(outcome, choice) for outcome in group]
    full = [time for outcome, time in zip(group, seconds, strict=True) if outcome.cell.get("method") == "full"]
    if len(full) != 1 or not full[0]:
        return ["no time of full tuning"] * len(group)
    return [Number(100 * time / full[0]) if time else "no curve of evaluations, or no time" for time in seconds]


def _seconds_to_converge(outcome: Outcome, choice: MetricChoice) -> float | None:
    curve, seconds = _curve(outcome, choice), _training_seconds(outcome)
    if not curve or not seconds:
        return None
    values = [value for _, value in curve]
    return seconds * _step_to_converge(curve, min(values), max(values)) / max(step for step, _ in curve)


def _training_seconds(outcome: Outcome) -> float | None:
    """Return the seconds that a run trained: on a CPU the processor's, since other runs train beside it."""
    on_cpu = outcome.extra.get("environment", {}).get("device") == "cpu"
    return outcome.extra.get("cpu_seconds") if on_cpu else outcome.seconds


TIME = Measurement(
    _times, "% of full tuning's", lower=True, over=("method",), name="training time to converge",
    is_reference=lambda outcome: outcome.cell.get("method") == "full", is_capped=_converges_last, only_uncapped=True,
)  # fmt: skip
"""Training time until a curve has come 95 % of the way to its best, in percent of full tuning's of the same seed.

On a CPU it is the time of the processor, which other programs do not lengthen.
"""


def threshold(name: str) -> Measurement:
    """Return the measurement of a threshold: log10 of the middle of its bracket, with half its width as slack."""

    def read(outcome: Outcome, choice: MetricChoice) -> Number | str:
        bounds = outcome.extra.get(name)
        if bounds is None or len(bounds) != 2 or bounds[1] is None or not math.isfinite(bounds[1]):
            return f"{NOTHING_TO_SEE}: the {name} threshold was not reached"
        low, high = (math.log10(max(1.0, bound or 0.0)) for bound in bounds)
        return Number((low + high) / 2, slack=(high - low) / 2)

    return Measurement(_each(read), "powers of ten", lower=True, name=f"{name} threshold of N")


def _after_low(outcome: Outcome, choice: MetricChoice) -> Number | str:
    share = outcome.extra.get("after low")
    return Number(share) if isinstance(share, float) else f"{NOTHING_TO_SEE}: the low threshold was not reached"


AFTER_LOW = Measurement(_each(_after_low), "% of full tuning's score", name="score right after the low threshold")


def _rate(outcome: Outcome, choice: MetricChoice) -> Number | str:
    if "method" not in outcome.spec:
        return "no learning rate"
    searched = outcome.extra.get("best", {}).get("lr")
    return Number(math.log10(searched or RunConfig.from_canonical(outcome.spec).optim.rate))


RATE = Measurement(_each(_rate), "powers of ten", name="learning rate")
"""log10 of the learning rate that a run has, the best of those that were tried."""


def _is_original(outcome: Outcome) -> bool:
    return outcome.cell.get("task") == outcome.cell.get("target")


def _zero_shot(group: Sequence[Outcome], choice: MetricChoice) -> list[Number | str]:
    originals = [outcome for outcome in group if _is_original(outcome) and "matthews" in outcome.scores]
    if len(originals) != 1:
        return ["no score of a model trained on the target itself"] * len(group)
    if is_a_guess(originals[0]):
        return [f"{NOTHING_TO_SEE}: what was trained on the target is no better than chance"] * len(group)
    return [Number(100 * o.scores["matthews"]) if "matthews" in o.scores else "no matthews" for o in group]


ZERO_SHOT = Measurement(
    _zero_shot, "points of correlation", over=("task",), name="zero-shot Matthews correlation",
    is_reference=_is_original,
)  # fmt: skip
"""Matthews' correlation on a target that was not trained on, where what was trained on it is better than chance.

It is 0 for a guess whatever the labels' shares; accuracies, as in AP figure 9, would compare those shares.
"""


def _size(outcome: Outcome, choice: MetricChoice) -> Number | str:
    return Number(float(outcome.count["method"])) if "method" in outcome.count else "no count"


COUNT = Measurement(_each(_size), "scalars", lower=True, name="trained parameters")
"""The number of scalars that the method trains, its head aside."""


def with_derived_axes(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return outcomes with the axes that follow from their contents, those of floors left out.

    An outcome with changes of norms (extra["changes"]) becomes one for each of "layers" (near input, near output) ×
    "term" × "module", with the score "change", the mean of the changes. An outcome with the axes "task" and "target"
    gets the axis "pair": itself, same type, other type. Of a search along N only the thresholds are kept, not the runs.
    """
    outcomes = [outcome for outcome in outcomes if FLOOR not in outcome.cell]
    if any("N" not in outcome.cell for outcome in outcomes):
        outcomes = [outcome for outcome in outcomes if "N" not in outcome.cell]
    change_keys = sorted({key for outcome in outcomes for key in _changes(outcome)})
    derived: list[Outcome] = []
    for outcome in outcomes:
        if change_keys and (outcome.error is not None or "changes" in outcome.extra):
            changes = _changes(outcome)
            for key in change_keys:
                cell = {**outcome.cell, **dict(zip(("layers", "term", "module"), key, strict=True))}
                scores = {"change": changes[key]} if key in changes else {}
                derived.append(replace(outcome, cell=cell, scores=scores, examples={}))
        elif {"task", "target"} <= outcome.cell.keys():
            derived.append(replace(outcome, cell={**outcome.cell, "pair": _pair(outcome.cell)}))
        else:
            derived.append(outcome)
    return derived


def _changes(outcome: Outcome) -> dict[tuple[str, str, str], float]:
    """Return (layers, term, module) -> mean change; norms outside the layers, such as the embeddings', are left out."""
    lines = [line for line in outcome.extra.get("changes", ()) if isinstance(line.get("layer"), int)]
    order = {layer: i for i, layer in enumerate(sorted({line["layer"] for line in lines}))}
    values: dict[tuple[str, str, str], list[float]] = {}
    for line in lines:
        near = "near output" if order[line["layer"]] >= NEAR_OUTPUT * len(order) else "near input"
        values.setdefault((near, str(line["term"]), str(line["module"])), []).append(float(line["value"]))
    return {key: sum(changes) / len(changes) for key, changes in values.items()}


def _pair(cell: Mapping[str, Any]) -> str:
    if cell["task"] == cell["target"]:
        return "itself"
    kinds = TYPES.get(cell["task"]), TYPES.get(cell["target"])
    return "same type" if kinds[0] is not None and kinds[0] == kinds[1] else "other type"


class MissingCells(Exception):
    """A comparison cannot be made, for these reasons; `comparisons` are others of the same claim that can."""

    def __init__(self, reasons: Sequence[str], comparisons: Sequence[Comparison | Exact] = ()) -> None:
        self.comparisons = list(comparisons)
        self.reasons = list(dict.fromkeys(reasons))
        more = len(self.reasons) - 3
        super().__init__("; ".join(self.reasons[:3]) + (f"; and {more} more" if more > 0 else ""))

    @property
    def nothing_to_see(self) -> bool:
        """True if there is nothing to see in what was run, as opposed to something that is missing."""
        return all(reason.startswith(NOTHING_TO_SEE) for reason in self.reasons)


class Cells:
    """The outcomes of a study, by cell; two of one cell are a `DeltuneError`.

    `count_only` are outcomes whose scores decide nothing; `counted` are the cells with them, for numbers of parameters.
    """

    def __init__(
        self,
        outcomes: Sequence[Outcome],
        metric: MetricChoice,
        names: Names | None = None,
        count_only: Sequence[Outcome] = (),
    ) -> None:
        self.count_only = count_only
        self.counted: Cells = Cells([*outcomes, *count_only], metric, names) if count_only else self
        self.outcomes, self.metric, self.names = list(outcomes), metric, names or {}
        self.axes = list(dict.fromkeys(axis for outcome in outcomes for axis in outcome.cell))
        self.cells: dict[Key, Outcome] = {}
        for outcome in self.outcomes:
            key = self._key(outcome.cell, self.axes)
            if key in self.cells:
                raise DeltuneError(f"two outcomes of one cell: {describe_cell(outcome.cell)}.")
            self.cells[key] = outcome
        self.used: dict[Key, Outcome] = {}
        """The outcomes that were measured for a claim."""
        self._read: dict[tuple[Measurement, Key], tuple[Number | str, list[Outcome]]] = {}
        self._following: dict[tuple[str, tuple[str, ...]], bool] = {}

    def excluding(self, exclude: CellSelector) -> Cells:
        """Return the cells without those that have one of the labels."""
        if not exclude:
            return self
        scored, count_only = (
            [o for o in outcomes if not any(o.cell.get(a) in _as_labels(v) for a, v in exclude.items())]
            for outcomes in (self.outcomes, self.count_only)
        )
        return Cells(scored, self.metric, self.names, count_only)

    def describe(self, cell: Mapping[str, Any]) -> str:
        """Describe a cell or a selection of cells in the study's words."""
        return describe_cell(cell, self.names)

    def describe_setting(self, setting: Key) -> str:
        """Describe labels that are not compared, without those that follow from others, such as a task's only model."""
        labels = dict(setting)
        for axis in ("family", "kind", "model"):
            rest = tuple(other for other in labels if other != axis)
            if axis in labels and rest and self._follows(axis, rest):
                del labels[axis]
        return self.describe(labels)

    def _follows(self, axis: str, others: tuple[str, ...]) -> bool:
        """Return whether the labels on other axes leave one label on an axis."""
        if (axis, others) not in self._following:
            seen = {(self._key(o.cell, others), o.cell[axis]) for o in self.outcomes if axis in o.cell}
            self._following[axis, others] = len({labels for labels, _ in seen}) == len(seen)
        return self._following[axis, others]

    def metrics(self, settings: Iterable[Key]) -> str:
        """Return the scores that count in some settings, such as "entity F1 and accuracy"."""
        tasks = {dict(setting).get("target", dict(setting).get("task")) for setting in settings}
        metrics = dict.fromkeys(
            self.metric.metric_name(outcome)
            for outcome in self.outcomes
            if None in tasks or outcome.cell.get("target", outcome.cell.get("task")) in tasks
        )
        return " and ".join(self.names.get(name, name) for name in metrics)

    def labels(self, axis: str, selector: CellSelector) -> list[Any]:
        """Return the labels of an axis among the selected cells, in order of appearance."""
        return list(dict.fromkeys(o.cell[axis] for o in self.outcomes if axis in o.cell and has_labels(o, selector)))

    def strata(self, selectors: Sequence[CellSelector]) -> Iterator[tuple[Key, list[Outcome]]]:
        """Yield every setting of the axes that a comparison does not name, with its outcomes."""
        compared = {SEED}.union(*selectors)
        missing = sorted(compared - {*self.axes, SEED})
        if missing:
            raise MissingCells([f"the outcomes have no axis {', '.join(map(repr, missing))}"])
        free = [axis for axis in self.axes if axis not in compared]
        by_setting: dict[Key, list[Outcome]] = {}
        for outcome in self.outcomes:
            if any(has_labels(outcome, selector) for selector in selectors):
                by_setting.setdefault(self._key(outcome.cell, free), []).append(outcome)
        if not by_setting:
            raise MissingCells([f"no result of {self.describe(selector)}" for selector in selectors])
        yield from by_setting.items()

    def select(self, selector: CellSelector, members: Sequence[Outcome], setting: Key) -> list[Cell]:
        """Return the cells, without their seeds, that a selector means in one stratum."""
        matches = [o for o in members if has_labels(o, selector)]
        for axis, label in selector.items():
            if isinstance(label, SymbolicLabel) and label is not EVERY and matches:
                if len({o.cell[axis] for o in self.outcomes if axis in o.cell}) < 2:
                    raise MissingCells([f"only one {axis} in the study: no {label}"])
                positions = {of: self.position(axis, of) for of in dict.fromkeys(o.cell[axis] for o in matches)}
                at = {SMALLEST: 0, SECOND_SMALLEST: 1, LARGEST: -1}[label]
                chosen = sorted(set(positions.values()))[at:][:1]
                matches = [o for o in matches if positions[o.cell[axis]] in chosen]
        if not matches:
            raise MissingCells([f"no result of {self.describe({**dict(setting), **selector})}"])
        open_axes = [axis for axis, label in selector.items() if isinstance(label, SymbolicLabel)]
        fixed = {axis: _as_labels(label) for axis, label in selector.items() if axis not in open_axes}
        keys = dict.fromkeys(self._key(o.cell, open_axes) for o in matches)
        return [
            {**dict(setting), **dict(zip(fixed, labels, strict=True)), **dict(key)}
            for key in keys
            for labels in itertools.product(*fixed.values())
        ]

    def position(self, axis: str, label: Any) -> float:
        """Return a label's position on its axis: the size of a model, elsewhere the label's number ("0.5%" is 0.5).

        That of two numbers ("2.4 to 3.6") is their geometric mean.
        """
        if axis != "model":
            number = r"([0-9.]+(?:[eE][-+]?[0-9]+)?)"
            match = re.fullmatch(rf"\s*{number}(?: to {number})?\s*%?\s*", str(label))
            if not match:
                raise MissingCells([f"labels of {axis!r} are not in an order: {label!r}"])
            return math.sqrt(float(match[1]) * float(match[2])) if match[2] else float(match[1])
        if label not in self._model_sizes:
            model = self.describe({axis: label})
            if all(outcome.waiting for outcome in self.outcomes if outcome.cell.get(axis) == label):
                raise MissingCells([f"{NOT_RUN}: all {model}"])
            raise MissingCells([f"the size of the model is not known: {model}"])
        return self._model_sizes[label]

    @functools.cached_property
    def _model_sizes(self) -> dict[Any, float]:
        sizes: dict[Any, float] = {}
        for outcome in self.outcomes:
            size = outcome.extra.get("parameters") or outcome.count.get("denominator_size")
            if "model" in outcome.cell and size:
                sizes.setdefault(outcome.cell["model"], float(size))
        return sizes

    def measure(self, measurement: Measurement, cell: Cell, seed: Any) -> Number:
        """Return what a measurement gives for one run: the cell (its labels, such as method and task) with one seed."""
        labels = {**cell, SEED: seed}
        full = {axis: labels[axis] for axis in self.axes if labels.get(axis) is not None}
        outcome = self.cells.get(self._key(full, self.axes))
        if outcome is None:
            raise MissingCells([f"missing: {self.describe(full)}"])
        if outcome.error is not None:
            if outcome.waiting:
                raise MissingCells([f"{NOT_RUN}: {self.describe(full)}"])
            raise MissingCells([f"failed: {self.describe(full)} ({(outcome.error.splitlines() or [''])[0]})"])
        key = (measurement, self._key(full, self.axes))
        self.used[key[1]] = outcome
        if key not in self._read:
            group = [outcome]
            if measurement.over:
                alike = [axis for axis in self.axes if axis not in (*measurement.over, "pair")]
                same = self._key(full, alike)
                group = [o for o in self.outcomes if self._key(o.cell, alike) == same]
            references = [member for member in group if measurement.is_reference(member)]
            for member, number in zip(group, measurement.read(group, self.metric), strict=True):
                self._read[measurement, self._key(member.cell, self.axes)] = number, references
        number, references = self._read[key]
        self.used |= {self._key(reference.cell, self.axes): reference for reference in references}
        if isinstance(number, str):
            raise MissingCells([f"{number}: {self.describe(full)}"])
        return number

    @staticmethod
    def _key(cell: Cell, axes: Sequence[str]) -> Key:
        return tuple((axis, cell[axis]) for axis in axes if cell.get(axis) is not None)


def seeds_of(members: Sequence[Outcome]) -> list[Any]:
    """Return the seeds of some outcomes, each once."""
    return list(dict.fromkeys(outcome.cell.get(SEED) for outcome in members))


def _as_labels(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def has_labels(outcome: Outcome, selector: CellSelector) -> bool:
    """Return whether an outcome has the labels of a selector; a symbolic label is any label of its axis."""
    return all(
        label is EVERY
        or (axis in outcome.cell and (isinstance(label, SymbolicLabel) or outcome.cell[axis] in _as_labels(label)))
        for axis, label in selector.items()
    )


Effects = Mapping[Key, Mapping[Hashable, Number]]
"""Setting (labels on the axes that are not compared) -> seed -> effect."""

Term = tuple[float, Cell]
"""A weight and the cell whose number it multiplies."""


@dataclass(frozen=True)
class Comparison:
    """A claim that the mean effect lies between two bounds.

    `is_difference` is False for numbers of one side; `is_trend` says that the effect is a change along an axis.
    """

    text: str
    effects: Effects
    low: float
    high: float
    measurement: Measurement
    is_difference: bool = True
    is_trend: bool = False

    @property
    def borders(self) -> tuple[float, ...]:
        """The finite bounds."""
        return tuple(border for border in (self.low, self.high) if math.isfinite(border))


@dataclass(frozen=True)
class Exact:
    """A claim that one method trains at most `maximum` times as many parameters as another, which has no error.

    `depends_on_depth` says whether a model's number of layers decides whether it is true.
    """

    text: str
    value: float
    maximum: float
    depends_on_depth: bool = False


def weighted_effects(
    cells: Cells,
    selectors: Sequence[CellSelector],
    terms: Callable[[Key, Sequence[Outcome]], list[Term]],
    measurement: Measurement,
) -> Effects:
    """Return a weighted sum of cells for each setting and seed.

    A setting in which there is nothing to see under half of the seeds is left out.
    """
    effects: dict[Key, dict[Hashable, Number]] = {}
    reasons: list[str] = []
    nothing: list[str] = []
    for setting, members in cells.strata(selectors):
        try:
            weighted = terms(setting, members)
        except MissingCells as lacking:
            reasons += lacking.reasons
            continue
        of_seeds: dict[Hashable, Number] = {}
        for seed in (seeds := seeds_of(members)):
            try:
                of_seeds[seed] = weighted_sum(cells, weighted, measurement, seed)
            except MissingCells as lacking:
                (nothing if lacking.nothing_to_see else reasons).extend(lacking.reasons)
        if 2 * len(of_seeds) > len(seeds):
            effects[setting] = of_seeds
    if reasons or not effects:
        raise MissingCells(reasons or nothing)
    return effects


def mean_terms(cells: Sequence[Cell], weight: float = 1.0) -> list[Term]:
    """Return the terms of weight · mean(cells)."""
    return [(weight / len(cells), cell) for cell in cells]


def weighted_sum(cells: Cells, terms: Sequence[Term], measurement: Measurement, seed: Hashable) -> Number:
    """Return Σ weight · number of the terms under one seed."""
    numbers: list[tuple[float, Number]] = []
    reasons: list[str] = []
    for weight, cell in terms:
        try:
            numbers.append((weight, cells.measure(measurement, cell, seed)))
        except MissingCells as lacking:
            reasons += lacking.reasons
    if reasons:
        raise MissingCells(reasons)
    # Examples of two test splits are no pairs, even where they are equally many.
    apart = {tuple(cell.get(axis) for axis in DATA_AXES) for _, cell in terms}
    return combine_numbers(numbers, aligned=len(apart) == 1)


@check_booleans
def combine_numbers(terms: Sequence[tuple[float, Number]], *, aligned: bool = True) -> Number:
    """Return Σ weight · number, also of their examples if all numbers have the same ones.

    Numbers of one task count alike in a mean over settings, and so does their sum. Where they do not, the sum is of
    what they count for. Numbers are `aligned` if they are of one test split.
    """
    counted_for = {number.weight for _, number in terms}
    if len(counted_for) > 1:
        terms = [(weight * number.weight, number) for weight, number in terms]
    value = sum(weight * number.value for weight, number in terms)
    slack = sum(abs(weight) * number.slack for weight, number in terms)
    rows = [weight * number.examples for weight, number in terms if number.examples is not None]
    same = aligned and len(rows) == len(terms) and len({len(row) for row in rows}) == 1
    weight = counted_for.pop() if len(counted_for) == 1 else 1.0
    return Number(value, np.sum(rows, axis=0) if same else None, slack, weight)


def trend_weights(
    cells: Cells, axis: str, selector: CellSelector, members: Sequence[Outcome], setting: Key
) -> list[tuple[Any, float]]:
    """Return the labels of an ordered axis in one stratum, each with its weight in the fitted change along the axis.

    That is the rise of the least-squares line, on the logarithm of the labels' positions, from the first to the last.
    """
    selected = cells.select({**selector, axis: EVERY}, members, setting)
    labels = list(dict.fromkeys(cell[axis] for cell in selected))
    places = [cells.position(axis, label) for label in labels]
    if min(places) <= 0 or len(set(places)) < 2:
        raise MissingCells(
            [f"a trend needs two sizes of {axis}" + (f" {cells.describe(dict(setting))}" if setting else "")]
        )
    logs = [math.log(position) for position in places]
    return list(zip(labels, (max(logs) - min(logs)) * slope_weights(logs), strict=True))
