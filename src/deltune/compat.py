"""Everything private of torch and transformers that the library relies on, each with the reason."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad

_CALL = "_call_impl"
"""What nn.Module.__call__ looks up on the instance: it runs a module's hooks and then its forward. An override there
surrounds both with `try` and `finally`; hooks cannot, since torch skips them after a KeyboardInterrupt."""


def call_class(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a module as its class does: its hooks and its forward."""
    return type(module)._call_impl(module, *args, **kwargs)


def get_call_override(module: nn.Module) -> Any:
    """The module's own replacement of `_call_impl` (which `nn.Module.__call__` runs), or None."""
    return module.__dict__.get(_CALL)


def set_call_override(module: nn.Module, call: Any) -> None:
    """Set `call` in place of the module's `_call_impl`, so that it runs whenever the module is called."""
    module.__dict__[_CALL] = call


def remove_call_override(module: nn.Module, call: Any, before: Any) -> None:
    """Take `call` away again and restore what it replaced; one that somebody else wrapped since then stays."""
    if module.__dict__.get(_CALL) is call:
        if before is None:
            del module.__dict__[_CALL]
        else:
            module.__dict__[_CALL] = before


def set_in_parameter_dict(store: nn.ParameterDict, key: str, parameter: nn.Parameter) -> None:
    """Put a parameter into a ParameterDict. Its own `__setitem__` takes steps that an interruption can come between."""
    store._parameters[key] = parameter
    store._keys[key] = None


def delete_from_parameter_dict(store: nn.ParameterDict, key: str) -> None:
    """Take a parameter out of a ParameterDict, also one that was put in or taken out in part."""
    store._keys.pop(key, None)
    store._parameters.pop(key, None)


def parameters_of_dict(store: nn.ParameterDict) -> dict[str, nn.Parameter]:
    """The parameters of a ParameterDict by key; not to be changed."""
    return store._parameters  # type: ignore[return-value]


def remove_hooks(module: nn.Module | None, owner: object) -> None:
    """Remove every forward hook that is a method of `owner`.

    torch's handles do the same, but whoever is interrupted while registering a hook never gets one.
    """
    if module is None:
        return
    for hooks in (module._forward_hooks, module._forward_pre_hooks):
        for number in [n for n, hook in list(hooks.items()) if getattr(hook, "__self__", None) is owner]:
            for others in (
                module._forward_hooks_with_kwargs, module._forward_hooks_always_called,
                module._forward_pre_hooks_with_kwargs, hooks,
            ):  # fmt: skip
                others.pop(number, None)


_CHECKPOINT = "_gradient_checkpointing_func"
"""Where gradient_checkpointing_enable puts torch's checkpoint function in a layer. transformers hands it the layer's
`forward`, not its call, so that only what surrounds this function sees the layer computed again."""


def get_checkpoint_function(module: nn.Module) -> Any:
    """The function that computes a layer under gradient checkpointing, or None."""
    return module.__dict__.get(_CHECKPOINT)


def set_checkpoint_function(module: nn.Module, function: Any) -> None:
    """Compute a layer under gradient checkpointing by another function."""
    module.__dict__[_CHECKPOINT] = function


def backward_id() -> int | None:
    """A number for the backward pass that this thread works on, or None outside of one.

    Layers under gradient checkpointing are computed again inside it, on a thread of the autograd engine that has none
    of the forward pass's context variables.
    """
    number = torch._C._current_graph_task_id()
    return None if number == -1 else number


def transforms_active() -> bool:
    """Whether torch.func maps or differentiates what is computed."""
    return torch._C._are_functorch_transforms_active()


@functools.cache
def onednn_linear() -> Any:
    """oneDNN's x W^T + b on ordinary tensors, or None in a build of torch without it. It has no derivative."""
    try:
        return torch.ops.mkldnn._linear_pointwise.default
    except AttributeError:
        return None


def runs_plainly() -> bool:
    """Whether operators are only computed: nothing compiles, traces, transforms, observes or casts them.

    None of these sees what an operator without their support computes.
    """
    return not (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_function_stack()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._get_tracing_state() is not None
        or torch.is_autocast_enabled("cpu")
        or forward_ad._current_level >= 0
        or not torch._C._get_mkldnn_enabled()
    )


def is_mapped(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a batch of gradients that torch.autograd.grad maps, as is_grads_batched asks for."""
    return torch._C._functorch.is_legacy_batchedtensor(tensor)
