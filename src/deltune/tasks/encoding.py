"""Texts as token ids: cut to a length that the model holds, in padded batches of similar length and random order."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Dataset, Sampler

from ..anatomy.inspection import inspect
from ..errors import DeltuneError
from ..runtime.attaching import find_tuned

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

CHUNK = 1000  # texts a call of the tokenizer
POOL = 150  # steps' worth of rows that are sorted by length together

Row = dict[str, Any]


@dataclass(frozen=True)
class EncodedRows(Dataset[Row]):
    """Rows of input ids (and masks, token types, labels); `truncated`: how many inputs were cut.

    texts: what the rows are of, where that is not one each (`text` of a row: which). truncated_targets: how many
    answers were cut, of those that are token sequences; in training every reference counts.
    """

    rows: Sequence[Row]
    truncated: int
    texts: int = 0
    truncated_targets: int = 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        row: Row = self.rows[index]
        return row

    def __getitems__(self, indices: Sequence[int]) -> list[Row]:
        """Several rows at once, as torch's loader asks for them."""
        taken = getattr(self.rows, "take", None)
        return [self.rows[i] for i in indices] if taken is None else taken(indices)

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of every row; of its longest choice, where it has choices."""
        return [len(i) if isinstance(i[0], int) else max(map(len, i)) for i in (row["input_ids"] for row in self.rows)]

    @cached_property
    def sizes(self) -> list[int]:
        """Tokens that every row takes in a batch: of its input or its answer, the longer; of all its choices."""
        found = []
        for row, length in zip(self.rows, self.lengths, strict=True):
            labels, ids = row.get("labels"), row["input_ids"]
            choices = 1 if isinstance(ids[0], int) else len(ids)
            found.append(choices * max(length, 0 if labels is None or isinstance(labels, int) else len(labels)))
        return found


def encode(
    tokenizer: PreTrainedTokenizerBase,
    model: PreTrainedModel,
    columns: Mapping[str, Sequence[Any]],
    max_length: int,
) -> EncodedRows:
    """The columns text, (pair) and (label) as rows that the model takes, each cut to `max_length` tokens."""
    taken = signature(model.forward).parameters
    rows: list[Row] = []
    truncated = 0
    for start in range(0, len(columns["text"]), CHUNK):
        texts = [list(columns[c][start : start + CHUNK]) for c in ("text", "pair") if c in columns]
        found = tokenizer(*texts, truncation=True, max_length=max_length)
        fields = {name: values for name, values in found.items() if name in taken}
        if "label" in columns:
            fields["labels"] = columns["label"][start : start + CHUNK]
        rows += [dict(zip(fields, values, strict=True)) for values in zip(*fields.values(), strict=True)]
        full = [i for i, ids in enumerate(found["input_ids"]) if len(ids) >= max_length]
        if full:  # only these may have been longer
            whole = tokenizer(*[[text[i] for i in full] for text in texts], truncation=False, verbose=False)
            truncated += sum(len(ids) > max_length for ids in whole["input_ids"])
    return EncodedRows(rows, truncated)


FACTS = ("prompt", "text", "tokens", "candidates", "numbers", "right", "states")
"""What rows know besides and no model reads, or not as a row's token ids."""
IGNORED = -100
"""A label that the loss passes over."""


def collate(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row]) -> dict[str, torch.Tensor]:
    """One batch, padded to its longest row; (B, choices, n) where rows have choices."""
    inputs = [{name: value for name, value in row.items() if name not in ("labels", *FACTS)} for row in rows]
    choices = 0 if isinstance(inputs[0]["input_ids"][0], int) else len(inputs[0]["input_ids"])
    if choices:
        inputs = [{name: values[i] for name, values in row.items()} for row in inputs for i in range(choices)]
    width = max(len(row["input_ids"]) for row in inputs)
    batch = dict(tokenizer.pad(inputs, padding="max_length", max_length=width, return_tensors="pt", verbose=False))
    if choices:
        batch = {name: tensor.unflatten(0, (-1, choices)) for name, tensor in batch.items()}
    if "labels" in rows[0]:
        batch["labels"] = _labels(rows, width, tokenizer.padding_side)
    for name in rows[0].get("states", ()):
        batch[name] = _states(rows, batch, name)
    return batch


def count_tokens(ids: Sequence[Any]) -> int:
    """Tokens of a row: of all its choices, where it has choices."""
    return len(ids) if isinstance(ids[0], int) else sum(map(len, ids))


def non_padding_mask(batch: Mapping[str, torch.Tensor], labels: bool) -> torch.Tensor:
    """(B, n): which tokens of a batch's inputs (of its labels) are no padding; with choices, (B choices, n)."""
    return batch["labels"] != IGNORED if labels else batch["attention_mask"].bool().flatten(0, -2)


def _states(rows: Sequence[Row], batch: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """(B, n, …): what is known of each token, of the inputs or else of the labels; 0 at padding."""
    parts = [row["states"][name] for row in rows]
    labels = any(len(part) != count_tokens(row["input_ids"]) for part, row in zip(parts, rows, strict=True))
    mask = non_padding_mask(batch, labels)
    whole = parts[0].new_zeros(*mask.shape, *parts[0].shape[1:])
    whole[mask] = torch.cat(parts)
    return whole


def _labels(rows: Sequence[Row], width: int, side: str) -> torch.Tensor:
    """(B,), or (B, n) padded with IGNORED: as wide as the tokens where they are labels of these, else by themselves."""
    labels = [row["labels"] for row in rows]
    if isinstance(labels[0], int):
        return torch.tensor(labels)
    if any(len(row["labels"]) != len(row["input_ids"]) for row in rows):
        width, side = max(map(len, labels)), "right"
    rest = [[IGNORED] * (width - len(own)) for own in labels]
    return torch.tensor([[*r, *own] if side == "left" else [*own, *r] for own, r in zip(labels, rest, strict=True)])


class LengthGroupedBatches(Sampler[list[int]]):
    """The rows of every step, of similar length and in random order; each step cut into `chunks` batches.

    By rows: rows are shuffled, sorted within pools of 150 steps, cut into steps of `size`, and the steps shuffled; the
    rows that fill no step come last. By `tokens`: all rows are sorted, those of one length in random order, and cut
    into the most rows whose number times the largest fits, a larger row by itself; the steps are shuffled. Lengths
    alone decide the cuts then, so that every epoch has as many steps.

    Seed and epoch decide the rows of a step, never `chunks`: process p of N takes the batches p, p + N, … A step with
    fewer rows than chunks has empty batches.
    """

    def __init__(
        self, lengths: Sequence[int], size: int, seed: int, chunks: int = 1, tokens: int | None = None
    ) -> None:
        self.lengths, self.size, self.seed, self.chunks, self.tokens = lengths, size, seed, chunks, tokens
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """The order of the next pass."""
        self.epoch = epoch

    @property
    def per_epoch(self) -> int:
        """Steps an epoch."""
        if self.tokens is None:
            return -(-len(self.lengths) // self.size)
        return len(self._packed(sorted(range(len(self.lengths)), key=self.lengths.__getitem__), self.tokens))

    def __len__(self) -> int:
        return self.per_epoch * self.chunks

    def __iter__(self) -> Iterator[list[int]]:
        for step in self.steps():
            small, larger = divmod(len(step), self.chunks)
            start = 0
            for i in range(self.chunks):
                stop = start + small + (i < larger)
                yield step[start:stop]
                start = stop

    def steps(self) -> list[list[int]]:
        """The rows of every step of this epoch."""
        chance = random.Random(f"{self.seed} {self.epoch}")
        order = list(range(len(self.lengths)))
        chance.shuffle(order)
        if self.tokens is not None:
            steps = self._packed(sorted(order, key=self.lengths.__getitem__), self.tokens)
            chance.shuffle(steps)
            return steps
        whole = len(order) - len(order) % self.size
        steps = []
        for start in range(0, whole, POOL * self.size):
            pool = sorted(order[start : min(start + POOL * self.size, whole)], key=self.lengths.__getitem__)
            steps += [pool[i : i + self.size] for i in range(0, len(pool), self.size)]
        chance.shuffle(steps)
        return [*steps, order[whole:]] if order[whole:] else steps

    def _packed(self, order: Sequence[int], tokens: int) -> list[list[int]]:
        """Rows, the shortest first, in as large groups as fit."""
        steps: list[list[int]] = []
        for row in order:
            if not steps or (len(steps[-1]) + 1) * self.lengths[row] > tokens:
                steps.append([])
            steps[-1].append(row)
        return steps


@torch.no_grad()
def check_causal(model: PreTrainedModel) -> None:
    """Error if a token sees those after it: what such a model predicts, it has seen. Found out by trying."""
    last = model.config.get_text_config().vocab_size - 1
    ids = torch.tensor([[last, last], [last, last - 1]], device=next(model.parameters()).device)
    training = model.training
    first = model.eval()(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[:, 0].float()
    model.train(training)
    if not torch.allclose(first[0], first[1], rtol=1e-3, atol=1e-4):
        raise DeltuneError(
            f"{type(model).__name__} is an encoder: its tokens see those after them, so it cannot answer in words. "
            "Give a decoder or an encoder-decoder, or leave the answer to a head"
        )


class _EnoughError(Exception):
    """The first layer was reached."""


def check_length(model: PreTrainedModel, max_length: int) -> None:
    """Error if rows of `max_length` tokens, together with what is attached, take more positions than the model holds.

    Found out by trying: embeddings alone are run, up to the first layer. A model without a table of positions holds
    what its configuration says, if anything.
    """
    if _fits(model, max_length):
        return
    low, high = 0, max_length
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _fits(model, middle) else (low, middle)
    bare = find_tuned(model)
    method = "" if bare is None else f" with {bare.method!r}"
    raise DeltuneError(
        f"max_length={max_length} is more than {type(model).__name__} holds{method}: {low} tokens. "
        f"Give max_length={low} or less; longer texts are cut to it"
    )


def _fits(model: PreTrainedModel, length: int) -> bool:
    stated = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if isinstance(stated, int) and length > stated > 0:
        return False
    handle = find_tuned(model)
    anatomy = handle.anatomy if handle else inspect(model)
    first = model.get_submodule(anatomy.layers[0].path)
    last = model.config.get_text_config().vocab_size - 1  # a token that is no padding
    ids = torch.full((1, length), last, device=next(model.parameters()).device)

    def stop(*_: Any) -> None:
        raise _EnoughError

    hook = first.register_forward_pre_hook(stop)
    try:
        with torch.no_grad():
            model(input_ids=ids, attention_mask=torch.ones_like(ids))
    except _EnoughError:
        return True
    except (DeltuneError, IndexError, RuntimeError):
        return False
    finally:
        hook.remove()
    return True
