"""Options of the command line that are generated from the fields of a configuration."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic import BaseModel
from rich.markup import escape

Sections = Mapping[str, type[BaseModel]]
Places = Mapping[str, tuple[str, str]]


def config_parameters(sections: Sections, places: Places, repeatable: tuple[str, ...] = ()) -> list[inspect.Parameter]:
    """Return a parameter for each field of a configuration; what is not common is hidden from --help.

    Args:
        sections: The models of the sections, by name.
        places: Flat name -> section and field.
        repeatable: Flat names of the fields whose option may be given several times.
    """
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


def _is_flag(annotation: Any) -> bool:
    """Whether a field is on or off, or perhaps neither."""
    return annotation is bool or set(get_args(annotation)) == {bool, type(None)}


def _metavar(annotation: Any) -> str:
    """Return how --help shows the values of a field."""
    if get_origin(annotation) is Literal:
        choices = "|".join(get_args(annotation))
        return choices if len(choices) < 20 else "TEXT"  # a wide column leaves no room for what an option means
    if get_origin(annotation) in (dict, tuple) or not get_args(annotation):
        return {int: "INTEGER", float: "NUMBER"}.get(annotation, "TEXT")
    return _metavar(get_args(annotation)[0])
