"""What a pass computes and keeps: no more hooks, copies or tensors than the arithmetic needs."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

import deltune
from deltune.methods.compositions import Composition
from deltune.methods.forms.base import Form, Place, TensorSpec
from deltune.methods.forms.hidden import Rescale
from deltune.methods.forms.low_rank import LowRank
from deltune.methods.spec import Modification
from deltune.runtime.modules import Edit
from tables.families import FAMILIES
from tables.specimens import batch, build, distance, equal, forward, loss, specimen, stir

WITHOUT = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


class Written(TorchDispatchMode):
    """Counts the outputs of products with given weights, and how many of them were written to later."""

    def __init__(self, weights: Counter[int]) -> None:
        super().__init__()
        self.weights = weights
        self.alive: list[torch.Tensor] = []
        self.outputs: set[int] = set()
        self.made = self.overwritten = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if first is not None and func._schema.is_mutable and first.untyped_storage().data_ptr() in self.outputs:
            self.outputs.remove(first.untyped_storage().data_ptr())
            self.overwritten += 1
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.addmm.default and args[2].untyped_storage().data_ptr() in self.weights:
            self.alive.append(result)  # so that no other tensor comes to lie there
            self.outputs.add(result.untyped_storage().data_ptr())
            self.made += 1
        return result


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


@pytest.mark.parametrize(("family", "text"), [("bert", "lora(rank=2)"), ("gpt2", "lora(rank=2)"), ("bert", "ia3")])
def test_without_gradients_an_output_is_overwritten(family: str, text: str) -> None:
    """The projection's hooks beside ours would forbid it; its own product tells where its output was."""
    model = specimen(family)
    inputs = batch(model)
    tuned = stir(deltune.attach(model, text))
    places = {edit.place.target for edit in tuned.delta().all_edits() if edit.place.target.side == "output"}
    with Written(Counter(m.weight.data_ptr() for m in {model.get_submodule(place.path) for place in places})) as kept:
        with torch.no_grad():
            forward(model, inputs)
        assert kept.overwritten == kept.made > 0
        forward(model, inputs)
    assert kept.overwritten == kept.made / 2
    tuned.detach()


def _hook(module: torch.nn.Module, keep: Callable[..., None]) -> Callable[[], object]:
    return module.register_forward_hook(keep, prepend=True).remove


def _hook_everywhere(module: torch.nn.Module, keep: Callable[..., None]) -> Callable[[], object]:
    return torch.nn.modules.module.register_module_forward_hook(keep).remove


def _own_forward(module: torch.nn.Module, keep: Callable[..., None]) -> Callable[[], object]:
    def forward(*args: Any) -> Any:
        output = type(module).forward(module, *args)
        keep(module, args, output)
        return output

    module.forward = forward
    return lambda: module.__dict__.pop("forward")


@pytest.mark.parametrize("holder", [_hook, _hook_everywhere, _own_forward])
@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_what_another_hook_saw_stays_as_it_was(family: str, holder: Callable[..., Callable[[], object]]) -> None:
    """Without gradients an output is overwritten, but only where nobody else can hold it."""
    model = specimen(family)
    inputs = batch(model)
    tuned = stir(deltune.attach(model, "lora(rank=2)"))
    module = model.get_submodule(next(tuned.delta().all_edits()).place.target.path)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(its: torch.nn.Module, args: Any, output: Any) -> None:
        if its is module:
            seen.append((output, output.clone()))

    with torch.no_grad():
        expected = forward(model, inputs)
        remove = holder(module, keep)
        assert equal(forward(model, inputs), expected)
    remove()
    assert len(seen) == 1
    assert torch.equal(*seen[0])
    tuned.detach()


def stopping(edit: Edit, model: PreTrainedModel) -> Any:
    """A hook that interrupts the pass before an edit acts."""

    def stop(*of: Any) -> None:
        raise KeyboardInterrupt

    return model.get_submodule(edit.place.target.path).register_forward_pre_hook(stop)


def test_an_interrupted_pass_leaves_nothing_behind() -> None:
    """x was noted, and whoever reads it never came: a copy would have to copy its graph."""
    model = build(FAMILIES["bert"], "base")
    inputs = batch(model)
    tuned = stir(deltune.attach(model, "parallel_adapter(rank=2)"))
    expected = forward(model, inputs)
    noted: list[weakref.ReferenceType[torch.Tensor]] = []
    edit = next(tuned.delta().all_edits())
    entered = model.get_submodule(edit.source_path)
    watch = entered.register_forward_pre_hook(lambda module, args: noted.append(weakref.ref(args[0])))
    hook = stopping(edit, model)
    with pytest.raises(KeyboardInterrupt):
        forward(model, inputs)
    gc.collect()
    assert noted and noted[0]() is None
    hook.remove()
    watch.remove()
    for one in (copy.deepcopy(model), model):
        assert equal(forward(one, inputs), expected)


@pytest.mark.parametrize(
    ("text", "before", "after"),
    [
        ("lora(rank=2)", 0, 4),
        ("ia3", 2, 4),
        ("adapter(rank=2)", 0, 4),
        ("parallel_adapter(rank=2)", 2, 2),
        ("lora(rank=2) + parallel_adapter(rank=2)", 2, 6),
        ("layernorm", 0, 0),
        ("prefix(length=2)", 0, 0),
    ],
)
def test_a_module_has_the_hooks_that_are_needed(text: str, before: int, after: int) -> None:
    """Two layers. Whoever reads what his own module reads is given it, and needs no hook before."""
    model = build(FAMILIES["bert"], "base")
    deltune.attach(model, text)
    assert sum(len(m._forward_pre_hooks) for m in model.modules()) == before
    assert sum(len(m._forward_hooks) for m in model.modules()) == after


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("which", ["query", "query, key and value"])
def test_a_projection_checkpointed_by_itself(which: str, reentrant: bool) -> None:
    model = build(FAMILIES["bert"], "base")
    inputs = batch(model)
    tuned = stir(deltune.attach(model, "lora(rank=2)"))
    inputs = {"inputs_embeds": model.get_input_embeddings()(inputs["input_ids"]).detach().requires_grad_(), **inputs}
    del inputs["input_ids"]

    def gradients() -> list[torch.Tensor]:
        tuned.zero_grad()
        loss(forward(model, inputs)).backward()
        return [p.grad.clone() for p in tuned.trainable_parameters() if p.grad is not None]

    expected = gradients()
    for layer in deltune.inspect(model).layers:
        for part in (layer.attentions[0].query, layer.attentions[0].value):
            if part is not None and (which != "query" or part is layer.attentions[0].query):
                module = model.get_submodule(part.path)
                module._call_impl = partial(checkpoint, module._call_impl, use_reentrant=reentrant)
    actual = gradients()
    assert len(actual) == len(expected)
    assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-14) for a, b in zip(actual, expected, strict=True))


def test_a_hook_that_gives_a_projection_another_tensor() -> None:
    """An edit reads what its module really reads, as a merged one does."""
    model = build(FAMILIES["bert"], "base")
    inputs = batch(model)
    tuned = stir(deltune.attach(model, "lora(rank=2)"))
    value = model.get_submodule(next(e for e in tuned.delta().all_edits() if "value" in e.place.name).place.target.path)
    before = forward(model, inputs)
    value.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    with torch.no_grad():
        output = forward(model, inputs)
        with tuned.rows(["default", None]):
            mixed = forward(model, inputs)
        with tuned.disable():
            plain = forward(model, inputs)
    for row, alone in enumerate((output, plain)):
        assert distance({k: v[row] for k, v in mixed.items()}, {k: v[row] for k, v in alone.items()}) < 1e-12
    tuned.merge()
    assert distance(forward(model, inputs), output) < 1e-12
    assert distance(output, before) > 1e-3


def test_an_ensemble_of_deltas_is_mapped() -> None:
    model = specimen("bert")
    inputs = batch(model)
    tuned = stir(deltune.attach(model, "lora(rank=2)"))
    parameters = {n: p.detach() for n, p in model.named_parameters() if n.startswith("deltune.") and p.requires_grad}
    several = {n: torch.stack([p, 2 * p, -p]) for n, p in parameters.items()}
    for mode in (torch.enable_grad, torch.no_grad):
        with mode():
            logits = torch.func.vmap(lambda p: torch.func.functional_call(model, p, (), inputs).logits)(several)
            alone = forward(model, inputs)["logits"]
        assert torch.allclose(logits[0], alone, rtol=1e-10, atol=1e-12)
        assert not torch.allclose(logits[0], logits[1])
    tuned.detach()


class Tanh(LowRank):
    """With something of its own between its two products."""

    def split_at_up(self, tensors: Any, u: torch.Tensor, at: Place) -> Any:
        v, up, bias = super().split_at_up(tensors, u, at)
        return torch.tanh(v), up, bias


class Biased(LowRank):
    """With a bias above, which no product adds."""

    def tensors(self, widths: Any) -> Any:
        return super().tensors(widths) | {"up_bias": TensorSpec((widths.out_width,))}

    def initialize(self, tensors: Any, at: Place | None) -> None:
        for tensor in tensors.values():
            torch.nn.init.normal_(tensor)

    def split_at_up(self, tensors: Any, u: torch.Tensor, at: Place) -> Any:
        v, up, _ = super().split_at_up(tensors, u, at)
        return v, up, tensors["up_bias"]


class First(Rescale):
    """Δh is a view of h."""

    multiplies = None

    def __call__(self, tensors: Any, u: torch.Tensor, at: Place) -> torch.Tensor:
        return u[:, :1].expand_as(u)


@pytest.mark.parametrize("form", [Tanh(2), Biased(2)])
def test_forms_of_others_are_added_as_they_are(form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(FAMILIES["bert"], "base")
    inputs = batch(model)
    stir(deltune.attach(model, Modification("query", form) + Modification("value", form)))
    output = forward(model, inputs)
    with torch.no_grad():
        overwriting = forward(model, inputs)
    monkeypatch.setattr(Form, "add_to", lambda self, h, tensors, u, at, scale, out: h + self(tensors, u, at))
    expected = forward(model, inputs)
    assert distance(output, expected) < 1e-12 and distance(overwriting, expected) < 1e-12


def test_what_is_read_is_not_overwritten_meanwhile() -> None:
    model = build(FAMILIES["bert"], "base")
    inputs = batch(model)
    deltune.attach(model, Modification("query", First(), "sequential"))
    expected = forward(model, inputs)
    with torch.no_grad():
        assert distance(forward(model, inputs), expected) < 1e-12


@dataclass(frozen=True, repr=False)
class Taken(Composition):
    """Δh in place of h."""

    def __call__(self, h: Any, delta: torch.Tensor, tensors: Any, x: Any) -> torch.Tensor:
        return delta


class Same(Rescale):
    """Δh is u itself."""

    def __call__(self, tensors: Any, u: torch.Tensor, at: Place) -> torch.Tensor:
        return u


def test_what_a_composition_returns_is_not_overwritten() -> None:
    """Here it is x, which key and value read too."""
    model = build(FAMILIES["bert"], "base")
    inputs = batch(model)
    stir(deltune.attach(model, Modification("query", Same(), compose=Taken()) + deltune.lora(rank=2, at="query")))
    expected = forward(model, inputs)
    with torch.no_grad():
        assert distance(forward(model, inputs), expected) < 1e-12


def test_a_tensor_that_an_edit_has_no_place_for() -> None:
    class Named(LowRank):
        def tensors(self, widths: Any) -> Any:
            return super().tensors(widths) | {"factor": TensorSpec((1,))}

    model = build(FAMILIES["bert"], "base")
    with pytest.raises(deltune.DeltuneError, match="a tensor cannot be called factor"):
        deltune.attach(model, Modification("query", Named(2)))
    assert "deltune" not in model._modules


def test_what_is_detached_is_gone() -> None:
    model = specimen("bert")
    tuned = deltune.attach(model, "lora(rank=2)")
    held = weakref.ref(next(tuned.delta().all_edits()))
    gc.collect()
    gc.disable()
    try:
        tuned.detach()
        assert held() is None
    finally:
        gc.enable()
