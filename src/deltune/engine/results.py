"""Results of studies in one SQLite file: whole or not at all, safe for several writers, read again after any crash."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import socket
import sqlite3
import tempfile
import time
import uuid
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..disk import refused
from ..errors import DeltuneError

COLUMNS = {
    "works": ("name", "kind", "spec", "result", "error", "seconds", "finished", "sum"),
    "claims": ("name", "owner", "beat"),
}
BORN = (
    "CREATE TABLE works (name TEXT PRIMARY KEY, kind TEXT NOT NULL, spec TEXT NOT NULL, result TEXT, error TEXT, "
    "seconds REAL NOT NULL, finished REAL NOT NULL, sum TEXT NOT NULL) STRICT",
    "CREATE TABLE claims (name TEXT PRIMARY KEY, owner TEXT NOT NULL, beat REAL NOT NULL) STRICT",
)
COUNTED = (  # beats were times of the owner's clock, which another machine's need not agree with
    "DROP TABLE claims",
    "CREATE TABLE claims (name TEXT PRIMARY KEY, owner TEXT NOT NULL, beat INTEGER NOT NULL) STRICT",
)
MIGRATIONS: tuple[tuple[str, ...], ...] = (BORN, COUNTED)
"""Statements that bring a file of schema n to n + 1; 0 is an empty file."""
PATIENCE = 60.0  # seconds that an observer sees no new beat of a claim before it takes the claim over
BEAT = 15.0  # seconds between two beats
ENDINGS = ("-wal", "-journal", "")
"""SQLite's files of one database, by what they add to its name."""
COPIES = 5  # tries to copy a database while nobody writes


@dataclass(frozen=True)
class Row:
    """One piece of work that was done: its result, or the error it ended with."""

    name: str
    kind: str
    spec: dict[str, Any]
    result: dict[str, Any] | None
    error: str | None
    seconds: float


class Results:
    """The file of results, and beside it the folder of runs, PATH without its ending + `.runs`.

    A claim says that somebody is at work on something. Its owner counts a number up (`beat`); whoever wants the claim
    takes it when that number has stood still for a minute of the observer's own monotonic clock, so the clocks of two
    machines need not agree.

    Args:
        path: The file. It is made where it is missing, with its folder.
        read_only: Change nothing, not even an older schema. A file that is on a read-only disk, or in a folder that
            cannot be written, is read from a copy in the temporary folder, because SQLite would write beside it.

    Raises:
        DeltuneError: The file is no SQLite file or damaged, has a newer schema or is another program's; it cannot be
            read, or written where it is to be; no space is left.
    """

    def __init__(self, path: str | Path, read_only: bool = False) -> None:
        self.path = Path(path).expanduser().absolute()
        self.runs = self.path.with_name(f"{self.path.stem}.runs")
        self.owner = f"{_machine()} {os.getpid()} {uuid.uuid4().hex}"
        self._beat = 0
        self._seen: dict[str, tuple[str, int, float, float]] = {}
        with self._told(), contextlib.ExitStack() as opened:
            place = opened.enter_context(_readable(self.path)) if read_only else self.path
            place.parent.mkdir(parents=True, exist_ok=True)
            uri = f"{place.as_uri()}?mode={'rw' if read_only else 'rwc'}"
            self._open = sqlite3.connect(uri, uri=True, timeout=60, isolation_level=None, check_same_thread=False)
            opened.callback(self._open.close)
            self._open.text_factory = lambda raw: raw.decode("utf-8", "replace")  # the checksum finds what that changed
            self._open.execute("PRAGMA trusted_schema=OFF")
            self._check(whole=True)  # before anything is changed
            if read_only:
                self._open.execute("PRAGMA query_only=ON")
            else:
                self._open.execute("PRAGMA journal_mode=WAL")
                self._open.execute("PRAGMA synchronous=FULL")
                self._migrate()
            self._opened = opened.pop_all()

    def close(self) -> None:
        self._opened.close()

    def __enter__(self) -> Results:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def get(self, name: str) -> Row | None:
        """What was done under a name; None for what was not, or cannot be read (a warning says so)."""
        with self._told():
            found = self._open.execute("SELECT * FROM works WHERE name = ?", (name,)).fetchone()
        return None if found is None else self._row(found)

    def rows(self) -> list[Row]:
        """Everything that was done, in the order in which it was."""
        with self._told():
            found = self._open.execute("SELECT * FROM works ORDER BY finished, name").fetchall()
        return [row for row in map(self._row, found) if row is not None]

    def put(self, row: Row) -> None:
        """Write one row, in place of an earlier one, and give up our claim on it.

        A result stays where an error would take its place: somebody else did the work meanwhile.
        """
        error = None if row.error is None else row.error.encode(errors="backslashreplace").decode()
        values = (row.name, row.kind, _text(row.spec), None if row.result is None else _text(row.result), error)
        with self._told(), self._at_once():
            before = None if row.error is None else self.get(row.name)
            if before is None or before.error is not None:
                self._open.execute(
                    "INSERT OR REPLACE INTO works VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                    (*values, row.seconds, time.time(), _sum(*values)),
                )
            self._open.execute("DELETE FROM claims WHERE name = ? AND owner = ?", (row.name, self.owner))

    def claim(self, name: str, again: bool = False) -> bool:
        """Whether the work is ours to do from now on: nobody is at it, and it is not done; again: or failed."""
        with self._told(), self._at_once():
            done = self._open.execute("SELECT error FROM works WHERE name = ?", (name,)).fetchone()
            if done is not None and not (again and done[0] is not None) and self.get(name) is not None:
                return False
            held = self._open.execute("SELECT owner, beat FROM claims WHERE name = ?", (name,)).fetchone()
            if held is not None and held[0] != self.owner and self._alive(name, *held):
                return False
            self._seen.pop(name, None)
            self._beat += 1
            self._open.execute("INSERT OR REPLACE INTO claims VALUES (?, ?, ?)", (name, self.owner, self._beat))
            return True

    def _alive(self, name: str, owner: str, beat: int) -> bool:
        """Whether a claim's owner has to be waited for, by what was seen of it so far.

        The time between two looks counts as one beat at most: a file that could not be reached for a while, or an
        observer that was stopped, says nothing about the owner.
        """
        if _dead(owner):
            return False
        now = time.monotonic()
        before = self._seen.get(name)
        if before is None or before[:2] != (owner, beat):
            self._seen[name] = (owner, beat, now, 0.0)
            return True
        waited = before[3] + min(now - before[2], BEAT)
        self._seen[name] = (owner, beat, now, waited)
        return waited < PATIENCE

    def beat(self) -> None:
        """Show the other drivers that we are still at work on all that we claimed."""
        self._beat += 1
        with self._told():
            self._open.execute("UPDATE claims SET beat = ? WHERE owner = ?", (self._beat, self.owner))

    def release(self, name: str | None = None) -> None:
        """Give up a claim of ours; without a name, all."""
        with self._told():
            self._open.execute("DELETE FROM claims WHERE owner = ? AND name = coalesce(?, name)", (self.owner, name))

    def _check(self, whole: bool = False) -> int:
        """The schema of the file. whole: also look for pages that are damaged, which takes a pass over the file.

        Errors: a newer schema, another program's file, a damaged one.
        """
        (version,) = self._open.execute("PRAGMA user_version").fetchone()
        (tables,) = self._open.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if version == 0 and tables:
            raise DeltuneError(f"{self.path} is a database of another program; choose another file")
        (code,) = self._open.execute("SELECT count(*) FROM sqlite_master WHERE type IN ('view', 'trigger')").fetchone()
        for table, columns in COLUMNS.items() if version else ():
            present = [name for (_, name, *_) in self._open.execute(f"PRAGMA table_info({table})")]
            if code or not {*columns} <= {*present}:
                raise DeltuneError(
                    f"{self.path} is a database of another program or damaged (a file of results has a table {table} "
                    f"of {', '.join(columns)}, and no views or triggers); choose another file"
                )
        if not 0 <= version <= len(MIGRATIONS):
            known = f"this deltune knows {len(MIGRATIONS)} at most; use a newer one"
            raise DeltuneError(f"{self.path} has schema {version}, {known}")
        if whole:
            (problem,) = self._open.execute("PRAGMA quick_check(1)").fetchone()
            if problem != "ok":
                raise self._damaged(problem)
        return int(version)

    def _migrate(self) -> None:
        with self._at_once():
            version = self._check()
            for statements in MIGRATIONS[version:]:
                for statement in statements:
                    self._open.execute(statement)
            self._open.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")

    def _row(self, values: tuple[Any, ...]) -> Row | None:
        name, kind, spec, result, error, seconds, _, total = values
        try:
            if _sum(name, kind, spec, result, error) != total:
                raise ValueError("its checksum is another")
            if (result is None) == (not error):
                raise ValueError("it has to have a result or an error, and not both")
            return Row(name, kind, _object(spec), None if result is None else _object(result), error, float(seconds))
        except (ValueError, TypeError, RecursionError) as problem:
            warnings.warn(f"row {name} of {self.path} is corrupt ({problem}); it counts as not there", stacklevel=3)
            return None

    @contextlib.contextmanager
    def _at_once(self) -> Iterator[None]:
        """One transaction, the only writer meanwhile."""
        self._open.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            with contextlib.suppress(sqlite3.Error):  # a full disk has rolled back already
                self._open.execute("ROLLBACK")
            raise
        self._open.execute("COMMIT")

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            if any(sign in str(error) for sign in ("not a database", "malformed", "no such table", "no such column")):
                raise self._damaged(str(error)) from error
            raise refused(self.path, error, f"finished runs are whole in {self.runs}") from error

    def _damaged(self, why: str) -> DeltuneError:
        why = " ".join(why.split())
        todo = f"move it away and run the same command again: finished runs are read from {self.runs}"
        return DeltuneError(f"{self.path} is no results file or is damaged ({why}); {todo}")


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[Path]:
    """A database that SQLite can open and write beside: the file itself, or a copy that is gone afterwards."""
    if os.access(path, os.W_OK) and os.access(path.parent, os.W_OK):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="deltune-") as folder:
        for _ in range(COPIES):
            before = _state(path)
            for ending in ENDINGS:
                source, target = (Path(f"{one}{ending}") for one in (path, Path(folder) / path.name))
                target.unlink(missing_ok=True)
                if source.exists() or not ending:
                    shutil.copyfile(source, target)
            if _state(path) == before:
                break
        else:
            raise DeltuneError(f"{path} is being written all the time; copy it while no study runs, and read the copy")
        yield Path(folder) / path.name


def _state(path: Path) -> list[tuple[int, int] | None]:
    """Size and time of a database's files, which tell whether somebody wrote them."""
    files = [Path(f"{path}{ending}") for ending in ENDINGS]
    return [(file.stat().st_size, file.stat().st_mtime_ns) if file.exists() else None for file in files]


def _object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("it is no JSON object")
    if "\\ud" in text.lower():  # half of a character, perhaps, which no file could be written with
        _text(value).encode()
    return value


def _text(value: Mapping[str, Any]) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def _sum(*values: str | None) -> str:
    return hashlib.sha256("\0".join(value or "" for value in values).encode()).hexdigest()


def _machine() -> str:
    """This machine as it is since it was started, and where it tells them apart, its container: one name of PIDs."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return "/".join(parts)


def _dead(owner: str) -> bool:
    """Whether an owner of this machine has ended."""
    machine, process, _ = (*owner.split(" "), "", "")[:3]
    if machine != _machine() or not process.isdecimal():
        return False
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        return False
    return False
