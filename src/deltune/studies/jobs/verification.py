"""Repeating stored results: a sample of jobs is run again and compared.

Where machine, versions and threads are as they were, the new result must be equal to the last digit. Elsewhere sums are
rounded in another order. The loss of a run's first steps may then differ by what two processors were measured to
differ by, and so may the scores of at least half of a sample; the others are of runs whose training makes rounding
larger, which only begin alike. Another seed moves the first loss, and other training the scores of all.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ...train import METRICS
from .job import Job
from .store import JobRecord

Verdict = Literal["equal", "equal but for rounding", "begins alike", "differs"]

ROUNDING = 3e-5
"""The share of a metric's range, or of a loss, by which results of two processors differ. Of 2,037 pairs of committed
runs that differ in the seed by one, the first losses of none are as near: they are 6e-5 apart and more, 5e-2 in the
median."""


@dataclass(frozen=True)
class Comparison:
    """One score of a job, stored and now, and the greatest difference that rounding explains."""

    name: str
    stored: float
    now: float | None

    @property
    def allowed(self) -> float:
        """The greatest difference that rounding explains."""
        largest = METRICS[self.name].range[1] if self.name in METRICS else None
        return ROUNDING * (largest if largest in (1.0, 100.0) else max(1.0, abs(self.stored)))

    @property
    def agrees(self) -> bool:
        """True if the scores differ by no more than is allowed."""
        return self.now is not None and abs(self.now - self.stored) <= self.allowed


@dataclass(frozen=True)
class Verification:
    """A stored job that was run again, and how its scores compare.

    `changes` are the fields of the environment that differ, each with both values; `first_loss` is the loss of the
    first steps, if the job trained.
    """

    job: Job
    comparisons: tuple[Comparison, ...]
    equal: bool
    changes: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    data_changed: bool = False
    error: str | None = None
    first_loss: Comparison | None = None

    @property
    def verdict(self) -> Verdict:
        """The verdict; in the same environment only an equal result repeats the job."""
        if self.equal:
            return "equal"
        if self.error is not None or self.data_changed or not self.changes:
            return "differs"
        if self.first_loss is not None and not self.first_loss.agrees:
            return "differs"
        if all(one.agrees for one in self.comparisons):
            return "equal but for rounding"
        return "differs" if self.first_loss is None else "begins alike"


def repeats(verifications: Sequence[Verification]) -> bool:
    """Return whether a sample repeats what is stored: no job differs, and at least half have the scores they had."""
    verdicts = [one.verdict for one in verifications]
    return "differs" not in verdicts and 2 * verdicts.count("begins alike") <= len(verdicts)


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
    """Compare the results of jobs that were run again with the stored ones."""
    return [_compare(job, stored[job.name], repeated.get(job.name)) for job in jobs]


def _compare(job: Job, before: JobRecord, after: JobRecord | None) -> Verification:
    now = _scores(after)
    comparisons = tuple(Comparison(name, value, now.get(name)) for name, value in _scores(before).items())
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
    losses = [_first_loss(result) for result in (then, again)]
    first_loss = None if losses[0] is None else Comparison("loss of the first steps", losses[0], losses[1])
    return Verification(job, comparisons, equal, changes, data_changed, error, first_loss)


def _first_loss(result: Mapping[str, Any]) -> float | None:
    """Return the first loss of a curve, which the committed results have at step 1 to 13."""
    return next((line["loss"] for line in result.get("curve", ()) if "loss" in line), None)


def _scores(record: JobRecord | None) -> Mapping[str, float]:
    result = record.result if record is not None else None
    return (result or {}).get("scores", {})
