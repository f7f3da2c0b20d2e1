"""Everything that is to be shown on an accelerator: laws, and Llama shapes of one and three billion parameters.

    python -m benchmarks.gpu [--only laws,steps,mixed,size] [--device cuda|cpu] [--shape 1b|3b|tiny] [--rounds 10]
                             [--minutes 9] [--again] [--output build/bench-gpu.json]
    python -m benchmarks.gpu --keep

Parts: laws (attach, detach, save, load, merge, mixed batches, gradients, generation and compilation, for
eight families in float32 without TF32, in bf16 weights and under autocast), steps (time, peak memory and kernels beside
PEFT, eager and compiled, with and without gradient checkpointing), mixed (16 and 64 deltas in one batch) and size (the
largest Llama that is tuned on this card). Random weights, no download. What was interrupted, by --minutes too, goes on
where it was. Every side has its turn in an interleaved run of its mode; ratios are to PEFT's side of the same method
and mode.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, PreTrainedModel

import deltune
from deltune.studies.jobs.timed_model import TimedModel, time_interleaved

from . import gpu_laws
from .frame import Piece, Report, carry_out, chosen, machine
from .memory import MIB, peak
from .report import keep, show
from .rows import Row, Target, compared, missing

MODES = ("eager", "eager, checkpointed", "compiled")
LINEARS = ("query", "key", "value", "output", "ffn")


@dataclass(frozen=True)
class Size:
    """A Llama shape and a batch of rows of so many tokens."""

    config: Mapping[str, Any]
    rows: int
    tokens: int


def _llama(width: int, layers: int, heads: int, ffn: int) -> dict[str, Any]:
    return {
        "vocab_size": 32_000, "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": 8, "intermediate_size": ffn, "max_position_embeddings": 2048,
    }  # fmt: skip


SIZES = {
    "1b": Size(_llama(2048, 16, 32, 8192), rows=4, tokens=768),
    "3b": Size(_llama(3072, 28, 24, 8192), rows=4, tokens=768),
    "tiny": Size(
        {**_llama(32, 2, 4, 48), "vocab_size": 64, "num_key_value_heads": 2, "max_position_embeddings": 64},
        rows=2, tokens=8,
    ),
}  # fmt: skip
LARGER = ((4096, 32, 32, 14_336), (5120, 40, 40, 13_824), (6656, 60, 52, 17_920), (8192, 80, 64, 28_672))
"""Width, layers, heads and FFN width of shapes of 8, 13, 30 and 70 billion parameters."""

METHODS: dict[str, Callable[[], Any] | None] = {
    "full": None,
    f"lora(rank=32, at={LINEARS})": lambda: _config("LoraConfig", r=32, lora_alpha=32, target_modules="all-linear"),
    "lora(rank=8)": lambda: _config("LoraConfig", r=8, lora_alpha=8, target_modules=["q_proj", "v_proj"]),
    "prefix(length=50)": lambda: _config("PrefixTuningConfig", num_virtual_tokens=50),
    "layernorm": lambda: _config("LNTuningConfig"),
    "ia3": lambda: _config("IA3Config"),
    "mam(length=16, rank=16)": None,
}
"""Our expression -> PEFT's configuration, None where PEFT has nothing like it; of `full` both are the bare model."""
MIXED = ("layernorm", "lora(rank=8)", "prefix(length=16)", "parallel_adapter(rank=16)")
STEP, MEMORY = Target(0.95, by="interval"), Target(1.0)


def _config(kind: str, **options: Any) -> Any:
    import peft

    return getattr(peft, kind)(task_type="CAUSAL_LM", **options)


def llama(config: Mapping[str, Any], device: str) -> PreTrainedModel:
    """A model of random bf16 weights, made on the device."""
    torch.manual_seed(0)
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(LlamaConfig(**config), dtype=torch.bfloat16)
    return model


def build(size: Size, device: str, mode: str, side: str, method: str) -> TimedModel | None:
    """A side with a model of its own; None where PEFT has no such method."""
    model = llama({**size.config, "use_cache": False}, device)
    ids = torch.randint(0, size.config["vocab_size"], (size.rows, size.tokens), device=device)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    trained = list(model.parameters())
    if side == "ours" and method != "full":
        trained = list(deltune.attach(model, method).trainable_parameters())
    elif side == "theirs":
        import peft

        make = METHODS[method]
        if make is None:
            return None
        model = peft.get_peft_model(model, make())
        trained = [p for p in model.parameters() if p.requires_grad]
    if mode == "eager, checkpointed":
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    if mode == "compiled":
        model.compile()
    return TimedModel(model, batch, ids, trained)


def synchronised(step: Callable[[], object], device: str) -> Callable[[], None]:
    """The step until the device is done with it."""

    def whole() -> None:
        step()
        if device != "cpu":
            torch.accelerator.synchronize()

    return whole


def top(work: Callable[[], object], device: str) -> int:
    """Peak bytes: of everything on an accelerator, weights too; on the CPU beyond what was there."""
    if device == "cpu":
        return peak(work)
    torch.cuda.reset_peak_memory_stats()
    work()
    return torch.cuda.max_memory_allocated()


def kernels(work: Callable[[], object], device: str) -> int:
    """Kernels that the work launches; on the CPU, operations of ATen."""
    kinds = [ProfilerActivity.CPU] if device == "cpu" else [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=kinds) as profiled:
        work()
    events = profiled.events() or []
    if device == "cpu":
        return sum(event.name.startswith("aten::") for event in events)
    return sum(event.device_type.name == "CUDA" for event in events)


def alone(size: Size, device: str, mode: str, side: str, method: str) -> tuple[int, int] | None:
    """Peak bytes and kernels of a step of one side with nothing else on the device; None where PEFT cannot."""
    turn = build(size, device, mode, side, method)
    if turn is None:
        return None
    step = synchronised(turn.step, device)
    step()  # compiles, and makes the optimiser's state
    return top(step, device), kernels(step, device)


def measure(size: Size, device: str, mode: str, method: str, rounds: int) -> list[Row]:
    """Ours and PEFT's side by side: two models in memory at a time."""
    torch.compiler.reset()  # after some models of one class dynamo would compile no more
    rows, facts, steps = [], {}, {}
    for side in ("ours",) if method == "full" else ("ours", "theirs"):
        gc.collect()
        result = alone(size, device, mode, side, method)
        if result is not None:
            facts[side] = result
    for side in facts:
        turn = build(size, device, mode, side, method)
        assert turn is not None
        steps[side] = synchronised(turn.step, device)
    seconds = time_interleaved(steps, rounds, warm=3)
    for side, (bytes_at_peak, launched) in facts.items():
        name = f"{'' if side == 'ours' else 'PEFT’s '}{method}, {mode}"
        middle = statistics.median(seconds[side])
        rows.append(Row(f"{name}: step", 1000 * middle, unit="ms"))
        rows.append(Row(f"{name}: tokens a second", size.rows * size.tokens / middle, unit=""))
        rows.append(Row(f"{name}: peak memory", bytes_at_peak / MIB, unit="MiB"))
        rows.append(Row(f"{name}: kernels a step", launched, unit=""))
    if "theirs" in facts:
        rows.append(compared(f"{method}, {mode}: step / PEFT's", seconds["ours"], seconds["theirs"], STEP))
        share = facts["ours"][0] / facts["theirs"][0]
        rows.append(Row(f"{method}, {mode}: peak memory / PEFT's", share, MEMORY))
    if "theirs" not in facts and method != "full":
        rows.append(missing(f"{method}, {mode}: step / PEFT's", "PEFT has no such method"))
    return rows


def mixed(size: Size, device: str, deltas: int, rounds: int) -> list[Row]:
    """One batch with a row for each delta, beside a batch for each delta: its gain as a share of the bare model's.

    Prefill is a pass over the prompts, decode a pass over one more token with their cache. PEFT's side mixes LoRAs by
    `adapter_names`.
    """
    ids = torch.randint(0, size.config["vocab_size"], (deltas, min(size.tokens, 128)), device=device)
    names = [f"d{i}" for i in range(deltas)]
    rows: list[Row] = []
    seconds: dict[tuple[str, str, str], list[float]] = {}
    for side in ("bare", *MIXED, "theirs"):
        model, scope = llama(size.config, device).eval(), _nothing
        if side == "theirs":
            import peft

            make = METHODS["lora(rank=8)"]
            assert make is not None
            model = peft.get_peft_model(model, make(), adapter_name=names[0])
            for name in names[1:]:
                model.add_adapter(name, make())
            model.eval()
        elif side != "bare":
            for name in names:
                tuned = deltune.attach(model, side, name=name)
            scope = partial(_row_names, tuned)
        options = (lambda chosen: {"adapter_names": chosen}) if side == "theirs" else (lambda chosen: {})
        cases: dict[tuple[str, str, str], Callable[[], object]] = {}
        for what in ("prefill", "decode"):
            parts = {"one": [names], "several": [[name] for name in names]}
            for how, groups in parts.items():
                turns = [_turn(model, ids, names, group, what, scope, options(group)) for group in groups]
                cases[side, what, how] = synchronised(partial(_all, turns), device)
        with torch.no_grad():
            seconds |= time_interleaved(cases, rounds)
        del model, cases
        gc.collect()
    for what in ("prefill", "decode"):
        bare = [a / b for a, b in zip(seconds["bare", what, "several"], seconds["bare", what, "one"], strict=True)]
        for method in MIXED:
            one, several = seconds[method, what, "one"], seconds[method, what, "several"]
            gains = [a / b for a, b in zip(several, one, strict=True)]
            name = f"{deltas} deltas, {what}: gain from one mixed batch / the bare model's: {method}"
            rows.append(compared(name, gains, bare, Target(0.85, "at least")))
        name = f"{deltas} LoRAs, {what}: one mixed batch / PEFT's adapter_names"
        theirs = seconds["theirs", what, "one"]
        rows.append(compared(name, seconds["lora(rank=8)", what, "one"], theirs, Target(1 / 3, by="interval")))
    return rows


def _nothing(names: Sequence[str]) -> Any:
    return torch.no_grad()


def _row_names(tuned: deltune.Tuned, names: Sequence[str]) -> Any:
    return tuned.rows(names)


def _turn(
    model: Any,
    ids: torch.Tensor,
    names: Sequence[str],
    group: Sequence[str],
    what: str,
    scope: Callable[[Sequence[str]], Any],
    options: dict[str, Any],
) -> Callable[[], None]:
    """A pass of the rows of some deltas; with a cache of their prompts for `decode`."""
    part = ids[[names.index(name) for name in group]]
    if what == "prefill":

        def prefill() -> None:
            with torch.no_grad(), scope(group):
                model(input_ids=part, use_cache=False, **options)

        return prefill
    cache = DynamicCache()
    with torch.no_grad(), scope(group):
        model(input_ids=part, past_key_values=cache, use_cache=True, **options)

    def decode() -> None:
        with torch.no_grad(), scope(group):
            model(input_ids=part[:, -1:], past_key_values=cache, use_cache=True, **options)
        cache.crop(-1)

    return decode


def _all(turns: Sequence[Callable[[], None]]) -> None:
    for turn in turns:
        turn()


def largest(device: str, method: str, shapes: Sequence[tuple[int, int, int, int]] = LARGER) -> list[Row]:
    """The largest of some Llama shapes that takes a training step of 1 × 512 tokens in bf16, with checkpointing."""
    best, why = 0.0, ""
    for shape in shapes:
        gc.collect()
        if device != "cpu":
            torch.accelerator.empty_cache()
        try:
            turn = build(Size(_llama(*shape), 1, 512), device, "eager, checkpointed", "ours", method)
            assert turn is not None
            turn.step()
            best = sum(p.numel() for p in turn.model.parameters()) / 1e9
        except torch.OutOfMemoryError:
            why = f"no memory at width {shape[0]} and {shape[1]} layers"
            break
        finally:
            turn = None
    return [Row(f"{method}: largest Llama that takes a step", best, unit="billion parameters", note=why)]


def parts(sizes: Mapping[str, Size], device: str, rounds: int) -> dict[str, list[Piece]]:
    """Pieces by part; the parts that show most come first."""
    return {
        "laws": gpu_laws.pieces(device),
        "steps": [
            Piece(f"gpu: {name}, {method}, {mode}", partial(measure, size, device, mode, method, rounds), 20.0)
            for name, size in sizes.items()
            for mode in MODES
            for method in METHODS
            if method != "full" or name != "3b"  # weights, gradients and AdamW's state of 3 billion fill many cards
        ],
        "mixed": [
            Piece(f"gpu: {name}, mixed batches of {n}", partial(mixed, size, device, n, rounds), 40.0)
            for name, size in sizes.items()
            if name != "3b"
            for n in (16, 64)
        ],
        "size": [
            Piece(f"gpu: largest, {method}", partial(largest, device, method), 60.0)
            for method in ("layernorm", "lora(rank=8)", "prefix(length=16)")
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="parts: a,b,…")
    parser.add_argument("--shape", choices=SIZES, help="this shape alone; default: 1b and 3b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--minutes", type=float, help="begin nothing more after so many minutes")
    parser.add_argument("--again", action="store_true", help="measure anew what is measured already")
    parser.add_argument("--output", type=Path, default=Path("build/bench-gpu.json"))
    parser.add_argument("--keep", action="store_true", help="measure nothing, write benchmarks/results from the output")
    arguments = parser.parse_args()
    if arguments.keep:
        keep(Report.read(arguments.output))
        return
    if arguments.device != "cpu" and not torch.accelerator.is_available():
        raise SystemExit("no accelerator here; try the code by: python -m benchmarks.gpu --shape tiny --device cpu")
    names = [arguments.shape] if arguments.shape else ["1b", "3b"]
    known = parts({name: SIZES[name] for name in names}, arguments.device, arguments.rounds)
    todo = chosen(known, arguments.only or ",".join(known))
    every = [piece for pieces in known.values() for piece in pieces]
    report = Report.begin(arguments.output, machine(torch.get_num_threads()), todo, every, arguments.again)
    console, end = Console(stderr=True), time.monotonic() + 60 * (arguments.minutes or float("inf"))

    def begins(piece: Piece) -> None:
        if time.monotonic() > end:
            raise SystemExit(
                f"{arguments.minutes:g} minutes are over; {len(report.left)} pieces are left, run this again"
            )
        console.print(piece.name)

    carry_out(todo, report, begins)
    show(report.all_rows())


if __name__ == "__main__":
    main()
