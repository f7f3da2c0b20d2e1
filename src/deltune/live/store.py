"""A delta as a folder: delta.json (what it is, for which base) and delta.safetensors (its numbers). No pickle.

Writing is all or nothing; reading checks everything before the model is touched.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from .. import __version__
from ..algebra.elements import explicit
from ..anatomy.values import Anatomy
from ..disk import refused
from ..errors import DeltuneError, all_problems
from .edits import Delta

FORMAT = 1
FACTS, NUMBERS = "delta.json", "delta.safetensors"


def write(folder: str | Path, facts: dict[str, Any], numbers: dict[str, torch.Tensor]) -> Path:
    """Write one delta into `folder`, replacing a delta that is there, all or nothing.

    Errors: a folder that holds anything else, no space left, no permission; what was there before stays whole.
    """
    target = Path(folder)
    if target.exists():
        foreign = (
            sorted(p.name for p in target.iterdir() if p.name not in (FACTS, NUMBERS)) if target.is_dir() else ["."]
        )
        if foreign:
            raise DeltuneError(
                f"{target} is no delta folder (it holds {', '.join(foreign[:5])}); choose another folder"
            )
    fresh = old = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        save_file(numbers, fresh / NUMBERS, metadata={"format": "deltune"})
        shapes = {name: list(tensor.shape) for name, tensor in numbers.items()}
        facts = {**facts, "tensors": shapes, "sha256": _digest(fresh / NUMBERS)}
        with open(fresh / FACTS, "w", encoding="utf-8") as file:
            json.dump(facts, file, indent=1, ensure_ascii=False)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(fresh, 0o755)
        os.chmod(fresh / NUMBERS, 0o644)  # safetensors keeps its files to their owner
        if target.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{target.name}-old-", dir=target.parent))
            os.replace(target, old)
            try:
                os.replace(fresh, target)
            except OSError:
                os.replace(old, target)
                raise
            shutil.rmtree(old)
        else:
            os.replace(fresh, target)
    except (OSError, safetensors.SafetensorError) as error:
        if fresh is not None:
            shutil.rmtree(fresh, ignore_errors=True)
        if old is not None:
            with contextlib.suppress(OSError):
                old.rmdir()  # never a full one: that is what was there before
        raise refused(target, error, "nothing was changed there") from error
    return target


def facts_of(delta: Delta, base: dict[str, Any]) -> dict[str, Any]:
    """What delta.json says: the method, the head and its labels, and the base model it belongs to."""
    labels = delta.labels
    return {
        "format": FORMAT,
        "deltune": __version__,
        "method": repr(delta.method),
        "explicit": explicit(delta.method),
        "head": {"mode": delta.head_mode, "tensors": list(delta.head)},
        "labels": {"id2label": dict(labels.id2label), "problem_type": labels.problem_type} if labels else None,
        "base": base,
    }


def base_facts(model: PreTrainedModel, anatomy: Anatomy, original: Callable[[str], torch.Tensor]) -> dict[str, Any]:
    """Which base model this is; `original` gives the base's own value of a tensor."""
    return {
        "family": anatomy.family,
        "model": type(model).__name__,
        "name": model.config.name_or_path,
        "fingerprint": fingerprint(anatomy, original),
    }


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fingerprint(anatomy: Anatomy, original: Callable[[str], torch.Tensor]) -> dict[str, str]:
    """A digest for each area of the base model: names, shapes and 64 values of every tensor, read as bfloat16.

    So it is the same in float32 and bfloat16, whatever head the model has, and whatever delta is in use.
    """
    areas: dict[str, Any] = {}
    prefix = f"{anatomy.base}." if anatomy.base else ""
    for tensor in sorted(anatomy.tensors, key=lambda t: t.name):
        if tensor.area in ("head", "vocabulary"):
            continue
        values = original(tensor.name).detach().reshape(-1)
        if values.device.type == "meta":
            return {}
        step = torch.linspace(0, values.numel() - 1, min(64, values.numel())).long()
        sample = values[step.to(values.device)].to(torch.bfloat16).cpu().view(torch.int16).numpy().tobytes()
        digest = areas.setdefault(tensor.area, hashlib.sha256())
        digest.update(f"{tensor.name.removeprefix(prefix)} {tensor.shape} ".encode() + sample)
    return {area: digest.hexdigest()[:16] for area, digest in areas.items()}


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
    if not isinstance(facts, dict) or (wrong := _wrong(facts, _KINDS)):
        lacks = ", ".join(wrong if isinstance(facts, dict) else _KINDS)
        raise DeltuneError(f"{where / FACTS} was not written by deltune (missing, or of another kind: {lacks})")
    if facts["format"] != FORMAT:
        raise DeltuneError(
            f"{where / FACTS} has format {facts['format']!r}, this deltune reads {FORMAT}; update deltune"
        )
    return facts


_KINDS: dict[str, Any] = {
    "format": int, "method": str, "explicit": str, "labels": dict | None, "tensors": dict, "sha256": str,
    "head": {"mode": str, "tensors": list},
    "base": {"family": str, "model": str, "name": str, "fingerprint": dict},
}  # fmt: skip


def _wrong(facts: dict[str, Any], kinds: dict[str, Any], inside: str = "") -> list[str]:
    """Names of the facts that are missing or of another kind."""
    found = []
    for key, kind in kinds.items():
        value, name = facts.get(key), inside + key
        if isinstance(kind, dict):
            found += _wrong(value, kind, f"{name}.") if isinstance(value, dict) else [name]
        elif not isinstance(value, kind):
            found.append(name)
    return found


def read(where: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Facts and numbers of a delta folder. Errors: incomplete, truncated, altered, not ours."""
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


def check_base(facts: dict[str, Any], own: dict[str, Any], where: Path) -> None:
    """Error when a delta belongs to another base model than the one that `own` describes."""
    base = facts["base"]
    if base["family"] != own["family"]:
        raise DeltuneError(
            f"{where} was tuned on a {base['family']} model ({base['name']}); this is a {own['family']} model"
        )
    here = own["fingerprint"]
    differing = [area for area, digest in base["fingerprint"].items() if area in here and here[area] != digest]
    if differing:
        raise DeltuneError(
            f"{where} was tuned on another base model ({base['name'] or base['model']}): "
            f"the {' and '.join(differing)} of this one ({own['name'] or own['model']}) differ"
        )


def check_tensors(wanted: dict[str, tuple[int, ...] | None], numbers: dict[str, torch.Tensor], where: Path) -> None:
    """Error listing every tensor that is missing, extra or of another shape; a shape of None fits any."""
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
