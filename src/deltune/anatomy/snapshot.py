"""Tells whether a live model of plain weights is still what it was, in a fraction of the time that its checks take.

Everything is compared by identity: no path is joined, no value is copied, and nothing of the model is called.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import is_, itemgetter
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..compat import buffers_of, offload_hook, parameters_of, submodules_of
from .quantization import has_plain_weights
from .skeleton import HANDLE_NAME, NOT_COPIED, OF_DELTAS, PLAIN_CLASSES, VALUES


class Snapshot:
    """The state of a live model, of which everything that was found out holds as long as it `is_current`.

    It becomes stale when anything changes that a stamp of the base model covers, or that is checked before a delta is
    attached, but for the values of weights. So it compares the types of all modules, their children, the names of all
    their attributes (by which accelerate offloads), and the types, dtypes and devices of all parameters; of the base
    model also every attribute, every shape, what is tied, the configurations, and what the classes define. Some
    harmless changes make it stale too, such as a hook of a delta that is new. It keeps no
    sub-module and no parameter alive.

    Attributes:
        dtypes: The dtypes of the model's parameters and of the base model's buffers.
        devices: The devices that they are on.
    """

    def __init__(self, model: nn.Module, base: nn.Module) -> None:
        self._seen: set[int] = set()
        self._getters: list[Getter] = []  # of the compared attributes of each module
        self._others: list[tuple[Mapping[Any, Any], Getter, tuple[Any, ...], tuple[Any, ...]]] = []
        self._sequences: list[tuple[Collection[Any], tuple[Any, ...]]] = []
        modules: list[nn.Module] = []
        self._add_module(base, modules, in_base=True)
        self._size_of_base = len(modules)
        self._add_module(model, modules, in_base=False)
        self._values, children, self._facts = self._read(modules)
        self.dtypes: set[torch.dtype] = set(self._facts[2])
        self.devices: set[torch.device] = set(self._facts[3])
        self._modules = [weakref.ref(module) for module in modules]
        self._children = [None if child is None else weakref.ref(child) for child in children]

    @classmethod
    def of(cls, model: PreTrainedModel, base: PreTrainedModel) -> Snapshot | None:
        """Return a snapshot of a model; None where weights are quantised, offloaded or cannot be trained."""
        try:
            return cls(model, base)
        except _NotPlain:
            return None

    def is_current(self) -> bool:
        """Return whether the model still is what it was."""
        modules = [module for reference in self._modules if (module := reference()) is not None]
        if len(modules) < len(self._modules):
            return False
        try:
            values, children, facts = self._read(modules)
            return (
                facts == self._facts
                and _same(values, self._values)
                and _same(children, [None if reference is None else reference() for reference in self._children])
                and all(tuple(o) == names and _same(get(o), values) for o, get, names, values in self._others)
                and all(_same(tuple(sequence), values) for sequence, values in self._sequences)
            )
        except KeyError:  # an attribute is gone
            return False

    def __reduce__(self) -> Any:
        """Let a copy of a model have none, since its modules are other ones."""
        return type(None), ()

    def _read(self, modules: Sequence[nn.Module]) -> tuple[list[Any], list[nn.Module | None], list[Any]]:
        """Return what is compared of modules: attributes and children by identity, and what is equal if it is the same.

        That is the types of the modules, all names in them, and the types, dtypes and devices of their tensors; of the
        base model's tensors also the shapes, and which of them are one.
        """
        names: list[Any] = []
        values: list[Any] = []
        children: list[nn.Module | None] = []
        slots: list[torch.Tensor | None] = []
        of_base = 0  # how many of the slots are in the base model
        for number, (module, get) in enumerate(zip(modules, self._getters, strict=True)):
            attributes, parameters, buffers = module.__dict__, parameters_of(module), buffers_of(module)
            inside = submodules_of(module)
            names += (type(module), *attributes, None, *parameters, None, *buffers, None, *inside, None)
            values += get(attributes)
            children += inside.values()
            slots += parameters.values()
            if number < self._size_of_base:
                slots += buffers.values()
                of_base = len(slots)
        tensors = [tensor for tensor in slots if tensor is not None]
        base_tensors = [tensor for tensor in slots[:of_base] if tensor is not None]
        first: dict[int, int] = {}
        facts = [
            names, list(map(type, slots)), [t.dtype for t in tensors], [t.device for t in tensors],
            [t.is_inference() for t in tensors], [t.shape for t in base_tensors],
            [first.setdefault(number, len(first)) for number in map(id, base_tensors)],
        ]  # fmt: skip
        return values, children, facts

    def _add_module(self, module: nn.Module, modules: list[nn.Module], in_base: bool) -> None:
        if id(module) in self._seen:
            return
        self._seen.add(id(module))
        if not has_plain_weights(module) or offload_hook(module) is not None:
            raise _NotPlain
        modules.append(module)
        get = _getter(name for name in module.__dict__ if in_base and name not in NOT_COPIED)
        self._getters.append(get)
        if in_base:
            for kind in type(module).__mro__:
                if kind not in PLAIN_CLASSES:
                    self._add_namespace(kind, vars(kind))
            self._add_values(get(module.__dict__), modules)
        for name, child in list(submodules_of(module).items()):
            if child is not None and name != HANDLE_NAME:
                self._add_module(child, modules, in_base)

    def _add_namespace(
        self, owner: object, namespace: Mapping[Any, Any], ignored: Collection[Any] = ()
    ) -> tuple[Any, ...]:
        """Add a namespace, but for the values of some names, and return its values; of one that is known none."""
        if id(owner) in self._seen:
            return ()
        self._seen.add(id(owner))
        names = tuple(namespace)
        get = _getter(name for name in names if name not in ignored)
        self._others.append((namespace, get, names, get(namespace)))
        return get(namespace)

    def _add_values(self, values: Iterable[Any], modules: list[nn.Module]) -> None:
        """Add what values of attributes consist of, where that can change while they stay the same objects."""
        for value in values:
            kind = type(value)
            if kind in VALUES or kind is types.FunctionType:
                continue
            if isinstance(value, nn.Module):
                self._add_module(value, modules, in_base=True)
            elif isinstance(value, types.MethodType):
                self._add_values((value.__self__,), modules)
            elif isinstance(value, functools.partial):
                self._add_values((value.func, *value.args, value.keywords), modules)
            elif kind is tuple:
                self._add_values(value, modules)
            elif kind is dict:
                self._add_values(self._add_namespace(value, value), modules)
            elif isinstance(value, PreTrainedConfig):
                self._add_values(self._add_namespace(value, vars(value), OF_DELTAS), modules)
            elif kind in (list, set) and id(value) not in self._seen:
                self._seen.add(id(value))
                self._sequences.append((value, tuple(value)))
                self._add_values(tuple(value), modules)


Getter = Callable[[Mapping[Any, Any]], tuple[Any, ...]]
"""Returns the values of some names in a namespace."""


def _getter(names: Iterable[Any]) -> Getter:
    chosen = tuple(names)
    get: Any = itemgetter(*chosen, chosen[0]) if chosen else _nothing  # of a single name it would return no tuple
    return get


def _nothing(namespace: Mapping[Any, Any]) -> tuple[Any, ...]:
    return ()


def _same(values: Sequence[Any], others: Sequence[Any]) -> bool:
    """Return whether two sequences have the same objects."""
    return len(values) == len(others) and all(map(is_, values, others))


class _NotPlain(Exception):
    """Raised at a module whose weights are quantised, offloaded or cannot be trained."""
