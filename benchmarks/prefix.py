"""A prefix joined to the model's keys against one attended to apart and merged, at several lengths (UV eq. 5 and 7)."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from transformers import DynamicCache

import deltune
from deltune.runtime.attention import How
from deltune.timing import TimedModel, time_interleaved

from .frame import Piece
from .peers import ours
from .rows import NOT_SLOWER, Row, Target, compared
from .shapes import Shape, batch, build, minilm

METHOD = "prefix(length=16)"
HOWS: tuple[How, ...] = ("auto", "joined", "merged")


def served(work: Callable[[], object], how: How) -> None:
    with deltune.prefix_attention(how):
        work()


def token(turn: TimedModel) -> Callable[[], None]:
    """One more token for every row, after the batch in the cache."""
    cache, ids = DynamicCache(), turn.batch["input_ids"]
    turn.model.eval()
    with torch.no_grad():
        turn.model(ids, past_key_values=cache, use_cache=True)

    def one() -> None:
        with torch.no_grad():
            turn.model(ids[:, -1:], past_key_values=cache, use_cache=True)
        cache.crop(-1)

    return one


def measure(shape: Shape, rounds: int) -> list[Row]:
    """Training steps and tokens of generation: merged and auto beside joined."""
    like, rows = build(shape), []
    ids, labels = batch(shape)
    bare = {"input_ids": ids["input_ids"]}  # nothing is padded: the causal order is left to the kernel
    training, generating = ours(METHOD, shape, like), ours(METHOD, shape, like)
    training.batch, training.labelled_batch = bare, {**bare, "labels": labels}
    judged: dict[How, Target | None] = {"merged": None, "auto": NOT_SLOWER}
    for what, work in (("step", training.step), ("next token", token(generating))):
        gc.collect()
        seconds = time_interleaved({how: partial(served, work, how) for how in HOWS}, rounds)
        for how, target in judged.items():
            name = f"{what}, {how} / joined: {METHOD}; {shape.name}, {shape.rows} × {shape.tokens} causal"
            rows.append(compared(name, seconds[how], seconds["joined"], target))
    return rows


def pieces(sizes: Sequence[tuple[int, int, float]] = ((16, 64, 15.0), (2, 512, 17.0), (1, 1000, 17.0))) -> list[Piece]:
    """sizes: rows, tokens, seconds; GPT-2 has 1,024 positions."""
    shapes = [(replace(minilm("decoder", dropout=0.0, rows=rows), tokens=n), seconds) for rows, n, seconds in sizes]
    return [Piece(f"prefix: {s.rows} × {s.tokens}", partial(measure, s, 9), seconds) for s, seconds in shapes]
