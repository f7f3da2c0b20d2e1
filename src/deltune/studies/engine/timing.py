"""Time and memory of methods side by side: they take turns on models of their own, so that noise is the same to all."""

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
    """case -> seconds of its turn in each round.

    Every round gives each case one turn, in a random order (the same in every run), and nobody follows himself: what a
    case finds in the caches depends on its neighbour. warm: rounds before, which are not timed.
    """
    for _ in range(warm):
        for turn in cases.values():
            turn()
    chance = random.Random(0)
    order = list(cases)
    seconds: dict[Case, list[float]] = {case: [] for case in order}
    for _ in range(rounds):
        last = order[-1]
        chance.shuffle(order)
        while order[0] == last and len(order) > 1:
            chance.shuffle(order)
        for case in order:
            began = time.perf_counter()
            cases[case]()
            seconds[case].append(time.perf_counter() - began)
    return seconds


@dataclass(frozen=True)
class Ratio:
    """The median of ratios of the same rounds, and an interval for it."""

    figure: float
    low: float
    high: float
    rounds: int


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Of `ours` to `theirs`, round by round: the median, and its interval by `of_median`."""
    found = [a / b for a, b in zip(ours, theirs, strict=True)]
    return Ratio(statistics.median(found), *median_interval(found), len(found))


def median_interval(values: Iterable[float], level: float = 0.95) -> tuple[float, float]:
    """The sign test's interval for a median: from the k-th smallest value to the k-th greatest, k the greatest with
    2 P(Binomial(n, 1/2) < k) <= 1 - level. It supposes nothing of the noise but that rounds are independent.

    Fewer values than 6 cannot give 95 %: their interval is their whole range.
    """
    ordered = sorted(values)
    n = len(ordered)
    k, below = 0, 1 / 2**n
    while 2 * below <= 1 - level:
        k += 1
        below += math.comb(n, k) / 2**n
    k = max(k, 1)
    return ordered[k - 1], ordered[n - k]


class TimedModel:
    """A model, a batch with labels, and what is trained: each of a turn's kinds is a method."""

    def __init__(
        self, model: nn.Module, batch: Mapping[str, torch.Tensor], labels: torch.Tensor, trained: Sequence[nn.Parameter]
    ) -> None:
        self.model, self.batch, self.labelled = model, dict(batch), {**batch, "labels": labels}
        self.optimiser = torch.optim.AdamW(trained, lr=1e-5) if trained else None

    def step(self) -> None:
        """Forward, backward, and the optimiser's step, in train mode. Error: nothing is trained."""
        self._mode(train=True)
        self.model(**self.labelled).loss.backward()
        assert self.optimiser is not None
        self.optimiser.step()
        self.optimiser.zero_grad()

    def forward(self) -> None:
        """Forward in train mode without gradients: what no training can do without."""
        self._mode(train=True)
        with torch.no_grad():
            self.model(**self.labelled)

    def forwards(self) -> None:
        """Two of them: the least that a method which trains something in every layer takes, where the backward pass
        through a frozen layer costs as much as the forward pass."""
        self.forward()
        self.forward()

    def inference(self) -> None:
        """Forward in eval mode without gradients."""
        self._mode(train=False)
        with torch.no_grad():
            self.model(**self.batch)

    def _mode(self, train: bool) -> None:
        """Only where it changes: it walks over all modules, which no pass of a run does."""
        if self.model.training != train:
            self.model.train(train)

    def kept(self) -> int:
        """Bytes that one forward pass keeps for its backward pass, parameters apart."""
        parameters = {p.untyped_storage().data_ptr() for p in self.model.parameters()}
        storages: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in parameters:
                storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        self._mode(train=True)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = self.model(**self.labelled).loss
        del loss
        return sum(storages.values())


BARE = "bare"
"""The model without any method."""


def turn(model: str, kind: str, method: str | None, rows: int, tokens: int) -> tuple[TimedModel, float]:
    """A method on a model of its own, with a batch without padding, and the percentage that it trains."""
    torch.manual_seed(0)
    labels = ("no", "yes") if kind == "classification" else None
    made = load_model(model, kind, labels, "float32")
    tuned = None if method is None else attach(made, method)
    words = made.config.get_text_config().vocab_size
    ids = torch.randint(words // 20, words, (rows, tokens))
    batch = {"input_ids": ids, "attention_mask": torch.ones(rows, tokens, dtype=torch.long)}
    targets = torch.randint(0, 2, (rows,)) if kind == "classification" else ids
    trained = [] if tuned is None else list(tuned.trainable_parameters())
    return TimedModel(made, batch, targets, trained), 0.0 if tuned is None else tuned.count().percent


def time_methods(
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
    seconds = time_interleaved(cases, repeats)
    found: dict[str, dict[str, Any]] = {}
    for label, (case, percent) in made.items():
        own = {what: times for (whose, what), times in seconds.items() if whose == label}
        found[label] = {what: statistics.median(times) for what, times in own.items()}
        found[label] |= {"turns": own, "kept": case.kept() if case.optimiser else 0, "percent": percent}
    return found
