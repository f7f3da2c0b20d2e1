"""What is wrong with the values of a run's spec, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic.fields import FieldInfo

from ..errors import unknown
from ..sources.columns import KINDS
from ..tasks.table import TASKS

Fields = Mapping[str, FieldInfo]


def source(values: Mapping[str, Any], fields: Fields) -> list[str]:
    """What is wrong with where the data comes from: data, or a known task; with data, task is a kind of task."""
    data, task = values.get("data"), values.get("task")
    if data is None and task is None:
        return [f"data is missing: {fields['data'].description}; or a task"]
    if data is None and task not in TASKS:
        return [f"task: {unknown('task', str(task), TASKS)}"]
    if data is not None and task is not None and task not in KINDS:
        return [f"task: {unknown('kind of task', str(task), KINDS)} Beside data, task is the kind of task"]
    return []


def sizes(values: Mapping[str, Any], fields: Fields) -> list[str]:
    """What is wrong with two sizes of a batch: tokens exclude rows. A default that is written out is not given."""
    given = [f for f in ("batch_size", "device_batch_size") if values.get(f, fields[f].default) != fields[f].default]
    if values.get("batch_tokens") is None or not given:
        return []
    return [f"batch_tokens: give it or {' and '.join(given)}, not both"]


def problem(error: Any, fields: Fields) -> str:
    """One problem that pydantic found, in our words."""
    place = ".".join(str(part) for part in error["loc"] if not str(part).startswith(("dict[", "tuple[")))
    if error["type"] == "extra_forbidden":
        return unknown("option", error["loc"][0], [*fields, "output"])
    if error["type"] == "missing":
        return f"{place} is missing: {fields[place.partition('.')[0]].description}"
    told = error.get("ctx", {}).get("error")
    message = str(told) if told is not None else error["msg"][0].lower() + error["msg"][1:]
    return f"{place}: {message}" + ("" if told is not None else f", not {error['input']!r}")
