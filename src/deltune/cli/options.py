"""Options of the command line that are generated from the fields of a configuration."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
import yaml
from pydantic import BaseModel
from rich.markup import escape

Sections = Mapping[str, type[BaseModel]]
Places = Mapping[str, tuple[str, str]]


def config_parameters(sections: Sections, places: Places, repeatable: tuple[str, ...] = ()) -> list[inspect.Parameter]:
    """Return a parameter for each field of a configuration; what is not common is hidden from --help."""
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
    """Whether the type of a field is bool, or bool | None."""
    return annotation is bool or set(get_args(annotation)) == {bool, type(None)}


def _metavar(annotation: Any) -> str:
    """Return how --help shows the values of a field."""
    if get_origin(annotation) is Literal:
        choices = "|".join(get_args(annotation))
        return choices if len(choices) < 20 else "TEXT"  # a wide column leaves no room for what an option means
    if get_origin(annotation) in (dict, tuple) or not get_args(annotation):
        return {int: "INTEGER", float: "NUMBER"}.get(annotation, "TEXT")
    return _metavar(get_args(annotation)[0])
