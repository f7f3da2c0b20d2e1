"""The documentation runs: blocks of README.md, CONTRIBUTING.md and docs/**/*.md, by the mark of their fence.

python   runs, in order and in one namespace a file; a comment `# -> text` is a line that is printed, in this order;
         with title="FILE" it is that file, which commands after it may import
console  `$ deltune ...` runs, trainings cut to a few rows; the lines after it are what is printed, `…` for anything
bash     is only shown; commands, options and targets of make in it exist
Every file works in a folder of its own that looks like a checkout.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer

from deltune.cli import app as cli
from deltune.cli.serve import serve_app
from deltune.cli.train import train_app
from deltune.methods import registry
from tables.families import FAMILIES
from tables.methods import ROWS

ROOT = Path(__file__).resolve().parents[2]
FILES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
FEW = ["--epochs", "1", "--max-train-rows", "16", "--batch-size", "16", "--max-length", "16", "--quiet"]
"""What a training in the documentation is cut to; the last of equal options counts."""

EXPLANATIONS = ("glossary.md", "troubleshooting.md", "install.md", "quickstart.md", "forward-pass.md", "families.md")
"""Pages that begin with prose or a table; every other page of a folder of guides begins with code."""

guides = [
    page
    for folder in ("start", "recipes", "train", "language", "library", "with", "serve", "studies")
    for page in sorted((ROOT / "docs" / folder).glob("*.md"))
    if page.name not in EXPLANATIONS
]
pages = pytest.mark.parametrize("page", FILES, ids=lambda page: str(page.relative_to(ROOT)))
LONG = (
    "chat.md", "combine.md", "many.md", "model.md", "peft.md", "python.md", "quickstart.md", "reproduce.md", "serve.md",
    "train.md",
)  # fmt: skip
"""Pages whose code runs for many seconds."""


@dataclass(frozen=True)
class Block:
    """A fenced block: its mark, its text, the line it begins on, and the name of the file that it is."""

    mark: str
    text: str
    line: int
    file: str = ""


def blocks(page: Path, *marks: str) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    fenced = re.compile(r"^```(\S*)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    matches = [*fenced.finditer(text)]
    for part in (fenced.sub("", text), *(m[3] for m in matches)):
        assert "\n```" not in f"\n{part}", f"{page.name}: a block is not closed: {part[-300:]}"
    all_of_them = [
        Block(m[1], m[3], text.count("\n", 0, m.start(3)) + 1, m[2].strip().removeprefix("title=").strip('"'))
        for m in matches
    ]
    return [block for block in all_of_them if not marks or block.mark in marks]


def squeezed(text: str) -> str:
    return " ".join(text.split())


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the sources in it, as the working directory. What a page registers is unknown again after it."""
    (tmp_path / "src").symlink_to(ROOT / "src")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    vocabulary = dict(registry.VOCABULARY)
    yield tmp_path
    for name in registry.VOCABULARY.keys() - vocabulary:
        del registry.VOCABULARY[name]
    registry._parse_cached.cache_clear()


def run_command(command: list[str], monkeypatch: pytest.MonkeyPatch) -> tuple[str, bool]:
    """Everything that a command line prints, run in this process, and whether it went well."""
    code: Any = 0
    monkeypatch.setattr(sys, "argv", command + (FEW if command[1] == "train" else []))
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        try:
            cli.main()
        except SystemExit as stop:
            code = stop.code
    return out.getvalue(), code in (0, None)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=str(page.relative_to(ROOT)), marks=pytest.mark.slow if page.name in LONG else ())
        for page in FILES
    ],
)
def test_it_runs(page: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    namespace: dict[str, Any] = {"__name__": "documentation"}
    for block in blocks(page, "python", "console"):
        at = f"{page.name} line {block.line}"
        if block.file:
            Path(block.file).write_text(block.text, encoding="utf-8")
        elif block.mark == "python":
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile("\n" * (block.line - 1) + block.text, str(page), "exec", dont_inherit=True), namespace)
            lines = iter(squeezed(line) for line in out.getvalue().splitlines())
            for expected in re.findall(r"# ->(.*)", block.text):
                assert squeezed(expected) in lines, f"{at}: {expected!r} is not among {out.getvalue()!r}"
        else:
            for command, expected in sessions(block):
                printed, well = run_command(command, monkeypatch)
                assert well != expected.startswith("deltune:"), f"{at}: {shlex.join(command)} prints\n{printed}"
                pattern = ".*".join(re.escape(squeezed(part)) for part in expected.split("…"))
                assert re.fullmatch(pattern, squeezed(printed)), f"{at}: {shlex.join(command)} prints\n{printed}"


@pytest.mark.parametrize("guide", guides, ids=lambda page: page.stem)
def test_guides_begin_with_code_that_runs(guide: Path) -> None:
    """Before it stand the title and a paragraph or two, and no table."""
    first = blocks(guide)[0]
    before = guide.read_text(encoding="utf-8").splitlines()[: first.line - 1]
    assert first.mark in ("python", "console") and len(before) <= 12
    assert not any(line.startswith("|") for line in before)


def sessions(block: Block) -> Iterator[tuple[list[str], str]]:
    """Commands of a console block, each with what it prints."""
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        command, _, printed = part.partition("\n")
        words = shlex.split(command)
        assert words[0] == "deltune", f"only deltune runs in a console block, not {words[0]}"
        yield words, printed


@pages
def test_what_is_only_shown_exists(page: Path) -> None:
    """Options of deltune and targets of make in bash blocks."""
    group: Any = typer.main.get_command(cli.app)
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for block in blocks(page, "bash"):
        for line in block.text.splitlines():
            words = shlex.split(re.sub(r"\$\w+", "0", line), comments=True)
            if words[:1] == ["make"]:
                assert words[1] in targets
            elif words[:1] == ["deltune"]:
                built = {"train": train_app, "serve": serve_app}.get(words[1])
                command = group.commands[words[1]] if built is None else typer.main.get_command(built())
                command.make_context(words[1], [w for w in words[2:] if w != "…"]).close()


def rows(page: str) -> dict[str, tuple[str, str]]:
    """The table of methods of a page: scalars a layer, where it has them, and the count on MiniLM, by name."""
    matches = re.findall(
        r"^\| `(\w+)(?:\([^|]*\))?` \|.*?(?:\| ([^|]*) )?\| ([\d,]+|N) \|[^|]*\|$",
        (ROOT / page).read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    return {name: (scalars, count) for name, scalars, count in matches}


def test_the_number_of_families() -> None:
    """The README counts the families of the laws' table, and the page about models names each of them."""
    numbers = re.findall(r"\[(\d+) (?:tested model )?families\]", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert numbers == [str(len(FAMILIES))]
    page = (ROOT / "docs" / "library" / "model.md").read_text(encoding="utf-8")
    listed = page.split("as tiny models with random weights:\n\n")[1].partition(".\n\n")[0]
    assert sorted(map(plain_name, listed.split(","))) == sorted(map(plain_name, FAMILIES))


def test_the_number_of_model_classes() -> None:
    """The README has the totals of the page of families."""
    page = (ROOT / "docs" / "library" / "families.md").read_text(encoding="utf-8")
    totals = [int(number) for number in re.findall(r"\d+", page.split("\n| all |")[1].partition("\n")[0])]
    sentence = (
        (ROOT / "README.md").read_text(encoding="utf-8").split("depends on a family: ")[1].partition("test.\n")[0]
    )
    assert [int(number) for number in re.findall(r"\b\d+\b", sentence)] == [sum(totals), *totals]


def plain_name(family: str) -> str:
    """The name of a family without what papers and transformers write differently: GPT-NeoX is gpt_neox."""
    return re.sub(r"[-_\s]", "", family).lower()


REFERENCE = "docs/reference/methods.md"


@functools.cache
def table_script() -> Any:
    """The script that writes the table, as a module."""
    spec = importlib.util.spec_from_file_location("docs_hooks_methods", ROOT / "docs" / "hooks" / "methods.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def table_rows(section: str = "") -> dict[str, list[str]]:
    """The rows of the page's first table, or of the one below a heading, by method."""
    text = (ROOT / REFERENCE).read_text(encoding="utf-8").split("## ")
    part = next((part for part in text if part.startswith(section)), "") if section else text[0]
    lines = re.findall(r"^\| `\w+` \|.*\|$", part, re.MULTILINE)
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return {row[0].strip("` "): row[1:] for row in cells}


@pytest.mark.parametrize("name", sorted({*registry.REGISTRY, *table_rows()}))
def test_the_table_of_methods(name: str) -> None:
    """Each row is what `docs/hooks/methods.py` writes; what a method cannot do has its reason."""
    assert name in registry.REGISTRY, f"{REFERENCE} tells of {name}, which does not exist"
    assert name in table_rows(), f"{REFERENCE} lacks {name}: run `python docs/hooks/methods.py`"
    assert tuple(table_rows()[name]) == table_script().known(name)
    assert f"\n::: deltune.{name}\n" in (ROOT / REFERENCE).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", sorted(registry.REGISTRY))
def test_what_was_checked_of_methods(name: str) -> None:
    """Nothing is left open: what was not compared or cannot be done has its reason."""
    checked, script = table_rows("What was checked"), table_script()
    assert name in checked, f"{REFERENCE} does not say what was checked of {name}: run `python docs/hooks/methods.py`"
    lines, outputs, gradients, *tried, step = checked[name]
    assert int(lines) == script.lines_of(name) and len(tried) == 7
    in_peft, laws = script.of_peft(name) != "none", [r for r in ROWS if r.text == script.specimen_of(name)]
    for cell in (outputs, gradients):
        if re.fullmatch(r"\de[-+]\d\d", cell):
            assert in_peft and float(cell) < 2e-5
        else:
            assert re.fullmatch(r"as `\w+`|PEFT's are wrong" if in_peft else "not in PEFT", cell)
    assert all(re.fullmatch(r"yes|no: .+", cell) for cell in tried)
    timed = in_peft and step != "not timed"
    assert float(step) <= 1.1 if timed else step == "not timed" if in_peft else step == "not in PEFT"
    assert tried[2].startswith("yes") in ([row.merges for row in laws] or [True])


def test_the_short_table_of_methods() -> None:
    """The README has some of the rows, with the same counts, and says how many more there are."""
    short, reference = rows("README.md"), rows(REFERENCE)
    more = re.findall(r"\[(\d+) more\]\(\S+\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert more == [str(len(registry.REGISTRY) - len(short))]
    assert len(short) > 5
    assert {name: count for name, (_, count) in short.items()} == {name: reference[name][1] for name in short}
