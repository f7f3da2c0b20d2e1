"""Tagging by a language model: it writes the entities of a text, as "John Smith: PER; Paris: LOC", for us to parse."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..errors import DeltuneError
from . import generation
from .base import Columns, InferenceContext, Predictions, TaskOptions
from .encoding import EncodedRows
from .token_classification import OUTSIDE_TAG, TAGGING

NO_ENTITIES = "none"
"""What stands for a text without entities."""


def entity_type(tag: str) -> str:
    """Return the entity type of a tag B-TYPE or I-TYPE, or an empty string for any other tag."""
    return tag[2:] if tag[:2] in ("B-", "I-") else ""


def find_entities(tags: Sequence[str]) -> list[tuple[int, int, str]]:
    """Return (start, stop, type) of every entity, with an exclusive stop.

    Tags are read as strict BIO: I- without a B- or I- of its type before it does not begin an entity.
    """
    entities = []
    for start, tag in enumerate(tags):
        if tag.startswith("B-"):
            stop = start + 1
            while stop < len(tags) and tags[stop] == f"I-{entity_type(tag)}":
                stop += 1
            entities.append((start, stop, entity_type(tag)))
    return entities


def format_entities(tokens: Sequence[str], tags: Sequence[str], type_words: Mapping[str, str]) -> str:
    """Return the entities of a text as the model should write them.

    Args:
        tokens: The tokens of the text.
        tags: Their BIO tags.
        type_words: Entity type -> the word that stands for it.
    """
    entities = [f"{' '.join(tokens[start:stop])}: {type_words[name]}" for start, stop, name in find_entities(tags)]
    return "; ".join(entities) or NO_ENTITIES


def parse_entities(text: str, tokens: Sequence[str], type_words: Mapping[str, str]) -> list[str]:
    """Return the BIO tags that a list of entities, as a model wrote it, gives to the tokens.

    Each mention is looked up in order: its first untagged occurrence after the previous mention, else its first
    untagged occurrence. Blanks do not count, since a tokenizer may not preserve them. Entries that do not occur or have
    an unknown type are skipped; a mention then begins after the semicolon of such an entry.

    Args:
        text: What the model wrote.
        tokens: The tokens of the input.
        type_words: Entity type -> the word that stands for it.
    """
    types = {word: name for name, word in type_words.items()}
    words = "|".join(re.escape(word) for word in sorted(types, key=len, reverse=True))
    tags, cursor = [OUTSIDE_TAG] * len(tokens), 0
    for mention, word in re.findall(rf"(.+?)\s*:\s*({words})\s*(?:;|$)", text, re.DOTALL):
        parts = "".join(mention.split()).split(";")
        spans = (_find_mention(tokens, tags, cursor, ";".join(parts[i:])) for i in range(len(parts)))
        start, cursor = next((span for span in spans if span), (cursor, cursor))
        tags[start:cursor] = [f"{'I' if i else 'B'}-{types[word]}" for i in range(cursor - start)]
    return tags


def _find_mention(tokens: Sequence[str], tags: Sequence[str], cursor: int, mention: str) -> tuple[int, int] | None:
    """Return the first untagged span of tokens that spells a mention, from the cursor on or else before it."""
    for start in [*range(cursor, len(tokens)), *range(cursor)]:
        stop = _match_end(tokens, start, mention)
        if stop and set(tags[start:stop]) == {OUTSIDE_TAG}:
            return start, stop
    return None


def _match_end(tokens: Sequence[str], start: int, mention: str) -> int:
    """Return where the tokens from `start` on that spell a mention end; 0 if they do not spell it."""
    for stop in range(start, len(tokens)):
        token = "".join(tokens[stop].split())
        if not mention.startswith(token) or not token:
            return 0
        mention = mention[len(token) :]
        if not mention:
            return stop + 1
    return 0


def encode(tokenizer: Any, model: Any, columns: Columns, options: TaskOptions, training: bool) -> EncodedRows:
    """Encode each text for generation, with the list of its entities as the target.

    Raises:
        DeltuneError: The labels are not BIO tags.
    """
    labels = list(options.label_words)
    if foreign := [label for label in labels if label != OUTSIDE_TAG and not entity_type(label)]:
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


def predict(context: InferenceContext, encoded: EncodedRows) -> Predictions:
    """Predict the tags that each generated list gives; the score of a row is the list itself."""
    generated = generation.predict(context, encoded)
    type_words = _type_words(context.options.label_words)
    pairs = zip(generated.predictions, encoded.rows, strict=True)
    tags = [parse_entities(text, row["tokens"], type_words) for text, row in pairs]
    return Predictions(tags, generated.predictions, generated.loss)


SEQ2SEQ_TAGGING = replace(TAGGING, head="seq2seq-lm", encode=encode, predict=predict, word_key=entity_type)
