"""Kinds of tasks: how rows become batches and how a model's outputs become predictions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch

from ...errors import DeltuneError, unknown_name
from ...runtime.attach import find_tuned, tuned
from ...runtime.modules import Delta
from ...runtime.padding import eval_mode, padding_side
from ..data.columns import LossOn
from .encoding import EncodedRows, Row, collate, longest_first

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Columns = Mapping[str, Sequence[Any]]
"""Role -> the values of all rows."""


@dataclass(frozen=True)
class TaskOptions:
    """Options by which rows are encoded and answers are generated.

    Attributes:
        max_length: Longest input, in tokens.
        max_target_length: Longest answer, in tokens.
        template: The prompt of a language model, with roles in braces. Default: a row's texts, with blanks between. Of
            conversations the name of a chat template, which the tokenizer has by then.
        label_words: Label -> the word that stands for it in the answer of a language model, in the order of their ids.
        generate_kwargs: Options of transformers' `generate`.
        loss_on: Which tokens of a conversation are trained.
    """

    max_length: int = 128
    max_target_length: int = 64
    template: str = ""
    label_words: Mapping[str, str] = field(default_factory=dict)
    generate_kwargs: Mapping[str, Any] = field(default_factory=dict)
    loss_on: LossOn = "answers"


def autocast(device: torch.device, precision: str) -> contextlib.AbstractContextManager[Any]:
    """Return the context in which a forward pass runs in a precision: torch.autocast for "bf16", none for "fp32"."""
    return torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else contextlib.nullcontext()


def check_tasks(delta: Delta, names: Iterable[str] | None, data: str) -> None:
    """Check that data says the task of each row where a delta has tasks, and only there."""
    if not delta.tasks and names is not None:
        raise DeltuneError(
            f"{delta.method!r} has no tasks, so that task=… of the columns has no meaning: leave it out, or give a "
            "method with several tasks, such as poly(tasks=3) or mtl_lora(tasks=3)"
        )
    if delta.tasks and names is None:
        raise DeltuneError(
            f"{delta.method!r} has {len(delta.tasks)} tasks, and {data} does not say which one a row has: name the "
            "column that does, --columns …,task=NAME (conversations have none)"
        )
    if unknown := sorted({*(names or ())} - {*delta.tasks}):
        raise DeltuneError(unknown_name("task", unknown[0], delta.tasks, where=data))


def task_ids(model: Any, rows: Sequence[Row], deltas: Sequence[str | None] | None = None) -> list[int] | None:
    """Return the number of each row's task, as the delta of the row counts them; None where rows have no tasks."""
    handle = find_tuned(model)
    if handle is None or "task" not in rows[0]:
        return None
    in_use = (handle.active,) if isinstance(handle.active, str) else handle.active or ()
    used = [in_use] * len(rows) if deltas is None else [() if name is None else (name,) for name in deltas]
    orders = {names: {handle.delta(name).tasks for name in names} - {()} for names in {*used}}
    if several := next((names for names, some in orders.items() if len(some) > 1), None):
        raise DeltuneError(f"{' and '.join(map(repr, several))} count their tasks differently: use one of them")
    known = [next(iter(orders[names]), ()) for names in used]
    if not any(known):
        return None
    return [tasks.index(row["task"]) if tasks else 0 for row, tasks in zip(rows, known, strict=True)]


def condition_of_rows(model: Any, ids: Sequence[int] | torch.Tensor | None) -> contextlib.AbstractContextManager[Any]:
    """Return the context in which a pass knows the tasks of its rows; None: there are none."""
    return contextlib.nullcontext() if ids is None else tuned(model).condition(task_ids=ids)


@dataclass(frozen=True)
class InferenceContext:
    """Everything that a pass over a split needs.

    Attributes:
        model: The model, on its device.
        tokenizer: Its tokenizer.
        labels: The names of the labels, in the order of their ids.
        options: How answers are generated.
        batch_size: Rows in a batch.
        precision: "fp32" or "bf16".
        on_progress: Called after each batch with its number of rows.
        deltas: The name of the delta that each row uses. Default: the delta in use.
        loss_only: Whether only the loss is needed, so that nothing is generated.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    labels: Sequence[str] = ()
    options: TaskOptions = TaskOptions()
    batch_size: int = 32
    precision: str = "fp32"
    on_progress: Callable[[int], None] | None = None
    deltas: Sequence[str | None] | None = None
    loss_only: bool = False

    @torch.no_grad()
    def for_each_batch(
        self, encoded: EncodedRows, process: Callable[[list[int], dict[str, torch.Tensor]], None]
    ) -> None:
        """Call `process(indices, batch)` for every batch of a split, with the model in eval mode."""
        model = self.model
        device = next(model.parameters()).device
        batches = longest_first(encoded.lengths, self.batch_size, same_length=padding_side(model) is None)
        cast = autocast(device, self.precision)
        with eval_mode(model):
            for indices in batches:
                rows = encoded.__getitems__(indices)
                batch = collate(self.tokenizer, model, rows)
                batch = {name: tensor.to(device) for name, tensor in batch.items()}
                with cast, self.passes_of(indices, rows):
                    process(indices, batch)
                if self.on_progress is not None:
                    self.on_progress(len(indices))

    @contextlib.contextmanager
    def passes_of(self, indices: Sequence[int], rows: Sequence[Row]) -> Iterator[None]:
        """Let passes know the delta and the task of each of these rows, in their order."""
        deltas = [self.deltas[i] for i in indices] if self.deltas else None
        use = tuned(self.model).rows(deltas) if deltas else contextlib.nullcontext()
        with use, condition_of_rows(self.model, task_ids(self.model, rows, deltas)):
            yield


@dataclass(frozen=True)
class Predictions:
    """A model's answers to the rows of a split.

    Attributes:
        predictions: The answer to each row, as metrics compare it.
        scores: For each row what the predictions file records of the answer's scores.
        loss: The mean loss over rows, or over tokens for token sequences; None without references.
        references: What predictions are compared with, where the columns do not hold it.
        measures: Scores that need more than the predictions, by name.
    """

    predictions: list[Any]
    scores: list[Any]
    loss: float | None
    references: list[Any] | None = None
    measures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class TaskKind:
    """A kind of task as done by a model with a particular head.

    Attributes:
        name: The kind, a key of `data.columns.TASK_COLUMNS`.
        head: The head with which the model is loaded, a key of `models.HEADS`.
        default_metrics: The metrics where none are named; the first one chooses the best epoch.
        metric_inputs: The input types of the metrics that fit (`metrics.base.InputType`).
        encode: encode(tokenizer, model, columns, options, training, advance) returns the encoded rows, with `labels`
            where the columns have references. The model's `forward` tells which inputs it takes; `options` holds the
            lengths and the prompt; with `training` every reference becomes a row, else the rows are those to predict;
            `advance`, which may be left out, is called with numbers of rows that are done.
        predict: predict(context, encoded) returns the model's answers.
        references: references(columns, labels) returns what predictions are compared with.
        row_input: row_input(columns, i) returns the input of row i for the predictions file.
        predicts_label_ids: Whether predictions and references are ids of labels.
        target_follows_input: Whether the answer stands in the same sequence as the input, as with decoders.
        problem_type: What transformers calls the loss of the head, where it cannot tell from the number of labels.
        word_key: word_key(label) returns the name under which the user gives a label's word, "" for a label without
            one. None if no label words are used: a head answers, or there are no labels.
    """

    name: str
    head: str
    default_metrics: tuple[str, ...]
    metric_inputs: tuple[str, ...]
    encode: Callable[..., EncodedRows]
    predict: Callable[[InferenceContext, EncodedRows], Predictions]
    references: Callable[[Columns, Sequence[str]], list[Any]]
    row_input: Callable[[Columns, int], Any]
    predicts_label_ids: bool = False
    target_follows_input: bool = False
    problem_type: Literal["regression", "multi_label_classification"] | None = None
    word_key: Callable[[str], str] | None = None

    def max_input_tokens(self, options: TaskOptions) -> int:
        """Return the most tokens of an example in the model's input, which has the answer too if it is decoder-only."""
        return options.max_length + (options.max_target_length if self.target_follows_input else 0)
