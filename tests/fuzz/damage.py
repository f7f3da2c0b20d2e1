"""Seeded mutations of bytes, JSON values and folders, and the law that every reader is held to."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deltune.errors import MAX_MESSAGE_LENGTH, DeltuneError

FRAGMENTS = (
    b"", b"\0", b"\xef\xbb\xbf", b"\xff\xfe", b"\xe9", b"\r", b"\n", b"\r\n\r\n", "\u2028".encode(), "\x85".encode(),
    b"\x0c", b'"', b"'", b",", b":", b"{", b"}", b"[", b"]", b"&a ", b"*a", b"!!binary x", b"!!int ''", b"<<: ", b"- ",
    b"NaN", b"1e999", b"9" * 5000, b"-1", b"null", b"true", b'"\\ud800"', b"[" * 3000, b"~", b"../..", b"\\", b"\t",
    b'{"a": 1}', b"2020-13-45", b"=", b"\x1f\x8b", b"\x80" * 7,
)  # fmt: skip
"""What stands in a file where nobody expects it."""

VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 3, 10**12, 10**30, 1.5, float("nan"), float("inf"), "", " ", "x", "~nosuch/x", "x" * 300,
    "a\0b", "\ud800", "\u2028", "../..", "/", ".", "1e-3", "9" * 5000, [], {}, [None], ["a", "a"], [[1, [2, [3]]]],
    {"a": 1}, {"": None}, {"text": {"b": [1]}}, ["x", 1, None], "lora(", "a=b,c=d", "{text:>99999999}", {"1": "a"},
    "@DEEP@", "@LONG@", "²", "-1", "\u0661",
)  # fmt: skip
"""What stands where another kind of value belongs."""


def mutated_bytes(content: bytes, chance: random.Random) -> bytes:
    """The content with one to three places cut, doubled, flipped, or replaced by a fragment."""
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        at = chance.randrange(len(content) + 1)
        to = min(len(content), at + chance.choice((0, 1, 1, 4, 30, 400)))
        how = chance.randrange(5)
        if how == 0:
            content = content[:at] + chance.choice(FRAGMENTS) + content[to:]
        elif how == 1:
            content = content[:at] + content[to:]
        elif how == 2:
            content = content[:to] + content[at:]
        elif how == 3 and at < len(content):
            content = content[:at] + bytes([content[at] ^ (1 << chance.randrange(8))]) + content[at + 1 :]
        else:
            content = content[:at]
    return content


def mutated_json(value: Any, chance: random.Random) -> Any:
    """A copy of a JSON value with one to three of its places removed, renamed or replaced."""
    root = {"": copy.deepcopy(value)}
    for _ in range(chance.choice((1, 1, 2, 3))):
        places = list(_places(root))
        holder, key = chance.choice(places)
        how = chance.randrange(6)
        if how == 0 and holder is not root:
            del holder[key]
        elif how == 1 and isinstance(holder, dict) and holder is not root:
            holder[chance.choice(("x", "a", "\ud800", str(key).upper()))] = holder.pop(key)
        else:
            holder[key] = copy.deepcopy(chance.choice(VALUES))
    return root[""]


def text_of(value: Any) -> str:
    """A value as JSON, with what no encoder would write where its placeholders stand."""
    text = json.dumps(value)
    return text.replace('"@DEEP@"', "[" * 3000 + "]" * 3000).replace('"@LONG@"', "9" * 5000)


def _places(value: Any) -> list[tuple[Any, Any]]:
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    return [(value, key) for key in keys] + [place for key in keys for place in _places(value[key])]


def mutated_file(path: Path, chance: random.Random) -> None:
    """Change a file in place: as JSON or JSON lines where it is such and chance wills, else its bytes."""
    content = path.read_bytes()
    try:
        if path.suffix == ".json" and chance.random() < 0.6:
            path.write_text(text_of(mutated_json(json.loads(content), chance)))
            return
        if path.suffix == ".jsonl" and chance.random() < 0.6:
            lines = content.decode().split("\n")
            at = chance.randrange(len(lines) - 1)
            lines[at] = text_of(mutated_json(json.loads(lines[at]), chance))
            path.write_text("\n".join(lines))
            return
    except ValueError:
        pass
    path.write_bytes(mutated_bytes(content, chance))


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder with its bytes; of a link, where it leads."""
    return {
        str(path.relative_to(folder)): str(path.readlink()).encode() if path.is_symlink() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


def outcome(call: Callable[[], Any], folder: Path | None = None) -> str:
    """Hold a call to the law: a result, or a DeltuneError, which leaves every file as it was.

    Returns:
        "fine" or "refused".

    Raises:
        AssertionError: Something was refused and files are other than before.
        Exception: Any that is no DeltuneError, as it is.
    """
    before = contents(folder) if folder is not None else {}
    try:
        call()
    except DeltuneError as error:
        assert 0 < len(str(error)) < MAX_MESSAGE_LENGTH + 300, "a message that nobody can read"
        assert folder is None or contents(folder) == before, f"refused, and changed all the same: {error}"
        return "refused"
    return "fine"
