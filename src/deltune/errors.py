"""One error for every mistake a person can mend: what was asked, what exists, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class DeltuneError(Exception):
    """A mistake of the user, or a thing that cannot be had here; the command line prints it and exits with 2."""


class Busy(DeltuneError):
    """Another process is at work on it."""


class Full(DeltuneError):
    """No space is left for what was to be written."""


class Diverged(DeltuneError):
    """A loss that is no number."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name closest to `name`, or None when nothing is close."""
    found = difflib.get_close_matches(str(name), [str(k) for k in known], n=1, cutoff=0.5)
    return found[0] if found else None


def unknown(kind: str, name: object, known: Iterable[str], where: str = "") -> str:
    """Message for an unknown name: what was asked, the nearest name, everything that exists."""
    names = sorted(str(k) for k in known)
    guess = nearest(str(name), names)
    hint = f" Did you mean {guess!r}?" if guess else ""
    listed = ", ".join(names) if names else "nothing"
    return f"unknown {kind} {name!r}{f' in {where}' if where else ''}.{hint} Known: {listed}."


def all_problems(title: str, problems: list[str]) -> DeltuneError:
    """One error that lists every problem found, so that a spec is mended in one go."""
    if len(problems) == 1:
        return DeltuneError(f"{title}: {problems[0]}")
    return DeltuneError(f"{title}: {len(problems)} problems\n" + "\n".join(f"  - {p}" for p in problems))
