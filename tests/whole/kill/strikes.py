"""Disturb runs in processes of their own by SIGKILL, a full disk or another process."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from safetensors.torch import load_file

from deltune.train import checkpoints
from deltune.train.run_folder import LOCK_FILE, RunFolder
from processes import deltune

WRITES = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod", "os.symlink", "tempfile.mkstemp")
"""Python's audit events of changes to a disk; `open` also where it is for reading, which is as good a moment."""


@dataclass(frozen=True)
class Strike:
    """A disturbance of a process that is about to change a folder for the `at`-th time.

    Attributes:
        folder: The folder.
        at: The number of the change, from 1.
        kill: Whether the process is killed; else the disk is full from then on.
    """

    folder: str
    at: int
    kill: bool = True

    def arm(self) -> None:
        """Install the disturbance in this process."""
        count = 0

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal count
            if event not in WRITES:
                return
            inside = any(isinstance(one, str | os.PathLike) and self.folder in str(one) for one in arguments)
            if not inside and not (event in ("os.remove", "os.rmdir") and arguments[-1] != -1):  # by shutil.rmtree
                return
            if self.kill:
                count += 1
                if count == self.at:
                    os.kill(os.getpid(), signal.SIGKILL)
            elif event in ("os.mkdir", "tempfile.mkstemp") or (event == "open" and arguments[2] & os.O_CREAT):
                count += 1
                if count >= self.at:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(arguments[0]))

        sys.addaudithook(hook)


def train(spec_file: str, folder: str, strike: Strike | None = None) -> None:
    """`deltune train`, as from a shell."""
    if strike is not None:
        strike.arm()
    deltune("train", spec_file, "--output", folder, "--quiet")


def small_disk(folder: str, kilobytes: int) -> None:
    """Mount a small disk at a folder, which only this process sees.

    Raises:
        OSError: Mounting is not permitted here.
    """
    user, group = os.getuid(), os.getgid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x10000000 | 0x00020000):  # CLONE_NEWUSER, CLONE_NEWNS
        raise OSError(ctypes.get_errno(), "unshare")
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        Path(f"/proc/self/{name}").write_text(text)
    resized(folder, kilobytes, "mount")


def resized(folder: str, kilobytes: int, how: str = "remount") -> None:
    options = f"{'remount,' if how == 'remount' else ''}size={kilobytes}k"
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "none", folder], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise OSError(done.stderr)


def permitted() -> bool:
    """Whether a process may mount a disk of its own here."""
    done = subprocess.run(["unshare", "-Urm", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, check=False)
    return done.returncode == 0


def whole(folder: Path) -> None:
    """Check that every file of a run can be read to its end, and that no temporary file but its lock is left.

    A finished run that was killed while it removed its checkpoint may have a part of it, which nobody reads.
    """
    run = RunFolder(folder)
    for path in folder.rglob("*") if folder.is_dir() else ():
        if path.name == LOCK_FILE or (run.finished and run.checkpoint in path.parents):
            continue
        assert not path.name.startswith("."), f"{path} was left behind"
        if path.name in ("metrics.json", "environment.json", "delta.json", "facts.json", "trainer_state.json"):
            json.loads(path.read_text())
        elif path.suffix == ".safetensors":
            load_file(path)
        elif path.name == "spec.yaml":
            yaml.safe_load(path.read_text())
        elif path.parent.name == "predictions":
            for line in path.read_text().splitlines():
                json.loads(line)
    if run.delta.exists():
        assert {path.name for path in run.delta.iterdir()} == {"delta.json", "delta.safetensors"}
    checkpoint = checkpoints.latest_checkpoint(run.checkpoint)
    if checkpoint is not None and not run.finished:
        checkpoints.read_progress(checkpoint)


def content(folder: Path) -> dict[str, bytes]:
    """Return what a run leaves, without times: bytes of its delta and predictions, its metrics and its log."""
    files: dict[str, Any] = {
        str(path.relative_to(folder)): path.read_bytes()
        for place in ("delta", "predictions")
        for path in sorted(folder.rglob(f"{place}/*"))
    }
    for path in sorted([*folder.rglob("metrics.json"), *folder.rglob("log.jsonl")]):
        lines = [path.read_text()] if path.suffix == ".json" else path.read_text().splitlines()
        files[str(path.relative_to(folder))] = [without_times(json.loads(line)) for line in lines]
    return files


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_times(one) for key, one in value.items() if "second" not in key}
    return [without_times(one) for one in value] if isinstance(value, list) else value


def chance(name: str) -> random.Random:
    """Return a random generator whose seed is printed; DELTUNE_SEED sets the seed to repeat a failure."""
    seed = os.environ.get("DELTUNE_SEED") or str(time.time_ns())
    print(f"{name}: DELTUNE_SEED={seed}")
    return random.Random(f"{name} {seed}")
