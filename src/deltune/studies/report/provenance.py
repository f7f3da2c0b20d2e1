"""What was run, in sentences: models and data, machine and time, the methods behind the labels, rows and steps."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..._version import __version__
from ...errors import counted, number_range, word_list
from ...train import OptimSection
from ..claims.selectors import EDGE, SEED
from ..jobs.job import Outcome
from ..jobs.store import DIRTY, JobRecord
from .tables import format_percent

PACKAGES = ("torch", "transformers")
"""The packages whose versions are said."""
COMMIT_DIGITS = 7
CITATION = (
    "The deltune developers, deltune: parameter-efficient fine-tuning over one design space, version "
    f"{__version__}, with the commits listed above"
)
"""How these results are cited, as in CITATION.cff."""


def provenance(records: Iterable[JobRecord]) -> str:
    """Return sentences about the runs of a study or of several, with the commits of the most runs first.

    A job that occurs twice counts once.
    """
    done = [record for record in {record.name: record for record in records}.values() if record.result is not None]
    if not done:
        return ""
    hours = sum(record.seconds for record in done) / 3600
    dates = sorted({record.date for record in done if record.date})
    when = f" from {dates[0]} to {dates[-1]}" if len(dates) > 1 else f" on {dates[0]}" if dates else ""
    recorded = [record.result.get("environment") for record in done if record.result is not None]
    environments = [environment for environment in recorded if isinstance(environment, Mapping)]
    if dates and (undated := sum(not record.date for record in done)):
        when += f" (the day of {undated:,} is not recorded)"
    sentences = [f"{counted(len(done), 'run')}{when}, {hours:.1f} hours of computing in all"]
    if environments:
        sentences.append(_machines(environments))
        sentences.append(_software(environments))
    return ". ".join(sentences) + "."


def _machines(environments: Sequence[Mapping[str, Any]]) -> str:
    kinds = Counter(
        (str(e.get("device", "cpu")), str(e.get("processor", "unknown processor")), e.get("threads"))
        for e in environments
    )
    parts = []
    for (device, processor, threads), _ in kinds.most_common():
        each = "" if not isinstance(threads, int) else f", {counted(threads, 'thread')} a run"
        parts.append(f"{processor}{each}" if device == "cpu" else f"{device} beside {processor}{each}")
    return "Machine: " + "; ".join(parts)


def _software(environments: Sequence[Mapping[str, Any]]) -> str:
    packages = {
        name: sorted({str(e["packages"][name]) for e in environments if name in e.get("packages", {})})
        for name in PACKAGES
    }
    versions = [f"{name} {' and '.join(of_package)}" for name, of_package in packages.items() if of_package]
    names = [str(environment["commit"]) for environment in environments if environment.get("commit")]
    known = list(dict(Counter(name[:COMMIT_DIGITS] + DIRTY * name.endswith(DIRTY) for name in names).most_common()))
    if known:
        dirty = sum(name.endswith(DIRTY) for name in names)
        note = f" ({counted(dirty, 'run')} with changes that no commit has, {DIRTY})" if dirty else ""
        versions.append(f"deltune at {'commit' if len(known) == 1 else 'commits'} {', '.join(known)}{note}")
    return "With " + ", ".join(versions) if versions else "Versions are not recorded"


NOT_OF_METHODS = ("model", "task", "target", "family", "kind", "N", "try", SEED)
"""Axes whose labels say nothing of what is trained."""


@dataclass(frozen=True)
class MethodLabel:
    """A label and what it is.

    Its number of parameters, for each model, leaves the head aside.
    """

    label: str
    expression: str
    parameters: str


def method_labels(outcomes: Sequence[Outcome], names: Mapping[str, str]) -> list[MethodLabel]:
    """Return what each label of the methods of a study is, in the order of the study.

    A label has several entries where its expression differs, by model, by task or by what a search chose.
    """
    entries: dict[tuple[str, str], dict[str, dict[str, None]]] = {}
    for outcome in outcomes:
        spec = outcome.spec
        expression = spec["methods"].get(outcome.cell.get("method")) if "methods" in spec else spec.get("method")
        if outcome.error is not None or not expression:
            continue
        labels = [names.get(str(v), str(v)) for axis, v in outcome.cell.items() if axis not in NOT_OF_METHODS]
        key = ", ".join(labels), re.sub(r"\bseed=\d+", "seed=…", str(expression))
        model = str(outcome.cell.get("model", ""))
        entries.setdefault(key, {}).setdefault(names.get(model, model), {})[_size(outcome)] = None
    return [
        MethodLabel(label, expression, "; ".join(_on_model(*on_model) for on_model in models.items()))
        for (label, expression), models in entries.items()
        if label
    ]


def _size(outcome: Outcome) -> str:
    if "method" in outcome.count:
        return f"{outcome.count['method']:,}"
    return f"{format_percent(float(outcome.count['percent']))} %" if "percent" in outcome.count else ""


def _on_model(model: str, sizes: Mapping[str, None]) -> str:
    text = " or ".join(size for size in sizes if size)
    return f"{model}: {text}" if model and text else text


DEFAULT_BATCH, DEFAULT_EPOCHS = (int(OptimSection.model_fields[name].default) for name in ("batch_size", "epochs"))
"""The defaults of a run, which its spec leaves out."""


def training_facts(outcomes: Sequence[Outcome], names: Mapping[str, str], train_rows: Mapping[str, int]) -> str:
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
    sentences = [f"{word_list(of_text)}: {text}." for text, of_text in tasks.items() if text]
    return " ".join([*sentences, *_rates_at_edges(outcomes)])


def _rates_at_edges(outcomes: Iterable[Outcome]) -> list[str]:
    """Say how many of the learning rates that were chosen are the lowest or the highest that was tried."""
    chosen = {
        tuple((axis, label) for axis, label in outcome.cell.items() if axis not in (SEED, "target", "N")):
        bool(outcome.extra[EDGE]) for outcome in outcomes if EDGE in outcome.extra
    }  # fmt: skip
    at_edge = sum(chosen.values())
    rates = f"{at_edge} of {counted(len(chosen), 'chosen learning rate')}"
    return [f"{rates} {'is' if at_edge == 1 else 'are'} the lowest or highest that was tried."] if at_edge else []


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
