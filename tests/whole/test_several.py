"""Two processes at one run: the losses, the delta and the metrics of one, under DDP and FSDP; all end together."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import tiny
from deltune import runs
from deltune.launching import launch
from deltune.runs import Run
from deltune.train import train

DRIVER = Path(__file__).with_name("several.py")
SHARDED = ("none", "fsdp")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny models without dropout: what is left of two runs' differences is rounding."""
    found = tmp_path_factory.mktemp("tiny")
    tiny.spec(found)
    tiny.still(found / "model")
    tiny.still(tiny.model(found / "gpt2", "gpt2"))
    return found


def log(run: Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.log_file.read_text().splitlines()]


def compare(whole: Run, other: Run) -> None:
    """Two runs that differ by no more than rounding, the second as complete as the first."""
    assert {p.name for p in other.folder.iterdir()} == set(runs.OWN) - {"checkpoint"}
    ours, theirs = log(other), log(whole)
    assert [(line["step"], sorted(line)) for line in ours] == [(line["step"], sorted(line)) for line in theirs]
    for name in ("loss", "eval_loss", "grad_norm", "learning_rate"):
        values = [[line[name] for line in lines if name in line] for lines in (ours, theirs)]
        assert values[0] == pytest.approx(values[1], rel=1e-4, abs=1e-6), name
    for split in ("validation", "test"):
        assert other.metrics[split] == pytest.approx(whole.metrics[split], rel=1e-4)
    one, two = (load_file(run.delta / "delta.safetensors") for run in (whole, other))
    assert set(one) == set(two)
    for name, tensor in one.items():
        assert torch.allclose(tensor, two[name], atol=1e-4, rtol=1e-3), name
    assert (other.delta / "delta.json").exists() and other.metrics["best"]["epoch"] == whole.metrics["best"]["epoch"]


METHODS: dict[str, dict[str, Any]] = {
    "layernorm": {"method": "layernorm"},
    "lora": {"method": "lora(rank=4)", "lr": 1e-2},
    "prefix": {"method": "prefix(length=4) + layernorm", "device_batch_size": 1},
}
MORE: dict[str, dict[str, Any]] = {
    "full": {"method": "full", "lr": 1e-3},
    "bitfit": {"method": "bitfit", "lr": 1e-2, "batch_size": 32, "batch_tokens": 70},
    "frozen head": {"method": "adapter(rank=4)", "head": "freeze", "lr": 1e-2},
    "reparameterised": {"method": "prefix(length=3, reparameterise=8)", "label_smoothing": 0.1},
    "masked": {"method": "apet(lora(rank=4), n=60)", "lr": 1e-2},
    "prompt": {"method": "prompt(length=4)", "lr": 1e-2},
    "decoder": {"model": "gpt2", "method": "lora(rank=4) + layernorm", "lr": 1e-2, "precision": "bf16"},
}


def together(root: Path, folder: Path, table: dict[str, dict[str, Any]]) -> None:
    """Every row by itself, and then all rows in two processes, under DDP and FSDP. 23 rows: the last step has 3."""
    jobs = []
    for name, changes in table.items():
        own = {"max_train_rows": 23, "batch_size": 10, "epochs": 2, **changes}
        own["model"] = str(root / own.get("model", "model"))
        spec = tiny.spec(root, **own)
        train(spec, folder / name / "one", progress=False)
        given = spec.model_dump(mode="json")
        jobs += [{"spec": given, "output": str(folder / name / how), "sharded": how} for how in SHARDED]
    (folder / "jobs.json").write_text(json.dumps(jobs))
    assert launch(2, [sys.executable, str(DRIVER), str(folder / "jobs.json")]) == 0
    for name in table:
        for how in SHARDED:
            compare(Run(folder / name / "one"), Run(folder / name / how))
            facts = Run(folder / name / how).environment
            assert (facts["processes"], facts["sharded"]) == (2, how)


def test_two_processes_are_one(root: Path, tmp_path: Path) -> None:
    together(root, tmp_path, METHODS)


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_more_methods(name: str, root: Path, tmp_path: Path) -> None:
    together(root, tmp_path, {name: MORE[name]})
