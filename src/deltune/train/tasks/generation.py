"""Text generation by an encoder-decoder or a decoder, and language modeling, which predicts every token of a text.

A prompt is a template filled with a row's inputs, tokenized with its target. A model with a multilingual tokenizer is
made to begin with the token by which the generated text is in the right language.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from string import Formatter
from typing import Any

import torch

from ...errors import DeltuneError, unknown_name
from ...models import forced_bos_options
from ...runtime.causal_loss import row_losses
from ...runtime.padding import supports_left_padding
from ...templates import (
    Tokens,
    begin_token,
    cut_at_end,
    end_tokens,
    surrounding_tokens,
    target_end,
    tokenize_prompts,
)
from ..data.columns import INPUT_TYPES
from ..data.rows import RowCollector
from ..frozen_layers import PREFIX
from .base import Columns, InferenceContext, Predictions, TaskKind, TaskOptions
from .encoding import (
    IGNORE_INDEX,
    TOKENIZER_BATCH,
    EncodedRows,
    Row,
    encode_texts,
    in_chunks,
    longest_first,
    no_tokens,
    row_names,
)


def tokenize_prompt_and_targets(
    tokenizer: Any, prompts: Sequence[str], targets: Sequence[Sequence[str]], side: str = "text"
) -> Iterator[tuple[Tokens, list[Tokens]]]:
    """Tokenize each prompt alone and together with each of its targets.

    A blank stands between prompt and target, unless one of them is empty or the prompt ends with white space. The
    joined text is tokenized as a whole: a tokenizer may attach the blank to the next word, or join the last letters of
    the prompt and the first of the target to one token, so that the tokens of the joined text need not begin with the
    prompt's.
    """
    for first in range(0, len(prompts), TOKENIZER_BATCH):
        chunk = slice(first, first + TOKENIZER_BATCH)
        texts = [
            [prompt, *(prompt + (" " if t and prompt and not prompt[-1].isspace() else "") + t for t in row_targets)]
            for prompt, row_targets in zip(prompts[chunk], targets[chunk], strict=True)
        ]
        tokenized = iter(tokenize_prompts(tokenizer, [text for row in texts for text in row], side))
        for row in texts:
            prompt_tokens, *joined = [next(tokenized) for _ in row]
            yield prompt_tokens, joined


def common_prefix_length(sequences: Sequence[Sequence[int]]) -> int:
    """Return the number of tokens that all sequences begin with."""
    is_same = [len(set(tokens)) == 1 for tokens in zip(*sequences, strict=False)]
    return [*is_same, False].index(False)


def truncate_prompt(tokenizer: Any, prompt: Tokens, max_length: int, name: str) -> Tokens:
    """Return the last `max_length` tokens of a prompt; for an empty prompt the token that begins a text."""
    if prompt:
        return prompt[-max_length:]
    begin = begin_token(tokenizer)
    if begin is None:
        raise no_tokens([name])
    return (begin,)


def fill_template(columns: Columns, template: str) -> list[str]:
    """Fill a template with the inputs of every row; a list of texts is joined with blanks."""
    inputs = {role: columns[role] for role in INPUT_TYPES if role in columns}
    text_roles = [role for role in inputs if INPUT_TYPES[role] == "text"] or list(inputs)
    template = template or " ".join(f"{{{role}}}" for role in text_roles)
    try:
        fields = [part for part in Formatter().parse(template) if part[1] is not None]
    except ValueError as error:
        raise DeltuneError(f"template {template!r}: {error}; write a literal brace twice") from error
    roles = [str(name) for _, name, _, _ in fields]
    if formatted := [name for _, name, format_spec, conversion in fields if format_spec or conversion]:
        raise DeltuneError(f"template {template!r}: {{{formatted[0]}}} cannot have a format after its name")
    if problems := [unknown_name("role", role, inputs, where="template") for role in roles if role not in inputs]:
        raise DeltuneError(" ".join(problems))
    values = {role: [v if isinstance(v, str) else " ".join(v) for v in inputs[role]] for role in dict.fromkeys(roles)}
    num_rows = len(next(iter(inputs.values())))
    return [template.format(**{role: texts[i] for role, texts in values.items()}) for i in range(num_rows)]


@in_chunks
def encode_seq2seq(tokenizer: Any, model: Any, columns: Columns, options: TaskOptions, training: bool) -> EncodedRows:
    """Encode for an encoder-decoder: the prompt as input, the target as `labels`.

    In training there is a row for every reference, otherwise one for each source, with its first reference.
    """
    prompts = fill_template(columns, options.template)
    names = row_names(columns)
    encoded_sources = encode_texts(tokenizer, model, {"text": prompts, "id": names}, options.max_length)
    if "targets" not in columns:
        return encoded_sources
    pairs = [(i, target) for i in range(len(prompts)) for target in _row_targets(columns, i, training)]
    written = surrounding_tokens(tokenizer, "text_target")[1]
    end = () if written else target_end(tokenizer, model, "text_target")
    room = options.max_target_length - len(end)
    targets, longest = [target for _, target in pairs], max(1, room)
    labels = tokenizer(text_target=targets, truncation=True, max_length=longest)["input_ids"]
    full = [target for target, ids in zip(targets, labels, strict=True) if len(ids) >= longest]  # others were shorter
    whole = tokenizer(text_target=full, truncation=False, verbose=False)["input_ids"] if full else []
    truncated = sum(len(ids) > longest for ids in whole)
    rows = [
        {**encoded_sources[i], "labels": [*ids[:room], *end], "text_index": i}
        for (i, _), ids in zip(pairs, labels, strict=True)
    ]
    if empty := [names[i] for (i, _), row in zip(pairs, rows, strict=True) if not row["labels"]]:
        raise no_tokens(empty, target=True)
    return replace(encoded_sources, rows=rows, truncated_targets=truncated)


@in_chunks
def encode_causal(tokenizer: Any, model: Any, columns: Columns, options: TaskOptions, training: bool) -> EncodedRows:
    """Encode for a decoder: prompt, target and end in one sequence, with `labels` on the target alone.

    A long prompt loses its beginning. The prompt has the tokens that it has without a target, and the target those that
    follow in the joined text; where a token of the joined text would belong to both, the target is tokenized alone. A
    row's `prompt_length` is the number of tokens before its target.
    """
    prompts = fill_template(columns, options.template)
    has_targets, names = "targets" in columns, row_names(columns)
    targets = [_row_targets(columns, i, training) if has_targets else [] for i in range(len(prompts))]
    rows: list[Row] = []
    empty_targets: list[str] = []
    truncated = truncated_targets = 0
    end = target_end(tokenizer, model)
    for i, (prompt, joined) in enumerate(tokenize_prompt_and_targets(tokenizer, prompts, targets)):
        truncated += len(prompt) > options.max_length
        ids = list(truncate_prompt(tokenizer, prompt, options.max_length, names[i]))
        if not has_targets:
            rows.append({"input_ids": ids, "attention_mask": [1] * len(ids), "prompt_length": len(ids)})
        for target, tokens in zip(targets[i], joined, strict=True):
            target_ids = tokens[len(prompt) :]
            if tokens[: len(prompt)] != prompt:
                target_ids = tokenizer(target, add_special_tokens=False)["input_ids"]
            room = max(0, options.max_target_length - len(end))
            truncated_targets += len(target_ids) > room
            answer = [*target_ids[:room], *end]
            empty_targets += [] if answer else [names[i]]
            rows.append(
                {
                    "input_ids": [*ids, *answer],
                    "attention_mask": [1] * (len(ids) + len(answer)),
                    "labels": [IGNORE_INDEX] * len(ids) + answer,
                    "prompt_length": len(ids),
                    "text_index": i,
                }
            )
    if empty_targets:
        raise no_tokens(empty_targets, target=True)
    return EncodedRows(rows, truncated, truncated_targets=truncated_targets)


def _row_targets(columns: Columns, i: int, training: bool) -> list[str]:
    """Return every reference in training, else the first one, for the loss."""
    targets = list(columns["targets"][i])
    return targets if training else targets[:1]


@in_chunks
def encode_language_modeling(
    tokenizer: Any, model: Any, columns: Columns, options: TaskOptions, training: bool
) -> EncodedRows:
    """Encode texts in pieces of `max_length` tokens, each a row; its `text_index` is the text to which it belongs."""
    rows = RowCollector()
    for i, text in enumerate(columns["text"]):
        ids = tokenizer(text, truncation=False, verbose=False)["input_ids"]
        for start in range(0, len(ids), options.max_length):
            piece = ids[start : start + options.max_length]
            if len(piece) > 1:  # in a piece of one token nothing is predicted
                mask = [1] * len(piece)
                rows.append({"input_ids": piece, "attention_mask": mask, "labels": list(piece), "text_index": i})
    return EncodedRows(rows.rows(), 0, len(columns["text"]))


def predict(context: InferenceContext, encoded: EncodedRows) -> Predictions:
    """Generate a text for each row; the loss is the mean over the tokens of the references, where there are any."""
    predictions: list[Any] = [None] * len(encoded)
    total_loss, count = 0.0, 0
    is_encoder_decoder = context.model.config.is_encoder_decoder
    has_labels = "labels" in encoded.rows[0]
    ends = end_tokens(context.tokenizer, context.model)
    if not ends:
        warnings.warn(
            "neither the tokenizer nor the model has a token that ends a text, so every answer has its longest length. "
            "Set eos_token of the tokenizer",
            stacklevel=2,
        )

    def process(indices: list[int], batch: dict[str, torch.Tensor]) -> None:
        nonlocal total_loss, count
        if has_labels:
            losses, counts, _ = row_losses(context.model, batch)
            total_loss += losses.sum().item()
            count += int(counts.sum())
        if context.loss_only:
            return
        inputs: dict[str, Any] = {name: batch[name] for name in ("input_ids", "attention_mask")}
        groups = [(indices, inputs)]
        if not is_encoder_decoder:
            groups = list(_prompts(context, encoded, indices))
        elif states := {name: tensor for name, tensor in batch.items() if name.startswith(PREFIX)}:
            inputs["encoder_outputs"] = context.model.get_encoder()(**inputs, **states)
        generate_kwargs = {
            "max_length": None,  # transformers only warns about the value of a checkpoint
            "max_new_tokens": context.options.max_target_length,
            "do_sample": False,
            "num_beams": 1,
            "eos_token_id": list(ends) or None,
            **(forced_bos_options(context.tokenizer, context.model) if is_encoder_decoder else {}),
            **context.options.generate_kwargs,
        }
        for chosen, inputs in groups:
            with context.passes_of(chosen, encoded.__getitems__(chosen)):  # in another order than the batch
                generated = context.model.generate(**inputs, **generate_kwargs)  # type: ignore[operator]
            start = 1 if is_encoder_decoder else inputs["input_ids"].shape[1]
            answers = [cut_at_end(tokens, ends) for tokens in generated[:, start:].tolist()]
            texts = context.tokenizer.batch_decode(answers, skip_special_tokens=True)
            for i, text in zip(chosen, texts, strict=True):
                predictions[i] = text.strip()

    context.for_each_batch(encoded, process)
    return Predictions(predictions, [None] * len(encoded), total_loss / max(count, 1) if has_labels else None)


READ_THE_PROMPT = (
    "repetition_penalty", "encoder_repetition_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size",
    "min_length",
)  # fmt: skip
"""Options of `generate` that look at the tokens of the prompt or count them, padding included."""


def _prompts(
    context: InferenceContext, encoded: EncodedRows, indices: Sequence[int]
) -> Iterator[tuple[list[int], dict[str, torch.Tensor]]]:
    """Yield prompts as `generate` needs them: padded on the left, or of one length each where it would see padding."""
    config, overrides = context.model.generation_config, context.options.generate_kwargs
    options = [overrides.get(name, getattr(config, name, None)) for name in READ_THE_PROMPT]
    sees_padding = any(value not in (None, 0, 1) for value in options)
    prompts = [encoded[i]["input_ids"][: encoded[i]["prompt_length"]] for i in indices]
    lengths = [len(prompt) for prompt in prompts]
    same_length = len(set(lengths)) > 1 and (sees_padding or not supports_left_padding(context.model))
    for group in longest_first(lengths, len(lengths), same_length):
        padded = context.tokenizer.pad(
            {"input_ids": [prompts[j] for j in group]}, padding_side="left", return_tensors="pt",
            return_attention_mask=True, verbose=False,
        )  # fmt: skip
        yield [indices[j] for j in group], dict(padded.to(context.model.device))


def predict_log_likelihoods(context: InferenceContext, encoded: EncodedRows) -> Predictions:
    """Predict the log-likelihood of every text, in nats; references are the numbers of its predicted tokens.

    The score of a text is its perplexity; None where nothing is predicted, as in a text of one token. The share of the
    tokens that are the model's likeliest is measured beside it.
    """
    log_likelihoods, num_tokens = [0.0] * encoded.num_texts, [0] * encoded.num_texts
    likeliest = 0

    def process(indices: list[int], batch: dict[str, torch.Tensor]) -> None:
        nonlocal likeliest
        losses, counts, hits = row_losses(context.model, batch)
        likeliest += int(hits.sum())
        for i, loss, count in zip(indices, losses.tolist(), counts.tolist(), strict=True):
            log_likelihoods[encoded[i]["text_index"]] -= loss
            num_tokens[encoded[i]["text_index"]] += count

    context.for_each_batch(encoded, process)
    pairs = zip(log_likelihoods, num_tokens, strict=True)
    perplexities = [math.exp(-value / count) if count else None for value, count in pairs]
    count = max(sum(num_tokens), 1)
    measures = {"token_accuracy": likeliest / count}
    return Predictions(log_likelihoods, perplexities, -sum(log_likelihoods) / count, num_tokens, measures)


SEQ2SEQ_GENERATION = TaskKind(
    name="generation",
    head="seq2seq-lm",
    default_metrics=("bleu", "rougeL", "exact"),
    metric_inputs=("texts", "answers"),
    encode=encode_seq2seq,
    predict=predict,
    references=lambda columns, labels: [list(targets) for targets in columns["targets"]],
    row_input=lambda columns, i: columns["source"][i],
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
