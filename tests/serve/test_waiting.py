"""Waiting for answers: errors, cancellation, and an engine that gives requests up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest

from deltune.serve.api.errors import ClientDisconnected
from deltune.serve.api.service import EventStream, gather, merge, unless_disconnected
from deltune.serve.errors import EngineClosed


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


def test_gather() -> None:
    work = Work()
    assert run(gather([work.sleep(0.02, "a"), work.sleep(0.0, "b")])) == ["a", "b"]
    with pytest.raises(ValueError, match="no"):
        run(gather([work.sleep(60, "long"), work.fail()]))
    assert work.ended[-1] == "long", "the others are cancelled, and have ended"
    with pytest.raises(EngineClosed):
        run(gather([work.sleep(60, "longer"), work.given_up()]))
    assert work.ended[-1] == "longer"


def test_merge() -> None:
    work = Work()

    async def collect(*streams: AsyncIterator[str]) -> list[tuple[int, str]]:
        return [item async for item in merge(streams)]

    items = run(collect(work.count("a", 5), work.count("b", 200)))
    assert [item for index, item in items if index == 0] == [f"a{i}" for i in range(5)]
    assert [item for index, item in items if index == 1] == [f"b{i}" for i in range(200)]
    with pytest.raises(ValueError, match="no"):
        run(collect(work.count("long", 10**6), work.count("c", 3, work.fail())))
    assert work.ended[-1] == "long"
    with pytest.raises(EngineClosed):
        run(collect(work.count("longer", 10**6), work.count("d", 3, work.given_up())))
    assert work.ended[-1] == "longer"


def test_a_merged_stream_that_is_closed_closes_its_parts() -> None:
    work = Work()

    async def begin() -> None:
        stream = merge([work.count("a", 10**6), work.count("b", 10**6)])
        async for _ in stream:
            break
        await stream.aclose()  # type: ignore[attr-defined]

    run(begin())
    assert sorted(work.ended) == ["a", "b"]


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
