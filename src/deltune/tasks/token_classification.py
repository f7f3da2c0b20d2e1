"""Tagging by a head: one label for each token of a text that is already split; its first sub-word carries the label."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import Any

import torch
from torch.nn import functional

from ..errors import DeltuneError
from .base import Columns, InferenceContext, Predictions, TaskKind, TaskOptions
from .encoding import IGNORE_INDEX, TOKENIZER_BATCH, EncodedRows

OUTSIDE_TAG = "O"
"""The tag of a token that is not part of an entity."""


def encode(tokenizer: Any, model: Any, columns: Columns, options: TaskOptions, training: bool) -> EncodedRows:
    """Encode each text with `labels` at the first sub-word of every token and IGNORE_INDEX elsewhere.

    Tokens beyond max_length are cut off.

    Raises:
        DeltuneError: The tokenizer does not map sub-words to tokens, or wants another setting for split texts.
    """
    if not tokenizer.is_fast:
        raise DeltuneError(
            f"{type(tokenizer).__name__} does not tell which sub-words a token became; tagging needs that"
        )
    model_inputs = signature(model.forward).parameters
    rows, truncated = [], 0
    for start in range(0, len(columns["tokens"]), TOKENIZER_BATCH):
        texts = [list(tokens) for tokens in columns["tokens"][start : start + TOKENIZER_BATCH]]
        tokenized = _tokenize(tokenizer, texts, options.max_length)
        for i, tokens in enumerate(texts):
            row = {name: values[i] for name, values in tokenized.items() if name in model_inputs}
            labels, last_word = [], None
            tags = columns["tags"][start + i] if "tags" in columns else [0] * len(tokens)
            for word in tokenized.word_ids(i):
                labels.append(IGNORE_INDEX if word is None or word == last_word else tags[word])
                last_word = word if word is not None else last_word
            truncated += last_word is not None and last_word < len(tokens) - 1
            rows.append({**row, "labels": labels, "num_tokens": len(tokens)})
    return EncodedRows(rows, truncated)


def _tokenize(tokenizer: Any, texts: list[list[str]], max_length: int) -> Any:
    try:
        return tokenizer(texts, is_split_into_words=True, truncation=True, max_length=max_length)
    except AssertionError as error:  # tokenizers of RoBERTa and GPT-2 must know that a token begins with a blank
        raise DeltuneError(f"{error}; give a tokenizer made with add_prefix_space=True") from error


def predict(context: InferenceContext, encoded: EncodedRows) -> Predictions:
    """Predict the most probable tag of every token, and no entity for tokens that were cut off.

    The scores are the probabilities of the predicted tags.
    """
    predictions: list[Any] = [None] * len(encoded)
    scores: list[Any] = [None] * len(encoded)
    total_loss, count = 0.0, 0
    cut_off_tag = OUTSIDE_TAG if OUTSIDE_TAG in context.labels else context.labels[0]

    def process(indices: list[int], batch: dict[str, torch.Tensor]) -> None:
        nonlocal total_loss, count
        labels = batch.pop("labels")
        logits = context.model(**batch).logits.float()
        total_loss += functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").item()
        count += int((labels != IGNORE_INDEX).sum())
        best = logits.softmax(-1).max(-1)
        for row, i in enumerate(indices):
            mask = labels[row] != IGNORE_INDEX
            tags = [context.labels[label] for label in best.indices[row][mask].tolist()]
            predictions[i] = tags + [cut_off_tag] * (encoded[i]["num_tokens"] - len(tags))
            scores[i] = best.values[row][mask].tolist()

    context.for_each_batch(encoded, process)
    return Predictions(predictions, scores, total_loss / max(count, 1))


def references(columns: Columns, labels: Sequence[str]) -> list[list[str]]:
    """Return the tags of all rows, by name."""
    return [[labels[i] for i in tags] for tags in columns["tags"]]


def row_input(columns: Columns, i: int) -> Any:
    """Return the tokens of row i."""
    return list(columns["tokens"][i])


TAGGING = TaskKind(
    name="tagging",
    head="tagging",
    default_metrics=("entity_f1",),
    metric_inputs=("tags",),
    encode=encode,
    predict=predict,
    references=references,
    row_input=row_input,
)
