"""Answers in words, chosen: of several candidates the one that a language model finds likeliest after the prompt.

An encoder-decoder reads the prompt and says the candidate; a decoder goes on with it after the prompt. Of labels the
candidates are their words, and log p(c | prompt) = Σ log p(token | prompt, tokens before) decides. The choices of a
question differ in length, and each token costs something: there the mean over the tokens decides. Scores are the
softmax of what decides; the loss is their cross-entropy, as that of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import combinations
from typing import Any

import torch
from transformers.modeling_outputs import BaseModelOutput

from ..errors import DeltuneError, error_from_problems
from .base import Columns, InferenceContext, Limits, Predictions
from .classification import CLASSIFICATION
from .encoding import IGNORED, EncodedRows, Row
from .generation import sources
from .multiple_choice import CHOICE
from .text_inputs import Tokens, common_prefix_length, fill_template, join_prompt_and_target, truncate_prompt


def split(alone: Tokens, wholes: Sequence[Tokens]) -> tuple[Tokens, list[Tokens]]:
    """What all texts have before the candidates, and each of these: what comes before ends where they begin to differ
    from its own tokens."""
    start = common_prefix_length([alone, *wholes])
    return alone[:start], [whole[start:] for whole in wholes]


def ended(candidates: Sequence[Tokens], end: Tokens) -> list[Tokens]:
    """A candidate that is the beginning of another is meant with its end; no other is, since all of them have one."""
    begun = {other[:i] for other in candidates for i in range(len(other))}
    return [own + end if own in begun else own for own in candidates]


@lru_cache(maxsize=4096)
def paths(candidates: tuple[Tokens, ...]) -> list[tuple[Tokens, dict[int, Tokens]]]:
    """As few sequences as tell the likelihood of every candidate, with the candidates (by number) that each tells.

    A token's likelihood hangs on those before it alone, so that a sequence tells every candidate which differs from
    its beginning in the last token at most: words of one token each are told by one sequence.
    """
    found: list[tuple[Tokens, dict[int, Tokens]]] = []
    for number in sorted(range(len(candidates)), key=lambda n: -len(candidates[n])):
        own = candidates[number]
        told = next((held for whole, held in found if whole[: len(own) - 1] == own[:-1]), None)
        if told is None:
            found.append((own, {number: own}))
        else:
            told[number] = own
    return found


def encode(
    tokenizer: Any,
    model: Any,
    columns: Columns,
    limits: Limits,
    candidates: Sequence[Sequence[str]],
    right: Sequence[int] | None,
    training: bool,
) -> EncodedRows:
    """In training a row for the right candidate and its end, as in generation; else one for each path.

    Facts of a row: `text`, which text it is of; `prompt`, how many tokens come before a candidate; `candidates` and
    `numbers`, those that it tells; `right`. A decoder's long prompt loses its beginning, an encoder's its end.
    """
    both = bool(model.config.is_encoder_decoder)
    texts = fill_template(columns, limits.template)
    asked = sources(tokenizer, model, texts, limits.max_length) if both else EncodedRows([], 0)
    if training:
        assert right is not None
        candidates = [[own[i]] for own, i in zip(candidates, right, strict=True)]
    rows: list[Row] = []
    truncated, targets = asked.truncated, 0
    found = (
        join_prompt_and_target(tokenizer, [""] * len(texts), candidates, "text_target")
        if both
        else join_prompt_and_target(tokenizer, texts, candidates)
    )
    for i, (alone, wholes, end) in enumerate(found):
        start, owns = split(alone, wholes)
        if not all(owns):
            raise DeltuneError(f"{candidates[i][owns.index(())]!r} has no tokens, so it cannot be an answer")
        if not both:
            truncated += len(start) > limits.max_length
            start = truncate_prompt(tokenizer, start, limits.max_length)
        cut = [own[: max(1, limits.target_length - len(end))] for own in owns]
        targets += cut != owns
        facts = {"text": i, "prompt": len(start)} | ({} if right is None else {"right": right[i]})
        for whole, told in [(cut[0], {})] if training else paths(tuple(ended(cut, end))):
            if both:  # with the end: some models begin the decoder's input with the last label
                row = {**asked[i], "labels": [*start, *whole, *end]}
            else:
                ids = [*start, *whole, *(end if training else ())]
                labels = [IGNORED] * len(start) + ids[len(start) :]
                row = {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels}
            rows.append({**row, **facts, "candidates": list(told.values()), "numbers": list(told)})
    return EncodedRows(rows, truncated, len(texts), targets)


def likelihoods(use: InferenceContext, encoded: EncodedRows, mean: bool) -> list[list[float]]:
    """log p(candidate | prompt) of every text's candidates (nats), or its mean over the candidate's tokens."""
    both = bool(use.model.config.is_encoder_decoder)
    found: list[dict[int, float]] = [{} for _ in range(encoded.texts)]

    def take(indices: list[int], batch: dict[str, torch.Tensor]) -> None:
        rows = [encoded[i] for i in indices]
        padding = [0] * len(rows) if both else batch["attention_mask"].argmax(1).tolist()
        inputs = _once(use, rows, batch) if both else {n: t for n, t in batch.items() if n != "labels"}
        logits = use.model(**inputs).logits.float()
        all_of = logits.logsumexp(-1)
        spots = [
            (at, padding[at] + row["prompt"] - (0 if both else 1) + j, token)
            for at, row in enumerate(rows)
            for own in row["candidates"]
            for j, token in enumerate(own)
        ]
        at, place, token = torch.tensor(spots, device=logits.device).unbind(1)
        values = iter((logits[at, place, token] - all_of[at, place]).tolist())
        for row in rows:
            for number, own in zip(row["numbers"], row["candidates"], strict=True):
                total = sum(next(values) for _ in own)
                found[row["text"]][number] = total / len(own) if mean else total

    use.over(encoded, take)
    return [[values[number] for number in sorted(values)] for values in found]


def _once(use: InferenceContext, rows: Sequence[Row], batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    """A batch of an encoder-decoder with every prompt encoded once, however many rows it has."""
    firsts = {row["text"]: at for at, row in reversed(list(enumerate(rows)))}
    order = list(firsts)
    few = torch.tensor([firsts[text] for text in order], device=batch["input_ids"].device)
    back = torch.tensor([order.index(row["text"]) for row in rows], device=few.device)
    inputs = {name: tensor[few] for name, tensor in batch.items() if name != "labels"}
    states = use.model.get_encoder()(**inputs)[0][back]
    return {
        "encoder_outputs": BaseModelOutput(last_hidden_state=states),
        "attention_mask": batch["attention_mask"],
        "labels": batch["labels"],
    }


def _ranked(
    use: InferenceContext, encoded: EncodedRows, mean: bool
) -> tuple[list[int], list[list[float]], float | None]:
    """For every text the candidate with the greatest score, all scores, and the loss."""
    logs = [torch.tensor(values, dtype=torch.float64).log_softmax(0) for values in likelihoods(use, encoded, mean)]
    right = {row["text"]: row["right"] for row in encoded.rows if "right" in row}
    loss = sum(-logs[text][i].item() for text, i in right.items()) / len(logs) if right else None
    return [int(values.argmax()) for values in logs], [values.exp().tolist() for values in logs], loss


def _encode_classes(tokenizer: Any, model: Any, columns: Columns, limits: Limits, training: bool) -> EncodedRows:
    words = list(limits.words.values())
    first = "" if model.config.is_encoder_decoder else fill_template(columns, limits.template)[0]
    alone, wholes, end = next(
        join_prompt_and_target(tokenizer, [first], [words], "text_target" if not first else "text")
    )
    owns = split(alone, wholes)[1]
    wrong = [
        f"{one!r} and {other!r}"
        for (one, a), (other, b) in combinations(zip(words, ended(owns, end), strict=True), 2)
        if a[: len(b)] == b[: len(a)]
    ]
    if wrong:
        raise error_from_problems("to this tokenizer words of labels are the same tokens; give others by words", wrong)
    rows = len(next(iter(columns.values())))
    return encode(tokenizer, model, columns, limits, [words] * rows, columns.get("label"), training)


def _classes(use: InferenceContext, encoded: EncodedRows) -> Predictions:
    best, scores, loss = _ranked(use, encoded, mean=False)
    return Predictions(best, [dict(zip(use.labels, values, strict=True)) for values in scores], loss)


def _encode_choices(tokenizer: Any, model: Any, columns: Columns, limits: Limits, training: bool) -> EncodedRows:
    return encode(tokenizer, model, columns, limits, columns["choices"], columns.get("answer"), training)


def _choices(use: InferenceContext, encoded: EncodedRows) -> Predictions:
    return Predictions(*_ranked(use, encoded, mean=True))


CLASSES = replace(CLASSIFICATION, loads="seq2seq-lm", encode=_encode_classes, answers=_classes, spoken=str)
CLASSES_AFTER = replace(CLASSES, loads="causal-lm", continues=True)
CHOICES = replace(CHOICE, loads="seq2seq-lm", encode=_encode_choices, answers=_choices)
CHOICES_AFTER = replace(CHOICES, loads="causal-lm", continues=True)
