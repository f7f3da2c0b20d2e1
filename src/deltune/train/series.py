"""Runs of one config: tries values in order until one is no better, then further seeds, and aggregates them."""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import DivergedError, counted
from ..methods.registry import parse
from ..methods.spec import expressions_apart
from .config import RunConfig
from .records import Best, RunMetrics, SeriesRun
from .run_folder import RunFolder

TrainOne = Callable[[RunConfig, Path], RunMetrics]
"""Trains a single run in a folder."""

logger = logging.getLogger("deltune")


@dataclass
class Trial:
    """One run of a series: its folder's name, its seed and values, and its metrics, or why it diverged."""

    run: str
    config: RunConfig
    tried: dict[str, Any]
    metrics: RunMetrics | None = None
    error: str | None = None
    chosen: bool = False

    @property
    def rank(self) -> tuple[float, float]:
        """The quality of the run on validation, by the metric and then by the loss; -inf if it diverged."""
        if self.metrics is None:
            return -math.inf, -math.inf
        return self.metrics.best.quality, -self.metrics.validation.get("loss", 0.0)

    @property
    def outcome(self) -> str:
        """The result of the run on validation, in words."""
        best = None if self.metrics is None else self.metrics.best
        if best is None or best.metric is None or best.value is None:
            return "finished; there is no validation split to compare by"
        return f"validation {best.metric} {best.value:.4f} at epoch {best.epoch}"

    def line(self) -> SeriesRun:
        """Return what metrics.json of the series says of this run."""
        values: dict[str, Any] = {
            "run": self.run, "seed": self.config.runtime.seed, "tried": self.tried, "chosen": self.chosen,
        }  # fmt: skip
        if self.error is not None:
            values["error"] = self.error
        if self.metrics is not None:
            values |= {**self.metrics.scores, "seconds": self.metrics.seconds, "best": self.metrics.best}
        return SeriesRun(**values)


def verdict(runs: Sequence[SeriesRun]) -> str:
    """Return by what a search chose its values: the metric, the loss where all are equal in it, or nothing at all."""
    seed = runs[0].seed
    tried = [run for run in runs if run.seed == seed]
    measured = [run.best for run in tried if run.best is not None and run.best.metric is not None]
    if len(measured) < 2:
        finished = sum(run.best is not None for run in tried)
        reason = "without a validation split nothing decides" if finished > 1 else "no other run finished"
        return f"{'the first' if finished > 1 else 'the only one'} of {len(tried)} tried, {reason}"
    metric, values = measured[0].metric, {best.value for best in measured}
    if len(values) > 1 or metric == "loss":
        return f"the best of {len(tried)} tried by validation {metric}"
    return (
        f"the lowest validation loss of {len(tried)} tried; {metric} is {next(iter(values)):.4f} in all of them, so it "
        "decides nothing"
    )


def value_text(config: RunConfig, field: str, value: Any) -> str:
    """Return a value of a search as it is shown: methods with the arguments in which they differ."""
    if field != "method":
        return str(value)
    shown = (*config.runtime.search["method"], config.method.expression, value)
    return expressions_apart([parse(expression) for expression in shown])[-1]


def untried_values(config: RunConfig) -> list[str]:
    """Describe the values that were given for a field and that its search does not try."""
    values = config.flat(exclude_defaults=True)
    return [
        f"{field} {value_text(config, field, values[field])} was given and is not tried, only the values of the search "
        f"are: {', '.join(value_text(config, field, value) for value in tried)}"
        for field, tried in config.runtime.search.items()
        if field in values and values[field] not in tried
    ]


def first_peak(rank_of: Callable[[int], tuple[float, ...]], count: int) -> int:
    """Try values in order until one ranks no higher than the one before, which is chosen; -inf is passed over."""
    chosen, best = 0, rank_of(0)
    for i in range(1, count):
        rank = rank_of(i)
        if math.isfinite(best[0]) and rank <= best:
            break
        chosen, best = i, rank
    return chosen


def run_series(config: RunConfig, run: RunFolder, train_one: TrainOne) -> RunMetrics:
    """Train the runs of a config below run.folder/runs, and write their aggregate as its metrics.

    Values are tried under the first seed. The first values stay unless the next do better on validation, and so on
    until the next do not; of equal scores the lower loss is better, and a run that diverges is the worst. The other
    seeds run with the values that were chosen. The folder links to the delta and the predictions of the run that
    does best on validation.
    """
    run.remove_leftovers()
    run.begin_series(config)
    combinations, seeds = len(config.search_configs()), config.runtime.seeds or (config.runtime.seed,)
    of_seeds = counted(len(seeds), "seed") if len(seeds) > 1 else f"seed {seeds[0]}"
    under = f"{'the first of ' if len(seeds) > 1 else ''}{of_seeds}"
    logger.info("%s", f"up to {combinations} values tried under {under}" if combinations > 1 else of_seeds)
    for text in untried_values(config):
        logger.warning("%s", text)
    chosen, trials = _search(config, run, train_one)
    split_seed = seeds[0] if chosen.data.split_seed is None else chosen.data.split_seed
    for seed in seeds[1:]:  # on the same rows
        single = chosen.replace(seed=seed, split_seed=split_seed)
        trial = _run_trial(run, train_one, single, f"seed{seed}", config)
        if trial.metrics is None:
            raise DivergedError(trial.error)
        trial.chosen = True
        trials.append(trial)
    finished = {trial.run: trial.metrics for trial in trials if trial.metrics is not None}
    best = max((trial for trial in trials if trial.chosen), key=lambda trial: trial.rank)  # the first of equal ones
    for name in ("delta", "predictions", "environment.json"):
        run.link(name, Path("runs") / best.run / name)
    kept = finished[best.run]
    metrics = RunMetrics(
        **aggregate([finished[trial.run] for trial in trials if trial.chosen], config.runtime.aggregate),
        seconds=round(sum(metrics.seconds for metrics in finished.values()), 3),
        count=kept.count,
        truncated=kept.truncated,
        truncated_targets=kept.truncated_targets,
        signatures=kept.signatures,
        omitted=kept.omitted,
        best=Best(**{"run": best.run, **best.tried, **kept.best.as_json()}),
        runs=[trial.line() for trial in trials],
    )
    run.finish(metrics)
    return metrics


def _search(config: RunConfig, run: RunFolder, train_one: TrainOne) -> tuple[RunConfig, list[Trial]]:
    """Return the single run whose values are chosen, and every trial."""
    configs = config.search_configs()
    trials: list[Trial] = []

    def rank_of(i: int) -> tuple[float, float]:
        name = f"seed{configs[i].runtime.seed}" + (f"-try{i + 1}" if len(configs) > 1 else "")
        trials.append(_run_trial(run, train_one, configs[i], name, config))
        return trials[i].rank

    chosen = first_peak(rank_of, len(configs))
    if trials[chosen].metrics is None:
        raise DivergedError(trials[chosen].error)
    trials[chosen].chosen = True
    if len(trials) > 1:
        values = ", ".join(f"{name} {value_text(config, name, one)}" for name, one in trials[chosen].tried.items())
        logger.info("%s is kept, %s", values, verdict([trial.line() for trial in trials]))
    return configs[chosen], trials


def _run_trial(run: RunFolder, train_one: TrainOne, single: RunConfig, name: str, config: RunConfig) -> Trial:
    """Train one run, or read its metrics where it is finished; a run that diverges has an error instead."""
    values = single.flat()
    trial = Trial(name, single, {field: values[field] for field in config.runtime.search})
    described = "".join(f", {field} {value_text(config, field, value)}" for field, value in trial.tried.items())
    logger.info("%s: seed %d%s", name, single.runtime.seed, described)
    try:
        trial.metrics = train_one(single, run.runs / name)
    except DivergedError as error:
        trial.error = str(error)
        logger.info("%s", error)
    else:
        logger.info("%s: %s", name, trial.outcome)
    return trial


def aggregate(runs: Sequence[RunMetrics], how: str) -> dict[str, Any]:
    """Aggregate every metric of every split over runs; of two or more also their sample standard deviations."""
    middle = statistics.median if how == "median" else statistics.fmean
    aggregated: dict[str, Any] = {}
    deviations: dict[str, Any] = {}
    for split in ("validation", "test"):
        scores = [metrics.scores[split] for metrics in runs if split in metrics.scores]
        if scores:
            names = [name for name in scores[0] if all(name in one for one in scores)]
            values = {name: [one[name] for one in scores] for name in names}
            aggregated[split] = {name: middle(v) for name, v in values.items()}
            deviations[split] = {name: statistics.stdev(v) for name, v in values.items() if len(v) > 1}
    return {**aggregated, "aggregate": how, "std": deviations} if len(runs) > 1 else aggregated
