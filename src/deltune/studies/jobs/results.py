"""The results of studies as files for a repository: STUDY.jsonl.gz for each study, and environments.json.

A line of the compressed text is a job: its name, its spec, its result and the digest of the environment in which it
came about. Lines are sorted by what they are about and hold nothing of the machine but that digest, so that a file
whose lines did not change is the same file. Nothing is lost: the page, the tables and the figures are made from these
files as from a `ResultStore`.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import DeltuneError
from ...files import atomic_open, explain_write_errors, parse_json_object, read_json_object, write_text
from .store import JobRecord, read_error_kind

SUFFIX = ".jsonl.gz"
ENVIRONMENTS_FILE = "environments.json"
DIGEST_DIGITS = 12


def results_file(folder: Path, study: str) -> Path:
    """Return the file of a study, such as FOLDER/ln/nlu.jsonl.gz for ln/nlu."""
    return folder / f"{study}{SUFFIX}"


def write_results(folder: Path, study: str, records: Iterable[JobRecord]) -> Path:
    """Write the records of a study's jobs, and the environments of all studies in the folder."""
    path = results_file(folder, study)
    environments: dict[str, Any] = {}
    lines = [_to_line(record, environments) for record in records]
    lines.sort(key=_sort_key)
    with explain_write_errors(folder):
        path.parent.mkdir(parents=True, exist_ok=True)
        environments |= _read_environments(folder)
        with atomic_open(path) as written:
            written.write(gzip.compress("".join(_compact(line) + "\n" for line in lines).encode(), mtime=0))
        used = {line.get("environment") for file in _files(folder) for _, line in _read_lines(file)}
        kept = {digest: environments[digest] for digest in sorted(environments) if digest in used}
        write_text(folder / ENVIRONMENTS_FILE, json.dumps(kept, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
    return path


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
        for number, line in _read_lines(file):
            try:
                record = _from_line(line, environments)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise DeltuneError(
                    f"{file} line {number} is not as `deltune study export` wrote it ({type(error).__name__}: {error})"
                ) from error
            if replaces(record, records.get(record.name)):
                records[record.name] = record
    return list(records.values())


def replaces(record: JobRecord, before: JobRecord | None) -> bool:
    """Return whether a record says more than what is there: it is the first, or a result after an error."""
    return before is None or (before.result is None and record.result is not None)


def exported_studies(folder: Path) -> list[str]:
    """Return the names of the studies that have a file in a folder of results."""
    return [file.relative_to(folder).as_posix().removesuffix(SUFFIX) for file in _files(folder)]


def _files(folder: Path) -> list[Path]:
    return sorted(folder.rglob(f"*{SUFFIX}"))


def _read_lines(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
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


def _compact(value: object) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def _sort_key(line: Mapping[str, Any]) -> tuple[str, ...]:
    """Order lines by model, task, method and seed, so that what is compared lies side by side."""
    spec = line["spec"].get("run", line["spec"])
    other = line["spec"].get("other", {})
    about = [spec.get("model"), spec.get("task") or spec.get("data"), spec.get("method"), spec.get("seed", 0)]
    return (*(str(value) for value in about), str(other.get("task", "")), line["kind"], line["job"])


# -- a record as a line, and back


def _to_line(record: JobRecord, environments: dict[str, Any]) -> dict[str, Any]:
    """Return the line of a record, and add its environment to `environments`."""
    line: dict[str, Any] = {
        "job": record.name, "kind": record.kind, "spec": record.spec, "seconds": record.seconds,
        **({"date": record.date} if record.date else {}),
    }  # fmt: skip
    if record.result is None:
        return {**line, "error": record.error, **({"error_kind": record.error_kind} if record.error_kind else {})}
    result = dict(record.result)
    if isinstance(environment := result.pop("environment", None), Mapping):
        digest = hashlib.sha256(_compact(environment).encode()).hexdigest()[:DIGEST_DIGITS]
        environments[digest] = dict(environment)
        line["environment"] = digest
    if "examples" in result:
        result["examples"] = {name: _pack_bits(values) for name, values in result["examples"].items()}
    if "curve" in result:
        result["curve"] = _to_columns(result["curve"])
    return {**line, "result": result}


def _from_line(line: Mapping[str, Any], environments: Mapping[str, Any]) -> JobRecord:
    """Return the record of a line."""
    result = None
    if "error" not in line:
        result = dict(line["result"])
        if "environment" in line:
            result["environment"] = environments[line["environment"]]
        if "examples" in result:
            result["examples"] = {name: _unpack_bits(values) for name, values in result["examples"].items()}
        if "curve" in result:
            result["curve"] = _to_rows(result["curve"])
    error = line.get("error")
    return JobRecord(
        line["job"], line["kind"], dict(line["spec"]), result, error, float(line["seconds"]),
        read_error_kind(line.get("error_kind")), str(line.get("date", "")),
    )  # fmt: skip


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
