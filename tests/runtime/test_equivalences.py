"""Different expressions of one thing: equal outputs and gradients to the last bit, given the same numbers.

Also: a method that is not in the table, defined from the public algebra alone, passes the law battery.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import deltune
from deltune import Add, Bottleneck, Gate, LowRank, Modification, Prefix, Rescale, Scale, SigmoidGate, Vector
from tables.families import FAMILIES, Family
from tables.methods import Row
from tables.specimens import batch, distance, equal, forward, loss, specimen, stir

from .test_life import LAWS, attached

FAMILIES_HERE = [FAMILIES[name] for name in ("bert", "gpt2", "llama", "bart", "t5")]

SAME: tuple[tuple[str, str], ...] = (
    ("lora(rank=2, scale=3, at='query')", "Modification('query', LowRank(2), compose=Scale(3))"),
    ("lora(rank=4, alpha=8)", "lora(rank=4, scale=2)"),
    ("lora(rank=2, at='ffn')", "Modification('ffn_up', LowRank(2)) + Modification('ffn_down', LowRank(2))"),
    ("p_tuning_v2(length=3)", "prefix(length=3)"),
    ("prefix(length=3)", "Modification('heads', Prefix(3), compose=Gate())"),
    ("prefix(length=3, gate=False)", "Modification('heads', Prefix(3), compose=Add())"),
    ("mam(length=3, rank=2, scale=2)", "prefix(length=3) + scaled_parallel_adapter(rank=2, scale=2)"),
    ("prefix_layernorm(length=3)", "prefix(length=3) + layernorm"),
    ("parallel_adapter(rank=2, scale=4, init='lora')", "scaled_parallel_adapter(rank=2)"),
    ("parallel_adapter(at=('ffn', 'attention'), rank=2)",
     "parallel_adapter(rank=2) + parallel_adapter(at='attention', rank=2)"),
    ("Modification('ffn', Bottleneck(2, activation='identity', init='lora'))", "Modification('ffn', LowRank(2))"),
)  # fmt: skip


def numbers(tuned: deltune.Tuned, name: str) -> list[torch.Tensor]:
    delta = tuned.delta(name)
    return [
        *delta.tensors_to_save().values(),
        *(tuned.attached.state.delta_value(delta, owned) for owned in delta.owned_tensor_names),
    ]


@pytest.mark.parametrize("family", FAMILIES_HERE, ids=lambda f: f.name)
@pytest.mark.parametrize(("one", "two"), SAME)
def test_two_ways_to_say_one_thing(family: Family, one: str, two: str) -> None:
    model = specimen(family.name)
    inputs = batch(model)
    tuned = stir(deltune.attach(model, one, name="one"))
    outputs = forward(model, inputs)
    loss(outputs).backward()
    gradients = [p.grad.clone() for p in tuned.trainable_parameters()]
    deltune.attach(model, two, name="two")
    try:
        mine, theirs = numbers(tuned, "two"), numbers(tuned, "one")
        assert [t.shape for t in mine] == [t.shape for t in theirs]
        with torch.no_grad():
            for to, value in zip(mine, theirs, strict=True):
                to.copy_(value)
        again = forward(model, inputs)
        loss(again).backward()
        assert equal(again, outputs)
        assert all(torch.equal(p.grad, g) for p, g in zip(tuned.trainable_parameters(), gradients, strict=True))
    finally:
        model.zero_grad()
        tuned.detach()


@pytest.mark.parametrize("family", [FAMILIES["gpt2"], FAMILIES["llama"], FAMILIES["t5"]], ids=lambda f: f.name)
def test_pfeiffer_is_the_second_half_of_houlsby(family: Family) -> None:
    """In pre-norm models, where both stand behind the FFN."""
    model = specimen(family.name)
    inputs = batch(model)
    tuned = stir(deltune.attach(model, "adapter(style='pfeiffer', rank=3)", name="pfeiffer", head="freeze"))
    expected = forward(model, inputs)
    values = iter([t.clone() for t in tuned.delta().tensors_to_save().values()])
    deltune.attach(model, "adapter(rank=3)", name="houlsby", head="freeze")
    try:
        with torch.no_grad():
            for name, tensor in tuned.delta().tensors_to_save().items():  # the first half's up projection is still zero
                if "_ffn." in name:
                    tensor.copy_(next(values))
        assert next(values, None) is None
        assert distance(forward(model, inputs), expected) < 1e-12
    finally:
        tuned.detach()


def test_low_rank_of_full_rank_is_any_change_of_the_weight() -> None:
    """W_down W_up with r = d holds any difference: LoRA then gives what full tuning of that weight gives."""
    model = specimen("bert", "base")
    inputs = batch(model)
    weight = model.encoder.layer[0].attention.self.query.weight
    change = torch.randn(weight.shape, dtype=weight.dtype, generator=torch.Generator().manual_seed(0)) * 0.1
    with torch.no_grad():
        weight += change
        expected = forward(model, inputs)
        weight -= change
    tuned = deltune.attach(model, f"lora(rank={weight.shape[0]}, at='query', layers=[0])")
    try:
        with torch.no_grad():
            edit = next(tuned.delta().all_edits())
            edit.down.copy_(torch.eye(weight.shape[0]))
            edit.up.copy_(change)
        assert distance(forward(model, inputs), expected) < 1e-12
    finally:
        tuned.detach()


# -- a method that nobody has heard of ---------------------------------------------------------------------------------

gated_rescale = (
    Modification("value", Rescale(), "sequential", Scale(0.5, learned=True), layers="upper half")
    + Modification("attention", Bottleneck(2, activation="silu"), compose=SigmoidGate("g"))
    + Modification("ffn", Vector(), "sequential")
    + Modification("query", LowRank(2), compose=Add())
    + Modification("heads", Prefix(2), compose=Gate(), attention="self")
)


@pytest.mark.parametrize("family", FAMILIES_HERE, ids=lambda f: f.name)
def test_a_new_method_is_six_lines(family: Family, tmp_path: Path, subtests: pytest.Subtests) -> None:
    """Written above with the public algebra, without touching the package: every law of the battery holds for it."""
    assert deltune.parse(repr(gated_rescale)) == gated_rescale
    cell = attached(family, Row(repr(gated_rescale), identity=False), tmp_path)
    for law in LAWS:
        with subtests.test(law.__name__.removeprefix("law_")):
            law(cell)
