"""Keeps the prefix and the prompt of each delta in the cache of keys and values, so that no step computes them again.

That needs a decoder whose rows may be padded, which is told their positions, and which sees all columns of the cache:
columns then need not be those of the text alone, nor stand beside each other. Most families are such decoders, and it
is measured; `DecoderRunner` has the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers.cache_utils import Cache

from ..errors import DeltuneError
from ..runtime.modules import Edit
from .backbone import Backbone, LoadedDelta, Preamble
from .cache import States, assemble, close_gaps, columns, empty_columns, fits, new_cache, row_of, write_columns
from .prompt_cache import Beginning
from .runners import DecoderRunner, Row, RunningBatch, probe_row, same_in_a_batch, split_rows


def make_decoder_runner(backbone: Backbone) -> DecoderRunner:
    """Return what reads prompts and makes steps with a decoder.

    Args:
        backbone: The model.

    Raises:
        DeltuneError: As `DecoderRunner`.
    """
    if "position_ids" in backbone.arguments and backbone.sees_all_columns:
        try:
            padded = PaddedDecoderRunner(backbone)
        except DeltuneError:
            return DecoderRunner(backbone)  # which says why, if it cannot do it either
        if padded.sees_past_gaps:
            return padded
    return DecoderRunner(backbone)


class PaddedDecoderRunner(DecoderRunner):
    """Reads prompts and makes steps with a decoder, with the prefixes and prompts of deltas in its cache.

    Args:
        backbone: The model.

    Attributes:
        sees_past_gaps: Whether rows may be padded, and have masked columns between their own. It is measured.
        caches_prefixes: Whether prefixes in the cache do what the edits do. It is measured, since some families compute
            something of all keys or values after the cache.

    Raises:
        DeltuneError: As `DecoderRunner`.
    """

    def __init__(self, backbone: Backbone) -> None:
        self.caches_prefixes = False
        super().__init__(backbone)
        self.sees_past_gaps = self.pads and same_in_a_batch(backbone, self._with_gaps_and_alone)
        if not self.sees_past_gaps:
            return
        try:
            trial = backbone.attach_trial("prefix(length=2)")
        except DeltuneError:
            return  # no delta for this model has a prefix
        try:
            self.caches_prefixes = same_in_a_batch(
                backbone, lambda prompts, last, _: self._cached_and_applied(prompts[0], last, trial)
            )
        finally:
            backbone.detach(trial)

    def _with_gaps_and_alone(
        self, prompts: Sequence[list[int]], last: int, base: LoadedDelta
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores of a row whose beginning is cached beside one that reads all of its tokens, and of each."""
        tokens, known = prompts[0], len(prompts[0]) - 1

        def make_rows() -> list[Row]:
            batch, _ = self.read([probe_row(tokens, base)])
            row, other = probe_row(tokens, base), probe_row(tokens[::-1], base)
            row.beginning, row.cached = Beginning(base, tuple(tokens), row_of(batch.cache, 0, known + 1), [], 0), known
            return [row, other]

        return self._together_and_alone(make_rows, last)

    def _cached_and_applied(
        self, tokens: list[int], last: int, trial: LoadedDelta
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores of a row whose prefix is in the cache, and of one whose prefix the edits add."""
        self.caches_prefixes = True
        cached = self._scores_of([probe_row(tokens, trial)], last)
        self.caches_prefixes, trial.preamble = False, None
        return cached, self._scores_of([probe_row(tokens, trial)], last)

    def preamble(self, loaded: LoadedDelta) -> Preamble:
        """Return what a cache holds before the text of each row of a delta; it is computed when it is first needed.

        Args:
            loaded: The version of the delta.
        """
        if loaded.preamble is None:
            loaded.preamble = self._make_preamble(loaded)
        return loaded.preamble

    def _make_preamble(self, loaded: LoadedDelta) -> Preamble:
        length = loaded.prompt_length
        prompt: States = []
        if length:
            row, cache = probe_row([0], loaded), new_cache()
            super()._forward([row], cache, [[0]], [[1]], [0], 1)  # with all edits; the prompt does not see the token
            prompt = [
                None if pair is None else (pair[0][..., :length, :].clone(), pair[1][..., :length, :].clone())
                for pair in row_of(cache, 0, length + 1)
            ]
        with torch.inference_mode():
            prefix: States = [] if loaded.prefix is None or not self.caches_prefixes else [*loaded.prefix.states()]
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
            [0] * (middle - size) + [1] * size + [0] * (width - len(tokens)) + [1] * len(tokens)
            for size, tokens in zip(before, new, strict=True)
        ]
        logits = self._forward(rows, cache, ids, mask, [len(row.before) - width for row in rows], width)
        for row in rows:
            row.length, row.beginning = len(row.before), None
        if any(size and len(tokens) < width for size, tokens in zip(before, new, strict=True)):
            cache = close_gaps(cache, middle, before, [len(tokens) for tokens in new])
        return RunningBatch(rows, cache), logits

    def opened(self, row: Row) -> RunningBatch:
        """Return a batch of a row whose prompt is read in parts, of which it has read what was cached.

        Args:
            row: The row.
        """
        cache, _ = self._opened([row])
        row.length, row.beginning = row.cached, None
        return RunningBatch([row], cache)

    def selected(self, parts: Sequence[tuple[RunningBatch, Sequence[int]]]) -> RunningBatch:
        """Return a batch of the chosen rows of some batches, as narrow as their rows allow.

        Args:
            parts: The batches, and the numbers of their rows.
        """
        rows = [batch.rows[number] for batch, numbers in parts for number in numbers]
        width = max(self._visible_columns(row) for row in rows)
        return RunningBatch(rows, assemble([(batch.cache, numbers) for batch, numbers in parts], width))

    def _opened(self, rows: Sequence[Row]) -> tuple[Cache, list[int]]:
        """Return a cache with what stands before the tokens that rows are to read, and how many columns each has."""
        preambles = [self.preamble(row.loaded) for row in rows]
        before = [made.columns + row.cached for made, row in zip(preambles, rows, strict=True)]
        width = max(before)
        if not width:
            return new_cache(), before
        cache = empty_columns(self.like, len(rows), width)
        for number, (row, made) in enumerate(zip(rows, preambles, strict=True)):
            end, length = width, made.columns
            if row.cached:
                assert row.beginning is not None
                end = write_columns(cache, number, end, row.beginning.states, row.loaded.prompt_length + row.cached)
                length = made.prefix
            if length:
                write_columns(cache, number, end, made.states, length)
        return cache, before

    def _forward(
        self,
        rows: list[Row],
        cache: Cache,
        ids: list[list[int]],
        mask: list[list[int]],
        starts: list[int],
        width: int,
        left_out: frozenset[Edit] | None = None,
    ) -> torch.Tensor:
        """Run the model on tokens of which each row's stand after its preamble; starts are positions without it."""
        starts = [start + row.loaded.prompt_shift for row, start in zip(rows, starts, strict=True)]
        left_out = frozenset[Edit]().union(*(self.preamble(row.loaded).edits for row in rows))
        return super()._forward(rows, cache, ids, mask, starts, width, left_out)

    def _visible_columns(self, row: Row) -> int:
        """How many columns of the mask are a row's: its preamble and its tokens."""
        return self.preamble(row.loaded).columns + row.length

    def _mask_width(self, batch: RunningBatch) -> int:
        """How many columns a mask has before a step: all of the cache's."""
        return columns(batch.cache)


def _joined(first: States, second: States) -> States:
    if not second:
        return first
    joined: States = []
    for one, other in zip(first, second, strict=True):
        if one is None or other is None:
            joined.append(one or other)
        else:
            joined.append((torch.cat([one[0], other[0]], dim=-2), torch.cat([one[1], other[1]], dim=-2)))
    return joined
