"""The results of jobs: a file of lines that several processes write and that survives any crash, and its exports.

A line is a job: its name, its spec, and its result or the error that it ended with, with a checksum. A line is only
ever appended, and the last one of a job counts. One that was cut off, since its process died, is overwritten.

Exported for a repository the same lines are sorted by what they are about and compressed, STUDY.jsonl.gz for each
study. They hold nothing of the machine but the digest of the environment, which is in environments.json, so that a file
whose lines did not change is the same file. Nothing is lost: the page is made from either.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, get_args

from filelock import FileLock, Timeout

from ...errors import DeltuneError, check_booleans
from ...files import (
    atomic_open,
    explain_write_errors,
    file_lock,
    parse_json_object,
    read_json_object,
    write_error,
    write_text,
)

LINE_START, LINE_END = '{"job":', ',"sum":"%s"}'
"""What stands around a job in a line of a store; by its beginning a file of another program is told apart."""
SUFFIX = ".jsonl.gz"
ENVIRONMENTS_FILE = "environments.json"
DIGEST_DIGITS = 12
DIRTY = "-dirty"
"""How a commit ends in whose files something was changed."""

ErrorKind = Literal["diverged", "error", "exception", "worker_died", "requirement"]
"""Why a job has no result: its training diverged, a `DeltuneError`, any other exception, a worker that died again and
again, or a job that it requires and that failed."""
REQUIREMENT_FAILED = "it needs {name}: {error}"
"""The error of a job whose requirement failed."""


@dataclass(frozen=True)
class JobRecord:
    """The record of a finished job: its result, or the error that it ended with.

    `kind` is a key of `jobs.RUNNERS`, `spec` the arguments, and `seconds` how long it took. `error_kind` is as the
    worker reported it. `date` is the day on which the job ended, in UTC, such as "2026-11-24"; empty if nobody knows,
    None for now.
    """

    name: str
    kind: str
    spec: dict[str, Any]
    result: Mapping[str, Any] | None
    error: str | None
    seconds: float
    error_kind: ErrorKind | None = None
    date: str | None = field(default=None, compare=False)

    def replaces(self, before: JobRecord | None) -> bool:
        """Return whether it says more than what is there: it is the first, or a result after an error."""
        return before is None or (before.result is None and self.result is not None)


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
        self._read_only = read_only
        self._locks: dict[str, FileLock] = {}
        self._records: dict[str, JobRecord] = {}
        self._number, self._end = 0, 0  # of the lines that were read
        with self._translate_errors():
            if not read_only:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self.path.open("ab").close()
            with open(self.path, "rb") as file:
                start = file.read(len(LINE_START))
        if not LINE_START.encode().startswith(start):
            todo = f"move it away and run the same command again: finished runs are read from {self.runs}"
            raise DeltuneError(f"{self.path} is no results file or is damaged; {todo}")
        self._read_lines()

    def __enter__(self) -> ResultStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def get(self, name: str) -> JobRecord | None:
        """Return the record of a job by name; None if it is not done."""
        self._read_lines()
        return self._records.get(name)

    def records(self) -> list[JobRecord]:
        """Return all records in the order in which they were written."""
        self._read_lines()
        return list(self._records.values())

    def put(self, record: JobRecord) -> None:
        """Write a record in place of an earlier one, and give up our claim on the job.

        An error never replaces a result, because another process did the job meanwhile.
        """
        job = _to_line(record)
        if record.error is not None:
            job["error"] = record.error.encode(errors="backslashreplace").decode()
        if record.date is None:
            job["date"] = datetime.now(UTC).date().isoformat()
        text = _compact(job)
        line = f"{LINE_START}{text}{LINE_END % _digest(text)}\n".encode()
        if self._read_only:
            raise DeltuneError(f"{self.path} cannot be written: it was opened for reading")
        with self._translate_errors(), file_lock(self.runs.with_suffix(".lock")):
            existing = self.get(record.name)
            if record.error is None or existing is None or existing.error is not None:
                with open(self.path, "r+b") as file:
                    file.seek(self._end)
                    file.truncate()  # what a process that died has begun to write
                    file.write(line)
                    file.flush()
                    os.fsync(file.fileno())
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

    def _read_lines(self) -> None:
        """Read the lines that were written since the last look; one without an end is still being written."""
        with self._translate_errors(), open(self.path, "rb") as file:
            file.seek(self._end)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._number, self._end = self._number + 1, self._end + len(line)
                try:
                    record = _from_store(line)
                except (ValueError, TypeError, KeyError, AttributeError) as error:
                    place = f"line {self._number} of {self.path}"
                    warnings.warn(f"{place} is corrupt ({error}); it is ignored", stacklevel=3)
                else:
                    self._records.pop(record.name, None)
                    self._records[record.name] = record

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Turn the errors of the disk into errors that say what to do."""
        try:
            yield
        except OSError as error:
            raise write_error(self.path, error, f"finished runs are whole in {self.runs}") from error


def _from_store(line: bytes) -> JobRecord:
    """Return the record of a line of a store; an error if anything of it was changed."""
    text = line.decode()[len(LINE_START) : -len(LINE_END % _digest("")) - 1]
    if line.decode() != f"{LINE_START}{text}{LINE_END % _digest(text)}\n":
        raise ValueError("its checksum does not match")
    return _from_line(parse_json_object(text))


# -- exports


def results_file(folder: Path, study: str) -> Path:
    """Return the file of a study, such as FOLDER/ln/nlu.jsonl.gz for ln/nlu."""
    return folder / f"{study}{SUFFIX}"


def write_results(folder: Path, study: str, records: Iterable[JobRecord]) -> Path:
    """Write the records of a study's jobs, and the environments of all studies in the folder.

    A run of files that no commit has cannot be repeated, so it is left out, with a warning.
    """
    path = results_file(folder, study)
    environments: dict[str, Any] = {}
    all_records = list(records)
    kept_records = [record for record in all_records if not _is_dirty(record)]
    if left_out := len(all_records) - len(kept_records):
        warnings.warn(
            f"{study}: {left_out} of {len(all_records)} results are not exported: they ran with changes to deltune "
            "that were not committed. Commit, and run the study again with another store",
            stacklevel=2,
        )
    lines = [_pack(_to_line(record), environments) for record in kept_records]
    lines.sort(key=_sort_key)
    with explain_write_errors(folder):
        path.parent.mkdir(parents=True, exist_ok=True)
        environments |= _read_environments(folder)
        with atomic_open(path) as written:
            written.write(gzip.compress("".join(_compact(line) + "\n" for line in lines).encode(), mtime=0))
        used = {line.get("environment") for file in _files(folder) for _, line in _exported_lines(file)}
        kept = {digest: environments[digest] for digest in sorted(environments) if digest in used}
        write_text(folder / ENVIRONMENTS_FILE, json.dumps(kept, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
    return path


def _is_dirty(record: JobRecord) -> bool:
    environment = (record.result or {}).get("environment") or {}
    return str(environment.get("commit")).endswith(DIRTY)


def read_results(folder: Path, studies: Sequence[str] = ()) -> list[JobRecord]:
    """Return the records that are stored in a folder of results, each job once, with a result wherever one has it.

    Without `studies` all files are read; a study without a file has no records.
    """
    environments = _read_environments(folder)
    files = (
        [file for study in studies if (file := results_file(folder, study)).is_file()] if studies else _files(folder)
    )
    records: dict[str, JobRecord] = {}
    for file in files:
        for number, line in _exported_lines(file):
            try:
                record = _from_line(_unpack(line, environments))
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise DeltuneError(
                    f"{file} line {number} is not as `deltune study export` wrote it ({type(error).__name__}: {error})"
                ) from error
            if record.replaces(records.get(record.name)):
                records[record.name] = record
    return list(records.values())


def exported_studies(folder: Path) -> list[str]:
    """Return the names of the studies that have a file in a folder of results."""
    return [file.relative_to(folder).as_posix().removesuffix(SUFFIX) for file in _files(folder)]


def _files(folder: Path) -> list[Path]:
    return sorted(folder.rglob(f"*{SUFFIX}"))


def _exported_lines(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number of each line, from 1, and its object."""
    number = 0
    try:
        for number, line in enumerate(gzip.decompress(file.read_bytes()).splitlines(), 1):
            yield number, parse_json_object(line.decode())
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise DeltuneError(f"{file} cannot be read (line {number}): {error}") from error


def _read_environments(folder: Path) -> dict[str, Any]:
    path = folder / ENVIRONMENTS_FILE
    return read_json_object(path) if path.is_file() else {}


def _sort_key(line: Mapping[str, Any]) -> tuple[str, ...]:
    """Order lines by model, task, method and seed, so that what is compared lies side by side."""
    spec = line["spec"].get("run", line["spec"])
    other = line["spec"].get("other", {})
    about = [spec.get("model"), spec.get("task") or spec.get("data"), spec.get("method"), spec.get("seed", 0)]
    return (*(str(value) for value in about), str(other.get("task", "")), line["kind"], line["job"])


# -- a record as a line, and back


def _compact(value: object) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_DIGITS]


def _to_line(record: JobRecord) -> dict[str, Any]:
    line: dict[str, Any] = {
        "job": record.name, "kind": record.kind, "spec": record.spec, "seconds": record.seconds,
        **({"date": record.date} if record.date else {}),
    }  # fmt: skip
    if record.result is not None:
        return {**line, "result": record.result}
    return {**line, "error": record.error, **({"error_kind": record.error_kind} if record.error_kind else {})}


def _from_line(line: Mapping[str, Any]) -> JobRecord:
    result, error, kind = line.get("result"), line.get("error"), line.get("error_kind")
    if not isinstance(result, dict) and not (result is None and error):
        raise ValueError("it must have either a result or an error")
    if kind not in (None, *get_args(ErrorKind)):
        raise ValueError(f"its error_kind {kind!r} is not one of {', '.join(get_args(ErrorKind))}, of an error")
    scores = (result or {}).get("scores", {})
    if not all(isinstance(score, int | float | None) for score in scores.values()):
        raise ValueError("its scores are not numbers")
    date = str(line.get("date", ""))
    return JobRecord(
        line["job"], line["kind"], dict(line["spec"]), result, error, float(line["seconds"]), kind, date
    )  # fmt: skip


def _pack(line: Mapping[str, Any], environments: dict[str, Any]) -> dict[str, Any]:
    """Return a line in its exported form, and add its environment to `environments`."""
    if "result" not in line:
        return dict(line)
    line, result = dict(line), dict(line["result"])
    if isinstance(environment := result.pop("environment", None), Mapping):
        line["environment"] = _digest(_compact(environment))
        environments[line["environment"]] = dict(environment)
    if "examples" in result:
        result["examples"] = {name: _pack_bits(values) for name, values in result["examples"].items()}
    if "curve" in result:
        result["curve"] = _to_columns(result["curve"])
    return {**line, "result": result}


def _unpack(line: Mapping[str, Any], environments: Mapping[str, Any]) -> dict[str, Any]:
    if "error" in line:
        return dict(line)
    result = dict(line["result"])
    if "environment" in line:
        result["environment"] = environments[line["environment"]]
    if "examples" in result:
        result["examples"] = {name: _unpack_bits(values) for name, values in result["examples"].items()}
    if "curve" in result:
        result["curve"] = _to_rows(result["curve"])
    return {**line, "result": result}


def _pack_bits(values: Sequence[float]) -> str | list[float]:
    """Return numbers that are all 0 or 1 as "count:hexadecimal digits", and others as they are."""
    if not values or any(value not in (0, 1) for value in values):
        return list(values)
    bits = "".join("1" if value else "0" for value in values)
    return f"{len(bits)}:{int(bits, 2):0{-(-len(bits) // 4)}x}"


def _unpack_bits(values: str | list[float]) -> list[float]:
    if not isinstance(values, str):
        return values
    count, _, digits = values.partition(":")
    return [float(bit) for bit in f"{int(digits, 16):0{int(count)}b}"]


def _to_columns(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, list[Any]]]:
    """Return rows as columns, once for each set of names: a list of numbers is shorter than a list of objects."""
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(sorted(row)), []).append(row)
    return [{name: [row[name] for row in group] for name in names} for names, group in groups.items()]


def _to_rows(columns: Sequence[Mapping[str, Sequence[Any]]]) -> list[dict[str, Any]]:
    """Return the rows of columns in the order of their steps; of one step, as they were grouped."""
    rows = [dict(zip(group, values, strict=True)) for group in columns for values in zip(*group.values(), strict=True)]
    return sorted(rows, key=lambda row: row.get("step", 0))
