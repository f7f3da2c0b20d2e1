"""Requests of clients, field by field. A field that would change the answer and is not supported is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from typing_extensions import TypedDict

from ..config import MAX_INPUTS
from ..engine.requests import DELTA_NAME, Sampling

NAME = f"^{DELTA_NAME}$"

MAX_IDS = 2**20
"""Token ids of one text."""
MAX_MESSAGES = 10_000
MAX_PARTS = 1024
"""Parts of one message of a chat."""
MAX_TOOLS = 128
MAX_NOTES = 16
"""Entries of `metadata`, as in OpenAI's API."""

Token = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
Text = Annotated[str, Field(strict=True)]
Tokens = Annotated[list[Token], Field(fail_fast=True, max_length=MAX_IDS)]
"""Token ids. A list of many is looked at up to its first mistake, lest one request has millions of them."""
Texts = Annotated[list[Text], Field(fail_fast=True, max_length=MAX_INPUTS)]
Inputs = Text | Tokens | Texts | Annotated[list[Tokens], Field(fail_fast=True, max_length=MAX_INPUTS)]
Stop = Annotated[str, Field(min_length=1, max_length=256)]
Number = Annotated[float, Field(allow_inf_nan=False)]
EmptyList = Annotated[list[Any], Field(max_length=0)]
EmptyDict = Annotated[dict[str, Any], Field(max_length=0)]


def _only(*allowed: Any) -> AfterValidator:
    """Refuse every value but those that change nothing, and null."""

    def check(value: Any) -> Any:
        if value is not None and value not in allowed:
            verb = "is" if len(allowed) == 1 else "are"
            raise ValueError(f"only {' and '.join(map(json.dumps, allowed))} {verb} supported")
        return value

    return AfterValidator(check)


def _unused(description: str) -> Any:
    return Field(None, description=f"{description}; accepted and not used")


class Part(BaseModel):
    """A request or a part of one, which has no fields that are not known here."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class RequestBody(Part):
    """Fields that every request may have."""

    model: str = Field(
        min_length=1, max_length=400, description="the name of a delta, or of the base model; /v1/models lists them"
    )
    timeout: Annotated[float, Field(gt=0, le=10**6, allow_inf_nan=False)] | None = Field(
        None, description="seconds for the answer, at most those of the server [the server's]"
    )
    task: Annotated[str, Field(min_length=1, max_length=4096)] | None = Field(
        None, description="the task of the input, for a delta that learned several"
    )
    user: str | None = _unused("who the answer is for")
    metadata: Annotated[dict[str, str], Field(max_length=MAX_NOTES)] | None = _unused("up to 16 notes of the client")


class SamplingBody(RequestBody):
    """Settings for choosing tokens."""

    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = Field(
        None, description="tokens of an answer, at most [16 for completions, else what the server says]"
    )
    temperature: Annotated[Number, Field(ge=0, le=100)] | None = Field(
        None, description="a number from 0, which takes the most likely token, to 100 [1]"
    )
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = Field(
        None, description="draw from the likeliest tokens of this share, above 0 up to 1 [1]"
    )
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = Field(
        None, description="draw from so many of the likeliest tokens; 0 or -1 for all [0]"
    )
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = Field(
        None, description="a text, or up to 16, at which the answer ends; each of 1 to 256 characters"
    )
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = Field(
        None, description="of the random draws: equal requests with equal seeds have equal answers [random]"
    )
    n: Annotated[int, Field(ge=1, le=64)] | None = Field(None, description="answers to each input, 1 to 64 [1]")
    frequency_penalty: Annotated[Number | None, _only(0)] = Field(None, description="only 0 is supported")
    presence_penalty: Annotated[Number | None, _only(0)] = Field(None, description="only 0 is supported")
    repetition_penalty: Annotated[Number | None, _only(1)] = Field(None, description="only 1 is supported")
    min_p: Annotated[Number | None, _only(0)] = Field(None, description="only 0 is supported")
    logit_bias: EmptyDict | None = Field(None, description="only {} is supported")
    ignore_eos: Annotated[bool | None, _only(False)] = Field(None, description="only false is supported")

    @property
    def chosen_max_tokens(self) -> int | None:
        """Tokens of an answer, if the request says how many."""
        return self.max_tokens

    def sampling(
        self, default_max_tokens: int, logprobs: int | None, index: int, json_schema: str | None, echo: bool
    ) -> Sampling:
        """Return how the engine chooses tokens of the answer with a number."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        seed = None if self.seed is None else (self.seed + index) % 2**63
        chosen = self.chosen_max_tokens
        return Sampling(
            max_tokens=default_max_tokens if chosen is None else chosen,
            shorten=chosen is None,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(0, self.top_k or 0),
            stop=stop,
            seed=seed,
            logprobs=logprobs or 0 if echo else logprobs,
            json_schema=json_schema,
            prompt_logprobs=echo,
        )


class StreamOptions(Part):
    """Contents of a stream beside the tokens."""

    include_usage: bool = Field(False, description="true: a last event with the number of tokens [false]")


class StreamBody(SamplingBody):
    """Requests that can be answered piece by piece."""

    stream: bool | None = Field(None, description="true: server-sent events, a piece at a time [false]")
    stream_options: StreamOptions | None = Field(None, description='{"include_usage": true}: a last event with counts')
    store: Annotated[bool | None, _only(False)] = Field(None, description="only false is supported")
    service_tier: Annotated[str | None, _only("auto", "default")] = Field(
        None, description='only "auto" and "default" are supported'
    )


class LogprobsBody(StreamBody):
    """Requests whose answers may come with the probabilities of their tokens."""

    return_tokens_as_token_ids: bool | None = Field(
        None, description="true: logprobs name tokens by id, as token_id:17, since two may have one text [false]"
    )


class CompletionBody(LogprobsBody):
    """Continue texts."""

    prompt: Inputs = Field(description="a text, a list of texts, a list of token ids, or a list of such lists")
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = Field(
        None, description="how many likely tokens to report at each step, 0 to 20"
    )
    max_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = Field(
        None, description="tokens of an answer, at most; 0 only with echo [16]"
    )
    echo: bool | None = Field(
        None, description="true: the prompt stands before its answer, with its probabilities; not in a stream [false]"
    )
    best_of: Annotated[int | None, _only(1)] = Field(None, description="only 1 is supported")
    suffix: Annotated[str | None, _only("")] = Field(None, description='only "" is supported')


def _check_part(kind: str) -> str:
    """Refuse the parts of a message that are not text."""
    if kind != "text":
        raise ValueError("only parts of type text are supported; images, audio and files are not read")
    return kind


class TextPart(TypedDict):
    """A text in a message."""  # a dictionary, since a request may have very many

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]

    type: Annotated[str, AfterValidator(_check_part), Field(description='only "text" is supported')]
    text: Annotated[Text, Field(description="the text")]


def _check_arguments(text: str) -> str:
    """Refuse arguments of a call that are no JSON object."""
    try:
        if isinstance(json.loads(text), dict):
            return text
    except (ValueError, RecursionError):
        pass
    raise ValueError("arguments are a JSON object, as a text")


class CalledFunction(Part):
    """A function that an answer has called."""

    name: str = Field(min_length=1, max_length=256, description="its name")
    arguments: Annotated[str, AfterValidator(_check_arguments)] = Field(description="its arguments, JSON as a text")


class MadeCall(Part):
    """A call of a tool that an answer has made."""

    id: str = Field(description="its id, which the answer of the tool repeats")
    type: Literal["function"] = Field("function", description='only "function" is supported')
    function: CalledFunction = Field(description="what is called")
    index: int | None = _unused("its place in a stream")


class Message(Part):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(description="who has written it")
    content: Text | Annotated[list[TextPart], Field(fail_fast=True, max_length=MAX_PARTS)] | None = Field(
        None, description="the text, or its parts, which are joined; null only beside tool_calls"
    )
    name: str | None = Field(None, description="the name of the author, for templates that have one")
    # what an answer has besides, so that it can be sent back as it is
    refusal: Annotated[str | None, _only("")] = Field(None, description='only "" is supported')
    annotations: EmptyList | None = Field(None, description="only [] is supported")
    audio: None = Field(None, description="only null is supported")
    function_call: None = Field(None, description="only null is supported")
    tool_calls: Annotated[list[MadeCall], Field(max_length=MAX_TOOLS)] | None = Field(
        None, description="the calls of tools that an earlier answer has made"
    )
    tool_call_id: str | None = Field(None, description="the id of the call that a message of a tool answers")

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        if self.content is None and not self.tool_calls:
            raise ValueError("content is missing: a text, or its parts; null only beside tool_calls")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls are a part of messages of the assistant")
        return self

    def plain(self) -> dict[str, Any]:
        """Return the message as chat templates take it."""
        content = self.content
        if not isinstance(content, str):
            content = "".join(part["text"] for part in content or ())
        more: dict[str, Any] = {"name": self.name, "tool_call_id": self.tool_call_id}
        if self.tool_calls:
            more["tool_calls"] = [
                {"id": one.id, "type": one.type, "function": {"name": f.name, "arguments": json.loads(f.arguments)}}
                for one in self.tool_calls
                for f in [one.function]
            ]
        return {"role": self.role, "content": content, **{k: v for k, v in more.items() if v is not None}}


class ToolFunction(Part):
    """A function that the model may call."""

    name: str = Field(pattern="^[A-Za-z0-9_.-]{1,64}$", description="its name")
    description: str | None = Field(None, description="what it does")
    parameters: dict[str, Any] | None = Field(None, description="a JSON schema of its arguments")
    strict: Annotated[bool | None, _only(False)] = Field(None, description="only false is supported")


class Tool(Part):
    """A tool that the model may call."""

    type: Literal["function"] = Field(description='only "function" is supported')
    function: ToolFunction = Field(description="the function")

    def plain(self) -> dict[str, Any]:
        """Return the tool as chat templates take it."""
        parameters = self.function.parameters or {"type": "object", "properties": {}}
        description = self.function.description or ""
        inner = {"name": self.function.name, "description": description, "parameters": parameters}
        return {"type": self.type, "function": inner}


class JsonSchema(Part):
    """A JSON schema of an answer."""

    name: str | None = _unused("its name")
    description: str | None = _unused("what it describes")
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="the schema [any object]")
    strict: bool | None = _unused("every answer keeps to the schema")


class ResponseFormat(Part):
    """The form of an answer."""

    type: Literal["text", "json_object", "json_schema"] = Field(
        description="text for any answer, json_object for a JSON object, json_schema for one that keeps to json_schema"
    )
    json_schema: JsonSchema | None = Field(None, description="of json_schema: name, schema")

    @model_validator(mode="after")
    def _has_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema is given with the type json_schema, and with no other")
        return self

    @property
    def schema_text(self) -> str | None:
        """The JSON schema that the answer keeps to, as JSON, if it has one."""
        if self.type == "text":
            return None
        chosen = None if self.json_schema is None else self.json_schema.schema_
        return json.dumps({"type": "object"} if chosen is None else chosen)


class ChatBody(LogprobsBody):
    """Answer a chat."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] = Field(
        description='messages such as {"role": "user", "content": "a text"}; only text is read, no images'
    )
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = Field(
        None, description="another name for max_tokens; where both are given, they must be equal"
    )

    @property
    def chosen_max_tokens(self) -> int | None:
        """Tokens of an answer, if the request says how many."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    logprobs: bool | None = Field(None, description="true: report the probability of each token")
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = Field(
        None, description="how many likely tokens to report at each step, 0 to 20"
    )
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = Field(
        None, description="functions that the model may call, if its chat template shows them"
    )
    tool_choice: Annotated[Any, _only("none", "auto")] = Field(
        None, description='only "none", which hides the tools, and "auto" are supported'
    )
    parallel_tool_calls: Annotated[bool | None, _only(True)] = Field(None, description="only true is supported")
    response_format: ResponseFormat | None = Field(
        None, description="the form that the answer keeps to; not beside tools [any text]"
    )


INNER_BODIES = (
    StreamOptions, TextPart, Message, MadeCall, CalledFunction, Tool, ToolFunction, ResponseFormat, JsonSchema,
)  # fmt: skip
"""The models of objects in request bodies."""


class EncodingBody(RequestBody):
    """Requests whose input is read as a whole."""

    truncate_prompt_tokens: Annotated[int, Field(strict=True, ge=-1, le=2**31 - 1)] | None = Field(
        None,
        description="tokens to which longer texts are cut; -1: as in the delta's training, or else what the model can "
        "read [longer texts are refused]",
    )


class EmbeddingBody(EncodingBody):
    """Return a vector for each text: the mean of the last hidden states."""

    input: Inputs = Field(description="a text, a list of texts, a list of token ids, or a list of such lists")
    encoding_format: Literal["float", "base64"] | None = Field(None, description="float or base64 [float]")
    dimensions: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = Field(
        None, description="the length of the model's vectors, and no other"
    )


class ClassifyBody(EncodingBody):
    """Classify texts, or pairs of texts."""

    input: Inputs = Field(description="a text, a list of texts, a list of token ids, or a list of such lists")
    pair: Text | Texts | None = Field(
        None, description="the second text of each input, for classifiers of pairs; as many as there are inputs"
    )


class TagBody(EncodingBody):
    """Label each word of texts."""

    input: Text | Texts | Annotated[list[Texts], Field(fail_fast=True, max_length=MAX_INPUTS)] = Field(
        description="a text, which is split as in training, a list of texts, or a list of lists of words"
    )


class GenerateBody(StreamBody):
    """Answer texts with an encoder-decoder, or continue them with a decoder."""

    input: Inputs = Field(description="a text, a list of texts, a list of token ids, or a list of such lists")


class LoadBody(Part):
    """Load a delta of any method, as in vLLM."""

    lora_name: str = Field(min_length=1, max_length=200, pattern=NAME, description="what clients will call the delta")
    lora_path: str = Field(min_length=1, max_length=4096, description="its folder, below the server's folder of deltas")
    base_model_name: str | None = _unused("the model that it belongs to")
    load_inplace: bool | None = Field(None, description="true: replace a delta of this name")


class UnloadBody(Part):
    """Take a delta out, as in vLLM."""

    lora_name: str = Field(min_length=1, max_length=200, description="the name of the delta")
    lora_int_id: int | None = _unused("a number of vLLM's")


class DeltaBody(Part):
    """Load a delta, or replace the one of its name."""

    name: str = Field(min_length=1, max_length=200, pattern=NAME, description="what clients will call the delta")
    folder: str | None = Field(
        None, min_length=1, max_length=4096, description="its folder, below the server's folder of deltas [its name]"
    )


REQUESTS: Mapping[str, type[BaseModel]] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/v1/embeddings": EmbeddingBody,
    "/classify": ClassifyBody,
    "/tag": TagBody,
    "/generate": GenerateBody,
    "/v1/deltas": DeltaBody,
    "/v1/load_lora_adapter": LoadBody,
    "/v1/unload_lora_adapter": UnloadBody,
}
"""The model of the request body of each path."""
