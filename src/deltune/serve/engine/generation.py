"""Continuous batches: rows of any deltas join and leave between two steps, each with its own sampling and randomness.

Why not transformers' own continuous batching: it packs all requests into one row of tokens, (1, n), with paged
attention functions of its own. Deltas are assigned to rows of the batch, and act inside the attention functions that
deltune registers (prefixes), on input embeddings (prompts) and by row index (everything else), none of which sees a
packed request; it also knows neither encoder-decoders nor input embeddings. Here every request is a row, over caches of
transformers' own classes, and what a row gets is what `generate` inside of `rows()` gives it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from ...templates import Tokens
from .backbone import Backbone
from .cache import columns, copy_row_end, set_columns
from .encoding import LaneContext, answer_of, not_finite
from .jobs import Job, RequestEncoder
from .prompt_cache import PromptCache
from .queue import FairQueue
from .requests import FinishReason, TokenChoice, ToolCall
from .runners import DecoderRunner, EncoderDecoderRunner, Row, RunningBatch
from .sampling import TextBuilder, TokenChooser, config_processors
from .tools import CallReader

NO_CALLS: tuple[ToolCall, ...] = ()
QUANTUM = 32
"""By how many tokens a tenant must have been served more than a waiting one before a row of it is put aside."""


@dataclass
class EngineContext(LaneContext):
    """What all lanes of a server share, those that generate included."""

    encoder: RequestEncoder  # turns tokens into text
    prompt_cache: PromptCache  # the beginnings of prompts
    count: Callable[[int], None]  # counts generated tokens
    # what makes the steps of each model
    runners: dict[Backbone, DecoderRunner | EncoderDecoderRunner] = field(default_factory=dict)

    def runner(self, backbone: Backbone) -> DecoderRunner | EncoderDecoderRunner:
        """Return what makes the steps of a model; all lanes of the model have the same."""
        if backbone not in self.runners:
            if backbone.is_encoder_decoder:
                self.runners[backbone] = EncoderDecoderRunner(backbone, self.encoder.tokenizer)
            else:
                self.runners[backbone] = DecoderRunner(backbone)
        return self.runners[backbone]


class GenerationLane:
    """Requests that may share the batches of a language model."""

    def __init__(self, backbone: Backbone, context: EngineContext) -> None:
        self.backbone, self.context, self.share = backbone, context, context.share
        self.queue: FairQueue[Job] = FairQueue(context.share)
        self.long: FairQueue[Job] = FairQueue(context.share)  # requests whose prompts are to be read in parts
        self.batches: list[RunningBatch] = []
        self.reading: list[RunningBatch] = []  # a row each, whose long prompt is read in parts
        self.paused: dict[Job, RunningBatch] = {}
        self.runner = context.runner(backbone)
        self.ends = context.encoder.end_tokens(backbone.model)

    # -- what the engine asks

    @property
    def busy(self) -> bool:
        return bool(self.batches) or bool(self.reading) or len(self.queue) > 0 or len(self.long) > 0

    def jobs(self) -> Iterator[Job]:
        """Iterate over the requests that are here, or at least the next one of each tenant."""
        yield from (row.job for row in self._rows())
        yield from (*self.queue.heads(), *self.long.heads())

    def due(self, now: float) -> float:
        """Return in how many seconds a step should begin: a running batch is joined at once."""
        return 0.0 if self.busy else self.context.limits.wait

    def drop(self, job: Job) -> bool:
        """Take a request out, wherever it is; return whether it was here."""
        if self.queue.remove(job) or self.long.remove(job):
            self.paused.pop(job, None)
            return True
        return any(row.job is job for row in self._rows())

    def advance(self) -> None:
        """Run one step: newcomers read their prompts, one long prompt is read further, and every row gets a token."""
        stepping = [batch for batch in self.batches if batch.live]
        self.batches = []
        self.reading = [batch for batch in self.reading if batch.live]
        stepping = self._merged(stepping)
        arrived = [*self._admit(stepping), *self._read_on()]
        stepping = [batch for batch in stepping if batch.live]
        for batch in stepping:
            self.batches += self._step(batch)
        self.batches = self._merged([batch for batch in (*self.batches, *arrived) if batch.live])

    def _rows(self) -> Iterator[Row]:
        for batch in (*self.batches, *self.reading):
            yield from (row for row in batch.rows if not row.job.done)

    # -- who is in the batch

    def _admit(self, stepping: list[RunningBatch]) -> list[RunningBatch]:
        """Let waiting requests in, as far as there is room, and return their batches after they have read."""
        limits = self.context.limits
        arrived: list[RunningBatch] = []
        fresh: list[Row] = []
        tokens = 0
        while (job := self._next()) is not None:
            if sum(len(batch.live) for batch in (*stepping, *arrived, *self.reading)) + len(fresh) >= limits.rows:
                if not self._put_aside(job, stepping):
                    break
                continue
            if job in self.paused:
                self.queue.remove(job)
                arrived.append(self.paused.pop(job))
                continue
            if fresh and tokens + len(job.tokens) > limits.tokens and not self._is_long(job):
                break
            if not self.long.remove(job):
                self.queue.remove(job)
            self.context.start(job)
            try:
                row = self._row(job)
                rest, is_reported = len(row.before) - row.cached, job.request.sampling.prompt_logprobs
                if isinstance(self.runner, DecoderRunner) and (is_reported or rest > limits.prefill):
                    self.reading.append(self.runner.opened(row))
                    continue
                self.share.charge(job.tenant, len(job.tokens) - row.cached)
                tokens += len(job.tokens)
                fresh.append(row)
            except Exception as error:
                self.context.finish(job, error)
        for group in self.runner.groups(fresh, limits.tokens):
            arrived += self._read(group)
        return arrived

    def _is_long(self, job: Job) -> bool:
        """Say that a prompt is read in parts: not by an encoder, whose tokens see the later ones.

        So is one that is reported, since the scores after all of its tokens are large.
        """
        is_long = len(job.tokens) > self.context.limits.prefill or job.request.sampling.prompt_logprobs
        return is_long and isinstance(self.runner, DecoderRunner)

    def _next(self) -> Job | None:
        """The request that is to join next. A tenant has one long prompt read at a time, and its others wait apart.

        Otherwise the long prompts of one tenant would have all places of the batch, and its own short ones would wait
        behind them.
        """
        while (job := self.queue.peek()) is not None and self._is_long(job) and job not in self.paused:
            self.queue.remove(job)
            self.long.push(job)
        reading = {batch.rows[0].job.tenant for batch in self.reading}
        candidates = [one for one in self.long.heads() if one.tenant not in reading]
        if job is not None:
            candidates.append(job)
        return min(candidates, key=lambda one: (self.share.of(one.tenant), one.submitted), default=None)

    def _ends(self, job: Job) -> Tokens:
        """Return the tokens that end an answer: the model's own, and those that the delta's run trained."""
        return (*self.ends, *(job.version.trained.end_tokens or ()))

    def _row(self, job: Job) -> Row:
        before = self.runner.start_tokens(job)
        sampling = job.request.sampling
        processors = config_processors(
            self.backbone.model, len(before), sampling.max_tokens, self._ends(job), self.runner.forced
        )
        if job.grammar is not None:
            processors.append(job.grammar.begin(len(before), self._ends(job)))
        encoder, is_decoder = self.context.encoder, not self.backbone.is_encoder_decoder
        chooser = TokenChooser(sampling, processors, encoder.token_text)
        builder = TextBuilder(encoder.decode, sampling.stop, before if is_decoder else (), encoder.special_tokens)
        reader = None if job.call_form is None else CallReader(job.call_form, job.request.tools)
        row = Row(job, chooser, builder, before, reader=reader)
        if is_decoder and not sampling.prompt_logprobs:
            row.cached_prompt, row.cached = self.context.prompt_cache.find(job.owner, job.version, before)
        return row

    def _read_on(self) -> list[RunningBatch]:
        """Read a part of the long prompt of the tenant who is next; return its batch if it was the last part."""
        if not self.reading:
            return []
        batch = min(self.reading, key=lambda one: (self.share.of(one.rows[0].job.tenant), one.rows[0].job.submitted))
        (row,) = batch.rows
        before = row.length
        try:
            assert isinstance(self.runner, DecoderRunner)
            logits = self.runner.read_part(batch, self.context.limits.prefill)
            if row.job.request.sampling.prompt_logprobs:
                row.prompt += row.chooser.read(logits, row.before, before)
        except Exception as error:
            self.reading.remove(batch)
            self._end(row, error)
            return []
        self.share.charge(row.job.tenant, row.length - before)
        if row.length < len(row.before):
            return []
        self.reading.remove(batch)
        self._remember(batch)
        self._choose(batch, logits[-1:])
        return [batch]

    def _put_aside(self, job: Job, stepping: list[RunningBatch]) -> bool:
        """Put aside a row of a tenant that was served more than this one and has more than its share of the batch."""
        rows = [(batch, row) for batch in stepping for row in batch.rows if not row.job.done]
        if len(self.paused) >= self.context.limits.rows:
            return False
        held = Counter(row.job.tenant for _, row in rows)
        if job.tenant in held and held[job.tenant] * len(held) >= len(rows):
            return False
        tenants = len(set(held) | {job.tenant})
        floor = self.share.of(job.tenant) + QUANTUM
        greedy = [t for t in held if held[t] * tenants > len(rows) and self.share.of(t) >= floor]
        if not greedy:
            return False
        tenant = max(greedy, key=self.share.of)
        its = [(batch, row) for batch, row in rows if row.job.tenant == tenant]
        batch, row = max(its, key=lambda pair: pair[1].job.started or 0.0)
        number = batch.rows.index(row)
        self.paused[row.job] = self.runner.selected([(batch, [number])])
        self.paused[row.job].alone = batch.alone
        kept = [i for i in batch.live if i != number]
        stepping[stepping.index(batch)] = (
            self.runner.selected([(batch, kept)]) if kept else RunningBatch([], batch.cache, batch.cross)
        )
        self.queue.push(row.job, first=True)
        return True

    def _merged(self, batches: Sequence[RunningBatch]) -> list[RunningBatch]:
        """Batches that may be one are made one, and rows that have ended are taken out."""
        groups: dict[object, list[RunningBatch]] = {}
        for batch in batches:
            row = batch.rows[batch.live[0]]  # where rows may not be padded, all of a batch have the same lengths
            key: object = 0 if self.runner.pads else (row.length, row.loaded.prompt_length)
            groups.setdefault(batch if batch.alone else key, []).append(batch)
        merged = []
        for group in groups.values():
            if len(group) == 1 and len(group[0].live) == len(group[0].rows):
                merged.append(group[0])
            else:
                made = self.runner.selected([(batch, batch.live) for batch in group])
                made.alone = group[0].alone
                merged.append(made)
        return merged

    # -- steps

    def _read(self, rows: list[Row]) -> list[RunningBatch]:
        """Let rows read their prompts together, or each alone if that fails, so that only the guilty one fails."""
        try:
            batch, logits = self.runner.read(rows)
        except Exception as error:
            if len(rows) > 1:
                return [batch for row in rows for batch in self._read([row])]
            self._end(rows[0], error)
            return []
        self._remember(batch)
        self._choose(batch, logits)
        return [batch]

    def _remember(self, batch: RunningBatch) -> None:
        """Keep the beginnings of prompts."""
        cache = self.context.prompt_cache
        for number, row in enumerate(batch.rows):
            if batch.cross is None and cache.wants(row.job.owner, row.loaded, row.before):
                length = row.length + row.loaded.prompt_length
                cache.keep(row.job.owner, row.loaded, row.before, copy_row_end(batch.cache, number, length))

    def _step(self, batch: RunningBatch) -> list[RunningBatch]:
        """Give every row of a batch its next token; if that fails, each row alone."""
        before = columns(batch.cache)
        try:
            logits = self.runner.step(batch)
        except Exception as error:
            set_columns(batch.cache, before)
            if len(batch.rows) == 1:
                self._end(batch.rows[0], error)
                return []
            singles = [self.runner.selected([(batch, [number])]) for number in batch.live]
            done = [made for single in singles for made in self._step(single)]
            nobody_failed = len(done) == len(singles)
            for single in done:
                single.alone = nobody_failed  # together they fail, and alone none does
            return done
        self._choose(batch, logits)
        return [batch]

    def _choose(self, batch: RunningBatch, logits: torch.Tensor) -> None:
        """Choose the next token of each row by its own settings."""
        plain = logits.argmax(-1).tolist()
        fine = logits.isnan().any(-1).logical_not() & logits.isposinf().any(-1).logical_not()
        generated = 0
        for number, (row, is_fine) in enumerate(zip(batch.rows, fine.tolist(), strict=True)):
            if row.job.done:
                continue
            if not row.job.request.sampling.max_tokens:
                self._end(row, "length")
                continue
            try:
                if not is_fine:
                    raise not_finite(row.job)
                if row.chooser.is_plain:
                    choice = TokenChoice(plain[number], "")
                else:
                    choice = row.chooser.choose(logits[number], [*row.before, *row.generated])
                self._take(row, choice, ends_anyway=plain[number] in self._ends(row.job))
                generated += 1
            except Exception as error:
                self._end(row, error)
        self.context.count(generated)

    def _take(self, row: Row, choice: TokenChoice, ends_anyway: bool) -> None:
        """Add a token to a row, tell its listener, and end the row if it was the last.

        `ends_anyway` says that the most likely token was one that ends the answer. BART's configs make the last token
        of a full answer such a token, whatever the model says.
        """
        self.share.charge(row.job.tenant, 1)
        last = len(row.generated) + 1 >= row.job.request.sampling.max_tokens
        if choice.token in self._ends(row.job):
            if row.job.request.sampling.prompt_logprobs:
                row.choices.append(choice)
            row.builder.end(choice.token)
            rest = row.builder.take(final=True)
            self._tell_rest(row, choice.token, rest if row.reader is None else row.reader.show(choice.token, rest))
            self._end(row, "length" if last and row.chooser.forces_end and not ends_anyway else "stop")
            return
        row.generated.append(choice.token)
        row.builder.add(choice.token)
        if last:
            row.builder.end()
        text = row.builder.take(final=last)
        self._tell(row, replace(choice, text=text if row.reader is None else row.reader.show(choice.token, text)))
        if row.builder.stopped:
            self._end(row, "stop")
        elif last:
            self._end(row, "length")

    def _tell(self, row: Row, choice: TokenChoice) -> None:
        """Add a token to the answer."""
        row.choices.append(choice)
        if row.job.listener is not None:
            row.job.listener(choice)

    def _tell_rest(self, row: Row, token: int, text: str) -> None:
        """Add only text, which the tokens before have left."""
        if text:
            row.choices[-1] = replace(row.choices[-1], text=row.choices[-1].text + text)
            if row.job.listener is not None:
                row.job.listener(TokenChoice(token, text))

    def _end(self, row: Row, result: FinishReason | BaseException) -> None:
        if isinstance(result, BaseException):
            self.context.finish(row.job, result)
            return
        text, calls = row.builder.text, NO_CALLS
        if row.reader is not None:
            text, rest, calls = row.reader.end(text)
            self._tell_rest(row, row.last, rest)
        answer = answer_of(
            row.job, cached_tokens=row.cached, text=text, tokens=tuple(row.choices), prompt=tuple(row.prompt),
            calls=calls, finish_reason=result,
        )  # fmt: skip
        self.context.finish(row.job, answer)
