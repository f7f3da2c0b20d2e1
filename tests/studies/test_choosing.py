"""`deltune choose`, whole runs on the tiny model: limits, halving, going on after an interrupt, and what is written."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import tiny
from deltune.cli.app import app
from deltune.errors import DeltuneError
from deltune.studies import Choice, choose
from deltune.studies import choosing as module
from deltune.train import activation_cache
from deltune.train.run_folder import RunFolder
from processes import Started, deltune

SPACE = ("lora(rank=?)", "layernorm", "adapter(rank=?)", "layernorm()", "full")


def call(root: Path, output: Path, **changes: Any) -> Choice:
    values = {"output": output, "budget": 1200, "space": SPACE, "epochs": 2, "batch_size": 8, "max_length": 16}
    return choose(str(root / "model"), str(root / "data"), **{**values, **changes})


@pytest.fixture(scope="module")
def chosen(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Choice:
    return call(root, tmp_path_factory.mktemp("choose"))


def test_limits_cut_before_training(chosen: Choice) -> None:
    table = chosen.table.set_index("method")
    assert "scalars of 1,200" in table.loc["full", "left out"] and table.loc["full", "steps"] == 0
    assert table.loc["layernorm", "left out"].eq("").all()
    assert {"linear probe", "full tuning"} <= set(table.index)
    assert len(table.loc["layernorm"]) == 3, "two ways of writing it are one method"


def test_the_winner_is_trained_and_judged_as_it_says(chosen: Choice, root: Path) -> None:
    best = RunFolder(chosen.run / "best")
    assert best.method == chosen.method and best.config.optim.rate == chosen.learning_rate
    assert not best.metrics.test and chosen.test  # no finalist answered the test split
    assert best.metrics.count["method"] <= 1200
    finals = chosen.table[chosen.table["seeds"].fillna(0) > 0]
    assert len(finals) == 2 and set(finals["seeds"]) == {3}
    assert chosen.method in (chosen.run / "report.html").read_text()


def test_the_command_repeats_the_winner(chosen: Choice, tmp_path: Path) -> None:
    """Which validates where the finalist did, and has its seed."""
    words = [str(tmp_path / "again") if word == "RUN" else word for word in shlex.split(chosen.command)]
    assert words[0] == "deltune" and CliRunner().invoke(app, words[1:]).exit_code == 0
    again, best = RunFolder(tmp_path / "again"), RunFolder(chosen.run / "best")
    assert again.metrics.best == best.metrics.best and again.metrics.test == chosen.test
    assert len({(run.delta / "delta.safetensors").read_bytes() for run in (again, best)}) == 1


def test_one_split_of_a_file_and_one_cache_serve_all_runs(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No seed validates on rows of the test split; frozen layers run once for candidates that leave the same alone."""
    written: list[str] = []
    write = activation_cache._CacheFile.write

    def counting(file: Any, *rest: Any) -> None:
        written.append(f"{file.path.name}{' of finals' if (tmp_path / 'out' / 'finals').exists() else ''}")
        write(file, *rest)

    monkeypatch.setattr(activation_cache._CacheFile, "write", counting)
    space = ("lora(rank=?, layers='upper half')", "layernorm(layers='upper half')")
    file = str(root / "data" / "train.jsonl")
    choice = choose(
        str(root / "model"), file, output=tmp_path / "out", budget=1200, space=space, epochs=1, batch_size=4,
        max_length=16, trunk_dropout="off",
    )  # fmt: skip
    finals = [RunFolder(path) for path in (choice.run / "finals").glob("*-seed*")]
    assert len(finals) == 6 and len({str(run.environment["data"]["digests"]) for run in finals}) == 1
    assert sum("finals" not in name for name in written) == 2, (
        "training and held-out rows, for candidates of two methods"
    )
    assert len(written) == len(set(written)) < 2 * len(finals)


def test_halving_stops_those_that_fall_behind(chosen: Choice) -> None:
    trained = chosen.table[chosen.table["steps"].fillna(0) > 0]
    steps = sorted(trained["steps"])
    assert len(steps) >= 6 and steps[0] < steps[-1]


def test_again_reads_what_was_chosen_and_another_search_is_refused(chosen: Choice, root: Path) -> None:
    again = call(root, chosen.run)
    assert again.as_json() == chosen.as_json()
    with pytest.raises(DeltuneError, match="other values of budget, space"):
        call(root, chosen.run, budget=900, space="lora")


def test_a_refused_search_leaves_no_folder(root: Path, tmp_path: Path) -> None:
    for wrong in ({"batch_size": 10_000}, {"budget": 1, "space": ("lora(rank=8)",)}):
        with pytest.raises(DeltuneError, match=r"choosing needs|no candidate keeps"):
            call(root, tmp_path / "refused", **wrong)
        assert not (tmp_path / "refused").exists()


def test_an_interrupted_search_goes_on(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It trains nothing twice, and chooses as one that was not interrupted."""
    runs: list[str] = []
    train = module.train

    def counting(config: Any, folder: Any, **more: Any) -> Any:
        runs.append(Path(folder).name)
        if len(runs) == 3:
            stop_if = more["stop_if"]

            def interrupt(step: int, quality: float) -> bool:
                stop_if(step, quality)
                raise KeyboardInterrupt

            more = {**more, "stop_if": interrupt}
        return train(config, folder, **more)

    monkeypatch.setattr(module, "train", counting)
    small = {"space": ("lora(rank=?)",)}
    with pytest.raises(KeyboardInterrupt):
        call(root, tmp_path / "a", **small)
    choice = call(root, tmp_path / "a", **small)
    assert [runs.count(name) for name in dict.fromkeys(runs)] == [1, 1, 2, *[1] * (len(set(runs)) - 3)]
    whole = call(root, tmp_path / "b", **small)
    assert (choice.method, choice.learning_rate, choice.test) == (whole.method, whole.learning_rate, whole.test)


def words(root: Path, output: Path) -> list[str]:
    """The command of a search in the default space."""
    settings = [word for pair in ("epochs=2", "batch_size=8", "max_length=16") for word in ("--set", pair)]
    return ["choose", "--model", str(root / "model"), "--data", str(root / "data"), "--output", str(output),
            "--budget", "1200", *settings]  # fmt: skip


@pytest.mark.slow
def test_a_killed_search_goes_on(root: Path, tmp_path: Path) -> None:
    """By SIGKILL while its third candidate trains: the same command then chooses as one that was not killed."""
    killed = tmp_path / "killed"
    started = Started(deltune, killed, *words(root, killed))
    while len(list(killed.glob("runs/*"))) < 3:
        assert started.running, started.printed
        time.sleep(0.01)
    assert started.kill() and not (killed / "choice.json").exists()
    whole = tmp_path / "whole"
    for output in (killed, whole):
        assert CliRunner().invoke(app, words(root, output)).exit_code == 0
    one, other = (json.loads((output / "choice.json").read_text()) for output in (killed, whole))
    assert all(one[name] == other[name] for name in ("method", "learning_rate", "test", "decided"))


@pytest.mark.slow
def test_processes_share_a_search(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one process trains a candidate, the same command in another tries all others; both choose the same."""
    output, folders, others = tmp_path / "shared", list[Path](), list[Started]()
    train = module.train

    def train_beside(config: Any, folder: Any, **more: Any) -> Any:
        folders.append(Path(folder))
        if not others:
            others.append(Started(deltune, tmp_path / "other", *words(root, output)))
            left = len(json.loads((output / "candidates.json").read_text())["candidates"]) - 1
            while others[0].printed.count("on the rows held out") < left:
                assert others[0].running, others[0].printed
                time.sleep(0.01)
        return train(config, folder, **more)

    monkeypatch.setattr(module, "train", train_beside)
    assert CliRunner().invoke(app, words(root, output)).exit_code == 0
    assert [folder.parent.name for folder in folders].count("runs") == 1
    assert others[0].wait() == 0
    choice = json.loads((output / "choice.json").read_text())
    assert f"{choice['method']} at {choice['learning_rate']:g}: test" in others[0].printed


def refusals(root: Path) -> Iterator[tuple[dict[str, Any], str]]:
    yield {"budget": 3}, "a budget of 3 is too small"
    yield {"memory": "1KiB"}, r"no candidate keeps the limits.*KiB of memory"
    yield {"minutes": 1e-4}, "a run takes"
    yield {"mergeable": True, "space": ("adapter(rank=?)",)}, "it cannot be merged"
    yield {"space": "loras"}, "give lora or all"
    yield {"space": []}, "a list of expressions"
    yield {"lr": 1e-3}, "choose sets them itself"
    yield {"batch_size": 40}, "training rows or more"


@pytest.mark.parametrize("number", range(8))
def test_refused_before_training(root: Path, tmp_path: Path, number: int) -> None:
    changes, message = list(refusals(root))[number]
    with pytest.raises(DeltuneError, match=message):
        call(root, tmp_path, **changes)
    assert not (tmp_path / "runs").exists()


def test_one_label_decides_nothing(root: Path, tmp_path: Path) -> None:
    rows = [{"text": f"a plum {i}", "label": "fruit"} for i in range(60)]
    tiny.lines(tmp_path / "data.jsonl", rows)
    with pytest.raises(DeltuneError, match="one label"):
        choose(str(root / "model"), str(tmp_path / "data.jsonl"), output=tmp_path / "out", batch_size=4)
