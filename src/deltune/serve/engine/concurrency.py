"""Passes of a model that run at the same time on a CPU, each on its share of torch's threads."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from ...anatomy.skeleton import base_modules
from ...compat import buffers_of, tensor_version

T = TypeVar("T")


MAPS = Path("/proc/self/maps")
"""Where Linux lists the libraries that a process has loaded."""


@cache
def _openmp_libraries() -> tuple[ctypes.CDLL, ...]:
    """Return the GNU OpenMP libraries that this process has loaded: torch's, and maybe those of other packages."""
    paths: set[str] = set()
    with contextlib.suppress(OSError):
        lines = MAPS.read_text(encoding="utf-8", errors="replace").splitlines()
        paths = {line[line.index("/") :] for line in lines if "/libgomp" in line}
    libraries = []
    for path in sorted(paths):
        with contextlib.suppress(OSError):
            libraries.append(ctypes.CDLL(path))
    return tuple(library for library in libraries if hasattr(library, "omp_pause_resource_all"))


def release_worker_threads() -> None:
    """End the worker threads that OpenMP keeps for the thread that calls this.

    OpenMP keeps workers for every thread that has computed something in parallel, such as one that has loaded a model.
    As soon as a process has more of them than cores, GNU's OpenMP lets them sleep between two operations, in place of
    waiting awake, and every operation of every thread must wake its own: a layer of 16 rows of MiniLM took 434 µs
    instead of 283 on two cores while another thread had workers. So a thread that has nothing to do gives them up. It
    gets new ones by itself when it next computes in parallel. With other OpenMP libraries nothing is done.
    """
    for library in _openmp_libraries():
        library.omp_pause_resource_all(1)  # omp_pause_soft


NICENESS = 5
"""The increase of the niceness of threads that compute."""


def give_way_to_other_threads() -> None:
    """Lower the priority of this thread and of those that it will start, in favour of the other threads of the process.

    Passes keep all cores busy, so a thread that reads a delta or takes a request has to wait for a core several times
    in a few milliseconds. Linux has a niceness for each thread. Elsewhere it belongs to the process, and nothing is
    done.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            os.nice(NICENESS)


def thread_pool(workers: int, share: int, name: str, gives_way: bool = False) -> ThreadPoolExecutor:
    """Return a pool whose threads run by now, each computing on a number of torch's threads of its own.

    Each has `share` of torch's threads; those of this thread and of others stay as they are.
    """
    threads, started = torch.get_num_threads(), threading.Barrier(workers + 1)

    def start() -> None:
        torch.get_num_threads()  # before it is set, since torch sets it when a thread first asks
        torch.set_num_threads(share)
        if gives_way:
            give_way_to_other_threads()
        started.wait()

    pool = ThreadPoolExecutor(workers, thread_name_prefix=name, initializer=start)
    for _ in range(workers):
        pool.submit(int)
    started.wait()
    torch.set_num_threads(threads)  # what threads begin with that are not there yet
    return pool


class ConcurrentPasses:
    """Threads that run passes of a model at the same time.

    In one pass on all cores, every operation that is too small to be split leaves all cores but one idle, and so does
    the Python code between operations. Two passes on half of the cores each keep them busy, and a thread whose pass has
    ended gets the next one while the other still computes.

    Only the thread that begins passes may call its methods, but for `close`.
    """

    def __init__(self, most: int, notify: Callable[[], None]) -> None:
        self.most, self._notify = most, notify
        self._running: dict[Future[Any], Callable[[Any], None]] = {}  # each with what takes its result
        self._pool: ThreadPoolExecutor | None = None
        if most > 1:
            self._pool = thread_pool(most, max(1, torch.get_num_threads() // most), "deltune-pass", gives_way=True)

    @property
    def free(self) -> int:
        """The number of passes that may begin now."""
        return self.most - sum(not future.done() for future in self._running)

    @property
    def are_running(self) -> bool:
        """A pass runs."""
        return self.free < self.most

    @property
    def any_ended(self) -> bool:
        """A pass has ended whose result was not taken yet."""
        return any(future.done() for future in self._running)

    def begin(self, run: Callable[[], T], on_result: Callable[[T], None]) -> None:
        """Begin a pass beside those that run."""
        assert self._pool is not None and self.free
        release_worker_threads()
        future = self._pool.submit(_run_and_release, run)
        self._running[future] = on_result
        future.add_done_callback(lambda _: self._notify())

    def wait(self) -> None:
        """Wait until no pass runs, and call `on_result` of each as soon as it has ended."""
        self.take_results(wait_for_all=True)

    def take_results(self, *, wait_for_all: bool = False) -> None:
        """Call `on_result` of the passes that have ended."""
        errors = []
        while self._running:
            ended = next((future for future in self._running if future.done()), None)
            if ended is not None:
                try:
                    self._running.pop(ended)(ended.result())  # which may itself wait for the others
                except Exception as error:  # the others have their results nevertheless
                    errors.append(error)
            elif wait_for_all:
                wait(self._running, return_when=FIRST_COMPLETED)
            else:
                break
        if errors:
            raise errors[0]

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)


def _run_and_release(run: Callable[[], T]) -> T:
    try:
        return run()
    finally:
        release_worker_threads()


class SafeWidths:
    """The lengths of passes that are known to change nothing in the modules of a model.

    Some models write into a module what depends on the length of the batch, and read it later in the same pass: scaled
    rotary positions, tables of positions that grow, BigBird's kind of attention. Passes at the same time would read
    each other's. Lengths between two that changed nothing are taken to change nothing either, since such models do one
    thing below a length and another above it.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.known = range(0)
        self.keeps_state = False

    def includes(self, width: int) -> bool:
        """Return whether a pass of a length may run beside others."""
        return width in self.known and not self.keeps_state

    def observe(self, width: int, run: Callable[[], T]) -> T:
        """Run a pass beside no other, and note whether it changed anything in a module."""
        if self.keeps_state or self.includes(width):
            return run()
        before = self._state()
        output = run()
        if self._state() != before:
            self.keeps_state = True
        ends = [width, *self.known[:1], *self.known[-1:]]
        self.known = range(min(ends), max(ends) + 1)
        return output

    def _state(self) -> list[object]:
        """Everything that a pass may change: the objects that modules hold, their lengths, the versions of buffers."""
        state: list[object] = []
        for _, module in base_modules(self.model):
            for name, value in module.__dict__.items():
                size = len(value) if isinstance(value, dict | list | set) else None
                state.append((name, id(value), size))
            for name, buffer in buffers_of(module).items():
                if buffer is not None:
                    # tensors made in inference mode count no versions, and are no part of a model that keeps no state
                    version = None if buffer.is_inference() else tensor_version(buffer)
                    state.append((name, id(buffer), version))
                    self.keeps_state = self.keeps_state or version is None
        return state
