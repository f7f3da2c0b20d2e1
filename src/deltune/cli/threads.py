"""How many threads a command computes with: as many as there are cores that other work leaves free.

Two processes that each take every core wait for each other in every operation, and both take many times as long.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..errors import DeltuneError

if TYPE_CHECKING:
    from ..train.run_folder import RunFolder

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Environment variables by which the user, or a launcher, decides."""

logger = logging.getLogger("deltune")


class LoadMeter:
    """Measures from its making on how many cores other processes keep busy."""

    def __init__(self) -> None:
        import psutil

        self.process = psutil.Process()
        self._percents()  # psutil measures from the call before

    def busy_cores(self) -> float:
        """Return how many cores were busy with other work on average; 0 where that cannot be known."""
        cores, ours = self._percents()
        return max(0.0, cores - ours) / 100

    def _percents(self) -> tuple[float, float]:
        import psutil

        return psutil.cpu_percent() * (psutil.cpu_count() or 1), self.process.cpu_percent()


def free_threads(cores: int, busy: float) -> int:
    """Return the number of cores that other work leaves free, one at least."""
    return max(1, cores - round(busy))


@contextmanager
def free_cores(run: RunFolder | None = None) -> Iterator[None]:
    """Measure the load of other processes while the block imports, then compute on the cores that they leave free.

    An environment variable decides where it is set, and the earlier number of threads where a run goes on.
    """
    meter = LoadMeter()
    yield
    import torch

    if any(name in os.environ for name in THREAD_VARIABLES):
        return
    cores, busy = torch.get_num_threads(), meter.busy_cores()
    threads = free_threads(cores, busy)
    if run is not None and (earlier := _earlier_threads(run)) is not None:
        threads = min(earlier, cores)
    elif threads < cores:
        logger.info(
            "threads: %d of %d, since other work keeps %.1f cores busy (OMP_NUM_THREADS=%d takes all)",
            threads, cores, busy, cores,
        )  # fmt: skip
    torch.set_num_threads(threads)


def _earlier_threads(run: RunFolder) -> int | None:
    """Return how many threads an unfinished run, or the first of several, was started with."""
    from ..train.run_folder import RunFolder

    for folder in (run.folder, *sorted(run.runs.glob("*"))):
        try:
            threads = RunFolder(folder).environment.get("threads")
        except DeltuneError:
            continue  # training refuses a damaged folder, and says why
        if isinstance(threads, int) and threads > 0:
            return threads
    return None
