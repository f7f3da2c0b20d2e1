"""The bytes that a model would store if it were quantised while it is loaded, from its configuration alone.

The quantiser itself says on a model without values which linears it takes. One linear of each size is then quantised as
transformers does it while loading, and what that one stores holds for all of its size.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.quantizers.auto import AutoHfQuantizer

from ..compat import parameters_of, silent_loading
from ..errors import DeltuneError, error_summary
from .inspection import inspect
from .quantization import check_gradients_pass, quantization_of, stored_bytes
from .quantizers import find_quantizer, visible_parameters
from .tracing import meta_model
from .types import Anatomy


@dataclass(frozen=True)
class QuantizedStorage:
    """A model as a quantiser would load it, with everything else in float32."""

    anatomy: Anatomy  # the anatomy of AutoModel, in which the quantised weights are marked
    quantization: str  # how the linears are quantised, such as "bitsandbytes nf4"
    stored_bytes: int  # the bytes that the model stores


class _OneLinearConfig(PreTrainedConfig):
    model_type = "deltune_one_linear"
    in_width: int = 1
    out_width: int = 1
    with_bias: bool = True


class _OneLinear(PreTrainedModel):
    """A model of one linear, and of embeddings behind it: torchao asks for these, and others keep a model's last."""

    config_class = _OneLinearConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.linear = nn.Linear(config.in_width, config.out_width, bias=config.with_bias)
        self.tokens = nn.Embedding(1, 1)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.tokens


def quantized_storage(config: PreTrainedConfig, quantization_config: Any) -> QuantizedStorage:
    """Return what AutoModel of a configuration would store if it were loaded quantised; no weights are read."""
    name = type(quantization_config).__name__
    if getattr(config, "quantization_config", None) is not None:
        raise DeltuneError(f"this {config.model_type} is stored quantised already: leave {name} out")
    anatomy, model = inspect(config), meta_model(config)
    try:
        taken = _quantized_paths(meta_model(config), quantization_config)
        layers: dict[tuple[int, int, bool], nn.Module] = {}
        total, quantized = stored_bytes(model), dict[str, str]()
        for path in taken:
            linear: Any = model.get_submodule(path)
            sizes = linear.in_features, linear.out_features, linear.bias is not None
            if sizes not in layers:
                layers[sizes] = _quantized_linear(*sizes, quantization_config)
            total += stored_bytes(layers[sizes]) - stored_bytes(linear)
            for leaf, (_, _, form) in visible_parameters(layers[sizes]).items():
                quantized[f"{path}.{leaf}"] = form
    except Exception as error:  # a library's own requirements: a GPU, calibration, files
        raise DeltuneError(
            f"what {name} makes of this {config.model_type} cannot be had from its configuration alone "
            f"({type(error).__name__}: {error_summary(error)}): load the quantised model itself"
        ) from error
    names = dict.fromkeys(quantization_of(layer) for layer in layers.values())
    return QuantizedStorage(_marked(anatomy, quantized), " and ".join(sorted(names)), total)


def _quantized_paths(model: PreTrainedModel, quantization_config: Any) -> list[str]:
    """Return the paths of the linears of a model without values that a quantiser takes; the model is changed."""
    linears = [path for path, module in model.named_modules() if type(module) is nn.Linear]
    quantizer = AutoHfQuantizer.from_config(copy.deepcopy(quantization_config), pre_quantized=False)
    quantizer.validate_environment(device_map=None, weights_only=True)
    quantizer.preprocess_model(model, device_map=None, dtype=torch.float32)
    return [path for path in linears if quantizer.param_needs_quantization(model, f"{path}.weight")]


def _quantized_linear(in_width: int, out_width: int, bias: bool, quantization_config: Any) -> nn.Module:
    """Return one linear of a size, quantised as transformers does it while it loads a model."""
    values = {"linear.weight": torch.ones(out_width, in_width), "tokens.weight": torch.ones(1, 1)}
    values |= {"linear.bias": torch.ones(out_width)} if bias else {}
    config = _OneLinearConfig(in_width=in_width, out_width=out_width, with_bias=bias)
    with silent_loading():
        model: Any = _OneLinear.from_pretrained(
            None, config=config, state_dict=values, quantization_config=copy.deepcopy(quantization_config),
            dtype=torch.float32,
        )  # fmt: skip
    if find_quantizer(model.linear) is None:
        kinds = " and ".join(type(p).__name__ for p in parameters_of(model.linear).values() if p is not None)
        raise DeltuneError(f"deltune does not know linears of {kinds}")
    check_gradients_pass(model)
    linear: nn.Module = model.linear
    return linear


def _marked(anatomy: Anatomy, quantized: Mapping[str, str]) -> Anatomy:
    """Return an anatomy with the forms of quantised tensors, by their names."""
    tensors = tuple(replace(t, quantized=quantized.get(t.name, t.quantized)) for t in anatomy.tensors)
    parts = tuple(_marked(part, quantized) for part in anatomy.other_towers)
    return replace(anatomy, tensors=tensors, other_towers=parts)
