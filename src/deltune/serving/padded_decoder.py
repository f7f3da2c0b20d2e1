"""A runner of decoders whose rows may be padded, are told their positions and see all columns: the usual families.

Then the columns of a cache need not be those of the text alone, nor stand beside each other. What a delta puts before
every text (its prefix and its prompt) is computed once, and written into the cache of each row before its tokens are
read. No pass does anything more for it but attend to some more keys.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from transformers.cache_utils import Cache

from ..runtime.modules import Edit
from .backbone import Backbone, LoadedDelta
from .cache import (
    States,
    assemble,
    close_gaps,
    columns,
    empty_columns,
    fits,
    new_cache,
    row_of,
    write_columns,
)
from .runners import DecoderRunner, Preamble, Row, RunningBatch, probe_row, split_rows


def make_decoder_runner(backbone: Backbone) -> DecoderRunner:
    """Return what reads prompts and makes steps with a decoder.

    Args:
        backbone: The model.

    Raises:
        DeltuneError: As `DecoderRunner`.
    """
    runner = DecoderRunner(backbone)
    return PaddedDecoderRunner(runner) if runner.pads and runner.numbered and backbone.sees_all_columns else runner


class PaddedDecoderRunner(DecoderRunner):
    """Reads prompts and makes steps with a decoder whose rows may be padded, are told positions and see all columns.

    Args:
        measured: A runner of the same model, which has measured what the family can do.
    """

    def __init__(self, measured: DecoderRunner) -> None:
        self.__dict__.update(measured.__dict__)
        self._preambles: weakref.WeakKeyDictionary[LoadedDelta, Preamble] = weakref.WeakKeyDictionary()

    def preamble(self, loaded: LoadedDelta) -> Preamble:
        """Return what a delta puts before every text; it is computed when it is first needed.

        Args:
            loaded: The version of the delta.
        """
        if loaded not in self._preambles:
            made = self._preambles[loaded] = self._make_preamble(loaded)
            loaded.bytes += sum(tensor.nbytes for pair in made.states if pair is not None for tensor in pair)
        return self._preambles[loaded]

    def _make_preamble(self, loaded: LoadedDelta) -> Preamble:
        length = loaded.prompt_length
        prompt: States = [None] * len(self.like.layers)
        if length:
            row, cache = probe_row([0], loaded), new_cache()
            self._forward([row], cache, [[0]], [[1]], [0], 1)  # with all edits, and before any token
            prompt = [
                None if pair is None else (pair[0][..., :length, :], pair[1][..., :length, :])
                for pair in row_of(cache, 0, length + 1)
            ]
        with torch.inference_mode():
            prefix: States = [] if loaded.prefix is None else [*loaded.prefix.states()]
            if loaded.prefix is None or not fits(self.like, prefix):
                return Preamble(0, length, prompt, loaded.prompt_edits)
            edits = loaded.prompt_edits | loaded.prefix.edits
            return Preamble(loaded.prefix.length, loaded.prefix.length + length, _joined(prefix, prompt), edits)

    def groups(self, rows: Sequence[Row], tokens: int) -> list[list[Row]]:
        """Return newcomers in groups that read their prompts in one pass.

        Args:
            rows: The newcomers.
            tokens: The most tokens of a pass, padding included.
        """
        return split_rows(rows, lambda row: (0, len(row.before) - row.cached), self.backbone, tokens)

    def read(self, rows: list[Row]) -> tuple[RunningBatch, torch.Tensor]:
        """Let rows read their prompts, and return their batch and the scores of their first tokens.

        Args:
            rows: The rows.
        """
        new = [row.before[row.cached :] for row in rows]
        width = max(len(tokens) for tokens in new)
        cache, before = self._opened(rows)
        middle = columns(cache)
        ids = [[0] * (width - len(tokens)) + tokens for tokens in new]
        mask = [
            [0] * (middle - own) + [1] * own + [0] * (width - len(tokens)) + [1] * len(tokens)
            for own, tokens in zip(before, new, strict=True)
        ]
        logits = self._continue(rows, cache, ids, mask, [len(row.before) - width for row in rows], width)
        for row in rows:
            row.length = len(row.before)
        if any(own and len(tokens) < width for own, tokens in zip(before, new, strict=True)):
            cache = close_gaps(cache, middle, before, [len(tokens) for tokens in new])
        return RunningBatch(rows, cache), logits

    def opened(self, row: Row) -> RunningBatch:
        """Return a batch of a row whose prompt is read in parts, of which it has read what was cached.

        Args:
            row: The row.
        """
        cache, _ = self._opened([row])
        row.length = row.cached
        return RunningBatch([row], cache)

    def read_part(self, batch: RunningBatch, tokens: int) -> torch.Tensor:
        """Let a row that is alone in its batch read further tokens of its prompt, and return the scores after them.

        Args:
            batch: The batch.
            tokens: How many tokens it reads at most.
        """
        (row,) = batch.rows
        new = row.before[row.length : row.length + tokens]
        mask = [[1] * (_own_columns(row) + len(new))]
        logits = self._continue([row], batch.cache, [new], mask, [row.length], len(new))
        row.length += len(new)
        return logits

    def step(self, batch: RunningBatch) -> torch.Tensor:
        """Let every row read its newest token, and return the scores of the next ones.

        Args:
            batch: The batch.
        """
        rows, width = batch.rows, columns(batch.cache)
        mask = [[0] * (width - own) + [1] * (own + 1) for own in map(_own_columns, rows)]
        logits = self._continue(rows, batch.cache, [[row.last] for row in rows], mask, [row.length for row in rows], 1)
        for row in rows:
            row.length += 1
        return logits

    def selected(self, parts: Sequence[tuple[RunningBatch, Sequence[int]]]) -> RunningBatch:
        """Return a batch of the chosen rows of some batches, as narrow as their rows allow.

        Args:
            parts: The batches, and the numbers of their rows.
        """
        rows = [batch.rows[number] for batch, numbers in parts for number in numbers]
        width = max(_own_columns(row) for row in rows)
        return RunningBatch(rows, assemble([(batch.cache, numbers) for batch, numbers in parts], width))

    def _opened(self, rows: Sequence[Row]) -> tuple[Cache, list[int]]:
        """Return a cache with what stands before the tokens that rows are to read, and how many columns each has."""
        for row in rows:
            row.preamble = self.preamble(row.loaded)
        before = [_preamble_of(row).columns + row.cached for row in rows]
        width = max(before)
        if not width:
            return new_cache(), before
        cache = empty_columns(self.like, len(rows), width)
        for number, row in enumerate(rows):
            preamble, end, length = _preamble_of(row), width, _preamble_of(row).columns
            if row.beginning is not None:
                end = write_columns(cache, number, end, row.beginning.states, row.loaded.prompt_length + row.cached)
                length = preamble.prefix
                row.beginning = None
            write_columns(cache, number, end, preamble.states, length)
        return cache, before

    def _continue(
        self, rows: list[Row], cache: Cache, ids: list[list[int]], mask: list[list[int]], starts: list[int], width: int
    ) -> torch.Tensor:
        """Run the model on tokens of which each row's stand after its preamble; starts are positions without it."""
        starts = [start + row.loaded.prompt_shift for row, start in zip(rows, starts, strict=True)]
        cached = frozenset[Edit]().union(*(_preamble_of(row).edits for row in rows))
        return self._forward(rows, cache, ids, mask, starts, width, cached)


def _preamble_of(row: Row) -> Preamble:
    assert row.preamble is not None
    return row.preamble


def _own_columns(row: Row) -> int:
    """How many columns of the cache are a row's own."""
    return _preamble_of(row).columns + row.length


def _joined(first: States, second: States) -> States:
    joined: States = []
    for one, other in zip(first, second, strict=True):
        if one is None or other is None:
            joined.append(one or other)
        else:
            joined.append((torch.cat([one[0], other[0]], dim=-2), torch.cat([one[1], other[1]], dim=-2)))
    return joined
