"""What a benchmark finds: a row with its figure, its interval, its target, and whether that is met."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from benchmarks.ratios import Ratio, paired_ratio


@dataclass(frozen=True)
class Target:
    """A limit of the figure.

    sense: which side of it is right. by: `figure`, the figure itself must lie there; `interval`, some of its 95 %
    interval must, so that only what is surely on the wrong side fails (for comparisons with others' work).
    """

    limit: float
    sense: Literal["at most", "at least"] = "at most"
    by: Literal["figure", "interval"] = "figure"

    def met(self, figure: float, interval: tuple[float, float] | None = None) -> bool:
        low, high = interval if interval is not None and self.by == "interval" else (figure, figure)
        return low <= self.limit if self.sense == "at most" else high >= self.limit

    def __str__(self) -> str:
        return f"{'≤' if self.sense == 'at most' else '≥'} {self.limit:.3g}"


NOT_SLOWER = Target(1.0, by="interval")
"""Than what others need for the same."""


@dataclass(frozen=True)
class Row:
    """One figure. None: it was not measured, and the note says why.

    unit: what the figure counts, `×` for a ratio. passed: None where there is no target or no figure.
    """

    name: str
    figure: float | None
    target: Target | None = None
    interval: tuple[float, float] | None = None
    unit: str = "×"
    note: str = ""

    @property
    def passed(self) -> bool | None:
        if self.figure is None or self.target is None:
            return None
        return self.target.met(self.figure, self.interval)

    def json(self) -> dict[str, Any]:
        return {**asdict(self), "passed": self.passed}

    @classmethod
    def of_json(cls, values: dict[str, Any]) -> Row:
        target, interval = values["target"], values["interval"]
        fields = {name: values[name] for name in ("name", "figure", "unit", "note")}
        low_high = (interval[0], interval[1]) if interval else None
        return cls(**fields, target=Target(**target) if target else None, interval=low_high)


def compared(
    name: str, ours: Sequence[float], theirs: Sequence[float], target: Target | None = None, note: str = ""
) -> Row:
    """The paired ratio of seconds of the same rounds as a row."""
    return of_ratio(name, paired_ratio(ours, theirs), target, note)


def of_ratio(name: str, ratio: Ratio, target: Target | None = None, note: str = "") -> Row:
    prefix = f"{note}; " if note else ""
    return Row(name, ratio.figure, target, (ratio.low, ratio.high), note=f"{prefix}{ratio.rounds} rounds")


def missing(name: str, why: str) -> Row:
    """A row for what could not be measured."""
    return Row(name, None, note=f"not measured: {why}")
