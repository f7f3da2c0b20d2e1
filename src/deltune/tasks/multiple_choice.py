"""Multiple choice: which of several answers a question has."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import Any

import torch
from torch.nn import functional

from ..errors import DeltuneError
from .base import Columns, InferenceContext, Limits, Predictions, TaskKind
from .encoding import CHUNK, EncodedRows


def encode(tokenizer: Any, model: Any, columns: Columns, limits: Limits, training: bool) -> EncodedRows:
    """Rows of (choices, tokens): each choice after the question (and its context). Error: rows of unequal numbers."""
    counts = sorted({len(choices) for choices in columns["choices"]})
    if len(counts) > 1:
        raise DeltuneError(f"the rows have {' or '.join(map(str, counts))} choices; a batch needs as many in every row")
    taken = signature(model.forward).parameters
    rows, truncated = [], 0
    for start in range(0, len(columns["question"]), CHUNK):
        stop = min(start + CHUNK, len(columns["question"]))
        firsts = [asked(columns, i) for i in range(start, stop) for _ in range(counts[0])]
        seconds = [choice for i in range(start, stop) for choice in columns["choices"][i]]
        found = tokenizer(firsts, seconds, truncation=True, max_length=limits.max_length)
        whole = [len(ids) >= limits.max_length for ids in found["input_ids"]]
        for i in range(stop - start):
            part = slice(i * counts[0], (i + 1) * counts[0])
            row = {name: values[part] for name, values in found.items() if name in taken}
            truncated += any(whole[part])
            rows.append({**row, **({"labels": columns["answer"][start + i]} if "answer" in columns else {})})
    return EncodedRows(rows, truncated)


def asked(columns: Columns, i: int) -> str:
    context = f"{columns['context'][i]} " if "context" in columns else ""
    return f"{context}{columns['question'][i]}"


def answers(use: InferenceContext, encoded: EncodedRows) -> Predictions:
    predictions: list[Any] = [None] * len(encoded)
    scores: list[Any] = [None] * len(encoded)
    total = 0.0

    def take(rows: list[int], batch: dict[str, torch.Tensor]) -> None:
        nonlocal total
        labels = batch.pop("labels", None)
        found = use.model(**batch).logits.float()
        if labels is not None:
            total += functional.cross_entropy(found, labels, reduction="sum").item()
        for row, best, share in zip(rows, found.argmax(-1).tolist(), found.softmax(-1).tolist(), strict=True):
            predictions[row], scores[row] = best, share

    use.over(encoded, take)
    return Predictions(predictions, scores, total / len(encoded) if "labels" in encoded.rows[0] else None)


def references(columns: Columns, labels: Sequence[str]) -> list[int]:
    return list(columns["answer"])


def shown(columns: Columns, i: int) -> Any:
    return {"question": asked(columns, i), "choices": list(columns["choices"][i])}


CHOICE = TaskKind("choice", "choice", ("accuracy",), ("classes",), encode, answers, references, shown)
