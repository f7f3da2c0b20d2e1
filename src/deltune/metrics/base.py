"""What a metric is, and what it gives: example → statistics → reduction → score, as sacreBLEU does it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from ..errors import DeltuneError

Kind = Literal["classes", "numbers", "tags", "texts", "answers", "log-likelihoods"]
Options = Mapping[str, Any]
Reduce = Callable[[np.ndarray], float]

MODULES = {"scikit-learn": "sklearn", "rouge-score": "rouge_score", "bert-score": "bert_score", "POT": "ot"}
"""What a package is called in an import, where that is not its own name."""


@dataclass(frozen=True)
class Measured:
    """Statistics, a row for each example, their reduction to the number, and what the number depends on."""

    rows: np.ndarray
    reduce: Reduce
    said: Mapping[str, object]
    per_example: list[float] | None = None


@dataclass(frozen=True)
class Score:
    """A value, the examples it is the mean of (None where it is no mean), and what exactly was computed with what.

    statistics: (examples, k), from which the value was computed: value = reduce(statistics).
    """

    value: float
    per_example: list[float] | None
    signature: str
    statistics: np.ndarray = field(repr=False, compare=False)
    reduce: Reduce = field(repr=False, compare=False)

    def resampled(self, indices: Sequence[int] | np.ndarray) -> float:
        """The score of the corpus made of these examples, an example once for each time its index occurs.

        What a metric takes from all references together (information weights of NIST, document frequencies of CIDEr,
        BERTScore and MoverScore) stays that of the whole corpus. Raises DeltuneError for no indices.
        """
        if len(indices) == 0:
            raise DeltuneError("cannot score a re-sample of no examples.")
        return self.reduce(self.statistics[np.asarray(indices, dtype=np.int64)])


class Scores(dict[str, Score]):
    """Scores by the names of their metrics; `omitted` says of every other metric asked for why it is not here."""

    def __init__(self, scores: Mapping[str, Score], omitted: Mapping[str, str]) -> None:
        super().__init__(scores)
        self.omitted = dict(omitted)


@dataclass(frozen=True)
class Metric:
    """A number over predictions and references of one kind.

    kind: what is compared. classes: ids or names; numbers; tags: BIO tags of the words; texts and answers: a string
    against one string or several; log-likelihoods: the sum over an example's tokens (nats) against their number.
    options: with their defaults; every one that can move the number is in the signature.
    range: the smallest and largest value. better: the direction of better values.
    packages: distributions it needs, with their versions in the signature. extra: the extra of deltune that has them.
    lacks: what else is missing under these options, in words; None if nothing is.
    """

    kind: Kind
    measure: Callable[[Sequence[Any], Sequence[Any], Options], Measured]
    options: Options = field(default_factory=dict)
    range: tuple[float, float] = (0.0, 1.0)
    better: Literal["higher", "lower"] = "higher"
    packages: tuple[str, ...] = ()
    extra: str | None = None
    lacks: Callable[[Options], str | None] = lambda options: None

    def missing(self, options: Options) -> str | None:
        """Why the metric cannot be computed here, in words, or None if it can."""
        absent = [p for p in self.packages if importlib.util.find_spec(MODULES.get(p, p)) is None]
        if absent:
            origin = f"pip install deltune[{self.extra}]" if self.extra else "pip install deltune"
            return f"needs {', '.join(absent)}: {origin}"
        return self.lacks(options)

    def versions(self) -> dict[str, str]:
        return {package: importlib.metadata.version(package) for package in self.packages}


def mean_of(values: Sequence[float], said: Options) -> Measured:
    """value = mean of one number for each example."""
    numbers = [float(value) for value in values]
    return Measured(np.array(numbers).reshape(-1, 1), lambda rows: float(rows.mean()), said, numbers)


def ratio_of(rows: Sequence[tuple[float, float]], said: Options) -> Measured:
    """value = Σ numerators / Σ denominators."""

    def reduce(chosen: np.ndarray) -> float:
        above, below = chosen.sum(axis=0)
        return float(above / below)

    return Measured(np.array(rows, dtype=float), reduce, said)


def reduce_references(
    values: Sequence[float], references: Sequence[Sequence[str]], how: Literal["max", "mean"]
) -> list[float]:
    """One number for each example from one for each of its references, in order: their "max" or their "mean"."""
    found, start = [], 0
    for several in references:
        own = values[start : start + len(several)]
        found.append(float(max(own) if how == "max" else sum(own) / len(own)))
        start += len(several)
    return found
