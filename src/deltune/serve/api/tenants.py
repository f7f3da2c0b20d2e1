"""Tenants: their API keys, what each may see and do, and its rate limits.

A key is `dt-ID-SECRET`. The secret has 256 random bits, so that a fast hash is enough; the id finds the entry in the
file of keys and is no secret.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import hmac
import logging
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from ...config import Section
from ...errors import DeltuneError, error_from_problems, excerpt, unknown_name, validation_problems
from ...files import atomic_open, explain_write_errors, file_lock, find_file, parse_json_object, user_path
from ..config import LimitsSection, Rate
from .errors import ApiError

logger = logging.getLogger("deltune.serve")

KEY_PATTERN = re.compile(r"dt-([0-9a-f]{12})-([A-Za-z0-9_-]{43})")
TENANT_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
MAX_FILE = 64 << 20
LOOK_AGAIN = 1.0
"""Seconds after which the file is looked at again, so that a key can be made or revoked while the server runs."""


class StoredKey(Section):
    """A key as the file has it: from this nobody can make the key."""

    id: Annotated[str, Field(pattern=r"^[0-9a-f]{12}$")]  # the part of the key that is no secret
    salt: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]  # random digits that were hashed with the secret
    hash: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]  # SHA-256 of salt and secret, in hexadecimal digits
    created: float = 0.0  # when it was made, in seconds since the epoch


class Tenant(Section):
    """A client of the server: its keys, its rights and its rates."""

    name: Annotated[str, Field(pattern=f"^{TENANT_PATTERN}$")]  # the name, as logs and metrics have it
    # patterns of the names of deltas that it may use, such as `acme-*`
    deltas: tuple[Annotated[str, Field(min_length=1, max_length=200)], ...] = ()
    base: bool = True  # whether it may use the base model
    manage: bool = False  # whether it may load and unload the deltas that it may use
    admin: bool = False  # whether it may see the numbers of all tenants and deltas: /metrics, /stats
    requests_per_minute: Rate | None = None  # its own limit in place of the server's
    tokens_per_minute: Rate | None = None  # its own limit in place of the server's
    keys: tuple[StoredKey, ...] = ()

    def may_see(self, delta: str) -> bool:
        """Return whether a delta exists for this tenant."""
        return any(fnmatch.fnmatchcase(delta, pattern) for pattern in self.deltas)


class KeyFileContents(Section):
    tenants: tuple[Tenant, ...] = ()


def everybody(manage: bool) -> Tenant:
    """Return the tenant of a server without keys: it sees everything."""
    return Tenant(name="default", deltas=("*",), manage=manage, admin=True)


def _digest(salt: str, secret: str) -> str:
    return hashlib.sha256(bytes.fromhex(salt) + secret.encode()).hexdigest()


class KeyFile:
    """The tenants of a file of keys. The file is read again when it changes."""

    def __init__(self, path: str | Path) -> None:
        self.path, self._looked = user_path(path, "keys"), 0.0
        self._load()

    def tenant(self, key: str) -> Tenant | None:
        """Return whose key this is, or None if it is nobody's."""
        self._look()
        match = KEY_PATTERN.fullmatch(key)
        if match is None:
            return None
        tenant, stored = self._by_id.get(match[1], (None, None))
        expected = "0" * 64 if stored is None else stored.hash
        salt = "0" * 32 if stored is None else stored.salt
        return tenant if hmac.compare_digest(_digest(salt, match[2]), expected) else None

    def _look(self) -> None:
        """Read the file again if it has changed; one that is wrong changes nothing, and the log says so."""
        now = time.monotonic()
        if now - self._looked < LOOK_AGAIN:
            return
        self._looked = now
        try:
            if self._stamp != _stamp(self.path):
                self._load()
                logger.warning("the keys in %s were read again", self.path)
        except (DeltuneError, OSError) as error:
            logger.error("the keys stay as they were: %s", error)

    def _load(self) -> None:
        stamp = _stamp(self.path)
        contents = read_keys(self.path)
        self._by_id: dict[str, tuple[Tenant, StoredKey]] = {
            key.id: (tenant, key) for tenant in contents.tenants for key in tenant.keys
        }
        self._stamp, self._looked = stamp, time.monotonic()


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return (status.st_mtime_ns, status.st_size, status.st_ino)


def read_keys(path: Path) -> KeyFileContents:
    if find_file(path.parent, path.name) is None:
        raise DeltuneError(f"there is no file of keys {path}; make a key with: deltune serve-key {path} TENANT")
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE + 1)
        if len(text) > MAX_FILE:
            raise DeltuneError(f"{path} is longer than {MAX_FILE >> 20} MiB, which no file of keys is")
        contents = KeyFileContents.model_validate(parse_json_object(text))
    except ValidationError as error:
        raise error_from_problems(f"{path} is no file of keys", validation_problems(error)) from None
    except (OSError, ValueError) as error:
        raise DeltuneError(f"{path} cannot be read as a file of keys: {error}") from error
    names = [tenant.name for tenant in contents.tenants]
    ids = [key.id for tenant in contents.tenants for key in tenant.keys]
    repeated = sorted({name for name in names if names.count(name) > 1} | {one for one in ids if ids.count(one) > 1})
    if repeated:
        raise DeltuneError(f"{path} has {', '.join(repeated)} twice; a tenant and an id of a key stand in it once")
    return contents


def add_key(path: Path, name: str, changes: dict[str, Any]) -> str:
    """Make a key for a tenant, new or not, and return it. Only its salted hash is kept."""
    identity, secret, salt = secrets.token_hex(6), secrets.token_urlsafe(32), secrets.token_hex(16)
    key = StoredKey(id=identity, salt=salt, hash=_digest(salt, secret), created=round(time.time(), 3))
    with _changing(path):
        contents = read_keys(path) if path.exists() else KeyFileContents()
        before = next((tenant for tenant in contents.tenants if tenant.name == name), None)
        values = {"name": name, **({} if before is None else before.model_dump(exclude={"name", "keys"})), **changes}
        try:
            tenant = Tenant(**values, keys=(*(() if before is None else before.keys), key))
        except ValidationError as error:
            raise error_from_problems(f"tenant {excerpt(name)}", validation_problems(error)) from None
        others = tuple(one for one in contents.tenants if one.name != name)
        write_keys(path, KeyFileContents(tenants=(*others, tenant)))
    return f"dt-{identity}-{secret}"


def revoke_key(path: Path, identity: str) -> str:
    """Take a key out of the file, and return the name of its tenant."""
    match = KEY_PATTERN.fullmatch(identity)
    identity = match[1] if match else identity
    with _changing(path):
        contents = read_keys(path)
        owner = next((t for t in contents.tenants if any(key.id == identity for key in t.keys)), None)
        if owner is None:
            ids = [key.id for tenant in contents.tenants for key in tenant.keys]
            raise DeltuneError(unknown_name("key", identity, ids, str(path)))
        left = owner.model_copy(update={"keys": tuple(key for key in owner.keys if key.id != identity)})
        write_keys(path, KeyFileContents(tenants=tuple(left if t is owner else t for t in contents.tenants)))
    return owner.name


def _changing(path: Path) -> contextlib.AbstractContextManager[bool]:
    """Lock a file of keys, so that nobody else changes it between reading and writing."""
    return file_lock(path.parent / f".{path.name}.lock")


def write_keys(path: Path, contents: KeyFileContents) -> None:
    """Replace the file of keys, atomically; only its owner may read it."""
    with explain_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_open(path, mode=0o600) as file:
            file.write(contents.model_dump_json(indent=1).encode() + b"\n")


NUMBERS_PER_MINUTE = 120.0
"""Looks at the numbers of a server that a tenant with a rate has in a minute, if its rate is lower."""
MAX_TENANTS = 10_000
"""Most tenants with buckets at a time; the ones that asked longest ago begin with full ones."""


class TokenBucket:
    """A bucket that holds a minute's worth and fills steadily. It may go below zero, for what is known only later."""

    def __init__(self, per_minute: float, now: float) -> None:
        self.per_minute, self.level, self.filled = per_minute, max(1.0, per_minute), now

    def wait(self, amount: float, now: float) -> float:
        """Return in how many seconds an amount is there; 0 if it is now."""
        self.level = min(max(1.0, self.per_minute), self.level + (now - self.filled) * self.per_minute / 60)
        self.filled = now
        return max(0.0, (amount - self.level) * 60 / self.per_minute)

    def take(self, amount: float) -> None:
        self.level -= amount


class RateLimits:
    """The rates of all tenants: requests, and tokens read and generated, whatever became of the requests."""

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
        """Count a request, or refuse it where the tenant has used up its limits."""
        self.charge_usage()
        now = self._clock()
        requests, tokens = self._bucket(tenant, "requests", now), self._bucket(tenant, "tokens", now)
        self._check(tenant, now, (requests, "requests"), (tokens, "tokens"))
        if requests is not None:
            requests.take(1.0)

    def admit_numbers(self, tenant: Tenant) -> None:
        """Count a look at the numbers of the server, which are not among the requests of its tenant."""
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
