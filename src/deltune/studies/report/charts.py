"""Curves: learning curves, score against N with its thresholds, score against size with the gap below."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.container import ErrorbarContainer
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator

from ..engine.outcomes import Outcome
from .aggregate import CURVE, METRIC, SEED, Aggregates, Place, Spread, Unit, relative, select_outcomes
from .figure_spec import Bars, Curves, Heat, Label, Scatter, names
from .panels import Sheet, called, combined, heading, looks, sheet
from .style import FAINT, HATCHES, MAP, SeriesStyle, logarithmic, series_style, short, shortened, wrapped

Point = tuple[float, Spread]


def scatter(view: Scatter, outcomes: Iterable[Outcome]) -> Sheet:
    """A marker for each point, whiskers of ± one standard deviation, a thin line through those of one series.

    One point a series: its name stands beside it, where there is room for all.
    """
    page = sheet(view, outcomes, view.y)
    series = page.telling(names(view.series))
    met = dict.fromkeys(axis for outcome in page.outcomes for axis in outcome.cell)
    beyond = [a for a in met if a not in (SEED, METRIC, view.x, *page.outer, *series, *view.pooled)]
    facts = page.gather(view.y, (*series, *beyond, view.x), view.x)
    own = page.units(view.y, facts)
    every = combined(facts, series, view)
    inked = looks(every)
    drawn = {
        panel: {one: _points(facts, one, panel, len(page.outer)) for one in every} for panel in page.labels
    }  # fmt: skip
    spans = [x for points in drawn.values() for several in points.values() for x, _ in several]
    log = bool(spans) and min(spans) > 0 and (max(spans) > 100 * min(spans) if view.log is None else view.log)
    for place, spread in facts.spreads.items():
        page.note(spread, *place[:-1])
    for panel, axes in zip(page.labels, page.axes, strict=True):
        for one, points in drawn[panel].items():
            page.series.setdefault(
                called(one, view), _whiskers(axes, points, own[panel], inked[one], called(one, view))
            )
            told = ", ".join(f"{own[panel].show(spread.mean)} at {x:.4g}" for x, spread in points) or "no result"
            page.text.append(", ".join(view.write(p) for p in (panel, *one) if p is not None) + f": {told}")
        if log:
            logarithmic(axes, min(spans), max(spans))
        axes.margins(y=0.14)
        axes.set_xlabel(view.write(view.x).replace("_", " "))
        axes.set_ylabel(heading(own[panel], view))
        single = {called(one, view): points[0] for one, points in drawn[panel].items() if points}
        if all(len(points) <= 1 for points in drawn[panel].values()):
            where = [(x, (spread.mean or 0.0) * own[panel].factor) for x, spread in single.values()]
            page.beside.append((axes, where, list(single)))
    page.level(own)
    return page


def _points(facts: Aggregates, one: Place, panel: Label, first: int) -> list[Point]:
    """The points of a series in a panel, in the order of x."""
    found = [
        (float(place[-1] or 0), spread)
        for place, spread in facts.spreads.items()
        if place[first : first + len(one)] == one and (not first or place[0] == panel) and spread.mean is not None
    ]
    return sorted(found, key=lambda point: point[0])


def _whiskers(axes: Axes, points: Sequence[Point], own: Unit, look: SeriesStyle, name: str) -> ErrorbarContainer:
    """Also where there is no point: the legend shows that the series was asked for."""
    drawn = axes.errorbar(
        [x for x, _ in points],
        [(spread.mean or 0.0) * own.factor for _, spread in points],
        yerr=[(spread.std or 0.0) * own.factor for _, spread in points],
        color=look.colour,
        marker=look.marker,
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


def bars(view: Bars, outcomes: Iterable[Outcome]) -> Sheet:
    """Groups of bars from zero, with whiskers of ± one standard deviation; a gap says "failed" or "–" in its place."""
    page = sheet(view, outcomes, view.y)
    facts = page.gather(view.y, (view.groups, view.bars))
    own = page.units(view.y, facts)
    groups, each = facts.labels(view.groups, view), facts.labels(view.bars, view)
    width = 0.84 / max(len(each), 1)
    for panel, axes in zip(page.labels, page.axes, strict=True):
        for i, bar in enumerate(each):
            look, hatch, name = series_style(i), HATCHES[i % len(HATCHES)], view.write(bar)
            for at, group in enumerate(groups):
                spread = facts[page.at(panel, (group, bar))]
                page.note(spread, panel, group, bar)
                x = at + (i - (len(each) - 1) / 2) * width
                _bar(axes, x, width * 0.92, spread, own[panel], look.colour, hatch, f"series {name}")
                page.text.append(
                    f"{called((*((panel,) if page.outer else ()), group, bar), view)}: {own[panel].show(spread.mean)}"
                )
            page.series[name] = Patch(facecolor=look.colour, edgecolor="white", hatch=hatch)
        axes.set_xticks(range(len(groups)), [wrapped(view.write(group), 18) for group in groups])
        axes.set_xlim(-0.5, max(len(groups), 1) - 0.5)
        axes.tick_params(axis="x", length=0)
        axes.grid(visible=False, axis="x")
        axes.set_ylabel(heading(own[panel], view))
    page.level(own)
    top = max(axes.get_ylim()[1] for axes in page.axes)
    for axes in page.axes:
        axes.set_ylim(top=top)  # the same number is as high in every panel
    return page


def _bar(axes: Axes, x: float, width: float, spread: Spread, own: Unit, colour: str, hatch: str, name: str) -> None:
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
            color=FAINT,
        )
        text.set_label(name)
        return
    drawn = axes.bar(x, spread.mean * own.factor, width, color=colour, edgecolor="white", hatch=hatch, linewidth=0)
    drawn[0].set_label(name)
    if spread.std is not None:
        std = spread.std * own.factor
        axes.errorbar(x, spread.mean * own.factor, yerr=std, fmt="none", ecolor="#222222", elinewidth=0.9, capsize=1.8)


CELL = 0.27  # inches


def heat(view: Heat, outcomes: Iterable[Outcome]) -> Sheet:
    """One scale for all panels. A cell without a number is hatched and says "failed" or "–"."""
    page = sheet(view, outcomes, view.value, wide=True)
    rows, columns = names(view.rows), names(view.columns)
    facts = page.gather(view.value, (*rows, *columns))
    if view.diagonal:
        first = len(page.outer)
        based = relative(facts.spreads, lambda place: (*place[:first], place[-1], place[-1]))
        facts = Aggregates(facts.axes, based, facts.metrics, facts.left)
    own = page.unit(view.value, facts)
    down, across = combined(facts, rows, view), combined(facts, columns, view)
    means = [spread.mean * own.factor for spread in facts.spreads.values() if spread.mean is not None] or [0.0, 1.0]
    # From zero where the numbers go near it; accuracies from 55 to 70 would else all look the same.
    scale = Normalize(0.0 if 0 <= min(means) < max(means) / 2 else min(means), max(means) or 1.0)
    written = len(across) <= 12 and len(down) * len(across) * len(page.labels) <= 120
    cell = 0.46 if written else CELL
    labels = [wrapped(called(row, view, " "), 26) for row in down]
    longest = max((len(line) for label in labels for line in label.split("\n")), default=0)
    tall = max((label.count("\n") for label in labels), default=0) * 0.14 + CELL
    page.figure.set_size_inches(
        max(3.6, len(across) * cell + longest * 0.075 + 1.0),
        max(1.4, len(page.labels) * (len(down) * tall + (0.3 if page.outer else 0.05))) + 0.75,
    )
    if not down or not across:
        return page
    for panel, axes in zip(page.labels, page.axes, strict=True):
        values = np.full((len(down), len(across)), np.nan)
        for i, row in enumerate(down):
            for j, column in enumerate(across):
                spread = facts[page.at(panel, (*row, *column))]
                page.note(spread, panel, *row, *column)
                if spread.mean is None:
                    _blank(axes, i, j, "failed" if spread.failed else "–", written)
                else:
                    values[i, j] = spread.mean * own.factor
        image = axes.imshow(values, cmap=MAP, norm=scale, aspect="auto")
        image.set_label(f"series {'' if panel is None else view.write(panel)}")
        if written:
            _numbers(axes, values, own, scale)
        _edges(page, axes, labels, across, panel)
        low, high = (np.nanmin(values), np.nanmax(values)) if np.isfinite(values).any() else (0.0, 0.0)
        where = "" if panel is None else f"{view.write(panel)}: "
        page.text.append(f"{where}from {low:.3g} to {high:.3g} in {len(down)} rows and {len(across)} columns")
    bar = page.figure.colorbar(image, ax=page.axes, fraction=0.05, pad=0.02, aspect=30)
    bar.outline.set_visible(False)
    bar.set_label(view.write(own.name) + (" (%)" if own.factor == 100 else ""))
    return page


def _edges(page: Sheet, axes: Axes, labels: list[str], across: list[Place], panel: Label) -> None:
    """Labels of rows, and of columns under the lowest panel; numbers are thinned where they are many."""
    view = page.view
    axes.set_yticks(range(len(labels)), labels)
    lowest = panel == page.labels[-1]
    thin = max(1, -(-len(across) // 12)) if all(isinstance(c[0], (int, float)) for c in across) else 1
    ticks = list(range(0, len(across), thin))
    axes.set_xticks(ticks, [wrapped(called(across[i], view), 22) if lowest else "" for i in ticks])
    if lowest and isinstance(view, Heat):
        axes.set_xlabel(", ".join(names(view.columns)))
    axes.grid(visible=False)
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)


def _blank(axes: Axes, i: int, j: int, word: str, written: bool) -> None:
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
            color=FAINT,
            bbox={"facecolor": "#F4F4F4", "linewidth": 0, "pad": 1},
        )


def _numbers(axes: Axes, values: np.ndarray, own: Unit, scale: Normalize) -> None:
    """The number of each cell, white on dark."""
    colours = matplotlib.colormaps[MAP]
    for (i, j), value in np.ndenumerate(values):
        if np.isfinite(value):
            red, green, blue = (part**2.2 for part in colours(scale(value))[:3])
            dark = 0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.22  # below it white has the higher contrast
            text = f"{value:.3g}" if own.digits is None else f"{value:.{min(own.digits, 1) if value < 100 else 0}f}"
            axes.text(j, i, text, ha="center", va="center", fontsize=7.5, color="white" if dark else "#222222")


ENDS = ("v", "^", "o", "s")
"""Markers of the marks, in their order."""


def curves(view: Curves, outcomes: Iterable[Outcome]) -> Sheet:
    """A line for each series through the means over seeds, with a band of ± one standard deviation.

    Along a run's own steps a mean is drawn only where every seed of the series has a value: where some have stopped,
    the mean of the others would jump.
    """
    stepped = view.x == "step"
    outcomes = list(outcomes)
    asked = replace(view, over=CURVE) if stepped else view
    page = sheet(view, outcomes, view.y, strip=_strip(view, outcomes))
    marked = [outcome for outcome in page.outcomes if any(mark in outcome.extra for mark in view.marks)]
    page.outcomes = [o for o in page.outcomes if o not in marked or view.x in o.cell or view.x in o.count]
    series = page.telling(names(view.series))
    facts = page.gather(view.y, (*series, view.x), view.x, asked)
    own = page.units(view.y, facts)
    every = combined(facts, series, view)
    inked = looks(every)
    spans = [float(place[-1] or 0) for place in facts.spreads]
    for panel, axes in zip(page.labels, page.axes, strict=True):
        for one in every:
            xs = _reached(page, facts, panel, one, stepped)
            _line(page, axes, facts, panel, one, xs, own[panel], inked[one])
        axes.margins(y=0.08)
        axes.set_ylabel(heading(own[panel], view))
        _abscissa(axes, view, spans)
    if not stepped:
        for place, spread in facts.spreads.items():
            page.note(spread, *place)
    page.level(own)
    for panel, axes, strip in zip(page.labels, page.axes, page.strips, strict=False):
        if view.gap:
            _gap(page, strip, facts, panel, every, own[panel])
        else:
            _marks(page, strip, marked, series, panel, inked)
        _abscissa(strip, view, spans)
        strip.set_xlim(axes.get_xlim())
    for axes in page.strips or page.axes:
        axes.set_xlabel(view.write(view.x).replace("_", " "))
    return page


def _strip(view: Curves, outcomes: Iterable[Outcome]) -> float:
    """The strip's height, to the panel's: a line of text for each series of its marks."""
    rows = {tuple(str(o.cell.get(axis)) for axis in names(view.series)) for o in select_outcomes(outcomes, view.where)}
    return 0.4 if view.gap else max(0.25, 0.065 * len(rows)) if view.marks else 0.0


def _abscissa(axes: Axes, view: Curves, spans: list[float]) -> None:
    if view.log and spans and min(spans) > 0:
        logarithmic(axes, min(spans), max(max(spans), min(spans) * 2))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))


def _reached(page: Sheet, facts: Aggregates, panel: Label, one: Place, stepped: bool) -> list[float]:
    """The x at which the series has a mean to draw; where seeds end before others, that is noted."""
    found = {
        place[-1]: facts[place]
        for place in facts.spreads
        if place[:-1] == page.at(panel, one) and facts[place].mean is not None
    }
    xs = sorted((float(x or 0), spread.n) for x, spread in found.items())
    most = max((n for _, n in xs), default=0)
    if stepped and any(n < most for _, n in xs):
        shared = [x for x, n in xs if n == most]
        page.notes.append(
            f"{called(one, page.view)}: drawn to step {shared[-1]:,.0f}, which all {most} seeds reached; "
            f"the longest has {xs[-1][0]:,.0f}"
        )
    return [x for x, n in xs if n == most or not stepped]


def _line(
    page: Sheet, axes: Axes, facts: Aggregates, panel: Label, one: Place, xs: list[float], own: Unit, look: SeriesStyle
) -> None:
    by_x = {float(place[-1] or 0): facts[place] for place in facts.spreads if place[:-1] == page.at(panel, one)}
    name, spreads = called(one, page.view), [by_x[x] for x in xs]
    ys = [(spread.mean or 0.0) * own.factor for spread in spreads]
    every = max(1, len(xs) // 10)
    (line,) = axes.plot(
        xs, ys, color=look.colour, marker=look.marker, linestyle=look.dash, markevery=every, markeredgecolor="white",
        markeredgewidth=0.5,
    )  # fmt: skip
    line.set_label(f"series {name}")
    page.series.setdefault(name, line)
    if any(spread.std is not None for spread in spreads):
        wide = [(spread.std or 0.0) * own.factor for spread in spreads]
        low, high = ([y + sign * w for y, w in zip(ys, wide, strict=True)] for sign in (-1, 1))
        axes.fill_between(xs, low, high, color=look.colour, alpha=0.16, linewidth=0)
    where = ", ".join(page.view.write(label) for label in (panel, *one) if label is not None)
    ends = (
        f"{own.show(spreads[0].mean)} at {short(xs[0])}, {own.show(spreads[-1].mean)} at {short(xs[-1])}"
        if xs
        else "no result"
    )
    page.text.append(f"{where}: {ends}")


def _gap(page: Sheet, strip: Axes, facts: Aggregates, panel: Label, every: list[Place], own: Unit) -> None:
    """Best minus worst series at each x; over fewer than all series it is noted and drawn hollow."""
    xs, ys, whole = [], [], []
    for x in sorted({float(place[-1] or 0) for place in facts.spreads}):
        means = [
            spread.mean
            for place, spread in facts.spreads.items()
            if spread.mean is not None
            and float(place[-1] or 0) == x
            and place[:-1] in {page.at(panel, e) for e in every}
        ]
        if len(means) > 1:
            xs.append(x)
            ys.append((max(means) - min(means)) * own.factor)
            whole.append(len(means) == len(every))
            if not whole[-1]:
                page.notes.append(f"gap at {short(x)}: between {len(means)} of {len(every)} series")
    strip.plot(xs, ys, color="#222222", linewidth=1.2)[0].set_label("gap")
    for x, y, full in zip(xs, ys, whole, strict=True):
        strip.plot([x], [y], "o", color="#222222", markerfacecolor="#222222" if full else "white", markersize=4.5)
    strip.set_ylim(0, max(ys, default=1.0) * 1.2 or 1.0)
    strip.yaxis.set_major_locator(MaxNLocator(3))
    strip.set_ylabel("best −\nworst")
    page.text.append("gap: " + ", ".join(f"{y:.1f} at {short(x)}" for x, y in zip(xs, ys, strict=True)))


def _marks(
    page: Sheet,
    strip: Axes,
    marked: list[Outcome],
    series: Sequence[str],
    panel: Label,
    inked: Mapping[Place, SeriesStyle],
) -> None:
    """A row for each series with the interval of each mark, and its ends in words."""
    view: Any = page.view
    rows = [one for one in inked]
    for outcome in marked:
        one = tuple(outcome.cell.get(axis) for axis in series)
        if one not in inked or (page.outer and outcome.cell.get(view.panels) != panel):
            continue
        for mark in (name for name in view.marks if outcome.extra.get(name) is not None):
            held = outcome.extra[mark]
            low, high = (held, held) if isinstance(held, (int, float)) else held
            y, look = rows.index(one), inked[one]
            if high is None:
                (end,) = strip.plot([low], [y], ">", color=look.colour, markerfacecolor="white", markersize=6)
                end.set_label(f"mark {mark} {called(one, view)}")
                page.text.append(f"{called(one, view)}: {view.write(mark)} beyond {short(low)}")
                continue
            strip.plot([low, high], [y, y], color=look.colour, linewidth=3.2, solid_capstyle="butt", alpha=0.55)
            middle, marker = (
                (low * high) ** 0.5 if low > 0 else (low + high) / 2,
                ENDS[view.marks.index(mark) % len(ENDS)],
            )
            (end,) = strip.plot([middle], [y], marker, color=look.colour, markeredgecolor="white", markersize=6)
            end.set_label(f"mark {mark} {called(one, view)}")
            page.text.append(f"{called(one, view)}: {view.write(mark)} between {short(low)} and {short(high)}")
    for i, mark in enumerate(view.marks):
        page.lines[f"{view.write(mark)} threshold"] = Line2D(
            [], [], color=FAINT, marker=ENDS[i % 4], linestyle="-", linewidth=3.2, markeredgecolor="white", markersize=6
        )
    strip.set_yticks(range(len(rows)), [shortened(called(one, view), 30) for one in rows])
    strip.set_ylim(len(rows) - 0.4, -0.6)
    strip.tick_params(axis="y", length=0, labelsize=8)
    strip.grid(visible=False, axis="y")
