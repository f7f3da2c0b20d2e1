"""Which delta's tensors and labels a model has now, and which deltas train.

A tensor that a delta selects stands in the model's own slots while that delta is in use, and what it displaces is kept
in `base`; else it is kept in the delta's `held`. So each is registered exactly once at any time and follows .to(),
state_dict and deepcopy like every parameter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..anatomy.skeleton import HANDLE_NAME
from ..compat import delete_from_parameter_dict, parameters_of_dict, set_in_parameter_dict
from ..errors import DeltuneError
from .modules import Delta, HeadLabels, parameter_key
from .rows import refuse_late_gradients
from .sparse_params import parameter_slots

_BASE = f"{HANDLE_NAME}.base."
"""How the names of displaced tensors begin in a state dict."""

_UNSETTLED = "/"
"""Not the name of any delta: tensors are being moved, or that was interrupted."""


class ModelState:
    """The tensors, labels and grad flags of one tuned model. Every change may be repeated after an interruption.

    Attributes:
        standing: The delta whose tensors stand in the model's slots, or None for the base's own.
        labels: What the model's configuration says about its labels.
        lock: The lock of passes; its mutex is held while tensors move, and by whoever reads where they are.
    """

    def __init__(self, model: PreTrainedModel, deltas: nn.ModuleDict, base: nn.ParameterDict, lock: Any) -> None:
        self.model, self.deltas, self.base, self.lock = model, deltas, base, lock
        self.slots = parameter_slots(model)
        self.standing: str | None = None
        self.labels = HeadLabels.of(model.config)
        self._awake: set[str] = set()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "lock"}  # the copy's passes have one

    @property
    def mutex(self) -> Any:
        """That of the lock of passes, which has a new one in a forked process."""
        return self.lock.mutex

    def delta(self, name: str) -> Delta:
        delta = self.deltas[name]
        assert isinstance(delta, Delta)
        return delta

    # -- reading

    def steady(self) -> contextlib.AbstractContextManager[Any]:
        """No other thread moves tensors meanwhile; torch.compile, which cannot lock, reads what stands there."""
        return contextlib.nullcontext() if torch.compiler.is_dynamo_compiling() else self.mutex

    def original(self, name: str) -> nn.Parameter:
        """The base model's own value of a tensor, whether displaced or in its slot."""
        with self.steady():
            base = parameters_of_dict(self.base).get(parameter_key(name))
            return self._slot(name) if base is None else base

    def value(self, delta: Delta, name: str) -> nn.Parameter:
        """A delta's own value of a tensor that it owns."""
        with self.steady():
            own = parameters_of_dict(delta.held).get(parameter_key(name))
            return self._slot(name) if own is None else own

    def parameters_of(self, delta: Delta) -> list[nn.Parameter]:
        """All parameters of a delta, those that stand in the model's slots included."""
        with self.mutex:
            own = [
                self._slot(name) for name in delta.owned if parameter_key(name) not in parameters_of_dict(delta.held)
            ]
            return [*delta.parameters(), *own]

    def standing_in(self, state_dict: Mapping[str, Any]) -> str | None:
        """The delta whose tensors stood in the slots when a state dict was made, or None."""
        displaced = {key.removeprefix(_BASE) for key in state_dict if key.startswith(_BASE)}
        own = {name: {parameter_key(owned) for owned in self.delta(name).owned} for name in self.deltas}
        here = [n for n, keys in own.items() if keys and keys <= displaced and not _held(n, keys) & state_dict.keys()]
        return here[0] if here else None

    def at_rest(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """The same state dict as it is when no delta is in use."""
        found, name = dict(state_dict), self.standing_in(state_dict)
        for owned in self.delta(name).owned if name is not None else ():
            key = parameter_key(owned)
            base = found.pop(_BASE + key)
            found[_held(name or "", [key]).pop()] = found[owned]
            slots = self.slots[owned]
            found |= {other: base for other, places in self.slots.items() if places is slots and other in found}
        return found

    def _slot(self, name: str) -> nn.Parameter:
        module, leaf = self.slots[name][0]
        parameter = module._parameters[leaf]
        assert parameter is not None
        return parameter

    # -- changing

    def put(self, name: str, parameter: nn.Parameter) -> None:
        """Put a parameter into every slot of a (possibly tied) tensor."""
        for module, leaf in self.slots[name]:
            module._parameters[leaf] = parameter
            if leaf == "weight" and isinstance(module, nn.Linear):
                module.out_features = parameter.shape[0]

    def stand(self, name: str | None) -> None:
        """Put the tensors of one delta, or of none, into the model's slots.

        Every tensor is put into its new place before it leaves the old one, so that an interruption loses nothing.
        """
        if self.standing == name:
            return
        if name is not None and name not in self.deltas:
            raise DeltuneError(
                f"{name!r} was detached after the forward pass that used it: do the backward pass before, for layers "
                "are computed again in it"
            )
        others = [self.delta(other) for other in self.deltas if other != name]
        self.standing = _UNSETTLED
        for delta in others:
            for owned in delta.owned:
                if parameter_key(owned) not in parameters_of_dict(delta.held):
                    set_in_parameter_dict(delta.held, parameter_key(owned), self._slot(owned))
        incoming = {} if name is None else {parameter_key(owned): owned for owned in self.delta(name).owned}
        for key in [key for key in parameters_of_dict(self.base) if key not in incoming]:
            self.put(key.replace("/", "."), parameters_of_dict(self.base)[key])
            delete_from_parameter_dict(self.base, key)
        for key, owned in incoming.items():
            held = self.delta(name or "").held
            if key in parameters_of_dict(held):
                if key not in parameters_of_dict(self.base):
                    set_in_parameter_dict(self.base, key, self._slot(owned))
                self.put(owned, parameters_of_dict(held)[key])
                delete_from_parameter_dict(held, key)
        self.standing = name

    def give(self, labels: HeadLabels) -> None:
        """Give the model's configuration the label facts of a head."""
        if labels is not self.labels:
            labels.give(self.model)
            self.labels = labels

    def train_only(self, deltas: Iterable[Delta]) -> None:
        """Let these deltas train, each what it trained before, and no other."""
        chosen = {id(delta) for delta in deltas}
        names = {name for name in self.deltas if id(self.deltas[name]) in chosen}
        for name in self._awake - names:
            if name in self.deltas:
                refuse_late_gradients(self.delta(name))
                self.delta(name).rest(self.parameters_by_name(name))
            self._awake.discard(name)
        for name in names:
            self._awake.add(name)
            self.delta(name).wake(self.parameters_by_name(name))

    def parameters_by_name(self, name: str) -> dict[str, nn.Parameter]:
        """The parameters of a delta by the names they have in it, wherever they stand."""
        delta = self.delta(name)
        named = dict(delta.named_parameters())
        return named | {f"held.{parameter_key(owned)}": self.value(delta, owned) for owned in delta.owned}


def _held(name: str, keys: Iterable[str]) -> set[str]:
    """The names in a state dict of tensors that a resting delta holds."""
    return {f"{HANDLE_NAME}.deltas.{name}.held.{key}" for key in keys}
