"""Diff pruning: W + z ⊙ δ with learned gates z. An L0 penalty closes gates in training; then the largest remain.

Diff pruning (Guo et al. 2021) with the hard-concrete gates of Louizos et al. (2018): with u uniform,
s = σ((log u - log(1-u) + log α) / β), z = clip(s (ζ - γ) + γ, 0, 1), P(z ≠ 0) = σ(log α - β log(-γ / ζ)).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..anatomy.types import Tensor
from ..compat import UncalledModule, tensor_version
from ..errors import DeltuneError
from .scheduling import AdvanceWatch

BETA, GAMMA, ZETA = 2 / 3, -0.1, 1.1
LOG_ALPHA = 5.0  # at the start nearly every gate is open (Guo et al.)
PACE = 2000.0  # log α is that many times what is trained: gates learn at 0.1 where δ does at 5e-5 (Guo et al.)
PENALTY = 10.0  # of the mean of P(z ≠ 0) when it is at its full strength (ours)
FIXED_AFTER = 0.5  # the share of training after which the gates are fixed


class HardConcreteGates(UncalledModule):
    """δ and its gates over several tensors of the model, of which exactly `keep` scalars are kept.

    In training mode the gates are sampled; in evaluation mode and in the file only the `keep` largest |z δ| remain.
    After `fix` the gates are open or closed for good: log α is ± ∞, so that the phase is in the numbers and a
    checkpoint needs nothing else.
    """

    index: torch.Tensor

    def __init__(self, tensors: tuple[Tensor, ...], keep: int, folded: bool) -> None:
        super().__init__()
        self.names = {t.name: i for i, t in enumerate(tensors)}
        self.starts = list(itertools.accumulate((t.numel for t in tensors), initial=0))
        self.keep, self.folded, self.strength = keep, folded, 0.0
        self.missing_penalty: set[str] = set()  # tensors whose penalty was not yet added in this step
        self.advanced = folded  # whether advance() was called
        self.watch_of_advance = AdvanceWatch()
        self.largest: tuple[Any, torch.Tensor] | None = None
        if folded:
            self.values = nn.Parameter(torch.zeros(keep))
            self.register_buffer("index", torch.zeros(keep, dtype=torch.int64))
        else:
            self.delta = nn.Parameter(torch.zeros(self.starts[-1]))
            self.gate = nn.Parameter(torch.full((self.starts[-1],), LOG_ALPHA / PACE))

    def differences(self) -> Iterator[tuple[str, GatedDifference]]:
        for name in self.names:
            yield name, GatedDifference(self, name)

    def tensors_to_save(self) -> dict[str, torch.Tensor]:
        """Return the values (N,) and their sorted positions (N,) in the flattened, concatenated tensors."""
        values, index = self.sparse()
        return {"values": values, "index": index}

    def sparse(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the values and positions of the `keep` largest |z δ|; they are cached until δ or a gate changes."""
        if self.folded:
            return self.values, self.index
        version = (tensor_version(self.delta), tensor_version(self.gate), self.delta.data_ptr(), self.gate.data_ptr())
        if self.largest is None or self.largest[0] != version:
            with torch.inference_mode(False), torch.no_grad():  # the cached positions are also used in training
                size = (self.delta * self._gate(self.gate * PACE)).abs()
                self.largest = version, size.topk(self.keep).indices.sort().values
        index = self.largest[1]
        return self.delta[index] * self._gate(self.gate[index] * PACE), index

    def apply_to_parameter(self, name: str, base: torch.Tensor) -> torch.Tensor:
        """Return the tensor `name` with its difference: base + z ⊙ δ."""
        number = self.names[name]
        start, stop = self.starts[number], self.starts[number + 1]
        if self.training and not self.folded:
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():
                self.watch_of_advance.note_trained(self.delta)
            logits = self.gate[start:stop] * PACE
            noise = torch.rand_like(logits).clamp(1e-6, 1 - 1e-6)
            z = self._gate((torch.logit(noise) + logits) / BETA)
            changed = base + (self.delta[start:stop] * z).view(base.shape).to(base.dtype)
            if not self.strength:
                return changed
            with_penalty: torch.Tensor = _Penalised.apply(changed, logits, self, name)
            return with_penalty
        return self.merged_value(name, base)

    def merged_value(self, name: str, base: torch.Tensor) -> torch.Tensor:
        """Return the tensor `name` with the kept entries of its change added, in training and evaluation alike."""
        if torch.compiler.is_exporting():
            raise DeltuneError(
                "a learned mask (sparsity=...) cannot be exported by torch.export or torch.onnx, since the scalars it "
                "keeps depend on their values: merge() first, and export the merged model"
            )
        number = self.names[name]
        start, stop = self.starts[number], self.starts[number + 1]
        values, index = self.sparse()
        first, last = torch.searchsorted(index, torch.tensor([start, stop], device=index.device)).tolist()
        positions = index[first:last] - start
        return base.reshape(-1).index_add(0, positions, values[first:last].to(base.dtype)).view(base.shape)

    @staticmethod
    def _gate(logits: torch.Tensor) -> torch.Tensor:
        return (torch.sigmoid(logits) * (ZETA - GAMMA) + GAMMA).clamp(0, 1)

    def advance(self, share: float) -> None:
        """Raise the penalty, or fix the gates once FIXED_AFTER of the training is done."""
        self.advanced = self.watch_of_advance.advanced = True
        if self.folded or self.is_fixed:
            return
        self.strength = PENALTY * min(1.0, share / FIXED_AFTER)
        self.missing_penalty = set(self.names)
        if share >= FIXED_AFTER:
            self.fix()

    @property
    def is_fixed(self) -> bool:
        """Whether the gates are open or closed for good."""
        return self.folded or bool(torch.isinf(self.gate[:1]).any())

    @torch.no_grad()
    def fix(self) -> None:
        """Open the `keep` largest gates and close all others, for good."""
        _, index = self.sparse()
        gain = self._gate(self.gate[index] * PACE)
        self.delta[index] *= gain  # from now on z is 1
        self.gate.fill_(-math.inf)
        self.gate[index] = math.inf
        self.strength = 0.0

    def train(self, mode: bool = True) -> HardConcreteGates:
        self.largest = None  # values may have been written without a change of torch's version counters
        return super().train(mode)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "largest": None}


class GatedDifference:
    """The difference of one tensor, with the interface of `SparseParameter`."""

    def __init__(self, gates: HardConcreteGates, name: str) -> None:
        self.gates, self.name = gates, name

    def initialize(self, dense: torch.Tensor) -> None:
        """Do nothing: a difference starts at 0, whatever the tensor is."""

    def apply_to_parameter(self, base: torch.Tensor) -> torch.Tensor:
        return self.gates.apply_to_parameter(self.name, base)

    def merged_value(self, base: torch.Tensor) -> torch.Tensor:
        return self.gates.merged_value(self.name, base)


class _Penalised(torch.autograd.Function):
    """Returns the tensor unchanged; the backward pass adds the gradient of strength · mean P(z ≠ 0) to that of log α.

    So any training loop applies the penalty, once in a step, however many passes and batches a step has.
    """

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, logits: torch.Tensor, gates: HardConcreteGates, name: str
    ) -> torch.Tensor:
        ctx.save_for_backward(logits)
        ctx.gates, ctx.name = gates, name
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None, None]:
        if ctx.name not in ctx.gates.missing_penalty:
            return grads[0], None, None, None
        ctx.gates.missing_penalty.discard(ctx.name)
        (logits,) = ctx.saved_tensors
        share = torch.sigmoid(logits - BETA * math.log(-GAMMA / ZETA))
        return grads[0], ctx.gates.strength / ctx.gates.starts[-1] * share * (1 - share), None, None
