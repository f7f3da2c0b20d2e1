"""Folds a delta into the weights where that is exact: affine edits of projections, and tensors trained in place.

With y = W x + c: Δh = A x + b in parallel gives W + s A and c + s b; Δh = A y + b in sequence (1 + s A) W and
(1 + s A) c + s b; a change of the projection's input x gives W (1 + s A) and c + W s b. A function of the weight gives
A = W' - W of the base model's W.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from ..anatomy.quantization import is_unquantized, quantized_modules
from ..anatomy.quantizers import dequantized_weight, find_quantizer, plain_linear, quantized_copy, set_weight_from
from ..anatomy.skeleton import base_modules, base_tensors
from ..anatomy.types import Anatomy
from ..compat import forget_quantization, parameters_of, submodules_of
from ..errors import error_from_problems
from ..methods.forms.base import Affine, Form, Place
from ..methods.forms.checks import affine_difference
from ..methods.positions import ALL
from .model_state import ModelState
from .modules import Delta, Edit
from .sharding import BEFORE_SHARDING, refuse_sharded


class MergeSource(Protocol):
    """Where a merge reads the values of a model and of a delta."""

    anatomy: Anatomy
    state: ModelState

    @property
    def model(self) -> PreTrainedModel: ...

    def dense_value(self, name: str) -> torch.Tensor: ...

    def place_of(self, edit: Edit) -> Place | None: ...


@dataclass(frozen=True)
class MergePlan:
    """What a merge puts into a model."""

    weights: dict[str, torch.Tensor]  # the merged values of parameters in floating point, by name
    # for each linear whose merged weight is quantised again, a copy of it with that weight
    quantized: dict[nn.Module, nn.Module]
    # for each linear that was quantised and is to be so no more, a plain one with its merged weight
    linears: dict[nn.Module, nn.Module]
    warning: str  # what quantising again rounds, or ""

    def check_fits_shards(self, state: ModelState) -> None:
        """Check that no tensor that FSDP2 has sharded would have another shape; the shards' sizes are fixed."""
        names = list(self.weights)
        for name, base in zip(names, state.base_values(names), strict=True):
            if base.shape != self.weights[name].shape:
                refuse_sharded(state.model, f"merging would change the shape of {name}", BEFORE_SHARDING)

    def quantize_in_place(self) -> None:
        """Give the linears of the model their merged weights that are quantised again."""
        for module, source in self.quantized.items():
            set_weight_from(module, source)

    def replace_linears(self, model: PreTrainedModel) -> None:
        """Put the plain linears in place of the quantised ones, after all of which the model is a plain one."""
        if not self.linears:
            return
        for module, linear in self.linears.items():
            if "bias" in parameters_of(module):
                linear.register_parameter("bias", parameters_of(module)["bias"])  # it may be a merged one
        for _, parent in base_modules(model):
            children = submodules_of(parent)
            children.update({leaf: self.linears[m] for leaf, m in list(children.items()) if m in self.linears})
        forget_quantization(model)


def compute_merge(source: MergeSource, deltas: Sequence[Delta], head: Delta | None, dequantize: bool) -> MergePlan:
    """Compute what merging deltas puts into the model, which is not changed."""
    weights = merged_weights(source, deltas, head)
    modules = _quantized_linears(source)
    linears: dict[nn.Module, nn.Module] = {}
    if dequantize:
        dtype = next((p.dtype for p in base_tensors(source.model) if is_unquantized(p)), torch.float32)
        for name in modules:
            if source.anatomy.tensor(name).quantized:  # others are in floating point, and quantised in each pass anew
                weight = weights.pop(name, None)
                for module in modules[name]:
                    value = dequantized_weight(module) if weight is None else weight
                    linears[module] = plain_linear(module, value.to(dtype))
    again = {name: weights.pop(name) for name in list(weights) if name in modules}
    quantized, warning = _quantize_again(source, modules, again)
    return MergePlan(weights, quantized, linears, warning)


def _quantized_linears(source: MergeSource) -> dict[str, list[nn.Module]]:
    """The quantised linears of the model, by the names of their weights."""
    modules = {f"{path}.weight": module for path, module, _ in quantized_modules(source.model)}
    by_name = {t.name: [modules[n] for n in (t.name, *t.aliases) if n in modules] for t in source.anatomy.tensors}
    return {name: linears for name, linears in by_name.items() if linears}


def merged_weights(
    source: MergeSource, deltas: Sequence[Delta], head: Delta | None, left_out: Collection[Edit] = ()
) -> dict[str, torch.Tensor]:
    """Compute the weights of a model with deltas merged, which act together, and the head of one of them.

    Sums are computed in at least float32.
    """
    anatomy, state, base_value = source.anatomy, source.state, source.dense_value
    values: dict[str, torch.Tensor] = {}
    reasons: dict[str, None] = {}
    wrong_forms: set[Form] = set()
    with torch.no_grad():
        for delta in deltas:
            replaced: dict[str, torch.Tensor] = {}
            replaced |= {
                n: state.delta_value(delta, n) for n in delta.owned_tensor_names if delta is head or n not in delta.head
            }
            replaced |= {n: part.merged_value(state.base_value(n)) for n, part in delta.masked_tensors()}
            for name, value in replaced.items():
                values[name] = (values[name] + (value - base_value(name)) if name in values else value).detach()
        for name, edit in (pair for delta in deltas for pair in delta.weight_edits() if pair[1] not in left_out):
            base = base_value(name).detach()
            old, precision = values.get(name, base), torch.promote_types(base.dtype, torch.float32)
            values[name] = edit.apply_to_weight(old.to(precision), base.to(precision)).to(old.dtype)
        for edit in (edit for edit in _edits_in_order(deltas) if edit not in left_out):
            names = {leaf: _tensor_name(anatomy, edit, leaf) for leaf in ("weight", "bias")}
            at = source.place_of(edit)
            change = _affine_change(edit, at)
            if why := change if isinstance(change, str) else _reason_against(edit, change, names["bias"]):
                reasons[f"{edit.modification!r}: {why}"] = None
            elif edit.form in wrong_forms:
                continue
            elif difference := affine_difference(edit.form, edit.tensors(), edit.place.widths, at):
                wrong_forms.add(edit.form)  # said once, for the first of its places
                reasons[f"{edit.modification!r} at {edit.place.name}: {difference}"] = None
            elif not reasons and not isinstance(change, str):
                before = {leaf: values.get(name, base_value(name).detach()) for leaf, name in names.items() if name}
                values |= {names[leaf]: tensor for leaf, tensor in _fold(edit, change, before).items()}
    if reasons:
        methods = " + ".join(repr(delta.method) for delta in deltas)
        once = [reason.removeprefix(methods).lstrip(": ") for reason in reasons]
        raise error_from_problems(
            f"{methods} cannot be merged into the weights; it can be loaded and served as it is", once
        )
    return values


def _quantize_again(
    source: MergeSource, modules: Mapping[str, Sequence[nn.Module]], weights: Mapping[str, torch.Tensor]
) -> tuple[dict[nn.Module, nn.Module], str]:
    """Quantise merged weights in copies of their linears; also return a warning of what that rounds."""
    copies: dict[nn.Module, nn.Module] = {}
    change = error = 0.0
    names: dict[str, None] = {}
    for name, merged in weights.items():
        weight = merged.detach().float()
        difference = weight - source.dense_value(name).detach().float()
        for module in modules[name]:
            before = dequantized_weight(module).float()
            copies[module] = quantized_copy(module, weight)
            after = dequantized_weight(copies[module]).float()
            change += float(difference.square().sum())
            error += float((after - before - difference).square().sum())
            quantizer = find_quantizer(module)
            assert quantizer is not None
            names[quantizer.name(module)] = None
    return copies, _rounding(len(copies), " and ".join(names), change**0.5, error**0.5) if copies else ""


def _rounding(count: int, names: str, change: float, error: float) -> str:
    """Say what quantising again rounds: the norm of that error beside the norm of what the delta changes."""
    weights = f"{count} weight{'s' if count != 1 else ''} of {names}"
    if not change:
        return f"the delta changes nothing of {weights}, and quantising again changed them by a norm of {error:.3g}"
    return (
        f"merged into {weights} by quantising again, which changes them by {error / change:.1%} of what the delta does "
        f"(norms {error:.3g} and {change:.3g}): evaluate the merged model, or merge(dequantize=True) to merge in "
        "floating point"
    )


def _edits_in_order(deltas: Sequence[Delta]) -> list[Edit]:
    """Return edits in the order of folding: edits of outputs as they run, then edits of inputs in reverse.

    Every other edit of a projection reads the input that the edits of its input have changed.
    """
    edits = [edit for delta in deltas for edit in delta.all_edits()]
    of_input = [e for e in edits if e.place.target.side == "input"]
    return [e for e in edits if e.place.target.side not in ("input", "weight")] + of_input[::-1]


def _tensor_name(anatomy: Anatomy, edit: Edit, leaf: str) -> str:
    """Return the name of a parameter of an edit's module; "" if it has none, or a bias that cannot be changed."""
    tensor = anatomy.find_tensor(f"{edit.place.target.path}.{leaf}")
    return "" if tensor is None or (leaf == "bias" and tensor.quantized) else tensor.name


def _affine_change(edit: Edit, at: Place | None) -> Affine | str:
    """Return (s A, s b) of an edit, or the reason why it has none."""
    tensors = edit.full_tensors()
    if edit.modification.positions != ALL:
        return f"it acts at the tokens {edit.modification.positions!r}, and a weight at all of them"
    change, factor = edit.form.affine(tensors, at), edit.modification.compose.factor(tensors)
    if factor is None:
        kind = type(edit.modification.compose).__name__
        return f"{kind} has no factor: it depends on the input, and a weight does not"
    if change is None:
        kind = type(edit.modification.form).__name__
        return f"{kind} has no affine, the A and b of Δh = A u + b; a form that is not linear in its input has none"
    gain, shift = change
    return (None if gain is None else gain * factor, None if shift is None else shift * factor)


def _reason_against(edit: Edit, change: Affine, bias: str) -> str | None:
    gain, shift = change
    if gain is not None and edit.place.linear is None:
        return "it spans a whole sub-layer, which is no single weight"
    linear = edit.place.linear
    if linear is not None and not linear.product_only:
        return f"{edit.place.target.path!r} does more than the product, so that no weight has the same effect"
    if gain is not None and linear is not None and linear.shared_with:
        others = " and ".join(linear.shared_with)
        return f"the weight of {edit.place.target.path!r} is tied to {others}, which merging would change too"
    if shift is not None and not bias:
        return f"{edit.place.target.path!r} has no bias to fold it into, or one that cannot be changed"
    return None


def _fold(edit: Edit, change: Affine, old: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The new weight and bias of an edit's module."""
    columns, linear = edit.place.target.columns, edit.place.linear
    is_transposed = linear is not None and linear.transposed
    precision = torch.promote_types(old["weight"].dtype, torch.float32)
    new = {leaf: (t.t() if is_transposed else t).to(precision).clone() for leaf, t in old.items()}
    gain, shift = (None if t is None else t.to(device=old["weight"].device, dtype=precision) for t in change)

    def part(leaf: str) -> torch.Tensor:
        """The rows that the edit changes, as a view (groups, rows, …) if they are only a part."""
        whole = new[leaf]
        return whole if columns is None else whole.unflatten(0, (columns.groups, -1))[:, columns.start : columns.stop]

    def rows(value: torch.Tensor) -> torch.Tensor:
        return value if columns is None else value.unflatten(0, (columns.groups, -1))

    if edit.place.target.side == "input":
        if shift is not None:
            new["bias"] += new["weight"] @ shift
        if gain is not None:
            new["weight"] += new["weight"] * gain if gain.dim() == 1 else new["weight"] @ gain
    else:
        if gain is not None and edit.modification.insertion == "parallel":
            part("weight").add_(rows(torch.diag(gain) if gain.dim() == 1 else gain))
        elif gain is not None:
            for leaf in new:
                flat = part(leaf) if columns is None else part(leaf).flatten(0, 1)
                part(leaf).add_(rows((gain * flat.t()).t() if gain.dim() == 1 else gain @ flat))
        if shift is not None:
            part("bias").add_(rows(shift))
    return {leaf: (t.t() if is_transposed else t).to(old[leaf].dtype).contiguous() for leaf, t in new.items()}
