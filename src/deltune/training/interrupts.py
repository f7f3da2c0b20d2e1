"""Ctrl-C that is not lost: an interrupt which some library's callback swallows is raised again at the next step."""

from __future__ import annotations

import signal
import threading
from types import FrameType

_asked = threading.Event()


def watch_interrupts() -> None:
    """Remember from here on that an interrupt came. In the main thread, where nobody else handles it."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is (
        signal.default_int_handler
    ):
        signal.signal(signal.SIGINT, _take)


def raise_if_interrupted() -> None:
    """Raise KeyboardInterrupt if one came."""
    if _asked.is_set():
        _asked.clear()
        raise KeyboardInterrupt


def _take(number: int, frame: FrameType | None) -> None:
    _asked.set()
    raise KeyboardInterrupt
