"""A progress bar with the time left, on standard error of a terminal and nowhere else."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import TimeRemainingColumn as TimeLeft


class ProgressBar:
    """Stages with a title, a count and a note; silent unless wanted and on a terminal."""

    def __init__(self, wanted: bool = True) -> None:
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        note = TextColumn("{task.fields[note]}")
        left = TimeLeft(compact=True)
        shown = wanted and console.is_terminal
        self.progress = Progress(*columns, TextColumn("left"), left, note, console=console, disable=not shown)
        self.stage: TaskID | None = None

    def __enter__(self) -> ProgressBar:
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()

    def start(self, title: str, total: int, done: int = 0) -> None:
        """A new stage of `total` units, `done` of them done already."""
        self.stage = self.progress.add_task(title, total=total, completed=done, note="")

    def total(self, units: int) -> None:
        """The stage has that many units after all."""
        if self.stage is not None:
            self.progress.update(self.stage, total=units)

    def advance(self, units: int = 1) -> None:
        """More units of the stage are done."""
        if self.stage is not None:
            self.progress.advance(self.stage, units)

    def note(self, text: str) -> None:
        """What stands beside the bar."""
        if self.stage is not None:
            fields: dict[str, Any] = {"note": text}
            self.progress.update(self.stage, **fields)
