"""Numbers of outcomes that claims compare: scores, ranks, steps to converge, thresholds, changes of terms, transfer."""

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
"""A curve has converged where it has come this share of the way that both of two curves go."""

NEAR_OUTPUT = 14 / 24
"""LN §4: of BERT-large's 24 layers, 15 to 24 are close to the output."""

TYPES = {
    "sst2": "sentiment", "imdb": "sentiment", "rotten_tomatoes": "sentiment",
    "mnli": "inference", "qnli": "inference", "rte": "inference", "snli": "inference", "cb": "inference",
    "sick": "inference", "mrpc": "paraphrase", "qqp": "paraphrase", "nq_open": "questions",
    "samsum": "summaries", "multi_news": "summaries", "xsum": "summaries",
}  # fmt: skip
"""AP appendix A: the types of its tasks, and those of the others by the same words."""


@dataclass(frozen=True)
class Number:
    """A number. examples: one for each of the test split, with it as their mean. slack: how far it may be off."""

    value: float
    examples: np.ndarray | None = None
    slack: float = 0.0


@dataclass(frozen=True)
class MetricChoice:
    """The study's metric, in general or for each task. lower: lower is better, even if METRICS does not say so."""

    metric: str | Mapping[str, str]
    lower: bool = False

    def of(self, outcome: Outcome) -> str:
        if isinstance(self.metric, str):
            return self.metric
        return self.metric.get(str(outcome.cell.get("target", outcome.cell.get("task"))), "no metric")

    def sign(self, metric: str) -> float:
        """−1 where lower values are better."""
        return -1.0 if self.lower or (metric in METRICS and METRICS[metric].better == "lower") else 1.0


Read = Callable[[Sequence[Outcome], MetricChoice], list[Number | str]]


@dataclass(frozen=True)
class Reading:
    """A number of each of several outcomes, or why there is none.

    unit: what it is counted in. lower: lower is better. over: the axis along which outcomes are read together, where
    the number of one depends on the others (a rank among methods).
    """

    read: Read
    unit: str
    lower: bool = False
    over: str | None = None


def _each(read: Callable[[Outcome, MetricChoice], Number | str]) -> Read:
    return lambda group, asked: [read(outcome, asked) for outcome in group]


def points(metric: str) -> float:
    """What turns a metric's value into points: 100 where it lies in [0, 1] or [−1, 1], else 1."""
    return 100.0 if metric in METRICS and METRICS[metric].range[1] == 1.0 else 1.0


def _score(outcome: Outcome, asked: MetricChoice) -> Number | str:
    metric = asked.of(outcome)
    if metric not in outcome.scores:
        return f"no {metric}"
    scale = points(metric) * asked.sign(metric)
    value, found = outcome.scores[metric] * scale, outcome.examples.get(metric)
    if found is None or len(found) < 2:
        return Number(value)
    examples = np.asarray(found, dtype=float) * scale
    if abs(float(examples.mean()) - value) > 1e-6 * max(1.0, abs(value)):
        return Number(value)  # a metric that is not the mean of these numbers: seeds alone tell of its spread
    return Number(value, examples)


SCORE = Reading(_each(_score), "points")
"""The study's metric in points, turned so that higher is better."""


def score(name: str, unit: str = "points", lower: bool = False) -> Reading:
    """A score by its name, as it is."""

    def read(outcome: Outcome, asked: MetricChoice) -> Number | str:
        return Number(float(outcome.scores[name])) if name in outcome.scores else f"no {name}"

    return Reading(_each(read), unit, lower)


def _ranks(group: Sequence[Outcome], asked: MetricChoice) -> list[Number | str]:
    names = sorted({name for outcome in group for name in outcome.scores if name in METRICS})
    lacking = [str(o.cell.get("method")) for o in group if any(name not in o.scores for name in names)]
    if lacking or not names:
        return [f"no rank: metrics are missing of {', '.join(lacking) or 'all'}"] * len(group)
    values = np.array([[outcome.scores[name] for outcome in group] for name in names])
    return [Number(float(r)) for r in average_ranks(values, [METRICS[name].better == "lower" for name in names])]


RANK = Reading(_ranks, "ranks", lower=True, over="method")
"""LN table 2: the rank among all methods of the same task and seed, averaged over all metrics."""


def _steps(group: Sequence[Outcome], asked: MetricChoice) -> list[Number | str]:
    curves = [_curve(outcome, asked) for outcome in group]
    if not all(curves):
        return ["no curve of evaluations"] * len(group)
    lowest = min(value for curve in curves for _, value in curve)
    target = lowest + CONVERGED * (min(max(value for _, value in curve) for curve in curves) - lowest)
    reached = [next(step for step, value in curve if value >= target) for curve in curves]
    return [Number(math.log2(max(1, step))) for step in reached]


def _curve(outcome: Outcome, asked: MetricChoice) -> list[tuple[int, float]]:
    """(step, value) of the metric at each validation, higher being better; of the loss where it is not logged."""
    metric = asked.of(outcome)
    name, sign = f"eval_{metric}", asked.sign(metric)
    if not any(name in line for line in outcome.curve):
        name, sign = "eval_loss", -1.0
    return [(int(line["step"]), sign * float(line[name])) for line in outcome.curve if name in line]


STEPS = Reading(_steps, "log2 of steps", lower=True, over="structure")
"""log2 of the first validated step at which a curve has come 95 % of the way to the lower of the structures' bests.

One target for both, else a curve that ends low would converge early. A difference of 1 is half the steps.
"""


def threshold(name: str) -> Reading:
    """log10 of the geometric middle of extra[name] = [N that is too few, N that is enough]; slack: half its width."""

    def read(outcome: Outcome, asked: MetricChoice) -> Number | str:
        bounds = outcome.extra.get(name)
        if bounds is None or len(bounds) != 2 or bounds[1] is None or not math.isfinite(bounds[1]):
            return f"the {name} threshold was not reached"
        low, high = (math.log10(max(1.0, bound or 0.0)) for bound in bounds)
        return Number((low + high) / 2, slack=(high - low) / 2)

    return Reading(_each(read), "decades of parameters", lower=True)


def _relative(group: Sequence[Outcome], asked: MetricChoice) -> list[Number | str]:
    own = [o for o in group if o.cell.get("task") == o.cell.get("target") and asked.of(o) in o.scores]
    if len(own) != 1 or own[0].scores[asked.of(own[0])] == 0:
        return ["no score of a model trained on the target itself"] * len(group)
    full = own[0].scores[asked.of(own[0])]
    return [
        Number(100 * o.scores[asked.of(o)] / full) if asked.of(o) in o.scores else f"no {asked.of(o)}" for o in group
    ]


RELATIVE = Reading(_relative, "% of the original", over="task")
"""AP figure 9: zero-shot score on a target / score of the model trained on it · 100."""


def _size(outcome: Outcome, asked: MetricChoice) -> Number | str:
    return Number(float(outcome.count["method"])) if "method" in outcome.count else "no count"


COUNT = Reading(_each(_size), "scalars", lower=True)
"""Trained scalars of the method, its head aside."""


def opened(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Outcomes with the axes that follow from what they hold.

    Changes of terms (extra["changes"]): one outcome for each of "layers" (near input, near output) × "term" × "module",
    with the score "change", their mean. Axes "task" and "target": the axis "pair": itself, same type, other type.
    Runs of some N (the axis "N") beside what a search along N found: that alone.
    """
    if any("N" not in outcome.cell for outcome in outcomes):
        outcomes = [outcome for outcome in outcomes if "N" not in outcome.cell]
    keys = sorted({key for outcome in outcomes for key in _changes(outcome)})
    found: list[Outcome] = []
    for outcome in outcomes:
        if keys and (outcome.error is not None or "changes" in outcome.extra):
            changes = _changes(outcome)
            for key in keys:
                cell = {**outcome.cell, **dict(zip(("layers", "term", "module"), key, strict=True))}
                scores = {"change": changes[key]} if key in changes else {}
                found.append(replace(outcome, cell=cell, scores=scores, examples={}))
        elif {"task", "target"} <= outcome.cell.keys():
            found.append(replace(outcome, cell={**outcome.cell, "pair": _pair(outcome.cell)}))
        else:
            found.append(outcome)
    return found


def _changes(outcome: Outcome) -> dict[tuple[str, str, str], float]:
    """(layers, term, module) -> mean of the changes; what belongs to no layer (the norm of embeddings) is left out."""
    lines = [line for line in outcome.extra.get("changes", ()) if isinstance(line.get("layer"), int)]
    order = {layer: i for i, layer in enumerate(sorted({line["layer"] for line in lines}))}
    values: dict[tuple[str, str, str], list[float]] = {}
    for line in lines:
        near = "near output" if order[line["layer"]] >= NEAR_OUTPUT * len(order) else "near input"
        values.setdefault((near, str(line["term"]), str(line["module"])), []).append(float(line["value"]))
    return {key: sum(several) / len(several) for key, several in values.items()}


def _pair(cell: Mapping[str, Any]) -> str:
    if cell["task"] == cell["target"]:
        return "itself"
    kinds = TYPES.get(cell["task"]), TYPES.get(cell["target"])
    return "same type" if kinds[0] is not None and kinds[0] == kinds[1] else "other type"
