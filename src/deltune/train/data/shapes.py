"""Labels in the shapes that files have them in: a word a row, spans of a text, columns of 0 and 1, lists in one text.

A shape is read into the rows of its kind of task: tokens with their tags, or a text with the list of its labels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

from ...errors import DeltuneError, excerpt, unknown_name
from ...files import parse_json
from ...models import OUTSIDE
from ...templates import split_words
from .columns import (
    ASK_COLUMNS,
    ID_COLUMN_NAMES,
    LABEL_COLUMN_NAMES,
    SAMPLED_ROWS,
    SENTENCE_COLUMN_NAMES,
    SEPARATORS,
    WORD_COLUMN_NAMES,
    ColumnNames,
    columns_option,
    first_named,
    text_columns,
)
from .readers import DataFile, RowsRead, short_repr
from .rows import Row

TAG_COLUMN_NAMES = ("tag", "tags", "ner", "ner_tag", "ner_tags", "label", "labels", "pos", "upos")
SPAN_COLUMN_NAMES = ("entities", "spans", "ents", "label", "labels")
SPAN_KEYS = (("start", "start_offset"), ("end", "end_offset"), ("label", "type", "entity", "labels"))
"""Names of where a span begins, where it ends, and of its label, where a span is an object."""
TRUE, FALSE = ("1", "1.0", "true"), ("0", "0.0", "false")

Reader = Callable[[Row, Mapping[str, str]], Row]
"""read(row, columns) returns a row with the columns of its kind."""


@dataclass(frozen=True)
class RowLayout:
    """A shape of rows.

    Attributes:
        name: What the first lines of a run call it.
        kind: The kind of task that it is for.
        columns: Role -> column of the file.
        read: read(row, columns) returns the row with the columns of its kind.
        labels: The names of all labels, where the columns have them.
    """

    name: str
    kind: str
    columns: Mapping[str, str]
    read: Reader | None = None
    labels: tuple[str, ...] = ()

    @property
    def source_columns(self) -> list[str]:
        """The columns of the file that are read."""
        return [c for role, c in self.columns.items() if role != "labels" or not self.labels] + list(self.labels)


def choose(first: DataFile, kind: str | None, names: ColumnNames | None) -> RowLayout | None:
    """Return the shape of a file's rows; None where they are read as they are."""
    by_role = dict(names) if isinstance(names, Mapping) else {}
    for name, needed, read in TAGGED if kind in (None, "tagging") else ():
        if needed[0] not in by_role:
            continue
        if {*by_role} != {*needed}:
            todo = columns_option({role: by_role.get(role, "…") for role in needed})
            raise DeltuneError(f"columns of {name} are {', '.join(needed)}, and here are {', '.join(by_role)}: {todo}")
        return RowLayout(name, "tagging", by_role, read)
    if "+" in by_role.get("labels", "") and by_role["labels"] not in first.columns:
        return _columns_of_flags(by_role, tuple(by_role["labels"].split("+")))
    if names or not first.rows:
        return None
    if kind in (None, "tagging"):
        words = {
            role: first_named(first.columns, usual)
            for role, usual in (
                ("sentence", SENTENCE_COLUMN_NAMES), ("tokens", WORD_COLUMN_NAMES), ("tags", TAG_COLUMN_NAMES),
            )
        }  # fmt: skip
        are_texts = all(isinstance(row.get(words["tokens"]), str) for _, row in first.rows[:1])
        if all(words.values()) and are_texts and _numbers_sentences(first, words["sentence"]):
            return RowLayout("a word a row", "tagging", words)
        spans = next((c for c in first.columns if c.lower() in SPAN_COLUMN_NAMES and _holds_spans(first, c)), None)
        texts = text_columns(first, [c for c in first.columns if c != spans])
        if spans and len(texts) == 1:
            return RowLayout("spans of a text", "tagging", {"tokens": texts[0], "spans": spans}, _read_spans)
    if kind in (None, "multilabel") and not first_named(first.columns, LABEL_COLUMN_NAMES):
        flags = [c for c in first.columns if c.lower() not in ID_COLUMN_NAMES and _is_flag(first, c)]
        texts = text_columns(first, [c for c in first.columns if c not in flags])
        if len(flags) > 1 and len(texts) in (1, 2):
            roles = {**dict(zip(("text", "pair"), texts, strict=False)), "labels": "+".join(flags)}
            return _columns_of_flags(roles, tuple(flags))
    return None


def read_files(files: Mapping[str, DataFile], shape: RowLayout, problems: list[str]) -> dict[str, DataFile]:
    """Return files whose rows have the columns of the shape's kind, by the names of their roles."""
    result = {}
    for split, file in files.items():
        if missing := [c for c in shape.source_columns if file.rows and c not in file.columns]:
            problems += [
                unknown_name("column", column, file.columns, where=file.name) + ASK_COLUMNS for column in missing
            ]
            result[split] = file
        elif shape.read is None:
            result[split] = join_words(file, shape.columns, problems)
        else:
            result[split] = file.with_rows(_read_rows(file, shape.read, shape.columns, problems))
    return result


def _read_rows(file: DataFile, read: Reader, columns: Mapping[str, str], problems: list[str]) -> RowsRead:
    for number, row in file.rows:
        try:
            yield number, _with_id(row, read(row, columns))
        except ValueError as error:
            problems.append(f"{file.location(number)}: {error}")


def join_words(file: DataFile, columns: Mapping[str, str], problems: list[str]) -> DataFile:
    """Return a file with a row for each sentence, of one with a row for each word; a blank continues the sentence."""

    def sentences() -> RowsRead:
        before: set[int] = set()
        first, whole = 0, Row()
        for number, row in file.rows:
            sentence = row.get(columns["sentence"])
            if not whole or (sentence not in (None, "") and sentence != whole["id"]):
                if whole:
                    yield first, whole
                if hash(str(sentence)) in before:
                    problems.append(
                        f"{file.location(number)}: sentence {excerpt(sentence)} goes on behind another; keep its words "
                        "together"
                    )
                before.add(hash(str(sentence)))  # -1 and -2 have the same hash
                first, whole = number, {"id": sentence}
            for role in ("tokens", "tags"):
                if columns.get(role) in row:
                    whole.setdefault(role, []).append(row[columns[role]])
        if whole:
            yield first, whole

    return file.with_rows(sentences())


def _read_spans(row: Row, columns: Mapping[str, str]) -> Row:
    """Return the tokens of a text and their tags in IOB2; a word is cut where a span begins or ends inside it."""
    text, spans = row.get(columns["tokens"]), _parsed(row.get(columns["spans"]))
    if not isinstance(text, str):
        raise ValueError(f"column {columns['tokens']!r} is not text but {short_repr(text)}")
    if not isinstance(spans, list):
        raise ValueError(f"column {columns['spans']!r} is not a list of spans but {short_repr(spans)}")
    tags: dict[int, str] = {}
    cuts, last = {0, len(text)}, 0
    for start, end, label in sorted(map(_span, spans), key=lambda span: span[0]):
        if not last <= start < end <= len(text):
            reason = "overlaps the span before it" if start < last else f"is not inside the {len(text)} characters"
            raise ValueError(f"the span {start} to {end} ({label}) {reason}")
        cuts |= {start, end}
        tags.update({place: f"I-{label}" for place in range(start, end)})
        first = next((place for place in range(start, end) if not text[place].isspace()), start)
        tags[first] = f"B-{label}"
        last = end
    ordered = sorted(cuts)
    words = [(a + i, a + j) for a, b in pairwise(ordered) for i, j in split_words(text[a:b])]
    return {
        "tokens": [text[i:j] for i, j in words],
        "tags": [tags.get(i, OUTSIDE) for i, _ in words],
    }


TAGGED = (("a word a row", ("sentence", "tokens", "tags"), None), ("spans of a text", ("spans", "tokens"), _read_spans))
"""Shapes of tagging that are read by role: their names, roles, the first of which is theirs alone, and readers."""


def _span(span: Any) -> tuple[int, int, str]:
    """Return a span that is an object or a list as start, end and label."""
    if isinstance(span, dict):
        values: list[Any] = [next((span[name] for name in names if name in span), None) for names in SPAN_KEYS]
    else:
        values = list(span) if isinstance(span, list) else []
    if len(values) == 3 and isinstance(values[2], list) and len(values[2]) == 1:
        values[2] = values[2][0]
    if len(values) != 3 or not (isinstance(values[2], str) and all(type(value) is int for value in values[:2])):
        raise ValueError(
            f'a span must be {{"start": 0, "end": 4, "label": "…"}} or [0, 4, "…"], not {short_repr(span)}'
        )
    return values[0], values[1], values[2]


def _columns_of_flags(roles: Mapping[str, str], labels: tuple[str, ...]) -> RowLayout:
    def read(row: Row, columns: Mapping[str, str]) -> Row:
        if wrong := [c for c in labels if str(row.get(c)).lower() not in (*TRUE, *FALSE)]:
            raise ValueError(f"column {wrong[0]!r} must be 0 or 1, not {short_repr(row.get(wrong[0]))}")
        texts = {role: row.get(column) for role, column in columns.items() if role != "labels"}
        return {**texts, "labels": [c for c in labels if str(row[c]).lower() in TRUE]}

    return RowLayout("columns of 0 and 1", "multilabel", roles, read, labels)


def with_lists(
    files: Mapping[str, DataFile], columns: Sequence[str], separator: str | None, problems: list[str]
) -> dict[str, DataFile]:
    """Return files whose texts in some columns are lists: JSON, or parts with a separator, " " for any blanks."""

    def values() -> Iterator[str]:
        rows = (row for file in files.values() for _, row in file.rows)
        return (row[c] for row in rows for c in columns if isinstance(row.get(c), str))

    bare = (value for value in values() if value.strip() and not value.lstrip().startswith("["))
    if separator is None and (some := [*islice(bare, SAMPLED_ROWS)]):
        mark = max(SEPARATORS, key=lambda mark: sum(mark in value for value in some))
        problems.append(
            f"{next(iter(files.values())).name} has its labels in one text, such as {excerpt(max(some, key=len), 60)}: "
            f"say what stands between two of them, such as --label-separator {mark!r}"
        )
        return dict(files)
    if separator == " " and any(values()) and all(len(value.split()) == 1 for value in values()):
        option = columns_option({"sentence": "…", **dict(zip(("tokens", "tags"), columns, strict=False))})
        problems.append(
            f"every row of {next(iter(files.values())).name} has one word. Say which column numbers the sentences: "
            f"{option}"
        )
    broken: list[str] = []

    def lists(file: DataFile) -> RowsRead:
        for number, row in file.rows:
            try:
                changed = {c: _as_list(row[c], separator) for c in columns if isinstance(row.get(c), str)}
                yield number, {**row, **changed}
            except ValueError as error:
                broken.append(f"{file.location(number)}: {error}")

    result = {split: file.with_rows(lists(file)) for split, file in files.items()}
    if broken:
        problems.append(broken[0] + (f"; so in {len(broken) - 1} more rows" if broken[1:] else ""))
    return result


def _as_list(text: str, separator: str | None) -> list[Any]:
    parsed = _parsed(text)
    if isinstance(parsed, list):
        return parsed
    return [part.strip() for part in text.split(None if separator == " " else separator) if part.strip()]


def _parsed(value: Any) -> Any:
    """Return the list that a text holds as JSON; anything else as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        return parse_json(value)
    except ValueError as error:
        raise ValueError(
            f"{excerpt(value, 40)} is no list in JSON; pandas writes one by to_json(FILE, orient='records', lines=True)"
        ) from error


def _numbers_sentences(first: DataFile, column: str) -> bool:
    """Return whether most values of a column stand in several rows, or only in the first, and none is a sentence."""
    counts = Counter(str(row.get(column) or "") for _, row in first.rows)
    repeated = sum(count > 1 for count in counts.values())
    return ("" in counts or 2 * repeated >= len(counts)) and all(len(value.split()) < 5 for value in counts)


def _holds_spans(first: DataFile, column: str) -> bool:
    """Return whether a column holds lists of spans, and some span."""
    for _, row in first.rows[:SAMPLED_ROWS]:
        try:
            spans = _parsed(row.get(column))
            if isinstance(spans, list) and spans:
                _span(spans[0])
                return True
        except ValueError:
            return False
    return False


def _is_flag(first: DataFile, column: str) -> bool:
    """Return whether all values of a column are 0 or 1."""
    return all(str(row.get(column)).lower() in (*TRUE, *FALSE) for _, row in first.rows)


def _with_id(row: Row, made: Row) -> Row:
    return {**({"id": row["id"]} if isinstance(row.get("id"), str | int) else {}), **made}
