"""The jobs of a study are done: by workers, each with its own model cache, that a scheduler gives them to.

A worker is a process of this machine or an actor of a Ray cluster; one that dies is replaced. The scheduler stores
their results, and goes on after any crash.
"""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

import torch

from ...errors import BusyError, DeltuneError, DivergedError, StorageError, check_extra, error_summary
from ...files import explain_write_errors
from ...train import ModelCache, ProgressDisplay, RunFolder, latest_checkpoint, read_progress
from .job import Job, ResultValues, config_of, execute, run_folder, topological_order
from .store import REQUIREMENT_FAILED, ErrorKind, JobRecord, ResultStore

BUSY_RETRIES = 20
"""How often a worker waits half a second for a run directory that another process is writing."""

PRELOADED = ["deltune.train.run", "deltune.studies.jobs.pool"]
"""What the server of worker processes imports before the first is forked."""


@dataclass(frozen=True)
class JobResult:
    """What a worker reports of a job."""

    job: Job
    value: ResultValues | None = None
    error: str | None = None
    seconds: float = 0.0
    worker_died: bool = False
    storage_failed: bool = False
    busy: bool = False
    error_kind: ErrorKind | None = None


class WorkerPool:
    """Workers that are given jobs and report their results. A worker is named by its index; if it dies it is replaced.

    With `devices` each worker has as many accelerators of its own and sees no other. Sums over several threads round in
    another order, so that the number of a worker's threads must not follow from the machine.
    """

    def __init__(self, workers: int, runs: Path, threads: int, devices: int = 0) -> None:
        self.runs, self.threads, self.devices = runs, threads, devices
        self._jobs: list[Job | None] = [None] * workers

    def idle(self) -> list[int]:
        """Return the workers that have nothing to do."""
        return [i for i, job in enumerate(self._jobs) if job is None]

    def submit(self, worker: int, job: Job) -> None:
        """Give a job to an idle worker."""
        raise NotImplementedError

    def poll(self, timeout: float) -> list[tuple[int, JobResult]]:
        """Return the results that arrive within `timeout` seconds, each with its worker."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop all workers at once. A job that was interrupted resumes when it is done again."""
        raise NotImplementedError


def execute_safely(job: Job, runs: Path, model_cache: ModelCache) -> JobResult:
    """Do a job and report its result, or the error that it ended with."""
    begun = start = time.monotonic()
    for attempt in range(BUSY_RETRIES + 1):
        try:
            start = begun - seconds_before(job, runs)
            with explain_write_errors(runs):
                value = execute(job, runs, model_cache)
            return JobResult(job, value, None, round(time.monotonic() - start, 3))
        except BusyError as error:  # a worker whose scheduler was killed may still be at it for a moment
            if attempt == BUSY_RETRIES:
                return JobResult(job, None, str(error), busy=True, error_kind="error")
            time.sleep(0.5)
        except StorageError as error:
            return JobResult(job, None, str(error), storage_failed=True, error_kind="error")
        except DeltuneError as error:
            kind: ErrorKind = "diverged" if isinstance(error, DivergedError) else "error"
            message = str(error) or type(error).__name__
            return JobResult(job, None, message, round(time.monotonic() - start, 3), error_kind=kind)
        except Exception as error:
            lines = "".join(traceback.format_exception(error)[-3:])
            message = f"{type(error).__name__}: {error}\n{lines}"
            return JobResult(job, None, message, round(time.monotonic() - start, 3), error_kind="exception")
    raise AssertionError


def _died(job: Job, reason: str) -> JobResult:
    """Return the result of a job whose worker ended in the middle."""
    return JobResult(job, None, f"its worker died ({reason})", worker_died=True, error_kind="worker_died")


class LocalPool(WorkerPool):
    """Processes of this machine, each started when it is given its first job.

    They are forked from a server process that has imported what a job needs, once for all of them. Where there is an
    accelerator they are spawned, since an import may already have initialized it, which a fork does not survive.
    """

    def __init__(self, workers: int, runs: Path, threads: int = 1, devices: int = 0) -> None:
        super().__init__(workers, runs, threads, devices)
        named = os.environ.get("CUDA_VISIBLE_DEVICES")
        if named is not None and len(list(filter(None, named.split(",")))) < workers * devices:
            raise DeltuneError(
                f"{workers * devices} accelerators are asked for, and CUDA_VISIBLE_DEVICES names {named!r}: name as "
                "many there, or give fewer by --devices"
            )
        self._context: Any = multiprocessing.get_context("spawn")
        if sys.platform == "linux" and not torch.accelerator.is_available():
            self._context = multiprocessing.get_context("forkserver")
            self._context.set_forkserver_preload(PRELOADED)
        self._pipes: list[Connection | None] = [None] * workers
        self._processes: list[Any] = [None] * workers

    def environment(self, worker: int) -> dict[str, str]:
        """Return the variables of a worker's process: ours, and the accelerators that it sees."""
        first, end = worker * self.devices, (worker + 1) * self.devices
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(end)))).split(",")
        return {**os.environ, **({"CUDA_VISIBLE_DEVICES": ",".join(visible[first:end])} if self.devices else {})}

    def _start(self, worker: int) -> tuple[Connection, Any]:
        ours, theirs = self._context.Pipe()
        arguments = (theirs, self.runs, self.threads, self.environment(worker))
        process = self._context.Process(target=_run_worker, args=arguments, daemon=True)
        process.start()
        theirs.close()
        return ours, process

    def submit(self, worker: int, job: Job) -> None:
        self._jobs[worker] = job
        pipe = self._pipes[worker]
        if pipe is None:
            pipe, self._processes[worker] = self._start(worker)
            self._pipes[worker] = pipe
        with contextlib.suppress(BrokenPipeError, ConnectionError):  # the worker died meanwhile: poll() reports it
            pipe.send(job)

    def poll(self, timeout: float) -> list[tuple[int, JobResult]]:
        results: list[tuple[int, JobResult]] = []
        busy = [pipe for pipe, job in zip(self._pipes, self._jobs, strict=True) if pipe is not None and job is not None]
        if not busy:
            time.sleep(timeout)
            return results
        ready = wait(busy, timeout)
        for worker, pipe in enumerate(self._pipes):
            job = self._jobs[worker]
            if pipe is None or pipe not in ready or job is None:
                continue
            self._jobs[worker] = None
            try:
                results.append((worker, pipe.recv()))
            except (EOFError, OSError):  # also cut off in the middle of a result
                self._processes[worker].join()
                code = self._processes[worker].exitcode
                reason = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
                results.append((worker, _died(job, reason)))
                pipe.close()
                self._pipes[worker], self._processes[worker] = self._start(worker)
        return results

    def close(self) -> None:
        started = [
            (pipe, process) for pipe, process in zip(self._pipes, self._processes, strict=True) if pipe is not None
        ]
        for _, process in started:
            process.kill()
        for pipe, process in started:
            process.join()
            pipe.close()


def _run_worker(pipe: Connection, runs: Path, threads: int, environment: dict[str, str]) -> None:
    """Do the jobs that come through the pipe until it is closed or the parent process is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the scheduler handles it
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    os.environ.clear()  # the server's is older than what the parent process may have set since
    os.environ.update(environment)
    torch.set_num_threads(threads)
    model_cache = ModelCache()
    while True:
        try:
            job = pipe.recv()
        except (EOFError, ConnectionError):
            return
        pipe.send(execute_safely(job, runs, model_cache))


def _exit_with_parent() -> None:
    """Wait for the end of the process that made the pool, which is not the one that forked this process."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


class _Worker:
    """An actor of the cluster; every machine must see the folder of runs under the same path."""

    def __init__(self, runs: str, threads: int) -> None:
        torch.set_num_threads(threads)
        self.runs, self.model_cache = Path(runs), ModelCache()

    def pid(self) -> int:
        return os.getpid()

    def do(self, job: Job) -> JobResult:
        return execute_safely(job, self.runs, self.model_cache)


class RayPool(WorkerPool):
    """Ray actors with a core for each of their threads; the folder of runs is on a disk that all machines share."""

    def __init__(self, workers: int, runs: Path, threads: int = 1, devices: int = 0) -> None:
        check_extra("ray", "--ray needs")
        import ray

        super().__init__(workers, runs, threads, devices)
        self._ray = ray
        self._started_ray = not ray.is_initialized()
        if self._started_ray:
            local = "RAY_ADDRESS" not in os.environ
            options: dict[str, Any] = {"num_cpus": workers * threads, "include_dashboard": False} if local else {}
            ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
        self._actors = [self._start() for _ in range(workers)]
        self._workers: dict[Any, int] = {}
        """Reference to a result -> the worker that will report it."""

    def _start(self) -> Any:
        return self._ray.remote(num_cpus=self.threads, num_gpus=self.devices)(_Worker).remote(
            str(self.runs), self.threads
        )

    def pids(self) -> list[int]:
        """Return the process ids of the workers."""
        pids: list[int] = self._ray.get([actor.pid.remote() for actor in self._actors])
        return pids

    def submit(self, worker: int, job: Job) -> None:
        self._jobs[worker] = job
        self._workers[self._actors[worker].do.remote(job)] = worker

    def poll(self, timeout: float) -> list[tuple[int, JobResult]]:
        if not self._workers:
            time.sleep(timeout)
            return []
        ready, _ = self._ray.wait(list(self._workers), num_returns=1, timeout=timeout)
        results = []
        for reference in ready:
            worker = self._workers.pop(reference)
            job, self._jobs[worker] = self._jobs[worker], None
            assert job is not None
            try:
                results.append((worker, self._ray.get(reference)))
            except self._ray.exceptions.RayActorError as error:
                results.append((worker, _died(job, error_summary(error))))
                self._actors[worker] = self._start()
        return results

    def close(self) -> None:
        for actor in self._actors:
            self._ray.kill(actor)
        if self._started_ray:
            self._ray.shutdown()


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
        if result.storage_failed:
            raise StorageError(str(result.error))  # not the job's fault: nothing is recorded
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


# -- progress of jobs that are not done yet, as the folders of their runs say, whoever works on them

TAIL = 2**16
"""Bytes at the end of a log in which its last line is looked for."""


def job_progress(job: Job, runs: Path) -> float | None:
    """Return the share of a job that is done; None where it has not begun, or leaves no trace before its end.

    It is judged by the time that its training says is left.
    """
    try:
        run = _run_of(job, runs)
        return None if run is None else _share_done(run)
    except (DeltuneError, OSError):  # it is being written, or a damaged file, which the job itself will report
        return None


def seconds_before(job: Job, runs: Path) -> float:
    """Return the seconds of earlier work that a job goes on from: those up to its checkpoint, 0 without any."""
    run = _run_of(job, runs)
    return 0.0 if run is None else _kept_seconds(run)


def _run_of(job: Job, runs: Path) -> RunFolder | None:
    """Return the run that a job trains, where that is what it does and the run has begun."""
    run = RunFolder(run_folder(runs, config_of(job))) if job.kind == "run" else None
    return run if run is not None and run.exists else None


def _single_runs(run: RunFolder) -> list[RunFolder]:
    return [single for path in sorted(run.runs.glob("*")) if (single := RunFolder(path)).exists]


def _share_done(run: RunFolder) -> float:
    if run.finished:
        return 1.0
    config = run.config
    if config.is_series:
        count = len(config.search_configs()) + max(0, len(config.runtime.seeds) - 1)
        return sum(map(_share_done, _single_runs(run))) / count
    if not run.log_file.is_file():
        return 0.0
    with open(run.log_file, "rb") as file:
        file.seek(max(0, run.log_file.stat().st_size - TAIL))
        lines = file.read().splitlines()
    for line in reversed(lines):
        with contextlib.suppress(ValueError, TypeError, KeyError):  # the last line may be half written
            values = json.loads(line)
            seconds, left = float(values["seconds"]), float(values["seconds_left"])
            return seconds / (seconds + left) if seconds + left else 0.0
    return 0.0


def _kept_seconds(run: RunFolder) -> float:
    if run.finished:
        return float(run.metrics.seconds)
    if run.config.is_series:
        return sum(map(_kept_seconds, _single_runs(run)))
    checkpoint = latest_checkpoint(run.checkpoint)
    return 0.0 if checkpoint is None else float(read_progress(checkpoint)["seconds"])
