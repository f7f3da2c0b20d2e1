"""Replicas of a server on Ray Serve: an engine each, and a front that sends each delta where it is in memory.

The front is the process of `deltune serve --ray`: it has the HTTP layer and no weights. Every replica has the model and
an engine over the same folder of deltas, which all machines must see under the same path. Ray Serve's multiplexing
knows which replica has which delta in memory and prefers it; its autoscaler starts and stops replicas by load.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import DeltuneError, check_extra, error_summary
from .config import ServeConfig
from .engine.requests import Answer, DeltaInfo, EngineStats, Request, Task, TokenChoice
from .errors import UNANSWERED, EngineClosed, QueueFull, ReplicaLost, RequestTimeout, UnknownDelta
from .loading import deltas_folder

logger = logging.getLogger("deltune.serve")

BASE = "\0base"
"""Name of the base model in multiplexing; every replica has it."""
LOOK = 1.0
"""Seconds between looks at what the replicas have."""
CONTROL_TIMEOUT = 120.0
"""Seconds in which replicas must have loaded a delta or started."""
LOST_AFTER = 60.0
"""Seconds without a word of the replicas after which the front counts as dead. Ray replaces a replica within fewer."""
MAX_REPLICAS = 1000
"""Replicas whose tokens are known to the front; those that have ended are forgotten beyond."""
LOCKS = 64
"""Locks among which names of deltas are divided, one of which is held while a delta is loaded or taken out."""


@dataclass(frozen=True)
class Snapshot:
    """State of a replica."""

    deltas: list[DeltaInfo]
    stats: EngineStats
    ignored: dict[str, str]
    replica: str
    usage: dict[str, int]
    unloaded: list[str]
    base_tasks: tuple[Task, ...]


def replica_class(max_loaded: int) -> type[Any]:
    from ray import serve

    class Replica:
        def __init__(self, values: dict[str, Any]) -> None:
            from .loading import load_server, tune_garbage_collection

            self.config = ServeConfig.from_values(values)
            self.server = load_server(self.config)
            tune_garbage_collection()
            self.folders: dict[str, str] = {}
            self.loading: dict[tuple[str, str], asyncio.Future[DeltaInfo]] = {}
            self.number, self.usage = secrets.token_hex(8), Counter[str]()
            self.server.take_usage()  # begins to count

        @serve.multiplexed(max_num_models_per_replica=max_loaded)
        async def holds(self, name: str) -> str:
            """Tell Ray Serve that this replica has a delta in memory; the engine loads it with its first request."""
            return name

        async def answer(self, request: Request, folder: str | None) -> Answer | DeltuneError:
            """Answer a request, about a delta that may lie in a folder of another name."""
            try:
                await self._prepare(request, folder)
                return await self.server.asubmit(request)
            except DeltuneError as error:
                return error  # as a value: Ray would wrap what is raised, with its traceback

        async def stream(
            self, request: Request, folder: str | None
        ) -> AsyncIterator[TokenChoice | Answer | DeltuneError]:
            """Answer a request token by token."""
            try:
                await self._prepare(request, folder)
                async for item in self.server.astream(request):
                    yield item
            except DeltuneError as error:
                yield error

        async def _prepare(self, request: Request, folder: str | None) -> None:
            await self.holds(serve.get_multiplexed_model_id())
            if request.delta is not None and folder is not None and self.folders.get(request.delta) != folder:
                await self._loaded(request.delta, folder)

        async def _loaded(self, name: str, folder: str) -> None:
            """Load a delta from a folder of another name, once for all requests that wait for it."""
            if (name, folder) not in self.loading:
                load = asyncio.to_thread(self.server.load, name, Path(folder), self.config.limits.timeout)
                task = self.loading[name, folder] = asyncio.ensure_future(load)
                task.add_done_callback(lambda _: self.loading.pop((name, folder)))
            await asyncio.shield(self.loading[name, folder])
            self.folders[name] = folder

        async def load(
            self, name: str, folder: str | None, timeout: float | None, replace: bool = True
        ) -> DeltaInfo | DeltuneError:
            where = None if folder is None else Path(folder)
            try:
                info = await asyncio.to_thread(self.server.load, name, where, timeout, replace=replace)
            except DeltuneError as error:
                return error
            if folder is not None:
                self.folders[name] = folder
            return info

        async def unload(self, name: str) -> DeltuneError | None:
            self.folders.pop(name, None)
            try:
                await asyncio.to_thread(self.server.unload, name)
            except UnknownDelta:
                return None  # this replica has not met it
            except DeltuneError as error:
                return error
            return None

        async def snapshot(self, look: bool, timeout: float | None = None) -> Snapshot:
            """Return what this replica has and does."""
            if look:
                with contextlib.suppress(RequestTimeout):  # what there is by then is told
                    await asyncio.to_thread(self.server.refresh, timeout)
            server = self.server
            return Snapshot(
                server.deltas(),
                server.stats(),
                server.ignored_folders(),
                self.number,
                self._usage_so_far(),
                server.unloaded(),
                server.base_tasks(),
            )

        def _usage_so_far(self) -> dict[str, int]:
            """The tokens since the start by tenant, so that nothing is lost with an answer that does not arrive."""
            self.usage.update(self.server.take_usage())
            return dict(self.usage)

        def check_health(self) -> None:
            self.server.stats()

        def __del__(self) -> None:
            server = getattr(self, "server", None)
            if server is not None:
                server.close(0.0)

    return Replica


@contextlib.contextmanager
def _explained(request: Request | None = None) -> Iterator[None]:
    """Raise what goes wrong between the front and a replica as errors of a server."""
    from ray.exceptions import RayError, RayTaskError
    from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError

    try:
        yield
    except TimeoutError as error:
        if request is None or request.timeout is None:
            raise ReplicaLost(f"the replicas did not answer within {CONTROL_TIMEOUT:g} seconds") from error
        raise RequestTimeout(f"the request took longer than its timeout of {request.timeout:g} seconds") from error
    except BackPressureError as error:
        raise QueueFull("too many requests wait for a replica; send this one again later", 1.0) from error
    except RayTaskError:
        raise  # an error of ours in a replica
    except (RayError, DeploymentUnavailableError, ReplicaUnavailableError) as error:
        raise ReplicaLost(
            "the replica that was to answer has ended or cannot be reached; send the request again"
        ) from error


class Replicas:
    """An engine whose work is done by replicas on a Ray cluster."""

    def __init__(self, config: ServeConfig) -> None:
        check_extra("ray", "deltune serve --ray needs")
        import ray
        from ray import serve

        self.config = config
        self.folder = deltas_folder(config)
        self._serve, self._closed, self._managing = serve, threading.Event(), [threading.Lock() for _ in range(LOCKS)]
        self._started_ray = not ray.is_initialized()
        address = config.ray.address or os.environ.get("RAY_ADDRESS")
        if self._started_ray:
            options: dict[str, Any] = {"address": address} if address else {"include_dashboard": False}
            ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
        self._ray = ray
        most = config.ray.max_replicas or config.ray.replicas
        scaling: dict[str, Any] = {"num_replicas": config.ray.replicas}
        if most > config.ray.replicas:
            scaling = {
                "autoscaling_config": {
                    "min_replicas": config.ray.replicas,
                    "max_replicas": most,
                    "target_ongoing_requests": config.ray.ongoing,
                }
            }
        values = config.model_dump(mode="json")
        # In containers processes have the same numbers, and an application takes the place of another of its name.
        self._name = f"deltune-{secrets.token_hex(8)}"
        deploy: Any = serve.deployment(
            name="replica",
            ray_actor_options={"num_cpus": config.ray.cpus, "num_gpus": config.ray.gpus},
            max_ongoing_requests=10 * config.ray.ongoing,
            max_queued_requests=config.batching.max_queue,
            graceful_shutdown_timeout_s=config.http.drain,
            **scaling,
        )
        deployment = deploy(replica_class(config.deltas.max_loaded))
        try:
            serve.start(proxy_location="Disabled")
            self._handle = serve.run(deployment.bind(values), name=self._name, route_prefix=None)
        except Exception as error:  # whatever a replica's start raised, wrapped by Ray
            self._stop()
            raise DeltuneError(f"the replicas do not start: {error_summary(error)}") from error
        self._loaded: dict[str, str] = {}
        self._removed: set[str] = set()
        self._snapshots: list[Snapshot] = []
        self._usage: Counter[str] = Counter()
        self._counted: dict[str, dict[str, int]] = {}  # by replica, what is in `_usage` or was taken from there
        self._usage_lock = threading.Lock()
        self._cancels: set[Callable[[], object]] = set()  # of the tasks that wait for a replica
        self._closed_at_once = False
        self._looked_at = time.monotonic()
        self._look(first=True)
        self._watcher = threading.Thread(target=self._watch, name="deltune-replicas", daemon=True)
        self._watcher.start()

    async def asubmit(self, request: Request) -> Answer:
        self._check(request)
        response = self._route(request).answer.remote(request, self._loaded.get(request.delta or ""))
        try:
            with _explained(request), self._interrupted_by_close():
                async with asyncio.timeout(request.timeout):  # a replica counts only from when it has the request
                    result = await response
        except (asyncio.CancelledError, EngineClosed, RequestTimeout):
            response.cancel()
            raise
        if isinstance(result, DeltuneError):
            raise result
        answer: Answer = result
        return answer

    async def astream(self, request: Request) -> AsyncIterator[TokenChoice | Answer]:
        """Answer a request token by token; the last item is the answer."""
        self._check(request)
        folder = self._loaded.get(request.delta or "")
        response = self._route(request).options(stream=True).stream.remote(request, folder)
        items, ended = aiter(response), False
        end = None if request.timeout is None else asyncio.get_running_loop().time() + request.timeout
        try:
            while not ended:
                with _explained(request), self._interrupted_by_close():
                    async with asyncio.timeout_at(end):
                        item = await anext(items, None)
                if isinstance(item, DeltuneError):
                    raise item
                if item is None:
                    ended = True
                else:
                    yield item
        finally:
            if not ended:
                response.cancel()

    def load(
        self, name: str, folder: Path | None = None, timeout: float | None = None, *, replace: bool = True
    ) -> DeltaInfo:
        """Load or replace a delta on every replica, and on those that start later.

        Where one of them refuses it, all have what they had before.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changing(name, timeout):
            before = self._folder_of(name)
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            where = None if folder is None else str(folder)
            results = self._broadcast("load", name, where, left, replace, patience=left)
            refused = [result for result in results if isinstance(result, DeltuneError)]
            if refused:
                if len(refused) < len(results):
                    self._broadcast("unload", name) if before is None else self._broadcast(
                        "load", name, before, timeout
                    )
                raise refused[0]
            self._removed.discard(name)
            if folder is not None:
                self._loaded[name] = str(folder)
            self._look()
            info: DeltaInfo = results[0]
            return info

    @contextlib.contextmanager
    def _changing(self, name: str, timeout: float | None = None) -> Iterator[None]:
        """Let nobody else load or take out a delta of this name meanwhile."""
        lock = self._managing[hash(name) % LOCKS]
        if not lock.acquire(timeout=-1 if timeout is None else timeout):
            raise RequestTimeout(f"delta {name!r} was not loaded within {timeout:g} seconds: others of it came first")
        try:
            yield
        finally:
            lock.release()

    def _folder_of(self, name: str) -> str | None:
        """Return the folder that a delta was loaded from, None if there is no such delta."""
        folders = [delta.folder for delta in self.deltas() if delta.name == name]
        return self._loaded.get(name) or (folders[0] if folders else None)

    def unload(self, name: str) -> None:
        if not self.has(name):
            raise UnknownDelta(f"there is no delta {name!r}")
        with self._changing(name):
            self._removed.add(name)
            self._loaded.pop(name, None)
            for result in self._broadcast("unload", name):
                if isinstance(result, DeltuneError):
                    raise result
            self._look()

    def refresh(self, timeout: float | None = None) -> list[DeltaInfo]:
        self._look(refresh=True, timeout=timeout)
        return self.deltas()

    def deltas(self) -> list[DeltaInfo]:
        """Return the deltas that can be asked; one is loaded if any replica has it in memory."""
        merged: dict[str, DeltaInfo] = {}
        for snapshot in self._snapshots:
            for delta in snapshot.deltas:
                known = merged.get(delta.name)
                if delta.name not in self._removed and (known is None or (delta.loaded and not known.loaded)):
                    merged[delta.name] = delta
        return list(merged.values())

    def has(self, name: str) -> bool:
        return any(delta.name == name for delta in self.deltas())

    def ignored_folders(self) -> dict[str, str]:
        """Return why folders hold no delta; all replicas see the same folder."""
        return dict(self._snapshots[0].ignored) if self._snapshots else {}

    def unloaded(self) -> list[str]:
        """Return the names that were taken out, while their folders are still there."""
        return sorted({name for snapshot in self._snapshots for name in snapshot.unloaded})

    def base_tasks(self) -> tuple[Task, ...]:
        """Return what the base model can be asked for; all replicas have the same."""
        return self._snapshots[0].base_tasks

    def stats(self) -> EngineStats:
        """Return the numbers of all replicas, added up."""
        added: dict[str, Any] = {}
        for field in fields(EngineStats):
            values = [getattr(snapshot.stats, field.name) for snapshot in self._snapshots]
            is_count = field.name in ("queued", "running", "finished", "failed")
            added[field.name] = dict(sum(map(Counter, values), Counter())) if is_count else sum(values)
        return EngineStats(**added)

    def take_usage(self) -> dict[str, int]:
        """Return the tokens that all replicas had computed for each tenant when they were last looked at."""
        with self._usage_lock:
            usage, self._usage = self._usage, Counter()
        return dict(usage)

    def is_alive(self) -> bool:
        """Return whether requests are answered: the replicas have said lately what they have."""
        return not self._closed.is_set() and time.monotonic() - self._looked_at < LOST_AFTER

    @contextlib.contextmanager
    def _interrupted_by_close(self) -> Iterator[None]:
        """Let `close` interrupt a task that waits for a replica, with EngineClosed."""
        task = asyncio.current_task()
        assert task is not None
        cancel = partial(asyncio.get_running_loop().call_soon_threadsafe, task.cancel)
        self._cancels.add(cancel)
        try:
            self._check_running()
            yield
            self._check_running()
        except Exception as error:
            if self._closed.is_set():
                raise EngineClosed(UNANSWERED) from error
            raise
        except asyncio.CancelledError:
            if self._closed_at_once:
                task.uncancel()
            self._check_running()
            raise
        finally:
            self._cancels.discard(cancel)

    def _check_running(self) -> None:
        if self._closed_at_once:
            raise EngineClosed(UNANSWERED)

    def close(self, drain: float = 30.0) -> None:
        """End the replicas after the requests that run, or without a `drain` at once."""
        if not self._closed.is_set():
            self._closed.set()
            if drain <= 0:
                self._closed_at_once = True
                for cancel in list(self._cancels):
                    with contextlib.suppress(RuntimeError):  # its loop has ended
                        cancel()
            self._stop()

    def _stop(self) -> None:
        with contextlib.suppress(Exception):  # the cluster may have gone before us
            self._serve.delete(self._name)
            if self._started_ray and not (self.config.ray.address or os.environ.get("RAY_ADDRESS")):
                self._serve.shutdown()
        if self._started_ray:
            self._ray.shutdown()

    def _check(self, request: Request) -> None:
        if self._closed.is_set():
            raise EngineClosed("the server is ending and takes no new requests")
        if request.delta is not None and request.delta in self._removed:
            raise UnknownDelta(f"there is no delta {request.delta!r}")

    def _route(self, request: Request) -> Any:
        return self._handle.options(multiplexed_model_id=BASE if request.delta is None else request.delta)

    def _broadcast(self, method: str, *arguments: Any, patience: float | None = None) -> list[Any]:
        """Call a method of every replica, and return what they return; it may take as long as `patience` says."""
        wait = CONTROL_TIMEOUT + (patience or 0.0)
        with _explained():
            results: list[Any] = self._handle.broadcast(method, *arguments).results(timeout_s=wait)
        if not results:
            raise ReplicaLost("there is no replica at the moment; try again in a while")
        return results

    def _look(self, first: bool = False, refresh: bool = False, timeout: float | None = None) -> None:
        if first:  # a broadcast finds only replicas that the router knows already
            self._handle.snapshot.remote(False).result(timeout_s=CONTROL_TIMEOUT)
        self._snapshots = self._broadcast("snapshot", refresh, timeout, patience=timeout)
        here = {name for snapshot in self._snapshots for name in snapshot.unloaded}
        here |= {delta.name for snapshot in self._snapshots for delta in snapshot.deltas}
        self._removed &= here  # a folder that is gone may come again
        self._looked_at = time.monotonic()
        with self._usage_lock:
            for snapshot in self._snapshots:
                counted = self._counted.get(snapshot.replica, {})
                self._usage.update({name: n - counted.get(name, 0) for name, n in snapshot.usage.items()})
                self._counted[snapshot.replica] = snapshot.usage
            while len(self._counted) > MAX_REPLICAS:  # those that have ended
                del self._counted[next(iter(self._counted))]

    def _watch(self) -> None:
        """Keep what the front knows of the replicas fresh."""
        while not self._closed.wait(LOOK):
            try:
                self._look()
            except Exception as error:
                if not self._closed.is_set():
                    logger.warning("the replicas do not say what they have: %s", error_summary(error))
