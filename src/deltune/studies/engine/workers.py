"""Workers in processes of their own, each with what its runs share; one that dies is replaced."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

from ...errors import BusyError, DeltuneError, DiskFullError
from ...training.model_cache import ModelCache
from .jobs import Job, execute

TRIES = 20
"""Half seconds that a worker waits for a folder that another process is at work on."""


@dataclass(frozen=True)
class JobResult:
    """What came of a work: its result, or an error.

    died: its worker ended in the middle. full: there is no space left. busy: another process is at work on it.
    """

    work: Job
    result: dict[str, Any] | None = None
    error: str | None = None
    seconds: float = 0.0
    died: bool = False
    full: bool = False
    busy: bool = False


class WorkerPool(Protocol):
    """Workers that are given works and answer; what an engine runs a study on."""

    def idle(self) -> list[int]:
        """Workers with nothing to do."""
        ...

    def give(self, worker: int, work: Job) -> None:
        """Let a worker do it."""
        ...

    def answers(self, timeout: float) -> list[tuple[int, JobResult]]:
        """What was answered within so many seconds, with the worker that did."""
        ...

    def close(self) -> None:
        """Stop all workers at once; what they were at goes on where it was when it is done again."""
        ...


def execute_safely(work: Job, runs: Path, parts: ModelCache) -> JobResult:
    """Do a work; whatever goes wrong is an answer too."""
    began = time.monotonic()
    for tried in range(TRIES + 1):
        try:
            return JobResult(work, execute(work, runs, parts), None, round(time.monotonic() - began, 3))
        except BusyError as error:  # by a worker whose driver was killed, in its last moment
            if tried == TRIES:
                return JobResult(work, None, str(error), busy=True)
            time.sleep(0.5)
        except DiskFullError as error:
            return JobResult(work, None, str(error), full=True)
        except DeltuneError as error:
            return JobResult(work, None, str(error) or type(error).__name__, round(time.monotonic() - began, 3))
        except Exception as error:
            said = "".join(traceback.format_exception(error)[-3:])
            return JobResult(work, None, f"{type(error).__name__}: {error}\n{said}", round(time.monotonic() - began, 3))
    raise AssertionError


class LocalPool:
    """Processes of this machine, started afresh (spawn), with an equal share of its cores."""

    def __init__(self, workers: int, runs: Path) -> None:
        self.runs = runs
        self.threads = max(1, len(os.sched_getaffinity(0)) // workers)
        self._context = multiprocessing.get_context("spawn")
        self._ends: list[Connection] = []
        self._processes: list[Any] = []
        self._at: list[Job | None] = []
        for _ in range(workers):
            end, process = self._start()
            self._ends.append(end)
            self._processes.append(process)
            self._at.append(None)

    def _start(self) -> tuple[Connection, Any]:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_work, args=(theirs, self.runs, self.threads, os.getpid()), daemon=True)
        process.start()
        theirs.close()
        return ours, process

    def idle(self) -> list[int]:
        return [i for i, work in enumerate(self._at) if work is None]

    def give(self, worker: int, work: Job) -> None:
        self._at[worker] = work
        with contextlib.suppress(BrokenPipeError, ConnectionError):  # it died meanwhile: answers() tells
            self._ends[worker].send(work)

    def answers(self, timeout: float) -> list[tuple[int, JobResult]]:
        found = []
        ready = wait([end for end, work in zip(self._ends, self._at, strict=True) if work is not None], timeout)
        for worker, end in enumerate(self._ends):
            work = self._at[worker]
            if end not in ready or work is None:
                continue
            self._at[worker] = None
            try:
                found.append((worker, end.recv()))
            except (EOFError, OSError):  # cut off in the middle of an answer, too
                self._processes[worker].join()
                code = self._processes[worker].exitcode
                how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
                found.append((worker, JobResult(work, None, f"its worker died ({how})", died=True)))
                end.close()
                self._ends[worker], self._processes[worker] = self._start()
        return found

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for end, process in zip(self._ends, self._processes, strict=True):
            process.join()
            end.close()


def _work(end: Connection, runs: Path, threads: int, parent: int) -> None:
    """A worker's life: works come in, answers go out, until the other end is closed or its process is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver's to deal with
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    import torch

    torch.set_num_threads(threads)
    parts = ModelCache()
    while True:
        try:
            work = end.recv()
        except (EOFError, ConnectionError):
            return
        end.send(execute_safely(work, runs, parts))


def _watch(parent: int, alive: Callable[[], int] = os.getppid) -> None:
    """End this process when its parent is gone."""
    while alive() == parent:
        time.sleep(0.2)
    os._exit(1)
