"""Time of a training step and activations kept for the backward pass, method by method, as shares of full tuning.

    python benchmarks/steps.py [--rows 8] [--tokens 64] [--repeats 7] [--threads 1] [--json FILE] [METHOD ...]

The MiniLM of the package, classification with two labels, AdamW, no padding. Methods take turns, so that a noisy
machine is noisy to all of them; medians are reported.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import deltune
from deltune.models import load_model

METHODS = (
    "full", "prompt(length=20)", "lora(rank=8)", "prefix(length=16)", "bitfit", "mam", "layernorm", "adapter(rank=16)",
    "parallel_adapter(rank=16)", "head",
)  # fmt: skip


class Case:
    """One method on a model of its own."""

    def __init__(self, method: str, rows: int, tokens: int) -> None:
        torch.manual_seed(0)
        self.method = method
        self.model = load_model("minilm", "classification", labels=("no", "yes")).train()
        self.tuned = deltune.attach(self.model, method)
        self.optimiser = torch.optim.AdamW(self.tuned.parameters(), lr=1e-4)
        self.batch = {
            "input_ids": torch.randint(1000, 30_000, (rows, tokens)),
            "attention_mask": torch.ones(rows, tokens, dtype=torch.long),
            "labels": torch.randint(0, 2, (rows,)),
        }
        self.seconds: list[float] = []

    def step(self) -> None:
        self.model(**self.batch).loss.backward()
        self.optimiser.step()
        self.optimiser.zero_grad()

    def time(self) -> None:
        began = time.perf_counter()
        self.step()
        self.seconds.append(time.perf_counter() - began)

    def kept(self) -> int:
        """Bytes that one forward pass keeps for its backward pass, parameters apart."""
        parameters = {p.untyped_storage().data_ptr() for p in self.model.parameters()}
        storages: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in parameters:
                storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = self.model(**self.batch).loss
        del loss
        return sum(storages.values())

    def facts(self, full: float) -> dict[str, float | str]:
        return {
            "method": self.method,
            "percent": self.tuned.count().percent,
            "step_percent_of_full": 100 * statistics.median(self.seconds) / full,
            "seconds": statistics.median(self.seconds),
            "kept_mib": self.kept() / 2**20,
        }


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("methods", nargs="*", default=list(METHODS))
    asked.add_argument("--rows", type=int, default=8)
    asked.add_argument("--tokens", type=int, default=64)
    asked.add_argument("--repeats", type=int, default=7)
    asked.add_argument("--threads", type=int, default=1)
    asked.add_argument("--json", type=Path)
    given = asked.parse_args()
    torch.set_num_threads(given.threads)
    cases = [Case(method, given.rows, given.tokens) for method in dict.fromkeys(["full", *given.methods])]
    for case in cases:
        case.step()
    for _ in range(given.repeats):
        for case in cases:
            case.time()
    full = statistics.median(cases[0].seconds)
    rows = sorted((case.facts(full) for case in cases), key=lambda row: -float(row["step_percent_of_full"]))
    table = Table("method", "trained, % of the model", "step, % of full", "kept activations, MiB")
    for row in rows:
        table.add_row(str(row["method"]), *(f"{row[k]:.3g}" for k in ("percent", "step_percent_of_full", "kept_mib")))
    Console().print(table)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
