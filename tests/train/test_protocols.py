"""Protocols by name: what the papers say, overridden by what is given; and runs of several seeds and tries."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import tiny
from deltune.errors import DeltuneError
from deltune.runtime.serialization import delta_folder
from deltune.train.config import UNSEARCHED, RunConfig, read_config
from deltune.train.inference import evaluate, predict
from deltune.train.presets import PROTOCOLS, merge_values
from deltune.train.records import Best, RunMetrics
from deltune.train.run import train
from deltune.train.run_folder import RunFolder
from deltune.train.series import aggregate
from deltune.train.tasks.registry import TASKS


def spec(**values: Any) -> RunConfig:
    return RunConfig.from_flat(
        **{"model": "minilm", "task": "sick", "data_root": "data", "method": "layernorm", **values}
    )


SAID = (  # of a protocol, a task and a method: what the paper's text and tables say
    ("ln_nlu", "sick", "layernorm", {"epochs": 30, "patience": 10, "metric": "loss", "batch_size": 512,
                                     "search": {"lr": (1e-2, 1e-3, 2e-4)}, "seeds": (0, 1, 2)}),
    ("ln_nlu", "sick", "lora(rank=8)", {"search": {"lr": (1e-3, 2e-4)}, "batch_size": 512}),
    ("ln_nlu", "sst2", "full", {"batch_size": 256}), ("ln_nlu", "sst2", "mam", {"batch_size": 392}),
    ("ln_nlu", "social_iqa", "mam", {"batch_size": 48}), ("ln_nlu", "social_iqa", "bitfit", {"batch_size": 64}),
    ("ln_nlu", "sick", "prefix(length=16) + layernorm", {"search": {"lr": (1e-3, 2e-4)}}),
    ("ln_nlu", "sick", "apet(layernorm, parameters=100)", {"search": {"lr": (1e-2, 1e-3, 2e-4)}}),
    ("ln_nlu_large", "commonsense_qa", "mam", {"batch_size": 24}),
    ("ln_nlg", "dart", "lora(rank=8)", {"epochs": 20, "lr": 2e-4, "max_tokens": 45, "batch_size": 84}),
    ("ln_nlg", "samsum", "full", {"max_tokens": 35, "batch_size": 32}),
    ("uv_xsum", "xsum", "lora(rank=8)", {
        "steps": 100_000, "batch_size": 64, "lr": 5e-5, "label_smoothing": 0.1, "clip": 0.1, "weight_decay": 0.01,
        "adam_betas": (0.9, 0.98), "adam_epsilon": 1e-6, "schedule": "polynomial", "max_length": 512,
        "target_length": 128, "beams": 6, "min_tokens": 10, "max_tokens": 60, "no_repeat_ngram": 3,
        "validation_rows": 1600, "metric": "rouge2", "template": "{source}"}),
    ("uv_xsum", "xsum", "full", {  # Lewis et al. 2020, by fairseq's recipe of BART
        "steps": 15_000, "lr": 3e-5, "warmup": 500, "batch_tokens": 32_768, "clip": 0.1, "weight_decay": 0.01,
        "adam_betas": (0.9, 0.999), "adam_epsilon": 1e-8, "label_smoothing": 0.1}),
    ("uv_enro", "wmt16_en_ro", "full", {  # Liu et al. 2020, by fairseq's recipe of mBART
        "steps": 40_000, "lr": 3e-5, "warmup": 2500, "label_smoothing": 0.2, "weight_decay": 0.0,
        "adam_betas": (0.9, 0.98), "adam_epsilon": 1e-6}),
    ("uv_glue", "mnli", "full", {  # Liu et al. 2019, by fairseq's recipe of RoBERTa
        "lr": 1e-5, "epochs": 10, "batch_size": 32, "warmup": 0.06, "weight_decay": 0.1, "clip": 0.0,
        "adam_betas": (0.9, 0.98), "adam_epsilon": 1e-6}),
    ("ap", "sst2", "full", {"lr": 5e-5}),
    ("uv_enro", "wmt16_en_ro", "mam", {
        "steps": 50_000, "batch_tokens": 16_384, "lr": 5e-5, "clip": 1.0, "warmup": 0.0, "max_length": 150,
        "target_length": 150, "schedule": "polynomial", "beams": 5, "min_tokens": 1, "max_tokens": 200,
        "metric": "loss", "template": "{source}"}),
    ("uv_glue", "sst2", "mam", {"lr": 1e-4, "epochs": 10, "batch_size": 32, "warmup": 0.06, "weight_decay": 0.1,
                                "clip": 1.0, "max_length": 512, "seeds": (0, 1, 2, 3, 4), "aggregate": "median"}),
    ("ap", "sst2", "lora(rank=8)", {"lr": 3e-4, "batch_size": 32, "warmup": 0.0, "max_length": 128}),
    ("ap", "rte", "lora(rank=8)", {"lr": 5e-5, "max_length": 256}),
    ("ap", "rte", "prompt(length=100)", {"lr": 5e-5}), ("ap", "qqp", "prompt(length=100)", {"lr": 3e-2}),
    ("ap", "samsum", "lora(rank=8)", {"max_tokens": 128}),
)  # fmt: skip


@pytest.mark.parametrize(("protocol", "task", "method", "expected"), SAID)
def test_a_protocol_is_what_its_paper_says(protocol: str, task: str, method: str, expected: dict[str, Any]) -> None:
    settings = spec(protocol=protocol, task=task, method=method)
    assert {name: settings.flat()[name] for name in expected} == expected


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_what_the_paper_does_not_say_is_marked(protocol: str) -> None:
    """Every value of a protocol is in the table above, read off the paper, or is marked as ours with its source."""
    named = PROTOCOLS[protocol]
    fields = {field for values in (named.values, *(rule.values for rule in named.rules)) for field in values}
    family = "ln_nlu" if protocol == "ln_nlu_large" else protocol  # the two differ in their batches alone
    printed = {field for name, _, _, expected in SAID if name == family for field in expected}
    assert fields - printed <= set(named.ours) <= fields and all(named.ours.values())
    page = (Path(__file__).parents[2] / "docs" / "studies" / "reproduce.md").read_text(encoding="utf-8")
    (row,) = re.findall(rf"^\| [^|]*`{protocol}`[^|]*\|.*$", page, re.MULTILINE)
    assert {field for field in named.ours if f"`{field}`" not in row} == set(), (
        "docs/studies/reproduce.md lists what is ours"
    )


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_protocol_fits_every_task_it_names(protocol: str) -> None:
    """Every rule's task exists, and every value is one that its field takes."""
    for rule in PROTOCOLS[protocol].rules:
        assert set(rule.tasks) <= set(TASKS)
        for task in rule.tasks or ("sick",):
            for method in rule.methods or ("bitfit",):
                assert spec(protocol=protocol, task=task, method=method).runtime.protocol == protocol


def test_what_is_given_wins() -> None:
    settings = spec(protocol="ln_nlu", epochs=2, lr=5e-3, seed=7)
    assert (settings.optim.epochs, settings.optim.lr) == (2, 5e-3)
    assert (settings.runtime.seed, settings.runtime.seeds, settings.runtime.search) == (7, (), {})
    assert settings.evaluation.patience == 10 and not settings.is_series
    assert spec(protocol="uv_xsum", task="xsum", epochs=2).optim.steps is None
    short = "{source} In short:"
    assert spec(protocol="uv_xsum", task="xsum", template=short).generation.template == short
    assert spec(protocol="uv_xsum", task="samsum").generation.template is None  # that of its task
    assert merge_values({"steps": 9, "search": {"lr": [1, 2], "clip": [1]}}, {"epochs": 3, "lr": 1}) == {
        "epochs": 3, "lr": 1, "search": {"clip": [1]}
    }  # fmt: skip


def test_a_protocol_is_the_values_it_stands_for() -> None:
    """Its name says nothing that the values do not; a file of it reads back as the same spec."""
    named = spec(protocol="ap")
    values = {"batch_size": 32, "lr": 3e-4, "max_length": 256, "seeds": "0,1,2", "pooling": "model"}
    assert named.name == spec(**values).name != spec().name


def test_a_file_of_several_runs_reads_back(tmp_path: Path) -> None:
    written = spec(protocol="ln_nlu", seeds=(3, 4))
    (tmp_path / "spec.yaml").write_text(written.yaml())
    again = read_config(tmp_path / "spec.yaml")
    assert again.name == written.name and [s.name for s in again.search_configs()] == [
        s.name for s in written.search_configs()
    ]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"protocol": "ln_nl"}, "Did you mean 'ln_nl"),
        ({"search": {"rate": [1]}}, "unknown option 'rate'"),
        ({"search": {"lr": []}}, "no values for lr"),
        ({"search": {"lr": [1e-3, -1]}}, "lr: "),
        ({"search": {"method": ["lora", "lorra"]}}, "Did you mean 'lora'"),
        ({"search": {"seed": [1, 2]}}, "seed is not searched"),
        ({"seeds": [0, "one"]}, "seeds"),
        ({"seeds": [0, 0]}, "different"),
    ],
)
def test_what_is_wrong_is_told(values: dict[str, Any], message: str) -> None:
    with pytest.raises(DeltuneError, match=message):
        spec(**values)


@pytest.mark.parametrize("field", UNSEARCHED)
def test_what_is_the_same_in_all_runs_is_not_searched(field: str) -> None:
    """The documentation names every such field."""
    with pytest.raises(DeltuneError, match=f"{field} is not searched but given"):
        spec(search={field: ["a"]})
    text = " ".join((Path(__file__).parents[2] / "docs" / "train" / "train.md").read_text(encoding="utf-8").split())
    assert f"`{field}`" in text.partition("You can search any field, the method included, except")[2].partition(". ")[0]


def test_names_tell_runs_apart() -> None:
    """Equal names for what means the same, different ones for what does not."""
    both = {"search": {"method": ["lora", "full"]}}
    assert spec(method="lora", **both).name != spec(method="lora", lr=1e-3, **both).name
    lengths = {"search": {"target_length": [64, 32]}}
    assert spec(max_tokens=64, **lengths).name != spec(**lengths).name
    assert spec(search={"lr": ["1e-3"]}).name == spec(search={"lr": [1e-3]}).name
    options = {"data": "folder", "task": "classification"}
    assert spec(**options, data_root="a").name == spec(**options, data_root="b").name
    rates = (
        merge_values({"method": "layernorm", "lr": 1e-2}, {"method": "full"}),
        merge_values({"method": "layernorm", "lr": 3e-3}, {"method": "full"}),
    )
    assert [values.get("lr") for values in rates] == [None, 3e-3], "a rate that was the method's own goes with it"


def test_what_several_runs_come_to() -> None:
    empty: dict[str, Any] = {key: {} for key in ("count", "truncated", "truncated_targets", "signatures", "omitted")}
    lines = [
        RunMetrics(test={"accuracy": value, "loss": 1.0}, seconds=1, best=Best(), **empty) for value in (0.5, 0.6, 0.9)
    ]
    mean, median = aggregate(lines, "mean"), aggregate(lines, "median")
    assert mean["test"]["accuracy"] == pytest.approx(2 / 3) and median["test"]["accuracy"] == 0.6
    assert mean["std"]["test"]["accuracy"] == pytest.approx(0.2081665999)
    assert "std" not in aggregate(lines[:1], "mean")


# -- whole


def test_tries_and_seeds(root: Path, tmp_path: Path) -> None:
    """The second rate is better than the first, the third is not; the second seed has the second rate only."""
    tries = {"lr": [1e-6, 1e-2, 1e-7, 1e-4]}
    several = tiny.spec(root, method="full", epochs=8, metric="loss", seeds=(0, 1), search=tries)
    metrics = train(several, tmp_path / "run")
    lines = {line.run: line for line in metrics.runs}
    assert list(lines) == ["seed0-try1", "seed0-try2", "seed0-try3", "seed1"], "the fourth is not tried"
    assert [line.chosen for line in lines.values()] == [False, True, False, True]
    alone = train(tiny.spec(root, method="full", lr=1e-2, epochs=8, metric="loss", seed=1), tmp_path / "alone")
    assert alone.test == lines["seed1"].test, "a run among others is the run by itself"
    two = [lines[name].test["accuracy"] for name in ("seed0-try2", "seed1")]
    assert metrics.test["accuracy"] == pytest.approx(sum(two) / 2)
    assert metrics.best.lr == 1e-2 and metrics.seconds >= sum(line.seconds for line in lines.values()) - 1
    run = RunFolder(tmp_path / "run")
    best = min((lines["seed0-try2"], lines["seed1"]), key=lambda line: line.validation["loss"])
    assert run.best_run.folder.name == metrics.best.run == best.run
    assert evaluate(run.folder)["test"] == pytest.approx(best.test, abs=1e-6)
    assert predict(run.folder, ["the old apple"])[0]["label"] in tiny.WORDS
    assert delta_folder(run.folder).resolve() == run.best_run.delta.resolve()
    assert len((run.predictions / "test.jsonl").read_text().splitlines()) == 24


@pytest.mark.parametrize("chosen, drawn", [(None, 1), (7, 7)])
def test_seeds_have_the_same_rows(root: Path, tmp_path: Path, chosen: int | None, drawn: int) -> None:
    """A single file is split once for all seeds of a run, and by what the first of them would draw."""
    file = tiny.lines(tmp_path / "all.jsonl", tiny.sentences(60, 0))
    spec = tiny.spec(root, data=str(file), epochs=1, split_seed=chosen)
    train(spec.replace(seeds=(1, 2)), tmp_path / "both", report=False)
    train(spec.replace(seed=drawn, split_seed=None), tmp_path / "alone", report=False)
    first, second, alone = (
        [(row["id"], row["input"]) for row in tiny.objects(folder / "predictions" / "test.jsonl")]
        for folder in (tmp_path / "both" / "runs" / "seed1", tmp_path / "both" / "runs" / "seed2", tmp_path / "alone")
    )
    assert first == second == alone and len(first) == 6
    assert len(evaluate(tmp_path / "both" / "runs" / "seed2", splits=("test",))) == 1


def test_several_runs_go_on_where_they_were(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is run twice: neither when a series is stopped, nor when a finished run gets further seeds."""
    several = tiny.spec(root, epochs=1, seeds=(0, 1, 2))
    for grown in (tiny.spec(root, epochs=1), tiny.spec(root, epochs=1, seeds=(0, 1)), several):
        whole = train(grown, tmp_path / "whole")
        assert (
            len(tiny.losses(RunFolder(tmp_path / "whole").best_run.folder)) and RunFolder(tmp_path / "whole").finished
        )
    assert [line.run for line in whole.runs] == ["seed0", "seed1", "seed2"]
    import deltune.train.run as module

    once, done = module._train, []

    def stopped(single: RunConfig, *rest: Any) -> RunMetrics:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(single.runtime.seed)
        return once(single, *rest)

    monkeypatch.setattr(module, "_train", stopped)
    with pytest.raises(KeyboardInterrupt):
        train(several, tmp_path / "run")
    assert not RunFolder(tmp_path / "run").finished
    monkeypatch.setattr(module, "_train", lambda single, *rest: done.append(single.runtime.seed) or once(single, *rest))
    again = train(several, tmp_path / "run")
    assert done == [0, 1, 2]
    assert again.test == whole.test and again.std == whole.std
    with pytest.raises(DeltuneError, match="seeds: "):
        train(tiny.spec(root, epochs=1, seeds=(0, 1)), tmp_path / "run")


def test_a_try_that_diverges_is_the_worst(root: Path, tmp_path: Path) -> None:
    """A rate that leaves the numbers: the next is taken, and the log says why."""
    tries = {"lr": [1e38, 1e-3]}
    metrics = train(tiny.spec(root, method="full", epochs=1, clip=0, lr=None, search=tries), tmp_path / "run")
    assert "diverged" in str(metrics.runs[0].error) and metrics.best.lr == 1e-3
    three = {"lr": [1e38, 9e37, 1e-3]}
    metrics = train(tiny.spec(root, method="full", epochs=1, clip=0, lr=None, search=three), tmp_path / "third")
    assert metrics.best.lr == 1e-3 and len(metrics.runs) == 3
    two = {"lr": [1e-3, 1e38]}
    assert train(tiny.spec(root, method="full", epochs=1, clip=0, search=two), tmp_path / "two").best.lr == 1e-3
    with pytest.raises(DeltuneError, match="diverged"):
        train(tiny.spec(root, method="full", epochs=1, clip=0, search={"lr": [1e38, 9e37]}), tmp_path / "other")


def test_steps_and_validations_between_epochs(root: Path, tmp_path: Path) -> None:
    metrics = train(tiny.spec(root, steps=10, validate_every=4), tmp_path / "run")
    lines = tiny.objects(tmp_path / "run" / "log.jsonl")
    assert [line["step"] for line in lines if "eval_loss" in line] == [4, 8, 10]
    assert metrics.best.step in (4, 8, 10)
    assert train(tiny.spec(root, steps=2), tmp_path / "short").best.step == 2, "less than an epoch"


def test_validation_on_a_sample(root: Path, tmp_path: Path) -> None:
    ids = []
    for seed in (0, 1):
        train(
            tiny.spec(root, epochs=1, max_train_rows=9, validation_rows=5, test_rows=7, seed=seed), tmp_path / f"{seed}"
        )
        run = RunFolder(tmp_path / f"{seed}")
        assert run.environment["data"]["rows"] == {"train": 9, "validation": 5, "test": 7}
        ids.append([json.loads(line)["id"] for line in (run.predictions / "test.jsonl").read_text().splitlines()])
    assert ids[0] == ids[1], "whatever the seed, so that runs compare"
