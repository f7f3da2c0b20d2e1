"""Steps against AdapterHub's, which needs an older transformers: a process in an environment of its own takes turns
with us, and both count their steps in steps of full tuning of their own.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.ratios import Ratio, paired_ratio
from deltune.studies.jobs.timed_model import time_interleaved

from .frame import Piece
from .peers import bare, full, ours
from .rows import NOT_SLOWER, Row, missing, of_ratio
from .shapes import Shape, base, build, minilm

ROOT = Path(__file__).parents[1]
FULL, BARE = ALL = ("full", "bare")
"""What both have that is no method."""


class Died(Exception):
    """The other process ended; with what it said last."""


class Worker:
    """The other process."""

    def __init__(self, python: Path) -> None:
        path = os.pathsep.join((str(ROOT), str(ROOT / "src")))
        self.said = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process
        self.process = subprocess.Popen(
            [str(python), "-m", "benchmarks.adapterhub_worker"], cwd=ROOT, text=True,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(torch.get_num_threads())},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.said,
        )  # fmt: skip

    def ask(self, **what: Any) -> dict[str, Any]:
        """Its answer. Raises Died."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it died: there is no answer
            print(json.dumps(what), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            self.said.seek(0)
            lines = self.said.read().strip().splitlines()
            raise Died(f"AdapterHub's process died: {lines[-1] if lines else 'without a word'}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.said.close()


def measure(shape: Shape, rounds: int, environment: Path) -> list[Row]:
    """All rows of a shape."""
    python = environment / "bin" / "python"
    name = f"step / AdapterHub's, both of full tuning: {{}}; {shape}"
    if not python.exists():
        return [missing(name.format("all methods"), "make bench-adapterhub-env")]
    worker = Worker(python)
    try:
        answer = worker.ask(shape=asdict(shape))
        like = build(shape)
        cases: dict[tuple[str, str], Callable[[], object]] = {
            ("ours", FULL): full(shape).step, ("ours", BARE): bare(shape, like).forward_twice
        }  # fmt: skip
        cases |= {("ours", method): ours(method, shape, like).step for method in answer["methods"] if method not in ALL}
        cases |= {("theirs", method): partial(worker.ask, step=method) for method in answer["methods"]}
        gc.collect()
        seconds = time_interleaved(cases, rounds)
    except Died as error:
        return [missing(name.format("all methods"), str(error))]
    finally:
        worker.close()
    rows = [missing(name.format(method), "AdapterHub cannot") for method in answer["cannot"]]
    for method in answer["methods"]:
        if method == FULL:
            continue
        shares = {side: [a / b for a, b in zip(seconds[side, method], seconds[side, FULL], strict=True)]
                  for side in ("ours", "theirs")}  # fmt: skip
        ratio: Ratio = paired_ratio(shares["ours"], shares["theirs"])
        each = [
            f"{side} {statistics.median(shares[side]):.3f} of {1000 * statistics.median(seconds[side, FULL]):.0f} ms"
            for side in shares
        ]
        note = f"of full tuning: {', '.join(each)}"
        if method == BARE:  # by how much the two transformers differ
            bare_name = f"two forwards, bare / in AdapterHub's environment, both of full tuning; {shape}"
            rows.append(of_ratio(bare_name, ratio, None, note))
        else:
            rows.append(of_ratio(name.format(method), ratio, NOT_SLOWER, note))
    return rows


def pieces(environment: Path) -> list[Piece]:
    shapes = (minilm("encoder", dropout=0.1, rows=8), minilm("decoder", True, 0.1, rows=8))
    return [_piece(f"adapterhub: {shape}", shape, environment, 45.0) for shape in shapes]


def others(environment: Path) -> list[Piece]:
    """The shapes that `make bench` has no time for."""
    shapes = {
        minilm("encoder", False, 0.0, rows=8): 40.0,
        minilm("encoder", True, 0.1, rows=8): 40.0,
        minilm("decoder", False, 0.0, rows=8): 40.0,
        base("encoder", True, 0.1): 90.0,
        base("decoder", False, 0.0): 90.0,
    }
    return [_piece(f"others: AdapterHub, {shape}", shape, environment, seconds) for shape, seconds in shapes.items()]


def _piece(name: str, shape: Shape, environment: Path, seconds: float) -> Piece:
    there = (environment / "bin" / "python").exists()
    return Piece(name, partial(measure, shape, 7, environment), seconds if there else 0.0)
