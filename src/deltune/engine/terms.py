"""How far training moved each tensor that a model had before: mean |after − before|, tensor by tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ..anatomy.observe import inspect
from ..live.attaching import load
from ..sources.models import load_model


def changes(model: str, kind: str, delta: str | Path) -> list[dict[str, Any]]:
    """For every gain and bias of the layers that the delta trains: layer, module, term and mean absolute change.

    module: what its norm belongs to (attention, ffn); norms outside the layers have layer None. Source: LN figure 3.
    Errors: whatever loading the model or the delta raises.
    """
    base = load_model(model, kind, None, "float32")
    anatomy = inspect(base)
    belongs = {norm.path: norm for layer in anatomy.layers for norm in layer.norms}
    belongs |= {norm.path: norm for norm in anatomy.norms}
    terms = {"norm.gain": "gain", "norm.bias": "bias"}
    before = {t.name: base.get_parameter(t.name).detach().clone() for t in anatomy.tensors if t.role in terms}
    tuned = load(base, delta)
    found = []
    for tensor in anatomy.tensors:
        if tensor.role not in terms:
            continue
        after = base.get_parameter(tensor.name).detach()
        if torch.equal(after, before[tensor.name]):
            continue
        norm = belongs[tensor.name.rpartition(".")[0]]
        found.append(
            {
                "layer": tensor.layer,
                "module": " and ".join(dict.fromkeys(norm.of)) or norm.place,
                "term": terms[tensor.role],
                "value": (after - before[tensor.name]).abs().mean().item(),
            }
        )
    tuned.detach()
    return found
