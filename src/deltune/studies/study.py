"""A study as a value: what it asks, which works answer it, what is drawn of them and which claims they decide."""

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
from .report.figure_spec import Bars, Numbers, Table, View

Rows = Mapping[str, JobRecord]

PLAIN: dict[str, Callable[[Any], bool]] = {
    "scores": lambda value: _is_table(value, lambda one: isinstance(one, float | int)),
    "count": lambda value: isinstance(value, Mapping),
    "examples": lambda value: _is_table(value, lambda one: isinstance(one, list)),
    "curve": lambda value: isinstance(value, list) and all(isinstance(line, Mapping) for line in value),
    "seconds": lambda value: isinstance(value, float | int),
}
"""What an outcome has of a work's result, and whether a value can be that; the rest is its extra."""


@dataclass(frozen=True)
class Want:
    """A cell and the work that fills it; None where what is done so far does not tell which it is, with the reason.

    extra: what other works say of this cell. lost: it will never be told, because what would tell it failed.
    """

    cell: Cell
    work: Job | None
    extra: Mapping[str, Any] = field(default_factory=dict)
    why: str = "not run yet"
    lost: bool = False


Tell = Callable[[Want, JobRecord], list[Outcome]]


def told(want: Want, row: JobRecord) -> list[Outcome]:
    """The outcome of a work, as it is."""
    spec = row.spec.get("run", row.spec)
    if row.result is None:
        return [Outcome(want.cell, spec, seconds=row.seconds, error=row.error or "no result")]
    plain = {name: row.result[name] for name in PLAIN if name in row.result}
    if wrong := [name for name, value in plain.items() if not PLAIN[name](value)]:
        return [Outcome(want.cell, spec, error=f"its result was not written by deltune: {', '.join(wrong)}")]
    extra = {name: value for name, value in row.result.items() if name not in PLAIN}
    return [Outcome(want.cell, spec, **plain, extra={**extra, **want.extra})]


@dataclass(frozen=True)
class Study:
    """asks: the question, with its table or figure. wanted: every cell with its work, given what is done so far.

    views: what is drawn. metric: what the claims are about. notes: what is other than in the paper. tell: a work's row
    as outcomes. lower: lower is better.
    """

    name: str
    asks: str
    wanted: Callable[[Rows], Sequence[Want]]
    views: tuple[View, ...] = ()
    metric: Numbers = "accuracy"
    notes: str = ""
    tell: Tell = told
    lower: bool = False

    def plan(self, rows: Rows) -> list[Job]:
        """The works that are wanted now (engine.Plan)."""
        return list(dict.fromkeys(want.work for want in self.wanted(rows) if want.work is not None))

    def outcomes(self, rows: Rows) -> list[Outcome]:
        """What came of every cell; one that is not done yet is waiting, or failed where its search did."""
        found: list[Outcome] = []
        for want in self.wanted(rows):
            row = None if want.work is None else rows.get(want.work.name)
            if row is None:
                spec = {} if want.work is None else want.work.spec
                found.append(Outcome(want.cell, spec, error=want.why, waiting=not want.lost))
            else:
                found += self.tell(want, row)
        return found


def _is_table(value: Any, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, Mapping) and all(fits(one) for one in value.values())


def of_sweep(sweep: Sweep, data_root: str | None = None) -> Callable[[Rows], Sequence[Want]]:
    """The cells of a sweep as what a study wants.

    Where runs search values, the first seed does; the others have what it chose, as in a run of several seeds (series).
    """
    cells = sweep.cells(data_root)
    works = {id(planned): planned.work for planned in cells}
    first = {_place(planned): planned for planned in reversed(cells)}

    def wanted(rows: Rows) -> list[Want]:
        return [_want(planned, first[_place(planned)], works, rows) for planned in cells]

    return wanted


def _place(planned: PlannedRun) -> tuple[Any, ...]:
    return tuple(label for axis, label in planned.cell.items() if axis != "seed")


def _want(planned: PlannedRun, first: PlannedRun, works: Mapping[int, Job], rows: Rows) -> Want:
    if not planned.spec.runtime.search or planned is first:
        return Want(planned.cell, works[id(planned)])
    row = rows.get(works[id(first)].name)
    if row is None:
        return Want(planned.cell, None)
    if row.result is None:
        return Want(planned.cell, None, why=f"the search under the first seed failed: {row.error}", lost=True)
    chosen = {name: row.result["best"][name] for name in planned.spec.runtime.search}
    return Want(planned.cell, run_job(planned.spec.single(**chosen)))


def of_file(path: str | Path, data_root: str | Path | None = None) -> Study:
    """One's own sweep as a study: a table of scores, and bars. Errors: whatever is wrong with the file or a run."""
    sweep = read_sweep(path)
    axes = tuple(sweep.axes)
    metric = sweep.metric or ("accuracy", "entity_f1", "exact", "rougeL", "bleu", "perplexity")
    groups = "model" if len(sweep.models) > 1 else ""
    table = Table(title="Scores", rows="method", columns=("task", *axes), metric=metric, groups=groups)
    panels = "model" if len(sweep.models) > 1 else ""
    bars = () if axes else (Bars(title="Scores, drawn", y=metric, panels=panels),)
    wanted = of_sweep(sweep, None if data_root is None else str(data_root))
    return Study(sweep.name, f"{Path(path).name}: one's own", wanted, (table, *bars), metric)


def narrowed(study: Study, only: Sequence[str]) -> Study:
    """The cells of a study with these labels: AXIS=LABEL, * as a wild card. Error: an axis or label it has not."""
    asked = [text.partition("=") for text in only]
    wrong = [f"{''.join(parts)!r} is no AXIS=LABEL" for parts in asked if not parts[1]]
    cells = study.wanted({})
    axes = {axis for want in cells for axis in want.cell}
    wrong += [unknown_name("axis", axis, axes, study.name) for axis, sign, _ in asked if sign and axis not in axes]
    for axis, _, label in asked:
        met = dict.fromkeys(str(want.cell[axis]) for want in cells if axis in want.cell)
        if met and not any(fnmatch(one, label) for one in met):
            wrong.append(unknown_name(axis, label, met, study.name))
    if wrong:
        raise error_from_problems("these cells cannot be chosen", wrong)
    if not asked:
        return study

    def fits(want: Want) -> bool:
        return all(fnmatch(str(want.cell.get(axis)), label) for axis, _, label in asked)

    return replace(study, wanted=lambda rows: [want for want in study.wanted(rows) if fits(want)])
