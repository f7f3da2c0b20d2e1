"""From a request's body to requests of the engine, and from answers to JSON and to events of a stream."""

from __future__ import annotations

import base64
import json
import math
import secrets
import struct
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from ..engine.requests import Answer, Request, Task, TokenChoice, TokenLogprob
from .errors import ApiError, api_error, error_body
from .schemas import EmbeddingBody, EncodingBody, RequestBody, StreamBody, TagBody
from .service import EventStream, RequestFacts, Service, admit, facts_of, gather, merge, service_of, unless_disconnected
from .tenants import Tenant

MAX_LOGGED = 10_000
"""Characters of the inputs or the answers of a request in a log that has contents."""


def new_id(kind: str) -> str:
    return f"{kind}-{secrets.token_hex(16)}"


@dataclass(frozen=True)
class ApiCall:
    """A request over HTTP: who asks, and for which delta."""

    http: HttpRequest
    service: Service
    tenant: Tenant
    delta: str | None  # None for the base model
    facts: RequestFacts  # for the log

    def log_contents(self, **contents: Any) -> None:
        """Keep inputs or answers for the log, if it is to have them; long ones as the beginning of their JSON."""
        for name, value in contents.items() if self.service.config.log.log_contents else ():
            text = json.dumps(value, ensure_ascii=False)
            self.facts.contents[name] = value if len(text) <= MAX_LOGGED else text[:MAX_LOGGED]

    def default_max_tokens(self, most: int | None = None) -> int:
        """Return how many tokens an answer has at most where neither the request nor the endpoint says it."""
        limits = self.service.config.limits
        return min(limits.default_max_tokens if most is None else most, limits.max_tokens)


def begin(http: HttpRequest, model: str, stream: bool = False) -> ApiCall:
    """Find out who asks and for which delta."""
    service, tenant, facts = service_of(http), admit(http), facts_of(http)
    facts.stream = stream
    delta = service.delta(model, tenant)
    facts.delta = delta or ""
    return ApiCall(http, service, tenant, delta, facts)


Input = str | tuple[int, ...] | tuple[str, ...] | tuple[dict[str, Any], ...]
"""A text, token ids, words that are to be tagged, or the messages of a chat."""


def as_inputs(value: Any, param: str, most: int) -> list[Input]:
    """Return the inputs of a request, a text, token ids or words each."""
    if isinstance(value, str):
        inputs: list[Input] = [value]
    elif value and isinstance(value[0], int):
        inputs = [tuple(value)]
    else:
        inputs = [one if isinstance(one, str) else tuple(one) for one in value]
    if not inputs:
        raise ApiError(400, f"{param} is an empty list; give at least one text", "invalid_value", param)
    if len(inputs) > most:
        raise ApiError(413, f"{param} has {len(inputs):,} inputs; one request may have {most:,}", "too_many", param)
    for i, one in enumerate(inputs):
        if not one:
            where = f"input {i} of {param}" if len(inputs) > 1 else param
            raise ApiError(400, f"{where} is empty; give a text, or at least one of its tokens", "invalid_value", param)
    return inputs


def engine_request(call: ApiCall, body: RequestBody, task: Task, value: Input, **more: Any) -> Request:
    """Return one input, which is not empty, as a request of the engine; `more` are its other fields."""
    limit = call.service.config.limits.timeout
    timeout = limit if body.timeout is None else min(limit, body.timeout)
    kind = "text" if isinstance(value, str) else "tokens"
    if not isinstance(value, str) and not isinstance(value[0], int):
        kind = "words" if isinstance(value[0], str) else "messages"
    fields: dict[str, Any] = {kind: value, **more}
    if isinstance(body, EncodingBody):
        fields["truncate_prompt_tokens"] = body.truncate_prompt_tokens
    return Request(task, delta=call.delta, tenant=call.tenant.name, row_task=body.task, timeout=timeout, **fields)


def generation_requests(
    call: ApiCall,
    body: StreamBody,
    inputs: Sequence[Input],
    default_max_tokens: int,
    logprobs: int | None = None,
    json_schema: str | None = None,
    tools: tuple[dict[str, Any], ...] = (),
    echo: bool = False,
) -> list[Request]:
    """Return `n` requests for each input."""
    most, max_inputs, n = call.service.config.limits.max_tokens, call.service.max_inputs, body.n or 1
    if (max_tokens := body.chosen_max_tokens or 0) > most:
        problem = f"max_tokens is {max_tokens:,}; this server generates {most:,} at most"
        raise ApiError(400, problem, "invalid_value", "max_tokens")
    if len(inputs) * n > max_inputs:
        problem = f"{len(inputs):,} inputs with {n} answers each; one request may have {max_inputs:,} answers"
        raise ApiError(413, problem, "too_many", "n")
    samplings = [body.sampling(default_max_tokens, logprobs, index, json_schema, echo) for index in range(n)]
    return [
        engine_request(call, body, "generate", one, sampling=sampling, tools=tools)
        for one in inputs
        for sampling in samplings
    ]


def count(facts: RequestFacts, answers: Sequence[Answer], per_input: int = 1) -> dict[str, Any]:
    """Count the tokens of answers, for the log and the client."""
    firsts = answers[::per_input]
    facts.inputs = len(firsts)
    facts.prompt_tokens = sum(answer.prompt_tokens for answer in firsts)
    facts.cached_tokens = sum(answer.cached_tokens for answer in firsts)
    facts.generated_tokens = sum(len(answer.tokens) for answer in answers)
    facts.queued = max((answer.queued for answer in answers), default=0.0)
    return {
        "prompt_tokens": facts.prompt_tokens,
        "completion_tokens": facts.generated_tokens,
        "total_tokens": facts.prompt_tokens + facts.generated_tokens,
        "prompt_tokens_details": {"cached_tokens": facts.cached_tokens},
    }


async def answer_all(call: ApiCall, requests: Sequence[Request]) -> list[Answer]:
    """Answer several inputs of one request; when one fails, all do."""
    engine = call.service.engine
    return await unless_disconnected(call.http.receive, gather([engine.asubmit(request) for request in requests]))


async def answer_inputs(call: ApiCall, body: EmbeddingBody | TagBody, task: Task) -> list[Answer]:
    """Answer each input of a body by one task of the engine."""
    inputs = as_inputs(body.input, "input", call.service.max_inputs)
    call.log_contents(input=inputs)
    return await answer_all(call, [engine_request(call, body, task, one) for one in inputs])


# -- generation


class Pieces:
    """Generated text as JSON: as a completion, as a chat, or as plain /generate."""

    kind = "cmpl"
    name = "text_completion"
    chunk_name = "text_completion"

    def __init__(
        self, model: str, logprobs: bool = False, tokens_as_ids: bool = False, echoed: Sequence[Input] = ()
    ) -> None:
        self.model, self.logprobs, self.tokens_as_ids = model, logprobs, tokens_as_ids
        self.head = {"id": new_id(self.kind), "created": int(time.time()), "model": model}
        self.offsets: dict[int, int] = {}
        self.echoed = echoed  # the prompt of each answer, or nothing

    def choice(self, index: int, answer: Answer) -> dict[str, Any]:
        if not self.echoed:
            return self.piece(index, answer.text, answer.tokens, answer.finish_reason)
        prompt = self.echoed[index]
        text = prompt if isinstance(prompt, str) else "".join(token.text for token in answer.prompt)
        return self.piece(index, text + answer.text, [*answer.prompt, *answer.tokens], answer.finish_reason)

    def piece(self, index: int, text: str, tokens: Sequence[TokenChoice], finish: str | None) -> dict[str, Any]:
        logprobs = self._logprobs(index, tokens)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def last_piece(self, index: int, text: str, tokens: Sequence[TokenChoice], answer: Answer) -> dict[str, Any]:
        """Return the last part of a stream, with the text and the tokens that were not sent before."""
        return self.piece(index, text, tokens, answer.finish_reason)

    def opening(self, index: int) -> dict[str, Any] | None:
        """Return what comes before the first part of an answer, or None."""
        return None

    def _logprobs(self, index: int, tokens: Sequence[TokenChoice]) -> dict[str, Any] | None:
        """Return probabilities as completions have them."""
        if not self.logprobs or not tokens:
            return None
        offsets, at = [], self.offsets.get(index, 0)
        for token in tokens:
            if token.chosen is not None:  # else it only has the rest of the text
                offsets.append(at)
            at += len(token.text)
        self.offsets[index] = at
        chosen = [(token.chosen, token.top_logprobs) for token in tokens if token.chosen is not None]
        return {
            "tokens": [self._name(one) for one, _ in chosen],
            "token_logprobs": [_finite(one.logprob) for one, _ in chosen],
            "top_logprobs": [
                None if math.isnan(one.logprob) else self._by_name([one, *likeliest]) for one, likeliest in chosen
            ],
            "text_offset": offsets,
        }

    def _by_name(self, likeliest: Sequence[TokenLogprob]) -> dict[str, float | None]:
        """Return the probabilities of tokens by name; where a name is taken, another token has its id instead."""
        names: dict[str, float | None] = {}
        for one in {one.token: one for one in likeliest}.values():
            name = self._name(one)
            names[_token_id(one) if name in names else name] = _finite(one.logprob)
        return names

    def _name(self, one: TokenLogprob) -> str:
        """Return what stands for a token: its text, with bytes such as \\xe2 where its characters are not whole."""
        if self.tokens_as_ids:
            return _token_id(one)
        try:
            return one.text if one.raw is None else one.raw.decode()
        except UnicodeDecodeError:
            return repr(one.raw)[2:-1]


class ChatPieces(Pieces):
    """Generated text as a chat."""

    kind = "chatcmpl"
    name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def choice(self, index: int, answer: Answer) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
        if answer.calls:
            message |= {"content": answer.text or None, "tool_calls": self._calls(answer)}
        logprobs = self._logprobs(index, answer.tokens)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": self._finish(answer)}

    def piece(self, index: int, text: str, tokens: Sequence[TokenChoice], finish: str | None) -> dict[str, Any]:
        delta = {"content": text} if text or not finish else {}
        return {"index": index, "delta": delta, "logprobs": self._logprobs(index, tokens), "finish_reason": finish}

    def last_piece(self, index: int, text: str, tokens: Sequence[TokenChoice], answer: Answer) -> dict[str, Any]:
        piece = self.piece(index, text, tokens, self._finish(answer))
        if answer.calls:
            calls = [{"index": number, **one} for number, one in enumerate(self._calls(answer))]
            piece["delta"] = {**piece["delta"], "tool_calls": calls}
        return piece

    def _calls(self, answer: Answer) -> list[dict[str, Any]]:
        """Return calls of tools as OpenAI has them; the templates of Mistral want ids of nine letters."""
        functions = [{"name": one.name, "arguments": one.arguments} for one in answer.calls]
        return [{"id": secrets.token_hex(5)[:9], "type": "function", "function": one} for one in functions]

    def _finish(self, answer: Answer) -> str | None:
        return "tool_calls" if answer.calls and answer.finish_reason == "stop" else answer.finish_reason

    def opening(self, index: int) -> dict[str, Any] | None:
        """Return the event that says who speaks."""
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _logprobs(self, index: int, tokens: Sequence[TokenChoice]) -> dict[str, Any] | None:
        """Return probabilities as chats have them."""
        if not self.logprobs or not tokens:
            return None

        def entry(one: TokenLogprob) -> dict[str, Any]:
            raw = None if one.raw is None else list(one.raw)
            return {"token": self._name(one), "logprob": _finite(one.logprob), "bytes": raw}

        return {
            "content": [
                {**entry(token.chosen), "top_logprobs": [entry(one) for one in token.top_logprobs]}
                for token in tokens
                if token.chosen is not None
            ],
            "refusal": None,
        }


def _token_id(one: TokenLogprob) -> str:
    return f"token_id:{one.token}"


def _finite(value: float) -> float | None:
    """Return a logarithm as JSON can hold it: OpenAI's clients read -9999 as minus infinity, and null as none."""
    return None if math.isnan(value) else max(value, -9999.0)


async def respond(call: ApiCall, body: StreamBody, requests: Sequence[Request], pieces: Pieces) -> Response:
    """Generate, and answer at once or as a stream."""
    firsts = requests[:: body.n or 1]
    call.log_contents(input=[request.text or request.tokens or request.messages for request in firsts])
    if body.stream:
        return await _stream(call, body, requests, pieces)
    answers = await answer_all(call, requests)
    usage = count(call.facts, answers, body.n or 1)
    call.log_contents(output=[answer.text for answer in answers])
    choices = [pieces.choice(i, answer) for i, answer in enumerate(answers)]
    return JSONResponse({**pieces.head, "object": pieces.name, "choices": choices, "usage": usage})


async def _stream(call: ApiCall, body: StreamBody, requests: Sequence[Request], pieces: Pieces) -> Response:
    """Answer as a stream. What goes wrong before the first token has a status of its own."""
    service = call.service
    items = merge([service.engine.astream(request) for request in requests])
    begun = time.monotonic()
    try:
        first = await unless_disconnected(call.http.receive, anext(items))
    except BaseException:
        await items.aclose()  # type: ignore[attr-defined]
        raise
    service.metrics.observe_first(call.http.scope["route"].path, time.monotonic() - begun)
    events = _events(call, body, len(requests), first, items, pieces)
    return EventStream(events, items, service.config.limits.send_timeout)


async def _events(
    call: ApiCall,
    body: StreamBody,
    number: int,
    first: tuple[int, TokenChoice | Answer],
    items: AsyncIterator[tuple[int, TokenChoice | Answer]],
    pieces: Pieces,
) -> AsyncIterator[bytes]:
    """Yield the events of a stream; an error ends it with an event of its own."""
    head, facts = {**pieces.head, "object": pieces.chunk_name}, call.facts
    answers: dict[int, Answer] = {}
    sent: dict[int, str] = {}
    waiting: dict[int, list[TokenChoice]] = {}
    generated = dict.fromkeys(range(number), 0)

    def event(choice: dict[str, Any]) -> bytes:
        usage = {"usage": None} if body.stream_options and body.stream_options.include_usage else {}
        return _event({**head, "choices": [choice], **usage})

    try:
        for index in range(number):
            if (opening := pieces.opening(index)) is not None:
                yield event(opening)
        item: tuple[int, TokenChoice | Answer] | None = first
        while item is not None:
            index, part = item
            if isinstance(part, Answer):
                answers[index] = part
                before = sent.get(index, "")
                rest = part.text[len(before) :] if part.text.startswith(before) else ""
                yield event(pieces.last_piece(index, rest, waiting.pop(index, []), part))
            else:
                generated[index] += 1
                waiting.setdefault(index, []).append(part)
                if part.text:
                    sent[index] = sent.get(index, "") + part.text
                    yield event(pieces.piece(index, part.text, waiting.pop(index), None))
            item = await anext(items, None)
        usage = count(facts, [answers[i] for i in sorted(answers)], body.n or 1)
        call.log_contents(output=[answers[i].text for i in sorted(answers)])
        if body.stream_options and body.stream_options.include_usage:
            yield _event({**head, "choices": [], "usage": usage})
        yield b"data: [DONE]\n\n"
    except BaseException as error:
        _count_partly(facts, answers, generated, body.n or 1)
        if not isinstance(error, Exception):  # the stream is cancelled or closed
            raise
        failure = api_error(error)
        facts.status, facts.error = failure.status, error
        yield _event({**error_body(failure, call.service.hidden_folder), "status": failure.status})
    finally:
        await items.aclose()  # type: ignore[attr-defined]


def _count_partly(facts: RequestFacts, answers: dict[int, Answer], generated: dict[int, int], per_input: int) -> None:
    """Count what was generated before a stream was broken off."""
    inputs = {index // per_input: answer for index, answer in answers.items()}
    facts.inputs = len(generated) // per_input
    facts.generated_tokens = sum(generated.values())
    facts.prompt_tokens = sum(answer.prompt_tokens for answer in inputs.values())


def _event(value: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(value, ensure_ascii=False, allow_nan=False)}\n\n".encode("utf-8", "replace")


def pack_embedding(values: Sequence[float], encoding: str | None) -> list[float] | str:
    """Return a vector as numbers, or as base64 of 32-bit floats."""
    if encoding == "base64":
        return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()
    return list(values)
