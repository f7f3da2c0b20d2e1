"""Saves a delta as a folder with delta.json (method, base model) and delta.safetensors, and reads it again.

No pickle is used. A folder is written completely or not at all, and everything is checked before the model is changed.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from .._version import __version__
from ..anatomy.types import Anatomy, Tensor
from ..compat import config_revision
from ..errors import MAX_NAME_LENGTH, DeltuneError, excerpt, unknown_name
from ..files import (
    MAX_JSON_BYTES,
    atomic_folder,
    file_sha256,
    find_file,
    leftover_folders,
    user_path,
    write_error,
)
from ..interop import tensor_files
from ..interop.tensor_files import TensorInfo
from ..methods.masks import RowMask
from ..methods.registry import check_registered
from ..methods.spec import explicit_expression
from ..models import name_without_path, portable_name
from .delta_schema import FORMAT, BaseFacts, DeltaMetadata, check_against_metadata, read_metadata_file
from .model_card import HUB_ID, README, update_card
from .modules import Delta
from .sharding import gather_full_tensor

FACTS, NUMBERS = "delta.json", "delta.safetensors"

ALWAYS = ("embedding", "layers")
"""The areas that every model has, whatever its class, so that every fingerprint contains them."""

SAMPLED = 64
"""How many values of a tensor a fingerprint is made of."""

BASES = ("same", "any")
"""Which base models a delta is loaded on: the one that it was tuned on, or any with the same tensors."""


def write_delta(
    folder: str | Path, facts: dict[str, Any], numbers: dict[str, torch.Tensor], card: str | None = None
) -> Path:
    """Write one delta into `folder`, replacing a delta that is there, completely or not at all.

    Files and folders are flushed to the disk, and have the permissions that the umask leaves.
    """
    target = user_path(folder, "folder")
    try:
        if target.exists():
            inside = [p.name for p in target.iterdir()] if target.is_dir() else ["."]
            ours = (FACTS, NUMBERS) if card is None else (FACTS, NUMBERS, README)
            if other_files := sorted(name for name in inside if name not in ours):
                advice = "choose another folder"
                if other_files == [README] and FACTS in inside:
                    advice += ", or give model_card=True, which brings the model card up to date"
                raise DeltuneError(
                    f"{target} holds other files ({', '.join(other_files[:5])}), so a delta cannot be saved there: "
                    f"{advice}"
                )
        if card is not None:
            path = find_file(target, README) if target.exists() else None
            old = None if path is None else path.read_text(encoding="utf-8")
            card = update_card(old, card, str(target / README))
        with atomic_folder(target) as fresh:
            save_file(numbers, fresh / NUMBERS, metadata={"format": "deltune"})
            shapes = {name: list(tensor.shape) for name, tensor in numbers.items()}
            facts = {**facts, "tensors": shapes, "sha256": file_sha256(fresh / NUMBERS)}
            with open(fresh / FACTS, "w", encoding="utf-8") as file:
                json.dump(facts, file, indent=1, ensure_ascii=False)
            if (fresh / FACTS).stat().st_size > MAX_JSON_BYTES:  # what is saved can be loaded
                raise DeltuneError(
                    f"{target / FACTS} would be longer than the {MAX_JSON_BYTES >> 20} MiB that are read"
                )
            if card is not None:
                (fresh / README).write_text(card, encoding="utf-8")
    except (OSError, safetensors.SafetensorError) as error:
        raise write_error(target, error, "nothing was changed there") from error
    return target


def delta_metadata(delta: Delta, base: dict[str, Any]) -> dict[str, Any]:
    """Return the content of delta.json: the method, the head and its labels, and the base model."""
    check_registered(delta.method)
    labels = delta.labels
    return {
        "format": FORMAT,
        "deltune": __version__,
        "method": repr(delta.method),
        "explicit": explicit_expression(delta.method),
        "head": {"mode": delta.head_mode, "tensors": list(delta.head)},
        "labels": {"id2label": dict(labels.id2label), "problem_type": labels.problem_type} if labels else None,
        **({} if delta.pooling == "model" else {"pooling": delta.pooling}),
        "base": base,
        **({"trained": delta.trained} if delta.trained else {}),
    }


def word_embeddings(anatomy: Anatomy) -> list[Tensor]:
    """Return the tables with a row for each token that stacks read."""
    names = {f"{stack.words}.weight" for stack in anatomy.stacks if stack.words is not None}
    return [t for t in anatomy.tensors if not names.isdisjoint((t.name, *t.aliases))]


def tokens_of_base(anatomy: Anatomy, delta: Delta) -> int | None:
    """Return how many rows of the word embeddings are the base's own, where a delta trains all rows after them.

    The rows of tokens that were added to a model differ each time that they are added. None: all rows are the base's.
    """
    chosen = {row for _, mask in delta.planned.masked if isinstance(mask, RowMask) for row in mask.rows}
    words = word_embeddings(anatomy)
    rows = end = words[0].shape[0] if words else 0
    while end - 1 in chosen:
        end -= 1
    return end if end < rows else None


def base_metadata(
    model: PreTrainedModel,
    anatomy: Anatomy,
    original: Callable[[Sequence[str]], Sequence[torch.Tensor]],
    quantization: str,
    tokens: int | None = None,
) -> dict[str, Any]:
    """Return what identifies a base model; of its token embeddings, the first `tokens` alone where these are given."""
    tables = word_embeddings(anatomy)
    rows = tables[0].shape[0] if tables else None
    prefix = f"{anatomy.base}." if anatomy.base else ""
    shapes = {t.name: tuple(t.shape) for t in anatomy.tensors}
    cut = {t.name: tokens for t in tables if tokens is not None and tokens < t.shape[0]}
    shapes |= {name: (count, *shapes[name][1:]) for name, count in cut.items()}
    titles = {name: f"{name.removeprefix(prefix)} {shape}" for name, shape in shapes.items()}
    everywhere = sorted(titles[t.name] for t in anatomy.tensors if t.area in (*ALWAYS, "final"))
    return {
        "family": anatomy.family,
        "model": anatomy.model,
        "name": portable_name(model.config.name_or_path or ""),
        "revision": config_revision(model.config),
        "quantization": quantization,
        "structure": hashlib.sha256("\n".join(everywhere).encode()).hexdigest()[:16],
        "fingerprint": _fingerprint(anatomy, original, titles, cut),
        "tokens": rows,
        "compared_tokens": None if rows is None else tokens,
    }


def _fingerprint(
    anatomy: Anatomy,
    original: Callable[[Sequence[str]], Sequence[torch.Tensor]],
    titles: Mapping[str, str],
    cut: Mapping[str, int],
) -> dict[str, str]:
    """Return a digest for each area of a model, of the names, shapes and 64 values of every tensor in bfloat16.

    It is the same in float32 and bfloat16, with any head, and with any delta in use. Of a quantised tensor it has
    the name and the shape: what its numbers are depends on the device, and reading them takes long.
    """
    tensors = sorted((t for t in anatomy.tensors if t.area not in ("head", "vocabulary")), key=lambda t: t.name)
    names = [t.name for t in tensors if not t.quantized]
    read: dict[str, bytes] = {}
    with torch.no_grad():
        values = [
            value[: cut[name]] if name in cut else value for name, value in zip(names, original(names), strict=True)
        ]
        devices = {value.device for value in values}
        if any(device.type == "meta" for device in devices):
            return {}
        for device in devices:
            of_device = [n for n, value in enumerate(values) if len(devices) == 1 or value.device == device]
            sizes = [values[n].numel() for n in of_device]
            samples = [
                torch.take(gather_full_tensor(values[n]), _sampled_positions(size, device))
                for n, size in zip(of_device, sizes, strict=True)
            ]
            # moved to the CPU together; of tensors of several types the widest, which changes no value
            joined = torch.cat(samples).to(torch.bfloat16).cpu().view(torch.int16).numpy().tobytes()
            ends = accumulate((2 * min(SAMPLED, size) for size in sizes), initial=0)
            read |= {names[n]: joined[start:end] for n, (start, end) in zip(of_device, pairwise(ends), strict=True)}
    areas = {t.area: hashlib.sha256() for t in tensors}
    for t in tensors:
        areas[t.area].update(f"{titles[t.name]} ".encode() + read.get(t.name, b""))
    return {area: digest.hexdigest()[:16] for area, digest in areas.items()}


@functools.lru_cache(maxsize=256)
def _sampled_positions(size: int, device: torch.device) -> torch.Tensor:
    """Return `SAMPLED` positions from the first to the last of a tensor's values, or all where it has fewer."""
    with torch.inference_mode(False):
        return torch.linspace(0, size - 1, min(SAMPLED, size), device="cpu").long().to(device)


def delta_folder(folder: str | Path) -> Path:
    """Return the folder that holds delta.json: the given one, or its sub-folder `delta`."""
    root = Path(folder)
    for inside in ("", "delta"):
        if find_file(root, str(Path(inside, FACTS))) is not None:
            return root / inside
    for target in (root, root / "delta"):
        if whole := [old for old in leftover_folders(target) if find_file(old, FACTS) is not None]:
            raise DeltuneError(
                f"there is no folder {excerpt(str(target), MAX_NAME_LENGTH)}: a save was interrupted while it replaced "
                f"the delta there, which is {whole[0]} now. Rename that folder back, and load it"
            )
    try:
        if not root.is_dir():
            raise _no_folder(root)
        names = ", ".join(sorted(p.name for p in root.iterdir())[:8]) or "nothing"
    except (OSError, ValueError) as error:
        raise DeltuneError(f"{str(folder)!r} cannot be read: {error}") from error
    explanation = ""
    if (root / "trainer_state.json").is_file():
        explanation = ". It is a whole checkpoint of transformers' Trainer, of a model to which no delta was attached"
    elif (root / "config.json").is_file():
        explanation = (
            ". It is a model of transformers, which from_pretrained loads. If model.save_pretrained of a tuned model "
            "wrote it, what was in use is merged into its weights"
        )
    raise DeltuneError(
        f"{str(folder)!r} holds no delta ({FACTS} is missing; it holds {names}){explanation}", fault="folder"
    )


def _no_folder(path: Path) -> DeltuneError:
    shown = excerpt(str(path), MAX_NAME_LENGTH)
    if path.exists():
        return DeltuneError(
            f"{shown} is a file, not a folder; a delta is a folder with {FACTS} and {NUMBERS}", fault="folder"
        )
    message, in_python = f"there is no folder {shown} here; a delta is loaded from a folder on this machine", ""
    if re.fullmatch(HUB_ID, str(path)):
        in_python = (
            f"If {shown} is a repository of the Hugging Face Hub: deltune.load(model, {shown}) fetches it, and for "
            f"everything else huggingface_hub.snapshot_download({shown}) returns the folder"
        )
    return DeltuneError(message, in_python)


def read_metadata(folder: str | Path) -> DeltaMetadata:
    """Read and validate the delta.json of a folder."""
    return read_metadata_file(delta_folder(folder) / FACTS)


@dataclass(frozen=True)
class SavedDelta:
    """A delta's folder before its tensors are read."""

    where: Path
    facts: DeltaMetadata  # the contents of delta.json
    tensors: dict[str, TensorInfo]  # the names, types and shapes in delta.safetensors, which agree with delta.json
    raw: bytes | None  # the bytes of delta.safetensors, where it is small; a long file is read in parts

    def numbers(self) -> dict[str, torch.Tensor]:
        path = self.where / NUMBERS
        digest = file_sha256(path) if self.raw is None else hashlib.sha256(self.raw).hexdigest()
        if digest != self.facts.sha256:
            raise DeltuneError(
                f"{path} is not the file that {FACTS} describes: its checksum differs, so one of the two files was "
                "damaged or changed after they were saved; copy both of them again"
            )
        return tensor_files.load_tensors(path, self.raw)


def open_delta(folder: str | Path) -> SavedDelta:
    """Open a delta's folder and check all of it but the values of its tensors.

    Symbolic links are followed inside the folder, and to the blobs of a Hugging Face cache, but not elsewhere.
    """
    where = delta_folder(folder)
    facts, path = read_metadata_file(where / FACTS), find_file(where, NUMBERS)
    if path is None:
        raise DeltuneError(f"{where / NUMBERS} is missing; the folder is incomplete", fault="files")
    raw = tensor_files.read_small(path)
    tensors = tensor_files.read_header(path, raw)
    check_against_metadata(facts, tensors, path)
    return SavedDelta(where, facts, tensors, raw)


def check_base(base: BaseFacts, where: Path, model_metadata: dict[str, Any], allowed: str = "same") -> None:
    """Compare the base model of a delta with the model that it is loaded on, which `model_metadata` describes.

    A pooler may be missing on one side, since some classes of a family have none.
    """
    if allowed not in BASES:
        raise DeltuneError(unknown_name("base", allowed, BASES))
    if base.family != model_metadata["family"]:
        raise DeltuneError(
            f"{where} was tuned on a {base.family} model ({_shown(base.name, base.model)}); this is a "
            f"{model_metadata['family']} model",
            fault="model",
        )
    fingerprint = model_metadata["fingerprint"]
    if not fingerprint:
        raise DeltuneError(
            f"{where} cannot be loaded on a model whose weights are on the meta device, since they cannot be compared "
            "with those that it was tuned on: load the model's weights first"
        )
    if missing := [area for area in ALWAYS if area in fingerprint and area not in base.fingerprint]:
        raise DeltuneError(
            f"{where / FACTS} has no fingerprint of the {' and the '.join(missing)} of its base model, so it "
            "cannot be compared with this model: use the file as it was saved"
        )
    if base.structure and base.structure != model_metadata["structure"]:
        raise DeltuneError(
            f"{where} was tuned on another base model ({_shown(base.name, base.model)}): the names or shapes of the "
            f"tensors of this one ({_shown(model_metadata['name'], model_metadata['model'])}) differ"
            f"{_too_few_tokens(base, model_metadata)}",
            _resizing(base, model_metadata),
            "model",
        )
    if base.compared_tokens is not None and (too_few := _too_few_tokens(base, model_metadata)):
        raise DeltuneError(
            f"{where} has rows for tokens that were added to its base model ({_shown(base.name, base.model)}){too_few}",
            _resizing(base, model_metadata),
            "tokens",
        )
    differences = list(_base_differences(base, model_metadata))
    if differences and allowed == "any":
        warnings.warn(
            f"{where} is used on another base model than the one that it was tuned on: {'; '.join(differences)}. Its "
            "outputs differ from those that it was tuned to give: evaluate it on this model before you rely on it",
            stacklevel=6,
        )
    elif differences:
        too_few = _too_few_tokens(base, model_metadata)
        resizing = _resizing(base, model_metadata) if too_few and differences[-1].endswith(too_few) else ""
        raise DeltuneError(
            f"{where} was tuned on another base model: {'; '.join(differences)}",
            ". ".join(advice for advice in (resizing, _advice(base, model_metadata)) if advice),
            "model",
        )


def _base_differences(base: BaseFacts, model_metadata: dict[str, Any]) -> Iterator[str]:
    """Yield in which respects a model is another one than a delta was tuned on."""
    here = _shown(model_metadata["name"], model_metadata["model"])
    if base.quantization != model_metadata["quantization"]:
        yield f"it had {_held(base.quantization)}, and {here} has {_held(model_metadata['quantization'])}"
    elif base.quantization and base.revision and model_metadata["revision"] not in ("", base.revision):
        yield f"it was revision {base.revision[:12]}, and {here} is revision {model_metadata['revision'][:12]}"
    fingerprint = model_metadata["fingerprint"]
    # beside another quantisation, only the areas say something that have no quantised numbers
    comparable = [
        a for a in base.fingerprint if base.quantization == model_metadata["quantization"] or a == "embedding"
    ]
    differing = [area for area in comparable if area in fingerprint and fingerprint[area] != base.fingerprint[area]]
    if differing:
        advice = _about_added_tokens(base, model_metadata) if differing == ["embedding"] else ""
        was = _shown(base.name, base.model)
        yield f"it was {was}, and the {' and '.join(differing)} of this one ({here}) differ{advice}"


def _shown(name: str, model_class: str) -> str:
    """Return how messages name a model: a server shows them to clients, who need not know where its models are."""
    return name_without_path(name) or model_class


def _too_few_tokens(base: BaseFacts, model_metadata: dict[str, Any]) -> str:
    """Say if a model has fewer token embeddings than the one that a delta was tuned on; else return ""."""
    tokens, here = base.tokens, model_metadata["tokens"]
    if tokens is None or here is None or here >= tokens:
        return ""
    return f". It has {tokens:,} token embeddings and this one {here:,}"


def _resizing(base: BaseFacts, model_metadata: dict[str, Any]) -> str:
    """Return how a model gets the token embeddings that it lacks, or ""."""
    if not _too_few_tokens(base, model_metadata):
        return ""
    return f"Call model.resize_token_embeddings({base.tokens}) before the delta is loaded"


def _about_added_tokens(base: BaseFacts, model_metadata: dict[str, Any]) -> str:
    """Return advice for a model that differs in its token embeddings alone."""
    advice = _too_few_tokens(base, model_metadata)
    if not advice and base.compared_tokens is None and model_metadata["tokens"] in (base.tokens, None):
        return (
            ". If tokens were added to it, their rows are other ones each time that they are added, and this delta "
            "does not hold them: tune with … + trainable_tokens(tokens=(…)), or save the resized model itself"
        )
    return advice


def _held(quantization: str) -> str:
    return f"weights quantised by {quantization}" if quantization else "weights in floating point"


def _advice(base: BaseFacts, model_metadata: dict[str, Any]) -> str:
    if base.quantization == model_metadata["quantization"]:
        return (
            'If it is the same model in another precision, such as float16, load(model, folder, base="any") uses the '
            "delta on it, with a warning"
        )
    return (
        'Load the model in that form; or load(model, folder, base="any") uses the delta on this form too, with a '
        "warning"
    )
