"""A server under mixed load for a while: does its memory grow, is any answer wrong or missing?

    python -m benchmarks.soak [--minutes 20] [--clients 8]

`deltune serve` runs as a process of its own with a small language model of random weights and more deltas than it may
keep in memory. Clients ask for completions, close streams early, send wrong requests, unload and load deltas, put a new
version in a delta's folder, and read the metrics. Every completion must be what the same delta said first; every wrong
request must be refused. The resident memory is read once a second; after the first third, in which caches fill, a line
through it says how much it grows in an hour. Exit code 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import torch
from scipy import stats
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import deltune
from deltune.models import packaged_minilm

METHODS = ("lora(rank=8)", "lora(rank=16)", "layernorm", "prefix(length=16)", "prompt(length=8)", "ia3", "bitfit",
           "adapter(rank=16)", "prefix(length=8) + layernorm", "apet(lora, parameters=500)")  # fmt: skip
PROMPTS = ("the film was", "a letter to the bank about", "once upon a time", "in the beginning of the story there is")
NEW_TOKENS = 16
WRONG = (
    {"model": "nobody", "prompt": "a"}, {"model": "base"}, {"prompt": 5}, {"model": "base", "prompt": "a", "n": -1},
    {"model": "base", "prompt": "a", "temperature": "hot"}, {"model": "base", "prompt": "a", "max_tokens": 10**9},
)  # fmt: skip
ADDRESS = re.compile(r"serving .* at (http://\S+?);?\s")


@dataclass
class Outcome:
    """What the clients saw: how often each thing happened, what went wrong, and the server's memory in MiB."""

    happened: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    memory: list[tuple[float, float]] = field(default_factory=list)
    first: dict[tuple[str, str], str] = field(default_factory=dict)


def prepared(root: Path, deltas: int) -> tuple[Path, Path]:
    """A language model of random weights whose answers are clear, and a folder of its deltas."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(packaged_minilm())
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
        max_position_embeddings=256, attention_bias=True, pad_token_id=tokenizer.pad_token_id,
        eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(30.0)  # far from ties, which rounding decides
    model.save_pretrained(root / "model")
    tokenizer.save_pretrained(root / "model")
    for n in range(deltas):
        tuned = deltune.attach(model, METHODS[n % len(METHODS)], name="made")
        with torch.no_grad():
            for parameter in tuned.trainable_parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        tuned.save(root / "deltas" / f"d{n}")
        tuned.detach()
    return root / "model", root / "deltas"


class Client:
    """One of several that send requests at the same time; each owns the deltas that it replaces."""

    def __init__(self, number: int, http: httpx.AsyncClient, folder: Path, outcome: Outcome) -> None:
        self.chance, self.http, self.folder, self.outcome = random.Random(number), http, folder, outcome
        self.names = sorted(path.name for path in folder.iterdir())  # before any client has put one of its own there
        self.number, self.own = number, f"own{number}"

    async def run(self, until: float) -> None:
        """Send requests until a time; the first ones of all clients are of every kind, however short it is."""
        actions: dict[Callable[[], Awaitable[None]], int] = {
            self.complete: 60, self.close_early: 10, self.refused: 10, self.reload: 8, self.replace: 2, self.look: 2,
        }  # fmt: skip
        action = list(actions)[self.number % len(actions)]
        while time.monotonic() < until:
            try:
                await action()
            except httpx.HTTPError as error:
                self.outcome.wrong.append(f"{action.__name__}: {type(error).__name__}: {error}")
            self.outcome.happened[action.__name__] += 1
            (action,) = self.chance.choices(list(actions), list(actions.values()))

    def some_model(self) -> str:
        """A delta by Zipf's law, or the base model."""
        names = ["base", *self.names]
        return self.chance.choices(names, [1 / (rank + 1) for rank in range(len(names))])[0]

    def request(self, model: str, prompt: str, stream: bool = False) -> dict[str, object]:
        return {"model": model, "prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "stream": stream}

    async def complete(self) -> None:
        """Ask for a completion, which must be what it was before."""
        model, prompt = self.some_model(), self.chance.choice(PROMPTS)
        answer = await self.http.post("/v1/completions", json=self.request(model, prompt))
        if answer.status_code == 404 and model != "base":
            self.outcome.happened["unloaded meanwhile"] += 1  # another client has taken it out
            return
        if answer.status_code != 200:
            self.outcome.wrong.append(f"{model}: {answer.status_code} {answer.text[:200]}")
            return
        text = answer.json()["choices"][0]["text"]
        before = self.outcome.first.setdefault((model, prompt), text)
        if text != before:
            self.outcome.wrong.append(f"{model}, {prompt!r}: {text!r}, and {before!r} before")

    async def close_early(self) -> None:
        """Read a few lines of a stream and leave."""
        request = self.request(self.some_model(), self.chance.choice(PROMPTS), stream=True)
        async with self.http.stream("POST", "/v1/completions", json=request) as answer:
            if answer.status_code not in (200, 404):
                self.outcome.wrong.append(f"stream: {answer.status_code}")
            lines = answer.aiter_lines()
            for _ in range(4):
                await anext(lines, None)

    async def refused(self) -> None:
        """Send what is no request."""
        answer = await self.http.post("/v1/completions", json=self.chance.choice(WRONG))
        if not 400 <= answer.status_code < 500:
            self.outcome.wrong.append(f"a wrong request: {answer.status_code}")

    async def reload(self) -> None:
        """Take a delta out and put it back."""
        name = self.chance.choice(self.names)
        for what in ("unload", "load"):
            body = {"lora_name": name, **({"lora_path": name} if what == "load" else {})}
            answer = await self.http.post(f"/v1/{what}_lora_adapter", json=body)
            if answer.status_code >= 500:
                self.outcome.wrong.append(f"{what} {name}: {answer.status_code} {answer.text[:200]}")

    async def replace(self) -> None:
        """Put another delta's files in the place of one's own, as a new version."""
        target, fresh = self.folder / self.own, self.folder.parent / f"{self.own}.fresh"
        shutil.copytree(self.folder / self.chance.choice(self.names), fresh)
        if target.exists():
            target.rename(old := self.folder.parent / f"{self.own}.old")
            fresh.rename(target)
            shutil.rmtree(old)
        else:
            fresh.rename(target)
        answer = await self.http.post("/v1/load_lora_adapter", json={"lora_name": self.own, "lora_path": self.own})
        if answer.status_code >= 500:
            self.outcome.wrong.append(f"replace: {answer.status_code} {answer.text[:200]}")

    async def look(self) -> None:
        """Read what a monitor reads."""
        for path in ("/metrics", "/v1/models", "/health", "/"):
            answer = await self.http.get(path)
            if answer.status_code != 200:
                self.outcome.wrong.append(f"{path}: {answer.status_code}")


async def watched(process: subprocess.Popen[str], outcome: Outcome, began: float, until: float) -> None:
    """Read the server's resident memory once a second."""
    path, page = Path(f"/proc/{process.pid}/statm"), os.sysconf("SC_PAGE_SIZE")
    while time.monotonic() < until and process.poll() is None:
        outcome.memory.append((time.monotonic() - began, int(path.read_text().split()[1]) * page / 2**20))
        await asyncio.sleep(1.0)
    if process.poll() is not None:
        outcome.wrong.append(f"the server ended with {process.returncode}")


async def soaked(url: str, process: subprocess.Popen[str], folder: Path, minutes: float, clients: int) -> Outcome:
    """Let clients send requests for so many minutes."""
    outcome, began = Outcome(), time.monotonic()
    until = began + 60 * minutes
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        some = [Client(n, http, folder, outcome).run(until) for n in range(clients)]
        await asyncio.gather(watched(process, outcome, began, until), *some)
    return outcome


def growth(memory: list[tuple[float, float]]) -> tuple[float, float, float]:
    """MiB an hour after the first third, with the 95 % interval of Theil and Sen's slope."""
    kept = memory[len(memory) // 3 :: 5]
    slope, _, low, high = stats.theilslopes([m for _, m in kept], [t / 3600 for t, _ in kept], 0.95)
    return slope, low, high


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--deltas", type=int, default=100)
    parser.add_argument("--loaded", type=int, default=16)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        model, deltas = prepared(Path(root), arguments.deltas)
        command = [sys.executable, "-m", "deltune", "serve", str(model), "--served-name", "base", "--port", "0"]
        command += ["--deltas", str(deltas), "--max-loaded", str(arguments.loaded)]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        try:
            address = next((match for line in process.stderr if (match := ADDRESS.match(line))), None)
            if address is None:
                raise SystemExit(f"the server did not start: it ended with {process.wait()}")
            threading.Thread(target=process.stderr.read, daemon=True).start()  # else its pipe fills
            outcome = asyncio.run(soaked(address[1], process, deltas, arguments.minutes, arguments.clients))
        finally:
            process.terminate()
            process.wait(60)
    for name, times in outcome.happened.most_common():
        print(f"{name}: {times:,}")
    megabytes = [m for _, m in outcome.memory]
    third = statistics.median(megabytes[len(megabytes) // 3 :][:60])
    slope, low, high = growth(outcome.memory)
    print(f"memory: {third:.0f} MiB after a third, {statistics.median(megabytes[-60:]):.0f} MiB at the end; "
          f"{slope:+.1f} [{low:+.1f}, {high:+.1f}] MiB an hour")  # fmt: skip
    print(f"wrong: {len(outcome.wrong)}", *outcome.wrong[:20], sep="\n  ")
    sys.exit(bool(outcome.wrong))


if __name__ == "__main__":
    main()
