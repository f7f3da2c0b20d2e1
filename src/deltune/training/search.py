"""Several runs of one spec: values tried in order of priority, then seeds, and what they come to together."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import DivergedError
from ..metrics.registry import METRICS
from .config import RunSpec
from .run_dir import RunDir

One = Callable[[RunSpec, Path], dict[str, Any]]
"""Does a single run in a folder; its metrics."""

SPLITS = ("validation", "test")

told = logging.getLogger("deltune")


def run_series(spec: RunSpec, run: RunDir, one: One) -> dict[str, Any]:
    """The runs of a spec below run.folder/runs, and their aggregate as its metrics; `one` does each.

    Values are tried under the first seed: the first stay unless the next do better on validation, and so on until
    the next do not; a try that diverges does worse than any other. With what is chosen the other seeds run. Delta and
    predictions of the folder are those of the run that does best on validation.
    """
    run.sweep()
    run.open(spec)
    tries, seeds = len(spec.tries()), len(spec.seeds)
    told.info(
        "%s%d seed%s", f"up to {tries} values tried under the first of " if tries > 1 else "", seeds, "s"[: seeds > 1]
    )
    chosen, lines = _search(spec, run, one)
    for seed in spec.seeds[1:]:
        lines.append(_line(run, one, chosen.model_copy(update={"seed": seed}), f"seed{seed}", spec))
        if not lines[-1]["metrics"]:
            raise DivergedError(lines[-1]["error"])
        lines[-1]["chosen"] = True
    kept = [line for line in lines if line["chosen"]]
    best = max(kept, key=lambda line: _value(line["metrics"]))  # the first of equal ones
    for name in ("delta", "predictions", "environment.json"):
        run.point(name, Path("runs") / best["run"] / name)
    metrics = aggregate(kept, spec.aggregate) | {
        "seconds": round(sum(line["metrics"]["seconds"] for line in lines if line["metrics"]), 3),
        **{
            name: best["metrics"][name] for name in ("count", "truncated", "truncated_targets", "signatures", "omitted")
        },
        "best": {"run": best["run"], **best["tried"], **best["metrics"]["best"]},
        "runs": [_told(line) for line in lines],
    }
    run.finish(metrics)
    return metrics


def _search(spec: RunSpec, run: RunDir, one: One) -> tuple[RunSpec, list[dict[str, Any]]]:
    """The single run whose values are chosen, and a line for every try."""
    tries = spec.tries()
    lines: list[dict[str, Any]] = []
    chosen = 0
    for i, single in enumerate(tries):
        name = f"seed{single.seed}" + (f"-try{i + 1}" if len(tries) > 1 else "")
        lines.append(_line(run, one, single, name, spec))
        if lines[chosen]["metrics"] and i and _value(lines[i]["metrics"]) <= _value(lines[chosen]["metrics"]):
            break
        chosen = i
    if not lines[chosen]["metrics"]:
        raise DivergedError(lines[chosen]["error"])
    lines[chosen]["chosen"] = True
    return tries[chosen], lines


def _line(run: RunDir, one: One, single: RunSpec, name: str, spec: RunSpec) -> dict[str, Any]:
    """One run, done or found done; one that diverged has no metrics but an error."""
    tried = {field: single.rate if field == "lr" else getattr(single, field) for field in spec.search}
    told.info("%s: seed %d%s", name, single.seed, "".join(f", {field} {value}" for field, value in tried.items()))
    line = {"run": name, "seed": single.seed, "tried": tried, "chosen": False, "metrics": {}}
    try:
        line["metrics"] = one(single, run.runs / name)
    except DivergedError as error:
        line["error"] = str(error)
        told.info("%s", error)
    return line


def _value(metrics: Mapping[str, Any]) -> float:
    """How good a run is on validation, more is better; without validation all are the same."""
    if not metrics:
        return -float("inf")
    best = metrics["best"]
    if "metric" not in best:
        return 0.0
    lower = best["metric"] == "loss" or METRICS[best["metric"]].better == "lower"
    return -best["value"] if lower else best["value"]


def aggregate(lines: Sequence[Mapping[str, Any]], how: str) -> dict[str, Any]:
    """Mean or median of every metric of every split over runs; with two runs or more also the standard deviation."""
    found: dict[str, Any] = {}
    spread: dict[str, Any] = {}
    for split in SPLITS:
        several = [line["metrics"][split] for line in lines if split in line["metrics"]]
        names = [name for name in (several[0] if several else ()) if all(name in one for one in several)]
        values = {name: [one[name] for one in several] for name in names}
        if several:
            middle = statistics.median if how == "median" else statistics.fmean
            found[split] = {name: middle(v) for name, v in values.items()}
            spread[split] = {name: statistics.stdev(v) for name, v in values.items() if len(v) > 1}
    return {**found, "aggregate": how, "std": spread} if len(lines) > 1 else found


def _told(line: Mapping[str, Any]) -> dict[str, Any]:
    """What metrics.json says of a run."""
    scores = {name: line["metrics"][name] for name in (*SPLITS, "seconds", "best") if name in line["metrics"]}
    return {name: line[name] for name in ("run", "seed", "tried", "chosen", "error") if name in line} | scores
