"""What a run's files hold, and on which machine it ran.

A file is described by a pydantic model (`Record`), so that a damaged file is refused with a list of what is wrong.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .._version import __version__
from ..errors import error_from_problems, excerpt
from ..files import read_json_object
from .data.columns import TASK_COLUMNS
from .metrics.registry import METRICS

MAX_PROBLEMS = 10
"""The most problems of one file that are listed."""


class Record(BaseModel):
    """A JSON object of which the declared fields are read; it may have others, which are kept."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)


class DataFacts(Record):
    """The data set of a run, as `TaskData.summary` describes it.

    Attributes:
        fingerprint: A digest of all rows, by which changed data is noticed.
        kind: The kind of task, a key of `data.columns.TASK_COLUMNS`.
        source: The data set's name or folder.
        columns: The columns of the inputs and of the answer, by role.
        digests: A digest of the rows of every split.
        rows: The number of rows of every split.
        labels: The names of the labels; empty where there are none.
        tag_scheme: The scheme of tags, as `TaskData.tag_scheme`.
    """

    fingerprint: str | None = None
    kind: str = Field(default="classification", pattern=f"^({'|'.join(TASK_COLUMNS)})$")
    source: str = ""
    columns: dict[str, str] = {}
    digests: dict[str, str] = {}
    rows: dict[str, int] = {}
    labels: list[str] = []
    tag_scheme: str | None = None


class Environment(Record):
    """environment.json: versions, machine, device and data of a run when it was started."""

    data: DataFacts = DataFacts()


def signed_score(metric: str, value: float) -> float:
    """Return the value of a metric or of the loss, negated if lower is better."""
    return -value if lower_is_better(metric) else value


def lower_is_better(metric: str) -> bool:
    """Return whether a lower value of a metric is the better one: of the loss, and of those registered as such."""
    return metric == "loss" or (metric in METRICS and METRICS[metric].better == "lower")


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

    @property
    def quality(self) -> float:
        """The value, negated if lower is better; 0 without a validation split."""
        return 0.0 if self.metric is None or self.value is None else signed_score(self.metric, self.value)

    def as_json(self) -> dict[str, Any]:
        """Return the values as metrics.json has them, and the values that were tried."""
        return self.model_dump(exclude_unset=True)


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


class ProbeRecord(Record):
    """The scores of a linear probe on the features of the frozen model, and its inverse penalty C."""

    features: str
    C: Number
    validation: dict[str, Number] = {}
    test: dict[str, Number] = {}

    @property
    def scores(self) -> dict[str, dict[str, Number]]:
        """The scores of the splits that the data has, by split."""
        return {split: scores for split, scores in (("validation", self.validation), ("test", self.test)) if scores}


class RunMetrics(Record):
    """metrics.json: the results of a finished run.

    Attributes:
        validation: The scores of the validation split, by metric; empty where there is none.
        test: The scores of the test split.
        aggregate: How the scores of several runs are aggregated: "mean" or "median".
        std: The standard deviations of the scores of several runs, by split and metric.
        seconds: How long training took.
        cpu_seconds: How many seconds of the processor it took, of all threads of the main process; work of other
            programs does not lengthen them. None where a checkpoint did not count them.
        count: What is trained, as `Count.as_dict` has it.
        best: The validation that the delta is of.
        truncated: How many inputs of every split were cut.
        truncated_targets: How many targets of every split were cut.
        signatures: How every metric was computed.
        omitted: Why a metric could not be computed.
        intervals: The 95 % intervals of the scores over the examples, by split and metric; two numbers each.
        probe: What a linear probe of the frozen model scores, by split, its features and its penalty.
        runs: The single runs of several.
    """

    validation: dict[str, Number] = {}
    test: dict[str, Number] = {}
    aggregate: str | None = None
    std: dict[str, dict[str, Number]] = {}
    seconds: Number
    cpu_seconds: Number | None = None
    count: dict[str, Any]
    best: Best
    truncated: dict[str, int]
    truncated_targets: dict[str, int]
    signatures: dict[str, str]
    omitted: dict[str, str]
    intervals: dict[str, dict[str, list[Number]]] = {}
    probe: ProbeRecord | None = None
    runs: list[SeriesRun] = []

    @property
    def scores(self) -> dict[str, dict[str, Number]]:
        """The scores of the splits that the data has, by split."""
        return {s: scores for s, scores in (("validation", self.validation), ("test", self.test)) if scores}

    def as_json(self) -> dict[str, Any]:
        """Return the values as metrics.json has them."""
        values = self.model_dump(exclude_unset=True)
        if self.probe is None:
            values.pop("probe", None)
        return values


class LogLine(Record):
    """One line of log.jsonl: what the Trainer logs (loss, learning rate, eval_*); only `step` is checked."""

    step: int = 0


class PredictionLine(Record):
    """A line of predictions/SPLIT.jsonl, as far as scoring it again reads it."""

    id: str | int
    prediction: Any
    reference: Any


def check_record(kind: type[BaseModel], values: dict[str, Any], where: str) -> dict[str, Any]:
    """Check the values of a file and return them as they are."""
    try:
        kind.model_validate(values)
    except ValidationError as error:
        problems = [
            f"{'.'.join(map(str, e['loc'])) or 'the object'}: {e['msg'][0].lower()}{e['msg'][1:]}"
            + ("" if e["type"] == "missing" else f", not {excerpt(e['input'])}")
            for e in error.errors()[:MAX_PROBLEMS]
        ]
        raise error_from_problems(f"{where} is not as deltune wrote it", problems) from error
    return values


def read_record(kind: type[BaseModel], path: Path) -> dict[str, Any]:
    """Read a JSON object that a run wrote, check it, and return it as it is."""
    return check_record(kind, read_json_object(path), str(path))


GIT_SECONDS = 5.0
"""Seconds that git may take to say at which commit a folder is."""

PACKAGES = ("torch", "transformers", "accelerate", "tokenizers", "datasets", "safetensors", "numpy", "scikit-learn")
"""The packages whose versions are written to environment.json."""

CPUINFO = Path("/proc/cpuinfo")
"""Where Linux describes the processors; virtual machines hide the name there, but not the numbers."""


def processor_name() -> str:
    """Return the name and the numbers of the first processor that Linux shows, or what Python knows of it."""
    facts: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            facts.setdefault(name.strip(), value.strip())
    if "model name" not in facts:
        return platform.processor() or platform.machine()
    return f"{facts['model name']}, family {facts.get('cpu family')}, model {facts.get('model')}"


def command_line(words: Iterable[str]) -> str:
    """Return words as they are typed into a shell, in double quotes where they need some and that is enough."""

    def quoted(word: str) -> str:
        single = shlex.quote(word)
        return single if single == word or re.search(r'["$`\\!]', word) else f'"{word}"'

    return " ".join(map(quoted, words))


def is_deltune(program: str) -> bool:
    """Return whether a program is deltune, started as a command or by python -m."""
    path = Path(program)
    return path.name == "deltune" or (path.name == "__main__.py" and path.parent.name == "deltune")


@functools.cache
def git_commit(folder: Path, tracked: str = ".") -> str | None:
    """Return the commit of the git repository that tracks a file of a folder, with "-dirty" if the folder was changed.

    None outside of a repository, and without git.
    """

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}  # nothing is written into the repository
        return subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=GIT_SECONDS, env=environment
        ).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", tracked)
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".")  # results beside it may have changed
        return git("rev-parse", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None


def collect_environment(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the values of environment.json: versions, machine, and facts of the run itself."""
    versions = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        "command": command_line(["deltune" if is_deltune(sys.argv[0]) else sys.argv[0], *sys.argv[1:]]),
        "deltune": __version__,
        "commit": git_commit(Path(__file__).parents[1], "train/records.py"),
        "project_commit": git_commit(Path.cwd()),
        "python": platform.python_version(),
        "packages": versions,
        "platform": platform.platform(),
        "processor": processor_name(),
        "cpus": os.cpu_count(),
        **facts,
    }
