"""Options of the command line: `--import`, and those that are generated from the fields of a configuration."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import typer

from ..errors import DeltuneError, error_summary, unknown_name

if TYPE_CHECKING:
    from pydantic import BaseModel

    Sections = Mapping[str, type[BaseModel]]
    Places = Mapping[str, tuple[str, str]]


def split_settings(settings: Sequence[str], example: str) -> dict[str, str]:
    """Return the texts of --set by their dotted names; the message about a malformed one has the example."""
    values = {}
    for item in settings:
        name, equals, value = item.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not name:
            raise DeltuneError(f"--set {item}: give SECTION.FIELD=VALUE, such as {example}")
        values[name] = value
    return values


def load_user_function(place: str, option: str) -> Callable[..., Any]:
    """Return the function FILE.py:function, whose file or module is imported by the rules of --import."""
    name, _, function = place.rpartition(":")
    if not name:
        raise DeltuneError(f"{option} {place}: give FILE.py:function")
    import_user_code([name])
    module = sys.modules[str(Path(name).expanduser().resolve()) if name.endswith(".py") else name]
    value = getattr(module, function, None)
    if not callable(value):
        names = [name for name, value in vars(module).items() if inspect.isfunction(value)]
        raise DeltuneError(f"{option} {place}: {unknown_name('function', function, names)}")
    return value


def import_user_code(names: Sequence[str] | None) -> Sequence[str] | None:
    """Import Python files and modules, in their order, each once.

    It is the only way in which a command runs code that is not deltune's, and only the command line can ask for it: no
    config, no delta and no run names a file to import.
    """
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
        help="Python code with parts of your own; repeatable.",
    ),
]


def config_command(
    run: Callable[..., None], text: str | None, epilog: str, parameters: list[inspect.Parameter]
) -> typer.Typer:
    """Return a command with the options of `run`, and parameters whose given values it takes as `options`."""

    def command(**values: Any) -> None:
        arguments = {name: values.pop(name) for name in of_run}
        run(**arguments, options={name: value for name, value in values.items() if value is not None})

    of_run = {name: one for name, one in inspect.signature(run, eval_str=True).parameters.items() if name != "options"}
    signature = inspect.Signature([*of_run.values(), *parameters])
    command.__signature__ = signature  # type: ignore[attr-defined]
    command.__annotations__ = {name: one.annotation for name, one in signature.parameters.items()}
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
    app.command(help=text, epilog=epilog)(command)
    return app


def config_parameters(sections: Sections, places: Places, repeatable: tuple[str, ...] = ()) -> list[inspect.Parameter]:
    """Return a parameter for each field of a configuration; what is not common is hidden from --help."""
    from rich.markup import escape

    parameters = []
    for name, (section, field) in places.items():
        info = sections[section].model_fields[field]
        is_flag = _is_flag(info.annotation)
        default = "" if info.is_required() or is_flag or info.default in (None, (), {}) else f" [{info.default}]"
        extra = info.json_schema_extra
        option = name.replace("_", "-")
        declaration = typer.Option(
            f"--{option}/--no-{option}" if is_flag else f"--{option}",
            help=escape(f"{info.description}{default}"),
            metavar=None if is_flag else _metavar(info.annotation),
            rich_help_panel=section,
            hidden=not (isinstance(extra, dict) and extra["common"]),
            show_default=False,
        )
        kind = bool | None if is_flag else list[str] | None if name in repeatable else str | None
        annotation = Annotated[kind, declaration]  # type: ignore[valid-type]
        parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation))
    return parameters


def commented_yaml(
    configuration: Mapping[str, Mapping[str, Any]],
    sections: Sections,
    needed: Collection[str] = (),
    notes: Mapping[str, str] | None = None,
) -> str:
    """Return a configuration as YAML that reads back as the same; fields without a value are comments."""
    import yaml

    lines = []
    for section, values in configuration.items():
        written: list[str] = []
        unset: list[str] = []
        for field, value in values.items():
            name, info = f"{section}.{field}", sections[section].model_fields[field]
            default = info.get_default(call_default_factory=True)
            default = list(default) if isinstance(default, tuple) else default
            if value not in (None, [], {}) or value != default or name in needed:
                text = yaml.safe_dump({section: {field: value}}, sort_keys=False, allow_unicode=True, width=120)
                written += text.splitlines()[1:]
            else:
                unset.append(f"  # {field}:  # {(notes or {}).get(name, info.description)}")
        lines += [f"{section}:" if written else f"# {section}:", *written, *unset]
    return "\n".join(lines) + "\n"


def _is_flag(annotation: Any) -> bool:
    """Return whether the type of a field is bool, or bool | None."""
    return annotation is bool or set(get_args(annotation)) == {bool, type(None)}


def _metavar(annotation: Any) -> str:
    """Return how --help shows the values of a field."""
    if get_origin(annotation) is Literal:
        choices = "|".join(get_args(annotation))
        return choices if len(choices) < 20 else "TEXT"  # a wide column leaves no room for what an option means
    if get_origin(annotation) in (dict, tuple) or not get_args(annotation):
        return {int: "INTEGER", float: "NUMBER"}.get(annotation, "TEXT")
    return _metavar(get_args(annotation)[0])
