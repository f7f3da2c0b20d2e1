"""Finds the places of a model at which a modification acts.

Only the anatomy is read, no weights, so that counting, attaching and refusing agree by construction. For each site a
function says where it is in one layer. What is read there follows from insertion and composition, in the same way for
all sites.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from ..anatomy.types import FFN, Anatomy, Attention, Columns, Experts, ExpertWeight, Layer, Linear, is_inside
from ..errors import DeltuneError
from .forms.base import WeightForm, Widths
from .forms.hidden import Vector
from .forms.low_rank import LowRank
from .forms.prompt import Prompt
from .positions import ALL
from .spec import (
    ATTENTION_SITES,
    FFN_LINEARS,
    OUTER_LAYERS,
    OUTSIDE_LAYERS,
    PROJECTIONS,
    LayersArg,
    Modification,
    is_pattern,
)


@dataclass(frozen=True)
class ModuleSide:
    """One side of one module, where hidden states can be read or changed."""

    path: str  # the path of the module
    # "input" (its first argument), "output", "attention" (inside the call of the attention), "tokens" (the input
    # embeddings of a stack), "states" (all hidden states of a stack) or "weight" (a weight that the module reads
    # itself)
    side: str
    columns: Columns | None = None  # the part of a fused projection; None for all of it


@dataclass(frozen=True)
class Location:
    """The position of an edit in a model."""

    name: str  # unique and stable, such as "encoder.3.self.query"
    target: ModuleSide  # where h is changed
    widths: Widths
    sublayer: str  # the name of the sub-module that it is in
    group: str  # the name of what shares a reparameterisation
    source: ModuleSide | None = None  # where x is read; None where only h is read
    apply_norm_first: bool = False  # the target is a norm that is applied to h before the form reads it (x="normed")
    linear: Linear | None = None  # the projection, at a site that is one
    has_bias: bool = False  # the projection or norm has a bias
    shifted_stack: str = ""  # the stack whose positions are shifted
    weight: ExpertWeight | None = None  # what is changed where experts or a router that no linear computes are the site
    experts: tuple[int, ...] | None = None  # the experts whose matrices of that weight are changed; None for all of it
    layer: str = ""  # the path of the layer that it is in
    tower: str = ""  # the tower that it is in, such as "text"
    of_input: bool = False  # the form changes what the projection reads

    @property
    def can_differ_by_row(self) -> bool:
        """Whether each row of a batch can have its own delta here: the module must read the batch row by row."""
        if self.weight is not None and not self.weight.in_batch_order:
            return False
        return self.linear is None or not self.linear.batch_independent


def select_layers(anatomy: Anatomy, layers: LayersArg, stack: str = "all") -> list[Layer]:
    """Return the layers that `layers` and `stack` choose; indices count within each stack."""
    if not anatomy.layers:
        raise DeltuneError(f"the layers of this model cannot be seen: {'; '.join(anatomy.unobserved)}")
    names = [s.name for s in anatomy.stacks]
    if stack != "all" and stack not in names:
        raise DeltuneError(f"stack={stack!r}: this model has {' and '.join(names)} only")
    if layers != "all" and anatomy.shared:
        raise DeltuneError(f"layers={layers!r}: this model shares one set of modules between its layers; use 'all'")
    selected: list[Layer] = []
    for candidate in anatomy.stacks:
        if stack in ("all", candidate.name):
            stack_layers = [layer for layer in anatomy.layers if layer.stack == candidate.name]
            half = len(stack_layers) // 2
            if layers == "all":
                selected += stack_layers
            elif layers == "lower half":
                selected += stack_layers[:half]
            elif layers == "upper half":
                selected += stack_layers[half:]
            else:
                selected += _listed_layers(stack_layers, layers, candidate.name)
    if not selected:
        raise DeltuneError(f"layers={layers!r} names no layer of this model")
    return selected


def _listed_layers(stack_layers: list[Layer], layers: LayersArg, stack: str) -> list[Layer]:
    """Return the first or last layers of a stack, or those with given indices, of which -1 is the last."""
    depth = len(stack_layers)
    if isinstance(layers, str) and (match := OUTER_LAYERS.fullmatch(layers)):
        size = int(match[2])
        indices = set(range(size)) if match[1] == "first" else set(range(-size, 0))
    else:
        indices = {int(i) for i in layers}
    if not all(-depth <= i < depth for i in indices):
        raise DeltuneError(f"layers={layers!r}: the {stack} has {depth} layers, 0 to {depth - 1}")
    numbers = {i % depth for i in indices}
    return [layer for number, layer in enumerate(stack_layers) if number in numbers]


def resolve_locations(anatomy: Anatomy, modification: Modification) -> list[Location]:
    """Return every place of a modification, in the order of execution, in the towers that it names."""
    if modification.positions != ALL and (
        len(anatomy.stacks) != 1 or anatomy.stacks[0].words is None or modification.tower != "main"
    ):
        raise DeltuneError(
            f"positions={modification.positions!r} choose tokens of a text, in the main tower of a model with one "
            "stack of layers that reads token ids"
        )
    if modification.form.reads_first_pass and (
        len(anatomy.stacks) != 1 or anatomy.stacks[0].words is None or modification.tower != "main"
    ):
        raise DeltuneError(
            f"{modification.form!r} reads a first pass of a text, in the main tower of a model with one stack of "
            "layers that reads token ids"
        )
    named = anatomy.tower if modification.tower == "main" else modification.tower
    locations: list[Location] = []
    reasons: list[DeltuneError] = []
    if is_pattern(modification.site) and named in ("all", "projector"):
        locations = [_in_tower(place, "projector", "projector.") for place in _in_projector(anatomy, modification)]
    parts = anatomy.in_tower(modification.tower) if locations else towers_of(anatomy, modification.tower)
    for part in parts:
        try:
            of_part = _resolve_in_tower(part, modification)
            if part is not anatomy:
                of_part = _read_by_the_rest(anatomy, part, of_part)
        except DeltuneError as error:  # of all towers those that have the site; the count names the others
            if named != "all" or sum(other.tower == part.tower for other in parts) > 1:
                raise
            reasons.append(error)
        else:
            prefix = tower_prefix(anatomy, part)
            locations += [_in_tower(location, part.tower, prefix) for location in of_part]
    if reasons and not locations:
        raise reasons[0]
    return locations


def _read_by_the_rest(anatomy: Anatomy, part: Anatomy, locations: list[Location]) -> list[Location]:
    """Return the places of another tower from which the output of the model is reached."""
    read = [x for x in locations if part.reaches_output(x.linear.path if x.linear is not None else x.target.path)]
    if locations and not read:
        raise DeltuneError(
            f"nothing would train there: of the tower {part.tower}, {anatomy.unread(part.tower)}, since the model "
            "reads hidden states before them"
        )
    return read


def _in_projector(anatomy: Anatomy, modification: Modification) -> list[Location]:
    """Return the places of a pattern among the linears between two towers, which are in no layer and no stack."""
    if (modification.layers, modification.stack) != ("all", "all"):
        return []
    matching = [x for x in anatomy.projector if fnmatchcase(x.path, modification.site)]
    sites = [_at_projection(linear.path, linear, "projector", "projector") for linear in matching]
    return [_with_reading(site, modification) for site in sites]


def tower_prefix(anatomy: Anatomy, part: Anatomy) -> str:
    """Return how the names of the places of a tower begin, which is different for each."""
    if part is anatomy:
        return ""
    alone = sum(other.tower == part.tower for other in anatomy.other_towers) == 1
    return f"{part.tower}." if alone else f"{part.tower}_{part.tower_path.replace('.', '_')}."


def towers_of(anatomy: Anatomy, tower: str) -> list[Anatomy]:
    """Return the anatomies of the towers that an argument names."""
    parts = anatomy.in_tower(tower)
    if parts:
        return parts
    if tower == "projector" and anatomy.projector:
        names = ", ".join(linear.path for linear in anatomy.projector[:3])
        raise DeltuneError(f"tower='projector': it has no layers, so give the paths of its linears as site: {names}")
    raise DeltuneError(
        f"tower={tower!r}: this model has no such tower whose layers can be observed; it has {_listed(anatomy)}"
    )


def _listed(anatomy: Anatomy) -> str:
    return " and ".join(dict.fromkeys((anatomy.tower, *(part.tower for part in anatomy.other_towers))))


def _in_tower(location: Location, tower: str, prefix: str) -> Location:
    """Return a place of a tower, with the prefix of the tower before its names."""
    return replace(
        location,
        name=prefix + location.name,
        sublayer=prefix + location.sublayer,
        group=prefix + location.group,
        tower=tower,
    )


def _resolve_in_tower(anatomy: Anatomy, modification: Modification) -> list[Location]:
    if modification.form.needs in ("tokens", "states"):
        locate = _embedding_location if modification.form.needs == "tokens" else _hidden_states_location
        return [locate(anatomy, modification)]
    if is_pattern(modification.site):
        sites = _matching_sites(anatomy, modification)
    elif modification.site in OUTSIDE_LAYERS:
        sites = _outer_sites(anatomy, modification)
    else:
        sites = [
            replace(site, layer=layer.path)
            for layer in select_layers(anatomy, modification.layers, modification.stack)
            for site in _layer_sites(anatomy, layer, modification)
        ]
    if isinstance(modification.form, Vector) and modification.form.where != "all":
        needs_bias = modification.form.where == "biased"
        sites = [site for site in sites if site.has_bias == needs_bias]
        if not sites and not modification.optional:
            which = "has a bias" if needs_bias else "lacks a bias"
            raise DeltuneError(f"no {modification.site} of this model {which}")
    elif not sites and not modification.optional:
        kinds = sorted({a.kind for layer in anatomy.layers for a in layer.attentions})
        if modification.attention not in ("all", *kinds):
            requested = modification.attention
            raise DeltuneError(f"attention={requested!r}: this model has {' and '.join(kinds)} attention only")
        raise DeltuneError(_no_such_site(anatomy, modification))
    width = anatomy.stacks[0].width if len(anatomy.stacks) == 1 else 0
    sites = [replace(site, widths=replace(site.widths, stack_width=width)) for site in sites]
    return [_with_reading(site, modification) for site in sites]


def _no_such_site(anatomy: Anatomy, modification: Modification) -> str:
    """Return that a model does not have a site, and what it has instead."""
    site = modification.site
    if site in ("gate_proj", "up_proj") and any(layer.ffns for layer in anatomy.layers):
        return f"site {site!r} is in a gated FFN, and no FFN of this model shows a gate: take 'ffn_up'"
    if modification.experts == "shared":
        return "experts='shared': no mixture of experts of this model has an expert that every token goes through"
    if modification.experts != "all" and not any(layer.experts for layer in anatomy.layers):
        return f"experts={modification.experts!r}: this model has no mixture of experts"
    if site == "router":
        return "this model has no mixture of experts whose router can be seen"
    return f"this model has no site {site!r} that can be seen{_what_exists(anatomy)}"


def _what_exists(anatomy: Anatomy) -> str:
    """Return which projections of a model can be seen, and how to name any other linear; "" where there is none."""
    existing = []
    for name in PROJECTIONS:
        with suppress(DeltuneError):
            at_projection = Modification(name, LowRank(1))
            if any(True for layer in anatomy.layers for _ in _layer_sites(anatomy, layer, at_projection)):
                existing.append(name)
    inner = (x.path.split(".") for layer in anatomy.layers for x in anatomy.linears if is_inside(x.path, layer.path))
    patterns = sorted({f"*.{'.'.join(parts[-2:])}" for parts in inner})
    text = f"; of projections it has {' and '.join(existing)}" if existing else ""
    return text + (f"; any linear can be named by its path, such as {patterns[0]!r}" if patterns else "")


def _with_reading(location: Location, modification: Modification) -> Location:
    """Return the place of an edit: the form reads x (parallel) or h (sequential), and a gate reads x in either case."""
    form, of_input = modification.form, modification.insertion == "input"
    if (form.reads_weight and location.linear is None and location.weight is None) or (
        of_input and (location.linear is None or location.widths.lookup)
    ):
        raise DeltuneError(f"{form!r} acts at a projection, and {location.name} is none: take {', '.join(PROJECTIONS)}")
    everywhere = modification.positions == ALL
    changes_weight = isinstance(form, WeightForm) and form.through_weight and modification.insertion == "parallel"
    if of_input or (everywhere and changes_weight):
        location = _weight_or_input(location, modification)
    if not everywhere and (location.target.side not in ("input", "output") or location.widths.lookup):
        raise DeltuneError(f"positions={modification.positions!r} choose tokens, which {location.name} does not read")
    parallel = modification.insertion == "parallel"
    reads_x = parallel or modification.compose.reads_x
    if reads_x and location.source is None:
        raise DeltuneError(f"{location.name} has no input of its own to read")
    if location.weight is not None and location.linear is None:
        _check_acts_on_weight(location.weight, modification)
    widths = location.widths
    widths = replace(
        widths,
        in_width=widths.x_width if parallel else widths.out_width,
        lookup=widths.lookup and parallel,
        bias=location.has_bias,
    )
    if problem := form.incompatibility(widths):
        raise DeltuneError(problem)
    inside_attention = form.needs == "attention" and not modification.compose.reads_x
    source = location.source if reads_x and not inside_attention else None
    return replace(location, source=source, widths=widths, of_input=of_input)


def _weight_or_input(location: Location, modification: Modification) -> Location:
    """Return the weight or the input of a projection as the place of a modification; elsewhere the place as it is.

    A form that is best computed with W' changes the weight. One that changes the input does so there, or in the weight
    where the other parts of a fused projection read the same input.
    """
    linear, compose, widths = location.linear, modification.compose, location.widths
    if linear is None or widths.lookup:
        return location
    of_input = modification.insertion == "input"
    if of_input and linear.columns is None:
        target = ModuleSide(linear.path, "input")
        return replace(location, target=target, widths=replace(widths, out_width=widths.x_width))
    if linear.quantized or compose.reads_x or compose.in_softmax or modification.positions != ALL:
        if of_input:
            raise DeltuneError(f"{location.name} is a part of a projection whose other parts read the same input")
        return location
    width = widths.x_width if of_input else linear.out_width
    weight = ExpertWeight(linear.path, "weight", 0, linear.in_width, width, linear.transposed, True)
    target, widths = replace(location.target, side="weight"), replace(widths, out_width=width)
    return replace(location, target=target, widths=widths, weight=weight)


def _check_acts_on_weight(weight: ExpertWeight, modification: Modification) -> None:
    """Check that a modification is a change of a weight: there its module's input and output are no hidden states."""
    form, where = modification.form, f"{weight.path}.{weight.leaf} is a weight that its module reads itself"
    if not form.acts_on_weights or modification.insertion != "parallel":
        raise DeltuneError(f"{where}, so that only a form that is a change of a weight acts there, such as LowRank")
    if modification.compose.reads_x:
        raise DeltuneError(f"{where}, so that {modification.compose!r} has no input to read there")
    if getattr(form, "dropout", 0):
        raise DeltuneError(f"{where}, so that there is no x whose values could be dropped: give dropout=0")


def _at(
    name: str,
    target: ModuleSide,
    width: int,
    sublayer: str,
    group: str,
    x: tuple[ModuleSide, int] | None = None,
    **fields: Any,
) -> Location:
    """Return a site by where h is and how wide it is, and where x is read and how wide that is."""
    source, x_width = x or (None, 0)
    return Location(name, target, Widths(x_width, width, x_width), sublayer, group, source, **fields)


def _at_projection(name: str, linear: Linear, sublayer: str, group: str) -> Location:
    target, x = ModuleSide(linear.path, "output", linear.columns), ModuleSide(linear.path, "input")
    return _at(
        name, target, linear.out_width, sublayer, group, (x, linear.in_width), linear=linear, has_bias=linear.bias
    )


def _blocks(anatomy: Anatomy, layer: Layer, modification: Modification, stem: str) -> Iterator[Location]:
    if not layer.out_width:
        raise DeltuneError(
            f"site 'block': what {layer.path} returns has its features in another axis than the last one, such as "
            "images of (batch, features, rows, columns), on which no form acts: take 'ffn'"
        )
    name, x = f"{stem}.block", (ModuleSide(layer.path, "input"), layer.in_width) if layer.in_width else None
    yield _at(name, ModuleSide(layer.path, "output"), layer.out_width, name, layer.stack, x)


def _norms(anatomy: Anatomy, layer: Layer, modification: Modification, stem: str) -> Iterator[Location]:
    for number, norm in enumerate(layer.norms):
        name = f"{stem}.norm{number}"
        yield _at(name, ModuleSide(norm.path, "output"), norm.width, name, layer.stack, has_bias=norm.bias)


def _routers(anatomy: Anatomy, layer: Layer, modification: Modification, stem: str) -> Iterator[Location]:
    for number, experts in enumerate(layer.experts, len(layer.ffns)):
        stem_of_experts = f"{stem}.{number}" if number else stem
        name, sublayer = f"{stem_of_experts}.router", f"{stem_of_experts}.ffn"
        if isinstance(experts.scores, Linear):
            yield _at_projection(name, experts.scores, sublayer, layer.stack)
        elif experts.scores is not None:
            yield _at_weight(name, sublayer, layer, experts.scores)


def _attentions(anatomy: Anatomy, layer: Layer, modification: Modification, stem: str) -> Iterator[Location]:
    site = modification.site
    for attention in layer.attentions:
        is_mixer = attention.kind == "mixer"
        if site in attention.reused:
            continue
        if modification.attention in ("all", attention.kind) and (site in ("attention", "output") or not is_mixer):
            alike = [other for other in layer.attentions if other.kind == attention.kind]
            number = alike.index(attention)  # a layer may have two, as in LongCat-Flash
            yield _at_attention(anatomy, f"{stem}.{attention.kind}{number or ''}", layer, attention, modification)


def _at_attention(
    anatomy: Anatomy, stem: str, layer: Layer, attention: Attention, modification: Modification
) -> Location:
    site, output = modification.site, attention.output
    name, group = f"{stem}.{site}", f"{layer.stack}_{attention.kind}"
    if site in ("query", "key", "value", "output"):
        linear: Linear | None = getattr(attention, site)
        if linear is None:
            raise DeltuneError(
                f"the {site} of the attention {attention.path!r} is not the output of one linear of its own"
            )
        return _at_projection(name, linear, stem, group)
    first = attention.query or next(iter(attention.inputs), None)
    x = ModuleSide(_x_path(attention, modification), "input"), first.in_width if first else output.out_width
    if site == "attention":
        return _at(name, ModuleSide(output.path, "output"), output.out_width, stem, group, x)
    inside = modification.form.needs == "attention"
    if inside and attention.heads is None:
        raise DeltuneError(
            f"site {site!r} needs the attention {attention.path!r}, whose inside is hidden: this family does not "
            "call transformers' attention interface"
        )
    target = ModuleSide(attention.path, "attention") if inside else ModuleSide(output.path, "input")
    location = _at(name, target, output.in_width, stem, group, x)
    widths = replace(
        location.widths,
        heads=attention.heads or 0,
        kv_heads=attention.kv_heads or 0,
        head_width=attention.head_width or 0,
        value_width=attention.value_width or 0,
    )
    shifts = modification.form.shift and attention.kind == "self"
    return replace(location, widths=widths, shifted_stack=_shifted_stack(anatomy, layer.stack) if shifts else "")


def _shifted_stack(anatomy: Anatomy, name: str) -> str:
    stack = anatomy.stack(name)
    if not stack.position_ids and stack.positions is None:
        raise DeltuneError(f"shift_positions moves absolute positions, which the {name} of this model does not have")
    return name


def _ffns(anatomy: Anatomy, layer: Layer, modification: Modification, stem: str) -> Iterator[Location]:
    for number, ffn in enumerate(layer.ffns if modification.experts == "all" else ()):
        yield from _at_ffn(f"{stem}.{number}" if number else stem, layer, ffn, modification)
    for number, experts in enumerate(layer.experts, len(layer.ffns)):
        stem_of_experts = f"{stem}.{number}" if number else stem
        if modification.site == "ffn":
            yield _at_experts(stem_of_experts, layer, experts, modification)
        else:
            yield from _inside_experts(stem_of_experts, anatomy, layer, experts, modification)


_LINEARS_OF_FFN: Mapping[str, Callable[[FFN], Sequence[Linear | None]]] = {
    "ffn_up": lambda ffn: ffn.inputs,
    "gate_proj": lambda ffn: [ffn.gate],
    "up_proj": lambda ffn: [ffn.up],
    "ffn_down": lambda ffn: [ffn.output],
}
"""The sites that are linears of an FFN, each with the linears."""


def _at_ffn(stem: str, layer: Layer, ffn: FFN, modification: Modification) -> Iterator[Location]:
    site, name, sublayer, group = modification.site, f"{stem}.{modification.site}", f"{stem}.ffn", layer.stack
    hidden, output = ffn.output.out_width, ffn.output
    x = ModuleSide(_x_path(ffn, modification), "input"), ffn.inputs[0].in_width
    if site in _LINEARS_OF_FFN:
        for number, linear in enumerate(_LINEARS_OF_FFN[site](ffn)):
            if linear is not None:
                yield _at_projection(f"{name}{number or ''}", linear, sublayer, group)
    elif site == "ffn_inner":
        yield _at(name, ModuleSide(output.path, "input"), output.in_width, sublayer, group, linear=output)
    elif modification.x == "normed" and ffn.post is not None:
        # z = A(y) + h with y = LN(h + x), out = LN(z + x): Δh joins the sum that the norm reads
        yield _at(name, ModuleSide(ffn.post, "input"), hidden, sublayer, group, x, apply_norm_first=True)
    else:
        yield _at(name, ModuleSide(output.path, "output"), hidden, sublayer, group, x)


def _at_experts(stem: str, layer: Layer, experts: Experts, modification: Modification) -> Location:
    """Return the place of a mixture of experts as a whole, which is where an FFN would be."""
    path = experts.pre if modification.x == "residual" and experts.pre is not None else experts.path
    target, x, sublayer = ModuleSide(experts.path, "output"), ModuleSide(path, "input"), f"{stem}.ffn"
    return _at(sublayer, target, experts.out_width, sublayer, layer.stack, (x, experts.in_width))


def _inside_experts(
    stem: str, anatomy: Anatomy, layer: Layer, experts: Experts, modification: Modification
) -> Iterator[Location]:
    """Yield the linears of shared experts, and the weights of those that the router chooses from."""
    site, chosen = modification.site, modification.experts
    if chosen in ("all", "shared"):
        for number, ffn in enumerate(experts.shared):
            yield from _at_ffn(f"{stem}.shared{number or ''}", layer, ffn, modification)
    if chosen == "shared" or modification.optional:
        return
    if site == "ffn_inner":
        alike = [other for other in anatomy.layers if other.stack == layer.stack]
        dense = tuple(other.index for other in alike if other.ffns and not other.experts)
        raise DeltuneError(
            f"site {site!r} is inside an FFN, and {experts.path!r} is a mixture of {experts.number} experts"
            + (
                f", as all FFNs of this {layer.stack} are"
                if not dense
                else f": layers={dense} have FFNs without experts"
            )
        )
    if site in ("gate_proj", "up_proj"):
        raise DeltuneError(
            f"the gates of the {experts.number} experts at {experts.path!r} are no projections of their own: take "
            f"'ffn_up', which is both{', or experts=' + repr('shared') if experts.shared else ''}"
        )
    weights = experts.inputs if site == "ffn_up" else experts.outputs
    if not weights:
        raise DeltuneError(f"which weights of the experts at {experts.path!r} are {site} cannot be seen")
    numbers = None if isinstance(chosen, str) else chosen
    if out_of_range := [i for i in numbers or () if i >= experts.number]:
        raise DeltuneError(
            f"experts={chosen!r}: {experts.path!r} has {experts.number}, 0 to {experts.number - 1}, and no "
            f"{out_of_range[0]}"
        )
    for number, weight in enumerate(weights):
        yield _at_weight(f"{stem}.experts.{site}{number or ''}", f"{stem}.ffn", layer, weight, numbers)


def _at_weight(
    name: str, sublayer: str, layer: Layer, weight: ExpertWeight, experts: tuple[int, ...] | None = None
) -> Location:
    """Return the place of a weight that its module reads itself."""
    target, x = ModuleSide(weight.path, "weight"), ModuleSide(weight.path, "input")
    location = _at(
        name, target, weight.out_width, sublayer, layer.stack, (x, weight.in_width), weight=weight, experts=experts
    )
    number = weight.number if experts is None or not weight.number else len(experts)
    return replace(location, widths=replace(location.widths, experts=number))


_SITES_IN_LAYERS: Mapping[str, Callable[[Anatomy, Layer, Modification, str], Iterator[Location]]] = {
    "block": _blocks,
    "norm": _norms,
    "router": _routers,
    **dict.fromkeys(("ffn", "ffn_inner", *FFN_LINEARS), _ffns),
    **dict.fromkeys(ATTENTION_SITES, _attentions),
}
"""The function that yields the places of a site in one layer, whose names begin with the stem that it is given."""


def _layer_sites(anatomy: Anatomy, layer: Layer, modification: Modification) -> Iterator[Location]:
    yield from _SITES_IN_LAYERS[modification.site](anatomy, layer, modification, f"{layer.stack}.{layer.index}")


def _outer_sites(anatomy: Anatomy, modification: Modification) -> list[Location]:
    """Return the places of a linear outside of the layers: word embeddings, pooler or output embeddings."""
    site = modification.site
    if site == "embedding":
        by_path = {
            stack.embedding.path: (stack.name, stack.embedding) for stack in anatomy.stacks[::-1] if stack.embedding
        }
        if not by_path:
            raise DeltuneError(_no_words(anatomy))
        return [
            replace(place, widths=replace(place.widths, lookup=True))
            for name, linear in list(by_path.values())[::-1]
            for place in [_outer_site(f"{name}.embedding", linear)]
        ]
    stack = anatomy.stacks[-1].name if anatomy.stacks else "model"
    if site == "lm_head":
        if anatomy.vocabulary is None:
            raise DeltuneError(
                f"{anatomy.model} has no projection to the vocabulary that is a linear; lm_head is in models that "
                "answer in words"
            )
        return [_outer_site(f"{stack}.lm_head", anatomy.vocabulary)]
    linear = next((x for x in anatomy.linears if anatomy.pooler and is_inside(x.path, anatomy.pooler)), None)
    if anatomy.pooler is None or linear is None:
        raise DeltuneError(f"{anatomy.model} has no pooler")
    return [_outer_site(f"{stack}.pooler", linear)]


def _outer_site(name: str, linear: Linear) -> Location:
    return _at_projection(name, linear, name, name.partition(".")[0])


def _matching_sites(anatomy: Anatomy, modification: Modification) -> list[Location]:
    """Return the linears whose paths match a pattern, in the layers that are chosen, and outside of them by default."""
    pattern, everywhere = modification.site, (modification.layers, modification.stack) == ("all", "all")
    chosen = [] if everywhere else select_layers(anatomy, modification.layers, modification.stack)
    matching = [x for x in anatomy.linears if fnmatchcase(x.path, pattern)]
    if not matching:
        names = sorted({linear.path.rpartition(".")[2] for linear in anatomy.linears})
        close = get_close_matches(pattern.rpartition(".")[2], names, 8, 0.3) or names
        raise DeltuneError(
            f"no linear of this model has a path that matches {pattern!r}{_in_which_tower(anatomy)}; paths here end in "
            f"{', '.join(close[:8])}, such as {next((x.path for x in anatomy.linears), 'none')}"
            + _elsewhere(anatomy, pattern)
        )
    sites = []
    for linear in matching:
        layer = next((y for y in anatomy.layers if linear.path.startswith(f"{y.path}.")), None)
        if everywhere or layer in chosen:
            stack = anatomy.stacks[-1].name if anatomy.stacks else "model"
            stem = f"{layer.stack}.{layer.index}" if layer else stack
            inner = linear.path.removeprefix(f"{layer.path}.") if layer else linear.path
            site = _at_projection(f"{stem}.{inner}", linear, stem, layer.stack if layer else stack)
            sites.append(replace(site, layer=layer.path if layer else ""))
    return sites


def _in_which_tower(anatomy: Anatomy) -> str:
    return f" in the tower {anatomy.tower}" if len(anatomy.towers) > 1 else ""


def _elsewhere(anatomy: Anatomy, pattern: str) -> str:
    """Return in which other tower a pattern matches a linear, as advice; "" where it does in none."""
    towers = {part.tower: part.linears for part in anatomy.other_towers} | {"projector": anatomy.projector}
    names = [name for name, linears in towers.items() if any(fnmatchcase(x.path, pattern) for x in linears)]
    return f"; it matches in another tower: tower={names[0]!r}" if names else ""


def _x_path(sublayer: Attention | FFN, modification: Modification) -> str:
    """Return where x is read: the sub-layer's input, or for x="residual" the input of the norm before it."""
    return sublayer.pre if modification.x == "residual" and sublayer.pre is not None else sublayer.input_module


def _no_words(anatomy: Anatomy) -> str:
    if anatomy.tower == "text":
        return "the word embeddings of this model cannot be seen"
    return "this model reads no token ids first"


def _embedding_location(anatomy: Anatomy, modification: Modification) -> Location:
    stack = next(iter(anatomy.stacks), None)
    if stack is None or stack.words is None:
        raise DeltuneError(_no_words(anatomy))
    if isinstance(modification.form, Prompt) and modification.form.positions == "none" and stack.positions is None:
        raise DeltuneError("positions='none' needs absolute position embeddings; this model's are relative or rotary")
    word_embeddings = next(t for t in anatomy.tensors if stack.words + ".weight" in (t.name, *t.aliases))
    rows, width = word_embeddings.shape
    init_from = modification.form.init_from if isinstance(modification.form, Prompt) else None
    if out_of_range := [i for i in init_from or () if not 0 <= i < rows]:
        raise DeltuneError(
            f"init_from={init_from!r}: {out_of_range} are no token ids of this model, which has 0 to {rows - 1}"
        )
    name = f"{stack.name}.embedding"
    return Location(name, ModuleSide(stack.entry, "tokens"), Widths(width, width), name, stack.name)


def _hidden_states_location(anatomy: Anatomy, modification: Modification) -> Location:
    if not anatomy.stacks:
        raise DeltuneError(f"not visible: {'; '.join(anatomy.unobserved)}")
    stack = anatomy.stacks[-1]
    if modification.form.reads_text and (len(anatomy.stacks) != 1 or stack.words is None):
        raise DeltuneError(
            f"{modification.form!r} reads a text, in a model with one stack of layers that reads token ids"
        )
    if modification.form.replaces and anatomy.output_kind in ("words", "choices"):
        raise DeltuneError(
            f"all hidden states are read together by a head of labels; {anatomy.model} answers in {anatomy.output_kind}"
        )
    widths = Widths(stack.width, stack.width, states=stack.depth + 1)
    name = f"{stack.name}.hidden_states"
    return Location(name, ModuleSide(stack.container, "states"), widths, name, stack.name)
