"""Write docs/reference/methods.md's tables of methods, and its list of them, from the registry.

`python docs/hooks/methods.py [NAME …]` tries each method, or those that are named, on tiny models, which takes some
minutes. What a method cannot do and `REASONS` does not explain ends it with an error, and so does a method of
PEFT's that is compared with nothing.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402
from transformers import PreTrainedModel  # noqa: E402

import deltune  # noqa: E402
from benchmarks.frame import Report  # noqa: E402
from benchmarks.rows import Row  # noqa: E402
from deltune import models  # noqa: E402
from deltune.interop import peft_table  # noqa: E402
from deltune.methods.registry import GROUPS, REGISTRY  # noqa: E402
from deltune.runtime.statistics import needed_statistics  # noqa: E402
from interop import test_field_peft, test_peft  # noqa: E402
from runtime import test_first_pass  # noqa: E402
from tables.methods import ROWS  # noqa: E402
from tables.quantized import FORMS, batch, load_form, save_models  # noqa: E402

TIMES = ROOT / "benchmarks" / "results" / "field.json"
PAGE = ROOT / "docs" / "reference" / "methods.md"
HEADER = "| method | what it does | for example | PEFT's type | scalars a layer | on MiniLM | from |"
CHECKS = (
    "| method | lines | outputs | gradients | detach | load | merges | rows | masks | quantised base | compiled "
    "| step ÷ PEFT |"
)
REASONS = {
    "has no affine": "not affine",
    "has no factor": "gated",
    "spans a whole sub-layer": "no single weight",
    r"trains bert\.embeddings": "trains embeddings",
    "are quantised": "trains their weights",
    "a weight at all of them": "some tokens",
    "the weight of .* is not quantised": "",
    r"cannot be masked: (.+)": r"\1",
    "a mask on a mask|finds its mask by training": "it has a mask",
    "has rows that you chose": "its rows are chosen",
    "has 0 scalars": "trains nothing",
}
"""What the messages of refusals say, in a cell; "" where the refusal is of the specimen."""
WITHOUT_COUNT = ("trainable_tokens", "apet")
"""Methods whose count their arguments give."""


@cache
def specimen_of(name: str) -> str:
    """A small expression of a method, from the laws' table."""
    fitting = (row.text for row in ROWS if row.text.partition("(")[0] == name)
    return next((text for text in fitting if len(deltune.parse(text).terms) == 1), f"{name}(rank=4)")


def attached(
    name: str, quantised: bool, folder: Path, around: str = "{}", **more: Any
) -> tuple[PreTrainedModel, deltune.Tuned]:
    """A tiny model with a method, or with an expression around it."""
    text, whole = around.format(specimen_of(name)), load_form(folder, "bert", None)
    statistics = needed_statistics(deltune.parse(specimen_of(name)))
    more |= {"data": [batch("bert")]} if statistics - {"quantisation error"} else {}
    more |= {"original": whole} if "quantisation error" in statistics else {}
    model = load_form(folder, "bert", FORMS["torchao int8"]) if quantised or "original" in more else whole
    return model, deltune.attach(model, text, **more)


def cell(name: str, act: Callable[[], object]) -> str:
    """Whether a method can do something, with the reason where it cannot."""
    try:
        act()
    except deltune.DeltuneError as error:
        for text, reason in REASONS.items():
            if found := re.search(text, str(error), re.DOTALL):
                return f"no: {found.expand(reason)}"
        raise SystemExit(f"{name}: {error}") from error
    return "yes"


def tried(name: str, folder: Path) -> tuple[str, ...]:
    """What a method does exactly on a tiny model, each with the reason where it does not."""
    ids = batch("bert")["input_ids"]

    def answer(model: Any) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = model(input_ids=ids).logits
        return logits

    def moved(quantised: bool = False) -> tuple[PreTrainedModel, deltune.Tuned]:
        model, tuned = attached(name, quantised, folder)
        with torch.no_grad():
            for parameter in tuned.trainable_parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape))
        return model, tuned

    def same(one: torch.Tensor, two: torch.Tensor, tolerance: float = 0.0) -> None:
        if not torch.allclose(one, two, rtol=0, atol=tolerance):
            raise SystemExit(f"{name}: {(one - two).abs().max()} is above {tolerance}")

    def detach() -> None:
        bare = load_form(folder, "bert", FORMS["torchao int8"]) if name == "loftq" else load_form(folder, "bert", None)
        model, tuned = moved()
        tuned.detach()
        same(answer(model), answer(bare))

    def load() -> None:
        model, tuned = moved()
        tuned.advance(1.0)
        with tempfile.TemporaryDirectory() as saved:
            tuned.save(saved)
            other = load_form(folder, "bert", FORMS["torchao int8"] if name == "loftq" else None)
            deltune.load(other, saved)
        same(answer(model), answer(other))

    def merge() -> None:
        model, tuned = moved()
        before = answer(model)
        tuned.merge(**({"dequantize": True} if name == "loftq" else {}))
        same(answer(model), before, 1e-4)

    def rows() -> None:
        model, tuned = moved()
        alone = answer(model)
        with tuned.disable():
            bare = answer(model)
        with tuned.rows(["default", None, "default"][: len(ids)]):
            mixed = answer(model)
        same(mixed, torch.stack([bare[i] if i == 1 else alone[i] for i in range(len(ids))]), 1e-5)

    def mask() -> None:
        number = 7
        _, tuned = attached(name, False, folder, f"apet({{}}, parameters={number})", head="freeze")
        found = sum(parameter.numel() for parameter in tuned.trainable_parameters())
        assert tuned.count().method == found == number, (name, found)

    def compiled() -> None:
        model, _ = moved()
        before = answer(model)
        torch.compiler.reset()
        same(answer(torch.compile(model, backend="eager")), before, 1e-6)

    acts = (detach, load, merge, rows, mask, lambda: answer(attached(name, True, folder)[0]), compiled)
    return tuple(cell(name, act) for act in acts)


def lines_of(name: str) -> int:
    """The lines of a method and of its forms, each statement one, without docstrings."""
    parts = [part for part in deltune.parse(specimen_of(name)).parts if isinstance(part, deltune.Modification)]
    sources = [REGISTRY[name].make, *{type(part.form) for part in parts}]
    number = 0
    for source in sources:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(source))))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node):
                node.body = node.body[1:]
        number += len(ast.unparse(tree).splitlines())
    return number


AS = {"eva": "lora", "corda": "pissa", "lora_ga": "pissa"}
"""Methods that compute what others do, from initial values that tests/runtime/test_starts.py compares with PEFT's."""


def beside_peft(name: str, folder: Path) -> tuple[str, str]:
    """The greatest differences of outputs and gradients from PEFT's, by the greatest entry."""
    if of_peft(name) == "none":
        return "not in PEFT", "not in PEFT"
    if name == "xlora":
        outputs, gradients = map(
            max, zip(*(test_first_pass.differences(o, folder) for o in test_first_pass.OPTIONS), strict=True)
        )
        return f"{outputs:.0e}", f"{gradients:.0e}"
    if name in AS:
        return (f"as `{AS[name]}`",) * 2
    row = next((row for row in test_field_peft.ROWS if row.method.partition("(")[0] == name), None)
    if row is not None:
        outputs, gradients = test_field_peft.differences(row, row.families[0])
    else:
        of_folder = next(row for row in test_peft.OF_FOLDERS if name in row.method)
        outputs, gradients = test_peft.differences_of_folder(of_folder, folder / f"peft {name}")
    return f"{outputs:.0e}", "PEFT's are wrong" if gradients is None else f"{gradients:.0e}"


@cache
def measured_rows() -> list[Row]:
    """The committed results of the benchmark that times steps."""
    return Report.read(TIMES).all_rows()


def step(name: str) -> str:
    """A step's time by PEFT's, in the benchmark's results."""
    if of_peft(name) == "none":
        return "not in PEFT"
    found = [r.figure for r in measured_rows() if re.fullmatch(rf"step / PEFT's: {name}(\(.*\))?", r.name) and r.figure]
    return f"{found[0]:.2f}" if found else "not timed"


def of_peft(name: str) -> str:
    """PEFT's types that are this method."""
    rows = [row for row in (*peft_table.IN_TRAINING, *peft_table.ROWS) if row.make.__name__ == name]
    kinds = [
        row.kind + "".join(f" ({key if value in (True, peft_table.ANY) else value})" for key, value in row.when.items())
        for row in rows
    ]
    kinds += [kind for kind, other in peft_table.OTHERS.items() if other.method == name]
    kinds += ["XLORA"] if name == "xlora" else []  # as a configuration, by what it is called there
    return ", ".join(f"`{kind}`" for kind in dict.fromkeys(kinds)) or "none"


def known(name: str) -> tuple[str, str, str, str, str, str]:
    """What a method does, an example, PEFT's types, the scalars in a layer and on MiniLM, and the paper."""
    entry = REGISTRY[name]
    does = re.sub(
        r" \((?:[^()]|\([^()]*\))*(?:PEFT|\d{4}|eq\.|§|table)(?:[^()]|\([^()]*\))*\)(?=\.$)", "", entry.formula
    ).rstrip(".")
    does = does.replace("|", "\\|")
    count = "N" if name in WITHOUT_COUNT else f"{deltune.count(minilm(), entry.plain).method:,}"
    return does, f"`{entry.example}`", of_peft(name), entry.scalars, count, entry.paper


@cache
def minilm() -> Any:
    """MiniLM's configuration."""
    return models.load_config("minilm")


def line(*cells: object) -> str:
    """A row of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def checks(name: str, folder: Path) -> str:
    """What was tried of a method, as cells."""
    return " | ".join((str(lines_of(name)), *beside_peft(name, folder), *tried(name, folder), step(name)))


def page_with(text: str, tables: dict[str, list[str]]) -> str:
    """The page with these rows below their headers, and the list of methods."""
    for header, rows in tables.items():
        lines = "\n".join((header, "|---" * (header.count("|") - 1) + "|", *rows))
        begins = re.escape(header[: header.index("|", 11)])
        text = re.sub(rf"^{begins}.*?(?=\n\n)", lambda _, lines=lines: lines, text, flags=re.MULTILINE | re.DOTALL)
    start, end = "## Named methods\n\n", "\n## "
    head, _, rest = text.partition(start)
    _, separator, tail = rest.partition(end)
    names = "\n\n".join(f"::: deltune.{name}" for group in GROUPS.values() for name in group)
    return head + start + names + "\n" + (separator + tail if separator else "")


def main(*chosen: str) -> None:
    """Write the page, anew after each method, so that an interrupted run goes on by the names that are left."""
    warnings.simplefilter("ignore")
    text = PAGE.read_text(encoding="utf-8")
    every = [name for group in GROUPS.values() for name in group]
    found = dict(re.findall(r"^\| `(\w+)` \| (\d+(?: \| [^|]+){10}) \|", text, re.MULTILINE))
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        save_models(Path(folder))
        for name in chosen or every:
            try:
                found[name] = checks(name, Path(folder))
            except SystemExit as error:
                wrong.append(str(error))
            print(name, found.get(name), file=sys.stderr, flush=True)
            checked = [line(f"`{name}`", found[name]) for name in every if name in found]
            tables = {HEADER: [line(f"`{name}`", *known(name)) for name in every], CHECKS: checked}
            PAGE.write_text(page_with(PAGE.read_text(encoding="utf-8"), tables), encoding="utf-8")
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main(*sys.argv[1:])
