"""Reading a task's data: a folder of train, validation and test files, or a hub id, checked before any training."""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import DeltuneError, closest_match, error_summary, excerpt, unknown_name
from ..filesystem import clear_write_errors, parse_json, user_path
from ..models import why_not_on_hub
from .columns import KINDS, Column, Fields, check_columns, choose_columns, guess_task_kind, has_lone_surrogate
from .hub_layouts import Layout, apply_layout
from .readers import READERS, DataFile, data_suffix, file_error, read_rows, short_repr

Ids = dict[str, list[list[int]]]
"""Label ids of every row of every split; a class is a list of one."""


def ids_of(
    files: Mapping[str, DataFile], column: str, known: Sequence[str] | None, problems: list[str]
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
                problems.append(unknown_name("label", label, names, where=where))
            elif ids.get(label) not in trained or label not in ids:
                guess = closest_match(label, train)
                hint = f" Did you mean {guess!r}?" if guess else f" Labels there: {', '.join(sorted(train)[:20])}"
                problems.append(f"label {excerpt(label)} is in {where} but nowhere in {files['train'].name}.{hint}")
    return names, {
        split: [[ids.get(label, -1) for label in row] for _, row in found] for split, found in values.items()
    }


def with_labels(file: DataFile, column: str) -> DataFile:
    """The rows that have a label, where -1 says that there is none; all of them, where none has one."""
    kept = [(place, row) for place, row in file.rows if row.get(column) != -1]
    if not kept or len(kept) == len(file.rows):
        return file
    lost = len(file.rows) - len(kept)
    warnings.warn(f"{lost} of {len(file.rows)} rows of {file.name} have no label (-1) and are left out", stacklevel=3)
    return replace(file, rows=kept)


def _labels(file: DataFile, column: str, problems: list[str]) -> list[tuple[int, list[str]]]:
    """The labels of each row as strings, with its line."""
    found = []
    for place, row in file.rows:
        value = row.get(column)
        values = value if isinstance(value, list) else [value]
        if all(isinstance(v, str | int) and v != "" for v in values):
            found.append((place, [str(v) for v in values]))
        elif column in row:
            problems.append(f"{file.at(place)}: a label is text or a whole number, not {short_repr(value)}")
    return found


def _flat(rows: Sequence[tuple[int, list[str]]]) -> list[tuple[int, str]]:
    return [(place, label) for place, labels in rows for label in labels]


def _is_id(label: str) -> bool:
    return re.fullmatch(r"-?\d{1,18}", label) is not None


if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

SPLITS = {"train": ("train",), "validation": ("validation", "valid", "dev"), "test": ("test",)}  # -> names of its file


@dataclass(frozen=True)
class Data:
    """Splits with the column id and those of the kind's roles; labels and tags are indices into `labels`.

    columns: role -> column of the source. fingerprint: hash of the labels and of every split's contents, the same for
    the same content in any file format. digests: of each split's contents alone.
    """

    splits: dict[str, Dataset]
    labels: tuple[str, ...]
    columns: dict[str, str]
    source: str
    fingerprint: str
    kind: str = "classification"
    digests: Mapping[str, str] = field(default_factory=dict)

    @property
    def facts(self) -> dict[str, Any]:
        """What is to be known of the data of a run, as JSON values."""
        rows = {split: len(found) for split, found in self.splits.items()}
        told = {name: getattr(self, name) for name in ("source", "fingerprint", "kind", "columns", "digests")}
        return {**told, "labels": list(self.labels), "rows": rows}


@dataclass
class _Raw:
    """A source as read: files by split, column names in order (or by role), label names by column ("": of any), and
    columns in which -1 says that a row has no label."""

    files: dict[str, DataFile]
    fields: Fields | None = None
    names: dict[str, Sequence[str]] = field(default_factory=dict)
    hidden: frozenset[str] = frozenset()


def load_data(
    source: str,
    columns: Fields | None = None,
    labels: Sequence[str] | None = None,
    max_rows: Mapping[str, int] | None = None,
    seed: int = 0,
    training: bool = True,
    kind: str | None = None,
    layout: Layout | None = None,
) -> Data:
    """Read a folder of train/validation/test files (.jsonl, .json, .csv, also with .gz, or .parquet) or a hub id.

    A hub id may name a revision and a configuration: OWNER/NAME@REVISION:CONFIGURATION. layout: how a hub id is laid
    out, where columns and labels do not say otherwise. kind: one of columns.KINDS; default: what the names of the
    columns tell, else classification. columns: {"text": …, "pair": …, "label": …}, or the names in the order of the
    kind's roles; default: found among the `fields` of meta.json or all columns. labels: names in the order of their
    ids; default: `label_names` of meta.json, else what train holds, sorted. max_rows: split -> size of a sample of it,
    of train drawn under `seed`, of the others always the same. Validation and test may be absent; with training=False
    (labels given) train too, but not all three. Raises one DeltuneError that lists what is wrong, with file and line.
    """
    problems: list[str] = []
    for split, wanted in (max_rows or {}).items():
        if wanted < 1:
            problems.append(f"max_rows of {split} must be at least 1, not {wanted}")
    if kind is not None and kind not in KINDS:
        raise DeltuneError(unknown_name("kind of task", kind, KINDS))
    folder = user_path(source, "data")
    if folder.is_file():
        raise DeltuneError(
            f"data {source} is a file: give the folder that holds it, with its train, validation and test"
        )
    needed = ("train",) if training else tuple(SPLITS)
    raw = _folder(folder, needed, problems) if folder.is_dir() else _hub(source, needed, layout or Layout(source))
    files = raw.files
    if layout is not None:
        apply_layout(files, layout, problems)
        columns, labels = columns or layout.named, labels or layout.labels
    first = next((files[split] for split in needed if split in files), None)
    kind = kind or (guess_task_kind(first, raw.fields) if first and not columns else "classification")
    used = choose_columns(kind, first, columns, raw.fields, problems) if first else {}
    if not used or not first or not first.rows:
        raise file_error(f"data {source}", problems)
    check_columns(files, kind, used, problems)
    labelled = next((c.role for c in KINDS[kind] if c.holds in ("label", "labels")), None)
    names: tuple[str, ...] = ()
    ids: Ids = {split: [] for split in files}
    if labelled is not None:
        known = labels or raw.names.get(used[labelled]) or raw.names.get("")
        if used[labelled] in raw.hidden:
            files = {split: with_labels(file, used[labelled]) for split, file in files.items()}
        names, ids = ids_of(files, used[labelled], known, problems)
    if problems:
        raise file_error(f"data {source}", problems)

    splits: dict[str, dict[str, list]] = {}
    for split in ids:
        rows = [row for _, row in files[split].rows]
        own = [str(row["id"]) for row in rows if "id" in row]
        if len(set(own)) < len(rows):
            own = [f"{split}-{i + 1}" for i in range(len(rows))]
        found = {c.role: [_plain(c, row[used[c.role]]) for row in rows] for c in KINDS[kind] if c.role in used}
        if labelled is not None:
            found[labelled] = [i if labelled == "tags" else i[0] for i in ids[split]]
        splits[split] = {"id": own, **found}
    for split, wanted in (max_rows or {}).items():
        if split in splits and wanted < len(splits[split]["id"]):
            drawn = random.Random(seed if split == "train" else 0).sample(range(len(splits[split]["id"])), wanted)
            chance = sorted(drawn)
            splits[split] = {key: [values[i] for i in chance] for key, values in splits[split].items()}
    content = {split: {role: values for role, values in s.items() if role != "id"} for split, s in splits.items()}
    digests = {split: _digest(values)[:16] for split, values in content.items()}

    from datasets import Dataset

    found_splits = {split: Dataset.from_dict(s) for split, s in splits.items()}
    return Data(found_splits, names, used, source, _digest([names, content]), kind, digests)


def with_label_names(data: Data, names: Mapping[str, str]) -> Data:
    """The data with other names for its labels, several of which may become one; its ids follow these, sorted.

    Errors: data without labels of whole rows, a label without a new name, a name of no label, one label only.
    """
    problems = [unknown_name("label", name, data.labels) for name in names if name not in data.labels]
    problems += [f"label {name!r} has no new name" for name in data.labels if name not in names]
    labels = tuple(sorted(set(names.values())))
    if data.kind != "classification":
        problems = [f"{data.kind} has no labels to be named anew"]
    elif len(labels) < 2 and not problems:
        problems.append(f"all labels become {labels[0]!r}; two are needed")
    if problems:
        raise file_error(f"relabel {data.source}", problems)
    ids = [labels.index(names[name]) for name in data.labels]
    splits = {
        split: rows.remove_columns("label").add_column("label", [ids[old] for old in rows["label"]])
        for split, rows in data.splits.items()
    }
    said = _digest([data.fingerprint, sorted(names.items())])
    return replace(data, splits=splits, labels=labels, fingerprint=said)


def _digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _plain(column: Column, value: Any) -> Any:
    """A value in its plainest form: answers as a list, an index as a number."""
    if column.holds == "answers":
        return [value] if isinstance(value, str) else value
    return int(value) if column.holds == "index" else value


def _folder(folder: Path, needed: Sequence[str], problems: list[str]) -> _Raw:
    """The files of a folder by split, one of `needed` among them, and what its meta.json says of them."""
    with clear_write_errors(folder):
        there = sorted(folder.iterdir())
    raw = _Raw({})
    paths = {
        split: [p for p in there if data_suffix(p) in READERS and p.name.removesuffix(data_suffix(p)) in stems]
        for split, stems in SPLITS.items()
    }
    for split, found in paths.items():
        if len(found) > 1:
            problems.append(f"more than one file for {split}: {', '.join(p.name for p in found)}. Keep one")
        elif found:
            raw.files[split] = read_rows(found[0], problems)
    if not any(paths[split] for split in needed):
        held = ", ".join(p.name for p in there[:20]) or "nothing"
        names = f"{needed[0]}{f', {needed[0]}'.join(READERS)}"
        problems.append(f"no {' or '.join(needed)} file ({names}); the folder holds: {held}")
    meta = folder / "meta.json"
    if meta.is_file():
        _meta(meta, raw, problems)
    return raw


def _meta(path: Path, raw: _Raw, problems: list[str]) -> None:
    """What meta.json says of the columns (`fields`) and the labels (`label_names`)."""
    try:
        facts = parse_json(path.read_text(encoding="utf-8-sig"))
        fields, names = facts.get("fields"), facts.get("label_names")
    except (OSError, ValueError, AttributeError) as error:
        problems.append(f"meta.json is not a JSON object: {error_summary(error)}")
        return
    listed = fields.values() if isinstance(fields, dict) else fields if isinstance(fields, list) else ()
    if isinstance(fields, str):
        raw.fields = _names(fields)
    elif fields is None or (isinstance(fields, list | dict) and all(isinstance(name, str) for name in listed)):
        raw.fields = fields
    else:
        problems.append(f"meta.json: fields names the columns, it is not {short_repr(fields)}")
    if isinstance(names, list) and not any(isinstance(name, str) and has_lone_surrogate(name) for name in names):
        raw.names[""] = names
    elif names is not None:
        problems.append(f"meta.json: label_names is a list, not {short_repr(names)}")


def _names(listed: str) -> list[str]:
    """The names in a list such as "context, answer (index)"."""
    return [name.strip() for name in re.sub(r"\([^)]*\)", "", listed).split(",") if name.strip()]


def _hub(source: str, needed: Sequence[str], layout: Layout) -> _Raw:
    """The splits of a data set of the hub; where it cannot be reached, of the copy that `datasets` keeps."""
    name = source.partition(":")[0].partition("@")[0]
    reason = why_not_on_hub(name, "dataset")
    try:
        with _offline() if reason else contextlib.nullcontext():
            found = _fetched(source, layout.files)
    except Exception as error:  # the hub's errors and the HTTP client's have no common ancestor
        parent = user_path(source, "data").parent
        beside = sorted(str(p) for p in parent.iterdir() if p.is_dir())[:20] if parent.is_dir() else []
        reason = reason or f"the hub's copy cannot be read ({error_summary(error)})"
        todo = "Give a folder with train.jsonl (or .csv, .parquet) or a hub id"
        problem = f"{unknown_name('data set', source, beside)} There is no such folder here, and {reason}. {todo}."
        raise DeltuneError(problem) from error
    theirs = layout.splits or {split: stem for split, stems in SPLITS.items() for stem in stems if stem in found}
    if missing := [split for split in theirs.values() if split not in found]:
        raise DeltuneError(f"data {source} has no {' and no '.join(missing)} split; it has: {', '.join(found)}.")
    raw = _Raw({own: DataFile(s, list(enumerate(found[s].to_list(), 1)), "row") for own, s in theirs.items()})
    if not any(split in raw.files for split in needed):
        raise DeltuneError(f"data {source} has no {' or '.join(needed)} split; it has: {', '.join(found)}.")
    features = {n: getattr(f, "feature", f) for d in found.values() for n, f in d.features.items()}
    raw.names = {n: f.names for n, f in features.items() if hasattr(f, "names")}
    raw.hidden = frozenset(raw.names)
    return raw


def _fetched(source: str, files: Mapping[str, str]) -> DatasetDict:
    """What `datasets` makes of a hub id, or of some files there: such as need no code of the repository's."""
    from datasets import load_dataset

    whole, _, part = source.partition(":")
    if files:
        built_by = data_suffix(Path(next(iter(files.values())))).lstrip(".")
        return load_dataset(built_by, data_files={s: f"hf://datasets/{whole}/{file}" for s, file in files.items()})
    name, _, revision = whole.partition("@")
    return load_dataset(name, part or None, revision=revision or None)


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Let the hub's client read its caches only, so that it does not try an unreachable hub again and again."""
    from huggingface_hub import constants

    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
