"""Preferences as a task: each answer is made to tokens as a conversation, and split where the model begins to answer.

A row of pairs has the prompt with the better answer as `input_ids` and `labels`, and the worse one as `rejected_ids`; a
row of rated answers has one answer, and as `desirable` whether it is a good one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ...errors import DeltuneError, counted
from ..data.formats import COLUMN, as_conversations
from ..data.readers import file_error
from .base import Columns, InferenceContext, Predictions, TaskKind, TaskOptions
from .chat import encode_chat
from .encoding import IGNORE_INDEX, EncodedRows, Row

NAMED_ROWS = 5
"""Places of rows that a note names."""


def encode_pairs(tokenizer: Any, model: Any, columns: Columns, options: TaskOptions, training: bool) -> EncodedRows:
    """Encode pairs of answers; `labels` are of the better one."""

    def rows(answers: Sequence[Row], row: int) -> Iterator[Row]:
        prompt, rejected = split_answer(answers[1])
        if split_answer(answers[0])[0] != prompt:
            raise DeltuneError("the prompt has other tokens before one answer than before the other")
        yield {**answers[0], "rejected_ids": rejected, "text_index": row}

    return _encode(tokenizer, model, columns, options, training, rows, wants_pairs=True)


def encode_rated(tokenizer: Any, model: Any, columns: Columns, options: TaskOptions, training: bool) -> EncodedRows:
    """Encode rated answers; a pair is two of them, a good one and a bad one."""

    def rows(answers: Sequence[Row], row: int) -> Iterator[Row]:
        labels = [True, False] if len(answers) == 2 else [json.loads(columns[COLUMN][row])["label"]]
        yield from (
            {**answer, "desirable": label, "text_index": row} for answer, label in zip(answers, labels, strict=True)
        )

    return _encode(tokenizer, model, columns, options, training, rows, wants_pairs=False)


def split_answer(row: Row) -> tuple[list[int], list[int]]:
    """Return the tokens of the prompt and of the answer: from the first token that is trained to the last one."""
    trained = [i for i, label in enumerate(row["labels"]) if label != IGNORE_INDEX]
    return row["input_ids"][: trained[0]], row["input_ids"][trained[0] : trained[-1] + 1]


def _encode(
    tokenizer: Any, model: Any, columns: Columns, options: TaskOptions, training: bool, rows_of: Any, wants_pairs: bool
) -> EncodedRows:
    texts = list(columns[COLUMN])
    places = list(columns.get("place") or [f"row {i + 1}" for i in range(len(texts))])
    if wants_pairs and any("chosen" not in json.loads(text) for text in texts):
        raise DeltuneError("these are rated answers, and this objective compares pairs of them: --objective kto")
    answers = [as_conversations(text) for text in texts]
    owner = [i for i, row in enumerate(answers) for _ in row]
    each = {COLUMN: [one for row in answers for one in row], "place": [places[i] for i in owner]}
    encoded = encode_chat(tokenizer, model, each, replace(options, loss_on="answers"), training)
    by_answer: dict[int, list[Row]] = {}
    for row in encoded.rows:
        if any(label != IGNORE_INDEX for label in row["labels"]):
            by_answer.setdefault(row["text_index"], []).append(row)
    result: list[Row] = []
    problems, equal, left_out, first = [], [], 0, 0
    for i, texts_of_row in enumerate(answers):
        parts = [by_answer.get(first + k, []) for k in range(len(texts_of_row))]
        first += len(texts_of_row)
        if any(len(part) > 1 for part in parts):
            problems.append(
                f"{places[i]}: an answer of several turns, of which the chat template rewrites earlier ones"
            )
        elif not all(parts):
            left_out += 1
        else:
            both = [part[0] for part in parts]
            if len(both) == 2 and both[0]["input_ids"] == both[1]["input_ids"]:
                equal.append(places[i])
            try:
                result += rows_of(both, i)
            except DeltuneError as error:
                problems.append(f"{places[i]}: {error}")
    if problems:
        raise file_error("these preferences cannot be made to tokens", problems)
    if equal and len(equal) == len(texts) and training:
        raise DeltuneError("in every row both answers are the same, which teaches nothing")
    if not result and encoded.truncated:
        raise DeltuneError(f"of every row an answer is cut away. Give a greater length: --max-length {encoded.longest}")
    notes = list(encoded.notes)
    if equal:
        listed = ", ".join(equal[:NAMED_ROWS]) + (", …" if len(equal) > NAMED_ROWS else "")
        notes.append(f"{counted(len(equal), 'row')} whose two answers are the same: {listed}")
    if left_out:
        notes.append(f"{counted(left_out, 'row')} left out, of which an answer is cut away (--max-length)")
    truncated = min(encoded.truncated, len(result))
    return replace(encoded, rows=result, truncated=truncated, num_texts=len(texts), untrained=0, notes=tuple(notes))


def _no_prediction(context: InferenceContext, encoded: EncodedRows) -> Predictions:
    raise DeltuneError("a preference is measured by the objective that learns from it, in its own run")


PAIRS = TaskKind(
    name="preference",
    head="causal-lm",
    default_metrics=(),
    metric_inputs=(),
    encode=encode_pairs,
    predict=_no_prediction,
    references=lambda columns, labels: [],
    row_input=lambda columns, i: columns[COLUMN][i],
)
RATED = replace(PAIRS, encode=encode_rated)
REWARDS = replace(PAIRS, head="classification")
