"""Reads adapter folders of PEFT and AdapterHub for a model, and writes the deltas of a model as such folders."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

from ..errors import DeltuneError, unknown_name
from ..filesystem import atomic_folder, user_path, write_error
from ..interop import adapterhub, peft_read, peft_write
from ..interop.base import CONFIG_FILE, ExportedDelta, ForeignFolder, Translation, has_file, read_options, read_tensors
from ..interop.schemas import AdapterHubHead, AdapterHubOptions, PeftOptions, check_options
from .handle import Tuned

FORMATS = ("peft",)
"""The formats that `export` writes."""

TASKS = {
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES": "SEQ_CLS",
    "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES": "TOKEN_CLS",
    "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES": "QUESTION_ANS",
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": "CAUSAL_LM",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES": "SEQ_2_SEQ_LM",
}
"""The tables of model classes in transformers, with PEFT's task type for each."""

KINDS = {
    "SEQ_CLS": "classification", "TOKEN_CLS": "tagging", "QUESTION_ANS": "question-answering", "CAUSAL_LM": "causal-lm",
    "SEQ_2_SEQ_LM": "seq2seq-lm",
}  # fmt: skip
"""The kind of model that deltune loads for each task type; "base" for any other."""


def open_folder(folder: str | Path) -> ForeignFolder:
    """Read an adapter folder of PEFT or AdapterHub, and validate its options.

    Raises:
        DeltuneError: The folder belongs to neither or is incomplete, or a file is not in its format.
    """
    where = Path(folder)
    options = read_options(where)
    if "peft_type" in options:
        check_options(PeftOptions, options, where / CONFIG_FILE)
        return ForeignFolder(where, options, read_tensors(where, peft_read.WEIGHT_FILES))
    if "config" not in options or "model_type" not in options:
        raise DeltuneError(f"{where / CONFIG_FILE} is neither PEFT's (no peft_type) nor AdapterHub's (no model_type)")
    check_options(AdapterHubOptions, options, where / CONFIG_FILE)
    tensors = read_tensors(where, adapterhub.WEIGHT_FILES)
    if not has_file(where, adapterhub.HEAD_CONFIG):
        return ForeignFolder(where, options, tensors)
    head_options = read_options(where, adapterhub.HEAD_CONFIG)
    check_options(AdapterHubHead, head_options, where / adapterhub.HEAD_CONFIG)
    return ForeignFolder(where, options, tensors, head_options, read_tensors(where, adapterhub.HEAD_WEIGHTS))


def read_foreign(handle: Tuned, folder: str | Path) -> Translation:
    """Translate an adapter folder of PEFT or AdapterHub into a method and tensors for this model.

    Raises:
        DeltuneError: An option has no translation; the message says why.
    """
    contents = open_folder(folder)
    if "peft_type" in contents.options:
        return peft_read.read_peft(handle.anatomy, contents, _has_sliding_window(handle.model))
    relative = hasattr(handle.model.config, "relative_attention_num_buckets")
    return adapterhub.read_adapterhub(handle.anatomy, contents, relative)


def foreign_model_kind(folder: str | Path) -> tuple[str, int | None]:
    """Return the kind of model that an adapter folder is for, and the number of labels of its head or None."""
    contents = open_folder(folder)
    task = contents.options.get("task_type") or _task(str(contents.options.get("model_class")))
    kind = KINDS.get(str(task), "base")
    head_weights = [
        t for n, t in {**contents.tensors, **contents.head}.items() if n.endswith(".weight") and _of_head(n)
    ]
    return kind, next(iter(head_weights[0].shape), 1) if kind in (
        "classification",
        "tagging",
    ) and head_weights else None


def _of_head(name: str) -> bool:
    """Whether a tensor belongs to the last linear of a classification head, by the names that transformers gives it."""
    stem = name.removeprefix(peft_read.NAME_PREFIX).rpartition(".")[0]
    return stem.partition(".")[0] in ("classifier", "score", "classification_head", "qa_outputs") and (
        "." not in stem or stem.endswith("out_proj")
    )


def content(handle: Tuned, name: str | None = None) -> ExportedDelta:
    """Collect a delta for a writer of another format: the one of this name, or the one in use."""
    delta = handle.delta(name)
    with torch.no_grad():
        values = {n: handle._delta_value(delta, n).detach() for n in delta.selected if n not in delta.head}
        values |= {n: sparse.final(handle._base_value(n).detach()) for n, sparse in delta.masked_tensors()}
        dense = {key: {leaf: t.detach() for leaf, t in edit.dense().items()} for key, edit in delta.named_edits()}
    head = {n: handle._delta_value(delta, n).detach() for n in delta.head}
    return ExportedDelta(
        handle.anatomy, delta.planned.edits, dense, values, head, lambda n: handle._base_value(n).detach(),
        _has_sliding_window(handle.model),
    )  # fmt: skip


def export_delta(handle: Tuned, folder: str | Path, format: str = "peft", name: str | None = None) -> Path:
    """Write a delta in the format of another library, completely or not at all; see `deltune.export`."""
    if format not in FORMATS:
        raise DeltuneError(unknown_name("format", format, FORMATS))
    options, tensors = peft_write.write_peft(content(handle, name))
    model = handle.model
    options |= {
        "task_type": _task(type(model).__name__), "base_model_name_or_path": model.config.name_or_path,
        "inference_mode": True,
    }  # fmt: skip
    target = user_path(folder, "folder")
    with atomic_new_folder(target) as fresh:
        whole = {n: t.detach().to("cpu", copy=True).contiguous() for n, t in tensors.items()}
        save_file(whole, fresh / peft_read.WEIGHT_FILES[0], metadata={"format": "pt"})
        (fresh / CONFIG_FILE).write_text(json.dumps(options, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return target


@contextlib.contextmanager
def atomic_new_folder(folder: str | Path) -> Iterator[Path]:
    """Give a temporary folder to fill, which is renamed to `folder` if the block succeeds.

    Raises:
        DeltuneError: The folder exists and is not empty, no space is left, or there is no permission.
    """
    target = Path(folder).expanduser()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise DeltuneError(f"{target} exists and is not an empty folder; choose another")
    try:
        with atomic_folder(target) as fresh:
            yield fresh
    except (OSError, safetensors.SafetensorError) as error:
        raise write_error(target, error, "nothing was changed there") from error


def _task(name: str) -> str | None:
    """PEFT's task type of a model class of transformers, or None."""
    for table, word in TASKS.items():
        names: Any = getattr(modeling_auto, table).values()
        if any(name in ((n,) if isinstance(n, str) else n) for n in names):
            return word
    return None


def _has_sliding_window(model: PreTrainedModel) -> bool:
    config: Any = model.config
    kinds = getattr(config, "layer_types", None) or ()
    return any("sliding" in kind for kind in kinds) if kinds else bool(getattr(config, "sliding_window", None))
