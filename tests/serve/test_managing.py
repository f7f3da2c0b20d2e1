"""Loading and taking out deltas over HTTP: bounds, names that are taken, and what is said of those that are gone."""

from __future__ import annotations

import asyncio
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from deltune.serve.api.errors import ApiError
from deltune.serve.api.managing import AT_ONCE, PER_TENANT, Management
from deltune.serve.api.tenants import NUMBERS_PER_MINUTE, Tenant, add_key
from deltune.serve.engine.folders import check_delta_name
from deltune.serve.engine.requests import Request, Sampling
from deltune.serve.errors import RequestTimeout

from .served import METHODS, served
from .test_keys import ASKS
from .test_lifecycle import Gate


@pytest.fixture
def folder(decoder: tuple[Path, Path], tmp_path: Path) -> Path:
    """A folder of deltas that the test may change."""
    return Path(shutil.copytree(decoder[1], tmp_path / "deltas"))


def serving(decoder: tuple[Path, Path], folder: Path, **values: Any) -> Any:
    return served(model=str(decoder[0]), deltas=str(folder), served_name="base", **values)


# -- bounds


def test_loads_that_find_no_room_end_in_time_and_hold_nobody_up(decoder: tuple[Path, Path], folder: Path) -> None:
    """As many loads as there may be wait for a place that a request needs. Another delta is taken out meanwhile."""
    for number in range(PER_TENANT):
        shutil.copytree(folder / "mood", folder / f"copy-{number}")
    with serving(decoder, folder, max_loaded=1, timeout=1.0) as server, ThreadPoolExecutor(PER_TENANT) as pool:
        assert server.post("/v1/completions", {"model": "mood", "prompt": "the", "max_tokens": 1}).status_code == 200
        gate = Gate(server.engine)
        busy = server.engine.submit(Request("generate", "the", delta="mood", sampling=Sampling(58, temperature=0.0)))
        loads = [pool.submit(server.post, "/v1/deltas", {"name": f"copy-{number}"}) for number in range(PER_TENANT - 1)]
        while len(server.engine._lifecycle._loads) < AT_ONCE:
            threading.Event().wait(0.01)
        taking_out = pool.submit(server.delete, "/v1/deltas/zeta-news")
        while not (taking_out.done() and all(load.done() for load in loads)) and not busy.done():
            gate.step() if gate.waits.wait(0.05) else None
            threading.Event().wait(0.05)
        assert taking_out.result(0).status_code == 200 and not busy.done()
        assert {load.result(0).status_code for load in loads} == {408}
        assert {load.result(0).json()["error"]["code"] for load in loads} == {"timeout"}
        gate.release()
        assert busy.result(60).text and not server.engine._lifecycle._loads
        assert server.post("/v1/deltas", {"name": "copy-1"}).status_code == 201


def test_calls_of_a_tenant_are_bounded_and_no_matter_to_others() -> None:
    async def calls() -> None:
        management, gate, begun = Management(60.0), threading.Event(), threading.Semaphore(0)

        def load(*, timeout: float) -> bool:
            assert 0 < timeout <= 60
            begun.release()
            return gate.wait(60)

        one, other = Tenant(name="one"), Tenant(name="other")
        tasks = [asyncio.ensure_future(management.load(one, load)) for _ in range(PER_TENANT)]
        for _ in range(AT_ONCE):
            await asyncio.to_thread(begun.acquire)
        for refused in (management.load(one, load), management.unload(one, list)):
            with pytest.raises(ApiError, match=f"one loads and takes out {PER_TENANT} deltas already") as full:
                await refused
            assert full.value.status == 429 and full.value.retry_after
        assert not begun.acquire(blocking=False), "no more run at a time"
        assert await management.unload(other, lambda: 7) == 7
        tasks.append(asyncio.ensure_future(management.load(other, load)))
        await asyncio.to_thread(begun.acquire)
        gate.set()
        assert all(await asyncio.gather(*tasks))
        assert await management.unload(one, lambda: 8) == 8 and not management._calls

    asyncio.run(calls())


def test_a_call_that_takes_too_long_is_given_up() -> None:
    async def calls() -> None:
        gate = threading.Event()
        management = Management(0.05)
        for _ in range(2 * AT_ONCE):
            with pytest.raises(RequestTimeout, match=r"0\.05 seconds"):
                await management.load(Tenant(name="one"), lambda *, timeout: gate.wait(60))
        gate.set()
        while management._turns["one"]._value < AT_ONCE:
            await asyncio.sleep(0.01)
        assert await management.load(Tenant(name="one"), lambda *, timeout: 7) == 7

    asyncio.run(calls())


def test_every_route_counts_its_requests(decoder: tuple[Path, Path], folder: Path) -> None:
    """Those that list deltas, too. The page and Prometheus have a rate of their own."""
    numbers = ("/stats", "/metrics")
    with serving(decoder, folder, requests_per_minute=0.01) as server, httpx.Client(trust_env=False) as client:
        assert server.get("/v1/models").status_code == 200
        for method, path, body in ASKS:
            answer = client.request(method, server.url + path, json=body, timeout=60)
            assert answer.status_code == (200 if path in numbers else 429), (method, path, answer.text)
        statuses = [200]
        while statuses[-1] == 200 and len(statuses) < 10 * NUMBERS_PER_MINUTE:  # the bucket fills meanwhile
            statuses.append(client.get(server.url + numbers[len(statuses) % 2]).status_code)
        assert len(statuses) > NUMBERS_PER_MINUTE / 2 and statuses[-1] == 429
        assert server.get("/health").status_code == server.get("/ready").status_code == 200


def test_names_that_requests_give_are_bounded(decoder: tuple[Path, Path], folder: Path) -> None:
    with serving(decoder, folder, max_names=2) as server:
        for name, status in (("a", 201), ("b", 201), ("c", 400), ("a", 201), ("mood", 201)):
            answer = server.post("/v1/deltas", {"name": name, "folder": "mood"})
            assert answer.status_code == status, answer.text
            assert status == 201 or "max_names" in answer.json()["error"]["message"]
        assert {one["name"] for one in server.get("/v1/deltas").json()["data"]} == {*METHODS, "a", "b"}


# -- names


def test_a_name_is_taken_whether_its_delta_is_in_memory_or_not(decoder: tuple[Path, Path], folder: Path) -> None:
    """Under vLLM's names: what a request has loaded is replaced with load_inplace alone, and so is another folder's."""

    def load(name: str, path: str, **more: Any) -> tuple[int, str | None]:
        answer = server.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path, **more})
        return answer.status_code, None if answer.status_code == 200 else answer.json()["error"]["code"]

    def version(name: str) -> str:
        return str(server.get(f"/v1/deltas/{name}").json()["version"])

    with serving(decoder, folder, max_loaded=1) as server:
        before = version("mood")
        assert load("mood", "intent") == (400, "already_loaded"), "a name of the folder, of which none is in memory"
        assert load("mood", "mood") == (200, None), "it is there, and nothing is replaced"
        assert load("mine", "intent") == (200, None)
        assert not server.get("/v1/deltas/mood").json()["loaded"]
        for name, path in (("mood", "mood"), ("mood", "intent"), ("mine", "intent"), ("mine", "acme-tone")):
            assert load(name, path) == (400, "already_loaded")
        assert version("mood") == before
        assert load("mood", "intent", load_inplace=True) == (200, None)
        assert version("mood") == version("intent") != before
        assert (
            server.post("/v1/completions", {"model": "acme-tone", "prompt": "the", "max_tokens": 1}).status_code == 200
        )
        assert load("acme-tone", "acme-tone") == (200, None), "in memory by a request for an answer alone"


def test_one_of_several_loads_of_a_name_at_the_same_time_has_it(decoder: tuple[Path, Path], folder: Path) -> None:
    """Nobody is told that a delta was added whose name another one's delta has."""
    with serving(decoder, folder) as server, ThreadPoolExecutor(3) as clients:
        server.engine.load("mood")  # the reader's thread has met the model
        bodies = [{"lora_name": "new", "lora_path": path} for path in ("mood", "intent", "acme-tone")]
        answers = list(clients.map(lambda body: server.post("/v1/load_lora_adapter", body), bodies))
        added = [body["lora_path"] for body, answer in zip(bodies, answers, strict=True) if answer.status_code == 200]
        assert sorted(answer.status_code for answer in answers) == [200, 400, 400]
        assert server.get("/v1/deltas/new").json()["folder"] == added[0]


@pytest.mark.parametrize("name", ["_under", "-dash", "a@b", "a+b", "7.b_c-d", "x" * 200])
def test_every_name_that_a_folder_gives_can_be_loaded(decoder: tuple[Path, Path], folder: Path, name: str) -> None:
    (folder / "mood").rename(folder / name)
    with serving(decoder, folder) as server:
        assert name in {one["id"] for one in server.get("/v1/models").json()["data"]}
        assert server.post("/v1/deltas", {"name": name}).status_code == 201
        assert server.delete(f"/v1/deltas/{name}").status_code == 200
        body = {"lora_name": name, "lora_path": name}
        assert server.post("/v1/load_lora_adapter", body).status_code == 200
        for wrong in ("", ".hidden", "a/b", "a b", "é", "x" * 201, "a\n"):
            with pytest.raises(Exception, match="cannot name a delta"):
                check_delta_name(wrong)
            for path, field in (("/v1/deltas", "name"), ("/v1/load_lora_adapter", "lora_name")):
                assert server.post(path, {**body, "folder": name, field: wrong}).status_code == 400


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, dict[str, str]]:
    rights: dict[str, dict[str, Any]] = {"boss": {"deltas": ["*"], "manage": True}, "acme": {"deltas": ["acme-*"]}}
    made = {name: add_key(tmp_path / "keys.json", name, changes) for name, changes in rights.items()}
    return {name: {"Authorization": f"Bearer {key}"} for name, key in made.items()}


def test_what_was_taken_out_says_so_to_those_who_may_see_it(
    decoder: tuple[Path, Path], folder: Path, keys: dict[str, dict[str, str]]
) -> None:
    def described(name: str, who: str) -> str:
        answer = server.get(f"/v1/deltas/{name}", headers=keys[who])
        assert answer.status_code == 404 and answer.json()["error"]["code"] == "model_not_found"
        return str(answer.json()["error"]["message"])

    with serving(decoder, folder, keys=str(folder.parent / "keys.json")) as server:
        for name in ("acme-tone", "mood"):
            assert server.delete(f"/v1/deltas/{name}", headers=keys["boss"]).status_code == 200
        for who, name in (("boss", "mood"), ("boss", "acme-tone"), ("acme", "acme-tone")):
            assert described(name, who) == (
                f"'{name}' was taken out; its folder is still there, and POST /v1/deltas loads it again"
            )
        assert described("mood", "acme") == described("none", "acme").replace("none", "mood")
        server.post("/v1/deltas", {"name": "mood"}, headers=keys["boss"])
        assert server.get("/v1/deltas/mood", headers=keys["boss"]).status_code == 200
        shutil.rmtree(folder / "acme-tone")
        server.post("/v1/deltas/refresh", {}, headers=keys["boss"])
        assert described("acme-tone", "boss").startswith("unknown delta")
