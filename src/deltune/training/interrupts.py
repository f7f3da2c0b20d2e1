"""Ctrl-C during training: an interrupt that a library's callback catches is raised again at the next step."""

from __future__ import annotations

import signal
import threading
from types import FrameType

_interrupted = threading.Event()


def watch_interrupts() -> None:
    """Install a signal handler that remembers interrupts.

    Nothing is done outside of the main thread, or where another handler than Python's own is installed.
    """
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is (
        signal.default_int_handler
    ):
        signal.signal(signal.SIGINT, _interrupt)


def raise_if_interrupted() -> None:
    """Raise KeyboardInterrupt if an interrupt came since the last call."""
    if _interrupted.is_set():
        _interrupted.clear()
        raise KeyboardInterrupt


def _interrupt(number: int, frame: FrameType | None) -> None:
    _interrupted.set()
    raise KeyboardInterrupt
