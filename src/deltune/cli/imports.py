"""`--import FILE_OR_MODULE`: runs the user's own code that registers forms, compositions and methods.

It is the only way in which a command runs code that is no part of deltune's, and only the command line can ask for it:
no config, no delta and no run names a file to import.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ..errors import DeltuneError, error_summary


def import_user_code(names: Sequence[str] | None) -> Sequence[str] | None:
    """Import Python files and modules, in their order, each once."""
    for name in names or ():
        try:
            _import_file(name) if name.endswith(".py") else importlib.import_module(name)
        except DeltuneError as error:
            raise DeltuneError(f"--import {name}: {error}") from error
        except Exception as error:
            if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
                raise DeltuneError(
                    f"--import {name}: there is no such module on Python's path; a file is named with its ending: "
                    f"--import {name.rpartition('.')[2]}.py"
                ) from error
            frame = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{frame.filename}, line {frame.lineno}"
            raise DeltuneError(f"--import {name}: {type(error).__name__}: {error_summary(error)} ({where})") from error
    return names


def _import_file(name: str) -> None:
    """Import a file as a module that is called by its whole path, so that it hides no other module."""
    path = Path(name).expanduser().resolve()
    if str(path) in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(str(path), path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise DeltuneError("there is no such file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[str(path)] = module  # dataclasses look up the module of a class there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[str(path)]
        raise


Imports = Annotated[
    list[str] | None,
    typer.Option(
        "--import",
        metavar="FILE_OR_MODULE",
        callback=import_user_code,
        is_eager=True,
        help="Run this Python code first, which registers parts of your own; repeatable.",
    ),
]
