"""The kinds of jobs of a study: what each returns, on tiny models."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from deltune.errors import DeltuneError
from deltune.models import load_model
from deltune.studies.jobs.job import Job, Roots, execute, run_job, term_change_job, timing_job, transfer_job
from deltune.studies.jobs.pool import job_progress
from deltune.studies.jobs.timing import time_methods
from deltune.train.data import loading as reading
from deltune.train.inference import evaluate
from deltune.train.probe import probe_model
from deltune.train.run_folder import RunFolder
from deltune.train.setup import ModelCache


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("jobs")
    tiny.model(root / "model")
    tiny.data(root / "data")
    for name, change in (("sst2", 1), ("rotten_tomatoes", 2)):  # two known tasks: fruit is positive, the rest is not
        for seed, split in enumerate(("train", "validation", "test"), change):
            rows = [
                {("sentence" if name == "sst2" else "text"): row["text"], "label": int(row["label"] == "fruit")}
                for row in tiny.sentences(48 if split == "train" else 24, seed)
            ]
            tiny.lines(root / name / f"{split}.jsonl", rows)
        (root / name / "meta.json").write_text('{"label_names": ["negative", "positive"]}')
    return root


def test_labels_get_one_set_of_names(root: Path) -> None:
    data = reading.load_data(str(root / "data"))
    one = reading.rename_labels(data, {"fruit": "1", "beast": "0", "tool": "0"})
    assert one.labels == ("0", "1") and one.fingerprint != data.fingerprint
    for split, rows in data.splits.items():
        assert [data.labels[i] == "fruit" for i in rows["label"]] == [i == 1 for i in one.splits[split]["label"]]
    with pytest.raises(DeltuneError, match=r"(?s)unknown label 'fruits'.*'fruit' has no new name"):
        reading.rename_labels(data, {"fruits": "1", "beast": "0", "tool": "0"})
    with pytest.raises(DeltuneError, match="two are needed"):
        reading.rename_labels(data, dict.fromkeys(data.labels, "1"))


def test_progress_is_read_where_a_job_with_roots_trains(root: Path, tmp_path: Path) -> None:
    """The spec names the model without its folder, and the run has another name than its located configuration."""
    job = run_job(tiny.spec(root, method="layernorm", epochs=1), Roots(models=str(root)))
    assert job.spec["model"] == "model" and job_progress(job, tmp_path) is None
    execute(job, tmp_path, ModelCache())
    assert job_progress(job, tmp_path) == 1.0


def test_transfer(root: Path, tmp_path: Path) -> None:
    """Zero-shot on a task with other names for its columns, under one set of labels."""
    unify = {"negative": "0", "positive": "1"}
    spec = tiny.spec(
        root, data=None, task="sst2", data_root=str(root), relabel=unify, method="full", lr=5e-3, epochs=6,
    )  # fmt: skip
    parts = ModelCache()
    execute(run_job(spec), tmp_path, parts)
    target = {"task": "rotten_tomatoes", "data_root": str(root), "relabel": unify}
    result = execute(transfer_job(run_job(spec), target), tmp_path, parts)
    expected = evaluate(tmp_path / spec.name)["test"]
    assert result["scores"].keys() == expected.keys() and 0 <= result["scores"]["accuracy"] <= 1
    assert transfer_job(run_job(spec), target).requires == (run_job(spec),)
    same = execute(transfer_job(run_job(spec), {**target, "task": "sst2"}), tmp_path, parts)
    assert same["scores"] == pytest.approx(expected)
    with pytest.raises(DeltuneError, match="the run's labels are 0, 1"):
        evaluate(tmp_path / spec.name, other={**target, "relabel": {"negative": "no", "positive": "yes"}})


def test_two_jobs_that_need_a_run_without_a_folder_train_it_once(root: Path, tmp_path: Path) -> None:
    """As after `study import`, which has results and no deltas; and where the training of such a run was cut short."""
    spec = tiny.spec(root, method="layernorm", epochs=2)
    other = {"data": str(root / "data")}
    jobs = [transfer_job(run_job(spec), other), term_change_job(run_job(spec))]
    with ThreadPoolExecutor(2) as pool:
        first = list(pool.map(lambda job: execute(job, tmp_path, ModelCache()), jobs))
    folder = RunFolder(tmp_path / spec.name)
    assert [line["step"] for line in folder.read_log() if "eval_loss" in line] == [6, 12]
    folder.metrics_file.unlink()
    (folder.delta / "delta.json").unlink()
    again = [execute(job, tmp_path, ModelCache()) for job in jobs]
    assert first[0]["scores"] == again[0]["scores"] and first[1]["changes"] == again[1]["changes"]


def test_probe(root: Path, tmp_path: Path) -> None:
    """The floor of a study: a linear probe on the rows of a run, as `deltune probe` scores it, with nothing trained."""
    spec = tiny.spec(root, method="head", epochs=1)
    job = Job("probe", {"run": run_job(spec).spec})
    assert execute(job, tmp_path, ModelCache())["scores"] == probe_model(spec).test
    assert not job.requires and not list(tmp_path.iterdir())


def test_untuned(root: Path, tmp_path: Path) -> None:
    """The other floor: the model as it is, which scores as a run whose delta still is at its start."""
    words: dict[str, Any] = {"answer": "words", "words": "fruit=fig,tool=saw,beast=mole", "target_length": 4}
    words["model"] = str(tiny.model(root / "gpt2", "gpt2"))
    spec = tiny.spec(root, method="lora(rank=1)", lr=1e-12, steps=1, **words)
    scores = execute(Job("untuned", {"run": run_job(spec).spec}), tmp_path, ModelCache())["scores"]
    assert not list(tmp_path.iterdir())
    assert scores == pytest.approx(execute(run_job(spec), tmp_path, ModelCache())["scores"], abs=1e-5)


def test_terms(root: Path, tmp_path: Path) -> None:
    """The mean absolute change of every gain and bias, computed straight from the tensors."""
    spec = tiny.spec(root, method="layernorm(layers='upper half')", epochs=2)
    execute(run_job(spec), tmp_path, ModelCache())
    changes = execute(term_change_job(run_job(spec)), tmp_path, ModelCache())["changes"]
    places = {(row["layer"], row["module"], row["term"]) for row in changes}
    assert places == {(1, module, term) for module in ("attention", "ffn") for term in ("gain", "bias")}
    from deltune import load

    before, after = (load_model(str(root / "model"), "classification", ("a", "b", "c")) for _ in range(2))
    load(after, tmp_path / spec.name)
    norm = "encoder.layer.1.attention.output.LayerNorm.weight"
    moved: Any = before.base_model.get_parameter(norm) - after.base_model.get_parameter(norm)
    (gain,) = [r["value"] for r in changes if (r["module"], r["term"]) == ("attention", "gain")]
    assert gain == pytest.approx(moved.abs().mean().item()) and gain > 0


def test_a_run_whose_result_was_imported_is_trained_for_its_delta(root: Path, tmp_path: Path) -> None:
    spec = tiny.spec(root, method="layernorm", epochs=1)
    execute(run_job(spec), tmp_path / "trained", ModelCache())
    trained = execute(term_change_job(run_job(spec)), tmp_path / "trained", ModelCache())
    imported = execute(term_change_job(run_job(spec)), tmp_path / "imported", ModelCache())
    assert imported["changes"] == trained["changes"]


def test_time(root: Path, tmp_path: Path) -> None:
    """Every method has its turns in every round; the bare model has no step."""
    methods = {"full": "full", "ours": "lora(rank=2)"}
    job = timing_job(str(root / "model"), methods, rows=2, tokens=8, repeats=3)
    turns = execute(job, tmp_path, ModelCache())["turns"]
    assert set(turns) == {"full", "ours", "bare"} and "step" not in turns["bare"]
    assert all(len(seconds) == 3 for one in turns.values() for seconds in one["turns"].values())
    assert turns["ours"]["kept"] < turns["full"]["kept"] and turns["ours"]["percent"] > 0
    torch.manual_seed(0)
    assert time_methods(str(root / "model"), {}, rows=2, tokens=8, repeats=1).keys() == {"bare"}
