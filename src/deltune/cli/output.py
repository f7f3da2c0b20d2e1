"""Arguments that several commands share, and what a command prints while it works, on standard error."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, TextIO

import typer
from rich.console import Console

console = Console(soft_wrap=True, highlight=False, markup=False)


def wide_console() -> Console:
    """Return a console for tables with long cells: a narrow terminal wraps their lines, where rich drops columns."""
    return Console(width=max(200, console.width), soft_wrap=True, highlight=False, markup=False)


ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help="Hub id, folder, config.json or minilm.")]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, of a delta, or of PEFT.")]
BaseModelOption = Annotated[
    str | None, typer.Option("--model", help="The base model: hub id, folder or minilm [as the folder names it].")
]
PoolingOption = Annotated[
    Literal["model"] | None,
    typer.Option(
        help="What a head reads: mean, first or last hidden state, or model, the class's pooler [as trained, or model]."
    ),
]
LabelsOption = Annotated[str | None, typer.Option(help="Names of the labels, in the order of their ids: a,b,c.")]
ColumnsOption = Annotated[str | None, typer.Option(help="Which column is what: text=a,label=b.")]
SeparatorOption = Annotated[
    str | None,
    typer.Option("--label-separator", help="What stands between several labels in one text: '|'; ' ' for any blanks."),
]
SchemeOption = Annotated[
    str | None,
    typer.Option(
        "--tag-scheme", help="Of tagging: iob2 converts tags of entities to IOB2; plain: tags are classes of words."
    ),
]
TaskOption = Annotated[
    str | None, typer.Option(help="A known task (`deltune tasks`), or the kind of task of the data: tagging, …")
]
DataRootOption = Annotated[str | None, typer.Option(help="Folder that holds the folders of known tasks.")]
QuantizeOption = Annotated[
    str | None, typer.Option(help="Quantise the linears: nf4, int8, torchao-int8, … (extra quant).")
]
MaxTokens = Annotated[int, typer.Option(min=1, help="Tokens of a generated answer, at most.")]
Temperature = Annotated[float, typer.Option(min=0.0, help="0: the likeliest token each time; above, tokens are drawn.")]
Seed = Annotated[int, typer.Option(help="Seed of everything that is drawn: initial values, order, rows, tokens.")]
Kind = Annotated[
    str | None,
    typer.Option(help="The head of the model: classification, tagging, base, causal-lm or seq2seq-lm [as saved]."),
]
Output = Annotated[Path, typer.Option(help="Where the result is written [a new folder].")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress and no notes.")]


def listed(names: str | None) -> list[str] | None:
    """Return the names of an option such as --labels a,b,c."""
    return None if names is None else [name.strip() for name in names.split(",") if name.strip()]


class StderrHandler(logging.Handler):
    """Prints on what standard error is at the time: a live table takes its place, and lines go above the table."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record."""
        print(self.format(record), file=sys.stderr)


def is_main_process() -> bool:
    """Return whether this process prints to the user; of several only rank 0 does."""
    return os.environ.get("RANK", "0") == "0"


@contextlib.contextmanager
def resumable(what: str) -> Iterator[None]:
    """End with code 130 at Ctrl-C, and say that the same command goes on where this one was."""
    try:
        yield
    except KeyboardInterrupt:
        if is_main_process():
            print(f"stopped; run the same command again and {what} goes on where it was", file=sys.stderr)
        raise typer.Exit(130) from None


@contextlib.contextmanager
def log_to_stderr(quiet: bool) -> Iterator[None]:
    """Print deltune's notes and warnings on standard error, one line each, and silence those of other libraries."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # of the profiler that measures peaks, which is read once
    logger = logging.getLogger("deltune")
    handler, level, propagates = StderrHandler(), logger.level, logger.propagate
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING if quiet else logging.INFO)
    logger.propagate = False  # absl, which rouge-score imports, prints what reaches the root logger a second time

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if category is UserWarning and str(Path(__file__).parents[1]) in filename:
            logger.warning("%s", message)

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", UserWarning)
            warnings.showwarning = show
            yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagates
