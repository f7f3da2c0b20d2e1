"""A delta as a folder: delta.json (what it is, for which base) and delta.safetensors (its numbers). No pickle.

Writing is all or nothing; reading checks everything before the model is touched.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from .. import __version__, tensorfiles
from ..algebra.elements import explicit
from ..anatomy.values import Anatomy
from ..disk import MOST_JSON, file_in, local_path, refused, whole_folder
from ..errors import LONGEST, DeltuneError, excerpt
from ..tensorfiles import TensorFacts
from .edits import Delta
from .expected import check_described
from .schema import FORMAT, DeltaFacts, read_facts_file

FACTS, NUMBERS = "delta.json", "delta.safetensors"

ALWAYS = ("embedding", "layers")
"""Areas that every model has, whatever its class, so that every fingerprint names them."""


def write(folder: str | Path, facts: dict[str, Any], numbers: dict[str, torch.Tensor]) -> Path:
    """Write one delta into `folder`, replacing a delta that is there, all or nothing.

    What was written is flushed to the disk, files and folders alike, and has the permissions that the umask leaves.

    Returns:
        The folder.

    Raises:
        DeltuneError: The folder holds anything else, no space is left, or there is no permission; what was there
            before is whole.
    """
    target = local_path(folder, "folder")
    try:
        if target.exists():
            inside = [p.name for p in target.iterdir()] if target.is_dir() else ["."]
            if foreign := sorted(name for name in inside if name not in (FACTS, NUMBERS)):
                raise DeltuneError(
                    f"{target} is no delta folder (it holds {', '.join(foreign[:5])}); choose another folder"
                )
        with whole_folder(target) as fresh:
            save_file(numbers, fresh / NUMBERS, metadata={"format": "deltune"})
            shapes = {name: list(tensor.shape) for name, tensor in numbers.items()}
            facts = {**facts, "tensors": shapes, "sha256": _digest(fresh / NUMBERS)}
            with open(fresh / FACTS, "w", encoding="utf-8") as file:
                json.dump(facts, file, indent=1, ensure_ascii=False)
            if (fresh / FACTS).stat().st_size > MOST_JSON:  # what is saved can be loaded
                raise DeltuneError(f"{target / FACTS} would be longer than the {MOST_JSON >> 20} MiB that are read")
    except (OSError, safetensors.SafetensorError) as error:
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
    """The folder that holds delta.json: the one given, or its sub-folder `delta`.

    Raises:
        DeltuneError: Neither holds one, or what holds it is a link that leads out of the folder.
    """
    root = Path(folder)
    for inside in ("", "delta"):
        if file_in(root, str(Path(inside, FACTS))) is not None:
            return root / inside
    try:
        if not root.is_dir():
            raise DeltuneError(_no_folder(root))
        held = ", ".join(sorted(p.name for p in root.iterdir())[:8]) or "nothing"
    except (OSError, ValueError) as error:
        raise DeltuneError(f"{str(folder)!r} cannot be read: {error}") from error
    raise DeltuneError(f"{str(folder)!r} holds no delta ({FACTS} is missing; it holds {held})")


def _no_folder(path: Path) -> str:
    """What is wrong with a path that is no folder, and where a delta can come from."""
    shown = excerpt(str(path), LONGEST)
    if path.exists():
        return f"{shown} is a file, not a folder; a delta is a folder with {FACTS} and {NUMBERS}"
    message = f"there is no folder {shown} here; a delta is loaded from a folder on this machine"
    if re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", str(path)):
        message += (
            f". If {shown} is a repository of the Hugging Face Hub, download it first: "
            f"huggingface_hub.snapshot_download({shown}) returns the folder to load"
        )
    return message


def read_facts(folder: str | Path) -> DeltaFacts:
    """The validated contents of delta.json. Raises DeltuneError where there is none or it is not ours."""
    where = delta_folder(folder)
    path = file_in(where, FACTS)
    if path is None:
        raise DeltuneError(f"{where / FACTS} is missing; the folder is incomplete")
    return read_facts_file(path)


@dataclass(frozen=True)
class Saved:
    """A delta's folder before its numbers are read: the facts in delta.json, and the names, types and shapes of the
    tensors in delta.safetensors, which agree with each other."""

    where: Path
    facts: DeltaFacts
    tensors: dict[str, TensorFacts]

    def numbers(self) -> dict[str, torch.Tensor]:
        """Read the tensors. Raises DeltuneError where the file was altered."""
        path = self.where / NUMBERS
        if _digest(path) != self.facts.sha256:
            raise DeltuneError(
                f"{path} is not the file that {FACTS} describes: its checksum differs, so one of the two files was "
                "damaged or changed after they were saved; copy both of them again"
            )
        return tensorfiles.load(path)


def read(folder: str | Path) -> Saved:
    """Open a delta's folder and check all of it but the values of its tensors.

    Symbolic links are followed inside the folder, and to the blobs of a Hugging Face cache, but not elsewhere.

    Raises:
        DeltuneError: The folder is incomplete, a file is damaged or was not written by deltune, the two files do not
            describe the same tensors, or one of them is a link that leads out of the folder.
    """
    facts, where = read_facts(folder), delta_folder(folder)
    path = file_in(where, NUMBERS)
    if path is None:
        raise DeltuneError(f"{where / NUMBERS} is missing; the folder is incomplete")
    tensors = tensorfiles.header(path)
    check_described(facts, tensors, path)
    return Saved(where, facts, tensors)


def check_base(saved: Saved, own: dict[str, Any]) -> None:
    """Compare the base model of a delta with the model that it is loaded on, which `own` describes.

    A pooler may be missing on one side, since some classes of a family have none.

    Raises:
        DeltuneError: It is another one, or nothing could be compared: the file does not say which one it is, or the
            model has no numbers yet.
    """
    base, where = saved.facts.base, saved.where
    if base.family != own["family"]:
        raise DeltuneError(
            f"{where} was tuned on a {base.family} model ({base.name or base.model}); this is a {own['family']} model"
        )
    here = own["fingerprint"]
    if not here:
        raise DeltuneError(
            f"{where} cannot be loaded on a model whose weights are on the meta device, since nobody can tell whether "
            "they are those that it was tuned on: give the model its weights first"
        )
    if missing := [area for area in ALWAYS if area in here and area not in base.fingerprint]:
        raise DeltuneError(
            f"{where / FACTS} has no fingerprint of the {' and the '.join(missing)} of its base model, so nobody can "
            "tell whether this is that model: take the file as it was saved"
        )
    differing = [area for area, digest in base.fingerprint.items() if area in here and here[area] != digest]
    if differing:
        raise DeltuneError(
            f"{where} was tuned on another base model ({base.name or base.model}): "
            f"the {' and '.join(differing)} of this one ({own['name'] or own['model']}) differ"
        )
