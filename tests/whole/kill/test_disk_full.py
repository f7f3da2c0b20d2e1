"""A disk that is full at any write of a run or of a save gives an error that says so, and damages no older file."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

import tiny
from deltune import attach
from deltune.errors import DeltuneError
from deltune.train.config import read_config
from deltune.train.run import train
from deltune.train.run_folder import RunFolder
from processes import Started

from .strikes import Strike, content, permitted, resized, small_disk, whole

PAGE = 4  # kilobytes
ENOUGH = 4096

needs_mount = pytest.mark.skipif(not permitted(), reason="no right to mount")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("disk")
    tiny.model(folder / "model")
    tiny.data(folder / "data", 32, 12)
    (folder / "spec.yaml").write_text(tiny.spec(folder, epochs=2).yaml())
    train(tiny.spec(folder, epochs=2), folder / "whole")
    return folder


def _refused(spec_file: str, folder: str) -> bool:
    """Return whether a run stopped with an error about a full disk, after checking that its files are whole."""
    before = content(Path(folder)) if Path(folder).is_dir() else {}
    try:
        train(read_config(spec_file), folder, progress=False)
    except DeltuneError as error:
        assert "no space left" in str(error).lower() and "\n" not in str(error), error
        whole(Path(folder))
        run = RunFolder(folder)
        assert not (run.finished and run.report_file.exists()), "nothing was refused"
        after = content(Path(folder)) if Path(folder).is_dir() else {}
        assert {name for name in before if name.startswith("delta")} <= after.keys()
        return True
    return False


def on_disks(spec_file: str, disk: str, sizes: range, results: str) -> None:
    """Train on disks of these sizes (kilobytes), each of which is then enlarged and the run resumed."""
    small_disk(disk, sizes[0])
    for size in sizes:
        folder = Path(disk) / "run"
        resized(disk, size)
        refused = _refused(spec_file, str(folder))
        resized(disk, ENOUGH)
        train(read_config(spec_file), folder, progress=False)
        assert RunFolder(folder).report_file.is_file()
        shutil.copytree(folder, Path(results) / f"{size}{'-refused' if refused else ''}")
        shutil.rmtree(folder)


@needs_mount
@pytest.mark.parametrize(
    ("first", "step"),
    [(3 * PAGE, 20 * PAGE), *(pytest.param(first * PAGE, 4 * PAGE, marks=pytest.mark.slow) for first in (1, 3))],
)
def test_a_run_on_a_small_disk(first: int, step: int, root: Path, tmp_path: Path) -> None:
    """A real disk of every other size, page by page, refuses in the middle of writes too."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "results").mkdir()
    arguments = (str(root / "spec.yaml"), str(tmp_path / "disk"), range(first, 32 * PAGE, step))
    started = Started(on_disks, tmp_path / "disk", *arguments, str(tmp_path / "results"))
    assert started.wait() == 0, started.printed
    results = list((tmp_path / "results").iterdir())
    assert len(results) == len(arguments[2]) and any("refused" in path.name for path in results)
    for folder in results:
        assert content(folder) == content(root / "whole"), folder.name


def faulty(spec_file: str, folder: str, at: int) -> None:
    """Train on a disk that is full from the at-th new file on; exit with 1 if the run did not notice."""
    Strike(folder, at, kill=False).arm()
    os._exit(0 if _refused(spec_file, folder) else 1)


@pytest.mark.parametrize(("first", "step"), [(6, 30), pytest.param(2, 5, marks=pytest.mark.slow)])
def test_a_run_whose_disk_is_full_at_any_file(first: int, step: int, root: Path, tmp_path: Path) -> None:
    folder, at = tmp_path / "run", first
    while True:
        started = Started(faulty, folder, str(root / "spec.yaml"), str(folder), at)
        code = started.wait()
        assert code in (0, 1) and "Traceback" not in started.printed, f"file {at}: {started.printed}"
        if code == 1:
            break
        train(read_config(root / "spec.yaml"), folder, progress=False)
        assert content(folder) == content(root / "whole"), f"file {at}"
        shutil.rmtree(folder)
        at += step
    assert at > first + step


def saves(model: str, disk: str) -> None:
    """Save a delta over an older one with 0, 1, 2, … free pages, until it succeeds."""
    small_disk(disk, ENOUGH)  # first: a process of several threads may not
    tuned = attach(AutoModelForSequenceClassification.from_pretrained(model), "prefix(length=48) + layernorm")
    folder, filler = Path(disk) / "delta", Path(disk) / "filler"
    tuned.save(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with torch.no_grad():
        for _, parameter in tuned.named_trainable_parameters():
            parameter.add_(1.0)
    for left in range(64):
        filler.unlink(missing_ok=True)
        free = os.statvfs(disk).f_bavail
        filler.write_bytes(bytes((free - left) * os.statvfs(disk).f_bsize))
        try:
            tuned.save(folder)
        except DeltuneError as error:
            assert "no space left" in str(error), error
            assert {path.name: path.read_bytes() for path in folder.iterdir()} == before, left
            assert {path.name for path in Path(disk).iterdir()} == {"delta", "filler"}, left
        else:
            assert left > 3 and {path.name: path.read_bytes() for path in folder.iterdir()} != before
            return
    raise AssertionError("it never succeeds")


@needs_mount
def test_a_save_on_a_full_disk(root: Path, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    started = Started(saves, tmp_path / "disk", str(root / "model"), str(tmp_path / "disk"))
    assert started.wait() == 0, started.printed
