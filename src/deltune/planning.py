"""What a method comes down to on one model: its edits with their places, and the tensors it selects."""

from __future__ import annotations

from dataclasses import dataclass

from .algebra import Method, Modification, Selection
from .anatomy import Anatomy, Norm, Tensor
from .errors import DeltuneError, all_problems
from .sites import Place, chosen_layers, places


@dataclass(frozen=True)
class Plan:
    """What a method comes down to on one model: edits (term index, modification, place) and the selected tensors."""

    edits: tuple[tuple[int, Modification, Place], ...]
    selected: tuple[Tensor, ...]

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
    if not selection.optional and (not found or len(missing) == len(selection.roles)):
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
