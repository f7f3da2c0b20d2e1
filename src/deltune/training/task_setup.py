"""What a run works on: its data as read, the kind of task on its kind of model, its metrics and its lengths."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ..data import loading
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
from .config import DataSection, EvaluationSection, GenerationSection

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase


class TaskKinds(NamedTuple):
    """One kind of data as task kinds: answered by a head, by an encoder-decoder, by a decoder after the prompt."""

    head: TaskKind | None
    encoder_decoder: TaskKind | None
    decoder: TaskKind | None


TASK_KINDS: Mapping[str, TaskKinds] = {
    "classification": TaskKinds(CLASSIFICATION, SEQ2SEQ_CLASSIFICATION, CAUSAL_CLASSIFICATION),
    "tagging": TaskKinds(TAGGING, SEQ2SEQ_TAGGING, None),
    "choice": TaskKinds(CHOICE, SEQ2SEQ_CHOICE, CAUSAL_CHOICE),
    "generation": TaskKinds(None, SEQ2SEQ_GENERATION, CAUSAL_GENERATION),
    "language": TaskKinds(None, LANGUAGE_MODELING, LANGUAGE_MODELING),
}
"""Every kind of data -> the task kinds that it is trained as."""

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
) -> TaskSetup:
    """Read the data of a run, and choose its kind of task and its metrics.

    Args:
        model: Name or folder of the model; only its configuration is read.
        data: What is read.
        answer: "head" or "words".
        evaluation: The metrics that are requested.
        seed: Draws the sample of training rows.
        training: Whether the training split is needed.
        labels: The label names of an existing run, in the order of their ids.
        read: Reads the data.

    Returns:
        The data, the kind of task and the metrics.

    Raises:
        DeltuneError: The data is wrong, the model cannot do this kind of task, or a metric does not fit.
    """
    config = load_config(model)  # first, so that an unknown family is reported as such, not as a missing tokenizer
    task, rows = load_task_data(data, seed, training, labels, read)
    kind = task_kind_for(rows.kind, config, answer)
    metrics = evaluation.metrics or (task.metrics if task else kind.default_metrics)
    if len(rows.labels) != 2:
        if "f1" in evaluation.metrics or evaluation.metric == "f1":
            raise DeltuneError(f"metric f1 is for two labels, and the data has {len(rows.labels)}; use f1_macro")
        metrics = tuple(name for name in metrics if name != "f1")
    if evaluation.metric not in (None, "loss", *metrics):
        metrics = (*metrics, str(evaluation.metric))
    check_fits(kind, metrics)
    return TaskSetup(rows, kind, metrics)


def load_task_data(
    data: DataSection,
    seed: int,
    training: bool = True,
    labels: tuple[str, ...] | None = None,
    read: Reader = loading.load_data,
) -> tuple[Task | None, TaskData]:
    """Return the known task of a run, where it has one, and its data; for the arguments see `set_up_task`."""
    task, columns, kind, source, layout = None, data.columns, data.task, data.source, None
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
    names = data.labels if data.relabel else labels or data.labels
    try:
        rows = read(source, columns, names, samples, seed, training, kind, layout)
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
    """Load the tokenizer of a model and set its languages: those of the config, else those of its known task.

    Raises:
        DeltuneError: The tokenizer lacks a language, or has no languages and one is requested.
    """
    tokenizer = load_tokenizer(model)
    source, target = (
        TASKS[str(data.task)].languages if data.source is None and language_codes(tokenizer) else (None, None)
    )
    set_languages(tokenizer, data.source_language or source, data.target_language or target)
    return tokenizer


def task_kind_for(name: str, config: PreTrainedConfig, answer: str = "head") -> TaskKind:
    """Return the task kind for a kind of data on a model of this configuration.

    Args:
        name: The kind of data (`TASK_KINDS`).
        config: The model's configuration.
        answer: "head" or "words".

    Raises:
        DeltuneError: A model of this type cannot answer it in words.
    """
    kinds = TASK_KINDS[name]
    in_words = kinds.encoder_decoder if config.is_encoder_decoder else kinds.decoder
    kind = kinds.head if answer == "head" and kinds.head else in_words
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
    """Return the lengths, the template, the label words and the search of a run: its own, else those of its task.

    Args:
        data: Gives the lengths and the known task.
        generation: Gives the template, the words and the search.
        kind: The kind of task.
        labels: The label names in the order of their ids.

    Raises:
        DeltuneError: There are words or a template but no answers in words; words are missing, shared by two labels,
            or of no label.
    """
    task = TASKS[str(data.task)] if data.source is None else None
    problems = []
    if generation.template is not None and kind.head not in LANGUAGE_MODEL_HEADS:
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
        "min_new_tokens": generation.min_target_length,
        "length_penalty": generation.length_penalty,
        "no_repeat_ngram_size": generation.no_repeat_ngram,
        "max_new_tokens": generation.max_generated or data.target_length,
    }
    by_label = {label: words.get(kind.word_key(label), "") for label in labels} if kind.word_key else {}
    return TaskOptions(data.max_length, data.target_length, template, by_label, generate)


def check_fits(kind: TaskKind, metrics: Sequence[str]) -> None:
    """Check that metrics measure what a kind of task gives.

    Raises:
        DeltuneError: A metric is unknown, or compares something else.
    """
    if problems := [unknown_name("metric", name, METRICS) for name in metrics if name not in METRICS]:
        raise DeltuneError(" ".join(problems))
    if unfit := [name for name in metrics if METRICS[name].input_type not in kind.metric_inputs]:
        fitting = [name for name, metric in METRICS.items() if metric.input_type in kind.metric_inputs]
        raise DeltuneError(f"{kind.name} cannot be measured by {', '.join(unfit)}; it can by {', '.join(fitting)}")
