"""Errors of a server; each is a DeltuneError that says what was asked, what exists and what to do."""

from __future__ import annotations

from ..errors import DeltuneError


class UnknownDelta(DeltuneError):
    """The delta that was asked for does not exist."""


class InvalidRequest(DeltuneError):
    """The request cannot be answered: too long, without input, or for a task that its delta does not have."""


class QueueFull(DeltuneError):
    """Too many requests wait, of all tenants or of this one. `retry_after` is in seconds."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class RequestTimeout(DeltuneError):
    """The request took longer than its timeout."""


class EngineClosed(DeltuneError):
    """The engine is shutting down and takes no new requests."""


SOUND_FILES = "Put sound files into its folder, or tune it again on this server's model."
"""What to do about a delta whose files are damaged, or do not fit the model."""
OTHER_MODEL = "Serve it with a server of that model, or tune it again on this server's model."
"""What to do about a delta that was tuned on another base model."""


def refusal(error: DeltuneError, todo: str = "") -> DeltuneError:
    """Return why a server refuses a delta: without calls of Python, which neither its clients nor its operator make.

    Args:
        error: Why the delta cannot be loaded.
        todo: What the operator can do, a sentence.
    """
    reason = error.without_python
    between = "\n" if "\n" in reason else " " if reason.endswith(".") else ". "
    return DeltuneError(f"{reason}{between}{todo}" if todo else reason)
