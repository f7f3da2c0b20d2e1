"""A table as a value: a view and outcomes laid out in rows and columns, best and second found, nothing left out.

Cells that equal another as they are shown share its place: best and second are of what a reader sees. With two best
there is no second, as in the papers; in an average rank ties count as the mean of their ranks.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ..engine.outcomes import Outcome
from .aggregate import METRIC, Aggregates, Place, Spread, Unit, aggregate, select_outcomes, unit
from .figure_spec import Label, Table

State = Literal["shown", "partial", "failed", "missing"]
Kind = Literal["percent", "score", "average", "rank"]
PERCENT = Unit(1.0, None, True, "% params")
RANK = Unit(1.0, 2, True, "average rank")


@dataclass(frozen=True)
class Column:
    """labels: from the widest heading to the narrowest."""

    labels: tuple[str, ...]
    kind: Kind
    unit: Unit

    @property
    def text(self) -> str:
        return " ".join(self.labels)


@dataclass(frozen=True)
class Entry:
    """One cell. notes: places in the grid's notes. high: the end of a range.

    state: "missing" where nothing was run, "partial" an average over fewer columns than there are.
    """

    mean: float | None = None
    std: float | None = None
    n: int = 0
    state: State = "missing"
    best: bool = False
    second: bool = False
    notes: tuple[int, ...] = ()
    paper: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Row:
    group: str
    label: str
    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class Grid:
    """head: the heading of the rows' labels. notes: what marks in the cells stand for. left: what is in no cell."""

    title: str
    head: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    left: tuple[str, ...] = ()

    @property
    def levels(self) -> int:
        """Lines of the heading."""
        return max((len(column.labels) for column in self.columns), default=1)

    @property
    def compared(self) -> bool:
        """Whether a paper's number stands anywhere."""
        return any(entry.paper is not None for row in self.rows for entry in row.entries)

    @property
    def groups(self) -> tuple[tuple[str, tuple[Row, ...]], ...]:
        found: dict[str, list[Row]] = {}
        for row in self.rows:
            found.setdefault(row.group, []).append(row)
        return tuple((group, tuple(rows)) for group, rows in found.items())

    def text(self, entry: Entry, column: Column) -> str:
        """The mean as it is shown, without its deviation."""
        if entry.mean is None:
            return "failed" if entry.state == "failed" else "–"
        if column.kind == "percent":
            low, high = share(entry.mean), share(entry.mean if entry.high is None else entry.high)
            return f"{low} %" if low == high else f"{low}–{high} %"
        return column.unit.show(entry.mean)

    def std(self, entry: Entry, column: Column) -> str:
        return "" if entry.std is None else column.unit.show(entry.std)

    def paper(self, entry: Entry, column: Column) -> str:
        """The paper's number; those are kept in the unit shown."""
        if entry.paper is None:
            return ""
        return (
            f"{share(entry.paper)} %"
            if column.kind == "percent"
            else replace(column.unit, factor=1.0).show(entry.paper)
        )


def grid(view: Table, outcomes: Iterable[Outcome]) -> Grid:
    """The table of a view. Errors: as `gather`."""
    outcomes = list(outcomes)
    outer = (view.groups,) if view.groups else ()
    axes = (*outer, view.rows, *view.columns)
    facts = aggregate(view, outcomes, view.metric, axes)
    at = len(outer)
    rows = _met(facts, view, axes[: at + 1], 0)
    places, unmeasured = _measured(_met(facts, view, view.columns, at + 1), facts, view, at + 1, outcomes)
    percents = _percents(view, outcomes, axes[: at + 1]) if view.percent else {}
    notes: dict[str, int] = {}
    columns = [Column(_heading(view, facts, place, at), "score", _unit(view, facts, place, at)) for place in places]
    lines = [[_entry(facts[(*row, *place)], notes) for place in places] for row in rows]
    lines = [
        [replace(entry, paper=_paper(view, row, place)) for entry, place in zip(line, places, strict=True)]
        for row, line in zip(rows, lines, strict=True)
    ]
    members = _members(rows, at)
    left = [*facts.left, *unmeasured]
    units = [column.unit for column in columns]
    extra: list[tuple[Column, list[Entry]]] = []
    if view.average and len(columns) > 1:
        if len({(unit.lower, unit.factor, unit.digits) for unit in units}) > 1:
            left.append("no average: the columns are in different units")
        else:
            extra.append(
                (
                    Column(("Avg." + " ↓" * units[0].lower,), "average", units[0]),
                    [_average(line, notes) for line in lines],
                )
            )
    if view.rank and len(columns) > 1:
        ranks = _ranks(lines, units, members)
        extra.append((Column(("Rank ↓",), "rank", RANK), [_mean_rank(r, len(columns), notes) for r in ranks]))
    for column, entries in extra:
        columns.append(column)
        for row, line, entry in zip(rows, lines, entries, strict=True):
            line.append(replace(entry, paper=_paper(view, row, (column.kind,))))
    for i, column in enumerate(columns):
        for group in members:
            for at_row, entry in zip(group, flagged([lines[j][i] for j in group], column.unit), strict=True):
                lines[at_row][i] = entry
    if view.percent:
        columns.insert(0, Column((PERCENT.name,), "percent", PERCENT))
        for row, line in zip(rows, lines, strict=True):
            line.insert(0, replace(percents.get(row, Entry()), paper=_paper(view, row, ("percent",))))
    return Grid(
        view.title,
        view.rows,
        tuple(columns),
        tuple(
            Row(view.write(row[0]) if at else "", view.write(row[-1]), tuple(line))
            for row, line in zip(rows, lines, strict=True)
        ),
        tuple(notes),
        tuple(left),
    )


def share(percent: float) -> str:
    """A percentage of parameters with about the digits of the papers: 100, 12.3, 6.7, 0.33, 0.0006."""
    if percent >= 99.95:
        return f"{percent:.0f}"
    if percent >= 1:
        return f"{percent:.1f}"
    text = f"{percent:.2f}" if percent >= 0.01 else f"{percent:.4f}" if percent >= 0.0005 else f"{percent:.1g}"
    return text


def flagged(entries: Sequence[Entry], unit: Unit) -> list[Entry]:
    """The same entries with best and second marked, among those that stand for the same columns (no mark of less)."""
    fit = [e for e in entries if e.mean is not None and e.state == "shown"]
    shown = [_shown(e, unit) for e in fit]
    if len(shown) < 2 or len(set(shown)) < 2:
        return list(entries)
    ordered = sorted(shown, reverse=not unit.lower)
    second = ordered[1] if ordered[1] != ordered[0] else None
    return [
        replace(e, best=_shown(e, unit) == ordered[0], second=_shown(e, unit) == second)
        if e.mean is not None and e.state == "shown"
        else e
        for e in entries
    ]


def _shown(entry: Entry, unit: Unit) -> float:
    return float(unit.show(entry.mean).replace(",", ""))


def _met(facts: Aggregates, view: Table, axes: Sequence[str], start: int) -> list[Place]:
    """The combinations of labels to show: those met, and those of the view's order, sorted axis by axis."""
    known = [facts.labels(axis, view) for axis in axes]
    met = dict.fromkeys(place[start : start + len(axes)] for place in facts.spreads)
    if all(axis in view.order for axis in axes) and axes:
        combined: list[Place] = [()]
        for axis in axes:
            combined = [(*place, label) for place in combined for label in view.order[axis]]
        met.update(dict.fromkeys(combined))
    elif len(axes) == 1:
        met.update(dict.fromkeys((label,) for label in known[0]))
    elif axes:
        # An axis alone in the order (methods, but not models) is expected beside everything met of the others.
        for i, axis in enumerate(axes):
            if axis in view.order:
                met.update(dict.fromkeys((*p[:i], label, *p[i + 1 :]) for p in list(met) for label in view.order[axis]))
    return sorted(met, key=lambda place: tuple(known[i].index(label) for i, label in enumerate(place)))


def _measured(
    places: list[Place], facts: Aggregates, view: Table, start: int, outcomes: Sequence[Outcome]
) -> tuple[list[Place], list[str]]:
    """The columns without those of a metric that no outcome has there, and those of them that were asked for there."""
    if METRIC not in view.columns:
        return places, []
    at = view.columns.index(METRIC)
    full = {key[start:] for key, spread in facts.spreads.items() if spread.mean is not None}
    others = {(*place[:at], *place[at + 1 :]) for place in full}
    kept = [place for place in places if place in full or (*place[:at], *place[at + 1 :]) not in others]
    ever = {place[at] for place in full}
    gone = []
    for place in (place for place in places if place not in kept):
        where = {axis: label for axis, label in zip(view.columns, place, strict=True) if axis != METRIC}
        asked = any(place[at] in outcome.spec.get("metrics", ()) for outcome in select_outcomes(outcomes, where))
        if asked or place[at] not in ever:
            gone.append(f"{', '.join(view.write(label) for label in place)}: in no outcome")
    return kept, gone


def _members(rows: Sequence[Place], at: int) -> list[list[int]]:
    """Which rows are compared with one another: those of a group."""
    groups: dict[Label, list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(row[0] if at else None, []).append(i)
    return list(groups.values())


def _column_metric(facts: Aggregates, place: Place, at: int) -> str:
    return next((name for key, name in facts.metrics.items() if key[at + 1 :] == place and name), "")


def _unit(view: Table, facts: Aggregates, place: Place, at: int) -> Unit:
    name = _column_metric(facts, place, at)
    if not name and METRIC in view.columns:
        name = str(place[view.columns.index(METRIC)])
    return unit(name, view)


def _heading(view: Table, facts: Aggregates, place: Place, at: int) -> tuple[str, ...]:
    own = _unit(view, facts, place, at)
    labels = [view.write(label) for label in place]
    return (*labels[:-1], labels[-1] + (" ↓" if own.lower else ""))


def _entry(spread: Spread, notes: dict[str, int]) -> Entry:
    reasons = [*spread.failed, *spread.absent]
    if spread.mean is not None and reasons:
        reasons = [f"{spread.n} of {spread.n + len(reasons)}: " + "; ".join(reasons)]
    elif spread.mean is None and not spread.failed:
        reasons = ["not run"]
    marks = tuple(_note(reason, notes) for reason in reasons)
    state: State = "shown" if spread.mean is not None else "failed" if spread.failed else "missing"
    return Entry(spread.mean, spread.std, spread.n, state, notes=marks)


def _note(reason: str, notes: dict[str, int]) -> int:
    return notes.setdefault(reason, len(notes))


def _average(line: Sequence[Entry], notes: dict[str, int]) -> Entry:
    """Of the columns there are; over fewer than all it is marked and stands in no competition."""
    found = [entry.mean for entry in line if entry.mean is not None]
    if not found:
        return Entry(state="missing")
    if len(found) == len(line):
        return Entry(statistics.fmean(found), None, len(found), "shown")
    mark = _note(f"over {len(found)} of {len(line)} columns, compared with no other", notes)
    return Entry(statistics.fmean(found), None, len(found), "partial", notes=(mark,))


def _ranks(
    lines: Sequence[Sequence[Entry]], units: Sequence[Unit], groups: Sequence[Sequence[int]]
) -> list[list[float]]:
    """Every row's ranks among the rows of its group, a rank for each column where it has a number."""
    ranks: list[list[float]] = [[] for _ in lines]
    for i, own in enumerate(units):
        for group in groups:
            there = {
                j: _shown(lines[j][i], own) * (1 if own.lower else -1) for j in group if lines[j][i].mean is not None
            }
            for j, value in there.items():
                before = sum(other < value for other in there.values())
                same = sum(other == value for other in there.values())
                ranks[j].append(before + (same + 1) / 2)
    return ranks


def _mean_rank(ranks: Sequence[float], columns: int, notes: dict[str, int]) -> Entry:
    return _average([Entry(rank) for rank in ranks] + [Entry()] * (columns - len(ranks)), notes)


def _percents(view: Table, outcomes: Sequence[Outcome], axes: Sequence[str]) -> dict[Place, Entry]:
    """The percentages met in a row, one or a range."""
    found: dict[Place, list[float]] = {}
    for outcome in select_outcomes(outcomes, view.where):
        if "percent" in outcome.count and all(axis in outcome.cell for axis in axes):
            place = tuple(outcome.cell[axis] for axis in axes)
            found.setdefault(place, []).append(float(outcome.count["percent"]))
    return {p: Entry(min(v), None, len(v), "shown", high=max(v)) for p, v in found.items()}


def _paper(view: Table, row: Place, column: Sequence[Label]) -> float | None:
    return view.paper.get(tuple(str(label) for label in (*row, *column)))
