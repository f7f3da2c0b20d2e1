"""Data sets of the hub that are laid out in their own way, in terms of ours: splits, columns, labels."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .readers import DataFile, Row, short_repr

Pick = Callable[[Row], Any]
"""What makes a value of ours of a row of theirs."""

EXPORTED = "refs/convert/parquet"
"""The revision of a data set that the hub has made by itself: CONFIGURATION/SPLIT/0000.parquet, no code."""


@dataclass(frozen=True)
class Layout:
    """Where the hub has a data set, and what is other than usual there.

    source: OWNER/NAME, OWNER/NAME@REVISION, either with :CONFIGURATION at its end.
    files: split -> its files there, for a repository whose splits cannot be found by themselves.
    splits: ours -> theirs; default those of the usual names.
    columns: role -> column, or what makes its value.
    labels: names in the order of their ids; default the hub's.
    gathered: splits in which rows of the same source are one row with all their targets.
    held_out: so many rows of train, always the same, are the validation split: where validation takes the place of a
    test without labels, or there is none.
    """

    source: str
    files: Mapping[str, str] = field(default_factory=dict)
    splits: Mapping[str, str] = field(default_factory=dict)
    columns: Mapping[str, str | Pick] = field(default_factory=dict)
    labels: tuple[str, ...] = ()
    gathered: tuple[str, ...] = ()
    held_out: int = 0

    @property
    def named(self) -> dict[str, str]:
        """Role -> column, after `arrange`."""
        return {role: column if isinstance(column, str) else role for role, column in self.columns.items()}


def parquet_files(*splits: str, configuration: str = "default") -> dict[str, str]:
    """The files of the hub's own Parquet copy."""
    return {split: f"{configuration}/{split}/*.parquet" for split in splits}


def apply_layout(files: dict[str, DataFile], layout: Layout, problems: list[str]) -> None:
    """Make the values of columns that have to be made, gather targets, and hold rows out for validation, in place."""
    made = {role: pick for role, pick in layout.columns.items() if not isinstance(pick, str)}
    for file in files.values():
        for place, row in file.rows:
            try:
                row |= {role: pick(row) for role, pick in made.items()}
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                problems.append(
                    f"{file.at(place)} is not laid out as it was ({short_repr(error)}). Its columns: {', '.join(row)}. "
                    "Give "
                    "data and columns instead of the task"
                )
                return
    for split in layout.gathered:
        if split in files:
            files[split].rows = _gathered(files[split].rows, layout.named)
    if layout.held_out and "train" in files:
        train = files["train"]
        drawn = set(random.Random(0).sample(range(len(train.rows)), min(layout.held_out, len(train.rows) // 2)))
        files["validation"] = DataFile(
            "train (held out)", [r for i, r in enumerate(train.rows) if i in drawn], train.unit
        )
        train.rows = [r for i, r in enumerate(train.rows) if i not in drawn]


def _gathered(rows: Sequence[tuple[int, Row]], named: Mapping[str, str]) -> list[tuple[int, Row]]:
    found: dict[str, tuple[int, Row]] = {}
    for place, row in rows:
        value = row[named["targets"]]
        own = found.setdefault(row[named["source"]], (place, {**row, named["targets"]: []}))
        own[1][named["targets"]] += [value] if isinstance(value, str) else value
    return list(found.values())


def nested_field(column: str, name: str) -> Pick:
    """The value `name` of a mapping; of a list of mappings, or of a mapping of lists, the list of its values."""

    def pick(row: Row) -> Any:
        value = row[column]
        return [one[name] for one in value] if isinstance(value, list) else value[name]

    return pick


def list_of_columns(*columns: str) -> Pick:
    """A list of what several columns hold."""
    return lambda row: [row[column] for column in columns]


def first_non_empty(*columns: str) -> Pick:
    """What the first of these columns that is not empty holds."""
    return lambda row: next(row[column] for column in columns if row[column] or column == columns[-1])


def index_in(column: str, order: Sequence[str]) -> Pick:
    """The place of a value in an order: of B in A, B, C it is 1."""
    return lambda row: list(order).index(str(row[column]))


def format_triples(column: str) -> Pick:
    """Triples, each a list or a text "subject | relation | object", as "subject : relation : object | …"."""

    def pick(row: Row) -> str:
        return " | ".join(" : ".join(t.split(" | ") if isinstance(t, str) else t) for t in row[column])

    return pick


def spans_to_bio_tags(tokens: str, spans: str, types: Mapping[str, str]) -> Pick:
    """BIO tags of spans {start, end, type}, their end exclusive; types: theirs -> ours."""

    def pick(row: Row) -> list[str]:
        tags = ["O"] * len(row[tokens])
        for span in row[spans]:
            inner = types[span["type"]]
            tags[span["start"] : span["end"]] = [f"B-{inner}", *[f"I-{inner}"] * (span["end"] - span["start"] - 1)]
        return tags

    return pick
