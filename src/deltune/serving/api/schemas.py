"""What clients may send, field by field. A field that would change the answer and is not supported is refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from ..requests import DELTA_NAME, Sampling

NAME = f"^{DELTA_NAME}$"

Token = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
Text = Annotated[str, Field(strict=True)]
Tokens = Annotated[list[Token], Field(fail_fast=True)]
"""Token ids. A list of many is looked at up to its first mistake, lest one request has millions of them."""
Texts = Annotated[list[Text], Field(fail_fast=True)]
Inputs = Text | Tokens | Texts | Annotated[list[Tokens], Field(fail_fast=True)]
Stop = Annotated[str, Field(min_length=1, max_length=256)]
Number = Annotated[float, Field(allow_inf_nan=False)]


def _only(*allowed: Any) -> AfterValidator:
    """Refuse every value but those that change nothing."""

    def check(value: Any) -> Any:
        if value is not None and value not in allowed:
            shown = " or ".join(repr(one) for one in allowed) or "null"
            raise ValueError(f"this server cannot do that; leave it out, or give {shown}")
        return value

    return AfterValidator(check)


def _unused(description: str) -> Any:
    return Field(None, description=f"{description}; taken and not used")


class RequestBody(BaseModel):
    """What every request may have."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(
        min_length=1, max_length=400, description="the name of a delta, or of the base model; /v1/models lists them"
    )
    timeout: Annotated[float, Field(gt=0, le=10**6, allow_inf_nan=False)] | None = Field(
        None, description="seconds for the answer, at most the server's"
    )
    user: str | None = _unused("who the answer is for")
    metadata: dict[str, str] | None = _unused("notes of the client")


class SamplingBody(RequestBody):
    """How tokens are chosen."""

    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = Field(None, description="tokens of an answer")
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
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = Field(None, description="a whole number of 64 bits")
    n: Annotated[int, Field(ge=1, le=64)] | None = Field(None, description="answers to each input, 1 to 64 [1]")
    frequency_penalty: Annotated[Number | None, _only(0)] = Field(None, description="0 alone")
    presence_penalty: Annotated[Number | None, _only(0)] = Field(None, description="0 alone")
    repetition_penalty: Annotated[Number | None, _only(1)] = Field(None, description="1 alone")
    min_p: Annotated[Number | None, _only(0)] = Field(None, description="0 alone")
    logit_bias: Annotated[dict[str, Number] | None, _only({})] = Field(None, description="{} alone")
    ignore_eos: Annotated[bool | None, _only(False)] = Field(None, description="false alone")

    @property
    def chosen_max_tokens(self) -> int | None:
        """Tokens of an answer, if the request says how many."""
        return self.max_tokens

    def sampling(self, default_max_tokens: int, logprobs: int | None, index: int = 0) -> Sampling:
        """Return how the engine chooses tokens.

        Args:
            default_max_tokens: Tokens of an answer where the request does not say, as far as the model has room.
            logprobs: How many likely tokens are reported at each step; None for none.
            index: Which of `n` answers; each has random numbers of its own.
        """
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
            logprobs=logprobs,
        )


class StreamOptions(BaseModel):
    """What a stream has beside the tokens."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    include_usage: bool = False


class StreamBody(SamplingBody):
    """Requests that can be answered piece by piece."""

    stream: bool | None = Field(None, description="true: server-sent events, a piece at a time")
    stream_options: StreamOptions | None = Field(None, description='{"include_usage": true}: a last event with counts')
    store: Annotated[bool | None, _only(False)] = Field(None, description="false alone")
    service_tier: Annotated[str | None, _only("auto", "default")] = Field(None, description="auto alone")


class CompletionBody(StreamBody):
    """POST /v1/completions."""

    prompt: Inputs = Field(description="a text, a list of texts, a list of token ids, or a list of such lists")
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = Field(
        None, description="how many likely tokens to report at each step, 0 to 20"
    )
    echo: Annotated[bool | None, _only(False)] = Field(None, description="false alone")
    best_of: Annotated[int | None, _only(1)] = Field(None, description="1 alone")
    suffix: Annotated[str | None, _only("")] = Field(None, description="nothing alone")


class TextPart(BaseModel):
    """A text in a message."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["text"]
    text: Text


class Message(BaseModel):
    """A message of a chat."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[TextPart], Field(fail_fast=True)]
    name: str | None = None
    # what an answer has besides, so that it can be sent back as it is
    refusal: Annotated[str | None, _only("")] = None
    annotations: Annotated[list[Any] | None, _only([])] = None
    audio: Annotated[dict[str, Any] | None, _only()] = None
    function_call: Annotated[dict[str, Any] | None, _only()] = None
    tool_calls: Annotated[list[Any] | None, _only([])] = None

    def plain(self) -> dict[str, str]:
        """Return the message as chat templates take it."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": content, **({} if self.name is None else {"name": self.name})}


class ResponseFormat(BaseModel):
    """The form of an answer; text alone."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["text"]


class ChatBody(StreamBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=10_000, fail_fast=True)] = Field(
        description='messages such as {"role": "user", "content": "a text"}; texts alone'
    )
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = Field(
        None, description="the same as max_tokens"
    )

    @property
    def chosen_max_tokens(self) -> int | None:
        """Tokens of an answer, if the request says how many."""
        return self.max_completion_tokens or self.max_tokens

    logprobs: bool | None = Field(None, description="true: report the probability of each token")
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = Field(
        None, description="how many likely tokens to report at each step, 0 to 20"
    )
    tools: Annotated[list[Any] | None, _only([])] = Field(None, description="[] alone")
    tool_choice: Annotated[str | None, _only("none", "auto")] = Field(None, description="none alone")
    response_format: ResponseFormat | None = Field(None, description='{"type": "text"} alone')


class EncodingBody(RequestBody):
    """Requests whose input is read as a whole."""

    truncate_prompt_tokens: Annotated[int, Field(strict=True, ge=-1, le=2**31 - 1)] | None = Field(
        None,
        description="tokens to which longer texts are cut; -1: as in the delta's training, or else what the model can "
        "read [longer texts are refused]",
    )


class EmbeddingBody(EncodingBody):
    """POST /v1/embeddings."""

    input: Inputs = Field(description="a text, a list of texts, a list of token ids, or a list of such lists")
    encoding_format: Literal["float", "base64"] | None = Field(None, description="float or base64 [float]")
    dimensions: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = Field(
        None, description="the length of the model's vectors, and no other"
    )


class ClassifyBody(EncodingBody):
    """POST /classify."""

    input: Inputs = Field(description="a text, a list of texts, a list of token ids, or a list of such lists")
    pair: Text | Texts | None = Field(
        None, description="the second text of each input, for classifiers of pairs; as many as there are inputs"
    )


class TagBody(EncodingBody):
    """POST /tag."""

    input: Text | Texts | Annotated[list[Texts], Field(fail_fast=True)] = Field(
        description="a text, which is split at blanks, a list of texts, or a list of lists of words"
    )


class GenerateBody(StreamBody):
    """POST /generate."""

    input: Inputs = Field(description="a text, a list of texts, a list of token ids, or a list of such lists")


class LoadBody(BaseModel):
    """POST /v1/load_lora_adapter, as in vLLM."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    lora_name: str = Field(min_length=1, max_length=200, pattern=NAME, description="what clients will call the delta")
    lora_path: str = Field(min_length=1, max_length=4096, description="its folder, below the server's folder of deltas")
    base_model_name: str | None = _unused("the model that it belongs to")
    load_inplace: bool | None = Field(None, description="true: replace a delta of this name")


class UnloadBody(BaseModel):
    """POST /v1/unload_lora_adapter, as in vLLM."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    lora_name: str = Field(min_length=1, max_length=200, description="the name of the delta")
    lora_int_id: int | None = _unused("a number of vLLM's")


class DeltaBody(BaseModel):
    """POST /v1/deltas."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1, max_length=200, pattern=NAME, description="what clients will call the delta")
    folder: str | None = Field(
        None, min_length=1, max_length=4096, description="its folder, below the server's folder of deltas [its name]"
    )
