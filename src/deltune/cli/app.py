"""The command line: results go to standard output (with --json nothing else does), all else to standard error."""

from __future__ import annotations

import gc
import os
import sys
from typing import Annotated

import typer

from .. import quiet_imports
from .._version import __version__
from ..errors import DeltuneError
from . import model, use
from .choose import choose
from .output import console, is_main_process
from .probe import probe
from .serve import serve, serve_key
from .study import app as study
from .train import PASS_EVERYTHING_ON, exit_with_launcher, train

app = typer.Typer(
    help="Fine-tune pretrained transformers by training few parameters. A first run: deltune quickstart",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(requested: bool) -> None:
    if requested:
        console.print(f"deltune {__version__}")
        raise typer.Exit()


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
) -> None:
    """Fine-tune pretrained transformers by training few parameters. A first run: deltune quickstart"""


app.command()(model.inspect)
app.command()(model.methods)
app.command()(model.tasks)
app.command()(model.count)
app.command()(model.fit)
app.command()(probe)
app.command(add_help_option=False, context_settings=PASS_EVERYTHING_ON)(train)
app.command(add_help_option=False, context_settings=PASS_EVERYTHING_ON)(serve)
app.command("serve-key")(serve_key)
app.add_typer(study, name="study")
app.command(context_settings=PASS_EVERYTHING_ON)(choose)
app.command()(use.data)
app.command()(use.evaluate)
app.command()(use.predict)
app.command()(use.generate)
app.command()(use.chat)
app.command()(use.cache)
app.command()(use.merge)
app.command()(use.export)
app.command("import")(use.import_folder)
app.command()(use.combine)
app.command()(use.extract)
app.command()(use.report)
app.command()(use.quickstart)


def main() -> None:
    """Run the command line.

    The exit code is 2, with a message on standard error, for a mistake of the user, and 130 after Ctrl-C.
    """
    exit_with_launcher()
    gc.set_threshold(100_000, 50, 50)  # imports make no garbage, and took a fifth longer while it was looked for
    try:
        with quiet_imports():
            app(prog_name="deltune")
    except DeltuneError as error:
        if is_main_process():
            print(f"deltune: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
