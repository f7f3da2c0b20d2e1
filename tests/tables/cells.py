"""Which cells of the product of laws, families and methods `make test` runs; `make test-all` runs the whole product.

A law about every family has a parameter that is a `Family`. What else it is parametrised by, mostly a method,
makes its cases. Of the product `make test` runs

- with the representative families the representative methods; they take turns with all other cases, so that every case
  runs on one of them,
- with each other family one case, of a representative method where the law has any: the first family takes the first
  case, the next one the next, so that the families together take all of them.

Every other cell is marked `slow` here; of a law with the mark `sample` only so many remain. A law whose parameter is a
family's name has chosen its few families itself, and is left alone.
"""

from __future__ import annotations

import zlib
from collections import defaultdict

import pytest

from .families import FAMILIES, REPRESENTATIVE_FAMILIES, Family
from .methods import REPRESENTATIVE_METHODS, Row

FAMILY_NUMBERS = {name: number for number, name in enumerate(FAMILIES)}
Case = tuple[str, ...]


def mark_cells(items: list[pytest.Item]) -> None:
    """Mark the cells that `make test` leaves out as slow."""
    cells: dict[tuple[str, str], list[pytest.Item]] = defaultdict(list)
    turns: dict[str, dict[Case, list[str]]] = defaultdict(dict)
    for item in items:
        family = _parameters(item).get("family")
        if isinstance(family, Family) and not item.get_closest_marker("slow"):
            cells[_law(item), family.name].append(item)
            if family.name in REPRESENTATIVE_FAMILIES:
                turns[_law(item)].setdefault(_case(item), []).append(family.name)
    chosen = {law: _turns(families) for law, families in turns.items()}
    for (law, family_name), of_family in cells.items():
        kept = [item for item in of_family if _is_representative(item)]
        if family_name in REPRESENTATIVE_FAMILIES:
            kept = [item for item in of_family if item in kept or chosen[law][_case(item)] in ("", family_name)]
        else:
            choice = kept or of_family
            kept = [choice[(zlib.crc32(law.encode()) + FAMILY_NUMBERS[family_name]) % len(choice)]]
        for item in of_family:
            if item not in kept:
                item.add_marker(pytest.mark.slow)


def _turns(families: dict[Case, list[str]]) -> dict[Case, str]:
    """The representative family that each case runs on; a law without cases runs on all of them.

    After each round of the families the next one begins, so that the values of two parameters meet in other pairs.
    """
    if list(families) == [()]:
        return {(): ""}
    return {
        case: having[(number + number // len(REPRESENTATIVE_FAMILIES)) % len(having)]
        for number, (case, having) in enumerate(families.items())
    }


def _law(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def _parameters(item: pytest.Item) -> dict[str, object]:
    return item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}


def _case(item: pytest.Item) -> Case:
    """What a law is parametrised by besides the family, the same in every process."""
    values = {name: value for name, value in _parameters(item).items() if name != "family"}
    return tuple(
        value.text if isinstance(value, Row) else getattr(value, "__name__", str(value)) for value in values.values()
    )


def _is_representative(item: pytest.Item) -> bool:
    row = _parameters(item).get("row")
    return isinstance(row, Row) and row.text in REPRESENTATIVE_METHODS
