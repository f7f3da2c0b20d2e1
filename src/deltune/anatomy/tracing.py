"""One forward pass on the meta device, recorded as a graph of linears, norms, embeddings, attentions and additions.

No arithmetic is done: a copy of the model's structure runs on meta tensors, with a function that returns the right
shape in place of the attention and no masks. What remains is the order and the wiring, which is all observe.py reads.
The model itself is neither run nor changed, so it may be observed while other threads run it.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, AttentionMaskInterface, AutoModel, PreTrainedConfig, PreTrainedModel

from ..errors import DeltuneError, error_summary
from .skeleton import structural_copy


@dataclass(eq=False)
class Node:
    """One recorded step. kind: linear, norm, embedding, attention, add, mix, view, pass, op, input.

    path: of its module, "" where it is none; argument: the name of an input.
    """

    kind: str
    parents: list[Node]
    order: int
    path: str = ""
    argument: str = ""
    module: Any = None
    inputs: list[torch.Tensor] = field(default_factory=list)
    sources: list[Node | None] = field(default_factory=list)  # who had produced each input by then
    outputs: list[torch.Tensor] = field(default_factory=list)
    transposed: bool = False
    children: list[Node] = field(default_factory=list)


@dataclass
class Trace:
    """The recorded graph: nodes in order of execution, and the modules entered with the names of their arguments.

    Attributes:
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
        """The innermost module that ran and holds all the paths (`proper`: strictly holds them, and ran once)."""
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
        return [node for node in self.nodes if node.kind == kind]


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in a value made of tuples, lists and dictionaries."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def ancestors(nodes: Iterable[Node], through: set[str], stop: set[str]) -> list[Node]:
    """Nodes of a kind in `stop` reached by going up from `nodes` (inclusive) through kinds in `through`."""
    return _reached(list(nodes), through, stop, lambda node: node.parents)


def descendants(node: Node, through: set[str], stop: set[str]) -> list[Node]:
    """Nodes of a kind in `stop` reached by going down from `node` (exclusive) through kinds in `through`."""
    return _reached(list(node.children), through, stop, lambda child: child.children)


def _reached(queue: list[Node], through: set[str], stop: set[str], beyond: Callable[[Node], list[Node]]) -> list[Node]:
    found, seen = [], set()
    while queue:
        node = queue.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if node.kind in stop:
            found.append(node)
        elif node.kind in through:
            queue.extend(beyond(node))
    return sorted(found, key=lambda n: n.order)


OBSERVE = "deltune_observe"
"""Name of the attention that only observes."""

TOKENS = {"input_ids": 4, "decoder_input_ids": 3}
"""Lengths of the two dummy inputs; unequal, so that a cross-attention shows."""

_VIEWS = {
    "view", "_unsafe_view", "reshape", "transpose", "permute", "t", "expand", "slice", "select", "split", "chunk",
    "split_with_sizes", "unbind", "unsqueeze", "squeeze", "alias", "detach", "clone", "_to_copy", "contiguous",
    "unflatten", "flatten", "_reshape_alias", "as_strided", "unsafe_split", "lift_fresh", "to",
}  # fmt: skip
_PASSING = _VIEWS | {"native_dropout", "dropout", "bernoulli", "clamp", "nan_to_num", "div", "mul", "where"}
_MIXING = {"bmm", "baddbmm", "matmul", "einsum", "_softmax", "softmax", "mm", "addmm", "_safe_softmax"}


class _Recorder(TorchDispatchMode):
    """Writes a node per operation outside leaf modules; a leaf module or an attention is one opaque node."""

    def __init__(self, paths: dict[torch.nn.Module, str], originals: dict[torch.nn.Module, torch.nn.Module]) -> None:
        super().__init__()
        self.paths, self.originals = paths, originals
        self.trace = Trace([], {}, {})
        self.producer: dict[int, Node] = {}
        self.opaque = 0
        self.direct: set[int] = set()
        self.alive: list[Any] = []  # ids stay unique only while the tensors live

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__.rstrip("_") if not func._schema.name.endswith("__") else ""
        if self.opaque:
            if name in ("addmm", "mm", "matmul", "bmm"):  # the weight itself, not its transpose: (in, out), as Conv1D
                self.direct.update(id(a) for a in args if isinstance(a, torch.nn.Parameter))
            return out
        inputs = list(tensors_in((args, kwargs or {})))
        kind = _kind(name, inputs, self.producer)
        self.record(kind, inputs, list(tensors_in(out)))
        return out

    def record(self, kind: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor], **more: Any) -> Node:
        produced = self.producer
        sources = [produced.get(id(t)) for t in inputs]
        parents = list({id(p): p for p in sources if p is not None}.values())
        order = len(self.trace.nodes)
        node = Node(kind, parents, order, inputs=inputs, sources=sources, outputs=outputs, **more)
        for parent in parents:
            parent.children.append(node)
        produced.update((id(t), node) for t in outputs)
        self.alive.extend((inputs, outputs))
        self.trace.nodes.append(node)
        return node


def _kind(name: str, inputs: list[torch.Tensor], produced: dict[int, Node]) -> str:
    known = [t for t in inputs if id(t) in produced]
    if name == "add" and len(known) == 2 and known[0].shape == known[1].shape and known[0].is_floating_point():
        return "add"
    if name in _VIEWS:
        return "view"
    if name in _MIXING:
        return "mix"
    # a product of two activations (a gate) does not hand one of them on; scaling by a number or a parameter does
    if name in _PASSING and len(known) <= 1:
        return "pass"
    return "op"


def _leaf_kind(module: torch.nn.Module, inputs: list[torch.Tensor], output: Any) -> str | None:
    """What a module with parameters of its own and no children is, by the shapes it read and wrote."""
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
        raise DeltuneError(f"attention {OBSERVE!r} only runs inside deltune.inspect; set attn_implementation='sdpa'")
    recorder.opaque += 1
    batch, heads, tokens, _ = query.shape
    output = query.new_empty(batch, tokens, heads, value.shape[-1])
    recorder.opaque -= 1
    recorder.record("attention", [query, key, value], [output], module=recorder.originals[module])
    recorder.trace.attended.add(recorder.paths[module])
    return output, None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    return None


AttentionInterface.register(OBSERVE, _observing_attention)
AttentionMaskInterface.register(OBSERVE, _no_mask)


def all_configs(model: torch.nn.Module) -> list[Any]:
    """Every configuration object that a sub-module of the model reads (encoders and decoders keep copies)."""
    found: dict[int, Any] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation"):
            found[id(config)] = config
    return list(found.values())


def base_model(model: PreTrainedModel) -> PreTrainedModel:
    """The model without its head: itself where it has none. A wrapper that only hands its arguments on is passed by
    (the decoder alone of an encoder-decoder stands in one)."""
    base = model.base_model
    while "input_ids" not in inspect.signature(base.forward).parameters:
        inner = [child for child in base.children() if isinstance(child, PreTrainedModel)]
        if len(inner) != 1:
            break
        base = inner[0]
    assert isinstance(base, PreTrainedModel)
    return base


def meta_model(config: PreTrainedConfig) -> PreTrainedModel:
    """AutoModel of the configuration on the meta device: shapes without numbers."""
    try:
        with torch.device("meta"):
            # the dtype is written to the configuration; without one, the configuration's becomes the process's default
            return AutoModel.from_config(copy.deepcopy(config), dtype=torch.get_default_dtype())
    except Exception as error:
        raise DeltuneError(f"no model can be built from this {type(config).__name__}: {error}") from error


def trace_forward(model: PreTrainedModel) -> Trace:
    """Run a structural copy of `model`'s base model on meta tensors, and record it; paths are those in `model`.

    A family that computes attention itself may want its own masks; it is then traced with its eager attention, which
    shows everything but the attention's inside.

    Raises:
        DeltuneError: a forward that cannot run on shapes alone; it quotes the family's own message.
    """
    try:
        return _trace(model, OBSERVE)
    except DeltuneError as first:
        try:
            return _trace(model, "eager")
        except DeltuneError:
            raise first from None


def _trace(model: PreTrainedModel, attention: str) -> Trace:
    try:
        return _run(model, attention)
    except DeltuneError:
        raise
    except Exception as error:
        raise DeltuneError(
            f"{type(model).__name__} could not be observed: its forward pass does not run on shapes alone "
            f"({type(error).__name__}: {error_summary(error)})"
        ) from error


def _run(model: PreTrainedModel, attention: str) -> Trace:
    twin, originals = structural_copy(model)
    base = base_model(twin)
    prefix = next(name for name, module in twin.named_modules() if module is base)
    paths = {module: f"{prefix}.{name}".strip(".") for name, module in base.named_modules()}
    recorder = _Recorder(paths, originals)
    named = twin.named_parameters(remove_duplicate=False)
    recorder.trace.parameters = {id(parameter): name for name, parameter in named}
    for module in paths:
        module.register_forward_pre_hook(_entered, with_kwargs=True)
        module.register_forward_hook(_left, with_kwargs=True)
    for config in all_configs(twin):
        config._attn_implementation = attention
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


def _recorder() -> _Recorder:
    recorder = _RECORDER.get()
    assert recorder is not None
    return recorder


def _entered(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
    recorder = _recorder()
    path, trace = recorder.paths[module], recorder.trace
    trace.runs[path] = trace.runs.get(path, 0) + 1
    trace.began.setdefault(path, len(trace.nodes))
    if path not in trace.entered:
        trace.entered[path] = (recorder.originals[module], set(kwargs) | _positional(module, args))
    if _is_leaf(module):
        recorder.opaque += 1


def _left(module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    recorder = _recorder()
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
    node.transposed = kind == "linear" and id(module._parameters.get("weight")) in recorder.direct


def _is_leaf(module: torch.nn.Module) -> bool:
    return not module._modules and any(p is not None for p in module._parameters.values())


def _positional(module: torch.nn.Module, args: tuple[Any, ...]) -> set[str]:
    names = [name for name in inspect.signature(module.forward).parameters]
    return set(names[: len(args)])


def _dummy_inputs(forward: Callable[..., Any]) -> dict[str, Any]:
    accepted = inspect.signature(forward).parameters
    inputs: dict[str, Any] = {}
    for name, length in TOKENS.items():
        if name in accepted:
            inputs[name] = torch.zeros(1, length, dtype=torch.long)
            mask = name.replace("input_ids", "attention_mask")
            if mask in accepted:
                inputs[mask] = torch.ones(1, length, dtype=torch.long)
    if "input_ids" not in inputs:
        raise DeltuneError("the model does not read input_ids: only language models can be observed")
    if "use_cache" in accepted:
        inputs["use_cache"] = False
    return inputs
