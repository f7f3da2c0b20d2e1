"""What all commands share: where they print, and their common arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

out = Console(soft_wrap=True, highlight=False, markup=False)

ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help="Hub id, folder, config.json or minilm.")]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress bar and no notes.")]
