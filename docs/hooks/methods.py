"""Write docs/reference/methods.md's table of methods, and its list of them, from the registry.

`python docs/hooks/methods.py` tries each method on a tiny BERT, which takes a minute. What a method cannot do and
`REASONS` does not explain ends it with an error, and so does a method without a row of the laws.
"""

from __future__ import annotations

import re
import sys
import tempfile
import warnings
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402
from transformers import PreTrainedModel  # noqa: E402

import deltune  # noqa: E402
from deltune import models  # noqa: E402
from deltune.interop import peft_table  # noqa: E402
from deltune.methods.registry import GROUPS, REGISTRY  # noqa: E402
from deltune.runtime.statistics import needed_statistics  # noqa: E402
from tables.methods import ROWS  # noqa: E402
from tables.quantized import FORMS, batch, load_form, save_models  # noqa: E402

PAGE = ROOT / "docs" / "reference" / "methods.md"
HEADER = (
    "| method | what it does | for example | PEFT's type | merges | rows | quantised base | scalars a layer "
    "| on MiniLM | from |"
)
REASONS = {
    "has no affine": "not affine",
    "has no factor": "gated",
    "spans a whole sub-layer": "no single weight",
    r"trains bert\.embeddings": "trains embeddings",
    "are quantised": "trains their weights",
    "a weight at all of them": "some tokens",
    "the weight of .* is not quantised": "",
}
"""What the messages of refusals say, in a cell; "" where the refusal is of the specimen."""
WITHOUT_COUNT = ("trainable_tokens", "apet")
"""Methods whose count their arguments give."""


@cache
def specimen_of(name: str) -> str:
    """A small expression of a method, from the laws' table."""
    fitting = (row.text for row in ROWS if row.text.partition("(")[0] == name)
    return next((text for text in fitting if len(deltune.parse(text).terms) == 1), f"{name}(rank=4)")


def attached(name: str, quantised: bool, folder: Path) -> tuple[PreTrainedModel, deltune.Tuned]:
    """A tiny model with a method."""
    text, whole = specimen_of(name), load_form(folder, "bert", None)
    statistics = needed_statistics(deltune.parse(text))
    more: dict[str, Any] = {"data": [batch("bert")]} if statistics - {"quantisation error"} else {}
    more |= {"original": whole} if "quantisation error" in statistics else {}
    model = load_form(folder, "bert", FORMS["torchao int8"]) if quantised or "original" in more else whole
    return model, deltune.attach(model, text, **more)


def tried(name: str, folder: Path) -> tuple[str, str, str]:
    """Whether a method merges, mixes in a batch, and acts on a quantised base, each with the reason where not."""

    def rows() -> None:
        model, tuned = attached(name, False, folder)
        with tuned.rows([None, "default", None]), torch.no_grad():
            model(input_ids=batch("bert")["input_ids"])

    def cell(act: Any) -> str:
        try:
            act()
        except deltune.DeltuneError as error:
            reason = next((reason for text, reason in REASONS.items() if re.search(text, str(error), re.DOTALL)), None)
            if reason is None:
                raise SystemExit(f"{name}: {error}") from error
            return f"no: {reason}"
        return "yes"

    merging = {"dequantize": True} if name == "loftq" else {}
    merges = cell(lambda: attached(name, False, folder)[1].merge(**merging))
    return merges, cell(rows), cell(lambda: attached(name, True, folder))


def of_peft(name: str) -> str:
    """PEFT's types that are this method."""
    rows = [row for row in (*peft_table.IN_TRAINING, *peft_table.ROWS) if row.make.__name__ == name]
    kinds = [
        row.kind + "".join(f" ({key if value in (True, peft_table.ANY) else value})" for key, value in row.when.items())
        for row in rows
    ]
    kinds += [kind for kind, other in peft_table.OTHERS.items() if other.method == name]
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


def line(name: str, merges: str, rows: str, quantised: str) -> str:
    """The row of a method."""
    does, example, peft, *rest = known(name)
    return f"| {' | '.join((f'`{name}`', does, example, peft, merges, rows, quantised, *rest))} |"


def page_with(table: list[str]) -> str:
    """The page with these rows and the list of methods."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, after = text.partition("\n| method |")
    after = after[after.index("\n\n") :]
    lines = [HEADER, "|---" * 10 + "|", *table]
    start, end = "## Named methods\n\n", "\n## "
    head, _, rest = (before + "\n" + "\n".join(lines) + after).partition(start)
    _, separator, tail = rest.partition(end)
    names = "\n\n".join(f"::: deltune.{name}" for group in GROUPS.values() for name in group)
    return head + start + names + "\n" + (separator + tail if separator else "")


def main() -> None:
    """Write the page."""
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        save_models(Path(folder))
        table = [line(name, *tried(name, Path(folder))) for group in GROUPS.values() for name in group]
    PAGE.write_text(page_with(table), encoding="utf-8")


if __name__ == "__main__":
    main()
