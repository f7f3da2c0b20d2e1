"""Routes for whoever runs the server: probes, metrics, and a page that shows what happens."""

from __future__ import annotations

import html
import time
from functools import cache
from importlib.resources import files
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response

from ..._version import __version__
from .errors import ApiError, without_folder
from .service import Service, service_of
from .tenants import Tenant

router = APIRouter()

PAGE_SECONDS = 120
PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)


DEAD = "the engine has ended\n"


@router.api_route("/health", methods=["GET", "HEAD"])
async def health(http: Request) -> Response:
    """Say whether the server works: a liveness probe. It says no when the engine has ended, until a restart."""
    if not service_of(http).engine.is_alive():
        return PlainTextResponse(DEAD, 503)
    return PlainTextResponse("ok\n")


@router.api_route("/ready", methods=["GET", "HEAD"])
async def ready(http: Request) -> Response:
    """Say whether requests should be sent here: a readiness probe. It says no as soon as the server is to end."""
    service = service_of(http)
    if service.draining:
        return PlainTextResponse("draining\n", 503, {"Retry-After": "1"})
    if not service.engine.is_alive():
        return PlainTextResponse(DEAD, 503)
    return PlainTextResponse("ready\n")


@router.get("/version")
async def version() -> Response:
    return JSONResponse({"version": __version__})


@router.get("/metrics")
async def metrics(http: Request) -> Response:
    """Return the metrics for Prometheus. With keys, the key of an admin is needed."""
    service, _ = _for_admins(http)
    return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/stats")
async def stats(http: Request) -> Response:
    """Return what the page shows. With keys, the key of an admin is needed."""
    service, tenant = _for_admins(http)
    engine, loads = service.engine.stats(), service.metrics.loads
    deltas = {delta.name: delta for delta in service.engine.deltas()}
    rows: list[dict[str, Any]] = []
    for name in ("", *sorted(deltas)):
        load, info = loads.get(name), deltas.get(name)
        rows.append({
            "name": name or service.config.base_name,
            "method": info.method if info else "the base model",
            "loaded": info.loaded if info else True,
            "bytes": info.bytes if info else 0,
            "error": without_folder(info.error, service.hidden_folder) if info else "",
            "requests": load.requests if load else 0,
            "errors": load.errors if load else 0,
            "p50": load.percentile(0.5) if load else None,
            "p95": load.percentile(0.95) if load else None,
            "running": engine.running.get(name, 0),
        })  # fmt: skip
    return JSONResponse({
        "model": service.config.base_name,
        "version": __version__,
        "time": time.time(),
        "uptime": service.metrics.uptime(),
        "draining": service.draining,
        "queued": engine.queued,
        "running": sum(engine.running.values()),
        "prompt_tokens": engine.prompt_tokens,
        "generated_tokens": engine.generated_tokens,
        "cached_tokens": engine.cached_tokens,
        "loads": engine.loads,
        "evictions": engine.evictions,
        "deltas": rows,
        "ignored": service.ignored(tenant),
        "history": service.metrics.history(PAGE_SECONDS),
    })  # fmt: skip


@router.get("/")
async def page(http: Request) -> Response:
    """Show a page with what is loaded, throughput, latencies, queue and errors."""
    service = service_of(http)
    if not service.config.http.page:
        raise ApiError(404, "there is no page here; the server was started with --no-page", "not_found")
    with_keys = service.keys is not None
    # everybody can read this much of the page, also those who may not know the base model
    title = "deltune" if with_keys else f"deltune: {service.config.base_name}"
    content = _page_template().replace("@WITHOUT_KEYS@", "" if with_keys else "hidden")
    content = content.replace("@TITLE@", html.escape(title))
    return HTMLResponse(content, headers={"Content-Security-Policy": PAGE_POLICY, "X-Content-Type-Options": "nosniff"})


@cache
def _page_template() -> str:
    """The page with its script, but for what differs between servers."""
    content, script = (files(__package__).joinpath(name).read_text("utf-8") for name in ("serve.html", "serve.js"))
    return content.replace("@SCRIPT@", script).replace("@VERSION@", __version__)


def _for_admins(http: Request) -> tuple[Service, Tenant]:
    """Return the service and the tenant of a request, if the tenant may see the numbers of all tenants."""
    service = service_of(http)
    tenant = service.tenant(http)
    service.limits.admit_numbers(tenant)
    if not tenant.admin:
        todo = "make a key with: deltune serve-key FILE TENANT --admin"
        raise ApiError(403, f"{tenant.name} may not see the numbers of all tenants; {todo}", "not_allowed")
    return service, tenant
