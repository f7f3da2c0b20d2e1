"""The frame of every figure: a panel for each label, strips below it, reference lines, and notes on what is missing."""

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
from .aggregate import Aggregates, Labels, NumberFormat, Spread, aggregate, number_format, select_outcomes
from .figure_spec import FigureSpec, Label, Numbers, as_tuple
from .style import wrap_label

WIDTH, HEIGHT = 4.5, 2.75  # inches of one panel: legible at its own size on a page, and on a telephone too


@dataclass
class FigureDraft:
    """A figure that is being drawn.

    Attributes:
        view: What to draw.
        outcomes: The outcomes to draw, without those of reference lines.
        reference_lines: Name -> a number, or the spread of each panel.
        labels: The labels of the panels.
        figure: The figure.
        axes: The axes of each panel.
        strips: The axes of the strip below each panel, if there are any.
        series: Handles of the legend, by name of the series.
        lines: Further handles of the legend, by name.
        point_labels: For each panel the points with names to write beside them in place of the legend.
        has_numbers: Whether there is anything to draw.
        text: What the figure shows, in words.
        notes: What it lacks, in words.
    """

    view: FigureSpec
    outcomes: list[Outcome]
    reference_lines: dict[str, Any]
    labels: tuple[Label, ...] = (None,)
    figure: Figure = field(default_factory=lambda: Figure(layout="constrained"))
    axes: list[Axes] = field(default_factory=list)
    strips: list[Axes] = field(default_factory=list)
    series: dict[str, Any] = field(default_factory=dict)
    lines: dict[str, Artist] = field(default_factory=dict)
    point_labels: list[tuple[Axes, list[tuple[float, float]], list[str]]] = field(default_factory=list)
    has_numbers: bool = False
    text: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def outer(self) -> tuple[str, ...]:
        """The axis of the panels, if any, which is the first of all axes."""
        return (self.view.panels,) if self.view.panels else ()

    def aggregate(
        self, numbers: Numbers, axes: Sequence[str], x: str = "", view: FigureSpec | None = None
    ) -> Aggregates:
        """Aggregate numbers by panel and further axes, and note the outcomes that lack an axis.

        Args:
            numbers: What is aggregated.
            axes: The axes besides the panels.
            x: A number that becomes an axis.
            view: What to draw; by default the figure's own.
        """
        aggregates = aggregate(view or self.view, self.outcomes, numbers, (*self.outer, *axes), x)
        self.notes += aggregates.excluded
        self.has_numbers = self.has_numbers or any(spread.mean is not None for spread in aggregates.spreads.values())
        return aggregates

    def key(self, panel: Label, labels: Labels) -> Labels:
        """Return the labels with the panel's before them, if there are panels."""
        return (panel, *labels) if self.outer else labels

    def number_format(self, numbers: Numbers, aggregates: Aggregates) -> NumberFormat:
        """Return how the numbers are shown: as the first metric that occurs."""
        name = next((name for name in aggregates.metrics.values() if name), (as_tuple(numbers) or ("",))[0])
        return number_format(name, self.view)

    def number_formats(self, numbers: Numbers, aggregates: Aggregates) -> dict[Label, NumberFormat]:
        """Return for each panel how its numbers are shown: as its own first metric."""
        formats: dict[Label, NumberFormat] = {}
        n_outer = len(self.outer)
        for panel in self.labels:
            metrics = [name for key, name in aggregates.metrics.items() if name and key[:n_outer] in ((), (panel,))]
            formats[panel] = (
                number_format(metrics[0], self.view) if metrics else self.number_format(numbers, aggregates)
            )
        return formats

    def distinguishing_axes(self, axes: Sequence[str]) -> tuple[str, ...]:
        """Return those of the axes that have several labels, by which series are named; the first one at least."""
        labels = {axis: {str(outcome.cell.get(axis)) for outcome in self.outcomes} for axis in axes}
        return tuple(axis for axis in axes if len(labels[axis]) > 1) or tuple(axes[:1])

    def note(self, spread: Spread, *labels: Label) -> None:
        """Note what a spread with these labels lacks."""
        where = ", ".join(self.view.display(label) for label in labels if label is not None)
        reasons = [*spread.failed, *spread.absent]
        if reasons:
            self.notes.append(f"{where}: {'; '.join(reasons)}")

    def draw_reference_lines(self, formats: Mapping[Label, NumberFormat]) -> None:
        """Draw the reference lines across every panel, each with its own dash and its name in the legend."""
        for i, (name, line) in enumerate(self.reference_lines.items()):
            colour, dash = "#000000", style.REFERENCE_DASHES[i % len(style.REFERENCE_DASHES)]
            self.lines[name] = Line2D([], [], color=colour, linestyle=dash, linewidth=1.2)
            for panel, axes in zip(self.labels, self.axes, strict=True):
                value = self._height(line, panel)
                if value is None:
                    suffix = "" if panel is None else f" of {self.view.display(panel)}"
                    self.notes.append(f"{name}: no outcome{suffix}")
                else:
                    artist = axes.axhline(
                        value * formats[panel].factor, color=colour, linestyle=dash, linewidth=1.2, zorder=1.5
                    )
                    artist.set_label(f"level {name}")

    def _height(self, line: Any, panel: Label) -> float | None:
        if not isinstance(line, Mapping):
            return float(line)
        spread = line.get((panel,) if self.outer else ())
        return None if spread is None else spread.mean


def start_figure(
    view: FigureSpec, outcomes: Iterable[Outcome], numbers: Numbers, strip: float = 0.0, wide: bool = False
) -> FigureDraft:
    """Make the empty panels of a figure, and aggregate its reference lines.

    Args:
        view: What to draw.
        outcomes: The study's outcomes. Those of reference lines are not drawn otherwise.
        numbers: The numbers of the reference lines.
        strip: The height of the strip below each panel, as a share of the panel's; no strip if 0.
        wide: Whether panels are in one column, however many there are.
    """
    rest = select_outcomes(outcomes, view.where)
    lines: dict[str, Any] = {}
    outer = (view.panels,) if view.panels else ()
    for name, line in view.reference_lines.items():
        lines[name] = line
        if isinstance(line, Mapping):
            of_line = select_outcomes(rest, line)
            axes_of_line = dict.fromkeys(axis for o in of_line for axis in o.cell if axis not in (*outer, "seed"))
            # Not their curves: a reference line is where runs end.
            plain = replace(
                view,
                entries="",
                reference_lines={},
                average_over=tuple({**dict.fromkeys(view.average_over), **axes_of_line}),
            )
            lines[name] = aggregate(plain, of_line, numbers, outer).spreads
            rest = [outcome for outcome in rest if outcome not in of_line]
    draft = FigureDraft(view, rest, lines)
    if outer:
        labels = dict.fromkeys(o.cell[view.panels] for o in rest if view.panels in o.cell)
        ordered = view.order.get(view.panels, ())
        draft.labels = (*ordered, *(label for label in labels if label not in ordered)) or (None,)
    columns = 1 if len(draft.labels) == 1 or wide else 2
    rows = math.ceil(len(draft.labels) / columns)
    width, height = (WIDTH, HEIGHT) if columns == 1 else (7.6, 2.35)
    draft.figure.set_size_inches(width, height * rows * (1 + strip))
    grid = draft.figure.add_gridspec(rows, columns)
    for i, label in enumerate(draft.labels):
        if strip:
            inner = grid[i // columns, i % columns].subgridspec(2, 1, height_ratios=(1, strip), hspace=0.08)
            axes = draft.figure.add_subplot(inner[0])
            draft.strips.append(draft.figure.add_subplot(inner[1], sharex=axes))
            axes.tick_params(labelbottom=False)
        else:
            axes = draft.figure.add_subplot(grid[i // columns, i % columns])
        if label is not None:
            axes.set_title(wrap_label(view.display(label), 40), loc="left", fontweight="bold")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
        draft.axes.append(axes)
    return draft


def axis_label(number: NumberFormat, view: FigureSpec) -> str:
    """Return the label of an axis: the metric, with % if it is multiplied by 100, and ↓ if lower is better."""
    return view.display(number.name) + (" (%)" if number.factor == 100 else "") + (" ↓" if number.lower else "")


def label_combinations(aggregates: Aggregates, axes: Sequence[str], view: FigureSpec) -> list[Labels]:
    """Return the combinations of labels that occur on some axes, in the order of their labels."""
    labels = [aggregates.labels(axis, view) for axis in axes]
    at = [aggregates.axes.index(axis) for axis in axes]
    combinations = dict.fromkeys(tuple(key[i] for i in at) for key in aggregates.spreads)
    if len(axes) == 1:
        combinations.update(dict.fromkeys((label,) for label in labels[0]))
    return sorted(combinations, key=lambda key: tuple(labels[i].index(label) for i, label in enumerate(key)))


def assign_styles(series: Sequence[Labels]) -> dict[Labels, style.SeriesStyle]:
    """Return a style for each series; of two axes, the first label gives the colour and the second the shape."""
    first = list(dict.fromkeys(labels[0] for labels in series))
    if all(len(labels) == 1 for labels in series):
        return {labels: style.series_style(i) for i, labels in enumerate(series)}
    second = list(dict.fromkeys(labels[1:] for labels in series))
    return {labels: style.series_style(first.index(labels[0]), second.index(labels[1:])) for labels in series}


def series_name(labels: Labels, view: FigureSpec, separator: str = ", ") -> str:
    """Return the name of the series with these labels."""
    return separator.join(view.display(label) for label in labels) or "all"
