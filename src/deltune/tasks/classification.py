"""Classification by a head: one label for a text or a pair of texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from .base import Columns, InferenceContext, Predictions, TaskKind, TaskOptions
from .encoding import EncodedRows, encode_texts


def predict_logits(context: InferenceContext, encoded: EncodedRows) -> torch.Tensor:
    """Return the logits of all rows.

    Returns:
        Of shape (rows, labels), in float32, on the CPU. Where rows use heads of different widths, logits beyond the
        width of a row's own head are -inf.
    """
    parts: list[torch.Tensor] = []
    order: list[int] = []

    def process(indices: list[int], batch: dict[str, torch.Tensor]) -> None:
        batch.pop("labels", None)
        parts.append(context.model(**batch).logits.float().cpu())
        order.extend(indices)

    context.for_each_batch(encoded, process)
    width = max(part.shape[-1] for part in parts)
    logits = torch.cat([functional.pad(p, (0, width - p.shape[-1]), value=-torch.inf) for p in parts])
    in_row_order = torch.empty_like(logits)
    in_row_order[torch.tensor(order)] = logits
    return in_row_order


def predict(context: InferenceContext, encoded: EncodedRows) -> Predictions:
    """Predict the id of the most probable label; the scores are the probabilities of all labels."""
    logits = predict_logits(context, encoded)
    loss = None
    if "labels" in encoded.rows[0]:
        loss = functional.cross_entropy(logits, torch.tensor([int(row["labels"]) for row in encoded.rows])).item()
    scores = [dict(zip(context.labels, row, strict=False)) for row in logits.softmax(-1).tolist()]
    return Predictions(logits.argmax(-1).tolist(), scores, loss)


def encode(tokenizer: Any, model: Any, columns: Columns, options: TaskOptions, training: bool) -> EncodedRows:
    """Encode each text, or pair of texts, with the id of its label as `labels`."""
    return encode_texts(tokenizer, model, columns, options.max_length)


def references(columns: Columns, labels: Sequence[str]) -> list[int]:
    """Return the label ids of all rows."""
    return list(columns["label"])


def row_input(columns: Columns, i: int) -> Any:
    """Return the text of row i, or its two texts as a list."""
    return columns["text"][i] if "pair" not in columns else [columns["text"][i], columns["pair"][i]]


CLASSIFICATION = TaskKind(
    name="classification",
    head="classification",
    default_metrics=("accuracy", "f1", "f1_macro", "matthews"),
    metric_inputs=("classes",),
    encode=encode,
    predict=predict,
    references=references,
    row_input=row_input,
    predicts_label_ids=True,
)
