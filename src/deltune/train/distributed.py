"""Several processes at one run: their collectives, errors that reach every rank, and sharded models (FSDP2).

The collectives are torch.distributed's. accelerate's `gather_object` and `broadcast_object_list` call the same ones,
but create a `PartialState` in a single process too, which chooses a device before the run does; neither library passes
an error of one rank on to the others. `fully_shard` is torch's as well: accelerate's FSDP plugin needs the names of the
layer classes, which the anatomy makes unnecessary, and does not run on CPUs.
"""

from __future__ import annotations

import os

import torch
import transformers
from accelerate import PartialState
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import Trainer, set_seed

from ..errors import DeltuneError, unknown_name
from ..models import load_config
from ..runtime.handle import Tuned
from ..runtime.sharding import is_distributed, process_rank

SHARDING_MODES = ("none", "fsdp")


def check_sharding(mode: str, model: str, quantize: str | None) -> None:
    """Refuse, before a model is loaded, what several processes cannot share."""
    if mode.startswith(("zero", "deepspeed")):
        raise DeltuneError(
            f"sharding={mode} is DeepSpeed's, which takes the parameters out of the model, where no delta finds them: "
            "give --sharding fsdp, which divides weights, gradients and the optimizer's state as well"
        )
    if mode not in SHARDING_MODES:
        raise DeltuneError(unknown_name("sharding", mode, SHARDING_MODES))
    if mode == "fsdp" and (quantize or getattr(load_config(model), "quantization_config", None)):
        raise DeltuneError(
            f"sharding=fsdp cannot divide the quantised weights of {model}, as torchao's refuse it and others were not "
            "shown to be right: give --sharding none, by which each process has the whole quantised model, or leave "
            "--quantize out"
        )
    if mode == "fsdp" and not hasattr(Trainer, "_defer_fsdp_gradient_reduction"):  # it would put DDP around the shards
        raise DeltuneError(
            f"sharding=fsdp needs transformers 5.23, whose Trainer leaves a sharded model as it is, and here is "
            f"{transformers.__version__}: pip install -U transformers, or give --sharding none"
        )


def init_processes(device: torch.device) -> None:
    """Join the process group, if a launcher (`--launch`, accelerate, torchrun) started several processes."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes == 1:
        return
    if ":" in str(device):
        raise DeltuneError(
            f"device={device} is a single device, but there are {processes} processes: give device={device.type}"
        )
    local_processes, devices = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.accelerator.device_count()
    if device.type != "cpu" and local_processes > devices:
        raise DeltuneError(
            f"{local_processes} processes need as many devices, but this machine has {devices} of type {device.type}: "
            "start fewer processes, or give device=cpu"
        )
    PartialState(cpu=device.type == "cpu")


def world_size() -> int:
    """Return the number of processes, 1 without a process group."""
    return distributed.get_world_size() if is_distributed() else 1


def is_main() -> bool:
    """Return whether this process is rank 0, which writes files and reports."""
    return process_rank() == 0


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
        set_seed(seed + process_rank())


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
    handle.attached.remember_base_metadata()  # once, as it reads every weight whole
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
