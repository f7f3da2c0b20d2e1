"""Where results come from, in sentences: on which models and data, when, on which machine, and how long it took."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..._version import __version__
from ...errors import check_booleans, counted, number_range
from ..jobs.job import Outcome
from ..jobs.store import JobRecord
from .aggregate import SEED

PACKAGES = ("torch", "transformers")
"""The packages whose versions are said."""
COMMIT_DIGITS = 7
DIRTY = "-dirty"
"""How a commit ends in whose files something was changed."""
MAX_COMMITS = 3
"""Commits that a sentence names."""
CITATION = (
    "The deltune developers, deltune: parameter-efficient fine-tuning over one design space, version "
    f"{__version__}, with the commits listed above"
)
"""How these results are cited, as in CITATION.cff."""


@dataclass(frozen=True)
class StudyRuns:
    """The runs of a study, for sentences about their models, data and seeds.

    `train_rows` has the training rows of tasks that have fewer than runs may read.
    """

    outcomes: Sequence[Outcome]
    names: Mapping[str, str]
    train_rows: Mapping[str, int]
    repetition: str = "seed"


@check_booleans
def setup(studies: Iterable[StudyRuns], *, rows_too: bool = True) -> str:
    """Return a sentence about the models, the data and the seeds of runs that are done; empty if there are none."""
    models: dict[str, int] = {}
    tasks: dict[str, None] = {}
    rows: set[int] = set()
    repeats: dict[str, set[int]] = {}
    for study in studies:
        names = study.names
        done = [outcome for outcome in study.outcomes if outcome.error is None]
        for outcome in done:
            labels = {axis: names.get(str(label), str(label)) for axis, label in outcome.cell.items()}
            if model := labels.get("model"):
                models[model] = max(models.get(model, 0), int(outcome.count.get("denominator_size", 0)))
            tasks |= dict.fromkeys(labels[axis] for axis in ("task", "target") if axis in labels)
            if limit := outcome.spec.get("max_train_rows"):
                rows.add(min(int(limit), study.train_rows.get(str(outcome.cell.get("task")), int(limit))))
        if seeds := {outcome.cell[SEED] for outcome in done if SEED in outcome.cell}:
            repeats.setdefault(study.repetition, set()).add(len(seeds))
    sizes = [
        f"{name} ({size / 1e6:.2g} million parameters)" if size else name
        for name, size in sorted(models.items(), key=lambda item: item[1])
    ]
    parts = [f"models: {', '.join(sizes)}"] if sizes else []
    parts += [f"tasks: {', '.join(tasks)}"] if tasks else []
    parts += [f"{number_range(rows)} training rows at most"] if rows and rows_too else []
    numbers = [f"{number_range(n)} {word}{'s' if n != {1} else ''}" for word, n in repeats.items()]
    parts += [", or ".join(numbers)] if numbers else []
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}." if text else ""


def provenance(records: Iterable[JobRecord]) -> str:
    """Return sentences about the runs of a study or of several.

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


def commits(records: Iterable[JobRecord]) -> list[str]:
    """Return the commits of deltune that runs were made with, by their number of runs."""
    results = [record.result for record in {record.name: record for record in records}.values() if record.result]
    return list(_count_commits([result.get("environment") or {} for result in results]))


def _count_commits(environments: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    names = [str(environment["commit"]) for environment in environments if environment.get("commit")]
    counts = Counter(name[:COMMIT_DIGITS] + DIRTY * name.endswith(DIRTY) for name in names)
    return dict(counts.most_common())


def _software(environments: Sequence[Mapping[str, Any]]) -> str:
    packages = {
        name: sorted({str(e["packages"][name]) for e in environments if name in e.get("packages", {})})
        for name in PACKAGES
    }
    versions = [f"{name} {' and '.join(of_package)}" for name, of_package in packages.items() if of_package]
    known = list(_count_commits(environments))
    if listed := known[:MAX_COMMITS]:
        more = f" and {len(known) - len(listed)} more" if len(known) > len(listed) else ""
        versions.append(f"deltune at {'commit' if len(known) == 1 else 'commits'} {', '.join(listed)}{more}")
    return "With " + ", ".join(versions) if versions else "Versions are not recorded"
