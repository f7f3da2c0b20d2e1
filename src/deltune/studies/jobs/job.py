"""The jobs of a study: what each kind does, a name that follows from its content, and the outcome of one."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypedDict

import torch
from transformers import PreTrainedModel

from ...anatomy.inspection import inspect
from ...errors import DeltuneError, check_extra
from ...files import file_lock
from ...models import load_config, load_model
from ...runtime.attach import attach, load
from ...train import (
    TASKS,
    Best,
    ModelCache,
    RunConfig,
    RunFolder,
    RunMetrics,
    Score,
    collect_environment,
    evaluate,
    evaluate_untuned,
    probe_model,
    rescore_with_statistics,
    task_kind_for,
    train,
    train_plainly,
)
from .timing import time_methods

Cell = Mapping[str, Any]
"""A place in a study's grid, axis -> label: {"model": "minilm", "task": "sick", "method": "lora", "seed": 0}."""


@dataclass(frozen=True)
class Outcome:
    """The result of one job, or the reason why there is none.

    Attributes:
        cell: Where the job stands in the study's grid.
        spec: The run's configuration, as JSON values.
        scores: Metric -> value on the test split.
        count: `Count.as_dict()` of the method.
        examples: Metric -> a number for each example of the test split, for metrics that are the mean of such numbers.
        curve: Lines of the training log.
        seconds: Duration of the job.
        error: Why there is no result; None if there is one.
        waiting: Whether the job has not run yet, as opposed to having failed.
        extra: What only this kind of job reports, such as the changes of each norm.
    """

    cell: Cell
    spec: Mapping[str, Any] = field(default_factory=dict)
    scores: Mapping[str, float] = field(default_factory=dict)
    count: Mapping[str, Any] = field(default_factory=dict)
    examples: Mapping[str, Sequence[float]] = field(default_factory=dict)
    curve: Sequence[Mapping[str, Any]] = ()
    seconds: float = 0.0
    error: str | None = None
    waiting: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)


class ResultValues(TypedDict, total=False):
    """The result of a job, as JSON values: a job has those that its kind measures, and all have their environment.

    `examples` has a number for each example, for metrics that are the mean of such numbers; `best` is the validation
    that the delta is of, with the values that a search chose; `omitted` says why a metric was not computed. Each of
    `changes` is of one gain or bias of a norm: its layer (None outside the layers), the module that the norm belongs
    to, the term, and the mean absolute change. `turns` is what `time_methods` returns.
    """

    split: str
    scores: Mapping[str, float]
    validation: Mapping[str, float]
    examples: Mapping[str, Sequence[float]]
    count: Mapping[str, Any]
    seconds: float
    cpu_seconds: float | None
    best: Mapping[str, Any]
    curve: Sequence[Mapping[str, Any]]
    signatures: Mapping[str, str]
    omitted: Mapping[str, str]
    environment: Mapping[str, Any]
    data: str | None
    changes: Sequence[Mapping[str, Any]]
    turns: Mapping[str, Any]


CURVE_PREFIXES = ("loss", "eval_")
"""Prefixes of the log fields that a curve keeps."""

CURVE_LOSSES = 20
"""The most losses of training steps that a curve keeps; validations are all kept."""

ENVIRONMENT_FIELDS = (
    "deltune", "commit", "python", "packages", "platform", "processor", "cpus", "device", "precision",
    "linear_backend", "threads", "processes",
)  # fmt: skip
"""The fields of environment.json that are stored with a result: where they are equal, so are results of one spec."""


@dataclass(frozen=True)
class Roots:
    """Where this machine has the models and data that specs name, and how it trains them. It is no part of a job.

    A model in the folder of models is called by the name of its folder; one of the hub is there as ORGANISATION/NAME or
    as NAME. `device_batch_size` is how many rows of a batch are computed at once, `launch` the number of processes of a
    run, and `sharding` is as for `deltune train`.
    """

    models: str | None = None
    data_root: str | None = None
    device_batch_size: int | None = None
    launch: int = 1
    sharding: str = "none"

    def locate(self, spec: Mapping[str, Any]) -> dict[str, Any]:
        """Return a job's spec with the folders of this machine in it; what is not here keeps its name."""
        located = {name: self.locate(value) if name in ("run", "other") else value for name, value in spec.items()}
        model, task = str(spec.get("model")), spec.get("task")
        for name in (model, Path(model).name) if self.models is not None else ():
            if (Path(str(self.models)) / name / "config.json").is_file():
                located["model"] = str(Path(str(self.models)) / name)
                break
        if self.device_batch_size is not None and "method" in spec:
            located["device_batch_size"] = self.device_batch_size
        if self.data_root is not None and task in TASKS and spec.get("data") is None:
            folder = Path(self.data_root) / TASKS[str(task)].folder
            located |= {"data_root": self.data_root} if folder.is_dir() else {}
        return located

    def relative(self, spec: Mapping[str, Any]) -> dict[str, Any]:
        """Return a run's spec without these folders, so that it is the same on every machine."""
        named = {name: value for name, value in spec.items() if (name, value) != ("data_root", self.data_root)}
        model = Path(str(spec.get("model")))
        return {**named, "model": model.name} if self.models is not None and str(model.parent) == self.models else named


NO_ROOTS = Roots()


@dataclass(frozen=True, eq=False)
class Job:
    """One unit of work of a study.

    Attributes:
        kind: A key of `RUNNERS`.
        spec: Its arguments, as JSON values.
        requires: Jobs that must be done before this one.
        roots: Where this machine has what the spec names.
        cell: The labels of the cell that it fills, by which progress and reports call it. They are no part of what
            the job is: several studies may have it in cells of different names.
    """

    kind: str
    spec: Mapping[str, Any]
    requires: tuple[Job, ...] = ()
    roots: Roots = NO_ROOTS
    cell: Cell | None = None

    @cached_property
    def name(self) -> str:
        """The first 16 digits of the SHA-256 of kind and spec, so that equal jobs have equal names."""
        text = json.dumps([self.kind, self.spec], sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Job) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def label(self) -> str:
        """The job in a few words: the labels of its cell; without one its kind, method, model, data and seed."""
        if self.cell is not None:
            labels = {axis: str(label) for axis, label in self.cell.items()}
            return " · ".join(f"{axis} {text}" if text[:1].isdigit() else text for axis, text in labels.items())
        spec = self.spec.get("run", self.spec)
        source = spec.get("task") if spec.get("data") is None else Path(str(spec["data"])).name
        seed = f"seed {spec.get('seed', 0)}" if "method" in spec else ""
        model = Path(str(spec.get("model", ""))).name
        parts = ("" if self.kind == "run" else self.kind, spec.get("method", ""), model, source, seed)
        return " · ".join(str(part) for part in parts if part)

    @property
    def affinity(self) -> tuple[Any, ...]:
        """Jobs of equal affinity share a backbone and data; a worker does them one after the other."""
        return tuple(self.spec.get(key) for key in ("model", "data", "task", "max_train_rows", "seed"))

    def with_requirements(self) -> list[Job]:
        """Return every job that this one requires, directly or not, and then the job itself."""
        return [*(job for required in self.requires for job in required.with_requirements()), self]


def topological_order(jobs: Iterable[Job]) -> list[Job]:
    """Return the jobs and all that they require, each once and after what it requires."""
    return list(dict.fromkeys(one for job in jobs for one in job.with_requirements()))


def run_job(spec: RunConfig, roots: Roots = NO_ROOTS) -> Job:
    """Return the job that trains and scores one run."""
    return Job("run", roots.relative(spec.canonical()), roots=roots)


JobMaker = Callable[[RunConfig, Roots], Job]
"""The configuration of a run, and where this machine has its model and data -> the job of the run."""


def run_folder(runs: Path, spec: RunConfig) -> Path:
    """Return the run directory of a spec inside a study's folder of runs."""
    return runs / spec.name


def config_of(job: Job) -> RunConfig:
    """Return the configuration that a job of kind "run" trains, with the folders of this machine in it."""
    return RunConfig.from_canonical(job.roots.locate(job.spec))


def _run(values: Mapping[str, Any], roots: Roots, runs: Path, model_cache: ModelCache) -> ResultValues:
    spec = RunConfig.from_canonical(values)  # as in config_of: execute() has located the values
    folder = run_folder(runs, spec)
    metrics = _train(spec, folder, model_cache, roots)
    run = RunFolder(folder).best_run
    scores = rescore_with_statistics(run.folder)
    split = next((s for s in ("test", "validation") if s in metrics.scores), None)
    if split is None:
        raise DeltuneError(
            f"data of {folder} has neither a test nor a validation split, so there is nothing to compare"
        )
    environment = run.environment
    return {
        "split": split,
        "scores": metrics.scores[split],
        "validation": metrics.validation,
        "examples": _examples(scores[split]),
        "count": metrics.count,
        "seconds": metrics.seconds,
        "cpu_seconds": metrics.cpu_seconds,
        "best": metrics.best.as_json(),
        "curve": _curve(run.read_log()),
        "signatures": metrics.signatures,
        "omitted": metrics.omitted,
        "environment": _stored_environment(environment),
        "data": environment.get("data", {}).get("fingerprint"),
    }


def _train(spec: RunConfig, folder: Path, model_cache: ModelCache, roots: Roots) -> RunMetrics:
    spec = spec.replace(probe="off")
    if roots.launch == 1:
        return train(spec, folder, progress=False, cache=model_cache, report=False)
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(spec.yaml())
        file.flush()
        _train_in_processes(["--launch", str(roots.launch), "--sharding", roots.sharding, file.name], folder)
    return RunFolder(folder).metrics


LIFELINE = "DELTUNE_LIFELINE"
"""The variable that names the end of a pipe, by which `deltune train` ends when this process does."""


def _train_in_processes(arguments: Sequence[str], folder: Path) -> None:
    """Train by the command that a user would give, whose processes have the threads of this one between them."""
    read_end, write_end = os.pipe()
    threads = max(1, torch.get_num_threads() // int(arguments[1]))
    environment = {**os.environ, LIFELINE: str(read_end), "OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, "-m", "deltune", "train", *arguments, "--output", str(folder), "--quiet"]
    try:
        ended = subprocess.run(command, env=environment, pass_fds=(read_end,), capture_output=True, text=True)
    finally:
        os.close(read_end)
        os.close(write_end)
    if ended.returncode:
        raise DeltuneError(f"{ended.stderr.strip()[-1000:]} (exit code {ended.returncode} of {' '.join(command[1:])})")


def _examples(scores: Mapping[str, Score]) -> dict[str, list[float]]:
    """Return a number for each example, of the metrics that are the mean of such numbers."""
    return {
        name: [round(value, 6) for value in score.per_example]
        for name, score in scores.items()
        if score.per_example is not None
    }


def _trainer(values: Mapping[str, Any], roots: Roots, runs: Path, model_cache: ModelCache) -> ResultValues:
    """Train and score a run by transformers' own Trainer, the model adapted by deltune or by PEFT."""
    spec = RunConfig.from_canonical(values["run"])

    def adapt(model: PreTrainedModel) -> Any:
        if values["peft"] is None:
            attach(model, spec.method.expression, pooling=spec.method.pooling or "model")
            return model
        check_extra("peers", "PEFT's side of a comparison needs")
        import peft

        options = dict(values["peft"])
        return peft.get_peft_model(model, getattr(peft, options.pop("kind"))(**options))

    run = train_plainly(spec, adapt)
    test = run.results.get("test", run.results["validation"])
    best = Best(step=run.steps, metric=run.metric, value=run.results["validation"].metrics[run.metric])
    return {
        "scores": {**test.metrics, "peak_bytes": float(run.peak_bytes)},
        "examples": _examples(test.statistics),
        "count": {
            "trained": run.trained,
            "percent": 100 * run.trained / run.parameters,
            "denominator_size": run.parameters,
        },
        "seconds": run.seconds,
        "best": best.as_json(),
        "curve": _curve(run.losses),
        "data": run.fingerprint,
    }


def _curve(log: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the validations of a log and some of its losses, evenly spaced."""
    lines = [
        {key: value for key, value in line.items() if key == "step" or key.startswith(CURVE_PREFIXES)}
        for line in log
        if any(key.startswith(CURVE_PREFIXES) for key in line)
    ]
    losses = [line for line in lines if "loss" in line]
    count = min(len(losses), CURVE_LOSSES)
    kept = {id(losses[i * (len(losses) - 1) // max(1, count - 1)]) for i in range(count)}
    return [line for line in lines if "loss" not in line or id(line) in kept]


def _stored_environment(environment: Mapping[str, Any]) -> dict[str, Any]:
    return {field: environment[field] for field in ENVIRONMENT_FIELDS if field in environment}


def _trained_run(values: Mapping[str, Any], roots: Roots, runs: Path, model_cache: ModelCache) -> RunFolder:
    """Return the run whose delta is needed. One whose result was imported has none yet and is trained."""
    spec = RunConfig.from_canonical(values["run"])
    folder = run_folder(runs, spec)
    with file_lock(folder.with_suffix(".lock")):  # another worker may need it too
        if not RunFolder(folder).finished:
            _train(spec, folder, model_cache, roots)
    return RunFolder(folder)


def _transfer(values: Mapping[str, Any], roots: Roots, runs: Path, model_cache: ModelCache) -> ResultValues:
    """Evaluate a run's delta on another task without further training."""
    run = _trained_run(values, roots, runs, model_cache)
    results = evaluate(run.folder, splits=("test",), other=values["other"])
    return {"scores": results["test"], "count": run.metrics.count, "seconds": 0.0}


def _probe(values: Mapping[str, Any], roots: Roots, runs: Path, model_cache: ModelCache) -> ResultValues:
    """Fit a linear probe on the rows of a run, without training anything of the model."""
    scores = probe_model(RunConfig.from_canonical(values["run"])).scores
    return {"scores": scores.get("test", scores["validation"]), "seconds": 0.0}


def _untuned(values: Mapping[str, Any], roots: Roots, runs: Path, model_cache: ModelCache) -> ResultValues:
    """Score the model of a run as it is."""
    return {"scores": evaluate_untuned(RunConfig.from_canonical(values["run"]), ("test",))["test"], "seconds": 0.0}


NORM_TERMS = {"norm.gain": "gain", "norm.bias": "bias"}
"""Role of a tensor -> the term of a norm."""


def _measure_norm_changes(values: Mapping[str, Any], roots: Roots, runs: Path, model_cache: ModelCache) -> ResultValues:
    """Measure how far a run moved each gain and bias of the norms (LN figure 3)."""
    run = _trained_run(values, roots, runs, model_cache).best_run
    spec = RunConfig.from_canonical(values["run"])
    kind = task_kind_for(run.environment["data"]["kind"], load_config(spec.model.name), spec.generation.answer)
    base = load_model(spec.model.name, kind.head, None, "float32")
    anatomy = inspect(base)
    norms = {norm.path: norm for norm in (*(norm for layer in anatomy.layers for norm in layer.norms), *anatomy.norms)}
    tensors = [tensor for tensor in anatomy.tensors if tensor.role in NORM_TERMS]
    before = {tensor.name: base.get_parameter(tensor.name).detach().clone() for tensor in tensors}
    tuned = load(base, run.delta)
    changes: list[Mapping[str, Any]] = []
    for tensor in tensors:
        after, norm = base.get_parameter(tensor.name).detach(), norms[tensor.name.rpartition(".")[0]]
        if not torch.equal(after, before[tensor.name]):
            module = " and ".join(dict.fromkeys(norm.of)) or norm.place
            value = (after - before[tensor.name]).abs().mean().item()
            changes.append({"layer": tensor.layer, "module": module, "term": NORM_TERMS[tensor.role], "value": value})
    tuned.detach()
    return {"changes": changes, "seconds": 0.0}


def _time_methods(values: Mapping[str, Any], roots: Roots, runs: Path, model_cache: ModelCache) -> ResultValues:
    return {"turns": time_methods(**values), "seconds": 0.0}


def trainer_job(spec: RunConfig, roots: Roots = NO_ROOTS, peft: Mapping[str, Any] | None = None) -> Job:
    """Return the job that trains a run by transformers' Trainer, its method by deltune or by a config of PEFT."""
    return Job("trainer", {"run": roots.relative(spec.canonical()), "peft": peft}, roots=roots)


def transfer_job(run: Job, other: Mapping[str, Any]) -> Job:
    """Return the job that evaluates a run's delta on another task."""
    return Job("transfer", {"run": run.spec, "other": dict(other)}, (run,), run.roots)


def term_change_job(run: Job) -> Job:
    """Return the job that measures how far a run moved each gain and bias of the norms."""
    return Job("terms", {"run": run.spec}, (run,), run.roots)


def timing_job(model: str, methods: Mapping[str, str], roots: Roots = NO_ROOTS, **options: Any) -> Job:
    """Return the job that times methods side by side (`time_methods`)."""
    return Job("time", {"model": model, "methods": dict(methods), **options}, roots=roots)


RUNNERS: dict[str, Callable[[Mapping[str, Any], Roots, Path, ModelCache], ResultValues]] = {
    "run": _run,
    "trainer": _trainer,
    "transfer": _transfer,
    "probe": _probe,
    "untuned": _untuned,
    "terms": _measure_norm_changes,
    "time": _time_methods,
}
"""Kind of job -> the function that does it: (spec, roots, folder of runs, the worker's model cache) -> result."""


def execute(job: Job, runs: Path, model_cache: ModelCache) -> ResultValues:
    """Do a job and return its result."""
    result = RUNNERS[job.kind](job.roots.locate(job.spec), job.roots, runs, model_cache)
    if "environment" not in result:
        facts = {"device": "cpu", "threads": torch.get_num_threads()}
        result["environment"] = _stored_environment(collect_environment(facts))
    return result
