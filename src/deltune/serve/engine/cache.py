"""The keys and values of a running batch: rows join and leave between two steps, each with a length of its own.

Keys of a decoder end together, so that the next token of every row goes into the same column. What stands before a
row's first token is padding, which its mask hides. The keys of an encoder, which a decoder reads, begin together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

SPARE_COLUMNS = 64
"""Columns that are allocated ahead, so that not every step copies all keys."""


class PreallocatedLayer(DynamicLayer):
    """The keys and values of one layer, in buffers with room for further tokens."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()
        self.buffers: tuple[torch.Tensor, torch.Tensor] | None = None
        self.length = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate the buffers for the first tokens."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the keys and values of new tokens, and return all."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        new = key_states.shape[-2]
        if self.buffers is None and not self.length:
            self.keys, self.values, self.length = key_states, value_states, new  # a step may follow, or none
            return key_states, value_states
        if self.buffers is None or self.length + new > self.buffers[0].shape[-2]:
            assert self.keys is not None and self.values is not None
            self.buffers = (_longer(self.keys, new), _longer(self.values, new))
        for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[..., self.length : self.length + new, :] = states
        self.set_length(self.length + new)
        assert self.keys is not None and self.values is not None
        return self.keys, self.values

    def set_length(self, length: int) -> None:
        """Keep the first columns alone: all that were there before a step that failed."""
        if length == self.length and self.buffers is None:
            return
        sources = self.buffers or (self.keys, self.values)
        self.keys, self.values = (source[..., :length, :] for source in sources)  # type: ignore[index]
        self.length = length

    def get_seq_length(self) -> int:
        return self.length


def _longer(states: torch.Tensor, new: int) -> torch.Tensor:
    shape = list(states.shape)
    shape[-2] += new + SPARE_COLUMNS
    longer = states.new_empty(shape)
    longer[..., : states.shape[-2], :] = states
    return longer


Part = tuple[Cache, Sequence[int]]
"""A cache and the numbers of its rows that are kept."""

States = list[tuple[torch.Tensor, torch.Tensor] | None]
"""The keys (1, N_kv, l, d) and values (1, N_kv, l, d_v) of some columns of one row, layer by layer; None for a layer
that keeps none of its own."""


class PromptCountingCache(Cache):
    """A cache whose columns count the rows of prompts, too."""

    counts_prompts = True


def new_cache() -> Cache:
    return PromptCountingCache(layer_class_to_replicate=PreallocatedLayer)


def columns(cache: Cache) -> int:
    return max((layer.length for layer in _layers(cache)), default=0)


def set_columns(cache: Cache, number: int) -> None:
    """Take back what a step that failed has written into some layers."""
    for layer in _layers(cache):
        if layer.length > number:
            layer.set_length(number)


def _layers(cache: Cache) -> list[PreallocatedLayer]:
    layers = [layer for layer in cache.layers if isinstance(layer, PreallocatedLayer)]
    assert len(layers) == len(cache.layers)
    return layers


def assemble(parts: Sequence[Part], width: int, at_end: bool = True) -> Cache:
    """Return one cache with the chosen rows of several, padded to one width; rows end together, or begin together."""
    made = new_cache()
    spare = SPARE_COLUMNS if at_end else 0
    sources = [(_layers(cache), rows) for cache, rows in parts]
    for number in range(max(len(layers) for layers, _ in sources)):
        layer = PreallocatedLayer()
        states = [(layers[number].keys, layers[number].values, rows) for layers, rows in sources]
        keys = [(k, rows) for k, _, rows in states if k is not None]
        values = [(v, rows) for _, v, rows in states if v is not None]
        if keys:
            layer.lazy_initialization(keys[0][0], values[0][0])
            layer.buffers = (_joined(keys, width, spare, at_end), _joined(values, width, spare, at_end))
            layer.set_length(width)
        made.layers.append(layer)
    return made


def _joined(parts: Sequence[tuple[torch.Tensor, Sequence[int]]], width: int, spare: int, at_end: bool) -> torch.Tensor:
    first = parts[0][0]
    shape = [sum(len(rows) for _, rows in parts), *first.shape[1:]]
    shape[-2] = width + spare
    joined = first.new_zeros(shape)
    start = 0
    for states, rows in parts:
        chosen = states if list(rows) == list(range(states.shape[0])) else states[list(rows)]
        kept = min(width, states.shape[-2])
        target = joined[start : start + len(rows)]
        if at_end:
            target[..., width - kept : width, :] = chosen[..., chosen.shape[-2] - kept :, :]
        else:
            target[..., :kept, :] = chosen[..., :kept, :]
        start += len(rows)
    return joined


def empty_columns(like: Cache, rows: int, width: int) -> Cache:
    """Return a cache with zeros for some rows and columns."""
    made = new_cache()
    for source in _layers(like):
        layer = PreallocatedLayer()
        if source.keys is not None and source.values is not None:
            layer.lazy_initialization(source.keys, source.values)
            layer.keys, layer.values = (
                tensor.new_zeros(rows, *tensor.shape[1:-2], width, tensor.shape[-1])
                for tensor in (source.keys, source.values)
            )
            layer.length = width
        made.layers.append(layer)
    return made


def fits(cache: Cache, states: States) -> bool:
    """Return whether keys and values can be columns of a cache."""
    layers = [(layer.keys, layer.values) for layer in _layers(cache)]
    return len(layers) == len(states) and all(
        kept is not None and kept.shape[1] == new.shape[1] and kept.shape[-1] == new.shape[-1]
        for kept_pair, pair in zip(layers, states, strict=True)
        if pair is not None
        for kept, new in zip(kept_pair, pair, strict=True)
    )


def write_columns(cache: Cache, row: int, end: int, states: States, length: int) -> int:
    """Write keys and values into the columns of one row that stand before a column; return the first one written."""
    for layer, pair in zip(_layers(cache), states, strict=True):
        for kept, new in zip((layer.keys, layer.values), pair or (), strict=pair is not None):
            assert kept is not None
            kept[row, ..., end - length : end, :] = new[0, ..., :length, :]
    return end - length


def close_gaps(cache: Cache, middle: int, before: Sequence[int], after: Sequence[int]) -> Cache:
    """Return a cache in which the columns of each row stand together at the end.

    Before, those of a row end at `middle` and at the last column: `before` and `after` say how many.
    """
    width = max(one + other for one, other in zip(before, after, strict=True))
    made = assemble([(cache, range(len(before)))], width)
    for layer, source in zip(_layers(made), _layers(cache), strict=True):
        for kept, old in ((layer.keys, source.keys), (layer.values, source.values)):
            for row, (one, other) in enumerate(zip(before, after, strict=True)):
                if one and kept is not None and old is not None:
                    end = width - other
                    kept[row, ..., end - one : end, :] = old[row, ..., middle - one : middle, :]
    return made


def copy_row_end(cache: Cache, row: int, length: int) -> States:
    """Return copies of the last columns of one row, layer by layer."""
    copies: States = []
    for layer in _layers(cache):
        if layer.keys is None or layer.values is None:
            copies.append(None)
            continue
        keys, values = (t[row : row + 1, ..., t.shape[-2] - length :, :].clone() for t in (layer.keys, layer.values))
        copies.append((keys, values))
    return copies


def first_columns(states: States, length: int) -> States:
    """Return copies of the first columns of keys and values."""
    return [
        None if pair is None else (pair[0][..., :length, :].clone(), pair[1][..., :length, :].clone())
        for pair in states
    ]
