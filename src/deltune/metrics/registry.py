"""Every metric in one table, and `score`: values with their statistics and signatures, and what was left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from ..errors import DeltuneError, error_from_problems, unknown_name
from .base import Kind, Metric, Options, Score, Scores
from .captions import CAPTIONS
from .labels import LABELS
from .model_based import MODELS
from .text import TEXTS

METRICS: dict[str, Metric] = {**LABELS, **TEXTS, **CAPTIONS, **MODELS}


def score(
    names: Sequence[str],
    predictions: Sequence[Any],
    references: Sequence[Any],
    labels: Sequence[Any] | None = None,
    options: Mapping[str, Options] | None = None,
) -> Scores:
    """The named metrics of predictions against references, one for each example; what they are: `Metric.kind`.

    No names means accuracy. labels, for classes: every class there is, in order, the positive one second (default:
    those that occur, sorted); f1_macro averages over all of them. options: values for a metric's options, by its name.
    A metric whose part is missing here (a package, Java, a model) is left out, and `omitted` of the result says why.
    Raises DeltuneError for an unknown metric or option, no examples, lists of unequal length, or examples that are not
    of a metric's kind.
    """
    names, given = list(names) or ["accuracy"], options or {}
    wrong = [unknown_name("metric", name, METRICS) for name in (*names, *given) if name not in METRICS]
    for name in given.keys() & METRICS.keys():
        wrong += [
            unknown_name("option", key, METRICS[name].options, name)
            for key in given[name]
            if key not in METRICS[name].options
        ]
    if wrong:
        raise DeltuneError(" ".join(wrong))
    if len(predictions) != len(references) or len(references) == 0:
        raise DeltuneError(f"cannot score {len(predictions)} predictions against {len(references)} references.")
    scores, omitted = {}, {}
    ready: dict[Kind, tuple[list[Any], list[Any], Options]] = {}
    for name in names:
        metric = METRICS[name]
        settings = {**metric.options, **given.get(name, {})}
        reason = metric.missing(settings)
        if reason:
            omitted[name] = reason
            continue
        if metric.kind not in ready:
            ready[metric.kind] = _prepared(metric.kind, predictions, references, labels)
        ours, theirs, facts = ready[metric.kind]
        measured = metric.measure(ours, theirs, {**settings, **facts})
        said = {**measured.said, "n": len(references), **metric.versions()}
        scores[name] = Score(
            value=measured.reduce(measured.rows),
            per_example=measured.per_example,
            signature="|".join([name, *(f"{key}:{value}" for key, value in said.items())]),
            statistics=measured.rows,
            reduce=measured.reduce,
        )
    return Scores(scores, omitted)


def _prepared(
    kind: Kind, predictions: Sequence[Any], references: Sequence[Any], labels: Sequence[Any] | None
) -> tuple[list[Any], list[Any], Options]:
    """Both sides in the form that metrics of a kind take, and facts for their options. Raises for another form."""
    if kind == "classes":
        known = sorted({*predictions, *references}) if labels is None else list(labels)
        index = {value: i for i, value in enumerate(dict.fromkeys([*known, *predictions, *references]))}
        return [index[p] for p in predictions], [index[r] for r in references], {"labels": len(known)}
    pairs = list(enumerate(zip(predictions, references, strict=True)))
    if kind in ("numbers", "log-likelihoods"):
        wrong = [f"example {i}: {pair!r}" for i, pair in pairs if not all(isinstance(x, Real) for x in pair)]
        _refuse(f"{kind} are numbers on both sides", wrong)
        return list(predictions), list(references), {}
    if kind == "tags":
        _refuse(
            "tags are lists of equal length",
            [f"example {i}: {p!r} against {r!r}" for i, (p, r) in pairs if isinstance(p, str) or len(p) != len(r)],
        )
        return [list(p) for p in predictions], [list(r) for r in references], {}
    several = [[reference] if isinstance(reference, str) else list(reference) for reference in references]
    _refuse(
        f"{kind} are a string against one string or several",
        [
            f"example {i}: {predictions[i]!r} against {references[i]!r}"
            for i, found in enumerate(several)
            if not found or not all(isinstance(text, str) for text in (predictions[i], *found))
        ],
    )
    return list(predictions), several, {}


def _refuse(title: str, wrong: list[str]) -> None:
    if wrong:
        raise error_from_problems(title, wrong[:3] + (["…"] if len(wrong) > 3 else []))
