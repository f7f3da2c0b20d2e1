"""Parameters that are not read, or not trained, as others are: past their module's forward, or without a gradient."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from ..errors import DeltuneError
from .graph import Trace
from .trace import skeleton


def read_directly(model: torch.nn.Module, trace: Trace) -> set[str]:
    """Names of the parameters of modules without children that some other step of the pass read."""
    direct = set()
    for node in trace.nodes:
        for tensor in node.inputs:
            name = trace.parameters.get(id(tensor))
            if name is not None:
                owner = model.get_submodule(name.rpartition(".")[0])
                if not owner._modules and node.module is not owner:
                    direct.add(name)
    return direct


def computed(model: PreTrainedModel) -> tuple[str, ...]:
    """Names, in AutoModel, of the parameters that a fresh model of this configuration does not train (sinusoids).

    A model read from a checkpoint does not say so, and one that a user froze says it of everything.
    """
    fresh = model
    if not all(p.is_meta for p in model.parameters()):
        try:
            fresh = skeleton(model.config)
        except DeltuneError:
            return ()  # no class of AutoModel's
    return tuple(name for name, p in fresh.named_parameters() if not p.requires_grad)
