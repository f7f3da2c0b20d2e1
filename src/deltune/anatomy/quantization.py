"""Which linears of a model are quantised and how, what they store, and which quantised models cannot be tuned."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..compat import FakeTensor, buffers_of, is_packed_for_cpu, parameters_of, storage_id
from ..errors import DeltuneError
from .quantizers import QUANTIZERS, Quantizer, bias_of, find_quantizer
from .skeleton import base_modules, modules_without_paths

TRAINABLE_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""The dtypes of weights that can be tuned."""

_QUANTIZED_BY_TORCH = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized")
"""Where torch has its quantised modules, through which no gradient passes."""


def quantized_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module, Quantizer]]:
    """Iterate over the quantised linears of a model, with their paths and their rows of the table."""
    for path, module in base_modules(model):
        quantizer = find_quantizer(module)
        if quantizer is not None:
            yield path, module, quantizer


def quantization_of(model: nn.Module) -> str:
    """Return how a model is quantised, such as "bitsandbytes nf4"; "" for one that is not."""
    names = {q.name(module) for module in modules_without_paths(model) if (q := find_quantizer(module)) is not None}
    return " and ".join(sorted(names))


def stored_bytes(model: nn.Module) -> int:
    """Return the bytes that a model's own parameters and buffers take, quantised weights as they are stored."""
    seen: dict[int, int] = {}
    for _, module in base_modules(model):
        for tensor in (*parameters_of(module).values(), *buffers_of(module).values()):
            _add_storages(tensor, seen)
        quantizer = find_quantizer(module)
        if quantizer is not None:
            for value in (bias_of(module), *(module.__dict__.get(name) for name in quantizer.state)):
                _add_storages(value, seen)
    return sum(seen.values())


def _add_storages(value: Any, seen: dict[int, int]) -> None:
    """Add the bytes of the tensors in a value, by storage: of a tensor that wraps others, of those."""
    if isinstance(value, torch.Tensor):
        inner = getattr(value, "__tensor_flatten__", None)
        if inner is not None:
            for name in inner()[0]:
                _add_storages(getattr(value, name), seen)
        else:
            seen[storage_id(value)] = value.numel() * value.element_size()
            for attribute in list(value.__dict__.values()):
                _add_storages(attribute, seen)
    elif type(value) is dict:
        for entry in list(value.values()):
            _add_storages(entry, seen)
    elif value is not None and type(value).__module__.startswith("bitsandbytes.") and not isinstance(value, nn.Module):
        for attribute in list(vars(value).values()):
            _add_storages(attribute, seen)


def check_quantization(model: nn.Module) -> None:
    """Check by the types of parameters that a model has plain weights, or linears of the table; nothing is called."""
    inside: set[nn.Module] = set()
    for path, module in base_modules(model):
        if module in inside:
            continue
        if type(module).__module__.startswith(_QUANTIZED_BY_TORCH):
            name = f"{type(module).__module__}.{type(module).__name__}"
            _refuse(model, f"{path or 'the model'} is a {name}, through which no gradient passes")
        if find_quantizer(module) is not None:
            inside.update(module.modules())
            continue
        for leaf, parameter in list(parameters_of(module).items()):
            if parameter is None:
                continue
            name = f"{path}.{leaf}".lstrip(".")
            if not is_unquantized(parameter):
                _refuse(model, f"{name} of a {type(module).__name__} is a {type(parameter).__name__}")
            if parameter.dtype not in TRAINABLE_DTYPES:
                _refuse(model, f"{name} of a {type(module).__name__} is {parameter.dtype}")


def check_gradients_pass(model: nn.Module) -> None:
    """Check that gradients pass through every quantised linear, so that what is below it can be trained."""
    known: dict[Any, str] = {}
    for path, module, quantizer in quantized_modules(model):
        key = (quantizer.name(module), is_packed_for_cpu(module))
        if key not in known:
            known[key] = quantizer.no_gradient(module)
        if known[key]:
            raise DeltuneError(
                f"this {type(model).__name__} cannot be tuned: no gradient passes through {path} "
                f"({quantizer.name(module)}), {known[key]}"
            )


def is_unquantized(parameter: Any) -> bool:
    """Return whether a parameter is a plain tensor, one without numbers, or one process's shard of one (FSDP2)."""
    if type(parameter) in (nn.Parameter, torch.Tensor, FakeTensor):
        return True
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(parameter, tensors.DTensor)


def _refuse(model: nn.Module, because: str) -> None:
    libraries = ", ".join(dict.fromkeys(quantizer.library for quantizer in QUANTIZERS))
    raise DeltuneError(
        f"the weights of this {type(model).__name__} are quantised in a way that deltune cannot tune ({because}): load "
        f"the model without quantisation, or with linears that are quantised by {libraries}, and quantise a merged "
        "model afterwards"
    )
