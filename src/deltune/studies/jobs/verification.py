"""Repeating stored results: a sample of jobs is run again and compared.

Where machine, versions and threads are as they were, the new result must be equal to the last digit.
Elsewhere sums are rounded in another order, and training amplifies that: two runs of one spec then differ like two runs
of different seeds, at most. So the difference may be what the spread over seeds allows: with the variance s² over seeds
of the same cells, pooled over the cells of one model and task, t · s · √2, t being Student's quantile at which all
comparisons together are wrong in 5 % of the cases (Bonferroni).
"""

from __future__ import annotations

import math
import random
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from scipy import stats

from .job import Job
from .store import JobRecord

Verdict = Literal["equal", "within the spread of the seeds", "differs"]
LEVEL = 0.05
"""The chance that any of the comparisons of a verification fails although nothing but rounding differs."""

MASK_SEED = re.compile(r"seed=\d+")


@dataclass(frozen=True)
class Comparison:
    """One score of a job, stored and now.

    `allowed` is the greatest difference that the spread over seeds allows; 0 if there is none to judge by.
    """

    name: str
    stored: float
    now: float | None
    allowed: float

    @property
    def agrees(self) -> bool:
        """True if the scores differ by no more than is allowed."""
        return self.now is not None and abs(self.now - self.stored) <= self.allowed


@dataclass(frozen=True)
class Verification:
    """A job that was run again.

    `changes` are the fields of the environment that differ, each with both values.
    """

    job: Job
    comparisons: tuple[Comparison, ...]
    equal: bool
    changes: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    data_changed: bool = False
    error: str | None = None

    @property
    def verdict(self) -> Verdict:
        """The verdict; in the same environment only an equal result repeats the job."""
        if self.equal:
            return "equal"
        if self.error is not None or self.data_changed or not self.changes:
            return "differs"
        return "within the spread of the seeds" if all(one.agrees for one in self.comparisons) else "differs"


def sample_jobs(jobs: Iterable[Job], records: Mapping[str, JobRecord], count: int, seed: int = 0) -> list[Job]:
    """Return a random sample of the jobs whose stored result has scores.

    Timings are left out, since no clock repeats itself.
    """
    verifiable = [job for job in dict.fromkeys(jobs) if _scores(records.get(job.name))]
    verifiable.sort(key=lambda job: job.name)  # the sample does not depend on the order of studies
    return random.Random(seed).sample(verifiable, min(count, len(verifiable)))


def compare(
    jobs: Sequence[Job], stored: Mapping[str, JobRecord], repeated: Mapping[str, JobRecord]
) -> list[Verification]:
    """Compare the results of jobs that were run again with the stored ones.

    The stored records also say how far scores spread over seeds.
    """
    comparisons = sum(len(_scores(stored[job.name])) for job in jobs)
    spreads = _Spreads(stored.values(), comparisons)
    return [_compare(job, stored[job.name], repeated.get(job.name), spreads) for job in jobs]


def _compare(job: Job, before: JobRecord, after: JobRecord | None, spreads: _Spreads) -> Verification:
    now = _scores(after)
    comparisons = tuple(
        Comparison(name, value, now.get(name), spreads.allowed(before, name)) for name, value in _scores(before).items()
    )
    then, again = before.result or {}, (after.result if after is not None else None) or {}
    environments = [result.get("environment", {}) for result in (then, again)]
    changes = {
        name: (environments[0].get(name), environments[1].get(name))
        for name in {**environments[0], **environments[1]}
        if environments[0].get(name) != environments[1].get(name)
    }
    error = None if again else (after.error if after is not None else None) or "it was not run"
    equal = all(then.get(name) == again.get(name) for name in ("scores", "examples"))
    data_changed = bool(again) and then.get("data") != again.get("data")
    return Verification(job, comparisons, equal, changes, data_changed, error)


def _scores(record: JobRecord | None) -> Mapping[str, float]:
    result = record.result if record is not None else None
    return (result or {}).get("scores", {})


class _Spreads:
    """Spreads of scores over seeds, pooled by model, task and metric."""

    def __init__(self, records: Iterable[JobRecord], comparisons: int) -> None:
        cells: dict[tuple[str, ...], list[float]] = {}
        for record in records:
            for name, value in _scores(record).items():
                cells.setdefault((*self._block(record), name, self._cell(record)), []).append(value)
        self._pools: dict[tuple[str, ...], list[list[float]]] = {}
        for (*block, _), values in cells.items():
            if len(values) > 1:
                self._pools.setdefault(tuple(block), []).append(values)
        self._level = LEVEL / max(1, 2 * comparisons)

    def allowed(self, record: JobRecord, metric: str) -> float:
        """Return the greatest difference between two runs of a record's spec that the spread over seeds allows."""
        pool = self._pools.get((*self._block(record), metric), [])
        freedom = sum(len(values) - 1 for values in pool)
        if not freedom:
            return 0.0
        variance = sum((len(values) - 1) * statistics.variance(values) for values in pool) / freedom
        return float(stats.t.isf(self._level, freedom)) * math.sqrt(2 * variance)

    @staticmethod
    def _block(record: JobRecord) -> tuple[str, ...]:
        spec = record.spec.get("run", record.spec)
        return record.kind, str(spec.get("model")), str(spec.get("task") or spec.get("data"))

    @staticmethod
    def _cell(record: JobRecord) -> str:
        """Return what a record is about but for its seed and its mask's seed."""
        run = dict(record.spec.get("run", record.spec))
        run.pop("seed", None)
        run["method"] = MASK_SEED.sub("", str(run.get("method")))
        return repr((sorted(run.items(), key=str), record.spec.get("other")))
