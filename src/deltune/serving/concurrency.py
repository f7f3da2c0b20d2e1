"""Passes of a model that run at the same time on a CPU, each on its share of torch's threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


class ConcurrentPasses:
    """Threads that run passes of a model at the same time.

    In one pass on all cores, every operation that is too small to be split leaves all cores but one idle, and so does
    the Python code between operations. Two passes on half of the cores each keep them busy.

    torch has one number of threads for a process. It is lower while passes run, and is then set back.

    Args:
        most: The most passes that run at the same time.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._pool = ThreadPoolExecutor(most, thread_name_prefix="deltune-pass") if most > 1 else None

    def run(self, passes: Sequence[Callable[[], T]]) -> list[T]:
        """Run passes at the same time, and return what they return. A single one runs in this thread, on all cores.

        Args:
            passes: Each runs a pass of the model. At most `most` of them run at the same time.

        Raises:
            Exception: What the first of them that failed has raised, when all have ended.
        """
        if self._pool is None or len(passes) == 1:
            return [run() for run in passes]
        threads = torch.get_num_threads()
        each = max(1, threads // min(len(passes), self.most))

        def run_one(run: Callable[[], T]) -> T:
            torch.set_num_threads(each)
            return run()

        futures = [self._pool.submit(run_one, run) for run in passes]
        try:
            for future in futures:
                future.exception()  # waits, and raises nothing before the others have ended
            return [future.result() for future in futures]
        finally:
            torch.set_num_threads(threads)

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
