"""Diff pruning: gates learn which scalars change, exactly the stated share does, and the rest of training is theirs."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.autograd import gradcheck

import deltune
from deltune.anatomy.types import Tensor
from deltune.runtime.hard_concrete import BETA, GAMMA, PACE, ZETA, HardConcreteGates, _Penalised
from tables.families import FAMILIES
from tables.specimens import batch, build, distance, equal, forward, loss, run, stir


def trained(share: float = 1.0, steps: int = 20) -> tuple[deltune.Tuned, dict[str, torch.Tensor]]:
    """A small model after `share` of its training."""
    model = build(FAMILIES["bert"], "sequence")
    torch.manual_seed(0)
    tuned = deltune.attach(model, "diff_pruning(sparsity=0.01)").model.train().deltune
    optimiser = torch.optim.AdamW(tuned.trainable_parameters(), lr=1e-2)
    inputs = batch(model, rows=4)
    for step in range(int(steps * share)):
        tuned.advance(step / steps)
        loss(forward(model, inputs)).backward()
        optimiser.step()
        optimiser.zero_grad()
    return tuned, inputs


def gates(tuned: deltune.Tuned) -> HardConcreteGates:
    return dict(tuned.delta().learned_masks())["0"]


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_file_is_what_evaluation_computes(share: float, tmp_path: Path) -> None:
    """At any time: exactly the stated share is stored, and loaded or merged it gives the outputs of eval mode."""
    tuned, inputs = trained(share)
    model = tuned.model.eval()
    outputs = run(model, inputs)
    size = gates(tuned).starts[-1]
    count = tuned.count()
    assert count.method == int(0.01 * size) and count.trained == 2 * size + count.head
    numbers = load_file(tuned.save(tmp_path / "one") / "delta.safetensors")
    assert {n: len(t) for n, t in numbers.items() if n.startswith("gated")} == {
        "gated.0.values": count.method,
        "gated.0.index": count.method,
    }
    loaded = deltune.load(model, tmp_path / "one", name="again")
    assert equal(run(model, inputs), outputs)
    assert loaded.count().trained == count.method + count.head
    loaded.use("default").model.train()
    loaded.merge()
    assert distance(run(model.eval(), inputs), outputs) < 1e-12


def test_fixing_the_gates_leaves_the_outputs() -> None:
    """A gate that is half open when it is fixed goes on to let half of its difference through."""
    tuned, inputs = trained(0.3)
    learned, model = gates(tuned), tuned.model.eval()
    with torch.no_grad():
        learned.gate.copy_(torch.linspace(-1, 1, len(learned.gate)) / PACE)
        learned.delta.normal_()
    before = run(model, inputs)
    learned.fix()
    assert learned.is_fixed and distance(run(model, inputs), before) < 1e-6


def test_after_half_the_training_the_mask_is_fixed() -> None:
    tuned, _ = trained(0.5)
    assert not gates(tuned).is_fixed
    tuned.advance(0.5)
    form = gates(tuned)
    assert form.is_fixed and form.strength == 0
    index = form.tensors_to_save()["index"]
    before = form.delta.detach().clone()
    model = tuned.model
    optimiser = torch.optim.SGD(tuned.trainable_parameters(), lr=1.0)
    loss(forward(model, batch(model, rows=4))).backward()
    optimiser.step()
    moved = (form.delta != before).nonzero().flatten()
    assert len(moved) and set(moved.tolist()) <= set(index.tolist())
    assert torch.equal(form.tensors_to_save()["index"], index)
    train, evaluate = run(model, batch(model)), run(model.eval(), batch(model))
    assert distance(train, evaluate) < 1e-12  # nothing is drawn any more


def test_the_penalty_closes_gates_and_grows() -> None:
    """Without any loss to mind, gates close under the penalty alone; at the start there is none."""
    model = build(FAMILIES["bert"], "base").train()
    tuned = deltune.attach(model, "diff_pruning")
    form = gates(tuned)
    for share, strength in ((0.0, 0.0), (0.25, 5.0), (0.49, 9.8)):
        tuned.advance(share)
        assert form.strength == pytest.approx(strength)
    (sum(v.sum() for v in forward(model, batch(model)).values()) * 0).backward()
    assert (form.gate.grad > 0).all()


def test_the_penalty_is_the_derivative_of_the_expected_count() -> None:
    logits = torch.randn(7, dtype=torch.float64, requires_grad=True)
    tensor = torch.randn(7, dtype=torch.float64, requires_grad=True)
    form = HardConcreteGates((Tensor("w", (7,), "layers", "linear.weight"),), 2, folded=False)
    form.advance(0.25)
    assert gradcheck(lambda t: _Penalised.apply(t, logits.detach(), form, "v"), (tensor,))
    _Penalised.apply(tensor, logits, form, "w").sum().backward()
    again = logits.detach().requires_grad_()
    (form.strength * torch.sigmoid(again - BETA * torch.log(torch.tensor(-GAMMA / ZETA))).mean()).backward()
    assert torch.allclose(logits.grad, again.grad)


@pytest.mark.parametrize("family", ["bert", "albert"])
def test_the_penalty_is_that_of_a_step(family: str) -> None:
    """Four backward passes of a quarter each have the penalty of one; so has a module that runs many times."""
    model = build(FAMILIES[family], "base").train()
    tuned = deltune.attach(model, "diff_pruning")
    form = gates(tuned)
    pulls = []
    for parts in (1, 4):
        model.zero_grad()
        tuned.advance(0.4)
        for _ in range(parts):
            (sum(v.sum() for v in forward(model, batch(model)).values()) * 0).backward()
        pulls.append(form.gate.grad.clone())
    assert torch.equal(*pulls) and pulls[0].any()


def test_a_training_that_never_tells_its_progress_is_warned(tmp_path: Path) -> None:
    model = build(FAMILIES["bert"], "base")
    tuned = stir(deltune.attach(model, "diff_pruning"))
    with pytest.warns(UserWarning, match="call tuned.advance"):
        tuned.save(tmp_path / "one")
    tuned.advance(1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tuned.save(tmp_path / "two")


def test_a_refused_merge_and_an_export_leave_the_mode_alone() -> None:
    model = build(FAMILIES["bert"], "base").train()
    tuned = deltune.attach(model, "adapter(rank=2, dropout=0.5)")
    with pytest.raises(deltune.DeltuneError, match="cannot be merged"):
        tuned.merge()
    assert tuned.delta().training


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("diff_pruning(sparsity=0)", "between 0 and 1"),
        ("diff_pruning(sparsity=1)", "between 0 and 1"),
        ("diff_pruning(sparsity=1e-9)", "is none; give at least"),
        ("diff_pruning(over='all', layers='upper half')", "over='linear' with layers="),
        ("apet(diff_pruning, parameters=5)", "finds its mask by training"),
        ("diff_pruning + bitfit", "one of them in part"),
        ("diff_pruning + diff_pruning(sparsity=0.1)", "one of them in part"),
    ],
)
def test_what_cannot_be(text: str, message: str) -> None:
    model = build(FAMILIES["bert"], "base")
    with pytest.raises(deltune.DeltuneError, match=message):
        deltune.attach(model, text)


def test_copies_do_not_have_the_positions_that_are_cached() -> None:
    tuned = deltune.attach(build(FAMILIES["bert"], "sequence"), "diff_pruning(sparsity=0.01)")
    run(tuned.model, batch(tuned.model))
    learned, copied = gates(tuned), gates(deltune.tuned(copy.deepcopy(tuned.model)))
    assert learned.largest is not None and copied.largest is None and vars(copied).keys() == vars(learned).keys()
