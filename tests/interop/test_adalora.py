"""AdaLoRA's schedule beside PEFT's: losses, parameters and masks after each step; and what is left in the end."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

import deltune
from tables.families import FAMILIES
from tables.specimens import batch, build, distance, forward, loss, run

peft = pytest.importorskip("peft", reason="no PEFT: pip install -e '.[peers]' -c constraints.txt")

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

STEPS, WARM_UP, FINAL, EVERY = 24, 3, 6, 2
TARGETS = {"bert": ["query", "value"], "llama": ["q_proj", "v_proj"]}


def adalora(**options: Any) -> Any:
    return deltune.adalora(2, 4, alpha=8, start=WARM_UP / STEPS, stop=(STEPS - FINAL) / STEPS, every=EVERY, **options)


def layers_of(peer: Any, tuned: deltune.Tuned) -> list[tuple[Any, Any]]:
    modules = dict(peer.base_model.model.named_modules())
    return [(edit, modules[edit.place.linear.path]) for edit in tuned.delta().all_edits()]


LEAVES = {"down": "lora_A", "up": "lora_B", "values": "lora_E"}


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("family", ["bert", "llama"])
def test_each_step_is_pefts(family: str, make: Any) -> None:
    """PEFT adds its penalty to outputs.loss, which the losses here do not have: it is added to PEFT's by hand."""
    base = build(FAMILIES[family], "base")
    options = peft.AdaLoraConfig(
        init_r=4, target_r=2, lora_alpha=8, total_step=STEPS, tinit=WARM_UP, tfinal=FINAL, deltaT=EVERY,
        orth_reg_weight=0.5, target_modules=TARGETS[family],
    )  # fmt: skip
    peer = peft.get_peft_model(copy.deepcopy(base), options)
    for name, parameter in peer.named_parameters():
        parameter.requires_grad_("lora_" in name)  # PEFT 0.21.2 trains its rank count too
    tuned = deltune.attach(base, adalora())
    pairs = layers_of(peer, tuned)
    with torch.no_grad():
        for edit, layer in pairs:
            for name, leaf in LEAVES.items():
                getattr(edit, name).copy_(getattr(layer, leaf)["default"].view_as(getattr(edit, name)))
    rate = 0.05 if make is torch.optim.SGD else 0.02
    ours, theirs = (make(parameters, lr=rate) for parameters in (
        tuned.trainable_parameters(), [p for p in peer.parameters() if p.requires_grad]
    ))  # fmt: skip
    losses = []
    for step in range(1, STEPS + 1):
        inputs = batch(base, seed=step)
        one, two = loss(forward(base, inputs)) * 1e-2, loss(forward(peer.base_model.model, inputs)) * 1e-2
        losses.append((one.item(), two.item()))
        one.backward()
        ours.step()
        tuned.advance(step / STEPS)
        ours.zero_grad()
        matrices = [m for _, layer in pairs for m in (layer.lora_A["default"], layer.lora_B["default"].T)]
        penalty = sum(torch.norm(m @ m.T - torch.eye(len(m), dtype=m.dtype)) for m in matrices) / len(matrices)
        (two + 0.5 * penalty).backward()
        theirs.step()
        peer.base_model.update_and_allocate(step)
        theirs.zero_grad()
        kept = [(edit.values != 0, layer.lora_E["default"].flatten() != 0) for edit, layer in pairs]
        assert all(torch.equal(a, b) for a, b in kept), step
    assert max(abs(a - b) / abs(b) for a, b in losses) < (1e-12 if FAMILIES[family].exact else 1e-6)
    for edit, layer in pairs:
        for name, leaf in LEAVES.items():
            expected = getattr(layer, leaf)["default"].view_as(getattr(edit, name))
            assert torch.allclose(
                getattr(edit, name), expected, rtol=1e-9, atol=1e-11 if FAMILIES[family].exact else 1e-6
            )
    assert sum(int(a.sum()) for a, _ in kept) == 2 * len(pairs)


def trained(model: Any, method: Any, steps: int = 12) -> deltune.Tuned:
    tuned = deltune.attach(model, method)
    optimizer = torch.optim.AdamW(tuned.trainable_parameters(), lr=0.05)
    for step in range(steps):
        loss(forward(model, batch(model, seed=step))).backward()
        optimizer.step()
        tuned.advance((step + 1) / steps)
        optimizer.zero_grad()
    return tuned


@pytest.mark.parametrize("others", ["", "lora(rank=3, at='ffn_down') + ", "layernorm + "])
@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_the_file_has_exactly_the_ranks_that_are_left(family: str, others: str, tmp_path: Path) -> None:
    model = build(FAMILIES[family], "base")
    method = deltune.parse(others + repr(adalora()) if others else adalora())
    tuned = trained(model, method)
    inputs, places = batch(model), [e for e in tuned.delta().all_edits() if hasattr(e, "values")]
    expected = run(model, inputs)
    tuned.save(tmp_path / "delta")
    if family == "bert" and not others:
        deltune.export(model, tmp_path / "peft")
    tuned.detach()
    if family == "bert" and not others:
        assert distance(run(deltune.load(model, tmp_path / "peft").model, inputs), expected) < 1e-6
        deltune.tuned(model).detach()
    loaded = deltune.load(model, tmp_path / "delta")
    assert distance(run(model, inputs), expected) < 1e-12
    ranks = [
        e.form.rank for e in loaded.delta().all_edits() if e.place.target.path in {p.place.target.path for p in places}
    ]
    assert sum(ranks) == 2 * len(places) and "adalora" not in repr(loaded.method)
    assert distance(run(loaded.merge(), inputs), expected) < 1e-11


def test_what_was_never_advanced_says_so_and_stays_as_it_is(tmp_path: Path) -> None:
    model = build(FAMILIES["bert"], "base")
    tuned = deltune.attach(model, adalora())
    tuned.save(tmp_path / "untrained")
    with pytest.raises(deltune.DeltuneError, match=r"once its ranks are final: after .* ≥ 0\.75"):
        deltune.export(model, tmp_path / "peft")
    loss(forward(model, batch(model))).backward()
    with pytest.warns(UserWarning, match="call tuned.advance"):
        tuned.save(tmp_path / "trained")
    with pytest.raises(deltune.DeltuneError, match=r"before optimizer\.zero_grad"):
        tuned.model.zero_grad()
        tuned.advance(0.05)
    tuned.detach()
    assert deltune.load(model, tmp_path / "trained").method == adalora()


def test_checkpoints_hold_the_state_and_files_do_not(tmp_path: Path) -> None:
    """Half the steps, a checkpoint into a new model, and the other half: as all steps at once."""
    model = build(FAMILIES["bert"], "base")
    tuned, steps = deltune.attach(model, adalora()), 12
    start = copy.deepcopy(tuned.delta().state_dict())

    def train(tuned: deltune.Tuned, some: range, optimizer: Any) -> None:
        for step in some:
            loss(forward(tuned.model, batch(tuned.model, seed=step))).backward()
            optimizer.step()
            tuned.advance((step + 1) / steps)
            optimizer.zero_grad()

    train(tuned, range(steps), torch.optim.SGD(tuned.trainable_parameters(), lr=0.01))
    expected = {n: t.clone() for n, t in tuned.delta().state_dict().items()}
    assert any(name.startswith("schedules.") for name in expected)
    tuned.delta().load_state_dict(start)
    train(tuned, range(6), torch.optim.SGD(tuned.trainable_parameters(), lr=0.01))
    other = deltune.attach(build(FAMILIES["bert"], "base"), adalora())
    other.model.load_state_dict(copy.deepcopy(model.state_dict()))
    copied = deltune.tuned(copy.deepcopy(other.model))
    for resumed in (other, copied):
        train(resumed, range(6, steps), torch.optim.SGD(resumed.trainable_parameters(), lr=0.01))
        wrong = [n for n, t in resumed.delta().state_dict().items() if not torch.allclose(t, expected[n], atol=1e-15)]
        assert not wrong
    assert not any(name.startswith("schedules") for name in tuned.attached.contents(None)[1])


def test_a_trainer_steps_it_by_the_callback(tmp_path: Path) -> None:
    """With two passes in each step, and the penalty once."""
    results = []
    for by_trainer in (True, False):
        model = build(FAMILIES["bert"], "sequence", torch.float32)
        torch.manual_seed(0)
        tuned = deltune.attach(model, adalora())
        rows = [
            {**{k: v[0] for k, v in batch(model, rows=1, seed=i).items()}, "labels": torch.tensor(i % 2)}
            for i in range(16)
        ]
        if by_trainer:
            arguments = TrainingArguments(
                tmp_path, max_steps=8, per_device_train_batch_size=1, gradient_accumulation_steps=2, learning_rate=1e-2,
                lr_scheduler_type="constant", optim="sgd", max_grad_norm=0, use_cpu=True, disable_tqdm=True,
                report_to=[], save_strategy="no", logging_strategy="no", train_sampling_strategy="sequential",
            )  # fmt: skip
            Trainer(model, arguments, train_dataset=rows, callbacks=[deltune.ScheduleCallback()]).train()
        else:
            optimizer = torch.optim.SGD(tuned.trainable_parameters(), lr=1e-2)
            model.train()
            for step in range(8):
                for row in rows[2 * step : 2 * step + 2]:
                    model(**{k: v[None] for k, v in row.items()}).loss.backward()  # as this Trainer does
                optimizer.step()
                tuned.advance((step + 1) / 8)
                optimizer.zero_grad()
        results.append(tuned.delta().state_dict())
    for name, value in results[0].items():
        assert torch.allclose(value.float(), results[1][name].float(), atol=1e-6), name
    assert bool(results[0]["schedules.0.is_final"])
