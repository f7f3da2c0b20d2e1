"""Diff pruning: gates learn which scalars change, exactly the stated share does, and the rest of training is theirs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.autograd import gradcheck

import deltune
from deltune.gates import BETA, GAMMA, ZETA, Gates, _Penalised

from .families import FAMILIES
from .specimens import batch, build, distance, equal, forward, loss, run


def trained(share: float = 1.0, steps: int = 20) -> tuple[deltune.Tuned, dict[str, torch.Tensor]]:
    """A small model after `share` of its training."""
    model = build(FAMILIES["bert"], "sequence")
    torch.manual_seed(0)
    tuned = deltune.attach(model, "diff_pruning(sparsity=0.01)").model.train().deltune
    optimiser = torch.optim.AdamW(tuned.parameters(), lr=1e-2)
    inputs = batch(model, rows=4)
    for step in range(int(steps * share)):
        tuned.advance(step / steps)
        loss(forward(model, inputs)).backward()
        optimiser.step()
        optimiser.zero_grad()
    return tuned, inputs


def gates(tuned: deltune.Tuned) -> Gates:
    return dict(tuned.delta().all_gates())["0"]


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


def test_after_half_the_training_the_mask_is_fixed() -> None:
    tuned, _ = trained(0.5)
    assert not gates(tuned).settled
    tuned.advance(0.5)
    found = gates(tuned)
    assert found.settled and found.strength == 0
    index = found.kept()["index"]
    before = found.delta.detach().clone()
    model = tuned.model
    optimiser = torch.optim.SGD(tuned.parameters(), lr=1.0)
    loss(forward(model, batch(model, rows=4))).backward()
    optimiser.step()
    moved = (found.delta != before).nonzero().flatten()
    assert len(moved) and set(moved.tolist()) <= set(index.tolist())
    assert torch.equal(found.kept()["index"], index)
    train, evaluate = run(model, batch(model)), run(model.eval(), batch(model))
    assert distance(train, evaluate) < 1e-12  # nothing is drawn any more


def test_the_penalty_closes_gates_and_grows() -> None:
    """Without any loss to mind, gates close under the penalty alone; at the start there is none."""
    model = build(FAMILIES["bert"], "base").train()
    tuned = deltune.attach(model, "diff_pruning")
    found = gates(tuned)
    for share, strength in ((0.0, 0.0), (0.25, 5.0), (0.49, 9.8)):
        tuned.advance(share)
        assert found.strength == pytest.approx(strength)
    (sum(v.sum() for v in forward(model, batch(model)).values()) * 0).backward()
    assert (found.gate.grad > 0).all()


def test_the_penalty_is_the_derivative_of_the_expected_count() -> None:
    logits = torch.randn(7, dtype=torch.float64, requires_grad=True)
    tensor = torch.randn(7, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda t: _Penalised.apply(t, logits.detach(), 0.5), (tensor,))
    _Penalised.apply(tensor, logits, 0.5).sum().backward()
    again = logits.detach().requires_grad_()
    (0.5 * torch.sigmoid(again - BETA * torch.log(torch.tensor(-GAMMA / ZETA))).sum()).backward()
    assert torch.allclose(logits.grad, again.grad)


@pytest.mark.parametrize(
    ("text", "told"),
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
def test_what_cannot_be(text: str, told: str) -> None:
    model = build(FAMILIES["bert"], "base")
    with pytest.raises(deltune.DeltuneError, match=told):
        deltune.attach(model, text)
