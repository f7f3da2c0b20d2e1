"""Eight deltas in one batch of 32 against eight batches of 4, beside what the bare model gains from that."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

import deltune
from benchmarks.ratios import paired_ratio
from deltune.studies.jobs.timed_model import time_interleaved

from .frame import Piece
from .rows import Row, Target, compared
from .shapes import Shape, batch, build, minilm

METHODS = ("layernorm", "lora(rank=8)", "prefix(length=16)", "parallel_adapter(rank=16)", "three_vectors")
EIGHT = (*METHODS, "ia3", "bitfit", "adapter(rank=16)")
"""Methods that leave the length of the batch as it is."""
DELTAS, EACH = 8, 4
BARE = "bare"


def measure(shape: Shape, rounds: int, methods: Sequence[str] = METHODS) -> list[Row]:
    """The gain, time of eight batches over that of one, as a share of the bare model's in the same rounds.

    The eight batches use one delta, so switching, which they would need too, is not counted for us; rows() is.
    """
    inputs, _ = batch(shape)
    parts = [{name: tensor[i : i + EACH] for name, tensor in inputs.items()} for i in range(0, shape.rows, EACH)]
    names = [f"d{i % DELTAS}" for i in range(shape.rows)]
    like = build(shape).eval()
    cases: dict[tuple[str, str], Callable[[], object]] = {}
    for method in (BARE, *methods):
        model = build(shape, like).eval()
        if method == BARE:
            forward: Callable[[], object] = partial(model, **inputs)
        else:
            for i in range(DELTAS):
                tuned = deltune.attach(model, method, name=f"d{i}")
            forward = partial(_mixed, tuned, names, partial(model, **inputs))
        cases[method, "one"] = forward
        cases[method, "several"] = partial(_several, [partial(model, **part) for part in parts])
    gc.collect()
    with torch.no_grad():
        seconds = time_interleaved(cases, rounds)
    gains = {
        method: [a / b for a, b in zip(seconds[method, "several"], seconds[method, "one"], strict=True)]
        for method in (BARE, *methods)
    }
    bare = paired_ratio(seconds[BARE, "several"], seconds[BARE, "one"]).figure
    rows = []
    for method in methods:
        gain = paired_ratio(seconds[method, "several"], seconds[method, "one"]).figure
        note = f"gains {gain:.2f} ×, the bare model {bare:.2f} ×"
        name = f"gain from one mixed batch / the bare model's: {method}; {shape.rows} × {shape.tokens}"
        rows.append(compared(name, gains[method], gains[BARE], Target(0.85, "at least"), note))
    return rows


def eight_methods(shape: Shape, rounds: int) -> list[Row]:
    """One batch in which every row group uses another method, beside the same batch of the bare model."""
    inputs, _ = batch(shape)
    bare = build(shape).eval()
    model = build(shape, bare).eval()
    for method in EIGHT:
        tuned = deltune.attach(model, method, name=method.partition("(")[0])
    names = [EIGHT[i // EACH].partition("(")[0] for i in range(shape.rows)]
    cases: dict[str, Callable[[], object]] = {
        "ours": partial(_mixed, tuned, names, partial(model, **inputs)),
        BARE: partial(bare, **inputs),
    }
    gc.collect()
    with torch.no_grad():
        seconds = time_interleaved(cases, rounds)
    name = f"mixed batch of 8 methods / the bare model's: {shape.rows} × {shape.tokens}"
    return [compared(name, seconds["ours"], seconds[BARE], Target(1.15))]


def _mixed(tuned: deltune.Tuned, names: Sequence[str], work: Callable[[], object]) -> None:
    with tuned.rows(names):
        work()


def _several(works: Sequence[Callable[[], object]]) -> None:
    for work in works:
        work()


def pieces() -> list[Piece]:
    shapes = [replace(minilm("encoder", rows=DELTAS * EACH), tokens=tokens) for tokens in (16, 64)]
    return [
        Piece("mixed: 8 methods", partial(eight_methods, shapes[1], 15), 15.0),
        *(
            Piece(f"mixed: {shape.tokens} tokens", partial(measure, shape, 7), seconds)
            for shape, seconds in zip(shapes, (12.0, 35.0), strict=True)
        ),
    ]
