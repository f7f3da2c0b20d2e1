"""Epochs of runs that take a frozen trunk's states from the disk, against epochs that run the trunk.

`deltune train` of the packaged MiniLM on its support tickets, repeated up to so many rows, in batches of 32 and with
trunk_dropout=off; trunk_cache decides. The two runs of a method take turns. An epoch is everything from one validation
to the next; the first, which makes the states, is left out.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Mapping
from pathlib import Path

from deltune.cli.use import TICKETS
from deltune.train.config import RunConfig
from deltune.train.run import train
from deltune.train.run_folder import RunFolder

from .frame import Piece
from .rows import Row, Target, compared
from .study import cache

TARGETS = {"three_vectors": 10.0, "head": 10.0, "layernorm(layers='upper half')": 1.4}
"""Method -> how many times faster an epoch is to be, at least. Of the upper half 1.5 is the arithmetic."""
SIZES = {"run": 0.0, "kept": 8.0}
"""GiB of states that may be kept."""
EPOCHS = 3


def epochs(model: str, method: str, data: Path, size: float, output: Path, max_length: int) -> list[float]:
    """Seconds of every epoch after the first."""
    spec = RunConfig.from_flat(
        model=model, data=str(data), method=method, epochs=EPOCHS, max_length=max_length, trunk_dropout="off",
        trunk_cache=size,
    )  # fmt: skip
    train(spec, output, progress=False)
    lines = RunFolder(output).read_log()
    ends = [line["seconds"] for line in lines if "eval_loss" in line]
    return [after - before for before, after in itertools.pairwise(ends)]


def measure(
    model: str = "minilm",
    rows: int = 400,
    repeats: int = 2,
    targets: Mapping[str, float] = TARGETS,
    max_length: int = 128,
) -> list[Row]:
    """A row for each method: how many times faster its epochs are with the states."""
    results = []
    with tempfile.TemporaryDirectory() as made, cache(Path(made) / "cache"):
        place = Path(made)
        data = _data(place / "data", rows)
        for number, (method, target) in enumerate(targets.items()):
            seconds: dict[str, list[float]] = {side: [] for side in SIZES}
            for turn in range(repeats):
                for side, size in SIZES.items():
                    output = place / f"{number}-{turn}-{side}"
                    seconds[side] += epochs(model, method, data, size, output, max_length)
            name = f"frozen trunk kept: an epoch of {method}, times faster"
            results.append(compared(name, seconds["run"], seconds["kept"], Target(target, "at least"), f"{rows} rows"))
    return results


def _data(folder: Path, rows: int) -> Path:
    """The packaged task with that many training rows."""
    folder.mkdir()
    for file in TICKETS.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    lines = (TICKETS / "train.jsonl").read_text(encoding="utf-8").strip("\n").split("\n")
    many = [lines[i % len(lines)] for i in range(rows)]
    (folder / "train.jsonl").write_text("\n".join(many) + "\n", encoding="utf-8")
    return folder


def pieces() -> list[Piece]:
    return [Piece("trunk: tickets", measure, 60.0)]
