"""The state of one forward pass: made when the model is called, dropped when that call returns or raises.

Nothing of a pass is kept on a module. What one hook notes for another lies in a `ForwardPass`, which a context variable
leads to, so that threads, asyncio tasks, nested calls and exceptions cannot see each other's. The call owns the pass;
everybody else refers to it weakly, so that whatever ends the call, a KeyboardInterrupt included, also ends the pass.

torch.compile cannot read context variables. While it traces, a pass's notes lie in one object of the handle (its
writes are undone by the graph itself), and scopes are read from the thread.
"""

from __future__ import annotations

import asyncio
import os
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
        scope: The `rows()` or `disable()` that the pass began in, or None.
        around: The pass, of any model, inside of which it runs.
        inputs: What another module read, for the edits that use it as x.
        prompt: What a prompt did at the entry of the stack, for its exit.
        states: The hidden states that were collected, by path of the stack's container.
        rows_of_batch: How many rows the batch has, for positions that are looked up once for all of them.
        report: How each attention served its prefix, by path.
    """

    def __init__(
        self,
        owner: object,
        assignment: RowAssignment,
        scope: Scope | None = None,
        around: ForwardPass | None = None,
        outer: ForwardPass | None = None,
    ) -> None:
        self.owner, self.assignment, self.scope, self.around = owner, assignment, scope, around
        self.inputs: dict[Any, torch.Tensor] = {}
        self.prompt: Any = None
        self.states: dict[str, list[torch.Tensor]] = {}
        self.rows_of_batch = 0
        self.report: dict[str, str] = {} if outer is None else outer.report
        self.restore: Any = None  # the tensors that stood in the model, if a nested pass needed others


_CURRENT: ContextVar[weakref.ReferenceType[ForwardPass] | None] = ContextVar("deltune_pass", default=None)
_SCOPES: ContextVar[Entered] = ContextVar("deltune_scopes", default=())


class _Thread(threading.local):
    scopes: Entered = ()
    """The scopes entered in this thread, for torch.compile."""
    backward: tuple[int, weakref.ReferenceType[_BackwardBegins]] | None = None
    """The backward pass under way, and what knows what its forward pass used."""


_thread = _Thread()


def innermost_pass() -> ForwardPass | None:
    """The innermost pass of any model in this context."""
    reference = _CURRENT.get()
    return None if reference is None else reference()


def current_pass(owner: object) -> ForwardPass | None:
    """The innermost pass of a model in this context; `owner` is what owns the passes of that model."""
    innermost = innermost_pass()
    while innermost is not None and innermost.owner is not owner:
        innermost = innermost.around
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

    scopes_of_tasks: int

    def enter_scope(self, scope: Scope, make: Callable[[], RowAssignment]) -> None: ...

    def leave_scope(self, scope: Scope) -> None: ...


class Scope:
    """A `with` block in which rows use given deltas: in the context that entered it, and nowhere else.

    Args:
        value: What `with ... as` gives.
        make: Makes what is in use inside; what it raises is raised before anything changes.

    Threads and asyncio tasks each have their own. It holds as long as the block runs: whatever interrupts its exit, it
    is over when the block is.
    """

    def __init__(self, owner: Scopes, value: Any, make: Callable[[], RowAssignment]) -> None:
        self.owner, self.value, self.make = owner, value, make
        self.assignment: RowAssignment | None = None
        self.in_event_loop = False

    def __enter__(self) -> Any:
        if self.assignment is not None:
            raise DeltuneError("this rows() or disable() is entered already; call it again for another block")
        with suppress(RuntimeError):
            self.in_event_loop = asyncio.get_running_loop() is not None
        try:
            self.owner.enter_scope(self, self.make)
            return self.value
        except BaseException:
            self._leave()
            raise

    def open(self, assignment: RowAssignment) -> None:
        """Hold from now on."""
        _SCOPES.set((*_alive(_SCOPES.get()), weakref.ref(self)))
        _thread.scopes = (*_alive(_thread.scopes), weakref.ref(self))
        self.assignment = assignment

    def close(self) -> None:
        """Hold no longer."""
        self.assignment = None
        _SCOPES.set(_alive(_SCOPES.get()))
        _thread.scopes = _alive(_thread.scopes)

    def __exit__(self, *exception: object) -> None:
        try:
            self._leave()
        except BaseException:  # interrupted: every step may be repeated
            self._leave()
            raise

    def _leave(self) -> None:
        self.close()
        self.owner.leave_scope(self)


Entered = tuple[weakref.ReferenceType[Scope], ...]
"""Scopes, the innermost last. Whoever was interrupted while leaving one drops it, and with it the scope."""


def _alive(entered: Entered) -> Entered:
    return tuple(ref for ref in entered if (scope := ref()) is not None and scope.assignment is not None)


def current_scope(owner: Scopes) -> Scope | None:
    """The innermost scope of a model in this context.

    Raises:
        DeltuneError: in torch.compile, which sees the scopes of the thread alone, while one is open in an event loop.
    """
    entered = _SCOPES.get() if not torch.compiler.is_dynamo_compiling() else _thread.scopes
    if torch.compiler.is_dynamo_compiling() and owner.scopes_of_tasks:
        raise DeltuneError(
            "a compiled model cannot see which asyncio task runs it: enter rows() or disable() in the function that "
            "calls the model, and run that in a thread (asyncio.to_thread)"
        )
    for reference in entered[::-1]:
        scope = reference()
        if scope is not None and scope.owner is owner and scope.assignment is not None:
            return scope
    return None


# -- gradient checkpointing: layers computed again in the backward pass


class _BackwardBegins:
    """A hook on an output's node: from now on this thread computes the backward pass of a known forward pass."""

    def __init__(self, owner: object, assignment: RowAssignment) -> None:
        self.owner, self.assignment = weakref.ref(owner), assignment

    def __call__(self, gradients: Any) -> None:
        number = backward_id()
        if number is not None:
            _thread.backward = (number, weakref.ref(self))  # the graph holds it as long as it is needed


def remember_for_backward(owner: object, assignment: RowAssignment, output: Any) -> None:
    """Let layers that are computed again in the backward pass of `output` use what they used in the forward pass."""
    hook = _BackwardBegins(owner, assignment)
    for tensor in tensors_in(output):
        if tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(hook)


def recomputed_assignment(owner: object) -> RowAssignment | None:
    """What the forward pass used whose backward pass this thread works on, or None."""
    known = _thread.backward
    hook = None if known is None or known[0] != backward_id() else known[1]()
    return None if hook is None or hook.owner() is not owner else hook.assignment


# -- who may run beside whom

_POLL = 0.05  # seconds; a pass that was interrupted tells nobody, it is only gone


class _Ticket:
    """A place in the queue; whoever was interrupted while waiting leaves it by dropping the ticket."""


class PassLock:
    """Admits passes that need the same tensors in the model side by side, and changes when no pass runs, in turn."""

    def __init__(self) -> None:
        self.reset()
        _LOCKS.add(self)

    def reset(self) -> None:
        self._borrowed: weakref.ReferenceType[ForwardPass] | None = None  # a nested pass that moved tensors
        self.mutex = threading.RLock()
        self._changed = threading.Condition(self.mutex)
        self._running: weakref.WeakSet[ForwardPass] = weakref.WeakSet()
        self._queue: list[weakref.ReferenceType[_Ticket]] = []

    @property
    def idle(self) -> bool:
        return len(self._running) == 0

    def admit(self, forward_pass: ForwardPass, fits: Callable[[], bool], prepare: Callable[[], None]) -> None:
        """Wait until the model holds the tensors that a pass needs, or until it can be given them."""
        with self.mutex:
            if self._queue or self._lent() or not fits():
                self._wait(lambda: not self._lent() and (fits() or self.idle))
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
            if self._queue or not self.idle:
                self._wait(lambda: self.idle)
            yield

    def _lent(self) -> bool:
        """Whether a nested pass has other tensors in the model than the pass around it, and will put those back."""
        return self._borrowed is not None and self._borrowed() is not None

    def lend(self, nested: ForwardPass | None) -> None:
        """Admit nobody until a nested pass has put back what it moved; None: it has."""
        self._borrowed = None if nested is None else weakref.ref(nested)
        self._changed.notify_all()

    def refuse_others(self, outer: ForwardPass) -> None:
        """Check that no pass runs but those that a nested one is inside of; it must not wait for the others."""
        around: list[ForwardPass] = []
        each: ForwardPass | None = outer
        while each is not None:
            around.append(each)
            each = each.around
        if any(running not in around for running in list(self._running)):
            raise DeltuneError(
                "a pass inside of another one needs other tensors in the model than it does (rows(), disable() or "
                "use() of a delta that trains the model's own tensors), and other threads run the model meanwhile"
            )

    def _wait(self, ready: Callable[[], bool]) -> None:
        ticket = _Ticket()
        place = weakref.ref(ticket)
        self._queue.append(place)
        try:
            while not (self._first() is ticket and ready()):
                self._changed.wait(_POLL)
        finally:
            self._queue = [ref for ref in self._queue if ref is not place]
            self._changed.notify_all()

    def _first(self) -> _Ticket | None:
        self._queue = [ref for ref in self._queue if ref() is not None]
        return self._queue[0]() if self._queue else None


_LOCKS: weakref.WeakSet[PassLock] = weakref.WeakSet()


def _after_fork() -> None:
    """The threads that held a lock, or ran a pass, are not in the new process."""
    for lock in list(_LOCKS):
        lock.reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
