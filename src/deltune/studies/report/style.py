"""Words in figures: ticks that read well, labels beside points, a legend below, and none over another."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backend_bases import RendererBase
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from matplotlib.transforms import Bbox

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#555555")
"""Okabe and Ito's, without yellow (too pale on white) and with grey for black, which is the levels'."""

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
LEVELS = ((0, (4, 2)), (0, (1, 1.5)), (0, (8, 2, 1, 2)))
TEXT, FAINT, GRID = "#222222", "#6B6B6B", "#E3E3E3"
MAP = "YlGnBu"  # of ColorBrewer's, one of those safe for the colour-blind, dark where the value is large

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
    "text.color": TEXT,
    "axes.labelcolor": TEXT,
    "axes.edgecolor": FAINT,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": TEXT,
    "ytick.labelcolor": TEXT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
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
    colour: str
    marker: str
    dash: Any
    hatch: str


def series_style(first: int, second: int | None = None) -> SeriesStyle:
    """The look of a series: alone, all differs with it; of two axes, colour follows the first and shape the second."""
    shape = first if second is None else second
    return SeriesStyle(
        COLOURS[first % len(COLOURS)],
        MARKERS[shape % len(MARKERS)],
        DASHES[shape % len(DASHES)],
        HATCHES[shape % len(HATCHES)],
    )


BESIDE = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, 1), (1, -1), (-1, -1))
SLANT = 40  # degrees
STEPS = (6.0, 12.0, 20.0, 30.0)  # points from a marker's middle to its label


def short(value: float) -> str:
    """0.001, 0.5, 20, 1k, 250k, 4.4M: no powers of ten to decode."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{letter}"
    return f"{value:.10f}".rstrip("0").rstrip(".") if 0 < abs(value) < 1e-3 else f"{value:.4g}"


def wrapped(text: str, width: int) -> str:
    """A label in lines of at most so many letters, five at most: an expression can be long."""
    return "\n".join(textwrap.wrap(shortened(text, 4 * width), width))


def shortened(text: str, most: int) -> str:
    """A label without its middle where it is longer: what tells two expressions apart stands at an end."""
    return text if len(text) <= most else f"{text[: most // 2]}…{text[-(most - most // 2 - 1) :]}"


def logarithmic(axes: Axes, low: float, high: float) -> None:
    """A log axis from low to high, with room at both ends and ticks at powers of ten, or 1 2 5 where it is short."""
    axes.set_xscale("log")
    room = max(math.log10(high / low) * 0.07, 0.05)
    start, end = low / 10**room, high * 10**room
    axes.set_xlim(start, end)
    decades = range(math.floor(math.log10(start)), math.ceil(math.log10(end)) + 1)
    subs = (1, 2, 5) if math.log10(end / start) < 2.5 else (1,)
    ticks = [sub * 10.0**power for power in decades for sub in subs if start <= sub * 10.0**power <= end]
    axes.xaxis.set_major_locator(FixedLocator(ticks[:: math.ceil(len(ticks) / 8)]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))


def canvas(figure: Figure) -> FigureCanvasAgg:
    """The figure laid out, so that everything has its place and extent.

    Twice: the ticks follow from the height of the panels, which follows from the width of the ticks' labels.
    """
    drawn = FigureCanvasAgg(figure)
    figure.draw_without_rendering()
    figure.draw_without_rendering()
    return drawn


def legend(figure: Figure, handles: Sequence[Artist], labels: Sequence[str]) -> None:
    """Below the panels, in as many columns as the width allows; the figure grows by its height. It replaces another."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    for old in list(figure.legends):
        _grow(figure, -old.get_window_extent(renderer).height)
        old.remove()
    if not handles:
        return
    columns = len(handles)
    while True:
        made = figure.legend(
            handles,
            [wrapped(label, 52) for label in labels],
            loc="outside lower center",
            ncols=columns,
            handlelength=2.4,
            columnspacing=1.4,
        )
        box = made.get_window_extent(renderer)
        if columns == 1 or box.width <= figure.bbox.width * 0.98:
            even = math.ceil(len(handles) / math.ceil(len(handles) / columns))  # no line of one name alone
            if columns == even:
                return _grow(figure, box.height)
            columns = even
        else:
            columns = max(1, min(columns - 1, int(columns * figure.bbox.width / box.width) + 1))
        made.remove()


def _grow(figure: Figure, pixels: float) -> None:
    figure.set_figheight(figure.get_figheight() + pixels / figure.dpi)


def rotate_ticks(figure: Figure) -> None:
    """Turn the labels of an x axis where they would touch: aslant where their lines then keep apart, else upright.

    The figure grows by what they then take, once for each row of panels.
    """
    renderer = canvas(figure).get_renderer()
    taken: dict[int, float] = {}
    for axes in figure.axes:
        labels = [label for label in axes.get_xticklabels() if label.get_text() and label.get_visible()]
        boxes = [label.get_window_extent(renderer) for label in labels]
        if not any(a.x1 + 3 > b.x0 for a, b in pairwise(boxes)):
            continue
        if isinstance(axes.xaxis.get_major_locator(), FixedLocator):
            texts = [shortened(label.get_text().replace("\n", " "), 32) for label in axes.get_xticklabels()]
            axes.set_xticks(axes.get_xticks(), texts)
            labels = [label for label in axes.get_xticklabels() if label.get_text()]
        apart = min(b.x0 + b.x1 - a.x0 - a.x1 for a, b in pairwise(boxes)) / 2
        before, line = max(box.height for box in boxes), min(box.height for box in boxes)
        for label in labels:
            if apart * math.sin(math.radians(SLANT)) < line + 1:
                label.set(rotation=90, ha="center", va="top")
            else:
                label.set(rotation=SLANT, ha="right", va="top", rotation_mode="anchor")
        height = max(label.get_window_extent(renderer).height for label in labels) - before
        spec = axes.get_subplotspec()
        row = spec.get_topmost_subplotspec().rowspan.start if spec else 0
        taken[row] = max(taken.get(row, 0.0), height)
    if taken:
        _grow(figure, sum(taken.values()))
        canvas(figure)


def place_labels(
    axes: Axes, points: Sequence[tuple[float, float]], names: Sequence[str], taken: Sequence[Artist] = ()
) -> bool:
    """A name beside each point, over no other name, point or artist of `taken`, and inside the axes.

    False, and nothing written, where there is not room for all: then a legend has to do.
    """
    renderer = canvas(axes.figure.figure).get_renderer()
    frame = axes.get_window_extent(renderer)
    at = [axes.transData.transform(point) for point in points]
    busy = [Bbox.from_extents(x - 5, y - 5, x + 5, y + 5) for x, y in at]
    busy += [artist.get_window_extent(renderer).padded(2) for artist in taken]
    written: list[Artist] = []
    # From the most crowded outwards would be better for many points; from the top down is enough for a score of them.
    for i in sorted(range(len(at)), key=lambda i: -at[i][1]):
        text = _free(axes, points[i], tuple(at[i]), names[i], busy, frame, renderer)
        if text is None:
            for artist in written:
                artist.remove()
            return False
        written.append(text)
        busy.append(Text.get_window_extent(text, renderer).padded(2))
    return True


def _free(
    axes: Axes,
    point: tuple[float, float],
    at: Sequence[float],
    name: str,
    busy: Sequence[Bbox],
    frame: Bbox,
    renderer: RendererBase,
) -> Text | None:
    """The name in the nearest free place around its point, with a line to it from afar."""
    for step in STEPS:
        for right, up in BESIDE:
            text = axes.annotate(
                wrapped(name, 30),
                point,
                (right * step, up * step),
                textcoords="offset points",
                ha={1: "left", 0: "center", -1: "right"}[right],
                va={1: "bottom", 0: "center", -1: "top"}[up],
                fontsize=8.5,
                color=TEXT,
                arrowprops={"arrowstyle": "-", "color": FAINT, "lw": 0.6, "shrinkA": 0, "shrinkB": 3}
                if step > 6
                else None,
            )
            text.set_in_layout(False)
            text.update_positions(renderer)
            box = Text.get_window_extent(text, renderer)  # of the words alone, without the line to them
            inside = frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1
            if inside and not any(box.overlaps(other) for other in busy):
                return text
            text.remove()
    return None
