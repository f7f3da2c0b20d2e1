"""AdapterHub's side, in an environment of its own: makes what it is told and takes a step of it when it is told.

Lines of JSON come in, a line goes out for each: {"shape": …} builds, {"step": NAME} takes a step, or two forward passes
with the bare model.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import adapters

from benchmarks.allocator import keep_memory
from benchmarks.shapes import Shape, batch, build
from deltune.studies.jobs.timed_model import TimedModel

FULL, BARE = "full", "bare"
CONFIGS: dict[str, Callable[[int], Any]] = {
    "lora(rank=8)": lambda width: adapters.LoRAConfig(r=8, alpha=8),
    "prefix(length=16)": lambda width: adapters.PrefixTuningConfig(prefix_length=16, flat=True),
    "adapter(style='pfeiffer', rank=16, bias=True)": lambda width: adapters.SeqBnConfig(reduction_factor=width / 16),
    "adapter(rank=16, bias=True)": lambda width: adapters.DoubleSeqBnConfig(reduction_factor=width / 16),
    "scaled_parallel_adapter(rank=16, bias=True)": lambda width: adapters.ParBnConfig(reduction_factor=width / 16),
    "prefix(length=16) + scaled_parallel_adapter(rank=16, bias=True)": lambda width: adapters.MAMConfig(
        adapters.PrefixTuningConfig(prefix_length=16, flat=True), adapters.ParBnConfig(reduction_factor=width / 16)
    ),
    "unipelt(length=10, rank=8, bottleneck=16)": lambda width: adapters.UniPELTConfig(
        adapters.PrefixTuningConfig(prefix_length=10, flat=True), adapters.SeqBnConfig(reduction_factor=width / 16)
    ),
    "ia3": lambda width: adapters.IA3Config(),
    "prompt(length=20)": lambda width: adapters.PromptTuningConfig(prompt_length=20),
}
"""Our expression -> their configuration of the same sizes, for a width. Their bottlenecks have biases in any case, but
for unipelt's, ours too."""


def make(shape: Shape) -> tuple[dict[str, TimedModel], list[str]]:
    """Full tuning, the bare model, every method on frozen weights in the same memory; and what AdapterHub cannot."""
    like = build(shape)
    whole = build(shape)
    turns = {
        FULL: TimedModel(whole, *batch(shape), list(whole.parameters())),
        BARE: TimedModel(build(shape, like).requires_grad_(False), *batch(shape), []),
    }
    cannot = []
    for method, config in CONFIGS.items():
        model: Any = build(shape, like)
        adapters.init(model)
        try:
            model.add_adapter("it", config=config(shape.width))
        except ValueError:  # not supported by this model
            cannot.append(method)
            continue
        model.train_adapter("it")
        turns[method] = TimedModel(model, *batch(shape), [p for p in model.parameters() if p.requires_grad])
    return turns, cannot


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    keep_memory()
    turns: dict[str, TimedModel] = {}
    for line in sys.stdin:
        request = json.loads(line)
        if "shape" in request:
            turns, cannot = make(Shape(**request["shape"]))
            print(json.dumps({"methods": list(turns), "cannot": cannot}), file=answers, flush=True)
        else:
            turn = turns[request["step"]]
            turn.forward_twice() if request["step"] == BARE else turn.step()
            print("{}", file=answers, flush=True)


if __name__ == "__main__":
    main()
