"""Reading one data file (JSON lines, CSV, TSV, Parquet, CoNLL or text): its rows, each with its line number."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import itertools
import logging
import re
import sys
import zlib
from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from ...errors import error_from_problems, error_summary, excerpt, unknown_name
from ...files import parse_json
from ...models import OUTSIDE
from .rows import ROWS_AT_ONCE, NumberedRows, Row
from .tag_schemes import is_entity_tag

logger = logging.getLogger("deltune")

MAX_LINE_LENGTH = 2**24
"""Characters of the longest line, or field of CSV, that is read."""
STDIN = Path("-")

RowsRead = Iterator[tuple[int, Row]]
"""Rows with their line numbers, in Parquet with their row numbers, from 1."""
NumberedCells = Iterator[tuple[int, list[str]]]
"""The cells of the rows of a table with their line numbers; none of a blank line."""


@dataclass
class DataFile:
    """The rows of one split.

    Attributes:
        name: The name of the file, for messages.
        rows: The rows, each with its number.
        unit: What the numbers count: "line" or "row".
    """

    name: str
    rows: NumberedRows = field(default_factory=NumberedRows)
    unit: str = "line"

    @property
    def columns(self) -> list[str]:
        """The columns that any row has, in the order of their first appearance."""
        return list(self.rows.columns)

    def with_rows(self, rows: Iterable[tuple[int, Row]]) -> DataFile:
        """Return the file with other rows, which are read once."""
        return replace(self, rows=NumberedRows(rows))

    def location(self, number: int) -> str:
        """Return the file and the number of a row, for messages."""
        return f"{self.name} {self.unit} {number}"

    def row_ids(self, prefix: str = "") -> Iterator[str]:
        """Return the ids of the rows: the column `id` where all its values differ, else the rows' numbers from 1.

        Neither the header of a table nor blank lines count.
        """
        if self.has_ids:
            return (str(row["id"]) for _, row in self.rows)
        return (f"{prefix}{number}" for number in range(1, len(self.rows) + 1))

    @property
    def has_ids(self) -> bool:
        """Whether the column `id` tells the rows apart."""
        return len(set(array("q", (hash(str(row["id"])) for _, row in self.rows if "id" in row)))) == len(self.rows)


class UnreadableFileError(Exception):
    """A file cannot be read beyond some line; the message names the line and says why."""


def read_rows(path: Path, problems: list[str] | None = None) -> DataFile:
    """Read the rows of one file."""
    own_problems: list[str] = []
    file = DataFile(path.name, unit="row" if path.suffix == ".parquet" else "line")
    suffix = data_suffix(path)
    if not suffix:
        hint = "Save the sheet as CSV." if path.suffix.lower() in SPREADSHEETS else None
        own_problems.append(unknown_name("file format", path.suffix, READERS, path.name, hint))
    else:
        try:
            file.unit = "row" if _is_array(path) else file.unit
            for number, row in READERS[suffix](path, own_problems):
                file.rows.append(number, row)
        except UnreadableFileError as error:
            own_problems.append(str(error))
        except (OSError, EOFError, ValueError, csv.Error, zlib.error, MemoryError) as error:
            reason = f"cannot be read to its end, {len(file.rows)} rows in ({error_summary(error)})"
            own_problems.append(f"{path.name}: {reason}")
        if not file.rows and not own_problems:
            own_problems.append(f"{path.name} is empty: it has no rows")
    if own_problems and problems is None:
        raise error_from_problems(str(path), own_problems)
    if problems is not None:
        problems.extend(own_problems)
    return file


def data_suffix(path: Path) -> str:
    """Return the suffix that names a file's format, such as .jsonl.gz; an empty string for an unknown format."""
    return next((suffix for suffix in READERS if path.name.endswith(suffix)), "")


def text_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Read the lines of a text file in UTF-8, with or without a byte order mark.

    A line ends with a line feed, a carriage return or both, and with nothing else: texts contain U+2028, U+0085 and
    form feeds.
    """
    if path == STDIN and not hasattr(sys.stdin, "buffer"):
        yield from _checked_lines("standard input", sys.stdin)
        return
    if path != STDIN and path.exists() and not path.is_file():
        raise UnreadableFileError(f"{path.name} is not a file")
    with sys.stdin.buffer if path == STDIN else _open_binary(path) as stream:
        text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
        yield from _checked_lines(path.name, text)


def _open_binary(path: Path) -> BinaryIO:
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def _checked_lines(name: str, text: TextIO) -> Iterator[tuple[int, str]]:
    """Check each line of a text, in which surrogates stand for bytes that are not UTF-8."""
    number = 0
    while line := text.readline(MAX_LINE_LENGTH + 1):
        number += 1
        where = f"{name} line {number}"
        if number == 1 and (encoding := _byte_order_mark_encoding(line[:4].encode("utf-8", "surrogateescape"))):
            raise UnreadableFileError(f"{where}: the file is {encoding}; save it as UTF-8")
        if "\0" in line:
            raise UnreadableFileError(f"{where} holds a NUL: this is not text, or not in UTF-8; save it as UTF-8")
        if len(line) > MAX_LINE_LENGTH:
            raise UnreadableFileError(f"{where} is longer than {MAX_LINE_LENGTH:,} characters; give one row a line")
        if not line.isascii() and (byte := re.search("[\udc80-\udcff]", line)):
            code = ord(byte.group()) - 0xDC00
            raise UnreadableFileError(f"{where}: byte {code:#04x} is not UTF-8; save the file as UTF-8")
        yield number, line


def _byte_order_mark_encoding(start: bytes) -> str:
    """Return the encoding that a byte order mark names, where it is not UTF-8."""
    marks = {codecs.BOM_UTF32_LE: "UTF-32", codecs.BOM_UTF32_BE: "UTF-32"}  # before UTF-16, whose mark begins the same
    marks |= {codecs.BOM_UTF16_LE: "UTF-16", codecs.BOM_UTF16_BE: "UTF-16"}
    return next((name for mark, name in marks.items() if start.startswith(mark)), "")


def _read_json_lines(path: Path, problems: list[str]) -> RowsRead:
    unit, values = ("row", _array_values(path)) if _is_array(path) else ("line", _line_values(path, problems))
    for n, row in values:
        if not isinstance(row, dict):
            problems.append(f"{path.name} {unit} {n}: not a JSON object but {short_repr(row)}")
        elif problem := _column_name_problem(row):
            problems.append(f"{path.name} {unit} {n}: {problem}")
        else:
            yield n, row


def _is_array(path: Path) -> bool:
    """Return whether a file of JSON is one array of rows."""
    return (
        data_suffix(path).startswith(".json")
        and path != STDIN
        and (next((line.lstrip()[:1] for _, line in text_lines(path) if line.strip()), "") == "[")
    )


def _array_values(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        yield from enumerate(parse_json("".join(line for _, line in text_lines(path))), 1)
    except ValueError as error:
        raise UnreadableFileError(f"{path.name}: broken JSON ({error})") from error


def _line_values(path: Path, problems: list[str]) -> Iterator[tuple[int, Any]]:
    for n, line in text_lines(path):
        if not line.strip():
            continue
        try:
            yield n, parse_json(line)
        except ValueError as error:
            problems.append(f"{path.name} line {n}: broken JSON ({error})")


def _read_csv(path: Path, problems: list[str]) -> RowsRead:
    """Read a table with commas, or what else its header has; a field in quotes may hold it and line ends."""
    csv.field_size_limit(MAX_LINE_LENGTH)  # the default of 128 KiB is less than a long document
    lines = (line for _, line in text_lines(path))
    header = _first_row(lines)
    named = re.fullmatch(r'"?sep=(.)"?[\r\n]*', header[0])  # the first line of a file of Excel may say what separates
    mark = named[1] if named else _separator(path, header)
    if mark != ",":
        logger.info("%s: its columns are separated by %r", path.name, mark)
    rows, before = (lines, 1) if named else (itertools.chain(header, lines), 0)
    reader = csv.reader(rows, delimiter=mark, strict=True)

    def numbered_cells() -> NumberedCells:
        line = before + 1
        try:
            for cells in reader:
                yield before + reader.line_num, cells
                line = before + reader.line_num + 1
        except csv.Error as error:
            raise UnreadableFileError(
                f"{path.name} line {line}: cannot be read from here to its end ({error})"
            ) from error

    return _read_table(path, problems, numbered_cells())


SEPARATORS = ",;\t|"
"""The characters that may separate the columns of a CSV file."""


def _first_row(lines: Iterator[str]) -> list[str]:
    """Return the lines of the first row, several where a field in quotes holds line ends; one empty line of no file."""
    row, quotes = [next(lines, "")], 0
    while (quotes := quotes + row[-1].count('"')) % 2 and (line := next(lines, "")):
        row.append(line)
    return row


def _separator(path: Path, header: Sequence[str]) -> str:
    """Return the one mark that separates the names in the header of a CSV, whose lines are given."""
    headers = {mark: next(csv.reader(header, delimiter=mark), []) for mark in SEPARATORS}
    marks = [mark for mark, header in headers.items() if len(header) > 1]
    if len(marks) > 1:  # a mark inside of quotes leaves one of them in a cell
        marks = [mark for mark in marks if all(cell.count('"') % 2 == 0 for cell in headers[mark])] or marks
    if len(marks) > 1:
        raise UnreadableFileError(
            f"{path.name} line 1: its columns could be separated by {' or '.join(map(repr, marks))}; put the names in "
            "quotes that hold one of them"
        )
    return marks[0] if marks else ","


def _read_tsv(path: Path, problems: list[str]) -> RowsRead:
    """Read a table with tabs, where every line is a row and quotes are characters as any other."""

    def numbered_cells() -> NumberedCells:
        for number, line in text_lines(path):
            cells = line.rstrip("\r\n").split("\t") if line.strip() else []
            if quoted := [
                cell for cell in cells if re.fullmatch('"([^"]|"")*"', cell) and (number == 1 or '""' in cell)
            ]:
                raise UnreadableFileError(
                    f"{path.name} line {number}: {excerpt(quoted[0])} is quoted as in .csv, and .tsv is read without "
                    "quoting; save the table with commas, as .csv"
                )
            yield number, cells

    return _read_table(path, problems, numbered_cells())


def _read_table(path: Path, problems: list[str], numbered_cells: NumberedCells) -> RowsRead:
    """Read the rows of a table from its cells; the first row has the names of the columns."""
    line, header = next(numbered_cells, (1, []))
    if problem := _column_name_problem(header):
        problems.append(f"{path.name} line {line}: {problem}: {excerpt(header)}")
        return
    for number, cells in numbered_cells:
        if cells and len(cells) != len(header):
            problems.append(f"{path.name} line {number}: {len(cells)} fields, the header has {len(header)}")
        elif cells:
            yield number, dict(zip(header, cells, strict=True))


def _read_parquet(path: Path, problems: list[str]) -> RowsRead:
    import pyarrow
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
        names = file.schema_arrow.names
        if problem := _column_name_problem(names):
            problems.append(f"{path.name}: {problem}: {excerpt(names)}")
            return
        batches = file.iter_batches(ROWS_AT_ONCE)
        yield from enumerate((_without_absent_keys(row) for batch in batches for row in batch.to_pylist()), 1)
    except (pyarrow.ArrowException, OverflowError) as error:  # some are neither OSError nor ValueError
        raise ValueError(error_summary(error)) from error


def _without_absent_keys(row: Row) -> Row:
    """Return a row without the keys that only other rows have: inside columns, Parquet fills them with None."""

    def present(value: Any) -> Any:
        if isinstance(value, list):
            return [present(one) for one in value]
        return {k: present(v) for k, v in value.items() if v is not None} if isinstance(value, dict) else value

    return {name: present(value) for name, value in row.items()}


def has_lone_surrogate(text: str) -> bool:
    """Return whether a text holds half a character (a lone surrogate), which UTF-8 cannot encode."""
    return not text.isascii() and re.search("[\ud800-\udfff]", text) is not None


def _column_name_problem(names: Collection[str]) -> str:
    """Return what is wrong with the names of columns, or an empty string."""
    if len(set(names)) < len(names):
        return "a column name occurs twice"
    broken = [name for name in names if has_lone_surrogate(name)]
    return f"the column name {excerpt(broken[0])} holds half a character (a lone surrogate)" if broken else ""


def _read_text(path: Path, problems: list[str]) -> RowsRead:
    """Read a file of running text, which is one row."""
    text = "".join(line for _, line in text_lines(path))
    if text.strip():
        yield 1, {"text": text}


def _is_tag(text: str) -> bool:
    """Return whether a text looks like an entity's tag, so that a line that begins with # is a token and no comment."""
    return text == OUTSIDE or is_entity_tag(text)


def _read_conll(path: Path, problems: list[str]) -> RowsRead:
    """Read sentences with a blank line between them, each a line for a token: the token first, its tag last.

    Columns between them are "column 2" and so on. Lines -DOCSTART- and comments (# and a blank) are left out. Of tokens
    alone there are no tags.
    """
    width = first = 0
    sentence: list[list[str]] = []
    for number, line in itertools.chain(text_lines(path), [(0, "")]):
        cells = line.rstrip("\r\n").split("\t") if "\t" in line else line.split()
        if not any(cells) or cells[0] == "-DOCSTART-":
            if sentence:
                if problem := _wrong_order(sentence):
                    raise UnreadableFileError(f"{path.name} line {first}: {problem}")
                names = ["tokens", *(f"column {i}" for i in range(2, width)), *(["tags"] if width > 1 else [])]
                yield first, dict(zip(names, map(list, zip(*sentence, strict=True)), strict=True))
            sentence = []
        elif line.startswith("# ") and "\t" not in line and len(cells) != (width or (2 if _is_tag(cells[-1]) else 0)):
            continue
        elif (width and len(cells) != width) or not all(cells):
            wrong = f"{len(cells)} columns, the lines before it have {width}" if all(cells) else "an empty column"
            problems.append(f"{path.name} line {number}: {wrong}")
        else:
            width, first = len(cells), first if sentence else number
            sentence.append(cells)


def _wrong_order(sentence: list[list[str]]) -> str:
    """Return what is wrong with the columns of a sentence, or an empty string."""
    firsts, lasts = [row[0] for row in sentence], [row[-1] for row in sentence]
    if len(sentence[0]) > 2 and len(sentence) > 1 and firsts == [str(i) for i in range(1, len(firsts) + 1)]:
        return "the first column counts the tokens, as in CoNLL-U; write the token first and its tag last in each line"
    if (
        len(sentence[0]) > 1
        and all(map(_is_tag, firsts))
        and any(map(is_entity_tag, firsts))
        and not any(map(_is_tag, lasts))
    ):
        return "the tags stand before the tokens; write the token first and its tag last in each line"
    return ""


SPREADSHEETS = (".xlsx", ".xls", ".ods", ".numbers")
READERS = {
    ".jsonl": _read_json_lines, ".json": _read_json_lines, ".csv": _read_csv, ".tsv": _read_tsv,
    ".parquet": _read_parquet,
    ".conll": _read_conll, ".bio": _read_conll, ".txt": _read_text,
}  # fmt: skip
READERS |= {f"{suffix}.gz": READERS[suffix] for suffix in READERS if suffix != ".parquet"}


def short_repr(value: object) -> str:
    """Return a value for a message: at most 40 characters of it, with its type."""
    return f"{excerpt(value, 40)} ({type(value).__name__})"
