"""Arguments against their type hints, the same for an expression and for Python: what fits, and how it is excerpt."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import types
import typing
from fractions import Fraction
from typing import Any

from ..errors import DeltuneError, excerpt

MAX_INTEGER = 2**63 - 1
"""The largest whole number, which is the largest size that torch can give a tensor."""


@functools.cache
def _field_types(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def check_fields(value: Any) -> None:
    """Error when a field of a frozen dataclass does not fit its type; lists become tuples, so that it can be hashed."""
    kind: Any = type(value)
    hints = _field_types(kind)
    for field in dataclasses.fields(value):
        content = getattr(value, field.name)
        if isinstance(content, list):
            content = tuple(content)
            object.__setattr__(value, field.name, content)
        if not fits_type(hints[field.name], content):
            raise DeltuneError(f"{type(value).__name__}: {type_mismatch(field.name, hints[field.name], content)}")


def fits_type(hint: Any, value: Any) -> bool:
    """Whether a value fits a type hint; an int fits a float, a bool fits neither. Numbers are finite, whole ones at
    most LARGEST."""
    if hint is Any:
        return True
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(fits_type(h, value) for h in arguments)
    if origin is typing.Literal:
        return any(value == allowed and type(value) is type(allowed) for allowed in arguments)
    if origin is tuple:
        return isinstance(value, tuple) and (
            all(fits_type(arguments[0], v) for v in value)
            if len(arguments) == 2 and arguments[1] is Ellipsis
            else len(value) == len(arguments) and all(map(fits_type, arguments, value))
        )
    if hint is None or hint is type(None):
        return value is None
    if hint in (int, float):
        number = isinstance(value, (int, float) if hint is float else int) and not isinstance(value, bool)
        return number and number_problem(value) is None
    return isinstance(value, hint)


def number_problem(value: float) -> str | None:
    """Why a number cannot be used anywhere, or None."""
    if isinstance(value, int):
        return None if abs(value) <= MAX_INTEGER else f"a whole number is at most 2^63 - 1 = {MAX_INTEGER:,}"
    return None if math.isfinite(value) else "a number is finite, at most 1.8e308"


def type_mismatch(key: str, hint: Any, value: object) -> str:
    """Message for an argument that does not fit its type hint."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and (problem := number_problem(value)):  # type: ignore[arg-type]
        return f"{key} is {excerpt(value)}: {problem}"
    return f"{key}={excerpt(value)} is not {describe_type(hint)}"


NUMERAL = r"[-+]?(?:[0-9]{1,30}(?:\.[0-9]{0,30})?|\.[0-9]{1,30})(?:[eE][-+]?[0-9]{1,3})?"
"""A number of bounded length in ASCII digits."""
PERCENTAGE = re.compile(rf"\s*({NUMERAL})\s*%\s*")


def parse_percentage(text: str) -> Fraction | None:
    """The exact share that a text such as "0.05%" names, or None where it names none."""
    match = PERCENTAGE.fullmatch(text)
    return Fraction(match[1]) / 100 if match else None


def describe_type(hint: Any) -> str:
    """A type hint in words."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe_type(h) for h in arguments)
    if origin is typing.Literal:
        return "one of " + ", ".join(repr(v) for v in arguments)
    if origin is tuple:
        return f"a list of {describe_type(arguments[0])}"
    descriptions = {int: "a whole number", float: "a number", str: "a text", bool: "True or False", type(None): "None"}
    return descriptions.get(hint, f"a {getattr(hint, '__name__', hint)}")
