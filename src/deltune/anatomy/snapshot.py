"""Tells whether a live model of plain weights is still what it was, in a fraction of the time that its checks take.

Everything is compared by identity: no path is joined, no value is copied, and nothing of the model is called.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from operator import is_, itemgetter
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..compat import buffers_of, offload_hook, parameters_of, submodules_of
from .quantization import has_plain_weights
from .skeleton import HANDLE_NAME, NOT_COPIED, OF_DELTAS, PLAIN_CLASSES, VALUES


class Snapshot:
    """What a live model was, so that what was found out about it holds as long as it `is_current`.

    It becomes stale when anything changes that a stamp of the base model covers, or that is checked before a delta is
    attached, but for the values of weights. So it compares the types of all modules, their children, the names of all
    their attributes (by which accelerate offloads), and the types, dtypes and devices of all parameters; of the base
    model also every attribute, every shape, what is tied, the configurations, and what the classes define. Some
    harmless changes make it stale too, such as a hook of a delta that is new. It keeps no
    sub-module and no parameter alive.
    """

    def __init__(self, model: nn.Module, base: nn.Module) -> None:
        self._modules: list[weakref.ref[nn.Module]] = []
        self._attributes = _Namespaces()
        self._others: list[Mapping[Any, Any]] = []
        self._contents = _Namespaces()
        self._sequences: list[tuple[Collection[Any], tuple[Any, ...]]] = []
        self._seen: set[int] = set()
        self._add_module(base, in_base=True)
        self._size_of_base = len(self._modules)
        self._add_module(model, in_base=False)
        modules = [module for reference in self._modules if (module := reference()) is not None]
        self._types = list(map(type, modules))
        self._parts = _parts(modules)
        self._children = [None if child is None else weakref.ref(child) for child in _children(modules)]
        self._tensors = self._describe(modules)

    @classmethod
    def of(cls, model: PreTrainedModel, base: PreTrainedModel) -> Snapshot | None:
        """Return a snapshot of a model; None where weights are quantised, offloaded or cannot be trained.

        Args:
            model: The model.
            base: Its base model.
        """
        try:
            return cls(model, base)
        except _NotPlain:
            return None

    def is_current(self) -> bool:
        """Whether the model still is what it was."""
        modules = [module for reference in self._modules if (module := reference()) is not None]
        return (
            len(modules) == len(self._modules)
            and list(map(type, modules)) == self._types
            and _parts(modules) == self._parts
            and _children(modules) == [None if reference is None else reference() for reference in self._children]
            and self._attributes.are_in([module.__dict__ for module in modules])
            and self._contents.are_in(self._others)
            and all(_same(tuple(sequence), values) for sequence, values in self._sequences)
            and self._describe(modules) == self._tensors
        )

    def __reduce__(self) -> Any:
        """Let a copy of a model have none, since its modules are other ones."""
        return type(None), ()

    def _describe(self, modules: Sequence[nn.Module]) -> list[Any]:
        """Return what is compared of the tensors of modules: of the base model's also their shapes and what is tied."""
        of_base, of_rest = modules[: self._size_of_base], modules[self._size_of_base :]
        slots = [t for module in of_base for t in (*parameters_of(module).values(), *buffers_of(module).values())]
        base_tensors = [tensor for tensor in slots if tensor is not None]
        slots += [parameter for module in of_rest for parameter in list(parameters_of(module).values())]
        tensors = [tensor for tensor in slots if tensor is not None]
        first: dict[int, int] = {}
        return [
            list(map(type, slots)), [t.dtype for t in tensors], [t.device for t in tensors],
            [t.is_inference() for t in tensors], [t.shape for t in base_tensors],
            [first.setdefault(number, len(first)) for number in map(id, base_tensors)],
        ]  # fmt: skip

    def _add_module(self, module: nn.Module, in_base: bool) -> None:
        if id(module) in self._seen:
            return
        self._seen.add(id(module))
        if not has_plain_weights(module) or offload_hook(module) is not None:
            raise _NotPlain
        self._modules.append(weakref.ref(module))
        values = self._attributes.add(module.__dict__, NOT_COPIED if in_base else module.__dict__)
        if in_base:
            for kind in type(module).__mro__:
                if kind not in PLAIN_CLASSES and id(kind) not in self._seen:
                    self._seen.add(id(kind))
                    self._others.append(vars(kind))
                    self._contents.add(vars(kind))
            self._add_values(values)
        for name, child in list(submodules_of(module).items()):
            if child is not None and name != HANDLE_NAME:
                self._add_module(child, in_base)

    def _add_values(self, values: Iterable[Any]) -> None:
        """Add what values of attributes consist of, where that can change while they stay the same objects."""
        for value in values:
            kind = type(value)
            if kind in VALUES or kind is types.FunctionType:
                continue
            if isinstance(value, nn.Module):
                self._add_module(value, in_base=True)
            elif isinstance(value, types.MethodType):
                self._add_values((value.__self__,))
            elif isinstance(value, functools.partial):
                self._add_values((value.func, *value.args, value.keywords))
            elif kind is tuple:
                self._add_values(value)
            elif id(value) not in self._seen:
                self._seen.add(id(value))
                if kind in (list, set):
                    self._sequences.append((value, tuple(value)))
                    self._add_values(tuple(value))
                elif kind is dict or isinstance(value, PreTrainedConfig):
                    self._others.append(value if kind is dict else vars(value))
                    self._add_values(self._contents.add(self._others[-1], () if kind is dict else OF_DELTAS))


class _Namespaces:
    """The names in namespaces, in their order, and the values of some of them."""

    def __init__(self) -> None:
        self.names: list[tuple[Any, ...]] = []
        self.getters: list[Callable[[Mapping[Any, Any]], tuple[Any, ...]]] = []
        self.values: list[Any] = []

    def add(self, namespace: Mapping[Any, Any], ignored: Collection[Any] = ()) -> tuple[Any, ...]:
        """Add one, and return the values that are compared.

        Args:
            namespace: The namespace.
            ignored: The names whose values may change.
        """
        items = dict(namespace)
        compared = [name for name in items if name not in ignored]
        # of a single name it would return no tuple
        getter: Any = itemgetter(*compared, compared[0]) if compared else _nothing
        self.names.append(tuple(items))
        self.getters.append(getter)
        values: tuple[Any, ...] = getter(items)
        self.values += values
        return values

    def are_in(self, namespaces: Sequence[Mapping[Any, Any]]) -> bool:
        """Whether these have all of the names, and for each the same object."""
        if list(map(tuple, namespaces)) != self.names:
            return False
        try:
            values = [getter(namespace) for getter, namespace in zip(self.getters, namespaces, strict=True)]
        except KeyError:  # another thread has removed it just now
            return False
        return _same(tuple(chain.from_iterable(values)), self.values)


def _nothing(namespace: Mapping[Any, Any]) -> tuple[Any, ...]:
    return ()


def _same(values: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether two sequences have the same objects."""
    return len(values) == len(others) and all(map(is_, values, others))


def _parts(modules: Iterable[nn.Module]) -> list[Any]:
    """The names of the parameters, buffers and children of modules."""
    names: list[Any] = []
    for module in modules:
        names += (*parameters_of(module), None, *buffers_of(module), None, *submodules_of(module), None)
    return names


def _children(modules: Iterable[nn.Module]) -> list[nn.Module | None]:
    """The children of modules, in the order of their names."""
    return [child for module in modules for child in list(submodules_of(module).values())]


class _NotPlain(Exception):
    """Raised at a module whose weights are quantised, offloaded or cannot be trained."""
