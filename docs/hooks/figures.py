"""Draw the figures of the documentation from what is committed: results and benchmarks/results.

`python docs/hooks/figures.py` writes them to docs/images; equal numbers give equal bytes.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

MEASUREMENTS = Path(__file__).parents[2] / "benchmarks" / "results"
DOCS = Path(__file__).resolve().parents[1]
RESULTS = DOCS.parent / "results"
T_95 = 2.365  # Student's t for 95 % and seven degrees of freedom: eight seeds

STYLE = """
.ground { fill: #ffffff; stroke: #d0d7de; } .ink { fill: #1f2328; } .faint { fill: #57606a; }
.line { stroke: #d0d7de; } .mark { fill: #3949ab; stroke: #3949ab; } .reference { stroke: #57606a; }
@media (prefers-color-scheme: dark) {
  .ground { fill: #1b1f27; stroke: #3d4450; } .ink { fill: #e6e9ec; } .faint { fill: #a3adb7; }
  .line { stroke: #3d4450; } .mark { fill: #9fa8da; stroke: #9fa8da; } .reference { stroke: #a3adb7; }
}
"""

Interval = tuple[float, float, float]
"""The lower end, the value and the upper end."""

Mark = tuple[str, list[Interval]]
"""A number beside an axis, and what is drawn on the axis."""

STUDY = "uv/integration"
TASKS = {"conll04": ("entity_f1", "CoNLL04, entity F1"), "g2p_us_to_gb": ("exact", "g2p, exact match")}
"""Task -> its score and the heading of its axis."""


def results() -> str:
    """Return the figure of scores and parameters of a study at small scale, from its committed results."""
    from deltune.studies.jobs.store import read_results
    from deltune.studies.papers.registry import STUDIES
    from deltune.studies.scales import StudySetup

    records = {record.name: record for record in read_results(RESULTS, [STUDY])}
    study = STUDIES[STUDY](StudySetup("small", runs=False))
    names = study.views[0].display_names
    scores: dict[tuple[str, str], list[float]] = defaultdict(list)
    counts: dict[tuple[str, str], int] = {}
    for outcome in (one for one in study.outcomes(records) if "method" in one.cell and one.error is None):
        method, task = outcome.cell["method"], outcome.cell["task"]
        scores[method, task].append(100 * outcome.scores[TASKS[task][0]])
        counts[method, task] = outcome.count["method"]
    rows = []
    for method in sorted({method for method, _ in counts}, key=lambda name: (counts[name, "conll04"], name)):
        marks = []
        for task in TASKS:
            values = scores[method, task]
            middle, half = statistics.mean(values), T_95 * statistics.stdev(values) / len(values) ** 0.5
            marks.append((f"{counts[method, task]:,}", [(middle - half, middle, middle + half)]))
        rows.append((names[method], marks))
    return _forest(
        "Score and trained parameters on two small tasks",
        "Test scores of ten methods on CoNLL04 and g2p with intervals over eight seeds, and trained parameters",
        [(heading, range(0, 61, 20)) for _, heading in TASKS.values()],
        "trained", rows, None,
    )  # fmt: skip


def speed() -> str:
    """Return the figure of training steps beside PEFT's, from benchmarks/results."""
    files = [MEASUREMENTS / f"{part}.json" for part in ("steps", "adapterhub", "others")]
    parts = [rows for path in files for rows in json.loads(path.read_text(encoding="utf-8"))["rows"].values()]
    ratios: dict[str, list[float]] = defaultdict(list)
    for row in (row for rows in parts for row in rows):
        name, _, method = row["name"].partition(": ")
        if name == "step / PEFT's" and row["figure"] is not None:
            ratios[method.partition(";")[0]].append(row["figure"])
    rows = [
        (method, [(f"{statistics.median(values):.3f}", [(value, value, value) for value in sorted(values)])])
        for method, values in ratios.items()
    ]
    return _forest(
        "Time of a training step, deltune / PEFT",
        "Time of a training step divided by PEFT's, a dot for each model shape, by method",
        [("a dot for each model and batch; left of 1: deltune is faster", [0.85, 0.9, 0.95, 1.0, 1.05, 1.1, 1.15])],
        "median", rows, 1.0,
    )  # fmt: skip


WIDTH, NAMES_END, NUMBERS, TOP, STEP = 760, 206, 104, 82, 30
"""Pixels: of the figure, to the end of the names, for the numbers beside an axis, above the rows, and of a row."""


def _forest(
    title: str, description: str, axes: Sequence[tuple[str, Sequence[float]]], number: str,
    rows: Sequence[tuple[str, Sequence[Mark]]], reference: float | None,
) -> str:  # fmt: skip
    """Return a figure with a row for each method: its name, and for each axis a number and marks.

    Args:
        title: The title.
        description: What it shows, for those who do not see it.
        axes: The heading and the ticks of each axis.
        number: The heading of the numbers beside the axes.
        rows: The name of each method, and for each axis a number and what is drawn.
        reference: The tick that is drawn as a reference.
    """
    bottom = TOP + STEP * len(rows)
    share = (WIDTH - NAMES_END - 24) / len(axes)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 40}" role="img" '
        'aria-labelledby="t d" font-family="Helvetica, Arial, \'Liberation Sans\', sans-serif" font-size="15">',
        f'<title id="t">{escape(title)}</title>\n<desc id="d">{escape(description)}</desc>\n<style>{STYLE}</style>',
        f'<rect class="ground" x="0.5" y="0.5" width="{WIDTH - 1}" height="{bottom + 39}" rx="8"/>',
        f'<text class="ink" x="20" y="32" font-size="17" font-weight="bold">{escape(title)}</text>',
        '<text class="faint" x="20" y="60" font-size="13">method</text>',
    ]
    for index, (heading, ticks) in enumerate(axes):
        left, right = NAMES_END + share * index + NUMBERS, NAMES_END + share * (index + 1)
        parts += _axis(
            left, bottom, heading, number, [(tick, _place(tick, ticks, left, right)) for tick in ticks], reference
        )
        for row, (_, marks) in enumerate(rows):
            y = TOP + STEP * row + 12
            label, intervals = marks[index]
            parts.append(f'<text class="ink" x="{left - 24:g}" y="{y + 5}" text-anchor="end">{label}</text>')
            for interval in intervals:
                parts += _mark(y, *(_place(value, ticks, left, right) for value in interval))
    for row, (name, _) in enumerate(rows):
        parts.append(f'<text class="ink" x="20" y="{TOP + STEP * row + 17}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _place(value: float, ticks: Sequence[float], left: float, right: float) -> float:
    """Return where a value lies between the ends of an axis, which are its first and its last tick.

    Raises:
        ValueError: It lies outside.
    """
    if not ticks[0] <= value <= ticks[-1]:
        raise ValueError(f"{value} lies outside the axis from {ticks[0]} to {ticks[-1]}")
    return round(left + (right - left) * (value - ticks[0]) / (ticks[-1] - ticks[0]), 1)


def _axis(
    left: float, bottom: int, heading: str, number: str, ticks: Sequence[tuple[float, float]], reference: float | None
) -> list[str]:
    """Return the headings of an axis and of its numbers, and a line for each tick, given with its place."""
    parts = [
        f'<g class="faint" font-size="13"><text x="{left - 24:g}" y="60" text-anchor="end">{number}</text>'
        f'<text x="{left:g}" y="60">{escape(heading)}</text></g>'
    ]
    for tick, x in ticks:
        kind = "reference" if tick == reference else "line"
        parts.append(f'<path class="{kind}" d="M{x} {TOP - 10}V{bottom}"/>')
        parts.append(
            f'<text class="faint" x="{x}" y="{bottom + 20}" font-size="13" text-anchor="middle">{tick:g}</text>'
        )
    return parts


def _mark(y: int, low: float, x: float, high: float) -> list[str]:
    """Return a dot, and whiskers if there is an interval."""
    if low == high:
        return [f'<circle class="mark" cx="{x}" cy="{y}" r="5" fill-opacity="0.55" stroke-opacity="0"/>']
    ends = f"M{low} {y}H{high}M{low} {y - 5}V{y + 5}M{high} {y - 5}V{y + 5}"
    return [
        f'<path class="mark" stroke-width="2" fill="none" d="{ends}"/>',
        f'<circle class="mark" cx="{x}" cy="{y}" r="5"/>',
    ]


FIGURES = {"results.svg": results, "speed.svg": speed}
"""Name of a file in docs/images -> what draws it."""

if __name__ == "__main__":
    for name, draw in FIGURES.items():
        (DOCS / "images" / name).write_text(draw(), encoding="utf-8")
