"""Accuracy, F1, correlations, entity F1, exact match, error rates and perplexity."""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...errors import DeltuneError, excerpt, unknown_name
from ...models import OUTSIDE
from ..data.tag_schemes import PLAIN, SCHEMES, recognise_scheme
from .base import NON_NEGATIVE, CorpusStatistics, Metric, Options, mean_statistics, ratio_statistics
from .words import CannotScoreError, separate_characters, unspaced_signature, without_punctuation_of_other_scripts

# classes: integers; those from options["labels"] on occur, but are not labels ---------------------------------------


def _sklearn_metric(function: str, labels: Callable[[int], list[int]] | None = None) -> Callable[..., CorpusStatistics]:
    """A metric of scikit-learn, which averages over labels(number of labels) where it is given those."""

    def measure(predictions: Sequence[int], references: Sequence[int], options: Options) -> CorpusStatistics:
        from sklearn import metrics

        settings: dict[str, Any] = {}
        if labels is not None:
            settings = {"labels": labels(int(options["labels"])), "average": "macro", "zero_division": 0}
        rows = np.stack([np.array(predictions), np.array(references)], axis=1)
        score = getattr(metrics, function)
        return CorpusStatistics(rows, lambda chosen: float(score(chosen[:, 1], chosen[:, 0], **settings)), options)

    return measure


def _second_label(count: int) -> list[int]:
    """Return the label over which F1 is averaged for two labels; its macro average allows predictions of neither."""
    if count != 2:
        raise DeltuneError(f"f1 is for two labels, and there are {count}. Use f1_macro.")
    return [1]


def _compute_accuracy(predictions: Sequence[int], references: Sequence[int], options: Options) -> CorpusStatistics:
    from sklearn.metrics import accuracy_score

    rows = np.stack([np.array(predictions), np.array(references)], axis=1)
    hits = [float(p == r) for p, r in zip(predictions, references, strict=True)]
    return CorpusStatistics(rows, lambda chosen: float(accuracy_score(chosen[:, 1], chosen[:, 0])), options, hits)


# label sets ----------------------------------------------------------------------------------------------------------


def _label_set_f1(average: str) -> Callable[..., CorpusStatistics]:
    """F1 of sets of labels by scikit-learn; a label that no row has, right or predicted, does not count."""

    def measure(predictions: Sequence[Any], references: Sequence[Any], options: Options) -> CorpusStatistics:
        from sklearn.metrics import f1_score

        names = sorted(frozenset().union(*predictions, *references))
        both = [[[name in row for name in names] for row in side] for side in (predictions, references)]
        rows = np.concatenate([np.array(side, dtype=int).reshape(len(references), -1) for side in both], axis=1)

        def compute_score(chosen: np.ndarray) -> float:
            predicted, true = np.split(chosen, 2, axis=1)
            used = (predicted | true).any(0)
            if not used.any():
                return 0.0
            return float(f1_score(true[:, used], predicted[:, used], average=average, zero_division=0))

        return CorpusStatistics(rows, compute_score, options)

    return measure


def _subset_accuracy(predictions: Sequence[Any], references: Sequence[Any], options: Options) -> CorpusStatistics:
    return mean_statistics([float(p == r) for p, r in zip(predictions, references, strict=True)], options)


# numbers -----------------------------------------------------------------------------------------------------------


def _correlation(name: str) -> Callable[..., CorpusStatistics]:
    """The correlation of predictions and references; nan where one side is constant, since it is undefined there."""

    def measure(predictions: Sequence[float], references: Sequence[float], options: Options) -> CorpusStatistics:
        from scipy import stats

        if len(predictions) < 2:
            raise DeltuneError(f"{name} needs at least two examples.")
        correlate = {"pearson": stats.pearsonr, "spearman": stats.spearmanr}[name]

        def compute_score(rows: np.ndarray) -> float:
            if (rows == rows[0]).all(axis=0).any():
                return float("nan")
            return float(correlate(rows[:, 0], rows[:, 1]).statistic)

        return CorpusStatistics(np.array([predictions, references], dtype=float).T, compute_score, options)

    return measure


def _mean_absolute_error(
    predictions: Sequence[float], references: Sequence[float], options: Options
) -> CorpusStatistics:
    return mean_statistics([abs(p - r) for p, r in zip(predictions, references, strict=True)], options)


# tags --------------------------------------------------------------------------------------------------------------


def entities(tags: Sequence[str], scheme: str) -> set[tuple[str, int, int]]:
    """Return the entities of a row as seqeval has them in its strict mode: type, first word, and the word behind it."""
    from seqeval import scheme as schemes

    if foreign := {tag for tag in tags if tag != OUTSIDE and tag[:1] not in SCHEMES[scheme]}:
        raise DeltuneError(
            f"{excerpt(min(foreign))} is no tag of {scheme}, which has {', '.join(SCHEMES[scheme])} and O"
        )
    extracted = schemes.Entities([list(tags)], getattr(schemes, {"BIOES": "IOBES"}.get(scheme, scheme))).entities[0]
    return {(entity.tag, entity.start, entity.end) for entity in extracted}


def _compute_entity_f1(predictions: Sequence[Any], references: Sequence[Any], options: Options) -> CorpusStatistics:
    """F1 = 2 · correct / (predicted + true), over the entities of all examples; 0 where there are none at all.

    An entity is correct if its type and both ends are. What is no whole entity of the scheme is none: in strict IOB2,
    I- without a B- of its type before it does not begin one (in conlleval it does). Statistics of an example: correct,
    predicted and true entities.
    """
    scheme = options["scheme"]
    if scheme == "auto":
        scheme = recognise_scheme([(f"example {i}", tags) for i, tags in enumerate(references)]) or "IOB2"
    if scheme == PLAIN:
        tag = next(tag for row in references for tag in row if tag != OUTSIDE)
        raise DeltuneError(
            f"entity_f1 is for tags of entities, such as B-PER, and these are plain, such as {excerpt(tag)}: use "
            "accuracy and f1_macro"
        )
    if scheme not in SCHEMES:
        raise DeltuneError(unknown_name("scheme", scheme, ["auto", *SCHEMES], "entity_f1"))
    pairs = [(entities(p, scheme), entities(r, scheme)) for p, r in zip(predictions, references, strict=True)]
    rows = [(len(p & r), len(p), len(r)) for p, r in pairs]

    def compute_score(rows: np.ndarray) -> float:
        correct, predicted, true = rows.sum(axis=0)
        return float(2 * correct / (predicted + true)) if predicted + true else 0.0

    return CorpusStatistics(np.array(rows, dtype=float), compute_score, {**options, "scheme": scheme})


# answers -----------------------------------------------------------------------------------------------------------


def normalize_answer(answer: str, rules: str) -> str:
    """Normalize an answer before it is compared."""
    if rules == "none":
        return answer.strip()
    if rules == "nq_open":
        answer = unicodedata.normalize("NFD", answer)
    text = "".join(c for c in without_punctuation_of_other_scripts(answer.lower()) if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def _answer_f1(prediction: str, reference: str) -> float:
    """F1 of the shared words, as multisets; 1 if neither answer has a word, as in SQuAD 2.0.

    Characters of scripts without blanks are words, as in the script of MLQA.
    """
    predicted_words, true_words = (Counter(separate_characters(text).split()) for text in (prediction, reference))
    if not predicted_words and not true_words:
        return 1.0
    shared = (predicted_words & true_words).total()
    return 2 * shared / (predicted_words.total() + true_words.total()) if shared else 0.0


def _exact_match(prediction: str, reference: str) -> float:
    return float(prediction == reference)


def _answer_metric(similarity: Callable[[str, str], float], by_words: bool = False) -> Callable[..., CorpusStatistics]:
    """A metric that is the mean over examples of the largest similarity to an accepted answer."""

    def measure(predictions: Sequence[str], references: Sequence[Sequence[str]], options: Options) -> CorpusStatistics:
        rules = options["normalisation"]
        if rules not in ("squad", "nq_open", "none"):
            raise DeltuneError(f"normalisation must be squad, nq_open or none, not {rules!r}.")

        def best(prediction: str, accepted: Sequence[str]) -> float:
            normalized = normalize_answer(prediction, rules)
            return max(similarity(normalized, normalize_answer(reference, rules)) for reference in accepted)

        values = [best(prediction, accepted) for prediction, accepted in zip(predictions, references, strict=True)]
        texts = [*predictions, *(reference for accepted in references for reference in accepted)] if by_words else []
        return mean_statistics(values, {**options, **unspaced_signature(texts), "references": "max"})

    return measure


# error rates and perplexity ----------------------------------------------------------------------------------------


def _compute_error_rate(
    predictions: Sequence[str], references: Sequence[Sequence[str]], options: Options
) -> CorpusStatistics:
    """Σ edits / Σ symbols of the reference: insertions, deletions and substitutions, each 1 (Levenshtein).

    The option separator stands between symbols; if it is empty, every character is a symbol. Of several references the
    one with the lowest rate counts. The rate is above 1 where more is inserted than there was. Statistics of an
    example: edits, symbols.
    """
    from rapidfuzz.distance import Levenshtein

    separator = options["separator"]

    def symbols(text: str) -> Sequence[str]:
        return [s for s in text.split(separator) if s] if separator else text

    rows = []
    for prediction, accepted in zip(predictions, references, strict=True):
        predicted = symbols(prediction)
        candidates = [(Levenshtein.distance(predicted, symbols(r)), len(symbols(r))) for r in accepted]
        rows.append(min(candidates, key=lambda row: (row[0] / max(row[1], 1), row[0])))
    if not sum(length for _, length in rows):
        raise CannotScoreError("an error rate needs a reference that is not empty.")
    return ratio_statistics(rows, {**options, "references": "closest"})


def _compute_perplexity(predictions: Sequence[float], references: Sequence[int], options: Options) -> CorpusStatistics:
    """exp(-Σ log-likelihoods / Σ tokens), both sums over all examples. Statistics: log-likelihood (nats), tokens."""
    if min(references) < 0 or sum(references) <= 0:
        raise DeltuneError("perplexity needs the number of tokens of each example, at least one in all.")

    def compute_score(rows: np.ndarray) -> float:
        nats, tokens = rows.sum(axis=0)
        return float(np.exp(-nats / tokens))

    return CorpusStatistics(
        np.array([predictions, references], dtype=float).T, compute_score, {"base": "e", "mean": "tokens"}
    )


_SKLEARN = ("scikit-learn",)
_ANSWER_METRIC: dict[str, Any] = {"input_type": "answers", "options": {"normalisation": "squad"}}
_ERROR_RATE_METRIC: dict[str, Any] = {
    "better": "lower",
    "range": NON_NEGATIVE,
    "packages": ("rapidfuzz",),
    "extra": "metrics",
}

LABEL_METRICS: dict[str, Metric] = {
    "accuracy": Metric("classes", _compute_accuracy, packages=_SKLEARN),
    "f1": Metric(
        "classes",
        _sklearn_metric("f1_score", _second_label),
        {"average": "binary", "positive": "label[1]", "zero_division": 0},
        packages=_SKLEARN,
    ),
    "f1_macro": Metric(
        "classes",
        _sklearn_metric("f1_score", lambda count: list(range(count))),
        {"average": "macro", "zero_division": 0},
        packages=_SKLEARN,
    ),
    "matthews": Metric("classes", _sklearn_metric("matthews_corrcoef"), range=(-1.0, 1.0), packages=_SKLEARN),
    "pearson": Metric("numbers", _correlation("pearson"), range=(-1.0, 1.0), packages=("scipy",)),
    "spearman": Metric("numbers", _correlation("spearman"), range=(-1.0, 1.0), packages=("scipy",)),
    "mae": Metric("numbers", _mean_absolute_error, better="lower", range=NON_NEGATIVE),
    "label_f1": Metric(
        "label sets", _label_set_f1("micro"), {"average": "micro", "zero_division": 0}, packages=_SKLEARN
    ),
    "label_f1_macro": Metric(
        "label sets", _label_set_f1("macro"), {"average": "macro", "zero_division": 0}, packages=_SKLEARN
    ),
    "subset_accuracy": Metric("label sets", _subset_accuracy),
    "entity_f1": Metric(
        "tags",
        _compute_entity_f1,
        {"average": "micro", "mode": "strict", "scheme": "auto", "zero_division": 0},
        packages=("seqeval",),
    ),
    "exact_match": Metric(compute=_answer_metric(_exact_match), **_ANSWER_METRIC),
    "exact": Metric("answers", _answer_metric(_exact_match), {"normalisation": "none"}),
    "answer_f1": Metric(compute=_answer_metric(_answer_f1, by_words=True), **_ANSWER_METRIC),
    "cer": Metric("texts", _compute_error_rate, {"separator": ""}, **_ERROR_RATE_METRIC),
    "per": Metric("texts", _compute_error_rate, {"separator": ""}, **_ERROR_RATE_METRIC),
    "perplexity": Metric("log-likelihoods", _compute_perplexity, better="lower", range=(1.0, float("inf"))),
}
