"""A split's answers, their scores against its references, and both as lines of a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..metrics.measures import Scores
from ..metrics.table import METRICS, score
from ..tasks.encoding import Encoded
from ..tasks.kinds import Columns, Kind, Use

Given = Mapping[str, Mapping[str, Any]]
"""Options of metrics, by the metrics' names."""


@dataclass(frozen=True)
class Scored:
    """A split with the model's answers, row by row: metrics (loss included), and why others could not be had."""

    metrics: dict[str, float]
    signatures: dict[str, str]
    omitted: dict[str, str]
    predictions: list[Any]
    references: list[Any]
    scores: list[Any]


def scored(
    kind: Kind, use: Use, encoded: Encoded, columns: Columns, names: Sequence[str], options: Given | None = None
) -> Scored:
    """The answers to a split, measured by the named metrics; with use.loss_only its loss alone."""
    answers = kind.answers(use, encoded)
    if use.loss_only:
        return Scored({} if answers.loss is None else {"loss": answers.loss}, {}, {}, [], [], [])
    references = answers.references or kind.references(columns, use.labels)
    found = measured(kind, names, answers.predictions, references, len(use.labels), options)
    metrics = ({} if answers.loss is None else {"loss": answers.loss}) | {n: score.value for n, score in found.items()}
    signatures = {name: score.signature for name, score in found.items()}
    return Scored(metrics, signatures, found.omitted, answers.predictions, references, answers.scores)


def measured(
    kind: Kind,
    names: Sequence[str],
    predictions: Sequence[Any],
    references: Sequence[Any],
    labels: int,
    options: Given | None = None,
) -> Scores:
    """The named metrics of predictions; labels: how many there are; options: of metrics, by their names."""
    found = Scores({}, {})
    for compared in dict.fromkeys(METRICS[name].kind for name in names):
        own = [name for name in names if METRICS[name].kind == compared]
        given = {name: values for name, values in (options or {}).items() if name in own}
        some = score(own, predictions, references, list(range(labels)) if kind.labelled else None, given)
        found.update(some)
        found.omitted |= some.omitted
    return found


def lines(kind: Kind, columns: Columns, result: Scored, labels: Sequence[str]) -> list[dict[str, Any]]:
    """The predictions of a split as lines of JSON: id, input, prediction, reference, scores."""

    def said(value: Any) -> Any:
        return labels[value] if kind.labelled else value

    return [
        {
            "id": columns["id"][i],
            "input": kind.shown(columns, i),
            "prediction": said(prediction),
            "reference": said(result.references[i]),
            "scores": result.scores[i],
        }
        for i, prediction in enumerate(result.predictions)
    ]
