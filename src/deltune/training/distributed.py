"""A model of which every process holds a share (FSDP2): the frozen and the trained tensors alike, layer by layer.

torch's own: accelerate's leaves it out on CPUs, and asks for the classes of layers where the anatomy knows them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from accelerate import PartialState
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import set_seed

from ..errors import DeltuneError
from ..runtime.handle import MODULE_NAME, Tuned, remember_base_metadata
from ..runtime.sparse_params import replaced_parameters

Found = TypeVar("Found")


def init_processes(device: torch.device) -> None:
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


def is_distributed() -> bool:
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def world_size() -> int:
    return distributed.get_world_size() if is_distributed() else 1


def rank() -> int:
    return distributed.get_rank() if is_distributed() else 0


def is_main() -> bool:
    """Whether this process writes and speaks for all."""
    return rank() == 0


def broadcast_from_main(work: Callable[[], Found]) -> Found:
    """What the main process finds, for all; what goes wrong there is an error in all."""
    if not is_distributed():
        return work()
    found: list[Any] = [None, None]
    error: Exception | None = None
    if is_main():
        try:
            found[0] = work()
        except Exception as caught:
            error, found[1] = caught, _said(caught)
    distributed.broadcast_object_list(found)
    _raise(error, found[1])
    result: Found = found[0]
    return result


def run_on_all(work: Callable[[], Found]) -> Found:
    """What each process finds by itself; what goes wrong in one is an error in all, so that none waits for it."""
    result: list[Any] = [None]
    error: Exception | None = None
    try:
        result[0] = work()
    except Exception as caught:
        error = caught
    _raise(error, next((told for told in all_gather_objects(_said(error)) if told is not None), None))
    found: Found = result[0]
    return found


def all_gather_objects(value: Found) -> list[Found]:
    """Every process's value, in every process."""
    if not is_distributed():
        return [value]
    values: list[Any] = [None] * world_size()
    distributed.all_gather_object(values, value)
    return values


def all_reduce_sum(value: torch.Tensor) -> torch.Tensor:
    """The sum of every process's value."""
    if not is_distributed():
        return value
    summed = value.detach().clone()
    distributed.all_reduce(summed)
    return summed


def seed_by_rank(seed: int) -> None:
    """From here on each process draws its own numbers (of dropout); the main one those of a single process."""
    if not is_main():
        set_seed(seed + rank())


def _said(error: Exception | None) -> DeltuneError | None:
    """An error as the other processes have it: of its kind, where it is one of ours."""
    return error if error is None or isinstance(error, DeltuneError) else DeltuneError(str(error))


def _raise(own: Exception | None, told: DeltuneError | None) -> None:
    """This process's own error, or the one that another told of."""
    if own is not None:
        raise own
    if told is not None:
        raise told


def shard_model(handle: Tuned, device: torch.device) -> None:
    """Share a tuned model out, in place: a layer is whole while it runs, everything else is from a pass's start.

    Error: a single process; a trained tensor without an axis to cut.
    """
    if not is_distributed():
        raise DeltuneError("sharding=fsdp shares a model among processes, here is one: deltune train --launch N")
    remember_base_metadata(handle)  # reads the whole base
    model = handle.model
    if uncut := [name for name, parameter in handle.named_trainable_parameters() if not parameter.dim()]:
        raise DeltuneError(f"sharding=fsdp cannot cut {', '.join(uncut)}, single numbers; give sharding=none")
    apart = {parameter for parameter in model.parameters() if not parameter.dim()}
    mesh = init_device_mesh(device.type, (world_size(),))
    layers = dict.fromkeys(model.get_submodule(layer.path) for layer in handle.anatomy.layers)
    resting = [handle.base] if len(handle.base) else []  # what is displaced never runs, so it stays shared out
    for module in (*layers, *resting, model):
        fully_shard(module, mesh=mesh, ignored_params=apart)


def is_sharded(model: nn.Module) -> bool:
    return isinstance(model, FSDPModule)


@contextlib.contextmanager
def unsharded(handle: Tuned, write: bool = False) -> Iterator[None]:
    """Inside, every tensor of the delta in use stands whole in its place; write: what is changed there is kept.

    All processes must come here together.
    """
    own = set(handle.delta().owned_tensors)
    wanted: dict[nn.Parameter, nn.Parameter] = {
        parameter: nn.Parameter(parameter.full_tensor(), parameter.requires_grad)
        for name, parameter in handle.model.named_parameters()
        if isinstance(parameter, DTensor) and (name in own or name.startswith(f"{MODULE_NAME}.deltas."))
    }
    with replaced_parameters(handle.model, wanted):
        yield
    if write:
        with torch.no_grad():
            for parameter, value in wanted.items():
                parameter.copy_(shard_like(value.detach(), parameter))


def gather_shards(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whole, in every process."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_like(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A whole value shared out as another tensor is, where that is shared out."""
    if not isinstance(like, DTensor) or value.shape != like.shape:
        return value
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)
