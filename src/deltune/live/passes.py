"""The forward passes of one tuned model: what each of them uses, and who may run beside whom."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch
from transformers import PreTrainedModel

from ..compat import backward_id
from ..errors import DeltuneError
from .assignment import RowAssignment
from .attention import PREFIX, extended_name
from .forward_pass import (
    ForwardPass,
    PassLock,
    Scope,
    carried_scope,
    current_pass,
    innermost_pass,
    recomputed_assignment,
    refuse_closed,
    remember_for_backward,
    run_in_pass,
    scope_of,
    scopes_here,
)
from .model_state import ModelState
from .premises import Modules, refuse_offloaded
from .uses import refuse_at_rest, refuse_late_gradients

T = TypeVar("T")


class Entry(Protocol):
    """A module at which a pass may begin."""

    opens: bool

    def inner(self, *args: Any, **kwargs: Any) -> Any: ...

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]: ...


class Passes:
    """What hooks look up: which delta each row uses, and the notes of the pass under way.

    Attributes:
        in_use: What passes outside of `rows()` and `disable()` use.
        is_pickled: The model is a copy that was made to be pickled, so that it is pickled as it is.
        report: How each attention served its prefix in the last pass, by path.
    """

    def __init__(self, model: PreTrainedModel, state: ModelState, lock: PassLock, in_use: RowAssignment) -> None:
        self.model, self.state, self.in_use = model, state, in_use
        self.attentions: list[tuple[Any, str | None]] = []
        self.inside_attention = False
        self.scopes_of_tasks = 0
        self.modules = Modules(model, ())
        self.report: dict[str, str] = {}
        self._begin_empty(lock)

    def _begin_empty(self, lock: PassLock) -> None:
        self.lock = lock
        self.traced = ForwardPass(self, self.in_use)  # torch.compile's notes
        self.scopes: weakref.WeakSet[Scope] = weakref.WeakSet()
        self.is_pickled = False
        _EVERY.add(self)

    def go_on_in_a_fork(self) -> None:
        """Other threads' passes, locks and scopes are not in the new process."""
        self.lock.reset()
        self.scopes = weakref.WeakSet(scopes_here().intersection(self.scopes))
        self.scopes_of_tasks = sum(scope.in_event_loop for scope in self.scopes)

    def __getstate__(self) -> dict[str, Any]:
        """Neither a copy nor a pickle is inside of a pass or a scope."""
        own = ("lock", "traced", "scopes", "is_pickled")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.scopes_of_tasks = 0
        self._begin_empty(PassLock())
        self.state.lock = self.lock

    # -- what hooks look up

    def assignment(self) -> RowAssignment:
        """What is in use in the pass under way, or here outside of one."""
        if not torch.compiler.is_dynamo_compiling():
            running = current_pass(self)
            if running is not None:
                return running.assignment
        return self.assigned()

    def assigned(self) -> RowAssignment:
        """What a pass that begins here uses."""
        carried = carried_scope(self)
        assignment = None if carried is None else carried.assignment
        return self.in_use if assignment is None else assignment

    def notes(self) -> ForwardPass:
        """Where hooks note something for each other: the pass under way, outside of one nothing that anybody reads."""
        if torch.compiler.is_dynamo_compiling():
            return self.traced
        return current_pass(self) or ForwardPass(self, self.in_use)

    # -- passes

    def run(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a module, in a forward pass of its own unless one is under way that it belongs to."""
        if torch.compiler.is_dynamo_compiling():
            if entry.opens:
                assignment = self.assigned()
                refuse_closed(carried_scope(self))
                assignment.check_batch(entry.named(args, kwargs))
                if self.state.standing != assignment.standing:
                    raise DeltuneError(
                        "a compiled pass cannot wait for others: another thread is inside rows() or disable(), for "
                        "which other tensors stand in the model; run it when that is left, or do not compile"
                    )
                self.follow_attention()
            return entry.inner(*args, **kwargs)
        outer = current_pass(self)
        if outer is not None and not entry.opens:
            return entry.inner(*args, **kwargs)
        this = self._begin(entry.named(args, kwargs) if entry.opens else {})
        output = self._run_in(this, entry.inner, args, kwargs)
        if outer is None and torch.is_grad_enabled():
            remember_for_backward(self, this.assignment, output)
        return output

    def again(self, assignment: RowAssignment, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compute a part of the model under gradient checkpointing.

        Args:
            assignment: What the pass used that called the checkpoint function. The part is computed in that pass the
                first time, and in one of its own when it is computed again in the backward pass.
        """
        running = None if torch.compiler.is_dynamo_compiling() else current_pass(self)
        if torch.compiler.is_dynamo_compiling() or (running is not None and running.assignment is assignment):
            return function(*args, **kwargs)
        return self._run_in(self._begin({}, assignment), function, args, kwargs)

    def generate(
        self, generate: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], in_threads: bool = False
    ) -> Any:
        """Run `generate` as one long pass: what is in use stays so from its first step to its last.

        Args:
            in_threads: It runs its passes in other threads and waits for them.
        """
        self.assigned().check_prompts(args, kwargs)
        return self._run_in(self._begin({}, joins=not in_threads), generate, args, kwargs)

    def read(self, reader: Callable[[], T], to_copy: bool = False) -> T:
        """Run what reads the model as a whole, like a pass: in the slots stand the tensors of what is in use here.

        No tensor moves meanwhile. Inside of a pass, or of a change, what stands there is read.

        Args:
            to_copy: What is in use outside of `rows()` and `disable()` is meant, since a copy is not inside of them,
                and the labels in the model's configuration are read too.
        """
        if torch.compiler.is_dynamo_compiling():
            return reader()

        def steadily() -> T:
            with self.lock.mutex:
                return reader()

        with self.lock.mutex:
            if self.lock.taken or current_pass(self) is not None:
                return reader()
        this = ForwardPass(self, self.in_use, carried_scope(self), innermost_pass())
        self._admit(this, (lambda: self.in_use) if to_copy else self.assigned, with_labels=to_copy)
        result: T = self._run_in(this, steadily, (), {})
        return result

    def _begin(
        self, arguments: dict[str, Any], assignment: RowAssignment | None = None, joins: bool = True
    ) -> ForwardPass:
        """Begin a pass once the model holds the tensors that it needs.

        Args:
            arguments: Those of the model's call, by name.
            assignment: What the pass uses. By default what the pass around it uses, or what the forward pass used
                whose backward pass is under way, or what is in use here.
            joins: Whether it may come before its turn.
        """
        carried, outer, around = carried_scope(self), current_pass(self), innermost_pass()
        if assignment is None and outer is not None and outer.scope is carried:
            return ForwardPass(self, outer.assignment, carried, around, outer)
        fixed = assignment or recomputed_assignment(self)
        if fixed is not None:
            refuse_at_rest(fixed.uses)
        elif outer is None and carried is None and backward_id() is not None and self.scopes:
            raise DeltuneError(
                "the model is computed again in a backward pass, in a thread that is not inside of rows() or disable() "
                "while another one is, and nothing tells which of them its forward pass was in: give your checkpoint a "
                "function that returns the model's own output, and use_reentrant=False"
            )
        this = ForwardPass(self, fixed or self.in_use, carried, around)

        def choose() -> RowAssignment:
            if fixed is not None:
                return fixed
            chosen = self.assigned()
            refuse_closed(carried)  # after it, for the scope may be left at any moment
            if chosen is not this.assignment:
                chosen.check_batch(arguments)
            return chosen

        this.assignment = choose()
        self.check_premises()
        self.follow_attention()
        self._admit(this, choose, outer, with_labels=arguments.get("labels") is not None, joins=joins)
        return this

    def _admit(
        self,
        this: ForwardPass,
        choose: Callable[[], RowAssignment],
        outer: ForwardPass | None = None,
        with_labels: bool = True,
        joins: bool = True,
    ) -> None:
        """Let the model hold the tensors, and `with_labels` the labels, that a pass needs.

        Args:
            choose: Gives what the pass uses, which may change while others go before.
            outer: The pass of the same model that it is inside of.
        """
        state = self.state

        def fits() -> bool:
            this.assignment = choose()
            labels = this.assignment.labels
            same = not with_labels or labels is state.labels or labels == state.labels
            return same and state.standing == this.assignment.standing

        def prepare() -> None:
            state.stand(this.assignment.standing)
            state.give(this.assignment.labels)

        if outer is None:
            self.lock.admit(this, fits, prepare, joins)
        elif not fits():
            with self.lock.mutex:
                self.lock.refuse_others(outer)
                this.restore = (state.standing, state.labels)
                self.lock.lend(this)
                prepare()

    def _run_in(
        self, this: ForwardPass, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call something inside of a pass that has begun, and finish the pass."""
        try:
            return run_in_pass(this, call, args, kwargs)
        finally:
            self._finish(this)

    def _finish(self, this: ForwardPass) -> None:
        try:
            self._end(this)
        except BaseException:  # interrupted: a pass that stayed admitted would be waited for
            self._end(this)
            raise

    def _end(self, this: ForwardPass) -> None:
        with self.lock.mutex:
            if this.restore is not None:
                self.state.stand(this.restore[0])
                self.state.give(this.restore[1])
                self.lock.lend(None)
            elif self.lock.release(this):
                if this.report:
                    self.report = this.report
                if self.lock.idle and not self.scopes:
                    self.state.stand(self.in_use.standing)
                    self.state.give(self.in_use.labels)

    def check_premises(self) -> None:
        """Check that deltas can act: their modules are in the model, and its weights are not kept elsewhere."""
        self.modules.check()
        if "_hf_hook" in self.model.__dict__:  # accelerate's, at the root of whatever it offloads
            refuse_offloaded(self.model)

    # -- attention

    def wire_attention(self, inside: bool) -> None:
        """Let the attention function take prefixes, or no more. inside: whether any delta has one."""
        self.inside_attention = inside
        for number, (config, implementation) in enumerate(self.attentions):
            now = config._attn_implementation
            if now not in (implementation, extended_name(implementation, check=False)):  # chosen anew since then
                self.attentions[number] = (config, implementation := now)
            config._attn_implementation = extended_name(implementation) if inside else implementation

    def follow_attention(self) -> None:
        """Follow a change of the attention implementation after attaching, which knows nothing of prefixes."""
        if self.inside_attention and not all(
            (c._attn_implementation or "").startswith(PREFIX) for c, _ in self.attentions
        ):
            self.wire_attention(True)

    # -- scopes and changes

    def enter_scope(self, scope: Scope, make: Callable[[], RowAssignment]) -> None:
        """Let a scope hold; in the model's slots stand what it needs, if nobody needs anything else right now.

        Args:
            make: Makes what is in use inside. Nobody attaches or detaches between that and the scope's beginning.
        """
        with self.lock.mutex:
            assignment = make()  # whatever is wrong is said before anything changes
            self.scopes.add(scope)
            scope.open(assignment)
            self.settle(assignment)
            for use in assignment.uses if assignment.rows else ():
                refuse_late_gradients(use.delta)

    def leave_scope(self, scope: Scope) -> None:
        with self.lock.mutex:
            self.scopes.discard(scope)
            self.settle(self.assigned())

    def own_tensors(self) -> set[str]:
        """Paths of the modules that run with tensors of deltas in some scope."""
        assignments = [scope.assignment for scope in list(self.scopes)]
        return {path for assignment in assignments if assignment is not None for path in assignment.tensors}

    def settle(self, assignment: RowAssignment) -> None:
        """Let train what is in use anywhere, and, unless a pass runs, put the tensors of an assignment in place."""
        scopes = [scope.assignment for scope in list(self.scopes)]
        self.scopes_of_tasks = sum(scope.in_event_loop for scope in list(self.scopes))
        if self.lock.idle:
            self.state.stand(assignment.standing)
            self.state.give(assignment.labels)
        self.state.train_only(use.delta for a in (self.in_use, *scopes) if a is not None for use in a.uses)

    @contextlib.contextmanager
    def changing(self, what: str) -> Iterator[None]:
        """Wait until no pass runs, for a change of what the whole model does.

        Raises:
            DeltuneError: inside of rows(), or inside of a pass of this model, which it would wait for.
        """
        scope = scope_of(self)
        if scope is not None and scope.assignment is not None and scope.assignment.rows:
            raise DeltuneError(f"{what} inside rows(): leave it first")
        if current_pass(self) is not None:
            raise DeltuneError(f"{what} inside a forward pass of the same model: wait until it has returned")
        if "_hf_hook" in self.model.__dict__:
            refuse_offloaded(self.model)
        with self.lock.alone():
            yield

    def refuse_other_scopes(self, what: str) -> None:
        """Error where another thread or task is inside of rows() or disable()."""
        own = scope_of(self)
        if any(scope is not own for scope in list(self.scopes)):
            raise DeltuneError(f"{what}: another thread or task is inside rows() or disable(); leave it there first")

    def refuse_in_scopes(self, what: str, names: Sequence[str]) -> None:
        """Error where a scope of another thread or task uses one of the deltas."""
        own = scope_of(self)
        elsewhere = [scope.assignment for scope in list(self.scopes) if scope is not own]
        if used := [name for name in names if any(a is not None and name in a.rows for a in elsewhere)]:
            raise DeltuneError(
                f"{what}: {', '.join(used)} is used inside rows() by another thread or task; leave it there first"
            )


_EVERY: weakref.WeakSet[Passes] = weakref.WeakSet()


def _after_fork() -> None:
    for passes in list(_EVERY):
        passes.go_on_in_a_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
