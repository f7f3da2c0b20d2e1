"""What the settings of the HTTP layer do: HTTPS, origins of web pages, rates of tokens and of single keys."""

from __future__ import annotations

import json
import shutil
import socket
import ssl
import subprocess
import time
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import httpx
import pytest

from deltune.serve.api.tenants import add_key
from deltune.serve.config import SECTIONS, ServeConfig
from deltune.serve.loading import load_server

from .served import Served, served

BODY = {"model": "mood", "prompt": "the old", "max_tokens": 4}


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl")
def test_https(decoder: tuple[Path, Path], tmp_path: Path) -> None:
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject]
    subprocess.run([*made, "-keyout", key, "-out", certificate], check=True, capture_output=True, timeout=60)
    options = {"ssl_certfile": str(certificate), "ssl_keyfile": str(key), "watch": 0, "log": "off"}
    with served(decoder, **options) as running:
        address = running.url.replace("http://", "https://")
        trusted = ssl.create_default_context(cafile=str(certificate))
        answer = httpx.post(f"{address}/v1/completions", json=BODY, verify=trusted, timeout=60, trust_env=False)
        assert answer.status_code == 200 and answer.json()["choices"], answer.text
        with pytest.raises(httpx.HTTPError):  # without TLS nothing is answered
            running.get("/health")


def test_pages_of_named_origins_may_ask(decoder: tuple[Path, Path]) -> None:
    """A browser asks beforehand; the answer names the origin only if the config does."""
    origins = ["https://a.example", "https://b.example"]
    with served(decoder, cors_origins=origins) as running:
        for origin, allowed in (("https://b.example", True), ("https://evil.example", False)):
            headers = {
                "Origin": origin, "Access-Control-Request-Method": "POST",
                "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang,x-stainless-os",
            }  # fmt: skip
            before = httpx.options(f"{running.url}/v1/completions", headers=headers, trust_env=False)
            answer = running.post("/v1/completions", BODY, headers={"Origin": origin})
            assert (before.status_code == 200) == allowed
            if allowed:  # what a script may send, and read of an answer
                assert "x-stainless-lang" in before.headers["access-control-allow-headers"]
                exposed = {name.strip() for name in answer.headers["access-control-expose-headers"].split(",")}
                assert exposed == {"Retry-After", "X-Request-ID"}
            for one in (before, answer):
                assert one.headers.get("access-control-allow-origin") == (origin if allowed else None), one.headers
    with served(model=str(decoder[0])) as running:
        answer = running.get("/health", headers={"Origin": "https://a.example"})
        assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_a_minute(decoder: tuple[Path, Path], stream: bool) -> None:
    """What was read and generated counts, in one piece and as a stream; the next request is told when to come."""
    with served(decoder, tokens_per_minute=6) as running:
        first = running.post("/v1/completions", {**BODY, "stream": stream})
        second = running.post("/v1/completions", {**BODY, "stream": stream})
        third = running.post("/v1/completions", BODY)
    assert (first.status_code, third.status_code) == (200, 429) and second.status_code in (200, 429)
    assert int(third.headers["retry-after"]) >= 1 and "6 tokens a minute" in third.json()["error"]["message"]


def test_a_key_has_rates_of_its_own(decoder: tuple[Path, Path], tmp_path: Path) -> None:
    """Beside those of the server, and what one tenant has used up another one has not."""
    file = tmp_path / "keys.json"
    keys = {
        "slow": add_key(file, "slow", {"deltas": ("*",), "requests_per_minute": 1.0}),
        "quick": add_key(file, "quick", {"deltas": ("*",), "requests_per_minute": 100.0}),
        "usual": add_key(file, "usual", {"deltas": ("*",)}),
    }
    options: dict[str, Any] = {"keys": str(file), "requests_per_minute": 2, "watch": 0, "log": "off"}
    with served(decoder, **options) as running:
        statuses = {
            name: [
                running.post("/v1/completions", BODY, headers={"Authorization": f"Bearer {key}"}).status_code
                for _ in range(4)
            ]
            for name, key in keys.items()
        }
    assert statuses == {"slow": [200, 429, 429, 429], "quick": [200] * 4, "usual": [200, 200, 429, 429]}


def test_every_setting_of_the_engine_reaches_it(decoder: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with a value of its own, so that none can be taken for another."""
    values: dict[str, Any] = {"model": str(decoder[0]), "deltas": str(decoder[1])}
    numbers = iter(range(71, 171))
    for section in ("deltas", "batching"):
        values |= {name: next(numbers) for name in SECTIONS[section].model_fields if name != "folder"}
    got: dict[str, Any] = {}
    monkeypatch.setattr("deltune.serve.engine.server.Server", lambda *_, **options: got.update(options))
    load_server(ServeConfig.from_values(values))
    renamed = {"prompt_cache": "prompt_cache"}
    assert str(got.pop("deltas")) == values["deltas"]
    assert {renamed.get(name, name): value for name, value in got.items()} == {
        name: value for name, value in values.items() if name not in ("model", "deltas")
    }


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "[bad"])
def test_a_name_that_leads_to_this_machine_is_not_answered(server: Served, host: str) -> None:
    """A page whose own name has the address 127.0.0.1 (DNS rebinding) is of the same origin for its browser."""
    for method, path in (("GET", "/v1/deltas"), ("GET", "/health"), ("DELETE", "/v1/deltas/mood")):
        answer = httpx.request(method, server.url + path, headers={"Host": host}, trust_env=False)
        assert answer.status_code == 403 and answer.json()["error"]["code"] == "host_not_allowed", answer.text
        assert answer.headers["x-request-id"]
    assert "mood" in server.get("/v1/deltas").text
    for name in ("localhost", "LOCALHOST:1", "127.0.0.1:9", "[::1]:8000"):
        assert server.get("/health", headers={"Host": name}).status_code == 200, name


def test_with_keys_or_for_other_machines_any_host_is_answered(decoder: tuple[Path, Path], tmp_path: Path) -> None:
    key = add_key(tmp_path / "keys.json", "acme", {"deltas": ("*",)})
    headers = {"Host": "models.example", "Authorization": f"Bearer {key}"}
    for options in ({"keys": str(tmp_path / "keys.json")}, {"host": "0.0.0.0"}):
        with served(model=str(decoder[0]), **options) as running:
            assert running.get("/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize("how", ["closed", "broken"])
def test_probes_notice_an_engine_that_has_ended(
    decoder: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    with served(model=str(decoder[0])) as running:
        assert [running.get(path).status_code for path in ("/health", "/ready")] == [200, 200]
        if how == "closed":
            running.engine.close(0.0)
        else:
            monkeypatch.setattr("threading.excepthook", lambda _: None)

            def end() -> None:
                raise SystemExit

            with running.engine._wake:
                running.engine._calls.append(end)
                running.engine._wake.notify_all()
            running.engine._thread.join(20)
        answers = [running.get(path) for path in ("/health", "/ready")]
    assert [(answer.status_code, answer.text) for answer in answers] == [(503, "the engine has ended\n")] * 2


def test_a_wrong_path_or_method_is_told_what_there_is(server: Served) -> None:
    missing = server.post("/v1/clasify", {})
    assert missing.status_code == 404
    assert missing.json()["error"]["message"].startswith("unknown path '/v1/clasify'. Did you mean '/v1/classify'?")
    for path, allowed in (("/v1/deltas/mood", "DELETE, GET"), ("/classify", "POST"), ("/v1/deltas", "GET, POST")):
        answer = httpx.request("PUT", server.url + path, trust_env=False)
        assert answer.status_code == 405 and answer.headers["allow"] == allowed, answer.headers
        assert allowed.replace(", ", " or ") in answer.json()["error"]["message"]


EARLY = {
    "no such path": ("/nope", "application/json", 404),
    "not JSON": ("/v1/completions", "text/plain", 415),
    "no such delta": ("/v1/deltas/nope", "application/json", 405),
}


@pytest.mark.parametrize("name", EARLY)
def test_an_answer_before_the_body_ends_in_order(server: Served, name: str) -> None:
    """The client sends its body to the end, reads one answer, and asks again on the same connection."""
    path, media, status = EARLY[name]
    size = 300_000
    with connect(server) as connection:
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {media}\r\nContent-Length: {size}\r\n\r\n"
        connection.sendall(head.encode())
        for _ in range(size // 10_000):
            connection.sendall(b"x" * 10_000)
            time.sleep(0.002)
        answer = HTTPResponse(connection)
        answer.begin()
        assert answer.status == status and json.loads(answer.read())["error"]["message"]
        connection.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = HTTPResponse(connection)
        answer.begin()
        assert answer.status == 200 and "version" in json.loads(answer.read())


def test_a_body_that_was_not_sent_is_not_waited_for(server: Served) -> None:
    """A client that asks before it sends its body gets the refusal at once, and the connection ends with it."""
    with connect(server) as connection:
        head = b"POST /nope HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: 300000\r\n\r\n"
        connection.sendall(head)
        answer = HTTPResponse(connection)
        answer.begin()
        assert answer.status == 404 and answer.headers["connection"] == "close" and answer.read()
        assert connection.recv(1) == b""


def connect(server: Served) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20)
