"""What a study asks to be done, piece by piece: named by its content, done in a worker, answered as JSON values."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ...anatomy.inspection import inspect
from ...errors import DeltuneError
from ...models import load_config, load_model
from ...runtime.attaching import load
from ...training.config import RunConfig
from ...training.inference import evaluate, rescore_with_statistics
from ...training.model_cache import ModelCache
from ...training.run_dir import RunDir
from ...training.task_setup import task_kind_for
from ...training.train import train
from .timing import time_methods


def changes(model: str, kind: str, delta: str | Path) -> list[dict[str, Any]]:
    """For every gain and bias of the layers that the delta trains: layer, module, term and mean absolute change.

    module: what its norm belongs to (attention, ffn); norms outside the layers have layer None. Source: LN figure 3.
    Errors: whatever loading the model or the delta raises.
    """
    base = load_model(model, kind, None, "float32")
    anatomy = inspect(base)
    belongs = {norm.path: norm for layer in anatomy.layers for norm in layer.norms}
    belongs |= {norm.path: norm for norm in anatomy.norms}
    terms = {"norm.gain": "gain", "norm.bias": "bias"}
    before = {t.name: base.get_parameter(t.name).detach().clone() for t in anatomy.tensors if t.role in terms}
    tuned = load(base, delta)
    found = []
    for tensor in anatomy.tensors:
        if tensor.role not in terms:
            continue
        after = base.get_parameter(tensor.name).detach()
        if torch.equal(after, before[tensor.name]):
            continue
        norm = belongs[tensor.name.rpartition(".")[0]]
        found.append(
            {
                "layer": tensor.layer,
                "module": " and ".join(dict.fromkeys(norm.of)) or norm.place,
                "term": terms[tensor.role],
                "value": (after - before[tensor.name]).abs().mean().item(),
            }
        )
    tuned.detach()
    return found


CURVE = ("loss", "eval_")
"""Beginnings of what a curve keeps of a log."""


@dataclass(frozen=True, eq=False)
class Job:
    """One piece of work: what kind it is, its values (JSON), and the works that must be done before."""

    kind: str
    spec: Mapping[str, Any]
    needs: tuple[Job, ...] = ()

    @cached_property
    def name(self) -> str:
        """The first 16 digits of the SHA-256 of kind and values: equal for works that mean the same."""
        text = json.dumps([self.kind, self.spec], sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Job) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def kin(self) -> tuple[Any, ...]:
        """Works of one kin share a backbone and data: a worker does them one after the other."""
        return tuple(self.spec.get(key) for key in ("model", "data", "task", "max_train_rows", "seed"))

    def all(self) -> list[Job]:
        """Itself, after everything that it needs."""
        return [*(work for need in self.needs for work in need.all()), self]


def topological_order(works: Iterable[Job]) -> list[Job]:
    """The works and all that they need, each once and after what it needs."""
    return list(dict.fromkeys(one for work in works for one in work.all()))


def run_job(spec: RunConfig) -> Job:
    """The work of training and scoring what a spec says."""
    return Job("run", spec.canonical())


def run_folder(runs: Path, spec: RunConfig) -> Path:
    """Where the run of a spec is, below a study's folder of runs."""
    return runs / spec.name


def _run(values: Mapping[str, Any], runs: Path, parts: ModelCache) -> dict[str, Any]:
    spec = RunConfig.from_flat(**values)
    folder = run_folder(runs, spec)
    metrics = train(spec, folder, progress=False, cache=parts)
    kept = RunDir(folder).best_run
    scored = rescore_with_statistics(kept.folder)
    split = next((s for s in ("test", "validation") if s in metrics.scores), None)
    if split is None:
        raise DeltuneError(
            f"data of {folder} has neither a test nor a validation split, so there is nothing to compare"
        )
    lines = kept.read_log()
    return {
        "split": split,
        "scores": metrics.scores[split],
        "validation": metrics.validation,
        "examples": {
            name: [round(value, 6) for value in score.per_example]
            for name, score in scored[split].items()
            if score.per_example is not None
        },
        "count": metrics.count,
        "seconds": metrics.seconds,
        "best": metrics.best.as_json(),
        "curve": [
            {key: value for key, value in line.items() if key == "step" or key.startswith(CURVE)}
            for line in lines
            if any(key.startswith(CURVE) for key in line)
        ],
        "signatures": metrics.signatures,
        "omitted": metrics.omitted,
    }


def _transfer(values: Mapping[str, Any], runs: Path, parts: ModelCache) -> dict[str, Any]:
    """A run's delta on another task, as it is."""
    folder = run_folder(runs, RunConfig.from_flat(**values["run"]))
    results = evaluate(folder, splits=("test",), other=values["other"])
    return {"scores": results["test"], "count": RunDir(folder).metrics.count, "seconds": 0.0}


def _terms(values: Mapping[str, Any], runs: Path, parts: ModelCache) -> dict[str, Any]:
    """How far a run moved each gain and bias."""
    spec = RunConfig.from_flat(**values["run"])
    run = RunDir(run_folder(runs, spec)).best_run
    kind = task_kind_for(run.environment["data"]["kind"], load_config(spec.model.name), spec.generation.answer)
    return {"changes": changes(spec.model.name, kind.loads, run.delta), "seconds": 0.0}


def _time(values: Mapping[str, Any], runs: Path, parts: ModelCache) -> dict[str, Any]:
    """Methods side by side, by the clock."""
    return {"turns": time_methods(**values), "seconds": 0.0}


def transfer_job(spec: RunConfig, other: Mapping[str, Any]) -> Job:
    """A run's delta on another task; `other`: fields of a spec (evaluate)."""
    return Job("transfer", {"run": spec.canonical(), "other": dict(other)}, (run_job(spec),))


def term_change_job(spec: RunConfig) -> Job:
    """How far a run moved each gain and bias."""
    return Job("terms", {"run": spec.canonical()}, (run_job(spec),))


def timing_job(model: str, methods: Mapping[str, str], **options: Any) -> Job:
    """Methods side by side, by the clock (timing.turns)."""
    return Job("time", {"model": model, "methods": dict(methods), **options})


DOES: dict[str, Callable[[Mapping[str, Any], Path, ModelCache], dict[str, Any]]] = {
    "run": _run,
    "transfer": _transfer,
    "terms": _terms,
    "time": _time,
}
"""Kind of work -> what does it: (its values, the folder of runs, what the worker's runs share) -> its result."""


def execute(work: Job, runs: Path, parts: ModelCache) -> dict[str, Any]:
    """The result of a work. Errors: whatever is wrong with it."""
    return DOES[work.kind](work.spec, runs, parts)
