"""The columns that each kind of task reads, and how they are chosen: by the user, by meta.json or by usual names."""

from __future__ import annotations

import logging
import math
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ...errors import excerpt, unknown_name
from ...models import OUTSIDE
from .readers import DataFile, has_lone_surrogate, short_repr
from .tag_schemes import is_entity_tag

logger = logging.getLogger("deltune")

LABEL_COLUMN_NAMES = ("label", "labels", "intent", "class", "category", "target", "sentiment", "topic")
SCORE_COLUMN_NAMES = ("score", "similarity", "relatedness", "rating")
ID_COLUMN_NAMES = ("id", "idx", "uid", "guid", "index")
SENTENCE_COLUMN_NAMES = (
    "sentence_id", "sent_id", "sentence_idx", "sentence #", "sentence", "sent", "doc_id", "document_id",
)  # fmt: skip
"""Names of columns that say which words make a sentence, where every row is a word."""
WORD_COLUMN_NAMES = ("token", "tokens", "word", "words", "form")
OTHER_INPUT_NAMES = (
    "instruction", "instructions", "system", "system_prompt", "history", "messages", "conversation", "conversations",
    "chosen", "rejected",
)  # fmt: skip
"""Columns of other libraries' formats that belong to the input, or are all of it."""
SAMPLED_ROWS = 200
"""Rows of the first file that decide which columns are text."""

ColumnNames = Mapping[str, str] | Sequence[str]
"""The columns to use: by role, or in the order of the roles."""
LossOn = Literal["answers", "all", "last"]
"""Which tokens of a conversation are trained: of all answers, all, or of the last answer."""
ColumnType = Literal["text", "texts", "name", "label", "labels", "number", "index", "answers", "conversation", "spans"]

TYPE_DESCRIPTIONS: Mapping[ColumnType, str] = {
    "text": "text",
    "texts": "a list of texts",
    "name": "a name",
    "label": "a label",
    "labels": "a list of labels",
    "number": "a number (1.5 or 1,5; not 1,500)",
    "index": "the index of a choice",
    "answers": "a text or a list of texts",
    "conversation": "a conversation",
    "spans": "a list of spans",
}


@dataclass(frozen=True)
class Column:
    """A column that a kind of task reads.

    Attributes:
        role: What the column is for; also its name in the data that is read.
        type: What its values must be.
        usual_names: Names by which the column is recognised, in lower case.
        optional: Whether data may lack the column.
    """

    role: str
    type: ColumnType
    usual_names: tuple[str, ...]
    optional: bool = False


_COLUMNS: Mapping[str, tuple[Column, ...]] = {
    "classification": (
        Column("text", "text", ()),
        Column("pair", "text", (), optional=True),
        Column("label", "label", LABEL_COLUMN_NAMES),
    ),
    "multilabel": (
        Column("text", "text", ()),
        Column("pair", "text", (), optional=True),
        Column("labels", "labels", LABEL_COLUMN_NAMES),
    ),
    "regression": (
        Column("text", "text", ()),
        Column("pair", "text", (), optional=True),
        Column("score", "number", (*LABEL_COLUMN_NAMES, *SCORE_COLUMN_NAMES)),
    ),
    "tagging": (
        Column("tokens", "texts", ("tokens", "words")),
        Column("tags", "labels", ("tags", "ner_tags", "pos_tags", "labels")),
        Column("sentence", "label", (), optional=True),
        Column("spans", "spans", (), optional=True),
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
            "targets",
            "answers",
            ("targets", "target", "summary", "answers", "references", "highlights", "output", "response"),
        ),
    ),
    "language": (Column("text", "text", ("text", "content")),),
    "chat": (Column("conversation", "conversation", ()),),
    "preference": (Column("conversation", "conversation", ()),),
}

TASK = Column("task", "name", (), optional=True)
"""The task of a row, of several that a method such as `poly` learns. It is always named; conversations have none."""

TASK_COLUMNS: Mapping[str, tuple[Column, ...]] = {
    kind: columns if columns[0].type == "conversation" else (columns[0], *columns[1:-1], TASK, *columns[1:][-1:])
    for kind, columns in _COLUMNS.items()
}
"""Task kind -> its columns, in the order in which they are listed."""

INPUT_TYPES: Mapping[str, ColumnType] = {
    column.role: column.type
    for columns in TASK_COLUMNS.values()
    for column in columns
    if column.type in ("text", "texts", "name")
}
"""Role -> type of the columns that a model is given; all other columns hold what it should answer."""

KINDS_GUESSED_BY_NAME = ("tagging", "choice", "generation")
"""Task kinds that are recognised by the usual names of their columns."""
LABELLED_TEXTS = ("classification", "multilabel", "regression")
"""Task kinds that give a text, or a pair of texts, a label, several labels or a number."""


def guess_task_kind(first: DataFile, names: ColumnNames | None, requested: ColumnNames | None = None) -> str:
    """Guess the kind of task from the columns of a file."""
    available = [c for c in names or first.columns if c in first.columns] or first.columns
    if ".txt" in Path(first.name).suffixes:
        return "language"
    kinds = (*KINDS_GUESSED_BY_NAME, "multilabel", "regression")
    required = {kind: {c.role for c in TASK_COLUMNS[kind] if not c.optional} for kind in kinds}
    if requested:
        roles = set(requested) if isinstance(requested, Mapping) else set()
        return next((kind for kind in required if required[kind] <= roles), "classification")
    named = []
    for kind in KINDS_GUESSED_BY_NAME:
        columns = _columns_by_usual_name(kind, available)
        if not required[kind] <= set(columns):
            continue
        if kind == "generation" and _is_classification(first, columns, available):
            logger.warning(
                "%s is taken for a classification; with --task generation a model answers %s by %s", first.name,
                columns["source"], columns["targets"],
            )  # fmt: skip
        elif kind == "tagging" or (first.rows and not row_problems(first.rows[0][1], columns, kind)):
            return kind
        else:
            named.append(kind)
    label = first_named(available, LABEL_COLUMN_NAMES)
    if named and not label:
        return named[0]
    answer = label or first_named(available, SCORE_COLUMN_NAMES)

    def all_answers(are: Callable[[Any], bool]) -> bool:
        return all(are(row.get(answer)) for _, row in first.rows)

    if label and first.rows and all_answers(lambda value: isinstance(value, list) or str(value).startswith("[")):
        return "multilabel"
    if first.rows and all_answers(lambda value: value_fits("number", value)):
        return "classification" if all_answers(lambda value: as_number(value).is_integer()) else "regression"
    return "classification"


def first_named(available: Sequence[str], usual: Sequence[str]) -> str:
    """Return the column with the first of some usual names; "" for none."""
    return next((c for name in usual for c in available if c.lower() == name), "")


def unread_columns(first: DataFile, names: ColumnNames | None, chosen: Mapping[str, str]) -> tuple[str, ...]:
    """Return the columns that a guess of the columns leaves out, but for keys and numbers of rows."""
    ignored, columns = ("", "unnamed: 0", *ID_COLUMN_NAMES), first.columns
    return tuple(
        c for c in columns if c in (names or columns) and c.lower() not in ignored and c not in chosen.values()
    )


def doubts_of_columns(first: DataFile, kind: str, chosen: Mapping[str, str], unread: Sequence[str]) -> list[str]:
    """Return why guessed columns may be the wrong ones: others belong to the input, or are labels as well."""
    inputs = {
        name for columns in TASK_COLUMNS.values() for c in columns if c.role in INPUT_TYPES for name in c.usual_names
    }
    inputs = inputs - {*WORD_COLUMN_NAMES} | {*OTHER_INPUT_NAMES}
    doubtful: list[str] = []
    if kind in LABELLED_TEXTS:
        label = chosen[TASK_COLUMNS[kind][-1].role]
        others = LABEL_COLUMN_NAMES if label.lower() not in ("label", "labels") else ()
        doubtful = [c for c in unread if c.lower() in (*inputs, *others)]
    elif kind == "generation" and [chosen["source"].lower(), chosen["targets"].lower().rstrip("s")] != [
        "source",
        "target",
    ]:
        targets = TASK_COLUMNS["generation"][-1].usual_names
        doubtful = [c for c in unread if c.lower() in (*inputs, *targets) or _is_prose(first, c)]
    doubtful = [c for c in doubtful if _holds_text(first, c)]
    if kind == "multilabel" and "+" in chosen["labels"]:  # flags beside a number, which may be what is to be predicted
        doubtful += [c for c in unread if c.lower() in SCORE_COLUMN_NAMES or _share_of_numbers(first, c) == 1]
    if not doubtful:
        return []
    joined = "instruction" in map(str.lower, doubtful)
    return [
        f"{first.name} would be read as {kind}, and {', '.join(doubtful)} would not be read. If that is meant, give "
        f"{columns_option(chosen)}; if not, name other columns or another --task"
        + (", or join instruction and input into one column" if joined else "")
    ]


def task_kind_doubts(first: DataFile, kind: str, chosen: Mapping[str, str], labels: Sequence[str]) -> list[str]:
    """Return why a guessed kind of task may be the wrong one: rows are words of sentences, or text is a table."""
    rows = [row for _, row in first.rows[:SAMPLED_ROWS]]
    if kind in ("classification", "multilabel"):
        column = chosen[TASK_COLUMNS[kind][-1].role]
        word, sentence = (first_named(first.columns, n) for n in (WORD_COLUMN_NAMES, SENTENCE_COLUMN_NAMES))
        if word and sentence and not _are_tags(labels) and any(isinstance(row.get(word), str) for row in rows):
            words = columns_option({"sentence": "…", "tokens": word, "tags": column})
            pair = columns_option({"text": sentence, "pair": word, TASK_COLUMNS[kind][-1].role: column})
            return [
                f"{first.name} has a word in each row ({word!r}) beside {sentence!r}. If the words of a sentence stand "
                f"in several rows, say what numbers the sentences: {words}; "
                + (f"if a text and a word of it are to be classified, {pair}; " if chosen["text"] == sentence else "")
                + f"if not, --task {kind}"
            ]
        if 0.9 <= (share := _share_of_numbers(first, column)) < 1:
            other = next(row.get(column) for _, row in first.rows if not value_fits("number", row.get(column)))
            return [
                f"{share:.0%} of the column {column!r} of {first.name} are numbers, and others are not, such as "
                f"{short_repr(other)}. If a number is to be predicted, leave the other rows out, with --task "
                f"regression; if these are labels, give --task {kind}"
            ]
        if _are_tags(labels):
            tags = {"tokens": chosen["text"], "tags": column}
            return [
                f"{first.name} holds tags of words in its column {column!r}, such as "
                f"{', '.join(map(excerpt, labels[:3]))}. If each row is a word, say what numbers the sentences: "
                f"{columns_option({'sentence': '…', **tags})}; if it is a sentence with tags between blanks, "
                f"--task tagging {columns_option(tags)}; if it is to be classified by itself, --task {kind}"
            ]
        for mark in SEPARATORS if kind == "classification" else "":
            parts = {part.strip() for label in labels for part in label.split(mark)}
            if len(parts) < len(labels):
                joined = next(label for label in labels if mark in label)
                return [
                    f"{first.name} has labels with {mark!r} in them, such as {excerpt(joined)}. If these are several "
                    f"labels, give --task multilabel --label-separator {mark!r}; if not, --task classification"
                ]
        several = len(labels) >= MANY_LABELS and 2 * len(labels) > len(first.rows)
        if several and all(" " in label for label in labels):
            option = columns_option({"source": chosen["text"], "targets": chosen["label"]})
            return [
                f"{first.name} has {len(labels)} different texts in its column {chosen['label']!r}. If a model is to "
                f"write them, give --task generation {option}; if they are labels, --task classification"
            ]
        if several:
            return [
                f"{first.name} has {len(labels)} different labels in {len(first.rows)} rows, in its column {column!r}, "
                "which may be the ids of its rows. Name the column of the labels with --columns; if these are labels, "
                f"give --task {kind}"
            ]
    if kind == "language" and rows and (format := _format_of_lines(rows[0]["text"])):
        return [f"{first.name} is not running text but {format}; if it is to be read as it is, give --task language"]
    return []


SEPARATORS = "|;,"
"""Marks that may stand between several labels in one text."""
MANY_LABELS = 10
"""From so many labels on it is asked whether texts are labels."""


def _are_tags(labels: Sequence[str]) -> bool:
    """Return whether labels are tags of entities, or lists of them in one text."""
    parts = {part for label in labels for part in re.split(r"[\s,;\[\]'\"]+", label) if part}
    return any(map(is_entity_tag, parts)) and all(part == OUTSIDE or is_entity_tag(part) for part in parts)


def _format_of_lines(text: str) -> str:
    """Return what the lines of a text are, with what to do, where they look like rows; else an empty string."""
    lines = [line for line in text.splitlines()[:SAMPLED_ROWS] if line.strip()]
    last_words = [line.split()[-1] for line in lines if len(line.split()) > 1]
    are_classes = all(len(line.split()) == 2 for line in lines) and all(word.isupper() for word in last_words)
    if lines and len(last_words) == len(lines) and (_are_tags(last_words) or are_classes):
        return "tokens and their tags: rename it to .conll"
    if lines and all(line.startswith("{") and line.rstrip().endswith("}") for line in lines):
        return "rows of JSON: rename it to .jsonl"
    usual_names = {name for columns in TASK_COLUMNS.values() for column in columns for name in column.usual_names}
    if len(lines) > 1 and len(names := lines[0].lower().split(",")) > 1 and usual_names.issuperset(names):
        return "a table: rename it to .csv"
    if len(lines) > 1 and len({line.count("\t") for line in lines}) == 1 and "\t" in lines[0]:
        return "a table: rename it to .tsv, with the names of the columns in its first line"
    if lines and all(line.startswith("__label__") for line in lines):
        return "labelled texts of fastText: write a .csv with the columns text and label"
    return ""


def _is_prose(file: DataFile, column: str) -> bool:
    """Return whether a column holds sentences; a name or a place has fewer words."""
    values = [row.get(column) for _, row in file.rows[:SAMPLED_ROWS]]
    return _is_text(file, column) and any(isinstance(value, str) and len(value.split()) > 4 for value in values)


def _share_of_numbers(file: DataFile, column: str) -> float:
    """Return how many of a column's values are numbers, between 0 and 1."""
    return sum(value_fits("number", row.get(column)) for _, row in file.rows) / max(1, len(file.rows))


def _holds_text(file: DataFile, column: str) -> bool:
    """Return whether a column holds any text that is not a number, or lists of texts."""
    values = [row.get(column) for _, row in file.rows[:SAMPLED_ROWS]]
    parts = [part for value in values for part in (value if isinstance(value, list) else [value])]
    return any(isinstance(part, dict) or (isinstance(part, str) and part.strip(" -+.,0123456789")) for part in parts)


def _is_classification(first: DataFile, columns: Mapping[str, str], available: Sequence[str]) -> bool:
    """Return whether columns with the names of a generation hold a classification."""
    targets = columns.get("targets", "")
    if targets.lower() in LABEL_COLUMN_NAMES and not _is_text(first, targets):
        return True
    if columns.get("source", "").lower() == "source" and targets.lower() in ("target", "targets"):
        return False  # they say what they are, whatever stands beside them
    return any(c.lower() in LABEL_COLUMN_NAMES and c not in columns.values() for c in available)


def choose_columns(
    kind: str,
    first: DataFile,
    requested: ColumnNames | None,
    names: ColumnNames | None,
    problems: list[str],
) -> dict[str, str]:
    """Choose the column for each role of a kind of task."""
    columns = TASK_COLUMNS[kind]
    explicit = requested or (names if isinstance(names, Mapping) else None)
    if explicit:
        return _explicit_columns(kind, first, explicit, problems)
    if not first.rows:
        return {}
    available = [c for c in names or first.columns if c in first.columns] or first.columns
    if kind in LABELLED_TEXTS:
        return _labelled_text_columns(kind, first, available, problems)
    chosen = _columns_by_usual_name(kind, available)
    missing = [c for c in columns if not c.optional and c.role not in chosen]
    for column in missing:
        problems.append(
            f"{first.name} has no column named {' or '.join(column.usual_names)}, for the {column.role} of {kind}. Its "
            f"columns: {', '.join(first.columns)}. {how_to_name_columns(kind)}"
        )
    return {} if missing else chosen


ASK_COLUMNS = " --columns names others."


def columns_option(columns: Mapping[str, str]) -> str:
    """Return the option that names the column of each role, as a shell reads it."""
    pairs = ",".join(f"{role}={column}" for role, column in columns.items())
    quoted = any(shlex.quote(column) != column for column in columns.values() if column != "…")
    return f"--columns {shlex.quote(pairs) if quoted else pairs}"


def how_to_name_columns(kind: str, known: Mapping[str, str] | None = None) -> str:
    """Return, as a sentence, which columns a kind of task has, how they are named, and how another kind is chosen."""
    columns = TASK_COLUMNS[kind]
    listed = " ".join(f"({c.role},)" if c.optional else f"{c.role}," for c in columns).removesuffix(",")
    example = columns_option({c.role: (known or {}).get(c.role, "…") for c in columns if not c.optional})
    others = ", ".join(other for other in TASK_COLUMNS if other != kind)
    return (
        f"The data is read as {kind}, whose columns are {listed}. Say which is which: {example}; or choose "
        f"another kind of task: --task {others}"
    )


def _explicit_columns(kind: str, first: DataFile, names: ColumnNames, problems: list[str]) -> dict[str, str]:
    """Match columns that were given, by role or in order, with the roles."""
    columns = TASK_COLUMNS[kind]
    roles = [c.role for c in columns]
    required = {c.role for c in columns if not c.optional}
    ordered = [c.role for c in columns if c is not TASK]
    in_order = ordered if len(names) == len(ordered) else [c.role for c in columns if not c.optional]
    chosen = dict(names) if isinstance(names, Mapping) else dict(zip(in_order, names, strict=False))
    mistakes = [unknown_name("role of a column", role, roles) for role in chosen if role not in roles]
    if missing := [c.role for c in columns if c.role in required - set(chosen)]:
        mistakes.append(f"no column is named for {' and '.join(missing)}")
    if len(chosen) < len(names) or len(set(chosen.values())) < len(chosen):
        what = "a column twice" if len(chosen) == len(names) else f"more columns than the {len(chosen)} that are read"
        mistakes.append(f"{excerpt(names)} names {what}")
    if mistakes:
        listed = "; ".join(mistake.removesuffix(".") for mistake in mistakes)
        problems.append(f"{listed}. {first.name} has {', '.join(first.columns)}. {how_to_name_columns(kind)}")
    return {} if mistakes else {role: chosen[role] for role in roles if role in chosen}


def _columns_by_usual_name(kind: str, available: Sequence[str]) -> dict[str, str]:
    chosen: dict[str, str] = {}
    for column in TASK_COLUMNS[kind]:
        matches = [
            c for usual in column.usual_names for c in available if c.lower() == usual and c not in chosen.values()
        ]
        if matches:
            chosen[column.role] = matches[0]
    return chosen


def _labelled_text_columns(kind: str, first: DataFile, available: Sequence[str], problems: list[str]) -> dict[str, str]:
    """Find the label by its usual names and one or two columns of text by their contents."""
    answer = TASK_COLUMNS[kind][-1]
    label = first_named(available, answer.usual_names)
    texts = text_columns(first, [c for c in available if c != label])
    listed = ", ".join(first.columns)
    others = [c for c in available if c not in texts and c.lower() not in ID_COLUMN_NAMES]
    known = {"text": texts[0]} if len(texts) == 1 else {}
    todo = how_to_name_columns(kind, {**known, **({answer.role: others[0]} if len(others) == 1 else {})})
    if not label and (cell := next((c for c in available if _is_among_values(first, c)), None)):
        problems.append(
            f"the first line of {first.name} looks like a row, since {excerpt(cell)} is a value of its column: give "
            f"the file a first line that names its columns, such as text,{answer.role}"
        )
        return {}
    if not label:
        running = "If it is running text, give --task language. " if len(texts) == 1 else ""
        problems.append(
            f"{first.name} has no column named {' or '.join(answer.usual_names)}. Its columns: {listed}. "
            f"{running}{todo}"
        )
        if others := [c for c in available if c.lower() in OTHER_INPUT_NAMES]:
            problems[-1] = (
                f"{first.name} has the columns {listed}, and no kind of task reads {', '.join(others)} by itself. For "
                "a model that answers a text, put all of its input into one column and its answer into another: --task "
                "generation --columns source=…,targets=…"
            )
            return {}
    if len(texts) not in (1, 2):
        which = f"{len(texts)} columns of text ({', '.join(texts)})" if texts else "no column of text"
        problems.append(f"{first.name} has {which} and needs one or two. Its columns: {listed}. {todo}")
    if not label or len(texts) not in (1, 2):
        return {}
    return {**dict(zip(("text", "pair"), texts, strict=False)), answer.role: label}


def _is_among_values(file: DataFile, column: str) -> bool:
    """Return whether the name of a column is one of its values, as where a file has no header."""
    return any(row.get(column) == column for _, row in file.rows[:SAMPLED_ROWS])


def text_columns(first: DataFile, available: Sequence[str]) -> list[str]:
    """Return the columns of text by their contents, without labels and keys."""
    not_text = (*LABEL_COLUMN_NAMES, *ID_COLUMN_NAMES)
    texts = [c for c in available if c.lower() not in not_text and _is_text(first, c)]
    if len(texts) == 2:  # a key of letters and digits beside a text is no text
        texts = [c for c in texts if not _is_key(first, c)] or texts
    return texts


def _is_text(file: DataFile, column: str) -> bool:
    """Return whether a column holds strings that are not numbers, and enough different ones not to be categories."""
    values = [row.get(column) for _, row in file.rows[:SAMPLED_ROWS]]
    strings = [v for v in values if isinstance(v, str) and not re.fullmatch(r"\s*[-+]?[\d.,]*\s*", v)]
    return bool(strings) and 20 * len(set(strings)) >= len(strings)


def _is_key(file: DataFile, column: str) -> bool:
    """Return whether all values are different single words with a digit, as keys are."""
    values = [str(row.get(column, "")) for _, row in file.rows[:SAMPLED_ROWS]]
    return len(set(values)) == len(values) and all(re.fullmatch(r"\S*\d\S*", value) for value in values)


def check_columns(files: Mapping[str, DataFile], kind: str, columns: Mapping[str, str], problems: list[str]) -> None:
    """Check that every split has the chosen columns, and that every row's values are of their types."""
    for file in files.values():
        missing = [column for column in columns.values() if file.rows and column not in file.columns]
        problems += [unknown_name("column", column, file.columns, where=file.name) + ASK_COLUMNS for column in missing]
        for number, row in file.rows if not missing else ():
            problems += [f"{file.location(number)}: {problem}" for problem in row_problems(row, columns, kind)]


def row_problems(row: Mapping[str, Any], columns: Mapping[str, str], kind: str) -> list[str]:
    """Return what is wrong with a row's values. Labels are checked with those of all rows, in `loading`."""
    problems = []
    for column in TASK_COLUMNS[kind]:
        name = columns.get(column.role)
        if name is None:
            continue
        value = row.get(name)
        if name not in row:
            problems.append(f"column {name!r} is missing")
        elif not value_fits(column.type, value):
            problems.append(f"column {name!r} is not {TYPE_DESCRIPTIONS[column.type]} but {short_repr(value)}")
        elif any(map(has_lone_surrogate, _texts(value))):
            problems.append(f"column {name!r} holds half a character (a lone surrogate)")
    if isinstance(row.get("id"), str) and has_lone_surrogate(row["id"]):
        problems.append("column 'id' holds half a character (a lone surrogate)")
    if problems:
        return problems
    if kind == "tagging" and len(row[columns["tokens"]]) != len(row[columns["tags"]]):
        counts = f"{len(row[columns['tokens']])} tokens and {len(row[columns['tags']])} tags"
        return [f"{counts}; give one tag for each token"]
    if kind == "choice" and not 0 <= int(row[columns["answer"]]) < len(row[columns["choices"]]):
        return [f"answer {row[columns['answer']]} is not an index of its {len(row[columns['choices']])} choices"]
    return []


def as_number(value: Any) -> float:
    """Return a number that may be a text with a decimal comma; 1,234 is refused, as it may be a thousand."""
    if isinstance(value, str) and re.fullmatch(r"\s*[-+]?(\d+,(?!\d{3}\s*$)|0,)\d+\s*", value):
        value = value.replace(",", ".")
    return float(value)


def value_fits(column_type: ColumnType, value: Any) -> bool:
    """Return whether a value is of a column's type. A label may be anything but a list."""
    if column_type == "text":
        return isinstance(value, str)
    if column_type == "texts":
        return isinstance(value, list) and bool(value) and all(isinstance(v, str) for v in value)
    if column_type == "name":
        return isinstance(value, str | int) and not isinstance(value, bool) and value != ""
    if column_type == "labels":
        return isinstance(value, list) and all(isinstance(v, str | int) for v in value)
    if column_type == "number":
        try:
            return not isinstance(value, bool | list | dict) and math.isfinite(as_number(value))
        except (TypeError, ValueError, OverflowError):
            return False
    if column_type == "index":
        return isinstance(value, int) or (isinstance(value, str) and value.isdecimal() and len(value) < 19)
    if column_type == "answers":
        return isinstance(value, str) or value_fits("texts", value)
    return not isinstance(value, list)


def is_blank(value: Any) -> bool:
    """Return whether a value is a text, or a list of texts, of nothing but white space."""
    texts = _texts(value)
    return bool(texts) and not any(text.strip() for text in texts)


def _texts(value: Any) -> list[str]:
    values = value if isinstance(value, list) else [value]
    return [v for v in values if isinstance(v, str)]
