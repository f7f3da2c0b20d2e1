"""The outcome of one job of a study: what the engine hands to tables, figures and claims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Cell = Mapping[str, Any]
"""A place in a study's grid, axis -> label: {"model": "minilm", "task": "sick", "method": "lora", "seed": 0}."""


@dataclass(frozen=True)
class Outcome:
    """The result of one job, or the reason why there is none.

    Attributes:
        cell: Where the job stands in the study's grid.
        spec: The run's configuration, as JSON values.
        scores: Metric -> value on the test split.
        count: `Count.as_dict()` of the method.
        examples: Metric -> a number for each example of the test split, for metrics that are the mean of such numbers.
        curve: Lines of the training log.
        seconds: Duration of the job.
        error: Why there is no result; None if there is one.
        waiting: Whether the job has not run yet, as opposed to having failed.
        extra: What only this kind of job reports, such as the changes of each norm.
    """

    cell: Cell
    spec: Mapping[str, Any] = field(default_factory=dict)
    scores: Mapping[str, float] = field(default_factory=dict)
    count: Mapping[str, Any] = field(default_factory=dict)
    examples: Mapping[str, Sequence[float]] = field(default_factory=dict)
    curve: Sequence[Mapping[str, Any]] = ()
    seconds: float = 0.0
    error: str | None = None
    waiting: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)
