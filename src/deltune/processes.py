"""Several processes at one run: what one finds wrong is told by all, and the first of them writes."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from accelerate import PartialState
from torch import distributed
from transformers import set_seed

from .errors import DeltuneError

Found = TypeVar("Found")


def join(device: torch.device) -> None:
    """Meet the other processes, where a launcher (--launch, accelerate, torchrun) started several."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        PartialState(cpu=device.type == "cpu")


def several() -> bool:
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def count() -> int:
    return distributed.get_world_size() if several() else 1


def index() -> int:
    return distributed.get_rank() if several() else 0


def main() -> bool:
    """Whether this process writes and speaks for all."""
    return index() == 0


def of_main(work: Callable[[], Found]) -> Found:
    """What the main process finds, for all; its DeltuneError is raised in all."""
    if not several():
        return work()
    found: list[Any] = [None, None]
    if main():
        try:
            found[0] = work()
        except DeltuneError as error:
            found[1] = str(error)
    distributed.broadcast_object_list(found)
    if found[1] is not None:
        raise DeltuneError(found[1])
    result: Found = found[0]
    return result


def together(work: Callable[[], Found]) -> Found:
    """What each process finds by itself; the first DeltuneError of any is raised in all, so that none waits."""
    result, error = None, None
    try:
        result = work()
    except DeltuneError as caught:
        error = caught
    told = next((other for other in gathered(None if error is None else str(error)) if other is not None), None)
    if told is not None:
        raise DeltuneError(told) from error
    return result  # type: ignore[return-value]


def gathered(value: Found) -> list[Found]:
    """Every process's value, in every process."""
    if not several():
        return [value]
    values: list[Any] = [None] * count()
    distributed.all_gather_object(values, value)
    return values


def total(value: torch.Tensor) -> torch.Tensor:
    """The sum of every process's value."""
    if not several():
        return value
    summed = value.detach().clone()
    distributed.all_reduce(summed)
    return summed


def part_ways(seed: int) -> None:
    """From here on each process draws its own numbers (of dropout); the main one those of a single process."""
    if not main():
        set_seed(seed + index())
