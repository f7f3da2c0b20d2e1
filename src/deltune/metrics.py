"""Metrics of classification, from scikit-learn: one table, and a signature for every number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from deltune.errors import DeltuneError, unknown

Compute = Callable[[Sequence[Any], Sequence[Any], Sequence[Any]], float]  # predictions, references, labels


@dataclass(frozen=True)
class Score:
    """A value, the examples it is the mean of (None where it is no mean), and what exactly was computed with what."""

    value: float
    per_example: list[float] | None
    signature: str


@dataclass(frozen=True)
class Metric:
    """A number over all examples, and where that is a mean, the number of one example."""

    compute: Compute
    options: dict[str, object] = field(default_factory=dict)
    one: Callable[[Any, Any], float] | None = None


def _accuracy(predictions: Sequence[Any], references: Sequence[Any], labels: Sequence[Any]) -> float:
    from sklearn.metrics import accuracy_score

    return float(accuracy_score(references, predictions))


def _f1(predictions: Sequence[Any], references: Sequence[Any], labels: Sequence[Any]) -> float:
    from sklearn.metrics import f1_score

    if len(labels) != 2:
        raise DeltuneError(f"f1 is for two labels, here are {len(labels)}. Use f1_macro.")
    return float(f1_score(references, predictions, labels=labels, pos_label=labels[1], zero_division=0))


def _f1_macro(predictions: Sequence[Any], references: Sequence[Any], labels: Sequence[Any]) -> float:
    from sklearn.metrics import f1_score

    return float(f1_score(references, predictions, labels=labels, average="macro", zero_division=0))


def _matthews(predictions: Sequence[Any], references: Sequence[Any], labels: Sequence[Any]) -> float:
    from sklearn.metrics import matthews_corrcoef

    return float(matthews_corrcoef(references, predictions))


METRICS: dict[str, Metric] = {
    "accuracy": Metric(_accuracy, one=lambda prediction, reference: float(prediction == reference)),
    "f1": Metric(_f1, {"average": "binary", "positive": "label[1]", "zero_division": 0}),
    "f1_macro": Metric(_f1_macro, {"average": "macro", "zero_division": 0}),
    "matthews": Metric(_matthews),
}


def score(
    names: Sequence[str],
    predictions: Sequence[Any],
    references: Sequence[Any],
    labels: Sequence[Any] | None = None,
) -> dict[str, Score]:
    """The named metrics of predictions against references (class ids or names), one for each example.

    labels: every class there is, in order, the positive one second (default: those that occur, sorted); f1_macro
    averages over all of them. Values lie in [0, 1], matthews in [-1, 1]. No names means accuracy. Raises DeltuneError
    for an unknown metric, no examples or lists of unequal length.
    """
    import sklearn

    wrong = [unknown("metric", name, METRICS) for name in names if name not in METRICS]
    if wrong:
        raise DeltuneError(" ".join(wrong))
    if len(predictions) != len(references) or len(references) == 0:
        raise DeltuneError(f"cannot score {len(predictions)} predictions against {len(references)} references.")
    labels = sorted({*predictions, *references}) if labels is None else labels
    scores = {}
    for name in names or ["accuracy"]:
        metric = METRICS[name]
        one = metric.one
        pairs = zip(predictions, references, strict=True)
        options = {**metric.options, "labels": len(labels), "n": len(references), "scikit-learn": sklearn.__version__}
        scores[name] = Score(
            value=metric.compute(predictions, references, labels),
            per_example=[one(p, r) for p, r in pairs] if one else None,
            signature="|".join([name, *(f"{key}:{value}" for key, value in options.items())]),
        )
    return scores
