"""Classification: one label for a text or a pair of texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from .base import Columns, InferenceContext, Limits, Predictions, TaskKind
from .encoding import EncodedRows, encode


def logits(use: InferenceContext, encoded: EncodedRows) -> torch.Tensor:
    """(rows, labels) in float32, in the order of the rows; labels beyond a row's own are -inf."""
    parts: list[torch.Tensor] = []
    order: list[int] = []

    def take(rows: list[int], batch: dict[str, torch.Tensor]) -> None:
        batch.pop("labels", None)
        parts.append(use.model(**batch).logits.float().cpu())
        order.extend(rows)

    use.over(encoded, take)
    width = max(part.shape[-1] for part in parts)
    found = torch.cat([functional.pad(p, (0, width - p.shape[-1]), value=-torch.inf) for p in parts])
    result = torch.empty_like(found)
    result[torch.tensor(order)] = found
    return result


def answers(use: InferenceContext, encoded: EncodedRows) -> Predictions:
    found = logits(use, encoded)
    loss = None
    if "labels" in encoded.rows[0]:
        loss = functional.cross_entropy(found, torch.tensor([int(row["labels"]) for row in encoded.rows])).item()
    scores = [dict(zip(use.labels, row, strict=False)) for row in found.softmax(-1).tolist()]
    return Predictions(found.argmax(-1).tolist(), scores, loss)


def _encode(tokenizer: Any, model: Any, columns: Columns, limits: Limits, training: bool) -> EncodedRows:
    return encode(tokenizer, model, columns, limits.max_length)


def references(columns: Columns, labels: Sequence[str]) -> list[int]:
    return list(columns["label"])


def shown(columns: Columns, i: int) -> Any:
    return columns["text"][i] if "pair" not in columns else [columns["text"][i], columns["pair"][i]]


CLASSIFICATION = TaskKind(
    "classification",
    "classification",
    ("accuracy", "f1", "f1_macro", "matthews"),
    ("classes",),
    _encode,
    answers,
    references,
    shown,
    labelled=True,
)
