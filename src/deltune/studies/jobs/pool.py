"""The jobs of a study are done: by workers, each with its own model cache, that a scheduler gives them to.

A worker is a process of this machine or an actor of a Ray cluster; one that dies is replaced. The scheduler stores
their results, and goes on after any crash.
"""

from __future__ import annotations

import contextlib
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
from typing import Any

import torch

from ...errors import BusyError, DeltuneError, DivergedError, StorageError, check_extra, error_summary
from ...files import explain_write_errors, read_jsonl
from ...train import ModelCache, ProgressDisplay, RunFolder
from .job import Job, ResultValues, config_of, execute, run_folder, topological_order
from .store import REQUIREMENT_FAILED, ErrorKind, JobRecord, ResultStore

BUSY_RETRIES = 20
"""How often a worker waits half a second for a run directory that another process is writing."""

PRELOADED = ["deltune.train.run", "deltune.studies.jobs.pool"]
"""What the server of worker processes imports before the first is forked."""

Answer = JobRecord | BusyError | StorageError
"""A worker's answer to a job: the record, or an error of the machine, of which nothing is recorded."""


class WorkerPool:
    """Workers that are given jobs and report their results. A worker is named by its index; if it dies it is replaced.

    With `devices` each worker has as many accelerators of its own and sees no other. Sums over several threads round in
    another order, so that the number of a worker's threads must not follow from the machine.
    """

    def __init__(self, workers: int, runs: Path, threads: int = 1, devices: int = 0) -> None:
        self.workers, self.runs, self.threads, self.devices = workers, runs, threads, devices
        self.jobs: dict[int, Job] = {}  # of the workers that are busy

    def idle(self) -> list[int]:
        """Return the workers that have nothing to do."""
        return [worker for worker in range(self.workers) if worker not in self.jobs]

    def submit(self, worker: int, job: Job) -> None:
        """Give a job to an idle worker."""
        raise NotImplementedError

    def poll(self, timeout: float) -> list[tuple[int, Answer]]:
        """Return the answers that arrive within `timeout` seconds, each with its worker."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop all workers at once. A job that was interrupted resumes when it is done again."""
        raise NotImplementedError


def execute_safely(job: Job, runs: Path, model_cache: ModelCache) -> Answer:
    """Do a job and return its record, with its result or the error that it ended with."""
    start = time.monotonic()
    try:
        with explain_write_errors(runs):
            value = _execute_when_free(job, runs, model_cache)
    except (BusyError, StorageError) as error:
        return error
    except DeltuneError as error:
        kind: ErrorKind = "diverged" if isinstance(error, DivergedError) else "error"
        return job_record(job, error=str(error) or type(error).__name__, kind=kind, seconds=time.monotonic() - start)
    except Exception as error:
        message = f"{type(error).__name__}: {error}\n{''.join(traceback.format_exception(error)[-3:])}"
        return job_record(job, error=message, kind="exception", seconds=time.monotonic() - start)
    trained = float(value.get("seconds", 0.0))  # with those before an interruption
    return job_record(job, value, seconds=max(trained, time.monotonic() - start))


def _execute_when_free(job: Job, runs: Path, model_cache: ModelCache) -> ResultValues:
    """Do a job; wait a moment while the worker of a scheduler that was killed still holds its folder."""
    for _ in range(BUSY_RETRIES):
        with contextlib.suppress(BusyError):
            return execute(job, runs, model_cache)
        time.sleep(0.5)
    return execute(job, runs, model_cache)


def job_record(
    job: Job,
    value: ResultValues | None = None,
    error: str | None = None,
    kind: ErrorKind | None = None,
    seconds: float = 0.0,
) -> JobRecord:
    """Return the record of a job that has just ended."""
    return JobRecord(job.name, job.kind, dict(job.spec), value, error, round(seconds, 3), kind)


def _died(job: Job, reason: str) -> JobRecord:
    return job_record(job, error=f"its worker died ({reason})", kind="worker_died")


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
        self._pipes: dict[int, Connection] = {}
        self._processes: dict[int, Any] = {}

    def environment(self, worker: int) -> dict[str, str]:
        """Return the variables of a worker's process: ours, and the accelerators that it sees."""
        first, end = worker * self.devices, (worker + 1) * self.devices
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(end)))).split(",")
        return {**os.environ, **({"CUDA_VISIBLE_DEVICES": ",".join(visible[first:end])} if self.devices else {})}

    def _start(self, worker: int) -> None:
        self._pipes[worker], theirs = self._context.Pipe()
        arguments = (theirs, self.runs, self.threads, self.environment(worker))
        self._processes[worker] = self._context.Process(target=_run_worker, args=arguments, daemon=True)
        self._processes[worker].start()
        theirs.close()

    def submit(self, worker: int, job: Job) -> None:
        self.jobs[worker] = job
        if worker not in self._pipes:
            self._start(worker)
        with contextlib.suppress(ConnectionError):  # the worker died meanwhile: poll() reports it
            self._pipes[worker].send(job)

    def poll(self, timeout: float) -> list[tuple[int, Answer]]:
        answers: list[tuple[int, Answer]] = []
        busy = {self._pipes[worker]: worker for worker in self.jobs}
        for pipe in wait(list(busy), timeout):
            assert isinstance(pipe, Connection)
            worker = busy[pipe]
            job = self.jobs.pop(worker)
            try:
                answers.append((worker, pipe.recv()))
            except (EOFError, OSError):  # also cut off in the middle of a result
                self._processes[worker].join()
                code = self._processes[worker].exitcode
                answers.append((worker, _died(job, f"signal {-code}" if code < 0 else f"exit code {code}")))
                pipe.close()
                self._start(worker)
        return answers

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
        for worker, process in self._processes.items():
            process.join()
            self._pipes[worker].close()


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

    def do(self, job: Job) -> Answer:
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
        """Reference to an answer -> the worker that will give it."""

    def _start(self) -> Any:
        return self._ray.remote(num_cpus=self.threads, num_gpus=self.devices)(_Worker).remote(
            str(self.runs), self.threads
        )

    def pids(self) -> list[int]:
        """Return the process ids of the workers."""
        pids: list[int] = self._ray.get([actor.pid.remote() for actor in self._actors])
        return pids

    def submit(self, worker: int, job: Job) -> None:
        self.jobs[worker] = job
        self._workers[self._actors[worker].do.remote(job)] = worker

    def poll(self, timeout: float) -> list[tuple[int, Answer]]:
        if not self._workers:
            time.sleep(timeout)
            return []
        ready, _ = self._ray.wait(list(self._workers), num_returns=1, timeout=timeout)
        answers: list[tuple[int, Answer]] = []
        for reference in ready:
            worker = self._workers.pop(reference)
            job = self.jobs.pop(worker)
            try:
                answers.append((worker, self._ray.get(reference)))
            except self._ray.exceptions.RayActorError as error:
                answers.append((worker, _died(job, error_summary(error))))
                self._actors[worker] = self._start()
        return answers

    def close(self) -> None:
        for actor in self._actors:
            self._ray.kill(actor)
        if self._started_ray:
            self._ray.shutdown()


JobPlan = Callable[[Mapping[str, JobRecord]], Sequence[Job]]
"""Finished jobs by name -> all jobs of a study, in order. A search asks for more of them as results come in."""

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
    records: dict[str, JobRecord] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._running: dict[int, Job] = {}
        self._deaths: dict[Job, int] = {}
        self._affinities: dict[int, object] = {}
        self._jobs: list[Job] = []
        self._planned_for = -1

    def run(self, bar: ProgressDisplay) -> None:
        """Do every job that is not done yet, and close the pool."""
        jobs = self._plan_jobs()
        bar.start("study", len(jobs), self.reused, unit="jobs", columns=("job", "result", "took"))
        try:
            while pending := [job for job in jobs if job.name not in self.records]:
                self._dispatch(pending)
                self._show_progress(bar)
                for worker, answer in self.pool.poll(timeout=0.5 if self._running else 1.0):
                    self._handle(worker, answer, bar)
                jobs = self._plan_jobs()
        finally:
            self.pool.close()
            self.store.release()

    def _show_progress(self, bar: ProgressDisplay) -> None:
        """Show how many jobs are done, which ones run, and how many failed."""
        labels = [job.label for job in self._running.values()]
        labels += [f"{len(self.failed)} failed so far"] if self.failed else []
        bar.show({"job": "; ".join(labels)})
        bar.reach(sum(job.name in self.records for job in self._jobs), len(self._jobs), self.reused)

    def _plan_jobs(self) -> list[Job]:
        """Return all jobs known so far, each after what it requires.

        The plan depends on what is done, and records are only ever added, so it is made again until no planned job
        turns out to be done already.
        """
        self._read_records()
        while self._planned_for != len(self.records):
            self._planned_for = len(self.records)
            self._jobs = topological_order(self.plan(self.records))
            self._read_records()
        return self._jobs

    def _read_records(self) -> None:
        """Read the records of jobs that were done before or by another process."""
        for job in self._jobs:
            if job.name in self.records or job in self._running.values():
                continue
            record = self.store.get(job.name)
            if record is not None and not (self.retry and record.error is not None):
                self.records[job.name] = record
                self.reused += 1
                if record.error is not None:
                    self.failed.append(job.name)

    def _dispatch(self, pending: Sequence[Job]) -> None:
        """Give every idle worker a job that is ready, if possible one of the same affinity as its last."""
        for worker in self.pool.idle():
            ready = [
                job
                for job in pending
                if job.name not in self.records and job not in self._running.values() and self._is_ready(job)
            ]
            ready.sort(key=lambda job: job.affinity != self._affinities.get(worker))  # stable: else the study's order
            for job in ready:
                if self.store.claim(job.name, again=self.retry):
                    self._running[worker] = job
                    self._affinities[worker] = job.affinity
                    self.pool.submit(worker, job)
                    break

    def _is_ready(self, job: Job) -> bool:
        """Return whether all that the job requires is done. A job that requires a failed one is recorded as failed."""
        for required in job.requires:
            record = self.records.get(required.name)
            if record is None:
                return False
            if record.error is not None:
                error = REQUIREMENT_FAILED.format(name=required.name, error=record.error)
                self._store(job_record(job, error=error, kind="requirement"))
                return False
        return True

    def _handle(self, worker: int, answer: Answer, bar: ProgressDisplay) -> None:
        job = self._running.pop(worker)
        if isinstance(answer, StorageError):
            raise answer
        if isinstance(answer, BusyError):
            self.store.release(job.name)
            logger.info("%s; it is tried again", answer)
            return
        if answer.error_kind == "worker_died":
            self._deaths[job] = self._deaths.get(job, 0) + 1
            self._affinities.pop(worker, None)
            if self._deaths[job] < MAX_WORKER_DEATHS:
                logger.info("%s: %s; it is done again", job.name, answer.error)
                return
        self._store(answer)
        self._show_progress(bar)
        bar.keep({"job": job.label, "result": result_text(answer), "took": f"{answer.seconds:.0f} s"})

    def _store(self, record: JobRecord) -> None:
        self.store.put(record)
        self.records[record.name] = record
        self.done += 1
        if record.error is not None:
            self.failed.append(record.name)
            logger.info("%s failed: %s", record.name, error_summary(record.error))


def result_text(record: JobRecord) -> str:
    """Return what came of a job in a few words: the score that chose its epoch, else its first one, or its error."""
    if record.result is None:
        return f"failed: {error_summary(str(record.error))}"
    scores, best = record.result.get("scores", {}), record.result.get("best", {}).get("metric")
    name = best if best in scores else next((name for name in scores if name != "loss"), None)
    return "" if name is None else f"{record.result.get('split', '')} {name} {scores[name]:.4f}".strip()


def job_progress(job: Job, runs: Path) -> float | None:
    """Return the share of a job that is done, as the folder of its run says, whoever works on it.

    It is judged by the time that training says is left; None where the job has not begun or leaves no trace.
    """
    if job.kind != "run":
        return None
    with contextlib.suppress(DeltuneError, OSError):  # it is being written, or a damaged file: the job reports it
        run = RunFolder(run_folder(runs, config_of(job)))
        return _share_done(run) if run.exists else None
    return None


def _share_done(run: RunFolder) -> float:
    if run.finished:
        return 1.0
    config = run.config
    if config.is_series:
        count = len(config.search_configs()) + max(0, len(config.runtime.seeds) - 1)
        singles = [RunFolder(path) for path in run.runs.glob("*")]
        return sum(_share_done(single) for single in singles if single.exists) / count
    share = 0.0
    with contextlib.suppress(DeltuneError):  # no line yet, or the last one is half written
        for _, line in read_jsonl(run.log_file):
            if total := float(line.get("seconds", 0.0)) + float(line.get("seconds_left", 0.0)):
                share = float(line["seconds"]) / total if "seconds_left" in line else share
    return share
