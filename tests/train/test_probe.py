"""The linear probe: scikit-learn's own answers, one beside each run, and a head that begins from it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from typer.testing import CliRunner

import tiny
from deltune import DeltuneError
from deltune.cli.app import app
from deltune.train import probe
from deltune.train.probe import INVERSE_STRENGTHS, fit_probe
from deltune.train.records import RunMetrics
from deltune.train.report.advice import advice, read_finished
from deltune.train.report.page import render_report
from deltune.train.run import train
from deltune.train.run_folder import RunFolder


@pytest.mark.parametrize("labels", [2, 4, None])
def test_as_scikit_learn_has_it(labels: int | None) -> None:
    """Its weights are for features as they are, its penalty the best on validation, the greatest of equal ones."""
    draw = np.random.default_rng(0)
    features = {
        split: draw.normal(3, 2, (size, 6)) for split, size in {"train": 60, "validation": 30, "test": 9}.items()
    }
    features = {split: np.concatenate([x, np.ones((len(x), 1))], axis=1) for split, x in features.items()}
    target = draw.normal(size=(7, labels or 1))
    answers: dict[str, Any] = {
        s: (x - 3) @ target + draw.normal(size=(len(x), labels or 1)) for s, x in features.items()
    }
    answers = {s: y.argmax(1) if labels else y[:, 0] for s, y in answers.items()}
    probe = fit_probe(features, answers, labels)
    expected = {}
    for strength in INVERSE_STRENGTHS:
        estimator = LogisticRegression(C=strength, max_iter=1000) if labels else Ridge(alpha=1 / strength)
        expected[strength] = make_pipeline(StandardScaler(), estimator).fit(features["train"], answers["train"])
    quality = {
        strength: model.score(features["validation"], answers["validation"]) for strength, model in expected.items()
    }
    assert probe.strength == min(strength for strength, score in quality.items() if score == max(quality.values()))
    theirs = expected[probe.strength]
    assert np.allclose(probe.predictions["test"], theirs.predict(features["test"]), atol=1e-8)
    outputs = features["test"] @ probe.weight.T + probe.bias
    if labels:
        decision = theirs.decision_function(features["test"])
        assert np.allclose(outputs[:, 1] - outputs[:, 0], decision if labels == 2 else decision[:, 1] - decision[:, 0])
    else:
        assert np.allclose(outputs[:, 0], theirs.predict(features["test"]))


def test_labels_that_train_lacks_and_no_validation() -> None:
    features = {"train": np.eye(4), "test": np.eye(4)}
    probe = fit_probe(features, {"train": np.array([0, 2, 2, 0])}, 3)
    assert probe.strength == 1.0 and list(probe.predictions["test"]) == [0, 2, 2, 0] and probe.weight.shape == (3, 4)
    assert set(fit_probe(features, {"train": np.ones(4, int)}, 3).predictions["test"]) == {1}


def pairs(folder: Path) -> Path:
    for seed, split in enumerate(("train", "validation", "test")):
        texts = [row["text"] for row in tiny.sentences(24, seed)]
        rows = [{"a": text, "b": texts[i - 1], "label": str(i % 2)} for i, text in enumerate(texts)]
        tiny.lines(folder / f"{split}.jsonl", rows)
    return folder


def tags(folder: Path) -> Path:
    for seed, split in enumerate(("train", "validation", "test")):
        rows = [
            {"tokens": (words := row["text"].split()), "tags": ["O" if w in tiny.FILLERS else "B-THING" for w in words]}
            for row in tiny.sentences(24, seed)
        ]
        tiny.lines(folder / f"{split}.jsonl", rows)
    return folder


@pytest.mark.parametrize(
    ("make", "options", "metric", "features"),
    [
        (None, {"pooling": "first"}, "accuracy", "first"),
        (pairs, {"columns": "text=a,pair=b,label=label"}, "accuracy", "mean"),
        (tags, {"task": "tagging"}, "entity_f1", "words"),
        (None, {"trunk_dropout": "off", "method": "head"}, "accuracy", "mean"),
    ],
)
def test_it_stands_beside_a_run(make: Any, options: dict[str, Any], metric: str, features: str, tmp_path: Path) -> None:
    """In the metrics, in the page and on the command line, which gives the same scores alone."""
    if make is not None:
        options |= {"data": str(make(tmp_path / "own"))}
    spec = tiny.spec(tmp_path, probe="on", steps=1, **{"method": "lora(rank=2)", **options})
    train(spec, tmp_path / "run", progress=False)
    finished = read_finished(RunFolder(tmp_path / "run"))
    record = finished.metrics.probe
    assert record is not None and record.features == features and record.C in INVERSE_STRENGTHS
    assert set(record.scores) == {"validation", "test"} and 0 <= record.test[metric] <= 1
    page = render_report([finished])
    assert "linear probe" in page
    alone = [a for name in ("pooling", "columns", "task") if name in options for a in (f"--{name}", options[name])]
    arguments = ["probe", str(spec.model.name), str(spec.data.source), "--max-length", "16", "--json", *alone]
    answer = CliRunner().invoke(app, arguments)
    assert answer.exit_code == 0, answer.output
    assert RunMetrics.model_fields["probe"] and f'"{metric}": {record.test[metric]}' in answer.stdout
    loses = record.scores[finished.split][metric] > finished.metrics.scores[finished.split][metric]
    assert any("no better than a linear probe" in note for note in advice(finished)) == loses


@pytest.mark.parametrize(("make", "options"), [(pairs, {"columns": "text=a,pair=b,label=label"}), (tags, {})])
def test_a_sample_of_train_runs(
    make: Any, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 24 rows so many that they hold 8 rows, or 8 words, and of the other splits all; of pairs each text once."""
    monkeypatch.setattr(probe, "MOST_ROWS", 8)
    spec = tiny.spec(tmp_path, method="head", data=str(make(tmp_path / "own")), **options)
    ran: list[int] = []
    last_states = probe._last_states
    monkeypatch.setattr(
        probe, "_last_states", lambda model, batch: ran.append(len(batch["input_ids"])) or last_states(model, batch)
    )
    probe.probe_model(spec)
    held_out = [tiny.objects(tmp_path / "own" / f"{split}.jsonl") for split in ("validation", "test")]
    if make is pairs:
        texts = sum(len({row[name] for row in rows for name in "ab"}) for rows in held_out)
        assert texts < 2 * (24 + 24) and texts < sum(ran) <= texts + 2 * 8
    else:
        assert 24 + 24 < sum(ran) <= 24 + 24 + 8


def test_a_head_begins_from_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """At a rate of almost 0 the run scores what its probe does."""
    caplog.set_level(logging.INFO)
    options: dict[str, Any] = {"head_init": "probe", "steps": 1, "lr": 1e-12}
    for name, more in (
        ("mean", {"pooling": "mean"}),
        ("tags", {"data": str(tags(tmp_path / "tagged")), "task": "tagging"}),
    ):
        metrics = train(tiny.spec(tmp_path, method="lora(rank=2)", **options, **more), tmp_path / name, progress=False)
        assert metrics.probe is not None
        scores = {metric: value for metric, value in metrics.test.items() if metric != "loss"}
        assert metrics.probe.test == pytest.approx(scores)
    of_pairs = {"data": str(pairs(tmp_path / "pairs")), "columns": "text=a,pair=b,label=label"}
    for more, why in (({}, "pooling mean"), (of_pairs, "single texts")):
        with pytest.raises(DeltuneError, match=f"head_init=probe cannot be used.*{why}"):
            train(tiny.spec(tmp_path, **options, **more), tmp_path / "refused", progress=False)
