"""The application: all routes behind one layer that bounds requests, turns errors into JSON, counts and logs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import secrets
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..._version import __version__
from ...errors import DeltuneError, excerpt, unknown_name
from ..config import LOCAL_HOSTS, LimitsSection, ServeConfig
from ..errors import EngineClosed
from . import delta_routes, operation_routes, routes
from .errors import ApiError, ClientDisconnected, api_error, error_response
from .service import GIVEN_UP, RequestFacts, Service

if TYPE_CHECKING:
    from .service import Engine

logger = logging.getLogger("deltune.serve")

REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
ROUTES = (routes, delta_routes, operation_routes)
QUIET = ("/health", "/ready", "/metrics", "/stats")
"""Endpoints that are asked all the time: only their errors have a line in the log."""


def create_app(engine: Engine, config: ServeConfig) -> FastAPI:
    service = Service.build(engine, config)
    # The pages of FastAPI's documentation load scripts from elsewhere, so there are none.
    app = FastAPI(title="deltune", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.service = service
    for module in ROUTES:
        app.include_router(module.router)

    async def explain(http: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            error = _of_framework(http, error)
        failure = api_error(error)
        return error_response(failure, service.hidden_folder)

    for kind in (ApiError, DeltuneError, HTTPException, RequestValidationError):
        app.add_exception_handler(kind, explain)
    app.add_middleware(Gateway, service=service)
    if config.http.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(config.http.cors_origins), allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"], expose_headers=["Retry-After", "X-Request-ID"],
        )  # fmt: skip
    return app


def _of_framework(http: Request, error: HTTPException) -> ApiError:
    """Return our error for one of the framework's: no such path, or another method."""
    known = [route for module in ROUTES for route in module.router.routes if isinstance(route, Route)]
    if error.status_code == 404:
        return ApiError(404, unknown_name("path", http.url.path, {route.path for route in known}), "not_found")
    if error.status_code == 405:
        matching = [route for route in known if route.matches(http.scope)[0] is not Match.NONE]
        allowed = sorted({method for route in matching for method in route.methods or ()})
        problem = f"{http.method[:20]} is not possible at {excerpt(http.url.path)}; use {' or '.join(allowed)}"
        return ApiError(405, problem, "method_not_allowed", allowed=allowed)
    return ApiError(error.status_code, str(error.detail))


READ_HEADERS = (b"x-request-id", b"content-length", b"host", b"expect")
"""The headers of a request that the gateway looks at."""


class BoundedBody:
    """The body of a request, which must neither be too large nor arrive too slowly."""

    def __init__(self, receive: Receive, headers: Mapping[bytes, bytes], limits: LimitsSection) -> None:
        self._receive, self._limits = receive, limits
        self.whole = False  # whether all of it was received
        self._deadline = time.monotonic() + limits.body_timeout
        length = headers.get(b"content-length", b"0")
        self._declared = int(length) if length.isdigit() else 0
        self._waits_for_continue = b"expect" in headers
        self._received = 0

    async def receive(self) -> Message:
        """Receive the next message of the request."""
        if self.whole:
            return await self._receive()
        if self._declared > self._limits.max_body:
            raise self._too_large()
        self._waits_for_continue = False
        try:
            async with asyncio.timeout(max(0.0, self._deadline - time.monotonic())):
                message = await self._receive()
        except TimeoutError:
            problem = f"the request did not arrive within {self._limits.body_timeout:g} seconds"
            raise ApiError(408, problem, "timeout") from None
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        self._received += len(message.get("body", b""))
        if self._received > self._limits.max_body:
            raise self._too_large()
        self.whole = not message.get("more_body", False)
        return message

    async def discard(self) -> bool:
        """Read what is left and drop it, so that the client can read its answer and use the connection again."""
        if self._waits_for_continue:
            return False
        try:
            while not self.whole:
                await self.receive()
        except ApiError:
            return False
        return True

    def _too_large(self) -> ApiError:
        problem = f"the request has more than {self._limits.max_body:,} bytes, the limit of this server"
        return ApiError(413, problem, "request_too_large")


class Gateway:
    """The layer around all routes: request ids, the check of the host, bounded bodies, answers to errors, the log."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app, self.service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        facts = scope["deltune"] = RequestFacts()
        headers = {name: value for name, value in scope["headers"] if name in READ_HEADERS}
        client_id = headers.get(b"x-request-id", b"").decode("latin-1")
        identity = client_id if REQUEST_ID.fullmatch(client_id) else f"req-{secrets.token_hex(12)}"
        body = BoundedBody(receive, headers, self.service.config.limits)
        begun, status, error = time.monotonic(), 0, None

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                more = [(b"x-request-id", identity.encode())]
                if not await body.discard():
                    more.append((b"connection", b"close"))
                message = {**message, "headers": [*message["headers"], *more]}
            await send(message)

        try:
            app = self.app
            if (refused := self._check_host(headers.get(b"host"))) is not None:
                app = error_response(refused)
            await app(scope, body.receive, send_with_id)
        except ClientDisconnected:
            status = 499
        except asyncio.CancelledError:
            if not self.service.draining:
                status = 499
                raise
            broken, status = bool(status), 503
            if not broken:  # its body had not arrived
                response = error_response(api_error(EngineClosed(GIVEN_UP)))
                response.headers.update({"x-request-id": identity, "connection": "close"})
                await response(scope, receive, send)
        except Exception as failure:
            error = failure
            broken, status = bool(status), 500
            if not broken:
                response = error_response(api_error(failure), self.service.hidden_folder)
                with contextlib.suppress(ClientDisconnected):
                    await response(scope, receive, send_with_id)
        finally:
            self._finish(scope, facts, identity, facts.status or status or 499, time.monotonic() - begun, error)

    def _check_host(self, host: bytes | None) -> ApiError | None:
        """Return why a request is refused that names another host than this machine, or None if it is not.

        A web page can give its own name the address 127.0.0.1 (DNS rebinding). Its visitor's browser then lets it read
        the answers of a server on that machine, and where no keys are needed nothing else stops it.
        """
        if host is None or self.service.keys is not None or not self.service.config.is_local:
            return None
        try:
            name = urlsplit(f"//{host.decode('latin-1')}").hostname
        except ValueError:
            name = None
        if name in LOCAL_HOSTS:
            return None
        problem = (
            "this server has no keys, so it only answers requests to localhost, 127.0.0.1 and [::1], and the Host "
            "header of this one names another host; behind a reverse proxy, start the server with --keys FILE"
        )
        return ApiError(403, problem, "host_not_allowed")

    def _finish(
        self, scope: Scope, facts: RequestFacts, identity: str, status: int, seconds: float, error: Exception | None
    ) -> None:
        """Count and log a request that has ended."""
        route = scope.get("route")
        endpoint = getattr(route, "path", "none")
        tokens = facts.prompt_tokens + facts.generated_tokens
        self.service.limits.charge_usage()
        self.service.metrics.observe(endpoint, status, seconds, facts.delta, tokens)
        level = logging.ERROR if status == 500 else logging.INFO
        if not logger.isEnabledFor(level) or (endpoint in QUIET and status < 400):
            return
        line: dict[str, Any] = {
            "id": identity,
            "method": scope["method"][:20],
            "endpoint": endpoint,
            "status": status,
            "seconds": round(seconds, 6),
            "tenant": facts.tenant,
            "delta": facts.delta,
        }
        if facts.inputs or facts.stream:
            line |= {
                "stream": facts.stream,
                "inputs": facts.inputs,
                "prompt_tokens": facts.prompt_tokens,
                "cached_tokens": facts.cached_tokens,
                "generated_tokens": facts.generated_tokens,
                "queued": round(facts.queued, 6),
            }
        error = error or (facts.error if status == 500 else None)
        logger.log(level, "request", exc_info=error, extra={"facts": line | facts.contents})


MAX_TEXT = 10_000


class JsonFormatter(logging.Formatter):
    """A record as one line of JSON; the facts of a request are its fields."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "facts", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)[-MAX_TEXT:]
        return json.dumps(line, ensure_ascii=True, default=str)


def configure_logs(level: str) -> None:
    """Write the logs of the server, and warnings of uvicorn, on standard error as JSON."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    for name, shown in (("deltune.serve", level), ("uvicorn", "errors")):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel({"requests": logging.INFO, "errors": logging.WARNING, "off": logging.CRITICAL + 1}[shown])
