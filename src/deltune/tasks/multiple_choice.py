"""Multiple choice by a head: which of several answers a question has."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import Any

import torch
from torch.nn import functional

from ..errors import DeltuneError
from .base import Columns, InferenceContext, Predictions, TaskKind, TaskOptions
from .encoding import TOKENIZER_BATCH, EncodedRows


def encode(tokenizer: Any, model: Any, columns: Columns, options: TaskOptions, training: bool) -> EncodedRows:
    """Encode each row as (choices, tokens): every choice after the question and its context.

    Raises:
        DeltuneError: Rows have different numbers of choices.
    """
    counts = sorted({len(choices) for choices in columns["choices"]})
    if len(counts) > 1:
        raise DeltuneError(f"the rows have {' or '.join(map(str, counts))} choices; a batch needs as many in every row")
    model_inputs = signature(model.forward).parameters
    rows, truncated = [], 0
    for start in range(0, len(columns["question"]), TOKENIZER_BATCH):
        stop = min(start + TOKENIZER_BATCH, len(columns["question"]))
        questions = [question_text(columns, i) for i in range(start, stop) for _ in range(counts[0])]
        choices = [choice for i in range(start, stop) for choice in columns["choices"][i]]
        tokenized = tokenizer(questions, choices, truncation=True, max_length=options.max_length)
        is_full = [len(ids) >= options.max_length for ids in tokenized["input_ids"]]
        for i in range(stop - start):
            row_slice = slice(i * counts[0], (i + 1) * counts[0])
            row = {name: values[row_slice] for name, values in tokenized.items() if name in model_inputs}
            truncated += any(is_full[row_slice])
            rows.append({**row, **({"labels": columns["answer"][start + i]} if "answer" in columns else {})})
    return EncodedRows(rows, truncated)


def question_text(columns: Columns, i: int) -> str:
    """Return the question of row i, after its context if it has one."""
    context = f"{columns['context'][i]} " if "context" in columns else ""
    return f"{context}{columns['question'][i]}"


def predict(context: InferenceContext, encoded: EncodedRows) -> Predictions:
    """Predict the index of the most probable choice; the scores are the probabilities of all choices."""
    predictions: list[Any] = [None] * len(encoded)
    scores: list[Any] = [None] * len(encoded)
    total_loss = 0.0

    def process(indices: list[int], batch: dict[str, torch.Tensor]) -> None:
        nonlocal total_loss
        labels = batch.pop("labels", None)
        logits = context.model(**batch).logits.float()
        if labels is not None:
            total_loss += functional.cross_entropy(logits, labels, reduction="sum").item()
        best, probabilities = logits.argmax(-1).tolist(), logits.softmax(-1).tolist()
        for i, choice, row_scores in zip(indices, best, probabilities, strict=True):
            predictions[i], scores[i] = choice, row_scores

    context.for_each_batch(encoded, process)
    return Predictions(predictions, scores, total_loss / len(encoded) if "labels" in encoded.rows[0] else None)


def references(columns: Columns, labels: Sequence[str]) -> list[int]:
    """Return the indices of the correct choices of all rows."""
    return list(columns["answer"])


def row_input(columns: Columns, i: int) -> Any:
    """Return the question and the choices of row i."""
    return {"question": question_text(columns, i), "choices": list(columns["choices"][i])}


CHOICE = TaskKind(
    name="choice",
    head="choice",
    default_metrics=("accuracy",),
    metric_inputs=("classes",),
    encode=encode,
    predict=predict,
    references=references,
    row_input=row_input,
)
