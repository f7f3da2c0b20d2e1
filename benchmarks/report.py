"""Rows for people, as a table on the terminal, and the files of results that are committed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from .frame import Report
from .rows import Row

RESULTS = Path(__file__).parent / "results"
"""What is committed: a file for each part, with the machine and the commit of its rows."""
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


def keep(report: Report, folder: Path = RESULTS) -> list[Path]:
    """Write the rows of each part of a report into the part's file, in place of what is there."""
    parts: dict[str, list[str]] = {}
    for piece in report.rows:
        parts.setdefault(piece.partition(":")[0], []).append(piece)
    kept = []
    for part, pieces in parts.items():
        rows = {piece: report.rows[piece] for piece in pieces}
        commits = {piece: report.commits[piece] for piece in pieces}
        seconds = {piece: report.seconds[piece] for piece in pieces if piece in report.seconds}
        kept.append(Report(folder / f"{part}.json", report.machine, rows, seconds, commits))
        kept[-1].write()
    return [of_part.path for of_part in kept]
