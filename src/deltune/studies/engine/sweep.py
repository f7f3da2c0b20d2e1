"""A sweep: models × tasks × axes × methods × seeds, read from YAML and expanded into runs."""

from __future__ import annotations

import itertools
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    field_validator,
    model_validator,
)

from ...errors import DeltuneError, error_from_problems, unknown_name
from ...methods import budget as budgets
from ...methods.counting import count
from ...models import load_config
from ...training.config import PLACES, RunConfig, flatten, read_values
from ...training.presets import merge_values
from .jobs import Job, run_job
from .outcomes import Cell

Values = dict[str, Any]

SWEEP_AXES = ("model", "task", "method", "seed", "seeds")
"""Fields of a run that come from the sweep's own axes."""
FORBIDDEN_CATEGORIES = ("Cc", "Cs", "Zl", "Zp")
"""Unicode categories that no label may contain: control characters, surrogates, line separators."""


class Sweep(BaseModel):
    """A run for every combination of models, tasks, axes, methods and seeds.

    Each entry of models, tasks, axes and methods maps a label to fields of a run's spec; where several set the same
    field, the axes win over methods, methods over tasks, tasks over models, and models over options. A list is short
    for labels that are the values themselves: models: [minilm], tasks: [sick, cb], methods: [bitfit, "lora(rank=8)"].
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1, description="name of the study")
    models: dict[str, Values] = Field(description="label: {model: …} and other fields of a run")
    tasks: dict[str, Values] = Field(description="label: {task: …} or {data: …} and other fields")
    methods: dict[str, Values] = Field(description='label: {method: …} and other fields; a size may be "?"')
    seeds: tuple[int, ...] = Field(default=(0, 1, 2), min_length=1, description="one run for each")
    axes: dict[str, dict[str, Values]] = Field(
        default_factory=dict, description="further axes: name: {label: {field of a run: value}}"
    )
    options: Values = Field(default_factory=dict, description="fields of every run")
    metric: str | None = Field(default=None, description="the metric of the tables; default: the first of each task")
    budget: str | None = Field(
        default=None,
        description="share (0.5%) or number of parameters for which the size written as ? in methods is solved",
    )
    align: str | None = Field(default=None, description="a method whose count it is solved for instead")

    @field_validator("models", "tasks", "methods", mode="before")
    @classmethod
    def _label_entries(cls, value: Any, info: Any) -> Any:
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
    def _check_seeds(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(value)) < len(value):
            raise ValueError("every seed must be a different one")
        return value

    @model_validator(mode="wrap")
    @classmethod
    def _check(cls, values: Any, handler: ModelWrapValidatorHandler[Sweep]) -> Sweep:
        try:
            sweep = handler(values)
        except ValidationError as error:
            raise error_from_problems("the study is wrong", [_problem(e) for e in error.errors()]) from error
        problems = [
            f"options of {place}: {unknown_name('option', field, PLACES)}"
            for place, fields in sweep._fields()
            for field in flatten(fields)
            if field not in PLACES
        ]
        problems += [
            f"options: {field} cannot be set here, because it is an axis of the study"
            for field in sweep.options
            if field in SWEEP_AXES
        ]
        problems += [
            f"{place}: {label!r} is not a label; a label is one line without control characters"
            for place, label in sweep._labels()
            if any(unicodedata.category(character) in FORBIDDEN_CATEGORIES for character in label)
        ]
        problems += [f"axes: {name} is already an axis of every study" for name in sweep.axes if name in SWEEP_AXES]
        if sweep.budget and sweep.align:
            problems.append("give budget or align, not both")
        if problems:
            raise error_from_problems("the study is wrong", problems)
        return sweep

    def _labels(self) -> Iterator[tuple[str, str]]:
        """Yield every label, with the entry that it belongs to."""
        yield "name", self.name
        yield from (("axes", axis) for axis in self.axes)
        for entry, labels in (
            ("models", self.models), ("tasks", self.tasks), ("methods", self.methods),
            *((f"axes {axis}", labels) for axis, labels in self.axes.items()),
        ):  # fmt: skip
            yield from ((entry, label) for label in labels)

    def _fields(self) -> Iterator[tuple[str, Values]]:
        """Yield every group of fields of a run, with a description of where it is."""
        yield "every run", self.options
        for name, axis in (
            ("models", self.models), ("tasks", self.tasks), ("methods", self.methods), *self.axes.items(),
        ):  # fmt: skip
            for label, values in axis.items():
                yield f"{name} {label}", values

    def cells(self, data_root: str | None = None) -> list[PlannedRun]:
        """Expand the sweep, with models outermost and seeds innermost.

        Args:
            data_root: The folder with the folders of known tasks.

        Raises:
            DeltuneError: Everything that is wrong with any run, at once.
        """
        runs, problems = [], []
        names = list(self.axes)
        for model, task, labels, method, seed in itertools.product(
            self.models, self.tasks, itertools.product(*self.axes.values()), self.methods, self.seeds
        ):
            axis_labels = dict(zip(names, labels, strict=True))
            cell = {"model": model, "task": task, **axis_labels, "method": method, "seed": seed}
            values: Values = {} if data_root is None else {"data_root": data_root}
            layers = [self.options, self.models[model], self.tasks[task], self.methods[method]]
            layers += [self.axes[axis][label] for axis, label in axis_labels.items()]
            for layer in (*layers, {"seed": seed}):
                values = merge_values(values, flatten(layer))
            try:
                runs.append(PlannedRun(cell, RunConfig.from_flat(**self._solve_size(values))))
            except DeltuneError as error:
                problem = f"{', '.join(f'{axis} {label}' for axis, label in cell.items() if axis != 'seed')}: {error}"
                problems += [problem] if problem not in problems else []
        if problems:
            raise error_from_problems(f"study {self.name} cannot be run", problems)
        return runs

    def _solve_size(self, values: Values) -> Values:
        """Solve the method's size where it is written as a question mark."""
        method = values.get("method")
        if not isinstance(method, str) or "?" not in method or not (self.budget or self.align):
            return values
        config = load_config(str(values.get("model")))
        target = count(config, self.align).method if self.align else str(self.budget)
        return {**values, "method": repr(budgets.fit(config, method, target))}

    def yaml(self) -> str:
        """Return the sweep as the text of a YAML file."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)


@dataclass(frozen=True)
class PlannedRun:
    """A cell of a sweep and the run that fills it."""

    cell: Cell
    spec: RunConfig

    @property
    def job(self) -> Job:
        """The job of the run."""
        return run_job(self.spec)


def read_sweep(path: str | Path) -> Sweep:
    """Read a sweep from a YAML file.

    Raises:
        DeltuneError: There is no such file, it is not YAML, or the sweep is wrong.
    """
    return Sweep(**read_values(path))


def _problem(error: Any) -> str:
    place = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return unknown_name("entry", place, Sweep.model_fields)
    if error["type"] == "missing":
        return f"{place} is missing: {Sweep.model_fields[place].description}"
    return f"{place}: {error['msg'][0].lower()}{error['msg'][1:]}, not {error['input']!r}"
