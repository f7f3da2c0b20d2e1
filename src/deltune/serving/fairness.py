"""Which tenant is served next: the one that was served the fewest tokens, among those that wait.

Each tenant has a counter of the tokens that were computed for it (Sheng et al. 2024, "Fairness in serving large
language models": a deficit round robin whose quantum is one request). The next request is that of the tenant with the
lowest counter, so that a burst of one tenant waits behind the first request of any other. A tenant that comes back does
not save up what it did not use: its counter begins at the lowest of those that are being served.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator

from .jobs import Job


class FairShare:
    """The tokens that were computed for each tenant. One engine has one, for all of its batches."""

    def __init__(self) -> None:
        self.served: dict[str, float] = {}
        self._present: Counter[str] = Counter()

    def enter(self, tenant: str) -> None:
        """Count a request of a tenant, which may be its first."""
        if not self._present[tenant]:
            others = [self.served[other] for other in self._present if self._present[other]]
            self.served[tenant] = max(self.served.get(tenant, 0.0), min(others, default=0.0))
        self._present[tenant] += 1

    def leave(self, tenant: str) -> None:
        """Count a request of a tenant no more."""
        self._present[tenant] -= 1
        if not self._present[tenant]:
            del self._present[tenant]
            if len(self.served) > 2 * len(self._present) + 64:  # forget who was not served lately
                lowest = min((self.served[t] for t in self._present), default=max(self.served.values()))
                self.served = {t: n for t, n in self.served.items() if t in self._present or n > lowest}

    def charge(self, tenant: str, tokens: float) -> None:
        """Add tokens that were computed for a tenant."""
        self.served[tenant] = self.served.get(tenant, 0.0) + tokens

    def of(self, tenant: str) -> float:
        """Return the counter of a tenant."""
        return self.served.get(tenant, 0.0)


class FairQueue:
    """Requests that wait for the same batches, in order within a tenant.

    Args:
        share: The counters of the tenants.
    """

    def __init__(self, share: FairShare) -> None:
        self.share = share
        self._jobs: dict[str, deque[Job]] = {}

    def __len__(self) -> int:
        return sum(len(jobs) for jobs in self._jobs.values())

    def __iter__(self) -> Iterator[Job]:
        for jobs in self._jobs.values():
            yield from jobs

    def push(self, job: Job, first: bool = False) -> None:
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

    def peek(self) -> Job | None:
        """Return the next request, and leave it in the queue; None if there is none.

        Among tenants that were served the same, the one with the fewest requests is next: one that comes back begins
        at the counter of those that are here, and would otherwise wait behind a burst once more.
        """
        tenant = min(
            self._jobs,
            key=lambda t: (self.share.of(t), len(self._jobs[t]), self._jobs[t][0].submitted),
            default=None,
        )
        return None if tenant is None else self._jobs[tenant][0]

    def heads(self) -> list[Job]:
        """Return the next request of each tenant, and leave them in the queue."""
        return [jobs[0] for jobs in self._jobs.values()]

    def pop(self) -> Job:
        """Take the next request."""
        job = self.peek()
        assert job is not None
        self.remove(job)
        return job

    def remove(self, job: Job) -> bool:
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
