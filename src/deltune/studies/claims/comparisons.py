"""Comparisons of cells: paired effects for each setting and seed, or the reasons why they cannot be computed."""

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
from .measurements import Measurement, MetricChoice, Number
from .statistics import slope_weights


@dataclass(frozen=True)
class SymbolicLabel:
    """A label that stands for labels of the study at hand: all of them, the smallest, or the largest."""

    name: str

    def __repr__(self) -> str:
        return self.name


EVERY, SMALLEST, LARGEST = SymbolicLabel("every"), SymbolicLabel("smallest"), SymbolicLabel("largest")

CellSelector = Mapping[str, Any]
"""Axis -> a label, a tuple of labels (their mean is taken), or EVERY, SMALLEST or LARGEST of those that occur."""

DATA_AXES = ("task", "target")
"""Axes that determine the test split of a score."""

SEED = "seed"
Key = tuple[tuple[str, Hashable], ...]
"""Labels on some axes, in the order of the axes."""


class MissingCells(Exception):
    """A comparison cannot be made, for these reasons."""

    def __init__(self, reasons: Sequence[str]) -> None:
        self.reasons = list(dict.fromkeys(reasons))
        more = len(self.reasons) - 3
        super().__init__("; ".join(self.reasons[:3]) + (f"; and {more} more" if more > 0 else ""))


def describe_cell(selector: Mapping[str, Any]) -> str:
    """Describe a cell or a selection of cells: "method=lora, task=cb"."""
    return ", ".join(
        f"{axis}={' or '.join(map(str, label)) if isinstance(label, tuple) else label}"
        for axis, label in selector.items()
    )


class Cells:
    """The outcomes of a study, by cell.

    Args:
        outcomes: The outcomes.
        metric: The score that counts.

    Raises:
        DeltuneError: Two outcomes belong to one cell.
    """

    def __init__(self, outcomes: Sequence[Outcome], metric: MetricChoice) -> None:
        self.outcomes, self.metric = list(outcomes), metric
        self.axes = list(dict.fromkeys(axis for outcome in outcomes for axis in outcome.cell))
        self.cells: dict[Key, Outcome] = {}
        for outcome in self.outcomes:
            key = self._key(outcome.cell, self.axes)
            if key in self.cells:
                raise DeltuneError(f"two outcomes of one cell: {describe_cell(outcome.cell)}.")
            self.cells[key] = outcome
        self._read: dict[tuple[Measurement, Key], Number | str] = {}

    def excluding(self, exclude: CellSelector) -> Cells:
        """Return the cells without those that have one of the labels."""
        remaining = [o for o in self.outcomes if not any(o.cell.get(a) in _as_labels(v) for a, v in exclude.items())]
        return Cells(remaining, self.metric) if exclude else self

    def labels(self, axis: str, selector: CellSelector) -> list[Any]:
        """Return the labels of an axis among the selected cells, in order of appearance."""
        return list(dict.fromkeys(o.cell[axis] for o in self.outcomes if axis in o.cell and _matches(o, selector)))

    def strata(self, selectors: Sequence[CellSelector]) -> Iterator[tuple[Key, list[Outcome]]]:
        """Yield every setting of the axes that a comparison does not name, with its outcomes.

        Raises:
            MissingCells: There is none.
        """
        compared = {SEED}.union(*selectors)
        missing = sorted(compared - {*self.axes, SEED})
        if missing:
            raise MissingCells([f"the outcomes have no axis {', '.join(map(repr, missing))}"])
        free = [axis for axis in self.axes if axis not in compared]
        by_setting: dict[Key, list[Outcome]] = {}
        for outcome in self.outcomes:
            if any(_matches(outcome, selector) for selector in selectors):
                by_setting.setdefault(self._key(outcome.cell, free), []).append(outcome)
        if not by_setting:
            raise MissingCells([f"no outcome has {describe_cell(selector)}" for selector in selectors])
        yield from by_setting.items()

    def select(self, selector: CellSelector, members: Sequence[Outcome], setting: Key) -> list[Cell]:
        """Return the cells, without their seeds, that a selector means in one stratum.

        Args:
            selector: The selector.
            members: The outcomes of the stratum.
            setting: The labels that they share.

        Raises:
            MissingCells: There is no such cell.
        """
        matches = [o for o in members if _matches(o, selector)]
        for axis, label in selector.items():
            if isinstance(label, SymbolicLabel) and label is not EVERY and matches:
                if len(self.labels(axis, {})) < 2:
                    raise MissingCells([f"only one {axis} in the study: no {label}"])
                extreme = (min if label is SMALLEST else max)(self.position(axis, o.cell[axis]) for o in matches)
                matches = [o for o in matches if self.position(axis, o.cell[axis]) == extreme]
        if not matches:
            raise MissingCells(
                [f"nothing has {describe_cell(selector)}" + (f" at {describe_cell(dict(setting))}" if setting else "")]
            )
        open_axes = [axis for axis, label in selector.items() if isinstance(label, SymbolicLabel)]
        fixed = {axis: _as_labels(label) for axis, label in selector.items() if axis not in open_axes}
        keys = dict.fromkeys(self._key(o.cell, open_axes) for o in matches)
        return [
            {**dict(setting), **dict(zip(fixed, labels, strict=True)), **dict(key)}
            for key in keys
            for labels in itertools.product(*fixed.values())
        ]

    def position(self, axis: str, label: Any) -> float:
        """Return a label's position on its axis: the size of a model, elsewhere the label's number ("0.5%" is 0.5).

        Raises:
            MissingCells: The label has no position.
        """
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

    def read(self, measurement: Measurement, cell: Cell, seed: Any) -> Number:
        """Return the measured number of a cell.

        Args:
            measurement: What is measured.
            cell: The cell, without its seed.
            seed: The seed.

        Raises:
            MissingCells: The run is missing, has failed or does not have the number.
        """
        labels = {**cell, SEED: seed}
        full = {axis: labels[axis] for axis in self.axes if labels.get(axis) is not None}
        outcome = self.cells.get(self._key(full, self.axes))
        if outcome is None:
            raise MissingCells([f"missing: {describe_cell(full)}"])
        if outcome.error is not None:
            state = "waiting" if outcome.waiting else "failed"
            raise MissingCells([f"{state}: {describe_cell(full)} ({(outcome.error.splitlines() or [''])[0]})"])
        key = (measurement, self._key(full, self.axes))
        if key not in self._read:
            group = [outcome]
            if measurement.over is not None:
                alike = [axis for axis in self.axes if axis not in (measurement.over, "pair")]
                same = self._key(full, alike)
                group = [o for o in self.outcomes if self._key(o.cell, alike) == same]
            for member, number in zip(group, measurement.read(group, self.metric), strict=True):
                self._read[measurement, self._key(member.cell, self.axes)] = number
        number = self._read[key]
        if isinstance(number, str):
            raise MissingCells([f"{number}: {describe_cell(full)}"])
        return number

    @staticmethod
    def _key(cell: Cell, axes: Sequence[str]) -> Key:
        return tuple((axis, cell[axis]) for axis in axes if cell.get(axis) is not None)


def seeds_of(members: Sequence[Outcome]) -> list[Any]:
    """Return the seeds of some outcomes, each once."""
    return list(dict.fromkeys(outcome.cell.get(SEED) for outcome in members))


def _as_labels(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _matches(outcome: Outcome, selector: CellSelector) -> bool:
    """Whether an outcome has the labels of a selector; a symbolic label is any label of its axis."""
    return all(
        label is EVERY
        or (axis in outcome.cell and (isinstance(label, SymbolicLabel) or outcome.cell[axis] in _as_labels(label)))
        for axis, label in selector.items()
    )


Effects = Mapping[Key, Mapping[Hashable, Number]]
"""Setting (labels on the axes that are not compared) -> seed -> effect."""

Term = tuple[float, Cell]
"""A weight and the cell whose number it multiplies."""


@dataclass(frozen=True)
class Comparison:
    """A claim that the mean effect lies between two bounds.

    Attributes:
        text: What is compared.
        effects: The effect of each seed in each setting.
        low: The lower bound.
        high: The upper bound.
        unit: The unit of the effects.
    """

    text: str
    effects: Effects
    low: float
    high: float
    unit: str


@dataclass(frozen=True)
class Exact:
    """A claim that a number without error is at most some maximum.

    Attributes:
        text: What the number is.
        value: The number.
        maximum: What it may be at most.
        unit: The unit of the number.
    """

    text: str
    value: float
    maximum: float
    unit: str

    @property
    def is_true(self) -> bool:
        """Whether the claim is true."""
        return self.value <= self.maximum


Check = Comparison | Exact


def paired_differences(cells: Cells, one: CellSelector, other: CellSelector, measurement: Measurement) -> Effects:
    """Return mean(one) − mean(other), turned so that positive is better, for each setting and seed.

    Raises:
        MissingCells: Cells are missing, with a reason for each.
    """
    sign = -1.0 if measurement.lower else 1.0

    def terms(setting: Key, members: Sequence[Outcome]) -> list[Term]:
        first, second = (cells.select(selector, members, setting) for selector in (one, other))
        return mean_terms(first, sign) + mean_terms(second, -sign)

    return weighted_effects(cells, [one, other], terms, measurement)


def weighted_effects(
    cells: Cells,
    selectors: Sequence[CellSelector],
    terms: Callable[[Key, Sequence[Outcome]], list[Term]],
    measurement: Measurement,
) -> Effects:
    """Return a weighted sum of cells for each setting and seed.

    Args:
        cells: The study's cells.
        selectors: What is compared.
        terms: (setting, its outcomes) -> the terms of the sum.
        measurement: What is measured.

    Raises:
        MissingCells: Cells are missing, with a reason for each.
    """
    effects: dict[Key, dict[Hashable, Number]] = {}
    reasons: list[str] = []
    for setting, members in cells.strata(selectors):
        try:
            weighted = terms(setting, members)
        except MissingCells as lacking:
            reasons += lacking.reasons
            continue
        effects[setting] = {}
        for seed in seeds_of(members):
            try:
                effects[setting][seed] = weighted_sum(cells, weighted, measurement, seed)
            except MissingCells as lacking:
                reasons += lacking.reasons
        if len(seeds_of(members)) < 2:
            reasons.append(one_seed_reason(setting))
    if reasons:
        raise MissingCells(reasons)
    return effects


def one_seed_reason(setting: Key) -> str:
    """Return the reason why a setting with a single seed decides nothing."""
    return "one seed" + (f" at {describe_cell(dict(setting))}" if setting else "") + ": no claim from one seed"


def mean_terms(cells: Sequence[Cell], weight: float = 1.0) -> list[Term]:
    """Return the terms of weight · mean(cells)."""
    return [(weight / len(cells), cell) for cell in cells]


def weighted_sum(cells: Cells, terms: Sequence[Term], measurement: Measurement, seed: Hashable) -> Number:
    """Return Σ weight · number of the terms under one seed.

    Raises:
        MissingCells: Cells are missing, with a reason for each.
    """
    numbers: list[tuple[float, Number]] = []
    reasons: list[str] = []
    for weight, cell in terms:
        try:
            numbers.append((weight, cells.read(measurement, cell, seed)))
        except MissingCells as lacking:
            reasons += lacking.reasons
    if reasons:
        raise MissingCells(reasons)
    # Examples of two test splits are no pairs, even where they are equally many.
    apart = {tuple(cell.get(axis) for axis in DATA_AXES) for _, cell in terms}
    return combine_numbers(numbers, aligned=len(apart) == 1)


def combine_numbers(terms: Sequence[tuple[float, Number]], aligned: bool = True) -> Number:
    """Return Σ weight · number, also of their examples if all numbers have the same ones.

    Args:
        terms: Weights and numbers.
        aligned: Whether the numbers are of one test split.
    """
    value = sum(weight * number.value for weight, number in terms)
    slack = sum(abs(weight) * number.slack for weight, number in terms)
    rows = [weight * number.examples for weight, number in terms if number.examples is not None]
    same = aligned and len(rows) == len(terms) and len({len(row) for row in rows}) == 1
    return Number(value, np.sum(rows, axis=0) if same else None, slack)


def trend_weights(
    cells: Cells, axis: str, selector: CellSelector, members: Sequence[Outcome], setting: Key
) -> list[tuple[Any, float]]:
    """Return the labels of an ordered axis in one stratum, each with its weight in the slope on log10 of its position.

    Raises:
        MissingCells: The axis has fewer than two positions.
    """
    selected = cells.select({**selector, axis: EVERY}, members, setting)
    labels = list(dict.fromkeys(cell[axis] for cell in selected))
    places = [cells.position(axis, label) for label in labels]
    if min(places) <= 0 or len(set(places)) < 2:
        raise MissingCells(
            [f"a trend needs two sizes of {axis}" + (f" at {describe_cell(dict(setting))}" if setting else "")]
        )
    return list(zip(labels, slope_weights([math.log10(position) for position in places]), strict=True))
