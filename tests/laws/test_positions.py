"""prefix(shift_positions=True): the tokens' positions start after the prefix, as where it is a cache's content."""

from __future__ import annotations

import pytest
import torch

import deltune

from .families import FAMILIES, Family
from .specimens import batch, equal, run, specimen, stir

SELF = "prefix(length=3, attention='self', shift_positions=True)"


TAKES = [f for f in FAMILIES.values() if f.interface and f.numbered]


@pytest.mark.parametrize("family", TAKES, ids=[f.name for f in TAKES])
def test_positions_start_after_the_prefix(family: Family) -> None:
    model = specimen(family.name)
    inputs = batch(model)
    first = getattr(model.config, "pad_token_id", 0) + 1 if family.name in ("roberta", "xlm-roberta") else 0
    counted = torch.arange(first, first + inputs["input_ids"].shape[1])[None]
    tuned = stir(deltune.attach(model, "prefix(length=3)", name="plain", head="freeze"))
    wanted = run(model, {**inputs, "position_ids": counted + 3})
    unmoved = run(model, {**inputs, "position_ids": counted})
    values = {name: t.clone() for name, t in tuned.delta().kept().items()}
    deltune.attach(model, SELF, name="moved", head="freeze")
    with torch.no_grad():
        for name, tensor in tuned.delta("moved").kept().items():
            tensor.copy_(values[name])
    assert equal(run(model, inputs), wanted)
    assert equal(run(model, {**inputs, "position_ids": counted}), wanted)
    if family.positions == "absolute":
        assert not equal(wanted, unmoved)
    assert equal(run(tuned.use("plain").model, {**inputs, "position_ids": counted}), unmoved)
    tuned.detach()


@pytest.mark.parametrize("name", ["bart", "t5"])
def test_a_model_that_counts_by_itself_is_refused(name: str) -> None:
    model = specimen(name)
    with pytest.raises(deltune.DeltuneError, match="does not take"):
        deltune.attach(model, SELF)
    tuned = deltune.attach(model, "prefix(length=3, attention='cross', shift_positions=True)")  # nothing to move there
    tuned.detach()


def test_what_does_not_go_together_and_what_does_not_fit() -> None:
    model = specimen("gpt2")
    with pytest.raises(deltune.DeltuneError, match="both would move"):
        deltune.attach(model, f"{SELF} + prompt(length=2)")
    tuned = deltune.attach(model, SELF)
    inputs = batch(model, length=FAMILIES["gpt2"].longest - 3, pad=0)
    run(model, inputs)
    with pytest.raises(deltune.DeltuneError, match="take 65 positions, and this model has 64"):
        run(model, batch(model, length=FAMILIES["gpt2"].longest - 2, pad=0))
    tuned.detach()
