"""Time and memory of methods side by side: they take turns on models of their own, so that noise is the same to all."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..live.attaching import attach
from ..sources.models import load_model
from .clock import Turn, interleaved

BARE = "bare"
"""The model without any method."""


def turn(model: str, kind: str, method: str | None, rows: int, tokens: int) -> tuple[Turn, float]:
    """A method on a model of its own, with a batch without padding, and the percentage that it trains."""
    torch.manual_seed(0)
    labels = ("no", "yes") if kind == "classification" else None
    made = load_model(model, kind, labels, "float32")
    tuned = None if method is None else attach(made, method)
    words = made.config.get_text_config().vocab_size
    ids = torch.randint(words // 20, words, (rows, tokens))
    batch = {"input_ids": ids, "attention_mask": torch.ones(rows, tokens, dtype=torch.long)}
    targets = torch.randint(0, 2, (rows,)) if kind == "classification" else ids
    trained = [] if tuned is None else list(tuned.parameters())
    return Turn(made, batch, targets, trained), 0.0 if tuned is None else tuned.count().percent


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
    made = {label: turn(model, kind, method, rows, tokens) for label, method in methods.items()}
    made[BARE] = turn(model, kind, None, rows, tokens)
    cases = {
        (label, what): getattr(case, what)
        for what in whats
        for label, (case, _) in made.items()
        if what != "step" or case.optimiser is not None
    }
    gc.collect()
    seconds = interleaved(cases, repeats)
    found: dict[str, dict[str, Any]] = {}
    for label, (case, percent) in made.items():
        own = {what: times for (whose, what), times in seconds.items() if whose == label}
        found[label] = {what: statistics.median(times) for what, times in own.items()}
        found[label] |= {"turns": own, "kept": case.kept() if case.optimiser else 0, "percent": percent}
    return found
