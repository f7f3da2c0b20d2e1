"""What to draw from a study's outcomes, and nothing of how: tables, scatters, curves, bars and heat maps as values.

An axis is a key of an outcome's cell ("method", "task", "model", …), and besides:
"metric", the names of its scores, where a view names it among its axes; and the keys of the entries of `over`.
A number is a score's name, or a field of its count ("percent", "trained"), "seconds", or a key of its cell that holds
a number. Several names mean the first that the outcome has, so that each task can have a metric of its own.
Seeds are never an axis of a view: what is drawn is their mean and standard deviation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Selector = Mapping[str, Any]
"""Axis -> the label asked for, or a tuple of labels any of which will do."""

Numbers = str | tuple[str, ...]
Axes = str | tuple[str, ...]
Label = str | int | float | bool | None

WRITTEN = {
    "f1": "F1", "f1_macro": "macro F1", "entity_f1": "entity F1", "exact_match": "exact match", "answer_f1": "F1",
    "bleu": "BLEU", "ter": "TER", "chrf": "chrF", "nist": "NIST", "meteor": "METEOR", "cider": "CIDEr", "cer": "CER",
    "rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L", "rougeLsum": "ROUGE-Lsum",
    "bertscore": "BERTScore", "moverscore": "MoverScore", "bleurt": "BLEURT", "percent": "% of parameters",
}  # fmt: skip
"""How names are written where a view says nothing else."""


def names(value: str | tuple[str, ...]) -> tuple[str, ...]:
    """One name or several, as several."""
    return ((value,) if value else ()) if isinstance(value, str) else tuple(value)


@dataclass(frozen=True, kw_only=True)
class View:
    """What every view can say.

    where: the outcomes it is about. over: a key of `extra` with a list of entries, each of which joins the cell
    ("changes"), or "curve". relative: everything in percent of the number at these labels ({"method": "full"}).
    pooled: axes averaged over, after the seeds. order: axis -> its labels in order, those without an outcome included
    (they are shown as missing). written: label -> how it is written. lower: whether lower is better, for scores that
    are no metric of the table. digits: after the point (default: as the papers).
    """

    title: str = ""
    where: Selector = field(default_factory=dict)
    over: str = ""
    relative: Selector = field(default_factory=dict)
    pooled: tuple[str, ...] = ()
    order: Mapping[str, tuple[Label, ...]] = field(default_factory=dict)
    written: Mapping[str, str] = field(default_factory=dict)
    lower: bool = False
    digits: int | None = None

    def write(self, label: object) -> str:
        """A label as it is written."""
        text = f"{label:,}" if isinstance(label, int) and abs(label) >= 10_000 else str(label)
        return self.written.get(str(label), WRITTEN.get(str(label), text))


@dataclass(frozen=True, kw_only=True)
class Figure(View):
    """A view that is drawn. panels: an axis with a panel for each of its labels."""

    panels: str = ""
    levels: Mapping[str, Selector | float] = field(default_factory=dict)
    """Horizontal lines: text -> a number, or the outcomes whose mean it is (which are then not drawn otherwise)."""


@dataclass(frozen=True)
class Table(View):
    """A row for each label, a column for each combination of labels.

    metric: what a cell holds; no names with the axis "metric" means every score. groups: an axis that divides the rows
    ("model"); best and second are found in each group. percent: a column with % of the parameters. average, rank: their
    columns, the rank being the average of a row's ranks. paper: (label, …) -> the paper's number in the unit shown,
    by group (where there are groups), row, and the column's labels or "percent", "average" or "rank".
    """

    rows: str = "method"
    columns: tuple[str, ...] = ("task",)
    metric: Numbers = "accuracy"
    groups: str = ""
    percent: bool = True
    average: bool = True
    rank: bool = False
    paper: Mapping[tuple[str, ...], float] = field(default_factory=dict)


@dataclass(frozen=True)
class Scatter(Figure):
    """A point for each combination of labels, at two numbers.

    series: the axis told apart by colour and marker; of two, the first by colour, the second by marker. Points of one
    series are joined in the order of x. log: of x; None means where it spans more than two powers of ten.
    """

    x: str = "percent"
    y: Numbers = "accuracy"
    series: Axes = "method"
    log: bool | None = None


@dataclass(frozen=True)
class Curves(Figure):
    """y against x, a line with a band of ± one standard deviation over seeds for each series.

    x: "step" (of the curves of runs), an axis with numbers (N), or a number such as "denominator_size".
    series: as in Scatter, the second by dash. marks: keys of `extra` with an x or an interval (low, high) of x, shown
    in a strip below, a row for each series; high is None for what lies beyond low. gap: a strip below with best minus
    worst series at each x.
    """

    x: str = "step"
    y: Numbers = "eval_accuracy"
    series: Axes = "method"
    log: bool = False
    marks: tuple[str, ...] = ()
    gap: bool = False


@dataclass(frozen=True)
class Bars(Figure):
    """A group of bars for each label of one axis, a bar in it for each label of another."""

    groups: str = "task"
    bars: str = "method"
    y: Numbers = "accuracy"


@dataclass(frozen=True)
class Heat(Figure):
    """A coloured cell for each row and column. diagonal: in percent of the column's cell on the diagonal (transfer)."""

    rows: Axes = ("module", "term")
    columns: Axes = "layer"
    value: Numbers = "value"
    diagonal: bool = False
