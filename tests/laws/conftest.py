"""Which cells of the product of laws, families and methods `make test` runs; `make test-all` runs the whole product.

A law about every family has a parameter that is a `Family`. Of its cases `make test` runs

- all for a representative family: every method and every other parameter on a few families,
- for each other family those of the representative methods: every family on a few methods,
- for each other family one case where the law has no representative method: the first family takes the first case, the
  next one the next, so that the families together take all of them.

Every other case is marked `slow` here. A law whose parameter is a family's name has chosen its few families itself, and
is left alone.
"""

from __future__ import annotations

from collections import defaultdict

import pytest

from .families import FAMILIES, REPRESENTATIVE_FAMILIES, Family
from .methods import REPRESENTATIVE_METHODS, Row

POSITIONS = {name: number for number, name in enumerate(FAMILIES)}


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    cases: dict[tuple[str, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        family = _parameters(item).get("family")
        if isinstance(family, Family) and family.name not in REPRESENTATIVE_FAMILIES:
            cases[item.nodeid.partition("[")[0], family.name].append(item)
    for (_, family_name), of_family in cases.items():
        quick = [item for item in of_family if not item.get_closest_marker("slow")]
        kept = [item for item in quick if _method(item) in REPRESENTATIVE_METHODS]
        if quick and not kept:
            kept = [quick[POSITIONS[family_name] % len(quick)]]
        for item in of_family:
            if item not in kept:
                item.add_marker(pytest.mark.slow)


def _parameters(item: pytest.Item) -> dict[str, object]:
    return item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}


def _method(item: pytest.Item) -> str:
    row = _parameters(item).get("row")
    return row.text if isinstance(row, Row) else ""
