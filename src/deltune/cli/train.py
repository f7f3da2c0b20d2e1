"""`deltune train`: the fields of a spec as options, over those of a file; metric_options stands in files alone."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import DeltuneError
from ..filesystem import user_path
from . import launching
from .output import Json, Quiet, console, fast_imports, log_to_stderr


def train(
    file: Annotated[Path | None, typer.Argument(metavar="[RUN.yaml]", help="A spec; options override it.")] = None,
    model: Annotated[str | None, typer.Option(help="Hub id, folder or minilm.")] = None,
    data: Annotated[str | None, typer.Option(help="Folder with train, validation, test files, or a hub id.")] = None,
    task: Annotated[str | None, typer.Option(help="A known task (with --data-root), or with --data its kind.")] = None,
    data_root: Annotated[Path | None, typer.Option(help="Folder with the folders of known tasks.")] = None,
    method: Annotated[str | None, typer.Option(help='Such as "prefix(length=16) + layernorm".')] = None,
    output: Annotated[Path | None, typer.Option(help="Folder of the run.")] = None,
    head: Annotated[str | None, typer.Option(help="train (default) or freeze the task head.")] = None,
    answer: Annotated[str | None, typer.Option(help="By a head (default), or in words of a language model.")] = None,
    words: Annotated[str | None, typer.Option(help="Of labels: label=word,… [the task's, or the labels].")] = None,
    columns: Annotated[
        str | None, typer.Option(help="Columns of text, (pair,) label: a,b,c or text=a,label=b [from meta.json].")
    ] = None,
    labels: Annotated[str | None, typer.Option(help="Label names in the order of their ids: a,b,c.")] = None,
    max_train_rows: Annotated[int | None, typer.Option(help="Train on a sample of that many rows.")] = None,
    protocol: Annotated[
        str | None, typer.Option(help="A paper's values for what is not given: ln_nlu, uv_glue, ap, …")
    ] = None,
    validation_rows: Annotated[int | None, typer.Option(help="Validate on a sample of that many rows.")] = None,
    test_rows: Annotated[int | None, typer.Option(help="Score on a sample of that many test rows.")] = None,
    relabel: Annotated[str | None, typer.Option(help="New names for labels: a=x,b=x,c=y.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the training rows, at most [3].")] = None,
    steps: Annotated[int | None, typer.Option(help="Of the optimiser, in place of epochs.")] = None,
    validate_every: Annotated[int | None, typer.Option(help="Steps [each epoch].")] = None,
    lr: Annotated[
        float | None,
        typer.Option(help="Learning rate [full 5e-5; layernorm, prefix 1e-2; prompt 3e-2; others 1e-3; a sum: least]."),
    ] = None,
    batch_size: Annotated[int | None, typer.Option(help="Rows a step, over all devices [32].")] = None,
    batch_tokens: Annotated[int | None, typer.Option(help="Tokens a step, instead of --batch-size.")] = None,
    device_batch_size: Annotated[
        int | None, typer.Option(help="Rows at a time on one device, accumulated up to --batch-size [all].")
    ] = None,
    max_length: Annotated[int | None, typer.Option(help="Tokens a row; longer texts are cut [128].")] = None,
    target_length: Annotated[int | None, typer.Option(help="Tokens of an answer, at most [64].")] = None,
    beams: Annotated[int | None, typer.Option(help="Of generation [1].")] = None,
    template: Annotated[
        str | None, typer.Option(help='What is said to a model that answers in words: "{source}".')
    ] = None,
    source_language: Annotated[str | None, typer.Option(help="For a multilingual tokenizer: en [the task's].")] = None,
    target_language: Annotated[str | None, typer.Option(help="The same of targets and answers: ro.")] = None,
    max_generated: Annotated[int | None, typer.Option(help="Tokens of a generated answer [target length].")] = None,
    min_target_length: Annotated[int | None, typer.Option(help="Tokens of a generated answer, at least [0].")] = None,
    no_repeat_ngram: Annotated[int | None, typer.Option(help="No n tokens in a row twice in an answer [0].")] = None,
    length_penalty: Annotated[float | None, typer.Option(help="Of beams: above 0 longer ones win [1].")] = None,
    seed: Annotated[int | None, typer.Option(help="Of initial values, order and dropout [0].")] = None,
    seeds: Annotated[str | None, typer.Option(help="A run of each, and their aggregate: 0,1,2.")] = None,
    aggregate: Annotated[str | None, typer.Option(help="Of several seeds: mean (default) or median.")] = None,
    search: Annotated[
        list[str] | None, typer.Option(help="Repeatable FIELD=VALUE, in order of priority: lr=1e-2 lr=1e-3.")
    ] = None,
    patience: Annotated[
        int | None, typer.Option(help="Stop after that many validations without a better one [never].")
    ] = None,
    schedule: Annotated[str | None, typer.Option(help="linear (default), constant, cosine or polynomial.")] = None,
    warmup: Annotated[float | None, typer.Option(help="Share of all steps if below 1, else steps [0].")] = None,
    weight_decay: Annotated[float | None, typer.Option(help="Of AdamW [0].")] = None,
    clip: Annotated[float | None, typer.Option(help="Greatest norm of the gradient; 0: no limit [1].")] = None,
    adam_betas: Annotated[str | None, typer.Option(help="Of AdamW [0.9,0.999].")] = None,
    adam_epsilon: Annotated[float | None, typer.Option(help="Of AdamW [1e-8].")] = None,
    precision: Annotated[
        str | None, typer.Option(help="fp32 (default), bf16, or auto: bf16 where the device has it.")
    ] = None,
    metric: Annotated[
        str | None, typer.Option(help="Chooses the best epoch: loss or a metric [the task's first].")
    ] = None,
    metrics: Annotated[str | None, typer.Option(help="What is measured: a,b,c [the task's].")] = None,
    label_smoothing: Annotated[float | None, typer.Option(help="Share of every label spread over all [0].")] = None,
    report_to: Annotated[str | None, typer.Option(help="tensorboard, wandb, mlflow.")] = None,
    trunk_dropout: Annotated[
        str | None, typer.Option(help="on (default); off: layers below everything trained run without, once for a row.")
    ] = None,
    trunk_cache: Annotated[
        float | None, typer.Option(help="GiB on the disk for what these layers give; 0: run them in every pass [8].")
    ] = None,
    devices: Annotated[
        str, typer.Option(help="auto (an accelerator where there is one), cpu, cuda, cuda:1, mps, or how many.")
    ] = "auto",
    launch: Annotated[int | None, typer.Option(help="In that many processes of this machine, a device each.")] = None,
    sharding: Annotated[
        str | None, typer.Option(help="none: each process has the model [none]; fsdp: each has a share of it.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Discard the run in the folder and start anew.")] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Tune a method on labelled text and keep the best delta; run again after a kill, it goes on where it was."""
    given = {
        "model": model, "data": data, "task": task, "data_root": None if data_root is None else str(data_root),
        "target_length": target_length, "beams": beams, "template": template, "metrics": metrics, "method": method,
        "head": head, "answer": answer, "words": words, "columns": columns, "labels": labels, "epochs": epochs,
        "lr": lr, "max_train_rows": max_train_rows, "batch_size": batch_size, "batch_tokens": batch_tokens,
        "device_batch_size": device_batch_size, "max_length": max_length, "seed": seed, "patience": patience,
        "schedule": schedule, "warmup": warmup, "weight_decay": weight_decay, "clip": clip, "precision": precision,
        "metric": metric, "report_to": report_to, "protocol": protocol, "validation_rows": validation_rows,
        "steps": steps, "validate_every": validate_every, "max_generated": max_generated, "seeds": seeds,
        "min_target_length": min_target_length, "no_repeat_ngram": no_repeat_ngram, "length_penalty": length_penalty,
        "aggregate": aggregate, "search": _searched(search), "label_smoothing": label_smoothing,
        "test_rows": test_rows, "relabel": relabel, "adam_betas": adam_betas, "adam_epsilon": adam_epsilon,
        "source_language": source_language, "target_language": target_language,
        "trunk_dropout": trunk_dropout, "trunk_cache": trunk_cache,
    }  # fmt: skip
    with fast_imports():
        from ..training import config, presets
        from . import formatting

    if devices.isdigit():
        devices, launch = "auto", launch or int(devices)
    if (code := launching.launch_if_requested(launch)) is not None:
        raise typer.Exit(code)
    values = {} if file is None else config.read_values(file)
    there = values.pop("output", None)
    folder = output if there is None or output is not None else user_path(there, "output")
    spec = config.RunSpec(**presets.merge_values(values, {name: v for name, v in given.items() if v is not None}))
    if folder is None:
        raise DeltuneError("--output is missing: the folder of the run")
    quiet = quiet or not launching.is_main_process()
    with log_to_stderr(quiet):
        with fast_imports():
            from ..training import interrupts
            from ..training import train as training

        interrupts.watch_interrupts()

        try:
            outcome = training.train(
                spec,
                folder,
                resume=not fresh,
                progress=not quiet,
                devices=devices,
                sharded=launching.sharding_mode(sharding),
            )
        except KeyboardInterrupt:
            if launching.is_main_process():
                print(f"stopped; run the same command again and {folder} goes on where it was", file=sys.stderr)
            raise typer.Exit(130) from None
    if launching.is_main_process():
        console.print_json(data=outcome) if as_json else console.print(formatting.run_table(spec, outcome, str(folder)))


def _searched(given: list[str] | None) -> dict[str, list[Any]] | None:
    """The values to try, by field."""
    found: dict[str, list[Any]] = {}
    for item in given or ():
        field, sign, value = item.partition("=")
        if not sign or not field.strip():
            raise DeltuneError(f"--search {item}: give FIELD=VALUE, such as lr=1e-3")
        found.setdefault(field.strip().replace("-", "_"), []).append(value)
    return found or None
