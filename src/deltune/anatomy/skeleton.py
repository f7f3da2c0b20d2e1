"""Copies a model's structure to the meta device, so that observing a model never runs or changes the model itself.

Another thread may be running the model meanwhile. So the copy shares no module, parameter or configuration with it, and
no method of a live tensor is ever called: the `to` of a quantised parameter, for one, moves state that the live model
needs.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..compat import CALL_OVERRIDES, buffers_of, offload_hook, parameters_of, submodules_of

HANDLE_NAME = "deltune"
"""The name of deltune's own child of a tuned model, which is not part of what is observed."""

PASS_OVERRIDES = (*CALL_OVERRIDES, "generate")
"""Attributes that replace methods of one live instance; they are not copied, and neither is a value whose class has a
true `of_live_model`."""


def structural_copy(model: PreTrainedModel) -> tuple[PreTrainedModel, dict[nn.Module, nn.Module]]:
    """Copy a model's modules, with meta tensors in place of its parameters and buffers, in eval mode, without hooks.

    Returns:
        The copy, and a dictionary from each of its modules to the module of `model` that it is a copy of.
    """
    copier = _Copier()
    twin = copier.module(model)
    assert isinstance(twin, PreTrainedModel)
    return twin, copier.originals


def base_modules(model: nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Module]]:
    """Iterate over the model's own modules by path; those of deltas are left out, since threads may be attaching them.

    Args:
        model: The model.
        remove_duplicate: Whether a module with several paths comes once, under its first path.

    Returns:
        Pairs of a path and a module.
    """
    queue, seen = [("", model)], set()
    while queue:
        path, module = queue.pop(0)
        if not (remove_duplicate and module in seen):
            seen.add(module)
            yield path, module
            children = [(name, child) for name, child in list(submodules_of(module).items()) if name != HANDLE_NAME]
            queue[:0] = [(f"{path}.{name}".lstrip("."), child) for name, child in children if child is not None]


def base_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Iterate over the model's own parameters by name; tied ones come under each of their names."""
    for path, module in base_modules(model, remove_duplicate=False):
        for leaf, parameter in list(parameters_of(module).items()):
            if parameter is not None:
                yield f"{path}.{leaf}".lstrip("."), parameter


class _Copier:
    """Copies modules, each once, and remembers which copy belongs to which module."""

    def __init__(self) -> None:
        self.copies: dict[int, nn.Module] = {}
        self.originals: dict[nn.Module, nn.Module] = {}
        self.configs: dict[int, Any] = {}  # deepcopy's memo, so that a part of a configuration stays a part of its copy

    def module(self, module: nn.Module) -> nn.Module:
        if id(module) in self.copies:
            return self.copies[id(module)]
        twin = object.__new__(type(module))
        self.copies[id(module)] = twin
        self.originals[twin] = module
        blank = nn.Module().__dict__  # empty dictionaries of hooks, parameters, buffers and children
        twin.__dict__.update(blank)
        twin.__dict__["training"] = False  # layers must not be dropped
        parameters_of(twin).update({name: _meta_parameter(p) for name, p in dict(parameters_of(module)).items()})
        buffers_of(twin).update({name: _meta(b) for name, b in dict(buffers_of(module)).items()})
        children = dict(submodules_of(module)).items()
        # `is None` and not falsy, as an empty ModuleList is
        copies = {n: None if m is None else self.module(m) for n, m in children if n != HANDLE_NAME}
        submodules_of(twin).update(copies)
        offloaded = offload_hook(module) is not None  # accelerate's wrapper around forward, which runs the live module
        for name, value in dict(module.__dict__).items():
            skipped = name in blank or name in PASS_OVERRIDES or (offloaded and name == "forward")
            if not skipped and not getattr(type(value), "of_live_model", False):
                twin.__dict__[name] = self.value(value)
        return twin

    def value(self, value: Any) -> Any:
        """Return an attribute's value with copies in place of modules; a value without modules stays as it is."""
        if isinstance(value, nn.Module):
            return self.module(value)
        if isinstance(value, PreTrainedConfig):
            return copy.deepcopy(value, self.configs)
        if isinstance(value, types.MethodType):
            owner = self.value(value.__self__)
            return value if owner is value.__self__ else types.MethodType(value.__func__, owner)
        if isinstance(value, functools.partial):
            arguments = [self.value(a) for a in value.args]
            return functools.partial(self.value(value.func), *arguments, **self.value(value.keywords))
        if type(value) in (list, tuple, set):
            return type(value)(self.value(item) for item in value)
        if type(value) is dict:
            return {key: self.value(item) for key, item in value.items()}
        return value


def _meta_parameter(parameter: torch.Tensor | None) -> nn.Parameter | None:
    return None if parameter is None else nn.Parameter(_meta(parameter), requires_grad=False)


def _meta(tensor: Any) -> Any:
    if tensor is None:
        return None
    dtype = torch.float32 if tensor.dtype.is_floating_point else tensor.dtype
    return torch.empty(tuple(tensor.shape), dtype=dtype, device="meta")
