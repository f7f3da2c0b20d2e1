"""Learning rates that a study chooses: each is tried under the first seed, and the other seeds take the best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..training.run_dir import Best
from .study import CellPlan, PlannedCell, Records, labels_without_seed

LADDER = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
"""The learning rates that small scale chooses from, ascending."""
STEPS = (0, -1, -2, 1)
"""Places on the ladder, seen from a method's usual rate, that are tried; of equally good ones the first is taken."""


def rates_to_try(usual: float) -> list[float]:
    """Return the learning rates to try for a method, its usual one first.

    Args:
        usual: The rate that the method usually has, one of `LADDER`.
    """
    place = LADDER.index(usual)
    return [LADDER[place + step] for step in STEPS]


def choose_rates(plans: Sequence[CellPlan]) -> CellPlan:
    """Return the cells of several plans that differ in the learning rate alone, each cell with the best rate.

    Every rate is tried under the first seed. The cells of the other seeds have no job until all of these runs have
    ended; then they take the rate whose run validated best. A run that diverged is worse than any other.

    Args:
        plans: One for each rate, in order of preference. Their cells are the same, in the same order.
    """
    if len(plans) == 1:
        return plans[0]

    def plan_cells(records: Records) -> list[PlannedCell]:
        choices = list(zip(*(plan(records) for plan in plans), strict=True))
        tries: dict[tuple[object, ...], tuple[PlannedCell, ...]] = {}
        for choice in choices:
            numbered = (replace(one, cell={**one.cell, "try": i}) for i, one in enumerate(choice, 1))
            tries.setdefault(labels_without_seed(choice[0].cell), tuple(numbered))
        return [_choose(choice, tries[labels_without_seed(choice[0].cell)], records) for choice in choices]

    return plan_cells


def _choose(choice: Sequence[PlannedCell], tries: tuple[PlannedCell, ...], records: Records) -> PlannedCell:
    """Return the cell of the rate whose try validated best; one without a job as long as a try has not ended."""
    waiting = replace(choice[0], job=None, tries=tries)
    ended = [records.get(one.job.name) for one in tries if one.job is not None]
    if None in ended:
        return waiting
    done = [record for record in ended if record is not None]
    if broken := [record.error for record in done if record.result is None and record.error_kind != "diverged"]:
        return replace(waiting, why=f"a run that tries a learning rate failed: {broken[0]}", lost=True)
    qualities = [float("-inf") if one.result is None else Best(**one.result["best"]).quality for one in done]
    if max(qualities) == float("-inf"):
        return replace(waiting, why=f"training diverged at every learning rate: {done[0].error}", lost=True)
    return replace(choice[qualities.index(max(qualities))], tries=tries)
