"""The study that runs methods by deltune and by PEFT through the same Trainer, on a tiny model and tiny rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import tiny
from deltune.cli.app import app
from deltune.studies import own
from deltune.studies.jobs.job import Job, execute
from deltune.studies.own import BOTH_LIBRARIES, ENCODER, peft
from deltune.studies.scales import StudySetup
from deltune.train.setup import ModelCache

FROM_CHANCE = {"lora", "dora", "prefix"}
"""Methods that begin with random numbers, which two libraries draw in another order."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("libraries")
    tiny.model(root / "models" / ENCODER)
    for seed, split in enumerate(("train", "validation", "test")):
        rows = [{"sentence": row["text"], "label": int(row["label"] == "fruit")} for row in tiny.sentences(60, seed)]
        tiny.lines(root / "data" / "sst2" / f"{split}.jsonl", rows)
    (root / "data" / "sst2" / "meta.json").write_text('{"label_names": ["negative", "positive"]}')
    for task in ("conll04", "broad_twitter"):
        (root / "data" / task).mkdir()
    return root


@pytest.mark.parametrize("method", BOTH_LIBRARIES)
def test_both_libraries_train_the_same_numbers_from_the_same_start(method: str, root: Path) -> None:
    """And, where nothing is drawn at random, to the same end."""
    cells = peft(StudySetup("small", str(root / "data"))).plan_cells({})
    first = {
        one.cell["library"]: one.job
        for planned in reversed(cells)
        for one in reversed(planned.tries)
        if (one.cell["task"], one.cell.get("method"), one.cell.get("try")) == ("sst2", method, 1) and one.job
    }
    results = {}
    for library, job in first.items():
        short = {**job.spec, "run": {**job.spec["run"], "steps": 20}}
        results[library] = execute(Job(job.kind, short, roots=job.roots), root, ModelCache())
    ours, theirs = (json.loads(json.dumps(results[library])) for library in ("deltune", "PEFT"))
    assert ours["count"]["trained"] == theirs["count"]["trained"] > 66, "the head alone has 66"
    assert ours["scores"].keys() == theirs["scores"].keys() and ours["scores"]["peak_bytes"] > 0
    assert len(ours["examples"]["accuracy"]) == 60 and ours["best"]["step"] == 20 and ours["data"] == theirs["data"]
    losses = [[line["loss"] for line in one["curve"]] for one in (ours, theirs)]
    if method != "prefix":
        assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-5)
    if method not in FROM_CHANCE:
        assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@pytest.mark.slow
def test_the_study_is_run_and_decided(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One method on one task, with its search of rates and all seeds, from the command line to the claims."""
    monkeypatch.setattr(own, "LONG", {"steps": 10})
    cells = ["--only", "task=sst2", "--only", "method=layernorm"]
    where = ["--data-root", str(root / "data"), "--store", str(tmp_path / "r.jsonl"), *cells]
    ran = CliRunner().invoke(app, ["study", "run", "own/peft", *where, "--quiet"])
    assert ran.exit_code == 0, ran.output
    shown = CliRunner().invoke(app, ["study", "report", "own/peft", *where]).output
    rows = [line for line in shown.splitlines() if "by deltune" in line]
    assert len(rows) == 4 and all("no result yet" not in row for row in rows), shown
    assert "Seconds of training" in shown and "Bytes in use at once" in shown
