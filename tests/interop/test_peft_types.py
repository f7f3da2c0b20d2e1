"""Folders of each of PEFT's types, written by PEFT here: read by deltune, written back, and read by PEFT again.

Models are float64, so equal means to the order of sums; where PEFT computes or keeps something in float32, or a family
computes norms in float32, to float32's rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import deltune
from tables.families import FAMILIES
from tables.specimens import batch, build

from .test_field_peft import EXACT, ROUNDED, ROWS, TARGETS, Row, distance, peft

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

TASKS = {"bert": ("sequence", "SEQ_CLS"), "llama": ("causal", "CAUSAL_LM"), "gpt2": ("causal", "CAUSAL_LM")}


def lora(**options: Any) -> Callable[[list[str]], Any]:
    return lambda targets: peft.LoraConfig(r=4, lora_alpha=8, **{"target_modules": targets, **options})


def no_values(layer: Any) -> dict[str, torch.Tensor]:
    return {}


READ_ALONE = ("lora(rank=4, scale=2) + beft(at=('query', 'value'))", "gralora(rank=4) + lora(rank=2, scale=2)")
LINEARS = "('query', 'key', 'value', 'output', 'ffn')"
MORE = tuple(
    Row(method, config, no_values, **options)
    for method, config, options in (
        ("lora(rank=4, scale=2)", lora(), {}),
        ("lora(rank=4, scale=2) + beft(at=('query', 'value'))", lora(lora_bias=True), {}),
        (
            f"lora(rank=6, scale={8 / (6 + 1e-5)})",
            lambda t: peft.AdaLoraConfig(init_r=6, target_r=4, total_step=10, target_modules=t),
            {},
        ),
        (
            "gralora(rank=4) + lora(rank=2, scale=2)",
            lambda t: peft.GraloraConfig(r=4, hybrid_r=2, alpha=12, target_modules=t),
            {},
        ),
        ("lora(rank=4)", lambda t: peft.PveraConfig(r=4, target_modules=t), {}),
        (
            "unilora(rank=4, length=50)",
            lambda t: peft.UniLoraConfig(r=4, theta_d_length=50, save_indices=True, target_modules=t),
            {},
        ),
        (
            f"tinylora(rank=2, parameters=5, at={LINEARS})",
            lambda t: peft.TinyLoraConfig(r=2, u=5, target_modules="all-linear"),
            {"families": ("llama",)},
        ),
    )
)

cells = pytest.mark.parametrize(
    ("row", "family"), [(row, f) for row in (*ROWS, *MORE) for f in row.families], ids=lambda v: getattr(v, "method", v)
)


def trained(row: Row, family: str) -> Any:
    """PEFT's model, each trained tensor moved, in float32's values, which some types keep."""
    role, task = TASKS[family]
    torch.manual_seed(3)
    config = row.config(TARGETS[family])
    config.task_type = task
    model = peft.get_peft_model(build(FAMILIES[family], role, row.dtype), config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and "ranknum" not in name:  # which AdaLoRA trains, and does not save
                parameter.add_(0.1 * torch.randn(parameter.shape)).copy_(parameter.float())
    return model


def logits(model: Any, family: str) -> torch.Tensor:
    inputs = batch(build(FAMILIES[family], TASKS[family][0]))
    with torch.no_grad():
        return model(**inputs).logits


def tolerance(row: Row, family: str) -> float:
    kept = ("osf", "unilora")  # what PEFT computes anew in float32, or keeps so
    exact = (
        not row.rounded and not row.method.startswith(kept) and row.dtype == torch.float64 and FAMILIES[family].exact
    )
    return EXACT if exact else ROUNDED


@cells
def test_a_folder_is_read_and_written_back(row: Row, family: str, tmp_path: Path) -> None:
    theirs = trained(row, family)
    theirs.save_pretrained(tmp_path / "peft")
    model = build(FAMILIES[family], TASKS[family][0], row.dtype)
    plain, expected = logits(model, family), logits(theirs, family)
    assert distance(plain, expected) > 1e-3
    tuned = deltune.load(model, tmp_path / "peft")
    assert distance(logits(model, family), expected) < tolerance(row, family)
    expected_parts = deltune.parse(row.method.replace("shira(rank=2)", "shira(rank=2, seed=5)")).parts
    assert set(tuned.method.parts) == set(expected_parts)
    if row.method in READ_ALONE:
        with pytest.raises(deltune.DeltuneError, match="PEFT keeps one type of adapter in a folder"):
            deltune.export(model, tmp_path / "ours")
        return
    deltune.export(model, tmp_path / "ours")
    again = peft.PeftModel.from_pretrained(
        build(FAMILIES[family], TASKS[family][0], row.dtype), str(tmp_path / "ours")
    ).eval()
    assert distance(logits(again, family), expected) < tolerance(row, family)
