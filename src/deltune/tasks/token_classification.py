"""Tagging: one label for every token of a text that is cut into tokens already; the first sub-word carries it."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import Any

import torch
from torch.nn import functional

from ..errors import DeltuneError
from .base import Columns, InferenceContext, Limits, Predictions, TaskKind
from .encoding import CHUNK, IGNORED, EncodedRows

OUTSIDE = "O"


def encode(tokenizer: Any, model: Any, columns: Columns, limits: Limits, training: bool) -> EncodedRows:
    """Rows with `labels` at the first sub-word of every token, IGNORED elsewhere. Tokens beyond max_length are lost."""
    if not tokenizer.is_fast:
        raise DeltuneError(
            f"{type(tokenizer).__name__} does not tell which sub-words a token became; tagging needs that"
        )
    taken = signature(model.forward).parameters
    rows, truncated = [], 0
    for start in range(0, len(columns["tokens"]), CHUNK):
        texts = [list(tokens) for tokens in columns["tokens"][start : start + CHUNK]]
        found = _tokenized(tokenizer, texts, limits.max_length)
        for i, tokens in enumerate(texts):
            row = {name: values[i] for name, values in found.items() if name in taken}
            words, labels, last = found.word_ids(i), [], None
            tags = columns["tags"][start + i] if "tags" in columns else [0] * len(tokens)
            for word in words:
                labels.append(IGNORED if word is None or word == last else tags[word])
                last = word if word is not None else last
            truncated += last is not None and last < len(tokens) - 1
            rows.append({**row, "labels": labels, "tokens": len(tokens)})
    return EncodedRows(rows, truncated)


def _tokenized(tokenizer: Any, texts: list[list[str]], max_length: int) -> Any:
    try:
        return tokenizer(texts, is_split_into_words=True, truncation=True, max_length=max_length)
    except AssertionError as error:  # RoBERTa's and GPT-2's want to know that a token begins with a blank
        raise DeltuneError(f"{error}; give a tokenizer made with add_prefix_space=True") from error


def answers(use: InferenceContext, encoded: EncodedRows) -> Predictions:
    """The likeliest tag of every token; those cut off are outside of any entity."""
    predictions: list[Any] = [None] * len(encoded)
    scores: list[Any] = [None] * len(encoded)
    total, count = 0.0, 0
    rest = OUTSIDE if OUTSIDE in use.labels else use.labels[0]

    def take(rows: list[int], batch: dict[str, torch.Tensor]) -> None:
        nonlocal total, count
        labels = batch.pop("labels")
        found = use.model(**batch).logits.float()
        total += functional.cross_entropy(found.flatten(0, 1), labels.flatten(), reduction="sum").item()
        count += int((labels != IGNORED).sum())
        best = found.softmax(-1).max(-1)
        for at, row in enumerate(rows):
            here = labels[at] != IGNORED
            said = [use.labels[i] for i in best.indices[at][here].tolist()]
            predictions[row] = said + [rest] * (encoded[row]["tokens"] - len(said))
            scores[row] = best.values[at][here].tolist()

    use.over(encoded, take)
    return Predictions(predictions, scores, total / max(count, 1))


def references(columns: Columns, labels: Sequence[str]) -> list[list[str]]:
    return [[labels[i] for i in tags] for tags in columns["tags"]]


def shown(columns: Columns, i: int) -> Any:
    return list(columns["tokens"][i])


TAGGING = TaskKind("tagging", "tagging", ("entity_f1",), ("tags",), encode, answers, references, shown)
