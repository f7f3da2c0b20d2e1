"""Puts the tensors and labels of one delta into the model, and decides which deltas train.

While a delta is in use, the tensors that it owns are in the model's own slots (the `_parameters` of its modules), and
the base's tensors that they replace are kept in `base`. While it is not in use, its tensors are kept in its `held`. So
every tensor is registered exactly once at any time, and follows .to(), state_dict and deepcopy like any parameter.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..anatomy.offloading import OffloadedTensor, Place, offloaded_tensors, tied_identities
from ..anatomy.quantization import is_unquantized
from ..anatomy.quantizers import find_quantizer
from ..anatomy.skeleton import HANDLE_NAME, base_modules, base_tensors, modules_without_paths
from ..compat import (
    buffers_of,
    delete_from_parameter_dict,
    parameters_of,
    parameters_of_dict,
    set_in_parameter_dict,
    submodules_of,
)
from ..errors import DeltuneError
from .modules import Delta, HeadLabels, name_from_parameter_key, parameter_key
from .rows import refuse_late_gradients
from .sharding import gather_full_tensor, reshard, shard_like, update_fsdp_modules

_BASE = f"{HANDLE_NAME}.base."
"""The prefix of the names of replaced base tensors in a state dict."""

_MOVING = "/"
"""The value of `placed_delta` while tensors are moved, also after an interruption; no delta can have this name."""


class ModelState:
    """The tensors, labels and requires_grad flags of one tuned model. Every change may be repeated when interrupted."""

    # the mutex of the lock of forward passes, which `PassManager` sets. It is held while tensors move, and while
    # somebody reads where they are.
    mutex: Any

    def __init__(self, model: PreTrainedModel, deltas: nn.ModuleDict, base: nn.ParameterDict) -> None:
        self.model, self.deltas, self.base = model, deltas, base
        self.slots = parameter_slots(model)
        self.paths = {module: path for path, module in base_modules(model)}
        # where the values are of the base's parameters that accelerate offloads, by their places
        self.offloaded: dict[Place, OffloadedTensor] = offloaded_tensors(model)
        self.base_is_fixed = False  # whether nobody moves or offloads the base model, so that nothing looks for it
        self._keys: dict[Place, str] = {}  # of a tensor with several names the first, which deltas call it by
        for name, places in self.slots.items():
            for place in places:
                self._keys.setdefault(place, parameter_key(name))
        # the delta whose tensors are in the model's slots, or None for the base's own tensors
        self.placed_delta: str | None = None
        self.labels = HeadLabels.from_config(model.config)  # what the model's configuration says about its labels
        self._trainable: set[Delta] = set()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "mutex"}  # a copy has its own

    def delta(self, name: str) -> Delta:
        delta = self.deltas[name]
        assert isinstance(delta, Delta)
        return delta

    # -- reading

    def locked(self) -> contextlib.AbstractContextManager[Any]:
        """Keep other threads from moving tensors; torch.compile cannot lock, so it reads the slots as they are."""
        return contextlib.nullcontext() if torch.compiler.is_dynamo_compiling() else self.mutex

    def base_value(self, name: str) -> torch.Tensor:
        """The base model's own value of a tensor, whole: in its slot, replaced by a delta's, offloaded or sharded."""
        return gather_full_tensor(self.base_values((name,))[0])

    def base_values(self, names: Iterable[str]) -> list[nn.Parameter]:
        """The base model's own values of tensors: in their slots, replaced by a delta's, or offloaded; or shards."""
        values: list[nn.Parameter] = []
        offloaded: dict[int, OffloadedTensor] = {}
        with self.locked():
            base = parameters_of_dict(self.base)
            for number, name in enumerate(names):
                value = base.get(parameter_key(name)) if base else None
                values.append(self._parameter_in_slot(name) if value is None else value)
                places = [place for place in self.slots[name] if place in self.offloaded] if self.offloaded else []
                if places and values[-1].is_meta:
                    offloaded[number] = self.offloaded[places[0]]
        for number, tensor in offloaded.items():  # it may be read from the disk
            values[number] = nn.Parameter(tensor.value(values[number]), requires_grad=False)
        return values

    def base_parameter(self, module: nn.Module, leaf: str) -> nn.Parameter | None:
        """The base model's own parameter of a module, whatever delta is in use; None if it has none of this name.

        Which tensor a place belongs to was seen when no delta was in the model, so other threads may move tensors.
        """
        key = self._keys.get((module, leaf))
        return parameters_of(module).get(leaf) if key is None else self.base_values((name_from_parameter_key(key),))[0]

    def delta_value(self, delta: Delta, name: str) -> nn.Parameter:
        """A delta's value of a tensor that it owns, whether it is in the model or in `held`."""
        with self.locked():
            held = parameters_of_dict(delta.held).get(parameter_key(name))
            return self._parameter_in_slot(name) if held is None else held

    def parameters_of(self, delta: Delta) -> list[nn.Parameter]:
        """All parameters of a delta, those that are in the model's slots included."""
        with self.mutex:
            placed = [
                self._parameter_in_slot(name)
                for name in delta.owned_tensor_names
                if parameter_key(name) not in parameters_of_dict(delta.held)
            ]
            return [*delta.parameters(), *placed]

    def placed_delta_in(self, state_dict: Mapping[str, Any]) -> str | None:
        """The delta whose tensors were in the model's slots when a state dict was made, or None."""
        displaced = {key.removeprefix(_BASE) for key in state_dict if key.startswith(_BASE)}
        keys_of_deltas = {
            name: {parameter_key(owned) for owned in self.delta(name).owned_tensor_names} for name in self.deltas
        }
        placed = [
            n
            for n, keys in keys_of_deltas.items()
            if keys and keys <= displaced and not _held_keys(n, keys) & state_dict.keys()
        ]
        return placed[0] if placed else None

    def with_base_in_place(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state dict with the base's tensors under the model's own names, as when no delta is in use."""
        result, name = dict(state_dict), self.placed_delta_in(state_dict)
        for owned in self.delta(name).owned_tensor_names if name is not None else ():
            key = parameter_key(owned)
            base = result.pop(_BASE + key)
            result[_held_keys(name or "", [key]).pop()] = result[owned]
            slots = self.slots[owned]
            result |= {other: base for other, places in self.slots.items() if places is slots and other in result}
        return result

    def _parameter_in_slot(self, name: str) -> nn.Parameter:
        places = self.slots[name]
        for module, leaf in places:
            if parameters_of(module).get(leaf) is None:
                raise DeltuneError(missing_parameter(name))
        first = parameters_of(places[0][0])[places[0][1]]
        assert first is not None
        return first

    def check_tensors_fit(self, name: str | None) -> None:
        """Check that the tensors of a delta, or of none, can be put into the model's slots."""
        if self.placed_delta != name:
            incoming = self.delta(name).owned_tensor_names if name is not None else ()
            for tensor in (*incoming, *(name_from_parameter_key(key) for key in parameters_of_dict(self.base))):
                self._parameter_in_slot(tensor)

    # -- changing

    @contextlib.contextmanager
    def base_in(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Have the base's own tensors in the slots of some modules inside the block, in which accelerate moves them."""
        swapped: list[tuple[dict[str, nn.Parameter | None], str, str, nn.Parameter | None]] = []
        with self.mutex:
            replaced = parameters_of_dict(self.base)
            for module in modules if replaced else ():
                parameters = parameters_of(module)
                for leaf, parameter in list(parameters.items()):
                    key = self._keys.get((module, leaf))
                    if key in replaced:
                        swapped.append((parameters, leaf, key, parameter))
                        parameters[leaf] = replaced[key]
        try:
            yield
        finally:
            with self.mutex:
                for parameters, leaf, key, parameter in swapped:
                    base = parameters[leaf]
                    assert base is not None
                    set_in_parameter_dict(self.base, key, base)
                    parameters[leaf] = parameter

    def set_parameter(self, name: str, parameter: nn.Parameter) -> None:
        """Put a parameter into every slot of a tensor; tied tensors have several."""
        for module, leaf in self.slots[name]:
            parameters_of(module)[leaf] = parameter
            if leaf == "weight" and isinstance(module, nn.Linear):
                module.out_features = parameter.shape[0]

    def replace_value(self, name: str, value: torch.Tensor) -> None:
        """Give a tensor another value in every slot, or in the shards of all processes."""
        parameter = self._parameter_in_slot(name)
        sharded = shard_like(value, parameter)
        if sharded is value:
            self.set_parameter(name, nn.Parameter(value.clone()))
        else:
            with torch.no_grad():
                parameter.copy_(sharded)

    def place_tensors(self, name: str | None) -> None:
        """Put the tensors of a delta into the model's slots.

        Every tensor is put into its new place before it leaves the old one, so that an interruption loses nothing.
        """
        if self.placed_delta == name:
            return
        if name is not None and name not in self.deltas:
            raise DeltuneError(
                f"delta {name!r} was detached between a forward pass and its backward pass, which computes layers "
                "again: run the backward pass before detach()"
            )
        self.check_tensors_fit(name)
        placed = self.deltas if self.placed_delta == _MOVING else [self.placed_delta]  # all, after an interruption
        others = [self.delta(other) for other in placed if other is not None and other != name and other in self.deltas]
        self.placed_delta = _MOVING
        for delta in others:
            for owned in delta.owned_tensor_names:
                if parameter_key(owned) not in parameters_of_dict(delta.held):
                    set_in_parameter_dict(delta.held, parameter_key(owned), self._parameter_in_slot(owned))
        incoming = (
            {} if name is None else {parameter_key(owned): owned for owned in self.delta(name).owned_tensor_names}
        )
        for key in [key for key in parameters_of_dict(self.base) if key not in incoming]:
            self.set_parameter(name_from_parameter_key(key), parameters_of_dict(self.base)[key])
            delete_from_parameter_dict(self.base, key)
        for key, owned in incoming.items():
            held = self.delta(name or "").held
            if key in parameters_of_dict(held):
                if key not in parameters_of_dict(self.base):
                    set_in_parameter_dict(self.base, key, self._parameter_in_slot(owned))
                self.set_parameter(owned, parameters_of_dict(held)[key])
                delete_from_parameter_dict(held, key)
        update_fsdp_modules(self.model)
        self.placed_delta = name

    def place(self, name: str | None, labels: HeadLabels) -> None:
        """Put the tensors of a delta, or the base's own, and labels in place."""
        self.place_tensors(name)
        self.set_labels(labels)

    def set_labels(self, labels: HeadLabels) -> None:
        """Write the labels of a head into the model's configuration."""
        if labels is not self.labels:
            labels.apply_to(self.model)
            self.labels = labels

    def train_only(self, deltas: Iterable[Delta]) -> None:
        """Make the parameters of these deltas trainable, each as it was before, and freeze all other deltas."""
        chosen = set(deltas)
        if chosen != self._trainable:
            reshard(self.model)
        for delta in self._trainable - chosen:
            refuse_late_gradients(delta)
            delta.freeze(self.parameters_by_name(delta))
            self._trainable.discard(delta)
        for delta in chosen:
            self._trainable.add(delta)
            delta.unfreeze(self.parameters_by_name(delta))

    def keep_requires_grad(self, delta: Delta) -> None:
        """Leave the parameters of a delta that was loaded with a model as they are, until it is not in use."""
        self._trainable.add(delta)
        delta.saved_requires_grad = None

    def forget(self, delta: Delta) -> None:
        """Leave a delta that is detached as it is from now on."""
        self._trainable.discard(delta)

    def parameters_by_name(self, delta: Delta) -> dict[str, nn.Parameter]:
        """The parameters of a delta by their names in it, wherever they are at the moment."""
        with self.locked():
            parameters = dict(delta.named_parameters())
            for owned in delta.owned_tensor_names:
                name = f"held.{parameter_key(owned)}"
                if name not in parameters:
                    parameters[name] = self._parameter_in_slot(owned)
        return parameters


def missing_parameter(name: str) -> str:
    """The message of an error about a parameter that is not in its module any more."""
    return (
        f"{name} was replaced or quantised after deltas were attached to it (torch.nn.utils.prune, parametrizations "
        "and quantising do that), so that a delta's own values have no place: undo that, as by prune.remove or "
        "remove_parametrizations, and attach after it"
    )


def _held_keys(name: str, keys: Iterable[str]) -> set[str]:
    """The names in a state dict of the tensors that a delta which is not in use holds."""
    return {f"{HANDLE_NAME}.deltas.{name}.held.{key}" for key in keys}


def parameter_slots(model: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    """Return all modules, with the parameter's name in them, that hold each parameter; a tied tensor has several."""
    slots: dict[int, list[tuple[nn.Module, str]]] = {}
    names: dict[str, int] = {}
    tied = tied_identities(model)
    for path, module in base_modules(model):
        for leaf, parameter in list(parameters_of(module).items()):
            if parameter is not None:
                identity = tied.get(id(parameter), id(parameter))
                slots.setdefault(identity, []).append((module, leaf))
                names[f"{path}.{leaf}".strip(".")] = identity
    return {name: slots[key] for name, key in names.items()}


class AttachedModules:
    """The modules that deltas act at and all modules around them, each with its parent and its name in it."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.paths: set[str] = set()
        self.places: set[tuple[str, str]] = set()
        self.entries: dict[str, tuple[nn.Module, str, nn.Module]] = {}
        self.quantized: set[str] = set()  # paths of those that were quantised when the first delta was attached
        self.parameters: list[tuple[str, str, nn.Module]] = []

    def keep(self, paths: set[str], places: set[tuple[str, str]]) -> None:
        """Keep the modules at some paths, and those around them; new ones are looked up in the model as it is now."""
        if paths == self.paths and places == self.places:
            return
        inside = {path.rsplit(".", n)[0]: None for path in paths if path for n in range(path.count(".") + 1)}
        entries = {}
        for path in inside:
            outer, _, leaf = path.rpartition(".")
            known = self.entries.get(path)
            entries[path] = known or (self.model.get_submodule(outer), leaf, self.model.get_submodule(path))
            if known is None and find_quantizer(entries[path][2]) is not None:
                self.quantized.add(path)
        self.paths, self.places, self.entries = paths, places, entries
        self.parameters = [(path, leaf, entries[path][2]) for path, leaf in sorted(places)]

    def check(self) -> None:
        """Check that all of them are still in the model, with plain weights."""
        exporting = torch.compiler.is_compiling()  # torch.export replaces all weights by tensors without values
        for path, leaf, module in self.parameters:
            if parameters_of(module).get(leaf) is None:
                raise DeltuneError(missing_parameter(f"{path}.{leaf}"))
        for path, (parent, leaf, module) in self.entries.items():
            weight = parameters_of(module).get("weight")
            is_plain = weight is None or exporting or is_unquantized(weight) or path in self.quantized
            if submodules_of(parent).get(leaf) is not module or not is_plain:
                raise DeltuneError(
                    f"{path} was replaced or quantised after deltas were attached to it (quantising, resizing and "
                    "other libraries' adapters do that): detach, change the model, and attach or load again; to "
                    "quantise a tuned model, merge() first"
                )


_TUNED: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
"""The models that have deltas, by id: the list of the values' references is made in one step, beside other threads."""


def claim_modules(model: nn.Module) -> None:
    """Remember that a model has deltas, for `refuse_shared_modules`."""
    _TUNED[id(model)] = model


def refuse_shared_modules(model: nn.Module) -> None:
    """Check that no module with tensors of the model belongs to another model that has deltas.

    A module without tensors may: transformers has one activation module for every OpenAI GPT of a process.
    """
    others = [other for other in (reference() for reference in _TUNED.valuerefs()) if other not in (None, model)]
    owners = {m: o for o in others if o and HANDLE_NAME in submodules_of(o) for m in modules_without_paths(o)}
    for path, module in base_modules(model) if owners else ():
        if module in owners and _has_tensors(module):
            where = f"{path!r} of this {type(model).__name__}" if path else f"this {type(model).__name__}"
            raise DeltuneError(
                f"{where} also belongs to a {type(owners[module]).__name__} that has deltas, and the two would "
                f"overwrite each other's tensors: attach to that {type(owners[module]).__name__} instead, or detach() "
                "its deltas first"
            )


def _has_tensors(module: nn.Module) -> bool:
    """Whether a module itself holds a parameter or a buffer."""
    return any(tensor is not None for tensor in (*parameters_of(module).values(), *buffers_of(module).values()))


def refuse_inference_tensors(model: nn.Module) -> None:
    """Check that the model was not made inside torch.inference_mode()."""
    if any(parameter.is_inference() for parameter in base_tensors(model)):
        raise DeltuneError(
            f"the weights of this {type(model).__name__} were made inside torch.inference_mode(), and torch cannot "
            "train through such tensors: create or load the model outside of it (attaching, loading a delta and "
            "running the model inside of it work)"
        )
