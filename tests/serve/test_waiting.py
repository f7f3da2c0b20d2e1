"""Waiting for answers: errors, cancellation, and an engine that gives requests up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest

from deltune.serve.api.errors import ClientDisconnected
from deltune.serve.api.service import EventStream, unless_disconnected


class Work:
    """Things to wait for, and what became of them."""

    def __init__(self) -> None:
        self.ended: list[str] = []

    async def sleep(self, seconds: float, name: str = "slept") -> str:
        try:
            await asyncio.sleep(seconds)
            return name
        finally:
            self.ended.append(name)

    async def fail(self) -> str:
        await asyncio.sleep(0.01)
        raise ValueError("no")

    async def given_up(self) -> str:
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(0.01, future.cancel)
        return await future

    async def count(self, name: str, number: int, end: Any = None) -> AsyncIterator[str]:
        try:
            for i in range(number):
                await asyncio.sleep(0.001)
                yield f"{name}{i}"
            if end is not None:
                await end
        finally:
            self.ended.append(name)


def run(main: Any) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(20):
            return await main

    return asyncio.run(bounded())


def test_what_nobody_waits_for_is_cancelled() -> None:
    work = Work()

    async def receive(seconds: float) -> dict[str, str]:
        await asyncio.sleep(seconds)
        return {"type": "http.disconnect"}

    assert run(unless_disconnected(partial(receive, 60), work.sleep(0.05))) == "slept"
    with pytest.raises(ClientDisconnected):
        run(unless_disconnected(partial(receive, 0.02), work.sleep(60, "forgotten")))
    assert work.ended[-1] == "forgotten"


def test_a_client_that_does_not_take_its_stream_is_left() -> None:
    """It keeps its connection and reads nothing: after a while its request ends, and so does what it is sent."""
    work = Work()

    async def events() -> AsyncIterator[bytes]:
        async for item in work.count("event", 10**6):
            yield item.encode()

    async def main() -> int:
        sent = 0

        async def send(message: Any) -> None:
            nonlocal sent
            sent += 1
            if sent > 3:  # its buffers are full
                await asyncio.sleep(1000)

        async def receive() -> Any:
            await asyncio.sleep(1000)

        source = events()
        with pytest.raises(ClientDisconnected):
            await EventStream(source, source, send_timeout=0.05)({"type": "http"}, receive, send)
        with pytest.raises(StopAsyncIteration):
            await anext(source)
        return sent

    assert run(main()) == 4
