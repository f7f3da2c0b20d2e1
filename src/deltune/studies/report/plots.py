"""Figures of views: `draw` makes one, `save` writes it as PNG, SVG and PDF, equal bytes for equal numbers."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import DeltuneError

try:
    import matplotlib
except ImportError as error:
    raise DeltuneError("figures need matplotlib: pip install deltune[report]") from error

from matplotlib.figure import Figure

from ..engine.outcomes import Outcome
from .charts import bars, curves, heat, scatter
from .figure_spec import Bars, Curves, Heat, Scatter
from .figure_spec import Figure as View
from .panels import Sheet
from .style import FAINT, STYLE, legend, place_labels, rotate_ticks

KINDS: dict[type[View], Callable[[Any, Iterable[Outcome]], Sheet]] = {
    Scatter: scatter,
    Bars: bars,
    Curves: curves,
    Heat: heat,
}
FORMATS: dict[str, dict[str, Any]] = {
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}
"""The metadata that would differ from day to day and from version to version, left out."""


@dataclass(frozen=True)
class Picture:
    """A figure with its title, what it shows in words (for those who do not see it), and what is not in it."""

    title: str
    text: str
    notes: tuple[str, ...]
    figure: Figure

    def svg(self) -> str:
        return rendered(self.figure, "svg").decode()


def draw(view: View, outcomes: Iterable[Outcome]) -> Picture:
    """The figure of a view. Errors: as `facts.gather`."""
    with matplotlib.rc_context(STYLE):
        page = KINDS[type(view)](view, list(outcomes))
        _finish(page)
    notes = tuple(dict.fromkeys(page.notes))
    return Picture(view.title, ". ".join(page.text), notes, page.figure)


def _finish(page: Sheet) -> None:
    """Names beside the points where they fit, all else in a legend below; no two words over one another."""
    if not page.found:
        for axes in page.axes:
            axes.text(0.5, 0.5, "no results", transform=axes.transAxes, ha="center", va="center", color=FAINT)
    named = page.found and len(page.beside) == len(page.axes)
    handles = {**({} if named or (len(page.series) == 1 and not page.lines) else page.series), **page.lines}
    legend(page.figure, list(handles.values()), list(handles))
    rotate_ticks(page.figure)
    if named and not all(place_labels(*one) for one in page.beside):
        for text in [text for axes in page.axes for text in axes.texts]:
            text.remove()
        handles = {**page.series, **page.lines}
        legend(page.figure, list(handles.values()), list(handles))
        rotate_ticks(page.figure)
    # From here on it stays as it was measured: laid out again it would move by fractions of a pixel.
    page.figure.set_layout_engine("none")


def rendered(figure: Figure, kind: str) -> bytes:
    """The bytes of a file of one of FORMATS."""
    held = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(held, format=kind, metadata=FORMATS[kind])
    return held.getvalue()


def save(figure: Figure, stem: str | Path) -> list[Path]:
    """STEM.png, STEM.svg and STEM.pdf, each written whole; the folder is made."""
    stem = Path(stem)
    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = []
    for kind in FORMATS:
        path = stem.with_name(f"{stem.name}.{kind}")
        fresh = path.with_name(f".{path.name}.part")
        try:
            fresh.write_bytes(rendered(figure, kind))
            os.replace(fresh, path)
        except BaseException:
            fresh.unlink(missing_ok=True)
            raise
        paths.append(path)
    return paths
