"""What all commands share: where they print, their common arguments, and how they import what they work with."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

out = Console(soft_wrap=True, highlight=False, markup=False)

ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help="Hub id, folder, config.json or minilm.")]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress bar and no notes.")]


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Around imports: of a million new objects none is garbage, and looking for it takes a fifth of the time."""
    known, on = len(sys.modules), gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > known:
            gc.freeze()  # nor will they be later
        if on:
            gc.enable()
