"""Time and memory of methods side by side: they take turns on models of their own, so that noise is the same to all."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..live.attaching import attach
from ..sources.models import load_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BARE = "bare"
"""The model without any method."""


class Turn:
    """One method on a model of its own, and the seconds of each of its turns by what was done."""

    def __init__(self, model: str, kind: str, method: str | None, rows: int, tokens: int) -> None:
        torch.manual_seed(0)
        labels = ("no", "yes") if kind == "classification" else None
        self.model: PreTrainedModel = load_model(model, kind, labels, "float32")
        self.tuned = None if method is None else attach(self.model, method)
        words = self.model.config.get_text_config().vocab_size
        self.batch = {
            "input_ids": torch.randint(words // 20, words, (rows, tokens)),
            "attention_mask": torch.ones(rows, tokens, dtype=torch.long),
        }
        targets = torch.randint(0, 2, (rows,)) if kind == "classification" else self.batch["input_ids"]
        self.labelled = {**self.batch, "labels": targets}
        self.optimiser = None if self.tuned is None else torch.optim.AdamW(self.tuned.parameters(), lr=1e-5)
        self.seconds: dict[str, list[float]] = {}

    def step(self) -> None:
        """Forward, backward, and the optimiser's step, in train mode."""
        self.model.train()
        self.model(**self.labelled).loss.backward()
        assert self.optimiser is not None
        self.optimiser.step()
        self.optimiser.zero_grad()

    def forward(self) -> None:
        """Forward in train mode without gradients: what no training can do without."""
        self.model.train()
        with torch.no_grad():
            self.model(**self.labelled)

    def inference(self) -> None:
        """Forward in eval mode without gradients."""
        self.model.eval()
        with torch.no_grad():
            self.model(**self.batch)

    def take(self, what: str) -> None:
        """One turn, timed."""
        began = time.perf_counter()
        getattr(self, what)()
        self.seconds.setdefault(what, []).append(time.perf_counter() - began)

    def kept(self) -> int:
        """Bytes that one forward pass keeps for its backward pass, parameters apart."""
        parameters = {p.untyped_storage().data_ptr() for p in self.model.parameters()}
        storages: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in parameters:
                storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        self.model.train()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = self.model(**self.labelled).loss
        del loss
        return sum(storages.values())


def turns(
    model: str,
    methods: Mapping[str, str],
    rows: int = 16,
    tokens: int = 64,
    repeats: int = 9,
    kind: str = "classification",
    whats: Sequence[str] = ("step", "forward", "inference"),
) -> dict[str, dict[str, Any]]:
    """label -> medians of seconds by what was done, with all turns of it; the bare model among them for inference.

    methods: label -> expression. rows, tokens: of the batch, without padding. repeats: rounds after one of warm-up.
    """
    cases = {label: Turn(model, kind, method, rows, tokens) for label, method in methods.items()}
    cases[BARE] = Turn(model, kind, None, rows, tokens)
    able = {label: [w for w in whats if w != "step" or case.tuned is not None] for label, case in cases.items()}
    for label, case in cases.items():
        for what in able[label]:
            getattr(case, what)()
    gc.collect()
    for _ in range(repeats):
        for what in whats:
            for label, case in cases.items():
                if what in able[label]:
                    case.take(what)
    return {
        label: {
            **{what: statistics.median(case.seconds[what]) for what in able[label]},
            "turns": case.seconds,
            "kept": case.kept() if case.tuned is not None else 0,
            "percent": case.tuned.count().percent if case.tuned is not None else 0.0,
        }
        for label, case in cases.items()
    }
