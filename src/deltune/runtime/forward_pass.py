"""The state of one forward pass: made when the model is called, dropped when that call returns or raises.

Nothing of a pass is kept on a module. What one hook notes for another lies in a `ForwardPass`, which a context variable
leads to, so that threads, asyncio tasks, nested calls and exceptions cannot see each other's. The call owns the pass;
everybody else refers to it weakly, so that whatever ends the call, a KeyboardInterrupt included, also ends the pass.

torch.compile cannot read context variables. While it traces, a pass's notes lie in one object of the handle (its
writes are undone by the graph itself), and scopes are read from the thread.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, Protocol

import torch

from ..anatomy.tracing import tensors_in
from ..compat import backward_id
from ..errors import DeltuneError
from .row_assignment import RowAssignment


class ForwardPass:
    """What the hooks of one pass note for each other.

    Args:
        outer: The pass of the same model that it is a part of: the encoder's inside the model's, for example.

    Attributes:
        assignment: Which delta each row uses, fixed for the whole pass.
        scope: The `rows()` or `disable()` that the pass began in, or None. The pass goes on with what it began with,
            also when that is left elsewhere meanwhile.
        around: The pass, of any model, inside of which it runs.
        inputs: What another module read, for the edits that use it as x.
        prompt: What a prompt did at the entry of the stack, for its exit.
        states: The hidden states that were collected, by path of the stack's container.
        rows_of_batch: How many rows the batch has, for positions that are looked up once for all of them.
        report: How each attention served its prefix, by path.
        number: Its turn: those who came to the lock before it have lower ones.
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
        self.report: dict[str, str] = {} if outer is None else outer.report
        self.restore: Any = None  # the tensors that stood in the model, if a nested pass needed others
        self.number = 0


_CURRENT: ContextVar[weakref.ReferenceType[ForwardPass] | None] = ContextVar("deltune_pass", default=None)
_SCOPES: ContextVar[Entered] = ContextVar("deltune_scopes", default=())


class _Thread(threading.local):
    scopes: Entered = ()
    """The scopes entered in this thread, for torch.compile."""


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
    """Call something inside of a pass."""
    token = _CURRENT.set(weakref.ref(forward_pass))
    try:
        return call(*args, **kwargs)
    finally:
        _CURRENT.reset(token)


class Scopes(Protocol):
    """What owns the passes of a model. scopes_of_tasks: how many of its scopes were entered in an event loop."""

    scopes_in_event_loops: int

    def enter_scope(self, scope: Scope, make_assignment: Callable[[], RowAssignment]) -> None: ...

    def leave_scope(self, scope: Scope) -> None: ...


class Scope:
    """A `with` block in which rows use given deltas: in the context that entered it, and nowhere else.

    Args:
        value: What `with ... as` gives.
        make: Makes what is in use inside; what it raises is raised before anything changes.

    Threads and asyncio tasks each have their own. It holds as long as the block runs: whatever interrupts its exit, it
    is over when the block is.
    """

    def __init__(self, owner: Scopes, value: Any, make_assignment: Callable[[], RowAssignment]) -> None:
        self.owner, self.value, self.make_assignment = owner, value, make_assignment
        self.assignment: RowAssignment | None = None
        self.carried: CarriedScope | None = None
        self.in_event_loop = False

    def __enter__(self) -> Any:
        if self.assignment is not None:
            raise DeltuneError("this rows() or disable() is entered already; call it again for another block")
        with suppress(RuntimeError):
            self.in_event_loop = asyncio.get_running_loop() is not None
        try:
            self.owner.enter_scope(self, self.make_assignment)
            return self.value
        except BaseException:
            self._leave()
            raise

    def open(self, assignment: RowAssignment) -> None:
        """Hold from now on."""
        self.carried = CarriedScope(self)
        _SCOPES.set((*self._others(_SCOPES.get()), self.carried))
        _thread.scopes = (*self._others(_thread.scopes), self.carried)
        self.assignment = assignment

    def close(self) -> None:
        """Hold no longer."""
        _SCOPES.set(self._others(_SCOPES.get()))
        _thread.scopes = self._others(_thread.scopes)
        if self.carried is not None:
            self.carried.closed = True  # what still carries it is another context
        self.assignment = None

    def _others(self, entered: Entered) -> Entered:
        """What a context carries besides; a scope that was dropped when its exit was interrupted counts no more."""
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
    """What a context carries of a scope: threads and tasks that are given a copy of it may outlive the scope.

    Whoever was interrupted while leaving a scope drops it. Then it is neither open nor closed, and counts no more.

    Attributes:
        closed: The scope was left. The context that left it carries it no longer, so whoever does is another one.
    """

    def __init__(self, scope: Scope) -> None:
        self.scope, self.owner = weakref.ref(scope), weakref.ref(scope.owner)
        self.closed = False

    @property
    def assignment(self) -> RowAssignment | None:
        """What is in use inside while the scope is open, else None."""
        scope = self.scope()
        return None if scope is None else scope.assignment


Entered = tuple[CarriedScope, ...]
"""Scopes, the innermost last."""


def carried_scope(owner: Scopes) -> CarriedScope | None:
    """The innermost scope of a model that this context carries, be it open or left elsewhere.

    Raises:
        DeltuneError: in torch.compile, which sees the scopes of the thread alone, while one is open in an event loop.
    """
    entered = _SCOPES.get() if not torch.compiler.is_dynamo_compiling() else _thread.scopes
    if torch.compiler.is_dynamo_compiling() and owner.scopes_in_event_loops:
        raise DeltuneError(
            "a graph that torch.compile traces cannot see which asyncio task runs it: enter rows() or disable() in the "
            "function that calls the model, and run that in a thread (asyncio.to_thread)"
        )
    for carried in entered[::-1]:
        if carried.owner() is owner and (carried.closed or carried.assignment is not None):
            return carried
    return None


def current_scope(owner: Scopes) -> Scope | None:
    """The innermost open scope of a model in this context."""
    for carried in _SCOPES.get()[::-1]:
        if carried.owner() is owner and carried.assignment is not None:
            return carried.scope()
    return None


def refuse_closed(carried: CarriedScope | None) -> None:
    """Check that the scope in which a pass would begin was not left elsewhere."""
    if carried is not None and carried.closed:
        raise DeltuneError(
            "this thread or task was started inside of a rows() or disable() that has been left meanwhile, so it is "
            "not clear which delta is meant: enter rows() or disable() around the pass itself, stay in the block until "
            "the thread or task is done, or call use() here to use one delta outside of any block"
        )


def forget_closed(owner: Scopes) -> None:
    """Let passes in this context use what is in use, instead of refusing them for scopes that were left elsewhere."""
    _SCOPES.set(tuple(carried for carried in _SCOPES.get() if not (carried.closed and carried.owner() is owner)))
    _thread.scopes = tuple(carried for carried in _thread.scopes if not (carried.closed and carried.owner() is owner))


def open_scopes_here() -> set[Scope]:
    """The open scopes, of any model, of this context and of this thread: all that a forked process has."""
    carried = (carried.scope() for carried in (*_SCOPES.get(), *_thread.scopes))
    return {scope for scope in carried if scope is not None and scope.assignment is not None}


# -- modules that are computed again in the backward pass by a checkpoint function that is not transformers'


class _BackwardBegins:
    """A hook on an output's node: from now on its backward pass is that of a known forward pass."""

    def __init__(self, owner: object, assignment: RowAssignment) -> None:
        self.owner, self.assignment = weakref.ref(owner), assignment

    def __call__(self, gradients: Any) -> None:
        number = backward_id()
        if number is not None:
            _BACKWARD[number, id(self.owner())] = self


_BACKWARD: weakref.WeakValueDictionary[tuple[int, int], _BackwardBegins] = weakref.WeakValueDictionary()
"""What began the backward passes under way, by their numbers and the models'. The autograd engine has a thread for each
device, and all of them work on one backward pass. The graph holds a hook as long as it is needed."""


def remember_for_backward(owner: object, assignment: RowAssignment, output: Any) -> None:
    """Let modules that are computed again in the backward pass of `output` use what they used in the forward pass."""
    hook = _BackwardBegins(owner, assignment)
    for tensor in tensors_in(output):
        if tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(hook)


def recomputed_assignment(owner: object) -> RowAssignment | None:
    """What the forward pass of a model used whose backward pass this thread works on, or None."""
    number = backward_id()
    hook = None if number is None else _BACKWARD.get((number, id(owner)))
    return None if hook is None or hook.owner() is not owner else hook.assignment


# -- who may run beside whom

_POLL = 0.05  # seconds; a pass that was interrupted tells nobody, it is only gone


class _Ticket:
    """A place in the queue; whoever was interrupted while waiting leaves it by dropping the ticket."""

    def __init__(self, number: int) -> None:
        self.number = number


class PassLock:
    """Admits passes that need the same tensors in the model side by side, and changes when no pass runs, in turn.

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
        """Begin anew: in a new process the threads that held a lock, or ran a pass, are not there."""
        self._nested: weakref.ReferenceType[ForwardPass] | None = None  # a nested pass that moved tensors
        self.mutex = threading.RLock()
        self._block: weakref.ReferenceType[_Ticket] | None = None  # of alone(), which ends with it if interrupted
        self._changed = threading.Condition(self.mutex)
        self._running: weakref.WeakSet[ForwardPass] = weakref.WeakSet()
        self._queue: list[weakref.ReferenceType[_Ticket]] = []
        self._numbers = itertools.count()

    @property
    def idle(self) -> bool:
        return len(self._running) == 0

    @property
    def held_by_change(self) -> bool:
        """Whether the thread that holds the mutex is inside of alone()."""
        return self._block is not None and self._block() is not None

    def admit(
        self, forward_pass: ForwardPass, fits: Callable[[], bool], prepare: Callable[[], None], joins: bool = True
    ) -> None:
        """Wait until the model holds the tensors that a pass needs, or until it can be given them.

        Args:
            joins: The pass may join those that run before its turn.
        """
        with self.mutex:
            forward_pass.number = next(self._numbers)
            if self._queue or self._nested_pass_runs() or not fits():

                def ready(first: bool) -> bool:
                    if self._nested_pass_runs():
                        return False
                    return (first and self.idle) or ((first or (joins and self._may_be_waited_for())) and fits())

                self._wait(forward_pass.number, ready)
                if not fits():
                    prepare()
            self._running.add(forward_pass)

    def release(self, forward_pass: ForwardPass) -> bool:
        """Whether the pass was admitted, which it is no more."""
        with self.mutex:
            if forward_pass not in self._running:
                return False
            self._running.discard(forward_pass)
            if self.idle and self._queue:
                self._changed.notify_all()
            return True

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until no pass runs, and let none begin inside the block. The caller must not be inside of a pass."""
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
        """Whether a nested pass has other tensors in the model than the pass around it, and will put those back."""
        return self._nested is not None and self._nested() is not None

    def set_nested_pass(self, nested: ForwardPass | None) -> None:
        """Admit nobody until a nested pass has put back what it moved; None: it has."""
        self._nested = None if nested is None else weakref.ref(nested)
        self._changed.notify_all()

    def refuse_others(self, outer: ForwardPass) -> None:
        """Check that no pass runs but those that a nested one is inside of; it must not wait for the others."""
        enclosing: list[ForwardPass] = []
        each: ForwardPass | None = outer
        while each is not None:
            enclosing.append(each)
            each = each.enclosing
        if any(running not in enclosing for running in list(self._running)):
            raise DeltuneError(
                "a pass inside of another one needs other tensors in the model than it does (rows(), disable() or "
                "use() of a delta that trains the model's own tensors), and other threads run the model meanwhile"
            )

    def _may_be_waited_for(self) -> bool:
        """Whether a newcomer may be what a running pass waits for that came before the first of the queue."""
        first = self._first()
        return first is not None and any(running.number < first.number for running in list(self._running))

    def _wait(self, number: int, ready: Callable[[bool], bool]) -> None:
        """Queue until what is asked for is ready. ready: is told whether it is the first of the queue."""
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
