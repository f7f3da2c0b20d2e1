"""Metrics: statistics of each example, a corpus score computed from them, and a signature, as in sacreBLEU."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from ...errors import DeltuneError, is_installed, missing_extra

InputType = Literal["classes", "label sets", "numbers", "tags", "texts", "answers", "log-likelihoods"]
"""The kinds of predictions and references that metrics compare.

classes: ids or names, or lists of them. label sets: lists of names in any order. numbers: real numbers. tags: lists of
tags of entities. texts and answers: a string against one string or several. log-likelihoods: the sum over an
example's tokens, in nats, against the number of its tokens.
"""
Options = Mapping[str, Any]
ComputeScore = Callable[[np.ndarray], float]
"""Computes a corpus score from the statistics of its examples, of shape (examples, k)."""

NON_NEGATIVE = (0.0, float("inf"))
"""The range of scores without an upper limit."""


@dataclass(frozen=True)
class CorpusStatistics:
    """Statistics that a metric extracts from predictions and references.

    Attributes:
        rows: Statistics of shape (examples, k), a row for each example.
        compute_score: Computes the score from any selection of these rows.
        signature: What the score depends on, by name; part of `Score.signature`.
        per_example: The scores whose mean the score is; None if it is not a mean.
    """

    rows: np.ndarray
    compute_score: ComputeScore
    signature: Mapping[str, object]
    per_example: list[float] | None = None


@dataclass(frozen=True)
class Score:
    """The score of a corpus.

    Attributes:
        value: The score.
        per_example: The scores whose mean it is; None if it is not a mean.
        signature: What exactly was computed, with which options and versions, as in sacreBLEU.
        statistics: Of shape (examples, k); value = compute_score(statistics).
        compute_score: Computes the score from such statistics.
    """

    value: float
    per_example: list[float] | None
    signature: str
    statistics: np.ndarray = field(repr=False, compare=False)
    compute_score: ComputeScore = field(repr=False, compare=False)


class Scores(dict[str, Score]):
    """Metric -> its score; `omitted` says, for every other metric that was requested, why it has no score."""

    def __init__(self, scores: Mapping[str, Score], omitted: Mapping[str, str]) -> None:
        super().__init__(scores)
        self.omitted = dict(omitted)

    def __missing__(self, name: str) -> Score:
        raise DeltuneError(f"{name} was not computed: {self.omitted.get(name, 'it was not requested')}")


@dataclass(frozen=True)
class Metric:
    """A score of predictions against references.

    Attributes:
        input_type: What is compared.
        compute: Extracts the statistics from predictions, references and options.
        options: The options with their defaults. Every option that can change the score is part of the signature.
        range: The smallest and the largest score.
        better: Whether higher or lower scores are better.
        packages: The distributions that it needs; their versions are part of the signature.
        extra: The extra of deltune that installs them.
        unmet_requirement: Returns, for given options, what is missing besides packages, such as Java, as the end of
            a message; None if nothing is.
    """

    input_type: InputType
    compute: Callable[[Sequence[Any], Sequence[Any], Options], CorpusStatistics]
    options: Options = field(default_factory=dict)
    range: tuple[float, float] = (0.0, 1.0)
    better: Literal["higher", "lower"] = "higher"
    packages: tuple[str, ...] = ()
    extra: str = "train"
    unmet_requirement: Callable[[Options], str | None] = lambda options: None

    def why_unavailable(self, options: Options) -> str | None:
        """Return why the metric cannot be computed here with these options, or None if it can."""
        if missing := [package for package in self.packages if not is_installed(package)]:
            return missing_extra("needs", missing, self.extra)
        return self.unmet_requirement(options)

    def package_versions(self) -> dict[str, str]:
        """Return the installed version of each package, for the signature."""
        return {package: importlib.metadata.version(package) for package in self.packages}


def mean_statistics(values: Sequence[float], signature: Options) -> CorpusStatistics:
    """Return the statistics of a score that is the mean of one number for each example."""
    numbers = [float(value) for value in values]
    return CorpusStatistics(np.array(numbers).reshape(-1, 1), lambda rows: float(rows.mean()), signature, numbers)


def ratio_statistics(rows: Sequence[tuple[float, float]], signature: Options) -> CorpusStatistics:
    """Return the statistics of a score Σ numerators / Σ denominators, given as pairs, one for each example."""

    def compute_score(rows: np.ndarray) -> float:
        numerator, denominator = rows.sum(axis=0)
        return float(numerator / denominator)

    return CorpusStatistics(np.array(rows, dtype=float), compute_score, signature)


def group_statistics(statistics: CorpusStatistics, sizes: Sequence[int]) -> CorpusStatistics:
    """Return statistics whose rows are groups of rows, such as the words of a text, which are drawn together."""
    groups = np.split(statistics.rows, np.cumsum(sizes)[:-1])

    def compute_score(chosen: np.ndarray) -> float:
        return statistics.compute_score(np.concatenate([groups[int(i)] for i in chosen[:, 0]]))

    return CorpusStatistics(np.arange(len(sizes)).reshape(-1, 1), compute_score, statistics.signature)


def reduce_references(
    values: Sequence[float], references: Sequence[Sequence[str]], how: Literal["max", "mean"]
) -> list[float]:
    """Reduce one number for each reference to one for each example."""
    reduced, start = [], 0
    for accepted in references:
        numbers = values[start : start + len(accepted)]
        reduced.append(float(max(numbers) if how == "max" else sum(numbers) / len(numbers)))
        start += len(accepted)
    return reduced
