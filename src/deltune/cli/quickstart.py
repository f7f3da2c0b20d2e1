"""The quickstart, offline: MiniLM on the packaged support tickets, the head alone against prefix + layernorm."""

from __future__ import annotations

from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from ..methods.counting import count
from ..methods.registry import default_learning_rate
from ..models import load_config
from ..train.config import RunConfig
from ..train.inference import predict
from ..train.run import train
from ..train.run_folder import RunDir

MODEL = "minilm"
TICKETS = Path(__file__).parents[1] / "train" / "demo" / "tickets"
METHODS = ("head", "prefix(length=16) + layernorm")
EPOCHS, BATCH = 6, 8
SENTENCE = "I was charged twice for March, and I would like the second payment back."


def quickstart(text: str = SENTENCE, output: str | Path = "runs/quickstart") -> dict[str, RunDir]:
    """Train two methods, compare them, and classify a sentence; a run that is finished is used again."""
    console = Console(highlight=False, soft_wrap=True)
    console.print(
        "MiniLM-L6, a model of 22.7 million parameters, learns to sort support tickets into 8 kinds.\n"
        "Two runs of about a minute each where a core is free; beside other work they take longer."
    )
    runs = {}
    for number, (method, folder) in enumerate(zip(METHODS, ("head", "prefix_layernorm"), strict=True), start=1):
        config = RunConfig.from_flat(
            model=MODEL, data=str(TICKETS), method=method, epochs=EPOCHS, batch_size=BATCH, max_length=64,
            lr=default_learning_rate(method),  # docs/start/quickstart.md has the scores at this rate
        )  # fmt: skip
        run = runs[method] = RunDir(Path(output) / folder)
        share, what = count(load_config(MODEL), method), "the head alone, a new last layer that gives the kind"
        if share.method:
            what = f"{method}, {share.method:,} parameters ({share.percent:.2f} % of the model's), and the head"
        console.print(
            f"\nRun {number} of {len(METHODS)} trains {what}.\n"
            f"All other parameters stay as they are; the learning rate is {config.optim.rate:g}.",
            markup=False,
        )
        train(config, run.folder, resume=run.exists and not run.config.differences(config))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("method", no_wrap=True)
    for title in ("test accuracy", "trained parameters", "seconds"):
        table.add_column(title, justify="right", no_wrap=True)
    for method, run in runs.items():
        metrics = run.metrics
        accuracy, trained = f"{metrics.test['accuracy']:.3f}", f"{metrics.count['trained']:,}"
        table.add_row(method, accuracy, trained, f"{metrics.seconds:.0f}")
    console.print(table)
    best = max(runs.values(), key=lambda run: run.metrics.test["accuracy"])
    answer = predict(best.folder, [text])[0]
    console.print(f"{text!r}: {answer['label']} ({answer['scores'][answer['label']]:.0%})", markup=False)
    console.print(f"more about that run: open {best.report_file} in a browser", markup=False)
    console.print(f'another one: deltune predict {best.folder} --text "…"', markup=False)
    return runs
