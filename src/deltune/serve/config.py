"""The configuration of a server: sections of checked values, from one YAML file and options over it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError

from ..config import MAX_COUNT, CommaSeparated, Layout, Section, option
from ..errors import error_from_problems, validation_problems
from ..files import number_of_bytes

MAX_INPUTS = 2**16
"""Texts that a server can be told to take in one request."""


def _refuse_bool(value: Any) -> Any:
    """Refuse true and false for a number, of which pydantic makes 1 and 0."""
    if isinstance(value, bool):
        raise ValueError("Input should be a number")
    return value


REFUSE_BOOL = BeforeValidator(_refuse_bool)
BYTES = BeforeValidator(lambda value: number_of_bytes(value) if isinstance(value, str) else value)
Bytes = Annotated[int, BYTES, REFUSE_BOOL, Field(ge=1, le=2**50)]
BytesOrNone = Annotated[int, BYTES, REFUSE_BOOL, Field(ge=0, le=2**50)]
Names = Annotated[tuple[str, ...], CommaSeparated]
Size = Annotated[int, REFUSE_BOOL, Field(ge=1, le=MAX_COUNT)]
Seconds = Annotated[float, REFUSE_BOOL, Field(gt=0, le=10**7, allow_inf_nan=False)]
Duration = Annotated[float, REFUSE_BOOL, Field(ge=0, le=10**7, allow_inf_nan=False)]
Rate = Annotated[float, REFUSE_BOOL, Field(gt=0, le=10**12, allow_inf_nan=False)]


class ModelSection(Section):
    """The frozen model that all deltas share."""

    name: str = Field(
        min_length=1, description="the base model: hub id, folder or minilm", json_schema_extra={"common": True}
    )
    served_name: str | None = option(
        None, "what clients call the base model [the last part of its name]", common=True, min_length=1, max_length=200
    )
    kind: Literal["auto", "causal-lm", "seq2seq-lm", "classification", "tagging", "base"] = option(
        "auto", "the head of the model: classification, tagging, base, causal-lm or seq2seq-lm [auto: as saved]"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "type of the weights; auto: as they are stored"
    )
    device: str = option("auto", "auto (an accelerator where there is one), cpu, cuda, cuda:1, mps", common=True)


class DeltasSection(Section):
    """Where the deltas are, and how many are in memory."""

    folder: str | None = option(
        None, "a delta, a run, an adapter of PEFT or AdapterHub, or a folder with a folder for each", common=True
    )
    watch: Duration = option(2.0, "seconds between looks at the folder; 0: only when told", common=True)
    max_loaded: Size = option(64, "deltas in memory, at most; the least recently used one goes first", common=True)
    max_loaded_bytes: Bytes | None = option(None, "memory for deltas, such as 2GiB [no limit]", common=True)
    max_names: Size = option(
        1000, "deltas that requests may load under another name than that of their folder, at most", common=True
    )


class BatchingSection(Section):
    """Sizes of batches, and numbers of requests that may wait."""

    max_batch_tokens: Size | None = option(None, "tokens of a batch, at most [4096]")
    max_batch_size: Size | None = option(None, "rows of a batch, at most [32]")
    max_prefill_tokens: Size | None = option(
        None, "tokens of a decoder's prompt that are read in one step, at most [512]"
    )
    max_pass_seconds: Seconds = option(0.1, "about how many seconds a pass of an encoder takes, at most")
    max_wait: Duration = option(0.005, "seconds that a first request waits for others")
    max_queue: Size = option(1024, "inputs that may wait in all", common=True)
    max_queue_per_tenant: Size = option(256, "inputs of one tenant that may wait", common=True)
    max_request_tokens: Size | None = option(
        None, "tokens of a request, its answer included, at most [what the model can]", common=True
    )
    prompt_cache: BytesOrNone = option(64 << 20, "memory for beginnings of prompts, such as 64MiB; 0: none")


class HttpSection(Section):
    """The address and what is served there."""

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 for all", common=True, min_length=1)
    port: Annotated[int, REFUSE_BOOL] = option(
        8000, "port to listen on; 0: any that is free", common=True, ge=0, le=65535
    )
    keys: str | None = option(None, "file of API keys (deltune serve-key) [none: everybody may ask]", common=True)
    manage: bool | None = option(
        None, "whether requests may load and unload deltas [without keys, on a local address]", common=True
    )
    page: bool = option(True, "show a page about the server at /", common=True)
    ssl_certfile: str | None = option(None, "certificate, for HTTPS")
    ssl_keyfile: str | None = option(None, "key of the certificate")
    cors_origins: Names = option((), "web origins whose pages may ask: https://a.example,…")
    drain: Duration = option(30.0, "seconds in which running requests may end after SIGTERM", common=True)
    drain_delay: Duration = option(
        0.0, "seconds between /ready saying no and the end of accepting requests, for load balancers", common=True
    )


class LimitsSection(Section):
    """Limits of a request and of a tenant. A key's own rates are in the file of keys."""

    max_body: Bytes = option(4 << 20, "size of a request, such as 4MiB", common=True)
    max_inputs: Annotated[int, REFUSE_BOOL] = option(
        256,
        f"inputs of one request, {MAX_INPUTS:,} at most, and no more than may wait",
        common=True,
        ge=1,
        le=MAX_INPUTS,
    )
    max_tokens: Size = option(4096, "tokens of a generated answer, at most", common=True)
    default_max_tokens: Size = option(256, "tokens of a chat's answer where the request does not say", common=True)
    timeout: Seconds = option(300.0, "seconds for the answer to a request", common=True)
    header_timeout: Seconds = option(
        10.0, "seconds in which a client must have sent the headers of its request", common=True
    )
    body_timeout: Seconds = option(30.0, "seconds in which a client must have sent its request", common=True)
    send_timeout: Seconds = option(60.0, "seconds in which a client must take the next part of a stream")
    requests_per_minute: Rate | None = option(None, "requests of a tenant in a minute, at most [no limit]", common=True)
    tokens_per_minute: Rate | None = option(
        None, "tokens of a tenant in a minute, read and generated, at most [no limit]", common=True
    )


class LogSection(Section):
    """Lines of JSON on standard error, one for each request."""

    log: Literal["requests", "errors", "off"] = option("requests", "which requests have a line")
    log_contents: bool = option(False, "write inputs and answers too", common=True)


class RaySection(Section):
    """Replicas on Ray Serve."""

    ray: bool = option(False, "run on a Ray cluster", common=True)
    replicas: Size = option(1, "replicas at the start and at least", common=True)
    max_replicas: Size | None = option(None, "replicas at most, by load [as many as at the start]", common=True)
    cpus: Rate = option(1.0, "cores of a replica", common=True)
    gpus: Duration = option(0.0, "accelerators of a replica", common=True)
    ongoing: Size = option(32, "requests that a replica works on before another one is started", common=True)
    address: str | None = option(None, "of the Ray cluster [$RAY_ADDRESS, else one on this machine]")


LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")


class ServeConfig(Section):
    """Everything that `deltune serve` can be told."""

    model: ModelSection
    deltas: DeltasSection = DeltasSection()
    batching: BatchingSection = BatchingSection()
    http: HttpSection = HttpSection()
    limits: LimitsSection = LimitsSection()
    log: LogSection = LogSection()
    ray: RaySection = RaySection()

    @classmethod
    def from_values(cls, *sources: Mapping[str, Any]) -> ServeConfig:
        """Make a config from values by flat names, by section.field, or in sections; later sources win."""
        problems: list[str] = []
        merged: dict[str, Any] = {}
        for source in sources:
            flat = LAYOUT.flatten(source)
            problems += LAYOUT.name_problems(flat)
            merged |= flat
        nested = LAYOUT.nest(merged)
        if "model" not in merged:
            problems.append(f"model is missing: {ModelSection.model_fields['name'].description}")
            nested["model"]["name"] = "missing"
        try:
            config = cls.model_validate(nested)
        except ValidationError as error:
            problems += validation_problems(error, show_values=True)
        else:
            problems += _contradictions(config)
        if problems:
            raise error_from_problems("the config of the server is wrong", problems)
        return config

    @property
    def base_name(self) -> str:
        """The name by which clients call the base model."""
        return self.model.served_name or Path(self.model.name).name or self.model.name

    @property
    def is_local(self) -> bool:
        """Only this machine can reach the address."""
        return self.http.host in LOCAL_HOSTS


SECTIONS: Mapping[str, type[Section]] = {
    name: field.annotation  # type: ignore[misc]
    for name, field in ServeConfig.model_fields.items()
}
"""The sections of a server's configuration, by name."""

FLAT_NAMES = {
    "model.name": "model", "deltas.folder": "deltas", "ray.address": "ray_address", "ray.cpus": "ray_cpus",
    "ray.gpus": "ray_gpus", "ray.ongoing": "ray_ongoing",
}  # fmt: skip
"""The fields whose flat name is not their own."""

LAYOUT = Layout(SECTIONS, FLAT_NAMES)
PLACES = LAYOUT.places
"""Flat name, as on the command line -> section and field."""
DOTTED = LAYOUT.flat_by_dotted
"""Dotted name (section.field) -> flat name."""


def _contradictions(config: ServeConfig) -> list[str]:
    """List values that do not fit together."""
    problems = []
    if bool(config.http.ssl_certfile) != bool(config.http.ssl_keyfile):
        problems.append("http.ssl_certfile and http.ssl_keyfile belong together; give both or none")
    if config.http.manage is not None and config.http.keys is not None:
        problems.append("http.manage is for a server without keys; a key says itself what it may do")
    if config.ray.max_replicas is not None and config.ray.max_replicas < config.ray.replicas:
        problems.append(f"ray.max_replicas: {config.ray.max_replicas} is less than ray.replicas, {config.ray.replicas}")
    return problems
