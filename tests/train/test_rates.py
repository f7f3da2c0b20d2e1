"""Learning rates that nobody gave: by method and number of steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

import tiny
from deltune.cli.use import TICKETS
from deltune.errors import DeltuneError
from deltune.methods.registry import GROUPS, REGISTRY, default_learning_rate
from deltune.train import rates
from deltune.train.config import RunConfig, read_config
from deltune.train.metrics.intervals import share_interval
from deltune.train.presets import merge_values
from deltune.train.records import RunMetrics
from deltune.train.report.advice import advice, read_finished
from deltune.train.run import train
from deltune.train.run_folder import RunFolder
from deltune.train.setup import ModelCache


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
    for values in ({}, {"lr": 1e-2}, {"lr": 0.5}, {"lr": 0.5, "lr_source": "default"},
                  {"search": {"lr": [1e-2, 1e-3]}}, {"search": {"method": ["lora", "full"]}}):  # fmt: skip
        config = RunConfig.from_flat(**least, **values)
        assert RunConfig.from_canonical(config.canonical()).name == config.name
    assert "lr" not in RunConfig.from_flat(**least, lr=1e-2).canonical(), "as names always were"
    assert RunConfig.from_canonical(least).optim.lr == 1e-2


FOUND: dict[str, Any] = {"model": "m", "data": "d", "method": "lora", "lr": 0.0042, "lr_source": "default"}


@pytest.mark.parametrize(
    "search", [{"method": ["lora", "full"]}, {"method.expression": ["lora", "full"]}, {"optim.steps": [10, 1000]}]
)
def test_a_rate_does_not_outlive_a_search_over_what_it_depends_on(
    search: dict[str, list[Any]],
) -> None:
    """Neither in the runs of a series with a rate that a run found, nor where the search comes later."""
    for series in (
        RunConfig.from_flat(**FOUND, search=search),
        RunConfig.from_flat(**FOUND).replace(search=search),
        RunConfig.from_flat(**merge_values(FOUND, {"search": search})),
    ):
        tries = series.search_configs()
        assert [(one.optim.lr, one.optim.lr_source) for one in tries] == [(None, None)] * 2
        assert tries[0].name != tries[1].name


def test_a_rate_that_was_given_is_that_of_every_method_of_a_search() -> None:
    series = RunConfig.from_flat(model="m", data="d", method="layernorm", lr=1e-2, search={"method": ["lora", "full"]})
    assert [one.optim.lr for one in series.search_configs()] == [1e-2, 1e-2], "although it is the default of layernorm"


def test_rates_to_try_take_the_place_of_a_default() -> None:
    for series in (
        RunConfig.from_flat(**FOUND, search={"lr": [1e-3, 1e-2]}),
        RunConfig.from_flat(**FOUND).replace(search={"optim.lr": [1e-3, 1e-2]}),
    ):
        tries = series.search_configs()
        assert [(one.optim.lr, one.optim.lr_source) for one in tries] == [(1e-3, None), (1e-2, None)]
        assert tries[0].name != tries[1].name
    assert RunConfig.from_flat(**FOUND).replace(search={"lr": [1e-3]}).optim.lr is None


def test_a_try_replaces_what_excludes_it() -> None:
    series = RunConfig.from_flat(model="m", data="d", method="lora", steps=100, search={"epochs": [2, 5]})
    assert [(one.optim.epochs, one.optim.steps) for one in series.search_configs()] == [(2, None), (5, None)]


# -- what is wrong


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"lr": "fast"}, "optim.lr: .*number"),
        ({"lr": -1}, r"optim\.lr: .*greater than 0"),
        ({"lr_source": "default"}, "lr_source: a run writes it"),
        ({"lr": 1.0, "lr_source": "me"}, "lr_source"),
    ],
)
def test_wrong_rates(values: dict[str, Any], match: str) -> None:
    with pytest.raises(DeltuneError, match=match):
        RunConfig.from_flat(model="m", data="d", method="lora", **values)


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
    """The packaged model and tickets; docs/studies/choosing.md has the scores on further tasks."""
    more = {"quantize": "int8"} if method == "loftq" else {}
    config = RunConfig.from_flat(model="minilm", data=str(TICKETS), method=repr(REGISTRY[method].plain), **more)
    train(config, tmp_path / "run", cache=cache, progress=False, report=False)
    assert learned_or_told(tmp_path / "run")
