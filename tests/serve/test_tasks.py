"""Classes, tags and answers of encoder-decoders over HTTP are those of the delta alone in transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM

import deltune
import deltune.serve
import tiny
from deltune.models import Pooling, align_padding_token, load_model, load_tokenizer
from deltune.runtime.delta_schema import MERGED_FACTS
from deltune.serve.engine.requests import Request, Sampling
from deltune.templates import words_to_tag
from deltune.train.inference import merge_run

from .served import Served, save_delta, served

LABELS = ("beast", "fruit", "tool")
TAGS = ("O", "B-THING", "I-THING")
CLASSIFIERS = {"by-lora": "lora(rank=4)", "by-prefix": "prefix(length=3) + layernorm", "by-mean": "prompt(length=2)"}
TEXTS = ("the old hammer", "a plum", "my small otter was near the table")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Path, Path]]:
    """A server over an encoder with classifiers and a tagger, its model and its deltas."""
    root = tmp_path_factory.mktemp("encoder")
    source = tiny.still(tiny.model(root / "model"))
    for seed, (name, method) in enumerate(CLASSIFIERS.items()):
        model = load_model(str(source), "classification", LABELS)
        pooling: Pooling = "mean" if name == "by-mean" else "model"
        save_delta(model, root / "deltas" / name, method, seed, pooling=pooling)
    save_delta(load_model(str(source), "tagging", TAGS), root / "deltas" / "tagger", "ia3 + layernorm", 7)
    with served(model=str(source), deltas=str(root / "deltas"), served_name="base") as running:
        yield running, source, root / "deltas"


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_classes(encoder: tuple[Served, Path, Path], name: str) -> None:
    server, source, deltas = encoder
    answer = server.post("/classify", {"model": name, "input": list(TEXTS)})
    assert answer.status_code == 200, answer.text
    model, tokenizer = load_model(str(source), "classification", LABELS).eval(), load_tokenizer(str(source))
    deltune.load(model, deltas / name)
    for text, one in zip(TEXTS, answer.json()["data"], strict=True):
        with torch.no_grad():
            expected = model(**tokenizer(text, return_tensors="pt")).logits[0].softmax(-1)
        assert one["probs"] == pytest.approx(expected.tolist(), abs=1e-5) and one["num_classes"] == len(LABELS)
        assert one["label"] == LABELS[int(expected.argmax())] and list(one["scores"]) == list(LABELS)
    usage = answer.json()["usage"]
    assert usage["prompt_tokens"] == sum(len(tokenizer(text)["input_ids"]) for text in TEXTS) == usage["total_tokens"]


def test_texts_are_split_as_in_training(encoder: tuple[Served, Path, Path], tmp_path: Path) -> None:
    """A tagger of texts with spans reads marks apart from words, as `deltune predict` does; another one does not."""
    _, source, deltas = encoder
    shutil.copytree(deltas / "tagger", tmp_path / "deltas" / "blanks")
    shutil.copytree(deltas / "tagger", tmp_path / "deltas" / "spans")
    file = tmp_path / "deltas" / "spans" / "delta.json"
    columns = {"tokens": "text", "spans": "entities"}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"trained": {"columns": columns}}))
    text = "the old hammer (a plum)."
    with served(model=str(source), deltas=str(tmp_path / "deltas"), served_name="base") as server:
        words = {
            name: [w["word"] for w in server.post("/tag", {"model": name, "input": text}).json()["data"][0]["words"]]
            for name in ("blanks", "spans")
        }
    assert words["blanks"] == text.split() and words["spans"] == ["the", "old", "hammer", "(", "a", "plum", ")", "."]
    assert words["spans"] == words_to_tag(text, columns)


@pytest.mark.parametrize("problem_type", [None, "multi_label_classification", "regression"])
def test_merged_model_that_reads_the_mean(tmp_path: Path, problem_type: str | None) -> None:
    """What merge writes for sentence-transformers is served as its delta was, beside deltas for the same base."""
    source, pairs = tiny.still(tiny.model(tmp_path / "model")), problem_type == "regression"
    labels = LABELS[:1] if problem_type == "regression" else LABELS
    model = load_model(str(source), "classification", labels)
    model.config.problem_type = problem_type or "single_label_classification"
    save_delta(model, tmp_path / "delta", "lora(rank=4)", 0, pooling="mean")
    merge_run(tmp_path / "delta", tmp_path / "merged", base=str(source))
    columns = {"text": "a", "label": "b"} | ({"pair": "c"} if pairs else {})
    (tmp_path / "merged" / MERGED_FACTS).write_text(json.dumps({"columns": columns}))
    tuned, tokenizer = deltune.load(model.eval(), tmp_path / "delta"), load_tokenizer(str(source))
    tuned.use("default")
    with served(model=str(tmp_path / "merged"), served_name="base") as server:
        body = {"model": "base", "input": list(TEXTS)} | ({"pair": list(TEXTS)} if pairs else {})
        answer = server.post("/classify", body)
        wrong = server.post("/classify", {**body, "pair": None if pairs else list(TEXTS)})
    assert answer.status_code == 200 and wrong.status_code == 400, (answer.text, wrong.text)
    assert ("classifies pairs" if pairs else "classifies single texts") in wrong.json()["error"]["message"]
    for text, one in zip(TEXTS, answer.json()["data"], strict=True):
        with torch.no_grad():
            logits = model(**tokenizer(text, text if pairs else None, return_tensors="pt")).logits[0]
        expected = logits if pairs else logits.sigmoid() if problem_type else logits.softmax(-1)
        assert one["probs"] == pytest.approx(expected.tolist(), abs=1e-5)


def test_classes_of_pairs(encoder: tuple[Served, Path, Path]) -> None:
    server, source, deltas = encoder
    pairs = {"model": "by-lora", "input": [TEXTS[0], TEXTS[1]], "pair": [TEXTS[1], TEXTS[2]]}
    data = server.post("/v1/classify", pairs).json()["data"]
    model, tokenizer = load_model(str(source), "classification", LABELS).eval(), load_tokenizer(str(source))
    deltune.load(model, deltas / "by-lora")
    for i, one in enumerate(data):
        with torch.no_grad():
            expected = model(**tokenizer(TEXTS[i], TEXTS[i + 1], return_tensors="pt")).logits[0].softmax(-1)
        assert one["probs"] == pytest.approx(expected.tolist(), abs=1e-5)
    wrong = server.post("/classify", {**pairs, "pair": ["a"]})
    assert wrong.status_code == 400 and "2 inputs and 1 in pair" in wrong.json()["error"]["message"]


def test_tags(encoder: tuple[Served, Path, Path]) -> None:
    server, source, deltas = encoder
    answer = server.post("/tag", {"model": "tagger", "input": list(TEXTS)})
    assert answer.status_code == 200, answer.text
    model, tokenizer = load_model(str(source), "tagging", TAGS).eval(), load_tokenizer(str(source))
    deltune.load(model, deltas / "tagger")
    for text, one in zip(TEXTS, answer.json()["data"], strict=True):
        words = text.split()
        with torch.no_grad():  # a word is a token of this tokenizer, between two special ones
            labels = model(**tokenizer(text, return_tensors="pt")).logits[0, 1:-1].argmax(-1).tolist()
        assert one["words"] == [{"word": w, "label": TAGS[i]} for w, i in zip(words, labels, strict=True)]


def test_words_are_tagged_as_they_are(encoder: tuple[Served, Path, Path]) -> None:
    """A list of words has the tags of the text that they make; a text is split at blanks and nowhere else."""
    server, _, _ = encoder
    words = [text.split() for text in TEXTS]
    texts, lists = (server.post("/tag", {"model": "tagger", "input": inputs}).json() for inputs in (list(TEXTS), words))
    assert texts["data"] == lists["data"] and texts["usage"] == lists["usage"]
    for wrong in ([["the"], []], [["the"], "hammer"], [[]], [[1]]):
        assert server.post("/tag", {"model": "tagger", "input": wrong}).status_code == 400, wrong


def test_every_word_has_a_tag(encoder: tuple[Served, Path, Path]) -> None:
    """Those without a token and those that were cut off too, each in its place."""
    server, _, _ = encoder
    words = TEXTS[2].split()
    plain, among, alone, cut = (
        server.post("/tag", {"model": "tagger", "input": [sentence], **more}).json()["data"][0]["words"]
        for sentence, more in (
            (words, {}),
            (["", *words[:3], "", *words[3:], ""], {}),
            (["", ""], {}),
            (words, {"truncate_prompt_tokens": 4}),
        )
    )
    assert [pair for pair in among if pair["word"]] == plain and [pair["word"] for pair in among].count("") == 3
    assert alone == [{"word": "", "label": "O"}] * 2
    assert [pair["word"] for pair in cut] == words and all(pair["label"] == "O" for pair in cut[2:])


def test_no_text_is_cut_unless_a_request_asks_for_it(encoder: tuple[Served, Path, Path]) -> None:
    """What is beyond the positions of the model is refused, for every task that reads a whole text."""
    server, source, _ = encoder
    tokenizer, text = load_tokenizer(str(source)), "the old hammer " * 100
    longest = load_model(str(source), "classification", LABELS).config.max_position_embeddings
    for path, name in (("/classify", "by-lora"), ("/tag", "tagger"), ("/v1/embeddings", "by-lora")):
        answer = server.post(path, {"model": name, "input": text})
        assert answer.status_code == 400 and "truncate_prompt_tokens: -1" in answer.json()["error"]["message"]
        for tokens, length in ((-1, longest), (7, 7), (longest + 5, longest)):
            cut = server.post(path, {"model": name, "input": text, "truncate_prompt_tokens": tokens})
            assert cut.status_code == 200 and cut.json()["usage"]["prompt_tokens"] == length
        whole = server.post(path, {"model": name, "input": TEXTS[2], "truncate_prompt_tokens": 30}).json()
        assert whole["usage"]["prompt_tokens"] == len(tokenizer(TEXTS[2])["input_ids"])
        for tokens in (0, -2, 1.5, "7"):
            assert server.post(path, {"model": name, "input": "a", "truncate_prompt_tokens": tokens}).status_code == 400
    ids = server.post("/classify", {"model": "by-lora", "input": [5, 6], "truncate_prompt_tokens": 1})
    assert ids.status_code == 400 and "token ids are never cut" in ids.json()["error"]["message"]


def test_a_task_needs_its_head(encoder: tuple[Served, Path, Path]) -> None:
    server, _, _ = encoder
    for path, name in (("/classify", "tagger"), ("/tag", "by-lora"), ("/generate", "by-lora"), ("/classify", "base")):
        answer = server.post(path, {"model": name, "input": "the"})
        message = answer.json()["error"]["message"]
        assert answer.status_code == 400 and "can be asked to" in message, answer.text
    assert server.post("/v1/embeddings", {"model": "tagger", "input": "the"}).status_code == 200


def test_an_encoder_does_not_chat(encoder: tuple[Served, Path, Path]) -> None:
    """A chat template would not help it."""
    body = {"model": "base", "messages": [{"role": "user", "content": "the"}]}
    answer = encoder[0].post("/v1/chat/completions", body)
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "no_generation"
    assert "does not generate text" in answer.json()["error"]["message"] and "template" not in answer.text


def test_answers_of_an_encoder_decoder(tmp_path: Path) -> None:
    """Greedy answers are those of `generate` with the delta alone."""
    source = tiny.model(tmp_path / "model")
    tokenizer = load_tokenizer(str(source))
    config = AutoConfig.for_model(
        "t5", vocab_size=len(tokenizer), d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.0,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=3, decoder_start_token_id=1,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        AutoModelForSeq2SeqLM.from_config(config).save_pretrained(source)
    model = load_model(str(source), "seq2seq-lm").eval()
    align_padding_token(model, tokenizer)
    for seed, (name, method) in enumerate({"one": "lora(rank=4)", "two": "prefix(length=2)"}.items()):
        save_delta(model, tmp_path / "deltas" / name, method, seed, scale=1.0)
    options = {"model": str(source), "deltas": str(tmp_path / "deltas"), "watch": 0, "log": "off"}
    with served(**options, served_name="base") as server:
        for name in ("one", "two", "base"):
            body = {"model": name, "input": list(TEXTS), "max_tokens": 8, "temperature": 0}
            answer = server.post("/generate", body)
            assert answer.status_code == 200, answer.text
            texts = [choice["text"] for choice in answer.json()["choices"]]
            if name != "base":
                deltune.load(model, tmp_path / "deltas" / name, name=name)
            expected = []
            for text in TEXTS:
                with torch.no_grad():
                    ids = model.generate(**_inputs(tokenizer, text), max_new_tokens=8, do_sample=False)
                expected.append(tokenizer.decode(ids[0], skip_special_tokens=True))
            if name != "base":
                deltune.tuned(model).detach(name)
            assert texts == expected, name
        streamed = server.post("/generate", {"model": "one", "input": TEXTS[0], "max_tokens": 8, "stream": True})
        assert streamed.text.rstrip().endswith("data: [DONE]")


def test_an_answer_whose_end_is_forced_was_cut(tmp_path: Path) -> None:
    """BART's configs make the last token that an answer may have one that ends it; the answer was cut nevertheless."""
    source = tiny.model(tmp_path / "model")
    tokenizer = load_tokenizer(str(source))
    config = AutoConfig.for_model(
        "bart", vocab_size=len(tokenizer), d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=64, dropout=0.0,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=3, bos_token_id=1, decoder_start_token_id=1,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = AutoModelForSeq2SeqLM.from_config(config)
    model.generation_config.forced_eos_token_id = 3
    model.generation_config.suppress_tokens = None
    with deltune.serve.Server(model.eval(), tokenizer) as server:
        for most in (1, 2, 9):
            sampling = Sampling(max_tokens=most, temperature=0.0)
            answer = server.submit(Request("generate", text=TEXTS[0], sampling=sampling)).result(60)
            with torch.no_grad():
                ids = model.generate(**_inputs(tokenizer, TEXTS[0]), max_new_tokens=most, do_sample=False)[0].tolist()
            assert ids[-1] == 3 and [choice.token for choice in answer.tokens] == ids[1:-1]
            assert answer.finish_reason == ("length" if len(ids) == most + 1 else "stop")


def _inputs(tokenizer: object, text: str) -> dict[str, torch.Tensor]:
    encoded = tokenizer(text, return_tensors="pt")  # type: ignore[operator]
    return {name: encoded[name] for name in ("input_ids", "attention_mask")}
