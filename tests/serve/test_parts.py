"""The parts of the engine by themselves: caches, beginnings of prompts, sampling, texts, the catalog, admission."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, LogitsProcessorList

import deltune
import deltune.serve
import tiny
from deltune.errors import DeltuneError, error_from_problems
from deltune.models import load_model, load_tokenizer
from deltune.serve.engine.requests import Request, Sampling
from deltune.serve.engine.sampling import TextBuilder, TokenChooser, check_sampling, config_processors
from deltune.serve.engine.server import Server
from deltune.serve.errors import OPERATOR_ADVICE, InvalidRequest, refusal
from tables.families import FAMILIES
from tables.specimens import build, stir

from .specimens import answers_of, greedy

# -- caches


# -- sampling


@pytest.mark.parametrize(
    "wrong", [{"stop": "xyz"}, {"stop": ("",)}, {"stop": (1,)}, {"seed": "x"}, {"logprobs": 1.5}, {"logprobs": "3"},
              {"max_tokens": True}, {"top_k": 2.0}, {"temperature": "0"}, {"shorten": "no"}, {"shorten": 1}],
)  # fmt: skip
def test_sampling_of_a_wrong_type(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(wrong))):
        check_sampling(Sampling(**wrong), has_tokenizer=True)


def chosen(seed: int, **values: Any) -> list[int]:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(3)) * 2
    chooser = TokenChooser(Sampling(seed=seed, **values), LogitsProcessorList(), lambda token, _: (str(token), None))
    return [chooser.choose(logits, [1]).token for _ in range(400)]


def test_draws_have_the_right_probabilities() -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(3)) * 2
    order = logits.argsort(descending=True).tolist()
    probabilities = (logits / 0.7).softmax(-1)
    drawn = torch.bincount(torch.tensor(chosen(1, temperature=0.7)), minlength=50) / 400
    assert (drawn - probabilities).abs().max() < 0.1
    assert set(chosen(2, temperature=1.0, top_k=3)) == set(order[:3])
    inside = int((logits.softmax(-1).sort(descending=True).values.cumsum(-1) < 0.5).sum()) + 1
    assert set(chosen(3, temperature=1.0, top_p=0.5)) == set(order[:inside])
    assert set(chosen(4, temperature=1.0, top_p=1e-6)) == {order[0]} == set(chosen(5, temperature=0.0))


def test_log_probabilities() -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(3))
    choice = TokenChooser(
        Sampling(temperature=0.0, logprobs=4), LogitsProcessorList(), lambda token, _: (str(token), None)
    ).choose(logits, [1])
    expected = logits.log_softmax(-1).topk(4)
    assert choice.chosen is not None and choice.chosen.logprob == pytest.approx(float(expected.values[0]))
    assert [(one.token, one.text) for one in choice.top_logprobs] == [(i, str(i)) for i in expected.indices.tolist()]


SETTINGS: tuple[dict[str, Any], ...] = (
    {"repetition_penalty": 1.7}, {"no_repeat_ngram_size": 2}, {"suppress_tokens": [7, 8, 9, 50, 60]},
    {"begin_suppress_tokens": [3, 4, 50]}, {"min_new_tokens": 4}, {"forced_eos_token_id": 2},
    {"forced_bos_token_id": 9}, {"bad_words_ids": [[5], [6, 7]]},
)  # fmt: skip


@pytest.mark.parametrize("family", ["gpt2", "bart"])
def test_what_the_generation_config_says_holds(family: str) -> None:
    """As in `generate`, which reads the same config."""
    model = build(FAMILIES[family], "causal" if family == "gpt2" else "seq2seq")
    prompts = [[5, 6, 7, 5, 6], [9, 50, 60]]
    with Server(model) as server:
        for settings in SETTINGS:
            if "forced_bos_token_id" in settings and family == "gpt2":
                continue
            before = {name: getattr(model.generation_config, name) for name in settings}
            for name, value in settings.items():
                setattr(model.generation_config, name, value)
            sampling = Sampling(max_tokens=7, temperature=0.0)
            requests = [Request("generate", tokens=tuple(prompt), sampling=sampling) for prompt in prompts]
            answers = answers_of(server, requests)
            for prompt, answer in zip(prompts, answers, strict=True):
                expected = greedy(model, torch.tensor([prompt]), 7)
                got = [choice.token for choice in answer.tokens]
                assert got == expected, settings
            for name, value in before.items():
                setattr(model.generation_config, name, value)
    assert config_processors(model, 1, 5, [2]) == []


# -- texts


class Bytes:
    """A tokenizer of bytes: characters may be several tokens."""

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode(errors="replace")


@given(st.text(max_size=30), st.lists(st.text(min_size=1, max_size=3), max_size=3))
def test_texts_in_pieces(text: str, stops: list[str]) -> None:
    """The pieces make the text up to the first stop; none has a half character, or a part of a stop."""
    builder, pieces = TextBuilder(Bytes().decode, stops), []
    for token in text.encode():
        builder.add(token)
        pieces.append(builder.take())
        if builder.stopped:
            break
    else:
        builder.end()
    pieces.append(builder.take(final=True))
    positions = [at for stop in stops if (at := text.find(stop)) >= 0]
    whole = "".join(pieces)
    assert whole == builder.text
    assert "\ufffd" not in whole.replace("\ufffd", "", text.count("\ufffd"))
    if not positions:
        assert whole == text
    else:
        assert text.startswith(whole) and not any(stop in whole for stop in stops)
        assert len(whole) <= max(positions), "it ends at the stop that is complete first"


def test_a_text_that_ends_within_a_character_is_given_as_it_is() -> None:
    builder = TextBuilder(Bytes().decode, [])
    for token in "aé".encode()[:-1]:
        builder.add(token)
    assert builder.take() == "a"
    builder.end()
    assert builder.take(final=True) == "\ufffd"


@pytest.mark.parametrize(
    ("stops", "expected"),
    [
        (("<E>",), "ab"), (("b<E>",), "a"), (("<E>c",), "ab"), (("b<E>c",), "a"), (("c<F>",), "ab"),
        (("<F>",), "abc"), (("<E><F>",), "abc"), (("x", "bc"), "a"), (("<E>", "ab"), ""), (("E",), "abc"),
        (("<",), "abc"), (("<F>d",), "abc"), ((), "abc"),
    ],
)  # fmt: skip
def test_stops_may_contain_special_tokens(stops: tuple[str, ...], expected: str) -> None:
    """Of the tokens ab<E>c<F>, where <F> ends the answer. Special tokens are matched as a whole, and never shown."""
    special = {1: "<E>", 2: "<F>"}

    def decode(tokens: list[int]) -> str:
        return bytes(token for token in tokens if token not in special).decode(errors="replace")

    builder, pieces = TextBuilder(decode, stops, special=special), []
    for token in (*b"ab", 1, *b"c"):
        builder.add(token)
        pieces.append(builder.take())
        if builder.stopped:
            break
    builder.end(2)
    assert "".join([*pieces, builder.take(final=True)]) == builder.text == expected
    assert builder.stopped == (expected != "abc" or stops == ("<F>",))


class Words:
    """Decodes numbers to words with blanks between them, without one before the first, as SentencePiece does."""

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


def test_the_blank_behind_a_prompt_is_kept() -> None:
    for prompt in ([], [1], list(range(20))):
        builder = TextBuilder(Words().decode, [], prompt)
        for token in (5, 6):
            builder.add(token)
        assert Words().decode(prompt) + builder.take(final=True) == Words().decode([*prompt, 5, 6])


# -- tokenizers


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.model(tmp_path_factory.mktemp("model"))


def test_texts_pairs_and_words(folder: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    for head, labels in (("classification", ["x", "y", "z"]), ("tagging", ["O", "B"])):
        model = load_model(str(folder), head, labels)
        stir(deltune.attach(model, "lora(rank=2)")).save(tmp_path / head)
    model = load_model(str(folder), "classification", ["x", "y", "z"])
    tuned = deltune.load(model, tmp_path / "classification")
    encoded = tokenizer("the otter is old", "my saw", return_tensors="pt")
    with torch.no_grad():
        pair = model(**encoded).logits.softmax(-1)[0].tolist()
    tuned.detach()
    with Server(str(folder), deltas=tmp_path) as server:
        answer = server.submit(
            Request("classify", text="the otter is old", second_text="my saw", delta="classification")
        ).result(60)
        assert list(answer.scores) == ["x", "y", "z"]
        assert list(answer.scores.values()) == pytest.approx(pair, abs=1e-5)
        tags = server.submit(Request("tag", text="the  otter is old", delta="tagging")).result(60).tags
        assert [word for word, _ in tags] == ["the", "otter", "is", "old"]
        assert {tag for _, tag in tags} <= {"O", "B"}
        vector = server.submit(Request("embed", text="the otter")).result(60)
        assert len(vector.embedding) == 32 and vector.prompt_tokens == 4


def test_generated_texts_and_stops(tmp_path: Path) -> None:
    folder = tiny.model(tmp_path / "model", "gpt2")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = build(FAMILIES["gpt2"], "causal", dtype=torch.float32)
    with Server(model, tokenizer) as server:
        sampling = Sampling(max_tokens=10, temperature=2.0, seed=5)
        whole = server.submit(Request("generate", text="the otter is", sampling=sampling)).result(60)
        assert whole.prompt_tokens == 4 and whole.finish_reason in ("length", "stop"), "the end is taken off"
        assert whole.text == "".join(choice.text for choice in whole.tokens)
        ids = [choice.token for choice in whole.tokens]
        assert whole.text.split() == tokenizer.decode(ids, skip_special_tokens=True).split()
        words = whole.text.split()
        stop = next((word for word in words[2:] if word not in words[:2]), None)
        if stop is not None:
            cut = server.stream(
                Request("generate", text="the otter is", sampling=Sampling(10, 2.0, seed=5, stop=(stop,)))
            )
            pieces = "".join(choice.text for choice in cut)
            assert cut.answer is not None and cut.answer.finish_reason == "stop"
            assert pieces == cut.answer.text == whole.text[: whole.text.index(stop)]


# -- the deltas by name


def test_a_refusal_has_no_calls_of_python() -> None:
    """Over HTTP, also after its error has been to another process. Without a fault it is the error itself."""
    error, advice = DeltuneError("a.bin is damaged", "load(a, check=False) loads it", "files"), OPERATOR_ADVICE["files"]
    for one in (error, pickle.loads(pickle.dumps(error))):
        assert str(one) == "a.bin is damaged. load(a, check=False) loads it"
        refused = refusal(one)
        assert refused.without_python == f"a.bin is damaged. {advice}"
        assert str(refused) == f"a.bin is damaged. {advice} load(a, check=False) loads it", "for deltune.serve.Server"
        assert str(refusal(refused)) == str(refused), "the advice is there once"
    several = error_from_problems("a.bin", ["one", "two"], "load(a) loads it", "model")
    assert str(several).splitlines()[-2:] == ["  - two", "load(a) loads it"]
    assert refusal(several).without_python.splitlines()[-2:] == ["  - two", OPERATOR_ADVICE["model"]]
    assert str(refusal(several)).splitlines()[-3:] == ["  - two", OPERATOR_ADVICE["model"], "load(a) loads it"]
    assert str(error_from_problems("a.bin", ["one"], "load(a) loads it")) == "a.bin: one. load(a) loads it"
    plain = DeltuneError("there is no a.bin.")
    assert str(refusal(plain)) == str(plain), "no advice of another error's"
