"""Records which modules and operations one forward pass runs, and which outputs are the inputs of which others.

No arithmetic is done: a copy of the model's structure runs on meta tensors, without masks, and with functions that
return the right shape in place of attentions and experts. `inspection` needs no numbers, only which outputs are the
inputs of which others. The model itself is neither run nor changed, so other threads may run it meanwhile.

Some models decide by the numbers what they do next. Of these the copy runs on zeros: every weight is one zero in
memory, seen in the shape of the weight, and matrix products give zeros without being computed.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Collection, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.integrations.moe import ExpertsInterface

from ..compat import (
    TorchDispatchMode,
    TorchFunctionMode,
    has_attention_implementation,
    operation_name,
    parameters_of,
    set_attention_implementation,
    set_experts_implementation,
    storage_id,
    submodules_of,
)
from ..errors import DeltuneError, error_summary
from .graph import Node, Trace, first_states
from .inputs import candidate_tower_inputs, input_candidates, main_input
from .skeleton import Stamp, base_modules, fill_with_zeros, structural_copy, structure_stamp


@dataclass(frozen=True)
class CallOrder:
    """Which modules a forward pass calls, and in what order."""

    attended: frozenset[str]  # paths of the modules that called the attention interface
    began: dict[str, int]  # how many steps there were when each module was first entered
    ended: dict[str, int]  # how many steps there were when each module last returned

    def including(self, other: CallOrder, path: str) -> CallOrder:
        """Return the order with the calls inside another model, at a path of this one, that a pass may enter too."""
        prefix = f"{path}."
        return CallOrder(
            self.attended | {f"{prefix}{name}".rstrip(".") for name in other.attended},
            self.began | {f"{prefix}{name}".rstrip("."): number for name, number in other.began.items()},
            self.ended | {f"{prefix}{name}".rstrip("."): number for name, number in other.ended.items()},
        )


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Iterate over the tensors in nested tuples, lists and dictionaries."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


OBSERVING_ATTENTION = "deltune_observe"
"""The name under which the attention that only records its call, and experts of no arithmetic, are registered with
transformers."""

_VIEW_OPERATIONS = {
    "view", "_unsafe_view", "reshape", "transpose", "permute", "t", "expand", "slice", "select", "split", "chunk",
    "split_with_sizes", "unbind", "unsqueeze", "squeeze", "alias", "detach", "clone", "_to_copy", "contiguous",
    "unflatten", "flatten", "_reshape_alias", "as_strided", "unsafe_split", "lift_fresh", "to",
}  # fmt: skip
_PASS_OPERATIONS = _VIEW_OPERATIONS | {
    "native_dropout",
    "dropout",
    "bernoulli",
    "clamp",
    "nan_to_num",
    "div",
    "mul",
    "where",
    "roll",
}
_SHAPE_OPERATIONS = {
    "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "new_zeros", "new_ones", "new_full",
}  # fmt: skip
"""Operations that only take a shape. An empty tensor is filled in place later, which is not followed, so the tensor
whose shape it takes stands for what it will hold."""
_MIX_OPERATIONS = {"bmm", "baddbmm", "matmul", "einsum", "_softmax", "softmax", "mm", "addmm", "_safe_softmax"}


class _OneIndexAsSlice(TorchFunctionMode):
    """Reads `x[..., [-2], :]` as the slice that it equals, so that the part of a fused projection shows as a view."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__getitem__ and isinstance(args[1], tuple):
            lists = [i for i in args[1] if isinstance(i, list | torch.Tensor)]
            if len(lists) == 1 and isinstance(lists[0], list) and [type(i) for i in lists[0]] == [int]:
                args = (args[0], tuple(slice(i[0], i[0] + 1 or None) if isinstance(i, list) else i for i in args[1]))
        return func(*args, **(kwargs or {}))


_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "convolution", "_grouped_mm"}
"""Operations that are not computed on zeros either: they take the time, and would unfold a weight in memory."""


class _Recorder(TorchDispatchMode):
    """Records a node for each operation; a module without children, or an attention, is one node without its inside.

    `opaque` is greater than 0 while the inside of such a node runs.
    """

    def __init__(
        self,
        paths: dict[torch.nn.Module, str],
        originals: dict[torch.nn.Module, torch.nn.Module],
        on_zeros: bool = False,
    ) -> None:
        super().__init__()
        self.paths, self.originals, self.on_zeros = paths, originals, on_zeros
        self.trace = Trace()
        self.producer: dict[int, Node] = {}
        self.written: dict[int, list[Node]] = {}  # by storage, the steps that wrote to a part of it in place
        self.opaque = 0
        self.steps = 0  # operations inside the module that is one node, views apart
        self.multiplied: set[int] = set()  # parameters that are a factor of a product as they are
        self.alive: list[Any] = []  # keeps the tensors, since an id is unique only while its object lives

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        operation = func.overloadpacket.__name__
        if self.on_zeros and operation in _PRODUCTS and "out" not in (kwargs or {}):
            out = _zeros_of_product(func, args, kwargs or {})
        else:
            out = func(*args, **(kwargs or {}))
        name = operation.rstrip("_") if not operation_name(func).endswith("__") else ""
        if self.opaque:
            self.steps += name not in _VIEW_OPERATIONS
            if name in ("addmm", "mm", "matmul", "bmm"):  # a factor that is the weight itself: shape (in, out)
                self.multiplied.update(id(a) for a in args if isinstance(a, torch.nn.Parameter))
            return out
        # what only takes a shape, such as zeros_like, reads no number
        inputs = [] if name in _SHAPE_OPERATIONS else list(tensors_in((args, kwargs or {})))
        if name == "eq" and isinstance(args[1], int) and self._is_input(args[0], "input_ids"):
            self.trace.compared.append(args[1])
        if name == "embedding" and (table := self._running_holder(args[0])) is not None:
            self.record("embedding", inputs, [out], path=self.paths[table], module=self.originals[table])
            return out
        kind = _operation_kind(name, inputs, out, self.producer)
        self.record(kind, inputs, list(tensors_in(out)), operation=name, picks=_picked_axis(name, args))
        return out

    def _running_holder(self, weight: torch.Tensor) -> torch.nn.Module | None:
        """Return the module that is running and has a tensor as its weight, such as a table with a norm inside."""
        began, ended = self.trace.began, self.trace.ended
        running = (module for module, path in self.paths.items() if path in began and path not in ended)
        return next((module for module in running if parameters_of(module).get("weight") is weight), None)

    def record(self, kind: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor], **fields: Any) -> Node:
        producer = self.producer
        sources = [producer.get(id(t)) for t in inputs]
        parents = list({id(p): p for p in (*sources, *self._writers(inputs)) if p is not None}.values())
        order = len(self.trace.nodes)
        node = Node(kind, parents, order, inputs=inputs, sources=sources, outputs=outputs, **fields)
        for parent in parents:
            parent.children.append(node)
        for output in outputs:
            if any(output is t for t in inputs):
                self.written.setdefault(storage_id(output), []).append(node)
        producer.update((id(t), node) for t in outputs)
        self.alive.extend((inputs, outputs))
        self.trace.nodes.append(node)
        return node

    def _is_input(self, tensor: torch.Tensor, argument: str) -> bool:
        source = self.producer.get(id(tensor))
        return source is not None and source.argument == argument

    def _writers(self, inputs: list[torch.Tensor]) -> Iterator[Node]:
        """Iterate over the steps that wrote to the memory of tensors, through other views, after these were made."""
        for tensor in inputs:
            source = self.producer.get(id(tensor))
            for writer in self.written.get(storage_id(tensor), ()) if self.written else ():
                if source is not None and writer.order > source.order:
                    yield writer


def _zeros_of_product(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Return zeros in the shape that an operation gives, without computing it."""

    def meta(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")

    out = func(*map(meta, args), **{name: meta(value) for name, value in kwargs.items()})
    return torch.zeros(out.shape, dtype=out.dtype)


def _picked_axis(name: str, args: tuple[Any, ...]) -> int | None:
    """Return the first axis that an operation picks from by indices or by a condition; None if it does not pick."""
    if name == "index":
        return next((axis for axis, index in enumerate(args[1]) if index is not None), None)
    if name in ("index_select", "gather"):
        return int(args[1]) % max(args[0].dim(), 1)
    return 0 if name == "masked_select" else None


def _operation_kind(name: str, inputs: list[torch.Tensor], output: Any, producer: dict[int, Node]) -> str:
    traced = [t for t in inputs if id(t) in producer]
    if name == "add" and len(traced) == 2 and traced[0].shape == traced[1].shape and traced[0].is_floating_point():
        return "add"
    if name == "add" and len(traced) == 1 and any(isinstance(t, torch.nn.Parameter) and t.dim() == 1 for t in inputs):
        return "pass"  # a shift of the features
    if name in _VIEW_OPERATIONS:
        return "view"
    if name in _MIX_OPERATIONS:
        return "mix"
    # a product of two activations is a gate; one with a number or a parameter only changes the scale
    if name in _PASS_OPERATIONS and len(traced) <= 1:
        return "pass"
    if name == "constant_pad_nd" and traced and traced[0].shape == output.shape:  # Swin pads images, often by nothing
        return "pass"
    return "op"


def _leaf_kind(module: torch.nn.Module, inputs: list[torch.Tensor], output: Any) -> str | None:
    """Return the kind of a module that is one node, by the shapes of what it read and returned; None for others."""
    if _reads_experts(module, inputs):
        return "experts"
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or not isinstance(output, torch.Tensor):
        return "pass" if _scales(module, inputs, output) else None
    read = first_states(inputs)
    if weight.dim() == 2 and (read is None or any(not t.is_floating_point() for t in inputs)):
        return "embedding"
    if read is None:
        return None
    if weight.dim() == 1 and read.shape == output.shape and weight.shape[0] == read.shape[-1]:
        return "norm"
    if weight.dim() == 2 and sorted(weight.shape) == sorted((read.shape[-1], output.shape[-1])):
        return "linear"
    if weight.dim() > 1 and read.shape == output.shape and read.shape[-weight.dim() :] == weight.shape:
        return "pass"  # a norm with numbers of its own for each head
    # a table of positions may be given vectors; what reads four axes is a product for each group of features
    return "embedding" if weight.dim() == 2 and read.dim() < 4 and output.shape[-1] == weight.shape[1] else None


_RECORDER: ContextVar[_Recorder | None] = ContextVar("deltune_recorder", default=None)


def _observing_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """An attention that does no arithmetic: (B, heads, n, d) in, (B, n, heads, d_value) of the same kind out.

    Whatever else a model gives it counts as read: biases of relative positions in the place of a mask, or sinks.
    """
    recorder = _RECORDER.get()
    if recorder is None:
        raise DeltuneError(
            f"attention {OBSERVING_ATTENTION!r} only runs inside deltune.inspect; set attn_implementation='sdpa'"
        )
    recorder.opaque += 1
    batch, heads, tokens, _ = query.shape
    output = query.new_zeros(batch, tokens, heads, value.shape[-1])
    recorder.opaque -= 1
    reads = [(tensor, recorder.producer.get(id(tensor))) for tensor in tensors_in((attention_mask, kwargs))]
    recorder.alive.append(reads)
    recorder.record("attention", [query, key, value], [output], module=recorder.originals[module], other_reads=reads)
    recorder.trace.attended.add(recorder.paths[module])
    return output, None


def _observing_experts(module: torch.nn.Module, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Experts that do no arithmetic and send no token anywhere."""
    return torch.zeros_like(hidden_states)


def _no_mask(*args: Any, **kwargs: Any) -> None:
    return None


AttentionInterface.register(OBSERVING_ATTENTION, _observing_attention)
AttentionMaskInterface.register(OBSERVING_ATTENTION, _no_mask)
ExpertsInterface.register(OBSERVING_ATTENTION, _observing_experts)


def all_configs(model: torch.nn.Module) -> list[Any]:
    """Return every configuration that a module of the model reads; encoders and decoders have copies of their own."""
    configs: dict[int, Any] = {}
    for _, module in base_modules(model):
        config = getattr(module, "config", None)
        if config is not None and has_attention_implementation(config):
            configs[id(config)] = config
    return list(configs.values())


def base_model(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model without its head, or the model itself where it has none.

    A module that only wraps another model is skipped: the decoder of an encoder-decoder model, used alone, has one.
    """
    base = model.base_model
    while main_input(base) is None:
        inner = [child for child in base.children() if isinstance(child, PreTrainedModel)]
        if len(inner) != 1:
            break
        base = inner[0]
    assert isinstance(base, PreTrainedModel)
    return base


def meta_model(config: PreTrainedConfig, auto_class: Any = AutoModel) -> PreTrainedModel:
    """Build AutoModel of a configuration, or another auto class of transformers, on the meta device, without values."""
    copied = copy.deepcopy(config)
    copied.architectures = config.architectures or []  # transformers goes through them where a family has two classes
    try:
        with torch.device("meta"):
            # the dtype is written to the configuration; without one, the configuration's becomes the process's default
            model: PreTrainedModel = auto_class.from_config(copied, dtype=torch.get_default_dtype())
            return model
    except Exception as error:
        raise DeltuneError(
            f"no model can be built from this {type(config).__name__}: {error_summary(error)}"
        ) from error


_CALL_ORDERS: weakref.WeakKeyDictionary[PreTrainedModel, tuple[Any, CallOrder]] = weakref.WeakKeyDictionary()
"""By model, a stamp of what was traced, and its order of calls."""


def call_order(model: PreTrainedModel) -> CallOrder:
    """Return which modules the base model's forward pass calls, and in what order.

    It is traced once, and again whenever the structure of the base model has changed.
    """
    stamp, order = _CALL_ORDERS.get(model, (None, None))
    if order is None or stamp != _base_stamp(model):
        trace_forward(model)
        order = _CALL_ORDERS[model][1]
    return order


def _base_stamp(model: PreTrainedModel) -> tuple[str, Stamp]:
    """Return the path of the base model, and a stamp of it."""
    base = base_model(model)
    return next(path for path, module in base_modules(model) if module is base), structure_stamp(base)


def trace_forward(model: PreTrainedModel) -> Trace:
    """Run a copy of a model's base model on meta tensors, or else on zeros, and record the forward pass.

    A model that computes attention itself may need its own masks. It is then traced with its eager attention, which
    shows everything but the inside of the attentions. A model that decides by its numbers what to do next cannot run
    on shapes alone, and is traced on zeros. The trace has the paths and modules of the live model.
    """
    stamp = _base_stamp(model)  # taken first: a change in another thread meanwhile makes it differ
    trace, reasons = _first_trace(model, input_candidates(base_model(model)))
    if trace is None:
        last = f", nor on zeros ({reasons[-1]})" if reasons[-1] != reasons[0] else ""
        raise DeltuneError(
            f"{type(model).__name__} cannot be inspected: its forward pass does not run on shapes alone "
            f"({reasons[0]}){last}"
        )
    _CALL_ORDERS[model] = stamp, CallOrder(frozenset(trace.attended), trace.began, trace.ended)
    return trace


def trace_tower(model: PreTrainedModel, tower: str, between: Collection[str]) -> Trace | None:
    """Record the forward pass on text and on what another tower reads; None if no pass came past that tower.

    It shows what of the tower's hidden states the rest of the model reads. Most models stop after the tower if the text
    has no token for each part of an image. Which token that is shows in what the token ids are compared with, and a
    second pass has as many of them as there are states. If that one stops too, the first counts as far as it came if it
    has called the modules `between` the towers, and is `stopped`.
    """
    try:
        for on_zeros, candidate in product((False, True), candidate_tower_inputs(base_model(model))):
            trace = _record_as_far(model, candidate, on_zeros, tower)
            if trace is None:
                continue
            if not trace.stopped:
                return trace
            for with_places in _with_placeholders(trace, candidate, tower):
                whole = _record_as_far(model, with_places, True, tower)
                if whole is not None and not whole.stopped:
                    return whole
            if trace.entered.keys() >= set(between):
                return trace
    except Exception:  # also a configuration whose sizes are not those that inputs are made from
        return None
    return None


def _record_as_far(model: PreTrainedModel, inputs: dict[str, Any], on_zeros: bool, tower: str) -> Trace | None:
    """Return the trace of a pass that may stop after a tower; None if it stops before."""
    try:
        return _record(model, OBSERVING_ATTENTION, inputs, on_zeros, tower)
    except Exception:
        return None


def _with_placeholders(trace: Trace, inputs: dict[str, Any], tower: str) -> Iterator[dict[str, Any]]:
    """Iterate over inputs whose text is a token for each state that a pass had made of images or sounds."""
    width = next((n.outputs[0].shape[-1] for n in trace.of_kind("embedding")), 0)
    states = [t for n in trace.nodes[: trace.ended[tower] - 1 : -1] for t in n.outputs if t.is_floating_point()]
    lengths = dict.fromkeys(t.numel() // width for t in states if t.dim() and t.shape[-1] == width)
    for token in trace.compared:
        for length in list(lengths)[:2]:
            ids = partial(torch.full, (1, length), token)
            yield {**inputs, "input_ids": ids, "attention_mask": partial(torch.ones, 1, length, dtype=torch.long)}


def _first_trace(model: PreTrainedModel, candidates: Sequence[dict[str, Any]]) -> tuple[Trace | None, list[str]]:
    """Return the first trace that can be had, on shapes or on zeros, without or with the model's own attention.

    With it come the errors of the passes before it.
    """
    reasons: list[str] = []
    for on_zeros, attention, inputs in product((False, True), (OBSERVING_ATTENTION, "eager"), candidates):
        try:
            trace = _record(model, attention, inputs, on_zeros)
        except DeltuneError:
            raise
        except Exception as error:
            reasons.append(f"{type(error).__name__}: {error_summary(error)}")
        else:
            trace.on_zeros = reasons[0] if on_zeros else ""
            return trace, reasons
    return None, reasons


_TAKES_EMBEDDINGS: weakref.WeakKeyDictionary[PreTrainedModel, tuple[Any, int]] = weakref.WeakKeyDictionary()
"""Models that were seen to run on vectors, with the stamp of their structure and the width."""


def check_takes_embeddings(model: PreTrainedModel, width: int) -> None:
    """Raise unless a model runs on vectors as wide as its word embeddings in place of token ids.

    It is tried once, and again whenever the structure of the base model has changed.
    """
    stamp = _base_stamp(model)
    if _TAKES_EMBEDDINGS.get(model) == (stamp, width):
        return
    reasons: list[str] = []
    candidates = [inputs for inputs in input_candidates(base_model(model)) if "input_ids" in inputs]
    for inputs in candidates:
        # two tokens more: what has a value for each token, such as its place on a page, then shows
        length = inputs["input_ids"]().shape[1] + 2
        inputs |= {"input_ids": None, "inputs_embeds": partial(torch.zeros, 1, length, width)}
        if "attention_mask" in inputs:
            inputs["attention_mask"] = partial(torch.ones, 1, length, dtype=torch.long)
        trace, errors = _first_trace(model, [inputs])
        if trace is not None:
            if "decoder_input_ids" not in inputs:
                _check_one_state_a_token(model, trace, length, width)
            _TAKES_EMBEDDINGS[model] = stamp, width
            return
        reasons.append(errors[-1])
    raise DeltuneError(
        f"rows before the input embeddings need a model that runs on inputs_embeds alone, and {type(model).__name__} "
        f"does not ({reasons[0] if reasons else 'it reads no token ids'})"
    )


def _check_one_state_a_token(model: PreTrainedModel, trace: Trace, length: int, width: int) -> None:
    """Raise if an output has several states for each token, as a model that predicts n-grams has.

    It is then unclear which states belong to the rows before the embeddings.
    """
    for tensor in (t for node in trace.results for t in node.outputs if t.dim() == 3 and t.is_floating_point()):
        if tensor.shape[-1] == width and tensor.shape[1] > length and not tensor.shape[1] % length:
            raise DeltuneError(
                f"rows before the input embeddings need one state for each token, and {type(model).__name__} returns "
                f"{tensor.shape[1] // length} for each"
            )


def _record(model: PreTrainedModel, attention: str, shapes: dict[str, Any], on_zeros: bool, through: str = "") -> Trace:
    """Record one pass; one that fails counts if the module at the path `through` has returned by then."""
    twin, originals = structural_copy(model)
    if on_zeros:
        fill_with_zeros(twin)
    base = base_model(twin)
    prefix = next(name for name, module in twin.named_modules() if module is base)
    paths = {module: f"{prefix}.{name}".strip(".") for name, module in base.named_modules()}
    recorder = _Recorder(paths, originals, on_zeros)
    named = twin.named_parameters(remove_duplicate=False)
    recorder.trace.parameters = {id(parameter): name for name, parameter in named}
    for module in paths:
        module.register_forward_pre_hook(_on_enter, with_kwargs=True)
        module.register_forward_hook(_on_exit, with_kwargs=True)
    for config in all_configs(twin):
        set_attention_implementation(config, attention)
        set_experts_implementation(config, OBSERVING_ATTENTION)
    token = _RECORDER.set(recorder)
    try:
        with torch.no_grad(), torch.device("cpu" if on_zeros else "meta"), _OneIndexAsSlice(), recorder:
            inputs = {name: make() if callable(make) else make for name, make in shapes.items()}
            for name, tensor in inputs.items():
                if isinstance(tensor, torch.Tensor):
                    recorder.record("input", [], [tensor], argument=name)
            output = base(**inputs)
    except Exception:
        if through not in recorder.trace.ended:
            raise
        recorder.trace.stopped = True
        recorder.trace.results = recorder.trace.nodes[recorder.trace.ended[through] :]
    else:
        producers = (recorder.producer.get(id(tensor)) for tensor in tensors_in(output))
        recorder.trace.results = [node for node in producers if node is not None]
    finally:
        _RECORDER.reset(token)
    return recorder.trace


def _current_recorder() -> _Recorder:
    recorder = _RECORDER.get()
    assert recorder is not None
    return recorder


def _on_enter(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
    recorder = _current_recorder()
    path, trace = recorder.paths[module], recorder.trace
    trace.runs[path] = trace.runs.get(path, 0) + 1
    trace.began.setdefault(path, len(trace.nodes))
    if path not in trace.entered:
        trace.entered[path] = (recorder.originals[module], set(kwargs) | _positional_names(module, args))
        if (first := next(tensors_in((args, kwargs)), None)) is not None:
            trace.arguments[path] = first
    if _is_leaf(module) and not _joins(module, args, kwargs):
        recorder.steps = 0 if not recorder.opaque else recorder.steps
        recorder.opaque += 1


def _on_exit(module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    recorder = _current_recorder()
    path = recorder.paths[module]
    recorder.trace.ended[path] = len(recorder.trace.nodes)
    first = next(tensors_in(output), None)
    if first is not None:
        recorder.trace.outputs.setdefault(path, first)
    if not _is_leaf(module) or _joins(module, args, kwargs):
        if first is not None and not recorder.opaque:
            recorder.trace.returned.setdefault(id(first), []).append(path)
        return
    recorder.opaque -= 1
    if recorder.opaque:
        return
    inputs = list(tensors_in((args, kwargs)))
    kind = _leaf_kind(module, inputs, output) or "op"
    node = recorder.record(kind, inputs, list(tensors_in(output)), path=path, module=recorder.originals[module])
    node.steps = recorder.steps
    node.transposed = kind == "linear" and id(parameters_of(module).get("weight")) in recorder.multiplied


def _is_leaf(module: torch.nn.Module) -> bool:
    """Return whether a module is one node: it has parameters and no modules inside, or it holds experts."""
    if submodules_of(module):
        return _holds_experts(module)
    return any(p is not None for p in parameters_of(module).values())


def _joins(module: torch.nn.Module, args: Any, kwargs: Any) -> bool:
    """Return whether a module reads two states of one shape, so that what it does with them is to be seen.

    It may be where the output of a sub-layer joins the residual stream. A norm with a gate is known by its weight.
    """
    if "weight" in parameters_of(module) or _holds_experts(module):
        return False
    shapes = [t.shape for t in tensors_in((args, kwargs)) if t.is_floating_point() and t.dim() > 2]
    return len(shapes) == 2 and shapes[0] == shapes[1]


def _scales(module: torch.nn.Module, inputs: list[torch.Tensor], output: Any) -> bool:
    """Return whether a module only multiplies the features that it reads by numbers of its own."""
    sizes = [p.shape for p in parameters_of(module).values() if p is not None]
    return [t.shape for t in inputs] == [getattr(output, "shape", None)] and sizes == [inputs[0].shape[-1:]]


def _expert_shapes(module: torch.nn.Module) -> set[torch.Size]:
    """Return the shapes of the weights of three dimensions, a matrix for each expert, that a module itself holds."""
    if isinstance(module, _CONVOLUTIONS):
        return set()
    shapes = {p.shape for p in parameters_of(module).values() if p is not None and p.dim() == 3 and min(p.shape) > 1}
    return shapes if len({shape[0] for shape in shapes}) == 1 else set()


def _holds_experts(module: torch.nn.Module) -> bool:
    """Return whether a module holds the weights of all experts: projections from the hidden states, and back.

    What convolves is a state-space layer, whose heads may have a matrix each, too.
    """
    return len(_expert_shapes(module)) > 1 and not any(isinstance(m, _CONVOLUTIONS) for m in module.modules())


def _reads_experts(module: torch.nn.Module, inputs: list[torch.Tensor]) -> bool:
    """Return whether a module that is one node multiplies what it reads by matrices of experts."""
    read = first_states(inputs)
    return read is not None and any(read.shape[-1] in shape[1:] for shape in _expert_shapes(module))


_CONVOLUTIONS = (
    torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d, torch.nn.ConvTranspose1d, torch.nn.ConvTranspose2d,
    torch.nn.ConvTranspose3d,
)  # fmt: skip


def _positional_names(module: torch.nn.Module, args: tuple[Any, ...]) -> set[str]:
    names = [name for name in inspect.signature(module.forward).parameters]
    return set(names[: len(args)])
