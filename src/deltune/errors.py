"""One error for every mistake a person can mend: what was asked, what exists, what to do."""

from __future__ import annotations

import contextlib
import difflib
import math
import reprlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError

LONGEST = 400
"""Characters of a name that is shown in full and compared with others."""
LISTED = 200
"""Names that a message lists."""


class DeltuneError(Exception):
    """A mistake of the user, or a thing that cannot be had here; the command line prints it and exits with 2."""


class BusyError(DeltuneError):
    """Another process is at work on it."""


class DiskFullError(DeltuneError):
    """No space is left for what was to be written."""


class DivergedError(DeltuneError):
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


def error_summary(error: BaseException | str) -> str:
    """Return the first line of an error's message, or its type where it has none."""
    return next(iter(str(error).strip().splitlines()), "" if isinstance(error, str) else type(error).__name__)


def closest_match(name: str, known: Iterable[str]) -> str | None:
    """The known name closest to `name`, or None when nothing is close."""
    if len(str(name)) > LONGEST:
        return None
    found = difflib.get_close_matches(str(name), [str(k) for k in known][:LISTED], n=1, cutoff=0.5)
    return found[0] if found else None


def unknown_name(kind: str, name: object, known: Iterable[str], where: str = "") -> str:
    """Message for an unknown name: what was asked, the nearest name, everything that exists."""
    names = sorted(str(k) for k in known)
    listed = ", ".join(name if len(name) <= LONGEST else excerpt(name) for name in names[:LISTED]) or "nothing"
    more = f", and {len(names) - LISTED} more" if len(names) > LISTED else ""
    guess = closest_match(name, names) if isinstance(name, str) else None
    hint = f" Did you mean {guess!r}?" if guess else ""
    return f"unknown {kind} {excerpt(name, LONGEST)}{f' in {where}' if where else ''}.{hint} Known: {listed}{more}."


def error_from_problems(title: str, problems: list[str]) -> DeltuneError:
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
        ": ".join(
            part
            for part in (".".join(str(key)[:60] for key in e["loc"]), e["msg"].removeprefix("Value error, "))
            if part
        )
        for e in error.errors(include_url=False, include_input=False, include_context=False)
    ]
    lines = list(dict.fromkeys(lines))
    return lines[:most] + ([f"and {len(lines) - most} more"] if len(lines) > most else [])


def missing_extra(purpose: str, packages: Iterable[str], extra: str | None) -> str:
    """Return the message for packages that are not installed: "figures need matplotlib: pip install deltune[studies]".

    Args:
        purpose: What needs them, with its verb: "figures need", "needs".
        packages: The distributions that are missing.
        extra: The extra of deltune that brings them; None for a plain installation.
    """
    return f"{purpose} {', '.join(packages)}: pip install deltune{f'[{extra}]' if extra else ''}"


@contextlib.contextmanager
def require_extra(extra: str, package: str, purpose: str) -> Iterator[None]:
    """Turn a failing import in the block into an error that names the extra to install.

        with require_extra("studies", "matplotlib", "figures need"):
            import matplotlib

    Args:
        extra: The extra of deltune that brings the package.
        package: The distribution that is imported.
        purpose: What needs it, with its verb: "figures need".

    Raises:
        DeltuneError: An import in the block failed.
    """
    try:
        yield
    except ImportError as error:
        raise DeltuneError(missing_extra(purpose, (package,), extra)) from error
