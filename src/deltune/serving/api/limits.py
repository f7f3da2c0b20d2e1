"""Rate limits of each tenant: token buckets, and for a request that finds one empty the time to wait."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping

from ..config import LimitsSection
from .auth import Tenant
from .errors import ApiError

NUMBERS_PER_MINUTE = 120.0
"""Looks at the numbers of a server that a tenant with a rate has in a minute, if its rate is lower."""
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
        take_usage: Returns the tokens that were computed for each tenant since its last call. They count whatever
            became of the requests, so that nobody evades a limit by going away.
        clock: The time, in seconds.
    """

    def __init__(
        self,
        limits: LimitsSection,
        take_usage: Callable[[], Mapping[str, int]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits, self._take_usage, self._clock = limits, take_usage, clock
        take_usage()  # begins to count
        self._buckets: OrderedDict[tuple[str, str], TokenBucket] = OrderedDict()

    def admit(self, tenant: Tenant) -> None:
        """Count a request, or refuse it where the tenant has used up its limits.

        Args:
            tenant: The tenant.

        Raises:
            ApiError: The tenant has reached a limit; the error says when it may try again.
        """
        self.charge_usage()
        now = self._clock()
        requests, tokens = self._bucket(tenant, "requests", now), self._bucket(tenant, "tokens", now)
        self._check(tenant, now, (requests, "requests"), (tokens, "tokens"))
        if requests is not None:
            requests.take(1.0)

    def admit_numbers(self, tenant: Tenant) -> None:
        """Count a look at the numbers of the server, which are not among the requests of its tenant.

        Args:
            tenant: Who asks.

        Raises:
            ApiError: The tenant has asked too often; it is told when to come again.
        """
        now = self._clock()
        looks = self._bucket(tenant, "requests", now, "numbers", NUMBERS_PER_MINUTE)
        self._check(tenant, now, (looks, "looks at the numbers"))
        if looks is not None:
            looks.take(1.0)

    def _check(self, tenant: Tenant, now: float, *buckets: tuple[TokenBucket | None, str]) -> None:
        for bucket, what in buckets:
            if bucket is not None and (wait := bucket.wait(1.0, now)) > 0:
                raise ApiError(
                    429,
                    f"{tenant.name} has reached its limit of {bucket.per_minute:g} {what} a minute; "
                    f"try again in {wait:.1f} seconds",
                    "rate_limit_exceeded",
                    retry_after=wait,
                )

    def charge_usage(self) -> None:
        """Charge the tokens that were computed by now; they are known only afterwards, so later requests wait."""
        for name, tokens in self._take_usage().items():
            if (bucket := self._buckets.get((name, "tokens"))) is not None:
                bucket.wait(0.0, self._clock())  # fills it first: what it cannot hold is lost
                bucket.take(tokens)

    def _bucket(self, tenant: Tenant, what: str, now: float, use: str = "", least: float = 0.0) -> TokenBucket | None:
        name = f"{what}_per_minute"
        rate = getattr(tenant, name) or getattr(self.limits, name)
        if rate is None:
            return None
        rate = max(rate, least)
        key = (tenant.name, use or what)
        if key not in self._buckets or self._buckets[key].per_minute != rate:
            self._buckets[key] = TokenBucket(rate, now)  # full at the time at which the request looks into it
            while len(self._buckets) > 2 * MAX_TENANTS:
                self._buckets.popitem(last=False)
        self._buckets.move_to_end(key)
        return self._buckets[key]
