"""Folding a delta into the weights where that is exact: projections, biases, and tensors tuned in place."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .algebra import Gate, Scale
from .anatomy import Anatomy
from .edits import Delta, Edit
from .errors import all_problems
from .forms import LowRank, Vector

Values = Callable[[str], torch.Tensor]


def merged(anatomy: Anatomy, delta: Delta, original: Values, own: Values) -> dict[str, torch.Tensor]:
    """The weights into which a delta folds, by name; `original` gives the base's values and `own` the delta's.

    W + s (W_down W_up) for a low-rank modification of a projection, b + v for a vector, the tuned value for a tensor
    tuned in place; sums in at least float32. Error: every term that is no weight, named.
    """
    reasons = {f"{e.modification!r}: {why}": None for e in delta.all_edits() if (why := _obstacle(anatomy, e))}
    if reasons:
        raise all_problems(f"{delta.method!r} cannot be merged into the weights", list(reasons))
    with torch.no_grad():
        values = {name: own(name).detach() for name in delta.owned}
        for edit in delta.all_edits():
            name = _tensor_name(anatomy, edit, "bias" if isinstance(edit.modification.form, Vector) else "weight")
            values[name] = _folded(edit, values.get(name, original(name).detach()))
    return values


def _tensor_name(anatomy: Anatomy, edit: Edit, leaf: str) -> str:
    """The name under which the model holds a tensor of the edit's projection."""
    wanted = f"{edit.place.target.path}.{leaf}"
    return next((t.name for t in anatomy.tensors if wanted in (t.name, *t.aliases)), "")


def _obstacle(anatomy: Anatomy, edit: Edit) -> str | None:
    modification = edit.modification
    if isinstance(modification.compose, Gate):
        return "its gate depends on the input"
    if isinstance(modification.form, Vector):
        if edit.place.target.side == "output" and _tensor_name(anatomy, edit, "bias"):
            return None
        return f"{edit.place.target.path!r} has no bias to fold it into"
    if not isinstance(modification.form, LowRank):
        return f"a {type(modification.form).__name__} is not linear in its input"
    if modification.insertion != "parallel" or edit.place.linear is None:
        return "it spans a whole sub-layer, which is no single weight"
    return None


def _folded(edit: Edit, old: torch.Tensor) -> torch.Tensor:
    """The new value of the one tensor that an edit changes."""
    tensors, compose = edit.kept(), edit.modification.compose
    leaf = "bias" if isinstance(edit.modification.form, Vector) else "weight"
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
    return (new.T if transposed else new).to(old.dtype).contiguous()
