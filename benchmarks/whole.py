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
import time
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


def carried_out(command: Sequence[str], cache: Path) -> float:
    """Run a command in the checkout, on as many threads as we have; return the greatest memory of its process in MiB.

    Error: it failed; with the last it said.
    """
    path = os.pathsep.join((str(ROOT), str(ROOT / "src")))
    changes = {"PYTHONPATH": path, "OMP_NUM_THREADS": str(torch.get_num_threads()), "DELTUNE_CACHE": str(cache)}
    with tempfile.TemporaryFile("w+") as errors:
        environment = {**os.environ, **changes}
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=errors)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        errors.seek(0)
        if process.returncode:
            raise RuntimeError(f"{' '.join(command)} failed: {(errors.read().strip().splitlines() or ['?'])[-1]}")
    return usage.ru_maxrss / 1024


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


CHATS = ("stories260k-llama", "babyllama-char-llama")
"""Folders of language models, beside the data root."""


def chats(root: Path | None, model: str, rows: Mapping[str, int], epochs: int = 1) -> list[Row]:
    """A whole run on answers to prompts beside the quicker of Trainer + PEFT and TRL + PEFT with its packing.

    Prompts are cut, since these models read few tokens. TRL's fused head has no Triton on a CPU.
    """
    name = f"whole run on chats / the better of PEFT's: {METHOD} on {model}"
    if root is None or not (root / "samsum").is_dir() or not (root.parent / "models" / model).is_dir():
        return [missing(name, f"no samsum in {root or 'a data root'}, or no {model} beside it; give --data-root")]
    folder = root.parent / "models" / model
    with tempfile.TemporaryDirectory() as made:
        place = Path(made)
        data = prepared(Job("samsum", {"prompt": "dialogue", "completion": "summary"}, {}, 0), root, place / "d", rows)
        for file in data.iterdir():
            lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
            cut = [{"prompt": f"{row['prompt'][:120]}\n", "completion": row["completion"][:80]} for row in lines]
            file.write_text("".join(json.dumps(row) + "\n" for row in cut), encoding="utf-8")
        run = [sys.executable, "-m"]
        columns = ["--task", "chat", "--columns", "prompt=prompt,completion=completion", "--max-cut", "1"]
        ours = ["--data", str(data), *columns, "--max-length", "256", "--packing", "--method", METHOD]
        ours += ["--lr", "1e-3", "--batch-size", "16", "--output", str(place / "ours")]
        sides = {"ours": [*run, "deltune", "train", "--model", str(folder), *ours]}
        for kind in ("trainer", "trl"):
            sides[kind] = [*run, "benchmarks.whole_language_peft", kind, str(folder), str(data), str(place / kind)]
        seconds: dict[str, float] = {}
        memory: dict[str, float] = {}
        losses: dict[str, float] = {}
        for side, command in sides.items():
            start = time.perf_counter()
            memory[side] = carried_out([*command, "--epochs", str(epochs), "--seed", "0"], place / "cache" / side)
            seconds[side] = time.perf_counter() - start
            file = place / side / ("metrics.json" if side == "ours" else "found.json")
            metrics = json.loads(file.read_text(encoding="utf-8"))
            losses[side] = metrics["test"]["loss"] if side == "ours" else metrics["eval_loss"]
    better = min(("trainer", "trl"), key=seconds.__getitem__)
    note = "; ".join(f"{s}: {seconds[s]:.1f} s, {memory[s]:.0f} MiB, test loss {losses[s]:.3f}" for s in sides)
    return [
        Row(name, round(seconds["ours"] / seconds[better], 3), Target(0.8), note=note),
        Row(f"{name}: greatest memory of the process", round(memory["ours"] / memory[better], 3), Target(1.0)),
    ]


def pieces(root: Path | None, full: bool = False) -> list[Piece]:
    """Short: one epoch, fewer rows, one pair, to see that it runs; full: 3 epochs, all rows, 5 seeds, as the targets
    say."""
    kind = "wholefull" if full else "whole"
    seconds = 0.0 if root is None else 1400.0 if full else 30.0
    most = {} if full else {"train": 400, "validation": 50, "test": 50}
    languages = [Piece(f"{kind}: chats, {model}", partial(chats, root, model, most), seconds) for model in CHATS]
    if full:
        return [
            Piece(f"{kind}: {job.name}", partial(measure, job, root, 3, range(5)), seconds) for job in JOBS
        ] + languages
    return [
        Piece(f"{kind}: {job.name}", partial(measure, job, root, 1, (0,), SHORT), seconds) for job in JOBS
    ] + languages
