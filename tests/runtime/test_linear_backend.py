"""Frozen linear layers that compute by oneDNN: torch's numbers to float32's precision, however a layer is used."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from transformers.pytorch_utils import Conv1D

import deltune
from deltune.compat import find_onednn_linear
from deltune.runtime import linear
from tables.families import FAMILIES
from tables.specimens import batch, build, differences, distance, facts, forward, loss, main_role

pytestmark = pytest.mark.skipif(find_onednn_linear() is None, reason="no oneDNN in this build of torch")

SIZES = [(1, 8, 8), (3, 24, 40), (64, 384, 384), (40, 384, 1536), (64, 1536, 384), (2, 768, 8), (128, 8, 768)]
"""Rows, inputs, outputs."""

CLASSES: dict[str, Callable[[int, int], nn.Module]] = {
    "Linear": nn.Linear,
    "no bias": lambda inputs, outputs_: nn.Linear(inputs, outputs_, bias=False),
    "Conv1D": lambda inputs, outputs_: Conv1D(outputs_, inputs),
}


@pytest.fixture(autouse=True)
def small_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of every size are computed by oneDNN."""
    monkeypatch.setattr(linear, "MIN_OPERATIONS", 1)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The products that oneDNN computes in a test."""
    product, kinds = find_onednn_linear(), list[str]()

    def counted(*arguments: Any) -> Any:
        kinds.append("product")
        return product(*arguments)

    monkeypatch.setattr(linear, "find_onednn_linear", lambda: counted)
    return kinds


def pair(kind: str = "Linear", inputs: int = 24, outputs_: int = 40) -> tuple[Any, Any]:
    """A layer that computes by oneDNN, and the same one that does not."""
    torch.manual_seed(0)
    layer = CLASSES[kind](inputs, outputs_)
    layer.requires_grad_(False)
    plain = copy.deepcopy(layer)
    deltune.optimize_linear(layer)
    return layer, plain


def within_rounding(value: torch.Tensor, exact: torch.Tensor, magnitude: torch.Tensor, terms: int) -> bool:
    """Whether a sum is as exact as one in float32 must be, in whatever order and by whatever library it is added.

    Args:
        value: The sum of so many terms, in float32.
        exact: The same, in float64.
        magnitude: The sum of the absolute terms.
        terms: Their number n; the bound is n u Σ|a b| with u = 2^-24 (Higham 2002, section 3.1).
    """
    return bool(((value.double() - exact).abs() <= terms * 2**-24 * magnitude).all())


def close(value: torch.Tensor, other: torch.Tensor) -> bool:
    return value.shape == other.shape and torch.allclose(value, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_value_and_gradients_are_exact_in_float32(kind: str, size: tuple[int, int, int]) -> None:
    rows, inputs, width = size
    layer, _ = pair(kind, inputs, width)
    if layer.bias is not None:
        layer.bias.requires_grad_(True)
    x, gradient = torch.randn(2, rows, inputs), torch.randn(2, rows, width)
    leaf = x.clone().requires_grad_()
    y = layer(leaf)
    y.backward(gradient)
    weight = layer.weight if kind == "Conv1D" else layer.weight.t()
    products = [  # a result, its factors, and what is added
        (y, x, weight, layer.bias),
        (leaf.grad, gradient, weight.t(), None),
    ]
    if layer.bias is not None:
        products.append((layer.bias.grad, torch.ones(2 * rows), gradient.flatten(0, -2), None))
    for result, left, right, more in products:
        left, right, more = (None if t is None else t.detach().double() for t in (left, right, more))
        exact, magnitude = left @ right, left.abs() @ right.abs()
        if more is not None:
            exact, magnitude = exact + more, magnitude + more.abs()
        assert within_rounding(result, exact, magnitude, left.shape[-1] + (more is not None))
    assert y.is_contiguous() and leaf.grad is not None and leaf.grad.is_contiguous()


STRIDES: dict[str, Callable[[], torch.Tensor]] = {
    "transposed": lambda: torch.randn(24, 7).t(),
    "every second": lambda: torch.randn(5, 48)[:, ::2],
    "expanded": lambda: torch.randn(1, 24).expand(6, 24),
    "swapped": lambda: torch.randn(3, 24, 4).transpose(1, 2),
    "four dimensions": lambda: torch.randn(2, 3, 5, 24),
    "a vector": lambda: torch.randn(24),
    "no rows": lambda: torch.randn(0, 24),
    "an offset": lambda: torch.randn(9, 24)[3:],
}


@pytest.mark.parametrize("layout", STRIDES)
@pytest.mark.parametrize("trained", [True, False])
def test_inputs_and_gradients_in_any_layout(layout: str, trained: bool) -> None:
    layer, plain = pair()
    x = STRIDES[layout]()
    gradients = []
    for one in (layer, plain):
        one.requires_grad_(trained)
        leaf = x.detach().requires_grad_()
        y = one(leaf)
        y.sum().backward()  # whose gradient is expanded
        gradients.append([y, leaf.grad, *(p.grad for p in one.parameters() if trained)])
    assert all(close(a, b) for a, b in zip(*gradients, strict=True))


def test_double_backward() -> None:
    layer, plain = pair()
    x = torch.randn(3, 24, requires_grad=True)
    seconds = []
    for one in (layer, plain):
        one.bias.requires_grad_(True)
        (first,) = torch.autograd.grad(one(x).pow(3).sum(), x, create_graph=True)
        seconds.append(torch.autograd.grad(first.pow(2).sum(), [x, one.bias]))
    assert all(torch.allclose(a, b, rtol=1e-3, atol=1e-2) for a, b in zip(*seconds, strict=True))


# -- what oneDNN does not compute


def mapped_gradients(layer: nn.Module) -> torch.Tensor:
    x = torch.arange(72.0).view(3, 24).requires_grad_()
    (rows,) = torch.autograd.grad(layer(x), x, torch.eye(3)[:, :, None].expand(3, 3, 40), is_grads_batched=True)
    return rows


def dual(layer: nn.Module) -> torch.Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(layer(forward_ad.make_dual(torch.ones(3, 24), torch.ones(3, 24)))).tangent


def autocast(layer: nn.Module) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return layer(torch.ones(3, 24))


def exported(layer: nn.Module, strict: bool) -> torch.Tensor:
    program = torch.export.export(nn.Sequential(layer), (torch.ones(3, 24),), strict=strict)
    assert "mkldnn" not in str(program.graph)
    return program.module()(torch.ones(3, 24))


def traced(layer: nn.Module) -> torch.Tensor:
    return torch.jit.trace(layer, (torch.ones(3, 24),), check_trace=False)(torch.ones(3, 24))


def without_onednn(layer: nn.Module) -> torch.Tensor:
    with torch.backends.mkldnn.flags(enabled=False):
        return layer(torch.ones(3, 24))


class Subclass(torch.Tensor):
    """A subclass of tensors."""


ASIDE: dict[str, Callable[[nn.Module], torch.Tensor]] = {
    "autocast": autocast,
    "torch.compile": lambda layer: torch.compile(layer, fullgraph=True, backend="aot_eager")(torch.ones(3, 24)),
    "torch.export": lambda layer: exported(layer, strict=False),
    "torch.export, strict": lambda layer: exported(layer, strict=True),
    "torch.jit.trace": traced,
    "vmap": lambda layer: torch.vmap(layer)(torch.ones(5, 3, 24)),
    "jacrev": lambda layer: torch.func.jacrev(lambda x: layer(x).sum(0))(torch.ones(3, 24)),
    "jacfwd": lambda layer: torch.func.jacfwd(lambda x: layer(x).sum(0))(torch.ones(3, 24)),
    "forward mode": dual,
    "float64": lambda layer: copy.deepcopy(layer).double()(torch.ones(3, 24, dtype=torch.float64)),
    "bfloat16": lambda layer: copy.deepcopy(layer).bfloat16()(torch.ones(3, 24, dtype=torch.bfloat16)),
    "a subclass": lambda layer: layer(torch.ones(3, 24).as_subclass(Subclass)).as_subclass(torch.Tensor),
    "oneDNN switched off": without_onednn,
}


@pytest.mark.parametrize("use", ASIDE)
def test_torch_computes_what_onednn_cannot(use: str, calls: list[str]) -> None:
    layer, plain = pair()
    expected = ASIDE[use](plain)
    result = ASIDE[use](layer)
    assert not calls
    assert result.dtype == expected.dtype and torch.equal(result, expected)


def test_gradients_that_are_mapped_are_those_of_torch() -> None:
    layer, plain = pair()
    assert close(mapped_gradients(layer), mapped_gradients(plain))


def test_modes_see_the_operators_of_torch(calls: list[str]) -> None:
    layer, plain = pair()
    operations = []
    for one in (layer, plain):
        with FlopCounterMode(display=False) as counter:
            one(torch.ones(3, 24, requires_grad=True)).sum().backward()
        operations.append(counter.get_total_flops())
    assert operations[0] == operations[1] > 0
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert layer(mode.from_tensor(torch.ones(3, 24))).shape == (3, 40)
    assert layer.to("meta")(torch.ones(3, 24, device="meta")).shape == (3, 40)
    assert not calls


# -- where oneDNN computes


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant: bool) -> None:
    layer, plain = pair()
    x = torch.randn(3, 24, requires_grad=True)
    checkpoint(lambda h: layer(h).pow(2), x, use_reentrant=reentrant).sum().backward()
    (expected,) = torch.autograd.grad(plain(x).pow(2).sum(), x)
    assert x.grad is not None and close(x.grad, expected)


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
}


@pytest.mark.parametrize("how", COPIES)
def test_copies_compute_with_their_own_weights(how: str, calls: list[str]) -> None:
    layer, plain = pair()
    model = nn.Sequential(layer, nn.ReLU())
    other = COPIES[how](model)
    with torch.no_grad():
        layer.weight.zero_()
    assert close(other(torch.ones(3, 24)), plain(torch.ones(3, 24)).relu()) and calls
    deltune.optimize_linear(other, enabled=False)
    assert "forward" in layer.__dict__ and "forward" not in other[0].__dict__


# -- on models


METHODS = ("lora(rank=4)", "prefix(length=4) + layernorm", "full", "diff_pruning", "parallel_adapter(rank=4) + bitfit")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["bert", "gpt2"])
@pytest.mark.parametrize("first", ["optimize_linear", "attach"])
@pytest.mark.sample(10)
def test_tuned_models_train_alike_and_all_is_restored(family: str, method: str, first: str, calls: list[str]) -> None:
    losses = []
    for optimized in (False, True):
        model = build(FAMILIES[family], main_role(FAMILIES[family]), torch.float32)
        before = facts(model)
        if first == "optimize_linear":
            deltune.optimize_linear(model, enabled=optimized)
        torch.manual_seed(0)
        tuned = deltune.attach(model, method)
        if first == "attach":
            deltune.optimize_linear(model, enabled=optimized)
        optimizer = torch.optim.SGD(list(tuned.trainable_parameters()), 0.1)
        taken = []
        for _ in range(2):
            value = loss(forward(model, batch(model)))
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            taken.append(value.item())
        losses.append(taken)
        assert bool(calls) == (optimized and method != "full")
        if first == "attach":
            deltune.optimize_linear(model, enabled=False)
        tuned.detach()
        deltune.optimize_linear(model, enabled=False)
        assert differences(before, facts(model)) == []
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_rows_with_a_delta_each_are_computed_alike(calls: list[str]) -> None:
    results = []
    for optimized in (False, True):
        model = build(FAMILIES["bert"], "sequence", torch.float32)
        torch.manual_seed(0)
        tuned = deltune.attach(model, "lora(rank=4) + bitfit", name="a")
        deltune.attach(model, "bitfit(which='linear')", name="b")
        deltune.optimize_linear(model, enabled=optimized)
        with torch.no_grad(), tuned.rows(["a", "b", None]):
            results.append(forward(model, batch(model, rows=3)))
    assert calls and distance(*results) < 1e-5


# -- what is touched


def test_nothing_else_is_touched() -> None:
    class Other(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + 1

    replaced = nn.Linear(3, 3)
    replaced.forward = lambda x: x  # type: ignore[method-assign]
    model = nn.ModuleList([Other(3, 3), replaced, nn.LayerNorm(3)])
    before = [dict(module.__dict__) for module in model]
    deltune.optimize_linear(model)
    deltune.optimize_linear(model, enabled=False)
    assert [dict(module.__dict__) for module in model] == before


def test_trained_weights_are_torch_s(calls: list[str]) -> None:
    layer, _ = pair()
    layer.weight.requires_grad_(True)
    layer(torch.ones(3, 24)).sum().backward()
    assert not calls and layer.weight.grad is not None
    with torch.no_grad():
        layer(torch.ones(3, 24))
    assert calls


def test_small_products_stay_those_of_torch(monkeypatch: pytest.MonkeyPatch, calls: list[str]) -> None:
    monkeypatch.setattr(linear, "MIN_OPERATIONS", 2 * 3 * 24 * 40 + 1)
    pair()[0](torch.ones(3, 24))
    assert not calls
