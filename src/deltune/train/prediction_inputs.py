"""Inputs to predict, from Python, the command line or a file, as the columns that a kind of task reads."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..config import split_commas
from ..errors import DeltuneError, error_from_problems, first_names, unknown_name, word_list
from ..files import explain_write_errors, user_path, write_jsonl
from ..templates import words_to_tag
from .data.columns import INPUT_TYPES, TASK_COLUMNS, TYPE_DESCRIPTIONS, columns_option, value_fits
from .data.readers import (
    SPREADSHEETS,
    STDIN,
    UnreadableFileError,
    data_suffix,
    has_lone_surrogate,
    read_rows,
    text_lines,
)
from .data.shapes import join_words
from .run_folder import RunFolder, open_run

logger = logging.getLogger("deltune")

Input = str | Sequence[str] | Mapping[str, Any]
"""A text; a text and its pair, or tokens; or every input by its role."""

DESCRIPTIONS = {("text",): "one text, no pair,", ("text", "pair"): "a text and its pair"}
"""The content of a row, by the roles of its inputs, where the names of the roles would say less."""

MAX_ROWS_LISTED = 10


def input_columns(kind: str, run: RunFolder) -> dict[str, str]:
    """Return the columns of the inputs that a run was trained on, by role."""
    if kind == "chat":
        raise DeltuneError(f"{run.folder} was trained on conversations: talk to it by deltune chat or deltune generate")
    columns = run.data.columns
    roles = [c.role for c in TASK_COLUMNS[kind] if c.role in INPUT_TYPES and (c.role in columns or not c.optional)]
    return {role: columns.get(role, role) for role in roles}


def columns_from_inputs(
    kind: str, run: RunFolder, inputs: Sequence[Input], numbers: Sequence[int] = ()
) -> dict[str, list[Any]]:
    """Return the values of inputs by role."""
    roles = list(input_columns(kind, run))
    rows = [_by_role(value, roles, run) for value in inputs]
    numbered = list(zip(numbers or range(1, len(rows) + 1), rows, strict=True))
    misfits = [
        str(number)
        for number, row in numbered
        if set(row) != set(roles) or not all(value_fits(INPUT_TYPES[role], row[role]) for role in roles)
    ]
    if misfits:
        expected = DESCRIPTIONS.get(tuple(roles)) or ", ".join(
            f"{role} ({TYPE_DESCRIPTIONS[INPUT_TYPES[role]]})" for role in roles
        )
        listed = ", ".join(misfits[:MAX_ROWS_LISTED])
        raise DeltuneError(f"run {run.folder.name} takes {expected} in every row; row {listed} has something else")
    texts = [(number, row[role]) for number, row in numbered for role in roles]
    if broken := [
        str(number) for number, text in texts if any(map(has_lone_surrogate, [text] if isinstance(text, str) else text))
    ]:
        raise DeltuneError(
            f"row {', '.join(broken[:MAX_ROWS_LISTED])} holds half a character (a lone surrogate); give whole texts"
        )
    return {role: [row[role] for row in rows] for role in roles}


def _by_role(value: Input, roles: Sequence[str], run: RunFolder) -> dict[str, Any]:
    """Return an input by its roles, whether it has all of them or not; a text for a list of texts is split into words.

    It is split as the texts of the run were: where they came with spans, marks stand apart from words.

    Values beyond the roles are named by their numbers, so that they are noticed.
    """
    words = {*roles} - {"task"} == {"tokens"}
    if isinstance(value, Mapping):
        row = dict(value)
    elif words or isinstance(value, str) or not isinstance(value, Sequence):
        row = {roles[0]: value}
    else:
        row = dict(zip([*roles, *map(str, range(len(value)))], value, strict=False))
    row |= {"task": str(row["task"])} if "task" in row else {}
    if words and isinstance(row.get(roles[0]), str):
        row[roles[0]] = words_to_tag(row[roles[0]], run.data.columns)
    return row


def inputs_from_texts(
    texts: Sequence[str], pairs: Sequence[str], task: str | None, run: Path, base: str | None = None
) -> list[dict[str, Any]]:
    """Return the texts of the command line, all of one task where the run has tasks, as inputs with ids."""
    inputs: list[Input] = [list(both) for both in zip(texts, pairs, strict=True)] if pairs else list(texts)
    if task is not None:
        opened = open_run(run, base, pairs=bool(pairs))
        roles = [role for role in input_columns(opened.data.kind, opened) if role != "task"]
        inputs = [{**_by_role(value, roles, opened), "task": task} for value in inputs]
    return [{"id": str(i), "input": value} for i, value in enumerate(inputs, 1)]


ANSWER_FIELDS = ("input", "prediction", "scores")
"""The fields that an answer adds to its row of a file; of a run on spans also entities."""


def inputs_from_file(
    path: Path, run: Path, base: str | None = None, columns: str | None = None
) -> list[dict[str, Any]]:
    """Read inputs from a file, each with its id and with the columns of its row that are not read.

    `columns` names those that are read, such as "text=a", as in the data of a run [by default as the run does].
    """
    path = path if path == STDIN else user_path(path, "file")
    if path != STDIN and not path.is_file():
        files = [each.name for each in path.parent.glob("*") if each.is_file()]
        where = "this folder" if path.parent == Path() else str(path.parent)
        raise DeltuneError(unknown_name("file", path.name, files, where=where))
    if data_suffix(path).partition(".gz")[0] in ("", ".txt") and path.suffix.lower() not in SPREADSHEETS:
        return _inputs_from_lines(path)
    table = read_rows(path)
    pairs = split_commas(columns or "")
    run_dir = open_run(run, base, pairs="pair" in (*table.columns, *pairs), models=True)
    by_role = input_columns(run_dir.data.kind, run_dir)
    sentence = run_dir.data.columns.get("sentence")
    if sentence in table.columns or (sentence and "sentence" in pairs):
        by_role = {"sentence": str(sentence), **by_role}
    answers = [c.role for c in TASK_COLUMNS[run_dir.data.kind] if c.role not in by_role]
    named = pairs if isinstance(pairs, Mapping) else dict(zip(by_role, pairs, strict=False))
    if wrong := [unknown_name("role of a column", r, by_role) for r in named if r not in (*by_role, *answers)]:
        raise error_from_problems("--columns", wrong)
    by_role |= {role: column for role, column in named.items() if role in by_role}
    missing = [
        unknown_name("column", column, table.columns, where=path.name)
        for column in by_role.values()
        if column not in table.columns
    ]
    if missing:
        option = columns_option(by_role)
        raise DeltuneError(f"{' '.join(missing)} What is read is {option}: give the names of this file in the same way")
    read = word_list([f"{column} ({role})" for role, column in by_role.items()])
    unread = [c for c in table.columns if c not in by_role.values()]
    fields = (*ANSWER_FIELDS, "entities") if "spans" in run_dir.data.columns else ANSWER_FIELDS
    replaced = [c for c in unread if c in fields or (c == "id" and not table.has_ids)]
    no_json = [c for c in unread if c in table.rows.no_json and c not in (*replaced, "id")]
    others = [c for c in unread if c not in (*replaced, *no_json, "id")]
    fates = {
        "written with each prediction": others,
        "left out, as the result has its own": replaced,
        "left out, as JSON has no such values": no_json,
    }
    if "sentence" in by_role:
        fates, others = {"left out, as a row of the result is a sentence": [c for c in unread if c != "id"]}, []
    listed = "".join(f"; {fate}: {first_names(names, 5)}" for fate, names in fates.items() if names)
    logger.info("%s: columns that are read: %s%s", path.name, read, listed)
    if "sentence" in by_role:
        problems: list[str] = []
        table, by_role = join_words(table, by_role, problems), {"tokens": "tokens"}
        if problems:
            raise error_from_problems(str(path), problems)
    inputs = []
    for name, (line, row) in zip(table.row_ids(), table.rows, strict=True):
        value = {role: row.get(column) for role, column in by_role.items()}
        read_value = _by_role(value, list(by_role), run_dir)
        for role, column in by_role.items():
            if not value_fits(INPUT_TYPES[role], read_value[role]):
                raise DeltuneError(
                    f"{table.location(line)}: column {column!r} must be {TYPE_DESCRIPTIONS[INPUT_TYPES[role]]}"
                )
        inputs.append({"id": name, "input": value} | {c: _finite(row[c]) for c in others if c in row})
    return inputs


def _finite(value: Any) -> Any:
    """Return a value with None for the numbers that JSON does not have, such as NaN."""
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _inputs_from_lines(path: Path) -> list[dict[str, Any]]:
    """Read an input from each line that is not blank."""
    try:
        lines = [(number, line.rstrip("\r\n")) for number, line in text_lines(path)]
    except (OSError, UnreadableFileError) as error:
        raise DeltuneError(f"{path} cannot be read: {error}") from error
    inputs = [{"id": str(number), "input": line} for number, line in lines if line.strip()]
    if not inputs:
        raise DeltuneError(f"{path} is empty: it has no texts")
    if len(inputs) < len(lines):
        skipped = len(lines) - len(inputs)
        warnings.warn(f"{path}: {skipped} blank lines are left out; the ids are the numbers of lines", stacklevel=3)
    return inputs


def write_predictions(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write predictions as JSON lines, whole or not at all."""
    path = user_path(path, "output")
    with explain_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_jsonl(path, rows)
