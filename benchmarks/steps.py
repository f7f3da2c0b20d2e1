"""Steps against PEFT's, steps against two forward passes of the bare model."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial

from deltune.studies.jobs.timed_model import TimedModel, time_interleaved

from .frame import Piece
from .peers import PAIRS, bare, ours, theirs
from .rows import NOT_SLOWER, Row, Target, compared, missing
from .shapes import Shape, base, build, minilm

FORWARDS = {
    "layernorm": 1.15, "bitfit": 1.15, "parallel_adapter(rank=16)": 1.15, "lora(rank=8)": 1.2, "prefix(length=16)": 1.2,
}  # fmt: skip
"""Method -> how many times two forward passes a step may take."""


def measure(shape: Shape, rounds: int) -> list[Row]:
    """All rows of a shape, from one interleaved run."""
    like = build(shape)
    plain = bare(shape, like)
    sides: dict[str, TimedModel] = {}
    for method in dict.fromkeys((*(pair.ours for pair in PAIRS), *FORWARDS)):
        sides[method] = ours(method, shape, like)
    peft = {pair.name: theirs(pair, shape, like) for pair in PAIRS}
    cases: dict[tuple[str, str], Callable[[], object]] = {("bare", "forward_twice"): plain.forward_twice}
    cases |= {("ours", method): turn.step for method, turn in sides.items()}
    cases |= {("peft", name): turn.step for name, turn in peft.items() if turn is not None}
    gc.collect()
    seconds = time_interleaved(cases, rounds)
    rows = []
    for pair in PAIRS:
        name = f"step / PEFT's: {pair.name}; {shape}"
        if peft[pair.name] is None:
            rows.append(missing(name, "PEFT cannot"))
        else:
            rows.append(compared(name, seconds["ours", pair.ours], seconds["peft", pair.name], NOT_SLOWER))
    for method, limit in FORWARDS.items():
        name = f"step / two forwards: {method}; {shape}"
        rows.append(compared(name, seconds["ours", method], seconds["bare", "forward_twice"], Target(limit)))
    return rows


def pieces() -> list[Piece]:
    """Both kinds, without dropout and padding and with both; of the base shapes, ten times as slow, one of each."""
    shapes = [
        (minilm("encoder", False, 0.0), 6, 40.0),
        (minilm("encoder", True, 0.1), 6, 50.0),
        (minilm("decoder", False, 0.0), 6, 55.0),
        (minilm("decoder", True, 0.1), 6, 60.0),
        (base("encoder", True, 0.1), 6, 60.0),
        (base("decoder", False, 0.0), 6, 60.0),
    ]
    return [_piece("steps", *shape) for shape in shapes]


def others() -> list[Piece]:
    """The shapes that `make bench` has no time for."""
    shapes = [
        (minilm("encoder", False, 0.1), 9, 60.0),
        (minilm("decoder", False, 0.1), 9, 75.0),
        (base("encoder", False, 0.0), 9, 75.0),
        (base("decoder", True, 0.1), 9, 80.0),
    ]
    return [_piece("others", *shape) for shape in shapes]


def _piece(part: str, shape: Shape, rounds: int, seconds: float) -> Piece:
    return Piece(f"{part}: {shape}", partial(measure, shape, rounds), seconds)
