"""`deltune choose`, whole runs on the tiny model: limits, halving, going on after an interrupt, and what is written."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.optimizer import register_optimizer_step_post_hook
from typer.testing import CliRunner

import tiny
from deltune.cli.app import app
from deltune.cli.formatting import choice_table
from deltune.errors import DeltuneError
from deltune.methods.counting import format_bytes
from deltune.models import load_config
from deltune.runtime.step_memory import step_memory
from deltune.studies import Choice, choose
from deltune.studies import choosing as module
from deltune.studies.choosing import Candidate, interval
from deltune.train import StepCost, activation_cache
from deltune.train import run as run_module
from deltune.train.run_folder import RunFolder
from processes import Started, deltune

SPACE = ("lora(rank=?)", "layernorm", "adapter(rank=?)", "layernorm()", "full")


def call(root: Path, output: Path, **changes: Any) -> Choice:
    values = {"output": output, "budget": 1200, "space": SPACE, "epochs": 2, "batch_size": 8, "max_length": 16}
    return choose(str(root / "model"), str(root / "data"), **{**values, **changes})


@pytest.fixture(scope="module")
def chosen(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Choice:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "FIRST_RUNG", 2)  # of the ten steps that a run has here
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
    candidates = chosen.table[chosen.table["method"] != "full tuning"]
    finals = candidates[candidates["seeds"].fillna(0) > 0]
    assert len(finals) == 2 and set(finals["seeds"]) == {3}
    assert chosen.method in (chosen.run / "report.html").read_text()
    with pytest.raises(DeltuneError, match=f"The run that was chosen is {chosen.run / 'best'}$"):
        _ = RunFolder(chosen.run).config
    printed = choice_table(chosen.table.to_dict("records")).columns
    assert sum(" ± " in str(cell) for column in printed for cell in column.cells) == 2


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


def test_a_refused_method_leaves_the_model_to_the_others(root: Path, tmp_path: Path) -> None:
    """What is refused once it is attached is detached again: `trunk_dropout=off` wants frozen layers below."""
    space = ("lora(rank=?)", "bitfit", "lora(rank=?, layers='upper half')")
    choice = call(root, tmp_path / "out", space=space, budget=1200, trunk_dropout="off", epochs=1)
    left_out = choice.table.drop_duplicates("method").set_index("method")["left out"].fillna("")
    assert all("needs frozen layers" in left_out[name] for name in ("lora(rank=4)", "bitfit", "full tuning"))
    assert "upper half" in choice.method and not left_out[choice.method]


def test_a_few_steps_stop_nobody() -> None:
    assert [module._first_rung(steps) for steps in (10, 40, 75, 160, 320)] == [10, 20, 20, 20, 40]


def test_what_is_missing_is_enqueued(tmp_path: Path) -> None:
    """A process may be killed between two of them."""
    study = module.optuna.create_study()
    for number in (1, 3, 3):
        module._enqueue(study, [{"candidate": name} for name in "abc"[:number]])
    assert [trial.user_attrs["candidate"] for trial in study.trials] == ["a", "b", "c"]


@pytest.mark.parametrize(("metric", "shown"), [("pearson", -0.15), ("perplexity", 0.15)])
def test_a_score_has_its_sign(metric: str, shown: float) -> None:
    (row, _) = module._table(
        [replace(finalist([], "", 9), rungs={1: -0.15})], metric, None, Candidate("full tuning", 0.1, 9)
    ).to_dict("records")
    assert row["held out"] == shown


class Steps:
    """A clock by which each step of an optimizer takes a minute, and steps of runs `pace` minutes."""

    def __init__(self, pace: float = 1.0) -> None:
        self.minutes, self.pace, self.runs = 0.0, 1.0, pace

    def __call__(self, *_: Any) -> None:
        self.minutes += self.pace

    def monotonic(self) -> float:
        return 60 * self.minutes

    sleep = staticmethod(time.sleep)


@pytest.fixture
def steps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Steps]:
    """Time as it passes for `choose`: no machine is so slow that it changes what is decided."""
    clock, train = Steps(request.param), module.train

    def at_pace(*arguments: Any, **more: Any) -> Any:
        clock.pace = clock.runs
        return train(*arguments, **more)

    for place in (module, run_module):
        monkeypatch.setattr(place, "time", clock)
    monkeypatch.setattr(module, "train", at_pace)
    hook = register_optimizer_step_post_hook(clock)
    yield clock
    hook.remove()


@pytest.mark.parametrize("minutes", [58, *(pytest.param(number, marks=pytest.mark.slow) for number in (75, 110))])
@pytest.mark.parametrize("steps", [1.0, 1.3], indirect=True)
def test_the_minutes_are_kept(root: Path, tmp_path: Path, steps: Steps, minutes: int) -> None:
    """By what is not tried, is stopped at a validation, or trained under fewer seeds; finalists have the same seeds."""
    choice = call(root, tmp_path / "out", minutes=minutes, space=("lora(rank=?)", "layernorm"))
    assert choice.seconds == pytest.approx(60 * steps.minutes) and 0.5 * minutes < steps.minutes <= 1.1 * minutes
    finals = choice.table[choice.table["seeds"].fillna(0) > 0]
    assert finals["seeds"].nunique() == 1 and (len(finals) == 2 or steps.runs > 1)
    names = [path.name.rpartition("-seed") for path in (choice.run / "finals").glob("*-seed*")]
    assert len({tuple(sorted(seed for one, _, seed in names if one == name)) for name, _, _ in names}) == 1
    for path in (choice.run / "finals").glob("*-seed*"):
        assert max(row["step"] for row in tiny.objects(path / "log.jsonl")) == 12, "a run was cut short"
    untried = choice.table[choice.table["left out"] == "the time of the search was up"]
    assert untried["steps"].eq(0).all() and len(untried) + (choice.table["steps"].fillna(0) > 0).sum() == 6


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


@pytest.mark.parametrize("interrupted", ["third of runs", "first of finals"])
def test_an_interrupted_search_goes_on(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupted: str
) -> None:
    """It goes on with what it was at, trains nothing twice, and chooses as one that was not interrupted."""
    runs, stopped = list[str](), list[str]()
    train, number, place = module.train, *interrupted.split(" of ")

    def counting(config: Any, folder: Any, **more: Any) -> Any:
        runs.append("/".join(Path(folder).parts[-2:]))
        begun = [run for run in runs if run.startswith(place)]
        if runs[-1].startswith(place) and len(begun) == {"first": 1, "third": 3}[number] and not stopped:
            stopped.append(runs[-1])
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
    place_of = runs.index(stopped[0])
    assert runs[place_of + 1] == stopped[0] and len(runs) == len(set(runs)) + 1
    before = len(runs)
    whole = call(root, tmp_path / "b", **small)
    assert runs[before:] == list(dict.fromkeys(runs[:before]))
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
    yield {"space": ("lora(rank=?)", "lorra(rank=?)", "lora(ranks=?)", "lora(rank=?")}, r"(?s)space: 3.*lorra.*ranks"
    yield {"space": []}, "a list of expressions"
    yield {"lr": 1e-3}, "choose sets them itself"
    yield {"batch_size": 40}, "training rows or more"


@pytest.mark.parametrize("number", range(9))
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


def search_of(root: Path, data: Path, folder: Path, method: str, **options: Any) -> module._Search:
    return module._Search(str(root / "model"), str(data), folder, 10**6, None, None, False, [method], options)


@pytest.mark.parametrize("method", ["lora(rank=4)", "adapter(rank=4)", "full"])
def test_memory_is_what_a_step_of_the_longest_rows_takes(root: Path, tmp_path: Path, method: str) -> None:
    """The same however often it is measured, as `deltune count --step-memory` predicts it without the weights, and a
    limit to the byte."""
    options = {"batch_size": 8, "max_length": 8}  # a batch of rows with as many tokens or more
    search = search_of(root, root / "data", tmp_path, method, **options)
    search.rows = search._split()
    peak, again = (search._cost(search.base.replace(method=method)).peak_bytes for _ in range(2))
    predicted = step_memory(load_config(search.base.model.name), method, batch_size=8, max_length=8)
    assert peak == again == pytest.approx(predicted.total - predicted.weights, rel=0.1)
    search.start, search.before = time.monotonic(), 0.0
    for memory, reason in ((peak, ""), (peak - 1, f"{format_bytes(peak)} of memory")):
        search.memory = memory
        assert all(one.dropped.startswith(reason) for one in search._measured(method, 1, 1))


def test_the_longest_row_may_judge(root: Path, tmp_path: Path) -> None:
    """The finals train on it too, so the peak is the same whichever rows the seed holds out."""
    rows = tiny.sentences(60, 0)
    rows[0]["text"] = " ".join(["apple"] * 40)
    for split in ("train", "validation"):
        tiny.lines(tmp_path / "data" / f"{split}.jsonl", rows)
    peaks = set()
    for seed in range(6):
        search = search_of(root, tmp_path / "data", tmp_path, "layernorm", batch_size=8, seed=seed)
        search.rows = search._split()
        peaks.add(search._cost(search.base.replace(method="layernorm")).peak_bytes)
    assert len(peaks) == 1


SCORES = st.lists(st.integers(0, 100).map(lambda points: points / 100), min_size=3, max_size=3)
FINALISTS = st.tuples(SCORES, st.sampled_from(["", "a gate depends on the input"]), st.integers(1, 4))


def finalist(scores: list[float], why_unmerged: str, scalars: int) -> Candidate:
    cost = StepCost(10, 0.0, 1.0, 1.0, 1, 0.01, why_unmerged)
    return Candidate("lora", 0.01, scalars, cost, finals=scores)


@given(st.lists(FINALISTS, min_size=2, max_size=2), st.booleans())
def test_the_winner_is_decided_or_merges_or_is_smaller(values: list[Any], higher_is_better: bool) -> None:
    """Whatever the order of the finalists, and whichever way the metric goes."""
    both = [finalist(*one) for one in values]
    winner, decided = module._winner(both, higher_is_better)
    other = both[1] if winner is both[0] else both[0]
    (low, high), (other_low, other_high) = interval(winner.finals), interval(other.finals)
    if decided:
        assert low > other_high if higher_is_better else high < other_low
    else:
        assert low <= other_high and other_low <= high
        facts = [(bool(one.cost and one.cost.why_unmerged), one.scalars) for one in (winner, other)]
        assert facts[0] <= facts[1]
    mirrored = [replace(one, finals=[1 - score for score in one.finals]) for one in both[::-1]]
    again, decided_again = module._winner(mirrored, not higher_is_better)
    assert decided_again == decided
    if decided or facts[0] < facts[1]:
        assert again is mirrored[1 - both.index(winner)]


@pytest.mark.parametrize(
    ("finals", "winner", "decided"),
    [
        ([[0.90, 0.91, 0.92], [0.80, 0.81, 0.82]], 0, True),
        ([[0.90, 0.91, 0.92], [0.89, 0.90, 0.91]], 1, False),  # the smaller
        ([[0.90], [0.89]], 0, False),  # one seed: what validated better
        ([[0.90, 0.91, 0.92]], 0, False),  # nothing to compare with
    ],
)
def test_the_winner_of(finals: list[list[float]], winner: int, decided: bool) -> None:
    finalists = [finalist(scores, "", 9 - i) for i, scores in enumerate(finals)]
    assert module._winner(finalists, True) == (finalists[winner], decided)
    says = "decided: the winner's" if decided else "undecided"
    assert says in module._advice(finalists, finalists, "accuracy", decided).lower()


def test_the_interval_is_of_students_t() -> None:
    low, high = interval([0.7, 0.8, 0.9])
    assert (low, high) == pytest.approx((0.8 - 4.302653 * 0.1 / 3**0.5, 0.8 + 4.302653 * 0.1 / 3**0.5))


def test_what_diverges_is_out(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the candidates, and of the finalists too: what is left is chosen, and the table says why."""
    train, seen = module.train, list[str]()

    def diverging(config: Any, folder: Any, **more: Any) -> Any:
        seen.append(Path(folder).parent.name)
        if len(seen) == 2 or seen.count("finals") == 2:
            config = config.replace(lr=1e30)
        return train(config, folder, **more)

    monkeypatch.setattr(module, "train", diverging)
    choice = call(root, tmp_path / "out", space=("lora(rank=?)",))
    out = choice.table[choice.table["left out"].fillna("").str.contains("diverged")]
    assert len(out) == 2 and out["seeds"].eq(0).all() and not choice.decided
    assert choice.table.loc[0, "seeds"] == 3 and choice.table.loc[0, "learning_rate"] == choice.learning_rate
    assert "no other candidate" in choice.advice
