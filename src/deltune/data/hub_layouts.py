"""How particular data sets of the hub are laid out: their splits, columns and labels, translated into ours."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .readers import DataFile, Row, short_repr

RowFunction = Callable[[Row], Any]
"""Computes a value from a row of the hub's data set."""

PARQUET_REVISION = "refs/convert/parquet"
"""The revision with the hub's own Parquet copy of a data set, CONFIGURATION/SPLIT/0000.parquet, which runs no code."""


@dataclass(frozen=True)
class HubLayout:
    """Where the hub has a data set, and how it differs from what `load_data` expects.

    Attributes:
        source: OWNER/NAME or OWNER/NAME@REVISION, either with :CONFIGURATION at its end.
        files: Split -> its files in the repository, for repositories whose splits `datasets` cannot find.
        splits: Our split -> the hub's. Default: those with the usual names.
        columns: Role -> the hub's column, or a function that computes its value.
        labels: Names in the order of their ids. Default: the hub's.
        grouped_splits: Splits in which rows with the same source become one row with all their targets.
        held_out: How many rows of train, always the same, become the validation split. For data sets without a
            validation split, or whose validation split replaces a test split without labels.
    """

    source: str
    files: Mapping[str, str] = field(default_factory=dict)
    splits: Mapping[str, str] = field(default_factory=dict)
    columns: Mapping[str, str | RowFunction] = field(default_factory=dict)
    labels: tuple[str, ...] = ()
    grouped_splits: tuple[str, ...] = ()
    held_out: int = 0

    @property
    def column_names(self) -> dict[str, str]:
        """Role -> column, after `apply_layout`."""
        return {role: column if isinstance(column, str) else role for role, column in self.columns.items()}


def parquet_files(*splits: str, configuration: str = "default") -> dict[str, str]:
    """Return split -> its files in the hub's own Parquet copy, for `HubLayout.files`."""
    return {split: f"{configuration}/{split}/*.parquet" for split in splits}


def apply_layout(files: dict[str, DataFile], layout: HubLayout, problems: list[str]) -> None:
    """Compute columns, group targets and hold rows out for validation, as a layout says, in place.

    Args:
        files: Split -> its rows, as the hub has them.
        layout: The layout of the data set.
        problems: What goes wrong is appended to it.
    """
    computed = {role: function for role, function in layout.columns.items() if not isinstance(function, str)}
    for file in files.values():
        for number, row in file.rows:
            try:
                row |= {role: function(row) for role, function in computed.items()}
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                problems.append(
                    f"{file.location(number)} is not laid out as it was ({short_repr(error)}). Its columns: "
                    f"{', '.join(row)}. Give data and columns instead of the task"
                )
                return
    for split in layout.grouped_splits:
        if split in files:
            files[split].rows = _group_targets(files[split].rows, layout.column_names)
    if layout.held_out and "train" in files:
        train = files["train"]
        sample = set(random.Random(0).sample(range(len(train.rows)), min(layout.held_out, len(train.rows) // 2)))
        held_out = [row for i, row in enumerate(train.rows) if i in sample]
        files["validation"] = DataFile("train (held out)", held_out, train.unit)
        train.rows = [row for i, row in enumerate(train.rows) if i not in sample]


def _group_targets(rows: Sequence[tuple[int, Row]], columns: Mapping[str, str]) -> list[tuple[int, Row]]:
    """Join the rows of each source into one, with all their targets."""
    source, targets = columns["source"], columns["targets"]
    groups: dict[str, tuple[int, Row]] = {}
    for number, row in rows:
        _, group = groups.setdefault(row[source], (number, {**row, targets: []}))
        group[targets] += [row[targets]] if isinstance(row[targets], str) else row[targets]
    return list(groups.values())


def nested_field(column: str, name: str) -> RowFunction:
    """Return a function of a row: the field `name` of the mapping in `column`, or of every mapping of a list there."""

    def field_of(row: Row) -> Any:
        value = row[column]
        return [item[name] for item in value] if isinstance(value, list) else value[name]

    return field_of


def list_of_columns(*columns: str) -> RowFunction:
    """Return a function of a row: the list of the values of several columns."""
    return lambda row: [row[column] for column in columns]


def first_non_empty(*columns: str) -> RowFunction:
    """Return a function of a row: the first value that is not empty among several columns, else the last one."""
    return lambda row: next(row[column] for column in columns if row[column] or column == columns[-1])


def index_in(column: str, order: Sequence[str]) -> RowFunction:
    """Return a function of a row: the index of the column's value in `order`; of B in A, B, C it is 1."""
    return lambda row: list(order).index(str(row[column]))


def format_triples(column: str) -> RowFunction:
    """Return a function of a row: its triples as "subject : relation : object | …".

    Args:
        column: The column of triples, each a list or a text "subject | relation | object".
    """

    def joined(row: Row) -> str:
        triples = [triple.split(" | ") if isinstance(triple, str) else triple for triple in row[column]]
        return " | ".join(" : ".join(triple) for triple in triples)

    return joined


def spans_to_bio_tags(tokens: str, spans: str, types: Mapping[str, str]) -> RowFunction:
    """Return a function of a row: the BIO tags of its tokens.

    Args:
        tokens: The column of tokens.
        spans: The column of entities, each {start, end, type} with an exclusive end.
        types: The hub's type of an entity -> ours.
    """

    def bio_tags(row: Row) -> list[str]:
        tags = ["O"] * len(row[tokens])
        for span in row[spans]:
            start, end, name = span["start"], span["end"], types[span["type"]]
            tags[start:end] = [f"B-{name}", *[f"I-{name}"] * (end - start - 1)]
        return tags

    return bio_tags
