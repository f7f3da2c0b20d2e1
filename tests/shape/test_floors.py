"""The architecture as a test: imports go down, files stay small, names stay where they belong."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from deltune.catalogue import TABLE

SOURCE = Path(__file__).parents[2] / "src" / "deltune"

FLOORS = (
    ("errors", "expressions"),
    ("anatomy", "graph", "trace", "sublayers", "observe"),
    ("sparse", "forms", "heads", "compositions"),
    ("algebra", "selections", "recipes", "catalogue", "protocols", "sites", "planning", "counting", "budget"),
    ("foreign", "peft_files", "peft_writing", "adapterhub_bottlenecks", "adapterhub_files"),
    (
        "weights", "gates", "edits", "uses", "merged_attention", "attention", "taps", "positions", "prompting",
        "merging", "mixing", "wiring", "store", "handle", "interchange", "attaching",
    ),
    ("machine", "models", "files", "columns", "labels", "data"),
    ("measures", "metrics_labels", "metrics_captions", "metrics_texts", "metrics_models", "metrics", "stats", "tasks"),
    ("encoding", "kinds", "templates", "classifying", "tagging", "choosing", "generating", "ranking",
     "listing", "caching"),
    (
        "faults", "specs", "assignments", "parts", "processes", "sharding", "runs", "checkpoints", "progress",
        "stopping", "scoring", "inputs", "evaluate", "exporting",
    ),
    ("jobs", "trainer", "series", "train"),
    ("outcomes", "results", "timing", "terms", "works", "sweeps", "pools", "pools_ray", "engine"),
    (
        "readings", "cells", "effects", "claims", "claims_ln", "claims_uv", "claims_ap", "claims_papers", "findings",
    ),
    (
        "views", "facts", "grids", "tables", "inks", "lettering", "panels", "charts", "lines", "heats", "plots",
        "pictures", "runlists", "page", "studies", "scales", "thresholds", "printed", "families", "studies_ln",
        "studies_uv", "studies_ap", "studies_papers", "reports",
    ),
    ("launching", "notes", "show", "quickstart", "terminal", "cli_train", "cli_study", "cli", "__main__"),
)  # fmt: skip
"""From the ground up; a module imports only what stands before it here."""

FREE = {"__init__"}
"""The lazy front door points at every floor and imports none."""

FAMILIES = (
    "bert", "roberta", "electra", "albert", "gpt2", "gpt_neo", "llama", "qwen", "mistral", "gemma", "bart", "t5",
)  # fmt: skip

MODULES = sorted(path.stem for path in SOURCE.glob("*.py"))


def imported(module: str) -> set[str]:
    """Our own modules that a module imports at run time, wherever the import stands."""
    tree = ast.parse((SOURCE / f"{module}.py").read_text())
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            found |= {node.module.split(".")[0]} if node.module else {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "deltune":
            inside = (node.module or "").split(".")[1:]
            found |= {inside[0]} if inside else {alias.name for alias in node.names}
    return found & set(MODULES)


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down(module: str) -> None:
    order = [name for floor in FLOORS for name in floor]
    if module in FREE:
        return
    assert module in order, f"give {module}.py a floor in CONTRIBUTING.md and here"
    above = [other for other in imported(module) if other not in FREE and order.index(other) >= order.index(module)]
    assert not above, f"{module} imports {above}, which stand above it"


@pytest.mark.parametrize("module", MODULES)
def test_a_file_is_about_a_screenful_of_one_thing(module: str) -> None:
    lines = (SOURCE / f"{module}.py").read_text().count("\n")
    assert lines <= 350, f"{module}.py has {lines} lines: would two rooms be easier to live in?"


@pytest.mark.parametrize("module", MODULES)
def test_no_family_name_decides_anything(module: str) -> None:
    """No string constant of the code (docstrings aside) is a model family's name."""
    tree = ast.parse((SOURCE / f"{module}.py").read_text())
    named = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    allowed = {"bert"} if module in ("forms", "heads", "recipes") else set()  # the name of an initialisation
    assert not (named & set(FAMILIES)) - allowed


NAMING = {
    "quickstart", "cli", "cli_train", "claims_ln", "claims_uv", "claims_ap",
    "scales", "thresholds", "printed", "families", "studies_ln", "studies_uv", "studies_ap",
}  # fmt: skip
"""They name methods: the doors give examples; a paper's claims, tables and studies are about its methods."""


@pytest.mark.parametrize("module", [m for floor in FLOORS[5:] for m in floor if m not in NAMING])
def test_above_attach_no_method_is_named(module: str) -> None:
    path = SOURCE / f"{module}.py"
    if not path.exists():
        pytest.fail(f"{module}.py is on a floor but does not exist")
    named = {n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant)}
    words = {"head", "prompt"}  # a head is no method there, and a prompt is a usual name of a column
    assert not named & (set(TABLE) - words), "code above the algebra must not know which method is in use"
