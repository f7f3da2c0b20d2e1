"""Classification and multiple choice, by a head or by the answer that a language model finds most likely.

By a head: one label for a text or a pair of texts, or one of several answers to a question.

By a language model (rank classification): the likeliest of several candidate answers after the prompt. An
encoder-decoder reads the prompt and scores each candidate as its output; a decoder scores it as the
continuation of the prompt. The candidates of a label are its label words, ranked by log p(c | prompt) = Σ log p(token |
prompt, tokens before). The choices of a question differ in length, and every token lowers the sum: they are ranked by
the mean over their tokens. Scores are the softmax over the candidates, and the loss is their cross-entropy, as with a
head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import combinations
from typing import Any

import torch
from torch.nn import functional
from transformers.modeling_outputs import BaseModelOutput

from ...errors import DeltuneError, error_from_problems
from ...runtime.sharding import gather_root
from ...templates import Tokens, target_end
from .base import Columns, InferenceContext, Predictions, TaskKind, TaskOptions
from .encoding import IGNORE_INDEX, EncodedRows, Row, encode_texts, in_chunks, row_names
from .generation import (
    common_prefix_length,
    fill_template,
    tokenize_prompt_and_targets,
    truncate_prompt,
)


def predict_logits(context: InferenceContext, encoded: EncodedRows) -> torch.Tensor:
    """Return the logits of all rows."""
    parts: list[torch.Tensor] = []
    order: list[int] = []

    def process(indices: list[int], batch: dict[str, torch.Tensor]) -> None:
        batch.pop("labels", None)
        parts.append(context.model(**batch).logits.float().cpu())
        order.extend(indices)

    context.for_each_batch(encoded, process)
    width = max(part.shape[-1] for part in parts)
    logits = torch.cat([functional.pad(p, (0, width - p.shape[-1]), value=-torch.inf) for p in parts])
    in_row_order = torch.empty_like(logits)
    in_row_order[torch.tensor(order)] = logits
    return in_row_order


def predict_labels(context: InferenceContext, encoded: EncodedRows) -> Predictions:
    """Predict the id of the most probable label; the scores are the probabilities of all labels."""
    answers = predict_choices(context, encoded)
    return replace(answers, scores=[dict(zip(context.labels, row, strict=False)) for row in answers.scores])


def predict_choices(context: InferenceContext, encoded: EncodedRows) -> Predictions:
    """Predict the index of the most probable label or choice; the scores are the probabilities of all."""
    logits = predict_logits(context, encoded)
    loss = _mean_loss(functional.cross_entropy, logits, encoded)
    return Predictions(logits.argmax(-1).tolist(), logits.softmax(-1).tolist(), loss)


def _mean_loss(function: Callable[..., torch.Tensor], outputs: torch.Tensor, encoded: EncodedRows) -> float | None:
    """Return the mean loss of rows, or None where they have no labels."""
    if "labels" not in encoded.rows[0]:
        return None
    return function(outputs, torch.tensor([row["labels"] for row in encoded.rows])).item()


def _texts_with(
    role: str, target: Callable[[Any, Any], Any] = lambda value, model: value
) -> Callable[..., EncodedRows]:
    """Return an encoder of texts whose `labels` are target(value, model) of a role, where the columns have it."""

    @in_chunks
    def encode_labelled_texts(
        tokenizer: Any, model: Any, columns: Columns, options: TaskOptions, training: bool
    ) -> EncodedRows:
        encoded = encode_texts(tokenizer, model, columns, options.max_length)
        if role not in columns:
            return encoded
        pairs = zip(encoded.rows, columns[role], strict=True)
        return replace(encoded, rows=[{**row, "labels": target(value, model)} for row, value in pairs])

    return encode_labelled_texts


CLASSIFICATION = TaskKind(
    name="classification",
    head="classification",
    default_metrics=("accuracy", "f1", "f1_macro", "matthews"),
    metric_inputs=("classes",),
    encode=_texts_with("label"),
    predict=predict_labels,
    references=lambda columns, labels: list(columns["label"]),
    row_input=lambda columns, i: [columns["text"][i], columns["pair"][i]] if "pair" in columns else columns["text"][i],
    predicts_label_ids=True,
)


def predict_several_labels(context: InferenceContext, encoded: EncodedRows) -> Predictions:
    """Predict the labels of a probability of one half or more; the scores are the probabilities of all labels."""
    logits = predict_logits(context, encoded)
    loss = _mean_loss(functional.binary_cross_entropy_with_logits, logits, encoded)
    scores = [dict(zip(context.labels, row, strict=False)) for row in logits.sigmoid().tolist()]
    return Predictions([[name for name, score in row.items() if score >= 0.5] for row in scores], scores, loss)


MULTILABEL = replace(
    CLASSIFICATION,
    name="multilabel",
    default_metrics=("label_f1", "label_f1_macro", "subset_accuracy"),
    metric_inputs=("label sets",),
    encode=_texts_with("labels", lambda ids, model: [float(i in ids) for i in range(model.config.num_labels)]),
    predict=predict_several_labels,
    references=lambda columns, labels: [[labels[i] for i in sorted(ids)] for ids in columns["labels"]],
    predicts_label_ids=False,
    problem_type="multi_label_classification",
)


def predict_numbers(context: InferenceContext, encoded: EncodedRows) -> Predictions:
    """Predict the number that the head gives; there are no scores beside it."""
    numbers = predict_logits(context, encoded)[:, 0]
    return Predictions(numbers.tolist(), [None] * len(numbers), _mean_loss(functional.mse_loss, numbers, encoded))


REGRESSION = replace(
    CLASSIFICATION,
    name="regression",
    default_metrics=("pearson", "spearman", "mae"),
    metric_inputs=("numbers",),
    encode=_texts_with("score"),
    predict=predict_numbers,
    references=lambda columns, labels: list(columns["score"]),
    predicts_label_ids=False,
    problem_type="regression",
)


def encode_questions(
    tokenizer: Any, model: Any, columns: Columns, options: TaskOptions, training: bool, advance: Any = None
) -> EncodedRows:
    """Encode each row as (choices, tokens): every choice after the question and its context."""
    counts = sorted({len(choices) for choices in columns["choices"]})
    if len(counts) > 1:
        raise DeltuneError(f"the rows have {' or '.join(map(str, counts))} choices; a batch needs as many in every row")
    return _encode_questions(tokenizer, model, columns, options, training, advance)


@in_chunks
def _encode_questions(
    tokenizer: Any, model: Any, columns: Columns, options: TaskOptions, training: bool
) -> EncodedRows:
    count, size = len(columns["choices"][0]), len(columns["question"])
    flat = {
        "text": [question_text(columns, i) for i in range(size) for _ in range(count)],
        "pair": [choice for choices in columns["choices"] for choice in choices],
        "id": [name for name in row_names(columns) for _ in range(count)],
    }
    encoded = encode_texts(tokenizer, model, flat, options.max_length).rows
    rows, truncated = [], 0
    for i in range(size):
        choices = encoded[i * count : (i + 1) * count]
        row: Row = {name: [choice[name] for choice in choices] for name in choices[0]}
        truncated += any(len(ids) >= options.max_length for ids in row["input_ids"])
        rows.append({**row, **({"labels": columns["answer"][i]} if "answer" in columns else {})})
    return EncodedRows(rows, truncated)


def question_text(columns: Columns, i: int) -> str:
    """Return the question of row i, after its context if it has one."""
    context = f"{columns['context'][i]} " if "context" in columns else ""
    return f"{context}{columns['question'][i]}"


CHOICE = TaskKind(
    name="choice",
    head="choice",
    default_metrics=("accuracy",),
    metric_inputs=("classes",),
    encode=encode_questions,
    predict=predict_choices,
    references=lambda columns, labels: list(columns["answer"]),
    row_input=lambda columns, i: {"question": question_text(columns, i), "choices": list(columns["choices"][i])},
)


def split_candidates(prompt: Tokens, joined: Sequence[Tokens]) -> tuple[Tokens, list[Tokens]]:
    """Split joined texts into what all have in common with the prompt, and their candidates."""
    start = common_prefix_length([prompt, *joined])
    return prompt[:start], [tokens[start:] for tokens in joined]


def append_end_to_prefixes(candidates: Sequence[Tokens], end: Tokens) -> list[Tokens]:
    """Append the end-of-text tokens to the candidates that are the beginning of another one, to tell them apart.

    The others are scored without it, since all of them would have the same end.
    """
    prefixes = {other[:i] for other in candidates for i in range(len(other))}
    return [tokens + end if tokens in prefixes else tokens for tokens in candidates]


@lru_cache(maxsize=4096)
def shared_sequences(candidates: tuple[Tokens, ...]) -> list[tuple[Tokens, dict[int, Tokens]]]:
    """Return as few sequences as are needed to compute the likelihoods of all candidates.

    The likelihood of a token depends only on the tokens before it. One sequence therefore gives the likelihood of every
    candidate that equals its beginning, apart from the candidate's last token. Candidates of one token each need one
    sequence in all.
    """
    sequences: list[tuple[Tokens, dict[int, Tokens]]] = []
    for index in sorted(range(len(candidates)), key=lambda i: -len(candidates[i])):
        tokens = candidates[index]
        scored = next((scored for sequence, scored in sequences if sequence[: len(tokens) - 1] == tokens[:-1]), None)
        if scored is None:
            sequences.append((tokens, {index: tokens}))
        else:
            scored[index] = tokens
    return sequences


def encode_candidates(
    tokenizer: Any,
    model: Any,
    columns: Columns,
    options: TaskOptions,
    candidates: Sequence[Sequence[str]],
    correct: Sequence[int] | None,
    training: bool,
) -> EncodedRows:
    """Encode prompts with their candidate answers.

    In training there is a row for each prompt, with its correct candidate and the end, as in generation. Otherwise
    there is a row for each of the `shared_sequences` of its candidates. A decoder's long prompt loses its beginning,
    an encoder's its end.
    """
    is_encoder_decoder, names = bool(model.config.is_encoder_decoder), row_names(columns)
    prompts = fill_template(columns, options.template)
    if is_encoder_decoder:
        sources = encode_texts(tokenizer, model, {"text": prompts, "id": names}, options.max_length)
    else:
        sources = EncodedRows([], 0)
    if training:
        assert correct is not None
        candidates = [[texts[i]] for texts, i in zip(candidates, correct, strict=True)]
    rows: list[Row] = []
    truncated, truncated_targets = sources.truncated, 0
    tokenized = (
        tokenize_prompt_and_targets(tokenizer, [""] * len(prompts), candidates, "text_target")
        if is_encoder_decoder
        else tokenize_prompt_and_targets(tokenizer, prompts, candidates)
    )
    end = target_end(tokenizer, model, "text_target" if is_encoder_decoder else "text")
    for i, (prompt, joined) in enumerate(tokenized):
        start, tokens = split_candidates(prompt, joined)
        if not all(tokens):
            empty = candidates[i][tokens.index(())]
            raise DeltuneError(f"row {names[i]}: {empty!r} has no tokens, so it cannot be an answer")
        if not is_encoder_decoder:
            truncated += len(start) > options.max_length
            start = truncate_prompt(tokenizer, start, options.max_length, names[i])
        cut = [ids[: max(1, options.max_target_length - len(end))] for ids in tokens]
        truncated_targets += cut != tokens
        facts = {"text_index": i, "prompt_length": len(start)} | ({} if correct is None else {"correct": correct[i]})
        sequences = [(cut[0], {})] if training else shared_sequences(tuple(append_end_to_prefixes(cut, end)))
        for sequence, scored in sequences:
            if is_encoder_decoder:  # with the end: some models begin the decoder's input with the last label
                row = {**sources[i], "labels": [*start, *sequence, *end]}
            else:
                ids = [*start, *sequence, *(end if training else ())]
                labels = [IGNORE_INDEX] * len(start) + ids[len(start) :]
                row = {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels}
            rows.append({**row, **facts, "candidates": list(scored.values()), "candidate_indices": list(scored)})
    return EncodedRows(rows, truncated, len(prompts), truncated_targets)


def candidate_log_likelihoods(context: InferenceContext, encoded: EncodedRows, mean: bool) -> list[list[float]]:
    """Return log p(candidate | prompt), in nats, of every text's candidates."""
    is_encoder_decoder = bool(context.model.config.is_encoder_decoder)
    results: list[dict[int, float]] = [{} for _ in range(encoded.num_texts)]

    def process(indices: list[int], batch: dict[str, torch.Tensor]) -> None:
        rows = [encoded[i] for i in indices]
        if is_encoder_decoder:
            inputs, padding = _encode_prompts_once(context, indices, rows, batch), [0] * len(rows)
        else:
            inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
            padding = batch["attention_mask"].argmax(1).tolist()
        logits = context.model(**inputs).logits.float()
        log_normalizers = logits.logsumexp(-1)
        # Logits of a decoder predict the next position, logits of an encoder-decoder their own label.
        offsets = [
            pad + row["prompt_length"] - (not is_encoder_decoder) for row, pad in zip(rows, padding, strict=True)
        ]
        entries = [
            (row_index, offsets[row_index] + j, token)
            for row_index, row in enumerate(rows)
            for candidate in row["candidates"]
            for j, token in enumerate(candidate)
        ]
        row_index, position, token = torch.tensor(entries, device=logits.device).unbind(1)
        log_probs = iter((logits[row_index, position, token] - log_normalizers[row_index, position]).tolist())
        for row in rows:
            for index, candidate in zip(row["candidate_indices"], row["candidates"], strict=True):
                total = sum(next(log_probs) for _ in candidate)
                results[row["text_index"]][index] = total / len(candidate) if mean else total

    context.for_each_batch(encoded, process)
    return [[values[index] for index in sorted(values)] for values in results]


def _encode_prompts_once(
    context: InferenceContext, indices: Sequence[int], rows: Sequence[Row], batch: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """Run the encoder once for each prompt, however many rows it has, and return the inputs of the decoder."""
    first_rows = {row["text_index"]: i for i, row in reversed(list(enumerate(rows)))}
    texts = list(first_rows)
    device = batch["input_ids"].device
    chosen = list(first_rows.values())
    selected = torch.tensor(chosen, device=device)
    expand = torch.tensor([texts.index(row["text_index"]) for row in rows], device=device)
    inputs = {name: tensor[selected] for name, tensor in batch.items() if name != "labels"}
    gather_root(context.model)
    with context.passes_of([indices[i] for i in chosen], [rows[i] for i in chosen]):
        states = context.model.get_encoder()(**inputs)[0][expand]
    return {
        "encoder_outputs": BaseModelOutput(last_hidden_state=states),
        "attention_mask": batch["attention_mask"],
        "labels": batch["labels"],
    }


def _rank(
    context: InferenceContext, encoded: EncodedRows, mean: bool
) -> tuple[list[int], list[list[float]], float | None]:
    """Return for every text the best candidate and the probabilities of all, and the loss."""
    log_likelihoods = candidate_log_likelihoods(context, encoded, mean)
    log_probs = [torch.tensor(values, dtype=torch.float64).log_softmax(0) for values in log_likelihoods]
    correct = {row["text_index"]: row["correct"] for row in encoded.rows if "correct" in row}
    loss = sum(-log_probs[text][i].item() for text, i in correct.items()) / len(log_probs) if correct else None
    return [int(values.argmax()) for values in log_probs], [values.exp().tolist() for values in log_probs], loss


@in_chunks
def _encode_classes(tokenizer: Any, model: Any, columns: Columns, options: TaskOptions, training: bool) -> EncodedRows:
    """Encode a classification whose candidates are the label words, which must differ as tokens."""
    words = list(options.label_words.values())
    is_encoder_decoder = model.config.is_encoder_decoder
    prompt, side = ("", "text_target") if is_encoder_decoder else (fill_template(columns, options.template)[0], "text")
    prompt_tokens, joined = next(tokenize_prompt_and_targets(tokenizer, [prompt], [words], side))
    candidates = split_candidates(prompt_tokens, joined)[1]
    tokens = append_end_to_prefixes(candidates, target_end(tokenizer, model, side))
    same = [
        f"{word!r} and {other_word!r}"
        for (word, ids), (other_word, other_ids) in combinations(zip(words, tokens, strict=True), 2)
        if ids[: len(other_ids)] == other_ids[: len(ids)]
    ]
    if same:
        raise error_from_problems(
            "these label words are the same tokens to this tokenizer; give others with the option words", same
        )
    num_rows = len(next(iter(columns.values())))
    labels = columns.get("label")
    return encode_candidates(tokenizer, model, columns, options, [words] * num_rows, labels, training)


def _predict_classes(context: InferenceContext, encoded: EncodedRows) -> Predictions:
    best, scores, loss = _rank(context, encoded, mean=False)
    return Predictions(best, [dict(zip(context.labels, values, strict=True)) for values in scores], loss)


@in_chunks
def _encode_choices(tokenizer: Any, model: Any, columns: Columns, options: TaskOptions, training: bool) -> EncodedRows:
    answers = columns.get("answer")
    return encode_candidates(tokenizer, model, columns, options, columns["choices"], answers, training)


def _predict_choices(context: InferenceContext, encoded: EncodedRows) -> Predictions:
    return Predictions(*_rank(context, encoded, mean=True))


SEQ2SEQ_CLASSIFICATION = replace(
    CLASSIFICATION, head="seq2seq-lm", encode=_encode_classes, predict=_predict_classes, word_key=str
)
CAUSAL_CLASSIFICATION = replace(SEQ2SEQ_CLASSIFICATION, head="causal-lm", target_follows_input=True)
SEQ2SEQ_CHOICE = replace(CHOICE, head="seq2seq-lm", encode=_encode_choices, predict=_predict_choices)
CAUSAL_CHOICE = replace(SEQ2SEQ_CHOICE, head="causal-lm", target_follows_input=True)
