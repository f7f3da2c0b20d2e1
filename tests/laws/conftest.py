"""Which cells of the product of laws, families and methods `make test` runs; `make test-all` runs the whole product.

A law about every family has a parameter that is a `Family`. Of its cases `make test` runs

- for a representative family those of the representative methods; it takes the other methods in turn with the other
  representative families, so that every method runs on one of them,
- for each other family one case, of a representative method where the law has any: the first family takes the first
  case, the next one the next, so that the families together take all of them.

The life of a delta (`test_life`) is worth more: it runs with every method on every representative family, and with
every representative method on every family. Every other case is marked `slow` here. A law whose parameter is a family's
name has chosen its few families itself, and is left alone.
"""

from __future__ import annotations

import zlib
from collections import defaultdict

import pytest

from .families import FAMILIES, REPRESENTATIVE_FAMILIES, Family
from .methods import METHODS, REPRESENTATIVE_METHODS, Row

FAMILY_NUMBERS = {name: number for number, name in enumerate(FAMILIES)}
METHOD_NUMBERS = {text: number for number, text in enumerate(METHODS)}
IN_FULL = ("test_life",)
"""The laws that run with every method on every representative family, and the other way round."""


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    cases: dict[tuple[str, str], list[pytest.Item]] = defaultdict(list)
    turns: dict[tuple[str, str], list[str]] = defaultdict(list)
    for item in items:
        family = _parameters(item).get("family")
        if isinstance(family, Family) and not item.get_closest_marker("slow"):
            cases[_law(item), family.name].append(item)
            if family.name in REPRESENTATIVE_FAMILIES and family.name not in turns[_law(item), _method(item)]:
                turns[_law(item), _method(item)].append(family.name)
    for (law, family_name), of_family in cases.items():
        in_full = law.rpartition("::")[2] in IN_FULL
        kept = [item for item in of_family if _method(item) in REPRESENTATIVE_METHODS]
        if family_name in REPRESENTATIVE_FAMILIES:
            kept = [item for item in of_family if in_full or item in kept or _is_its_turn(item, turns)]
        elif not kept or not in_full:
            choice = kept or of_family
            kept = [choice[(zlib.crc32(law.encode()) + FAMILY_NUMBERS[family_name]) % len(choice)]]
        for item in of_family:
            if item not in kept:
                item.add_marker(pytest.mark.slow)


def _is_its_turn(item: pytest.Item, turns: dict[tuple[str, str], list[str]]) -> bool:
    method = _method(item)
    families = turns[_law(item), method]
    family = _parameters(item)["family"]
    assert isinstance(family, Family)
    return not method or families[METHOD_NUMBERS[method] % len(families)] == family.name


def _law(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def _parameters(item: pytest.Item) -> dict[str, object]:
    return item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}


def _method(item: pytest.Item) -> str:
    row = _parameters(item).get("row")
    return row.text if isinstance(row, Row) else ""
