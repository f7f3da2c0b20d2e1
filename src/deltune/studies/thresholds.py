"""How few parameters do something, and how few do all: bisection on N over a grid of powers of two (AP §5.3).

low: the smallest N whose 95 % interval over test examples lies above chance. high: the smallest N within 1 point of
full tuning (ours). Each is an interval [N that is too few, N that is enough] for every method, model and seed; seeds
are the repeats. A curve that is not monotone has several such places: bisection finds one of them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .claims.statistics import wilson
from .engine.jobs import Job
from .engine.outcomes import Cell, Outcome
from .engine.store import JobRecord
from .scales import Wanted
from .study import Rows, Want, told

NEAR = 0.01
"""Of full tuning's score: what still counts as reaching it, where scores lie in [0, 1]."""
Z = statistics.NormalDist().inv_cdf(0.975)


@dataclass(frozen=True)
class Climb:
    """One method, model and seed. cell: without N. sizes: the grid, ascending. run: N -> its work. full: full tuning's.

    chance: the score of guessing. metric: the score that counts.
    """

    cell: Cell
    sizes: tuple[int, ...]
    run: Callable[[int], Job]
    full: Job
    chance: float
    metric: str = "accuracy"


def powers(most: int, first: int = 4) -> tuple[int, ...]:
    """The powers of two from `first` to `most`, both included where they are some."""
    return tuple(2**k for k in range(math.ceil(math.log2(first)), int(math.log2(most)) + 1))


def bisected(
    sizes: Sequence[int], enough: Callable[[int], bool | None]
) -> tuple[list[int], tuple[int, int | None] | None]:
    """What is asked, in order, and the bracket (too few, enough) once all answers are there; None for no answer yet.

    The largest size is asked first: where that is too few the bracket is (it, None). N = 0 is too few by definition.
    At most 1 + ⌈log2 sizes⌉ are asked.
    """
    low, high = -1, len(sizes) - 1
    asked, at = [], high
    while True:
        asked.append(sizes[at])
        found = enough(sizes[at])
        if found is None:
            return asked, None
        if not found and at == len(sizes) - 1:
            return asked, (sizes[at], None)
        low, high = (low, at) if found else (at, high)
        if high - low == 1:
            return asked, (sizes[low] if low >= 0 else 0, sizes[high])
        at = (low + high) // 2


def above(result: Mapping[str, Any], metric: str, chance: float) -> bool:
    """Whether the 95 % interval over examples lies above chance: Wilson's where each is right or wrong, else normal."""
    examples = [float(value) for value in result["examples"].get(metric, ())]
    if not examples:
        return bool(result["scores"][metric] > chance)
    if set(examples) <= {0.0, 1.0}:
        return wilson(round(sum(examples)), len(examples))[0] > chance
    if len(examples) < 2:
        return False
    return statistics.fmean(examples) - Z * statistics.stdev(examples) / math.sqrt(len(examples)) > chance


def reaches(result: Mapping[str, Any], full: Mapping[str, Any], metric: str) -> bool:
    """Whether the score lies at most 1 point below full tuning's."""
    return bool(result["scores"][metric] >= full["scores"][metric] - NEAR - 1e-9)


def wants(climb: Climb, rows: Rows) -> list[Want]:
    """The runs asked for so far, and the cell with its brackets once they are there."""

    def result(work: Job) -> Mapping[str, Any] | None:
        row = rows.get(work.name)
        return None if row is None else row.result

    def low(n: int) -> bool | None:
        found = result(climb.run(n))
        return None if found is None else above(found, climb.metric, climb.chance)

    def high(n: int) -> bool | None:
        found, full = result(climb.run(n)), result(climb.full)
        return None if found is None or full is None else reaches(found, full, climb.metric)

    brackets = {"low": bisected(climb.sizes, low), "high": bisected(climb.sizes, high)}
    asked = dict.fromkeys(n for several, _ in brackets.values() for n in several)
    found = [Want({**climb.cell, "N": n}, climb.run(n)) for n in sorted(asked)]
    failed = [n for n in asked if (row := rows.get(climb.run(n).name)) is not None and row.result is None]
    done = all(bracket is not None for _, bracket in brackets.values())
    # The bracket's own work is one that has ended: a failed one, else the largest N, for its count and its spec.
    at = failed[0] if failed else climb.sizes[-1]
    extra = {name: list(b) for name, (_, b) in brackets.items() if b is not None}  # [largest, None]: beyond all sizes
    return [*found, Want(climb.cell, climb.run(at) if done or failed else None, extra)]


def searched(climbs: Sequence[Climb]) -> Wanted:
    """All climbs, and full tuning once for each of its works: at N = all parameters, for the line to reach."""
    full = {climb.full: climb for climb in reversed(climbs)}

    def wanted(rows: Rows) -> list[Want]:
        whole = [
            Want({**climb.cell, "method": "full", "N": _size(rows.get(work.name))}, work)
            for work, climb in full.items()
        ]
        return [*whole, *(want for climb in climbs for want in wants(climb, rows))]

    return wanted


def _size(row: JobRecord | None) -> int:
    """All scalars of a model; 0 while its full tuning is not done."""
    return 0 if row is None or row.result is None else int(row.result["count"]["denominator_size"])


def bracketed(want: Want, row: JobRecord) -> list[Outcome]:
    """A run as it is; a cell without N as its brackets alone, for its run stands at its own N already."""
    (found,) = told(want, row)
    if "N" in want.cell or found.error is not None:
        return [found]
    return [Outcome(want.cell, found.spec, count=found.count, extra=want.extra)]
