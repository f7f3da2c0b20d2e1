"""Tokenised rows in Arrow files: of many rows only what is read is in memory."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow

from ...files import cache_folder

Row = dict[str, Any]
ROWS_IN_MEMORY = 2_000
"""Rows that an encoder holds before they go into a file; a token takes about 50 bytes there, as numbers of Python."""


class ArrowRows(Sequence[Row]):
    """The rows of a memory-mapped Arrow table, converted to Python when they are read."""

    def __init__(self, table: pyarrow.Table, file: Any = None) -> None:
        self.table, self.file = table, file  # a temporary file goes with its rows

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.take(range(len(self))[index])
        return self.take([index])[0]

    def __iter__(self) -> Iterator[Row]:
        for batch in self.table.to_batches():
            yield from batch.to_pylist()

    def take(self, indices: Sequence[int]) -> list[Row]:
        """Return several rows at once."""
        rows: list[Row] = self.table.take(pyarrow.array(indices, pyarrow.int64())).to_pylist()
        return rows


class RowCollector:
    """Collects the rows of an encoder, many of them in a temporary file of the cache's folder."""

    def __init__(self) -> None:
        self._rows: list[Row] = []
        self._file: Any = None
        self._writer: Any = None
        self._schema: pyarrow.Schema | None = None

    def append(self, row: Row) -> None:
        """Add a row; all have the same keys."""
        self._rows.append(row)
        if len(self._rows) >= ROWS_IN_MEMORY:
            self._flush()

    def _flush(self) -> None:
        table = pyarrow.Table.from_pylist(self._rows, schema=self._schema)
        if self._writer is None:
            folder = cache_folder()
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.NamedTemporaryFile(dir=folder, prefix=".deltune-", suffix=".rows")  # noqa: SIM115
            self._schema = table.schema
            self._writer = pyarrow.ipc.new_file(self._file.name, table.schema)
        self._writer.write_table(table)
        self._rows = []

    def rows(self) -> Sequence[Row]:
        """Return all rows; nothing may be added afterwards."""
        if self._writer is None:
            return self._rows
        if self._rows:
            self._flush()
        self._writer.close()
        return ArrowRows(pyarrow.ipc.open_file(pyarrow.memory_map(self._file.name)).read_all(), self._file)
