"""Arithmetic of deltas: weighted sums as new deltas, exact or of a rank, and averages of their parameters.

What is added are changes of the model: a product U D of each low rank, W' - W of any other function of a weight, and
V - W of a tensor that is trained in place. Factors of different deltas are never multiplied by each other: with U_i D_i
for each, Σ w_i U_i D_i = [w_1 U_1 … w_n U_n] [D_1; …; D_n], whose rank is the sum of theirs.
"""

from __future__ import annotations

import copy
import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from ..anatomy.types import Anatomy, Columns
from ..compat import set_in_parameter_dict
from ..errors import DeltuneError, excerpt, unknown_name
from ..interop.base import (
    PlacedTensors,
    linears_at,
    method_from_pieces,
    methods_selecting,
    rows_of_columns,
    tensors_by_deltune_name,
    without_scope,
)
from ..methods.forms.base import FactorForm, check_positive
from ..methods.forms.hidden import Bottleneck, Vector
from ..methods.forms.low_rank import LowRank
from ..methods.forms.mix import AdapterFusion, Weights, mix_form
from ..methods.forms.routed import XLoRA
from ..methods.library import head as head_alone
from ..methods.library import lora, xlora
from ..methods.masks import RowMask
from ..methods.positions import ALL
from ..methods.spec import ADD, OTHER_PROJECTIONS, PROJECTIONS, Method, MethodSum, Modification, Selection
from ..models import Pooling
from .attached import Attached, check_name
from .merging import merged_weights
from .modules import Delta, Edit, HeadLabels, parameter_key
from .row_assignment import head_of
from .sharding import ADDED_LATE, BEFORE_SHARDING, refuse_sharded

AVERAGE = "average"
"""The function of an expression whose value has the mean parameters of deltas, and the head_of= that is a mean."""


def _check_density(density: float) -> None:
    if not 0 < density <= 1:
        raise DeltuneError(f"density={density}: a share above 0, and 1 at most")


@dataclass(frozen=True)
class Magnitude:
    """Keep the largest entries of each change of a tensor, then add.

    Args:
        density: The share of the entries that is kept, above 0.
    """

    density: float = 0.2

    def __post_init__(self) -> None:
        _check_density(self.density)


@dataclass(frozen=True)
class Ties(Magnitude):
    """Trim each change of a tensor, elect a sign for each entry, average what has it (TIES, Yadav et al. 2023).

    A delta with a negative weight takes part in the election with its sign turned.

    Args:
        density: The share of the entries of each change that is kept, above 0.
    """


@dataclass(frozen=True)
class Dare:
    """Drop entries of each change at random, divide the others by the share kept, then add (DARE, Yu et al. 2024).

    Args:
        density: The share of the entries that is kept, above 0.
        seed: The seed of the draw.
    """

    density: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        _check_density(self.density)


How = Magnitude | Dare


def join_changes(changes: torch.Tensor, weights: torch.Tensor, how: How | None, drawn: torch.Generator) -> torch.Tensor:
    """Return the change (…) that comes of the changes (n, …) of n deltas with weights (n, 1, …)."""
    if how is None:
        return (changes * weights).sum(0)
    if isinstance(how, Dare):
        kept = torch.rand(changes.shape, generator=drawn).to(changes.device) < how.density
        return (changes * kept * weights).sum(0) / how.density
    flat = changes.flatten(1).abs()
    largest = flat.topk(int(how.density * flat.shape[1]), dim=1).indices
    trimmed = changes * weights * torch.zeros_like(flat).scatter_(1, largest, 1).view_as(changes)
    if not isinstance(how, Ties):
        return trimmed.sum(0)
    elected = torch.where((trimmed / weights.abs().clamp_min(1e-30)).sum(0) >= 0, 1, -1)
    agreeing = trimmed.sign() == elected
    return (trimmed * agreeing).sum(0) / agreeing.sum(0).clamp(min=1)


class CombinationExpression(NamedTuple):
    """What an expression says: the weight of each delta, and the function whose arguments they are, or ""."""

    weights: dict[str, float]
    function: str = ""


_TERM = re.compile(
    r"\s*(?P<sign>[+-]?)\s*(?:(?P<weight>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*\*\s*)?"
    r"(?:(?P<name>[A-Za-z_]\w*)|'(?P<single>[\w-]+)'|\"(?P<double>[\w-]+)\")\s*"
)
_FUNCTION = re.compile(rf"\s*({AVERAGE}|mix)\s*\((.*)\)\s*")


def parse_combination(text: str) -> CombinationExpression:
    """Read a sum such as "0.5*a + b - 2*'my-task'", or "average(a, b)" or "mix(a, b)".

    Raises:
        DeltuneError: It is neither, or a weight is not finite.
    """
    if not isinstance(text, str):
        raise DeltuneError(f"combine takes an expression such as '0.5*a + b', not {excerpt(text)}")
    call = _FUNCTION.fullmatch(text)
    rest, weights = text if call is None else call[2].replace(",", "+"), dict[str, float]()
    while rest.strip() or not weights:
        match = _TERM.match(rest)
        if match is None or (weights and not match["sign"]) or (call and (match["weight"] or match["sign"] == "-")):
            raise DeltuneError(
                f"cannot read {excerpt(text)} at {excerpt(rest.strip() or 'its end')}: write "
                "\"0.5*a + b - 2*'my-task'\" (put names with '-' or of digits in quotes), or \"average(a, b)\""
            )
        name = match["name"] or match["single"] or match["double"]
        weight = float(match["weight"] or 1) * (-1 if match["sign"] == "-" else 1)
        weights[name] = weights.get(name, 0.0) + weight
        rest = rest[match.end() :]
    if wrong := [name for name, weight in weights.items() if not math.isfinite(weight)]:
        raise DeltuneError(f"{excerpt(text)}: the weight of {', '.join(wrong)} is not finite")
    return CombinationExpression(weights, "" if call is None else call[1])


def combine(
    attached: Attached,
    text: str,
    name: str,
    rank: int | None = None,
    how: How | None = None,
    head: str | None = None,
    mixing: Weights | str = "scalar",
) -> None:
    """Attach a combination of deltas and put it in use; see `Tuned.combine`."""
    refuse_sharded(attached.model, ADDED_LATE, BEFORE_SHARDING)
    expression = parse_combination(text)
    check_name(name, attached.names)
    if unknown := [unknown_name("delta", n, attached.names) for n in expression.weights if n not in attached.names]:
        hint = "; a name with '-' stands in quotes" if any("-" in n for n in attached.names) else ""
        raise DeltuneError(f"{text!r}: {'; '.join(unknown)}{hint}")
    if rank is not None:
        check_positive(rank=rank)
    if how is not None and not isinstance(how, How):
        raise DeltuneError(f"how={excerpt(how)}: give Ties(density=…), Dare(density=…) or Magnitude(density=…)")
    deltas = {n: attached.delta(n) for n in expression.weights}
    trained = _trained(deltas)
    with torch.inference_mode(False), torch.no_grad():
        heads, labels, pooling = _head(
            attached, deltas, AVERAGE if expression.function == AVERAGE and head is None else head
        )
        if expression.function and (rank is not None or how is not None):
            raise DeltuneError(
                f"{expression.function}(…) adds no changes, so rank= and how= have no meaning: write a sum"
            )
        if expression.function == AVERAGE:
            method, tensors, owned = _averaged(attached, deltas)
        elif expression.function:
            method, tensors, owned = *_mixed(attached, deltas, mixing, pooling), {}
        else:
            changes = Changes(attached, deltas, expression.weights, rank, how, pooling)
            method, tensors, owned = changes.method, changes.tensors, changes.owned
            if changes.lost > 1e-9:
                warnings.warn(
                    f"rank={rank} approximates {text!r}: the change of the weights differs from the exact sum by "
                    f"{math.sqrt(changes.lost):.1%} (relative Frobenius norm)",
                    stacklevel=5,
                )
        attach_tensors(attached, name, method, tensors, owned | heads, tuple(heads), labels, pooling, trained)


def _trained(deltas: Mapping[str, Delta]) -> dict[str, Any]:
    """Return what all deltas agree on of the inputs that they were trained on."""
    first, *others = (delta.trained for delta in deltas.values())
    templates = {name: t for name, delta in deltas.items() if (t := delta.trained.get("chat_template")) is not None}
    if len(set(templates.values())) > 1:
        raise DeltuneError(
            f"{', '.join(templates)} were trained with different chat templates, and no conversation can be written in "
            "both: train them with the same one, or use them one at a time"
        )
    return {key: value for key, value in first.items() if all(other.get(key) == value for other in others)}


def attach_tensors(
    attached: Attached,
    name: str,
    method: Method,
    tensors: Mapping[str, torch.Tensor],
    owned: Mapping[str, torch.Tensor],
    head: tuple[str, ...],
    labels: HeadLabels,
    pooling: Pooling = "model",
    trained: Mapping[str, Any] | None = None,
) -> None:
    """Attach a delta of a method with the values of a file's tensors and of the model's own, by their names."""
    delta = attached.move_to_model(Delta(method, attached.resolve(method, pooling), head, "train", folded=True))
    delta.pooling, delta.trained = pooling, dict(trained or {})
    delta.draw()
    for key, sparse in delta.masked_tensors():
        if key in owned:
            sparse.initialize(owned[key])
    for key, tensor in delta.tensors_to_save().items():
        if not key.startswith("partly."):
            tensor.copy_(tensors[key])
    for key in delta.owned_tensor_names:
        base = attached.state.base_value(key)
        value = owned.get(key, base).to(base.device, base.dtype)
        set_in_parameter_dict(delta.held, parameter_key(key), nn.Parameter(value.clone()))
    attached.add(name, delta, labels)


def _head(
    attached: Attached, deltas: Mapping[str, Delta], head: str | None
) -> tuple[dict[str, torch.Tensor], HeadLabels, Pooling]:
    """Return the tensors and labels of the head of one of the deltas, or the mean of all, and what it reads."""
    chosen = list(deltas)
    if head != AVERAGE or AVERAGE in deltas:
        answering = head_of(tuple(deltas), deltas, head)
        chosen = [] if answering is None else [answering]
    elif len({(delta.head, delta.labels, delta.pooling) for delta in deltas.values()}) > 1:
        raise DeltuneError(
            f"head_of={AVERAGE!r}: the heads have other labels or another pooling; name the delta whose head is kept"
        )
    if not chosen:
        return {}, attached.base_labels, "model"
    first, state = deltas[chosen[0]], attached.state
    tensors = {n: torch.stack([state.delta_value(deltas[c], n) for c in chosen]).mean(0) for n in first.head}
    return tensors, first.labels or attached.base_labels, first.pooling


def _averaged(
    attached: Attached, deltas: Mapping[str, Delta]
) -> tuple[Method, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the method of deltas that have the same, and the means of their tensors."""
    first, *others = deltas.values()
    saved = [delta.tensors_to_save() for delta in (first, *others)]
    owned = [
        {n: attached.state.delta_value(d, n) for n in d.owned_tensor_names if n not in d.head} for d in deltas.values()
    ]
    if any(delta.method != first.method or tensors.keys() != saved[0].keys() for delta, tensors in zip(
        (first, *others), saved, strict=True
    )):  # fmt: skip
        needed, methods = "the same method", ", ".join(f"{name} is {delta.method!r}" for name, delta in deltas.items())
        mean = " + ".join(f"{1 / len(deltas):.3g}*{name}" for name in deltas)
        if all(delta.method == first.method for delta in others):
            poolings = ", ".join(f"{delta.pooling!r} of {name}" for name, delta in deltas.items())
            needed, methods = "the same pooling", f"the heads read {poolings}"
        raise DeltuneError(f"{AVERAGE}({', '.join(deltas)}) needs {needed}: {methods}. For different ones write {mean}")
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in saved[0].items():
        same = [other[name] for other in saved]
        if tensor.is_floating_point():
            tensors[name] = torch.stack(same).mean(0)
        elif all(torch.equal(tensor, other) for other in same):
            tensors[name] = tensor
        else:
            raise DeltuneError(
                f"{AVERAGE}(…): the deltas train other entries ({name}), so that no parameters correspond"
            )
    return first.method, tensors, {name: torch.stack([of[name] for of in owned]).mean(0) for name in owned[0]}


def _mixed(
    attached: Attached, deltas: Mapping[str, Delta], mixing: Weights | str, pooling: Pooling
) -> tuple[Method, dict[str, torch.Tensor]]:
    """Return the method that mixes the changes of deltas, and its tensors."""
    places: dict[tuple[Modification, str], dict[int, PlacedTensors]] = {}
    for number, (name, delta) in enumerate(deltas.items()):
        pieces = _bottlenecks(delta)
        if not pieces:
            changes = Changes(attached, {name: delta}, {name: 1.0}, None, None, pooling)
            pieces = [] if changes.owned else changes.pieces
        if not pieces or not all(isinstance(piece.modification.form, LowRank | Bottleneck) for piece in pieces):
            raise DeltuneError(
                f"mix(…) is of changes of linears' weights or of adapters, and {name!r} ({delta.method!r}) has others: "
                "merge it, use several at once, or write a sum"
            )
        for piece in pieces:
            form = piece.modification.form
            key = replace(piece.modification, form=LowRank(1) if isinstance(form, LowRank) else form), piece.place.name
            places.setdefault(key, {})[number] = piece
    pieces = []
    ranks = {key: max(piece.tensors["down"].shape[-2] for piece in some.values()) for key, some in places.items()}
    for key, some in places.items():
        place, kind = next(iter(some.values())).place, key[0].form
        activation, bias = (kind.activation, kind.bias) if isinstance(kind, Bottleneck) else ("identity", False)
        form = mix_form(len(deltas), ranks[key], mixing, activation, bias=bias)
        if is_shared := any(spec.shared for spec in form.tensors(place.widths).values()):
            form = replace(form, rank=max(ranks.values()))  # what shares tensors is one term
        if isinstance(kind, Bottleneck) and not isinstance(form, AdapterFusion):
            raise DeltuneError(
                f'mixing={mixing!r} is of changes of weights; adapters are mixed by "attention" or "fusion"'
            )
        tensors = {n: torch.zeros(s.shape) for n, s in form.tensors(place.widths).items()}
        for number, piece in some.items():
            tensors = {name: tensor.to(piece.tensors["down"]) for name, tensor in tensors.items()}
            for name, part in piece.tensors.items():
                tensors[name][number][tuple(map(slice, part.shape))] = part
        form.start(tensors)
        pieces.append(PlacedTensors(replace(key[0], form=form), place, tensors))
    method, tensors = shortest_method(attached.anatomy_read(pooling), pieces, set())
    if is_shared and len(method.terms) > 1:
        raise DeltuneError(
            f"mixing={mixing!r} has one classifier for all places, and no one term acts at those of "
            f"{', '.join(deltas)} alone ({len(method.terms)} terms do): mix deltas of the same sites and layers"
        )
    return method, tensors


def _bottlenecks(delta: Delta) -> list[PlacedTensors]:
    """Return the adapters of a delta, with their fixed scales in the last product; nothing where it has more."""
    pieces = []
    for edit in delta.all_edits():
        layers = edit.form.two_layers(edit.tensors()) if isinstance(edit.form, Bottleneck) else None
        if layers is None or edit.factor is None or edit.modification.positions != ALL:
            return []
        tensors = {"down": layers.down, "up": layers.up * edit.factor}
        if layers.down_bias is not None and layers.up_bias is not None:
            tensors |= {"down_bias": layers.down_bias, "up_bias": layers.up_bias * edit.factor}
        form = Bottleneck(1, layers.activation, bias=len(tensors) > 2)
        modification = replace(without_scope(edit.modification), form=form, compose=ADD)
        pieces.append(PlacedTensors(modification, edit.place, tensors))
    return [] if delta.selected else pieces


Product = tuple[torch.Tensor, torch.Tensor]
"""U (…, d_out, r) and D (…, r, d_in)."""


class Changes:
    """The weighted sum of what deltas change of a model, without a pooler that the head does not read.

    Attributes:
        method: A method that can hold it.
        tensors: The tensors of its edits, by their names in a file.
        owned: Its values of the model's own tensors.
        lost: The share of the energy that its rank loses.
    """

    def __init__(
        self,
        attached: Attached,
        deltas: Mapping[str, Delta],
        weights: Mapping[str, float],
        rank: int | None,
        how: How | None,
        pooling: Pooling,
    ) -> None:
        anatomy = attached.anatomy_read(pooling)
        self.unread = {t.name for t in attached.anatomy.tensors} - {t.name for t in anatomy.tensors}
        self.attached, self.deltas, self.weights, self.rank, self.how = attached, deltas, weights, rank, how
        self.at = Projections(anatomy)
        self.pieces: list[PlacedTensors] = []
        self.owned: dict[str, torch.Tensor] = {}
        self._energy = [0.0, 0.0]  # lost, and all
        every_edit = [(name, edit) for name, delta in deltas.items() for edit in delta.all_edits()]
        edits = [(n, edit) for n, edit in every_edit if f"{edit.place.target.path}.weight" not in self.unread]
        in_place = {n for d in deltas.values() for n in (*d.owned_tensor_names, *(n for n, _ in d.masked_tensors()))}
        paths: dict[str, list[tuple[str, Edit]]] = {}
        for name, edit in edits:
            paths.setdefault(edit.place.target.path, []).append((name, edit))
        left_out = {edit for _, edit in every_edit} - {edit for _, edit in edits}
        for path, of_path in paths.items():
            if f"{path}.weight" not in in_place and how is None:
                if all(_is_product(edit) for _, edit in of_path):
                    self._add_products(of_path)
                elif rank is None and _are_linear([edit for _, edit in of_path]):
                    self._add_tensors(of_path)
                else:
                    continue
                left_out |= {edit for _, edit in of_path}
        self._add_changes({edit for _, edit in edits} - left_out, in_place, left_out)
        tokens = [p for d in deltas.values() for p in d.method.parts if isinstance(p, Selection) and p.tokens]
        whole = {n for d in deltas.values() for n in d.owned_tensor_names}
        by_row = {t.name for d in deltas.values() for t, mask in d.planned.masked if isinstance(mask, RowMask)} - whole
        every = tuple(sorted({token for part in tokens for token in part.tokens or ()}))
        rows = dict.fromkeys(replace(part, tokens=every) for part in tokens) if by_row else {}
        masked = {delta for delta in deltas.values() if any(edit.is_masked for edit in delta.all_edits())}
        known = [delta.method for delta in deltas.values() if delta not in masked]
        self.method, self.tensors = shortest_method(anatomy, self.pieces, set(self.owned) - by_row, rows, known)
        self.lost = self._energy[0] / self._energy[1] if self._energy[1] else 0.0

    def _add_products(self, edits: Sequence[tuple[str, Edit]]) -> None:
        """Add edits that are products; products at one place become one."""
        places: dict[object, list[tuple[str, Edit]]] = {}
        for name, edit in edits:
            key = (edit.place.target.columns, edit.place.experts) if edit.place.linear else edit.place.name
            places.setdefault(key, []).append((name, edit))
        for some in places.values():
            products = [_product(edit, self.weights[name]) for name, edit in some]
            self._add_product(
                some[0][1], torch.cat([u for u, _ in products], -1), torch.cat([d for _, d in products], -2)
            )

    def _add_product(self, edit: Edit, up: torch.Tensor, down: torch.Tensor) -> None:
        if self.rank is not None and up.shape[-1] > self.rank:
            (left, up), (right, down) = torch.linalg.qr(up), torch.linalg.qr(down.mT)
            u, s, v = torch.linalg.svd(up @ down.mT)
            up, down = self._of_rank(left @ u, s, v @ right.mT)
        elif self.rank is not None:
            self._energy[1] += float(((up.mT @ up) * (down @ down.mT)).sum())
        modification, place = without_scope(edit.modification), edit.place
        if place.linear is not None:
            modification, place = self.at.of(place.linear.path, place.target.columns)
        form = LowRank(up.shape[-1])
        modification = replace(modification, form=form, insertion="parallel", compose=Modification("ffn", form).compose)
        self.pieces.append(PlacedTensors(modification, place, {"down": down, "up": up}))

    def _of_rank(self, u: torch.Tensor, s: torch.Tensor, v: torch.Tensor) -> Product:
        """Return the product of the rank that is asked for, or of all singular values but 0."""
        noise = s.amax() * max(u.shape[-2], v.shape[-1]) * torch.finfo(s.dtype).eps
        up, down = truncate_to_rank(u, s, v, self.rank or int((s > noise).sum(-1).max()))
        self._energy[0] += float(s[..., up.shape[-1] :].square().sum())
        self._energy[1] += float(s.square().sum())
        return up, down

    def _add_tensors(self, edits: Sequence[tuple[str, Edit]]) -> None:
        """Add edits whose change is linear in their tensors, each as one of the same kind."""
        places: dict[str, list[tuple[str, Edit]]] = {}
        for name, edit in edits:
            places.setdefault(edit.place.name, []).append((name, edit))
        for some in places.values():
            edit = some[0][1]
            neutral = {n: torch.empty_like(t) for n, t in edit.tensors().items()}
            edit.form.fill_untrained(neutral, {})
            tensors = {
                n: t + sum(self.weights[of] * (e.tensors()[n] - t) for of, e in some) for n, t in neutral.items()
            }
            self.pieces.append(PlacedTensors(without_scope(edit.modification), edit.place, tensors))

    def _add_changes(self, edits: set[Edit], in_place: set[str], left_out: set[Edit]) -> None:
        """Add the changes of whole tensors: W' - W of edits, and V - W of what is trained in place."""
        base_value, changes = self.attached.dense_value, dict[str, dict[str, torch.Tensor]]()
        drawn = torch.Generator().manual_seed(getattr(self.how, "seed", 0))
        for name, delta in self.deltas.items():
            for tensor, value in merged_weights(self.attached, [delta], None, left_out).items():
                if tensor not in self.unread:
                    changes.setdefault(tensor, {})[name] = value
        of_weight = {f"{e.place.target.path}.{e.place.weight.leaf if e.place.weight else 'weight'}": e for e in edits}
        aliases = {alias: t.name for t in self.attached.anatomy.tensors for alias in (t.name, *t.aliases)}
        edit_of = {aliases.get(name, name): edit for name, edit in of_weight.items()}
        for tensor, values in changes.items():
            base = base_value(tensor)
            precise = base.to(torch.promote_types(base.dtype, torch.float32))
            stacked = torch.stack([value.to(precise.dtype) - precise for value in values.values()])
            weights = stacked.new_tensor([self.weights[name] for name in values]).view(-1, *(1,) * base.dim())
            change = join_changes(stacked, weights, self.how, drawn)
            edit, (path, _, leaf) = edit_of.get(tensor), tensor.rpartition(".")
            if tensor not in in_place and leaf == "bias":
                self._add_shift(path, change)
                continue
            if edit is not None and edit.place.linear is None and edit.place.weight is not None:
                self._add_expert_change(edit, change)
            elif path in self.at.parts and (self.rank is not None or (edit is not None and tensor not in in_place)):
                self._add_matrix(path, change)
            else:
                self.owned[tensor] = (precise + change).to(base.dtype)

    def _add_shift(self, path: str, change: torch.Tensor) -> None:
        """Add the change of a linear's bias, part by part where it is a fused one."""
        for columns in self.at.parts[path] if change.any() else ():
            modification, place = self.at.of(path, columns)
            if (vector := rows_of_columns(change, columns)).any():
                self.pieces.append(PlacedTensors(replace(modification, form=Vector()), place, {"vector": vector}))

    def _add_expert_change(self, edit: Edit, change: torch.Tensor) -> None:
        weight, experts = edit.place.weight, edit.place.experts
        assert weight is not None
        matrix = change.mT if weight.transposed else change
        matrix = matrix if experts is None else matrix[torch.tensor(experts)]
        up, down = self._of_rank(*torch.linalg.svd(matrix, full_matrices=False))
        modification = replace(without_scope(edit.modification), form=LowRank(up.shape[-1]))
        self.pieces.append(PlacedTensors(modification, edit.place, {"down": down, "up": up}))

    def _add_matrix(self, path: str, change: torch.Tensor) -> None:
        """Add the change of a linear's weight, part by part where it is a fused one."""
        matrix, parts = change.mT if self.at.transposed(path) else change, self.at.parts[path]
        for columns in parts:
            rows = rows_of_columns(matrix, columns)
            if len(parts) == 1 or rows.any():
                up, down = self._of_rank(*torch.linalg.svd(rows, full_matrices=False))
                modification, place = self.at.of(path, columns)
                modification = replace(modification, form=LowRank(up.shape[-1]))
                self.pieces.append(PlacedTensors(modification, place, {"down": down, "up": up}))


class Projections:
    """The linears of a model as places of low ranks.

    Attributes:
        parts: The parts of each linear by its path; None for all of it.
    """

    def __init__(self, anatomy: Anatomy) -> None:
        self.parts: dict[str, list[Columns | None]] = {}
        self._places: dict[tuple[str, Columns | None], tuple[Modification, Any]] = {}
        sites = (*PROJECTIONS, *OTHER_PROJECTIONS)
        in_order = [site for site in sites if site != "ffn_up"] + ["ffn_up", "*"]
        for tower in dict.fromkeys(("main", *anatomy.towers)):
            for site in in_order:
                modification = Modification(site, LowRank(1), tower=tower)
                for place, linear in linears_at(anatomy, site, tower):
                    columns = place.target.columns
                    if site == "*" and linear.path in self.parts and columns is None:
                        continue
                    if (linear.path, columns) not in self._places:
                        named = replace(modification, site=linear.path) if site == "*" else modification
                        self._places[linear.path, columns] = named, place
                        self.parts.setdefault(linear.path, []).append(columns)

    def of(self, path: str, columns: Columns | None) -> tuple[Modification, Any]:
        """Return a modification of a linear, or of a part of it, and its place."""
        return self._places[path, columns]

    def transposed(self, path: str) -> bool:
        """Return whether the weight of a linear is (in, out)."""
        return bool(self._places[path, self.parts[path][0]][1].linear.transposed)


def truncate_to_rank(u: torch.Tensor, s: torch.Tensor, v: torch.Tensor, rank: int) -> Product:
    """Return U and D of the largest singular values, at least of one, each with their roots."""
    root = s[..., :rank].sqrt() if rank else s[..., :1].sqrt()
    return u[..., : root.shape[-1]] * root[..., None, :], root[..., :, None] * v[..., : root.shape[-1], :]


def shortest_method(
    anatomy: Anatomy,
    pieces: Sequence[PlacedTensors],
    owned: set[str],
    others: Iterable[Method] = (),
    known: Iterable[Method] = (),
) -> tuple[Method, dict[str, torch.Tensor]]:
    """Return the shortest method of edits and of tensors that are trained in place, and the edits' tensors.

    Args:
        anatomy: The model's anatomy.
        pieces: The edits.
        owned: The names of the tensors.
        others: Further terms.
        known: Methods that may have exactly these edits.
    """
    candidates: list[Callable[[], Method]] = [
        partial(copy.copy, m) for m in known if all(isinstance(part, Modification) for part in m.parts)
    ]
    if pieces and isinstance(form := pieces[0].modification.form, LowRank):
        sites = tuple(dict.fromkeys(p.modification.site for p in pieces))
        at: Any = ("query", "value") if {*sites} == {"query", "value"} else sites[0] if len(sites) == 1 else sites
        candidates.append(partial(lora, form.rank, at=at))
    if pieces and isinstance(form := pieces[0].modification.form, XLoRA):
        arguments = {f.name: getattr(form, f.name) for f in fields(form)}
        sites = tuple(dict.fromkeys(p.modification.site for p in pieces))
        indices = {int(p.place.name.split(".")[1]) for p in pieces if p.place.layer}
        candidates += [partial(xlora, **arguments, at=sites, layers=of) for of in ("all", tuple(sorted(indices)))]
    terms = [*method_from_pieces(anatomy, pieces, candidates).terms] if pieces else []
    terms = [*terms, *methods_selecting(anatomy, owned), *others] or [head_alone()]
    method = terms[0] if len(terms) == 1 else MethodSum(tuple(terms))
    return method, tensors_by_deltune_name(anatomy, method, pieces)


def _is_product(edit: Edit) -> bool:
    """Whether an edit adds a product of two matrices to what its place gives."""
    side = edit.place.target.side in ("output", "weight")
    parallel = edit.modification.insertion == "parallel"
    everywhere = edit.modification.positions == ALL
    return isinstance(edit.form, FactorForm) and parallel and side and everywhere and edit.factor is not None


def _are_linear(edits: Sequence[Edit]) -> bool:
    """Whether all edits of a module are vectors that scale or shift, of one kind at each place, so that they add up."""
    kinds = {(edit.place.name, without_scope(edit.modification)) for edit in edits}
    linear = all(edit.form.multiplies is not None or isinstance(edit.form, Vector) for edit in edits)
    return linear and len({name for name, _ in kinds}) == len(kinds) and all(e.factor is not None for e in edits)


def _product(edit: Edit, weight: float) -> Product:
    assert isinstance(edit.form, FactorForm) and edit.factor is not None
    down, up = edit.form.factors(edit.tensors())
    return up * (edit.factor * weight), down


def with_allocated_ranks(attached: Attached, delta: Delta) -> Delta:
    """Return a delta with the ranks that its schedules have left, as low ranks; itself where they are not final."""
    left = {e: kept for state in delta.schedule_states() for e, kept in zip(state.edits, state.ranks(), strict=False)}
    if not left:
        return delta
    pieces: dict[int, list[PlacedTensors]] = {}
    sources: dict[tuple[Modification, str], Mapping[str, torch.Tensor]] = {}
    for edit in delta.all_edits():
        if edit not in left:
            sources[edit.modification, edit.place.name] = edit.tensors_to_save()
        elif left[edit].any():
            up, down = _product(edit, 1.0)
            modification = replace(without_scope(edit.modification), form=LowRank(int(left[edit].sum())))
            tensors = {"down": down[left[edit]], "up": up[:, left[edit]]}
            pieces.setdefault(edit.origin, []).append(PlacedTensors(modification, edit.place, tensors))
            sources[modification, edit.place.name] = tensors
    terms: list[Method] = []
    number = 0
    for term in delta.method.terms:
        some = pieces.get(number)
        terms += [term] if some is None else method_from_pieces(attached.anatomy, some).terms
        number += len(term.parts)
    method = terms[0] if len(terms) == 1 else MethodSum(tuple(terms))
    planned = attached.resolve(method, delta.pooling)
    smaller = attached.move_to_model(Delta(method, planned, delta.head, delta.head_mode, folded=True))
    smaller.labels, smaller.trained, smaller.pooling = delta.labels, delta.trained, delta.pooling
    with torch.inference_mode(False), torch.no_grad():
        for edit in smaller.all_edits():
            unscoped = without_scope(edit.modification), edit.place.name
            values = sources[unscoped if unscoped in sources else (edit.modification, edit.place.name)]
            for name, tensor in edit.tensors_to_save().items():
                tensor.copy_(values[name])
        others = [[t for n, t in d.tensors_to_save().items() if not n.startswith("edit.")] for d in (smaller, delta)]
        for tensor, value in zip(*others, strict=True):
            tensor.copy_(value)
        for name in smaller.owned_tensor_names:
            value = attached.state.delta_value(delta, name).clone()
            set_in_parameter_dict(smaller.held, parameter_key(name), nn.Parameter(value))
    return smaller
