"""Time and memory of methods side by side, each on its own model."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...models import load_model
from ...runtime.attach import attach
from .timed_model import TimedModel, time_interleaved

BARE = "bare"
"""The label of the model without any method."""


def build_timed_model(model: str, kind: str, method: str | None, rows: int, tokens: int) -> tuple[TimedModel, float]:
    """Build a model with a method and a random batch without padding.

    Return it with the percentage of its parameters that the method trains.
    """
    torch.manual_seed(0)
    labels = ("no", "yes") if kind == "classification" else None
    backbone = load_model(model, kind, labels, "float32")
    tuned = None if method is None else attach(backbone, method)
    vocabulary = backbone.config.get_text_config().vocab_size
    ids = torch.randint(vocabulary // 20, vocabulary, (rows, tokens))
    batch = {"input_ids": ids, "attention_mask": torch.ones(rows, tokens, dtype=torch.long)}
    targets = torch.randint(0, 2, (rows,)) if kind == "classification" else ids
    trained = [] if tuned is None else list(tuned.trainable_parameters())
    return TimedModel(backbone, batch, targets, trained), 0.0 if tuned is None else tuned.count().percent


def time_methods(
    model: str,
    methods: Mapping[str, str],
    rows: int = 16,
    tokens: int = 64,
    repeats: int = 9,
    kind: str = "classification",
    phases: Sequence[str] = ("step", "forward", "inference"),
) -> dict[str, dict[str, Any]]:
    """Time methods side by side, each on its own model, with the bare model beside them.

    For each label return the median of seconds for each of `phases` (methods of `TimedModel`), with "turns" (all
    seconds of each), "kept" (bytes that a forward pass saves), "percent" (the share of parameters trained) and
    "parameters" (of the bare model). One round of warm-up comes before those that are timed.
    """
    models = {label: build_timed_model(model, kind, method, rows, tokens) for label, method in methods.items()}
    models[BARE] = build_timed_model(model, kind, None, rows, tokens)
    cases = {
        (label, phase): getattr(timed, phase)
        for phase in phases
        for label, (timed, _) in models.items()
        if phase != "step" or timed.optimiser is not None
    }
    gc.collect()
    seconds = time_interleaved(cases, repeats)
    parameters = sum(parameter.numel() for parameter in models[BARE][0].model.parameters())
    results: dict[str, dict[str, Any]] = {}
    for label, (timed, percent) in models.items():
        turns = {phase: times for (owner, phase), times in seconds.items() if owner == label}
        results[label] = {phase: statistics.median(times) for phase, times in turns.items()}
        results[label] |= {"turns": turns, "kept": timed.saved_bytes() if timed.optimiser else 0, "percent": percent}
        results[label]["parameters"] = parameters
    return results
