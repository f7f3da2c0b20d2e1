"""Epochs of runs that take a frozen trunk's states from the disk, against epochs that run the trunk.

    python benchmarks/trunk.py [--rows 1600] [--repeats 3] [--threads 1] [--json FILE]

`deltune train` of the packaged MiniLM on its support tickets, repeated up to so many rows, in batches of 32 and with
trunk_dropout=off; trunk_cache decides. The two runs of a method take turns, so that a noisy machine is noisy to both.
An epoch is everything from one validation to the next; the first, which makes the states, is left out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from deltune import caching
from deltune.quickstart import TICKETS
from deltune.runs import Run
from deltune.specs import RunSpec
from deltune.train import train

TARGETS = {"three_vectors": 10.0, "head": 10.0, "layernorm(layers='upper half')": 1.4}
"""Method -> how many times faster an epoch is to be, at least. Of the upper half 1.5 is the arithmetic."""
EPOCHS = 3


def epochs(method: str, data: Path, cache: float, output: Path) -> list[float]:
    """Seconds of every epoch after the first."""
    spec = RunSpec(model="minilm", data=str(data), method=method, epochs=EPOCHS, trunk_dropout="off", trunk_cache=cache)
    train(spec, output, progress=False)
    lines = [json.loads(line) for line in Run(output).log_file.read_text(encoding="utf-8").splitlines()]
    ends = [line["seconds"] for line in lines if "eval_loss" in line]
    return [after - before for before, after in itertools.pairwise(ends)]


def measure(rows: int = 1600, repeats: int = 3) -> list[dict[str, Any]]:
    """A row for each method: how many times faster its epochs are with the states."""
    found = []
    with tempfile.TemporaryDirectory() as made:
        place = Path(made)
        data = _data(place / "data", rows)
        before = os.environ.get(caching.VARIABLE)
        os.environ[caching.VARIABLE] = str(place / "cache")
        try:
            for number, (method, target) in enumerate(TARGETS.items()):
                seconds: dict[float, list[float]] = {0.0: [], 8.0: []}
                for turn in range(repeats):
                    for cache, own in seconds.items():
                        own += epochs(method, data, cache, place / f"{number}-{turn}-{cache}")
                ratios = [slow / fast for slow, fast in zip(seconds[0.0], seconds[8.0], strict=True)]
                figure = statistics.median(ratios)
                found.append(
                    {
                        "name": f"frozen trunk kept: an epoch of {method}, times faster",
                        "figure": figure,
                        "target": target,
                        "passed": figure >= target,
                        "all": ratios,
                        "seconds": {"run": seconds[0.0], "kept": seconds[8.0]},
                    }
                )
        finally:
            os.environ.pop(caching.VARIABLE)
            if before is not None:
                os.environ[caching.VARIABLE] = before
    return found


def _data(folder: Path, rows: int) -> Path:
    """The packaged task with that many training rows."""
    folder.mkdir()
    for file in TICKETS.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    lines = (TICKETS / "train.jsonl").read_text(encoding="utf-8").splitlines()
    many = [lines[i % len(lines)] for i in range(rows)]
    (folder / "train.jsonl").write_text("\n".join(many) + "\n", encoding="utf-8")
    return folder


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--rows", type=int, default=1600)
    asked.add_argument("--repeats", type=int, default=3)
    asked.add_argument("--threads", type=int, default=1)
    asked.add_argument("--json", type=Path)
    given = asked.parse_args()
    torch.set_num_threads(given.threads)
    rows = measure(given.rows, given.repeats)
    table = Table("what", "figure", "target", "passed")
    for row in rows:
        table.add_row(row["name"], f"{row['figure']:.2f}", f"≥ {row['target']:g}", "yes" if row["passed"] else "no")
    Console().print(table)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
