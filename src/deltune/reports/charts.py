"""Scatters and bars: points at two numbers, and numbers side by side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from matplotlib.axes import Axes
from matplotlib.container import ErrorbarContainer
from matplotlib.patches import Patch

from ..engine.outcomes import Outcome
from .facts import METRIC, SEED, Facts, Place, Spread, Unit
from .inks import FAINT, HATCHES, Ink, ink
from .lettering import logarithmic, wrapped
from .panels import Sheet, called, combined, heading, looks, sheet
from .views import Bars, Label, Scatter, names

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


def _points(facts: Facts, one: Place, panel: Label, first: int) -> list[Point]:
    """The points of a series in a panel, in the order of x."""
    found = [
        (float(place[-1] or 0), spread)
        for place, spread in facts.spreads.items()
        if place[first : first + len(one)] == one and (not first or place[0] == panel) and spread.mean is not None
    ]
    return sorted(found, key=lambda point: point[0])


def _whiskers(axes: Axes, points: Sequence[Point], own: Unit, look: Ink, name: str) -> ErrorbarContainer:
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
            look, hatch, name = ink(i), HATCHES[i % len(HATCHES)], view.write(bar)
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
