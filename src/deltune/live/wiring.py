"""Which taps a model's deltas need, and where."""

from __future__ import annotations

from collections.abc import Iterable

from ..anatomy.values import Anatomy
from .edits import Delta
from .positions import PositionTap
from .prompting import TokenTap
from .taps import AttentionPort, InputTap, OutputTap, StatesTap, WeightTap

AnyTap = InputTap | OutputTap | AttentionPort | PositionTap | StatesTap | TokenTap | WeightTap

TAPS: dict[str, type[AnyTap]] = {
    "input": InputTap, "output": OutputTap, "attention": AttentionPort, "states": StatesTap, "tokens": TokenTap,
}  # fmt: skip
"""What serves a side of a place."""


def taps_of(anatomy: Anatomy, deltas: Iterable[Delta]) -> dict[tuple[str, str], type[AnyTap]]:
    """The kind of tap at every module that some delta reads or writes; keys: path, and what it serves there."""
    wanted: dict[tuple[str, str], type[AnyTap]] = {}
    for delta in deltas:
        for edit in delta.all_edits():
            target = edit.place.target
            wanted[(target.path, target.side)] = TAPS[target.side]
            if edit.elsewhere is not None:
                wanted[(edit.elsewhere, "input")] = InputTap
            if edit.place.moves:
                wanted[(anatomy.stack(edit.place.moves).entry, "positions")] = PositionTap
        for tensor_name, _ in delta.masked():
            wanted[(tensor_name, "weight")] = WeightTap
    return wanted
