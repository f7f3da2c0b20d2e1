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
