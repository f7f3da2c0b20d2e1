"""What several runs in one process share: a backbone, its tokenizer and data that was read."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from ..data import loading as reading
from ..data.loading import TaskData
from ..models import HEADS_WITH_LABELS, WeightsCache, load_model
from .config import RunSpec
from .task_setup import load_task_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

KEPT = 8
"""Data sets that are kept; the one used longest ago goes first."""


class ModelCache:
    """A model, a tokenizer and data sets, kept for the next run that wants the same.

    A model is given out bare; whoever attaches to it detaches, or drops it. Its weights are read once: a head that is
    drawn under another seed is built around those in memory.
    """

    def __init__(self) -> None:
        self._model: tuple[Any, PreTrainedModel] | None = None
        self._weights: tuple[Any, WeightsCache] | None = None
        self._tokenizer: tuple[Any, PreTrainedTokenizerBase] | None = None
        self._data: OrderedDict[str, TaskData] = OrderedDict()
        self.read = {"models": 0, "data": 0}

    def model(self, name: str, loads: str, labels: tuple[str, ...] | None, seed: int) -> PreTrainedModel:
        """As models.load_model in float32."""
        backbone = (name, loads, labels)
        wanted = (*backbone, seed if loads in (*HEADS_WITH_LABELS, "choice") else None)
        if self._model is not None and self._model[0] == wanted:
            return self._model[1]
        self._model = None
        if self._weights is None or self._weights[0] != backbone:
            self._weights = (backbone, WeightsCache())
            self.read["models"] += 1
        model = load_model(name, loads, labels, "float32", seed, cache=self._weights[1])
        self._model = (wanted, model)
        return model

    def drop(self) -> None:
        """Forget the model: something may be attached to it still."""
        self._model = None

    def tokenizer(self, spec: RunSpec) -> PreTrainedTokenizerBase:
        """As assignments.tokenizer_of."""
        wanted = (spec.model, spec.source_language, spec.target_language, spec.task if spec.data is None else None)
        if self._tokenizer is None or self._tokenizer[0] != wanted:
            self._tokenizer = (wanted, load_task_tokenizer(spec))
        return self._tokenizer[1]

    def data(self, source: str, columns: Any, labels: Any, samples: Any, seed: int, *rest: Any) -> TaskData:
        """As data.load."""
        key = repr((source, columns, labels, samples, seed if samples else None, rest))
        if key not in self._data:
            self.read["data"] += 1
            self._data[key] = reading.load_data(source, columns, labels, samples, seed, *rest)
        self._data.move_to_end(key)
        while len(self._data) > KEPT:
            self._data.popitem(last=False)
        return self._data[key]
