"""Reading labelled text: a folder of train, validation and test files, or a hub id, checked before any training."""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from deltune.errors import DeltuneError, nearest, unknown
from deltune.files import READERS, File, brief, failure, read, suffix_of
from deltune.models import first_line, why_not_on_hub

if TYPE_CHECKING:
    from datasets import Dataset

SPLITS = {"train": ("train",), "validation": ("validation", "valid", "dev"), "test": ("test",)}  # -> names of its file
ROLES = ("text", "pair", "label")
LABELS = ("label", "labels", "intent", "class", "category", "target", "sentiment", "topic")  # usual names of the column
IDS = ("id", "idx", "uid", "guid", "index")
LOOKED_AT = 200  # rows of train that tell which columns are text

Fields = Mapping[str, str] | Sequence[str]


@dataclass(frozen=True)
class Data:
    """Splits with the columns id, text, (pair,) label, the label an index into `labels`.

    columns: role -> column of the source. fingerprint: hash of the labels and of every split's texts and label ids,
    the same for the same content in any file format.
    """

    splits: dict[str, Dataset]
    labels: tuple[str, ...]
    columns: dict[str, str]
    source: str
    fingerprint: str


@dataclass
class _Raw:
    """A source as read: files by split, column names in order (or by role), label names by column ("": of any)."""

    files: dict[str, File]
    fields: Fields | None = None
    names: dict[str, Sequence[str]] = field(default_factory=dict)


def load(
    source: str,
    columns: Fields | None = None,
    labels: Sequence[str] | None = None,
    max_train_rows: int | None = None,
    seed: int = 0,
    training: bool = True,
) -> Data:
    """Read a folder of train/validation/test files (.jsonl, .json, .csv, also with .gz, or .parquet) or a hub id.

    A hub id may name a configuration: nyu-mll/glue:rte. columns: {"text": …, "pair": …, "label": …}, or the names in
    the order text, (pair,) label; default: found among the `fields` of meta.json or all columns: the label by its name,
    the texts as the one or two columns of strings. labels: names in the order of their ids; default: `label_names` of
    meta.json, else what train holds, sorted. max_train_rows: size of a sample of train drawn under `seed`. Validation
    and test may be absent; with training=False (labels given) train too, but not all three. Raises one DeltuneError
    that lists what is wrong, with file and line.
    """
    problems: list[str] = []
    if max_train_rows is not None and max_train_rows < 1:
        problems.append(f"max_train_rows must be at least 1, not {max_train_rows}")
    folder = Path(source).expanduser()
    needed = ("train",) if training else tuple(SPLITS)
    raw = _folder(folder, needed, problems) if folder.is_dir() else _hub(source, needed)
    files = raw.files
    first = next((files[split] for split in needed if split in files), None)
    used = _columns(first, columns, raw.fields, problems) if first else {}
    if not used or not first or not first.rows:
        raise failure(f"data {source}", problems)
    _check_texts(files, used, problems)
    known = labels or raw.names.get(used["label"]) or raw.names.get("")
    names, ids = _label_ids(files, used["label"], known, problems)
    if problems:
        raise failure(f"data {source}", problems)

    splits: dict[str, dict[str, list]] = {}
    for split in ids:
        rows = [row for _, row in files[split].rows]
        own = [str(row["id"]) for row in rows if "id" in row]
        if len(set(own)) < len(rows):
            own = [f"{split}-{i + 1}" for i in range(len(rows))]
        texts = {role: [row[used[role]] for row in rows] for role in ROLES[:2] if role in used}
        splits[split] = {"id": own, **texts, "label": ids[split]}
    if max_train_rows is not None and max_train_rows < len(ids["train"]):
        chosen = sorted(random.Random(seed).sample(range(len(ids["train"])), max_train_rows))
        splits["train"] = {key: [values[i] for i in chosen] for key, values in splits["train"].items()}
    content = {split: {role: values for role, values in s.items() if role != "id"} for split, s in splits.items()}
    fingerprint = hashlib.sha256(json.dumps([names, content], sort_keys=True).encode()).hexdigest()

    from datasets import Dataset

    return Data({split: Dataset.from_dict(s) for split, s in splits.items()}, names, used, source, fingerprint)


def _folder(folder: Path, needed: Sequence[str], problems: list[str]) -> _Raw:
    """The files of a folder by split, one of `needed` among them, and what its meta.json says of them."""
    there = sorted(folder.iterdir())
    raw = _Raw({})
    paths = {
        split: [p for p in there if suffix_of(p) in READERS and p.name.removesuffix(suffix_of(p)) in stems]
        for split, stems in SPLITS.items()
    }
    for split, found in paths.items():
        if len(found) > 1:
            problems.append(f"more than one file for {split}: {', '.join(p.name for p in found)}. Keep one")
        elif found:
            raw.files[split] = read(found[0], problems)
    if not any(paths[split] for split in needed):
        held = ", ".join(p.name for p in there[:20]) or "nothing"
        names = f"{needed[0]}{f', {needed[0]}'.join(READERS)}"
        problems.append(f"no {' or '.join(needed)} file ({names}); the folder holds: {held}")
    meta = folder / "meta.json"
    if meta.is_file():
        try:
            told = json.loads(meta.read_text(encoding="utf-8"))
            fields, names = told.get("fields"), told.get("label_names")
        except (ValueError, AttributeError) as error:
            problems.append(f"meta.json is not a JSON object: {error}")
            return raw
        raw.fields = _names(fields) if isinstance(fields, str) else fields
        if not isinstance(fields, str | list | dict | None):
            problems.append(f"meta.json: fields names the columns, it is not {brief(fields)}")
            raw.fields = None
        if isinstance(names, list):
            raw.names[""] = names
        elif names is not None:
            problems.append(f"meta.json: label_names is a list, not {brief(names)}")
    return raw


def _names(listed: str) -> list[str]:
    """The names in a list such as "context, answer (index)"."""
    return [name.strip() for name in re.sub(r"\([^)]*\)", "", listed).split(",") if name.strip()]


def _hub(source: str, needed: Sequence[str]) -> _Raw:
    """The splits of a data set of the hub; where it cannot be reached, of the copy that `datasets` keeps."""
    from datasets import load_dataset

    name, _, part = source.partition(":")
    reason = why_not_on_hub(name, "dataset")
    try:
        with _offline() if reason else contextlib.nullcontext():
            found = load_dataset(name, part or None)
    except Exception as error:  # the hub's errors and the HTTP client's have no common ancestor
        parent = Path(source).expanduser().parent
        beside = sorted(str(p) for p in parent.iterdir() if p.is_dir())[:20] if parent.is_dir() else []
        reason = reason or f"the hub's copy cannot be read ({first_line(error)})"
        todo = "Give a folder with train.jsonl (or .csv, .parquet) or a hub id"
        problem = f"{unknown('data set', source, beside)} There is no such folder here, and {reason}. {todo}."
        raise DeltuneError(problem) from error
    splits = {stem: split for split, stems in SPLITS.items() for stem in stems}
    raw = _Raw({splits[s]: File(s, list(enumerate(d.to_list(), 1)), "row") for s, d in found.items() if s in splits})
    if not any(split in raw.files for split in needed):
        raise DeltuneError(f"data {source} has no {' or '.join(needed)} split; it has: {', '.join(found)}.")
    raw.names = {n: f.names for d in found.values() for n, f in d.features.items() if hasattr(f, "names")}
    return raw


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Let the hub's client read its caches only, so that it does not try an unreachable hub again and again."""
    from huggingface_hub import constants

    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _columns(first: File, asked: Fields | None, fields: Fields | None, problems: list[str]) -> dict[str, str]:
    """Role -> column: as asked for or as meta.json says, else inferred from the first file; empty if that fails."""
    given = asked or (fields if isinstance(fields, Mapping) else None)
    if given:
        roles = ROLES if len(given) == 3 else ("text", "label")
        used = dict(given) if isinstance(given, Mapping) else dict(zip(roles, given, strict=False))
        wrong = [unknown("role of a column", role, ROLES) for role in used if role not in ROLES]
        if {"text", "label"} - set(used) or len(set(used.values())) < len(given):
            wrong.append(f"columns are different ones for text, (pair,) label; given were {given}")
        problems += wrong
        return {} if wrong else {role: used[role] for role in ROLES if role in used}
    if not first.rows:
        return {}
    there = [c for c in fields or first.columns if c in first.columns] or first.columns
    label = next((c for name in LABELS for c in there if c.lower() == name), "")
    texts = [c for c in there if c != label and c.lower() not in (*LABELS, *IDS) and _is_text(first, c)]
    listed, todo = ", ".join(first.columns), "Say which is which: columns={'text': …, 'pair': …, 'label': …}"
    if not label:
        problems.append(f"{first.name} has no column named {' or '.join(LABELS)}. Its columns: {listed}. {todo}")
    if len(texts) not in (1, 2):
        which = f"{len(texts)} columns of text ({', '.join(texts)})" if texts else "no column of text"
        problems.append(f"{first.name} has {which} where one or two are wanted. Its columns: {listed}. {todo}")
    if not label or len(texts) not in (1, 2):
        return {}
    return {**dict(zip(ROLES, texts, strict=False)), "label": label}


def _is_text(file: File, column: str) -> bool:
    """Whether a column holds strings that are not numbers, and more than a few different ones (else: a category)."""
    values = [row.get(column) for _, row in file.rows[:LOOKED_AT]]
    strings = [v for v in values if isinstance(v, str) and not re.fullmatch(r"\s*[-+]?[\d.]*\s*", v)]
    return bool(strings) and 20 * len(set(strings)) >= len(strings)


def _check_texts(files: Mapping[str, File], used: Mapping[str, str], problems: list[str]) -> None:
    """Every split has every column, and in every row the texts are strings."""
    for file in files.values():
        there = file.columns
        for role, column in used.items():
            if file.rows and column not in there:
                problems.append(unknown("column", column, there, where=file.name))
                continue
            for n, row in file.rows:
                if column not in row:
                    problems.append(f"{file.at(n)}: column {column!r} is missing")
                elif role != "label" and not isinstance(row[column], str):
                    problems.append(f"{file.at(n)}: column {column!r} is not text but {brief(row[column])}")
                elif role != "label" and not row[column].isascii() and re.search("[\ud800-\udfff]", row[column]):
                    problems.append(f"{file.at(n)}: column {column!r} holds half a character (a lone surrogate)")


def _label_ids(
    files: Mapping[str, File], column: str, known: Sequence[str] | None, problems: list[str]
) -> tuple[tuple[str, ...], dict[str, list[int]]]:
    """The label names, and the label ids of every split whose labels are not hidden (all -1, as in GLUE's tests)."""
    values = {split: _labels(file, column, problems) for split, file in files.items()}
    for split in [s for s, found in values.items() if found and {label for _, label in found} == {"-1"}]:
        warnings.warn(f"every label in {files[split].name} is -1, so hidden; the split is left out", stacklevel=3)
        del values[split]
    train = {label for _, label in values.get("train", [])}
    numbers = all(map(_is_id, train))
    names = tuple(known or sorted(train, key=lambda label: (int(label) if numbers else 0, label)))
    if len(set(map(str, names))) < len(names) or not all(isinstance(name, str) for name in names):
        problems.append(f"label names are different strings, not {list(names)}")
        return (), {}
    if len(train) == 1:
        problems.append(f"{files['train'].name} has one label only, {train.pop()!r}; a classifier needs two or more")
        return (), {}
    ids = {name: i for i, name in enumerate(names)}
    if not any(map(_is_id, names)):  # then a number in the data is an index into the names
        ids |= {str(i): i for i in range(len(names))}
    trained = {ids.get(label) for label in train} if "train" in values else set(ids.values())
    for split, found in values.items():
        file, first = files[split], {label: n for n, label in reversed(found)}
        for label, count in Counter(label for _, label in found).items():
            where = file.at(first[label]) + (f" and {count - 1} more" if count > 1 else "")
            if label not in ids and known:
                problems.append(unknown("label", label, names, where=where))
            elif ids.get(label) not in trained or label not in ids:
                guess = nearest(label, train)
                hint = f" Did you mean {guess!r}?" if guess else f" Labels there: {', '.join(sorted(train))}"
                problems.append(f"label {label!r} is in {where} but nowhere in {files['train'].name}.{hint}")
    return names, {split: [ids.get(label, -1) for _, label in found] for split, found in values.items()}


def _labels(file: File, column: str, problems: list[str]) -> list[tuple[int, str]]:
    """The labels of a split as strings, each with its line."""
    found = []
    for n, row in file.rows:
        value = row.get(column)
        if isinstance(value, str | int) and value != "":
            found.append((n, str(value)))
        elif column in row:
            problems.append(f"{file.at(n)}: a label is text or a whole number, not {brief(value)}")
    return found


def _is_id(label: str) -> bool:
    return re.fullmatch(r"-?\d+", label) is not None
