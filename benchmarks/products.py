"""Products side by side: torch's default ones, the fastest in float32 of this machine, and those of bf16."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

import deltune
from deltune.timing import TimedModel, paired_ratio, time_interleaved

from .frame import Piece
from .peers import PAIRS, bare, full, ours, theirs
from .rows import NOT_SLOWER, Row, Target, of_ratio
from .shapes import Shape, base, build, minilm

BACKENDS = ("torch", "auto")
NAMES = ("lora, r=8", "layernorm", "prefix, l=16", "ia3", "prompt, l=20")
IN_BF16 = NAMES[:3]
GENERATED = "lora, r=8"
NEW_TOKENS = 24


def measure(shape: Shape, rounds: int, limit: float) -> list[Row]:
    """All rows of a shape. limit: the target of a step with the fastest products, as a share of PEFT's."""
    like = build(shape)
    pairs = [pair for pair in PAIRS if pair.name in NAMES]
    peft = {pair.name: one for pair in pairs if (one := theirs(pair, shape, like)) is not None}
    cases: dict[tuple[str, str], Callable[[], object]] = {("PEFT's", name): one.step for name, one in peft.items()}
    if generates := shape.kind == "decoder":
        cases["PEFT's", "generate"] = partial(_generate, peft[GENERATED].model)
    cases |= {("plain", "full"): full(shape).step, ("plain", "inference"): bare(shape, like).inference}
    for backend in BACKENDS:
        for pair in pairs:
            one = _optimized(ours(pair.ours, shape, like), backend)
            cases[backend, pair.name] = one.step
            if generates and pair.name == GENERATED:
                cases[backend, "generate"] = partial(_generate, one.model)
        cases[backend, "full"] = _optimized(full(shape), backend).step
        cases[backend, "inference"] = _optimized(bare(shape, like), backend).inference
    cases |= {("bf16", p.name): _in_bf16(ours(p.ours, shape, like)).step for p in pairs if p.name in IN_BF16}
    gc.collect()
    seconds = time_interleaved(cases, rounds)
    rows = []
    for who, what in [case for case in cases if case[0] in ("PEFT's", "plain")]:
        limits = {"generate": 0.75} if who == "PEFT's" else {"full": 0.6, "inference": 0.6}
        for backend in BACKENDS:
            target = Target(limits.get(what, limit)) if backend == "auto" else None
            ratio = paired_ratio(seconds[backend, what], seconds[who, what])
            rows.append(of_ratio(f"products, {backend} / {who}: {what}; {shape}", ratio, target))
        if ("bf16", what) in cases:
            ratio = paired_ratio(seconds["bf16", what], seconds[who, what])
            rows.append(of_ratio(f"products, bf16 / {who} in fp32: {what}; {shape}", ratio, Target(0.4)))
        ratio = paired_ratio(seconds["auto", what], seconds["torch", what])
        rows.append(of_ratio(f"products, auto / torch: {what}; {shape}", ratio, NOT_SLOWER))
    return rows


def _generate(model: nn.Module) -> torch.Tensor:
    """Continue 16 texts of 8 tokens greedily."""
    tokens = torch.arange(16 * 8).reshape(16, 8)
    with torch.no_grad():
        out: torch.Tensor = model.generate(  # type: ignore[operator]
            input_ids=tokens, attention_mask=torch.ones_like(tokens), do_sample=False, num_beams=1,
            max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, pad_token_id=0,
        )  # fmt: skip
    return out


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
        (minilm("encoder", False, 0.0), 0.6),
        (minilm("encoder", True, 0.1), 0.6),
        (minilm("decoder", False, 0.0), 0.6),
        (minilm("decoder", True, 0.1), 0.6),
        (base("encoder", True, 0.1), 0.55),
    ]
    return [Piece(f"products: {shape}", partial(measure, shape, 6, limit), 80.0) for shape, limit in shapes]
