"""Tokenized rows and their batches: truncation, padding, batches of rows of similar length, checks of the length."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, wraps
from inspect import signature
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Dataset, Sampler
from transformers import AutoModelForCausalLM

from ...anatomy.inspection import inspect
from ...anatomy.tracing import meta_model
from ...errors import DeltuneError
from ...runtime.attach import find_tuned
from ...runtime.causal_loss import IGNORE_INDEX as IGNORE_INDEX
from ...runtime.padding import Side, eval_mode, padding_side
from ...templates import begin_token
from ..data.rows import Row as Row
from ..data.rows import RowCollector, in_slices

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

TOKENIZER_BATCH = 1000
"""Rows in one call of the tokenizer."""
POOL_STEPS = 150
"""Steps whose rows are sorted by length together."""


@dataclass(frozen=True)
class EncodedRows(Dataset[Row]):
    """Tokenized rows: input ids, and masks, token types and labels where the model takes them.

    Attributes:
        rows: The rows, as the model's arguments by name and the keys of `NOT_MODEL_INPUTS`.
        truncated: How many inputs were cut.
        num_texts: How many texts the rows belong to, where a text has several rows; a row's `text_index` says to which.
        truncated_targets: How many answers that are token sequences were cut. In training every reference counts.
        truncated_tokens: How many tokens of conversations were cut.
        untrained: How many conversations have no token that is trained.
        trained_tokens: How many tokens of conversations are trained.
        longest: How many tokens the longest conversation has.
        notes: What else a user should know about how conversations were encoded.
    """

    rows: Sequence[Row]
    truncated: int
    num_texts: int = 0
    truncated_targets: int = 0
    truncated_tokens: int = 0
    untrained: int = 0
    trained_tokens: int = 0
    longest: int = 0
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        row: Row = self.rows[index]
        return row

    def __getitems__(self, indices: Sequence[int]) -> list[Row]:
        """Return several rows at once, as torch's DataLoader asks for them."""
        take = getattr(self.rows, "take", None)
        return [self.rows[i] for i in indices] if take is None else take(indices)

    @cached_property
    def lengths(self) -> list[int]:
        """The number of tokens of every row, or of its longest choice."""
        return [len(i) if isinstance(i[0], int) else max(map(len, i)) for i in (row["input_ids"] for row in self.rows)]

    @cached_property
    def sizes(self) -> list[int]:
        """The number of tokens that every row takes in a batch: its input's or answer's, whichever is longer."""
        sizes = []
        for row, length in zip(self.rows, self.lengths, strict=True):
            labels, ids = row.get("labels"), row["input_ids"]
            choices = 1 if isinstance(ids[0], int) else len(ids)
            sizes.append(choices * max(length, len(labels) if isinstance(labels, list) else 0))
        return sizes


def tokenize(
    tokenizer: Any, *texts: Sequence[Any], names: Sequence[str], stand_in: int | None = None, **options: Any
) -> Any:
    """Tokenize texts, with a mask; a text without tokens becomes the token that begins a text."""
    tokenized = tokenizer(*texts, return_attention_mask=True, **options)
    empty = [i for i, ids in enumerate(tokenized["input_ids"]) if not ids]
    begin = stand_in if begin_token(tokenizer) is None else begin_token(tokenizer)
    if empty and begin is None:
        raise no_tokens([names[i] for i in empty])
    for i in empty:
        for name, values in tokenized.items():
            values[i] = [{"input_ids": begin, "attention_mask": 1}.get(name, 0)]
    return tokenized


def in_chunks(encode: Callable[..., EncodedRows]) -> Callable[..., EncodedRows]:
    """Give an encoder some rows at a time, and collect what it returns; `advance` is told how many are done."""

    @wraps(encode)
    def encode_all(
        tokenizer: Any, model: Any, columns: Mapping[str, Sequence[Any]], options: Any, training: bool,
        advance: Callable[[int], None] | None = None,
    ) -> EncodedRows:  # fmt: skip
        rows, truncated, texts, truncated_targets = RowCollector(), 0, 0, 0
        names = row_names(columns)
        for first, part in in_slices({**columns, "id": names}):
            some = encode(tokenizer, model, part, options, training)
            for i, row in enumerate(some.rows):
                if "task" in part:
                    row = {**row, "task": part["task"][row.get("text_index", i)]}
                rows.append({**row, "text_index": row["text_index"] + first} if "text_index" in row else row)
            truncated, texts = truncated + some.truncated, texts + some.num_texts
            truncated_targets += some.truncated_targets
            if advance is not None:
                advance(len(part["id"]))
        return EncodedRows(rows.rows(), truncated, texts, truncated_targets)

    return encode_all


def row_names(columns: Mapping[str, Sequence[Any]]) -> Sequence[str]:
    """Return the ids of rows, or else their numbers, for messages."""
    return columns["id"] if "id" in columns else [str(i + 1) for i in range(len(next(iter(columns.values()))))]


def no_tokens(names: Sequence[str], target: bool = False) -> DeltuneError:
    """Return the error for rows whose text, or target, has no tokens where the tokenizer has none to put there."""
    listed, rest = ", ".join(names[:10]), f" and {len(names) - 10} more" if len(names) > 10 else ""
    what, end, token = ("target", "end", "eos_token") if target else ("text", "beginning", "bos_token")
    return DeltuneError(
        f"row {listed}{rest}: the {what} has no tokens, and the tokenizer has no token for the {end} of a text. Leave "
        f"these rows out, or set {token} in tokenizer_config.json"
    )


def encode_texts(
    tokenizer: PreTrainedTokenizerBase,
    model: PreTrainedModel,
    columns: Mapping[str, Sequence[Any]],
    max_length: int,
) -> EncodedRows:
    """Tokenize texts, or pairs of texts."""
    model_inputs, names = signature(model.forward).parameters, row_names(columns)
    rows: list[Row] = []
    truncated = 0
    for start in range(0, len(columns["text"]), TOKENIZER_BATCH):
        chunk = slice(start, start + TOKENIZER_BATCH)
        texts = [list(columns[c][chunk]) for c in ("text", "pair") if c in columns]
        tokenized = tokenize(tokenizer, *texts, names=names[chunk], truncation=True, max_length=max_length)
        fields = {name: values for name, values in tokenized.items() if name in model_inputs}
        rows += [dict(zip(fields, values, strict=True)) for values in zip(*fields.values(), strict=True)]
        full = [i for i, ids in enumerate(tokenized["input_ids"]) if len(ids) >= max_length]
        if full:  # only these can have been longer
            whole = tokenizer(*[[text[i] for i in full] for text in texts], truncation=False, verbose=False)
            truncated += sum(len(ids) > max_length for ids in whole["input_ids"])
    return EncodedRows(rows, truncated)


NOT_MODEL_INPUTS = (
    "prompt_length", "text_index", "tokens", "words", "num_words", "candidates", "candidate_indices", "correct",
    "states", "task",
)  # fmt: skip
"""Keys of rows that are not padded and given to the model like token ids.

prompt_length: tokens before the target. text_index: the text that the row belongs to. tokens: the words of a text whose
entities are written. words, num_words: which words of a text have a token, and how many words it has. candidates,
candidate_indices: the tokens and the indices of the answers that the row scores. correct: the index of the correct
answer. states: argument -> cached activations. task: the name of the row's task.
"""


def collate(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, rows: Sequence[Row]) -> dict[str, torch.Tensor]:
    """Make a batch of rows, padded to the longest on the side that leaves the model's answers as they are."""
    inputs = [{name: value for name, value in row.items() if name not in ("labels", *NOT_MODEL_INPUTS)} for row in rows]
    choices = 0 if isinstance(inputs[0]["input_ids"][0], int) else len(inputs[0]["input_ids"])
    if choices:
        inputs = [{name: values[i] for name, values in row.items()} for row in inputs for i in range(choices)]
    lengths, side = {len(row["input_ids"]) for row in inputs}, padding_side(model)
    width = max(lengths)
    if side is None and len(lengths) > 1:
        raise DeltuneError(
            f"{type(model).__name__} answers otherwise beside padding, and texts of different lengths in one row, such "
            "as choices, need padding. Choose a model of another family"
        )
    padded = tokenizer.pad(
        inputs, padding="max_length", max_length=width, padding_side=side or "right", return_tensors="pt",
        return_attention_mask="attention_mask" in inputs[0], verbose=False,
    )  # fmt: skip
    batch = dict(padded)
    if choices:
        batch = {name: tensor.unflatten(0, (-1, choices)) for name, tensor in batch.items()}
    if "labels" in rows[0]:
        batch["labels"] = _labels(rows, width, side)
    for name in rows[0].get("states", ()):
        batch[name] = _states(rows, batch, name)
    return batch


def count_tokens(ids: Sequence[Any]) -> int:
    """Return the number of tokens of a row's input ids, or of all its choices."""
    return len(ids) if isinstance(ids[0], int) else sum(map(len, ids))


def non_padding_mask(batch: Mapping[str, torch.Tensor], labels: bool) -> torch.Tensor:
    """Return which tokens of a batch are not padding."""
    return batch["labels"] != IGNORE_INDEX if labels else batch["attention_mask"].bool().flatten(0, -2)


def _states(rows: Sequence[Row], batch: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """Return cached activations as (B, n, …), with 0 at padding, for the tokens of the inputs or else of the labels."""
    parts = [row["states"][name] for row in rows]
    labels = any(len(part) != count_tokens(row["input_ids"]) for part, row in zip(parts, rows, strict=True))
    mask = non_padding_mask(batch, labels)
    states = parts[0].new_zeros(*mask.shape, *parts[0].shape[1:])
    states[mask] = torch.cat(parts)
    return states


def _labels(rows: Sequence[Row], width: int, side: Side | None) -> torch.Tensor:
    """Return labels as (B,), or as (B, n) padded with IGNORE_INDEX: like the input ids if they label these tokens."""
    labels = [row["labels"] for row in rows]
    if not isinstance(labels[0], list) or (labels[0] and isinstance(labels[0][0], float)):
        return torch.tensor(labels)
    if any(len(row["labels"]) != len(row["input_ids"]) for row in rows):
        width, side = max(map(len, labels)), "right"
    padding = [[IGNORE_INDEX] * (width - len(row)) for row in labels]
    pairs = zip(labels, padding, strict=True)
    return torch.tensor([[*pad, *row] if side == "left" else [*row, *pad] for row, pad in pairs])


def longest_first(lengths: Sequence[int], size: int, same_length: bool) -> Iterator[list[int]]:
    """Yield the indices of rows in batches, the longest rows first."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    groups = [list(group) for _, group in groupby(order, lengths.__getitem__)] if same_length else [order]
    for group in groups:
        yield from (group[start : start + size] for start in range(0, len(group), size))


class LengthGroupedBatches(Sampler[list[int]]):
    """Groups rows of similar length into steps, in random order, and splits each step into `num_chunks` batches.

    By number of rows: rows are shuffled, sorted by length within pools of `POOL_STEPS` steps, and cut into steps of
    `rows_per_step` rows; the steps are shuffled, and the rows that do not fill a step come last.

    By number of tokens: all rows are sorted by length, those of one length in random order, and cut into steps of as
    many rows as fit, padding included, or of one row that is larger; the steps are shuffled. Since only lengths decide
    the cuts, every epoch has the same number of steps.

    Where all rows of a step must have the same length, steps by number of rows are cut in this way too.

    Seed and epoch decide the rows of a step, and `num_chunks` does not: process p of N takes the batches p, p + N, … A
    step with fewer rows than chunks has empty batches.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        rows_per_step: int,
        seed: int,
        num_chunks: int = 1,
        max_tokens: int | None = None,
        same_length: bool = False,
    ) -> None:
        self.lengths, self.rows_per_step, self.seed = lengths, rows_per_step, seed
        self.num_chunks, self.max_tokens, self.same_length = num_chunks, max_tokens, same_length
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch whose order the next iteration has."""
        self.epoch = epoch

    @property
    def steps_per_epoch(self) -> int:
        """The number of steps in an epoch."""
        if self._cut_by_length:
            return len(self._pack(sorted(range(len(self.lengths)), key=self.lengths.__getitem__)))
        return -(-len(self.lengths) // self.rows_per_step)

    @property
    def _cut_by_length(self) -> bool:
        return self.same_length or self.max_tokens is not None

    def __len__(self) -> int:
        return self.steps_per_epoch * self.num_chunks

    def __iter__(self) -> Iterator[list[int]]:
        for step in self.steps():
            small, larger = divmod(len(step), self.num_chunks)
            start = 0
            for i in range(self.num_chunks):
                stop = start + small + (i < larger)
                yield step[start:stop]
                start = stop

    def steps(self) -> list[list[int]]:
        """Return the indices of the rows of every step of this epoch."""
        rng = random.Random(f"{self.seed} {self.epoch}")
        order = list(range(len(self.lengths)))
        rng.shuffle(order)
        if self._cut_by_length:
            steps = self._pack(sorted(order, key=self.lengths.__getitem__))
            rng.shuffle(steps)
            return steps
        in_full_steps = len(order) - len(order) % self.rows_per_step
        steps = []
        for start in range(0, in_full_steps, POOL_STEPS * self.rows_per_step):
            pool = sorted(
                order[start : min(start + POOL_STEPS * self.rows_per_step, in_full_steps)], key=self.lengths.__getitem__
            )
            steps += [pool[i : i + self.rows_per_step] for i in range(0, len(pool), self.rows_per_step)]
        rng.shuffle(steps)
        remaining = order[in_full_steps:]
        return [*steps, remaining] if remaining else steps

    def _pack(self, order: Sequence[int]) -> list[list[int]]:
        """Cut rows, given with the shortest first, into groups as large as fit."""
        steps: list[list[int]] = []
        for row in order:
            if not steps or not self._fits(steps[-1], row):
                steps.append([])
            steps[-1].append(row)
        return steps

    def _fits(self, step: Sequence[int], row: int) -> bool:
        if self.same_length and self.lengths[step[0]] != self.lengths[row]:
            return False
        if self.max_tokens is None:
            return len(step) < self.rows_per_step
        return (len(step) + 1) * self.lengths[row] <= self.max_tokens


@torch.no_grad()
def check_causal(model: PreTrainedModel) -> None:
    """Check by a forward pass that no token attends to later ones, so that the model can predict the next token."""
    last = model.config.get_text_config().vocab_size - 1
    ids = torch.tensor([[last, last], [last, last - 1]], device=next(model.parameters()).device)
    with eval_mode(model):
        first = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[:, 0].float()
    if not torch.allclose(first[0], first[1], rtol=1e-3, atol=1e-4):
        raise not_causal_error(model)


def check_decoder(config: PreTrainedConfig) -> None:
    """Check by a model without weights that it predicts the next token, where it is no encoder-decoder."""
    if not config.is_encoder_decoder:
        model = meta_model(config, AutoModelForCausalLM)
        if not has_causal_stack(model):
            raise not_causal_error(model)


def has_causal_stack(model: PreTrainedModel) -> bool:
    """Return whether tokens of a model, which may have no weights, attend to none after them."""
    return any(stack.causal for stack in inspect(model).stacks)


def not_causal_error(model: PreTrainedModel) -> DeltuneError:
    """Return the error for a model that cannot predict the next token."""
    return DeltuneError(
        f"{type(model).__name__} is an encoder: its tokens attend to those after them, so it cannot generate text. "
        "Give a decoder or an encoder-decoder, or leave the answer to a head"
    )


class _FirstLayerReached(Exception):
    """Stops a forward pass at the first layer."""


def longest_length(model: PreTrainedModel, max_length: int) -> int:
    """Return how many tokens, up to `max_length`, a model has positions for beside what is attached to it.

    The embeddings alone are run, up to the first layer. A model without a table of positions has as many as its
    configuration says, if it says so.
    """
    if _fits(model, max_length):
        return max_length
    return bisect_left(range(1, max_length), True, key=lambda length: not _fits(model, length))


def _fits(model: PreTrainedModel, length: int) -> bool:
    configured = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if isinstance(configured, int) and length > configured > 0:
        return False
    handle = find_tuned(model)
    anatomy = handle.anatomy if handle else inspect(model)
    first = model.get_submodule(anatomy.layers[0].path)
    last = model.config.get_text_config().vocab_size - 1  # a token that is not padding
    ids = torch.full((1, length), last, device=next(model.parameters()).device)

    def stop(*_: Any) -> None:
        raise _FirstLayerReached

    hook = first.register_forward_pre_hook(stop)
    try:
        with torch.no_grad():
            model(input_ids=ids, attention_mask=torch.ones_like(ids))
    except _FirstLayerReached:
        return True
    except (DeltuneError, IndexError, RuntimeError):
        return False
    finally:
        hook.remove()
    return True
