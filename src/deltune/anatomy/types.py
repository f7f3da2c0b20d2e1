"""The parts of a transformer as plain values: layers, attentions, projections, FFNs, norms and tensors.

`deltune.inspect` fills them from one traced forward pass. A path is the dotted name of a sub-module, as in
`model.get_submodule(path)`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from functools import cached_property
from html import escape
from itertools import groupby
from typing import Any, Literal

from ..errors import first_names

StackName = Literal["encoder", "decoder"]
AttentionKind = Literal["self", "cross", "mixer"]
NormPosition = Literal["pre", "post", "output", "query", "key", "inner", "embedding", "final", "unknown"]


def is_inside(path: str, parent: str) -> bool:
    """Return whether a path is `parent` or inside of it, as "layer.1.output" is in "layer.1" and "layer.10" is not."""
    return not parent or path == parent or path.startswith(f"{parent}.")


@dataclass(frozen=True)
class Columns:
    """The columns of a fused projection's output that belong to one part, such as the keys.

    The output is cut into `groups` equal blocks; the part has the columns `start` to `stop` (exclusive) of each. The
    keys of GPT-2 are the columns d to 2d of 1 group, the keys of GPT-NeoX the columns d_h to 2 d_h of one group a head.
    """

    groups: int  # the number of equal blocks
    start: int  # the first column of the part in each block
    stop: int  # the column after the part's last one in each block


@dataclass(frozen=True)
class Linear:
    """A linear projection from `in_width` to `out_width` features."""

    path: str  # the path of its module
    in_width: int  # input features
    out_width: int  # output features; of a part of a fused projection, the part's alone
    bias: bool  # whether it has a bias
    transposed: bool = False  # whether its weight has the shape (in, out), as transformers' Conv1D has it
    # the part's columns where the module is a fused projection; None where it is all of it
    columns: Columns | None = None
    # the paths of other modules that hold the same weight, such as tied output embeddings
    shared_with: tuple[str, ...] = ()
    # whether some of its calls read nothing that depends on the batch, but a table of positions, say
    batch_independent: bool = False
    # whether the module does nothing but multiply by its weight and add its bias, so that a linear change of its output
    # can be merged into them
    product_only: bool = True
    quantized: str = ""  # how its weight is quantised, so that nothing can train it; "" where it is not


@dataclass(frozen=True)
class ExpertWeight:
    """A weight of three dimensions, a matrix for each expert, or a router's weight, which is read as a parameter."""

    path: str  # the path of the module that holds it
    leaf: str  # its name in that module
    number: int  # the number of experts that have a matrix of their own in it; 0 for a router's weight
    in_width: int  # input features of a matrix
    out_width: int  # output features of a matrix
    transposed: bool = False  # whether a matrix has the shape (in, out)
    # whether its module reads the tokens in the order of the batch, so that rows can be told apart
    in_batch_order: bool = True


@dataclass(frozen=True)
class Attention:
    """An attention with its projections, or another sub-layer through which tokens see each other.

    What is known of the heads is None where the model does not call transformers' attention interface. Query, key and
    value are None where each is not the output of one linear.

    Attributes:
        path: The path of the attention's module.
        kind: "self", "cross", or "mixer": a state-space layer, a linear attention, a convolution over the tokens.
        input_module: The path of the module whose first input is x, the hidden states that the attention reads.
        output: The output projection W_o.
        query: The query projection.
        key: The key projection.
        value: The value projection.
        heads: Query heads.
        kv_heads: Key-value heads; fewer than `heads` in grouped-query attention.
        head_width: Width of a query or key of one head.
        value_width: Width of a value of one head.
        causal: Whether tokens see earlier tokens only.
        pre: The path of the norm before it.
        post: The path of the norm after its residual addition.
        inputs: The linears that it reads the hidden states with, where their roles cannot be observed.
        reused: Which of key and value are those that an earlier attention has projected, as in the last layers of
            Gemma 3n, so that it has none of its own.
    """

    path: str
    kind: AttentionKind
    input_module: str
    output: Linear
    query: Linear | None = None
    key: Linear | None = None
    value: Linear | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_width: int | None = None
    value_width: int | None = None
    causal: bool = False
    pre: str | None = None
    post: str | None = None
    inputs: tuple[Linear, ...] = ()
    reused: tuple[str, ...] = ()


@dataclass(frozen=True)
class FFN:
    """A feed-forward network: x -> `inputs` -> activation (times a gate) -> `output`."""

    path: str  # the path of the innermost module around it
    input_module: str  # the path of the module whose first input is x, the hidden states that the FFN reads
    inputs: tuple[Linear, ...]  # the linears that read x; a gated FFN has two of them, or a fused one
    output: Linear  # the last linear
    gated: bool  # whether the activation is multiplied by a second projection of x
    pre: str | None = None  # the path of the norm before it
    post: str | None = None  # the path of the norm after its residual addition
    # of a gated FFN, the projection that the activation follows; None where it does not show
    gate: Linear | None = None
    # of a gated FFN, the projection that the activation is multiplied by; None where it does not show
    up: Linear | None = None


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: a router sends each token through some of many FFNs."""

    # the path of the module around router and experts, whose output joins the residual stream. Its first input is x,
    # the hidden states that it reads.
    path: str
    number: int  # the number of experts
    in_width: int  # the width of x
    out_width: int  # the width of its output
    router: str | None = None  # the path of the module that chooses the experts; None where it does not show
    linears: tuple[Linear, ...] = ()  # the linears inside that every token goes through, as in shared experts
    pre: str | None = None  # the path of the norm before it
    post: str | None = None  # the path of the norm after its residual addition
    # the router as a projection to a score for each expert: a linear, or the weight that its module reads
    scores: Linear | ExpertWeight | None = None
    # the weights of the experts that read x; none where they cannot be told from the outputs
    inputs: tuple[ExpertWeight, ...] = ()
    outputs: tuple[ExpertWeight, ...] = ()  # the weights of the experts that give their outputs
    shared: tuple[FFN, ...] = ()  # the shared experts, FFNs that every token goes through


@dataclass(frozen=True)
class Norm:
    """A LayerNorm or RMSNorm."""

    path: str  # the path of its module
    width: int  # the features that it normalises
    gain: bool  # whether it has a gain (`weight`)
    bias: bool  # whether it has a bias
    # "pre" (a sub-layer reads it), "post" (it normalises the residual sum), "output" (it normalises a sub-layer's
    # output before the sum), "query", "key", "inner" (inside a sub-layer), "embedding" (after the embeddings), "final"
    # (after the last layer) or "unknown"
    place: NormPosition
    of: tuple[str, ...] = ()  # the sub-layers that it belongs to, "attention" and "ffn"


@dataclass(frozen=True)
class Layer:
    """One layer of a stack.

    Attributes:
        stack: "encoder" or "decoder".
        index: Its number in the stack, from 0.
        path: The path of its module.
        attentions: Its attentions, in the order of execution.
        ffns: Its FFNs, in the order of execution.
        norms: Its norms, in the order of execution.
        passes: How often the same modules run in one forward pass; more than 1 where layers share them (ALBERT).
        experts: Its mixtures of experts, in the order of execution.
        in_width: The width of the hidden states that it reads; 0 where these are of other tokens than those that it
            returns, and where `out_width` is.
        out_width: The width of the hidden states that it returns; 0 where their last axis is another one, such as the
            columns of an image.
    """

    stack: StackName
    index: int
    path: str
    attentions: tuple[Attention, ...]
    ffns: tuple[FFN, ...]
    norms: tuple[Norm, ...]
    passes: int = 1
    experts: tuple[Experts, ...] = ()
    in_width: int = 0
    out_width: int = 0


@dataclass(frozen=True)
class Stack:
    """A stack of layers: an encoder or a decoder."""

    name: StackName  # "encoder" or "decoder"
    entry: str  # the path of the module that takes `input_ids` or `inputs_embeds`
    container: str  # the path of the innermost module around the layers
    depth: int  # the number of layers that a token passes, shared ones counted each time
    width: int  # the width of the hidden states
    causal: bool  # whether its self-attention is causal
    words: str | None = None  # the path of the word embeddings
    # the path of the absolute position embeddings; None where positions are relative or rotary
    positions: str | None = None
    position_ids: bool = False  # whether the entry takes `position_ids`
    # the word embeddings as a projection of token ids, each of which stands for a one-hot vector
    embedding: Linear | None = None


@dataclass(frozen=True)
class Tensor:
    """A parameter of the model."""

    name: str  # its name, as in `model.named_parameters()`
    shape: tuple[int, ...]  # its shape
    area: str  # "embedding", "layers", "pooler", "final", "vocabulary", "head" or "other"
    role: str  # "norm.gain", "norm.bias", "linear.weight", "linear.bias", "embedding", "weight" or "bias"
    layer: int | None = None  # the index in `Anatomy.layers` of the layer that it is in; None outside of the layers
    aliases: tuple[str, ...] = ()  # its other names, where modules share it
    # whether its module reads nothing that depends on the batch (a table of relative positions)
    batch_independent: bool = False
    read_without_call: bool = False  # whether the model reads it without calling the module that holds it
    # whether the model's class computes it and gives it no gradient (sinusoids), so that nothing trains it
    computed: bool = False
    # the part of the model that it is in, "text", "vision", "audio" or "projector" (between two of them)
    tower: str = "text"
    # whether it gets a gradient from the outputs of a pass on the main input alone, or in another tower of one on what
    # that tower reads. The cross-attention of a decoder without an encoder gets none, nor does the last layer of a
    # tower of which the model reads the hidden states before it.
    receives_gradient: bool = True
    # how its numbers are quantised, such as "bitsandbytes nf4", so that nothing can train them; "" where they are not.
    # The shape is the shape in floating point.
    quantized: str = ""

    @property
    def numel(self) -> int:
        """The number of its scalars."""
        return math.prod(self.shape)


@dataclass(frozen=True, repr=False)
class Anatomy:
    """The parts of a transformer. It prints as a tree that shows equal layers once; `as_dict` returns all of them.

    Attributes:
        family: transformers' name of the architecture, such as "roberta".
        model: The name of the model's class.
        base: The path of the base model inside the model; "" when it is the base model itself.
        stacks: The encoder, the decoder, or both.
        layers: All layers, in the order of execution.
        norms: The norms outside of the layers.
        pooler: The path of the pooler, or None.
        head: The paths of the modules of the task head; empty without one.
        tensors: All parameters, each once.
        unobserved: What could not be observed, a sentence each.
        output_kind: What the model outputs: "states" (hidden states), "labels" (from a head), "choices" (from a head
            over multiple choices) or "words" (logits over the vocabulary).
        other_towers: The towers that the main input does not enter, such as what reads images, each as an anatomy with
            the paths that it has in this model.
        tower_path: Of one of `other_towers`, the path of its model; "" otherwise.
        tower: The tower that the main input enters, "text", "vision" or "audio", in which a method acts by default.
        linears: Every linear that the forward pass calls, whether its role shows or not, and the vocabulary's.
        vocabulary: The projection to the vocabulary, the output embeddings; None for a model without one.
        on_zeros: Why the forward pass was observed on zeros in place of shapes alone; "" where it was not.
        not_by_row: The paths of the modules whose tensors do not have the rows of the batch, in their order, as the
            first axis: hidden states of shape (length, batch, width), or tokens that a router sends to an expert.
        projector: The linears between two towers, which a pass on one input does not call, by their modules.
        is_reading_observed: Of one of `other_towers`, whether it shows which of its layers the rest of the model reads.
    """

    family: str
    model: str
    base: str
    stacks: tuple[Stack, ...]
    layers: tuple[Layer, ...]
    norms: tuple[Norm, ...]
    pooler: str | None
    head: tuple[str, ...]
    tensors: tuple[Tensor, ...]
    unobserved: tuple[str, ...] = ()
    output_kind: str = "states"
    other_towers: tuple[Anatomy, ...] = ()
    tower_path: str = ""
    tower: str = "text"
    linears: tuple[Linear, ...] = ()
    vocabulary: Linear | None = None
    on_zeros: str = ""
    not_by_row: tuple[str, ...] = ()
    projector: tuple[Linear, ...] = ()
    is_reading_observed: bool = True

    def __deepcopy__(self, memo: dict[int, Any]) -> Anatomy:
        """Return itself: it is a value, which copies of a tuned model share."""
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is looked up once and kept, so that equal values give equal pickles."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @cached_property
    def _tensors_by_name(self) -> dict[str, Tensor]:
        return {name: tensor for tensor in self.tensors for name in (tensor.name, *tensor.aliases)}

    def tensor(self, name: str) -> Tensor:
        """Return a parameter of the model by its name, any one where it has several."""
        return self._tensors_by_name[name]

    def find_tensor(self, name: str) -> Tensor | None:
        """Return a parameter of the model by its name, or None if it has none of this name."""
        return self._tensors_by_name.get(name)

    @property
    def towers(self) -> tuple[str, ...]:
        """The towers of the model, the main one first."""
        return tuple(dict.fromkeys((self.tower, *(t.tower for t in self.tensors))))

    @property
    def shared(self) -> bool:
        """Return whether several layers share one set of modules."""
        return any(layer.passes > 1 for layer in self.layers)

    def stack(self, name: str) -> Stack:
        """Return a stack that the model has by its name, "encoder" or "decoder"."""
        return next(stack for stack in self.stacks if stack.name == name)

    def with_prefix(self, path: str) -> Anatomy:
        """Return the anatomy with the paths that it has where the model is a part of another one, at `path`."""
        anatomy: Anatomy = _inside(self, path)
        return anatomy

    def in_tower(self, tower: str) -> list[Anatomy]:
        """Return the anatomies that a method with `tower=` acts on: this one, parts of it, or both.

        There is none where the tower has no layers that could be observed.
        """
        matches = [part for part in self.other_towers if tower in ("all", part.tower)]
        return [self, *matches] if tower in ("main", "all", self.tower) else matches

    def reaches_output(self, path: str) -> bool:
        """Return whether a module reaches the output: it has no parameters, or some of them get a gradient."""
        inside = [t for t in self.tensors if any(is_inside(name, path) for name in (t.name, *t.aliases))]
        return not inside or any(t.receives_gradient for t in inside)

    def unread(self, tower: str) -> str:
        """Return what of another tower does not reach the output, in words; "" where all of it does.

        Such as "layer 1, and 2 other tensors, such as …, with 8,640 scalars, do not reach the output".
        """
        tensors = {t.name: t for t in self.tensors if t.tower == tower != self.tower and not t.receives_gradient}
        if not tensors:
            return ""
        parts, size = [], sum(t.numel for t in tensors.values())
        for part in (part for part in self.other_towers if part.tower == tower):
            layers = [layer for layer in part.layers if not part.reaches_output(layer.path)]
            alone = sum(other.tower == tower for other in self.other_towers) == 1
            if layers:
                name = f"layer{'s' if len(layers) > 1 else ''} {first_names([str(layer.index) for layer in layers], 8)}"
                parts.append(name if alone else f"{name} of {part.tower_path}")
            inside = tuple(f"{layer.path}." for layer in layers)
            tensors = {name: t for name, t in tensors.items() if not inside or not name.startswith(inside)}
        if tensors:
            parts.append(f"{len(tensors)} {'other ' if parts else ''}tensors, such as {next(iter(tensors))}")
        return f"{', and '.join(parts)}, with {size:,} scalars, do not reach the output"

    def as_dict(self) -> dict[str, Any]:
        """Return everything as dictionaries, tuples and plain values, as `deltune inspect --json` prints it."""
        return asdict(self)

    def __repr__(self) -> str:
        """Return the anatomy as a tree."""
        return "\n".join(_lines(self))


def _title(anatomy: Anatomy) -> str:
    total = sum(tensor.numel for tensor in anatomy.tensors if tensor.area != "head")
    at = f", base model at {anatomy.base}" if anatomy.base else ""
    forms = " and ".join(sorted({t.quantized for t in anatomy.tensors if t.quantized}))
    return f"{anatomy.model} ({anatomy.family}): {total:,} parameters{at}{forms and f', linears quantised by {forms}'}"


def _lines(anatomy: Anatomy) -> Iterator[str]:
    yield _title(anatomy)
    if anatomy.on_zeros:
        yield f"  observed on zeros, since shapes alone are not enough: {anatomy.on_zeros}"
    for fact in anatomy.unobserved:
        yield f"  not visible: {fact}"
    if len(anatomy.towers) > 1:
        for tower in anatomy.towers:
            tensors = [t for t in anatomy.tensors if t.tower == tower]
            default = ", in which methods act unless tower= says otherwise" if tower == anatomy.tower else ""
            yield f"  tower {tower}: {len(tensors)} tensors, {sum(t.numel for t in tensors):,} parameters{default}"
            if unread_of_tower := anatomy.unread(tower):
                yield f"    {unread_of_tower}, and methods leave them as they are"
    unread = [t.name for t in anatomy.tensors if not t.receives_gradient and t.tower == anatomy.tower]
    if unread and not anatomy.tower_path:
        yield f"  without a gradient in a pass on the main input alone: {len(unread)} tensors, such as {unread[0]}"
    for stack in anatomy.stacks:
        causal = ", causal" if stack.causal else ""
        yield f"├─ {stack.name}: {stack.depth} layers, width {stack.width}{causal} [{stack.entry or '(the model)'}]"
        if stack.embedding is not None:
            tied = f", tied to {', '.join(stack.embedding.shared_with)}" if stack.embedding.shared_with else ""
            yield f"│  ├─ embedding {stack.embedding.in_width} -> {stack.embedding.out_width} [{stack.words}]{tied}"
        for norm in anatomy.norms:
            if norm.place == "embedding" and is_inside(norm.path, stack.entry):
                yield f"│  ├─ norm {_norm(norm)}"
        for first, last in _runs_of_equal_layers(anatomy.layers):
            if first.stack == stack.name:
                yield from (f"│  {line}" for line in _layer_lines(first, last))
        for norm in anatomy.norms:
            if norm.place == "final" and is_inside(norm.path, stack.entry):
                yield f"│  └─ norm {_norm(norm)}"
    for part in anatomy.other_towers:
        yield f"├─ tower {part.tower} [{part.tower_path}]"
        yield from (f"│  {line}" for line in list(_lines(part))[1:])
    if anatomy.projector:
        yield "├─ tower projector"
        yield from (f"│  ├─ linear {_linear(linear)}" for linear in anatomy.projector)
    if anatomy.pooler:
        yield f"├─ pooler [{anatomy.pooler}]"
    if anatomy.vocabulary is not None:
        yield f"└─ lm_head {_linear(anatomy.vocabulary)}"
    for path in anatomy.head:
        yield f"└─ head [{path}]"


_PATHS_OF_STACKS = frozenset({"entry", "container", "words", "positions"})
_PATHS = _PATHS_OF_STACKS | {"path", "input_module", "pre", "post", "router", "base", "pooler", "tower_path"}
_LISTS_OF_PATHS = frozenset({"aliases", "head", "not_by_row", "shared_with"})


def _inside(value: Any, path: str) -> Any:
    """Return a value of this module with a path before each of its paths."""
    if isinstance(value, tuple):
        return tuple(_inside(item, path) for item in value)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    changes: dict[str, Any] = {}
    for field in fields(value):
        content = getattr(value, field.name)
        is_name = field.name == "name" and isinstance(value, Tensor)
        if content is not None and (field.name in _PATHS or is_name):
            changes[field.name] = f"{path}.{content}".strip(".")
        elif field.name in _LISTS_OF_PATHS:
            changes[field.name] = tuple(f"{path}.{item}" for item in content)
        else:
            changes[field.name] = _inside(content, path)
    return replace(value, **changes)


def _runs_of_equal_layers(layers: Iterable[Layer]) -> list[tuple[Layer, Layer]]:
    """Return the first and the last of each run of layers that differ in their numbers and paths alone."""
    runs = [list(run) for _, run in groupby(layers, lambda layer: (layer.stack, _parts(layer)))]
    return [(run[0], run[-1]) for run in runs]


def _parts(layer: Layer) -> list[str]:
    """Return the lines of a layer's parts, with paths relative to the layer."""
    _, *lines = _layer_lines(layer)
    return [line.replace(f"[{layer.path}", "[…") for line in lines]


def _numbers(first: Layer, last: Layer) -> str:
    return str(first.index) if first is last else f"{first.index} to {last.index}"


def _layer_lines(layer: Layer, last: Layer | None = None) -> Iterator[str]:
    """Yield the lines of a layer, or of a run of equal layers up to the last, with relative paths."""
    times = f" × {layer.passes} passes" if layer.passes > 1 else ""
    if last is not None and last is not layer:
        yield f"├─ layers {_numbers(layer, last)}, each{times} [{layer.path} to {last.path}]"
        yield from _parts(layer)
        return
    yield f"├─ layer {layer.index}{times} [{layer.path}]"
    for attention in layer.attentions:
        if attention.kind == "mixer":
            yield f"│  ├─ mixer of tokens, no attention [{attention.path}]"
            for linear in attention.inputs:
                yield f"│  │  ├─ input  {_linear(linear)}"
            yield f"│  │  └─ output {_linear(attention.output)}"
            continue
        heads = f"{attention.heads} heads × {attention.head_width}" if attention.heads else "heads not visible"
        groups = f", {attention.kv_heads} key-value heads" if attention.kv_heads != attention.heads else ""
        causal = ", causal" if attention.causal else ""
        reused = f", {' and '.join(attention.reused)} of an earlier attention" if attention.reused else ""
        yield f"│  ├─ {attention.kind} attention: {heads}{groups}{causal}{reused} [{attention.path}]"
        for role in ("query", "key", "value", "output"):
            linear = getattr(attention, role)
            if linear is not None:
                yield f"│  │  ├─ {role:<6} {_linear(linear)}"
    for ffn in layer.ffns:
        yield f"│  ├─ ffn{' (gated)' if ffn.gated else ''} [{ffn.path}]"
        for linear in ffn.inputs:
            yield f"│  │  ├─ {_role_in_ffn(ffn, linear):<6} {_linear(linear)}"
        yield f"│  │  └─ output {_linear(ffn.output)}"
    for experts in layer.experts:
        yield f"│  ├─ {experts.number} experts, {experts.in_width} -> {experts.out_width} [{experts.path}]"
        if experts.router:
            yield f"│  │  ├─ router [{experts.router}]"
        for role, weights in (("input", experts.inputs), ("output", experts.outputs)):
            for weight in weights:
                widths = f"{weight.in_width} -> {weight.out_width}"
                yield f"│  │  ├─ {role:<6} of each expert {widths} [{weight.path}.{weight.leaf}]"
        for linear in experts.linears:
            yield f"│  │  ├─ for every token {_linear(linear)}"
    for norm in layer.norms:
        yield f"│  ├─ norm {_norm(norm)}"


def _role_in_ffn(ffn: FFN, linear: Linear) -> str:
    return "gate" if linear == ffn.gate else "up" if linear == ffn.up else "input"


def _linear(linear: Linear) -> str:
    part = f" columns {linear.columns.start}:{linear.columns.stop}" if linear.columns else ""
    per = f" of each of {linear.columns.groups} groups" if linear.columns and linear.columns.groups > 1 else ""
    bias = "" if linear.bias else ", no bias"
    return f"{linear.in_width} -> {linear.out_width}{part}{per}{bias} [{linear.path}]"


def _norm(norm: Norm) -> str:
    terms = "gain and bias" if norm.gain and norm.bias else "gain" if norm.gain else "no parameters"
    return f"{norm.place}{' of ' + ' and '.join(norm.of) if norm.of else ''}, {terms}, {norm.width} [{norm.path}]"


def html_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a small table that Jupyter shows in place of the text of an object, with everything in it escaped."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><caption>{escape(title)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
