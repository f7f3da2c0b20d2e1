"""`optimize_linear`: linear layers computed by the fastest exact float32 product of the machine.

torch has two libraries of products on a CPU. Its linear layers use MKL; oneDNN gives the same float32 result, and which
of them is faster depends on the processor and on the shape. This is measured once for each class of shapes and
remembered on disk.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
import time
import warnings
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from ..compat import (
    instance_forward,
    is_mapped,
    onednn_linear,
    parameters_of,
    runs_plainly,
    runs_unobserved,
    tensor_version,
)
from ..errors import DeltuneError, check_booleans, unknown_name
from ..filesystem import cache_folder, read_json_object, write_json
from ..processor import processor_facts

LinearBackend = Literal["auto", "torch", "onednn"]
"""Computes the linear layers: the one that is measured to be faster, torch's default, or oneDNN."""

BACKENDS: tuple[str, ...] = get_args(LinearBackend)

MIN_OPERATIONS = 1 << 22
"""Products with fewer operations (2 × rows × inputs × outputs) take microseconds and stay torch's."""

MAX_ROWS = 512
"""With more rows the same implementation is the fastest; so many are used in a measurement."""

MAX_WIDTH = 4096
"""A wider weight, such as a vocabulary's, is measured by a part of this width."""

SIGNIFICANT_BITS = 3
"""oneDNN compiles and keeps code for each number of rows, about 0.7 MB. So it only computes numbers of rows that are
zero after their first three binary digits: 4, 5, 6 and 7 times a power of two, which leaves few of them."""

ADVANTAGE = 0.95
"""oneDNN is used where it takes at most this share of the time that torch takes."""

VERSION = 1
"""Raised when the remembered choices mean something else."""


@check_booleans
def optimize_linear(model: nn.Module, backend: LinearBackend = "auto", *, keep_casts: bool = False) -> OptimizedLinear:
    """Compute the linear layers of a model with the fastest float32 product of this machine, until `undo()`.

    This concerns the forward pass and the gradients of `torch.nn.Linear` and of transformers' `Conv1D`, on a CPU and in
    float32, also where a delta is attached to them, before or after this call. Both products are float32 products, but
    they round in another order, so that results are not bitwise equal: relative to float64, torch's differ by 2e-7 to
    3e-7 and oneDNN's by 2e-7 to 5e-7 (it adds the terms of a sum one by one, here up to 1,536). No global setting, no
    class of a module and no key of a state dict changes.

    torch's own computation stays for everything else: other devices and dtypes, autocast, torch.compile, torch.export,
    tracing, torch.func transforms, forward-mode derivatives, second derivatives, tensor subclasses, small products,
    numbers of rows (rows of the batch × tokens) that are not 4, 5, 6 or 7 times a power of two, since oneDNN keeps
    memory for each number, modules whose `forward` was replaced, and processors without oneDNN.

    Args:
        model: The model. It is changed in place; copies and pickles of it are optimised too.
        backend: "auto" measures for each class of shapes, when it first occurs, whether torch's default or oneDNN is
            faster, which takes some milliseconds, and remembers the result below
            `$DELTUNE_CACHE`, or `~/.cache/deltune/rows`. "onednn" always uses oneDNN. "torch" changes nothing.
        keep_casts: Under `torch.autocast("cpu", …)`, keep what frozen weights are cast to, which is half their size,
            until `undo()`. Autocast alone casts a frozen weight again in every pass. The results are the same bits; a
            weight that is changed in place or replaced is cast again, but a change of `weight.data` in place cannot be
            noticed.

    Returns:
        What undoes it: call `undo()`, or use it as a context manager.

    Raises:
        DeltuneError: The backend is unknown, or oneDNN is requested and this torch has none.
    """
    if backend not in BACKENDS:
        raise DeltuneError(unknown_name("linear_backend", backend, BACKENDS))
    available = onednn_linear() is not None and torch.backends.mkldnn.is_available()
    if backend == "onednn" and not available:
        raise DeltuneError("linear_backend 'onednn': this build of torch has no oneDNN; give 'auto' or 'torch'")
    backend = backend if available else "torch"
    layers = [m for m in model.modules() if _may_install(m)] if backend != "torch" or keep_casts else []
    for layer in layers:
        _install(layer, LinearForward(layer, backend, keep_casts))
    return OptimizedLinear(layers, backend if layers else "torch")


class OptimizedLinear:
    """Linear layers that compute with the fastest float32 product of the machine.

    Args:
        layers: The layers.
        backend: What computes them: "auto" or "onednn", or "torch" where nothing was changed.
    """

    def __init__(self, layers: list[nn.Module], backend: str) -> None:
        self.layers, self.backend = layers, backend

    def undo(self) -> None:
        """Let the layers compute as torch does, with every attribute as it was. A second call does nothing."""
        for layer in self.layers:
            _uninstall(layer)

    def __enter__(self) -> OptimizedLinear:
        return self

    def __exit__(self, *exception: object) -> None:
        self.undo()

    def __repr__(self) -> str:
        return f"OptimizedLinear({len(self.layers)} layers, {self.backend!r})"


# -- what is installed in a layer


class LinearForward:
    """Replaces the `forward` of a linear layer.

    It refers to the layer weakly, so that a model is freed as soon as nothing refers to it.

    Args:
        module: The layer.
        backend: "auto", "onednn" or "torch".
        keep_casts: Whether frozen weights are cast once for all passes under autocast.
    """

    of_live_model = True

    def __init__(self, module: nn.Module, backend: str, keep_casts: bool = False) -> None:
        self.module, self.backend, self.keep_casts = weakref.ref(module), backend, keep_casts
        self.enabled = True
        self._cast: _CastWeight | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> LinearForward:
        module: Any = copy.deepcopy(self.module(), memo)
        return type(self)(module, self.backend, self.keep_casts)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.module(), self.backend, self.keep_casts)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self.module(), *args, **kwargs)

    def run(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute a layer: the replaced one, or a twin of it with other tensors."""
        if len(args) == 1 and not kwargs and self.enabled:
            if self.backend != "torch" and runs_plainly():
                weight = module.weight if isinstance(module, nn.Linear) else module.weight.t()
                output = _linear(args[0], weight, module.bias, self.backend)
                if output is not None:
                    return output
            elif self.keep_casts and torch.is_autocast_enabled("cpu") and runs_unobserved():
                cast = self._cast_weight(module)
                if cast is not None:
                    return functional.linear(args[0], cast if isinstance(module, nn.Linear) else cast.t(), module.bias)
        return type(module).forward(module, *args, **kwargs)

    def _cast_weight(self, module: Any) -> torch.Tensor | None:
        """Return the layer's frozen weight in the type of autocast; None for any other weight, also that of a twin.

        Threads share this object, so that what is returned is held in a local: another thread may replace `_cast`.
        """
        weight = module.weight
        frozen = isinstance(weight, nn.Parameter) and not weight.requires_grad and _is_plain(weight)
        if module is not self.module() or not frozen or weight.is_inference():
            return None
        cast = self._cast
        if cast is None or not cast.is_of(weight):
            cast = self._cast = _CastWeight(weight)
        return cast.tensor


class _CastWeight:
    """A weight in the type that autocast computes with.

    Args:
        weight: The weight. It is referred to weakly.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight, self.facts = weakref.ref(weight), self._facts(weight)
        with torch.inference_mode(False), torch.no_grad():  # what inference mode makes cannot be used in training
            self.tensor = weight.to(torch.get_autocast_dtype("cpu"))

    def is_of(self, weight: torch.Tensor) -> bool:
        """Whether a weight is still what was cast, and autocast still casts to the same type."""
        return self.weight() is weight and self.facts == self._facts(weight)

    @staticmethod
    def _facts(weight: torch.Tensor) -> tuple[torch.dtype, int, int]:
        return torch.get_autocast_dtype("cpu"), weight.data_ptr(), tensor_version(weight)


def linear_forward(module: nn.Module) -> LinearForward | None:
    """Return the replaced forward of a linear layer, also one that an override of a delta surrounds."""
    forward = instance_forward(module)
    forward = getattr(forward, "linear", forward)
    return forward if isinstance(forward, LinearForward) else None


def _may_install(module: nn.Module) -> bool:
    """Whether a module is a linear layer on a CPU that computes as its class does."""
    if getattr(type(module), "forward", None) not in (nn.Linear.forward, Conv1D.forward):
        return False
    forward = module.__dict__.get("forward")
    replaced = forward is not None and not hasattr(forward, "linear") and not isinstance(forward, LinearForward)
    weight = parameters_of(module).get("weight")
    return not replaced and weight is not None and weight.device.type == "cpu"


def _install(module: nn.Module, linear: LinearForward) -> None:
    forward: Any = module.__dict__.get("forward")
    if hasattr(forward, "linear"):
        forward.linear = linear
    else:
        module.__dict__["forward"] = linear


def _uninstall(module: nn.Module) -> None:
    """Take the replaced forward away; one that somebody else wrapped since then computes as the class does."""
    linear, forward = linear_forward(module), module.__dict__.get("forward")
    if linear is not None and forward is linear:
        del module.__dict__["forward"]
    elif linear is not None and forward is not None:
        forward.linear = None
    for value in module.__dict__.values():
        if isinstance(value, LinearForward):
            value.enabled = False


# -- the product and its gradients

_PLAIN_TYPES = (torch.Tensor, nn.Parameter)
_CPU = torch.device("cpu")


def _is_plain(tensor: Any) -> bool:
    return (
        type(tensor) in _PLAIN_TYPES
        and tensor.dtype is torch.float32
        and tensor.device == _CPU
        and tensor.layout is torch.strided
        and not is_mapped(tensor)
    )


def _linear(x: Any, weight: torch.Tensor, bias: torch.Tensor | None, backend: str) -> torch.Tensor | None:
    """Return x W^T + b, or None where torch computes it.

    Args:
        x: The input (..., inputs).
        weight: W (outputs, inputs), in any layout.
        bias: b (outputs,) or None.
        backend: "auto" or "onednn".
    """
    if not (_is_plain(x) and _is_plain(weight) and (bias is None or _is_plain(bias))):
        return None
    outputs, inputs = weight.shape
    if x.dim() < 2 or x.shape[-1] != inputs or 2 * x.numel() * outputs < MIN_OPERATIONS:
        return None
    rows = x.numel() // inputs
    if rows % (1 << max(0, rows.bit_length() - SIGNIFICANT_BITS)):
        return None
    records = torch.is_grad_enabled()
    of_x, of_weight = records and x.requires_grad, records and weight.requires_grad
    kinds = ("forward", *(["input"] if of_x else []), *(["weight"] if of_weight else []))
    chosen = tuple(kind for kind in kinds if backend == "onednn" or _is_faster(kind, x, weight))
    if not chosen:
        return None
    if of_x or of_weight or (records and bias is not None and bias.requires_grad):
        output: torch.Tensor = _Product.apply(x, weight, bias, chosen)
        return output
    return _onednn_forward(x, weight, bias)


class _Product(torch.autograd.Function):
    """x W^T + b and its gradients, those in `chosen` by oneDNN."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, chosen: tuple[str, ...]
    ) -> torch.Tensor:
        x_needs, weight_needs, *_ = ctx.needs_input_grad
        ctx.save_for_backward(x if weight_needs else None, weight if x_needs else None)
        ctx.chosen = chosen
        return (_onednn_forward if "forward" in chosen else functional.linear)(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        # a gradient that is itself differentiated or mapped needs torch's own operators
        plain = not torch.is_grad_enabled() and runs_plainly() and _is_plain(gradient)
        chosen = ctx.chosen if plain else ()
        of_x = of_weight = of_bias = None
        if weight is not None:
            of_x = (_onednn_input if "input" in chosen else _torch_input)(gradient, weight)
        if x is not None:
            of_weight = (_onednn_weight if "weight" in chosen else _torch_weight)(gradient, x)
        if ctx.needs_input_grad[2]:
            of_bias = _rows(gradient).sum(0)
        return of_x, of_weight, of_bias, None


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1])  # unlike flatten, torch can map it over a batch of gradients


def _onednn_forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    product: Any = onednn_linear()
    output: torch.Tensor = product(x, weight, bias, "none", [], "")
    return output


def _onednn_input(gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return _onednn_forward(gradient, weight.t(), None)


def _torch_input(gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return gradient @ weight


def _onednn_weight(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The gradient of W. The operator copies its first argument, so that is the smaller one."""
    gradient, x = _rows(gradient), _rows(x)
    if gradient.shape[1] <= x.shape[1]:
        return _onednn_forward(gradient.t(), x.t(), None)
    return _onednn_forward(x.t(), gradient.t(), None).t()


def _torch_weight(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return _rows(gradient).t() @ _rows(x)


# -- which implementation is faster

Shapes = tuple[str, int, int, int, bool, int]
"""A class of shapes: the kind of product, rows, inputs, outputs, whether the weight is contiguous, threads."""

_faster: dict[Shapes, bool] = {}
"""Whether oneDNN is faster, by class of shapes: what this process has measured or read."""

_read: set[Path] = set()
"""The files that this process has read."""


def _is_faster(kind: str, x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether oneDNN computes a kind of product faster than torch's default."""
    outputs, inputs = weight.shape
    rows = min(1 << (x.numel() // inputs - 1).bit_length(), MAX_ROWS)
    shapes = (kind, rows, inputs, outputs, weight.is_contiguous(), torch.get_num_threads())
    known = _faster.get(shapes)
    if known is None:
        _read_choices()
        known = _faster.get(shapes)
    if known is None:
        known = _faster[shapes] = _measure(kind, rows, weight)
        _write_choices()
    return known


def _measure(kind: str, rows: int, weight: torch.Tensor) -> bool:
    """Time both implementations of a product in turn, and compare the shortest times."""
    with torch.inference_mode(False), torch.no_grad():
        weight = weight.detach()[:MAX_WIDTH, :MAX_WIDTH]
        x, gradient = weight.new_ones(rows, weight.shape[1]), weight.new_ones(rows, weight.shape[0])
        implementations: Mapping[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
            "forward": (lambda: functional.linear(x, weight), lambda: _onednn_forward(x, weight, None)),
            "input": (lambda: _torch_input(gradient, weight), lambda: _onednn_input(gradient, weight)),
            "weight": (lambda: _torch_weight(gradient, x), lambda: _onednn_weight(gradient, x)),
        }
        turns = implementations[kind]
        shortest = [float("inf"), float("inf")]
        for number in range(-1, 4):  # the first round, in which kernels are compiled, does not count
            for side, turn in enumerate(turns):
                start = time.perf_counter()
                turn()
                if number >= 0:
                    shortest[side] = min(shortest[side], time.perf_counter() - start)
    return shortest[1] <= ADVANTAGE * shortest[0]


def _choices_file() -> Path | None:
    """The file of what was measured with this processor and this torch; None where nothing is cached."""
    folder = cache_folder()
    if folder is None:
        return None
    facts = json.dumps([VERSION, torch.__version__, torch.__config__.show(), processor_facts()], sort_keys=True)
    return folder / "products" / f"{hashlib.sha256(facts.encode()).hexdigest()[:32]}.json"


def _read_choices() -> None:
    """Add what other processes have measured; a damaged file counts as none."""
    path = _choices_file()
    if path is None or path in _read or not path.is_file():
        return
    _read.add(path)
    with contextlib.suppress(DeltuneError):
        for name, faster in read_json_object(path).items():
            kind, *numbers = name.split()
            if kind in ("forward", "input", "weight") and len(numbers) == 5 and isinstance(faster, bool):
                with contextlib.suppress(ValueError):
                    rows, inputs, outputs, contiguous, threads = map(int, numbers)
                    _faster.setdefault((kind, rows, inputs, outputs, bool(contiguous), threads), faster)


def _write_choices() -> None:
    """Write everything that is known; a folder that cannot be written is a warning."""
    path = _choices_file()
    if path is None:
        return
    known = list(_faster.items())  # a copy, made in one step: other threads measure too
    try:
        os.makedirs(path.parent, exist_ok=True)
        write_json(path, {" ".join(str(int(f) if isinstance(f, bool) else f) for f in k): v for k, v in known})
    except OSError as error:
        warnings.warn(f"measured products cannot be kept in {path.parent} ({error})", stacklevel=2)
