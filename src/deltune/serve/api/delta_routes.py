"""Routes that load, replace and take out deltas while others are served, under vLLM's names and under our own."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from ...errors import excerpt
from ..engine.requests import DeltaInfo
from ..errors import InvalidRequest
from .errors import ApiError, without_folder
from .schemas import DeltaBody, LoadBody, UnloadBody
from .service import Service, admit, read_body, service_of, unknown_model
from .tenants import Tenant

router = APIRouter()


def delta_folder(root: Path | None, path: str) -> Path:
    """Return a folder below the folder of deltas that a request names. It must not lead through a link."""
    if root is None:
        raise InvalidRequest(
            "this server has no folder of deltas, so nothing can be loaded; start it with --deltas DIR"
        )
    below = f"{excerpt(path)} is not a folder below the server's folder of deltas"
    if "\0" in path or path.startswith("~"):
        raise InvalidRequest(f"{below}; give a path from there")
    relative = Path(path)
    if relative.is_absolute():
        roots = [one for one in (root.absolute(), root.resolve()) if relative.is_relative_to(one)]
        if not roots:
            raise InvalidRequest(f"{below}; give a path from there")
        relative = relative.relative_to(roots[0])
    if not relative.parts or ".." in relative.parts:
        raise InvalidRequest(f"{below}; give a path from there, without ..")
    folder = root.resolve() / relative
    try:
        real, is_folder = folder.resolve(strict=True), folder.is_dir()
    except (OSError, ValueError, RuntimeError):  # the last of links in a circle, before Python 3.13
        raise InvalidRequest(f"{below}: it does not exist") from None
    if real != folder:
        raise InvalidRequest(f"{below}: it leads through a link, and links are not followed")
    if not is_folder:
        raise InvalidRequest(f"{below}: it is not a folder")
    return folder


def manager(http: Request) -> tuple[Service, Tenant]:
    """Return the service and the tenant of a request, if the tenant may load and unload deltas."""
    service, tenant = service_of(http), admit(http)
    if not tenant.manage:
        todo = (
            "start the server with --manage, or with a file of keys"
            if service.keys is None
            else "make a key with: deltune serve-key FILE TENANT --manage"
        )
        raise ApiError(403, f"{tenant.name} may not load or unload deltas; {todo}", "not_allowed")
    return service, tenant


def as_json(service: Service, delta: DeltaInfo) -> dict[str, Any]:
    """Return the facts about a delta, its folder from the folder of deltas."""
    folder = Path(delta.folder)
    for one in service.hidden_paths:
        if folder.is_relative_to(one):
            folder = folder.relative_to(one)
            break
    facts = asdict(delta)
    del facts["requested"]
    error = without_folder(delta.error, service.hidden_folder) if delta.error else None
    return facts | {"folder": str(folder), "error": error}


def listed(service: Service, tenant: Tenant) -> Response:
    """Return the deltas of a tenant, and the folders under its names that hold none."""
    data = [as_json(service, delta) for delta in service.visible(tenant)]
    return JSONResponse({"object": "list", "data": data, "ignored": service.ignored(tenant)})


async def load(service: Service, tenant: Tenant, name: str, path: str, replace: bool) -> DeltaInfo:
    """Load a delta, or replace the one of its name; requests that run end with the old one.

    Without `replace`, a name is taken once a request has loaded it, whether its delta is in memory at the moment or
    not, and a name of the folder of deltas can be loaded from its own folder alone.
    """
    if name == service.config.base_name:
        raise ApiError(400, f"{name} is the name of the base model; give the delta another one", "name_taken")
    if not tenant.may_see(name):
        allowed = ", ".join(tenant.deltas) or "no names"
        raise ApiError(
            403, f"{tenant.name} may not have a delta {excerpt(name)}; its names are {allowed}", "not_allowed"
        )
    folder = delta_folder(service.hidden_folder, path)
    owner = folder.relative_to((service.hidden_folder or folder).resolve()).parts[0]
    if not tenant.may_see(owner):  # else a tenant could ask another's delta under a name of its own
        raise InvalidRequest(f"{excerpt(path)} is not a folder below the server's folder of deltas: it does not exist")
    return await service.managing.load(tenant, partial(service.engine.load, name, folder, replace=replace))


async def unload(service: Service, tenant: Tenant, name: str) -> None:
    """Take a delta out; requests that run end with it."""
    known = [delta.name for delta in service.visible(tenant)]
    if name not in known:
        raise unknown_model("delta", name, known)
    await service.managing.unload(tenant, partial(service.engine.unload, name))


@router.post("/v1/load_lora_adapter")
async def load_lora_adapter(http: Request) -> Response:
    """Load a delta by any method, under the name that vLLM has for it."""
    service, tenant = manager(http)
    body = await read_body(http, LoadBody)
    await load(service, tenant, body.lora_name, body.lora_path, bool(body.load_inplace))
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter")
async def unload_lora_adapter(http: Request) -> Response:
    """Take a delta out, under the name that vLLM has for it."""
    service, tenant = manager(http)
    body = await read_body(http, UnloadBody)
    await unload(service, tenant, body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


@router.get("/v1/deltas")
async def deltas(http: Request) -> Response:
    """List the deltas that the tenant may ask, with their methods, tasks and versions, and folders that hold none."""
    service = service_of(http)
    return listed(service, admit(http))


@router.get("/v1/deltas/{name}")
async def delta(http: Request, name: str) -> Response:
    """Describe one delta, or say why a folder of this name is not served."""
    service = service_of(http)
    tenant = admit(http)
    visible = service.visible(tenant)
    for one in visible:
        if one.name == name:
            return JSONResponse(as_json(service, one))
    if tenant.may_see(name) and name in service.engine.unloaded():
        todo = "its folder is still there, and POST /v1/deltas loads it again"
        raise ApiError(404, f"{excerpt(name)} was taken out; {todo}", "model_not_found", "model")
    for folder in service.ignored(tenant):
        if folder["folder"] == name:
            raise ApiError(404, f"{excerpt(name)} is not served: {folder['error']}", "model_not_found", "model")
    raise unknown_model("delta", name, [one.name for one in visible])


@router.post("/v1/deltas")
async def add(http: Request) -> Response:
    """Load a delta, or replace the one of its name."""
    service, tenant = manager(http)
    body = await read_body(http, DeltaBody)
    info = await load(service, tenant, body.name, body.folder or body.name, replace=True)
    return JSONResponse(as_json(service, info), 201)


@router.post("/v1/deltas/refresh")
async def refresh(http: Request) -> Response:
    """Look at the folder of deltas now, and list what is there."""
    service, tenant = manager(http)
    await service.managing.load(tenant, service.engine.refresh)
    return listed(service, tenant)


@router.delete("/v1/deltas/{name}")
async def remove(http: Request, name: str) -> Response:
    """Take a delta out. Its files stay."""
    service, tenant = manager(http)
    await unload(service, tenant, name)
    return JSONResponse({"name": name, "deleted": True})
