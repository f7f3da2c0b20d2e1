"""What a study does once: 24 runs on two workers read the backbone once a worker and tokenise once a task."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from deltune.cli.use import TICKETS
from deltune.files import CACHE_VARIABLE, cache_folder, read_jsonl
from deltune.studies.jobs.job import Job, run_job
from deltune.studies.jobs.pool import Answer, Scheduler, WorkerPool, execute_safely
from deltune.studies.jobs.store import ResultStore
from deltune.train.config import RunConfig
from deltune.train.progress import ProgressDisplay
from deltune.train.setup import ModelCache

from .frame import Piece
from .rows import Row, Target

METHODS = ("lora(rank=8)", "layernorm", "prefix(length=4)", "head")
SPLITS = ("train", "validation", "test")


class Watched(WorkerPool):
    """Workers in this process, each with parts of its own as those in processes of their own have."""

    def __init__(self, runs: Path, workers: int) -> None:
        super().__init__(workers, runs, threads=1)
        self.parts = [ModelCache() for _ in range(workers)]
        self.tokenised: set[tuple[str, int]] = set()  # files of rows; one that is written again has another inode

    def submit(self, worker: int, job: Job) -> None:
        self.jobs[worker] = job

    def poll(self, timeout: float) -> list[tuple[int, Answer]]:
        finished = []
        while self.jobs:
            worker, job = self.jobs.popitem()
            finished.append((worker, execute_safely(job, self.runs, self.parts[worker])))
            cache = cache_folder()
            assert cache is not None
            self.tokenised |= {(file.name, file.stat().st_ino) for file in cache.glob("*.arrow")}
        return finished

    def close(self) -> None:
        pass


@contextlib.contextmanager
def cache(folder: Path) -> Iterator[None]:
    """Tokenised rows are kept there."""
    before = os.environ.get(CACHE_VARIABLE)
    os.environ[CACHE_VARIABLE] = str(folder)
    try:
        yield
    finally:
        os.environ.pop(CACHE_VARIABLE)
        if before is not None:
            os.environ[CACHE_VARIABLE] = before


def task(folder: Path, label: int) -> Path:
    """A task of the packaged tickets: is it this label or another?"""
    folder.mkdir(parents=True)
    for split in SPLITS:
        rows = [row for _, row in read_jsonl(TICKETS / f"{split}.jsonl")]
        named = [{"text": row["text"], "label": "yes" if row["label"] == label else "no"} for row in rows]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in named), encoding="utf-8")
    return folder


def measure(model: str = "minilm", seeds: int = 3, tasks: int = 2, workers: int = 2) -> list[Row]:
    """methods × seeds × tasks runs of one step each."""
    with tempfile.TemporaryDirectory() as folder, cache(Path(folder) / "cache"):
        place = Path(folder)
        jobs = [
            run_job(
                RunConfig.from_flat(
                    model=model, data=str(data), method=method, seed=seed, steps=1, batch_size=4, max_length=32,
                    metrics=("accuracy",),
                )
            )
            for data in [task(place / f"task{label}", label) for label in range(tasks)]
            for method in METHODS
            for seed in range(seeds)
        ]  # fmt: skip
        pool = Watched(place / "runs", workers)
        with ResultStore(place / "study.jsonl") as results:
            drive = Scheduler(lambda done: jobs, results, pool)
            drive.run(ProgressDisplay(enabled=False))
        if drive.failed:
            raise RuntimeError(f"{len(drive.failed)} runs of {len(jobs)} failed")
    reads = max(parts.read["models"] for parts in pool.parts)
    note = f"{len(jobs)} runs, {tasks} tasks, {workers} workers"
    made = len(pool.tokenised) / tasks / len(SPLITS)
    return [
        Row("study: reads of the backbone, by the worker with the most", reads, Target(1), unit="", note=note),
        Row("study: tokenisations of a split, a task; workers take turns", made, Target(1), unit="", note=note),
    ]


def pieces() -> list[Piece]:
    return [Piece("study: 24 runs", partial(measure), 40.0)]
