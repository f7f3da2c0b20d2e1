"""Errors of a server; each is a DeltuneError that says what was asked, what exists and what to do."""

from __future__ import annotations

from ..errors import DeltuneError, Fault, with_advice


class UnknownDelta(DeltuneError):
    """The delta that was asked for does not exist."""


class InvalidRequest(DeltuneError):
    """The request cannot be answered: too long, without input, or for a task that its delta does not have."""


class NameTaken(DeltuneError):
    """There is another delta of this name, which was not to be replaced."""


class QueueFull(DeltuneError):
    """Too many requests wait, of all tenants or of this one. `retry_after` is in seconds."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:  # a copy in another process sets it later
        super().__init__(message)
        self.retry_after = retry_after


class RequestTimeout(DeltuneError):
    """The request took longer than its timeout."""


UNANSWERED = "the server was closed before it answered"
"""The error of requests that run when a server is closed."""


class EngineClosed(DeltuneError):
    """The engine is shutting down and takes no new requests."""


class ReplicaLost(DeltuneError):
    """The replica that was to answer has ended or cannot be reached; another one may answer the same request."""


OPERATOR_ADVICE: dict[Fault, str] = {
    "files": "Put sound files into its folder, or tune it again on this server's model.",
    "model": "Serve it with a server of that model, or tune it again on this server's model.",
    "tokens": "Serve a model that was saved with these tokens, or tune it again on this server's model.",
    "folder": "Put a folder here that holds a delta, as deltune train and tuned.save write it.",
    "part": "Start the server with --import FILE, where FILE is the Python file that registers it.",
}
"""Advice to the operator of a server, by where the fault lies."""


def refusal(error: DeltuneError) -> DeltuneError:
    """Return why a server refuses a delta, with what its operator can do; for Python, the caller's own advice too."""
    return DeltuneError(with_advice(error.without_python, OPERATOR_ADVICE.get(error.fault, "")), error.in_python)
