"""The deltas of a server by name: what its directory has, what their files say, and which version is in memory."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path

from ...errors import DeltuneError, counted, error_summary, unknown_name
from ...files import user_path
from ..errors import UnknownDelta, refusal
from .backbone import LoadedDelta
from .folders import DeltasFolder, FolderFacts, Signature, read_facts, signature
from .jobs import Job
from .requests import DeltaInfo

logger = logging.getLogger(__name__)

NAMED_FOLDERS = 8
"""Folders without a delta that a line of the log names."""


class State(Enum):
    """Where the version of a delta is that new requests get."""

    ON_DISK = auto()
    READING = auto()  # for requests that wait
    SERVING = auto()  # in memory
    DRAINING = auto()  # in memory, and takes no new requests, as another delta needs its place


@dataclass(eq=False)
class Entry:
    """A delta by its name: its folder, and the version in memory."""

    name: str
    folder: Path | None  # its folder; None if it was attached before the server was made
    facts: FolderFacts | None = None  # what its files said when they were last read
    seen: Signature = ()  # the signature of its files at that time
    state: State = State.ON_DISK
    current: LoadedDelta | None = None  # the version in memory, or None
    waiting: deque[Job] = field(default_factory=deque)  # requests that wait until it is in memory
    error: str = ""  # why its newest files were refused, or "". Clients read it, so that it has no calls of Python
    in_python: str = ""  # what a caller of Python can do about it
    refused: Signature = ()  # the signature of the files that were refused
    listed: bool = False  # whether it is in the server's directory, so that it goes when its folder goes
    requested: bool = False  # whether a call of `load` has brought it

    def refuse(self, error: DeltuneError, seen: Signature) -> None:
        """Note and log why its newest files were refused; the version in memory goes on."""
        reason = error.without_python
        if seen != self.refused or reason != self.error:
            goes_on = "" if self.current is None else f"; version {self.current.version} goes on"
            logger.warning("the files of delta %s are refused: %s%s", self.name, error_summary(reason), goes_on)
        self.error, self.in_python, self.refused = reason, error.in_python, seen

    @property
    def refusal(self) -> DeltuneError:
        """Why its newest files were refused, as an error."""
        return DeltuneError(self.error, self.in_python)

    @property
    def info(self) -> DeltaInfo:
        """The facts that clients see."""
        current = self.current
        facts = current or self.facts
        folder = "" if self.folder is None else str(self.folder)
        if facts is None:
            return DeltaInfo(self.name, folder, "", 0, (), error=self.error, requested=self.requested)
        size, loaded_at = (0, None) if current is None else (current.bytes, current.loaded_at)
        return DeltaInfo(
            self.name, folder, facts.method, facts.parameters, facts.tasks, facts.labels, facts.version, size,
            loaded_at, self.error, facts.trained.max_length, loaded=current is not None, requested=self.requested,
        )  # fmt: skip


class Catalog:
    """All deltas that a server knows. Any thread may call it.

    Of every entry there is a version in memory, or it is known what its files say, or why they were refused. Files are
    read by those who look at the directory or load a delta, and by nobody who asks.
    """

    def __init__(
        self,
        root: DeltasFolder | None,
        attached: dict[str, LoadedDelta],
        check: Callable[[FolderFacts, Path], None],
        lock: threading.RLock,
    ) -> None:
        self.root = root
        # a change replaces it, since another thread may be going through it
        self.entries = {
            name: Entry(name, None, state=State.SERVING, current=loaded) for name, loaded in attached.items()
        }
        self._gone: dict[str, Entry] = {}  # unloaded by name, until they are loaded again or their folder goes
        self._ignored: dict[str, str] = {}  # folders without a delta, and why
        self._check, self._lock = check, lock

    def get(self, name: str | None) -> Entry | None:
        """Return the entry of a name, or None; of None, which is the base model, too."""
        return None if name is None else self.entries.get(name)

    def known(self, name: str | None) -> Entry | None:
        """Return the entry of a name, or None for the base model; an error where there is none."""
        entry = self.get(name)
        if entry is None and name is not None:
            raise UnknownDelta(unknown_name("delta", name, self.entries))
        return entry

    def put(self, entry: Entry) -> None:
        with self._lock:
            self._gone.pop(entry.name, None)
            self.entries = {**self.entries, entry.name: entry}

    def remove(self, name: str, folder_stays: bool = True) -> Entry:
        """Take a delta out, and leave it out though its folder stays."""
        with self._lock:
            entry = self.known(name)
            assert entry is not None
            self.entries = {other: e for other, e in self.entries.items() if other != name}
            if self.root is not None and folder_stays:
                self._gone[name] = entry
        return entry

    def unloaded(self) -> list[str]:
        """Return the names that were taken out, while their folders are still in the directory."""
        with self._lock:
            return sorted(self._gone)

    def names_beside_folders(self) -> int:
        """Return how many deltas have another name than their folder in the directory, which only `load` gives."""
        return sum(not entry.listed and entry.folder is not None for entry in self.entries.values())

    def folder_of(self, name: str, folder: str | Path | None) -> Path:
        """Return the folder that a delta is to be loaded from."""
        if folder is not None:
            where = user_path(folder, "folder")
            listed = None if self.root is None else self.root.locate(name)
            return listed if listed is not None and listed.resolve() == where.resolve() else where
        known = self.entries.get(name) or self._gone.get(name)
        if known is not None and known.folder is not None:
            return known.folder
        if self.root is None:
            raise UnknownDelta(f"delta {name!r} is not known, and this server has no folder of deltas: give its folder")
        if name not in (folders := self.root.scan().deltas):
            raise UnknownDelta(unknown_name("delta", name, folders))
        return folders[name]

    def look(self) -> tuple[list[Entry], list[Entry]]:
        """Look at the directory again, and read the facts about new folders and about changed ones."""
        assert self.root is not None
        listed = [entry for entry in self.entries.values() if entry.listed]  # before the scan: others are newer than it
        listing = self.root.scan()
        folders = listing.deltas
        self._note_ignored(listing.ignored)
        changed: list[Entry] = []
        stale: list[tuple[Entry, Path]] = []
        with self._lock:
            before = [(e, e.folder) for e in self.entries.values() if not e.listed or e.name in folders]
        # without the lock, which requests need: the disk may be slow
        signatures = [(entry, folder, signature(folder)) for entry, folder in before if folder is not None]
        with self._lock:
            for name in [name for name in self._gone if name not in folders]:
                del self._gone[name]
            known = self.entries.keys() | self._gone.keys()
            new = [Entry(name, folder, listed=True) for name, folder in folders.items() if name not in known]
            for entry, folder, now in signatures:
                if entry.folder != folder or now == (entry.refused if entry.error else entry.seen):
                    continue
                if entry.current is not None:
                    changed.append(entry)
                else:
                    stale.append((entry, folder))
            lost = [e for e in listed if e.listed and e.name not in folders and self.entries.get(e.name) is e]
            if lost:
                gone = {entry.name for entry in lost}
                self.entries = {n: e for n, e in self.entries.items() if n not in gone}
        for entry, folder in stale:
            self._read_facts(entry, folder)
        for entry in new:  # it can be asked as soon as its facts are known
            self._read_facts(entry, folders[entry.name])
            with self._lock:
                if entry.name not in self.entries and entry.name not in self._gone:
                    self.entries = {**self.entries, entry.name: entry}
        return changed, lost

    def _read_facts(self, entry: Entry, folder: Path) -> None:
        """Read what the files of a delta that is not in memory say, or note why they are refused."""
        seen = signature(folder)
        try:
            facts, error = read_facts(folder), None
            self._check(facts, folder)
        except DeltuneError as reason:
            facts, error = None, refusal(reason)
        with self._lock:
            if entry.current is not None or entry.folder != folder:
                return  # the engine has attached a version meanwhile
            entry.facts = facts
            if error is None:
                entry.seen, entry.error, entry.refused = seen, "", ()
            else:
                entry.refuse(error, seen)

    def _note_ignored(self, ignored: dict[str, str]) -> None:
        """Keep why folders hold no delta, and log those that were not known."""
        new = [name for name in ignored if name not in self._ignored]
        self._ignored = ignored
        if new:
            reasons = "; ".join(error_summary(ignored[name]) for name in new[:NAMED_FOLDERS])
            more = "; …" if len(new) > NAMED_FOLDERS else ""
            where = self.root and self.root.path
            logger.warning("%s without a delta in %s: %s%s", counted(len(new), "folder"), where, reasons, more)

    def ignored_folders(self) -> dict[str, str]:
        """Return the folders in the directory that held no delta when it was last looked at, and why."""
        return dict(self._ignored)

    def infos(self) -> list[DeltaInfo]:
        """Return what is known of each delta, sorted by name."""
        with self._lock:
            return [entry.info for _, entry in sorted(self.entries.items())]

    def facts(self, entry: Entry) -> LoadedDelta | FolderFacts:
        """Return what is known of a delta: its version in memory, or else what its files say."""
        with self._lock:
            if entry.current is not None:
                return entry.current
            if entry.error or entry.facts is None:
                raise entry.refusal
            return entry.facts
