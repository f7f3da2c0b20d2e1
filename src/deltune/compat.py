"""Everything private of other libraries that deltune relies on, each with the reason; no other module touches it."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import math
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor  # a tensor without numbers, as of some device
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.autograd import forward_ad
from torch.nn.modules.module import _global_forward_hooks
from torch.overrides import TorchFunctionMode as TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # it has no public name
from torch.utils._pytree import tree_map as tree_map
from torch.utils.hooks import RemovableHandle

from .errors import DeltuneError

NEEDS_NUMBERS = (DataDependentOutputException, DynamicOutputShapeException)
"""What an operation raises whose output depends on the numbers that its inputs do not have."""

# -- the contents of a module


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The parameters that a module itself holds, by name; None for one that it may have and has not.

    `named_parameters` leaves those out and names tied ones once. To assign here swaps a parameter in one step, where
    `setattr` takes several that an interruption can come between.
    """
    return module._parameters


def replace_parameters(module: nn.Module, parameters: Mapping[str, torch.Tensor | None]) -> None:
    """Give a copy of a module parameters of its own, where it has the dictionary of the original."""
    module.__dict__["_parameters"] = parameters


def submodules_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """The modules that a module itself holds, by name, each time that it holds one; `named_children` has each once."""
    return module._modules


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """The buffers that a module itself holds, by name."""
    return module._buffers


# -- calls and hooks

_CALL = "_call_impl"
"""What nn.Module.__call__ looks up on the instance: it runs a module's hooks and then its forward. An override there
surrounds both with `try` and `finally`; hooks cannot, since torch skips them after a KeyboardInterrupt."""


CALL_OVERRIDES = (_CALL, "_compiled_call_impl")
"""Attributes by which one instance is called otherwise than its class; the second is what `module.compile()` sets."""


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


def count_forward_hooks(module: nn.Module) -> int:
    """Count the forward hooks that see the output of a module, with the global ones; torch lists neither."""
    return len(module._forward_hooks) + len(_global_forward_hooks)


def model_functions_set(model: nn.Module) -> tuple[Any, Any]:
    """The forward and the loss function that were set on a model itself, and are not of its class; None for neither."""
    return model.__dict__.get("forward"), model.__dict__.get("_loss_function")


def hooks_of_tensor(tensor: torch.Tensor) -> list[Any]:
    """The hooks that `register_hook` put on a tensor, which torch does not list."""
    return list((tensor._backward_hooks or {}).values())


_CHECKPOINT = "_gradient_checkpointing_func"
"""Where gradient_checkpointing_enable puts torch's checkpoint function in a layer. transformers hands it the layer's
`forward`, or an older one (5.17) its call, from outside of that call: only what surrounds this function sees the layer
computed again, and it must be there before the layer is called."""


def get_checkpoint_function(module: nn.Module) -> Any:
    """The function that computes a layer under gradient checkpointing, or None."""
    return module.__dict__.get(_CHECKPOINT)


def checkpointing_name(kind: type) -> str:
    """Return "activation_checkpointing", or "gradient_checkpointing" where an older transformers names it so."""
    name = "activation_checkpointing"
    return name if any(attribute.startswith(name) for attribute in dir(kind)) else "gradient_checkpointing"


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


def when_backward_ends(check: Callable[[], None]) -> None:
    """Call a function at the end of the backward pass that this thread works on; what it raises, backward raises."""
    torch.autograd.Variable._execution_engine.queue_callback(check)


def transforms_active() -> bool:
    """Whether torch.func maps or differentiates what is computed."""
    return torch._C._are_functorch_transforms_active()


def uncompiled(model: Any) -> Any:
    """The module that torch.compile wrapped; None for one that it did not wrap."""
    return getattr(model, "_orig_mod", None)


def is_plain_inference() -> bool:
    """Whether nothing records, compiles, traces or maps what is computed, so that tensors may be changed in place.

    torch.jit.trace compares the graphs of a pass with gradients and of one without.
    """
    return not (
        torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or torch.jit.is_tracing()  # type: ignore[attr-defined]
        or transforms_active()
    )


@functools.cache
def find_onednn_linear() -> Any:
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
        torch.is_autocast_enabled("cpu")
        or torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_function_stack()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._get_tracing_state() is not None
        or forward_ad._current_level >= 0
        or not torch._C._get_mkldnn_enabled()
    )


def is_vmapped(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a batch of gradients that torch.autograd.grad maps, as is_grads_batched asks for."""
    return torch._C._functorch.is_legacy_batchedtensor(tensor)


# -- tensors and operations


def copy_tensors(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy tensors into others of the same shapes in one operation, for which Python's lock is taken once."""
    if targets:
        torch._foreach_copy_(list(targets), list(sources))


def norms_are_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether the norms of tensors are finite, in a few operations for any number of them.

    A norm with NaN or infinity is not finite, and one of finite values may overflow.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    with torch.no_grad():
        return all(math.isfinite(torch.stack(torch._foreach_norm(group)).sum()) for group in groups.values())


def tensor_version(tensor: torch.Tensor) -> int:
    """A number that every change in place of a tensor increases, by which a cached result is known to be stale."""
    return tensor._version


def storage_id(tensor: torch.Tensor) -> int:
    """A number for the storage of a tensor; a meta tensor has one too, though its `data_ptr` is 0."""
    return tensor.untyped_storage()._cdata


def operation_name(operation: Any) -> str:
    """The name of an operation in torch's schema, such as "aten::add_"; `__name__` differs from it for some."""
    name: str = operation._schema.name
    return name


def changes_inputs(operation: Any) -> bool:
    """Whether by its schema an operation changes an argument."""
    mutable: bool = operation._schema.is_mutable
    return mutable


# -- transformers


def has_attention_implementation(config: Any) -> bool:
    """Whether an object is a configuration that names an attention function."""
    return hasattr(config, "_attn_implementation")


def attention_implementation(config: Any) -> Any:
    """The name of the attention function that the layers with a configuration look up in every pass, or None."""
    return config._attn_implementation


def set_attention_implementation(config: Any, name: Any) -> None:
    """Choose the attention function of one configuration.

    Assigning `_attn_implementation` would choose it for the configurations of all inner models too, and those of a
    model of several towers may differ.
    """
    config._attn_implementation_internal = name


def set_experts_implementation(config: Any, name: Any) -> None:
    """Choose the function that computes the experts of one configuration; `set_experts_implementation` checks names."""
    if hasattr(config, "_experts_implementation_internal"):
        config._experts_implementation_internal = name


def experts_transposed(module: nn.Module) -> bool | None:
    """Whether the weights of a module of experts have the shape (in, out); None where transformers does not say."""
    transposed = getattr(module, "is_transposed", None)
    return transposed if isinstance(transposed, bool) else None


def auto_class_mapping(auto_class: Any) -> Any:
    """The classes that an auto class such as AutoModel makes, by the class of the configuration."""
    return auto_class._model_mapping


NAME_SETTINGS = ("_name_or_path", "name_or_path")
"""The settings in `to_dict()` of a configuration that say where it was read."""


def config_revision(config: Any) -> str:
    """The commit of the hub that a configuration was read from, or ""."""
    return str(getattr(config, "_commit_hash", None) or "")


HOOKS_INSTALLED = "_output_capturing_hooks_installed"
"""transformers' attribute of a model that has hooks for its hidden states. A copy without hooks must not have it."""

IS_QUANTIZED = "is_quantized"
"""The attribute of a model by which the Trainer refuses to train a quantised one that PEFT has not wrapped."""


def forget_quantization(model: Any) -> None:
    """Let a model that transformers loaded quantised be an ordinary one, now that its weights are not quantised."""
    quantizer = model.__dict__.get("hf_quantizer")
    if quantizer is not None:
        quantizer.remove_quantization_config(model)
    for name in ("is_loaded_in_4bit", "is_loaded_in_8bit"):
        model.__dict__.pop(name, None)
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_is_quantized"):
            config._is_quantized = False


def set_training_device(arguments: Any, device: torch.device) -> None:
    """Let TrainingArguments use one device; by itself it takes the first that there is."""
    from accelerate import PartialState

    arguments.__dict__["_setup_devices"] = PartialState().device = device


def use_one_gpu(arguments: Any) -> None:
    """Keep the Trainer from wrapping the model in DataParallel where a process sees several GPUs."""
    arguments._n_gpu = 1


# -- bitsandbytes: on a CPU with bfloat16 products, its 4-bit linears pack their weights for inference when they are
# first called in eval mode. That rounds their scales, cannot be undone, and lets no gradient through from then on.

PACKS_FOR_CPU = "support_avx512bf16_for_cpu"
"""The attribute by which a 4-bit linear decides whether to pack."""


def keep_unpacked(model: nn.Module) -> None:
    """Keep a model's 4-bit linears from packing their weights in passes before it is tuned."""
    for module in model.modules():
        if getattr(module, PACKS_FOR_CPU, False):
            setattr(module, PACKS_FOR_CPU, False)


def is_packed_for_cpu(module: nn.Module) -> bool:
    """Whether a 4-bit linear of bitsandbytes has packed its weights for inference on a CPU."""
    state = getattr(parameters_of(module).get("weight"), "quant_state", None)
    return bool(getattr(state, "packing_format_for_cpu", False))


def dequantize_packed_4bit(weight: Any) -> torch.Tensor:
    """Return a packed 4-bit weight of bitsandbytes in floating point, without changing it."""
    from bitsandbytes import functional

    state = copy.copy(weight.quant_state)
    scales = state.absmax
    state.original_nested = False  # else it would quantise the scales again
    codes, state = functional._convert_weight_packed_for_cpu_inverse(weight.data, state)
    state.absmax, state.dtype = scales.t().contiguous().view(-1).float(), torch.float32
    result: torch.Tensor = functional.dequantize_4bit(codes, state)
    return result


# Where bitsandbytes keeps what its linears store is not documented: a 4-bit weight has its options and its layer as
# attributes, and an 8-bit linear moves the codes and scales of its weight to its `state` when it is first called.


def quantize_4bit_like(old: Any, weight: torch.Tensor, module: nn.Module) -> Any:
    """Return a weight in floating point as a 4-bit weight of a module, with all options of an old one."""
    new = type(old)(
        weight.to(old.quant_state.dtype).contiguous().cpu(), requires_grad=False, blocksize=old.blocksize,
        compress_statistics=old.compress_statistics, quant_type=old.quant_type, quant_storage=old.quant_storage,
        module=module,
    )  # fmt: skip
    return new.to(old.device)


def replace_layer_of_4bit(weight: Any, old: nn.Module, new: nn.Module) -> None:
    """Let a 4-bit weight that refers to one module as its layer refer to another; do nothing with any other weight."""
    if getattr(weight, "module", None) is old:
        weight.module = new


def int8_codes_and_scales(module: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The int8 codes (out_features, in_features) and the scales (out_features,) of an 8-bit linear."""
    codes = module.state.CB if module.weight.CB is None else module.weight.CB
    scales = module.state.SCB if module.weight.SCB is None else module.weight.SCB
    return codes, scales


def requantize_int8(old: Any, weight: torch.Tensor, module: Any) -> Any:
    """Return a weight in floating point as an 8-bit weight, which a module's next call takes its codes from."""
    new = type(old)(weight.to(torch.float16).contiguous().cpu(), requires_grad=False, has_fp16_weights=False)
    module.state.CB = module.state.SCB = None
    return new.to(old.device)


# -- accelerate


def offload_hook(module: nn.Module) -> Any:
    """The hook by which accelerate loads the weights of a module for its call, or None."""
    return module.__dict__.get("_hf_hook")


_WRAPPED = "_old_forward"
"""Where accelerate keeps the forward that its own replacement calls."""

OFFLOAD_ATTRIBUTES = ("forward", "_hf_hook", _WRAPPED)
"""The attributes that accelerate sets on a module with a hook."""


def instance_forward(module: nn.Module) -> Any:
    """The forward by which one module computes otherwise than its class, or None. What accelerate puts around the
    forward of a module with a hook is not counted."""
    forward = module.__dict__.get("forward" if offload_hook(module) is None else _WRAPPED)
    return None if getattr(forward, "__func__", None) is getattr(type(module), "forward", None) else forward


def set_instance_forward(module: nn.Module, forward: Any) -> None:
    """Let one module compute by another forward, inside what accelerate puts around it; None: by that of its class."""
    of_class = types.MethodType(type(module).forward, module)
    if offload_hook(module) is not None:
        module.__dict__[_WRAPPED] = of_class if forward is None else forward
        wrapper = module.__dict__["forward"]
        if getattr(wrapper, "__wrapped__", None) is not None:  # it has copied the attributes of what it wraps
            wrapper.__dict__.clear()
            functools.update_wrapper(wrapper, of_class)
    elif forward is None:
        module.__dict__.pop("forward", None)
    else:
        module.__dict__["forward"] = forward


def offloaded_state(weights: Any, name: str) -> tuple[Any, str]:
    """The dictionary in memory that a hook of accelerate reads a value from first, and the name of the value in it."""
    while hasattr(weights, "dataset"):  # a PrefixedDataset
        weights, name = weights.dataset, weights.prefix + name
    return getattr(weights, "state_dict", weights), name


def remove_offload_hook(module: nn.Module) -> None:
    """Take accelerate's hook from a module, which puts the values of its tensors back, and leave no attribute of it."""
    from accelerate.hooks import remove_hook_from_module

    remove_hook_from_module(module)
    if instance_forward(module) is None:
        module.__dict__.pop("forward", None)


# -- FSDP2, whose public functions do not say which module a parameter goes to


def fsdp_modules(modules: Iterable[nn.Module]) -> list[Any]:
    """The modules among these that `fully_shard` was applied to; nothing is imported to find out."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return [] if fsdp is None else [module for module in modules if isinstance(module, fsdp.FSDPModule)]


def class_name(module: nn.Module) -> str:
    """The name of a module's class; `fully_shard` changes it to one that derives from FSDPModule and that class."""
    return type(module).__mro__[2 if fsdp_modules([module]) else 0].__name__


def _fsdp_groups(module: Any) -> Sequence[Any]:
    """The groups of parameters that FSDP2 gathers together at a module; before torch 2.13 at most one."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def move_fsdp_parameters(sharded: Iterable[Any], places: Mapping[int, Sequence[tuple[nn.Module, str]]]) -> None:
    """Let FSDP2 put its parameters, gathered or as shards, to other modules; `places` has these by a parameter's id."""
    for parameter in (p for m in sharded for group in _fsdp_groups(m) for p in group.fsdp_params):
        forms = ("sharded_param", "_unsharded_param", "_sharded_post_forward_param")
        now = next((places[id(p)] for n in forms if id(p := getattr(parameter, n, None)) in places), None)
        if now is not None:
            info = parameter._module_info
            (info.module, info.param_name), *others = now
            info.shared_modules, info.shared_param_names = [m for m, _ in others], [leaf for _, leaf in others]


# -- opacus, which computes the gradient of each sample by hooks of the modules that are called


class UncalledModule(nn.Module):
    """A module that holds tensors for others and is never called."""

    def register_forward_hook(
        self,
        hook: Callable[..., Any],
        *,
        prepend: bool = False,
        with_kwargs: bool = False,
        always_call: bool = False,
    ) -> RemovableHandle:
        """Refuse opacus, whose optimizer would find no gradients of samples and blame the backward pass."""
        if hasattr(getattr(hook, "__self__", None), "GRAD_SAMPLERS"):
            raise DeltuneError(
                "opacus samples gradients by hooks of modules that are called, and a delta's tensors act without a "
                'call: give make_private grad_sample_mode="no_op", and in each step, with one loss per row, '
                "p.grad_sample = g for the gradients g of torch.autograd.grad(losses, parameters, "
                "torch.eye(len(losses)), is_grads_batched=True)"
            )
        return super().register_forward_hook(hook, prepend=prepend, with_kwargs=with_kwargs, always_call=always_call)


# -- uvicorn


def is_answering(protocol: Any) -> bool:
    """Return whether a connection of uvicorn has received the headers of a request that is not answered yet."""
    return protocol.cycle is not None and not protocol.cycle.response_complete


# -- sacreBLEU: its public methods return only sums, and for chrF not even those


def sacrebleu_statistics(metric: Any, predictions: Sequence[str], references: Sequence[Any]) -> Any:
    """The statistics of each example, which a metric of sacreBLEU computes its score from."""
    return metric._extract_corpus_statistics(predictions, references)


def sacrebleu_score(metric: Any, statistics: Any) -> float:
    """The score of the summed statistics of some examples."""
    return float(metric._compute_score_from_stats(statistics).score)


LOADING = threading.RLock()
"""While transformers loads a model, no model of any thread ties its weights; two at once can leave it so for good."""


@contextlib.contextmanager
def silent_loading() -> Iterator[None]:
    """Load models inside the context, one thread at a time, without transformers' progress bar and load report.

    What is missing in a checkpoint deltune judges itself.
    """
    from transformers.utils import logging as hf

    nothing = logging.Filter("nothing")  # not setLevel: with a level transformers also checks tensor-parallel plans
    logger = logging.getLogger("transformers.modeling_utils")
    with LOADING:
        had_progress_bar = hf.is_progress_bar_enabled()
        logger.addFilter(nothing)
        hf.disable_progress_bar()
        try:
            yield
        finally:
            logger.removeFilter(nothing)
            if had_progress_bar:
                hf.enable_progress_bar()


def logits_processors(model: Any, config: Any, prompt_length: int, ends: Sequence[int]) -> Any:
    """Return what `generate` does to scores by a generation config; it has no public function for that alone."""
    config._eos_token_tensor = torch.tensor(list(ends)) if ends else None
    return model._get_logits_processor(config, prompt_length, device="cpu")


def of_bert_score(scorer: Any) -> tuple[Any, Any]:
    """Return the tokenizer and the model of a BERTScorer, which has no option for the length of a text."""
    return scorer._tokenizer, scorer._model


# -- Optuna: it gives a trial to the process that began it, and to another one only by its private id


def running_trial(study: Any, number: int) -> Any:
    """Return the trial of a study that a process left while it ran, to go on with it."""
    from optuna.trial import Trial

    return Trial(study, study.trials[number]._trial_id)
