"""What is to be predicted, from options, a file or Python, as the columns that a kind of task reads."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..data.columns import INPUT_TYPES, TASK_COLUMNS, TYPE_DESCRIPTIONS, value_fits
from ..data.readers import STDIN, UnreadableFileError, data_suffix, has_lone_surrogate, read_rows, text_lines
from ..errors import DeltuneError, unknown_name
from ..filesystem import explain_write_errors, user_path, write_jsonl
from .run_dir import RunDir

Input = str | Sequence[str] | Mapping[str, Any]
"""A text; a text and its pair, or tokens; or every input by its role."""

ASKED = {("text",): "one text, no pair,", ("text", "pair"): "a text and its pair"}


def input_columns(kind: str, run: RunDir) -> dict[str, str]:
    """The inputs that a run was trained on: role -> column."""
    told = run.data.columns
    own = [c.role for c in TASK_COLUMNS[kind] if c.role in INPUT_TYPES and (c.role in told or not c.optional)]
    return {role: told.get(role, role) for role in own}


def columns_of(kind: str, run: RunDir, inputs: Sequence[Input], numbers: Sequence[int] = ()) -> dict[str, list[Any]]:
    """Role -> values. numbers: of the inputs, for errors (default: from 1). Errors: inputs that lack something, have
    too much, or are of another kind, all at once."""
    wanted = list(input_columns(kind, run))
    rows = [_by_role(value, wanted) for value in inputs]
    wrong = [
        str(number)
        for number, row in zip(numbers or range(1, len(rows) + 1), rows, strict=True)
        if set(row) != set(wanted) or not all(value_fits(INPUT_TYPES[role], row[role]) for role in wanted)
    ]
    if wrong:
        asks = ASKED.get(tuple(wanted)) or ", ".join(
            f"{role} ({TYPE_DESCRIPTIONS[INPUT_TYPES[role]]})" for role in wanted
        )
        listed = ", ".join(wrong[:10])
        raise DeltuneError(f"this run wants {asks} in every row; row {listed} is not so")
    texts = [(n, row[role]) for n, row in zip(numbers or range(1, len(rows) + 1), rows, strict=True) for role in wanted]
    if halves := [
        str(n) for n, text in texts if any(map(has_lone_surrogate, [text] if isinstance(text, str) else text))
    ]:
        raise DeltuneError(f"row {', '.join(halves[:10])} holds half a character (a lone surrogate); give whole texts")
    return {role: [row[role] for row in rows] for role in wanted}


def _by_role(value: Input, wanted: Sequence[str]) -> dict[str, Any]:
    """An input by its roles; those that it lacks or has too much are as they are. A text for a list is split."""
    alone = len(wanted) == 1 and INPUT_TYPES[wanted[0]] == "texts"
    if isinstance(value, Mapping):
        row = dict(value)
    elif alone or isinstance(value, str) or not isinstance(value, Sequence):
        row = {wanted[0]: value}
    else:
        row = dict(zip([*wanted, *map(str, range(len(value)))], value, strict=False))
    if alone and isinstance(row.get(wanted[0]), str):
        row[wanted[0]] = row[wanted[0]].split()
    return row


def inputs_from_texts(texts: Sequence[str], pairs: Sequence[str]) -> list[dict[str, Any]]:
    """The texts of the command line, numbered from 1."""
    inputs: list[Input] = [list(both) for both in zip(texts, pairs, strict=True)] if pairs else list(texts)
    return [{"id": str(i), "input": value} for i, value in enumerate(inputs, 1)]


def inputs_from_file(path: Path, run: Path) -> list[dict[str, Any]]:
    """The inputs of a file: each line of a .txt (of standard input for "-"), or the columns of the run in a table.

    Errors: an unreadable or empty file, a column that is missing, a value of another kind, each with its line.
    """
    path = path if path == STDIN else user_path(path, "file")
    if not data_suffix(path):
        try:
            lines = [(number, line.rstrip("\r\n")) for number, line in text_lines(path)]
        except (OSError, UnreadableFileError) as error:
            raise DeltuneError(f"{path} cannot be read: {error}") from error
        found = [{"id": str(number), "input": line} for number, line in lines if line.strip()]
        if not found:
            raise DeltuneError(f"{path} is empty: it has no texts")
        if len(found) < len(lines):
            warnings.warn(f"{path}: {len(lines) - len(found)} blank lines are left out; ids are lines", stacklevel=2)
        return found
    table, place = read_rows(path), RunDir(run)
    told = input_columns(place.data.kind, place)
    missing = [
        unknown_name("column", c, table.columns, where=path.name) for c in told.values() if c not in table.columns
    ]
    if missing:
        raise DeltuneError(" ".join(missing))
    inputs = []
    for line, row in table.rows:
        value = _by_role({role: row.get(column) for role, column in told.items()}, list(told))
        for role, column in told.items():
            if not value_fits(INPUT_TYPES[role], value[role]):
                raise DeltuneError(
                    f"{table.location(line)}: column {column!r} must be {TYPE_DESCRIPTIONS[INPUT_TYPES[role]]}"
                )
        inputs.append({"id": str(row.get("id", line)), "input": value})
    return inputs


def write_predictions(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write JSON lines, whole or not at all."""
    path = user_path(path, "output")
    with explain_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_jsonl(path, rows)
