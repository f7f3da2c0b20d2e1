"""Writing a run as a plain checkpoint or for another library, and reading other libraries' adapters."""

from __future__ import annotations

from pathlib import Path

from ..errors import DeltuneError, unknown_name
from ..filesystem import user_path
from ..interop.base import is_foreign
from ..models import KINDS, load_config, load_model, quiet
from ..runtime import attaching
from ..runtime.attaching import tuned
from ..runtime.conversion import atomic_new_folder, foreign_model_kind
from ..runtime.handle import Tuned
from .inference import load_run


def merge_run(run: str | Path, to: str | Path) -> Path:
    """Write the model with the run's delta merged into its weights, and its tokenizer; all or nothing.

    Args:
        run: The folder of the run.
        to: A new folder, which transformers loads without deltune.

    Returns:
        The new folder.

    Raises:
        DeltuneError: The folder is not empty, or no weights can express the method.
    """
    to = user_path(to, "to")
    with atomic_new_folder(to) as fresh, quiet():
        loaded = load_run(run)
        tuned(loaded.model).merge().save_pretrained(fresh)
        loaded.tokenizer.save_pretrained(fresh)
    return to


def export_run(run: str | Path, to: str | Path, format: str = "peft") -> Path:
    """Write a run's delta for another library; all or nothing.

    Args:
        run: The folder of the run.
        to: A new folder.
        format: The format; "peft".

    Returns:
        The new folder.

    Raises:
        DeltuneError: The folder is no run or is not empty, or the format cannot express the method.
    """
    return attaching.export(load_run(run).model, user_path(to, "to"), format)


def import_adapter(folder: str | Path, model: str, to: str | Path, kind: str | None = None) -> Tuned:
    """Turn a folder of PEFT or AdapterHub into a delta folder for a base model.

    Args:
        folder: The folder that PEFT or AdapterHub saved.
        model: Hub id or folder of the base model.
        to: A new folder for the delta.
        kind: What the model is loaded as; by default what the folder says.

    Returns:
        The handle on the model with the delta attached.

    Raises:
        DeltuneError: The folder is of neither library, or something in it has no translation.
    """
    folder, to = user_path(folder, "folder"), user_path(to, "output")
    if not is_foreign(folder):
        raise DeltuneError(f"{str(folder)!r} holds no adapter_config.json, which PEFT and AdapterHub both write")
    if kind is not None and kind not in KINDS:
        raise DeltuneError(unknown_name("kind of model", kind, KINDS))
    default_kind, count = foreign_model_kind(folder)
    load_config(model)
    labels = [f"LABEL_{i}" for i in range(count)] if count is not None and kind in (None, default_kind) else None
    handle = attaching.load(load_model(model, kind or default_kind, labels), folder)
    handle.save(to)
    return handle
