"""Rows of data and of tokens in Arrow files on the disk, read into memory as they are needed."""

from __future__ import annotations

import json
import mmap
import tempfile
import uuid
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from datetime import date, time
from decimal import Decimal
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import pyarrow

from ...errors import DeltuneError, word_list
from ...files import cache_folder

if TYPE_CHECKING:
    from datasets import Dataset

Row = dict[str, Any]
NUMBERS_IN_MEMORY = 2**20
"""Numbers of tokens, and letters, that an encoder holds before they go into a file; one takes up to 50 bytes there."""
LETTERS_IN_MEMORY = 2**24
"""Letters of a file's rows, as JSON, that are held in memory; all rows go to the disk where there are more."""
ROWS_AT_ONCE = 1000
"""Rows that are read, or made to tokens, at once."""


class ArrowRows(Sequence[Row]):
    """The rows of a memory-mapped Arrow table, converted to Python when they are read."""

    def __init__(self, table: pyarrow.Table) -> None:
        self.table = table
        self._batches = table.to_batches()
        self._starts = [0, *accumulate(batch.num_rows for batch in self._batches)]

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.take(range(len(self))[index])
        return self._row(range(len(self))[index])

    def __iter__(self) -> Iterator[Row]:
        for batch in self._batches:
            for start in range(0, batch.num_rows, ROWS_AT_ONCE):
                yield from batch.slice(start, ROWS_AT_ONCE).to_pylist()

    def take(self, indices: Sequence[int]) -> list[Row]:
        """Return several rows at once."""
        return [self._row(index) for index in indices]

    def _row(self, index: int) -> Row:
        number = bisect_right(self._starts, index) - 1
        row: Row = self._batches[number].slice(index - self._starts[number], 1).to_pylist()[0]
        return row


class RowCollector:
    """Collects rows with the same keys, many of them in a temporary file of the cache's folder.

    Args:
        schema: The types of the columns. Default: as the first rows have them.
        limit: How many numbers and letters are held in memory before they go into the file.
    """

    def __init__(self, schema: pyarrow.Schema | None = None, limit: int | None = None) -> None:
        self._rows: list[Row] = []
        self._size, self._limit = 0, limit or NUMBERS_IN_MEMORY
        self._file: Any = None
        self._writer: Any = None
        self._schema = schema

    @property
    def in_memory(self) -> bool:
        """Whether no row has gone into a file."""
        return self._writer is None

    def append(self, row: Row) -> None:
        """Add a row."""
        self._rows.append(row)
        self._size += sum(map(_size, row.values()))
        if self._size >= self._limit:
            self._flush()

    def _flush(self) -> None:
        table = self._collected()
        if self._writer is None:
            self._file = _scratch_file()
            self._schema = table.schema
            self._writer = pyarrow.ipc.new_file(self._file, table.schema)
        self._writer.write_table(table)
        self._rows, self._size = [], 0

    def _collected(self) -> pyarrow.Table:
        """Return the rows in memory as a table, of which pyarrow would leave out further keys without a word."""
        names = set(self._schema.names) if self._schema is not None else self._rows[0].keys() if self._rows else set()
        if further := {name: None for row in self._rows for name in row if name not in names}:
            raise DeltuneError(
                f"rows have {word_list(list(further))}, and those before them have {word_list(sorted(names))} alone: "
                "give all rows the same keys"
            )
        return pyarrow.Table.from_pylist(self._rows, schema=self._schema)

    def rows(self) -> Sequence[Row]:
        """Return all rows; nothing may be added afterwards."""
        return self._rows if self.in_memory else ArrowRows(self.table())

    def table(self) -> pyarrow.Table:
        """Return all rows as a table, of a file that nobody else sees; nothing may be added afterwards."""
        if self.in_memory:
            return self._collected()
        if self._rows:
            self._flush()
        self._writer.close()
        with self._file as file:
            file.flush()
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return pyarrow.ipc.open_file(pyarrow.py_buffer(mapped)).read_all()


def _scratch_file() -> Any:
    """Return a file without a name, which ends with its process, beside the cache or else among temporary files."""
    folder = cache_folder()
    try:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryFile(dir=folder)
    except OSError:
        return tempfile.TemporaryFile()


def _size(value: Any) -> int:
    """Return how many numbers and letters a value has."""
    if isinstance(value, list) and value and isinstance(value[0], list):
        return sum(map(len, value))
    return len(value) if isinstance(value, list | str) else 1


def stored_dataset(rows: Iterable[Row], schema: pyarrow.Schema | None = None) -> Dataset:
    """Return a data set of rows, which are on the disk where they are many."""
    from datasets import Dataset

    collector = RowCollector(schema)
    for row in rows:
        collector.append(row)
    return Dataset(collector.table(), fingerprint=uuid.uuid4().hex)  # without one, datasets hashes all rows


def in_slices(columns: Any, size: int | None = None) -> Iterator[tuple[int, dict[str, list[Any]]]]:
    """Yield columns in slices of some rows, each with the number of its first row."""
    size = size or ROWS_AT_ONCE
    for first in range(0, len(next(iter(columns.values()))), size):
        yield first, {name: list(values[first : first + size]) for name, values in columns.items()}


def columns_of(dataset: Dataset) -> dict[str, Sequence[Any]]:
    """Return the columns of a data set by name, whose values are read when they are asked for."""
    return {name: dataset[name] for name in dataset.column_names}


class NumberedRows(Sequence[tuple[int, Row]]):
    """The rows of a file with their numbers, on the disk as JSON where they are many.

    Attributes:
        columns: The columns that any row has, in the order of their first appearance.
        no_json: Those that hold what JSON has no form for, such as bytes; dates are texts.
    """

    def __init__(self, rows: Iterable[tuple[int, Row]] = ()) -> None:
        self.columns: dict[str, None] = {}
        self.no_json: set[str] = set()
        self._count = 0
        self._few: list[tuple[int, Row]] = []
        schema = pyarrow.schema({"number": pyarrow.int64(), "row": pyarrow.string()})
        self._texts = RowCollector(schema, LETTERS_IN_MEMORY)
        self._stored: Sequence[Row] | None = None
        for number, row in rows:
            self.append(number, row)

    def append(self, number: int, row: Row) -> None:
        """Add a row, before any is read."""
        self.columns |= dict.fromkeys(row)
        self._count += 1
        try:
            text = json.dumps(row)
        except TypeError:
            if row.get("id") is not None:
                row = {**row, "id": str(row["id"])}
            self.no_json |= {name for name, value in row.items() if not _has_form(value)}
            text = json.dumps(row, default=_no_json)
            row = json.loads(text)  # the same in memory as on the disk
        self._texts.append({"number": number, "row": text})
        if self._texts.in_memory:
            self._few.append((number, row))
        else:
            self._few = []

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[tuple[int, Row]]:
        return iter(self._few) if self._texts.in_memory else map(_decoded, self._read())

    def __getitem__(self, index: Any) -> Any:
        if self._texts.in_memory:
            return self._few[index]
        rows = self._read()[index]
        return list(map(_decoded, rows)) if isinstance(index, slice) else _decoded(rows)

    def _read(self) -> Sequence[Row]:
        if self._stored is None:
            self._stored = self._texts.rows()
        return self._stored


def _decoded(stored: Row) -> tuple[int, Row]:
    return stored["number"], json.loads(stored["row"])


def _has_form(value: Any) -> bool:
    """Return whether JSON has a form for a value and all that is in it."""
    if isinstance(value, dict | list):
        return all(map(_has_form, value.values() if isinstance(value, dict) else value))
    return value is None or isinstance(value, str | int | float | Decimal | date | time)


def _no_json(value: Any) -> float | str | dict[str, str]:
    """Return a decimal as a float, a date as a text, and of other values, such as bytes, what no column can read."""
    if isinstance(value, date | time):
        return value.isoformat()
    return float(value) if isinstance(value, Decimal) else {type(value).__name__: str(value)}
