"""Whole runs as a user starts them, from imports to test scores: `deltune train` against PEFT with Trainer."""

from __future__ import annotations

import gzip
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks.ratios import median_interval
from deltune.models import packaged_minilm

from .frame import Piece
from .life import clocked
from .rows import Row, Target, compared, missing

ROOT = Path(__file__).parents[1]
METHOD = "lora(rank=8)"


@dataclass(frozen=True)
class Job:
    """A data set below the data root: its columns as text, (pair,) label; the most rows of a split; the target."""

    name: str
    columns: Mapping[str, str]
    most: Mapping[str, int]
    limit: float


JOBS = (
    Job("sick", {"text": "premise", "pair": "hypothesis", "label": "label"}, {}, 0.35),
    Job("sst2", {"text": "sentence", "label": "label"}, {"train": 4000}, 0.25),
)
SHORT = {"train": 600, "validation": 100, "test": 100}


def prepared(job: Job, root: Path, to: Path, most: Mapping[str, int]) -> Path:
    """The rows of both sides, the same sample of them; most: split -> rows, at most."""
    to.mkdir(parents=True)
    for split in ("train", "validation", "test"):
        with gzip.open(root / job.name / f"{split}.jsonl.gz", "rt", encoding="utf-8") as file:
            rows = [json.loads(line) for line in file]
        rows = random.Random(0).sample(rows, min(len(rows), most.get(split, len(rows))))
        kept = [{name: row[column] for name, column in job.columns.items()} for row in rows]
        (to / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
    return to


def commands(data: Path, output: Path, columns: Sequence[str], epochs: int, seed: int) -> dict[str, list[str]]:
    """Both sides: the same model, method, rate, rows a step, epochs and longest text."""
    run, shared = [sys.executable, "-m"], ["--epochs", str(epochs), "--seed", str(seed)]
    named = ",".join(f"{name}={name}" for name in columns)
    arguments = ["--data", str(data), "--columns", named, "--method", METHOD, "--lr", "1e-3", "--batch-size", "32"]
    return {
        "ours": [*run, "deltune", "train", "--model", "minilm", "--output", str(output / "ours"), *arguments, *shared],
        "theirs": [*run, "benchmarks.whole_peft", str(packaged_minilm()), str(data), str(output / "theirs"), *shared],
    }


def carried_out(command: Sequence[str], cache: Path) -> None:
    """Run a command in the checkout, on as many threads as we have. Error: it failed; with the last it said."""
    path = os.pathsep.join((str(ROOT), str(ROOT / "src")))
    changes = {"PYTHONPATH": path, "OMP_NUM_THREADS": str(torch.get_num_threads()), "DELTUNE_CACHE": str(cache)}
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **changes}, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {(done.stderr.strip().splitlines() or ['?'])[-1]}")


def measure(
    job: Job, root: Path | None, epochs: int, seeds: Sequence[int], most: Mapping[str, int] | None = None
) -> list[Row]:
    """A pair of runs for each seed, taking turns in who is first. most: split -> rows, at most."""
    names = [f"whole run / PEFT + Trainer: {METHOD} on {job.name}", f"accuracy − PEFT's: {METHOD} on {job.name}"]
    if root is None or not (root / job.name).is_dir():
        return [missing(name, f"no {job.name} in {root or 'a data root'}; give --data-root") for name in names]
    seconds: dict[str, list[float]] = {"ours": [], "theirs": []}
    accuracy: dict[str, list[float]] = {"ours": [], "theirs": []}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        data = prepared(job, root, place / "data", {**job.most, **(most or {})})
        for number, seed in enumerate(seeds):
            output = place / str(seed)
            both = commands(data, output, list(job.columns), epochs, seed)
            for side in list(both) if number % 2 == 0 else list(reversed(both)):
                # a cache of its own: rows are tokenised anew for every run
                seconds[side].append(clocked(partial(carried_out, both[side], output / "cache")))
            ours = json.loads((output / "ours" / "metrics.json").read_text(encoding="utf-8"))
            theirs = json.loads((output / "theirs" / "found.json").read_text(encoding="utf-8"))
            accuracy["ours"].append(ours["test"]["accuracy"])
            accuracy["theirs"].append(theirs["test_accuracy"])
    both_said = ", ".join(f"{side} {statistics.fmean(of_side):.0f} s" for side, of_side in seconds.items())
    note = f"{epochs} epochs{f', shortened: {most}' if most else ''}; {both_said}"
    # short ones are not judged: starting a process weighs three times as much in them
    rows = [compared(names[0], seconds["ours"], seconds["theirs"], None if most else Target(job.limit), note)]
    gaps = [a - b for a, b in zip(accuracy["ours"], accuracy["theirs"], strict=True)]
    spread = max(statistics.stdev(of_side) for of_side in accuracy.values()) if len(seeds) > 1 else None
    accuracies = "; ".join(f"{side} {', '.join(f'{a:.3f}' for a in of_side)}" for side, of_side in accuracy.items())
    limit = None if spread is None else Target(-spread, "at least")
    rows.append(Row(names[1], statistics.fmean(gaps), limit, median_interval(gaps), "", accuracies))
    return rows


def pieces(root: Path | None, full: bool = False) -> list[Piece]:
    """Short: one epoch, fewer rows, one pair, to see that it runs; full: 3 epochs, all rows, 5 seeds, as the targets
    say."""
    kind = "wholefull" if full else "whole"
    seconds = 0.0 if root is None else 1400.0 if full else 30.0
    if full:
        return [Piece(f"{kind}: {job.name}", partial(measure, job, root, 3, range(5)), seconds) for job in JOBS]
    return [Piece(f"{kind}: {job.name}", partial(measure, job, root, 1, (0,), SHORT), seconds) for job in JOBS]
