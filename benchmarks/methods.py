"""What a method costs beside full tuning: its step, and what is kept for the backward pass (docs/train/choose.md).

The packaged MiniLM, classification with two labels, AdamW, 8 × 64 tokens without padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from deltune.studies.jobs.timing import time_methods

from .frame import Piece
from .memory import MIB
from .rows import Row, compared

FULL = "full"
METHODS = (
    "prompt(length=20)", "lora(rank=8)", "prefix(length=16)", "bitfit", "mam", "layernorm", "adapter(rank=16)",
    "parallel_adapter(rank=16)", "head",
)  # fmt: skip


def measure(model: str, methods: Sequence[str], rows: int, tokens: int, rounds: int) -> list[Row]:
    """Two rows a method, the slowest first."""
    by_name = {method: method for method in (FULL, *methods)}
    facts = time_methods(model, by_name, rows, tokens, rounds, phases=("step",))
    results = []
    for method in sorted(methods, key=lambda method: -facts[method]["step"]):
        fact = facts[method]
        note = f"trains {fact['percent']:.3g} % of the model"
        steps = (fact["turns"]["step"], facts[FULL]["turns"]["step"])
        results.append(compared(f"step / full tuning's: {method}", *steps, note=note))
        results.append(Row(f"kept for the backward pass: {method}", fact["kept"] / MIB, unit="MiB"))
    return [*results, Row(f"kept for the backward pass: {FULL}", facts[FULL]["kept"] / MIB, unit="MiB")]


def pieces() -> list[Piece]:
    return [Piece("methods: MiniLM, 8 × 64", partial(measure, "minilm", METHODS, 8, 64, 9), 30.0)]
