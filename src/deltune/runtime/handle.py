"""`Tuned`: the handle of a model with deltas. It switches, combines, saves, merges and detaches them.

Edits act through hooks and the attention function. The tensors that a delta selects replace the model's own in place
while the delta is in use; the replaced ones are kept, unchanged, in `Tuned.base`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import tempfile
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..anatomy.inspection import inspect
from ..anatomy.offloading import loaded_devices
from ..anatomy.quantization import is_unquantized, quantization_of, quantized_modules
from ..anatomy.quantizers import bias_of, dequantized_weight, plain_linear, set_weight_from
from ..anatomy.skeleton import HANDLE_NAME, base_modules, base_parameters, base_tensors, modules_without_paths
from ..anatomy.tracing import CallOrder, all_configs, call_order, check_takes_embeddings
from ..anatomy.types import Anatomy, html_table, is_inside
from ..compat import attention_implementation, buffers_of, forget_quantization, parameters_of, submodules_of
from ..errors import DeltuneError, error_from_problems, excerpt, unknown_name
from ..files import user_path
from ..methods.counting import Count, base_size, count_resolved, with_storage
from ..methods.other_names import hint_for_function
from ..methods.parser import explain_arguments
from ..methods.resolve import ResolvedMethod, resolve
from ..methods.spec import Method
from . import hub, merging, serialization
from .forward_pass import PassLock, Scope, choose_here, current_scope
from .hooks import ATTRIBUTE, Hook, Hooks, hooks_of_delta, hooks_of_model, install_rank, unreached_edits
from .model_card import write_card
from .model_methods import METHODS, WHOLE_MODEL_METHODS, plain_copy
from .model_state import ModelState
from .modules import BasePlace, Delta, Edit, HeadLabels, up_projections
from .offloading import follow_offloading, leave_offloading, refuse_offloaded
from .pass_manager import PassManager, claim_modules, refuse_shared_modules, reset_after_fork
from .prompts import check_takes_prompts
from .row_assignment import RowAssignment, owning_modules
from .rows import ForwardOverride

if TYPE_CHECKING:
    from huggingface_hub import CommitInfo

T = TypeVar("T")

_THE_MODEL = ""
"""The user of hooks that are needed as long as any delta is attached; no delta has this name."""

KEPT_ASSIGNMENTS = 8
"""How many assignments of passes without gradients are kept for further passes with the same rows."""

_METHOD_NAMES = frozenset({*METHODS, *WHOLE_MODEL_METHODS})

_INSTALL_LOCK = threading.Lock()
"""Held while a handle is added to a model, since two threads may attach the first delta at the same time."""


def _after_fork() -> None:
    """Replace locks in a forked process, where the threads that may hold them do not exist."""
    global _INSTALL_LOCK
    _INSTALL_LOCK = threading.Lock()
    reset_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@dataclass(frozen=True)
class Placement:
    """Where the parameters of new deltas belong.

    Attributes:
        default: The device of the base model, or that of its first parameter where it has several.
        dtype: Their type.
        devices: Where the base model has several devices, that of each of its parameters by name.
    """

    default: torch.device
    dtype: torch.dtype
    devices: tuple[tuple[str, torch.device], ...] = ()


@dataclass(frozen=True)
class FixedBase:
    """What is known of a base model that nobody changes or moves.

    Attributes:
        placement: Where new deltas belong.
        order: Which modules a forward pass calls.
    """

    placement: Placement
    order: CallOrder


@dataclass(frozen=True)
class Attached:
    """What a pickle of a model with deltas holds beside the base model.

    Attributes:
        anatomy: The model's anatomy.
        deltas: The deltas by name, none of them in the model.
        requires_grad: Which of the base's parameters were trainable before the first delta was attached, by name.
        in_use: The name of the delta in use, or None, or inside `rows()` that of each row.
    """

    anatomy: Anatomy
    deltas: dict[str, Delta]
    requires_grad: dict[str, bool]
    in_use: str | tuple[str | None, ...] | None

    def attach_to(self, model: PreTrainedModel) -> None:
        """Attach the deltas to the model of the pickle.

        No parameter is changed, which copy.copy shares with the model that it copies.
        """
        handle = Tuned(model, self.anatomy)
        handle._initial_requires_grad = self.requires_grad
        handle._add_to_model()
        used = self.in_use if isinstance(self.in_use, tuple) else (self.in_use,)
        for name, delta in self.deltas.items():
            handle.deltas[name] = delta
            handle._update_hooks(name)
            if name in used or any(p.requires_grad for p in handle._state.parameters_of(delta)):
                handle._state.remember_trainable(delta)
        handle._choose(self.in_use)
        handle._passes.update_model(handle._passes.default_assignment, set_requires_grad=False)


class Tuned(nn.Module):
    """The handle of a model with attached deltas.

    It is the sub-module `deltune` of the model; `deltune.tuned(model)` returns it. The model itself is called and
    trained as before.

    Attributes:
        anatomy: Where the layers, projections, norms and head of the model are.
        deltas: The attached deltas by name.
        base: The model's own tensors that the delta in use replaces at the moment.
    """

    def __init__(self, model: PreTrainedModel, anatomy: Anatomy | None = None) -> None:
        super().__init__()
        self.__dict__["_model"] = model  # as an attribute it would be a sub-module
        self.anatomy: Anatomy = anatomy or inspect(model)
        self.deltas = nn.ModuleDict()
        self.base = nn.ParameterDict()
        self._base_labels = HeadLabels.from_config(model.config)
        self._base_labels.check_ids()
        self._base_metadata: dict[str, Any] | None = None
        self._fixed: FixedBase | None = None
        self._base_digest: serialization.BaseDigest | None = None
        self._initial_requires_grad = {name: p.requires_grad for name, p in base_parameters(model)}
        self._installed_hooks: dict[tuple[str, str], Hook] = {}
        self._hook_makers: Hooks = {}
        self._users_of_hooks: dict[tuple[str, str], set[str]] = {}
        self._users_of_parameters: dict[tuple[str, str], set[str]] = {}  # by (path of the module, name in it)
        lock = PassLock()
        self._state = ModelState(model, self.deltas, self.base, lock)
        self._passes = PassManager(model, self._state, lock, RowAssignment([], None, self._base_labels))
        self._passes.attention_configs = [(config, attention_implementation(config)) for config in all_configs(model)]

    def __dir__(self) -> list[str]:
        """The names that a user needs; torch's own for modules exist too."""
        return sorted(
            {
                "anatomy",
                "deltas",
                "base",
                *(name for name in vars(Tuned) if not name.startswith("_") and not hasattr(nn.Module, name)),
            }
        )

    def _add_to_model(self) -> None:
        claim_modules(modules_without_paths(self.model), self._passes)
        self.model.add_module(HANDLE_NAME, self)

    def __repr__(self) -> str:
        attached = ", ".join(f"{name}: {self.delta(name).method!r}" for name in self.names)
        return f"Tuned({attached or 'nothing'}; in use: {self.active or ', '.join(map(str, self.mixed)) or None})"

    def _repr_html_(self) -> str:
        used = {self.active, *self.mixed}
        rows = [
            (name, repr(self.delta(name).method), f"{self.count(name=name).trained:,}", "yes" if name in used else "no")
            for name in self.names
        ]
        return html_table("Attached deltas", ("delta", "method", "trainable parameters", "in use"), rows)

    def _replicate_for_data_parallel(self) -> Any:
        raise DeltuneError(
            "a model with deltas does not run under torch.nn.DataParallel, whose replicas would use the first device's "
            "tensors: use DistributedDataParallel, or merge() first"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the handle as a reference to its model."""
        model = self.__dict__["_model"]
        if model is None:
            return super().__reduce_ex__(protocol)
        return _handle_of, (model,)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the handle together with its model, while no other thread moves tensors."""
        model = self.__dict__["_model"]
        if model is not None and id(model) not in memo:
            copy.deepcopy(model, memo)
        return memo[id(self)] if id(self) in memo else plain_copy(self, memo)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise an error: call the model itself, which uses the delta in use.

        Args:
            *args: Ignored.
            **kwargs: Ignored.

        Returns:
            Nothing.

        Raises:
            DeltuneError: Always.
        """
        raise DeltuneError("the handle cannot be called: call the model itself, which uses the delta in use")

    # -- what a PeftModel would do for the whole model, and torch would do for the tensors of deltas alone

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate over the parameters of the whole model, as `model.named_parameters()` does.

        Args:
            prefix: Put before each name.
            recurse: Whether those of sub-modules come too. False: those of the handle itself, which has none.
            remove_duplicate: Whether a parameter with several names comes once.

        Returns:
            An iterator over (name, parameter).
        """
        of: nn.Module | None = self.__dict__["_model"]
        if of is None or not recurse:
            return super().named_parameters(prefix, recurse, remove_duplicate)
        return of.named_parameters(prefix, recurse, remove_duplicate)

    def train(self, mode: bool = True) -> Tuned:
        """Set the whole model to training, or with `mode=False` to evaluation, as `model.train(mode)` does.

        Args:
            mode: Whether to train.

        Returns:
            The handle itself.
        """
        of: nn.Module | None = self.__dict__["_model"]
        if of is not None and of.training != mode:
            of.train(mode)  # which calls this again, for the handle is a sub-module
        else:
            super().train(mode)
        return self

    def __getattr__(self, name: str) -> Any:
        """Of a name that a PeftModel has, say what it is called here."""
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            hint = hint_for_function(name)
            raise AttributeError(f"{error}{(hint and f'. {hint}') or ''}") from None

    # -- what is attached and in use

    @property
    def model(self) -> PreTrainedModel:
        """The model that the deltas are attached to; after `detach()` or `merge()` reading it is a `DeltuneError`."""
        model: PreTrainedModel | None = self.__dict__["_model"]
        if model is None:
            raise DeltuneError("this handle was detached or merged; attach or load returns a new one")
        return model

    @property
    def active(self) -> str | None:
        """The name of the delta that all rows use, or None; inside `rows()` and `disable()` it is None."""
        return self._passes.default_assignment.placed_delta if current_scope(self._passes) is None else None

    @property
    def mixed(self) -> tuple[str | None, ...]:
        """The delta of each row inside `rows()`; outside, an empty tuple."""
        return self._passes.assignment_of_new_pass().rows

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the attached deltas."""
        return tuple(self.deltas)

    @property
    def method(self) -> Method | None:
        """The method of the delta in use, or None."""
        return None if self.active is None else self.delta().method

    @explain_arguments
    def delta(self, name: str | None = None) -> Delta:
        """Return the module that holds the tensors of a delta.

        Args:
            name: The delta's name. Default: the delta in use.

        Returns:
            The delta.

        Raises:
            DeltuneError: No delta has this name, or none is in use.
        """
        requested = self.active if name is None else name
        if requested is None:
            raise DeltuneError(f"no delta is in use; call use(name) with one of: {', '.join(self.names)}")
        if not isinstance(requested, str) or requested not in self.deltas:
            raise DeltuneError(unknown_name("delta", requested, self.names))
        follow_offloading(self._state, every_module=False)
        delta = self.deltas[requested]
        assert isinstance(delta, Delta)
        return delta

    @explain_arguments
    def count(self, denominator: str | int = "model", name: str | None = None) -> Count:
        """Count the trainable parameters of a delta exactly.

        Args:
            denominator: What `Count.percent` is a share of: the name of a denominator, such as "model" (the default,
                all parameters of the model), or a number of parameters.
            name: The delta's name. Default: the delta in use.

        Returns:
            The counts of the method, the head, and what is saved.

        Raises:
            DeltuneError: No delta has this name or none is in use, or the denominator is unknown.
        """
        delta = self.delta(name)
        size = base_size(self.model, denominator)
        heads = sum(self._delta_value(delta, tensor).numel() for tensor in delta.head)
        counted = count_resolved(self.anatomy, delta.planned, *size, delta.head_mode, delta.folded, heads)
        return with_storage(counted, self.model)

    def trainable_parameters(self) -> Iterator[nn.Parameter]:
        """Iterate over the parameters to give to an optimizer: those that train with the delta in use.

        They include the head and the tensors of the model that the delta trains in place, and leave out the deltas
        that are not in use. Inside `rows()` they are those of every delta that is named there. (`parameters()` has all
        parameters of the model, trained or not.)

        Returns:
            An iterator over parameters; none where no delta is in use.
        """
        yield from (parameter for _, parameter in self.named_trainable_parameters())

    def named_trainable_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate over the parameters of `trainable_parameters()` with their names in the model.

        Returns:
            An iterator over (name, parameter); the names are those of `model.named_parameters()`.
        """
        used = {id(group.delta) for group in self._passes.assignment_of_new_pass().groups}
        if not used:
            return
        follow_offloading(self._state, every_module=False)
        with self._state.mutex:
            unused = [self.delta(name) for name in self.names if id(self.delta(name)) not in used]
            excluded = {id(parameter) for delta in unused for parameter in self._state.parameters_of(delta)}
            parameters = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad and id(p) not in excluded]
        yield from parameters

    def parameter_groups(self, lr: float, ratio: float = 16.0) -> list[dict[str, Any]]:
        """Return groups of parameters for an optimizer, in which LoRA's up-projections learn faster (LoRA+).

        LoRA's change of a weight is W_up W_down. Hayou et al. (2024) show that W_up, which starts at 0, should have a
        higher learning rate than W_down: ratio × lr. Everything else that is trained has lr.

        Args:
            lr: The learning rate of everything but the up-projections.
            ratio: By which their learning rate is greater. LoRA+ recommends 16.

        Returns:
            Two groups, {"params": …, "lr": …}: the up-projections, then the rest of `trainable_parameters()`.

        Raises:
            DeltuneError: `lr` or `ratio` is not a positive number, or no LoRA is trained.
        """
        for name, value in (("lr", lr), ("ratio", ratio)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
                raise DeltuneError(f"{name}={excerpt(value)}: must be a positive number")
        up = {id(p) for delta in self.deltas.children() if isinstance(delta, Delta) for p in up_projections(delta)}
        parameters = list(self.trainable_parameters())
        if not (faster := [p for p in parameters if id(p) in up]):
            raise DeltuneError(
                f"{self!r} trains no LoRA, so there is nothing to give another learning rate to: give the optimizer "
                "trainable_parameters()"
            )
        rest = [p for p in parameters if id(p) not in up]
        return [{"params": faster, "lr": ratio * lr}, {"params": rest, "lr": lr}]

    def _base_value(self, name: str) -> nn.Parameter:
        """The base model's own value of a tensor, whether a delta replaces it or not."""
        return self._state.base_value(name)

    def _dense_value(self, name: str) -> torch.Tensor:
        """The base model's own value of a tensor, in floating point where it is quantised."""
        if not self.anatomy.tensor(name).quantized:
            return self._base_value(name)
        return dequantized_weight(self.model.get_submodule(name.rpartition(".")[0])).float()

    def _place_of(self, edit: Edit) -> BasePlace | None:
        """The base model's own projection at an edit; None where there is none."""
        linear = edit.place.linear or edit.place.weight
        if linear is None:
            return None
        module = self.model.get_submodule(linear.path)
        names = {leaf: f"{linear.path}.{leaf}" for leaf in (getattr(linear, "leaf", "weight"), "bias")}
        known = {n: t.name for t in self.anatomy.tensors for n in (t.name, *t.aliases) if n in names.values()}
        weight, bias = (known.get(name) for name in names.values())
        assert weight is not None
        read_bias = partial(bias_of, module) if bias is None else partial(self._base_value, bias)
        return BasePlace(edit.place, partial(self._dense_value, weight), read_bias)

    def _delta_value(self, delta: Delta, name: str) -> nn.Parameter:
        """A delta's own value of a tensor of the model."""
        return self._state.delta_value(delta, name)

    # -- switching, mixing, removing and saving

    @explain_arguments
    def use(self, name: str | None) -> Tuned:
        """Put a delta in use for the whole model, its head and labels included.

        This holds for every thread that is not inside `rows()` or `disable()`. The call waits until no forward pass
        and no `generate` of this model runs. Which parameters of a delta are trainable is remembered while it is not
        in use. Switch between training steps, not between a forward pass and its backward pass.

        Args:
            name: The delta's name, or None for the base model.

        Returns:
            The handle itself.

        Raises:
            DeltuneError: No delta has this name, or the call is inside `rows()` or a forward pass.
        """
        with self._exclusive("use"):
            if name is not None:
                self.delta(name)
            self._state.check_slots(name)
            _run_to_completion(lambda: self._use(name))
        return self

    def _use(self, name: str | None) -> None:
        self._choose(name)
        self._passes.update_model(self._passes.assignment_of_new_pass())

    def _choose(self, in_use: str | tuple[str | None, ...] | None) -> None:
        """Let passes outside of `rows()` and `disable()` use a delta, none, or that of each row."""
        assign = self._assign_each_row(in_use) if isinstance(in_use, tuple) else self._assign_all_rows(in_use)
        self._passes.default_assignment = assign
        choose_here(self._passes)

    def _assign_all_rows(self, name: str | None, left_out: Collection[Edit] | None = None) -> RowAssignment:
        if name is None:
            return RowAssignment([], None, self._base_labels)
        delta = self.delta(name)
        return RowAssignment.of_all(name, delta, delta.labels or self._base_labels, self.anatomy, left_out)

    def _assign_each_row(
        self, names: Sequence[str | None], constant: bool = False, left_out: Collection[Edit] | None = None
    ) -> RowAssignment:
        """Make the assignment of `rows(names)`, and replace the forward of the modules whose tensors differ by row."""
        deltas: dict[str, Any] = dict(self.deltas.items())
        cache = self._passes.delta_cache
        assignment = RowAssignment.of_rows(
            names, deltas, self._base_labels, self.anatomy, self._state, cache, constant, left_out
        )
        with self._state.mutex:
            for path in assignment.tensors:
                if (path, "tensors") not in self._installed_hooks:
                    module = self.model.get_submodule(path)
                    self._install_hook((path, "tensors"), partial(ForwardOverride, self._passes, path, module))
        return assignment

    def _inference_assignment(
        self, names: tuple[str | None, ...], place: bool, left_out: frozenset[Edit] | None
    ) -> RowAssignment:
        """The assignment of `inference_rows`; the last ones are kept, since the steps of a batch have the same."""
        kept, placed = self._passes.kept_assignments, place and len(set(names)) == 1
        assignment = kept.get((names, placed, left_out))
        if assignment is None:
            if placed:
                assignment = self._assign_all_rows(names[0], left_out)
            else:
                assignment = self._assign_each_row(names, constant=True, left_out=left_out)
            while len(kept) >= KEPT_ASSIGNMENTS:
                del kept[next(iter(kept))]
            kept[names, placed, left_out] = assignment
        return assignment

    def advance(self, share: float) -> None:
        """Tell the delta in use how much of its training is done. Call it before every step.

        Only a learned mask (`sparsity`) needs it: its penalty grows during the first half of training, then its gates
        are fixed. `deltune train` calls it; a training loop of your own must call it too.

        Args:
            share: The share of the training steps that are done, from 0 to 1: `step / steps`.

        Raises:
            DeltuneError: `share` is not a number from 0 to 1, or no delta is in use.
        """
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
            raise DeltuneError(
                f"advance takes the share of the training that is done, a number from 0 to 1, not {excerpt(share)}: "
                "advance(step / steps)"
            )
        for _, gates in self.delta().all_gates():
            gates.advance(share)

    @explain_arguments
    def disable(self) -> Scope:
        """Use the base model inside a `with` block, in the thread or asyncio task that enters it.

        Returns:
            A context manager, which gives the handle.

        Raises:
            DeltuneError: The handle was detached or merged.
        """
        _ = self.model  # raises after detach() and merge()
        return Scope(self._passes, self, lambda: self._assign_all_rows(None))

    @explain_arguments
    def rows(self, names: Sequence[str | None]) -> Scope:
        """Give each row of a batch its own delta inside a `with` block, in training and in generation.

        It holds for the thread or asyncio task that enters the block; a pass in a thread that is in no block is an
        error meanwhile, unless that thread has called `use()`. Logits are as wide as the widest head, with -inf where a
        row's own head has no label; the loss of class labels is each row's own. In `generate` the prompts are the rows,
        and the beams of a prompt follow it.
        Inside, `trainable_parameters()` are those of all deltas that are named; run the backward pass there too.

        Args:
            names: For each row of the batch the name of its delta, or None for the base model.

        Returns:
            A context manager, which gives the handle.

        Raises:
            DeltuneError: No delta has one of the names, a delta trains tensors that all rows share (`full`), or it
                changes modules that do not keep the order of the rows (`Anatomy.not_by_row`). A batch of another size,
                and a backward pass outside the block, are errors too, when they run.
        """
        _ = self.model  # raises after detach() and merge()
        return Scope(self._passes, self, lambda: self._assign_each_row(names))

    @explain_arguments
    def detach(self, name: str | None = None) -> PreTrainedModel:
        """Remove one delta, or all, and return the model; with none left it has exactly the weights it had before.

        The call waits until no forward pass of this model runs.

        Args:
            name: The delta's name. Default: all deltas.

        Returns:
            The model.

        Raises:
            DeltuneError: No delta has this name, `rows()` in another thread or task uses it, or the call is inside
                `rows()` or a forward pass.
        """
        with self._exclusive("detach"):
            removed = list(self.names) if name is None else [name]
            for delta_name in removed:
                self.delta(delta_name)
            self._passes.refuse_in_scopes("detach", removed)
            if self._passes.default_assignment.placed_delta in removed:
                self._state.check_slots(None)
            model: PreTrainedModel = _run_to_completion(lambda: self._detach(removed))
            return model

    def _detach(self, names: Sequence[str]) -> Any:
        model: Any = self.__dict__["_model"]
        if model is None:
            return model  # a first attempt was interrupted after its last step
        in_use = self._passes.default_assignment
        if in_use.placed_delta in names or any(name in names for name in in_use.rows if name is not None):
            self._passes.default_assignment = self._assign_all_rows(None)
        self._passes.update_model(self._passes.default_assignment)
        for name in names:
            if name in self.deltas:
                self._passes.delta_cache.forget(self.delta(name))
                self._state.forget(self.delta(name))
                del self.deltas[name]
        for users in (*self._users_of_hooks.values(), *self._users_of_parameters.values()):
            users.difference_update(names)
        if len(self.deltas) or self._state.base_is_fixed:
            self._update_hooks()
            return model
        leave_offloading(self._state)
        self._leave_model(model)
        for parameter_name, parameter in base_parameters(model):
            parameter.requires_grad_(self._initial_requires_grad.get(parameter_name, True))
        self.__dict__["_model"] = None
        return model

    def _leave_model(self, model: PreTrainedModel) -> None:
        """Remove all hooks, and the handle from its model."""
        for hook in self._installed_hooks.values():
            hook.remove()
        self._installed_hooks.clear()
        self._passes.set_prefix_attention(False)
        submodules_of(model).pop(HANDLE_NAME, None)

    def _take_apart(self) -> Attached:
        """Make the model a bare one, and return what was attached; the handle is that of a copy and ends with it."""
        in_use = self._passes.default_assignment
        self._state.place_tensors(None)
        self._state.set_labels(self._base_labels)
        self._leave_model(self.model)
        deltas = {name: self.delta(name) for name in self.names}
        for delta in deltas.values():
            delta.saved_requires_grad = delta.trainable_when_used(self._state.parameters_by_name(delta))
            delta.freezes = 0
        return Attached(self.anatomy, deltas, self._initial_requires_grad, in_use.rows or in_use.placed_delta)

    @explain_arguments
    def merge(self, name: str | None = None, *others: str, dequantize: bool = False) -> PreTrainedModel:
        """Fold a delta into the weights and detach everything, all other deltas included.

        The merged weight of a quantised linear is quantised again, which rounds it; a warning has the error.

        Args:
            name: The delta's name. Default: the delta in use.
            others: Refused: one delta is merged at a time.
            dequantize: Put plain linears in floating point in place of all quantised ones, so that nothing is rounded.

        Returns:
            The model, which gives the tuned outputs without deltune.

        Raises:
            DeltuneError: A term of the method cannot be expressed as weights (a prefix, an adapter, a prompt); the
                message names it. Or several names are given, no delta has this name or none is in use, a weight cannot
                be quantised again, weights are offloaded, or another thread or task is inside `rows()` or `disable()`.
                Nothing is changed.
        """
        if others:
            raise DeltuneError(
                f"merge takes one name and was called with {len(others) + 1}; merging several deltas at once is not "
                "supported yet. Merge one, save the model with save_pretrained, and load each of the others on the "
                'saved model: load(model, folder, base="any")'
            )
        with self._exclusive("merge"):
            self._passes.refuse_in_scopes("merge", self.names)
            self._passes.refuse_other_scopes("merge")
            refuse_offloaded(self.model, "merge")
            delta = self.delta(name)
            delta.warn_if_never_advanced()
            values: dict[str, torch.Tensor] = {name: self._delta_value(delta, name) for name in delta.owned_tensors}
            with torch.no_grad():
                values |= {name: part.final(self._base_value(name).detach()) for name, part in delta.masked_tensors()}
            merged = merging.merged_weights(self.anatomy, delta, self._dense_value, values, self._place_of)
            labels = delta.labels or self._base_labels
            linears = self._plain_linears(merged) if dequantize else {}
            quantized = merging.quantize_merged(self._quantized_linears(), merged, self._dense_value)
            model = self.model
            _run_to_completion(lambda: self._merge(model, merged, quantized, linears, labels))
        if quantized.modules:
            warnings.warn(str(quantized), stacklevel=3)
        return model

    def _quantized_linears(self) -> dict[str, list[nn.Module]]:
        """The quantised linears of the model, by the names of their weights."""
        modules = {f"{path}.weight": module for path, module, _ in quantized_modules(self.model)}
        by_name = {t.name: [modules[n] for n in (t.name, *t.aliases) if n in modules] for t in self.anatomy.tensors}
        return {name: linears for name, linears in by_name.items() if linears}

    def _plain_linears(self, merged: dict[str, torch.Tensor]) -> dict[nn.Module, nn.Module]:
        """Plain linears for all quantised ones, with their merged weights, which are taken out of `merged`."""
        dtype = next((p.dtype for p in base_tensors(self.model) if is_unquantized(p)), torch.float32)
        linears: dict[nn.Module, nn.Module] = {}
        for name, modules in self._quantized_linears().items():
            if not self.anatomy.tensor(name).quantized:
                continue  # it is in floating point already, and quantised in each pass anew
            weight = merged.pop(name, None)
            for module in modules:
                value = dequantized_weight(module) if weight is None else weight
                linears[module] = plain_linear(module, value.to(dtype))
        return linears

    def _merge(
        self,
        model: PreTrainedModel,
        merged: dict[str, torch.Tensor],
        quantized: merging.QuantizedMerge,
        linears: dict[nn.Module, nn.Module],
        labels: HeadLabels,
    ) -> None:
        self._base_labels = labels
        if self.__dict__["_model"] is not None:
            self._state.place_tensors(None)
            for name, value in merged.items():
                self._state.set_parameter(name, nn.Parameter(value.clone()))  # detaching sets its requires_grad
            for module, source in quantized.modules.items():
                set_weight_from(module, source)
        self._detach(self.names)
        for module, linear in linears.items():
            if "bias" in parameters_of(module):
                linear.register_parameter("bias", parameters_of(module)["bias"])  # it may be a merged one
        if linears:
            _replace_modules(model, linears)

    @explain_arguments
    def save(self, folder: str | Path, name: str | None = None, *, model_card: bool = False) -> Path:
        """Write a delta to a folder, as `delta.json` and `delta.safetensors`, completely or not at all.

        Args:
            folder: A new folder, an empty one, or one that holds a delta, which is replaced.
            name: The delta's name. Default: the delta in use.
            model_card: Also write a `README.md` as the hub shows it: method, counts, base model and how to load it. If
                there is one, only the lines and the metadata that deltune writes are replaced.

        Returns:
            The folder.

        Raises:
            DeltuneError: No delta has this name or none is in use, or the folder holds other files or cannot be
                written. What was there before is kept.
        """
        title = user_path(folder, "folder").resolve().name or "delta"
        path, _ = self._write(folder, name, (title, title) if model_card else None)
        return path

    @explain_arguments
    def push_to_hub(
        self,
        repo_id: str,
        name: str | None = None,
        *,
        commit_message: str | None = None,
        commit_description: str | None = None,
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        create_pr: bool = False,
    ) -> CommitInfo:
        """Upload a delta and its model card to the Hugging Face Hub, in one commit; the base model is not uploaded.

        `deltune.load(model, repo_id)` loads it from there. The arguments are those of transformers and PEFT.

        Args:
            repo_id: The repository, OWNER/NAME, which is made if it does not exist.
            name: The delta's name. Default: the delta in use.
            commit_message: The first line of the commit's message. Default: "Upload a delta".
            commit_description: The rest of the message.
            private: Whether a new repository is private. Default: what the hub does by default.
            token: An access token. Default: the one of `hf auth login`.
            revision: The branch, which is made if it does not exist. Default: main.
            create_pr: Open a pull request in place of a commit to the branch.

        Returns:
            What huggingface_hub says about the commit, with its address and its hash (`oid`).

        Raises:
            DeltuneError: As `save`; or the hub refuses or cannot be reached, `HF_HUB_OFFLINE` is set, or `private` is
                True and the repository is public.
        """
        commit = hub.Commit(commit_message or "Upload a delta", commit_description, revision, create_pr)
        if not isinstance(repo_id, str):
            raise DeltuneError(f"repo_id must be OWNER/NAME, not {excerpt(repo_id)}")
        with tempfile.TemporaryDirectory() as folder:
            path, card = self._write(Path(folder) / "delta", name, (repo_id.rpartition("/")[2], repo_id))
            assert card is not None
            return hub.push_delta(path, card, repo_id, commit, private=private, token=token)

    def _write(
        self, folder: str | Path, name: str | None, card: tuple[str, str] | None = None
    ) -> tuple[Path, str | None]:
        """Write a delta, with a model card of a title and a folder to load from; return the folder and the card."""
        follow_offloading(self._state)
        with self._state.mutex:
            delta = self.delta(name)
            delta.warn_if_never_advanced()
            base = self._base_metadata or self._metadata_of_base(delta)
            metadata, tensors = serialization.delta_metadata(delta, base), self._tensors_to_save(delta)
        text = None
        if card is not None:
            title, source = card
            text = write_card(title, metadata, self.count(name=name), source)
        return serialization.write_delta(folder, metadata, tensors, text), text

    def _base_compared(self, tokens: int | None) -> dict[str, Any]:
        """The facts about the base model, of so many of its token embeddings, to compare a saved delta with."""
        remembered = self._base_metadata
        if remembered is not None:
            every = (None, remembered["tokens"])
            if tokens in every and remembered["compared_tokens"] in every:
                return remembered
        return self._read_base(tokens)

    def _metadata_of_base(self, delta: Delta | None) -> dict[str, Any]:
        return self._read_base(None if delta is None else serialization.tokens_of_base(self.anatomy, delta))

    def _read_base(self, tokens: int | None) -> dict[str, Any]:
        digest = self._base_digest
        if digest is None or digest.tokens != tokens:
            digest = self._base_digest = serialization.BaseDigest(self.anatomy, tokens)
        return serialization.base_metadata(
            self.model, self.anatomy, digest, self._state.base_values, quantization_of(self.model)
        )

    def _tensors_to_save(self, delta: Delta) -> dict[str, torch.Tensor]:
        """All tensors of a delta on the CPU, by their names in the file; "base.NAME" are its values of the model's."""
        with torch.no_grad():
            values = {f"base.{name}": self._delta_value(delta, name) for name in delta.owned_tensors}
            tensors = delta.tensors_to_save() | values
            return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}

    # -- attaching

    def _resolve(self, method: Method) -> ResolvedMethod:
        """Resolve a method on this model."""
        return resolve(self.anatomy, method, lambda: base_size(self.model)[1])

    def _move_to_model(self, delta: Delta) -> Delta:
        """Move a new delta to the devices of the modules it acts at, in float32, or float64 in a float64 model."""
        placement = self._placement() if self._fixed is None else self._fixed.placement
        default, dtype = placement.default, placement.dtype
        for edit in delta.all_edits():
            inside = (device for name, device in placement.devices if is_inside(name, edit.place.target.path))
            _move(edit, next(inside, default), dtype)
        for shared in (*delta.common.values(), *delta.partly.values(), *delta.gated.values()):
            _move(shared, default, dtype)
        return delta

    def _placement(self) -> Placement:
        """Where new deltas belong as the base model is now."""
        tensors = list(base_tensors(self.model))
        dtype = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
        default = tensors[0].device
        if not self._state.offloaded and all(t.device == default for t in tensors):
            return Placement(default, dtype)
        devices = [(name, device) for name, _, device in loaded_devices(self.model, self._state.offloaded)]
        return Placement(devices[0][1], dtype, tuple(devices))

    @contextlib.contextmanager
    def _exclusive(self, operation: str) -> Iterator[None]:
        _ = self.model  # raises after detach() and merge()
        with torch.inference_mode(False), self._passes.exclusive(operation):  # new parameters must be trainable later
            yield

    def _add_delta(self, name: str, delta: Delta, labels: HeadLabels, use: bool = True) -> None:
        """Register a delta under a name and put it in use; if anything fails, the model is as it was.

        Whether a forward pass reaches all of its edits is checked first, on a copy of the model's structure.
        """
        self._check_reached(delta)
        with self._exclusive("attach or load"):
            self._passes.modules.check()
            previous = self._passes.default_assignment
            delta.labels = labels
            delta.attached_parameters = self._state.parameters_by_name(delta)
            if delta.training != self.model.training:
                delta.train(self.model.training)
            if name in self.deltas:
                raise DeltuneError(f"a delta named {name!r} is already attached; detach it or choose another name")
            self._state.check_slots(None)
            has_other_handle = False
            try:
                with _INSTALL_LOCK:
                    has_other_handle = submodules_of(self.model).get(HANDLE_NAME) not in (None, self)
                    if HANDLE_NAME not in submodules_of(self.model):
                        refuse_shared_modules(self.model)  # again, as another thread may have attached to one of them
                        self.model.requires_grad_(False)
                        self._add_to_model()
                if has_other_handle:
                    raise DeltuneError("another thread has attached to this model in the meantime; call attach again")
                self.deltas[name] = delta
                self._update_hooks(name)
                if use:
                    self._use(name)
                else:
                    delta.freeze(self._state.parameters_by_name(delta))
            except BaseException:
                self._passes.default_assignment = previous
                if not has_other_handle:
                    self._detach([name])
                raise

    def _update_hooks(self, added: str | None = None) -> None:
        """Install the hooks that an added delta needs, and remove those that no attached delta needs any more.

        What it takes depends on this delta and on the model, and not on how many others are attached.
        """
        self._passes.kept_assignments.clear()  # the hooks that they need may go
        if added is not None:
            self._add_users(added)
        in_scopes = {(path, "tensors") for path in self._passes.overridden_modules()}
        needed = {key for key, names in self._users_of_hooks.items() if names}
        missing = needed - self._installed_hooks.keys()
        first_rank = min((rank for key in missing if (rank := install_rank(key))), default=None)
        for key in list(self._installed_hooks):
            runs_too_early = first_rank is not None and install_rank(key) > first_rank
            if runs_too_early or (key not in needed and key not in in_scopes):
                self._installed_hooks[key].remove()
                del self._installed_hooks[key]
        for key in sorted(needed - self._installed_hooks.keys(), key=install_rank):
            self._install_hook(key, self._hook_makers[key])
        parameters = {place for place, names in self._users_of_parameters.items() if names}
        paths = {path for path, side in (needed | in_scopes) if side not in _METHOD_NAMES and side != ATTRIBUTE}
        self._passes.modules.keep(paths | {path for path, _ in parameters}, parameters)
        self._passes.set_prefix_attention(any(side == "attention" for _, side in self._installed_hooks))

    def _add_users(self, added: str) -> None:
        """Remember which hooks a delta needs and which parameters it has values for, and how the hooks are made."""
        delta = self.delta(added)
        makers = hooks_of_delta(self._passes, self.anatomy, delta)
        users = dict.fromkeys(makers, added)
        if _THE_MODEL not in self._users_of_hooks.get(("", "pass"), ()):
            of_model = hooks_of_model(self._passes, self.anatomy)
            makers, users = makers | of_model, users | dict.fromkeys(of_model, _THE_MODEL)
        self._hook_makers |= makers
        for key, user in users.items():
            self._users_of_hooks.setdefault(key, set()).add(user)
        for tensor, _ in delta.weight_edits():
            path, _, leaf = tensor.rpartition(".")
            self._users_of_parameters.setdefault((path, leaf), set()).add(added)
        for tensor in (*delta.owned_tensors, *(tensor for tensor, _ in delta.masked_tensors())):
            for place in owning_modules(self.anatomy, tensor):
                self._users_of_parameters.setdefault(place, set()).add(added)

    def _install_hook(self, key: tuple[str, str], make_hook: Callable[[], Hook]) -> None:
        if key in self._installed_hooks:
            return
        hook = make_hook()
        try:
            hook.install()
            self._installed_hooks[key] = hook
        except BaseException:
            hook.remove()
            self._installed_hooks.pop(key, None)
            raise

    def _check_reached(self, delta: Delta) -> None:
        """Check on the model's structure that a forward pass reaches every edit of a delta."""
        for edit in delta.all_edits():
            if edit.place.target.side == "tokens":
                check_takes_embeddings(self.model, edit.place.widths.out_width)
                check_takes_prompts(self.model, self.anatomy)
        order = None
        if len(delta.edits):
            order = call_order(self.model) if self._fixed is None else self._fixed.order
        for part in self.anatomy.other_towers if order else ():
            if any(edit.place.target.path.startswith(f"{part.tower_path}.") for edit in delta.all_edits()):
                tower = self.model.get_submodule(part.tower_path)
                assert order is not None and isinstance(tower, PreTrainedModel)
                order = order.including(call_order(tower), part.tower_path)
        unreached = unreached_edits(order, delta) if order else []
        vocabulary = self.anatomy.vocabulary  # the base model's pass does not call it, and the model's own does
        outside = {e.place.name for e in delta.all_edits() if vocabulary and e.place.target.path == vocabulary.path}
        outside |= {
            e.place.name for e in delta.all_edits() if e.place.tower == "projector"
        }  # a pass on one input skips it
        if unreached := [name for name in unreached if name not in outside]:
            raise error_from_problems(
                f"{delta.method!r} cannot be attached to {type(self.model).__name__}: its forward pass does not call "
                "every module that the method changes",
                [
                    f"{place}: the forward pass does not call this module as the model's structure says"
                    for place in unreached
                ],
            )


def _move(module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Move a module, unless its parameters are all that it has, and are there."""
    parameters = [*parameters_of(module).values(), *buffers_of(module).values()]
    if submodules_of(module) or any(p is not None and (p.device != device or p.dtype != dtype) for p in parameters):
        module.to(device, dtype)


def _replace_modules(model: PreTrainedModel, modules: dict[nn.Module, nn.Module]) -> None:
    """Put modules in floating point in place of all quantised ones; the model is no longer a quantised one."""
    for _, parent in base_modules(model):
        children = submodules_of(parent)
        children.update({leaf: modules[child] for leaf, child in list(children.items()) if child in modules})
    forget_quantization(model)


def base_value(tuned: Tuned, name: str) -> nn.Parameter:
    """Return the base model's own value of a tensor, whether the delta in use replaces it or not."""
    return tuned._base_value(name)


def base_parameter(tuned: Tuned, module: nn.Module, leaf: str) -> nn.Parameter | None:
    """Return the base model's own parameter of a module, while other threads may run passes with any delta."""
    return tuned._state.base_parameter(module, leaf)


def base_config(tuned: Tuned) -> PreTrainedConfig:
    """Return a copy of a model's configuration with the base model's labels, whatever delta is in use."""
    with tuned._state.mutex:  # in which passes write the labels of their deltas
        config = copy.deepcopy(tuned.model.config)
    tuned._base_labels.write_to(config)
    return config


def base_labels(tuned: Tuned) -> HeadLabels:
    """Return the labels of the base model, whatever delta is in use."""
    return tuned._base_labels


def new_delta(tuned: Tuned, method: Method) -> Delta:
    """Return a delta for a model, with a frozen head and without values; it is on the model's device, not attached."""
    return tuned._move_to_model(Delta(method, tuned._resolve(method), (), "freeze"))


def inference_rows(
    tuned: Tuned, names: Sequence[str | None], place: bool = True, left_out: frozenset[Edit] | None = None
) -> Scope:
    """Do as `Tuned.rows` does, for passes without gradients: nothing is made trainable, which takes less time.

    No tensor of a delta may change as long as it is attached: what is stacked by row is kept for further passes. Where
    all names are the same, the delta's tensors are put into the model for the block, which also serves deltas
    that `rows` refuses because they train what all rows share.
    """
    return Scope(
        tuned._passes,
        tuned,
        lambda: tuned._inference_assignment(tuple(names), place, left_out),
        set_requires_grad=False,
    )


def shares_rows(tuned: Tuned, name: str) -> bool:
    """Return whether some rows of a batch can use a delta while others do not, as `Tuned.rows` needs it."""
    with tuned._state.mutex:
        facts = tuned._passes.delta_cache.of(tuned.delta(name), tuned.anatomy, tuned._state)
    return not facts.shared and not facts.not_by_row


def _of_whole_model(name: str) -> Callable[..., Tuned]:
    """Return a method of a handle that does to the whole model what torch's method of this name does."""

    @functools.wraps(getattr(nn.Module, name))
    def method(self: Tuned, *args: Any, **kwargs: Any) -> Tuned:
        getattr(self.model, name)(*args, **kwargs)
        return self

    return method


for _name in ("to", "cuda", "cpu", "half", "float", "double", "bfloat16"):
    setattr(Tuned, _name, _of_whole_model(_name))


def fix_base(tuned: Tuned) -> None:
    """Declare that nobody changes, moves or offloads the base model until `release_base`, as a server does.

    Loading, attaching and detaching then take less time: besides what `remember_base_metadata` does, nothing looks for
    the devices and the type of the base's weights any more, or for weights that accelerate offloads by now. The handle
    stays when its last delta is detached.
    """
    remember_base_metadata(tuned)
    tuned._fixed = FixedBase(tuned._placement(), call_order(tuned.model))
    tuned._state.base_is_fixed = True


def release_base(tuned: Tuned) -> None:
    """Undo `fix_base`: the base model may change again, and `detach()` of the last delta removes the handle."""
    tuned._state.base_is_fixed, tuned._fixed, tuned._base_metadata = False, None, None


def remember_base_metadata(tuned: Tuned) -> None:
    """Compute the facts about the base model that `Tuned.save` writes, for all later calls.

    It reads a sample of every weight, so it must be called before the weights are sharded over processes.
    """
    tuned._base_metadata = tuned._metadata_of_base(tuned.delta() if tuned.active is not None else None)


def _handle_of(model: PreTrainedModel) -> nn.Module | None:
    return submodules_of(model)[HANDLE_NAME]


def _run_to_completion(change: Callable[[], T]) -> T:
    """Run a change whose steps may be repeated; if it is interrupted, finish it before the exception goes on."""
    try:
        return change()
    except BaseException:
        change()
        raise
