"""A table written down: Markdown, LaTeX (booktabs) and CSV, with everything that is not there said below it."""

from __future__ import annotations

import csv as csv_module
import io
import re
from collections.abc import Iterator, Sequence
from itertools import groupby

from .tables import Column, Entry, Grid, Row, grid

__all__ = ["csv", "grid", "latex", "mark", "markdown", "plain"]

PAPER = "In parentheses: the paper's number."
FLAGS = "Bold: best; underlined: second."

_LATEX = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", "[": "{[}", "]": "{]}", "*": "{*}", '"': r"\textquotedbl{}", "`": r"\textasciigrave{}",
    "–": "--", "±": r"$\pm$", "↓": r"$\downarrow$", "−": "$-$", "×": r"$\times$", "\n": " ", "\r": " ",
}  # fmt: skip
# [ and * in braces: after \\ they would be read as its options.

_FORMULA = tuple("=+-@＝＋－＠")  # of full width too, which spreadsheets read alike
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?|[+-]?inf|nan", re.IGNORECASE | re.ASCII)


def mark(note: int) -> str:
    """The mark of a note: a, b, …, z, aa, ab, …"""
    head, last = divmod(note, 26)
    return (mark(head - 1) if head else "") + chr(ord("a") + last)


def markdown(grid: Grid) -> str:
    """A table of GitHub's Markdown: best bold, second underlined by <u>, a note for every gap below."""
    lines = [f"**{plain(grid.title)}**", ""] if grid.title else []
    lines.append(_line([plain(grid.head), *(plain(column.text) for column in grid.columns)]))
    lines.append(_line([":--", *("--:" for _ in grid.columns)]))
    for group, rows in grid.groups:
        if group:
            lines.append(_line([f"**{plain(group)}**", *("" for _ in grid.columns)]))
        for row in rows:
            lines.append(_line([plain(row.label), *(_markdown(grid, e, c) for e, c in _pairs(row, grid))]))
    below = [f"<sup>{mark(i)}</sup> {plain(note)}" for i, note in enumerate(grid.notes)]
    below += [f"Not in the table: {plain(text)}" for text in grid.left]
    legend = legend_of(grid)
    return "\n".join([*lines, "", *("  \n".join([*legend, *below]).splitlines()), ""])


def _markdown(grid: Grid, entry: Entry, column: Column) -> str:
    text = grid.text(entry, column)
    text = f"**{text}**" if entry.best else f"<u>{text}</u>" if entry.second else text
    text += f" ± {grid.std(entry, column)}" if entry.std is not None else ""
    text += f" ({grid.paper(entry, column)})" if entry.paper is not None else ""
    return text + (f" <sup>{','.join(map(mark, entry.notes))}</sup>" if entry.notes else "")


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def plain(text: str) -> str:
    """Text that Markdown shows as it is. An underscore inside a word means nothing there and stays readable."""
    text = re.sub(r"([\\`*|<>\[\]~])", r"\\\1", " ".join(_visible(text).split()))
    return re.sub(r"(?<!\w)_|_(?!\w)", r"\\_", text)


def latex(grid: Grid) -> str:
    """A tabular of the booktabs package: \\textbf and \\underline, the deviation as a subscript, notes below."""
    out = [f"% {' '.join(grid.title.split())}"] if grid.title else []
    out += [r"\begin{tabular}{l" + "r" * len(grid.columns) + "}", r"\toprule"]
    out += list(_heading(grid))
    for group, rows in grid.groups:
        out.append(r"\midrule")
        if group:
            out.append(rf"\multicolumn{{{len(grid.columns) + 1}}}{{l}}{{\textit{{{escaped(group)}}}}} \\")
        for row in rows:
            out.append(_row([escaped(row.label), *(_latex(grid, e, c) for e, c in _pairs(row, grid))]))
    out += [r"\bottomrule", r"\end{tabular}"]
    below = [rf"\textsuperscript{{{mark(i)}}} {escaped(note)}" for i, note in enumerate(grid.notes)]
    below += [f"Not in the table: {escaped(text)}" for text in grid.left]
    below = [*map(escaped, legend_of(grid)), *below]
    if below:
        out += ["", r"\smallskip", r"\begin{minipage}{\linewidth}\footnotesize"]
        out += [*(f"{line}\\\\" for line in below[:-1]), below[-1], r"\end{minipage}"]
    return "\n".join(out) + "\n"


def _heading(grid: Grid) -> Iterator[str]:
    """Lines of the heading; equal labels of the upper ones span their columns, with a rule below."""
    for level in range(grid.levels - 1):
        cells, rules, at = [""], [], 2
        for label, several in groupby(grid.columns, key=lambda column: label_at(column, level, grid.levels)):
            width = len(list(several))
            cells.append(rf"\multicolumn{{{width}}}{{c}}{{{escaped(label)}}}" if width > 1 else escaped(label))
            rules += [rf"\cmidrule(lr){{{at}-{at + width - 1}}}"] if label else []
            at += width
        yield _row(cells)
        yield " ".join(rules)
    yield _row([escaped(grid.head), *(escaped(column.labels[-1]) for column in grid.columns)])


def label_at(column: Column, level: int, levels: int) -> str:
    """A column's label in a line of the heading; the narrowest of every column stands in the last."""
    above = column.labels[:-1]
    at = level - (levels - 1 - len(above))
    return above[at] if at >= 0 else ""


def _latex(grid: Grid, entry: Entry, column: Column) -> str:
    text = escaped(grid.text(entry, column))
    text = rf"\textbf{{{text}}}" if entry.best else rf"\underline{{{text}}}" if entry.second else text
    text += rf"$_{{\pm {grid.std(entry, column)}}}$" if entry.std is not None else ""
    text += rf" {{\scriptsize({escaped(grid.paper(entry, column))})}}" if entry.paper is not None else ""
    return text + (rf"\textsuperscript{{{','.join(map(mark, entry.notes))}}}" if entry.notes else "")


def _row(cells: Sequence[str]) -> str:
    return " & ".join(cells) + r" \\"


def escaped(text: str) -> str:
    """Text that LaTeX sets as it is."""
    return "".join(_LATEX.get(character, character) for character in _visible(text))


def _visible(text: str) -> str:
    """Text without the control characters that a terminal would obey and LaTeX refuses."""
    return re.sub(r"[\x00-\x08\x0e-\x1b\x7f-\x9f]", "\N{REPLACEMENT CHARACTER}", text)


def csv(grid: Grid) -> str:
    """The numbers in full, unscaled: a column each for the mean, and where there are any, std, n, paper; then notes.

    A cell without a number is empty, and the notes of its row say why; best and second are left to the reader. Text
    that a spreadsheet would take for a formula begins with an apostrophe.
    """
    extras = [
        [name for name in (("std", "n", "paper") if column.kind == "score" else ("paper",)) if _any(grid, i, name)]
        for i, column in enumerate(grid.columns)
    ]
    told = io.StringIO()
    writer = csv_module.writer(told, lineterminator="\n")
    grouped = any(row.group for row in grid.rows)
    head = [*(["group"] if grouped else []), grid.head]
    for column, more in zip(grid.columns, extras, strict=True):
        head += [column.text, *(f"{column.text} {name}" for name in more)]
    writer.writerow(map(_text, [*head, "notes"]))
    for row in grid.rows:
        cells: list[str] = [*([row.group] if grouped else []), row.label]
        for (entry, _), more in zip(_pairs(row, grid), extras, strict=True):
            cells += [_number(entry.mean), *(_number(getattr(entry, name)) for name in more)]
        writer.writerow(map(_text, [*cells, "; ".join(_notes(row, grid))]))
    for text in grid.left:
        writer.writerow(map(_text, ["not in the table", *[""] * (len(head) - 1), text]))
    return told.getvalue()


def _text(cell: str) -> str:
    """A cell of a CSV file that no spreadsheet computes: a number as it is, a formula as the text that it is."""
    return f"'{cell}" if cell.lstrip()[:1] in _FORMULA and not _NUMBER.fullmatch(cell) else cell


def _any(grid: Grid, at: int, name: str) -> bool:
    values = [getattr(row.entries[at], name) for row in grid.rows]
    return any(value is not None and not (name == "n" and value < 2) for value in values)


def _number(value: float | None) -> str:
    return "" if value is None else repr(value)


def _notes(row: Row, grid: Grid) -> list[str]:
    return [
        f"{column.text}: {'; '.join(grid.notes[i] for i in entry.notes)}"
        for entry, column in _pairs(row, grid)
        if entry.notes
    ]


def _pairs(row: Row, grid: Grid) -> Iterator[tuple[Entry, Column]]:
    return zip(row.entries, grid.columns, strict=True)


def legend_of(grid: Grid, comparison: str = PAPER) -> list[str]:
    """What the marks in the cells mean, where there are any, in a line."""
    entries = [entry for row in grid.rows for entry in row.entries]
    flags = [FLAGS] if any(entry.best for entry in entries) else []
    several = sorted({entry.n for row in grid.rows for entry, column in _pairs(row, grid) if entry.std is not None})
    seeds = [f"Mean ± standard deviation over {'–'.join(map(str, several[:1] + several[1:][-1:]))} seeds."]
    paper = [comparison] if grid.compared else []
    return [" ".join([*flags, *(seeds if several else []), *paper])] if flags or several or paper else []
