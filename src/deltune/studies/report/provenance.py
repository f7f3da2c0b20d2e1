"""Where results come from, in sentences: on which models and data, when, on which machine, and how long it took."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..._version import __version__
from ...errors import counted
from ..engine.jobs import Outcome
from ..engine.store import JobRecord
from .aggregate import SEED

PACKAGES = ("torch", "transformers")
"""The packages whose versions are said."""
COMMIT_DIGITS = 7
MAX_COMMITS = 3
"""Commits that are listed, those of the most runs first."""
CITATION = (
    "The deltune developers, deltune: parameter-efficient fine-tuning over one design space, version "
    f"{__version__}, with the commits above"
)
"""How these results are cited, as in CITATION.cff."""


def setup(studies: Iterable[tuple[Iterable[Outcome], Mapping[str, str]]]) -> str:
    """Return a sentence about the models, the data and the seeds of runs that are done; empty if there are none.

    Args:
        studies: For each study its outcomes, and how its labels are shown.
    """
    models: dict[str, int] = {}
    tasks: dict[str, None] = {}
    rows: set[int] = set()
    seeds: set[int] = set()
    for outcomes, names in studies:
        done = [outcome for outcome in outcomes if outcome.error is None]
        for outcome in done:
            labels = {axis: names.get(str(label), str(label)) for axis, label in outcome.cell.items()}
            if model := labels.get("model"):
                models[model] = max(models.get(model, 0), int(outcome.count.get("denominator_size", 0)))
            tasks |= dict.fromkeys(labels[axis] for axis in ("task", "target") if axis in labels)
            rows |= {int(outcome.spec["max_train_rows"])} if outcome.spec.get("max_train_rows") else set()
        seeds |= {len({outcome.cell[SEED] for outcome in done if SEED in outcome.cell})} - {0}
    sizes = [
        f"{name} ({size / 1e6:.2g} million parameters)" if size else name
        for name, size in sorted(models.items(), key=lambda item: item[1])
    ]
    parts = [f"models: {', '.join(sizes)}"] if sizes else []
    parts += [f"tasks: {', '.join(tasks)}"] if tasks else []
    parts += [f"{_span(rows)} training rows at most"] if rows else []
    parts += [f"{_span(seeds)} seed{'s' if seeds != {1} else ''}"] if seeds else []
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}." if text else ""


def _span(numbers: set[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def provenance(records: Iterable[JobRecord]) -> str:
    """Return sentences about the runs of a study or of several.

    Args:
        records: Their records; a job that occurs twice counts once.

    Returns:
        The sentences, or an empty text if nothing was run.
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
    commits = Counter(str(e["commit"])[:COMMIT_DIGITS] for e in environments if e.get("commit"))
    listed = [commit for commit, _ in commits.most_common(MAX_COMMITS)]
    if listed:
        more = f" and {len(commits) - len(listed)} more" if len(commits) > len(listed) else ""
        versions.append(f"deltune at {'commit' if len(commits) == 1 else 'commits'} {', '.join(listed)}{more}")
    return "With " + ", ".join(versions) if versions else "Versions are not recorded"
