"""Questions to a server and its answers: requests, sampling, answers, and the facts about deltas and load."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from ...models import Served

Task = Served

FinishReason = Literal["stop", "length"]

DELTA_NAME = r"[A-Za-z0-9_-][A-Za-z0-9_.@+-]{0,199}"
"""A regular expression for names of deltas: one part of a path that is not hidden."""


Count = Annotated[int, Field(strict=True, ge=0)]
Switch = Annotated[bool, Field(strict=True)]


@dataclass(frozen=True)
class Sampling:
    """Settings for choosing tokens.

    Attributes:
        max_tokens: The most tokens to generate.
        temperature: 0 takes the most likely token.
        top_p: Only tokens within this probability mass are drawn from.
        top_k: Only so many tokens are drawn from; 0 for all.
        stop: Texts at which generation ends; they are not part of the answer.
        seed: Seed of this request's own random numbers, or None.
        logprobs: How many of the most likely tokens are reported at each step; None for none.
        shorten: Whether `max_tokens` is lowered to what the model has room for, where the request did not choose it.
        json_schema: A JSON schema, as JSON, that the answer keeps to; None for any answer.
        prompt_logprobs: Whether the tokens of a decoder's prompt are reported too, with as many likely ones as
            `logprobs` says; `max_tokens` may then be 0, and a token that ends the answer is reported.
    """

    max_tokens: Count = 16
    temperature: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(strict=True, gt=0, le=1)] = 1.0
    top_k: Count = 0
    stop: tuple[Annotated[str, Field(strict=True, min_length=1)], ...] = ()
    seed: Annotated[int, Field(strict=True)] | None = None
    logprobs: Annotated[Count, Field(le=100)] | None = None
    shorten: Switch = field(default=False, kw_only=True)
    json_schema: Annotated[str, Field(strict=True)] | None = field(default=None, kw_only=True)
    prompt_logprobs: Switch = field(default=False, kw_only=True)


@dataclass(frozen=True)
class Request:
    """One input for one delta.

    Attributes:
        task: What is to be computed.
        text: The input. Give one of `text`, `tokens`, `words` and `messages`.
        tokens: The input as token ids, which are taken as they are.
        words: The words of the input, for `tag`; a text is split as the texts that its delta was trained on.
        messages: A chat, for `generate`, such as `({"role": "user", "content": "a text"},)`. The chat template of the
            tokenizer makes the prompt.
        second_text: The second text of a pair, for classifiers of pairs.
        truncate_prompt_tokens: The number of tokens to which a longer text is cut, for `classify`, `tag` and `embed`.
            -1 stands for the length to which texts were cut in the training of the delta, or else for what the model
            can read. None cuts nothing: a text that is too long is refused.
        delta: The name of the delta, or None for the base model.
        tenant: Whose request it is: tenants share the machine fairly.
        sampling: How tokens are chosen, for `generate`.
        row_task: The task of the input, for a delta that learned several, as `poly` does.
        timeout: Seconds after which the request is given up, counted from its submission; None for no limit.
        tools: The tools that a chat's answer may call, as OpenAI's API describes them; the chat template shows them.
    """

    task: Task
    text: str | None = None
    tokens: tuple[int, ...] | None = None
    words: tuple[str, ...] | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    second_text: str | None = None
    truncate_prompt_tokens: int | None = None
    delta: str | None = None
    tenant: str = "default"
    sampling: Sampling = field(default_factory=Sampling)
    row_task: str | None = None
    timeout: float | None = None
    tools: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool that an answer asks for.

    Attributes:
        name: The name of the function.
        arguments: Its arguments, a JSON object.
    """

    name: str
    arguments: str


@dataclass(frozen=True)
class TokenLogprob:
    """A token that could come next. Two tokens may have the same text, but not the same id.

    Attributes:
        token: Its id.
        logprob: The logarithm of its probability; NaN for the first token of a prompt, which nothing predicts.
        text: Its text behind the token before it, with U+FFFD for characters that are not whole.
        raw: The bytes that it stands for; None without a tokenizer.
    """

    token: int
    logprob: float
    text: str
    raw: bytes | None = None


@dataclass(frozen=True)
class TokenChoice:
    """A generated token.

    Attributes:
        token: Its id.
        text: The text that it adds to the answer; "" while a character is not whole.
        chosen: The token with its probability, and the text that it has by itself, if probabilities were asked for.
        top_logprobs: The most likely tokens, if asked for.
    """

    token: int
    text: str
    chosen: TokenLogprob | None = None
    top_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Answer:
    """The answer to one request.

    Attributes:
        delta: The name of the delta that answered, or None for the base model.
        version: Which version of it, as in `DeltaInfo.version`; "" for the base model.
        prompt_tokens: How many tokens were read.
        cached_tokens: How many of these came from the cache of prompt beginnings.
        text: The generated text.
        tokens: The generated tokens.
        prompt: The tokens of the prompt, if asked for.
        calls: The calls of tools that the model wrote; `text` is what stands before them.
        finish_reason: Why generation ended.
        label: The name of the most likely label, of `classify`.
        scores: Label name -> probability, of `classify`.
        tags: (word, label name) for each word, of `tag`.
        embedding: The vector of `embed`.
        queued: Seconds spent waiting.
        computed: Seconds from the first batch to the answer.
    """

    delta: str | None
    version: str
    prompt_tokens: int
    cached_tokens: int = 0
    text: str = ""
    tokens: tuple[TokenChoice, ...] = ()
    prompt: tuple[TokenChoice, ...] = ()
    calls: tuple[ToolCall, ...] = ()
    finish_reason: FinishReason | None = None
    label: str | None = None
    scores: dict[str, float] = field(default_factory=dict)
    tags: tuple[tuple[str, str], ...] = ()
    embedding: tuple[float, ...] = ()
    queued: float = 0.0
    computed: float = 0.0


@dataclass(frozen=True)
class DeltaInfo:
    """A delta that the server can answer with.

    Attributes:
        name: Its name.
        folder: Where it is stored.
        method: Its expression.
        parameters: How many parameters it has.
        tasks: What it can be asked.
        labels: The names of its labels, if it has a head.
        version: A digest of its files.
        loaded: Whether it is in memory.
        bytes: Its size in memory.
        loaded_at: When it was loaded (seconds since the epoch), or None.
        error: Why the newest files in its folder were refused, or "".
        max_length: The number of tokens to which texts were cut in its training, or None if that is not known.
        requested: Whether a call of `load` has brought it, and not the directory of deltas alone.
    """

    name: str
    folder: str
    method: str
    parameters: int
    tasks: tuple[Task, ...]
    labels: tuple[str, ...] = ()
    version: str = ""
    loaded: bool = field(default=False, kw_only=True)
    bytes: int = 0
    loaded_at: float | None = None
    error: str = ""
    max_length: int | None = None
    requested: bool = field(default=False, kw_only=True)


@dataclass(frozen=True)
class EngineStats:
    """Load of an engine, now and since its start.

    Attributes:
        queued: Requests that wait, by tenant.
        running: Requests in the batch, by delta ("" for the base model).
        finished: Requests answered since the start, by delta.
        failed: Requests that ended in an error since the start, by delta.
        prompt_tokens: Tokens read since the start.
        generated_tokens: Tokens generated since the start.
        cached_tokens: Tokens of prompts that came from the cache since the start.
        loads: Deltas read from disk since the start.
        evictions: Deltas dropped from memory since the start.
        load_seconds: The time spent reading deltas since the start.
    """

    queued: dict[str, int] = field(default_factory=dict)
    running: dict[str, int] = field(default_factory=dict)
    finished: dict[str, int] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0
    loads: int = 0
    evictions: int = 0
    load_seconds: float = 0.0
