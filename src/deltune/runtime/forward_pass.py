"""The state of one forward pass, the scopes of `rows()` and `disable()`, and the lock that orders passes and changes.

Nothing of a pass is kept on a module. What one hook keeps for another is in a `ForwardPass`, which a context variable
refers to, so that threads, asyncio tasks, nested calls and exceptions cannot see each other's. The call of the model
owns the pass and everything else refers to it weakly, so whatever ends the call, a KeyboardInterrupt included, ends the
pass.

torch.compile cannot read context variables. While it traces, the data of a pass is in one object of the handle (the
graph undoes its own writes), and scopes are read from the thread.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, Protocol

import torch

from .._context import descends_from_import
from ..anatomy.tracing import tensors_in
from ..compat import backward_id
from ..errors import DeltuneError
from .row_assignment import RowAssignment


class ForwardPass:
    """One forward pass: which delta each row uses, and what its hooks keep for each other.

    Attributes:
        assignment: Which delta each row uses, fixed for the whole pass.
        scope: The `rows()` or `disable()` that the pass began in, or None. The pass keeps its assignment also when that
            scope is left elsewhere in the meantime.
        enclosing: The pass, of any model, inside of which it runs.
        inputs: The inputs of other modules, for the edits that use them as x.
        prompt: What a prompt did at the entry of the stack, for its exit.
        states: The hidden states that were collected, by path of the stack's container.
        batch_size: How many rows the batch has, for positions that are looked up once for all of them.
        called_vocabulary: Whether the projection to the vocabulary was called, where some delta acts at it.
        number: Its turn at the lock; those who came before have lower numbers.
        in_threads: Whether it runs its passes in other threads and waits for them.
    """

    def __init__(
        self,
        owner: object,
        assignment: RowAssignment,
        scope: CarriedScope | None = None,
        enclosing: ForwardPass | None = None,
        outer: ForwardPass | None = None,
    ) -> None:
        self.owner, self.assignment, self.scope, self.enclosing = owner, assignment, scope, enclosing
        self.inputs: dict[Any, torch.Tensor] = {}
        self.prompt: Any = None
        self.states: dict[str, list[torch.Tensor]] = {}
        self.batch_size = 0
        self.called_vocabulary = False
        self.restore: Any = None  # the tensors and labels to put back, if a nested pass replaced them
        self.number = 0
        self.in_threads = False


_CURRENT: ContextVar[weakref.ReferenceType[ForwardPass] | None] = ContextVar("deltune_pass", default=None)
_SCOPES: ContextVar[Entered] = ContextVar("deltune_scopes", default=())
_CHOSEN: ContextVar[Owners] = ContextVar("deltune_chosen", default=())


class _Thread(threading.local):
    """For torch.compile, what the context variables hold of this thread."""

    scopes: Entered = ()
    chosen: Owners = ()


_thread = _Thread()


def innermost_pass() -> ForwardPass | None:
    """The innermost pass of any model in this context."""
    reference = _CURRENT.get()
    return None if reference is None else reference()


def current_pass(owner: object) -> ForwardPass | None:
    """The innermost pass of a model in this context; `owner` is what owns the passes of that model."""
    innermost = innermost_pass()
    while innermost is not None and innermost.owner is not owner:
        innermost = innermost.enclosing
    return innermost


def run_in_pass(forward_pass: ForwardPass, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function inside a pass."""
    token = _CURRENT.set(weakref.ref(forward_pass))
    try:
        return call(*args, **kwargs)
    finally:
        _CURRENT.reset(token)


class Scopes(Protocol):
    """The part of `PassManager` that scopes use.

    Attributes:
        scopes_in_event_loops: How many of them were entered in an event loop.
        any_scopes: Whether there are any, for torch.compile, which cannot call `open_scopes`.
    """

    scopes_in_event_loops: int
    any_scopes: bool

    def open_scopes(self) -> list[Scope]: ...

    def passes_in_threads(self) -> bool: ...

    def enter_scope(self, scope: Scope, make_assignment: Callable[[], RowAssignment]) -> None: ...

    def leave_scope(self, scope: Scope) -> None: ...


class Scope:
    """A `with` block in which rows use given deltas, in the thread or asyncio task that entered it and nowhere else.

    It holds as long as the block runs: even if its exit is interrupted, it ends with the block.
    """

    def __init__(
        self, owner: Scopes, value: Any, make_assignment: Callable[[], RowAssignment], set_requires_grad: bool = True
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
        with suppress(RuntimeError):
            self.in_event_loop = asyncio.get_running_loop() is not None
        try:
            self.owner.enter_scope(self, self.make_assignment)
            return self.value
        except BaseException:
            self._leave()
            raise

    def open(self, assignment: RowAssignment) -> None:
        """Begin to hold."""
        self.thread = threading.get_ident()
        self.carried = CarriedScope(self)
        _SCOPES.set((*self._others(_SCOPES.get()), self.carried))
        _thread.scopes = (*self._others(_thread.scopes), self.carried)
        self.assignment = assignment

    def close(self) -> None:
        """Stop holding."""
        _SCOPES.set(self._others(_SCOPES.get()))
        _thread.scopes = self._others(_thread.scopes)
        if self.carried is not None:
            self.carried.closed = True  # only other contexts carry it from now on
        self.assignment = None

    def _others(self, entered: Entered) -> Entered:
        """The other scopes of a context, without those that were dropped when their exit was interrupted."""
        return tuple(
            carried
            for carried in entered
            if carried is not self.carried and (carried.closed or carried.assignment is not None)
        )

    def __exit__(self, *exception: object) -> None:
        try:
            self._leave()
        except BaseException:  # interrupted: every step may be repeated
            self._leave()
            raise

    def _leave(self) -> None:
        self.close()
        self.owner.leave_scope(self)


class CarriedScope:
    """A context's reference to a scope. Threads and tasks that copy the context may outlive the scope.

    A scope whose exit was interrupted is dropped; its reference is then neither open nor closed, and is ignored.

    Attributes:
        closed: Whether the scope was left. The context that left it has no reference any more, so only others have.
    """

    def __init__(self, scope: Scope) -> None:
        self.scope, self.owner = weakref.ref(scope), weakref.ref(scope.owner)
        self.closed = False

    @property
    def assignment(self) -> RowAssignment | None:
        """The assignment inside the scope while it is open, else None."""
        scope = self.scope()
        return None if scope is None else scope.assignment


Entered = tuple[CarriedScope, ...]
"""Scopes, the innermost last."""

Owners = tuple[weakref.ref[Scopes], ...]
"""Models for which a context chose what is in use."""


def carried_scope(owner: Scopes) -> CarriedScope | None:
    """Return the innermost scope of a model that this context refers to, open or left elsewhere."""
    entered = _SCOPES.get() if not torch.compiler.is_dynamo_compiling() else _thread.scopes
    if torch.compiler.is_dynamo_compiling() and owner.scopes_in_event_loops:
        raise DeltuneError(
            "code that torch.compile traces cannot see which asyncio task runs it: enter rows() or disable() in the "
            "function that calls the model, and run that in a thread (asyncio.to_thread)"
        )
    for carried in entered[::-1]:
        if carried.owner() is owner and (carried.closed or carried.assignment is not None):
            return carried
    return None


def current_scope(owner: Scopes) -> Scope | None:
    """Return the innermost open scope of a model in this context."""
    for carried in _SCOPES.get()[::-1]:
        if carried.owner() is owner and carried.assignment is not None:
            return carried.scope()
    return None


def refuse_unclear(owner: Scopes, carried: CarriedScope | None) -> None:
    """Raise an error where it is unclear which delta a pass that begins here, in a scope or in none, should use."""
    if carried is None:
        _refuse_unknown_thread(owner)
    elif carried.closed:
        raise DeltuneError(
            "this thread or task was started inside a rows() or disable() block that has been left in the meantime, so "
            "it is unclear which delta it should use: enter rows() or disable() around the pass itself, stay in the "
            "block until the thread or task is done, or call use() here to use one delta outside of any block"
        )


def _refuse_unknown_thread(owner: Scopes) -> None:
    """Raise an error in a thread that may have been given its work inside a scope of another thread.

    Python hands a thread no context variables, so such a thread looks like one that has nothing to do with the scope.
    """
    if torch.compiler.is_dynamo_compiling():
        chosen, in_other_thread = _thread.chosen, owner.any_scopes
    else:
        here = threading.get_ident()
        chosen, in_other_thread = _CHOSEN.get(), any(scope.thread != here for scope in owner.open_scopes())
        in_other_thread = in_other_thread and not descends_from_import.get() and not owner.passes_in_threads()
    if in_other_thread and not any(reference() is owner for reference in chosen):
        raise DeltuneError(
            "another thread is inside rows() or disable(), which Python does not pass on to the threads and pools that "
            "it uses, so it is unclear which delta this thread should use: enter rows() or disable() in the function "
            "that runs here, or run it by contextvars.copy_context().run, which hands on the block. A thread that has "
            "nothing to do with the block can also call use() before"
        )


def choose_here(owner: Scopes) -> None:
    """Let passes in this context that are in no scope use what is in use, whatever scopes others are in or left."""
    _SCOPES.set(tuple(carried for carried in _SCOPES.get() if not (carried.closed and carried.owner() is owner)))
    _thread.scopes = tuple(carried for carried in _thread.scopes if not (carried.closed and carried.owner() is owner))
    others = tuple(reference for reference in _CHOSEN.get() if reference() not in (None, owner))
    _CHOSEN.set((*others, weakref.ref(owner)))
    _thread.chosen = _CHOSEN.get()


def open_scopes_here() -> set[Scope]:
    """Return the open scopes of all models in this context and thread: those that a forked process has."""
    carried = (carried.scope() for carried in (*_SCOPES.get(), *_thread.scopes))
    return {scope for scope in carried if scope is not None and scope.assignment is not None}


# -- modules that a checkpoint function other than transformers' recomputes in the backward pass


class _BackwardBegins:
    """A hook on the graph node of an output, which records whose backward pass begins there."""

    def __init__(self, owner: object, assignment: RowAssignment) -> None:
        self.owner, self.assignment = weakref.ref(owner), assignment
        self.recomputation = ForwardPass(None, assignment)

    def __call__(self, gradients: Any) -> None:
        number = backward_id()
        if number is not None:
            self.recomputation = ForwardPass(None, self.assignment)  # with nothing from an earlier backward pass
            _BACKWARD[number, id(self.owner())] = self


_BACKWARD: weakref.WeakValueDictionary[tuple[int, int], _BackwardBegins] = weakref.WeakValueDictionary()
"""The hooks of the running backward passes, by the number of the backward pass and the id of the model's pass manager.

The autograd engine has a thread for each device, which all work on one backward pass. The graph keeps a hook alive.
"""


def remember_for_backward(owner: object, assignment: RowAssignment, output: Any) -> None:
    """Let modules that are recomputed in the backward pass of `output` use the assignment of the forward pass."""
    hook = _BackwardBegins(owner, assignment)
    for tensor in tensors_in(output):
        if tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(hook)


def recomputation(owner: object) -> ForwardPass | None:
    """Return a pass with the assignment of the forward pass whose backward pass this thread runs, or None.

    It is the same object while that lasts, so that hooks may keep data for each other where no other pass begins.
    """
    number = backward_id()
    hook = None if number is None else _BACKWARD.get((number, id(owner)))
    return None if hook is None or hook.owner() is not owner else hook.recomputation


# -- which passes may run at the same time

_POLL = 0.05  # seconds; a pass that was interrupted notifies nobody


class _Ticket:
    """A place in the queue; a thread that is interrupted while it waits leaves the queue by dropping the ticket."""

    def __init__(self, number: int) -> None:
        self.number = number


class PassLock:
    """Lets passes that need the same tensors in the model run at the same time, and changes when no pass runs, in turn.

    A pass may wait for another one that it started in another thread: `generate_batch` does, and a user's hook may.
    So a pass that needs the tensors that stand in the model does not wait for the queue as long as some pass runs that
    came before the first of the queue, for the newcomer may be what that one waits for. This does not starve the
    queue: it has to wait for those passes in any case, and once the last of them has returned nobody joins any more.

    A pass that joined in this way and then starts another one in a helper thread is not among those that came before,
    so the helper may have to wait for the queue, and the queue for it. What is known to run its passes in other
    threads therefore never joins but waits its turn, and a hook's helper thread is safe in any case if it is run by
    `contextvars.copy_context().run`: what it runs is then a part of the pass around it, which takes no lock.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start without holders and passes: the threads that had them do not exist in a forked process."""
        self._nested: weakref.ReferenceType[ForwardPass] | None = None  # the nested pass that moved tensors
        self.mutex = threading.RLock()
        self._block: weakref.ReferenceType[_Ticket] | None = (
            None  # of alone(); it also ends when its holder is interrupted
        )
        self._changed = threading.Condition(self.mutex)
        self._running: weakref.WeakSet[ForwardPass] = weakref.WeakSet()
        self._queue: list[weakref.ReferenceType[_Ticket]] = []
        self._numbers = itertools.count()

    @property
    def idle(self) -> bool:
        """Whether no pass runs."""
        return len(self._running) == 0

    @property
    def runs_in_threads(self) -> bool:
        """Whether a pass runs that runs its own passes in other threads."""
        with self.mutex:  # passes that begin meanwhile would change the set while it is read
            return any(running.in_threads for running in list(self._running))

    @property
    def held_by_change(self) -> bool:
        """Whether the thread that holds the mutex is inside `alone()`."""
        return self._block is not None and self._block() is not None

    def admit(self, forward_pass: ForwardPass, fits: Callable[[], bool], prepare: Callable[[], None]) -> None:
        """Wait until the model holds the tensors that a pass needs, or until they can be put there."""
        with self.mutex:
            forward_pass.number = next(self._numbers)
            if self._queue or self._nested_pass_runs() or not fits():

                def ready(first: bool) -> bool:
                    if self._nested_pass_runs():
                        return False
                    joins = not forward_pass.in_threads and self._may_be_waited_for()
                    return (first and self.idle) or ((first or joins) and fits())

                self._wait(forward_pass.number, ready)
                if not fits():
                    prepare()
            self._running.add(forward_pass)

    def release(self, forward_pass: ForwardPass) -> bool:
        """End the admission of a pass; return whether it was admitted."""
        with self.mutex:
            if forward_pass not in self._running:
                return False
            self._running.discard(forward_pass)
            if self.idle and self._queue:
                self._changed.notify_all()
            return True

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until no pass runs, and let none begin inside the block. The caller must not be inside a pass."""
        with self.mutex:
            if self.held_by_change:
                yield
                return
            if self._queue or not self.idle:
                self._wait(next(self._numbers), lambda first: first and self.idle)
            block = _Ticket(0)
            try:
                self._block = weakref.ref(block)
                yield
            finally:
                self._block = None

    def _nested_pass_runs(self) -> bool:
        """Whether a nested pass runs that has put other tensors into the model than the pass around it needs."""
        return self._nested is not None and self._nested() is not None

    def set_nested_pass(self, nested: ForwardPass | None) -> None:
        """Admit no pass until a nested pass has put the tensors back; None means that it has."""
        self._nested = None if nested is None else weakref.ref(nested)
        self._changed.notify_all()

    def refuse_others(self, outer: ForwardPass) -> None:
        """Raise an error if passes run other than those around a nested one, which must not wait for them."""
        enclosing: list[ForwardPass] = []
        current: ForwardPass | None = outer
        while current is not None:
            enclosing.append(current)
            current = current.enclosing
        if any(running not in enclosing for running in list(self._running)):
            raise DeltuneError(
                "a forward pass inside another one needs other tensors in the model (because of rows(), disable() or "
                "use() of a delta that trains the model's own tensors), while other threads run the model"
            )

    def _may_be_waited_for(self) -> bool:
        """Whether a running pass that came before the first of the queue may be waiting for a newcomer."""
        first = self._first()
        return first is not None and any(running.number < first.number for running in list(self._running))

    def _wait(self, number: int, ready: Callable[[bool], bool]) -> None:
        """Wait in the queue until `ready`, which is told whether it is first, returns True."""
        ticket = _Ticket(number)
        place = weakref.ref(ticket)
        self._queue.append(place)
        try:
            while not ready(self._first() is ticket):
                self._changed.wait(_POLL)
        finally:
            self._queue = [ref for ref in self._queue if ref is not place]
            self._changed.notify_all()

    def _first(self) -> _Ticket | None:
        self._queue = [ref for ref in self._queue if ref() is not None]
        return self._queue[0]() if self._queue else None
