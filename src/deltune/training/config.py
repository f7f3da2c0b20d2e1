"""The configuration of one run: sections of checked values, read from flat or nested names, named by its content.

YAML files are read within bounds: of their size, their depth and what their aliases repeat.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    ModelWrapValidatorHandler,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)

from ..data.columns import TASK_COLUMNS
from ..errors import MAX_NAME_LENGTH, DeltuneError, error_from_problems, excerpt, unknown_name
from ..filesystem import user_path
from ..methods.other_names import hint_for_option
from ..methods.registry import default_learning_rate, parse
from ..methods.spec import explicit_expression
from ..metrics.registry import METRICS
from ..models import Quantization
from ..runtime.linear_backend import LinearBackend
from ..tasks.registry import TASKS
from .presets import (
    AUTO,
    DEFAULT,
    FLAT_NAMES,
    apply_preset,
    merge_metric_options,
    merge_values,
    official_options,
    without_official_options,
)

MAX_BYTES = 2**18
"""The largest file: the config of a run has two thousand bytes, a study a few times as many."""
MAX_DEPTH = 20
"""The most lists and mappings inside one another; no run and no study has a third of them."""
MAX_VALUES = 20_000
"""The most values in all, those behind an alias counted each time that it is used."""

SILENT = ("protocol", "report_to", "device_batch_size", "trunk_cache")
"""Flat names of the fields that cannot change the result, and so do not enter a run's name. A protocol counts by the
values that it sets; the rows and the loss of a step are the same however the step is cut into device batches; the
states of the frozen layers are the same wherever they come from. All of this holds up to rounding."""

UNSEARCHED = ("search", "seed", "seeds", "protocol", "aggregate", "metric", "report_to")
"""Flat names of the fields that are the same in all runs of a search."""

MAX_COMBINATIONS = 1000
"""The most combinations of values that a search may try."""

MAX_COUNT = 2**31 - 1
"""The greatest value of any count: a greater one does not fit into the tensors that hold it."""


def _split_commas(value: Any) -> Any:
    """Turn the text "a, b" into a tuple, and "text=a, label=b" into a dictionary; leave other values alone."""
    if not isinstance(value, str):
        return value
    items = [item.strip() for item in value.split(",") if item.strip()]
    if items and all("=" in item for item in items):
        return {key.strip(): name.strip() for key, name in (item.split("=", 1) for item in items)}
    return tuple(items)


CommaSeparated = BeforeValidator(_split_commas)
Size = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Tracker = Literal["tensorboard", "wandb", "mlflow"]
Rate = Annotated[
    Annotated[float, Field(gt=0, allow_inf_nan=False), Tag("rate[number]")]
    | Annotated[Literal["auto"], Tag("rate[auto]")],
    Discriminator(lambda value: "rate[auto]" if value == AUTO else "rate[number]"),
]
"""A learning rate, or that one is to be searched for; the tags keep apart what is wrong with a number."""


def _option(default: Any, description: str, *, common: bool = False, **constraints: Any) -> Any:
    """A field with a default. `common` fields are listed by `deltune train --help`."""
    return Field(default, description=description, json_schema_extra={"common": common}, **constraints)


class Section(BaseModel):
    """One part of a run's configuration. A folder is kept as an absolute path."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("name", "source", "data_root", check_fields=False)
    @classmethod
    def _make_absolute(cls, value: str | None) -> str | None:
        if value is None or value == "minilm":
            return value
        try:
            path = user_path(value)
        except DeltuneError as error:
            raise ValueError(str(error)) from error
        return str(path.resolve()) if path.exists() else value


class ModelSection(Section):
    """The pretrained model."""

    name: str = Field(
        min_length=1, description="hub id, folder, or minilm (the packaged one)", json_schema_extra={"common": True}
    )
    quantize: Quantization | None = _option(
        None,
        "quantise the linears while loading: nf4 and int8 by bitsandbytes, torchao-int8, … (extra quant)",
        common=True,
    )


class DataSection(Section):
    """The rows that are read, and how long their texts may be."""

    source: str | None = _option(
        None, "folder with train, validation and test files, or a hub id", common=True, min_length=1
    )
    task: str | None = _option(
        None, "known task (`deltune tasks`); beside --data its kind of task: tagging, language, …", common=True
    )
    data_root: str | None = _option(None, "folder that holds the folders of known tasks", common=True)
    columns: Annotated[dict[str, str] | tuple[str, ...] | None, CommaSeparated] = _option(
        None, "which column is what: text=a,label=b [meta.json, else by their usual names]", common=True
    )
    labels: Annotated[tuple[str, ...] | None, CommaSeparated] = _option(
        None, "label names in the order of their ids: a,b,c", common=True
    )
    relabel: Annotated[dict[str, str] | None, CommaSeparated] = _option(
        None, "new names of labels: a=x,b=x,c=y; several may become one"
    )
    tag_scheme: Literal["iob2", "plain"] | None = _option(
        None, "of tagging: iob2 converts tags of entities to IOB2; plain: tags are classes of words [as recognised]"
    )
    max_train_rows: Size | None = _option(None, "train on a sample of that many rows", common=True)
    validation_rows: Size | None = _option(None, "validate on a sample of that many rows")
    test_rows: Size | None = _option(None, "score on a sample of that many test rows")
    max_length: int = _option(128, "tokens of a row; longer texts are cut", common=True, ge=2, le=MAX_COUNT)
    target_length: Size = _option(64, "tokens of a target; longer ones are cut", common=True)
    source_language: str | None = _option(
        None, "for a multilingual tokenizer: en, or its own en_XX [the task's]", min_length=1
    )
    target_language: str | None = _option(None, "language of targets and answers [the task's]", min_length=1)


class MethodSection(Section):
    """What is tuned."""

    expression: str = Field(
        description='expression, such as "prefix(length=16) + layernorm"', json_schema_extra={"common": True}
    )
    head: Literal["train", "freeze"] = _option(
        "train", "train the task head with the method, or freeze it", common=True
    )
    trunk_dropout: Literal["on", "off"] = _option(
        "on", "off: the layers below everything trained run without dropout, once for each row"
    )

    @field_validator("expression", mode="before")
    @classmethod
    def _shorten_expression(cls, value: Any) -> str:
        try:
            return repr(parse(repr(parse(value))))  # the result of `fit` prints its sizes, also where they are defaults
        except DeltuneError as error:
            raise ValueError(str(error)) from error

    @field_validator("trunk_dropout", mode="before")
    @classmethod
    def _read_switch(cls, value: Any) -> Any:
        return {True: "on", False: "off"}[value] if isinstance(value, bool) else value  # YAML's on and off


class OptimSection(Section):
    """AdamW, its schedule and the size of a step."""

    epochs: Size = _option(3, "passes over the training rows, at most", common=True)
    steps: Size | None = _option(None, "steps of the optimizer, in place of epochs", common=True)
    lr: Rate | None = _option(
        None, "learning rate; auto: a short search [the method's for the number of steps]", common=True
    )
    lr_source: Literal["default", "auto"] | None = _option(
        None, "where the lr that a run wrote into its spec comes from: default or auto"
    )
    schedule: Literal["linear", "constant", "cosine", "polynomial"] = _option(
        "linear", "after the warm-up: linear, constant, cosine or polynomial", common=True
    )
    warmup: float = _option(0.0, "share of all steps if below 1, else steps", common=True, ge=0, allow_inf_nan=False)
    batch_size: Size = _option(32, "rows of a step, over all devices", common=True)
    batch_tokens: Size | None = _option(None, "tokens of a step, padding included, in place of batch_size")
    device_batch_size: Size | None = _option(
        None, "rows at a time on a device; gradients accumulate up to batch_size [all]", common=True
    )
    weight_decay: float = _option(0.0, "of AdamW", ge=0, allow_inf_nan=False)
    clip: float = _option(1.0, "greatest norm of the gradient; 0: no limit", ge=0, allow_inf_nan=False)
    label_smoothing: float = _option(0.0, "share of every label that is spread over all labels", ge=0, lt=1)
    adam_betas: Annotated[tuple[Beta, Beta], CommaSeparated] = _option((0.9, 0.999), "of AdamW")
    adam_epsilon: float = _option(1e-8, "of AdamW", gt=0, allow_inf_nan=False)

    @property
    def rate(self) -> float:
        """The learning rate of a run that trains. Before, a config has one only if it was given."""
        assert isinstance(self.lr, float)
        return self.lr

    def rows_per_device(self, processes: int = 1) -> int:
        """Return how many rows are computed at a time on one device.

        Args:
            processes: How many processes train together, with a device each.

        Raises:
            DeltuneError: The rows of all processes do not add up to batch_size.
        """
        unit = processes * (self.device_batch_size or 1)
        if self.batch_tokens is None and self.batch_size % unit:
            below, (share, remainder) = self.batch_size // unit * unit, divmod(self.batch_size, processes)
            sizes = " or ".join(str(size) for size in (below, below + unit) if size)
            divisors = ", ".join(str(rows) for rows in range(1, min(share, 10_000) + 1) if share % rows == 0)
            raise DeltuneError(
                f"batch_size={self.batch_size} is no multiple of {processes} process{'es' if processes > 1 else ''}"
                + (f" of {self.device_batch_size} rows at a time" if self.device_batch_size else "")
                + f": give a batch_size of {sizes}"
                + ("" if remainder else f"; or a device_batch_size of {divisors}")
            )
        return self.device_batch_size or max(1, self.batch_size // processes)


class GenerationSection(Section):
    """Answers in words: how a model is asked, and how its text is searched for."""

    answer: Literal["head", "words"] = _option(
        "head", "answer by a head over the labels, or in words of a language model", common=True
    )
    words: Annotated[dict[str, str] | None, CommaSeparated] = _option(
        None, "the word of each label: label=word,… [the task's, else the label]"
    )
    template: str | None = _option(None, 'the text that a model is given: "{source}" [the task\'s]')
    max_generated: Size | None = _option(None, "tokens of a generated answer, at most [target_length]")
    min_target_length: int = _option(0, "tokens of a generated answer, at least", ge=0, le=MAX_COUNT)
    beams: Size = _option(1, "beams of beam search", common=True)
    length_penalty: float = _option(1.0, "of beam search: above 0 longer answers win", allow_inf_nan=False)
    no_repeat_ngram: int = _option(0, "no n tokens in a row occur twice in an answer; 0: they may", ge=0, le=MAX_COUNT)


class EvaluationSection(Section):
    """When the model is validated, and by which metrics."""

    metrics: Annotated[tuple[str, ...], CommaSeparated] = _option(
        (), "what is measured: a,b,c [the task's]", common=True
    )
    metric: str | None = _option(
        None, "chooses the best epoch; a tie goes to the lower validation loss [the first metric]", common=True
    )
    metric_options: dict[str, dict[str, Any]] = _option({}, "options of metrics: {bertscore: {model: FOLDER}}")
    validate_every: Size | None = _option(None, "steps between validations [an epoch]")
    patience: Size | None = _option(None, "stop after that many validations without a better one [never]", common=True)

    @field_validator("metrics")
    @classmethod
    def _check_metrics(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return _raise_all(value, (unknown_name("metric", name, METRICS) for name in value if name not in METRICS))

    @field_validator("metric")
    @classmethod
    def _check_metric(cls, value: str | None) -> str | None:
        names = ["loss", *METRICS]
        return _raise_all(value, [] if value in (None, *names) else [unknown_name("metric", str(value), names)])

    @field_validator("metric_options")
    @classmethod
    def _check_metric_options(cls, value: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        return _raise_all(value, _metric_option_problems(value))


class RuntimeSection(Section):
    """Seeds, searches and the machine."""

    protocol: str | None = _option(None, "a paper's values for what is not given: ln_nlu, uv_glue, ap, …", common=True)
    seed: Seed = _option(0, "of initial values, order, dropout and the sample of rows", common=True)
    seeds: Annotated[tuple[Seed, ...], CommaSeparated] = _option(
        (), "a run of each, and their aggregate: 0,1,2", common=True
    )
    aggregate: Literal["mean", "median"] = _option("mean", "of the scores of several seeds")
    search: dict[str, tuple[Any, ...]] = _option(
        {}, "values to try in order; the next only if validation is better (repeatable: lr=1e-3)", common=True
    )
    precision: Literal["fp32", "bf16", "auto"] = _option(
        "fp32",
        "bf16 by autocast, what is trained stays in fp32; auto: bf16 on an accelerator that has it, fp32 on any CPU",
        common=True,
    )
    linear_backend: LinearBackend = _option(
        "torch", "of frozen linear layers in fp32 on a CPU: torch, or onednn, faster where MKL has no AVX-512"
    )
    trunk_cache: float = _option(
        8.0, "with trunk_dropout off, GiB on disk for the states of these layers; 0: run them in every pass",
        ge=0, allow_inf_nan=False,
    )  # fmt: skip
    report_to: Annotated[tuple[Tracker, ...], CommaSeparated] = _option((), "tensorboard, wandb, mlflow", common=True)

    @field_validator("seeds")
    @classmethod
    def _check_seeds(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        return _raise_all(value, [f"seeds must be different, not {value}"] if len(set(value)) < len(value) else [])

    @field_validator("search", mode="before")
    @classmethod
    def _flatten_search(cls, value: Any) -> Any:
        return _by_flat_name(value.items()) if isinstance(value, Mapping) else value

    @field_validator("search")
    @classmethod
    def _check_search(cls, value: dict[str, tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
        searchable = set(PLACES) - set(UNSEARCHED)
        problems = [
            f"{name} is given twice, also as {DOTTED[name]}"
            if name in DOTTED
            else unknown_name("option", name, searchable)
            for name in value
            if name not in PLACES
        ]
        problems += [f"{name} is not searched but given" for name in value if name in UNSEARCHED]
        problems += [f"no values for {name}" for name, values in value.items() if not values]
        if (combinations := math.prod(len(values) for values in value.values())) > MAX_COMBINATIONS:
            problems.append(
                f"{combinations:,} combinations of values to try are more than {MAX_COMBINATIONS:,}; leave some out"
            )
        return _raise_all(value, problems)


SECTIONS: Mapping[str, type[Section]] = {
    "model": ModelSection,
    "data": DataSection,
    "method": MethodSection,
    "optim": OptimSection,
    "generation": GenerationSection,
    "evaluation": EvaluationSection,
    "runtime": RuntimeSection,
}
"""The sections of a run's configuration, by name."""

PLACES: Mapping[str, tuple[str, str]] = {
    FLAT_NAMES.get(f"{section}.{field}", field): (section, field)
    for section, kind in SECTIONS.items()
    for field in kind.model_fields
}
"""Flat name -> section and field. Flat names are those of 0.1 spec.yaml files, of command-line options and of stored
results."""

DOTTED: Mapping[str, str] = {f"{section}.{field}": name for name, (section, field) in PLACES.items()}
"""Dotted name (section.field) -> flat name."""


class RunConfig(BaseModel):
    """Everything that decides the result of one run; where the result goes is no part of it.

    It takes nested values, `RunConfig(model={"name": …}, optim={"lr": …}, …)`, or flat ones: `RunConfig.from_flat`.
    It is resolved when it is made: a protocol's values are filled in, a folder is an absolute path, and a method is its
    shortest expression. Only a learning rate that is not given waits for the run, which knows its number of steps.

    Raises:
        DeltuneError: Some values are wrong; the message lists every problem at once.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: ModelSection
    data: DataSection
    method: MethodSection
    optim: OptimSection
    generation: GenerationSection
    evaluation: EvaluationSection
    runtime: RuntimeSection

    @model_validator(mode="wrap")
    @classmethod
    def _resolve(cls, values: Any, handler: ModelWrapValidatorHandler[RunConfig]) -> RunConfig:
        if isinstance(values, RunConfig):
            return handler(values)
        if not isinstance(values, Mapping):
            raise DeltuneError(f"the config of a run is a mapping such as {{'model': 'minilm'}}, not {excerpt(values)}")
        flat = flatten(values)
        flat.pop("task_version", None)  # `canonical` adds it
        if problems := _plain_value_problems(flat):
            raise error_from_problems("the config of the run is wrong", problems)
        problems = [*_name_problems(flat), *_source_problems(flat), *_batch_size_problems(flat)]
        methods = search.get("method") if isinstance(search := flat.get("search"), Mapping) else None
        if "method" not in flat and isinstance(methods, list | tuple) and methods:
            flat["method"] = methods[0]
        if all(isinstance(flat.get(name), str | None) for name in ("task", "protocol")):
            try:
                flat = apply_preset(flat)
            except DeltuneError as error:
                problems.append(str(error))
        if (official := official_options(flat)) and isinstance(flat.get("metric_options"), Mapping | None):
            flat["metric_options"] = merge_metric_options(official, flat.get("metric_options") or {})
        if flat.get("lr") == DEFAULT:
            flat["lr"] = None
        problems += _rate_problems(flat)
        try:
            config = handler(_nest(flat))
        except ValidationError as error:
            problems = [_describe(one) for one in error.errors()] + problems
        if problems:
            raise error_from_problems("the config of the run is wrong", problems)
        for name, tried in config.runtime.search.items():  # converted as the field converts: "1e-3" is a number
            config.runtime.search[name] = tuple(config.single(**{name: value}).flat()[name] for value in tried)
        return config

    @classmethod
    def from_canonical(cls, values: Mapping[str, Any]) -> RunConfig:
        """Make the config whose `canonical` values these are.

        Where they have no learning rate, it is that of the method, whatever the number of steps.
        """
        search = values.get("search", {})
        rate = {} if {"lr", "method"} & {*search} else {"lr": default_learning_rate(values["method"])}
        return cls.from_flat(**{**rate, **values})

    @classmethod
    def from_flat(cls, **values: Any) -> RunConfig:
        """Make a config from flat names, as in `RunConfig.from_flat(model="minilm", data="tickets", method="lora")`.

        Args:
            values: Values by flat name (`PLACES`); what is not given keeps its default.

        Raises:
            DeltuneError: Some values are wrong; the message lists every problem at once.
        """
        return cls.model_validate(values)

    def flat(self, **options: Any) -> dict[str, Any]:
        """Return {flat name: value}; flat names are those of the command line (`lr`). `options`: as in `model_dump`."""
        nested = self.model_dump(**options)
        return {
            DOTTED[f"{section}.{field}"]: value for section, values in nested.items() for field, value in values.items()
        }

    def replace(self, **changes: Any) -> RunConfig:
        """Return a config with other values, given by flat name and checked like all values.

        A value takes the place of those that exclude it (epochs of steps, seed of seeds), as on the command line.
        """
        return type(self).from_flat(**merge_values(self.flat(), changes))

    def with_rate_of(self, other: RunConfig) -> RunConfig:
        """Return this config with the learning rate that a run of the same config found.

        Args:
            other: The config that the run wrote; one of another name, or without a rate, changes nothing.
        """
        if isinstance(self.optim.lr, float) or not isinstance(other.optim.lr, float) or other.name != self.name:
            return self
        return self.replace(lr=other.optim.lr, lr_source=other.optim.lr_source)

    @property
    def metric_options(self) -> dict[str, Any]:
        """The options of metrics that were given, without those that are of the official script of the task."""
        return without_official_options(self.evaluation.metric_options, self.flat())

    @property
    def is_series(self) -> bool:
        """Whether this describes more than one run: several seeds, or values to try."""
        return bool(self.runtime.seeds or self.runtime.search)

    def search_configs(self) -> list[RunConfig]:
        """Return one config per combination of the values in `search`, in the order given, all with the first seed."""
        search, seeds = self.runtime.search, self.runtime.seeds
        first = seeds[0] if seeds else self.runtime.seed
        return [
            self.single(seed=first, **dict(zip(search, values, strict=True)))
            for values in itertools.product(*search.values())
        ]

    def single(self, **changes: Any) -> RunConfig:
        """Return one run of a series, with these values by flat name; a config of a single run is its own.

        The values take the place of others as in `replace`, but a learning rate that was given is that of all runs.

        Raises:
            DeltuneError: A field does not take its value.
        """
        if not self.is_series:
            return self
        values = {n: v for n, v in self.flat().items() if n not in ("seeds", "search", "aggregate", "protocol")}
        if values["lr_source"] is None:
            changes = {"lr": values["lr"], **changes}
        return type(self).from_flat(**merge_values(values, changes))

    def adds_seeds_to(self, other: RunConfig) -> bool:
        """Whether this is the other config with further seeds behind its seeds, and is the same in all else."""
        before, now = other.runtime.seeds or (other.runtime.seed,), self.runtime.seeds
        return len(now) > len(before) and now[: len(before)] == before and other.replace(seeds=now).name == self.name

    def canonical(self) -> dict[str, Any]:
        """Return the values that are not at their default and can change the result, by flat name, as JSON values.

        `from_canonical` is the inverse. A learning rate that a run found is named by where it comes from.
        """
        values = self.flat(mode="json", exclude_defaults=True)
        values["linear_backend"] = self.runtime.linear_backend  # stored results are found by names that have it
        search, limit = self.runtime.search, self.data.target_length
        source = values.pop("lr_source", DEFAULT if self.optim.lr is None and "lr" not in search else None)
        if source is not None:
            values["lr"] = source
        redundant = {
            **dict.fromkeys(SILENT, True),
            "lr": values.get("lr") == default_learning_rate(self.method.expression) and "method" not in search,
            "seed": bool(self.runtime.seeds),
            "epochs": self.optim.steps is not None,
            "aggregate": not self.runtime.seeds,
            "max_generated": self.generation.max_generated == limit and "target_length" not in search,
            "data_root": self.data.source is not None,
        }
        if self.data.source is None and TASKS[str(self.data.task)].version > 1:
            values["task_version"] = TASKS[str(self.data.task)].version
        return {name: value for name, value in values.items() if not redundant.get(name)}

    @property
    def name(self) -> str:
        """The first 16 digits of the SHA-256 of the canonical JSON; equal for configs that mean the same run."""
        text = json.dumps(self.canonical(), sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def __hash__(self) -> int:
        return hash(self.name)

    def differences(self, other: RunConfig) -> list[str]:
        """Describe the fields that differ, with both values; the list is empty for configs of the same name."""
        canonical, canonical_now = self.canonical(), other.canonical()
        before, now = self.flat(), other.flat()
        differing = [name for name in PLACES if canonical.get(name) != canonical_now.get(name)]
        return [f"{_dotted(name)}: {before[name]!r} there, {now[name]!r} now" for name in differing]

    def yaml(self) -> str:
        """Write out every value, defaults included, as nested YAML, so that the file outlives a change of defaults."""
        values = self.flat(mode="json") | {"method": explicit_expression(parse(self.method.expression))}
        return yaml.safe_dump(_nest(values), sort_keys=False, allow_unicode=True, width=120)


def read_config(path: str | Path) -> RunConfig:
    """Read the config of a run from a YAML file, nested or flat.

    Raises:
        DeltuneError: The file cannot be read, is no mapping, or its values are wrong.
    """
    return RunConfig.model_validate(read_values(path))


def read_values(path: str | Path) -> dict[str, Any]:
    """Read the mapping of a YAML file; whether its values are right is not checked.

    Raises:
        DeltuneError: There is no such file, it is broken or no mapping, or it is beyond the bounds above.
    """
    try:
        with user_path(path, "file").open("rb") as file:
            text = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise DeltuneError(f"{path} cannot be read: {error}") from error
    if len(text) > MAX_BYTES:
        raise DeltuneError(
            f"{path} is larger than {MAX_BYTES // 1024} KiB, which no config is; give the YAML file of a run or a study"
        )
    try:
        values = parse_yaml(text.decode("utf-8-sig"), str(path))
    except UnicodeDecodeError as error:
        raise DeltuneError(f"{path} cannot be read: it is not UTF-8 ({error}); save it as UTF-8") from error
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise DeltuneError(f"{path} is no config: it must be a mapping such as `model: minilm`, not {excerpt(values)}")
    return values


class _TooLarge(Exception):
    """A file that is larger inside than it may be."""


def parse_yaml(text: str, where: str) -> Any:
    """Parse a YAML document within bounds: it is measured before any value is made.

    Args:
        text: The document.
        where: The file or the option that it was given in, which a message begins with.

    Raises:
        DeltuneError: It is broken, repeats a key of a mapping, or is beyond the bounds above.
    """
    try:
        return _construct(text)
    except yaml.YAMLError as error:
        raise DeltuneError(f"{where} is broken YAML: {' '.join(str(error).split())}") from error
    except _TooLarge as error:
        raise DeltuneError(f"{where} {error}") from error


def _construct(text: str) -> Any:
    """What a YAML document says: composed, measured, and only then made into values.

    Raises:
        yaml.YAMLError: It is broken, or repeats a key.
        _TooLarge: It is too deep, holds itself, or has too many values.
    """
    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return None
        _measure(root, {}, ())
        if problems := _repeated_keys(root, set()):
            raise yaml.YAMLError("; ".join(problems))
        try:
            return loader.construct_document(root)
        except yaml.YAMLError:
            raise
        except Exception as error:  # what a constructor says of a value that its tag does not fit: almost anything
            raise yaml.YAMLError(f"a value does not fit its type ({type(error).__name__}: {error})") from error
    except RecursionError:
        raise _TooLarge("is nested too deeply") from None
    finally:
        loader.dispose()


def _repeated_keys(node: yaml.Node, seen: set[int]) -> list[str]:
    """List the keys that a mapping at or below a node gives twice, of which YAML readers take the last silently.

    Args:
        node: Where to begin.
        seen: The nodes that were looked at, by identity; filled here.
    """
    if not isinstance(node, yaml.CollectionNode) or id(node) in seen:
        return []
    seen.add(id(node))
    problems, lines = [], dict[tuple[str, str], int]()
    for entry in node.value:
        key, value = entry if isinstance(entry, tuple) else (None, entry)
        if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
            line = key.start_mark.line + 1
            if (key.tag, key.value) in lines:
                first = lines[key.tag, key.value]
                problems.append(f"the key {excerpt(key.value)} is given twice, on lines {first} and {line}")
            lines[key.tag, key.value] = line
        problems += [problem for child in (key, value) if child is not None for problem in _repeated_keys(child, seen)]
    return problems


def _measure(node: yaml.Node, counts: dict[int, int], above: tuple[int, ...]) -> int:
    """Count the values at and below a node, what is behind an alias each time.

    Args:
        node: Where to begin.
        counts: Counts by the identity of nodes, filled here.
        above: The nodes that hold this one.
    """
    if id(node) in above:
        raise _TooLarge("has an alias inside of what it stands for; write it out")
    if len(above) > MAX_DEPTH:
        raise _TooLarge(f"is nested too deeply: more than {MAX_DEPTH} lists and mappings inside one another")
    if id(node) not in counts:
        inside = (*above, id(node))
        below = node.value if isinstance(node, yaml.CollectionNode) else ()
        children = [child for entry in below for child in (entry if isinstance(entry, tuple) else (entry,))]
        counts[id(node)] = 1 + sum(_measure(child, counts, inside) for child in children)
        if counts[id(node)] > MAX_VALUES:
            raise _TooLarge(f"holds more than {MAX_VALUES:,} values, aliases counted each time; no config does")
    return counts[id(node)]


def flatten(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by flat name, from nested, dotted and flat names in any mixture.

    Nothing is refused here: unknown names, and names given a second time, stay as they are, and `RunConfig` lists them
    with the other problems.
    """
    entries: list[tuple[str, Any]] = []
    for key, value in values.items():
        if key in SECTIONS and isinstance(value, Section):
            value = dict(value)
        if key in SECTIONS and isinstance(value, Mapping):
            items = {f"{key}.{field}": item for field, item in value.items()}
        else:
            items = {} if key in SECTIONS and key not in PLACES and value is None else {key: value}
        entries += items.items()
    return _by_flat_name(entries)


def _by_flat_name(values: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """Return values by flat name; one that is given a second time stays beside the first, as section.field."""
    flat: dict[Any, Any] = {}
    for name, value in values:
        short = DOTTED.get(name, name)
        flat[_dotted(short) if short in flat else short] = value
    return flat


def _nest(flat: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return values by section and field; names that are no flat names are left out."""
    nested: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for name, (section, field) in PLACES.items():
        if name in flat:
            nested[section][field] = flat[name]
    return nested


def _dotted(name: str) -> str:
    """Return section.field of a flat name; another name as it is."""
    return ".".join(PLACES[name]) if name in PLACES else name


def _raise_all(value: Any, problems: Iterable[str]) -> Any:
    """Return the value of a field, or raise a ValueError with all of its problems."""
    if text := " ".join(problems):
        raise ValueError(text)
    return value


def _plain_value_problems(values: Mapping[str, Any]) -> list[str]:
    """List values that no file of a run could hold: huge numbers, half characters, objects (but for a Method)."""
    return [
        f"{_dotted(name) if isinstance(name, str) and name.replace('.', '').isidentifier() else excerpt(name)}: {text}"
        for name, value in values.items()
        for text in [
            _plain_problem(name, 0)
            or ("" if name == "method" and not isinstance(value, str) else _plain_problem(value, 0))
        ]
        if text
    ]


def _plain_problem(value: Any, depth: int) -> str:
    """Say what is wrong with the first value, at or inside this one, that is wrong; empty if none is."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return f"{excerpt(value)} holds half a character (a lone surrogate)"
        return f"{excerpt(value)} holds a NUL" if "\0" in value else ""
    if isinstance(value, int):
        return "" if abs(value) < 2**63 else f"{excerpt(value)} is too large a number"
    if value is None or isinstance(value, float):
        return ""
    if depth > MAX_DEPTH:
        return "it is nested too deeply"
    if isinstance(value, list | tuple):
        return next(filter(None, (_plain_problem(one, depth + 1) for one in value)), "")
    if isinstance(value, Mapping):
        return next(filter(None, (_plain_problem(one, depth + 1) for pair in value.items() for one in pair)), "")
    return f"{excerpt(value)} is no text, number, list or mapping but {type(value).__name__}"


def _name_problems(values: Mapping[Any, Any]) -> list[str]:
    """List names of no field, sections that are no mappings, and fields that are given twice."""
    problems = []
    for name in values:
        if name in PLACES:
            continue
        if not isinstance(name, str):
            problems.append(f"{excerpt(name)} is no name of an option but {type(name).__name__}")
            continue
        section, _, field = name.partition(".")
        if name in DOTTED:
            problems.append(f"{name} is given twice, also as {DOTTED[name]}")
        elif name in SECTIONS:
            problems.append(
                f"{name} is a section: give a mapping of its options, {', '.join(SECTIONS[name].model_fields)}"
            )
        elif field and section in SECTIONS:
            problems.append(unknown_name("option", field, SECTIONS[section].model_fields, section))
        else:
            problems.append(unknown_name("option", name, [*PLACES, "output"], hint=hint_for_option(name)))
    return problems


def _source_problems(values: Mapping[str, Any]) -> list[str]:
    """List what is wrong with where the data comes from: a source, or a known task."""
    source, task = values.get("data"), values.get("task")
    if source is None and task is None:
        return [f"data is missing: {DataSection.model_fields['source'].description}; or a known task"]
    if not isinstance(task, str | None):
        return []  # pydantic says so
    if source is None and task not in TASKS:
        return [f"data.task: {unknown_name('task', str(task), TASKS)}"]
    if source is not None and task is not None and task not in TASK_COLUMNS:
        return [
            f"data.task: {unknown_name('kind of task', str(task), TASK_COLUMNS)} Beside data, task is the kind of task"
        ]
    return []


def _batch_size_problems(values: Mapping[str, Any]) -> list[str]:
    """List what is wrong with two sizes of a batch: tokens exclude rows. A default that is written out is allowed."""
    fields = OptimSection.model_fields
    sizes = [f for f in ("batch_size", "device_batch_size") if values.get(f, fields[f].default) != fields[f].default]
    if values.get("batch_tokens") is None or not sizes:
        return []
    return [f"optim.batch_tokens: give it or {' and '.join(sizes)}, not both"]


def _rate_problems(values: Mapping[str, Any]) -> list[str]:
    """List what is wrong with the source of a rate, and with a search for one beside rates to try."""
    if values.get("lr_source") is not None and values.get("lr") in (None, AUTO):
        return ["optim.lr_source: a run writes it beside the lr that it found; leave it out, or give that lr as well"]
    search = values.get("search")
    tried = search.get("lr", search.get("optim.lr")) if isinstance(search, Mapping) else None
    if tried is None:
        return []
    if values.get("lr") == AUTO:
        return ["optim.lr: auto searches for a rate itself; give it, or the rates to try (search: {lr: …}), not both"]
    auto = AUTO in (tried if isinstance(tried, list | tuple) else [tried])
    return ["runtime.search: auto is no rate to try but a search; give it as lr: auto"] if auto else []


def _metric_option_problems(values: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """List what is wrong with the options of metrics: no such metric, no such option, a value of another type."""
    problems = [unknown_name("metric", name, METRICS) for name in values if name not in METRICS]
    for name in values.keys() & METRICS.keys():
        defaults = METRICS[name].options
        problems += [
            unknown_name("option", option, defaults, name) for option in values[name] if option not in defaults
        ]
        problems += [
            f"{name}.{option}: {excerpt(value)} is not of the kind of its default, {defaults[option]!r}"
            for option, value in values[name].items()
            if option in defaults and not _same_kind(defaults[option], value)
        ]
    return problems


def _same_kind(default: Any, value: Any) -> bool:
    """Whether a value is of the same kind as a default; a default of None stands for a name or a number."""
    if default is None:
        return value is None or isinstance(value, str | int)
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(default, bool) and isinstance(value, bool)
    return isinstance(value, int | float) if isinstance(default, int | float) else isinstance(value, type(default))


def _describe(error: Any) -> str:
    """Describe one problem that pydantic found."""
    parts = [str(part) for part in error["loc"] if not str(part).startswith(("dict[", "tuple[", "rate["))]
    place = ".".join(part if len(part) <= MAX_NAME_LENGTH else excerpt(part) for part in parts)
    if error["type"] == "missing":
        section, field, *_ = error["loc"]
        return f"{place} is missing: {SECTIONS[section].model_fields[field].description}"
    reason = error.get("ctx", {}).get("error")
    message = str(reason) if reason is not None else error["msg"][0].lower() + error["msg"][1:]
    if place in ("optim.epochs", "optim.steps") and str(error["input"]) == "0":
        return f"{place}: 0 trains nothing; the scores of the model as it is: deltune evaluate MODEL --data …"
    return f"{place}: {message}" + ("" if reason is not None else f", not {excerpt(error['input'])}")
