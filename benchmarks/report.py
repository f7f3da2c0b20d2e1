"""Rows for people: a table on the terminal, tables in Markdown between marks of a page."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from .frame import Report
from .rows import Row

MARKS = re.compile(r"(<!-- bench: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
"""`<!-- bench: NAME -->` … `<!-- end -->`: a part's rows, a summary of all, or what they were measured on."""
SAID = {True: "pass", False: "FAIL", None: "–"}


def cells(row: Row) -> tuple[str, str, str, str, str]:
    """figure, interval, target, verdict, note."""
    unit = f" {row.unit}" if row.unit else ""
    figure = "–" if row.figure is None else f"{_number(row.figure)}{unit}"
    interval = "" if row.interval is None else " … ".join(_number(end) for end in row.interval)
    return figure, interval, "" if row.target is None else str(row.target), SAID[row.passed], row.note


def _number(value: float) -> str:
    if value == int(value) and abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"


def table(rows: Iterable[Row]) -> Table:
    """A line for each row."""
    made = Table("what", "figure", "95 % interval", "target", "", "note")
    for row in rows:
        figure, interval, target, verdict, note = cells(row)
        style = "red" if row.passed is False else "green" if row.passed else ""
        made.add_row(row.name, figure, interval, target, f"[{style}]{verdict}[/]" if style else verdict, note)
    return made


def show(rows: Iterable[Row]) -> None:
    """Print the table, as wide as it wants to be where no terminal limits it."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=240)
    console.print(table(rows))


def markdown(rows: Iterable[Row]) -> str:
    """The same as a table in Markdown."""
    lines = ["| what | figure | 95 % interval | target | | note |", "|---|---|---|---|---|---|"]
    return "\n".join([*lines, *("| " + " | ".join((row.name, *cells(row))) + " |" for row in rows)]) + "\n"


def summary(rows: Iterable[Row]) -> str:
    """A line for each kind of figure with a target: how many there are, how many meet it, and how they lie."""
    kinds: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.passed is not None:
            kinds.setdefault((row.name.partition(":")[0], str(row.target)), []).append(row)
    lines = ["| what | target | met | lowest | median | highest |", "|---|---|---|---|---|---|"]
    for (kind, target), of_kind in kinds.items():
        figures = sorted(row.figure for row in of_kind if row.figure is not None)
        lies = (_number(value) for value in (figures[0], statistics.median(figures), figures[-1]))
        met = f"{sum(row.passed is True for row in of_kind)} of {len(of_kind)}"
        unit = f", {of_kind[0].unit}" if of_kind[0].unit not in ("", "×") else ""
        lines.append(f"| {' | '.join((kind + unit, target, met, *lies))} |")
    return "\n".join(lines) + "\n"


def facts(report: Report) -> str:
    """The machine as a list, and the commits that were measured: each with its parts where there are several."""
    of_commit: dict[str, list[str]] = {}
    for piece, commit in report.commits.items():
        of_commit.setdefault(str(commit), []).append(piece.partition(":")[0])
    commits = [f"{name} ({', '.join(dict.fromkeys(parts))})" for name, parts in of_commit.items()]
    known: dict[str, Any] = {**report.machine, "commit": "; ".join(commits if len(commits) > 1 else of_commit) or None}
    return "".join(f"- {name}: {value}\n" for name, value in known.items() if value is not None)


def written(page: str, report: Report, prefix: str = "") -> str:
    """A page with the tables between its marks taken from the report. A part that it has no rows of stays as it is.
    prefix: of the marks `machine`, what was measured on, and `summary`, of all rows."""

    def fill(match: re.Match[str]) -> str:
        name = match[2]
        of_part = [row for piece, rows in report.rows.items() if piece.partition(":")[0] == name for row in rows]
        if name == f"{prefix}machine":
            return f"{match[1]}{facts(report)}{match[3]}"
        if name == f"{prefix}summary":
            return f"{match[1]}{summary(row for rows in report.rows.values() for row in rows)}{match[3]}"
        return f"{match[1]}{markdown(of_part)}{match[3]}" if of_part else match[0]

    return MARKS.sub(fill, page)


def write(path: Path, report: Report, prefix: str = "") -> None:
    """Fill the tables of a page."""
    path.write_text(written(path.read_text(encoding="utf-8"), report, prefix), encoding="utf-8")
