"""A model of which every process holds a share (FSDP2): the frozen and the trained tensors alike, layer by layer.

torch's own: accelerate's leaves it out on CPUs, and asks for the classes of layers where the anatomy knows them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from ..errors import DeltuneError
from ..live.handle import NAME, Tuned
from . import processes


def shard(handle: Tuned, device: torch.device) -> None:
    """Share a tuned model out, in place: a layer is whole while it runs, everything else is from a pass's start.

    Error: a single process; a trained tensor without an axis to cut.
    """
    if not processes.several():
        raise DeltuneError("sharding=fsdp shares a model among processes, here is one: deltune train --launch N")
    handle.know_base()  # reads the whole base
    model = handle.model
    if uncut := [name for name, parameter in handle.trained() if not parameter.dim()]:
        raise DeltuneError(f"sharding=fsdp cannot cut {', '.join(uncut)}, single numbers; give sharding=none")
    apart = {parameter for parameter in model.parameters() if not parameter.dim()}
    mesh = init_device_mesh(device.type, (processes.count(),))
    layers = dict.fromkeys(model.get_submodule(layer.path) for layer in handle.anatomy.layers)
    resting = [handle.base] if len(handle.base) else []  # what is displaced never runs, so it stays shared out
    for module in (*layers, *resting, model):
        fully_shard(module, mesh=mesh, ignored_params=apart)


def sharded(model: nn.Module) -> bool:
    return isinstance(model, FSDPModule)


@contextlib.contextmanager
def whole(handle: Tuned, write: bool = False) -> Iterator[None]:
    """Inside, every tensor of the delta in use stands whole in its place; write: what is changed there is kept.

    All processes must come here together.
    """
    own = set(handle.delta().owned)
    wanted: dict[nn.Parameter, nn.Parameter] = {
        parameter: nn.Parameter(parameter.full_tensor(), parameter.requires_grad)
        for name, parameter in handle.model.named_parameters()
        if isinstance(parameter, DTensor) and (name in own or name.startswith(f"{NAME}.deltas."))
    }
    slots = [
        (module, leaf, parameter)
        for module in (handle.model.modules() if wanted else ())
        for leaf, parameter in module._parameters.items()
        if parameter is not None and parameter in wanted
    ]
    try:
        for module, leaf, parameter in slots:
            module._parameters[leaf] = wanted[parameter]
        yield
    finally:
        for module, leaf, parameter in slots:
            module._parameters[leaf] = parameter
    if write:
        with torch.no_grad():
            for parameter, value in wanted.items():
                parameter.copy_(cut(value.detach(), parameter))


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whole, in every process."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def cut(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A whole value shared out as another tensor is, where that is shared out."""
    if not isinstance(like, DTensor) or value.shape != like.shape:
        return value
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)
