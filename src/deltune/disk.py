"""Files and folders read within bounds, and written whole or not at all; every refusal is a DeltuneError."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from .errors import DeltuneError, Full, excerpt, first_line

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
SAID = ("no space", "file too large", "is full")
"""Of errors without a number: those of safetensors and SQLite."""

MOST_JSON = 16 << 20
"""Bytes of the longest JSON file that is read; one that describes a hundred thousand tensors has half of that."""

UNSYNCED = (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES)
"""What file systems answer that cannot sync a folder."""


def refused(where: str | Path, error: Exception, whole: str = "what is there is whole") -> DeltuneError:
    """The error for a write that the system, or safetensors or SQLite for it, refused; whole: what is not lost."""
    number = getattr(error, "errno", None)
    if number in FULL or (number is None and any(said in str(error).lower() for said in SAID)):
        return Full(f"no space left for {where}; {whole}. Make room and run the same command again")
    return DeltuneError(f"{where} cannot be written or read: {error}; {whole}")


@contextlib.contextmanager
def room(where: str | Path) -> Iterator[None]:
    """Turn a refusal of the file system inside the context, such as a full disk, into one clear error."""
    try:
        yield
    except (ConnectionError, TimeoutError):  # of a tracker, not of the disk
        raise
    except OSError as error:
        raise refused(where, error) from error


# -- paths


def local_path(path: object, option: str = "path") -> Path:
    """Expand `~` in a path that a user gave, and check that the file system takes it; nothing need be there.

    Args:
        path: The path; anything but text and `Path` is refused.
        option: What the path was given as, for the message.

    Raises:
        DeltuneError: The path names an unknown user, has a NUL in it, is too long, leads in a circle, or leads through
            a folder that may not be entered.
    """
    if not isinstance(path, str | os.PathLike):
        raise DeltuneError(f"{option} is a path, not {excerpt(path)}")
    shown = excerpt(str(path))
    try:
        expanded = Path(path).expanduser()
    except RuntimeError as error:
        raise DeltuneError(f"{option} {shown}: there is no such user on this machine; write the path out") from error
    try:
        os.stat(expanded)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else first_line(error)
        raise DeltuneError(f"{option} {shown} cannot be used as a path: {reason}; give another one") from error
    return expanded


# -- reading


def file_in(folder: Path, name: str) -> Path | None:
    """The path of a regular file of a folder, or None if the folder has no such file.

    A symbolic link is followed if its target lies inside the folder. In a snapshot of the Hugging Face cache, whose
    files are links, it is also followed to the blobs of the same repository.

    Raises:
        DeltuneError: The file is a link that leads out of the folder, or the system does not let us look.
    """
    path = folder / name
    try:
        if not path.is_file():
            if os.path.lexists(path):
                raise DeltuneError(f"{path} is no file that can be read, but a broken link, a folder or a device")
            return None
        home, target = folder.resolve(), path.resolve()
    except (OSError, ValueError) as error:
        raise DeltuneError(f"{path} cannot be read: {error}") from error
    if target.is_relative_to(home) or any(target.is_relative_to(blobs) for blobs in _blobs(home)):
        return path
    raise DeltuneError(
        f"{path} is a link that leads out of its folder, to {target}, and is not followed; put the file itself there"
    )


def _blobs(home: Path) -> list[Path]:
    """Where the files of a snapshot in the Hugging Face cache are kept: models--NAME/snapshots/REVISION is the home."""
    repositories = [path.parent.parent for path in (home, *home.parents) if path.parent.name == "snapshots"]
    return [path / "blobs" for path in repositories if path.name.startswith(("models--", "datasets--", "spaces--"))]


def parse_json(text: str | bytes) -> Any:
    """Parse JSON, without surprises.

    Raises:
        ValueError: The text is no JSON, names a key of an object twice, or is nested too deeply.
    """
    try:
        return json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise ValueError(f"the key {excerpt(twice)} occurs twice")
    return value


def read_json(path: Path) -> Any:
    """Read a JSON file of at most `MOST_JSON` bytes.

    Raises:
        DeltuneError: The file cannot be read, is not JSON (the message names the line), or is beyond the bounds.
    """
    try:
        with open(path, "rb") as file:
            raw = file.read(MOST_JSON + 1)
        if len(raw) > MOST_JSON:
            raise DeltuneError(f"{path} cannot be read: it is longer than {MOST_JSON >> 20} MiB")
        return parse_json(raw)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise DeltuneError(f"{path} is damaged, or is not JSON: {error.msg} at {place}") from error
    except UnicodeDecodeError as error:
        raise DeltuneError(f"{path} is damaged, or is not JSON: byte {error.start:,} is not text") from error
    except (OSError, ValueError) as error:
        raise DeltuneError(f"{path} cannot be read: {error}") from error


def read_object(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Raises:
        DeltuneError: There is no such file, it is no JSON, or no object.
    """
    value = read_json(path)
    if not isinstance(value, dict):
        raise DeltuneError(f"{path} is no JSON object but {type(value).__name__}")
    return value


def read_objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Read a file of JSON lines as `write_lines` writes it; yields the number of each line and its object.

    Only a line feed ends a line: U+2028 and its like stand in texts, where `str.splitlines` would cut.

    Raises:
        DeltuneError: The file cannot be read, or a line is no JSON object; the message names the line.
    """
    number = 0
    try:
        with open(path, encoding="utf-8", newline="\n") as file:
            for number, line in enumerate(file, 1):
                value = parse_json(line)
                if not isinstance(value, dict):
                    raise ValueError(f"not a JSON object but {excerpt(value)}")
                yield number, value
    except (OSError, ValueError) as error:
        raise DeltuneError(f"{path} cannot be read (line {number}): {error}") from error


# -- writing


def fsync_directory(folder: Path) -> None:
    """Sync a folder to the disk, so that the names in it survive a loss of power; files are synced by themselves."""
    if os.name == "nt":
        return  # there a folder cannot be opened
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in UNSYNCED:
            raise
    finally:
        os.close(handle)


def fsync_file(path: Path) -> None:
    """Sync a file to the disk that somebody else wrote."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def file_mode(folder: Path) -> int:
    """Return the permissions that a new file gets in a folder, as the umask leaves them.

    They are found by making a file: to read the umask a process must set it, and other threads would see that.
    """
    probe = folder / f".mode-{secrets.token_hex(8)}"
    handle = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        return stat.S_IMODE(os.fstat(handle).st_mode)
    finally:
        os.close(handle)
        os.unlink(probe)


@contextlib.contextmanager
def replacing(path: Path, prefix: str | None = None) -> Iterator[BinaryIO]:
    """Open a file that takes the place of `path` when the context ends well: whole, synced, or not at all.

    Args:
        path: The file to replace; its folder must be there.
        prefix: Begins the name of the file while it is written, beside `path`. Default: a dot and the name of `path`.
    """
    fresh = path.parent / f"{prefix or f'.{path.name[:40]}-'}{secrets.token_hex(8)}"
    handle = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)  # the umask takes from these permissions
    try:
        with open(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


def write(path: Path, text: str) -> None:
    """Write a text file whole or not at all."""
    with replacing(path) as file:
        file.write(text.encode())


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON, whole or not at all."""
    write(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write rows as JSON lines, whole or not at all."""
    write(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


@contextlib.contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Give a fresh folder to fill, and put it in the place of `target` if nothing went wrong inside the context.

    The files get the permissions that the process's umask leaves, like every file it creates. They, their folders and
    the renaming are flushed to the disk, so that a power failure leaves the old folder or the new one.

    Raises:
        DeltuneError: The target is the working folder or a root, which nothing can take the place of.
        Whatever is raised inside the context, and OSError; the target is then what it was, and nothing else is left.
    """
    if not target.name:
        raise DeltuneError(f"'{target}' cannot be replaced by a new folder; name one inside of it")
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = _fresh(target)
    old: Path | None = None
    try:
        yield fresh
        _flush(fresh)
        if target.exists():
            old = _fresh(target, "old-")  # found again by that name after a kill between the two renames
            os.replace(target, old)
        try:
            os.replace(fresh, target)
            fsync_directory(target.parent)
        except BaseException:
            if not fresh.exists():
                os.replace(target, fresh)
            if old is not None:
                os.replace(old, target)
            raise
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        if old is not None:
            with contextlib.suppress(OSError):
                old.rmdir()  # never a full one: that is what was there before
        raise
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def _fresh(target: Path, kind: str = "") -> Path:
    """A new folder beside the target. mkdir, unlike tempfile, gives the permissions that the umask leaves."""
    while True:
        path = target.with_name(f".{target.name}-{kind}{secrets.token_hex(4)}")
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            return path


def _flush(folder: Path) -> None:
    """Give every file below a folder the permissions of a file just made there, and flush everything to the disk.

    safetensors keeps its files to their owner whatever the umask is.
    """
    mode = file_mode(folder)
    for root, _, names in os.walk(folder, topdown=False):
        for name in names:
            os.chmod(os.path.join(root, name), mode)
            fsync_file(Path(root, name))
        fsync_directory(Path(root))
