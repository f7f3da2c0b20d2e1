"""Draw the figures of the documentation from what is committed: the folder results and the tables of docs/speed.md.

`python docs/hooks/figures.py` writes them to docs/images; equal numbers give equal bytes.
"""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

DOCS = Path(__file__).resolve().parents[1]
RESULTS = DOCS.parent / "results"
T_95 = 4.303  # Student's t for 95 % and two degrees of freedom: three seeds

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

NAMES = {
    "full": "full fine-tuning",
    "adapter": "parallel adapter",
    "three_vectors": "three vectors",
    "prefix_layernorm": "prefix + layernorm",
}
TASKS = {"conll04": "entity_f1", "broad_twitter": "entity_f1", "sst2": "accuracy", "cb": "accuracy"}


def results() -> str:
    """Return the figure of scores and parameters: the study ln/nlu at small scale, from its committed results."""
    from deltune.studies.engine.results import read_results
    from deltune.studies.papers.registry import STUDIES
    from deltune.studies.scales import StudySetup

    records = {record.name: record for record in read_results(RESULTS, ["ln/nlu"])}
    scores: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    counts: dict[str, int] = {}
    for outcome in STUDIES["ln/nlu"](StudySetup("small", runs=False)).outcomes(records):
        method, task, seed = (outcome.cell[axis] for axis in ("method", "task", "seed"))
        scores[method][seed].append(100 * outcome.scores[TASKS[task]])
        counts[method] = outcome.count["method"]
    rows = []
    for method in sorted(counts, key=lambda name: (counts[name], name)):
        means = [statistics.mean(of_seed) for of_seed in scores[method].values()]
        middle, half = statistics.mean(means), T_95 * statistics.stdev(means) / len(means) ** 0.5
        rows.append((NAMES.get(method, method), f"{counts[method]:,}", [(middle - half, middle, middle + half)]))
    return _forest(
        "Score against trained parameters",
        "Mean score on CoNLL04, Broad Twitter, SST-2 and CB, and trained parameters, of nine methods",
        ("method", "trained", "mean score of four tasks, 95 % interval over three seeds"),
        rows, range(48, 69, 4), None,
    )  # fmt: skip


def speed() -> str:
    """Return the figure of training steps beside PEFT's, from the tables of speed.md."""
    pattern = r"^\| step / PEFT's: ([^;|]+); [^|]*\| ([\d.]+) × \|"
    ratios: dict[str, list[float]] = defaultdict(list)
    for method, ratio in re.findall(pattern, (DOCS / "speed.md").read_text(encoding="utf-8"), re.MULTILINE):
        ratios[method].append(float(ratio))
    rows = [
        (method, f"{statistics.median(values):.3f}", [(value, value, value) for value in sorted(values)])
        for method, values in ratios.items()
    ]
    return _forest(
        "Time of a training step, deltune / PEFT",
        "Time of a training step divided by PEFT's, a dot for each model shape, by method",
        ("method", "median", "a dot for each model and batch; left of 1: deltune is faster"),
        rows, [0.9, 0.95, 1.0, 1.05, 1.1], 1.0,
    )  # fmt: skip


def _forest(
    title: str, description: str, heads: tuple[str, str, str], rows: Sequence[tuple[str, str, list[Interval]]],
    ticks: Sequence[float], reference: float | None,
) -> str:  # fmt: skip
    """Return a figure with a row for each method: its name, a number, and marks on a common axis."""
    left, right, top, step = 290, 720, 82, 30
    bottom = top + step * len(rows)

    def x(value: float) -> float:
        return round(left + (right - left) * (value - ticks[0]) / (ticks[-1] - ticks[0]), 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {bottom + 40}" role="img" aria-labelledby="t d" '
        'font-family="Helvetica, Arial, \'Liberation Sans\', sans-serif" font-size="15">',
        f'<title id="t">{escape(title)}</title>\n<desc id="d">{escape(description)}</desc>\n<style>{STYLE}</style>',
        f'<rect class="ground" x="0.5" y="0.5" width="759" height="{bottom + 39}" rx="8"/>',
        f'<text class="ink" x="20" y="32" font-size="17" font-weight="bold">{escape(title)}</text>',
        f'<g class="faint" font-size="13"><text x="20" y="60">{heads[0]}</text>'
        f'<text x="{left - 24}" y="60" text-anchor="end">{heads[1]}</text>'
        f'<text x="{left}" y="60">{escape(heads[2])}</text></g>',
    ]
    for tick in ticks:
        kind = "reference" if tick == reference else "line"
        parts.append(f'<path class="{kind}" d="M{x(tick)} {top - 10}V{bottom}"/>')
        parts.append(
            f'<text class="faint" x="{x(tick)}" y="{bottom + 20}" font-size="13" text-anchor="middle">{tick:g}</text>'
        )
    for number, (name, label, marks) in enumerate(rows):
        y = top + step * number + 12
        parts.append(f'<text class="ink" x="20" y="{y + 5}">{escape(name)}</text>')
        parts.append(f'<text class="ink" x="{left - 24}" y="{y + 5}" text-anchor="end">{label}</text>')
        for low, value, high in marks:
            if low < high:
                ends = f"M{x(low)} {y}H{x(high)}M{x(low)} {y - 5}V{y + 5}M{x(high)} {y - 5}V{y + 5}"
                parts.append(f'<path class="mark" stroke-width="2" fill="none" d="{ends}"/>')
            opacity = "" if low < high else ' fill-opacity="0.55" stroke-opacity="0"'
            parts.append(f'<circle class="mark" cx="{x(value)}" cy="{y}" r="5"{opacity}/>')
    return "\n".join([*parts, "</svg>", ""])


FIGURES = {"speed.svg": speed} | ({"results.svg": results} if (RESULTS / "ln" / "nlu.jsonl").is_file() else {})
"""Name of a file in docs/images -> what draws it; the figure of a study only where its results are committed."""

if __name__ == "__main__":
    for name, draw in FIGURES.items():
        (DOCS / "images" / name).write_text(draw(), encoding="utf-8")
