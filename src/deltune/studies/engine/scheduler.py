"""Driving a study: what is not done yet is given to workers, what they answer is kept, whatever dies on the way."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ...errors import DiskFullError, error_summary
from ...training.progress import ProgressBar
from .jobs import Job, topological_order
from .store import BEAT, JobRecord, ResultStore
from .workers import JobResult, WorkerPool

Plan = Callable[[Mapping[str, JobRecord]], Sequence[Job]]
"""The works of a study, in order, given what is done so far: a search asks for more as it learns."""

LIVES = 3
"""How many workers a work may take with it before it counts as failed."""

told = logging.getLogger("deltune")


@dataclass
class Scheduler:
    """One drive through a study's works. outcome: done here, found done, failed."""

    plan: Plan
    results: ResultStore
    pool: WorkerPool
    retry: bool = False
    done: int = 0
    found: int = 0
    failed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rows: dict[str, JobRecord] = {}
        self._running: dict[str, int] = {}
        self._deaths: dict[str, int] = {}
        self._kin: dict[int, object] = {}
        self._works: list[Job] = []
        self._planned_for = -1

    def run(self, bar: ProgressBar) -> None:
        """Until nothing is left to do. Errors: a results file that cannot be written; what was finished is kept."""
        beat = time.monotonic()
        works = self._planned()
        bar.start("study", len(works), self.found)
        try:
            while True:
                left = [work for work in works if work.name not in self._rows]
                if not left:
                    works = self._planned()
                    if all(work.name in self._rows for work in works):
                        return
                    continue
                self._dispatch(left)
                for worker, answered in self.pool.answers(timeout=0.5 if self._running else 1.0):
                    self._take(worker, answered, bar)
                works = self._planned()
                bar.total(len(works))
                if time.monotonic() - beat > BEAT:
                    beat = time.monotonic()
                    self.results.beat()
        finally:
            self.pool.close()
            self.results.release()

    def _planned(self) -> list[Job]:
        """All works that are wanted now, each after what it needs; those that are done are looked up once.

        A plan depends on what is done, and rows are only ever added: it is made again until it finds no more of them.
        """
        self._look_up()
        while self._planned_for != len(self._rows):
            self._planned_for = len(self._rows)
            self._works = topological_order(self.plan(self._rows))
            self._look_up()
        return self._works

    def _look_up(self) -> None:
        """Take the rows of what was done elsewhere."""
        for work in self._works:
            if work.name in self._rows or work.name in self._running:
                continue
            row = self.results.get(work.name)
            if row is not None and not (self.retry and row.error is not None):  # our own are among the rows already
                self._rows[work.name] = row
                self.found += 1
                if row.error is not None:
                    self.failed.append(work.name)

    def _dispatch(self, left: Sequence[Job]) -> None:
        """Give every idle worker something that is ready, of the kin of its last if there is any."""
        for worker in self.pool.idle():
            known = {*self._running, *self._rows}
            ready = [work for work in left if work.name not in known and self._ready(work)]
            ready.sort(key=lambda work: work.kin != self._kin.get(worker))  # stable: else in the order of the study
            for work in ready:
                if self.results.claim(work.name, again=self.retry):
                    self._running[work.name] = worker
                    self._kin[worker] = work.kin
                    self.pool.give(worker, work)
                    break

    def _ready(self, work: Job) -> bool:
        """Whether all it needs is there; what needs something that failed fails with it."""
        for need in work.needs:
            row = self._rows.get(need.name)
            if row is None:
                return False
            if row.error is not None:
                self._keep(
                    JobRecord(work.name, work.kind, dict(work.spec), None, f"it needs {need.name}: {row.error}", 0.0)
                )
                return False
        return True

    def _take(self, worker: int, answered: JobResult, bar: ProgressBar) -> None:
        work = answered.work
        del self._running[work.name]
        if answered.full:
            raise DiskFullError(str(answered.error))  # of the disk, not of the work: nothing is kept of it
        if answered.busy:
            self.results.release(work.name)
            told.info("%s; it is tried again", answered.error)
            return
        if answered.died:
            self._deaths[work.name] = self._deaths.get(work.name, 0) + 1
            self._kin.pop(worker, None)
            if self._deaths[work.name] < LIVES:
                told.info("%s: %s; it is done again", work.name, answered.error)
                return
        self._keep(JobRecord(work.name, work.kind, dict(work.spec), answered.result, answered.error, answered.seconds))
        bar.advance()
        bar.note(f"{len(self.failed)} failed" if self.failed else "")

    def _keep(self, row: JobRecord) -> None:
        self.results.put(row)
        self._rows[row.name] = row
        self.done += 1
        if row.error is not None:
            self.failed.append(row.name)
            told.info("%s failed: %s", row.name, error_summary(row.error))
