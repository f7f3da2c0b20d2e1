"""The architecture as a test: imports go down, files stay small, names stay where they belong."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from deltune.algebra.catalogue import TABLE
from laws.families import FAMILIES

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

MODULES = sorted(".".join(path.relative_to(SOURCE).with_suffix("").parts) for path in SOURCE.rglob("*.py"))

ORDER = [f"{package}.{name}".lstrip(".") for package, names in FLOORS.items() for name in names] + ["__main__"]


def file(module: str) -> Path:
    return SOURCE / (module.replace(".", "/") + ".py")


@cache
def parsed(module: str) -> ast.Module:
    return ast.parse(file(module).read_text(encoding="utf-8"))


def imported(module: str) -> set[str]:
    """Our own modules that a module imports at run time, wherever the import stands."""
    here = module.split(".")[:-1]
    found: set[str] = set()
    for node in ast.walk(parsed(module)):
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


def strings(module: str) -> Iterator[str]:
    """The string constants of a module, the constant parts of f-strings included, docstrings left out."""
    statements = {id(n.value) for n in ast.walk(parsed(module)) if isinstance(n, ast.Expr)}
    for node in ast.walk(parsed(module)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in statements:
            yield node.value


def test_imports_go_down() -> None:
    wrong = []
    for number, module in enumerate(ORDER):
        above = imported(module) & set(ORDER[number:])
        wrong += [f"{module} imports {other}, which stands above it" for other in sorted(above)]
    assert not wrong


def test_floors_hold_what_there_is() -> None:
    assert set(ORDER) == {m for m in MODULES if not m.endswith("__init__")}, (
        "give it a floor in CONTRIBUTING.md and here"
    )
    table = (SOURCE.parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for package, names in FLOORS.items():
        part = table.split(f"**`{package}/`**" if package else "**Ground**", 1)[1].split("\n**", 1)[0]
        assert [line.split("`")[1] for line in part.splitlines() if line.startswith("| `")] == list(names)


def test_a_package_is_a_name_and_a_sentence() -> None:
    """Opening a package imports nothing, apart from the command line's entry point."""
    for module in MODULES:
        if module.endswith(".__init__"):
            assert ast.get_docstring(parsed(module)), module
            assert len(parsed(module).body) == 1 or module == "cli.__init__", module


def separated(text: str) -> str:
    """Lower-case words with single spaces between them: `BertModel`, `bert-base` and `bert.encoder` begin with bert."""
    return re.sub(r"[^a-z0-9]+", " ", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", text).lower())


FAMILY_NAMES = {
    family: re.compile(
        rf"(?<![a-z0-9]){separated(family.rstrip('0123456789') if len(family) > 2 else family)}(?![a-z])"
    )
    for family in FAMILIES
}
"""Each family of the registry, to be found as a word of a longer string, whatever the number of its version."""


def named_families(text: str) -> set[str]:
    """The families of the registry that a string names."""
    return {family for family, pattern in FAMILY_NAMES.items() if pattern.search(separated(text))}


def test_a_family_is_found_in_a_longer_string() -> None:
    for family in FAMILIES:
        for text in (family, f"{family}-base", f"the layers of {family.upper()}", f"{family.title()}Model"):
            assert family in named_families(text), text
    assert named_families("optimizer options, graphite, albertine") == set()


ALLOWED_FAMILIES = {
    "mathematics.forms": "bert", "mathematics.heads": "bert", "algebra.recipes": "bert",  # an initialisation
    "metrics.measures": "bert", "metrics.neural": "bert",  # the library bert-score
    "algebra.protocols": "bert",  # where a paper printed its settings
}  # fmt: skip
"""Module -> the family that its strings may name, since it means something else there. Papers' studies name models."""


def test_no_family_name_decides_anything() -> None:
    """No string of the code names a model family: what a model is made of is observed."""
    wrong = {}
    for module in MODULES:
        if not module.startswith("studies."):
            names = {name: text for text in strings(module) for name in named_families(text)}
            wrong[module] = {n: t for n, t in names.items() if n != ALLOWED_FAMILIES.get(module)}
    assert not {module: names for module, names in wrong.items() if names}


NAMING = {
    "cli.quickstart", "cli.commands", "cli.train", "findings.claims_ln", "findings.claims_uv", "findings.claims_ap",
    "studies.scales", "studies.thresholds", "studies.printed", "studies.families", "studies.ln", "studies.uv",
    "studies.ap",
}  # fmt: skip
"""They name methods: the command line gives examples; a paper's claims, tables and studies are about its methods."""


def test_above_attach_no_method_is_named() -> None:
    """Code above the algebra does not know which method is in use."""
    words = {"head", "prompt"}  # a head is no method there, and a prompt is a usual name of a column
    above = [m for m in ORDER[ORDER.index("live.weights") :] if m not in NAMING]
    named = {module: set(strings(module)) & (set(TABLE) - words) for module in above}
    assert not {module: names for module, names in named.items() if names}
