"""Several processes at one run: what one finds wrong is told by all, and the first of them writes."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from accelerate import PartialState
from torch import distributed
from transformers import set_seed

from ..errors import DeltuneError

Found = TypeVar("Found")


def join(device: torch.device) -> None:
    """Meet the other processes, where a launcher (--launch, accelerate, torchrun) started several.

    Errors: one device named for all of them, fewer devices than processes.
    """
    there = int(os.environ.get("WORLD_SIZE", "1"))
    if there == 1:
        return
    if ":" in str(device):
        raise DeltuneError(f"devices={device} is one device, and here are {there} processes: give {device.type}")
    here, able = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.accelerator.device_count()
    if device.type != "cpu" and here > able:
        raise DeltuneError(f"{here} processes need as many devices, and here are {able} of {device.type}; or give cpu")
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
    """What the main process finds, for all; what goes wrong there is an error in all."""
    if not several():
        return work()
    found: list[Any] = [None, None]
    error: Exception | None = None
    if main():
        try:
            found[0] = work()
        except Exception as caught:
            error, found[1] = caught, _said(caught)
    distributed.broadcast_object_list(found)
    _raise(error, found[1])
    result: Found = found[0]
    return result


def together(work: Callable[[], Found]) -> Found:
    """What each process finds by itself; what goes wrong in one is an error in all, so that none waits for it."""
    result: list[Any] = [None]
    error: Exception | None = None
    try:
        result[0] = work()
    except Exception as caught:
        error = caught
    _raise(error, next((told for told in gathered(_said(error)) if told is not None), None))
    found: Found = result[0]
    return found


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


def _said(error: Exception | None) -> DeltuneError | None:
    """An error as the other processes have it: of its kind, where it is one of ours."""
    return error if error is None or isinstance(error, DeltuneError) else DeltuneError(str(error))


def _raise(own: Exception | None, told: DeltuneError | None) -> None:
    """This process's own error, or the one that another told of."""
    if own is not None:
        raise own
    if told is not None:
        raise told
