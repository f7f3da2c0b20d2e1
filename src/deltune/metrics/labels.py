"""Metrics of classes, numbers, tags, short answers and symbol sequences, and perplexity."""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..errors import DeltuneError
from .base import Measured, Metric, Options, mean_of, ratio_of

# classes: integers, those from options["labels"] on are no labels --------------------------------------------------


def _pairs(compute: Callable[[np.ndarray, np.ndarray, int], float]) -> Callable[..., Measured]:
    """Statistics of an example: its prediction and reference; reduced by a function of scikit-learn."""

    def measure(predictions: Sequence[int], references: Sequence[int], options: Options) -> Measured:
        count = int(options["labels"])
        rows = np.stack([np.array(predictions), np.array(references)], axis=1)
        return Measured(rows, lambda chosen: compute(chosen[:, 0], chosen[:, 1], count), options)

    return measure


def _accuracy(predictions: Sequence[int], references: Sequence[int], options: Options) -> Measured:
    from sklearn.metrics import accuracy_score

    rows = np.stack([np.array(predictions), np.array(references)], axis=1)
    hits = [float(p == r) for p, r in zip(predictions, references, strict=True)]
    return Measured(rows, lambda chosen: float(accuracy_score(chosen[:, 1], chosen[:, 0])), options, hits)


def _f1(predictions: np.ndarray, references: np.ndarray, labels: int) -> float:
    from sklearn.metrics import f1_score

    if labels != 2:
        raise DeltuneError(f"f1 is for two labels, here are {labels}. Use f1_macro.")
    # The mean over class 1 alone is its F1, also where a prediction is neither label.
    return float(f1_score(references, predictions, labels=[1], average="macro", zero_division=0))


def _f1_macro(predictions: np.ndarray, references: np.ndarray, labels: int) -> float:
    from sklearn.metrics import f1_score

    return float(f1_score(references, predictions, labels=list(range(labels)), average="macro", zero_division=0))


def _matthews(predictions: np.ndarray, references: np.ndarray, labels: int) -> float:
    from sklearn.metrics import matthews_corrcoef

    return float(matthews_corrcoef(references, predictions))


# numbers -----------------------------------------------------------------------------------------------------------


def _correlation(name: str) -> Callable[..., Measured]:
    """r of predictions and references; nan where one side is constant, since r is not defined there."""

    def measure(predictions: Sequence[float], references: Sequence[float], options: Options) -> Measured:
        from scipy import stats

        if len(predictions) < 2:
            raise DeltuneError(f"{name} needs two examples at least.")
        compute = {"pearson": stats.pearsonr, "spearman": stats.spearmanr}[name]

        def reduce(rows: np.ndarray) -> float:
            if (rows == rows[0]).all(axis=0).any():
                return float("nan")
            return float(compute(rows[:, 0], rows[:, 1]).statistic)

        return Measured(np.array([predictions, references], dtype=float).T, reduce, options)

    return measure


# tags --------------------------------------------------------------------------------------------------------------


def _entity_f1(predictions: Sequence[Any], references: Sequence[Any], options: Options) -> Measured:
    """F1 = 2 · correct / (predicted + true), over the entities of all examples; 0 where there are none at all.

    An entity is correct if its type and both ends are. Strict BIO: I- without a B- of its type before it opens none
    (conlleval opens one). Statistics of an example: correct, predicted, true.
    """
    from seqeval.scheme import IOB2, Entities

    predicted, true = Entities(list(predictions), IOB2).entities, Entities(list(references), IOB2).entities
    rows = [(len(set(p) & set(r)), len(p), len(r)) for p, r in zip(predicted, true, strict=True)]

    def reduce(chosen: np.ndarray) -> float:
        correct, found, there = chosen.sum(axis=0)
        return float(2 * correct / (found + there)) if found + there else 0.0

    return Measured(np.array(rows, dtype=float), reduce, options)


# answers -----------------------------------------------------------------------------------------------------------


def normalised(answer: str, rules: str) -> str:
    """Lower case; no punctuation (ASCII), no a, an, the; blanks to one: SQuAD's evaluation script, version 1.1.

    rules: "squad", or "nq_open", which brings Unicode to NFD first (language/orqa/utils/eval_utils.py); "none": only
    blanks at the ends go.
    """
    if rules == "none":
        return answer.strip()
    if rules == "nq_open":
        answer = unicodedata.normalize("NFD", answer)
    kept = "".join(c for c in answer.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())


def _answer_f1(prediction: str, reference: str) -> float:
    """F1 of the words that both have, as multisets; 0 where none is shared (two empty answers included, as in 1.1)."""
    ours, theirs = Counter(prediction.split()), Counter(reference.split())
    shared = (ours & theirs).total()
    return 2 * shared / (ours.total() + theirs.total()) if shared else 0.0


def _answers(one: Callable[[str, str], float]) -> Callable[..., Measured]:
    """The mean over examples of the best value over the accepted answers."""

    def measure(predictions: Sequence[str], references: Sequence[Sequence[str]], options: Options) -> Measured:
        rules = options["normalisation"]
        if rules not in ("squad", "nq_open", "none"):
            raise DeltuneError(f"normalisation is squad, nq_open or none, not {rules!r}.")
        pairs = zip(predictions, references, strict=True)
        best = [max(one(normalised(p, rules), normalised(r, rules)) for r in accepted) for p, accepted in pairs]
        return mean_of(best, {**options, "references": "max"})

    return measure


# error rates and perplexity ----------------------------------------------------------------------------------------


def _error_rate(predictions: Sequence[str], references: Sequence[Sequence[str]], options: Options) -> Measured:
    """Σ edits / Σ symbols of the reference: insertions, deletions and substitutions, each 1 (Levenshtein).

    separator: what stands between symbols; empty: every character is one. Several references: the one with the lowest
    rate. Statistics of an example: edits, symbols. Above 1 where more is inserted than there was.
    """
    from rapidfuzz.distance import Levenshtein

    separator = options["separator"]

    def symbols(text: str) -> Sequence[str]:
        return [s for s in text.split(separator) if s] if separator else text

    rows = []
    for prediction, several in zip(predictions, references, strict=True):
        ours = symbols(prediction)
        found = [(Levenshtein.distance(ours, symbols(r)), len(symbols(r))) for r in several]
        rows.append(min(found, key=lambda row: (row[0] / max(row[1], 1), row[0])))
    if not sum(length for _, length in rows):
        raise DeltuneError("an error rate needs a reference that is not empty.")
    return ratio_of(rows, {**options, "references": "closest"})


def _perplexity(predictions: Sequence[float], references: Sequence[int], options: Options) -> Measured:
    """exp(-Σ log-likelihoods / Σ tokens), both sums over all examples. Statistics: log-likelihood (nats), tokens."""
    if min(references) < 0 or sum(references) <= 0:
        raise DeltuneError("perplexity needs the number of tokens of each example, one at least.")

    def reduce(rows: np.ndarray) -> float:
        nats, tokens = rows.sum(axis=0)
        return float(np.exp(-nats / tokens))

    return Measured(np.array([predictions, references], dtype=float).T, reduce, {"base": "e", "mean": "tokens"})


SKLEARN, ENDLESS = ("scikit-learn",), (0.0, float("inf"))
_ANSWERS: dict[str, Any] = {"kind": "answers", "options": {"normalisation": "squad"}}
_RATE: dict[str, Any] = {"better": "lower", "range": ENDLESS, "packages": ("rapidfuzz",), "extra": "metrics"}

LABELS: dict[str, Metric] = {
    "accuracy": Metric("classes", _accuracy, packages=SKLEARN),
    "f1": Metric(
        "classes",
        _pairs(_f1),
        {"average": "binary", "positive": "label[1]", "zero_division": 0},
        packages=SKLEARN,
    ),
    "f1_macro": Metric("classes", _pairs(_f1_macro), {"average": "macro", "zero_division": 0}, packages=SKLEARN),
    "matthews": Metric("classes", _pairs(_matthews), range=(-1.0, 1.0), packages=SKLEARN),
    "pearson": Metric("numbers", _correlation("pearson"), range=(-1.0, 1.0), packages=("scipy",)),
    "spearman": Metric("numbers", _correlation("spearman"), range=(-1.0, 1.0), packages=("scipy",)),
    "entity_f1": Metric(
        "tags",
        _entity_f1,
        {"average": "micro", "mode": "strict", "scheme": "IOB2", "zero_division": 0},
        packages=("seqeval",),
    ),
    "exact_match": Metric(measure=_answers(lambda ours, theirs: float(ours == theirs)), **_ANSWERS),
    "exact": Metric("answers", _answers(lambda ours, theirs: float(ours == theirs)), {"normalisation": "none"}),
    "answer_f1": Metric(measure=_answers(_answer_f1), **_ANSWERS),
    "cer": Metric("texts", _error_rate, {"separator": ""}, **_RATE),
    "per": Metric("texts", _error_rate, {"separator": ""}, **_RATE),
    "perplexity": Metric("log-likelihoods", _perplexity, better="lower", range=(1.0, float("inf"))),
}
