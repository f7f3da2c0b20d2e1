"""Checks arguments of methods against type hints, with the same rules and messages in an expression and in Python.

pydantic decides what fits; the messages are ours, so that they name the argument in the words of an expression.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import re
import types
import typing
from fractions import Fraction
from typing import Any

from pydantic import ConfigDict, InstanceOf, TypeAdapter, ValidationError

from ..errors import DeltuneError, excerpt

MAX_INTEGER = 2**63 - 1
"""The largest whole number, which is the largest size that torch can give a tensor."""


@functools.cache
def _field_types(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def check_fields(value: Any) -> None:
    """Check the fields of a frozen dataclass against their types; lists become tuples, so that the value can be hashed.

    Raises:
        DeltuneError: A field does not fit its type.
    """
    kind: Any = type(value)
    hints = _field_types(kind)
    for field in dataclasses.fields(value):
        content = getattr(value, field.name)
        if isinstance(content, list):
            content = tuple(content)
            object.__setattr__(value, field.name, content)
        if not fits_type(hints[field.name], content):
            raise DeltuneError(f"{type(value).__name__}: {type_mismatch(field.name, hints[field.name], content)}")


@functools.cache
def _type_adapter(hint: Any) -> TypeAdapter[Any]:
    config = ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)
    # the fields of a dataclass were checked when it was made
    return TypeAdapter(InstanceOf[hint]) if dataclasses.is_dataclass(hint) else TypeAdapter(hint, config=config)


def fits_type(hint: Any, value: Any) -> bool:
    """Whether a value fits a type hint.

    An int fits float, and a bool fits neither int nor float. Numbers must be finite, whole ones at most MAX_INTEGER.
    """
    numbers = [item for item in (value if isinstance(value, tuple) else (value,)) if isinstance(item, int | float)]
    if any(number_problem(number) for number in numbers) or isinstance(value, enum.Enum):
        return False  # an enum equals its text, but its repr is no expression
    try:
        _type_adapter(hint).validate_python(value)
    except ValidationError:
        return False
    return True


def number_problem(value: float) -> str | None:
    """Return why a number cannot be used anywhere, or None."""
    if isinstance(value, int):
        return None if abs(value) <= MAX_INTEGER else f"a whole number is at most 2^63 - 1 = {MAX_INTEGER:,}"
    return None if math.isfinite(value) else "a number is finite, at most 1.8e308"


def type_mismatch(key: str, hint: Any, value: object) -> str:
    """Return the message for an argument that does not fit its type hint."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and (problem := number_problem(value)):  # type: ignore[arg-type]
        return f"{key} is {excerpt(value)}: {problem}"
    return f"{key}={excerpt(value)} is not {describe_type(hint)}"


NUMERAL = r"[-+]?(?:[0-9]{1,30}(?:\.[0-9]{0,30})?|\.[0-9]{1,30})(?:[eE][-+]?[0-9]{1,3})?"
"""A number of bounded length in ASCII digits."""
PERCENTAGE = re.compile(rf"\s*({NUMERAL})\s*%\s*")


def parse_percentage(text: str) -> Fraction | None:
    """Return the exact share that a text such as "0.05%" names, or None where it names none."""
    match = PERCENTAGE.fullmatch(text)
    return Fraction(match[1]) / 100 if match else None


def describe_type(hint: Any) -> str:
    """Return a type hint in plain words."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe_type(h) for h in arguments)
    if origin is typing.Literal:
        return "one of " + ", ".join(repr(v) for v in arguments)
    if origin is tuple:
        return f"a list of {describe_type(arguments[0])}"
    descriptions = {int: "a whole number", float: "a number", str: "a text", bool: "True or False", type(None): "None"}
    return descriptions.get(hint, f"a {getattr(hint, '__name__', hint)}")
