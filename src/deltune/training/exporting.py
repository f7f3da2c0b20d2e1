"""A run in others' formats, and others' folders as ours: merged into a plain checkpoint, written, read."""

from __future__ import annotations

from pathlib import Path

from ..errors import DeltuneError, unknown_name
from ..filesystem import user_path
from ..interop.base import is_foreign
from ..models import AUTO_CLASSES, load_config, load_model, silent_loading
from ..runtime import attaching
from ..runtime.attaching import tuned
from ..runtime.conversion import atomic_new_folder, foreign_model_kind
from ..runtime.handle import Tuned
from .inference import load_run


def merge_run(run: str | Path, to: str | Path) -> Path:
    """Write model and tokenizer with the run's delta folded in, loadable without deltune; all or nothing.

    Errors: a folder that is not empty; a method that no weights can express, with what stands in the way.
    """
    to = user_path(to, "to")
    with atomic_new_folder(to) as fresh, silent_loading():
        loaded = load_run(run)
        tuned(loaded.model).merge().save_pretrained(fresh)
        loaded.tokenizer.save_pretrained(fresh)
    return to


def export_run(run: str | Path, to: str | Path, format: str = "peft") -> Path:
    """Write a run's delta for another library, into a new folder, all or nothing.

    Errors: no run, a folder that is not empty, everything that the format cannot express.
    """
    return attaching.export(load_run(run).model, user_path(to, "to"), format)


def import_adapter(folder: str | Path, model: str, to: str | Path, kind: str | None = None) -> Tuned:
    """Write a folder of PEFT or AdapterHub as a delta folder for a base model; the handle on it.

    kind: what the model is loaded as; by default what the folder says. Errors: whatever has no translation.
    """
    folder, to = user_path(folder, "folder"), user_path(to, "output")
    if not is_foreign(folder):
        raise DeltuneError(f"{str(folder)!r} holds no adapter_config.json, which PEFT and AdapterHub both write")
    if kind is not None and kind not in AUTO_CLASSES:
        raise DeltuneError(unknown_name("kind of model", kind, AUTO_CLASSES))
    wanted, count = foreign_model_kind(folder)
    load_config(model)
    labels = [f"LABEL_{i}" for i in range(count)] if count is not None and kind in (None, wanted) else None
    handle = attaching.load(load_model(model, kind or wanted, labels), folder)
    handle.save(to)
    return handle
