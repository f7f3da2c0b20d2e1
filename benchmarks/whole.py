"""Whole runs as a user starts them, from imports to test scores: `deltune train` against PEFT with Trainer."""

from __future__ import annotations

import gzip
import json
import os
import random
import resource
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
from transformers import AutoTokenizer

from benchmarks.ratios import median_interval
from deltune.models import packaged_minilm

from .frame import Piece
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


def carried_out(command: Sequence[str], cache: Path) -> tuple[float, float]:
    """Run a command in the checkout, on as many threads as we have.

    Returns:
        Its processor seconds, and the most memory of its process in MiB: read while it runs, since what the system
        reports of a process that has ended counts the memory of the one that started it.

    Raises:
        RuntimeError: It failed; with the last it said.
    """
    path = os.pathsep.join((str(ROOT), str(ROOT / "src")))
    changes = {"PYTHONPATH": path, "OMP_NUM_THREADS": str(torch.get_num_threads()), "DELTUNE_CACHE": str(cache)}
    with tempfile.TemporaryFile("w+") as errors:
        environment = {**os.environ, **changes}
        before, peak = resource.getrusage(resource.RUSAGE_CHILDREN), 0
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=errors)
        status = Path(f"/proc/{process.pid}/status")
        while process.poll() is None:
            lines = [line for line in status.read_text(encoding="utf-8").splitlines() if line.startswith("VmHWM")]
            peak = max([peak, *(int(line.split()[1]) for line in lines)])
            time.sleep(0.05)
        errors.seek(0)
        if process.returncode:
            raise RuntimeError(f"{' '.join(command)} failed: {(errors.read().strip().splitlines() or ['?'])[-1]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, peak / 1024


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
                seconds[side].append(carried_out(both[side], output / "cache")[0])
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


CHATS = {"stories260k-llama": 512, "babyllama-char-llama": 256}
"""Folder of a language model, beside the data root -> the tokens that it reads."""


def conversations(root: Path, to: Path, model: Path, length: int, most: Mapping[str, int]) -> Path:
    """Conversations with their summaries, those that the model reads whole. most: split -> rows, at most."""
    data = prepared(Job("samsum", {"prompt": "dialogue", "completion": "summary"}, {}, 0), root, to, {})
    tokenizer = AutoTokenizer.from_pretrained(model)
    for file in data.iterdir():
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        texts = tokenizer([f"{row['prompt']}\n{row['completion']}" for row in rows]).input_ids
        kept = [row for row, tokens in zip(rows, texts, strict=True) if len(tokens) < length - 2]
        lines = [json.dumps({**row, "prompt": f"{row['prompt']}\n"}) for row in kept[: most.get(file.stem)]]
        file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return data


def chats(root: Path | None, model: str, most: Mapping[str, int], target: Target | None = None) -> list[Row]:
    """A whole run on conversations beside the quicker of Trainer + PEFT and TRL + PEFT with its packing.

    TRL's fused head has no Triton on a CPU. most: split -> rows, at most.
    """
    name = f"whole run on chats / the better of PEFT's: {METHOD} on {model}"
    if root is None or not (root / "samsum").is_dir() or not (root.parent / "models" / model).is_dir():
        return [missing(name, f"no samsum in {root or 'a data root'}, or no {model} beside it; give --data-root")]
    folder, length = root.parent / "models" / model, str(CHATS[model])
    seconds: dict[str, float] = {}
    memory: dict[str, float] = {}
    losses: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as made:
        place = Path(made)
        data = str(conversations(root, place / "data", folder, CHATS[model], most))
        ours = ["train", "--model", str(folder), "--data", data, "--task", "chat", "--packing", "--method", METHOD]
        ours += ["--columns", "prompt=prompt,completion=completion", "--max-length", length, "--lr", "1e-3"]
        for side in ("ours", "trainer", "trl"):
            output = place / side
            theirs = ["benchmarks.whole_language_peft", side, str(folder), data, str(output), "--length", length]
            kind = ["deltune", *ours, "--batch-size", "16", "--output", str(output)]
            command = [sys.executable, "-m", *(kind if side == "ours" else theirs), "--epochs", "1", "--seed", "0"]
            seconds[side], memory[side] = carried_out(command, place / "cache" / side)
            metrics = json.loads((output / ("metrics.json" if side == "ours" else "found.json")).read_text("utf-8"))
            losses[side] = metrics["test"]["loss"] if side == "ours" else metrics["eval_loss"]
    better = min(("trainer", "trl"), key=seconds.__getitem__)
    note = "; ".join(f"{s}: {t:.1f} s, {memory[s]:.0f} MiB, test loss {losses[s]:.3f}" for s, t in seconds.items())
    note = f"{most.get('train', 'all')} rows; {note}"
    return [
        compared(name, [seconds["ours"]], [seconds[better]], target, note),
        Row(f"{name}: greatest memory of the process", memory["ours"] / memory[better], target and Target(1.0)),
    ]


def pieces(root: Path | None, full: bool = False) -> list[Piece]:
    """Short: one epoch, fewer rows, one pair, to see that it runs; full: 3 epochs, all rows, 5 seeds, as the targets
    say, and 1,600 conversations. Short ones are not judged: starting a process weighs more in them."""
    kind, seconds = ("wholefull", 1400.0) if full else ("whole", 30.0)
    few = {"validation": 50, "test": 50}
    most, target = ({"train": 1600, **few}, Target(0.8)) if full else ({"train": 400, **few}, None)
    languages = [
        Piece(f"{kind}: chats, {model}", partial(chats, root, model, most, target), seconds) for model in CHATS
    ]
    options = (3, range(5)) if full else (1, (0,), SHORT)
    return [*(Piece(f"{kind}: {job.name}", partial(measure, job, root, *options), seconds) for job in JOBS), *languages]
