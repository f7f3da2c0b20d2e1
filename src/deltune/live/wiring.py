"""Which taps a model's deltas need, and where."""

from __future__ import annotations

from collections.abc import Iterable

from ..anatomy.values import Anatomy
from .edits import Delta
from .positions import PositionTap
from .prompting import TokenTap
from .taps import AttentionPort, StatesTap, Tap, WeightTap

AnyTap = Tap | AttentionPort | PositionTap | StatesTap | TokenTap | WeightTap

TAPS: dict[str, type[AnyTap]] = {"attention": AttentionPort, "states": StatesTap, "tokens": TokenTap}
"""What serves the sides of a place that no plain hook reaches."""


def taps_of(anatomy: Anatomy, deltas: Iterable[Delta]) -> dict[tuple[str, str], type[AnyTap]]:
    """The kind of tap at every module that some delta reads or writes; keys: path, and what it serves there."""
    wanted: dict[tuple[str, str], type[AnyTap]] = {}
    for delta in deltas:
        for edit in delta.all_edits():
            side = edit.place.target.side
            special = side if side in TAPS else "hook"
            wanted[(edit.place.target.path, special)] = TAPS.get(side, Tap)
            if edit.place.source is not None:
                wanted[(edit.place.source.path, "hook")] = Tap
            if edit.place.moves:
                wanted[(anatomy.stack(edit.place.moves).entry, "positions")] = PositionTap
        for tensor_name, _ in delta.masked():
            wanted[(tensor_name, "weight")] = WeightTap
    return wanted
