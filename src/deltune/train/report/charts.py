"""Line charts as inline SVG that follow the page's colours, light or dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

WIDTH, HEIGHT = 560, 250  # units of the view box; a chart is as wide as its place, so letters shrink with it
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 10, 40
MAX_POINTS = 240
SERIES_STYLES = 6
"""The number of series that differ in colour and dash (`.c0` … `.c5` in page.css); later ones begin anew."""


@dataclass(frozen=True)
class Line:
    """A series of a line chart.

    Attributes:
        name: What the legend calls it.
        points: Places and values; those that are not finite are left out.
        dots: Whether every point is drawn as a dot, for series of few points.
        marked: The place of the point that is ringed, if any.
    """

    name: str
    points: Sequence[tuple[float, float]]
    dots: bool = False
    marked: float | None = None


def line_chart(title: str, lines: Sequence[Line], x_label: str) -> Markup:
    """Draw series over a common horizontal axis."""
    drawn = [
        Line(line.name, points, line.dots, line.marked)
        for line in lines
        if (points := [(x, y) for x, y in line.points if math.isfinite(y)])
    ]
    if not any(len(line.points) > 1 for line in drawn):
        return Markup("")
    xs = [x for line in drawn for x, _ in line.points]
    ys = [y for line in drawn for _, y in line.points]
    left, right = min(xs), max(xs)
    y_ticks = _ticks(min(ys), max(ys))
    low, high = min(y_ticks[0], *ys), max(y_ticks[-1], *ys)
    x_scale = (WIDTH - LEFT - RIGHT) / (right - left or 1)
    y_scale = (HEIGHT - TOP - BOTTOM) / (high - low or 1)

    def place(x: float, y: float) -> tuple[float, float]:
        return round(LEFT + (x - left) * x_scale, 1), round(HEIGHT - BOTTOM - (y - low) * y_scale, 1)

    marks = [Markup("")]
    for tick in y_ticks:
        y = place(left, tick)[1]
        marks.append(Markup('<line class="grid" x1="{}" x2="{}" y1="{}" y2="{}"/>').format(LEFT, WIDTH - RIGHT, y, y))
        marks.append(Markup('<text x="{}" y="{}" text-anchor="end">{}</text>').format(LEFT - 7, y + 5, f"{tick:g}"))
    for tick in _ticks(left, right):
        if left <= tick <= right:
            x = place(tick, low)[0]
            marks.append(
                Markup('<text x="{}" y="{}" text-anchor="middle">{:g}</text>').format(x, HEIGHT - BOTTOM + 17, tick)
            )
    marks.append(Markup('<text x="{}" y="{}" text-anchor="end">{}</text>').format(WIDTH - RIGHT, HEIGHT - 4, x_label))
    for i, line in enumerate(drawn):
        marks += _marks(line, i % SERIES_STYLES, place)
    legend = Markup("").join(
        Markup(
            '<li><svg class="key c{}" viewBox="0 0 26 8" aria-hidden="true"><path d="M0 4H26"/></svg>{}</li>'
        ).format(i % SERIES_STYLES, line.name)
        for i, line in enumerate(drawn)
    )
    description = f"{title}: " + "; ".join(
        f"{line.name} from {line.points[0][1]:.4g} to {line.points[-1][1]:.4g}" for line in drawn
    )
    return Markup(
        '<figure class="chart"><figcaption>{}</figcaption><ul class="legend">{}</ul>'
        '<svg viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg></figure>'
    ).format(title, legend, WIDTH, HEIGHT, description, Markup("").join(marks))


def _marks(line: Line, style: int, place: object) -> list[Markup]:
    assert callable(place)
    step = max(1, math.ceil(len(line.points) / MAX_POINTS))
    points = [*line.points[:-1:step], line.points[-1]]
    path = "M" + "L".join(f"{x} {y}" for x, y in (place(*point) for point in points))
    marks = [Markup('<path class="c{}" d="{}"/>').format(style, path)]
    if line.dots:
        for x, y in points:
            at = place(x, y)
            marks.append(
                Markup('<circle class="c{}" cx="{}" cy="{}" r="3.5"><title>{}: {:.4g} at {:g}</title></circle>').format(
                    style, *at, line.name, y, x
                )
            )
    for x, y in line.points:
        if x == line.marked:
            marks.append(
                Markup('<circle class="kept c{}" cx="{}" cy="{}" r="8"><title>kept: {:.4g}</title></circle>').format(
                    style, *place(x, y), y
                )
            )
    return marks


def _ticks(low: float, high: float) -> list[float]:
    """Return three to seven round numbers that cover the range, or nearly do."""
    if not high > low:
        low, high = low - (abs(low) / 2 or 0.5), high + (abs(high) / 2 or 0.5)
    raw = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(size * power for size in (1, 2, 2.5, 5, 10) if size * power >= raw)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{i * step:.10g}") for i in range(first, last + 1)]
