"""The names of labels and the ids of every row's label, or of its tags."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..errors import excerpt, nearest, unknown
from .files import File, brief

Ids = dict[str, list[list[int]]]
"""Label ids of every row of every split; a class is a list of one."""


def ids_of(
    files: Mapping[str, File], column: str, known: Sequence[str] | None, problems: list[str]
) -> tuple[tuple[str, ...], Ids]:
    """The label names, and the label ids of every split whose labels are not hidden (all -1, as in GLUE's tests)."""
    values = {split: _labels(file, column, problems) for split, file in files.items()}
    for split in [s for s, found in values.items() if found and {label for _, label in _flat(found)} == {"-1"}]:
        warnings.warn(f"every label in {files[split].name} is -1, so hidden; the split is left out", stacklevel=3)
        del values[split]
    train = {label for _, label in _flat(values.get("train", []))}
    numbers = all(map(_is_id, train))
    names = tuple(known or sorted(train, key=lambda label: (int(label) if numbers else 0, label != "O", label)))
    if len(set(map(str, names))) < len(names) or not all(isinstance(name, str) for name in names):
        problems.append(f"label names are different strings, not {excerpt(list(names))}")
        return (), {}
    if len(train) == 1:
        problems.append(
            f"{files['train'].name} has one label only, {excerpt(train.pop())}; a classifier needs two or more"
        )
        return (), {}
    ids = {name: i for i, name in enumerate(names)}
    if not any(map(_is_id, names)):  # then a number in the data is an index into the names
        ids |= {str(i): i for i in range(len(names))}
    trained = {ids.get(label) for label in train} if "train" in values else set(ids.values())
    for split, found in values.items():
        file, first = files[split], {label: n for n, label in reversed(_flat(found))}
        for label, count in Counter(label for _, label in _flat(found)).items():
            where = file.at(first[label]) + (f" and {count - 1} more" if count > 1 else "")
            if label not in ids and known:
                problems.append(unknown("label", label, names, where=where))
            elif ids.get(label) not in trained or label not in ids:
                guess = nearest(label, train)
                hint = f" Did you mean {guess!r}?" if guess else f" Labels there: {', '.join(sorted(train)[:20])}"
                problems.append(f"label {excerpt(label)} is in {where} but nowhere in {files['train'].name}.{hint}")
    return names, {
        split: [[ids.get(label, -1) for label in row] for _, row in found] for split, found in values.items()
    }


def with_labels(file: File, column: str) -> File:
    """The rows that have a label, where -1 says that there is none; all of them, where none has one."""
    kept = [(place, row) for place, row in file.rows if row.get(column) != -1]
    if not kept or len(kept) == len(file.rows):
        return file
    lost = len(file.rows) - len(kept)
    warnings.warn(f"{lost} of {len(file.rows)} rows of {file.name} have no label (-1) and are left out", stacklevel=3)
    return replace(file, rows=kept)


def _labels(file: File, column: str, problems: list[str]) -> list[tuple[int, list[str]]]:
    """The labels of each row as strings, with its line."""
    found = []
    for place, row in file.rows:
        value = row.get(column)
        values = value if isinstance(value, list) else [value]
        if all(isinstance(v, str | int) and v != "" for v in values):
            found.append((place, [str(v) for v in values]))
        elif column in row:
            problems.append(f"{file.at(place)}: a label is text or a whole number, not {brief(value)}")
    return found


def _flat(rows: Sequence[tuple[int, list[str]]]) -> list[tuple[int, str]]:
    return [(place, label) for place, labels in rows for label in labels]


def _is_id(label: str) -> bool:
    return re.fullmatch(r"-?\d{1,18}", label) is not None
