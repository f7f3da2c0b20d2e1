"""The routes that answer: models, completions, chats and embeddings of OpenAI's API, and tasks of our own."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..engine.requests import Answer
from .answers import (
    ChatPieces,
    Pieces,
    answer_all,
    answer_inputs,
    as_inputs,
    begin,
    count,
    engine_request,
    generation_requests,
    new_id,
    pack_embedding,
    respond,
)
from .errors import ApiError
from .schemas import ChatBody, ClassifyBody, CompletionBody, EmbeddingBody, GenerateBody, TagBody
from .service import Service, admit, read_body, service_of

router = APIRouter()

DEFAULT_COMPLETION = 16
"""Tokens of a completion where the request does not say, as OpenAI has it."""


def _model(service: Service, name: str) -> dict[str, Any]:
    base = service.config.base_name
    return {
        "id": name,
        "object": "model",
        "created": service.started,
        "owned_by": "deltune",
        "root": base,
        "parent": None if name == base else base,
    }


@router.get("/v1/models")
async def models(http: Request) -> Response:
    """List the base model and the deltas that the tenant may ask."""
    service = service_of(http)
    names = service.model_names(admit(http))
    return JSONResponse({"object": "list", "data": [_model(service, name) for name in names]})


@router.get("/v1/models/{name:path}")
async def model(http: Request, name: str) -> Response:
    """Describe one model."""
    service = service_of(http)
    service.delta(name, admit(http))
    return JSONResponse(_model(service, name))


@router.post("/v1/completions")
async def completions(http: Request) -> Response:
    """Continue texts."""
    body = await read_body(http, CompletionBody)
    call = begin(http, body.model, bool(body.stream))
    if body.max_tokens == 0 and not body.echo:
        raise ApiError(400, "max_tokens: 0 needs echo: true", "invalid_value", "max_tokens")
    if body.echo and body.stream:
        raise ApiError(400, "echo is not for a stream; leave one of them out", "invalid_value", "echo")
    inputs = as_inputs(body.prompt, "prompt", call.service.max_inputs)
    most = call.default_max_tokens(DEFAULT_COMPLETION)
    requests = generation_requests(call, body, inputs, most, body.logprobs, echo=bool(body.echo))
    echoed = [one for one in inputs for _ in range(body.n or 1)] if body.echo else []
    pieces = Pieces(body.model, body.logprobs is not None, bool(body.return_tokens_as_token_ids), echoed)
    return await respond(call, body, requests, pieces)


@router.post("/v1/chat/completions")
async def chat(http: Request) -> Response:
    """Answer a chat."""
    body = await read_body(http, ChatBody)
    call = begin(http, body.model, bool(body.stream))
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs is given without logprobs: true", "invalid_value", "top_logprobs")
    if "generate" not in call.service.engine.base_tasks():
        problem = f"{call.service.config.base_name} does not generate text, so it cannot chat"
        raise ApiError(400, f"{problem}; GET /v1/deltas lists the tasks of its deltas", "no_generation", "model")
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        problem = "max_tokens and max_completion_tokens are two names for one option and differ; give one of them"
        raise ApiError(400, problem, "invalid_value", "max_completion_tokens")
    messages = tuple(message.plain() for message in body.messages)
    tools = () if body.tool_choice == "none" else tuple(tool.plain() for tool in body.tools or ())
    schema = None if body.response_format is None else body.response_format.schema_text
    if tools and schema is not None:
        problem = 'response_format and tools exclude each other: leave one out, or give tool_choice: "none"'
        raise ApiError(400, problem, "invalid_value", "response_format")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    requests = generation_requests(
        call, body, [messages], call.default_max_tokens(), logprobs, json_schema=schema, tools=tools
    )
    pieces = ChatPieces(body.model, bool(body.logprobs), bool(body.return_tokens_as_token_ids))
    return await respond(call, body, requests, pieces)


@router.post("/v1/embeddings")
async def embeddings(http: Request) -> Response:
    """Return the mean of the last hidden states of each input."""
    body = await read_body(http, EmbeddingBody)
    call = begin(http, body.model)
    answers = await answer_inputs(call, body, "embed")
    width = len(answers[0].embedding)
    if body.dimensions not in (None, width):
        raise ApiError(
            400, f"dimensions is {body.dimensions}; vectors of {body.model} have {width}", "invalid_value", "dimensions"
        )
    usage = count(call.facts, answers)
    data = [
        {"object": "embedding", "index": i, "embedding": pack_embedding(answer.embedding, body.encoding_format)}
        for i, answer in enumerate(answers)
    ]
    tokens = {"prompt_tokens": usage["prompt_tokens"], "total_tokens": usage["total_tokens"]}
    return JSONResponse({"id": new_id("embd"), "object": "list", "data": data, "model": body.model, "usage": tokens})


@router.post("/classify")
@router.post("/v1/classify")
async def classify(http: Request) -> Response:
    """Classify texts by the head of a delta, or of the base model. The answer has the form of vLLM's."""
    body = await read_body(http, ClassifyBody)
    call = begin(http, body.model)
    inputs = as_inputs(body.input, "input", call.service.max_inputs)
    seconds: list[str | None] = [None] * len(inputs)
    if body.pair is not None:
        pairs = [body.pair] if isinstance(body.pair, str) else body.pair
        if len(pairs) != len(inputs):
            raise ApiError(400, f"{len(inputs)} inputs and {len(pairs)} in pair; give one for each", None, "pair")
        seconds = [*pairs]
    call.log_contents(input=inputs, pair=seconds)
    requests = [
        engine_request(call, body, "classify", one, second_text=second)
        for one, second in zip(inputs, seconds, strict=True)
    ]
    answers = await answer_all(call, requests)
    usage = count(call.facts, answers)
    call.log_contents(output=[answer.label for answer in answers])
    data = [_classified(i, answer) for i, answer in enumerate(answers)]
    return JSONResponse(_listing("classify", body.model, data, usage))


def _classified(index: int, answer: Answer) -> dict[str, Any]:
    return {
        "index": index,
        "label": answer.label,
        "probs": list(answer.scores.values()),
        "num_classes": len(answer.scores),
        "scores": answer.scores,
    }


@router.post("/tag")
@router.post("/v1/tag")
async def tag(http: Request) -> Response:
    """Tag the words of texts by the head of a delta, or of the base model."""
    body = await read_body(http, TagBody)
    call = begin(http, body.model)
    answers = await answer_inputs(call, body, "tag")
    usage = count(call.facts, answers)
    data = [
        {"index": i, "words": [{"word": word, "label": label} for word, label in answer.tags]}
        for i, answer in enumerate(answers)
    ]
    return JSONResponse(_listing("tag", body.model, data, usage))


@router.post("/generate")
@router.post("/v1/generate")
async def generate(http: Request) -> Response:
    """Answer texts with an encoder-decoder, or continue them; the answer has the form of completions."""
    body = await read_body(http, GenerateBody)
    call = begin(http, body.model, bool(body.stream))
    inputs = as_inputs(body.input, "input", call.service.max_inputs)
    requests = generation_requests(call, body, inputs, call.default_max_tokens())
    return await respond(call, body, requests, Pieces(body.model))


def _listing(kind: str, model: str, data: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
    head = {"id": new_id(kind), "object": "list", "created": int(time.time()), "model": model}
    return {**head, "data": data, "usage": usage}
