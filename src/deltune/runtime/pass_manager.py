"""The forward passes of one tuned model: what each of them uses, and who may run beside whom."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from ..anatomy.quantization import is_unquantized
from ..compat import backward_id
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
    recomputed_assignment,
    refuse_closed,
    remember_for_backward,
    run_in_pass,
)
from .model_state import ModelState
from .row_assignment import RowAssignment
from .rows import refuse_frozen, refuse_late_gradients


class AttachedModules:
    """The modules that deltas act at, each by its parent and its name there, with all that they are inside of."""

    def __init__(self, model: nn.Module, paths: Iterable[str]) -> None:
        inside = {path.rsplit(".", n)[0]: None for path in paths if path for n in range(path.count(".") + 1)}
        self.entries: list[tuple[str, nn.Module, str, nn.Module]] = []
        for path in inside:
            outer, _, leaf = path.rpartition(".")
            self.entries.append((path, model.get_submodule(outer), leaf, model.get_submodule(path)))

    def check(self) -> None:
        """Error: one of them is no longer in the model, or its weight is stored in another way."""
        exporting = torch.compiler.is_compiling()  # torch.export puts tensors without numbers in place of all weights
        for path, parent, leaf, module in self.entries:
            weight = module._parameters.get("weight")
            plain = weight is None or exporting or is_unquantized(weight)
            if parent._modules.get(leaf) is not module or not plain:
                raise DeltuneError(
                    f"{path} was replaced or quantised after deltas were attached that act there (quantising, resizing "
                    "and other libraries' adapters do that): detach, change the model, and attach or load again; to "
                    "quantise a tuned model, merge() first"
                )


def check_not_offloaded(model: nn.Module) -> None:
    """Error: accelerate keeps weights of the model elsewhere and brings them only for a module's own call."""
    for path, module in model.named_modules():
        if _offloads(module.__dict__.get("_hf_hook")):
            raise DeltuneError(
                f"weights of {path or type(model).__name__} are offloaded (cpu_offload, disk_offload, or a device_map "
                "with cpu or disk), where deltas cannot reach them: take that off with accelerate.hooks."
                "remove_hook_from_submodules(model), or load the model on devices that hold it"
            )


def refuse_inference_tensors(model: nn.Module) -> None:
    """Error: the model was made inside of torch.inference_mode(), so that nothing trains through its weights."""
    if any(parameter.is_inference() for parameter in model.parameters()):
        raise DeltuneError(
            f"the weights of this {type(model).__name__} were made inside of torch.inference_mode(), and torch cannot "
            "train through such tensors: make or load the model outside of it (attaching, loading a delta and running "
            "the model inside of it are fine)"
        )


def _offloads(hook: Any) -> bool:
    return bool(getattr(hook, "offload", False)) or any(_offloads(one) for one in getattr(hook, "hooks", ()))


T = TypeVar("T")


class Entry(Protocol):
    """A module at which a pass may begin."""

    always_begins: bool

    def call_original(self, *args: Any, **kwargs: Any) -> Any: ...

    def named_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]: ...


class PassManager:
    """What hooks look up: which delta each row uses, and the notes of the pass under way.

    Attributes:
        in_use: What passes outside of `rows()` and `disable()` use.
        is_pickled: The model is a copy that was made to be pickled, so that it is pickled as it is.
        report: How each attention served its prefix in the last pass, by path.
    """

    def __init__(
        self, model: PreTrainedModel, state: ModelState, lock: PassLock, default_assignment: RowAssignment
    ) -> None:
        self.model, self.state, self.default_assignment = model, state, default_assignment
        self.attention_configs: list[tuple[Any, str | None]] = []
        self.has_prefixes = False
        self.scopes_in_event_loops = 0
        self.modules = AttachedModules(model, ())
        self.report: dict[str, str] = {}
        self._reset(lock)

    def _reset(self, lock: PassLock) -> None:
        self.lock = lock
        self.compiled_pass = ForwardPass(self, self.default_assignment)  # torch.compile's notes
        self.scopes: weakref.WeakSet[Scope] = weakref.WeakSet()
        self.is_pickled = False
        _PASS_MANAGERS.add(self)

    def reset_after_fork(self) -> None:
        """Other threads' passes, locks and scopes are not in the new process."""
        self.lock.reset()
        self.scopes = weakref.WeakSet(open_scopes_here().intersection(self.scopes))
        self.scopes_in_event_loops = sum(scope.in_event_loop for scope in self.scopes)

    def __getstate__(self) -> dict[str, Any]:
        """Neither a copy nor a pickle is inside of a pass or a scope."""
        own = ("lock", "traced", "scopes", "is_pickled")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.scopes_in_event_loops = 0
        self._reset(PassLock())
        self.state.lock = self.lock

    # -- what hooks look up

    def assignment(self) -> RowAssignment:
        """What is in use in the pass under way, or here outside of one."""
        if not torch.compiler.is_dynamo_compiling():
            running = current_pass(self)
            if running is not None:
                return running.assignment
        return self.assignment_of_new_pass()

    def assignment_of_new_pass(self) -> RowAssignment:
        """What a pass that begins here uses."""
        carried = carried_scope(self)
        assignment = None if carried is None else carried.assignment
        return self.default_assignment if assignment is None else assignment

    def current_pass(self) -> ForwardPass:
        """Where hooks note something for each other: the pass under way, outside of one nothing that anybody reads."""
        if torch.compiler.is_dynamo_compiling():
            return self.compiled_pass
        return current_pass(self) or ForwardPass(self, self.default_assignment)

    # -- passes

    def run(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a module, in a forward pass of its own unless one is under way that it belongs to."""
        if torch.compiler.is_dynamo_compiling():
            if entry.always_begins:
                assignment = self.assignment_of_new_pass()
                refuse_closed(carried_scope(self))
                assignment.check_batch(entry.named_arguments(args, kwargs))
                if self.state.placed_delta != assignment.placed_delta:
                    raise DeltuneError(
                        "a compiled pass cannot wait for others: another thread is inside rows() or disable(), for "
                        "which other tensors stand in the model; run it when that is left, or do not compile"
                    )
                self.update_prefix_attention()
            return entry.call_original(*args, **kwargs)
        outer = current_pass(self)
        if outer is not None and not entry.always_begins:
            return entry.call_original(*args, **kwargs)
        forward_pass = self._begin(entry.named_arguments(args, kwargs) if entry.always_begins else {})
        output = self._run_in(forward_pass, entry.call_original, args, kwargs)
        if outer is None and torch.is_grad_enabled():
            remember_for_backward(self, forward_pass.assignment, output)
        return output

    def recompute(self, assignment: RowAssignment, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
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
        self.assignment_of_new_pass().check_prompts(args, kwargs)
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
            if self.lock.held_by_change or current_pass(self) is not None:
                return reader()
        forward_pass = ForwardPass(self, self.default_assignment, carried_scope(self), innermost_pass())
        self._admit(
            forward_pass,
            (lambda: self.default_assignment) if to_copy else self.assignment_of_new_pass,
            with_labels=to_copy,
        )
        result: T = self._run_in(forward_pass, steadily, (), {})
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
        carried, outer, enclosing = carried_scope(self), current_pass(self), innermost_pass()
        if assignment is None and outer is not None and outer.scope is carried:
            return ForwardPass(self, outer.assignment, carried, enclosing, outer)
        fixed = assignment or recomputed_assignment(self)
        if fixed is not None:
            refuse_frozen(fixed.groups)
        elif outer is None and carried is None and backward_id() is not None and self.scopes:
            raise DeltuneError(
                "the model is computed again in a backward pass, in a thread that is not inside of rows() or disable() "
                "while another one is, and nothing tells which of them its forward pass was in: give your checkpoint a "
                "function that returns the model's own output, and use_reentrant=False"
            )
        forward_pass = ForwardPass(self, fixed or self.default_assignment, carried, enclosing)

        def choose() -> RowAssignment:
            if fixed is not None:
                return fixed
            chosen = self.assignment_of_new_pass()
            refuse_closed(carried)  # after it, for the scope may be left at any moment
            if chosen is not forward_pass.assignment:
                chosen.check_batch(arguments)
            return chosen

        forward_pass.assignment = choose()
        self.check_model()
        self.update_prefix_attention()
        self._admit(forward_pass, choose, outer, with_labels=arguments.get("labels") is not None, joins=joins)
        return forward_pass

    def _admit(
        self,
        forward_pass: ForwardPass,
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
            forward_pass.assignment = choose()
            labels = forward_pass.assignment.labels
            same = not with_labels or labels is state.labels or labels == state.labels
            return same and state.placed_delta == forward_pass.assignment.placed_delta

        def prepare() -> None:
            state.place_tensors(forward_pass.assignment.placed_delta)
            state.set_labels(forward_pass.assignment.labels)

        if outer is None:
            self.lock.admit(forward_pass, fits, prepare, joins)
        elif not fits():
            with self.lock.mutex:
                self.lock.refuse_others(outer)
                forward_pass.restore = (state.placed_delta, state.labels)
                self.lock.set_nested_pass(forward_pass)
                prepare()

    def _run_in(
        self, forward_pass: ForwardPass, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call something inside of a pass that has begun, and finish the pass."""
        try:
            return run_in_pass(forward_pass, call, args, kwargs)
        finally:
            self._finish(forward_pass)

    def _finish(self, forward_pass: ForwardPass) -> None:
        try:
            self._end(forward_pass)
        except BaseException:  # interrupted: a pass that stayed admitted would be waited for
            self._end(forward_pass)
            raise

    def _end(self, forward_pass: ForwardPass) -> None:
        with self.lock.mutex:
            if forward_pass.restore is not None:
                self.state.place_tensors(forward_pass.restore[0])
                self.state.set_labels(forward_pass.restore[1])
                self.lock.set_nested_pass(None)
            elif self.lock.release(forward_pass):
                if forward_pass.report:
                    self.report = forward_pass.report
                if self.lock.idle and not self.scopes:
                    self.state.place_tensors(self.default_assignment.placed_delta)
                    self.state.set_labels(self.default_assignment.labels)

    def check_model(self) -> None:
        """Check that deltas can act: their modules are in the model, and its weights are not kept elsewhere."""
        self.modules.check()
        if "_hf_hook" in self.model.__dict__:  # accelerate's, at the root of whatever it offloads
            check_not_offloaded(self.model)

    # -- attention

    def set_prefix_attention(self, inside: bool) -> None:
        """Let the attention function take prefixes, or no more. inside: whether any delta has one."""
        self.has_prefixes = inside
        for number, (config, implementation) in enumerate(self.attention_configs):
            now = config._attn_implementation
            if now not in (
                implementation,
                prefix_implementation(implementation, check=False),
            ):  # chosen anew since then
                self.attention_configs[number] = (config, implementation := now)
            config._attn_implementation = prefix_implementation(implementation) if inside else implementation

    def update_prefix_attention(self) -> None:
        """Follow a change of the attention implementation after attaching, which knows nothing of prefixes."""
        if self.has_prefixes and not all(
            (c._attn_implementation or "").startswith(PREFIX) for c, _ in self.attention_configs
        ):
            self.set_prefix_attention(True)

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
            self.update_model(assignment)
            for group in assignment.groups if assignment.rows else ():
                refuse_late_gradients(group.delta)

    def leave_scope(self, scope: Scope) -> None:
        with self.lock.mutex:
            self.scopes.discard(scope)
            self.update_model(self.assignment_of_new_pass())

    def overridden_modules(self) -> set[str]:
        """Paths of the modules that run with tensors of deltas in some scope."""
        assignments = [scope.assignment for scope in list(self.scopes)]
        return {path for assignment in assignments if assignment is not None for path in assignment.tensors}

    def update_model(self, assignment: RowAssignment) -> None:
        """Let train what is in use anywhere, and, unless a pass runs, put the tensors of an assignment in place."""
        scopes = [scope.assignment for scope in list(self.scopes)]
        self.scopes_in_event_loops = sum(scope.in_event_loop for scope in list(self.scopes))
        if self.lock.idle:
            self.state.place_tensors(assignment.placed_delta)
            self.state.set_labels(assignment.labels)
        self.state.train_only(
            group.delta for a in (self.default_assignment, *scopes) if a is not None for group in a.groups
        )

    @contextlib.contextmanager
    def exclusive(self, what: str) -> Iterator[None]:
        """Wait until no pass runs, for a change of what the whole model does.

        Raises:
            DeltuneError: inside of rows(), or inside of a pass of this model, which it would wait for.
        """
        scope = current_scope(self)
        if scope is not None and scope.assignment is not None and scope.assignment.rows:
            raise DeltuneError(f"{what} inside rows(): leave it first")
        if current_pass(self) is not None:
            raise DeltuneError(f"{what} inside a forward pass of the same model: wait until it has returned")
        if "_hf_hook" in self.model.__dict__:
            check_not_offloaded(self.model)
        with self.lock.alone():
            yield

    def refuse_other_scopes(self, what: str) -> None:
        """Error where another thread or task is inside of rows() or disable()."""
        own = current_scope(self)
        if any(scope is not own for scope in list(self.scopes)):
            raise DeltuneError(f"{what}: another thread or task is inside rows() or disable(); leave it there first")

    def refuse_in_scopes(self, what: str, names: Sequence[str]) -> None:
        """Error where a scope of another thread or task uses one of the deltas."""
        own = current_scope(self)
        elsewhere = [scope.assignment for scope in list(self.scopes) if scope is not own]
        if used := [name for name in names if any(a is not None and name in a.rows for a in elsewhere)]:
            raise DeltuneError(
                f"{what}: {', '.join(used)} is used inside rows() by another thread or task; leave it there first"
            )


_PASS_MANAGERS: weakref.WeakSet[PassManager] = weakref.WeakSet()


def _after_fork() -> None:
    for passes in list(_PASS_MANAGERS):
        passes.reset_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
