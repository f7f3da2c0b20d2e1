"""The model of a server, loaded as its configuration says, and the engine over it."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import DeltuneError
from ..files import user_path
from .config import ServeConfig

if TYPE_CHECKING:
    from .engine.server import Server


def load_server(config: ServeConfig) -> Server:
    """Load the base model and its tokenizer, and start the engine."""
    folder = deltas_folder(config)
    import torch
    from torch import nn

    from .engine.backbone import load_to_serve
    from .engine.server import Server

    head, dtype = (None if value == "auto" else value for value in (config.model.kind, config.model.dtype))
    model, tokenizer = load_to_serve(config.model.name, head, dtype)
    device = config.model.device
    if device == "auto":
        device = str(torch.accelerator.current_accelerator() or "cpu") if torch.accelerator.is_available() else "cpu"
    nn.Module.to(model, torch.device(device)).eval()  # transformers' own `to` is typed without a device
    options = config.batching.model_dump() | config.deltas.model_dump(exclude={"folder"})
    options["watch"] = options["watch"] or None
    set_options = {name: value for name, value in options.items() if value is not None}
    return Server(model, tokenizer, deltas=folder, **set_options)


GC_THRESHOLD = 20_000
"""New objects after which garbage is collected. Loading one delta makes thousands, far more than Python's default."""


def tune_garbage_collection() -> None:
    """Leave all objects that exist by now out of garbage collections, in a process that does nothing but serve.

    They stay until it ends, and walking through them stops all requests for up to 200 ms each time. Collections of
    newer objects become rarer: by Python's default they take 7% of the time in which a delta is loaded.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)


def deltas_folder(config: ServeConfig) -> Path | None:
    """Return the folder of deltas, as an absolute path, or None if there is none."""
    folder = None if config.deltas.folder is None else user_path(config.deltas.folder, "--deltas").absolute()
    if folder is not None and not folder.is_dir():
        raise DeltuneError(
            f"there is no folder {folder}; --deltas is the folder of a delta or a run, or of such folders"
        )
    if folder is not None:
        from .engine.folders import DeltasFolder, locate_delta

        if DeltasFolder.at(folder).is_one:
            locate_delta(folder)
    return folder


def base_of_delta(folder: str) -> str:
    """Return the name of the base model of a delta's folder."""
    from ..interop.foreign import foreign_base
    from ..runtime.serialization import FACTS, read_metadata
    from .engine.folders import locate_delta

    where = locate_delta(user_path(folder, "RUN"))
    name = read_metadata(where).base.name if (where / FACTS).is_file() else foreign_base(where)[1]
    if not name:
        raise DeltuneError(f"{folder} does not name its base model: deltune serve BASE --deltas {folder}")
    return name
