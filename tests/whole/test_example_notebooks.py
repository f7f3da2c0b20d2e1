"""The notebooks of docs/notebooks: what is committed was executed and shows nothing private, and they run."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest

import deltune

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
LARGEST = 150_000
"""Bytes of a notebook with its pictures."""

each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=nbformat.NO_CONVERT)


def code_of(notebook: Any) -> Iterator[tuple[Any, ast.Module]]:
    """The code cells with their syntax trees; a line that begins with ! is a command of the shell."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            yield cell, ast.parse(re.sub(r"^!.*$", "", cell.source, flags=re.MULTILINE))


def private_names(tree: ast.Module) -> Iterator[str]:
    """Names with a leading underscore that are imported or read, and names of deltune that do not exist."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            public = (
                not (isinstance(node.value, ast.Name) and node.value.id == "deltune") or node.attr in deltune.__all__
            )
            if node.attr.startswith("_") or not public:
                yield node.attr
        elif isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module or "")
            names = [alias.name for alias in node.names]
            yield from (name for name in names if name.startswith("_") or not hasattr(module, name))
            yield from (part for part in (node.module or "").split(".") if part.startswith("_"))


@each
def test_it_is_valid_and_small(path: Path) -> None:
    notebook = read(path)
    nbformat.validate(notebook)
    assert path.stat().st_size < LARGEST
    assert notebook.cells[0].cell_type == "markdown" and notebook.cells[0].source.startswith("# ")


@each
def test_it_was_executed_in_order(path: Path) -> None:
    code = [cell for cell, _ in code_of(read(path))]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert sum("image/png" in output.get("data", {}) for cell in code for output in cell.outputs) >= 2
    assert any("assert " in cell.source for cell in code)


@each
def test_every_picture_is_described(path: Path) -> None:
    for cell, _ in code_of(read(path)):
        has_picture = any("image/png" in output.get("data", {}) for output in cell.outputs)
        assert has_picture == bool(cell.metadata.get("alt")), cell.source


@each
def test_its_outputs_are_for_everybody(path: Path) -> None:
    """No warning, no error, no path of the machine that ran it, no escape sequence of a terminal."""
    for cell, _ in code_of(read(path)):
        for output in cell.outputs:
            assert output.output_type in ("stream", "display_data", "execute_result"), output
            assert output.get("name", "stdout") == "stdout", output
            data = {kind: text for kind, text in output.get("data", {}).items() if not kind.startswith("image/")}
            text = output.get("text", "") + "".join(map(str, data.values()))
            assert not re.search(r"(?<![\w.])/[a-z]+/|\\Users\\|Warning|\x1b", re.sub(r"<[^<>]*>", "", text)), text


@each
def test_its_links_lead_somewhere(path: Path) -> None:
    text = "\n".join(cell.source for cell in read(path).cells if cell.cell_type == "markdown")
    targets = re.findall(r"\]\(([^)\s#]+)", text)
    assert len(targets) >= 3
    assert [target for target in targets if not (path.parent / target).exists()] == []


@each
def test_it_uses_public_names(path: Path) -> None:
    assert [name for _, tree in code_of(read(path)) for name in private_names(tree)] == []


@pytest.mark.parametrize(
    "source", ["tuned._passes", "from deltune._version import __version__", "deltune.nothing", "import x; x._y"]
)
def test_private_names_are_found(source: str) -> None:
    assert list(private_names(ast.parse(source)))


@pytest.mark.slow
@each
def test_it_runs(path: Path) -> None:
    """From top to bottom in an empty folder, its assertions included; outputs are not compared."""
    pytest.importorskip("ipykernel", reason="no ipykernel: the extra dev has it")
    spec = importlib.util.spec_from_file_location("docs_hooks_notebooks", ROOT / "docs" / "hooks" / "notebooks.py")
    assert spec and spec.loader
    notebooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(notebooks)
    done = notebooks.execute(path)
    assert all(cell.execution_count for cell in done.cells if cell.cell_type == "code")
