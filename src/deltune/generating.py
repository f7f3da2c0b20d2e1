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

from .encoding import IGNORED, Encoded, Row
from .kinds import Answers, Columns, Kind, Limits, Use
from .templates import prompts
from .trunk import PREFIX


def sources(tokenizer: Any, model: Any, texts: Sequence[str], max_length: int) -> Encoded:
    """What an encoder reads: a row a text, without labels."""
    taken = signature(model.forward).parameters
    found = tokenizer(list(texts), truncation=True, max_length=max_length)
    rows = [{name: values[i] for name, values in found.items() if name in taken} for i in range(len(texts))]
    full = [text for text, row in zip(texts, rows, strict=True) if len(row["input_ids"]) >= max_length]
    whole = tokenizer(full, truncation=False, verbose=False)["input_ids"] if full else []  # only these may be longer
    return Encoded(rows, sum(len(ids) > max_length for ids in whole))


def encode_pairs(tokenizer: Any, model: Any, columns: Columns, limits: Limits, training: bool) -> Encoded:
    """For an encoder-decoder: the source as input, the target as labels; in training a row for every reference."""
    asked = sources(tokenizer, model, prompts(columns, limits.template), limits.max_length)
    if "targets" not in columns:
        return asked
    end = tokenizer.eos_token_id
    rows: list[Row] = []
    for i, row in enumerate(asked.rows):
        for target in _targets(columns, i, training):
            labels = tokenizer(text_target=target, truncation=True, max_length=limits.target_length)["input_ids"]
            if end is not None and end not in labels:  # a tokenizer that leaves the end to the caller
                labels = [*labels[: limits.target_length - 1], end]
            rows.append({**row, "labels": labels})
    return replace(asked, rows=rows)


def encode_sequences(tokenizer: Any, model: Any, columns: Columns, limits: Limits, training: bool) -> Encoded:
    """For a decoder: prompt, target and end in one sequence, the loss on the target alone. A long prompt loses its
    beginning. `prompt`: how many tokens come before the target."""
    rows: list[Row] = []
    truncated = 0
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for i, text in enumerate(prompts(columns, limits.template)):
        ids = tokenizer(text)["input_ids"]
        ids = ids[:-1] if end and ids[-1:] == end else ids
        truncated += len(ids) > limits.max_length
        ids = ids[-limits.max_length :]
        if "targets" not in columns:
            rows.append({"input_ids": ids, "attention_mask": [1] * len(ids), "prompt": len(ids)})
            continue
        for target in _targets(columns, i, training):
            own = tokenizer(target, add_special_tokens=False)["input_ids"][: limits.target_length - len(end)] + end
            whole = ids + own
            labels = [IGNORED] * len(ids) + own
            rows.append({"input_ids": whole, "attention_mask": [1] * len(whole), "labels": labels, "prompt": len(ids)})
    return Encoded(rows, truncated)


def _targets(columns: Columns, i: int, training: bool) -> list[str]:
    """Every reference while training, else the first, for the loss."""
    targets = list(columns["targets"][i])
    return targets if training else targets[:1]


def encode_running(tokenizer: Any, model: Any, columns: Columns, limits: Limits, training: bool) -> Encoded:
    """Running text: every text in stretches of max_length tokens, each a row; `text`: which text it is of."""
    rows = []
    for i, text in enumerate(columns["text"]):
        ids = tokenizer(text, truncation=False, verbose=False)["input_ids"]
        for start in range(0, len(ids), limits.max_length):
            part = ids[start : start + limits.max_length]
            if len(part) > 1:  # of one token alone nothing is predicted
                rows.append({"input_ids": part, "attention_mask": [1] * len(part), "labels": list(part), "text": i})
    return Encoded(rows, 0, len(columns["text"]))


def answers(use: Use, encoded: Encoded) -> Answers:
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
            **use.limits.generate,
        }
        found = use.model.generate(**inputs, **options)  # type: ignore[operator]
        found = found if both else found[:, inputs["input_ids"].shape[1] :]
        for row, text in zip(rows, use.tokenizer.batch_decode(found, skip_special_tokens=True), strict=True):
            predictions[row] = text.strip()

    use.over(encoded, take)
    return Answers(predictions, [None] * len(encoded), totals[0] / max(totals[1], 1) if told else None)


def _left(prompts: Sequence[list[int]], use: Use, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Prompts padded on the left, as generation wants them."""
    side, use.tokenizer.padding_side = use.tokenizer.padding_side, "left"
    try:
        found = use.tokenizer.pad({"input_ids": list(prompts)}, return_tensors="pt", verbose=False)
    finally:
        use.tokenizer.padding_side = side
    device = batch["input_ids"].device
    return {"input_ids": found["input_ids"].to(device), "attention_mask": found["attention_mask"].to(device)}


def _loss(use: Use, batch: dict[str, torch.Tensor], shifted: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of every row, summed over its tokens, and how many they are."""
    found = use.model(**batch).logits.float()
    labels = batch["labels"]
    if shifted:
        found, labels = found[:, :-1], labels[:, 1:]
    each = functional.cross_entropy(found.transpose(1, 2), labels, reduction="none")
    return each.sum(1), (labels != IGNORED).sum(1)


def likelihoods(use: Use, encoded: Encoded) -> Answers:
    """The log-likelihood (nats) of every text, against its number of predicted tokens."""
    sums, tokens = [0.0] * encoded.texts, [0] * encoded.texts

    def take(rows: list[int], batch: dict[str, torch.Tensor]) -> None:
        losses, counts = _loss(use, batch, shifted=True)
        for row, value, number in zip(rows, losses.tolist(), counts.tolist(), strict=True):
            sums[encoded[row]["text"]] -= value
            tokens[encoded[row]["text"]] += number

    use.over(encoded, take)
    each = [math.exp(-value / max(number, 1)) for value, number in zip(sums, tokens, strict=True)]
    return Answers(sums, each, -sum(sums) / max(sum(tokens), 1), tokens)


def references(columns: Columns, labels: Sequence[str]) -> list[list[str]]:
    return [list(targets) for targets in columns["targets"]]


def shown(columns: Columns, i: int) -> Any:
    return columns["source"][i]


MEASURED, COMPARED = ("bleu", "rougeL", "exact"), ("texts", "answers")

SEQ2SEQ = Kind("generation", "seq2seq-lm", MEASURED, COMPARED, encode_pairs, answers, references, shown)
CAUSAL = Kind(
    "generation", "causal-lm", MEASURED, COMPARED, encode_sequences, answers, references, shown, continues=True
)
LANGUAGE = Kind(
    "language", "causal-lm", ("perplexity",), ("log-likelihoods",), encode_running, likelihoods,
    lambda columns, labels: [], lambda columns, i: columns["text"][i],
)  # fmt: skip
