"""Peak memory of a step against PEFT's, and what APET's N costs."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial

import torch
from torch.profiler import ProfilerActivity, profile

from deltune.studies.jobs.timed_model import TimedModel, time_interleaved

from .frame import Piece
from .peers import PAIRS, ours, theirs
from .rows import Row, Target, compared, missing
from .shapes import Shape, build, minilm

MIB = 2**20
DRAWN = (100, 1_000, 10_000)
"""N of APET; a LoRA of rank 8 at MiniLM's shape has 73,728 scalars."""


def peak(work: Callable[[], object]) -> int:
    """Greatest number of bytes in use at once during the work, beyond those in use before it, as the allocator of the
    CPU counts them: every allocation and release, those inside kernels too."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    results = profiled.profiler.kineto_results
    changes = sorted((e.start_ns(), e.nbytes()) for e in results.events() if e.name() == "[memory]")
    live = top = 0
    for _, change in changes:
        live += change
        top = max(top, live)
    return top


def of_step(turn: TimedModel) -> tuple[int, int]:
    """Bytes of a step at its peak, and bytes that stay between steps: trained values and the optimiser's state. The
    frozen weights are not counted."""
    assert turn.optimiser is not None
    turn.step()  # the optimiser's state is made in the first
    trained = [p for group in turn.optimiser.param_groups for p in group["params"]]
    state = [v for tensors in turn.optimiser.state.values() for v in tensors.values() if isinstance(v, torch.Tensor)]
    gc.collect()
    return peak(turn.step), sum(t.nbytes for t in (*trained, *state))


def beside(shape: Shape) -> list[Row]:
    """Every method beside PEFT's."""
    like, rows = build(shape), []
    for pair in PAIRS:
        name = f"peak memory / PEFT's: {pair.name}; {shape}"
        other = theirs(pair, shape, like)
        if other is None:
            rows.append(missing(name, "PEFT cannot"))
            continue
        mine, yours = sum(of_step(ours(pair.ours, shape, like))), sum(of_step(other))
        # to a thousandth, which is what the table shows: below are single numbers, such as a step's count
        rows.append(Row(name, round(mine / yours, 3), Target(1.0), note=f"{mine / MIB:.1f} and {yours / MIB:.1f} MiB"))
    return rows


def drawn(shape: Shape, rounds: int, counts: tuple[int, ...] = DRAWN) -> list[Row]:
    """APET: what stays between steps grows with N and with nothing else; time and peak beside the method's own."""
    like, method = build(shape), "lora(rank=8)"
    whole = ours(method, shape, like)
    sides = {count: ours(f"apet({method}, parameters={count})", shape, like) for count in counts}
    sizes = {count: of_step(turn) for count, turn in sides.items()}
    seconds = time_interleaved({0: whole.step, **{count: turn.step for count, turn in sides.items()}}, rounds)
    top, kept = of_step(whole)
    rows = [
        compared(f"apet of {method}, N={count}: step / the method's; {shape}", seconds[count], seconds[0])
        for count in counts
    ]
    for count, (peaked, _) in sizes.items():
        note = f"{peaked / MIB:.1f} and {top / MIB:.1f} MiB"
        rows.append(Row(f"apet of {method}, N={count}: peak memory / the method's; {shape}", peaked / top, note=note))
    few, many = min(counts), max(counts)
    per = (sizes[many][1] - sizes[few][1]) / (many - few)
    rows.append(
        Row(
            f"apet of {method}: kept between steps, bytes for each of N; {shape}", per, Target(12.0), unit="B",
            note=f"a value and AdamW's two moments are 12; {kept / MIB:.2f} MiB for the method itself",
        )
    )  # fmt: skip
    return rows


def pieces() -> list[Piece]:
    encoder, decoder = minilm("encoder", rows=8), minilm("decoder", rows=8)
    both = [Piece(f"memory: {shape}", partial(beside, shape), 10.0) for shape in (encoder, decoder)]
    return [*both, Piece("memory: apet", partial(drawn, encoder, 7), 10.0)]
