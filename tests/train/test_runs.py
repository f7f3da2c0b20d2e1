"""The folder of a run: writes that are whole or not there, foreign files that stay, one process at a time."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from deltune.errors import DeltuneError, StorageError
from deltune.files import explain_write_errors, write_text
from deltune.train import run_folder as runs
from deltune.train.config import RunConfig
from deltune.train.records import Best, RunMetrics, git_commit
from deltune.train.run_folder import RunFolder

SPEC = RunConfig.from_flat(model="owner/model", data="owner/data", method="layernorm")
METRICS = RunMetrics(seconds=1, best=Best(), count={}, signatures={}, omitted={}, truncated={}, truncated_targets={})
FACTS: dict[str, Any] = {"data": {"fingerprint": "abc"}}


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run_dir = RunFolder(tmp_path / "run")
    with run_dir.locked():
        run_dir.begin(SPEC, FACTS)
    return run_dir


def names(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()}


def test_a_run_exists_then_is_finished_then_is_cleared(run: RunFolder, tmp_path: Path) -> None:
    assert not RunFolder(tmp_path / "none").exists
    assert run.exists and not run.finished
    assert run.config == SPEC and SPEC.optim.lr is None
    with pytest.raises(DeltuneError, match="not finished"):
        _ = run.metrics
    run.checkpoint.mkdir()
    run.finish(METRICS)
    assert run.finished and run.metrics == METRICS and not run.checkpoint.exists()
    run.clear()
    assert names(run.folder) == set()


def test_a_folder_of_other_files_is_refused_and_stays(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(DeltuneError, match=r"thesis\.tex"):
        RunFolder(tmp_path).check_config(SPEC)
    with pytest.raises(DeltuneError, match="is a file"):
        RunFolder(tmp_path / "thesis.tex").check_config(SPEC)
    with pytest.raises(DeltuneError, match=r"spec\.yaml is missing.*thesis\.tex"):
        _ = RunFolder(tmp_path).config
    RunFolder(tmp_path).clear()
    assert names(tmp_path) == {"thesis.tex"}


def test_a_run_of_another_config_is_refused_with_the_differences(run: RunFolder) -> None:
    run.check_config(SPEC)
    run.check_config(SPEC.replace(report_to=("wandb",)))
    with pytest.raises(DeltuneError) as caught:
        run.check_config(RunConfig.from_flat(model="owner/model", data="owner/data", method="bitfit", seed=3))
    assert "method.expression: 'layernorm' there, 'bitfit' now" in str(caught.value)
    assert "seed: 0 there, 3 now" in str(caught.value)
    assert "optim.lr" not in str(caught.value), "it follows from the method"


def test_changed_data_is_refused(run: RunFolder) -> None:
    run.begin(SPEC, FACTS)
    with pytest.raises(DeltuneError, match="changed"):
        run.begin(SPEC, {"data": {"fingerprint": "xyz"}})


@pytest.mark.parametrize("fails", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_file(fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_text(path, "before")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, fails, fail)
    with pytest.raises(DeltuneError, match="no space left"), explain_write_errors(path):
        write_text(path, "after")
    assert path.read_text() == "before" and names(tmp_path) == {"file"}


def test_a_refused_write_gives_the_reason_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(DeltuneError, match="forbidden"), explain_write_errors(tmp_path):
        raise PermissionError(13, "forbidden")


@pytest.mark.parametrize(
    ("filename", "is_storage"),
    [
        ("run", True), ("run/delta", True), (".", True), (".run-1", True), ("java", False), ("other/delta", False),
        (None, False),
    ],
)  # fmt: skip
def test_a_missing_file_is_an_error_of_storage_only_where_the_folder_is(
    filename: str | None, is_storage: bool, tmp_path: Path
) -> None:
    error = FileNotFoundError(2, "No such file", *([] if filename is None else [str(tmp_path / filename)]))
    expected = StorageError if is_storage else FileNotFoundError
    with pytest.raises(expected), explain_write_errors(tmp_path / "run"):
        raise error


def test_leftovers_of_interrupted_writes_are_removed(run: RunFolder) -> None:
    run.predictions.mkdir()
    for leftover in (".metrics.json-abc", ".delta-xyz", "predictions/.test.jsonl-1", ".delta-old-q"):
        (run.folder / leftover).write_text("x")
    (run.folder / ".gitignore").write_text("*")
    run.remove_leftovers()
    assert names(run.folder) == {"spec.yaml", "environment.json", "predictions", ".gitignore"}
    assert names(run.predictions) == set()


def test_the_log_is_truncated_to_a_step(run: RunFolder) -> None:
    for step in (0, 1, 2, 3):
        run.log({"step": step})
    with open(run.log_file, "a") as file:
        file.write('{"step": 2, "lo')  # a process was killed here
    run.truncate_log(2)
    assert [line["step"] for line in run.read_log()] == [0, 1, 2]


def test_a_locked_run_refuses_a_second_process(run: RunFolder) -> None:
    with run.locked(), pytest.raises(DeltuneError, match="another process"), RunFolder(run.folder).locked():
        pass
    with run.locked():
        pass


def test_a_created_folder_without_a_run_is_removed(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "a" / "b")
    with pytest.raises(ValueError), run.locked():
        raise ValueError
    assert names(tmp_path) == set()
    (tmp_path / "file").write_text("")
    with pytest.raises(DeltuneError, match="cannot be written"), RunFolder(tmp_path / "file" / "x").locked():
        pass


def test_a_full_disk_at_the_first_file_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    run = RunFolder(tmp_path / "run")
    monkeypatch.setattr(runs, "write_text", fail)
    with pytest.raises(DeltuneError, match="no space left"), explain_write_errors(run.folder), run.locked():
        run.begin(SPEC, FACTS)
    assert names(tmp_path) == set()


def test_a_commit_is_dirty_where_its_folder_was_changed(tmp_path: Path) -> None:
    """Results that are written beside the sources do not make these others."""

    def git(*words: str) -> None:
        subprocess.run(["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", *words], check=True)

    for name in ("src", "results"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("1")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")
    commit = git_commit.__wrapped__
    clean = commit(tmp_path / "src", "file")
    (tmp_path / "results" / "file").write_text("2")
    assert clean is not None and commit(tmp_path / "src", "file") == clean and len(clean) == 40
    (tmp_path / "src" / "file").write_text("2")
    assert commit(tmp_path / "src", "file") == f"{clean}-dirty"
    assert commit(tmp_path / "src", "another") is None
