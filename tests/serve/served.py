"""Real servers for tests: a tiny language model with deltas of many methods, in this process or in one of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import deltune
import tiny
from deltune.models import Pooling, align_padding_token, load_model, load_tokenizer
from deltune.serve.api.app import create_app
from deltune.serve.config import ServeConfig
from deltune.serve.process import DrainingServer, bind, build_engine, uvicorn_config

METHODS = {
    "mood": "lora(rank=4)",
    "intent": "prefix(length=3) + layernorm",
    "acme-reviews": "adapter(rank=4)",
    "acme-tone": "ia3",
    "zeta-news": "prompt(length=2)",
}
"""The deltas of the tests, by name."""
TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"
SOURCE = Path(__file__).resolve().parents[2]


def language_model(folder: Path, template: str | None = TEMPLATE) -> Path:
    """A decoder of random weights with its tokenizer, which may have a chat template."""
    tiny.model(folder, "gpt2")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    if template is not None:
        tokenizer = load_tokenizer(str(folder))
        tokenizer.chat_template = template
        tokenizer.save_pretrained(folder)
    return folder


def save_delta(
    model: Any, folder: Path, method: str, seed: int, scale: float = 0.3, pooling: Pooling = "model"
) -> None:
    """Save a delta that changes what the model says."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tuned = deltune.attach(model, method, name="made", pooling=pooling)
        with torch.no_grad():
            for parameter in tuned.trainable_parameters():
                parameter.add_(scale * torch.randn_like(parameter))
        tuned.save(folder)
        tuned.detach()


def decoder_with_deltas(root: Path) -> tuple[Path, Path]:
    """The folder of a language model, and a folder with its deltas."""
    source = language_model(root / "model")
    model = load_model(str(source), "causal-lm")
    align_padding_token(model, load_tokenizer(str(source)))
    for seed, (name, method) in enumerate(METHODS.items()):
        save_delta(model, root / "deltas" / name, method, seed)
    return source, root / "deltas"


@dataclass
class Served:
    """A server that runs.

    Attributes:
        url: Its address.
        engine: Its engine, if it runs in this process.
        service: Its parts, if it runs in this process.
        thread: The number of the thread of its HTTP layer, if it runs in this process.
    """

    url: str
    engine: Any = None
    service: Any = None
    thread: int | None = None

    def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=60, trust_env=False, **more)

    def get(self, path: str, **more: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60, trust_env=False, **more)

    def delete(self, path: str, **more: Any) -> httpx.Response:
        return httpx.delete(self.url + path, timeout=60, trust_env=False, **more)


@contextmanager
def served(decoder: tuple[Path, Path] | None = None, **values: Any) -> Iterator[Served]:
    """Serve in this process, on a thread, as `deltune serve` does; a decoder stands for its model and its deltas."""
    folders = {} if decoder is None else {"model": str(decoder[0]), "deltas": str(decoder[1])}
    config = ServeConfig.from_values({"port": 0, "watch": 0, "log": "off", **folders, **values})
    listener = bind(config.http.host, config.http.port)
    engine = build_engine(config)
    try:
        app = create_app(engine, config)
        server = DrainingServer(app.state.service, uvicorn_config(app, config))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        wait_until(lambda: server.started)
        try:
            yield Served(f"http://127.0.0.1:{listener.getsockname()[1]}", engine, app.state.service, thread.ident)
        finally:
            server.handle_exit(signal.SIGTERM, None)
            thread.join(60)
            assert not thread.is_alive()
    finally:
        engine.close(5.0)
        listener.close()


def wait_until(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Wait for something to become true, and return it."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)
    return value


class ServeProcess:
    """`deltune serve` as a process of its own. Use as a context.

    Args:
        arguments: Those of the command.
    """

    def __init__(self, *arguments: object) -> None:
        self.command = [sys.executable, "-m", "deltune", "serve", *map(str, arguments), "--port", "0"]
        self.lines: list[str] = []

    def __enter__(self) -> ServeProcess:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self.process = subprocess.Popen(self.command, stderr=subprocess.PIPE, text=True, env=environment)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        greeting = wait_until(lambda: self.process.poll() is not None or self._greeting(), 120)
        assert not isinstance(greeting, bool), "".join(self.lines)
        self.url = greeting[1]
        return self

    def __exit__(self, *args: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(30)
        self._reader.join(10)
        assert self.process.stderr is not None
        self.process.stderr.close()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)

    def _greeting(self) -> re.Match[str] | None:
        return next((m for line in list(self.lines) if (m := re.match(r"serving .* at (http://\S+?);?\s", line))), None)

    @property
    def server(self) -> Served:
        return Served(self.url)
