"""Frozen layers: those below everything that is trained. They run without dropout, or are skipped with cached states.

The model's own forward still runs. In a pass that is given cached hidden states, each frozen layer returns the cached
state, or its input where none is cached; masks, positions and everything else outside the layers is computed by the
model. Which layers are frozen follows from the resolved method and the anatomy, never from a method's name.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..anatomy.skeleton import base_modules
from ..anatomy.types import Anatomy, Layer, Tensor, is_inside
from ..compat import call_class, get_call_override, remove_call_override, set_call_override
from ..errors import DeltuneError
from ..methods.sites import ModuleSide
from ..runtime.handle import Tuned
from ..runtime.modules import Delta

PREFIX = "trunk_"
"""The prefix of model arguments that hold cached states: trunk_STACK, (rows, tokens, states, width). The argument with
this name alone is the dictionary in which a pass records them."""

Argument = int | str
"""The position or the name of one of a layer's arguments."""


@dataclass(frozen=True)
class FrozenBoundary:
    """Which layers are frozen, and which of their states the layers above read.

    Attributes:
        layers: The frozen layers, in order of execution.
        kept_states: For each stack, the states that the layers above may read, by the number of layers that ran before
            (0 is the input of the first).
        above: Whether any layer, or a network that attends to the text, runs after the frozen ones.
    """

    layers: tuple[Layer, ...]
    kept_states: Mapping[str, tuple[int, ...]]
    above: bool


def find_boundary(anatomy: Anatomy, delta: Delta) -> FrozenBoundary:
    """Find the frozen layers of a delta."""
    lowest, what = min(_depths_of_trained(anatomy, delta), default=(len(anatomy.layers), "nothing"))
    if not lowest:
        raise DeltuneError(
            f"trunk_dropout=off needs frozen layers below everything that is trained, but {delta.method!r} trains or "
            f"changes {what}, and no layer is below that. Set trunk_dropout=on, or use a method on upper layers, such "
            "as one with layers='upper half'"
        )
    below, above = anatomy.layers[:lowest], anatomy.layers[lowest:]
    read_whole = {e.place.target.path for e in delta.planned.edits if e.place.target.side == "states"}
    last = above[0].stack if above else anatomy.stacks[-1].name
    kept_states: dict[str, tuple[int, ...]] = {}
    for stack in anatomy.stacks:
        depth = sum(layer.passes for layer in below if layer.stack == stack.name)
        if depth and (above or stack.name == last):  # an encoder's end is read by the decoder's layers alone
            kept_states[stack.name] = tuple(range(depth + 1)) if stack.container in read_whole else (depth,)
    reads_text = any(edit.modification.form.reads_text for edit in delta.planned.edits)
    return FrozenBoundary(below, kept_states, bool(above) or reads_text)


def _depths_of_trained(anatomy: Anatomy, delta: Delta) -> Iterator[tuple[int, str]]:
    """For each thing that a delta trains or changes: how many layers run before it, and its name."""
    plan = delta.planned
    for edit in plan.edits:
        ports = [edit.place.target, *([edit.place.source] if edit.place.source else [])]
        first = min(_layers_before(anatomy, port.path, _area_of(anatomy, port)) for port in ports)
        shifted = [_layers_before_stack(anatomy, edit.place.shifted_stack)] if edit.place.shifted_stack else []
        first = 0 if edit.modification.form.reads_first_pass else first
        yield min([first, *shifted]), edit.place.name
    tensors: list[Tensor] = [*plan.selected, *(t for t, _ in plan.masked), *(t for g in plan.gated for t in g.tensors)]
    tensors += [t for t in anatomy.tensors if t.name in delta.head]
    for tensor in tensors:
        for name in (tensor.name, *tensor.aliases):
            yield _layers_before(anatomy, name, tensor.area), tensor.name


def _area_of(anatomy: Anatomy, port: ModuleSide) -> str:
    """Return the area of a module behind all layers, the pooler or the vocabulary; of another one, the port's side."""
    if anatomy.vocabulary is not None and port.path == anatomy.vocabulary.path:
        return "vocabulary"
    return "pooler" if anatomy.pooler and is_inside(port.path, anatomy.pooler) else port.side


def _layers_before(anatomy: Anatomy, path: str, area: str) -> int:
    """How many layers run before a module; outside of all layers its area, or the side of its place, decides."""
    inside = [i for i, layer in enumerate(anatomy.layers) if is_inside(path, layer.path)]
    if inside:
        return inside[0]
    later = next((s.name for s in anatomy.stacks[1:] if s.entry and is_inside(path, s.entry)), "")
    if area in ("states", "head", "pooler", "vocabulary", "final"):
        ends_early = area == "final" and len(anatomy.stacks) > 1 and not later
        return _layers_before_stack(anatomy, anatomy.stacks[1].name) if ends_early else len(anatomy.layers)
    return _layers_before_stack(anatomy, later) if later else 0  # an embedding, or something unknown


def _layers_before_stack(anatomy: Anatomy, stack: str) -> int:
    """How many layers run before the layers of a stack."""
    return next(i for i, layer in enumerate(anatomy.layers) if layer.stack == stack)


@dataclass(eq=False)
class FrozenPass:
    """One pass of a model with frozen layers.

    Attributes:
        thread: The thread that runs it.
        recorded: Where the states that are kept are recorded, by stack and number; None if they are not.
        cached: The states that are given, in the same way.
        calls: How often each frozen layer has run.
        in_eval_mode: The modules to put back into training mode.
        depth: How many calls of the model, or of one of its stacks, it is inside of.
    """

    thread: int
    recorded: dict[tuple[str, int], torch.Tensor] | None = None
    cached: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)
    calls: dict[FrozenLayerHook, int] = field(default_factory=dict)
    in_eval_mode: list[nn.Module] = field(default_factory=list)
    depth: int = 1


class FrozenLayerHook:
    """The hooks of one frozen layer."""

    def __init__(self, frozen: FrozenLayers, module: nn.Module, stack: str, calls: tuple[int, ...]) -> None:
        self.frozen, self.module, self.stack, self.calls = frozen, module, stack, calls
        self.skipped = True
        self.single = True  # whether its output is one tensor
        # otherwise the outputs after the first: arguments that are passed on, or None
        self.other_outputs: tuple[Argument | None, ...] = ()
        self.handles = [
            module.register_forward_pre_hook(self.before_layer, with_kwargs=True, prepend=True),
            module.register_forward_hook(self.after_layer, with_kwargs=True, prepend=True),
        ]

    def before_layer(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replace the input of a stack's first layer by the cached state, if there is one."""
        current = self.frozen.current
        if current is None or self.calls[current.calls.get(self, 0)]:
            return None
        state = current.cached.get((self.stack, 0))
        if current.recorded is not None and 0 in self.frozen.kept_states.get(self.stack, ()):
            current.recorded[self.stack, 0] = _hidden(args, kwargs)
        if state is None:
            return None
        return ((state, *args[1:]), kwargs) if args else (args, {**kwargs, next(iter(kwargs)): state})

    def skip(self, *args: Any, **kwargs: Any) -> Any:
        """Return the cached state, or the input, in place of the layer's forward."""
        current, state = self.frozen.current, _hidden(args, kwargs)
        if current is not None:
            state = current.cached.get((self.stack, self.calls[current.calls.get(self, 0)] + 1), state)
        if self.single:
            return state
        return (
            state,
            *(None if a is None else args[a] if isinstance(a, int) else kwargs.get(a) for a in self.other_outputs),
        )

    def after_layer(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        current = self.frozen.current
        if current is None:
            return
        before = current.calls.get(self, 0)
        number = self.calls[before] + 1
        current.calls[self] = before + 1
        if current.recorded is not None and number in self.frozen.kept_states.get(self.stack, ()):
            current.recorded[self.stack, number] = output if isinstance(output, torch.Tensor) else output[0]
        if self is self.frozen.layer_hooks[-1] and before + 1 == len(self.calls):
            self.frozen.end_reached(current)


class _EndReached(Exception):
    """The last frozen layer has run, and nothing above it is needed."""


class FrozenLayersEntry:
    """Wraps the call of the model, or of a stack that may be called by itself (an encoder, in generation)."""

    of_live_model = True

    def __init__(self, frozen: FrozenLayers, stack: str, module: nn.Module) -> None:
        self.frozen, self.stack, self.module = frozen, stack, module
        self.before = get_call_override(module)
        set_call_override(module, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.frozen.call_in_pass(self, args, kwargs)

    def call_original(self, *args: Any, **kwargs: Any) -> Any:
        return call_class(self.module, args, kwargs) if self.before is None else self.before(*args, **kwargs)


class FrozenLayers:
    """The frozen layers of the delta in use, hooked into the model until `remove` is called.

    In training mode the model runs in eval mode up to the end of the last frozen layer. A pass that is given cached
    states (arguments whose names begin with PREFIX) skips the frozen layers; the encoder of an encoder-decoder that is
    called by itself takes its own states.
    """

    def __init__(self, tuned: Tuned) -> None:
        self.model = model = tuned.model
        self.anatomy = anatomy = tuned.anatomy
        self.boundary = find_boundary(anatomy, tuned.delta())
        self.kept_states = dict(self.boundary.kept_states)
        self.current: FrozenPass | None = None
        self.modules = [module for _, module in base_modules(model)]
        numbers = {stack.name: 0 for stack in anatomy.stacks}
        self.layer_hooks: list[FrozenLayerHook] = []
        for layer in self.boundary.layers:
            first = numbers[layer.stack]
            numbers[layer.stack] = first + layer.passes
            calls = tuple(range(first, first + layer.passes))
            self.layer_hooks.append(FrozenLayerHook(self, model.get_submodule(layer.path), layer.stack, calls))
        entries: dict[str, nn.Module] = {"": model}
        if len(anatomy.stacks) > 1:
            entries[anatomy.stacks[0].name] = model.get_submodule(anatomy.stacks[0].entry)
        self.mutex = threading.Lock()
        self.entries = [FrozenLayersEntry(self, stack, module) for stack, module in entries.items()]

    def remove(self) -> None:
        """Remove the hooks from the model."""
        for entry in self.entries:
            remove_call_override(entry.module, entry, entry.before)
        for handle in (h for layer_hook in self.layer_hooks for h in layer_hook.handles):
            handle.remove()

    # -- a pass

    def call_in_pass(self, entry: FrozenLayersEntry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the model, or one stack, without the arguments that hold cached states."""
        with self.mutex:
            thread = threading.get_ident()
            outer = self.current
            if outer is None:
                current = self.current = FrozenPass(thread, kwargs.get(PREFIX))
            elif outer.thread == thread:
                current = outer
                current.depth += 1
        if outer is not None and outer.thread != thread:
            raise DeltuneError(
                "a model whose frozen layers run without dropout or from a cache (trunk_dropout=off) runs "
                "in one thread at a time"
            )
        try:
            if outer is None:
                self.begin_pass(current, entry.stack, kwargs)
            model_kwargs = {name: value for name, value in kwargs.items() if not name.startswith(PREFIX)}
            return entry.call_original(*args, **model_kwargs)
        finally:
            current.depth -= 1
            if not current.depth:
                self.end_pass(current)

    def begin_pass(self, current: FrozenPass, stack: str, kwargs: dict[str, Any]) -> None:
        """Prepare a pass of the model, or of one stack."""
        if self.model.training:
            current.in_eval_mode = [module for module in self.modules if module.training]
            for module in current.in_eval_mode:
                module.training = False
        states = {name.removeprefix(PREFIX): t for name, t in kwargs.items() if name.startswith(PREFIX)}
        states.pop("", None)
        if states and (not stack or stack in states):
            current.cached = {
                (name, number): states[name][:, :, i]
                for name, numbers in self.kept_states.items()
                for i, number in enumerate(numbers)
                if name in states
            }
            for layer_hook in self.layer_hooks:
                if layer_hook.skipped:
                    layer_hook.module.__dict__["forward"] = layer_hook.skip

    def end_reached(self, current: FrozenPass) -> None:
        """Handle the end of the last frozen layer: stop the pass, or go on in training mode."""
        if current.recorded is not None:
            raise _EndReached
        self._restore_training_mode(current)

    def end_pass(self, current: FrozenPass) -> None:
        self._restore_training_mode(current)
        for layer_hook in self.layer_hooks:
            layer_hook.module.__dict__.pop("forward", None)
        self.current = None

    def _restore_training_mode(self, current: FrozenPass) -> None:
        for module in current.in_eval_mode:
            module.training = True
        current.in_eval_mode = []

    # -- hidden states

    def is_decoder_argument(self, argument: str) -> bool:
        """Return whether an argument holds the states of an encoder-decoder's decoder."""
        return len(self.anatomy.stacks) > 1 and argument == f"{PREFIX}{self.anatomy.stacks[1].name}"

    def states(self, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the states that the layers above read, without running those layers.

        They are arguments of the model: PREFIX + stack -> (rows, tokens, states, width).
        """
        recorded: dict[tuple[str, int], torch.Tensor] = {}
        with contextlib.suppress(_EndReached):
            self.model(**batch, **{PREFIX: recorded})
        return {
            f"{PREFIX}{stack}": torch.stack([recorded[stack, number] for number in numbers], dim=2)
            for stack, numbers in self.kept_states.items()
        }

    def examine(self, batch: Mapping[str, torch.Tensor]) -> Any:
        """Run one pass to see what each frozen layer returns besides its hidden state, and who reads that.

        A layer is not skipped if a layer above reads another tensor that it computes (such as the position bias of
        T5's first layer); neither are the layers before it.
        """
        outputs: list[tuple[FrozenLayerHook, tuple[Any, ...], dict[str, Any], Any]] = []
        read: list[Any] = []
        below = {layer.path for layer in self.boundary.layers}
        handles = [
            layer_hook.module.register_forward_hook(
                lambda m, args, kwargs, output, s=layer_hook: outputs.append((s, args, kwargs, output)),
                with_kwargs=True,
            )
            for layer_hook in self.layer_hooks
        ]
        handles += [
            self.model.get_submodule(layer.path).register_forward_pre_hook(
                lambda m, args, kwargs: read.extend((*args, *kwargs.values())), with_kwargs=True
            )
            for layer in self.anatomy.layers
            if layer.path not in below
        ]
        try:
            whole = self.model(**batch)
        finally:
            for handle in handles:
                handle.remove()
        for layer_hook, args, kwargs, output in outputs:
            layer_hook.single = isinstance(output, torch.Tensor)
            if not layer_hook.single:
                layer_hook.other_outputs = tuple(_source(value, args, kwargs) for value in output[1:])
                computed = [value for value, at in zip(output[1:], layer_hook.other_outputs, strict=True) if at is None]
                layer_hook.skipped = not any(
                    value is other for value in computed for other in read if value is not None
                )
        for stack in {layer_hook.stack for layer_hook in self.layer_hooks}:
            layer_hooks = [layer_hook for layer_hook in self.layer_hooks if layer_hook.stack == stack]
            needed = max((i + 1 for i, layer_hook in enumerate(layer_hooks) if not layer_hook.skipped), default=0)
            for layer_hook in layer_hooks[:needed]:
                layer_hook.skipped = False
            if needed == len(layer_hooks):
                self.kept_states.pop(stack, None)
        return whole


def _hidden(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
    state: torch.Tensor = args[0] if args else next(iter(kwargs.values()))
    return state


def _source(value: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Argument | None:
    """The argument that is returned unchanged as `value`, or None."""
    arguments: list[tuple[Argument, Any]] = [*enumerate(args), *kwargs.items()]
    return None if value is None else next((name for name, other in arguments if other is value), None)
