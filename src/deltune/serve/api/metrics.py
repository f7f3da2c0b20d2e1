"""Counts of a server: Prometheus metrics of its own registry, and the last minutes for the page."""

from __future__ import annotations

import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ..engine.requests import DeltaInfo, EngineStats

BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
HISTORY = 300
"""Seconds that the page can show."""
RECENT = 512
"""Latencies of a delta that its percentiles are computed from."""
MAX_DELTAS = 10_000


@dataclass
class Second:
    at: int
    requests: int = 0
    errors: int = 0
    tokens: int = 0
    seconds: float = 0.0

    @property
    def latency(self) -> float | None:
        """The mean time of the answered requests, which errors are not; None if there were none."""
        answered = self.requests - self.errors
        return self.seconds / answered if answered else None


@dataclass
class DeltaLoad:
    """Counts of one delta. The latencies are of answered requests alone, because a refusal takes no time."""

    requests: int = 0
    errors: int = 0
    statuses: set[str] = field(default_factory=set)
    latencies: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def percentile(self, share: float) -> float | None:
        """Return the latency that this share of the last answers did not exceed, or None without answers."""
        ordered = sorted(self.latencies)
        rank = math.ceil(round(share * len(ordered), 9))  # 0.07 * 100 is a little more than 7
        return ordered[max(rank, 1) - 1] if ordered else None


class EngineCollector(Collector):
    """The numbers of the engine, read when Prometheus asks."""

    def __init__(self, stats: Callable[[], EngineStats], deltas: Callable[[], list[DeltaInfo]]) -> None:
        self._stats, self._deltas = stats, deltas

    def collect(self) -> Iterable[Metric]:
        stats, deltas = self._stats(), self._deltas()
        for kind, name, meaning, label, values in (
            (GaugeMetricFamily, "queued", "Requests that wait.", "tenant", stats.queued),
            (GaugeMetricFamily, "running", "Requests in the batch; the base model is ''.", "delta", stats.running),
            (CounterMetricFamily, "finished", "Requests answered; the base model is ''.", "delta", stats.finished),
            (CounterMetricFamily, "failed", "Requests that ended in an error.", "delta", stats.failed),
        ):
            family: Any = kind(f"deltune_{name}", meaning, labels=[label])
            for key, number in values.items():
                family.add_metric([key], number)
            yield family
        for name, meaning, value in (
            ("prompt_tokens", "Tokens read.", stats.prompt_tokens),
            ("generated_tokens", "Tokens generated.", stats.generated_tokens),
            ("cached_tokens", "Tokens of prompts that came from the cache.", stats.cached_tokens),
            ("delta_loads", "Deltas read from disk.", stats.loads),
            ("delta_evictions", "Deltas dropped from memory.", stats.evictions),
            ("delta_load_seconds", "Time spent reading deltas.", stats.load_seconds),
        ):
            yield CounterMetricFamily(f"deltune_{name}", meaning, value=value)
        loaded = [delta for delta in deltas if delta.loaded]
        yield GaugeMetricFamily("deltune_deltas", "Deltas that can be asked.", value=len(deltas))
        yield GaugeMetricFamily("deltune_deltas_loaded", "Deltas in memory.", value=len(loaded))
        yield GaugeMetricFamily("deltune_deltas_refused", "Deltas whose newest files were refused.",
                                value=sum(bool(delta.error) for delta in deltas))  # fmt: skip
        yield GaugeMetricFamily("deltune_delta_bytes", "Memory of deltas.", value=sum(one.bytes for one in loaded))


class Metrics:
    def __init__(
        self,
        stats: Callable[[], EngineStats],
        deltas: Callable[[], list[DeltaInfo]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock, self.started = clock, clock()
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(stats, deltas))
        self._requests = Counter(
            "deltune_requests", "Requests answered over HTTP.", ["endpoint", "status"], registry=self.registry
        )
        self._seconds = Histogram(
            "deltune_request_seconds", "From a request's first byte to its answer's last.", ["endpoint"],
            buckets=BUCKETS, registry=self.registry,
        )  # fmt: skip
        self._first = Histogram(
            "deltune_first_token_seconds", "From a request to the first part of its stream.", ["endpoint"],
            buckets=BUCKETS, registry=self.registry,
        )  # fmt: skip
        self._by_delta = Counter(
            "deltune_delta_requests", "Requests of a delta over HTTP.", ["delta", "status"], registry=self.registry
        )
        self._delta_seconds = Counter(
            "deltune_delta_seconds", "Time that answered requests of a delta took (status below 400), summed up.",
            ["delta"], registry=self.registry,
        )  # fmt: skip
        self._seconds_log: deque[Second] = deque(maxlen=HISTORY)
        self.loads: OrderedDict[str, DeltaLoad] = OrderedDict()

    def observe(self, endpoint: str, status: int, seconds: float, delta: str | None, tokens: int) -> None:
        self._requests.labels(endpoint, str(status)).inc()
        self._seconds.labels(endpoint).observe(seconds)
        if delta is None:
            return
        answered = status < 400
        second = self._second()
        second.requests += 1
        second.errors += not answered
        second.tokens += tokens
        second.seconds += seconds if answered else 0.0
        self._by_delta.labels(delta, str(status)).inc()
        self._delta_seconds.labels(delta).inc(seconds if answered else 0.0)
        load = self.loads.setdefault(delta, DeltaLoad())
        self.loads.move_to_end(delta)
        load.requests += 1
        load.errors += not answered
        load.statuses.add(str(status))
        if answered:
            load.latencies.append(seconds)
        while len(self.loads) > MAX_DELTAS:
            forgotten, forgotten_load = self.loads.popitem(last=False)
            self._delta_seconds.remove(forgotten)
            for one in forgotten_load.statuses:
                self._by_delta.remove(forgotten, one)

    def observe_first(self, endpoint: str, seconds: float) -> None:
        """Count the time to the first part of a stream."""
        self._first.labels(endpoint).observe(seconds)

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def history(self, seconds: int) -> list[dict[str, Any]]:
        """Return requests, errors, tokens and mean latency of answers in the last seconds, the current one left out."""
        now = int(self._clock())
        by_time = {second.at: second for second in self._seconds_log}
        shown = (by_time.get(at, Second(at)) for at in range(now - min(seconds, HISTORY), now))
        names = ("requests", "errors", "tokens", "latency")
        return [{name: getattr(one, name) for name in names} for one in shown]

    def uptime(self) -> float:
        return self._clock() - self.started

    def _second(self) -> Second:
        now = int(self._clock())
        if not self._seconds_log or self._seconds_log[-1].at != now:
            self._seconds_log.append(Second(now))
        return self._seconds_log[-1]
