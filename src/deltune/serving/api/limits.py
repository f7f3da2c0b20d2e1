"""Rate limits of each tenant: token buckets, and for a request that finds one empty the time to wait."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from ..config import LimitsSection
from .auth import Tenant
from .errors import ApiError

MAX_TENANTS = 10_000
"""How many tenants have buckets at a time; those that asked longest ago begin with full ones."""


class TokenBucket:
    """A bucket that holds a minute's worth and fills steadily. It may go below zero, for what is known only later.

    Args:
        per_minute: How much flows in within a minute, and how much it holds.
        now: The time, in seconds.
    """

    def __init__(self, per_minute: float, now: float) -> None:
        self.per_minute, self.level, self.filled = per_minute, max(1.0, per_minute), now

    def wait(self, amount: float, now: float) -> float:
        """Return in how many seconds an amount is there; 0 if it is now."""
        self.level = min(max(1.0, self.per_minute), self.level + (now - self.filled) * self.per_minute / 60)
        self.filled = now
        return max(0.0, (amount - self.level) * 60 / self.per_minute)

    def take(self, amount: float) -> None:
        """Take an amount, whether it is there or not."""
        self.level -= amount


class RateLimits:
    """The rates of all tenants: requests, and tokens read and generated.

    Args:
        limits: The rates of a tenant whose key says nothing else.
        clock: The time, in seconds.
    """

    def __init__(self, limits: LimitsSection, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits, self._clock = limits, clock
        self._buckets: OrderedDict[tuple[str, str, float], TokenBucket] = OrderedDict()

    def admit(self, tenant: Tenant) -> None:
        """Count a request, or refuse it where the tenant has used up its limits.

        Args:
            tenant: The tenant.

        Raises:
            ApiError: The tenant has reached a limit; the error says when it may try again.
        """
        now = self._clock()
        requests, tokens = self._bucket(tenant, "requests", now), self._bucket(tenant, "tokens", now)
        for bucket, what in ((requests, "requests"), (tokens, "tokens")):
            if bucket is not None and (wait := bucket.wait(1.0, now)) > 0:
                raise ApiError(
                    429,
                    f"{tenant.name} has reached its limit of {bucket.per_minute:g} {what} a minute; "
                    f"try again in {wait:.1f} seconds",
                    "rate_limit_exceeded",
                    retry_after=wait,
                )
        if requests is not None:
            requests.take(1.0)

    def charge(self, tenant: Tenant, tokens: int) -> None:
        """Count the tokens of an answer; they are known only afterwards, so that the next request waits for them."""
        if (bucket := self._bucket(tenant, "tokens", self._clock())) is not None:
            bucket.take(tokens)

    def _bucket(self, tenant: Tenant, what: str, now: float) -> TokenBucket | None:
        name = f"{what}_per_minute"
        rate = getattr(tenant, name) or getattr(self.limits, name)
        if rate is None:
            return None
        key = (tenant.name, what, rate)
        if key not in self._buckets:
            self._buckets[key] = TokenBucket(rate, now)  # full at the time at which the request looks into it
            while len(self._buckets) > 2 * MAX_TENANTS:
                self._buckets.popitem(last=False)
        self._buckets.move_to_end(key)
        return self._buckets[key]
