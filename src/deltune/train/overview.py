"""What a data set holds and what a model sees of it: the first lines of a run, and `deltune data` without one."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import transformers

from ..anatomy.skeleton import fill_with_zeros
from ..anatomy.tracing import meta_model
from ..errors import DeltuneError, counted, excerpt, first_names, number_range, word_list
from ..models import HEADS, load_config
from .config import RunConfig
from .data.columns import INPUT_TYPES, TASK_COLUMNS, is_blank
from .data.formats import COLUMN, as_conversations, count_repetitions
from .data.loading import TaskData
from .data.rows import columns_of, stored_dataset
from .progress import ProgressDisplay
from .setup import fit_lengths, length_limits, load_task_data, load_task_tokenizer, task_kind_for
from .tasks.base import TaskKind, TaskOptions
from .tasks.chat import CHAT, check_lengths, notes, with_one_template
from .tasks.encoding import IGNORE_INDEX, EncodedRows, Row, has_causal_stack, not_causal_error
from .tasks.preferences import split_answer

if TYPE_CHECKING:
    from datasets import Dataset
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

TRAINED = ("⟦", "⟧")
"""The marks around what is trained of an example."""
SHOWN = 600
"""Characters of an example that are shown."""


@dataclass(frozen=True)
class Overview:
    """What a data set holds.

    Attributes:
        source: Its folder, file or hub id.
        kind: The kind of task.
        format: The format of conversations and preferences, "" for other kinds.
        shape: The shape of rows that are read into others, "" where they are read as they are.
        columns: Role -> column.
        rows: Split -> how many rows it has.
        labels: Split -> label -> how many rows have it.
        notes: What a user should know about it.
        tokens: Split -> facts about its tokens; empty without a model.
        example: A row as the model sees it, with its special tokens, what is trained between ⟦ and ⟧.
    """

    source: str
    kind: str
    format: str
    shape: str
    columns: dict[str, str]
    rows: dict[str, int]
    labels: dict[str, dict[str, int]]
    notes: tuple[str, ...]
    tokens: dict[str, dict[str, int]]
    example: str

    def as_json(self) -> dict[str, Any]:
        """Return the facts as JSON values."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Return the facts as lines."""
        roles = self.format or " and ".join(role for role in self.columns if role in INPUT_TYPES)
        roles += f" ({self.shape})" if self.shape else ""
        splits = ", ".join(f"{split} {count:,}" for split, count in self.rows.items())
        lines = [f"{self.source}: {self.kind} of {roles}", f"rows: {splits}"]
        for split, counts in self.labels.items():
            lines.append(f"labels of {split}: {balance(counts)}")
        lines += [f"{split}: {token_line(facts)}" for split, facts in self.tokens.items()]
        return [*lines, *self.notes, example_line(self.example)]


def overview(config: RunConfig, model: str | None = None, row: int = 1, *, progress: bool = False) -> Overview:
    """Read a data set, and encode it by the tokenizer of a model, if one is named, without loading any weights.

    The model of the config does not matter. `row` is the number of the row that is the example.
    """
    is_file = config.data.source is not None and Path(config.data.source).is_file()
    _, data = load_task_data(config.data, config.runtime.seed, training=is_file)  # a file alone is the train split
    split = next(iter(data.splits))
    if not 1 <= row <= len(data.splits[split]):
        raise DeltuneError(f"row {row} is none of the {len(data.splits[split]):,} rows of {split}")
    lines = [*unread_notes(data), *data_notes(data)]
    tokens, example = {}, str(_inputs(data, split, row))
    if model is not None:
        encoded, tokenizer, limits, kind, refusals = _encode(config, data, model, progress)
        tokens = {split: token_facts(rows) for split, rows in encoded.items()}
        for name, rows in encoded.items():
            lines += cut_notes(kind, rows, name, limits)
        lines += [f"a run refuses it: {error}" for error in refusals]
        answers = len(encoded[split]) and encoded[split].num_texts // len(data.splits[split])  # two of a preference
        example = example_text(tokenizer, _rows_of(encoded[split], row, max(1, answers)))
    sizes = {name: len(rows) for name, rows in data.splits.items()}
    return Overview(
        data.source,
        data.kind,
        data.format,
        data.shape,
        data.columns,
        sizes,
        label_counts(data),
        tuple(lines),
        tokens,
        example,
    )


def _inputs(data: TaskData, split: str, row: int) -> Any:
    """Return a row as it was read."""
    values = {role: value for role, value in data.splits[split][row - 1].items() if role not in ("id", "place")}
    for column in TASK_COLUMNS[data.kind] if data.labels else ():
        value = values.get(column.role)
        if column.type == "labels" and isinstance(value, list):
            values[column.role] = [data.labels[label] for label in value]
        elif column.type == "label" and isinstance(value, int):
            values[column.role] = data.labels[value]
    return values.get(COLUMN, values)


def _encode(
    config: RunConfig, data: TaskData, name: str, progress: bool
) -> tuple[dict[str, EncodedRows], PreTrainedTokenizerBase, TaskOptions, TaskKind, list[DeltuneError]]:
    """Encode all splits as a run does, by a model without weights; with the rows comes why a run refuses them."""
    configuration = load_config(name)
    pairs = data.kind == "preference"  # each is read as two conversations
    kind = CHAT if pairs else task_kind_for(data.kind, configuration, config.generation.answer)
    tokenizer = load_task_tokenizer(name, config.data)
    splits = {split: _as_chats(rows) if pairs else rows for split, rows in data.splits.items()}
    columns: dict[str, Any] = {split: columns_of(rows) for split, rows in splits.items()}
    if kind is CHAT:
        texts = next(iter(columns.values()))[COLUMN]
        tokenizer = with_one_template(tokenizer, config.generation.template, lambda: texts)
    model = meta_model(configuration, getattr(transformers, HEADS[kind.head].auto_class))
    fill_with_zeros(model)  # which take no memory; what is looked up in tables has to be there
    limits = fit_lengths(model, kind, length_limits(config.data, config.generation, kind, data.labels))
    encoded: dict[str, EncodedRows] = {}
    with ProgressDisplay(progress) as bar:
        for split, values in columns.items():
            advance = bar.start_rows(f"tokens of {split}", len(next(iter(values.values()))))
            encoded[split] = kind.encode(tokenizer, model, values, limits, True, advance)
    refusals = []
    try:
        task_kind_for(data.kind, configuration, config.generation.answer)
    except DeltuneError as error:
        refusals.append(error)
    if kind.head == "causal-lm" and not has_causal_stack(model):
        refusals.append(not_causal_error(model))
    for split, rows in encoded.items() if kind is CHAT else ():
        try:
            check_lengths(rows, split, limits.max_length, config.data.max_cut)
        except DeltuneError as error:
            refusals.append(error)
    return encoded, tokenizer, limits, kind, refusals


def _as_chats(rows: Dataset) -> Dataset:
    """Return preferences as conversations, one for each answer."""
    pairs = zip(rows[COLUMN], rows["place"], strict=True)
    return stored_dataset({COLUMN: one, "place": place} for text, place in pairs for one in as_conversations(text))


def _rows_of(encoded: EncodedRows, row: int, texts: int) -> list[Row]:
    """Return the encoded rows that a row of the data became, of so many texts each."""
    several = [one for one in encoded.rows if "text_index" in one and one["text_index"] // texts == row - 1]
    return several or [encoded.rows[min(row, len(encoded)) - 1]]


def unread_notes(data: TaskData) -> list[str]:
    """Return which columns were not read, in at most one line."""
    names = ", ".join(data.unread[:8]) + (", …" if len(data.unread) > 8 else "")
    return [f"not read: {names}; --columns says which columns are"] if names else []


def data_notes(data: TaskData) -> list[str]:
    """Return what a user should know about a data set before anything is tokenised."""
    lines = list(data.notes)
    names = next(iter(data.splits.values())).column_names
    if data.kind == "regression":
        numbers = np.concatenate([rows["score"][:] for rows in data.splits.values()])
        lines.append(f"numbers from {numbers.min():g} to {numbers.max():g}, mean {numbers.mean():.4g}")
    elif data.kind == "classification" and len(data.labels) > 2 and all(map(str.isdigit, data.labels)):
        lines.append("the labels are whole numbers, each a class; --task regression predicts them as numbers")
    lines += doubtful_labels(data.labels) if data.kind in ("classification", "multilabel") else []
    roles = [c.role for c in TASK_COLUMNS[data.kind] if c.role in names]
    inputs = [role for role in roles if role in INPUT_TYPES]
    known = None
    for split, rows in data.splits.items():
        columns = columns_of(rows)
        lines += blank_notes(data.kind, columns, split)
        texts, answers = (_hashes(columns, some) for some in (inputs, [role for role in roles if role not in inputs]))
        both = texts * 1_000_003 + answers
        if split == "train":
            known = both
        elif known is not None and (shared := int(np.isin(both, known).sum())):
            lines.append(f"{counted(shared, 'row')} of {split} also in train")
        if inputs and len(inputs) < len(roles):  # conversations have notes of their own (`data.formats`)
            lines += _repetition_notes(split, *count_repetitions(both, texts, answers))
    return lines


def doubtful_labels(labels: Sequence[str]) -> list[str]:
    """Return which labels look like mistakes of a file: two spellings of one, numbers beside words, a missing value."""
    spellings: dict[str, list[str]] = {}
    for label in labels:
        spellings.setdefault(" ".join(label.split()).casefold(), []).append(label)
    lines = [
        f"the labels {word_list(list(map(excerpt, same)))} differ in case or blanks alone, and each is a class"
        for same in spellings.values()
        if len(same) > 1
    ]
    numbers = [label for label in labels if label.isdigit()]
    if numbers and (words := [label for label in labels if not re.search(r"\d", label)]):
        lines.append(f"some labels are numbers and others words, such as {excerpt(numbers[0])} and {excerpt(words[0])}")
    missing = [label for label in labels if label.strip().casefold() in ("nan", "null", "n/a", "na")]
    lines += [f"the label {excerpt(label)} is a class; leave rows out that have no label" for label in missing]
    return lines


def blank_notes(kind: str, columns: Mapping[str, Sequence[Any]], where: str) -> list[str]:
    """Return which rows have nothing but white space where a kind of task has a text, by their ids."""
    lines = []
    for role in (c.role for c in TASK_COLUMNS[kind] if c.role in columns):
        blank = [str(name) for name, value in zip(columns["id"], columns[role], strict=True) if is_blank(value)]
        if blank:
            lines.append(f"{counted(len(blank), 'row')} of {where} without {role}: {first_names(blank, 10)}")
    return lines


def _hashes(columns: Mapping[str, Sequence[Any]], roles: Sequence[str]) -> NDArray[np.int64]:
    """Return a hash of what each row has in some columns."""
    if not roles:
        return np.zeros(len(columns["id"]), np.int64)
    return np.array([hash(repr(row)) for row in zip(*(columns[role] for role in roles), strict=True)], np.int64)


def _repetition_notes(split: str, repeated: int, differing: int) -> list[str]:
    """Return how many rows of a split stand there twice, and how many have another answer than their like."""
    lines = [f"{counted(repeated, 'repeated row')} in {split}"] if repeated else []
    if differing:
        lines.append(f"{counted(differing, 'row')} in {split} with an input that other rows answer differently")
    return lines


def label_counts(data: TaskData) -> dict[str, dict[str, int]]:
    """Return split -> label -> how many rows, or words of a tagging, have it."""
    role = next((c.role for c in TASK_COLUMNS[data.kind] if c.type in ("label", "labels")), None)
    if role is None or not data.labels:
        return {}
    counts = {}
    for split, rows in data.splits.items():
        number = Counter(one for value in rows[role] for one in (value if isinstance(value, list) else [value]))
        counts[split] = {name: number[i] for i, name in enumerate(data.labels)}
    return counts


def absent_labels(counts: dict[str, int], split: str, metrics: Sequence[str]) -> str:
    """Return what follows for a mean over labels from labels that a split has no row of; "" if nothing does."""
    means = [name for name in ("f1_macro", "label_f1_macro") if name in metrics]
    absent = [name for name, number in counts.items() if not number]
    if not means or not absent or split == "train":
        return ""
    return f"no row of {first_names(absent, 5)}, whose F1 counts as 0 in {means[0]}"


def balance(counts: dict[str, int], most: int = 8) -> str:
    """Return the shares of labels in one line, the most frequent first."""
    total = sum(counts.values()) or 1
    ordered = sorted(counts, key=lambda name: -counts[name])
    shown = ", ".join(f"{name} {counts[name] / total:.0%}" for name in ordered[:most])
    return shown + (f" and {len(ordered) - most:,} more" if len(ordered) > most else "")


def token_facts(encoded: EncodedRows) -> dict[str, int]:
    """Return numbers of tokens of a split. Of a preference each answer is counted with its prompt."""
    lengths = encoded.lengths or [0]
    if len(encoded) and "rejected_ids" in encoded.rows[0]:
        lengths = lengths + [len(split_answer(row)[0]) + len(row["rejected_ids"]) for row in encoded.rows]
    facts = {
        "shortest": min(lengths), "median": round(statistics.median(lengths)), "longest": max(lengths),
        "total": sum(lengths), "cut_rows": encoded.truncated, "cut_tokens": encoded.truncated_tokens,
    }  # fmt: skip
    return {**facts, "trained": encoded.trained_tokens} if encoded.longest else facts


def token_line(facts: dict[str, int]) -> str:
    """Return numbers of tokens in one line."""
    trained = f", {facts['trained']:,} of them trained" if "trained" in facts else ""
    span = number_range([facts["shortest"], facts["longest"]])
    return f"{span} tokens a row, median {facts['median']:,}; {facts['total']:,} in all{trained}"


def cut_notes(kind: TaskKind, encoded: EncodedRows, split: str, limits: TaskOptions) -> list[str]:
    """Return what is cut of a split, with the option that says how much."""
    if kind is CHAT:
        return notes(encoded, split, limits.max_length)
    return [
        f"{cut:,} of {len(encoded):,} {split} {texts} are cut to {tokens} tokens ({option})"
        for cut, texts, option, tokens in (
            (encoded.truncated, "inputs", "--max-length", limits.max_length),
            (encoded.truncated_targets, "targets", "--target-length", limits.max_target_length),
        )
        if cut
    ]


def example_text(tokenizer: Any, rows: Sequence[Row]) -> str:
    """Return rows as the model sees them: special tokens shown, what is trained marked, long ones without a middle."""
    texts = [_shown(tokenizer, row) for row in rows]
    return " | ".join(text if len(text) <= SHOWN else f"{text[: SHOWN // 2]} … {text[-SHOWN // 2 :]}" for text in texts)


def example_line(example: str) -> str:
    """Return the line of an example, which says what the marks in it are."""
    legend = f", trained between {' and '.join(TRAINED)}" if TRAINED[0] in example else ""
    return f"example{legend}: {example}"


def _shown(tokenizer: Any, row: Row) -> str:
    ids, labels = row["input_ids"], row.get("labels")
    if not isinstance(ids[0], int):
        return " | ".join(str(tokenizer.decode(choice)) for choice in ids)
    has_numbers = isinstance(labels, list) and labels and isinstance(labels[0], float)
    if not isinstance(labels, list) or has_numbers or len(labels) != len(ids):
        target = [t for t in labels if t != IGNORE_INDEX] if isinstance(labels, list) and not has_numbers else []
        return str(tokenizer.decode(ids)) + (f" {TRAINED[0]}{tokenizer.decode(target)}{TRAINED[1]}" if target else "")
    text, start = "", 0
    for stop in range(1, len(ids) + 1):
        if stop == len(ids) or (labels[stop] == IGNORE_INDEX) != (labels[start] == IGNORE_INDEX):
            part = str(tokenizer.decode(ids[start:stop]))
            text += part if labels[start] == IGNORE_INDEX else f"{TRAINED[0]}{part}{TRAINED[1]}"
            start = stop
    return text
