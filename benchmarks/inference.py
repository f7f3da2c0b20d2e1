"""Inference beside the bare model's: what a delta costs in use, and that it costs nothing once it is merged."""

from __future__ import annotations

import gc
from dataclasses import replace
from functools import partial

from deltune.studies.jobs.timed_model import time_interleaved

from .frame import Piece
from .peers import bare, merged, ours
from .rows import NOT_SLOWER, Row, Target, compared
from .shapes import Shape, base, build, minilm

METHODS = ("layernorm", "lora(rank=8)", "parallel_adapter(rank=16)")
MERGED = "lora(rank=8)"
SHAPES = (
    minilm("encoder", True, 0.0),
    base("decoder", False, 0.0),
)
"""Without dropout: there is none in inference."""
OTHERS = (
    *(replace(shape, padded=not shape.padded) for shape in SHAPES),
    *(shape for padded in (True, False) for shape in (minilm("decoder", padded, 0.0), base("encoder", padded, 0.0))),
)
ROUNDS = 60
"""The noise of a row is about 0.7 % then, as those of `layernorm` and of a merged delta show, which do what the bare
model does (merged, with query and value weights of its own); with 28 it was 1.5 %, half of what a row is to judge."""


def measure(shape: Shape, rounds: int) -> list[Row]:
    """All rows of a shape."""
    like = build(shape)
    turns = {"bare": bare(shape, like), "merged": merged(MERGED, shape, like)}
    turns |= {method: ours(method, shape, like) for method in METHODS}
    gc.collect()
    seconds = time_interleaved({name: turn.inference for name, turn in turns.items()}, rounds)
    rows = []
    for method in METHODS:
        name = f"inference / bare: {method}; {shape}"
        rows.append(compared(name, seconds[method], seconds["bare"], Target(1.03)))
    name = f"inference / bare: {MERGED} merged; {shape}"
    return [*rows, compared(name, seconds["merged"], seconds["bare"], NOT_SLOWER)]


def pieces() -> list[Piece]:
    return [_piece("inference: ", shape) for shape in SHAPES]


def others() -> list[Piece]:
    """The shapes that `make bench` has no time for."""
    return [_piece("others: inference, ", shape) for shape in OTHERS]


def _piece(part: str, shape: Shape) -> Piece:
    return Piece(f"{part}{shape}", partial(measure, shape, ROUNDS), 55.0)
