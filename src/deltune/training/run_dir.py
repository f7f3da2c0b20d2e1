"""A run is a directory: its spec, delta, metrics, log, environment and predictions. All writes are all or nothing."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib.metadata
import json
import os
import platform
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .._version import __version__
from ..data.columns import KINDS
from ..errors import BusyError, DeltuneError, error_from_problems, excerpt
from ..filesystem import (
    clear_write_errors,
    fsync_directory,
    fsync_file,
    parse_json,
    read_json_object,
    read_jsonl,
    user_path,
    write_json,
    write_jsonl,
    write_text,
)
from .config import RunConfig, read_config

SHOWN = 10
"""Problems of one file that are listed."""


class Record(BaseModel):
    """A JSON object of which these fields are read; it may have others."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)


class DataFacts(Record):
    """The data of a run (`Data.facts`)."""

    fingerprint: str | None = None
    kind: str = Field(default="classification", pattern=f"^({'|'.join(KINDS)})$")
    source: str = ""
    columns: dict[str, str] = {}
    digests: dict[str, str] = {}
    rows: dict[str, int] = {}
    labels: list[str] = []


class Environment(Record):
    """environment.json: what a run was begun with."""

    data: DataFacts = DataFacts()


Number = int | float
"""A number that is written as it was read: a whole one stays whole."""


class Best(Record):
    """The validation that a run's delta is of; of several runs also which run it is, and the values it tried.

    Without a validation split there is no metric and no value.
    """

    run: str | None = Field(default=None, pattern=r"^[\w-]+$")
    epoch: Number | None = None
    step: int | None = None
    metric: str | None = None
    value: Number | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the values as metrics.json has them, those that were tried behind the run."""
        values = self.model_dump(exclude_unset=True)
        tried = {name: values.pop(name) for name in self.model_extra or ()}
        return {**{name: values.pop(name) for name in ("run",) if name in values}, **tried, **values}


class SeriesRun(Record):
    """One run of several: what was tried, whether it was chosen, and its scores, or the error by which it diverged."""

    run: str
    seed: int
    tried: dict[str, Any]
    chosen: bool
    error: str | None = None
    validation: dict[str, Number] = {}
    test: dict[str, Number] = {}
    seconds: Number | None = None
    best: Best | None = None


class RunMetrics(Record):
    """metrics.json: the results of a finished run.

    Attributes:
        validation: The scores of the validation split, by metric; empty where there is none.
        test: The scores of the test split.
        aggregate: How the scores of several runs are aggregated: "mean" or "median".
        std: The standard deviations of the scores of several runs, by split and metric.
        seconds: How long training took.
        count: What is trained, as `Count.as_dict` has it.
        best: The validation that the delta is of.
        truncated: How many inputs of every split were cut.
        truncated_targets: How many targets of every split were cut.
        signatures: How every metric was computed.
        omitted: Why a metric could not be computed.
        runs: The single runs of several.
    """

    validation: dict[str, Number] = {}
    test: dict[str, Number] = {}
    aggregate: str | None = None
    std: dict[str, dict[str, Number]] = {}
    seconds: Number
    count: dict[str, Any]
    best: Best
    truncated: dict[str, int]
    truncated_targets: dict[str, int]
    signatures: dict[str, str]
    omitted: dict[str, str]
    runs: list[SeriesRun] = []

    @property
    def scores(self) -> dict[str, dict[str, Number]]:
        """The scores of the splits that the data has, by split."""
        return {s: scores for s, scores in (("validation", self.validation), ("test", self.test)) if scores}

    def as_json(self) -> dict[str, Any]:
        """Return the values as metrics.json has them, in its order."""
        values = self.model_dump(exclude_unset=True) | {"best": self.best.as_json()}
        if self.runs:
            values["best"] = values.pop("best")
            values["runs"] = [
                values_of_run | ({"best": run.best.as_json()} if run.best is not None else {})
                for values_of_run, run in zip(values.pop("runs"), self.runs, strict=True)
            ]
        return values


class OptimizerFacts(Record):
    """What of an optimiser's state is no tensor."""

    groups: list[dict[str, Any]]
    scalars: dict[str, dict[str, Any]]


class Answered(Record):
    """What the best epoch answered to the validation split: by which delta, in which file, with which scores."""

    delta: str
    sha256: str
    metrics: dict[str, float]
    signatures: dict[str, str]
    omitted: dict[str, str]


class ProgressBest(Best):
    """The best validation so far: `rank` is compared with later ones, `answered` says what it answered."""

    rank: list[float] | None = None
    answered: Answered | None = None


class Progress(Record):
    """facts.json of a checkpoint: how far training is."""

    best: ProgressBest
    stale: int = Field(ge=0)
    seconds: float
    optimizer: OptimizerFacts
    scheduler: dict[str, Any]
    rng: list[dict[str, Any]]


class LogLine(Record):
    """A line of log.jsonl."""

    step: int = 0


class Predicted(Record):
    """A line of predictions/SPLIT.jsonl, as far as it is scored again."""

    prediction: Any
    reference: Any


def checked(kind: type[Record], values: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the values of a file as they are.

    Raises:
        DeltuneError: They are not what deltune writes there; the message lists what is missing or of another kind.
    """
    try:
        kind.model_validate(values)
    except ValidationError as error:
        problems = [
            f"{'.'.join(map(str, e['loc'])) or 'it'}: {e['msg'][0].lower()}{e['msg'][1:]}"
            + ("" if e["type"] == "missing" else f", not {excerpt(e['input'])}")
            for e in error.errors()[:SHOWN]
        ]
        raise error_from_problems(f"{where} is not as deltune wrote it", problems) from error
    return values


def read_record(kind: type[Record], path: Path) -> dict[str, Any]:
    """Read a JSON object that a run wrote. Raises DeltuneError: unreadable, or not what a run writes there."""
    return checked(kind, read_json_object(path), str(path))


PACKAGES = ("torch", "transformers", "accelerate", "tokenizers", "datasets", "safetensors", "numpy", "scikit-learn")
OWN = ("spec.yaml", "delta", "metrics.json", "log.jsonl", "environment.json", "predictions", "checkpoint", "runs")


def writing(method: Callable[..., None]) -> Callable[..., None]:
    """What only the run's writer does; other processes at the run pass over it."""

    @functools.wraps(method)
    def written(self: RunDir, *args: Any) -> None:
        if self.writer:
            method(self, *args)

    return written


class RunDir:
    """The folder of one run.

    finished: metrics.json is there, which is written last. Between, `checkpoint` holds what a resumption needs, beside
    the best delta so far and its predictions for the validation split.
    runs: the folders of the single runs, where the spec is of several.
    writer: of several processes at one run, one writes.
    """

    def __init__(self, folder: str | Path, writer: bool = True) -> None:
        self.folder, self.writer = user_path(folder, "the folder of a run"), writer
        self.spec_file, self.delta, self.metrics_file, self.log_file = (self.folder / name for name in OWN[:4])
        self.environment_file, self.predictions, self.checkpoint, self.runs = (self.folder / n for n in OWN[4:])

    @property
    def exists(self) -> bool:
        return self.spec_file.is_file()

    @property
    def finished(self) -> bool:
        return self.exists and self.metrics_file.is_file()

    @property
    def config(self) -> RunConfig:
        """The config that the run was begun with. Error: the folder is no run."""
        if not self.exists:
            if not self.folder.is_dir():
                raise DeltuneError(f"{self.folder} is no RUN folder: there is no such folder")
            with clear_write_errors(self.folder):
                held = ", ".join(sorted(p.name for p in self.folder.iterdir())[:8])
            if (self.folder / "delta.json").is_file():
                raise DeltuneError(
                    f"{self.folder} is a delta without its run: deltune.load(model, {str(self.folder)!r})"
                )
            raise DeltuneError(f"{self.folder} is no RUN folder: spec.yaml is missing (it holds {held or 'nothing'})")
        return read_config(self.spec_file)

    @property
    def metrics(self) -> RunMetrics:
        """What metrics.json holds. Error: the run is not finished."""
        if not self.finished:
            raise DeltuneError(f"{self.folder} is not finished; run the same `deltune train` again, it resumes")
        return RunMetrics.model_validate(read_record(RunMetrics, self.metrics_file))

    @property
    def kept(self) -> RunDir:
        """The single run whose delta this folder has: itself, or the best of several."""
        if not self.config.is_series:
            return self
        name = self.metrics.best.run
        if name is None or not RunDir(self.runs / name).exists or RunDir(self.runs / name).config.is_series:
            raise DeltuneError(
                f"{self.metrics_file} names {name!r} as the best of several runs, and {self.runs} holds no such run; "
                "bring the folder back, or start afresh (--fresh)"
            )
        return RunDir(self.runs / name)

    @property
    def environment(self) -> dict[str, Any]:
        """What environment.json holds; nothing where there is none."""
        return read_record(Environment, self.environment_file) if self.environment_file.is_file() else {}

    @property
    def data(self) -> DataFacts:
        """The data that the run was begun with."""
        return DataFacts(**self.environment.get("data", {}))

    def check(self, config: RunConfig) -> None:
        """The folder is free, or holds this very spec. Errors: other files, a run of another spec (what differs), a
        folder in the place of a file or the other way round."""
        if self.exists:
            files = [self.metrics_file, self.log_file, self.environment_file, *self.predictions.glob("*.jsonl")]
            places = [self.delta, self.predictions, self.checkpoint, self.runs]
            wrong = [f"{path} is a folder" for path in files if path.is_dir()]
            wrong += [f"{path} is no folder" for path in places if path.exists() and not path.is_dir()]
            if wrong:
                raise error_from_problems(
                    f"{self.folder} is not as a run leaves it; put right or start afresh (--fresh)", wrong
                )
            differing = self.config.differences(config)
            if differing:
                listed = "".join(f"\n  - {line}" for line in differing)
                raise DeltuneError(
                    f"{self.folder} holds a run of another spec:{listed}\n"
                    "Choose another output folder, or start afresh there (--fresh)"
                )
        elif self.folder.is_dir():
            with clear_write_errors(self.folder):
                foreign = sorted(p.name for p in self.folder.iterdir())
            if foreign:
                raise DeltuneError(f"{self.folder} is no RUN folder, it holds {', '.join(foreign[:5])}; choose another")
        elif self.folder.exists():
            raise DeltuneError(f"{self.folder} is a file; give a folder for the run")

    def check_data(self, now: Mapping[str, Any]) -> None:
        """The run's data (Data.facts) is still what it was. Error: it is not, and what changed."""
        before = self.environment.get("data", {}) if self.exists else {}
        if before.get("fingerprint") in (None, now["fingerprint"]):
            return
        rows = [found.get("rows", {}) for found in (before, now)]
        digests = [found.get("digests", {}) for found in (before, now)]
        changed = [
            f"{split} ({rows[0].get(split, 0)} rows then, {rows[1].get(split, 0)} now)"
            for split in {**rows[0], **rows[1]}
            if digests[0].get(split) != digests[1].get(split)
        ]
        changed += [
            f"{n} ({before.get(n)} then, {now.get(n)} now)"
            for n in ("labels", "columns")
            if before.get(n) != now.get(n)
        ]
        raise DeltuneError(
            f"the data {now.get('source')} changed since the run in {self.folder} was begun: {', '.join(changed)}. "
            "Bring back what it was, choose another output folder, or start afresh there (--fresh)"
        )

    @writing
    def clear(self) -> None:
        """Remove what a run wrote here: metrics first, so that it is unfinished, the spec last, so that it is a run."""
        if self.exists:
            self.sweep()
            for path in (self.metrics_file, *(self.folder / name for name in OWN[1:]), self.spec_file):
                _remove(path)

    @writing
    def recover(self) -> None:
        """Put the delta back that a kill in the middle of its replacement left beside its place (live.store.write)."""
        for old in self.folder.glob(f".{self.delta.name}-old-*"):
            if not self.delta.exists() and (old / "delta.json").is_file():
                os.replace(old, self.delta)
                fsync_directory(self.folder)

    @writing
    def sweep(self) -> None:
        """Remove what an interrupted write left behind."""
        for name in OWN:
            for left in (*self.folder.glob(f".{name}-*"), *self.predictions.glob(".*-*")):
                _remove(left)

    @writing
    def open(self, config: RunConfig) -> None:
        """Write the spec, where it is not there."""
        if not self.exists:
            write_text(self.spec_file, config.yaml())

    @writing
    def point(self, name: str, to: Path) -> None:
        """Make `name` a link to another place below this folder, in place of what it was."""
        fresh = self.folder / f".{name}-link"
        fresh.unlink(missing_ok=True)
        os.symlink(to, fresh)
        os.replace(fresh, self.folder / name)
        fsync_directory(self.folder)

    @writing
    def begin(self, config: RunConfig, environment: dict[str, Any]) -> None:
        """Write spec and environment; for a run that was begun before, remove what an interrupted write left.

        Error: its data is no longer what it was.
        """
        self.check_data(environment["data"])
        self.sweep()
        self.open(config)
        write_json(self.environment_file, environment)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else works on this run inside the context; a folder made for it goes again if it holds no run."""
        made = [p for p in (self.folder, *self.folder.parents) if not p.exists()]
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.folder, os.O_RDONLY)
        except OSError as error:
            raise DeltuneError(f"{self.folder} cannot be made or opened: {error}") from error
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with the process, however it ends
            except OSError as error:
                raise BusyError(f"another process is at work on {self.folder}; wait for it or stop it") from error
            yield
        finally:
            os.close(handle)
            for path in () if self.exists else made:
                with contextlib.suppress(OSError):
                    path.rmdir()

    @writing
    def log(self, line: dict[str, Any]) -> None:
        """Append one line to log.jsonl."""
        with open(self.log_file, "a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")

    @writing
    def rewind(self, step: int) -> None:
        """Cut from the log what came after a step, and a line that was not written to its end."""
        if not self.log_file.is_file():
            return
        kept = []
        with open(self.log_file, encoding="utf-8", errors="replace", newline="\n") as file:
            for line in file:
                with contextlib.suppress(ValueError, DeltuneError):
                    if checked(LogLine, parse_json(line), "the line").get("step", 0) <= step:
                        kept.append(line if line.endswith("\n") else line + "\n")
        write_text(self.log_file, "".join(kept))

    def logged(self) -> list[dict[str, Any]]:
        """The lines of the log. Error: one that is broken."""
        return [checked(LogLine, v, f"{self.log_file} line {n}") for n, v in read_jsonl(self.log_file)]

    def answers(self, split: str) -> list[tuple[int, dict[str, Any]]]:
        """The lines of predictions/SPLIT.jsonl, with their numbers. Error: one that is broken."""
        path = self.predictions / f"{split}.jsonl"
        return [(n, checked(Predicted, v, f"{path} line {n}")) for n, v in read_jsonl(path)]

    @writing
    def sync(self) -> None:
        """Sync the log to the disk: what a checkpoint follows is there after a loss of power, too."""
        if self.log_file.is_file():
            fsync_file(self.log_file)

    @writing
    def predicted(self, split: str, rows: Iterable[dict[str, Any]]) -> None:
        """Write predictions/SPLIT.jsonl."""
        self.predictions.mkdir(exist_ok=True)
        write_jsonl(self.predictions / f"{split}.jsonl", rows)

    @writing
    def finish(self, metrics: RunMetrics) -> None:
        """Write metrics.json and drop the checkpoint: the run is finished."""
        write_json(self.metrics_file, metrics.as_json())
        _remove(self.checkpoint)


def environment(facts: dict[str, Any]) -> dict[str, Any]:
    """Versions, machine and what else is to be known of a run: its device and its data."""
    versions = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        "deltune": __version__,
        "python": platform.python_version(),
        "packages": versions,
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        **facts,
    }


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
