"""What a pass computes and keeps: no more products, copies or tensors than the arithmetic needs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

import deltune

from .families import FAMILIES
from .specimens import batch, build, distance, equal, forward, specimen, stir

WITHOUT = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


class Narrow(TorchDispatchMode):
    """Counts products of two matrices by their columns, where these are fewer than any width of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.columns: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default and found.shape[-1] < 10:
            self.columns[found.shape[-1]] += 1
        return found


def narrow(model: PreTrainedModel, inputs: dict[str, Any]) -> dict[int, int]:
    with Narrow() as found:
        forward(model, inputs)
    return dict(found.columns)


@pytest.mark.parametrize(
    ("family", "text", "products"),
    [
        ("bert", "lora(rank=2)", {4: 2}),
        ("bert", "lora(rank=2, at=('query', 'key', 'value'))", {6: 2}),
        ("bert", "lora(rank=2, at='query') + lora(rank=3, at='query') + lora(rank=1, at='value', scale=2)", {6: 2}),
        ("bert", "lora(rank=2, at=('query', 'output'))", {2: 4}),
        ("bert", "apet(lora(rank=2), parameters=200)", {4: 2}),
        ("gpt2", "lora(rank=2)", {4: 2}),
        ("gpt_neox", "lora(rank=2)", {4: 2}),
        ("llama", "lora(rank=2)", {4: 2}),
        ("llama", "lora(rank=2, at='ffn')", {4: 2, 2: 2}),  # gate and up read one x, down another
        ("t5", "lora(rank=2)", {4: 4, 2: 4}),  # a cross-attention's query and value read different ones
        ("t5", "lora(rank=2, at=('key', 'value'))", {4: 6}),
    ],
)
def test_what_reads_one_tensor_projects_it_once(family: str, text: str, products: dict[int, int]) -> None:
    """Two layers in each stack; the sums of ranks that read one tensor are the columns of one product."""
    model = build(FAMILIES[family], "base")
    inputs = batch(model)
    assert narrow(model, inputs) == {}
    tuned = deltune.attach(model, text)
    assert narrow(model, inputs) == products
    assert all(e.sharing is None or (e.sharing.u, e.sharing.waiting) == (None, {}) for e in tuned.delta().all_edits())


@pytest.mark.parametrize(
    "text", ["lora(rank=2, dropout=0.5)", "lora(rank=2, at='query') + lora(rank=2, at='value', dropout=0.5)"]
)
def test_with_dropout_each_draws_its_own(text: str) -> None:
    model = build(FAMILIES["bert"], "base")
    inputs = batch(model)
    deltune.attach(model, text)
    assert narrow(model, inputs) == {4: 2}
    model.train()
    assert narrow(model, inputs) == {2: 4}


def test_rows_that_differ_project_once_each() -> None:
    model = specimen("bert", "base")
    inputs = batch(model)
    for name in ("one", "two"):
        tuned = deltune.attach(model, "lora(rank=2)", name=name)
    with tuned.rows(["one", "two"]):
        assert narrow(model, inputs) == {4: 4}
    tuned.detach()


@pytest.mark.parametrize("mode", WITHOUT)
@pytest.mark.parametrize(
    "text",
    [
        "lora(rank=2)",
        "ia3",
        "lora(rank=2, at=('key', 'value')) + ia3",
        "Modification('query', Vector()) + lora(rank=2)",
    ],
)
@pytest.mark.parametrize("family", ["bert", "gpt2", "gpt_neox", "llama", "t5", "bart"])
def test_without_gradients_the_same_is_computed(family: str, text: str, mode: str) -> None:
    model = specimen(family)
    inputs = batch(model)
    tuned = stir(deltune.attach(model, text))
    expected = forward(model, inputs)
    with WITHOUT[mode]():
        assert distance(forward(model, inputs), expected) < (1e-12 if FAMILIES[family].exact else 1e-5)
        assert equal(forward(model, inputs), forward(model, inputs))
    tuned.detach()


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_what_another_hook_saw_stays_as_it_was(family: str, everywhere: bool) -> None:
    """Without gradients an output is overwritten, but only where nobody else can hold it."""
    model = specimen(family)
    inputs = batch(model)
    tuned = deltune.attach(model, "lora(rank=2)")
    path = next(tuned.delta().all_edits()).place.target.path
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(module: torch.nn.Module, args: Any, output: Any) -> None:
        if module is model.get_submodule(path):
            seen.append((output, output.clone()))

    stir(tuned)
    with torch.no_grad():
        expected = forward(model, inputs)
        hooks = torch.nn.modules.module.register_module_forward_hook if everywhere else None
        handle = hooks(keep) if hooks else model.get_submodule(path).register_forward_hook(keep, prepend=True)
        assert equal(forward(model, inputs), expected)
    handle.remove()
    assert len(seen) == 1
    assert torch.equal(*seen[0])
    tuned.detach()
