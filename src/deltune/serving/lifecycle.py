"""How deltas come into memory, are replaced and go: read in a thread of their own, attached while no pass runs.

A delta is checked before it takes traffic. A new version takes over between two requests, and the old one goes with its
last request. Of those in memory the one goes first that was not needed for longest; where all are needed, one takes no
new requests until it is free.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..errors import DeltuneError, error_summary
from .backbone import Backbones, LoadedDelta, PreparedDelta
from .catalog import Catalog, Entry
from .concurrency import thread_pool
from .errors import EngineClosed, NameTaken, RequestTimeout, UnknownDelta, refusal
from .jobs import Job
from .queue import FairShare
from .registry import FolderFacts, Signature, check_delta_name, read_facts, signature
from .requests import DeltaInfo

logger = logging.getLogger(__name__)

READ_ATTEMPTS = 3
"""How often a delta is read whose files change meanwhile."""
LOADS_AT_ONCE = 2
"""Deltas that are read ahead; more would take memory before there is a place for them."""


@dataclass(eq=False)
class Arrival:
    """A delta that was read, on its way to the engine's thread."""

    entry: Entry
    folder: Path
    prepared: PreparedDelta | DeltuneError  # the delta, or why it was refused
    seen: Signature  # the signature of its files before they were read
    # the result of `load`, or None if requests wait for it. It is cancelled where nobody waits any more
    done: Future[DeltaInfo] | None
    requested: bool = False  # whether it comes by a call of `load`, and not since its files have changed
    replace: bool = True  # whether it may take the place of another one that such a call has loaded

    @property
    def given_up(self) -> bool:
        """Whether its call of `load` has ended, by a timeout for instance."""
        return self.done is not None and self.done.done()


@dataclass(frozen=True)
class LifecycleContext:
    """What an engine gives to the lifecycle of its deltas."""

    wake: threading.Condition  # is notified when the engine's thread has something to do; its lock guards the catalog
    share: FairShare  # the counters of the tenants
    call: Callable[[Callable[[], None]], None]  # runs a function in the engine's thread and waits for it
    place: Callable[[Job], None]  # is called with requests that have waited for a delta which is in memory now
    # is called with requests that have waited for a delta which does not come, and the reason
    finish: Callable[[Job, DeltuneError], None]
    # returns when no pass of a model runs in another thread; answers go out meanwhile
    wait_for_passes: Callable[[], None]
    detached: Callable[[LoadedDelta], None]  # is called with a version before it is detached
    forgotten: Callable[[], None]  # is called after a delta was taken out or its folder has gone


class Lifecycle:
    """Loads, replaces and drops deltas.

    Attributes:
        retired: Versions that another one has replaced, or nothing, and that are still attached.
        loads: How many were attached since the start.
        evictions: How many were dropped from memory since the start to make room.
        load_seconds: The time spent reading and attaching since the start.
    """

    def __init__(
        self,
        catalog: Catalog,
        backbones: Backbones,
        context: LifecycleContext,
        max_loaded: int | None,
        max_loaded_bytes: int | None,
        max_names: int | None,
    ) -> None:
        self.catalog, self.backbones, self.context = catalog, backbones, context
        self.max_loaded, self.max_loaded_bytes, self.max_names = max_loaded, max_loaded_bytes, max_names
        self.retired: set[LoadedDelta] = set()
        self.loads = self.evictions = 0
        self.load_seconds = 0.0
        self._arrivals: deque[Arrival] = deque()
        self._loads: set[Future[DeltaInfo]] = set()  # of `load` and `refresh`, until they are done
        self._closing: DeltuneError | None = None  # why deltas are loaded for requests alone
        self._ended = False
        # of the engine's thread, so that no step goes through all entries
        self._waiting: set[Entry] = set()  # those that requests wait for
        self._loading: set[Entry] = set()  # those that are being read for them
        self._draining: set[Entry] = set()  # those that take no new requests, as another delta needs their place
        self._resident: set[Entry] = set()  # those in memory, but for what was attached before
        # on one of torch's threads: the passes that run meanwhile need the cores
        self._reader = thread_pool(1, 1, "deltune-reader")

    # -- from any thread

    def load(
        self, name: str, folder: str | Path | None = None, timeout: float | None = None, *, replace: bool = True
    ) -> DeltaInfo:
        """Load a delta, or the newest version of one; as `Server.load`."""
        check_delta_name(name)
        where = self.catalog.folder_of(name, folder)
        known = self.catalog.get(name)
        if known is not None and known.folder is None:
            raise DeltuneError(
                f"delta {name!r} was attached to the model before the server was made; give another name"
            )
        self._check_name(name, where)
        if not replace:
            self._check_free(name, where)
        return self._load(known or Entry(name, where), where, timeout, requested=True, replace=replace)

    def _load(
        self, entry: Entry, folder: Path, timeout: float | None, requested: bool = False, replace: bool = True
    ) -> DeltaInfo:
        """Load a delta, and wait for it."""
        done: Future[DeltaInfo] = Future()
        with self.context.wake:
            if self._closing is not None:
                raise self._closing
            self._loads.add(done)
        done.add_done_callback(self._loads.discard)
        self._read(entry, folder, done, requested, replace)
        try:
            return done.result(timeout)
        except TimeoutError:
            if not done.cancel():
                return done.result()  # it came at the last moment
            raise RequestTimeout(
                f"delta {entry.name!r} was not loaded within {timeout:g} seconds: those in memory were all needed, or "
                "others were read first"
            ) from None

    def _check_name(self, name: str, folder: Path) -> None:
        """Refuse a name beside those of the directory if there are enough of them."""
        root = self.catalog.root
        is_new = self.catalog.get(name) is None and (root is None or folder != root / name)
        if is_new and self.max_names is not None and self.catalog.names_beside_folders() >= self.max_names:
            raise DeltuneError(
                f"{self.max_names:,} deltas have another name than their folder already, which is the most that this "
                f"server keeps (max_names): take one of them out first, or ask a delta by the name of its folder"
            )

    def _check_free(self, name: str, folder: Path) -> None:
        """Refuse a name that a call of `load` has given to a delta, or that a folder of the directory has."""
        known = self.catalog.get(name)
        if known is not None and (known.requested or known.folder != folder):
            problem = f"the delta {name} is loaded already" if known.requested else f"there is another delta {name}"
            raise NameTaken(problem)

    def unload(self, name: str) -> None:
        """Take a delta out; as `Server.unload`."""

        folder_stays = self.catalog.has_folder(name)  # in this thread, since the disk may be slow

        def remove() -> None:
            entry = self.catalog.remove(name, folder_stays)
            self.forget(entry, UnknownDelta(f"delta {name!r} was unloaded before it answered"))

        self.context.call(remove)

    def refresh(self, timeout: float | None = None) -> None:
        """Look at the directory again; as `Server.refresh`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        changed, lost = self.catalog.look()
        for entry in lost:
            error = UnknownDelta(f"the folder of delta {entry.name!r} is gone")
            self.context.call(lambda entry=entry, error=error: self.forget(entry, error))  # type: ignore[misc]
        for entry in changed:
            assert entry.folder is not None
            try:
                self._load(entry, entry.folder, None if deadline is None else max(0.0, deadline - time.monotonic()))
            except (EngineClosed, RequestTimeout):
                raise
            except DeltuneError as error:
                logger.debug("delta %s stays as it is: %s", entry.name, error)  # `Entry.refuse` has logged it

    def _read(
        self,
        entry: Entry,
        folder: Path,
        done: Future[DeltaInfo] | None = None,
        requested: bool = False,
        replace: bool = True,
    ) -> None:
        """Read a delta in the reader's thread, and hand it to the engine's."""

        def read() -> None:
            if done is not None and done.done():
                return
            began = time.perf_counter()
            for attempt in range(READ_ATTEMPTS):
                seen = signature(folder)
                prepared = self._prepared(entry, folder, seen, again=done is not None)
                if isinstance(prepared, PreparedDelta) or signature(folder) == seen:
                    break
                time.sleep(0.05 * (attempt + 1))  # somebody is replacing the files
            with self.context.wake:
                self.load_seconds += time.perf_counter() - began
                if not self._ended:
                    self._arrivals.append(Arrival(entry, folder, prepared, seen, done, requested, replace))
                    self.context.wake.notify_all()

        try:
            self._reader.submit(read)
        except RuntimeError:
            raise EngineClosed("the server is closing and loads no deltas") from None

    def _prepared(self, entry: Entry, folder: Path, seen: Signature, again: bool) -> PreparedDelta | DeltuneError:
        """Read and check a delta, or say why it is refused; files that were refused are read `again` or not."""
        try:
            if not again and entry.error and seen == entry.refused:
                return entry.refusal
            facts = None if again else self._known_facts(entry, folder, seen)
            if facts is None:
                facts = read_facts(folder)
                self.backbones.check(facts, folder)
            backbone = self.backbones.for_head(self.backbones.head_of(facts))
            return backbone.prepare(entry.name, folder, facts, seen)
        except DeltuneError as error:
            return refusal(error)
        except Exception as error:
            logger.exception("delta %r cannot be read", entry.name)
            return DeltuneError(f"delta {entry.name!r} cannot be read: {error_summary(error)}")

    def _known_facts(self, entry: Entry, folder: Path, seen: Signature) -> FolderFacts | None:
        """Return the facts of a delta, which were checked when they were read; None if its files may have changed."""
        if any(file == "/spec.yaml" for file, *_ in seen):  # a run has others, too
            return None
        with self.context.wake:
            return entry.facts if entry.folder == folder and entry.seen == seen else None

    def refuse_loads(self, error: DeltuneError) -> None:
        """Fail the calls of `load` and `refresh` that wait, and all later ones; deltas still come for requests."""
        with self.context.wake:
            self._closing = error
            loads = list(self._loads)
        for done in loads:
            _fail(done, error)

    def close(self) -> None:
        """End the reader's thread, after `end`."""
        self._reader.shutdown(wait=True)

    # -- in the engine's thread: what has been read

    def begin_loads(self) -> None:
        """Begin to read deltas that requests wait for, in the order in which their tenants are to be served."""
        free = LOADS_AT_ONCE - len(self._loading)
        if free <= 0 or not self._waiting:
            return
        share = self.context.share
        waiting = [entry for entry in self._waiting if entry not in self._loading and entry.current is None]
        waiting.sort(key=lambda e: (share.of(e.waiting[0].tenant), e.waiting[0].submitted))
        for entry in waiting[:free]:
            self._loading.add(entry)
            assert entry.folder is not None
            try:
                self._read(entry, entry.folder)
            except EngineClosed as error:
                self._loading.discard(entry)
                self._fail_waiting(entry, error)

    def takes_requests(self, entry: Entry) -> bool:
        """Return whether a delta is in memory and a request can have it now."""
        return entry.current is not None and entry not in self._draining

    def wait(self, entry: Entry, job: Job) -> None:
        """Let a request wait until its delta is in memory."""
        entry.waiting.append(job)
        self._waiting.add(entry)

    def stop_waiting(self, entry: Entry, job: Job) -> None:
        """Note that a request waits no more, if it does."""
        with suppress(ValueError):
            entry.waiting.remove(job)
        if not entry.waiting:
            self._waiting.discard(entry)

    @property
    def has_arrivals(self) -> bool:
        """Whether a delta was read that can be taken now."""
        return any(not self._waits_for_room(arrival) for arrival in self._arrivals)

    def _entry_of(self, arrival: Arrival) -> Entry:
        """The entry that an arrival is for: another call of `load` may have made one of its name meanwhile."""
        return (self.catalog.get(arrival.entry.name) if arrival.requested else None) or arrival.entry

    def _may_be_attached(self, arrival: Arrival) -> bool:
        prepared, entry = arrival.prepared, self._entry_of(arrival)
        if not isinstance(prepared, PreparedDelta) or arrival.given_up or self._waits_for_room(arrival):
            return False
        return not self._is_served(prepared, entry)

    def _is_served(self, prepared: PreparedDelta, entry: Entry) -> bool:
        """Whether a version is in memory already, and takes requests."""
        current = entry.current
        return current is not None and current.version == prepared.facts.version and entry not in self._draining

    def _waits_for_room(self, arrival: Arrival) -> bool:
        prepared, entry = arrival.prepared, self._entry_of(arrival)
        if not isinstance(prepared, PreparedDelta) or arrival.given_up or self._is_served(prepared, entry):
            return False
        if self._has_room(prepared.bytes, entry) or self._victim(entry) is not None:
            return False
        return all(loaded.users for loaded in self.retired)

    def take_arrivals(self) -> None:
        """Attach the deltas that were read and have a place, and go on with the requests that waited for them."""
        with self.context.wake:
            arrivals, self._arrivals = self._arrivals, deque()
        if any(self._may_be_attached(arrival) for arrival in arrivals):
            self.context.wait_for_passes()
            self.drop_unneeded()
        left = []
        for arrival in arrivals:
            try:
                taken = self._take(arrival)
            except Exception as error:  # whoever waits for it must hear of it
                logger.exception("delta %r cannot be taken", arrival.entry.name)
                taken = True
                self._refuse(arrival, DeltuneError(f"delta {arrival.entry.name!r} failed: {error_summary(error)}"))
            if not taken:
                left.append(arrival)
        with self.context.wake:
            self._arrivals.extendleft(reversed(left))
        if not left:  # whoever needed their place has found another one
            draining, self._draining = self._draining, set()
            for entry in draining:
                self._place_waiting(entry)

    def _take(self, arrival: Arrival) -> bool:
        """Attach a delta that was read; return False if there is no place for it yet."""
        if arrival.given_up:
            return True
        arrival.entry = self._entry_of(arrival)
        if not arrival.replace:
            try:
                self._check_free(arrival.entry.name, arrival.folder)
            except NameTaken as error:
                if arrival.done is not None:
                    _fail(arrival.done, error)
                return True
        entry, prepared = arrival.entry, arrival.prepared
        if isinstance(prepared, DeltuneError):
            self._refuse(arrival, prepared)
            return True
        if not arrival.requested and self.catalog.get(entry.name) is not entry:
            self._refuse(arrival, UnknownDelta(f"delta {entry.name!r} was unloaded before it answered"))
            return True
        current = entry.current
        if current is not None and self._is_served(prepared, entry):
            self._serve(arrival, prepared, current)
            self._accept(arrival)
            return True
        if arrival.requested:
            try:
                self._check_name(entry.name, arrival.folder)
            except DeltuneError as error:
                self._refuse(arrival, error)
                return True
        if self.max_loaded_bytes is not None and prepared.bytes > self.max_loaded_bytes:
            self._refuse(
                arrival,
                DeltuneError(
                    f"delta {entry.name!r} has {prepared.bytes:,} bytes, and this server keeps "
                    f"{self.max_loaded_bytes:,} bytes of deltas in memory"
                ),
            )
            return True
        if not self._make_room(prepared.bytes, entry):
            return False
        began = time.perf_counter()
        try:
            loaded = prepared.backbone.attach(prepared)
        except DeltuneError as error:
            self._refuse(arrival, error)
            return True
        except Exception as error:
            logger.exception("delta %r cannot be attached", entry.name)
            self._refuse(arrival, DeltuneError(f"delta {entry.name!r} cannot be attached: {error_summary(error)}"))
            return True
        loaded.last_used = time.monotonic()
        with self.context.wake:
            self.load_seconds += time.perf_counter() - began
            self.loads += 1
            self._draining.discard(entry)
            self._resident.add(entry)
        self._serve(arrival, prepared, loaded)
        if current is not None:
            self._retire(current)
            self.drop_unneeded()
        self._accept(arrival)
        return True

    def _serve(self, arrival: Arrival, prepared: PreparedDelta, loaded: LoadedDelta) -> None:
        """Serve a version, new or not, as what the files of its folder say."""
        entry, root = arrival.entry, self.catalog.root
        with self.context.wake:
            entry.current, entry.folder, entry.requested = loaded, arrival.folder, entry.requested or arrival.requested
            entry.listed = root is not None and arrival.folder == root / entry.name
            entry.facts, entry.seen, entry.error, entry.refused = prepared.facts, arrival.seen, "", ()
            if self.catalog.get(entry.name) is not entry:
                self.catalog.put(entry)

    def _accept(self, arrival: Arrival) -> None:
        entry = arrival.entry
        if arrival.done is None:
            self._loading.discard(entry)
        self._place_waiting(entry)
        if arrival.done is not None:
            with suppress(InvalidStateError):  # who waited for it may have given up at this moment
                arrival.done.set_result(entry.info)

    def _place_waiting(self, entry: Entry) -> None:
        waiting, entry.waiting = entry.waiting, deque()
        self._waiting.discard(entry)
        for job in waiting:
            self.context.place(job)

    def _refuse(self, arrival: Arrival, error: DeltuneError) -> None:
        entry = arrival.entry
        with self.context.wake:  # the files of another folder say nothing about this one's
            if self.catalog.get(entry.name) is entry and entry.folder == arrival.folder:
                entry.refuse(error, arrival.seen)
                if entry.current is None:
                    entry.facts = None
        if arrival.done is not None:
            _fail(arrival.done, error)
        else:
            self._loading.discard(entry)
            self._fail_waiting(entry, error)

    def _fail_waiting(self, entry: Entry, error: DeltuneError) -> None:
        waiting, entry.waiting = entry.waiting, deque()
        self._waiting.discard(entry)
        for job in waiting:
            self.context.finish(job, error)

    # -- in the engine's thread: what is in memory

    def in_memory(self) -> list[LoadedDelta]:
        """Return the versions that take memory, those that go with their last request included."""
        return [*(entry.current for entry in list(self._resident) if entry.current is not None), *self.retired]

    def _has_room(self, more: int, entry: Entry) -> bool:
        """Whether a version fits into memory; the one that it replaces goes when it is there."""
        inside = [loaded for loaded in self.in_memory() if loaded is not entry.current]
        if self.max_loaded is not None and len(inside) + 1 > self.max_loaded:
            return False
        return self.max_loaded_bytes is None or sum(d.bytes for d in inside) + more <= self.max_loaded_bytes

    def _victim(self, replaced: Entry | None = None) -> Entry | None:
        """The entry whose version nobody needs, and was not needed for longest; one that was just loaded stays.

        `replaced` gets another version, and its old one serves until then.
        """
        idle = [
            e for e in self._resident
            if e is not replaced and e.current is not None and not e.current.users
            and (e.current.used or not e.waiting)
        ]  # fmt: skip
        return min(idle, key=lambda e: e.current.last_used if e.current else 0.0, default=None)

    def _make_room(self, more: int, entry: Entry) -> bool:
        """Drop versions from memory until another one fits; if all are needed, let one take no new requests."""
        while not self._has_room(more, entry):
            victim = self._victim(entry)
            if victim is None:
                others = self._resident - {entry}
                if others and not self._draining:
                    self._draining.add(min(others, key=lambda e: e.current.last_used if e.current else 0.0))
                return False
            self._evict(victim)
        return True

    def _surplus(self) -> Entry | None:
        """Return what has to be dropped where those in memory are too large: they grow when they are first used.

        Versions that were replaced do not count, since they go with their last requests.
        """
        if self.max_loaded_bytes is None:
            return None
        size = sum(entry.current.bytes for entry in self._resident if entry.current is not None)
        return self._victim() if size > self.max_loaded_bytes else None

    def _evict(self, entry: Entry) -> None:
        with self.context.wake:
            loaded, entry.current = entry.current, None
            self._draining.discard(entry)
            self._resident.discard(entry)
            self.evictions += 1
        if loaded is not None:
            self._detach(loaded)

    def _retire(self, loaded: LoadedDelta) -> None:
        if loaded.permanent:
            return
        loaded.retired = True
        self.retired.add(loaded)

    def release(self, loaded: LoadedDelta) -> None:
        """Note that one request less needs a version."""
        loaded.users -= 1
        loaded.last_used = time.monotonic()

    def drop_unneeded(self) -> None:
        """Detach the versions that were replaced and that no request needs any more, and keep memory within bounds."""
        if all(loaded.users for loaded in self.retired) and self._surplus() is None:
            return
        self.context.wait_for_passes()
        for loaded in [loaded for loaded in self.retired if not loaded.users]:
            self._detach(loaded)
            self.retired.discard(loaded)
        while (entry := self._surplus()) is not None:
            self._evict(entry)

    def _detach(self, loaded: LoadedDelta) -> None:
        """Detach a version, while no pass runs."""
        self.context.detached(loaded)
        try:
            loaded.backbone.detach(loaded)
        except Exception:  # the request that needed it last has its answer nevertheless
            logger.exception("delta %r cannot be detached", loaded.name)

    def forget(self, entry: Entry, error: DeltuneError) -> None:
        """Drop a delta that is no longer served."""
        self._fail_waiting(entry, error)
        loaded, entry.current = entry.current, None
        self._draining.discard(entry)
        self._resident.discard(entry)
        if loaded is not None:
            self._retire(loaded)
        self.drop_unneeded()
        self.context.forgotten()

    def end(self, error: DeltuneError) -> None:
        """Take no more deltas."""
        self.refuse_loads(error)
        with self.context.wake:
            self._ended = True
            self._arrivals.clear()


def _fail(done: Future[DeltaInfo], error: DeltuneError) -> None:
    """Give an error to who waits for a delta, if it has not given up."""
    with suppress(InvalidStateError):
        done.set_exception(error)
