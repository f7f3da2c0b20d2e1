"""Paired effects of cells: weighted sums of their numbers for each setting and seed, or the reasons why not."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..engine.outcomes import Cell, Outcome
from .cells import DATA, EVERY, Cells, Key, Lacking, Where, said, seeds_of
from .readings import Number, Reading
from .stats import slope_weights

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
        except Lacking as lacking:
            reasons += lacking.reasons
            continue
        found[setting] = {}
        for seed in seeds_of(members):
            try:
                found[setting][seed] = weighted_sum(grid, weighted, reading, seed)
            except Lacking as lacking:
                reasons += lacking.reasons
        if len(seeds_of(members)) < 2:
            reasons.append(one_seed(setting))
    if reasons:
        raise Lacking(reasons)
    return found


def one_seed(setting: Key) -> str:
    return "one seed" + (f" at {said(dict(setting))}" if setting else "") + ": no claim from one seed"


def mean_of(cells: Sequence[Cell], weight: float = 1.0) -> list[Term]:
    return [(weight / len(cells), cell) for cell in cells]


def weighted_sum(grid: Cells, terms: Sequence[Term], reading: Reading, seed: Hashable) -> Number:
    numbers: list[tuple[float, Number]] = []
    reasons: list[str] = []
    for weight, cell in terms:
        try:
            numbers.append((weight, grid.read(reading, cell, seed)))
        except Lacking as lacking:
            reasons += lacking.reasons
    if reasons:
        raise Lacking(reasons)
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
        raise Lacking([f"a trend needs two sizes of {axis}" + (f" at {said(dict(setting))}" if setting else "")])
    return list(zip(labels, slope_weights([math.log10(place) for place in places]), strict=True))
