"""Progress of a job that is not done yet, as the folder of its run says, whoever works on it."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from ...errors import DeltuneError
from ...train import RunFolder, latest_checkpoint, read_progress
from .job import Job, config_of, run_folder

TAIL = 2**16
"""Bytes at the end of a log in which its last line is looked for."""


def job_progress(job: Job, runs: Path) -> float | None:
    """Return the share of a job that is done; None where it has not begun, or leaves no trace before its end.

    It is judged by the time that its training says is left.
    """
    try:
        run = _run_of(job, runs)
        return None if run is None else _share_done(run)
    except (DeltuneError, OSError):  # it is being written, or a damaged file, which the job itself will report
        return None


def seconds_before(job: Job, runs: Path) -> float:
    """Return the seconds of earlier work that a job goes on from: those up to its checkpoint, 0 without any."""
    run = _run_of(job, runs)
    return 0.0 if run is None else _kept_seconds(run)


def _run_of(job: Job, runs: Path) -> RunFolder | None:
    """Return the run that a job trains, where that is what it does and the run has begun."""
    run = RunFolder(run_folder(runs, config_of(job))) if job.kind == "run" else None
    return run if run is not None and run.exists else None


def _single_runs(run: RunFolder) -> list[RunFolder]:
    return [single for path in sorted(run.runs.glob("*")) if (single := RunFolder(path)).exists]


def _share_done(run: RunFolder) -> float:
    if run.finished:
        return 1.0
    config = run.config
    if config.is_series:
        count = len(config.search_configs()) + max(0, len(config.runtime.seeds) - 1)
        return sum(map(_share_done, _single_runs(run))) / count
    if not run.log_file.is_file():
        return 0.0
    with open(run.log_file, "rb") as file:
        file.seek(max(0, run.log_file.stat().st_size - TAIL))
        lines = file.read().splitlines()
    for line in reversed(lines):
        with contextlib.suppress(ValueError, TypeError, KeyError):  # the last line may be half written
            values = json.loads(line)
            seconds, left = float(values["seconds"]), float(values["seconds_left"])
            return seconds / (seconds + left) if seconds + left else 0.0
    return 0.0


def _kept_seconds(run: RunFolder) -> float:
    if run.finished:
        return float(run.metrics.seconds)
    if run.config.is_series:
        return sum(map(_kept_seconds, _single_runs(run)))
    checkpoint = latest_checkpoint(run.checkpoint)
    return 0.0 if checkpoint is None else float(read_progress(checkpoint)["seconds"])
