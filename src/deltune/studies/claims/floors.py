"""The room of a task: how far full tuning lies above what little or no tuning reaches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..jobs.job import Outcome
from .comparisons import SCORE, MetricChoice, Number, is_at_chance
from .selectors import FLOOR, SEED, Names, describe_cell
from .statistics import paired_estimate

Place = tuple[str, str]
"""A model and a task."""

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
            labels = {"model": cell["model"], "task": cell["task"], FLOOR: row, SEED: cell.get(SEED)}
            rows.setdefault(tuple(labels.values()), replace(outcome, cell=labels))
    return list(rows.values())


@dataclass(frozen=True)
class Room:
    """What full tuning and the best floor reach on one model and task, in points; None for what was not run.

    `decides` is False if full tuning does not beat the floor by its interval of 95 %, or is no better than chance most
    of the time; `text` says so.
    """

    place: Place
    floor_name: str
    floor: float | None
    full: float | None
    decides: bool
    text: str


def find_rooms(outcomes: Sequence[Outcome], choice: MetricChoice, names: Names | None = None) -> dict[Place, Room]:
    """Return the room of every model and task that outcomes have."""
    scores: dict[Place, dict[str, dict[object, float]]] = {}
    guesses: dict[Place, list[bool]] = {}
    for outcome in floor_outcomes(outcomes):
        cell, row = outcome.cell, outcome.cell[FLOOR]
        (number,) = SCORE.read([outcome], choice)
        place = str(cell["model"]), str(cell["task"])
        if outcome.error is None and isinstance(number, Number):
            scores.setdefault(place, {}).setdefault(row, {})[cell[SEED]] = number.value
            if row == "full":
                guesses.setdefault(place, []).append(is_at_chance(outcome))
    return {place: _room(place, rows, guesses.get(place, []), names) for place, rows in scores.items()}


def _room(
    place: Place, rows: dict[str, dict[object, float]], guesses: Sequence[bool], names: Names | None
) -> Room:  # fmt: skip
    means = {row: float(np.mean(list(of_seeds.values()))) for row, of_seeds in rows.items()}
    sign = -1.0 if any(mean < 0 for mean in means.values()) else 1.0
    floor_name = max((row for row in means if row in FLOORS), key=lambda row: means[row], default="")
    floor, full = means.get(floor_name), means.get("full")
    where = describe_cell({"model": place[0], "task": place[1]}, names)
    text = ""
    if 2 * sum(guesses) > len(guesses):
        text = f"{where} full tuning is no better than chance"
    elif floor is not None and full is not None and len(rows["full"]) > 1:
        lead = paired_estimate(
            [np.array([score - rows[floor_name].get(seed, floor) for seed, score in rows["full"].items()])]
        )
        if (lead.parts and lead.interval()[0] <= 0) or full <= floor:
            text = f"{where} full tuning ({full:.1f}) does not beat {FLOORS[floor_name]} ({floor:.1f}) by its interval"
    shown = [None if mean is None else sign * mean for mean in (floor, full)]
    return Room(place, FLOORS.get(floor_name, ""), shown[0], shown[1], not text, text)
