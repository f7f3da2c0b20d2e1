"""Folders of other libraries: which library wrote one, and what its options say of the base model."""

from __future__ import annotations

from pathlib import Path

from ..errors import DeltuneError
from ..models import HEADS, HEADS_WITH_LABELS, head_of_class_name, name_here
from . import adapterhub, peft_read
from .base import (
    CONFIG_FILE,
    AdapterHubHead,
    AdapterHubOptions,
    ForeignFolder,
    PeftOptions,
    check_options,
    has_file,
    read_options,
    read_tensors,
)
from .peft_table import NAME_PREFIX, TYPES_WITH_INTEGER_TENSORS


def open_folder(folder: str | Path) -> ForeignFolder:
    """Read an adapter folder of PEFT or AdapterHub, and validate its options."""
    where = Path(folder)
    options = read_options(where)
    if "peft_type" in options:
        check_options(PeftOptions, options, where / CONFIG_FILE)
        allow_integers = options["peft_type"] in TYPES_WITH_INTEGER_TENSORS
        return ForeignFolder(where, options, read_tensors(where, peft_read.WEIGHT_FILES, allow_integers=allow_integers))
    if "config" not in options or "model_type" not in options:
        raise DeltuneError(f"{where / CONFIG_FILE} is neither PEFT's (no peft_type) nor AdapterHub's (no model_type)")
    check_options(AdapterHubOptions, options, where / CONFIG_FILE)
    tensors = read_tensors(where, adapterhub.WEIGHT_FILES)
    if not has_file(where, adapterhub.HEAD_CONFIG):
        return ForeignFolder(where, options, tensors)
    head_options = read_options(where, adapterhub.HEAD_CONFIG)
    check_options(AdapterHubHead, head_options, where / adapterhub.HEAD_CONFIG)
    return ForeignFolder(where, options, tensors, head_options, read_tensors(where, adapterhub.HEAD_WEIGHTS))


def foreign_model_kind(folder: str | Path) -> tuple[str, int | None]:
    """Return the kind of model that an adapter folder is for, and the number of labels of its head or None."""
    contents = open_folder(folder)
    mapping = contents.options.get("auto_mapping")  # PEFT writes it where no task type was given
    model_class = mapping.get("base_model_class") if isinstance(mapping, dict) else None
    task = contents.options.get("task_type")
    if task:
        kind = next((name for name, head in HEADS.items() if head.peft_task == task), "base")
    else:
        kind = head_of_class_name(str(contents.options.get("model_class") or model_class)) or "base"
    head_weights = [
        t for n, t in {**contents.tensors, **contents.head}.items() if n.endswith(".weight") and _of_head(n)
    ]
    return kind, next(iter(head_weights[0].shape), 1) if kind in HEADS_WITH_LABELS and head_weights else None


def foreign_base(folder: str | Path) -> tuple[str, str, int | None]:
    """Return the kind of model that an adapter folder is for, the name of its base model, and how many labels it has.

    The name is empty where the folder has none.
    """
    options = read_options(Path(folder))
    kind, labels = foreign_model_kind(folder)
    return kind, name_here(str(options.get("base_model_name_or_path") or options.get("model_name") or "")), labels


def _of_head(name: str) -> bool:
    """Whether a tensor belongs to the last linear of a classification head, by the names that transformers gives it."""
    stem = name.removeprefix(NAME_PREFIX).rpartition(".")[0]
    return stem.partition(".")[0] in ("classifier", "score", "classification_head", "qa_outputs") and (
        "." not in stem or stem.endswith("out_proj")
    )
