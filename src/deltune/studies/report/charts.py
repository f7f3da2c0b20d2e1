"""Drawing a study's figures (scatter plots, bars, heat maps and curves), and writing them as PNG, SVG and PDF.

Equal numbers give equal bytes.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator

from ...files import atomic_open
from ..jobs.job import Outcome
from .aggregate import CURVE, METRIC, SEED, Aggregates, Labels, NumberFormat, Spread, relative_spreads, select_outcomes
from .figure_spec import Bars, Curves, FigureSpec, HeatMap, Label, Scatter, as_tuple
from .panels import (
    COLOUR_MAP,
    FAINT_COLOUR,
    HATCHES,
    STYLE,
    FigureDraft,
    SeriesStyle,
    assign_styles,
    axis_label,
    label_combinations,
    place_labels,
    place_legend,
    rotate_ticks,
    series_name,
    series_style,
    set_log_scale,
    short_number,
    shorten,
    start_figure,
    wrap_label,
)

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
