"""The quickstart: two runs, a table, a prediction."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tiny
from deltune.cli import use
from deltune.train.run_folder import RunFolder


def test_its_story_on_a_tiny_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(use, "MODEL", str(tiny.model(tmp_path / "model")))
    monkeypatch.setattr(use, "EPOCHS", 1)
    whole = tmp_path / "runs" / "prefix_layernorm" / "metrics.json"
    use.quickstart("Where is it?", tmp_path / "runs")
    before = whole.stat().st_mtime_ns
    use.quickstart("Please cancel my plan.", tmp_path / "runs")
    assert whole.stat().st_mtime_ns == before, "what is trained is used again"
    monkeypatch.setattr(use, "BATCH", 16)
    use.quickstart("Please cancel my plan.", tmp_path / "runs")
    assert whole.stat().st_mtime_ns > before, "another spec begins afresh"
    output = capsys.readouterr().out
    for part in (
        "test accuracy",
        "trained parameters",
        "Run 2 of 2 trains prefix(length=16) + layernorm",
        "Please cancel my plan.",
        "deltune predict",
    ):
        assert part in output, part
    assert all(RunFolder(tmp_path / "runs" / name).finished for name in ("head", "prefix_layernorm"))


def test_the_packaged_tickets_are_whole() -> None:
    meta = json.loads((use.TICKETS / "meta.json").read_text())
    rows = tiny.objects(use.TICKETS / "train.jsonl")
    assert len(rows) == meta["rows"]["train"] and len({row["label"] for row in rows}) == 8


@pytest.mark.slow
def test_on_minilm_tuning_wins(tmp_path: Path) -> None:
    use.quickstart(output=tmp_path)
    accuracy = [RunFolder(tmp_path / name).metrics.test["accuracy"] for name in ("head", "prefix_layernorm")]
    assert accuracy[1] > accuracy[0] + 0.1
