"""Files of other libraries in our terms: reading a folder, and a method with its numbers from places and tensors.

A dialect (peft_files, adapterhub_files) says which tensor belongs to which place of the anatomy and what its options
mean there; everything else, from finding the shortest expression to listing what nobody asked for, is here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ..anatomy.types import Anatomy, Columns
from ..errors import DeltuneError, error_from_problems
from ..filesystem import find_file, read_json_object
from ..methods.resolve import ResolvedEdit, resolve, selected_tensors
from ..methods.sites import EditLocation, resolve_locations
from ..methods.spec import ATTENTIONS, Method, MethodSum, Modification, Selection
from ..tensor_files import load_float_tensors

CONFIG_FILE = "adapter_config.json"
"""The file that both PEFT and AdapterHub keep their options in."""

NamedTensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class ForeignFolder:
    """What a folder of another library holds: options, tensors by their names there, and a head kept apart."""

    where: Path
    options: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    head_options: dict[str, Any] = field(default_factory=dict)
    head: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Translation:
    """A method, its numbers by the names of our files (without the head's), and the head's by their names here."""

    method: Method
    tensors: dict[str, torch.Tensor]
    head: dict[str, torch.Tensor] = field(default_factory=dict)
    labels: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlacedTensors:
    """One modification (everywhere) at one place, with the form's and the composition's tensors."""

    modification: Modification
    place: EditLocation
    tensors: NamedTensors


@dataclass(frozen=True)
class ExportedDelta:
    """A delta for a dialect to write: edits with their dense tensors by key, tensors tuned in place, the head's.

    original: the base's value of a tensor; windowed: some attention of the model sees a window only.
    """

    anatomy: Anatomy
    edits: tuple[ResolvedEdit, ...]
    dense: Mapping[str, NamedTensors]
    in_place: NamedTensors
    head: NamedTensors
    original: Callable[[str], torch.Tensor]
    sliding_window: bool = False


class UnusedTensors:
    """Tensors that were not taken yet, by their names in this model. What is left at the end is an error."""

    def __init__(self, anatomy: Anatomy, tensors: NamedTensors, stem: str = "") -> None:
        """stem: what every name in the file begins with, beside the model's own."""
        self.anatomy = anatomy
        translate = _name_translator(anatomy, [name.removeprefix(stem) for name in tensors])
        self.names = {translate(name.removeprefix(stem)): name for name in tensors}
        self.tensors = {translate(name.removeprefix(stem)): tensor for name, tensor in tensors.items()}

    def take(self, name: str, axes: int | None = None) -> torch.Tensor | None:
        """The tensor of a name, once, or None. Raises DeltuneError where it has another number of axes."""
        file_name = self.names.pop(name, name)
        tensor = self.tensors.pop(name, None)
        if tensor is not None and axes is not None and tensor.dim() != axes:
            raise DeltuneError(f"tensor {file_name} has shape {tuple(tensor.shape)}, it should have {axes} axes")
        return tensor

    def take_all(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Those of the wanted names that there are."""
        return {name: tensor for name in names if (tensor := self.take(name)) is not None}

    def check(self, folder: Path, cause: DeltuneError | None = None) -> None:
        """Error: tensors that nothing here asked for, after what went wrong before."""
        shown = sorted(self.names.values())
        problems = [] if cause is None else [str(cause)]
        problems += [f"extra tensor {name}" for name in shown[:10]]
        problems += [f"and {len(shown) - 10} more"] if len(shown) > 10 else []
        if shown and self.anatomy.hidden:
            problems.append(f"not visible in this model: {'; '.join(self.anatomy.hidden[:3])}")
        if shown and not self.anatomy.head:
            problems.append("this model has no head; load it with the head that the file was trained with")
        if problems:
            raise error_from_problems(f"{folder} does not fit this model", problems)


def _name_translator(anatomy: Anatomy, names: Iterable[str]) -> Callable[[str], str]:
    """A foreign name as one of this model: the base model may stand under another name there, or under none."""
    base = f"{anatomy.base}." if anatomy.base else ""
    inner = f"{anatomy.layers[0].path.removeprefix(base)}."
    prefix = next((n.partition(inner)[0] for n in names if inner in f".{n}"), base)
    head_prefixes = tuple(f"{path}." for path in anatomy.head)
    if prefix == base:
        return lambda name: name
    if prefix:
        return lambda name: base + name.removeprefix(prefix) if name.startswith(prefix) else name
    return lambda name: name if name.startswith(head_prefixes) else base + name


# -- folders ----------------------------------------------------------------------------------------------------------


def has_file(folder: str | Path, name: str) -> bool:
    """Whether a folder holds a file of a name, be it a link that is not followed."""
    try:
        return (Path(folder) / name).is_file()
    except (OSError, ValueError):
        return False


def is_foreign(folder: str | Path) -> bool:
    """Whether a folder holds the options of PEFT or AdapterHub."""
    return has_file(folder, CONFIG_FILE)


def read_options(folder: Path, name: str = CONFIG_FILE) -> dict[str, Any]:
    """The options in a JSON file of a folder. Raises DeltuneError where it is missing, no object, or a link outside."""
    path = find_file(folder, name)
    if path is None:
        raise DeltuneError(f"{folder / name} is missing; the folder is incomplete")
    return read_json_object(path)


def read_tensors(folder: Path, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """The tensors of the first of the files that is there: safetensors, or torch's format, of which tensors alone are
    read.

    Raises:
        DeltuneError: None is there, or it is a link that leads out of the folder; it is truncated, or holds anything
            but floating-point tensors.
    """
    path = next((path for name in names if (path := find_file(folder, name)) is not None), None)
    if path is None:
        raise DeltuneError(f"{folder} has its options, but none of {', '.join(names)}; the folder is incomplete")
    return load_float_tensors(path)


# -- a method from its places -----------------------------------------------------------------------------------------


def locations_or_none(anatomy: Anatomy, modification: Modification) -> list[EditLocation]:
    """The places of a modification, none where this model cannot have it."""
    try:
        return resolve_locations(anatomy, modification)
    except DeltuneError:
        return []


def without_scope(modification: Modification) -> Modification:
    return replace(modification, layers="all", stack="all", attention="all", optional=False)


def method_from_pieces(
    anatomy: Anatomy, pieces: Sequence[PlacedTensors], candidates: Iterable[Callable[[], Method]] = ()
) -> Method:
    """The method with these pieces and no other: one of the known ones, else the fewest modifications.

    Error: a set of places that no modification chooses, such as one of a gated FFN's two input linears.
    """
    required = {(piece.modification, piece.place.name) for piece in pieces}
    for make in candidates:
        try:
            method = make()
            if _locations_of(anatomy, method) == required:
                return method
        except DeltuneError:
            continue
    modifications: list[Method] = []
    for modification in dict.fromkeys(piece.modification for piece in pieces):
        remaining = {name for other, name in required if other == modification}
        for candidate in _scoped_candidates(anatomy, modification, remaining):
            names = {place.name for place in locations_or_none(anatomy, candidate)}
            if names and names <= remaining:
                modifications.append(candidate)
                remaining -= names
        if remaining:
            names_left = ", ".join(sorted(remaining)[:4])
            raise DeltuneError(
                f"the file changes {names_left} alone; site {modification.site!r} takes what is beside it too"
            )
    return modifications[0] if len(modifications) == 1 else MethodSum(tuple(modifications))


def _scoped_candidates(anatomy: Anatomy, modification: Modification, names: set[str]) -> Iterable[Modification]:
    """The modification on more and more special choices of places."""
    stacks = [stack.name for stack in anatomy.stacks]
    kinds = ATTENTIONS if modification.site in ("heads", "attention", "query", "key", "value", "output") else ("all",)
    for stack in ("all", *stacks):
        for kind in kinds:
            name_parts = [n.split(".") for n in names if stack in ("all", n.split(".")[0])]
            yield replace(modification, stack=stack, attention=kind)
            layers = sorted({int(parts[1]) for parts in name_parts if len(parts) > 1 and parts[1].isdigit()})
            if layers and not anatomy.shared:
                yield replace(modification, stack=stack, attention=kind, layers=tuple(layers))
    if not anatomy.shared:
        for stack in stacks:
            for index in sorted({int(n.split(".")[1]) for n in names if n.split(".")[1].isdigit()}):
                for kind in kinds:
                    yield replace(modification, stack=stack, attention=kind, layers=(index,))


def _locations_of(anatomy: Anatomy, method: Method) -> set[tuple[Modification, str]]:
    return {(without_scope(e.modification), e.place.name) for e in resolve(anatomy, method, lambda: 0).edits}


def tensors_by_file_name(anatomy: Anatomy, method: Method, pieces: Sequence[PlacedTensors]) -> dict[str, torch.Tensor]:
    """The tensors of the pieces under their names in our file."""
    by_place = {(piece.modification, piece.place.name): piece for piece in pieces}
    tensors: dict[str, torch.Tensor] = {}
    for edit in resolve(anatomy, method, lambda: 0).edits:
        piece = by_place[without_scope(edit.modification), edit.place.name]
        tensors |= {f"edit.{edit.key}.{leaf}": tensor for leaf, tensor in piece.tensors.items()}
    return tensors


def method_selecting(anatomy: Anatomy, names: set[str], candidates: Iterable[Callable[[], Method]]) -> Method:
    """The first method that trains exactly these tensors in place. Error: none does."""
    for make in candidates:
        try:
            method = make()
            chosen = {
                t.name for part in method.parts if isinstance(part, Selection) for t in selected_tensors(anatomy, part)
            }
        except DeltuneError:
            continue
        if chosen == names:
            return method
    raise DeltuneError(f"no selection of norms takes exactly {', '.join(sorted(names)[:4])} (of {len(names)})")


def rows_of_columns(tensor: torch.Tensor, columns: Columns | None) -> torch.Tensor:
    """The rows of a fused projection's tensor (out, …) that `columns` names, in order."""
    if columns is None:
        return tensor
    rows = tensor.unflatten(0, (columns.groups, -1))[:, columns.start : columns.stop]
    return rows.flatten(0, 1).contiguous()
