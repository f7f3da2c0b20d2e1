"""Learning rates that a study chooses: each is tried under the first seed, and the best two under the second too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..train import Best, finalists
from .study import CellPlan, PlannedCell, Records, labels_without_seed

LADDER = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
"""The learning rates that small scale chooses from, ascending."""
STEPS = (0, -1, -2, 1)
"""Places on the ladder, seen from a method's usual rate, that are tried; of equally good ones the first is taken."""


def rates_to_try(usual: float) -> list[float]:
    """Return the learning rates to try for a method, its usual one first."""
    place = LADDER.index(usual)
    return [LADDER[place + step] for step in STEPS]


def choose_rates(plans: Sequence[CellPlan]) -> CellPlan:
    """Return the cells of several plans that differ in the learning rate alone, each cell with the best rate.

    Every rate is tried under the first seed, and the two that validate best under the second seed too. The cells of the
    other seeds have no job until all of these runs have ended; then they take the rate whose two runs validated best in
    the mean. A run that diverged is worse than any other. There is a plan for each rate, in order of preference; their
    cells are the same, in the same order.
    """
    if len(plans) == 1:
        return plans[0]

    def plan_cells(records: Records) -> list[PlannedCell]:
        choices = list(zip(*(plan(records) for plan in plans), strict=True))
        seeds: dict[tuple[object, ...], list[Choice]] = {}
        for choice in choices:
            seeds.setdefault(labels_without_seed(choice[0].cell), []).append(_numbered(choice))
        chosen = {labels: _choose(of_seeds, records) for labels, of_seeds in seeds.items()}
        return [chosen[labels_without_seed(choice[0].cell)].of(choice) for choice in choices]

    return plan_cells


Choice = tuple[PlannedCell, ...]
"""The cell of one seed at each rate."""


@dataclass(frozen=True)
class ChosenRate:
    """The rate that the cells of a method on a model and task have, as far as it is known.

    `tries` are the cells whose jobs determine it; it is `lost` if it will never be known.
    """

    tries: Choice
    number: int | None = None
    why: str = PlannedCell.why
    lost: bool = False

    def of(self, choice: Choice) -> PlannedCell:
        """Return the cell of a seed."""
        if self.number is None:
            return replace(choice[0], job=None, tries=self.tries, why=self.why, lost=self.lost)
        return replace(choice[self.number], tries=self.tries)


def _numbered(choice: Choice) -> Choice:
    return tuple(replace(one, cell={**one.cell, "try": number}) for number, one in enumerate(choice, 1))


def _choose(of_seeds: Sequence[Choice], records: Records) -> ChosenRate:
    """Return the rate that validated best, or which tries have not ended, or why there is none."""
    tries, left = of_seeds[0], list(range(len(of_seeds[0])))
    totals = [0.0] * len(tries)
    for number, choice in enumerate(of_seeds[:2]):
        tried = tuple(choice[i] for i in left)
        tries = tries if number == 0 else (*tries, *tried)
        ended = [records.get(one.job.name) for one in tried if one.job is not None]
        if len(ended) < len(tried) or None in ended:
            return ChosenRate(tries)
        done = [record for record in ended if record is not None]
        if broken := [r.error for r in done if r.result is None and r.error_kind != "diverged"]:
            return ChosenRate(tries, why=f"a run that tries a learning rate failed: {broken[0]}", lost=True)
        for i, record in zip(left, done, strict=True):
            totals[i] += float("-inf") if record.result is None else Best(**record.result["best"]).quality
        if max(totals[i] for i in left) == float("-inf"):
            return ChosenRate(tries, why=f"training diverged at every learning rate: {done[0].error}", lost=True)
        left = finalists(totals, left)
    return ChosenRate(tries, left[0])
