"""Claims as values: each form is a comparison of cells and the region of effects in which the claim is true."""

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
    CellSelector,
    Check,
    Comparison,
    Exact,
    Key,
    MissingCells,
    Term,
    combine_numbers,
    describe_cell,
    mean_terms,
    one_seed_reason,
    paired_differences,
    seeds_of,
    trend_weights,
    weighted_effects,
    weighted_sum,
)
from .measurements import COUNT, SCORE, Measurement, Number


@dataclass(frozen=True)
class Beats:
    """mean(better) − mean(worse) > margin, in the better direction, paired over all other axes and seeds.

    Attributes:
        better: The cells that are claimed to be better.
        worse: The cells that they are compared with; both name the same axes.
        margin: By how much, in units of the measurement.
        measurement: What is compared.
    """

    better: CellSelector
    worse: CellSelector
    margin: float = 0.0
    measurement: Measurement = SCORE

    def __post_init__(self) -> None:
        _same_axes(self.better, self.worse)

    def checks(self, cells: Cells) -> list[Check]:
        """Return the comparisons to test. Raises `MissingCells` if cells are missing."""
        effects = paired_differences(cells, self.better, self.worse, self.measurement)
        text = f"{describe_cell(self.better)} − {describe_cell(self.worse)}"
        return [Comparison(text, effects, self.margin, math.inf, self.measurement.unit)]


@dataclass(frozen=True)
class Within:
    """mean(cells) − mean(reference) > −points: at most so much worse.

    Attributes:
        what: The cells.
        reference: The cells that they are compared with; both name the same axes.
        points: The margin, in units of the measurement.
        both: Whether they may not be better either: |difference| < points.
        measurement: What is compared.
    """

    what: CellSelector
    reference: CellSelector
    points: float
    both: bool = False
    measurement: Measurement = SCORE

    def __post_init__(self) -> None:
        _same_axes(self.what, self.reference)

    def checks(self, cells: Cells) -> list[Check]:
        """Return the comparisons to test. Raises `MissingCells` if cells are missing."""
        effects = paired_differences(cells, self.what, self.reference, self.measurement)
        text = f"{describe_cell(self.what)} − {describe_cell(self.reference)}"
        return [Comparison(text, effects, -self.points, self.points if self.both else math.inf, self.measurement.unit)]


@dataclass(frozen=True)
class Rises:
    """The least-squares slope along an axis, per decade (factor of ten) of its labels, > margin.

    Attributes:
        axis: The axis: numbers, or models by their size.
        of: The cells whose mean is taken at each label.
        minus: Cells whose slope is subtracted, if any.
        margin: In units of the measurement per decade.
        measurement: What is measured.
    """

    axis: str
    of: CellSelector = field(default_factory=dict)
    minus: CellSelector | None = None
    margin: float = 0.0
    measurement: Measurement = SCORE

    def checks(self, cells: Cells) -> list[Check]:
        """Return the comparisons to test. Raises `MissingCells` if cells are missing."""
        return [self._comparison(cells, self.margin, math.inf)]

    def _comparison(self, cells: Cells, low: float, high: float) -> Comparison:
        selectors = [self.of] if self.minus is None else [self.of, self.minus]

        def terms(setting: Key, members: Sequence[Outcome]) -> list[Term]:
            weighted: list[Term] = []
            for selector, sign in zip(selectors, (1.0, -1.0), strict=False):
                for label, weight in trend_weights(cells, self.axis, selector, members, setting):
                    weighted += mean_terms(
                        cells.select({**selector, self.axis: label}, members, setting), sign * weight
                    )
            return weighted

        text = f"slope along {self.axis}" + "".join(
            f"{' −' if i else ''} of {describe_cell(s)}" for i, s in enumerate(selectors) if s
        )
        effects = weighted_effects(
            cells, [{**selector, self.axis: EVERY} for selector in selectors], terms, self.measurement
        )
        return Comparison(text, effects, low, high, f"{self.measurement.unit} a decade of {self.axis}")


@dataclass(frozen=True)
class Falls(Rises):
    """The slope of `Rises` < margin."""

    def checks(self, cells: Cells) -> list[Check]:
        """Return the comparisons to test. Raises `MissingCells` if cells are missing."""
        return [self._comparison(cells, -math.inf, self.margin)]


@dataclass(frozen=True)
class GapShrinks:
    """The gap between the best and the worst label of an axis shrinks along another: its slope per decade < 0.

    For each seed the other seeds decide which labels are the best and the worst, and the gap is measured on this seed.
    The largest less the smallest of noisy means would lie above the true gap, the more the noisier, and would shrink
    with the noise alone. This one lies at or below the true gap, and at 0 where there is none.

    Attributes:
        over: The axis of the gap, such as "method".
        along: The axis along which it shrinks, such as "model".
        of: The cells that are considered.
        measurement: What is measured.
    """

    over: str
    along: str
    of: CellSelector = field(default_factory=dict)
    measurement: Measurement = SCORE

    def checks(self, cells: Cells) -> list[Check]:
        """Return the comparisons to test. Raises `MissingCells` if cells are missing."""
        selector = {**self.of, self.over: self.of.get(self.over, EVERY), self.along: EVERY}
        effects, reasons = {}, []
        for setting, members in cells.strata([selector]):
            try:
                effects[setting] = self._slopes(cells, selector, members, setting)
            except MissingCells as lacking:
                reasons += lacking.reasons
        if reasons:
            raise MissingCells(reasons)
        text = f"slope along {self.along} of the gap over {self.over}"
        return [Comparison(text, effects, -math.inf, 0.0, f"{self.measurement.unit} a decade of {self.along}")]

    def _slopes(
        self, cells: Cells, selector: CellSelector, members: Sequence[Outcome], setting: Key
    ) -> dict[Hashable, Number]:
        seeds = seeds_of(members)
        if len(seeds) < 2:
            raise MissingCells([one_seed_reason(setting)])
        gaps: dict[Hashable, list[tuple[float, Number]]] = {seed: [] for seed in seeds}
        for label, weight in trend_weights(cells, self.along, selector, members, setting):
            groups: dict[Any, list[Cell]] = {}
            for cell in cells.select({**selector, self.along: label}, members, setting):
                groups.setdefault(cell[self.over], []).append(cell)
            if len(groups) < 2:
                raise MissingCells([f"one {self.over} at {self.along}={label}: no gap"])
            numbers = {
                seed: [weighted_sum(cells, mean_terms(group), self.measurement, seed) for group in groups.values()]
                for seed in seeds
            }
            values = np.array([[number.value for number in numbers[seed]] for seed in seeds])
            for i, seed in enumerate(seeds):
                others = np.delete(values, i, axis=0).mean(axis=0)
                gap = combine_numbers([(1.0, numbers[seed][others.argmax()]), (-1.0, numbers[seed][others.argmin()])])
                gaps[seed].append((weight, gap))
        return {seed: combine_numbers(terms) for seed, terms in gaps.items()}


@dataclass(frozen=True)
class FewerParameters:
    """trained(fewer) ≤ ratio · trained(more) in every setting. Counts are exact, so that one seed is enough.

    Attributes:
        fewer: The cells that are claimed to train fewer parameters.
        more: The cells that they are compared with; both name the same axes.
        ratio: The largest ratio.
    """

    fewer: CellSelector
    more: CellSelector
    ratio: float = 1.0

    def __post_init__(self) -> None:
        _same_axes(self.fewer, self.more)

    def checks(self, cells: Cells) -> list[Check]:
        """Return the comparisons to test. Raises `MissingCells` if cells are missing."""
        largest = 0.0
        for setting, members in cells.strata([self.fewer, self.more]):
            counts = []
            for selector in (self.fewer, self.more):
                selected, seed = cells.select(selector, members, setting), seeds_of(members)[0]
                counts.append(sum(cells.read(COUNT, cell, seed).value for cell in selected) / len(selected))
            largest = max(largest, counts[0] / counts[1] if counts[1] else math.inf)
        text = f"trained scalars of {describe_cell(self.fewer)} / {describe_cell(self.more)}, the largest"
        return [Exact(text, largest, self.ratio, "times")]


@dataclass(frozen=True)
class Best:
    """Cells beat those with every other label of an axis.

    Attributes:
        what: The cells.
        over: The axis.
        exclude: Labels that they are not compared with.
        measurement: What is compared.
    """

    what: CellSelector
    over: str
    exclude: tuple[Any, ...] = ()
    measurement: Measurement = SCORE

    def checks(self, cells: Cells) -> list[Check]:
        """Return the comparisons to test. Raises `MissingCells` if cells are missing."""
        rest = {axis: label for axis, label in self.what.items() if axis != self.over}
        rivals = [r for r in cells.labels(self.over, rest) if r not in (self.what[self.over], *self.exclude)]
        if not rivals:
            raise MissingCells([f"nothing to compare {describe_cell(self.what)} with"])
        return _all_checks(
            cells, [Beats(self.what, {**self.what, self.over: rival}, measurement=self.measurement) for rival in rivals]
        )


@dataclass(frozen=True)
class AllWithin:
    """Any two labels of an axis differ by less than some points.

    Attributes:
        over: The axis.
        points: The margin, in units of the measurement.
        of: The cells that are considered.
        measurement: What is compared.
    """

    over: str
    points: float
    of: CellSelector = field(default_factory=dict)
    measurement: Measurement = SCORE

    def checks(self, cells: Cells) -> list[Check]:
        """Return the comparisons to test. Raises `MissingCells` if cells are missing."""
        selector = {**self.of, self.over: self.of.get(self.over, EVERY)}
        pairs = list(itertools.combinations(cells.labels(self.over, selector), 2))
        if not pairs:
            raise MissingCells([f"no two labels of {self.over} to compare"])
        sides = [({**self.of, self.over: a}, {**self.of, self.over: b}) for a, b in pairs]
        return _all_checks(
            cells, [Within(a, b, self.points, both=True, measurement=self.measurement) for a, b in sides]
        )


@dataclass(frozen=True)
class AllOf:
    """Several forms at once: the claim holds if all of them are true."""

    parts: tuple[Form, ...]

    def checks(self, cells: Cells) -> list[Check]:
        """Return the comparisons to test. Raises `MissingCells` if cells are missing."""
        return _all_checks(cells, self.parts)


Form = Beats | Within | Rises | GapShrinks | FewerParameters | Best | AllWithin | AllOf


@dataclass(frozen=True)
class Claim:
    """A sentence of a paper and its form.

    Attributes:
        text: The sentence.
        source: Where the paper makes it.
        form: The comparisons that decide it.
        exclude: Axis -> labels that it is not about.
    """

    text: str
    source: str
    form: Form
    exclude: CellSelector = field(default_factory=dict)


def _all_checks(cells: Cells, forms: Sequence[Form]) -> list[Check]:
    checks: list[Check] = []
    reasons: list[str] = []
    for form in forms:
        try:
            checks += form.checks(cells)
        except MissingCells as lacking:
            reasons += lacking.reasons
    if reasons:
        raise MissingCells(reasons)
    return checks


def _same_axes(one: CellSelector, other: CellSelector) -> None:
    if one.keys() != other.keys() or not one:
        raise DeltuneError(
            f"both sides of a comparison must name the same axes: {describe_cell(one)!r}, {describe_cell(other)!r}."
        )
