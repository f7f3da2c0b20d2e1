"""The figures of a study: scatter plots, bars, heat maps and curves, drawn and written as PNG, SVG and PDF.

Equal numbers give equal bytes. Labels beside points are placed by our own search and not by adjustText: that writes
names over markers, places them differently from run to run if they are many, and does not tell when there is no room
and a legend is needed.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backend_bases import RendererBase
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import Normalize
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.text import Text
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator
from matplotlib.transforms import Bbox

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
DASHES = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)))
HATCHES = (
    "",
    "///",
    "\\\\\\",
    "xxx",
    "---",
    "|||",
    "+++",
    "//",
    "\\\\",
)  # lines alone: dots make an SVG ten times as large
REFERENCE_DASHES = ((0, (4, 2)), (0, (1, 1.5)), (0, (8, 2, 1, 2)))
TEXT_COLOUR, FAINT_COLOUR, GRID_COLOUR = "#222222", "#6B6B6B", "#E3E3E3"
COLOUR_MAP = "YlGnBu"  # of ColorBrewer's, one of those safe for the colour-blind, dark where the value is large

STYLE: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib: the same picture on every machine
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "legend.fontsize": 8.5,
    "text.parse_math": False,  # a label with dollar signs is no formula
    "text.color": TEXT_COLOUR,
    "axes.labelcolor": TEXT_COLOUR,
    "axes.edgecolor": FAINT_COLOUR,
    "xtick.color": FAINT_COLOUR,
    "ytick.color": FAINT_COLOUR,
    "xtick.labelcolor": TEXT_COLOUR,
    "ytick.labelcolor": TEXT_COLOUR,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID_COLOUR,
    "grid.linewidth": 0.7,
    "axes.linewidth": 0.7,
    "lines.linewidth": 1.6,
    "lines.markersize": 5.5,
    "hatch.linewidth": 0.8,
    "legend.frameon": False,
    "figure.dpi": 100,
    "savefig.dpi": 200,
    "svg.hashsalt": "deltune",
    "svg.fonttype": "path",  # what was measured is what is seen, whatever fonts a reader has
    "pdf.fonttype": 42,
    "path.simplify_threshold": 0.2,
}


@dataclass(frozen=True)
class SeriesStyle:
    """Colour, marker and dash of a series."""

    colour: str
    marker: str
    dash: Any


def series_style(first: int, second: int | None = None) -> SeriesStyle:
    """Return the style of a series.

    Of two axes the first label gives the colour, and the second marker and dash; these follow `first` if `second` is
    None.
    """
    shape = first if second is None else second
    return SeriesStyle(COLOURS[first % len(COLOURS)], MARKERS[shape % len(MARKERS)], DASHES[shape % len(DASHES)])


DIRECTIONS = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, 1), (1, -1), (-1, -1))
SLANT_DEGREES = 40  # degrees
LABEL_DISTANCES = (6.0, 12.0, 20.0, 30.0)  # points from a marker's middle to its label


def short_number(value: float) -> str:
    """Return a number as a tick label without powers of ten: 0.001, 0.5, 20, 1k, 250k, 4.4M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{letter}"
    return f"{value:.10f}".rstrip("0").rstrip(".") if 0 < abs(value) < 1e-3 else f"{value:.4g}"


def wrap_label(text: str, width: int) -> str:
    """Break a label into lines of at most `width` letters, five lines at most."""
    return "\n".join(textwrap.wrap(shorten(text, 4 * width), width))


def shorten(text: str, most: int) -> str:
    """Cut the middle out of a label longer than `most`, since expressions differ at their ends."""
    return text if len(text) <= most else f"{text[: most // 2]}…{text[-(most - most // 2 - 1) :]}"


def set_log_scale(axes: Axes, low: float, high: float) -> None:
    """Make the x axis logarithmic from low to high, with room at both ends and ticks at powers of ten (or 1, 2, 5)."""
    axes.set_xscale("log")
    room = max(math.log10(high / low) * 0.07, 0.05)
    start, end = low / 10**room, high * 10**room
    axes.set_xlim(start, end)
    decades = range(math.floor(math.log10(start)), math.ceil(math.log10(end)) + 1)
    subs = (1, 2, 5) if math.log10(end / start) < 2.5 else (1,)
    ticks = [sub * 10.0**power for power in decades for sub in subs if start <= sub * 10.0**power <= end]
    axes.xaxis.set_major_locator(FixedLocator(ticks[:: math.ceil(len(ticks) / 8)]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_number(value)))


def lay_out(figure: Figure) -> FigureCanvasAgg:
    """Lay out the figure, so that everything has its place and extent, and return its canvas.

    It is done twice, because the ticks follow from the height of the panels, which follows from the width of the ticks'
    labels.
    """
    canvas = FigureCanvasAgg(figure)
    figure.draw_without_rendering()
    figure.draw_without_rendering()
    return canvas


def place_legend(figure: Figure, handles: Sequence[Artist], labels: Sequence[str]) -> None:
    """Put a legend below the panels in place of an earlier one, in as many columns as fit; the figure grows."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    for old in list(figure.legends):
        _grow_height(figure, -old.get_window_extent(renderer).height)
        old.remove()
    if not handles:
        return
    columns = len(handles)
    while True:
        legend = figure.legend(
            handles,
            [wrap_label(label, 52) for label in labels],
            loc="outside lower center",
            ncols=columns,
            handlelength=2.4,
            columnspacing=1.4,
        )
        box = legend.get_window_extent(renderer)
        if columns == 1 or box.width <= figure.bbox.width * 0.98:
            even = math.ceil(len(handles) / math.ceil(len(handles) / columns))  # no line of one name alone
            if columns == even:
                return _grow_height(figure, box.height)
            columns = even
        else:
            columns = max(1, min(columns - 1, int(columns * figure.bbox.width / box.width) + 1))
        legend.remove()


def _grow_height(figure: Figure, pixels: float) -> None:
    figure.set_figheight(figure.get_figheight() + pixels / figure.dpi)


def rotate_ticks(figure: Figure) -> None:
    """Rotate the labels of an x axis that would touch: slanted if their lines then keep apart, else upright.

    The figure grows by the height that they then take, once for each row of panels.
    """
    renderer = lay_out(figure).get_renderer()
    heights: dict[int, float] = {}
    for axes in figure.axes:
        labels = [label for label in axes.get_xticklabels() if label.get_text() and label.get_visible()]
        boxes = [label.get_window_extent(renderer) for label in labels]
        if not any(a.x1 + 3 > b.x0 for a, b in pairwise(boxes)):
            continue
        if isinstance(axes.xaxis.get_major_locator(), FixedLocator):
            texts = [shorten(label.get_text().replace("\n", " "), 32) for label in axes.get_xticklabels()]
            axes.set_xticks(axes.get_xticks(), texts)
            labels = [label for label in axes.get_xticklabels() if label.get_text()]
        apart = min(b.x0 + b.x1 - a.x0 - a.x1 for a, b in pairwise(boxes)) / 2
        before, line = max(box.height for box in boxes), min(box.height for box in boxes)
        for label in labels:
            if apart * math.sin(math.radians(SLANT_DEGREES)) < line + 1:
                label.set(rotation=90, ha="center", va="top")
            else:
                label.set(rotation=SLANT_DEGREES, ha="right", va="top", rotation_mode="anchor")
        height = max(label.get_window_extent(renderer).height for label in labels) - before
        spec = axes.get_subplotspec()
        row = spec.get_topmost_subplotspec().rowspan.start if spec else 0
        heights[row] = max(heights.get(row, 0.0), height)
    if heights:
        _grow_height(figure, sum(heights.values()))
        lay_out(figure)


def place_labels(
    axes: Axes,
    points: Sequence[tuple[float, float]],
    names: Sequence[str],
    occupied: Sequence[Artist] = (),
    whiskers: Sequence[Whisker] = (),
) -> bool:
    """Write a name beside each point, inside the axes and over no other name, point or occupied artist.

    Return whether there was room for all; if not, nothing is written.
    """
    renderer = lay_out(axes.figure.figure).get_renderer()
    frame = axes.get_window_extent(renderer)
    at = [axes.transData.transform(point) for point in points]
    occupied_boxes = [Bbox.from_extents(x - 5, y - 5, x + 5, y + 5) for x, y in at]
    occupied_boxes += [artist.get_window_extent(renderer).padded(2) for artist in occupied]
    for x, low, high in whiskers:
        (left, bottom), (_, top) = axes.transData.transform((x, low)), axes.transData.transform((x, high))
        occupied_boxes.append(Bbox.from_extents(left - 3, bottom, left + 3, top))
    written: list[Artist] = []
    # From the top down, which is good enough for twenty points.
    for i in sorted(range(len(at)), key=lambda i: -at[i][1]):
        text = _write_nearby(axes, points[i], tuple(at[i]), names[i], occupied_boxes, frame, renderer)
        if text is None:
            for artist in written:
                artist.remove()
            return False
        written.append(text)
        occupied_boxes.append(Text.get_window_extent(text, renderer).padded(2))
    return True


def _write_nearby(
    axes: Axes,
    point: tuple[float, float],
    at: Sequence[float],
    name: str,
    occupied: Sequence[Bbox],
    frame: Bbox,
    renderer: RendererBase,
) -> Text | None:
    """Write a name in the nearest free place around its point, with a line to it from afar; None if none is free."""
    for step in LABEL_DISTANCES:
        for right, up in DIRECTIONS:
            text = axes.annotate(
                wrap_label(name, 30),
                point,
                (right * step, up * step),
                textcoords="offset points",
                ha={1: "left", 0: "center", -1: "right"}[right],
                va={1: "bottom", 0: "center", -1: "top"}[up],
                fontsize=8.5,
                color=TEXT_COLOUR,
                arrowprops={"arrowstyle": "-", "color": FAINT_COLOUR, "lw": 0.6, "shrinkA": 0, "shrinkB": 3}
                if step > 6
                else None,
            )
            text.set_in_layout(False)
            text.update_positions(renderer)
            box = Text.get_window_extent(text, renderer)  # of the words alone, without the line to them
            inside = frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1
            if inside and not any(box.overlaps(other) for other in occupied):
                return text
            text.remove()
    return None


Whisker = tuple[float, float, float]
"""The x of a vertical line, its lower and its upper end, in data coordinates."""

WIDTH, HEIGHT = 4.5, 2.75  # inches of one panel: legible at its own size on a page, and on a telephone too


@dataclass
class FigureDraft:
    """A figure that is being drawn.

    Handles of the legend are in `series` and `lines`. Names are written beside `point_labels` where there is room for
    all, over neither `level_lines` nor `whiskers`. `text` says what it shows, and `notes` what it lacks.
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
    level_lines: dict[Axes, list[Artist]] = field(default_factory=dict)
    whiskers: dict[Axes, list[Whisker]] = field(default_factory=dict)
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
        """Return the axes that have several labels, by which series are named; the first one at least."""
        labels = {axis: {str(outcome.cell.get(axis)) for outcome in self.outcomes} for axis in axes}
        return tuple(axis for axis in axes if len(labels[axis]) > 1) or tuple(axes[:1])

    def note_missing_seeds(self, spread: Spread, *labels: Label) -> None:
        """Add a note to the figure: which seeds of the point or bar with these labels failed or did not run."""
        where = ", ".join(self.view.display(label) for label in labels if label is not None)
        reasons = [*spread.failed, *spread.absent]
        if reasons:
            self.notes.append(f"{where}: {'; '.join(reasons)}")

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
        over = f"{number_range(numbers)} {self.view.repetition}s"
        shows = f"; {spread}: ± 1 standard deviation, which is no confidence interval" if spread else ""
        self.caption = f"{mark}: {middle} over {over}{shows}."

    def draw_reference_lines(self, formats: Mapping[Label, NumberFormat]) -> None:
        """Draw the reference lines across every panel, each with its own dash and its name in the legend."""
        for i, (name, line) in enumerate(self.reference_lines.items()):
            colour, dash = "#000000", REFERENCE_DASHES[i % len(REFERENCE_DASHES)]
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
                    self.level_lines.setdefault(axes, []).append(artist)

    def _height(self, line: Any, panel: Label) -> float | None:
        if not isinstance(line, Mapping):
            return float(line)
        spread = line.get((panel,) if self.outer else ())
        return None if spread is None else spread.mean


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


def assign_styles(series: Sequence[Labels]) -> dict[Labels, SeriesStyle]:
    """Return a style for each series; of two axes, the first label gives the colour and the second the shape."""
    first = list(dict.fromkeys(labels[0] for labels in series))
    if all(len(labels) == 1 for labels in series):
        return {labels: series_style(i) for i, labels in enumerate(series)}
    second = list(dict.fromkeys(labels[1:] for labels in series))
    return {labels: series_style(first.index(labels[0]), second.index(labels[1:])) for labels in series}


def series_name(labels: Labels, view: FigureSpec, separator: str = ", ") -> str:
    """Return the name of the series with these labels."""
    return separator.join(view.display(label) for label in labels) or "all"


Point = tuple[float, Spread]


def draw_scatter(view: Scatter, outcomes: Iterable[Outcome]) -> FigureDraft:
    """Draw a marker for each point, with whiskers of ± one standard deviation, and a thin line through each series.

    If every series has one point, their names are written beside the points where there is room for all.
    """
    draft = start_figure(view, outcomes, view.y)
    series = draft.distinguishing_axes(as_tuple(view.series))
    axes_present = dict.fromkeys(axis for outcome in draft.outcomes for axis in outcome.cell)
    other_axes = [a for a in axes_present if a not in (SEED, METRIC, view.x, *draft.outer, *series, *view.average_over)]
    aggregates = draft.aggregate(view.y, (*series, *other_axes, view.x), view.x)
    formats = draft.number_formats(view.y, aggregates)
    series_labels = label_combinations(aggregates, series, view)
    styles = assign_styles(series_labels)
    drawn = {
        panel: {labels: _points(aggregates, labels, panel, len(draft.outer)) for labels in series_labels}
        for panel in draft.labels
    }  # fmt: skip
    xs = [x for points in drawn.values() for panel_points in points.values() for x, _ in panel_points]
    log = bool(xs) and min(xs) > 0 and (max(xs) > 100 * min(xs) if view.log is None else view.log)
    for key, spread in aggregates.spreads.items():
        draft.note_missing_seeds(spread, *key[:-1])
    for panel, axes in zip(draft.labels, draft.axes, strict=True):
        for labels, points in drawn[panel].items():
            drawn_points = _draw_points(axes, points, formats[panel], styles[labels], series_name(labels, view))
            draft.series.setdefault(series_name(labels, view), drawn_points)
            description = (
                ", ".join(f"{formats[panel].show(spread.mean)} at {x:.4g}" for x, spread in points) or "no result"
            )
            draft.text.append(
                ", ".join(view.display(p) for p in (panel, *labels) if p is not None) + f": {description}"
            )
        if log:
            set_log_scale(axes, min(xs), max(xs))
        axes.margins(y=0.14)
        axes.set_xlabel(view.display(view.x).replace("_", " "))
        axes.set_ylabel(axis_label(formats[panel], view))
        single = {series_name(labels, view): points[0] for labels, points in drawn[panel].items() if points}
        if all(len(points) <= 1 for points in drawn[panel].values()):
            places = [(x, (spread.mean or 0.0) * formats[panel].factor) for x, spread in single.values()]
            halves = [(spread.std or 0.0) * formats[panel].factor for _, spread in single.values()]
            draft.whiskers[axes] = [(x, y - half, y + half) for (x, y), half in zip(places, halves, strict=True)]
            draft.point_labels.append((axes, places, list(single)))
    draft.describe_spread("Points", "whiskers")
    draft.draw_reference_lines(formats)
    return draft


def _points(aggregates: Aggregates, labels: Labels, panel: Label, first: int) -> list[Point]:
    """Return the points of a series in a panel, in the order of x."""
    points = [
        (float(key[-1] or 0), spread)
        for key, spread in aggregates.spreads.items()
        if key[first : first + len(labels)] == labels and (not first or key[0] == panel) and spread.mean is not None
    ]
    return sorted(points, key=lambda point: point[0])


def _draw_points(
    axes: Axes, points: Sequence[Point], number: NumberFormat, style: SeriesStyle, name: str
) -> ErrorbarContainer:
    """Draw the points of a series; also without any, so that the legend shows the series."""
    drawn = axes.errorbar(
        [x for x, _ in points],
        [(spread.mean or 0.0) * number.factor for _, spread in points],
        yerr=[(spread.std or 0.0) * number.factor for _, spread in points],
        color=style.colour,
        marker=style.marker,
        linestyle="-",
        linewidth=0.8,
        elinewidth=1.0,
        capsize=2.0,
        markeredgecolor="white",
        markeredgewidth=0.5,
        markersize=6.5,
    )
    drawn[0].set_label(f"series {name}")
    return drawn


def draw_bars(view: Bars, outcomes: Iterable[Outcome]) -> FigureDraft:
    """Draw groups of bars from zero, with whiskers of ± one standard deviation; a gap says "failed" or "–"."""
    draft = start_figure(view, outcomes, view.y)
    aggregates = draft.aggregate(view.y, (view.groups, view.bars))
    formats = draft.number_formats(view.y, aggregates)
    groups, bar_labels = aggregates.labels(view.groups, view), aggregates.labels(view.bars, view)
    width = 0.84 / max(len(bar_labels), 1)
    for panel, axes in zip(draft.labels, draft.axes, strict=True):
        for i, bar in enumerate(bar_labels):
            style, hatch, name = series_style(i), HATCHES[i % len(HATCHES)], view.display(bar)
            for at, group in enumerate(groups):
                spread = aggregates[draft.key(panel, (group, bar))]
                draft.note_missing_seeds(spread, panel, group, bar)
                x = at + (i - (len(bar_labels) - 1) / 2) * width
                _draw_bar(axes, x, width * 0.92, spread, formats[panel], style.colour, hatch, f"series {name}")
                draft.text.append(
                    f"{series_name(draft.key(panel, (group, bar)), view)}: {formats[panel].show(spread.mean)}"
                )
            draft.series[name] = Patch(facecolor=style.colour, edgecolor="white", hatch=hatch)
        axes.set_xticks(range(len(groups)), [wrap_label(view.display(group), 18) for group in groups])
        axes.set_xlim(-0.5, max(len(groups), 1) - 0.5)
        axes.tick_params(axis="x", length=0)
        axes.grid(visible=False, axis="x")
        axes.set_ylabel(axis_label(formats[panel], view))
    draft.describe_spread("Bars", "whiskers")
    draft.draw_reference_lines(formats)
    top = max(axes.get_ylim()[1] for axes in draft.axes)
    for axes in draft.axes:
        axes.set_ylim(top=top)  # a number has the same height in every panel
    return draft


def _draw_bar(
    axes: Axes, x: float, width: float, spread: Spread, number: NumberFormat, colour: str, hatch: str, name: str
) -> None:
    if spread.mean is None:
        word = "failed" if spread.failed else "–"
        text = axes.text(
            x,
            0.015,
            word,
            transform=axes.get_xaxis_transform(),
            ha="center",
            va="bottom",
            rotation=90,
            fontsize=7.5,
            color=FAINT_COLOUR,
        )
        text.set_label(name)
        return
    drawn = axes.bar(x, spread.mean * number.factor, width, color=colour, edgecolor="white", hatch=hatch, linewidth=0)
    drawn[0].set_label(name)
    if spread.std is not None:
        std = spread.std * number.factor
        axes.errorbar(
            x, spread.mean * number.factor, yerr=std, fmt="none", ecolor="#222222", elinewidth=0.9, capsize=1.8
        )


CELL_SIZE = 0.27  # inches


def draw_heat_map(view: HeatMap, outcomes: Iterable[Outcome]) -> FigureDraft:
    """Draw a heat map for each panel, on one scale. A cell without a number is hatched and says "failed" or "–"."""
    draft = start_figure(view, outcomes, view.value, wide=True)
    rows, columns = as_tuple(view.rows), as_tuple(view.columns)
    aggregates = draft.aggregate(view.value, (*rows, *columns))
    if view.diagonal:
        first = len(draft.outer)
        spreads = relative_spreads(aggregates.spreads, lambda key: (*key[:first], key[-1], key[-1]))
        aggregates = Aggregates(aggregates.axes, spreads, aggregates.metrics, aggregates.excluded)
    number = draft.number_format(view.value, aggregates)
    down, across = label_combinations(aggregates, rows, view), label_combinations(aggregates, columns, view)
    means = [spread.mean * number.factor for spread in aggregates.spreads.values() if spread.mean is not None] or [
        0.0,
        1.0,
    ]
    # From zero where the numbers go near it; accuracies from 55 to 70 would else all look the same.
    scale = Normalize(0.0 if 0 <= min(means) < max(means) / 2 else min(means), max(means) or 1.0)
    written = len(across) <= 12 and len(down) * len(across) * len(draft.labels) <= 120
    cell = 0.46 if written else CELL_SIZE
    labels = [wrap_label(series_name(row, view, " "), 26) for row in down]
    longest = max((len(line) for label in labels for line in label.split("\n")), default=0)
    tall = max((label.count("\n") for label in labels), default=0) * 0.14 + CELL_SIZE
    draft.figure.set_size_inches(
        max(3.6, len(across) * cell + longest * 0.075 + 1.25),
        max(1.4, len(draft.labels) * (len(down) * tall + (0.3 if draft.outer else 0.05))) + 0.75,
    )
    draft.describe_spread("Cells")
    if not down or not across:
        return draft
    existing = {key[len(draft.outer) :] for key in aggregates.spreads}
    for panel, axes in zip(draft.labels, draft.axes, strict=True):
        values = np.full((len(down), len(across)), np.nan)
        for i, row in enumerate(down):
            for j, column in enumerate(across):
                if view.entries and (*row, *column) not in existing:
                    continue  # what no run has in its entries cannot be: embeddings have no first layer
                spread = aggregates[draft.key(panel, (*row, *column))]
                draft.note_missing_seeds(spread, panel, *row, *column)
                if spread.mean is None:
                    _draw_missing_cell(axes, i, j, "failed" if spread.failed else "–", written)
                else:
                    values[i, j] = spread.mean * number.factor
        image = axes.imshow(values, cmap=COLOUR_MAP, norm=scale, aspect="auto")
        image.set_label(f"series {'' if panel is None else view.display(panel)}")
        if written:
            _write_numbers(axes, values, number, scale)
        _label_heat_map(draft, axes, labels, across, panel)
        low, high = (np.nanmin(values), np.nanmax(values)) if np.isfinite(values).any() else (0.0, 0.0)
        where = "" if panel is None else f"{view.display(panel)}: "
        draft.text.append(f"{where}from {low:.3g} to {high:.3g} in {len(down)} rows and {len(across)} columns")
    bar = draft.figure.colorbar(image, ax=draft.axes, fraction=0.05, pad=0.02, aspect=30)
    bar.outline.set_visible(False)
    bar.set_label(view.display(number.name) + (" (%)" if number.factor == 100 else ""))
    return draft


def _label_heat_map(draft: FigureDraft, axes: Axes, labels: list[str], across: list[Labels], panel: Label) -> None:
    """Label the rows, and the columns under the lowest panel; numbers are thinned if there are many."""
    view = draft.view
    axes.set_yticks(range(len(labels)), labels)
    if isinstance(view, HeatMap):
        axes.set_ylabel(", ".join(view.display(axis) for axis in as_tuple(view.rows)))
    lowest = panel == draft.labels[-1]
    thin = max(1, -(-len(across) // 12)) if all(isinstance(c[0], (int, float)) for c in across) else 1
    ticks = list(range(0, len(across), thin))
    axes.set_xticks(ticks, [wrap_label(series_name(across[i], view), 22) if lowest else "" for i in ticks])
    if lowest and isinstance(view, HeatMap):
        axes.set_xlabel(", ".join(view.display(axis) for axis in as_tuple(view.columns)))
    axes.grid(visible=False)
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)


def _draw_missing_cell(axes: Axes, i: int, j: int, word: str, written: bool) -> None:
    axes.add_patch(
        Rectangle((j - 0.5, i - 0.5), 1, 1, facecolor="#F4F4F4", edgecolor="#BBBBBB", hatch="////", linewidth=0)
    )
    if written:
        axes.text(
            j,
            i,
            word,
            ha="center",
            va="center",
            fontsize=7,
            color=FAINT_COLOUR,
            bbox={"facecolor": "#F4F4F4", "linewidth": 0, "pad": 1},
        )


def _write_numbers(axes: Axes, values: np.ndarray, number: NumberFormat, scale: Normalize) -> None:
    """Write the number of each cell, white on dark colours."""
    colours = matplotlib.colormaps[COLOUR_MAP]
    for (i, j), value in np.ndenumerate(values):
        if np.isfinite(value):
            red, green, blue = (part**2.2 for part in colours(scale(value))[:3])
            dark = 0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.22  # below it white has the higher contrast
            text = (
                f"{value:.3g}"
                if number.digits is None
                else f"{value:.{min(number.digits, 1) if value < 99.95 else 0}f}"
            )
            axes.text(j, i, text, ha="center", va="center", fontsize=7.5, color="white" if dark else "#222222")


MARK_SHAPES = ("v", "^", "o", "s")
"""The markers of a view's marks, in their order."""


def draw_curves(view: Curves, outcomes: Iterable[Outcome]) -> FigureDraft:
    """Draw a line for each series through the means over seeds, with a band of ± one standard deviation.

    Along a run's steps a mean is drawn only where every seed of the series has a value: where some have stopped, the
    mean of the others would jump.
    """
    stepped = view.x == "step"
    outcomes = list(outcomes)
    stepwise = replace(view, entries=CURVE) if stepped else view
    draft = start_figure(view, outcomes, view.y, strip=_strip_height(view, outcomes))
    thresholds = [outcome for outcome in draft.outcomes if any(mark in outcome.extra for mark in view.marks)]
    draft.outcomes = [o for o in draft.outcomes if o not in thresholds or view.x in o.cell or view.x in o.count]
    series = draft.distinguishing_axes(as_tuple(view.series))
    aggregates = draft.aggregate(view.y, (*series, view.x), view.x, stepwise)
    formats = draft.number_formats(view.y, aggregates)
    series_labels = label_combinations(aggregates, series, view)
    styles = assign_styles(series_labels)
    all_xs = [float(key[-1] or 0) for key in aggregates.spreads]
    for panel, axes in zip(draft.labels, draft.axes, strict=True):
        for labels in series_labels:
            xs = _drawable_xs(draft, aggregates, panel, labels, stepped)
            _draw_line(draft, axes, aggregates, panel, labels, xs, formats[panel], styles[labels])
        axes.margins(y=0.08)
        axes.set_ylabel(axis_label(formats[panel], view))
        _format_x_axis(axes, view, all_xs)
    if not stepped:
        for key, spread in aggregates.spreads.items():
            draft.note_missing_seeds(spread, *key)
    draft.describe_spread("Lines", "bands")
    draft.draw_reference_lines(formats)
    for panel, axes, strip in zip(draft.labels, draft.axes, draft.strips, strict=False):
        if view.gap:
            _draw_gap(draft, strip, aggregates, panel, series_labels, formats[panel])
        else:
            _draw_marks(draft, strip, thresholds, series, panel, styles)
        _format_x_axis(strip, view, all_xs)
        strip.set_xlim(axes.get_xlim())
    for axes in draft.strips or draft.axes:
        axes.set_xlabel(view.display(view.x).replace("_", " "))
    return draft


def _strip_height(view: Curves, outcomes: Iterable[Outcome]) -> float:
    """Return the strip's height as a share of the panel's: a line of text for each series that has marks."""
    rows = {
        tuple(str(o.cell.get(axis)) for axis in as_tuple(view.series)) for o in select_outcomes(outcomes, view.where)
    }
    return 0.4 if view.gap else max(0.25, 0.065 * len(rows)) if view.marks else 0.0


def _format_x_axis(axes: Axes, view: Curves, xs: list[float]) -> None:
    if view.log and xs and min(xs) > 0:
        set_log_scale(axes, min(xs), max(max(xs), min(xs) * 2))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_number(value)))


def _drawable_xs(
    draft: FigureDraft, aggregates: Aggregates, panel: Label, labels: Labels, stepped: bool
) -> list[float]:
    """Return the x at which a series has a mean to draw, and note if some seeds end before others."""
    spreads = {
        key[-1]: aggregates[key]
        for key in aggregates.spreads
        if key[:-1] == draft.key(panel, labels) and aggregates[key].mean is not None
    }
    xs = sorted((float(x or 0), spread.n) for x, spread in spreads.items())
    n_seeds = max((n for _, n in xs), default=0)
    if stepped and any(n < n_seeds for _, n in xs):
        shared = [x for x, n in xs if n == n_seeds]
        draft.notes.append(
            f"{series_name(labels, draft.view)}: drawn to step {shared[-1]:,.0f}, which all {n_seeds} seeds reached; "
            f"the longest has {xs[-1][0]:,.0f}"
        )
    return [x for x, n in xs if n == n_seeds or not stepped]


def _draw_line(
    draft: FigureDraft,
    axes: Axes,
    aggregates: Aggregates,
    panel: Label,
    labels: Labels,
    xs: list[float],
    number: NumberFormat,
    style: SeriesStyle,
) -> None:
    by_x = {float(key[-1] or 0): aggregates[key] for key in aggregates.spreads if key[:-1] == draft.key(panel, labels)}
    name, spreads = series_name(labels, draft.view), [by_x[x] for x in xs]
    ys = [(spread.mean or 0.0) * number.factor for spread in spreads]
    mark_interval = max(1, len(xs) // 10)
    (line,) = axes.plot(
        xs, ys, color=style.colour, marker=style.marker, linestyle=style.dash, markevery=mark_interval,
        markeredgecolor="white", markeredgewidth=0.5,
    )  # fmt: skip
    line.set_label(f"series {name}")
    draft.series.setdefault(name, line)
    if any(spread.std is not None for spread in spreads):
        widths = [(spread.std or 0.0) * number.factor for spread in spreads]
        low, high = ([y + sign * w for y, w in zip(ys, widths, strict=True)] for sign in (-1, 1))
        axes.fill_between(xs, low, high, color=style.colour, alpha=0.16, linewidth=0)
    where = ", ".join(draft.view.display(label) for label in (panel, *labels) if label is not None)
    ends = ", ".join(f"{number.show(spreads[i].mean)} at {short_number(xs[i])}" for i in (0, -1)) if xs else "no result"
    draft.text.append(f"{where}: {ends}")


def _draw_gap(
    draft: FigureDraft,
    strip: Axes,
    aggregates: Aggregates,
    panel: Label,
    series_labels: list[Labels],
    number: NumberFormat,
) -> None:
    """Draw best minus worst series at each x; over fewer than all series it is noted and drawn hollow."""
    xs, ys, complete = [], [], []
    for x in sorted({float(key[-1] or 0) for key in aggregates.spreads}):
        means = [
            spread.mean
            for key, spread in aggregates.spreads.items()
            if spread.mean is not None
            and float(key[-1] or 0) == x
            and key[:-1] in {draft.key(panel, labels) for labels in series_labels}
        ]
        if len(means) > 1:
            xs.append(x)
            ys.append((max(means) - min(means)) * number.factor)
            complete.append(len(means) == len(series_labels))
            if not complete[-1]:
                draft.notes.append(f"gap at {short_number(x)}: between {len(means)} of {len(series_labels)} series")
    strip.plot(xs, ys, color="#222222", linewidth=1.2)[0].set_label("gap")
    for x, y, full in zip(xs, ys, complete, strict=True):
        strip.plot([x], [y], "o", color="#222222", markerfacecolor="#222222" if full else "white", markersize=4.5)
    strip.set_ylim(0, max(ys, default=1.0) * 1.2 or 1.0)
    strip.yaxis.set_major_locator(MaxNLocator(3))
    strip.set_ylabel("best −\nworst")
    draft.text.append("gap: " + ", ".join(f"{y:.1f} at {short_number(x)}" for x, y in zip(xs, ys, strict=True)))


def _draw_marks(
    draft: FigureDraft,
    strip: Axes,
    thresholds: list[Outcome],
    series: Sequence[str],
    panel: Label,
    styles: Mapping[Labels, SeriesStyle],
) -> None:
    """Draw a row for each series with the interval of each mark, and describe its ends in words."""
    view: Any = draft.view
    row_labels = [labels for labels in styles]
    for outcome in thresholds:
        labels = tuple(outcome.cell.get(axis) for axis in series)
        if labels not in styles or (draft.outer and outcome.cell.get(view.panels) != panel):
            continue
        for mark in (name for name in view.marks if outcome.extra.get(name) is not None):
            value = outcome.extra[mark]
            low, high = (value, value) if isinstance(value, (int, float)) else value
            y, style = row_labels.index(labels), styles[labels]
            if high is None:
                (end,) = strip.plot([low], [y], ">", color=style.colour, markerfacecolor="white", markersize=6)
                end.set_label(f"mark {mark} {series_name(labels, view)}")
                draft.lines[f"{view.display(mark)} threshold above the largest {view.x} tried"] = Line2D(
                    [], [], color=FAINT_COLOUR, marker=">", markerfacecolor="white", linestyle="none", markersize=6
                )
                draft.text.append(f"{series_name(labels, view)}: {view.display(mark)} beyond {short_number(low)}")
                continue
            strip.plot([low, high], [y, y], color=style.colour, linewidth=3.2, solid_capstyle="butt", alpha=0.55)
            middle, marker = (
                (low * high) ** 0.5 if low > 0 else (low + high) / 2,
                MARK_SHAPES[view.marks.index(mark) % len(MARK_SHAPES)],
            )
            (end,) = strip.plot([middle], [y], marker, color=style.colour, markeredgecolor="white", markersize=6)
            end.set_label(f"mark {mark} {series_name(labels, view)}")
            draft.text.append(
                f"{series_name(labels, view)}: {view.display(mark)} "
                f"between {short_number(low)} and {short_number(high)}"
            )
            draft.lines[f"{view.display(mark)} threshold, for each {view.repetition}"] = Line2D(
                [], [], color=FAINT_COLOUR, marker=marker, linestyle="-", linewidth=3.2, markeredgecolor="white",
                markersize=6,
            )  # fmt: skip
    strip.set_yticks(range(len(row_labels)), [shorten(series_name(labels, view), 30) for labels in row_labels])
    strip.set_ylim(len(row_labels) - 0.4, -0.6)
    strip.tick_params(axis="y", length=0, labelsize=8)
    strip.grid(visible=False, axis="y")


DRAWING_FUNCTIONS: dict[type[FigureSpec], Callable[[Any, Iterable[Outcome]], FigureDraft]] = {
    Scatter: draw_scatter,
    Bars: draw_bars,
    Curves: draw_curves,
    HeatMap: draw_heat_map,
}
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
    and bands stand for.
    """

    title: str
    text: str
    notes: tuple[str, ...]
    figure: Figure
    caption: str = ""

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
        draft = DRAWING_FUNCTIONS[type(view)](view, list(outcomes))
        _finish(draft)
    notes = tuple(dict.fromkeys(draft.notes))
    return DrawnFigure(view.title, ". ".join(draft.text), notes, draft.figure, draft.caption)


def _finish(draft: FigureDraft) -> None:
    """Write names beside the points if they fit, and everything else into a legend below."""
    if not draft.has_numbers:
        for axes in draft.axes:
            axes.text(0.5, 0.5, "no results", transform=axes.transAxes, ha="center", va="center", color=FAINT_COLOUR)
    labelled = draft.has_numbers and len(draft.point_labels) == len(draft.axes)
    handles = {**({} if labelled or (len(draft.series) == 1 and not draft.lines) else draft.series), **draft.lines}
    place_legend(draft.figure, list(handles.values()), list(handles))
    rotate_ticks(draft.figure)
    if labelled and not all(
        place_labels(axes, points, names, draft.level_lines.get(axes, ()), draft.whiskers.get(axes, ()))
        for axes, points, names in draft.point_labels
    ):
        for text in [text for axes in draft.axes for text in axes.texts]:
            text.remove()
        handles = {**draft.series, **draft.lines}
        place_legend(draft.figure, list(handles.values()), list(handles))
        rotate_ticks(draft.figure)
    # From here on the layout stays as it was measured: laid out again it would move by fractions of a pixel.
    draft.figure.set_layout_engine("none")


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
