"""Tables as Markdown, LaTeX (booktabs) and CSV, with a note for every gap.

Own code and not pandas': cells carry marks, deviations, notes and the paper's numbers, rows come in groups under
headings of several lines, and every label is escaped. pandas' Markdown escapes nothing and has no groups, and its LaTeX
needs each cell as a finished string, so that what would be left to it is to join cells by " | " and " & ".
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from itertools import groupby

from .tables import Column, Row, Table, TableCell

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
        _markdown_row([escape_markdown(table.head), *(escape_markdown(column.text) for column in table.columns)])
    )
    lines.append(_markdown_row([":--", *("--:" for _ in table.columns)]))
    for group, rows in table.groups:
        if group:
            lines.append(_markdown_row([f"**{escape_markdown(group)}**", *("" for _ in table.columns)]))
        for row in rows:
            cells = [_markdown_cell(table, cell, column) for cell, column in _cells_with_columns(row, table)]
            lines.append(_markdown_row([escape_markdown(row.label), *cells]))
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


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def escape_markdown(text: str) -> str:
    """Escape text for Markdown. An underscore inside a word has no meaning there and is left as it is."""
    text = re.sub(r"([\\`*|<>\[\]~])", r"\\\1", " ".join(_replace_control_characters(text).split()))
    return re.sub(r"(?<!\w)_|_(?!\w)", r"\\_", text)


def to_latex(table: Table) -> str:
    """Write a table as a tabular of booktabs: best in \\textbf, second in \\underline, deviations as subscripts."""
    lines = [f"% {' '.join(table.title.split())}"] if table.title else []
    lines += [r"\begin{tabular}{l" + "r" * len(table.columns) + "}", r"\toprule"]
    lines += list(_latex_heading(table))
    for group, rows in table.groups:
        lines.append(r"\midrule")
        if group:
            lines.append(rf"\multicolumn{{{len(table.columns) + 1}}}{{l}}{{\textit{{{escape_latex(group)}}}}} \\")
        for row in rows:
            cells = [_latex_cell(table, cell, column) for cell, column in _cells_with_columns(row, table)]
            lines.append(_latex_row([escape_latex(row.label), *cells]))
    lines += [r"\bottomrule", r"\end{tabular}"]
    notes = [rf"\textsuperscript{{{note_mark(i)}}} {escape_latex(note)}" for i, note in enumerate(table.notes)]
    notes += [f"Not in the table: {escape_latex(text)}" for text in table.excluded]
    notes = [*map(escape_latex, table_legend(table)), *notes]
    if notes:
        lines += ["", r"\smallskip", r"\begin{minipage}{\linewidth}\footnotesize"]
        lines += [*(f"{line}\\\\" for line in notes[:-1]), notes[-1], r"\end{minipage}"]
    return "\n".join(lines) + "\n"


def _latex_heading(table: Table) -> Iterator[str]:
    """Yield the lines of the heading; equal labels of the upper ones span their columns, with a rule below."""
    for level in range(table.header_levels - 1):
        cells, rules, at = [""], [], 2
        for label, columns in groupby(
            table.columns, key=lambda column: header_label(column, level, table.header_levels)
        ):
            width = len(list(columns))
            cells.append(
                rf"\multicolumn{{{width}}}{{c}}{{{escape_latex(label)}}}" if width > 1 else escape_latex(label)
            )
            rules += [rf"\cmidrule(lr){{{at}-{at + width - 1}}}"] if label else []
            at += width
        yield _latex_row(cells)
        yield " ".join(rules)
    yield _latex_row([escape_latex(table.head), *(escape_latex(column.labels[-1]) for column in table.columns)])


def header_label(column: Column, level: int, levels: int) -> str:
    """Return a column's label in a line of the heading; the narrowest of every column is in the last line."""
    upper = column.labels[:-1]
    at = level - (levels - 1 - len(upper))
    return upper[at] if at >= 0 else ""


def _latex_cell(table: Table, cell: TableCell, column: Column) -> str:
    text = escape_latex(table.text(cell, column))
    text = rf"\textbf{{{text}}}" if cell.best else rf"\underline{{{text}}}" if cell.second else text
    text += rf"$_{{\pm {table.std(cell, column)}}}$" if cell.std is not None else ""
    text += rf" {{\scriptsize({escape_latex(table.published(cell, column))})}}" if cell.published is not None else ""
    return text + (rf"\textsuperscript{{{','.join(map(note_mark, cell.notes))}}}" if cell.notes else "")


def _latex_row(cells: Sequence[str]) -> str:
    return " & ".join(cells) + r" \\"


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
    more_columns = [
        [name for name in (FIELDS if column.kind == "score" else ("paper",)) if _has_any(table, i, FIELDS[name])]
        for i, column in enumerate(table.columns)
    ]
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    grouped = any(row.group for row in table.rows)
    head = [*(["group"] if grouped else []), table.head]
    for column, more in zip(table.columns, more_columns, strict=True):
        head += [column.text, *(f"{column.text} {name}" for name in more)]
    writer.writerow(map(_csv_cell, [*head, "notes"]))
    for row in table.rows:
        cells: list[str] = [*([row.group] if grouped else []), row.label]
        for (cell, _), more in zip(_cells_with_columns(row, table), more_columns, strict=True):
            cells += [_number(cell.mean), *(_number(getattr(cell, FIELDS[name])) for name in more)]
        writer.writerow(map(_csv_cell, [*cells, "; ".join(_notes(row, table))]))
    for text in table.excluded:
        writer.writerow(map(_csv_cell, ["not in the table", *[""] * (len(head) - 1), text]))
    return file.getvalue()


def _csv_cell(cell: str) -> str:
    """Return a cell that no spreadsheet computes: numbers as they are, formulas with an apostrophe before them."""
    return f"'{cell}" if cell.lstrip()[:1] in FORMULA_STARTS and not NUMBER.fullmatch(cell) else cell


def _has_any(table: Table, at: int, name: str) -> bool:
    values = [getattr(row.cells[at], name) for row in table.rows]
    return any(value is not None and not (name == "n" and value < 2) for value in values)


def _number(value: float | None) -> str:
    return "" if value is None else repr(value)


def _notes(row: Row, table: Table) -> list[str]:
    return [
        f"{column.text}: {'; '.join(table.notes[i] for i in cell.notes)}"
        for cell, column in _cells_with_columns(row, table)
        if cell.notes
    ]


def _cells_with_columns(row: Row, table: Table) -> Iterator[tuple[TableCell, Column]]:
    return zip(row.cells, table.columns, strict=True)


def table_legend(table: Table, published_legend: str = PUBLISHED_LEGEND) -> list[str]:
    """Return the line that explains the marks of the cells; an empty list if there are none.

    Args:
        table: The table.
        published_legend: The sentence about the paper's numbers.
    """
    cells = [cell for row in table.rows for cell in row.cells]
    best = [BEST_LEGEND] if any(cell.best for cell in cells) else []
    counts = sorted({cell.n for cell in cells if cell.std is not None})
    seeds = (
        [f"Mean ± standard deviation over {'–'.join(map(str, counts[:1] + counts[1:][-1:]))} seeds."] if counts else []
    )
    published = [published_legend] if table.has_published else []
    sentences = [*best, *seeds, *published]
    return [" ".join(sentences)] if sentences else []
