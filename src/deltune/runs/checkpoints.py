"""What a resumption needs, in two files without pickle: tensors as safetensors, everything else as JSON.

Folder STEP of the run's `checkpoint`: tensors.safetensors (trained.NAME, optimizer.I.NAME, rng.PROCESS.NAME) and
facts.json, beside trainer_state.json, the Trainer's own. It appears whole, and then older ones go.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy
import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ..disk import refused
from ..errors import DeltuneError
from . import processes, sharding
from .folder import write_json

TENSORS, FACTS = "tensors.safetensors", "facts.json"


def latest(folder: Path) -> Path | None:
    """The newest checkpoint, or None."""
    steps = [p for p in folder.glob("*") if p.name.isdigit()] if folder.is_dir() else []
    return max(steps, key=lambda p: int(p.name), default=None)


def save(
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
    tensors: dict[str, torch.Tensor] = {f"trained.{name}": sharding.gathered(p) for name, p in trained.items()}
    scalars: dict[str, dict[str, Any]] = {}
    for index, values in held["state"].items():
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                tensors[f"optimizer.{index}.{name}"] = sharding.gathered(value)
            else:
                scalars.setdefault(str(index), {})[name] = value
    states = processes.gathered(_random_state())
    tensors |= {f"rng.{i}.{name}": value for i, (own, _) in enumerate(states) for name, value in own.items()}
    facts = facts | {
        "optimizer": {"groups": held["param_groups"], "scalars": scalars},
        "scheduler": scheduler.state_dict(),
        "rng": [told for _, told in states],
    }
    return processes.of_main(lambda: _write(folder, step, tensors, facts, state))


def _write(
    folder: Path, step: int, tensors: dict[str, torch.Tensor], facts: dict[str, Any], state: Callable[[str], None]
) -> Path:
    target = folder / str(step)
    fresh: Path | None = None
    try:
        folder.mkdir(exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=".", dir=folder))
        save_file({n: t.detach().to("cpu", copy=True).contiguous() for n, t in tensors.items()}, fresh / TENSORS)
        with open(fresh / TENSORS, "rb") as file:
            os.fsync(file.fileno())
        write_json(fresh / FACTS, facts)
        state(str(fresh / "trainer_state.json"))
        if target.exists():
            shutil.rmtree(target)
        os.replace(fresh, target)
    except (OSError, safetensors.SafetensorError) as error:
        if fresh is not None:
            shutil.rmtree(fresh, ignore_errors=True)
        raise refused(folder.parent, error) from error
    for older in folder.iterdir():
        if older != target:
            shutil.rmtree(older, ignore_errors=True)
    return target


def facts(checkpoint: Path) -> dict[str, Any]:
    """The facts of a checkpoint. Error: it cannot be read."""
    try:
        found: dict[str, Any] = json.loads((checkpoint / FACTS).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _unreadable(checkpoint, error) from error
    return found


def restore_trained(checkpoint: Path, trained: Mapping[str, nn.Parameter]) -> None:
    """Put the trained values back. Error: they are not those of these parameters."""
    found = _tensors(checkpoint, "trained.")
    if set(found) != set(trained) or any(found[n].shape != p.shape for n, p in trained.items()):
        raise DeltuneError(f"{checkpoint} is not of this model and method; start afresh (--fresh)")
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(found[name])


def restore_optimizer(checkpoint: Path, optimizer: Any, scheduler: Any) -> None:
    """Put the states of optimiser and scheduler back."""
    told = facts(checkpoint)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states: dict[int, dict[str, Any]] = {int(k): dict(v) for k, v in told["optimizer"]["scalars"].items()}
    for key, value in _tensors(checkpoint, "optimizer.").items():
        index, name = key.split(".", 1)
        states.setdefault(int(index), {})[name] = sharding.cut(value, parameters[int(index)])
    optimizer.load_state_dict({"state": states, "param_groups": told["optimizer"]["groups"]})
    scheduler.load_state_dict(told["scheduler"])


def restore_random(checkpoint: Path) -> None:
    """Put the random states of Python, NumPy and torch back, each process its own.

    A process more than there were when the checkpoint was written goes on drawing as it began.
    """
    own, states = processes.index(), facts(checkpoint)["rng"]
    if own >= len(states):
        return
    told, found = states[own], _tensors(checkpoint, f"rng.{own}.")
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
    return DeltuneError(f"{checkpoint} cannot be read ({error}); start afresh (--fresh)")
