"""The way of deltas into memory and out: read in a thread of their own, attached while no pass runs.

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
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ...errors import DeltuneError, error_summary
from ..errors import EngineClosed, NameTaken, RequestTimeout, UnknownDelta, refusal
from .backbone import Backbones, LoadedDelta, PreparedDelta
from .catalog import Catalog, Entry, State
from .folders import Signature, check_delta_name, read_facts, signature
from .jobs import Job
from .queue import FairShare
from .requests import DeltaInfo

logger = logging.getLogger(__name__)

READ_ATTEMPTS = 3
"""Attempts to read a delta whose files change meanwhile."""
LOADS_AT_ONCE = 2
"""Deltas that are read ahead; more would take memory before there is a place for them."""


@dataclass(eq=False)
class Arrival:
    """A delta on its way from its folder to the engine's thread."""

    entry: Entry
    folder: Path
    # the result of `load`, or None if requests wait for it. It is cancelled where nobody waits any more
    done: Future[DeltaInfo] | None = None
    requested: bool = False  # whether it comes by a call of `load`, and not since its files have changed
    replace: bool = True  # whether it may take the place of another one that such a call has loaded
    prepared: PreparedDelta | DeltuneError = field(init=False)  # what was read, or why it was refused
    seen: Signature = ()  # the signature of its files before they were read

    @property
    def given_up(self) -> bool:
        """Its call of `load` has ended, by a timeout for instance."""
        return self.done is not None and self.done.done()


class Lifecycle:
    """Loads, replaces and drops deltas."""

    def __init__(
        self,
        catalog: Catalog,
        backbones: Backbones,
        max_loaded: int | None,
        max_loaded_bytes: int | None,
        max_names: int | None,
        *,
        wake: threading.Condition,
        place: Callable[[Job], None],
        finish: Callable[[Job, DeltuneError], None],
        before_detach: Callable[[LoadedDelta], None],
    ) -> None:
        self.catalog, self.backbones = catalog, backbones
        self.max_loaded, self.max_loaded_bytes, self.max_names = max_loaded, max_loaded_bytes, max_names
        self._wake = wake  # of the engine's thread; its lock guards the catalog
        self._place, self._finish = place, finish
        self._before_detach = before_detach
        # versions that another one has replaced, or nothing, and that are still attached
        self.retired: set[LoadedDelta] = set()
        self.loads = self.evictions = 0  # how many were attached since the start, and dropped to make room
        self.load_seconds = 0.0  # the time spent reading and attaching since the start
        self._arrivals: deque[Arrival] = deque()
        self._may_take = False  # whether a place may be free for one of them
        self._loads: set[Future[DeltaInfo]] = set()  # of `load` and `refresh`, until they are done
        self._closing: DeltuneError | None = None  # why deltas are loaded for requests alone
        self._active: set[Entry] = set()  # those in memory and those that requests wait for, so that no step sees all
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="deltune-reader")

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
        entry, done = known or Entry(name, where), Future[DeltaInfo]()
        return self._load(Arrival(entry, where, done, requested=True, replace=replace), done, timeout)

    def _load(self, arrival: Arrival, done: Future[DeltaInfo], timeout: float | None) -> DeltaInfo:
        """Load a delta, and wait for it."""
        with self._wake:
            if self._closing is not None:
                raise self._closing
            self._loads.add(done)
        done.add_done_callback(self._loads.discard)
        self._read(arrival)
        try:
            return done.result(timeout)
        except TimeoutError:
            if not done.cancel():
                return done.result()  # it came at the last moment
            raise RequestTimeout(
                f"delta {arrival.entry.name!r} was not loaded within {timeout:g} seconds: those in memory were all "
                "needed, or others were read first"
            ) from None

    def _check_name(self, name: str, folder: Path) -> None:
        """Refuse a further name that is no folder's of the directory if there are enough of them."""
        root = self.catalog.root
        is_new = self.catalog.get(name) is None and (root is None or folder != root.locate(name))
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

    def refresh(self, forget: Callable[[Entry], None], timeout: float | None = None) -> None:
        """Look at the directory again; as `Server.refresh`. `forget` drops an entry in the engine's thread."""
        deadline = None if timeout is None else time.monotonic() + timeout
        changed, lost = self.catalog.look()
        for entry in lost:
            forget(entry)
        for entry in changed:
            assert entry.folder is not None
            done = Future[DeltaInfo]()
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                self._load(Arrival(entry, entry.folder, done), done, left)
            except (EngineClosed, RequestTimeout):
                raise
            except DeltuneError as error:
                logger.debug("delta %s stays as it is: %s", entry.name, error)  # `Entry.refuse` has logged it

    def _read(self, arrival: Arrival) -> None:
        """Read a delta in the reader's thread, and hand it to the engine's."""

        def read() -> None:
            if arrival.given_up:
                return
            began = time.perf_counter()
            for attempt in range(READ_ATTEMPTS):
                arrival.seen = signature(arrival.folder)
                arrival.prepared = self._prepared(arrival.entry, arrival.folder, arrival.seen)
                if isinstance(arrival.prepared, PreparedDelta) or signature(arrival.folder) == arrival.seen:
                    break
                time.sleep(0.05 * (attempt + 1))  # somebody is replacing the files
            with self._wake:
                self.load_seconds += time.perf_counter() - began
                self._arrivals.append(arrival)
                self._may_take = True
                self._wake.notify_all()

        try:
            self._reader.submit(read)
        except RuntimeError:
            raise EngineClosed("the server is closing and loads no deltas") from None

    def _prepared(self, entry: Entry, folder: Path, seen: Signature) -> PreparedDelta | DeltuneError:
        """Read and check a delta, or say why it is refused."""
        try:
            facts = read_facts(folder)
            self.backbones.check(facts, folder)
            backbone = self.backbones.for_head(self.backbones.head_of(facts))
            return backbone.prepare(entry.name, folder, facts, seen)
        except DeltuneError as error:
            return refusal(error)
        except Exception as error:
            logger.exception("delta %r cannot be read", entry.name)
            return DeltuneError(f"delta {entry.name!r} cannot be read: {error_summary(error)}")

    def refuse_loads(self, error: DeltuneError) -> None:
        """Fail the calls of `load` and `refresh` that wait, and all later ones; deltas still come for requests."""
        with self._wake:
            self._closing = error
            loads = list(self._loads)
        for done in loads:
            _fail(done, error)

    def close(self) -> None:
        self._reader.shutdown(wait=True)
        self._arrivals.clear()

    # -- in the engine's thread: what has been read

    def begin_loads(self, share: FairShare) -> None:
        """Begin to read deltas that requests wait for, in the order in which their tenants are to be served."""
        free = LOADS_AT_ONCE - sum(entry.state is State.READING for entry in self._active)
        waiting = [entry for entry in self._active if entry.waiting and entry.state is State.ON_DISK]
        waiting.sort(key=lambda e: (share.of(e.waiting[0].tenant), e.waiting[0].submitted))
        for entry in waiting[: max(0, free)]:
            assert entry.folder is not None
            entry.state = State.READING
            try:
                self._read(Arrival(entry, entry.folder))
            except EngineClosed as error:
                self._fail_waiting(entry, error)

    def wait(self, entry: Entry, job: Job) -> None:
        """Let a request wait until its delta is in memory."""
        entry.waiting.append(job)
        self._active.add(entry)

    def stop_waiting(self, entry: Entry, job: Job) -> None:
        """Note that a request waits no more, if it does."""
        with suppress(ValueError):
            entry.waiting.remove(job)
        self._settle(entry)

    def _settle(self, entry: Entry) -> None:
        """Let no step look at an entry that is neither in memory nor waited for."""
        if entry.state is State.ON_DISK and not entry.waiting:
            self._active.discard(entry)

    @property
    def has_arrivals(self) -> bool:
        """A delta was read, and something has changed since its place was looked for."""
        return self._may_take and len(self._arrivals) > 0

    def _entry_of(self, arrival: Arrival) -> Entry:
        """The entry that an arrival is for: another call of `load` may have made one of its name meanwhile."""
        return (self.catalog.get(arrival.entry.name) if arrival.requested else None) or arrival.entry

    def _is_served(self, prepared: PreparedDelta, entry: Entry) -> bool:
        """Say that a version is in memory already, and takes requests."""
        current = entry.current
        return current is not None and current.version == prepared.facts.version and entry.state is not State.DRAINING

    def take_arrivals(self) -> None:
        """Attach the deltas that were read and have a place, and go on with the requests that waited for them."""
        with self._wake:
            arrivals, self._arrivals, self._may_take = self._arrivals, deque(), False
        if arrivals:
            self.drop_unneeded()
        left = [arrival for arrival in arrivals if not self._take(arrival)]
        with self._wake:
            self._arrivals.extendleft(reversed(left))
        if not left:  # whoever needed their place has found another one
            for entry in [entry for entry in self._active if entry.state is State.DRAINING]:
                entry.state = State.SERVING
                self._place_waiting(entry)

    def _take(self, arrival: Arrival) -> bool:
        """Serve a delta that was read, or say why not; return False if there is no place for it yet."""
        if arrival.given_up:
            return True
        entry = arrival.entry = self._entry_of(arrival)
        before = entry.current
        try:
            prepared = self._checked(arrival)
            if before is not None and self._is_served(prepared, entry):
                loaded = before
            elif self._make_room(prepared.bytes, entry):
                loaded = self._attach(prepared)
            else:
                return False
        except DeltuneError as error:
            self._refuse(arrival, error)
            return True
        except Exception as error:  # whoever waits for it must hear of it
            logger.exception("delta %r cannot be attached", entry.name)
            self._refuse(arrival, DeltuneError(f"delta {entry.name!r} cannot be attached: {error_summary(error)}"))
            return True
        self._serve(arrival, prepared, loaded)
        if before is not None and loaded is not before:
            self._retire(before)
            self.drop_unneeded()
        self._place_waiting(entry)
        if arrival.done is not None:
            with suppress(InvalidStateError):  # who waited for it may have given up at this moment
                arrival.done.set_result(entry.info)
        return True

    def _checked(self, arrival: Arrival) -> PreparedDelta:
        """Return what was read, if it may be served under its name."""
        entry, prepared = arrival.entry, arrival.prepared
        if not arrival.replace:
            self._check_free(entry.name, arrival.folder)
        if isinstance(prepared, DeltuneError):
            raise prepared
        if not arrival.requested and self.catalog.get(entry.name) is not entry:
            raise UnknownDelta(f"delta {entry.name!r} was unloaded before it answered")
        if self._is_served(prepared, entry):
            return prepared
        if arrival.requested:
            self._check_name(entry.name, arrival.folder)
        if self.max_loaded_bytes is not None and prepared.bytes > self.max_loaded_bytes:
            raise DeltuneError(
                f"delta {entry.name!r} has {prepared.bytes:,} bytes, and this server keeps {self.max_loaded_bytes:,} "
                "bytes of deltas in memory"
            )
        return prepared

    def _attach(self, prepared: PreparedDelta) -> LoadedDelta:
        began = time.perf_counter()
        loaded = prepared.backbone.attach(prepared)
        loaded.last_used = time.monotonic()
        with self._wake:
            self.load_seconds += time.perf_counter() - began
            self.loads += 1
        return loaded

    def _serve(self, arrival: Arrival, prepared: PreparedDelta, loaded: LoadedDelta) -> None:
        """Serve a version, new or not, as what the files of its folder say."""
        entry, root = arrival.entry, self.catalog.root
        with self._wake:
            entry.current, entry.folder, entry.requested = loaded, arrival.folder, entry.requested or arrival.requested
            entry.state = State.SERVING
            self._active.add(entry)
            entry.listed = root is not None and arrival.folder == root.locate(entry.name)
            entry.facts, entry.seen, entry.error, entry.refused = prepared.facts, arrival.seen, "", ()
            if self.catalog.get(entry.name) is not entry:
                self.catalog.put(entry)

    def _place_waiting(self, entry: Entry) -> None:
        waiting, entry.waiting = entry.waiting, deque()
        for job in waiting:
            self._place(job)

    def _refuse(self, arrival: Arrival, error: DeltuneError) -> None:
        entry = arrival.entry
        with self._wake:  # the files of another folder say nothing about this one's, and a taken name nothing of files
            is_known = self.catalog.get(entry.name) is entry and entry.folder == arrival.folder
            if is_known and not isinstance(error, NameTaken):
                entry.refuse(error, arrival.seen)
                if entry.current is None:
                    entry.facts = None
        if arrival.done is not None:
            _fail(arrival.done, error)
        else:
            self._fail_waiting(entry, error)

    def _fail_waiting(self, entry: Entry, error: DeltuneError) -> None:
        waiting, entry.waiting = entry.waiting, deque()
        if entry.state is State.READING:
            entry.state = State.ON_DISK
        for job in waiting:
            self._finish(job, error)
        self._settle(entry)

    # -- in the engine's thread: what is in memory

    def in_memory(self) -> list[LoadedDelta]:
        """Return the versions that take memory, those that go with their last request included."""
        return [*(loaded for _, loaded in self._resident()), *self.retired]

    def _resident(self) -> list[tuple[Entry, LoadedDelta]]:
        """The entries in memory with their versions, but for what was attached before."""
        return [(e, e.current) for e in list(self._active) if e.current is not None and not e.current.permanent]

    def _has_room(self, more: int, entry: Entry) -> bool:
        """Say that a version fits into memory; the version that it replaces goes when it is there."""
        inside = [loaded for loaded in self.in_memory() if loaded is not entry.current]
        if self.max_loaded is not None and len(inside) + 1 > self.max_loaded:
            return False
        return self.max_loaded_bytes is None or sum(d.bytes for d in inside) + more <= self.max_loaded_bytes

    def _victim(self, replaced: Entry | None = None) -> Entry | None:
        """The entry, but for the `replaced` one, whose used version nobody needs and was not needed for longest."""
        idle = [
            (loaded.last_used, entry)
            for entry, loaded in self._resident()
            if entry is not replaced and not loaded.users and (loaded.used or not entry.waiting)
        ]
        return min(idle, key=lambda pair: pair[0])[1] if idle else None

    def _make_room(self, more: int, entry: Entry) -> bool:
        """Drop versions from memory until another one fits; if all are needed, let one take no new requests."""
        while not self._has_room(more, entry):
            victim = self._victim(entry)
            if victim is None:
                others = [(loaded.last_used, other) for other, loaded in self._resident() if other is not entry]
                if others and all(other.state is not State.DRAINING for other in self._active):
                    min(others, key=lambda pair: pair[0])[1].state = State.DRAINING
                return False
            self._evict(victim)
        return True

    def _surplus(self) -> Entry | None:
        """Return what has to be dropped where those in memory are too large: they grow when they are first used."""
        if self.max_loaded_bytes is None:
            return None
        size = sum(loaded.bytes for _, loaded in self._resident())
        return self._victim() if size > self.max_loaded_bytes else None

    def _evict(self, entry: Entry) -> None:
        with self._wake:
            loaded = self._take_out(entry)
            self.evictions += 1
        if loaded is not None:
            self._detach(loaded)

    def _take_out(self, entry: Entry) -> LoadedDelta | None:
        """Take the version of an entry out of it, and return it."""
        loaded, entry.current, entry.state = entry.current, None, State.ON_DISK
        self._settle(entry)
        return loaded

    def _retire(self, loaded: LoadedDelta) -> None:
        if not loaded.permanent:
            self.retired.add(loaded)

    def release(self, loaded: LoadedDelta) -> None:
        """Note that one request less needs a version."""
        loaded.users -= 1
        loaded.last_used, self._may_take = time.monotonic(), True

    def drop_unneeded(self) -> None:
        """Detach the versions that were replaced and that no request needs any more, and keep memory within bounds."""
        for loaded in [loaded for loaded in self.retired if not loaded.users]:
            self._detach(loaded)
            self.retired.discard(loaded)
        while (entry := self._surplus()) is not None:
            self._evict(entry)

    def _detach(self, loaded: LoadedDelta) -> None:
        self._before_detach(loaded)
        try:
            loaded.backbone.detach(loaded)
        except Exception:  # the request that needed it last has its answer nevertheless
            logger.exception("delta %r cannot be detached", loaded.name)

    def forget(self, entry: Entry, error: DeltuneError) -> None:
        """Drop a delta that is no longer served, and tell requests that wait for it why."""
        self._fail_waiting(entry, error)
        loaded = self._take_out(entry)
        if loaded is not None:
            self._retire(loaded)
        self.drop_unneeded()


def _fail(done: Future[DeltaInfo], error: DeltuneError) -> None:
    """Give an error to who waits for a delta, if it has not given up."""
    with suppress(InvalidStateError):
        done.set_exception(error)
