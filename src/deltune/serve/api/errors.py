"""Errors of requests as the JSON that OpenAI's clients understand; never more than the client may know."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from starlette.responses import JSONResponse

from ...errors import DeltuneError
from ..errors import EngineClosed, NameTaken, QueueFull, ReplicaLost, RequestTimeout, UnknownDelta

TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    405: "invalid_request_error", 408: "timeout_error", 413: "invalid_request_error", 415: "invalid_request_error",
    429: "rate_limit_error", 500: "server_error", 503: "server_error",
}  # fmt: skip
"""The `type` of an error by its status."""
MAX_MESSAGE = 2000


class ApiError(Exception):
    """An error with a status. Its message says what was asked, what exists and what to do."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        retry_after: float | None = None,
        allowed: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param
        self.retry_after, self.allowed = retry_after, allowed


class ClientDisconnected(Exception):
    """The client has gone, so that nobody waits for the answer."""


def api_error(error: BaseException) -> ApiError:
    """Return what a client is told of an error."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UnknownDelta):
        # The engine's message may name deltas that this client must not know of.
        return ApiError(
            404, "there is no such model; /v1/models lists those that there are", "model_not_found", "model"
        )
    if isinstance(error, NameTaken):
        return ApiError(400, f"{error}; give load_inplace: true to replace it", "already_loaded")
    if isinstance(error, QueueFull):
        return ApiError(429, str(error), "queue_full", retry_after=error.retry_after)
    if isinstance(error, RequestTimeout):
        return ApiError(408, str(error), "timeout")
    if isinstance(error, EngineClosed):
        return ApiError(503, str(error), "shutting_down", retry_after=1.0)
    if isinstance(error, ReplicaLost):
        return ApiError(503, str(error), "replica_lost", retry_after=1.0)
    if isinstance(error, DeltuneError):
        return ApiError(400, error.without_python)
    return ApiError(500, "something went wrong on the server; its log has the reason under the id of this request")


def error_body(error: ApiError, hidden: Path | None = None) -> dict[str, Any]:
    """Return an error as OpenAI's clients read it."""
    message = without_folder(str(error), hidden)
    if len(message) > MAX_MESSAGE:
        message = f"{message[: MAX_MESSAGE - 1]}…"
    kind = TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": error.param, "code": error.code}}


def without_folder(message: str, hidden: Path | None) -> str:
    """Return a message in which paths begin behind a folder."""
    if hidden is None:
        return message
    for path in sorted({str(hidden), str(hidden.resolve())}, key=len, reverse=True):  # one may be the end of the other
        message = message.replace(f"{path}/", "")
        message = re.sub(rf"{re.escape(path)}(?![\w.-])", "the folder of deltas", message)
    return message


def error_response(error: ApiError, hidden: Path | None = None) -> JSONResponse:
    """Return the answer to a request that went wrong; arguments as for `error_body`."""
    headers = {}
    if error.retry_after is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after)))
    if error.allowed:
        headers["Allow"] = ", ".join(error.allowed)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error_body(error, hidden), error.status, headers)
