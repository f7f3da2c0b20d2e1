"""Refuses models whose weights are quantised: their stored numbers are not the weights that would be tuned."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from ..errors import DeltuneError
from .skeleton import base_modules

TRAINABLE_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""The dtypes of weights that can be tuned."""


def check_not_quantized(model: nn.Module) -> None:
    """Check by the types of its parameters that a model is not quantised; no method of a tensor is called.

    Raises:
        DeltuneError: The weights are quantised, by transformers, bitsandbytes, torchao or torch itself.
    """
    if getattr(model, "hf_quantizer", None) is not None:
        _refuse(model, "it was loaded with a quantization_config")
    for path, module in base_modules(model):
        if type(module).__module__.startswith(("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized")):
            _refuse(model, f"{path or 'the model'} is a {type(module).__module__}.{type(module).__name__}")
        for leaf, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            name = f"{path}.{leaf}".lstrip(".")
            if not is_unquantized(parameter):
                _refuse(model, f"{name} is a {type(parameter).__name__}")
            if parameter.dtype not in TRAINABLE_DTYPES:
                _refuse(model, f"{name} is {parameter.dtype}")


def is_unquantized(parameter: Any) -> bool:
    """Whether a parameter is a plain tensor, or one process's shard of one (FSDP2)."""
    if type(parameter) in (nn.Parameter, torch.Tensor):
        return True
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(parameter, tensors.DTensor)


def _refuse(model: nn.Module, because: str) -> None:
    raise DeltuneError(
        f"the weights of this {type(model).__name__} are quantised ({because}), and deltune tunes weights of float32, "
        "bfloat16, float16 or float64: load the model without quantisation, and quantise a merged model afterwards"
    )
