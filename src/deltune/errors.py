"""DeltuneError, the one error for every mistake of the user, and the helpers that word its messages."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import os
import reprlib
from collections.abc import Callable, Collection, Iterable, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Literal, ParamSpec, TypeVar

from packaging.requirements import Requirement

if TYPE_CHECKING:
    from pydantic import ValidationError

MAX_NAME_LENGTH = 400
"""Longest name, in characters, that a message shows in full and that is compared with other names."""
MAX_COMPARED_NAMES = 200
"""With how many existing names an unknown one is compared."""
MAX_LISTED_PROBLEMS = 20
"""How many problems a message lists at most; of the others it gives the number."""
MAX_MESSAGE_LENGTH = 1000
"""About how many characters a message has at most; of what is left out it gives the number."""


Fault = Literal["", "files", "model", "tokens", "folder", "part"]
"""Where a fault lies that the operator of a server can mend; "" for any other."""


def with_advice(message: str, advice: str) -> str:
    """Return a message that ends with advice: whole sentences, on a line of their own below a list of problems."""
    between = "\n" if "\n" in message + advice else " " if message.endswith((".", "?", "!")) else ". "
    return f"{message}{between}{advice}" if advice else message


def bounded(text: str, length: int = MAX_MESSAGE_LENGTH) -> str:
    """Return a text of about so many characters at most: the longest lines lose their middle, many lines theirs.

    What was asked stands at the beginning of a message and what to do at its end, so both are kept.
    """
    if len(text) <= length:
        return text
    lines, most = text.split("\n"), max(2, length // 40)
    if len(lines) > most:
        half = most // 2
        lines = [*lines[:half], f"… {counted(len(lines) - 2 * half, 'line')} left out …", *lines[-half:]]
    width = length
    while width > 30 and sum(min(len(line), width) for line in lines) > length:
        width -= 1 + width // 20
    return "\n".join(_without_middle(line, width) for line in lines)


def _without_middle(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    end = width // 3
    start = max(0, width - end - 30)
    return f"{line[:start]} … {counted(len(line) - start - end, 'character')} left out … {line[len(line) - end :]}"


class DeltuneError(Exception):
    """A mistake of the user, or something that is not available here.

    The message says what was asked, what exists and what to do. The command line prints it and exits with code 2.

    Args:
        message: The message. Of one with more than `MAX_MESSAGE_LENGTH` characters the middle is left out.
        in_python: What a caller of Python can do about it: whole sentences, which the message ends with. A server
            leaves them out of its answers, since its clients call nothing.
        fault: Where the fault lies, if a server's operator can mend it: "files" that are damaged or do not fit, another
            base "model", its missing "tokens", a "folder" without a delta, or a "part" that was not registered. A
            server adds what to do, so leave it out where the message says that itself.

    Attributes:
        in_python: The same.
        fault: The same.
        without_python: The message without `in_python`.
    """

    def __init__(self, message: object = "", in_python: str = "", fault: Fault = "") -> None:
        text = bounded(str(message))
        self.args = (with_advice(text, in_python),)  # torch.compile traces this, and no `super().__init__`
        self.without_python, self.in_python, self.fault = text, in_python, fault


class BusyError(DeltuneError):
    """Another process is working on the same folder."""


class StorageError(DeltuneError):
    """The file system refused what was to be written or read: no space left, a folder that is gone, no permission."""


DIVERGED = "training diverged"
"""What the message of a run that diverged contains. Records of studies that were stored before errors had a kind are
recognised by it; nothing else is to read it."""


class DivergedError(DeltuneError):
    """Training diverged: the loss is not a finite number."""


class _BoundedRepr(reprlib.Repr):
    """The standard library's bounded `repr`, extended to integers with too many digits to be written out."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother = 3, MAX_NAME_LENGTH, MAX_NAME_LENGTH

    def repr_int(self, x: int, level: int) -> str:
        if x.bit_length() < 600:
            return super().repr_int(x, level)
        return f"a number of about {round(x.bit_length() * math.log10(2)):,} digits"


_BOUNDED_REPR = _BoundedRepr()


def excerpt(value: object, length: int = 80) -> str:
    """Return the repr of a value for a message, with its middle left out where it is long."""
    text = _BOUNDED_REPR.repr(value)
    return text if len(text) <= length else f"{text[: length - 11]}...{text[-8:]}"


def describe_value(value: object) -> str:
    """Return what a value is, for a message: a text or a path as it is, of anything else its type."""
    if isinstance(value, str | os.PathLike):
        return f"the {'text' if isinstance(value, str) else 'path'} {excerpt(str(value))}"
    return f"a {type(value).__name__}"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless it is one: "1 epoch", "1,200 steps"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def number_range(numbers: Iterable[int]) -> str:
    """Return the smallest and the largest of some numbers, such as "200 to 3,200"; of equal ones, that number."""
    low, high = min(known := list(numbers)), max(known)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def word_list(words: Sequence[str]) -> str:
    """Return words as a list in a sentence: "a", "a and b", "a, b and c"."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def first_of(lines: Sequence[str], most: int = 10) -> list[str]:
    """Return the first lines of a list, and as one more how many are left out: "and 3 more"."""
    return [*lines[:most], *([f"and {len(lines) - most:,} more"] if len(lines) > most else [])]


def first_names(names: Sequence[str], most: int) -> str:
    """Return the first names of a list in one line: "a, b, c and 3 more"."""
    return ", ".join(names[:most]) + (f" and {len(names) - most:,} more" if len(names) > most else "")


def error_summary(error: BaseException | str) -> str:
    """Return the first line of an error's message, or the name of its type where it has no message."""
    return next(iter(str(error).strip().splitlines()), "" if isinstance(error, str) else type(error).__name__)


def closest_match(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is closest to `name`, or None if none is close."""
    if len(str(name)) > MAX_NAME_LENGTH:
        return None
    candidates = [str(other) for other in known][:MAX_COMPARED_NAMES]
    matches = difflib.get_close_matches(str(name), candidates, n=5, cutoff=0.5)

    def closeness(match: str) -> tuple[float, bool]:
        return difflib.SequenceMatcher(None, match, str(name)).ratio(), match[:1] == str(name)[:1]

    return max(matches, key=closeness, default=None)


def unknown_name(kind: str, name: object, known: Iterable[str], where: str = "", hint: str | None = None) -> str:
    """Return the message for an unknown name: the name, the closest one that exists, and all that exist."""
    names = sorted((str(other) for other in known), key=lambda other: (other[:1].isupper(), other))  # methods, forms
    guess = closest_match(name, names) if isinstance(name, str) and not hint else None
    hint = hint or (f"Did you mean {guess!r}?" if guess else "")
    room = 160 if hint else 500
    shown = _fitting((other if len(other) <= MAX_NAME_LENGTH else excerpt(other) for other in names), room)
    listed = ", ".join(shown) or "nothing"
    more = f", and {len(names) - len(shown):,} more" if len(names) > len(shown) else ""
    place = f" in {where}" if where else ""
    return f"unknown {kind} {excerpt(name, MAX_NAME_LENGTH)}{place}.{hint and ' '}{hint} Known: {listed}{more}."


def check_choice(kind: str, value: object, known: Collection[str], hint: str | None = None) -> None:
    """Raise a DeltuneError for a value that is none of the known names."""
    if value not in known:
        raise DeltuneError(unknown_name(kind, value, known, hint=hint))


def _fitting(texts: Iterable[str], room: int, most_of_one: int = MAX_NAME_LENGTH) -> list[str]:
    """The first of some texts that fit into so many characters, of which each takes at most `most_of_one`."""
    shown: list[str] = []
    for text in texts:
        room -= min(len(text), most_of_one) + 2
        if shown and room < 0:
            break
        shown.append(text)
    return shown


def error_from_problems(title: str, problems: list[str], in_python: str = "", fault: Fault = "") -> DeltuneError:
    """Return one error that lists every problem, so that all of them can be mended at once."""
    problems = list(dict.fromkeys(problems))
    if len(problems) == 1:
        return DeltuneError(f"{title}: {problems[0]}", in_python, fault)
    room = MAX_MESSAGE_LENGTH - min(len(title), MAX_MESSAGE_LENGTH // 2) - 60
    shown = _fitting(problems[:MAX_LISTED_PROBLEMS], room, most_of_one=max(100, room // len(problems) - 2))
    lines = [f"  - {problem}" for problem in shown]
    if len(problems) > len(shown):
        lines.append(f"  … and {len(problems) - len(shown):,} more")
    return DeltuneError("\n".join([f"{title}: {len(problems)} problems", *lines]), in_python, fault)


P = ParamSpec("P")
T = TypeVar("T")


def check_booleans(function: Callable[P, T]) -> Callable[P, T]:
    """Make a function refuse values other than True and False, such as 1 and 0, for its arguments of type bool."""
    annotations = {name: str(p.annotation) for name, p in inspect.signature(function).parameters.items()}
    values: dict[str, tuple[object, ...]] = {"bool": (True, False), "bool | None": (True, False, None)}
    booleans = {name: values[annotation] for name, annotation in annotations.items() if annotation in values}

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        problems = [
            f"{key}={excerpt(kwargs[key])} is not {' or '.join(map(str, allowed))}"
            for key, allowed in booleans.items()
            if key in kwargs and not any(kwargs[key] is value for value in allowed)
        ]
        if problems:
            raise error_from_problems(function.__name__, problems)
        return function(*args, **kwargs)

    return call


def validation_problems(error: ValidationError, most: int = 10, show_values: bool = False) -> list[str]:
    """Return what pydantic found wrong, a line for each field, with the field's path."""
    lines = []
    for details in error.errors(include_url=False, include_input=show_values, include_context=False):
        path = ".".join(str(key)[:60] for key in details["loc"])
        message = _without_class_names(details["type"], details["msg"])
        message += f" (given: {excerpt(details['input'])})" if show_values else ""
        lines.append(": ".join(part for part in (path, message) if part))
    return first_of(list(dict.fromkeys(lines)), most)


def _without_class_names(kind: str, message: str) -> str:
    """A message of pydantic without the names of our classes."""
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return "here an object of names and values is expected"
    if kind == "tuple_type":
        return "here a list is expected"
    return message.removeprefix("Value error, ")


def missing_extra(purpose: str, packages: Iterable[str], extra: str) -> str:
    """Return the message for packages that are not installed.

    For example: "figures need matplotlib: pip install 'deltune[studies]'".
    """
    return f"{purpose} {', '.join(packages)}: pip install 'deltune[{extra}]'"  # quoted, because zsh expands brackets


def check_extra(extra: str, purpose: str) -> None:
    """Raise unless every package of one of deltune's extras is installed."""
    missing = _missing_packages(extra)
    if missing:
        raise DeltuneError(missing_extra(purpose, missing, extra))


def _missing_packages(extra: str) -> list[str]:
    """The distributions of an extra, and of the extras that it includes, that are not installed."""
    missing = []
    try:
        requirements = [Requirement(line) for line in metadata.requires("deltune") or ()]
    except metadata.PackageNotFoundError:
        return []  # run from its sources alone: nothing says what the extras hold
    for requirement in requirements:
        if requirement.marker is None or not requirement.marker.evaluate({"extra": extra}):
            continue
        if requirement.name == "deltune":
            missing += [package for included in requirement.extras for package in _missing_packages(included)]
        elif not is_installed(requirement.name):
            missing.append(requirement.name)
    return missing


def is_installed(distribution: str) -> bool:
    """Return whether a distribution is installed, by its name in package indexes, such as "scikit-learn"."""
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True
