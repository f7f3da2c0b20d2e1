"""Two processes at one run, under DDP and FSDP: they give the losses, delta and metrics of one, and end together."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import tiny
from deltune.cli.train import launch
from deltune.train import checkpoints
from deltune.train import run_folder as runs
from deltune.train.run import train
from deltune.train.run_folder import RunFolder

DRIVER = Path(__file__).with_name("several.py")
SHARDED = ("none", "fsdp")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny models without dropout: what is left of two runs' differences is rounding."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny.spec(folder)
    tiny.still(folder / "model")
    tiny.still(tiny.model(folder / "gpt2", "gpt2"))
    return folder


def log(run: RunFolder) -> list[dict[str, Any]]:
    """The log without the memory of a step, which is not measured of shards, and without speeds."""
    lines = (line for line in tiny.objects(run.log_file) if "memory" not in line)
    return [{name: value for name, value in line.items() if name != "tokens_per_second"} for line in lines]


def compare(whole: RunFolder, other: RunFolder) -> None:
    """Two runs that differ by no more than rounding, the second as complete as the first."""
    assert {p.name for p in other.folder.iterdir()} == set(runs.CONTENTS) - {"checkpoint", "runs"}
    ours, theirs = log(other), log(whole)
    assert [(line["step"], sorted(line)) for line in ours] == [(line["step"], sorted(line)) for line in theirs]
    for name in ("loss", "eval_loss", "grad_norm", "learning_rate"):
        values = [[line[name] for line in lines if name in line] for lines in (ours, theirs)]
        assert values[0] == pytest.approx(values[1], rel=1e-4, abs=1e-6), name
    for split in ("validation", "test"):
        assert other.metrics.scores[split] == pytest.approx(whole.metrics.scores[split], rel=1e-4)
    assert other.metrics.count == whole.metrics.count
    one, two = (load_file(run.delta / "delta.safetensors") for run in (whole, other))
    assert set(one) == set(two)
    for name, tensor in one.items():
        assert torch.allclose(tensor, two[name], atol=1e-4, rtol=1e-3), name
    assert (other.delta / "delta.json").exists() and other.metrics.best.epoch == whole.metrics.best.epoch


METHODS: dict[str, dict[str, Any]] = {
    "prefix": {"method": "prefix(length=4) + layernorm", "device_batch_size": 1},
    "upper half": {"method": "layernorm(layers='upper half')", "trunk_dropout": "off", "device_batch_size": 1},
    "layernorm": {"method": "layernorm"},
    "lora": {"method": "lora(rank=4)", "lr": 1e-2},
    "full": {"method": "full", "lr": 1e-3},
    "bitfit": {"method": "bitfit", "lr": 1e-2, "batch_size": 32, "batch_tokens": 70},
    "frozen head": {"method": "adapter(rank=4)", "head": "freeze", "lr": 1e-2},
    "reparameterised": {"method": "prefix(length=3, reparameterise=8)", "label_smoothing": 0.1},
    "masked": {"method": "apet(lora(rank=4), parameters=60)", "lr": 1e-2},
    "prompt": {"method": "prompt(length=4)", "lr": 1e-2},
    "trunk": {"method": "three_vectors", "trunk_dropout": "off", "lr": 1e-2},
    "decoder": {"model": "gpt2", "method": "lora(rank=4) + layernorm", "lr": 1e-2},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_two_processes_give_the_results_of_one(name: str, root: Path, tmp_path: Path) -> None:
    """A run in one process, and in two under DDP ("none") and FSDP. Of 23 rows the last step has 3."""
    fields = {"max_train_rows": 23, "batch_size": 10, "epochs": 2, **METHODS[name]}
    fields["model"] = str(root / fields.get("model", "model"))
    spec = tiny.spec(root, **fields)
    train(spec, tmp_path / "one", progress=False)
    flat = spec.flat(mode="json")
    jobs = [{"spec": flat, "output": str(tmp_path / how), "sharded": how} for how in SHARDED]
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    assert launch(2, [sys.executable, str(DRIVER), str(tmp_path / "jobs.json")]) == 0
    for how in SHARDED:
        compare(RunFolder(tmp_path / "one"), RunFolder(tmp_path / how))
        facts = RunFolder(tmp_path / how).environment
        assert (facts["processes"], facts["sharded"]) == (2, how)


def command(spec: Path, output: Path, *options: str, by: tuple[str, ...] = (sys.executable, "-m")) -> list[str]:
    return [*by, "deltune", "train", str(spec), "--output", str(output), *options]


def done(line: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(line, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["dpo", "orpo", "reward"])
def test_two_processes_learn_an_objective_as_one_does(objective: str, tmp_path: Path) -> None:
    """Of 8 rows by 4, of 3 by 4 in validation, which every process scores."""
    pytest.importorskip("trl", reason="no TRL: pip install -e '.[align]' -c constraints.txt")
    from train.test_objectives import config, files

    files(tmp_path, {"train": slice(8), "validation": slice(6, 9), "test": slice(8, 10)})
    spec = config(tmp_path, objective, batch_size=4)
    train(spec, tmp_path / "one", progress=False)
    job = {"spec": spec.flat(mode="json"), "output": str(tmp_path / "two"), "sharded": "none"}
    (tmp_path / "jobs.json").write_text(json.dumps([job]))
    assert launch(2, [sys.executable, str(DRIVER), str(tmp_path / "jobs.json")]) == 0
    one, two = (RunFolder(tmp_path / name) for name in ("one", "two"))
    losses = [[line.get("loss", line.get("eval_loss")) for line in log(run) if "epoch" in line] for run in (one, two)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4) and len(losses[0]) >= 4
    assert two.metrics.test == pytest.approx(one.metrics.test, rel=1e-3, abs=1e-5)
    assert two.environment["processes"] == 2


def kill_after_a_checkpoint(line: list[str], run: RunFolder) -> None:
    """Train until there is a checkpoint, then SIGKILL the process, or the launcher of several."""
    process = subprocess.Popen(line, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    while checkpoints.latest_checkpoint(run.checkpoint) is None:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not run.finished
    with contextlib.ExitStack() as stack:  # when the folder is free, the other processes have ended
        until = time.monotonic() + 20
        while time.monotonic() < until:
            with contextlib.suppress(Exception):
                stack.enter_context(run.locked())
                break
            time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("how", SHARDED)
def test_a_killed_launcher_is_resumed(how: str, root: Path, tmp_path: Path) -> None:
    """SIGKILL of the launcher in the middle of an epoch; run again, dropout draws go on in each process."""
    method = "prefix(length=4) + layernorm + lora(rank=2, dropout=0.2)"
    (tmp_path / "spec.yaml").write_text(tiny.spec(root, method=method, epochs=40, validate_every=4).yaml())
    line = command(tmp_path / "spec.yaml", tmp_path / "run", "--launch", "2", "--sharding", how)
    run = RunFolder(tmp_path / "run")
    kill_after_a_checkpoint(line, run)
    again = done(line)
    assert again.returncode == 0 and "resuming" in again.stderr, again.stderr
    assert done(command(tmp_path / "spec.yaml", tmp_path / "whole", "--launch", "2", "--sharding", how)).returncode == 0
    whole = RunFolder(tmp_path / "whole")
    compare(whole, run)
    lines = [[{k: v for k, v in line.items() if "second" not in k} for line in log(one)] for one in (whole, run)]
    assert lines[0] == lines[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "name"),
    [
        ((2, "fsdp"), (1, "none"), "decoder"),
        ((2, "fsdp"), (3, "fsdp"), "lora"),
        ((1, "none"), (2, "fsdp"), "masked"),
        ((3, "none"), (2, "fsdp"), "bitfit"),
    ],
    ids=str,
)
def test_another_number_of_processes_goes_on(
    before: tuple[int, str], after: tuple[int, str], name: str, root: Path, tmp_path: Path
) -> None:
    """A step's rows and their order are those of the global step, whoever computes them; without dropout."""
    fields = {"max_train_rows": 23, "batch_size": 12, "validate_every": 3, **METHODS[name], "epochs": 20}
    spec = tiny.spec(root, **{**fields, "model": str(root / fields.get("model", "model"))})
    (tmp_path / "spec.yaml").write_text(spec.yaml())
    first, second = (
        command(tmp_path / "spec.yaml", tmp_path / "run", "--launch", str(count), "--sharding", how)
        for count, how in (before, after)
    )
    run = RunFolder(tmp_path / "run")
    kill_after_a_checkpoint(first, run)
    again = done(second)
    assert again.returncode == 0 and "resuming" in again.stderr, again.stderr
    train(spec, tmp_path / "whole", progress=False)
    compare(RunFolder(tmp_path / "whole"), run)
    assert run.environment["processes"] == after[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--method", "full", "--lr", "1e38", "--clip", "0"], "training diverged at a learning rate of 1e+38"),
        (["--batch-size", "7"], "batch_size=7 is no multiple of 2 processes: give a batch_size of 6 or 8"),
        (["--max-length", "999"], "max_length=999 is more than"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_error_of_all_processes_is_printed_once(
    changes: list[str], message: str, root: Path, tmp_path: Path
) -> None:
    (tmp_path / "spec.yaml").write_text(tiny.spec(root).yaml())
    result = done(command(tmp_path / "spec.yaml", tmp_path / "run", "--launch", "2", *changes))
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.count(message) == 1 and "Traceback" not in result.stderr, result.stderr
    assert not (tmp_path / "run").exists()


LAUNCHERS = {
    "torchrun": ("none", ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m"]),
    "accelerate": ("none", ["-m", "accelerate.commands.accelerate_cli", "launch", "--multi_gpu"]),
    "accelerate, fsdp": ("fsdp", ["-m", "accelerate.commands.accelerate_cli", "launch", "--use_fsdp"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAUNCHERS)
def test_other_launchers(name: str, root: Path, tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(tiny.spec(root, epochs=1).yaml())
    how, by = LAUNCHERS[name]
    plain = ["--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "-m"]
    by = by if name == "torchrun" else [*by, *plain]
    result = done(command(tmp_path / "spec.yaml", tmp_path / "run", "--json", by=(sys.executable, *by)))
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == RunFolder(tmp_path / "run").metrics.as_json(), "only one process prints"
    facts = RunFolder(tmp_path / "run").environment
    assert (facts["processes"], facts["sharded"]) == (2, how)
    train(tiny.spec(root, epochs=1), tmp_path / "one", progress=False)
    compare(RunFolder(tmp_path / "one"), RunFolder(tmp_path / "run"))
