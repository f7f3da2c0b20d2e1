"""Time of a training step and activations kept for the backward pass, method by method, as shares of full tuning.

    python benchmarks/steps.py [--rows 8] [--tokens 64] [--repeats 7] [--threads 1] [--json FILE] [METHOD ...]

The MiniLM of the package, classification with two labels, AdamW, no padding. Methods take turns, so that a noisy
machine is noisy to all of them; medians are reported (deltune.engine.timing).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from deltune.engine.timing import BARE, turns

FULL = "full"
METHODS = (
    "prompt(length=20)", "lora(rank=8)", "prefix(length=16)", "bitfit", "mam", "layernorm", "adapter(rank=16)",
    "parallel_adapter(rank=16)", "head",
)  # fmt: skip


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
    methods = {method: method for method in (FULL, *given.methods)}
    found = turns("minilm", methods, given.rows, given.tokens, given.repeats, whats=("step",))
    rows = [
        {
            "method": method,
            "percent": facts["percent"],
            "step_percent_of_full": 100 * facts["step"] / found[FULL]["step"],
            "seconds": facts["step"],
            "kept_mib": facts["kept"] / 2**20,
        }
        for method, facts in found.items()
        if method != BARE
    ]
    rows.sort(key=lambda row: -row["step_percent_of_full"])
    table = Table("method", "trained, % of the model", "step, % of full", "kept activations, MiB")
    for row in rows:
        table.add_row(row["method"], *(f"{row[k]:.3g}" for k in ("percent", "step_percent_of_full", "kept_mib")))
    Console().print(table)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
