"""Load on a server: requests at random times over models of unequal frequency, and how long the answers take.

Arrivals are a Poisson process that does not wait for answers (an open loop). A latency counts from the time at which a
request was to be sent, so that neither a slow server nor a late generator hides its queue.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

from ..errors import DeltuneError, error_from_problems, excerpt, unknown_name
from ..filesystem import user_path
from ..pages.charts import Line, line_chart
from ..pages.rendering import render as render_page
from .latencies import percentile

TASKS = {"completions": "generate", "chat": "generate", "classify": "classify", "embeddings": "embed"}
"""The kinds of requests, and the task of a delta that each needs."""
SHARES = (0.5, 0.9, 0.95, 0.99)
WORDS = (
    "the", "a", "my", "old", "small", "very", "and", "is", "was", "near", "here", "table", "apple", "pear", "hammer",
    "saw", "otter", "heron", "late", "early", "order", "parcel", "refund", "login", "screen", "water", "river",
    "winter", "music", "teacher", "window", "garden", "morning", "letter", "answer", "question",
)  # fmt: skip
MAX_PROMPTS = 100_000
MAX_REQUESTS = 1_000_000
MAX_LISTED = 50
"""Models that the page and the table list; the others are one line."""


@dataclass(frozen=True)
class LoadPlan:
    """What is sent.

    Attributes:
        url: The address of the server, with or without /v1.
        task: One of `TASKS`.
        models: The models, the most frequent first; empty for those that /v1/models lists.
        rate: Requests a second, on average.
        duration: Seconds in which requests are sent.
        zipf: The exponent of Zipf's law: the k-th model is asked in proportion to k^-zipf.
        prompts: Texts to choose from; empty for sentences of random words.
        prompt_words: The words of such a sentence.
        max_tokens: The tokens of a generated answer.
        timeout: Seconds for the whole answer to a request, after which it has failed.
        seed: Seed of arrivals, models and prompts.

    Raises:
        DeltuneError: A value is wrong.
    """

    url: str
    task: str = "completions"
    models: tuple[str, ...] = ()
    rate: float = 10.0
    duration: float = 30.0
    zipf: float = 1.0
    prompts: tuple[str, ...] = ()
    prompt_words: int = 16
    max_tokens: int = 32
    timeout: float = 60.0
    seed: int = 0

    def __post_init__(self) -> None:
        problems = []
        if self.task not in TASKS:
            problems.append(unknown_name("task", self.task, TASKS))
        if not self.url.startswith(("http://", "https://")):
            problems.append(f"the address {excerpt(self.url)} does not begin with http:// or https://")
        for name in ("rate", "duration", "timeout"):
            if not 0 < getattr(self, name) < math.inf:
                problems.append(f"{name} is {getattr(self, name)}; give a number above 0")
        if not 0 <= self.zipf < math.inf:
            problems.append(f"zipf is {self.zipf}; give 0 or more")
        if not problems and self.rate * self.duration > MAX_REQUESTS:
            problems.append(f"{self.rate * self.duration:,.0f} requests are more than {MAX_REQUESTS:,}")
        if problems:
            raise error_from_problems("the load cannot be made", problems)

    @property
    def base(self) -> str:
        """The address without /v1."""
        return self.url.rstrip("/").removesuffix("/v1")


@dataclass
class SentRequest:
    """A request with its outcome.

    Attributes:
        at: When it was due, in seconds from the start.
        model: The model.
        lag: Seconds by which it was sent late.
        latency: Seconds to the end of the answer; None if it failed.
        first: Seconds to the first part of a stream; None without one.
        tokens: Tokens of the answer.
        status: The status of the answer; 0 if there was none.
        error: Why it failed; "" if it did not.
    """

    at: float
    model: str
    lag: float = 0.0
    latency: float | None = None
    first: float | None = None
    tokens: int = 0
    status: int = 0
    error: str = ""


@dataclass(frozen=True)
class LoadResult:
    """The result of a load test.

    Attributes:
        plan: What was sent.
        requests: Every request.
        seconds: From the first request to the last answer.
    """

    plan: LoadPlan
    requests: Sequence[SentRequest] = field(repr=False)
    seconds: float

    @property
    def sent(self) -> int:
        """How many requests were sent."""
        return len(self.requests)

    @property
    def failed(self) -> int:
        """How many of them failed."""
        return sum(bool(one.error) for one in self.requests)

    @property
    def first_error(self) -> str:
        """What the first failure said; "" without one."""
        return next((one.error for one in self.requests if one.error), "")

    def summary(self, requests: Sequence[SentRequest]) -> dict[str, Any]:
        """Return counts and percentiles of some of the requests, in seconds."""
        answered = [one for one in requests if one.latency is not None]
        per_token = [
            (one.latency - one.first) / (one.tokens - 1)
            for one in answered
            if one.latency is not None and one.first is not None and one.tokens > 1
        ]
        return {
            "sent": len(requests),
            "failed": len(requests) - len(answered),
            "latency": quantiles([one.latency for one in answered if one.latency is not None]),
            "first_token": quantiles([one.first for one in answered if one.first is not None]),
            "per_token": quantiles(per_token),
            "tokens": sum(one.tokens for one in answered),
        }

    def by_model(self) -> dict[str, dict[str, Any]]:
        """Return the summary of each model, the most frequent first."""
        groups: dict[str, list[SentRequest]] = {}
        for one in self.requests:
            groups.setdefault(one.model, []).append(one)
        return {name: self.summary(group) for name, group in sorted(groups.items(), key=lambda item: -len(item[1]))}

    def as_dict(self, every_request: bool = False) -> dict[str, Any]:
        """Return the result as JSON values.

        Args:
            every_request: Whether every request is listed.
        """
        whole = self.summary(self.requests)
        plan = {name: value for name, value in asdict(self.plan).items() if name != "prompts"}
        facts = {
            "plan": {**plan, "prompts": len(self.plan.prompts)},
            "seconds": self.seconds,
            "offered_per_second": self.sent / self.plan.duration,
            "answered_per_second": (self.sent - self.failed) / self.seconds if self.seconds else 0.0,
            "tokens_per_second": whole["tokens"] / self.seconds if self.seconds else 0.0,
            **whole,
            "statuses": dict(Counter(str(one.status) for one in self.requests)),
            "generator_lag": quantiles([one.lag for one in self.requests]),
            "models": self.by_model(),
        }
        return {**facts, "requests": [asdict(one) for one in self.requests]} if every_request else facts

    def __str__(self) -> str:
        facts = self.as_dict()
        lines = [
            f"{self.sent:,} requests in {self.seconds:.1f} s to {len(facts['models']):,} models: "
            f"{facts['offered_per_second']:.1f} a second were sent, {facts['answered_per_second']:.1f} answered, "
            f"{self.failed:,} failed",
        ]
        if self.failed:
            lines.append(f"the first failure: {self.first_error}")
        lines.append(f"{'milliseconds':24s}" + "".join(f"{name:>10s}" for name in (*_labels(), "max")))
        for name, label in (
            ("latency", "whole answer"),
            ("first_token", "first token"),
            ("per_token", "a further token"),
        ):
            if facts[name]:
                lines.append(f"{label:24s}" + "".join(f"{1000 * value:10.1f}" for value in facts[name].values()))
        if facts["tokens"]:
            lines.append(f"{facts['tokens_per_second']:.1f} generated tokens a second")
        lag = facts["generator_lag"]
        if lag and lag["p99"] > 0.05:
            lines.append(
                f"note: requests were sent up to {1000 * lag['max']:.0f} ms late, because this machine was busy; the "
                "latencies have that in them"
            )
        return "\n".join(lines)


def _labels() -> list[str]:
    return [f"p{share * 100:g}" for share in SHARES]


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """Return the percentiles of values and their maximum; nothing without values."""
    ordered = sorted(values)
    if not ordered:
        return {}
    at = {label: percentile(ordered, share) for label, share in zip(_labels(), SHARES, strict=True)}
    return {**at, "max": ordered[-1]}


def read_prompts(path: str | Path) -> tuple[str, ...]:
    """Read texts, a line each.

    Args:
        path: The file.

    Raises:
        DeltuneError: It cannot be read, or has no texts.
    """
    try:
        with user_path(path, "--prompts").open(encoding="utf-8") as file:
            texts = tuple(line.strip() for line, _ in zip(file, range(MAX_PROMPTS), strict=False) if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise DeltuneError(f"{path} cannot be read: {error}") from error
    if not texts:
        raise DeltuneError(f"{path} has no texts; give a file with a text on each line")
    return texts


def arrivals(plan: LoadPlan) -> list[tuple[float, str, str]]:
    """Return time, model and prompt of every request; equal for equal plans.

    Args:
        plan: What is sent, with its models.
    """
    chance = random.Random(plan.seed)
    weights = [(k + 1) ** -plan.zipf for k in range(len(plan.models))]
    sent, at = [], chance.expovariate(plan.rate)
    while at < plan.duration:
        prompt = chance.choice(plan.prompts) if plan.prompts else " ".join(chance.choices(WORDS, k=plan.prompt_words))
        sent.append((at, chance.choices(plan.models, weights)[0], prompt))
        at += chance.expovariate(plan.rate)
    return sent


def measure(plan: LoadPlan, key: str | None = None, progress: bool = True) -> LoadResult:
    """Put a load on a server.

    Args:
        plan: What is sent.
        key: An API key.
        progress: Print how far it is on standard error.

    Raises:
        DeltuneError: The server does not answer, or lists no models.
    """
    return asyncio.run(_measure(plan, key, progress))


async def _measure(plan: LoadPlan, key: str | None, progress: bool) -> LoadResult:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
    async with httpx.AsyncClient(
        base_url=plan.base, headers=headers, timeout=plan.timeout, limits=limits, trust_env=False
    ) as client:
        if not plan.models:
            plan = replace(plan, models=await _models(client, plan))
        schedule = arrivals(plan)
        if not schedule:
            raise DeltuneError("no request falls into the time; give a longer --duration or a higher --rate")
        begun = time.perf_counter()
        requests = [SentRequest(at, model) for at, model, _ in schedule]
        tasks = []
        for request, (at, _, prompt) in zip(requests, schedule, strict=True):
            await asyncio.sleep(max(0.0, begun + at - time.perf_counter()))
            tasks.append(asyncio.create_task(_send(client, plan, request, prompt, begun)))
            if progress and len(tasks) % max(1, round(5 * plan.rate)) == 0:
                done = sum(task.done() for task in tasks)
                print(f"{at:6.1f} s: {len(tasks):,} sent, {done:,} answered", file=sys.stderr, flush=True)
        await asyncio.gather(*tasks)
        return LoadResult(plan, requests, time.perf_counter() - begun)


async def _models(client: httpx.AsyncClient, plan: LoadPlan) -> tuple[str, ...]:
    """Ask the server for its models; deltas only, where it has any, and those that have the plan's task."""
    try:
        answer = await client.get("/v1/models")
        answer.raise_for_status()
        listed = answer.json()["data"]
        deltas = tuple(str(one["id"]) for one in listed if one.get("parent"))
        names = deltas or tuple(str(one["id"]) for one in listed)
    except (httpx.HTTPError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, httpx.HTTPStatusError) and error.response.status_code == 401:
            raise DeltuneError(
                f"{plan.base} answers 401: put an API key that it knows into the environment "
                "variable OPENAI_API_KEY, or name the variable that has it with --key-variable"
            ) from error
        raise DeltuneError(
            f"{plan.base}/v1/models gives no list of models ({error}); name them with --models"
        ) from error
    if not names:
        raise DeltuneError(f"{plan.base}/v1/models lists no models; name some with --models")
    tasks = await _tasks(client)
    fitting = tuple(name for name in names if TASKS[plan.task] in tasks.get(name, (TASKS[plan.task],)))
    if not fitting:
        raise DeltuneError(
            f"none of the {len(names):,} deltas of {plan.base} has the task {TASKS[plan.task]}, which --task "
            f"{plan.task} asks for; GET /v1/deltas lists the tasks of each"
        )
    return fitting


async def _tasks(client: httpx.AsyncClient) -> dict[str, tuple[str, ...]]:
    """Return the tasks of each delta, where the server is one of ours; nothing of other servers."""
    try:
        answer = await client.get("/v1/deltas")
        return {str(one["name"]): tuple(one["tasks"]) for one in answer.raise_for_status().json()["data"]}
    except (httpx.HTTPError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def payload(plan: LoadPlan, model: str, prompt: str) -> tuple[str, dict[str, Any]]:
    """Return path and body of a request."""
    stream = {
        "max_tokens": plan.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if plan.task == "completions":
        return "/v1/completions", {"model": model, "prompt": prompt, **stream}
    if plan.task == "chat":
        return "/v1/chat/completions", {"model": model, "messages": [{"role": "user", "content": prompt}], **stream}
    return ("/classify" if plan.task == "classify" else "/v1/embeddings"), {"model": model, "input": prompt}


async def _send(client: httpx.AsyncClient, plan: LoadPlan, request: SentRequest, prompt: str, begun: float) -> None:
    """Send one request and record its outcome."""
    path, body = payload(plan, request.model, prompt)
    intended = begun + request.at
    request.lag = time.perf_counter() - intended
    try:
        async with asyncio.timeout(plan.timeout):
            async with client.stream("POST", path, json=body) as answer:
                request.status = answer.status_code
                if answer.status_code != 200:
                    text = (await answer.aread()).decode("utf-8", "replace")
                    request.error = f"{answer.status_code}: {text[:300]}"
                    return
                if body.get("stream"):
                    await _read_stream(answer, request, intended)
                else:
                    json.loads(await answer.aread())
        if not request.error:
            request.latency = time.perf_counter() - intended
    except TimeoutError:
        request.error = f"the answer took longer than {plan.timeout:g} seconds"
    except (httpx.HTTPError, ValueError) as error:
        request.error = f"{type(error).__name__}: {error}"


async def _read_stream(answer: httpx.Response, request: SentRequest, intended: float) -> None:
    """Read server-sent events up to the last one."""
    parts, ended = 0, False
    async for line in answer.aiter_lines():
        data = line.removeprefix("data:").strip()
        if not line.startswith("data:") or not data:
            continue
        if data == "[DONE]":
            ended = True
            continue
        event = json.loads(data)
        if event.get("error"):
            request.error = str(event["error"])[:300]
            return
        if any(choice.get("text") or choice.get("delta", {}).get("content") for choice in event.get("choices") or ()):
            parts += 1
            if request.first is None:
                request.first = time.perf_counter() - intended
        if event.get("usage"):
            request.tokens = int(event["usage"].get("completion_tokens") or 0)
    request.tokens = request.tokens or parts
    if not ended:
        request.error = "the stream ended before its last event"


def render(result: LoadResult) -> str:
    """Return a page with the result: latencies as pictures, and a table of the models.

    Args:
        result: The result of a load.
    """
    facts = result.as_dict()
    distributions = [
        Line(label, [(i / 200 * 100, 1000 * value) for i, value in enumerate(_curve(values))])
        for label, values in (
            ("whole answer", [one.latency for one in result.requests if one.latency is not None]),
            ("first token", [one.first for one in result.requests if one.first is not None]),
        )
        if len(values) > 1
    ]
    buckets: dict[int, list[SentRequest]] = {}
    width = max(1.0, result.plan.duration / 60)
    for one in result.requests:
        buckets.setdefault(int(one.at / width), []).append(one)
    over_time = []
    for label, share in (("p50", 0.5), ("p95", 0.95)):
        points = []
        for bucket, requests in sorted(buckets.items()):
            values = sorted(one.latency for one in requests if one.latency is not None)
            if values:
                points.append((bucket * width, 1000 * percentile(values, share)))
        over_time.append(Line(label, points))
    rates = [
        Line("sent", [(bucket * width, len(requests) / width) for bucket, requests in sorted(buckets.items())]),
        Line("failed", [(b * width, sum(bool(one.error) for one in r) / width) for b, r in sorted(buckets.items())]),
    ]
    return render_page(
        "bench.html",
        title=f"Load on {result.plan.base}",
        text=str(result),
        facts=facts,
        models=list(facts["models"].items())[:MAX_LISTED],
        more=max(0, len(facts["models"]) - MAX_LISTED),
        charts=[
            line_chart("milliseconds by share of requests", distributions, "percent of requests that took no longer"),
            line_chart("milliseconds over time", over_time, "seconds from the start"),
            line_chart("requests a second", rates, "seconds from the start"),
        ],
    )


def _curve(values: Sequence[float]) -> list[float]:
    """Return 200 values of the inverse of the distribution, from the least to the 99.5th percentile."""
    ordered = sorted(values)
    return [percentile(ordered, i / 200) for i in range(200)]
