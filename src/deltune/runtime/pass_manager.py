"""`PassManager`: the scopes, passes and changes of a tuned model, and the tensors that each of them needs.

torch.compile cannot read context variables. While it traces, the data of a pass is in one object of the manager (the
graph undoes its own writes), and scopes are read from the thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from .._context import descends_from_import
from ..anatomy.types import Anatomy
from ..compat import attention_implementation, backward_id, remove_hooks, set_attention_implementation
from ..errors import DeltuneError
from .attention import PREFIX, prefix_implementation
from .forward_pass import ForwardPass, PassLock, current_pass, innermost_pass, recomputation, run_in_pass
from .model_state import AttachedModules, ModelState
from .modules import Edit, HeadLabels
from .offloading import follow_offloading
from .row_assignment import DeltaCache, RowAssignment
from .rows import refuse_frozen, refuse_late_gradients

T = TypeVar("T")


class Scope:
    """A `with` block in which rows use given deltas, in the thread or asyncio task that entered it and nowhere else.

    It holds as long as the block runs: even if its exit is interrupted, it ends with the block.
    """

    def __init__(
        self,
        owner: PassManager,
        value: Any,
        make_assignment: Callable[[], RowAssignment],
        set_requires_grad: bool = True,
    ) -> None:
        self.owner, self.value = owner, value
        self.make_assignment, self.set_requires_grad = make_assignment, set_requires_grad
        self.assignment: RowAssignment | None = None
        self.carried: CarriedScope | None = None
        self.in_event_loop = False
        self.thread = 0  # that entered it
        self.entered = False

    def __del__(self) -> None:
        if not self.entered:
            warnings.warn(
                "rows() and disable() hold inside of a with block alone (with tuned.rows([…]): …); this call changed "
                "nothing",
                stacklevel=2,
            )

    def __enter__(self) -> Any:
        self.entered = True
        if self.assignment is not None:
            raise DeltuneError("this rows() or disable() block is already entered; call it again to get another block")
        with contextlib.suppress(RuntimeError):
            self.in_event_loop = asyncio.get_running_loop() is not None
        try:
            self.owner.enter_scope(self)
            return self.value
        except BaseException:
            self._leave()
            raise

    def open(self, assignment: RowAssignment) -> None:
        """Begin to hold."""
        self.thread = threading.get_ident()
        self.carried = carried = CarriedScope(self.owner, self)
        _change_entered(lambda entered: (*self._others(entered), carried))
        self.assignment = assignment

    def _others(self, entered: Entered) -> Entered:
        """The other scopes of a context, without those that were dropped when their exit was interrupted."""
        return tuple(carried for carried in entered if carried is not self.carried and not carried.is_dropped)

    def __exit__(self, *exception: object) -> None:
        retry_if_interrupted(self._leave)

    def _leave(self) -> None:
        _change_entered(self._others)
        if self.carried is not None:
            self.carried.closed = True  # only other contexts carry it from now on
        self.assignment = None
        self.owner.leave_scope(self)


class CarriedScope:
    """A context's reference to a scope, or to a model's `use()`. Contexts that are copied may outlive the scope.

    Attributes:
        is_use: Whether it is of a `use()`, which decides what passes use that are in no scope.
        closed: Whether the scope was left. The context that left it has no reference any more, so only others have.
    """

    def __init__(self, owner: PassManager, scope: Scope | None) -> None:
        self.owner, self.is_use, self.closed = weakref.ref(owner), scope is None, False
        self._scope = None if scope is None else weakref.ref(scope)

    @property
    def scope(self) -> Scope | None:
        """The scope while it is open."""
        scope = None if self._scope is None else self._scope()
        return None if scope is None or scope.assignment is None else scope

    @property
    def is_dropped(self) -> bool:
        """Whether the scope ended without being left, as its exit was interrupted; it is ignored."""
        return not (self.is_use or self.closed) and self.scope is None


Entered = tuple[CarriedScope, ...]
"""What a context has entered, the innermost last; `use()` comes first."""

_SCOPES: ContextVar[Entered] = ContextVar("deltune_scopes", default=())


class _Thread(threading.local):
    """For torch.compile, what the context variable holds of this thread."""

    def __init__(self) -> None:
        self.scopes: Entered = ()  # not of the class: torch 2.11 compiles that in as a constant


_thread = _Thread()


def _change_entered(change: Callable[[Entered], Entered]) -> None:
    _SCOPES.set(change(_SCOPES.get()))
    _thread.scopes = change(_thread.scopes)


def _entered() -> Entered:
    return _thread.scopes if torch.compiler.is_dynamo_compiling() else _SCOPES.get()


def innermost_scope(owner: PassManager) -> CarriedScope | None:
    """Return the innermost scope of a model that this context refers to, open or left elsewhere."""
    if torch.compiler.is_dynamo_compiling() and owner.any_in_event_loop:
        raise DeltuneError(
            "code that torch.compile traces cannot see which asyncio task runs it: enter rows() or disable() in the "
            "function that calls the model, and run that in a thread (asyncio.to_thread)"
        )
    for carried in _entered()[::-1]:
        if carried.owner() is owner and (carried.closed or carried.scope is not None):
            return carried
    return None


def current_scope(owner: PassManager) -> Scope | None:
    """Return the innermost open scope of a model in this context."""
    scopes = [carried.scope for carried in _SCOPES.get() if carried.owner() is owner]
    return next((scope for scope in scopes[::-1] if scope is not None), None)


def refuse_unclear(owner: PassManager, carried: CarriedScope | None) -> None:
    """Raise an error where it is unclear which delta a pass that begins here, in a scope or in none, should use."""
    if carried is None:
        _refuse_unknown_thread(owner)
    elif carried.closed:
        raise DeltuneError(
            "this thread or task was started inside a rows() or disable() block that has been left in the meantime, so "
            "it is unclear which delta it should use: enter rows() or disable() around the pass itself, stay in the "
            "block until the thread or task is done, or call use() here to use one delta outside of any block"
        )


def _refuse_unknown_thread(owner: PassManager) -> None:
    """Raise an error in a thread that may have been given its work inside a scope of another thread.

    Python hands a thread no context variables, so such a thread looks like one that has nothing to do with the scope.
    """
    if torch.compiler.is_dynamo_compiling():
        in_other_thread = owner.any_scopes
    else:
        here = threading.get_ident()
        in_other_thread = any(scope.thread != here for scope in owner.open_scopes())
        in_other_thread = in_other_thread and not descends_from_import.get() and not owner.lock.has_threaded_pass
    if in_other_thread and not any(carried.is_use and carried.owner() is owner for carried in _entered()):
        raise DeltuneError(
            "another thread is inside rows() or disable(), which Python does not pass on to the threads and pools that "
            "it uses, so it is unclear which delta this thread should use: enter rows() or disable() in the function "
            "that runs here, or run it by contextvars.copy_context().run, which hands on the block. A thread that has "
            "nothing to do with the block can also call use() before"
        )


def choose_here(owner: PassManager) -> None:
    """Let passes in this context that are in no scope use what is in use, whatever scopes others are in or left."""

    def chosen(entered: Entered) -> Entered:
        others = (
            carried
            for carried in entered
            if carried.owner() is not None and not (carried.owner() is owner and (carried.is_use or carried.closed))
        )
        return CarriedScope(owner, None), *others

    _change_entered(chosen)


_CONDITIONS: ContextVar[tuple[tuple[weakref.ReferenceType[PassManager], dict[str, torch.Tensor]], ...]] = ContextVar(
    "deltune_conditions", default=()
)


@contextlib.contextmanager
def condition(owner: PassManager, facts: dict[str, torch.Tensor]) -> Iterator[None]:
    """Let the passes of a model in this context know facts of their rows, inside a `with` block."""
    token = _CONDITIONS.set((*_CONDITIONS.get(), (weakref.ref(owner), facts)))
    try:
        yield
    finally:
        _CONDITIONS.reset(token)


def open_scopes_here() -> set[Scope]:
    """Return the open scopes of all models in this context and thread: those that a forked process has."""
    return {carried.scope for carried in (*_SCOPES.get(), *_thread.scopes) if carried.scope is not None}


def retry_if_interrupted(change: Callable[[], T]) -> T:
    """Run a change whose steps may be repeated; if it is interrupted, finish it before the exception goes on."""
    try:
        return change()
    except BaseException:
        change()
        raise


class PassManager:
    """Tells the hooks of one tuned model which delta each row of the current forward pass uses."""

    def __init__(
        self, model: PreTrainedModel, anatomy: Anatomy, state: ModelState, default_assignment: RowAssignment
    ) -> None:
        self.model, self.anatomy, self.state = model, anatomy, state
        self.default_assignment = default_assignment  # what passes outside `rows()` and `disable()` use
        self.attention_configs: list[tuple[Any, str | None]] = []
        self.has_prefixes = False
        # the path of the projection to the vocabulary while some attached delta acts at it
        self.vocabulary: str | None = None
        self.modules = AttachedModules(model)
        self._reset()

    def _reset(self) -> None:
        self.compiled_pass = ForwardPass(self, self.default_assignment)  # of torch.compile
        # of passes without gradients, by the delta of each row and the edits that are left out
        self.kept_assignments: dict[tuple[tuple[str | None, ...], frozenset[Edit] | None], RowAssignment] = {}
        self.delta_cache = DeltaCache(self.anatomy, self.state)
        self._forget_threads(())
        _PASS_MANAGERS[id(self)] = self

    def _forget_threads(self, scopes: Sequence[Scope]) -> None:
        """Begin with no pass and nobody who waits or holds the lock, and with these scopes."""
        self.lock = PassLock()
        self.state.mutex = self.lock.mutex
        self._set_scopes(scopes)

    def _set_scopes(self, scopes: Sequence[Scope]) -> None:
        self._scopes = tuple(map(weakref.ref, scopes))  # replaced, not changed: threads read it without the mutex
        # for torch.compile, which cannot call `open_scopes`
        self.any_scopes, self.any_in_event_loop = len(scopes) > 0, any(scope.in_event_loop for scope in scopes)

    def open_scopes(self) -> list[Scope]:
        """Return the open scopes of the model, of all threads and tasks."""
        return [scope for scope in (reference() for reference in self._scopes) if scope is not None]

    def reset_after_fork(self) -> None:
        """Forget the passes, locks and scopes of other threads, which do not exist in the new process."""
        here = open_scopes_here()
        self._forget_threads([scope for scope in self.open_scopes() if scope in here])

    def __getstate__(self) -> dict[str, Any]:
        """Leave out running passes and scopes; what is in use here is in use in a copy."""
        excluded = ("lock", "compiled_pass", "_scopes", "kept_assignments", "delta_cache")
        state = {name: value for name, value in self.__dict__.items() if name not in excluded}
        return state | {"default_assignment": self.assignment()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

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
        """Return the assignment of the running pass, or outside of one of the pass that would begin here.

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
        carried = innermost_scope(self)
        scope = None if carried is None else carried.scope
        assignment = None if scope is None else scope.assignment
        return self.default_assignment if assignment is None else assignment

    def current_pass(self) -> ForwardPass:
        """Return the running pass, where hooks keep data for each other; outside of one, an object that is dropped."""
        if torch.compiler.is_dynamo_compiling():
            return self.compiled_pass
        return current_pass(self) or recomputation(self) or ForwardPass(self, self.default_assignment)

    # -- passes

    def trace(self, arguments: dict[str, Any]) -> None:
        """Check that a pass which torch.compile traces may run, without waiting."""
        assignment = self.assignment_of_new_pass()
        refuse_unclear(self, innermost_scope(self))
        assignment.check_batch(arguments)
        if self.state.placed_delta != assignment.placed_delta:
            raise DeltuneError(
                "a compiled forward pass cannot wait for other threads, and another thread is inside rows() or "
                "disable(), which needs other tensors in the model: run it after that, or do not compile"
            )
        self.update_prefix_attention()

    def recompute(
        self,
        assignment: RowAssignment,
        facts: dict[Any, torch.Tensor],
        function: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Run a part of the model for gradient checkpointing, with the facts of the forward pass.

        The first time it runs in the forward pass, and later, in the backward pass, in a pass of its own.
        """
        running = None if torch.compiler.is_dynamo_compiling() else current_pass(self)
        if torch.compiler.is_dynamo_compiling() or (running is not None and running.assignment is assignment):
            return function(*args, **kwargs)
        again = self.begin({}, assignment)
        again.facts = facts
        return self.run_and_end(again, function, args, kwargs)

    def generate(
        self, generate: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], in_threads: bool = False
    ) -> Any:
        """Run `generate` as one long pass, so that the deltas in use are the same from its first step to its last."""
        self.assignment_of_new_pass().check_prompts(args, kwargs)
        whole = self.begin({}, in_threads=in_threads)
        whole.generates = True
        return self.run_and_end(whole, generate, args, kwargs)

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
        carried = innermost_scope(self)
        forward_pass = ForwardPass(self, self.default_assignment, carried, innermost_pass())
        self._admit(forward_pass, lambda: self._choose(carried))
        result: T = self.run_and_end(forward_pass, read_locked, (), {})
        return result

    def begin(
        self, arguments: dict[str, Any], assignment: RowAssignment | None = None, in_threads: bool = False
    ) -> ForwardPass:
        """Begin a pass as soon as the model holds the tensors that it needs; end it by `run_and_end`."""
        carried, outer, enclosing = innermost_scope(self), current_pass(self), innermost_pass()
        facts = {name: fact for of, some in _CONDITIONS.get() if of() is self for name, fact in some.items()}
        if assignment is None and outer is not None and outer.scope is carried:
            nested = ForwardPass(self, outer.assignment, carried, enclosing)
            nested.facts = facts
            return nested
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
        forward_pass = ForwardPass(self, fixed or self.default_assignment, carried, enclosing, in_threads)
        forward_pass.facts = facts

        def choose() -> RowAssignment:
            if fixed is not None:
                return fixed
            chosen = self._choose(carried)
            chosen.check_batch(arguments)
            return chosen

        self.modules.check()
        follow_offloading(self.state, every_module=False)
        self.update_prefix_attention()
        self._admit(forward_pass, choose, outer, with_labels=arguments.get("labels") is not None)
        return forward_pass

    def _choose(self, carried: CarriedScope | None) -> RowAssignment:
        """Return what a pass uses that came in a scope, or in none; the scope may be left while the pass waits."""
        chosen = self.assignment_of_new_pass()
        refuse_unclear(self, carried)  # checked last, since the scope may be left at any moment
        return chosen

    def _admit(
        self,
        forward_pass: ForwardPass,
        choose: Callable[[], RowAssignment],
        outer: ForwardPass | None = None,
        with_labels: bool = True,
    ) -> None:
        """Wait until a pass may run, and put the tensors that it needs into the model."""

        def fits() -> bool:
            assignment = forward_pass.assignment = choose()
            same = not with_labels or assignment.labels == self.state.labels
            return same and self.state.placed_delta == assignment.placed_delta

        if outer is None:
            self.lock.admit(forward_pass, fits, lambda: self._place(forward_pass.assignment))
        else:
            with self.lock.mutex:
                forward_pass.moves_tensors = not fits()

    def _place(self, assignment: RowAssignment) -> None:
        self.state.place(assignment.placed_delta, assignment.labels)

    def run_and_end(
        self, forward_pass: ForwardPass, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call a function inside a pass that has begun, then end the pass."""
        if forward_pass.moves_tensors:
            return self._run_nested(forward_pass, call, args, kwargs)
        try:
            return run_in_pass(forward_pass, call, args, kwargs)
        finally:
            # interrupted, others would wait forever for this pass
            retry_if_interrupted(lambda: self._end(forward_pass))

    def _end(self, forward_pass: ForwardPass) -> None:
        with self.lock.mutex:
            self.lock.release(forward_pass)
            if not self.lock.running and not self.open_scopes():
                self._place(self.default_assignment)

    def _run_nested(
        self, forward_pass: ForwardPass, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a pass with other tensors than the pass around it has, and keep all other threads out meanwhile."""
        with self.lock.mutex:
            if self.lock.running > 1:  # they may wait for the pass around this one
                raise DeltuneError(
                    "a forward pass inside another one needs other tensors in the model (because of rows(), disable() "
                    "or use() of a delta that trains the model's own tensors), while other threads run the model"
                )
            before: tuple[str | None, HeadLabels] = self.state.placed_delta, self.state.labels
            try:
                self._place(forward_pass.assignment)
                return run_in_pass(forward_pass, call, args, kwargs)
            finally:
                retry_if_interrupted(lambda: self.state.place(*before))

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

    def enter_scope(self, scope: Scope) -> None:
        """Begin a scope, and put its tensors into the model if no pass is running."""
        with self.lock.mutex:
            follow_offloading(self.state, every_module=False)
            assignment = scope.make_assignment()  # raises before anything has changed
            self._set_scopes([*self.open_scopes(), scope])
            scope.open(assignment)
            self.update_model(assignment, scope.set_requires_grad)
            for group in assignment.groups if assignment.rows and scope.set_requires_grad else ():
                for delta in group.trained:
                    refuse_late_gradients(delta)

    def leave_scope(self, scope: Scope) -> None:
        with self.lock.mutex:
            self._set_scopes([other for other in self.open_scopes() if other is not scope])
            self.update_model(self.assignment_of_new_pass(), scope.set_requires_grad)

    def overridden_modules(self) -> set[str]:
        """The paths of the modules that run with tensors of deltas, in some scope or outside of all."""
        assignments = [self.default_assignment, *(scope.assignment for scope in self.open_scopes())]
        return {path for assignment in assignments if assignment is not None for path in assignment.tensors}

    def update_model(self, assignment: RowAssignment, set_requires_grad: bool = True) -> None:
        """Put the tensors of an assignment in place if no pass runs, and make all deltas in use trainable."""
        self._set_scopes(self.open_scopes())  # without those that were dropped
        scopes = [scope.assignment for scope in self.open_scopes() if scope.set_requires_grad]
        if not self.lock.running:
            self._place(assignment)
        if set_requires_grad:
            self.state.train_only(
                delta
                for a in (self.default_assignment, *scopes)
                if a is not None
                for group in a.groups
                for delta in group.trained
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

    def refuse_in_other_scopes(self, operation: str, names: Sequence[str], any_scope: bool = False) -> None:
        """Raise an error if a scope of another thread or task uses one of the deltas, or if there is any at all."""
        this_scope = current_scope(self)
        others = [scope.assignment for scope in self.open_scopes() if scope is not this_scope]
        if used := [name for name in names if any(a and a.rows and name in a.used.deltas for a in others)]:
            raise DeltuneError(
                f"{operation}: {', '.join(used)} is used inside rows() by another thread or task, which must leave "
                "it first"
            )
        if any_scope and others:
            raise DeltuneError(
                f"{operation}: another thread or task is inside rows() or disable(), which must be left first"
            )


class ModuleHook:
    """Hooks of torch at one module of the model, and at others that belong to it."""

    others: Sequence[nn.Module | None] = ()

    def __init__(self, passes: PassManager, path: str) -> None:
        self.passes, self.path, self.module = passes, path, passes.model.get_submodule(path)

    def remove(self) -> None:
        """Take the hooks off the modules."""
        for module in (self.module, *self.others):
            remove_hooks(module, self)


_PASS_MANAGERS: weakref.WeakValueDictionary[int, PassManager] = weakref.WeakValueDictionary()
"""By id, since the list of the values' references is made in one step, beside threads that attach."""


def reset_after_fork() -> None:
    """Reset every pass manager in a forked process."""
    for reference in _PASS_MANAGERS.valuerefs():
        passes = reference()
        if passes is not None:
            passes.reset_after_fork()
