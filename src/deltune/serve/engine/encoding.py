"""Dynamic batches for classifiers, taggers and embeddings: one pass answers requests of any deltas."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch.nn.utils.rnn import pad_sequence

from ...errors import DeltuneError
from ...models import first_sub_words, tag_all_words
from ...runtime.padding import Side
from .backbone import Backbone
from .jobs import Job, named
from .queue import FairQueue, FairShare
from .requests import Answer


@dataclass(frozen=True)
class BatchLimits:
    """Sizes of batches, and the time that requests wait for others."""

    tokens: int  # the most tokens of a batch, padding included; a longer request has a batch of its own
    rows: int  # the most requests in a batch
    wait: float  # the longest wait for a fuller batch, in seconds
    prefill: int = 512  # the most tokens of a decoder's prompt that are read in one step; longer ones are read in parts
    pass_seconds: float = 0.1  # about how long a pass of an encoder takes at most, by the speed of the passes before


PASS_OVERHEAD = {"cpu": 64, "cuda": 4096}
"""Cost of a pass besides its tokens, by type of device, as the number of tokens that take as long."""


def pass_overhead(device: torch.device) -> int:
    """Return what a pass costs besides its tokens, as the number of tokens that take as long."""
    return PASS_OVERHEAD.get(device.type, PASS_OVERHEAD["cuda"])


@dataclass
class LaneContext:
    """Limits, functions and counters that all lanes of an engine share."""

    limits: BatchLimits  # how large batches are
    share: FairShare  # the counters of the tenants
    start: Callable[[Job], None]  # is called with requests whose first batch begins
    finish: Callable[[Job, Answer | BaseException], None]  # is called once for each request, with its answer or error


class EncodingLane:
    """Requests that may share a pass of an encoder."""

    def __init__(self, backbone: Backbone, task: str, side: Side | None, context: LaneContext) -> None:
        self.backbone, self.task, self.side = backbone, task, side
        self.limits, self.context = context.limits, context
        self.queue: FairQueue[Job] = FairQueue(context.share)
        tokenizer_pad = getattr(backbone.model.config.get_text_config(), "pad_token_id", None)
        self.overhead = pass_overhead(backbone.device)
        self.options = {"use_cache": False} if "use_cache" in backbone.arguments else {}
        self.pad = 0 if tokenizer_pad is None else int(tokenizer_pad)
        self.speed = math.inf
        """Tokens a second, the overhead of a pass included; of the last passes, the later ones counting more."""

    @property
    def busy(self) -> bool:
        """Requests wait."""
        return len(self.queue) > 0

    def jobs(self) -> Iterator[Job]:
        """Iterate over the requests that are here, or at least the next one of each tenant."""
        yield from self.queue.heads()

    def drop(self, job: Job) -> bool:
        return self.queue.remove(job)

    def due(self, now: float) -> float:
        """Return in how many seconds a pass should begin; 0 for at once."""
        oldest = self.queue.oldest()
        if oldest is None:
            return self.limits.wait
        if len(self.queue) >= self.limits.rows or sum(len(j.tokens) for j in self.queue) >= self.limits.tokens:
            return 0.0
        return max(0.0, oldest + self.limits.wait - now)

    def advance(self) -> None:
        """Answer the next request, and others of similar length, in one pass."""
        waiting = self.queue.next_jobs(self.limits.rows, lambda job: len(job.tokens))
        if self.side is None:
            waiting = [job for job in waiting if _lengths(job) == _lengths(waiting[0])]
        room = min(self.limits.tokens, self.speed * self.limits.pass_seconds - self.overhead)
        split = split_by_length(waiting, _lengths, self.overhead, room)
        (similar,) = (part for part in split if waiting[0] in part)
        jobs = _with_light_tenants(waiting, similar, self.queue.light_tenants(), room)
        for job in jobs:
            self.queue.remove(job)
            self.context.share.charge(job.tenant, len(job.tokens))
            self.context.start(job)
        jobs.sort(key=lambda job: job.version.internal or "")
        began = time.perf_counter()
        try:
            answers = self._compute(jobs)
        except Exception as error:  # each in a pass of its own, so that only the guilty one fails
            answers = [error] if len(jobs) == 1 else [self._alone(job) for job in jobs]
        else:
            speed = (self.overhead + len(jobs) * _width(jobs)) / (time.perf_counter() - began)
            self.speed = (3 * self.speed + speed) / 4 if math.isfinite(self.speed) else speed
        for job, answer in zip(jobs, answers, strict=True):
            self.context.finish(job, answer)

    def _alone(self, job: Job) -> Answer | BaseException:
        try:
            (answer,) = self._compute([job])
            return answer
        except Exception as error:
            return error

    def _compute(self, jobs: Sequence[Job]) -> list[Answer | BaseException]:
        inputs = self._batch(jobs)
        rows = [job.version for job in jobs]
        call = partial(self._states if self.task == "embed" else self._logits, inputs)
        outputs = self.backbone.run(rows, call, tasks=[job.row_task for job in jobs])
        answer = self._embedding if self.task == "embed" else self._labels
        by_token = outputs.dim() > 2
        begins = [outputs.shape[1] - len(job.tokens) if by_token and self.side == "left" else 0 for job in jobs]
        return [answer(job, outputs[row][begins[row] :]) for row, job in enumerate(jobs)]

    def _logits(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        logits: torch.Tensor = self.backbone.model(**inputs, **self.options).logits
        return logits.float().cpu()

    def _batch(self, jobs: Sequence[Job]) -> dict[str, torch.Tensor]:
        """The arguments of the model, padded to the longest row."""
        names = dict.fromkeys(name for job in jobs for name in job.inputs)
        batch = {name: [job.inputs.get(name, [0] * len(job.tokens)) for job in jobs] for name in names}
        if "attention_mask" in self.backbone.arguments:
            batch["attention_mask"] = [[1] * len(job.tokens) for job in jobs]
        fills, side = {"input_ids": self.pad}, self.side or "right"
        return {
            name: pad_sequence([torch.tensor(row) for row in rows], True, fills.get(name, 0), side).to(
                self.backbone.device
            )
            for name, rows in batch.items()
        }

    def _states(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        model: Any = self.backbone.model
        if self.backbone.is_encoder_decoder:
            names = ("input_ids", "attention_mask")
            return model.get_encoder()(**{name: inputs[name] for name in names})[0].float().cpu()
        return model.base_model(**inputs, **self.options)[0].float().cpu()

    def _embedding(self, job: Job, states: torch.Tensor) -> Answer | BaseException:
        # the rows of a prompt stay before an encoder's outputs, which its decoder reads
        first = job.version.prompt_length if self.backbone.is_encoder_decoder else 0
        vector = states[first : first + len(job.tokens)].mean(0)
        if not bool(vector.isfinite().all()):
            return not_finite(job)
        return answer_of(job, embedding=tuple(vector.tolist()))

    def _labels(self, job: Job, logits: torch.Tensor) -> Answer | BaseException:
        """Return the answer of a head; its own labels are the first columns of the widest head's logits."""
        names = job.version.labels
        if not bool(
            logits[..., : len(names)][: len(job.tokens) if job.request.task == "tag" else None].isfinite().all()
        ):
            return not_finite(job)
        if job.request.task == "tag":
            best = logits[: len(job.tokens), : len(names)].argmax(-1).tolist()
            return answer_of(job, tags=tuple(_tags(job, [names[i] for i in best], names)))
        values = logits[: len(names)]
        if job.version.problem_type == "regression" or len(names) == 1:
            return answer_of(job, scores=dict(zip(names, values.tolist(), strict=True)))
        several = job.version.problem_type == "multi_label_classification"
        scores = (values.sigmoid() if several else values.softmax(-1)).tolist()
        return answer_of(job, label=names[int(values.argmax())], scores=dict(zip(names, scores, strict=True)))


def _lengths(job: Job) -> tuple[int, int]:
    """The lengths of a request's prompt and text."""
    return job.version.prompt_length, len(job.tokens)


def _width(jobs: Sequence[Job]) -> int:
    """The length of a pass: its longest text and its longest prompt together."""
    prompts, texts = zip(*map(_lengths, jobs), strict=True)
    return int(max(prompts) + max(texts))


LONGER = 2
"""Greatest factor by which a request of a light tenant lengthens a pass that it joins."""


def _with_light_tenants(
    waiting: Sequence[Job], similar: Sequence[Job], light: Collection[str], room: float
) -> list[Job]:
    """Return the requests of a pass: the next one, the ones of light tenants, and others of similar length.

    A light tenant would otherwise wait for as many passes as there are lengths among the requests before its own.
    Requests that would make the pass far longer have one of their own nevertheless.
    """
    first, *others = waiting
    longest = LONGER * _width(similar)
    order = [first, *(job for job in others if job.tenant in light and _width([first, job]) <= longest)]
    order += [job for job in others if job in similar and job not in order]
    chosen: list[Job] = []
    for job in order:
        if not chosen or (len(chosen) + 1) * _width([*chosen, job]) <= room:
            chosen.append(job)
    return chosen


T = TypeVar("T")


def split_by_length(
    requests: Sequence[T], lengths: Callable[[T], tuple[int, int]], overhead: int, tokens: float = math.inf
) -> list[list[T]]:
    """Split requests into passes so that the fewest tokens are computed, padding and prompts included.

    A pass is as long as its longest text and its longest prompt together, for all of its rows.
    """
    ordered = sorted(requests, key=lengths)
    sizes = [lengths(request) for request in ordered]
    costs, begins = [0], [0]  # of the first n requests: the least cost, and where their last pass begins
    for end in range(1, len(ordered) + 1):
        text = prompt = 0
        best: tuple[int, int] | None = None
        for begin in range(end - 1, -1, -1):
            prompt, text = max(prompt, sizes[begin][0]), max(text, sizes[begin][1])
            size = (end - begin) * (text + prompt)
            if best is not None and size > tokens:
                break
            cost = costs[begin] + overhead + size
            best = (cost, begin) if best is None else min(best, (cost, begin))
        assert best is not None
        costs.append(best[0])
        begins.append(best[1])
    parts: list[list[T]] = []
    end = len(ordered)
    while end:
        parts.insert(0, ordered[begins[end] : end])
        end = begins[end]
    return parts


def _tags(job: Job, tags: list[str], labels: Sequence[str]) -> list[tuple[str, str]]:
    """The tags of words, each of its first token; `tag_all_words` gives a word without a token its own."""
    if not job.words:
        return [(str(token), tag) for token, tag in zip(job.tokens, tags, strict=True)]
    tagged = {word: tags[place] for word, place in first_sub_words(job.word_ids).items()}
    return list(zip(job.words, tag_all_words(tagged, len(job.words), labels), strict=True))


def not_finite(job: Job) -> DeltuneError:
    return DeltuneError(
        f"{named(job.request.delta)} gives numbers for this input that are not finite, so there is no answer"
    )


def answer_of(job: Job, **values: Any) -> Answer:
    """Return the answer of a request, with the times and versions that every answer has."""
    now = time.monotonic()
    started = now if job.started is None else job.started
    return Answer(
        delta=job.request.delta,
        version=job.version.version,
        prompt_tokens=len(job.tokens),
        queued=started - job.submitted,
        computed=now - started,
        **values,
    )
