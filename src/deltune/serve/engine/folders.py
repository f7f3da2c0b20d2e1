"""Deltas before they are in memory: the folders of a directory, and the facts in each of them."""

from __future__ import annotations

import hashlib
import math
import os
import re
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ...errors import DeltuneError, error_summary, excerpt
from ...interop.base import is_foreign, read_options
from ...interop.foreign import foreign_model_kind
from ...models import HEADS, head_of_class_name, is_delta
from ...runtime.delta_schema import BaseFacts, TrainedFacts, read_metadata_file
from ...runtime.hub import FILES
from ...runtime.serialization import FACTS, delta_folder
from ..errors import refusal
from .requests import DELTA_NAME, Task

HEAD_TASKS: dict[str, tuple[Task, ...]] = {name: head.served for name, head in HEADS.items() if head.served}
"""What a model with each head can be asked."""

_NAME = re.compile(DELTA_NAME)


def check_delta_name(name: object) -> str:
    """Check that a name can name a delta on a server: one part of a path, and not a hidden one."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise DeltuneError(
            f"{excerpt(name)} cannot name a delta: use at most 200 letters, digits and '-', '_', '.', '+', '@', and "
            "begin with a letter, a digit, '-' or '_'"
        )
    return name


@dataclass(frozen=True)
class FolderFacts:
    """The facts about a delta in its files, without its tensors."""

    head: str  # the head of the model that it belongs to, one of `HEAD_TASKS`
    method: str  # its expression, or what another library calls it
    parameters: int  # how many numbers it has; 0 if only its tensors would say so
    labels: tuple[str, ...]  # the names of its labels
    has_head: bool  # whether it brings a head of its own
    version: str  # a digest of its files
    trained: TrainedFacts = field(default_factory=TrainedFacts)  # the inputs of the run that it is from, if known
    # the base model that it was tuned on; None where its files do not tell it from others of its shape
    base: BaseFacts | None = None

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The tasks of the delta. Labels need a head that was trained, which the base model's need not be."""
        tasks = HEAD_TASKS[self.head]
        return tasks if self.has_head or self.head not in ("classification", "tagging") else ("embed",)


def locate_delta(folder: Path) -> Path:
    """Return the folder with the files of a saved delta, of a finished run, or of an adapter of another library."""
    if (folder / "spec.yaml").is_file() and not (folder / "metrics.json").is_file():
        raise DeltuneError(f"{folder} holds a run of deltune train that is not finished; its delta may change")
    return folder if is_foreign(folder) and not (folder / FACTS).is_file() else delta_folder(folder)


def read_facts(folder: Path) -> FolderFacts:
    """Read what the files of a delta say about it."""
    try:
        where = locate_delta(folder)
        return _foreign_facts(where) if not (where / FACTS).is_file() else _facts(where)
    except OSError as error:
        raise DeltuneError(f"{folder} cannot be read: {error_summary(error)}") from error


def _facts(where: Path) -> FolderFacts:
    metadata = read_metadata_file(where / FACTS)
    labels = tuple(name for _, name in metadata.labels.pairs) if metadata.labels else ()
    return FolderFacts(
        head_of_model_class(metadata.base.model),
        metadata.method,
        sum(math.prod(shape) for name, shape in metadata.tensors.items() if not name.endswith(".index")),
        labels if metadata.head.tensors else (),
        bool(metadata.head.tensors),
        _digest([where / FACTS], metadata.sha256),
        metadata.trained or TrainedFacts(),
        metadata.base,
    )


SETTLING = 0.5
"""Seconds since the last change of an adapter's files after which they are taken to be whole."""


def _foreign_facts(folder: Path) -> FolderFacts:
    """Read an adapter of another library. It has no checksum that tells its files from others, so they must rest."""
    since = time.time() - max(file.stat().st_ctime for file in _files(folder))
    time.sleep(min(max(SETTLING - since, 0.0), SETTLING))
    options = read_options(folder)
    head, labels = foreign_model_kind(folder)
    name = str(options.get("peft_type") or "AdapterHub")
    head = head if head in HEAD_TASKS else "base"
    return FolderFacts(head, name, 0, (), labels is not None, _digest(_files(folder)))


def head_of_model_class(name: str) -> str:
    """Return the head of a class of transformers, as `deltune.models` calls it; "base" for any other class."""
    head = head_of_class_name(name) or "base"
    return head if head in HEAD_TASKS else "base"


def _digest(files: list[Path], also: str = "") -> str:
    digest = hashlib.sha256(also.encode())
    for file in files:
        with open(file, "rb") as opened:
            digest.update(f"{file.name} {file.stat().st_size} ".encode())
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()[:16]


def _files(folder: Path) -> list[Path]:
    """Return the files that make up the delta of a folder; what lies beside them is not read."""
    return [folder / name for name in _FILES if (folder / name).is_file()]


Signature = tuple[tuple[str, int, int, int], ...]
"""Names, sizes, times of change and numbers of files; another signature means that a folder may have changed."""

_RELEVANT = ("", "delta")
_FILES = (*FILES, "spec.yaml", "metrics.json")


def signature(folder: Path) -> Signature:
    """Return by what a changed folder is noticed, without reading its files; empty for a folder without a delta."""
    stamps: list[tuple[str, int, int, int]] = []
    for inside in _RELEVANT:
        with suppress(OSError, ValueError), os.scandir(os.path.join(folder, inside)) as entries:
            for entry in entries:
                if entry.name in _FILES:
                    with suppress(OSError):
                        facts = entry.stat()
                        stamps.append((f"{inside}/{entry.name}", facts.st_size, facts.st_mtime_ns, facts.st_ino))
    return tuple(sorted(stamps))


@dataclass(frozen=True)
class FolderScan:
    """The folders of a directory of deltas but for hidden ones, as an unfinished save has."""

    deltas: dict[str, Path]  # the folders that may hold a delta, by name
    ignored: dict[str, str]  # by name, why the other folders hold none


@dataclass(frozen=True)
class DeltasFolder:
    """Where a server takes its deltas from: a folder with a folder for each, or that of one delta or run."""

    path: Path
    is_one: bool  # as it was when the server began, whatever is put there later

    @classmethod
    def at(cls, path: Path) -> DeltasFolder:
        """Look at a folder that is to be served."""
        folder = cls(path, is_delta(path))
        if folder.is_one:  # clients ask for it by this name
            check_delta_name(path.name)
        folder.scan()
        return folder

    def locate(self, name: str) -> Path:
        """Return where a delta of this name is, or would be."""
        return self.path if self.is_one and self.path.name == name else self.path / name

    def scan(self) -> FolderScan:
        """Return what is there now."""
        try:
            with os.scandir(self.path) as entries:
                names = sorted(entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir())
        except OSError as error:
            raise DeltuneError(f"the folder of deltas {self.path} cannot be read: {error_summary(error)}") from error
        if self.is_one:
            return FolderScan({self.path.name: self.path}, {})
        folders = {name: self.path / name for name in names}
        deltas = {name: folder for name, folder in folders.items() if _NAME.fullmatch(name) and signature(folder)}
        ignored = {name: _why_ignored(folder) for name, folder in folders.items() if name not in deltas}
        return FolderScan(deltas, {_printable(name): _printable(reason) for name, reason in ignored.items()})


def _printable(text: str) -> str:
    """Write the bytes of a file name that are no UTF-8 as escapes, since JSON and logs cannot hold them."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _why_ignored(folder: Path) -> str:
    if folder.is_symlink():  # what is outside of the directory is not described
        return f"{str(folder)!r} is a link to a folder that holds no delta"
    try:
        check_delta_name(folder.name)
        locate_delta(folder)
    except DeltuneError as error:
        return refusal(error).without_python
    except OSError as error:
        return str(error)
    return "its files changed while they were looked at"
