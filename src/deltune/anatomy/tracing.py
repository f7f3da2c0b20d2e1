"""Records one forward pass on the meta device as a graph of linears, norms, embeddings, attentions and additions.

No arithmetic is done: a copy of the model's structure runs on meta tensors, without masks, and with a function that
returns the right shape in place of the attention. What remains is which step reads which, and that is all that
`inspection` needs. The model itself is neither run nor changed, so other threads may run it meanwhile.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, AutoModel, PreTrainedConfig, PreTrainedModel

from ..compat import (
    TorchDispatchMode,
    has_attention_implementation,
    operation_name,
    parameters_of,
    set_attention_implementation,
    submodules_of,
)
from ..errors import DeltuneError, error_summary
from .skeleton import Stamp, base_modules, structural_copy, structure_stamp


@dataclass(eq=False)
class Node:
    """One recorded step of the forward pass.

    Attributes:
        kind: "linear", "norm", "embedding", "attention", "add" (of two activations), "mix" (a product of two
            activations), "view", "pass" (a change of scale, or dropout), "input", or "op" (anything else).
        parents: The nodes whose outputs it reads.
        order: Its number in the order of execution.
        path: The path of its module, "" for a step that is no module.
        argument: The name of the model's input that it is.
        module: The module of the live model.
        inputs: The tensors that it read.
        sources: The node that each input came from, or None.
        outputs: The tensors that it returned.
        transposed: Whether a linear's weight has the shape (in, out).
        children: The nodes that read its outputs.
    """

    kind: str
    parents: list[Node]
    order: int
    path: str = ""
    argument: str = ""
    module: Any = None
    inputs: list[torch.Tensor] = field(default_factory=list)
    sources: list[Node | None] = field(
        default_factory=list
    )  # at this time: later writes to the same tensor do not count
    outputs: list[torch.Tensor] = field(default_factory=list)
    transposed: bool = False
    children: list[Node] = field(default_factory=list)


@dataclass
class Trace:
    """A recorded forward pass.

    Attributes:
        nodes: All steps, in the order of execution.
        entered: The modules that were called, by path, each with the names of the arguments of its first call.
        runs: How often each module ran, by path.
        began: How many nodes there were when each module was first entered.
        ended: How many nodes there were when each module last returned.
        attended: Paths of the modules that called the attention interface.
        parameters: Names of the model's parameters by the identity that they have in this pass.
    """

    nodes: list[Node]
    entered: dict[str, tuple[torch.nn.Module, set[str]]]
    runs: dict[str, int]
    began: dict[str, int] = field(default_factory=dict)
    ended: dict[str, int] = field(default_factory=dict)
    attended: set[str] = field(default_factory=set)
    parameters: dict[int, str] = field(default_factory=dict)

    def around(self, paths: Sequence[str], proper: bool = False) -> str:
        """Return the path of the innermost module that was called and contains all the paths.

        Args:
            paths: Paths of modules.
            proper: Whether it must be none of them itself, and must have been called once only.

        Returns:
            The path, "" for the whole model.
        """
        shared: list[str] = []
        for names in zip(*(path.split(".") for path in paths), strict=False):
            if len(set(names)) > 1:
                break
            shared.append(names[0])
        if proper and ".".join(shared) in paths:
            shared.pop()
        while shared and (".".join(shared) not in self.entered or (proper and self.runs[".".join(shared)] > 1)):
            shared.pop()
        return ".".join(shared)

    def of_kind(self, kind: str) -> list[Node]:
        """Return the nodes of a kind, in the order of execution."""
        return [node for node in self.nodes if node.kind == kind]


@dataclass(frozen=True)
class CallOrder:
    """Which modules a forward pass calls, and in what order.

    Attributes:
        attended: Paths of the modules that called the attention interface.
        began: How many steps there were when each module was first entered.
        ended: How many steps there were when each module last returned.
    """

    attended: frozenset[str]
    began: dict[str, int]
    ended: dict[str, int]


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


def ancestors(nodes: Iterable[Node], through: set[str], stop: set[str]) -> list[Node]:
    """Return the nodes of a kind in `stop` that are reached from `nodes` (inclusive) by going up through `through`."""
    return _search(list(nodes), through, stop, lambda node: node.parents)


def descendants(node: Node, through: set[str], stop: set[str]) -> list[Node]:
    """Return the nodes of a kind in `stop` that are reached from `node` (exclusive) by going down through `through`."""
    return _search(list(node.children), through, stop, lambda child: child.children)


def _search(
    queue: list[Node], through: set[str], stop: set[str], neighbours: Callable[[Node], list[Node]]
) -> list[Node]:
    matches, seen = [], set()
    while queue:
        node = queue.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if node.kind in stop:
            matches.append(node)
        elif node.kind in through:
            queue.extend(neighbours(node))
    return sorted(matches, key=lambda n: n.order)


OBSERVING_ATTENTION = "deltune_observe"
"""The name under which the attention that only records its call is registered with transformers."""

DUMMY_LENGTHS = {"input_ids": 4, "decoder_input_ids": 3}
"""Lengths of the dummy inputs; they differ, so that a cross-attention can be told from a self-attention."""

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
}
_MIX_OPERATIONS = {"bmm", "baddbmm", "matmul", "einsum", "_softmax", "softmax", "mm", "addmm", "_safe_softmax"}


class _Recorder(TorchDispatchMode):
    """Records a node for each operation; a module without children, or an attention, is one node without its inside.

    `opaque` is greater than 0 while the inside of such a node runs.
    """

    def __init__(self, paths: dict[torch.nn.Module, str], originals: dict[torch.nn.Module, torch.nn.Module]) -> None:
        super().__init__()
        self.paths, self.originals = paths, originals
        self.trace = Trace([], {}, {})
        self.producer: dict[int, Node] = {}
        self.opaque = 0
        self.direct: set[int] = set()
        self.alive: list[Any] = []  # keeps the tensors, since an id is unique only while its object lives

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__.rstrip("_") if not operation_name(func).endswith("__") else ""
        if self.opaque:
            if name in ("addmm", "mm", "matmul", "bmm"):  # a factor that is the weight itself: shape (in, out)
                self.direct.update(id(a) for a in args if isinstance(a, torch.nn.Parameter))
            return out
        inputs = list(tensors_in((args, kwargs or {})))
        kind = _operation_kind(name, inputs, self.producer)
        self.record(kind, inputs, list(tensors_in(out)))
        return out

    def record(self, kind: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor], **fields: Any) -> Node:
        producer = self.producer
        sources = [producer.get(id(t)) for t in inputs]
        parents = list({id(p): p for p in sources if p is not None}.values())
        order = len(self.trace.nodes)
        node = Node(kind, parents, order, inputs=inputs, sources=sources, outputs=outputs, **fields)
        for parent in parents:
            parent.children.append(node)
        producer.update((id(t), node) for t in outputs)
        self.alive.extend((inputs, outputs))
        self.trace.nodes.append(node)
        return node


def _operation_kind(name: str, inputs: list[torch.Tensor], producer: dict[int, Node]) -> str:
    traced = [t for t in inputs if id(t) in producer]
    if name == "add" and len(traced) == 2 and traced[0].shape == traced[1].shape and traced[0].is_floating_point():
        return "add"
    if name in _VIEW_OPERATIONS:
        return "view"
    if name in _MIX_OPERATIONS:
        return "mix"
    # a product of two activations is a gate; one with a number or a parameter only changes the scale
    if name in _PASS_OPERATIONS and len(traced) <= 1:
        return "pass"
    return "op"


def _leaf_kind(module: torch.nn.Module, inputs: list[torch.Tensor], output: Any) -> str | None:
    """Return the kind of a module without children, by the shapes of what it read and returned; None for others."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or not isinstance(output, torch.Tensor):
        return None
    read = next((t for t in inputs if t.is_floating_point()), None)
    if weight.dim() == 2 and (read is None or any(not t.is_floating_point() for t in inputs)):
        return "embedding"
    if read is None:
        return None
    if weight.dim() == 1 and read.shape == output.shape and weight.shape[0] == read.shape[-1]:
        return "norm"
    if weight.dim() == 2 and sorted(weight.shape) == sorted((read.shape[-1], output.shape[-1])):
        return "linear"
    return "embedding" if weight.dim() == 2 and output.shape[-1] == weight.shape[1] else None


_RECORDER: ContextVar[_Recorder | None] = ContextVar("deltune_recorder", default=None)


def _observing_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """An attention that does no arithmetic: (B, heads, n, d) in, (B, n, heads, d_value) of the same kind out."""
    recorder = _RECORDER.get()
    if recorder is None:
        raise DeltuneError(
            f"attention {OBSERVING_ATTENTION!r} only runs inside deltune.inspect; set attn_implementation='sdpa'"
        )
    recorder.opaque += 1
    batch, heads, tokens, _ = query.shape
    output = query.new_empty(batch, tokens, heads, value.shape[-1])
    recorder.opaque -= 1
    recorder.record("attention", [query, key, value], [output], module=recorder.originals[module])
    recorder.trace.attended.add(recorder.paths[module])
    return output, None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    return None


AttentionInterface.register(OBSERVING_ATTENTION, _observing_attention)
AttentionMaskInterface.register(OBSERVING_ATTENTION, _no_mask)


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
    while "input_ids" not in inspect.signature(base.forward).parameters:
        inner = [child for child in base.children() if isinstance(child, PreTrainedModel)]
        if len(inner) != 1:
            break
        base = inner[0]
    assert isinstance(base, PreTrainedModel)
    return base


def meta_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Build AutoModel of a configuration on the meta device, without values.

    Raises:
        DeltuneError: AutoModel cannot build a model from the configuration.
    """
    try:
        with torch.device("meta"):
            # the dtype is written to the configuration; without one, the configuration's becomes the process's default
            return AutoModel.from_config(copy.deepcopy(config), dtype=torch.get_default_dtype())
    except Exception as error:
        raise DeltuneError(f"no model can be built from this {type(config).__name__}: {error}") from error


_CALL_ORDERS: weakref.WeakKeyDictionary[PreTrainedModel, tuple[Any, CallOrder]] = weakref.WeakKeyDictionary()
"""By model, a stamp of what was traced, and its order of calls."""


def call_order(model: PreTrainedModel) -> CallOrder:
    """Return which modules the base model's forward pass calls, and in what order.

    It is traced once, and again whenever the structure of the base model has changed.

    Args:
        model: A live model, which is neither run nor changed.

    Raises:
        DeltuneError: As `trace_forward`.
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
    """Run a copy of a model's base model on meta tensors, and record the forward pass.

    A model that computes attention itself may need its own masks. It is then traced with its eager attention, which
    shows everything but the inside of the attentions.

    Args:
        model: A live model, which is neither run nor changed.

    Returns:
        The trace, with paths and modules of `model`.

    Raises:
        DeltuneError: The forward pass cannot run on shapes alone; the message quotes the model's own error.
    """
    stamp = _base_stamp(model)  # taken first: a change in another thread meanwhile makes it differ
    try:
        trace = _trace_with(model, OBSERVING_ATTENTION)
    except DeltuneError as first:
        try:
            trace = _trace_with(model, "eager")
        except DeltuneError:
            raise first from None
    _CALL_ORDERS[model] = stamp, CallOrder(frozenset(trace.attended), trace.began, trace.ended)
    return trace


def _trace_with(model: PreTrainedModel, attention: str) -> Trace:
    try:
        return _record(model, attention)
    except DeltuneError:
        raise
    except Exception as error:
        raise DeltuneError(
            f"{type(model).__name__} cannot be inspected: its forward pass does not run on shapes alone "
            f"({type(error).__name__}: {error_summary(error)})"
        ) from error


def _record(model: PreTrainedModel, attention: str) -> Trace:
    twin, originals = structural_copy(model)
    base = base_model(twin)
    prefix = next(name for name, module in twin.named_modules() if module is base)
    paths = {module: f"{prefix}.{name}".strip(".") for name, module in base.named_modules()}
    recorder = _Recorder(paths, originals)
    named = twin.named_parameters(remove_duplicate=False)
    recorder.trace.parameters = {id(parameter): name for name, parameter in named}
    for module in paths:
        module.register_forward_pre_hook(_on_enter, with_kwargs=True)
        module.register_forward_hook(_on_exit, with_kwargs=True)
    for config in all_configs(twin):
        set_attention_implementation(config, attention)
    token = _RECORDER.set(recorder)
    try:
        with torch.no_grad(), torch.device("meta"), recorder:
            inputs = _dummy_inputs(base.forward)
            for name, tensor in inputs.items():
                if isinstance(tensor, torch.Tensor):
                    recorder.record("input", [], [tensor], argument=name)
            base(**inputs)
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
    if _is_leaf(module):
        recorder.opaque += 1


def _on_exit(module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    recorder = _current_recorder()
    path = recorder.paths[module]
    recorder.trace.ended[path] = len(recorder.trace.nodes)
    if not _is_leaf(module):
        return
    recorder.opaque -= 1
    if recorder.opaque:
        return
    inputs = list(tensors_in((args, kwargs)))
    kind = _leaf_kind(module, inputs, output) or "op"
    node = recorder.record(kind, inputs, list(tensors_in(output)), path=path, module=recorder.originals[module])
    node.transposed = kind == "linear" and id(parameters_of(module).get("weight")) in recorder.direct


def _is_leaf(module: torch.nn.Module) -> bool:
    return not submodules_of(module) and any(p is not None for p in parameters_of(module).values())


def _positional_names(module: torch.nn.Module, args: tuple[Any, ...]) -> set[str]:
    names = [name for name in inspect.signature(module.forward).parameters]
    return set(names[: len(args)])


def _dummy_inputs(forward: Callable[..., Any]) -> dict[str, Any]:
    accepted = inspect.signature(forward).parameters
    inputs: dict[str, Any] = {}
    for name, length in DUMMY_LENGTHS.items():
        if name in accepted:
            inputs[name] = torch.zeros(1, length, dtype=torch.long)
            mask = name.replace("input_ids", "attention_mask")
            if mask in accepted:
                inputs[mask] = torch.ones(1, length, dtype=torch.long)
    if "input_ids" not in inputs:
        raise DeltuneError("the model does not take input_ids; only language models can be inspected")
    if "use_cache" in accepted:
        inputs["use_cache"] = False
    return inputs
