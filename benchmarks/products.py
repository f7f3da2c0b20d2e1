"""Products side by side: torch's default ones, the fastest in float32 of this machine, and those of bf16."""

from __future__ import annotations

import gc
from functools import partial

import torch

import deltune
from deltune.timing import TimedModel, paired_ratio, time_interleaved

from .frame import Piece
from .peers import PAIRS, bare, full, ours, theirs
from .rows import NOT_SLOWER, Row, Target, of_ratio
from .shapes import Shape, base, build, minilm

BACKENDS = ("torch", "auto")
NAMES = ("lora, r=8", "layernorm", "prefix, l=16")


def measure(shape: Shape, rounds: int, limit: float) -> list[Row]:
    """All rows of a shape. limit: the target of a step with the fastest products, as a share of PEFT's."""
    like = build(shape)
    pairs = [pair for pair in PAIRS if pair.name in NAMES]
    cases = {("PEFT's", pair.name): peft.step for pair in pairs if (peft := theirs(pair, shape, like)) is not None}
    cases |= {("plain", "full"): full(shape).step, ("plain", "inference"): bare(shape, like).inference}
    for backend in BACKENDS:
        for pair in pairs:
            cases[backend, pair.name] = _optimized(ours(pair.ours, shape, like), backend).step
        cases[backend, "full"] = _optimized(full(shape), backend).step
        cases[backend, "inference"] = _optimized(bare(shape, like), backend).inference
    cases |= {("bf16", pair.name): _in_bf16(ours(pair.ours, shape, like)).step for pair in pairs}
    gc.collect()
    seconds = time_interleaved(cases, rounds)
    rows = []
    for who, what in [case for case in cases if case[0] in ("PEFT's", "plain")]:
        for backend in BACKENDS:
            target = Target(limit if who == "PEFT's" else 0.6) if backend == "auto" else None
            ratio = paired_ratio(seconds[backend, what], seconds[who, what])
            rows.append(of_ratio(f"products, {backend} / {who}: {what}; {shape}", ratio, target))
        if who == "PEFT's":
            ratio = paired_ratio(seconds["bf16", what], seconds[who, what])
            rows.append(of_ratio(f"products, bf16 / {who} in fp32: {what}; {shape}", ratio, Target(0.4)))
        ratio = paired_ratio(seconds["auto", what], seconds["torch", what])
        rows.append(of_ratio(f"products, auto / torch: {what}; {shape}", ratio, NOT_SLOWER))
    return rows


def _optimized(timed: TimedModel, backend: str) -> TimedModel:
    deltune.optimize_linear(timed.model, backend)  # type: ignore[arg-type]
    return timed


def _in_bf16(timed: TimedModel) -> TimedModel:
    """As `precision: bf16` trains on a CPU."""
    deltune.optimize_linear(timed.model, keep_casts=True)
    timed.model.forward = torch.autocast("cpu", torch.bfloat16)(timed.model.forward)
    return timed


def pieces() -> list[Piece]:
    shapes = [
        (minilm("encoder", False, 0.0), 6, 0.6),
        (minilm("decoder", True, 0.1), 6, 0.6),
        (base("encoder", True, 0.1), 6, 0.55),
    ]
    return [
        Piece(f"products: {shape}", partial(measure, shape, rounds, limit), 60.0) for shape, rounds, limit in shapes
    ]
