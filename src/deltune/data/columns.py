"""Which columns of a data set a kind of task reads: given, told by meta.json, or found by their usual names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import excerpt, unknown_name
from .readers import DataFile, short_repr

LABELS = ("label", "labels", "intent", "class", "category", "target", "sentiment", "topic")
IDS = ("id", "idx", "uid", "guid", "index")
LOOKED_AT = 200  # rows of the first file that tell which columns are text

Fields = Mapping[str, str] | Sequence[str]
Holds = Literal["text", "texts", "label", "labels", "index", "answers"]

HELD: Mapping[Holds, str] = {
    "text": "text",
    "texts": "a list of texts",
    "label": "a label",
    "labels": "a list of labels",
    "index": "the index of a choice",
    "answers": "a text or a list of texts",
}


@dataclass(frozen=True)
class Column:
    """What a kind of task wants in one column, and how such columns are usually called."""

    role: str
    holds: Holds
    usual: tuple[str, ...]
    optional: bool = False


KINDS: Mapping[str, tuple[Column, ...]] = {
    "classification": (
        Column("text", "text", ()),
        Column("pair", "text", (), optional=True),
        Column("label", "label", LABELS),
    ),
    "tagging": (
        Column("tokens", "texts", ("tokens", "words")),
        Column("tags", "labels", ("tags", "ner_tags", "pos_tags", "labels")),
    ),
    "choice": (
        Column("context", "text", ("context", "passage", "premise"), optional=True),
        Column("question", "text", ("question", "ctx", "query")),
        Column("choices", "texts", ("choices", "options", "endings", "answers")),
        Column("answer", "index", ("answer", "label", "gold")),
    ),
    "generation": (
        Column("source", "text", ("source", "document", "dialogue", "article", "question", "input", "prompt")),
        Column(
            "targets", "answers", ("targets", "summary", "answers", "references", "highlights", "output", "response")
        ),
    ),
    "language": (Column("text", "text", ("text", "content")),),
}
"""The kinds of tasks and their columns, in the order of a listing."""

INPUTS: Mapping[str, Holds] = {
    column.role: column.holds for own in KINDS.values() for column in own if column.holds in ("text", "texts")
}
"""What is told to a model, and what it holds; every other role is what a model should answer."""

FOUND_BY_NAME = ("tagging", "choice", "generation")
"""Kinds that the usual names of their columns tell; classification looks at the contents too."""


def guess_task_kind(first: DataFile, fields: Fields | None) -> str:
    """The kind of task that a file's columns are of, as far as names tell; else classification."""
    there = [c for c in fields or first.columns if c in first.columns] or first.columns
    for kind in FOUND_BY_NAME:
        used = _by_name(kind, there)
        wanted = {column.role for column in KINDS[kind] if not column.optional}
        if kind == "generation" and any(c.lower() in LABELS and c not in used.values() for c in there):
            continue  # two texts and a label
        if wanted <= set(used) and first.rows and not wrong(first.rows[0][1], used, kind):
            return kind
    return "classification"


def choose_columns(
    kind: str, first: DataFile, asked: Fields | None, fields: Fields | None, problems: list[str]
) -> dict[str, str]:
    """Role -> column: as asked for or as meta.json says, else found in the first file; empty if that fails."""
    columns = KINDS[kind]
    given = asked or (fields if isinstance(fields, Mapping) else None)
    if given:
        return _given(columns, given, problems)
    if not first.rows:
        return {}
    there = [c for c in fields or first.columns if c in first.columns] or first.columns
    if kind == "classification":
        return _of_classification(first, there, problems)
    used = _by_name(kind, there)
    missing = [c for c in columns if not c.optional and c.role not in used]
    for column in missing:
        problems.append(
            f"{first.name} has no column named {' or '.join(column.usual)}, for the {column.role} of {kind}. Its "
            f"columns: {', '.join(first.columns)}. Say which is which: columns {_example(columns)}"
        )
    return {} if missing else used


def _given(columns: Sequence[Column], given: Fields, problems: list[str]) -> dict[str, str]:
    roles = [c.role for c in columns]
    wanted = {c.role for c in columns if not c.optional}
    ordered = roles if len(given) == len(roles) else [c.role for c in columns if not c.optional]
    used = dict(given) if isinstance(given, Mapping) else dict(zip(ordered, given, strict=False))
    found = [unknown_name("role of a column", role, roles) for role in used if role not in roles]
    if wanted - set(used) or len(set(used.values())) < len(given):
        listed = " ".join(f"({c.role},)" if c.optional else f"{c.role}," for c in columns).removesuffix(",")
        found.append(f"columns are different ones for {listed}; given were {excerpt(given)}")
    problems += found
    return {} if found else {role: used[role] for role in roles if role in used}


def _by_name(kind: str, there: Sequence[str]) -> dict[str, str]:
    used: dict[str, str] = {}
    for column in KINDS[kind]:
        named = [c for usual in column.usual for c in there if c.lower() == usual and c not in used.values()]
        if named:
            used[column.role] = named[0]
    return used


def _of_classification(first: DataFile, there: Sequence[str], problems: list[str]) -> dict[str, str]:
    label = next((c for name in LABELS for c in there if c.lower() == name), "")
    texts = [c for c in there if c != label and c.lower() not in (*LABELS, *IDS) and _is_text(first, c)]
    if len(texts) == 2:  # a key of letters and digits beside a text is no text
        texts = [c for c in texts if not _is_key(first, c)] or texts
    listed, todo = ", ".join(first.columns), "Say which is which: columns text=…, (pair=…,) label=…"
    if not label:
        problems.append(
            f"{first.name} has no column named {' or '.join(LABELS)}. Its columns: {listed}. {todo}; for another kind "
            f"of task give task= one of {', '.join(kind for kind in KINDS if kind != 'classification')}"
        )
    if len(texts) not in (1, 2):
        which = f"{len(texts)} columns of text ({', '.join(texts)})" if texts else "no column of text"
        problems.append(f"{first.name} has {which} where one or two are wanted. Its columns: {listed}. {todo}")
    if not label or len(texts) not in (1, 2):
        return {}
    return {**dict(zip(("text", "pair"), texts, strict=False)), "label": label}


def _is_text(file: DataFile, column: str) -> bool:
    """Whether a column holds strings that are not numbers, and more than a few different ones (else: a category)."""
    values = [row.get(column) for _, row in file.rows[:LOOKED_AT]]
    strings = [v for v in values if isinstance(v, str) and not re.fullmatch(r"\s*[-+]?[\d.]*\s*", v)]
    return bool(strings) and 20 * len(set(strings)) >= len(strings)


def _is_key(file: DataFile, column: str) -> bool:
    """Whether every value is a single word with a digit in it, and no two are the same."""
    values = [str(row.get(column, "")) for _, row in file.rows[:LOOKED_AT]]
    return len(set(values)) == len(values) and all(re.fullmatch(r"\S*\d\S*", value) for value in values)


def _example(columns: Sequence[Column]) -> str:
    return ", ".join(f"{c.role}=…" for c in columns)


def check_columns(files: Mapping[str, DataFile], kind: str, used: Mapping[str, str], problems: list[str]) -> None:
    """Every split has every column, and in every row they hold what the kind wants."""
    for file in files.values():
        missing = [column for column in used.values() if file.rows and column not in file.columns]
        problems += [unknown_name("column", column, file.columns, where=file.name) for column in missing]
        for place, row in file.rows if not missing else ():
            problems += [f"{file.at(place)}: {problem}" for problem in wrong(row, used, kind)]


def wrong(row: Mapping[str, Any], used: Mapping[str, str], kind: str) -> list[str]:
    """What a row lacks of what its columns should hold. A label is judged with all the others (labels.py)."""
    found = []
    for column in KINDS[kind]:
        name = used.get(column.role)
        if name is None:
            continue
        value = row.get(name)
        if name not in row:
            found.append(f"column {name!r} is missing")
        elif not value_fits(column.holds, value):
            found.append(f"column {name!r} is not {HELD[column.holds]} but {short_repr(value)}")
        elif any(map(has_lone_surrogate, _texts(value))):
            found.append(f"column {name!r} holds half a character (a lone surrogate)")
    if isinstance(row.get("id"), str) and has_lone_surrogate(row["id"]):
        found.append("column 'id' holds half a character (a lone surrogate)")
    if not found and kind == "tagging" and len(row[used["tokens"]]) != len(row[used["tags"]]):
        found.append(
            f"{len(row[used['tokens']])} tokens and {len(row[used['tags']])} tags; give one tag for each token"
        )
    if not found and kind == "choice" and not 0 <= int(row[used["answer"]]) < len(row[used["choices"]]):
        found.append(f"answer {row[used['answer']]} is no index of its {len(row[used['choices']])} choices")
    return found


def value_fits(what: Holds, value: Any) -> bool:
    """Whether a value is what a column should hold; a label is anything but a list."""
    if what == "text":
        return isinstance(value, str)
    if what == "texts":
        return isinstance(value, list) and bool(value) and all(isinstance(v, str) for v in value)
    if what == "labels":
        return isinstance(value, list) and all(isinstance(v, str | int) for v in value)
    if what == "index":
        return isinstance(value, int) or (isinstance(value, str) and value.isdecimal() and len(value) < 19)
    if what == "answers":
        return isinstance(value, str) or value_fits("texts", value)
    return not isinstance(value, list)


def has_lone_surrogate(text: str) -> bool:
    """Whether a text holds half a character (a lone surrogate), which no file can hold."""
    return not text.isascii() and re.search("[\ud800-\udfff]", text) is not None


def _texts(value: Any) -> list[str]:
    values = value if isinstance(value, list) else [value]
    return [v for v in values if isinstance(v, str)]
