"""Laws of answers in words: a candidate's score is its log-likelihood alone, without batches, padding or sharing."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import deltune
from deltune.train.metrics.labels import entities
from deltune.train.tasks.base import InferenceContext, TaskOptions
from deltune.train.tasks.classification import (
    append_end_to_prefixes,
    candidate_log_likelihoods,
    encode_candidates,
    shared_sequences,
)
from deltune.train.tasks.token_classification import entity_type, format_entities, parse_entities
from tables.families import FAMILIES, Family
from tables.specimens import main_role, specimen, stir

SPEAKING = [f for f in FAMILIES.values() if f.kind != "encoder"]
METHODS = ("prompt(length=3)", "prefix(length=3) + lora(rank=2)")
PROMPTS = ("w10 w11 w12 w13 w14", "w20", "w30 w31 w32", "w10 w11")
CANDIDATES = (
    ("w40", "w41", "w42"),
    ("w40 w41", "w40 w42 w43", "w44", "w40"),
    ("w50", "w51 w52"),
    ("w60 w61 w62", "w60 w61 w63"),
)
LIMITS = TaskOptions(max_length=8, max_target_length=8)


def words(model: PreTrainedModel) -> PreTrainedTokenizerFast:
    """A tokenizer for which w07 is token 7."""
    backend = Tokenizer(models.WordLevel({f"w{i:02}": i for i in range(99)}, unk_token="w00"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": f"w{model.config.pad_token_id:02}", "eos_token": f"w{end(model):02}"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="w00", **names)


def end(model: PreTrainedModel) -> int:
    eos = model.config.eos_token_id
    return 4 if eos is None else eos


def start(model: PreTrainedModel) -> int:
    """What the decoder begins with; one family takes the last label for it, which is the end here."""
    return end(model) if model.config.model_type == "mbart" else model.config.decoder_start_token_id


def numbers(text: str) -> list[int]:
    return [int(word[1:]) for word in text.split()]


def alone(model: PreTrainedModel, prompt: str, candidate: Sequence[int]) -> float:
    """log p(candidate | prompt), token by token, each from a pass of its own."""
    total, target = 0.0, []
    for token in candidate:
        inputs: dict[str, Any] = {"input_ids": torch.tensor([numbers(prompt) + target])}
        if model.config.is_encoder_decoder:
            inputs = {
                "input_ids": torch.tensor([numbers(prompt)]),
                "decoder_input_ids": torch.tensor([[start(model), *target]]),
            }
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        with torch.no_grad():
            total += model(**inputs, use_cache=False).logits[0, -1].float().log_softmax(-1)[token].item()
        target.append(token)
    return total


@pytest.mark.parametrize("family", SPEAKING, ids=lambda f: f.name)
@pytest.mark.sample(11)
def test_a_score_is_the_log_likelihood_alone(family: Family, subtests: pytest.Subtests) -> None:
    """Of every family, bare and under deltas, in batches of any size, summed and as the mean."""
    model = specimen(family.name, main_role(family), torch.float32)
    tokenizer = words(model)
    encoded = encode_candidates(tokenizer, model, {"text": PROMPTS}, LIMITS, CANDIDATES, None, False)
    assert encoded.num_texts == len(PROMPTS) and sum(len(row["candidates"]) for row in encoded.rows) == 11
    for method in (None, *(METHODS if family.interface else METHODS[:1])):
        tuned = None if method is None else stir(deltune.attach(model, method))
        cases = [
            [append_end_to_prefixes([tuple(numbers(c)) for c in answers], (end(model),)), prompt]
            for answers, prompt in zip(CANDIDATES, PROMPTS, strict=True)
        ]
        by_hand = [[alone(model, prompt, candidate) for candidate in answers] for answers, prompt in cases]
        for size in (1, 3, 16):
            with subtests.test(f"{method} {size}"):
                computed = candidate_log_likelihoods(
                    InferenceContext(model, tokenizer, batch_size=size), encoded, mean=False
                )
                assert computed == [pytest.approx(answers, rel=1e-3, abs=1e-3) for answers in by_hand]
        means = candidate_log_likelihoods(InferenceContext(model, tokenizer), encoded, mean=True)
        lengths = [[len(candidate) for candidate in answers] for answers, _ in cases]
        for row, sums, count in zip(means, by_hand, lengths, strict=True):
            assert row == pytest.approx([s / n for s, n in zip(sums, count, strict=True)], rel=1e-3, abs=1e-3)
        if tuned is not None:
            tuned.detach()


def test_the_side_of_padding_changes_nothing() -> None:
    model = specimen("llama", "causal", torch.float32)
    tokenizer = words(model)
    encoded = encode_candidates(tokenizer, model, {"text": PROMPTS}, LIMITS, CANDIDATES, None, False)
    right = candidate_log_likelihoods(InferenceContext(model, tokenizer), encoded, mean=False)
    tokenizer.padding_side = "left"
    left = candidate_log_likelihoods(InferenceContext(model, tokenizer), encoded, mean=False)
    assert left == [pytest.approx(row, rel=1e-4, abs=1e-4) for row in right]


TOKENS = some.lists(some.integers(0, 2), min_size=1, max_size=4).map(tuple)


@settings(max_examples=100)
@given(some.lists(TOKENS, min_size=1, max_size=8))
def test_every_candidate_is_told_once_by_few_sequences(candidates: list[tuple[int, ...]]) -> None:
    """What a sequence tells of a candidate is what the candidate says alone, and no two sequences could be one."""
    tokens = append_end_to_prefixes(candidates, (9,))
    sequences = shared_sequences(tuple(tokens))
    assert sorted(n for _, held in sequences for n in held) == list(range(len(tokens)))
    for whole, held in sequences:
        assert all(tokens[n] == ids and whole[: len(ids) - 1] == ids[:-1] for n, ids in held.items())
    assert len(sequences) <= len({candidate[:-1] for candidate in tokens})
    for one, other in itertools.combinations(set(tokens), 2):
        assert one[: len(other)] != other[: len(one)], "no candidate is the beginning of another"


TYPES = {"PER": "person", "LOC": "place: far", "X": "X"}
MARKS = ("O", "O", "B", "B", "I")


@settings(max_examples=300)
@given(some.lists(some.tuples(some.sampled_from(MARKS), some.sampled_from(sorted(TYPES))), min_size=1, max_size=12))
def test_tags_survive_their_words(marks: list[tuple[str, str]]) -> None:
    """tags → text → tags, where no token occurs twice; I- without its B- is outside, as strict BIO has it."""
    tokens = [f"{'ab:;'[i % 4]}{i}{':;,.'[i % 4]}" for i in range(len(marks))]
    tags = ["O" if mark == "O" else f"{mark}-{kind}" for mark, kind in marks]
    strict = ["O"] * len(tags)
    for kind, start, stop in entities(tags, "IOB2"):
        strict[start:stop] = [f"B-{kind}"] + [f"I-{kind}"] * (stop - start - 1)
    text = format_entities(tokens, tags, TYPES)
    assert parse_entities(text, tokens, TYPES) == strict
    assert parse_entities(text.replace(" ", ""), tokens, {k: w.replace(" ", "") for k, w in TYPES.items()}) == strict


def test_words_that_a_tokenizer_drops_are_within_a_mention() -> None:
    tokens = ["\u200b", "New", "", "\u00ad", "York", "\ufe0f", "x"]
    tags = ["O", "B-LOC", "I-LOC", "I-LOC", "I-LOC", "O", "O"]
    for text in ("New York: LOC", format_entities(tokens, tags, {"LOC": "LOC"})):
        assert parse_entities(text, tokens, {"LOC": "LOC"}) == tags


@pytest.mark.parametrize(
    ("text", "tags"),
    [
        ("none", "O O O O O"),
        ("", "O O O O O"),
        ("Paris: LOC; Bob: PER; Paris: LOC", "B-LOC O B-PER O B-LOC"),
        ("Bob: PER; Paris: LOC", "O O B-PER O B-LOC"),
        ("Rome: LOC; Bob: PER", "O O B-PER O O"),
        ("Bob: PER; Bob: PER", "O O B-PER O O"),
        ("Bob: THING; meets Bob: PER", "O B-PER I-PER O O"),
        ("Paris : LOC ;Bob : PER ; gibberish", "B-LOC O B-PER O O"),
        ("Par\u200bis: LOC; \uff22ob\ufe0f: PER", "B-LOC O B-PER O O"),
    ],
)
def test_reading_a_list(text: str, tags: str) -> None:
    """In order, free places first; what is not there, taken already, or of no type, is passed over."""
    types = {entity_type(tag): entity_type(tag) for tag in ("B-PER", "B-LOC")}
    assert parse_entities(text, ["Paris", "meets", "Bob", "in", "Paris"], types) == tags.split()
