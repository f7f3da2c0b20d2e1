"""A progress bar with the time left, which is shown on standard error if that is a terminal."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import TimeRemainingColumn as TimeLeft


class ProgressBar:
    """A progress bar of one stage after the other, each with a title, a count and a note; a context manager."""

    def __init__(self, enabled: bool = True) -> None:
        """Prepare the bar.

        Args:
            enabled: False shows nothing, on a terminal either.
        """
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        note = TextColumn("{task.fields[note]}")
        left = TimeLeft(compact=True)
        shown = enabled and console.is_terminal
        self.progress = Progress(*columns, TextColumn("left"), left, note, console=console, disable=not shown)
        self.stage: TaskID | None = None

    def __enter__(self) -> ProgressBar:
        """Show the bar."""
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the bar."""
        self.progress.stop()

    def start(self, title: str, total: int, done: int = 0) -> None:
        """Begin a new stage.

        Args:
            title: What is done in it.
            total: How many units of work it has.
            done: How many of them are done already.
        """
        self.stage = self.progress.add_task(title, total=total, completed=done, note="")

    def total(self, units: int) -> None:
        """Change how many units of work the stage has."""
        if self.stage is not None:
            self.progress.update(self.stage, total=units)

    def advance(self, units: int = 1) -> None:
        """Count units of work as done."""
        if self.stage is not None:
            self.progress.advance(self.stage, units)

    def note(self, text: str) -> None:
        """Show a text beside the bar, in place of the one before."""
        if self.stage is not None:
            fields: dict[str, Any] = {"note": text}
            self.progress.update(self.stage, **fields)
