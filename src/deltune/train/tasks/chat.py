"""Conversations, answered prompts and texts as a task: a decoder learns the answers, or all tokens."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ...errors import DeltuneError, counted, error_from_problems
from ...methods.masks import RowMask
from ...runtime.handle import Tuned
from ...runtime.serialization import word_embeddings
from ...templates import NAMED_TEMPLATES, special_tokens, target_end, with_chat_template
from ..data.conversations import BATCH, Conversations
from ..data.formats import COLUMN, readable
from ..data.rows import RowCollector, in_slices
from .base import Columns, TaskKind, TaskOptions
from .encoding import IGNORE_INDEX, EncodedRows, Row
from .generation import predict_log_likelihoods


def encode_chat(
    tokenizer: Any, model: Any, columns: Columns, options: TaskOptions, training: bool, advance: Any = None
) -> EncodedRows:
    """Encode conversations; those longer than `max_length` tokens lose their end.

    A conversation is one row, or a row for each answer; a row's `text_index` is the conversation that it is of.
    """
    encoder, rows = ChatEncoder(tokenizer, model, options), RowCollector()
    for first, part in in_slices({**columns, "place": places(columns)}, BATCH):
        for row in encoder.encode(part[COLUMN], part["place"]):
            rows.append({**row, "text_index": first + row["text_index"]})
        if advance is not None:
            advance(len(part["place"]))
    return encoder.encoded(rows.rows(), len(columns[COLUMN]))


def places(columns: Columns) -> Sequence[str]:
    """Return what messages call the rows."""
    return columns["place"] if "place" in columns else [f"row {i + 1}" for i in range(len(columns[COLUMN]))]


class ChatEncoder:
    """Encodes conversations, some at a time; counts what is cut, and keeps what is wrong with any of them."""

    def __init__(self, tokenizer: Any, model: Any, options: TaskOptions) -> None:
        self.maker = Conversations(tokenizer, target_end(tokenizer, model), options.loss_on)
        self.max_length = options.max_length
        self.problems: list[str] = []
        self.counts = dict.fromkeys(("truncated", "truncated_tokens", "trained_tokens", "longest"), 0)
        self.trained_texts = 0

    def encode(self, texts: Sequence[str], places: Sequence[str]) -> Iterator[Row]:
        """Yield the rows of conversations in the one form; `text_index` is the number of the conversation."""
        check_template(self.maker.tokenizer, texts)
        counts, last = self.counts, -1
        for row in self.maker.tokenize(texts, places, self.problems):
            ids = row.ids[: self.max_length]
            counts["longest"] = max(counts["longest"], len(row.ids))
            counts["truncated"] += len(ids) < len(row.ids)
            counts["truncated_tokens"] += len(row.ids) - len(ids)
            labels = [token if trained else IGNORE_INDEX for token, trained in zip(ids, row.trained, strict=False)]
            predicted = sum(label != IGNORE_INDEX for label in labels[1:])  # nothing stands before the first token
            counts["trained_tokens"] += predicted
            if predicted and row.row != last:
                self.trained_texts, last = self.trained_texts + 1, row.row
            if ids:
                mask = [1] * len(ids)
                yield {"input_ids": ids, "attention_mask": mask, "labels": labels, "text_index": row.row}

    def encoded(self, rows: Sequence[Row], num_texts: int) -> EncodedRows:
        """Return all rows, or say what is wrong with those that could not be encoded."""
        if self.problems:
            shared = (
                "; what is trained must not share a token with what is not: move a blank or a line end to the other "
                "side"
            )
            title = "these rows cannot be made to tokens" + (shared if self.maker.counts["shared"] else "")
            raise error_from_problems(title, self.problems)
        untrained = num_texts - self.trained_texts
        notes = tuple(self.maker.notes())
        return EncodedRows(rows, num_texts=num_texts, untrained=untrained, notes=notes, **self.counts)


def last_answer(row: Row) -> tuple[list[int], list[int]]:
    """Return the tokens before the last part that is trained, and of that part; both are empty where nothing is."""
    trained = [label != IGNORE_INDEX for label in row["labels"]]
    stop = max((i + 1 for i, one in enumerate(trained) if one), default=0)
    start = max((i + 1 for i, one in enumerate(trained[:stop]) if not one), default=0)
    return row["input_ids"][:start], row["input_ids"][start:stop]


def check_template(tokenizer: Any, texts: Iterable[str]) -> None:
    """Check that a tokenizer has a chat template where texts in the one form are conversations."""
    if any('"messages"' in text for text in texts) and not getattr(tokenizer, "chat_template", None):
        raise no_chat_template()


def with_one_template(tokenizer: Any, template: str | None, texts: Callable[[], Iterable[str]]) -> Any:
    """Return a tokenizer whose chat template is the given one, or the one of its own by which it writes these texts.

    Each call of `texts` goes through the texts.
    """
    if template is not None:
        tokenizer = with_chat_template(tokenizer, template)
    check_template(tokenizer, texts())
    if not isinstance(getattr(tokenizer, "chat_template", None), dict):
        return tokenizer
    tools = (json.loads(text).get("tools") for text in texts() if '"messages"' in text)
    used = Counter(tokenizer.get_chat_template(None, of_row) for of_row in tools)
    if len(used) > 1:
        with_tools = used[tokenizer.get_chat_template(None, [{}])]
        raise DeltuneError(
            f"the tokenizer writes {counted(with_tools, 'row')} with tools by another chat template than "
            "the rest, and a run keeps one: choose one for all rows (--template FILE.jinja), or train rows with and "
            "without tools apart"
        )
    return with_chat_template(tokenizer, next(iter(used))) if used else tokenizer


def no_chat_template() -> DeltuneError:
    """Return the error for conversations without a chat template."""
    return DeltuneError(
        "the tokenizer has no chat template, by which conversations become texts: choose one by --template: "
        f"{', '.join(NAMED_TEMPLATES)}, or a file with a template in Jinja (.jinja)"
    )


def check_lengths(encoded: EncodedRows, split: str, max_length: int, max_cut: float) -> None:
    """Refuse rows of which more than the share `max_cut` is cut, or none has a token that is trained."""
    cut = (
        f"{encoded.truncated:,} of {len(encoded):,} rows of {split} are longer than {max_length:,} tokens, "
        f"and {counted(encoded.truncated_tokens, 'token')} of them would be cut"
    )
    todo = f"Give a greater length (--max-length), of which the longest row needs {encoded.longest:,} tokens"
    if not encoded.trained_tokens:
        if encoded.truncated:
            raise DeltuneError(f"every answer is cut away: {cut}. {todo}")
        raise DeltuneError(f"no row of {split} has a token that is trained")
    if encoded.truncated > max_cut * len(encoded):
        raise DeltuneError(
            f"{cut}, more than the share of {max_cut:g} that may be (--max-cut). {todo}, or leave these rows out"
        )


def untrained_tokens(tuned: Tuned, tokenizer: Any, rows: Sequence[Row]) -> dict[int, str]:
    """Return the control tokens of rows whose embeddings the base never trained, and which the method leaves alone.

    Such a row of the table is zero, or nearly the same as another: what only weight decay moved, such as the unused
    tokens of a base model. Without a row of its own a token cannot be told from others.
    """
    delta = tuned.delta()
    tables = {tensor.name for tensor in word_embeddings(tuned.anatomy)}
    chosen = {row for _, mask in delta.planned.masked if isinstance(mask, RowMask) for row in mask.rows}
    if not chosen and tables & {*delta.owned_tensor_names}:
        return {}
    special = special_tokens(tokenizer)
    used = sorted({token for row in rows for token in row["input_ids"] if token in special} - chosen)
    embeddings: Any = tuned.model.get_input_embeddings()
    table = embeddings.weight.detach().float()
    norms = table.norm(dim=1)

    def is_untrained(token: int) -> bool:
        alike = (table - table[token]).norm(dim=1) < 0.02 * norms[token]
        return bool(norms[token] < 1e-3 * norms.median() or alike.sum() > 1)

    return {token: special[token] for token in used if is_untrained(token)}


def notes(encoded: EncodedRows, split: str, max_length: int) -> list[str]:
    """Return what a user should know about the rows of a split: what is cut, and what is not trained."""
    lines = list(encoded.notes)
    if encoded.truncated:
        lines.append(
            f"{encoded.truncated:,} of {len(encoded):,} rows are cut to {max_length:,} tokens, by "
            f"{counted(encoded.truncated_tokens, 'token')} in all (--max-length)"
        )
    if encoded.untrained:
        lines.append(f"{counted(encoded.untrained, 'conversation')} without a token that is trained")
    return [f"{split}: {line}" for line in lines]


CHAT = TaskKind(
    name="chat",
    head="causal-lm",
    default_metrics=("perplexity",),
    metric_inputs=("log-likelihoods",),
    encode=encode_chat,
    predict=predict_log_likelihoods,
    references=lambda columns, labels: [],
    row_input=lambda columns, i: readable(columns[COLUMN][i]),
)
