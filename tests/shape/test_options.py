"""An option is the same word with the same meaning in every command, in YAML and in Python."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import click
import pytest
from typer.main import get_command

import deltune
from deltune.cli.app import app
from deltune.cli.serve import serve_app
from deltune.cli.train import train_app
from deltune.serve import Server
from deltune.serve.config import PLACES as SERVE_PLACES
from deltune.studies import choose
from deltune.train import inference, train

BUILT_LATER = {"train": train_app, "serve": serve_app}
"""The commands whose options come from a configuration and are made when they run."""


def commands(group: Any = None, before: str = "") -> Iterator[tuple[str, Any]]:
    """Every command by its whole name."""
    for name, command in (group or get_command(app)).commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{name} ")
        else:
            yield before + name, get_command(BUILT_LATER[name]()) if name in BUILT_LATER else command


COMMANDS = dict(commands())


def options(command: Any) -> dict[str, str]:
    """The options of a command with their meaning: the help without [what holds for this command]."""
    return {
        one.opts[0]: re.sub(r"\s*\\?\[[^\]]*\]", "", one.help or "").strip(" .").lower()
        for one in command.params
        if one.param_type_name == "option"
    }


def parameters(command: Any) -> set[str]:
    return {str(one.opts[0]).removeprefix("--").replace("-", "_") for one in command.params}


MEANINGS = [(name, option, text) for name, one in COMMANDS.items() for option, text in options(one).items()]


def test_a_name_means_the_same_everywhere() -> None:
    meanings: dict[str, dict[str, list[str]]] = {}
    for command, option, text in MEANINGS:
        meanings.setdefault(option, {}).setdefault(text, []).append(command)
    assert len(meanings) > 150 and len(meanings["--output"]["where the result is written"]) > 8
    assert {option: texts for option, texts in meanings.items() if len(texts) > 1} == {}


def test_a_meaning_has_one_name() -> None:
    named: dict[str, set[str]] = {}
    for _, option, text in MEANINGS:
        named.setdefault(text, set()).add(option)
    assert {text: names for text, names in named.items() if len(names) > 1} == {}


def test_an_option_has_one_name() -> None:
    params = [one for command in COMMANDS.values() for one in command.params]
    aliases = [one.opts for one in params if len(one.opts) > 1 or any(re.match("-[^-]", name) for name in one.opts)]
    assert aliases == [] and all(isinstance(one, click.Parameter) or one.opts for one in params)


IN_PYTHON: dict[str, tuple[str, Callable[..., Any], set[str]]] = {
    "choose": ("choose", choose, {"options", "progress"}),
    "combine": ("combine", deltune.Tuned.combine, {"self", "name"}),
    "count": ("count", deltune.count, {"head", "quantization_config"}),
    "count of memory": ("count", deltune.step_memory, {"config", "quantization_config"}),
    "evaluate": ("evaluate", inference.evaluate, {"splits", "progress", "other", "base"}),
    "export": ("export", inference.export_run, {"base"}),
    "extract": ("extract", deltune.extract, {"name"}),
    "fit": ("fit", deltune.fit, set()),
    "generate": ("generate", inference.generate, {"source", "prompts", "stream", "base", "inputs"}),
    "import": ("import", inference.import_adapter, {"base"}),
    "merge": ("merge", inference.merge_run, {"base"}),
    "train": ("train", train, {"config", "resume", "progress", "cache", "report", "rows", "stop_if"}),
}
"""Functions that a command calls, and their parameters that are no option: what Python alone has, and lists of what an
option gives one at a time."""


@pytest.mark.parametrize("case", IN_PYTHON)
def test_python_says_the_same_words(case: str) -> None:
    command, function, of_python = IN_PYTHON[case]
    words = set(inspect.signature(function).parameters)
    assert words - parameters(COMMANDS[command]) == of_python & words


def test_a_server_says_the_same_words() -> None:
    words = set(inspect.signature(Server.__init__).parameters) - {"self", "tokenizer"}
    assert words - set(SERVE_PLACES) == set()
