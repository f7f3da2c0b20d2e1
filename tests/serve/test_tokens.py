"""Tokens in a server's answers: stops that are special tokens, and probabilities of tokens with the same text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

import deltune
import deltune.serve
from deltune.serve.engine.jobs import RequestEncoder
from deltune.serve.engine.requests import Request, Sampling
from test_templates import END, SPECIAL, TURN, byte_tokenizer, chain

from .served import Served, served

PROMPT = "naïve €"


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Path]]:
    """A server of a model of random weights that reads bytes, and chats."""
    folder = tmp_path_factory.mktemp("letters")
    tokenizer = byte_tokenizer(eos_token="<|end|>", chat_template="{{ messages[0].content }}")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = AutoConfig.for_model("llama", **sizes, vocab_size=len(tokenizer), eos_token_id=END, bos_token_id=None)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with served(model=str(folder), served_name="base") as running:
        yield running, folder


def test_the_probability_of_every_token_is_its_own(letters: tuple[Served, Path]) -> None:
    """Beside plain transformers: of twenty tokens by id, by text and in a chat, where most bytes are no character."""
    server, folder = letters
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    options: dict[str, Any] = {"model": "base", "max_tokens": 6, "temperature": 1.5, "seed": 1}
    body = {"prompt": PROMPT, "logprobs": 20, **options}
    by_text, by_id = (
        server.post("/v1/completions", {**body, "return_tokens_as_token_ids": ids}).json()["choices"][0]["logprobs"]
        for ids in (False, True)
    )
    ids = [int(name.removeprefix("token_id:")) for name in by_id["tokens"]]
    prompt = tokenizer(PROMPT)["input_ids"]
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    chat = server.post(
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": PROMPT}], "logprobs": True, "top_logprobs": 20, **options},
    ).json()["choices"][0]["logprobs"]["content"]
    raw_of = {tokenizer.convert_tokens_to_ids(letter_of(byte)): [byte] for byte in range(256)}
    raw_of |= {token: list(name.encode()) for name, token in SPECIAL.items()}
    for step, (token, row) in enumerate(zip(ids, logits, strict=True)):
        likeliest = row.topk(20).indices.tolist()
        expected = {f"token_id:{i}": pytest.approx(float(row[i]), abs=1e-4) for i in (token, *likeliest)}
        assert by_id["top_logprobs"][step] == expected
        values = by_text["top_logprobs"][step]
        assert sorted(values.values()) == pytest.approx(sorted(float(row[i]) for i in {token, *likeliest}), abs=1e-4)
        assert values[by_text["tokens"][step]] == by_text["token_logprobs"][step]
        assert by_text["token_logprobs"][step] == pytest.approx(float(row[token]), abs=1e-4)
        raws = [entry["bytes"] for entry in (chat[step], *chat[step]["top_logprobs"])]
        assert raws == [raw_of[i] for i in (token, *likeliest)]
        assert len({entry["token"] for entry in chat[step]["top_logprobs"]}) == 20, "no two have the same name"
    assert any("\\x" in name for step in by_text["top_logprobs"] for name in step)


def letter_of(byte: int) -> str:
    """GPT-2's letter of a byte, from its paper's code: printable bytes are themselves, the others follow from 256."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [i for i in range(256) if i not in printable]
    return chr(byte) if byte in printable else chr(256 + others.index(byte))


def test_a_stream_has_the_probabilities_of_the_whole_answer(letters: tuple[Served, Path]) -> None:
    server = letters[0]
    body = {"model": "base", "prompt": PROMPT, "max_tokens": 12, "temperature": 1.5, "seed": 1, "logprobs": 3}
    whole = server.post("/v1/completions", body).json()["choices"][0]
    text, likeliest = "", []
    with httpx.stream("POST", f"{server.url}/v1/completions", json={**body, "stream": True}, timeout=60) as events:
        for line in events.iter_lines():
            if line.startswith("data: {"):
                (choice,) = httpx.Response(200, text=line.removeprefix("data: ")).json()["choices"]
                text += choice["text"]
                logprobs = choice["logprobs"] or {"tokens": [], "top_logprobs": []}
                assert len(logprobs["tokens"]) == len(logprobs["top_logprobs"])
                likeliest += logprobs["top_logprobs"]
    assert text == whole["text"] and likeliest == whole["logprobs"]["top_logprobs"]


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """A tokenizer as Llama's: blanks are ▁, and what is not in the vocabulary is spelled in bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "▁a", "a", "b", "▁b"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("▁", "a"), ("▁", "b")], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def word_pieces() -> PreTrainedTokenizerFast:
    """A tokenizer as BERT's, whose words begin behind a blank."""
    pieces = ["[UNK]", "[CLS]", "a", "b", "##a", "##b", "€", "##€"]
    tokenizer = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece(cleanup=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="[CLS]", unk_token="[UNK]")


TOKENIZERS = {
    "byte-level BPE": byte_tokenizer, "SentencePiece with bytes": sentencepiece_like, "WordPiece": word_pieces,
    "ByT5": ByT5Tokenizer,
}  # fmt: skip


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("text", ["a b", "ab ba", "€ a€", "b 🙂é a", "\ufffd a"])
def test_the_bytes_of_tokens_are_those_of_their_text(name: str, text: str) -> None:
    """One behind the other they are the bytes of the text, with its blanks and parts of characters."""
    if name == "WordPiece" and not set(text) <= set("ab "):
        text = "ba € b"
    tokenizer = TOKENIZERS[name]()
    encoder = RequestEncoder(tokenizer, frozenset({"input_ids"}), False, len(tokenizer))
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    before = tokenizer("a", add_special_tokens=False)["input_ids"][-1]
    raws = []
    for token in tokens:
        raws.append(encoder.token_text(token, before)[1] or b"")
        before = token
    assert b"".join(raws).strip() == text.encode()


def test_the_bytes_of_a_token_that_is_no_character() -> None:
    """Golden values: the first byte of the euro sign in four vocabularies, and tokens without a text."""
    for name, tokenizer in (("â", byte_tokenizer()), ("<0xE2>", sentencepiece_like()), ("â", ByT5Tokenizer())):
        encoder = RequestEncoder(tokenizer, frozenset({"input_ids"}), False, len(tokenizer))
        token = tokenizer.convert_tokens_to_ids(name)
        assert encoder.token_text(token)[1] == b"\xe2"
    encoder = RequestEncoder(byte_tokenizer(), frozenset({"input_ids"}), False, 264)
    assert encoder.token_text(TURN) == ("<|im_end|>", b"<|im_end|>") and encoder.token_text(263) == ("", b"")
    assert RequestEncoder(None, frozenset({"input_ids"}), False, 264).token_text(5) == ("5", None)


STOPS: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (("<|im_end|>",), "ab", "stop"), (("b<|im_end|>",), "a", "stop"), (("<|im_end|>c",), "ab", "stop"),
    (("c<|end|>",), "ab", "stop"), (("im_end",), "abc", "stop"), (("bc",), "a", "stop"),
    (("zz", "<|end|>"), "abc", "stop"),
)  # fmt: skip


@pytest.mark.parametrize(("stop", "text", "reason"), STOPS)
def test_a_stop_that_is_a_special_token(stop: tuple[str, ...], text: str, reason: str) -> None:
    """The model writes ab<|im_end|>c<|end|>, of which only the last ends every answer; whole and as a stream."""
    tokenizer = byte_tokenizer(eos_token="<|end|>")
    model = chain(tokenizer, {"x": "a", "a": "b", "b": TURN, TURN: "c", "c": END}, eos_token_id=None)
    with deltune.serve.Server(model, tokenizer) as server:
        for logprobs in (None, 2):
            sampling = Sampling(max_tokens=8, temperature=0.0, stop=stop, logprobs=logprobs)
            stream = server.stream(Request("generate", text="x", sampling=sampling))
            assert "".join(choice.text for choice in stream) == text
            assert stream.answer is not None and (stream.answer.text, stream.answer.finish_reason) == (text, reason)
        cut = Sampling(max_tokens=2, temperature=0.0, stop=("b<|im_end|>",))
        answer = server.submit(Request("generate", text="x", sampling=cut)).result(60)
        assert (answer.text, answer.finish_reason) == ("ab", "length"), "what might have become a stop is given"
