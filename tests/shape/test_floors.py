"""The architecture as a test: imports go down, files stay small, names stay where they belong."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from deltune.methods.registry import TABLE

SOURCE = Path(__file__).parents[2] / "src" / "deltune"

FLOORS = {
    "": ("errors", "compat", "disk", "tensorfiles", "arguments", "expressions"),
    "anatomy": ("values", "graph", "structure", "quantised", "trace", "reads", "sublayers", "observe"),
    "mathematics": ("sparse", "forms", "heads", "stacks", "compositions"),
    "algebra": (
        "elements", "selections", "recipes", "catalogue", "protocols", "sites", "planning", "counting", "sizes",
        "budget",
    ),
    "dialects": ("foreign", "options", "peft_files", "peft_writing", "adapterhub_bottlenecks", "adapterhub_files"),
    "live": (
        "weights", "gates", "edits", "uses", "chains", "model_state", "own_tensors", "assignment", "forward_pass",
        "merged_attention", "attention", "premises", "passes", "model_methods", "taps", "positions",
        "prompting", "wiring", "merging", "schema", "expected", "store", "handle", "interchange", "attaching", "trunk",
    ),
    "sources": ("models", "files", "columns", "labels", "layouts", "data"),
    "metrics": ("measures", "labels", "captions", "texts", "neural", "table"),
    "tasks": (
        "table", "encoding", "languages", "joining", "kinds", "templates", "classifying", "tagging", "choosing",
        "generating", "ranking", "listing", "caching",
    ),
    "runs": (
        "machine", "values", "faults", "specs", "assignments", "parts", "processes", "sharding", "records", "folder",
        "checkpoints", "progress", "stopping", "keeping", "scoring", "inputs", "evaluate", "exporting", "jobs",
        "trainer", "series", "train",
    ),
    "engine": ("outcomes", "results", "clock", "timing", "terms", "works", "sweeps", "pools", "pools_ray", "drive"),
    "findings": (
        "stats", "readings", "cells", "effects", "claims", "claims_ln", "claims_uv", "claims_ap", "claims_papers",
        "verdicts",
    ),
    "reports": (
        "views", "facts", "grids", "tables", "inks", "lettering", "panels", "charts", "lines", "heats", "plots",
        "pictures", "runlists", "page",
    ),
    "studies": ("study", "scales", "thresholds", "printed", "families", "ln", "uv", "ap", "papers", "sections"),
    "cli": ("launching", "notes", "show", "quickstart", "terminal", "train", "study", "commands"),
}  # fmt: skip
"""From the ground up, package by package; a module imports only what stands before it here."""

FAMILIES = (
    "bert", "roberta", "electra", "albert", "gpt2", "gpt_neo", "llama", "qwen", "mistral", "gemma", "bart", "t5",
)  # fmt: skip

MODULES = sorted(".".join(path.relative_to(SOURCE).with_suffix("").parts) for path in SOURCE.rglob("*.py"))

ORDER = [f"{package}.{name}".lstrip(".") for package, names in FLOORS.items() for name in names] + ["__main__"]


def file(module: str) -> Path:
    return SOURCE / (module.replace(".", "/") + ".py")


def imported(module: str) -> set[str]:
    """Our own modules that a module imports at run time, wherever the import stands."""
    here = module.split(".")[:-1]
    found: set[str] = set()
    for node in ast.walk(ast.parse(file(module).read_text())):
        if not isinstance(node, ast.ImportFrom):
            continue
        inside = (node.module or "").split(".") if node.module else []
        if node.level:
            inside = here[: len(here) - node.level + 1] + inside
        elif inside[:1] == ["deltune"]:
            inside = inside[1:]
        else:
            continue
        found |= {".".join(inside), *(".".join([*inside, alias.name]) for alias in node.names)}
    return found & set(MODULES)


@pytest.mark.parametrize("module", [m for m in MODULES if not m.endswith("__init__")])
def test_imports_go_down(module: str) -> None:
    assert module in ORDER, f"give {module} a floor in CONTRIBUTING.md and here"
    above = [other for other in imported(module) & set(ORDER) if ORDER.index(other) >= ORDER.index(module)]
    assert not above, f"{module} imports {above}, which stand above it"


def test_floors_hold_what_there_is() -> None:
    assert set(ORDER) == {m for m in MODULES if not m.endswith("__init__")}
    table = (SOURCE.parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for package, names in FLOORS.items():
        part = table.split(f"**`{package}/`**" if package else "**Ground**", 1)[1].split("\n**", 1)[0]
        assert [line.split("`")[1] for line in part.splitlines() if line.startswith("| `")] == list(names)


@pytest.mark.parametrize("module", [m for m in MODULES if m.endswith(".__init__")])
def test_a_package_is_a_name_and_a_sentence(module: str) -> None:
    """Nothing is imported by opening a package, but at the door of the command line."""
    tree = ast.parse(file(module).read_text())
    assert ast.get_docstring(tree)
    assert len(tree.body) == 1 or module == "cli.__init__"


@pytest.mark.parametrize("module", MODULES)
def test_no_family_name_decides_anything(module: str) -> None:
    """No string constant of the code (docstrings aside) is a model family's name."""
    tree = ast.parse(file(module).read_text())
    named = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    initial = ("mathematics.forms", "mathematics.heads", "algebra.recipes")
    allowed = {"bert"} if module in initial else set()  # the name of an initialisation
    assert not (named & set(FAMILIES)) - allowed


NAMING = {
    "cli.quickstart", "cli.commands", "cli.train", "findings.claims_ln", "findings.claims_uv", "findings.claims_ap",
    "studies.scales", "studies.thresholds", "studies.printed", "studies.families", "studies.ln", "studies.uv",
    "studies.ap",
}  # fmt: skip
"""They name methods: the doors give examples; a paper's claims, tables and studies are about its methods."""


@pytest.mark.parametrize("module", [m for m in ORDER[ORDER.index("live.weights") :] if m not in NAMING])
def test_above_attach_no_method_is_named(module: str) -> None:
    named = {n.value for n in ast.walk(ast.parse(file(module).read_text())) if isinstance(n, ast.Constant)}
    words = {"head", "prompt"}  # a head is no method there, and a prompt is a usual name of a column
    assert not named & (set(TABLE) - words), "code above the algebra must not know which method is in use"
