"""`deltune choose`: which method and which learning rate fit a model, a data set and some limits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import DeltuneError
from .options import Imports, split_settings
from .output import (
    ColumnsOption,
    DataRootOption,
    Json,
    QuantizeOption,
    Quiet,
    TaskOption,
    console,
    log_to_stderr,
    resumable,
    wide_console,
)
from .threads import free_cores


def choose(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="The base model: hub id, folder or minilm.")],
    output: Annotated[Path, typer.Option(help="Where the result is written [a folder; the same command continues].")],
    data: Annotated[
        str | None, typer.Option(help="Folder with train, validation and test files, a file, or a hub id.")
    ] = None,
    task: TaskOption = None,
    data_root: DataRootOption = None,
    columns: ColumnsOption = None,
    budget: Annotated[str, typer.Option(help="Parameters that are trained, at most: a number, or 0.5%.")] = "0.5%",
    memory: Annotated[str | None, typer.Option(help="Most memory beyond the loaded model: 2GiB [no limit].")] = None,
    minutes: Annotated[float | None, typer.Option(min=0, help="How long it may take [no limit].")] = None,
    mergeable: Annotated[bool, typer.Option("--mergeable", help="Only what folds into the weights.")] = False,
    quantize: QuantizeOption = None,
    space: Annotated[
        str,
        typer.Option(
            help="lora: LoRA at queries and values or at all linears, at four rates; all: methods of every kind, at "
            "three; or a FILE of expressions, one a line, with ? for sizes. In our experiment, on five tasks, "
            "lora picked runs as good as what validates best of 13 methods, within 0.1 points in the mean."
        ),
    ] = "lora",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="Any option of the config; repeatable."),
    ] = None,
    imports: Imports = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Choose a method and a learning rate within limits, by successive halving, and train the winner.

    Candidates are judged on held-out training rows, the best two on validation under three seeds, and the winner once
    on test.
    """
    if context.args:
        raise DeltuneError(
            f"deltune choose has no option {context.args[0]}; the other options of deltune train are given by --set, "
            "such as --set epochs=5"
        )
    with log_to_stderr(quiet):
        from ..train.run_folder import RunFolder
        from . import formatting

        with free_cores(RunFolder(output)):
            from ..studies import choose as choose_method

        chosen = {"task": task, "data_root": data_root, "columns": columns, "quantize": quantize}
        options = {name: value for name, value in chosen.items() if value is not None}
        file = Path(space)
        expressions = [line.strip() for line in file.read_text().splitlines()] if file.is_file() else None
        with resumable(str(output)):
            choice = choose_method(
                model, data, output=output, budget=budget, memory=memory, minutes=minutes, mergeable=mergeable,
                space=space if expressions is None else [line for line in expressions if line and line[0] != "#"],
                **options, **split_settings(settings or [], "epochs=5"),
            )  # fmt: skip
    if as_json:
        console.print_json(data=choice.as_json())
        return
    scores = ", ".join(f"{name} {value:.4f}" for name, value in choice.test.items())
    wide_console().print(formatting.choice_table(choice.table.to_dict("records")))
    print(f"{choice.method} at {choice.learning_rate:g}: {f'test {scores}' if scores else 'there is no test split'}")
    print(f"{choice.advice}.\nTrain it again: {choice.command}\nIts run: {choice.run / 'best'}")
