"""Docstrings of the public names: every argument, the result and the errors are described."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from typing import Any

import pytest

import deltune

SECTION = re.compile(r"^(Args|Attributes|Returns|Raises):\n((?:[ \t]+.*\n|\n)*)", re.MULTILINE)


def sections(docstring: str) -> dict[str, str]:
    """The text of each section of a Google docstring."""
    return {match[1]: textwrap.dedent(match[2]) for match in SECTION.finditer(docstring + "\n")}


def described(text: str) -> set[str]:
    """The names that a section describes."""
    return set(re.findall(r"^\*{0,2}(\w+)(?: \([^)]*\))?:", text, re.MULTILINE))


def raises_directly(function: Callable[..., Any]) -> bool:
    """Whether a function has a `raise DeltuneError(…)` of its own, those of functions inside it left out."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function)))).body[0]
    queue: list[ast.AST] = list(ast.iter_child_nodes(tree))
    while queue:
        node = queue.pop()
        error = node.exc if isinstance(node, ast.Raise) else None
        if isinstance(error, ast.Call) and ast.unparse(error.func).endswith(("DeltuneError", "error_from_problems")):
            return True
        if not isinstance(node, ast.FunctionDef | ast.Lambda):
            queue.extend(ast.iter_child_nodes(node))
    return False


def problems_of_function(function: Callable[..., Any], label: str) -> Iterator[str]:
    """What is missing in the docstring of a function or method."""
    docstring = inspect.getdoc(function) or ""
    if not docstring:
        yield f"{label} has no docstring"
    parts, signature = sections(docstring), inspect.signature(function)
    parameters = set(signature.parameters) - {"self", "cls"}
    if difference := parameters ^ described(parts.get("Args", "")):
        yield f"{label}: Args and parameters differ in {', '.join(sorted(difference))}"
    if signature.return_annotation not in (None, "None") and "Returns" not in parts:
        yield f"{label} has no Returns"
    if raises_directly(function) and "DeltuneError" not in described(parts.get("Raises", "")):
        yield f"{label} raises DeltuneError, which its Raises does not describe"


def problems_of_class(kind: type) -> Iterator[str]:
    """What is missing in the docstrings of a class and its public methods."""
    parts = sections(inspect.cleandoc(kind.__doc__ or ""))
    if not kind.__doc__ or kind.__doc__.startswith(f"{kind.__name__}("):  # a dataclass writes that one itself
        yield f"{kind.__name__} has no docstring"
    elif is_dataclass(kind) and not issubclass(kind, Exception):
        arguments = described(parts.get("Args", "") or parts.get("Attributes", ""))
        if difference := set(inspect.signature(kind).parameters) ^ arguments:
            yield f"{kind.__name__}: Args and fields differ in {', '.join(sorted(difference))}"
        checks = kind.__dict__.get("__post_init__")
        if checks and raises_directly(checks) and "DeltuneError" not in described(parts.get("Raises", "")):
            yield f"{kind.__name__} raises DeltuneError, which its Raises does not describe"
    for name in dir(kind):
        owner = next(base for base in kind.__mro__ if name in vars(base) or base is object)
        if name.startswith("_") or not owner.__module__.startswith("deltune"):
            continue
        label, member = f"{kind.__name__}.{name}", getattr(kind, name)
        if isinstance(member, property) and not inspect.getdoc(member):
            yield f"{label} has no docstring"
        elif inspect.isroutine(member):
            yield from problems_of_function(member, label)


def problems_of(name: str) -> list[str]:
    value = getattr(deltune, name)
    return list(problems_of_class(value) if isinstance(value, type) else problems_of_function(value, name))


@pytest.mark.parametrize("name", sorted(deltune.__all__))
def test_public_docstrings_are_complete(name: str) -> None:
    assert problems_of(name) == []


def test_missing_parts_are_found() -> None:
    def example(size: int, name: str) -> str:
        """Return a name.

        Args:
            size: The size.
        """
        if size < 1:
            raise deltune.DeltuneError(f"size={size}")
        return name

    assert list(problems_of_function(example, "example")) == [
        "example: Args and parameters differ in name",
        "example has no Returns",
        "example raises DeltuneError, which its Raises does not describe",
    ]
