"""The cases that are drawn of a law hold every value, and then every pair, of its parameters."""

from __future__ import annotations

import itertools

from .covering import _drawn, _parts
from .families import FAMILIES
from .methods import METHODS


def test_values_and_then_pairs_are_held() -> None:
    axes = {"way": "abc", "number": range(4), "family": FAMILIES.values(), "text": list(METHODS)[::5]}
    cases = [dict(zip(axes, case, strict=True)) for case in itertools.product(*axes.values())]
    parts, names = _parts(cases), list(range(len(cases)))[::-1]
    few = _drawn(names, parts, names)
    assert len(few) == max(len(FAMILIES), len(axes["text"])), "no more than the longest parameter has values"
    for axis, values in axes.items():
        assert {str(cases[i][axis]) for i in few} == set(map(str, values))
    drawn = _drawn(names, parts, names, first=few)
    assert drawn[: len(few)] == few and len(drawn) < len(cases) / 10
    for one, two in itertools.combinations(("way", "number"), 2):
        pairs = {(cases[i][one], cases[i][two]) for i in drawn}
        assert pairs == set(itertools.product(axes[one], axes[two]))
    kinds = {(cases[i]["text"], cases[i]["family"].kind, cases[i]["family"].positions) for i in drawn}
    for text in axes["text"]:
        assert {kind for of, kind, _ in kinds if of == text} == {"encoder", "decoder", "both"}
        assert len({positions for of, _, positions in kinds if of == text}) == 4
    assert drawn == _drawn(names, parts, names, first=_drawn(names, parts, names))
