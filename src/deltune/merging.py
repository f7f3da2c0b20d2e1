"""Folding a delta into the weights where that is exact: projections, biases, and tensors tuned in place."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from .algebra import Gate, Scale
from .edits import Edit
from .errors import all_problems
from .forms import LowRank, Vector

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .attaching import Tuned


def merge(tuned: Tuned) -> PreTrainedModel:
    """Fold the delta in use into the model's weights and take every delta off; returns the plain model.

    W + s (W_down W_up) for a low-rank modification of a projection, b + v for a vector, the tuned value for a tensor
    tuned in place; sums in at least float32. Errors: every term that is no weight, named; the model is unchanged.
    """
    delta = tuned.delta()
    reasons: dict[str, list[str]] = {}
    for edit in delta.all_edits():
        if why := _obstacle(tuned, edit):
            reasons.setdefault(f"{edit.modification!r}: {why}", []).append(edit.place.name)
    if reasons:
        raise all_problems(f"{delta.method!r} cannot be merged into the weights", list(reasons))
    with torch.no_grad():
        merged = {name: tuned.value(delta, name).detach() for name in delta.owned}
        for edit in delta.all_edits():
            name, value = _folded(tuned, edit, merged)
            merged[name] = value
    labels = delta.labels
    model = tuned.detach()
    for name, value in merged.items():
        before = tuned.original(name)
        tuned.put(name, nn.Parameter(value.clone(), requires_grad=before.requires_grad))
    if labels is not None:
        tuned.label(model, labels)
    return model


def _linear_name(tuned: Tuned, edit: Edit, leaf: str) -> str:
    """The name under which the model holds a tensor of the edit's projection."""
    wanted = f"{edit.place.target.path}.{leaf}"
    return next((t.name for t in tuned.anatomy.tensors if wanted in (t.name, *t.aliases)), "")


def _obstacle(tuned: Tuned, edit: Edit) -> str | None:
    modification = edit.modification
    if isinstance(modification.compose, Gate):
        return "its gate depends on the input"
    if isinstance(modification.form, Vector):
        if edit.place.target.side == "output" and _linear_name(tuned, edit, "bias"):
            return None
        return f"{edit.place.target.path!r} has no bias to fold it into"
    if not isinstance(modification.form, LowRank):
        return f"a {type(modification.form).__name__} is not linear in its input"
    if modification.insertion != "parallel" or edit.place.linear is None:
        return "it spans a whole sub-layer, which is no single weight"
    return None


def _folded(tuned: Tuned, edit: Edit, merged: dict[str, torch.Tensor]) -> tuple[str, torch.Tensor]:
    """The new value of the one tensor that an edit changes."""
    tensors, compose = edit.kept(), edit.modification.compose
    leaf = "bias" if isinstance(edit.modification.form, Vector) else "weight"
    name = _linear_name(tuned, edit, leaf)
    old = merged.get(name, tuned.original(name).detach())
    wide = torch.promote_types(old.dtype, torch.float32)
    change = tensors["vector"] if leaf == "bias" else tensors["up"].to(wide) @ tensors["down"].to(wide)
    scale = tensors["scale"].to(wide) if "scale" in tensors else compose.value if isinstance(compose, Scale) else 1.0
    change = change.to(device=old.device, dtype=wide) * scale
    transposed = edit.place.linear is not None and edit.place.linear.transposed and leaf == "weight"
    new = (old.T if transposed else old).to(wide).clone()
    columns = edit.place.target.columns
    if columns is None:
        new += change
    else:
        part = new.unflatten(0, (columns.groups, -1))[:, columns.start : columns.stop]
        part += change.unflatten(0, (columns.groups, -1))
    return name, (new.T if transposed else new).to(old.dtype).contiguous()
