"""The numbers of parameters that leave chance, and that reach full tuning: bisection over powers of two (AP §5.3).

The low threshold is the smallest N whose 95 % interval over test examples lies above chance. The high threshold is the
smallest N within 1 point of full tuning (our margin). Each is a bracket [N that is too few, N that is enough] for every
method, model and seed; seeds are the repeats. A curve that is not monotone crosses a threshold several times; bisection
finds one of these places. A run that diverges has reached nothing: its N counts as too few.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scipy import stats

from ..jobs.job import Cell, Job, Outcome
from ..jobs.store import JobRecord
from ..study import CellPlan, PlannedCell, Records, job_outcomes

FULL_TUNING_MARGIN = 0.01
"""How far below full tuning a score in [0, 1] may lie and still count as reaching it."""

Z = statistics.NormalDist().inv_cdf(0.975)

Bracket = tuple[int, int | None]
"""(N that is too few, N that is enough); (the largest N, None) if even that is too few."""


@dataclass(frozen=True)
class ThresholdSearch:
    """The search for both thresholds of one method, model and seed.

    Attributes:
        cell: The cell of the result, without the axis N.
        sizes: The values of N to choose from, ascending.
        run: N -> its job.
        full: Full tuning's job.
        chance: The score of guessing.
        metric: The score that counts.
        tries: Cells whose jobs determine the jobs of the search, such as runs that try learning rates.
    """

    cell: Cell
    sizes: tuple[int, ...]
    run: Callable[[int], Job]
    full: Job
    chance: float
    metric: str = "accuracy"
    tries: tuple[PlannedCell, ...] = ()


def powers_of_two(most: int, first: int = 4) -> tuple[int, ...]:
    """Return the powers of two in [first, most]."""
    return tuple(2**k for k in range(math.ceil(math.log2(first)), int(math.log2(most)) + 1))


def bisect_sizes(sizes: Sequence[int], is_enough: Callable[[int], bool | None]) -> tuple[list[int], Bracket | None]:
    """Find the smallest size that is enough, as far as answers are there.

    The middle size is tried first, so that no answer depends on what the largest does. N = 0 is too few by definition.
    At most ⌈log2(len(sizes) + 1)⌉ sizes are tried. Return the sizes that were tried, in order, and the bracket, which
    is None as long as an answer is missing.
    """
    low, high = -1, len(sizes)
    tried: list[int] = []
    while high - low > 1:
        at = (low + high) // 2
        tried.append(sizes[at])
        enough = is_enough(sizes[at])
        if enough is None:
            return tried, None
        low, high = (low, at) if enough else (at, high)
    return tried, (sizes[low] if low >= 0 else 0, sizes[high] if high < len(sizes) else None)


def is_above_chance(result: Mapping[str, Any], metric: str, chance: float) -> bool:
    """Return whether the 95 % interval of a score over examples lies above chance.

    The interval is Wilson's where each example is right or wrong, and the normal one elsewhere.
    """
    examples = [float(value) for value in result["examples"].get(metric, ())]
    if not examples:
        return bool(result["scores"][metric] > chance)
    if set(examples) <= {0.0, 1.0}:
        return float(stats.binomtest(round(sum(examples)), len(examples)).proportion_ci(0.95, "wilson").low) > chance
    if len(examples) < 2:
        return False
    return statistics.fmean(examples) - Z * statistics.stdev(examples) / math.sqrt(len(examples)) > chance


def reaches_full_tuning(result: Mapping[str, Any], full: Mapping[str, Any], metric: str) -> bool:
    """Return whether a score lies at most `FULL_TUNING_MARGIN` below full tuning's."""
    return bool(result["scores"][metric] >= full["scores"][metric] - FULL_TUNING_MARGIN - 1e-9)


def search_cells(search: ThresholdSearch, records: Records) -> list[PlannedCell]:
    """Return a cell for every N that the bisections have tried so far, and the cell of the two brackets.

    The cells of the runs have an axis N. The last cell, of the brackets, has none; its extra holds the brackets
    "low" and "high" that are found, and its job is None until both are, unless a run has failed.
    """

    def result(job: Job) -> Mapping[str, Any] | None:
        record = records.get(job.name)
        return None if record is None else record.result

    def leaves_chance(n: int) -> bool | None:
        run = result(search.run(n))
        if run is None:
            return False if has_diverged(n) else None
        return is_above_chance(run, search.metric, search.chance)

    def reaches_full(n: int) -> bool | None:
        run, full = result(search.run(n)), result(search.full)
        if run is None or full is None:
            return False if run is None and has_diverged(n) else None
        return reaches_full_tuning(run, full, search.metric)

    def has_diverged(n: int) -> bool:
        record = records.get(search.run(n).name)
        return record is not None and record.error_kind == "diverged"

    bisections = {"low": bisect_sizes(search.sizes, leaves_chance), "high": bisect_sizes(search.sizes, reaches_full)}
    tried = dict.fromkeys(n for sizes, _ in bisections.values() for n in sizes)
    cells = [PlannedCell({**search.cell, "N": n}, search.run(n)) for n in sorted(tried)]
    ended = [n for n in tried if search.run(n).name in records]
    failed = [search.run(n) for n in ended if result(search.run(n)) is None and not has_diverged(n)]
    failed += [search.full] if search.full.name in records and result(search.full) is None else []
    succeeded = [search.run(n) for n in ended if result(search.run(n)) is not None]
    done = all(bracket is not None for _, bracket in bisections.values())
    # The job of the brackets' cell is one that has ended: a failed one, else any other, for its count and its spec.
    last = next(iter([*failed, *succeeded, *map(search.run, ended)]), None) if done or failed else None
    extra = {name: list(bracket) for name, (_, bracket) in bisections.items() if bracket is not None}
    return [*cells, PlannedCell(search.cell, last, extra, tries=search.tries)]


def plan_searches(searches: Sequence[ThresholdSearch]) -> CellPlan:
    """Return the cells of all searches, and full tuning once for each of its jobs, at N = all parameters."""
    full = {search.full: search for search in reversed(searches)}

    def plan_cells(records: Records) -> list[PlannedCell]:
        cells = [
            PlannedCell({**search.cell, "method": "full", "N": _model_size(records.get(job.name))}, job)
            for job, search in full.items()
        ]
        return [*cells, *(planned for search in searches for planned in search_cells(search, records))]

    return plan_cells


def _model_size(record: JobRecord | None) -> int:
    """The number of a model's parameters; 0 while its full tuning is not done."""
    return 0 if record is None or record.result is None else int(record.result["count"]["denominator_size"])


def threshold_outcomes(planned: PlannedCell, record: JobRecord) -> list[Outcome]:
    """Return the outcome of a run; of the brackets' cell the brackets alone, since its run has a cell of its own."""
    (outcome,) = job_outcomes(planned, record)
    if "N" in planned.cell or (outcome.error is not None and len(planned.extra) < 2):
        return [outcome]
    return [Outcome(planned.cell, outcome.spec, count=outcome.count, extra=planned.extra)]
