"""Generation: a text from a text, by an encoder-decoder, or by a decoder with prompt and target in one sequence; and
running text, of which every token is predicted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from inspect import signature
from typing import Any

import torch
from torch.nn import functional

from ..runtime.frozen_layers import PREFIX
from .base import Columns, InferenceContext, Limits, Predictions, TaskKind
from .encoding import IGNORED, EncodedRows, Row
from .languages import forced_bos_options
from .text_inputs import fill_template, join_prompt_and_target, truncate_prompt


def sources(tokenizer: Any, model: Any, texts: Sequence[str], max_length: int) -> EncodedRows:
    """What an encoder reads: a row a text, without labels."""
    taken = signature(model.forward).parameters
    found, truncated = _cut(tokenizer, texts, max_length, "text")
    rows = [{name: values[i] for name, values in found.items() if name in taken} for i in range(len(texts))]
    return EncodedRows(rows, truncated)


def _cut(tokenizer: Any, texts: Sequence[str], length: int, side: str) -> tuple[Any, int]:
    """Texts as tokens, at most so many of each, and how many texts were cut."""
    found = tokenizer(**{side: list(texts)}, truncation=True, max_length=length)
    full = [text for text, ids in zip(texts, found["input_ids"], strict=True) if len(ids) >= length]
    whole = tokenizer(**{side: full}, truncation=False, verbose=False)["input_ids"] if full else []
    return found, sum(len(ids) > length for ids in whole)  # only these may be longer


def encode_pairs(tokenizer: Any, model: Any, columns: Columns, limits: Limits, training: bool) -> EncodedRows:
    """For an encoder-decoder: the source as input, the target as labels; in training a row for every reference."""
    asked = sources(tokenizer, model, fill_template(columns, limits.template), limits.max_length)
    if "targets" not in columns:
        return asked
    pairs = [(row, target) for i, row in enumerate(asked.rows) for target in _targets(columns, i, training)]
    end = tokenizer.eos_token_id
    ends = [] if end is None or end in tokenizer(text_target="")["input_ids"] else [end]  # left to the caller
    room = limits.target_length - len(ends)
    found, cut = _cut(tokenizer, [target for _, target in pairs], max(1, room), "text_target")
    rows = [
        {**row, "labels": [*labels[:room], *ends]}
        for (row, _), labels in zip(pairs, found["input_ids"], strict=True)
    ]  # fmt: skip
    return replace(asked, rows=rows, truncated_targets=cut)


def encode_sequences(tokenizer: Any, model: Any, columns: Columns, limits: Limits, training: bool) -> EncodedRows:
    """For a decoder: prompt, target and end in one sequence, the loss on the target alone. A long prompt loses its
    beginning. `prompt`: how many tokens come before the target.

    The prompt's tokens are its own, as they are when the target is not known; the target's are those that follow in
    the joined text. Where one token would be of both, they are the target's own.
    """
    texts = fill_template(columns, limits.template)
    told = "targets" in columns
    targets = [_targets(columns, i, training) if told else [] for i in range(len(texts))]
    rows: list[Row] = []
    truncated = cut = 0
    for i, (alone, wholes, end) in enumerate(join_prompt_and_target(tokenizer, texts, targets)):
        truncated += len(alone) > limits.max_length
        ids = list(truncate_prompt(tokenizer, alone, limits.max_length))
        if not told:
            rows.append({"input_ids": ids, "attention_mask": [1] * len(ids), "prompt": len(ids)})
        for target, whole in zip(targets[i], wholes, strict=True):
            own = whole[len(alone) :]
            if whole[: len(alone)] != alone:
                own = tokenizer(target, add_special_tokens=False)["input_ids"]
            room = max(0, limits.target_length - len(end))
            cut += len(own) > room
            said = [*own[:room], *end]
            labels = [IGNORED] * len(ids) + said
            mask = [1] * len(labels)
            rows.append({"input_ids": [*ids, *said], "attention_mask": mask, "labels": labels, "prompt": len(ids)})
    return EncodedRows(rows, truncated, truncated_targets=cut)


def _targets(columns: Columns, i: int, training: bool) -> list[str]:
    """Every reference while training, else the first, for the loss."""
    targets = list(columns["targets"][i])
    return targets if training else targets[:1]


def encode_running(tokenizer: Any, model: Any, columns: Columns, limits: Limits, training: bool) -> EncodedRows:
    """Running text: every text in stretches of max_length tokens, each a row; `text`: which text it is of."""
    rows = []
    for i, text in enumerate(columns["text"]):
        ids = tokenizer(text, truncation=False, verbose=False)["input_ids"]
        for start in range(0, len(ids), limits.max_length):
            part = ids[start : start + limits.max_length]
            if len(part) > 1:  # of one token alone nothing is predicted
                rows.append({"input_ids": part, "attention_mask": [1] * len(part), "labels": list(part), "text": i})
    return EncodedRows(rows, 0, len(columns["text"]))


def answers(use: InferenceContext, encoded: EncodedRows) -> Predictions:
    """Generated texts, and the loss of the first reference a token, where there are references."""
    predictions: list[Any] = [None] * len(encoded)
    totals = [0.0, 0]
    both, told = use.model.config.is_encoder_decoder, "labels" in encoded.rows[0]

    def take(rows: list[int], batch: dict[str, torch.Tensor]) -> None:
        if told:
            loss, count = _loss(use, batch, shifted=not both)
            totals[0], totals[1] = totals[0] + loss.sum().item(), totals[1] + int(count.sum())
        if use.loss_only:
            return
        inputs: dict[str, Any] = {name: batch[name] for name in ("input_ids", "attention_mask")}
        if not both:
            inputs = _left([encoded[i]["input_ids"][: encoded[i]["prompt"]] for i in rows], use, batch)
        elif states := {name: tensor for name, tensor in batch.items() if name.startswith(PREFIX)}:
            inputs["encoder_outputs"] = use.model.get_encoder()(**inputs, **states)
        options = {
            "max_length": None,  # a checkpoint's own would only be warned about
            "max_new_tokens": use.limits.target_length,
            "do_sample": False,
            "num_beams": 1,
            **(forced_bos_options(use.tokenizer, use.model) if both else {}),
            **use.limits.generate,
        }
        found = use.model.generate(**inputs, **options)  # type: ignore[operator]
        found = found if both else found[:, inputs["input_ids"].shape[1] :]
        for row, text in zip(rows, use.tokenizer.batch_decode(found, skip_special_tokens=True), strict=True):
            predictions[row] = text.strip()

    use.over(encoded, take)
    return Predictions(predictions, [None] * len(encoded), totals[0] / max(totals[1], 1) if told else None)


def _left(
    prompts: Sequence[list[int]], use: InferenceContext, batch: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Prompts padded on the left, as generation wants them."""
    side, use.tokenizer.padding_side = use.tokenizer.padding_side, "left"
    try:
        found = use.tokenizer.pad({"input_ids": list(prompts)}, return_tensors="pt", verbose=False)
    finally:
        use.tokenizer.padding_side = side
    device = batch["input_ids"].device
    return {"input_ids": found["input_ids"].to(device), "attention_mask": found["attention_mask"].to(device)}


def _loss(use: InferenceContext, batch: dict[str, torch.Tensor], shifted: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of every row, summed over its tokens, and how many they are."""
    found = use.model(**batch).logits.float()
    labels = batch["labels"]
    if shifted:
        found, labels = found[:, :-1], labels[:, 1:]
    each = functional.cross_entropy(found.transpose(1, 2), labels, reduction="none")
    return each.sum(1), (labels != IGNORED).sum(1)


def likelihoods(use: InferenceContext, encoded: EncodedRows) -> Predictions:
    """The log-likelihood (nats) of every text, against its number of predicted tokens."""
    sums, tokens = [0.0] * encoded.texts, [0] * encoded.texts

    def take(rows: list[int], batch: dict[str, torch.Tensor]) -> None:
        losses, counts = _loss(use, batch, shifted=True)
        for row, value, number in zip(rows, losses.tolist(), counts.tolist(), strict=True):
            sums[encoded[row]["text"]] -= value
            tokens[encoded[row]["text"]] += number

    use.over(encoded, take)
    each = [math.exp(-value / max(number, 1)) for value, number in zip(sums, tokens, strict=True)]
    return Predictions(sums, each, -sum(sums) / max(sum(tokens), 1), tokens)


def references(columns: Columns, labels: Sequence[str]) -> list[list[str]]:
    return [list(targets) for targets in columns["targets"]]


def shown(columns: Columns, i: int) -> Any:
    return columns["source"][i]


MEASURED, COMPARED = ("bleu", "rougeL", "exact"), ("texts", "answers")

SEQ2SEQ = TaskKind("generation", "seq2seq-lm", MEASURED, COMPARED, encode_pairs, answers, references, shown)
CAUSAL = TaskKind(
    "generation", "causal-lm", MEASURED, COMPARED, encode_sequences, answers, references, shown, continues=True
)
LANGUAGE = TaskKind(
    "language", "causal-lm", ("perplexity",), ("log-likelihoods",), encode_running, likelihoods,
    lambda columns, labels: [], lambda columns, i: columns["text"][i],
)  # fmt: skip
