"""Parses method expressions with Python's grammar, by `ast`; nothing is evaluated. Checks arguments against type hints.

    prefix(length=16) + layernorm
    Modification(site='ffn', form=Bottleneck(512), insertion='parallel', compose=Scale(4)) + lora(at=('query', 'key'))

Allowed are calls of known names, sums of them, and literals (numbers, strings, True, False, None, tuples, lists). All
mistakes are collected and reported at once, each with a caret under its place. Arguments are checked by the same rules
and with the same messages in an expression and in Python: pydantic decides what fits; the messages are ours, so that
they name the argument in the words of an expression.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import math
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, ParamSpec, TypeVar

from pydantic import ConfigDict, InstanceOf, TypeAdapter, ValidationError

from ..errors import (
    DeltuneError,
    check_booleans,
    closest_match,
    counted,
    error_from_problems,
    excerpt,
    with_advice,
)
from .other_names import (
    argument_of_methods,
    expression_of,
    hint_for_argument,
    hint_for_name,
    hint_for_site,
    unknown_term,
)

MAX_INTEGER = 2**63 - 1
"""The largest whole number, which is the largest size that torch can give a tensor."""


@functools.cache
def argument_types(make: Callable[..., Any]) -> dict[str, Any]:
    """Return the type hints of what a function or class takes, with the words of those that describe themselves."""
    return typing.get_type_hints(make, include_extras=True)


Size = Annotated[int, "a whole number of at least 1", lambda size: size >= 1]
NonNegativeInt = Annotated[int, "a whole number of at least 0", lambda count: count >= 0]
Depth = Annotated[int, "a whole number from 0 to 64", lambda depth: 0 <= depth <= 64]
Factors = Annotated[int, "a whole number from 1 to 62", lambda factors: 1 <= factors <= 62]
Share = Annotated[float, "in [0, 1)", lambda share: 0 <= share < 1]
Positive = Annotated[float, "above 0", lambda number: number > 0]
"""Types of fields with a range, which `check_fields` checks."""


def check_fields(value: Any) -> None:
    """Check the fields of a frozen dataclass against their types; lists become tuples, which can be hashed."""
    kind: Any = type(value)
    hints = argument_types(kind)
    for field in dataclasses.fields(value):
        content = getattr(value, field.name)
        if isinstance(content, list):
            content = tuple(content)
            object.__setattr__(value, field.name, content)
        hint = hints[field.name]
        if not fits_type(hint, content):
            raise DeltuneError(f"{type(value).__name__}: {type_mismatch(field.name, hint, content)}")
        for one in (hint, *typing.get_args(hint)):  # the hint, or the parts of an optional one
            _, words, *limits = typing.get_args(one) if typing.get_origin(one) is typing.Annotated else (None, "")
            if content is not None and not all(is_within(content) for is_within in limits):
                raise DeltuneError(f"{field.name}={content}: must be {words}")


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
    alone = f"; one alone is written {excerpt((value,))}" if fits_type(hint, (value,)) else ""
    return f"{key}={excerpt(value)} is not {describe_type(hint)}{alone}"


NUMERAL = r"[-+]?(?:[0-9]{1,30}(?:\.[0-9]{0,30})?|\.[0-9]{1,30})(?:[eE][-+]?[0-9]{1,3})?"
"""A number of bounded length in ASCII digits."""
PERCENTAGE = re.compile(rf"\s*({NUMERAL})\s*%\s*")


def parse_percentage(text: str) -> Fraction | None:
    """Return the exact share that a text such as "0.05%" names, or None where it names none."""
    match = PERCENTAGE.fullmatch(text)
    return Fraction(match[1]) / 100 if match else None


def describe_type(hint: Any) -> str:
    """Return a type hint in plain words: its own, Annotated[…, "words"], or the words for its type."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return str(arguments[1])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe_type(h) for h in arguments)
    if origin is typing.Literal:
        return "one of " + ", ".join(repr(v) for v in arguments)
    if origin is tuple:
        item = describe_type(arguments[0])
        return f"a list of {item.removeprefix('a ')}s" if item.startswith("a ") else f"a list of {item}"
    descriptions = {int: "a whole number", float: "a number", str: "a text", bool: "True or False", type(None): "None"}
    return descriptions.get(hint, f"a {getattr(hint, '__name__', hint)}")


def _takes_any_text(hint: Any) -> bool:
    """Whether an argument may be any text, of which its own function says whether it means something."""
    return hint is str or any(map(_takes_any_text, typing.get_args(hint)))


def _takes_objects(hint: Any) -> bool:
    """Whether an argument may be a part of a method, which an expression writes as a name or a call."""
    is_class = isinstance(hint, type) and typing.get_origin(hint) is None and hint is not Any
    return (is_class and hint not in (int, float, str, bool, type(None))) or any(
        map(_takes_objects, typing.get_args(hint))
    )


Vocabulary = Mapping[str, Callable[..., Any]]

MAX_CHARACTERS = 100_000
"""The most characters of an expression."""
MAX_DEPTH = 30
"""The most brackets inside each other."""
MAX_TERMS = 1_000
"""The most terms of a sum."""


def unknown_argument(name: str, key: str, make: Callable[..., Any]) -> str:
    """Return the message for an argument that does not exist: the nearest name, and all that exist."""
    parameters = [parameter for parameter in signature(make).parameters if parameter != "self"]
    hint = hint_for_argument(key, parameters)
    if "method" in parameters and not hint and (word := argument_of_methods(key)):
        hint = f'It is an argument of the method, and stands in its expression, such as "lora({word}=…)".'
    if not hint and (guess := closest_match(key, parameters)):
        hint = f"Did you mean {guess!r}?"
    return f"{name} has no argument {key!r}.{hint and ' '}{hint} It takes: {signature_text(make)}"


P = ParamSpec("P")
T = TypeVar("T")


def explain_arguments(function: Callable[P, T]) -> Callable[P, T]:
    """Make a function answer an argument that it does not have with its name here, or with the nearest one.

    Arguments of type bool must be True or False. The error is a DeltuneError, as in expressions; every other wrong call
    is a TypeError, as in any function.
    """
    known, checked = frozenset(signature(function).parameters), check_booleans(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if not kwargs.keys() <= known:
            unknown = [unknown_argument(function.__name__, key, function) for key in kwargs if key not in known]
            raise error_from_problems(f"{function.__name__} was called with arguments that it does not have", unknown)
        return checked(*args, **kwargs)

    return call


@dataclass
class _Problem:
    node: ast.AST
    message: str


@dataclass(frozen=True)
class _Argument:
    """An argument of a call: the name of what is called, its own name, and its type hint."""

    call: str
    key: str
    hint: Any

    def unquoted(self, word: str, vocabulary: Vocabulary, words: typing.Collection[str]) -> str:
        """Return the message for a word that stands in place of this argument without quotes."""
        if fits_type(self.hint, word):
            described = typing.get_origin(self.hint) is typing.Annotated or not _takes_any_text(self.hint)
            guess = None if described else closest_match(word, words)
            hint = None if described else hint_for_site(word) or (guess and f"Did you mean {guess!r}?")
            return f"{self.call}: a text stands in quotes: {self.key}={word!r}{(hint and f'. {hint}') or ''}"
        if _takes_objects(self.hint):
            known = [*words, *vocabulary]
            return unknown_term("name", word, known, vocabulary)
        return f"{self.call}: {type_mismatch(self.key, self.hint, word)}"


class _TermFailed(Exception):
    """Ends the reading of one term whose problem is recorded, so that the other terms are still read."""


def parse_expression(text: object, vocabulary: Vocabulary, words: typing.Collection[str] = ()) -> Any:
    """Return the value of an expression."""
    if not isinstance(text, str):
        translation = expression_of(text)
        kind = type(text).__name__
        hint = f'What it configures is written "{translation}".' if translation else hint_for_name(kind) or ""
        if hasattr(text, "peft_type"):
            hint = f"deltune.attach(model, …) takes it as it is. {hint}".strip()
        raise DeltuneError(with_advice(f"a method is an expression (text) or a method object, not a {kind}", hint))
    source = " ".join(text.split())
    if not source:
        raise DeltuneError("the method expression is empty; for example: prefix(length=16) + layernorm")
    _check_limits(source)
    try:
        tree = ast.parse(source, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        at = (getattr(error, "offset", None) or 1) - 1
        deep = isinstance(error, RecursionError | MemoryError)
        reason = "nested too deeply" if deep else getattr(error, "msg", None) or str(error)
        reason = "a size is left open (?); deltune.fit solves it for a budget" if "?" in source else reason
        if re.search(r"\)\s+\w", source):
            reason += "; methods are joined by +, as in lora(rank=8) + layernorm"
        raise DeltuneError(f"the method expression cannot be read: {reason}\n{_caret(source, at)}") from None
    reader = _ExpressionReader(vocabulary, words)
    try:
        value = reader.value(tree.body, top=True)
    except _TermFailed:
        value = None
    except RecursionError:
        raise DeltuneError("the method expression is nested too deeply") from None
    if reader.problems:
        columns: dict[str, list[int]] = {}
        for problem in sorted(reader.problems, key=lambda problem: _column(source, problem.node)):
            columns.setdefault(problem.message, []).append(_column(source, problem.node))
        raise error_from_problems(
            "the method expression is wrong",
            [
                "\n".join([message, *(_caret(source, column) for column in places[:3])])
                for message, places in columns.items()
            ],
        )
    return value


def _check_limits(source: str) -> None:
    """Raise a DeltuneError for a text that is longer or nested deeper than any method, before it is parsed."""
    if len(source) > MAX_CHARACTERS:
        raise DeltuneError(f"the method expression has {len(source):,} characters; at most {MAX_CHARACTERS:,} are read")
    depth, quote = 0, ""
    for column, character in enumerate(source):
        if character in "'\"":
            quote = "" if quote == character else quote or character
        elif not quote and character in "([{":
            depth += 1
        elif not quote and character in ")]}":
            depth -= 1
        if depth > MAX_DEPTH:
            raise DeltuneError(
                f"the method expression is nested too deeply: more than {MAX_DEPTH} brackets are open\n"
                + _caret(source, column)
            )


def _column(source: str, node: ast.AST) -> int:
    """Return the column of a node in characters, which ast counts in bytes."""
    offset: int = getattr(node, "col_offset", 0)
    return len(source.encode()[:offset].decode(errors="ignore"))


def _caret(source: str, column: int) -> str:
    start = max(0, column - 40)
    return f"    {source[start : start + 80]}\n    {' ' * (column - start)}^"


class _ExpressionReader:
    """Computes the value of an expression from its syntax tree, and collects the problems."""

    def __init__(self, vocabulary: Vocabulary, words: typing.Collection[str]) -> None:
        self.vocabulary, self.words = vocabulary, words
        self.problems: list[_Problem] = []

    def fail(self, node: ast.AST, message: str) -> typing.NoReturn:
        self.problems.append(_Problem(node, message))
        raise _TermFailed

    def value(self, node: ast.expr, top: bool = False, argument: _Argument | None = None) -> Any:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return self.sum(node)
        if isinstance(node, ast.Call):
            return self.call(node)
        if isinstance(node, ast.Name):
            if node.id in self.vocabulary:
                return self.build(node, node, [], [])
            if not top and node.id in self.words:
                return node.id
            if argument is not None:
                self.fail(node, argument.unquoted(node.id, self.vocabulary, self.words))
            self.fail(node, unknown_term("name", node.id, self.vocabulary))
        if not top and isinstance(node, ast.Constant) and isinstance(node.value, int | float | str | bool | None):
            if isinstance(node.value, int | float) and (problem := number_problem(node.value)):
                self.fail(node, f"{excerpt(node.value)} is too large: {problem}")
            return node.value
        if not top and isinstance(node, ast.Tuple | ast.List):
            return tuple(self.value(item, argument=argument) for item in node.elts)
        if not top and isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            number = self.value(node.operand)
            if isinstance(number, int | float) and not isinstance(number, bool):
                return -number
        self.fail(node, "only names, calls, + and literal arguments are allowed here")

    def sum(self, node: ast.BinOp) -> Any:
        terms: list[ast.expr] = []
        remaining: ast.expr = node
        while isinstance(remaining, ast.BinOp) and isinstance(remaining.op, ast.Add):
            terms.append(remaining.right)
            remaining = remaining.left
        if len(terms) >= MAX_TERMS:
            self.fail(terms[0], f"the sum has {len(terms) + 1:,} terms; at most {MAX_TERMS:,} are read")
        values, before = [], len(self.problems)  # a term beside this sum may have problems already
        for term in [remaining, *reversed(terms)]:
            try:
                values.append(self.value(term, top=True))
            except _TermFailed:
                continue
        if len(self.problems) > before:
            raise _TermFailed
        total = values[0]
        for term_value in values[1:]:
            try:
                total = total + term_value
            except DeltuneError as error:
                self.fail(node, str(error))
        return total

    def call(self, node: ast.Call) -> Any:
        if not isinstance(node.func, ast.Name):
            self.fail(node.func, "only a plain name can be called")
        if node.func.id not in self.vocabulary:
            self.fail(node.func, unknown_term("name", node.func.id, self.vocabulary))
        return self.build(node, node.func, node.args, node.keywords)

    def build(
        self, node: ast.AST, name: ast.Name, positional: Sequence[ast.expr], keywords: Sequence[ast.keyword]
    ) -> Any:
        """Bind arguments to the signature, compute and check their values, and call."""
        make = self.vocabulary[name.id]
        parameters = signature(make).parameters
        before = len(self.problems)
        bound: dict[str, tuple[ast.AST, ast.expr]] = {}
        places = [key for key, parameter in parameters.items() if parameter.kind is not Parameter.KEYWORD_ONLY]
        for argument, key in zip(positional, places, strict=False):
            bound[key] = argument, argument
        for argument in positional[len(places) :]:
            taken = counted(len(places), "argument")
            by_name = "" if len(places) == len(parameters) else " without a name"
            self.problems.append(_Problem(argument, f"{name.id} takes {taken}{by_name}: {signature_text(make)}"))
        for keyword in keywords:
            if keyword.arg is None:
                self.problems.append(_Problem(keyword.value, "** is not allowed"))
            elif keyword.arg not in parameters:
                self.problems.append(_Problem(keyword, unknown_argument(name.id, keyword.arg, make)))
            elif keyword.arg in bound:  # of two keywords only compiling would refuse the second
                self.problems.append(_Problem(keyword, f"{name.id}: {keyword.arg!r} is given twice"))
            else:
                bound[keyword.arg] = keyword, keyword.value
        hints = argument_types(make)
        values: dict[str, Any] = {}
        for key, (at, expression) in bound.items():
            hint = hints.get(key, Any)
            try:
                values[key] = self.value(expression, argument=_Argument(name.id, key, hint))
            except _TermFailed:
                continue
            if not fits_type(hint, values[key]):
                self.problems.append(_Problem(at, f"{name.id}: {type_mismatch(key, hint, values[key])}"))
        missing = [k for k, p in parameters.items() if p.default is Parameter.empty and k not in bound]
        if missing:
            about = f"{signature_text(make)}; deltune methods {name.id} explains it"
            self.problems.append(_Problem(node, f"{name.id} needs {', '.join(missing)}: {about}"))
        if len(self.problems) > before:
            raise _TermFailed
        try:
            return make(**values)
        except DeltuneError as error:
            self.fail(node, f"{name.id}: {error}")


def signature_text(make: Callable[..., Any]) -> str:
    """Return a signature as it is written in an expression, without types."""
    typed: Signature = signature(make)
    parameters = [
        p.replace(annotation=Parameter.empty, kind=Parameter.POSITIONAL_OR_KEYWORD)  # without the star between them
        for p in typed.parameters.values()
        if p.name != "self" and p.kind is not Parameter.VAR_POSITIONAL
    ]
    return str(typed.replace(parameters=parameters, return_annotation=Signature.empty))


def to_expression(value: Any) -> str:
    """Return the expression that makes a dataclass value; arguments at their defaults are left out."""
    arguments = [
        f"{f.name}={getattr(value, f.name)!r}"
        for f in (dataclasses.fields(value) if dataclasses.is_dataclass(value) else ())
        if f.default is dataclasses.MISSING or getattr(value, f.name) != f.default
    ]
    return f"{type(value).__name__}({', '.join(arguments)})"
