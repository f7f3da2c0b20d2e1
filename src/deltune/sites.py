"""Where: the places of one model that a modification means, and the tensors that a selection means.

Reads the anatomy only (no weights), so that counting, attaching and refusing agree by construction.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .algebra import LayersArg, Method, Modification, Selection
from .anatomy import FFN, Anatomy, Attention, Columns, Layer, Linear, Norm, Tensor
from .errors import DeltuneError, all_problems
from .forms import Prompt, Vector, Widths


@dataclass(frozen=True)
class Port:
    """One side of one module. side: "input" (its first argument), "output", "attention" (inside the attention's call),
    "tokens" (around a stack). columns: the part of a fused projection's output."""

    path: str
    side: str
    columns: Columns | None = None


@dataclass(frozen=True)
class Place:
    """One concrete place of a modification: h is written at `target`, u read at `source` (None: from h itself).

    `name` is unique and stable, "encoder.3.self.query"; `group` says which places share what is shared; `again`: the
    target is a norm, applied to h before the form reads it (x="normed"); `linear`: the projection, where it is one.
    """

    name: str
    target: Port
    source: Port | None
    widths: Widths
    group: str
    again: bool = False
    linear: Linear | None = None


@dataclass(frozen=True)
class Plan:
    """What a method comes down to on one model: edits (term index, modification, place) and the selected tensors."""

    edits: tuple[tuple[int, Modification, Place], ...]
    selected: tuple[Tensor, ...]

    def __deepcopy__(self, memo: dict[int, Any]) -> Plan:
        return self  # a value; copies of a tuned model share it

    @staticmethod
    def key(index: int, place: Place) -> str:
        """The name of an edit in modules and files."""
        return f"{index}_{place.name.replace('.', '_')}"


def plan(anatomy: Anatomy, method: Method) -> Plan:
    """Resolve a method on a model. Errors: DeltuneError with every term that cannot be had and why."""
    problems: list[str] = []
    edits: list[tuple[int, Modification, Place]] = []
    selected: dict[str, Tensor] = {}
    for index, part in enumerate(method.parts):
        try:
            if isinstance(part, Modification):
                edits.extend((index, part, place) for place in places(anatomy, part))
            else:
                selected.update((t.name, t) for t in tensors(anatomy, part))
        except DeltuneError as error:
            problems.append(f"{part!r}: {error}")
    if problems:
        raise all_problems(f"{method!r} cannot be had on {anatomy.model}", problems)
    return Plan(tuple(edits), tuple(selected.values()))


# -- which layers


def chosen_layers(anatomy: Anatomy, layers: LayersArg, stack: str = "all") -> list[Layer]:
    """The layers that `layers` and `stack` name; indices count within each stack."""
    names = [s.name for s in anatomy.stacks]
    if stack != "all" and stack not in names:
        raise DeltuneError(f"stack={stack!r}: this model has {' and '.join(names)} only")
    if layers != "all" and anatomy.shared:
        raise DeltuneError(f"layers={layers!r}: this model shares one set of modules between its layers; use 'all'")
    found: list[Layer] = []
    for part in anatomy.stacks:
        if stack in ("all", part.name):
            own = [layer for layer in anatomy.layers if layer.stack == part.name]
            half = len(own) // 2
            if layers == "all":
                found += own
            elif layers == "lower half":
                found += own[:half]
            elif layers == "upper half":
                found += own[half:]
            else:
                beyond = [i for i in layers if int(i) >= len(own)]
                if beyond:
                    raise DeltuneError(f"layers={layers!r}: the {part.name} has layers 0 to {len(own) - 1}")
                found += [layer for layer in own if layer.index in layers]
    if not found:
        raise DeltuneError(f"layers={layers!r} names no layer of this model")
    return found


# -- modifications


def places(anatomy: Anatomy, modification: Modification) -> list[Place]:
    """Every place of a modification, in the order of execution; an error where there is none or it cannot be seen."""
    if modification.site == "embedding":
        return [_embedding(anatomy, modification)]
    found: list[Place] = []
    for layer in chosen_layers(anatomy, modification.layers, modification.stack):
        if modification.site == "block":
            found.append(_block(anatomy, layer))
        elif modification.site.startswith("ffn"):
            found.extend(p for i, ffn in enumerate(layer.ffns) for p in _ffn(layer, ffn, i, modification))
        else:
            chosen = [a for a in layer.attentions if modification.attention in ("all", a.kind)]
            found.extend(_attention(layer, attention, modification) for attention in chosen)
    if isinstance(modification.form, Vector) and modification.form.existing:
        found = [p for p in found if p.linear and p.linear.bias]
        if not found:
            raise DeltuneError(f"no {modification.site} projection of this model has a bias")
    if not found:
        kinds = sorted({a.kind for layer in anatomy.layers for a in layer.attentions})
        if modification.attention not in ("all", *kinds):
            wanted = modification.attention
            raise DeltuneError(f"attention={wanted!r}: this model has {' and '.join(kinds)} attention only")
        raise DeltuneError(f"this model has no site {modification.site!r} that can be seen")
    return found


def _attention(layer: Layer, attention: Attention, modification: Modification) -> Place:
    site, sequential = modification.site, modification.insertion == "sequential"
    name = f"{layer.stack}.{layer.index}.{attention.kind}.{site}"
    group = f"{layer.stack}_{attention.kind}"
    x = _read(attention, modification)
    hidden = attention.output.out_width
    if site == "attention":
        target = Port(attention.output.path, "output")
        widths = Widths(hidden, hidden)
        return Place(name, target, None if sequential else x, widths, group)
    if site == "output" or (site == "heads" and modification.form.needs == "hidden"):
        side = "output" if site == "output" else "input"
        linear = attention.output
        inner = linear.in_width
        if site == "output":
            source = None if sequential else Port(linear.path, "input")
            widths = Widths(linear.out_width if sequential else inner, linear.out_width)
            return Place(name, Port(linear.path, side), source, widths, group, linear=linear)
        widths = Widths(inner if sequential else _width(attention), inner)
        return Place(name, Port(linear.path, side), None if sequential else x, widths, group)
    if attention.query is None or attention.key is None or attention.value is None:
        raise DeltuneError(
            f"site {site!r} needs the attention {attention.path!r}, whose inside is hidden: this family does not call "
            "transformers' attention interface"
        )
    if site == "heads":
        assert attention.kv_heads and attention.head_width and attention.value_width
        widths = Widths(
            attention.query.in_width, attention.output.in_width, attention.kv_heads, attention.head_width,
            attention.value_width,
        )  # fmt: skip
        return Place(name, Port(attention.path, "attention"), None, widths, group)
    linear = {"query": attention.query, "key": attention.key, "value": attention.value}[site]
    return _projection(name, linear, modification, group)


def _width(attention: Attention) -> int:
    return attention.query.in_width if attention.query else attention.output.out_width


def _projection(name: str, linear: Linear, modification: Modification, group: str) -> Place:
    sequential = modification.insertion == "sequential"
    source = None if sequential else Port(linear.path, "input")
    widths = Widths(linear.out_width if sequential else linear.in_width, linear.out_width)
    return Place(name, Port(linear.path, "output", linear.columns), source, widths, group, linear=linear)


def _ffn(layer: Layer, ffn: FFN, number: int, modification: Modification) -> Iterator[Place]:
    stem = f"{layer.stack}.{layer.index}" + (f".{number}" if number else "")
    site, sequential = modification.site, modification.insertion == "sequential"
    if site == "ffn_up":
        for i, linear in enumerate(ffn.inputs):
            yield _projection(f"{stem}.ffn_up{i if i else ''}", linear, modification, layer.stack)
        return
    if site == "ffn_down":
        yield _projection(f"{stem}.ffn_down", ffn.output, modification, layer.stack)
        return
    hidden = ffn.output.out_width
    widths = Widths(hidden if sequential else ffn.inputs[0].in_width, hidden)
    if modification.x == "normed" and ffn.post is not None:
        # z = A(y) + h with y = LN(h + x), out = LN(z + x): Δh joins the sum that the norm reads
        yield Place(f"{stem}.ffn", Port(ffn.post, "input"), None, widths, layer.stack, again=True)
        return
    yield Place(
        f"{stem}.ffn", Port(ffn.output.path, "output"), None if sequential else _read(ffn, modification), widths,
        layer.stack,
    )  # fmt: skip


def _read(part: Attention | FFN, modification: Modification) -> Port:
    """Where x is read: the sub-layer's own input, or the residual stream before its pre-norm (post-norm: the same)."""
    if modification.x == "residual" and part.pre is not None:
        return Port(part.pre, "input")
    return Port(part.reads, "input")


def _block(anatomy: Anatomy, layer: Layer) -> Place:
    width = anatomy.stack(layer.stack).width
    name = f"{layer.stack}.{layer.index}.block"
    return Place(name, Port(layer.path, "output"), Port(layer.path, "input"), Widths(width, width), layer.stack)


def _embedding(anatomy: Anatomy, modification: Modification) -> Place:
    stack = anatomy.stacks[0]
    if stack.words is None:
        raise DeltuneError("the word embeddings of this model cannot be seen")
    if isinstance(modification.form, Prompt) and modification.form.positions == "none" and stack.positions is None:
        raise DeltuneError("positions='none' needs absolute position embeddings; this model's are relative or rotary")
    words = next(t for t in anatomy.tensors if stack.words + ".weight" in (t.name, *t.aliases))
    rows, width = words.shape
    first = modification.form.init_from if isinstance(modification.form, Prompt) else None
    if beyond := [i for i in first or () if not 0 <= i < rows]:
        raise DeltuneError(f"init_from={first!r}: {beyond} are no token ids of this model, which has 0 to {rows - 1}")
    return Place(f"{stack.name}.embedding", Port(stack.entry, "tokens"), None, Widths(width, width), stack.name)


# -- selections


def tensors(anatomy: Anatomy, selection: Selection) -> list[Tensor]:
    """Every tensor of a selection, each once; an error where none exists, saying what there is."""
    layers = {anatomy.layers.index(la) for la in chosen_layers(anatomy, selection.layers, selection.stack)}
    belongs = {norm.path: norm for _, norm in anatomy.all_norms()}
    found = []
    for tensor in anatomy.tensors:
        if tensor.area not in selection.areas or (tensor.layer is not None and tensor.layer not in layers):
            continue
        if not any(_is(tensor, role) for role in selection.roles):
            continue
        norm: Norm | None = belongs.get(tensor.name.rpartition(".")[0])
        if selection.of != "both" and norm is not None and norm.of and selection.of not in norm.of:
            continue
        found.append(tensor)
    missing = [r for r in selection.roles if not any(_is(t, r) for t in anatomy.tensors)]
    if not found or (missing and len(missing) == len(selection.roles)):
        raise DeltuneError(_nothing(anatomy, selection))
    return found


def _is(tensor: Tensor, role: str) -> bool:
    return role == "all" or tensor.role == role or (role == "bias" and tensor.role.rpartition(".")[2] == "bias")


def _nothing(anatomy: Anatomy, selection: Selection) -> str:
    roles = sorted({t.role for t in anatomy.tensors if t.area in selection.areas})
    wanted = " or ".join(selection.roles)
    if selection.roles == ("norm.bias",):
        return f"no norm of this model has a bias (RMSNorm has a gain only); tensors there: {', '.join(roles)}"
    return f"this model has no {wanted} in {', '.join(selection.areas)}; tensors there: {', '.join(roles)}"
