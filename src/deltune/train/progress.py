"""How far work is and how long it still takes: a live table on a terminal, log lines now and then anywhere else."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.measure import Measurement
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

FIRST_LINE, MIN_PAUSE, MAX_PAUSE = 5.0, 10.0, 600.0
"""Seconds before the first log line of a stage, and the shortest and the longest pause between two of them."""
PAUSE_SHARE = 0.1
"""A pause is that share of the time a stage has taken, within these bounds: a run of hours logs tens of lines."""
KEPT_PAUSE = 1.0
"""Seconds that must lie between two rows that are kept for both to be logged."""
ROWS_BESIDE_TABLE = 10
"""Lines of the terminal that the table leaves free."""

MIN_COLUMNS = 3
"""The fewest columns that a table keeps on the narrowest terminal, beside the times."""
UNLIMITED = 1000

Facts = Mapping[str, str]
"""Facts that are known now, as texts by name: {"step": "40/423", "loss": "1.02"}."""

logger = logging.getLogger("deltune")


class ProgressDisplay:
    """Shows one stage of work after the other; a context manager.

    On a terminal (standard error) a table has a row for every fact that was kept and one of now, and below it is a bar.
    Elsewhere the same is logged at level INFO, a line each.
    """

    def __init__(
        self, enabled: bool = True, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.console = Console(stderr=True) if console is None else console
        self.clock, self.enabled = clock, enabled
        self.closing = False
        self.start("", 0)
        self.live: Live | None = None
        if enabled and self.console.is_terminal:
            self.live = Live(console=self.console, get_renderable=self._render, refresh_per_second=4)

    def __enter__(self) -> ProgressDisplay:
        """Show the table."""
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the table on the terminal as it is, without the bar."""
        self.closing = True
        if self.live is not None:
            self.live.stop()

    def start(
        self,
        title: str,
        total: float,
        done: float = 0,
        unit: str = "",
        columns: tuple[str, ...] = (),
        seconds: float = 0.0,
    ) -> None:
        """Begin a new stage, of which so many units were done before, in so many seconds.

        A stage without columns leaves the table of the one before as it is; the last columns are left out on a narrow
        terminal. Units without a name are shown as the share that is done.
        """
        self.title, self.units, self.done, self.done_before, self.unit = title, total, done, done, unit
        self.started, self.seconds_before = self.clock(), seconds
        self.last_row, self.next_line = float("-inf"), self.started + FIRST_LINE
        self.facts: dict[str, str] = {}
        if columns or not title:
            self.columns, self.kept = columns, list[dict[str, str]]()

    def start_rows(self, title: str, rows: int) -> Callable[[int], None]:
        """Begin a stage of so many rows, and return what counts them as done."""
        self.start(title, rows, unit="rows")
        return self.advance

    def reach(self, done: float, total: float, done_before: float) -> None:
        """Set how many units of work are done, some of them perhaps in part."""
        self.done, self.units, self.done_before = done, total, done_before
        self.advance(0)  # a line is due now and then, however long a unit takes

    def count(self, units: float) -> None:
        """Count units of work as done, without a log line even if one is due."""
        self.done += units

    def advance(self, units: float = 1) -> None:
        """Count units of work as done."""
        self.count(units)
        if self.clock() >= self.next_line:
            self._log(self.facts)

    def show(self, facts: Facts) -> None:
        """Replace what is known now; facts that are not named stay."""
        self.facts |= facts

    def keep(self, facts: Facts, logged: bool = True) -> None:
        """Keep what is known now, and these facts, as a row of the table."""
        row = {**self.facts, "time": format_duration(self.seconds), **facts}
        self.kept.append(row)
        if logged and self.clock() >= self.last_row + KEPT_PAUSE:
            self.last_row = self.clock()
            self._log(row)

    @property
    def seconds(self) -> float:
        """Seconds that the stage has taken, those before it was begun again included."""
        return self.seconds_before + self.clock() - self.started

    @property
    def seconds_left(self) -> float | None:
        """Seconds that the rest of the stage takes at the speed so far; None before anything is done."""
        done = self.done - self.done_before
        return None if done <= 0 else max(0.0, (self.clock() - self.started) / done * (self.units - self.done))

    def _log(self, facts: Facts) -> None:
        """Log a line, and choose when the next one is due."""
        self.next_line = self.clock() + min(MAX_PAUSE, max(MIN_PAUSE, PAUSE_SHARE * self.seconds))
        if not self.enabled or self.live is not None:
            return
        ordered = {name: facts[name] for name in self.columns if name in facts} | dict(facts)
        parts = [f"{name} {value}" for name, value in ordered.items() if value and name != "time"]
        if not parts or self.unit:
            parts.insert(0, f"{self.title} {self._amount()}")
        times = f"{format_duration(self.seconds)} elapsed, {format_duration(self.seconds_left)} left"
        logger.info("%s, %s", ", ".join(parts), times)

    def _amount(self) -> str:
        if self.unit:
            return f"{math.floor(self.done):,}/{self.units:,.0f} {self.unit}"
        return f"{min(1.0, self.done / self.units):.0%}" if self.units else ""

    def _has_news(self) -> bool:
        """Return whether the current facts differ from the last kept row."""
        facts = {name: value for name, value in self.facts.items() if value}
        return not facts.items() <= (self.kept[-1].items() if self.kept else {}.items())

    def _render(self) -> RenderableType:
        """Draw the table of the stage and its bar."""
        parts: list[RenderableType] = []
        left = format_duration(self.seconds_left)
        rows = [(row, "") for row in self.kept[-max(3, self.console.height - ROWS_BESIDE_TABLE) :]]
        if not self.closing and self._has_news():
            rows.append(({"time": format_duration(self.seconds), "left": left, **self.facts}, "bold"))
        if self.columns and rows:
            parts.append(self._table(rows))
        if not self.closing and self.title:
            bar = Table.grid(padding=(0, 1))
            bar.add_row(
                Text(self.title),
                ProgressBar(total=max(self.units, 1e-9), completed=self.done, width=40),
                Text(self._amount()),
                Text(f"{left} left"),
                Text("" if self.columns else ", ".join(self.facts.values())),
            )
            parts.append(bar)
        return Group(*parts)

    def _table(self, rows: Sequence[tuple[Facts, str]]) -> Table:
        """Return rows with their styles as a table, without the last columns where the terminal is too narrow."""
        columns = list(self.columns)
        while True:
            names = [*columns, "time", "left"]
            table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
            for name in names:
                table.add_column(name, justify="right", no_wrap=True)
            for row, style in rows:
                table.add_row(*(Text(row.get(name, ""), style) for name in names))
            size = Measurement.get(self.console, self.console.options.update(width=UNLIMITED), table)
            if len(columns) <= MIN_COLUMNS or size.maximum <= self.console.width:
                return table
            columns.pop()


def format_duration(seconds: float | None) -> str:
    """Return a time as 0:42, 12:05 or 1:02:03; "?" for one that is not known."""
    if seconds is None:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
