"""The load generator: its arrivals are those of its plan, its numbers add up, and a real server bears it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy
import pytest
import typer

from deltune.cli.app import app
from deltune.errors import DeltuneError
from deltune.serving.api.auth import add_key
from deltune.serving.api.metrics import DeltaLoad
from deltune.serving.latencies import percentile
from deltune.serving.load_generator import LoadPlan, arrivals, measure, quantiles, read_prompts, render

from .served import METHODS, Served, served


def test_arrivals_are_a_poisson_process_over_zipf() -> None:
    """Gaps have the mean and the spread of an exponential distribution; models are as frequent as Zipf's law says."""
    plan = LoadPlan("http://x", models=("a", "b", "c", "d"), rate=50, duration=400, zipf=1.0)
    sent = arrivals(plan)
    times = [at for at, _, _ in sent]
    gaps = [b - a for a, b in pairwise(times)]
    assert abs(len(sent) - 20_000) < 4 * math.sqrt(20_000)
    assert mean(gaps) == pytest.approx(0.02, rel=0.05) and stdev(gaps) == pytest.approx(mean(gaps), rel=0.05)
    counts = Counter(model for _, model, _ in sent)
    whole = sum(1 / k for k in range(1, 5))
    for k, name in enumerate(plan.models, 1):
        assert counts[name] / len(sent) == pytest.approx(1 / k / whole, rel=0.05)
    assert arrivals(plan) == sent
    assert [at for at, _, _ in arrivals(LoadPlan("http://x", models=("a",), rate=50, duration=400, seed=1))] != times


def test_quantiles() -> None:
    assert quantiles([]) == {}
    assert quantiles(range(1, 101)) == {"p50": 50, "p90": 90, "p95": 95, "p99": 99, "max": 100}
    assert quantiles([3.0]) == dict.fromkeys(("p50", "p90", "p95", "p99", "max"), 3.0)


@pytest.mark.parametrize("percent", [0, 25, 50, 90, 95, 99, 100])
def test_a_percentile_is_the_least_value_that_a_share_does_not_exceed(percent: int) -> None:
    """On the page, in the metrics and of the load generator; numpy calls it the inverse of the distribution."""
    for number in range(1, 120):
        values = [float(value) for value in range(number)]
        expected = numpy.quantile(values, percent / 100, method="inverted_cdf")
        load = DeltaLoad()
        load.latencies.extend(reversed(values))
        assert percentile(values, percent / 100) == load.percentile(percent / 100) == expected, number


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"url": "host:1"}, "http://"),
        ({"task": "completion"}, "Did you mean 'completions'"),
        ({"rate": 0}, "rate"),
        ({"rate": math.nan}, "rate"),
        ({"zipf": -1}, "zipf"),
        ({"rate": 1e6, "duration": 1e6}, "more than"),
    ],
)
def test_a_wrong_plan(values: dict[str, object], words: str) -> None:
    with pytest.raises(DeltuneError, match=words):
        LoadPlan(**{"url": "http://x", **values})  # type: ignore[arg-type]


@pytest.mark.parametrize("task", ["completions", "chat", "embeddings"])
def test_a_real_server_is_measured(server: Served, task: str) -> None:
    plan = LoadPlan(f"{server.url}/v1", task=task, rate=15, duration=2, max_tokens=4, prompt_words=4)
    result = measure(plan, progress=False)
    facts = result.as_dict(every_request=True)
    assert result.failed == 0 and result.sent == len(facts["requests"]) > 10, result.first_error
    assert set(facts["models"]) <= set(METHODS), "deltas alone, where there are any"
    assert sum(one["sent"] for one in facts["models"].values()) == result.sent
    assert facts["latency"]["p50"] <= facts["latency"]["p99"] <= facts["latency"]["max"]
    assert facts["statuses"] == {"200": result.sent}
    if task != "embeddings":
        assert 0 < facts["tokens"] <= 4 * result.sent
        first = [(one["first"], one["latency"]) for one in facts["requests"] if one["first"] is not None]
        assert first and all(0 < begun <= ended for begun, ended in first)  # an answer may have no text
    page = render(result)
    assert "percent of requests" in page and all(name in page for name in facts["models"])
    assert "requests in" in str(result) and "p99" in str(result)


@contextlib.contextmanager
def http_server(answer: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Another server than ours."""
    running = ThreadingHTTPServer(("127.0.0.1", 0), answer)
    thread = threading.Thread(target=running.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{running.server_port}"
    finally:
        running.shutdown()
        thread.join()
        running.server_close()


class OneByOne(BaseHTTPRequestHandler):
    """A server that answers one request at a time, a tenth of a second each; every fifth fails."""

    lock, count = threading.Lock(), 0

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        with self.lock:
            type(self).count += 1
            failed = self.count % 5 == 0
            asyncio.run(asyncio.sleep(0.1))
        body = b'{"error": "no"}' if failed else json.dumps({"data": []}).encode()
        self.send_response(503 if failed else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


def test_a_slow_server_does_not_slow_the_load_down() -> None:
    """Twenty requests a second to a server that can do ten: they are sent in time, and the last ones wait for long."""
    with http_server(OneByOne) as url:
        result = measure(LoadPlan(url, task="classify", models=("a",), rate=20, duration=2), progress=False)
    assert result.sent > 25 and result.failed == result.sent // 5
    assert set(result.as_dict()["statuses"]) == {"200", "503"} and "503" in result.first_error
    assert max(one.lag for one in result.requests) < 1.0
    late = [one.latency for one in result.requests[-5:] if one.latency is not None]
    assert max(late) > 0.5 and result.seconds > 0.1 * result.sent - 0.1


class Dripping(BaseHTTPRequestHandler):
    """A server whose stream goes on for ever, a piece at a time."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()
        with contextlib.suppress(OSError):
            for _ in range(200):
                self.wfile.write(b'data: {"choices": [{"text": "a"}]}\n\n')
                self.wfile.flush()
                time.sleep(0.05)

    def log_message(self, *arguments: object) -> None:
        pass


def test_the_time_of_a_request_is_that_of_its_whole_answer() -> None:
    """An answer that never ends is none, though each of its pieces comes soon."""
    with http_server(Dripping) as url:
        result = measure(LoadPlan(url, models=("a",), rate=5, duration=1, timeout=0.5), progress=False)
    assert result.failed == result.sent > 0 and "longer than 0.5 seconds" in result.first_error


class Mixed(BaseHTTPRequestHandler):
    """A server with a classifier, a tagger and a model for embeddings alone."""

    tasks: Mapping[str, Sequence[str]] = {"mood": ["classify", "embed"], "names": ["tag", "embed"], "plain": ["embed"]}

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            data: list[Any] = [{"id": name, "parent": "base"} for name in self.tasks]
        else:
            data = [{"name": name, "tasks": tasks} for name, tasks in self.tasks.items()]
        self.answer({"data": data})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.answer({})

    def answer(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


def test_only_deltas_that_have_the_task_are_asked() -> None:
    with http_server(Mixed) as url:
        for task, names in (("classify", {"mood"}), ("embeddings", {"mood", "names", "plain"})):
            result = measure(LoadPlan(url, task=task, rate=50, duration=1), progress=False)
            assert set(result.by_model()) == names and not result.failed
        with pytest.raises(DeltuneError, match=r"none of the 3 deltas of .* has the task generate"):
            measure(LoadPlan(url, task="chat", rate=50, duration=1), progress=False)


def test_the_command_writes_numbers_and_a_page(
    server: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.txt").write_text("the old hammer\n\na small otter\n")
    numbers, page = tmp_path / "out" / "load.json", tmp_path / "out" / "load.html"
    arguments = ["bench-serve", server.url, "--models", "mood", "--models", "intent", "--rate", 8, "--duration", 2]
    arguments += [
        "--max-tokens",
        2,
        "--prompts",
        tmp_path / "prompts.txt",
        "--output",
        numbers,
        "--picture",
        page,
        "--quiet",
        "--json",
    ]
    typer.main.get_command(app)([*map(str, arguments)], standalone_mode=False)
    printed = json.loads(capsys.readouterr().out)
    written = json.loads(numbers.read_text())
    assert printed == {name: value for name, value in written.items() if name != "requests"}
    assert written["sent"] == len(written["requests"]) and "<svg" in page.read_text()
    with pytest.raises(DeltuneError, match=r"all \d+ requests failed"):
        arguments[3] = arguments[5] = "nobody"
        typer.main.get_command(app)([*map(str, arguments)], standalone_mode=False)


def test_a_server_with_keys_asks_for_one(decoder: tuple[Path, Path], tmp_path: Path) -> None:
    model, deltas = decoder
    key = add_key(tmp_path / "keys.json", "acme", {})
    with served(model=str(model), deltas=str(deltas), keys=str(tmp_path / "keys.json"), log="off") as running:
        plan = LoadPlan(running.url, task="completions", rate=20, duration=0.5)
        for wrong in (None, "sk-wrong"):
            with pytest.raises(DeltuneError, match=r"answers 401: put an API key that it knows into .* OPENAI_API_KEY"):
                measure(plan, wrong, progress=False)
        assert not measure(plan, key, progress=False).failed


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DeltuneError, match="name them with --models"):
        measure(LoadPlan("http://127.0.0.1:9", rate=5, duration=1), progress=False)
    (tmp_path / "empty.txt").write_text("\n\n")
    for name in ("none.txt", "empty.txt"):
        with pytest.raises(DeltuneError, match=name):
            read_prompts(tmp_path / name)
