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
"""Characters of a name that is shown in full and compared with others."""
LISTED = 200
"""Names that a message lists."""


class DeltuneError(Exception):
    """A mistake of the user, or a thing that cannot be had here; the command line prints it and exits with 2."""


class Busy(DeltuneError):
    """Another process is at work on it."""


class Full(DeltuneError):
    """No space is left for what was to be written."""


class Diverged(DeltuneError):
    """A loss that is no number."""


MOST_PROBLEMS = 20
"""Of so many problems each is told; of more, how many there are."""


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
    """Return a value as messages show it: its repr, of which the middle goes where it is long."""
    text = _EXCERPTS.repr(value)
    return text if len(text) <= length else f"{text[: length - 11]}...{text[-8:]}"


def first_line(error: BaseException | str) -> str:
    """Return the first line of an error's message, or its type where it has none."""
    return next(iter(str(error).strip().splitlines()), "" if isinstance(error, str) else type(error).__name__)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name closest to `name`, or None when nothing is close."""
    if len(str(name)) > LONGEST:
        return None
    found = difflib.get_close_matches(str(name), [str(k) for k in known][:LISTED], n=1, cutoff=0.5)
    return found[0] if found else None


def unknown(kind: str, name: object, known: Iterable[str], where: str = "") -> str:
    """Message for an unknown name: what was asked, the nearest name, everything that exists."""
    names = sorted(str(k) for k in known)
    listed = ", ".join(name if len(name) <= LONGEST else excerpt(name) for name in names[:LISTED]) or "nothing"
    more = f", and {len(names) - LISTED} more" if len(names) > LISTED else ""
    guess = nearest(name, names) if isinstance(name, str) else None
    hint = f" Did you mean {guess!r}?" if guess else ""
    return f"unknown {kind} {excerpt(name, LONGEST)}{f' in {where}' if where else ''}.{hint} Known: {listed}{more}."


def all_problems(title: str, problems: list[str]) -> DeltuneError:
    """One error that lists every problem found, so that a spec is mended in one go."""
    if len(problems) == 1:
        return DeltuneError(f"{title}: {problems[0]}")
    lines = [f"  - {problem}" for problem in problems[:MOST_PROBLEMS]]
    if len(problems) > MOST_PROBLEMS:
        lines.append(f"  … and {len(problems) - MOST_PROBLEMS:,} more")
    return DeltuneError(f"{title}: {len(problems)} problems\n" + "\n".join(lines))


def validation_problems(error: ValidationError, most: int = 10) -> list[str]:
    """What is wrong with data that pydantic refused: a line for each field, by its path."""
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
