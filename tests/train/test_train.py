"""train: the RUN it leaves, the best delta, resumption to the same numbers, and every way it can go wrong."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.optim.optimizer import register_optimizer_step_post_hook

import tiny
from deltune.errors import DeltuneError
from deltune.train import checkpoints, trainer
from deltune.train import run_folder as runs
from deltune.train.inference import evaluate
from deltune.train.records import Best
from deltune.train.run import train
from deltune.train.run_folder import RunFolder
from deltune.train.setup import ModelCache
from deltune.train.trainer import DeltaTrainer, raise_if_interrupted, watch_interrupts
from processes import Started, deltune

TIMES = ("seconds", "cpu_seconds", "seconds_left", "tokens_per_second", "memory")


@pytest.fixture(scope="module")
def whole(root: Path) -> RunFolder:
    """An uninterrupted run."""
    train(tiny.spec(root), root / "whole")
    return RunFolder(root / "whole")


def lasting(metrics: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in metrics.items() if name not in TIMES}
    if "runs" in kept:
        kept["runs"] = [lasting(one) for one in kept["runs"]]
    return kept


def log(run: RunFolder) -> list[dict[str, Any]]:
    lines = tiny.objects(run.log_file)
    return [{name: value for name, value in line.items() if name not in TIMES} for line in lines]


def same(one: RunFolder, two: RunFolder) -> None:
    """Two runs that cannot be told apart but by the time they took."""
    assert lasting(one.metrics.as_json()) == lasting(two.metrics.as_json())
    assert (one.delta / "delta.safetensors").read_bytes() == (two.delta / "delta.safetensors").read_bytes()
    for file in one.folder.rglob("log.jsonl"):
        assert log(RunFolder(file.parent)) == log(RunFolder(two.folder / file.parent.relative_to(one.folder)))
    for split in ("validation", "test"):
        assert (one.predictions / f"{split}.jsonl").read_text() == (two.predictions / f"{split}.jsonl").read_text()


def names(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()}


# -- what a run leaves


def test_a_run_holds_what_it_should(whole: RunFolder, root: Path) -> None:
    assert names(whole.folder) == set(runs.CONTENTS) - {"checkpoint", "runs"}
    metrics = whole.metrics
    assert metrics.as_json() == json.loads(whole.metrics_file.read_text())
    assert set(metrics.test) == {"loss", "accuracy", "f1_macro", "matthews"}
    assert metrics.count["method"] == 4 * 2 * 32 * 2 + 5 * 64, "prefix: 4 keys and values, 2 layers; 5 norms"
    assert metrics.count["head"] == 3 * 32 + 3
    assert whole.config.canonical() == tiny.spec(root).canonical()
    facts = whole.environment
    assert facts["packages"]["torch"] and facts["device"] and facts["cpus"]
    assert facts["data"]["rows"] == {"train": 48, "validation": 24, "test": 24}
    rows = tiny.objects(whole.predictions / "test.jsonl")
    assert len(rows) == 24 and set(rows[0]) == {"id", "input", "prediction", "reference", "scores"}
    right = sum(row["prediction"] == row["reference"] for row in rows) / 24
    assert right == pytest.approx(metrics.test["accuracy"])
    assert all(sum(row["scores"].values()) == pytest.approx(1, abs=1e-5) for row in rows)


def test_the_log_has_losses_and_validations(whole: RunFolder) -> None:
    lines = log(whole)
    none = {"train": 0, "validation": 0, "test": 0}
    assert lines[0] == {"step": 0, "event": "start", "truncated": none, "truncated_targets": none}
    assert [line["step"] for line in lines if "loss" in line][-1] == 18, "3 epochs of 6 steps"
    assert [line["step"] for line in lines if "eval_loss" in line] == [6, 12, 18]


def test_it_learns(root: Path, tmp_path: Path) -> None:
    tiny.data(tmp_path / "data", train=240)
    metrics = train(tiny.spec(root, data=str(tmp_path / "data"), method="full", lr=3e-3, epochs=6), tmp_path / "run")
    assert metrics.test["accuracy"] > 0.9


@pytest.mark.parametrize("metric", ["loss", "accuracy"])
def test_the_best_epoch_is_kept(metric: str, root: Path, tmp_path: Path) -> None:
    """Every fourth label is wrong: validation gets better, and worse again as these are learned by heart."""
    rows, labels = tiny.sentences(48, 0), sorted(tiny.WORDS)
    for row in rows[::4]:
        row["label"] = labels[labels.index(row["label"]) - 1]
    tiny.lines(tiny.data(tmp_path / "data") / "train.jsonl", rows)
    run = RunFolder(tmp_path / "run")
    spec = tiny.spec(
        root, data=str(tmp_path / "data"), method="full", epochs=12, lr=3e-3, schedule="constant", metric=metric
    )
    metrics = train(spec, run.folder)
    evaluations = [line for line in log(run) if "eval_loss" in line]
    ranks = [(-line["eval_accuracy"] if metric == "accuracy" else 0, line["eval_loss"]) for line in evaluations]
    best = ranks.index(min(ranks))
    assert 0 < best < 11 and metrics.validation["loss"] == evaluations[best]["eval_loss"]
    value = evaluations[best][f"eval_{metric}"]
    assert metrics.best == Best(epoch=1 + best, step=6 * (1 + best), metric=metric, value=value)
    assert evaluate(run.folder, output=tmp_path / "again") == metrics.scores
    for split in ("validation", "test"):
        again = (tmp_path / "again" / f"{split}.jsonl").read_text()
        assert again == (run.predictions / f"{split}.jsonl").read_text()


def test_patience(root: Path, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    spec = tiny.spec(root, method="full", epochs=30, lr=0.3, schedule="constant", metric="loss", patience=2)
    metrics = train(spec, run.folder)
    epochs = [line for line in log(run) if "eval_loss" in line]
    assert len(epochs) == metrics.best.epoch + 2 < 30


@pytest.mark.parametrize(
    "changes",
    [
        {"schedule": "cosine", "warmup": 0.2},
        {"schedule": "polynomial", "warmup": 3},
        {"schedule": "constant", "device_batch_size": 2, "weight_decay": 0.1, "clip": 0},
        {"precision": "bf16"},
        {"batch_tokens": 60, "batch_size": 32},
        {"method": "lora(rank=2)", "head": "freeze"},
        {"method": "prompt(length=4)"},
        {"method": "prefix(length=3, reparameterise=8)"},
        {"method": "prefix(length=3, reparameterise=8)", "precision": "bf16"},
        {"method": "diff_pruning(sparsity=0.02)"},
        {"method": "adalora(rank=2, start=0, stop=0.5)"},
        {"method": "head", "max_train_rows": 17},
    ],
    ids=str,
)
@pytest.mark.sample(6)
def test_options(changes: dict[str, Any], root: Path, tmp_path: Path) -> None:
    metrics = train(tiny.spec(root, epochs=1, **changes), tmp_path / "run")
    assert metrics.validation["accuracy"] == metrics.best.value, "what is on the disk is what was chosen"
    assert evaluate(tmp_path / "run") == metrics.scores
    assert (metrics.count["head"] == 0) == (changes.get("head") == "freeze")


@pytest.mark.parametrize("family", ["roberta", "gpt2", "llama"])
def test_other_families(family: str, root: Path, tmp_path: Path) -> None:
    folder = tiny.model(tmp_path / family, family)
    assert train(tiny.spec(root, model=str(folder), epochs=1), tmp_path / "run").count["method"] > 0


def test_without_validation_the_last_epoch_is_kept(root: Path, tmp_path: Path) -> None:
    data = tiny.data(tmp_path / "data")
    (data / "validation.jsonl").unlink()
    metrics = train(tiny.spec(root, data=str(data), epochs=2), tmp_path / "run")
    assert metrics.best == Best(epoch=2, step=12) and set(metrics.scores) == {"test"}
    with pytest.raises(DeltuneError, match="no validation split"):
        train(tiny.spec(root, data=str(data), patience=1), tmp_path / "other")


def test_activation_checkpointing_changes_no_number(root: Path, tmp_path: Path, whole: RunFolder) -> None:
    train(tiny.spec(root, activation_checkpointing="on"), tmp_path / "run")
    run = RunFolder(tmp_path / "run")
    same(whole, run)
    (first,), (second,) = ([line["memory"] for line in one.read_log() if "memory" in line] for one in (whole, run))
    peaks = first["total"], second["total"]
    assert peaks[0] > peaks[1] and "at the peak of the first step" in run.report_file.read_text()
    with pytest.raises(DeltuneError, match="where they are: give on"):
        train(tiny.spec(root, activation_checkpointing="cpu"), tmp_path / "other")


@pytest.mark.parametrize("changes", [{"method": "lora(rank=2)"}, {"head_init": "probe", "pooling": "mean"}])
def test_a_quantised_base(changes: dict[str, str], root: Path, tmp_path: Path) -> None:
    """On a processor with bfloat16 products, passes before the model is tuned do not pack its 4-bit weights."""
    pytest.importorskip("bitsandbytes")
    metrics = train(tiny.spec(root, epochs=1, quantize="nf4", **changes), tmp_path / "run")
    assert evaluate(tmp_path / "run") == metrics.scores


def test_tensorboard(root: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    train(tiny.spec(root, epochs=1, report_to="tensorboard"), tmp_path / "run")
    assert list((tmp_path / "run").rglob("events.out.tfevents.*"))


# -- again


def test_a_finished_run_is_not_repeated(whole: RunFolder, root: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = whole.metrics_file.stat().st_mtime_ns
    with caplog.at_level("INFO", "deltune"):
        assert train(tiny.spec(root, report_to="tensorboard"), whole.folder) == whole.metrics
    assert "is finished" in caplog.text and whole.metrics_file.stat().st_mtime_ns == before
    with pytest.raises(DeltuneError, match="epochs: 3 there, 4 now"):
        train(tiny.spec(root, epochs=4), whole.folder)


def test_the_speed_is_that_of_its_own_steps(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 48 rows in batches of 32, by a clock on which a step takes a second; the next batch is there already."""
    ended: list[None] = []
    monkeypatch.setattr(
        trainer, "time", SimpleNamespace(**dict.fromkeys(("monotonic", "process_time"), lambda: float(len(ended))))
    )
    hook = register_optimizer_step_post_hook(lambda *_: ended.append(None))
    try:
        train(tiny.spec(root, batch_size=32, epochs=2), tmp_path / "run", progress=False)
    finally:
        hook.remove()
    speeds = [line["tokens_per_second"] for line in RunFolder(tmp_path / "run").read_log() if "learning_rate" in line]
    assert len(speeds) == 4 and sum(speeds[:2]) == sum(speeds[2:])
    assert all(1.5 < large / small < 2.5 for large, small in (speeds[:2], speeds[2:]))


def test_afresh(root: Path, tmp_path: Path) -> None:
    train(tiny.spec(root, epochs=1, seed=5), tmp_path / "run")
    (tmp_path / "run" / "notes.txt").write_text("mine")
    train(tiny.spec(root, epochs=1), tmp_path / "run", resume=False)
    assert RunFolder(tmp_path / "run").config.runtime.seed == 0
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("seeds", [(), (0, 1)])
def test_what_is_refused_discards_nothing(root: Path, tmp_path: Path, seeds: tuple[int, ...]) -> None:
    values = {"epochs": 1, "seeds": seeds}
    metrics = train(tiny.spec(root, **values), tmp_path / "run", report=False)
    for wrong in ({"data": str(tmp_path / "nowhere")}, {"model": str(tmp_path / "nowhere")}):
        with pytest.raises(DeltuneError, match="nowhere"):
            train(tiny.spec(root, **values, **wrong), tmp_path / "run", resume=False)
        assert RunFolder(tmp_path / "run").metrics == metrics


def test_the_seed_decides(root: Path, tmp_path: Path, whole: RunFolder) -> None:
    train(tiny.spec(root), tmp_path / "same")
    same(whole, RunFolder(tmp_path / "same"))
    train(tiny.spec(root, seed=1), tmp_path / "other")
    assert lasting(RunFolder(tmp_path / "other").metrics.as_json()) != lasting(whole.metrics.as_json())


# -- in bf16

BF16 = {"precision": "bf16", "method": "layernorm + lora(rank=2)"}


def test_what_is_trained_in_bf16_is_float32_and_so_is_the_base(root: Path, tmp_path: Path) -> None:
    """Norms are near 1, where bf16 has steps of 2^-8; six updates of 1e-5 would be lost in it."""
    cache, spec = ModelCache(), tiny.spec(root, **BF16, epochs=1, lr=1e-5, schedule="constant")
    model = (spec.model.name, "classification", ("beast", "fruit", "tool"), spec.runtime.seed)
    base = {name: tensor.clone() for name, tensor in cache.model(*model).state_dict().items()}
    metrics = train(spec, tmp_path / "run", cache=cache)
    run = RunFolder(tmp_path / "run")
    saved = load_file(run.delta / "delta.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    norms = [name for name in base if name.endswith("LayerNorm.weight")]
    assert norms and all(0 < (saved[f"base.{name}"] - base[name]).abs().max() < 2**-10 for name in norms)
    after = cache.model(*model).state_dict()
    assert cache.read["models"] == 1 and all(torch.equal(after[name], tensor) for name, tensor in base.items())
    assert run.environment["precision"] == "bf16" and evaluate(run.folder) == metrics.scores
    other = train(spec.replace(precision="fp32"), tmp_path / "fp32", cache=cache)
    facts = [json.loads((tmp_path / name / "delta" / "delta.json").read_text()) for name in ("run", "fp32")]
    assert facts[0]["base"] == facts[1]["base"], "the fingerprint is of the base in float32"
    assert facts[0]["trained"] == {
        "max_length": spec.data.max_length,
        "columns": {"text": "text", "label": "label"},
    }, "which servers read"
    assert metrics.validation["loss"] == pytest.approx(other.validation["loss"], rel=1e-2)


@pytest.mark.parametrize(
    "changes",
    [
        BF16,
        {"method": "adalora(rank=1, initial_rank=3, stop=0.9)"},
        {"method": "full", "lr": 1e-3, "optimizer": "adamw_8bit"},
    ],
    ids=["bf16", "ranks", "8 bit"],
)
def test_an_interrupted_run_goes_on_with_the_same_numbers(
    changes: dict[str, Any], root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tiny.spec(root, **changes), tmp_path / "whole")
    run, _ = interrupted(root, tmp_path / "run", 12, monkeypatch, **changes)
    assert run.checkpoint.exists() and not run.finished
    train(tiny.spec(root, **changes), run.folder)
    same(RunFolder(tmp_path / "whole"), run)


# -- interrupted


def interrupted(
    root: Path, folder: Path, moment: int, monkeypatch: pytest.MonkeyPatch, **changes: Any
) -> tuple[RunFolder, Path]:
    """A run that was stopped when a file or folder was about to take its place for the moment-th time, and which."""
    targets: list[Path] = []
    replace = os.replace

    def counted(source: Any, target: Any) -> None:
        targets.append(Path(target))
        if len(targets) == moment:
            raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", counted)
        with pytest.raises(KeyboardInterrupt):
            train(tiny.spec(root, **changes), folder)
    return RunFolder(folder), targets[-1]


WRITES = 21
"""How many files and folders take their place in a run."""


@pytest.mark.parametrize("lost", ["the answers", "the file", "the delta they were of"])
def test_answers_that_are_not_of_the_delta_are_made_anew(
    lost: str, root: Path, whole: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the best epoch answered is taken over only with the very delta, as after a kill between both."""
    run, _ = interrupted(root, tmp_path / "run", WRITES, monkeypatch)
    facts_file = next(run.checkpoint.glob("*/facts.json"))
    facts = json.loads(facts_file.read_text())
    assert facts["best"]["answered"]["metrics"] == whole.metrics.validation
    facts["best"]["answered"]["metrics"] = {"accuracy": -1.0, "loss": -1.0}
    if lost == "the answers":
        del facts["best"]["answered"]
    elif lost == "the file":
        (run.predictions / "validation.jsonl").unlink()
    else:
        facts["best"]["answered"]["delta"] = "0" * 64
    facts_file.write_text(json.dumps(facts))
    checkpoints.write_checksums(facts_file.parent)
    train(tiny.spec(root), run.folder)
    same(whole, run)


def start(folder: Path) -> Started:
    """`deltune train` of the folder's spec.yaml, in a process of its own."""
    return Started(deltune, folder, "train", str(folder / "spec.yaml"), "--output", str(folder / "run"))


def test_ctrl_c_leaves_a_run_that_goes_on(root: Path, tmp_path: Path) -> None:
    spec = tiny.spec(root, epochs=200)
    (tmp_path / "spec.yaml").write_text(spec.yaml())
    run = RunFolder(tmp_path / "run")
    started = start(tmp_path)
    while checkpoints.latest_checkpoint(run.checkpoint) is None and started.running:
        time.sleep(0.01)
    assert started.interrupt() == 130
    assert "run the same command again" in started.printed and "Traceback" not in started.printed
    assert run.exists and not run.finished


def swallow_an_interrupt() -> None:
    watch_interrupts()
    with contextlib.suppress(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    try:
        raise_if_interrupted()
    except KeyboardInterrupt:
        print("again")
    raise_if_interrupted()


class Interrupting:
    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)


def interrupt_where_python_ignores_it() -> None:
    watch_interrupts()
    Interrupting()
    try:
        raise_if_interrupted()
    except KeyboardInterrupt:
        print("again")


def test_an_interrupt_that_is_swallowed_comes_again(tmp_path: Path) -> None:
    """As in a callback of a library that ignores every exception."""
    started = Started(swallow_an_interrupt, tmp_path / "output")
    assert started.wait() == 0 and started.printed == "again\n"


def test_an_interrupt_that_python_ignores_comes_again_without_a_traceback(tmp_path: Path) -> None:
    started = Started(interrupt_where_python_ignores_it, tmp_path / "output")
    assert started.wait() == 0 and started.printed == "again\n"


def test_a_checkpoint_holds_the_delta_alone(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(RunFolder, "finish", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(tiny.spec(root, method="lora(rank=2)"), tmp_path / "run")
    checkpoint = checkpoints.latest_checkpoint(RunFolder(tmp_path / "run").checkpoint)
    assert checkpoint is not None and names(checkpoint) == {
        "facts.json", "tensors.safetensors", "trainer_state.json", "SHA256SUMS",
    }  # fmt: skip
    trained = [n for n in load_file(checkpoint / "tensors.safetensors") if n.startswith("trained.")]
    assert len(trained) == 2 * 2 * 2 + 2, "up and down, query and value, 2 layers; the head"
    assert names(checkpoint.parent) == {checkpoint.name}, "one checkpoint is enough"
    (checkpoint / "tensors.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(DeltuneError, match=r"--fresh.*tensors\.safetensors is not the file that was written"):
        train(tiny.spec(root, method="lora(rank=2)", epochs=3), tmp_path / "run")
    checkpoints.write_checksums(checkpoint)
    with pytest.raises(DeltuneError, match="cannot be read"):
        train(tiny.spec(root, method="lora(rank=2)", epochs=3), tmp_path / "run")


# -- what goes wrong


@pytest.mark.parametrize("method", ["full", "head", "prefix(length=4) + layernorm"])
def test_a_loss_that_is_no_number(method: str, root: Path, tmp_path: Path) -> None:
    with pytest.raises(DeltuneError, match=r"diverged at a learning rate of 1e\+38.*lower rate"):
        train(tiny.spec(root, method=method, lr=1e38, clip=0), tmp_path / "run")
    assert names(tmp_path) == set(), "nothing half-written"


def test_diverging_late_keeps_the_best(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder(tmp_path / "run")
    compute = DeltaTrainer.compute_loss

    def spoiled(self: DeltaTrainer, *args: Any, **kwargs: Any) -> Any:
        loss = compute(self, *args, **kwargs)
        return loss * float("nan") if self.state.global_step == 8 else loss

    with monkeypatch.context() as patch, pytest.raises(DeltuneError, match=r"step 9.*last good epoch"):
        patch.setattr(DeltaTrainer, "compute_loss", spoiled)
        train(tiny.spec(root), run.folder)
    assert not run.finished and names(run.delta) == {"delta.json", "delta.safetensors"}


@pytest.mark.parametrize(("family", "longest"), [("bert", 64), ("roberta", 62), ("gpt2", 64), ("llama", 64)])
def test_more_tokens_than_the_model_holds(family: str, longest: int, root: Path, tmp_path: Path) -> None:
    folder = str(tiny.model(tmp_path / "model", family))
    with pytest.raises(DeltuneError, match=f"max_length=90 .* {longest} tokens"):
        train(tiny.spec(root, model=folder, max_length=90), tmp_path / "run")
    assert names(tmp_path) == {"model"}
    train(tiny.spec(root, model=folder, max_length=longest, epochs=1, max_train_rows=8), tmp_path / "run")


def test_a_prompt_takes_positions(root: Path, tmp_path: Path) -> None:
    with pytest.raises(DeltuneError, match="54 tokens"):
        train(tiny.spec(root, method="prompt(length=10)", max_length=55), tmp_path / "run")
    for method in ("prompt(length=10, positions='none')", "prefix(length=10)"):
        train(tiny.spec(root, method=method, max_length=64, epochs=1), tmp_path / "run", resume=False)


def test_cut_rows_are_counted(root: Path, tmp_path: Path) -> None:
    metrics = train(tiny.spec(root, max_length=8, epochs=1), tmp_path / "run")
    lengths = [len(row["text"].split()) + 2 for row in tiny.sentences(48, 0)]
    assert metrics.truncated["train"] == sum(length > 8 for length in lengths) > 0


def test_nothing_to_train(root: Path, tmp_path: Path) -> None:
    with pytest.raises(DeltuneError, match="trains nothing"):
        train(tiny.spec(root, method="head", head="freeze"), tmp_path / "run")
    assert names(tmp_path) == set()


def test_changed_data_between_two_parts(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    data = tiny.data(tmp_path / "data")
    spec = tiny.spec(root, data=str(data), epochs=1)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(RunFolder, "finish", interrupted)
        train(spec, tmp_path / "run")
    shutil.copy(data / "test.jsonl", data / "train.jsonl")
    with pytest.raises(DeltuneError, match=r"changed since .* train \(48 rows then, 24 now\). Bring back"):
        train(spec, tmp_path / "run")


def test_a_finished_run_needs_no_data(tmp_path: Path) -> None:
    first = train(tiny.spec(tmp_path, epochs=1), tmp_path / "run")
    (tmp_path / "data").rename(tmp_path / "moved")
    assert train(RunFolder(tmp_path / "run").config, tmp_path / "run") == first


@pytest.mark.parametrize("several", [{}, {"seeds": (0, 1)}])
def test_changed_data_of_a_finished_run(several: dict[str, Any], root: Path, tmp_path: Path) -> None:
    """The old result is not given for new data; brought back, or left unread in a fresh start, all is well."""
    data, run = tiny.data(tmp_path / "data"), tmp_path / "run"
    spec = tiny.spec(root, data=str(data), epochs=1, max_train_rows=40, **several)
    metrics = train(spec, run)
    text = (data / "test.jsonl").read_text()
    assert train(spec, run) == metrics
    (data / "test.jsonl").write_text(text.replace("old", "new"))
    with pytest.raises(DeltuneError, match=r"changed since .*: test \(24 rows then, 24 now\). .*\(--fresh\)"):
        train(spec, run)
    (data / "test.jsonl").write_text(text)
    assert train(spec, run) == metrics
    (data / "test.jsonl").write_text(text.replace("old", "new"))
    train(spec, run, resume=False)
    assert train(spec, run).test.keys() == metrics.test.keys()
