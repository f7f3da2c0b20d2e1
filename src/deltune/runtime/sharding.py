"""Models that FSDP2 (`fully_shard`) divides among processes: where their parameters are, and whole values of them.

FSDP2 puts each parameter, whole or as a shard, into the module that held it when the model was sharded. A delta's
tensors and the base's change places, so it is told where they are now.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import distributed, nn

from ..anatomy.skeleton import HANDLE_NAME, modules_without_paths
from ..compat import fsdp_modules, move_fsdp_parameters, parameters_of, submodules_of
from ..errors import DeltuneError

T = TypeVar("T")

BEFORE_SHARDING = "attach, load and combine deltas before fully_shard, or save() them and load() the folder elsewhere"
"""What to do about a sharded model that an operation needs whole."""

ADDED_LATE = "gradients of tensors that are added to it now would not be averaged over the processes"


# -- several processes


def is_distributed() -> bool:
    """Return whether several processes work together."""
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def process_rank() -> int:
    """Return the number of this process, 0 without a process group."""
    return distributed.get_rank() if is_distributed() else 0


def all_gather_objects(value: T) -> list[T]:
    """Return the values of all ranks, in their order, on every rank."""
    if not is_distributed():
        return [value]
    values: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values


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
    values = [run_on_all(lambda: work() if process_rank() == 0 else None)]
    distributed.broadcast_object_list(values)
    result: Any = values[0]
    return result


# -- a sharded model


def sharded_modules(model: nn.Module) -> list[Any]:
    """Return the modules of a model that FSDP2 gathers one after the other; none where it is not sharded."""
    handle: Any = submodules_of(model).get(HANDLE_NAME)
    return fsdp_modules([*modules_without_paths(model), *([handle.base] if handle is not None else [])])


def is_sharded(model: nn.Module) -> bool:
    return bool(sharded_modules(model))


def refuse_sharded(model: nn.Module, operation: str, advice: str) -> None:
    """Check that a model is not sharded, for an operation that needs it whole."""
    if is_sharded(model):
        raise DeltuneError(f"this {type(model).__name__} is sharded (fully_shard), and {operation}: {advice}")


def write_once(model: nn.Module, write: Callable[[], T]) -> T:
    """Write files; of a sharded model, whose tensors every rank has gathered by now, on rank 0 alone."""
    return broadcast_from_main(write) if is_sharded(model) else write()


def update_fsdp_modules(model: nn.Module) -> None:
    """Tell FSDP2 in which modules its parameters are now, after tensors were moved."""
    sharded = sharded_modules(model)
    if not sharded:
        return
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for leaf, parameter in parameters_of(module).items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, leaf))
    move_fsdp_parameters(sharded, places)


def reshard(model: nn.Module) -> None:
    """Put the shards back that a forward pass left gathered: what is set on a parameter must be set on its shard."""
    for module in sharded_modules(model):
        module.reshard()


def gather_root(model: nn.Module) -> None:
    """Gather what only the pass of a whole sharded model would gather, before a part of it, its encoder, runs alone."""
    root: Any = model
    if any(module is root for module in sharded_modules(model)):
        root.unshard()


def gather_full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whole on every rank, whether it is sharded or not; all ranks must call it."""
    return tensor.full_tensor() if _is_shard(tensor) else tensor  # type: ignore[attr-defined]


def shard_like(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Shard a whole tensor as another tensor of its shape is sharded."""
    if not _is_shard(like) or value.shape != like.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    of_mesh: Any = like
    return distribute_tensor(value.to(like.device), of_mesh.device_mesh, of_mesh.placements)


def _is_shard(tensor: torch.Tensor) -> bool:
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(tensor, tensors.DTensor)


@contextlib.contextmanager
def unsharded_deltas(model: nn.Module, owned: Iterable[str], write: bool = False) -> Iterator[None]:
    """Put whole parameters in place of the shards of all deltas, inside the block, which all ranks must enter.

    `owned` names those that stand in the model's slots. `write` copies changes back to the shards at the end.
    """
    if not is_sharded(model):  # torch's own walk below is none beside threads that attach
        yield
        return
    names = set(owned)
    values = {
        parameter: nn.Parameter(gather_full_tensor(parameter), parameter.requires_grad)
        for name, parameter in model.named_parameters()
        if _is_shard(parameter) and (name in names or name.startswith(f"{HANDLE_NAME}.deltas."))
    }
    slots = [
        (parameters_of(module), leaf, parameter)
        for module in (model.modules() if values else ())
        for leaf, parameter in parameters_of(module).items()
        if parameter is not None and parameter in values
    ]
    try:
        for parameters, leaf, parameter in slots:
            parameters[leaf] = values[parameter]
        yield
    finally:
        for parameters, leaf, parameter in slots:
            parameters[leaf] = parameter
    with torch.no_grad():
        for parameter, value in values.items() if write else ():
            parameter.copy_(shard_like(value.detach(), parameter))
