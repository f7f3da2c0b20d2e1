"""The hooks through which edits act on a model, and which of them a set of deltas needs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..anatomy.quantization import quantized_modules
from ..anatomy.skeleton import base_modules
from ..anatomy.tracing import CallOrder
from ..anatomy.types import is_inside
from ..compat import (
    IS_QUANTIZED,
    PACKS_FOR_CPU,
    call_class,
    count_forward_hooks,
    get_call_override,
    get_checkpoint_function,
    instance_forward,
    is_plain_inference,
    remove_call_override,
    remove_hooks,
    set_call_override,
    set_checkpoint_function,
    set_instance_forward,
)
from ..errors import DeltuneError
from ..methods.positions import ALL
from .attention import HOOK_ATTRIBUTE, PrefixRows
from .first_pass import FirstPassHook
from .forward_pass import current_pass, remember_for_backward
from .linear import LinearForward, linear_forward
from .model_methods import METHODS, WHOLE_MODEL_METHODS
from .modules import Delta, Edit, ModuleCall, ModulePlace
from .pass_manager import ModuleHook, PassManager
from .pooling import PoolingHook
from .prompts import PositionHook, PromptHook
from .row_assignment import RowAssignment, name_arguments, owning_modules, parameter_names
from .rows import DeltaRows, forward_with
from .token_positions import TokensHook


class CheckpointFunction:
    """Replaces a module's gradient checkpointing function, so that recomputed layers use the same deltas as before."""

    of_live_model = True

    def __init__(self, passes: PassManager, original: Any) -> None:
        self.passes, self.original = passes, original

    def __call__(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        facts = dict(self.passes.current_pass().facts)
        return self.original(partial(self.passes.recompute, self.passes.assignment(), facts, function), *args, **kwargs)


class ForwardWrapper:
    """Wraps the call of a module at which a forward pass may begin.

    With `always_begins` every call begins a pass of its own (the model, and the entry of each stack), so that a model
    that is called inside its own pass keeps nothing for the outer one. Otherwise a call begins one only if none runs,
    as when a layer is recomputed for its gradients.
    """

    def __init__(self, passes: PassManager, path: str, always_begins: bool) -> None:
        self.passes, self.path, self.always_begins = passes, path, always_begins
        self.module = passes.model.get_submodule(path)
        self.arguments = parameter_names(self.module)
        self.before: Any = None
        layers = [part.path for tower in (passes.anatomy, *passes.anatomy.other_towers) for part in tower.layers]
        inside = [layer for layer in layers if always_begins and is_inside(layer, path)]
        # modules that transformers checkpoints, perhaps from outside of their calls: the layers inside, and itself
        self.checkpointed = [self.module, *map(passes.model.get_submodule, inside)]

    def install(self) -> None:
        self.before = get_call_override(self.module)
        set_call_override(self.module, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            self.follow_checkpointing()
        passes, arguments = self.passes, name_arguments(self.arguments, args, kwargs) if self.always_begins else {}
        if torch.compiler.is_dynamo_compiling():
            if self.always_begins:
                passes.trace(arguments)
            return self.call_original(*args, **kwargs)
        outer = current_pass(passes)
        if outer is not None and not self.always_begins:
            return self.call_original(*args, **kwargs)
        if "adapter_names" in kwargs:  # most models take any keyword and would ignore it
            raise DeltuneError(
                "adapter_names is an argument of PEFT's models. Here it is: with tuned.rows([…]): model(…)"
            )
        forward_pass = passes.begin(arguments)
        output = passes.run_and_end(forward_pass, self.call_original, args, kwargs)
        called = forward_pass.called_vocabulary or passes.compiled_pass.called_vocabulary
        if passes.vocabulary is not None and not self.path and not called:
            _refuse_if_edited(passes.vocabulary, forward_pass.assignment)
        if outer is None and torch.is_grad_enabled():
            remember_for_backward(passes, forward_pass.assignment, output)
        return output

    def follow_checkpointing(self) -> None:
        """Replace the modules' own checkpointing functions; checkpointing may be enabled at any time."""
        for module in self.checkpointed:
            checkpoint = get_checkpoint_function(module)
            if checkpoint is not None and not isinstance(checkpoint, CheckpointFunction):
                set_checkpoint_function(module, CheckpointFunction(self.passes, checkpoint))

    def call_original(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module as it was called before."""
        return call_class(self.module, args, kwargs) if self.before is None else self.before(*args, **kwargs)

    def remove(self) -> None:
        remove_call_override(self.module, self, self.before)
        if isinstance(checkpoint := get_checkpoint_function(self.module), CheckpointFunction):
            set_checkpoint_function(self.module, checkpoint.original)


def _refuse_if_edited(path: str, assignment: RowAssignment) -> None:
    """Raise an error if a delta of an assignment acts at a module that the pass did not call."""
    acts = path in assignment.tensors or path in assignment.inputs
    if acts or any((path, side) in assignment.writes for side in ("input", "output")):
        raise DeltuneError(
            f"the forward pass did not call {path}, so the delta did not act there. Losses that compute the logits "
            f"from its weight (TRL's trainers, Liger kernels) do that: train with a loss that calls it, or with a "
            f"method that does not act at {path}"
        )


class ForwardOverride:
    """Replaces the `forward` of a module for which some delta has its own tensors."""

    of_live_model = True

    def __init__(self, passes: PassManager, path: str, module: nn.Module) -> None:
        self.passes, self.path, self.module = passes, path, module
        self.linear: LinearForward | None = None

    def install(self) -> None:
        self.linear = linear_forward(self.module)
        if self.linear is None and instance_forward(self.module) is not None:
            raise DeltuneError(
                f"the forward of {self.path!r} was replaced by something else, so it cannot run with tensors of a "
                "delta: attach before it is replaced, or remove the replacement"
            )
        set_instance_forward(self.module, self)
        self.module.register_forward_pre_hook(self.check_installed)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        override = self.passes.assignment().tensors.get(self.path)
        if override is not None:
            return override.run(self.module, args, kwargs)
        return forward_with(self.module, {}, *args, **kwargs)

    def check_installed(self, module: nn.Module, args: Any) -> None:
        """Raise an error if the module's forward was replaced later by one that does not call this one."""
        if instance_forward(module) is not self:
            raise DeltuneError(
                f"the forward of {self.path!r} was replaced after a delta was attached that trains its tensors: "
                "detach, replace it, and attach again"
            )

    def remove(self) -> None:
        remove_hooks(self.module, self)
        if instance_forward(self.module) is self:
            set_instance_forward(self.module, self.linear)


def runs_class_forward(module: nn.Module) -> bool:
    """Whether a module computes as its class does."""
    forward = module.__dict__.get("forward")
    return forward is None or isinstance(forward, ForwardOverride | LinearForward)


class InputHook(ModuleHook):
    """Applies the edits that read or change the input of a module."""

    def install(self) -> None:
        self.module.register_forward_pre_hook(self.before, with_kwargs=True)

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Change the module's input, then keep it for the edits that read it: x is what the module really reads."""
        assignment = self.passes.assignment()
        readers, writes = assignment.inputs.get(self.path, ()), assignment.writes.get((self.path, "input"))
        if not readers and writes is None:
            return None
        key = None if args else next(iter(kwargs))
        h = args[0] if key is None else kwargs[key]
        this_pass = self.passes.current_pass()
        if writes is not None:
            h = writes.apply(h, module, this_pass.inputs, facts=this_pass.facts)
        for edit, _ in readers:
            this_pass.inputs[edit] = h
        if writes is None:
            return None
        return ((h, *args[1:]), kwargs) if key is None else (args, {**kwargs, key: h})


class OutputHook(ModuleHook):
    """Applies the edits that write what a module gives."""

    def install(self) -> None:
        self.module.register_forward_hook(self.after, with_kwargs=True)

    def after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Change the module's output (its first element, when it is a tuple)."""
        writes = self.passes.assignment().writes.get((self.path, "output"))
        if writes is None:
            return None
        read = args[0] if args else next(iter(kwargs.values()), None)
        h = output if isinstance(output, torch.Tensor) else output[0]
        this_pass, is_ours = self.passes.current_pass(), self._is_ours(module)
        h = writes.apply(h, module, this_pass.inputs, read, is_ours, this_pass.facts)
        return h if isinstance(output, torch.Tensor) else (h, *output[1:])

    def _is_ours(self, module: nn.Module) -> bool:
        """Whether the output may be overwritten: no other hook or wrapper has it, and autograd does not need it."""
        # torch.export refuses to change a part of a fused projection in place
        makes_anew = type(module) in (nn.Linear, Conv1D) and runs_class_forward(module)
        return makes_anew and is_plain_inference() and count_forward_hooks(module) == 1


class VocabularyHook(ModuleHook):
    """Notes that the projection to the vocabulary is called: some losses read its weight instead."""

    def install(self) -> None:
        self.module.register_forward_pre_hook(self.before)
        self.passes.vocabulary = self.path

    def before(self, module: nn.Module, args: Any) -> None:
        """Note the call; in compiled code for good, as a compiled part cannot know of which pass it is a part."""
        self.passes.current_pass().called_vocabulary = True

    def remove(self) -> None:
        super().remove()
        self.passes.vocabulary = None


class AttentionHook(ModuleHook):
    """Gives the attention function, which is called with an attention module, the edits inside that module."""

    of_live_model = True

    def install(self) -> None:
        self.module.__dict__[HOOK_ATTRIBUTE] = self

    def edits(self) -> list[tuple[Edit, DeltaRows]]:
        return self.passes.assignment().attention.get(self.path, [])

    def inputs(self) -> dict[Edit, torch.Tensor]:
        return self.passes.current_pass().inputs

    def prefix_of_rows(self, key: torch.Tensor, stack: Callable[[], PrefixRows]) -> PrefixRows:
        """Return the prefix of every row; where no tensor changes between passes, from an earlier pass."""
        kept = self.passes.assignment().prefixes
        prefix = None if kept is None else kept.get(self.path)
        if prefix is None or prefix.keys.shape[0] != key.shape[0] or prefix.keys.dtype != key.dtype:
            prefix = stack()
            if kept is not None:
                kept[self.path] = prefix
        return prefix

    def remove(self) -> None:
        self.module.__dict__.pop(HOOK_ATTRIBUTE, None)


class HiddenStatesHook(ModuleHook):
    """Applies the edits that read all hidden states of a stack and change the last, at the module around its layers."""

    def __init__(self, passes: PassManager, path: str) -> None:
        super().__init__(passes, path)
        stack = next(s for s in passes.anatomy.stacks if s.container == path)
        layers = [layer for layer in passes.anatomy.layers if layer.stack == stack.name]
        self.others = self.layers = [passes.model.get_submodule(layer.path) for layer in layers]

    def install(self) -> None:
        self.module.register_forward_pre_hook(self.open)
        self.module.register_forward_hook(self.close)
        for layer in self.layers:
            layer.register_forward_pre_hook(self.collect, with_kwargs=True)

    def open(self, module: nn.Module, args: Any) -> None:
        if self.passes.assignment().states.get(self.path):
            self.passes.current_pass().states[self.path] = []

    def collect(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep a layer's input, the state before it; nothing is kept outside the container's call, in recomputation."""
        states = self.passes.current_pass().states.get(self.path)
        if states is not None:
            states.append(args[0] if args else next(iter(kwargs.values())))

    def close(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Apply the edits to the last state, which is the container's first output."""
        states = self.passes.current_pass().states.pop(self.path, None)
        if not states:
            return None
        before = last = output if isinstance(output, torch.Tensor) else output[0]
        states = [*states, last]
        facts = self.passes.current_pass().facts
        for edit, group in self.passes.assignment().states[self.path]:
            whole, of_rows = (
                torch.stack([group.select(h) for h in states]),
                {n: group.select(f) for n, f in facts.items()},
            )
            at = ModulePlace(ModuleCall(module, module.forward, None, facts=of_rows), edit.place, edit.training)
            last = group.replace(last, edit.compose(whole[-1], edit.form(edit.tensors(), whole, at)))
        return _with_replaced(output, before, last)


def _with_replaced(output: Any, before: torch.Tensor, after: torch.Tensor) -> Any:
    """Return the output with a tensor replaced everywhere: alone, in a tuple, among the hidden states."""
    if output is before:
        return after
    if isinstance(output, tuple | list):
        return type(output)(_with_replaced(value, before, after) for value in output)
    if isinstance(output, dict):
        for name, value in output.items():
            output[name] = _with_replaced(value, before, after)
    return output


ATTRIBUTE = "attribute"
"""The kind of hook that sets an attribute."""


class AttributeHook:
    """Sets an attribute of the model or of a module in it as long as any delta is attached."""

    def __init__(self, passes: PassManager, path: str, name: str, value: Any) -> None:
        self.module, self.name, self.value = passes.model.get_submodule(path), name, value
        self.before: tuple[Any, ...] | None = None  # the value before, or an empty tuple where it was not set

    def install(self) -> None:
        attributes = self.module.__dict__
        self.before = (attributes[self.name],) if self.name in attributes else ()
        attributes[self.name] = self.value

    def remove(self) -> None:
        if self.before:
            self.module.__dict__[self.name] = self.before[0]
        elif self.before is not None:
            self.module.__dict__.pop(self.name, None)
        self.before = None


class Hook(Protocol):
    """A hook that is installed while deltas are attached. `remove` also undoes an interrupted `install`."""

    def install(self) -> None: ...

    def remove(self) -> None: ...


HOOK_CLASSES: dict[str, Any] = {
    "input": InputHook, "output": OutputHook, "attention": AttentionHook, "states": HiddenStatesHook,
    "tokens": PromptHook,
}  # fmt: skip
"""The hook for each side of a module that a place may be at."""

INSTALL_ORDER = ("first", "states", "chosen", "tokens", "positions", "pooling")
"""Kinds of hooks at the same modules, in the order in which they run, whatever was attached first: a first pass has the
arguments of the caller, hidden states are read before a prompt's rows are removed from them, tokens are chosen before
it puts its rows before them, positions are shifted where it has put them, and what is left of the states is pooled."""


Hooks = dict[tuple[str, str], Callable[[], Hook]]
"""Functions that make hooks, by path and kind of the hook."""


def hooks_of_delta(passes: PassManager, delta: Delta) -> Hooks:
    """Return the hooks that a delta needs beside `hooks_of_model`."""
    anatomy, needed = passes.anatomy, dict[tuple[str, str], Callable[[], Hook]]()
    for edit in delta.all_edits():
        target = edit.place.target
        if target.side == "weight":
            module = passes.model.get_submodule(target.path)
            needed[target.path, "tensors"] = partial(ForwardOverride, passes, target.path, module)
            continue
        needed[target.path, target.side] = partial(HOOK_CLASSES[target.side], passes, target.path)
        if edit.source_path is not None:
            needed[edit.source_path, "input"] = partial(InputHook, passes, edit.source_path)
            parent = _common_parent(target.path, edit.source_path)
            needed[parent, "pass"] = partial(ForwardWrapper, passes, parent, always_begins=False)
        if edit.modification.positions != ALL or edit.form.reads_text:
            entry = anatomy.stacks[0].entry
            needed[entry, "chosen"] = partial(TokensHook, passes, entry)
        if edit.form.reads_first_pass:
            entry = anatomy.stacks[0].entry
            needed[entry, "first"] = partial(FirstPassHook, passes, entry)
        if edit.place.shifted_stack:
            entry = anatomy.stack(edit.place.shifted_stack).entry
            needed[entry, "positions"] = partial(PositionHook, passes, entry)
    if delta.pooling != "model":
        needed[anatomy.base, "pass"] = partial(ForwardWrapper, passes, anatomy.base, always_begins=False)
        needed[anatomy.base, "pooling"] = partial(PoolingHook, passes, anatomy.base)
    overridden: set[nn.Module] = set()  # a module that has several paths is replaced once, under its first path
    for tensor, _ in delta.masked_tensors():
        for path, _ in owning_modules(anatomy, tensor):
            module = passes.model.get_submodule(path)
            if module not in overridden:
                overridden.add(module)
                needed[path, "tensors"] = partial(ForwardOverride, passes, path, module)
    vocabulary = anatomy.vocabulary
    if vocabulary is not None and any(path == vocabulary.path for path, _ in needed):
        needed[vocabulary.path, "called"] = partial(VocabularyHook, passes, vocabulary.path)
    return needed


def hooks_of_model(passes: PassManager) -> Hooks:
    """Return the hooks that the model needs as long as any delta is attached."""
    anatomy = passes.anatomy
    entries = {layer.path: False for layer in anatomy.layers} | {stack.container: False for stack in anatomy.stacks}
    entries |= {layer.path: False for part in anatomy.other_towers for layer in part.layers}
    entries |= {"": True} | {stack.entry: True for stack in anatomy.stacks}
    needed: Hooks = {
        (path, "pass"): partial(ForwardWrapper, passes, path, always_begins) for path, always_begins in entries.items()
    }
    for path, module in base_modules(passes.model):
        if isinstance(module, PreTrainedModel):  # also a model inside the model, such as its encoder
            kinds = {name: kind for name, kind in METHODS.items() if hasattr(type(module), name)}
            needed |= {(path, name): partial(kind, passes, path, name) for name, kind in kinds.items()}
    needed |= {("", name): partial(kind, passes, "", name) for name, kind in WHOLE_MODEL_METHODS.items()}
    return needed | _attributes_of_quantized(passes)


def _attributes_of_quantized(passes: PassManager) -> Hooks:
    """Return the hooks that let a quantised model be trained: by the Trainer, and after an evaluation on a CPU."""
    needed: Hooks = {}
    if getattr(passes.model, IS_QUANTIZED, False):
        needed["", ATTRIBUTE] = partial(AttributeHook, passes, "", IS_QUANTIZED, False)
    for path, module, _ in quantized_modules(passes.model):
        if getattr(module, PACKS_FOR_CPU, False):
            needed[path, ATTRIBUTE] = partial(AttributeHook, passes, path, PACKS_FOR_CPU, False)
    return needed


def install_rank(key: tuple[str, str]) -> int:
    """The place of a kind of hook in INSTALL_ORDER, counted from 1; 0 where the order does not matter."""
    return INSTALL_ORDER.index(key[1]) + 1 if key[1] in INSTALL_ORDER else 0


def _common_parent(first: str, second: str) -> str:
    """The path of the innermost module that contains both."""
    shared = []
    for name, same in zip(first.split("."), second.split("."), strict=False):
        if name != same:
            break
        shared.append(name)
    return ".".join(shared)


def unreached_edits(order: CallOrder, delta: Delta) -> list[str]:
    """Return the names of the places of a delta that a forward pass does not reach."""
    return [edit.place.name for edit in delta.all_edits() if not _reached(order, edit)]


def _reached(order: CallOrder, edit: Edit) -> bool:
    """Whether an edit's module runs, and after the module whose input it reads, if that is another."""
    target = edit.place.target
    if target.side == "attention":
        ran = target.path in order.attended
    else:
        ran = target.path in order.ended or target.side == "tokens"
    source = edit.source_path
    return ran and (source is None or (source in order.began and order.began[source] <= order.ended[target.path]))
