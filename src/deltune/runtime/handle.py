"""The handle on a tuned model: use, disable, detach, merge, save. The model stays itself.

Edits work through hooks and the one attention function; selected tensors stand in the model's own slots while their
delta is in use, and what they displace is kept, untouched, in the tuned object.
"""

from __future__ import annotations

import contextlib
import copy
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from ..anatomy.inspection import inspect
from ..anatomy.quantization import check_not_quantized
from ..anatomy.skeleton import HANDLE_NAME
from ..anatomy.tracing import all_configs, trace_forward
from ..anatomy.types import Anatomy
from ..errors import DeltuneError, error_from_problems, excerpt, unknown_name
from ..methods.counting import Count, base_size, count_resolved
from ..methods.spec import Method
from . import merging, serialization
from .forward_pass import PassLock, Scope, current_scope, forget_closed
from .hooks import Hook, required_hooks, unreached_edits
from .model_methods import METHODS, WHOLE_MODEL_METHODS, plain_copy
from .model_state import ModelState
from .modules import Delta, Edit, HeadLabels
from .pass_manager import AttachedModules, PassManager, check_not_offloaded
from .row_assignment import RowAssignment, owning_modules
from .tensor_overrides import ForwardOverride

T = TypeVar("T")

_INSTALLING = threading.Lock()
"""Held while a model gets its handle: two threads may attach the first delta at once."""


def _after_fork() -> None:
    """Replace the lock in a new process, which does not have the thread that may hold it."""
    global _INSTALLING
    _INSTALLING = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


NAME = HANDLE_NAME
"""The handle's name in the model, and so the prefix of every key it adds to the state dict."""


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
        self.base_labels = HeadLabels.of(model.config)
        self.base_facts: dict[str, Any] | None = None
        self.flags = {name: p.requires_grad for name, p in model.named_parameters()}
        self.taps: dict[tuple[str, str], Hook] = {}
        lock = PassLock()
        self.state = ModelState(model, self.deltas, self.base, lock)
        self.passes = PassManager(model, self.state, lock, RowAssignment([], None, self.base_labels))
        self.passes.attentions = [(config, config._attn_implementation) for config in all_configs(model)]

    def _install(self) -> None:
        """Become a part of the model."""
        self.model.requires_grad_(False)
        self.model.add_module(NAME, self)

    def __repr__(self) -> str:
        attached = ", ".join(f"{name}: {self.delta(name).method!r}" for name in self.names)
        return f"Tuned({attached or 'nothing'}; in use: {self.active or ', '.join(map(str, self.mixed)) or None})"

    def _replicate_for_data_parallel(self) -> Any:
        raise DeltuneError(
            "a model with deltas does not run under torch.nn.DataParallel, whose replicas would use the first device's "
            "tensors: use DistributedDataParallel, or merge() first"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the handle as that of its model, of which a steady copy is pickled."""
        model = self.__dict__["parent"]
        if model is None or self.passes.is_pickled:
            return super().__reduce_ex__(protocol)
        return _handle_of, (model,)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the handle together with its model, which copies it while no tensor moves."""
        model = self.__dict__["parent"]
        if model is not None and id(model) not in memo:
            copy.deepcopy(model, memo)
        return memo[id(self)] if id(self) in memo else plain_copy(self, memo)

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
    def active(self) -> str | None:
        """Name of the delta that all rows use here, or None: inside of rows() and disable() there is none."""
        return self.passes.in_use.standing if current_scope(self.passes) is None else None

    @property
    def mixed(self) -> tuple[str | None, ...]:
        """Inside of rows(), the delta of every row."""
        return self.passes.assigned().rows

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
        if not isinstance(wanted, str) or wanted not in self.deltas:
            raise DeltuneError(unknown_name("delta", wanted, self.names))
        found = self.deltas[wanted]
        assert isinstance(found, Delta)
        return found

    def count(self, denominator: str | int = "model", name: str | None = None) -> Count:
        """The exact count of the delta in use (or of the one named)."""
        delta = self.delta(name)
        size = base_size(self.model, denominator)
        heads = sum(self.value(delta, tensor).numel() for tensor in delta.head)
        return count_resolved(self.anatomy, delta.planned, *size, delta.head_mode, delta.folded, heads)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Trained parameters of the delta in use, for an optimiser: head and tensors tuned in place included, those of
        the deltas that wait not. `recurse` (torch's) is not looked at."""
        yield from (p for _, p in self.trained())

    def trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Trained parameters of what is in use here, with their names in the model."""
        used = {id(use.delta) for use in self.passes.assigned().uses}
        if not used:
            return
        with self.state.mutex:
            others = [self.delta(name) for name in self.names if id(self.delta(name)) not in used]
            hidden = {id(parameter) for delta in others for parameter in self.state.parameters_of(delta)}
            yield from [(n, p) for n, p in self.model.named_parameters() if p.requires_grad and id(p) not in hidden]

    def original(self, name: str) -> nn.Parameter:
        """The base model's own value of a tensor, whether displaced or in its slot."""
        return self.state.original(name)

    def value(self, delta: Delta, name: str) -> nn.Parameter:
        """A delta's own value of a tensor that it owns."""
        return self.state.value(delta, name)

    # -- the life cycle

    def use(self, name: str | None) -> Tuned:
        """Put a delta in use for the whole model, its head and labels included; None: the base model.

        It holds for every thread that is not inside of `rows()` or `disable()`, and waits until no pass and no
        `generate` of this model runs. Which of a delta's parameters train is remembered. Switch between steps, not
        between a forward pass and its backward pass.

        Raises:
            DeltuneError: an unknown name; inside of rows() or of a forward pass.
        """
        with self._changing("use"):
            if name is not None:
                self.delta(name)
            _complete(lambda: self._use(name))
        return self

    def _use(self, name: str | None) -> None:
        self.passes.in_use = self._assignment_of_all(name)
        forget_closed(self.passes)
        self.passes.settle(self.passes.assigned())

    def _assignment_of_all(self, name: str | None) -> RowAssignment:
        if name is None:
            return RowAssignment([], None, self.base_labels)
        delta = self.delta(name)
        return RowAssignment.of_all(name, delta, delta.labels or self.base_labels, self.anatomy)

    def _assignment_of_rows(self, names: Sequence[str | None]) -> RowAssignment:
        """One for rows(), and in every module whose tensors differ by row what runs it with those."""
        deltas = {name: self.delta(name) for name in self.names}
        assignment = RowAssignment.of_rows(names, deltas, self.base_labels, self.anatomy, self.state)
        with self.state.mutex:
            for path in assignment.tensors:
                module = self.model.get_submodule(path)
                self._install_tap((path, "tensors"), partial(ForwardOverride, self.passes, path, module))
        return assignment

    def advance(self, share: float) -> None:
        """Tell the delta in use which share of its training is done (0 to 1), before every step.

        Only a learned mask (`sparsity`) minds: up to a half its penalty grows, then its gates are fixed. `deltune
        train` calls it; a loop of your own must.

        Raises:
            DeltuneError: the share is no number from 0 to 1.
        """
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
            raise DeltuneError(
                f"advance takes the share of the training that is done, a number from 0 to 1, not {excerpt(share)}: "
                "advance(step / steps)"
            )
        for _, gates in self.delta().all_gates():
            gates.advance(share)

    def disable(self) -> Scope:
        """The base model, inside the `with` block and for the thread or asyncio task that entered it."""
        _ = self.model  # one that was taken off says so
        return Scope(self.passes, self, lambda: self._assignment_of_all(None))

    def rows(self, names: Sequence[str | None]) -> Scope:
        """Inside the `with` block, row i of a batch uses the delta names[i], or none; all of them can be trained.

        It holds for the thread or asyncio task that entered it; a thread that is started inside of it begins with the
        delta in use. Logits are as wide as the widest head that is used, -inf where a row's own head has no label; the
        loss of class labels is then each row's own. In `generate` rows may be repeated one after the other (beams).
        Inside, `parameters()` are those of all that are named; do the backward pass there too.

        Raises:
            DeltuneError: an unknown name, a delta that trains tensors that all rows share (`full`), a batch of another
                size, a backward pass outside.
        """
        _ = self.model  # one that was taken off says so
        return Scope(self.passes, self, lambda: self._assignment_of_rows(names))

    def detach(self, name: str | None = None) -> PreTrainedModel:
        """Take a delta (None: all of them) off; without any left the model is bit for bit what it was.

        It waits until no pass of this model runs.

        Raises:
            DeltuneError: an unknown name, or a delta that rows() names in another thread or task.
        """
        with self._changing("detach"):
            going = list(self.names) if name is None else [name]
            for one in going:
                self.delta(one)
            self.passes.refuse_in_scopes("detach", going)
            model: PreTrainedModel = _complete(lambda: self._detach(going))
            return model

    def _detach(self, going: Sequence[str]) -> Any:
        model: Any = self.__dict__["parent"]
        if model is None:
            return model  # it was interrupted after its last step
        if self.passes.in_use.standing in going:
            self.passes.in_use = self._assignment_of_all(None)
        self.passes.settle(self.passes.in_use)
        for gone in going:
            if gone in self.deltas:
                del self.deltas[gone]
        if len(self.deltas):
            self._wire()
            return model
        for tap in self.taps.values():
            tap.remove()
        self.taps.clear()
        self.passes.wire_attention(False)
        model._modules.pop(NAME, None)
        for parameter_name, parameter in model.named_parameters():
            parameter.requires_grad_(self.flags.get(parameter_name, True))
        self.__dict__["parent"] = None
        return model

    def merge(self) -> PreTrainedModel:
        """Fold the delta in use into the weights and take everything off: a plain model with the tuned outputs.

        Error: a term that no weight can express (a prefix, an adapter, a prompt), named, and nothing is changed.
        """
        with self._changing("merge"):
            self.passes.refuse_in_scopes("merge", self.names)
            self.passes.refuse_other_scopes("merge")
            check_not_quantized(self.model)
            delta = self.delta().told()
            own: dict[str, torch.Tensor] = {name: self.value(delta, name) for name in delta.owned}
            with torch.no_grad():
                own |= {name: sparse.final(self.original(name).detach()) for name, sparse in delta.masked()}
            merged = merging.merged_weights(self.anatomy, delta, self.original, own)
            labels = delta.labels or self.base_labels
            return _complete(lambda: self._merge(merged, labels))

    def _merge(self, merged: dict[str, torch.Tensor], labels: HeadLabels) -> PreTrainedModel:
        self.base_labels = labels
        if self.__dict__["parent"] is not None:
            self.state.stand(None)
            for name, value in merged.items():
                self.state.put(name, nn.Parameter(value.clone()))  # detaching restores its flag
        model: PreTrainedModel = self._detach(self.names)
        return model

    def save(self, folder: str | Path, name: str | None = None) -> Path:
        """Write the delta in use (or the one named) to a folder: delta.json and delta.safetensors, all or nothing."""
        check_not_offloaded(self.model)
        with self.state.mutex:
            delta = self.delta(name).told()
            base = self.base_facts or serialization.base_metadata(self.model, self.anatomy, self.original)
            facts, tensors = serialization.delta_metadata(delta, base), self.tensors(delta)
        return serialization.write_delta(folder, facts, tensors)

    def know_base(self) -> None:
        """Keep the facts about the base that `save` writes, for they are read from the whole of it."""
        self.base_facts = serialization.base_metadata(self.model, self.anatomy, self.original)

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

    @contextlib.contextmanager
    def _changing(self, what: str) -> Iterator[None]:
        _ = self.model  # one that was taken off says so
        with torch.inference_mode(False), self.passes.changing(what):  # what changes can be trained later
            yield

    def add(self, name: str, delta: Delta, labels: HeadLabels) -> None:
        """Take a built delta in, and put it in use; on failure the model is as it was.

        That every edit takes part in a pass is seen before, on a copy of the model's structure.
        """
        self._rehearse(delta)
        with self._changing("attach or load"):
            before = self.passes.in_use
            delta.labels = labels
            delta.train(self.model.training)
            if name in self.deltas:
                raise DeltuneError(f"a delta named {name!r} is attached already; detach it or choose another name")
            taken = False
            try:
                with _INSTALLING:
                    taken = self.model._modules.get(NAME) not in (None, self)
                    if NAME not in self.model._modules:
                        self._install()
                if taken:
                    raise DeltuneError("another thread has attached to this model meanwhile; call it again")
                self.deltas[name] = delta
                self._wire()
                self._use(name)
            except BaseException:
                self.passes.in_use = before
                if not taken:
                    self._detach([name])
                raise

    def _wire(self) -> None:
        """A tap for every module that some delta reads or writes, and the attention function where one needs it."""
        needed = required_hooks(self.passes, self.anatomy, [self.delta(name) for name in self.names])
        kept = needed.keys() | {(path, "tensors") for path in self.passes.own_tensors()}
        for key in [key for key in self.taps if key not in kept]:
            self.taps[key].remove()
            del self.taps[key]
        for key, make in needed.items():
            self._install_tap(key, make)
        owned = {owned for name in self.names for owned in self.delta(name).owned}
        held = {path for tensor in owned for path, _ in owning_modules(self.anatomy, tensor)}
        hooked = {path for path, side in self.taps if side not in {*METHODS, *WHOLE_MODEL_METHODS}}
        self.passes.modules = AttachedModules(self.model, hooked | held)
        self.passes.wire_attention(any(side == "attention" for _, side in self.taps))

    def _install_tap(self, key: tuple[str, str], make: Callable[[], Hook]) -> None:
        if key in self.taps:
            return
        tap = make()
        try:
            tap.install()
            self.taps[key] = tap
        except BaseException:
            tap.remove()
            self.taps.pop(key, None)
            raise

    def _rehearse(self, delta: Delta) -> None:
        """Check on the structure alone that a pass reaches every place of a delta."""
        if silent := unreached_edits(trace_forward(self.model), delta) if len(delta.edits) else []:
            raise error_from_problems(
                f"{delta.method!r} does not reach every place of {type(self.model).__name__}",
                [f"{place}: the module is not called as its anatomy says" for place in silent],
            )

    def _device(self, edit: Edit, default: torch.device) -> torch.device:
        path = edit.place.target.path
        module = self.model.get_submodule(path) if path else self.model
        return next((p.device for p in module.parameters()), default)


def _handle_of(model: PreTrainedModel) -> nn.Module | None:
    return model._modules[NAME]


def _complete(change: Callable[[], T]) -> T:
    """Make a change whose steps may be repeated: where it is interrupted, it is completed first."""
    try:
        return change()
    except BaseException:
        change()
        raise
