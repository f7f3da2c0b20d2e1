"""Every named method with its defaults on six small tasks, beside the majority class and the best known rate.

    python -m benchmarks.defaults [--models minilm,../shared/models/minilm-d128] [--factors 1,0.3,3] [--methods a,b]
    python -m benchmarks.defaults --write docs/train/choose.md

Factor 1 is a run without any option of training; another factor multiplies the rate that such a run takes. What the
file has is not measured again, so that an interrupted measurement goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from deltune.cli.use import TICKETS
from deltune.errors import DeltuneError
from deltune.methods.registry import REGISTRY
from deltune.train.config import RunConfig
from deltune.train.report.advice import advice, read_finished
from deltune.train.run import train
from deltune.train.run_folder import RunFolder
from deltune.train.setup import ModelCache

from .frame import commit, machine

ROOT = Path(__file__).parents[1]
TASKS = ("tickets", "cb", "sick", "sst2", "rte", "conll04")
ROWS = {"max_train_rows": 480, "validation_rows": 100, "test_rows": 250}
"""Of the tasks, at most; the tickets are whole."""
LENGTHS = {"minilm-d128": 64, "minilm-d192": 64, "minilm-d256": 64}
"""The distilled models know 64 positions."""
NOT_MEASURED = "–"


@dataclass(frozen=True)
class Result:
    """What a run came to.

    Attributes:
        metric: The first metric of the task.
        test: Its value on the test rows.
        low: The lower end of its 95 % interval.
        validation: Its best value on the validation rows.
        majority: The share of the largest class among the test rows; 0 for entities.
        lr: The learning rate.
        steps: How many steps were trained.
        notes: What the run says at its end.
        seconds: How long it took, in whatever company.
        commit: The code.
    """

    metric: str
    test: float
    low: float
    validation: float
    majority: float
    lr: float
    steps: int
    notes: list[str]
    seconds: float
    commit: str | None


def values_of(model: str, task: str, method: str, root: Path) -> dict[str, Any]:
    """The fields of a run without any of training."""
    place: dict[str, Any] = (
        {"data": str(TICKETS)} if task == "tickets" else {"task": task, "data_root": str(root)} | ROWS
    )
    length = {"max_length": LENGTHS[Path(model).name]} if Path(model).name in LENGTHS else {}
    return {"model": model, "method": repr(REGISTRY[method].plain), **place, **length}


def measure(values: Mapping[str, Any], cache: ModelCache) -> Result:
    """Train a run in a folder of its own, and forget it."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        metrics = train(RunConfig.from_flat(**values), Path(folder) / "run", progress=False, cache=cache, report=False)
        finished = read_finished(RunFolder(Path(folder) / "run"))
        name = str(metrics.best.metric)
        return Result(
            metric=name,
            test=metrics.test[name],
            low=metrics.intervals["test"].get(name, [metrics.test[name]])[0],
            validation=float(metrics.best.value or 0.0),
            majority=finished.analysis.baseline or 0.0,
            lr=finished.config.optim.rate,
            steps=max(line["step"] for line in finished.log),
            notes=advice(finished),
            seconds=round(time.perf_counter() - began, 1),
            commit=commit(),
        )


class Results:
    """What was measured, in one file: by model, task, method and factor."""

    def __init__(self, path: Path) -> None:
        self.path = path
        content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"cells": {}, "machine": {}}
        self.machine: dict[str, Any] = content["machine"]
        self.cells = {key: Result(**values) for key, values in content["cells"].items()}

    @staticmethod
    def key(model: str, task: str, method: str, factor: float) -> str:
        return f"{Path(model).name} {task} {method} {factor:g}"

    def write(self) -> None:
        """Whole or not at all."""
        content = {"machine": self.machine, "cells": {key: asdict(result) for key, result in self.cells.items()}}
        fresh = self.path.with_suffix(".fresh")
        fresh.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(fresh, self.path)

    def of(self, model: str, task: str, method: str) -> dict[float, Result]:
        """Factor -> result."""
        start = f"{model} {task} {method} "
        return {float(key[len(start) :]): result for key, result in self.cells.items() if key.startswith(start)}


def best_known(results: Mapping[float, Result]) -> Result:
    """Of the rates that were tried the one that validates best; of equal ones the nearest to the default."""
    return min(results.items(), key=lambda item: (-item[1].validation, abs(item[0] - 1)))[1]


def table(results: Results, model: str) -> str:
    """A row for each method: for each task the default, and behind it the best known where that is another rate."""
    lines = [
        f"| `{model}` | " + " | ".join(TASKS) + " |",
        "|---" * (len(TASKS) + 1) + "|",
        "| majority class | " + " | ".join(_majority(results, model, task) for task in TASKS) + " |",
    ]
    lines += [
        f"| `{method}` | " + " | ".join(_cell(results.of(model, task, method)) for task in TASKS) + " |"
        for method in REGISTRY
    ]
    return "\n".join(lines) + "\n"


def _majority(results: Results, model: str, task: str) -> str:
    shares = [one.majority for method in REGISTRY for one in results.of(model, task, method).values()]
    return f".{shares[0] * 1000:03.0f}" if shares else NOT_MEASURED


def _cell(results: Mapping[float, Result]) -> str:
    if 1.0 not in results:
        return NOT_MEASURED
    default, best = results[1.0], best_known(results)
    text = f"{_score(default.test)}{'' if default.low > default.majority else '*'}"
    return text if best is default else f"{text} ({_score(best.test)} at {best.lr:.2g})"


def _score(value: float) -> str:
    return f"{value:.3f}".removeprefix("0") if value < 1 else "1"


def silent(results: Results) -> list[str]:
    """The defaults that do not clearly beat the majority class and say nothing at their end."""
    return [
        key for key, one in results.cells.items() if key.endswith(" 1") and one.low <= one.majority and not one.notes
    ]


def facts(results: Results) -> str:
    """What was measured where."""
    ones = results.cells.values()
    commits = ", ".join(sorted({str(one.commit) for one in ones}))
    known = ", ".join(f"{name} {value}" for name, value in results.machine.items() if value is not None)
    return f"{len(results.cells)} runs, commit {commits}; {known}.\n"


MARKS = re.compile(r"(<!-- bench: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def write(page: Path, results: Results) -> None:
    """Fill the marks `<!-- bench: defaults -->` and `<!-- bench: defaults_machine -->` of a page."""
    fills = {"defaults": table(results, "minilm"), "defaults_machine": facts(results)}  # the model that everybody has
    text = page.read_text(encoding="utf-8")
    page.write_text(
        MARKS.sub(lambda m: f"{m[1]}{fills[m[2]]}{m[3]}" if m[2] in fills else m[0], text), encoding="utf-8"
    )


def planned(
    models: Sequence[str], factors: Sequence[float], tasks: Sequence[str], methods: Sequence[str]
) -> Iterator[Any]:
    """Model, factor, task and method of every run."""
    return ((m, f, t, n) for m in models for f in factors for t in tasks for n in methods)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.defaults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="minilm")
    parser.add_argument("--methods", default=",".join(REGISTRY))
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--factors", default="1")
    parser.add_argument("--data-root", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "defaults.json")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="measure nothing, fill the tables of a page")
    arguments = parser.parse_args()
    results = Results(arguments.output)
    if arguments.write is not None:
        write(arguments.write, results)
        sys.exit("\n".join(["these say nothing at their end:", *lines]) if (lines := silent(results)) else 0)
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    results.machine = machine(1)
    names = (arguments.models, arguments.factors, arguments.tasks, arguments.methods)
    models, factors, tasks, methods = (text.split(",") for text in names)
    cache, last = ModelCache(), ""
    for model, factor, task, method in planned(models, [float(one) for one in factors], tasks, methods):
        key, default = results.key(model, task, method, factor), results.key(model, task, method, 1)
        if key in results.cells:
            continue
        if f"{model} {task}" != last:
            cache, last = ModelCache(), f"{model} {task}"
        values = values_of(model, task, method, arguments.data_root)
        if factor != 1:
            if default not in results.cells:
                raise SystemExit(f"{key}: measure the default first (--factors 1)")
            values["lr"] = float(f"{results.cells[default].lr * factor:.2g}")
        try:
            results.cells[key] = measure(values, cache)
        except DeltuneError as error:
            print(f"{key}: {error}", file=sys.stderr, flush=True)
            continue
        results.write()
        one = results.cells[key]
        print(f"{key}: {one.test:.3f} (majority {one.majority:.3f}) at {one.lr:g}, {one.seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
