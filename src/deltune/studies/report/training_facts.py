"""Training rows and steps of a study's runs, as far as they are known, and curves that had not become flat."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...errors import counted, number_range, word_list
from ...train import OptimSection
from ..claims.comparisons import MetricChoice, points
from ..jobs.job import Outcome

DEFAULT_BATCH, DEFAULT_EPOCHS = (int(OptimSection.model_fields[name].default) for name in ("batch_size", "epochs"))
"""The defaults of a run, which its spec leaves out."""

RISING = 1.0
"""Points by which the validation score rises between the last two validations if a curve is called not flat."""


def training_facts(outcomes: Iterable[Outcome], names: Mapping[str, str], train_rows: Mapping[str, int]) -> str:
    """Return a sentence for each task: its training rows, steps and test rows; empty if no run is done."""
    by_task: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.error is None and "task" in outcome.cell and outcome.spec.get("method"):
            by_task.setdefault(str(outcome.cell["task"]), []).append(outcome)
    tasks: dict[str, list[str]] = {}
    for task, of_task in by_task.items():
        facts = [_training_rows(of_task, train_rows.get(task)), _steps(of_task, train_rows.get(task)), _tested(of_task)]
        text = ", ".join(fact for fact in facts if fact)
        tasks.setdefault(text, []).append(names.get(task, task))
    return " ".join(f"{word_list(of_text)}: {text}." for text, of_text in tasks.items() if text)


def _training_rows(outcomes: Sequence[Outcome], most: int | None) -> str:
    """Say how many rows runs read; nothing where steps are given, which may end before the rows do."""
    if any(outcome.spec.get("steps") for outcome in outcomes):
        return ""
    limits = {_rows_read(outcome.spec, most) for outcome in outcomes}
    return f"{_span(limits)} training rows" if None not in limits else ""


def _rows_read(spec: Mapping[str, Any], most: int | None) -> int | None:
    limits = [int(limit) for limit in (spec.get("max_train_rows"), most) if limit]
    return min(limits, default=None)


def _steps(outcomes: Sequence[Outcome], most: int | None) -> str:
    """Say how many steps runs took: by their curves, or by the rows that they read."""
    steps = {_steps_of(outcome, most) for outcome in outcomes}
    batches = {int(outcome.spec.get("batch_size", DEFAULT_BATCH)) for outcome in outcomes}
    in_tokens = any(outcome.spec.get("batch_tokens") for outcome in outcomes)
    of_rows = "" if in_tokens else f" of {_span(batches)} rows"
    return f"{_span(steps)} steps{of_rows}" if None not in steps else ""


def _steps_of(outcome: Outcome, most: int | None) -> int | None:
    spec, rows = outcome.spec, _rows_read(outcome.spec, most)
    if trained := max((int(line["step"]) for line in outcome.curve if "step" in line), default=0):
        return trained
    if spec.get("steps"):
        return int(spec["steps"])
    if rows is None or spec.get("batch_tokens"):
        return None
    return math.ceil(rows / int(spec.get("batch_size", DEFAULT_BATCH))) * int(spec.get("epochs", DEFAULT_EPOCHS))


def _tested(outcomes: Sequence[Outcome]) -> str:
    """Say how many test rows were scored: as the signature of a metric says, else at most those that were asked for."""
    if not any(outcome.scores for outcome in outcomes):
        return ""
    scored = {
        int(n[1])
        for outcome in outcomes
        for signature in outcome.extra.get("signatures", {}).values()
        if (n := re.search(r"\|n:(\d+)", str(signature)))
    }
    if scored:
        return f"{_span(scored)} test rows"
    limits = {int(outcome.spec["test_rows"]) for outcome in outcomes if outcome.spec.get("test_rows")}
    return f"{_span(limits)} test rows" if limits else ""


def _span(numbers: Iterable[int | None]) -> str:
    return number_range(number for number in numbers if number is not None)


def still_rising(outcomes: Iterable[Outcome], choice: MetricChoice, names: Mapping[str, str]) -> str:
    """Say on which tasks the mean validation score still rose when runs ended; empty if on none."""
    rises: dict[str, list[tuple[float, int]]] = {}
    for outcome in outcomes:
        metric = choice.metric_name(outcome)
        scale = points(metric) * choice.sign(metric)
        line = [(int(one["step"]), scale * one[f"eval_{metric}"]) for one in outcome.curve if f"eval_{metric}" in one]
        if len(line) > 1 and all(math.isfinite(value) for _, value in line[-2:]):
            (before, then), (after, now) = line[-2:]
            rises.setdefault(str(outcome.cell.get("task")), []).append((now - then, after - before))
    parts = [
        f"{rise:.1f} points on {names.get(task, task)} ({counted(max(steps for _, steps in of_task), 'step')})"
        for task, of_task in rises.items()
        if (rise := statistics.fmean(rise for rise, _ in of_task)) >= RISING
    ]
    if not parts:
        return ""
    return (
        "Training ended before the curves were flat: between the last two validations the score still rose, in the "
        f"mean over all runs, by {word_list(parts)}. With more steps the methods might be in another order."
    )
