"""Reading files within bounds, and writing files and folders atomically, with every failure a DeltuneError."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from .errors import DeltuneError, StorageError, error_summary, excerpt

FULL_DISK_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
STORAGE_ERRNOS = (*FULL_DISK_ERRNOS, errno.EACCES, errno.EROFS, errno.EIO, errno.ESTALE)
"""Errors by which a file system refuses, whatever the file is."""
FULL_DISK_PHRASES = ("no space", "file too large", "is full")
"""Phrases by which errors without a number, from safetensors and SQLite, say that the disk is full."""

MAX_JSON_BYTES = 16 << 20
"""Size in bytes of the longest JSON file that is read; one that describes 100,000 tensors has half of it."""

FSYNC_UNSUPPORTED_ERRNOS = (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES)
"""Errors of file systems that cannot sync a folder."""


def write_error(where: str | Path, error: Exception, whole: str = "what is there is whole") -> StorageError:
    """Return the error for a write that failed in the system, in safetensors or in SQLite."""
    number = getattr(error, "errno", None)
    is_full = any(phrase in str(error).lower() for phrase in FULL_DISK_PHRASES) if number is None else False
    if is_full or number in FULL_DISK_ERRNOS:
        return StorageError(f"no space left for {where}; {whole}. Make room and run the same command again")
    return StorageError(f"{where} cannot be written or read: {error}; {whole}")


@contextlib.contextmanager
def explain_write_errors(where: str | Path) -> Iterator[None]:
    """Turn an error of the file system inside the context, such as a full disk, into a `StorageError`.

    Other errors of the system, such as a program or a server that is missing, stay what they are.
    """
    try:
        yield
    except OSError as error:
        if error.errno in STORAGE_ERRNOS or _is_about(error, Path(where)):
            raise write_error(where, error) from error
        raise


def _is_about(error: OSError, where: Path) -> bool:
    """Return whether an error names `where`, what is inside it or above it, or a temporary sibling of it."""
    where = Path(os.path.abspath(where))
    names = [name for name in (error.filename, error.filename2) if isinstance(name, str | os.PathLike)]
    for path in map(Path, map(os.path.abspath, names)):
        is_sibling = path.parent == where.parent and path.name.startswith(_sibling_prefix(where))
        if path == where or where in path.parents or path in where.parents or is_sibling:
            return True
    return False


# -- paths


def user_path(path: object, option: str = "path") -> Path:
    """Expand `~` in a path that a user gave, and check that the file system accepts it; it need not exist."""
    if not isinstance(path, str | os.PathLike):
        raise DeltuneError(f"{option} must be a path, not {excerpt(path)}")
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
        reason = error.strerror if isinstance(error, OSError) else error_summary(error)
        raise DeltuneError(f"{option} {shown} cannot be used as a path: {reason}; give another one") from error
    return expanded


CACHE_VARIABLE = "DELTUNE_CACHE"
"""The environment variable that holds the folder of all caches, or `off`."""


def cache_folder() -> Path | None:
    """Return the folder of all caches: $DELTUNE_CACHE, else deltune/rows in the user's cache; None if it is `off`."""
    folder = os.environ.get(CACHE_VARIABLE)
    if folder == "off":
        return None
    user_cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return user_path(folder or f"{user_cache}/deltune/rows", f"${CACHE_VARIABLE}")


# -- reading


def find_file(folder: Path, name: str) -> Path | None:
    """Return the path of a regular file in a folder, or None if the folder has no such file.

    A symbolic link is followed if its target lies inside the folder. In a snapshot of the Hugging Face cache, whose
    files are links, it is also followed to the blobs of the same repository.
    """
    path = folder / name
    try:
        if os.path.basename(name) == name and stat.S_ISREG(_mode(path)):
            return path  # not a link, and through none: it is where the folder is
        if not path.is_file():
            if os.path.lexists(path):
                raise DeltuneError(f"{path} is a broken link, a folder or a device, not a file that can be read")
            return None
        home, target = folder.resolve(), path.resolve()
    except (OSError, ValueError) as error:
        raise DeltuneError(f"{path} cannot be read: {error}") from error
    if target.is_relative_to(home) or any(target.is_relative_to(blobs) for blobs in _hub_cache_blob_folders(home)):
        return path
    raise DeltuneError(
        f"{path} is a link that leads out of its folder, to {target}, and is not followed; put the file itself there"
    )


def _mode(path: Path) -> int:
    """Return the mode of what a path itself names, 0 where there is nothing."""
    try:
        return os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0


def _hub_cache_blob_folders(home: Path) -> list[Path]:
    """Return the folder of blobs to which the files of a snapshot (models--NAME/snapshots/REVISION) may be links."""
    repositories = [path.parent.parent for path in (home, *home.parents) if path.parent.name == "snapshots"]
    return [path / "blobs" for path in repositories if path.name.startswith(("models--", "datasets--", "spaces--"))]


def parse_json(text: str | bytes, unique_keys: bool = True) -> Any:
    """Parse JSON strictly."""
    try:
        return json.loads(text, object_pairs_hook=_object_without_duplicates if unique_keys else None)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def parse_json_object(text: str | bytes) -> dict[str, Any]:
    """Parse one JSON object strictly."""
    value = parse_json(text)
    if not isinstance(value, dict):
        raise ValueError(f"not a JSON object but {excerpt(value)}")
    return value


def _object_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for i, name in enumerate(names) if name in names[:i])
        raise ValueError(f"the key {excerpt(repeated)} occurs twice")
    return value


def read_json(path: Path, unique_keys: bool = True) -> Any:
    """Read a JSON file of at most `MAX_JSON_BYTES` bytes."""
    return parse_json_file(read_json_bytes(path), path, unique_keys)


def read_json_bytes(path: Path) -> bytes:
    """Read a file of at most `MAX_JSON_BYTES` bytes."""
    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_JSON_BYTES + 1)
    except (OSError, ValueError) as error:
        raise DeltuneError(f"{path} cannot be read: {error}") from error
    if len(raw) > MAX_JSON_BYTES:
        raise DeltuneError(f"{path} cannot be read: it is longer than {MAX_JSON_BYTES >> 20} MiB")
    return raw


def parse_json_file(raw: bytes, path: Path, unique_keys: bool = True) -> Any:
    """Parse the contents of a JSON file; arguments and errors are as in `read_json`."""
    try:
        return parse_json(raw, unique_keys)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise DeltuneError(f"{path} is damaged, or is not JSON: {error.msg} at {place}", fault="files") from error
    except UnicodeDecodeError as error:
        raise DeltuneError(
            f"{path} is damaged, or is not JSON: byte {error.start:,} is not text", fault="files"
        ) from error
    except ValueError as error:
        raise DeltuneError(f"{path} cannot be read: {error}") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise DeltuneError(f"{path} does not hold a JSON object but {type(value).__name__}")
    return value


def read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Read a file of JSON lines, as `write_jsonl` writes it.

    Only a line feed ends a line: texts contain U+2028 and similar characters, at which `str.splitlines` would cut.
    """
    number = 0
    try:
        with open(path, encoding="utf-8", newline="\n") as file:
            for number, line in enumerate(file, 1):
                yield number, parse_json_object(line)
    except (OSError, ValueError) as error:
        raise DeltuneError(f"{path} cannot be read (line {number}): {error}") from error


# -- writing


def file_sha256(path: Path) -> str:
    """Return the SHA-256 checksum of a file in hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fsync_directory(folder: Path) -> None:
    """Sync a folder to the disk, so that the names in it survive a loss of power; its files are synced separately."""
    if os.name == "nt":
        return  # Windows cannot open a folder
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in FSYNC_UNSUPPORTED_ERRNOS:
            raise
    finally:
        os.close(handle)


def fsync_file(path: Path) -> None:
    """Sync a file to the disk that other code wrote."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def new_file_mode(folder: Path) -> int:
    """Return the permissions that the umask leaves to a new file in a folder.

    They are read off a temporary file: a process can read its umask only by setting it, which other threads would see.
    """
    probe = folder / f".mode-{secrets.token_hex(8)}"
    handle = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        return stat.S_IMODE(os.fstat(handle).st_mode)
    finally:
        os.close(handle)
        os.unlink(probe)


@contextlib.contextmanager
def file_lock(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold a lock inside this context, for which other processes wait.

    Without `wait` the context may have False, and no lock: another process holds it. Where the file system has no
    locks, nobody waits.
    """
    from filelock import FileLock, Timeout

    held = True
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(FileLock(path, blocking=wait))
        except Timeout:
            held = False
        except (OSError, NotImplementedError):
            pass
        yield held


@contextlib.contextmanager
def atomic_open(path: Path, prefix: str | None = None, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Open a file that replaces `path` when the context ends without an error; otherwise `path` stays as it was."""
    temporary = path.parent / f"{prefix or _sibling_prefix(path)}{secrets.token_hex(8)}"
    handle = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
    try:
        with open(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically, in UTF-8."""
    with atomic_open(path) as file:
        file.write(text.encode())


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON, atomically."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write rows as JSON lines, atomically."""
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


@contextlib.contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Create a folder to fill that replaces `target` when the context ends without an error.

    The files get the permissions that the process's umask leaves, like every file it creates. They, their folders and
    the renaming are synced to the disk, so that a power failure leaves the old folder or the new one.
    """
    if not target.name:
        raise DeltuneError(f"'{target}' cannot be replaced by a new folder; name a folder inside it")
    target = target.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    replacement = _new_sibling_folder(target)
    old: Path | None = None
    try:
        yield replacement
        _fsync_tree(replacement)
        if target.exists():
            old = _new_sibling_folder(target, "old-")  # `leftover_folders` finds it after a kill between the renames
            os.replace(target, old)
        try:
            os.replace(replacement, target)
            fsync_directory(target.parent)
        except BaseException:
            if not replacement.exists():
                os.replace(target, replacement)
            if old is not None:
                os.replace(old, target)
            raise
    except BaseException:
        shutil.rmtree(replacement, ignore_errors=True)
        if old is not None:
            with contextlib.suppress(OSError):
                old.rmdir()  # only if it is empty: else it holds what was there before
        raise
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def _new_sibling_folder(target: Path, kind: str = "") -> Path:
    """Create a folder beside the target. mkdir, unlike tempfile, gives the permissions that the umask leaves."""
    while True:
        path = target.with_name(f"{_sibling_prefix(target)}{kind}{secrets.token_hex(4)}")
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            return path


def _sibling_prefix(target: Path) -> str:
    """Return what the names of temporary siblings begin with: short, so that a long name leaves room for the rest."""
    return f".{target.name.encode()[:80].decode(errors='ignore')}-"


def leftover_folders(target: Path) -> list[Path]:
    """Return the old folders that a killed `atomic_folder` had moved away from `target` and not restored."""
    with contextlib.suppress(OSError):
        if not os.path.lexists(target := target.resolve()):
            prefix = f"{_sibling_prefix(target)}old-"
            return sorted(path for path in target.parent.iterdir() if path.name.startswith(prefix) and path.is_dir())
    return []


def _fsync_tree(folder: Path) -> None:
    """Give every file below a folder the permissions that the umask leaves, and sync everything to the disk.

    safetensors makes its files readable by their owner alone, whatever the umask is.
    """
    mode = new_file_mode(folder)
    for root, _, names in os.walk(folder, topdown=False):
        for name in names:
            os.chmod(os.path.join(root, name), mode)
            fsync_file(Path(root, name))
        fsync_directory(Path(root))


def number_of_bytes(text: str) -> int:
    """Return the number of bytes that a text says, such as 512, 8GiB or "2 GB"; a ValueError if it says none."""
    match = re.fullmatch(r"\s*([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*(?:([KMGT])(I?))?B?\s*", text.upper())
    if match is None:
        raise ValueError("give a number of bytes, or one with a unit such as 8GiB")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2] or " "))
