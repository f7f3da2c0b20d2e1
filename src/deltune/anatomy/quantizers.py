"""The formats of quantised linear layers: how each one's sizes, dequantised weight and stored bytes are read.

`QUANTIZERS` is a table with one row for each way of quantising. Everything else in deltune sees a quantised linear as a
linear of `in_features` and `out_features` whose weight cannot be trained, and asks this table alone for anything more.
No library is imported here: a model can only have layers of a library that somebody has imported.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..compat import (
    dequantize_packed_4bit,
    int8_codes_and_scales,
    is_packed_for_cpu,
    parameters_of,
    quantize_4bit_like,
    replace_layer_of_4bit,
    replace_parameters,
    requantize_int8,
)
from ..errors import DeltuneError, error_summary


@dataclass(frozen=True)
class Quantizer:
    """One way of quantising a linear layer."""

    library: str  # the library that made the layer
    matches: Callable[[nn.Module], bool]  # whether a module is such a layer
    kind: Callable[[Any], str]  # what the weight is stored as, such as "nf4"
    # returns the weight in floating point (out_features, in_features), as products are computed with. It changes
    # nothing.
    dequantize: Callable[[Any], torch.Tensor]
    # quantises a weight in floating point and sets it in a copy of the layer, which shares no dictionary with it
    quantize: Callable[[Any, torch.Tensor], None]
    state: tuple[str, ...] = ()  # the attributes of a layer beside its parameters that `quantize` changes
    # why no gradient passes from the output of a layer to its input; "" where one does
    no_gradient: Callable[[Any], str] = lambda module: ""
    trainable_weight: bool = False  # whether the stored weight is a plain one that can itself be trained
    weight_name: str = "weight"  # the name of the parameter that holds the stored weight

    def name(self, module: nn.Module) -> str:
        """Return the library and the kind of a layer, such as "bitsandbytes nf4"."""
        return f"{self.library} {self.kind(module)}"


def find_quantizer(module: nn.Module) -> Quantizer | None:
    """Return the row of the table for a module; None for one that is no quantised linear."""
    parameters = parameters_of(module)
    if not parameters:
        return None
    if type(parameters.get("weight")) is nn.Parameter and type(module).__module__.startswith("torch.nn."):
        return None
    return next((quantizer for quantizer in QUANTIZERS if quantizer.matches(module)), None)


def linear_sizes(module: Any) -> tuple[int, int]:
    """Return (in_features, out_features) of a quantised linear."""
    return int(module.in_features), int(module.out_features)


def visible_parameters(module: nn.Module) -> dict[str, tuple[nn.Parameter, tuple[int, ...], str]]:
    """Return a module's own parameters by name, each with the shape of its unquantised form and its quantisation or "".

    What a quantised linear stores beside its weight and bias, such as scales, is left out.
    """
    parameters = {name: p for name, p in list(parameters_of(module).items()) if p is not None}
    quantizer = find_quantizer(module)
    if quantizer is None or quantizer.trainable_weight:
        return {name: (p, tuple(p.shape), "") for name, p in parameters.items()}
    in_features, out_features = linear_sizes(module)
    shape: tuple[int, ...] = (out_features, in_features)
    visible = {"weight": (parameters[quantizer.weight_name], shape, quantizer.name(module))}
    bias = bias_of(module)
    if bias is not None:
        visible["bias"] = (bias, tuple(bias.shape), "" if "bias" in parameters else quantizer.name(module))
    return visible


def bias_of(module: nn.Module) -> Any:
    """Return the bias of a linear, which HQQ keeps in a plain attribute; None where there is none."""
    bias = parameters_of(module).get("bias", module.__dict__.get("bias"))
    return bias if isinstance(bias, torch.Tensor) else None  # some modules keep a flag under this name


def dequantized_weight(module: nn.Module) -> torch.Tensor:
    """Return the weight of a quantised linear in floating point, without changing anything."""
    quantizer = find_quantizer(module)
    assert quantizer is not None
    try:
        with torch.no_grad():
            return quantizer.dequantize(module).detach()
    except Exception as error:  # whatever a library raises for a layout that it cannot read
        raise DeltuneError(
            f"a weight of {quantizer.name(module)} cannot be turned into floating point ({type(error).__name__}: "
            f"{error_summary(error)})"
        ) from error


def quantized_copy(module: nn.Module, weight: torch.Tensor) -> nn.Module:
    """Return a copy of a quantised linear with another weight, quantised as its own is; the module is not changed."""
    quantizer = find_quantizer(module)
    assert quantizer is not None
    twin = object.__new__(type(module))
    twin.__dict__.update(module.__dict__)
    replace_parameters(twin, dict(parameters_of(module)))
    for name in quantizer.state:
        twin.__dict__[name] = copy.copy(module.__dict__.get(name))
    try:
        with torch.no_grad():
            quantizer.quantize(twin, weight)
    except Exception as error:
        raise DeltuneError(
            f"a weight of {quantizer.name(module)} cannot be quantised again ({type(error).__name__}: "
            f"{error_summary(error)}): merge(dequantize=True) merges in floating point"
        ) from error
    return twin


def set_weight_from(module: nn.Module, source: nn.Module) -> None:
    """Put the weight of a copy that `quantized_copy` returned into the quantised linear itself."""
    quantizer = find_quantizer(source)
    assert quantizer is not None
    for name in quantizer.state:
        module.__dict__[name] = source.__dict__[name]
    weight = parameters_of(source)[quantizer.weight_name]
    replace_layer_of_4bit(weight, source, module)
    parameters_of(module)[quantizer.weight_name] = weight


def plain_linear(module: Any, weight: torch.Tensor) -> nn.Linear:
    """Return a plain linear in place of a quantised one, with its bias and a weight in floating point."""
    in_features, out_features = linear_sizes(module)
    bias = bias_of(module)
    linear = nn.Linear(in_features, out_features, bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight)
    if bias is not None:
        linear.bias = bias if isinstance(bias, nn.Parameter) else nn.Parameter(bias)
    return linear.train(module.training)


# -- bitsandbytes


def _is_of(library: str, *names: str) -> Callable[[nn.Module], bool]:
    """Return whether a module is an instance of a class of a library, by the names of modules and classes."""

    def matches(module: nn.Module) -> bool:
        loaded = sys.modules.get(library)
        return loaded is not None and isinstance(module, tuple(getattr(loaded, name) for name in names))

    return matches


def _is_stored_4bit(module: Any) -> bool:
    return _is_of("bitsandbytes.nn", "Linear4bit")(module) and getattr(module.weight, "quant_state", None) is not None


def _kind_4bit(module: Any) -> str:
    return f"{module.weight.quant_type}{' with double quantisation' if module.weight.compress_statistics else ''}"


def _dequantize_4bit(module: Any) -> torch.Tensor:
    weight, functional = module.weight, sys.modules["bitsandbytes"].functional
    if is_packed_for_cpu(module):
        return dequantize_packed_4bit(weight)
    result: torch.Tensor = functional.dequantize_4bit(weight.data, weight.quant_state)
    return result


def _quantize_4bit(module: Any, weight: torch.Tensor) -> None:
    parameters_of(module)["weight"] = quantize_4bit_like(module.weight, weight, module)


def _no_gradient_4bit(module: Any) -> str:
    if not is_packed_for_cpu(module):
        return ""
    return (
        "since bitsandbytes packed its weights for inference when the model was evaluated on this CPU: load the model "
        "again, and attach before it is evaluated (deltune keeps it unpacked)"
    )


def _is_stored_8bit(module: Any) -> bool:
    return _is_of("bitsandbytes.nn", "Linear8bitLt")(module) and module.weight.dtype == torch.int8


def _dequantize_8bit(module: Any) -> torch.Tensor:
    codes, scales = int8_codes_and_scales(module)
    return codes.float() * scales.float().unsqueeze(1) / 127


def _quantize_8bit(module: Any, weight: torch.Tensor) -> None:
    parameters_of(module)["weight"] = requantize_int8(module.weight, weight, module)


# -- torchao: what is read of its weights here is described by the docstrings of their classes


def _is_torchao(module: Any) -> bool:
    loaded = sys.modules.get("torchao.utils")
    return loaded is not None and isinstance(module, nn.Linear) and isinstance(module.weight, loaded.TorchAOBaseTensor)


_TORCHAO_NAMES = {"Int8Tensor": "int8", "Float8Tensor": "float8", "Int4Tensor": "int4"}


def _kind_torchao(module: Any) -> str:
    weight = module.weight
    target = getattr(weight, "target_dtype", None)
    name = str(target).removeprefix("torch.") if target else _TORCHAO_NAMES.get(type(weight).__name__, "")
    return f"{name or type(weight).__name__}{' with quantised activations' if _quantizes_activations(weight) else ''}"


def _quantizes_activations(weight: Any) -> bool:
    options = (getattr(weight, name, None) for name in ("act_quant_kwargs", "activation_quantization"))
    return any(option is not None for option in options)


def _quantize_torchao(module: Any, weight: torch.Tensor) -> None:
    old = module.weight
    weight = weight.to(device=old.device, dtype=old.dtype)
    options: Mapping[str, Any]
    if hasattr(old, "target_dtype"):
        options = {
            "block_size": old.block_size, "target_dtype": old.target_dtype,
            "activation_quantization": old.activation_quantization,
        }  # fmt: skip
    else:
        names = ("act_quant_kwargs", "mm_config", "kernel_preference", "reduce_range", "act_pre_scale")
        options = {name: getattr(old, name) for name in names if hasattr(old, name)}
        options = {"granularity": _granularity(old), **options}
        if old.qdata.dtype.is_floating_point:
            options = {**options, "float8_dtype": old.qdata.dtype}
    new = type(old).from_hp(weight, **options)
    parameters_of(module)["weight"] = nn.Parameter(new, requires_grad=False)


def _granularity(weight: Any) -> Any:
    """Return which scalars of a weight have one scale, as torchao's classes for it."""
    granularities, (rows, columns) = sys.modules["torchao.quantization.granularity"], weight.block_size
    if (rows, columns) == tuple(weight.shape):
        return granularities.PerTensor()
    if rows != 1:
        return granularities.PerBlock([rows, columns])
    return granularities.PerRow() if columns == weight.shape[1] else granularities.PerGroup(columns)


def _no_gradient_torchao(module: Any) -> str:
    """Try a product of one row, which changes nothing in a layer of torchao."""
    with torch.enable_grad():
        x = torch.zeros(1, module.in_features, dtype=module.weight.dtype, device=module.weight.device)
        try:
            passes = nn.functional.linear(x.requires_grad_(), module.weight).requires_grad
        except Exception as error:
            return f"since torchao cannot compute it here ({type(error).__name__}: {error_summary(error)})"
    if passes:
        return ""
    return (
        "since torchao quantises the activations too and computes no derivative of that: tune the model with "
        "quantised weights only, such as Int8WeightOnlyConfig, or in its QAT form, and quantise a merged model"
    )


def _kind_qat(module: Any) -> str:
    config = getattr(module.weight_fake_quantizer, "config", None)
    kind = str(getattr(config, "dtype", "") or "").removeprefix("torch.").removeprefix("TorchAODType.").lower()
    return f"fake-quantised {kind}".strip()


def _dequantize_qat(module: Any) -> torch.Tensor:
    quantizer = module.weight_fake_quantizer
    weight = module.weight.detach()
    result: torch.Tensor = weight.clone() if quantizer is None else quantizer(weight)
    return result


def _quantize_qat(module: Any, weight: torch.Tensor) -> None:
    old = module.weight
    parameters_of(module)["weight"] = nn.Parameter(weight.to(old), requires_grad=old.requires_grad)


# -- quanto


def _is_quanto(module: Any) -> bool:
    loaded = sys.modules.get("optimum.quanto")
    return loaded is not None and isinstance(module, loaded.QLinear) and isinstance(module.weight, loaded.QTensor)


def _kind_quanto(module: Any) -> str:
    name = str(module.weight_qtype.name).removeprefix("q")
    return f"{name}{' with quantised activations' if module.activation_qtype is not None else ''}"


def _quantize_quanto(module: Any, weight: torch.Tensor) -> None:
    old = module.weight
    parameters_of(module)["weight"] = nn.Parameter(weight.to(device=old.device, dtype=old.dtype), requires_grad=False)
    module.freeze()
    parameters_of(module)["weight"].requires_grad_(False)  # type: ignore[union-attr]


# -- HQQ: its layer keeps the codes in the parameter `W_q`, and scales and zero points in the dictionary `meta`


def _is_stored_hqq(module: Any) -> bool:
    return _is_of("hqq.core.quantize", "HQQLinear")(module) and module.W_q is not None and module.meta is not None


def _quantize_hqq(module: Any, weight: torch.Tensor) -> None:
    options = {name: module.meta[name] for name in ("nbits", "group_size", "axis")}
    codes, meta = sys.modules["hqq.core.quantize"].Quantizer.quantize(
        weight.to(module.compute_dtype), device=module.device, compute_dtype=module.compute_dtype,
        channel_wise=module.meta.get("channel_wise", True), view_as_float=module.meta["view_as_float"], **options,
    )  # fmt: skip
    module.__dict__["meta"] = {**module.meta, **meta}
    parameters_of(module)["W_q"] = nn.Parameter(codes, requires_grad=False)


QUANTIZERS = (
    Quantizer(
        "bitsandbytes", _is_stored_4bit, _kind_4bit, _dequantize_4bit, _quantize_4bit, ("quant_state",),
        _no_gradient_4bit,
    ),
    Quantizer("bitsandbytes", _is_stored_8bit, lambda module: "int8", _dequantize_8bit, _quantize_8bit, ("state",)),
    Quantizer(
        "torchao", _is_torchao, _kind_torchao, lambda module: module.weight.dequantize(), _quantize_torchao,
        no_gradient=_no_gradient_torchao,
    ),
    Quantizer(
        "torchao", _is_of("torchao.quantization.qat", "FakeQuantizedLinear"), _kind_qat, _dequantize_qat,
        _quantize_qat, trainable_weight=True,
    ),
    Quantizer("quanto", _is_quanto, _kind_quanto, lambda module: module.weight.dequantize(), _quantize_quanto),
    Quantizer(
        "hqq", _is_stored_hqq, lambda module: f"int{module.meta['nbits']}", lambda module: module.dequantize(),
        _quantize_hqq, ("meta",), weight_name="W_q",
    ),
)  # fmt: skip
"""All ways of quantising that are known here."""
