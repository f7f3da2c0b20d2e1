"""`deltune train`: its options are generated from the fields of the config, so that no field is named twice."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import typer

from ..errors import DeltuneError
from ..filesystem import user_path
from . import launching
from .output import Json, Quiet, console, fast_imports, log_to_stderr

if TYPE_CHECKING:
    from ..training.config import RunConfig
    from ..training.run_dir import RunMetrics

PASS_EVERYTHING_ON = {"ignore_unknown_options": True, "allow_extra_args": True}


def train(context: typer.Context) -> None:
    """Tune a method on a data set and keep the best delta; run again after a kill, it goes on where it was."""
    # A command of its own, built only now: its options come from pydantic models, and `deltune --help` loads none.
    train_app()(args=context.args, prog_name=context.command_path)


@cache
def train_app() -> typer.Typer:
    """Build the command with all of its options: those of `run`, then one for each field of the config."""

    def command(**values: Any) -> None:
        own = {name: values.pop(name) for name in signature.parameters}
        run(**own, options={name: value for name, value in values.items() if value is not None})

    signature = inspect.signature(run, eval_str=True)
    signature = signature.replace(parameters=[p for p in signature.parameters.values() if p.name != "options"])
    parameters = [*signature.parameters.values(), *_config_parameters()]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
    app.command(help=train.__doc__, epilog=EPILOG)(command)
    return app


EPILOG = (
    "The config has more options. --print-config prints all of them with their values; set them in RUN.yaml or by "
    "--set SECTION.FIELD=VALUE."
)


def _config_parameters() -> list[inspect.Parameter]:
    """Return a parameter for each field of the config; what is not common is hidden from --help."""
    from rich.markup import escape

    with fast_imports():
        from ..training.config import PLACES, SECTIONS

    parameters = []
    for name, (section, field) in PLACES.items():
        info = SECTIONS[section].model_fields[field]
        default = "" if info.is_required() or info.default in (None, (), {}) else f" [{info.default}]"
        extra = info.json_schema_extra
        option = typer.Option(
            f"--{name.replace('_', '-')}",
            help=escape(f"{info.description}{default}"),
            metavar=_metavar(info.annotation),
            rich_help_panel=section,
            hidden=not (isinstance(extra, dict) and extra["common"]),
            show_default=False,
        )
        kind = list[str] | None if name == "search" else str | None
        annotation = Annotated[kind, option]  # type: ignore[valid-type]
        parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation))
    return parameters


def _metavar(annotation: Any) -> str:
    """Return how --help shows the values of a field."""
    if get_origin(annotation) is Literal:
        choices = "|".join(get_args(annotation))
        return choices if len(choices) < 20 else "TEXT"  # a wide column leaves no room for what an option means
    if get_origin(annotation) in (dict, tuple) or not get_args(annotation):
        return {int: "INTEGER", float: "NUMBER"}.get(annotation, "TEXT")
    return _metavar(get_args(annotation)[0])


def run(
    file: Annotated[
        Path | None, typer.Argument(metavar="RUN.yaml", help="The config of a run; options override it.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Folder of the run.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.FIELD=VALUE", help="Any option of the config; repeatable."),
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the whole resolved config as YAML, and train nothing.")
    ] = False,
    devices: Annotated[
        str,
        typer.Option(
            show_default=False,
            help="auto (an accelerator where there is one), cpu, cuda, cuda:1, mps, or how many processes.",
        ),
    ] = "auto",
    launch: Annotated[int | None, typer.Option(help="Train in that many processes, a device each.")] = None,
    sharding: Annotated[
        str | None, typer.Option(metavar="none|fsdp", help="fsdp: each process has a share of the model.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Discard the run in the folder and start anew.")] = False,
    quiet: Quiet = False,
    as_json: Json = False,
    *,
    options: Mapping[str, Any],
) -> None:
    """Train the run that a file and options describe.

    Args:
        file: A YAML file with values of the config, and perhaps `output`.
        output: The folder of the run.
        settings: Values of the config as "section.field=value".
        print_config: Print the config instead.
        devices: A device, or a number of processes.
        launch: A number of processes.
        sharding: "none" or "fsdp".
        fresh: Discard the run in the folder.
        quiet: Show neither progress nor notes.
        as_json: Print the metrics as JSON.
        options: Values of the config by flat name, as texts.
    """
    with fast_imports():
        from ..training import config as configs
        from ..training.presets import merge_values
        from . import formatting

    values = {} if file is None else configs.read_values(file)
    folder = values.pop("output", None)
    folder = output if folder is None or output is not None else user_path(folder, "output")
    given = configs.flatten({**_parse_options(options), **_parse_settings(settings or [])})
    config = configs.RunConfig.from_flat(**merge_values(configs.flatten(values), given))
    if print_config:
        print(config.yaml(), end="")
        return
    if folder is None:
        raise DeltuneError("--output is missing: the folder of the run")
    if devices.isdigit():
        devices, launch = "auto", launch or int(devices)
    if (code := launching.launch_if_requested(launch)) is not None:
        raise typer.Exit(code)
    metrics = _train(config, folder, fresh, quiet or not launching.is_main_process(), devices, sharding)
    if not launching.is_main_process():
        return
    if as_json:
        console.print_json(data=metrics.as_json())
    else:
        console.print(formatting.run_table(config, metrics, str(folder)))


def _train(config: RunConfig, folder: Path, fresh: bool, quiet: bool, devices: str, sharding: str | None) -> RunMetrics:
    with log_to_stderr(quiet):
        with fast_imports():
            from ..training import interrupts
            from ..training import train as training

        interrupts.watch_interrupts()
        try:
            return training.train(
                config,
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


def _parse_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of options by flat name; --search FIELD=VALUE becomes lists of values by field."""
    values = {name: _parse_value(name, value) for name, value in options.items() if name != "search"}
    search: dict[str, list[Any]] = {}
    for item in options.get("search", ()):
        field, equals, value = item.partition("=")
        if not equals or not field.strip():
            raise DeltuneError(f"--search {item}: give FIELD=VALUE, such as lr=1e-3")
        search.setdefault(field.strip().replace("-", "_"), []).append(value)
    return values | ({"search": search} if search else {})


def _parse_settings(settings: list[str]) -> dict[str, Any]:
    """Return the values of --set by their dotted names."""
    from ..training.config import DOTTED

    values = {}
    for item in settings:
        name, equals, value = item.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not name:
            raise DeltuneError(f"--set {item}: give SECTION.FIELD=VALUE, such as optim.clip=0.5")
        values[name] = _parse_value(DOTTED.get(name, name), value)
    return values


def _parse_value(name: str, text: str) -> Any:
    """Return the value of an option: null is none, lists and mappings are YAML, anything else is checked as text."""
    import yaml

    from ..training.config import PLACES, SECTIONS

    if text.strip() == "null":
        return None
    if name not in PLACES or not text.lstrip().startswith(("[", "{")):
        return text
    section, field = PLACES[name]
    if not _is_container(SECTIONS[section].model_fields[field].annotation):
        return text  # such as a template: {source}
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise DeltuneError(f"{section}.{field} is broken YAML: {' '.join(str(error).split())}") from error


def _is_container(annotation: Any) -> bool:
    """Whether a field takes a list or a mapping."""
    kind = get_origin(annotation)
    return kind in (dict, tuple) or (kind is not Literal and any(map(_is_container, get_args(annotation))))
