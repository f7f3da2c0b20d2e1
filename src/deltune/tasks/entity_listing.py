"""Tagging in words: the entities of a text listed, as in "John Smith: PER; Paris: LOC", and read back to tags."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..errors import DeltuneError
from . import generation
from .base import Columns, InferenceContext, Limits, Predictions
from .encoding import EncodedRows
from .token_classification import OUTSIDE, TAGGING

NOTHING = "none"
"""Said of a text without entities."""


def type_of(tag: str) -> str:
    """The type of an entity's tag, B- or I-; "" outside."""
    return tag[2:] if tag[:2] in ("B-", "I-") else ""


def entities(tags: Sequence[str]) -> list[tuple[int, int, str]]:
    """(start, stop, type) of every entity, by strict BIO: I- without a B- of its type before it opens none."""
    found = []
    for start, tag in enumerate(tags):
        if tag.startswith("B-"):
            stop = start + 1
            while stop < len(tags) and tags[stop] == f"I-{type_of(tag)}":
                stop += 1
            found.append((start, stop, type_of(tag)))
    return found


def listed(tokens: Sequence[str], tags: Sequence[str], words: Mapping[str, str]) -> str:
    """The entities in words; words: type -> word."""
    found = [f"{' '.join(tokens[start:stop])}: {words[kind]}" for start, stop, kind in entities(tags)]
    return "; ".join(found) or NOTHING


def tags_of(text: str, tokens: Sequence[str], words: Mapping[str, str]) -> list[str]:
    """The tags that a list in words means.

    Each mention is looked for in order: the first free place after the one before it, else the first free place. Blanks
    do not count, since a tokenizer may not keep them. What is not found, or is of no known type, is passed over: a
    mention is then what follows its semicolon.
    """
    types = {word: kind for kind, word in words.items()}
    known = "|".join(re.escape(word) for word in sorted(types, key=len, reverse=True))
    tags, cursor = [OUTSIDE] * len(tokens), 0
    for mention, word in re.findall(rf"(.+?)\s*:\s*({known})\s*(?:;|$)", text, re.DOTALL):
        parts = "".join(mention.split()).split(";")
        found = (_place(tokens, tags, cursor, ";".join(parts[i:])) for i in range(len(parts)))
        start, cursor = next((place for place in found if place), (cursor, cursor))
        tags[start:cursor] = [f"{'I' if i else 'B'}-{types[word]}" for i in range(cursor - start)]
    return tags


def _place(tokens: Sequence[str], tags: Sequence[str], cursor: int, wanted: str) -> tuple[int, int] | None:
    """The first free tokens that make up `wanted`: after the cursor, else before it."""
    for start in [*range(cursor, len(tokens)), *range(cursor)]:
        stop = _stop(tokens, start, wanted)
        if stop and set(tags[start:stop]) == {OUTSIDE}:
            return start, stop
    return None


def _stop(tokens: Sequence[str], start: int, wanted: str) -> int:
    """Where tokens from `start` on that make up `wanted` end; 0 where they do not."""
    for stop in range(start, len(tokens)):
        own = "".join(tokens[stop].split())
        if not wanted.startswith(own) or not own:
            return 0
        wanted = wanted[len(own) :]
        if not wanted:
            return stop + 1
    return 0


def encode(tokenizer: Any, model: Any, columns: Columns, limits: Limits, training: bool) -> EncodedRows:
    """Rows of generation, the list of its entities the target. Error: labels that are no BIO tags."""
    labels = list(limits.words)
    if foreign := [label for label in labels if label != OUTSIDE and not type_of(label)]:
        raise DeltuneError(
            f"tagging in words lists entities, by tags O, B-… and I-…; here are {', '.join(foreign[:5])}. "
            "Use answer=head"
        )
    types = _types(limits.words)
    told = dict(columns)
    if "tags" in columns:
        pairs = zip(columns["tokens"], columns["tags"], strict=True)
        told["targets"] = [[listed(tokens, [labels[i] for i in tags], types)] for tokens, tags in pairs]
    found = generation.encode_pairs(tokenizer, model, told, limits, training)
    rows = [{**row, "tokens": list(tokens)} for row, tokens in zip(found.rows, columns["tokens"], strict=True)]
    return replace(found, rows=rows)


def _types(words: Mapping[str, str]) -> dict[str, str]:
    """Type -> word, of label -> word."""
    return {type_of(label): word for label, word in words.items() if type_of(label)}


def answers(use: InferenceContext, encoded: EncodedRows) -> Predictions:
    """The tags that each generated list means; the list itself is the score."""
    found = generation.answers(use, encoded)
    types = _types(use.limits.words)
    tags = [tags_of(text, row["tokens"], types) for text, row in zip(found.predictions, encoded.rows, strict=True)]
    return Predictions(tags, found.predictions, found.loss)


LISTS = replace(TAGGING, loads="seq2seq-lm", encode=encode, answers=answers, spoken=type_of)
