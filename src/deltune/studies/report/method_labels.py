"""The method expression and the number of trained parameters behind each label of a study."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..claims.selectors import SEED
from ..jobs.job import Outcome
from .tables import format_percent

NOT_OF_METHODS = ("model", "task", "target", "family", "kind", "N", "try", SEED)
"""Axes whose labels say nothing of what is trained."""


@dataclass(frozen=True)
class MethodLabel:
    """A label and what it is.

    Its number of parameters, for each model, leaves the head aside.
    """

    label: str
    expression: str
    parameters: str


def method_labels(outcomes: Sequence[Outcome], names: Mapping[str, str]) -> list[MethodLabel]:
    """Return what each label of the methods of a study is, in the order of the study.

    A label has several entries where its expression differs, by model, by task or by what a search chose.
    """
    entries: dict[tuple[str, str], dict[str, dict[str, None]]] = {}
    for outcome in outcomes:
        spec = outcome.spec
        expression = spec["methods"].get(outcome.cell.get("method")) if "methods" in spec else spec.get("method")
        if outcome.error is not None or not expression:
            continue
        labels = [names.get(str(v), str(v)) for axis, v in outcome.cell.items() if axis not in NOT_OF_METHODS]
        key = ", ".join(labels), re.sub(r"\bseed=\d+", "seed=…", str(expression))
        model = str(outcome.cell.get("model", ""))
        entries.setdefault(key, {}).setdefault(names.get(model, model), {})[_size(outcome)] = None
    return [
        MethodLabel(label, expression, "; ".join(_on_model(*on_model) for on_model in models.items()))
        for (label, expression), models in entries.items()
        if label
    ]


def _size(outcome: Outcome) -> str:
    if "method" in outcome.count:
        return f"{outcome.count['method']:,}"
    return f"{format_percent(float(outcome.count['percent']))} %" if "percent" in outcome.count else ""


def _on_model(model: str, sizes: Mapping[str, None]) -> str:
    text = " or ".join(size for size in sizes if size)
    return f"{model}: {text}" if model and text else text
