"""Weights with few trainable entries, weights that several edits share, and the slots of a model's parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import nn

from ..methods.compositions import Composition
from ..methods.masks import Mask


class SparseParameter(nn.Module):
    """A weight of which only some entries are parameters: `values` at the flat positions `index`."""

    index: torch.Tensor

    def __init__(self, shape: tuple[int, ...], index: np.ndarray) -> None:
        super().__init__()
        self.shape = shape
        self.values: torch.Tensor
        if len(index):
            self.values = nn.Parameter(torch.empty(len(index)))
        else:  # nothing of it is trained, so there is nothing to optimise
            self.register_buffer("values", torch.empty(0), persistent=False)
        self.register_buffer("index", torch.from_numpy(index))

    def initialize(self, dense: torch.Tensor) -> None:
        """Take the initial values from a dense weight, unless this is on the meta device."""
        if self.values.is_meta:
            return
        with torch.no_grad():
            flat = dense.reshape(-1)
            self.values.copy_(flat[self.index.to(flat.device)])

    def on(self, base: torch.Tensor) -> torch.Tensor:
        """Return `base` with the trained values in their positions."""
        return base.reshape(-1).index_copy(0, self.index, self.values.to(base.dtype)).view(self.shape)

    def final(self, base: torch.Tensor) -> torch.Tensor:
        """Return the same as `on`: it does not depend on the training mode."""
        return self.on(base)


class SharedParameter(nn.Module):
    """A tensor that several edits share: dense, or under a mask, then 0 at all other entries."""

    def __init__(self, shape: tuple[int, ...], mask: Mask | None, masked: bool) -> None:
        super().__init__()
        self.sparse: SparseParameter | None = None
        if masked:
            index = mask.indices() if mask is not None else {}
            self.sparse = SparseParameter(shape, next(iter(index.values()), np.zeros(0, dtype=np.int64)))
        else:
            self.dense = nn.Parameter(torch.empty(shape))

    def initialize(self, compose: Composition, name: str) -> None:
        dense = self.dense if self.sparse is None else torch.empty(self.sparse.shape)
        compose.initialize({name: dense})
        if self.sparse is not None:
            self.sparse.initialize(dense)

    def value(self) -> torch.Tensor:
        """Return the dense tensor."""
        if self.sparse is None:
            return self.dense
        return self.sparse.on(self.sparse.values.new_zeros(self.sparse.shape))


def parameter_slots(model: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    """Return all modules, with the parameter's name in them, that hold each parameter; a tied tensor has several."""
    slots: dict[int, list[tuple[nn.Module, str]]] = {}
    names: dict[str, int] = {}
    for path, module in model.named_modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                slots.setdefault(id(parameter), []).append((module, leaf))
                names[f"{path}.{leaf}".strip(".")] = id(parameter)
    return {name: slots[key] for name, key in names.items()}


@contextlib.contextmanager
def replaced_parameters(model: nn.Module, replacements: Mapping[nn.Parameter, nn.Parameter]) -> Iterator[None]:
    """Replace parameters in every module that holds them, inside the block.

    Args:
        model: The model.
        replacements: For each parameter, the one to use instead.
    """
    slots = [
        (module, leaf, parameter)
        for module in (model.modules() if replacements else ())
        for leaf, parameter in module._parameters.items()
        if parameter is not None and parameter in replacements
    ]
    try:
        for module, leaf, parameter in slots:
            module._parameters[leaf] = replacements[parameter]
        yield
    finally:
        for module, leaf, parameter in slots:
            module._parameters[leaf] = parameter
