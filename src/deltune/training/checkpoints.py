"""What a resumption needs, without pickle: tensors as safetensors, everything else as JSON, checksums of both.

Folder STEP of the run's `checkpoint`: tensors.safetensors (trained.NAME, optimizer.I.NAME, rng.PROCESS.NAME) and
facts.json, beside trainer_state.json, the Trainer's own, and SHA256SUMS, which `sha256sum --check` takes. It appears
whole and synced to the disk, and then older ones go. A resumption begins with `verify`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy
import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import TrainerState

from ..errors import DeltuneError, error_from_problems, error_summary, excerpt
from ..filesystem import fsync_directory, fsync_file, new_file_mode, write_error, write_json, write_text
from . import distributed, run_dir

TENSORS, FACTS, STATE, SUMS = "tensors.safetensors", "facts.json", "trainer_state.json", "SHA256SUMS"
SUMMED = (TENSORS, FACTS, STATE)
"""Everything that a resumption reads of a checkpoint."""

TODO = "bring back a copy of the folder, or start afresh (--fresh)"


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint, or None."""
    steps = [p for p in folder.glob("*") if p.name.isdecimal() and p.is_dir()] if folder.is_dir() else []
    return max(steps, key=lambda p: int(p.name), default=None)


def save_checkpoint(
    folder: Path,
    step: int,
    trained: Mapping[str, nn.Parameter],
    optimizer: Any,
    scheduler: Any,
    facts: dict[str, Any],
    state: Callable[[str], None],
) -> Path:
    """Write the checkpoint of a step; `state` writes the Trainer's own state to the path it is given.

    All processes come here with their random states and their shares of tensors; the main one writes.

    Error: no space left; the checkpoint before stays.
    """
    held = optimizer.state_dict()
    tensors: dict[str, torch.Tensor] = {f"trained.{name}": distributed.gather_shards(p) for name, p in trained.items()}
    scalars: dict[str, dict[str, Any]] = {}
    for index, values in held["state"].items():
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                tensors[f"optimizer.{index}.{name}"] = distributed.gather_shards(value)
            else:
                scalars.setdefault(str(index), {})[name] = value
    states = distributed.all_gather_objects(_random_state())
    tensors |= {f"rng.{i}.{name}": value for i, (own, _) in enumerate(states) for name, value in own.items()}
    facts = facts | {
        "optimizer": {"groups": held["param_groups"], "scalars": scalars},
        "scheduler": scheduler.state_dict(),
        "rng": [told for _, told in states],
    }
    return distributed.broadcast_from_main(lambda: _write(folder, step, tensors, facts, state))


def _write(
    folder: Path, step: int, tensors: dict[str, torch.Tensor], facts: dict[str, Any], state: Callable[[str], None]
) -> Path:
    target = folder / str(step)
    fresh, old = (folder / f".{step}-{secrets.token_hex(8)}" for _ in range(2))
    try:
        folder.mkdir(exist_ok=True)
        fresh.mkdir()
        save_file({n: t.detach().to("cpu", copy=True).contiguous() for n, t in tensors.items()}, fresh / TENSORS)
        os.chmod(fresh / TENSORS, new_file_mode(fresh))  # safetensors keeps its files to their owner
        write_json(fresh / FACTS, facts)
        state(str(fresh / STATE))
        for name in (TENSORS, STATE):
            fsync_file(fresh / name)
        write_checksums(fresh)
        if target.exists():
            os.rename(target, old)
        os.replace(fresh, target)
        fsync_directory(folder)
    except BaseException as error:
        shutil.rmtree(fresh, ignore_errors=True)
        if old.exists() and not target.exists():
            os.rename(old, target)
        if not isinstance(error, OSError | safetensors.SafetensorError):
            raise
        raise write_error(folder.parent, error) from error
    for older in folder.iterdir():
        if older != target:
            shutil.rmtree(older, ignore_errors=True)
    return target


def write_checksums(checkpoint: Path) -> None:
    """Write the checksums of a checkpoint's files beside them."""
    write_text(checkpoint / SUMS, "".join(f"{digest(checkpoint / name)}  {name}\n" for name in SUMMED))


def digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify(checkpoint: Path) -> None:
    """Hold every file of a checkpoint against its checksum.

    Raises:
        DeltuneError: A file is missing or damaged, or the checkpoint has no checksums.
    """
    try:
        lines = [line.split("  ", 1) for line in (checkpoint / SUMS).read_text(encoding="utf-8").split("\n") if line]
    except FileNotFoundError:
        raise DeltuneError(f"{checkpoint} has no {SUMS}, so nobody can tell whether it is whole; {TODO}") from None
    except (OSError, ValueError) as error:
        raise _unreadable(checkpoint, error) from error
    sums = {line[-1]: line[0] for line in lines}
    problems = []
    for name in SUMMED:
        try:
            if digest(checkpoint / name) != sums.get(name):
                problems.append(f"{name} is not the file that was written: its checksum differs")
        except FileNotFoundError:
            problems.append(f"{name} is missing")
        except OSError as error:
            problems.append(f"{name} cannot be read: {error}")
    if set(sums) != set(SUMMED):
        problems.append(f"{SUMS} is not the file that was written: it has other names in it")
    if problems:
        raise error_from_problems(f"{checkpoint} is damaged, and is not used; {TODO}", problems)


def find_resumable(folder: Path) -> Path | None:
    """Return the newest checkpoint, held against its checksums; None where there is none.

    Raises:
        DeltuneError: It is damaged.
    """
    checkpoint = latest_checkpoint(folder)
    if checkpoint is not None:
        verify(checkpoint)
        read_progress(checkpoint)
        with _restoring(checkpoint):
            state = TrainerState.load_from_json(str(checkpoint / STATE))
            if state.global_step != int(checkpoint.name) or not isinstance(state.epoch, float | int):
                raise ValueError(f"{STATE} is of step {excerpt(state.global_step)}, epoch {excerpt(state.epoch)}")
    return checkpoint


def read_progress(checkpoint: Path) -> dict[str, Any]:
    """The facts of a checkpoint. Error: it cannot be read, or is not as it was written."""
    try:
        return run_dir.read_record(run_dir.Progress, checkpoint / FACTS)
    except DeltuneError as error:
        raise _unreadable(checkpoint, error) from error


@contextlib.contextmanager
def _restoring(checkpoint: Path) -> Iterator[None]:
    """Whatever a checkpoint holds that does not fit (torch and NumPy say so in many ways) becomes one clear error."""
    try:
        yield
    except DeltuneError:
        raise
    except Exception as error:
        raise _unreadable(checkpoint, error) from error


def restore_trained(checkpoint: Path, trained: Mapping[str, nn.Parameter]) -> None:
    """Put the trained values back. Error: they are not those of these parameters."""
    found = _tensors(checkpoint, "trained.")
    if set(found) != set(trained) or any(found[n].shape != p.shape for n, p in trained.items()):
        raise DeltuneError(f"{checkpoint} is not of this model and method; {TODO}")
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(found[name])


def restore_optimizer(checkpoint: Path, optimizer: Any, scheduler: Any) -> None:
    """Put the states of optimiser and scheduler back. Error: they do not fit."""
    told = read_progress(checkpoint)
    with _restoring(checkpoint):
        _restore_optimizer(checkpoint, told, optimizer, scheduler)


def _restore_optimizer(checkpoint: Path, told: dict[str, Any], optimizer: Any, scheduler: Any) -> None:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states: dict[int, dict[str, Any]] = {int(k): dict(v) for k, v in told["optimizer"]["scalars"].items()}
    for key, value in _tensors(checkpoint, "optimizer.").items():
        index, name = key.split(".", 1)
        states.setdefault(int(index), {})[name] = distributed.shard_like(value, parameters[int(index)])
    optimizer.load_state_dict({"state": states, "param_groups": told["optimizer"]["groups"]})
    scheduler.load_state_dict(told["scheduler"])


def restore_random(checkpoint: Path) -> None:
    """Put the random states of Python, NumPy and torch back, each process its own.

    A process more than there were when the checkpoint was written goes on drawing as it began. Error: they are none.
    """
    own, states = distributed.rank(), read_progress(checkpoint)["rng"]
    if own < len(states):
        with _restoring(checkpoint):
            _restore_random(states[own], _tensors(checkpoint, f"rng.{own}."))


def _restore_random(told: dict[str, Any], found: dict[str, torch.Tensor]) -> None:
    version, values, gauss = told["python"]
    random.setstate((version, tuple(values), gauss))
    kind, keys, *rest = told["numpy"]
    numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), *rest))
    torch.set_rng_state(found["cpu"])
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            if f"cuda.{i}" in found:
                torch.cuda.set_rng_state(found[f"cuda.{i}"], i)


def _random_state() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    tensors = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors |= {f"cuda.{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    state: Any = numpy.random.get_state()
    kind, keys, *rest = state
    return tensors, {"python": random.getstate(), "numpy": [kind, keys.tolist(), *rest]}


def _tensors(checkpoint: Path, prefix: str) -> dict[str, torch.Tensor]:
    try:
        found = load_file(checkpoint / TENSORS)
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise _unreadable(checkpoint, error) from error
    return {name.removeprefix(prefix): tensor for name, tensor in found.items() if name.startswith(prefix)}


def _unreadable(checkpoint: Path, error: Exception) -> DeltuneError:
    return DeltuneError(f"{checkpoint} cannot be read ({type(error).__name__}: {error_summary(error)}); {TODO}")
