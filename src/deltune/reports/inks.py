"""How figures look: colours that everyone can tell apart, with markers, dashes and hatches that differ too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
class Ink:
    colour: str
    marker: str
    dash: Any
    hatch: str


def ink(first: int, second: int | None = None) -> Ink:
    """The look of a series: alone, all differs with it; of two axes, colour follows the first and shape the second."""
    shape = first if second is None else second
    return Ink(
        COLOURS[first % len(COLOURS)],
        MARKERS[shape % len(MARKERS)],
        DASHES[shape % len(DASHES)],
        HATCHES[shape % len(HATCHES)],
    )
