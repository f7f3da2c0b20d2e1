"""Set-up of a run: its device, its data as read, the kind of task on its kind of model, its metrics and lengths.

`ModelCache` has what several runs in one process share: a backbone, its tokenizer, and data sets that were read.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..compat import keep_unpacked
from ..errors import DeltuneError, error_from_problems, unknown_name
from ..models import (
    HEADS_WITH_LABELS,
    LANGUAGE_MODEL_HEADS,
    WeightsCache,
    language_codes,
    load_config,
    load_model,
    load_tokenizer,
    set_languages,
)
from ..runtime.attach import find_tuned
from .config import DEFAULT_LENGTH, DataSection, EvaluationSection, GenerationSection
from .data import loading
from .data.loading import HubLayout, TaskData
from .data.tag_schemes import PLAIN
from .metrics.registry import METRICS
from .presets import without_official_options
from .tasks.base import TaskKind, TaskOptions
from .tasks.chat import CHAT
from .tasks.classification import (
    CAUSAL_CHOICE,
    CAUSAL_CLASSIFICATION,
    CHOICE,
    CLASSIFICATION,
    MULTILABEL,
    REGRESSION,
    SEQ2SEQ_CHOICE,
    SEQ2SEQ_CLASSIFICATION,
)
from .tasks.encoding import longest_length
from .tasks.generation import CAUSAL_GENERATION, LANGUAGE_MODELING, SEQ2SEQ_GENERATION
from .tasks.preferences import PAIRS, RATED, REWARDS
from .tasks.registry import TASKS, Task, find_task
from .tasks.token_classification import SEQ2SEQ_TAGGING, TAGGING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger("deltune")


class TaskKindByModel(NamedTuple):
    """The task kind of one kind of data for each type of model: with a head, encoder-decoder, decoder-only."""

    head: TaskKind | None
    encoder_decoder: TaskKind | None
    decoder: TaskKind | None


TASK_KINDS: Mapping[str, TaskKindByModel] = {
    "classification": TaskKindByModel(CLASSIFICATION, SEQ2SEQ_CLASSIFICATION, CAUSAL_CLASSIFICATION),
    "multilabel": TaskKindByModel(MULTILABEL, None, None),
    "regression": TaskKindByModel(REGRESSION, None, None),
    "tagging": TaskKindByModel(TAGGING, SEQ2SEQ_TAGGING, None),
    "choice": TaskKindByModel(CHOICE, SEQ2SEQ_CHOICE, CAUSAL_CHOICE),
    "generation": TaskKindByModel(None, SEQ2SEQ_GENERATION, CAUSAL_GENERATION),
    "language": TaskKindByModel(None, LANGUAGE_MODELING, LANGUAGE_MODELING),
    "chat": TaskKindByModel(None, None, CHAT),
    "preference": TaskKindByModel(None, None, None),
}
"""Every kind of data -> the task kinds that it is trained as."""

OBJECTIVE_KINDS: Mapping[str, TaskKind] = {
    "dpo": PAIRS, "kto": RATED, "orpo": PAIRS, "reward": REWARDS, "grpo": CHAT,
}  # fmt: skip
"""Every objective but the likelihood of answers -> the task kind that it learns from."""

CONVERSATION_LENGTH = 2048
"""Tokens of a conversation where none are given."""

MIN_LENGTH = 32
"""The least `max_length`, in tokens, that is taken by itself for a model that holds fewer than the default."""

Reader = Callable[..., TaskData]
"""`data.loading.load_data`, or a function of the same arguments that remembers."""


@dataclass(frozen=True)
class TaskSetup:
    """The data of a run as read, the kind of task on this kind of model, and the names of its metrics."""

    data: TaskData
    kind: TaskKind
    metrics: tuple[str, ...]


def set_up_task(
    model: str,
    data: DataSection,
    answer: str,
    evaluation: EvaluationSection,
    seed: int,
    training: bool = True,
    labels: tuple[str, ...] | None = None,
    read: Reader = loading.load_data,
    objective: str = "sft",
) -> TaskSetup:
    """Read the data of a run, and choose its kind of task and its metrics."""
    config = load_config(model)  # first, so that an unknown family is reported as such, not as a missing tokenizer
    task, rows = load_task_data(data, seed, training, labels, read)
    kind = task_kind_for(rows.kind, config, answer, objective)
    metrics = evaluation.metrics or (task.metrics if task else kind.default_metrics)
    if rows.kind == "tagging":
        metrics = _tagging_metrics(rows, kind, evaluation, metrics)
    if len(rows.labels) != 2 and METRICS["f1"].input_type in kind.metric_inputs:
        if "f1" in (*evaluation.metrics, evaluation.metric) and rows.labels:
            raise DeltuneError(f"metric f1 is for two labels, and the data has {len(rows.labels)}; use f1_macro")
        metrics = tuple(name for name in metrics if name != "f1")
    if objective != "sft":
        rows = replace(rows, labels=("reward",)) if objective == "reward" else rows
        return TaskSetup(rows, kind, ("reward",) if objective == "grpo" else ())  # its trainer measures the others
    if evaluation.metric not in (None, "loss", *metrics):
        metrics = (*metrics, str(evaluation.metric))
    check_fits(kind, metrics)
    if training:
        names = {"task": data.task, "data": data.source}
        check_options_are_used(without_official_options(evaluation.metric_options, names), metrics)
    return TaskSetup(rows, kind, metrics)


def _tagging_metrics(
    rows: TaskData, kind: TaskKind, evaluation: EvaluationSection, metrics: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the metrics of tags: of plain ones the accuracy and the macro F1, where none are named."""
    if kind is SEQ2SEQ_TAGGING and rows.tag_scheme not in (None, "IOB2"):
        raise DeltuneError(
            f"a language model writes entities of the scheme IOB2, and the tags are {rows.tag_scheme}; give "
            + ("answer=head" if rows.tag_scheme == PLAIN else "--tag-scheme iob2, or answer=head")
        )
    if rows.tag_scheme != PLAIN:
        return metrics
    if "entity_f1" in (*evaluation.metrics, evaluation.metric):
        raise DeltuneError(f"entity_f1 is for tags of entities, and the tags are plain: {', '.join(rows.labels[:8])}")
    return evaluation.metrics or ("accuracy", "f1_macro")


def load_task_data(
    data: DataSection,
    seed: int,
    training: bool = True,
    labels: tuple[str, ...] | None = None,
    read: Reader = loading.load_data,
) -> tuple[Task | None, TaskData]:
    """Return the known task of a run, where it has one, and its data; for the arguments see `set_up_task`."""
    task, columns, kind, source, layout = None, data.columns, data.task, data.source, None
    seed = seed if data.split_seed is None else data.split_seed
    if source is None:
        assert data.task is not None
        task, place = find_task(data.task, data.data_root)
        kind = task.kind
        if isinstance(place, HubLayout):
            source, layout = place.source, place
        else:
            source, columns = place, data.columns or dict(task.columns)
    sizes = {"train": data.max_train_rows, "validation": data.validation_rows, "test": data.test_rows}
    samples = {split: n for split, n in sizes.items() if n is not None and (training or split != "train")}
    changed = data.relabel or data.tag_scheme == "iob2"  # then the data's own names are others than the run's
    names = data.labels if changed else labels or data.labels
    try:
        rows = read(
            source, columns, names, samples, seed,
            training=training, kind=kind, layout=layout, tag_scheme=data.tag_scheme, iob2_labels=labels,
            label_separator=data.label_separator,
        )  # fmt: skip
    except DeltuneError as error:
        if layout is None or task is None:
            raise
        raise DeltuneError(
            f"task {data.task} is read from the hub, as no data_root (the folder that holds {task.folder}/) is given: "
            f"{error}"
        ) from error
    if data.relabel:
        rows = loading.rename_labels(rows, data.relabel)
    return task, rows


def load_task_tokenizer(model: str, data: DataSection) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model and set the languages of the config, or else of its known task."""
    tokenizer = load_tokenizer(model)
    source, target = (
        TASKS[str(data.task)].languages if data.source is None and language_codes(tokenizer) else (None, None)
    )
    set_languages(tokenizer, data.source_language or source, data.target_language or target)
    return tokenizer


def task_kind_for(name: str, config: PreTrainedConfig, answer: str = "head", objective: str = "sft") -> TaskKind:
    """Return the task kind for a kind of data and an objective on a model of this configuration."""
    kinds = TASK_KINDS[name]
    if objective != "sft":
        if OBJECTIVE_KINDS[objective].name != name:
            reads = "conversations, or prompts with their answers" if objective == "grpo" else "preferences"
            raise DeltuneError(f"--objective {objective} learns from {reads}, and the data is read as {name}")
        if config.is_encoder_decoder:
            raise DeltuneError(f"--objective {objective} is for a decoder, which {config.model_type} is not")
        return OBJECTIVE_KINDS[objective]
    if not any(kinds):
        raise DeltuneError(
            f"the data is read as {name}: say what is learned of them, --objective dpo, kto, orpo or reward; or, to "
            "learn the chosen answers alone, --task chat --columns prompt=prompt,completion=chosen"
        )
    in_words = kinds.encoder_decoder if config.is_encoder_decoder else kinds.decoder
    kind = kinds.head if answer == "head" and kinds.head else in_words
    if kind is None and not (kinds.encoder_decoder or kinds.decoder):
        raise DeltuneError(f"{name} is answered by a head: leave answer=words out")
    if kind is None:
        able = "an encoder-decoder" if kinds.encoder_decoder else "a decoder"
        raise DeltuneError(
            f"{name} in words is for {able}, which a model of type {config.model_type!r} is not; give another model"
            + (" or answer=head" if kinds.head else "")
        )
    return kind


def task_kind_by_name(name: str) -> TaskKind:
    """Return a task kind for a kind of data where the model does not matter."""
    return next(kind for kind in TASK_KINDS[name] if kind is not None)


def length_limits(
    data: DataSection, generation: GenerationSection, kind: TaskKind, labels: Sequence[str]
) -> TaskOptions:
    """Return the lengths, the template, the label words and the search of a run: its own, else those of its task."""
    task = TASKS[str(data.task)] if data.source is None else None
    problems = []
    if generation.template is not None and kind.head not in LANGUAGE_MODEL_HEADS and not is_chat(kind):
        problems.append("template is for a model that answers with label words (answer: words)")
    names = [name for name in dict.fromkeys(map(kind.word_key, labels)) if name] if kind.word_key else []
    if generation.words is None:
        words = {name: task.words.get(name, name) if task else name for name in names}
    elif not names:
        words = {}
        problems.append("words are for labels that are answered in words (answer: words)")
    else:
        words = {name: word.strip() for name, word in generation.words.items()}
        problems += [unknown_name("label", name, names, where="words") for name in words if name not in names]
        problems += [f"label {name!r} has no word" for name in names if not words.get(name)]
    labels_of: dict[str, list[str]] = {}
    for name, word in words.items():
        labels_of.setdefault(word, []).append(name)
    problems += [
        f"labels {', '.join(sharing)} have the same word {word!r}"
        for word, sharing in labels_of.items()
        if word and len(sharing) > 1
    ]
    if problems:
        raise error_from_problems("the words or the template are wrong", problems)
    template = generation.template if generation.template is not None else task.template if task else ""
    generate = {
        "num_beams": generation.beams,
        "min_new_tokens": generation.min_tokens,
        "length_penalty": generation.length_penalty,
        "no_repeat_ngram_size": generation.no_repeat_ngram,
        "max_new_tokens": generation.max_tokens or data.target_length,
    }
    by_label = {label: words.get(kind.word_key(label), "") for label in labels} if kind.word_key else {}
    length = data.max_length or default_length(kind)
    return TaskOptions(length, data.target_length, template, by_label, generate, data.loss_on)


def default_length(kind: TaskKind) -> int:
    """Return how many tokens a row has at most where the config does not say it."""
    return CONVERSATION_LENGTH if is_chat(kind) else DEFAULT_LENGTH


def is_chat(kind: TaskKind) -> bool:
    """Return whether rows of a kind are conversations, or preferences between their answers."""
    return kind.name in (CHAT.name, PAIRS.name)


def fit_lengths(model: PreTrainedModel, kind: TaskKind, limits: TaskOptions) -> TaskOptions:
    """Return limits whose rows fit a model: where they do not, those lengths that are defaults become shorter."""
    needed = kind.max_input_tokens(limits)
    available = longest_length(model, needed)
    if available == needed:
        return limits
    fields, target = DataSection.model_fields, limits.max_target_length
    if kind.target_follows_input and target == fields["target_length"].default:
        target = available * target // needed
    length = available - (target if kind.target_follows_input else 0)
    if limits.max_length != default_length(kind) or length < MIN_LENGTH:
        handle = find_tuned(model)
        method = "" if handle is None else f" with {handle.method!r}"
        raise DeltuneError(
            f"max_length={needed} is more than {type(model).__name__} holds{method}: {available} tokens. "
            f"Give max_length={available} or less; longer texts are cut to it"
        )
    targets = f" and target_length {target}" if target != limits.max_target_length else ""
    logger.info(
        "max_length is %d%s and not the default, since %s holds %d tokens", length, targets, type(model).__name__,
        available,
    )  # fmt: skip
    generate = limits.generate_kwargs
    if targets:
        generate = {**generate, "max_new_tokens": min(target, generate.get("max_new_tokens", target))}
    return replace(limits, max_length=length, max_target_length=target, generate_kwargs=generate)


def check_fits(kind: TaskKind, metrics: Sequence[str]) -> None:
    """Check that metrics measure what a kind of task gives."""
    if problems := [unknown_name("metric", name, METRICS) for name in metrics if name not in METRICS]:
        raise DeltuneError(" ".join(problems))
    if unfit := [name for name in metrics if METRICS[name].input_type not in kind.metric_inputs]:
        fitting = [name for name, metric in METRICS.items() if metric.input_type in kind.metric_inputs]
        raise DeltuneError(f"{kind.name} cannot be measured by {', '.join(unfit)}; it can by {', '.join(fitting)}")


def check_options_are_used(options: Mapping[str, object], metrics: Sequence[str]) -> None:
    """Check that all metrics whose options are given are computed."""
    if unused := [name for name in options if name not in metrics]:
        raise DeltuneError(
            f"metric_options has options of {', '.join(unused)}, which this run does not compute; it computes "
            f"{', '.join(metrics)}. Name {', '.join(unused)} in metrics too, or leave the options out"
        )


def resolve_device(name: str = "auto") -> torch.device:
    """Return the device of a name; "auto" is the accelerator if there is one, else the CPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if name == "auto":
        return torch.device("cpu") if accelerator is None else torch.device(accelerator.type)
    names = ["auto", "cpu"]
    if accelerator is not None:
        names += [accelerator.type, *(f"{accelerator.type}:{i}" for i in range(torch.accelerator.device_count()))]
    if name not in names:
        raise DeltuneError(unknown_name("device", name, names, "this machine"))
    return torch.device(name)


def resolve_precision(name: str, device: torch.device) -> str:
    """Return "fp32" or "bf16"."""
    supported = device.type == "cpu" or _supports_bf16(device)
    if name == "bf16" and not supported:
        raise DeltuneError(
            f"the device {device} does not support precision bf16: give fp32, or auto, which is bf16 where that is "
            "supported"
        )
    if name == "auto":
        return "bf16" if supported and device.type != "cpu" else "fp32"
    return name


def _supports_bf16(device: torch.device) -> bool:
    """Return whether an accelerator computes in bfloat16 without emulation."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            return torch.cuda.is_bf16_supported(including_emulation=False)
    try:
        ones = torch.ones(2, 2, dtype=torch.bfloat16, device=device)
        return bool((ones @ ones).isfinite().all())
    except (RuntimeError, TypeError, AssertionError):
        return False


MAX_DATA_SETS = 8
"""Data sets that are cached; the one that was used longest ago is dropped first."""


class ModelCache:
    """A model, a tokenizer and data sets, kept for the next run that needs the same.

    A model is handed out without any delta; whoever attaches one detaches it, or calls `drop`. The weights are read
    once: a model whose head is initialised with another seed is built around those in memory.
    """

    def __init__(self) -> None:
        self._model: tuple[Any, PreTrainedModel] | None = None
        self._weights: tuple[Any, WeightsCache] | None = None
        self._tokenizer: tuple[Any, PreTrainedTokenizerBase] | None = None
        self._data: OrderedDict[str, TaskData] = OrderedDict()
        self.read = {"models": 0, "data": 0}

    def model(
        self,
        name: str,
        loads: str,
        labels: tuple[str, ...] | None,
        seed: int,
        quantize: str | None = None,
        attention: str | None = None,
    ) -> PreTrainedModel:
        """Return a model in float32, as `models.load_model` does."""
        backbone = (name, loads, labels, quantize, attention)
        key = (*backbone, seed if loads in (*HEADS_WITH_LABELS, "choice") else None)
        if self._model is not None and self._model[0] == key:
            return self._model[1]
        self._model = None
        if self._weights is None or self._weights[0] != backbone:
            self._weights = (backbone, WeightsCache())
            self.read["models"] += 1
        model = load_model(
            name, loads, labels, "float32", seed, cache=self._weights[1], quantize=quantize,
            attn_implementation=attention,
        )  # fmt: skip
        keep_unpacked(model)
        self._model = (key, model)
        return model

    def drop(self) -> None:
        """Forget the model, to which something may still be attached."""
        self._model = None

    def tokenizer(self, model: str, data: DataSection) -> PreTrainedTokenizerBase:
        """Return the tokenizer of a model with its languages set, as `load_task_tokenizer` does."""
        task = data.task if data.source is None else None
        key = (model, data.source_language, data.target_language, task)
        if self._tokenizer is None or self._tokenizer[0] != key:
            self._tokenizer = (key, load_task_tokenizer(model, data))
        return self._tokenizer[1]

    def data(self, source: str, columns: Any, labels: Any, samples: Any, seed: int, **options: Any) -> TaskData:
        """Return a data set, as `data.loading.load_data` does with the same arguments."""
        drawn = seed if samples or loading.mixture_weights(source) or Path(source).is_file() else None
        key = repr((source, columns, labels, samples, drawn, options))
        if key not in self._data:
            self.read["data"] += 1
            self._data[key] = loading.load_data(source, columns, labels, samples, seed, **options)
        self._data.move_to_end(key)
        while len(self._data) > MAX_DATA_SETS:
            self._data.popitem(last=False)
        return self._data[key]
