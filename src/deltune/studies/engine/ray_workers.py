"""Workers on a Ray cluster: the one that RAY_ADDRESS names, else a local one."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

from ...errors import error_summary, require_extra
from .jobs import Job
from .workers import JobResult, execute_safely

with require_extra("ray", "Ray", "--engine ray needs"):
    import ray


class _Worker:
    """An actor of the cluster; every machine must see the folder of runs under the same path."""

    def __init__(self, runs: str, threads: int) -> None:
        import torch

        from ...training.model_cache import ModelCache

        torch.set_num_threads(threads)
        self.runs, self.model_cache = Path(runs), ModelCache()

    def pid(self) -> int:
        return os.getpid()

    def do(self, job: Job) -> JobResult:
        return execute_safely(job, self.runs, self.model_cache)


class RayPool:
    """A `WorkerPool` of Ray actors with a core each; one that dies is replaced.

    Args:
        workers: How many actors.
        runs: The study's folder of runs, on a disk that all machines share.
    """

    def __init__(self, workers: int, runs: Path) -> None:
        self.runs = runs
        self._started_ray = not ray.is_initialized()
        if self._started_ray:
            local = "RAY_ADDRESS" not in os.environ
            options: dict[str, Any] = {"num_cpus": workers, "include_dashboard": False} if local else {}
            ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
        self._actors = [self._start() for _ in range(workers)]
        self._running: dict[Any, tuple[int, Job]] = {}

    def _start(self) -> Any:
        return ray.remote(num_cpus=1)(_Worker).remote(str(self.runs), 1)

    def pids(self) -> list[int]:
        """Return the process ids of the workers."""
        pids: list[int] = ray.get([actor.pid.remote() for actor in self._actors])
        return pids

    def idle(self) -> list[int]:
        """Return the workers that have nothing to do."""
        busy = {worker for worker, _ in self._running.values()}
        return [i for i in range(len(self._actors)) if i not in busy]

    def submit(self, worker: int, job: Job) -> None:
        """Give a job to an idle worker."""
        self._running[self._actors[worker].do.remote(job)] = (worker, job)

    def poll(self, timeout: float) -> list[tuple[int, JobResult]]:
        """Return the results that arrive within `timeout` seconds; an actor that died is replaced."""
        if not self._running:
            time.sleep(timeout)
            return []
        ready, _ = ray.wait(list(self._running), num_returns=1, timeout=timeout)
        results = []
        for reference in ready:
            worker, job = self._running.pop(reference)
            try:
                results.append((worker, ray.get(reference)))
            except ray.exceptions.RayActorError as error:
                message = f"its worker died ({error_summary(error)})"
                results.append((worker, JobResult(job, None, message, worker_died=True)))
                self._actors[worker] = self._start()
        return results

    def close(self) -> None:
        """Kill all actors, and stop Ray if this pool started it."""
        for actor in self._actors:
            ray.kill(actor)
        if self._started_ray:
            ray.shutdown()
