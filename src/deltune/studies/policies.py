"""The study of policies: which run each way of choosing would have picked from the stored curves of own/choose.

A policy sees the validations of the runs that it pays for, in steps, and picks one of them. Its cells are filled by the
jobs of the runs that it picked, so that the study trains nothing that own/choose does not.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ..errors import check_booleans
from .claims.selectors import FLOOR
from .scales import LADDER, START
from .study import CellPlan, PlannedCell, Records, job_outcome

RunKey = tuple[str, str]
"""A run of a grid: the labels of its method and its rate."""

FIRST = tuple(f"{LADDER[place]:g}" for place in START)
"""The rates that every method is run with."""
SHARE = 0.25
"""The share of the grid's steps that a search may take."""


@dataclass(frozen=True)
class Grid:
    """The runs of one model, task and seed.

    Attributes:
        curves: Each run's validations, as steps and the best score until then; one score of −∞ if it diverged.
        name: Names the grid: what is drawn at random depends on it alone.
        default_rate: The label of LoRA's usual rate.
    """

    curves: Mapping[RunKey, Sequence[tuple[int, float]]]
    name: str
    default_rate: str

    @property
    def runs(self) -> list[RunKey]:
        """All runs, in the order of the grid."""
        return list(self.curves)

    @property
    def steps(self) -> int:
        """The steps of a whole run."""
        return max(curve[-1][0] for curve in self.curves.values())

    @property
    def budget(self) -> float:
        """The steps that a search may take."""
        return SHARE * self.steps * len(self.curves)

    def trained(self, runs: Sequence[RunKey]) -> tuple[RunKey, int]:
        """Train runs to their end, and pick the run that validated best, the first of equal ones."""
        return self.ranked(runs)[0], sum(self.curves[run][-1][0] for run in runs)

    def ranked(self, runs: Sequence[RunKey], until: float = math.inf) -> list[RunKey]:
        """Return runs by their best validation in their first steps, the best first."""
        return sorted(runs, key=lambda run: -self.validation_at(run, until)[1])

    def validation_at(self, run: RunKey, until: float = math.inf) -> tuple[int, float]:
        """Return the first validation at a number of steps or behind it, or the last, with the best score so far."""
        return next((point for point in self.curves[run] if point[0] >= until), self.curves[run][-1])

    def random(self) -> random.Random:
        """Return the generator that draws for this grid."""
        return random.Random(self.name)


Picked = tuple[RunKey, int]
"""The run that a policy picked, and the steps that it took to do so."""
Policy = Callable[[Grid], Picked]


def lora_at(*rates: str) -> Policy:
    """Return the policy that tries LoRA at some rates; at its usual one if none is given."""
    return lambda grid: grid.trained([("lora", rate) for rate in rates or (grid.default_rate,)])


def random_search(grid: Grid) -> Picked:
    """Train runs drawn at random to their end."""
    return grid.trained(grid.random().sample(grid.runs, int(SHARE * len(grid.runs))))


def successive_halving(eta: int) -> Policy:
    """Return the policy that begins with an eighth of the steps and goes on with the best share of 1/eta each time.

    It begins with as many runs, drawn at random, as it can pay for.
    """
    ends = [eta**i / 8 for i in range(8) if eta**i <= 8]
    ends = [*ends, 1.0] if ends[-1] < 1 else ends

    def play(grid: Grid, number: int) -> Picked:
        left, taken = grid.random().sample(grid.runs, number), dict[RunKey, int]()
        for end in ends:
            taken |= {run: grid.validation_at(run, end * grid.steps)[0] for run in left}
            left = grid.ranked(left, end * grid.steps)[: max(1, len(left) // eta) if end < 1 else 1]
        return left[0], sum(taken.values())

    def choose(grid: Grid) -> Picked:
        played = (play(grid, number) for number in range(len(grid.runs), 0, -1))
        return next((run, steps) for run, steps in played if steps <= grid.budget)

    return choose


def tpe_with_median_pruner(grid: Grid) -> Picked:
    """Let Optuna's TPE propose method and rate, and its median pruner end what is behind."""
    optuna = _optuna()
    sampler = optuna.samplers.TPESampler(seed=grid.random().randrange(2**31))
    search = optuna.create_study(direction="maximize", sampler=sampler, pruner=optuna.pruners.MedianPruner())
    methods = list(dict.fromkeys(method for method, _ in grid.runs))
    done: dict[RunKey, int] = {}
    while sum(done.values()) < grid.budget:
        trial = search.ask()
        run = trial.suggest_categorical("method", methods), trial.suggest_categorical("rate", FIRST)
        done[run] = max(_tried(search, trial, grid.curves[run]), done.get(run, 0))
        if len(search.trials) >= 4 * len(grid.runs):  # it proposes what it has tried already
            break
    ended = [run for run, steps in done.items() if steps == grid.curves[run][-1][0]]
    return grid.ranked(ended)[0], sum(done.values())


def chosen_from(methods: Sequence[str]) -> Policy:
    """Return the policy that does as `deltune choose` before its finals: methods × four rates, default rates first."""

    def choose(grid: Grid) -> Picked:
        optuna = _optuna()
        from .choosing import halving

        search = optuna.create_study(direction="maximize", pruner=halving(grid.steps))
        order = sorted(FIRST, key=lambda rate: rate != grid.default_rate)
        runs = [*((one, order[0]) for one in methods), *((one, rate) for one in methods for rate in order[1:])]
        done = {run: _tried(search, search.ask(), grid.curves[run]) for run in runs}
        return max(done, key=lambda run: (done[run], grid.validation_at(run, done[run])[1])), sum(done.values())

    return choose


def _optuna() -> Any:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _tried(search: Any, trial: Any, curve: Sequence[tuple[int, float]]) -> int:
    """Report a curve to a trial until its end or until the search prunes it; return the steps that this took."""
    import optuna

    for step, score in curve:
        trial.report(max(score, -1.0), step)
        if trial.should_prune():
            search.tell(trial, state=optuna.trial.TrialState.PRUNED)
            break
    else:
        search.tell(trial, score)
    return step


def tuned(method: str) -> Policy:
    """Return the policy that takes a method for granted and tries all of its rates."""
    return lambda grid: grid.trained([run for run in grid.runs if run[0] == method])


GRID_BEST, DEFAULT_RATE, FOUR_RATES = "the whole grid", "LoRA, default rate", "LoRA, four rates"
CHOOSE, CHOOSE_ALL = "deltune choose", "deltune choose, all methods"
PLACES = ("lora", "lora, all linears")
"""The default space of `deltune choose`, by the labels of the grid."""
SEARCHES: Mapping[str, Policy] = {
    "random search": random_search, "halving by 2": successive_halving(2), "halving by 4": successive_halving(4),
    "TPE with a median pruner": tpe_with_median_pruner,
}  # fmt: skip
"""Label -> a search over methods and rates, which takes at most a quarter of the grid's steps."""


@check_booleans
def replayed(runs: CellPlan, default_rate: float, methods: Sequence[str], *, waits: bool) -> CellPlan:
    """Return the cells of policies × models × tasks × seeds, whose jobs are the runs of a grid that are picked.

    Grids of which a run is missing are left out once others are done, unless the study `waits` for them.
    """
    policies: dict[str, Policy] = {
        GRID_BEST: lambda grid: grid.trained(grid.runs), DEFAULT_RATE: lora_at(), FOUR_RATES: lora_at(*FIRST),
        **SEARCHES, CHOOSE: chosen_from(PLACES), CHOOSE_ALL: chosen_from(methods),
        **{f"{method}, its rates": tuned(method) for method in methods},
    }  # fmt: skip

    def plan_cells(records: Records) -> list[PlannedCell]:
        grids: dict[tuple[Any, ...], dict[RunKey, PlannedCell]] = {}
        for planned in runs(records):
            cell = planned.cell
            if FLOOR not in cell and "rate" in cell:
                key = cell["model"], cell["task"], cell["seed"]
                grids.setdefault(key, {})[str(cell["method"]), str(cell["rate"])] = planned
        cells = []
        for (model, task, seed), of_grid in grids.items():
            curves = {run: _curve(planned, records) for run, planned in of_grid.items()}
            known = {run: curve for run, curve in curves.items() if curve is not None}
            grid = Grid(known, f"{model} {task} {seed}", f"{default_rate:g}")
            for label, policy in policies.items():
                labels = {"model": model, "policy": label, "task": task, "seed": seed}
                tries = tuple(of_grid.values()) if label == GRID_BEST else ()
                job = of_grid[policy(grid)[0]].job if len(known) == len(curves) else None
                cells.append(PlannedCell(labels, job, tries=tries))
        done = [planned for planned in cells if planned.job is not None]
        return cells if waits or not done else done

    return plan_cells


def _curve(planned: PlannedCell, records: Records) -> list[tuple[int, float]] | None:
    """Return the validations of a run; None if it has not ended."""
    record = planned.record(records)
    if record is None:
        return None
    outcome = job_outcome(planned, record)
    if outcome.error is not None:
        return [(1, -math.inf)]
    name = f"eval_{outcome.extra['best']['metric']}"
    points = [(int(line["step"]), float(line[name])) for line in outcome.curve if name in line]
    best = [points[0]]
    for _, (step, value) in pairwise(points):
        best.append((step, max(value, best[-1][1])))
    return best
