"""Launching one command in several processes of this machine, which start together and end together.

torch.distributed.run is not used: it gives its processes sessions and pipes of their own, so that they outlive a
launcher that is killed. Here they hold the end of a pipe, and the first failure's exit code is the command's.
"""

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

GRACE = 5.0  # seconds in which the other processes may end by themselves
LIFELINE = "DELTUNE_LIFELINE"


def launch(count: int, command: Sequence[str]) -> int:
    """Run a command in several processes, with the environment variables that torchrun sets.

    The processes end with this one, however it ends.

    Args:
        count: How many processes.
        command: The command and its arguments.

    Returns:
        The exit code: 0, or that of the first process that failed, after which the others are ended; 130 after Ctrl-C.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    threads = str(max(1, (os.cpu_count() or 1) // count))
    # threads that spin while they wait slow others down on shared cores; a process alone is a tenth faster with them
    shared = {"OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "passive"}
    environment = {**shared, **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    with _lifeline() as line:
        environment[LIFELINE] = str(line)
        started = [
            subprocess.Popen(command, env={**environment, "RANK": str(i), "LOCAL_RANK": str(i)}, pass_fds=(line,))
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
    """Run this very command in several processes, if that is requested and has not happened yet.

    Args:
        count: How many processes are requested; None or 1 for none but this.

    Returns:
        The exit code of the processes, or None if this process does the work itself.

    Raises:
        DeltuneError: The number is no positive one, or differs from that of the processes which are running already.
    """
    running = int(os.environ.get("WORLD_SIZE", "1"))
    if count is not None and count < 1:
        raise DeltuneError(f"--launch {count}: give 1 or more")
    if running > 1 and count not in (None, running):
        raise DeltuneError(f"--launch {count} inside {running} processes: leave it out, or start deltune alone")
    return (
        None
        if count is None or count == 1 or running > 1
        else launch(count, [sys.executable, "-m", "deltune", *sys.argv[1:]])
    )


def is_main_process() -> bool:
    """Whether this process prints to the user: rank 0, where there are several."""
    return os.environ.get("RANK", "0") == "0"


def sharding_mode(requested: str | None) -> str:
    """Return "none" or "fsdp": what is requested, else what `accelerate launch --use_fsdp` says."""
    fsdp = os.environ.pop("ACCELERATE_USE_FSDP", "false")  # or accelerate would do it a second time
    return requested or ("fsdp" if fsdp.lower() in ("true", "1") else "none")


def exit_with_launcher() -> None:
    """End this process when the launcher that started it has ended, even if it was killed."""
    line = os.environ.pop(LIFELINE, None)
    if line is not None:

        def wait() -> None:
            os.read(int(line), 1)  # nothing is written: it returns when the other end is closed
            os._exit(1)

        threading.Thread(target=wait, daemon=True).start()


@contextlib.contextmanager
def _lifeline() -> Iterator[int]:
    """Give the read end of a pipe; its write end is closed with the context, or with this process."""
    read_end, write_end = os.pipe()
    try:
        yield read_end
    finally:
        os.close(write_end)
        os.close(read_end)


def _first_failure(started: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait for all processes, or for the first that fails, and return its exit code."""
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


def _end(started: Sequence[subprocess.Popen[bytes]], signal_number: signal.Signals) -> None:
    """End the processes that still run: wait for a while, then send a signal, then kill."""
    for act in (lambda p: None, lambda p: p.send_signal(signal_number), lambda p: p.kill()):
        running = [process for process in started if process.poll() is None]
        for process in running:
            act(process)
        until = time.monotonic() + GRACE
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
