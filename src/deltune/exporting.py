"""A run in others' formats: its delta folded into the weights of a plain transformers checkpoint."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import safetensors

from .attaching import tuned
from .errors import DeltuneError
from .evaluate import ready
from .runs import write_failed


def merge(run: str | Path, to: str | Path) -> Path:
    """Write model and tokenizer with the run's delta folded in, loadable without deltune; all or nothing.

    Errors: a folder that is not empty; a method that no weights can express, with what stands in the way.
    """
    target = Path(to).expanduser()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise DeltuneError(f"{target} exists and is not an empty folder; choose another")
    loaded = ready(run)
    model = tuned(loaded.model).merge()
    fresh: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        model.save_pretrained(fresh)
        loaded.tokenizer.save_pretrained(fresh)
        os.chmod(fresh, 0o755)
        if target.exists():
            target.rmdir()
        os.replace(fresh, target)
    except (OSError, safetensors.SafetensorError) as error:
        if fresh is not None:
            shutil.rmtree(fresh, ignore_errors=True)
        raise write_failed(target, error) from error
    return target
