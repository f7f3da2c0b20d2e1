"""prefix(shift_positions=True): the tokens' positions start after the prefix, as where it is a cache's content."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import deltune
from tables.families import FAMILIES, Family
from tables.specimens import batch, equal, run, specimen, stir

ALL = "prefix(length=3, shift_positions=True)"


TAKES = [f for f in FAMILIES.values() if f.interface and f.numbered]


def moved_by_hand(model: PreTrainedModel, family: Family, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What the model gives when its tables of positions begin 3 rows further down, or its position_ids 3 later."""
    if not family.table:
        counted = torch.arange(inputs["input_ids"].shape[1])[None]
        return run(model, {**inputs, "position_ids": counted + 3})
    tables = [model.base_model.get_submodule(s.positions) for s in deltune.inspect(model.base_model).stacks]
    before = [table.weight.clone() for table in tables]
    with torch.no_grad():
        for table in tables:
            table.weight.copy_(table.weight.roll(-3, 0))
        outputs = run(model, inputs)
        for table, weight in zip(tables, before, strict=True):
            table.weight.copy_(weight)
    return outputs


@pytest.mark.parametrize("family", TAKES, ids=[f.name for f in TAKES])
@pytest.mark.parametrize("left", [False, True], ids=["padded right", "padded left"])
def test_positions_start_after_the_prefix(family: Family, left: bool) -> None:
    """However the family counts them: from its mask, from its padding, or by itself."""
    model = specimen(family.name)
    inputs = batch(model)
    if left:
        inputs |= {name: inputs[name].flip(1) for name in ("input_ids", "attention_mask")}
    tuned = stir(deltune.attach(model, "prefix(length=3)", name="plain", head="freeze"))
    expected, unmoved = moved_by_hand(model, family, inputs), run(model, inputs)
    values = {name: t.clone() for name, t in tuned.delta().tensors_to_save().items()}
    deltune.attach(model, ALL, name="moved", head="freeze")
    with torch.no_grad():
        for name, tensor in tuned.delta("moved").tensors_to_save().items():
            tensor.copy_(values[name])
    assert equal(run(model, inputs), expected)
    if family.table:
        assert not equal(expected, unmoved)
    assert equal(run(tuned.use("plain").model, inputs), unmoved)
    with torch.no_grad(), tuned.rows(["moved", "plain"]):
        mixed = run(model, inputs)
    name = next(n for n in ("logits", "last_hidden_state") if n in mixed)
    for row, alone in enumerate((expected, unmoved)):
        gap = (mixed[name][row] - alone[name][row]).abs()
        padded = mixed[name].dim() == 3 and family.kind != "both"  # what padding gives is nobody's business
        assert (gap[inputs["attention_mask"][row].bool()] if padded else gap).max() < 1e-4
    tuned.detach()


def test_relative_positions_cannot_move() -> None:
    model = specimen("t5")
    with pytest.raises(deltune.DeltuneError, match="does not have"):
        deltune.attach(model, ALL)
    tuned = deltune.attach(model, "prefix(length=3, attention='cross', shift_positions=True)")  # nothing to move there
    tuned.detach()


def test_what_does_not_go_together_and_what_does_not_fit() -> None:
    model = specimen("gpt2")
    with pytest.raises(deltune.DeltuneError, match="both would move"):
        deltune.attach(model, f"{ALL} + prompt(length=2)")
    tuned = deltune.attach(model, ALL)
    inputs = batch(model, length=FAMILIES["gpt2"].longest - 3, pad=0)
    run(model, inputs)
    with pytest.raises(deltune.DeltuneError, match="take 65 positions, and this model has 64"):
        run(model, batch(model, length=FAMILIES["gpt2"].longest - 2, pad=0))
    tuned.detach()
