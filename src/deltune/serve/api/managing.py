"""Loading and taking out deltas for clients: in threads of their own, bounded in time and for each tenant."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from ..errors import RequestTimeout
from .errors import ApiError
from .tenants import Tenant

T = TypeVar("T")

AT_ONCE = 4
"""Loads of a tenant that run at the same time, each in a thread, which may wait long for room in memory."""
PER_TENANT = 32
"""Calls of a tenant that run and wait."""
THREADS = 32
"""Threads for loads. More tenants at a time than they suffice for wait for one another."""


class Management:
    """Runs the calls that load deltas and those that take them out; the latter wait for none of the former."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._loading = ThreadPoolExecutor(THREADS, "deltune-loading")
        self._unloading = ThreadPoolExecutor(AT_ONCE, "deltune-unloading")
        self._calls: Counter[str] = Counter()
        self._turns: dict[str, asyncio.Semaphore] = {}

    async def load(self, tenant: Tenant, work: Callable[..., T]) -> T:
        """Run a function that loads deltas and takes a `timeout` in seconds."""
        turns = self._turns.setdefault(tenant.name, asyncio.Semaphore(AT_ONCE))
        deadline = time.monotonic() + self.seconds

        async def run() -> T:
            await turns.acquire()
            left = max(0.001, deadline - time.monotonic())
            loop = asyncio.get_running_loop()
            future = self._loading.submit(partial(work, timeout=left))

            def free(_: Future[T]) -> None:
                with suppress(RuntimeError):  # the loop was closed
                    loop.call_soon_threadsafe(turns.release)

            future.add_done_callback(free)  # and not when it is given up here, since it may go on for a moment
            return await asyncio.wrap_future(future)

        return await self._within(tenant, run)

    async def unload(self, tenant: Tenant, work: Callable[[], T]) -> T:
        """Run a function that takes a delta out."""

        async def run() -> T:
            return await asyncio.get_running_loop().run_in_executor(self._unloading, work)

        return await self._within(tenant, run)

    async def _within(self, tenant: Tenant, run: Callable[[], Coroutine[Any, Any, T]]) -> T:
        if self._calls[tenant.name] >= PER_TENANT:
            problem = f"{tenant.name} loads and takes out {PER_TENANT} deltas already, which is the most at a time"
            raise ApiError(429, f"{problem}; try again when some are done", "queue_full", retry_after=1.0)
        self._calls[tenant.name] += 1
        try:
            async with asyncio.timeout(self.seconds):
                return await run()
        except TimeoutError:
            raise RequestTimeout(
                f"it was not done within {self.seconds:g} seconds, which is this server's time for a request; "
                "GET /v1/deltas says what is in memory"
            ) from None
        finally:
            self._calls[tenant.name] -= 1
            if not self._calls[tenant.name]:
                del self._calls[tenant.name]
