"""The result store of studies: one SQLite file that several processes write and that survives any crash.

SQLite itself and not a library over it: one table and a few statements need no mapper.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sqlite3
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, get_args

from filelock import FileLock, Timeout

from ...errors import DeltuneError, check_booleans
from ...files import parse_json_object, write_error

COLUMNS = ("name", "kind", "spec", "result", "error", "seconds", "finished", "sum", "error_kind")
SCHEMA = (
    "CREATE TABLE works (name TEXT PRIMARY KEY, kind TEXT NOT NULL, spec TEXT NOT NULL, result TEXT, error TEXT, "
    "seconds REAL NOT NULL, finished REAL NOT NULL, sum TEXT NOT NULL, error_kind TEXT) STRICT"
)
SCHEMA_VERSION = 3
SELECT = f"SELECT {', '.join(COLUMNS)} FROM works"
DATABASE_SUFFIXES = ("-wal", "-journal", "")
"""What SQLite appends to a database's name for its files, the database itself last."""

ErrorKind = Literal["diverged", "error", "exception", "worker_died", "requirement"]
"""Why a job has no result: its training diverged, a `DeltuneError`, any other exception, a worker that died again and
again, or a job that it requires and that failed."""
REQUIREMENT_FAILED = "it needs {name}: {error}"
"""The error of a job whose requirement failed."""


@dataclass(frozen=True)
class JobRecord:
    """The row of a finished job: its result, or the error that it ended with.

    A result that another program wrote may be any JSON object; `study.job_outcomes` checks the fields that it reads.

    Attributes:
        name: The job's name.
        kind: The job's kind, a key of `jobs.RUNNERS`.
        spec: The job's arguments.
        result: What the job returned; None if it failed.
        error: The message of the error that it ended with; None if there is a result.
        seconds: How long it took.
        error_kind: What kind of error it was, as the worker reported it; None if there is a result.
        date: The day on which it ended, in UTC, such as "2026-11-24"; empty if nobody knows, None for now.
    """

    name: str
    kind: str
    spec: dict[str, Any]
    result: Mapping[str, Any] | None
    error: str | None
    seconds: float
    error_kind: ErrorKind | None = None
    date: str | None = field(default=None, compare=False)


def read_error_kind(stored: str | None) -> ErrorKind | None:
    """Return the stored kind of an error; None for a result. An unknown one is a `ValueError`."""
    for kind in get_args(ErrorKind):
        if kind == stored:
            return kind
    if stored is not None:
        raise ValueError(f"its error_kind {stored!r} is not one of {', '.join(get_args(ErrorKind))}, of an error")
    return None


def folder_of_runs(path: str | Path) -> Path:
    """Return the folder of the runs of a file of results."""
    path = Path(path).expanduser().absolute()
    return path.with_name(f"{path.stem}.runs")


class ResultStore:
    """The records of finished jobs in one file; the folder of runs is beside it, PATH without its ending + `.runs`.

    A process claims a job before it does it, by a locked file in the folder `claims`. The lock ends with the process,
    however it ends.
    """

    @check_booleans
    def __init__(self, path: str | Path, *, read_only: bool = False) -> None:
        self.path = Path(path).expanduser().absolute()
        self.runs = folder_of_runs(self.path)
        self.claims = self.runs.with_suffix(".claims")
        self._locks: dict[str, FileLock] = {}
        with self._translate_errors(), contextlib.ExitStack() as opened:
            path = opened.enter_context(_readable_copy(self.path)) if read_only else self.path
            path.parent.mkdir(parents=True, exist_ok=True)
            uri = f"{path.as_uri()}?mode={'rw' if read_only else 'rwc'}"
            self._db = sqlite3.connect(uri, uri=True, timeout=60, isolation_level=None, check_same_thread=False)
            opened.callback(self._db.close)
            self._db.text_factory = lambda raw: raw.decode("utf-8", "replace")  # the checksum finds what that changed
            self._db.execute("PRAGMA trusted_schema=OFF")
            self._check(whole=True)  # before anything is changed
            if read_only:
                self._db.execute("PRAGMA query_only=ON")
            else:
                self._db.execute("PRAGMA journal_mode=WAL")
                self._db.execute("PRAGMA synchronous=FULL")
                self._create_tables()
            self._resources = opened.pop_all()

    def close(self) -> None:
        """Give up all claims, and close the file."""
        self.release()
        self._resources.close()

    def __enter__(self) -> ResultStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def get(self, name: str) -> JobRecord | None:
        """Return the record of a job by name; None if it is not done, or corrupt (then with a warning)."""
        with self._translate_errors():
            row = self._db.execute(f"{SELECT} WHERE name = ?", (name,)).fetchone()
        return None if row is None else self._to_record(row)

    def records(self) -> list[JobRecord]:
        """Return all records in the order in which the jobs finished."""
        with self._translate_errors():
            rows = self._db.execute(f"{SELECT} ORDER BY finished, name").fetchall()
        return [record for record in map(self._to_record, rows) if record is not None]

    def put(self, record: JobRecord) -> None:
        """Write a record in place of an earlier one, and give up our claim on the job.

        An error never replaces a result, because another process did the job meanwhile.
        """
        error = None if record.error is None else record.error.encode(errors="backslashreplace").decode()
        values = (
            record.name,
            record.kind,
            _to_json(record.spec),
            None if record.result is None else _to_json(record.result),
            error,
        )
        total = _checksum(*values, *([record.error_kind] if record.error_kind else []))
        finished = time.time()
        if record.date is not None:
            finished = datetime.fromisoformat(f"{record.date}T00:00:00+00:00").timestamp() if record.date else 0.0
        row = (*values, record.seconds, finished, total, record.error_kind)
        with self._translate_errors(), self._transaction():
            existing = None if record.error is None else self.get(record.name)
            if existing is None or existing.error is not None:
                columns, places = ", ".join(COLUMNS), ", ".join("?" * len(COLUMNS))
                self._db.execute(f"INSERT OR REPLACE INTO works ({columns}) VALUES ({places})", row)
        self.release(record.name)

    @check_booleans
    def claim(self, name: str, *, again: bool = False) -> bool:
        """Return whether a job is ours to do: it is not done, and no other process is doing it.

        With `again` a job that failed is not done.
        """
        with self._translate_errors():
            self.claims.mkdir(parents=True, exist_ok=True)
            lock = self._locks.get(name) or FileLock(self.claims / name)
            try:
                lock.acquire(timeout=0)
            except Timeout:
                return False
        self._locks[name] = lock
        record = self.get(name)
        if record is None or (again and record.error is not None):
            return True
        self.release(name)
        return False

    def claimed_jobs(self) -> set[str]:
        """Return the names of the jobs that processes are doing."""
        claimed: set[str] = set()
        for file in self.claims.glob("*"):
            try:
                with FileLock(file, timeout=0):
                    file.unlink(missing_ok=True)  # of a process that was killed
            except Timeout:
                claimed.add(file.name)
            except OSError:  # where nothing can be written nobody claims
                continue
        return claimed

    def release(self, name: str | None = None) -> None:
        """Give up our claim on a job; without a name, all our claims."""
        for one in list(self._locks) if name is None else [name] * (name in self._locks):
            (self.claims / one).unlink(missing_ok=True)
            self._locks.pop(one).release(force=True)

    def _check(self, whole: bool = False) -> int:
        """Check that the file is ours, and return its schema version."""
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        (tables,) = self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if version == 0 and tables:
            raise DeltuneError(f"{self.path} is a database of another program; choose another file")
        (code,) = self._db.execute("SELECT count(*) FROM sqlite_master WHERE type IN ('view', 'trigger')").fetchone()
        present = [name for (_, name, *_) in self._db.execute("PRAGMA table_info(works)")]
        if version and (code or not {*COLUMNS} <= {*present}):
            raise DeltuneError(
                f"{self.path} is a database of another program or damaged (a file of results has a table works of "
                f"{', '.join(COLUMNS)}, and no views or triggers); choose another file"
            )
        if version not in (0, SCHEMA_VERSION):
            raise DeltuneError(f"{self.path} has schema {version}, not {SCHEMA_VERSION}; use the deltune that wrote it")
        if whole:
            (problem,) = self._db.execute("PRAGMA quick_check(1)").fetchone()
            if problem != "ok":
                raise self._damaged(problem)
        return int(version)

    def _create_tables(self) -> None:
        with self._transaction():
            if self._check() == 0:
                self._db.execute(SCHEMA)
            self._db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def _to_record(self, values: tuple[Any, ...]) -> JobRecord | None:
        """Build a record from a row of the table; None with a warning if the row is corrupt."""
        name, kind, spec, result, error, seconds, finished, total, error_kind = values
        try:
            if _checksum(name, kind, spec, result, error, *([error_kind] if error_kind else [])) != total:
                raise ValueError("its checksum does not match")
            if (result is None) == (not error):
                raise ValueError("it must have either a result or an error")
            return JobRecord(
                name,
                kind,
                _parse_object(spec),
                None if result is None else _parse_object(result),
                error,
                float(seconds),
                read_error_kind(error_kind),
                datetime.fromtimestamp(float(finished), UTC).date().isoformat() if finished else "",
            )
        except (ValueError, TypeError, RecursionError) as problem:
            warnings.warn(f"row {name} of {self.path} is corrupt ({problem}); it is ignored", stacklevel=3)
            return None

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        """Run the block in one transaction, as the only writer."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            with contextlib.suppress(sqlite3.Error):  # a full disk has rolled back already
                self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Turn the errors of SQLite and of the disk into errors that say what to do."""
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            if any(sign in str(error) for sign in ("not a database", "malformed", "no such table", "no such column")):
                raise self._damaged(str(error)) from error
            raise write_error(self.path, error, f"finished runs are whole in {self.runs}") from error

    def _damaged(self, why: str) -> DeltuneError:
        why = " ".join(why.split())
        todo = f"move it away and run the same command again: finished runs are read from {self.runs}"
        return DeltuneError(f"{self.path} is no results file or is damaged ({why}); {todo}")


@contextlib.contextmanager
def _readable_copy(path: Path) -> Iterator[Path]:
    """Yield a database that SQLite can write beside: the file itself, or a temporary copy of it."""
    if os.access(path, os.W_OK) and os.access(path.parent, os.W_OK):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="deltune-") as folder:
        for ending in DATABASE_SUFFIXES:
            source = Path(f"{path}{ending}")
            if source.exists() or not ending:
                shutil.copyfile(source, Path(folder) / source.name)
        yield Path(folder) / path.name


def _parse_object(text: str) -> dict[str, Any]:
    value = parse_json_object(text)
    if "\\ud" in text.lower():  # an unpaired surrogate, perhaps, which cannot be written to a file
        _to_json(value).encode()
    return value


def _to_json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def _checksum(*values: str | None) -> str:
    return hashlib.sha256("\0".join(value or "" for value in values).encode()).hexdigest()
