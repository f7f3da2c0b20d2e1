"""Two replicas on Ray Serve behind the same HTTP layer: the same answers by any of them, and hot deltas on all."""

from __future__ import annotations

import json
import pickle
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from deltune.serve.errors import EngineClosed, InvalidRequest, QueueFull, ReplicaLost, RequestTimeout, UnknownDelta

from .served import METHODS, Served, ServeProcess, served, wait_until

ASK = {"prompt": "the old hammer", "max_tokens": 6, "temperature": 0, "logprobs": 1}


@pytest.mark.parametrize("kind", [UnknownDelta, InvalidRequest, RequestTimeout, EngineClosed])
def test_errors_survive_the_way_to_the_front(kind: type[Exception]) -> None:
    assert type(pickle.loads(pickle.dumps(kind("why")))) is kind
    full = pickle.loads(pickle.dumps(QueueFull("why", 3.5)))
    assert isinstance(full, QueueFull) and full.retry_after == 3.5 and str(full) == "why"


@pytest.fixture(scope="module")
def folder(decoder: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replicas") / "deltas"
    shutil.copytree(decoder[1], folder)
    return folder


@pytest.fixture(scope="module")
def replicas(decoder: tuple[Path, Path], folder: Path) -> Iterator[Served]:
    pytest.importorskip("ray.serve")
    options = {"served_name": "base", "watch": 0, "log": "off", "ray": True, "replicas": 2, "ray_cpus": 0.5}
    with served(model=str(decoder[0]), deltas=str(folder), **options) as running:
        yield running


def answers(server: Served) -> dict[str, list[float]]:
    responses = {name: server.post("/v1/completions", {"model": name, **ASK}) for name in ("base", *METHODS)}
    assert {answer.status_code for answer in responses.values()} == {200}, {n: a.text for n, a in responses.items()}
    return {name: answer.json()["choices"][0]["logprobs"]["token_logprobs"] for name, answer in responses.items()}


@pytest.mark.slow
def test_replicas_answer_as_one_engine_does(server: Served, replicas: Served) -> None:
    alone, replicated = answers(server), answers(replicas)
    for name, values in alone.items():
        assert replicated[name] == pytest.approx(values, abs=1e-5), name
    whole = replicas.post("/v1/completions", {"model": "mood", **ASK}).json()["choices"][0]["text"]
    streamed = replicas.post("/v1/completions", {"model": "mood", **ASK, "stream": True}).text
    assert streamed.rstrip().endswith("data: [DONE]") and streamed.count('"text"') >= 6
    assert all(word in streamed for word in whole.split())
    assert replicas.post("/v1/completions", {"model": "none", **ASK}).status_code == 404
    assert replicas.post("/v1/completions", {"model": "mood", "prompt": [10**6]}).status_code == 400
    assert replicas.post("/classify", {"model": "mood", "input": "the"}).status_code == 400


@pytest.mark.slow
def test_a_delta_is_loaded_on_all_replicas(replicas: Served, folder: Path) -> None:
    """Under another name than that of its folder, so that a replica knows it only if it was told."""
    shutil.copytree(folder / "mood", folder / "copy")
    loaded = replicas.post("/v1/load_lora_adapter", {"lora_name": "other", "lora_path": "copy"})
    assert loaded.status_code == 200, loaded.text
    expected = answers(replicas)["mood"]
    for _ in range(12):
        answer = replicas.post("/v1/completions", {"model": "other", **ASK})
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=1e-5)
    assert replicas.post("/v1/unload_lora_adapter", {"lora_name": "other"}).status_code == 200
    assert {replicas.post("/v1/completions", {"model": "other", **ASK}).status_code for _ in range(6)} == {404}
    listed = {one["name"] for one in replicas.post("/v1/deltas/refresh", {}).json()["data"]}
    assert "copy" in listed and "other" not in listed


@pytest.mark.slow
def test_a_delta_that_one_replica_refuses_changes_nothing(replicas: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that had taken it have the old version again, or do not know the delta any more."""
    before = answers(replicas)
    broadcast = replicas.engine._broadcast

    def one_refuses(method: str, *arguments: Any, **options: Any) -> list[Any]:
        results: list[Any] = broadcast(method, *arguments, **options)
        if method == "load":
            monkeypatch.setattr(replicas.engine, "_broadcast", broadcast)
            results[0] = InvalidRequest("this replica has no room")
        return results

    for name, folder in (("mood", "intent"), ("another", "intent")):
        monkeypatch.setattr(replicas.engine, "_broadcast", one_refuses)
        refused = replicas.post("/v1/deltas", {"name": name, "folder": folder})
        assert refused.status_code == 400 and "has no room" in refused.text
    for _ in range(4):
        assert replicas.post("/v1/completions", {"model": "another", **ASK}).status_code == 404
        for name, values in answers(replicas).items():
            assert values == pytest.approx(before[name], abs=1e-5), name


@pytest.mark.slow
def test_tokens_are_charged_though_a_look_is_lost(replicas: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """What replicas have told the front without being heard they tell again, and nothing twice."""
    engine: Any = replicas.engine
    monkeypatch.setattr(replicas.service.limits, "_take_usage", dict)
    broadcast = engine._broadcast
    engine._look()
    engine.take_usage()

    def lost(method: str, *arguments: Any, **options: Any) -> list[Any]:
        broadcast(method, *arguments, **options)
        raise ReplicaLost("the answer did not arrive")

    monkeypatch.setattr(engine, "_broadcast", lost)
    answer = replicas.post("/v1/completions", {"model": "mood", **ASK})
    with pytest.raises(ReplicaLost):
        engine._look()
    monkeypatch.setattr(engine, "_broadcast", broadcast)
    for _ in range(3):
        engine._look()
    usage = answer.json()["usage"]
    assert sum(engine.take_usage().values()) == usage["prompt_tokens"] + usage["completion_tokens"]


@pytest.mark.slow
def test_a_client_that_goes_leaves_the_batch_of_a_replica(replicas: Served) -> None:
    """What it asked for is not generated to its end."""
    before = replicas.engine.stats().finished.get("mood", 0)
    body = {"model": "mood", "prompt": ["the old hammer"] * 16, "max_tokens": 50, "n": 16, "timeout": 60}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{replicas.url}/v1/completions", json=body, timeout=0.3, trust_env=False)

    def is_idle() -> bool:
        stats = replicas.engine.stats()
        return not stats.running and not any(stats.queued.values())

    time.sleep(2.5)  # the front has looked at its replicas meanwhile
    wait_until(is_idle, 20)
    assert replicas.engine.stats().finished.get("mood", 0) - before < 256


@pytest.mark.slow
def test_numbers_are_those_of_all_replicas(replicas: Served) -> None:
    before = replicas.engine.stats().finished.get("intent", 0)
    for _ in range(8):
        replicas.post("/v1/completions", {"model": "intent", **ASK})
    wait_until(lambda: replicas.engine.stats().finished.get("intent", 0) == before + 8, 20)
    assert "deltune_finished_total" in replicas.get("/metrics").text


@pytest.mark.slow
def test_a_replica_that_ends_is_a_503_and_waiting_has_an_end(replicas: Served) -> None:
    """Until Ray has replaced them: what ran on them fails, and what waits for them ends with its own timeout."""
    import ray

    statuses: dict[str, httpx.Response] = {}

    def long() -> None:
        body = {"model": "mood", "prompt": [[7] * 5] * 200, "max_tokens": 50}
        statuses["running"] = replicas.post("/v1/completions", body)

    running = threading.Thread(target=long)
    running.start()
    wait_until(lambda: sum(replicas.engine.stats().running.values()), 20)
    name = replicas.engine._name
    actors = [one for one in ray.util.list_named_actors(all_namespaces=True) if name in one["name"]]
    assert len(actors) == 2
    for actor in actors:
        ray.kill(ray.get_actor(actor["name"], namespace=actor["namespace"]))
    running.join(60)
    lost = statuses["running"]
    assert lost.status_code == 503 and lost.json()["error"]["code"] == "replica_lost" and lost.headers["retry-after"]
    begun = time.monotonic()
    waited = replicas.post("/v1/completions", {"model": "mood", **ASK, "timeout": 1})
    assert waited.status_code in (408, 503) and time.monotonic() - begun < 20
    assert replicas.engine.is_alive(), "Ray replaces them"
    wait_until(lambda: replicas.post("/v1/completions", {"model": "mood", **ASK, "timeout": 5}).status_code == 200, 90)
    assert {answer.status_code for answer in (replicas.get("/health"), replicas.get("/ready"))} == {200}


@pytest.mark.slow
def test_replicas_that_say_nothing_for_long_are_dead(replicas: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    assert replicas.get("/health").status_code == 200
    monkeypatch.setattr("deltune.serve.replicas.LOST_AFTER", 0.0)
    assert {answer.status_code for answer in (replicas.get("/health"), replicas.get("/ready"))} == {503}


@pytest.mark.slow
def test_what_replicas_have_not_answered_in_time_gets_a_503(decoder: tuple[Path, Path]) -> None:
    pytest.importorskip("ray.serve")
    model, deltas = decoder
    options = ["--ray", "--ray-cpus", 0.5, "--drain", 1, "--served-name", "base"]
    with ServeProcess(model, "--deltas", deltas, *options) as running:
        answers: list[httpx.Response] = []
        parts: list[bytes] = []
        body = {"model": "mood", "prompt": [[7] * 5] * 120, "max_tokens": 50}

        def stream() -> None:
            url = f"{running.url}/v1/completions"
            with httpx.stream("POST", url, json={**body, "stream": True}, timeout=90, trust_env=False) as answer:
                parts.extend(answer.iter_raw())

        threads = [
            threading.Thread(target=stream),
            threading.Thread(target=lambda: answers.append(running.server.post("/v1/completions", body))),
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: parts)
        running.process.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join(60)
        assert [answer.status_code for answer in answers] == [503]
        assert answers[0].json()["error"]["code"] == "shutting_down"
        assert json.loads(b"".join(parts).decode().rstrip().rpartition("data: ")[2])["status"] == 503
        assert running.process.wait(60) == 0
    assert "Traceback" not in "".join(running.lines)
