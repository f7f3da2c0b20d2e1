"""`deltune probe`: what a linear model makes of the features of a model as it is, before anything is tuned."""

from __future__ import annotations

from typing import Annotated

import typer

from .options import Imports
from .output import (
    ColumnsOption,
    DataRootOption,
    Json,
    ModelArgument,
    Quiet,
    SchemeOption,
    Seed,
    SeparatorOption,
    TaskOption,
    console,
    log_to_stderr,
)
from .threads import free_cores


def probe(
    model: ModelArgument,
    data: Annotated[
        str | None, typer.Argument(metavar="[DATA]", help="Folder, file or hub id; or give a known --task.")
    ] = None,
    task: TaskOption = None,
    data_root: DataRootOption = None,
    columns: ColumnsOption = None,
    label_separator: SeparatorOption = None,
    tag_scheme: SchemeOption = None,
    pooling: Annotated[
        str | None,
        typer.Option(help="What a head reads: mean, first or last hidden state, or model, the class's pooler."),
    ] = None,
    max_train_rows: Annotated[int | None, typer.Option(min=1, help="Train on a sample of that many rows.")] = None,
    max_length: Annotated[int, typer.Option(min=2, help="Tokens of a row; longer texts are cut.")] = 128,
    seed: Seed = 0,
    quiet: Quiet = False,
    imports: Imports = None,
    as_json: Json = False,
) -> None:
    """Score a linear probe of a frozen model. It is a logistic regression on its features, the floor of tuning."""
    from . import formatting

    with log_to_stderr(quiet):
        with free_cores():
            from ..train.config import RunConfig
            from ..train.probe import probe_model

        values = {
            "data": data, "task": task, "data_root": data_root, "columns": columns, "pooling": pooling,
            "label_separator": label_separator, "tag_scheme": tag_scheme, "max_train_rows": max_train_rows,
        }  # fmt: skip
        options = {name: value for name, value in values.items() if value is not None}
        record = probe_model(
            RunConfig.from_flat(model=model, method="head", max_length=max_length, seed=seed, **options)
        )
    if as_json:
        console.print_json(data=record.model_dump())
        return
    console.print(f"a linear model of the frozen features ({record.features}), C={record.C:g} by validation")
    console.print(formatting.score_table(record.scores))
