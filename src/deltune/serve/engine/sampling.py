"""The next token of one row: chosen with the row's own settings and random numbers, and turned into text."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from transformers import LogitsProcessorList
from transformers.generation import logits_process

from ...compat import logits_processors
from ...errors import DeltuneError, validation_problems
from ..errors import InvalidRequest
from .requests import Sampling, TokenChoice, TokenLogprob

TokenText = Callable[[int, int | None], tuple[str, bytes | None]]
"""Returns the text and the bytes of a token, given the token before it."""
MAX_PROMPT_LOGPROBS = 5
"""Likely tokens beside each token of a prompt: the engine's thread writes their texts."""
GREEDY_BELOW = 1e-5
"""Temperatures below this take the most likely token: scores divided by them would not be finite."""


_SAMPLING = TypeAdapter(Sampling)


def check_sampling(sampling: Sampling, has_tokenizer: bool) -> None:
    """Check the settings of a request."""
    problems, logprobs = [], sampling.logprobs
    if sampling.max_tokens == 0 and not sampling.prompt_logprobs:
        problems.append("max_tokens: give at least 1 (0 only with prompt_logprobs)")
    try:
        _SAMPLING.validate_python(dict(vars(sampling)))
    except ValidationError as error:
        problems += validation_problems(error, show_values=True)
    if sampling.prompt_logprobs and isinstance(logprobs, int) and logprobs > MAX_PROMPT_LOGPROBS:
        problems.append(f"logprobs: with prompt_logprobs {MAX_PROMPT_LOGPROBS} at most, not {logprobs}")
    if not has_tokenizer and (sampling.stop or sampling.json_schema is not None):
        problems.append("stop and json_schema need texts, and this server has no tokenizer")
    if problems:
        raise InvalidRequest("the sampling settings cannot be used: " + "; ".join(problems))


class TokenChooser:
    def __init__(self, sampling: Sampling, processors: LogitsProcessorList, token_text: TokenText) -> None:
        self.sampling, self.processors, self.token_text = sampling, processors, token_text
        self.generator: torch.Generator | None = None
        if sampling.temperature >= GREEDY_BELOW:
            self.warpers = LogitsProcessorList([logits_process.TemperatureLogitsWarper(float(sampling.temperature))])
            if sampling.top_k:
                self.warpers.append(logits_process.TopKLogitsWarper(sampling.top_k))
            if sampling.top_p < 1:
                self.warpers.append(logits_process.TopPLogitsWarper(sampling.top_p))
            self.generator = torch.Generator()
            if sampling.seed is None:
                self.generator.seed()
            else:
                self.generator.manual_seed(sampling.seed % (1 << 63))

    @property
    def is_plain(self) -> bool:
        """Takes the most likely token and tells nothing else."""
        return self.generator is None and not self.processors and self.sampling.logprobs is None

    @property
    def forces_end(self) -> bool:
        """The model's generation config forces an answer of full length to end with an end token."""
        return any(isinstance(one, logits_process.ForcedEOSTokenLogitsProcessor) for one in self.processors)

    def choose(self, logits: torch.Tensor, tokens: Sequence[int]) -> TokenChoice:
        """Return the next token, without its text."""
        scores = logits
        if self.processors:
            ids: Any = torch.tensor([list(tokens)])
            scores = self.processors(ids, logits[None].clone())[0]
        token = int(scores.argmax()) if self.generator is None else self._draw(scores)
        if self.sampling.logprobs is None:
            return TokenChoice(token, "")
        return self._with_likeliest(token, logits.log_softmax(-1), tokens[-1] if tokens else None)

    def read(self, logits: torch.Tensor, prompt: Sequence[int], start: int) -> list[TokenChoice]:
        """Return the tokens of a prompt that scores (tokens, vocabulary) predict: the first stands behind `start`.

        The first token of all, which nothing predicts, comes along with the second.
        """
        read = []
        if not start:
            first = TokenLogprob(prompt[0], math.nan, *self.token_text(prompt[0], None))
            read.append(TokenChoice(prompt[0], first.text, first))
        for i, row in zip(range(start + 1, len(prompt)), logits.log_softmax(-1), strict=False):
            choice = self._with_likeliest(prompt[i], row, prompt[i - 1])
            read.append(replace(choice, text=choice.chosen.text if choice.chosen else ""))
        return read

    def _with_likeliest(self, token: int, logprobs: torch.Tensor, before: int | None) -> TokenChoice:
        likeliest = logprobs.topk(min(self.sampling.logprobs or 0, len(logprobs))).indices.tolist()
        chosen, *top = (TokenLogprob(i, float(logprobs[i]), *self.token_text(i, before)) for i in (token, *likeliest))
        return TokenChoice(token, "", chosen, tuple(top))

    def _draw(self, scores: torch.Tensor) -> int:
        unused: Any = None
        probabilities = self.warpers(unused, scores[None]).softmax(-1)
        return int(torch.multinomial(probabilities, 1, generator=self.generator))


NOT_APPLIED = {"encoder_repetition_penalty": 1.0, "guidance_scale": 1.0, "encoder_no_repeat_ngram_size": 0}
"""Options of a generation config that need more than the tokens of an answer, with the values that change nothing."""


def config_processors(
    model: Any, prompt_length: int, max_tokens: int, ends: Sequence[int], forced: Mapping[str, Any] | None = None
) -> LogitsProcessorList:
    """Return what a model's generation config does to the scores of greedy decoding and sampling."""
    config = copy.deepcopy(model.generation_config)
    for name, value in {**(forced or {}), "do_sample": False, "max_length": prompt_length + max_tokens}.items():
        setattr(config, name, value)
    if unknown := [name for name, neutral in NOT_APPLIED.items() if getattr(config, name) not in (None, neutral)]:
        raise DeltuneError(
            f"the model's generation config has {', '.join(unknown)}, which a server does not apply; leave it out of "
            "its generation_config.json"
        )
    return logits_processors(model, config, prompt_length, ends)


DECODED_BEFORE = 8
"""Tokens of a prompt that are decoded together with the first token of its continuation."""


class TextBuilder:
    """Makes the text of tokens that come one by one, and finds where it is to stop.

    A special token is no part of the text, but a stop may contain its name. A tokenizer may drop a blank before the
    first token that it is given, so the first one is decoded behind the last ones of the prompt.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        stop: Sequence[str],
        prompt: Sequence[int] = (),
        special: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        self.decode, self.stop = decode, tuple(stop)
        self.text = ""
        self.stopped = False
        self._ids = list(prompt[-DECODED_BEFORE:])
        self._begin, self._read, self._given = 0, len(self._ids), 0
        self._read_text = decode(self._ids) if self._ids else ""
        self._marks: dict[int, str] = {}
        self._marked = ""  # the text with a mark for each special token that a stop contains: half a surrogate pair
        marked = self.stop
        for token, name in sorted(special.items(), key=lambda item: -len(item[1])):
            if any(name in one for one in marked):
                mark = self._marks[token] = chr(0xD800 + len(self._marks))
                marked = tuple(one.replace(name, mark) for one in marked)
        self._marked_stop = tuple(one for one in marked if one not in self.stop)

    def add(self, token: int) -> None:
        """Add a token. A character that is not whole, such as a part of an emoji, waits for the next one."""
        if token in self._marks:
            self._extend("", self._marks[token])
            return
        self._ids.append(token)
        new = self.decode(self._ids[self._begin :])
        if len(new) > len(self._read_text) and not new.endswith("\ufffd"):
            self._accept(new)

    def _accept(self, new: str) -> None:
        piece = new[len(self._read_text) :]
        self._begin, self._read = self._read, len(self._ids)
        self._read_text = self.decode(self._ids[self._begin :]) if self._begin < self._read else ""
        self._extend(piece, piece)

    def _extend(self, piece: str, marked: str) -> None:
        """Add a piece, without and with the marks of special tokens, and end the text at the first stop."""
        before, before_marked = len(self.text), len(self._marked)
        self.text += piece
        self._marked += marked
        ends = [at for stop in self.stop if (at := self.text.find(stop, max(0, before - len(stop) + 1))) >= 0]
        for stop in self._marked_stop:
            if (at := self._marked.find(stop, max(0, before_marked - len(stop) + 1))) >= 0:
                ends.append(len(self._unmarked(self._marked[:at])))
        if ends:
            self.text, self.stopped = self.text[: min(ends)], True

    def _unmarked(self, text: str) -> str:
        return text.translate({ord(mark): None for mark in self._marks.values()})

    def end(self, token: int | None = None) -> None:
        """Take what waits for further tokens as it is."""
        if not self.stopped and self._read < len(self._ids):
            self._accept(self.decode(self._ids[self._begin :]))
        if not self.stopped and token in self._marks:
            self._extend("", self._marks[token])

    def take(self, final: bool = False) -> str:
        """Return the text since the last call, without an end that may be the beginning of a stop."""
        end = len(self.text) if final or self.stopped else len(self.text) - self._held()
        new = self.text[self._given : end] if end > self._given else ""
        self._given = max(self._given, end)
        return new

    def _held(self) -> int:
        """The number of characters at the end that may be the beginning of a stop."""
        marked = beginning_of(self._marked_stop, self._marked)
        return max(len(beginning_of(self.stop, self.text)), len(self._unmarked(marked)))


def beginning_of(stops: Sequence[str], text: str) -> str:
    """Return the longest end of a text that is the beginning of a stop, and not all of it."""
    longest = min(max(map(len, stops), default=1) - 1, len(text))
    tails = (text[len(text) - length :] for length in range(longest, 0, -1))
    return next((tail for tail in tails if any(stop.startswith(tail) for stop in stops)), "")
