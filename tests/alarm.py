"""A limit of time for a block, kept by the alarm of the operating system."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def time_limit(seconds: int, error: BaseException) -> Iterator[None]:
    """Raise an error in the block once it has taken some seconds; in the main thread, and not inside another limit."""

    def stop(*_: Any) -> None:
        raise error

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
