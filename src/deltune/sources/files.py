"""Rows of one data file (JSON lines, CSV or Parquet), each with the line it stands on."""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from ..errors import DeltuneError, all_problems, unknown
from .models import first_line

SHOWN = 10  # problems of one data set that are listed

Row = dict[str, Any]
Places = Iterator[tuple[int, Row]]  # line or row number, row


@dataclass
class File:
    """The rows of one split, each with its line (or row) number."""

    name: str
    rows: list[tuple[int, Row]] = field(default_factory=list)
    unit: str = "line"

    @property
    def columns(self) -> list[str]:
        """Every column that some row has, in the order of the rows."""
        return list(dict.fromkeys(key for _, row in self.rows for key in row))

    def at(self, place: int) -> str:
        """Where a row stands, for messages."""
        return f"{self.name} {self.unit} {place}"


def read(path: Path, problems: list[str] | None = None) -> File:
    """The rows of one file. Problems go to the list; without one they are raised as one DeltuneError."""
    found: list[str] = []
    file = File(path.name, unit="row" if path.suffix == ".parquet" else "line")
    suffix = suffix_of(path)
    if not suffix:
        found.append(unknown("file format", path.suffix, READERS, where=path.name))
    else:
        try:
            file.rows.extend(READERS[suffix](path, found))
        except (OSError, EOFError, ValueError, csv.Error, zlib.error) as error:
            found.append(f"{path.name}: cannot be read to its end, {len(file.rows)} rows in ({first_line(error)})")
        if not file.rows and not found:
            found.append(f"{path.name} is empty: it has no rows")
    if found and problems is None:
        raise failure(str(path), found)
    if problems is not None:
        problems.extend(found)
    return file


def failure(title: str, problems: list[str]) -> DeltuneError:
    """One error for everything that is wrong with a source; of many problems the first ten and their number."""
    if len(problems) > SHOWN:
        return all_problems(f"{title} has {len(problems)} problems; the first of them", problems[:SHOWN])
    return all_problems(title, problems)


def suffix_of(path: Path) -> str:
    """The part of the file name that tells its format, such as .jsonl.gz; empty if it is none of the formats."""
    return next((suffix for suffix in READERS if path.name.endswith(suffix)), "")


def _open(path: Path) -> IO[bytes]:
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def _json(path: Path, problems: list[str]) -> Places:
    with _open(path) as stream:
        for n, line in enumerate(stream, 1):
            if n == 1 and line.lstrip().startswith(b"["):
                problems.append(f"{path.name} line 1: a JSON array; wanted is one JSON object a line")
                return
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                problems.append(f"{path.name} line {n}: broken JSON ({error})")
                continue
            if isinstance(row, dict):
                yield n, row
            else:
                problems.append(f"{path.name} line {n}: not a JSON object but {brief(row)}")


def _csv(path: Path, problems: list[str]) -> Places:
    csv.field_size_limit(sys.maxsize)  # the default of 128 KiB is less than a long document
    with _open(path) as stream:
        reader = csv.reader(io.TextIOWrapper(stream, encoding="utf-8-sig", newline=""), strict=True)
        header = next(reader, [])
        if len(set(header)) < len(header):
            problems.append(f"{path.name} line 1: a column name occurs twice: {', '.join(header)}")
            return
        for cells in reader:
            if cells and len(cells) != len(header):
                sizes = f"{len(cells)} fields, the header has {len(header)}"
                problems.append(f"{path.name} line {reader.line_num}: {sizes}")
            elif cells:
                yield reader.line_num, dict(zip(header, cells, strict=True))


def _parquet(path: Path, problems: list[str]) -> Places:
    from pyarrow import parquet

    yield from enumerate(parquet.ParquetFile(path).read().to_pylist(), 1)


READERS = {".jsonl": _json, ".json": _json, ".csv": _csv, ".parquet": _parquet}
READERS |= {f"{suffix}.gz": READERS[suffix] for suffix in (".jsonl", ".json", ".csv")}


def brief(value: object) -> str:
    """A value as messages show it: at most 40 characters, with its type."""
    text = repr(value)
    return f"{text if len(text) <= 40 else text[:37] + '...'} ({type(value).__name__})"
