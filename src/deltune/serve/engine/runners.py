"""The rows and caches of a running batch, and what makes its steps with a language model.

A runner reads the prompts of rows, gives every row of a batch the scores of its next token, and merges and splits
batches. It measures what a family can do when it is made. Who is in a batch, and which token is chosen, is decided in
`generation`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import LogitsProcessorList
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from ...compat import parameters_of
from ...errors import DeltuneError, error_summary
from ...models import forced_bos_options
from ...runtime.attention import CacheablePrefix
from ...runtime.modules import Edit
from ...runtime.prompts import first_position, unused_position_rows
from .backbone import Backbone, LoadedDelta, Preamble, replaced_output
from .cache import (
    States,
    assemble,
    close_gaps,
    columns,
    copy_row_end,
    empty_columns,
    first_columns,
    fits,
    new_cache,
    set_columns,
    write_columns,
)
from .encoding import pass_overhead, split_by_length
from .jobs import Job
from .prompt_cache import CachedPrompt
from .requests import Request, Sampling, TokenChoice
from .sampling import TextBuilder, TokenChooser
from .tools import CallReader


@dataclass(eq=False)
class Row:
    job: Job  # the request
    chooser: TokenChooser  # chooses its tokens
    builder: TextBuilder  # makes its text
    before: list[int]  # the tokens before the first that is generated: the prompt, or what a decoder starts with
    length: int = 0  # how many of its tokens are in the decoder's cache
    encoded: int = 0  # how many tokens the encoder has read
    cached: int = 0  # how many tokens of the prompt came from the cache of prompt beginnings
    cached_prompt: CachedPrompt | None = None  # what was found there
    generated: list[int] = field(default_factory=list)  # the tokens that were generated
    choices: list[TokenChoice] = field(default_factory=list)  # the same, with their texts
    prompt: list[TokenChoice] = field(default_factory=list)  # the tokens of its prompt, if they are reported
    reader: CallReader | None = None  # parts what is said from calls of tools, if it may call any

    @property
    def loaded(self) -> LoadedDelta:
        return self.job.version

    @property
    def last(self) -> int:
        return self.generated[-1] if self.generated else self.before[-1]


@dataclass(eq=False)
class RunningBatch:
    rows: list[Row]
    cache: Cache  # the decoder's own keys and values
    cross: Cache | None = None  # the keys and values of the encoder's outputs, of an encoder-decoder
    alone: bool = False  # whether it is not merged with others, because a batch of its row with others has failed

    @property
    def live(self) -> list[int]:
        """The numbers of the rows that have not ended."""
        return [number for number, row in enumerate(self.rows) if not row.job.done]


class Runner:
    """What measures, when it is made, which rows of a model may be in one batch."""

    def __init__(self, backbone: Backbone) -> None:
        self.backbone, self.model = backbone, backbone.model
        self.base = backbone.base_entry(())
        self.precise = self.model.dtype in (torch.float32, torch.float64)
        self.last = last = int(self.model.config.get_text_config().vocab_size) - 1
        self.prompts = ([last % 7, last, last // 2, last // 3, last], [last, last // 5])

    def same(self, joint_and_alone: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> bool:
        """Measure whether rows get in one batch what each gets alone; a family that fails does not."""
        try:
            joint, alone = joint_and_alone()
        except Exception:
            return False
        scale = float(alone.std()) or 1.0
        return float((joint - alone).abs().max()) < (1e-3 if self.precise else 0.1) * scale


class DecoderRunner(Runner):
    """Reads prompts and makes steps with a decoder.

    Where it `holds`, the cache has the prefix and the prompt of each delta, so that no step computes them again. That
    needs a decoder whose rows may be padded, which is told their positions, and which sees all columns of the cache:
    columns then need not be those of the text alone, nor stand beside each other. Most families are such decoders.
    """

    def __init__(self, backbone: Backbone) -> None:
        super().__init__(backbone)
        self.numbered = "position_ids" in backbone.arguments
        table = backbone.first_stack.positions
        self.first = first_position(backbone.model.get_submodule(table) if table else None)
        self.keeps = "logits_to_keep" in backbone.arguments
        self.forced: dict[str, Any] = {}
        # what is measured: whether rows of different lengths may be in one batch, padded on the left (some families
        # count positions by the length of the cache), whether prefixes in the cache do what the edits do (some compute
        # something of all keys or values after the cache), and whether the cache has what deltas put before a text
        self.pads, self.caches_prefixes = True, False
        self.holds = self.numbered and backbone.sees_all_columns
        self.holds = self.holds and self._may_hold()
        if self.holds:
            self.caches_prefixes = self._may_cache_prefixes()
        else:
            self.pads = True
            self._check_cache()
            self.pads = self.same(self._joint_and_alone)

    def _may_hold(self) -> bool:
        """Measure whether rows may be padded, and have masked columns between their own."""
        try:
            self._check_cache()
        except DeltuneError:  # the check without holding says why, if the model cannot do that either
            return False
        self.pads = self.same(self._joint_and_alone)
        return self.pads and self.same(self._with_gaps_and_alone)

    def _may_cache_prefixes(self) -> bool:
        try:
            trial = self.backbone.attach_trial("prefix(length=2)")
        except DeltuneError:
            return False  # no delta for this model has a prefix
        try:
            return self.same(lambda: self._cached_and_applied(trial))
        finally:
            self.backbone.detach(trial)

    def _check_cache(self) -> None:
        """Check that our cache has all that the model remembers: a further token scores as in a pass over all."""
        row, other = (probe_row(tokens, self.base) for tokens in self.prompts)
        kind, reason = type(self.model).__name__, ""
        try:
            batch, _ = self.read([row])
            self.read([other])  # which must not touch what the first one remembers
            row.generated.append(self.last // 4)
            scores = self.step(batch)
            ids = torch.tensor([[*row.before, *row.generated]], device=self.backbone.device)
            whole = self.backbone.run(
                [self.base], lambda: self.model(input_ids=ids, use_cache=False).logits[:, -1].float().cpu()
            )
            scale = float(whole.std()) or 1.0
            # wide bounds: another kernel may round otherwise, and a mixture of experts then choose other experts
            bound = 0.1 if self.precise else 0.5
            self.like = empty_columns(batch.cache, 1, 1)  # says what the layers of a cache keep
            if columns(batch.cache) != row.length or float((scores - whole).abs().mean()) > bound * scale:
                reason = "its cache does not hold what it has read"
        except Exception as error:
            reason = error_summary(error)
        if reason:
            raise DeltuneError(
                f"{kind} cannot generate on a server, which keeps the keys and values of attention between two tokens "
                f"and nothing else ({reason}). Families such as Mamba, RWKV and hybrids with them keep more: load "
                "the model without its language model's head (head: base) for embeddings and labels",
                "Or generate with deltune.load and generate()",
            )

    def start_tokens(self, job: Job) -> list[int]:
        """Return what stands before the first token that is generated: the prompt."""
        return job.tokens

    def _joint_and_alone(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores of prompts of different lengths in one batch, padded on the left, and one by one."""
        return self._together_and_alone(lambda: [probe_row(tokens, self.base) for tokens in self.prompts])

    def _with_gaps_and_alone(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores of a row whose beginning is cached beside one that reads all of its tokens, and of each."""
        tokens, base = self.prompts[0], self.base

        def make_rows() -> list[Row]:
            batch, _ = self.read([probe_row(tokens, base)])
            row, other = probe_row(tokens, base), probe_row(tokens[::-1], base)
            states = copy_row_end(batch.cache, 0, len(tokens))
            row.cached_prompt, row.cached = CachedPrompt(base, tuple(tokens), states, [], 0), len(tokens) - 1
            return [row, other]

        return self._together_and_alone(make_rows)

    def _cached_and_applied(self, trial: LoadedDelta) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores of a row whose prefix is in the cache, and of one whose prefix the edits add."""
        self.caches_prefixes = True
        cached = self._scores_of([probe_row(self.prompts[0], trial)])
        self.caches_prefixes, trial.preamble = False, None
        return cached, self._scores_of([probe_row(self.prompts[0], trial)])

    def _together_and_alone(self, make_rows: Callable[[], list[Row]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores of two rows in one batch, and one by one."""
        alone = [self._scores_of([row]) for row in make_rows()]
        return self._scores_of(make_rows()), torch.stack(alone, dim=1).flatten(0, 1)

    def _scores_of(self, rows: list[Row]) -> torch.Tensor:
        """Return the scores after the prompts of rows, and then those after a further token of each."""
        batch, first = self.read(rows)
        for row in rows:
            row.generated.append(self.last // 4)
        return torch.cat([first, self.step(batch)])

    def preamble(self, loaded: LoadedDelta) -> Preamble:
        """Return what a cache holds before the text of each row of a delta; it is computed when it is first needed."""
        if loaded.preamble is None:
            loaded.preamble = self._make_preamble(loaded) if self.holds else Preamble()
        return loaded.preamble

    def _make_preamble(self, loaded: LoadedDelta) -> Preamble:
        length = loaded.prompt_length
        prompt: States = []
        if length:
            row, cache = probe_row([0], loaded), new_cache()
            # with all edits; the prompt does not see the token
            self._forward([row], cache, [[0]], [[1]], [0], 1, with_preambles=False)
            prompt = first_columns(copy_row_end(cache, 0, length + 1), length)
        if loaded.prefix is None or not self.caches_prefixes or not fits(self.like, _prefix_states(loaded.prefix)):
            return Preamble(0, length, prompt, loaded.prompt_edits)
        prefix = loaded.prefix
        return Preamble(prefix.length, prefix.length + length, prompt, loaded.prompt_edits | prefix.edits)

    def groups(self, rows: Sequence[Row], tokens: int) -> list[list[Row]]:
        by_key: dict[object, list[Row]] = {}
        for row in rows:
            key: tuple[int, ...] = ()
            new = len(row.before) - row.cached
            if not self.holds:
                key = (bool(row.cached), new if row.cached or not self.pads else 0)
            if not self.pads:  # a shorter prompt of a delta would be padding too
                key += (len(row.before), row.loaded.prompt_length)
            by_key.setdefault(key, []).append(row)

        def lengths(row: Row) -> tuple[int, int]:
            return 0 if row.cached or self.holds else row.loaded.prompt_length, len(row.before) - row.cached

        return [group for some in by_key.values() for group in split_rows(some, lengths, self.backbone, tokens)]

    def read(self, rows: list[Row]) -> tuple[RunningBatch, torch.Tensor]:
        """Let rows read their prompts, and return their batch and the scores of their first tokens.

        Where beginnings of their prompts were cached and it does not hold, all have as many tokens left.
        """
        new = [row.before[row.cached :] for row in rows]
        width = max(len(tokens) for tokens in new)
        cache = self._opened(rows)
        before = [self._visible_columns(row, row.cached) for row in rows]
        middle = max(before)
        ids = [[0] * (width - len(tokens)) + tokens for tokens in new]
        mask = [
            [0] * (middle - size) + [1] * size + [0] * (width - len(tokens)) + [1] * len(tokens)
            for size, tokens in zip(before, new, strict=True)
        ]
        logits = self._forward(rows, cache, ids, mask, [len(row.before) - width for row in rows], width)
        for row in rows:
            row.length, row.cached_prompt = len(row.before), None
        if any(size and len(tokens) < width for size, tokens in zip(before, new, strict=True)):
            cache = close_gaps(cache, middle, before, [len(tokens) for tokens in new])
        return RunningBatch(rows, cache), logits

    def opened(self, row: Row) -> RunningBatch:
        """Return a batch of a row whose prompt is read in parts, of which it has read what was cached."""
        cache = self._opened([row])
        row.length, row.cached_prompt = row.cached, None
        return RunningBatch([row], cache)

    def _opened(self, rows: Sequence[Row]) -> Cache:
        """Return a cache with what stands before the tokens that rows are to read."""
        width = max(self._visible_columns(row, row.cached) for row in rows)
        if not width:
            return new_cache()
        width += self._hidden_columns(rows)
        cache = empty_columns(self.like, len(rows), width)
        for number, row in enumerate(rows):
            made = self.preamble(row.loaded)
            end, states = width, made.prompt
            if row.cached:
                assert row.cached_prompt is not None
                states = row.cached_prompt.states
            if states:
                end = write_columns(cache, number, end, states, row.loaded.prompt_length + row.cached)
            if made.prefix and row.loaded.prefix is not None:
                write_columns(cache, number, end, _prefix_states(row.loaded.prefix), made.prefix)
        return cache

    def read_part(self, batch: RunningBatch, tokens: int) -> torch.Tensor:
        """Let a row that is alone in its batch read further tokens of its prompt, and return the scores after them.

        A row that reports its prompt has the scores (tokens, vocabulary) after each of them, others after the last.
        """
        (row,) = batch.rows
        new = row.before[row.length : row.length + tokens]
        mask = [[1] * (self._visible_columns(row) + len(new))]
        keep = len(new) if row.job.request.sampling.prompt_logprobs else 1
        logits = self._forward([row], batch.cache, [new], mask, [row.length], len(new), keep=keep)
        row.length += len(new)
        return logits

    def step(self, batch: RunningBatch) -> torch.Tensor:
        rows, width = batch.rows, columns(batch.cache) - self._hidden_columns(batch.rows)
        mask = [[0] * (width - size) + [1] * (size + 1) for size in map(self._visible_columns, rows)]
        logits = self._forward(rows, batch.cache, [[row.last] for row in rows], mask, [row.length for row in rows], 1)
        for row in rows:
            row.length += 1
        return logits

    def _visible_columns(self, row: Row, length: int | None = None) -> int:
        """The columns of the mask that are a row's: its preamble, and so many of its tokens."""
        return self.preamble(row.loaded).columns + (row.length if length is None else length)

    def _hidden_columns(self, rows: Sequence[Row]) -> int:
        """The columns of a cache that a mask leaves out, since the hook of prompts adds them."""
        return 0 if self.holds else max(row.loaded.prompt_length for row in rows)

    def _forward(
        self,
        rows: list[Row],
        cache: Cache,
        ids: list[list[int]],
        mask: list[list[int]],
        starts: list[int],
        width: int,
        *,
        keep: int = 1,
        with_preambles: bool = True,
    ) -> torch.Tensor:
        """Run the model on tokens of which each row's stand after its preamble; starts are positions without it.

        It returns the scores (rows * keep, vocabulary) of the last tokens of each row, of `keep` each.
        """
        left_out = None
        if self.holds and with_preambles:
            starts = [start + row.loaded.prompt_shift for row, start in zip(rows, starts, strict=True)]
            left_out = frozenset[Edit]().union(*(self.preamble(row.loaded).edits for row in rows))
        device = self.backbone.device
        inputs: dict[str, Any] = {
            "input_ids": torch.tensor(ids, device=device),
            "attention_mask": torch.tensor(mask, device=device),
            "past_key_values": cache,
            "use_cache": True,
            **({"logits_to_keep": keep} if self.keeps else {}),
        }
        if self.numbered:
            begin = torch.tensor(starts, device=device)[:, None]
            inputs["position_ids"] = (begin + torch.arange(width, device=device)).clamp(min=0) + self.first
        output = self.backbone.run(
            [row.loaded for row in rows],
            lambda: self.model(**inputs).logits[:, -keep:].flatten(0, 1),
            left_out,
            [row.job.row_task for row in rows],
        )
        return output.float().cpu()

    def selected(self, parts: Sequence[tuple[RunningBatch, Sequence[int]]]) -> RunningBatch:
        rows = [batch.rows[number] for batch, numbers in parts for number in numbers]
        width = max(map(self._visible_columns, rows)) + self._hidden_columns(rows)
        return RunningBatch(rows, assemble([(batch.cache, numbers) for batch, numbers in parts], width))


def _prefix_states(prefix: CacheablePrefix) -> States:
    """The keys and values of a prefix, which its edits hold."""
    with torch.inference_mode():
        return [*prefix.states()]


class EncoderDecoderRunner(Runner):
    """Reads texts and makes steps with an encoder-decoder."""

    def __init__(self, backbone: Backbone, tokenizer: Any) -> None:
        super().__init__(backbone)
        forced = {} if tokenizer is None else forced_bos_options(tokenizer, self.model)
        config: Any = self.model.generation_config
        self.forced = forced
        start = forced.get("decoder_start_token_id", config.decoder_start_token_id)
        start = config.bos_token_id if start is None else start
        if start is None:
            raise DeltuneError(f"{type(self.model).__name__} does not say with which token its decoder starts")
        self.starts = [int(token) for token in (start if isinstance(start, list) else [start])][:1]
        self.table = None
        if (path := backbone.last_stack.positions) is not None:
            table = self.model.get_submodule(path)
            shared = backbone.first_stack.positions == path
            weight = parameters_of(table).get("weight")
            self.table = table if weight is not None and weight.dim() == 2 and not shared else None
        self.pads = True  # whether rows whose decoders are at different lengths may be in one batch. It is measured.
        self.pads = self.same(self._joint_and_alone)
        if not self.pads:
            self.table = None

    def start_tokens(self, job: Job) -> list[int]:
        """Return what stands before the first token that is generated: what the decoder starts with."""
        return self.starts

    def _joint_and_alone(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores of two rows in one batch, of which one began later, and one by one."""
        first, second = (probe_row(tokens, self.base) for tokens in self.prompts)
        first.before = second.before = self.starts
        one, _ = self.read([first])
        first.generated.append(self.last // 4)
        self.step(one)
        first.generated.append(self.last // 5)
        other, _ = self.read([second])
        second.generated.append(self.last // 6)
        joint = self.step(self.selected([(one, [0]), (other, [0])]))
        first.length -= 1
        second.length -= 1
        set_columns(one.cache, 2)
        alone = torch.cat([self.step(self.selected([(one, [0])])), self.step(self.selected([(other, [0])]))])
        return joint, alone

    def groups(self, rows: Sequence[Row], tokens: int) -> list[list[Row]]:
        def lengths(row: Row) -> tuple[int, int]:
            return row.loaded.prompt_length, len(row.job.tokens)

        return split_rows(rows, lengths, self.backbone, tokens)

    def read(self, rows: list[Row]) -> tuple[RunningBatch, torch.Tensor]:
        """Let the encoder read the texts of rows, and return their batch and the scores of their first tokens."""
        device = self.backbone.device
        texts = [row.job.tokens for row in rows]
        width = max(len(text) for text in texts)
        pad = getattr(self.model.config.get_text_config(), "pad_token_id", None) or 0
        cache, cross = new_cache(), new_cache()
        inputs = {
            "input_ids": torch.tensor([text + [pad] * (width - len(text)) for text in texts], device=device),
            "attention_mask": torch.tensor([[1] * len(t) + [0] * (width - len(t)) for t in texts], device=device),
            "decoder_input_ids": torch.tensor([row.before for row in rows], device=device),
        }
        logits = self._forward(rows, inputs, cache, cross)
        for row in rows:
            row.length, row.encoded = len(row.before), len(row.job.tokens)
        return RunningBatch(rows, cache, cross), logits

    def step(self, batch: RunningBatch) -> torch.Tensor:
        assert batch.cross is not None
        rows, device = batch.rows, self.backbone.device
        known, keys = columns(batch.cache), columns(batch.cross)
        text = keys - max(row.loaded.prompt_length for row in rows)
        width = int(self.model.config.get_text_config().hidden_size)
        inputs = {
            "encoder_outputs": BaseModelOutput(torch.zeros(1, 1, width, device=device).expand(len(rows), keys, width)),
            "attention_mask": torch.tensor([[1] * r.encoded + [0] * (text - r.encoded) for r in rows], device=device),
            "decoder_input_ids": torch.tensor([[row.last] for row in rows], device=device),
            "decoder_attention_mask": torch.tensor(
                [[0] * (known - row.length) + [1] * (row.length + 1) for row in rows], device=device
            ),
        }
        with self._positions(rows):
            logits = self._forward(rows, inputs, batch.cache, batch.cross)
        for row in rows:
            row.length += 1
        return logits

    def _positions(self, rows: list[Row]) -> contextlib.AbstractContextManager[None]:
        """Look up each row's own position, where the family counts the columns of the cache."""
        table, stack = self.table, self.backbone.last_stack.name
        if table is None or not self.pads or len({row.length for row in rows}) == 1:
            return contextlib.nullcontext()
        weight = parameters_of(table)["weight"]
        assert weight is not None
        unused = unused_position_rows(table)
        at = torch.tensor(
            [r.length + r.loaded.shifts.get(stack, 0) + unused for r in rows], device=self.backbone.device
        )
        return replaced_output(table, lambda: weight[at][:, None])

    def _forward(self, rows: list[Row], inputs: dict[str, Any], cache: Cache, cross: Cache) -> torch.Tensor:
        both = EncoderDecoderCache(cache, cross)
        call = {**inputs, "past_key_values": both, "use_cache": True}
        output = self.backbone.run(
            [row.loaded for row in rows],
            lambda: self.model(**call).logits[:, -1],
            tasks=[row.job.row_task for row in rows],
        )
        return output.float().cpu()

    def selected(self, parts: Sequence[tuple[RunningBatch, Sequence[int]]]) -> RunningBatch:
        rows = [batch.rows[number] for batch, numbers in parts for number in numbers]
        width = max(row.loaded.prompt_length for row in rows) + max(row.encoded for row in rows)
        cache = assemble([(batch.cache, numbers) for batch, numbers in parts], max(row.length for row in rows))
        cross = [(batch.cross, numbers) for batch, numbers in parts if batch.cross is not None]
        return RunningBatch(rows, cache, assemble(cross, width, at_end=False))


def split_rows(
    rows: Sequence[Row], lengths: Callable[[Row], tuple[int, int]], backbone: Backbone, tokens: int
) -> list[list[Row]]:
    """Split newcomers into groups that are read in one pass, rows of one delta beside each other."""
    groups = split_by_length(rows, lengths, pass_overhead(backbone.device), tokens)
    return [sorted(group, key=lambda row: row.loaded.internal or "") for group in groups]


def probe_row(tokens: list[int], base: LoadedDelta) -> Row:
    """A row that belongs to no request, to measure what the model does with padding."""
    job = Job(Request("generate", tokens=tuple(tokens)), {"input_ids": tokens}, loaded=base, started=time.monotonic())
    builder = TextBuilder(lambda _: "", ())
    return Row(
        job,
        TokenChooser(Sampling(temperature=0.0), LogitsProcessorList(), lambda token, _: (str(token), None)),
        builder,
        tokens,
    )
