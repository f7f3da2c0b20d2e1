"""Several deltas that act together on the same rows: their sum is the sum of their methods, and each stays its own."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import deltune
from tables.families import FAMILIES
from tables.specimens import batch, build, differences, distance, equal, facts, forward, loss, run, stir

PAIRS = [
    ("lora(rank=2)", "lora(rank=3, scale=2)"),
    ("lora(rank=2)", "dora(rank=2)"),
    ("bitfit", "dora(rank=2)"),
    ("layernorm", "lora(rank=2, at='ffn')"),
    ("adapter(rank=4)", "ia3"),
    ("prefix(length=2)", "prefix(length=3)"),
    ("prompt(length=2)", "prompt(length=3)"),
    ("oft(block_size=4)", "lora(rank=2)"),
    ("hira(rank=2)", "vera(rank=4)"),
    ("unipelt(length=2, rank=2, bottleneck=4)", "ia3"),
    ("apet(lora(rank=2), parameters=30)", "lora(rank=2)"),
]


def attach_both(family: str, first: str, second: str, role: str = "base", **options: Any) -> deltune.Tuned:
    model = build(FAMILIES[family], role)
    stir(deltune.attach(model, first, name="a", **options), seed=1)
    return stir(deltune.attach(model, second, name="b", **options), seed=2)


def as_expression(tuned: deltune.Tuned, first: str, second: str) -> deltune.Tuned:
    """The delta "sum" of the expression FIRST + SECOND with the values of "a" and "b"."""
    deltune.attach(tuned.model, f"{first} + {second}", name="sum")
    whole, state = tuned.delta("sum"), tuned.attached.state
    parts = [tuned.delta(name) for name in "ab"]
    with torch.no_grad():
        for kind in ("edits", "common"):
            targets = list(getattr(whole, kind).children())
            sources = [module for part in parts for module in getattr(part, kind).children()]
            for target, source in zip(targets, sources, strict=True):
                target.load_state_dict(source.state_dict())
        for part in parts:
            for name in part.owned_tensor_names:
                state.delta_value(whole, name).copy_(state.delta_value(part, name))
    return tuned


@pytest.mark.parametrize(("first", "second"), PAIRS)
@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
@pytest.mark.sample(16)
def test_a_sum_is_what_the_sum_of_the_methods_is(family: str, first: str, second: str) -> None:
    """Outputs and gradients; mixed in one batch with one of them, the other and the base; detached exactly."""
    if family == "llama" and "bitfit" in first:
        first = "layernorm"  # it has no bias
    tuned = attach_both(family, first, second)
    model, inputs = tuned.model, batch(tuned.model, rows=5, pad=0)
    as_expression(tuned, first, second)
    tuned.use("sum")
    expected = forward(model, inputs)
    loss(expected).backward()
    tuned.use(["a", "b"])
    outputs = forward(model, inputs)
    assert distance(outputs, expected) < (1e-12 if FAMILIES[family].exact else 1e-5)
    assert tuned.active == ("a", "b") and repr(tuned).endswith("in use: a + b)")
    loss(outputs).backward()
    of_sum = [p.grad for p in tuned.attached.state.parameters_by_name(tuned.delta("sum")).values()]
    of_parts = [p.grad for n in "ab" for p in tuned.attached.state.parameters_by_name(tuned.delta(n)).values()]
    total = [sum(float(g.square().sum()) for g in grads if g is not None) for grads in (of_sum, of_parts)]
    assert total[0] > 0 and abs(total[1] / total[0] - 1) < 1e-4
    if "prompt" not in first:
        names: list[Any] = [["a", "b"], "a", None, ["b", "a"], ["a", "b"]]
        rows = [run(tuned.use(n).model, {k: v[[i]] for k, v in inputs.items()}) for i, n in enumerate(names)]
        with tuned.rows(names):
            mixed = run(model, inputs)
        for i, row in enumerate(rows):
            gap = (mixed["last_hidden_state"][i] - row["last_hidden_state"][0]).abs().max()
            assert gap < (1e-11 if FAMILIES[family].exact else 1e-4)
    if not first.startswith(("adapter", "prefix", "prompt", "unipelt")):
        expected = run(tuned.use(["a", "b"]).model, inputs)
        merged = copy.deepcopy(model)
        deltune.tuned(merged).merge()
        assert distance(run(merged, inputs), expected) < (1e-11 if FAMILIES[family].exact else 1e-4)
        assert distance(run(tuned.merge(["a", "b"]), inputs), expected) < (1e-11 if FAMILIES[family].exact else 1e-4)


def test_tensors_that_both_train_are_summed_as_changes() -> None:
    tuned = attach_both("bert", "layernorm", "layernorm")
    state, inputs = tuned.attached.state, batch(tuned.model)
    name = tuned.delta("a").owned_tensor_names[0]
    base = state.base_value(name).detach().clone()
    value = base + sum(state.delta_value(tuned.delta(n), name).detach() - base for n in "ab")
    outputs = run(tuned.use(["a", "b"]).model, inputs)
    merged = tuned.merge()
    assert torch.allclose(merged.get_parameter(name), value, rtol=1e-14)
    assert distance(run(merged, inputs), outputs) < 1e-12


@pytest.mark.parametrize(("first", "second"), [("full", "hira(rank=2)"), ("bitfit", "glora(rank=2)")])
def test_a_function_of_a_weight_reads_the_bases_and_not_what_another_term_trains(first: str, second: str) -> None:
    """In one expression it could not tell them apart; merging one that read the trained weight was wrong."""
    with pytest.raises(deltune.DeltuneError, match="which another term trains: attach the two as deltas of their own"):
        deltune.attach(build(FAMILIES["bert"], "base"), f"{first} + {second}")
    tuned = attach_both("bert", first, second)
    inputs = batch(tuned.model)
    expected = run(tuned.use(["a", "b"]).model, inputs)
    assert distance(run(tuned.merge(), inputs), expected) < 1e-12


def test_one_of_them_learns_on_top_of_the_other(tmp_path: Path) -> None:
    """With gradient checkpointing too; what is frozen trains again in use alone. Each is saved on its own."""
    tuned = attach_both("bert", "lora(rank=2) + layernorm", "lora(rank=2) + bitfit")
    model, inputs = tuned.model, batch(tuned.model)
    before = facts(build(FAMILIES["bert"], "base"))
    tuned.use(["a", "b"], train="b")
    trained = {id(p) for p in tuned.trainable_parameters()}
    assert trained == {id(p) for p in tuned.attached.state.parameters_of(tuned.delta("b"))}
    model.gradient_checkpointing_enable()
    model.train()
    optimizer = torch.optim.SGD(tuned.trainable_parameters(), lr=0.1)
    values = [p.detach().clone() for p in tuned.attached.state.parameters_of(tuned.delta("a"))]
    loss(forward(model, inputs)).backward()
    optimizer.step()
    assert all(p.grad is None for p in tuned.attached.state.parameters_of(tuned.delta("a")))
    assert all(
        torch.equal(p, v) for p, v in zip(tuned.attached.state.parameters_of(tuned.delta("a")), values, strict=True)
    )
    model.eval()
    expected = run(model, inputs)
    for name in "ab":
        tuned.save(tmp_path / name, name)
    assert [*tuned.use("a").trainable_parameters()]
    model.gradient_checkpointing_disable()
    model.disable_input_require_grads()
    copied = pickle.loads(pickle.dumps(tuned.use(["a", "b"], train=["b"]).model))
    assert equal(run(copied, inputs), expected) and deltune.tuned(copied).active == ("a", "b")
    assert len([*deltune.tuned(copied).trainable_parameters()]) == len(trained)
    assert not [n for n in differences(before, facts(tuned.detach())) if n.startswith(("value", "keys"))]
    loaded = deltune.load(deltune.load(model, tmp_path / "a", name="a").model, tmp_path / "b", name="b")
    assert equal(run(loaded.use(["a", "b"]).model, inputs), expected)


def test_whose_head_answers(tmp_path: Path) -> None:
    tuned = attach_both("bert", "lora(rank=2)", "lora(rank=3)", "sequence")
    model, inputs = tuned.model, batch(tuned.model)
    for call in (lambda: tuned.use(["a", "b"]), lambda: tuned.merge(["a", "b"])):
        with pytest.raises(deltune.DeltuneError, match=r"'a' and 'b' each have a head, .* name it, head_of='a'"):
            call()
    assert tuned.active == "b"
    with pytest.raises(deltune.DeltuneError, match="head_of='c'"):
        tuned.use(["a", "b"], head_of="c")
    answers = {name: run(tuned.use(["a", "b"], head_of=name).model, inputs)["logits"] for name in "ab"}
    assert not torch.equal(answers["a"], answers["b"])
    with tuned.rows([["a", "b"], "a"], head_of="a"):
        mixed = run(model, inputs)["logits"]
    assert torch.allclose(mixed[0], answers["a"][0], rtol=1e-11)
    tuned.use(["a", "b"], head_of="a", train="b")
    heads = [tuned.attached.state.delta_value(tuned.delta("a"), n) for n in tuned.delta("a").head]
    assert heads and not any(p.requires_grad for p in heads)
    assert torch.allclose(run(tuned.merge(["b", "a"]), inputs)["logits"], answers["a"], rtol=1e-11)


REFUSED: list[tuple[str, str, Sequence[object], dict[str, Any], str]] = [
    ("lora", "lora", ["a", "a"], {}, "each once"),
    ("lora", "lora", [], {}, "or None for the base model"),
    ("lora", "lora", ["a", "c"], {}, "unknown delta 'c'"),
    ("lora", "lora", ["a", "b"], {"train": "c"}, "'c' in train="),
    ("prompt(length=2)", "prefix(length=2, shift_positions=True)", ["a", "b"], {}, "shift_positions beside a prompt"),
]


@pytest.mark.parametrize(("first", "second", "names", "options", "says"), REFUSED)
def test_what_cannot_act_together(
    first: str, second: str, names: Sequence[str], options: dict[str, Any], says: str
) -> None:
    tuned = attach_both("bert", first, second)
    before = run(tuned.model, batch(tuned.model))
    with pytest.raises(deltune.DeltuneError, match=says):
        tuned.use(names, **options)
    assert tuned.active == "b" and equal(run(tuned.model, batch(tuned.model)), before)


def test_rows_of_several_generate_as_each_alone() -> None:
    tuned = attach_both("llama", "lora(rank=2)", "prefix(length=2)", "causal")
    inputs = {name: t[:, :5] for name, t in batch(tuned.model, rows=3, pad=0).items()}
    names: list[Any] = [["a", "b"], "b", None]
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
    alone = [
        tuned.use(n).model.generate(**{k: v[[i]] for k, v in inputs.items()}, **options)[0] for i, n in enumerate(names)
    ]
    with tuned.rows(names):
        mixed = tuned.model.generate(**inputs, **options)
    assert all(torch.equal(row, one) for row, one in zip(mixed, alone, strict=True))
