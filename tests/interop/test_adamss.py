"""Which clusters of AdaMSS train, beside PEFT's adaptive subspace allocation: parameters and masks after each step."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import pad

import deltune
from tables.families import FAMILIES
from tables.specimens import batch, build, forward, loss

peft = pytest.importorskip("peft", reason="no PEFT: pip install -e '.[peers]' -c constraints.txt")
pytest.importorskip("sklearn")

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

STEPS, FIRST, LAST, EVERY, TARGET = 20, 4, 14, 2, 5


def of_peft(layer: Any) -> dict[str, torch.Tensor]:
    """PEFT's tensors as ours, in which each cluster has as many ranks as any."""
    downs, ups = list(layer.adamss_A["default"]), list(layer.adamss_B["default"])
    down = torch.stack([pad(x, (0, 0, 0, 2 - len(x))) for x in downs])
    return {"down": down, "up": torch.cat([pad(x, (0, 2 - x.shape[1])) for x in ups])}


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("clips", [False, True])
def test_each_step_is_pefts(make: Any, clips: bool) -> None:
    base = build(FAMILIES["bert"], "base")
    options = peft.AdamssConfig(
        r=10, num_subspaces=3, subspace_rank=2, target_modules=["query", "value"], use_asa=True,
        asa_target_subspaces=TARGET, init_warmup=FIRST, final_warmup=LAST, mask_interval=EVERY,
        asa_importance_beta=0.8, asa_uncertainty_beta=0.9, asa_schedule_exponent=2.0,
    )  # fmt: skip
    peer = peft.get_peft_model(copy.deepcopy(base), options)
    peer.double()
    with pytest.raises(deltune.DeltuneError, match="option use_asa counts steps"):
        deltune.attach(base, options)
    schedule = {"target": TARGET, "start": FIRST / STEPS, "stop": LAST / STEPS, "every": EVERY}
    method = deltune.adamss(2, 3, 10, **schedule, beta1=0.8, beta2=0.9, exponent=2.0)
    tuned = deltune.attach(base, method)
    assert deltune.parse(repr(method)) == method
    modules = dict(peer.base_model.model.named_modules())
    pairs = [(edit, modules[edit.place.linear.path]) for edit in tuned.delta().all_edits()]
    with torch.no_grad():
        for edit, layer in pairs:
            for name, value in of_peft(layer).items():
                getattr(edit, name).copy_(value)
            edit.basis.copy_(layer.adamss_newB["default"][:, :-1])
            edit.shift.copy_(layer.adamss_newB["default"][:, -1])
    of = [p for p in peer.parameters() if p.requires_grad]
    ours, theirs = make(tuned.trainable_parameters(), lr=0.02), make(of, lr=0.02)
    (state,) = tuned.delta().schedule_states()
    numbers = []
    for step in range(1, STEPS + 1):
        inputs = batch(base, seed=step)
        one, two = loss(forward(base, inputs)), loss(forward(peer.base_model.model, inputs))
        assert one.item() == pytest.approx(two.item(), rel=1e-11), step
        one.backward()
        two.backward()
        if clips:
            norms = [torch.nn.utils.clip_grad_norm_(some, 1e-3) for some in (tuned.trainable_parameters(), of)]
            assert torch.allclose(*norms, rtol=1e-9), step
        ours.step()
        theirs.step()
        tuned.advance(step / STEPS)
        peer.base_model.update_and_allocate(step)
        ours.zero_grad()
        theirs.zero_grad()
        kept = [getattr(state, f"kept_{number}").tolist() for number in range(len(pairs))]
        assert kept == [[p.requires_grad for p in layer.adamss_A["default"]] for _, layer in pairs], step
        numbers.append(sum(map(sum, kept)))
    assert numbers[0] == 12 and numbers[-1] == TARGET - 1 and numbers == sorted(numbers, reverse=True)
    for edit, layer in pairs:
        for name, value in of_peft(layer).items():
            assert torch.allclose(getattr(edit, name), value, rtol=1e-9, atol=1e-11)


def test_a_checkpoint_holds_which_clusters_train(tmp_path: Path) -> None:
    """Half the steps, a checkpoint into a new model, and the other half: as all steps at once."""
    model, method = build(FAMILIES["bert"], "base"), deltune.adamss(1, 3, 6, target=5, start=0.1, stop=0.9)

    def train(tuned: deltune.Tuned, steps: range) -> None:
        optimizer = torch.optim.SGD(tuned.trainable_parameters(), lr=0.05)
        for step in steps:
            loss(forward(tuned.model, batch(tuned.model, seed=step))).backward()
            optimizer.step()
            tuned.advance((step + 1) / 10)
            optimizer.zero_grad()

    tuned = deltune.attach(model, method)
    start = copy.deepcopy(model)
    train(tuned, range(5))
    again = deltune.tuned(copy.deepcopy(start))
    again.model.load_state_dict(model.state_dict())
    train(tuned, range(5, 10))
    train(again, range(5, 10))
    one, two = (dict(t.delta().named_parameters()) for t in (tuned, again))
    assert one and all(torch.equal(value, two[name]) for name, value in one.items())
    assert any(not bool(state.kept_0.all()) for state in again.delta().schedule_states())
    expected = forward(model, batch(model))["last_hidden_state"]
    tuned.save(tmp_path / "delta")
    tuned.detach()
    deltune.load(model, tmp_path / "delta")
    assert torch.allclose(forward(model, batch(model))["last_hidden_state"], expected, rtol=1e-12)
