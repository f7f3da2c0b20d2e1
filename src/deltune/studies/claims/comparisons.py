"""Paired effects of cells: weighted sums of their numbers for each setting and seed, or the reasons why not."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import DeltuneError
from ..engine.outcomes import Cell, Outcome
from .measurements import MetricChoice, Number, Reading
from .statistics import slope_weights


@dataclass(frozen=True)
class Chosen:
    """Labels of an axis that are known only in a study: all of them, the smallest, the largest."""

    what: str

    def __repr__(self) -> str:
        return self.what


EVERY, SMALLEST, LARGEST = Chosen("every"), Chosen("smallest"), Chosen("largest")

Where = Mapping[str, Any]
"""axis -> a label, several labels (their mean), or EVERY, SMALLEST, LARGEST of those that occur."""

DATA = ("task", "target")
"""Axes that say which test split a score is of."""

SEED = "seed"
Key = tuple[tuple[str, Hashable], ...]


class MissingCells(Exception):
    """Reasons why a comparison cannot be made."""

    def __init__(self, reasons: Sequence[str]) -> None:
        self.reasons = list(dict.fromkeys(reasons))
        more = len(self.reasons) - 3
        super().__init__("; ".join(self.reasons[:3]) + (f"; and {more} more" if more > 0 else ""))


def describe_cell(where: Mapping[str, Any]) -> str:
    """A cell or a choice of cells in words: method=lora, task=cb."""
    return ", ".join(
        f"{axis}={' or '.join(map(str, label)) if isinstance(label, tuple) else label}" for axis, label in where.items()
    )


class Cells:
    """The outcomes of a study by their cells."""

    def __init__(self, outcomes: Sequence[Outcome], asked: MetricChoice) -> None:
        self.outcomes, self.asked = list(outcomes), asked
        self.axes = list(dict.fromkeys(axis for outcome in outcomes for axis in outcome.cell))
        self.cells: dict[Key, Outcome] = {}
        for outcome in self.outcomes:
            key = self._key(outcome.cell, self.axes)
            if key in self.cells:
                raise DeltuneError(f"two outcomes of one cell: {describe_cell(outcome.cell)}.")
            self.cells[key] = outcome
        self._read: dict[tuple[Reading, Key], Number | str] = {}

    def without(self, off: Where) -> Cells:
        """The grid less the cells with one of the labels."""
        kept = [o for o in self.outcomes if not any(o.cell.get(a) in _labels(v) for a, v in off.items())]
        return Cells(kept, self.asked) if off else self

    def labels(self, axis: str, where: Where) -> list[Any]:
        """Labels of an axis among the cells that a choice leaves, in order of appearance."""
        return list(dict.fromkeys(o.cell[axis] for o in self.outcomes if axis in o.cell and _fits(o, where)))

    def strata(self, wheres: Sequence[Where], also: Sequence[str] = ()) -> Iterator[tuple[Key, list[Outcome]]]:
        """The settings of all axes that a comparison does not name, each with its outcomes. Raises Lacking for none."""
        compared = {*also, SEED}.union(*wheres)
        missing = sorted(compared - {*self.axes, SEED})
        if missing:
            raise MissingCells([f"the outcomes have no axis {', '.join(map(repr, missing))}"])
        free = [axis for axis in self.axes if axis not in compared]
        found: dict[Key, list[Outcome]] = {}
        for outcome in self.outcomes:
            if any(_fits(outcome, where) for where in wheres):
                found.setdefault(self._key(outcome.cell, free), []).append(outcome)
        if not found:
            raise MissingCells([f"no outcome has {describe_cell(where)}" for where in wheres])
        yield from found.items()

    def picked(self, where: Where, members: Sequence[Outcome], setting: Key) -> list[Cell]:
        """The cells, but for their seeds, that a choice means in one stratum. Raises Lacking where there is none."""
        fitting = [o for o in members if _fits(o, where)]
        for axis, label in where.items():
            if isinstance(label, Chosen) and label is not EVERY and fitting:
                if len(self.labels(axis, {})) < 2:
                    raise MissingCells([f"only one {axis} in the study: no {label}"])
                extreme = (min if label is SMALLEST else max)(self.place(axis, o.cell[axis]) for o in fitting)
                fitting = [o for o in fitting if self.place(axis, o.cell[axis]) == extreme]
        if not fitting:
            raise MissingCells(
                [f"nothing has {describe_cell(where)}" + (f" at {describe_cell(dict(setting))}" if setting else "")]
            )
        open_axes = [axis for axis, label in where.items() if isinstance(label, Chosen)]
        fixed = {axis: _labels(label) for axis, label in where.items() if axis not in open_axes}
        found = dict.fromkeys(self._key(o.cell, open_axes) for o in fitting)
        return [
            {**dict(setting), **dict(zip(fixed, labels, strict=True)), **dict(key)}
            for key in found
            for labels in itertools.product(*fixed.values())
        ]

    def place(self, axis: str, label: Any) -> float:
        """Where a label stands on its axis: a number as it is ("0.5%" is 0.5), a model by its size. Raises Lacking."""
        if axis != "model":
            number = re.fullmatch(r"\s*([0-9.]+(?:[eE][-+]?[0-9]+)?)\s*%?\s*", str(label))
            if not number:
                raise MissingCells([f"labels of {axis!r} are not in an order: {label!r}"])
            return float(number[1])
        for outcome in self.outcomes:
            size = outcome.extra.get("parameters") or outcome.count.get("denominator_size")
            if outcome.cell.get(axis) == label and size:
                return float(size)
        raise MissingCells([f"the size of the model {label!r} is not known"])

    def read(self, reading: Reading, cell: Cell, seed: Any) -> Number:
        """The number of one cell. Raises Lacking if it is missing or failed."""
        known = {**cell, SEED: seed}
        full = {axis: known[axis] for axis in self.axes if known.get(axis) is not None}
        outcome = self.cells.get(self._key(full, self.axes))
        if outcome is None:
            raise MissingCells([f"missing: {describe_cell(full)}"])
        if outcome.error is not None:
            state = "waiting" if outcome.waiting else "failed"
            raise MissingCells([f"{state}: {describe_cell(full)} ({(outcome.error.splitlines() or [''])[0]})"])
        key = (reading, self._key(full, self.axes))
        if key not in self._read:
            group = [outcome]
            if reading.over is not None:
                alike = [axis for axis in self.axes if axis not in (reading.over, "pair")]
                same = self._key(full, alike)
                group = [o for o in self.outcomes if self._key(o.cell, alike) == same]
            for member, number in zip(group, reading.read(group, self.asked), strict=True):
                self._read[reading, self._key(member.cell, self.axes)] = number
        found = self._read[key]
        if isinstance(found, str):
            raise MissingCells([f"{found}: {describe_cell(full)}"])
        return found

    @staticmethod
    def _key(cell: Cell, axes: Sequence[str]) -> Key:
        return tuple((axis, cell[axis]) for axis in axes if cell.get(axis) is not None)


def seeds_of(members: Sequence[Outcome]) -> list[Any]:
    return list(dict.fromkeys(outcome.cell.get(SEED) for outcome in members))


def _labels(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _fits(outcome: Outcome, where: Where) -> bool:
    """Whether an outcome has the labels of a choice, those known only in a study aside."""
    return all(
        label is EVERY or (axis in outcome.cell and (isinstance(label, Chosen) or outcome.cell[axis] in _labels(label)))
        for axis, label in where.items()
    )


Units = Mapping[Key, Mapping[Hashable, Number]]
"""setting (all axes that are not compared) -> seed -> effect."""

Term = tuple[float, Cell]


@dataclass(frozen=True)
class Comparison:
    """The effect of each seed in each setting; the claim is that their mean lies between low and high."""

    text: str
    units: Units
    low: float
    high: float
    unit: str


@dataclass(frozen=True)
class Exact:
    """A number known without error; the claim is that it is `most` or less."""

    text: str
    value: float
    most: float
    unit: str

    @property
    def true(self) -> bool:
        return self.value <= self.most


Check = Comparison | Exact


def difference(grid: Cells, one: Where, other: Where, reading: Reading) -> Units:
    sign = -1.0 if reading.lower else 1.0

    def terms(setting: Key, members: Sequence[Outcome]) -> list[Term]:
        first, second = (grid.picked(where, members, setting) for where in (one, other))
        return mean_of(first, sign) + mean_of(second, -sign)

    return linear(grid, [one, other], terms, reading)


def linear(
    grid: Cells, wheres: Sequence[Where], terms: Callable[[Key, Sequence[Outcome]], list[Term]], reading: Reading
) -> Units:
    """The weighted sum of cells for each setting and seed. Raises Lacking with every cell that is not there."""
    found: dict[Key, dict[Hashable, Number]] = {}
    reasons: list[str] = []
    for setting, members in grid.strata(wheres):
        try:
            weighted = terms(setting, members)
        except MissingCells as lacking:
            reasons += lacking.reasons
            continue
        found[setting] = {}
        for seed in seeds_of(members):
            try:
                found[setting][seed] = weighted_sum(grid, weighted, reading, seed)
            except MissingCells as lacking:
                reasons += lacking.reasons
        if len(seeds_of(members)) < 2:
            reasons.append(one_seed(setting))
    if reasons:
        raise MissingCells(reasons)
    return found


def one_seed(setting: Key) -> str:
    return "one seed" + (f" at {describe_cell(dict(setting))}" if setting else "") + ": no claim from one seed"


def mean_of(cells: Sequence[Cell], weight: float = 1.0) -> list[Term]:
    return [(weight / len(cells), cell) for cell in cells]


def weighted_sum(grid: Cells, terms: Sequence[Term], reading: Reading, seed: Hashable) -> Number:
    numbers: list[tuple[float, Number]] = []
    reasons: list[str] = []
    for weight, cell in terms:
        try:
            numbers.append((weight, grid.read(reading, cell, seed)))
        except MissingCells as lacking:
            reasons += lacking.reasons
    if reasons:
        raise MissingCells(reasons)
    # Examples of two test splits are no pairs, even where they are equally many.
    apart = {tuple(cell.get(axis) for axis in DATA) for _, cell in terms}
    return combined(numbers, aligned=len(apart) == 1)


def combined(terms: Sequence[tuple[float, Number]], aligned: bool = True) -> Number:
    """Σ weight · number, of their examples too where all have the same ones."""
    value = sum(weight * number.value for weight, number in terms)
    slack = sum(abs(weight) * number.slack for weight, number in terms)
    rows = [weight * number.examples for weight, number in terms if number.examples is not None]
    same = aligned and len(rows) == len(terms) and len({len(row) for row in rows}) == 1
    return Number(value, np.sum(rows, axis=0) if same else None, slack)


def levels(grid: Cells, axis: str, where: Where, members: Sequence[Outcome], setting: Key) -> list[tuple[Any, float]]:
    """Labels of an ordered axis in one stratum with the weights of the slope on their log10."""
    cells = grid.picked({**where, axis: EVERY}, members, setting)
    labels = list(dict.fromkeys(cell[axis] for cell in cells))
    places = [grid.place(axis, label) for label in labels]
    if min(places) <= 0 or len(set(places)) < 2:
        raise MissingCells(
            [f"a trend needs two sizes of {axis}" + (f" at {describe_cell(dict(setting))}" if setting else "")]
        )
    return list(zip(labels, slope_weights([math.log10(place) for place in places]), strict=True))
