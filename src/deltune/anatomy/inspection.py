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

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from inspect import signature
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from torch import nn
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from ..compat import auto_class_mapping, parameters_of, submodules_of
from ..errors import DeltuneError, describe_value, error_summary, excerpt
from .graph import Node, depends_on, descendants, downstream, reads_above, upstream
from .inputs import LENGTHS, READABLE, tower_name
from .parts import PartReader, is_causal
from .quantization import check_quantization
from .quantizers import bias_of, find_quantizer, linear_sizes
from .residuals import SubLayer, find_sublayers
from .row_order import modules_not_by_row
from .skeleton import base_modules, base_parameters, structure_stamp
from .tensors import model_tensors, names_read_by, paths_around
from .tracing import base_model, meta_model, trace_forward, trace_tower
from .types import FFN, Anatomy, Attention, Experts, Layer, Linear, Norm, Stack, StackName, Tensor, is_inside

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
    inner = model_inside(inner)
    return inner if isinstance(inner, PreTrainedModel) else None


def model_inside(model: Any) -> Any:
    """Return the one model of transformers inside a model of sentence-transformers; anything else as it is."""
    if type(model).__module__.partition(".")[0] != "sentence_transformers":
        return model
    inside, waiting = [], [model]
    while waiting:
        module = waiting.pop()
        if isinstance(module, PreTrainedModel):
            inside.append(module)
        else:
            waiting += [child for child in submodules_of(module).values() if child is not None]
    return inside[0] if len(inside) == 1 else model


def describe_wrapped(model: object) -> str:
    """Return what to do with a module that wraps a model of transformers, for a message; "" for anything else."""
    inner = wrapped_model(model)
    return f"it wraps a {type(inner).__name__}: give that model, and compile or wrap it afterwards" if inner else ""


def check_model_or_config(model: object, function: str) -> None:
    """Raise unless what a function was called with is a model of transformers or its configuration.

    Of the name or folder of a model the message says how its configuration is loaded.
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
    """Reads the anatomy of one model off its trace."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.base = base_model(model)
        self.base_path = next((name for name, m in base_modules(model) if m is self.base), "")
        self.trace = trace_forward(model)
        self.reader = PartReader(model, self.trace)
        self.unobserved = self.reader.unobserved
        self.tower = tower_name(self.base)
        self.towers = self._towers()
        self.widths: dict[str, int] = {}  # of the hidden states, by the path of the layer

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

    # -- layers

    def _stacks_of(self, subs: Sequence[SubLayer]) -> dict[SubLayer, StackName]:
        """Return the stack of each sub-layer.

        The encoder is what the keys of a cross-attention depend on. A model without cross-attention has one stack,
        which is a decoder if it is causal.
        """
        cross_attentions = [s for s in subs if s.kind == "cross"]
        if cross_attentions:
            # an encoder may have cross-attentions of its own, before it ends
            encoder_nodes = upstream([cross_attentions[-1].projections["key"][0]])
            # what runs on several states one after another is of the encoder if one of them is
            encoders = {s.output.path or s for s in subs if s.output in encoder_nodes}
            return {s: "encoder" if (s.output.path or s) in encoders else "decoder" for s in subs}
        return dict.fromkeys(subs, "decoder" if self._causal(subs) else "encoder")

    def _causal(self, subs: Sequence[SubLayer]) -> bool:
        nodes = [s.attention for s in subs if s.attention is not None]
        if any(n.kind == "attention" for n in nodes):
            return any(map(is_causal, nodes))
        family = self.model.config.model_type  # no call to ask: transformers' tables say what the model is for
        return family in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and (
            family not in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
        )

    def layers(self) -> list[Layer]:
        subs = find_sublayers(self.trace)
        if not subs:
            raise DeltuneError("no attention shows in its forward pass, nor any other sub-layer")
        stacks = self._stacks_of(subs)
        layers: dict[str, Layer] = {}
        counts = {"encoder": 0, "decoder": 0}
        for path, group in self._with_gradient(self._groups(subs, stacks)):
            if path in ("", self.base_path):
                raise DeltuneError("its layers are in no list of modules")
            name = stacks[group[0]]
            if path in layers:
                old = layers[path]
                layers[path] = replace(old, passes=old.passes + 1)
                continue
            self.widths[path] = group[0].output.outputs[0].shape[-1]  # the sum may be one of several streams
            layers[path] = layer = self.reader.layer(path, name, counts[name], group)
            if layer.out_width:
                self.widths[path] = group[0].add.outputs[0].shape[-1]
            counts[name] += 1
        paths = list(layers)
        for path in paths:
            if any(other != path and other.startswith(path + ".") for other in paths):
                raise DeltuneError(f"its layers cannot be told apart at {path!r}")
        return list(layers.values())

    def _groups(self, subs: list[SubLayer], stacks: dict[SubLayer, StackName]) -> list[tuple[str, list[SubLayer]]]:
        """Return the sub-layers of each layer with the layer's path, once for each time that the layer runs."""
        groups: list[tuple[str, list[SubLayer]]] = []
        for element in self._split_by_lists(subs):
            for part in _by_mixer(element, stacks):
                paths = [path for sub in part for path in sub.paths]
                path = (self._elements(paths) or [self.trace.around(paths)])[-1]
                if groups and groups[-1][0] == path and self.trace.runs.get(path) == 1:
                    groups[-1][1].extend(part)  # two mixers side by side
                else:
                    groups.append((path, part))
        # an attention that pools the states is in no list of modules, and no layer
        groups = [(path, group) for path, group in groups if self._elements([path])] or groups
        return [(path, self._once_each(path, group)) for path, group in groups]

    def _split_by_lists(self, subs: list[SubLayer], level: int = 0) -> list[list[SubLayer]]:
        """Split sub-layers by the element of a list of modules that each is in.

        An element of the outermost lists is a layer, or a stage of several layers, of which each mixes tokens. A stage
        is split by the lists inside of it, where each of their elements mixes tokens.
        """
        elements = [list(group) for _, group in groupby(subs, lambda s: self._elements(s.paths)[: level + 1])]
        are_layers = len(elements) > 1 and all(any(s.mixes_tokens for s in element) for element in elements)
        if level and not are_layers:
            return [subs]
        layers: list[list[SubLayer]] = []
        for element in elements:
            is_stage = sum(map(_opens, element)) > 1
            layers += self._split_by_lists(element, level + 1) if is_stage else [element]
        return layers

    def _with_gradient(self, groups: list[tuple[str, list[SubLayer]]]) -> list[tuple[str, list[SubLayer]]]:
        """Return the layers that the outputs depend on by numbers, and note the others.

        Those of a model inside that only chooses something, such as where tokens are cut, would be trained in vain.
        """
        trained = [any(sub.output in self.trace.differentiable for sub in group) for _, group in groups]
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

        A sub-layer that runs twice on the same states is an error, since the layer is several.
        """
        first: dict[str, SubLayer] = {}
        for sub in group:
            known = first.setdefault(sub.output.path or sub.block, sub)
            if known is not sub and depends_on(sub.output, known.output):
                raise DeltuneError(f"its layers cannot be told apart: {path!r} runs modules several times in one pass")
        return list(first.values())

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
                norms.append(self.reader.norm(node, "embedding" if node.path in embedding_paths else "final"))
        stacks = tuple(
            self._stack(name, [layer for layer in layers if layer.stack == name], embedding_paths)
            for name in first_layers
        )
        pooler = self._pooler(outside_layers, embedding_paths, layers)
        head = self._head(layers)
        parts, vocabulary = tuple(self._parts()), self._vocabulary()
        anatomy = Anatomy(
            family=self.model.config.model_type,
            model=type(self.model).__name__,
            base=self.base_path,
            stacks=stacks,
            layers=tuple(layers),
            norms=tuple(norms),
            pooler=pooler,
            head=head,
            tensors=(),
            unobserved=tuple(self.unobserved),
            output_kind=self._output_kind(head),
            other_towers=parts,
            tower=self.tower,
            linears=self._linears(vocabulary),
            vocabulary=vocabulary,
            on_zeros=self.trace.on_zeros,
            not_by_row=modules_not_by_row(self.trace),
        )
        identity = self.reader.identity
        tensors = model_tensors(self.model, self.trace, anatomy, embedding_paths, self.towers, identity)
        return replace(anatomy, tensors=tensors, projector=tuple(self._projector(tensors)))

    def _linears(self, vocabulary: Linear | None) -> tuple[Linear, ...]:
        """Return every linear that the pass calls, and the projection to the vocabulary."""
        by_path = {n.path: n for n in reversed(self.trace.of_kind("linear")) if n.path}
        linears = tuple(self.reader.linear(node) for node in reversed(by_path.values()))
        return linears if vocabulary is None or vocabulary.path in by_path else (*linears, vocabulary)

    def _projector(self, tensors: Sequence[Tensor]) -> Iterator[Linear]:
        """Yield the linears between two towers. Rows of a batch may have several images each, so they share these."""
        names = {t.name for t in tensors if t.tower == "projector"}
        for path, module in base_modules(self.model):
            quantized = find_quantizer(module) is not None
            if f"{path}.weight" in names and (quantized or type(module) is nn.Linear):
                in_width, out_width = linear_sizes(module)
                bias, tied = bias_of(module) is not None, self.reader.tied_modules(module, path)
                yield Linear(path, in_width, out_width, bias, shared_with=tied, batch_independent=True)

    def _vocabulary(self) -> Linear | None:
        """Return the output embeddings, which the base model's pass does not call, where they are a linear."""
        module = self.model.get_output_embeddings()
        path = self.reader.paths.get(module) if module is not None else None
        weight = parameters_of(module).get("weight") if module is not None and path is not None else None
        if path is None or type(module) is not nn.Linear or weight is None:
            return None
        tokens = getattr(self.model.config.get_text_config(decoder=True), "vocab_size", None)
        if isinstance(tokens, int) and weight.shape[0] < tokens:  # a linear before the vocabulary, as DeBERTa's
            return None
        bias = parameters_of(module).get("bias") is not None
        return Linear(path, weight.shape[1], weight.shape[0], bias, shared_with=self.reader.tied_modules(module, path))

    def _embedding(self, first_layers: dict[StackName, Layer], layer_prefixes: tuple[str, ...]) -> set[str]:
        """Return the paths of the modules outside the layers that the first layer of a stack depends on."""
        entries: set[str] = set()
        for layer in first_layers.values():
            sublayers: tuple[Attention | FFN | Experts, ...] = (*layer.attentions, *layer.ffns, *layer.experts)
            first = sublayers[:1]
            entries.update(s.input_module for s in first if not isinstance(s, Experts))
            entries.update(s.router or s.path for s in first if isinstance(s, Experts))
        start = {n.path: n for n in reversed(self.trace.nodes) if n.path in entries}
        return {n.path for n in upstream(start.values()) if n.path and not n.path.startswith(layer_prefixes)}

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
        lookup = None if words is None else self.reader.lookup(words)
        return Stack(
            name, entry, container, depth, width, causal, word_embedding, position_embedding, position_ids, lookup
        )

    def _enters(self, path: str) -> bool:
        """Return whether a module takes what the model reads: tokens, or vectors in their place, images or sounds."""
        module, arguments = self.trace.entered[path]
        if "inputs_embeds" in _argument_names(module) and arguments & {"input_ids", "inputs_embeds"}:
            return True
        return bool(arguments & set(READABLE[1:-1]))

    def _reads_ids(self, node: Node) -> bool:
        """Return whether an embedding's indices are the token ids, but for some that another id stands for.

        A model of images or sounds looks up the id of padding in their places.
        """

        def keeps_ids(tensor: torch.Tensor, source: Node) -> bool:
            return tensor.dtype in _OF_IDS and (source.kind == "view" or source.operation in _REPLACING)

        for tensor, source in reads_above(node.reads, keeps_ids):
            if tensor.dtype in _OF_IDS and source.kind == "input" and source.argument.endswith("input_ids"):
                return tensor.dim() == 2  # several for each place are tokens of several tables in one
        return False

    def _is_positional(self, node: Node) -> bool:
        """Return whether an embedding that does not read the token ids has positions as its rows, not token types."""
        around = (getattr(self.model.get_submodule(path), "config", None) for path in paths_around(node.path))
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
                    path
                    for path in paths_around(node.path)
                    if path != self.base_path and is_inside(path, self.base_path)
                ]
                return [path for path in around if not any(is_inside(other, path) for other in others)][-1]
        return None

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
                part = _Inspector(module).anatomy().with_prefix(path)
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
        reached = names_read_by(trace, trace.differentiable) if trace is not None else set()
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
            inside = [n for n in trace.nodes if any(is_inside(n.path, path) for path in unread)]
            after = names_read_by(trace, downstream(inside))
            read = {name: is_read or name not in after for name, is_read in read.items()}
        return replace(part, tensors=tuple(replace(t, receives_gradient=read[t.name]) for t in part.tensors))

    def _between_towers(self) -> set[str]:
        """Return the paths of the modules of the base model with parameters that are in no tower."""
        read = names_read_by(self.trace, self.trace.nodes)
        owners = {name.rpartition(".")[0] for name, _ in base_parameters(self.model) if name not in read}
        return {
            owner
            for owner in owners - self.trace.entered.keys()
            if is_inside(owner, self.base_path) and not any(is_inside(owner, tower) for tower in self.towers)
        }


def _by_mixer(subs: Sequence[SubLayer], stacks: dict[SubLayer, StackName]) -> list[list[SubLayer]]:
    """Split sub-layers into layers, each with one mixer of tokens, its cross-attentions and its FFNs."""
    layers: list[list[SubLayer]] = []
    for sub in subs:
        follows_ffn = bool(layers) and not any(s.mixes_tokens for s in layers[-1])
        if layers and (follows_ffn if _opens(sub) else stacks[sub] == stacks[layers[-1][0]]):
            layers[-1].append(sub)
        else:
            layers.append([sub])
    return layers


def _opens(sub: SubLayer) -> bool:
    """Return whether a sub-layer is a mixer of tokens that a layer has one of."""
    return sub.mixes_tokens and sub.kind != "cross"


_OF_IDS = (torch.long, torch.int)
"""The types of token ids."""

_REPLACING = {"where", "masked_fill", "index_put", "_index_put_impl", "masked_scatter"}
"""Operations that put other values in some places of a tensor."""

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
"""Modules that hold the layers of a stack."""


def _argument_names(module: nn.Module) -> set[str]:
    return set(signature(module.forward).parameters)


_WITHOUT_WEIGHTS = {"view", "pass", "op", "add"}
_WITH_WEIGHTS = {"linear", "norm", "embedding", "attention", "experts", "mix"}
"""Kinds of nodes: what only reshapes or combines hidden states, and what computes with weights or mixes tokens."""
