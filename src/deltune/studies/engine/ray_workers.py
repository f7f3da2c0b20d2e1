"""Workers of a Ray cluster: the one that RAY_ADDRESS names, else one of this machine."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

from ...errors import DeltuneError, error_summary
from .jobs import Job
from .workers import JobResult, execute_safely

try:
    import ray
except ImportError as error:
    raise DeltuneError("--engine ray needs Ray: pip install deltune[ray]") from error


class _Worker:
    """A worker's life in the cluster; the folder of runs lies where all its machines see it."""

    def __init__(self, runs: str, threads: int) -> None:
        import torch

        from ...training.model_cache import ModelCache

        torch.set_num_threads(threads)
        self.runs, self.parts = Path(runs), ModelCache()

    def pid(self) -> int:
        """Of its process."""
        return os.getpid()

    def do(self, work: Job) -> JobResult:
        return execute_safely(work, self.runs, self.parts)


class RayPool:
    """A pool (pools.Pool) of Ray actors, a core each; one that dies is replaced."""

    def __init__(self, workers: int, runs: Path) -> None:
        self.runs = runs
        self._ours = not ray.is_initialized()
        if self._ours:
            here = "RAY_ADDRESS" not in os.environ
            own: dict[str, Any] = {"num_cpus": workers, "include_dashboard": False} if here else {}
            ray.init(log_to_driver=False, logging_level=logging.ERROR, **own)
        self._actors = [self._start() for _ in range(workers)]
        self._at: dict[Any, tuple[int, Job]] = {}

    def _start(self) -> Any:
        return ray.remote(num_cpus=1)(_Worker).remote(str(self.runs), 1)

    def pids(self) -> list[int]:
        """The workers' processes."""
        found: list[int] = ray.get([actor.pid.remote() for actor in self._actors])
        return found

    def idle(self) -> list[int]:
        busy = {worker for worker, _ in self._at.values()}
        return [i for i in range(len(self._actors)) if i not in busy]

    def give(self, worker: int, work: Job) -> None:
        self._at[self._actors[worker].do.remote(work)] = (worker, work)

    def answers(self, timeout: float) -> list[tuple[int, JobResult]]:
        if not self._at:
            time.sleep(timeout)
            return []
        ready, _ = ray.wait(list(self._at), num_returns=1, timeout=timeout)
        found = []
        for reference in ready:
            worker, work = self._at.pop(reference)
            try:
                found.append((worker, ray.get(reference)))
            except ray.exceptions.RayActorError as error:
                said = f"its worker died ({error_summary(error)})"
                found.append((worker, JobResult(work, None, said, died=True)))
                self._actors[worker] = self._start()
        return found

    def close(self) -> None:
        for actor in self._actors:
            ray.kill(actor)
        if self._ours:
            ray.shutdown()
