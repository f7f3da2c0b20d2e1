"""Text generation by an encoder-decoder or a decoder, and language modeling, which predicts every token of a text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from inspect import signature
from typing import Any

import torch
from torch.nn import functional

from ..runtime.frozen_layers import PREFIX
from .base import Columns, InferenceContext, Predictions, TaskKind, TaskOptions
from .encoding import IGNORE_INDEX, EncodedRows, Row
from .languages import forced_bos_options
from .templates import fill_template, join_prompt_and_target, truncate_prompt


def encode_sources(tokenizer: Any, model: Any, texts: Sequence[str], max_length: int) -> EncodedRows:
    """Encode texts as inputs of an encoder, without labels.

    Args:
        tokenizer: The tokenizer.
        model: The model, whose `forward` tells which of the tokenizer's outputs it takes.
        texts: One for each row.
        max_length: Longest row, in tokens; longer ones lose their end.
    """
    model_inputs = signature(model.forward).parameters
    tokenized, truncated = _tokenize_truncated(tokenizer, texts, max_length, "text")
    rows = [{name: values[i] for name, values in tokenized.items() if name in model_inputs} for i in range(len(texts))]
    return EncodedRows(rows, truncated)


def _tokenize_truncated(tokenizer: Any, texts: Sequence[str], max_length: int, side: str) -> tuple[Any, int]:
    """Tokenize texts, cut to `max_length` tokens, and count those that were cut."""
    tokenized = tokenizer(**{side: list(texts)}, truncation=True, max_length=max_length)
    full = [text for text, ids in zip(texts, tokenized["input_ids"], strict=True) if len(ids) >= max_length]
    whole = tokenizer(**{side: full}, truncation=False, verbose=False)["input_ids"] if full else []
    return tokenized, sum(len(ids) > max_length for ids in whole)  # only these can be longer


def encode_seq2seq(tokenizer: Any, model: Any, columns: Columns, options: TaskOptions, training: bool) -> EncodedRows:
    """Encode for an encoder-decoder: the prompt as input, the target as `labels`.

    In training there is a row for every reference, otherwise one for each source, with its first reference.
    """
    prompts = fill_template(columns, options.template)
    encoded_sources = encode_sources(tokenizer, model, prompts, options.max_length)
    if "targets" not in columns:
        return encoded_sources
    pairs = [(row, t) for i, row in enumerate(encoded_sources.rows) for t in _row_targets(columns, i, training)]
    eos = tokenizer.eos_token_id
    end = [] if eos is None or eos in tokenizer(text_target="")["input_ids"] else [eos]  # else the tokenizer adds it
    room = options.max_target_length - len(end)
    tokenized, truncated = _tokenize_truncated(tokenizer, [t for _, t in pairs], max(1, room), "text_target")
    labels = tokenized["input_ids"]
    rows = [{**row, "labels": [*ids[:room], *end]} for (row, _), ids in zip(pairs, labels, strict=True)]
    return replace(encoded_sources, rows=rows, truncated_targets=truncated)


def encode_causal(tokenizer: Any, model: Any, columns: Columns, options: TaskOptions, training: bool) -> EncodedRows:
    """Encode for a decoder: prompt, target and end in one sequence, with `labels` on the target alone.

    A long prompt loses its beginning. The prompt has the tokens that it has without a target, and the target those that
    follow in the joined text; where a token of the joined text would belong to both, the target is tokenized alone. A
    row's `prompt_length` is the number of tokens before its target.
    """
    prompts = fill_template(columns, options.template)
    has_targets = "targets" in columns
    targets = [_row_targets(columns, i, training) if has_targets else [] for i in range(len(prompts))]
    rows: list[Row] = []
    truncated = truncated_targets = 0
    for i, (prompt, joined, end) in enumerate(join_prompt_and_target(tokenizer, prompts, targets)):
        truncated += len(prompt) > options.max_length
        ids = list(truncate_prompt(tokenizer, prompt, options.max_length))
        if not has_targets:
            rows.append({"input_ids": ids, "attention_mask": [1] * len(ids), "prompt_length": len(ids)})
        for target, tokens in zip(targets[i], joined, strict=True):
            target_ids = tokens[len(prompt) :]
            if tokens[: len(prompt)] != prompt:
                target_ids = tokenizer(target, add_special_tokens=False)["input_ids"]
            room = max(0, options.max_target_length - len(end))
            truncated_targets += len(target_ids) > room
            answer = [*target_ids[:room], *end]
            rows.append(
                {
                    "input_ids": [*ids, *answer],
                    "attention_mask": [1] * (len(ids) + len(answer)),
                    "labels": [IGNORE_INDEX] * len(ids) + answer,
                    "prompt_length": len(ids),
                }
            )
    return EncodedRows(rows, truncated, truncated_targets=truncated_targets)


def _row_targets(columns: Columns, i: int, training: bool) -> list[str]:
    """Return every reference in training, else the first one, for the loss."""
    targets = list(columns["targets"][i])
    return targets if training else targets[:1]


def encode_language_modeling(
    tokenizer: Any, model: Any, columns: Columns, options: TaskOptions, training: bool
) -> EncodedRows:
    """Encode texts in pieces of `max_length` tokens, each a row; its `text_index` is the text to which it belongs."""
    rows = []
    for i, text in enumerate(columns["text"]):
        ids = tokenizer(text, truncation=False, verbose=False)["input_ids"]
        for start in range(0, len(ids), options.max_length):
            piece = ids[start : start + options.max_length]
            if len(piece) > 1:  # in a piece of one token nothing is predicted
                mask = [1] * len(piece)
                rows.append({"input_ids": piece, "attention_mask": mask, "labels": list(piece), "text_index": i})
    return EncodedRows(rows, 0, len(columns["text"]))


def predict(context: InferenceContext, encoded: EncodedRows) -> Predictions:
    """Generate a text for each row; the loss is the mean over the tokens of the references, where there are any."""
    predictions: list[Any] = [None] * len(encoded)
    total_loss, count = 0.0, 0
    is_encoder_decoder = context.model.config.is_encoder_decoder
    has_labels = "labels" in encoded.rows[0]

    def process(indices: list[int], batch: dict[str, torch.Tensor]) -> None:
        nonlocal total_loss, count
        if has_labels:
            losses, counts = _row_losses(context, batch, shifted=not is_encoder_decoder)
            total_loss += losses.sum().item()
            count += int(counts.sum())
        if context.loss_only:
            return
        inputs: dict[str, Any] = {name: batch[name] for name in ("input_ids", "attention_mask")}
        if not is_encoder_decoder:
            prompts = [encoded[i]["input_ids"][: encoded[i]["prompt_length"]] for i in indices]
            inputs = _left_padded(prompts, context, batch["input_ids"].device)
        elif states := {name: tensor for name, tensor in batch.items() if name.startswith(PREFIX)}:
            inputs["encoder_outputs"] = context.model.get_encoder()(**inputs, **states)
        generate_kwargs = {
            "max_length": None,  # transformers only warns about the value of a checkpoint
            "max_new_tokens": context.options.max_target_length,
            "do_sample": False,
            "num_beams": 1,
            **(forced_bos_options(context.tokenizer, context.model) if is_encoder_decoder else {}),
            **context.options.generate_kwargs,
        }
        generated = context.model.generate(**inputs, **generate_kwargs)  # type: ignore[operator]
        answers = generated if is_encoder_decoder else generated[:, inputs["input_ids"].shape[1] :]
        texts = context.tokenizer.batch_decode(answers, skip_special_tokens=True)
        for i, text in zip(indices, texts, strict=True):
            predictions[i] = text.strip()

    context.for_each_batch(encoded, process)
    return Predictions(predictions, [None] * len(encoded), total_loss / max(count, 1) if has_labels else None)


def _left_padded(
    prompts: Sequence[list[int]], context: InferenceContext, device: torch.device
) -> dict[str, torch.Tensor]:
    """Pad prompts on the left, as `generate` needs them."""
    padding_side, context.tokenizer.padding_side = context.tokenizer.padding_side, "left"
    try:
        padded = context.tokenizer.pad({"input_ids": list(prompts)}, return_tensors="pt", verbose=False)
    finally:
        context.tokenizer.padding_side = padding_side
    return {name: padded[name].to(device) for name in ("input_ids", "attention_mask")}


def _row_losses(
    context: InferenceContext, batch: dict[str, torch.Tensor], shifted: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of every row, summed over its tokens, and the number of these tokens.

    Args:
        context: The model.
        batch: A batch with labels.
        shifted: Whether logits at one position predict the label of the next, as in a decoder.
    """
    logits = context.model(**batch).logits.float()
    labels = batch["labels"]
    if shifted:
        logits, labels = logits[:, :-1], labels[:, 1:]
    losses = functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return losses.sum(1), (labels != IGNORE_INDEX).sum(1)


def predict_log_likelihoods(context: InferenceContext, encoded: EncodedRows) -> Predictions:
    """Predict the log-likelihood of every text, in nats; references are the numbers of its predicted tokens.

    The score of a text is its perplexity.
    """
    log_likelihoods, num_tokens = [0.0] * encoded.num_texts, [0] * encoded.num_texts

    def process(indices: list[int], batch: dict[str, torch.Tensor]) -> None:
        losses, counts = _row_losses(context, batch, shifted=True)
        for i, loss, count in zip(indices, losses.tolist(), counts.tolist(), strict=True):
            log_likelihoods[encoded[i]["text_index"]] -= loss
            num_tokens[encoded[i]["text_index"]] += count

    context.for_each_batch(encoded, process)
    pairs = zip(log_likelihoods, num_tokens, strict=True)
    perplexities = [math.exp(-value / max(count, 1)) for value, count in pairs]
    return Predictions(log_likelihoods, perplexities, -sum(log_likelihoods) / max(sum(num_tokens), 1), num_tokens)


def references(columns: Columns, labels: Sequence[str]) -> list[list[str]]:
    """Return the references of all rows."""
    return [list(targets) for targets in columns["targets"]]


def row_input(columns: Columns, i: int) -> Any:
    """Return the source of row i."""
    return columns["source"][i]


SEQ2SEQ_GENERATION = TaskKind(
    name="generation",
    head="seq2seq-lm",
    default_metrics=("bleu", "rougeL", "exact"),
    metric_inputs=("texts", "answers"),
    encode=encode_seq2seq,
    predict=predict,
    references=references,
    row_input=row_input,
)
CAUSAL_GENERATION = replace(SEQ2SEQ_GENERATION, head="causal-lm", encode=encode_causal, target_follows_input=True)
LANGUAGE_MODELING = TaskKind(
    name="language",
    head="causal-lm",
    default_metrics=("perplexity",),
    metric_inputs=("log-likelihoods",),
    encode=encode_language_modeling,
    predict=predict_log_likelihoods,
    references=lambda columns, labels: [],
    row_input=lambda columns, i: columns["text"][i],
)
