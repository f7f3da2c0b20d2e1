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

    from ..models import load_with_tokenizer
    from .engine.server import Server

    head, dtype = (None if value == "auto" else value for value in (config.model.kind, config.model.dtype))
    model, tokenizer = load_with_tokenizer(config.model.name, head, dtype)
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


OF_ONE_DELTA = ("delta.json", "spec.yaml", "adapter_config.json")
"""Files that are in the folder of a delta, of a run, and of an adapter of PEFT or AdapterHub."""


def deltas_folder(config: ServeConfig) -> Path | None:
    """Return the folder of deltas, as an absolute path, or None if there is none."""
    folder = None if config.deltas.folder is None else user_path(config.deltas.folder, "--deltas").absolute()
    if folder is not None and not folder.is_dir():
        raise DeltuneError(f"there is no folder {folder}; --deltas is a folder with a folder for each delta")
    if folder is not None and any((folder / name).exists() for name in OF_ONE_DELTA):
        raise DeltuneError(
            f"{folder} is the folder of one delta or run; --deltas is a folder with a folder for each delta, whose "
            f"name clients ask for: --deltas {folder.parent} serves it as {folder.name!r}"
        )
    return folder
