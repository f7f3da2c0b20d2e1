"""Every method that PEFT has too, beside it: what a step dispatches, which is the same in each run, and its time."""

from __future__ import annotations

import gc
import time
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from deltune.studies.jobs.timed_model import TimedModel, time_interleaved

from .frame import Piece
from .peers import FIELD, Pair, ours, theirs
from .rows import Row, Target, compared
from .shapes import Shape, build, minilm

WITHOUT_WORK = (torch.ops.aten.detach.default, torch.ops.aten._unsafe_view.default, torch.ops.aten.empty_like.default)


class Kernels(TorchDispatchMode):
    """Counts the kernels that are dispatched, and the bytes of the tensors that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.number = self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and func not in WITHOUT_WORK:
            tensors = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, torch.Tensor)]
            self.number += 1
            self.bytes += sum(t.numel() * t.element_size() for t in tensors)
        return result


def counted(side: TimedModel) -> tuple[int, int, int]:
    """The floating-point operations of products, kernels and bytes of a step's forward and backward pass.

    Fourier transforms and sparse products, which C3A and FRoD have in PEFT, count as kernels and bytes alone.
    """
    side.step()  # what only a first pass does is not counted
    with FlopCounterMode(display=False) as operations, Kernels() as kernels:
        side.model(**side.labelled_batch).loss.backward()
    assert side.optimiser is not None
    side.optimiser.zero_grad()
    return operations.get_total_flops(), kernels.number, kernels.bytes


def sides(pair: Pair, shape: Shape) -> tuple[TimedModel, TimedModel]:
    """Ours and PEFT's."""
    like = build(shape)
    peer = theirs(pair, shape, like)
    assert peer is not None
    return ours(pair.ours, shape, like), peer


def counts(shape: Shape, pair: Pair) -> list[Row]:
    """What a step dispatches, by PEFT's."""
    both = zip(("operations", "kernels", "bytes"), *map(counted, sides(pair, shape)), strict=True)
    return [Row(f"{what} / PEFT's: {pair.ours}", one / two) for what, one, two in both]


def times(shape: Shape, pair: Pair, rounds: int) -> list[Row]:
    """A step by PEFT's, in turns and in processor time, with two models alone in memory."""
    gc.collect()
    mine, peer = sides(pair, shape)
    seconds = time_interleaved({"ours": mine.step, "peft": peer.step}, rounds, clock=time.process_time)
    return [compared(f"step / PEFT's: {pair.ours}", seconds["ours"], seconds["peft"], Target(1.1))]


def pieces() -> list[Piece]:
    shape = minilm("encoder", False, 0.0, rows=8)
    return [
        *(Piece(f"field: counts, {pair.ours}; {shape}", partial(counts, shape, pair), 5.0) for pair in FIELD),
        *(Piece(f"field: times, {pair.ours}; {shape}", partial(times, shape, pair, 5), 10.0) for pair in FIELD),
    ]
