"""What is attached to one model: its deltas, which of them is in use, and the hooks through which they act.

Edits act through hooks and the attention function. The tensors that a delta selects replace the model's own in place
while the delta is in use; the replaced ones are kept, unchanged, in `base`.
"""

from __future__ import annotations

import contextlib
import copy
import os
import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..anatomy.offloading import loaded_devices
from ..anatomy.quantization import quantization_of
from ..anatomy.quantizers import bias_of, dequantized_weight
from ..anatomy.skeleton import HANDLE_NAME, base_parameters, base_tensors
from ..anatomy.tracing import CallOrder, all_configs, call_order, check_takes_embeddings
from ..anatomy.types import Anatomy, is_inside
from ..compat import attention_implementation, buffers_of, parameters_of, submodules_of
from ..errors import DeltuneError, error_from_problems, excerpt, unknown_name
from ..methods.counting import base_size
from ..methods.resolve import ResolvedMethod, resolve
from ..methods.sites import Location
from ..methods.spec import Method
from . import merging, serialization
from .hooks import (
    ATTRIBUTE,
    ForwardOverride,
    Hook,
    Hooks,
    hooks_of_delta,
    hooks_of_model,
    install_rank,
    unreached_edits,
)
from .model_methods import METHODS, WHOLE_MODEL_METHODS
from .model_state import ModelState, claim_modules, refuse_shared_modules
from .modules import BasePlace, Delta, Edit, HeadLabels
from .offloading import follow_offloading, leave_offloading, refuse_offloaded
from .pass_manager import PassManager, Scope, choose_here, current_scope, reset_after_fork, retry_if_interrupted
from .pooling import without_pooler
from .prompts import check_takes_prompts
from .row_assignment import Names, RowAssignment, Use, checked_names, each_name, head_of, owning_modules
from .sharding import reshard, unsharded_deltas

_THE_MODEL = ""
"""Owner key for hooks that all deltas share; no delta has this name."""

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
class ParameterPlacement:
    """The device and dtype of the parameters of new deltas."""

    default: torch.device  # the device of the base model, or of its first parameter where it has several
    dtype: torch.dtype  # their type
    # where the base model has several devices, the device of each of its parameters by name
    devices: tuple[tuple[str, torch.device], ...] = ()


@dataclass(frozen=True)
class PickledDeltas:
    """What a pickle of a model with deltas holds beside the base model."""

    handle_class: Callable[[PreTrainedModel, Anatomy], Any]  # the class of the handle
    anatomy: Anatomy  # the model's anatomy
    deltas: dict[str, Delta]  # the deltas by name, none of them in the model
    # which of the base's parameters were trainable before the first delta was attached, by name
    requires_grad: dict[str, bool]
    in_use: Use  # what is in use

    def attach_to(self, model: PreTrainedModel) -> None:
        """Attach the deltas to the model of the pickle.

        No parameter is changed, which copy.copy shares with the model that it copies.
        """
        attached: Attached = self.handle_class(model, self.anatomy).attached
        attached.put_back(self)


class InstalledHooks:
    """The hooks that the attached deltas need, each with the names of the deltas that need it."""

    def __init__(self, passes: PassManager) -> None:
        self.passes = passes
        self.installed: dict[tuple[str, str], Hook] = {}
        self._of: dict[str, tuple[Hooks, set[tuple[str, str]]]] = {}
        """By delta, the makers of its hooks, and the modules and names of the parameters that it needs there."""

    def add(self, name: str, delta: Delta) -> None:
        """Install the hooks that a delta needs."""
        if _THE_MODEL not in self._of:
            self._of[_THE_MODEL] = hooks_of_model(self.passes), set()
        anatomy = self.passes.anatomy
        tensors = (*delta.owned_tensor_names, *(tensor for tensor, _ in delta.masked_tensors()))
        places = {place for tensor in tensors for place in owning_modules(anatomy, tensor)}
        edited = {(path, leaf) for path, _, leaf in (tensor.rpartition(".") for tensor, _ in delta.weight_edits())}
        self._of[name] = hooks_of_delta(self.passes, delta), places | edited
        self.update()

    def forget(self, names: Collection[str]) -> None:
        """Note that some deltas need no hooks any more."""
        for name in names:
            self._of.pop(name, None)

    def update(self) -> None:
        """Install the hooks that are missing, and remove the unused ones.

        Hooks of one module run in the order in which they were installed, so those that run after a new one are
        installed anew.
        """
        self.passes.kept_assignments.clear()  # the hooks that they need may go
        in_scopes = {(path, "tensors") for path in self.passes.overridden_modules()}
        needed = {key: make for makers, _ in self._of.values() for key, make in makers.items()}
        ranks_of_new = [install_rank(key) for key in needed.keys() - self.installed.keys()]
        lowest = min((rank for rank in ranks_of_new if rank), default=None)
        for key in list(self.installed):
            runs_later = lowest is not None and install_rank(key) > lowest
            if runs_later or (key not in needed and key not in in_scopes):
                self.installed[key].remove()
                del self.installed[key]
        for key in sorted(needed.keys() - self.installed.keys(), key=install_rank):
            self.install(key, needed[key])
        parameters = {place for _, places in self._of.values() for place in places}
        paths = {path for path, side in (needed.keys() | in_scopes) if side not in _METHOD_NAMES and side != ATTRIBUTE}
        self.passes.modules.keep(paths | {path for path, _ in parameters}, parameters)
        self.passes.set_prefix_attention(any(side == "attention" for _, side in self.installed))

    def install(self, key: tuple[str, str], make_hook: Callable[[], Hook]) -> None:
        """Install a hook, unless it is there."""
        if key in self.installed:
            return
        hook = make_hook()
        try:
            hook.install()
            self.installed[key] = hook
        except BaseException:
            hook.remove()
            self.installed.pop(key, None)
            raise

    def remove_all(self) -> None:
        for hook in self.installed.values():
            hook.remove()
        self.installed.clear()
        self.passes.set_prefix_attention(False)


class Attached:
    """The deltas of one model, and everything that attaching has put into it.

    Attributes:
        handle: The sub-module of the model that holds the deltas, a `Tuned`.
        deltas: The attached deltas by name.
    """

    def __init__(
        self, handle: nn.Module, model: PreTrainedModel, anatomy: Anatomy, deltas: nn.ModuleDict, base: nn.ParameterDict
    ) -> None:
        self.handle, self.anatomy, self.deltas = handle, anatomy, deltas
        self.live_model: PreTrainedModel | None = model  # the model; None after everything was detached
        # the labels of the base model, whatever delta is in use
        self.base_labels = HeadLabels.from_config(model.config)
        self.base_labels.check_ids()
        self._base_metadata: dict[str, Any] | None = None
        self._fixed: tuple[ParameterPlacement, CallOrder] | None = (
            None  # where new deltas belong, and what a pass calls
        )
        self._initial_requires_grad = {name: p.requires_grad for name, p in base_parameters(model)}
        self.state = ModelState(model, deltas, base)  # where tensors are, and which of them train
        # the forward passes of the model
        self.passes = PassManager(model, anatomy, self.state, RowAssignment([], None, self.base_labels))
        self.passes.attention_configs = [(config, attention_implementation(config)) for config in all_configs(model)]
        self.hooks = InstalledHooks(self.passes)  # the installed hooks

    @property
    def model(self) -> PreTrainedModel:
        """The model; an error after everything was detached."""
        if self.live_model is None:
            raise DeltuneError("this handle was detached or merged; attach or load returns a new one")
        return self.live_model

    # -- deltas and values

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.deltas)

    @property
    def active(self) -> Names:
        """The delta or deltas that all rows use; None inside `rows()` and `disable()`."""
        return self.passes.default_assignment.used.names if current_scope(self.passes) is None else None

    def delta(self, name: str | None = None) -> Delta:
        """Return the delta of a name, or the one in use."""
        requested = self.active if name is None else name
        if requested is None:
            raise DeltuneError(f"no delta is in use; call use(name) with one of: {', '.join(self.names)}")
        if name is None and isinstance(requested, tuple):
            raise DeltuneError(f"several deltas are in use: give the name of one of {', '.join(requested)}")
        if not isinstance(requested, str) or requested not in self.deltas:
            raise DeltuneError(unknown_name("delta", requested, self.names))
        follow_offloading(self.state, every_module=False)
        return self.state.delta(requested)

    def dense_value(self, name: str) -> torch.Tensor:
        """The base model's own value of a tensor, in floating point where it is quantised."""
        if not self.anatomy.tensor(name).quantized:
            return self.state.base_value(name)
        return dequantized_weight(self.model.get_submodule(name.rpartition(".")[0])).float()

    def place_of(self, edit: Edit) -> BasePlace | None:
        """The base model's own projection at an edit; None where there is none."""
        return self.base_place(edit.place)

    def base_place(self, location: Location, statistic: torch.Tensor | None = None) -> BasePlace | None:
        """The base model's own projection at a place; None where there is none."""
        linear = location.linear or location.weight
        if linear is None:
            return None
        module = self.model.get_submodule(linear.path)
        weight = self.anatomy.tensor(f"{linear.path}.{getattr(linear, 'leaf', 'weight')}")
        bias = self.anatomy.find_tensor(f"{linear.path}.bias")
        read_bias = partial(bias_of, module)  # HQQ keeps it in an attribute
        if bias is not None and "bias" in parameters_of(module):
            read_bias = partial(self.state.base_value, bias.name)
        return BasePlace(location, partial(self.dense_value, weight.name), read_bias, statistic=statistic)

    def base_config(self) -> PreTrainedConfig:
        """Return a copy of the model's configuration with the base model's labels, whatever delta is in use."""
        with self.state.mutex:  # in which passes write the labels of their deltas
            config = copy.deepcopy(self.model.config)
        self.base_labels.write_to(config)
        return config

    # -- which delta each row uses

    def use(self, names: object, train: object = None, head: str | None = None) -> None:
        """Put a delta, or several, in use for the whole model; see `Tuned.use`."""
        with self.exclusive("use"):
            chosen = checked_names(names, "use()")
            some = [self.delta(name) for name in each_name(chosen)]
            trained = None if train is None else each_name(checked_names(train, "train="))
            for name in trained or ():
                if name not in each_name(chosen):
                    raise DeltuneError(unknown_name("delta in use", name, each_name(chosen), "train="))
            self.state.check_tensors_fit(chosen if isinstance(chosen, str) else None)
            use = Use(chosen, train=trained, head=head if len(some) > 1 else None)
            self.assign(use)  # raises before anything has changed
            retry_if_interrupted(lambda: self._use(use))

    def _use(self, use: Use) -> None:
        self._choose(use)
        self.passes.update_model(self.passes.assignment_of_new_pass())

    def _choose(self, use: Use) -> None:
        """Let passes outside of `rows()` and `disable()` use a delta, none, or one for each row."""
        self.passes.default_assignment = self.assign(use)
        choose_here(self.passes)

    def assign_each_row(self, names: Sequence[object], head: str | None = None) -> RowAssignment:
        """Make the assignment of `rows(names)`."""
        if not isinstance(names, Sequence) or isinstance(names, str | bytes) or not names:
            raise DeltuneError(
                "rows() takes a list with the name of a delta, a list of names, or None, for each row of the batch, "
                f"not {excerpt(names)}"
            )
        rows = tuple(checked_names(name, "rows()") for name in names)
        every = [name for row in rows for name in each_name(row)]
        if wrong := [unknown_name("delta", name, self.deltas, "rows()") for name in every if name not in self.deltas]:
            raise error_from_problems("these deltas cannot be used in one batch", list(dict.fromkeys(wrong)))
        if head is not None and head not in every:
            raise DeltuneError(unknown_name("delta in use", head, every, "head_of="))
        return self.assign(Use(rows=rows, head=head))

    def assign(self, use: Use, constant: bool = False, left_out: Collection[Edit] | None = None) -> RowAssignment:
        """Make an assignment, and replace the forward of the modules whose tensors differ by row or are sums."""
        if not use.rows and use.names is None:
            return RowAssignment([], None, self.base_labels)
        follow_offloading(self.state, every_module=False)
        if use.rows:
            assignment = RowAssignment.of_rows(use, self.base_labels, self.passes.delta_cache, constant, left_out)
        else:
            assignment = RowAssignment.of_all(use, self.base_labels, self.passes.delta_cache, left_out)
        with self.state.mutex:
            for path in assignment.tensors:
                if (path, "tensors") not in self.hooks.installed:
                    module = self.model.get_submodule(path)
                    self.hooks.install((path, "tensors"), partial(ForwardOverride, self.passes, path, module))
        return assignment

    def inference_rows(self, names: Sequence[str | None], left_out: frozenset[Edit] | None = None) -> Scope:
        """Do as `Tuned.rows` does, for passes without gradients: nothing is made trainable, which takes less time.

        No tensor of a delta may change as long as it is attached: what is stacked by row is kept for further passes.
        Where all names are the same, the delta's tensors are put into the model for the block, which also serves deltas
        that `rows` refuses because they train what all rows share.
        """
        rows = tuple(names)
        return Scope(
            self.passes, self.handle, lambda: self._inference_assignment(rows, left_out), set_requires_grad=False
        )

    def _inference_assignment(self, names: tuple[str | None, ...], left_out: frozenset[Edit] | None) -> RowAssignment:
        """The assignment of `inference_rows`; the last ones are kept, since the steps of a batch have the same."""
        kept = self.passes.kept_assignments
        assignment = kept.get((names, left_out))
        if assignment is None:
            if len(set(names)) == 1:
                assignment = self.assign(Use(names[0]), left_out=left_out)
            else:
                assignment = self.assign(Use(rows=names), constant=True, left_out=left_out)
            while len(kept) >= KEPT_ASSIGNMENTS:
                del kept[next(iter(kept))]
            kept[names, left_out] = assignment
        return assignment

    def shares_rows(self, name: str) -> bool:
        """Return whether some rows of a batch can use a delta while others do not, as `Tuned.rows` needs it."""
        with self.state.mutex:
            facts = self.passes.delta_cache.facts_of(name)
        return not facts.shared and not facts.not_by_row

    # -- attaching

    def anatomy_read(self, pooling: str) -> Anatomy:
        """Return the anatomy, without a pooler that no head reads."""
        return self.anatomy if pooling == "model" else without_pooler(self.anatomy)

    def resolve(self, method: Method, pooling: str = "model") -> ResolvedMethod:
        """Resolve a method on this model; a pooler that nothing reads is left as it is."""
        return resolve(self.anatomy_read(pooling), method, lambda: base_size(self.model)[1])

    def new_delta(self, method: Method) -> Delta:
        """Return a delta with a frozen head and without values; it is on the model's device, not attached."""
        return self.move_to_model(Delta(method, self.resolve(method), (), "freeze"))

    def move_to_model(self, delta: Delta) -> Delta:
        """Move a new delta to the devices of the modules it acts at, in float32, or float64 in a float64 model."""
        placement = self._placement() if self._fixed is None else self._fixed[0]
        default, dtype = placement.default, placement.dtype
        for edit in delta.all_edits():
            inside = (device for name, device in placement.devices if is_inside(name, edit.place.target.path))
            _move(edit, next(inside, default), dtype)
        for shared in (
            *delta.common.values(),
            *delta.partly.values(),
            *delta.gated.values(),
            *delta.schedules.values(),
        ):
            _move(shared, default, dtype)
        return delta

    def _placement(self) -> ParameterPlacement:
        """Where new deltas belong as the base model is now."""
        tensors = list(base_tensors(self.model))
        dtype = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
        default = tensors[0].device
        if not self.state.offloaded and all(t.device == default for t in tensors):
            return ParameterPlacement(default, dtype)
        devices = [(name, device) for name, _, device in loaded_devices(self.model, self.state.offloaded)]
        return ParameterPlacement(devices[0][1], dtype, tuple(devices))

    @contextlib.contextmanager
    def exclusive(self, operation: str) -> Iterator[None]:
        """Wait until no pass runs, and keep passes from starting inside the block, in which the model is changed."""
        model = self.model  # raises after detach() and merge()
        with torch.inference_mode(False), self.passes.exclusive(operation):  # new parameters must be trainable later
            reshard(model)
            yield

    def add(self, name: str, delta: Delta, labels: HeadLabels, use: bool = True) -> None:
        """Register a delta under a name and put it in use; if anything fails, the model is as it was.

        Whether a forward pass reaches all of its edits is checked first, on a copy of the model's structure.
        """
        self._check_reached(delta)
        with self.exclusive("attach or load"):
            self.passes.modules.check()
            previous = self.passes.default_assignment
            delta.labels = labels
            delta.attached_parameters = self.state.parameters_by_name(delta)
            if delta.training != self.model.training:
                delta.train(self.model.training)
            if name in self.deltas:
                raise DeltuneError(f"a delta named {name!r} is already attached: detach it, or give another name=")
            self.state.check_tensors_fit(None)
            has_other_handle = False
            try:
                with _INSTALL_LOCK:
                    has_other_handle = submodules_of(self.model).get(HANDLE_NAME) not in (None, self.handle)
                    if HANDLE_NAME not in submodules_of(self.model):
                        refuse_shared_modules(self.model)  # again, as another thread may have attached to one of them
                        self.model.requires_grad_(False)
                        self._join_model()
                if has_other_handle:
                    raise DeltuneError("another thread has attached to this model in the meantime; call attach again")
                self.deltas[name] = delta
                self.hooks.add(name, delta)
                if use:
                    self._use(Use(name))
                else:
                    delta.freeze(self.state.parameters_by_name(delta))
            except BaseException:
                self.passes.default_assignment = previous
                if not has_other_handle:
                    self._detach([name])
                raise

    def _join_model(self) -> None:
        self.model.add_module(HANDLE_NAME, self.handle)
        claim_modules(self.model)

    def _check_reached(self, delta: Delta) -> None:
        """Check on the model's structure that a forward pass reaches every edit of a delta."""
        for edit in delta.all_edits():
            if edit.place.target.side == "tokens":
                check_takes_embeddings(self.model, edit.place.widths.out_width)
                check_takes_prompts(self.model, self.anatomy)
        if not len(delta.edits):
            return
        order = call_order(self.model) if self._fixed is None else self._fixed[1]
        for part in self.anatomy.other_towers:
            if any(edit.place.target.path.startswith(f"{part.tower_path}.") for edit in delta.all_edits()):
                tower = self.model.get_submodule(part.tower_path)
                assert isinstance(tower, PreTrainedModel)
                order = order.including(call_order(tower), part.tower_path)
        # the base model's pass calls no vocabulary, which the model's own does, and one on one input skips a projector
        vocabulary = self.anatomy.vocabulary
        outside = {e.place.name for e in delta.all_edits() if vocabulary and e.place.target.path == vocabulary.path}
        outside |= {e.place.name for e in delta.all_edits() if e.place.tower == "projector"}
        if unreached := [name for name in unreached_edits(order, delta) if name not in outside]:
            raise error_from_problems(
                f"{delta.method!r} cannot be attached to {type(self.model).__name__}: its forward pass does not call "
                "every module that the method changes",
                [
                    f"{place}: the forward pass does not call this module as the model's structure says"
                    for place in unreached
                ],
            )

    # -- detaching and merging

    def detach(self, name: str | None = None) -> PreTrainedModel:
        """Remove one delta, or all, and return the model; see `Tuned.detach`."""
        with self.exclusive("detach"):
            removed = list(self.names) if name is None else [name]
            for delta_name in removed:
                self.delta(delta_name)
            self.passes.refuse_in_other_scopes("detach", removed)
            if self.passes.default_assignment.used.deltas.intersection(removed):
                self.state.check_tensors_fit(None)
            model: PreTrainedModel = retry_if_interrupted(lambda: self._detach(removed))
            return model

    def _detach(self, names: Sequence[str]) -> Any:
        model = self.live_model
        if model is None:
            return model  # a first attempt was interrupted after its last step
        if self.passes.default_assignment.used.deltas.intersection(names):
            self.passes.default_assignment = self.assign(Use())
        self.passes.update_model(self.passes.default_assignment)
        for name in names:
            if name in self.deltas:
                self.passes.delta_cache.forget(self.delta(name))
                self.state.forget(self.delta(name))
                del self.deltas[name]
        self.hooks.forget(names)
        if len(self.deltas) or self.state.base_is_fixed:
            self.hooks.update()
            return model
        leave_offloading(self.state)
        self._leave_model(model)
        for parameter_name, parameter in base_parameters(model):
            parameter.requires_grad_(self._initial_requires_grad.get(parameter_name, True))
        self.live_model = None
        return model

    def _leave_model(self, model: PreTrainedModel) -> None:
        """Remove all hooks, and the handle from its model."""
        self.hooks.remove_all()
        submodules_of(model).pop(HANDLE_NAME, None)

    def training(self) -> list[Delta]:
        """Return the deltas that train with what is in use."""
        used = self.passes.assignment_of_new_pass()
        if not used.groups:
            self.delta()  # raises
        return [delta for group in used.groups for delta in group.trained]

    def merge(
        self, names: object, head: str | None, dequantize: bool, pooled: bool = False
    ) -> tuple[PreTrainedModel, str]:
        """Fold deltas into the weights and detach everything; return the model and a warning of rounding, or "".

        A pooling that the model's class does not have gets lost, which `pooled` allows.
        """
        with self.exclusive("merge"):
            self.passes.refuse_in_other_scopes("merge", self.names, any_scope=True)
            refuse_offloaded(self.model, "merge")
            used = self.passes.default_assignment.used
            chosen = used.names if names is None else checked_names(names, "merge()")
            same = {*each_name(chosen)} == {*each_name(used.names)}
            merge, labels = self.compute_merge(chosen, head or (used.head if same else None), dequantize, pooled)
            model = self.model
            retry_if_interrupted(lambda: self._put_merged(model, merge, labels))
        return model, merge.warning

    def compute_merge(
        self, names: Names, head: str | None, dequantize: bool = False, pooled: bool = False
    ) -> tuple[merging.MergePlan, HeadLabels]:
        """Compute what merging deltas puts into the model, which is not changed, and the labels of its head."""
        some = {name: self.delta(name) for name in each_name(names)} or {"": self.delta()}
        head = head_of(tuple(some), some, head)
        for delta in some.values():
            delta.warn_if_never_advanced()
        of_head = some[head] if head else next(iter(some.values()))
        if of_head.pooling != "model" and not pooled:
            raise DeltuneError(
                f"this delta's head reads {of_head.pooling!r} of the hidden states, and "
                f"{type(self.model).__name__} computes something else, so it cannot be merged into it: "
                "`deltune merge RUN --output DIR` writes a folder of sentence-transformers, which has it; --pooling "
                "model (pooling='model') gives it up: the head then reads the class's pooler, with other outputs"
            )
        with self.whole():
            merge = merging.compute_merge(self, list(some.values()), some.get(head or ""), dequantize)
        merge.check_fits_shards(self.state)
        return merge, of_head.labels or self.base_labels

    def why_unmerged(self) -> str:
        """Return why what is in use cannot be folded into the weights, "" if it can; nothing is changed.

        A pooling that the model's class does not have is no reason: a folder of sentence-transformers has it.
        """
        try:
            self.compute_merge((), None, dequantize=True, pooled=True)
        except DeltuneError as error:
            return str(error)
        return ""

    def _put_merged(self, model: PreTrainedModel, merge: merging.MergePlan, labels: HeadLabels) -> None:
        self.base_labels = labels
        if self.live_model is not None:
            self.state.place_tensors(None)
            for name, value in merge.weights.items():
                self.state.replace_value(name, value)  # detaching sets its requires_grad
            merge.quantize_in_place()
        self._detach(self.names)
        merge.replace_linears(model)

    # -- pickling

    def take_apart(self) -> PickledDeltas:
        """Make the model a bare one, and return what was attached; the handle belongs to a copy and ends with it."""
        used = self.passes.default_assignment.used
        self.state.place_tensors(None)
        self.state.set_labels(self.base_labels)
        self._leave_model(self.model)
        deltas = {name: self.delta(name) for name in self.names}
        for delta in deltas.values():
            delta.saved_requires_grad = delta.trainable_when_used(self.state.parameters_by_name(delta))
            delta.freezes = 0
        return PickledDeltas(type(self.handle), self.anatomy, deltas, self._initial_requires_grad, used)

    def put_back(self, pickled: PickledDeltas) -> None:
        """Attach the deltas of a pickle to its model, to which nothing is attached yet."""
        self._initial_requires_grad = pickled.requires_grad
        self._join_model()
        for name, delta in pickled.deltas.items():
            self.deltas[name] = delta
            self.hooks.add(name, delta)
            if name in pickled.in_use.deltas or any(p.requires_grad for p in self.state.parameters_of(delta)):
                self.state.keep_requires_grad(delta)
        self._choose(pickled.in_use)
        self.passes.update_model(self.passes.default_assignment, set_requires_grad=False)

    # -- saving, and what identifies the base model

    def whole(self, write: bool = False) -> contextlib.AbstractContextManager[None]:
        """Have whole tensors of the deltas inside the block, where FSDP2 has sharded them; all ranks must enter it."""
        placed = self.state.placed_delta
        owned = () if placed is None else self.state.delta(placed).owned_tensor_names
        return unsharded_deltas(self.model, owned, write)

    def contents(
        self, name: str | None, shrink: Callable[[Attached, Delta], Delta] = lambda attached, delta: delta
    ) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Return what the files of a delta hold, or of what `shrink` makes of it: metadata, and tensors on the CPU."""
        follow_offloading(self.state)
        with self.state.mutex, self.whole():
            delta = self.delta(name)
            delta.warn_if_never_advanced()
            delta = shrink(self, delta)
            base = self._base_metadata or self.metadata_of_base(delta)
            return serialization.delta_metadata(delta, base), self.tensors_to_save(delta)

    def tensors_to_save(self, delta: Delta) -> dict[str, torch.Tensor]:
        """All tensors of a delta on the CPU, by their names in the file; "base.NAME" are its values of the model's."""
        with torch.no_grad():
            values = {f"base.{name}": self.state.delta_value(delta, name) for name in delta.owned_tensor_names}
            tensors = delta.tensors_to_save() | values
            return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}

    def metadata_of_base(self, delta: Delta | None) -> dict[str, Any]:
        """The facts about the base model that are saved with a delta."""
        return self._read_base(None if delta is None else serialization.tokens_of_base(self.anatomy, delta))

    def base_fingerprint(self, tokens: int | None) -> dict[str, Any]:
        """The facts of the base model that a saved delta is checked against, of so many rows of its embeddings."""
        remembered = self._base_metadata
        if remembered is not None:
            every = (None, remembered["tokens"])
            if tokens in every and remembered["compared_tokens"] in every:
                return remembered
        return self._read_base(tokens)

    def _read_base(self, tokens: int | None) -> dict[str, Any]:
        quantization = quantization_of(self.model)
        return serialization.base_metadata(self.model, self.anatomy, self.state.base_values, quantization, tokens)

    def remember_base_metadata(self) -> None:
        """Compute the facts about the base model that `Tuned.save` writes, for all later calls."""
        self._base_metadata = self.metadata_of_base(self.delta() if isinstance(self.active, str) else None)

    def fix_base(self) -> None:
        """Declare that nobody changes, moves or offloads the base model until `release_base`, as a server does.

        Loading, attaching and detaching then take less time: besides what `remember_base_metadata` does, nothing looks
        for the devices and the type of the base's weights any more, or for weights that accelerate offloads by now. The
        handle stays when its last delta is detached.
        """
        self.remember_base_metadata()
        self._fixed = self._placement(), call_order(self.model)
        self.state.base_is_fixed = True

    def release_base(self) -> None:
        """Undo `fix_base`: the base model may change again, and `detach()` of the last delta removes the handle."""
        self.state.base_is_fixed, self._fixed, self._base_metadata = False, None, None


def check_name(name: str, taken: Iterable[str]) -> None:
    """Raise an error for a name that a delta cannot have, or that is taken."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_-]+", name) or hasattr(nn.ModuleDict(), name):
        raise DeltuneError(
            f"name {excerpt(name)} cannot name a delta: use letters, digits, '-' and '_', and no name that torch's "
            "ModuleDict uses itself"
        )
    if name in taken:
        raise DeltuneError(f"a delta named {name!r} is already attached: detach it, or give another name=")


def _move(module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Move a module, unless its parameters are all that it has, and are there."""
    parameters = [*parameters_of(module).values(), *buffers_of(module).values()]
    if submodules_of(module) or any(p is not None and (p.device != device or p.dtype != dtype) for p in parameters):
        module.to(device, dtype)
