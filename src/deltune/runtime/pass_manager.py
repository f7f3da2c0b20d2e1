"""`PassManager`: starts and ends the forward passes of a tuned model, with the tensors that each of them needs."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from ..anatomy.quantization import is_unquantized
from ..anatomy.quantizers import find_quantizer
from ..anatomy.skeleton import HANDLE_NAME, base_modules, base_tensors
from ..compat import (
    attention_implementation,
    backward_id,
    buffers_of,
    parameters_of,
    set_attention_implementation,
    submodules_of,
)
from ..errors import DeltuneError
from .attention import PREFIX, prefix_implementation
from .forward_pass import (
    ForwardPass,
    PassLock,
    Scope,
    carried_scope,
    current_pass,
    current_scope,
    innermost_pass,
    open_scopes_here,
    recomputation,
    refuse_unclear,
    remember_for_backward,
    run_in_pass,
)
from .model_state import ModelState, missing_parameter
from .modules import Edit
from .offloading import follow_offloading
from .row_assignment import DeltaCache, RowAssignment
from .rows import refuse_frozen, refuse_late_gradients


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


def claim_modules(modules: Iterable[nn.Module], passes: PassManager) -> None:
    """Remember to whose model modules belong, for `refuse_shared_modules`."""
    owner = weakref.ref(passes)
    _OWNERS.update((module, owner) for module in modules)


def refuse_shared_modules(model: nn.Module) -> None:
    """Check that no module with tensors of the model belongs to another model that has deltas.

    A module without tensors may: transformers has one activation module for every OpenAI GPT of a process.
    """
    if len(_PASS_MANAGERS) == (HANDLE_NAME in submodules_of(model)):
        return  # there is no other model
    for path, module in base_modules(model):
        reference = _OWNERS.get(module)
        owner = None if reference is None else reference()
        other = None if owner is None else owner.model
        if other not in (None, model) and HANDLE_NAME in submodules_of(other) and _has_tensors(module):
            where = f"{path!r} of this {type(model).__name__}" if path else f"this {type(model).__name__}"
            raise DeltuneError(
                f"{where} also belongs to a {type(other).__name__} that has deltas, and the two would overwrite each "
                f"other's tensors: attach to that {type(other).__name__} instead, or detach() its deltas first"
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


T = TypeVar("T")


class Entry(Protocol):
    """The wrapped call of a module at which a forward pass may begin."""

    always_begins: bool

    @property
    def of_whole_model(self) -> bool: ...

    def call_original(self, *args: Any, **kwargs: Any) -> Any: ...

    def named_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]: ...


class PassManager:
    """The forward passes of one tuned model. Hooks ask it which delta each row uses.

    Attributes:
        default_assignment: What passes outside `rows()` and `disable()` use.
        kept_assignments: Assignments of passes without gradients, by the delta of each row, by whether the delta of all
            rows is placed in the model, and by the edits that are left out.
        delta_cache: Facts about deltas that every assignment of rows needs.
        vocabulary: The path of the projection to the vocabulary while some attached delta acts at it, else None.
        saves_deltas_alone_below: The output folder of a Trainer, in whose checkpoints `save_pretrained` writes deltas
            without the model; None where it always writes the model.
    """

    def __init__(
        self, model: PreTrainedModel, state: ModelState, lock: PassLock, default_assignment: RowAssignment
    ) -> None:
        self.model, self.state, self.default_assignment = model, state, default_assignment
        self.attention_configs: list[tuple[Any, str | None]] = []
        self.has_prefixes = False
        self.vocabulary: str | None = None
        self.scopes_in_event_loops = 0
        self.any_scopes = False
        self.saves_deltas_alone_below: Path | None = None
        self.modules = AttachedModules(model)
        self._reset(lock)

    def _reset(self, lock: PassLock) -> None:
        self.lock = lock
        self.compiled_pass = ForwardPass(self, self.default_assignment)  # that of torch.compile
        self._scopes: tuple[weakref.ref[Scope], ...] = ()  # replaced, not changed: threads read it without the mutex
        self.kept_assignments: dict[tuple[tuple[str | None, ...], bool, frozenset[Edit] | None], RowAssignment] = {}
        self.delta_cache = DeltaCache()
        _PASS_MANAGERS[id(self)] = self

    def open_scopes(self) -> list[Scope]:
        """Return the open scopes of the model, of all threads and tasks."""
        return [scope for scope in (reference() for reference in self._scopes) if scope is not None]

    def passes_in_threads(self) -> bool:
        """Whether passes of threads that entered no scope belong to one that runs its passes in threads of its own."""
        return self.lock.runs_in_threads

    def reset_after_fork(self) -> None:
        """Forget the passes, locks and scopes of other threads, which do not exist in the new process."""
        self.lock.reset()
        self._scopes = tuple(map(weakref.ref, open_scopes_here().intersection(self.open_scopes())))
        self.scopes_in_event_loops = sum(scope.in_event_loop for scope in self.open_scopes())

    def __getstate__(self) -> dict[str, Any]:
        """Leave out running passes and scopes; what is in use here is in use in a copy."""
        excluded = ("lock", "compiled_pass", "_scopes", "kept_assignments", "delta_cache")
        state = {name: value for name, value in self.__dict__.items() if name not in excluded}
        return state | {"default_assignment": self.assignment()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.scopes_in_event_loops, self.any_scopes = 0, False
        self._reset(PassLock())
        self.state.lock = self.lock

    def __deepcopy__(self, memo: dict[int, Any]) -> PassManager:
        copied = memo[id(self)] = object.__new__(PassManager)
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise DeltuneError(
            f"this is a part of a {type(self.model).__name__} with deltas, which cannot be pickled alone: pickle the "
            "whole model and take the part from it after loading, or detach() first"
        )

    # -- what hooks look up

    def assignment(self) -> RowAssignment:
        """Return the assignment of the running pass, or outside of one that of a pass which would begin here.

        In a backward pass that computes a part of the model again, it is the assignment of the forward pass.
        """
        if torch.compiler.is_dynamo_compiling():
            return self.assignment_of_new_pass()
        running = current_pass(self)
        if running is not None:
            return running.assignment
        recomputed = recomputation(self)
        if recomputed is None:
            return self.assignment_of_new_pass()
        refuse_frozen(recomputed.assignment.groups)
        if self.state.placed_delta != recomputed.assignment.placed_delta:
            raise DeltuneError(
                "a backward pass computes a part of a layer again, but the model no longer holds the tensors that the "
                "forward pass used: run the backward pass before use() or disable(), and inside the same rows()"
            )
        return recomputed.assignment

    def assignment_of_new_pass(self) -> RowAssignment:
        """Return the assignment that a pass uses which begins in this thread or task now."""
        carried = carried_scope(self)
        assignment = None if carried is None else carried.assignment
        return self.default_assignment if assignment is None else assignment

    def current_pass(self) -> ForwardPass:
        """Return the running pass, where hooks keep data for each other; outside of one, an object that is dropped."""
        if torch.compiler.is_dynamo_compiling():
            return self.compiled_pass
        return current_pass(self) or recomputation(self) or ForwardPass(self, self.default_assignment)

    # -- passes

    def run(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a module in a forward pass of its own, unless it is a part of a running one."""
        if torch.compiler.is_dynamo_compiling():
            if entry.always_begins:
                assignment = self.assignment_of_new_pass()
                refuse_unclear(self, carried_scope(self))
                assignment.check_batch(entry.named_arguments(args, kwargs))
                if self.state.placed_delta != assignment.placed_delta:
                    raise DeltuneError(
                        "a compiled forward pass cannot wait for other threads, and another thread is inside rows() or "
                        "disable(), which needs other tensors in the model: run it after that, or do not compile"
                    )
                self.update_prefix_attention()
            return entry.call_original(*args, **kwargs)
        outer = current_pass(self)
        if outer is not None and not entry.always_begins:
            return entry.call_original(*args, **kwargs)
        if "adapter_names" in kwargs:  # most models take any keyword and would ignore it
            raise DeltuneError(
                "adapter_names is an argument of PEFT's models. Here it is: with tuned.rows([…]): model(…)"
            )
        forward_pass = self._begin(entry.named_arguments(args, kwargs) if entry.always_begins else {})
        output = self._run_in(forward_pass, entry.call_original, args, kwargs)
        called = forward_pass.called_vocabulary or self.compiled_pass.called_vocabulary
        if self.vocabulary is not None and entry.of_whole_model and not called:
            self._refuse_if_edited(self.vocabulary, forward_pass.assignment)
        if outer is None and torch.is_grad_enabled():
            remember_for_backward(self, forward_pass.assignment, output)
        return output

    @staticmethod
    def _refuse_if_edited(path: str, assignment: RowAssignment) -> None:
        """Raise an error if a delta of an assignment acts at a module that the pass did not call."""
        acts = path in assignment.tensors or path in assignment.inputs
        if acts or any((path, side) in assignment.writes for side in ("input", "output")):
            raise DeltuneError(
                f"the forward pass did not call {path}, so the delta did not act there. Losses that compute the "
                "logits from its weight (TRL's trainers, Liger kernels) do that: train with a loss that calls it, or "
                f"with a method that does not act at {path}"
            )

    def recompute(self, assignment: RowAssignment, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a part of the model for gradient checkpointing.

        The first time it runs in the forward pass, and later, in the backward pass, in a pass of its own.
        """
        running = None if torch.compiler.is_dynamo_compiling() else current_pass(self)
        if torch.compiler.is_dynamo_compiling() or (running is not None and running.assignment is assignment):
            return function(*args, **kwargs)
        return self._run_in(self._begin({}, assignment), function, args, kwargs)

    def generate(
        self, generate: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], in_threads: bool = False
    ) -> Any:
        """Run `generate` as one long pass, so that the deltas in use are the same from its first step to its last."""
        self.assignment_of_new_pass().check_prompts(args, kwargs)
        return self._run_in(self._begin({}, in_threads=in_threads), generate, args, kwargs)

    def run_reader(self, reader: Callable[[], T]) -> T:
        """Call `reader` with the tensors and labels of what is in use here in the model; no thread can move them.

        Inside a pass or a change of the model they are read as they are.
        """
        if torch.compiler.is_dynamo_compiling():
            return reader()

        def read_locked() -> T:
            with self.lock.mutex:
                return reader()

        with self.lock.mutex:
            if self.lock.held_by_change or current_pass(self) is not None:
                return reader()
        carried = carried_scope(self)
        forward_pass = ForwardPass(self, self.default_assignment, carried, innermost_pass())

        def choose() -> RowAssignment:
            refuse_unclear(self, carried)
            return self.assignment_of_new_pass()

        self._admit(forward_pass, choose)
        result: T = self._run_in(forward_pass, read_locked, (), {})
        return result

    def _begin(
        self, arguments: dict[str, Any], assignment: RowAssignment | None = None, in_threads: bool = False
    ) -> ForwardPass:
        """Begin a pass as soon as the model holds the tensors that it needs."""
        carried, outer, enclosing = carried_scope(self), current_pass(self), innermost_pass()
        if assignment is None and outer is not None and outer.scope is carried:
            return ForwardPass(self, outer.assignment, carried, enclosing, outer)
        recomputed = recomputation(self)
        fixed = assignment if assignment is not None or recomputed is None else recomputed.assignment
        if fixed is not None:
            refuse_frozen(fixed.groups)
        elif outer is None and carried is None and backward_id() is not None and self.open_scopes():
            raise DeltuneError(
                "a backward pass recomputes the model in a thread that is not inside rows() or disable() while another "
                "thread is, and deltune cannot tell in which of them its forward pass ran: give your checkpoint a "
                "function that returns the model's own output, and use_reentrant=False"
            )
        forward_pass = ForwardPass(self, fixed or self.default_assignment, carried, enclosing)
        forward_pass.in_threads = in_threads

        def choose() -> RowAssignment:
            if fixed is not None:
                return fixed
            chosen = self.assignment_of_new_pass()
            refuse_unclear(self, carried)  # checked last, since the scope may be left at any moment
            if chosen is not forward_pass.assignment or chosen is self.default_assignment:
                chosen.check_batch(arguments)
            return chosen

        forward_pass.assignment = choose()
        self.check_model()
        self.update_prefix_attention()
        self._admit(forward_pass, choose, outer, with_labels=arguments.get("labels") is not None)
        return forward_pass

    def _admit(
        self,
        forward_pass: ForwardPass,
        choose: Callable[[], RowAssignment],
        outer: ForwardPass | None = None,
        with_labels: bool = True,
    ) -> None:
        """Wait until a pass may run, and put the tensors that it needs into the model."""
        state = self.state

        def fits() -> bool:
            forward_pass.assignment = choose()
            labels = forward_pass.assignment.labels
            same = not with_labels or labels is state.labels or labels == state.labels
            return same and state.placed_delta == forward_pass.assignment.placed_delta

        def prepare() -> None:
            state.place_tensors(forward_pass.assignment.placed_delta)
            state.set_labels(forward_pass.assignment.labels)

        if outer is None:
            self.lock.admit(forward_pass, fits, prepare)
        elif not fits():
            with self.lock.mutex:
                self.lock.refuse_others(outer)
                forward_pass.restore = (state.placed_delta, state.labels)
                self.lock.set_nested_pass(forward_pass)
                prepare()

    def _run_in(
        self, forward_pass: ForwardPass, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call a function inside a pass that has begun, then end the pass."""
        try:
            return run_in_pass(forward_pass, call, args, kwargs)
        finally:
            self._finish(forward_pass)

    def _finish(self, forward_pass: ForwardPass) -> None:
        try:
            self._end(forward_pass)
        except BaseException:  # if it was interrupted, others would wait forever for this pass
            self._end(forward_pass)
            raise

    def _end(self, forward_pass: ForwardPass) -> None:
        with self.lock.mutex:
            if forward_pass.restore is not None:
                self.state.place_tensors(forward_pass.restore[0])
                self.state.set_labels(forward_pass.restore[1])
                self.lock.set_nested_pass(None)
            elif self.lock.release(forward_pass) and self.lock.idle and not self.open_scopes():
                self.state.place_tensors(self.default_assignment.placed_delta)
                self.state.set_labels(self.default_assignment.labels)

    def check_model(self) -> None:
        """Check that the modules deltas act at are in the model."""
        self.modules.check()
        follow_offloading(self.state, every_module=False)

    # -- attention

    def set_prefix_attention(self, enabled: bool) -> None:
        """Switch the attention functions to the versions with prefixes, or back."""
        self.has_prefixes = enabled
        for number, (config, implementation) in enumerate(self.attention_configs):
            now = attention_implementation(config)
            if now not in (
                implementation,
                prefix_implementation(implementation, check=False),
            ):  # the user has chosen another one since
                self.attention_configs[number] = (config, implementation := now)
            set_attention_implementation(config, prefix_implementation(implementation) if enabled else implementation)

    def update_prefix_attention(self) -> None:
        """Apply `set_prefix_attention` again if the user has changed the attention implementation after attaching."""
        if self.has_prefixes and not all(
            (attention_implementation(c) or "").startswith(PREFIX) for c, _ in self.attention_configs
        ):
            self.set_prefix_attention(True)

    # -- scopes and changes

    def enter_scope(self, scope: Scope, make_assignment: Callable[[], RowAssignment]) -> None:
        """Begin a scope, and put its tensors into the model if no pass is running."""
        with self.lock.mutex:
            follow_offloading(self.state, every_module=False)
            assignment = make_assignment()  # raises before anything has changed
            self._scopes = (*map(weakref.ref, self.open_scopes()), weakref.ref(scope))
            scope.open(assignment)
            self.update_model(assignment, scope.set_requires_grad)
            for group in assignment.groups if assignment.rows and scope.set_requires_grad else ():
                refuse_late_gradients(group.delta)

    def leave_scope(self, scope: Scope) -> None:
        with self.lock.mutex:
            self._scopes = tuple(weakref.ref(other) for other in self.open_scopes() if other is not scope)
            self.update_model(self.assignment_of_new_pass(), scope.set_requires_grad)

    def overridden_modules(self) -> set[str]:
        """The paths of the modules that run with tensors of deltas, in some scope or outside of all."""
        assignments = [self.default_assignment, *(scope.assignment for scope in self.open_scopes())]
        return {path for assignment in assignments if assignment is not None for path in assignment.tensors}

    def update_model(self, assignment: RowAssignment, set_requires_grad: bool = True) -> None:
        """Put the tensors of an assignment in place if no pass runs, and make all deltas in use trainable."""
        scopes = [scope.assignment for scope in self.open_scopes() if scope.set_requires_grad]
        self.scopes_in_event_loops = sum(scope.in_event_loop for scope in self.open_scopes())
        self.any_scopes = len(self.open_scopes()) > 0
        if self.lock.idle:
            self.state.place_tensors(assignment.placed_delta)
            self.state.set_labels(assignment.labels)
        if set_requires_grad:
            self.state.train_only(
                group.delta for a in (self.default_assignment, *scopes) if a is not None for group in a.groups
            )

    @contextlib.contextmanager
    def exclusive(self, operation: str) -> Iterator[None]:
        """Wait until no pass runs, and keep passes from starting inside the block, in which the model is changed."""
        scope = current_scope(self)
        if scope is not None and scope.assignment is not None and scope.assignment.rows:
            raise DeltuneError(f"{operation} cannot be called inside rows(): leave the block first")
        if current_pass(self) is not None:
            raise DeltuneError(
                f"{operation} cannot be called inside a forward pass of the same model: wait until it has returned"
            )
        with self.lock.alone():
            follow_offloading(self.state, every_module=not self.state.base_is_fixed)
            yield

    def refuse_other_scopes(self, operation: str) -> None:
        """Raise an error if another thread or task is inside `rows()` or `disable()`."""
        this_scope = current_scope(self)
        if any(scope is not this_scope for scope in self.open_scopes()):
            raise DeltuneError(
                f"{operation}: another thread or task is inside rows() or disable(), which must be left first"
            )

    def refuse_in_scopes(self, operation: str, names: Sequence[str]) -> None:
        """Raise an error if a scope of another thread or task uses one of the deltas."""
        this_scope = current_scope(self)
        other_assignments = [scope.assignment for scope in self.open_scopes() if scope is not this_scope]
        if used := [name for name in names if any(a is not None and name in a.rows for a in other_assignments)]:
            raise DeltuneError(
                f"{operation}: {', '.join(used)} is used inside rows() by another thread or task, which must leave "
                "it first"
            )


_PASS_MANAGERS: weakref.WeakValueDictionary[int, PassManager] = weakref.WeakValueDictionary()
"""By id, since the list of the values' references is made in one step, beside threads that attach."""

_OWNERS: weakref.WeakKeyDictionary[nn.Module, weakref.ReferenceType[PassManager]] = weakref.WeakKeyDictionary()
"""For the modules of models that deltas were attached to, the pass manager of the last such model."""


def reset_after_fork() -> None:
    """Reset every pass manager in a forked process."""
    for reference in _PASS_MANAGERS.valuerefs():
        passes = reference()
        if passes is not None:
            passes.reset_after_fork()
