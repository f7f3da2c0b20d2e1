"""A table laid out in rows and columns, with best and second and a note for every gap, and its Markdown, LaTeX and CSV.

Best and second are of the numbers as they are shown, so that cells that look equal are equal. With two best there is no
second, as in the papers. In an average rank ties count as the mean of their ranks.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import pandas as pd
from scipy.stats import rankdata

from ...train import TASKS
from ..jobs.job import Outcome
from .aggregate import METRIC, Aggregates, Labels, NumberFormat, Spread, aggregate, number_format, select_outcomes
from .figure_spec import Label, TableSpec

State = Literal["shown", "partial", "failed", "missing"]
Kind = Literal["percent", "score", "average", "rank"]
PERCENT = NumberFormat(1.0, None, True, "% params")
RANK = NumberFormat(1.0, 2, True, "average rank")


@dataclass(frozen=True)
class Column:
    """A column of a table: its headings, what its cells are, and how its numbers are shown.

    Its labels are its headings, from the widest to the narrowest.
    """

    labels: tuple[str, ...]
    kind: Kind
    number_format: NumberFormat

    @property
    def text(self) -> str:
        """The headings as one text."""
        return " ".join(self.labels)


@dataclass(frozen=True)
class TableCell:
    """One cell of a table.

    It is "partial" as an average over fewer columns than there are, and "missing" where nothing was run. Notes are
    indices into the table's; a range ends at `high`; the paper's number is in the unit shown.
    """

    mean: float | None = None
    std: float | None = None
    n: int = 0
    state: State = "missing"
    best: bool = False
    second: bool = False
    notes: tuple[int, ...] = ()
    published: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Row:
    """A row of a table: its group, its label and a cell for each column."""

    group: str
    label: str
    cells: tuple[TableCell, ...]


@dataclass(frozen=True)
class Table:
    """A table.

    Notes say what the marks in its cells stand for.
    """

    title: str
    head: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()
    median: bool = False
    repetition: str = "seed"

    @property
    def header_levels(self) -> int:
        """The number of lines of the heading."""
        return max((len(column.labels) for column in self.columns), default=1)

    @property
    def has_published(self) -> bool:
        """True if any cell has a paper's number."""
        return any(cell.published is not None for row in self.rows for cell in row.cells)

    @property
    def groups(self) -> tuple[tuple[str, tuple[Row, ...]], ...]:
        """The groups with their rows, in order."""
        by_group: dict[str, list[Row]] = {}
        for row in self.rows:
            by_group.setdefault(row.group, []).append(row)
        return tuple((group, tuple(rows)) for group, rows in by_group.items())

    def text(self, cell: TableCell, column: Column) -> str:
        """Return a cell's mean as it is shown, without its deviation."""
        if cell.mean is None:
            return "failed" if cell.state == "failed" else "–"
        if column.kind == "percent":
            low, high = format_percent(cell.mean), format_percent(cell.mean if cell.high is None else cell.high)
            return f"{low} %" if low == high else f"{low}–{high} %"
        return column.number_format.show(cell.mean)

    def std(self, cell: TableCell, column: Column) -> str:
        """Return a cell's deviation as it is shown; empty if there is none."""
        return "" if cell.std is None else column.number_format.show(cell.std)

    def published(self, cell: TableCell, column: Column) -> str:
        """Return the paper's number, which is kept in the unit shown; empty if there is none."""
        if cell.published is None:
            return ""
        return (
            f"{format_percent(cell.published)} %"
            if column.kind == "percent"
            else replace(column.number_format, factor=1.0).show(cell.published)
        )


def build_table(view: TableSpec, outcomes: Iterable[Outcome]) -> Table:
    """Lay out the table of a view."""
    outcomes = list(outcomes)
    outer = (view.groups,) if view.groups else ()
    axes = (*outer, view.rows, *view.columns)
    aggregates, n = aggregate(view, outcomes, view.metric, axes), len(outer) + 1
    rows = aggregates.combinations(axes[:n], view)
    keys, unmeasured = _drop_unmeasured(aggregates.combinations(view.columns, view), aggregates, view, n, outcomes)
    excluded = [*aggregates.excluded, *unmeasured]
    planned = [outcome.cell for outcome in outcomes]
    notes: dict[str, int] = {}

    def score_cell(labels: Labels) -> TableCell:
        cell = dict(zip(axes, labels, strict=True))
        in_study = any(all(one.get(axis, label) == label for axis, label in cell.items()) for one in planned)
        return _score_cell(aggregates[labels], "not run yet" if in_study else "not part of this study", notes)

    scores = [[score_cell((*row, *key)) for key in keys] for row in rows]
    metrics = [_column_metric(aggregates, key, n) for key in keys]
    formats = [
        number_format(metric or str(key[view.columns.index(METRIC)]) if METRIC in view.columns else metric, view)
        for key, metric in zip(keys, metrics, strict=True)
    ]
    columns: list[tuple[Column, Labels, list[TableCell]]] = []
    for i, (key, format_) in enumerate(zip(keys, formats, strict=True)):
        *wider, narrowest = map(view.display, key)
        column = Column((*wider, narrowest + " ↓" * format_.lower), "score", format_)
        columns.append((column, key, [cells[i] for cells in scores]))
    if view.average and len(keys) > 1:
        if len({(f.lower, f.factor, f.digits) for f in formats}) > 1:
            excluded.append("no average: the columns are in different units")
        else:
            column = Column(("Avg." + " ↓" * formats[0].lower,), "average", formats[0])
            columns.append((column, ("average",), [_average(cells, notes) for cells in scores]))
    groups = _rows_by_group(rows, len(outer))
    # A loss is no metric of a task: a claim about ranks leaves it out too.
    ranked = [i for i, metric in enumerate(metrics) if metric != "loss"]
    if view.rank and len(ranked) > 1:
        ranks = _ranks([[cells[i] for i in ranked] for cells in scores], [formats[i] for i in ranked], groups)
        columns.append((Column(("Rank ↓",), "rank", RANK), ("rank",), [_average(cells, notes) for cells in ranks]))
    for column, _, cells in columns:
        for group in groups:
            marked = mark_best([cells[j] for j in group], column.number_format)
            for j, cell in zip(group, marked, strict=True):
                cells[j] = cell
    if view.percent:
        percents = _percents(view, outcomes, axes[:n])
        shares = [percents.get(row, TableCell()) for row in rows]
        columns.insert(0, (Column((PERCENT.name,), "percent", PERCENT), ("percent",), shares))
    return Table(
        view.title,
        view.rows,
        tuple(column for column, _, _ in columns),
        tuple(
            Row(
                view.display(row[0]) if outer else "",
                view.display(row[-1]),
                tuple(replace(cells[j], published=_published(view, row, key)) for _, key, cells in columns),
            )
            for j, row in enumerate(rows)
        ),
        tuple(notes),
        tuple(excluded),
        view.median,
        view.repetition,
    )


def format_percent(percent: float) -> str:
    """Return a percentage of parameters with about the digits of the papers: 100, 12.3, 6.7, 0.33, 0.0006."""
    if percent >= 99.95:
        return f"{percent:.0f}"
    if percent >= 1:
        return f"{percent:.1f}"
    text = f"{percent:.2f}" if percent >= 0.01 else f"{percent:.4f}" if percent >= 0.0005 else f"{percent:.1g}"
    return text


def mark_best(cells: Sequence[TableCell], format_: NumberFormat) -> list[TableCell]:
    """Return the cells with best and second marked; averages over fewer columns than there are do not compete."""
    competing = [cell for cell in cells if cell.mean is not None and cell.state == "shown"]
    shown = [_shown(cell, format_) for cell in competing]
    if len(shown) < 2 or len(set(shown)) < 2:
        return list(cells)
    ordered = sorted(shown, reverse=not format_.lower)
    second = ordered[1] if ordered[1] != ordered[0] else None
    return [
        replace(cell, best=_shown(cell, format_) == ordered[0], second=_shown(cell, format_) == second)
        if cell.mean is not None and cell.state == "shown"
        else cell
        for cell in cells
    ]


def _shown(cell: TableCell, format_: NumberFormat) -> float:
    return float(format_.show(cell.mean).replace(",", ""))


def _drop_unmeasured(
    keys: list[Labels], aggregates: Aggregates, view: TableSpec, start: int, outcomes: Sequence[Outcome]
) -> tuple[list[Labels], list[str]]:
    """Return the columns of metrics that some outcome has, and a text for each other one that was asked for."""
    if METRIC not in view.columns:
        return keys, []
    at = view.columns.index(METRIC)
    measured = {key[start:] for key, spread in aggregates.spreads.items() if spread.mean is not None}
    measured_elsewhere = {(*key[:at], *key[at + 1 :]) for key in measured}
    kept = [key for key in keys if key in measured or (*key[:at], *key[at + 1 :]) not in measured_elsewhere]
    measured_metrics = {key[at] for key in measured}
    missing = []
    for key in (key for key in keys if key not in kept):
        where = {axis: label for axis, label in zip(view.columns, key, strict=True) if axis != METRIC}
        metrics = [_requested_metrics(outcome) for outcome in select_outcomes(outcomes, where)]
        if any(key[at] not in measured_metrics if names is None else key[at] in names for names in metrics):
            missing.append(f"{', '.join(view.display(label) for label in key)}: no outcome has this number")
    return kept, missing


def _requested_metrics(outcome: Outcome) -> Collection[str] | None:
    """Return the metrics that a run was to compute; None where its data are no known task and it names none."""
    task = TASKS.get(str(outcome.spec.get("task")))
    named: Collection[str] | None = outcome.spec.get("metrics")
    return named or (task.metrics if task else None)


def _rows_by_group(rows: Sequence[Labels], n_outer: int) -> list[list[int]]:
    """Return the indices of the rows of each group, which are compared with one another."""
    groups: dict[Label, list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(row[0] if n_outer else None, []).append(i)
    return list(groups.values())


def _column_metric(aggregates: Aggregates, key: Labels, start: int) -> str:
    return next((name for labels, name in aggregates.metrics.items() if labels[start:] == key and name), "")


def _score_cell(spread: Spread, if_missing: str, notes: dict[str, int]) -> TableCell:
    reasons = [*spread.failed, *spread.absent]
    if spread.mean is not None and reasons:
        reasons = [f"{spread.n} of {spread.planned or spread.n + len(reasons)}: " + "; ".join(reasons)]
    elif spread.mean is None and not spread.failed:
        reasons = [if_missing]
    reasons += spread.at_chance
    marks = tuple(notes.setdefault(reason, len(notes)) for reason in reasons)
    state: State = "shown" if spread.mean is not None else "failed" if spread.failed else "missing"
    return TableCell(spread.mean, spread.std, spread.n, state, notes=marks)


def _average(row_cells: Sequence[TableCell], notes: dict[str, int]) -> TableCell:
    """Return the average of a row; over fewer than all columns it has a note and does not compete."""
    means = [cell.mean for cell in row_cells if cell.mean is not None]
    if not means:
        return TableCell(state="missing")
    if len(means) == len(row_cells):
        return TableCell(statistics.fmean(means), None, len(means), "shown")
    note = notes.setdefault(f"over {len(means)} of {len(row_cells)} columns, compared with no other", len(notes))
    return TableCell(statistics.fmean(means), None, len(means), "partial", notes=(note,))


def _ranks(
    cells_by_row: Sequence[Sequence[TableCell]], formats: Sequence[NumberFormat], groups: Sequence[Sequence[int]]
) -> list[list[TableCell]]:
    """Return every row's ranks among the rows of its group, one for each column, empty where it has no number."""
    ranks = [[TableCell()] * len(formats) for _ in cells_by_row]
    for i, column_format in enumerate(formats):
        for group in groups:
            present = [j for j in group if cells_by_row[j][i].mean is not None]
            sign = 1 if column_format.lower else -1
            shown = [sign * _shown(cells_by_row[j][i], column_format) for j in present]
            for j, rank in zip(present, rankdata(shown), strict=True):
                ranks[j][i] = TableCell(float(rank))
    return ranks


def _percents(view: TableSpec, outcomes: Sequence[Outcome], axes: Sequence[str]) -> dict[Labels, TableCell]:
    """Return the percentage of parameters of each row; a range if its runs differ."""
    percents: dict[Labels, list[float]] = {}
    for outcome in select_outcomes(outcomes, view.where):
        if "percent" in outcome.count and all(axis in outcome.cell for axis in axes):
            key = tuple(outcome.cell[axis] for axis in axes)
            percents.setdefault(key, []).append(float(outcome.count["percent"]))
    return {p: TableCell(min(v), None, len(v), "shown", high=max(v)) for p, v in percents.items()}


def _published(view: TableSpec, row: Labels, column: Sequence[Label]) -> float | None:
    return view.published.get(tuple(str(label) for label in (*row, *column)))


PUBLISHED_LEGEND = "In parentheses: the paper's number."
BEST_LEGEND = "Bold: best; underlined: second."

LATEX_ESCAPES = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", "[": "{[}", "]": "{]}", "*": "{*}", '"': r"\textquotedbl{}", "`": r"\textasciigrave{}",
    "–": "--", "±": r"$\pm$", "↓": r"$\downarrow$", "−": "$-$", "×": r"$\times$", "\n": " ", "\r": " ",
}  # fmt: skip
# [ and * in braces: after \\ they would be read as its options.

FORMULA_STARTS = tuple("=+-@＝＋－＠")  # of full width too, which spreadsheets read alike
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?|[+-]?inf|nan", re.IGNORECASE | re.ASCII)

FIELDS = {"std": "std", "n": "n", "paper": "published"}
"""Further columns of a CSV file -> the field of a cell."""


def note_mark(note: int) -> str:
    """Return the mark of the note with an index: a, b, …, z, aa, ab, …"""
    head, last = divmod(note, 26)
    return (note_mark(head - 1) if head else "") + chr(ord("a") + last)


def to_markdown(table: Table) -> str:
    """Write a table in GitHub's Markdown: best bold, second underlined by <u>, and below it a note for every gap."""
    lines = [f"**{escape_markdown(table.title)}**", ""] if table.title else []
    lines.append(
        markdown_row([escape_markdown(table.head), *(escape_markdown(column.text) for column in table.columns)])
    )
    lines.append(markdown_row([":--", *("--:" for _ in table.columns)]))
    for group, rows in table.groups:
        if group:
            lines.append(markdown_row([f"**{escape_markdown(group)}**", *("" for _ in table.columns)]))
        for row in rows:
            cells = [_markdown_cell(table, cell, column) for cell, column in _cells_with_columns(row, table)]
            lines.append(markdown_row([escape_markdown(row.label), *cells]))
    notes = [f"<sup>{note_mark(i)}</sup> {escape_markdown(note)}" for i, note in enumerate(table.notes)]
    notes += [f"Not in the table: {escape_markdown(text)}" for text in table.excluded]
    legend = table_legend(table)
    return "\n".join([*lines, "", *("  \n".join([*legend, *notes]).splitlines()), ""])


def _markdown_cell(table: Table, cell: TableCell, column: Column) -> str:
    text = table.text(cell, column)
    text = f"**{text}**" if cell.best else f"<u>{text}</u>" if cell.second else text
    text += f" ± {table.std(cell, column)}" if cell.std is not None else ""
    text += f" ({table.published(cell, column)})" if cell.published is not None else ""
    return text + (f" <sup>{','.join(map(note_mark, cell.notes))}</sup>" if cell.notes else "")


def markdown_row(cells: Iterable[str]) -> str:
    """Write a row of cells that are Markdown already."""
    return "| " + " | ".join(cells) + " |"


def escape_markdown(text: str) -> str:
    """Escape text for Markdown. An underscore inside a word has no meaning there and is left as it is."""
    text = re.sub(r"([\\`*|<>\[\]~])", r"\\\1", " ".join(_replace_control_characters(text).split()))
    return re.sub(r"(?<!\w)_|_(?!\w)", r"\\_", text)


def to_latex(table: Table) -> str:
    """Write a table as a tabular of booktabs: best in \\textbf, second in \\underline, deviations as subscripts."""
    levels = table.header_levels
    heading = [
        tuple(escape_latex(header_label(column, level, levels)) for level in range(levels)) for column in table.columns
    ]
    grouped = any(row.group for row in table.rows)
    index = [(escape_latex(row.group), escape_latex(row.label)) for row in table.rows]
    frame = pd.DataFrame(
        [[_latex_cell(table, cell, column) for cell, column in _cells_with_columns(row, table)] for row in table.rows],
        index=pd.MultiIndex.from_tuples(index) if grouped else [label for _, label in index],
        columns=pd.MultiIndex.from_tuples(heading) if levels > 1 and heading else [one for (one,) in heading],
        dtype=object,
    )
    form = "l" * (1 + grouped) + "r" * len(table.columns)
    text = frame.to_latex(escape=False, column_format=form, multirow=False, multicolumn_format="c")
    lines = [f"% {' '.join(table.title.split())}\n"] if table.title else []
    notes = [rf"\textsuperscript{{{note_mark(i)}}} {escape_latex(note)}" for i, note in enumerate(table.notes)]
    notes += [f"Not in the table: {escape_latex(text)}" for text in table.excluded]
    notes = [*map(escape_latex, table_legend(table)), *notes]
    below = (
        "\n\\smallskip\n\\begin{minipage}{\\linewidth}\\footnotesize\n" + "\\\\\n".join(notes) + "\n\\end{minipage}\n"
    )
    return "".join([*lines, str(text), below if notes else ""])


def header_label(column: Column, level: int, levels: int) -> str:
    """Return a column's label in a line of the heading; the narrowest of every column is in the last line."""
    at = level - (levels - len(column.labels))
    return column.labels[at] if at >= 0 else ""


def _latex_cell(table: Table, cell: TableCell, column: Column) -> str:
    text = escape_latex(table.text(cell, column))
    text = rf"\textbf{{{text}}}" if cell.best else rf"\underline{{{text}}}" if cell.second else text
    text += rf"$_{{\pm {table.std(cell, column)}}}$" if cell.std is not None else ""
    text += rf" {{\scriptsize({escape_latex(table.published(cell, column))})}}" if cell.published is not None else ""
    return text + (rf"\textsuperscript{{{','.join(map(note_mark, cell.notes))}}}" if cell.notes else "")


def escape_latex(text: str) -> str:
    """Escape text for LaTeX."""
    return "".join(LATEX_ESCAPES.get(character, character) for character in _replace_control_characters(text))


def _replace_control_characters(text: str) -> str:
    """Replace control characters, which a terminal would obey and LaTeX refuses."""
    return re.sub(r"[\x00-\x08\x0e-\x1b\x7f-\x9f]", "\N{REPLACEMENT CHARACTER}", text)


def to_csv(table: Table) -> str:
    """Write a table as CSV, with numbers in full and unscaled.

    Each column of the table becomes one for the mean and, if there are any, one each for std, n and the paper's number;
    notes are in the last. A cell without a number is empty, and the notes of its row say why. Text that a spreadsheet
    would take for a formula begins with an apostrophe.
    """
    columns: list[tuple[str, list[object]]] = [(table.head, [csv_cell(row.label) for row in table.rows])]
    if any(row.group for row in table.rows):
        columns.insert(0, ("group", [csv_cell(row.group) for row in table.rows]))
    for i, column in enumerate(table.columns):
        cells = [row.cells[i] for row in table.rows]
        columns.append((column.text, [cell.mean for cell in cells]))
        for name, field in FIELDS.items() if column.kind == "score" else [("paper", "published")]:
            values = [getattr(cell, field) for cell in cells]
            if any(value is not None and not (name == "n" and value < 2) for value in values):
                columns.append((f"{column.text} {name}", values))
    columns.append(("notes", [csv_cell("; ".join(_notes(row, table))) for row in table.rows]))
    rows = list(zip(*(values for _, values in columns), strict=True))
    rows += [("not in the table", *[""] * (len(columns) - 2), csv_cell(text)) for text in table.excluded]
    return str(pd.DataFrame(rows, columns=[csv_cell(name) for name, _ in columns], dtype=object).to_csv(index=False))


def csv_cell(cell: str) -> str:
    """Return a cell that no spreadsheet computes: numbers as they are, formulas with an apostrophe before them."""
    return f"'{cell}" if cell.lstrip()[:1] in FORMULA_STARTS and not NUMBER.fullmatch(cell) else cell


def _notes(row: Row, table: Table) -> list[str]:
    return [
        f"{column.text}: {'; '.join(table.notes[i] for i in cell.notes)}"
        for cell, column in _cells_with_columns(row, table)
        if cell.notes
    ]


def _cells_with_columns(row: Row, table: Table) -> Iterator[tuple[TableCell, Column]]:
    return zip(row.cells, table.columns, strict=True)


def table_legend(table: Table, published_legend: str = PUBLISHED_LEGEND) -> list[str]:
    """Return the line that explains the marks of the cells; an empty list if there are none."""
    cells = [cell for row in table.rows for cell in row.cells]
    best = [BEST_LEGEND] if any(cell.best for cell in cells) else []
    counts = sorted({cell.n for cell in cells if cell.std is not None})
    number = "–".join(map(str, counts[:1] + counts[1:][-1:]))
    middle = "Median" if table.median else "Mean"
    seeds = [f"{middle} ± standard deviation over {number} {table.repetition}s."] if counts else []
    published = [published_legend] if table.has_published else []
    ranges = any(cell.high is not None and cell.high != cell.mean for cell in cells)
    percent = ["A range of % params is over the models and tasks of the row."] if ranges else []
    sentences = [*best, *seeds, *published, *percent]
    return [" ".join(sentences)] if sentences else []
