"""Routes for what OpenAI's API does not have: classes of texts, tags of words, and answers of encoder-decoders."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..requests import Answer
from .answers import (
    Pieces,
    answer_all,
    answer_inputs,
    as_inputs,
    begin,
    count,
    default_max_tokens,
    engine_request,
    generation_requests,
    log_contents,
    new_id,
    respond,
)
from .errors import ApiError
from .schemas import ClassifyBody, GenerateBody, TagBody
from .service import read_body

router = APIRouter()


@router.post("/classify")
@router.post("/v1/classify")
async def classify(http: Request) -> Response:
    """Classify texts by the head of a delta, or of the base model. The answer has the form of vLLM's."""
    body = await read_body(http, ClassifyBody)
    service, tenant, delta, facts = begin(http, body.model)
    inputs = as_inputs(body.input, "input", service.max_inputs)
    seconds: list[str | None] = [None] * len(inputs)
    if body.pair is not None:
        pairs = [body.pair] if isinstance(body.pair, str) else body.pair
        if len(pairs) != len(inputs):
            raise ApiError(400, f"{len(inputs)} inputs and {len(pairs)} in pair; give one for each", None, "pair")
        seconds = [*pairs]
    log_contents(service, facts, input=inputs, pair=seconds)
    requests = [
        engine_request(service, body, "classify", tenant, delta, one, second_text=second)
        for one, second in zip(inputs, seconds, strict=True)
    ]
    answers = await answer_all(http, service, requests)
    usage = count(facts, answers)
    log_contents(service, facts, output=[answer.label for answer in answers])
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
    service, tenant, delta, facts = begin(http, body.model)
    answers = await answer_inputs(http, service, tenant, delta, facts, body, "tag")
    usage = count(facts, answers)
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
    service, tenant, delta, facts = begin(http, body.model, bool(body.stream))
    inputs = as_inputs(body.input, "input", service.max_inputs)
    requests = generation_requests(service, body, tenant, delta, inputs, default_max_tokens(service))
    return await respond(http, service, facts, body, requests, Pieces(body.model))


def _listing(kind: str, model: str, data: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
    head = {"id": new_id(kind), "object": "list", "created": int(time.time()), "model": model}
    return {**head, "data": data, "usage": usage}
