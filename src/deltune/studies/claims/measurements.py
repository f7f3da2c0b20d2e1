"""The numbers that claims compare: scores, ranks, steps to converge, thresholds, changes of norms, transfer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...metrics.registry import METRICS
from ..engine.outcomes import Outcome
from .statistics import average_ranks

CONVERGED = 0.95
"""A curve has converged where it has come this share of the way to the lower of the compared curves' bests."""

NEAR_OUTPUT = 14 / 24
"""The share of layers that are close to the input: of BERT-large's 24, all but layers 15 to 24 (LN §4)."""

TYPES = {
    "sst2": "sentiment", "imdb": "sentiment", "rotten_tomatoes": "sentiment",
    "mnli": "inference", "qnli": "inference", "rte": "inference", "snli": "inference", "cb": "inference",
    "sick": "inference", "mrpc": "paraphrase", "qqp": "paraphrase", "nq_open": "questions",
    "samsum": "summaries", "multi_news": "summaries", "xsum": "summaries",
}  # fmt: skip
"""Task -> its type: those of AP's tasks as in its appendix A, those of others in the same words."""


@dataclass(frozen=True)
class Number:
    """A measured number.

    Attributes:
        value: The number.
        examples: A number for each example of the test split, of which `value` is the mean; None if there are none.
        slack: How far the value may be off for sure, such as half the width of a bracket.
    """

    value: float
    examples: np.ndarray | None = None
    slack: float = 0.0


@dataclass(frozen=True)
class MetricChoice:
    """The score that counts.

    Attributes:
        metric: Its name, or task -> name.
        lower: Whether lower is better, for scores of which `METRICS` does not say so.
    """

    metric: str | Mapping[str, str]
    lower: bool = False

    def for_outcome(self, outcome: Outcome) -> str:
        """Return the name of an outcome's score."""
        if isinstance(self.metric, str):
            return self.metric
        return self.metric.get(str(outcome.cell.get("target", outcome.cell.get("task"))), "no metric")

    def sign(self, metric: str) -> float:
        """Return −1 if lower values of a score are better, else 1."""
        return -1.0 if self.lower or (metric in METRICS and METRICS[metric].better == "lower") else 1.0


Read = Callable[[Sequence[Outcome], MetricChoice], list[Number | str]]
"""Measures several outcomes together: a number for each, or the reason why there is none."""


@dataclass(frozen=True)
class Measurement:
    """A kind of number that outcomes have.

    Attributes:
        read: Measures outcomes.
        unit: The unit of the numbers.
        lower: Whether lower is better.
        over: The axis along which outcomes are measured together, if the number of one depends on the others (a rank
            among methods).
    """

    read: Read
    unit: str
    lower: bool = False
    over: str | None = None


def _each(read: Callable[[Outcome, MetricChoice], Number | str]) -> Read:
    return lambda group, choice: [read(outcome, choice) for outcome in group]


def points(metric: str) -> float:
    """Return the factor that turns a metric's value into points: 100 if its maximum is 1, else 1."""
    return 100.0 if metric in METRICS and METRICS[metric].range[1] == 1.0 else 1.0


def _score(outcome: Outcome, choice: MetricChoice) -> Number | str:
    name = choice.for_outcome(outcome)
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


SCORE = Measurement(_each(_score), "points")
"""The study's metric in points, turned so that higher is better."""


def score(name: str, unit: str = "points", lower: bool = False) -> Measurement:
    """Return the measurement of a score by its name, without any scaling.

    Args:
        name: The score.
        unit: Its unit.
        lower: Whether lower is better.
    """

    def read(outcome: Outcome, choice: MetricChoice) -> Number | str:
        return Number(float(outcome.scores[name])) if name in outcome.scores else f"no {name}"

    return Measurement(_each(read), unit, lower)


def _ranks(group: Sequence[Outcome], choice: MetricChoice) -> list[Number | str]:
    names = sorted({name for outcome in group for name in outcome.scores if name in METRICS})
    lacking = [str(o.cell.get("method")) for o in group if any(name not in o.scores for name in names)]
    if lacking or not names:
        return [f"no rank: metrics are missing of {', '.join(lacking) or 'all'}"] * len(group)
    values = np.array([[outcome.scores[name] for outcome in group] for name in names])
    return [Number(float(r)) for r in average_ranks(values, [METRICS[name].better == "lower" for name in names])]


RANK = Measurement(_ranks, "ranks", lower=True, over="method")
"""The rank among all methods of the same task and seed, averaged over all metrics (LN table 2)."""


def _steps(group: Sequence[Outcome], choice: MetricChoice) -> list[Number | str]:
    curves = [_curve(outcome, choice) for outcome in group]
    if not all(curves):
        return ["no curve of evaluations"] * len(group)
    lowest = min(value for curve in curves for _, value in curve)
    target = lowest + CONVERGED * (min(max(value for _, value in curve) for curve in curves) - lowest)
    reached = [next(step for step, value in curve if value >= target) for curve in curves]
    return [Number(math.log2(max(1, step))) for step in reached]


def _curve(outcome: Outcome, choice: MetricChoice) -> list[tuple[int, float]]:
    """Return (step, value) at each validation, with higher being better; of the loss if the metric is not logged."""
    metric = choice.for_outcome(outcome)
    name, sign = f"eval_{metric}", choice.sign(metric)
    if not any(name in line for line in outcome.curve):
        name, sign = "eval_loss", -1.0
    return [(int(line["step"]), sign * float(line[name])) for line in outcome.curve if name in line]


STEPS = Measurement(_steps, "log2 of steps", lower=True, over="structure")
"""log2 of the first validated step at which a curve has come 95 % of the way to the lower of the structures' bests.

The target is the same for both structures, else a curve that ends low would converge early. A difference of 1 means
half the steps.
"""


def threshold(name: str) -> Measurement:
    """Return the measurement of a threshold: log10 of the middle of its bracket, with half its width as slack.

    Args:
        name: The key of the bracket [N that is too few, N that is enough] in an outcome's extra: "low" or "high".
    """

    def read(outcome: Outcome, choice: MetricChoice) -> Number | str:
        bounds = outcome.extra.get(name)
        if bounds is None or len(bounds) != 2 or bounds[1] is None or not math.isfinite(bounds[1]):
            return f"the {name} threshold was not reached"
        low, high = (math.log10(max(1.0, bound or 0.0)) for bound in bounds)
        return Number((low + high) / 2, slack=(high - low) / 2)

    return Measurement(_each(read), "decades of parameters", lower=True)


def _relative(group: Sequence[Outcome], choice: MetricChoice) -> list[Number | str]:
    originals = [o for o in group if o.cell.get("task") == o.cell.get("target") and choice.for_outcome(o) in o.scores]
    if len(originals) != 1 or originals[0].scores[choice.for_outcome(originals[0])] == 0:
        return ["no score of a model trained on the target itself"] * len(group)
    full = originals[0].scores[choice.for_outcome(originals[0])]
    return [
        Number(100 * o.scores[choice.for_outcome(o)] / full)
        if choice.for_outcome(o) in o.scores
        else f"no {choice.for_outcome(o)}"
        for o in group
    ]


RELATIVE = Measurement(_relative, "% of the original", over="task")
"""Zero-shot score on a target in percent of the score of the model trained on it (AP figure 9)."""


def _size(outcome: Outcome, choice: MetricChoice) -> Number | str:
    return Number(float(outcome.count["method"])) if "method" in outcome.count else "no count"


COUNT = Measurement(_each(_size), "scalars", lower=True)
"""The number of scalars that the method trains, its head aside."""


def with_derived_axes(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return outcomes with the axes that follow from their contents.

    An outcome with changes of norms (extra["changes"]) becomes one for each of "layers" (near input, near output) ×
    "term" × "module", with the score "change", the mean of the changes. An outcome with the axes "task" and "target"
    gets the axis "pair": itself, same type, other type. Of a search along N only the thresholds are kept, not the runs.
    """
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
