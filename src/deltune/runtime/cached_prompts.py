"""Marks of caches that hold the rows of a prompt.

Only the stack that reads the rows counts them. To everyone else, such as `generate`, a model around the stack and the
caller, a cache is as long as its text, so that what they pass next (new tokens, masks, positions) speaks of the text
alone. A cache with rows is refused wherever it is not continued with the same prompt.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from ..errors import DeltuneError
from .modules import Edit
from .rows import DeltaRows

_MARK = "deltune_prompt"
_NAMES: WeakKeyDictionary[Edit, str] = WeakKeyDictionary()
"""A name for every prompt that was cached, also where its cache is pickled; no part of the prompt's own state."""

Identity = tuple[tuple[Any, ...], ...]
"""Which rows of a batch have which prompts; equal for prompts that a cache may be continued with."""


def identity_of(prompts: Sequence[tuple[DeltaRows, Sequence[Edit]]]) -> Identity:
    """Return the identity of the prompts of a pass."""
    return tuple(
        (group.partial_rows, *(_NAMES.setdefault(e, uuid.uuid4().hex) for e in edits)) for group, edits in prompts
    )


class CachedSoftPrompt:
    """The rows before the text in a cache, in which it replaces the methods that count and add columns.

    Attributes:
        inside: Whether the stack that reads the rows is running.
    """

    def __init__(self, cache: Any, identity: Identity, length: int) -> None:
        self.cache, self.identity, self.length, self.inside = cache, identity, length, False
        cache.get_seq_length, cache.update = self.get_seq_length, self.update
        setattr(cache, _MARK, self)

    def columns(self, layer_idx: int = 0) -> Any:
        """Return the number of rows and tokens in a layer of the cache."""
        return type(self.cache).get_seq_length(self.cache, layer_idx)

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """Return the number of tokens in a layer of the cache, with the rows inside of their stack."""
        columns = self.columns(layer_idx)
        return columns if self.inside or not columns else columns - self.length

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """Add keys and values, inside of the stack that reads the rows; a cache that was emptied forgets them."""
        if not self.inside and self.columns():
            raise DeltuneError(
                f"this cache holds the {self.length} rows of a prompt before its text, and the model runs without that "
                "prompt (disable(), another delta, or it is detached): start with a new cache, or continue with the "
                "delta that made this one"
            )
        if not self.inside:
            for name in ("get_seq_length", "update", _MARK):
                delattr(self.cache, name)
        return type(self.cache).update(self.cache, *args, **kwargs)


def self_attention_cache(cache: Any) -> Any:
    """Return the part of a cache that holds what a decoder has read itself."""
    return getattr(cache, "self_attention_cache", cache)


def cached_prompt(cache: Any) -> CachedSoftPrompt | None:
    """Return the record of the soft prompt whose rows a cache holds, or None."""
    known: CachedSoftPrompt | None = getattr(cache, _MARK, None)
    return known


def counted_columns(cache: Any, identity: Identity, length: int) -> int:
    """Return the number of rows and tokens in a cache that a pass with prompts continues; 0 where it begins one."""
    if cache is None:
        return 0
    known = cached_prompt(cache)
    columns = int(cache.get_seq_length() if known is None else known.columns())
    if not columns or getattr(cache, "counts_prompts", False):
        return columns
    if known is None or known.identity != identity or columns < length:
        have = "no prompt" if known is None else "another prompt" if columns >= length else "a part of the prompt"
        raise DeltuneError(
            f"the cache passed as past_key_values holds a text that was read with {have}, and this pass has a prompt "
            f"of {length} rows, which stand before the first token: start with a new cache, or continue with the delta "
            "(and the rows()) that made this one"
        )
    return columns


def enter_stack(cache: Any, identity: Identity, length: int, columns: int) -> None:
    """Let the stack that begins to run with a cache count the rows in it."""
    if cache is None or getattr(cache, "counts_prompts", False):
        return
    known = cached_prompt(cache)
    if known is None or not columns:
        known = CachedSoftPrompt(cache, identity, length)
    known.inside = True


def leave_stack(cache: Any, identity: Identity, length: int) -> None:
    """Count the text alone again; a cache that the stack has made itself holds the rows from now on."""
    if cache is None or getattr(cache, "counts_prompts", False):
        return
    known = cached_prompt(cache) or CachedSoftPrompt(cache, identity, length)
    known.inside = False
