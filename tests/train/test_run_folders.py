"""Run folders and checkpoints with a damaged file: they work correctly, or are refused and stay as they were."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import stat
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tiny
from deltune.errors import DeltuneError
from deltune.files import atomic_folder
from deltune.train import checkpoints
from deltune.train.config import RunConfig
from deltune.train.inference import predict_rows, rescore
from deltune.train.prediction_inputs import input_columns, inputs_from_file
from deltune.train.run import train
from deltune.train.run_folder import RunFolder
from fuzz.damage import contents, mutated_file, outcome

STRANGE = "the apple\u2028was near\u0085the old\x0ctable\x1chere"


class Folders:
    """A finished run, a finished series of runs, and a run that was stopped after its first checkpoint."""

    def __init__(self, root: Path) -> None:
        self.spec = tiny.spec(root, method="lora(rank=2)", epochs=2)
        rows = [{"text": STRANGE, "label": "fruit"}, *tiny.sentences(11, 5)]
        for split in ("validation", "test"):
            tiny.lines(root / "data" / f"{split}.jsonl", rows)
            text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            (root / "data" / f"{split}.jsonl").write_text(text, encoding="utf-8")
        self.several = tiny.spec(root, method="lora(rank=2)", epochs=1, seeds=(0, 1))
        self.finished, self.of_several, self.stopped = (root / name for name in ("finished", "several", "stopped"))
        train(self.spec, self.finished)
        train(self.several, self.of_several)
        save = checkpoints.save_checkpoint

        def stopping(*arguments: Any) -> None:
            save(*arguments)
            raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(checkpoints, "save_checkpoint", stopping)
            train(self.spec, self.stopped)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("runs"))


def copied(source: Path, to: Path) -> Path:
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(source, to, symlinks=True)
    return to


def damaged(folder: Path, files: list[Path], chance: random.Random) -> Path:
    """Change or remove one of the files, or replace it by a folder; return its path."""
    path = chance.choice(files)
    how = chance.random()
    if how < 0.06:
        path.unlink()
    elif how < 0.1:
        path.unlink()
        path.mkdir()
    else:
        mutated_file(path, chance)
    return path


def outcomes_of_damaged_run(seed: int, folders: Folders, to: Path) -> list[str]:
    """Do what reads a finished run and needs no model, on a damaged one. Saved deltas are tested elsewhere."""
    chance = random.Random(seed)
    source, spec = chance.choice(((folders.finished, folders.spec), (folders.of_several, folders.several)))
    folder = copied(source, to)
    files = [p for p in sorted(folder.rglob("*")) if p.is_file() and p.parent.name != "delta"]
    path = damaged(folder, files, chance)

    def facts() -> None:
        run = RunFolder(folder)
        run.check_config(spec)
        assert run.config.name and isinstance(run.metrics.seconds, int | float)
        input_columns(run.best_run.data.kind, run.best_run)
        run.best_run.read_log()

    outcomes = [outcome(facts, folder), outcome(lambda: rescore(folder), folder)]
    if path.exists():  # else it is trained again, as it should be
        outcomes.append(outcome(lambda: train(spec, folder, progress=False), folder))
    return outcomes


def outcome_of_damaged_checkpoint(seed: int, folders: Folders, to: Path) -> str:
    """Resume from a damaged checkpoint of the stopped run."""
    folder = copied(folders.stopped, to)
    checkpoint = checkpoints.latest_checkpoint(folder / "checkpoint")
    assert checkpoint is not None
    damaged(folder, sorted(checkpoint.iterdir()), random.Random(seed))
    return outcome(lambda: train(folders.spec, folder, progress=False), folder)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("seeds", [range(20), pytest.param(range(1000, 1400), marks=pytest.mark.slow)])
def test_a_run_with_any_damage_works_or_is_refused(seeds: range, folders: Folders, tmp_path: Path) -> None:
    outcomes = [one for seed in seeds for one in outcomes_of_damaged_run(seed, folders, tmp_path / "run")]
    assert set(outcomes) == {"fine", "refused"}


@pytest.mark.parametrize("seeds", [range(6), pytest.param(range(1000, 1040), marks=pytest.mark.slow)])
def test_a_checkpoint_with_any_damage_is_not_used(seeds: range, folders: Folders, tmp_path: Path) -> None:
    """A checkpoint of which any byte was changed is refused, unless nobody reads that byte."""
    for seed in seeds:
        if outcome_of_damaged_checkpoint(seed, folders, tmp_path / "run") == "fine":
            assert results(tmp_path / "run") == results(folders.finished), "more than unread bytes was changed"


def results(folder: Path) -> Any:
    """Return the results that do not depend on how often a run was stopped."""
    metrics = RunFolder(folder).metrics.as_json()
    return {name: metrics[name] for name in ("validation", "test", "best")}


# -- faults that were found


def test_texts_with_line_separators_are_scored_again(folders: Folders) -> None:
    """U+2028, U+0085 and a form feed stand in a prediction's input; they end no line."""
    assert rescore(folders.finished)["test"]["accuracy"] == RunFolder(folders.finished).metrics.test["accuracy"]
    lines = (folders.finished / "predictions" / "test.jsonl").read_text(encoding="utf-8")
    assert "\u2028" in lines and len(lines.splitlines()) > lines.count("\n") == 12


def test_texts_with_line_separators_are_predicted(folders: Folders, tmp_path: Path) -> None:

    (tmp_path / "texts.txt").write_text(f"{STRANGE}\nthe hammer\n", encoding="utf-8")
    rows = predict_rows(folders.finished, inputs_from_file(tmp_path / "texts.txt", folders.finished))
    assert [row["input"] for row in rows] == [STRANGE, "the hammer"]


def flip(path: Path, at: int = -5) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(bytes(content))


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


DAMAGES: dict[str, tuple[Any, str]] = {
    "a bit of a tensor": (lambda c: flip(c / "tensors.safetensors"), r"tensors\.safetensors is not the file"),
    "a bit of the facts": (lambda c: flip(c / "facts.json", 40), r"facts\.json is not the file"),
    "a bit of the Trainer's state": (lambda c: flip(c / "trainer_state.json", 40), r"trainer_state\.json is not"),
    "a bit of a checksum": (lambda c: flip(c / "SHA256SUMS", 3), "checksum differs"),
    "no checksums": (lambda c: (c / "SHA256SUMS").unlink(), "has no SHA256SUMS"),
    "no tensors": (lambda c: (c / "tensors.safetensors").unlink(), r"tensors\.safetensors is missing"),
    "cut short": (lambda c: os.truncate(c / "tensors.safetensors", 99), r"tensors\.safetensors is not the file"),
    "the best delta": (lambda c: flip(c.parents[1] / "delta" / "delta.safetensors"), "best delta so far is damaged"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_not_used(name: str, folders: Folders, tmp_path: Path) -> None:
    """It is refused before anything is written, and --fresh starts anew."""
    folder = copied(folders.stopped, tmp_path / "run")
    damage, expected = DAMAGES[name]
    damage(checkpoints.latest_checkpoint(folder / "checkpoint"))
    before = contents(folder)
    with pytest.raises(DeltuneError, match=f"(?s){expected}") as caught:
        train(folders.spec, folder)
    assert "--fresh" in str(caught.value) and contents(folder) == before
    if name == "no tensors":
        train(folders.spec, folder, resume=False)
        assert results(folder) == results(folders.finished)


BROKEN: dict[str, tuple[str, Any, str]] = {
    "a best run elsewhere": (
        "metrics.json", {"best": {"run": "../finished"}}, "best.run: string should match",
    ),
    "a best run that is not there": ("metrics.json", {"best": {"run": "seed7"}}, "holds no such run"),
    "no best run": ("metrics.json", {"best": {}}, "holds no such run"),
    "metrics of another kind": ("metrics.json", {"best": [1]}, "is not as deltune wrote it"),
    "metrics that are no numbers": ("metrics.json", {"test": {"accuracy": "x"}}, "test.accuracy"),
    "a kind of task that is none": ("runs/seed0/environment.json", {"data": {"kind": "x"}}, r"data\.kind"),
    "columns that are no names": ("runs/seed0/environment.json", {"data": {"columns": {"text": 1}}}, r"data\.columns"),
    "data that is a list": ("runs/seed0/environment.json", {"data": []}, "is not as deltune wrote it"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_damaged_run_is_refused(name: str, folders: Folders, tmp_path: Path) -> None:
    folder = copied(folders.of_several, tmp_path / "run")
    file, values, expected = BROKEN[name]
    for one in (folder / file, folder / file.replace("seed0", "seed1")):
        change(one, **values)
    before = contents(folder)
    with pytest.raises(DeltuneError, match=expected):
        rescore(folder)
    assert contents(folder) == before


@pytest.mark.parametrize("name", ["metrics.json", "log.jsonl", "environment.json", "predictions/test.jsonl"])
def test_a_folder_in_the_place_of_a_file_is_refused(name: str, folders: Folders, tmp_path: Path) -> None:
    """It is refused before the run is trained again, not after."""
    folder = copied(folders.finished, tmp_path / "run")
    (folder / name).unlink()
    (folder / name).mkdir()
    before = contents(folder)
    with pytest.raises(DeltuneError, match=f"{Path(name).name} is a folder"):
        train(folders.spec, folder)
    assert contents(folder) == before


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"id": "row-1", "prediction": "fruit"}', "line 1 is not as deltune wrote it: reference: field required"),
        ('{"id": "row-1", "prediction": ["fruit"], "reference": "tool"}', "line 1: .* is no label of this run"),
        ('{"id": "row-1", "prediction": "nut", "reference": "tool"}', "line 1: 'nut' is no label of this run"),
        ("[" * 10**6, "nested too deeply"),
        ('{"prediction": 1, "prediction": 2}', "occurs twice"),
        ("3", "not a JSON object"),
    ],
    ids=["no reference", "a list", "no label", "deep", "twice", "a number"],
)
def test_damaged_predictions_are_refused(line: str, expected: str, folders: Folders, tmp_path: Path) -> None:
    folder = copied(folders.finished, tmp_path / "run")
    (folder / "predictions" / "test.jsonl").write_text(line + "\n")
    with pytest.raises(DeltuneError, match=expected):
        rescore(folder)


def test_changed_predictions_are_computed_again(folders: Folders, tmp_path: Path) -> None:
    """The predictions of the best epoch are reused only if they are as they were written."""
    folder = copied(folders.stopped, tmp_path / "run")
    file = folder / "predictions" / "validation.jsonl"
    whole = file.read_bytes()
    flip(file)
    train(folders.spec, folder)
    assert results(folder) == results(folders.finished)
    assert file.read_bytes() in (whole, (folders.finished / "predictions" / "validation.jsonl").read_bytes())


@pytest.mark.parametrize("name", ["a file", "²", "-1", "1e3"])
def test_other_entries_of_the_checkpoint_folder_are_ignored(name: str, folders: Folders, tmp_path: Path) -> None:
    folder = copied(folders.stopped, tmp_path / "run")
    newest = checkpoints.latest_checkpoint(folder / "checkpoint")
    (folder / "checkpoint" / name).mkdir()
    (folder / "checkpoint" / "999").write_text("")
    assert checkpoints.latest_checkpoint(folder / "checkpoint") == newest


# -- permissions and power


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077])
def test_files_have_the_permissions_of_the_umask(mask: int, folders: Folders, tmp_path: Path) -> None:
    """Predictions hold texts, so the user decides who may read them. Saved deltas are tested elsewhere."""
    before = os.umask(mask)
    try:
        folder = copied(folders.stopped, tmp_path / "run")
        shutil.rmtree(folder)
        spec = RunConfig.from_flat(**{**folders.spec.flat(), "epochs": 1})
        checkpoints_seen: list[Path] = []
        modes: dict[Path, int] = {}

        @contextlib.contextmanager
        def record_modes(checkpoint: Path) -> Iterator[Path]:
            with atomic_folder(checkpoint) as fresh:
                yield fresh
            checkpoints_seen.extend(checkpoint.iterdir())
            modes.update({p: stat.S_IMODE(p.stat().st_mode) for p in (checkpoint, *checkpoint.iterdir())})

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checkpoints, "atomic_folder", record_modes)
            train(spec, folder)
        modes |= {p: stat.S_IMODE(p.stat().st_mode) for p in folder.rglob("*") if p.parent.name != "delta"}
        modes.pop(folder / "delta")
    finally:
        os.umask(before)
    assert len(checkpoints_seen) == 4 and (folder / "predictions" / "test.jsonl") in modes
    assert {m for p, m in modes.items() if p.suffix or p.name == "SHA256SUMS"} == {0o666 & ~mask}
    assert {m for p, m in modes.items() if not p.suffix and p.is_dir()} == {0o777 & ~mask}
