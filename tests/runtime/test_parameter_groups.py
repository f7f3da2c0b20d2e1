"""`parameter_groups`: LoRA+'s two learning rates, beside PEFT's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

import deltune
from deltune.errors import DeltuneError
from tables.families import FAMILIES
from tables.specimens import build


def model(name: str = "llama") -> PreTrainedModel:
    return build(FAMILIES[name], "causal" if name == "llama" else "sequence", torch.float32)


@pytest.mark.peers
def test_the_same_parameters_have_the_higher_rate_as_in_peft(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from peft.optimizers import create_loraplus_optimizer

    ours = model()
    tuned = deltune.attach(ours, "lora(rank=2)")
    deltune.export(ours, tmp_path / "peft")
    theirs = peft.PeftModel.from_pretrained(model(), tmp_path / "peft", is_trainable=True)
    optimizer = create_loraplus_optimizer(theirs, torch.optim.AdamW, lr=1e-3, loraplus_lr_ratio=8)
    expected: dict[float, list[tuple[int, ...]]] = {}
    for group in optimizer.param_groups:
        if group["params"]:
            expected.setdefault(round(group["lr"], 9), []).extend(tuple(p.shape) for p in group["params"])
    groups = {round(g["lr"], 9): [tuple(p.shape) for p in g["params"]] for g in tuned.parameter_groups(1e-3, ratio=8)}
    assert {rate: sorted(shapes) for rate, shapes in groups.items()} == {
        rate: sorted(shapes) for rate, shapes in expected.items()
    }


def test_every_trained_parameter_is_in_one_group() -> None:
    tuned = deltune.attach(model("bert"), "lora(rank=2) + layernorm + prefix(length=2)")
    deltune.attach(tuned.model, "apet(lora(rank=2), parameters=60)", name="masked")
    for name in ("default", "masked"):
        tuned.use(name)
        faster, rest = tuned.parameter_groups(lr=1e-3)
        parameters = [*faster["params"], *rest["params"]]
        assert {id(p) for p in parameters} == {id(p) for p in tuned.trainable_parameters()}
        assert len(parameters) == len({id(p) for p in parameters}) and faster["lr"] == 16 * rest["lr"]
        ups = {id(p) for n, p in tuned.named_trainable_parameters() if n.endswith((".up", ".of_up.values"))}
        assert {id(p) for p in faster["params"]} == ups and ups
        torch.optim.AdamW(tuned.parameter_groups(lr=1e-3))


@pytest.mark.parametrize(("lr", "ratio", "says"), [(0, 16, "lr=0"), (1e-3, -1, "ratio=-1"), ("1", 2, "lr='1'")])
def test_wrong_rates(lr: float, ratio: float, says: str) -> None:
    tuned = deltune.attach(model(), "lora(rank=2)")
    with pytest.raises(DeltuneError, match=says):
        tuned.parameter_groups(lr, ratio)


def test_without_lora_there_is_nothing_to_set_apart() -> None:
    tuned = deltune.attach(model(), "layernorm")
    with pytest.raises(DeltuneError, match="trains no LoRA"):
        tuned.parameter_groups(1e-3)
