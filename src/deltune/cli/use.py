"""Commands that use a run: its scores, answers, report and export; and the quickstart, which trains two."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import DeltuneError
from .options import Imports
from .output import (
    BaseModelOption,
    ColumnsOption,
    DataRootOption,
    Json,
    Kind,
    LabelsOption,
    MaxTokens,
    Output,
    PoolingOption,
    Quiet,
    RunArgument,
    SchemeOption,
    Seed,
    SeparatorOption,
    TaskOption,
    Temperature,
    console,
    listed,
    log_to_stderr,
)
from .threads import free_cores

if TYPE_CHECKING:
    from ..runtime.handle import Tuned

MODEL = "minilm"
TICKETS = Path(__file__).parents[1] / "train" / "demo" / "tickets"
METHOD, MAX_LENGTH = "lora", 64
TemplateOption = Annotated[
    str | None,
    typer.Option(help='The text that a model is given: "{source}"; of conversations roles, chatml, … or FILE.jinja.'),
]
SENTENCE = "I was charged twice for March, and I would like the second payment back."


def data(
    source: Annotated[str, typer.Argument(metavar="DATA", help="Folder, file or hub id.")],
    model: Annotated[
        str | None, typer.Option(help="The base model: hub id, folder or minilm [what it sees is not shown].")
    ] = None,
    row: Annotated[int, typer.Option(min=1, help="The row that is shown as an example.")] = 1,
    columns: ColumnsOption = None,
    task: TaskOption = None,
    labels: LabelsOption = None,
    label_separator: SeparatorOption = None,
    tag_scheme: SchemeOption = None,
    template: TemplateOption = None,
    max_length: Annotated[int | None, typer.Option(min=2, help="Tokens of a row; longer texts are cut.")] = None,
    loss_on: Annotated[
        str, typer.Option(help="Tokens of a conversation that are trained: answers, all, or the last answer.")
    ] = "answers",
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Show what a data set holds and what a model would see of it, without training. A run's first lines say so too."""
    with log_to_stderr(quiet):
        from ..train.config import RunConfig
        from ..train.overview import overview

        config = RunConfig.from_flat(
            model=model or MODEL, data=source, method="head", columns=columns, task=task, labels=labels,
            label_separator=label_separator, tag_scheme=tag_scheme, template=template, max_length=max_length,
            loss_on=loss_on,
        )  # fmt: skip
        facts = overview(config, model, row, progress=not quiet)
    if as_json:
        console.print_json(data=facts.as_json())
        return
    for line in facts.lines():
        console.print(line)


def evaluate(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of a run, of a delta or of PEFT; or a model, beside --data.")
    ],
    data: Annotated[
        str | None,
        typer.Option(help="Folder with train, validation and test files, a file, or a hub id [the run's own]."),
    ] = None,
    columns: ColumnsOption = None,
    task: TaskOption = None,
    data_root: DataRootOption = None,
    answer: Annotated[
        str, typer.Option(help="Answer by a head over the labels, or in words of a language model [of a model].")
    ] = "head",
    max_length: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a row; longer texts are cut [of a model: 128].")
    ] = None,
    split: Annotated[list[str] | None, typer.Option(help="Repeatable [validation and test].")] = None,
    output: Annotated[
        Path | None, typer.Option(help="Where the result is written [SPLIT.jsonl in a folder: predictions].")
    ] = None,
    rescore: Annotated[bool, typer.Option("--rescore", help="From its prediction files, without the model.")] = False,
    metrics: Annotated[
        str | None, typer.Option(help="What is measured: a,b,c [with --rescore; as in the run].")
    ] = None,
    harness: Annotated[
        str | None,
        typer.Option(metavar="TASKS", help="Tasks of lm-evaluation-harness: arc_easy,mine.yaml (extra harness)."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="With --harness: only the first rows of a task.")] = None,
    base: BaseModelOption = None,
    labels: LabelsOption = None,
    quiet: Quiet = False,
    imports: Imports = None,
    as_json: Json = False,
) -> None:
    """Score a run on its own or other data. Or score its prediction files again, or a model that was never tuned."""
    from . import formatting

    others = {
        "--data": data, "--columns": columns, "--task": task, "--data-root": data_root, "--answer": answer != "head",
        "--max-length": max_length, "--split": split, "--output": output, "--rescore": rescore, "--labels": labels,
    }  # fmt: skip
    if harness and (useless := [name for name, value in others.items() if value]):
        raise DeltuneError(f"--harness has its own data and answers: leave {', '.join(useless)} out")
    if rescore and (data or data_root or split or output or columns or base or labels):
        raise DeltuneError("--rescore reads the run's own prediction files: no --data, --split or --output with it")
    if data and data_root:
        raise DeltuneError("--data-root is for known tasks, which have their own data: give it without --data")
    if columns and not data:
        raise DeltuneError("--columns names columns of other data: give --data")
    if metrics and not rescore:
        raise DeltuneError("--metrics is for --rescore; those of a run are in its config")
    if limit and not harness:
        raise DeltuneError("--limit is for --harness; --split says which rows of a run are scored")
    with log_to_stderr(quiet):
        with free_cores():
            from ..train import inference

        if harness:
            from ..train.harness import evaluate_harness

            scores = evaluate_harness(run, [name.strip() for name in harness.split(",")], limit, base=base)
        elif rescore:
            scores = inference.rescore(run, [name.strip() for name in (metrics or "").split(",") if name.strip()])
        elif inference.is_run(run) or (data is None and task is None):
            if max_length is not None:
                raise DeltuneError(f"--max-length is for a model that was never tuned; {run} is a run and has its own")
            if task is not None or answer != "head":
                raise DeltuneError(f"--task and --answer are of a model as it is; {run} is a run, which has its own")
            scores = inference.evaluate(
                run, data, split, output, progress=not quiet, columns=columns, data_root=data_root, base=base,
                labels=listed(labels),
            )  # fmt: skip
        else:
            if base or labels:
                raise DeltuneError(f"--model and --labels are for a delta; {run} is a model as it is")
            scores = inference.evaluate_model(
                str(run), data, task, columns, answer, split, output,
                progress=not quiet, max_length=max_length, data_root=data_root,
            )  # fmt: skip
    console.print_json(data=scores) if as_json else console.print(formatting.score_table(scores))


def predict(
    run: RunArgument,
    text: Annotated[list[str] | None, typer.Option(help="A text to predict [repeatable].")] = None,
    pair: Annotated[list[str] | None, typer.Option(help="The pair of the text before it; repeatable.")] = None,
    row_task: Annotated[str | None, typer.Option(help="The task of the texts, of a run that learned several.")] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            help="Texts: .txt or - (a line each), or .jsonl, .csv, .parquet with the run's columns; its other columns "
            "are written with the predictions."
        ),
    ] = None,
    columns: ColumnsOption = None,
    output: Annotated[Path | None, typer.Option(help="Where the result is written [printed; a .jsonl file].")] = None,
    base: BaseModelOption = None,
    labels: LabelsOption = None,
    quiet: Quiet = False,
    imports: Imports = None,
    as_json: Json = False,
) -> None:
    """Predict texts with a run. The answers are labels, tags, choices, texts or log-likelihoods, as it was trained."""
    from . import formatting

    if bool(text) == bool(file) or (pair and not text):
        raise DeltuneError("give either --text (with --pair where the run has pairs) or --file")
    if columns and not file:
        raise DeltuneError("--columns names columns of a --file, and a --text has no columns: give one of the two")
    if row_task is not None and not text:
        raise DeltuneError("--row-task goes with --text; a file has a column for the task of each row")
    if output is not None and output.suffix != ".jsonl":
        raise DeltuneError(f"predictions are JSON lines: give --output FILE.jsonl, not {output}")
    if pair and len(pair) != len(text or ()):
        raise DeltuneError(f"{len(text or ())} --text and {len(pair)} --pair; give one --pair for each --text")
    with log_to_stderr(quiet):
        with free_cores():
            from ..train import prediction_inputs
            from ..train.inference import predict_rows

        rows = (
            prediction_inputs.inputs_from_texts(text or [], pair or [], row_task, run, base)
            if file is None
            else prediction_inputs.inputs_from_file(file, run, base, columns)
        )
        predictions = predict_rows(run, rows, base, listed(labels))
    if output is not None:
        prediction_inputs.write_predictions(output, predictions)
        print(f"{len(predictions)} predictions in {output}", file=sys.stderr)
    elif as_json:
        console.print_json(data=predictions)
    else:
        console.print(formatting.prediction_table(predictions))


def generate(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of a run, of a delta or of PEFT; or a language model.")
    ],
    prompt: Annotated[list[str], typer.Option(help="The beginning of the text, or what is answered; repeatable.")],
    more: Annotated[
        list[str] | None,
        typer.Option("--input", help='The column input of Alpaca: one for each --prompt, in order; "" for none.'),
    ] = None,
    max_tokens: MaxTokens = 64,
    temperature: Temperature = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Draw from the likeliest tokens of this share.")] = 1.0,
    seed: Seed = 0,
    base: BaseModelOption = None,
    quiet: Quiet = False,
    imports: Imports = None,
    as_json: Json = False,
) -> None:
    """Continue a text with a run's model, or answer it. The text is printed as it is generated."""
    with log_to_stderr(quiet):
        with free_cores():
            from ..train.inference import generate as generate_texts

        texts = generate_texts(
            str(run), prompt, max_tokens, temperature, top_p, seed, stream=not as_json, base=base, inputs=more or ()
        )
    if as_json:
        console.print_json(data=[{"prompt": p, "text": text} for p, text in zip(prompt, texts, strict=True)])


def chat(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of a run, of a delta or of PEFT; or a language model.")
    ],
    system: Annotated[str | None, typer.Option(help="A system message, which begins the conversation.")] = None,
    template: TemplateOption = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    base: BaseModelOption = None,
    imports: Imports = None,
) -> None:
    """Talk to a model, line by line. /reset begins anew, and the end of the input ends it; a pipe is answered too."""
    with log_to_stderr(True):
        with free_cores():
            from ..train.chat import Chat

        conversation = Chat.open(str(run), system, max_tokens, temperature, seed, template, base)
        is_terminal = sys.stdin.isatty()
        while True:
            try:
                line = input("> ") if is_terminal else sys.stdin.readline()
            except EOFError:
                line = ""
                print()
            else:
                line = f"{line}\n" if is_terminal else line
            if not line:
                return
            if line.strip() == "/reset":
                conversation.reset()
            elif line.strip():
                conversation.answer(line.rstrip("\r\n"), lambda part: print(part, end="", flush=True))
                print(flush=True)


def cache(
    clear: Annotated[bool, typer.Option("--clear", help="Remove all of it; runs make anew what they need.")] = False,
    as_json: Json = False,
) -> None:
    """Show or remove what runs keep on the disk. It is tokenised rows and activations of frozen layers."""
    from ..files import CACHE_VARIABLE, cache_folder
    from ..train.tasks import token_cache

    folder = cache_folder()
    files = {} if folder is None else token_cache.cached_files(folder)
    facts = {
        what: {"files": len(paths), "bytes": sum(path.stat().st_size for path in paths)}
        for what, paths in files.items()
    }
    for path in [path for paths in files.values() for path in paths] if clear else []:
        path.unlink(missing_ok=True)
    if as_json:
        console.print_json(data={"folder": str(folder) if folder else None, "cleared": clear, "contents": facts})
        return
    console.print(f"{'removed from ' if clear else ''}{folder or 'the cache is off'} (${CACHE_VARIABLE})")
    for what, fact in facts.items():
        console.print(f"{fact['bytes'] / 2**20:10.1f} MiB in {fact['files']:,} files: {what}")


def merge(
    run: RunArgument,
    output: Output,
    dequantize: Annotated[
        bool, typer.Option(help="Write a quantised model in floating point, so that nothing is rounded.")
    ] = False,
    pooling: PoolingOption = None,
    base: BaseModelOption = None,
    labels: LabelsOption = None,
    quiet: Quiet = False,
    imports: Imports = None,
    as_json: Json = False,
) -> None:
    """Fold a run's delta into the weights, where the method allows it. It becomes a plain transformers checkpoint.

    A run whose head reads a mean becomes a folder of sentence-transformers, since no class of transformers does.
    """
    with log_to_stderr(quiet):
        from ..train import inference

        target = inference.merge_run(
            run, output, dequantize=dequantize, base=base, labels=listed(labels), pooling=pooling
        )
    kind = "sentence-transformers" if (target / "modules.json").is_file() else "transformers"
    facts = {"output": str(target), "for": kind}
    console.print_json(data=facts) if as_json else console.print(f"merged into {target}, which {kind} reads")


def export(
    run: RunArgument,
    output: Output,
    format: Annotated[str, typer.Option(help="peft, adapterhub, vllm or llama.cpp.")] = "peft",
    pooling: PoolingOption = None,
    base: BaseModelOption = None,
    quiet: Quiet = False,
    imports: Imports = None,
    as_json: Json = False,
) -> None:
    """Write a run's delta as an adapter for PEFT, vLLM or llama.cpp. What they cannot express is refused by name."""
    with log_to_stderr(quiet):
        from ..train import inference

        target = inference.export_run(run, output, format, base, pooling)
    console.print_json(data={"output": str(target)}) if as_json else console.print(
        f"written for {format} into {target}"
    )


def combine(
    expression: Annotated[str, typer.Argument(metavar="SUM", help='Such as "0.5*a - b", or "average(a, b)".')],
    deltas: Annotated[list[str], typer.Argument(metavar="NAME=DIR...", help="A run or a delta for each name.")],
    output: Output,
    base: BaseModelOption = None,
    rank: Annotated[int | None, typer.Option(min=1, help="A LoRA of this rank, as near as can be [exact].")] = None,
    how: Annotated[str | None, typer.Option(help="ties, dare or magnitude, in place of adding.")] = None,
    density: Annotated[float | None, typer.Option(help="With --how: the share of each change that is kept.")] = None,
    head_of: Annotated[str | None, typer.Option(help="The delta whose head is kept, or average.")] = None,
    mixing: Annotated[
        str, typer.Option(help='Of "mix(a, b)": arrow, or arrow(top_k=2), which need no training.')
    ] = "scalar",
    quiet: Quiet = False,
    imports: Imports = None,
    as_json: Json = False,
) -> None:
    """Add deltas of one model with weights, average or mix them. The sum is exact where no rank is given."""
    from ..errors import unknown_name

    folders = {name: folder for name, _, folder in (pair.partition("=") for pair in deltas) if folder}
    if len(folders) < len(deltas):
        raise DeltuneError(f"give each delta a name of its own, NAME=DIR: {' '.join(deltas)}")
    if density is not None and how is None:
        raise DeltuneError("--density goes with --how")
    with log_to_stderr(quiet):
        from .. import Dare, Magnitude, Ties, load, tuned
        from ..compat import silent_loading

        ways: dict[str | None, Any] = {"ties": Ties, "dare": Dare, "magnitude": Magnitude}
        if how not in (None, *ways):
            raise DeltuneError(unknown_name("--how", how, [str(way) for way in ways]))
        (first, folder), *others = folders.items()
        with silent_loading():
            model = (load(folder, name=first) if base is None else load(base, folder, name=first)).model
            for name, other in others:
                load(model, other, name=name, use=False)
        made = None if how is None else ways[how](**({} if density is None else {"density": density}))
        handle = tuned(model).combine(expression, "_combined", rank=rank, how=made, head_of=head_of, mixing=mixing)
        handle.save(output)
    _print_delta(handle, output, as_json)


def extract(
    base: Annotated[str, typer.Argument(metavar="BASE", help="Hub id or folder of the base model, or minilm.")],
    checkpoint: Annotated[str, typer.Argument(metavar="TUNED", help="Hub id or folder of the tuned model.")],
    output: Output,
    method: Annotated[
        str | None, typer.Argument(metavar="METHOD", help='"lora(rank=?) + layernorm" [all that differs].')
    ] = None,
    energy: Annotated[float, typer.Option(help="The share of the changes' energy that the rank ? keeps.")] = 0.99,
    kind: Kind = None,
    quiet: Quiet = False,
    imports: Imports = None,
    as_json: Json = False,
) -> None:
    """Make a delta of the difference of two models. Changes of linears become LoRAs of one rank."""
    with log_to_stderr(quiet):
        from .. import extract as extract_delta
        from ..models import HEADS_WITH_LABELS, load_config, load_model, trained_head

        config = load_config(checkpoint)
        head = kind or trained_head(config) or "base"
        labels = list((config.id2label or {}).values()) if head in HEADS_WITH_LABELS else None
        other = load_model(checkpoint, head, labels)
        handle = extract_delta(load_model(base, head, labels), other, method, energy=energy)
        handle.save(output)
    _print_delta(handle, output, as_json)


def _print_delta(handle: Tuned, output: Path, as_json: bool) -> None:
    """Print what a new delta is and where."""
    facts = {"method": repr(handle.method), "count": handle.count().method, "output": str(output)}
    console.print_json(data=facts) if as_json else console.print(
        f"{handle.method!r}\n{facts['count']:,} scalars in {output}"
    )


def import_folder(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder that PEFT or AdapterHub saved.")],
    output: Output,
    base: BaseModelOption = None,
    kind: Kind = None,
    labels: LabelsOption = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Turn an adapter of PEFT or AdapterHub into a delta. What has no translation is refused with the reason."""
    with log_to_stderr(quiet):
        from ..train import inference

        handle = inference.import_adapter(folder, output, base, kind, listed(labels))
    _print_delta(handle, output, as_json)


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of finished runs.")],
    output: Annotated[
        Path | None, typer.Option(help="Where the result is written [report.html in the run's folder, or here].")
    ] = None,
    imports: Imports = None,
    as_json: Json = False,
) -> None:
    """Show a finished run as a page, or compare several. It has scores with intervals, curves, errors and examples."""
    from ..files import explain_write_errors, user_path, write_text
    from ..train.report import page as reports
    from ..train.report.advice import advice
    from ..train.run_folder import RunFolder
    from . import formatting

    finished = reports.read_all([RunFolder(run) for run in runs])
    first = finished[0].run.report_file if len(finished) == 1 else Path("report.html")
    page = first if output is None else user_path(output, "--output")
    comparison = reports.compare(finished)
    with explain_write_errors(page):
        page.parent.mkdir(parents=True, exist_ok=True)
        write_text(page, reports.render_report(finished))
    if as_json:
        console.print_json(data=[reports.run_facts(one) for one in finished])
    else:
        console.print(formatting.comparison_table(comparison, fold=console.is_terminal))
        for one in finished:
            for text in advice(one):
                console.print(f"note: {one.run.folder}: {text}")
    print(f"the page is {page}", file=sys.stderr)


def quickstart(
    text: Annotated[str | None, typer.Option(help="A text to predict [a ticket about a payment].")] = None,
    seed: Seed = 0,
    output: Annotated[Path, typer.Option(help="Where the result is written.")] = Path("runs/quickstart"),
) -> None:
    """Tune MiniLM on support tickets, offline, in about a minute. A linear probe shows what it does without tuning."""
    with log_to_stderr(False):
        with free_cores():
            from ..methods.counting import count
            from ..models import load_config
            from ..train.config import RunConfig
            from ..train.inference import predict
            from ..train.probe import probe_model
            from ..train.run import train
            from ..train.run_folder import RunFolder

        config = RunConfig.from_flat(model=MODEL, data=str(TICKETS), method=METHOD, max_length=MAX_LENGTH, seed=seed)
        share = count(load_config(MODEL), METHOD)
        console.print(
            f"MiniLM-L6, a model of {share.denominator_size / 1e6:.1f} million parameters, learns to sort support "
            "tickets into 8 kinds from 400 examples; 120 others test it.\n"
            "Without tuning: a logistic regression on the mean of the model's last hidden states, a linear probe."
        )
        probe = probe_model(config).test["accuracy"]
        console.print(
            f"Its test accuracy is {probe:.3f}.\n\n"
            f"With tuning: {METHOD} trains {share.method:,} parameters inside the model ({share.percent:.2f} %), and "
            "the head, a new last layer that gives the kind.\n"
            "All other parameters stay as they are. It takes about a minute where a core is free."
        )
        run = RunFolder(Path(output))
        is_quickstart = run.exists and run.config.replace(seed=seed).name == config.name
        metrics = train(config, run.folder, resume=not is_quickstart or run.config.name == config.name)
        tuned = metrics.test["accuracy"]
        console.print(f"\ntest accuracy: probe {probe:.3f}, tuned {tuned:.3f} ({metrics.seconds:.0f} s)")
        answer = predict(run.folder, [text or SENTENCE])[0]
        console.print(f"{text or SENTENCE!r}: {answer['label']} ({answer['scores'][answer['label']]:.0%})")
        console.print(f"more about that run: open {run.report_file} in a browser")
        console.print(f'another one: deltune predict {run.folder} --text "…"')
