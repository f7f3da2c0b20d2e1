"""A study whose driver and workers are killed at random: no result is lost, doubled or different in the end."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

import tiny
from deltune.studies.jobs.store import ResultStore
from processes import HANG
from studies.test_engine import drive, driver, finished, scores, study

from .strikes import chance, content

STRIKES_OF_WORKERS = 2
"""In a driver's life: a work that takes a third worker with it counts as failed."""


def workers(process: subprocess.Popen[str]) -> list[int]:
    """The processes that a driver's server of workers has forked for its work."""
    return [pid for server, line in children(process.pid) if "forkserver" in line for pid, _ in children(server)]


def children(process: int) -> list[tuple[int, str]]:
    """The processes that a process has started, each with its command line."""
    words = ["ps", "-ww", "-o", "pid=", "-o", "args=", "--ppid", str(process)]
    lines = subprocess.run(words, capture_output=True, text=True).stdout.splitlines()
    return [(int(pid), words) for pid, words in (line.split(maxsplit=1) for line in lines)]


def disturbed(root: Path, file: Path, numbers: random.Random, pause: float, most: int) -> tuple[int, int, int]:
    """One driver's life, with up to so many kills: its exit code, kills of workers, kills of the driver itself."""
    process, struck, began = driver(root, file, 2), 0, time.monotonic()
    try:
        if numbers.random() < 0.8:  # else it is struck while it starts
            while process.poll() is None and len(workers(process)) < 2 and time.monotonic() - began < HANG:
                time.sleep(0.05)
        while process.poll() is None:
            time.sleep(numbers.uniform(0, pause))
            assert time.monotonic() - began < HANG, "it hangs"
            if struck == most or process.poll() is not None:
                continue
            victims = workers(process) if struck < STRIKES_OF_WORKERS else []
            victim = numbers.choice([*victims, process.pid])
            if victim == process.pid:
                return -signal.SIGKILL, struck, 1
            os.kill(victim, signal.SIGKILL)
            struck += 1
        assert process.stderr is not None
        assert process.returncode == 0, process.stderr.read()
        return 0, struck, 0
    finally:
        process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()


@pytest.mark.slow
def test_driver_and_workers_are_killed(tmp_path: Path, kills: int = 8) -> None:
    """So many kills and more, at any moment of the life of a driver with two workers, over one study after another."""
    numbers, struck = chance(f"study {kills}"), 0
    tiny.model(tmp_path / "model")
    jobs = [planned.job for planned in study(tmp_path).cells()]
    with ResultStore(tmp_path / "whole.jsonl") as results:
        assert drive(jobs, results).done == 6
        known: dict[str, Any] = {row.name: scores(row) for row in results.records()}
    runs = sorted((tmp_path / "whole.runs").iterdir())
    while struck < kills:
        file, history, began, code = tmp_path / f"after{struck}.jsonl", [], time.monotonic(), -1
        place = file.with_suffix(".runs")
        while code:
            before = {path: path.stat().st_mtime_ns for path in place.glob("*/metrics.json")}
            code, *strikes = disturbed(tmp_path, file, numbers, 3.0, 0 if len(history) > 3 else 3)
            history.append((*strikes, finished(file)))
            assert all(path.stat().st_mtime_ns == when for path, when in before.items()), "what was done was done again"
            assert time.monotonic() - began < 4 * HANG, history
        struck += sum(workers + driver for workers, driver, _ in history)
        print(f"kills of workers, of the driver, then finished: {history}")
        with ResultStore(file) as results:
            assert {row.name: scores(row) for row in results.records()} == known, history
            assert results.claimed_jobs() == set()
        assert [run.name for run in runs] == sorted(path.name for path in place.iterdir())
        for run in runs:
            assert content(run) == content(place / run.name), history
