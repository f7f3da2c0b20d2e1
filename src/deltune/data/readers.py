"""Rows of one data file (JSON lines, CSV or Parquet), each with the line it stands on."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import re
import sys
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from ..errors import DeltuneError, error_from_problems, error_summary, excerpt, unknown_name
from ..filesystem import parse_json

SHOWN = 10  # problems of one data set that are listed
LONGEST = 2**24  # characters of a line, or of a field of CSV
PACKED = 50  # bytes out of one byte of a compressed file; texts come to ten or so
ALWAYS = 2**25  # bytes out of any compressed file, however small it is
ROWS = 10  # of a Parquet file for each of its bytes; and a million in any case

STDIN = Path("-")

Row = dict[str, Any]
Places = Iterator[tuple[int, Row]]  # line or row number, row


@dataclass
class DataFile:
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


class UnreadableFileError(Exception):
    """What is wrong with a file from some line on, which the message names."""


def read_rows(path: Path, problems: list[str] | None = None) -> DataFile:
    """The rows of one file. Problems go to the list; without one they are raised as one DeltuneError."""
    found: list[str] = []
    file = DataFile(path.name, unit="row" if path.suffix == ".parquet" else "line")
    suffix = data_suffix(path)
    if not suffix:
        found.append(unknown_name("file format", path.suffix, READERS, where=path.name))
    else:
        try:
            file.rows.extend(READERS[suffix](path, found))
        except UnreadableFileError as error:
            found.append(str(error))
        except (OSError, EOFError, ValueError, csv.Error, zlib.error, MemoryError) as error:
            found.append(f"{path.name}: cannot be read to its end, {len(file.rows)} rows in ({error_summary(error)})")
        if not file.rows and not found:
            found.append(f"{path.name} is empty: it has no rows")
    if found and problems is None:
        raise file_error(str(path), found)
    if problems is not None:
        problems.extend(found)
    return file


def file_error(title: str, problems: list[str]) -> DeltuneError:
    """One error for everything that is wrong with a source; of many problems the first ten and their number."""
    if len(problems) > SHOWN:
        return error_from_problems(f"{title} has {len(problems)} problems; the first of them", problems[:SHOWN])
    return error_from_problems(title, problems)


def data_suffix(path: Path) -> str:
    """The part of the file name that tells its format, such as .jsonl.gz; empty if it is none of the formats."""
    return next((suffix for suffix in READERS if path.name.endswith(suffix)), "")


def text_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a text file, plain or compressed, with their numbers; of standard input where the path is "-".

    UTF-8, with or without a byte order mark. A line ends with a line feed, a carriage return or both, and with nothing
    else: U+2028, U+0085 and form feeds stand in texts.

    Raises:
        Unreadable: From some line on it is not UTF-8, a line is too long, holds a NUL, or far more comes out of a
            compressed file than texts ever give.
        OSError, EOFError, zlib.error: The file cannot be read, or is cut short.
    """
    if path == STDIN and not hasattr(sys.stdin, "buffer"):
        yield from _checked("standard input", sys.stdin, None)
        return
    if path != STDIN and path.exists() and not path.is_file():
        raise UnreadableFileError(f"{path.name} is no file")
    with sys.stdin.buffer if path == STDIN else _open(path) as stream:
        text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
        packed = path.suffix == ".gz"
        yield from _checked(path.name, text, max(ALWAYS, PACKED * path.stat().st_size) if packed else None)


def _open(path: Path) -> BinaryIO:
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def _checked(name: str, text: TextIO, most: int | None) -> Iterator[tuple[int, str]]:
    """The lines of a text in which surrogates stand for bytes that are not UTF-8; most: characters of all lines."""
    number = total = 0
    while line := text.readline(LONGEST + 1):
        number += 1
        total += len(line)
        where = f"{name} line {number}"
        if number == 1 and (encoding := _other_encoding(line[:4].encode("utf-8", "surrogateescape"))):
            raise UnreadableFileError(f"{where}: the file is {encoding}; save it as UTF-8")
        if "\0" in line:
            raise UnreadableFileError(f"{where} holds a NUL: this is no text, or not in UTF-8; save it as UTF-8")
        if len(line) > LONGEST:
            raise UnreadableFileError(f"{where} is longer than {LONGEST:,} characters; give one row a line")
        if most is not None and total > most:
            raise UnreadableFileError(
                f"{where}: more than {most:,} characters come out of this small file; unpack it yourself"
            )
        if not line.isascii() and (byte := re.search("[\udc80-\udcff]", line)):
            code = ord(byte.group()) - 0xDC00
            raise UnreadableFileError(f"{where}: byte {code:#04x} is not UTF-8; save the file as UTF-8")
        yield number, line


def _other_encoding(start: bytes) -> str:
    """The encoding that a file's first bytes name, where it is not UTF-8."""
    marks = {codecs.BOM_UTF32_LE: "UTF-32", codecs.BOM_UTF32_BE: "UTF-32"}  # first: the one begins as UTF-16 does
    marks |= {codecs.BOM_UTF16_LE: "UTF-16", codecs.BOM_UTF16_BE: "UTF-16"}
    return next((name for mark, name in marks.items() if start.startswith(mark)), "")


def _json(path: Path, problems: list[str]) -> Places:
    for n, line in text_lines(path):
        if n == 1 and line.lstrip().startswith("["):
            problems.append(f"{path.name} line 1: a JSON array; wanted is one JSON object a line")
            return
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except ValueError as error:
            problems.append(f"{path.name} line {n}: broken JSON ({error})")
            continue
        if not isinstance(row, dict):
            problems.append(f"{path.name} line {n}: not a JSON object but {short_repr(row)}")
        elif problem := _names(row):
            problems.append(f"{path.name} line {n}: {problem}")
        else:
            yield n, row


def _csv(path: Path, problems: list[str]) -> Places:
    csv.field_size_limit(LONGEST)  # the default of 128 KiB is less than a long document
    reader = csv.reader((line for _, line in text_lines(path)), strict=True)
    at = 1
    try:
        header = next(reader, [])
        if problem := "a column name occurs twice" if len(set(header)) < len(header) else _names(header):
            problems.append(f"{path.name} line 1: {problem}: {excerpt(header)}")
            return
        at = reader.line_num + 1
        for cells in reader:
            if cells and len(cells) != len(header):
                sizes = f"{len(cells)} fields, the header has {len(header)}"
                problems.append(f"{path.name} line {reader.line_num}: {sizes}")
            elif cells:
                yield reader.line_num, dict(zip(header, cells, strict=True))
            at = reader.line_num + 1
    except csv.Error as error:
        raise UnreadableFileError(f"{path.name} line {at}: cannot be read from here to its end ({error})") from error


def _parquet(path: Path, problems: list[str]) -> Places:
    import pyarrow
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
        names, rows = file.schema_arrow.names, file.metadata.num_rows
        if len(set(names)) < len(names) or (problem := _names(names)):
            problem = "a column name occurs twice" if len(set(names)) < len(names) else problem
            problems.append(f"{path.name}: {problem}: {excerpt(names)}")
            return
        if rows > max(10**6, ROWS * path.stat().st_size):
            problems.append(f"{path.name} says that it has {rows:,} rows, which such a small file cannot hold")
            return
        yield from enumerate(file.read().to_pylist(), 1)
    except (pyarrow.ArrowException, OverflowError) as error:  # some are neither OSError nor ValueError
        raise ValueError(error_summary(error)) from error


def _names(names: Iterable[str]) -> str:
    """What is wrong with the names of columns: one that no file of a run could hold."""
    broken = [name for name in names if not name.isascii() and re.search("[\ud800-\udfff]", name)]
    return f"the column name {excerpt(broken[0])} holds half a character (a lone surrogate)" if broken else ""


READERS = {".jsonl": _json, ".json": _json, ".csv": _csv, ".parquet": _parquet}
READERS |= {f"{suffix}.gz": READERS[suffix] for suffix in (".jsonl", ".json", ".csv")}


def short_repr(value: object) -> str:
    """A value as messages show it: at most 40 characters, with its type."""
    return f"{excerpt(value, 40)} ({type(value).__name__})"
