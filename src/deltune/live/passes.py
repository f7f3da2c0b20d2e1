"""The forward passes of one tuned model: what each of them uses, and who may run beside whom."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

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
    current_pass,
    innermost_pass,
    recomputed_assignment,
    remember_for_backward,
    run_in_pass,
    scope_of,
)
from .model_state import ModelState
from .premises import Modules, refuse_offloaded
from .uses import refuse_at_rest, refuse_late_gradients


class Entry(Protocol):
    """A module at which a pass may begin."""

    opens: bool

    def inner(self, *args: Any, **kwargs: Any) -> Any: ...

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]: ...


class Passes:
    """What hooks look up: which delta each row uses, and the notes of the pass under way.

    Attributes:
        in_use: What passes outside of `rows()` and `disable()` use.
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

    def __getstate__(self) -> dict[str, Any]:
        """Neither a copy nor a pickle is inside of a pass or a scope."""
        return {name: value for name, value in self.__dict__.items() if name not in ("lock", "traced", "scopes")}

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
        scope = scope_of(self)
        assignment = None if scope is None else scope.assignment
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
        this = self._begin(entry.named(args, kwargs) if entry.opens else None)
        try:
            output = run_in_pass(this, entry.inner, args, kwargs)
        finally:
            self._finish(this)
        if outer is None and torch.is_grad_enabled():
            remember_for_backward(self, this.assignment, output)
        return output

    def again(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compute a part of the model under gradient checkpointing: the first time in the pass under way, again, in
        the backward pass, in a pass of its own with what the first one used."""
        if torch.compiler.is_dynamo_compiling() or current_pass(self) is not None:
            return function(*args, **kwargs)
        this = self._begin(None)
        try:
            return run_in_pass(this, function, args, kwargs)
        finally:
            self._finish(this)

    def generate(self, generate: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `generate` as one long pass: what is in use stays so from its first step to its last."""
        self.assigned().check_prompts(args, kwargs)
        this = self._begin({})
        try:
            return run_in_pass(this, generate, args, kwargs)
        finally:
            self._finish(this)

    def _begin(self, arguments: dict[str, Any] | None) -> ForwardPass:
        """Begin a pass once the model holds the tensors that it needs. arguments: None for a part of the model, which
        may be computed again in a backward pass."""
        scope, outer, around = scope_of(self), current_pass(self), innermost_pass()
        if outer is not None and outer.scope is scope:
            return ForwardPass(self, outer.assignment, scope, around, outer)
        recomputed = recomputed_assignment(self)
        if recomputed is not None:
            refuse_at_rest(recomputed.uses)
        elif outer is None and scope is None and backward_id() is not None and self.scopes:
            raise DeltuneError(
                "the model is computed again in a backward pass, in a thread that is not inside of rows() or disable() "
                "while another one is, and nothing tells which of them its forward pass was in: give your checkpoint a "
                "function that returns the model's own output, and use_reentrant=False"
            )
        with_labels = arguments is not None and arguments.get("labels") is not None
        this, state = ForwardPass(self, recomputed or self.assigned(), scope, around), self.state
        this.assignment.check_batch(arguments or {})
        self.check_premises()
        self.follow_attention()

        def fits() -> bool:
            this.assignment = recomputed or self.assigned()  # it may have changed while others went before
            labels = this.assignment.labels
            same = not with_labels or labels is state.labels or labels == state.labels
            return same and state.standing == this.assignment.standing

        def prepare() -> None:
            state.stand(this.assignment.standing)
            state.give(this.assignment.labels)

        if outer is None:
            self.lock.admit(this, fits, prepare)
        elif not fits():
            with self.lock.mutex:
                self.lock.refuse_others(outer)
                this.restore = (state.standing, state.labels)
                self.lock.lend(this)
                prepare()
        return this

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
