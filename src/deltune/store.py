"""A delta as a folder: delta.json (what it is, for which base) and delta.safetensors (its numbers). No pickle.

Writing is all or nothing; reading checks everything before the model is touched.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors
import torch
from safetensors.torch import load_file, save_file

from . import __version__
from .algebra import explicit
from .catalogue import parse
from .edits import Delta, Labels, slot_key
from .errors import DeltuneError, all_problems
from .sites import plan

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .attaching import Tuned

FORMAT = 1
FACTS, NUMBERS = "delta.json", "delta.safetensors"


def save(tuned: Tuned, folder: str | Path, name: str | None = None) -> Path:
    """Write one delta of a tuned model into `folder`, replacing a delta that is there.

    Errors: a folder that holds anything else, no space left, no permission; what was there before stays whole.
    """
    delta = tuned.delta(name)
    target = Path(folder)
    if target.exists():
        foreign = (
            sorted(p.name for p in target.iterdir() if p.name not in (FACTS, NUMBERS)) if target.is_dir() else ["."]
        )
        if foreign:
            raise DeltuneError(
                f"{target} is no delta folder (it holds {', '.join(foreign[:5])}); choose another folder"
            )
    numbers = delta_tensors(tuned, delta)
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        save_file(numbers, fresh / NUMBERS, metadata={"format": "deltune"})
        facts = _facts(tuned, delta, numbers, _digest(fresh / NUMBERS))
        with open(fresh / FACTS, "w", encoding="utf-8") as file:
            json.dump(facts, file, indent=1, ensure_ascii=False)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(fresh, 0o755)
        if target.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{target.name}-old-", dir=target.parent))
            os.replace(target, old)
            os.replace(fresh, target)
            shutil.rmtree(old)
        else:
            os.replace(fresh, target)
    except (OSError, safetensors.SafetensorError) as error:
        shutil.rmtree(fresh, ignore_errors=True)
        full = getattr(error, "errno", None) == errno.ENOSPC or "space" in str(error).lower()
        reason = "no space left on the device" if full else str(error)
        raise DeltuneError(
            f"the delta could not be written to {target}: {reason}; nothing was changed there"
        ) from error
    return target


def delta_tensors(tuned: Tuned, delta: Delta) -> dict[str, torch.Tensor]:
    """All numbers of a delta by their names in the file: edit.PLACE.TENSOR and base.NAME."""
    with torch.no_grad():
        found = {
            f"edit.{key}.{leaf}": tensor for key, edit in delta.named_edits() for leaf, tensor in edit.kept().items()
        }
        found |= {f"base.{name}": tuned.value(delta, name) for name in delta.owned}
        return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in found.items()}


def _facts(tuned: Tuned, delta: Delta, numbers: dict[str, torch.Tensor], digest: str) -> dict[str, Any]:
    config, labels = tuned.model.config, delta.labels
    return {
        "format": FORMAT,
        "deltune": __version__,
        "method": repr(delta.method),
        "explicit": explicit(delta.method),
        "head": {"mode": delta.head_mode, "tensors": list(delta.head)},
        "labels": {"id2label": dict(labels.id2label), "problem_type": labels.problem_type} if labels else None,
        "base": {
            "family": config.model_type,
            "model": type(tuned.model).__name__,
            "name": config.name_or_path,
            "fingerprint": fingerprint(tuned),
        },
        "tensors": {name: list(t.shape) for name, t in numbers.items()},
        "sha256": digest,
    }


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fingerprint(tuned: Tuned) -> dict[str, str]:
    """A digest for each area of the base model: names, shapes and 64 values of every tensor, read as bfloat16.

    So it is the same in float32 and bfloat16, whatever head the model has, and whatever delta is in use.
    """
    areas: dict[str, Any] = {}
    prefix = f"{tuned.anatomy.base}." if tuned.anatomy.base else ""
    for tensor in sorted(tuned.anatomy.tensors, key=lambda t: t.name):
        if tensor.area in ("head", "vocabulary"):
            continue
        values = tuned.original(tensor.name).detach().reshape(-1)
        if values.device.type == "meta":
            return {}
        step = torch.linspace(0, values.numel() - 1, min(64, values.numel())).long()
        sample = values[step.to(values.device)].to(torch.bfloat16).cpu().view(torch.int16).numpy().tobytes()
        digest = areas.setdefault(tensor.area, hashlib.sha256())
        digest.update(f"{tensor.name.removeprefix(prefix)} {tensor.shape} ".encode() + sample)
    return {area: digest.hexdigest()[:16] for area, digest in areas.items()}


def load(model: PreTrainedModel, folder: str | Path, name: str = "default") -> Tuned:
    """Attach a saved delta (a RUN, its delta folder, or any folder that save wrote) under a name and put it in use.

    Errors (DeltuneError; the model stays as it was): no delta there, a truncated, altered or foreign file, another base
    model, missing or extra tensors, a head that this model class does not have.
    """
    from .attaching import Tuned, check_name, existing

    where = delta_folder(folder)
    facts, numbers = _read(where)
    handle = existing(model)
    check_name(name, handle.names if handle else ())
    fresh = handle is None
    handle = handle or Tuned(model)
    try:
        delta, labels = _build(handle, facts, numbers, where)
    except BaseException:
        if fresh:
            handle.detach()
        raise
    handle.add(name, delta, labels or handle.base_labels)
    return handle


def delta_folder(folder: str | Path) -> Path:
    """The folder that holds delta.json: the one given, or its sub-folder `delta`."""
    root = Path(folder)
    for where in (root, root / "delta"):
        if (where / FACTS).is_file():
            return where
    if not root.is_dir():
        raise DeltuneError(f"no folder {str(folder)!r}")
    held = ", ".join(sorted(p.name for p in root.iterdir())[:8]) or "nothing"
    raise DeltuneError(f"{str(folder)!r} holds no delta ({FACTS} is missing; it holds {held})")


def read_facts(folder: str | Path) -> dict[str, Any]:
    """The contents of delta.json, checked for being ours."""
    where = delta_folder(folder)
    try:
        facts = json.loads((where / FACTS).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DeltuneError(f"{where / FACTS} cannot be read: {error}") from error
    needed = ("format", "method", "explicit", "head", "base", "tensors", "sha256")
    if not isinstance(facts, dict) or any(key not in facts for key in needed):
        raise DeltuneError(f"{where / FACTS} was not written by deltune (it lacks {', '.join(needed)} or some of them)")
    if facts["format"] != FORMAT:
        raise DeltuneError(
            f"{where / FACTS} has format {facts['format']!r}, this deltune reads {FORMAT}; update deltune"
        )
    return facts


def _read(where: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    facts = read_facts(where)
    path = where / NUMBERS
    if not path.is_file():
        raise DeltuneError(f"{path} is missing; the folder is incomplete")
    try:
        numbers = load_file(path)
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise DeltuneError(f"{path} is truncated or no safetensors file: {error}") from error
    if _digest(path) != facts["sha256"]:
        raise DeltuneError(f"{path} is not the file that {FACTS} describes: its checksum differs")
    return facts, numbers


def _build(
    handle: Tuned, facts: dict[str, Any], numbers: dict[str, torch.Tensor], where: Path
) -> tuple[Delta, Labels | None]:
    """The delta of a file for this model, after every check."""
    _check_base(handle, facts, where)
    head = tuple(facts["head"]["tensors"])
    own = tuple(t.name for t in handle.anatomy.tensors if t.area == "head")
    if head and head != own:
        raise DeltuneError(
            f"{where} holds a head for {facts['base']['model']} ({', '.join(head)}); {type(handle.model).__name__} has "
            f"{', '.join(own) or 'none'}: load the base model as {facts['base']['model']}"
        )
    method = parse(facts["explicit"])
    delta = handle.fit(Delta(method, plan(handle.anatomy, method), head, facts["head"]["mode"], folded=True))
    wanted: dict[str, tuple[int, ...] | None] = {
        f"edit.{key}.{leaf}": tuple(tensor.shape)
        for key, edit in delta.named_edits()
        for leaf, tensor in edit.kept().items()
    }
    shapes = {t.name: t.shape for t in handle.anatomy.tensors}
    wanted |= {f"base.{name}": None if name in head else shapes[name] for name in delta.owned}
    _check_tensors(wanted, numbers, where)
    with torch.no_grad():
        for key, edit in delta.named_edits():
            for leaf, tensor in edit.kept().items():
                tensor.copy_(numbers[f"edit.{key}.{leaf}"])
        for name in delta.owned:
            like = handle.original(name)
            value = numbers[f"base.{name}"].to(device=like.device, dtype=like.dtype)
            delta.held[slot_key(name)] = torch.nn.Parameter(value)
    delta.method = parse(facts["method"])
    labels = facts.get("labels")
    if not labels:
        return delta, None
    pairs = tuple(sorted((int(k), str(v)) for k, v in labels["id2label"].items()))
    return delta, Labels(pairs, labels.get("problem_type"))


def _check_base(handle: Tuned, facts: dict[str, Any], where: Path) -> None:
    base, anatomy = facts["base"], handle.anatomy
    if base["family"] != anatomy.family:
        raise DeltuneError(
            f"{where} was tuned on a {base['family']} model ({base['name']}); this is a {anatomy.family} model"
        )
    own = fingerprint(handle)
    differing = [area for area, digest in base["fingerprint"].items() if area in own and own[area] != digest]
    if differing:
        here = handle.model.config.name_or_path or type(handle.model).__name__
        raise DeltuneError(
            f"{where} was tuned on another base model ({base['name'] or base['model']}): "
            f"the {' and '.join(differing)} of this one ({here}) differ"
        )


def _check_tensors(wanted: dict[str, tuple[int, ...] | None], numbers: dict[str, torch.Tensor], where: Path) -> None:
    problems = [f"missing tensor {name}" for name in wanted if name not in numbers]
    problems += [f"extra tensor {name}" for name in numbers if name not in wanted]
    problems += [
        f"tensor {name} has shape {tuple(numbers[name].shape)}, this model needs {shape}"
        for name, shape in wanted.items()
        if shape is not None and name in numbers and tuple(numbers[name].shape) != shape
    ]
    if problems:
        shown = problems[:10] + ([f"and {len(problems) - 10} more"] if len(problems) > 10 else [])
        raise all_problems(f"{where} does not fit this model", shown)
