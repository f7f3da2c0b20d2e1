"""A sweep as a value: models × tasks × axes × methods × seeds, expanded into runs that are named by their content."""

from __future__ import annotations

import itertools
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ModelWrapValidatorHandler, ValidationError, field_validator
from pydantic import model_validator as validator

from ...errors import DeltuneError, error_from_problems, unknown_name
from ...methods import budget as budgets
from ...methods.counting import count
from ...models import load_config
from ...training.config import PLACES, RunConfig, flatten, read_values
from ...training.presets import merge_values
from .jobs import Job, run_job
from .outcomes import Cell

Values = dict[str, Any]

FIXED = ("model", "task", "method", "seed", "seeds")
"""Fields of a run that a sweep's own axes give."""
UNSEEN = ("Cc", "Cs", "Zl", "Zp")
"""Categories of Unicode that no label has: control characters, halves of characters, separators of lines."""


class Sweep(BaseModel):
    """Every combination of models, tasks, axes, methods and seeds is a run; what is given later wins over earlier.

    An entry of models, tasks, axes and methods is a label with its values: fields of a run's spec. A list is short for
    labels that are the values themselves: models: [minilm], tasks: [sick, cb], methods: [layernorm, "lora(rank=8)"].
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1, description="of the study")
    models: dict[str, Values] = Field(description="label: {model: …} and other fields of a run")
    tasks: dict[str, Values] = Field(description="label: {task: …} or {data: …} and other fields")
    methods: dict[str, Values] = Field(description='label: {method: …} and other fields; a size may be "?"')
    seeds: tuple[int, ...] = Field(default=(0, 1, 2), min_length=1, description="a run of each")
    axes: dict[str, dict[str, Values]] = Field(
        default_factory=dict, description="further axes: name: {label: {field of a run: value}}"
    )
    options: Values = Field(default_factory=dict, description="fields of every run")
    metric: str | None = Field(default=None, description="what the tables show; default: the first of each task")
    budget: str | None = Field(default=None, description="solves the size written as ? in methods: 0.5% or a number")
    align: str | None = Field(default=None, description="solves it for the count of that method")

    @field_validator("models", "tasks", "methods", mode="before")
    @classmethod
    def _labelled(cls, value: Any, info: Any) -> Any:
        field = str(info.field_name).removesuffix("s")
        if isinstance(value, str):
            value = [value]
        if isinstance(value, list | tuple):
            return {" ".join(str(item).split()): {field: item} for item in value}
        if isinstance(value, Mapping):
            return {str(label): item if isinstance(item, Mapping) else {field: item} for label, item in value.items()}
        return value

    @field_validator("seeds")
    @classmethod
    def _different(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(value)) < len(value):
            raise ValueError("seeds are different ones")
        return value

    @validator(mode="wrap")
    @classmethod
    def _all_at_once(cls, values: Any, handler: ModelWrapValidatorHandler[Sweep]) -> Sweep:
        try:
            made = handler(values)
        except ValidationError as error:
            raise error_from_problems("the study is wrong", [_problem(e) for e in error.errors()]) from error
        problems = [
            f"options of {place}: {unknown_name('option', field, PLACES)}"
            for place, fields in made._fields()
            for field in flatten(fields)
            if field not in PLACES
        ]
        problems += [f"options: {field} is an axis of its own" for field in made.options if field in FIXED]
        problems += [
            f"{place}: {label!r} is no label, which is one line without control characters"
            for place, label in made._labels()
            if any(unicodedata.category(character) in UNSEEN for character in label)
        ]
        problems += [f"axes: {name} is an axis already" for name in made.axes if name in FIXED]
        if made.budget and made.align:
            problems.append("give budget or align, not both")
        if problems:
            raise error_from_problems("the study is wrong", problems)
        return made

    def _labels(self) -> Iterator[tuple[str, str]]:
        """Every word of a cell, with the entry that it stands in."""
        yield "name", self.name
        yield from (("axes", axis) for axis in self.axes)
        for entry, labels in (
            ("models", self.models), ("tasks", self.tasks), ("methods", self.methods),
            *((f"axes {axis}", labels) for axis, labels in self.axes.items()),
        ):  # fmt: skip
            yield from ((entry, label) for label in labels)

    def _fields(self) -> Iterator[tuple[str, Values]]:
        yield "every run", self.options
        for name, axis in (
            ("models", self.models), ("tasks", self.tasks), ("methods", self.methods), *self.axes.items(),
        ):  # fmt: skip
            for label, values in axis.items():
                yield f"{name} {label}", values

    def cells(self, data_root: str | None = None) -> list[PlannedRun]:
        """Every combination with its run, models outermost, seeds innermost. Errors: all that is wrong, at once."""
        found, problems = [], []
        names = list(self.axes)
        for model, task, labels, method, seed in itertools.product(
            self.models, self.tasks, itertools.product(*self.axes.values()), self.methods, self.seeds
        ):
            place = dict(zip(names, labels, strict=True))
            cell = {"model": model, "task": task, **place, "method": method, "seed": seed}
            values: Values = {} if data_root is None else {"data_root": data_root}
            layers = [self.options, self.models[model], self.tasks[task], self.methods[method]]
            layers += [self.axes[axis][label] for axis, label in place.items()]
            for layer in (*layers, {"seed": seed}):
                values = merge_values(values, flatten(layer))
            try:
                found.append(PlannedRun(cell, RunConfig.from_flat(**self._solved(values))))
            except DeltuneError as error:
                said = f"{', '.join(f'{axis} {label}' for axis, label in cell.items() if axis != 'seed')}: {error}"
                problems += [said] if said not in problems else []
        if problems:
            raise error_from_problems(f"study {self.name} cannot be run", problems)
        return found

    def _solved(self, values: Values) -> Values:
        """The method's size where it is written as a question mark."""
        method = values.get("method")
        if not isinstance(method, str) or "?" not in method or not (self.budget or self.align):
            return values
        config = load_config(str(values.get("model")))
        wanted = count(config, self.align).method if self.align else str(self.budget)
        return {**values, "method": repr(budgets.fit(config, method, wanted))}

    def yaml(self) -> str:
        """The study as a file."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)


@dataclass(frozen=True)
class PlannedRun:
    """A cell of a sweep and the run that fills it."""

    cell: Cell
    spec: RunConfig

    @property
    def work(self) -> Job:
        return run_job(self.spec)


def read_sweep(path: str | Path) -> Sweep:
    """The study of a YAML file. Errors: no such file, broken YAML, everything that is wrong with the study."""
    return Sweep(**read_values(path))


def _problem(error: Any) -> str:
    place = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return unknown_name("entry", place, Sweep.model_fields)
    if error["type"] == "missing":
        return f"{place} is missing: {Sweep.model_fields[place].description}"
    return f"{place}: {error['msg'][0].lower()}{error['msg'][1:]}, not {error['input']!r}"
