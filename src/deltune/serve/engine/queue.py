"""Order of the requests that wait, and refusal of requests before they wait.

The next one is of the tenant that was served the fewest tokens, among those that wait. Each tenant has a counter of the
tokens that were computed for it (Sheng et al. 2024, "Fairness in serving large language models": a deficit round robin
whose quantum is one request), so that a burst of one tenant waits behind the first request of any other. A tenant that
comes back does not save up what it did not use, nor does one that is new: its counter begins at the lowest of those
that are being served, or where the last one of them was when it left.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

from ...errors import excerpt
from ..errors import InvalidRequest, QueueFull
from .backbone import LoadedDelta
from .jobs import Job
from .requests import Request

LIGHT = 0.125
"""A tenant is light if it has at most this share of the requests that a tenant has waiting on average."""


class FairShare:
    """The tokens that were computed for each tenant. One engine has one, for all of its batches."""

    def __init__(self) -> None:
        self.served: dict[str, float] = {}
        self._present: Counter[str] = Counter()
        self._last_left = 0.0
        self._usage: Counter[str] | None = None
        self._lock = threading.Lock()  # of the usage, which any thread may take

    def enter(self, tenant: str) -> None:
        """Count a request of a tenant, which may be its first."""
        if not self._present[tenant]:
            self.served[tenant] = max(self.served.get(tenant, 0.0), self._start())
        self._present[tenant] += 1

    def _start(self) -> float:
        """The counter with which a tenant begins."""
        return min((self.served[t] for t, requests in self._present.items() if requests), default=self._last_left)

    def leave(self, tenant: str) -> None:
        self._present[tenant] -= 1
        if not self._present[tenant]:
            del self._present[tenant]
            self._last_left = self.served[tenant]
            if len(self.served) > 2 * len(self._present) + 64:  # forget those that would begin there anyway
                start = self._start()
                self.served = {t: n for t, n in self.served.items() if t in self._present or n > start}

    def charge(self, tenant: str, tokens: float) -> None:
        """Add tokens that are computed for a tenant to its counter, and to its usage."""
        self.served[tenant] = self.served.get(tenant, 0.0) + tokens
        with self._lock:
            if self._usage is not None:
                self._usage[tenant] += round(tokens)

    def take_usage(self) -> dict[str, int]:
        """Return the tokens that were computed for each tenant since the last call; the first call begins to count."""
        with self._lock:
            usage, self._usage = self._usage, Counter()
        return dict(usage or {})

    def of(self, tenant: str) -> float:
        return self.served.get(tenant, 0.0)

    def order(self, tenant: str) -> tuple[float, int]:
        """Return by what tenants are ordered, the next one first.

        Among tenants that were served the same, the one with the fewest requests is next: one that comes back begins
        at the counter of those that are here, and would otherwise wait behind a burst once more.
        """
        return self.of(tenant), self._present[tenant]


class OfTenant(Protocol):
    @property
    def tenant(self) -> str: ...

    submitted: float


T = TypeVar("T", bound=OfTenant)
R = TypeVar("R")


class FairQueue(Generic[T]):
    """Requests that wait for the same batches, in order within a tenant."""

    def __init__(self, share: FairShare) -> None:
        self.share = share
        self._jobs: dict[str, deque[T]] = {}

    def __len__(self) -> int:
        return sum(len(jobs) for jobs in self._jobs.values())

    def __iter__(self) -> Iterator[T]:
        for jobs in self._jobs.values():
            yield from jobs

    def light_tenants(self) -> set[str]:
        """Return the tenants that have far fewer requests waiting than the others."""
        mean = len(self) / max(1, len(self._jobs))
        return {tenant for tenant, jobs in self._jobs.items() if len(jobs) <= LIGHT * mean}

    def push(self, job: T, first: bool = False) -> None:
        """Add a request; with `first`, before the others of its tenant, since it was interrupted."""
        jobs = self._jobs.setdefault(job.tenant, deque())
        if first:
            jobs.appendleft(job)
        else:
            jobs.append(job)

    def peek(self) -> T | None:
        """Return the next request, and leave it in the queue; None if there is none."""
        return next(iter(self.next_jobs(1, lambda _: 0.0)), None)

    def next_jobs(self, number: int, cost: Callable[[T], float]) -> list[T]:
        """Return the next requests, as if each charged its `cost` to its tenant, and leave them in the queue."""
        heads = [
            (*self.share.order(tenant), jobs[0].submitted, place, 0, jobs)
            for place, (tenant, jobs) in enumerate(self._jobs.items())
        ]
        heapq.heapify(heads)
        chosen: list[T] = []
        while heads and len(chosen) < number:
            served, present, _, place, at, jobs = heads[0]
            chosen.append(jobs[at])
            if at + 1 < len(jobs):
                following = served + cost(jobs[at]), present, jobs[at + 1].submitted, place, at + 1, jobs
                heapq.heapreplace(heads, following)
            else:
                heapq.heappop(heads)
        return chosen

    def heads(self) -> list[T]:
        """Return the next request of each tenant, and leave them in the queue."""
        return [jobs[0] for jobs in self._jobs.values()]

    def pop(self) -> T:
        job = self.peek()
        assert job is not None
        self.remove(job)
        return job

    def remove(self, job: T) -> bool:
        jobs = self._jobs.get(job.tenant)
        if jobs is None or job not in jobs:
            return False
        if jobs[0] is job:
            jobs.popleft()
        else:
            jobs.remove(job)
        if not jobs:
            del self._jobs[job.tenant]
        return True

    def oldest(self) -> float | None:
        """Return when the request that waits longest was submitted; None if there is none."""
        return min((jobs[0].submitted for jobs in self._jobs.values()), default=None)


@dataclass(eq=False)
class Work(Generic[R]):
    tenant: str
    submitted: float  # when it was submitted, on the monotonic clock
    cost: float  # what it costs, in any unit that is the same for all calls
    call: Callable[[], R]  # the function
    future: Future[R] = field(default_factory=Future)  # its result


class FairThread:
    """An executor of one thread, whose next call is of the tenant that it has worked for least."""

    def __init__(self, name: str) -> None:
        self._share, self._lock = FairShare(), threading.Lock()
        self._queue: FairQueue[Work[Any]] = FairQueue(self._share)
        self._thread = ThreadPoolExecutor(1, name)

    def submit(self, tenant: str, cost: float, call: Callable[[], R]) -> Future[R]:
        """Submit a call, and return the future of its result, which can be cancelled until the call begins."""
        work = Work(tenant, time.monotonic(), cost, call)
        with self._lock:
            self._thread.submit(self._run_next)
            self._share.enter(tenant)
            self._queue.push(work)
        return work.future

    def close(self) -> None:
        """End, after all calls that were submitted."""
        self._thread.shutdown()

    def _run_next(self) -> None:
        with self._lock:
            work = self._queue.pop()
            begins = work.future.set_running_or_notify_cancel()
            if begins:
                self._share.charge(work.tenant, work.cost)
        try:
            if begins:
                work.future.set_result(work.call())
        except BaseException as error:
            work.future.set_exception(error)
        with self._lock:
            self._share.leave(work.tenant)


COUNTED_ENDS = 256
"""Requests that ended lately, by whose rate a refused one is told when to come again."""


class Admission:
    """Counts the requests of each tenant that wait, and refuses too many. Any thread may call it."""

    def __init__(self, most: int, most_per_tenant: int, lock: threading.RLock) -> None:
        self.most, self.most_per_tenant = most, most_per_tenant
        self.queued: Counter[str] = Counter()
        self._lock = lock
        self._ends: deque[float] = deque(maxlen=COUNTED_ENDS)

    def enter(self, tenant: str) -> None:
        """Count a request of a tenant as one that waits."""
        with self._lock:
            waiting = sum(self.queued.values())
            if waiting >= self.most:
                raise QueueFull(
                    f"{waiting} inputs wait already, which is the most that this server keeps", self._retry_after()
                )
            if self.queued[tenant] >= self.most_per_tenant:
                raise QueueFull(
                    f"{self.queued[tenant]} inputs of tenant {tenant!r} wait already, which is the most that it may "
                    "have",
                    self._retry_after(),
                )
            self.queued[tenant] += 1

    def leave(self, tenant: str) -> None:
        with self._lock:
            self.queued[tenant] -= 1
            if not self.queued[tenant]:
                del self.queued[tenant]

    def note_end(self, now: float) -> None:
        """Note that a request has ended; the Retry-After of refusals is computed from these times."""
        with self._lock:
            self._ends.append(now)

    def _retry_after(self) -> float:
        """In how many seconds a quarter of what waits may be done."""
        if len(self._ends) < 2:
            return 1.0
        seconds_each = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        return min(60.0, max(0.1, sum(self.queued.values()) / 4 * seconds_each))


def readable_length(loaded: LoadedDelta, max_length: int | None) -> int:
    """Return the number of tokens that can be read at most."""
    positions = loaded.backbone.remaining_positions(loaded.backbone.first_stack.name, loaded)
    return positions if max_length is None else min(positions, max_length)


def cut_length(request: Request, trained: int | None, readable: int) -> int | None:
    """Return the number of tokens to which a text is cut, or None if it is not."""
    length = request.truncate_prompt_tokens
    if length is None:
        return None
    if request.task == "generate" or request.tokens is not None:
        what = "the prompt of an answer is" if request.task == "generate" else "token ids are"
        raise InvalidRequest(f"{what} never cut; leave truncate_prompt_tokens out")
    if isinstance(length, bool) or not isinstance(length, int) or (length < 1 and length != -1):
        raise InvalidRequest(f"truncate_prompt_tokens is a number of tokens, or -1, and not {excerpt(length)}")
    trained = readable if trained is None else min(trained, readable)
    return trained if length == -1 else min(length, readable)


def check_length(job: Job, loaded: LoadedDelta, max_length: int | None) -> None:
    """Check that the model has positions for a request and its answer; shorten the answer where it may be shorter."""
    length, backbone = len(job.tokens), loaded.backbone
    generating, more = job.request.task == "generate", 0
    advice = "" if generating or job.request.tokens is not None else "; truncate_prompt_tokens: -1 cuts the text"
    positions = backbone.remaining_positions(backbone.first_stack.name, loaded)
    answer_positions = positions - length
    if generating and backbone.is_encoder_decoder:
        answer_positions = backbone.remaining_positions(backbone.last_stack.name, loaded) - 1
    if generating:
        job.request = _shortened(job.request, answer_positions, max_length, length)
        more = job.request.sampling.max_tokens
    size = f"the request has {length} tokens{f' and max_tokens={more}' if generating else ''}"
    if max_length is not None and length + more > max_length:
        raise InvalidRequest(f"{size}, and this server takes {max_length}{advice}")
    needed = length + (more if not backbone.is_encoder_decoder else 0)
    if needed > positions:
        raise InvalidRequest(f"{size}, and the model can read {positions}{advice}")
    if generating and more > answer_positions:
        raise InvalidRequest(f"max_tokens={more} is more than the {answer_positions} that the decoder has places for")


def _shortened(request: Request, positions: int, max_length: int | None, length: int) -> Request:
    sampling = request.sampling
    if not sampling.shorten:
        return request
    room = positions if max_length is None else min(positions, max_length - length)
    return replace(request, sampling=replace(sampling, max_tokens=max(1, min(sampling.max_tokens, room))))
