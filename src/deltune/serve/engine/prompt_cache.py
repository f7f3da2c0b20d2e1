"""The cache of prompt beginnings: keys and values of prompts that requests of the same delta have begun with.

A beginning is found by blocks of tokens, for one version of one delta and one tenant: what a tenant has asked must not
show in how fast, or with how many cached tokens, another tenant is answered.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from .backbone import LoadedDelta
from .cache import States, first_columns

BLOCK = 16
"""Tokens of a block; beginnings are compared block by block."""


@dataclass(eq=False)
class CachedPrompt:
    """A prompt whose keys and values are kept."""

    loaded: LoadedDelta  # the version of the delta
    tokens: tuple[int, ...]  # the tokens, a multiple of a block
    states: States  # keys and values of the delta's prompt rows and of these tokens, by layer
    keys: list[tuple[object, ...]]  # under which keys it is found
    bytes: int  # its size


class PromptCache:
    """Cached prompts, of which those go first that were not needed for longest. The engine's thread has it."""

    def __init__(self, limit: int) -> None:
        self.limit, self.bytes = limit, 0
        self._kept: OrderedDict[int, CachedPrompt] = OrderedDict()
        self._found: dict[tuple[object, ...], list[CachedPrompt]] = {}

    def find(self, owner: object, loaded: LoadedDelta, tokens: Sequence[int]) -> tuple[CachedPrompt | None, int]:
        """Return the beginning with the most, and never all, tokens of a prompt, and how many it has in common."""
        keys = takewhile(lambda one: one[0] in self._found, _keys(owner, loaded, tokens[: len(tokens) - 1]))
        for key, end in reversed(list(keys)):
            prompt = self._found[key][-1]
            if prompt.tokens[:end] == tuple(tokens[:end]):  # but for two prompts of one hash
                self._kept.move_to_end(id(prompt))
                return prompt, end
        return None, 0

    def wants(self, owner: object, loaded: LoadedDelta, tokens: Sequence[int]) -> bool:
        """Return whether a prompt has a block that is not kept yet."""
        if not self.limit or len(tokens) < BLOCK:
            return False
        *_, (key, _) = _keys(owner, loaded, tokens)
        return key not in self._found

    def keep(self, owner: object, loaded: LoadedDelta, tokens: Sequence[int], states: States) -> None:
        """Keep the keys and values of a prompt."""
        whole = len(tokens) // BLOCK * BLOCK
        states = first_columns(states, loaded.prompt_length + whole)
        size = sum(t.numel() * t.element_size() for layer in states if layer is not None for t in layer)
        if size > self.limit:
            return
        keys = [key for key, _ in _keys(owner, loaded, tokens)]
        covered = {id(other): other for key in keys for other in self._found.get(key, ())}
        made = CachedPrompt(loaded, tuple(tokens[:whole]), states, keys, size)
        self._kept[id(made)] = made
        for key in keys:
            self._found.setdefault(key, []).append(made)
        self.bytes += size
        for other in covered.values():
            if set(other.keys) <= set(keys):  # this one begins with all of it
                self._drop(other)
        while self.bytes > self.limit:
            self._drop(next(iter(self._kept.values())))

    def forget(self, loaded: LoadedDelta) -> None:
        """Drop what belongs to a version that is no longer in memory."""
        for prompt in [b for b in self._kept.values() if b.loaded is loaded]:
            self._drop(prompt)

    def _drop(self, prompt: CachedPrompt) -> None:
        del self._kept[id(prompt)]
        self.bytes -= prompt.bytes
        for key in prompt.keys:
            self._found[key].remove(prompt)
            if not self._found[key]:
                del self._found[key]


def _keys(owner: object, loaded: LoadedDelta, tokens: Sequence[int]) -> list[tuple[tuple[object, ...], int]]:
    """A key for each whole block of tokens, which depends on all blocks before it, and where the block ends."""
    keys: list[tuple[tuple[object, ...], int]] = []
    before = 0
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        before = hash((before, *tokens[start : start + BLOCK]))
        keys.append(((owner, id(loaded), before, start), start + BLOCK))
    return keys
