"""The quickstart: a linear probe, a tuned model, a prediction."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

import tiny
from deltune.cli import use
from deltune.errors import DeltuneError
from deltune.train.run_folder import RunFolder


def test_its_story_on_a_tiny_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(use, "MODEL", str(tiny.model(tmp_path / "model")))
    monkeypatch.setattr(use, "TICKETS", tiny.data(tmp_path / "data"))
    run = tmp_path / "run"
    use.quickstart("Where is it?", 0, run)
    before = (run / "metrics.json").stat().st_mtime_ns
    use.quickstart("Please cancel my plan.", 0, run)
    assert (run / "metrics.json").stat().st_mtime_ns == before, "what is trained is used again"
    use.quickstart("Please cancel my plan.", 1, run)
    assert (run / "metrics.json").stat().st_mtime_ns > before, "another seed begins afresh"
    with pytest.raises(DeltuneError, match="there,"):
        monkeypatch.setattr(use, "METHOD", "bitfit")
        use.quickstart("Please cancel my plan.", 1, run)  # the run in this folder is another one
    monkeypatch.setattr(use, "METHOD", "lora")
    output = capsys.readouterr().out
    probe = RunFolder(run).metrics.probe
    assert probe is not None
    for part in (
        "a logistic regression on the mean of the model's last hidden states",
        "lora trains 2,048 parameters inside the model",
        f"test accuracy: probe {probe.test['accuracy']:.3f}, tuned {RunFolder(run).metrics.test['accuracy']:.3f}",
        "Please cancel my plan.",
        "deltune predict",
    ):
        assert part in output, part


def test_the_packaged_tickets_are_whole() -> None:
    meta = json.loads((use.TICKETS / "meta.json").read_text())
    rows = tiny.objects(use.TICKETS / "train.jsonl")
    assert len(rows) == meta["rows"]["train"] and len({row["label"] for row in rows}) == 8


@pytest.mark.slow
def test_on_minilm_tuning_wins(tmp_path: Path) -> None:
    """Over five seeds the mean is at least .76, and above the probe by a paired interval."""
    right = []
    for seed in range(5):
        use.quickstart(seed=seed, output=tmp_path / str(seed))
        metrics = RunFolder(tmp_path / str(seed)).metrics
        assert metrics.probe is not None
        right.append((metrics.test["accuracy"], metrics.probe.test["accuracy"]))
    assert sum(tuned for tuned, _ in right) / 5 >= 0.76
    assert all(tuned > probe for tuned, probe in right)
    differences = [tuned - probe for tuned, probe in right]
    assert statistics.fmean(differences) > 2.776 * statistics.stdev(differences) / 5**0.5  # t of 4 degrees of freedom
