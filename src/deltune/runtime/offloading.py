"""Keeps the tensors of deltas out of accelerate's offloading, and lets it go on with the base's.

A delta's tensors stay in the modules between calls. Whenever a hook of accelerate loads or removes the weights of a
module, the base's own parameters are in the module, in place of the parameters of the delta in use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..anatomy.offloading import offloaded_tensors, offloading_hooks
from ..anatomy.quantization import quantization_of
from ..anatomy.skeleton import base_modules
from ..compat import (
    offload_hook,
    parameters_of,
    parameters_of_dict,
    remove_offload_hook,
    set_in_parameter_dict,
    submodules_of,
)
from ..errors import DeltuneError
from .model_state import ModelState
from .modules import Delta, name_from_parameter_key

_MOVES = ("init_hook", "pre_forward", "post_forward", "detach_hook")
"""The methods of a hook of accelerate that move the tensors of a module."""


class _MoveOfBase:
    """A method of a hook, called while the base's own parameters are in the module."""

    of_live_model = True

    def __init__(self, state: ModelState, hook: Any, move: Callable[..., Any]) -> None:
        self.state, self.hook, self.move = state, hook, move

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with self.state.base_in(module.modules() if self.hook.place_submodules else (module,)):
            return self.move(module, *args, **kwargs)


def follow_offloading(state: ModelState, every_module: bool = True) -> None:
    """Take note of what accelerate offloads by now, and keep the tensors of deltas out of it.

    The model may be offloaded, and loaded again, at any time between two passes. Without `every_module` it takes no
    time where the model is not offloaded, and misses a part that is, as long as no delta has values of its own there.
    """
    model: Any = state.model
    if not (
        every_module
        or state.offloaded
        or offload_hook(model) is not None
        or offload_hook(model.base_model) is not None
        or _any_on_meta(state)
    ):
        return
    with state.mutex:
        state.offloaded = offloaded_tensors(model)
        if not state.offloaded:
            return
        parts = (state.base, *_deltas_of(state))
        hooked = [module for part in parts for _, module in base_modules(part) if offloading_hooks(module)]
        if hooked or _any_on_meta(state):
            _take_back(state, hooked)
        for tensor in state.offloaded.values():
            methods = tensor.hook.__dict__
            for name in _MOVES:
                if not isinstance(methods.get(name), _MoveOfBase):
                    methods[name] = _MoveOfBase(state, tensor.hook, getattr(tensor.hook, name))


def leave_offloading(state: ModelState) -> None:
    """Let accelerate's hooks be what they were before `follow_offloading`."""
    for tensor in state.offloaded.values():
        for name in _MOVES:
            if isinstance(tensor.hook.__dict__.get(name), _MoveOfBase):
                del tensor.hook.__dict__[name]


def _take_back(state: ModelState, hooked: list[nn.Module]) -> None:
    """Undo the offloading of the tensors of deltas, in a model that was offloaded while they were attached.

    accelerate took the trained tensors in the model's own slots for the base's, so that its hooks would load those.
    """
    for module in hooked:
        remove_offload_hook(module)
    for key, base in list(parameters_of_dict(state.base).items()):
        name = name_from_parameter_key(key)
        places = [state.offloaded[place] for place in state.slots[name] if place in state.offloaded]
        if not places or not _is_on_meta(state, key):
            continue
        module, leaf = state.slots[name][0]
        slot = parameters_of(module)[leaf]
        assert slot is not None
        state.set_parameter(name, nn.Parameter(places[0].value(slot), requires_grad=slot.requires_grad))
        for place in places:
            place.replace(base)
        set_in_parameter_dict(state.base, key, nn.Parameter(base.to("meta"), requires_grad=False))
    for delta in _deltas_of(state):
        _restore_identities(state, delta)


def _deltas_of(state: ModelState) -> list[Delta]:
    """The attached deltas; other threads may be attaching more."""
    return [delta for delta in list(submodules_of(state.deltas).values()) if isinstance(delta, Delta)]


def _any_on_meta(state: ModelState) -> bool:
    """Return whether a parameter of the delta in use is on the meta device; other threads may change `base`."""
    return any(_is_on_meta(state, key) for key in list(parameters_of_dict(state.base)))


def _is_on_meta(state: ModelState, key: str) -> bool:
    """Return whether the parameter of a delta that stands in place of the base's `key` is on the meta device."""
    module, leaf = state.slots[name_from_parameter_key(key)][0]
    parameter = parameters_of(module).get(leaf)
    return parameter is not None and parameter.is_meta


def _restore_identities(state: ModelState, delta: Delta) -> None:
    """Put the very parameters that a delta was attached with in place of equal ones: an optimizer may have them."""
    now = state.parameters_by_name(delta)
    for name, original in delta.attached_parameters.items():
        value = now.get(name)
        if value is None or value is original or value.device != original.device or not torch.equal(value, original):
            continue
        original.requires_grad_(value.requires_grad)
        path, _, leaf = name.rpartition(".")
        if path != "held":
            parameters_of(delta.get_submodule(path))[leaf] = original
        elif leaf in parameters_of_dict(delta.held):
            set_in_parameter_dict(delta.held, leaf, original)
        else:
            state.set_parameter(name_from_parameter_key(leaf), original)


def refuse_offloaded(model: nn.Module, operation: str) -> None:
    """Check that no weights of a model are offloaded, for an operation that has to read or change all of them."""
    if offloaded_tensors(model):
        raise DeltuneError(
            f"{operation} needs all weights of the model, and some are offloaded (cpu_offload, disk_offload, or a "
            "device_map with cpu or disk): call accelerate.hooks.remove_hook_from_submodules(model) first, or load the "
            "model on devices that can hold it"
        )


def check_offloading(model: nn.Module) -> None:
    """Check that a model is not both quantised and offloaded."""
    quantization = quantization_of(model)
    if quantization and offloaded_tensors(model):
        raise DeltuneError(
            f"this {type(model).__name__} is quantised ({quantization}) and some of its weights are offloaded, and "
            "deltas cannot be attached to both: load it on devices that can hold it, or without quantisation"
        )
