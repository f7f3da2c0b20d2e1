"""The numbers of parameters that leave chance, and that reach full tuning: monotone fits over a grid of N (AP §5.3).

Every N of the grid is run under every seed. A score may fall where N grows, by noise or because training fails, so a
threshold is read from the isotonic fit of a curve, the non-decreasing curve of least squares: it is the smallest N at
which the fit reaches its level. The low threshold is where Matthews' correlation is higher than a guess may have. The
high threshold is where accuracy is within 1 point of full tuning's under the same seed (our margin). A run that
diverges counts as a guess.

Claims compare the thresholds of each seed's own curve. Figures show the mean curve's thresholds with intervals.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ..claims.comparisons import GUESSES_BELOW
from ..jobs.job import Cell, Job, Outcome
from ..jobs.store import JobRecord
from ..study import CellPlan, PlannedCell, Records, job_outcome

FULL_TUNING_MARGIN = 0.01
"""How far below full tuning a score in [0, 1] may lie and still count as reaching it."""

Bracket = tuple[int, int | None]
"""(N that is too few, N that is enough); (the largest N, None) if even that is too few."""


@dataclass(frozen=True)
class ThresholdGrid:
    """The runs from which both thresholds of one method and model are read.

    Attributes:
        cell: The cell of the result, without the axes N and seed.
        sizes: The values of N, ascending.
        seeds: The seeds.
        run: N and seed -> its job.
        full: Seed -> full tuning's job.
        chance: The accuracy of guessing.
        tries: Cells whose jobs determine these jobs, such as runs that try learning rates.
    """

    cell: Cell
    sizes: tuple[int, ...]
    seeds: tuple[int, ...]
    run: Callable[[int, int], Job]
    full: Callable[[int], Job]
    chance: float
    tries: tuple[PlannedCell, ...] = ()


def powers_of_two(most: int, first: int = 64) -> tuple[int, ...]:
    """Return the powers of two in [first, most]."""
    return tuple(2**k for k in range(math.ceil(math.log2(first)), int(math.log2(most)) + 1))


@lru_cache(1024)
def find_thresholds(
    sizes: tuple[int, ...], curves: tuple[tuple[float, ...], ...], level: float
) -> tuple[tuple[Bracket, ...], Bracket]:
    """Read a threshold from isotonic fits of curves over N, one for each seed.

    The fit of the mean curve is bootstrapped over seeds; of up to four seeds all resamples are taken.

    Returns:
        The bracket of each seed's curve, and the interval of 95 % of the mean curve's threshold, between two N of the
        grid; (the largest N, None) if the level is not reached.
    """
    from sklearn.isotonic import IsotonicRegression

    def place(curve: np.ndarray) -> int:
        """Return the place of the smallest N at which the fit reaches the level; the number of N if none does."""
        fit = IsotonicRegression().fit_transform(np.arange(len(sizes)), curve)
        return int(np.searchsorted(fit, level - 1e-9))

    def size(at: int) -> int | None:
        return sizes[at] if at < len(sizes) else None

    values, n = np.array(curves), len(curves)
    brackets = tuple((sizes[at - 1] if at else 0, size(at)) for at in map(place, values))
    if n <= 4:
        resamples = [*itertools.product(range(n), repeat=n)]
    else:
        resamples = [*map(tuple, np.random.default_rng(0).integers(n, size=(1000, n)).tolist())]
    of_counts = {key: place(values[list(key)].mean(axis=0)) for key in {tuple(sorted(one)) for one in resamples}}
    places = [of_counts[tuple(sorted(one))] for one in resamples]
    low, high = np.quantile(places, (0.025, 0.975), method="inverted_cdf").tolist()
    return brackets, (size(low) or sizes[-1], size(high))


def threshold_cells(grid: ThresholdGrid, records: Records) -> list[PlannedCell]:
    """Return a cell for every N and seed, and one for the thresholds of each seed.

    The cells of the runs have an axis N. Those of the thresholds have none; their extra holds the brackets "low" and
    "high" of the seed, the intervals "low of the mean" and "high of the mean", and under "after low" the share of full
    tuning's score, in percent, that the smallest N above the low threshold has. They have no job until all runs have
    ended, unless one has failed.
    """
    jobs = {seed: [grid.run(n, seed) for n in grid.sizes] for seed in grid.seeds}
    runs = [
        PlannedCell({**grid.cell, "N": n, "seed": seed}, job)
        for seed, of_seed in jobs.items()
        for n, job in zip(grid.sizes, of_seed, strict=True)
    ]
    needed = [job for seed in grid.seeds for job in (*jobs[seed], grid.full(seed))]
    ended = {job: records[job.name] for job in needed if job.name in records}
    full = {grid.full(seed) for seed in grid.seeds}
    failed = [job for job, record in ended.items() if record.result is None and not _is_guess(record, job in full)]
    if failed or len(ended) < len(set(needed)):
        waiting = failed[0] if failed else None
        return [*runs, *(PlannedCell({**grid.cell, "seed": seed}, waiting, tries=grid.tries) for seed in grid.seeds)]

    def scores(job: Job) -> Mapping[str, float]:
        result = ended[job].result
        return {"accuracy": grid.chance, "matthews": 0.0} if result is None else result["scores"]

    correlations = tuple(tuple(scores(job)["matthews"] for job in jobs[seed]) for seed in grid.seeds)
    leads = tuple(
        tuple(scores(job)["accuracy"] - scores(grid.full(seed))["accuracy"] for job in jobs[seed])
        for seed in grid.seeds
    )
    rows = next((len(r.result["examples"].get("accuracy", ())) for r in ended.values() if r.result is not None), 0)
    low, low_of_mean = find_thresholds(grid.sizes, correlations, GUESSES_BELOW / math.sqrt(max(1, rows)))
    high, high_of_mean = find_thresholds(grid.sizes, leads, -FULL_TUNING_MARGIN)
    mean = {"low of the mean": list(low_of_mean), "high of the mean": list(high_of_mean)}
    for i, seed in enumerate(grid.seeds):
        job = next((job for job in jobs[seed] if ended[job].result is not None), jobs[seed][0])
        extra: dict[str, object] = {"low": list(low[i]), "high": list(high[i]), **mean}
        if low[i][1] is not None:
            first = jobs[seed][grid.sizes.index(low[i][1])]
            extra["after low"] = 100 * scores(first)["accuracy"] / scores(grid.full(seed))["accuracy"]
        runs.append(PlannedCell({**grid.cell, "seed": seed}, job, extra, tries=grid.tries))
    return runs


def _is_guess(record: JobRecord, is_full: bool) -> bool:
    """Return whether a run without a result counts as a guess: it diverged, and nothing is measured by it."""
    return record.error_kind == "diverged" and not is_full


def plan_thresholds(grids: Sequence[ThresholdGrid]) -> CellPlan:
    """Return the cells of all grids, and full tuning once for each of its jobs, at N = all parameters."""
    full = {grid.full(seed): {**grid.cell, "seed": seed} for grid in reversed(grids) for seed in grid.seeds}

    def plan_cells(records: Records) -> list[PlannedCell]:
        cells = [
            PlannedCell({**cell, "method": "full", "N": _model_size(records.get(job.name))}, job)
            for job, cell in full.items()
        ]
        return [*cells, *(planned for grid in grids for planned in threshold_cells(grid, records))]

    return plan_cells


def _model_size(record: JobRecord | None) -> int:
    """The number of a model's parameters; 0 while its full tuning is not done."""
    return 0 if record is None or record.result is None else int(record.result["count"]["denominator_size"])


def threshold_outcome(planned: PlannedCell, record: JobRecord) -> Outcome:
    """Return the outcome of a run; of a cell of thresholds these alone, since its run has a cell of its own."""
    outcome = job_outcome(planned, record)
    if "N" in planned.cell or "low" not in planned.extra:
        return outcome
    return Outcome(planned.cell, outcome.spec, count=outcome.count, extra=planned.extra)
