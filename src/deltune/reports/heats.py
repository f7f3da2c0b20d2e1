"""Heat maps: a coloured cell for each row and column, its number in it where it fits."""

from __future__ import annotations

from collections.abc import Iterable

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.patches import Rectangle

from ..engine.outcomes import Outcome
from .facts import Facts, Place, Unit, relative
from .inks import FAINT, MAP
from .lettering import wrapped
from .panels import Sheet, called, combined, sheet
from .views import Heat, Label, names

CELL = 0.27  # inches


def heat(view: Heat, outcomes: Iterable[Outcome]) -> Sheet:
    """One scale for all panels. A cell without a number is hatched and says "failed" or "–"."""
    page = sheet(view, outcomes, view.value, wide=True)
    rows, columns = names(view.rows), names(view.columns)
    facts = page.gather(view.value, (*rows, *columns))
    if view.diagonal:
        first = len(page.outer)
        based = relative(facts.spreads, lambda place: (*place[:first], place[-1], place[-1]))
        facts = Facts(facts.axes, based, facts.metrics, facts.left)
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
                    _gap(axes, i, j, "failed" if spread.failed else "–", written)
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


def _gap(axes: Axes, i: int, j: int, word: str, written: bool) -> None:
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
