"""What is wrong with the values of a run's spec, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic.fields import FieldInfo

from ..data.columns import TASK_COLUMNS
from ..errors import MAX_NAME_LENGTH, excerpt, unknown_name
from ..metrics.registry import METRICS
from ..tasks.registry import TASKS
from .yaml_values import DEPTH

Fields = Mapping[str, FieldInfo]


def plain(values: Mapping[str, Any]) -> list[str]:
    """What is in a spec that no file of a run could hold: numbers without end, half characters, other things than
    texts, numbers, lists and mappings. A method may be a method."""
    return [
        f"{name if isinstance(name, str) and name.isidentifier() else excerpt(name)}: {problem}"
        for name, value in values.items()
        for problem in [_plain(name, 0) or (_plain(value, 0) if name != "method" or isinstance(value, str) else "")]
        if problem
    ]


def _plain(value: Any, depth: int) -> str:
    """What is wrong with the first value, at or inside this one, that is wrong; empty if there is none."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return f"{excerpt(value)} holds half a character (a lone surrogate)"
        return f"{excerpt(value)} holds a NUL" if "\0" in value else ""
    if isinstance(value, int):
        return "" if abs(value) < 2**63 else f"{excerpt(value)} is too large a number"
    if value is None or isinstance(value, float):
        return ""
    if depth > DEPTH:
        return "it is nested too deeply"
    if isinstance(value, list | tuple):
        return next(filter(None, (_plain(one, depth + 1) for one in value)), "")
    if isinstance(value, Mapping):
        return next(filter(None, (_plain(one, depth + 1) for pair in value.items() for one in pair)), "")
    return f"{excerpt(value)} is no text, number, list or mapping but {type(value).__name__}"


def source(values: Mapping[str, Any], fields: Fields) -> list[str]:
    """What is wrong with where the data comes from: data, or a known task; with data, task is a kind of task."""
    data, task = values.get("data"), values.get("task")
    if data is None and task is None:
        return [f"data is missing: {fields['data'].description}; or a task"]
    if not isinstance(task, str | None):
        return []  # said of the field itself
    if data is None and task not in TASKS:
        return [f"task: {unknown_name('task', str(task), TASKS)}"]
    if data is not None and task is not None and task not in TASK_COLUMNS:
        return [f"task: {unknown_name('kind of task', str(task), TASK_COLUMNS)} Beside data, task is the kind of task"]
    return []


def sizes(values: Mapping[str, Any], fields: Fields) -> list[str]:
    """What is wrong with two sizes of a batch: tokens exclude rows. A default that is written out is not given."""
    given = [f for f in ("batch_size", "device_batch_size") if values.get(f, fields[f].default) != fields[f].default]
    if values.get("batch_tokens") is None or not given:
        return []
    return [f"batch_tokens: give it or {' and '.join(given)}, not both"]


def metric_options(values: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What is wrong with the options of metrics: no such metric, no such option, a value of another kind."""
    problems = [unknown_name("metric", name, METRICS) for name in values if name not in METRICS]
    for name in values.keys() & METRICS.keys():
        known = METRICS[name].options
        problems += [unknown_name("option", option, known, name) for option in values[name] if option not in known]
        problems += [
            f"{name}.{option}: {excerpt(value)} is not of the kind of its default, {known[option]!r}"
            for option, value in values[name].items()
            if option in known and not _alike(known[option], value)
        ]
    return problems


def _alike(default: Any, value: Any) -> bool:
    """Whether a value is of the same kind as a default; one that is None is a name or a number."""
    if default is None:
        return value is None or isinstance(value, str | int)
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(default, bool) and isinstance(value, bool)
    return isinstance(value, int | float) if isinstance(default, int | float) else isinstance(value, type(default))


def problem(error: Any, fields: Fields) -> str:
    """One problem that pydantic found, in our words."""
    parts = [str(part) for part in error["loc"] if not str(part).startswith(("dict[", "tuple["))]
    place = ".".join(part if len(part) <= MAX_NAME_LENGTH else excerpt(part) for part in parts)
    if error["type"] == "extra_forbidden":
        return unknown_name("option", error["loc"][0], [*fields, "output"])
    if error["type"] == "missing":
        return f"{place} is missing: {fields[place.partition('.')[0]].description}"
    told = error.get("ctx", {}).get("error")
    message = str(told) if told is not None else error["msg"][0].lower() + error["msg"][1:]
    return f"{place}: {message}" + ("" if told is not None else f", not {excerpt(error['input'])}")
