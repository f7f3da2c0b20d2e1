"""The command line. Facts go to standard output (with --json nothing else does), everything else to standard error."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from . import launching
from .errors import DeltuneError, unknown
from .notes import notes

app = typer.Typer(
    help="Tune a pretrained transformer by small deltas.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
out = Console(soft_wrap=True, highlight=False, markup=False)

ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help="Hub id, folder, config.json or minilm.")]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress bar and no notes.")]


@app.command()
def inspect(model: ModelArgument, as_json: Json = False) -> None:
    """Show what a model is made of, layer by layer, from its configuration alone."""
    from . import models, observe

    anatomy = observe.inspect(models.load_config(model))
    out.print_json(data=anatomy.as_dict()) if as_json else out.print(str(anatomy))


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="One method, in full.")] = None,
    as_json: Json = False,
) -> None:
    """List every method, or explain one: its formula, arguments, default learning rate, paper and an example."""
    from . import show

    facts = show.method_facts()
    if name is not None and name not in facts:
        raise DeltuneError(unknown("method", name, facts))
    if as_json:
        out.print_json(data=facts if name is None else facts[name])
    else:
        out.print(show.method_table(facts) if name is None else show.method_page(facts[name]))


@app.command()
def count(
    model: ModelArgument,
    method: Annotated[str, typer.Argument(metavar="METHOD", help='Such as "prefix(length=16) + layernorm".')],
    denominator: Annotated[
        str, typer.Option(help="model, no_pooler, no_embeddings, layers, untied or a number.")
    ] = "model",
    as_json: Json = False,
) -> None:
    """Count exactly what a method trains and keeps, from the model's configuration alone."""
    from . import counting, models
    from .catalogue import parse

    found = counting.count(models.load_config(model), parse(method), denominator)
    out.print_json(data=found.as_dict()) if as_json else out.print(str(found))


@app.command()
def fit(
    model: ModelArgument,
    method: Annotated[str, typer.Argument(metavar="METHOD", help='With ? for sizes: "prefix(length=?) + layernorm".')],
    budget: Annotated[str | None, typer.Option(help="A number of scalars, or a share such as 0.5%.")] = None,
    align: Annotated[str | None, typer.Option(help="Match the count of this method instead.")] = None,
    denominator: Annotated[str, typer.Option(help="What a share is a share of.")] = "model",
    weights: Annotated[str | None, typer.Option(help="Shares of the ? in order: 3,1 [equal].")] = None,
    as_json: Json = False,
) -> None:
    """Solve the sizes written as ? for a budget: never over it, with what is left."""
    from . import budget as budgets
    from . import models
    from .catalogue import parse

    if (budget is None) == (align is None):
        raise DeltuneError("give --budget or --align, one of them")
    wanted = parse(align) if align is not None else str(budget)
    try:
        shares = None if weights is None else [float(share) for share in weights.split(",")]
    except ValueError:
        raise DeltuneError(f"--weights {weights}: give numbers, such as 3,1") from None
    found = budgets.solve(models.load_config(model), method, wanted, denominator, shares)
    facts = {"method": repr(found.method), "count": found.count, "budget": found.budget, "left": found.left}
    told = f"{found.method!r}\n{found.count:,} scalars of {found.budget:,}, {found.left:,} left"
    out.print_json(data=facts) if as_json else out.print(told)


@app.command()
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
    precision: Annotated[
        str | None, typer.Option(help="fp32 (default), bf16, or auto: bf16 where the device has it.")
    ] = None,
    metric: Annotated[
        str | None, typer.Option(help="Chooses the best epoch: loss or a metric [the task's first].")
    ] = None,
    metrics: Annotated[str | None, typer.Option(help="What is measured: a,b,c [the task's].")] = None,
    label_smoothing: Annotated[float | None, typer.Option(help="Share of every label spread over all [0].")] = None,
    report_to: Annotated[str | None, typer.Option(help="tensorboard, wandb, mlflow.")] = None,
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
    }  # fmt: skip
    from . import protocols, show, specs

    if devices.isdigit():
        devices, launch = "auto", launch or int(devices)
    if (code := launching.launched(launch)) is not None:
        raise typer.Exit(code)
    values = {} if file is None else specs.read_values(file)
    folder = output or values.pop("output", None)
    values.pop("output", None)
    spec = specs.RunSpec(**protocols.over(values, {name: v for name, v in given.items() if v is not None}))
    if folder is None:
        raise DeltuneError("--output is missing: the folder of the run")
    quiet = quiet or not launching.speaks()
    with notes(quiet):
        from . import train as training

        try:
            outcome = training.train(
                spec, folder, resume=not fresh, progress=not quiet, devices=devices, sharded=launching.sharded(sharding)
            )
        except KeyboardInterrupt:
            if launching.speaks():
                print(f"stopped; run the same command again and {folder} goes on where it was", file=sys.stderr)
            raise typer.Exit(130) from None
    if launching.speaks():
        out.print_json(data=outcome) if as_json else out.print(show.run_table(spec, outcome, str(folder)))


def _searched(given: list[str] | None) -> dict[str, list[Any]] | None:
    """The values to try, by field."""
    found: dict[str, list[Any]] = {}
    for item in given or ():
        field, sign, value = item.partition("=")
        if not sign or not field.strip():
            raise DeltuneError(f"--search {item}: give FIELD=VALUE, such as lr=1e-3")
        found.setdefault(field.strip().replace("-", "_"), []).append(value)
    return found or None


@app.command()
def evaluate(
    run: RunArgument,
    data: Annotated[str | None, typer.Option(help="Other data with the same labels [the run's own].")] = None,
    split: Annotated[list[str] | None, typer.Option(help="Repeatable [validation and test].")] = None,
    output: Annotated[Path | None, typer.Option(help="Folder for predictions, SPLIT.jsonl each.")] = None,
    rescore: Annotated[bool, typer.Option("--rescore", help="From its prediction files, without the model.")] = False,
    metrics: Annotated[str | None, typer.Option(help="With --rescore: a,b,c [those of the run].")] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Score a run's delta again, on its own data or on other data; or its prediction files."""
    from . import show

    if rescore and (data or split or output):
        raise DeltuneError("--rescore reads the run's own prediction files: no --data, --split or --output with it")
    if metrics and not rescore:
        raise DeltuneError("--metrics is for --rescore; a run's own are in its spec")
    with notes(quiet):
        from . import evaluate as scoring

        if rescore:
            found = scoring.rescore(run, [name.strip() for name in (metrics or "").split(",") if name.strip()])
        else:
            found = scoring.evaluate(run, data, split, output, progress=not quiet)
    out.print_json(data=found) if as_json else out.print(show.score_table(found))


@app.command()
def predict(
    run: RunArgument,
    text: Annotated[list[str] | None, typer.Option(help="A text; repeatable.")] = None,
    pair: Annotated[list[str] | None, typer.Option(help="The pair of the text before it; repeatable.")] = None,
    file: Annotated[
        Path | None, typer.Option(help="Texts: .txt (one a line), or .jsonl, .csv, .parquet with the run's columns.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write JSON lines there instead of printing.")] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Predict texts: labels, tags, choices, answers or log-likelihoods, as the run was trained for."""
    from . import show

    if bool(text) == bool(file) or (pair and not text):
        raise DeltuneError("give either --text (with --pair where the run has pairs) or --file")
    if pair and len(pair) != len(text or ()):
        raise DeltuneError(f"{len(text or ())} --text and {len(pair)} --pair; give one --pair for each --text")
    with notes(quiet):
        from . import inputs
        from .evaluate import predicted

        rows = inputs.of_options(text or [], pair or []) if file is None else inputs.of_file(file, run)
        found = predicted(run, rows)
    if output is not None:
        inputs.write(output, found)
        print(f"{len(found)} predictions in {output}", file=sys.stderr)
    elif as_json:
        out.print_json(data=found)
    else:
        out.print(show.prediction_table(found))


@app.command()
def merge(
    run: RunArgument,
    to: Annotated[Path, typer.Option(help="A new folder for the plain transformers checkpoint.")],
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Fold a run's delta into the weights: a plain transformers checkpoint, where the method allows it."""
    with notes(quiet):
        from . import exporting

        target = exporting.merge(run, to)
    out.print_json(data={"to": str(target)}) if as_json else out.print(f"merged into {target}")


@app.command()
def export(
    run: RunArgument,
    to: Annotated[Path, typer.Option(help="A new folder.")],
    format: Annotated[str, typer.Option(help="peft.")] = "peft",
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Write a run's delta as another library's files, where that library can express it."""
    with notes(quiet):
        from . import exporting

        target = exporting.export(run, to, format)
    out.print_json(data={"to": str(target)}) if as_json else out.print(f"written for {format} into {target}")


@app.command("import")
def take_in(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder that PEFT or AdapterHub saved.")],
    model: Annotated[str, typer.Option(help="Its base model: hub id, folder or minilm.")],
    output: Annotated[Path, typer.Option(help="A new folder for the delta.")],
    kind: Annotated[
        str | None, typer.Option(help="classification, base, causal-lm or seq2seq-lm [what the folder says].")
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Turn a folder of PEFT or AdapterHub into a delta that deltune.load takes; refused where it has no translation."""
    with notes(quiet):
        from . import exporting

        handle = exporting.take_in(folder, model, output, kind)
    facts = {"method": repr(handle.method), "count": handle.count().method, "to": str(output)}
    out.print_json(data=facts) if as_json else out.print(f"{handle.method!r}\n{facts['count']:,} scalars in {output}")


@app.command()
def quickstart(
    text: Annotated[str | None, typer.Option(help="A sentence to classify at the end.")] = None,
    output: Annotated[Path, typer.Option(help="Folder for the two runs.")] = Path("runs/quickstart"),
) -> None:
    """The main job in about a minute, offline: MiniLM on support tickets, head alone against prefix + layernorm."""
    with notes(False):
        from .quickstart import SENTENCE, quickstart

        quickstart(text or SENTENCE, output)


def main() -> None:
    """The script: exit code 2 and a message on standard error for a mistake of the user, 130 after Ctrl-C."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # spinning threads slow each other down where cores are shared
    launching.follow()
    try:
        app(prog_name="deltune")
    except DeltuneError as error:
        if launching.speaks():
            print(f"deltune: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
