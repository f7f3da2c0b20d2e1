"""Devices and precisions: what this machine has is chosen, and what it lacks is refused with a clear message."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tiny
from deltune.errors import DeltuneError
from deltune.train import distributed, setup
from deltune.train.run import train
from deltune.train.run_folder import RunFolder
from tables.versions import is_older

ACCELERATED = torch.accelerator.is_available()


def test_auto_is_the_accelerator_if_there_is_one() -> None:
    assert (setup.resolve_device().type != "cpu") == ACCELERATED
    assert setup.resolve_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("name", ["cuba", "cuda:77", "gpu", "", "2 cpus"])
def test_unknown_devices_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(DeltuneError, match=r"unknown device .* Known: auto, cpu"):
        train(tiny.spec(tmp_path), tmp_path / "run", device=name)
    assert not (tmp_path / "run").exists()


def test_precision_follows_what_the_device_supports() -> None:
    assert setup.resolve_precision("fp32", setup.resolve_device()) == "fp32"
    assert setup.resolve_precision("bf16", torch.device("cpu")) == "bf16"
    assert setup.resolve_precision("auto", torch.device("cpu")) == "fp32", "on any processor"
    with pytest.raises(DeltuneError, match="meta does not support precision bf16: give fp32, or auto"):
        setup.resolve_precision("bf16", torch.device("meta"))


@pytest.mark.skipif(not ACCELERATED, reason="no accelerator")
@pytest.mark.parametrize("devices", ["auto", "cpu", "cuda", "cuda:0"])
def test_a_run_on_an_accelerator_writes_device_and_precision(devices: str, tmp_path: Path) -> None:
    train(tiny.spec(tmp_path, epochs=1, precision="auto"), tmp_path / "run", device=devices)
    facts = RunFolder(tmp_path / "run").environment
    assert facts["device"].startswith("cpu") == (devices == "cpu")
    assert (facts["precision"] == "bf16") == (devices != "cpu")


def test_the_resolved_device_and_precision_are_written(tmp_path: Path) -> None:
    spec = tiny.spec(tmp_path, epochs=1, precision="auto")
    train(spec, tmp_path / "run", device="cpu")
    facts = RunFolder(tmp_path / "run").environment
    assert (facts["device"], facts["precision"]) == ("cpu", "fp32")
    assert spec.name != tiny.spec(tmp_path, epochs=1).name, "what it comes to is not known before"


def test_each_process_needs_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    distributed.init_processes(torch.device("cuda:1"))  # alone, whatever it is
    monkeypatch.setenv("WORLD_SIZE", "99")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "99")
    with pytest.raises(DeltuneError, match="cuda:1 is a single device, but there are 99 processes: give device=cuda"):
        distributed.init_processes(torch.device("cuda:1"))
    with pytest.raises(DeltuneError, match="99 processes need as many devices"):
        distributed.init_processes(torch.device("cuda"))


@pytest.mark.parametrize(
    ("changes", "sharded", "message"),
    [
        ({}, "zero3", "DeepSpeed's, .* give --sharding fsdp"),
        ({}, "fully", "none, fsdp|unknown sharding"),
        ({"quantize": "nf4"}, "fsdp", "quantised weights .* --sharding none"),
        ({"use_liger_kernel": "on"}, "none", "Liger's kernels run on a GPU"),
        ({"attn_implementation": "flash_attention_2"}, "none", "attn_implementation=flash_attention_2: .*; give sdpa"),
    ],
)
def test_what_this_machine_or_sharding_lacks_is_refused(
    changes: dict[str, str], sharded: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(DeltuneError, match=message):
        train(tiny.spec(tmp_path, **changes), tmp_path / "run", progress=False, device="cpu", sharding=sharded)
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(not is_older("transformers", "5.23"), reason="this Trainer can")
def test_an_older_trainer_takes_no_shards(tmp_path: Path) -> None:
    with pytest.raises(DeltuneError, match=r"sharding=fsdp needs transformers 5\.23, .* give --sharding none"):
        train(tiny.spec(tmp_path), tmp_path / "run", progress=False, device="cpu", sharding="fsdp")
    assert not (tmp_path / "run").exists()


def test_the_chosen_attention_gives_the_same_losses(tmp_path: Path) -> None:
    for name in ("eager", "sdpa"):
        spec = tiny.spec(tmp_path, epochs=1, attn_implementation=name, method="lora(rank=2)")
        train(spec, tmp_path / name, progress=False, device="cpu")
    tiny.still(tmp_path / "model")
    assert tiny.losses(tmp_path / "eager") == pytest.approx(tiny.losses(tmp_path / "sdpa"), rel=1e-3)
