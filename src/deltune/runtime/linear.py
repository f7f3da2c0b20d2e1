"""`optimize_linear`: frozen float32 linear layers computed by oneDNN on a CPU."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from ..compat import find_onednn_linear, instance_forward, is_vmapped, runs_plainly, set_instance_forward
from ..errors import DeltuneError, check_booleans

LinearBackend = Literal["torch", "onednn"]
"""The library that computes frozen float32 linear layers on a CPU."""

MIN_OPERATIONS = 1 << 22
"""Products with fewer operations (2 × rows × inputs × outputs) take microseconds and stay torch's."""

SIGNIFICANT_BITS = 3
"""oneDNN keeps 0.7 MB of code for each number of rows, so it gets only 4, 5, 6 and 7 times powers of two."""


@check_booleans
def optimize_linear(model: nn.Module, *, enabled: bool = True) -> None:
    """Compute the frozen float32 linear layers of a model on a CPU by oneDNN, or by torch again.

    Where MKL, which torch uses, lacks AVX-512, oneDNN takes down to half the time. Both compute in float32 and round in
    another order. torch still computes trained weights, small products, numbers of rows (of the batch × tokens) that
    are not 4 to 7 times a power of two, and all that is compiled, traced, transformed, cast or on another device.

    Args:
        model: The model. Its `torch.nn.Linear` and transformers' `Conv1D` get another `forward`, and copies keep it.
        enabled: False gives every layer its own `forward` back.

    Raises:
        DeltuneError: This build of torch has no oneDNN.
    """
    if enabled and (find_onednn_linear() is None or not torch.backends.mkldnn.is_available()):
        raise DeltuneError("linear_backend 'onednn': this build of torch has no oneDNN; give 'torch'")
    for module in model.modules():
        if getattr(type(module), "forward", None) not in (nn.Linear.forward, Conv1D.forward):
            continue
        forward, linear = instance_forward(module), LinearForward(module) if enabled else None
        if hasattr(forward, "linear"):  # an override of a delta, which calls it
            forward.linear = linear
        elif isinstance(forward, LinearForward) or (enabled and forward is None):
            set_instance_forward(module, linear)


class LinearForward:
    """Replaces the `forward` of a linear layer."""

    of_live_model = True

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self.module, *args, **kwargs)

    @staticmethod
    def run(module: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass of the layer that this replaces, or of a copy of it with other tensors."""
        output = None
        if len(args) == 1 and not kwargs:
            weight = module.weight if isinstance(module, nn.Linear) else module.weight.t()
            output = _product(args[0], weight, module.bias)
        return type(module).forward(module, *args, **kwargs) if output is None else output


def linear_forward(module: nn.Module) -> LinearForward | None:
    """Return the replaced forward of a linear layer, also one that an override of a delta surrounds."""
    forward = instance_forward(module)
    forward = getattr(forward, "linear", forward)
    return forward if isinstance(forward, LinearForward) else None


def _is_plain(tensor: Any) -> bool:
    """Whether a tensor is an ordinary one of float32 on a CPU."""
    plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.dtype is torch.float32
    return plain and tensor.device.type == "cpu" and tensor.layout is torch.strided and not is_vmapped(tensor)


def _product(x: Any, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
    """Return x W^T + b by oneDNN, or None where torch computes it."""
    if not runs_plainly() or not all(_is_plain(tensor) for tensor in (x, weight, bias) if tensor is not None):
        return None
    outputs, inputs = weight.shape
    if x.dim() < 2 or x.shape[-1] != inputs or 2 * x.numel() * outputs < MIN_OPERATIONS:
        return None
    rows = x.numel() // inputs
    few = rows % (1 << max(0, rows.bit_length() - SIGNIFICANT_BITS)) == 0
    if not few or (torch.is_grad_enabled() and weight.requires_grad):
        return None
    output: torch.Tensor = _Product.apply(x, weight, bias)
    return output


class _Product(torch.autograd.Function):
    """x W^T + b with a frozen W."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(weight)
        output: torch.Tensor = find_onednn_linear()(x, weight, bias, "none", [], "")
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (weight,), of_x, of_bias = ctx.saved_tensors, None, None
        if ctx.needs_input_grad[0]:  # a gradient that is itself differentiated or mapped needs torch's operators
            plain = not torch.is_grad_enabled() and runs_plainly() and _is_plain(gradient)
            of_x = find_onednn_linear()(gradient, weight.t(), None, "none", [], "") if plain else gradient @ weight
        if ctx.needs_input_grad[2]:
            of_bias = gradient.reshape(-1, gradient.shape[-1]).sum(0)  # unlike flatten, torch can map it
        return of_x, None, of_bias
