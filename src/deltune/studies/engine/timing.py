"""Time and memory of methods side by side: they take turns, each on its own model, so that noise affects all alike."""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from ...models import load_model
from ...runtime.attaching import attach

Case = TypeVar("Case", bound=Hashable)


def time_interleaved(cases: Mapping[Case, Callable[[], object]], rounds: int, warm: int = 1) -> dict[Case, list[float]]:
    """Time each case once in every round.

    The order is random, but the same in every run, and no case follows itself, because what a case finds in the CPU's
    caches depends on its predecessor.

    Args:
        cases: Case -> what is timed.
        rounds: How many rounds are timed.
        warm: How many rounds come before, untimed.

    Returns:
        Case -> seconds in each round.
    """
    for _ in range(warm):
        for turn in cases.values():
            turn()
    generator = random.Random(0)
    order = list(cases)
    seconds: dict[Case, list[float]] = {case: [] for case in order}
    for _ in range(rounds):
        previous = order[-1]
        generator.shuffle(order)
        while order[0] == previous and len(order) > 1:
            generator.shuffle(order)
        for case in order:
            start = time.perf_counter()
            cases[case]()
            seconds[case].append(time.perf_counter() - start)
    return seconds


@dataclass(frozen=True)
class Ratio:
    """The median over rounds of a ratio of times, with its 95 % interval."""

    figure: float
    low: float
    high: float
    rounds: int


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Return the median over rounds of ours / theirs, with its interval (`median_interval`).

    Args:
        ours: Seconds in each round.
        theirs: Seconds in the same rounds.
    """
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return Ratio(statistics.median(ratios), *median_interval(ratios), len(ratios))


def median_interval(values: Iterable[float], level: float = 0.95) -> tuple[float, float]:
    """Return the sign test's interval for a median: from the k-th smallest value to the k-th greatest.

    k is the greatest with 2 P(Binomial(n, 1/2) < k) <= 1 - level. The interval assumes nothing about the noise but that
    rounds are independent. Fewer than 6 values cannot give 95 %: their interval is their whole range.
    """
    from scipy import stats  # here, because AdapterHub's side of the benchmarks runs without it

    ordered = sorted(values)
    interval = stats.quantile_test(ordered, p=0.5).confidence_interval(level)
    low, high = float(interval.low), float(interval.high)
    return ordered[0] if math.isnan(low) else low, ordered[-1] if math.isnan(high) else high


class TimedModel:
    """A model with a batch, and what can be timed of it: a training step, a forward pass, inference.

    Args:
        model: The model.
        batch: Its inputs, by name.
        labels: The labels of the batch.
        trained: The parameters to train; none for a model that is never trained.
    """

    def __init__(
        self, model: nn.Module, batch: Mapping[str, torch.Tensor], labels: torch.Tensor, trained: Sequence[nn.Parameter]
    ) -> None:
        self.model, self.batch, self.labelled_batch = model, dict(batch), {**batch, "labels": labels}
        self.optimiser = torch.optim.AdamW(trained, lr=1e-5) if trained else None

    def step(self) -> None:
        """Run forward, backward and the optimiser's step in train mode. Something must be trained."""
        self._mode(train=True)
        self.model(**self.labelled_batch).loss.backward()
        assert self.optimiser is not None
        self.optimiser.step()
        self.optimiser.zero_grad()

    def forward(self) -> None:
        """Run forward in train mode without gradients, which is the least that any training step takes."""
        self._mode(train=True)
        with torch.no_grad():
            self.model(**self.labelled_batch)

    def forward_twice(self) -> None:
        """Run forward twice, the least time of a training step whose method trains something in every layer.

        A method that trains something in every layer takes no less, because the backward pass through a frozen layer
        costs as much as the forward pass.
        """
        self.forward()
        self.forward()

    def inference(self) -> None:
        """Run forward in eval mode without gradients."""
        self._mode(train=False)
        with torch.no_grad():
            self.model(**self.batch)

    def _mode(self, train: bool) -> None:
        """Switch the mode only if it changes, because `train()` walks over all modules, which no pass of a run does."""
        if self.model.training != train:
            self.model.train(train)

    def saved_bytes(self) -> int:
        """Return the bytes that one forward pass saves for its backward pass, parameters aside."""
        parameters = {p.untyped_storage().data_ptr() for p in self.model.parameters()}
        storages: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in parameters:
                storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        self._mode(train=True)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = self.model(**self.labelled_batch).loss
        del loss
        return sum(storages.values())


BARE = "bare"
"""The label of the model without any method."""


def build_timed_model(model: str, kind: str, method: str | None, rows: int, tokens: int) -> tuple[TimedModel, float]:
    """Build a model with a method and a random batch without padding.

    Args:
        model: The backbone's folder or hub id.
        kind: The kind of model, such as "classification" or "causal-lm".
        method: The method's expression; None for the bare model.
        rows: Examples of the batch.
        tokens: Tokens of each example.

    Returns:
        The model, and the percentage of its parameters that the method trains.
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

    Args:
        model: The backbone's folder or hub id.
        methods: Label -> expression.
        rows: Examples of the batch, which has no padding.
        tokens: Tokens of each example.
        repeats: Timed rounds; one of warm-up comes before them.
        kind: The kind of model.
        phases: What is timed: names of methods of `TimedModel`.

    Returns:
        Label -> the median of seconds for each of `phases`, with "turns" (all seconds of each), "kept" (bytes that a
        forward pass saves), "percent" (the share of parameters trained) and "parameters" (of the bare model).
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
