"""Which cases of a law run: a covering design in place of the product of its parameters.

A test is a law when it has the mark `sample(N)`, or a `Family` among its parameters. Of its cases are collected

- for `make test` N, or without the mark as many as hold every value of every parameter,
- for `make test-all` also as many as hold every pair of values of two parameters. Of a parameter with many values,
  such as families and methods, one value is paired with each trait of the others: `lora(rank=2)` with an encoder,
  a decoder and both, BART with a method of each group.

No other case is made. Cases are drawn greedily, equal ones by the checksums of their names, so that one more row of a
table changes few of them. A case that is marked `slow` is never drawn for `make test`.
"""

from __future__ import annotations

import heapq
import itertools
import zlib
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import pytest

from .families import FAMILIES, Family
from .methods import METHODS

FEW = 4
"""A parameter with more values than these is paired by its values' traits."""

Part = frozenset[tuple[str, Hashable]]


def covering_cases(items: Sequence[pytest.Item], everyday: bool) -> list[pytest.Item]:
    """Choose the cases of a test that are run, in their order; those that `make test` leaves out become slow."""
    parameters = [_parameters(item) for item in items]
    mark = items[0].get_closest_marker("sample")
    if not mark and not any(isinstance(value, Family) for value in parameters[0].values()):
        return list(items)
    number = mark.args[0] if mark and mark.args else None
    quick = [i for i, item in enumerate(items) if not item.get_closest_marker("slow")]
    parts = _parts(parameters)
    names = [zlib.crc32(item.name.encode()) for item in items]
    chosen = _drawn(quick, parts, names, number)
    if not everyday:
        further = set(_drawn(range(len(items)), parts, names, first=chosen)) - set(chosen)
        for index in further:
            items[index].add_marker(pytest.mark.slow)
        chosen = [*chosen, *further]
    return [items[index] for index in sorted(chosen)]


def _drawn(
    among: Iterable[int],
    parts: Sequence[tuple[set[Part], set[Part]]],
    names: Sequence[int],
    number: int | None = None,
    first: Iterable[int] = (),
) -> list[int]:
    """Draw the cases that hold most values, then most pairs, which none before holds.

    It ends after `number` of them, with all values, or where `first` is given with all pairs.
    """
    chosen = list(first)
    held: set[Part] = set().union(*(part for index in chosen for part in parts[index]))

    def gain(index: int) -> tuple[int, int]:
        return -len(parts[index][0] - held), -len(parts[index][1] - held)

    heap = [(gain(index), names[index], index) for index in among if index not in set(chosen)]
    heapq.heapify(heap)
    while heap and (number is None or len(chosen) < number):
        _, name, index = heapq.heappop(heap)
        now = gain(index)
        if heap and (now, name, index) > heap[0]:  # what others hold by now
            heapq.heappush(heap, (now, name, index))
        elif now == (0, 0) or (number is None and not first and now[0] == 0):
            break
        else:
            chosen.append(index)
            held.update(*parts[index])
    return chosen


def _parts(cases: Sequence[dict[str, Any]]) -> list[tuple[set[Part], set[Part]]]:
    """The values of each case, and the pairs of values or traits that it holds."""
    names: dict[int, str] = {}
    for case in cases:
        for value in case.values():
            if id(value) not in names:
                names[id(value)] = _name(value)
    few = {axis for axis in cases[0] if len({names[id(case[axis])] for case in cases}) <= FEW}
    parts = []
    for case in cases:
        pairs: set[Part] = set()
        for (one, a), (two, b) in itertools.combinations(case.items(), 2):
            pairs |= {frozenset({(one, names[id(a)]), (two, t)}) for t in _traits(b, two in few, names[id(b)])}
            pairs |= {frozenset({(one, t), (two, names[id(b)])}) for t in _traits(a, one in few, names[id(a)])}
        parts.append(({frozenset({(axis, names[id(value)])}) for axis, value in case.items()}, pairs))
    return parts


def _traits(value: Any, is_of_few: bool, name: str) -> tuple[Hashable, ...]:
    if is_of_few:
        return (name,)
    if isinstance(value, str):
        value = FAMILIES.get(value) or METHODS.get(value)
    return tuple(getattr(value, "traits", ()))


def _name(value: Any) -> str:
    return getattr(value, "text", None) or getattr(value, "__name__", None) or str(value)


def _parameters(item: pytest.Item) -> dict[str, Any]:
    return item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
