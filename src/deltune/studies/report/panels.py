"""The frame and the look of figures: panels, strips below them, reference lines, notes, colours, ticks and the legend.

Labels beside points are placed by our own search and not by adjustText: that writes names over markers, places them
differently from run to run if they are many, and does not tell when there is no room and a legend is needed.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backend_bases import RendererBase
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator
from matplotlib.transforms import Bbox

from ...errors import number_range
from ..jobs.job import Outcome
from .aggregate import SEED, Aggregates, Labels, NumberFormat, Spread, aggregate, number_format, select_outcomes
from .figure_spec import FigureSpec, Label, Numbers, as_tuple

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
    """Colour, marker, dash and hatch of a series."""

    colour: str
    marker: str
    dash: Any
    hatch: str


def series_style(first: int, second: int | None = None) -> SeriesStyle:
    """Return the style of a series.

    Of two axes the first label gives the colour, and the second marker, dash and hatch; these follow `first` if
    `second` is None.
    """
    shape = first if second is None else second
    return SeriesStyle(
        COLOURS[first % len(COLOURS)],
        MARKERS[shape % len(MARKERS)],
        DASHES[shape % len(DASHES)],
        HATCHES[shape % len(HATCHES)],
    )


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
