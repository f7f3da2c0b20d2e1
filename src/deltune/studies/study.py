"""A study as a value: its question, the cells to fill with the job of each, its tables and figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from ..errors import error_from_problems, unknown_name
from .engine.jobs import Job, run_job
from .engine.outcomes import Cell, Outcome
from .engine.store import JobRecord
from .engine.sweep import PlannedRun, Sweep, read_sweep
from .report.figure_spec import Bars, Numbers, TableSpec, ViewSpec

Records = Mapping[str, JobRecord]
"""Name of a job -> its record, for the jobs that are done."""

RESULT_FIELDS: dict[str, Callable[[Any], bool]] = {
    "scores": lambda value: _is_mapping_of(value, lambda number: isinstance(number, float | int)),
    "count": lambda value: isinstance(value, Mapping),
    "examples": lambda value: _is_mapping_of(value, lambda numbers: isinstance(numbers, list)),
    "curve": lambda value: isinstance(value, list) and all(isinstance(line, Mapping) for line in value),
    "seconds": lambda value: isinstance(value, float | int),
}
"""Fields of a job's result that become fields of its outcome, with a check of each; the others become its extra."""


@dataclass(frozen=True)
class PlannedCell:
    """A cell of a study and the job that fills it.

    Attributes:
        cell: The cell.
        job: Its job; None while the results so far do not determine it.
        extra: What other jobs say about this cell.
        why: Why the cell is empty as long as it is.
        lost: Whether it will never be filled, because the job that would determine it failed.
    """

    cell: Cell
    job: Job | None
    extra: Mapping[str, Any] = field(default_factory=dict)
    why: str = "not run yet"
    lost: bool = False


CellPlan = Callable[[Records], Sequence[PlannedCell]]
"""What is done so far -> every cell of a study."""

OutcomeReader = Callable[[PlannedCell, JobRecord], list[Outcome]]
"""What turns the record of a cell's job into outcomes."""


def job_outcomes(planned: PlannedCell, record: JobRecord) -> list[Outcome]:
    """Return the one outcome of a job: its result, or the error that it ended with."""
    spec = record.spec.get("run", record.spec)
    if record.result is None:
        return [Outcome(planned.cell, spec, seconds=record.seconds, error=record.error or "no result")]
    fields = {name: record.result[name] for name in RESULT_FIELDS if name in record.result}
    if wrong := [name for name, value in fields.items() if not RESULT_FIELDS[name](value)]:
        return [Outcome(planned.cell, spec, error=f"its result was not written by deltune: {', '.join(wrong)}")]
    extra = {name: value for name, value in record.result.items() if name not in RESULT_FIELDS}
    return [Outcome(planned.cell, spec, **fields, extra={**extra, **planned.extra})]


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
        read_outcomes: What turns the record of a job into outcomes.
        lower: Whether lower values of the metric are better.
    """

    name: str
    question: str
    plan_cells: CellPlan
    views: tuple[ViewSpec, ...] = ()
    metric: Numbers = "accuracy"
    notes: str = ""
    read_outcomes: OutcomeReader = job_outcomes
    lower: bool = False

    def jobs(self, records: Records) -> list[Job]:
        """Return the jobs of all cells that are known now, each once."""
        return list(dict.fromkeys(planned.job for planned in self.plan_cells(records) if planned.job is not None))

    def outcomes(self, records: Records) -> list[Outcome]:
        """Return the outcomes of every cell.

        A cell without a record is waiting; it has failed if the search that would determine its job has failed.
        """
        outcomes: list[Outcome] = []
        for planned in self.plan_cells(records):
            record = None if planned.job is None else records.get(planned.job.name)
            if record is None:
                spec = {} if planned.job is None else planned.job.spec
                outcomes.append(Outcome(planned.cell, spec, error=planned.why, waiting=not planned.lost))
            else:
                outcomes += self.read_outcomes(planned, record)
        return outcomes


def _is_mapping_of(value: Any, is_valid: Callable[[Any], bool]) -> bool:
    return isinstance(value, Mapping) and all(is_valid(one) for one in value.values())


def plan_sweep(sweep: Sweep, data_root: str | None = None) -> CellPlan:
    """Return the cells of a sweep.

    Where runs search hyperparameters, only the first seed searches; the other seeds use what it chose.

    Args:
        sweep: The sweep.
        data_root: The folder with the folders of known tasks.

    Raises:
        DeltuneError: Everything that is wrong with any run.
    """
    runs = sweep.cells(data_root)
    jobs = {id(run): run.job for run in runs}
    first_seeds = {_labels_without_seed(run): run for run in reversed(runs)}

    def plan_cells(records: Records) -> list[PlannedCell]:
        return [_plan_cell(run, first_seeds[_labels_without_seed(run)], jobs, records) for run in runs]

    return plan_cells


def _labels_without_seed(run: PlannedRun) -> tuple[Any, ...]:
    return tuple(label for axis, label in run.cell.items() if axis != "seed")


def _plan_cell(run: PlannedRun, first_seed: PlannedRun, jobs: Mapping[int, Job], records: Records) -> PlannedCell:
    if not run.spec.runtime.search or run is first_seed:
        return PlannedCell(run.cell, jobs[id(run)])
    record = records.get(jobs[id(first_seed)].name)
    if record is None:
        return PlannedCell(run.cell, None)
    if record.result is None:
        return PlannedCell(run.cell, None, why=f"the search under the first seed failed: {record.error}", lost=True)
    best = {name: record.result["best"][name] for name in run.spec.runtime.search}
    return PlannedCell(run.cell, run_job(run.spec.single(**best)))


def study_from_file(path: str | Path, data_root: str | Path | None = None) -> Study:
    """Read a sweep from a YAML file and make a study of it, with a table of scores and, without further axes, bars.

    Args:
        path: The file.
        data_root: The folder with the folders of known tasks.

    Raises:
        DeltuneError: Everything that is wrong with the file or a run.
    """
    sweep = read_sweep(path)
    axes = tuple(sweep.axes)
    metric = sweep.metric or ("accuracy", "entity_f1", "exact", "rougeL", "bleu", "perplexity")
    by_model = "model" if len(sweep.models) > 1 else ""
    table = TableSpec(title="Scores", rows="method", columns=("task", *axes), metric=metric, groups=by_model)
    bars = () if axes else (Bars(title="Scores, drawn", y=metric, panels=by_model),)
    plan_cells = plan_sweep(sweep, None if data_root is None else str(data_root))
    return Study(sweep.name, f"The sweep of {Path(path).name}", plan_cells, (table, *bars), metric)


def select_cells(study: Study, only: Sequence[str]) -> Study:
    """Restrict a study to the cells with certain labels.

    Args:
        study: The study.
        only: Patterns AXIS=LABEL, in which * is a wild card; a cell must match all of them.

    Raises:
        DeltuneError: A pattern names an axis or label that the study does not have.
    """
    patterns = [text.partition("=") for text in only]
    wrong = [f"{''.join(parts)!r} is not AXIS=LABEL" for parts in patterns if not parts[1]]
    cells = [planned.cell for planned in study.plan_cells({})]
    axes = {axis for cell in cells for axis in cell}
    wrong += [unknown_name("axis", axis, axes, study.name) for axis, sign, _ in patterns if sign and axis not in axes]
    for axis, _, pattern in patterns:
        labels = dict.fromkeys(str(cell[axis]) for cell in cells if axis in cell)
        if labels and not any(fnmatch(label, pattern) for label in labels):
            wrong.append(unknown_name(axis, pattern, labels, study.name))
    if wrong:
        raise error_from_problems("these cells cannot be chosen", wrong)
    if not patterns:
        return study

    def matches(cell: Cell) -> bool:
        return all(fnmatch(str(cell.get(axis)), pattern) for axis, _, pattern in patterns)

    return replace(
        study, plan_cells=lambda records: [planned for planned in study.plan_cells(records) if matches(planned.cell)]
    )
