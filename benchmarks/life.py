"""Attaching to a large model, and many deltas on a small one."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import deltune

from .frame import Piece
from .rows import Row, Target
from .shapes import Shape, build, minilm

METHODS = ("lora(rank=8)", "prefix(length=16)", "layernorm", "mam(length=16, rank=16)")


def clocked(work: Callable[[], object]) -> float:
    """Seconds of the work."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def attached(config: LlamaConfig, methods: tuple[str, ...] = METHODS, times: int = 3) -> list[Row]:
    """attach on the meta device: what the anatomy, the plan and the modules cost without any weights."""
    rows = []
    for method in methods:
        seconds = []
        for _ in range(times):
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config)
                seconds.append(clocked(partial(deltune.attach, model, method)))
        size = sum(p.numel() for p in model.parameters()) / 1e9
        name = f"attach on the meta device: {method}; Llama shape of {size:.1f} billion"
        rows.append(Row(name, statistics.median(seconds), Target(2.0), (min(seconds), max(seconds)), "s", "all of 3"))
    return rows


def switched(shape: Shape, methods: tuple[str, ...] = METHODS, deltas: int = 100) -> list[Row]:
    """Named deltas loaded from the disk, then used in turn."""
    rows = []
    for method in methods:
        with tempfile.TemporaryDirectory() as folder:
            saved = deltune.attach(build(shape), method).save(Path(folder) / "delta")
            model = build(shape)
            loading = [clocked(partial(deltune.load, model, saved, name=f"d{i}")) for i in range(deltas)]
        tuned = deltune.tuned(model)
        switching = sorted(clocked(partial(tuned.use, f"d{i}")) for i in range(deltas))
        interval = (1000 * switching[deltas // 40], 1000 * switching[-1 - deltas // 40])
        name = f"a switch among {deltas} deltas: {method}; {shape.name}"
        note = f"interval: of 95 % of the switches; loading one {1000 * statistics.median(loading):.0f} ms"
        rows.append(Row(name, 1000 * statistics.median(switching), Target(10.0), interval, "ms", note))
    return rows


def pieces() -> list[Piece]:
    return [
        Piece("life: attach", partial(attached, LlamaConfig()), 6.0),  # its defaults are the 7-billion shape
        Piece("life: switch", partial(switched, minilm("encoder")), 15.0),
    ]
