"""`deltune train`: options generated from the fields of the config, and its processes, which start and end as one.

Of several processes (`--launch`), the first failure's exit code is the command's. torch.distributed.run is not used: it
gives its processes sessions and pipes of their own, so that they outlive a launcher that is killed. Here they hold the
end of a pipe.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import typer

from ..errors import DeltuneError
from ..files import user_path
from ..methods.other_names import hint_for_option
from .options import (
    Imports,
    commented_yaml,
    config_command,
    config_parameters,
    load_user_function,
    split_settings,
)
from .output import Json, Quiet, console, is_main_process, log_to_stderr, resumable

if TYPE_CHECKING:
    from ..train.config import RunConfig
    from ..train.records import RunMetrics


GRACE = 5.0  # seconds in which the other processes may end by themselves
LIFELINE = "DELTUNE_LIFELINE"


def launch(count: int, command: Sequence[str]) -> int:
    """Run a command in several processes, with the environment variables that torchrun sets.

    The processes end with this one, however it ends.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    threads = str(max(1, (os.cpu_count() or 1) // count))
    # threads that spin while they wait slow others down on shared cores; a process alone is a tenth faster with them
    shared = {"OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "passive"}
    environment = {**shared, **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    with _lifeline() as line:
        environment[LIFELINE] = str(line)
        started = [
            subprocess.Popen(command, env={**environment, "RANK": str(i), "LOCAL_RANK": str(i)}, pass_fds=(line,))
            for i in range(count)
        ]
        try:
            return _first_failure(started)
        except KeyboardInterrupt:
            _end(started, signal.SIGINT)
            return 130
        finally:
            _end(started, signal.SIGTERM)


def launch_if_requested(count: int | None) -> int | None:
    """Run this very command in several processes, if that is requested and has not happened yet."""
    running = int(os.environ.get("WORLD_SIZE", "1"))
    if count is not None and count < 1:
        raise DeltuneError(f"--launch {count}: give 1 or more")
    if running > 1 and count not in (None, running):
        raise DeltuneError(f"--launch {count} inside {running} processes: leave it out, or start deltune alone")
    return (
        None
        if count is None or count == 1 or running > 1
        else launch(count, [sys.executable, "-m", "deltune", *sys.argv[1:]])
    )


def sharding_mode(requested: str | None) -> str:
    """Return "none" or "fsdp": what is requested, else what `accelerate launch --use_fsdp` says."""
    fsdp = os.environ.pop("ACCELERATE_USE_FSDP", "false")  # or accelerate would do it a second time
    return requested or ("fsdp" if fsdp.lower() in ("true", "1") else "none")


def exit_with_launcher() -> None:
    """End this process when the launcher that started it has ended, even if it was killed."""
    line = os.environ.pop(LIFELINE, None)
    if line is not None:

        def wait() -> None:
            os.read(int(line), 1)  # nothing is written: it returns when the other end is closed
            os._exit(1)

        threading.Thread(target=wait, daemon=True).start()


@contextlib.contextmanager
def _lifeline() -> Iterator[int]:
    """Give the read end of a pipe; its write end is closed with the context, or with this process."""
    read_end, write_end = os.pipe()
    try:
        yield read_end
    finally:
        os.close(write_end)
        os.close(read_end)


def _first_failure(started: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait for all processes, or for the first that fails, and return its exit code."""
    while True:
        codes = [process.poll() for process in started]
        failed = next((i for i, code in enumerate(codes) if code), None)
        if failed is not None:
            code = codes[failed] or 0
            if code < 0:
                print(
                    f"deltune: process {failed + 1} of {len(started)} was ended by signal {-code}; run the same command"
                    " again, it goes on where it was",
                    file=sys.stderr,
                )
            return 128 - code if code < 0 else code
        if all(code == 0 for code in codes):
            return 0
        time.sleep(0.05)


def _end(started: Sequence[subprocess.Popen[bytes]], signal_number: signal.Signals) -> None:
    """End the processes that still run: wait for a while, then send a signal, then kill."""
    for act in (lambda p: None, lambda p: p.send_signal(signal_number), lambda p: p.kill()):
        running = [process for process in started if process.poll() is None]
        for process in running:
            act(process)
        until = time.monotonic() + GRACE
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))


PASS_EVERYTHING_ON = {"ignore_unknown_options": True, "allow_extra_args": True}


def train(context: typer.Context) -> None:
    """Tune a model. Run again, it continues; --fresh begins anew; --init-from RUN starts another from its weights."""
    for argument in context.args:
        name = argument.removeprefix("--").partition("=")[0]
        if argument.startswith("--") and (hint := hint_for_option(name.replace("-", "_"), "--{}")):
            raise DeltuneError(f"deltune train has no option --{name}. {hint}")
    # A command of its own, built only now: its options come from pydantic models, and `deltune --help` loads none.
    train_app()(args=context.args, prog_name=context.command_path)


EPILOG = (
    'A first run: deltune train --model minilm --data DIR --method "lora(rank=8)" --output runs/first. The config has '
    "more options. --print-config prints all of them, those without a value as comments; set them in RUN.yaml or by "
    "--set SECTION.FIELD=VALUE."
)


@cache
def train_app() -> typer.Typer:
    """Build the command with the options of `run` and one for each field of the config."""
    from ..train.config import PLACES, SECTIONS

    parameters = config_parameters(SECTIONS, PLACES, repeatable=("search", "data"))
    return config_command(run, train.__doc__, EPILOG, parameters)


def run(
    file: Annotated[
        Path | None, typer.Argument(metavar="RUN.yaml", help="The config of a run; options override it.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help=r"Where the result is written \[as RUN.yaml says].")] = None,
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
    device: Annotated[
        str,
        typer.Option(show_default=False, help="auto (an accelerator where there is one), cpu, cuda, cuda:1, mps."),
    ] = "auto",
    launch: Annotated[int | None, typer.Option(help="Train in that many processes, a device each.")] = None,
    sharding: Annotated[
        str | None, typer.Option(metavar="none|fsdp", help="fsdp: each process has a share of the model.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Discard the run in the folder and start anew.")] = False,
    reward: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.py:function",
            help="Python code that rates the answers of grpo.",
        ),
    ] = None,
    imports: Imports = None,
    quiet: Quiet = False,
    as_json: Json = False,
    *,
    options: Mapping[str, Any],
) -> None:
    """Train the run that a file and options describe."""
    from ..config import read_values
    from ..train.config import RunConfig, check_processes, flatten
    from ..train.presets import merge_values

    values = {} if file is None else read_values(file)
    folder = values.pop("output", None)
    folder = output if folder is None or output is not None else user_path(folder, "output")
    overrides = flatten({**_parse_options(options), **_parse_settings(settings or [])})
    merged = merge_values(flatten(values), overrides)
    if merged.get("init_from") and not {"model", "method"} <= merged.keys():
        from ..train.inference import model_and_method

        model, method = model_and_method(merged["init_from"], merged.get("model"))
        merged = {"model": model, "method": method, **merged}
    config = RunConfig.from_flat(**merged)
    if print_config:
        print(_commented(config), end="")
        return
    if folder is None:
        raise DeltuneError("--output is missing: the folder of the run")
    check_processes(config.objective.kind, launch or 1)
    if (code := launch_if_requested(launch)) is not None:
        raise typer.Exit(code)
    rated = None if reward is None else load_user_function(reward, "--reward")
    metrics = _train(config, folder, fresh, quiet or not is_main_process(), device, sharding, rated)
    if not is_main_process():
        return
    from ..train.report.advice import advice, read_finished
    from ..train.run_folder import RunFolder
    from . import formatting

    finished = read_finished(RunFolder(folder), metrics)
    if as_json:
        console.print_json(data=metrics.as_json())
    else:
        console.print(formatting.run_table(finished, str(folder)))
    for text in advice(finished):
        print(f"note: {text}", file=sys.stderr if as_json else sys.stdout)


def _commented(config: RunConfig) -> str:
    """Return a config as YAML with comments for what has no value; a null that undoes a protocol's value is written."""
    from ..config import parse_yaml
    from ..methods.registry import LONG_STEPS, SHORT_STEPS, default_learning_rate
    from ..train.config import DOTTED, SECTIONS, RunConfig

    values = config.flat(mode="json")
    unset = {name for name, value in values.items() if value in (None, [], {})}
    read = RunConfig.from_flat(**{name: value for name, value in values.items() if name not in unset}).flat(mode="json")
    needed = [dotted for dotted, name in DOTTED.items() if name in unset and read[name] != values[name]]
    short, long = (default_learning_rate(config.method.expression, steps) for steps in (SHORT_STEPS, LONG_STEPS))
    of_steps = f"{short:g} for {SHORT_STEPS} steps or fewer, down to {long:g} for {LONG_STEPS:,} or more"
    rate = f"{short:g}" if short == long else of_steps
    is_searched = not {"lr", "method"}.isdisjoint(config.runtime.search)
    notes = {} if is_searched else {"optim.lr": f"learning rate [the method's: {rate}]"}
    return commented_yaml(parse_yaml(config.yaml(), "the config"), SECTIONS, needed, notes)


def _train(
    config: RunConfig,
    folder: Path,
    fresh: bool,
    quiet: bool,
    device: str,
    sharding: str | None,
    reward: Callable[..., Any] | None,
) -> RunMetrics:
    with log_to_stderr(quiet):
        from ..train.run_folder import RunFolder
        from .threads import free_cores

        with free_cores(None if fresh else RunFolder(folder)):
            from ..train import run as training
            from ..train.trainer import watch_interrupts

        watch_interrupts()
        with resumable(str(folder)):
            return training.train(
                config,
                folder,
                resume=not fresh,
                progress=not quiet,
                device=device,
                sharding=sharding_mode(sharding),
                reward=reward,
            )


def _parse_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of options by flat name; --search FIELD=VALUE becomes lists of values by field."""
    options = {**options, **({"data": ",".join(options["data"])} if options.get("data") else {})}
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
    from ..train.config import DOTTED

    values = split_settings(settings, "optim.clip=0.5")
    return {name: _parse_value(DOTTED.get(name, name), value) for name, value in values.items()}


def _parse_value(name: str, text: str | bool) -> Any:
    """Return the value of an option: null is none, lists and mappings are YAML, anything else is checked as text."""
    if isinstance(text, bool):
        return text
    from ..config import parse_yaml
    from ..train.config import PLACES, SECTIONS

    if text.strip() == "null":
        return None
    if name not in PLACES or not text.lstrip().startswith(("[", "{")):
        return text
    section, field = PLACES[name]
    if not _is_container(SECTIONS[section].model_fields[field].annotation):
        return text  # such as a template: {source}
    return parse_yaml(text, f"{section}.{field}")


def _is_container(annotation: Any) -> bool:
    """Return whether a field takes a list or a mapping."""
    kind = get_origin(annotation)
    return kind in (dict, tuple) or (kind is not Literal and any(map(_is_container, get_args(annotation))))
