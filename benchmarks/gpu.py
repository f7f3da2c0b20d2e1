"""A model of about a billion parameters on an accelerator: seconds, tokens a second, peak memory and kernels of a step.

    python -m benchmarks.gpu [--shape 1b|tiny] [--device cuda|cpu] [--rounds 20] [--output build/bench-gpu.json]
    python -m benchmarks.gpu --write docs/speed.md

Llama's shape, random weights in bf16, causal language modelling without padding; ours and PEFT's, eager and compiled.
Every side has its turn in an interleaved run of its mode; ratios are to PEFT's side of the same method and mode.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, LlamaConfig

import deltune
from deltune.studies.engine.timing import TimedModel, time_interleaved

from .frame import Piece, Report, carry_out, machine
from .memory import MIB, peak
from .prefix import served
from .report import show, write
from .rows import NOT_SLOWER, Row, Target, compared, missing

MODES = ("eager", "compiled")


@dataclass(frozen=True)
class Size:
    """A Llama shape and a batch."""

    config: Mapping[str, Any]
    rows: int
    tokens: int


SIZES = {
    "1b": Size(
        {
            "vocab_size": 32_000, "hidden_size": 2048, "num_hidden_layers": 22, "num_attention_heads": 32,
            "num_key_value_heads": 4, "intermediate_size": 5632, "max_position_embeddings": 2048,
        },
        rows=8, tokens=512,
    ),
    "tiny": Size(
        {
            "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 64,
        },
        rows=2, tokens=8,
    ),
}  # fmt: skip

METHODS: dict[str, Callable[[], Any] | None] = {
    "full": None,
    "lora(rank=8)": lambda: _config("LoraConfig", r=8, lora_alpha=8),
    "prefix(length=16)": lambda: _config("PrefixTuningConfig", num_virtual_tokens=16),
    "layernorm": lambda: _config("LNTuningConfig"),
    "parallel_adapter(rank=16)": None,
    "mam(length=16, rank=16)": None,
}
"""Our expression -> PEFT's configuration, None where PEFT has nothing like it; of `full` both are the bare model."""


def _config(kind: str, **options: Any) -> Any:
    import peft

    return getattr(peft, kind)(task_type="CAUSAL_LM", **options)


def build(size: Size, device: str, compiled: bool, side: str, method: str) -> TimedModel | None:
    """A side with a model of its own; None where PEFT has no such method."""
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**size.config, use_cache=False), dtype=torch.bfloat16)
        ids = torch.randint(0, size.config["vocab_size"], (size.rows, size.tokens))
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
    if compiled:
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


def alone(size: Size, device: str, compiled: bool, side: str, method: str) -> tuple[int, int] | None:
    """Peak bytes and kernels of a step of one side with nothing else on the device; None where PEFT cannot."""
    turn = build(size, device, compiled, side, method)
    if turn is None:
        return None
    step = synchronised(turn.step, device)
    step()  # compiles, and makes the optimiser's state
    return top(step, device), kernels(step, device)


def measure(size: Size, device: str, mode: str, method: str, rounds: int) -> list[Row]:
    """Ours and PEFT's side by side: two models in memory at a time."""
    torch.compiler.reset()  # after some models of one class dynamo would compile no more
    compiled, rows, facts, steps = mode == "compiled", [], {}, {}
    for side in ("ours",) if method == "full" else ("ours", "theirs"):
        gc.collect()
        result = alone(size, device, compiled, side, method)
        if result is not None:
            facts[side] = result
    for side in facts:
        turn = build(size, device, compiled, side, method)
        assert turn is not None
        steps[side] = synchronised(turn.step, device)
    if apart := method.startswith("prefix") and not compiled:
        steps["merged"] = partial(served, steps["ours"], "merged")
    seconds = time_interleaved(steps, rounds, warm=3)
    for side, (bytes_at_peak, launched) in facts.items():
        name = f"{'' if side == 'ours' else 'PEFT’s '}{method}, {mode}"
        middle = statistics.median(seconds[side])
        rows.append(Row(f"{name}: step", 1000 * middle, unit="ms"))
        rows.append(Row(f"{name}: tokens a second", size.rows * size.tokens / middle, unit=""))
        rows.append(Row(f"{name}: peak memory", bytes_at_peak / MIB, unit="MiB"))
        rows.append(Row(f"{name}: kernels a step", launched, unit=""))
    if "theirs" in facts:
        rows.append(compared(f"{method}, {mode}: step / PEFT's", seconds["ours"], seconds["theirs"], NOT_SLOWER))
        share = facts["ours"][0] / facts["theirs"][0]
        rows.append(Row(f"{method}, {mode}: peak memory / PEFT's", share, Target(1.0)))
    if apart:
        rows.append(compared(f"{method}, {mode}: step, merged / joined", seconds["merged"], seconds["ours"]))
    if "theirs" not in facts and method != "full":
        rows.append(missing(f"{method}, {mode}: step / PEFT's", "PEFT has no such method"))
    return rows


def pieces(size: Size, device: str, rounds: int) -> list[Piece]:
    return [
        Piece(f"gpu: {method}, {mode}", lambda m=mode, x=method: measure(size, device, m, x, rounds), 30.0)  # type: ignore[misc]
        for mode in MODES
        for method in METHODS
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SIZES, default="1b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--output", type=Path, default=Path("build/bench-gpu.json"))
    parser.add_argument("--write", type=Path, metavar="PAGE", help="measure nothing, fill the tables of a page")
    arguments = parser.parse_args()
    if arguments.write is not None:
        write(arguments.write, Report.read(arguments.output), "gpu")
        return
    if arguments.device != "cpu" and not torch.accelerator.is_available():
        raise SystemExit("no accelerator here; try the code by: python -m benchmarks.gpu --shape tiny --device cpu")
    todo = pieces(SIZES[arguments.shape], arguments.device, arguments.rounds)
    report = Report.begin(arguments.output, machine(torch.get_num_threads()), todo)
    console = Console(stderr=True)
    carry_out(todo, report, lambda piece: console.print(piece.name))
    show(report.all_rows())


if __name__ == "__main__":
    main()
