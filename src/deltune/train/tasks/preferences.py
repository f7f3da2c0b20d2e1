"""Preferences as a task: each answer is made to tokens as a conversation, and split where the model begins to answer.

A row of pairs has the prompt with the better answer as `input_ids` and `labels`, and the worse one as `rejected_ids`; a
row of rated answers has one answer, and as `desirable` whether it is a good one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from ...errors import DeltuneError, counted, error_from_problems
from ..data.conversations import BATCH
from ..data.formats import COLUMN, as_conversations
from ..data.rows import RowCollector, in_slices
from .base import Columns, InferenceContext, Predictions, TaskKind, TaskOptions
from .chat import ChatEncoder, places
from .encoding import IGNORE_INDEX, EncodedRows, Row

NAMED_ROWS = 5
"""Places of rows that a note names."""


def encode_pairs(
    tokenizer: Any, model: Any, columns: Columns, options: TaskOptions, training: bool, advance: Any = None
) -> EncodedRows:
    """Encode pairs of answers; `labels` are of the better one."""

    def rows(answers: Sequence[Row], row: int) -> Iterator[Row]:
        prompt, rejected = split_answer(answers[1])
        if split_answer(answers[0])[0] != prompt:
            raise DeltuneError("the prompt has other tokens before one answer than before the other")
        yield {**answers[0], "rejected_ids": rejected, "text_index": row}

    return _encode(tokenizer, model, columns, options, training, rows, True, advance)


def encode_rated(
    tokenizer: Any, model: Any, columns: Columns, options: TaskOptions, training: bool, advance: Any = None
) -> EncodedRows:
    """Encode rated answers; a pair is two of them, a good one and a bad one."""

    def rows(answers: Sequence[Row], row: int) -> Iterator[Row]:
        labels = [True, False] if len(answers) == 2 else [json.loads(columns[COLUMN][row])["label"]]
        yield from (
            {**answer, "desirable": label, "text_index": row} for answer, label in zip(answers, labels, strict=True)
        )

    return _encode(tokenizer, model, columns, options, training, rows, False, advance)


def split_answer(row: Row) -> tuple[list[int], list[int]]:
    """Return the tokens of the prompt and of the answer: from the first token that is trained to the last one."""
    trained = [i for i, label in enumerate(row["labels"]) if label != IGNORE_INDEX]
    return row["input_ids"][: trained[0]], row["input_ids"][trained[0] : trained[-1] + 1]


def _encode(
    tokenizer: Any, model: Any, columns: Columns, options: TaskOptions, training: bool, rows_of: Any,
    wants_pairs: bool, advance: Any,
) -> EncodedRows:  # fmt: skip
    encoder = ChatEncoder(tokenizer, model, replace(options, loss_on="answers"))
    result, equal, left_out, count = RowCollector(), [], 0, len(columns[COLUMN])
    problems: list[str] = []
    if wants_pairs and any("chosen" not in json.loads(text) for text in columns[COLUMN]):
        raise DeltuneError("these are rated answers, and this objective compares pairs of them: --objective kto")
    for first, part in in_slices({**columns, "place": places(columns)}, BATCH):
        answers = [as_conversations(text) for text in part[COLUMN]]
        of_answers = [place for place, texts in zip(part["place"], answers, strict=True) for _ in texts]
        by_answer: dict[int, list[Row]] = {}
        for row in encoder.encode([*chain(*answers)], of_answers):
            if any(label != IGNORE_INDEX for label in row["labels"]):
                by_answer.setdefault(row["text_index"], []).append(row)
        numbers = iter(range(len(of_answers)))
        for i, (place, texts) in enumerate(zip(part["place"], answers, strict=True), first):
            of_row = [by_answer.get(next(numbers), []) for _ in texts]
            if any(len(rows) > 1 for rows in of_row):
                problems.append(
                    f"{place}: an answer of several turns, of which the chat template rewrites earlier ones"
                )
            elif not all(of_row):
                left_out += 1
            else:
                both = [rows[0] for rows in of_row]
                if len(both) == 2 and both[0]["input_ids"] == both[1]["input_ids"]:
                    equal.append(place)
                try:
                    for row in rows_of(both, i):
                        result.append(row)
                except DeltuneError as error:
                    problems.append(f"{place}: {error}")
        if advance is not None:
            advance(len(answers))
    encoded = encoder.encoded(result.rows(), count)
    if problems:
        raise error_from_problems("these preferences cannot be made to tokens", problems)
    if equal and len(equal) == count and training:
        raise DeltuneError("in every row both answers are the same, which teaches nothing")
    if not len(encoded) and encoded.truncated:
        raise DeltuneError(f"of every row an answer is cut away. Give a greater length: --max-length {encoded.longest}")
    notes = list(encoded.notes)
    if equal:
        listed = ", ".join(equal[:NAMED_ROWS]) + (", …" if len(equal) > NAMED_ROWS else "")
        notes.append(f"{counted(len(equal), 'row')} whose two answers are the same: {listed}")
    if left_out:
        notes.append(f"{counted(left_out, 'row')} left out, of which an answer is cut away (--max-length)")
    return replace(encoded, truncated=min(encoded.truncated, len(encoded)), untrained=0, notes=tuple(notes))


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
