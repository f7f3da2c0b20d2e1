"""What the jobs of a study gave: the seam between the engine and the tables, figures and findings made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Cell = Mapping[str, Any]
"""Where in a study's grid: axis -> label, such as {"model": "minilm", "task": "sick", "method": "lora", "seed": 0}."""


@dataclass(frozen=True)
class Outcome:
    """What one job gave; with `error`, why it gave nothing: it failed, or, `waiting`, was not run yet.

    scores: metric -> value on the test split. count: `Count.as_dict()`. examples: metric -> a number for each example
    of the test split, where the metric is their mean. curve: lines of the log. extra: what only its kind of job has.
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
