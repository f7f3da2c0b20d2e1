"""Wrong requests: each is refused with a reason, none is an error of ours, and no neighbour notices."""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .served import METHODS, Served

PATHS = (
    "/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/classify", "/tag", "/generate", "/v1/deltas",
    "/v1/load_lora_adapter", "/v1/unload_lora_adapter",
)  # fmt: skip
FIELDS = (
    "model", "prompt", "messages", "input", "pair", "max_tokens", "temperature", "top_p", "top_k", "stop", "seed", "n",
    "logprobs", "top_logprobs", "stream", "stream_options", "timeout", "user", "echo", "logit_bias", "tools", "name",
    "folder", "lora_name", "lora_path", "dimensions", "encoding_format", "best_of", "frequency_penalty", "new_field",
)  # fmt: skip
NASTY = (
    "", "\0", "a\0b", "\ud800", "é" * 50, "../../etc/passwd", "/etc", "{{7*7}}", "%s%n", "'; drop table", "x" * 3000,
    "<script>", "base ", "BASE", "mood/", "mood\n", "🙂" * 20, "[PAD]", "[UNK] [SEP]",
)  # fmt: skip

LETTERS = 'the old {}[]"\\/\0\n\r\t\u00e9\u0301\u202e\uffff\ud800\udfff\U0001f642'
# Of few letters: hypothesis looks at all of Unicode otherwise, which takes as long as many requests.
texts = st.text(alphabet=LETTERS, max_size=20)
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-3, 3), st.floats(), texts, st.sampled_from(NASTY),
    st.sampled_from(("mood", "base", "intent", "none")), st.sampled_from((10**30, -(2**63), 2**31, 1e308, -0.0)),
)  # fmt: skip
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
bodies = st.dictionaries(st.sampled_from(FIELDS) | texts, values, max_size=7)
sayings = st.sampled_from(("the old hammer", "a", "my table", *NASTY)) | texts
plausible = st.fixed_dictionaries({}, optional={
    "prompt": st.lists(sayings, max_size=3) | sayings | st.lists(st.integers(0, 40), max_size=40),
    "max_tokens": st.integers(1, 4) | st.sampled_from((60, 5000)), "temperature": st.floats(0, 3),
    "n": st.integers(1, 2), "seed": st.integers(),
    "top_p": st.floats(0.01, 1), "top_k": st.integers(-1, 30), "stop": texts | st.lists(texts, max_size=3),
    "logprobs": st.integers(0, 6), "stream": st.booleans(), "timeout": st.floats(0.001, 5),
    "stream_options": st.just({"include_usage": True}), "model": st.sampled_from(("base", *METHODS)),
})  # fmt: skip
PROBE = {"prompt": "the old hammer was near a small otter", "max_tokens": 3, "temperature": 0, "logprobs": 1}


def valid(path: str) -> dict[str, Any]:
    """A request that is right, small enough to be answered at once."""
    if path == "/v1/deltas":
        return {"name": "mood"}
    if "lora" in path:
        return {"lora_name": "nobody", "lora_path": "nobody"} if "un" not in path else {"lora_name": "nobody"}
    if path == "/v1/chat/completions":
        return {"model": "mood", "messages": [{"role": "user", "content": "the"}], "max_tokens": 1}
    if path in ("/v1/completions", "/generate"):
        return {"model": "mood", "prompt" if path.startswith("/v1") else "input": "the", "max_tokens": 1}
    return {"model": "mood", "input": "the"}


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, bytes, dict[str, str]]:
    """A path, a body and headers: anything, or a right request with something in it changed."""
    path = draw(st.sampled_from(PATHS))
    headers = {
        "content-type": draw(st.sampled_from(("application/json",) * 9 + ("text/plain", "", "é".encode("latin-1"))))
    }
    kind = draw(st.integers(0, 5))
    if kind == 0:
        body = draw(st.binary(max_size=200))
    elif kind == 1:
        body = json.dumps(draw(bodies)).encode()
    elif kind in (2, 5):
        path = "/v1/completions"
        body = json.dumps({**valid(path), **draw(plausible)}).encode()
    else:
        changed = {**valid(path), **draw(st.dictionaries(st.sampled_from(FIELDS), values, min_size=1, max_size=2))}
        body = json.dumps(changed).encode()
        if kind == 4:
            text = bytearray(body)
            for _ in range(draw(st.integers(1, 4))):
                place = draw(st.integers(0, max(0, len(text) - 1)))
                text[place : place + draw(st.integers(0, 3))] = draw(st.binary(max_size=3))
            body = bytes(text)
    return path, body, headers  # type: ignore[return-value]


@contextmanager
def neighbours(server: Served) -> Iterator[None]:
    """Ask right questions all the time, and check that each is answered as before."""
    stop, problems, answered = threading.Event(), list[str](), Counter[str]()

    def ask(name: str) -> list[float]:
        answer = server.post("/v1/completions", {"model": name, **PROBE})
        if answer.status_code != 200:
            raise AssertionError(answer.text)
        values: list[float] = answer.json()["choices"][0]["logprobs"]["token_logprobs"]
        return values

    expected = {name: ask(name) for name in ("base", *METHODS)}

    def run() -> None:
        try:
            while not stop.is_set():
                for name, value in expected.items():
                    if ask(name) != pytest.approx(value, abs=1e-4):
                        problems.append(name)
                    answered[name] += 1
                    stop.wait(0.05)
        except (AssertionError, httpx.HTTPError) as error:
            problems.append(repr(error))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(60)
    assert problems == [] and answered


def check(server: Served, client: httpx.Client, request: tuple[str, bytes, dict[str, str]]) -> int:
    """Send a request; an answer, or a refusal with a reason, but no error of ours."""
    path, body, headers = request
    answer = client.post(f"{server.url}{path}", content=body, headers=headers)
    assert answer.status_code < 500, (request, answer.text)
    if answer.status_code >= 400:
        error = answer.json()["error"]
        assert error["message"] and set(error) == {"message", "type", "param", "code"}, answer.text
        assert "Traceback" not in error["message"] and "site-packages" not in error["message"]
    elif headers["content-type"] == "application/json" and '"error"' in answer.text:
        assert '"server_error"' not in answer.text, (request, answer.text)
    return answer.status_code


def statuses_of(server: Served, examples: int) -> Counter[int]:
    """Send so many requests while neighbours ask, and count the statuses of the answers."""
    statuses = Counter[int]()
    with neighbours(server), httpx.Client(timeout=60, trust_env=False) as client:

        @settings(
            max_examples=examples, deadline=None, database=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        )  # fmt: skip
        @given(requests())
        def run(request: tuple[str, bytes, dict[str, str]]) -> None:
            statuses[check(server, client, request)] += 1

        run()
    return statuses


def test_wrong_requests(server: Served) -> None:
    statuses = statuses_of(server, 150)
    assert statuses[400] > 25 and statuses[200] > 5, statuses


@pytest.mark.slow
def test_many_wrong_requests(server: Served) -> None:
    statuses = statuses_of(server, 2_000)
    assert sum(statuses.values()) >= 2_000 and statuses[400] > 400, statuses


WRONG = {
    "no model": ({"prompt": "the"}, 400, "model is missing"),
    "another type": ({"model": "mood", "prompt": {"a": 1}}, 400, "a list of token ids"),
    "mixed inputs": ({"model": "mood", "prompt": ["the", 1]}, 400, "a list of token ids"),
    "nothing": ({"model": "mood", "prompt": ""}, 400, "is empty"),
    "an empty text among others": ({"model": "mood", "prompt": ["the", ""]}, 400, "input 1 of prompt is empty"),
    "a negative token": ({"model": "mood", "prompt": [-1]}, 400, "prompt"),
    "true as a token": ({"model": "mood", "prompt": [True]}, 400, "prompt"),
    "a token that does not exist": ({"model": "mood", "prompt": [10**6]}, 400, ""),
    "longer than the model": ({"model": "mood", "prompt": "the " * 100}, 400, ""),
    "an answer longer than the model": ({"model": "mood", "prompt": "the", "max_tokens": 4000}, 400, ""),
    "a typing mistake": ({"model": "mood", "prompt": "the", "max_token": 3}, 400, "Did you mean 'max_tokens'"),
    "a penalty": (
        {"model": "mood", "prompt": "the", "frequency_penalty": 0.5},
        400,
        "frequency_penalty: only 0 is supported",
    ),
    "echo": ({"model": "mood", "prompt": "the", "echo": True, "stream": True}, 400, "echo is not for a stream"),
    "a task of another head": ({"model": "mood", "input": "the"}, 400, ""),
}


@pytest.mark.parametrize("name", WRONG)
def test_reasons(server: Served, name: str) -> None:
    body, status, words = WRONG[name]
    answer = server.post("/classify" if "input" in body else "/v1/completions", body)
    assert answer.status_code == status and words in answer.json()["error"]["message"], answer.text


@pytest.mark.parametrize(
    "least", [{name: value} for name in ("temperature", "top_p") for value in (5e-324, 2.3e-311, 1e-45, 1e-30, 9e-6)],
    ids=str,
)  # fmt: skip
def test_the_least_values_are_greedy(server: Served, least: dict[str, float]) -> None:
    """The probabilities of a temperature near 0 are no numbers; its limit, and top_p's, is the most likely token."""
    body = {"model": "mood", "prompt": "the old hammer", "max_tokens": 4}
    greedy = server.post("/v1/completions", {**body, "temperature": 0}).json()["choices"][0]["text"]
    answer = server.post("/v1/completions", {**body, **least})
    assert answer.status_code == 200 and answer.json()["choices"][0]["text"] == greedy, answer.text


def test_broken_connections_and_protocols(server: Served) -> None:
    """Bytes that are no HTTP, half requests and connections that break leave the server as it was."""
    import socket

    chance = random.Random(0)
    host, port = server.url.removeprefix("http://").split(":")
    starts = (
        b"", b"GET / HTTP/1.1\r\n", b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"\x16\x03\x01\x02\x00", b"GET /%ff%00 HTTP/1.1\r\nHost: localhost\r\n\r\n", b"A" * 100_000,
    )  # fmt: skip
    with neighbours(server):
        for start in starts:
            for _ in range(3):
                with socket.create_connection((host, int(port)), timeout=5) as connection:
                    connection.sendall(start + chance.randbytes(chance.choice((0, 10, 1000))))
    assert server.get("/health").status_code == 200
