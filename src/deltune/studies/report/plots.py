"""Drawing a study's figures, and writing them as PNG, SVG and PDF: equal numbers give equal bytes."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import require_extra

with require_extra("studies", "matplotlib", "figures need"):
    import matplotlib

from matplotlib.figure import Figure

from ...filesystem import atomic_open
from ..engine.outcomes import Outcome
from .charts import draw_bars, draw_curves, draw_heat_map, draw_scatter
from .figure_spec import Bars, Curves, FigureSpec, HeatMap, Scatter
from .panels import FigureDraft
from .style import FAINT_COLOUR, STYLE, place_labels, place_legend, rotate_ticks

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

    Attributes:
        title: Its title.
        text: What it shows, in words, for those who do not see it.
        notes: What it lacks.
        figure: The figure itself.
    """

    title: str
    text: str
    notes: tuple[str, ...]
    figure: Figure

    def svg(self) -> str:
        """Return the figure as SVG."""
        return render(self.figure, "svg").decode()


def draw(view: FigureSpec, outcomes: Iterable[Outcome]) -> DrawnFigure:
    """Draw a figure.

    Args:
        view: What to draw.
        outcomes: The study's outcomes.

    Raises:
        DeltuneError: See `aggregate`.
    """
    with matplotlib.rc_context(STYLE):
        draft = DRAWING_FUNCTIONS[type(view)](view, list(outcomes))
        _finish(draft)
    notes = tuple(dict.fromkeys(draft.notes))
    return DrawnFigure(view.title, ". ".join(draft.text), notes, draft.figure)


def _finish(draft: FigureDraft) -> None:
    """Write names beside the points if they fit, and everything else into a legend below."""
    if not draft.has_numbers:
        for axes in draft.axes:
            axes.text(0.5, 0.5, "no results", transform=axes.transAxes, ha="center", va="center", color=FAINT_COLOUR)
    labelled = draft.has_numbers and len(draft.point_labels) == len(draft.axes)
    handles = {**({} if labelled or (len(draft.series) == 1 and not draft.lines) else draft.series), **draft.lines}
    place_legend(draft.figure, list(handles.values()), list(handles))
    rotate_ticks(draft.figure)
    if labelled and not all(place_labels(*labels) for labels in draft.point_labels):
        for text in [text for axes in draft.axes for text in axes.texts]:
            text.remove()
        handles = {**draft.series, **draft.lines}
        place_legend(draft.figure, list(handles.values()), list(handles))
        rotate_ticks(draft.figure)
    # From here on the layout stays as it was measured: laid out again it would move by fractions of a pixel.
    draft.figure.set_layout_engine("none")


def render(figure: Figure, file_format: str) -> bytes:
    """Return a figure as the bytes of a file.

    Args:
        figure: The figure.
        file_format: A key of `FORMATS`.
    """
    buffer = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(buffer, format=file_format, metadata=FORMATS[file_format])
    return buffer.getvalue()


def save(figure: Figure, stem: str | Path) -> list[Path]:
    """Write a figure as STEM.png, STEM.svg and STEM.pdf, each of them atomically.

    Args:
        figure: The figure.
        stem: The path without a suffix; its folder is created if it is missing.

    Returns:
        The files.
    """
    stem = Path(stem)
    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = []
    for file_format in FORMATS:
        paths.append(stem.with_name(f"{stem.name}.{file_format}"))
        with atomic_open(paths[-1]) as file:
            file.write(render(figure, file_format))
    return paths
