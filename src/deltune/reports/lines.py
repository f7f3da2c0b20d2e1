"""Curves: learning curves, score against N with its thresholds, score against size with the gap below."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from ..engine.outcomes import Outcome
from .facts import CURVE, Facts, Place, Unit, chosen
from .inks import FAINT, Ink
from .lettering import logarithmic, short, shortened
from .panels import Sheet, called, combined, heading, looks, sheet
from .views import Curves, Label, names

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
    rows = {tuple(str(o.cell.get(axis)) for axis in names(view.series)) for o in chosen(outcomes, view.where)}
    return 0.4 if view.gap else max(0.25, 0.065 * len(rows)) if view.marks else 0.0


def _abscissa(axes: Axes, view: Curves, spans: list[float]) -> None:
    if view.log and spans and min(spans) > 0:
        logarithmic(axes, min(spans), max(max(spans), min(spans) * 2))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))


def _reached(page: Sheet, facts: Facts, panel: Label, one: Place, stepped: bool) -> list[float]:
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
    page: Sheet, axes: Axes, facts: Facts, panel: Label, one: Place, xs: list[float], own: Unit, look: Ink
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


def _gap(page: Sheet, strip: Axes, facts: Facts, panel: Label, every: list[Place], own: Unit) -> None:
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
    page: Sheet, strip: Axes, marked: list[Outcome], series: Sequence[str], panel: Label, inked: Mapping[Place, Ink]
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
