"""Sums and raw modifications that no row of the table has: merging, masks and refusals hold for them too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import deltune
from deltune.methods import library
from deltune.methods.spec import Modification
from tables.families import FAMILIES
from tables.specimens import batch, build, distance, equal, forward, stir


@pytest.mark.parametrize("family", ["bert", "gpt2", "gpt_neox", "phi3", "llama"])
@pytest.mark.parametrize(
    "text",
    [
        "ia3 + lora(at='ffn')",
        "lora(at='ffn') + ia3",
        "lora(at=('key', 'value')) + ia3",
        "ia3 + lora(at=('key', 'value'), scale=3)",
        "lora(rank=2) + lora(rank=3, scale=2) + layernorm",
        "apet(lora(at='ffn'), parameters=50) + full",
        "Modification('key', Rescale(), 'sequential', compose=Scale(2))",
        "lora(at='query') + Modification('query', LowRank(2), 'sequential', compose=Scale(0.5))",
        "Modification('ffn_inner', LowRank(2), 'sequential') + ia3",
    ],
)
@pytest.mark.sample(22)
def test_sums_merge_in_the_order_they_run(family: str, text: str) -> None:
    model = build(FAMILIES[family], "base")
    inputs = batch(model)
    tuned = stir(deltune.attach(model, text))
    expected = forward(model, inputs)
    tuned.merge()
    assert distance(forward(model, inputs), expected) < (1e-12 if FAMILIES[family].exact else 1e-5)


class Joined(TorchDispatchMode):
    """Counts what is joined by concatenation of more than vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        self.count += func is torch.ops.aten.cat.default and output.dim() > 2
        return output


@pytest.mark.parametrize(("text", "joins"), [("ia3", 0), ("ia3 + lora(at=('key', 'value'))", 2), ("lora(rank=2)", 2)])
@pytest.mark.parametrize("family", ["gpt2", "gpt_neox"])
def test_a_fused_projection_is_multiplied_as_a_whole(family: str, text: str, joins: int) -> None:
    """One product in each of two layers where scales are all; else its output is taken apart and joined once."""
    model = build(FAMILIES[family], "base")
    inputs = batch(model)

    def counted() -> int:
        with Joined() as joined:
            forward(model, inputs)
        return joined.count

    before = counted()
    deltune.attach(model, text)
    assert counted() - before == joins


@pytest.mark.parametrize(
    "text",
    [
        "Modification('ffn', LowRank(2))",
        "Modification('query', Bottleneck(2), 'sequential')",
        "Modification('query', LowRank(2), compose=SigmoidGate('g'))",
    ],
)
def test_what_is_no_weight_does_not_merge(text: str) -> None:
    model = build(FAMILIES["bert"], "base")
    inputs = batch(model)
    tuned = stir(deltune.attach(model, text))
    expected = forward(model, inputs)
    with pytest.raises(deltune.DeltuneError, match="cannot be merged"):
        tuned.merge()
    assert equal(forward(model, inputs), expected)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Modification('ffn', OwnMultiHead(3))", "whose heads can be seen"),
        ("Modification('ffn_up', Rescale())", "as wide as h"),
        ("apet(layernorm, parameters=20) + apet(layernorm, parameters=20, seed=1)", "one of them in part"),
        ("apet(layernorm, parameters=20) + layernorm", "one of them in part"),
        ("apet(adapter(layer_norm=True), parameters=20)", "no LayerNorm of its own"),
        ("apet(prefix(reparameterise=8), parameters=20)", "reparameterise=None"),
    ],
)
def test_a_refusal_leaves_the_model_as_it_was(text: str, message: str) -> None:
    model = build(FAMILIES["bert"], "base")
    with pytest.raises(deltune.DeltuneError, match=message):
        deltune.attach(model, text)
    assert "deltune" not in model._modules
    assert all(p.requires_grad for p in model.parameters())


def test_gates_of_two_terms_are_two() -> None:
    model = build(FAMILIES["bert"], "base")
    small = "unipelt(length=2, rank=2, bottleneck=2)"
    tuned = deltune.attach(model, f"{small} + apet({small}, parameters=400)")
    assert tuned.count().trained == sum(p.numel() for p in tuned.trainable_parameters())
    assert tuned.count().method == deltune.count(model, small).method + 400


@pytest.mark.parametrize(
    "make",
    [
        lambda: library.lora(rank=2.5),
        lambda: library.adapter(style="pfeifer"),
        lambda: library.layernorm(terms="gains"),
        lambda: library.apet("foo", 5),
        lambda: deltune.Bottleneck(2, init="xavier"),
        lambda: deltune.Vector(where="foo"),
        lambda: deltune.Modification("ffn", 4),
        lambda: deltune.Modification("query", deltune.LowRank(2), x="residual"),
        lambda: deltune.Selection(("linear.bias",), of="embedding"),
        lambda: deltune.Scale(float("nan")),
        lambda: deltune.lora(rank=0, alpha=8),
    ],
)
def test_python_is_checked_as_the_parser_is(make: Callable[[], Any]) -> None:
    with pytest.raises(deltune.DeltuneError):
        make()


def test_a_list_is_as_good_as_a_tuple() -> None:
    one = Modification("ffn", deltune.Bottleneck(2), layers=[0])  # type: ignore[arg-type]
    assert hash(one) == hash(Modification("ffn", deltune.Bottleneck(2), layers=(0,)))


def test_a_share_is_of_the_base_model_whatever_class_is_attached() -> None:
    counts = {
        role: deltune.count(build(FAMILIES["bert"], role), "apet(layernorm, parameters='0.5%')").method
        for role in ("base", "sequence", "masked")
    }
    assert len(set(counts.values())) == 1, counts


def test_a_head_of_another_width_is_refused(tmp_path: Any) -> None:
    model = build(FAMILIES["bert"], "sequence")
    tuned = deltune.attach(model, "layernorm")
    tuned.attached.state.set_parameter("classifier.weight", torch.nn.Parameter(torch.zeros(3, 7, dtype=torch.float64)))
    tuned.save(tmp_path / "d")
    fresh = build(FAMILIES["bert"], "sequence")
    with pytest.raises(deltune.DeltuneError, match="only the number of labels may differ"):
        deltune.load(fresh, tmp_path / "d")
    assert "deltune" not in fresh._modules
