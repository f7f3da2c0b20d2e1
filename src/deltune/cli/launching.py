"""One command in several processes of this machine: started together, ended together."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence

from ..errors import DeltuneError

GRACE = 5.0  # seconds in which the others may end by themselves
LIFELINE = "DELTUNE_LIFELINE"


def launch(count: int, command: Sequence[str]) -> int:
    """Run a command `count` times, each told which it is, as torchrun does.

    Returns the exit code: 0, or of the first that failed, after which the others are ended. They end with this
    process, however it ends.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    threads = str(max(1, (os.cpu_count() or 1) // count))
    # threads that spin while they wait slow others down on shared cores; a process alone is a tenth faster with them
    shared = {"OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "passive"}
    told = {**shared, **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    told |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    with _lifeline() as line:
        told[LIFELINE] = str(line)
        started = [
            subprocess.Popen(command, env={**told, "RANK": str(i), "LOCAL_RANK": str(i)}, pass_fds=(line,))
            for i in range(count)
        ]
        try:
            return _first_failure(started)
        except KeyboardInterrupt:
            _end(started, signal.SIGINT)
            return 130
        finally:
            _end(started, signal.SIGTERM)


def launch_if_requested(count: int | None) -> int | None:
    """The exit code of this command in `count` processes, where it is to be launched and is not yet.

    Errors: no process at all; it is launched already, in another number.
    """
    there = int(os.environ.get("WORLD_SIZE", "1"))
    if count is not None and count < 1:
        raise DeltuneError(f"--launch {count}: give 1 or more")
    if there > 1 and count not in (None, there):
        raise DeltuneError(f"--launch {count} inside {there} processes: leave it out, or start deltune alone")
    return (
        None
        if count is None or count == 1 or there > 1
        else launch(count, [sys.executable, "-m", "deltune", *sys.argv[1:]])
    )


def is_main_process() -> bool:
    """Whether this process speaks to the user: the first, where there are several."""
    return os.environ.get("RANK", "0") == "0"


def sharding_mode(asked: str | None) -> str:
    """none or fsdp: what is asked for, else what `accelerate launch --use_fsdp` says."""
    told = os.environ.pop("ACCELERATE_USE_FSDP", "false")  # or accelerate would do it a second time
    return asked or ("fsdp" if told.lower() in ("true", "1") else "none")


def exit_with_launcher() -> None:
    """In a process that was launched: end when the launcher has ended, even if it was killed."""
    line = os.environ.pop(LIFELINE, None)
    if line is not None:

        def wait() -> None:
            os.read(int(line), 1)  # nothing is written: it returns when the other end is closed
            os._exit(1)

        threading.Thread(target=wait, daemon=True).start()


@contextlib.contextmanager
def _lifeline() -> Iterator[int]:
    """The end of a pipe to hand on; the other end is closed with the context, or with this process."""
    there, here = os.pipe()
    try:
        yield there
    finally:
        os.close(here)
        os.close(there)


def _first_failure(started: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait for all, or for the first that fails; its exit code."""
    while True:
        codes = [process.poll() for process in started]
        failed = next((i for i, code in enumerate(codes) if code), None)
        if failed is not None:
            code = codes[failed] or 0
            if code < 0:
                print(
                    f"deltune: process {failed + 1} of {len(started)} was ended by signal {-code}; run the same command"
                    " again, it goes on where it was",
                    file=sys.stderr,
                )
            return 128 - code if code < 0 else code
        if all(code == 0 for code in codes):
            return 0
        time.sleep(0.05)


def _end(started: Sequence[subprocess.Popen[bytes]], how: signal.Signals) -> None:
    """End what still runs: after some time in which it may end by itself, by a signal, and then for good."""
    for act in (lambda p: None, lambda p: p.send_signal(how), lambda p: p.kill()):
        running = [process for process in started if process.poll() is None]
        for process in running:
            act(process)
        until = time.monotonic() + GRACE
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
