"""What several runs in one process share: a backbone, its tokenizer, and data sets that were read."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from ..data import loading
from ..data.loading import Data
from ..models import LABELLED, Kept, load_model
from .config import DataSection
from .task_setup import load_task_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MAX_DATA_SETS = 8
"""Data sets that are cached; the one that was used longest ago is dropped first."""


class ModelCache:
    """A model, a tokenizer and data sets, kept for the next run that needs the same.

    A model is handed out without any delta; whoever attaches one detaches it, or calls `drop`. The weights are read
    once: a model whose head is initialised with another seed is built around those in memory.

    Attributes:
        read: How many models and data sets were read from disk.
    """

    def __init__(self) -> None:
        self._model: tuple[Any, PreTrainedModel] | None = None
        self._weights: tuple[Any, Kept] | None = None
        self._tokenizer: tuple[Any, PreTrainedTokenizerBase] | None = None
        self._data: OrderedDict[str, Data] = OrderedDict()
        self.read = {"models": 0, "data": 0}

    def model(self, name: str, loads: str, labels: tuple[str, ...] | None, seed: int) -> PreTrainedModel:
        """Return a model in float32, as `models.load_model` does.

        Args:
            name: Hub id or folder.
            loads: What it is loaded as (`TaskKind.loads`).
            labels: The label names of its head.
            seed: Initialises a new head.
        """
        backbone = (name, loads, labels)
        key = (*backbone, seed if loads in (*LABELLED, "choice") else None)
        if self._model is not None and self._model[0] == key:
            return self._model[1]
        self._model = None
        if self._weights is None or self._weights[0] != backbone:
            self._weights = (backbone, Kept())
            self.read["models"] += 1
        model = load_model(name, loads, labels, "float32", seed, kept=self._weights[1])
        self._model = (key, model)
        return model

    def drop(self) -> None:
        """Forget the model, to which something may still be attached."""
        self._model = None

    def tokenizer(self, model: str, data: DataSection) -> PreTrainedTokenizerBase:
        """Return the tokenizer of a model with its languages set, as `task_setup.load_task_tokenizer` does."""
        task = data.task if data.source is None else None
        key = (model, data.source_language, data.target_language, task)
        if self._tokenizer is None or self._tokenizer[0] != key:
            self._tokenizer = (key, load_task_tokenizer(model, data))
        return self._tokenizer[1]

    def data(self, source: str, columns: Any, labels: Any, samples: Any, seed: int, *rest: Any) -> Data:
        """Return a data set, as `data.loading.load_data` does with the same arguments."""
        key = repr((source, columns, labels, samples, seed if samples else None, rest))
        if key not in self._data:
            self.read["data"] += 1
            self._data[key] = loading.load_data(source, columns, labels, samples, seed, *rest)
        self._data.move_to_end(key)
        while len(self._data) > MAX_DATA_SETS:
            self._data.popitem(last=False)
        return self._data[key]
