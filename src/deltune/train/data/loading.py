"""Loading a task's data from a folder of train, validation and test files, or from the hub, and checking all of it.

How a particular data set of the hub is laid out (`HubLayout`: its splits, columns and labels) is translated into ours.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import random
import re
import statistics
import warnings
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pyarrow

from ...errors import (
    DeltuneError,
    check_booleans,
    closest_match,
    error_from_problems,
    error_summary,
    excerpt,
    unknown_name,
    word_list,
)
from ...files import explain_write_errors, parse_json, user_path
from ...models import why_not_on_hub
from . import formats, shapes
from .columns import (
    INPUT_TYPES,
    TASK_COLUMNS,
    Column,
    ColumnNames,
    ColumnType,
    as_number,
    check_columns,
    choose_columns,
    doubts_of_columns,
    guess_task_kind,
    how_to_name_columns,
    is_blank,
    row_problems,
    task_kind_doubts,
    unread_columns,
)
from .readers import READERS, DataFile, data_suffix, has_lone_surrogate, read_rows, short_repr
from .rows import NumberedRows, Row, in_slices, stored_dataset
from .tag_schemes import PLAIN, check_entity_tags, recognise_scheme, to_iob2

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict


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
    """Compute columns, group targets and hold rows out for validation, as a layout says, in place."""
    computed = {role: function for role, function in layout.columns.items() if not isinstance(function, str)}

    def with_computed(file: DataFile) -> Iterator[tuple[int, Row]]:
        for number, row in file.rows:
            try:
                yield number, {**row, **{role: function(row) for role, function in computed.items()}}
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                problems.append(
                    f"{file.location(number)} is not laid out as it was ({short_repr(error)}). Its columns: "
                    f"{', '.join(row)}. Give data and columns instead of the task"
                )
                return

    for split, file in files.items():
        files[split] = file.with_rows(with_computed(file))
        if problems:
            return
    for split in layout.grouped_splits:
        if split in files:
            files[split] = files[split].with_rows(_group_targets(files[split].rows, layout.column_names))
    if layout.held_out and "train" in files:
        train = files["train"]
        sample = set(random.Random(0).sample(range(len(train.rows)), min(layout.held_out, len(train.rows) // 2)))
        held_out = NumberedRows(row for i, row in enumerate(train.rows) if i in sample)
        files["validation"] = DataFile("train (held out)", held_out, train.unit)
        files["train"] = train.with_rows(row for i, row in enumerate(train.rows) if i not in sample)


def _group_targets(rows: Sequence[tuple[int, Row]], columns: Mapping[str, str]) -> list[tuple[int, Row]]:
    """Join the rows of each source into one, with all their targets."""
    source, targets = columns["source"], columns["targets"]
    groups: dict[str, tuple[int, Row]] = {}
    for number, row in rows:
        _, group = groups.setdefault(row[source], (number, {**row, targets: []}))
        group[targets] += [row[targets]] if isinstance(row[targets], str) else row[targets]
    return list(groups.values())


def nested_field(value: Any, name: str) -> Any:
    """Return a field of a mapping, or of every mapping of a list."""
    return [item[name] for item in value] if isinstance(value, list) else value[name]


def format_triples(triples: Sequence[str | Sequence[str]]) -> str:
    """Return triples as "subject : relation : object | …"."""
    return " | ".join(" : ".join(one.split(" | ") if isinstance(one, str) else one) for one in triples)


def bio_tags(tokens: Sequence[str], spans: Sequence[Mapping[str, Any]], types: Mapping[str, str]) -> list[str]:
    """Return the BIO tags of tokens, among which spans are entities; `types` has the names of theirs."""
    tags = ["O"] * len(tokens)
    for span in spans:
        start, end, name = span["start"], span["end"], types[span["type"]]
        tags[start:end] = [f"B-{name}", *[f"I-{name}"] * (end - start - 1)]
    return tags


SPLITS = {"train": ("train",), "validation": ("validation", "valid", "dev"), "test": ("test",)}
"""Split -> the names that its file may have, without the suffix."""


@dataclass(frozen=True)
class TaskData:
    """The data of a task: splits with a column "id" and one column for each role of the task kind.

    Attributes:
        splits: Split -> its rows. Labels and tags are indices into `labels`.
        labels: The names of the labels, in the order of their ids; empty for task kinds without labels.
        columns: Role -> column of the source.
        source: The folder or hub id.
        fingerprint: Hash of the labels and of every split's contents, the same for the same content in any format.
        kind: The kind of task.
        digests: Split -> hash of its contents alone.
        tag_scheme: The scheme of tags, a key of `tag_schemes.SCHEMES` or "plain"; None if they show none.
        unread: Columns that were neither chosen nor named by anyone, and are not read.
        format: The format of conversations and preferences, as `formats` calls it; "" for other kinds.
        shape: The shape of rows that were read into others, as `shapes` calls it; "" where they are as they were.
        notes: What a user should know about the rows: how a file was split, empty answers, repetitions.
    """

    splits: dict[str, Dataset]
    labels: tuple[str, ...]
    columns: dict[str, str]
    source: str
    fingerprint: str
    kind: str = "classification"
    digests: Mapping[str, str] = field(default_factory=dict)
    tag_scheme: str | None = None
    unread: tuple[str, ...] = ()
    format: str = ""
    shape: str = ""
    notes: tuple[str, ...] = ()

    @property
    def tasks(self) -> set[str] | None:
        """The names of the tasks of all rows; None where rows have none."""
        if "task" not in self.columns:
            return None
        return {task for rows in self.splits.values() for task in rows["task"]}

    @property
    def summary(self) -> dict[str, Any]:
        """The facts that a run records about its data, as JSON values."""
        fields = ("source", "fingerprint", "kind", "columns", "digests")
        rows = {split: len(dataset) for split, dataset in self.splits.items()}
        scheme = {} if self.tag_scheme is None else {"tag_scheme": self.tag_scheme}
        return {**{name: getattr(self, name) for name in fields}, "labels": list(self.labels), "rows": rows, **scheme}


@dataclass
class _RawData:
    """A source as it was read, before columns are chosen.

    Attributes:
        files: Split -> its rows.
        column_names: The columns that meta.json lists, if it does.
        label_names: Column -> the names of its labels; "" for the labels of any column.
        hidden: Columns in which -1 says that a row has no label.
    """

    files: dict[str, DataFile]
    column_names: ColumnNames | None = None
    label_names: dict[str, Sequence[str]] = field(default_factory=dict)
    hidden: frozenset[str] = frozenset()


@check_booleans
def load_data(
    source: str,
    columns: ColumnNames | None = None,
    labels: Sequence[str] | None = None,
    max_rows: Mapping[str, int] | None = None,
    seed: int = 0,
    *,
    training: bool = True,
    kind: str | None = None,
    layout: HubLayout | None = None,
    tag_scheme: Literal["iob2", "plain"] | None = None,
    iob2_labels: Sequence[str] | None = None,
    label_separator: str | None = None,
) -> TaskData:
    """Load the data of a task and check every row of it.

    Args:
        source: A folder of train, validation and test files (.jsonl, .json, .csv, .txt, .conll, .bio, also with .gz, or
            .parquet), one such file, of which a tenth each is drawn for validation and test, or which without training
            is the test split, or a hub id, which may name a revision and a configuration:
            OWNER/NAME@REVISION:CONFIGURATION. Or a mixture of these, such as "A=0.7,B=0.3": an epoch has as many rows
            as all of them, in these shares.
        columns: The columns, as {"text": …, "pair": …, "label": …} or in the order of the kind's roles. Default: those
            of meta.json, else those that have usual names.
        labels: Names of the labels in the order of their ids. Default: `label_names` of meta.json, else the labels of
            train, sorted.
        max_rows: Split -> the size of a sample of it. The sample of train is drawn with `seed`; the samples of the
            others are always the same.
        seed: Seed of the sample of train, and of the splits of a single file.
        training: Whether there must be a train split. If not, which needs `labels`, any split is enough.
        kind: A key of `TASK_COLUMNS`. Default: what the columns' names tell, else classification.
        layout: How a hub id is laid out, where `columns` and `labels` do not say otherwise.
        tag_scheme: "iob2" converts tags of entities to IOB2, whose labels are then sorted; "plain" takes tags for
            classes of words. Default: the tags are as they are, and their scheme is recognised.
        iob2_labels: Names of the labels after that conversion, in the order of their ids.
        label_separator: What stands between the labels of a row that are one text; " " for any blanks. Default: such
            a text is a list in JSON.

    Raises:
        DeltuneError: Something is wrong with the source or its rows; one error lists all, with file and line.
    """
    if weights := mixture_weights(source):
        parts = {
            name: load_data(
                name, columns, labels, seed=seed, training=training or user_path(name, "data").is_file(), kind=kind,
                tag_scheme=tag_scheme, iob2_labels=iob2_labels, label_separator=label_separator,
            )
            for name in weights
        }  # fmt: skip
        return _mixed(source, parts, weights, max_rows or {}, seed)
    problems: list[str] = []
    for split, count in (max_rows or {}).items():
        if count < 1:
            problems.append(f"max_rows of {split} must be at least 1, not {count}")
    if kind is not None and kind not in TASK_COLUMNS:
        raise DeltuneError(unknown_name("kind of task", kind, TASK_COLUMNS))
    folder = user_path(source, "data")
    needed = ("train",) if training else tuple(SPLITS)
    if folder.is_file():
        raw = _RawData({"train" if training else "test": read_rows(folder, problems)})
    elif folder.is_dir():
        raw = _read_folder(folder, needed, problems)
    else:
        raw = _read_hub(source, needed, layout or HubLayout(source))
    files = raw.files
    if layout is not None:
        apply_layout(files, layout, problems)
        columns, labels = columns or layout.column_names, labels or layout.labels
    first, requested = next((files[split] for split in needed if split in files), None), columns
    is_one_file = training and folder.is_file() and ".txt" not in folder.suffixes
    if first and first.rows and (format := formats.choose(first, kind, columns or raw.column_names)):
        return _load_conversations(source, files, *format, max_rows or {}, seed, problems, is_one_file)
    shape = shapes.choose(first, kind, columns or raw.column_names) if first else None
    original, is_free = first, kind is None and not columns and not raw.column_names
    if shape and first:
        kind, files = shape.kind, shapes.read_files(files, shape, problems)
        first = next(files[split] for split in needed if split in files)
        columns = {role: role for role in first.columns if role != "id"}
        labels = labels or shape.labels or None
        if problems:
            raise error_from_problems(f"data {source}", problems)
    is_guess, guesses_columns = kind is None, columns is None and not isinstance(raw.column_names, Mapping)
    kind = kind or (guess_task_kind(first, raw.column_names, columns) if first else "classification")
    chosen = choose_columns(kind, first, columns, raw.column_names, problems) if first else {}
    if not chosen or not first or not first.rows:
        raise error_from_problems(f"data {source}", problems)
    if isinstance(requested, Mapping) and "task" in requested and "task" not in chosen:
        problems.append(f"the task of a row (task={requested['task']}) is not read from data of this shape: {shape}")
    unread = unread_columns(first, raw.column_names, chosen) if guesses_columns else ()
    if shape and original:
        unread = unread_columns(original, None, {c: c for c in shape.source_columns})
        doubts = doubts_of_columns(original, kind, shape.columns, unread) if is_free else []
    else:
        doubts = doubts_of_columns(first, kind, chosen, unread)
    if doubts:
        raise error_from_problems(f"data {source}", [*problems, *doubts])
    if kind in ("tagging", "multilabel"):
        lists = [chosen[c.role] for c in TASK_COLUMNS[kind] if c.role in chosen and c.type in ("texts", "labels")]
        files = shapes.with_lists(files, lists, " " if kind == "tagging" else label_separator, problems)
        first = next(files[split] for split in needed if split in files)
        if problems:
            raise error_from_problems(f"data {source}", problems)
    check_columns(files, kind, chosen, problems)
    if is_guess and set(chosen.values()) <= set(first.columns) and row_problems(first.rows[0][1], chosen, kind):
        problems.append(how_to_name_columns(kind))
    label_role = next((c.role for c in TASK_COLUMNS[kind] if c.type in ("label", "labels")), None)
    notes: tuple[str, ...] = ()
    if is_one_file and not problems:
        inputs = [column for role, column in chosen.items() if role in INPUT_TYPES]
        keys = (json.dumps([row.get(column) for column in inputs], default=str) for _, row in files["train"].rows)
        files, notes = _split_file(files["train"], keys, chosen.get(label_role or ""), seed)
    label_names: tuple[str, ...] = ()
    if kind == "regression":
        label_names = tuple(labels or ("score",))
        notes += _check_numbers(files, chosen["score"], problems)
    ids: dict[str, int] = {}
    if label_role is not None:
        label_column = chosen[label_role]
        if label_column in raw.hidden:
            files = {split: drop_unlabelled_rows(file, label_column) for split, file in files.items()}
        known = labels or raw.label_names.get(label_column) or raw.label_names.get("")
        inner: set[str] = set()
        if kind == "tagging" and tag_scheme == "iob2" and not problems:
            files, known = _with_iob2_tags(files, label_column, known, problems), iob2_labels
            train = files["train"].rows if "train" in files and not problems else ()
            inner = {f"I{tag[1:]}" for _, row in train for tag in row[label_column] if tag[0] == "B"}
        label_names, ids, files = encode_labels(
            files, label_column, known, problems, inner, shape.labels if shape else ()
        )
    is_guess &= not isinstance(columns or raw.column_names, Mapping)
    if is_guess and (doubts := task_kind_doubts(first, kind, chosen, label_names)):
        raise error_from_problems(f"data {source}", doubts)
    scheme = None
    if kind == "tagging" and not problems:
        scheme = (
            PLAIN if tag_scheme == "plain" else _recognise_scheme(files, chosen["tags"], label_names, ids, problems)
        )
    if problems:
        raise error_from_problems(f"data {source}", problems)
    read = [(c, chosen[c.role]) for c in TASK_COLUMNS[kind] if c.role in chosen]
    splits = {
        split: _split(
            file, split, kind, chosen, lambda row: {c.role: _normalized_value(c, row[name], ids) for c, name in read}
        )
        for split, file in files.items()
    }
    return _task_data(
        source, splits, max_rows or {}, seed, labels=label_names, columns=dict(shape.columns if shape else chosen),
        kind=kind, tag_scheme=scheme, unread=unread, shape=shape.name if shape else "", notes=notes,
    )  # fmt: skip


ARROW_TYPES: Mapping[ColumnType, pyarrow.DataType] = {
    "text": pyarrow.string(), "texts": pyarrow.list_(pyarrow.string()), "label": pyarrow.int64(),
    "labels": pyarrow.list_(pyarrow.int64()), "number": pyarrow.float64(), "index": pyarrow.int64(),
    "answers": pyarrow.list_(pyarrow.string()), "conversation": pyarrow.string(), "name": pyarrow.string(),
}  # fmt: skip
"""Type of a column -> how its values are stored."""


def _split(file: DataFile, split: str, kind: str, roles: Collection[str], values: Callable[[Row], Row]) -> Dataset:
    """Return the rows of a split as they are read: their ids, and the values of each role."""
    fields = {c.role: ARROW_TYPES[c.type] for c in TASK_COLUMNS[kind] if c.role in roles}
    if kind in formats.KINDS:
        fields["place"] = pyarrow.string()
    ids = file.row_ids(f"{split}-")
    rows = ({"id": name, **values(row)} for name, (_, row) in zip(ids, file.rows, strict=True))
    return stored_dataset(rows, pyarrow.schema({"id": pyarrow.string(), **fields}))


MAX_HELD_OUT = 1_000
"""Rows of a single file that are held out for validation, and as many for test, at most; a tenth of fewer."""


def _split_file(
    file: DataFile, inputs: Iterable[str], label: str | None, seed: int
) -> tuple[dict[str, DataFile], tuple[str, ...]]:
    """Draw validation and test rows of a single file, all that have an input, in the shares that its labels have.

    Train keeps a row of every label. Each label's rows are spread evenly over the order that splits are cut from.
    """
    groups: dict[int, list[int]] = {}  # by a hash of the input, which is smaller
    for i, one in enumerate(inputs):
        groups.setdefault(hash(one), []).append(i)
    repeated = len(groups) < len(file.rows)
    count = min(MAX_HELD_OUT, len(groups) // 10)
    if count < 2:
        size = f"{len(groups)} {'different inputs' if repeated else 'rows'}"
        return {"train": file}, (f"{file.name} has {size}, too few to hold some out: all are trained",)
    label_sets: list[frozenset[str]] = []
    same: dict[frozenset[str], frozenset[str]] = {}
    for _, row in file.rows:
        value = row.get(label or "", ())
        labels = frozenset(str(one) for one in (value if isinstance(value, list | tuple) else [value]))
        label_sets.append(same.setdefault(labels, labels))
    known: set[str] = set()
    by_labels: dict[frozenset[str], list[list[int]]] = {}
    rng = random.Random(seed)
    for rows_of_input in rng.sample(list(groups.values()), len(groups)):
        labels = frozenset().union(*(label_sets[i] for i in rows_of_input))
        if labels <= known:
            by_labels.setdefault(labels, []).append(rows_of_input)
        known |= labels
    places: list[tuple[float, list[int]]] = []
    for some in by_labels.values():
        first = rng.random()
        places += [((first + number) / len(some), rows_of_input) for number, rows_of_input in enumerate(some)]
    free = [rows_of_input for _, rows_of_input in sorted(places)]
    chosen = {"validation": {*chain(*free[:count])}, "test": {*chain(*free[count : 2 * count])}}
    chosen["train"] = {*range(len(file.rows))} - chosen["validation"] - chosen["test"]

    def rows_of(split: str) -> Iterator[tuple[int, Row]]:
        for i, (n, row) in enumerate(file.rows):
            if i in chosen[split]:
                yield n, row if "id" in row else {**row, "id": f"row-{i + 1}"}

    files = {split: file.with_rows(rows_of(split)) for split in SPLITS if chosen[split]}
    sizes = ", ".join(f"{len(one.rows):,} {split}" for split, one in files.items())
    note = "; rows with the same input stay together" if repeated else ""
    return files, (f"{file.name} has no splits, so its rows are drawn by seed {seed} (--seed): {sizes}{note}",)


def _check_numbers(files: dict[str, DataFile], column: str, problems: list[str]) -> tuple[str, ...]:
    """Check that numbers to predict are of a size that a head can learn; leave out splits whose numbers are hidden.

    Returns a note where they have a decimal comma.
    """
    if problems:
        return ()
    numbers = {split: array("d", (as_number(row[column]) for _, row in file.rows)) for split, file in files.items()}
    values = (row[column] for file in files.values() for _, row in file.rows)
    comma = next((value for value in values if isinstance(value, str) and "," in value), None)
    hidden = [split for split in numbers if split != "train" and {*numbers[split]} == {-1.0}]
    for split in hidden:
        warnings.warn(f"every number in {files[split].name} is -1, so hidden; the split is left out", stacklevel=3)
        del files[split]
    train = numbers.get("train")
    spread = statistics.pstdev(train) if train else 1.0
    if not 0.05 <= spread <= 20:
        problems.append(
            f"the numbers in column {column!r} of {files['train'].name} have a standard deviation of {spread:.3g}, and "
            "a head, which begins near 0 and takes small steps, learns those of about 1: "
            + (f"divide them by {10 ** round(math.log10(spread)):g}" if spread else "these are all the same")
        )
    return () if comma is None else (f"the numbers in {column!r} have a decimal comma: {comma} is {as_number(comma)}",)


def _load_conversations(
    source: str,
    files: Mapping[str, DataFile],
    form: formats.Format,
    columns: dict[str, str],
    max_rows: Mapping[str, int],
    seed: int,
    problems: list[str],
    is_one_file: bool,
) -> TaskData:
    """Read conversations, preferences and texts: each row in the one form as JSON."""
    read = formats.read_files(files, form, columns, problems)
    if problems:
        raise error_from_problems(f"data {source}", problems)
    split_note: tuple[str, ...] = ()
    if is_one_file and form.kind in ("chat", "preference"):
        read, split_note = _split_file(read["train"], map(_prompt_of, read["train"].rows), None, seed)
    first = next(iter(files.values()))
    as_text = any(isinstance(row.get(columns[form.needed[0]]), str) for _, row in first.rows[:1]) and form.has_messages
    notes = [*([f"{form.needed[0]} read from text, which holds JSON"] if as_text else [])]
    notes += formats.notes_on_rows(read)
    roles = (formats.COLUMN, "place")
    splits = {
        split: _split(file, split, form.kind, roles, lambda row: {name: row[name] for name in roles})
        for split, file in read.items()
        if len(file.rows)
    }
    unread = tuple(c for c in unread_columns(first, None, columns) if c not in form.others)
    return _task_data(
        source, splits, max_rows, seed, columns=columns, kind=form.kind, unread=unread, format=form.name,
        notes=(*split_note, *notes),
    )  # fmt: skip


def _prompt_of(numbered: tuple[int, Row]) -> str:
    """Return what a row in the one form is held out by: what is asked, or all of it."""
    text: str = numbered[1][formats.COLUMN]
    question = formats.question_of(json.loads(text))
    return text if question is None else question


def mixture_weights(source: str) -> dict[str, float]:
    """Return the weights of a mixture, by source; nothing for a single source."""
    parts = [re.fullmatch(r"\s*(.+)=(\d+\.?\d*|\.\d+)\s*", part) for part in str(source).split(",")]
    return {part[1]: float(part[2]) for part in parts if part} if len(parts) > 1 and all(parts) else {}


def _mixed(
    source: str, parts: Mapping[str, TaskData], weights: Mapping[str, float], max_rows: Mapping[str, int], seed: int
) -> TaskData:
    """Join data sets: of train the shares that the weights say, repeated or drawn, of other splits all rows."""
    first = next(iter(parts.values()))
    problems = [
        f"{n} is {p.kind}, and {first.source} is {first.kind}" for n, p in parts.items() if p.kind != first.kind
    ]
    problems += [f"{n} has other labels than {first.source}" for n, p in parts.items() if p.labels != first.labels]
    problems += [
        f"{n} has {word_list([*p.columns])}, and {first.source} has {word_list([*first.columns])}; --columns says what "
        "all are read by"
        for n, p in parts.items()
        if p.kind == first.kind and not p.format and p.columns.keys() != first.columns.keys()
    ]
    problems += [] if sum(weights.values()) else ["all weights are 0"]
    if problems:
        raise error_from_problems(f"data {source}", problems)
    rows_of_train = sum(len(part.splits.get("train", ())) for part in parts.values())
    total = min(rows_of_train, max_rows.get("train", rows_of_train))
    by_split: dict[str, list[Dataset]] = {}
    notes: list[str] = []
    for name, part in parts.items():
        for split, rows in part.splits.items():
            chosen = rows
            if split == "train":
                count = round(total * weights[name] / sum(weights.values()))
                again, rest = divmod(count, len(rows))
                drawn = sorted(random.Random(f"{seed} {name}").sample(range(len(rows)), rest))
                chosen = rows.select([*(again * [*range(len(rows))]), *drawn])
                notes.append(f"{count:,} rows of an epoch are from the {len(rows):,} of {name}")
            by_split.setdefault(split, []).append(chosen)
        notes += [f"{name}: {note}" for note in part.notes]
    splits = {
        split: stored_dataset(
            ({**row, "id": f"{split}-{i}"} for i, row in enumerate(chain(*some), 1)), some[0].features.arrow_schema
        )
        for split, some in by_split.items()
    }
    samples = {split: count for split, count in max_rows.items() if split != "train"}
    form = " and ".join(dict.fromkeys(part.format for part in parts.values()))
    unread = tuple(dict.fromkeys(column for part in parts.values() for column in part.unread))
    return _task_data(
        source, splits, samples, seed, labels=first.labels, columns=first.columns, kind=first.kind,
        tag_scheme=first.tag_scheme, unread=unread, format=form, notes=tuple(notes),
    )  # fmt: skip


def _task_data(
    source: str,
    splits: dict[str, Dataset],
    max_rows: Mapping[str, int],
    seed: int,
    *,
    labels: tuple[str, ...] = (),
    **facts: Any,
) -> TaskData:
    """Draw the samples of splits, and make the data of a task of them."""
    for split, count in max_rows.items():
        if split in splits and count < len(splits[split]):
            rng = random.Random(seed if split == "train" else 0)
            splits[split] = splits[split].select(sorted(rng.sample(range(len(splits[split])), count)))
    digests = {}
    everything = hashlib.sha256(f"[{json.dumps(labels)}, {{".encode())
    for number, split in enumerate(sorted(splits)):
        digest = hashlib.sha256()
        everything.update(f"{', ' if number else ''}{json.dumps(split)}: ".encode())
        for part in _as_json(splits[split]):
            digest.update(part.encode())
            everything.update(part.encode())
        digests[split] = digest.hexdigest()[:16]
    everything.update(b"}]")
    ordered = {split: digests[split] for split in splits}
    return TaskData(
        splits=splits, labels=labels, source=source, fingerprint=everything.hexdigest(), digests=ordered, **facts
    )


def _as_json(rows: Dataset) -> Iterator[str]:
    """Yield the contents of a split as one object in JSON: each role with the list of its values."""
    for number, role in enumerate(sorted({*rows.column_names} - {"id", "place"})):
        yield f"{', ' if number else '{'}{json.dumps(role)}: ["
        for first, part in in_slices({role: rows[role]}):
            yield (", " if first else "") + json.dumps(part[role])[1:-1]
        yield "]"
    yield "}"


def _with_iob2_tags(
    files: Mapping[str, DataFile], column: str, known: Sequence[str] | None, problems: list[str]
) -> dict[str, DataFile]:
    """Return files whose tags of entities are in IOB2; a number is an index into the known names."""
    names = dict(enumerate(known or ())) | {str(i): name for i, name in enumerate(known or ())}

    def tags(row: Row) -> list[str]:
        return [str(names.get(tag, tag)) for tag in row[column]]

    try:
        if check_entity_tags(_Tags(files, tags)) == set():
            numbers = all(tag.isdigit() for _, some in _Tags(files, tags) for tag in some)
            advice = "; numbers need names first (--labels B-PER,I-PER,O in their order)" if numbers else ""
            problems.append(f"plain tags, which are not of entities, cannot be converted by --tag-scheme iob2{advice}")
    except DeltuneError as error:
        problems.append(str(error))
    if problems:
        return dict(files)
    return {
        split: file.with_rows((number, {**row, column: to_iob2(tags(row))}) for number, row in file.rows)
        for split, file in files.items()
    }


def _recognise_scheme(
    files: Mapping[str, DataFile], column: str, names: Sequence[str], ids: Mapping[str, int], problems: list[str]
) -> str | None:
    """Return the scheme of the tags of all splits; what is wrong with them is appended to the problems."""
    try:
        return recognise_scheme(_Tags(files, lambda row: [names[ids[str(tag)]] for tag in _labels(row[column])]))
    except DeltuneError as error:
        problems.append(str(error))
        return None


@dataclass(frozen=True)
class _Tags:
    """The tags of all rows, each with its place, which can be gone through several times."""

    files: Mapping[str, DataFile]
    of_row: Callable[[Row], list[str]]

    def __iter__(self) -> Iterator[tuple[str, list[str]]]:
        for file in self.files.values():
            yield from ((file.location(number), self.of_row(row)) for number, row in file.rows)


def rename_labels(data: TaskData, names: Mapping[str, str]) -> TaskData:
    """Return the data with other names for its labels; several labels may become one."""
    problems = [unknown_name("label", name, data.labels) for name in names if name not in data.labels]
    problems += [f"label {name!r} has no new name" for name in data.labels if name not in names]
    labels = tuple(sorted(set(names.values())))
    if data.kind != "classification":
        problems = [f"{data.kind} has no labels that could be renamed"]
    elif len(labels) < 2 and not problems:
        problems.append(f"all labels become {labels[0]!r}; two are needed")
    if problems:
        raise error_from_problems(f"relabel {data.source}", problems)
    new_ids = [labels.index(names[name]) for name in data.labels]
    splits = {
        split: rows.remove_columns("label").add_column("label", [new_ids[old] for old in rows["label"]])
        for split, rows in data.splits.items()
    }
    fingerprint = _digest([data.fingerprint, sorted(names.items())])
    return replace(data, splits=splits, labels=labels, fingerprint=fingerprint)


def encode_labels(
    files: Mapping[str, DataFile],
    column: str,
    known: Sequence[str] | None,
    problems: list[str],
    others: Collection[str] = (),
    flags: Collection[str] = (),
) -> tuple[tuple[str, ...], dict[str, int], dict[str, DataFile]]:
    """Number the labels, and check that train has every label, but for those that have a column each.

    Return their names in the order of their ids, the id of each label in the data, and the files with known labels.
    """
    counts = {split: _count_labels(file, column, problems) for split, file in files.items()}
    for split in [s for s, of_split in counts.items() if {*of_split} == {"-1"}]:
        warnings.warn(f"every label in {files[split].name} is -1, so hidden; the split is left out", stacklevel=3)
        del counts[split]
    files = {split: files[split] for split in counts}
    train = {*counts.get("train", ()), *others}
    numeric = all(map(_is_integer, train))
    names = tuple(known or sorted(train, key=lambda label: (int(label) if numeric else 0, label != "O", label)))
    if len(set(map(str, names))) < len(names) or not all(isinstance(name, str) for name in names):
        problems.append(f"label names must be different strings, not {excerpt(list(names))}")
        return (), {}, files
    if "train" not in files and not known:
        problems.append("there is no train file, from which the labels are known: name them in the order of their ids")
        return (), {}, files
    if not known and "train" in files and all(map(_is_number, train)) and not all(map(_is_integer, train)):
        fraction = next(label for label in sorted(train) if not _is_integer(label))
        problems.append(f"{files['train'].name}: a label must be text or a whole number, not {excerpt(fraction)}")
        return (), {}, files
    if len({*train, *flags}) == 1:
        problems.append(
            f"{files['train'].name} has one label only, {excerpt(train.pop())}; a classifier needs two or more"
        )
        return (), {}, files
    ids = {name: i for i, name in enumerate(names)}
    if not any(map(_is_integer, names)):  # then a number in the data is an index into the names
        ids |= {str(i): i for i in range(len(names))}
    trained_ids = {ids.get(label) for label in train} if "train" in files else set(ids.values())
    for split, of_split in counts.items():
        for label, (first, count) in of_split.items():
            where = files[split].location(first) + (f" and {count - 1} more" if count > 1 else "")
            if label not in ids and known:
                unnamed = all(re.fullmatch(r"LABEL_\d+", name) for name in names)
                hint = " --labels gives them names, in the order of their ids." if unnamed else ""
                problems.append(unknown_name("label", label, names, where=where) + hint)
            elif ids.get(label) not in trained_ids or label not in ids:
                guess = closest_match(label, train)
                hint = f" Did you mean {guess!r}?" if guess else f" Labels there: {', '.join(sorted(train)[:20])}"
                problems.append(f"label {excerpt(label)} is in {where} but nowhere in {files['train'].name}.{hint}")
    return names, ids, files


def drop_unlabelled_rows(file: DataFile, column: str) -> DataFile:
    """Return a file without the rows whose label is -1, with a warning; the whole file if no row has a label."""
    dropped = sum(row.get(column) == -1 for _, row in file.rows)
    if dropped in (0, len(file.rows)):
        return file
    warnings.warn(
        f"{dropped} of {len(file.rows)} rows of {file.name} have no label (-1) and are left out", stacklevel=3
    )
    return file.with_rows((number, row) for number, row in file.rows if row.get(column) != -1)


def _count_labels(file: DataFile, column: str, problems: list[str]) -> dict[str, tuple[int, int]]:
    """Return label, as a string -> the number of the first row that has it, and how often it occurs."""
    counts: dict[str, tuple[int, int]] = {}
    for number, row in file.rows:
        value = row.get(column)
        labels = _labels(value)
        if all(isinstance(label, str | int) and not is_blank(label) for label in labels):
            for label in map(str, labels):
                first, count = counts.get(label, (number, 0))
                counts[label] = first, count + 1
        elif column in row:
            fault = f"a label must be text or a whole number, not {short_repr(value)}"
            is_missing = value is None or value != value or is_blank(value)
            problems.append(f"{file.location(number)}: {'the label is missing' if is_missing else fault}")
    return counts


def _labels(value: Any) -> list[Any]:
    """Return the labels of a row."""
    return [_whole(one) for one in (value if isinstance(value, list) else [value])]


def _whole(label: Any) -> Any:
    """Return a whole number without a point: pandas writes 1.0 for 1 where a label is missing."""
    return str(label)[:-2] if re.fullmatch(r"-?\d{1,18}\.0", str(label)) else label


def _is_integer(label: str) -> bool:
    return re.fullmatch(r"-?\d{1,18}", label) is not None


def _is_number(label: str) -> bool:
    return re.fullmatch(r"\s*[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\s*", label) is not None


def _digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _normalized_value(column: Column, value: Any, ids: Mapping[str, int]) -> Any:
    """Return answers as a list, labels as their ids and an index as an integer; any other value as it is."""
    if column.type == "answers":
        return [value] if isinstance(value, str) else value
    if column.type in ("label", "labels"):
        numbers = [ids[str(label)] for label in _labels(value)]
        return numbers if column.type == "labels" else numbers[0]
    if column.type == "name":
        return str(value)
    return int(value) if column.type == "index" else as_number(value) if column.type == "number" else value


def _files_by_split(paths: Collection[Path]) -> dict[str, list[Path]]:
    """Return the files of rows among some paths, by the split that their names say."""
    return {
        split: [p for p in paths if data_suffix(p) and p.name.removesuffix(data_suffix(p)) in stems]
        for split, stems in SPLITS.items()
    }


def _read_folder(folder: Path, needed: Sequence[str], problems: list[str]) -> _RawData:
    """Read the files of a folder, which has at least one of the `needed` splits, and its meta.json."""
    with explain_write_errors(folder):
        entries = sorted(folder.iterdir())
    raw = _RawData({})
    paths = _files_by_split(entries)
    for split, matches in paths.items():
        if len(matches) > 1:
            problems.append(f"more than one file for {split}: {', '.join(p.name for p in matches)}. Keep one")
        elif matches:
            raw.files[split] = read_rows(matches[0], problems)
    if not any(paths[split] for split in needed):
        contents = ", ".join(p.name for p in entries[:20]) or "nothing"
        names = f"{needed[0]}{f', {needed[0]}'.join(READERS)}"
        problems.append(f"no {' or '.join(needed)} file ({names}); the folder holds: {contents}")
    meta = folder / "meta.json"
    if meta.is_file():
        _read_meta(meta, raw, problems)
    return raw


def _read_meta(path: Path, raw: _RawData, problems: list[str]) -> None:
    """Read the columns (`fields`) and the labels (`label_names`) from meta.json into `raw`."""
    try:
        meta = parse_json(path.read_text(encoding="utf-8-sig"))
        columns, labels = meta.get("fields"), meta.get("label_names")
    except (OSError, ValueError, AttributeError) as error:
        problems.append(f"meta.json is not a JSON object: {error_summary(error)}")
        return
    names = columns.values() if isinstance(columns, dict) else columns if isinstance(columns, list) else ()
    if isinstance(columns, str):
        raw.column_names = _split_names(columns)
    elif columns is None or (isinstance(columns, list | dict) and all(isinstance(name, str) for name in names)):
        raw.column_names = columns
    else:
        problems.append(f"meta.json: fields must name the columns, but it is {short_repr(columns)}")
    if isinstance(labels, list) and not any(isinstance(name, str) and has_lone_surrogate(name) for name in labels):
        raw.label_names[""] = labels
    elif labels is not None:
        problems.append(f"meta.json: label_names must be a list, not {short_repr(labels)}")


def _split_names(listed: str) -> list[str]:
    """Return the names in a list such as "context, answer (index)"."""
    return [name.strip() for name in re.sub(r"\([^)]*\)", "", listed).split(",") if name.strip()]


def _read_hub(source: str, needed: Sequence[str], layout: HubLayout) -> _RawData:
    """Read the splits of a data set of the hub, or of the copy in the cache of `datasets` if the hub is unreachable."""
    name = source.partition(":")[0].partition("@")[0]
    reason = why_not_on_hub(name, "dataset")
    try:
        with _hub_offline() if reason else contextlib.nullcontext():
            datasets = _load_from_hub(source, layout.files)
    except Exception as error:  # the hub's errors and the HTTP client's have no common ancestor
        parent = user_path(source, "data").parent
        readable = (p for p in parent.iterdir() if _holds_data(p)) if parent.is_dir() else ()
        nearby = [str(p) for p in readable]
        reason = reason or f"the hub's copy cannot be read ({error_summary(error)})"
        todo = "Give a folder with train.jsonl (or .csv, .parquet) or a hub id"
        problem = (
            f"{unknown_name('data set', source, nearby)} There is no such file or folder here, and {reason}. {todo}."
        )
        raise DeltuneError(problem) from error
    hub_splits = layout.splits or {split: stem for split, stems in SPLITS.items() for stem in stems if stem in datasets}
    if missing := [split for split in hub_splits.values() if split not in datasets]:
        raise DeltuneError(f"data {source} has no {' and no '.join(missing)} split; it has: {', '.join(datasets)}.")
    raw = _RawData(
        {
            split: DataFile(hub_split, NumberedRows(enumerate(datasets[hub_split], 1)), "row")
            for split, hub_split in hub_splits.items()
        }
    )
    if not any(split in raw.files for split in needed):
        raise DeltuneError(f"data {source} has no {' or '.join(needed)} split; it has: {', '.join(datasets)}.")
    features = {
        column: getattr(feature, "feature", feature)
        for dataset in datasets.values()
        for column, feature in dataset.features.items()
    }
    raw.label_names = {column: feature.names for column, feature in features.items() if hasattr(feature, "names")}
    raw.hidden = frozenset(raw.label_names)
    return raw


def _holds_data(path: Path) -> bool:
    """Return whether a path is a file of rows, or a folder with one for a split."""
    return any(_files_by_split([*path.glob("*")]).values()) if path.is_dir() else bool(data_suffix(path))


def _load_from_hub(source: str, files: Mapping[str, str]) -> DatasetDict:
    """Load a hub id, or some of its files, by `datasets`, which runs no code of the repository."""
    from datasets import load_dataset

    repository, _, configuration = source.partition(":")
    if files:
        file_format = data_suffix(Path(next(iter(files.values())))).lstrip(".")
        urls = {split: f"hf://datasets/{repository}/{file}" for split, file in files.items()}
        return load_dataset(file_format, data_files=urls)
    name, _, revision = repository.partition("@")
    return load_dataset(name, configuration or None, revision=revision or None)


@contextlib.contextmanager
def _hub_offline() -> Iterator[None]:
    """Let the hub's client read only its caches, so that it does not try an unreachable hub again and again."""
    from huggingface_hub import constants

    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
