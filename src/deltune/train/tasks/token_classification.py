"""Tagging, by a head or by a language model that writes the entities of a text.

By a head: one label for each word of a text that is already split; its first sub-word carries the label. Tokenizers
leave some words out (a zero-width space, a soft hyphen), so a label is placed by the word's number, never by counting.
A language model writes the entities, as "John Smith: PER; Paris: LOC", for us to parse.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import replace
from inspect import signature
from typing import Any

import torch
from torch.nn import functional

from ...errors import DeltuneError
from ...models import OUTSIDE, first_sub_words, tag_all_words
from ..metrics.labels import entities
from . import generation
from .base import Columns, InferenceContext, Predictions, TaskKind, TaskOptions
from .encoding import IGNORE_INDEX, TOKENIZER_BATCH, EncodedRows, in_chunks, row_names, tokenize


@in_chunks
def encode_tags(tokenizer: Any, model: Any, columns: Columns, options: TaskOptions, training: bool) -> EncodedRows:
    """Encode each text with `labels` at the first sub-word of every word and IGNORE_INDEX elsewhere.

    `words` has the numbers of the words with a sub-word. Words beyond max_length are cut off.
    """
    if not tokenizer.is_fast:
        raise DeltuneError(
            f"{type(tokenizer).__name__} does not tell which sub-words a token became; tagging needs that"
        )
    model_inputs, names = signature(model.forward).parameters, row_names(columns)
    rows, truncated = [], 0
    for start in range(0, len(columns["tokens"]), TOKENIZER_BATCH):
        chunk = slice(start, start + TOKENIZER_BATCH)
        texts = [list(tokens) for tokens in columns["tokens"][chunk]]
        tokenized = _tokenize(tokenizer, texts, names[chunk], options.max_length)
        for i, tokens in enumerate(texts):
            row = {name: values[i] for name, values in tokenized.items() if name in model_inputs}
            places = first_sub_words(tokenized.word_ids(i))
            tags = columns["tags"][start + i] if "tags" in columns else [0] * len(tokens)
            labels = [IGNORE_INDEX] * len(row["input_ids"])
            for word, place in places.items():
                labels[place] = tags[word]
            truncated += bool(tokenized.encodings[i].overflowing)
            rows.append({**row, "labels": labels, "words": list(places), "num_words": len(tokens)})
    return EncodedRows(rows, truncated)


def _tokenize(tokenizer: Any, texts: list[list[str]], names: Sequence[str], max_length: int) -> Any:
    try:
        options = {"is_split_into_words": True, "truncation": True, "max_length": max_length}
        return tokenize(tokenizer, texts, names=names, stand_in=0, **options)  # its words get no answer of the model
    except AssertionError as error:  # tokenizers of RoBERTa and GPT-2 must know that a token begins with a blank
        raise DeltuneError(f"{error}; give a tokenizer made with add_prefix_space=True") from error


def predict_tags(context: InferenceContext, encoded: EncodedRows) -> Predictions:
    """Predict the most probable tag of every word; for words that the model does not see, see `tag_all_words`.

    The scores are the probabilities of the predicted tags, and None for the words that the model does not see.
    """
    predictions: list[Any] = [None] * len(encoded)
    scores: list[Any] = [None] * len(encoded)
    total_loss, count = 0.0, 0

    def process(indices: list[int], batch: dict[str, torch.Tensor]) -> None:
        nonlocal total_loss, count
        labels = batch.pop("labels")
        logits = context.model(**batch).logits.float()
        total_loss += functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").item()
        count += int((labels != IGNORE_INDEX).sum())
        best = logits.softmax(-1).max(-1)
        for row, i in enumerate(indices):
            mask, words = labels[row] != IGNORE_INDEX, encoded[i]["words"]
            tags = [context.labels[label] for label in best.indices[row][mask].tolist()]
            probabilities = dict(zip(words, best.values[row][mask].tolist(), strict=True))
            num_words = encoded[i]["num_words"]
            predictions[i] = tag_all_words(dict(zip(words, tags, strict=True)), num_words, context.labels)
            scores[i] = [probabilities.get(word) for word in range(num_words)]

    context.for_each_batch(encoded, process)
    return Predictions(predictions, scores, total_loss / max(count, 1))


TAGGING = TaskKind(
    name="tagging",
    head="tagging",
    default_metrics=("entity_f1",),
    metric_inputs=("tags", "classes"),
    encode=encode_tags,
    predict=predict_tags,
    references=lambda columns, labels: [[labels[i] for i in tags] for tags in columns["tags"]],
    row_input=lambda columns, i: list(columns["tokens"][i]),
)

NO_ENTITIES = "none"
"""Stands for a text without entities."""


def entity_type(tag: str) -> str:
    """Return the entity type of a tag B-TYPE or I-TYPE, or an empty string for any other tag."""
    return tag[2:] if tag[:2] in ("B-", "I-") else ""


def format_entities(tokens: Sequence[str], tags: Sequence[str], type_words: Mapping[str, str]) -> str:
    """Return the entities of a text as the model should write them."""
    ordered = sorted(entities(tags, "IOB2"), key=lambda entity: entity[1:])
    return (
        "; ".join(f"{' '.join(tokens[start:stop])}: {type_words[name]}" for name, start, stop in ordered) or NO_ENTITIES
    )


def parse_entities(text: str, tokens: Sequence[str], type_words: Mapping[str, str]) -> list[str]:
    """Return the BIO tags that a list of entities, as a model wrote it, gives to the tokens.

    Each mention is looked up in order: its first untagged occurrence after the previous mention, else its first
    untagged occurrence. Blanks and characters that cannot be seen do not count, since a tokenizer may not preserve
    them. Entries that do not occur or have an unknown type are skipped; a mention then begins after the semicolon of
    such an entry.
    """
    types = {word: name for name, word in type_words.items()}
    words = "|".join(re.escape(word) for word in sorted(types, key=len, reverse=True))
    tags, cursor = [OUTSIDE] * len(tokens), 0
    for mention, word in re.findall(rf"(.+?)\s*:\s*({words})\s*(?:;|$)", text, re.DOTALL):
        parts = _spelling(mention).split(";")
        spans = (_find_mention(tokens, tags, cursor, ";".join(parts[i:])) for i in range(len(parts)))
        start, cursor = next((span for span in spans if span), (cursor, cursor))
        tags[start:cursor] = [f"{'I' if i else 'B'}-{types[word]}" for i in range(cursor - start)]
    return tags


def _find_mention(tokens: Sequence[str], tags: Sequence[str], cursor: int, mention: str) -> tuple[int, int] | None:
    """Return the first untagged span of tokens that spells a mention, from the cursor on or else before it."""
    for start in [*range(cursor, len(tokens)), *range(cursor)]:
        stop = _match_end(tokens, start, mention)
        if stop and set(tags[start:stop]) == {OUTSIDE}:
            return start, stop
    return None


def _match_end(tokens: Sequence[str], start: int, mention: str) -> int:
    """Return where the tokens from `start` on that spell a mention end; 0 if they do not spell it."""
    for stop in range(start, len(tokens)):
        token = _spelling(tokens[stop])
        if not mention.startswith(token) or (not token and stop == start):
            return 0
        mention = mention[len(token) :]
        if not mention:
            return stop + 1
    return 0


def _spelling(text: str) -> str:
    """Return the characters of a text by which a mention is looked up: without blanks and what cannot be seen."""
    return "".join(
        c
        for c in unicodedata.normalize("NFKC", text)
        if not c.isspace() and unicodedata.category(c) not in ("Cc", "Cf") and not "\ufe00" <= c <= "\ufe0f"
    )


@in_chunks
def encode_entities_for_generation(
    tokenizer: Any, model: Any, columns: Columns, options: TaskOptions, training: bool
) -> EncodedRows:
    """Encode each text for generation, with the list of its entities as the target."""
    labels = list(options.label_words)
    if foreign := [label for label in labels if label != OUTSIDE and not entity_type(label)]:
        raise DeltuneError(
            f"tagging by a language model needs the tags O, B-… and I-…, but the labels are {', '.join(foreign[:5])}. "
            "Use answer=head"
        )
    type_words = _type_words(options.label_words)
    with_targets = dict(columns)
    if "tags" in columns:
        pairs = zip(columns["tokens"], columns["tags"], strict=True)
        with_targets["targets"] = [
            [format_entities(tokens, [labels[i] for i in tags], type_words)] for tokens, tags in pairs
        ]
    encoded = generation.encode_seq2seq(tokenizer, model, with_targets, options, training)
    rows = [{**row, "tokens": list(tokens)} for row, tokens in zip(encoded.rows, columns["tokens"], strict=True)]
    return replace(encoded, rows=rows)


def _type_words(label_words: Mapping[str, str]) -> dict[str, str]:
    """Return entity type -> word."""
    return {entity_type(label): word for label, word in label_words.items() if entity_type(label)}


def generate_entities(context: InferenceContext, encoded: EncodedRows) -> Predictions:
    """Predict the tags that each generated list gives; the score of a row is the list itself."""
    generated = generation.predict(context, encoded)
    type_words = _type_words(context.options.label_words)
    pairs = zip(generated.predictions, encoded.rows, strict=True)
    tags = [parse_entities(text, row["tokens"], type_words) for text, row in pairs]
    return Predictions(tags, generated.predictions, generated.loss)


SEQ2SEQ_TAGGING = replace(
    TAGGING, head="seq2seq-lm", encode=encode_entities_for_generation, predict=generate_entities, word_key=entity_type
)
