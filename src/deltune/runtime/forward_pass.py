"""The state of one forward pass, what a backward pass computes again, and the lock of passes and changes.

Nothing of a pass is kept on a module. What one hook keeps for another is in a `ForwardPass`, which a context variable
refers to, so that threads, asyncio tasks, nested calls and exceptions cannot see each other's. The call of the model
owns the pass and everything else refers to it weakly, so whatever ends the call, a KeyboardInterrupt included, ends the
pass.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from ..anatomy.tracing import tensors_in
from ..compat import backward_id
from .row_assignment import RowAssignment


class ForwardPass:
    """One forward pass: which delta each row uses, and what its hooks keep for each other."""

    def __init__(
        self,
        owner: object,
        assignment: RowAssignment,
        scope: object = None,
        enclosing: ForwardPass | None = None,
        in_threads: bool = False,
    ) -> None:
        self.owner = owner  # the `PassManager` of the model
        self.assignment = assignment  # which delta each row uses, fixed for the whole pass
        # the `rows()` or `disable()` that the pass began in, or None. The pass keeps its assignment also when that
        # scope is left elsewhere in the meantime.
        self.scope = scope
        self.enclosing = enclosing  # the pass, of any model, inside of which it runs
        self.in_threads = in_threads  # whether it runs its passes in other threads and waits for them
        self.moves_tensors = False  # whether it runs inside a pass of the same model that needs other tensors there
        self.turn = 0  # its place in the order in which passes and changes came to the lock
        self.inputs: dict[Any, torch.Tensor] = {}  # the inputs of other modules, for the edits that use them as x
        self.prompt: Any = None  # what a prompt did at the entry of the stack, for its exit
        self.mask: torch.Tensor | None = None  # the attention mask of the text, for the pooling of a delta
        # the hidden states that were collected, by path of the stack's container
        self.states: dict[str, list[torch.Tensor]] = {}
        self.batch_size = 0  # how many rows the batch has, for positions that are looked up once for all of them
        # whether the projection to the vocabulary was called, where some delta acts at it
        self.called_vocabulary = False
        # what is known of the rows: which tokens (B, n) of the running stack each choice of positions has, what a
        # first pass ended with, and conditions (B,) by name
        self.facts: dict[Any, torch.Tensor] = {}
        self.first_cache: Any = None  # the cache that a first pass has made, until the pass itself has made its own
        self.generates = False  # whether it is of `generate`
        self.text: int | None = None  # how many tokens `generate` began with, once it has


_CURRENT: ContextVar[weakref.ReferenceType[ForwardPass] | None] = ContextVar("deltune_pass", default=None)


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


class _Change:
    """A change of the model that waits for the lock or holds it; one that was interrupted is dropped."""

    def __init__(self, turn: int) -> None:
        self.turn = turn


class PassLock:
    """Lets passes that need the same tensors in the model run beside each other, and changes when no pass runs.

    A pass may wait for another one that it started in another thread: `generate_batch` does, and a user's hook may.
    So a pass that needs the tensors that stand in the model begins before those who wait as long as some pass runs that
    came before all of them, for the newcomer may be what that one waits for. Nobody starves: whoever waits has to wait
    for those passes in any case, and once the last of them has returned nobody begins before its turn any more.

    A pass that began in this way and then starts another one in a helper thread is not among those that came before,
    so the helper may have to wait for a change, and the change for it. What is known to run its passes in other
    threads therefore always waits its turn, and a hook's helper thread is safe in any case if it is run by
    `contextvars.copy_context().run`: what it runs is then a part of the pass around it, which takes no lock.
    """

    def __init__(self) -> None:
        # held while tensors move, and while somebody reads where they are; by a change until it ends
        self.mutex = threading.RLock()
        self._changed = threading.Condition(self.mutex)
        self._running: weakref.WeakSet[ForwardPass] = weakref.WeakSet()
        self._waiting: weakref.WeakSet[ForwardPass | _Change] = weakref.WeakSet()
        self._turns = itertools.count()
        self._change: weakref.ReferenceType[_Change] | None = None

    @property
    def running(self) -> int:
        """How many passes run, those inside of other passes not counted."""
        return len(self._running)

    @property
    def has_threaded_pass(self) -> bool:
        """Whether a forward pass runs that calls the model again in other threads, as DataParallel does."""
        with self.mutex:  # passes that begin meanwhile would change the set while it is read
            return any(running.in_threads for running in list(self._running))

    @property
    def held_by_change(self) -> bool:
        """Whether the thread that holds the mutex is inside `alone()`."""
        return self._change is not None and self._change() is not None

    def admit(self, forward_pass: ForwardPass, fits: Callable[[], bool], prepare: Callable[[], None]) -> None:
        """Wait until the model holds the tensors that a pass needs, or until they can be put there."""
        suits = False

        def ready() -> bool:
            nonlocal suits
            suits, first = fits(), self._first_turn()
            begins_early = not forward_pass.in_threads and any(running.turn < first for running in list(self._running))
            return (forward_pass.turn <= first or begins_early) and (suits or not self.running)

        with self.mutex:
            forward_pass.turn = next(self._turns)
            self._wait(forward_pass, ready)
            if not suits:
                prepare()
            self._running.add(forward_pass)

    def release(self, forward_pass: ForwardPass) -> None:
        """End the admission of a pass."""
        with self.mutex:
            self._running.discard(forward_pass)
            self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until no pass runs, and let none begin inside the block. The caller must not be inside a pass."""
        with self.mutex:
            if self.held_by_change:
                yield
                return
            change = _Change(next(self._turns))
            self._wait(change, lambda: change.turn <= self._first_turn() and not self.running)
            try:
                self._change = weakref.ref(change)
                yield
            finally:
                self._change = None

    def _first_turn(self) -> float:
        """The turn of whoever waits longest."""
        return min((waiting.turn for waiting in list(self._waiting)), default=float("inf"))

    def _wait(self, waiting: ForwardPass | _Change, ready: Callable[[], bool]) -> None:
        if ready():
            return
        self._waiting.add(waiting)
        try:
            while not ready():
                self._changed.wait(_POLL)
        finally:
            self._waiting.discard(waiting)
            self._changed.notify_all()
