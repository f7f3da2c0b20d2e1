"""Several processes at one run: their collectives, errors that reach every rank, and sharded models (FSDP2).

The collectives are torch.distributed's. accelerate's `gather_object` and `broadcast_object_list` call the same ones,
but create a `PartialState` in a single process too, which chooses a device before the run does; neither library passes
an error of one rank on to the others. `fully_shard` is torch's as well: accelerate's FSDP plugin needs the names of the
layer classes, which the anatomy makes unnecessary, and does not run on CPUs.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from accelerate import PartialState
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import set_seed

from ..anatomy.skeleton import HANDLE_NAME
from ..compat import parameters_of
from ..errors import DeltuneError
from ..runtime.handle import Tuned

T = TypeVar("T")


def init_processes(device: torch.device) -> None:
    """Join the process group, if a launcher (`--launch`, accelerate, torchrun) started several processes."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes == 1:
        return
    if ":" in str(device):
        raise DeltuneError(
            f"devices={device} is a single device, but there are {processes} processes: give devices={device.type}"
        )
    local_processes, devices = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.accelerator.device_count()
    if device.type != "cpu" and local_processes > devices:
        raise DeltuneError(
            f"{local_processes} processes need as many devices, but this machine has {devices} of type {device.type}: "
            "start fewer processes, or give devices=cpu"
        )
    PartialState(cpu=device.type == "cpu")


def is_distributed() -> bool:
    """Return whether several processes work on this run."""
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def world_size() -> int:
    """Return the number of processes, 1 without a process group."""
    return distributed.get_world_size() if is_distributed() else 1


def rank() -> int:
    """Return the number of this process, 0 without a process group."""
    return distributed.get_rank() if is_distributed() else 0


def is_main() -> bool:
    """Return whether this process is rank 0, which writes files and reports."""
    return rank() == 0


def run_on_all(work: Callable[[], T]) -> T:
    """Run `work` on every rank and return each rank's own result."""
    if not is_distributed():
        return work()
    results: list[T] = []
    error: Exception | None = None
    try:
        results.append(work())
    except Exception as caught:
        error = caught
    message = error if error is None or isinstance(error, DeltuneError) else DeltuneError(str(error))
    first = next((other for other in all_gather_objects(message) if other is not None), None)
    if error is not None:
        raise error
    if first is not None:
        raise first
    return results[0]


def broadcast_from_main(work: Callable[[], T]) -> T:
    """Run `work` on rank 0 and broadcast its result."""
    if not is_distributed():
        return work()
    values = [run_on_all(lambda: work() if is_main() else None)]
    distributed.broadcast_object_list(values)
    result: Any = values[0]
    return result


def all_gather_objects(value: T) -> list[T]:
    """Return the values of all ranks, in their order, on every rank."""
    if not is_distributed():
        return [value]
    values: list[Any] = [None] * world_size()
    distributed.all_gather_object(values, value)
    return values


def all_reduce_sum(value: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor over all ranks; the tensor itself stays as it is."""
    if not is_distributed():
        return value
    total = value.detach().clone()
    distributed.all_reduce(total)
    return total


def seed_by_rank(seed: int) -> None:
    """Give every rank random numbers of its own (for dropout); rank 0 draws as a single process does."""
    if not is_main():
        set_seed(seed + rank())


def shard_model(handle: Tuned, device: torch.device) -> None:
    """Shard a tuned model in place with FSDP2, frozen and trained tensors alike.

    A layer is gathered while it runs, everything outside of layers from the beginning of a forward pass.
    """
    if len(handle.delta().schedules):
        raise DeltuneError(
            f"sharding=fsdp cannot divide {handle.method!r}, whose schedule reads whole tensors in each step: give "
            "sharding=none, or a method without a schedule such as lora"
        )
    if not is_distributed():
        raise DeltuneError(
            "sharding=fsdp divides a model among several processes, but there is only one: start more with "
            "`deltune train --launch N`, or give sharding=none"
        )
    handle.attached.remember_base_metadata()  # it reads all tensors of the base, which must be whole for that
    model = handle.model
    if scalars := [name for name, parameter in handle.named_trainable_parameters() if not parameter.dim()]:
        raise DeltuneError(
            f"sharding=fsdp cannot divide {', '.join(scalars)}, which are single numbers; give sharding=none"
        )
    ignored = {parameter for parameter in model.parameters() if not parameter.dim()}
    mesh = init_device_mesh(device.type, (world_size(),))
    layers = dict.fromkeys(model.get_submodule(layer.path) for layer in handle.anatomy.layers)
    displaced = [handle.base] if len(handle.base) else []  # it never runs, so that it is never gathered
    for module in (*layers, *displaced, model):
        fully_shard(module, mesh=mesh, ignored_params=ignored)


def is_sharded(model: nn.Module) -> bool:
    """Return whether a model is sharded by FSDP2."""
    return isinstance(model, FSDPModule)


@contextlib.contextmanager
def unsharded(handle: Tuned, write: bool = False) -> Iterator[None]:
    """Replace the sharded parameters of the delta in use by whole ones inside the context.

    All processes must enter the context, since gathering is a collective. `write` copies changes back at the end.
    """
    owned = set(handle.delta().owned_tensors)
    whole: dict[nn.Parameter, nn.Parameter] = {
        parameter: nn.Parameter(parameter.full_tensor(), parameter.requires_grad)
        for name, parameter in handle.model.named_parameters()
        if isinstance(parameter, DTensor) and (name in owned or name.startswith(f"{HANDLE_NAME}.deltas."))
    }
    with replaced_parameters(handle.model, whole):
        yield
    if write:
        with torch.no_grad():
            for parameter, value in whole.items():
                parameter.copy_(shard_like(value.detach(), parameter))


def gather_shards(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whole on every rank, whether it is sharded or not."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_like(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Shard a whole tensor as another tensor of its shape is sharded."""
    if not isinstance(like, DTensor) or value.shape != like.shape:
        return value
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)


@contextlib.contextmanager
def replaced_parameters(model: nn.Module, replacements: Mapping[nn.Parameter, nn.Parameter]) -> Iterator[None]:
    """Replace parameters in every module that holds them, inside the block."""
    slots = [
        (module, leaf, parameter)
        for module in (model.modules() if replacements else ())
        for leaf, parameter in parameters_of(module).items()
        if parameter is not None and parameter in replacements
    ]
    try:
        for module, leaf, parameter in slots:
            parameters_of(module)[leaf] = replacements[parameter]
        yield
    finally:
        for module, leaf, parameter in slots:
            parameters_of(module)[leaf] = parameter
