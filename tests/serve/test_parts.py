"""The parts of the engine by themselves: caches, beginnings of prompts, sampling, texts, the catalog, admission."""

from __future__ import annotations

import pickle
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, LogitsProcessorList
from transformers.cache_utils import DynamicCache

import deltune
import deltune.serve
import tiny
from deltune.errors import DeltuneError, error_from_problems
from deltune.models import load_model, load_tokenizer
from deltune.serve.engine.cache import assemble, columns, new_cache, row_of, set_columns
from deltune.serve.engine.catalog import Catalog, Entry
from deltune.serve.engine.prompt_cache import BLOCK, PromptCache
from deltune.serve.engine.queue import Admission
from deltune.serve.engine.requests import Request, Sampling
from deltune.serve.engine.sampling import TextBuilder, TokenChooser, check_sampling, config_processors
from deltune.serve.engine.server import Server
from deltune.serve.errors import OPERATOR_ADVICE, InvalidRequest, QueueFull, UnknownDelta, refusal
from tables.families import FAMILIES
from tables.specimens import build, stir

from .specimens import answers_of, deltas, greedy

# -- caches


def states(rows: int, tokens: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, 2, tokens, 3, generator=torch.Generator().manual_seed(seed))


@given(st.lists(st.integers(1, 90), min_size=1, max_size=6))
def test_a_cache_with_room_gives_what_transformers_cache_gives(lengths: list[int]) -> None:
    """However the tokens come: at once or one by one, and after some were taken back."""
    ours, theirs = new_cache(), DynamicCache()
    for number, tokens in enumerate(lengths):
        keys, values = states(2, tokens, number), states(2, tokens, 100 + number)
        ours.update(states(2, 5, 7), states(2, 5, 8), 0)
        set_columns(ours, columns(ours) - 5)
        mine, other = ours.update(keys, values, 0), theirs.update(keys, values, 0)
        assert torch.equal(mine[0], other[0]) and torch.equal(mine[1], other[1])
        assert columns(ours) == ours.get_seq_length() == theirs.get_seq_length()
        assert ours.layers[0].get_mask_sizes(1) == theirs.layers[0].get_mask_sizes(1)


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 9)), min_size=1, max_size=4), st.integers(0, 5), st.booleans()
)
def test_rows_move_between_caches(shapes: list[tuple[int, int]], more: int, at_end: bool) -> None:
    parts, expected = [], []
    for number, (rows, tokens) in enumerate(shapes):
        cache = new_cache()
        for layer in range(2):
            cache.update(
                states(rows, tokens, number + 10 * layer), states(rows, tokens, number + 5 + 10 * layer), layer
            )
        chosen = list(range(rows))[::-1][: 1 + number % 2]
        parts.append((cache, chosen))
        expected += [(states(rows, tokens, number)[row], tokens) for row in chosen]
    width = max(tokens for _, tokens in shapes) + more
    made = assemble(parts, width, at_end)
    keys = made.layers[0].keys
    assert keys.shape[2] == width == columns(made)
    for row, (expected_row, tokens) in enumerate(expected):
        at = slice(width - tokens, width) if at_end else slice(0, tokens)
        assert torch.equal(keys[row][:, at], expected_row)
        assert int((keys[row] != 0).any(0).any(-1).sum()) == tokens, "the rest is padding"
    if at_end:
        copied = row_of(made, 0, expected[0][1])
        made.update(states(len(expected), 1, 1), states(len(expected), 1, 2), 0)
        assert torch.equal(copied[0][0][0], expected[0][0]), "a copy"  # type: ignore[index]


class Delta:
    prompt_length = 0


def entry(tokens: int) -> list[Any]:
    return [(states(1, tokens, 1), states(1, tokens, 2))]


def test_beginnings_of_prompts() -> None:
    delta: Any = Delta()
    other: Any = Delta()
    size = 2 * 2 * 3 * 4  # bytes of a token
    cache = PromptCache(6 * BLOCK * size)
    prompt = list(range(3 * BLOCK + 5))
    assert cache.wants("a", delta, prompt) and not cache.wants("a", delta, prompt[: BLOCK - 1])
    cache.keep("a", delta, prompt, entry(len(prompt)))
    assert not cache.wants("a", delta, prompt) and cache.bytes == 3 * BLOCK * size
    assert cache.find("a", delta, prompt)[1] == 3 * BLOCK
    assert cache.find("a", delta, prompt[: 2 * BLOCK])[1] == BLOCK, "one token at least is left"
    assert cache.find("a", delta, [*prompt[:20], 999, *prompt[21:]])[1] == BLOCK
    assert cache.find("a", delta, [999, *prompt[1:]])[1] == 0
    for tenant, loaded in (("b", delta), ("a", other)):
        assert cache.find(tenant, loaded, prompt) == (None, 0)
    longer = [*prompt[: 3 * BLOCK], *range(500, 500 + BLOCK), 1]
    cache.keep("a", delta, longer, entry(len(longer)))
    assert cache.bytes == 4 * BLOCK * size, "it begins with all of the first, which goes"
    assert cache.find("a", delta, prompt)[1] == 3 * BLOCK
    cache.keep("a", other, prompt, entry(len(prompt)))
    assert cache.bytes == 3 * BLOCK * size, "the one that was not needed for longest goes"
    assert cache.find("a", delta, prompt)[1] == 0 and cache.find("a", other, prompt)[1] == 3 * BLOCK
    cache.forget(other)
    assert cache.bytes == 0 and not cache._found
    cache.keep("a", delta, list(range(7 * BLOCK)), entry(7 * BLOCK))
    assert cache.bytes == 0, "larger than all"


def test_a_beginning_that_goes_leaves_what_others_share() -> None:
    """Two prompts begin alike. When one of them goes, the other one is found as before."""
    delta: Any = Delta()
    cache = PromptCache(4 * BLOCK * 2 * 2 * 3 * 4)
    shared = list(range(BLOCK))
    one, other = ([*shared, *range(start, start + BLOCK + 1)] for start in (100, 200))
    for prompt in (one, other):
        cache.keep("a", delta, prompt, entry(len(prompt)))
    assert cache.find("a", delta, one)[1] == 2 * BLOCK
    third = list(range(300, 300 + 2 * BLOCK))
    cache.keep("a", delta, third, entry(len(third)))
    assert cache.find("a", delta, other)[1] == BLOCK and cache.wants("a", delta, other), "it was not needed for longest"
    assert cache.find("a", delta, one)[1] == 2 * BLOCK and not cache.wants("a", delta, one)


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


def test_the_catalog_may_change_while_somebody_goes_through_it(tmp_path: Path) -> None:
    """The engine's thread looks for a place for a delta while another thread finds new folders and lost ones."""
    source = deltas("bert", "sequence").folder / "d0"
    for name in ("a", "b"):
        shutil.copytree(source, tmp_path / name)
    catalog = Catalog(tmp_path, {}, lambda *_: None, threading.RLock())
    assert catalog.look() == ([], []) and list(catalog.entries) == ["a", "b"]
    seen = iter(catalog.entries.values())
    first = next(seen)
    shutil.copytree(source, tmp_path / "c")
    shutil.rmtree(tmp_path / "a")
    changed, lost = catalog.look()
    assert [entry.name for entry in seen] == ["b"] and (changed, lost) == ([], [first])
    assert list(catalog.entries) == ["b", "c"]
    catalog.remove("b")
    assert catalog.look() == ([], []) and list(catalog.entries) == ["c"], "what was taken out stays out"
    catalog.put(Entry("b", tmp_path / "b"))
    assert list(catalog.entries) == ["c", "b"] and [info.name for info in catalog.infos()] == ["b", "c"]
    with pytest.raises(UnknownDelta, match="Known"):
        catalog.remove("a")


def test_admission_counts_what_waits() -> None:
    admission = Admission(3, 2, threading.RLock())
    for tenant in ("a", "a", "b"):
        admission.enter(tenant)
    with pytest.raises(QueueFull, match="3 inputs wait already") as full:
        admission.enter("c")
    assert full.value.retry_after == 1.0, "nothing has ended yet"
    admission.leave("b")
    with pytest.raises(QueueFull, match="2 inputs of tenant 'a'"):
        admission.enter("a")
    now = time.monotonic()
    for number in range(1, 200):
        admission.note_end(now + number)  # one a second
    with pytest.raises(QueueFull) as full:
        admission.enter("a")
    assert full.value.retry_after == pytest.approx(2 / 4, rel=0.1)
    admission.leave("a")
    admission.leave("a")
    assert not admission.queued


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
