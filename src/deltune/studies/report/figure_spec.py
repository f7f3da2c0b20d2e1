"""The tables and figures of a study as values: what to show of its outcomes, and nothing about how.

An axis is a key of an outcome's cell ("method", "task", "model", …), and besides: "metric", the names of its scores,
where a view names it among its axes; and the keys of the entries that `entries` names. A number is a score's name, a
field of the outcome's count ("percent", "trained"), "seconds", or a key of its cell that holds a number. Several names
mean the first that the outcome has, so that each task can have a metric of its own. Seeds are never an axis of a view:
what is shown is their mean (or median) and standard deviation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

LabelFilter = Mapping[str, Any]
"""Axis -> a label, or a tuple of labels any of which will do."""

Numbers = str | tuple[str, ...]
"""The name of a number, or several: the first that an outcome has."""

Axes = str | tuple[str, ...]
"""One axis or several."""

Label = str | int | float | bool | None

DISPLAY_NAMES = {
    "f1": "F1", "f1_macro": "macro F1", "entity_f1": "entity F1", "exact_match": "exact match", "answer_f1": "F1",
    "bleu": "BLEU", "ter": "TER", "chrf": "chrF", "nist": "NIST", "meteor": "METEOR", "cider": "CIDEr", "cer": "CER",
    "rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L", "rougeLsum": "ROUGE-Lsum",
    "bertscore": "BERTScore", "moverscore": "MoverScore", "bleurt": "BLEURT", "percent": "% of parameters",
}  # fmt: skip
"""How labels are shown where a view does not say otherwise."""


def as_tuple(value: str | tuple[str, ...]) -> tuple[str, ...]:
    """Return one name or several as a tuple; the empty name as none."""
    return ((value,) if value else ()) if isinstance(value, str) else tuple(value)


@dataclass(frozen=True, kw_only=True)
class ViewSpec:
    """The part of a view that tables and figures share.

    Attributes:
        title: The title.
        where: The outcomes to show.
        entries: A key of `extra` that holds a list of entries, each of which extends the outcome's cell ("changes"), or
            "curve".
        average_over: Axes that are averaged over, after the seeds.
        order: Axis -> its labels in order. Labels without an outcome are shown as missing.
        display_names: Label -> how it is shown.
        lower: Whether lower is better, for scores that `METRICS` does not have.
        median: Whether the median over seeds is shown and not their mean.
        repetition: What the labels of the axis of seeds are called, in the singular.
    """

    title: str = ""
    where: LabelFilter = field(default_factory=dict)
    entries: str = ""
    average_over: tuple[str, ...] = ()
    order: Mapping[str, tuple[Label, ...]] = field(default_factory=dict)
    display_names: Mapping[str, str] = field(default_factory=dict)
    lower: bool = False
    median: bool = False
    repetition: str = "seed"

    def display(self, label: object) -> str:
        """Return a label as it is shown."""
        text = f"{label:,}" if isinstance(label, int) and abs(label) >= 10_000 else str(label)
        return self.display_names.get(str(label), DISPLAY_NAMES.get(str(label), text))


@dataclass(frozen=True, kw_only=True)
class FigureSpec(ViewSpec):
    """The part of a view that figures share.

    Attributes:
        panels: An axis with a panel for each of its labels.
        reference_lines: Horizontal lines: name -> a number, or the outcomes whose mean it is, which are then not drawn
            otherwise.
        leads: Whether the figure stands on top of a page of several studies.
    """

    panels: str = ""
    leads: bool = False
    reference_lines: Mapping[str, LabelFilter | float] = field(default_factory=dict)


@dataclass(frozen=True)
class TableSpec(ViewSpec):
    """A table with a row for each label of an axis and a column for each combination of labels.

    Attributes:
        rows: The axis of the rows.
        columns: The axes of the columns.
        metric: The number in each cell. With the axis "metric" there is a column for each; no names mean every score.
        groups: An axis that divides the rows ("model"); best and second are marked in each group.
        percent: Whether there is a column with the percentage of parameters trained.
        average: Whether there is a column with the average of each row.
        rank: Whether there is a column with the average of each row's ranks, a loss left out.
        published: (label, …) -> the paper's number in the unit shown, by group (if there are groups), row, and the
            column's labels or "percent", "average" or "rank".
    """

    rows: str = "method"
    columns: tuple[str, ...] = ("task",)
    metric: Numbers = "accuracy"
    groups: str = ""
    percent: bool = True
    average: bool = True
    rank: bool = False
    published: Mapping[tuple[str, ...], float] = field(default_factory=dict)


@dataclass(frozen=True)
class VarianceSpec(ViewSpec):
    """A table of how much of the variance of scores goes back to each factor, for each task and all tasks together.

    Attributes:
        factors: The axes whose labels, and whose pairs of labels, the variance is divided by, besides seeds and models.
        metric: The score.
    """

    factors: tuple[str, ...] = ("method", "rate")
    metric: Numbers = "accuracy"


@dataclass(frozen=True)
class Scatter(FigureSpec):
    """A figure with a point for each combination of labels, at two numbers.

    Attributes:
        x: The number on the x axis.
        y: The number on the y axis.
        series: The axis that colour and marker tell apart; of two, the first by colour and the second by marker. Points
            of one series are joined in the order of x.
        log: Whether x is logarithmic; if None, where it spans more than two powers of ten.
    """

    x: str = "percent"
    y: Numbers = "accuracy"
    series: Axes = "method"
    log: bool | None = None


@dataclass(frozen=True)
class Curves(FigureSpec):
    """A figure with a line for each series and a band of ± one standard deviation over seeds.

    Attributes:
        x: "step" (of the curves of runs), an axis with numbers (N), or a number such as "denominator_size".
        y: The number on the y axis.
        series: As in `Scatter`, the second by dash.
        log: Whether x is logarithmic.
        marks: Keys of `extra` with an x or an interval (low, high) of x, shown in a strip below with a row for each
            series; high is None for what lies beyond low.
        gap: Whether a strip below shows best minus worst series at each x.
    """

    x: str = "step"
    y: Numbers = "eval_accuracy"
    series: Axes = "method"
    log: bool = False
    marks: tuple[str, ...] = ()
    gap: bool = False


@dataclass(frozen=True)
class Bars(FigureSpec):
    """A figure with a group of bars for each label of one axis and a bar in it for each label of another.

    The axis `groups` has the groups, `bars` the bars in each; y is a bar's height.
    """

    groups: str = "task"
    bars: str = "method"
    y: Numbers = "accuracy"


@dataclass(frozen=True)
class HeatMap(FigureSpec):
    """A figure with a coloured cell for each row and column.

    With `diagonal` its number is shown in percent of the column's cell on the diagonal (transfer).
    """

    rows: Axes = ("module", "term")
    columns: Axes = "layer"
    value: Numbers = "value"
    diagonal: bool = False
