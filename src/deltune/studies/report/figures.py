"""The figures of a study: scatter plots, bars, heat maps and curves, drawn and written as PNG, SVG and PDF.

matplotlib's constrained layout places everything, and a legend stands below the panels. Equal numbers give equal bytes.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from ...errors import number_range
from ...files import atomic_open
from ..jobs.job import Outcome
from .aggregate import (
    CURVE,
    METRIC,
    SEED,
    Aggregates,
    Labels,
    NumberFormat,
    Spread,
    aggregate,
    number_format,
    relative_spreads,
    select_outcomes,
)
from .figure_spec import Bars, Curves, FigureSpec, HeatMap, Label, Numbers, Scatter, as_tuple

COLOURS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#555555",
    "#882255", "#332288", "#999933", "#8B5A2B", "#44AA99",
)  # fmt: skip
"""Okabe and Ito's, without yellow (too pale on white) and with grey for black, which reference lines have; then four of
Tol's and a brown for figures of more than seven series."""

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p")
MARK_SHAPES = ("v", "^", "o", "s")
DASHES = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)))
REFERENCE_DASHES = ((0, (4, 2)), (0, (1, 1.5)), (0, (8, 2, 1, 2)))
HATCHES = ("", "///", "\\\\\\", "xxx", "---", "|||", "+++", "//", "\\\\")
"""Lines alone: dots make an SVG ten times as large."""
TEXT_COLOUR, FAINT_COLOUR, GRID_COLOUR = "#222222", "#6B6B6B", "#E3E3E3"
COLOUR_MAP = "YlGnBu"  # of ColorBrewer's, one of those safe for the colour-blind, dark where the value is large

STYLE: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],  # the first comes with matplotlib, and is the widest
    "font.size": 9, "axes.titlesize": 9, "axes.labelsize": 9, "legend.fontsize": 8.5,
    "xtick.labelsize": 8.5, "ytick.labelsize": 8.5,
    "text.parse_math": False,  # a label with dollar signs is no formula
    "text.color": TEXT_COLOUR, "axes.labelcolor": TEXT_COLOUR, "axes.edgecolor": FAINT_COLOUR,
    "xtick.color": FAINT_COLOUR, "ytick.color": FAINT_COLOUR,
    "xtick.labelcolor": TEXT_COLOUR, "ytick.labelcolor": TEXT_COLOUR,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True,
    "grid.color": GRID_COLOUR, "grid.linewidth": 0.7, "axes.linewidth": 0.7, "hatch.linewidth": 0.8,
    "lines.linewidth": 1.6, "lines.markersize": 5.5, "legend.frameon": False,
    "figure.dpi": 100, "savefig.dpi": 200, "pdf.fonttype": 42, "path.simplify_threshold": 0.2,
    "svg.hashsalt": "deltune", "svg.fonttype": "none",
}  # fmt: skip

WIDTH, HEIGHT = 4.5, 2.75
"""Inches of one panel: legible at its own size on a page, and on a telephone too."""
LETTER, LINE = 0.078, 0.18
"""Inches of a letter's width and of a line's height, on the safe side."""
CELL_SIZE = 0.27
SLANT_DEGREES = 40


@dataclass(frozen=True)
class SeriesStyle:
    """Colour, marker and dash of a series."""

    colour: str
    marker: str
    dash: Any


def series_style(first: int, second: int | None = None) -> SeriesStyle:
    """Return the style of a series: of two axes the first label gives the colour, the second marker and dash."""
    shape = first if second is None else second
    return SeriesStyle(COLOURS[first % len(COLOURS)], MARKERS[shape % len(MARKERS)], DASHES[shape % len(DASHES)])


def short_number(value: float) -> str:
    """Return a number as a tick label without powers of ten: 0.001, 0.5, 20, 1k, 250k, 4.4M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{letter}"
    return f"{value:.10f}".rstrip("0").rstrip(".") if 0 < abs(value) < 1e-3 else f"{value:.4g}"


SHORT_NUMBERS = FuncFormatter(lambda value, _: short_number(value))


def wrap_label(text: str, width: int) -> str:
    """Break a label into lines of at most `width` letters, five lines at most."""
    return "\n".join(textwrap.wrap(shorten(text, 4 * width), width))


def shorten(text: str, most: int) -> str:
    """Cut the middle out of a label longer than `most`, since expressions differ at their ends."""
    return text if len(text) <= most else f"{text[: most // 2]}…{text[-(most - most // 2 - 1) :]}"


@dataclass
class FigureDraft:
    """A figure that is being drawn: its panels and strips by label, the legend's handles, its words and its gaps."""

    view: FigureSpec
    outcomes: list[Outcome]
    reference_lines: dict[str, Any]
    labels: tuple[Label, ...] = (None,)
    figure: Figure = field(default_factory=lambda: Figure(layout="constrained"))
    axes: list[Axes] = field(default_factory=list)
    strips: list[Axes] = field(default_factory=list)
    series: dict[str, Any] = field(default_factory=dict)
    lines: dict[str, Artist] = field(default_factory=dict)
    caption: str = ""
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
        """Aggregate numbers by panel and further axes, and note the outcomes that lack an axis."""
        aggregates = aggregate(view or self.view, self.outcomes, numbers, (*self.outer, *axes), x)
        self.notes += aggregates.excluded
        self.has_numbers = self.has_numbers or any(spread.mean is not None for spread in aggregates.spreads.values())
        return aggregates

    def key(self, panel: Label, labels: Labels) -> Labels:
        """Return the labels with the panel's before them, if there are panels."""
        return (panel, *labels) if self.outer else labels

    def number_formats(self, numbers: Numbers, aggregates: Aggregates) -> dict[Label, NumberFormat]:
        """Return for each panel how its numbers are shown: as its own first metric, else as the first that occurs."""
        first = next((name for name in aggregates.metrics.values() if name), (as_tuple(numbers) or ("",))[0])
        n = len(self.outer)
        return {
            panel: number_format(
                next((m for key, m in aggregates.metrics.items() if m and key[:n] in ((), (panel,))), first), self.view
            )
            for panel in self.labels
        }

    def distinguishing_axes(self, axes: Sequence[str]) -> tuple[str, ...]:
        """Return the axes that have several labels, by which series are named; the first one at least."""
        labels = {axis: {str(outcome.cell.get(axis)) for outcome in self.outcomes} for axis in axes}
        return tuple(axis for axis in axes if len(labels[axis]) > 1) or tuple(axes[:1])

    def name(self, labels: Iterable[Label], separator: str = ", ") -> str:
        """Return labels as they are shown."""
        return separator.join(self.view.display(label) for label in labels) or "all"

    def note_missing_seeds(self, spread: Spread, labels: Labels) -> None:
        """Add a note: which seeds of the point or bar with these labels failed or did not run."""
        if reasons := [*spread.failed, *spread.absent]:
            self.notes.append(f"{self.name(labels)}: {'; '.join(reasons)}")

    def describe_spread(self, mark: str, spread: str = "") -> None:
        """Say in the caption that a mark is a mean (or median) over seeds, and what shows the deviation."""
        cells: dict[tuple[str, ...], set[str]] = {}
        for outcome in self.outcomes:
            if outcome.error is None and SEED in outcome.cell:
                labels = tuple(f"{axis}={label}" for axis, label in outcome.cell.items() if axis != SEED)
                cells.setdefault(labels, set()).add(str(outcome.cell[SEED]))
        numbers = {len(seeds) for seeds in cells.values()}
        if not numbers or numbers == {1}:
            return
        middle = "medians" if self.view.median else "means"
        shows = f"; {spread}: ± 1 standard deviation, which is no confidence interval" if spread else ""
        self.caption = f"{mark}: {middle} over {number_range(numbers)} {self.view.repetition}s{shows}."

    def draw_reference_lines(self, formats: Mapping[Label, NumberFormat]) -> None:
        """Draw the reference lines across every panel, each with its own dash and its name in the legend."""
        for i, (name, line) in enumerate(self.reference_lines.items()):
            look: dict[str, Any] = {
                "color": "#000000", "linestyle": REFERENCE_DASHES[i % len(REFERENCE_DASHES)], "linewidth": 1.2
            }  # fmt: skip
            self.lines[name] = Line2D([], [], **look)
            for panel, axes in zip(self.labels, self.axes, strict=True):
                value = line
                if isinstance(line, Mapping):
                    spread = line.get((panel,) if self.outer else ())
                    value = None if spread is None else spread.mean
                if value is None:
                    self.notes.append(f"{name}: no outcome" + ("" if panel is None else f" of {self.name([panel])}"))
                else:
                    axes.axhline(value * formats[panel].factor, zorder=1.5, **look).set_label(f"level {name}")

    def label_ticks(self, axes: Axes, texts: Sequence[str], inches: float) -> float:
        """Label the ticks 0, 1, … of an x axis, aslant where they would touch; return the height that this takes."""
        wrapped = [wrap_label(text, 18) for text in texts]
        longest = max((len(line) for text in wrapped for line in text.split("\n")), default=0)
        if longest * LETTER <= inches:
            axes.set_xticks(range(len(texts)), wrapped)
            return max((text.count("\n") for text in wrapped), default=0) * LINE
        short = [shorten(text, 32) for text in texts]
        axes.set_xticks(range(len(texts)), short, rotation=SLANT_DEGREES, ha="right", rotation_mode="anchor")
        return max(map(len, short)) * LETTER * math.sin(math.radians(SLANT_DEGREES))

    def grow(self, inches: float) -> None:
        """Make the figure higher."""
        self.figure.set_figheight(self.figure.get_figheight() + inches)

    def finish(self) -> DrawnFigure:
        """Put the legend below the panels, and lay everything out once and for all."""
        for axes in self.axes if not self.has_numbers else ():
            axes.text(0.5, 0.5, "no results", transform=axes.transAxes, ha="center", va="center", color=FAINT_COLOUR)
        handles = {**(self.series if len(self.series) > 1 or self.lines else {}), **self.lines}
        if handles:
            names = [wrap_label(name, 52) for name in handles]
            longest = max(len(line) for name in names for line in name.split("\n"))
            fit = max(1, int(self.figure.get_figwidth() / (longest * LETTER + 0.55)))
            rows = math.ceil(len(names) / fit)
            columns = math.ceil(len(names) / rows)
            self.figure.legend(
                list(handles.values()), names, loc="outside lower center", ncols=columns, handlelength=2.4,
                columnspacing=1.4,
            )  # fmt: skip
            self.grow(LINE * rows * max(name.count("\n") + 1 for name in names) + 0.1)
        for _ in range(2):  # the ticks follow from the size of the panels, which follows from the ticks' labels
            self.figure.draw_without_rendering()
        self.figure.set_layout_engine("none")  # laid out again it would move by fractions of a pixel
        notes = tuple(dict.fromkeys(self.notes))
        return DrawnFigure(self.view.title, ". ".join(self.text), notes, self.figure, self.caption, self.view.leads)


def start_figure(
    view: FigureSpec, outcomes: Iterable[Outcome], numbers: Numbers, strip: float = 0.0, wide: bool = False
) -> FigureDraft:
    """Make the empty panels of a figure, and aggregate its reference lines.

    `strip` is the height of the strip below each panel, as a share of the panel's. If `wide`, panels are in one column.
    """
    rest = select_outcomes(outcomes, view.where)
    lines: dict[str, Any] = {}
    outer = (view.panels,) if view.panels else ()
    for name, line in view.reference_lines.items():
        lines[name] = line
        if isinstance(line, Mapping):
            of_line = select_outcomes(rest, line)
            others = dict.fromkeys(axis for o in of_line for axis in o.cell if axis not in (*outer, SEED))
            over = tuple({**dict.fromkeys(view.average_over), **others})
            plain = replace(view, entries="", reference_lines={}, average_over=over)  # where runs end, not their curves
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
        place = grid[i // columns, i % columns]
        if strip:
            halves = place.subgridspec(2, 1, height_ratios=(1, strip), hspace=0.08)
            axes = draft.figure.add_subplot(halves[0])
            draft.strips.append(draft.figure.add_subplot(halves[1], sharex=axes))
            axes.tick_params(labelbottom=False)
        else:
            axes = draft.figure.add_subplot(place)
        if label is not None:
            axes.set_title(wrap_label(view.display(label), 40), loc="left", fontweight="bold")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
        draft.axes.append(axes)
    return draft


def axis_label(number: NumberFormat, view: FigureSpec) -> str:
    """Return the label of an axis: the metric, with % if it is multiplied by 100, and ↓ if lower is better."""
    return view.display(number.name) + (" (%)" if number.factor == 100 else "") + (" ↓" if number.lower else "")


def assign_styles(series: Sequence[Labels]) -> dict[Labels, SeriesStyle]:
    """Return a style for each series; of two axes, the first label gives the colour and the second the shape."""
    first = list(dict.fromkeys(labels[0] for labels in series))
    second = list(dict.fromkeys(labels[1:] for labels in series))
    one_axis = all(len(labels) == 1 for labels in series)
    return {
        labels: series_style(first.index(labels[0]), None if one_axis else second.index(labels[1:]))
        for labels in series
    }  # fmt: skip


def format_x_axis(axes: Axes, xs: Sequence[float], log: bool) -> None:
    """Write short numbers at the ticks; on a logarithmic axis at powers of ten, or at 1, 2 and 5 where it is short."""
    if log and xs and min(xs) > 0:
        low, high = min(xs), max(max(xs), min(xs) * 2)
        axes.set_xscale("log")
        axes.set_xlim(low / (high / low) ** 0.07, high * (high / low) ** 0.07)
        subs = (1.0, 2.0, 5.0) if high / low < 200 else (1.0,)
        axes.xaxis.set_major_locator(LogLocator(subs=subs, numticks=8))
        axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(SHORT_NUMBERS)


def draw_scatter(view: Scatter, outcomes: Iterable[Outcome]) -> FigureDraft:
    """Draw a marker for each point, with whiskers of ± one standard deviation, and a thin line through each series."""
    draft = start_figure(view, outcomes, view.y)
    series = draft.distinguishing_axes(as_tuple(view.series))
    present = dict.fromkeys(axis for outcome in draft.outcomes for axis in outcome.cell)
    others = [a for a in present if a not in (SEED, METRIC, view.x, *draft.outer, *series, *view.average_over)]
    aggregates = draft.aggregate(view.y, (*series, *others, view.x), view.x)
    formats = draft.number_formats(view.y, aggregates)
    styles = assign_styles(aggregates.combinations(series, view))
    xs = [float(key[-1] or 0) for key, spread in aggregates.spreads.items() if spread.mean is not None]
    for key, spread in aggregates.spreads.items():
        draft.note_missing_seeds(spread, key[:-1])
    for panel, axes in zip(draft.labels, draft.axes, strict=True):
        number = formats[panel]
        for labels, style in styles.items():
            start = draft.key(panel, labels)
            points = sorted(
                (float(key[-1] or 0), spread.mean, spread.std or 0.0)
                for key, spread in aggregates.spreads.items()
                if key[: len(start)] == start and spread.mean is not None
            )
            drawn = axes.errorbar(
                [x for x, _, _ in points], [y * number.factor for _, y, _ in points],
                yerr=[std * number.factor for _, _, std in points], color=style.colour, marker=style.marker,
                linewidth=0.8, elinewidth=1.0, capsize=2.0, markeredgecolor="white", markeredgewidth=0.5,
                markersize=6.5,
            )  # fmt: skip
            drawn[0].set_label(f"series {draft.name(labels)}")
            draft.series.setdefault(draft.name(labels), drawn)
            described = ", ".join(f"{number.show(y)} at {x:.4g}" for x, y, _ in points) or "no result"
            draft.text.append(f"{draft.name(draft.key(panel, labels))}: {described}")
        format_x_axis(axes, xs, bool(xs) and (max(xs) > 100 * min(xs) if view.log is None else view.log))
        axes.margins(y=0.14)
        axes.set_xlabel(view.display(view.x).replace("_", " "))
        axes.set_ylabel(axis_label(number, view))
    draft.describe_spread("Points", "whiskers")
    draft.draw_reference_lines(formats)
    return draft


def draw_bars(view: Bars, outcomes: Iterable[Outcome]) -> FigureDraft:
    """Draw groups of bars from zero, with whiskers of ± one standard deviation; a gap says "failed" or "–"."""
    draft = start_figure(view, outcomes, view.y)
    aggregates = draft.aggregate(view.y, (view.groups, view.bars))
    formats = draft.number_formats(view.y, aggregates)
    groups, bar_labels = aggregates.labels(view.groups, view), aggregates.labels(view.bars, view)
    width = 0.84 / max(len(bar_labels), 1)
    ticks = 0.0
    for panel, axes in zip(draft.labels, draft.axes, strict=True):
        for i, bar in enumerate(bar_labels):
            colour, hatch, name = series_style(i).colour, HATCHES[i % len(HATCHES)], view.display(bar)
            spreads = [aggregates[draft.key(panel, (group, bar))] for group in groups]
            places = [at + (i - (len(bar_labels) - 1) / 2) * width for at in range(len(groups))]
            heights, whiskers = (
                [float("nan") if value is None else value * formats[panel].factor for value in values]
                for values in ([spread.mean for spread in spreads], [spread.std for spread in spreads])
            )
            bars = axes.bar(
                places, heights, width * 0.92, yerr=whiskers, color=colour, edgecolor="white", hatch=hatch,
                linewidth=0, error_kw={"ecolor": "#222222", "elinewidth": 0.9, "capsize": 1.8},
            )  # fmt: skip
            bars[0].set_label(f"series {name}")
            for x, group, spread in zip(places, groups, spreads, strict=True):
                draft.note_missing_seeds(spread, draft.key(panel, (group, bar)))
                draft.text.append(f"{draft.name(draft.key(panel, (group, bar)))}: {formats[panel].show(spread.mean)}")
                if spread.mean is None:
                    axes.text(
                        x, 0.015, "failed" if spread.failed else "–", transform=axes.get_xaxis_transform(),
                        ha="center", va="bottom", rotation=90, fontsize=7.5, color=FAINT_COLOUR,
                    )  # fmt: skip
            draft.series[name] = Patch(facecolor=colour, edgecolor="white", hatch=hatch)
        axes.set_xlim(-0.5, max(len(groups), 1) - 0.5)
        columns = 1 if len(draft.labels) == 1 else 2
        inches = (draft.figure.get_figwidth() / columns - 0.7) / max(len(groups), 1)
        ticks = max(ticks, draft.label_ticks(axes, [view.display(group) for group in groups], inches))
        axes.tick_params(axis="x", length=0)
        axes.grid(visible=False, axis="x")
        axes.set_ylabel(axis_label(formats[panel], view))
    draft.grow(ticks * math.ceil(len(draft.labels) / 2))
    draft.describe_spread("Bars", "whiskers")
    draft.draw_reference_lines(formats)
    top = max(axes.get_ylim()[1] for axes in draft.axes)
    for axes in draft.axes:
        axes.set_ylim(top=top)  # a number has the same height in every panel
    return draft


def draw_heat_map(view: HeatMap, outcomes: Iterable[Outcome]) -> FigureDraft:
    """Draw a heat map for each panel, on one scale. A cell without a number is hatched and says "failed" or "–"."""
    draft = start_figure(view, outcomes, view.value, wide=True)
    rows, columns = as_tuple(view.rows), as_tuple(view.columns)
    aggregates = draft.aggregate(view.value, (*rows, *columns))
    if view.diagonal:
        first = len(draft.outer)
        spreads = relative_spreads(aggregates.spreads, lambda key: (*key[:first], key[-1], key[-1]))
        aggregates = Aggregates(aggregates.axes, spreads, aggregates.metrics, aggregates.excluded)
    number = next(iter(draft.number_formats(view.value, aggregates).values()))
    down, across = aggregates.combinations(rows, view), aggregates.combinations(columns, view)
    draft.describe_spread("Cells")
    if not down or not across:
        return draft
    means = [s.mean * number.factor for s in aggregates.spreads.values() if s.mean is not None] or [0.0, 1.0]
    # From zero where the numbers go near it; accuracies from 55 to 70 would else all look the same.
    scale = Normalize(0.0 if 0 <= min(means) < max(means) / 2 else min(means), max(means) or 1.0)
    written = len(across) <= 12 and len(down) * len(across) * len(draft.labels) <= 120
    size = 0.46 if written else CELL_SIZE
    labels = [wrap_label(draft.name(row, " "), 26) for row in down]
    longest = max(len(line) for label in labels for line in label.split("\n"))
    height = len(down) * (max(label.count("\n") for label in labels) * 0.14 + CELL_SIZE) + 0.3 * bool(draft.outer)
    draft.figure.set_size_inches(
        max(3.6, len(across) * size + longest * LETTER + 1.25), max(1.4, len(draft.labels) * height) + 0.75
    )
    existing = {key[len(draft.outer) :] for key in aggregates.spreads}
    for panel, axes in zip(draft.labels, draft.axes, strict=True):
        values = np.full((len(down), len(across)), np.nan)
        for i, row in enumerate(down):
            for j, column in enumerate(across):
                if view.entries and (*row, *column) not in existing:
                    continue  # what no run has in its entries cannot be: embeddings have no first layer
                spread = aggregates[draft.key(panel, (*row, *column))]
                draft.note_missing_seeds(spread, draft.key(panel, (*row, *column)))
                if spread.mean is None:
                    _draw_missing_cell(axes, i, j, "failed" if spread.failed else "–", written)
                else:
                    values[i, j] = spread.mean * number.factor
        image = axes.imshow(values, cmap=COLOUR_MAP, norm=scale, aspect="auto")
        image.set_label(f"series {'' if panel is None else view.display(panel)}")
        if written:
            _write_numbers(axes, values, number, scale)
        axes.set_yticks(range(len(labels)), labels)
        axes.set_ylabel(", ".join(view.display(axis) for axis in rows))
        axes.grid(visible=False)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_xticks([])
        low, high = (np.nanmin(values), np.nanmax(values)) if np.isfinite(values).any() else (0.0, 0.0)
        where = "" if panel is None else f"{view.display(panel)}: "
        draft.text.append(f"{where}from {low:.3g} to {high:.3g} in {len(down)} rows and {len(across)} columns")
    thin = max(1, -(-len(across) // 12)) if all(isinstance(c[0], (int, float)) for c in across) else 1
    texts = [draft.name(column) if i % thin == 0 else "" for i, column in enumerate(across)]
    draft.grow(draft.label_ticks(draft.axes[-1], texts, size * thin))
    draft.axes[-1].set_xlabel(", ".join(view.display(axis) for axis in columns))
    bar = draft.figure.colorbar(image, ax=draft.axes, fraction=0.05, pad=0.02, aspect=30)
    bar.outline.set_visible(False)
    bar.set_label(view.display(number.name) + (" (%)" if number.factor == 100 else ""))
    return draft


def _draw_missing_cell(axes: Axes, i: int, j: int, word: str, written: bool) -> None:
    faint: dict[str, Any] = {"facecolor": "#F4F4F4", "linewidth": 0}
    axes.add_patch(Rectangle((j - 0.5, i - 0.5), 1, 1, edgecolor="#BBBBBB", hatch="////", **faint))
    if written:
        axes.text(j, i, word, ha="center", va="center", fontsize=7, color=FAINT_COLOUR, bbox={**faint, "pad": 1})


def _write_numbers(axes: Axes, values: np.ndarray, number: NumberFormat, scale: Normalize) -> None:
    """Write the number of each cell, white on dark colours."""
    colours = matplotlib.colormaps[COLOUR_MAP]
    for (i, j), value in np.ndenumerate(values):
        if np.isfinite(value):
            red, green, blue = (part**2.2 for part in colours(scale(value))[:3])
            dark = 0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.22  # below it white has the higher contrast
            digits = "3g" if number.digits is None else f"{min(number.digits, 1) if value < 99.95 else 0}f"
            axes.text(
                j, i, f"{value:.{digits}}", ha="center", va="center", fontsize=7.5,
                color="white" if dark else TEXT_COLOUR,
            )  # fmt: skip


def draw_curves(view: Curves, outcomes: Iterable[Outcome]) -> FigureDraft:
    """Draw a line for each series through the means over seeds, with a band of ± one standard deviation.

    Along a run's steps a mean is drawn only where every seed of the series has a value: where some have stopped, the
    mean of the others would jump.
    """
    stepped = view.x == "step"
    outcomes = list(outcomes)
    shown = select_outcomes(outcomes, view.where)
    n_series = len({tuple(str(o.cell.get(axis)) for axis in as_tuple(view.series)) for o in shown})
    strip = 0.4 if view.gap else max(0.25, 0.065 * n_series) if view.marks else 0.0
    draft = start_figure(view, outcomes, view.y, strip=strip)
    thresholds = [outcome for outcome in draft.outcomes if any(mark in outcome.extra for mark in view.marks)]
    if view.marks:  # what is marked may be waiting for runs
        draft.outcomes = [o for o in draft.outcomes if view.x in o.cell or view.x in o.count]
    series = draft.distinguishing_axes(as_tuple(view.series))
    of_steps = replace(view, entries=CURVE) if stepped else view
    aggregates = draft.aggregate(view.y, (*series, view.x), view.x, of_steps)
    formats = draft.number_formats(view.y, aggregates)
    styles = assign_styles(aggregates.combinations(series, view))
    xs = [float(key[-1] or 0) for key in aggregates.spreads]
    for panel, axes in zip(draft.labels, draft.axes, strict=True):
        for labels, style in styles.items():
            by_x = {
                float(key[-1] or 0): spread
                for key, spread in aggregates.spreads.items()
                if key[:-1] == draft.key(panel, labels) and spread.mean is not None
            }
            line = _shared_by_seeds(draft, by_x, labels) if stepped else by_x
            _draw_line(draft, axes, dict(sorted(line.items())), panel, labels, formats[panel], style)
        axes.margins(y=0.08)
        axes.set_ylabel(axis_label(formats[panel], view))
        format_x_axis(axes, xs, view.log)
    if not stepped:
        for key, spread in aggregates.spreads.items():
            draft.note_missing_seeds(spread, key)
    draft.describe_spread("Lines", "bands")
    draft.draw_reference_lines(formats)
    for panel, axes, lower in zip(draft.labels, draft.axes, draft.strips, strict=False):
        if view.gap:
            _draw_gap(draft, lower, aggregates, panel, len(styles), formats[panel])
        else:
            _draw_marks(draft, view, lower, thresholds, series, panel, styles)
        lower.set_xlim(axes.get_xlim())
    for axes in draft.strips or draft.axes:
        axes.set_xlabel(view.display(view.x).replace("_", " "))
    return draft


def _shared_by_seeds(draft: FigureDraft, by_x: Mapping[float, Spread], labels: Labels) -> dict[float, Spread]:
    """Return the means of all seeds, and note where some of them end before others."""
    n_seeds = max((spread.n for spread in by_x.values()), default=0)
    shared = {x: spread for x, spread in by_x.items() if spread.n == n_seeds}
    if len(shared) < len(by_x):
        draft.notes.append(
            f"{draft.name(labels)}: drawn to step {max(shared):,.0f}, which all {n_seeds} seeds reached; the longest "
            f"has {max(by_x):,.0f}"
        )
    return shared


def _draw_line(
    draft: FigureDraft, axes: Axes, line: Mapping[float, Spread], panel: Label, labels: Labels, number: NumberFormat,
    style: SeriesStyle,
) -> None:  # fmt: skip
    xs, spreads, name = list(line), list(line.values()), draft.name(labels)
    ys = np.array([(spread.mean or 0.0) * number.factor for spread in spreads])
    widths = np.array([(spread.std or 0.0) * number.factor for spread in spreads])
    (drawn,) = axes.plot(
        xs, ys, color=style.colour, marker=style.marker, linestyle=style.dash, markevery=max(1, len(xs) // 10),
        markeredgecolor="white", markeredgewidth=0.5,
    )  # fmt: skip
    drawn.set_label(f"series {name}")
    draft.series.setdefault(name, drawn)
    if any(spread.std is not None for spread in spreads):
        axes.fill_between(xs, ys - widths, ys + widths, color=style.colour, alpha=0.16, linewidth=0)
    ends = ", ".join(f"{number.show(spreads[i].mean)} at {short_number(xs[i])}" for i in (0, -1)) if xs else "no result"
    draft.text.append(f"{draft.name(draft.key(panel, labels))}: {ends}")


def _draw_gap(
    draft: FigureDraft, strip: Axes, aggregates: Aggregates, panel: Label, n_series: int, number: NumberFormat
) -> None:
    """Draw best minus worst series at each x; over fewer than all series it is noted and drawn hollow."""
    means: dict[float, list[float]] = {}
    for key, spread in aggregates.spreads.items():
        if spread.mean is not None and (not draft.outer or key[0] == panel):
            means.setdefault(float(key[-1] or 0), []).append(spread.mean * number.factor)
    gaps = {x: max(of_x) - min(of_x) for x, of_x in sorted(means.items()) if len(of_x) > 1}
    strip.plot(list(gaps), list(gaps.values()), color=TEXT_COLOUR, linewidth=1.2)[0].set_label("gap")
    for x, gap in gaps.items():
        if len(means[x]) < n_series:
            draft.notes.append(f"gap at {short_number(x)}: between {len(means[x])} of {n_series} series")
        face = TEXT_COLOUR if len(means[x]) == n_series else "white"
        strip.plot([x], [gap], "o", color=TEXT_COLOUR, markerfacecolor=face, markersize=4.5)
    strip.set_ylim(0, max(gaps.values(), default=1.0) * 1.2 or 1.0)
    strip.yaxis.set_major_locator(MaxNLocator(3))
    strip.set_ylabel("best −\nworst")
    draft.text.append("gap: " + ", ".join(f"{gap:.1f} at {short_number(x)}" for x, gap in gaps.items()))


def _draw_marks(
    draft: FigureDraft, view: Curves, strip: Axes, thresholds: list[Outcome], series: Sequence[str], panel: Label,
    styles: Mapping[Labels, SeriesStyle],
) -> None:  # fmt: skip
    """Draw a row for each series with the interval of each mark, and describe its ends in words."""
    rows, drawn = list(styles), set[Any]()
    for outcome in thresholds:
        labels = tuple(outcome.cell.get(axis) for axis in series)
        if labels not in styles or (draft.outer and outcome.cell.get(view.panels) != panel):
            continue
        y, colour, name = rows.index(labels), styles[labels].colour, draft.name(labels)
        for shape, mark in zip(MARK_SHAPES, view.marks, strict=False):
            value = outcome.extra.get(mark)
            if value is None or (key := (labels, mark, str(value))) in drawn:
                continue
            drawn.add(key)
            look: dict[str, Any] = {"marker": ">", "markerfacecolor": "white", "markersize": 6}
            low, high = (value, value) if isinstance(value, (int, float)) else value
            shown = view.display(mark)
            if high is None:
                at = low
                legend = f"{shown} threshold above the largest {view.x} tried"
                draft.text.append(f"{name}: {shown} beyond {short_number(low)}")
            else:
                strip.plot([low, high], [y, y], color=colour, linewidth=3.2, solid_capstyle="butt", alpha=0.55)
                at = (low * high) ** 0.5 if low > 0 else (low + high) / 2
                look = {"marker": shape, "markeredgecolor": "white", "markersize": 6}
                legend = f"{shown} threshold"
                draft.text.append(f"{name}: {shown} between {short_number(low)} and {short_number(high)}")
            (end,) = strip.plot([at], [y], color=colour, linestyle="none", **look)
            end.set_label(f"mark {mark} {name}")
            draft.lines[legend] = Line2D([], [], color=FAINT_COLOUR, linestyle="none", **look)
    strip.set_yticks(range(len(rows)), [shorten(draft.name(labels), 30) for labels in rows])
    strip.set_ylim(len(rows) - 0.4, -0.6)
    strip.tick_params(axis="y", length=0, labelsize=8)
    strip.grid(visible=False, axis="y")


DRAWING_FUNCTIONS: dict[type[FigureSpec], Callable[[Any, Iterable[Outcome]], FigureDraft]] = {
    Scatter: draw_scatter, Bars: draw_bars, Curves: draw_curves, HeatMap: draw_heat_map,
}  # fmt: skip
FORMATS: dict[str, dict[str, Any]] = {
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}
"""Format -> the metadata that is left out, because it changes from day to day and from version to version."""


@dataclass(frozen=True)
class DrawnFigure:
    """A finished figure.

    Its text says what it shows to those who do not see it, its notes what it lacks, and its caption what marks, bars
    and bands stand for. If it leads, it stands on top of a page of several studies.
    """

    title: str
    text: str
    notes: tuple[str, ...]
    figure: Figure
    caption: str = ""
    leads: bool = False

    def svg(self) -> str:
        """Return the figure as SVG."""
        return render(self.figure, "svg").decode()

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        """Return the figure as PNG for Jupyter, with the size at which it is shown, half of its pixels.

        Jupyter shows a `Figure` itself as text, unless pyplot has been used.
        """
        width, height = self.figure.get_size_inches()
        return render(self.figure, "png"), {"width": round(100 * width), "height": round(100 * height)}


def draw(view: FigureSpec, outcomes: Iterable[Outcome]) -> DrawnFigure:
    """Draw a figure."""
    with matplotlib.rc_context(STYLE):
        return DRAWING_FUNCTIONS[type(view)](view, list(outcomes)).finish()


def render(figure: Figure, file_format: str) -> bytes:
    """Return a figure as the bytes of a file."""
    buffer = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(buffer, format=file_format, metadata=FORMATS[file_format])
    return buffer.getvalue()


def save(figure: Figure, stem: str | Path) -> list[Path]:
    """Write a figure as STEM.png, STEM.svg and STEM.pdf, each of them atomically."""
    stem = Path(stem)
    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = []
    for file_format in FORMATS:
        paths.append(stem.with_name(f"{stem.name}.{file_format}"))
        with atomic_open(paths[-1]) as file:
            file.write(render(figure, file_format))
    return paths
