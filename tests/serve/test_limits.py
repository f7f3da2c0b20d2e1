"""Limits: 413, 429 with Retry-After, 408, a client that goes, and logs that keep contents to themselves."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy
import openai
import pytest

from deltune.serve.api.errors import ApiError
from deltune.serve.api.metrics import DeltaLoad, Metrics
from deltune.serve.api.schemas import ChatBody, ClassifyBody, CompletionBody, TagBody
from deltune.serve.api.service import parse_body
from deltune.serve.api.tenants import RateLimits, Tenant
from deltune.serve.config import MAX_INPUTS, LimitsSection
from deltune.serve.engine.requests import EngineStats
from deltune.serve.errors import RequestTimeout

from .served import Served, served, wait_until


def test_buckets_fill_with_time() -> None:
    """In any minute no more than the burst and a minute's worth pass, and the wait that is told suffices."""
    now = 0.0
    limits = RateLimits(LimitsSection(requests_per_minute=6), dict, clock=lambda: now)
    tenant, other = Tenant(name="a"), Tenant(name="b", requests_per_minute=1)
    passed = []
    for _ in range(600):
        try:
            limits.admit(tenant)
            passed.append(now)
        except ApiError as error:
            assert error.status == 429 and error.retry_after is not None and 0 < error.retry_after <= 10
        now += 0.5
    assert 6 + 300 * 6 / 60 - 1 <= len(passed) <= 6 + 300 * 6 / 60
    limits.admit(other)
    with pytest.raises(ApiError, match="1 requests a minute"):
        limits.admit(other)


@pytest.mark.parametrize("rate", [0.5, 1, 2])
def test_the_first_request_passes_while_time_goes_on(rate: float) -> None:
    """A new bucket is full when its first request looks into it, though the clock has moved on since it came."""
    ticks = itertools.count()
    limits = RateLimits(LimitsSection(requests_per_minute=rate), dict, clock=lambda: 1e-6 * next(ticks))
    limits.admit(Tenant(name="a"))


def test_tokens_are_counted_afterwards() -> None:
    now, usage = 0.0, {"a": 99}
    limits = RateLimits(
        LimitsSection(tokens_per_minute=100), lambda: {t: usage.pop(t) for t in list(usage)}, lambda: now
    )
    tenant = Tenant(name="a")
    limits.admit(tenant)
    now += 3600.0  # the bucket holds a minute's worth, however long nobody asks
    usage |= {"a": 250, "b": 10}
    limits.charge_usage()
    with pytest.raises(ApiError) as caught:
        limits.admit(tenant)
    assert caught.value.retry_after == pytest.approx(151 * 60 / 100)
    now += 91.0
    limits.admit(tenant)


def test_tokens_count_whatever_became_of_the_request(decoder: tuple[Path, Path]) -> None:
    """Also where the client goes away, where the request takes too long, and where it fails after it was computed."""
    values: Any = {"watch": 0, "log": "off", "served_name": "base", "tokens_per_minute": 10**9}
    with served(decoder, **values) as running:
        bucket = None

        def charged(ask: Callable[[], object]) -> float:
            nonlocal bucket
            running.post("/v1/completions", {"model": "mood", "prompt": "the", "max_tokens": 1})
            bucket = bucket or next(b for (_, what), b in running.service.limits._buckets.items() if what == "tokens")
            before = running.engine.stats().generated_tokens
            level = bucket.level
            ask()
            wait_until(lambda: not running.engine.stats().running and not running.engine.stats().queued)
            running.service.limits.charge_usage()
            assert running.engine.stats().generated_tokens - before >= 0
            return level - bucket.level

        long = {"model": "mood", "prompt": ["the old hammer"] * 32, "max_tokens": 40, "temperature": 0}

        def go_away() -> None:
            with contextlib.suppress(httpx.ReadTimeout):
                httpx.post(f"{running.url}/v1/completions", json=long, timeout=0.15, trust_env=False)

        assert charged(go_away) > 0
        assert charged(lambda: running.post("/v1/completions", long | {"timeout": 0.05})) > 0
        wrong = {"model": "mood", "input": ["the old hammer"] * 16, "dimensions": 3}
        assert charged(lambda: running.post("/v1/embeddings", wrong)) >= 16 * 3


@pytest.fixture(scope="module")
def limited(decoder: tuple[Path, Path]) -> Iterator[Served]:
    limits = {"max_body": 2000, "max_inputs": 4, "max_tokens": 40, "body_timeout": 0.5}
    with served(decoder, served_name="base", **limits) as running:
        yield running


def message(answer: httpx.Response) -> str:
    return str(answer.json()["error"]["message"])


def test_what_is_too_large(limited: Served) -> None:
    for body, status, words in (
        ({"prompt": "the " * 1000}, 413, "2,000 bytes"),
        ({"prompt": ["the"] * 5}, 413, "5 inputs; one request may have 4"),
        ({"prompt": ["the"] * 3, "n": 2}, 413, "3 inputs with 2 answers each"),
        ({"prompt": "the", "max_tokens": 41}, 400, "generates 40 at most"),
        ({"prompt": "the " * 100}, 400, ""),  # the model has 64 positions
    ):
        answer = limited.post("/v1/completions", {"model": "mood", **body})
        assert answer.status_code == status and words in message(answer), answer.text
    chunks = httpx.post(
        f"{limited.url}/v1/completions", content=(b" " * 100 for _ in range(100)), trust_env=False,
        headers={"Content-Type": "application/json"},
    )  # fmt: skip
    assert chunks.status_code == 413, "a body whose length is not declared is counted as it comes"


def test_a_request_that_does_not_arrive(limited: Served) -> None:
    """Headers that promise a body, and no body: the connection is not held for ever."""
    host, port = limited.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: 100\r\n\r\n{{".encode())
        begun = time.monotonic()
        answer = connection.recv(4096).decode()
        assert "408" in answer.split("\r\n")[0] and time.monotonic() - begun < 8
        assert "connection: close" in answer.lower()


def test_time_runs_out(decoder: tuple[Path, Path]) -> None:
    with served(decoder) as running:
        answer = running.post(
            "/v1/completions", {"model": "mood", "prompt": "the old", "max_tokens": 50, "timeout": 0.001}
        )
        assert answer.status_code == 408 and answer.json()["error"]["code"] == "timeout", answer.text


def test_rates_of_the_server(decoder: tuple[Path, Path]) -> None:
    with served(decoder, requests_per_minute=3) as running:
        body = {"model": "mood", "prompt": "the", "max_tokens": 1}
        answers = [running.post("/v1/completions", body) for _ in range(5)]
        assert [answer.status_code for answer in answers] == [200] * 3 + [429] * 2
        assert 1 <= int(answers[-1].headers["retry-after"]) <= 20 and "3 requests a minute" in message(answers[-1])
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.RateLimitError):
            client.completions.create(model="mood", prompt="the")


def test_a_request_counts_once_and_before_it_is_read(decoder: tuple[Path, Path]) -> None:
    """One with mistakes counts too, and where the rate is used up nothing is parsed: no mistake is found any more."""
    with served(decoder, requests_per_minute=3) as running:
        body = {"model": "mood", "prompt": "the", "max_tokens": 1}
        statuses = [
            running.post("/v1/completions", one).status_code for one in (body, {"wrong": 1}, body, {"wrong": 1})
        ]
        assert statuses == [200, 400, 200, 429]
    with served(decoder, requests_per_minute=3) as running:
        bodies = ({"name": "mood"}, {"wrong": 1}, {"name": "mood"}, {"wrong": 1})
        statuses = [running.post("/v1/deltas", one).status_code for one in bodies]
        assert statuses == [201, 400, 201, 429]


@pytest.mark.parametrize("model", [CompletionBody, TagBody, ChatBody], ids=lambda model: model.__name__)
def test_lists_without_end_are_not_parsed(model: type[Any]) -> None:
    """A million lists of a number would hold all others up for a second; brackets in a text are none."""
    with pytest.raises(ApiError, match="more than 131,072 lists and objects") as caught:
        parse_body(b'{"model": "mood", "prompt": [' + b"[1]," * 1_000_000 + b"[1]]}", model)
    assert caught.value.status == 413
    text = '[{"\\":' * 200_000
    assert parse_body(json.dumps({"model": "mood", "prompt": text}).encode(), CompletionBody).prompt == text


def test_lists_have_bounds() -> None:
    message = {"role": "user", "content": "the"}
    for model, body, field in (
        (CompletionBody, {"prompt": ["a"] * (MAX_INPUTS + 1)}, "prompt"),
        (CompletionBody, {"prompt": [1] * (2**20 + 1)}, "prompt"),
        (CompletionBody, {"prompt": "a", "metadata": {str(i): "" for i in range(17)}}, "metadata"),
        (TagBody, {"input": [["a"]] * (MAX_INPUTS + 1)}, "input"),
        (ClassifyBody, {"input": "a", "pair": ["a"] * (MAX_INPUTS + 1)}, "pair"),
        (ChatBody, {"messages": [message] * 10_001}, "messages"),
        (ChatBody, {"messages": [{**message, "content": [{"type": "text", "text": ""}] * 1025}]}, "messages.0.content"),
    ):
        with pytest.raises(ApiError, match=rf"^{field}: \w+ should have at most") as caught:
            parse_body(json.dumps({"model": "mood", **body}).encode(), model)
        assert caught.value.status == 400


def test_a_full_queue_is_told_when_to_come_again(decoder: tuple[Path, Path]) -> None:
    limits = {"max_queue": 2, "max_batch_size": 1}
    with served(decoder, **limits) as running:
        body = {"model": "mood", "prompt": ["the"] * 2, "max_tokens": 30, "temperature": 0}
        never = running.post("/v1/completions", body | {"prompt": ["the"] * 3})
        assert never.status_code == 413 and "retry-after" not in never.headers, "it would be refused again and again"
        with ThreadPoolExecutor(8) as clients:
            answers = list(clients.map(lambda _: running.post("/v1/completions", body), range(24)))
        assert {answer.status_code for answer in answers} == {200, 429}
        answer = next(answer for answer in answers if answer.status_code == 429)
        assert int(answer.headers["retry-after"]) >= 1 and answer.json()["error"]["code"] == "queue_full"
        wait_until(lambda: not running.engine.stats().running and not any(running.engine.stats().queued.values()))
        assert running.post("/v1/completions", {"model": "mood", "prompt": "the", "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("stream", [False, True, True, True])
def test_a_client_that_goes_leaves_the_batch(server: Served, stream: bool) -> None:
    """Its request ends long before it would have: nothing runs, and nothing was answered."""
    finished = server.engine.stats().finished.get("mood", 0)
    body = {"model": "mood", "prompt": ["the old hammer"] * 16, "max_tokens": 50, "stream": stream, "n": 16}
    patience = 60 if stream else 0.25
    asking = httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=patience, trust_env=False)
    with contextlib.suppress(httpx.ReadTimeout), asking as answer:
        assert stream and next(answer.iter_lines()).startswith("data: ")
    wait_until(lambda: not server.engine.stats().running and not any(server.engine.stats().queued.values()), 20)
    assert server.engine.stats().finished.get("mood", 0) - finished < 256


@pytest.mark.parametrize("contents", [False, True])
def test_a_line_of_json_for_each_request(
    decoder: tuple[Path, Path], contents: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Lines have counts and times; inputs and answers only where they are asked for."""
    from deltune.serve.api.app import JsonFormatter

    caplog.set_level(logging.INFO, "deltune.serve")
    with served(decoder, log_contents=contents) as running:
        answer = running.post(
            "/v1/completions", {"model": "mood", "prompt": "the hammer", "max_tokens": 3, "temperature": 0}
        )
        running.post("/classify", {"model": "mood", "input": ["the badger"]})
        running.post("/v1/completions", {"model": "the chisel", "prompt": "the wrench"})
        running.get("/health")
    # The server has ended, so that every line has been written.
    records = [record for record in caplog.records if record.getMessage() == "request"]
    lines = [JsonFormatter().format(record) for record in records if record.thread == running.thread]
    assert len(lines) == 3, "probes have no line"
    first, _, missing = map(json.loads, lines)
    assert first["endpoint"] == "/v1/completions" and first["status"] == 200 and first["delta"] == "mood"
    assert first["generated_tokens"] == 3 and first["prompt_tokens"] > 0 and first["seconds"] > 0
    assert first["id"] == answer.headers["x-request-id"] and first["tenant"] == "default"
    assert missing["status"] == 404 and missing["delta"] is None
    text = "".join(lines)
    assert ("hammer" in text) == ("badger" in text) == contents
    assert not any(word in text for word in ("chisel", "wrench")), "what was refused is never kept"
    assert (answer.json()["choices"][0]["text"] in text) == contents


def test_an_error_of_ours_is_an_answer_without_details(
    decoder: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with served(decoder) as running:
        with monkeypatch.context() as patch:
            patch.setattr(type(running.engine), "deltas", lambda self: 1 / 0)
            answer = running.get("/v1/deltas")
        assert answer.status_code == 500 and "division" not in answer.text
        wait_until(lambda: any("ZeroDivisionError" in str(record.exc_info) for record in caplog.records), 10)
        assert running.get("/v1/deltas").status_code == 200


def test_a_stream_that_fails_counts_as_an_error(
    decoder: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its answer began with 200, and the error is in its last event: numbers and log have the status of the error."""
    caplog.set_level(logging.INFO, "deltune.serve")
    with served(decoder) as running:
        whole = type(running.engine).astream

        async def broken_off(engine: Any, request: Any) -> Any:
            async for item in whole(engine, request):
                yield item
                raise RequestTimeout("the request took longer than its timeout")

        monkeypatch.setattr(type(running.engine), "astream", broken_off)
        body = {"model": "mood", "prompt": "the", "max_tokens": 40, "stream": True}
        answer = running.post("/v1/completions", body)
        assert answer.status_code == 200 and '"status": 408' in answer.text.strip().splitlines()[-1]
        load = wait_until(lambda: running.service.metrics.loads.get("mood"))
        assert (load.requests, load.errors, load.statuses) == (1, 1, {"408"})
    (line,) = [record.facts for record in caplog.records if record.getMessage() == "request"]  # type: ignore[attr-defined]
    assert line["status"] == 408 and line["stream"]


def test_latencies_are_of_answers_and_errors_are_counted_apart() -> None:
    """A refusal takes no time: with many of them among the answers, a slow server would look fast."""
    now = 0.0
    metrics = Metrics(EngineStats, list, clock=lambda: now)
    for status, seconds in ((200, 0.5), *((400, 0.001),) * 50, (429, 0.001), (500, 9.0), (499, 9.0), (200, 1.5)):
        metrics.observe("/classify", status, seconds, "mood", 5)
    metrics.observe("/classify", 404, 0.001, "other", 5)
    load, other = metrics.loads["mood"], metrics.loads["other"]
    assert (load.requests, load.errors) == (55, 53) and (load.percentile(0.0), load.percentile(0.95)) == (0.5, 1.5)
    assert (other.requests, other.errors, other.percentile(0.5)) == (1, 1, None)
    now = 1.0
    (second,) = metrics.history(1)
    assert second == {"requests": 56, "errors": 54, "tokens": 280, "latency": 1.0}
    now = 2.0
    metrics.observe("/classify", 400, 0.001, "mood", 5)
    now = 3.0
    assert metrics.history(1)[0]["latency"] is None
    assert 'deltune_delta_seconds_total{delta="mood"} 2.0' in metrics.text().decode()


@pytest.mark.parametrize("percent", [0, 25, 50, 90, 95, 99, 100])
def test_a_percentile_is_the_least_value_that_a_share_does_not_exceed(percent: int) -> None:
    """On the page and in the metrics; numpy calls it the inverse of the distribution."""
    for number in range(1, 120):
        values = [float(value) for value in range(number)]
        load = DeltaLoad()
        load.latencies.extend(reversed(values))
        assert load.percentile(percent / 100) == numpy.quantile(values, percent / 100, method="inverted_cdf"), number


def test_metrics_forget_deltas_that_were_not_asked_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of deltas come and go, and what is counted for each must not grow for ever."""
    monkeypatch.setattr("deltune.serve.api.metrics.MAX_DELTAS", 3)
    metrics = Metrics(EngineStats, list)
    for number in range(20):
        for status in (200, 400):
            metrics.observe("/classify", status, 0.1, f"delta{number}", 5)
    lines = [line for line in metrics.text().decode().splitlines() if 'delta="' in line and "_created" not in line]
    assert {line.split('delta="')[1].partition('"')[0] for line in lines} == {"delta17", "delta18", "delta19"}
    assert len(lines) == 9
