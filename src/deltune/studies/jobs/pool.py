"""Workers, each a process of this machine or an actor of a Ray cluster, with its own model cache.

One that dies is replaced.
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
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from ...errors import BusyError, DeltuneError, DiskFullError, DivergedError, check_extra, error_summary
from ...train import ModelCache
from .job import Job, ResultValues, execute
from .progress import seconds_before
from .store import ErrorKind

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
    disk_full: bool = False
    busy: bool = False
    error_kind: ErrorKind | None = None


class WorkerPool:
    """Workers that are given jobs and report their results. A worker is named by its index; if it dies it is replaced.

    Sums over several threads round in another order, so that the number of a worker's threads must not follow from the
    machine.
    """

    def __init__(self, workers: int, runs: Path, threads: int) -> None:
        self.runs, self.threads = runs, threads
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
            return JobResult(job, execute(job, runs, model_cache), None, round(time.monotonic() - start, 3))
        except BusyError as error:  # a worker whose scheduler was killed may still be at it for a moment
            if attempt == BUSY_RETRIES:
                return JobResult(job, None, str(error), busy=True, error_kind="error")
            time.sleep(0.5)
        except DiskFullError as error:
            return JobResult(job, None, str(error), disk_full=True, error_kind="error")
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

    def __init__(self, workers: int, runs: Path, threads: int = 1) -> None:
        super().__init__(workers, runs, threads)
        self._context: Any = multiprocessing.get_context("spawn")
        if sys.platform == "linux" and not torch.accelerator.is_available():
            self._context = multiprocessing.get_context("forkserver")
            self._context.set_forkserver_preload(PRELOADED)
        self._pipes: list[Connection | None] = [None] * workers
        self._processes: list[Any] = [None] * workers

    def _start(self) -> tuple[Connection, Any]:
        ours, theirs = self._context.Pipe()
        arguments = (theirs, self.runs, self.threads, dict(os.environ))
        process = self._context.Process(target=_run_worker, args=arguments, daemon=True)
        process.start()
        theirs.close()
        return ours, process

    def submit(self, worker: int, job: Job) -> None:
        self._jobs[worker] = job
        pipe = self._pipes[worker]
        if pipe is None:
            pipe, self._processes[worker] = self._start()
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
                self._pipes[worker], self._processes[worker] = self._start()
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

    def __init__(self, workers: int, runs: Path, threads: int = 1) -> None:
        check_extra("ray", "--engine ray needs")
        import ray

        super().__init__(workers, runs, threads)
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
        return self._ray.remote(num_cpus=self.threads)(_Worker).remote(str(self.runs), self.threads)

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
