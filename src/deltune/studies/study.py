"""A study as a value: its question, the cells to fill with the job of each, its tables and figures.

A sweep is the simplest study: models × tasks × axes × methods × seeds, read from YAML and expanded into runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    field_validator,
    model_validator,
)

from ..config import read_values
from ..errors import DeltuneError, error_from_problems, unknown_name
from ..methods import budget as budgets
from ..methods.counting import count
from ..methods.registry import default_learning_rate
from ..models import load_config
from ..train import PLACES, RunConfig, flatten, merge_values
from .jobs.job import NO_ROOTS, Cell, Job, JobMaker, Outcome, Roots, run_job
from .jobs.store import JobRecord
from .report.figure_spec import Bars, Numbers, TableSpec, ViewSpec

Values = dict[str, Any]

SWEEP_AXES = ("model", "task", "method", "seed", "seeds")
"""Fields of a run that come from the sweep's own axes."""
SEED_PLACEHOLDER = "{seed}"
"""In a method: the seed of the run."""


class Sweep(BaseModel):
    """A run for every combination of models, tasks, axes, methods and seeds.

    Each entry of models, tasks, axes and methods maps a label to fields of a run's spec; where several set the same
    field, the axes win over methods, methods over tasks, tasks over models, and models over options. A list is short
    for labels that are the values themselves: models: [minilm], tasks: [sick, cb], methods: [bitfit, "lora(rank=8)"].
    In a method {seed} stands for the seed of the run, as in "apet(lora, parameters=1000, seed={seed})".

    A run without lr has the method's default for long runs, whatever its number of steps, and not the higher one that
    `deltune train` takes for short runs. Give lr in options or methods for another.
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
        if isinstance(value, Mapping) and any(not str(label).isprintable() for label in value):
            raise ValueError("a label is one line of text")
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
        problems += [f"axes: {name} is already an axis of every study" for name in sweep.axes if name in SWEEP_AXES]
        if sweep.budget and sweep.align:
            problems.append("give budget or align, not both")
        if problems:
            raise error_from_problems("the study is wrong", problems)
        return sweep

    def _entries(self) -> dict[str, dict[str, Values]]:
        """Return the entries that have labels, by where they stand."""
        named = {f"axes {axis}": labels for axis, labels in self.axes.items()}
        return {"models": self.models, "tasks": self.tasks, "methods": self.methods, **named}

    def _fields(self) -> Iterator[tuple[str, Values]]:
        """Yield every group of fields of a run, with a description of where it is."""
        yield "every run", self.options
        for entry, labels in self._entries().items():
            yield from ((f"{entry} {label}", values) for label, values in labels.items())

    def cells(self, data_root: str | None = None) -> list[PlannedRun]:
        """Expand the sweep, with models outermost and seeds innermost."""
        here: Values = {} if data_root is None else {"data_root": data_root}
        axis_labels = [dict(zip(self.axes, labels, strict=True)) for labels in itertools.product(*self.axes.values())]
        rows = [
            (
                {"model": model, "task": task, **labels, "method": method, "seed": seed},
                [here, self.options, self.models[model], self.tasks[task], self.methods[method],
                 *(self.axes[axis][label] for axis, label in labels.items())],
            )
            for model, task, labels, method, seed in itertools.product(
                self.models, self.tasks, axis_labels, self.methods, self.seeds
            )
        ]  # fmt: skip
        return planned_runs(self.name, rows, solve=self._solve_size)

    def _solve_size(self, values: Values) -> Values:
        """Solve the method's size where it is written as a question mark."""
        method = values.get("method")
        if not isinstance(method, str) or "?" not in method or not (self.budget or self.align):
            return values
        config = load_config(str(values.get("model")))
        target = count(config, self.align).method if self.align else str(self.budget)
        return {**values, "method": repr(budgets.fit(config, method, target))}


@dataclass(frozen=True)
class PlannedRun:
    """A cell of a sweep, its run, and the job that is made of it."""

    cell: Cell
    spec: RunConfig
    job: Job


def planned_runs(
    study: str,
    rows: Iterable[tuple[Cell, Sequence[Mapping[str, Any]]]],
    roots: Roots = NO_ROOTS,
    make_job: JobMaker = run_job,
    solve: Callable[[Values], Values] = lambda values: values,
) -> list[PlannedRun]:
    """Return the run of each cell, whose fields are given in layers, of which the later win, and last the cell's seed.

    All mistakes of a study are one error.
    """
    runs: list[PlannedRun] = []
    problems: dict[str, None] = {}
    for cell, layers in rows:
        values: Values = {"pooling": "model"}  # as all stored results, unless the study gives another
        for layer in (*layers, {"seed": cell["seed"]}):
            values = merge_values(values, flatten(layer))
        if isinstance(values.get("method"), str):
            values["method"] = values["method"].replace(SEED_PLACEHOLDER, str(cell["seed"]))
        try:
            config = RunConfig.from_flat(**solve(values))
            if config.optim.lr is None and not {"lr", "method"} & {*config.runtime.search}:
                config = config.replace(lr=default_learning_rate(config.method.expression))
            runs.append(PlannedRun(cell, config, make_job(config, roots)))
        except DeltuneError as error:
            problems[f"{', '.join(f'{axis} {label}' for axis, label in cell.items() if axis != 'seed')}: {error}"] = (
                None
            )
    if problems:
        raise error_from_problems(f"study {study} cannot be run", list(problems))
    return runs


def read_sweep(path: str | Path) -> Sweep:
    """Read a sweep from a YAML file."""
    return Sweep(**read_values(path))


def _problem(error: Any) -> str:
    place = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return unknown_name("entry", place, Sweep.model_fields)
    if error["type"] == "missing":
        return f"{place} is missing: {Sweep.model_fields[place].description}"
    return f"{place}: {error['msg'][0].lower()}{error['msg'][1:]}, not {error['input']!r}"


Records = Mapping[str, JobRecord]
"""Name of a job -> its record, for the jobs that are done."""

RESULT_FIELDS = ("scores", "count", "examples", "curve", "seconds")
"""Fields of a job's result that become fields of its outcome; the others become its extra."""


@dataclass(frozen=True)
class PlannedCell:
    """A cell of a study and the job that fills it.

    Attributes:
        cell: The cell.
        job: Its job; None while the results so far do not determine it.
        extra: What other jobs say about this cell.
        why: Why the cell is empty as long as it is.
        lost: Whether it will never be filled, because the job that would determine it failed.
        tries: Cells whose jobs determine this cell's job.
    """

    cell: Cell
    job: Job | None
    extra: Mapping[str, Any] = field(default_factory=dict)
    why: str = "not run yet"
    lost: bool = False
    tries: tuple[PlannedCell, ...] = ()

    def record(self, records: Records) -> JobRecord | None:
        """Return the record of its job, if that is known and done."""
        return None if self.job is None else records.get(self.job.name)


CellPlan = Callable[[Records], Sequence[PlannedCell]]
"""What is done so far -> every cell of a study."""

OutcomeReader = Callable[[PlannedCell, JobRecord], Outcome]
"""Cell and record of its job -> its outcome."""


def job_outcome(planned: PlannedCell, record: JobRecord) -> Outcome:
    """Return the outcome of a job: its result, or the error that it ended with."""
    spec = record.spec.get("run", record.spec)
    if record.result is None:
        return Outcome(planned.cell, spec, seconds=record.seconds, error=record.error or "no result")
    fields = {name: record.result[name] for name in RESULT_FIELDS if name in record.result}
    extra = {name: value for name, value in record.result.items() if name not in RESULT_FIELDS}
    return Outcome(planned.cell, spec, **fields, extra={**extra, **planned.extra})


@dataclass(frozen=True)
class Study:
    """An experiment: what is run, what is shown of it, and what it is to answer.

    Attributes:
        name: Its name, such as "ln/nlu".
        question: What it asks, with the paper's table or figure.
        plan_cells: Every cell with its job, given what is done so far.
        views: The tables and figures.
        metric: The score that claims are about, or several: the first that a task has.
        notes: What differs from the paper.
        read_outcome: What turns the record of a job into the outcome of its cell.
        lower: Whether lower values of the metric are better.
        repetition: What the labels of the axis of seeds are called, in the singular.
    """

    name: str
    question: str
    plan_cells: CellPlan
    views: tuple[ViewSpec, ...] = ()
    metric: Numbers = "accuracy"
    notes: str = ""
    read_outcome: OutcomeReader = job_outcome
    lower: bool = field(default=False, kw_only=True)
    repetition: str = "seed"

    def axes(self) -> dict[str, list[str]]:
        """Return the axes of the study with the labels of each, in the order of the cells."""
        axes: dict[str, dict[str, None]] = {}
        for planned in self.plan_cells({}):
            for axis, label in planned.cell.items():
                axes.setdefault(axis, {})[str(label)] = None
        return {axis: list(labels) for axis, labels in axes.items()}

    def jobs(self, records: Records) -> list[Job]:
        """Return the jobs of all cells and tries that are known now, each once and with its first cell's labels."""
        cells: dict[Job, Cell] = {}
        for cell in self.plan_cells(records):
            for planned in (*cell.tries, cell):
                if planned.job is not None:
                    cells.setdefault(planned.job, planned.cell)
        return [replace(job, cell=cell) for job, cell in cells.items()]

    def outcomes(self, records: Records) -> list[Outcome]:
        """Return the outcomes of every cell.

        A cell without a record is waiting; it has failed if the search that would determine its job has failed.
        """
        return [
            Outcome(planned.cell, {} if planned.job is None else planned.job.spec, error=planned.why,
                    waiting=not planned.lost)
            if (record := planned.record(records)) is None else self.read_outcome(planned, record)
            for planned in self.plan_cells(records)
        ]  # fmt: skip


def plan_runs(runs: Sequence[PlannedRun]) -> CellPlan:
    """Return the cells of runs.

    Where runs search hyperparameters, only the first seed searches; the other seeds use what it chose.
    """
    first_seeds = {labels_without_seed(run.cell): run for run in reversed(runs)}

    def plan_cells(records: Records) -> list[PlannedCell]:
        return [_plan_cell(run, first_seeds[labels_without_seed(run.cell)], records) for run in runs]

    return plan_cells


def labels_without_seed(cell: Cell) -> tuple[Any, ...]:
    """Return the labels of a cell on all axes but the seed's: runs that repeat each other share them."""
    return tuple(label for axis, label in cell.items() if axis != "seed")


def _plan_cell(run: PlannedRun, first_seed: PlannedRun, records: Records) -> PlannedCell:
    if not run.spec.runtime.search or run is first_seed:
        return PlannedCell(run.cell, run.job)
    record = records.get(first_seed.job.name)
    if record is None:
        return PlannedCell(run.cell, None)
    if record.result is None:
        return PlannedCell(run.cell, None, why=f"the search under the first seed failed: {record.error}", lost=True)
    best = {name: record.result["best"][name] for name in run.spec.runtime.search}
    return PlannedCell(run.cell, run_job(run.spec.single(**best), run.job.roots))


def study_from_file(path: str | Path, data_root: str | Path | None = None) -> Study:
    """Read a sweep from a YAML file and make a study of it, with a table of scores and, without further axes, bars."""
    sweep = read_sweep(path)
    axes = tuple(sweep.axes)
    metric = sweep.metric or ("accuracy", "entity_f1", "exact", "rougeL", "bleu", "perplexity")
    by_model = "model" if len(sweep.models) > 1 else ""
    table = TableSpec(title="Scores", rows="method", columns=("task", *axes), metric=metric, groups=by_model)
    bars = () if axes else (Bars(title="Scores, drawn", y=metric, panels=by_model),)
    plan_cells = plan_runs(sweep.cells(None if data_root is None else str(data_root)))
    return Study(sweep.name, f"The sweep of {Path(path).name}", plan_cells, (table, *bars), metric)


def select_cells(studies: Sequence[Study], only: Sequence[str]) -> list[Study]:
    """Restrict studies to the cells with certain labels, and leave out those that have no such cell.

    `only` are patterns AXIS=LABEL, in which * is a wild card. A cell must match one of the patterns of every axis.
    Each pattern must match a label of one of the studies.
    """
    if not only:
        return list(studies)
    labels_of: dict[str, set[str]] = {}
    for study in studies:
        for axis, labels in study.axes().items():
            labels_of.setdefault(axis, set()).update(labels)
    place = studies[0].name if len(studies) == 1 else "these studies"
    patterns: dict[str, list[str]] = {}
    wrong = []
    for text in only:
        axis, sign, pattern = text.partition("=")
        patterns.setdefault(axis, []).append(pattern)
        if not sign:
            wrong.append(f"{text!r} is not AXIS=LABEL")
        elif axis not in labels_of:
            wrong.append(unknown_name("axis", axis, labels_of, place))
        elif not any(fnmatch(label, pattern) for label in labels_of[axis]):
            wrong.append(unknown_name(axis, pattern, labels_of[axis], place))
    if wrong:
        raise error_from_problems("these cells cannot be chosen (`deltune study show` lists axes and labels)", wrong)

    def matches(cell: Cell) -> bool:
        return all(
            axis in cell and any(fnmatch(str(cell[axis]), one) for one in of_axis) for axis, of_axis in patterns.items()
        )

    def restricted(study: Study) -> Study:
        return replace(study, plan_cells=lambda done: [one for one in study.plan_cells(done) if matches(one.cell)])

    return [one for one in map(restricted, studies) if one.plan_cells({})]
