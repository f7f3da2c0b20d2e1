"""Floors: what little or no tuning reaches on a task, which full tuning must beat for the task to decide a claim."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..jobs.job import Outcome
from .comparisons import SCORE, MetricChoice, Number, is_at_chance
from .selectors import FLOOR, SEED, Names, describe_cell
from .statistics import paired_estimate

FLOORS = {"untuned": "the untuned model", "head": "the head alone", "probe": "a linear probe"}
"""Label on the axis of floors -> its words; a method of this name is a floor too."""


def floor_outcomes(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return the floors of a study and its full tuning, by model, task, floor and seed."""
    rows: dict[tuple[object, ...], Outcome] = {}
    for outcome in outcomes:
        cell = outcome.cell
        row = cell.get(FLOOR, cell.get("method", cell.get("structure")))
        same_task = cell.get("target", cell.get("task")) == cell.get("task")
        if row in ("full", *FLOORS) and same_task and {"model", "task"} <= cell.keys():
            labels = {"model": cell["model"], "task": cell["task"], FLOOR: row}
            labels |= {SEED: cell[SEED]} if SEED in cell else {}  # a floor that trains nothing has none
            rows.setdefault(tuple(labels.values()), replace(outcome, cell=labels))
    return list(rows.values())


@dataclass(frozen=True)
class FloorCheck:
    """What full tuning and the best floor reach with one model on one task, in points; None for what was not run.

    `problem` says that full tuning does not beat the floor by its interval of 95 %, or is no better than chance most of
    the time: the task then decides nothing with this model. Where the floor was not run, nothing speaks against it.
    """

    floor: float | None
    full: float | None
    problem: str


def check_floors(
    outcomes: Sequence[Outcome], choice: MetricChoice, names: Names | None = None
) -> dict[tuple[str, str], FloorCheck]:
    """Return for every model and task of the outcomes whether full tuning beats the floor."""
    by_pair: dict[tuple[str, str], list[tuple[Outcome, float]]] = {}
    for outcome in floor_outcomes(outcomes):
        (number,) = SCORE.read([outcome], choice)
        if outcome.error is None and isinstance(number, Number):
            pair = str(outcome.cell["model"]), str(outcome.cell["task"])
            by_pair.setdefault(pair, []).append((outcome, number.value))
    return {
        (model, task): _check(scores, choice, describe_cell({"model": model, "task": task}, names))
        for (model, task), scores in by_pair.items()
    }


def _check(scores: Sequence[tuple[Outcome, float]], choice: MetricChoice, where: str) -> FloorCheck:
    rows: dict[str, dict[object, float]] = {}
    for outcome, score in scores:
        rows.setdefault(outcome.cell[FLOOR], {})[outcome.cell.get(SEED)] = score
    means = {row: float(np.mean(list(of_seeds.values()))) for row, of_seeds in rows.items()}
    floor_name = max((row for row in means if row in FLOORS), key=lambda row: means[row], default="")
    floor, full = means.get(floor_name), means.get("full")
    sign = choice.sign(choice.metric_name(scores[0][0]))
    guesses = [is_at_chance(outcome) for outcome, _ in scores if outcome.cell[FLOOR] == "full"]
    problem = ""
    if 2 * sum(guesses) > len(guesses):
        problem = f"{where} full tuning is no better than chance"
    elif floor is not None and full is not None:
        leads = np.array([score - rows[floor_name].get(seed, floor) for seed, score in rows["full"].items()])
        lead = paired_estimate([leads]) if len(leads) > 1 else None
        is_unsure = lead is not None and bool(lead.parts) and lead.interval()[0] <= 0
        if full <= floor or is_unsure:
            shown = f"({sign * full:.1f}) does not beat {FLOORS[floor_name]} ({sign * floor:.1f})"
            problem = f"{where} full tuning {shown}{' by its interval' if full > floor else ''}"
    return FloorCheck(None if floor is None else sign * floor, None if full is None else sign * full, problem)
