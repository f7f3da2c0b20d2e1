"""The weights that accelerate offloads: which they are, what their values are, and where their modules run.

`cpu_offload`, `disk_offload` and a `device_map` with cpu or disk give modules a hook, which loads their weights before
a call and takes them away after it. Between calls their parameters are on the meta device, and their values in the
hook's `weights_map`, in memory or on the disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..compat import offload_hook, offloaded_state, parameters_of
from .skeleton import base_modules, base_parameters, modules_without_paths

Place = tuple[nn.Module, str]
"""Where a parameter is: the module that holds it, and its name there."""


@dataclass(frozen=True)
class OffloadedTensor:
    """A parameter that a hook of accelerate loads for the call of a module."""

    hook: Any
    name: str  # the name of the value in the hook's `weights_map`

    @property
    def device(self) -> torch.device:
        """The device that it is loaded to."""
        device = self.hook.execution_device
        return torch.device("cpu" if device is None else device)

    def value(self, like: torch.Tensor) -> torch.Tensor:
        """Return the value as it is loaded: on the device of the call, in the dtype of the parameter."""
        value: torch.Tensor = self.hook.weights_map[self.name]
        return value.to(device=self.device, dtype=like.dtype)

    def replace(self, value: torch.Tensor) -> None:
        """Let the hook load another value from now on."""
        values, name = offloaded_state(self.hook.weights_map, self.name)
        values[name] = value.detach().cpu()


def offloading_hooks(module: nn.Module) -> list[Any]:
    """Return the hooks of accelerate that load weights for the calls of a module; most modules have none or one."""
    first = offload_hook(module)
    if first is None:
        return []
    hooks = [first]
    for hook in hooks:
        hooks += getattr(hook, "hooks", ())
    return [hook for hook in hooks if getattr(hook, "offload", False)]


def offloaded_tensors(model: nn.Module) -> dict[Place, OffloadedTensor]:
    """Return where the values of a model's own offloaded parameters are, by the places of the parameters."""
    result: dict[Place, OffloadedTensor] = {}
    for module in modules_without_paths(model):
        for hook in offloading_hooks(module):
            inside = base_modules(module) if hook.place_submodules else [("", module)]
            for path, holder in inside:
                for leaf, parameter in parameters_of(holder).items():
                    if parameter is not None:
                        result[holder, leaf] = OffloadedTensor(hook, f"{path}.{leaf}".lstrip("."))
    return result


def loaded_devices(
    model: nn.Module, offloaded: Mapping[Place, OffloadedTensor]
) -> Iterator[tuple[str, nn.Parameter, torch.device]]:
    """Iterate over a model's own parameters by name, each with the device that it is on, or is loaded to."""
    for path, module in base_modules(model, remove_duplicate=False):
        for leaf, parameter in list(parameters_of(module).items()):
            if parameter is not None:
                place = offloaded.get((module, leaf))
                yield f"{path}.{leaf}".lstrip("."), parameter, parameter.device if place is None else place.device


def tied_identities(model: nn.Module) -> dict[int, int]:
    """Return what tied parameters are identified by where offloading has made several of one: by id, the first's id.

    Each of them is a parameter of its own on the meta device, and transformers knows which were tied.
    """
    offloaded = offloaded_tensors(model)
    if not offloaded:
        return {}
    names: dict[str, str] = getattr(model, "all_tied_weights_keys", {})
    parameters = dict(base_parameters(model)) if names else {}
    places = {id(parameters_of(module)[leaf]): value for (module, leaf), value in offloaded.items()}
    identities: dict[int, int] = {}
    for name, source in names.items():
        pair = parameters.get(name), parameters.get(source)
        values = [places[id(p)].value(p) for p in pair if p is not None and p.device.type == "meta" and id(p) in places]
        if len(values) == 2 and torch.equal(*values):
            identities[id(pair[0])] = id(pair[1])
    return identities


def call_with_weights(module: nn.Module, function: Callable[[torch.Tensor], Any], x: torch.Tensor) -> Any:
    """Call a function that computes with the weights of a module, outside of the module's own call."""
    hook = offload_hook(module)
    if hook is None:
        return function(x)
    args, _ = hook.pre_forward(module, x)
    return hook.post_forward(module, function(*args))
