"""Functions that run in processes of their own, forked from a server that has imported everything."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deltune.studies.jobs.pool import PRELOADED
from deltune.train.config import RunConfig

HANG = 300.0
"""Seconds after which a process that should take a few counts as hanging."""

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    [*PRELOADED, "deltune.cli.app", "deltune.cli.train", "transformers.models.bert.modeling_bert"]
)


class Started:
    """A function that runs in a process of its own, with its output in a file."""

    def __init__(self, what: Callable[..., None], folder: Path, *arguments: Any) -> None:
        self.output = folder.with_name(f"{folder.name}.{time.monotonic_ns()}.txt")
        around = (str(self.output), dict(os.environ))  # the server has the environment that it was started in
        self.process = SERVER.Process(target=_run_with_output, args=(*around, what, *arguments))
        self.process.start()

    def kill(self) -> bool:
        """Kill the process; return whether it was still running."""
        self.process.kill()
        return self.wait() == -signal.SIGKILL

    def interrupt(self) -> int:
        """Send what Ctrl-C sends, and return the exit code."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGINT)
        return self.wait()

    @property
    def running(self) -> bool:
        """Whether the process has not ended yet."""
        return self.process.is_alive()

    def wait(self) -> int:
        """Wait for the process, and return its exit code."""
        self.process.join(HANG)
        if self.process.exitcode is None:
            self.process.kill()
            pytest.fail(f"it hangs; it printed\n{self.printed}")
        return int(self.process.exitcode)

    @property
    def printed(self) -> str:
        """The output so far."""
        return self.output.read_text() if self.output.exists() else ""


def _run_with_output(output: str, environment: dict[str, str], what: Callable[..., None], *arguments: Any) -> None:
    os.environ.clear()
    os.environ.update(environment)
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background command ignores it
    what(*arguments)


def deltune(*words: str) -> None:
    """`deltune` with these words, as from a shell."""
    from deltune.cli import main

    sys.argv = ["deltune", *words]
    main()


def killed_training(run_spec: RunConfig, folder: Path, ready: Callable[[], bool]) -> None:
    """Begin `deltune train` in a process of its own, and kill it by SIGKILL as soon as `ready` is true."""
    file = folder.with_name(f"{folder.name}.yaml")
    file.write_text(run_spec.yaml())
    started = Started(deltune, folder, "train", str(file), "--output", str(folder))
    try:
        while not ready():
            assert started.running, started.printed
            time.sleep(0.01)
    finally:
        started.kill()
