"""Private attributes of other libraries stand in compat.py alone, each with the reason for it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import deltune

SOURCE = Path(deltune.__file__).parent

ALLOWED = {
    (
        "train/trainer.py",
        "_prepare_inputs",
    ): "a method for subclasses of the Trainer, which this is",
    ("cli/train.py", "_exit"): "os._exit, which the standard library documents",
    ("studies/jobs/pool.py", "_exit"): "os._exit, which the standard library documents",
}
"""File and attribute -> why it may stay."""


def is_private(name: object) -> bool:
    return isinstance(name, str) and name.startswith("_") and not name.startswith("__") and name.isidentifier()


def constants(node: ast.AST) -> Iterator[str]:
    """The names by which an expression reads or writes an attribute that it names as text."""
    if isinstance(node, ast.Call):
        function = ast.unparse(node.func)
        if function in ("getattr", "hasattr", "setattr", "delattr") or ".__dict__." in f"{function}.":
            candidates = node.args[:2]
        else:
            candidates = []
    elif isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith(".__dict__"):
        candidates = [node.slice]
    elif isinstance(node, ast.Compare) and any(ast.unparse(c).endswith(".__dict__") for c in node.comparators):
        candidates = [node.left]
    else:
        candidates = []
    yield from (c.value for c in candidates if isinstance(c, ast.Constant) and isinstance(c.value, str))


def defined(tree: ast.AST) -> Iterator[str]:
    """The names that a module defines: functions, classes, variables, and attributes of `self` or of `__dict__`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store):
            holder = ast.unparse(node.value)
            if isinstance(node, ast.Attribute) and holder in ("self", "cls"):
                yield node.attr
            elif holder == "self.__dict__":
                yield from constants(node)


def foreign(tree: ast.AST, known: set[str]) -> Iterator[tuple[int, str]]:
    """The private names in a module that are not deltune's, with their lines."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        else:
            names = list(constants(node))
        for name in names:
            if is_private(name) and name not in known:
                yield getattr(node, "lineno", 0), name


def test_private_attributes_of_other_libraries_stand_in_compat_alone() -> None:
    trees = {path.relative_to(SOURCE).as_posix(): ast.parse(path.read_text()) for path in SOURCE.rglob("*.py")}
    known = {name for file, tree in trees.items() if file != "compat.py" for name in defined(tree)}
    problems = [
        f"{file}:{line}: {name}"
        for file, tree in sorted(trees.items())
        if file != "compat.py"
        for line, name in foreign(tree, known)
        if (file, name) not in ALLOWED
    ]
    assert problems == []


def test_private_attributes_are_found() -> None:
    source = """
from torch.nn.modules.module import _global_forward_hooks
from torch.utils._python_dispatch import TorchDispatchMode
module._parameters["weight"]
getattr(config, "_attn_implementation", None)
module.__dict__["_hf_hook"]
"_call_impl" in module.__dict__
module.__dict__.get("_old_forward")
self._ours
"""
    names = [name for _, name in foreign(ast.parse(source), {"_ours"})]
    assert sorted(names) == sorted([
        "_global_forward_hooks", "_python_dispatch", "_parameters", "_attn_implementation", "_hf_hook", "_call_impl",
        "_old_forward",
    ])  # fmt: skip
