"""Docstrings of the public names: every argument, the result and the errors are described."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import pytest

import deltune

SECTION = re.compile(r"^(Args|Arguments of its methods|Attributes|Returns|Raises):\n((?:[ \t]+.*\n|\n)*)", re.MULTILINE)


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


def problems_of_function(function: Callable[..., Any], label: str, known: set[str] | None = None) -> Iterator[str]:
    """What is missing in the docstring of a function or method, of whose parameters its class describes some."""
    docstring = inspect.getdoc(function) or ""
    if not docstring:
        yield f"{label} has no docstring"
    parts, signature = sections(docstring), inspect.signature(function)
    parameters = set(signature.parameters) - {"self", "cls"}
    if difference := (parameters - (known or set())) ^ described(parts.get("Args", "")):
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
        arguments -= {name for name, hint in kind.__annotations__.items() if str(hint).startswith("ClassVar")}
        if difference := set(inspect.signature(kind).parameters) ^ arguments:
            yield f"{kind.__name__}: Args and fields differ in {', '.join(sorted(difference))}"
        checks = kind.__dict__.get("__post_init__")
        if checks and raises_directly(checks) and "DeltuneError" not in described(parts.get("Raises", "")):
            yield f"{kind.__name__} raises DeltuneError, which its Raises does not describe"
    bases = (sections(inspect.cleandoc(base.__doc__ or "")) for base in kind.__mro__)
    known = {name for base in bases for name in described(base.get("Arguments of its methods", ""))}
    for name in dir(kind):
        owner = next(base for base in kind.__mro__ if name in vars(base) or base is object)
        if name.startswith("_") or not owner.__module__.startswith("deltune"):
            continue
        label, member = f"{kind.__name__}.{name}", getattr(kind, name)
        if any(name in vars(base) for base in kind.__mro__ if not base.__module__.startswith("deltune")):
            if not member.__doc__:  # its arguments are those of another library, which describes them
                yield f"{label} has no docstring"
            continue
        if isinstance(member, property) and not inspect.getdoc(member):
            yield f"{label} has no docstring"
        elif inspect.isroutine(member):
            yield from problems_of_function(member, label, known)


def problems_of(name: str) -> list[str]:
    value = getattr(deltune, name)
    return list(problems_of_class(value) if isinstance(value, type) else problems_of_function(value, name))


@pytest.mark.parametrize("name", sorted(deltune.__all__))
def test_public_docstrings_are_complete(name: str) -> None:
    assert problems_of(name) == []


def expanded(pattern: str) -> list[str]:
    """The patterns without braces that one with braces stands for."""
    braces = re.search(r"\{([^{}]*)\}", pattern)
    if braces is None:
        return [pattern]
    choices = braces[1].split(",")
    return [p for choice in choices for p in expanded(pattern[: braces.start()] + choice + pattern[braces.end() :])]


def test_ruff_checks_every_module_that_defines_a_public_name() -> None:
    root = Path(__file__).parents[2]
    settings = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]
    (excluded,) = [pattern for pattern, rules in settings["per-file-ignores"].items() if rules == ["D"]]
    modules = {getattr(deltune, name).__module__ for name in deltune.__all__ if name != "__version__"}
    assert {f"src/{module.replace('.', '/')}.py" for module in modules} <= set(expanded(excluded.removeprefix("!")))


def parameters_of(node: ast.FunctionDef | ast.ClassDef) -> set[str] | None:
    """The parameters of a function, or the fields of a class and the parameters of its __init__; None if inherited."""
    if isinstance(node, ast.FunctionDef):
        arguments = node.args
        named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        return {argument.arg for argument in named if argument is not None}
    fields = {n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    constructors = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
    constructed = {name for constructor in constructors for name in parameters_of(constructor) or ()}
    return fields | constructed or None


def unknown_arguments(source: str) -> list[str]:
    """The names that Args of a docstring describe, and that are no parameters of its function or class."""
    return [
        f"{node.name}, line {node.lineno}: {name}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and (parameters := parameters_of(node)) is not None
        for name in sorted(described(sections(ast.get_docstring(node) or "").get("Args", "")) - parameters)
    ]


def test_every_docstring_describes_parameters_that_exist() -> None:
    files = sorted(Path(deltune.__file__).parent.rglob("*.py"))
    assert {path.name: unknown for path in files if (unknown := unknown_arguments(path.read_text()))} == {}


def test_arguments_that_do_not_exist_are_found() -> None:
    source = '''
def example(size):
    """Return.

    Args:
        length: The size.
    """
'''
    assert unknown_arguments(source) == ["example, line 2: length"]


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
