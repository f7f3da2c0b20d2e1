"""Shared by all routes: the engine, the tenant and the delta of a request, and waiting for its answer."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ...errors import excerpt, unknown_name
from ..config import ServeConfig
from ..engine.requests import DeltaInfo
from ..errors import EngineClosed
from .errors import ApiError, ClientDisconnected, without_folder
from .managing import Management
from .metrics import Metrics
from .schemas import INNER_BODIES
from .tenants import KeyFile, RateLimits, Tenant, everybody

if TYPE_CHECKING:
    from ..engine.server import Server
    from ..replicas import Replicas

    Engine = Server | Replicas

T = TypeVar("T")
Body = TypeVar("Body", bound=BaseModel)

INNER_FIELDS = frozenset(field for kind in INNER_BODIES for field in kind.__annotations__)
"""Fields of what is inside of a request."""
SHADOWED = "the base model has this name: rename the folder, or give the base model another name with --served-name"
GIVEN_UP = "the server is shutting down and did not finish the request; send it again"
NAMES_OF_INPUT = ("text", "texts", "inputs", "prompt", "sentence", "sentences")
"""Names that other servers give to the texts."""

MAX_PROBLEMS = 10
"""Fields of a request whose mistakes its error lists."""
SPECIFIC = ("value_error", "too_long")
"""Of the problems with a value that may have several types, those that say the most."""
MAX_LISTS = 2**17
"""Lists and objects of a request, twice as many as it may have texts; a million take a second to parse."""
JSON_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
MAX_MISTAKES = 1000
"""Mistakes of a request that are looked at one by one."""
PARSED_AT_ONCE = 64 << 10
"""Bytes of a request that are parsed while others wait; a longer one is parsed in a thread."""


@dataclass
class RequestFacts:
    """The facts about one request for the log and the metrics; routes fill them in.

    `status` is of an error in a stream, whose answer had begun with 200; 0 if there was none. `admitted` is the
    tenant that the request was counted for.
    """

    tenant: str | None = None
    delta: str | None = None
    stream: bool = False
    inputs: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    queued: float = 0.0
    status: int = 0
    error: Exception | None = None
    admitted: Tenant | None = None
    contents: dict[str, Any] = field(default_factory=dict)


@dataclass
class Service:
    engine: Engine  # what answers
    config: ServeConfig  # the configuration
    keys: KeyFile | None  # the tenants, or None for a server without keys
    limits: RateLimits  # their rates
    metrics: Metrics  # what is counted
    managing: Management  # what loads and takes out deltas for clients
    # when the server started, in seconds since the epoch
    started: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False  # whether the server is about to end

    @classmethod
    def build(cls, engine: Engine, config: ServeConfig) -> Service:
        keys = None if config.http.keys is None else KeyFile(config.http.keys)
        metrics = Metrics(engine.stats, engine.deltas)
        limits, managing = RateLimits(config.limits, engine.take_usage), Management(config.limits.timeout)
        return cls(engine, config, keys, limits, metrics, managing)

    @property
    def max_inputs(self) -> int:
        """The most inputs of one request: no more than may wait at the same time."""
        batching = self.config.batching
        return min(self.config.limits.max_inputs, batching.max_queue, batching.max_queue_per_tenant)

    @cached_property
    def hidden_folder(self) -> Path | None:
        """The folder of deltas, whose path clients need not know."""
        folder = self.config.deltas.folder
        return None if folder is None else Path(folder).expanduser().absolute()

    @cached_property
    def hidden_paths(self) -> tuple[Path, ...]:
        """The absolute path of the folder of deltas, and the same without symbolic links."""
        return () if self.hidden_folder is None else (self.hidden_folder, self.hidden_folder.resolve())

    def tenant(self, http: HttpRequest) -> Tenant:
        """Return the tenant that a request comes from."""
        if self.keys is None:
            manage = self.config.http.manage
            return everybody(self.config.is_local if manage is None else manage)
        scheme, _, value = http.headers.get("authorization", "").partition(" ")
        key = value.strip() if scheme.lower() == "bearer" else http.headers.get("x-api-key", "")
        tenant = self.keys.tenant(key) if key else None
        if tenant is None:
            problem = "this API key is not known" if key else "there is no API key in the request"
            raise ApiError(401, f"{problem}; send the header Authorization: Bearer KEY", "invalid_api_key")
        facts_of(http).tenant = tenant.name
        return tenant

    def visible(self, tenant: Tenant) -> list[DeltaInfo]:
        """Return the deltas that exist for a tenant, by name."""
        base = self.config.base_name
        seen = (delta for delta in self.engine.deltas() if delta.name != base and tenant.may_see(delta.name))
        return sorted(seen, key=lambda delta: delta.name)

    def ignored(self, tenant: Tenant) -> list[dict[str, str]]:
        """Return the folders without a delta whose names a tenant may use, and why, if it can do something about it."""
        if not (tenant.manage or tenant.admin):
            return []
        folders = self.engine.ignored_folders()
        if self.engine.has(self.config.base_name):
            folders = {**folders, self.config.base_name: SHADOWED}
        return [
            {"folder": name, "error": without_folder(reason, self.hidden_folder)}
            for name, reason in sorted(folders.items())
            if tenant.may_see(name)
        ]

    def model_names(self, tenant: Tenant) -> list[str]:
        """Return the names that a tenant may give as `model`."""
        answers = [delta.name for delta in self.visible(tenant) if delta.loaded or not delta.error]
        return [*([self.config.base_name] if tenant.base else []), *answers]

    def delta(self, model: str, tenant: Tenant) -> str | None:
        """Return the name of the delta that `model` means, None for the base model; a hidden delta is unknown."""
        if model == self.config.base_name and tenant.base:
            return None
        if model != self.config.base_name and tenant.may_see(model) and self.engine.has(model):
            return model
        raise unknown_model("model", model, self.model_names(tenant))


def unknown_model(kind: str, name: str, known: Sequence[str]) -> ApiError:
    """Return the error for a model or delta that does not exist, or that the tenant may not see."""
    return ApiError(404, unknown_name(kind, name, known), "model_not_found", "model")


def facts_of(http: HttpRequest) -> RequestFacts:
    facts: RequestFacts = http.scope["deltune"]
    return facts


def service_of(http: HttpRequest) -> Service:
    service: Service = http.app.state.service
    return service


def admit(http: HttpRequest) -> Tenant:
    """Return the tenant of a request and count the request towards its rate, once however often this is called."""
    service, facts = service_of(http), facts_of(http)
    if facts.admitted is None:
        tenant = service.tenant(http)
        facts.tenant = tenant.name
        service.limits.admit(tenant)
        facts.admitted = tenant
    return facts.admitted


async def read_body(http: HttpRequest, kind: type[Body]) -> Body:
    """Read a request's JSON and check it."""
    admit(http)  # before anything is parsed
    media = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/json" and not media.endswith("+json"):
        # A web page can post anything else to this server without asking its user.
        raise ApiError(415, "send the request as JSON, with the header Content-Type: application/json")
    body = await http.body()
    if len(body) <= PARSED_AT_ONCE:
        return parse_body(body, kind)
    return await asyncio.to_thread(parse_body, body, kind)


def parse_body(body: bytes, kind: type[Body]) -> Body:
    if _count_lists(body) > MAX_LISTS:
        problem = f"the request has more than {MAX_LISTS:,} lists and objects, the limit of this server"
        raise ApiError(413, problem, "request_too_large")
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise _body_error(error, kind) from None


def _count_lists(body: bytes) -> int:
    """Return how many lists and objects the JSON of a request has, or a greater number within bounds."""
    count = body.count(b"[") + body.count(b"{")
    if count > MAX_LISTS:
        body = JSON_STRING.sub(b"", body)
        count = body.count(b"[") + body.count(b"{")
    return count


def _body_error(error: ValidationError, kind: type[BaseModel]) -> ApiError:
    """Return the error for a body that pydantic refused, with a line for each field that is wrong."""
    if (mistakes := error.error_count()) > MAX_MISTAKES:
        fields = ", ".join(kind.model_fields)
        return ApiError(400, f"the request has {mistakes:,} mistakes; it may have {fields}", "invalid_value")
    details = error.errors(include_url=False, include_input=False)
    by_field: dict[str | int | None, list[ErrorDetails]] = {}
    for one in details:
        by_field.setdefault(one["loc"][0] if one["loc"] else None, []).append(one)
    problems = []
    for top, problems_there in islice(by_field.items(), MAX_PROBLEMS):
        first = next((one for one in problems_there if one["type"] in SPECIFIC), problems_there[0])
        name = excerpt(top)[1:-1] if isinstance(top, str) else None
        if first["type"] == "json_invalid":
            problems.append(f"the body of the request is not valid JSON: {first['msg'].removeprefix('Invalid JSON: ')}")
        elif name is None:
            problems.append("the body of the request must be a JSON object")
        elif first["type"] == "extra_forbidden" and len(first["loc"]) == 1:
            texts = name in NAMES_OF_INPUT and "input" in kind.model_fields
            hint = "Texts are given as 'input'." if texts else None
            problems.append(unknown_name("option", name, kind.model_fields, hint=hint))
        elif first["type"] == "missing" and len(first["loc"]) == 1:
            problems.append(f"{name} is missing: {kind.model_fields[name].description}")
        else:
            problems.append(_field_problem(first, len(problems_there) > 1, kind.model_fields[name].description or ""))
    param = next((str(one["loc"][0])[:60] for one in details if one["loc"]), None)
    return ApiError(400, "; ".join(problems), "invalid_value", param)


def _field_problem(error: ErrorDetails, is_one_of_several: bool, description: str) -> str:
    top, *inside = error["loc"]
    kind, reason = error["type"], error["msg"].removeprefix("Value error, ")
    if kind == "extra_forbidden":
        reason = f"unknown option {excerpt(inside.pop())}"
    elif kind == "too_long" and error["ctx"]["max_length"] == 0:
        reason = "only an empty one is supported"
    # Pydantic names the type that it tried beside places in lists and fields: "messages", 0, "list[TextPart]", 2
    places = [part for part in inside if isinstance(part, int) or part in INNER_FIELDS]
    path = ".".join(map(str, [top, *places]))
    if kind == "value_error" or any(isinstance(place, str) for place in places):
        return f"{path}: {reason}"
    if description.startswith("only ") or (is_one_of_several and kind not in ("extra_forbidden", "too_long")):
        return f"{path}: {description}"
    return f"{path}: {reason} ({description})"


# -- waiting for answers


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the client has gone. The request must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(receive: Receive, work: Awaitable[T]) -> T:
    """Await some work, and cancel it when the client has gone."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(wait_for_disconnect(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected
        return task.result()
    finally:
        await cancel_all((task, watch))


async def cancel_all(tasks: Sequence[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def gather(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Await several things; when one fails, the others are cancelled and its error is raised."""
    tasks: list[asyncio.Future[T]] = []
    try:
        for one in work:
            tasks.append(asyncio.ensure_future(one))
            await asyncio.sleep(0)  # each may read its text at once, and others have a turn between two of them
        pending = set(tasks)
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if task.cancelled():
                    raise EngineClosed(GIVEN_UP)
                if (error := task.exception()) is not None:
                    raise error
        return [task.result() for task in tasks]
    finally:
        for one in work[len(tasks) :]:
            one.close()
        await cancel_all(tasks)


async def merge(streams: Sequence[AsyncIterator[T]]) -> AsyncIterator[tuple[int, T]]:
    """Yield (index of its stream, item) of several streams as they come; closing this, or an error, closes all."""
    queue: asyncio.Queue[tuple[int, T] | BaseException | None] = asyncio.Queue(maxsize=64)

    async def pump(index: int, stream: AsyncIterator[T]) -> None:
        try:
            async with contextlib.aclosing(stream) as items:  # type: ignore[type-var]
                async for item in items:
                    await queue.put((index, item))
            await queue.put(None)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            await queue.put(EngineClosed(GIVEN_UP))  # not this task was cancelled, but what it waits for
        except BaseException as error:
            await queue.put(error)

    tasks = [asyncio.ensure_future(pump(i, stream)) for i, stream in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            item = await queue.get()
            if item is None:
                left -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        await cancel_all(tasks)


class EventStream(Response):
    """Server-sent events. When the client goes, the source of the events is closed at once."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], source: AsyncIterator[Any], send_timeout: float) -> None:
        self.events, self.source, self.send_timeout = events, source, send_timeout
        self.status_code, self.background = 200, None
        self.init_headers({"Cache-Control": "no-store", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, self._pump(send))
        finally:
            for iterator in (self.events, self.source):
                close: Callable[[], Awaitable[None]] | None = getattr(iterator, "aclose", None)
                if close is not None:
                    await close()

    async def _pump(self, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for event in self.events:
                async with asyncio.timeout(self.send_timeout):  # wait_for may swallow that it is cancelled
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except (OSError, TimeoutError):
            raise ClientDisconnected from None
