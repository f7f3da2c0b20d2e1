"""Texts to predict, from options or a file, and what came out of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .errors import DeltuneError, unknown
from .evaluate import Text, predict
from .files import read, suffix_of
from .runs import Run, room, write_lines

Input = dict[str, Any]
"""id and input: a text, or a text and its pair."""


def of_options(texts: Sequence[str], pairs: Sequence[str]) -> list[Input]:
    """The texts of the command line, numbered from 1."""
    inputs: list[Text] = [list(both) for both in zip(texts, pairs, strict=True)] if pairs else list(texts)
    return [{"id": str(i), "input": value} for i, value in enumerate(inputs, 1)]


def of_file(path: Path, run: Path) -> list[Input]:
    """The texts of a file: each line of a .txt, or the text columns of the run in a table.

    Errors: an unreadable or empty file, a column that is missing, a value that is no text, each with its line.
    """
    if not suffix_of(path):
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise DeltuneError(f"{path} cannot be read: {error}") from error
        found: list[Input] = [{"id": str(i), "input": line} for i, line in enumerate(lines, 1) if line.strip()]
        if not found:
            raise DeltuneError(f"{path} is empty: it has no texts")
        return found
    table = read(path)
    told = Run(run).environment.get("data", {}).get("columns", {})
    columns = [told[role] for role in ("text", "pair") if role in told]
    missing = [unknown("column", c, table.columns, where=path.name) for c in columns if c not in table.columns]
    if missing:
        raise DeltuneError(" ".join(missing))
    inputs = []
    for place, row in table.rows:
        values = [row.get(column) for column in columns]
        if not all(isinstance(value, str) for value in values):
            raise DeltuneError(f"{table.at(place)}: {' and '.join(columns)} must be text")
        inputs.append({"id": str(row.get("id", place)), "input": values[0] if len(values) == 1 else values})
    return inputs


def predicted(run: Path, inputs: Sequence[Input]) -> list[dict[str, Any]]:
    """The inputs with their predictions: id, input, prediction, scores."""
    answers = predict(run, [row["input"] for row in inputs])
    return [
        {**row, "prediction": answer["label"], "scores": answer["scores"]}
        for row, answer in zip(inputs, answers, strict=True)
    ]


def write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write JSON lines, whole or not at all."""
    with room(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_lines(path, rows)
