"""Commands about a model and the methods for it, which need a configuration and no weights."""

from __future__ import annotations

from typing import Annotated

import typer

from ..errors import DeltuneError
from ..methods.other_names import unknown_term
from .options import Imports
from .output import BaseModelOption, Json, ModelArgument, QuantizeOption, console

Denominator = Annotated[
    str,
    typer.Option(help="What a share is a share of: model, no_pooler, no_embeddings, layers, untied or a number."),
]


def inspect(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="Hub id, folder, config.json, minilm; or a run, a delta or one of PEFT."),
    ],
    base: BaseModelOption = None,
    quantize: QuantizeOption = None,
    as_json: Json = False,
) -> None:
    """Show what a model is made of, layer by layer. Its configuration is read and no weights.

    Of a run or a delta it shows what is tuned on which model, and that model.
    """
    from .. import models
    from ..anatomy import inspection, quantized_storage

    delta = None
    if models.is_delta(model):
        from ..train.run_folder import open_run

        run = open_run(model, base)
        model = run.config.model.name
        delta = {"delta": str(run.folder), "method": run.method, "model": model, "labels": list(run.labels)}
    config = models.load_config(model)
    if quantize is None:
        anatomy = inspection.inspect(config)
    else:
        form = models.quantization_config(quantize, [models.NO_MODULE])
        anatomy = quantized_storage.quantized_storage(config, form).anatomy
    if as_json:
        console.print_json(data=anatomy.as_dict() if delta is None else {**delta, "anatomy": anatomy.as_dict()})
        return
    for name, value in (delta or {}).items():
        console.print(f"{name}: {', '.join(value) if isinstance(value, list) else value}", soft_wrap=True)
    console.print(str(anatomy))


def methods(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="One method, in full.")] = None,
    imports: Imports = None,
    as_json: Json = False,
) -> None:
    """List the methods, or explain one of them. NAME may also be a part of a method, such as Bottleneck."""
    from . import formatting

    facts, terms, bases = formatting.method_facts(), formatting.term_facts(), formatting.base_facts()
    if name is None:
        console.print_json(data=facts) if as_json else console.print(formatting.method_table(facts, terms))
    elif name in facts:
        console.print_json(data=facts[name]) if as_json else console.print(formatting.method_page(facts[name]))
    elif name in terms:
        console.print_json(data=terms[name]) if as_json else console.print(formatting.term_page(terms[name]))
    elif name in bases:
        console.print_json(data=bases[name]) if as_json else console.print(formatting.term_page(bases[name]))
    else:
        known = [*facts, *terms, *bases]
        raise DeltuneError(unknown_term("method", name, known))


def tasks(as_json: Json = False) -> None:
    """List the tasks that are known by name. Each has a kind, a folder below a data root, a hub id and metrics."""
    from . import formatting

    facts = formatting.known_tasks()
    console.print_json(data=facts) if as_json else console.print(formatting.task_table(facts))


def count(
    model: ModelArgument,
    method: Annotated[str, typer.Argument(metavar="METHOD", help='Such as "prefix(length=16) + layernorm".')],
    denominator: Denominator = "model",
    quantize: QuantizeOption = None,
    step_memory: Annotated[
        bool, typer.Option("--step-memory", help="Show where the memory of a step of training goes.")
    ] = False,
    batch_size: Annotated[
        int, typer.Option(help="Rows of a step, over all devices [one here; of --step-memory].")
    ] = 32,
    max_length: Annotated[int, typer.Option(help="Tokens of a row; longer texts are cut [of --step-memory].")] = 128,
    precision: Annotated[
        str, typer.Option(help="fp32, or bf16 by autocast, with fp32 weights [of --step-memory].")
    ] = "fp32",
    optimizer: Annotated[
        str, typer.Option(help="adamw, or by bitsandbytes adamw_8bit or paged_adamw_8bit [of --step-memory].")
    ] = "adamw",
    activation_checkpointing: Annotated[
        str, typer.Option(help="Compute activations again: off, half, on or cpu [of --step-memory, without cpu].")
    ] = "off",
    imports: Imports = None,
    as_json: Json = False,
) -> None:
    """Count exactly what a method trains on a model. The model's configuration is read and no weights."""
    from .. import models
    from ..methods import counting
    from ..methods.registry import parse

    config, form = models.load_config(model), None
    if quantize is not None:
        form = models.quantization_config(quantize, [models.NO_MODULE])
    result = counting.count(config, parse(method), denominator, quantization_config=form)
    facts, text = result.as_dict(), str(result)
    if step_memory:
        from ..runtime import step_memory as memory

        of_step = memory.step_memory(
            config, parse(method), batch_size, max_length, precision, optimizer, activation_checkpointing, form
        )
        facts["memory"] = of_step.as_dict()
        text += f"\n\n{of_step}"
    console.print_json(data=facts) if as_json else console.print(text)


def fit(
    model: ModelArgument,
    method: Annotated[str, typer.Argument(metavar="METHOD", help='With ? for sizes: "prefix(length=?) + layernorm".')],
    budget: Annotated[str | None, typer.Option(help="Parameters that are trained, at most: a number, or 0.5%.")] = None,
    align: Annotated[str | None, typer.Option(help="Match the count of this method instead.")] = None,
    denominator: Denominator = "model",
    weights: Annotated[str | None, typer.Option(help="Shares of the ? in order: 3,1 [equal].")] = None,
    imports: Imports = None,
    as_json: Json = False,
) -> None:
    """Solve the sizes written as ? in a method for a budget. The result is never over it."""
    from .. import models
    from ..methods import budget as budgets
    from ..methods.registry import parse

    if (budget is None) == (align is None):
        raise DeltuneError("give --budget or --align, one of them")
    target = parse(align) if align is not None else str(budget)
    try:
        shares = None if weights is None else [float(share) for share in weights.split(",")]
    except ValueError:
        raise DeltuneError(f"--weights {weights}: give numbers, such as 3,1") from None
    solution = budgets.solve(models.load_config(model), method, target, denominator, shares)
    facts = {"method": repr(solution.method), "count": solution.count, "budget": solution.budget, "left": solution.left}
    text = f"{solution.method!r}\n{solution.count:,} scalars of {solution.budget:,}, {solution.left:,} left"
    console.print_json(data=facts) if as_json else console.print(text)
