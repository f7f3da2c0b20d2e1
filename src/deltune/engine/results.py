"""Results of studies in one SQLite file: whole or not at all, safe for several writers, read again after any crash."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import sqlite3
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..disk import refused
from ..errors import DeltuneError

BORN = (
    "CREATE TABLE works (name TEXT PRIMARY KEY, kind TEXT NOT NULL, spec TEXT NOT NULL, result TEXT, error TEXT, "
    "seconds REAL NOT NULL, finished REAL NOT NULL, sum TEXT NOT NULL) STRICT",
    "CREATE TABLE claims (name TEXT PRIMARY KEY, owner TEXT NOT NULL, beat REAL NOT NULL) STRICT",
)
MIGRATIONS: tuple[tuple[str, ...], ...] = (BORN,)
"""Statements that bring a file of schema n to n + 1; 0 is an empty file."""
PATIENCE = 60.0  # seconds without a beat after which a claim is nobody's


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

    A claim says that somebody is at work on something; one whose owner has not been heard of for a minute is void.
    Errors (DeltuneError): no SQLite file, a newer schema, another program's file, no space left.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser().absolute()
        self.runs = self.path.with_name(f"{self.path.stem}.runs")
        self.owner = f"{socket.gethostname()} {os.getpid()} {time.time_ns()}"
        with self._told():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._open = sqlite3.connect(self.path, timeout=60, isolation_level=None, check_same_thread=False)
            self._check()  # before anything is changed
            self._open.execute("PRAGMA journal_mode=WAL")
            self._open.execute("PRAGMA synchronous=FULL")
            self._migrate()

    def close(self) -> None:
        self._open.close()

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
        """Write one row, in place of an earlier one, and give up the claim on it."""
        values = (row.name, row.kind, _text(row.spec), None if row.result is None else _text(row.result), row.error)
        with self._told(), self._at_once():
            self._open.execute(
                "INSERT OR REPLACE INTO works VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (*values, row.seconds, time.time(), _sum(*values)),
            )
            self._open.execute("DELETE FROM claims WHERE name = ?", (row.name,))

    def forget(self, name: str) -> None:
        """Remove a row, so that it is done again."""
        with self._told():
            self._open.execute("DELETE FROM works WHERE name = ?", (name,))

    def claim(self, name: str, again: bool = False) -> bool:
        """Whether the work is ours to do from now on: nobody is at it, and it is not done; again: or failed."""
        now = time.time()
        with self._told(), self._at_once():
            done = self._open.execute("SELECT error FROM works WHERE name = ?", (name,)).fetchone()
            if done is not None and not (again and done[0] is not None) and self.get(name) is not None:
                return False
            held = self._open.execute("SELECT owner, beat FROM claims WHERE name = ?", (name,)).fetchone()
            if held is not None and held[0] != self.owner and now - held[1] < PATIENCE and not _dead(held[0]):
                return False
            self._open.execute("INSERT OR REPLACE INTO claims VALUES (?, ?, ?)", (name, self.owner, now))
            return True

    def beat(self) -> None:
        """All our claims hold for another minute."""
        with self._told():
            self._open.execute("UPDATE claims SET beat = ? WHERE owner = ?", (time.time(), self.owner))

    def release(self, name: str | None = None) -> None:
        """Give up a claim of ours; without a name, all."""
        with self._told():
            self._open.execute("DELETE FROM claims WHERE owner = ? AND name = coalesce(?, name)", (self.owner, name))

    def _check(self) -> int:
        """The schema of the file. Errors: a newer one, another program's file."""
        (version,) = self._open.execute("PRAGMA user_version").fetchone()
        (tables,) = self._open.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if version > len(MIGRATIONS):
            known = f"this deltune knows {len(MIGRATIONS)} at most; use a newer one"
            raise DeltuneError(f"{self.path} has schema {version}, {known}")
        if version == 0 and tables:
            raise DeltuneError(f"{self.path} is a database of another program; choose another file")
        return int(version)

    def _migrate(self) -> None:
        with self._at_once():
            version = self._check()
            for statements in MIGRATIONS[version:]:
                for statement in statements:
                    self._open.execute(statement)
            self._open.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")

    def _row(self, found: tuple[Any, ...]) -> Row | None:
        name, kind, spec, result, error, seconds, _, total = found
        try:
            if _sum(name, kind, spec, result, error) != total:
                raise ValueError("its checksum is another")
            return Row(name, kind, json.loads(spec), None if result is None else json.loads(result), error, seconds)
        except (ValueError, TypeError) as problem:
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
            said = str(error)
            if "not a database" in said or "malformed" in said:
                todo = f"move it away and run the same command again: finished runs are read from {self.runs}"
                raise DeltuneError(f"{self.path} is no results file or is damaged ({said}); {todo}") from error
            raise refused(self.path, error, f"finished runs are whole in {self.runs}") from error


def _text(value: Mapping[str, Any]) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def _sum(*values: str | None) -> str:
    return hashlib.sha256("\0".join(value or "" for value in values).encode()).hexdigest()


def _dead(owner: str) -> bool:
    """Whether an owner of this machine has ended."""
    host, process, _ = owner.split(" ")
    if host != socket.gethostname():
        return False
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False
