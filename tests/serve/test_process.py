"""`deltune serve` as a process: its first answer, its config, draining on SIGTERM, and kill -9."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer
import yaml

from deltune.cli.app import app
from deltune.cli.serve import serve_app
from deltune.errors import DeltuneError
from deltune.serve.config import DOTTED, PLACES, SECTIONS, ServeConfig

from .served import METHODS, SOURCE, Served, ServeProcess, wait_until


def digest(folder: Path) -> dict[str, str]:
    """Every file below a folder, by its contents."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def all_answers(server: Served) -> list[str]:
    """What every delta says, greedily."""
    texts = []
    for name in METHODS:
        body = {"model": name, "prompt": "the old", "max_tokens": 4, "temperature": 0}
        answer = server.post("/v1/completions", body)
        assert answer.status_code == 200, (answer.status_code, answer.text)
        texts.append(answer.json()["choices"][0]["text"])
    return texts


@pytest.mark.slow
def test_kill_and_restart(decoder: tuple[Path, Path]) -> None:
    """A killed server harms nothing of its folder, and the next one answers the same, within seconds."""
    model, deltas = decoder
    before = digest(deltas)
    with ServeProcess(model, "--deltas", deltas) as first:
        answers = all_answers(first.server)
        body = {"model": "mood", "prompt": ["the"] * 16, "max_tokens": 50}
        threading.Thread(target=lambda: _ignore(lambda: first.server.post("/v1/completions", body))).start()
        time.sleep(0.2)
        first.process.send_signal(signal.SIGKILL)
        first.process.wait(30)
    with ServeProcess(model, "--deltas", deltas) as second:
        assert all_answers(second.server) == answers
    assert digest(deltas) == before


def _ignore(work: Any) -> None:
    with contextlib.suppress(httpx.HTTPError):
        work()


@pytest.mark.slow
def test_sigterm_drains(decoder: tuple[Path, Path]) -> None:
    """Readiness goes first; what runs is finished, streams too; new requests are refused; the exit code is 0."""
    model, deltas = decoder
    with ServeProcess(model, "--deltas", deltas, "--drain-delay", 8) as running:
        server = running.server
        parts: list[bytes] = []

        def stream() -> None:
            body = {"model": "mood", "prompt": ["the old"] * 4, "max_tokens": 50, "temperature": 0, "stream": True}
            with httpx.stream(
                "POST", f"{running.url}/v1/completions", json=body, timeout=60, trust_env=False
            ) as answer:
                parts.extend(answer.iter_raw())

        reader = threading.Thread(target=stream)
        reader.start()
        wait_until(lambda: parts)
        running.process.send_signal(signal.SIGTERM)
        wait_until(lambda: server.get("/ready").status_code == 503)
        assert server.get("/health").status_code == 200
        late = server.post("/v1/completions", {"model": "mood", "prompt": "the", "max_tokens": 1})
        assert late.status_code == 200, "until the delay is over, requests of a slow load balancer are answered"
        reader.join(60)
        assert running.process.wait(60) == 0
        text = b"".join(parts).decode()
        assert text.rstrip().endswith("data: [DONE]") and '"error"' not in text
        with pytest.raises(httpx.ConnectError):
            server.get("/ready")


@pytest.mark.slow
@pytest.mark.parametrize("second_signal", [False, True])
def test_what_has_not_ended_in_time_gets_a_503(decoder: tuple[Path, Path], second_signal: bool) -> None:
    """Whole answers and streams, after `--drain` or at a second signal; the log has no traceback."""
    model, deltas = decoder
    options = ["--drain", 60 if second_signal else 0.5, "--max-queue-per-tenant", 1000]
    with ServeProcess(model, "--deltas", deltas, *options) as running:
        slow = {"model": "mood", "prompt": ["the old"] * 200, "max_tokens": 50, "temperature": 0}
        parts: list[bytes] = []
        answers: list[httpx.Response] = []

        def stream() -> None:
            url = f"{running.url}/v1/completions"
            with httpx.stream("POST", url, json={**slow, "stream": True}, timeout=60, trust_env=False) as answer:
                parts.extend(answer.iter_raw())

        def whole() -> None:
            answers.append(running.server.post("/v1/completions", slow))

        threads = [threading.Thread(target=target) for target in (stream, whole, whole, whole)]
        for thread in threads:
            thread.start()
        wait_until(lambda: parts and running.server.get("/stats").json()["running"] > 1)
        running.process.send_signal(signal.SIGINT)
        if second_signal:
            time.sleep(0.5)
            running.process.send_signal(signal.SIGINT)
        for thread in threads:
            thread.join(60)
        assert running.process.wait(60) == 0
        assert len(answers) == 3
        for answer in answers:
            assert answer.status_code == 503 and answer.headers["Retry-After"] == "1"
            assert answer.json()["error"]["code"] == "shutting_down"
        last = b"".join(parts).decode().rstrip().rpartition("data: ")[2]
        assert json.loads(last)["status"] == 503
    assert "Traceback" not in "".join(running.lines)
    assert "had not ended: the answer is a 503" in "".join(running.lines)


@pytest.mark.slow
def test_clients_that_neither_send_nor_read_do_not_hold_up_the_end(decoder: tuple[Path, Path]) -> None:
    model, deltas = decoder
    with ServeProcess(model, "--deltas", deltas, "--drain", 0.5) as running:
        host, _, port = running.url.removeprefix("http://").partition(":")
        body = json.dumps({"model": "mood", "prompt": ["the old"] * 200, "max_tokens": 50, "logprobs": 5}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        head += "Content-Type: application/json\r\n\r\n"
        with socket.create_connection((host, int(port))) as sends_half, socket.socket() as does_not_read:
            does_not_read.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            does_not_read.connect((host, int(port)))
            does_not_read.sendall(head.encode() + body)
            sends_half.sendall(head.encode() + body[:50])
            wait_until(lambda: running.server.get("/stats").json()["running"] > 0)
            running.process.send_signal(signal.SIGTERM)
            assert running.process.wait(30) == 0
            sends_half.settimeout(10)
            assert sends_half.recv(100).startswith(b"HTTP/1.1 503")
    assert "Traceback" not in "".join(running.lines)


@pytest.mark.slow
def test_logs_have_no_contents_and_a_second_signal_ends_at_once(decoder: tuple[Path, Path], tmp_path: Path) -> None:
    model, deltas = decoder
    file = tmp_path / "serve.yaml"
    file.write_text(yaml.safe_dump({"model": str(model), "deltas": {"folder": str(deltas)}, "http": {"page": False}}))
    with ServeProcess("--config", file, "--served-name", "backbone", "--drain-delay", 60) as running:
        answer = running.server.post("/v1/completions", {"model": "backbone", "prompt": "the hammer", "max_tokens": 2})
        assert answer.status_code == 200 and running.server.get("/").status_code == 404
        lines = wait_until(lambda: [line for line in running.lines if line.startswith("{")])
        assert json.loads(lines[0])["generated_tokens"] == 2 and "hammer" not in "".join(running.lines)
        running.process.send_signal(signal.SIGTERM)
        wait_until(lambda: running.server.get("/ready").status_code == 503)
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(50) == 0


@pytest.mark.slow
def test_a_short_soak() -> None:
    """The program of the guide for 15 seconds: what it counts as wrong is nothing. How memory grows takes it longer."""
    command = [sys.executable, "-m", "benchmarks.soak", "--minutes", "0.25", "--deltas", "10", "--loaded", "4"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=SOURCE)
    assert ended.returncode == 0 and "wrong: 0" in ended.stdout, ended.stdout + ended.stderr[-2000:]
    for action in ("complete", "close_early", "refused", "reload", "replace", "look"):
        assert re.search(rf"^{action}: [1-9]", ended.stdout, re.MULTILINE), ended.stdout


# -- the command and its config


def run(*arguments: object) -> None:
    with contextlib.suppress(SystemExit):  # of the inner command, which has printed what it was to print
        typer.main.get_command(app)(["serve", *map(str, arguments)], standalone_mode=False)


def test_every_field_is_an_option_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Each of them, given on the command line, arrives in the config; so does each in a file, in sections or flat."""
    samples: dict[str, Any] = {
        "kind": "base", "dtype": "float32", "log": "errors", "cors_origins": ["https://a.example"], "port": 1234,
        "max_replicas": 70, "replicas": 7, "keys": "keys.json", "ssl_certfile": "c.pem", "ssl_keyfile": "k.pem",
    }  # fmt: skip
    command = typer.main.get_command(serve_app())
    options = {option for parameter in command.params for option in parameter.opts}  # type: ignore[attr-defined]
    values: dict[str, Any] = {"model": "minilm"}
    arguments: list[str] = ["minilm"]
    for name, (section, field) in PLACES.items():
        if name in ("model", "manage"):  # the argument; and what excludes keys
            continue
        annotation = str(SECTIONS[section].model_fields[field].annotation)
        is_flag = re.search(r"\bbool\b", annotation) is not None
        default = SECTIONS[section].model_fields[field].default
        kinds = {"bool": not default, "int": 77, "float": 7.5}
        value = samples.get(
            name, next((one for kind, one in kinds.items() if re.search(rf"\b{kind}\b", annotation)), "text")
        )
        values[name] = value
        option = f"--{'no-' if value is False else ''}{name.replace('_', '-')}"
        assert f"--{name.replace('_', '-')}" in options
        arguments += [option] if is_flag else [option, ",".join(value) if isinstance(value, list) else str(value)]
    run(*arguments, "--print-config")
    printed = yaml.safe_load(capsys.readouterr().out)
    for name, value in values.items():
        section, field = PLACES[name]
        assert printed[section][field] == value, name
    assert ServeConfig.from_values(values) == ServeConfig.from_values(printed)
    dotted = {f"{PLACES[name][0]}.{PLACES[name][1]}": value for name, value in values.items()}
    assert ServeConfig.from_values(dotted) == ServeConfig.from_values(values) and set(dotted) <= set(DOTTED)


def test_later_sources_win_and_all_mistakes_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("model: minilm\nhttp:\n  port: 1\nlimits: {max_body: 2MiB}\n")
    run("--config", file, "--port", 2, "--set", "http.host=localhost", "--print-config")
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["http"]["port"] == 2 and printed["limits"]["max_body"] == 2 << 20
    assert printed["http"]["host"] == "localhost" and printed["model"]["name"] == "minilm"
    with pytest.raises(DeltuneError) as caught:
        ServeConfig.from_values(
            {"prot": 1, "http": {"host": 3}, "limits.max_inputs": 0, "ssl_keyfile": "k", "http.x": 1}
        )
    for words in (
        "Did you mean 'port'",
        "http.host",
        "limits.max_inputs",
        "model is missing",
        "unknown option 'x' in http",
    ):
        assert words in str(caught.value)
    for values, words in (
        ({"ssl_keyfile": "k"}, "ssl_certfile"),
        ({"manage": True, "keys": "k"}, "http.manage"),
        ({"replicas": 3, "max_replicas": 2}, "max_replicas"),
    ):
        with pytest.raises(DeltuneError, match=words):
            ServeConfig.from_values({"model": "m", **values})


def test_bytes_have_units() -> None:
    for text, size in (("64 MB", 64 * 10**6), ("2GiB", 2**31), ("1.5 k", 1500), ("10b", 10), ("7", 7)):
        assert ServeConfig.from_values({"model": "m", "max_loaded_bytes": text}).deltas.max_loaded_bytes == size
    with pytest.raises(DeltuneError, match=r"give a number of bytes, .* unit such as 8GiB \(given: '64 XB'\)"):
        ServeConfig.from_values({"model": "m", "max_loaded_bytes": "64 XB"})


def test_mistakes_end_before_anything_is_loaded(decoder: tuple[Path, Path], tmp_path: Path) -> None:
    model, deltas = decoder
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "deltune", "serve", str(model), "--port", str(port)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2 and f"port {port}" in ended.stderr and "Traceback" not in ended.stderr
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "spec.yaml").write_text("model: minilm\n")
    one = next(deltas.iterdir())
    (tmp_path / "serve.yaml").write_text(f"deltas:\n  folder: {deltas}\n")
    for source in (("--deltas", deltas), ("--set", f"deltas.folder={deltas}"), ("--config", tmp_path / "serve.yaml")):
        with pytest.raises(DeltuneError, match=r"are to be served: give their model in its place \(deltune serve "):
            run(one, *source)
    unnamed = tmp_path / "unnamed"  # an adapter that does not name its base
    unnamed.mkdir()
    (unnamed / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(DeltuneError, match="are to be served: give their model"):
        run(unnamed, "--deltas", deltas)
    (tmp_path / "model.yaml").write_text("model:\n  name: base-elsewhere\n")
    for source in (
        ("--model", "base-elsewhere"),
        ("--set", "model.name=base-elsewhere"),
        ("--config", tmp_path / "model.yaml"),
    ):
        with pytest.raises(DeltuneError, match=r"unknown model 'base-elsewhere'.*--model BASE"):
            run(one, *source, "--port", 0)
    with pytest.raises(DeltuneError, match="name too long"):
        run("x" * 300, "--port", 0)
    for arguments, words in (
        (("--deltas", tmp_path / "none"), "there is no folder"),
        (("--deltas", tmp_path / "begun"), "is not finished; its delta may change"),
        (("--deltas", deltas, "--keys", tmp_path / "keys.json"), "there is no file of keys"),
    ):
        with pytest.raises(DeltuneError, match=words):
            run(model, *arguments, "--port", 0)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl")
def test_wrong_files_end_before_anything_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of keys, a certificate or its key that is missing, damaged or another's: no model is read."""
    monkeypatch.setattr("deltune.serve.process.build_engine", lambda config: pytest.fail("the model was loaded"))
    for name in ("a", "b", "locked"):
        protection = ["-passout", "pass:x"] if name == "locked" else ["-nodes"]
        made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-days", "2", "-subj", "/CN=localhost", *protection]
        made += ["-keyout", str(tmp_path / f"{name}.key"), "-out", str(tmp_path / f"{name}.pem")]
        subprocess.run(made, check=True, capture_output=True, timeout=60)
    (tmp_path / "none.pem").write_text("nothing")
    (tmp_path / "map.json").write_text('{"tenants": {"acme": {}}}')
    certificate, key = tmp_path / "a.pem", tmp_path / "a.key"
    for options, words in (
        (
            ("--ssl-certfile", tmp_path / "missing.pem", "--ssl-keyfile", key),
            r"there is no file .*, which --ssl-certfile",
        ),
        (("--ssl-certfile", certificate, "--ssl-keyfile", tmp_path / "c.key"), r"there is no file .*--ssl-keyfile"),
        (("--ssl-certfile", tmp_path / "none.pem", "--ssl-keyfile", key), "cannot be used"),
        (("--ssl-certfile", certificate, "--ssl-keyfile", tmp_path / "b.key"), "cannot be used"),
        (("--ssl-certfile", tmp_path / "locked.pem", "--ssl-keyfile", tmp_path / "locked.key"), "has no passphrase"),
        (("--keys", tmp_path / "missing.json"), "there is no file of keys"),
        (("--keys", tmp_path / "none.pem"), "cannot be read as a file of keys"),
        (("--keys", tmp_path / "map.json"), "tenants: here a list is expected"),
    ):
        with pytest.raises(DeltuneError, match=words):
            run("minilm", *options, "--port", 0)


def test_without_keys_only_a_local_server_is_managed() -> None:
    for values, expected in (({}, True), ({"host": "0.0.0.0"}, None), ({"host": "0.0.0.0", "manage": True}, True)):
        config = ServeConfig.from_values({"model": "m", **values})
        assert (config.is_local if config.http.manage is None else config.http.manage) == bool(expected)
