"""Learning rates that nobody gave: by method and number of steps, or by `lr: auto`, whose search is part of the run."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

import tiny
from deltune.cli.use import TICKETS
from deltune.errors import DeltuneError, DivergedError
from deltune.methods.registry import GROUPS, REGISTRY, default_learning_rate
from deltune.train import rates
from deltune.train import run as training
from deltune.train.config import RunConfig, read_config
from deltune.train.metrics.intervals import share_interval
from deltune.train.presets import merge_values
from deltune.train.rates import (
    CLEARLY_BETTER,
    FACTORS,
    MAX_SHARE,
    MIN_STEPS,
    Slice,
    edge_of_rates,
    plan_search,
    search_rate,
)
from deltune.train.records import RunMetrics
from deltune.train.report.advice import advice, read_finished
from deltune.train.run import train
from deltune.train.run_folder import RunFolder
from deltune.train.setup import ModelCache

AUTO: dict[str, Any] = {"lr": "auto", "steps": 120, "validate_every": 60, "method": "lora(rank=2)"}


@pytest.fixture(scope="module")
def searched(root: Path) -> RunFolder:
    """A run that found its rate."""
    train(tiny.spec(root, **AUTO), root / "searched")
    return RunFolder(root / "searched")


def scores(metrics: RunMetrics) -> dict[str, Any]:
    return {"test": metrics.test, "validation": metrics.validation, "best": metrics.best.as_json()}


# -- the default


@pytest.mark.parametrize("method", REGISTRY)
def test_the_default_of_a_method_falls_with_the_steps(method: str) -> None:
    plain = repr(REGISTRY[method].plain)
    values = [default_learning_rate(plain, steps) for steps in (1, 30, 100, 300, 1000, 10_000, 10**9)]
    assert values == sorted(values, reverse=True)
    assert values[-1] == default_learning_rate(plain), "that of a long run"


def test_a_run_writes_the_rate_that_it_assumed(root: Path, tmp_path: Path) -> None:
    """The spec of a run says its rate, is the same run as the command without one, and repeats it exactly."""
    config = tiny.spec(root, epochs=2, method="lora(rank=2)")
    assert config.optim.lr is None
    whole = train(config, tmp_path / "run")
    written = yaml.safe_load((tmp_path / "run" / "spec.yaml").read_text())["optim"]
    assert (written["lr"], written["lr_source"]) == (default_learning_rate("lora(rank=2)", 12), "default")
    assert read_config(tmp_path / "run" / "spec.yaml").name == config.name
    again = train(read_config(tmp_path / "run" / "spec.yaml"), tmp_path / "again")
    fixed = train(config.replace(lr=written["lr"]), tmp_path / "fixed")
    assert scores(again) == scores(whole) == scores(fixed)
    assert read_config(tmp_path / "run" / "spec.yaml").replace(epochs=3).optim.lr is None, "other steps, another rate"
    assert read_config(tmp_path / "run" / "spec.yaml").replace(seed=3).optim.lr == written["lr"]


def test_a_resumed_run_keeps_its_rate(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if another version of deltune would assume another one."""

    def stopped(*_: Any) -> None:
        raise KeyboardInterrupt

    config = tiny.spec(root, epochs=2, method="lora(rank=2)")
    whole = train(config, tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "finish", stopped)
        with pytest.raises(KeyboardInterrupt):
            train(config, tmp_path / "run")
    monkeypatch.setattr(rates, "default_learning_rate", lambda *_: 1.0)
    assert scores(train(config, tmp_path / "run")) == scores(whole)


def test_canonical_values_make_the_config_again() -> None:
    """Jobs of studies are stored as such values: without a rate they mean the method's, whatever the steps."""
    least = {"model": "owner/model", "data": "owner/data", "method": "layernorm"}
    for values in ({}, {"lr": 1e-2}, {"lr": 0.5}, {"lr": "auto"}, {"lr": 0.5, "lr_source": "auto"},
                  {"search": {"lr": [1e-2, 1e-3]}}, {"search": {"method": ["lora", "full"]}}):  # fmt: skip
        config = RunConfig.from_flat(**least, **values)
        assert RunConfig.from_canonical(config.canonical()).name == config.name
    assert "lr" not in RunConfig.from_flat(**least, lr=1e-2).canonical(), "as names always were"
    assert RunConfig.from_canonical(least).optim.lr == 1e-2


FOUND: dict[str, Any] = {"model": "m", "data": "d", "method": "lora", "lr": 0.0042}


@pytest.mark.parametrize(("source", "expected"), [("default", None), ("auto", "auto")])
@pytest.mark.parametrize(
    "search", [{"method": ["lora", "full"]}, {"method.expression": ["lora", "full"]}, {"optim.steps": [10, 1000]}]
)
def test_a_rate_does_not_outlive_a_search_over_what_it_depends_on(
    source: str, expected: str | None, search: dict[str, list[Any]]
) -> None:
    """Neither in the runs of a series with a rate that a run found, nor where the search comes later."""
    for series in (
        RunConfig.from_flat(**FOUND, lr_source=source, search=search),
        RunConfig.from_flat(**FOUND, lr_source=source).replace(search=search),
        RunConfig.from_flat(**merge_values({**FOUND, "lr_source": source}, {"search": search})),
    ):
        tries = series.search_configs()
        assert [(one.optim.lr, one.optim.lr_source) for one in tries] == [(expected, None)] * 2
        assert tries[0].name != tries[1].name


def test_a_rate_that_was_given_is_that_of_every_method_of_a_search() -> None:
    series = RunConfig.from_flat(model="m", data="d", method="layernorm", lr=1e-2, search={"method": ["lora", "full"]})
    assert [one.optim.lr for one in series.search_configs()] == [1e-2, 1e-2], "although it is the default of layernorm"


@pytest.mark.parametrize("source", ["default", "auto"])
def test_rates_to_try_take_the_place_of_one_that_was_found(source: str) -> None:
    options = {**FOUND, "lr_source": source}
    for series in (
        RunConfig.from_flat(**options, search={"lr": [1e-3, 1e-2]}),
        RunConfig.from_flat(**options).replace(search={"optim.lr": [1e-3, 1e-2]}),
        RunConfig.from_flat(**FOUND).replace(lr="auto").replace(search={"lr": [1e-3, 1e-2]}),
    ):
        tries = series.search_configs()
        assert [(one.optim.lr, one.optim.lr_source) for one in tries] == [(1e-3, None), (1e-2, None)]
        assert tries[0].name != tries[1].name
    assert RunConfig.from_flat(**options).replace(search={"lr": [1e-3]}).optim.lr is None


def test_a_try_replaces_what_excludes_it() -> None:
    series = RunConfig.from_flat(model="m", data="d", method="lora", steps=100, search={"epochs": [2, 5]})
    assert [(one.optim.epochs, one.optim.steps) for one in series.search_configs()] == [(2, None), (5, None)]


# -- the plan of a search


@pytest.mark.parametrize(
    ("rows", "epochs", "batch_size"), [(400, 12, 8), (1000, 6, 32), (4500, 3, 32), (67_000, 1, 64)]
)
def test_a_search_costs_less_than_a_quarter(rows: int, epochs: int, batch_size: int) -> None:
    config = RunConfig.from_flat(model="m", data="d", method="lora", epochs=epochs, batch_size=batch_size, lr="auto")
    per_epoch = -(-rows // batch_size)
    plan = plan_search(config, rows, epochs * per_epoch, per_epoch)
    assert plan.steps >= MIN_STEPS and len(plan.rates) * plan.steps < MAX_SHARE * epochs * per_epoch
    assert plan.share < MAX_SHARE, "scoring included"
    assert plan.part.rows + plan.part.held_out <= rows
    assert list(plan.rates) == sorted(plan.rates) and len(plan.rates) == len(FACTORS)


def test_a_run_that_is_too_short_for_a_search(root: Path, tmp_path: Path) -> None:
    with pytest.raises(
        DeltuneError, match=r"a run of 18 steps is too short .*: (\d+) steps are needed.*--epochs \d+"
    ) as e:
        train(tiny.spec(root, lr="auto"), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    epochs = int(str(e.value).partition("--epochs ")[2].partition(")")[0])
    config = tiny.spec(root, lr="auto")
    plan_search(config.replace(epochs=epochs), 48, epochs * 6, 6)
    with pytest.raises(DeltuneError, match=r"too short"):
        plan_search(config.replace(epochs=epochs - 1), 48, (epochs - 1) * 6, 6)


@pytest.mark.parametrize(("warmup", "share"), [(500, 0.25), (0.1, 0.1), (0, 0)])
def test_a_try_warms_up_for_the_share_of_the_run(warmup: float, share: float, tmp_path: Path) -> None:
    """As many steps as the run's would be longer than a try."""
    config = RunConfig.from_flat(model="m", data="d", method="lora", steps=2000, warmup=warmup, lr="auto")
    plan = plan_search(config, 4000, 2000, 125)
    tries: list[RunConfig] = []

    def loss_of(one: RunConfig, part: Slice) -> float:
        tries.append(one)
        return 1.0

    best = search_rate(config, plan, "", RunFolder(tmp_path), loss_of)
    assert [(one.optim.warmup, one.optim.steps) for one in tries] == [(share, plan.steps)] * len(FACTORS)
    assert best.optim.warmup == warmup


@pytest.mark.parametrize("warmup", [0.5, 1000, 3000])
def test_a_run_that_warms_up_for_too_long_for_a_search(warmup: float) -> None:
    config = RunConfig.from_flat(model="m", data="d", method="lora", steps=2000, warmup=warmup, lr="auto")
    with pytest.raises(DeltuneError, match=r"2000 steps that warms up for \d+% .*less than 50%, such as --warmup 0\.1"):
        plan_search(config, 4000, 2000, 125)


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"lr": "auto", "search": {"lr": [1e-3, 1e-2]}}, "auto searches for a rate itself"),
        ({"search": {"lr": ["auto", 1e-2]}}, "auto is no rate to try"),
        ({"lr": "fast"}, "optim.lr: .*number"),
        ({"lr": -1}, r"optim\.lr: .*greater than 0"),
        ({"lr_source": "auto"}, "lr_source: a run writes it"),
        ({"lr": 1.0, "lr_source": "me"}, "lr_source"),
    ],
)
def test_wrong_rates(values: dict[str, Any], match: str) -> None:
    with pytest.raises(DeltuneError, match=match):
        RunConfig.from_flat(model="m", data="d", method="lora", **values)


def test_auto_takes_the_place_of_the_rates_of_a_protocol() -> None:
    config = RunConfig.from_flat(model="m", task="sick", method="lora", protocol="ln_nlu", lr="auto")
    assert config.optim.lr == "auto" and not config.runtime.search


# -- whole


def test_a_search_is_told_and_kept(searched: RunFolder, root: Path) -> None:
    """What was tried is in the metrics, what won is in the spec, and neither validation nor test was used."""
    search = searched.metrics.rate_search
    assert (
        search is not None
        and search.lr is not None
        and [one.lr for one in search.tries] == sorted(one.lr for one in search.tries)
    )
    losses = {one.lr: one.loss for one in search.tries if one.loss is not None}
    default = search.tries[FACTORS.index(1.0)].lr
    assert search.lr in losses and losses[search.lr] <= losses[default]
    assert search.lr == default or losses[search.lr] == min(losses.values()) < CLEARLY_BETTER * losses[default]
    assert (searched.config.optim.lr, searched.config.optim.lr_source) == (search.lr, "auto")
    assert searched.config.name == tiny.spec(root, **AUTO).name != tiny.spec(root, **{**AUTO, "lr": search.lr}).name
    assert f"{search.tries[0].lr:g}: {search.tries[0].loss:.4f}" in searched.report_file.read_text()
    data = training.load_task_data(searched.config.data, 0)[1]
    part = Slice(search.rows, search.held_out, 0)(data)
    ids = {split: set(rows["id"]) for split, rows in part.splits.items()}
    assert ids.keys() == {"train", "validation"} and not ids["train"] & ids["validation"]
    assert ids["train"] | ids["validation"] <= set(data.splits["train"]["id"])
    assert (len(ids["train"]), len(ids["validation"])) == (search.rows, search.held_out)


def test_a_run_after_a_search_is_that_of_the_rate(
    searched: RunFolder, root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The search leaves no trace in the numbers; it is the same for the same seed, and says what it does."""
    fixed = train(tiny.spec(root, **{**AUTO, "lr": searched.config.optim.rate}), tmp_path / "fixed")
    assert scores(fixed) == scores(searched.metrics) and fixed.rate_search is None
    with caplog.at_level(logging.INFO, "deltune"):
        again = train(tiny.spec(root, **AUTO), tmp_path / "again")
    assert scores(again) == scores(fixed) and again.rate_search == searched.metrics.rate_search
    text = caplog.text
    assert f"lr auto: {len(FACTORS)} rates" in text and text.count(": loss ") == len(FACTORS)
    assert re.search(rf"lr {searched.config.optim.rate:g}( did best|: the default)", text)
    assert f"rate {searched.config.optim.rate:g}, found by lr auto (" in text
    caplog.clear()
    with caplog.at_level(logging.INFO, "deltune"):
        train(tiny.spec(root, **AUTO), tmp_path / "again")
    assert "is finished" in caplog.text and "lr auto" not in caplog.text


LOSSES: dict[str, tuple[float | None, ...]] = {
          "falling": (4.0, 3.0, 2.0, 1.0), "rising": (1.0, 2.0, None, None), "within": (2.0, 1.0, 2.0, None),
          "equal": (0.995, 1.1, 1.0, 1.2), "default diverged": (1.0, None, None, None)}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "chosen", "message"),
    [("falling", 3, "highest rate .*--lr 0.064"), ("rising", 0, "lowest rate .*--lr 6.3e-05"),
     ("within", 1, "did best$"),
     ("equal", 2, "no other rate did clearly better$"), ("default diverged", 0, "lowest rate")],
)  # fmt: skip
def test_which_rate_wins(
    case: str, chosen: int, message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = RunConfig.from_flat(model="m", data="d", method="lora", epochs=100, lr="auto")
    plan = replace(plan_search(config, 400, 1300, 13), rates=(0.00025, 0.001, 0.004, 0.016), boost=2.0)

    def loss_of(one: RunConfig, part: Slice) -> float:
        loss = LOSSES[case][plan.rates.index(one.optim.rate / plan.boost)]
        if loss is None:
            raise DivergedError("it diverged")
        return loss

    with caplog.at_level(logging.INFO, "deltune"):
        resolved = search_rate(config, plan, "", RunFolder(tmp_path), loss_of)
    assert resolved.optim.lr == plan.rates[chosen] and re.search(message, caplog.text.rstrip())
    search = RunFolder(tmp_path).rate_search
    assert search is not None and bool(edge_of_rates(search, search.lr)) == ("beyond" in caplog.text)
    with pytest.raises(DivergedError, match=r"at every rate .*--lr 2\.5e-05"):
        search_rate(config.replace(seed=1), plan, "", RunFolder(tmp_path), loss_of=_diverge)


def _diverge(*_: Any) -> float:
    raise DivergedError("it diverged")


def test_only_the_main_process_reads_what_was_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others may see the folder late, and would then train other tries, waiting for one another for ever."""
    config = RunConfig.from_flat(model="m", data="d", method="lora", epochs=100, lr="auto")
    plan = plan_search(config, 400, 1300, 13)
    search_rate(config, plan, "", RunFolder(tmp_path), lambda one, part: 1.0)
    tried = RunFolder(tmp_path).rate_search
    monkeypatch.setattr(rates.sharding, "broadcast_from_main", lambda work: tried)
    (tmp_path / "elsewhere").mkdir()
    assert search_rate(config, plan, "", RunFolder(tmp_path / "elsewhere"), _diverge).optim.lr == plan.rates[2]


@pytest.mark.parametrize("tries", [pytest.param(0, marks=pytest.mark.slow), 1, len(FACTORS)])
@pytest.mark.sample(1)
def test_an_interrupted_search_goes_on(
    tries: int, searched: RunFolder, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was tried is not tried again, and the run ends with the same numbers."""
    once, begun = training._fit, []

    def counted(state: Any, *rest: Any) -> None:
        if len(begun) == tries:
            raise KeyboardInterrupt
        begun.append(state.config.optim.rate)
        once(state, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(training, "_fit", counted)
        with pytest.raises(KeyboardInterrupt):
            train(tiny.spec(root, **AUTO), tmp_path / "run")
    assert not RunFolder(tmp_path / "run").finished
    fitted: list[float] = []
    monkeypatch.setattr(
        training, "_fit", lambda state, *rest: fitted.append(state.config.optim.rate) or once(state, *rest)
    )
    assert scores(train(tiny.spec(root, **AUTO), tmp_path / "run")) == scores(searched.metrics)
    assert len(begun) + len(fitted) == len(FACTORS) + 1 and len({*begun, *fitted[:-1]}) == len(FACTORS), "each once"
    assert fitted[-1] == searched.config.optim.rate


def test_seeds_share_a_search(root: Path, searched: RunFolder, tmp_path: Path) -> None:
    several = train(tiny.spec(root, **AUTO, seeds=(0, 1)), tmp_path / "run")
    first, second = (RunFolder(tmp_path / "run" / "runs" / name) for name in ("seed0", "seed1"))
    assert scores(first.metrics) == scores(searched.metrics)
    assert second.config.optim.rate == first.config.optim.rate and second.metrics.rate_search is None
    assert several.rate_search == searched.metrics.rate_search or several.best.run == "seed1"


@pytest.mark.slow
def test_each_method_of_a_search_finds_its_rate(root: Path, tmp_path: Path) -> None:
    tried = {"method": ["lora(rank=2)", "layernorm"]}
    train(tiny.spec(root, **AUTO, search=tried), tmp_path / "run")
    runs = [RunFolder(folder) for folder in sorted((tmp_path / "run" / "runs").iterdir())]
    assert all(run.metrics.rate_search is not None and run.config.optim.lr_source == "auto" for run in runs)


# -- nobody meets the majority class without a word


def learned_or_told(folder: Path) -> bool:
    """Whether a run is clearly better than always giving the most frequent answer, or says what to try."""
    finished = read_finished(RunFolder(folder))
    analysis = finished.analysis
    assert analysis.accuracy is not None and analysis.baseline is not None
    low = share_interval(round(analysis.accuracy * analysis.rows), analysis.rows)[0]
    return low > analysis.baseline or any(
        "--lr" in note and ("--epochs" in note or "--warmup" in note) for note in advice(finished)
    )


@pytest.fixture(scope="module")
def cache() -> ModelCache:
    return ModelCache()


@pytest.mark.parametrize("method", REGISTRY)
@pytest.mark.sample(10)
def test_the_defaults_of_a_method_teach_or_tell(method: str, root: Path, tmp_path: Path, cache: ModelCache) -> None:
    fitting = {  # the tiny model has few positions and a width of 32
        "prompt": "prompt(length=4)", "miss": "miss(rank=8)", "c3a": "c3a(block_size=16)", "shira": "shira(rank=4)",
        "vblora": "vblora(vectors=32, length=16)", "road": "road(group_size=32)",
        "waveft": "waveft(frequencies=64)",
    }  # fmt: skip
    more = {"quantize": "int8"} if method == "loftq" else {}
    config = tiny.spec(root, method=fitting.get(method, repr(REGISTRY[method].plain)), epochs=2, **more)
    train(config, tmp_path / "run", cache=cache, progress=False, report=False)
    assert learned_or_told(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("method", [names[0] for names in GROUPS.values()])
def test_the_defaults_of_a_method_on_real_rows(method: str, tmp_path: Path, cache: ModelCache) -> None:
    """The packaged model and tickets; docs/train/choose.md has the scores on further tasks."""
    more = {"quantize": "int8"} if method == "loftq" else {}
    config = RunConfig.from_flat(model="minilm", data=str(TICKETS), method=repr(REGISTRY[method].plain), **more)
    train(config, tmp_path / "run", cache=cache, progress=False, report=False)
    assert learned_or_told(tmp_path / "run")
