"""The architecture as a test: packages import downwards, nothing imports in a circle, names stay where they belong."""

from __future__ import annotations

import ast
from pathlib import Path

from deltune.methods.registry import TABLE

SOURCE = Path(__file__).parents[2] / "src" / "deltune"

PACKAGES = (
    "_version", "errors", "compat", "notebook", "filesystem", "tensor_files", "anatomy", "methods", "interop",
    "runtime", "models", "data", "metrics", "tasks", "training", "studies.engine", "studies.claims", "studies.report",
    "studies", "cli", "__main__",
)  # fmt: skip
"""From the bottom up; a package imports only from those before it. CONTRIBUTING.md has the same table."""

MODULES = sorted(".".join(path.relative_to(SOURCE).with_suffix("").parts) for path in SOURCE.rglob("*.py"))


def source_file(module: str) -> Path:
    return SOURCE / (module.replace(".", "/") + ".py")


def package_of(module: str) -> str:
    """The longest entry of PACKAGES that the module belongs to."""
    matches = [package for package in PACKAGES if module == package or module.startswith(package + ".")]
    return max(matches, key=len, default="")


def imported_modules(module: str) -> set[str]:
    """Our own modules that a module imports at run time, wherever the import stands."""
    package = module.split(".")[:-1]
    imported: set[str] = set()
    for node in ast.walk(ast.parse(source_file(module).read_text(encoding="utf-8"))):
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


IMPORTS = {module: imported_modules(module) for module in MODULES if not module.endswith("__init__")}


def string_constants(module: str) -> set[str]:
    nodes = ast.walk(ast.parse(source_file(module).read_text(encoding="utf-8")))
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def test_every_module_belongs_to_a_package() -> None:
    assert [module for module in IMPORTS if not package_of(module)] == []


def test_packages_import_downwards() -> None:
    upwards = [
        f"{module} imports {other}"
        for module, others in IMPORTS.items()
        for other in sorted(others)
        if PACKAGES.index(package_of(other)) > PACKAGES.index(package_of(module))
    ]
    assert upwards == []


def test_no_module_imports_in_a_circle() -> None:
    remaining = {module: set(others) for module, others in IMPORTS.items()}
    while leaves := [module for module, others in remaining.items() if not others & remaining.keys()]:
        for module in leaves:
            del remaining[module]
    assert sorted(remaining) == []


def test_only_the_study_command_imports_the_studies() -> None:
    importers = {m for m, others in IMPORTS.items() if any(o.startswith("studies.") for o in others)}
    assert {m for m in importers if not m.startswith("studies.")} == {"cli.study"}


def test_contributing_has_the_table_of_packages() -> None:
    text = (SOURCE.parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.split("## The packages", 1)[1].split("\n## ", 1)[0]
    listed = [line.split("`")[1].removesuffix("/").removesuffix(".py") for line in table.splitlines() if "| `" in line]
    assert listed == [package for package in PACKAGES if package != "__main__"]


def test_packages_import_nothing_when_they_are_opened() -> None:
    for path in sorted(SOURCE.rglob("*/__init__.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assert ast.get_docstring(tree), path
        assert len(tree.body) == 1 or path.parent.name == "cli", path


FAMILIES = (
    "bert", "roberta", "electra", "albert", "gpt2", "gpt_neo", "llama", "qwen", "mistral", "gemma", "bart", "t5",
)  # fmt: skip


def test_no_family_name_decides_anything() -> None:
    """No string constant of the code (docstrings aside) is a model family's name."""
    initialisations = ("methods.forms", "methods.attention_forms", "methods.library")  # "bert" is one there
    for module in MODULES:
        allowed = {"bert"} if module in initialisations else set()
        assert not (string_constants(module) & set(FAMILIES)) - allowed, module


NAMES_METHODS = ("cli.quickstart", "cli.app", "cli.train", "training.presets", "studies.")
"""Examples on the command line, the papers' protocols, and the studies, which are about particular methods."""


def test_above_the_methods_no_method_is_named() -> None:
    words = {"head", "prompt"}  # a head is no method there, and a prompt is a usual name of a column
    first = PACKAGES.index("runtime")
    for module in IMPORTS:
        if PACKAGES.index(package_of(module)) >= first and not module.startswith(NAMES_METHODS):
            assert not string_constants(module) & set(TABLE) - words, f"{module} must not know which method is in use"
