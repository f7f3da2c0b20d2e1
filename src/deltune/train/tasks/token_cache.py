"""A cache of tokenized rows on the disk, in Arrow files named by a hash of the data, tokenizer and task options."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow

from ...errors import word_list
from ...files import CACHE_VARIABLE, atomic_open, cache_folder, file_lock
from ...templates import end_tokens
from ..data.rows import ArrowRows
from .base import Columns, TaskKind, TaskOptions
from .encoding import EncodedRows

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

VERSION = 8
"""Raised when an encoder returns other rows for the same input."""
NAME_LENGTH = 32
"""Hexadecimal digits of the name of a cached file."""
TEMPORARY_PREFIX = ".deltune-"
"""Begins the names of files that are still being written."""
METADATA_FIELDS = (
    "truncated", "num_texts", "truncated_targets", "truncated_tokens", "untrained", "trained_tokens", "longest",
    "notes",
)  # fmt: skip
"""Fields of `EncodedRows` that are stored beside the rows, as JSON."""
ACTIVATIONS = "trunk"
"""The folder in the cache that holds the activations of frozen layers."""
MAX_BYTES = 8 * 2**30
"""Size of the cache beyond which the files used longest ago are removed."""

logger = logging.getLogger("deltune")


def encode_splits(
    kind: TaskKind,
    tokenizer: PreTrainedTokenizerBase,
    model: PreTrainedModel,
    splits: Mapping[str, Columns],
    options: TaskOptions,
    training: Collection[str],
    content: str,
    begin: Callable[[str, int], Callable[[int], None]] | None = None,
) -> dict[str, EncodedRows]:
    """Encode the rows of several splits, or read from the cache what was encoded before.

    A folder that cannot be written is a warning; a file that cannot be read is written again. `training` names the
    splits to train on, `content` is a digest of all rows; begin(title, rows) returns what is told how many are done.
    """
    from datasets.fingerprint import Hasher

    def encode(split: str) -> EncodedRows:
        columns = splits[split]
        advance = begin(f"tokens of {split}", len(next(iter(columns.values())))) if begin else None
        return kind.encode(tokenizer, model, columns, options, split in training, advance)

    folder = cache_folder()
    if folder is None:
        return {split: encode(split) for split in splits}
    depends_on = {
        "version": VERSION, "kind": [kind.name, kind.head, kind.encode.__name__], "tokenizer": Hasher.hash(tokenizer),
        "options": {name: value for name, value in asdict(options).items() if name != "generate_kwargs"},
        "model_inputs": sorted(signature(model.forward).parameters), "ends": list(end_tokens(tokenizer, model)),
    }  # fmt: skip
    encoded, known = {}, []
    for split in splits:
        facts = {**depends_on, "content": f"{content} {split}", "training": split in training}
        key = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()
        path = folder / f"{key[:NAME_LENGTH]}.arrow"
        with exclusive_creation(path):
            rows = _read_rows(path)
            if rows is not None:
                known.append(split)
            else:
                rows = encode(split)
                try:
                    _write_rows(path, rows)
                except (OSError, pyarrow.ArrowException) as error:
                    todo = f"{CACHE_VARIABLE}=off turns the cache off"
                    warnings.warn(f"tokenized rows cannot be kept in {folder} ({error}); {todo}", stacklevel=2)
                rows = _read_rows(path) or rows
        encoded[split] = rows
    if known:
        logger.info("the tokens of %s are read from the cache in %s", word_list(known), folder)
    return encoded


def cached_files(folder: Path) -> dict[str, list[Path]]:
    """Return the files of the cache: tokenised rows, activations and leftovers of broken writes."""
    name = "[0-9a-f]" * NAME_LENGTH
    return {
        "tokenised rows": sorted(folder.glob(f"{name}.arrow")),
        "activations of frozen layers": sorted(folder.glob(f"{ACTIVATIONS}/{name}.safetensors")),
        "locks and unfinished files": sorted(folder.rglob(f"{TEMPORARY_PREFIX}*")),
    }


def exclusive_creation(path: Path) -> contextlib.AbstractContextManager[bool]:
    """Lock a file, so that a second process waits inside this context and then finds what the first has written.

    Where the file system has no locks, every process writes the file, and the last one replaces it.
    """
    return file_lock(path.parent / f"{TEMPORARY_PREFIX}{path.stem}.lock")


def _write_rows(path: Path, encoded: EncodedRows) -> None:
    """Write rows as one file, atomically."""
    rows = encoded.rows
    table = rows.table if isinstance(rows, ArrowRows) else pyarrow.Table.from_pylist(rows)
    table = table.append_column("length", pyarrow.array(encoded.lengths, pyarrow.int64()))
    table = table.replace_schema_metadata({name: json.dumps(getattr(encoded, name)) for name in METADATA_FIELDS})
    with atomic_open(path, TEMPORARY_PREFIX) as file, pyarrow.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=10_000)
    evict_old_files(path.parent, ".arrow", [path], MAX_BYTES)


def _read_rows(path: Path) -> EncodedRows | None:
    """Read cached rows; None if there is no file or it cannot be read."""
    if not path.is_file():
        return None
    try:
        table = pyarrow.ipc.open_file(pyarrow.memory_map(str(path))).read_all()
        facts = {name: json.loads(table.schema.metadata[name.encode()]) for name in METADATA_FIELDS}
        facts["notes"] = tuple(facts["notes"])
        lengths = table["length"].to_pylist()
        os.utime(path)
    except (OSError, KeyError, TypeError, ValueError, pyarrow.ArrowException):
        return None
    encoded = EncodedRows(ArrowRows(table.drop_columns(["length"])), **facts)
    encoded.__dict__["lengths"] = lengths  # fills the cached property, so that the rows need not be read
    return encoded


def evict_old_files(folder: Path, suffix: str, newest: Collection[Path], max_bytes: float) -> None:
    """Remove the cached files that were used longest ago, until the others fit into `max_bytes`.

    Temporary files that a killed process left more than a day ago are removed too. Files with other names stay.
    """

    def newest_first(paths: Iterable[Path]) -> list[tuple[float, int, Path]]:
        files = []
        for path in paths:
            with contextlib.suppress(OSError):  # another process may remove it
                status = path.stat()
                files.append((status.st_mtime, status.st_size, path))
        return sorted(files, reverse=True)

    total = sum(size for _, size, _ in newest_first(newest))
    cached = folder.glob(f"{'[0-9a-f]' * NAME_LENGTH}{suffix}")
    for _, size, path in newest_first(p for p in cached if p not in newest):
        total += size
        if total > max_bytes:
            path.unlink(missing_ok=True)
    for used, _, path in newest_first(folder.glob(f"{TEMPORARY_PREFIX}*")):
        if time.time() - used > 24 * 3600:
            path.unlink(missing_ok=True)
