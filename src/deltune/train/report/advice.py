"""Advice about a finished run: nothing learned, a loss that rose, or training cut short."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from ..config import RunConfig
from ..inference import SPLITS
from ..metrics.intervals import share_interval
from ..metrics.registry import METRICS
from ..rates import usual_rate
from ..records import DataFacts, RunMetrics, lower_is_better, signed_score
from ..run_folder import RunFolder
from .error_analysis import Analysis, analyse

FEW_ROWS = 20
"""With fewer rows of a split its accuracy says too little to advise another learning rate."""
NEGLIGIBLE = 0.005
"""Accuracy above the majority class that counts as none."""
FEW_ENTITIES = 0.05
"""A score of tagged entities up to that says that hardly any of them is found."""
HARDLY_FALLEN = 0.95
"""A training loss that ends above that share of its first value has hardly fallen."""
RISEN = 1.1
"""A training loss of that many times its first value has risen."""
IMPROVING = 0.98
"""A validation loss that the last validation brought below that share of the one before is still falling."""
FEWEST_STEPS = 3
"""Of fewer steps, whose losses differ by their batches, it is not said that they diverged."""

SEARCHABLE_STEPS = 150
"""From about so many steps on a run is long enough to tell a rate that is too low."""
ABOVE_DEFAULT = 1.5
"""From so many times the default on a learning rate counts as high."""
RATE_FACTOR = 5.0
"""By how much another learning rate to try differs."""


@dataclass(frozen=True)
class FinishedRun:
    """The files of a finished run, each read once.

    Attributes:
        config: Its config; of several runs the config of the series.
        best: The folder of the single run whose delta it has: itself, or the best of several.
        split: The split that is analysed: test, or else validation; "" if the data has neither.
    """

    run: RunFolder
    config: RunConfig
    metrics: RunMetrics
    best: RunFolder
    best_config: RunConfig
    best_metrics: RunMetrics
    data: DataFacts
    log: Sequence[Mapping[str, Any]]
    split: str
    analysis: Analysis


def read_finished(run: RunFolder, metrics: RunMetrics | None = None) -> FinishedRun:
    """Read a finished run."""
    config, metrics = run.config, metrics or run.metrics
    best = run.best_run if config.is_series else run
    best_config, best_metrics = (best.config, best.metrics) if config.is_series else (config, metrics)
    data = best.data
    split = next((s for s in reversed(SPLITS) if (best.predictions / f"{s}.jsonl").is_file()), "")
    lines = [line for _, line in best.read_predictions(split)] if split else []
    log = best.read_log() if best.log_file.is_file() else []
    analysis = analyse(data.kind, lines, data.labels, data.tag_scheme)
    return FinishedRun(run, config, metrics, best, best_config, best_metrics, data, log, split, analysis)


def advice(finished: FinishedRun) -> list[str]:
    """Return what to know of a finished run, each with the option to change; empty if nothing stands out.

    Of several runs it is about the best one, and about their search.
    """
    step = finished.best_metrics.best.step
    nothing = nothing_learned(finished.best_config, finished.analysis, finished.split, finished.log, step)
    nothing = nothing or few_entities(finished.best_config, finished.best_metrics, finished.split, finished.log)
    # an accuracy that nothing is said about is clearly above the most frequent answer's, however little the loss fell
    has_learned = finished.analysis.accuracy is not None and finished.analysis.baseline is not None
    of_best = [
        *(nothing or ([] if has_learned else loss_stayed(finished.best_config, finished.log, step))),
        *beaten_by_probe(finished),
        *loss_rose(finished.best_config, finished.log),
        *(str(line["untrained"]) for line in finished.log if "untrained" in line),
        *never_rewarded(finished.log),
        *still_improving(finished.best_config, finished.best_metrics, finished.log),
        *(
            [f"{undecided}, so the epoch with the lowest validation loss is kept. Choose by another metric (--metric)"]
            if (undecided := metric_without_say(finished.best_metrics, finished.log))
            else []
        ),
    ]
    which = f"seed {finished.best_config.runtime.seed}: " if finished.config.is_series else ""
    return [
        *(f"{which}{text}" for text in of_best),
        *edge_of_search(finished.config, finished.metrics),
    ]


def against_probe(metrics: RunMetrics, split: str) -> tuple[str, float, float] | None:
    """Return the metric that a run and its probe are compared by, and the probe's and the run's value of it."""
    if metrics.probe is None or split not in metrics.scores:
        return None
    scores, of_probe = metrics.scores[split], metrics.probe.scores.get(split, {})
    names = [name for name in (metrics.best.metric, *scores) if name in scores and name in of_probe]
    return (names[0], float(of_probe[names[0]]), float(scores[names[0]])) if names else None


def beaten_by_probe(finished: FinishedRun) -> list[str]:
    """Say if a linear probe of the frozen model does better than the tuned model."""
    config, metrics, split, log = finished.best_config, finished.best_metrics, finished.split, finished.log
    compared = against_probe(metrics, split)
    if compared is None:
        return []
    name, of_probe, tuned = compared
    if signed_score(name, tuned) >= signed_score(name, of_probe):
        return []
    can_begin = config.method.head_init != "probe" and "pair" not in finished.data.columns
    start = "a head that begins from the probe (--head-init probe), " if can_begin else ""
    return [
        f"the tuned model is no better than a linear probe of the frozen one: {name} {tuned:.3f} and {of_probe:.3f} on "
        f"{split}. Try {_longer_or_lower(config, log, metrics.best.step)}, {start}or another learning rate (--lr)"
    ]


def nothing_learned(
    config: RunConfig,
    analysis: Analysis,
    split: str,
    log: Sequence[Mapping[str, Any]],
    best_step: int | None = None,
) -> list[str]:
    """Say if the model answers all rows alike, or not clearly better than by giving the most frequent answer."""
    if analysis.constant is not None:
        is_majority = analysis.baseline is not None and analysis.constant == analysis.majority
        share = f", which {analysis.baseline:.1%} of them are" if is_majority else ""
        what = f"every row of {split} is answered with {analysis.constant!r}{share}: nothing else was learned"
    elif (
        analysis.accuracy is not None
        and analysis.baseline is not None
        and analysis.accuracy <= analysis.baseline + NEGLIGIBLE
    ):
        what = (
            f"an accuracy of {analysis.accuracy:.3f} on {split} is no better than always answering "
            f"{analysis.majority!r} ({analysis.baseline:.3f})"
        )
    elif (
        analysis.accuracy is not None
        and analysis.baseline is not None
        and (low := share_interval(round(analysis.accuracy * analysis.rows), analysis.rows)[0]) <= analysis.baseline
    ):
        what = (
            f"an accuracy of {analysis.accuracy:.3f} on {split} is not clearly better than always answering "
            f"{analysis.majority!r} ({analysis.baseline:.3f}): with {analysis.rows} rows its 95 % interval begins at "
            f"{low:.3f}"
        )
        if analysis.rows < FEW_ROWS:
            return [f"{what}, and so few rows cannot show more"]
    elif analysis.nothing_right:
        what = f"nothing on {split} is answered right"
    else:
        return []
    if _was_best_early(log, best_step):
        return [f"{what}. Try {_longer_or_lower(config, log, best_step)}"]
    rate = _other_rate(config, log, bool(loss_rose(config, log)))
    if _steps(log) < SEARCHABLE_STEPS:  # so short a run at any rate may have learned nothing yet
        return [
            f"{what}. Try a longer run, such as {_longer(config)}, or another learning rate, such as --lr {rate:.2g}"
        ]
    return [
        f"{what}. Try another learning rate, such as --lr {rate:.2g}, several of them (deltune choose), or "
        f"{_longer(config)}"
    ]


def few_entities(config: RunConfig, metrics: RunMetrics, split: str, log: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say if hardly any tagged entity is found, although the model does not leave all of them out."""
    scores = metrics.scores.get(split, {})
    for name, value in scores.items():
        if name in METRICS and METRICS[name].input_type == "tags" and value <= FEW_ENTITIES:
            todo = _other_rate_or_longer(config, log, metrics.best.step, bool(loss_rose(config, log)))
            return [f"{name} is {value:.3f} on {split}: hardly any entity is found. Try {todo}"]
    return []


def loss_stayed(config: RunConfig, log: Sequence[Mapping[str, Any]], best_step: int | None = None) -> list[str]:
    """Say if the training loss ended about where it began."""
    losses = training_losses(log)
    if len(losses) < 2 or not HARDLY_FALLEN * losses[0] < losses[-1] <= RISEN * losses[0]:
        return []
    todo = _other_rate_or_longer(config, log, best_step)
    return [f"the training loss hardly fell ({losses[0]:.4g} → {losses[-1]:.4g}). Try {todo}"]


def loss_rose(config: RunConfig, log: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say if the training loss ended well above where it began."""
    losses = training_losses(log)
    if len(losses) < 2 or losses[-1] <= RISEN * losses[0] or _steps(log) < FEWEST_STEPS:
        return []
    lower = _other_rate(config, log, rose=True)
    return [
        f"the training loss rose from {losses[0]:.3g} to {losses[-1]:.3g}: it diverged at a learning rate of "
        f"{config.optim.rate:g}. Try a lower one, such as --lr {lower:.2g}, or --warmup 0.1"
    ]


def never_rewarded(log: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say if all answers to each prompt had the same reward throughout, so that none was preferred."""
    same = [line for line in log if "frac_reward_zero_std" in line]
    if not same or any(line["frac_reward_zero_std"] < 1 for line in same):
        return []
    rewards = sorted({float(line["reward"]) for line in same})
    what = " to ".join(f"{reward:g}" for reward in dict.fromkeys((rewards[0], rewards[-1])))
    return [
        f"no answer was rewarded above another: in all {_steps(log)} steps the answers to each prompt had the same "
        f"reward ({what} on average), so nothing was learned. Try the function of --reward on answers that the model "
        "gives, give easier prompts, draw more answers (--set objective.generations=16), or tune the model on right "
        "answers first (--objective sft, then --init-from)"
    ]


def still_improving(config: RunConfig, metrics: RunMetrics, log: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say if the last validation was the best one and the loss was still falling."""
    validations = [line for line in log if "eval_loss" in line]
    if len(validations) < 2 or metrics.best.step != validations[-1]["step"]:
        return []
    before, last = (float(line["eval_loss"]) for line in validations[-2:])
    if last > IMPROVING * before:
        return []
    name = metrics.best.metric or "loss"
    values = [float(line[f"eval_{name}"]) for line in validations[-2:] if f"eval_{name}" in line]
    lower = lower_is_better(name)
    if len(values) == 2 and (values[1] >= values[0] if lower else values[1] <= values[0]):
        return []
    change = f"{name} {values[0]:.4f} → {values[1]:.4f}" if len(values) == 2 and name != "loss" else ""
    text = ", ".join(part for part in (change, f"loss {before:.4f} → {last:.4f}") if part)
    return [f"validation was still improving at the end ({text}). Train longer: {_longer(config)}"]


def metric_without_say(metrics: RunMetrics, log: Sequence[Mapping[str, Any]]) -> str:
    """Say if the metric that chooses the epoch was the same at every validation; "" if it was not."""
    name = metrics.best.metric
    values = [float(line[f"eval_{name}"]) for line in log if f"eval_{name}" in line]
    if name in (None, "loss") or len(values) < 2 or len(set(values)) > 1:
        return ""
    return f"{name} was {values[0]:.4f} at every validation"


def edge_of_search(config: RunConfig, metrics: RunMetrics) -> list[str]:
    """Say if a number that a search chose is the largest or the smallest of those tried."""
    notes: list[str] = []
    if not metrics.best.metric:
        return notes
    for field, tried in config.runtime.search.items():
        numbers = sorted({float(v) for v in tried if isinstance(v, int | float) and not isinstance(v, bool)})
        chosen = metrics.best.as_json().get(field)
        if len(numbers) < 2 or not isinstance(chosen, int | float) or numbers[0] < chosen < numbers[-1]:
            continue
        smallest = chosen == numbers[0]
        beyond = chosen * chosen / (numbers[1] if smallest else numbers[-2])
        if all(isinstance(value, int) for value in tried):
            beyond = round(beyond)
        if beyond == chosen:
            continue
        option = field.replace("_", "-")
        notes.append(
            f"{option} {chosen:g} did best and is the {'smallest' if smallest else 'largest'} value tried; "
            f"a better one may lie beyond: --search {option}={beyond:.2g}"
        )
    return notes


def training_losses(log: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the first training loss and the mean of the last tenth; fewer than two if the log has fewer."""
    losses = [float(line["loss"]) for line in log if isinstance(line.get("loss"), int | float) and "reward" not in line]
    return [losses[0], fmean(losses[-max(1, len(losses) // 10) :])] if len(losses) > 1 else losses


def _other_rate(config: RunConfig, log: Sequence[Mapping[str, Any]], rose: bool) -> float:
    """Return a rate to try: lower if the loss rose or the weights were trained before, else the default or higher."""
    rate, usual = config.optim.rate, usual_rate(config, _steps(log) or None)
    if rose or config.method.init_from is not None:
        return min(rate / RATE_FACTOR, usual)
    return usual if rate > ABOVE_DEFAULT * usual else max(rate * RATE_FACTOR, usual)


def _steps(log: Sequence[Mapping[str, Any]]) -> int:
    """Return how many steps a log is of."""
    return max((int(line["step"]) for line in log), default=0)


def _was_best_early(log: Sequence[Mapping[str, Any]], best_step: int | None) -> bool:
    """Return whether the best validation was in the first half of a run: then a longer run hardly helps."""
    return best_step is not None and 2 * best_step <= _steps(log)


def _longer_or_lower(config: RunConfig, log: Sequence[Mapping[str, Any]], best_step: int | None) -> str:
    if not _was_best_early(log, best_step):
        return f"a longer run, such as {_longer(config)}"
    rate, steps = config.optim.rate / RATE_FACTOR, _steps(log)
    return f"a lower learning rate, such as --lr {rate:.2g}, since validation was best at step {best_step} of {steps}"


def _other_rate_or_longer(
    config: RunConfig, log: Sequence[Mapping[str, Any]], best_step: int | None, rose: bool = False
) -> str:
    longer = "" if _was_best_early(log, best_step) else f", or {_longer(config)}"
    return f"another learning rate, such as --lr {_other_rate(config, log, rose):.2g}{longer}"


def _longer(config: RunConfig) -> str:
    """Return the option that doubles the length of a run."""
    optim = config.optim
    return f"--epochs {2 * optim.epochs}" if optim.steps is None else f"--steps {2 * optim.steps}"
