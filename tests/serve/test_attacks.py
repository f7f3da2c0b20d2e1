"""Clients and operators that do their worst, for a bounded time: every other answer is what its row gets alone."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
import torch

import deltune
from deltune.files import atomic_folder
from deltune.models import align_padding_token, load_model, load_tokenizer

from .served import METHODS, Served, ServeProcess, save_delta, served, wait_until

PROMPTS = ([2, 30, 21, 12], [2, 4], [2, 30, 21, 5, 4, 30, 21])
"""Token ids, to which no tokenizer adds any."""
TOKENS = 6


def alone(model: Path, delta: Path | None) -> list[str]:
    """What `generate` of transformers answers to each prompt by itself, with one delta and nothing else."""
    tokenizer, bare = load_tokenizer(str(model)), load_model(str(model), "causal-lm")
    align_padding_token(bare, tokenizer)
    if delta is not None:
        deltune.load(bare, delta)
    texts = []
    for prompt in PROMPTS:
        ids, model_with_delta = torch.tensor([prompt]), cast(Any, bare.eval())
        made = model_with_delta.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False
        )
        texts.append(tokenizer.decode(made[0, len(prompt) :], skip_special_tokens=True).strip())
    return texts


@pytest.fixture(scope="module")
def expected(decoder: tuple[Path, Path]) -> dict[str, list[str]]:
    model, folder = decoder
    return {"base": alone(model, None)} | {name: alone(model, folder / name) for name in METHODS}


@pytest.fixture
def attacked(decoder: tuple[Path, Path]) -> Iterator[Served]:
    with served(
        decoder, watch=0, served_name="base", log="off", header_timeout=3, body_timeout=3,
        send_timeout=3,
    ) as running:  # fmt: skip
        yield running


def body_of(name: str, number: int, **more: Any) -> dict[str, Any]:
    return {"model": name, "prompt": PROMPTS[number], "max_tokens": TOKENS, "temperature": 0, **more}


def check_answers(server: Served, expected: dict[str, list[str]], until: Callable[[], bool]) -> int:
    """Ask for everything, whole and as streams, until something has happened; return how many answers were compared."""
    compared = 0
    while not until() or not compared:
        for name, texts in expected.items():
            for number, text in enumerate(texts):
                stream = (compared + number) % 3 == 0
                answer = server.post("/v1/completions", body_of(name, number, stream=stream))
                assert answer.status_code == 200, (name, answer.text)
                answer_text = streamed(answer.text)[0] if stream else answer.json()["choices"][0]["text"]
                assert answer_text.strip() == text, (name, number, stream)
                compared += 1
    return compared


def streamed(text: str) -> tuple[str, bool]:
    """The text of a stream, and whether it has its end."""
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    parts = [json.loads(event) for event in events if event != "[DONE]"]
    return "".join(part["choices"][0]["text"] for part in parts if part.get("choices")), events[-1:] == ["[DONE]"]


def connect(server: Served, **options: int) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.socket()
    if "receive" in options:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, options["receive"])
    connection.settimeout(20)
    connection.connect((host, int(port)))
    return connection


def request_bytes(body: dict[str, Any]) -> tuple[bytes, bytes]:
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n"
    return f"{head}Content-Type: application/json\r\n\r\n".encode(), data


def slow_head(server: Served, stop: threading.Event) -> None:
    head, _ = request_bytes(body_of("mood", 0))
    with connect(server) as connection:
        for byte in head:
            connection.sendall(bytes([byte]))
            if stop.wait(1):
                return


def slow_body(server: Served, stop: threading.Event) -> None:
    head, data = request_bytes(body_of("mood", 0))
    with connect(server) as connection:
        connection.sendall(head)
        for byte in data:
            connection.sendall(bytes([byte]))
            if stop.wait(1):
                return


def slow_reader(server: Served, stop: threading.Event) -> None:
    head, data = request_bytes({**body_of("mood", 0, stream=True), "prompt": ["the old"] * 4, "max_tokens": 40})
    with connect(server, receive=2048) as connection:
        connection.sendall(head + data)
        while connection.recv(1) and not stop.wait(1):
            pass


def no_reader(server: Served, stop: threading.Event) -> None:
    head, data = request_bytes(
        {**body_of("intent", 1, stream=True, logprobs=5), "prompt": ["the"] * 4, "max_tokens": 40}
    )
    with connect(server, receive=2048) as connection:
        connection.sendall(head + data)
        stop.wait(60)


SLOW = (slow_head, slow_body, slow_reader, no_reader)


@pytest.mark.slow
def test_slow_clients_change_no_answer_and_lose_their_places(attacked: Served, expected: dict[str, list[str]]) -> None:
    """A byte a second of a head, of a body or of a stream, or no byte at all, thirty-two connections of them."""
    stop, began = threading.Event(), time.monotonic()

    def attack(client: Callable[[Served, threading.Event], None]) -> None:
        with contextlib.suppress(OSError):
            client(attacked, stop)

    with ThreadPoolExecutor(33) as pool:
        attackers = [pool.submit(attack, client) for client in SLOW * 8]
        try:
            compared = check_answers(attacked, expected, lambda: time.monotonic() - began > 10)
            wait_until(lambda: all(attacker.done() for attacker in attackers[::4] + attackers[1::4]), 30)
            wait_until(lambda: attacked.get("/stats").json()["running"] == 0, 60)
        finally:
            stop.set()
        assert [attacker.result(30) for attacker in attackers] == [None] * 32
    assert compared >= len(METHODS)
    assert check_answers(attacked, expected, lambda: True)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_a_flood_of_clients_that_go_at_any_point(attacked: Served, expected: dict[str, list[str]], seed: int) -> None:
    """Four hundred connections end within the head, the body, before the answer, within the answer or a stream."""

    def attack(number: int) -> None:
        chance = random.Random(seed * 10_000 + number)
        name, stream = chance.choice(list(METHODS)), chance.random() < 0.5
        head, data = request_bytes({**body_of(name, 0, stream=stream), "prompt": ["the old"] * chance.randint(1, 4)})
        whole = head + data
        cut = chance.choice([chance.randrange(len(whole)), len(whole)])
        with contextlib.suppress(OSError), connect(attacked) as connection:
            connection.sendall(whole[:cut])
            if chance.random() < 0.5:
                time.sleep(chance.random() * 0.1)
            if cut == len(whole) and chance.random() < 0.7:
                connection.recv(chance.randint(1, 400))
            if chance.random() < 0.5:  # a reset in place of an orderly end
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")

    with ThreadPoolExecutor(40) as pool:
        attackers = [pool.submit(attack, number) for number in range(400)]
        compared = check_answers(attacked, expected, lambda: all(attacker.done() for attacker in attackers))
        assert [attacker.result() for attacker in attackers] == [None] * 400
    wait_until(lambda: attacked.get("/stats").json()["running"] == 0)
    assert compared and check_answers(attacked, expected, lambda: True)
    assert "500" not in attacked.get("/metrics").text.partition("requests_total")[2].partition("\n# ")[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
@pytest.mark.parametrize("drain", [30.0, 0.0])
def test_a_signal_while_streams_run(
    decoder: tuple[Path, Path], expected: dict[str, list[str]], name: str, drain: float
) -> None:
    """A stream ends with its whole text, or with an error that says why; the process ends with 0."""
    model, folder = decoder
    with ServeProcess(model, "--deltas", folder, "--drain", drain or 0.01) as running:
        texts: list[tuple[str, int, str]] = []
        ready = threading.Barrier(9)

        def stream(number: int) -> None:
            delta = list(METHODS)[number % len(METHODS)]
            body, parts = body_of(delta, number % 3, stream=True), []
            ready.wait(60)
            with contextlib.suppress(httpx.ConnectError, httpx.ReadError):
                for _ in range(30):
                    parts = []
                    with httpx.stream(
                        "POST", f"{running.url}/v1/completions", json=body, timeout=60, trust_env=False
                    ) as answer:
                        for part in answer.iter_text():
                            parts.append(part)
                    texts.append((delta, number % 3, "".join(parts)))

        threads = [threading.Thread(target=stream, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        ready.wait(60)
        wait_until(lambda: texts)
        running.process.send_signal(getattr(signal, name))
        assert running.process.wait(90) == 0
        for thread in threads:
            thread.join(60)
    for delta, number, text in texts:
        answer_text, ended = streamed(text)
        if ended:
            assert answer_text.strip() == expected[delta][number]
        else:
            assert '"status": 503' in text or '"status":503' in text or "shutting_down" in text, text
    assert "Traceback" not in "".join(running.lines)


# -- folders that are replaced


def other_versions(model: Path, home: Path, peft: bool) -> list[Path]:
    """Two deltas of one method, as our own folders or as those of PEFT."""
    folders = []
    for number in range(2):
        bare = load_model(str(model), "causal-lm")
        align_padding_token(bare, load_tokenizer(str(model)))
        folder = home / f"version{number}"
        save_delta(bare, folder, "lora(rank=2, at=('ffn_up', 'ffn_down'))", 50 + number, scale=1.0)
        if peft:
            deltune.load(bare, folder)
            deltune.export(bare, home / f"peft{number}")
            config = home / f"peft{number}" / "adapter_config.json"
            options = json.loads(config.read_text())
            config.write_text(json.dumps({**options, "lora_alpha": options["lora_alpha"] * (1 + 2 * number)}))
            folder = home / f"peft{number}"
        folders.append(folder)
    return folders


def by_rename(source: Path, target: Path) -> None:
    with atomic_folder(target) as fresh:
        shutil.copytree(source, fresh, dirs_exist_ok=True)


def file_by_file(source: Path, target: Path) -> None:
    files = sorted(source.iterdir())
    for file in files if random.random() < 0.5 else files[::-1]:
        shutil.copyfile(file, target / file.name)
        time.sleep(random.random() * 0.2)


@pytest.mark.slow
@pytest.mark.parametrize("peft", [False, True], ids=["deltune", "peft"])
@pytest.mark.parametrize("replace", [by_rename, file_by_file])
def test_a_folder_that_is_replaced_is_the_old_or_the_new_delta(
    decoder: tuple[Path, Path], tmp_path: Path, replace: Callable[[Path, Path], None], peft: bool
) -> None:
    """While it is loaded again and again, and asked for; in between it may be refused, with the reason."""
    random.seed(7)
    model, _ = decoder
    versions = other_versions(model, tmp_path, peft)
    answers = [alone(model, version) for version in versions]
    assert answers[0] != answers[1]
    root = tmp_path / "deltas"
    shutil.copytree(versions[0], root / "busy")
    save_delta_beside(model, root / "quiet")
    quiet = alone(model, root / "quiet")
    stop, states = threading.Event(), list[int]()
    with served(model=str(model), deltas=str(root), watch=0.1, served_name="base", max_loaded=1) as server:

        def ask(name: str, allowed: list[list[str]]) -> int:
            number_of_answers = 0
            while not stop.is_set():
                for number in range(len(PROMPTS)):
                    answer = server.post("/v1/completions", body_of(name, number))
                    states.append(answer.status_code)
                    if answer.status_code == 200:
                        text = answer.json()["choices"][0]["text"].strip()
                        assert text in [texts[number] for texts in allowed], (name, number, text)
                        number_of_answers += 1
                    else:
                        assert answer.status_code < 500 or answer.status_code == 503, answer.text
                        assert name == "busy" and answer.json()["error"]["message"], answer.text
            return number_of_answers

        with ThreadPoolExecutor(5) as pool:
            clients = [pool.submit(ask, "busy", answers) for _ in range(2)]
            clients += [pool.submit(ask, "quiet", [quiet]) for _ in range(2)]
            try:
                for turn in range(1, 9):
                    replace(versions[turn % 2], root / "busy")
                    if turn % 3 == 0:
                        server.post("/v1/deltas/refresh", {})
                    time.sleep(0.3)
            finally:
                stop.set()
            assert all(client.result(60) for client in clients)
        wait_until(lambda: server.post("/v1/completions", body_of("busy", 0)).status_code == 200)
        time.sleep(1)
        for number, text in enumerate(answers[0]):
            answer = server.post("/v1/completions", body_of("busy", number))
            assert answer.json()["choices"][0]["text"].strip() == text


def save_delta_beside(model: Path, folder: Path) -> None:
    bare = load_model(str(model), "causal-lm")
    align_padding_token(bare, load_tokenizer(str(model)))
    save_delta(bare, folder, "ia3", 99)
