"""The architecture as a test: packages import downwards, nothing imports in a circle, names stay where they belong."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import yaml

import deltune
from deltune.methods.registry import REGISTRY
from deltune.studies.papers.registry import PAPERS
from deltune.studies.report.provenance import CITATION
from mutation.mutations import MUTATIONS
from tables.families import FAMILIES

SOURCE = Path(__file__).parents[2] / "src" / "deltune"

ORDER = (
    "_version", "_context", "errors", "compat", "files", "config", "anatomy", "models", "templates", "methods",
    "interop", "runtime", "train", "serve", "studies", "cli", "__main__",
)  # fmt: skip
"""The rooms, from the library's lowest file to the command line: a module imports from its own room and from rooms
before it. CONTRIBUTING.md has the same table."""

NEVER = {("serve", "train"), ("studies", "serve")}
"""Rooms of which the first does not import the second."""

BY_ITS_FACE = {("studies", "train")}
"""Rooms of which the first imports only the names in the `__init__.pyi` of the second."""

INSIDE = {
    "train.data": {"train.data"},
    "train.metrics": {"train.metrics", "train.data.tag_schemes"},
    "train.tasks": {"train.tasks", "train.data", "train.metrics", "train.frozen_layers"},
    "serve.engine": {"serve.engine", "serve.errors"},
}
"""Package -> all of its own room that it imports."""

MODULES = sorted(".".join(path.relative_to(SOURCE).with_suffix("").parts) for path in SOURCE.rglob("*.py"))


def source_file(module: str) -> Path:
    return SOURCE / (module.replace(".", "/") + ".py")


def room_of(module: str) -> str:
    return module.split(".")[0]


def imported_modules(module: str) -> set[str]:
    """Our own modules that a module imports at run time, wherever the import stands."""
    package = module.split(".")[:-1]
    imported: set[str] = set()
    for node in ast.walk(parsed(module)):
        if not isinstance(node, ast.ImportFrom):
            continue
        path = (node.module or "").split(".") if node.module else []
        if node.level:
            path = package[: len(package) - node.level + 1] + path
        elif path[:1] == ["deltune"]:
            path = path[1:]
        else:
            continue
        imported |= {".".join(path), *(".".join([*path, alias.name]) for alias in node.names)}
    return imported & set(MODULES) - {"__init__"}


@cache
def imports() -> dict[str, set[str]]:
    """What every module but the packages' own imports."""
    return {module: imported_modules(module) for module in MODULES if not module.endswith("__init__")}


@cache
def parsed(module: str) -> ast.Module:
    return ast.parse(source_file(module).read_text(encoding="utf-8"))


def string_constants(module: str) -> Iterator[str]:
    """The string constants of a module, the constant parts of f-strings included, docstrings left out."""
    statements = {id(node.value) for node in ast.walk(parsed(module)) if isinstance(node, ast.Expr)}
    for node in ast.walk(parsed(module)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in statements:
            yield node.value


def test_every_module_belongs_to_a_room() -> None:
    assert {room_of(module) for module in imports()} <= {*ORDER}


def test_rooms_import_what_stands_before_them() -> None:
    wrong = [
        f"{module} imports {other}"
        for module, others in imports().items()
        for other in sorted(others)
        if ORDER.index(room_of(other)) > ORDER.index(room_of(module)) or (room_of(module), room_of(other)) in NEVER
    ]
    assert wrong == []


def test_studies_import_train_by_its_face() -> None:
    wrong = [
        f"{module} imports {other}"
        for module, others in imports().items()
        for other in others
        if (room_of(module), room_of(other)) in BY_ITS_FACE
    ]
    assert wrong == []


def test_packages_inside_a_room_import_downwards() -> None:
    wrong = [
        f"{module} imports {other}"
        for package, allowed in INSIDE.items()
        for module, others in imports().items()
        if module.startswith(f"{package}.")
        for other in others
        if room_of(other) == room_of(module) and not any(other == a or other.startswith(f"{a}.") for a in allowed)
    ]
    assert wrong == []


def test_no_module_imports_in_a_circle() -> None:
    remaining = {module: set(others) for module, others in imports().items()}
    while leaves := [module for module, others in remaining.items() if not others & remaining.keys()]:
        for module in leaves:
            del remaining[module]
    assert sorted(remaining) == []


def test_contributing_has_the_table_of_rooms() -> None:
    text = (SOURCE.parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.split("## The rooms", 1)[1].split("\n## ", 1)[0]
    listed = [line.split("`")[1].removesuffix("/").removesuffix(".py") for line in table.splitlines() if "| `" in line]
    assert listed == [room for room in ORDER if not room.startswith("_")]


def test_packages_import_nothing_when_they_are_opened() -> None:
    for path in sorted(SOURCE.rglob("*/__init__.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assert ast.get_docstring(tree), path
        # Opening train and studies checks that their extra is installed; the faces fill their names in on first use.
        allowed = {"from ..errors import check_extra", "import lazy_loader"}
        imports = {ast.unparse(node) for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)}
        assert imports <= allowed or path.parent.name == "cli", path


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
    "methods.forms.low_rank": "bert", "methods.forms.hidden": "bert", "methods.forms.attention": "bert",
    "methods.library": "bert",  # all four: an initialisation
    "train.metrics.model_based": "bert",  # the library bert-score
    "runtime.pooling": "bert",  # a file of the library sentence-transformers
    "cli.use": "llama", "interop.peft_write": "llama",  # the program llama.cpp
    "interop.adapterhub_write": "bert",  # an initialisation of AdapterHub's
    "interop.peft_table": "opt",  # options of PEFT's CPT
    "train.data.formats": "gpt2",  # the format ShareGPT, and who speaks in it
    "train.presets": "bert",  # where a paper printed its settings
}  # fmt: skip
"""Module -> the family that its strings may name, since it means something else there. Papers' studies name models."""


def test_no_family_name_decides_anything() -> None:
    """No string of the code names a model family: what a model is made of is observed."""
    wrong = {}
    for module in MODULES:
        if not module.startswith("studies."):
            names = {name: text for text in string_constants(module) for name in named_families(text)}
            wrong[module] = {n: t for n, t in names.items() if n != ALLOWED_FAMILIES.get(module)}
    assert not {module: names for module, names in wrong.items() if names}


NAMES_METHODS = ("cli.model", "cli.use", "cli.train", "cli.choose", "train.presets", "studies.")
"""Examples on the command line, the papers' protocols, and the studies, which are about particular methods."""


def test_above_the_methods_no_method_is_named() -> None:
    words = {"head", "prompt"}  # a head is no method there, and a prompt is a usual name of a column
    first = ORDER.index("runtime")
    for module in imports():
        named = set(string_constants(module)) & set(REGISTRY) - words
        if ORDER.index(room_of(module)) >= first and not module.startswith(NAMES_METHODS):
            assert not named, f"{module} must not know which method is in use"


UNNAMED = ("found", "told", "own", "asked", "said", "wanted", "given", "these", "together", "elsewhere", "at_home")
"""Words that do not say what a variable holds."""


def test_variables_are_called_what_they_hold() -> None:
    """In the library, in its tests and in its benchmarks."""
    wrong, root = [], SOURCE.parents[1]
    for path in sorted(path for folder in ("src", "tests", "benchmarks") for path in (root / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = getattr(node, "id", None) if isinstance(getattr(node, "ctx", None), ast.Store) else None
            name = node.arg if isinstance(node, ast.arg) else name
            name = node.name if isinstance(node, ast.FunctionDef | ast.ClassDef) else name
            if name in UNNAMED:
                wrong.append(f"{path.relative_to(root)}, line {getattr(node, 'lineno', 0)}: {name}")
    assert wrong == []


def test_every_mutation_still_has_its_line() -> None:
    """`python -m tests.mutation` puts each of them in place of a text that stands exactly once in the library."""
    sources = [source_file(module).read_text(encoding="utf-8") for module in MODULES]
    stale = [mutation.name for mutation in MUTATIONS if sum(text.count(mutation.text) for text in sources) != 1]
    assert stale == []


def test_the_citation_has_the_version_and_what_the_page_of_results_cites() -> None:
    text = (SOURCE.parents[1] / "CITATION.cff").read_text(encoding="utf-8")
    citation = yaml.safe_load(text)
    assert citation["version"] == deltune.__version__
    assert CITATION.startswith(f"{citation['authors'][0]['name']}, {citation['title']}, version {citation['version']}")
    assert {one["title"] for one in citation["references"]} == {paper.title for paper in PAPERS.values()}
