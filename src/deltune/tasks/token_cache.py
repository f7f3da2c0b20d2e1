"""Tokenised rows kept on the disk in Arrow, by content: data, tokenizer, kind of task, template and lengths."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import pyarrow
from filelock import FileLock

from ..filesystem import atomic_open, user_path
from .base import Columns, Limits, TaskKind
from .encoding import EncodedRows, Row
from .languages import tokenizer_languages

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

VERSION = 4
"""Raised when an encoder gives other rows for the same input."""
NAME = 32
"""Hexadecimal digits of a name by content."""
PART = ".deltune-"
"""Begins the name of what is still being written."""
COUNTS = ("truncated", "texts", "truncated_targets")
"""What is kept of rows besides themselves."""
KEPT = 8 * 2**30  # bytes; beyond it what was used longest ago goes
VARIABLE = "DELTUNE_CACHE"
"""Of the environment: the folder, or `off`."""


class Stored(Sequence[Row]):
    """Rows of a memory-mapped table."""

    def __init__(self, table: pyarrow.Table) -> None:
        self.table = table

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
        """Several rows at once."""
        found: list[Row] = self.table.take(pyarrow.array(indices, pyarrow.int64())).to_pylist()
        return found


def cache_folder() -> Path | None:
    """Where rows are kept: $DELTUNE_CACHE, else deltune below the user's cache; None where it is `off`."""
    named = os.environ.get(VARIABLE)
    if named == "off":
        return None
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return user_path(named or f"{caches}/deltune/rows", f"${VARIABLE}")


def encode_cached(
    kind: TaskKind,
    tokenizer: PreTrainedTokenizerBase,
    model: PreTrainedModel,
    columns: Columns,
    limits: Limits,
    training: bool,
    content: str,
) -> EncodedRows:
    """What kind.encode gives, from the disk where it was kept; `content` says which data the columns are.

    A folder that cannot be written is a warning, a file that cannot be read is made anew.
    """
    place = cache_folder()
    if place is None:
        return kind.encode(tokenizer, model, columns, limits, training)
    key = _key(kind, tokenizer, model, limits, training, content)
    path = place / f"{key}.arrow"
    if (found := _read(path)) is not None:
        return found
    with exclusive_creation(path):
        if (found := _read(path)) is not None:  # made by another process meanwhile
            return found
        made = kind.encode(tokenizer, model, columns, limits, training)
        try:
            _write(path, made)
        except (OSError, pyarrow.ArrowException) as error:
            warnings.warn(
                f"tokenised rows cannot be kept in {place} ({error}); {VARIABLE}=off keeps none", stacklevel=2
            )
            return made
        found = _read(path)
        return made if found is None else found


def _key(
    kind: TaskKind,
    tokenizer: PreTrainedTokenizerBase,
    model: PreTrainedModel,
    limits: Limits,
    training: bool,
    content: str,
) -> str:
    """A name for everything that the rows depend on."""
    asked = {
        "version": VERSION, "kind": [kind.name, kind.loads], "content": content, "training": training,
        "limits": {name: value for name, value in asdict(limits).items() if name != "generate"},
        "taken": sorted(signature(model.forward).parameters), "tokenizer": _identity(tokenizer),
    }  # fmt: skip
    return hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode()).hexdigest()[:NAME]


def _identity(tokenizer: PreTrainedTokenizerBase) -> list[Any]:
    """A tokenizer by what it does: its own file where it is a fast one, else its class, words and special tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    inside = json.loads(backend.to_str()) if backend is not None else dict(sorted(tokenizer.get_vocab().items()))
    for passing in ("truncation", "padding") if backend is not None else ():  # of its last call
        inside.pop(passing, None)
    said = hashlib.sha256(json.dumps(inside).encode()).hexdigest()
    return [
        type(tokenizer).__name__,
        said,
        tokenizer.special_tokens_map,
        sorted(tokenizer.init_kwargs.items(), key=str),
        tokenizer_languages(tokenizer),  # set after it was made
    ]


@contextlib.contextmanager
def exclusive_creation(path: Path) -> Iterator[None]:
    """Inside, no other process makes this file: who comes second waits, and finds it. Where nothing can be locked each
    makes its own, and the last one stays."""
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError, NotImplementedError):
            path.parent.mkdir(parents=True, exist_ok=True)
            held.enter_context(FileLock(path.parent / f"{PART}{path.stem}.lock"))
        yield


@contextlib.contextmanager
def is_complete(path: Path) -> Iterator[BinaryIO]:
    """A file that is there under its name when all of it is on the disk, or not at all: it is trusted by its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_open(path, PART) as file:
        yield file


def _write(path: Path, made: EncodedRows) -> None:
    """The rows as one file, whole or not at all."""
    rows = [{**row, "length": length} for row, length in zip(made.rows, made.lengths, strict=True)]
    table = pyarrow.Table.from_pylist(rows)
    table = table.replace_schema_metadata({name: str(getattr(made, name)) for name in COUNTS})
    with is_complete(path) as file, pyarrow.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=10_000)
    evict_old_files(path.parent, ".arrow", [path], KEPT)


def _read(path: Path) -> EncodedRows | None:
    """Rows that were kept; None where there are none that can be read."""
    if not path.is_file():
        return None
    try:
        table = pyarrow.ipc.open_file(pyarrow.memory_map(str(path))).read_all()
        counts = {name: int(table.schema.metadata[name.encode()]) for name in COUNTS}
        lengths = table["length"].to_pylist()
        os.utime(path)
    except (OSError, KeyError, TypeError, ValueError, pyarrow.ArrowException):
        return None
    made = EncodedRows(Stored(table.drop_columns(["length"])), **counts)
    made.__dict__["lengths"] = lengths  # found already
    return made


def evict_old_files(place: Path, suffix: str, newest: Collection[Path], most: float) -> None:
    """Remove what was used longest ago, until our files in a folder are within so many bytes, `newest` in any case; and
    what a killed process was writing a day ago or earlier. Files of other names stay; what others remove is gone."""

    def known(paths: Iterable[Path]) -> list[tuple[float, int, Path]]:
        found = []
        for path in paths:
            with contextlib.suppress(OSError):
                facts = path.stat()
                found.append((facts.st_mtime, facts.st_size, path))
        return sorted(found, reverse=True)

    total = sum(size for _, size, _ in known(newest))
    for _, size, path in known(p for p in place.glob(f"{'[0-9a-f]' * NAME}{suffix}") if p not in newest):
        total += size
        if total > most:
            path.unlink(missing_ok=True)
    for used, _, path in known(place.glob(f"{PART}*")):
        if time.time() - used > 24 * 3600:
            path.unlink(missing_ok=True)
