"""The table of all metrics, and `compute_scores`, which scores predictions with the metrics named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from ...errors import DeltuneError, error_from_problems, excerpt, unknown_name
from .base import InputType, Metric, Options, Score, Scores, group_statistics
from .labels import LABEL_METRICS
from .model_based import MODEL_METRICS
from .text import CAPTION_METRICS, TEXT_METRICS
from .words import CannotScoreError

METRICS: dict[str, Metric] = {**LABEL_METRICS, **TEXT_METRICS, **CAPTION_METRICS, **MODEL_METRICS}


def option_problems(options: Mapping[str, Options]) -> list[str]:
    """List what is wrong with the options of metrics: no such metric, no such option, a value of another type."""
    problems = [unknown_name("metric", name, METRICS) for name in options if name not in METRICS]
    for name in options.keys() & METRICS.keys():
        defaults = METRICS[name].options
        problems += [
            unknown_name("option", option, defaults, name) for option in options[name] if option not in defaults
        ]
        problems += [
            f"{name}.{option}: {excerpt(value)} is not of the kind of its default, {defaults[option]!r}"
            for option, value in options[name].items()
            if option in defaults and not _same_kind(defaults[option], value)
        ]
    return problems


def _same_kind(default: Any, value: Any) -> bool:
    """Return whether a value is of the same kind as a default; a default of None stands for a name or a number."""
    if default is None:
        return value is None or isinstance(value, str | int)
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(default, bool) and isinstance(value, bool)
    return isinstance(value, int | float) if isinstance(default, int | float) else isinstance(value, type(default))


def compute_scores(
    names: Sequence[str],
    predictions: Sequence[Any],
    references: Sequence[Any],
    labels: Sequence[Any] | None = None,
    options: Mapping[str, Options] | None = None,
) -> Scores:
    """Score predictions against references with several metrics."""
    names, options = list(names) or ["accuracy"], options or {}
    problems = [unknown_name("metric", name, METRICS) for name in names if name not in METRICS]
    problems += option_problems(options)
    if problems:
        raise DeltuneError(" ".join(problems))
    if len(predictions) != len(references) or len(references) == 0:
        raise DeltuneError(f"cannot score {len(predictions)} predictions against {len(references)} references.")
    scores, omitted = {}, {}
    prepared: dict[InputType, tuple[list[Any], list[Any], Options]] = {}
    for name in names:
        metric = METRICS[name]
        settings = {**metric.options, **options.get(name, {})}
        reason = metric.why_unavailable(settings)
        if reason:
            omitted[name] = reason
            continue
        if metric.input_type not in prepared:
            prepared[metric.input_type] = _prepare(metric.input_type, predictions, references, labels)
        metric_predictions, metric_references, derived = prepared[metric.input_type]
        try:
            statistics = metric.compute(metric_predictions, metric_references, {**settings, **derived})
        except CannotScoreError as error:
            omitted[name] = str(error)
            continue
        if metric.input_type == "classes" and _have_several(references):
            statistics = group_statistics(statistics, [len(tags) for tags in references])
        signature = {**statistics.signature, "n": len(references), **metric.package_versions()}
        scores[name] = Score(
            value=statistics.compute_score(statistics.rows),
            per_example=statistics.per_example,
            signature="|".join([name, *(f"{key}:{value}" for key, value in signature.items())]),
            statistics=statistics.rows,
            compute_score=statistics.compute_score,
        )
    return Scores(scores, omitted)


def _prepare(
    input_type: InputType, predictions: Sequence[Any], references: Sequence[Any], labels: Sequence[Any] | None
) -> tuple[list[Any], list[Any], Options]:
    """Check both sides and convert them for the metrics of an input type, with options derived from the data."""
    pairs = list(enumerate(zip(predictions, references, strict=True)))
    if input_type == "tags" or (input_type == "classes" and _have_several(references)):
        _raise_if_any(
            "tags are lists of equal length",
            [f"example {i}: {p!r} against {r!r}" for i, (p, r) in pairs if not _are_lists(p, r) or len(p) != len(r)],
        )
    if input_type == "classes":
        counted = {}
        if _have_several(references):
            predictions, references = ([tag for tags in side for tag in tags] for side in (predictions, references))
            counted = {"tags": len(references)}
        classes = sorted({*predictions, *references}) if labels is None else list(labels)
        index = {value: i for i, value in enumerate(dict.fromkeys([*classes, *predictions, *references]))}
        return [index[p] for p in predictions], [index[r] for r in references], {"labels": len(classes), **counted}
    if input_type in ("numbers", "log-likelihoods"):
        _raise_if_any(
            f"{input_type} are numbers on both sides",
            [f"example {i}: {pair!r}" for i, pair in pairs if not all(isinstance(x, Real) for x in pair)],
        )
        return list(predictions), list(references), {}
    if input_type == "label sets":
        return [frozenset(p) for p in predictions], [frozenset(r) for r in references], {}
    if input_type == "tags":
        return [list(p) for p in predictions], [list(r) for r in references], {}
    accepted = [[reference] if isinstance(reference, str) else list(reference) for reference in references]
    _raise_if_any(
        f"{input_type} are a string against one string or several",
        [
            f"example {i}: {predictions[i]!r} against {references[i]!r}"
            for i, texts in enumerate(accepted)
            if not texts or not all(isinstance(text, str) for text in (predictions[i], *texts))
        ],
    )
    return list(predictions), accepted, {}


def _are_lists(*values: Any) -> bool:
    return all(isinstance(value, list | tuple) for value in values)


def _have_several(references: Sequence[Any]) -> bool:
    """Return whether an example has a class for each of its words, as tags are."""
    return _are_lists(references[0])


def _raise_if_any(title: str, problems: list[str]) -> None:
    if problems:
        raise error_from_problems(title, problems[:3] + (["…"] if len(problems) > 3 else []))
