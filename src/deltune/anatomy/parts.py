"""The parts of a layer as plain values: what attentions, FFNs, experts and norms are made of, read off their steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import product
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..compat import experts_transposed, parameters_of
from .graph import Node, Trace
from .offloading import tied_identities
from .quantizers import bias_of, find_quantizer
from .residuals import SubLayer, features_are_last, gate_and_up, norm_position, shared_experts
from .skeleton import base_modules
from .types import (
    FFN,
    Attention,
    Columns,
    Experts,
    ExpertWeight,
    Layer,
    Linear,
    Norm,
    NormPosition,
    StackName,
    is_inside,
)


class PartReader:
    """Reads parts of one model off its trace."""

    def __init__(self, model: PreTrainedModel, trace: Trace) -> None:
        self._model, self.trace = model, trace
        self.unobserved: list[str] = []  # what could not be observed, a sentence each
        # the path of each module
        self.paths = {module: name for name, module in base_modules(model, remove_duplicate=False)}
        self._tied = tied_identities(model)
        self._holders: dict[int, list[str]] = {}  # by tensor, the modules that hold it, each once
        for path, module in base_modules(model):
            for parameter in parameters_of(module).values():
                if parameter is not None:
                    self._holders.setdefault(self.identity(parameter), []).append(path)

    def identity(self, parameter: Any) -> int:
        """Return a key that is the same for all parameters that are one tied tensor."""
        return self._tied.get(id(parameter), id(parameter))

    def tied_modules(self, module: nn.Module, path: str) -> tuple[str, ...]:
        """Return the paths of the other modules that hold a module's weight."""
        holders = self._holders.get(self.identity(parameters_of(module).get("weight")), ())
        return tuple(holder for holder in holders if holder != path)

    def linear(self, node: Node, columns: Columns | None = None) -> Linear:
        read = node.states
        assert read is not None
        width = node.outputs[0].shape[-1] if columns is None else columns.groups * (columns.stop - columns.start)
        bias, tied = bias_of(node.module) is not None, self.tied_modules(node.module, node.path)
        batch_independent = node.path in self._batch_independent_calls
        quantizer = find_quantizer(module := self._model.get_submodule(node.path))
        quantized = "" if quantizer is None or quantizer.trainable_weight else quantizer.name(module)
        return Linear(
            node.path, read.shape[-1], width, bias, node.transposed, columns, tied, batch_independent,
            quantized=quantized,
        )  # fmt: skip

    @cached_property
    def _batch_independent_calls(self) -> set[str]:
        """The paths of the linears that some call gives nothing which depends on the batch."""
        return {n.path for n in self.trace.of_kind("linear") if n not in self.trace.of_batch}

    def lookup(self, node: Node) -> Linear:
        """Return word embeddings as a projection of one-hot vectors."""
        (rows, width), out_width = node.module.weight.shape, node.outputs[0].shape[-1]
        tied, product_only = self.tied_modules(node.module, node.path), node.steps == 1 and out_width == width
        return Linear(
            node.path, rows, out_width, False, transposed=True, shared_with=tied, product_only=product_only
        )  # fmt: skip

    def norm(self, node: Node, place: NormPosition, of: tuple[str, ...] = ()) -> Norm:
        has = parameters_of(node.module)
        width = node.module.weight.shape[0]
        return Norm(node.path, width, has.get("weight") is not None, has.get("bias") is not None, place, of)

    def layer(self, path: str, stack: StackName, index: int, group: Sequence[SubLayer]) -> Layer:
        """Return a layer by its sub-layers; its norms are the norms inside its module."""
        placed: dict[str, tuple[Norm, list[SubLayer]]] = {}
        for node in self.trace.of_kind("norm"):
            if node.path.startswith(f"{path}.") and node.path not in placed:
                place, owners = norm_position(node, group)
                placed[node.path] = self.norm(node, place, tuple(sorted({s.role for s in owners}))), owners
        attentions, ffns, experts = [], [], []
        for sub in group:
            of_sub = [norm for norm, owners in placed.values() if sub in owners]
            norms: dict[str, str] = {norm.place: norm.path for norm in of_sub if norm.place in ("pre", "post")}
            if sub.attention is not None:
                attentions.append(self.attention(sub, norms))
            elif sub.block:
                experts.append(self.experts(sub, norms))
            else:
                ffns.append(self.ffn(sub, norms))
        in_width, out_width = self._layer_widths(path, group)
        return Layer(
            stack,
            index,
            path,
            tuple(attentions),
            tuple(ffns),
            norms=tuple(norm for norm, _ in placed.values()),
            experts=tuple(experts),
            in_width=in_width,
            out_width=out_width,
        )

    def _layer_widths(self, path: str, group: Sequence[SubLayer]) -> tuple[int, int]:
        """Return the widths of the hidden states that a layer reads and returns, as `Layer` has them."""
        read, returned = self.trace.arguments[path], self.trace.outputs[path]
        if not features_are_last(self.trace, returned, group[-1].output):
            return 0, 0
        alike = read.shape[:-1] == returned.shape[:-1]  # a stage that joins tokens has no x for each of them
        return read.shape[-1] if alike else 0, returned.shape[-1]

    def attention(self, sub: SubLayer, norms: Mapping[str, Any]) -> Attention:
        node = sub.attention
        assert node is not None
        parts: dict[str, Any] = {role: self.linear(*projection) for role, projection in sub.projections.items()}
        missing = [role for role in ("query", "key", "value") if role not in parts and role not in sub.reused]
        path = self.paths[node.module] if node.kind == "attention" else self.trace.around(sub.paths)
        if sub.kind == "mixer":
            self.unobserved.append(f"query, key, value and heads of {path} (tokens are mixed without an attention)")
        elif missing:
            self.unobserved.append(f"{' and '.join(missing)} of {path} (not the output of one linear)")
        if node.kind == "attention":
            query, key, value = (t.shape for t in node.inputs[:3])
            parts |= {"heads": query[1], "kv_heads": key[1], "head_width": query[3], "value_width": value[3]}
            parts["causal"] = sub.kind == "self" and is_causal(node)
        elif sub.kind != "mixer":
            self.unobserved.append(f"heads of {path} (not on the attention interface)")
        inputs = tuple(self.linear(n) for n in sub.inputs) if missing else ()
        output = self.linear(sub.output)
        return Attention(
            path, sub.kind, sub.input_node.path, output, inputs=inputs, reused=sub.reused, **parts, **norms
        )

    def ffn(self, sub: SubLayer, norms: Mapping[str, Any]) -> FFN:
        output, inputs = self.linear(sub.output), tuple(self.linear(n) for n in sub.inputs)
        fused = len(inputs) == 1 and inputs[0].out_width == 2 * output.in_width
        path = self.trace.around([n.path for n in [*sub.inputs, sub.output]])
        parts: dict[str, Any] = {role: self.linear(*projection) for role, projection in gate_and_up(sub).items()}
        gated = bool(parts) or fused or len(inputs) > 1
        return FFN(path, sub.inputs[0].path, inputs, output, gated, **parts, **norms)

    def experts(self, sub: SubLayer, norms: Mapping[str, Any]) -> Experts:
        inside = [n for n in self.trace.nodes if is_inside(n.path, sub.block)]
        nodes = list({n.path: n for n in inside}.values())
        holders = {n.path: n.module for n in nodes if n.kind == "experts"}
        weights = {
            f"{path}.{leaf}": p
            for path, module in holders.items()
            for leaf, p in parameters_of(module).items()
            if p is not None and p.dim() == 3
        }
        number = next(iter(weights.values())).shape[0]
        router = next((n for n in nodes if n.path not in holders and _chooses(n, number)), None)
        others = [n for n in nodes if n is not router]
        if router is None:
            self.unobserved.append(f"the router of {sub.block} (no module has a row of weights for each expert)")
        in_width = next(n.states for n in inside if n.states is not None).shape[-1]
        out_width = sub.output.outputs[0].shape[-1]
        in_batch_order = all(self._reads_as_batch(n) for n in nodes if n.path in holders)
        inputs, outputs = _expert_weights(holders, weights, in_width, out_width, in_batch_order)
        if not inputs:
            self.unobserved.append(
                f"which weights of {sub.block} are the experts' inputs and outputs (their shapes are alike)"
            )
        return Experts(
            sub.block,
            number,
            in_width,
            out_width,
            None if router is None else router.path,
            tuple(self.linear(n) for n in others if n.kind == "linear"),
            scores=None if router is None else self._router(router, number),
            inputs=inputs,
            outputs=outputs,
            shared=tuple(self.ffn(shared, {}) for shared in shared_experts(others)),
            **norms,
        )

    def _router(self, node: Node, number: int) -> Linear | ExpertWeight:
        """Return a router as a projection: a linear, or the weight that a module of its own reads."""
        if node.kind == "linear":
            return self.linear(node)
        weight = node.module.weight
        return ExpertWeight(node.path, "weight", 0, weight.shape[1], number, in_batch_order=self._reads_as_batch(node))

    def _reads_as_batch(self, node: Node) -> bool:
        """Return whether a module reads each token of the batch once and in order, and not a copy for each expert."""
        batch = next(n for n in self.trace.nodes if n.kind == "input").outputs[0].shape[:2]
        read = node.states
        return (read.numel() // read.shape[-1] if read is not None else 0) == batch.numel()


def is_causal(attention: Node) -> bool:
    """Return whether the module of an attention says that it is causal."""
    return bool(getattr(attention.module, "is_causal", False))


def _chooses(node: Node, number: int) -> bool:
    """Return whether a module that is one node has a row of weights for each of a number of experts."""
    weight = parameters_of(node.module).get("weight") if node.module is not None else None
    return weight is not None and weight.dim() == 2 and weight.shape[0] == number


ExpertWeights = tuple[ExpertWeight, ...]


def _expert_weights(
    holders: Mapping[str, nn.Module], weights: Mapping[str, Any], in_width: int, out_width: int, in_batch_order: bool
) -> tuple[ExpertWeights, ExpertWeights]:
    """Return the weights of experts that read x, and those that give the output; none where that does not show.

    The modules of transformers say which axis is which. Elsewhere the one reading that leads from x to the output is
    taken. The inner width is the input width of the outputs, or twice that where a gate is fused.
    """
    known = {experts_transposed(module) for module in holders.values()}
    readings = (False, True) if None in known else sorted(map(bool, known))
    for transposed, number in product(readings, range(len(weights) - 1, 0, -1)):  # a module names its inputs first
        matrices = [_expert_weight(name, w, transposed, in_batch_order) for name, w in weights.items()]
        inputs, outputs = tuple(matrices[:number]), tuple(matrices[number:])
        inner, outer = {w.out_width for w in inputs}, {w.in_width for w in outputs}
        fits = {w.in_width for w in inputs} == {in_width} and {w.out_width for w in outputs} == {out_width}
        if fits and len(inner) == len(outer) == 1 and inner.pop() in (width := outer.pop(), 2 * width):
            return inputs, outputs
    return (), ()


def _expert_weight(name: str, weight: Any, transposed: bool, in_batch_order: bool) -> ExpertWeight:
    path, _, leaf = name.rpartition(".")
    number, first, second = weight.shape
    widths = (first, second) if transposed else (second, first)
    return ExpertWeight(path, leaf, number, *widths, transposed, in_batch_order)
