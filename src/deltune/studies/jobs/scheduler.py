"""The scheduler of a study: gives jobs to workers, stores their results, and goes on after any crash."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from ...errors import DiskFullError, error_summary
from ...train import ProgressDisplay
from .job import Job, topological_order
from .pool import JobResult, WorkerPool
from .progress import job_progress
from .store import REQUIREMENT_FAILED, JobRecord, ResultStore

JobPlan = Callable[[Mapping[str, JobRecord]], Sequence[Job]]
"""Finished jobs by name -> all jobs of a study, in order. A search asks for more of them as results come in."""

PROGRESS_INTERVAL = 5.0
"""Seconds between two looks at how far the jobs are that are running."""
MAX_WORKER_DEATHS = 3
"""A job that this many workers died of has failed."""

logger = logging.getLogger("deltune")


@dataclass
class Scheduler:
    """One pass through all jobs of a study.

    It counts the jobs that it did, and those that were done before or meanwhile by another process.
    """

    plan: JobPlan
    store: ResultStore
    pool: WorkerPool
    retry: bool = False
    done: int = 0
    reused: int = 0
    failed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._records: dict[str, JobRecord] = {}
        self._running: dict[str, int] = {}
        self._shares: dict[str, float] = {}  # of the jobs that are running, what is done of each
        self._shares_before: dict[str, float] = {}  # what was done of each job when this pass began it
        self._last_look = float("-inf")
        self._deaths: dict[str, int] = {}
        self._affinities: dict[int, object] = {}
        self._jobs: list[Job] = []
        self._planned_for = -1

    @property
    def records(self) -> Mapping[str, JobRecord]:
        """The records of all jobs that are done, by name."""
        return self._records

    def run(self, bar: ProgressDisplay) -> None:
        """Do every job that is not done yet, and close the pool."""
        jobs = self._plan_jobs()
        bar.start("study", len(jobs), self.reused, unit="jobs", columns=("job", "result", "took"))
        try:
            while True:
                pending = [job for job in jobs if job.name not in self._records]
                if not pending:
                    jobs = self._plan_jobs()
                    if all(job.name in self._records for job in jobs):
                        return
                    continue
                self._dispatch(pending)
                self._show_progress(bar, jobs)
                for worker, result in self.pool.poll(timeout=0.5 if self._running else 1.0):
                    self._handle(worker, result, bar)
                jobs = self._plan_jobs()
        finally:
            self.pool.close()
            self.store.release()

    def _show_progress(self, bar: ProgressDisplay, jobs: Sequence[Job]) -> None:
        """Show how many jobs are done, which ones run and how far each of them is, and how many failed."""
        running = [job for job in jobs if job.name in self._running]
        now = time.monotonic()
        if now - self._last_look >= PROGRESS_INTERVAL or self._shares.keys() != self._running.keys():
            self._last_look = now
            self._shares = {job.name: job_progress(job, self.store.runs) or 0.0 for job in running}
        labels = [f"{job.label} {self._shares[job.name]:.0%}" for job in running]
        labels += [f"{len(self.failed)} failed so far"] if self.failed else []
        bar.show({"job": "; ".join(labels)})
        done = sum(job.name in self._records for job in jobs) + sum(self._shares.values())
        bar.reach(done, len(jobs), self.reused + sum(self._shares_before.values()))

    def _plan_jobs(self) -> list[Job]:
        """Return all jobs known so far, each after what it requires.

        The plan depends on what is done, and records are only ever added, so it is made again until no planned job
        turns out to be done already.
        """
        self._read_records()
        while self._planned_for != len(self._records):
            self._planned_for = len(self._records)
            self._jobs = topological_order(self.plan(self._records))
            self._read_records()
        return self._jobs

    def _read_records(self) -> None:
        """Read the records of jobs that were done before or by another process."""
        for job in self._jobs:
            if job.name in self._records or job.name in self._running:
                continue
            record = self.store.get(job.name)
            if record is not None and not (self.retry and record.error is not None):
                self._records[job.name] = record
                self.reused += 1
                if record.error is not None:
                    self.failed.append(job.name)

    def _dispatch(self, pending: Sequence[Job]) -> None:
        """Give every idle worker a job that is ready, if possible one of the same affinity as its last."""
        for worker in self.pool.idle():
            started = {*self._running, *self._records}
            ready = [job for job in pending if job.name not in started and self._is_ready(job)]
            ready.sort(key=lambda job: job.affinity != self._affinities.get(worker))  # stable: else the study's order
            for job in ready:
                if self.store.claim(job.name, again=self.retry):
                    self._running[job.name] = worker
                    self._shares_before.setdefault(job.name, job_progress(job, self.store.runs) or 0.0)
                    self._affinities[worker] = job.affinity
                    self.pool.submit(worker, job)
                    break

    def _is_ready(self, job: Job) -> bool:
        """Return whether all that the job requires is done. A job that requires a failed one is recorded as failed."""
        for required in job.requires:
            record = self._records.get(required.name)
            if record is None:
                return False
            if record.error is not None:
                error = REQUIREMENT_FAILED.format(name=required.name, error=record.error)
                self._store(JobRecord(job.name, job.kind, dict(job.spec), None, error, 0.0, "requirement"))
                return False
        return True

    def _handle(self, worker: int, result: JobResult, bar: ProgressDisplay) -> None:
        job = result.job
        del self._running[job.name]
        if result.disk_full:
            raise DiskFullError(str(result.error))  # the disk's fault and not the job's: nothing is recorded
        if result.busy:
            self.store.release(job.name)
            logger.info("%s; it is tried again", result.error)
            return
        if result.worker_died:
            self._deaths[job.name] = self._deaths.get(job.name, 0) + 1
            self._affinities.pop(worker, None)
            if self._deaths[job.name] < MAX_WORKER_DEATHS:
                logger.info("%s: %s; it is done again", job.name, result.error)
                return
        record = JobRecord(
            job.name, job.kind, dict(job.spec), result.value, result.error, result.seconds, result.error_kind
        )
        self._store(record)
        self._show_progress(bar, self._jobs)
        bar.keep({"job": job.label, "result": result_text(result), "took": f"{result.seconds:.0f} s"})

    def _store(self, record: JobRecord) -> None:
        self.store.put(record)
        self._records[record.name] = record
        self.done += 1
        if record.error is not None:
            self.failed.append(record.name)
            logger.info("%s failed: %s", record.name, error_summary(record.error))


def result_text(result: JobResult) -> str:
    """Return what came of a job in a few words: the score that chose its epoch, else its first one, or its error."""
    if result.error is not None:
        return f"failed: {error_summary(result.error)}"
    value = cast(Mapping[str, Any], result.value or {})
    scores, best = value.get("scores", {}), value.get("best", {}).get("metric")
    name = best if best in scores else next((name for name in scores if name != "loss"), None)
    return "" if name is None else f"{value.get('split', '')} {name} {scores[name]:.4f}".strip()
