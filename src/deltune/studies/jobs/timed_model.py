"""Timing of models side by side: they take turns, so that noise affects all alike.

Nothing but torch is imported here, because AdapterHub's side of the benchmarks runs in an environment of its own.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import nn

Case = TypeVar("Case", bound=Hashable)


def time_interleaved(
    cases: Mapping[Case, Callable[[], object]],
    rounds: int,
    warm: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Case, list[float]]:
    """Time each case once in every round, by a clock.

    The order is random, but the same in every run, and no case follows itself, because what a case finds in the CPU's
    caches depends on its predecessor.
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
            start = clock()
            cases[case]()
            seconds[case].append(clock() - start)
    return seconds


class TimedModel:
    """A model with a batch, and what can be timed of it: a training step, a forward pass, inference."""

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
