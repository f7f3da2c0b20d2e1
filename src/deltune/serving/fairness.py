"""Which tenant is served next: the one that was served the fewest tokens, among those that wait.

Each tenant has a counter of the tokens that were computed for it (Sheng et al. 2024, "Fairness in serving large
language models": a deficit round robin whose quantum is one request). The next request is that of the tenant with the
lowest counter, so that a burst of one tenant waits behind the first request of any other. A tenant that comes back does
not save up what it did not use, nor does one that is new: its counter begins at the lowest of those that are being
served, or where the last one of them was when it left.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

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
        """Count a request of a tenant no more."""
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
        """Return the counter of a tenant."""
        return self.served.get(tenant, 0.0)

    def order(self, tenant: str) -> tuple[float, int]:
        """Return by what tenants are ordered, the next one first.

        Among tenants that were served the same, the one with the fewest requests is next: one that comes back begins
        at the counter of those that are here, and would otherwise wait behind a burst once more.
        """
        return self.of(tenant), self._present[tenant]


class OfTenant(Protocol):
    """An item of a `FairQueue`."""

    @property
    def tenant(self) -> str:
        """The tenant that it is for."""
        ...

    submitted: float


T = TypeVar("T", bound=OfTenant)
R = TypeVar("R")


class FairQueue(Generic[T]):
    """Requests that wait for the same batches, in order within a tenant.

    Args:
        share: The counters of the tenants.
    """

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
        """Add a request.

        Args:
            job: The request.
            first: Whether it goes before the others of its tenant, as one does that was interrupted.
        """
        jobs = self._jobs.setdefault(job.tenant, deque())
        if first:
            jobs.appendleft(job)
        else:
            jobs.append(job)

    def peek(self) -> T | None:
        """Return the next request, and leave it in the queue; None if there is none."""
        tenant = min(
            self._jobs,
            key=lambda t: (*self.share.order(t), self._jobs[t][0].submitted),
            default=None,
        )
        return None if tenant is None else self._jobs[tenant][0]

    def next_jobs(self, number: int, cost: Callable[[T], float]) -> list[T]:
        """Return the next requests, and leave them in the queue.

        Args:
            number: How many, at most.
            cost: Returns the tokens of a request, by which the counter of its tenant is taken to grow before the next.
        """
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
        """Take the next request."""
        job = self.peek()
        assert job is not None
        self.remove(job)
        return job

    def remove(self, job: T) -> bool:
        """Take a request out; return whether it was there."""
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
    """A call that a `FairThread` is to make for a tenant.

    Attributes:
        tenant: The tenant.
        submitted: When it was submitted, on the monotonic clock.
        cost: What it costs, in any unit that is the same for all calls.
        call: The function.
        future: Its result.
    """

    tenant: str
    submitted: float
    cost: float
    call: Callable[[], R]
    future: Future[R] = field(default_factory=Future)


class FairThread:
    """An executor of one thread, whose next call is of the tenant that it has worked for least.

    Args:
        name: The name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._share = FairShare()
        self._queue: FairQueue[Work[Any]] = FairQueue(self._share)
        self._wake = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, tenant: str, cost: float, call: Callable[[], R]) -> Future[R]:
        """Submit a call, and return the future of its result, which can be cancelled until the call begins.

        Args:
            tenant: The tenant that it is for.
            cost: What it costs.
            call: The function.

        Raises:
            RuntimeError: The thread is ending.
        """
        work = Work(tenant, time.monotonic(), cost, call)
        with self._wake:
            if self._closed:
                raise RuntimeError("the thread is ending")
            self._share.enter(tenant)
            self._queue.push(work)
            self._wake.notify()
        return work.future

    def close(self) -> None:
        """End, after all calls that were submitted."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._wake:
                while not len(self._queue) and not self._closed:
                    self._wake.wait()
                if not len(self._queue):
                    return
                work = self._queue.pop()
                begins = work.future.set_running_or_notify_cancel()
                if begins:
                    self._share.charge(work.tenant, work.cost)
            try:
                if begins:
                    work.future.set_result(work.call())
            except BaseException as error:
                work.future.set_exception(error)
            with self._wake:
                self._share.leave(work.tenant)
