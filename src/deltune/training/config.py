"""The spec of one run: a frozen value, validated all at once, named by its content."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ModelWrapValidatorHandler, ValidationError, field_validator
from pydantic import model_validator as validator

from ..errors import DeltuneError, error_from_problems, unknown_name
from ..filesystem import user_path
from ..methods.registry import default_learning_rate, parse
from ..methods.spec import explicit_expression
from ..metrics.registry import METRICS
from ..tasks.base import TaskOptions
from ..tasks.registry import TASKS
from . import config_checks, presets
from .yaml_values import MOST, Beta, Seed, Size
from .yaml_values import read_values as read_values

SILENT = ("protocol", "report_to", "device_batch_size", "trunk_cache")
"""Fields that cannot change the result, and so are not in a spec's name: a protocol's values count by themselves, a
step's rows and loss are the same however they are cut, a trunk's states wherever they come from; but for rounding."""

UNSEARCHED = ("search", "seed", "seeds", "protocol", "aggregate", "metric", "report_to")
"""Fields that are the same in all runs of a spec."""

TRIES = 1000
"""Combinations of values to try, at most."""

Tracker = Literal["tensorboard", "wandb", "mlflow"]


class RunSpec(BaseModel):
    """Everything that decides the result of one run; where the result goes is no part of it.

    A folder given as model or data is kept as an absolute path, a method as its shortest expression. Errors:
    DeltuneError with every problem of the values at once.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(min_length=1, description="hub id, folder or minilm")
    data: str | None = Field(
        default=None, min_length=1, description="folder with train, validation and test files, or a hub id"
    )
    task: str | None = Field(default=None, description="a known task, or with data the kind of task it is for")
    data_root: str | None = Field(default=None, description="folder with the folders of known tasks")
    method: str = Field(description='expression, such as "prefix(length=16) + layernorm"')
    protocol: str | None = Field(default=None, description="a paper's values for what is not given (protocols)")
    head: Literal["train", "freeze"] = Field(
        default="train", description="train the task head with the method, or freeze it"
    )
    answer: Literal["head", "words"] = Field(
        default="head", description="by a head over the labels, or in words of a language model"
    )
    words: dict[str, str] | None = Field(
        default=None, description="the word of each label; default the task's, else the label's own name"
    )
    columns: dict[str, str] | tuple[str, ...] | None = Field(
        default=None, description="the columns of text, (pair,) label; or of another kind of task"
    )
    labels: tuple[str, ...] | None = Field(default=None, description="label names in the order of their ids")
    relabel: dict[str, str] | None = Field(default=None, description="label: its new name; several may become one")
    max_train_rows: Size | None = Field(default=None, description="train on a sample of that many rows")
    validation_rows: Size | None = Field(default=None, description="validate on a sample of that many rows")
    test_rows: Size | None = Field(default=None, description="score on a sample of that many test rows")
    epochs: Size = Field(default=3, description="passes over the training rows, at most")
    steps: Size | None = Field(default=None, description="of the optimiser, in place of epochs")
    validate_every: Size | None = Field(default=None, description="steps; default: each epoch")
    lr: float | None = Field(
        default=None, gt=0, allow_inf_nan=False, description="learning rate; default: by the method"
    )
    batch_size: Size = Field(default=32, description="rows a step, over all devices")
    batch_tokens: Size | None = Field(
        default=None, description="tokens a step, padding included, instead of batch_size: rows of similar length"
    )
    device_batch_size: Size | None = Field(
        default=None,
        description="rows at a time on one device; the gradient is accumulated up to batch_size; default: all",
    )
    max_length: int = Field(default=128, ge=2, le=MOST, description="tokens a row, at most; what is longer is cut")
    target_length: Size = Field(default=64, description="tokens of a target, at most; what is longer is cut")
    max_generated: Size | None = Field(
        default=None, description="tokens of a generated answer, at most; default: target_length"
    )
    template: str | None = Field(default=None, description="what a model that answers in words is given")
    source_language: str | None = Field(
        default=None,
        min_length=1,
        description="for a multilingual tokenizer: en, or its own en_XX; default: the task's",
    )
    target_language: str | None = Field(default=None, min_length=1, description="the same of targets and answers")
    beams: Size = Field(default=1, description="of generation")
    min_target_length: int = Field(default=0, ge=0, le=MOST, description="tokens of a generated answer, at least")
    no_repeat_ngram: int = Field(
        default=0, ge=0, le=MOST, description="no n tokens in a row occur twice in an answer; 0: they may"
    )
    length_penalty: float = Field(default=1.0, allow_inf_nan=False, description="of beams: above 0 longer ones win")
    seed: Seed = Field(default=0, description="of initial values, order, dropout and the sample of rows")
    seeds: tuple[Seed, ...] = Field(default=(), description="in place of seed: a run of each, and their aggregate")
    aggregate: Literal["mean", "median"] = Field(default="mean", description="of the scores of several seeds")
    search: dict[str, tuple[Any, ...]] = Field(
        default_factory=dict, description="field: values in order of priority, the next only if validation is better"
    )
    patience: Size | None = Field(
        default=None, description="stop after that many validations (epochs) without a better one"
    )
    schedule: Literal["linear", "constant", "cosine", "polynomial"] = Field(
        default="linear", description="of the learning rate after the warm-up: linear, constant, cosine or polynomial"
    )
    warmup: float = Field(
        default=0.0, ge=0, allow_inf_nan=False, description="share of all steps if below 1, else steps"
    )
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False, description="of AdamW")
    clip: float = Field(
        default=1.0, ge=0, allow_inf_nan=False, description="greatest norm of the gradient; 0: no limit"
    )
    precision: Literal["fp32", "bf16", "auto"] = Field(
        default="fp32", description="fp32, bf16 by autocast, or auto: bf16 on an accelerator that has it, else fp32"
    )
    label_smoothing: float = Field(default=0.0, ge=0, lt=1, description="share of every label spread over all")
    adam_betas: tuple[Beta, Beta] = Field(default=(0.9, 0.999), description="of AdamW")
    adam_epsilon: float = Field(default=1e-8, gt=0, allow_inf_nan=False, description="of AdamW")
    metrics: tuple[str, ...] = Field(default=(), description="what is measured; default: the task's")
    metric_options: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="metric: its options, such as bertscore: {model: FOLDER}"
    )
    metric: str | None = Field(
        default=None,
        description="chooses the best epoch, equal ones by the lower validation loss; default: the first metric",
    )
    report_to: tuple[Tracker, ...] = Field(default=(), description="tensorboard, wandb, mlflow")
    trunk_dropout: Literal["on", "off"] = Field(
        default="on", description="off: the layers below everything that is trained run without dropout"
    )
    trunk_cache: float = Field(
        default=8.0,
        ge=0,
        allow_inf_nan=False,
        description="with trunk_dropout off, GiB on the disk for what these layers give; 0: they run in every pass",
    )

    @field_validator("method", mode="before")
    @classmethod
    def _method(cls, value: Any) -> str:
        try:
            return repr(parse(value))
        except DeltuneError as error:
            raise ValueError(str(error)) from error

    @field_validator("trunk_dropout", mode="before")
    @classmethod
    def _switched(cls, value: Any) -> Any:
        return {True: "on", False: "off"}[value] if isinstance(value, bool) else value  # YAML's on and off

    @field_validator("model", "data", "data_root")
    @classmethod
    def _absolute(cls, value: str | None) -> str | None:
        if value is None or value == "minilm":
            return value
        try:
            path = user_path(value)
        except DeltuneError as error:
            raise ValueError(str(error)) from error
        return str(path.resolve()) if path.exists() else value

    @field_validator("metrics")
    @classmethod
    def _measured(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if wrong := [unknown_name("metric", name, METRICS) for name in value if name not in METRICS]:
            raise ValueError(" ".join(wrong))
        return value

    @field_validator("metric_options")
    @classmethod
    def _optional(cls, value: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        wrong = config_checks.metric_options(value)
        if wrong:
            raise ValueError(" ".join(wrong))
        return value

    @field_validator("metric")
    @classmethod
    def _chooses(cls, value: str | None) -> str | None:
        if value not in (None, "loss", *METRICS):
            raise ValueError(unknown_name("metric", str(value), ["loss", *METRICS]))
        return value

    @field_validator("seeds")
    @classmethod
    def _different(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(value)) < len(value):
            raise ValueError(f"seeds are different ones, not {value}")
        return value

    @field_validator("search")
    @classmethod
    def _searched(cls, value: dict[str, tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
        able = set(cls.model_fields) - set(UNSEARCHED)
        wrong = [unknown_name("option", name, able) for name in value if name not in cls.model_fields]
        wrong += [f"{name} is not searched but given" for name in value if name in UNSEARCHED]
        wrong += [f"no values for {name}" for name, values in value.items() if not values]
        if (tries := math.prod(len(values) for values in value.values())) > TRIES:
            wrong.append(f"{tries:,} combinations of values to try are more than {TRIES:,}; leave some out")
        if wrong:
            raise ValueError(" ".join(wrong))
        return value

    @field_validator(
        "columns", "labels", "report_to", "metrics", "words", "relabel", "seeds", "adam_betas", mode="before"
    )
    @classmethod
    def _listed(cls, value: Any) -> Any:
        """A text "a, b" is the list of a and b, "text=a, label=b" a mapping."""
        if not isinstance(value, str):
            return value
        items = [item.strip() for item in value.split(",") if item.strip()]
        if items and all("=" in item for item in items):
            return {key.strip(): name.strip() for key, name in (item.split("=", 1) for item in items)}
        return tuple(items)

    @validator(mode="wrap")
    @classmethod
    def _all_at_once(cls, values: Any, handler: ModelWrapValidatorHandler[RunSpec]) -> RunSpec:
        fields = cls.model_fields
        given = isinstance(values, dict)
        values = {k: v for k, v in values.items() if k != "task_version"} if given else values  # canonical's own
        if given and (problems := config_checks.plain(values)):
            raise error_from_problems("the spec is wrong", problems)
        problems = [*config_checks.source(values, fields), *config_checks.sizes(values, fields)] if given else []
        names = [values.get(field) for field in ("task", "protocol")] if given else [0]
        try:
            values = presets.apply_preset(values) if all(isinstance(name, str | None) for name in names) else values
        except DeltuneError as error:
            problems.append(str(error))
        try:
            made = handler(values)
        except ValidationError as error:
            problems = [config_checks.problem(e, fields) for e in error.errors()] + problems
        if problems:
            raise error_from_problems("the spec is wrong", problems)
        for field, several in made.search.items():  # as the field makes of them: "1e-3" is a number
            made.search[field] = tuple(getattr(made.single(**{field: value}), field) for value in several)
        return made

    @property
    def several(self) -> bool:
        """Whether this is more than one run: several seeds, or values to try."""
        return bool(self.seeds or self.search)

    def tries(self) -> list[RunSpec]:
        """The single runs of the first seed, one for each combination of values to try, in order of priority."""
        first = self.seeds[0] if self.seeds else self.seed
        return [
            self.single(seed=first, **dict(zip(self.search, values, strict=True)))
            for values in itertools.product(*self.search.values())
        ]

    def single(self, **changes: Any) -> RunSpec:
        """One run of these. Errors: a value that its field does not take."""
        values = self.model_dump(exclude={"seeds", "search", "aggregate", "protocol"})
        return type(self)(**{**values, **changes}) if self.several else self

    @property
    def rate(self) -> float:
        """The learning rate: lr, or what the method says (catalogue.rate)."""
        return default_learning_rate(self.method) if self.lr is None else self.lr

    def limits(self, template: str, words: Mapping[str, str]) -> TaskOptions:
        """How long inputs and outputs may be, and how outputs are searched for.

        template: the task's. words: of all labels, in order.
        """
        generate = {
            "num_beams": self.beams, "min_new_tokens": self.min_target_length, "length_penalty": self.length_penalty,
            "no_repeat_ngram_size": self.no_repeat_ngram, "max_new_tokens": self.max_generated or self.target_length,
        }  # fmt: skip
        own = template if self.template is None else self.template
        return TaskOptions(self.max_length, self.target_length, own, words, generate)

    def rows(self, processes: int = 1) -> int:
        """Rows at a time on one device. Error: those of all processes do not add up to batch_size."""
        unit = processes * (self.device_batch_size or 1)
        if self.batch_tokens is None and self.batch_size % unit:
            below, (share, rest) = self.batch_size // unit * unit, divmod(self.batch_size, processes)
            sizes = " or ".join(str(size) for size in (below, below + unit) if size)
            fitting = ", ".join(str(rows) for rows in range(1, min(share, 10_000) + 1) if share % rows == 0)
            raise DeltuneError(
                f"batch_size={self.batch_size} is no multiple of {processes} process{'es' if processes > 1 else ''}"
                + (f" of {self.device_batch_size} rows at a time" if self.device_batch_size else "")
                + f": give a batch_size of {sizes}"
                + ("" if rest else f"; or a device_batch_size of {fitting}")
            )
        return self.device_batch_size or max(1, self.batch_size // processes)

    def canonical(self) -> dict[str, Any]:
        """The fields that are not at their default and can change the result, as JSON values."""
        values = self.model_dump(mode="json", exclude_defaults=True, exclude=set(SILENT))
        idle = [
            ("lr", self.lr == default_learning_rate(self.method) and "method" not in self.search),
            ("seed", bool(self.seeds)),
        ]
        idle += [("epochs", self.steps is not None), ("aggregate", not self.seeds)]
        idle += [("max_generated", self.max_generated == self.target_length and "target_length" not in self.search)]
        idle += [("data_root", self.data is not None)]
        if self.data is None and TASKS[str(self.task)].version > 1:
            values["task_version"] = TASKS[str(self.task)].version
        return {field: value for field, value in values.items() if (field, True) not in idle}

    @property
    def name(self) -> str:
        """The first 16 digits of the SHA-256 of the canonical JSON: equal for specs that mean the same run."""
        text = json.dumps(self.canonical(), sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def __hash__(self) -> int:
        return hash(self.name)

    def differences(self, other: RunSpec) -> list[str]:
        """Fields that differ, with both values; empty for specs of the same name."""
        mine, theirs = self.canonical(), other.canonical()
        fields = [f for f in type(self).model_fields if mine.get(f) != theirs.get(f)]
        return [f"{f}: {_value(self, f)!r} there, {_value(other, f)!r} now" for f in fields]

    def yaml(self) -> str:
        """The whole spec, defaults written out, so that the file outlives a change of them."""
        values = self.model_dump(mode="json") | {"method": explicit_expression(parse(self.method))}
        if "method" not in self.search:  # then each method may have a rate of its own
            values["lr"] = self.rate
        return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=120)


def _value(spec: RunSpec, field: str) -> Any:
    return spec.rate if field == "lr" else getattr(spec, field)


def read_spec(path: str | Path) -> RunSpec:
    """The spec of a YAML file."""
    return RunSpec(**read_values(path))
