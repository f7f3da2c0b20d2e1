"""deltune beside PEFT and AdapterHub, as ratios of the same interleaved run, each with its target.

    python -m benchmarks [--only steps,memory] [--data-root ../shared/data] [--adapterhub build/adapterhub] [--again]
    python -m benchmarks --keep

Parts: adapterhub, inference, memory, life, mixed, whole; by name only, or all of them as `--only all`: steps,
field, trunk, serving, study, methods, others, wholefull. What was interrupted goes on where it was; --again measures
what is asked anew. Exit code 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # before torch is loaded: its profiler tells of every start

import torch
from rich.console import Console
from transformers.utils import logging

from deltune.train.progress import ProgressDisplay

from . import (
    adapterhub,
    field,
    inference,
    life,
    memory,
    methods,
    mixed,
    report,
    serving,
    steps,
    study,
    trunk,
    whole,
)
from .allocator import keep_memory
from .frame import Piece, Report, carry_out, chosen, machine

ROOT = Path(__file__).parents[1]
DEFAULT = ("adapterhub", "inference", "memory", "life", "mixed", "whole")
"""The parts that are measured when none is named, which should take no more than a quarter of an hour."""


def parts(data_root: Path | None, environment: Path) -> dict[str, Sequence[Piece]]:
    """All parts, in the order of the table."""
    return {
        "adapterhub": adapterhub.pieces(environment),  # first: its process is fresh, and so is ours now
        "inference": inference.pieces(),
        "memory": memory.pieces(),
        "life": life.pieces(),
        "mixed": mixed.pieces(),
        "whole": whole.pieces(data_root),
        "steps": steps.pieces(),
        "field": field.pieces(),
        "trunk": trunk.pieces(),
        "serving": serving.pieces(),
        "study": study.pieces(),
        "methods": methods.pieces(),
        "others": [*adapterhub.others(environment), *steps.others(), *inference.others()],
        "wholefull": whole.pieces(data_root, full=True),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help="parts: a,b,…, or all")
    parser.add_argument("--data-root", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--adapterhub", type=Path, default=ROOT / "build" / "adapterhub", help="its environment")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "bench.json")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--keep", action="store_true", help="measure nothing, write benchmarks/results from the output")
    arguments = parser.parse_args()
    if arguments.keep:
        print(*report.keep(Report.read(arguments.output)), sep="\n")
        return
    keep_memory()
    torch.set_num_threads(arguments.threads)
    logging.set_verbosity_error()
    known = parts(arguments.data_root if arguments.data_root.is_dir() else None, arguments.adapterhub)
    todo = chosen(known, ",".join(known) if arguments.only == "all" else arguments.only or ",".join(DEFAULT))
    every = [piece for pieces in known.values() for piece in pieces]
    results = Report.begin(arguments.output, machine(arguments.threads), todo, every, arguments.again)
    measured(todo, results)
    rows = [row for piece in todo for row in results.rows[piece.name]]
    report.show(rows)
    missed = [row for row in rows if row.passed is False]
    spent = sum(results.seconds[piece.name] for piece in todo)
    print(f"{len(rows)} rows, {len(missed)} targets missed, {spent / 60:.1f} minutes; {results.path}")
    sys.exit(bool(missed))


def measured(todo: Sequence[Piece], results: Report) -> None:
    """Measure what is left, with a bar in seconds of the plan, or a line for each piece where there is no terminal."""
    console = Console(stderr=True)
    left = [piece for piece in todo if piece.name in results.left]
    with ProgressDisplay() as bar:
        done = sum(piece.seconds for piece in todo if piece not in left)
        bar.start("bench", sum(piece.seconds for piece in todo), done)
        before: list[Piece] = []

        def begins(piece: Piece) -> None:
            bar.advance(sum(p.seconds for p in before))
            before[:] = [piece]
            bar.show({"measuring": piece.name})
            if not console.is_terminal:
                rest = sum(p.seconds for p in left[left.index(piece) :])
                print(f"{piece.name} (about {rest / 60:.0f} minutes left)", file=sys.stderr, flush=True)

        carry_out(todo, results, begins)


if __name__ == "__main__":
    main()
