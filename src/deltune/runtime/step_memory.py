"""Where the memory of a training step goes: measured on a live model, or predicted from a configuration.

A mode of torch sees every tensor that an operation makes, and when its memory is given back. To predict, the same step
runs on tensors without numbers, which know their sizes alone: no weight is read, and no product is computed.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..anatomy.inspection import inspect
from ..anatomy.quantization import is_unquantized, stored_bytes
from ..anatomy.quantized_storage import quantized_storage
from ..anatomy.skeleton import modules_without_paths
from ..anatomy.tracing import meta_model, tensors_in
from ..anatomy.types import Anatomy
from ..compat import (
    NEEDS_NUMBERS,
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    auto_class_mapping,
    buffers_of,
    changes_inputs,
    checkpointing_name,
    operation_name,
    parameters_of,
    storage_id,
    tree_map,
)
from ..errors import DeltuneError, check_choice
from ..methods.counting import format_bytes
from ..methods.parser import explain_arguments
from ..methods.spec import Method
from ..models import HEADS
from .attach import attach
from .causal_loss import causal_loss, language_head

MANY = 1 << 20
"""Whole numbers and truths of tensors up to this size are computed from zeros, since what runs may depend on them."""

CHECKPOINTING = {"off": 0, "half": 2, "on": 1}
"""How many layers there are for one that computes its activations again."""
OPTIMIZERS = ("adamw", "adamw_8bit", "paged_adamw_8bit")
STATE_8BIT, SMALLEST_8BIT = 2 + 8 / 256, 4096
"""Bytes that bitsandbytes keeps for a trained number, with two scales for 256 of them, and the numbers of the smallest
tensor of which it does."""


@dataclass(frozen=True)
class StepMemory:
    """The bytes in use at the peak of a training step, by what they are for.

    Attributes:
        weights: Parameters and buffers of the base model, also those that are trained.
        delta: Parameters and buffers that a method adds.
        optimizer: What the optimizer keeps between steps.
        gradients: Gradients of what is trained.
        activations: For each layer by its path, what its forward pass made, and keeps for the backward pass.
        loss: What was made behind the last layer: its norm, the head, logits.
        rest: What was made before the first layer and in the backward pass and the optimizer's step.
    """

    weights: int
    delta: int
    optimizer: int
    gradients: int
    activations: Mapping[str, int]
    loss: int
    rest: int

    @property
    def step(self) -> int:
        """Bytes that a step takes at its peak above what stays between steps."""
        return self.gradients + sum(self.activations.values()) + self.loss + self.rest

    @property
    def total(self) -> int:
        """Bytes at the peak of a step."""
        return self.weights + self.delta + self.optimizer + self.step

    def as_dict(self) -> dict[str, Any]:
        """Return all values, as `deltune count --step-memory --json` prints them.

        Returns:
            A dictionary with a key for each attribute, "step" and "total", in bytes.
        """
        return {**asdict(self), "activations": dict(self.activations), "step": self.step, "total": self.total}

    def lines(self) -> Iterator[tuple[str, int]]:
        """Yield what the memory is for, and bytes.

        Returns:
            A name and bytes for each part; layers that follow each other and are alike are one.
        """
        yield from (("weights", self.weights), ("delta", self.delta), ("optimizer", self.optimizer))
        yield "gradients", self.gradients
        layers = list(self.activations.items())
        while layers:
            path, size = layers[0]
            alike = next((i for i, (_, other) in enumerate(layers) if other != size), len(layers))
            several = f" … {layers[alike - 1][0]}, {format_bytes(size)} each" if alike > 1 else ""
            yield f"activations of {path}{several}", alike * size
            del layers[:alike]
        yield from (("head and loss", self.loss), ("rest of the step", self.rest))

    def __str__(self) -> str:
        """Return a line for each part, and the sum."""
        rows = [(format_bytes(size), name) for name, size in (*self.lines(), ("at the peak of a step", self.total))]
        width = max(len(size) for size, _ in rows)
        return "\n".join(f"{size:>{width}}  {name}" for size, name in rows)


class StepTracker(TorchDispatchMode):
    """Records what the operations of a training step allocate and give back, while it is entered.

    Memory that one operation takes and gives back inside itself is not seen.
    """

    def __init__(self, model: PreTrainedModel, anatomy: Anatomy, without_numbers: FakeTensorMode | None = None) -> None:
        super().__init__()
        self.model, self.without_numbers = model, without_numbers or nullcontext()
        self.layers = list(dict.fromkeys(layer.path for layer in anatomy.layers))
        self.known: dict[int, weakref.ref[Any]] = {}  # storages, by id
        self.numbers: dict[int, int] = {}  # which allocation a storage is, by id
        self.sizes: list[int] = []  # of each allocation
        self.labels: list[str] = []
        self.events: list[tuple[int, int]] = []  # an allocation, and whether it is made (1) or given back (-1)
        self.where, self.hooks = ["rest"], ExitStack()

    def __enter__(self) -> StepTracker:
        self._label(self.model, "rest")
        for path in self.layers:
            layer = self.model.get_submodule(path)
            self._label(layer, path, "loss" if path == self.layers[-1] else "")
            for part in layer.children():  # where a layer is computed again, its own hooks do not run
                self._label(part, path)
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self.hooks.close()

    def _label(self, module: nn.Module, inside: str, behind: str = "") -> None:
        """Let the place of what a module makes be known, and of what is made behind it."""

        def leave(*_: Any) -> None:
            self.where.pop()
            if behind:
                self.where[-1] = behind

        before = module.register_forward_pre_hook(lambda *_: self.where.append(inside))
        self.hooks.callback(before.remove)
        self.hooks.callback(module.register_forward_hook(leave, always_call=True).remove)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        inputs = list(tensors_in((args, kwargs)))
        for tensor in inputs:
            self._see(tensor, new=False)
        out = self._run(func, args, kwargs, inputs)
        for tensor in tensors_in(out):
            self._see(tensor, new=True)
        return out

    def _see(self, tensor: torch.Tensor, new: bool) -> None:
        if tensor.layout is not torch.strided or not is_unquantized(tensor):
            return
        storage, key = tensor.untyped_storage(), storage_id(tensor)
        if key not in self.known:
            self.known[key] = weakref.ref(storage, lambda _: self._free(key))
            if new:
                self.numbers[key] = self._number(storage.nbytes())

    def _number(self, size: int) -> int:
        self.sizes.append(size)
        self.labels.append(self.where[-1])
        self._change(len(self.sizes) - 1, 1)
        return len(self.sizes) - 1

    def _change(self, number: int, sign: int) -> None:
        self.events.append((number, sign))

    def _free(self, key: int) -> None:
        self.known.pop(key, None)
        if (number := self.numbers.pop(key, None)) is not None:
            self._change(number, -1)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[torch.Tensor]) -> Any:
        """Run an operation, without numbers where an input has none; what is whole or true is computed from zeros."""
        if not any(isinstance(tensor, FakeTensor) for tensor in inputs):
            return func(*args, **kwargs)
        try:
            with self.without_numbers:
                grouped = operation_name(func) == "aten::_grouped_mm"
                out = _grouped_product(func, args, kwargs) if grouped else func(*args, **kwargs)
        except NEEDS_NUMBERS:
            return _on_zeros(func, args, kwargs)
        outputs = list(tensors_in(out))
        if changes_inputs(func) or all(t.is_floating_point() or t.numel() > MANY for t in outputs):
            return out
        computed = _on_zeros(func, args, kwargs)
        if isinstance(out, torch.Tensor):
            return computed
        pairs = zip(out, computed, strict=True)
        return type(out)(a if not isinstance(a, torch.Tensor) or a.is_floating_point() else b for a, b in pairs)

    def peak(self, optimizer: torch.optim.Optimizer) -> StepMemory:
        """Return where the memory was when most of it was in use; an optimizer's state counts as kept.

        Args:
            optimizer: What was stepped meanwhile, or will be.

        Returns:
            The bytes, by what they are for.
        """
        labels, state = list(self.labels), tuple(tensors_in([list(each.values()) for each in optimizer.state.values()]))
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        for label, tensors in (("gradients", gradients), ("optimizer", state)):
            for number in (self.numbers.get(storage_id(tensor)) for tensor in tensors):
                if number is not None:
                    labels[number] = label
        live = {label: 0 for label in (*self.layers, "gradients", "loss", "rest")}
        top, most, total = dict(live), 0, 0
        for number, sign in self.events:
            if labels[number] != "optimizer":
                live[labels[number]] += sign * self.sizes[number]
                total += sign * self.sizes[number]
                if total > most:
                    top, most = dict(live), total
        base = set(modules_without_paths(self.model))
        added = [module for module in self.model.modules() if module not in base]
        of_delta = {t for m in added for t in (*m.parameters(recurse=False), *m.buffers(recurse=False))}
        return StepMemory(
            weights=stored_bytes(self.model),
            delta=sum(tensor.nbytes for tensor in of_delta),
            optimizer=sum(tensor.nbytes for tensor in state),
            gradients=top["gradients"],
            activations={path: top[path] for path in self.layers},
            loss=top["loss"],
            rest=top["rest"],
        )


def _on_zeros(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation with zeros in place of tensors without numbers."""

    def zeros(value: Any) -> Any:
        return torch.zeros(value.shape, dtype=value.dtype) if isinstance(value, FakeTensor) else value

    return func(*tree_map(zeros, args), **tree_map(zeros, kwargs))


def _grouped_product(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Multiply by the experts in bfloat16, the one type that torch does it in without numbers."""
    first, second, *others = args
    product: torch.Tensor = func(first.bfloat16(), second.bfloat16(), *others, **kwargs)
    return product.to(first.dtype)


@explain_arguments
def step_memory(
    config: PreTrainedConfig,
    method: str | Method,
    batch_size: int = 32,
    max_length: int = 128,
    precision: str = "fp32",
    optimizer: str = "adamw",
    activation_checkpointing: str = "off",
    quantization_config: Any = None,
) -> StepMemory:
    """Predict where the memory of a training step goes, as `deltune train` takes it, from a configuration alone.

    The model is an encoder-decoder with its language modelling head, a decoder with it, or else a classifier.

    Args:
        config: The model's configuration.
        method: An expression such as "lora(rank=8)", or a method.
        batch_size: Rows at a time on a device.
        max_length: Tokens of a row, padding included; of an encoder-decoder also tokens of a target.
        precision: "fp32", or "bf16" by autocast.
        optimizer: "adamw", "adamw_8bit" or "paged_adamw_8bit".
        activation_checkpointing: Which layers compute their activations again: "off", "half" or "on".
        quantization_config: How the weights are quantised while they are loaded. The activations are those of the
            model as it is.

    Returns:
        The bytes at the peak of a step.

    Raises:
        DeltuneError: The model reads no text, or cannot be tuned by the method, or an argument does not exist.
    """
    check_choice("optimizer", optimizer, OPTIMIZERS)
    check_choice("precision", precision, ("fp32", "bf16"))
    check_choice("activation_checkpointing", activation_checkpointing, CHECKPOINTING)
    if min(batch_size, max_length) < 1:
        raise DeltuneError(f"batch_size={batch_size}, max_length={max_length}: both are at least 1")
    model, head = _text_model(config)
    if every := CHECKPOINTING[activation_checkpointing]:
        checkpoint_activations(model, every)
    tuned = attach(model.train(), method)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    _remove_numbers(model, mode)
    batch = _batch(config, batch_size, max_length, head)
    trained = list(tuned.trainable_parameters())
    step = torch.optim.AdamW(trained)

    def loss() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            return model(**batch).loss if head == "classification" else causal_loss(model, batch)

    for _ in range(2):
        before = len(language_head(model).reasons)
        with StepTracker(model, tuned.anatomy, mode) as tracker:
            loss().backward()
            if optimizer == "adamw":
                step.step()
        memory = tracker.peak(step)
        if len(language_head(model).reasons) == before:
            break
        step.zero_grad()  # the first loss was computed both ways, and the others will not be
    if optimizer != "adamw":
        sizes = (8 * p.numel() if p.numel() < SMALLEST_8BIT else STATE_8BIT * p.numel() for p in trained)
        memory = replace(memory, optimizer=int(sum(sizes)))
    if quantization_config is not None:
        stored = quantized_storage(config, quantization_config).stored_bytes
        plain = stored_bytes(meta_model(config))
        memory = replace(memory, weights=memory.weights - plain + stored)
    return memory


def checkpoint_activations(model: PreTrainedModel, every: int) -> None:
    """Let each so many-th layer compute its activations again, if it lies above what is trained."""
    if not model.supports_gradient_checkpointing:
        raise DeltuneError(f"{type(model).__name__} of transformers cannot compute its layers again")
    getattr(model, f"{checkpointing_name(type(model))}_enable")(every_n_layers=every)
    model.disable_input_require_grads()  # below, no gradient is needed


def _text_model(config: PreTrainedConfig) -> tuple[PreTrainedModel, str]:
    """Return a model without weights, and the name of the head that it has."""
    anatomy = inspect(config)
    if anatomy.tower != "text":
        raise DeltuneError(f"the memory of a step can be predicted of models that read text; {anatomy.model} does not")
    stack = anatomy.stacks[-1]
    head = "seq2seq-lm" if len(anatomy.stacks) > 1 else "causal-lm" if stack.causal else "classification"
    auto_class = getattr(transformers, HEADS[head].auto_class)
    if type(config) not in auto_class_mapping(auto_class):
        raise DeltuneError(
            f"transformers has no {auto_class.__name__} of {config.model_type}, which a step would train"
        )
    return meta_model(config, auto_class), head


def _remove_numbers(model: PreTrainedModel, without_numbers: FakeTensorMode) -> None:
    """Put tensors without numbers, as of a CPU, in place of a model's meta tensors; of whole numbers, zeros."""
    seen: dict[torch.Tensor, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in parameters_of(module).items():
            if parameter is not None and parameter not in seen:
                with without_numbers:
                    empty = torch.empty_like(parameter, device="cpu")
                seen[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            if parameter is not None:
                parameters_of(module)[name] = seen[parameter]
        for name, buffer in buffers_of(module).items():
            if buffer is not None:
                with without_numbers if buffer.is_floating_point() else nullcontext():
                    buffers_of(module)[name] = torch.zeros(buffer.shape, dtype=buffer.dtype, device="cpu")


def _batch(config: PreTrainedConfig, rows: int, length: int, head: str) -> dict[str, Any]:
    """Return a batch of which the last row is shorter than the others, as most batches have one."""
    special = {getattr(config, name, None) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    ids = torch.full((rows, length), next(word for word in range(4) if word not in special))
    mask = torch.ones_like(ids)
    mask[-1, -1] = 0
    labels = torch.zeros(rows, dtype=torch.long) if head == "classification" else ids.masked_fill(mask == 0, -100)
    cache = {} if head == "classification" else {"use_cache": False}
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, **cache}
