"""The parameters of a model as `Tensor` values: the area, role and tower of each, and whether a gradient reaches it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedModel

from ..compat import parameters_of, submodules_of
from ..errors import DeltuneError
from .graph import Node, Trace
from .quantizers import visible_parameters
from .skeleton import base_modules, base_parameters
from .tracing import meta_model
from .types import Anatomy, Tensor, is_inside

_OF_WEIGHTS = {"norm", "linear", "experts"}
"""Kinds of steps whose parameters are weights, also where a family freezes them when it makes a model."""


def model_tensors(
    model: PreTrainedModel,
    trace: Trace,
    anatomy: Anatomy,
    embedding: Collection[str],
    towers: Mapping[str, str],
    identity: Callable[[Any], int],
) -> tuple[Tensor, ...]:
    """Return every parameter of a model once, by an anatomy that has everything else.

    `embedding` are the paths of the modules that the first layers depend on, `towers` are the towers that the main
    input does not enter, by path, and `identity` is the same for tied tensors.
    """
    kinds = {n.path: n.kind for n in trace.nodes if n.path}
    of_batch = {n.path for n in trace.of_batch}
    read, reached = names_read_by(trace, trace.nodes), names_read_by(trace, trace.differentiable)
    without_call = _names_read_without_call(model, trace)
    with_positions = any(stack.positions for stack in anatomy.stacks)
    computed = tuple(f".{name}" for name in _computed_parameters(model)) if with_positions else ()
    of_parts = {t.name: t for part in anatomy.other_towers for t in part.tensors}
    vocabulary = None if anatomy.vocabulary is None else anatomy.vocabulary.path
    tensors = []
    for names, shape, quantized in _visible_tensors(model, identity):
        name, owners = names[0], [alias.rpartition(".")[0] for alias in names]
        executed = next((owner for owner in owners if owner in kinds), owners[0])
        kind = "linear" if executed == vocabulary else kinds.get(executed, "other")
        layer = next((i for i, one in enumerate(anatomy.layers) if name.startswith(f"{one.path}.")), None)
        role = role_of(kind, name.rpartition(".")[2])
        in_base = _is_in_base(name, anatomy)
        tower = tower_of(owners[0], towers) if towers and in_base and read.isdisjoint(names) else anatomy.tower
        # what another tower holds is reached in a pass on what that tower reads
        is_reached = not in_base or not reached.isdisjoint(names) or (bool(towers) and read.isdisjoint(names))
        if (of_part := of_parts.get(name)) is not None:
            role, is_reached = of_part.role, of_part.receives_gradient
        tensors.append(
            Tensor(
                name,
                shape,
                "layers" if layer is not None else area_of(name, owners, executed in kinds, anatomy, embedding),
                role,
                layer,
                aliases=tuple(names[1:]),
                batch_independent=executed in kinds and executed not in of_batch,
                read_without_call=not without_call.isdisjoint(names),
                computed=kind not in _OF_WEIGHTS and f".{name}".endswith(computed),
                tower=tower,
                receives_gradient=is_reached,
                quantized=quantized,
            )
        )
    return tuple(tensors)


def area_of(name: str, owners: Sequence[str], is_called: bool, anatomy: Anatomy, embedding: Collection[str]) -> str:
    """Return the area of a tensor outside the layers, whose modules the pass may call."""
    if any(is_inside(name, path) for path in anatomy.head):
        return "head"
    if any(owner in embedding for owner in owners):
        return "embedding"
    if anatomy.pooler and is_inside(name, anatomy.pooler):
        return "pooler"
    if not _is_in_base(name, anatomy):
        return "vocabulary"
    return "final" if is_called else "other"


def role_of(kind: str, leaf: str) -> str:
    """Return the role of a tensor by the kind of the step that reads it, and its name in its module."""
    if kind == "embedding":
        return "embedding"
    term = "bias" if leaf == "bias" else "gain" if kind == "norm" else "weight"
    return f"{kind}.{term}" if kind in ("norm", "linear") else term


def tower_of(owner: str, towers: Mapping[str, str]) -> str:
    """Return the tower of a tensor that a pass on the main input does not read, by the path of its module."""
    return next((towers[path] for path in paths_around(owner) if path in towers), "projector")


def names_read_by(trace: Trace, nodes: Iterable[Node]) -> set[str]:
    """Return the names of the parameters that steps of a forward pass have read."""
    names: set[str] = set()
    for node in nodes:
        if node.module is not None:
            names.update(f"{node.path}.{leaf}" for leaf in parameters_of(node.module))
        names.update(name for tensor in node.all_inputs if (name := trace.parameters.get(id(tensor))))
    return names


def paths_around(path: str) -> list[str]:
    """Return a path and the paths of the modules around it, the innermost first."""
    parts = path.split(".")
    return [".".join(parts[:size]) for size in range(len(parts), 0, -1)]


def _is_in_base(name: str, anatomy: Anatomy) -> bool:
    return not anatomy.base or name.startswith(f"{anatomy.base}.")


def _visible_tensors(
    model: PreTrainedModel, identity: Callable[[Any], int]
) -> Iterable[tuple[list[str], tuple[int, ...], str]]:
    """Return the names, the shape and the quantisation of every parameter."""
    tensors: dict[int, tuple[list[str], tuple[int, ...], str]] = {}
    for path, module in base_modules(model, remove_duplicate=False):
        for leaf, (parameter, shape, quantized) in visible_parameters(module).items():
            names = tensors[key][0] if (key := identity(parameter)) in tensors else []
            tensors[key] = [*names, f"{path}.{leaf}".lstrip(".")], shape, quantized
    return tensors.values()


def _names_read_without_call(model: PreTrainedModel, trace: Trace) -> set[str]:
    """Return the names of parameters that the forward pass read without calling the module that holds them."""
    names = set()
    for node in trace.nodes:
        for tensor in node.all_inputs:
            name = trace.parameters.get(id(tensor))
            if name is not None:
                owner = model.get_submodule(name.rpartition(".")[0])
                if not submodules_of(owner) and node.module is not owner:
                    names.add(name)
    return names


def _computed_parameters(model: PreTrainedModel) -> list[str]:
    """Return the names of the parameters that a new AutoModel of this configuration does not train (sinusoids).

    The flags of `model` itself cannot be used: loading a checkpoint does not set them, and a user may have frozen it.
    """
    fresh = model
    if not all(p.is_meta for _, p in base_parameters(model)):
        try:
            fresh = meta_model(model.config)
        except DeltuneError:
            return []  # AutoModel has no class for this configuration
    return [name for name, p in base_parameters(fresh) if not p.requires_grad]
