"""A request on its way through the engine: its tokens, its future, and which version of its delta it has."""

from __future__ import annotations

import copy
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

from ...errors import DeltuneError, describe_value, excerpt, unknown_name
from ...runtime.delta_schema import TrainedFacts
from ...templates import (
    Tokens,
    begin_token,
    chat_prompt,
    end_tokens,
    special_tokens,
    tokenize_prompts,
    words_to_tag,
)
from ..errors import InvalidRequest
from .backbone import LoadedDelta
from .grammar import Grammar
from .requests import Answer, Request, TokenChoice
from .tools import CallForm, call_form, check_tools

LONG_TEXT = 16_384
"""Characters from which a text is read by a tokenizer of its own, so that no other text waits for it."""

MOST_CHARACTERS = 64
"""Characters for each token that a model can read. A longer text is not given to a tokenizer as a whole."""

PER_MESSAGE = 16
"""Characters that a chat template writes for a message besides its contents, about."""

BYTES = {chr(byte): byte for byte in range(256)} | {letter: byte for byte, letter in bytes_to_unicode().items()}
"""The letters that spell bytes in names of tokens: a byte's own, as in ByT5, or the printable one of byte-level BPE."""

Listener = Callable[[TokenChoice], None]
"""Is called with every token of a stream, in the engine's thread."""


@dataclass(eq=False)
class Job:
    """A request that the engine has accepted."""

    request: Request
    inputs: dict[str, list[int]]  # the arguments of the model, each a list with a value for each token
    # for each token the number of its word, or None; empty if it is not to be tagged
    word_ids: list[int | None] = field(default_factory=list)
    words: list[str] = field(default_factory=list)  # the words to be tagged
    listener: Listener | None = None  # what sees its tokens, or None
    call_form: CallForm | None = None  # how its answer calls tools, if it may
    grammar: Grammar | None = None  # what its answer keeps to, or None
    submitted: float = field(default_factory=time.monotonic)  # when it was accepted, on the monotonic clock
    # its answer. It stays pending until there is one, so that it can be cancelled at any time
    future: Future[Answer] = field(default_factory=Future)
    loaded: LoadedDelta | None = None  # the version of its delta, once it has one
    row_task: int = 0  # the number of its task there, where the delta learned several
    started: float | None = None  # when its first batch began
    lane: object = None  # the queue with its batches that it was put into, once it was
    waiting: bool = True  # whether it waits for its first batch
    done: bool = False  # whether it has ended

    @property
    def tokens(self) -> list[int]:
        return self.inputs["input_ids"]

    @property
    def tenant(self) -> str:
        return self.request.tenant

    @property
    def owner(self) -> tuple[str, int]:
        """Whose cached prompts it may begin with: its tenant's, of the same task."""
        return self.tenant, self.row_task

    @property
    def deadline(self) -> float | None:
        """When it is given up, on the monotonic clock."""
        return None if self.request.timeout is None else self.submitted + self.request.timeout

    @property
    def version(self) -> LoadedDelta:
        """The version of its delta, which it has from when it is ready to its end."""
        assert self.loaded is not None
        return self.loaded

    @property
    def cancelled(self) -> bool:
        """Nobody waits for the answer any more."""
        return self.future.cancelled()

    def end(self, result: Answer | BaseException) -> None:
        """Give the answer, or an error in its place, unless the request was cancelled."""
        with suppress(InvalidStateError):
            if not self.future.set_running_or_notify_cancel():
                return
            if isinstance(result, Answer):
                self.future.set_result(result)
            else:
                self.future.set_exception(result)


class RequestEncoder:
    """Makes the model's arguments of requests. Any thread may call it."""

    def __init__(self, tokenizer: Any, arguments: frozenset[str], is_encoder_decoder: bool, vocabulary: int) -> None:
        self.tokenizer, self.arguments, self.is_encoder_decoder = tokenizer, arguments, is_encoder_decoder
        self.vocabulary = vocabulary
        self.special_tokens = {} if tokenizer is None else special_tokens(tokenizer)
        self._lock = threading.Lock()  # a fast tokenizer has state that two calls must not change at once
        self._long_lock = threading.Lock()
        self._long_tokenizer: Any = None
        self._last_prompt: tuple[object, list[int]] | None = None
        self._call_forms: dict[str | None, CallForm] = {}  # by chat template

    def encode(
        self,
        request: Request,
        listener: Listener | None = None,
        max_length: int | None = None,
        readable: int | None = None,
        trained: TrainedFacts | None = None,
    ) -> Job:
        """Return a request as a job, of inputs as those on which its delta was trained."""
        trained = trained or TrainedFacts()
        names = ("text", "tokens", "words", "messages")
        kinds = [name for name in names if getattr(request, name) is not None]
        if len(kinds) != 1:
            raise InvalidRequest(
                f"a request has one of {', '.join(names)}, and this one has {' and '.join(kinds) or 'none of them'}"
            )
        if request.tokens is None and readable is not None:
            request = bound_characters(request, readable, cut=max_length is not None)
        if request.tokens is not None:
            if request.second_text is not None:
                raise InvalidRequest("second_text goes with a text, and not with tokens")
            return Job(request, {"input_ids": self._checked(request.tokens)}, listener=listener)
        if self.tokenizer is None:
            raise InvalidRequest("this server has no tokenizer; send the token ids of the text")
        for kind, task in (("words", "tag"), ("messages", "generate")):
            if getattr(request, kind) is not None and request.task != task:
                raise InvalidRequest(f"{kind} are an input to {task}; to {request.task}, send a text or token ids")
        if request.task == "generate":
            if request.second_text is not None:
                raise InvalidRequest("second_text is for classifiers of pairs; put both texts into one prompt")
            form = self._call_form(request, trained.chat_template)
            return Job(
                request, {"input_ids": self._prompt(request, trained.chat_template)}, listener=listener, call_form=form
            )
        limits = {} if max_length is None else {"truncation": True, "max_length": max_length}
        words: list[str] = []
        with self._tokenizer_for(request) as tokenizer:
            try:
                if request.task == "tag":
                    words = list(request.words or words_to_tag(request.text or "", trained.columns or {}))
                    encoded = tokenizer(words, is_split_into_words=True, verbose=False, **limits)
                    word_ids = encoded.word_ids(0) if words else []
                else:
                    texts = [request.text or ""] + ([] if request.second_text is None else [request.second_text])
                    encoded, word_ids = tokenizer(*texts, verbose=False, **limits), []
            except Exception as error:
                raise InvalidRequest(f"the tokenizer cannot read the text {excerpt(request.text)}: {error}") from error
        inputs = {
            name: [int(value) for value in values]
            for name, values in encoded.items()
            if name in self.arguments and name != "attention_mask"
        }
        if request.task == "tag" and not words:
            raise InvalidRequest("there is no word to tag")
        if not inputs["input_ids"]:  # it is read as in training
            begin = begin_token(self.tokenizer)
            begin = 0 if begin is None and words else begin
            if begin is None:
                raise InvalidRequest("the text is empty, and the tokenizer has no token for the beginning of a text")
            inputs = {name: [begin if name == "input_ids" else 0] for name in inputs}
            word_ids = [None] if words else []
        return Job(request, inputs, word_ids, words, listener)

    @contextmanager
    def _tokenizer_for(self, request: Request) -> Iterator[Any]:
        """The tokenizer for the text of a request. A long text has a copy, for which nothing else waits."""
        if input_size(request) <= LONG_TEXT:
            with self._lock:
                yield self.tokenizer
            return
        with self._long_lock:
            if self._long_tokenizer is None:
                with self._lock:
                    self._long_tokenizer = copy.deepcopy(self.tokenizer)
            yield self._long_tokenizer

    def _call_form(self, request: Request, chat_template: str | None) -> CallForm | None:
        """Return how the answer calls the tools of a request, or None; also check a chat with calls before it."""
        if not request.tools and not any("tool_calls" in one for one in request.messages or ()):
            return None
        if request.messages is None:
            raise InvalidRequest("tools are for a chat: send messages")
        if chat_template is None and not getattr(self.tokenizer, "chat_template", None):
            return None  # refused where the chat becomes a prompt
        with self._lock:
            try:
                if chat_template not in self._call_forms:
                    self._call_forms[chat_template] = call_form(self.tokenizer, chat_template)
                check_tools(self.tokenizer, request.tools)
            except DeltuneError as error:
                raise InvalidRequest(str(error)) from error
        return self._call_forms[chat_template] if request.tools else None

    def _prompt(self, request: Request, chat_template: str | None) -> list[int]:
        """Token ids of a prompt."""
        text, is_long = request.text or "", input_size(request) > LONG_TEXT
        source = text if request.messages is None else request.messages
        with self._tokenizer_for(request) as tokenizer:
            if is_long and not request.tools and self._last_prompt is not None and self._last_prompt[0] is source:
                return self._last_prompt[1]  # another answer to the same prompt
            if request.messages is not None:
                ids = _chat_tokens(tokenizer, request.messages, chat_template, request.tools)
                self._last_prompt = (source, ids) if is_long and not request.tools else self._last_prompt
                return ids
            try:
                if self.is_encoder_decoder:
                    ids = [int(i) for i in tokenizer(text, verbose=False)["input_ids"]]
                else:
                    ids = list(tokenize_prompts(tokenizer, [text])[0])
            except Exception as error:
                raise InvalidRequest(f"the tokenizer cannot read the text {excerpt(text)}: {error}") from error
            if not ids and (begin := begin_token(tokenizer)) is not None:
                ids = [begin]
            if is_long:
                self._last_prompt = (source, ids)
        if not ids:
            raise InvalidRequest("the prompt is empty, and the tokenizer has no token for the beginning of a text")
        return ids

    def _checked(self, tokens: tuple[int, ...]) -> list[int]:
        ids = list(tokens)
        if not ids:
            raise InvalidRequest("the list of tokens is empty")
        if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
            raise InvalidRequest("tokens must be whole numbers")
        if min(ids) < 0 or max(ids) >= self.vocabulary:
            wrong = next(i for i in ids if not 0 <= i < self.vocabulary)
            raise InvalidRequest(f"token {wrong} is not in the vocabulary, whose ids are 0 to {self.vocabulary - 1}")
        return ids

    def decode(self, tokens: list[int]) -> str:
        """Return the text of tokens without special ones; an empty text without a tokenizer."""
        if self.tokenizer is None:
            return ""
        with self._lock:
            return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def end_tokens(self, model: Any) -> Tokens:
        """Return the tokens that end an answer of a model."""
        with self._lock:
            return end_tokens(self.tokenizer, model)

    def token_text(self, token: int, before: int | None = None) -> tuple[str, bytes | None]:
        """Return the text of one token, special ones included, and its bytes; its number without a tokenizer."""
        if self.tokenizer is None:
            return str(token), None
        with self._lock:
            text = alone = str(self.tokenizer.decode([token]))
            name = self.tokenizer.convert_ids_to_tokens(token) or ""
            if before is not None:
                first, both = (str(self.tokenizer.decode(ids)) for ids in ([before], [before, token]))
                text = both[len(first) :] if both.startswith(first) and len(both) > len(first) else alone
        is_text = alone != "" and "\ufffd" not in alone
        return text, text.encode("utf-8", "replace") if is_text else _spelled_bytes(name, text)


def _spelled_bytes(name: str, text: str) -> bytes:
    """Return the bytes that the name of a token spells, as <0xE2> or with a letter for each; else those of a text."""
    if byte := re.fullmatch("<0x([0-9A-F]{2})>", name):
        return bytes.fromhex(byte[1])
    return bytes(BYTES[letter] for letter in name) if BYTES.keys() >= set(name) else text.encode()


def _chat_tokens(
    tokenizer: Any, messages: Sequence[dict[str, Any]], template: str | None, tools: Sequence[dict[str, Any]] = ()
) -> list[int]:
    """Token ids of a chat, by a chat template or by the tokenizer's."""
    if template is None and not getattr(tokenizer, "chat_template", None):
        raise InvalidRequest(
            "the model's tokenizer has no chat template, so it cannot chat: give it a chat_template, or send the whole "
            "prompt as a text (over HTTP to /v1/completions)"
        )
    try:
        ids = chat_prompt(tokenizer, messages, list(tools) or None, template)
    except Exception as error:  # a template may raise anything about what it is given
        raise InvalidRequest(f"the chat template refuses these messages: {str(error)[:300]}") from error
    if not ids:
        raise InvalidRequest("the chat template makes nothing of these messages")
    return ids


def bound_characters(request: Request, readable: int, cut: bool) -> Request:
    """Return a request without the ends of texts that are far beyond what the model can read.

    A tokenizer takes seconds for megabytes of text, all of which would be cut off or refused.
    """
    most = readable * MOST_CHARACTERS
    if (size := input_size(request)) <= most:
        return request
    if not cut:
        advice = "" if request.task == "generate" else "; truncate_prompt_tokens: -1 cuts the text"
        raise InvalidRequest(f"the input has {size:,} characters, and the model can read {readable:,} tokens{advice}")
    text, second = (None if one is None else one[:most] for one in (request.text, request.second_text))
    words = None if request.words is None else tuple(word[:most] for word in request.words[:readable])
    return replace(request, text=text, second_text=second, words=words)


def check_request(request: object) -> None:
    """Check that something is a request at all."""
    if not isinstance(request, Request):
        raise InvalidRequest(
            f"a server answers a Request, and this is {describe_value(request)}: give "
            'Request("classify", text=…) of deltune.serve.engine.requests'
        )


def named(delta: str | None) -> str:
    """Return how messages name what answers a request."""
    return "the base model" if delta is None else f"delta {delta!r}"


def check_pair(request: Request, takes_pairs: bool | None) -> None:
    """Check that a classified text comes with a second one if and only if its delta was trained on pairs."""
    if request.text is None or takes_pairs is None or takes_pairs == (request.second_text is not None):
        return
    which = named(request.delta)
    raise InvalidRequest(
        f"{which} classifies pairs of texts: send the second one too (over HTTP in pair)"
        if takes_pairs
        else f"{which} classifies single texts: send no second one (over HTTP no pair)"
    )


def input_size(request: Request) -> int:
    """Return the length of a request's input, in characters or tokens."""
    texts = (request.text or "", request.second_text or "", *(request.words or ()))
    chat = sum(PER_MESSAGE + sum(map(len, map(str, message.values()))) for message in request.messages or ())
    chat += sum(len(str(tool)) for tool in request.tools)
    return sum(map(len, texts)) + len(request.words or ()) + len(request.tokens or ()) + chat


ENDPOINTS = {"generate": "/v1/completions", "classify": "/classify", "tag": "/tag", "embed": "/v1/embeddings"}
"""Where a server is asked for each task."""


def check_task(task: str, tasks: tuple[str, ...], delta: str | None) -> None:
    """Check that a delta can be asked for a task."""
    if task not in ENDPOINTS:
        raise InvalidRequest(unknown_name("task", task, ENDPOINTS))
    if task not in tasks:
        possible = ", ".join(f"{name} ({ENDPOINTS[name]})" for name in tasks) or "nothing"
        raise InvalidRequest(f"{named(delta)} cannot be asked to {task}; it can be asked to {possible}")


def row_task(job: Job, loaded: LoadedDelta) -> int:
    """Return the number of the task that a request names, of a delta that learned several."""
    name, known = job.request.row_task, loaded.row_tasks
    if known and name is None:
        raise InvalidRequest(
            f"delta {loaded.name!r} learned several tasks ({', '.join(known[:20])}): name the one of the input (task)"
        )
    if name is not None and name not in known:
        problem = "the delta has no tasks: leave task out" if not known else unknown_name("task", name, known)
        raise InvalidRequest(problem)
    return known.index(name) if name is not None else 0


class Stream:
    """The tokens of an answer as they come.

    Attributes:
        answer: The whole answer, after the last token.
    """

    def __init__(self, job: Job, items: queue.SimpleQueue[TokenChoice | None]) -> None:
        self._job, self._items = job, items
        self.answer: Answer | None = None
        job.future.add_done_callback(lambda _: items.put(None))

    def __iter__(self) -> Iterator[TokenChoice]:
        return self

    def __next__(self) -> TokenChoice:
        """Wait for the next token."""
        if self.answer is not None:
            raise StopIteration
        item = self._items.get()
        if item is None:
            self.answer = self._job.future.result()
            raise StopIteration
        return item

    def close(self) -> None:
        """Take the request out of its batch, if it is not answered."""
        self._job.future.cancel()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
