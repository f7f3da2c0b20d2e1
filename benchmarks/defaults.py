"""Every named method with its defaults on six small tasks, beside the majority class and other learning rates.

    python -m benchmarks.defaults --models minilm,DIR [--factors 1,3,10] [--data-root ../shared/data]
    python -m benchmarks.defaults --write docs/defaults.md

The factor 1 is a run without any option of training; other factors multiply its learning rate. Cells that the file has
are not measured again, so that an interrupted measurement goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

import deltune
from deltune.cli.quickstart import TICKETS
from deltune.errors import DeltuneError
from deltune.methods.registry import REGISTRY
from deltune.training.advice import advice, read_finished
from deltune.training.config import RunConfig
from deltune.training.run_dir import RunDir
from deltune.training.task_setup import ModelCache
from deltune.training.train import train

from .frame import commit, machine

ROOT = Path(__file__).parents[1]
TASKS = ("tickets", "cb", "conll04", "sick", "sst2", "rte")
ROWS = {"max_train_rows": 1000, "validation_rows": 200, "test_rows": 500}
DISTILLED_LENGTH = 64


def values_of(model: str, task: str, method: str, root: Path, rows: Mapping[str, int]) -> dict[str, Any]:
    place: dict[str, Any] = {"data": str(TICKETS)} if task == "tickets" else {"task": task, "data_root": str(root)}
    length = {} if model == "minilm" else {"max_length": DISTILLED_LENGTH}
    return {"model": model, "method": method, **place, **({} if task == "tickets" else rows), **length}


def measure(values: Mapping[str, Any], cache: ModelCache) -> dict[str, Any]:
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        try:
            metrics = train(RunConfig.from_flat(**values), Path(folder) / "run", progress=False, cache=cache, report=False)
        except DeltuneError as error:
            return {"error": str(error), "seconds": round(time.perf_counter() - began, 2)}
        finished = read_finished(RunDir(Path(folder) / "run"))
        name = metrics.best.metric
        return {
            "metric": name,
            "test": metrics.test[name],
            "loss": metrics.test["loss"],
            "validation": metrics.best.value,
            "majority": finished.analysis.baseline or 0.0,
            "lr": finished.best_config.optim.rate,
            "steps": max(line["step"] for line in finished.log),
            "trained": metrics.count["method"],
            "advice": advice(finished),
            "seconds": round(time.perf_counter() - began, 2),
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.defaults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="minilm")
    parser.add_argument("--methods", default=",".join(REGISTRY))
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--factors", default="1,3,10")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--data-root", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "defaults.json")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    extra = {name: json.loads(value) for name, value in (item.split("=") for item in arguments.set)}
    content = json.loads(arguments.output.read_text()) if arguments.output.is_file() else {"cells": {}}
    content["machine"] = machine(1)
    cells = content["cells"]
    for model in arguments.models.split(","):
        for factor in map(float, arguments.factors.split(",")):
            for task in arguments.tasks.split(","):
                cache = ModelCache()
                for method in arguments.methods.split(","):
                    key = "|".join([Path(model).name, task, method, f"{factor:g}", *arguments.set])
                    if key in cells:
                        continue
                    expression = repr(REGISTRY[method].plain)
                    values = values_of(model, task, expression, arguments.data_root, ROWS) | extra
                    values["lr"] = float(f"{deltune.methods_rate(method) * factor:.3g}") if False else float(
                        f"{REGISTRY[method].rate * factor:.3g}"
                    )
                    cells[key] = {**measure(values, cache), "commit": commit()}
                    print(key, {k: v for k, v in cells[key].items() if k in ("test", "majority", "validation", "lr", "steps", "seconds", "error")}, file=sys.stderr, flush=True)
                    fresh = arguments.output.with_suffix(".fresh")
                    fresh.parent.mkdir(parents=True, exist_ok=True)
                    fresh.write_text(json.dumps(content, indent=1) + "\n")
                    os.replace(fresh, arguments.output)


if __name__ == "__main__":
    main()
