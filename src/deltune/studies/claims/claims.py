"""Claims as values. Each form of a claim is a comparison of cells and the region of effects in which it is true."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ...errors import DeltuneError
from ..jobs.job import Cell, Outcome
from .comparisons import (
    COUNT,
    SCORE,
    Cells,
    Comparison,
    Exact,
    Measurement,
    MissingCells,
    Number,
    Term,
    combine_numbers,
    mean_terms,
    seeds_of,
    trend_weights,
    weighted_effects,
    weighted_sum,
)
from .selectors import EVERY, CellSelector, Key, describe_cell, describe_difference


@dataclass(frozen=True)
class Beats:
    """mean(better) − mean(worse) > margin, in the better direction, paired over all other axes and seeds.

    Both sides name the same axes. The margin, as in all forms, is in units of the measurement.
    """

    better: CellSelector
    worse: CellSelector
    margin: float = 0.0
    measurement: Measurement = SCORE

    def __post_init__(self) -> None:
        _same_axes(self.better, self.worse)

    def comparisons(self, cells: Cells) -> list[Comparison | Exact]:
        return [_contrast(cells, self.better, self.worse, self.measurement, self.margin, math.inf)]


@dataclass(frozen=True)
class Within:
    """At most so many points worse: mean(cells) − mean(reference) > −points; with `both`, |difference| < points."""

    what: CellSelector
    reference: CellSelector
    points: float
    both: bool = False
    measurement: Measurement = SCORE

    def __post_init__(self) -> None:
        _same_axes(self.what, self.reference)

    def comparisons(self, cells: Cells) -> list[Comparison | Exact]:
        high = self.points if self.both else math.inf
        return [_contrast(cells, self.what, self.reference, self.measurement, -self.points, high)]


@dataclass(frozen=True)
class Between:
    """low < mean(cells) < high, of a measurement that is a number by itself, such as a share of full tuning's time."""

    what: CellSelector
    measurement: Measurement
    low: float = -math.inf
    high: float = math.inf

    def comparisons(self, cells: Cells) -> list[Comparison | Exact]:
        return [_contrast(cells, self.what, None, self.measurement, self.low, self.high)]


@dataclass(frozen=True)
class Rises:
    """The change along an axis, from the smallest to the largest label that was run, > margin.

    It is the rise of the least-squares line on the logarithm of the labels (numbers, or models by their size); of two
    labels, their difference. The change of the cells `minus` is subtracted.
    """

    axis: str
    of: CellSelector = field(default_factory=dict)
    minus: CellSelector | None = None
    margin: float = 0.0
    measurement: Measurement = SCORE

    def comparisons(self, cells: Cells) -> list[Comparison | Exact]:
        return [_contrast(cells, self.of, self.minus, self.measurement, self.margin, math.inf, self.axis)]


@dataclass(frozen=True)
class Falls(Rises):
    """The change of `Rises` < margin."""

    def comparisons(self, cells: Cells) -> list[Comparison | Exact]:
        return [_contrast(cells, self.of, self.minus, self.measurement, -math.inf, self.margin, self.axis)]


@dataclass(frozen=True)
class GapShrinks:
    """The gap between the best and the worst label of an axis shrinks along another: its change, as of `Rises`, < 0.

    For each seed the other seeds decide which labels are the best and the worst, and the gap is measured on this seed.
    The largest less the smallest of noisy means would lie above the true gap, the more the noisier, and would shrink
    with the noise alone. This one lies at or below the true gap, and at 0 where there is none.
    """

    over: str
    along: str
    of: CellSelector = field(default_factory=dict)

    def comparisons(self, cells: Cells) -> list[Comparison | Exact]:
        selector = {**self.of, self.over: self.of.get(self.over, EVERY), self.along: EVERY}
        effects, reasons = {}, []
        for setting, members in cells.strata([selector]):
            try:
                effects[setting] = self._changes(cells, selector, members, setting)
            except MissingCells as lacking:
                reasons += lacking.reasons
        if reasons:
            raise MissingCells(reasons)
        text = f"best − worst {self.over}"
        return [Comparison(_change(text, self.along), effects, -math.inf, 0.0, SCORE, is_trend=True)]

    def _changes(
        self, cells: Cells, selector: CellSelector, members: Sequence[Outcome], setting: Key
    ) -> dict[Hashable, Number]:
        seeds = seeds_of(members)
        gaps: dict[Hashable, list[tuple[float, Number]]] = {seed: [] for seed in seeds}
        for label, weight in trend_weights(cells, self.along, selector, members, setting):
            groups: dict[Any, list[Cell]] = {}
            for cell in cells.select({**selector, self.along: label}, members, setting):
                groups.setdefault(cell[self.over], []).append(cell)
            if len(groups) < 2:
                raise MissingCells([f"one {self.over} at {self.along}={label}: no gap"])
            numbers = {
                seed: [weighted_sum(cells, mean_terms(group), SCORE, seed) for group in groups.values()]
                for seed in seeds
            }
            values = np.array([[number.value for number in numbers[seed]] for seed in seeds])
            for i, seed in enumerate(seeds):
                others = (np.delete(values, i, axis=0) if len(seeds) > 1 else values).mean(axis=0)
                gap = combine_numbers([(1.0, numbers[seed][others.argmax()]), (-1.0, numbers[seed][others.argmin()])])
                gaps[seed].append((weight, gap))
        return {seed: combine_numbers(terms) for seed, terms in gaps.items()}


@dataclass(frozen=True)
class FewerParameters:
    """trained(fewer) ≤ ratio · trained(more) in every setting. Counts are exact, so that one seed is enough.

    If it `depends_on_depth`, the number of layers decides it, so that a small model's number decides nothing.
    """

    fewer: CellSelector
    more: CellSelector
    ratio: float = 1.0
    depends_on_depth: bool = False

    def __post_init__(self) -> None:
        _same_axes(self.fewer, self.more)

    def comparisons(self, cells: Cells) -> list[Comparison | Exact]:
        largest, cells = 0.0, cells.counted
        for setting, members in cells.strata([self.fewer, self.more]):
            counts = []
            for selector in (self.fewer, self.more):
                selected, seed = cells.select(selector, members, setting), seeds_of(members)[0]
                counts.append(sum(cells.measure(COUNT, cell, seed).value for cell in selected) / len(selected))
            largest = max(largest, counts[0] / counts[1] if counts[1] else math.inf)
        text = describe_difference(self.fewer, self.more, cells.names, "/")
        return [Exact(text, largest, self.ratio, self.depends_on_depth)]


@dataclass(frozen=True)
class Best:
    """Cells beat the cells with every other label of an axis, the excluded ones aside."""

    what: CellSelector
    over: str
    exclude: tuple[Any, ...] = ()
    measurement: Measurement = SCORE

    def comparisons(self, cells: Cells) -> list[Comparison | Exact]:
        rest = {axis: label for axis, label in self.what.items() if axis != self.over}
        rivals = [r for r in cells.labels(self.over, rest) if r not in (self.what[self.over], *self.exclude)]
        if not rivals:
            raise MissingCells([f"nothing to compare {cells.describe(self.what)} with"])
        return _all_comparisons(
            cells, [Beats(self.what, {**self.what, self.over: rival}, measurement=self.measurement) for rival in rivals]
        )


@dataclass(frozen=True)
class AllWithin:
    """Any two labels of an axis differ by less than some points."""

    over: str
    points: float
    of: CellSelector = field(default_factory=dict)
    measurement: Measurement = SCORE

    def comparisons(self, cells: Cells) -> list[Comparison | Exact]:
        selector = {**self.of, self.over: self.of.get(self.over, EVERY)}
        pairs = list(itertools.combinations(cells.labels(self.over, selector), 2))
        if not pairs:
            raise MissingCells([f"no two labels of {self.over} to compare"])
        sides = [({**self.of, self.over: a}, {**self.of, self.over: b}) for a, b in pairs]
        return _all_comparisons(
            cells, [Within(a, b, self.points, both=True, measurement=self.measurement) for a, b in sides]
        )


@dataclass(frozen=True)
class DropsLess:
    """From one label of an axis to another some cells lose less than others do, of a number of which more is better."""

    less: CellSelector
    more: CellSelector
    axis: str
    start: Any
    end: Any

    def comparisons(self, cells: Cells) -> list[Comparison | Exact]:
        weights = [
            (sign * direction, {**selector, self.axis: label})
            for sign, selector in ((1.0, self.more), (-1.0, self.less))
            for direction, label in ((1.0, self.start), (-1.0, self.end))
        ]

        def terms(setting: Key, members: Sequence[Outcome]) -> list[Term]:
            return [term for w, selector in weights for term in mean_terms(cells.select(selector, members, setting), w)]

        effects = weighted_effects(cells, [selector for _, selector in weights], terms, SCORE)
        step = f"from the {self.start} to the {self.end} {self.axis}"
        text = f"loss {step}: {describe_difference(self.more, self.less, cells.names)}"
        return [Comparison(text, effects, 0.0, math.inf, SCORE)]


@dataclass(frozen=True)
class AllOf:
    """Several forms at once: the claim holds if all of them are true."""

    parts: tuple[Form, ...]

    def comparisons(self, cells: Cells) -> list[Comparison | Exact]:
        return _all_comparisons(cells, self.parts)


@dataclass(frozen=True)
class InEach:
    """A form that must be true in each setting and not on the mean over settings: "every", "all", "in all cases".

    It holds if it is true in the setting where it is the least so (intersection-union, Berger 1982).
    Settings differ in the labels of `axes` (default: of all); the mean is taken over the others.
    """

    form: Form
    axes: tuple[str, ...] = ()

    def comparisons(self, cells: Cells) -> list[Comparison | Exact]:
        comparisons: list[Comparison | Exact] = []
        for compared in self.form.comparisons(cells):
            if isinstance(compared, Exact):
                comparisons.append(compared)
                continue
            groups: dict[Key, dict[Key, Mapping[Hashable, Number]]] = {}
            for setting, seeds in compared.effects.items():
                key = tuple((axis, label) for axis, label in setting if not self.axes or axis in self.axes)
                groups.setdefault(key, {})[setting] = seeds
            for key, effects in groups.items():
                where = f", {cells.describe_setting(key)}" if key else ""
                comparisons.append(replace(compared, text=compared.text + where, effects=effects))
        return comparisons


# `comparisons` of a form are those to test; it raises `MissingCells` if cells are missing.
Form = Beats | Within | Between | DropsLess | Rises | GapShrinks | FewerParameters | Best | AllWithin | AllOf | InEach


@dataclass(frozen=True)
class Claim:
    """A sentence of a paper and its form.

    Attributes:
        text: The sentence.
        source: Where the paper makes it.
        form: The comparisons that decide it.
        exclude: Axis -> labels that it is not about.
        contradiction: What else in the paper says otherwise, if anything does.
        miniature: What the runs of small scale have in place of sizes that the sentence names.
        untestable: Why runs of small scale cannot test it, such as that it is about far larger models.
        repeats: The study whose claim is of the same sentence, which this one tests on other runs.
        printed_range: What the paper prints of it, where its comparison cannot be computed from that.
        printed_in: The printed table that it is checked on. Default: the first that has all of its cells.
    """

    text: str
    source: str
    form: Form
    exclude: CellSelector = field(default_factory=dict)
    contradiction: str = ""
    miniature: str = ""
    untestable: str = ""
    repeats: str = ""
    printed_range: str = ""
    printed_in: str = ""


def _all_comparisons(cells: Cells, forms: Sequence[Form]) -> list[Comparison | Exact]:
    comparisons: list[Comparison | Exact] = []
    reasons: list[str] = []
    for form in forms:
        try:
            comparisons += form.comparisons(cells)
        except MissingCells as lacking:
            reasons += lacking.reasons
    if reasons:
        raise MissingCells(reasons, comparisons)
    return comparisons


def _contrast(
    cells: Cells, one: CellSelector, other: CellSelector | None, measurement: Measurement, low: float, high: float,
    axis: str = "",
) -> Comparison:  # fmt: skip
    """Compare a mean of cells, or its difference to the mean of others, or its fitted change along an axis.

    A difference is turned so that positive is better; where lower is better, its words are the other way round.
    """
    is_turned = measurement.lower and other is not None and not axis
    sides = [(-1.0 if is_turned else 1.0, one), *([] if other is None else [(1.0 if is_turned else -1.0, other)])]

    def terms(setting: Key, members: Sequence[Outcome]) -> list[Term]:
        if not axis:
            return [term for sign, side in sides for term in mean_terms(cells.select(side, members, setting), sign)]
        trends = [trend_weights(cells, axis, side, members, setting) for _, side in sides]
        if trends[0] != trends[-1]:
            where = f" {cells.describe(dict(setting))}" if setting else ""
            raise MissingCells([f"trends over different labels of {axis}{where}"])
        return [
            term
            for sign, side in sides
            for label, weight in trends[0]
            for term in mean_terms(cells.select({**side, axis: label}, members, setting), sign * weight)
        ]

    selectors = [{**side, axis: EVERY} if axis else side for _, side in sides]
    effects = weighted_effects(cells, selectors, terms, measurement)
    if other is None:
        text = cells.describe(one)
    else:
        text = describe_difference(*((other, one) if is_turned else (one, other)), cells.names)
    return Comparison(
        _change(text, axis) if axis else text, effects, low, high, measurement,
        is_difference=bool(axis) or other is not None, is_trend=bool(axis),
    )  # fmt: skip


def _change(text: str, axis: str) -> str:
    return f"fitted change from the smallest to the largest {axis}" + (f": {text}" if text != "all" else "")


def _same_axes(one: CellSelector, other: CellSelector) -> None:
    if one.keys() != other.keys() or not one:
        raise DeltuneError(
            f"both sides of a comparison must name the same axes: {describe_cell(one)!r}, {describe_cell(other)!r}."
        )
