"""`deltune serve`, and the keys of its tenants."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import DeltuneError, check_extra
from .options import Imports, commented_yaml, config_command, config_parameters, split_settings
from .output import BaseModelOption, Json, Quiet, console, log_to_stderr


def serve(context: typer.Context) -> None:
    """Serve a model and many deltas on it over HTTP. Each request names its delta; OpenAI's clients can ask."""
    # A command of its own, built only now: its options come from pydantic models, and `deltune --help` loads none.
    serve_app()(args=context.args, prog_name=context.command_path)


EPILOG = (
    "A first server: deltune serve RUN, or deltune serve MODEL --deltas DIR. DIR has a folder for each delta: what "
    "`deltune train` or Tuned.save() wrote, or an adapter of PEFT or AdapterHub. More options are not listed here: "
    "--print-config prints all fields of the config, those without a value as comments. Each is set in SERVE.yaml "
    "(--config SERVE.yaml), by --set SECTION.FIELD=VALUE or by its own --field VALUE."
)


@cache
def serve_app() -> typer.Typer:
    """Build the command with all of its options: those of `run`, then one for each field of the config."""
    from ..serve.config import PLACES, SECTIONS

    places = {name: place for name, place in PLACES.items() if name != "model"}
    return config_command(run, serve.__doc__, EPILOG, config_parameters(SECTIONS, places))


def run(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="Hub id, folder or minilm; needed here or in the file. Or RUN, a delta to serve on its own model.",
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="A YAML file with any of the options; options override it.")
    ] = None,
    base: BaseModelOption = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.FIELD=VALUE", help="Any option of the config; repeatable."),
    ] = None,
    print_config: Annotated[
        bool,
        typer.Option(
            "--print-config",
            help="Print the config as YAML, with comments for options without a value, and do nothing else.",
        ),
    ] = False,
    imports: Imports = None,
    quiet: Quiet = False,
    *,
    options: Mapping[str, Any],
) -> None:
    """Serve as a file and options say."""
    check_extra("serve", "deltune serve needs")
    from ..config import read_values
    from ..models import is_delta
    from ..serve.config import SECTIONS, ServeConfig

    values = {} if config is None else read_values(config)
    named_model = {} if model is None else {"model": model}
    options_given = _without_null(options) | ({} if base is None else {"model": base})
    by_dotted_name = _without_null(split_settings(settings or [], "limits.timeout=60"))
    if base is not None and (model is None or not is_delta(model)):
        raise DeltuneError("--model names the base of a delta: deltune serve RUN --model BASE")
    if model is not None and is_delta(model):
        from ..serve.loading import base_of_delta

        others = ServeConfig.from_values({"model": model}, values, options_given, by_dotted_name)
        if others.deltas.folder is not None:
            raise DeltuneError(
                f"{model} is a delta, and the deltas of {others.deltas.folder} are to be served: give their model in "
                "its place (deltune serve BASE …)"
            )
        base = base_of_delta(model) if others.model.name == model else others.model.name
        named_model = {"model": base, "deltas": model}
    resolved = ServeConfig.from_values(values, options_given, by_dotted_name, named_model)
    if imports and resolved.ray.ray:
        raise DeltuneError("--import does not reach the replicas that --ray starts: serve such deltas without --ray")
    if print_config:
        print(commented_yaml(resolved.model_dump(mode="json"), SECTIONS), end="")
        return
    with log_to_stderr(quiet):
        from ..serve.process import serve as start

        start(resolved, quiet)


def _without_null(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with None for the text null, which stands for no value."""
    return {name: None if value == "null" else value for name, value in options.items()}


def serve_key(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File of keys; it is made if there is none.")],
    tenant: Annotated[str | None, typer.Argument(metavar="[TENANT]", help="Whose key it is; new or not.")] = None,
    delta: Annotated[
        list[str] | None, typer.Option(help="A delta that it may ask, or a pattern such as 'acme-*'; repeatable.")
    ] = None,
    base: Annotated[
        bool | None, typer.Option("--base/--no-base", help="Whether it may use the base model [yes].")
    ] = None,
    manage: Annotated[
        bool | None, typer.Option("--manage/--no-manage", help="Whether requests may load and unload deltas [no].")
    ] = None,
    admin: Annotated[
        bool | None, typer.Option("--admin/--no-admin", help="Whether it may see /metrics and the page.")
    ] = None,
    requests_per_minute: Annotated[
        float | None, typer.Option(help="Requests of a tenant in a minute, at most.")
    ] = None,
    tokens_per_minute: Annotated[
        float | None, typer.Option(help="Tokens of a tenant in a minute, read and generated, at most.")
    ] = None,
    revoke: Annotated[str | None, typer.Option(metavar="ID", help="Take this key out instead of making one.")] = None,
    as_json: Json = False,
) -> None:
    """Make an API key for a tenant of `deltune serve --keys FILE`, or list or revoke keys.

    The key is printed once; the file keeps a salted hash. A running server notices within a second. FILE alone lists
    the tenants with their rights, their rates and the ids of their keys.
    """
    from ..files import user_path

    check_extra("serve", "deltune serve-key needs")
    from ..serve.api import tenants as keys

    file = user_path(file, "FILE")
    if revoke is not None:
        owner = keys.revoke_key(file, revoke)
        console.print_json(data={"revoked": revoke, "tenant": owner}) if as_json else console.print(
            f"revoked a key of {owner}"
        )
        return
    if tenant is None:
        tenants = keys.read_keys(file).tenants
        facts = [
            {**one.model_dump(mode="json", exclude={"keys"}), "keys": [key.id for key in one.keys]} for one in tenants
        ]
        console.print_json(data=facts) if as_json else console.print("\n".join(map(_describe_tenant, facts)))
        return
    changes = {
        "deltas": None if delta is None else tuple(delta), "base": base, "manage": manage, "admin": admin,
        "requests_per_minute": requests_per_minute, "tokens_per_minute": tokens_per_minute,
    }  # fmt: skip
    key = keys.add_key(file, tenant, {name: value for name, value in changes.items() if value is not None})
    console.print_json(data={"tenant": tenant, "key": key}) if as_json else console.print(key)
    print(f"this key is shown once; {file} keeps a hash of it", file=sys.stderr)


def _describe_tenant(facts: Mapping[str, Any]) -> str:
    """Return the line about a tenant in the list of a file of keys."""
    rights = [
        name for name, field in (("base model", "base"), ("manage", "manage"), ("admin", "admin")) if facts[field]
    ]
    rates = [
        f"{facts[f'{what}_per_minute']:g} {what} a minute"
        for what in ("requests", "tokens")
        if facts[f"{what}_per_minute"] is not None
    ]
    keys = f"keys {', '.join(facts['keys'])}" if facts["keys"] else "no keys"
    deltas = f"deltas {', '.join(facts['deltas']) or 'none'}"
    return f"{facts['name']}: {'; '.join([deltas, *rights, *rates, keys])}"
