"""One error for every mistake a person can mend: what was asked, what exists, what to do."""

from __future__ import annotations

import difflib
import math
import reprlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError

LONGEST = 400
"""The longest name that a message shows in full and looks up, in characters."""
LISTED = 200
"""The most names that a message lists."""


class DeltuneError(Exception):
    """A user's mistake, or something that cannot be done here. The command line prints it and exits with code 2."""


class BusyError(DeltuneError):
    """Another process is using the same folder."""


class DiskFullError(DeltuneError):
    """There is no space left for a file."""


class DivergedError(DeltuneError):
    """The loss of a training became NaN or infinite."""


MOST_PROBLEMS = 20
"""The most problems that an error lists; of more it says how many there are."""


class _Excerpts(reprlib.Repr):
    """The library's bounded `repr`, also of numbers that have too many digits to be written."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother = 3, LONGEST, LONGEST

    def repr_int(self, x: int, level: int) -> str:
        if x.bit_length() < 600:
            return super().repr_int(x, level)
        return f"a number of about {round(x.bit_length() * math.log10(2)):,} digits"


_EXCERPTS = _Excerpts()


def excerpt(value: object, length: int = 80) -> str:
    """Return the repr of a value as messages show it, without its middle where it is long."""
    text = _EXCERPTS.repr(value)
    return text if len(text) <= length else f"{text[: length - 11]}...{text[-8:]}"


def error_summary(error: BaseException | str) -> str:
    """Return the first line of an error's message, or its type where it has none."""
    return next(iter(str(error).strip().splitlines()), "" if isinstance(error, str) else type(error).__name__)


def closest_match(name: str, choices: Iterable[str]) -> str | None:
    """Return the choice closest to `name`, or None when nothing is close."""
    if len(str(name)) > LONGEST:
        return None
    matches = difflib.get_close_matches(str(name), [str(k) for k in choices][:LISTED], n=1, cutoff=0.5)
    return matches[0] if matches else None


def unknown_name(kind: str, name: object, choices: Iterable[str], where: str = "") -> str:
    """Return the message for a name that does not exist: what was asked, the nearest name, and all names that exist."""
    names = sorted(str(k) for k in choices)
    shown = ", ".join(name if len(name) <= LONGEST else excerpt(name) for name in names[:LISTED]) or "nothing"
    more = f", and {len(names) - LISTED} more" if len(names) > LISTED else ""
    suggestion = closest_match(name, names) if isinstance(name, str) else None
    hint = f" Did you mean {suggestion!r}?" if suggestion else ""
    return f"unknown {kind} {excerpt(name, LONGEST)}{f' in {where}' if where else ''}.{hint} Known: {shown}{more}."


def error_from_problems(title: str, problems: list[str]) -> DeltuneError:
    """Return one error that lists every problem, so that all of them can be mended at once."""
    if len(problems) == 1:
        return DeltuneError(f"{title}: {problems[0]}")
    lines = [f"  - {problem}" for problem in problems[:MOST_PROBLEMS]]
    if len(problems) > MOST_PROBLEMS:
        lines.append(f"  … and {len(problems) - MOST_PROBLEMS:,} more")
    return DeltuneError(f"{title}: {len(problems)} problems\n" + "\n".join(lines))


def validation_problems(error: ValidationError, most: int = 10) -> list[str]:
    """Return what is wrong with data that pydantic refused, one line for each field."""
    lines = [
        ": ".join(part for part in (".".join(str(key)[:60] for key in e["loc"]), _plain(e["type"], e["msg"])) if part)
        for e in error.errors(include_url=False, include_input=False, include_context=False)
    ]
    lines = list(dict.fromkeys(lines))
    return lines[:most] + ([f"and {len(lines) - most} more"] if len(lines) > most else [])


def _plain(kind: str, message: str) -> str:
    """A message of pydantic without the names of our classes."""
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return "here an object of names and values is expected"
    return message.removeprefix("Value error, ")
