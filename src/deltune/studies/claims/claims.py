"""Claims as comparisons of cells: each form is a paired effect and the region of effects in which the claim holds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...errors import DeltuneError
from ..engine.outcomes import Cell, Outcome
from .comparisons import (
    EVERY,
    Cells,
    Check,
    Comparison,
    Exact,
    Key,
    MissingCells,
    Term,
    Where,
    combined,
    describe_cell,
    difference,
    levels,
    linear,
    mean_of,
    one_seed,
    seeds_of,
    weighted_sum,
)
from .measurements import COUNT, SCORE, Number, Reading


@dataclass(frozen=True)
class Beats:
    """mean(better) − mean(worse) > margin, in the reading's better direction, paired over all other axes and seeds."""

    better: Where
    worse: Where
    margin: float = 0.0
    reading: Reading = SCORE

    def __post_init__(self) -> None:
        _same_axes(self.better, self.worse)

    def checks(self, grid: Cells) -> list[Check]:
        units = difference(grid, self.better, self.worse, self.reading)
        text = f"{describe_cell(self.better)} − {describe_cell(self.worse)}"
        return [Comparison(text, units, self.margin, math.inf, self.reading.unit)]


@dataclass(frozen=True)
class Within:
    """mean(what) − mean(reference) > −points: no worse than that. both: no better either, |difference| < points."""

    what: Where
    reference: Where
    points: float
    both: bool = False
    reading: Reading = SCORE

    def __post_init__(self) -> None:
        _same_axes(self.what, self.reference)

    def checks(self, grid: Cells) -> list[Check]:
        units = difference(grid, self.what, self.reference, self.reading)
        text = f"{describe_cell(self.what)} − {describe_cell(self.reference)}"
        return [Comparison(text, units, -self.points, self.points if self.both else math.inf, self.reading.unit)]


@dataclass(frozen=True)
class Rises:
    """The least-squares slope of a reading on log10 of an axis' labels (a model's size) > margin.

    of: the cells whose mean is taken at each label. less: cells whose slope is subtracted. The slope is per decade.
    """

    axis: str
    of: Where = field(default_factory=dict)
    less: Where | None = None
    margin: float = 0.0
    reading: Reading = SCORE

    def checks(self, grid: Cells) -> list[Check]:
        return [self._comparison(grid, self.margin, math.inf)]

    def _comparison(self, grid: Cells, low: float, high: float) -> Comparison:
        wheres = [self.of] if self.less is None else [self.of, self.less]

        def terms(setting: Key, members: Sequence[Outcome]) -> list[Term]:
            found: list[Term] = []
            for where, sign in zip(wheres, (1.0, -1.0), strict=False):
                for label, weight in levels(grid, self.axis, where, members, setting):
                    found += mean_of(grid.picked({**where, self.axis: label}, members, setting), sign * weight)
            return found

        text = f"slope along {self.axis}" + "".join(
            f"{' −' if i else ''} of {describe_cell(w)}" for i, w in enumerate(wheres) if w
        )
        units = linear(grid, [{**where, self.axis: EVERY} for where in wheres], terms, self.reading)
        return Comparison(text, units, low, high, f"{self.reading.unit} a decade of {self.axis}")


@dataclass(frozen=True)
class Falls(Rises):
    """The same slope < margin."""

    def checks(self, grid: Cells) -> list[Check]:
        return [self._comparison(grid, -math.inf, self.margin)]


@dataclass(frozen=True)
class Shrinks:
    """The slope of (best − worst label of `over`) on log10 of `along` < 0.

    Which labels are the best and the worst is decided by the other seeds, and their distance measured on this one: the
    largest less the smallest of noisy means lies above the true gap, the more the noisier, and would shrink with the
    noise alone. This one lies at or below the true gap, and at 0 where there is none.
    """

    over: str
    along: str
    of: Where = field(default_factory=dict)
    reading: Reading = SCORE

    def checks(self, grid: Cells) -> list[Check]:
        where = {**self.of, self.over: self.of.get(self.over, EVERY), self.along: EVERY}
        units, reasons = {}, []
        for setting, members in grid.strata([where]):
            try:
                units[setting] = self._slopes(grid, where, members, setting)
            except MissingCells as lacking:
                reasons += lacking.reasons
        if reasons:
            raise MissingCells(reasons)
        text = f"slope along {self.along} of the gap over {self.over}"
        return [Comparison(text, units, -math.inf, 0.0, f"{self.reading.unit} a decade of {self.along}")]

    def _slopes(self, grid: Cells, where: Where, members: Sequence[Outcome], setting: Key) -> dict[Hashable, Number]:
        seeds = seeds_of(members)
        if len(seeds) < 2:
            raise MissingCells([one_seed(setting)])
        gaps: dict[Hashable, list[tuple[float, Number]]] = {seed: [] for seed in seeds}
        for label, weight in levels(grid, self.along, where, members, setting):
            groups: dict[Any, list[Cell]] = {}
            for cell in grid.picked({**where, self.along: label}, members, setting):
                groups.setdefault(cell[self.over], []).append(cell)
            if len(groups) < 2:
                raise MissingCells([f"one {self.over} at {self.along}={label}: no gap"])
            numbers = {
                seed: [weighted_sum(grid, mean_of(cells), self.reading, seed) for cells in groups.values()]
                for seed in seeds
            }
            values = np.array([[number.value for number in numbers[seed]] for seed in seeds])
            for i, seed in enumerate(seeds):
                others = np.delete(values, i, axis=0).mean(axis=0)
                gap = combined([(1.0, numbers[seed][others.argmax()]), (-1.0, numbers[seed][others.argmin()])])
                gaps[seed].append((weight, gap))
        return {seed: combined(terms) for seed, terms in gaps.items()}


@dataclass(frozen=True)
class Fewer:
    """trained(fewer) ≤ ratio · trained(more) in every setting: counts are exact, one seed is enough."""

    fewer: Where
    more: Where
    ratio: float = 1.0

    def __post_init__(self) -> None:
        _same_axes(self.fewer, self.more)

    def checks(self, grid: Cells) -> list[Check]:
        largest = 0.0
        for setting, members in grid.strata([self.fewer, self.more]):
            sizes = []
            for where in (self.fewer, self.more):
                cells, seed = grid.picked(where, members, setting), seeds_of(members)[0]
                sizes.append(sum(grid.read(COUNT, cell, seed).value for cell in cells) / len(cells))
            largest = max(largest, sizes[0] / sizes[1] if sizes[1] else math.inf)
        text = f"trained scalars of {describe_cell(self.fewer)} / {describe_cell(self.more)}, the largest"
        return [Exact(text, largest, self.ratio, "times")]


@dataclass(frozen=True)
class Best:
    """A choice beats every other label of an axis; `but`: labels that it is not compared with."""

    what: Where
    over: str
    but: tuple[Any, ...] = ()
    reading: Reading = SCORE

    def checks(self, grid: Cells) -> list[Check]:
        rest = {axis: label for axis, label in self.what.items() if axis != self.over}
        rivals = [r for r in grid.labels(self.over, rest) if r not in (self.what[self.over], *self.but)]
        if not rivals:
            raise MissingCells([f"nothing to compare {describe_cell(self.what)} with"])
        return _all_checks(
            grid, [Beats(self.what, {**self.what, self.over: rival}, reading=self.reading) for rival in rivals]
        )


@dataclass(frozen=True)
class Alike:
    """Any two labels of an axis differ by less than `points`."""

    over: str
    points: float
    of: Where = field(default_factory=dict)
    reading: Reading = SCORE

    def checks(self, grid: Cells) -> list[Check]:
        where = {**self.of, self.over: self.of.get(self.over, EVERY)}
        pairs = list(itertools.combinations(grid.labels(self.over, where), 2))
        if not pairs:
            raise MissingCells([f"no two labels of {self.over} to compare"])
        sides = [({**self.of, self.over: a}, {**self.of, self.over: b}) for a, b in pairs]
        return _all_checks(grid, [Within(a, b, self.points, both=True, reading=self.reading) for a, b in sides])


@dataclass(frozen=True)
class Both:
    """All of several forms."""

    parts: tuple[Form, ...]

    def checks(self, grid: Cells) -> list[Check]:
        return _all_checks(grid, self.parts)


Form = Beats | Within | Rises | Shrinks | Fewer | Best | Alike | Both


@dataclass(frozen=True)
class Claim:
    """A sentence, where it stands, and what it comes down to. off: axis -> labels that it is not about."""

    text: str
    source: str
    form: Form
    off: Where = field(default_factory=dict)


def _all_checks(grid: Cells, forms: Sequence[Form]) -> list[Check]:
    found: list[Check] = []
    reasons: list[str] = []
    for form in forms:
        try:
            found += form.checks(grid)
        except MissingCells as lacking:
            reasons += lacking.reasons
    if reasons:
        raise MissingCells(reasons)
    return found


def _same_axes(one: Where, other: Where) -> None:
    if one.keys() != other.keys() or not one:
        raise DeltuneError(
            f"both sides of a comparison name the same axes: {describe_cell(one)!r}, {describe_cell(other)!r}."
        )
