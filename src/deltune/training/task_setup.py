"""What a spec asks for: the kind of task and the way of answering, its data, its metrics and what a model is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ..data import loading as reading
from ..data.hub_layouts import HubLayout
from ..data.loading import TaskData
from ..errors import DeltuneError, error_from_problems, unknown_name
from ..metrics.registry import METRICS
from ..models import LANGUAGE_MODEL_HEADS, load_config, load_tokenizer
from ..tasks.base import TaskKind, TaskOptions
from ..tasks.classification import CLASSIFICATION
from ..tasks.entity_generation import SEQ2SEQ_TAGGING
from ..tasks.generation import CAUSAL_GENERATION, LANGUAGE_MODELING, SEQ2SEQ_GENERATION
from ..tasks.languages import language_codes, set_languages
from ..tasks.multiple_choice import CHOICE
from ..tasks.rank_classification import CAUSAL_CHOICE, CAUSAL_CLASSIFICATION, SEQ2SEQ_CHOICE, SEQ2SEQ_CLASSIFICATION
from ..tasks.registry import TASKS, Task, find_task
from ..tasks.token_classification import TAGGING
from .config import RunSpec

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase


class Ways(NamedTuple):
    """Ways of answering: by a head, in words of an encoder-decoder, in words of a decoder, after the prompt."""

    head: TaskKind | None
    both: TaskKind | None
    after: TaskKind | None


TABLE: Mapping[str, Ways] = {
    "classification": Ways(CLASSIFICATION, SEQ2SEQ_CLASSIFICATION, CAUSAL_CLASSIFICATION),
    "tagging": Ways(TAGGING, SEQ2SEQ_TAGGING, None),
    "choice": Ways(CHOICE, SEQ2SEQ_CHOICE, CAUSAL_CHOICE),
    "generation": Ways(None, SEQ2SEQ_GENERATION, CAUSAL_GENERATION),
    "language": Ways(None, LANGUAGE_MODELING, LANGUAGE_MODELING),
}
"""Every kind of task."""


@dataclass(frozen=True)
class TaskSetup:
    """A spec's data as read, with the kind of task on this kind of model, and its metrics."""

    data: TaskData
    kind: TaskKind
    metrics: tuple[str, ...]


def set_up_task(
    spec: RunSpec,
    training: bool = True,
    labels: tuple[str, ...] | None = None,
    read: Callable[..., TaskData] = reading.load_data,
) -> TaskSetup:
    """Read what a spec asks for; labels: the run's own, where it has them; read: data.load, or one that remembers.

    Errors: whatever is wrong with the data; a model that cannot do this kind of task.
    """
    config = load_config(spec.model)  # an unknown family is told as that, not as a missing tokenizer
    task, found = load_task_data(spec, training, labels, read)
    chosen = task_kind_for(found.kind, config, spec.answer)
    metrics = spec.metrics or (task.metrics if task else chosen.default_metrics)
    if len(found.labels) != 2:
        if "f1" in spec.metrics or spec.metric == "f1":
            raise DeltuneError(f"metric f1 is for two labels, here are {len(found.labels)}; use f1_macro")
        metrics = tuple(name for name in metrics if name != "f1")
    if spec.metric not in (None, "loss", *metrics):
        metrics = (*metrics, str(spec.metric))
    check_fits(chosen, metrics)
    return TaskSetup(found, chosen, metrics)


def load_task_data(
    spec: RunSpec,
    training: bool = True,
    labels: tuple[str, ...] | None = None,
    read: Callable[..., TaskData] = reading.load_data,
) -> tuple[Task | None, TaskData]:
    """The known task of a spec, where it has one, and its data as read; the arguments are those of `assignment`."""
    task, columns, kind, source, layout = None, spec.columns, spec.task, spec.data, None
    if spec.data is None:
        assert spec.task is not None
        task, where = find_task(spec.task, spec.data_root)
        kind = task.kind
        if isinstance(where, HubLayout):
            source, layout = where.source, where
        else:
            source, columns = where, spec.columns or dict(task.columns)
    assert source is not None
    asked = {"train": spec.max_train_rows, "validation": spec.validation_rows, "test": spec.test_rows}
    asked["train"] = asked["train"] if training else None
    samples = {split: rows for split, rows in asked.items() if rows is not None}
    known = spec.labels if spec.relabel else labels or spec.labels
    try:
        found = read(source, columns, known, samples, spec.seed, training, kind, layout)
    except DeltuneError as error:
        if layout is None or task is None:
            raise
        raise DeltuneError(
            f"task {spec.task} is read from the hub, as no data_root (the folder that holds {task.folder}/) is given: "
            f"{error}"
        ) from error
    if spec.relabel:
        found = reading.rename_labels(found, spec.relabel)
    return task, found


def load_task_tokenizer(spec: RunSpec) -> PreTrainedTokenizerBase:
    """The tokenizer of a spec's model, told the languages of the spec, or else of its task where it has languages.

    Errors: a language that it lacks; any, where it has none.
    """
    tokenizer = load_tokenizer(spec.model)
    source, target = (
        TASKS[str(spec.task)].languages if spec.data is None and language_codes(tokenizer) else (None, None)
    )
    set_languages(tokenizer, spec.source_language or source, spec.target_language or target)
    return tokenizer


def task_kind_for(name: str, config: PreTrainedConfig, answer: str = "head") -> TaskKind:
    """The kind of task on a model of this configuration, answered by a head or in words.

    Error: tagging in words by anything but an encoder-decoder.
    """
    kinds = TABLE[name]
    both = bool(config.is_encoder_decoder)
    found = kinds.head if answer == "head" and kinds.head else kinds.both if both else kinds.after
    if found is None:
        able = "an encoder-decoder" if kinds.both else "a decoder"
        raise DeltuneError(
            f"{name} in words is for {able}, which a model of type {config.model_type!r} is not; give another model"
            + (" or answer=head" if kinds.head else "")
        )
    return found


def task_kind_by_name(name: str) -> TaskKind:
    """The kind of task where its model does not matter."""
    return next(kind for kind in TABLE[name] if kind is not None)


def length_limits(spec: RunSpec, kind: TaskKind, labels: Sequence[str]) -> TaskOptions:
    """Lengths, template and words of a run: the spec's own, else those of its task.

    Errors: words or a template where nothing is said in words; words that are missing, of no label, or shared.
    """
    task = TASKS[str(spec.task)] if spec.data is None else None
    wrong = []
    if spec.template is not None and kind.head not in LANGUAGE_MODEL_HEADS:
        wrong.append("template is for a model that answers in words (answer: words)")
    names = [name for name in dict.fromkeys(map(kind.word_key, labels)) if name] if kind.word_key else []
    if spec.words is None:
        told = {name: task.words.get(name, name) if task else name for name in names}
    elif not names:
        told = {}
        wrong.append("words are for labels that are answered in words (answer: words)")
    else:
        told = {name: word.strip() for name, word in spec.words.items()}
        wrong += [unknown_name("label", name, names, where="words") for name in told if name not in names]
        wrong += [f"label {name!r} has no word" for name in names if not told.get(name)]
    sharing: dict[str, list[str]] = {}
    for name, word in told.items():
        sharing.setdefault(word, []).append(name)
    wrong += [f"labels {', '.join(own)} have the same word {w!r}" for w, own in sharing.items() if w and len(own) > 1]
    if wrong:
        raise error_from_problems("what is said in words is wrong", wrong)
    words = {label: told.get(kind.word_key(label), "") for label in labels} if kind.word_key else {}
    return spec.limits(task.template if task else "", words)


def check_fits(kind: TaskKind, metrics: Sequence[str]) -> None:
    """Error for metrics that are unknown or compare something else than this kind of task gives."""
    if wrong := [unknown_name("metric", name, METRICS) for name in metrics if name not in METRICS]:
        raise DeltuneError(" ".join(wrong))
    if foreign := [name for name in metrics if METRICS[name].input_type not in kind.metric_inputs]:
        fitting = [name for name, metric in METRICS.items() if metric.input_type in kind.metric_inputs]
        raise DeltuneError(f"{kind.name} cannot be measured by {', '.join(foreign)}; it can by {', '.join(fitting)}")
