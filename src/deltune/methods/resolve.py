"""Resolves a method on one model: the edits with their places, and the parameters that are trained in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..anatomy.types import Anatomy, Norm, Tensor, is_inside
from ..errors import DeltuneError, error_from_problems, excerpt
from .forms.base import Form, Specs, TensorSpec, WeightForm
from .forms.checks import check_form
from .forms.prompt import Prompt
from .masks import Mask, MaskGroup, RowMask, split_budget
from .sites import Location, ModuleSide, resolve_locations, select_layers
from .spec import MaskedMethod, Method, Modification, NamedMethod, Selection

START = "~start"
"""How the name of a buffer ends that holds the initial values of a tensor under a mask."""


@dataclass(frozen=True)
class ResolvedEdit:
    """A modification at one place of a model."""

    key: str  # its name in modules and files
    modification: Modification
    place: Location  # where it acts
    origin: int  # the number of its term's first part among all parts of the method
    mask: Mask | None = None  # which of its scalars are trained; None for all of them

    @property
    def term(self) -> str:
        """The number of its part among all parts of the method."""
        return self.key.partition("_")[0]

    @property
    def tensors(self) -> Specs:
        """Its tensors by name, with the tensors of its composition."""
        modification, widths = self.modification, self.place.widths
        return modification.form.tensors(widths) | modification.compose.tensors(widths)

    @property
    def is_reparameterised(self) -> bool:
        """Whether something is trained that is not saved, from which the saved tensors are computed."""
        return any(spec.trained and not spec.saved for spec in self.tensors.values())

    @property
    def starts(self) -> Specs:
        """The buffers of initial values, which entries that a mask leaves out keep.

        Forms of the library fill such entries by `fill_untrained`; a form of the user's own need not write it.
        """
        form, compose, widths = self.modification.form, self.modification.compose, self.place.widths
        if self.mask is None:
            return {}
        kept = compose.tensors(widths) if compose.is_own else {}
        if form.is_own and type(form).fill_untrained is Form.fill_untrained:
            kept = kept | form.tensors(widths)
        product = form.mask_factors(widths) or (0, (), ())
        factors = {factor.leaf for side in product[1:] for factor in side}
        return {
            f"{name}{START}": TensorSpec(spec.shape, trained=False, shared=spec.shared)
            for name, spec in kept.items()
            if spec.trained and spec.saved and name not in factors
        }

    def own_tensors(self, folded: bool) -> Specs:
        """Return the tensors that a delta holds for this place alone."""
        unshared = {name: spec for name, spec in (self.tensors | self.starts).items() if not spec.shared}
        if not self.is_reparameterised:
            return unshared
        return {n: replace(s, trained=True) for n, s in unshared.items() if (s.saved if folded else s.trained)}

    def owner(self, shared: str) -> str:
        """Return the name of the tensors that it shares with other places."""
        if shared == "group":
            return f"{self.term}_{self.place.group}"
        if shared == "term":
            return f"{self.origin}_{type(self.modification.form).__name__}"
        return f"{self.origin}_{getattr(self.modification.compose, 'name', '')}_{self.place.sublayer.replace('.', '_')}"


@dataclass(frozen=True)
class ResolvedGates:
    """Parameters of which exactly `keep` scalars change in the end; training finds which."""

    key: str  # the number of its part among all parts of the method
    tensors: tuple[Tensor, ...]
    keep: int  # the number of scalars that change

    @property
    def size(self) -> int:
        """All scalars of the parameters."""
        return sum(t.numel for t in self.tensors)


@dataclass(frozen=True)
class ResolvedMethod:
    """A method on one model."""

    edits: tuple[ResolvedEdit, ...]  # the modifications, each at one place
    selected: tuple[Tensor, ...]  # the parameters that are trained whole
    masked: tuple[tuple[Tensor, Mask | RowMask], ...] = ()  # the parameters that are trained under a fixed mask
    # masks on tensors that several places share, by owner and name
    common: tuple[tuple[tuple[str, str], Mask], ...] = ()
    gated: tuple[ResolvedGates, ...] = ()  # the parameters whose mask is learned
    # parameters that look like those of a selection and are not trained, since what they do is not observed: gains of
    # norms over other axes, biases that are not those of a linear or a norm
    unrecognized: tuple[Tensor, ...] = ()

    def shared_tensors(self, folded: bool) -> dict[str, Specs]:
        """Return the tensors that several places share, by owner and name."""
        shared: dict[str, Specs] = {}
        for edit in self.edits:
            for name, spec in (edit.tensors | edit.starts).items():
                if spec.shared and not (folded and spec.trained and not spec.saved):
                    of_owner = shared.setdefault(edit.owner(spec.shared), {})
                    other = of_owner.get(name, spec)
                    of_owner[name] = replace(spec, shape=tuple(map(max, spec.shape, other.shape)))
        return shared

    @property
    def trained_in_part(self) -> list[Tensor]:
        """The parameters of which some scalars are trained."""
        return [tensor for tensor, _ in self.masked] + [tensor for gates in self.gated for tensor in gates.tensors]

    def wasteful_parts(self) -> list[str]:
        """Return, for every part that trains more than it can use at each of its places, what is too much.

        Edits under a mask are left out: which of their scalars are trained is drawn anyway.
        """
        reasons: dict[Modification, list[str | None]] = {}
        for edit in self.edits:
            reason = None if edit.mask else edit.modification.form.waste(edit.place.widths)
            reasons.setdefault(edit.modification, []).append(reason)
        return [f"{part!r}: {of_places[0]}" for part, of_places in reasons.items() if all(of_places)]

    def __deepcopy__(self, memo: dict[int, Any]) -> ResolvedMethod:
        """Return itself: it is a value, which copies of a tuned model share."""
        return self


def resolve(anatomy: Anatomy, method: Method, base_size: Callable[[], int]) -> ResolvedMethod:
    """Resolve a method on a model."""
    problems: list[str] = []
    plans: list[ResolvedMethod] = []
    index = 0
    for term in method.terms:
        term_plan = _resolve_term(anatomy, term, index, problems)
        index += len(term.parts)
        if isinstance(term, MaskedMethod) and not problems:
            try:
                term_plan = _draw_masks(term_plan, term, base_size)
            except DeltuneError as error:
                problems.append(f"{term!r}: {error}")
            inner_terms = term.method.terms
            if len(inner_terms) > 1:
                inner_plans = [_resolve_term(anatomy, inner_term, index, problems) for inner_term in inner_terms]
                problems += _terms_without_effect(inner_plans, inner_terms)
        plans.append(term_plan)
    problems = problems or list(_conflicts(plans, method.terms))
    if problems:
        once = [problem.removeprefix(f"{method!r}: ") for problem in problems]
        raise error_from_problems(f"{method!r} cannot be had on {anatomy.model}", once)
    selected = {t.name: t for plan in plans for t in plan.selected}
    masked = {t.name: (t, mask) for plan in plans for t, mask in plan.masked}
    resolved = ResolvedMethod(
        tuple(e for plan in plans for e in plan.edits), tuple(selected.values()), tuple(masked.values()),
        tuple(t for plan in plans for t in plan.common), tuple(g for plan in plans for g in plan.gated),
    )  # fmt: skip
    trained = {t.name for t in (*resolved.selected, *resolved.trained_in_part)}
    left = {t.name: t for plan in plans for t in plan.unrecognized if t.name not in trained}
    return replace(resolved, unrecognized=tuple(left.values()))


def _conflicts(plans: Sequence[ResolvedMethod], terms: Sequence[Method]) -> Iterator[str]:
    """Yield why terms cannot be combined: every scalar that is counted must be used and trained."""
    in_part = [tensor for plan in plans for tensor in plan.trained_in_part]
    names = [tensor.name for tensor in in_part]
    trained_whole = {t.name for plan in plans for t in plan.selected}
    if twice := sorted({name for name in names if names.count(name) > 1 or name in trained_whole}):
        yield (
            f"two terms train {', '.join(twice[:3])}, one of them in part: give them one mask, as in "
            "apet(A + B, …), or one of the two"
        )
    yield from edit_conflicts(edit for plan in plans for edit in plan.edits)
    trained = {n for plan in plans for t in (*plan.selected, *plan.trained_in_part) for n in (t.name, *t.aliases)}
    for edit in (e for plan in plans for e in plan.edits if e.modification.form.reads_weight and e.place.linear):
        form, path = edit.modification.form, edit.place.target.path
        reads_bias = isinstance(form, WeightForm) and type(form).change_of_bias is not WeightForm.change_of_bias
        read = [f"{path}.weight", *([f"{path}.bias"] if reads_bias else [])]
        if both := [name for name in read if name in trained]:
            yield (
                f"{form!r} is a function of {both[0]}, which another term trains: attach the two as deltas of their "
                "own, where it reads the base model's, and use both"
            )
            break
    yield from _terms_without_effect(plans, terms)
    if unreached := sorted({t.name for t in in_part if t.read_without_call}):
        yield (
            f"{', '.join(unreached[:3])} cannot be trained in part: the model reads it directly and not by calling its "
            "module, so that what is trained of it would never be used; choose a method without it, or train it whole"
        )


def edit_conflicts(edits: Iterable[ResolvedEdit]) -> Iterator[str]:
    """Yield why edits cannot act together."""
    replaced: set[ModuleSide] = set()
    shift = prompt = False
    for edit in edits:
        form, target = edit.modification.form, edit.place.target
        shift, prompt = shift or bool(form.shift), prompt or form.needs == "tokens"
        if form.replaces and target in replaced:
            yield (
                f"two terms put {form!r} in place of what is at {edit.place.name}: the first of them would have no "
                "effect; give one"
            )
        replaced |= {target} if form.replaces else set()
    if shift and prompt:
        yield "shift_positions beside a prompt: both would move the positions of the text"


def _terms_without_effect(plans: Sequence[ResolvedMethod], terms: Sequence[Method]) -> Iterator[str]:
    """Yield that a term only selects parameters all of which other terms select too."""
    selected = [{t.name for t in other_plan.selected} for other_plan in plans]
    for number, (plan, term) in enumerate(zip(plans, terms, strict=False)):
        other_names = {name for other, names in enumerate(selected) if other != number for name in names}
        if selected[number] and selected[number] <= other_names and not (plan.edits or plan.gated or plan.masked):
            overlapping = [
                repr(terms[i]) for i, names in enumerate(selected) if i != number and names & selected[number]
            ]
            other_terms = " and ".join(dict.fromkeys(overlapping))
            yield f"{term!r} has no effect beside {other_terms}, which trains all of it: leave it out"
            return


def _resolve_term(anatomy: Anatomy, term: Method, index: int, problems: list[str]) -> ResolvedMethod:
    """Resolve one term, whose parts are numbered from `index` on; what is not possible is added to `problems`."""
    edits: list[ResolvedEdit] = []
    selected: list[Tensor] = []
    by_token: list[tuple[Tensor, RowMask]] = []
    gated: list[ResolvedGates] = []
    unrecognized: list[Tensor] = []
    possible: list[Modification | Selection] = []
    first_problem = len(problems)
    for number, part in enumerate(term.parts, index):
        try:
            if isinstance(part, Modification):
                locations = resolve_locations(anatomy, part)
                for location in {location.widths: location for location in locations}.values():
                    check_form(part.form, location)
                edits += [
                    ResolvedEdit(f"{number}_{location.name.replace('.', '_')}", part, location, index)
                    for location in locations
                ]
            elif part.tokens is not None:
                by_token += token_rows(anatomy, part, part.tokens)
            elif part.sparsity is None:
                selected += selected_tensors(anatomy, part)
            elif tensors := selected_tensors(anatomy, part):
                gated.append(_resolve_gates(tensors, part.sparsity, str(number)))
            if isinstance(part, Selection):
                unrecognized += unrecognized_tensors(anatomy, part)
            possible.append(part)
        except DeltuneError as error:
            problems.append(f"{part!r}: {error}")
    # of other methods, at= chooses the parts
    fixed = isinstance(term, NamedMethod) and "at" not in dict(term.arguments)
    if len(problems) > first_problem and possible and fixed:
        rest = " + ".join(map(repr, possible))
        problems[-1] += f"; the parts of {term!r} that this model can have: {rest}"
    return ResolvedMethod(
        tuple(edits), tuple(dict.fromkeys(selected)), tuple(by_token), gated=tuple(gated),
        unrecognized=tuple(unrecognized),
    )  # fmt: skip


def token_rows(anatomy: Anatomy, selection: Selection, tokens: tuple[int, ...]) -> list[tuple[Tensor, RowMask]]:
    """Return the tables with a row for each token, in the areas of a selection, with the rows of the tokens."""
    tables = [stack.embedding for stack in anatomy.stacks if stack.embedding is not None]
    if not tables:
        raise DeltuneError("the word embeddings of this model cannot be seen")
    if anatomy.output_kind == "words" and anatomy.vocabulary is None:
        raise DeltuneError(
            f"the projection to the vocabulary of {anatomy.model} cannot be seen, so that it may read the word "
            "embeddings where rows of chosen tokens would not be put in their place"
        )
    paths = [table.path for table in tables] if "embedding" in selection.areas else []
    paths += [anatomy.vocabulary.path] if anatomy.vocabulary is not None and "vocabulary" in selection.areas else []
    names = {f"{path}.weight" for path in paths}
    tensors = [t for t in anatomy.tensors if not names.isdisjoint((t.name, *t.aliases))]
    for tensor in tensors:
        if missing := [token for token in tokens if token >= tensor.shape[0]]:
            raise DeltuneError(
                f"tokens={excerpt(tokens)}: {excerpt(missing)} are no token ids of this model, which has 0 to "
                f"{tensor.shape[0] - 1}: model.resize_token_embeddings({max(tokens) + 1}) adds rows for them"
            )
    return [(tensor, RowMask(tensor.name, tuple(tokens), tensor.shape[1])) for tensor in tensors]


def _resolve_gates(chosen: Sequence[Tensor], sparsity: float, key: str) -> ResolvedGates:
    unique = tuple(dict.fromkeys(chosen))
    size = sum(t.numel for t in unique)
    keep = int(size * sparsity)
    if not keep:
        raise DeltuneError(f"sparsity={sparsity} of {size:,} scalars is none; give at least {1 / size:.2g}")
    return ResolvedGates(key, unique, keep)


def _draw_masks(unmasked: ResolvedMethod, masked: MaskedMethod, base_size: Callable[[], int]) -> ResolvedMethod:
    """Return the resolved method with masks on exactly N scalars, without edits that get none and so change nothing.

    Rows beside the model's own, of a prompt or in the softmax of an attention, take positions and attention even where
    all of them are zero. They stay, so that what the model is does not depend on N and the draw (AP eq. 15 concatenates
    W ⊙ m whatever m is). A learned scale acts through the form of its edit, and a gate through the edits that share it:
    where these get no scalars, the scale or gate gets none either.
    """
    owners: list[tuple[str, Any, MaskGroup]] = []
    depends_on: dict[int, list[int]] = {}
    users: dict[tuple[str, str], list[int]] = {}  # of a tensor that places share, the groups of those places
    for edit in unmasked.edits:
        groups, of_compose = _mask_groups(edit), edit.modification.compose.tensors(edit.place.widths)
        numbered = dict(enumerate(groups, len(owners)))
        form_groups = [i for i, group in numbered.items() if group.leaf not in of_compose]
        depends_on |= {i: form_groups for i, group in numbered.items() if group.leaf in of_compose}
        for name, spec in edit.tensors.items():
            if spec.shared and spec.trained and spec.saved:
                of_shared = users.setdefault((edit.owner(spec.shared), name), [])
                of_shared += form_groups if name in of_compose else []
        owners += [("edit", edit.key, group) for group in groups]
    shared = unmasked.shared_tensors(folded=False)
    for (owner, name), needed in users.items():
        if needed:  # a gate opens and closes them, and is nothing without them
            depends_on[len(owners)] = needed
        group = MaskGroup(f"common.{owner}.{name}", shared[owner][name].shape, name)
        owners.append(("common", (owner, name), group))
    owners += [("base", t.name, MaskGroup(t.name, t.shape, t.name)) for t in unmasked.selected]
    quotas = split_budget([group for _, _, group in owners], masked.target_count(base_size), depends_on)
    kept: dict[tuple[str, Any], list[tuple[MaskGroup, int]]] = {}
    for (kind, key, group), count in zip(owners, quotas, strict=True):
        if count:
            kept.setdefault((kind, key), []).append((group, count))

    def mask(kind: str, key: Any) -> Mask:
        return Mask(tuple(kept.get((kind, key), ())), masked.pattern, masked.along, masked.seed)

    def acts(edit: ResolvedEdit) -> bool:
        """It adds rows, or the mask keeps something of the edit itself or of what its form shares with other places."""
        of_form = edit.modification.form.tensors(edit.place.widths).items()
        adds_rows = isinstance(edit.modification.form, Prompt) or edit.modification.compose.in_softmax
        return (
            adds_rows
            or ("edit", edit.key) in kept
            or any(spec.shared and ("common", (edit.owner(spec.shared), name)) in kept for name, spec in of_form)
        )

    return ResolvedMethod(
        tuple(replace(edit, mask=mask("edit", edit.key)) for edit in unmasked.edits if acts(edit)), (),
        tuple((t, mask("base", t.name)) for t in unmasked.selected if ("base", t.name) in kept),
        tuple((key, mask("common", key)) for key in users),
        unrecognized=unmasked.unrecognized,
    )  # fmt: skip


def _mask_groups(edit: ResolvedEdit) -> list[MaskGroup]:
    """Return the groups that a mask is drawn on: the product of an edit, if it has one, and every other tensor."""
    shapes = {n: spec.shape for n, spec in edit.tensors.items() if spec.trained and spec.saved and not spec.shared}
    product = edit.modification.form.mask_factors(edit.place.widths)
    groups = []
    if product is not None:
        rank, down, up = product
        groups.append(MaskGroup(edit.key, rank=rank, down=down, up=up))
        shapes = {leaf: s for leaf, s in shapes.items() if leaf not in {side.leaf for side in (*down, *up)}}
    return groups + [MaskGroup(f"{edit.key}.{leaf}", shape, leaf) for leaf, shape in shapes.items()]


def selected_tensors(anatomy: Anatomy, selection: Selection) -> list[Tensor]:
    """Return the parameters of a selection, each once, in the towers that it names."""
    matching = _selected_in_towers(anatomy, selection, selection.roles)
    tensors = [t for t in matching if t.receives_gradient or t.tower == anatomy.tower]  # see `Anatomy.unread`
    if matching and not tensors:
        towers = "; ".join(f"of the tower {t}, {anatomy.unread(t)}" for t in dict.fromkeys(t.tower for t in matching))
        raise DeltuneError(f"nothing would train there: {towers}, since the model reads hidden states before them")
    missing = [r for r in selection.roles if not any(_has_role(t, r) for t in anatomy.tensors)]
    if not selection.optional and (not tensors or len(missing) == len(selection.roles)):
        raise DeltuneError(_nothing_selected(anatomy, selection))
    if quantized := [tensor for tensor in tensors if tensor.quantized]:
        raise DeltuneError(
            f"{len(quantized)} of the tensors that it trains are quantised ({quantized[0].name}: "
            f"{quantized[0].quantized}), and quantised numbers cannot be trained: choose a method that adds to the "
            "weights or the hidden states (lora, adapter, prefix, ia3) or trains norms (layernorm), "
            "or load the model without quantisation"
        )
    return tensors


def unrecognized_tensors(anatomy: Anatomy, selection: Selection) -> list[Tensor]:
    """Return the parameters that look selected, and whose part in the computation is not observed.

    A gain is the only parameter of a module, or stands beside a bias of its own shape, as in a batch or group norm, or
    a layer norm over channels that are not the last axis. A bias is one by its name alone, as in the experts of GPT-OSS
    and the query of DeBERTa, which add it themselves.
    """
    norms = {"norm.gain": "weight", "norm.bias": "bias"}
    leaves = {leaf for role, leaf in norms.items() if role in selection.roles}
    biases = {"bias", "linear.bias"} & set(selection.roles)
    if selection.optional or not (leaves or biases):
        return []
    like = [t for t in _selected_in_towers(anatomy, selection, ("weight", "bias")) if t.role in ("weight", "bias")]
    siblings: dict[str, list[Tensor]] = {}
    for tensor in anatomy.tensors:
        siblings.setdefault(tensor.name.rpartition(".")[0], []).append(tensor)
    unrecognized = []
    for tensor in like:
        module, _, leaf = tensor.name.rpartition(".")
        of_norm = leaf in leaves and _looks_like_norm(siblings[module])
        if tensor.receives_gradient and (of_norm or (biases and tensor.role == "weight" and leaf.endswith("bias"))):
            unrecognized.append(tensor)
    return unrecognized


def _looks_like_norm(tensors: Sequence[Tensor]) -> bool:
    """Whether the parameters of a module are one vector called weight, or that and a bias of its size."""
    leaves = {t.name.rpartition(".")[2]: t for t in tensors}
    sizes = {t.shape for t in tensors}
    return leaves.keys() <= {"weight", "bias"} and "weight" in leaves and len(sizes) == 1 and len(sizes.pop()) == 1


def _selected_in_towers(anatomy: Anatomy, selection: Selection, roles: Sequence[str]) -> list[Tensor]:
    """Return the parameters of some roles where a selection acts, in the towers that it names."""
    of_parts = {tensor.name for part in anatomy.other_towers for tensor in part.tensors}
    named = anatomy.tower if selection.tower == "main" else selection.tower
    if named not in ("all", *anatomy.towers):
        raise DeltuneError(f"tower={named!r}: this model has {' and '.join(anatomy.towers)} only")
    tensors = [
        tensor
        for part in anatomy.other_towers
        if named in ("all", part.tower)
        for tensor in _selected_in_tower(part, selection, part.tensors, roles)
    ]
    rest = [t for t in anatomy.tensors if named in ("all", t.tower) and t.name not in of_parts]
    return _selected_in_tower(anatomy, selection, rest, roles) + tensors


def _selected_in_tower(
    anatomy: Anatomy, selection: Selection, candidates: Iterable[Tensor], roles: Sequence[str]
) -> list[Tensor]:
    whole = selection.layers == "all" and not anatomy.layers
    chosen_layers = [] if whole else select_layers(anatomy, selection.layers, selection.stack)
    layers = {anatomy.layers.index(layer) for layer in chosen_layers}
    norms = {norm.path: norm for norm in (*anatomy.norms, *(n for layer in anatomy.layers for n in layer.norms))}
    tensors = []
    for tensor in candidates:
        if (
            tensor.computed
            or tensor.area not in selection.areas
            or (tensor.layer is not None and tensor.layer not in layers)
        ):
            continue
        if tensor.layer is None and selection.stack not in ("all", *_stacks_containing(anatomy, tensor)):
            continue
        if not any(_has_role(tensor, role) for role in roles):
            continue
        norm: Norm | None = norms.get(tensor.name.rpartition(".")[0])
        if selection.of != "both" and norm is not None and norm.of and selection.of not in norm.of:
            continue
        in_sublayer = norm is None and tensor.layer is not None
        if selection.of != "both" and in_sublayer and _sublayer_kind(anatomy, tensor) != selection.of:
            continue
        tensors.append(tensor)
    return tensors


def _sublayer_kind(anatomy: Anatomy, tensor: Tensor) -> str | None:
    """Return "attention" or "ffn" for a tensor of a layer that belongs to one; None for any other."""
    assert tensor.layer is not None
    layer, path = anatomy.layers[tensor.layer], tensor.name.rpartition(".")[0]
    kinds = {
        linear.path: "attention"
        for attention in layer.attentions
        for linear in (attention.query, attention.key, attention.value, attention.output)
        if linear is not None
    }
    kinds |= {linear.path: "attention" for attention in layer.attentions for linear in attention.inputs}
    kinds |= {linear.path: "ffn" for ffn in layer.ffns for linear in (*ffn.inputs, ffn.output)}
    if path in kinds:
        return kinds[path]
    containers = [(a.path, "attention") for a in layer.attentions]
    containers += [(ffn.path, "ffn") for ffn in layer.ffns] + [(experts.path, "ffn") for experts in layer.experts]
    for container, kind in sorted(containers, key=lambda pair: -len(pair[0])):
        inside = {of for linear, of in kinds.items() if linear.startswith(f"{container}.")}
        if inside <= {kind} and is_inside(path, container):
            return kind
    return None


def _stacks_containing(anatomy: Anatomy, tensor: Tensor) -> list[str]:
    """Return the stacks that a parameter outside of the layers belongs to; shared embeddings belong to both."""
    names = (tensor.name, *tensor.aliases)
    return [s.name for s in anatomy.stacks if any(n.startswith(f"{s.entry}." if s.entry else "") for n in names)]


def _has_role(tensor: Tensor, role: str) -> bool:
    return role == "all" or tensor.role == role or (role == "bias" and tensor.role.rpartition(".")[2] == "bias")


def _nothing_selected(anatomy: Anatomy, selection: Selection) -> str:
    named = anatomy.tower if selection.tower == "main" else selection.tower
    candidates = [t for t in anatomy.tensors if named in ("all", t.tower)]
    roles = sorted({t.role for t in candidates if t.area in selection.areas})
    requested = " or ".join(selection.roles)
    if selection.roles == ("norm.bias",):
        return f"no norm of this model has a bias (RMSNorm has a gain only); tensors there: {', '.join(roles)}"
    where = ", ".join(selection.areas) + (f" of the {selection.of}" if selection.of != "both" else "")
    where += f" of the tower {named}" if len(anatomy.towers) > 1 else ""
    advice = "; bitfit(add_missing=True) gives linears a bias" if {"bias", "linear.bias"} & set(selection.roles) else ""
    return f"this model has no {requested} in {where}; tensors there: {', '.join(roles) or 'none'}{advice}"
