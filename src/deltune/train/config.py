"""The configuration of one run: sections of checked values, read from flat or nested names, named by its content."""

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
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    field_validator,
    model_validator,
)

from ..config import MAX_COUNT, MAX_DEPTH, CommaSeparated, Layout, Section, option, read_values
from ..errors import MAX_NAME_LENGTH, DeltuneError, error_from_problems, excerpt, unknown_name
from ..files import user_path
from ..methods.other_names import hint_for_option
from ..methods.registry import default_learning_rate, parse
from ..methods.spec import explicit_expression
from ..models import Pooling, Quantization
from ..runtime.linear import LinearBackend
from .data.columns import TASK_COLUMNS, LossOn
from .data.loading import mixture_weights
from .metrics.registry import METRICS, option_problems
from .presets import (
    DEFAULT,
    FLAT_NAMES,
    apply_preset,
    merge_metric_options,
    merge_values,
    official_options,
    without_official_options,
)
from .tasks.registry import TASKS

SILENT = (
    "protocol", "report_to", "device_batch_size", "trunk_cache", "probe", "packing", "activation_checkpointing",
    "use_liger_kernel", "attn_implementation",
)  # fmt: skip
"""Flat names of the fields that cannot change the result, and so do not enter a run's name. A protocol counts by the
values that it sets; the rows and the loss of a step are the same however it is cut into device batches and packed; the
states of the frozen layers and activations are the same wherever they come from; a probe stands beside a run. All of
this holds up to rounding."""

UNSEARCHED = ("search", "seed", "seeds", "split_seed", "protocol", "aggregate", "metric", "report_to")
"""Flat names of the fields that are the same in all runs of a search."""

MAX_COMBINATIONS = 1000
"""The most combinations of values that a search may try."""

DEFAULT_LENGTH = 128
"""Tokens of a row where none are given and it is no conversation."""

Size = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Tracker = Literal["tensorboard", "wandb", "mlflow"]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class RunSection(Section):
    """One part of a run's configuration. A folder is kept as an absolute path."""

    @field_validator("name", "source", "data_root", "init_from", check_fields=False)
    @classmethod
    def _make_absolute(cls, value: str | None) -> str | None:
        if value is None or value == "minilm":
            return value
        if weights := mixture_weights(value):
            return ",".join(f"{cls._make_absolute(name)}={weight:g}" for name, weight in weights.items())
        try:
            path = user_path(value)
        except DeltuneError as error:
            raise ValueError(str(error)) from error
        return str(path.resolve()) if path.exists() else value


def _read_switch(value: Any) -> Any:
    """Return a switch: YAML reads on and off as booleans."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


Switch = Annotated[Literal["on", "off"], BeforeValidator(_read_switch)]
Checkpointing = Annotated[Literal["off", "half", "on", "cpu"], BeforeValidator(_read_switch)]


class ModelSection(RunSection):
    """The pretrained model."""

    name: str = Field(
        min_length=1,
        description="the base model: hub id, folder or minilm",
        json_schema_extra={"common": True},
    )
    quantize: Quantization | None = option(
        None,
        "quantise the linears: nf4, int8, torchao-int8, … (extra quant)",
        common=True,
    )
    attn_implementation: Literal["eager", "sdpa", "flash_attention_2", "flash_attention_3"] | None = option(
        None, "how attentions are computed, as transformers names it [sdpa where the model has it]"
    )


class DataSection(RunSection):
    """The rows that are read, and how long their texts may be."""

    source: str | None = option(
        None,
        "folder with train, validation and test files, a file, or a hub id [A=.7]",
        common=True,
        min_length=1,
    )
    task: str | None = option(
        None, "a known task (`deltune tasks`), or the kind of task of the data: tagging, …", common=True
    )
    data_root: str | None = option(None, "folder that holds the folders of known tasks", common=True)
    columns: Annotated[dict[str, str] | tuple[str, ...] | None, CommaSeparated] = option(
        None, "which column is what: text=a,label=b [by their usual names]", common=True
    )
    labels: Annotated[tuple[str, ...] | None, CommaSeparated] = option(
        None, "names of the labels, in the order of their ids: a,b,c", common=True
    )
    relabel: Annotated[dict[str, str] | None, CommaSeparated] = option(
        None, "new names of labels: a=x,b=x,c=y; several may become one"
    )
    tag_scheme: Literal["iob2", "plain"] | None = option(
        None, "of tagging: iob2 converts tags of entities to IOB2; plain: tags are classes of words [as recognised]"
    )
    label_separator: str | None = option(
        None, "what stands between several labels in one text: '|'; ' ' for any blanks", min_length=1
    )
    split_seed: Seed | None = option(
        None, "seed by which a single file is split and samples of rows are drawn [of several runs the first's]"
    )
    max_train_rows: Size | None = option(None, "train on a sample of that many rows", common=True)
    validation_rows: Size | None = option(None, "validate on a sample of that many rows")
    test_rows: Size | None = option(None, "score on a sample of that many test rows")
    max_length: Annotated[int, Field(ge=2, le=MAX_COUNT)] | None = option(
        None, "tokens of a row; longer texts are cut [128; of conversations 2048, or what the model holds]", common=True
    )
    target_length: Size = option(64, "tokens of a target; longer ones are cut", common=True)
    loss_on: LossOn = option("answers", "tokens of a conversation that are trained: answers, all, or the last answer")
    max_cut: float = option(0.1, "share of conversations that may be longer than max_length", ge=0, le=1)
    source_language: str | None = option(
        None, "for a multilingual tokenizer: en, or its own en_XX [the task's]", min_length=1
    )
    target_language: str | None = option(None, "language of targets and answers [the task's]", min_length=1)


class MethodSection(RunSection):
    """The method that is tuned."""

    expression: str = Field(
        description='expression, such as "prefix(length=16) + layernorm"', json_schema_extra={"common": True}
    )
    head: Literal["train", "freeze"] = option("train", "train the task head with the method, or freeze it", common=True)
    pooling: Pooling | None = option(
        None,
        "what a head reads: mean, first or last hidden state, or model, the class's pooler [as the model's files say]",
        common=True,
    )
    head_init: Literal["model", "probe"] = option("model", "probe: the head begins as a linear probe", common=True)
    init_from: str | None = option(
        None,
        "begin with the weights of this run or delta",
        common=True,
    )
    trunk_dropout: Switch = option(
        "on", "off: the layers below everything trained run without dropout, once for each row"
    )

    @field_validator("expression", mode="before")
    @classmethod
    def _shorten_expression(cls, value: Any) -> str:
        try:
            return repr(parse(repr(parse(value))))  # the result of `fit` prints its sizes, also where they are defaults
        except DeltuneError as error:
            raise ValueError(str(error)) from error


class OptimSection(RunSection):
    """AdamW, its schedule and the size of a step."""

    epochs: Size = option(3, "passes over the training rows, at most", common=True)
    steps: Size | None = option(None, "steps of the optimizer, in place of epochs", common=True)
    lr: Rate | None = option(
        None, "learning rate [the method's for the number of steps]; deltune choose tries several", common=True
    )
    lr_source: Literal["default"] | None = option(None, "default: a run wrote the method's rate into its spec")
    schedule: Literal["linear", "constant", "cosine", "polynomial"] = option(
        "linear", "after the warm-up: linear, constant, cosine or polynomial", common=True
    )
    warmup: float = option(0.0, "share of all steps if below 1, else steps", common=True, ge=0, allow_inf_nan=False)
    batch_size: Size = option(32, "rows of a step, over all devices", common=True)
    batch_tokens: Size | None = option(None, "tokens of a step, padding included, in place of batch_size")
    device_batch_size: Size | None = option(
        None, "rows at a time on a device; gradients accumulate up to batch_size [all]", common=True
    )
    packing: bool = option(
        False, "several texts in a row, none of which sees another; batch_size counts texts, as without", common=True
    )
    optimizer: Literal["adamw", "adamw_8bit", "paged_adamw_8bit"] = option(
        "adamw", "adamw, or by bitsandbytes adamw_8bit or paged_adamw_8bit [its state in a quarter; extra quant]"
    )
    weight_decay: float = option(0.0, "weight decay of AdamW", ge=0, allow_inf_nan=False)
    clip: float = option(1.0, "greatest norm of the gradient; 0: no limit", ge=0, allow_inf_nan=False)
    label_smoothing: float = option(0.0, "share of every label that is spread over all labels", ge=0, lt=1)
    adam_betas: Annotated[tuple[Beta, Beta], CommaSeparated] = option((0.9, 0.999), "betas of AdamW")
    adam_epsilon: float = option(1e-8, "epsilon of AdamW", gt=0, allow_inf_nan=False)

    @property
    def rate(self) -> float:
        """The learning rate of a run that trains. Before, a config has one only if it was given."""
        assert isinstance(self.lr, float)
        return self.lr

    def rows_per_device(self, processes: int = 1) -> int:
        """Return how many rows are computed at a time on one device."""
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


ALONE = {
    "kto": "whose loss compares the rows of a device's batch",
    "grpo": "whose answers would be drawn from other random numbers in each process",
}
"""The objectives that would learn something else in several processes, and why."""


class ObjectiveSection(RunSection):
    """What is learned of conversations and preferences, by TRL's trainers where it is not the answers themselves."""

    kind: Literal["sft", "dpo", "kto", "orpo", "reward", "grpo"] = option(
        "sft", "dpo, kto, orpo, reward or grpo learn otherwise (extra align)", common=True
    )
    beta: float | None = option(
        None, "how strongly the policy is held to the reference; of orpo the weight of the odds [0.1; of grpo 0]",
        ge=0, allow_inf_nan=False,
    )  # fmt: skip
    generations: Annotated[int, Field(ge=2, le=MAX_COUNT)] = option(8, "answers that grpo draws to each prompt")


def check_processes(kind: str, processes: int) -> None:
    """Refuse several processes for an objective that would learn something else in them."""
    if processes > 1 and kind in ALONE:
        raise DeltuneError(
            f"--objective {kind}, {ALONE[kind]}, runs in one process and not in {processes}: leave --launch "
            "out (--device-batch-size cuts steps into smaller batches); dpo, orpo and reward run in several"
        )


class GenerationSection(RunSection):
    """Answers in words: how a model is asked, and how its text is searched for."""

    answer: Literal["head", "words"] = option(
        "head", "answer by a head over the labels, or in words of a language model", common=True
    )
    words: Annotated[dict[str, str] | None, CommaSeparated] = option(
        None, "the word of each label: label=word,… [the task's, else the label]"
    )
    template: str | None = option(
        None,
        'the text that a model is given: "{source}" [the task\'s]; of conversations roles, chatml, … or FILE.jinja',
        common=True,
    )
    max_tokens: Size | None = option(None, "tokens of a generated answer, at most [target_length]")
    min_tokens: int = option(0, "tokens of a generated answer, at least", ge=0, le=MAX_COUNT)
    beams: Size = option(1, "beams of beam search", common=True)
    length_penalty: float = option(1.0, "of beam search: above 0 longer answers win", allow_inf_nan=False)
    no_repeat_ngram: int = option(0, "no n tokens in a row occur twice in an answer; 0: they may", ge=0, le=MAX_COUNT)


class EvaluationSection(RunSection):
    """When the model is validated, and by which metrics."""

    metrics: Annotated[tuple[str, ...], CommaSeparated] = option(
        (), "what is measured: a,b,c [the task's]", common=True
    )
    metric: str | None = option(
        None, "chooses the best epoch; a tie goes to the lower validation loss [the first metric]", common=True
    )
    metric_options: dict[str, dict[str, Any]] = option({}, "options of metrics: {bertscore: {model: FOLDER}}")
    validate_every: Size | None = option(None, "steps between validations [an epoch]")
    patience: Size | None = option(None, "stop after that many validations without a better one [never]", common=True)

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
        return _raise_all(value, option_problems(value))


class RuntimeSection(RunSection):
    """Seeds, searches and the machine."""

    protocol: str | None = option(None, "a paper's values for what is not given: ln_nlu, uv_glue, ap, …", common=True)
    seed: Seed = option(0, "seed of everything that is drawn: initial values, order, rows, tokens", common=True)
    seeds: Annotated[tuple[Seed, ...], CommaSeparated] = option(
        (), "a run of each, and their aggregate: 0,1,2", common=True
    )
    aggregate: Literal["mean", "median"] = option("mean", "of the scores of several seeds")
    search: dict[str, tuple[Any, ...]] = option(
        {}, "values to try in order; the next only if validation is better (repeatable: lr=1e-3)", common=True
    )
    precision: Literal["fp32", "bf16", "auto"] = option(
        "fp32",
        "fp32, or bf16 by autocast, with fp32 weights [auto: bf16 where a device has it]",
        common=True,
    )
    activation_checkpointing: Checkpointing = option(
        "off", "compute activations again: off, half, on or cpu", common=True
    )
    use_liger_kernel: Switch = option("off", "on: Liger's kernels of norms, FFNs and positions, on a GPU (extra gpu)")
    linear_backend: LinearBackend = option(
        "torch", "of frozen linear layers in fp32 on a CPU: torch, or onednn, faster where MKL has no AVX-512"
    )
    trunk_cache: float = option(
        8.0, "with trunk_dropout off, GiB on disk for the states of these layers; 0: run them in every pass",
        ge=0, allow_inf_nan=False,
    )  # fmt: skip
    report_to: Annotated[tuple[Tracker, ...], CommaSeparated] = option((), "tensorboard, wandb, mlflow", common=True)
    probe: Switch = option("on", "score a linear probe of the frozen model beside the run, which tuning has to beat")

    @field_validator("seeds")
    @classmethod
    def _check_seeds(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        return _raise_all(value, [f"seeds must be different, not {value}"] if len(set(value)) < len(value) else [])

    @field_validator("search", mode="before")
    @classmethod
    def _flatten_search(cls, value: Any) -> Any:
        return LAYOUT.by_flat_name(value.items()) if isinstance(value, Mapping) else value

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
    "objective": ObjectiveSection,
    "generation": GenerationSection,
    "evaluation": EvaluationSection,
    "runtime": RuntimeSection,
}
"""The sections of a run's configuration, by name."""

LAYOUT = Layout(SECTIONS, FLAT_NAMES)
PLACES = LAYOUT.places
"""Flat name -> section and field; also spec.yaml files of 0.1 and stored results have flat names."""
DOTTED = LAYOUT.flat_by_dotted
"""Dotted name (section.field) -> flat name."""
flatten = LAYOUT.flatten


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
    objective: ObjectiveSection
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
        problems = [
            *LAYOUT.name_problems(flat, ["output"], hint_for_option),
            *_source_problems(flat),
            *_batch_size_problems(flat),
        ]
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
        for name in ("lr", "pooling"):
            if flat.get(name) == DEFAULT:
                flat[name] = None
        problems += _rate_problems(flat)
        try:
            config = handler(LAYOUT.nest(flat))
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

        Where they have no learning rate, the config gets the method's, whatever the number of steps; and where they
        have no pooling, the class's own.
        """
        search = values.get("search", {})
        defaults: dict[str, Any] = {}
        if not {"lr", "method"} & {*search}:
            defaults["lr"] = default_learning_rate(values["method"])
        if "pooling" not in search:
            defaults["pooling"] = "model"
        return cls.from_flat(**{**defaults, **values})

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
        """Return values by flat name, as on the command line (`lr`); `options` go to `model_dump`."""
        return flatten(self.model_dump(**options))

    def replace(self, **changes: Any) -> RunConfig:
        """Return a config with other values, given by flat name and checked like all values.

        A value takes the place of those that exclude it (epochs of steps, seed of seeds), as on the command line.
        """
        return type(self).from_flat(**merge_values(self.flat(), changes))

    def with_rate_of(self, other: RunConfig) -> RunConfig:
        """Return this config with the learning rate that a run of the same config took."""
        if isinstance(self.optim.lr, float) or not isinstance(other.optim.lr, float) or other.name != self.name:
            return self
        return self.replace(lr=other.optim.lr, lr_source=other.optim.lr_source)

    @property
    def metric_options(self) -> dict[str, Any]:
        """The options of metrics that were given, without those that are of the official script of the task."""
        return without_official_options(self.evaluation.metric_options, self.flat())

    @property
    def is_series(self) -> bool:
        """True if this describes more than one run: several seeds, or values to try."""
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

        The values take the place of others as in `replace`, but all runs have a learning rate that was given.
        """
        if not self.is_series:
            return self
        values = {n: v for n, v in self.flat().items() if n not in ("seeds", "search", "aggregate", "protocol")}
        if values["lr_source"] is None:
            changes = {"lr": values["lr"], **changes}
        return type(self).from_flat(**merge_values(values, changes))

    def adds_seeds_to(self, other: RunConfig) -> bool:
        """Return whether this config equals the other one but for further seeds behind its seeds."""
        before, now = other.runtime.seeds or (other.runtime.seed,), self.runtime.seeds
        return len(now) > len(before) and now[: len(before)] == before and other.replace(seeds=now).name == self.name

    def canonical(self) -> dict[str, Any]:
        """Return the values that are not at their default and can change the result, by flat name, as JSON values.

        `from_canonical` is the inverse. The method's default rate is named so; a pooling is
        named unless it is the class's own, which stored results have.
        """
        values = self.flat(mode="json", exclude_defaults=True)
        values["linear_backend"] = self.runtime.linear_backend  # stored results are found by names that have it
        search, limit = self.runtime.search, self.data.target_length
        values["pooling"] = self.method.pooling or DEFAULT
        source = values.pop("lr_source", DEFAULT if self.optim.lr is None and "lr" not in search else None)
        if source is not None:
            values["lr"] = source
        redundant = {
            **dict.fromkeys(SILENT, True),
            "lr": values.get("lr") == default_learning_rate(self.method.expression) and "method" not in search,
            "pooling": self.method.pooling == "model" or "pooling" in search,
            "seed": bool(self.runtime.seeds),
            "epochs": self.optim.steps is not None,
            "aggregate": not self.runtime.seeds,
            "max_tokens": self.generation.max_tokens == limit and "target_length" not in search,
            "data_root": self.data.source is not None,
            "max_length": self.data.max_length == DEFAULT_LENGTH
            and (self.data.source is None or self.data.task not in (None, "chat")),
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
        return [f"{LAYOUT.dotted(name)}: {before[name]!r} there, {now[name]!r} now" for name in differing]

    def yaml(self) -> str:
        """Write out every value, defaults included, as nested YAML, so that the file outlives a change of defaults."""
        values = self.flat(mode="json") | {"method": explicit_expression(parse(self.method.expression))}
        return yaml.safe_dump(LAYOUT.nest(values), sort_keys=False, allow_unicode=True, width=120)


def read_config(path: str | Path) -> RunConfig:
    """Read the config of a run from a YAML file, nested or flat."""
    return RunConfig.model_validate(read_values(path))


def _raise_all(value: Any, problems: Iterable[str]) -> Any:
    """Return the value of a field, or raise a ValueError with all of its problems."""
    if text := " ".join(problems):
        raise ValueError(text)
    return value


def _plain_value_problems(values: Mapping[str, Any]) -> list[str]:
    """List values that no file of a run could hold: huge numbers, half characters, objects (but for a Method)."""
    problems = []
    for name, value in values.items():
        is_method = name == "method" and not isinstance(value, str)
        if text := _plain_problem(name, 0) or ("" if is_method else _plain_problem(value, 0)):
            is_name = isinstance(name, str) and name.replace(".", "").isidentifier()
            problems.append(f"{LAYOUT.dotted(name) if is_name else excerpt(name)}: {text}")
    return problems


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
    """List what is wrong with the source of a rate."""
    if values.get("lr_source") is not None and values.get("lr") is None:
        return ["optim.lr_source: a run writes it beside the lr that it took; leave it out, or give that lr as well"]
    return []


def _describe(error: Any) -> str:
    """Describe one problem that pydantic found."""
    parts = [str(part) for part in error["loc"] if not str(part).startswith(("dict[", "tuple["))]
    place = ".".join(part if len(part) <= MAX_NAME_LENGTH else excerpt(part) for part in parts)
    if error["type"] == "missing":
        section, field, *_ = error["loc"]
        option = f" (--{DOTTED[place]})" if place in DOTTED else ""
        return f"{place}{option} is missing: {SECTIONS[section].model_fields[field].description}"
    reason = error.get("ctx", {}).get("error")
    message = str(reason) if reason is not None else error["msg"][0].lower() + error["msg"][1:]
    if place in ("optim.epochs", "optim.steps") and str(error["input"]) == "0":
        return f"{place}: 0 trains nothing; the scores of the model as it is: deltune evaluate MODEL --data …"
    return f"{place}: {message}" + ("" if reason is not None else f", not {excerpt(error['input'])}")
