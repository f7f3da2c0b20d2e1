"""Copies a model's structure to the meta device, so that observing a model never runs or changes the model itself.

Another thread may be running the model meanwhile. So the copy shares no module, parameter or configuration with it, and
no method of a live tensor is ever called: the `to` of a quantised parameter, for one, moves state that the live model
needs. In place of a quantised linear the copy has a plain one of the same sizes.
"""

from __future__ import annotations

import copy
import functools
import types
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..compat import (
    CALL_OVERRIDES,
    HOOKS_INSTALLED,
    OFFLOAD_ATTRIBUTES,
    buffers_of,
    offload_hook,
    parameters_of,
    submodules_of,
)
from .quantizers import bias_of, find_quantizer, linear_sizes

HANDLE_NAME = "deltune"
"""The name of deltune's own child of a tuned model, which is not part of what is observed."""

PASS_OVERRIDES = (*CALL_OVERRIDES, "generate")
"""Attributes that replace methods of one live instance; they are not copied, and neither is a value whose class has a
true `of_live_model`."""


def structural_copy(model: PreTrainedModel) -> tuple[PreTrainedModel, dict[nn.Module, nn.Module]]:
    """Copy a model's modules, with meta tensors in place of its parameters and buffers, in eval mode, without hooks.

    With the copy comes a dictionary from each of its modules to the original.
    """
    copier = _Copier()
    twin = copier.module(model)
    assert isinstance(twin, PreTrainedModel)
    return twin, copier.originals


def fill_with_zeros(twin: nn.Module) -> None:
    """Put zeros in place of the meta tensors of a copy. A large tensor is one zero in memory, seen in its shape."""
    for module in twin.modules():
        for name, parameter in parameters_of(module).items():
            if parameter is not None:
                parameters_of(module)[name] = nn.Parameter(_zeros(parameter), requires_grad=False)
        for name, buffer in buffers_of(module).items():
            if buffer is not None:
                buffers_of(module)[name] = _zeros(buffer)


LARGEST_FILLED = 1 << 20
"""Numbers of the largest tensor of a copy that has memory for each, so that it can be written to."""


def _zeros(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.numel() <= LARGEST_FILLED:
        return torch.zeros(tuple(tensor.shape), dtype=tensor.dtype, device="cpu")
    return torch.zeros((), dtype=tensor.dtype, device="cpu").expand(tuple(tensor.shape))


def base_modules(model: nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Module]]:
    """Iterate over the model's own modules by path; deltas are left out, since threads may be attaching them.

    With `remove_duplicate`, a module with several paths comes once, under its first path.
    """
    stack, seen = [("", model)], set()
    while stack:
        path, module = stack.pop()
        if remove_duplicate and module in seen:
            continue
        seen.add(module)
        yield path, module
        prefix = f"{path}." if path else ""
        for name, child in reversed(list(submodules_of(module).items())):
            if child is not None and name != HANDLE_NAME:
                stack.append((prefix + name, child))


def modules_without_paths(model: nn.Module) -> list[nn.Module]:
    """Return the modules of `base_modules`, each once and without its path."""
    return [module for _, module in base_modules(model)]


def base_tensors(model: nn.Module) -> Iterator[nn.Parameter]:
    """Iterate over the parameters of the model's own modules; tied ones come once for each of their names."""
    return (parameter for _, parameter in base_parameters(model))


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
        if find_quantizer(module) is not None:
            return self._plain_linear(module)
        twin = object.__new__(type(module))
        self.copies[id(module)] = twin
        self.originals[twin] = module
        blank = nn.Module().__dict__  # empty dictionaries of hooks, parameters, buffers and children
        twin.__dict__.update(blank)
        twin.__dict__["training"] = False  # layers must not be dropped
        parameters = dict(parameters_of(module)).items()
        parameters_of(twin).update({n: p if p is None else nn.Parameter(_meta(p), False) for n, p in parameters})
        buffers_of(twin).update({name: _meta(b) for name, b in dict(buffers_of(module)).items()})
        children = dict(submodules_of(module)).items()
        # `is None` and not falsy, as an empty ModuleList is
        copies = {n: None if m is None else self.module(m) for n, m in children if n != HANDLE_NAME}
        submodules_of(twin).update(copies)
        twin.__dict__.update((name, self.value(value)) for name, value in _copied_attributes(module))
        return twin

    def _plain_linear(self, module: nn.Module) -> nn.Module:
        """Return a linear of the same sizes in place of a quantised one, whose forward needs its true weight."""
        in_features, out_features = linear_sizes(module)
        bias = bias_of(module) is not None
        twin = nn.Linear(in_features, out_features, bias, device="meta", dtype=torch.float32).eval()
        twin.requires_grad_(False)
        self.copies[id(module)] = twin
        self.originals[twin] = module
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


NOT_COPIED = frozenset((*nn.Module().__dict__, *PASS_OVERRIDES, HOOKS_INSTALLED))
"""The attributes that torch gives every module, which a copy has of its own, `PASS_OVERRIDES`, and the mark of
installed hooks, of which a copy has none."""


def _copied_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Iterate over the attributes of a live module that its copy has, beside torch's own."""
    attributes = module.__dict__
    # accelerate's wrapper around forward runs the live module
    excluded = OFFLOAD_ATTRIBUTES if offload_hook(module) is not None else ()
    for name in sorted(attributes.keys() - NOT_COPIED):
        value = attributes.get(name)
        is_copied = type(value) in VALUES or not getattr(type(value), "of_live_model", False)
        if is_copied and name not in excluded:
            yield name, value


@dataclass(frozen=True)
class Stamp:
    """Everything that a copy of a live module's structure depends on. Equal stamps were taken of the same structure."""

    # the types of its modules, the names and shapes of their parameters and buffers, which of them are one tensor, and
    # the values of all other attributes and of the configurations
    structure: tuple[Any, ...]
    # the functions among the attributes of its modules, and everything that their classes define
    functions: tuple[Any, ...]


def structure_stamp(module: nn.Module) -> Stamp:
    """Return a stamp of a live module, in about a microsecond for each of its attributes.

    It covers exactly what `structural_copy` copies, and so neither values nor devices nor precisions of weights, nor
    the labels and the attention implementation in a configuration. It holds no module and no tensor alive.
    """
    stamper = _Stamper()
    stamper.module(module)
    return Stamp(tuple(stamper.structure), tuple(stamper.functions))


VALUES = frozenset((type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size))
"""Types of attributes that are compared by value."""

OF_DELTAS = frozenset({"_attn_implementation_internal", "id2label", "label2id", "problem_type"})
"""Attributes of a configuration that change with the delta in use. No copy runs with this attention or with a loss."""

PLAIN_CLASSES = frozenset(PreTrainedModel.__mro__)


class _Reference(weakref.ref[Any]):
    """A reference that equals another one to the same living object; the object's own equality may be anything."""

    __slots__ = ()
    __hash__ = weakref.ref.__hash__

    def __eq__(self, other: object) -> bool:
        value = self()
        return value is not None and isinstance(other, _Reference) and value is other()


class _Stamper:
    """Walks through modules as `_Copier` does, and notes what it would copy."""

    def __init__(self) -> None:
        self.structure: list[Any] = []
        self.functions: list[Any] = []
        self.numbers: dict[int, int] = {}  # of modules, parameters and configurations, in the order of the first visit
        self.classes: set[type] = set()

    def module(self, module: nn.Module) -> int:
        number = self.numbers.get(id(module))
        if number is not None:
            return number
        number = self.numbers[id(module)] = len(self.numbers)
        kind = type(module)
        if kind not in self.classes:
            self._class(kind)
        quantizer = find_quantizer(module)
        if quantizer is not None:
            bias = bias_of(module)
            note = None if bias is None else self._tensor(bias)
            self.structure.append((number, kind, quantizer.name(module), linear_sizes(module), note))
            return number
        notes: list[Any] = [number, kind]
        for tensors in (parameters_of(module), buffers_of(module)):
            for name, tensor in list(tensors.items()):
                notes += (name, None if tensor is None else self._tensor(tensor))
        for name, child in list(submodules_of(module).items()):
            if name != HANDLE_NAME:
                notes += (name, None if child is None else self.module(child))
        for name, value in _copied_attributes(module):
            if type(value) in VALUES:
                notes += (name, value)
            elif callable(value) and not isinstance(value, nn.Module):
                self.functions.append((number, name, self.value(value)))
            else:
                notes += (name, self.value(value))
        self.structure.append(tuple(notes))
        return number

    def _tensor(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        kind = None if tensor.dtype.is_floating_point else tensor.dtype  # a copy has one floating-point type
        return self.numbers.setdefault(id(tensor), len(self.numbers)), tensor.shape, kind

    def _class(self, kind: type) -> None:
        """Note what a class and its bases define, since anybody may replace a method of a class."""
        for base in kind.__mro__:
            if base not in self.classes and base not in PLAIN_CLASSES:
                self.classes.add(base)
                self.functions.append((base, *(_reference(value) for value in list(vars(base).values()))))

    def value(self, value: Any) -> Any:
        kind = type(value)
        if kind in VALUES:
            return value
        if isinstance(value, nn.Module):
            return nn.Module, self.module(value)
        if isinstance(value, PreTrainedConfig):
            return kind, self._config(value)
        if isinstance(value, types.MethodType):
            return kind, self.value(value.__self__), _reference(value.__func__)
        if isinstance(value, functools.partial):
            return kind, self.value(value.func), *map(self.value, value.args), self.value(value.keywords)
        if kind in (list, tuple):
            return kind, *map(self.value, value)
        if kind is set:
            return kind, frozenset(map(self.value, value))
        if kind is dict:
            return kind, *((key, self.value(item)) for key, item in list(value.items()))
        return _reference(value)

    def _config(self, config: PreTrainedConfig) -> int:
        number = self.numbers.get(id(config))
        if number is None:
            number = self.numbers[id(config)] = len(self.numbers)
            names = [name for name in list(vars(config)) if name not in OF_DELTAS]
            self.structure.append((number, type(config), *((name, self.value(vars(config)[name])) for name in names)))
        return number


def _reference(value: Any) -> Any:
    """Return what is equal for the same object alone; of objects without weak references, the object itself."""
    try:
        return weakref.ref(value) if type(value) is types.FunctionType else _Reference(value)
    except TypeError:
        return value


def _meta(tensor: Any) -> Any:
    if tensor is None:
        return None
    dtype = torch.float32 if tensor.dtype.is_floating_point else tensor.dtype
    return torch.empty(tuple(tensor.shape), dtype=dtype, device="meta")
