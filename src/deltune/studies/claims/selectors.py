"""Selections of a study's cells by their labels, and cells and selections in a reader's words."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import word_list


@dataclass(frozen=True)
class SymbolicLabel:
    """A label that stands for labels of the study at hand: all of them, or one by its size."""

    name: str

    def __repr__(self) -> str:
        return self.name


EVERY = SymbolicLabel("every")
SMALLEST, SECOND_SMALLEST, LARGEST = (SymbolicLabel(name) for name in ("smallest", "second smallest", "largest"))

CellSelector = Mapping[str, Any]
"""Axis -> a label, a tuple of labels (their mean is taken), or a symbolic label; of EVERY label the mean is taken."""

DATA_AXES = ("task", "target")
"""Axes that determine the test split of a score."""

SEED = "seed"
FLOOR = "floor"
"""The axis of a study's floors and of full tuning beside them. Its cells are not among those that a study compares."""
EDGE = "rate_at_edge"
"""Key of an outcome's extra: whether its learning rate is the lowest or the highest of those that were tried."""
Key = tuple[tuple[str, Hashable], ...]
"""Labels on some axes, in the order of the axes."""

Names = Mapping[str, str]
"""Label -> how it is shown."""

PHRASES = {
    "structure": "{}", "method": "{}", "insertion": "{}", "group": "as many parameters as {}", "pair": "{}",
    "layers": "{}", "term": "{}", "module": "{}", "site": "at {}", "budget": "with {} % of the parameters",
    "task": "on {}", "target": "tested on {}", "model": "on {}", "family": "{}", "kind": "in {}", "seed": "seed {}",
    "N": "N = {}", "floor": "{}",
}  # fmt: skip
"""Axis -> how one of its labels is put into words, in the order of a description."""

SYMBOLIC_PHRASES = {"model": "on the {} model", "budget": "with the {} budget"}


def describe_cell(cell: Mapping[str, Any], names: Names | None = None) -> str:
    """Describe a cell or a selection of cells: "LoRA, on CB, seed 0"."""
    axes = sorted(cell, key=lambda axis: list(PHRASES).index(axis) if axis in PHRASES else len(PHRASES))
    labels = [cell[axis] for axis in axes]
    phrases = [
        _phrase(axis, label, names or {})
        for i, (axis, label) in enumerate(zip(axes, labels, strict=True))
        if label is not EVERY and (label not in labels[:i] or not isinstance(label, str))
    ]
    return ", ".join(phrases) or "all"


def describe_difference(one: CellSelector, other: CellSelector, names: Names | None = None, operator: str = "−") -> str:
    """Describe a difference or ratio, with what both sides share said once: "LoRA − prefix, at attention"."""
    shared = {axis: label for axis, label in one.items() if label is not EVERY and other.get(axis) == label}
    sides = [
        describe_cell({axis: label for axis, label in side.items() if axis not in shared}, names)
        for side in (one, other)
    ]
    return f" {operator} ".join(sides) + (f", {describe_cell(shared, names)}" if shared else "")


def _phrase(axis: str, label: Any, names: Names) -> str:
    if isinstance(label, SymbolicLabel):
        return SYMBOLIC_PHRASES.get(axis, f"the {{}} {axis}").format(label.name)
    labels = [names.get(str(one), str(one)) for one in (label if isinstance(label, tuple) else (label,))]
    text = word_list(labels)
    return PHRASES[axis].format(text) if axis in PHRASES else f"{axis} {text}"
