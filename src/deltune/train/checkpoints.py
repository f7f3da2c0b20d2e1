"""Checkpoints that training resumes from: tensors in safetensors, everything else in JSON, with checksums; no pickle.

The folder `checkpoint/STEP` of a run holds tensors.safetensors (trained.NAME, optimizer.I.NAME, rng.RANK.NAME),
facts.json, the Trainer's own trainer_state.json, and SHA256SUMS, which `sha256sum --check` reads. It is written whole
and synced to the disk before older checkpoints are removed. A run that goes on compares the checksums; then
the content is what was written, and is not checked again.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy
import safetensors
import torch
from safetensors.torch import load_file, save_file

from ..errors import DeltuneError, error_from_problems, error_summary
from ..files import atomic_folder, file_sha256, read_json_object, write_error, write_json, write_text
from ..runtime import sharding

TENSORS_FILE, PROGRESS_FILE, STATE_FILE = "tensors.safetensors", "facts.json", "trainer_state.json"
CHECKSUMS_FILE = "SHA256SUMS"
CHECKED_FILES = (TENSORS_FILE, PROGRESS_FILE, STATE_FILE)
"""The files that a resumed run reads."""

ADVICE = "bring back a copy of the folder, or start afresh (--fresh)"
"""Advice about a damaged checkpoint; error messages end with it."""


def latest_checkpoint(folder: Path) -> Path | None:
    """Return the checkpoint of the highest step in a run's checkpoint folder, or None if there is none."""
    steps = [p for p in folder.glob("*") if p.name.isdecimal() and p.is_dir()] if folder.is_dir() else []
    return max(steps, key=lambda p: int(p.name), default=None)


def save_checkpoint(
    folder: Path,
    step: int,
    trained: Mapping[str, torch.Tensor],
    optimizer: Any,
    scheduler: Any,
    progress: dict[str, Any],
    save_state: Callable[[str], None],
) -> Path:
    """Write the checkpoint of a step and remove older ones.

    All processes must call this function, with their own random states and their shards of tensors; rank 0 writes.
    """
    optimizer_state = optimizer.state_dict()
    tensors: dict[str, torch.Tensor] = {
        f"trained.{name}": sharding.gather_full_tensor(p) for name, p in trained.items()
    }
    scalars: dict[str, dict[str, Any]] = {}
    for index, values in optimizer_state["state"].items():
        for name, value in _flat(values):
            if isinstance(value, torch.Tensor):
                tensors[f"optimizer.{index}.{name}"] = sharding.gather_full_tensor(value)
            else:
                scalars.setdefault(str(index), {})[name] = value
    random_states = sharding.all_gather_objects(_random_state())
    for rank, (random_tensors, _) in enumerate(random_states):
        tensors |= {f"rng.{rank}.{name}": value for name, value in random_tensors.items()}
    progress = progress | {
        "optimizer": {"groups": optimizer_state["param_groups"], "scalars": scalars},
        "scheduler": scheduler.state_dict(),
        "rng": [values for _, values in random_states],
    }
    return sharding.broadcast_from_main(lambda: _write(folder, step, tensors, progress, save_state))


def _write(
    folder: Path,
    step: int,
    tensors: dict[str, torch.Tensor],
    progress: dict[str, Any],
    save_state: Callable[[str], None],
) -> Path:
    """Write a checkpoint whole or not at all, and then remove older ones and what interrupted writes left."""
    target = folder / str(step)
    try:
        with atomic_folder(target) as fresh:
            save_file(
                {n: t.detach().to("cpu", copy=True).contiguous() for n, t in tensors.items()}, fresh / TENSORS_FILE
            )
            write_json(fresh / PROGRESS_FILE, progress)
            save_state(str(fresh / STATE_FILE))
            write_checksums(fresh)
    except (OSError, safetensors.SafetensorError) as error:
        raise write_error(folder.parent, error) from error
    for older in folder.iterdir():
        if older != target:
            shutil.rmtree(older, ignore_errors=True)
    return target


def write_checksums(checkpoint: Path) -> None:
    """Write the checksums of a checkpoint's files beside them, in the format of `sha256sum`."""
    lines = [f"{file_sha256(checkpoint / name)}  {name}\n" for name in CHECKED_FILES]
    write_text(checkpoint / CHECKSUMS_FILE, "".join(lines))


def verify_checksums(checkpoint: Path) -> None:
    """Compare every file of a checkpoint with its checksum."""
    try:
        text = (checkpoint / CHECKSUMS_FILE).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DeltuneError(
            f"{checkpoint} has no {CHECKSUMS_FILE}, so it is not known whether it is whole; {ADVICE}"
        ) from None
    except (OSError, ValueError) as error:
        raise _unreadable(checkpoint, error) from error
    lines = [line.split("  ", 1) for line in text.split("\n") if line]
    checksums = {line[-1]: line[0] for line in lines}
    problems = []
    for name in CHECKED_FILES:
        try:
            if file_sha256(checkpoint / name) != checksums.get(name):
                problems.append(f"{name} is not the file that was written: its checksum differs")
        except FileNotFoundError:
            problems.append(f"{name} is missing")
        except OSError as error:
            problems.append(f"{name} cannot be read: {error}")
    if set(checksums) != set(CHECKED_FILES):
        problems.append(f"{CHECKSUMS_FILE} is not the file that was written: it lists other files")
    if problems:
        raise error_from_problems(f"{checkpoint} is damaged and is not used; {ADVICE}", problems)


def read_progress(checkpoint: Path) -> dict[str, Any]:
    """Read facts.json of a checkpoint: how far training is, and the states that are no tensors."""
    try:
        return read_json_object(checkpoint / PROGRESS_FILE)
    except DeltuneError as error:
        raise _unreadable(checkpoint, error) from error


def restore_trained(checkpoint: Path, trained: Mapping[str, torch.Tensor]) -> None:
    """Copy the trained values of a checkpoint into the parameters."""
    values = _read_tensors(checkpoint, "trained.")
    if set(values) != set(trained) or any(values[n].shape != p.shape for n, p in trained.items()):
        raise DeltuneError(
            f"{checkpoint} was written by another model or method: its tensors have other names or shapes; {ADVICE}"
        )
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(values[name])


def restore_optimizer(checkpoint: Path, optimizer: Any, scheduler: Any) -> None:
    """Load the states of the optimizer and of the learning-rate scheduler."""
    progress = read_progress(checkpoint)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states: dict[int, dict[str, Any]] = {int(k): dict(v) for k, v in progress["optimizer"]["scalars"].items()}
    for key, value in _read_tensors(checkpoint, "optimizer.").items():
        index, name = key.split(".", 1)
        states.setdefault(int(index), {})[name] = sharding.shard_like(value, parameters[int(index)])
    states = {index: _nested(values) for index, values in states.items()}
    optimizer.load_state_dict({"state": states, "param_groups": progress["optimizer"]["groups"]})
    scheduler.load_state_dict(progress["scheduler"])


def _flat(state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Iterate over the state of a parameter; bitsandbytes keeps what it has quantised in a dictionary inside of it."""
    for name, value in state.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{inner}", of_inner) for inner, of_inner in value.items())
        else:
            yield name, value


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `_flat` was made of."""
    state: dict[str, Any] = {}
    for name, value in flat.items():
        outer, _, inner = name.partition(".")
        if inner:
            state.setdefault(outer, {})[inner] = value
        else:
            state[outer] = value
    return state


def restore_random(checkpoint: Path) -> None:
    """Restore the states of the random generators of Python, NumPy and torch, on each rank its own.

    A rank that did not exist when the checkpoint was written keeps the state that it was seeded with.
    """
    rank, random_states = sharding.process_rank(), read_progress(checkpoint)["rng"]
    if rank < len(random_states):
        _set_random_state(random_states[rank], _read_tensors(checkpoint, f"rng.{rank}."))


def _set_random_state(values: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    version, python_state, gauss = values["python"]
    random.setstate((version, tuple(python_state), gauss))
    kind, keys, *rest = values["numpy"]
    numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), *rest))
    torch.set_rng_state(tensors["cpu"])
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            if f"cuda.{i}" in tensors:
                torch.cuda.set_rng_state(tensors[f"cuda.{i}"], i)


def _random_state() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return this rank's random states: those that are tensors, and those that JSON can hold."""
    tensors = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors |= {f"cuda.{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    state: Any = numpy.random.get_state()
    kind, keys, *rest = state
    return tensors, {"python": random.getstate(), "numpy": [kind, keys.tolist(), *rest]}


def _read_tensors(checkpoint: Path, prefix: str) -> dict[str, torch.Tensor]:
    """Read the tensors whose names begin with a prefix, under the rest of their names."""
    try:
        tensors = load_file(checkpoint / TENSORS_FILE)
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise _unreadable(checkpoint, error) from error
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _unreadable(checkpoint: Path, error: Exception) -> DeltuneError:
    return DeltuneError(f"{checkpoint} cannot be read ({type(error).__name__}: {error_summary(error)}); {ADVICE}")
