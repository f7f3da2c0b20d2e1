"""What each kind of task does with a model: rows to batches, a model's outputs to predictions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ..runtime.attaching import tuned
from .encoding import EncodedRows, collate

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Columns = Mapping[str, Sequence[Any]]


@dataclass(frozen=True)
class Limits:
    """How long inputs and outputs may be, in tokens, and how outputs are searched for.

    template: what a model that answers in words is given, with the roles in braces. words: the word of each label, in
    the order of their ids. generate: options of `generate`.
    """

    max_length: int = 128
    target_length: int = 64
    template: str = ""
    words: Mapping[str, str] = field(default_factory=dict)
    generate: Mapping[str, Any] = field(default_factory=dict)


def autocast_to(device: torch.device, precision: str) -> contextlib.AbstractContextManager[Any]:
    """The context of a pass in a precision."""
    return torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else contextlib.nullcontext()


@dataclass(frozen=True)
class InferenceContext:
    """A model in use on a split: how many rows at once, in which precision, and who is told of progress.

    deltas: the delta that each row uses, where they differ. loss_only: nothing is generated, only the loss is wanted.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    labels: Sequence[str] = ()
    limits: Limits = Limits()
    batch_size: int = 32
    precision: str = "fp32"
    advance: Callable[[int], None] | None = None
    deltas: Sequence[str | None] | None = None
    loss_only: bool = False

    @torch.no_grad()
    def over(self, encoded: EncodedRows, take: Callable[[list[int], dict[str, torch.Tensor]], None]) -> None:
        """Every batch of a split in eval mode, the longest rows first: take(indices, batch)."""
        model = self.model
        device = next(model.parameters()).device
        order = sorted(range(len(encoded)), key=lambda i: -encoded.lengths[i])
        cast = autocast_to(device, self.precision)
        training = model.training
        model.eval()
        try:
            for start in range(0, len(order), self.batch_size):
                these = order[start : start + self.batch_size]
                batch = {n: t.to(device) for n, t in collate(self.tokenizer, encoded.__getitems__(these)).items()}
                rows = [self.deltas[i] for i in these] if self.deltas else None
                with cast, tuned(model).rows(rows) if rows else contextlib.nullcontext():
                    take(these, batch)
                if self.advance is not None:
                    self.advance(len(these))
        finally:
            model.train(training)


@dataclass(frozen=True)
class Predictions:
    """What a model answered, row by row: predictions as metrics compare them, and what is written of their scores.

    loss: the mean loss of what has one (a row, a token), None where there are no references. references: where the
    columns do not tell them.
    """

    predictions: list[Any]
    scores: list[Any]
    loss: float | None
    references: list[Any] | None = None


@dataclass(frozen=True)
class TaskKind:
    """One kind of task on one kind of model.

    loads: what the model is loaded as (models.KINDS). metrics: measured where none are named, the first chooses.
    compares: the kinds of metrics (measures.Kind) that fit.
    encode(tokenizer, model, columns, limits, training): rows with `labels` where the columns have them.
    references(columns, labels): what predictions are compared with. shown(columns, i): the input of row i for a file.
    labelled: predictions and references are ids of labels. continues: the answer follows in the input's own sequence.
    spoken: what of a label is put in words, "" for nothing; None: the answer is by a head, or has no labels.
    """

    name: str
    loads: str
    metrics: tuple[str, ...]
    compares: tuple[str, ...]
    encode: Callable[..., EncodedRows]
    answers: Callable[[InferenceContext, EncodedRows], Predictions]
    references: Callable[[Columns, Sequence[str]], list[Any]]
    shown: Callable[[Columns, int], Any]
    labelled: bool = False
    continues: bool = False
    spoken: Callable[[str], str] | None = None

    def positions(self, limits: Limits) -> int:
        """How many positions of the input's sequence a row may take."""
        return limits.max_length + (limits.target_length if self.continues else 0)
