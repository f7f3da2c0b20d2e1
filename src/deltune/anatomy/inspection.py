"""`deltune.inspect`: finds the parts of a transformer in one traced forward pass, also where its linears are quantised.

How each part is recognised:
  sub-layer    A residual addition has an operand that comes from a single linear, the sub-layer's output.
  attention    The output linear reads an attention: a call of transformers' attention interface, or a softmax in models
               that do not use it.
  FFN          The output linear reads, through an activation, linears that read the hidden states.
  projections  The linears that query, key and value come from; of a fused one, the columns that each view covers.
  experts      What joins the residual stream was returned by a module that holds experts, weights of three dimensions.
  mixer        The output linear reads, by products without a softmax or by a convolution, what it does of other tokens.
  layer        One self-attention or mixer and what follows it up to the next, in one element of a list of modules.
  norm         Its place follows from what it reads and what reads it: a residual sum, a sub-layer's output or input.
No model family is named here. A quantised linear is seen as a linear of its sizes, whose weight cannot be trained.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from torch import nn
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from ..compat import auto_class_mapping, experts_transposed, parameters_of, submodules_of
from ..errors import DeltuneError, describe_value, error_summary, excerpt
from .inputs import LENGTHS, READABLE, tower_name
from .offloading import tied_identities
from .quantization import check_quantization
from .quantizers import bias_of, find_quantizer, linear_sizes, visible_parameters
from .residuals import SubLayer, features_are_last, find_sublayers, gate_and_up, norm_position, shared_experts
from .row_order import modules_not_by_row
from .skeleton import base_modules, base_parameters, structure_stamp
from .tracing import (
    Node,
    Trace,
    base_model,
    depends_on,
    descendants,
    meta_model,
    trace_forward,
    trace_tower,
)
from .types import (
    FFN,
    Anatomy,
    Attention,
    Columns,
    Experts,
    ExpertWeight,
    Layer,
    Linear,
    Norm,
    NormPosition,
    Stack,
    StackName,
    Tensor,
    is_inside,
)


def parameters_read_directly(model: torch.nn.Module, trace: Trace) -> set[str]:
    """Return the names of parameters that the forward pass read without calling the module that holds them."""
    names = set()
    for node in trace.nodes:
        for tensor in node.all_inputs:
            name = trace.parameters.get(id(tensor))
            if name is not None:
                owner = model.get_submodule(name.rpartition(".")[0])
                if not submodules_of(owner) and node.module is not owner:
                    names.add(name)
    return names


def computed_parameters(model: PreTrainedModel) -> tuple[str, ...]:
    """Return the names of the parameters that a new AutoModel of this configuration does not train (sinusoids).

    The flags of `model` itself cannot be used: loading a checkpoint does not set them, and a user may have frozen it.
    """
    fresh = model
    if not all(p.is_meta for _, p in base_parameters(model)):
        try:
            fresh = meta_model(model.config)
        except DeltuneError:
            return ()  # AutoModel has no class for this configuration
    return tuple(name for name, p in base_parameters(fresh) if not p.requires_grad)


_CACHE: weakref.WeakKeyDictionary[Any, tuple[Any, Anatomy]] = weakref.WeakKeyDictionary()
"""By model, its structure when it was inspected, and its anatomy."""


def inspect(model: PreTrainedModel | PreTrainedConfig) -> Anatomy:
    """Find out what a transformer is made of: its layers, attentions, projections, FFNs, norms and tensors.

    A copy of the model's structure runs once on the meta device, so that no value is read, and the model itself is
    neither run nor changed.

    Args:
        model: A model of transformers, or a configuration; of the latter, the base model (AutoModel) is inspected
            without creating weights.

    Returns:
        The anatomy. Printing it shows a tree of all parts.

    Raises:
        DeltuneError: The weights are quantised in a way that is not known here, or the forward pass runs neither on
            shapes alone nor on zeros.
    """
    check_model_or_config(model, "inspect")
    if isinstance(model, PreTrainedConfig):
        return inspect(meta_model(model))
    check_quantization(model)
    structure = structure_stamp(model).structure  # a layer whose forward was replaced since is for `unreached_edits`
    known, anatomy = _CACHE.get(model, (None, None))
    if anatomy is not None and known == structure:
        return anatomy
    try:
        anatomy = _Inspector(model).anatomy()
    except DeltuneError:
        raise
    except Exception as error:  # an unforeseen architecture is the user's to know about, not a crash
        raise DeltuneError(
            f"{type(model).__name__} is built in a way that deltune cannot read ({type(error).__name__}: "
            f"{error_summary(error)}); the documentation lists the model families that can be tuned"
        ) from error
    _CACHE[model] = (structure, anatomy)
    return anatomy


def wrapped_model(model: object) -> PreTrainedModel | None:
    """Return the model of transformers that another module wraps, as torch.compile and DataParallel do, or None."""
    inner = extract_model_from_parallel(model, keep_torch_compile=False) if isinstance(model, nn.Module) else None
    return inner if isinstance(inner, PreTrainedModel) else None


def describe_wrapped(model: object) -> str:
    """Return what to do with a module that wraps a model of transformers, for a message; "" for anything else."""
    inner = wrapped_model(model)
    return f"it wraps a {type(inner).__name__}: give that model, and compile or wrap it afterwards" if inner else ""


def check_model_or_config(model: object, function: str) -> None:
    """Raise unless a value is a model of transformers or its configuration.

    Args:
        model: The value.
        function: The name of the function that was called with it.

    Raises:
        DeltuneError: It is neither; of the name or folder of a model the message says how its configuration is loaded.
    """
    if isinstance(model, PreTrainedModel | PreTrainedConfig):
        return
    advice = f"; {wrapped}" if (wrapped := describe_wrapped(model)) else ""
    if isinstance(model, str | Path):
        advice = f"; load_config({excerpt(str(model))}) of deltune.models is the configuration of that model"
    raise DeltuneError(
        f"{function} takes a model of transformers or its configuration, not {describe_value(model)}{advice}"
    )


class _Inspector:
    """Reads the parts of one model off its trace."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.base = base_model(model)
        self.base_path = next((name for name, m in base_modules(model) if m is self.base), "")
        self.trace: Trace = trace_forward(model)
        self.read_without_call = parameters_read_directly(model, self.trace)
        self.computed: tuple[str, ...] = ()
        self.paths = {module: name for name, module in base_modules(model, remove_duplicate=False)}
        self.unobserved: list[str] = []
        self.tower = tower_name(self.base)
        self.towers = self._towers()
        self.widths: dict[str, int] = {}
        self.batch_nodes = self._nodes_of_batch()
        self.tied = tied_identities(model)
        self.holders: dict[int, list[str]] = {}  # by tensor, the modules that hold it, each once
        for path, module in base_modules(model):
            for parameter in parameters_of(module).values():
                if parameter is not None:
                    self.holders.setdefault(self._identity(parameter), []).append(path)

    def _identity(self, parameter: Any) -> int:
        """Return a key that is the same for all parameters that are one tied tensor."""
        return self.tied.get(id(parameter), id(parameter))

    def _towers(self) -> dict[str, str]:
        """Return the models inside the base model that read images or sounds, which a pass on text does not enter."""
        towers: dict[str, str] = {}
        for path, module in base_modules(self.model):
            if (
                isinstance(module, PreTrainedModel)
                and path not in self.trace.entered
                and not any(is_inside(path, tower) for tower in towers)
            ):
                tower = tower_name(module)
                if tower != self.tower and is_inside(path, self.base_path) and path != self.base_path:
                    towers[path] = tower
        return towers

    # -- sub-layers

    def linear(self, node: Node, columns: Columns | None = None) -> Linear:
        bias = bias_of(node.module) is not None
        width = node.outputs[0].shape[-1]
        if columns is not None:
            width = columns.groups * (columns.stop - columns.start)
        read = next(t for t in node.inputs if t.is_floating_point())
        batch_independent = node.path in self._batch_independent_calls
        tied = self._holders_of(node.module, node.path)
        quantizer = find_quantizer(module := self.model.get_submodule(node.path))
        quantized = "" if quantizer is None or quantizer.trainable_weight else quantizer.name(module)
        return Linear(
            node.path, read.shape[-1], width, bias, node.transposed, columns, tied, batch_independent,
            quantized=quantized,
        )  # fmt: skip

    @cached_property
    def _batch_independent_calls(self) -> set[str]:
        """The paths of the linears that some call gives nothing which depends on the batch."""
        return {n.path for n in self.trace.of_kind("linear") if id(n) not in self.batch_nodes}

    def _holders_of(self, module: nn.Module, path: str) -> tuple[str, ...]:
        """Return the paths of the other modules that hold a module's weight."""
        return tuple(p for p in self.holders.get(self._identity(parameters_of(module).get("weight")), ()) if p != path)

    def attention_of(self, sub: SubLayer, norms: dict[str, str]) -> Attention:
        node, output = sub.attention, self.linear(sub.output)
        assert node is not None
        parts = {role: self.linear(*projection) for role, projection in sub.projections.items()}
        missing = [role for role in ("query", "key", "value") if role not in parts and role not in sub.reused]
        inputs = tuple(self.linear(n) for n in sub.inputs) if missing else ()
        path = self.paths[node.module] if node.kind == "attention" else self.trace.around(sub.paths)
        if sub.kind == "mixer":
            self.unobserved.append(f"query, key, value and heads of {path} (tokens are mixed without an attention)")
            return Attention(path, "mixer", sub.input_node.path, output, inputs=inputs, **norms)  # type: ignore[arg-type]
        if missing:
            self.unobserved.append(f"{' and '.join(missing)} of {path} (not the output of one linear)")
        if node.kind != "attention":
            self.unobserved.append(f"heads of {path} (not on the attention interface)")
            return Attention(
                path, sub.kind, sub.input_node.path, output, parts.get("query"), parts.get("key"), parts.get("value"),
                inputs=inputs, reused=sub.reused, **norms,  # type: ignore[arg-type]
            )  # fmt: skip
        query, key, value = (t.shape for t in node.inputs[:3])
        return Attention(
            path, sub.kind, sub.input_node.path, output, parts.get("query"), parts.get("key"), parts.get("value"),
            heads=query[1], kv_heads=key[1], head_width=query[3], value_width=value[3],
            causal=sub.kind == "self" and bool(getattr(node.module, "is_causal", False)), inputs=inputs,
            reused=sub.reused, **norms,
        )  # fmt: skip

    def ffn_of(self, sub: SubLayer, norms: dict[str, str]) -> FFN:
        output = self.linear(sub.output)
        inputs = tuple(self.linear(n) for n in sub.inputs)
        fused = len(inputs) == 1 and inputs[0].out_width == 2 * output.in_width
        path = self.trace.around([n.path for n in [*sub.inputs, sub.output]])
        parts = {role: self.linear(*projection) for role, projection in gate_and_up(sub).items()}
        gated = bool(parts) or fused or len(inputs) > 1
        gate, up = parts.get("gate"), parts.get("up")
        return FFN(path, sub.inputs[0].path, inputs, output, gated, gate=gate, up=up, **norms)

    def experts_of(self, sub: SubLayer, norms: dict[str, str]) -> Experts:
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
        router = next((n.path for n in nodes if n.path not in holders and _chooses(n, number)), None)
        linears = tuple(self.linear(n) for n in nodes if n.kind == "linear" and n.path != router)
        read = next(t for n in inside for t in n.inputs if t.is_floating_point())
        in_width, out_width = read.shape[-1], sub.output.outputs[0].shape[-1]
        scores = next((self._router_of(n, number) for n in nodes if n.path == router), None)
        if scores is None:
            self.unobserved.append(f"the router of {sub.block} (no module has a row of weights for each expert)")
        in_batch_order = all(self._reads_as_batch(n) for n in nodes if n.path in holders)
        inputs, outputs = _expert_weights(holders, weights, in_width, out_width, in_batch_order)
        if not inputs:
            self.unobserved.append(
                f"which weights of {sub.block} are the experts' inputs and outputs (their shapes are alike)"
            )
        shared = tuple(self.ffn_of(s, {}) for s in shared_experts([n for n in nodes if n.path != router]))
        return Experts(
            sub.block, number, in_width, out_width, tuple(weights), router, linears,
            scores=scores, inputs=inputs, outputs=outputs, shared=shared, **norms,
        )  # fmt: skip

    def _router_of(self, node: Node, number: int) -> Linear | ExpertWeight:
        """Return a router as a projection: a linear, or the weight that a module of its own reads."""
        if node.kind == "linear":
            return self.linear(node)
        weight = parameters_of(node.module)["weight"]
        assert weight is not None
        return ExpertWeight(node.path, "weight", 0, weight.shape[1], number, in_batch_order=self._reads_as_batch(node))

    def _reads_as_batch(self, node: Node) -> bool:
        """Whether a module reads each token of the batch once and in order, and not a copy for each expert."""
        read = next((t for t in node.inputs if t.is_floating_point()), None)
        tokens = read.numel() // read.shape[-1] if read is not None else 0
        return tokens == math.prod(self.tokens)

    @property
    def tokens(self) -> tuple[int, ...]:
        """The batch and length of the token ids that the pass reads; the sizes of another input's first axes."""
        read = next(node for node in self.trace.of_kind("input"))
        return tuple(read.outputs[0].shape[:2])

    # -- layers

    def stack_of(self, subs: Sequence[SubLayer]) -> dict[int, StackName]:
        """Return the stack of each sub-layer, by the sub-layer's id.

        The encoder is what the keys of a cross-attention depend on. A model without cross-attention has one stack,
        which is a decoder if it is causal.
        """
        cross_attentions = [s for s in subs if s.kind == "cross"]
        if cross_attentions:
            encoder_nodes: set[int] = set()
            queue = [cross_attentions[-1].projections["key"][0]]  # an encoder may have some of its own, before it ends
            while queue:
                node = queue.pop()
                if id(node) not in encoder_nodes:
                    encoder_nodes.add(id(node))
                    queue.extend(node.parents)
            # what runs on several states one after another is of the encoder if one of them is
            encoders = {s.output.path or id(s) for s in subs if id(s.output) in encoder_nodes}
            return {id(s): "encoder" if (s.output.path or id(s)) in encoders else "decoder" for s in subs}
        causal = self._causal(subs)
        return {id(s): "decoder" if causal else "encoder" for s in subs}

    def _causal(self, subs: Sequence[SubLayer]) -> bool:
        nodes = [s.attention for s in subs if s.attention is not None]
        if any(n.kind == "attention" for n in nodes):
            return any(bool(getattr(n.module, "is_causal", False)) for n in nodes)
        family = self.model.config.model_type  # no call to ask: transformers' tables say what the model is for
        return family in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and (
            family not in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
        )

    def layers(self) -> list[Layer]:
        subs = find_sublayers(self.trace)
        if not subs:
            raise DeltuneError("no attention shows in its forward pass, nor any other sub-layer")
        stacks = self.stack_of(subs)
        layers: dict[str, Layer] = {}
        counts = {"encoder": 0, "decoder": 0}
        for path, group in self._with_gradient(self._groups(subs, stacks)):
            if path in ("", self.base_path):
                raise DeltuneError("its layers are in no list of modules")
            name = stacks[id(group[0])]
            if path in layers:
                old = layers[path]
                layers[path] = replace(old, passes=old.passes + 1)
                continue
            self.widths[path] = group[0].output.outputs[0].shape[-1]  # the sum may be one of several streams
            layers[path] = layer = self._layer(path, name, counts[name], group)
            if layer.out_width:
                self.widths[path] = group[0].add.outputs[0].shape[-1]
            counts[name] += 1
        paths = list(layers)
        for path in paths:
            if any(other != path and other.startswith(path + ".") for other in paths):
                raise DeltuneError(f"its layers cannot be told apart at {path!r}")
        return list(layers.values())

    def _groups(self, subs: list[SubLayer], stacks: dict[int, StackName]) -> list[tuple[str, list[SubLayer]]]:
        """Return the sub-layers of each layer with the layer's path, once for each time that the layer runs."""
        groups: list[tuple[str, list[SubLayer]]] = []
        for group in self._by_element(subs, 0):
            parts: list[list[SubLayer]] = []
            for sub in group:
                opens = sub.mixes_tokens and sub.kind != "cross"
                if parts and opens and not any(s.mixes_tokens for s in parts[-1]):
                    parts[-1].append(sub)  # it follows an FFN that stands before it
                elif opens or not parts or stacks[id(sub)] != stacks[id(parts[-1][0])]:
                    parts.append([sub])
                else:
                    parts[-1].append(sub)
            for part in parts:
                elements = self._elements([path for sub in part for path in sub.paths])
                path = elements[-1] if elements else self.trace.around([path for sub in part for path in sub.paths])
                if groups and groups[-1][0] == path and self.trace.runs.get(path) == 1:
                    groups[-1][1].extend(part)  # two mixers side by side
                else:
                    groups.append((path, part))
        # an attention that pools the states is in no list of modules, and no layer
        groups = [(path, group) for path, group in groups if self._elements([path])] or groups
        return [(path, self._once_each(path, group)) for path, group in groups]

    def _with_gradient(self, groups: list[tuple[str, list[SubLayer]]]) -> list[tuple[str, list[SubLayer]]]:
        """Return the layers that the outputs depend on by numbers, and note the others.

        Those of a model inside that only chooses something, such as where tokens are cut, would be trained in vain.
        """
        reached = {id(node) for node in self.trace.differentiable()}
        trained = [any(id(sub.output) in reached for sub in group) for _, group in groups]
        if not any(trained):
            return groups
        self.unobserved += [
            f"what training {path} would do (no gradient of the outputs reaches it)"
            for (path, _), is_trained in zip(groups, trained, strict=True)
            if not is_trained
        ]
        return [group for group, is_trained in zip(groups, trained, strict=True) if is_trained]

    def _once_each(self, path: str, group: list[SubLayer]) -> list[SubLayer]:
        """Return the sub-layers of one run of a layer, each once, which may run on several states one after another.

        Raises:
            DeltuneError: A sub-layer runs twice on the same states, so that the layer is several.
        """
        first: dict[str, SubLayer] = {}
        for sub in group:
            known = first.setdefault(sub.output.path or sub.block, sub)
            if known is not sub and depends_on(sub.output, known.output):
                raise DeltuneError(f"its layers cannot be told apart: {path!r} runs modules several times in one pass")
        return list(first.values())

    def _by_element(self, subs: list[SubLayer], level: int) -> list[list[SubLayer]]:
        """Split sub-layers by the elements of lists of modules that they are in.

        A stage, of which each element has a mixer of tokens of its own, is split further.
        """
        split: list[list[SubLayer]] = []
        last = None
        for sub in subs:
            element = self._elements(sub.paths)[: level + 1]
            if not split or element != last:
                split.append([])
            split[-1].append(sub)
            last = element
        if level and not all(any(s.mixes_tokens for s in part) for part in split):
            return [subs]
        if len(split) == 1 and level:
            return split
        return [
            part for group in split for part in (self._by_element(group, level + 1) if _mixers(group) > 1 else [group])
        ]

    def _elements(self, paths: Sequence[str]) -> list[str]:
        """Return the elements of lists of modules around some paths, the outermost first."""
        elements = []
        path = self.trace.around(paths)
        while path:
            container = path.rpartition(".")[0]
            if container not in self.trace.entered and isinstance(self.model.get_submodule(container), _LISTS):
                elements.append(path)
            path = container
        return elements[::-1]

    def _layer(self, path: str, stack: StackName, index: int, group: list[SubLayer]) -> Layer:
        placed: dict[str, tuple[Norm, list[SubLayer]]] = {}
        for node in self.trace.of_kind("norm"):
            if node.path.startswith(path + ".") and node.path not in placed:
                place, sublayers = norm_position(node, group)
                roles = tuple(sorted({s.role for s in sublayers}))
                placed[node.path] = (self._norm(node, place, roles), sublayers)
        attentions, ffns, experts = [], [], []
        for sub in group:
            norms: dict[str, str] = {}
            for norm, sublayers in placed.values():
                if sub in sublayers and norm.place in ("pre", "post"):
                    norms[norm.place] = norm.path
            if sub.attention is not None:
                attentions.append(self.attention_of(sub, norms))
            elif sub.block:
                experts.append(self.experts_of(sub, norms))
            else:
                ffns.append(self.ffn_of(sub, norms))
        layer_norms = tuple(norm for norm, _ in placed.values())
        in_width, out_width = self._layer_widths(path, group)
        return Layer(
            stack, index, path, tuple(attentions), tuple(ffns), layer_norms, experts=tuple(experts), in_width=in_width,
            out_width=out_width,
        )  # fmt: skip

    def _layer_widths(self, path: str, group: list[SubLayer]) -> tuple[int, int]:
        """Return the widths of the hidden states that a layer reads and returns, as `Layer` has them."""
        read, returned = self.trace.arguments.get(path), self.trace.outputs.get(path)
        if read is None or returned is None:
            width = group[0].add.outputs[0].shape[-1]
            return width, width
        if not features_are_last(self.trace, returned, group[-1].output):
            return 0, 0
        alike = read.shape[:-1] == returned.shape[:-1]  # a stage that joins tokens has no x for each of them
        return read.shape[-1] if alike else 0, returned.shape[-1]

    def _norm(self, node: Node, place: NormPosition, of: tuple[str, ...]) -> Norm:
        has = parameters_of(node.module)
        width = node.module.weight.shape[0]
        return Norm(node.path, width, has.get("weight") is not None, has.get("bias") is not None, place, of)

    # -- the whole model

    def anatomy(self) -> Anatomy:
        try:
            layers = self.layers()
        except DeltuneError as error:  # what is unknown does not hide the norms and biases
            layers, self.unobserved = [], [f"the layers ({error})"]
        first_layers: dict[StackName, Layer] = {}
        for layer in layers:
            first_layers.setdefault(layer.stack, layer)
        for name in first_layers:
            kinds = {a.kind for layer in layers if layer.stack == name for a in layer.attentions}
            if not kinds - {"cross"}:
                self.unobserved.append(
                    f"what mixes the tokens in the {name} (no linear that joins the residual stream reads a softmax, a "
                    "product of activations or a convolution)"
                )
        layer_prefixes = tuple(layer.path + "." for layer in layers)
        embedding_paths = self._embedding(first_layers, layer_prefixes)
        outside_layers = [n for n in self.trace.nodes if n.path and not n.path.startswith(layer_prefixes)]
        norms: list[Norm] = []
        for node in outside_layers:
            if node.kind == "norm" and node.path not in {n.path for n in norms}:
                norms.append(self._norm(node, "embedding" if node.path in embedding_paths else "final", ()))
        stacks = tuple(
            self._stack(name, [layer for layer in layers if layer.stack == name], embedding_paths)
            for name in first_layers
        )
        if any(stack.positions for stack in stacks):
            self.computed = tuple(f".{name}" for name in computed_parameters(self.model))
        pooler = self._pooler(outside_layers, embedding_paths, layers)
        head = self._head(layers)
        parts = tuple(self._parts())
        tensors = self._tensors(layers, embedding_paths, pooler, head, parts)
        return Anatomy(
            family=self.model.config.model_type,
            model=type(self.model).__name__,
            base=self.base_path,
            stacks=stacks,
            layers=tuple(layers),
            norms=tuple(norms),
            pooler=pooler,
            head=head,
            tensors=tensors,
            unobserved=tuple(self.unobserved),
            output_kind=self._output_kind(head),
            other_towers=parts,
            tower=self.tower,
            linears=self._linears(),
            vocabulary=self._vocabulary(),
            on_zeros=self.trace.on_zeros,
            not_by_row=modules_not_by_row(self.trace),
            projector=tuple(self._projector(tensors)),
        )

    def _linears(self) -> tuple[Linear, ...]:
        """Return every linear that the pass calls, and the projection to the vocabulary."""
        by_path = {n.path: n for n in reversed(self.trace.of_kind("linear")) if n.path}
        linears = tuple(self.linear(node) for node in reversed(by_path.values()))
        vocabulary = self._vocabulary()
        return linears if vocabulary is None or vocabulary.path in by_path else (*linears, vocabulary)

    def _projector(self, tensors: Sequence[Tensor]) -> Iterator[Linear]:
        """Yield the linears between two towers. Rows of a batch may have several images each, so they share these."""
        names = {t.name for t in tensors if t.tower == "projector"}
        for path, module in base_modules(self.model):
            quantized = find_quantizer(module) is not None
            if f"{path}.weight" in names and (quantized or type(module) is nn.Linear):
                in_width, out_width = linear_sizes(module)
                bias, tied = bias_of(module) is not None, self._holders_of(module, path)
                yield Linear(path, in_width, out_width, bias, shared_with=tied, batch_independent=True)

    def _vocabulary(self) -> Linear | None:
        """Return the output embeddings, which the base model's pass does not call, where they are a linear."""
        module = self.model.get_output_embeddings()
        path = self.paths.get(module) if module is not None else None
        weight = parameters_of(module).get("weight") if module is not None and path is not None else None
        if path is None or type(module) is not nn.Linear or weight is None:
            return None
        tokens = getattr(self.model.config.get_text_config(decoder=True), "vocab_size", None)
        if isinstance(tokens, int) and weight.shape[0] < tokens:  # a linear before the vocabulary, as DeBERTa's
            return None
        bias = parameters_of(module).get("bias") is not None
        return Linear(path, weight.shape[1], weight.shape[0], bias, shared_with=self._holders_of(module, path))

    def _lookup(self, node: Node) -> Linear:
        """Return word embeddings as a projection of one-hot vectors."""
        (rows, width), out_width = node.module.weight.shape, node.outputs[0].shape[-1]
        tied = self._holders_of(node.module, node.path)
        return Linear(
            node.path, rows, out_width, False, transposed=True, shared_with=tied,
            product_only=node.steps == 1 and out_width == width,
        )  # fmt: skip

    def _embedding(self, first_layers: dict[StackName, Layer], layer_prefixes: tuple[str, ...]) -> set[str]:
        """Return the paths of the modules outside the layers that the first layer of a stack depends on."""
        entries: set[str] = set()
        for layer in first_layers.values():
            sublayers: tuple[Attention | FFN | Experts, ...] = (*layer.attentions, *layer.ffns, *layer.experts)
            first = sublayers[:1]
            entries.update(s.input_module for s in first if not isinstance(s, Experts))
            entries.update(s.router or s.path for s in first if isinstance(s, Experts))
        start = {n.path: n for n in reversed(self.trace.nodes) if n.path in entries}
        seen: set[int] = set()
        paths: set[str] = set()
        queue = list(start.values())
        while queue:
            node = queue.pop()
            if id(node) in seen:
                continue
            seen.add(id(node))
            if node.path and not node.path.startswith(layer_prefixes):
                paths.add(node.path)
            queue.extend(node.parents)
        return paths

    def _stack(self, name: StackName, layers: list[Layer], embedding_paths: set[str]) -> Stack:
        paths = [layer.path for layer in layers]
        container = self.trace.around(paths, proper=True)
        entry = container
        while entry != self.base_path and not self._enters(entry):
            entry = self.trace.around([entry], proper=True)
        embeddings = [
            n
            for n in self.trace.of_kind("embedding")
            if n.path in embedding_paths
            and is_inside(n.path, entry)
            and not any(is_inside(n.path, path) for path in paths)
        ]
        # one table for both stacks stands outside of them, once tokens were added to an encoder-decoder model
        words = next((n for n in embeddings if self._reads_ids(n)), None)
        # the first layer may be one of images, before the text
        for layer in (layers[0], *layers[-1:] * (self.tower == "text")) if words is None else ():
            below = self._embedding({name: layer}, tuple(f"{layer.path}." for layer in layers))
            outside = [n for n in self.trace.of_kind("embedding") if n.path in below and n not in embeddings]
            words = next((n for n in outside if self._reads_ids(n)), words)
        word_embedding = None if words is None else words.path
        if words is None and self.tower == "text":
            self.unobserved.append(f"the word embeddings of the {name} (no table of vectors reads the token ids)")
        position_embedding = next(
            (n.path for n in embeddings if n.path != word_embedding and self._is_positional(n)), None
        )
        causal = any(a.causal for layer in layers for a in layer.attentions) or (
            name == "decoder" and not any(a.heads for layer in layers for a in layer.attentions)
        )
        depth = sum(layer.passes for layer in layers)
        width = self.widths[layers[0].path]
        position_ids = "position_ids" in _argument_names(self.trace.entered[entry][0])
        lookup = None if words is None else self._lookup(words)
        return Stack(
            name, entry, container, depth, width, causal, word_embedding, position_embedding, position_ids, lookup
        )

    def _enters(self, path: str) -> bool:
        """Whether a module takes what the model reads: tokens, for which it also takes vectors, images or sounds."""
        module, arguments = self.trace.entered[path]
        if "inputs_embeds" in _argument_names(module) and arguments & {"input_ids", "inputs_embeds"}:
            return True
        return bool(arguments & set(READABLE[1:-1]))

    def _reads_ids(self, node: Node) -> bool:
        """Whether an embedding's indices are the token ids, but for some that another id stands for.

        A model of images or sounds looks up the id of padding in their places.
        """
        queue = list(zip(node.inputs, node.sources, strict=True))
        while queue:
            tensor, source = queue.pop()
            if source is None or tensor.dtype not in (torch.long, torch.int):
                continue
            if source.kind == "input" and source.argument.endswith("input_ids"):
                return tensor.dim() == 2  # several for each place are tokens of several tables in one
            if source.kind == "view" or source.operation in _REPLACING:
                queue.extend(zip(source.inputs, source.sources, strict=True))
        return False

    def _is_positional(self, node: Node) -> bool:
        """Whether an embedding that does not read the token ids has positions as its rows, not token types."""
        around = (getattr(self.model.get_submodule(path), "config", None) for path in _around(node.path))
        types = next((t for config in around if (t := getattr(config, "type_vocab_size", None)) is not None), None)
        types = getattr(self.model.config, "type_vocab_size", None) if types is None else types
        rows = node.module.weight.shape[0]
        lengths = {n.outputs[0].shape[1] for n in self.trace.of_kind("input") if n.outputs[0].dim() == 2}
        of_tokens = self.tower != "text" or node.outputs[0].shape[-2] in lengths  # global tokens have one, too
        return of_tokens and rows != types and rows >= LENGTHS["input_ids"]

    def _pooler(self, outside_layers: list[Node], embedding_paths: set[str], layers: Sequence[Layer]) -> str | None:
        """Return the path of the module whose linear reads one position of the last layer's output, and ends the pass.

        It is the outermost module around that linear that has neither layers nor embeddings in it.
        """
        others = {*embedding_paths, *(layer.path for layer in layers)}
        for node in outside_layers:
            if node.kind == "linear" and node.path not in embedding_paths and node.outputs[0].dim() == 2:
                if descendants(node, _WITHOUT_WEIGHTS, _WITH_WEIGHTS):
                    continue
                around = [
                    path for path in _around(node.path) if path != self.base_path and is_inside(path, self.base_path)
                ]
                return [path for path in around if not any(is_inside(other, path) for other in others)][-1]
        return None

    def _nodes_of_batch(self) -> set[int]:
        """Return the ids of the steps that read something which depends on the inputs."""
        queue = self.trace.of_kind("input")
        seen = {id(node) for node in queue}
        while queue:
            for child in queue.pop().children:
                if id(child) not in seen:
                    seen.add(id(child))
                    queue.append(child)
        return seen

    def _output_kind(self, head: tuple[str, ...]) -> str:
        """Return what the model outputs, as `Anatomy.output_kind` has it."""
        if self.model.get_output_embeddings() is not None:
            return "words"
        choosers = modeling_auto.MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES.values()
        return "choices" if type(self.model).__name__ in choosers else "labels" if head else "states"

    def _head(self, layers: Sequence[Layer]) -> tuple[str, ...]:
        """Return the modules outside the base model that map to labels; a vocabulary projection is no head."""
        if self.model.get_output_embeddings() is not None:
            return ()
        base_children = {self.base_path.split(".")[0], ""}
        base_class: Any = auto_class_mapping(AutoModel).get(type(self.model.config), None)
        if self.base is self.model and base_class is not None and type(self.model) is not base_class:
            # T5ForQuestionAnswering has no base model inside: what AutoModel's class has too belongs to the base
            base_children |= {name for name, _ in meta_model(self.model.config).named_children()}
        elif self.base is self.model:
            return ()
        # BLIP's decoder stands beside AutoModel's modules too; what has layers is a part of the model and no head
        base_children |= {layer.path.split(".")[0] for layer in layers}
        children = ((n, m) for n, m in base_modules(self.model) if "." not in n)
        return tuple(n for n, m in children if n not in base_children and list(m.parameters()))

    def _parts(self) -> Iterator[Anatomy]:
        """Yield the anatomies of the other towers; of one that cannot be observed, note why."""
        for path in self.towers:
            module = self.model.get_submodule(path)
            assert isinstance(module, PreTrainedModel)
            try:
                part = _Inspector(module).anatomy().inside(path)
            except Exception as error:
                reason = f"{type(error).__name__}: {error_summary(error)}"
                self.unobserved.append(f"the layers of the tower {path} ({reason})")
            else:
                yield self._as_read(part)

    def _as_read(self, part: Anatomy) -> Anatomy:
        """Return the anatomy of another tower, of whose tensors those get a gradient that the rest of the model reads.

        A model may read the hidden states of a layer before the last one, or not read what the tower pools. A pass that
        stopped may have read more later on: of it only the layers that it left out count, with what follows them.
        """
        trace = trace_tower(self.model, part.tower_path, self._between_towers())
        reached = _names_read_by(trace, trace.differentiable()) if trace is not None else set()
        read = {t.name: not reached.isdisjoint((t.name, *t.aliases)) for t in part.tensors}
        if trace is None or not any(read.values()):
            self.unobserved.append(f"which layers of the tower {part.tower_path} the rest of the model reads")
            part, read = replace(part, is_reading_observed=False), dict.fromkeys(read, True)
        elif trace.stopped:
            unread = [
                layer.path
                for number, layer in enumerate(part.layers)
                if not any(read[t.name] for t in part.tensors if t.layer == number)
            ]
            after = _names_read_by(trace, _nodes_after(trace, unread))
            read = {name: is_read or name not in after for name, is_read in read.items()}
        return replace(part, tensors=tuple(replace(t, receives_gradient=read[t.name]) for t in part.tensors))

    def _between_towers(self) -> set[str]:
        """Return the paths of the modules of the base model with parameters that are in no tower."""
        read = _names_read_by(self.trace, self.trace.nodes)
        owners = {name.rpartition(".")[0] for name, _ in base_parameters(self.model) if name not in read}
        return {
            owner
            for owner in owners - self.trace.entered.keys()
            if is_inside(owner, self.base_path) and not any(is_inside(owner, tower) for tower in self.towers)
        }

    def _tensors(
        self,
        layers: list[Layer],
        embedding_paths: set[str],
        pooler: str | None,
        head: tuple[str, ...],
        parts: tuple[Anatomy, ...],
    ) -> tuple[Tensor, ...]:
        kinds = {n.path: n.kind for n in self.trace.nodes if n.path}
        names: dict[int, list[str]] = {}
        shapes: dict[int, tuple[tuple[int, ...], str]] = {}
        for path, module in base_modules(self.model, remove_duplicate=False):
            for leaf, (parameter, shape, quantized) in visible_parameters(module).items():
                identity = self._identity(parameter)
                names.setdefault(identity, []).append(f"{path}.{leaf}".lstrip("."))
                shapes[identity] = shape, quantized
        final = {n.path for n in self.trace.nodes if n.path} - embedding_paths
        of_batch = {n.path for n in self.trace.nodes if id(n) in self.batch_nodes}
        read, reached = (_names_read_by(self.trace, n) for n in (self.trace.nodes, self.trace.differentiable()))
        of_parts = {t.name: t for part in parts for t in part.tensors}
        vocabulary = getattr(self._vocabulary(), "path", None)
        layer_prefixes = [(layer.path + ".", i) for i, layer in enumerate(layers)]
        inside_base = f"{self.base_path}." if self.base_path else ""
        tensors = []
        for key, aliases in names.items():
            owners = [a.rpartition(".")[0] for a in aliases]
            layer = next((i for prefix, i in layer_prefixes if aliases[0].startswith(prefix)), None)
            executed = next((o for o in owners if o in kinds), owners[0])
            if layer is not None:
                area = "layers"
            elif any(is_inside(aliases[0], path) for path in head):
                area = "head"
            elif any(o in embedding_paths for o in owners):
                area = "embedding"
            elif pooler and is_inside(aliases[0], pooler):
                area = "pooler"
            elif not aliases[0].startswith(inside_base):
                area = "vocabulary"
            else:
                area = "final" if executed in final else "other"
            kind = "linear" if executed == vocabulary else kinds.get(executed, "other")
            role = _role(kind, aliases[0].rpartition(".")[2])
            batch_independent = executed in kinds and executed not in of_batch
            read_without_call = not self.read_without_call.isdisjoint(aliases)
            shape, quantized = shapes[key]
            # norms and linears that a family freezes when it is made are weights nevertheless
            computed = kind not in _OF_WEIGHTS and f".{aliases[0]}".endswith(self.computed)
            outside = not aliases[0].startswith(inside_base)
            receives_gradient = outside or not reached.isdisjoint(aliases)
            tower = self.tower
            if self.towers and not outside and read.isdisjoint(aliases):
                tower = next((self.towers[o] for o in _around(owners[0]) if o in self.towers), "projector")
                receives_gradient = True  # in a pass on what that tower reads
            if (of_part := of_parts.get(aliases[0])) is not None:
                role, receives_gradient = of_part.role, of_part.receives_gradient
            others = tuple(aliases[1:])
            tensors.append(
                Tensor(
                    aliases[0], shape, area, role, layer, others, batch_independent, read_without_call, computed, tower,
                    receives_gradient, quantized,
                )
            )  # fmt: skip
        return tuple(tensors)


def _names_read_by(trace: Trace, nodes: Sequence[Node]) -> set[str]:
    """Return the names of the parameters that steps of a forward pass have read."""
    names = {f"{n.path}.{leaf}" for n in nodes if n.module is not None for leaf in parameters_of(n.module)}
    inputs = (tensor for node in nodes for tensor in node.all_inputs)
    return names | {name for tensor in inputs if (name := trace.parameters.get(id(tensor)))}


def _nodes_after(trace: Trace, paths: Sequence[str]) -> list[Node]:
    """Return the steps inside of some modules, and those that read what these have returned."""
    queue = [n for n in trace.nodes if any(is_inside(n.path, path) for path in paths)]
    seen = {id(node): node for node in queue}
    while queue:
        for child in queue.pop().children:
            if id(child) not in seen:
                seen[id(child)] = child
                queue.append(child)
    return list(seen.values())


def _mixers(group: Sequence[SubLayer]) -> int:
    return sum(sub.mixes_tokens and sub.kind != "cross" for sub in group)


def _around(path: str) -> list[str]:
    """Return a path and those of the modules around it, the innermost first."""
    parts = path.split(".")
    return [".".join(parts[:size]) for size in range(len(parts), 0, -1)]


_OF_WEIGHTS = {"norm", "linear", "experts"}

_REPLACING = {"where", "masked_fill", "index_put", "_index_put_impl", "masked_scatter"}
"""Operations that put other values in some places of a tensor."""

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
"""Modules that hold the layers of a stack."""


def _chooses(node: Node, number: int) -> bool:
    """Whether a module that is one node has a row of weights for each of a number of experts."""
    weight = parameters_of(node.module).get("weight") if node.module is not None else None
    return weight is not None and weight.dim() == 2 and weight.shape[0] == number


def _expert_weights(
    holders: Mapping[str, nn.Module],
    weights: Mapping[str, torch.Tensor],
    in_width: int,
    out_width: int,
    in_batch_order: bool,
) -> tuple[tuple[ExpertWeight, ...], tuple[ExpertWeight, ...]]:
    """Return the weights of experts that read x, and those that give the output; none where that does not show.

    The modules of transformers say which axis is which. Elsewhere the one reading that leads from x to the output is
    taken. The inner width is that of the outputs' inputs, or twice that where a gate is fused.
    """
    known = {experts_transposed(module) for module in holders.values()}
    for transposed in (False, True) if None in known else sorted(map(bool, known)):
        matrices = {name: tuple(w.shape[1:]) if transposed else tuple(w.shape[1:])[::-1] for name, w in weights.items()}
        names = list(matrices)
        for number in range(len(names) - 1, 0, -1):  # an experts' module names its inputs first
            inputs, outputs = names[:number], names[number:]
            inner = {matrices[name][1] for name in inputs}
            outer = {matrices[name][0] for name in outputs}
            fits = all(matrices[name][0] == in_width for name in inputs)
            fits = fits and all(matrices[name][1] == out_width for name in outputs)
            if fits and len(inner) == len(outer) == 1 and inner.pop() in (width := outer.pop(), 2 * width):
                both = (inputs, outputs)
                return tuple(  # type: ignore[return-value]
                    tuple(_expert_weight(name, weights[name], transposed, in_batch_order) for name in part)
                    for part in both
                )
    return (), ()


def _expert_weight(name: str, weight: torch.Tensor, transposed: bool, in_batch_order: bool) -> ExpertWeight:
    path, _, leaf = name.rpartition(".")
    number, first, second = weight.shape
    widths = (first, second) if transposed else (second, first)
    return ExpertWeight(path, leaf, number, *widths, transposed, in_batch_order)


def _role(kind: str, leaf: str) -> str:
    term = "bias" if leaf == "bias" else "gain" if kind == "norm" else "weight"
    if kind == "embedding":
        return "embedding"
    return f"{kind}.{term}" if kind in ("norm", "linear") else term


def _argument_names(module: torch.nn.Module) -> set[str]:
    return set(signature(module.forward).parameters)


_WITHOUT_WEIGHTS = {"view", "pass", "op", "add"}
_WITH_WEIGHTS = {"linear", "norm", "embedding", "attention", "experts", "mix"}
"""Kinds of nodes: what only reshapes or combines hidden states, and what computes with weights or mixes tokens."""
