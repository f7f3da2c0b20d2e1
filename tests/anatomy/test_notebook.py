"""The tables that a notebook shows in place of the text of a method and a count."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest

import deltune
from deltune.anatomy.types import html_table
from tables.families import FAMILIES
from tables.specimens import config


def read_table(value: Any) -> tuple[str, list[list[str]]]:
    """The caption and the rows, the header first, of the table that a notebook shows for a value."""
    table = ElementTree.fromstring(value._repr_html_())
    rows = [["".join(cell.itertext()) for cell in row] for row in table.iter("tr")]
    return "".join(table.find("caption").itertext()), rows  # type: ignore[union-attr]


METHODS = {
    "lora(layers='upper half')": [
        ["LowRank(rank=8)", "query", "upper half", "parallel, Add()"],
        ["LowRank(rank=8)", "value", "upper half", "parallel, Add()"],
    ],
    "prefix(attention='self', layers=(0, 1), stack='decoder')": [
        ["Prefix(length=16)", "heads of self attention", "0, 1 of the decoder", "parallel, Gate()"]
    ],
    "layernorm(of='ffn')": [["norm.gain, norm.bias", "layers (ffn)", "all", "in place"]],
    "diff_pruning(sparsity=0.01)": [["linear.weight, linear.bias", "layers", "all", "a share of 0.01 in place"]],
    "apet(ia3, parameters=9)": [
        ["Rescale()", "key", "all", "sequential, Add()"],
        ["Rescale()", "value", "all", "sequential, Add()"],
        ["Rescale()", "ffn_inner", "all", "sequential, Add()"],
    ],
}


@pytest.mark.parametrize("expression", METHODS)
def test_a_method_shows_its_parts(expression: str) -> None:
    method = deltune.parse(expression)
    caption, (header, *rows) = read_table(method)
    assert caption == repr(method) and header == ["what", "where", "layers", "how"]
    assert rows == METHODS[expression]


def test_a_count_shows_its_numbers() -> None:
    count = deltune.count(config(FAMILIES["bert"]), "prefix(length=2, reparameterise=4)")
    rows = dict(read_table(count)[1])
    assert count.training_only > 0
    assert rows["method"] == f"{count.method:,}" and rows["while training only"] == f"{count.training_only:,}"
    assert rows["trained in all"] == f"{count.trained:,}"


def test_everything_in_a_table_is_escaped() -> None:
    class Table:
        def _repr_html_(self) -> str:
            return html_table("a < b", ["<i>"], [["&amp;"]])

    assert read_table(Table()) == ("a < b", [["<i>"], ["&amp;"]])
