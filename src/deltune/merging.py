"""Folding a delta into the weights where that is exact: projections, biases, and tensors tuned in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from .anatomy import Anatomy
from .compositions import Add, Gate, Scale, SigmoidGate
from .edits import Delta, Edit
from .errors import all_problems
from .forms import LowRank, Rescale, Vector

Values = Callable[[str], torch.Tensor]


def merged(
    anatomy: Anatomy, delta: Delta, original: Values, own: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The weights into which a delta folds, by name; `original` gives the base's values, `own` has the delta's.

    W + s (W_down W_up) for a low-rank modification of a projection, b + v for a vector, the tuned value for a tensor
    tuned in place; sums in at least float32. Error: every term that is no weight, named.
    """
    reasons = {f"{e.modification!r}: {why}": None for e in delta.all_edits() if (why := _obstacle(anatomy, e))}
    if reasons:
        raise all_problems(f"{delta.method!r} cannot be merged into the weights", list(reasons))
    with torch.no_grad():
        values = {name: tensor.detach() for name, tensor in own.items()}
        # a rescaled input is what every other edit of that projection reads, so it folds last
        for edit in sorted(delta.all_edits(), key=lambda e: e.place.target.side == "input"):
            for leaf in _leaves(anatomy, edit):
                name = _tensor_name(anatomy, edit, leaf)
                values[name] = _folded(edit, leaf, values.get(name, original(name).detach()))
    return values


def _tensor_name(anatomy: Anatomy, edit: Edit, leaf: str) -> str:
    """The name under which the model holds a tensor of the edit's projection."""
    wanted = f"{edit.place.target.path}.{leaf}"
    return next((t.name for t in anatomy.tensors if wanted in (t.name, *t.aliases)), "")


def _obstacle(anatomy: Anatomy, edit: Edit) -> str | None:
    modification = edit.modification
    if isinstance(modification.compose, Gate | SigmoidGate):
        return "its gate depends on the input"
    if isinstance(modification.form, Rescale) and edit.place.linear is not None:
        plain = modification.insertion == "sequential" and type(modification.compose) is Add
        return None if plain else "a rescaling folds when it is sequential and added"
    if isinstance(modification.form, Vector):
        if edit.place.target.side == "output" and _tensor_name(anatomy, edit, "bias"):
            return None
        return f"{edit.place.target.path!r} has no bias to fold it into"
    if not isinstance(modification.form, LowRank):
        return f"a {type(modification.form).__name__} is not linear in its input"
    if modification.insertion != "parallel" or edit.place.linear is None:
        return "it spans a whole sub-layer, which is no single weight"
    return None


def _leaves(anatomy: Anatomy, edit: Edit) -> tuple[str, ...]:
    """Which of the projection's tensors an edit changes."""
    if isinstance(edit.modification.form, Vector):
        return ("bias",)
    rescaled = isinstance(edit.modification.form, Rescale) and edit.place.target.side == "output"
    return ("weight", "bias") if rescaled and _tensor_name(anatomy, edit, "bias") else ("weight",)


def _folded(edit: Edit, leaf: str, old: torch.Tensor) -> torch.Tensor:
    """The new value of one tensor of the edit's projection."""
    compose, columns = edit.modification.compose, edit.place.target.columns
    wide = torch.promote_types(old.dtype, torch.float32)
    transposed = edit.place.linear is not None and edit.place.linear.transposed and leaf == "weight"
    new = (old.T if transposed else old).to(wide).clone()
    part = new if columns is None else new.unflatten(0, (columns.groups, -1))[:, columns.start : columns.stop]
    t = {name: tensor.to(device=old.device, dtype=wide) for name, tensor in edit.dense().items()}

    def rows(value: torch.Tensor) -> torch.Tensor:
        return value.unflatten(0, (columns.groups, -1)) if columns else value

    if isinstance(edit.modification.form, Rescale):  # w ⊙ (x W + b) on the output side, (w ⊙ x) W on the input side
        gain = t["gain"] if edit.place.target.side == "input" else rows(t["gain"])
        part *= gain[..., None] if leaf == "weight" and edit.place.target.side == "output" else gain
    else:
        change = t["vector"] if leaf == "bias" else t["up"] @ t["down"]
        part += rows(change) * (t["scale"] if "scale" in t else compose.value if isinstance(compose, Scale) else 1.0)
    return (new.T if transposed else new).to(old.dtype).contiguous()
