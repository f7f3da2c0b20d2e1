"""The handle on a tuned model: use, disable, detach, merge, save. The model stays itself.

Edits work through hooks and the one attention function; selected tensors stand in the model's own slots while their
delta is in use, and what they displace is kept, untouched, in the tuned object.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..algebra.counting import Count, base_size, count_plan
from ..algebra.elements import Method
from ..anatomy.observe import inspect
from ..anatomy.trace import base_model, configurations, trace
from ..anatomy.values import Anatomy
from ..errors import DeltuneError, all_problems, unknown
from . import merging, mixing, store, wiring
from .attention import extended_name
from .edits import Delta, Edit, Labels, slot_key
from .taps import AttentionPort
from .uses import Use
from .weights import slots_of

NAME = "deltune"
"""The tuned object's name in the model, and so the prefix of every key it adds to the state dict."""


class Tuned(nn.Module):
    """The handle on a model with deltas: named deltas, the one in use, and what it displaced.

    It is the sub-module `deltune` of the model; deltune.tuned(model) finds it.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.__dict__["parent"] = model  # not a child
        self.anatomy: Anatomy = inspect(model)
        self.deltas = nn.ModuleDict()
        self.base = nn.ParameterDict()
        self.active: str | None = None
        self.mixed: tuple[str | None, ...] = ()  # the delta of every row, inside rows()
        self.rowwise: mixing.Rowwise = ([], [])
        self.base_labels = Labels.of(model.config)
        self.base_facts: dict[str, Any] | None = None
        self.flags = {name: p.requires_grad for name, p in model.named_parameters()}
        self.implementations = [(config, config._attn_implementation) for config in configurations(model)]
        self.taps: dict[tuple[str, str], wiring.AnyTap] = {}
        self.slots = slots_of(model)
        model.requires_grad_(False)
        model.add_module(NAME, self)

    def __repr__(self) -> str:
        held = ", ".join(f"{name}: {delta.method!r}" for name, delta in self._deltas().items())
        return f"Tuned({held or 'nothing'}; in use: {self.active or ', '.join(map(str, self.mixed)) or None})"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise DeltuneError("the handle computes nothing: call the model itself, which has the delta in use")

    # -- what there is

    @property
    def model(self) -> PreTrainedModel:
        """The model this handle stands in. Error: it was detached."""
        if self.__dict__["parent"] is None:
            raise DeltuneError("this handle was detached or merged; attach or load gives a new one")
        found: PreTrainedModel = self.__dict__["parent"]
        return found

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the attached deltas."""
        return tuple(self.deltas)

    @property
    def method(self) -> Method | None:
        """The method in use, or None."""
        return None if self.active is None else self.delta().method

    def delta(self, name: str | None = None) -> Delta:
        """The delta of a name (default: the one in use)."""
        wanted = self.active if name is None else name
        if wanted is None:
            raise DeltuneError(f"no delta is in use; use(name) one of: {', '.join(self.names)}")
        if wanted not in self.deltas:
            raise DeltuneError(unknown("delta", wanted, self.names))
        found = self.deltas[wanted]
        assert isinstance(found, Delta)
        return found

    def count(self, denominator: str | int = "model", name: str | None = None) -> Count:
        """The exact count of the delta in use (or of the one named)."""
        delta = self.delta(name)
        size = base_size(self.model, denominator)
        heads = sum(self.value(delta, tensor).numel() for tensor in delta.head)
        return count_plan(self.anatomy, delta.planned, *size, delta.head_mode, delta.folded, heads)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Trained parameters of the delta in use, for an optimiser: head and tensors tuned in place included, those of
        the deltas that wait not. `recurse` (torch's) is not looked at."""
        yield from (p for _, p in self.trained())

    def trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Trained parameters of the delta in use with their names in the model."""
        if self.active is not None or self.mixed:
            yield from ((n, p) for n, p in self.model.named_parameters() if p.requires_grad)

    def original(self, name: str) -> nn.Parameter:
        """The base model's own value of a tensor, whether displaced or in its slot."""
        key = slot_key(name)
        return self.base[key] if key in self.base else self._slot(name)

    def value(self, delta: Delta, name: str) -> nn.Parameter:
        """A delta's own value of a tensor that it owns."""
        key = slot_key(name)
        return delta.held[key] if key in delta.held else self._slot(name)

    # -- the life cycle

    def use(self, name: str | None) -> Tuned:
        """Put a delta in use, its head and labels included; None: the base model as it was before attaching.

        Which of a delta's parameters train is remembered. Switch between steps, not between a forward pass and its
        backward pass.
        """
        self._not_mixed("use")
        if name is not None:
            self.delta(name)
        self._set(name)
        return self

    def advance(self, share: float) -> None:
        """Tell the delta in use which share of its training is done (0 to 1), before every step.

        Only a learned mask (`sparsity`) minds: up to a half its penalty grows, then its gates are fixed. `deltune
        train` calls it; a loop of your own must.
        """
        for _, gates in self.delta().all_gates():
            gates.advance(share)

    @contextlib.contextmanager
    def disable(self) -> Iterator[None]:
        """The base model, inside the context."""
        before = self.mixed or self.active
        self._set(None)
        try:
            yield
        finally:
            self._set(before)

    @contextlib.contextmanager
    def rows(self, names: Sequence[str | None]) -> Iterator[Tuned]:
        """Inside the context, row i of a batch uses the delta names[i], or none; all of them can be trained.

        Logits are as wide as the widest head that is used, -inf where a row's own head has no label; the loss of
        class labels is then each row's own. In `generate` rows may be repeated one after the other (beams). Inside,
        `parameters()` are those of all that are named; do the backward pass there too. Errors: an unknown name, a delta
        that trains tensors that all rows share (`full`), a batch of another size, a backward pass outside.
        """
        before = self.mixed or self.active
        uses = self._uses(names)  # whatever is wrong with the names is told before anything changes
        try:
            self._set(tuple(names), uses)
            yield self
        finally:
            self._set(before)

    def detach(self, name: str | None = None) -> PreTrainedModel:
        """Take a delta (None: all of them) off; without any left the model is bit for bit what it was."""
        self._not_mixed("detach")
        model = self.model
        going = list(self.names) if name is None else [name]
        if any(self.delta(n) is self.deltas[n] and n == self.active for n in going):
            self.use(None)
        for gone in going:
            del self.deltas[gone]
        if len(self.deltas):
            self._wire()
            return model
        for tap in self.taps.values():
            tap.remove()
        for config, implementation in self.implementations:
            config._attn_implementation = implementation
        del model._modules[NAME]
        for parameter_name, parameter in model.named_parameters():
            parameter.requires_grad_(self.flags.get(parameter_name, True))
        self.__dict__["parent"] = None
        return model

    def merge(self) -> PreTrainedModel:
        """Fold the delta in use into the weights and take everything off: a plain model with the tuned outputs.

        Error: a term that no weight can express (a prefix, an adapter, a prompt), named, and nothing is changed.
        """
        self._not_mixed("merge")
        delta = self.delta().told()
        own: dict[str, torch.Tensor] = {name: self.value(delta, name) for name in delta.owned}
        with torch.no_grad():
            own |= {name: sparse.final(self.original(name).detach()) for name, sparse in delta.masked()}
        merged = merging.merged(self.anatomy, delta, self.original, own)
        labels = delta.labels or self.base_labels
        model = self.detach()
        for name, value in merged.items():
            before = self.original(name)
            self.put(name, nn.Parameter(value.clone(), requires_grad=before.requires_grad))
        labels.give(model)
        return model

    def save(self, folder: str | Path, name: str | None = None) -> Path:
        """Write the delta in use (or the one named) to a folder: delta.json and delta.safetensors, all or nothing."""
        delta = self.delta(name).told()
        base = self.base_facts or store.base_facts(self.model, self.anatomy, self.original)
        return store.write(folder, store.facts_of(delta, base), self.tensors(delta))

    def know_base(self) -> None:
        """Keep the facts about the base that `save` writes, for they are read from the whole of it."""
        self.base_facts = store.base_facts(self.model, self.anatomy, self.original)

    def tensors(self, delta: Delta) -> dict[str, torch.Tensor]:
        """All numbers of a delta by their names in the file, on the CPU: its edits', and base.NAME for what it owns."""
        with torch.no_grad():
            found = delta.kept() | {f"base.{name}": self.value(delta, name) for name in delta.owned}
            return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in found.items()}

    def settle(self, delta: Delta) -> Delta:
        """Move a new delta's own tensors to where they act: float32, or float64 in a float64 model."""
        default = next(self.model.parameters()).device
        wide = any(p.dtype == torch.float64 for p in self.model.parameters())
        dtype = torch.float64 if wide else torch.float32
        for edit in delta.all_edits():
            edit.to(self._device(edit, default), dtype)
        for common in (*delta.shared.values(), *delta.tied.values(), *delta.partly.values(), *delta.gated.values()):
            common.to(default, dtype)
        return delta

    # -- inside

    def _set(self, state: str | tuple[str | None, ...] | None, uses: list[Use] | None = None) -> None:
        """Put nothing, a delta, or a delta for each row in use; uses: of the rows, where they are known already."""
        if self.mixed:
            mixing.end(self.rowwise)
            self.mixed, self.rowwise = (), ([], [])
        name = state if isinstance(state, str) else None
        incoming = None if name is None else self.delta(name)
        if self.active is not None:
            outgoing = self.delta()
            for owned in outgoing.owned:
                outgoing.held[slot_key(owned)] = self._slot(owned)
                self.put(owned, self.base[slot_key(owned)])
                del self.base[slot_key(owned)]
            outgoing.rest()
        self.active = name
        if incoming is not None:
            incoming.wake()
            for owned in incoming.owned:
                self.base[slot_key(owned)] = self._slot(owned)
                self.put(owned, incoming.held[slot_key(owned)])
                del incoming.held[slot_key(owned)]
        labels = self.base_labels if incoming is None or incoming.labels is None else incoming.labels
        labels.give(self.model)
        if not isinstance(state, tuple):
            uses = [] if incoming is None else [Use(incoming)]
        else:
            uses = uses or self._uses(state)
            several = [use.delta.labels or self.base_labels for use in uses]
            several += [self.base_labels] if None in state else []
            self.mixed = state
            self.rowwise = mixing.begin(self.model, uses, several if self.anatomy.head else [], len(state))
            if self.anatomy.head:
                max(several, key=lambda own: len(own.id2label)).give(self.model)
        for tap in self.taps.values():
            tap.serve(uses)

    def _uses(self, names: Sequence[str | None]) -> list[Use]:
        return mixing.uses_of(names, self._deltas(), self.anatomy.tensors, self.slots, self.original)

    def _deltas(self) -> dict[str, Delta]:
        return {name: self.delta(name) for name in self.names}

    def _not_mixed(self, what: str) -> None:
        _ = self.model  # one that was taken off says so
        if self.mixed:
            raise DeltuneError(f"{what} inside rows(): leave it first")

    def add(self, name: str, delta: Delta, labels: Labels) -> None:
        """Take a built delta in, put it in use, and see every edit fire; on failure the model is as it was."""
        self._not_mixed("attach or load")
        before = self.active
        delta.labels = labels
        delta.train(self.model.training)
        self.deltas[name] = delta
        try:
            self._wire()
            self.use(name)
            self._rehearse(delta)
        except BaseException:
            self.use(before)
            self.detach(name)
            raise

    def _wire(self) -> None:
        """A tap for every module that some delta reads or writes, and the attention function where one needs it."""
        wanted = wiring.taps_of(self.anatomy, self._deltas().values())
        for key in [k for k in self.taps if k not in wanted]:
            self.taps.pop(key).remove()
        for key, kind in wanted.items():
            if key not in self.taps:
                self.taps[key] = kind(self.model, self.anatomy, key[0])
        inside = any(isinstance(tap, AttentionPort) for tap in self.taps.values())
        for config, implementation in self.implementations:
            config._attn_implementation = extended_name(implementation) if inside else implementation

    def _rehearse(self, delta: Delta) -> None:
        """One pass on shapes: every edit must fire, or attaching fails and says which did not."""
        marks = trace(base_model(self.model)).marks if len(delta.edits) else set()
        silent = [edit.place.name for edit in delta.all_edits() if edit not in marks]
        if silent:
            raise all_problems(
                f"{delta.method!r} does not reach every place of {type(self.model).__name__}",
                [f"{place}: the module is not called as its anatomy says" for place in silent],
            )

    def _device(self, edit: Edit, default: torch.device) -> torch.device:
        path = edit.place.target.path
        module = self.model.get_submodule(path) if path else self.model
        return next((p.device for p in module.parameters()), default)

    def _slot(self, name: str) -> nn.Parameter:
        module, leaf = self.slots[name][0]
        found = module._parameters[leaf]
        assert found is not None
        return found

    def put(self, name: str, parameter: nn.Parameter) -> None:
        """Put a parameter into every slot of a (possibly tied) tensor."""
        for module, leaf in self.slots[name]:
            module._parameters[leaf] = parameter
            if leaf == "weight" and isinstance(module, nn.Linear):
                module.out_features = parameter.shape[0]
