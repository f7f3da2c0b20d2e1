"""The folder of a run: its config, delta, metrics, log and predictions, each written whole or not at all."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ..errors import BusyError, DeltuneError, check_booleans, closest_match, error_from_problems, first_names
from ..files import (
    atomic_folder,
    explain_write_errors,
    fsync_directory,
    leftover_folders,
    parse_json,
    read_jsonl,
    user_path,
    write_error,
    write_json,
    write_jsonl,
    write_text,
)
from ..interop.base import is_foreign, read_options
from ..interop.foreign import foreign_base
from ..methods.registry import parse
from ..models import HEADS_WITH_LABELS, NAME_ON_HUB, folders_beside, head_of_class_name, read_trained_head
from ..runtime.delta_schema import TrainedFacts, merged_facts
from ..runtime.serialization import read_metadata
from .config import RunConfig, read_config
from .records import (
    DataFacts,
    Environment,
    LogLine,
    PredictionLine,
    RunMetrics,
    check_record,
    read_record,
)

REPORT_FILE = "report.html"

LOCK_FILE = ".lock"
"""The file that a process locks while it works on a run; only a killed process leaves it behind."""

CONTENTS = (
    "spec.yaml", "delta", "metrics.json", "log.jsonl", "environment.json", "predictions", "checkpoint", "runs",
    REPORT_FILE,
)  # fmt: skip
"""The names of everything that a run writes into its folder."""


def _is_leftover(path: Path) -> bool:
    """Return whether an interrupted write left this entry of a run's folder."""
    return path.name.startswith(tuple(f".{name}-" for name in CONTENTS))


def writer_only(method: Callable[..., None]) -> Callable[..., None]:
    """Make a method do nothing in processes that do not write the run."""

    @functools.wraps(method)
    def call_if_writer(self: RunFolder, *args: Any) -> None:
        if self.writer:
            method(self, *args)

    return call_if_writer


class RunFolder:
    """The folder of one run.

    A run is finished when metrics.json is there, which is written last. Before that, `checkpoint` holds what training
    resumes from, beside the best delta so far and its predictions for the validation split.

    Attributes:
        writer: Whether this process writes; of several processes at one run only one does.
        runs: The folders of the single runs, where the config asks for several.
    """

    is_foreign = False

    @check_booleans
    def __init__(self, folder: str | Path, *, writer: bool = True, base: str | None = None) -> None:
        """Name the files of a run, whose base model may be at another place now; nothing is read or written."""
        self.base = base
        self.folder, self.writer = user_path(folder, "the folder of a run"), writer
        self.spec_file, self.delta, self.metrics_file, self.log_file = (self.folder / name for name in CONTENTS[:4])
        self.environment_file, self.predictions, self.checkpoint, self.runs, self.report_file = (
            self.folder / name for name in CONTENTS[4:]
        )

    @property
    def exists(self) -> bool:
        """True if the folder holds a run, finished or not."""
        return self.spec_file.is_file()

    @property
    def finished(self) -> bool:
        """True if the folder holds a finished run."""
        return self.exists and self.metrics_file.is_file()

    @property
    def config(self) -> RunConfig:
        """The config that the run was started with."""
        if not self.exists:
            if not self.folder.is_dir():
                name, nearby = str(self.folder), folders_beside(self.folder)
                missing = f"{name} is not a RUN folder: there is no such folder"
                if guess := closest_match(name, nearby):
                    missing += f". Did you mean {guess!r}?"
                if nearby:
                    missing += f"{'' if guess else '.'} Beside it: {first_names(nearby, 10)}"
                if not guess and NAME_ON_HUB.fullmatch(name) and ("/" not in name or not self.folder.parent.is_dir()):
                    missing += (
                        f". If it is a hub id: no command fetches runs or deltas, so get it first (hf download {name} "
                        "--local-dir DIR) and give DIR; a model that was never tuned is scored on data (deltune "
                        f"evaluate {name} --data FILE)"
                    )
                raise DeltuneError(missing)
            if (self.folder / "config.json").is_file():
                raise DeltuneError(
                    f"{self.folder} is a model and no run: give the run that it was made from, or data of your own "
                    f"(deltune evaluate {self.folder} --data FILE)"
                )
            with explain_write_errors(self.folder):
                names = ", ".join(sorted(p.name for p in self.folder.iterdir())[:8])
            best = RunFolder(self.folder / "best")  # of `deltune choose`
            inside = folders_beside(best.folder)
            todo = f". The run that was chosen is {best.folder}" if best.exists else ""
            todo = todo or (f". Give one of {first_names(inside, 10)}" if inside else "")
            raise DeltuneError(
                f"{self.folder} is not a RUN folder: spec.yaml is missing (it holds {names or 'nothing'}){todo}"
            )
        config = read_config(self.spec_file)
        return config if self.base is None else config.replace(model=self.base)

    @property
    def metrics(self) -> RunMetrics:
        """The results in metrics.json."""
        if not self.finished:
            raise DeltuneError(f"{self.folder} is not finished; run the same `deltune train` again, it resumes")
        return RunMetrics.model_validate(read_record(RunMetrics, self.metrics_file))

    @property
    def best_run(self) -> RunFolder:
        """The single run whose delta this folder has: this run itself, or the best of several."""
        if not self.config.is_series:
            return self
        name = self.metrics.best.run
        if name is None or not RunFolder(self.runs / name).exists or RunFolder(self.runs / name).config.is_series:
            raise DeltuneError(
                f"{self.metrics_file} names {name!r} as the best of several runs, but {self.runs} holds no such run; "
                "bring the folder back, or start afresh (--fresh)"
            )
        return RunFolder(self.runs / name, base=self.base)

    @property
    def method(self) -> str:
        """The method of the delta, as an expression."""
        return self.config.method.expression

    @property
    def trained(self) -> TrainedFacts | None:
        """What the delta says of the inputs that it was trained on."""
        return read_metadata(self.folder).trained

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the head's labels, in the order of their ids."""
        if not self.delta.is_dir():
            raise DeltuneError(f"{self.folder} has no delta yet; run the same `deltune train` again, it resumes")
        labels = read_metadata(self.folder).labels
        return tuple(name for _, name in labels.pairs) if labels else ()

    @property
    def environment(self) -> dict[str, Any]:
        """The values of environment.json, checked by `Environment`; empty if there is no such file."""
        return read_record(Environment, self.environment_file) if self.environment_file.is_file() else {}

    @property
    def data(self) -> DataFacts:
        """The data set that the run was started with, from environment.json."""
        return DataFacts(**self.environment.get("data", {}))

    def check_config(self, config: RunConfig) -> RunConfig | None:
        """Check that the folder is free, or holds a run of this very config, and return the config of that run."""
        if self.exists:
            files = [
                self.metrics_file,
                self.log_file,
                self.environment_file,
                self.report_file,
                *self.predictions.glob("*.jsonl"),
            ]
            folders = [self.delta, self.predictions, self.checkpoint, self.runs]
            problems = [f"{path} is a folder" for path in files if path.is_dir()]
            problems += [f"{path} is not a folder" for path in folders if path.exists() and not path.is_dir()]
            if problems:
                raise error_from_problems(
                    f"{self.folder} is not as a run leaves it; repair it, or start afresh (--fresh)", problems
                )
            before = self.config
            differences = before.differences(config)
            if differences and not self._takes_seeds(before, config):
                listed = "".join(f"\n  - {line}" for line in differences)
                raise DeltuneError(
                    f"{self.folder} holds a run of another spec:{listed}\n"
                    "Choose another output folder, or start afresh there (--fresh)"
                )
            return before
        if self.folder.is_dir():
            with explain_write_errors(self.folder):
                foreign = sorted(p.name for p in self.folder.iterdir() if p.name != LOCK_FILE and not _is_leftover(p))
            if foreign:
                raise DeltuneError(
                    f"{self.folder} is not a RUN folder, but holds {', '.join(foreign[:5])}; choose another folder"
                )
        elif self.folder.exists():
            raise DeltuneError(f"{self.folder} is a file; give a folder for the run")
        return None

    def _takes_seeds(self, before: RunConfig, config: RunConfig) -> bool:
        """Return whether the seeds of a config can be added to this run: it is one of several seeds, or finished."""
        if not config.adds_seeds_to(before):
            return False
        return before.is_series or self.finished or self._run_of_seed(before).finished

    def _run_of_seed(self, config: RunConfig) -> RunFolder:
        return RunFolder(self.runs / f"seed{config.runtime.seed}")

    @writer_only
    def begin_series(self, config: RunConfig) -> None:
        """Write the config of several runs; a run whose seeds are its first is taken over with what it has.

        A single run becomes the first of `runs`. Every step may be repeated after an interruption.
        """
        before = self.config if self.exists else config
        if before.name == config.name:
            self.write_config(config)
            return
        if not before.is_series:
            first = self._run_of_seed(before)
            if not first.finished:
                self.runs.mkdir(exist_ok=True)
                with atomic_folder(first.folder) as fresh:
                    for path in [self.folder / name for name in CONTENTS]:
                        if path.is_dir() and path not in (self.runs, self.checkpoint):
                            shutil.copytree(path, fresh / path.name)
                        elif path.is_file():
                            shutil.copy2(path, fresh / path.name)
            for path in (
                self.metrics_file, self.delta, self.log_file, self.environment_file, self.predictions,
            ):  # fmt: skip
                _remove(path)
        _remove(self.metrics_file)
        write_text(self.spec_file, config.yaml())

    def check_data(
        self, facts: Mapping[str, Any], advice: str = "choose another output folder, or start afresh there (--fresh)"
    ) -> None:
        """Check that the data of the run is still what it was when the run was started."""
        before = self.environment.get("data", {}) if self.exists else {}
        if before.get("fingerprint") in (None, facts["fingerprint"]):
            return
        rows = [data.get("rows", {}) for data in (before, facts)]
        digests = [data.get("digests", {}) for data in (before, facts)]
        changes = [
            f"{split} ({rows[0].get(split, 0)} rows then, {rows[1].get(split, 0)} now)"
            for split in {**rows[0], **rows[1]}
            if digests[0].get(split) != digests[1].get(split)
        ]
        changes += [
            f"{name} ({before.get(name)} then, {facts.get(name)} now)"
            for name in ("labels", "columns")
            if before.get(name) != facts.get(name)
        ]
        raise DeltuneError(
            f"the data {facts.get('source')} changed since the run in {self.folder} was started: {', '.join(changes)}. "
            f"Bring back what it was, {advice}"
        )

    @writer_only
    def clear(self) -> None:
        """Remove everything that a run wrote into the folder.

        The metrics go first and the config last, so that an interruption leaves an unfinished run.
        """
        if self.exists:
            self.remove_leftovers()
            for path in (self.metrics_file, *(self.folder / name for name in CONTENTS[1:]), self.spec_file):
                _remove(path)

    @writer_only
    def recover_delta(self) -> None:
        """Put back the delta that `files.atomic_folder` had renamed when the process was killed."""
        for old in leftover_folders(self.delta):
            if not self.delta.exists() and (old / "delta.json").is_file():
                os.replace(old, self.delta)
                fsync_directory(self.folder)

    @writer_only
    def remove_leftovers(self) -> None:
        """Remove the temporary files and folders of interrupted writes."""
        for path in (*filter(_is_leftover, self.folder.iterdir()), *self.predictions.glob(".*-*")):
            _remove(path)

    @writer_only
    def write_config(self, config: RunConfig) -> None:
        """Write spec.yaml for a new run, or again when a search has chosen its learning rate."""
        if not self.exists or self.config.optim.lr != config.optim.lr:
            write_text(self.spec_file, config.yaml())

    @writer_only
    def link(self, name: str, target: Path) -> None:
        """Make an entry of the folder a symbolic link, replacing what is there."""
        fresh = self.folder / f".{name}-link"
        fresh.unlink(missing_ok=True)
        os.symlink(target, fresh)
        os.replace(fresh, self.folder / name)
        fsync_directory(self.folder)

    @writer_only
    def begin(self, config: RunConfig, environment: dict[str, Any]) -> None:
        """Write config and environment, and remove what an interrupted write left."""
        self.check_data(environment["data"])
        self.remove_leftovers()
        self.write_config(config)
        write_json(self.environment_file, environment)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Create the folder and keep other processes from training in it inside the context.

        At the end, folders that were created are removed again if no run was started in them.
        """
        created = [p for p in (self.folder, *self.folder.parents) if not p.exists()]
        lock = FileLock(self.folder / LOCK_FILE, blocking=False)  # ends with the process, however it ends
        try:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                lock.acquire()
            except Timeout as error:
                raise BusyError(f"another process is at work on {self.folder}; wait for it or stop it") from error
            except OSError as error:
                raise write_error(self.folder, error) from error
            yield
        finally:
            if lock.is_locked:
                with contextlib.suppress(OSError):
                    os.unlink(lock.lock_file)
                lock.release()
            for path in () if self.exists else created:
                with contextlib.suppress(OSError):
                    path.rmdir()

    @writer_only
    def log(self, line: dict[str, Any]) -> None:
        """Append a line to log.jsonl."""
        with open(self.log_file, "a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")

    @writer_only
    def truncate_log(self, step: int) -> None:
        """Remove lines of later steps (-1: all) and unfinished lines from log.jsonl."""
        if not self.log_file.is_file():
            return
        lines = []
        with open(self.log_file, encoding="utf-8", errors="replace", newline="\n") as file:
            for line in file:
                with contextlib.suppress(ValueError, DeltuneError):
                    if check_record(LogLine, parse_json(line), "the line").get("step", 0) <= step:
                        lines.append(line if line.endswith("\n") else line + "\n")
        write_text(self.log_file, "".join(lines))

    def read_log(self) -> list[dict[str, Any]]:
        """Return the lines of log.jsonl."""
        lines = read_jsonl(self.log_file)
        return [check_record(LogLine, values, f"{self.log_file} line {number}") for number, values in lines]

    @writer_only
    def write_predictions(self, split: str, rows: Iterable[dict[str, Any]]) -> None:
        """Write the rows of predictions/SPLIT.jsonl."""
        self.predictions.mkdir(exist_ok=True)
        write_jsonl(self.predictions / f"{split}.jsonl", rows)

    def read_predictions(self, split: str) -> list[tuple[int, dict[str, Any]]]:
        """Return the rows of predictions/SPLIT.jsonl, each with the number of its line."""
        path = self.predictions / f"{split}.jsonl"
        lines = read_jsonl(path)
        return [(number, check_record(PredictionLine, values, f"{path} line {number}")) for number, values in lines]

    @writer_only
    def finish(self, metrics: RunMetrics) -> None:
        """Write metrics.json, which makes the run a finished one, and remove the checkpoint."""
        write_json(self.metrics_file, metrics.as_json())
        _remove(self.checkpoint)


class DeltaFolder(RunFolder):
    """A delta without its run, as Tuned.save(), `deltune combine` or PEFT write one: what it says stands for a config.

    Attributes:
        head: The head of the model that it is for, a key of `models.HEADS`.
        pairs: Whether its inputs are pairs of texts.
        is_foreign: Whether another library wrote it.
        names_labels: Whether its labels have names that were given with it.
    """

    exists = finished = True

    def __init__(
        self, folder: str | Path, base: str | None = None, *, pairs: bool = False, labels: Sequence[str] | None = None
    ) -> None:
        """Read what the folder says of itself, whose labels may have no names."""
        super().__init__(folder, writer=False, base=base)
        self.delta = self.folder
        self._problem_type: str | None = None
        self.is_foreign = is_foreign(self.folder) and not (self.folder / "delta.json").is_file()
        if self.is_foreign:
            self.head, name, count = foreign_base(self.folder)
            self._labels, self._trained = tuple(f"LABEL_{i}" for i in range(count or 0)), None
            self._method = str(read_options(self.folder).get("peft_type", "an adapter of AdapterHub"))
        else:
            facts = read_metadata(self.folder)
            self.head, name, self._trained = (
                head_of_class_name(facts.base.model) or "base",
                facts.base.name,
                facts.trained,
            )
            self._labels = tuple(label for _, label in facts.labels.pairs) if facts.labels else ()
            self._method = facts.method
            self._problem_type = facts.labels.problem_type if facts.labels else None
        self.names_labels = labels is not None
        if labels is not None:
            self._labels = named_labels(self._labels, labels, self.folder)
        self.pairs = pairs or bool(self._trained and self._trained.takes_pairs)
        self.base = base or name
        if not self.base:
            raise DeltuneError(f"{self.folder} does not name its base model: give --model BASE")

    @property
    def method(self) -> str:
        """The method of the delta, as an expression, or as another library calls it."""
        return self._method

    @property
    def config(self) -> RunConfig:
        """A config with the base model, and the lengths and the template of its run; its data is the folder."""
        options = self._trained.options if self._trained else {}
        return RunConfig.from_flat(model=self.base, data=str(self.folder), method="head", **options)

    @property
    def data(self) -> DataFacts:
        """The kind of task that the head and its labels are for."""
        trained = self._trained or TrainedFacts()
        single = "regression" if len(self._labels) == 1 else "classification"
        kinds = {
            "classification": {"regression": "regression", "multi_label_classification": "multilabel"}.get(
                self._problem_type or "", single
            ),
            "tagging": "tagging", "seq2seq-lm": "generation",
            "causal-lm": "chat" if trained.chat_template else "generation" if trained.generates else "language",
        }  # fmt: skip
        if self.head not in kinds:
            raise DeltuneError(f"{self.folder} is a delta for a model without a head, which answers nothing by itself")
        columns = dict(trained.columns or {}) or ({"text": "text", "pair": "pair"} if self.pairs else {})
        if not self.is_foreign and parse(self._method).tasks > 1:
            columns.setdefault("task", "task")
        return DataFacts(kind=kinds[self.head], columns=columns, labels=list(self._labels))

    @property
    def trained(self) -> TrainedFacts | None:
        """What the delta says of the inputs that it was trained on."""
        return self._trained

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the head's labels, in the order of their ids."""
        return self._labels


class ModelFolder(DeltaFolder):
    """A model with a trained head in the place of a run, such as `deltune merge` writes."""

    def __init__(self, folder: str | Path, *, pairs: bool = False) -> None:
        """Read what the model's files say of its head."""
        RunFolder.__init__(self, folder, writer=False)
        kind, self._labels, self.pooling, self._problem_type = read_trained_head(str(self.folder))
        if kind is None or kind not in HEADS_WITH_LABELS:
            raise DeltuneError(
                f"{self.folder} is a model without a trained head over labels, and spec.yaml is missing, which a run "
                "has: give a run, or for a language model deltune generate"
            )
        self.base, self.is_foreign, self.names_labels = str(self.folder), False, False
        self._method, self._trained = "head", merged_facts(self.folder)
        self.head, self.pairs = kind, pairs or bool(self._trained.takes_pairs)


def named_labels(before: Sequence[str], labels: Sequence[str], folder: Path) -> tuple[str, ...]:
    """Return names for labels that have none, as transformers counts them: LABEL_0, LABEL_1."""
    unnamed = [f"LABEL_{i}" for i in range(len(labels))]
    if list(before) != unnamed or len({*labels}) < len(labels):
        has = f"the labels {', '.join(before)}" if before else "no labels"
        raise DeltuneError(
            f"{folder} has {has}: --labels names those that have no names, each once, and here are {', '.join(labels)}"
        )
    return tuple(labels)


def open_run(
    folder: str | Path,
    base: str | None = None,
    *,
    pairs: bool = False,
    labels: Sequence[str] | None = None,
    models: bool = False,
) -> RunFolder:
    """Return a run, of several runs the best, or a delta without its run, also an adapter of PEFT or AdapterHub.

    `base`, `pairs` and `labels` are what such a folder does not say. With `models` a model with a trained head is taken
    too, such as `deltune merge` writes.
    """
    run = RunFolder(folder, base=base)
    if not run.exists and any((run.folder / name).is_file() for name in ("delta.json", "adapter_config.json")):
        return DeltaFolder(folder, base, pairs=pairs, labels=labels)
    if models and not run.exists and base is None and (run.folder / "config.json").is_file():
        return ModelFolder(folder, pairs=pairs)
    if labels is not None:
        raise DeltuneError(
            f"{run.folder} is a run, whose labels have names ({', '.join(run.labels)}): leave --labels out"
        )
    return run.best_run


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
