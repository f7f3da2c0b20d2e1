"""The frame of every figure: a panel for each label, strips below it, levels across, and what no panel can show."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from ..engine.outcomes import Outcome
from . import style
from .aggregate import Aggregates, Place, Spread, Unit, aggregate, select_outcomes, unit
from .figure_spec import Figure as View
from .figure_spec import Label, Numbers, names
from .style import wrapped

WIDTH, HEIGHT = 4.5, 2.75  # inches of one panel: read at its own size on a page, and still on a telephone


@dataclass
class Sheet:
    """A figure under way.

    found: whether there is any number. text, notes: what it shows and what it cannot, in words. series, lines: handles
    of the legend, by name, of series and of levels. beside: for each panel, points with names to write there in place
    of the series' legend.
    """

    view: View
    outcomes: list[Outcome]
    levels: dict[str, Any]
    labels: tuple[Label, ...] = (None,)
    figure: Figure = field(default_factory=lambda: Figure(layout="constrained"))
    axes: list[Axes] = field(default_factory=list)
    strips: list[Axes] = field(default_factory=list)
    series: dict[str, Any] = field(default_factory=dict)
    lines: dict[str, Artist] = field(default_factory=dict)
    beside: list[tuple[Axes, list[tuple[float, float]], list[str]]] = field(default_factory=list)
    found: bool = False
    text: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def outer(self) -> tuple[str, ...]:
        """The axis of the panels, if any: the first of every place."""
        return (self.view.panels,) if self.view.panels else ()

    def gather(self, wanted: Any, axes: Sequence[str], x: str = "", view: View | None = None) -> Aggregates:
        """Facts by panel and these axes; what has no place among them is noted."""
        facts = aggregate(view or self.view, self.outcomes, wanted, (*self.outer, *axes), x)
        self.notes += facts.left
        self.found = self.found or any(spread.mean is not None for spread in facts.spreads.values())
        return facts

    def at(self, panel: Label, place: Place) -> Place:
        return (panel, *place) if self.outer else place

    def unit(self, wanted: Numbers, facts: Aggregates) -> Unit:
        """How the numbers drawn are shown: as the first metric met."""
        return unit(next((name for name in facts.metrics.values() if name), (names(wanted) or ("",))[0]), self.view)

    def units(self, wanted: Numbers, facts: Aggregates) -> dict[Label, Unit]:
        """The same for each panel: as its own first metric."""
        own: dict[Label, Unit] = {}
        for panel in self.labels:
            met = [name for place, name in facts.metrics.items() if name and place[: len(self.outer)] in ((), (panel,))]
            own[panel] = unit(met[0], self.view) if met else self.unit(wanted, facts)
        return own

    def telling(self, axes: Sequence[str]) -> tuple[str, ...]:
        """Those of the axes that tell series apart here, by which they are named; the first at least."""
        met = {axis: {str(outcome.cell.get(axis)) for outcome in self.outcomes} for axis in axes}
        return tuple(axis for axis in axes if len(met[axis]) > 1) or tuple(axes[:1])

    def note(self, spread: Spread, *labels: Label) -> None:
        """Say what is missing of a spread."""
        where = ", ".join(self.view.write(label) for label in labels if label is not None)
        reasons = [*spread.failed, *spread.absent]
        if reasons:
            self.notes.append(f"{where}: {'; '.join(reasons)}")

    def level(self, units: Mapping[Label, Unit]) -> None:
        """Lines across every panel, each with its dash and its name in the legend."""
        for i, (name, level) in enumerate(self.levels.items()):
            colour, dash = "#000000", style.LEVELS[i % len(style.LEVELS)]
            self.lines[name] = Line2D([], [], color=colour, linestyle=dash, linewidth=1.2)
            for panel, axes in zip(self.labels, self.axes, strict=True):
                value = self._height(level, panel)
                if value is None:
                    self.notes.append(
                        f"{name}: no outcome" + ("" if panel is None else f" of {self.view.write(panel)}")
                    )
                else:
                    line = axes.axhline(
                        value * units[panel].factor, color=colour, linestyle=dash, linewidth=1.2, zorder=1.5
                    )
                    line.set_label(f"level {name}")

    def _height(self, level: Any, panel: Label) -> float | None:
        if not isinstance(level, Mapping):
            return float(level)
        found = level.get((panel,) if self.outer else ())
        return None if found is None else found.mean


def sheet(view: View, outcomes: Iterable[Outcome], wanted: Any, strip: float = 0.0, wide: bool = False) -> Sheet:
    """Empty panels for a view; strip: the share of a panel's height that a strip below it takes.

    Outcomes that a level stands for are taken out of the rest: they are its line.
    """
    rest = select_outcomes(outcomes, view.where)
    levels: dict[str, Any] = {}
    outer = (view.panels,) if view.panels else ()
    for name, level in view.levels.items():
        levels[name] = level
        if isinstance(level, Mapping):
            own = select_outcomes(rest, level)
            pooled = tuple(
                dict.fromkeys((*view.pooled, *(a for o in own for a in o.cell if a not in (*outer, "seed"))))
            )
            # Their curves are not asked for: a level is where runs end.
            plain = replace(view, over="", levels={}, pooled=pooled)
            levels[name] = aggregate(plain, own, wanted, outer).spreads
            rest = [outcome for outcome in rest if outcome not in own]
    made = Sheet(view, rest, levels)
    if outer:
        seen = dict.fromkeys(o.cell[view.panels] for o in rest if view.panels in o.cell)
        asked = view.order.get(view.panels, ())
        made.labels = (*asked, *(label for label in seen if label not in asked)) or (None,)
    many = len(made.labels)
    columns = 1 if many == 1 or wide else 2
    rows = math.ceil(many / columns)
    made.figure.set_size_inches(WIDTH if columns == 1 else 7.6, (HEIGHT if columns == 1 else 2.35) * rows * (1 + strip))
    grid = made.figure.add_gridspec(rows, columns)
    for i, label in enumerate(made.labels):
        if strip:
            inner = grid[i // columns, i % columns].subgridspec(2, 1, height_ratios=(1, strip), hspace=0.08)
            axes = made.figure.add_subplot(inner[0])
            made.strips.append(made.figure.add_subplot(inner[1], sharex=axes))
            axes.tick_params(labelbottom=False)
        else:
            axes = made.figure.add_subplot(grid[i // columns, i % columns])
        if label is not None:
            axes.set_title(wrapped(view.write(label), 40), loc="left", fontweight="bold")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
        made.axes.append(axes)
    return made


def heading(own: Unit, view: View) -> str:
    """An axis' own words: the metric, with % where it was multiplied by 100, and an arrow where lower is better."""
    return view.write(own.name) + (" (%)" if own.factor == 100 else "") + (" ↓" if own.lower else "")


def combined(facts: Aggregates, axes: Sequence[str], view: View) -> list[Place]:
    """The combinations of labels met on some axes, in the order of their labels."""
    known = [facts.labels(axis, view) for axis in axes]
    at = [facts.axes.index(axis) for axis in axes]
    met = dict.fromkeys(tuple(place[i] for i in at) for place in facts.spreads)
    if len(axes) == 1:
        met.update(dict.fromkeys((label,) for label in known[0]))
    return sorted(met, key=lambda place: tuple(known[i].index(label) for i, label in enumerate(place)))


def looks(series: Sequence[Place]) -> dict[Place, style.SeriesStyle]:
    """An ink for each series: of two axes, colour by the first label and shape by the second."""
    first = list(dict.fromkeys(place[0] for place in series))
    if all(len(place) == 1 for place in series):
        return {place: style.series_style(i) for i, place in enumerate(series)}
    second = list(dict.fromkeys(place[1:] for place in series))
    return {place: style.series_style(first.index(place[0]), second.index(place[1:])) for place in series}


def called(place: Place, view: View, between: str = ", ") -> str:
    return between.join(view.write(label) for label in place) or "all"
