"""Answers in words: where prompt and word meet, mistakes, real checkpoints against plain transformers, and predict."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

import tiny
from deltune.errors import DeltuneError
from deltune.models import align_padding_token
from deltune.runtime.padding import padding_side
from deltune.templates import surrounding_tokens
from deltune.train.inference import evaluate, load_run, predict
from deltune.train.metrics.labels import entities
from deltune.train.run import train
from deltune.train.run_folder import RunFolder
from deltune.train.tasks.base import InferenceContext, TaskOptions
from deltune.train.tasks.classification import (
    CAUSAL_CLASSIFICATION,
    SEQ2SEQ_CHOICE,
    SEQ2SEQ_CLASSIFICATION,
    split_candidates,
)
from deltune.train.tasks.encoding import IGNORE_INDEX
from deltune.train.tasks.generation import CAUSAL_GENERATION, SEQ2SEQ_GENERATION, tokenize_prompt_and_targets
from deltune.train.tasks.token_classification import entity_type, format_entities, parse_entities
from train.test_kinds import places

__all__ = ["places"]
PAIRS = (("It was", "great"), ("It was ", "great"), ("It was\n", "great"), ("", "great"), ("She said:", "a b c"))


def byte_level() -> PreTrainedTokenizerFast:
    """A tokenizer as GPT-2's: the blank belongs to the word after it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made = trainers.BpeTrainer(vocab_size=300, special_tokens=["<end>"])
    tokenizer.train_from_iterator(["It was great", "that was bad", "a great b c"] * 20, made)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


@pytest.mark.parametrize("name", ["byte level", "stories260k-llama", "babyllama-char-llama"])
def test_the_word_stands_where_it_would_in_the_text(name: str, request: pytest.FixtureRequest) -> None:
    """Prompt and word together are the tokens of their text; the prompt's own are the same for every word."""
    if name == "byte level":
        tokenizer: Any = byte_level()
        alone, wholes = next(tokenize_prompt_and_targets(tokenizer, ["It was "], [["great"]]))
        assert tokenizer.convert_ids_to_tokens(split_candidates(alone, wholes)[1][0]) == ["Ġgreat"]
    else:
        tokenizer = AutoTokenizer.from_pretrained(request.getfixturevalue("shared") / "models" / name)
    for prompt, word in PAIRS:
        alone, wholes = next(tokenize_prompt_and_targets(tokenizer, [prompt], [[word, "bad"]]))
        start, owns = split_candidates(alone, wholes)
        text = prompt + ("" if not prompt or prompt[-1].isspace() else " ") + word
        assert [*start, *owns[0]] == tokenizer(text)["input_ids"]
        assert tokenizer.decode(owns[0]).strip() == word


def test_the_end_is_the_tokenizers_own(shared: Path) -> None:
    """Of an encoder-decoder the target stands between the tokens that the tokenizer puts around it."""
    tokenizer = AutoTokenizer.from_pretrained(shared / "models" / "g2p-en-us-bart")
    alone, wholes = next(tokenize_prompt_and_targets(tokenizer, [""], [["abc", "ab"]], "text_target"))
    end = surrounding_tokens(tokenizer, "text_target")[1]
    start, owns = split_candidates(alone, wholes)
    ids = tokenizer.convert_tokens_to_ids
    assert (start, end) == ((ids("<s>"),), (ids("</s>"),)) and owns == [tuple(ids([*"abc"])), tuple(ids([*"ab"]))]


@pytest.mark.parametrize("name", ["byte level", "stories260k-llama", "babyllama-char-llama"])
def test_a_target_stands_where_it_would_in_the_text(name: str, places: Path, request: pytest.FixtureRequest) -> None:
    """Prompt and target are the tokens of their text; the prompt's are the same with and without a target, and where a
    token would be of both, the text is still the same."""
    tokenizer: Any = byte_level()
    if name != "byte level":
        tokenizer = AutoTokenizer.from_pretrained(request.getfixturevalue("shared") / "models" / name)
    model, limits = AutoModelForCausalLM.from_pretrained(places / "gpt2"), TaskOptions(32, 16, "{source}")
    for prompt, word in PAIRS[:1] + PAIRS[2:3] + PAIRS[4:]:
        encoded = CAUSAL_GENERATION.encode(
            tokenizer, model, {"source": [prompt], "targets": [[word, "bad"]]}, limits, True
        ).rows
        prompted = CAUSAL_GENERATION.encode(tokenizer, model, {"source": [prompt]}, limits, False).rows[0]
        text = prompt + ("" if prompt[-1].isspace() else " ") + word
        assert encoded[0]["input_ids"] == [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        assert all(row["input_ids"][: row["prompt_length"]] == prompted["input_ids"] for row in encoded)
        assert tokenizer.decode(encoded[0]["labels"][prompted["prompt_length"] : -1]).strip() == word
    both = CAUSAL_GENERATION.encode(
        tokenizer, model, {"source": ["It was "], "targets": [["great"]]}, limits, True
    ).rows[0]
    assert tokenizer.decode(both["input_ids"], skip_special_tokens=True).replace("  ", " ").strip() == "It was great"


def test_what_is_cut_is_counted(places: Path) -> None:
    """Inputs and targets apart: with an end of the tokenizer's, an end of ours, after a prompt, and of candidates."""
    t5, gpt2 = (AutoTokenizer.from_pretrained(places / name) for name in ("t5", "gpt2"))
    both = AutoModelForSeq2SeqLM.from_pretrained(places / "t5")
    after = AutoModelForCausalLM.from_pretrained(places / "gpt2")
    columns = {"source": ["the fig " * 9, "a saw"], "targets": [["fig", "the old fig and saw"], ["a fig is a saw"]]}
    limits = TaskOptions(8, 5)
    for kind, tokenizer, model in (
        (SEQ2SEQ_GENERATION, t5, both),
        (CAUSAL_GENERATION, byte_level(), after),
        (CAUSAL_GENERATION, gpt2, after),
    ):
        encoded = kind.encode(tokenizer, model, columns, limits, True)
        room = [sum(label != IGNORE_INDEX for label in row["labels"]) for row in encoded.rows]
        assert encoded.truncated == 1 and encoded.truncated_targets == sum(n >= 5 for n in room) >= 2, kind.head
        assert kind.encode(tokenizer, model, columns, TaskOptions(64, 32), True).truncated_targets == 0
    choices = {"question": ["the saw"], "choices": [["the old fig and saw", "fig"]], "answer": [1]}
    assert SEQ2SEQ_CHOICE.encode(t5, both, choices, limits, False).truncated_targets == 1
    assert SEQ2SEQ_CHOICE.encode(t5, both, choices, limits, True).truncated_targets == 0


def read(shared: Path, folder: str, rows: int) -> list[dict[str, Any]]:
    with gzip.open(shared / "data" / folder / "test.jsonl.gz", "rt", encoding="utf-8") as file:
        return [json.loads(line) for line, _ in zip(file, range(rows), strict=False)]


def test_words_of_a_real_decoder(shared: Path) -> None:
    """The word with the greater log-likelihood by transformers alone, whatever the batch."""
    folder = shared / "models" / "stories260k-llama"
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    align_padding_token(model, tokenizer)
    words = {"negative": "terrible", "positive": "great"}
    texts = [row["sentence"] for row in read(shared, "sst2", 24)]
    limits = TaskOptions(max_length=256, template="{text} It was", label_words=words)
    encoded = CAUSAL_CLASSIFICATION.encode(tokenizer, model, {"text": texts}, limits, False)
    predicted = CAUSAL_CLASSIFICATION.predict(InferenceContext(model, tokenizer, list(words), limits, 7), encoded)
    for text, best, scores in zip(texts, predicted.predictions, predicted.scores, strict=True):
        plain = []
        for word in words.values():
            ids = torch.tensor([tokenizer(f"{text} It was {word}")["input_ids"]])
            count = ids.shape[1] - len(tokenizer(f"{text} It was")["input_ids"])
            with torch.no_grad():
                logs = model(ids).logits[0, :-1].log_softmax(-1)
            plain.append(logs.gather(1, ids[0, 1:, None])[-count:].sum())
        shares = torch.stack(plain).softmax(0)
        assert best == int(shares.argmax()) and list(scores.values()) == pytest.approx(shares.tolist(), abs=1e-4)


def test_choices_of_a_real_encoder_decoder(shared: Path) -> None:
    """How is a word pronounced? Transformers' own mean loss says the same, and it is nearly always right."""
    folder = shared / "models" / "g2p-en-us-bart"
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    rows = read(shared, "g2p_us_to_gb", 48)
    choices = [[rows[(i + j) % len(rows)]["us"] for j in range(4)] for i in range(len(rows))]
    columns = {"question": [row["source"] for row in rows], "choices": choices, "answer": [0] * len(rows)}
    limits = TaskOptions(max_length=32, max_target_length=32)
    encoded = SEQ2SEQ_CHOICE.encode(tokenizer, model, columns, limits, False)
    predicted = SEQ2SEQ_CHOICE.predict(InferenceContext(model, tokenizer, (), limits, 9), encoded)
    assert (
        sum(best == 0 for best in predicted.predictions) >= 46 and predicted.loss is not None and predicted.loss < 0.2
    )
    for i in range(4):
        plain = []
        for choice in choices[i]:
            labels = torch.tensor([tokenizer(text_target=choice)["input_ids"]])
            inputs = tokenizer(rows[i]["source"], return_tensors="pt")
            with torch.no_grad():
                output = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], labels=labels)
            logs = output.logits[0].log_softmax(-1).gather(1, labels[0, :, None])[:, 0]
            plain.append(logs[1:-1].mean())  # without <s> and </s>
        assert predicted.scores[i] == pytest.approx(torch.stack(plain).softmax(0).tolist(), abs=1e-4)


def test_real_entities_survive_their_words(shared: Path) -> None:
    """tags → text → tags is exact on all of CoNLL04's test rows; where mentions repeat, the first is taken."""
    names = json.loads((shared / "data" / "conll04" / "meta.json").read_text())["label_names"]
    types = {entity_type(name): entity_type(name) for name in names if entity_type(name)}
    count = 0
    for row in read(shared, "conll04", 1000):
        tags = [names[tag] if isinstance(tag, int) else tag for tag in row["tags"]]
        assert parse_entities(format_entities(row["tokens"], tags, types), row["tokens"], types) == tags
        count += len(entities(tags, "IOB2"))
    assert count == 1079


@pytest.mark.slow
def test_a_known_task_in_words(shared: Path, tmp_path: Path) -> None:
    """Template and words of the task are the run's on any data."""
    model = str(shared / "models" / "stories260k-llama")
    spec = tiny.RunConfig.from_flat(
        model=model, task="sst2", data_root=str(shared / "data"), answer="words", head="freeze", method="layernorm",
        epochs=1, max_train_rows=16, validation_rows=20, max_length=64, target_length=8,
    )  # fmt: skip
    metrics = train(spec, tmp_path / "run", progress=False)
    assert metrics.count["head"] == 0 and metrics.count["method"] == 11 * 64
    rows = read(shared, "sst2", 20)
    lines = RunFolder(tmp_path / "run").predictions / "test.jsonl"
    predictions = tiny.objects(lines)[:20]
    assert (
        set(predictions[0]["scores"]) == {"negative", "positive"}
        and predictions[0]["prediction"] in predictions[0]["scores"]
    )
    tiny.lines(tmp_path / "other" / "test.jsonl", [{"sentence": r["sentence"], "label": r["label"]} for r in rows])
    evaluate(tmp_path / "run", str(tmp_path / "other"), ["test"], tmp_path / "out")
    again = tiny.objects(tmp_path / "out" / "test.jsonl")
    assert [row["prediction"] for row in again] == [row["prediction"] for row in predictions]
    assert again[0]["scores"] == pytest.approx(predictions[0]["scores"], rel=1e-4)


# -- mistakes, before anything is written

MISTAKES: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "missing": ("classification", "t5", {"words": "fruit=fig,tool=saw"}, "label 'beast' has no word"),
    "unknown": ("classification", "t5", {"words": "fruit=fig,tool=saw,best=a,beast=b"}, "Did you mean 'beast'"),
    "shared": ("classification", "t5", {"words": "fruit=fig,tool=fig,beast=a"}, "fruit, tool have the same word 'fig'"),
    "all": ("classification", "gpt2", {"words": "fruit=fig,tol=fig"}, "4 problems"),
    "tokens": ("classification", "gpt2", {"words": "fruit=xx,tool=yy,beast=fig"}, "same tokens.*: 'xx' and 'yy'"),
    "role": ("classification", "t5", {"template": "{txt} is"}, "unknown role 'txt' in template. Did you mean 'text'"),
    "label": ("classification", "t5", {"template": "{label}"}, "unknown role 'label'"),
    "brace": ("choice", "gpt2", {"template": "{question"}, "write a literal brace twice"),
    "decoder": ("tagging", "gpt2", {}, "tagging in words is for an encoder-decoder.*or answer=head"),
    "mute": ("classification", "bert", {}, "cannot generate text: .*language-model head"),
    "encoder": ("classification", "masked", {}, "is an encoder: its tokens attend to those after them"),
    "head": ("classification", "bert", {"answer": "head", "words": "a=b", "template": "x"}, "2 problems"),
    "no list": ("classification", "t5", {"words": "great"}, "words"),
    "long": ("classification", "gpt2", {"target_length": 60}, "64 tokens"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISTAKES)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_mistakes(case: str, places: Path, tmp_path: Path) -> None:
    kind, model, more, message = MISTAKES[case]
    if model == "masked":
        AutoTokenizer.from_pretrained(places / "bert").save_pretrained(places / model)
        config = AutoConfig.from_pretrained(places / "bert")
        AutoModelForMaskedLM.from_config(config).save_pretrained(places / model)
    values = {"answer": "words", "max_length": 32, "target_length": 8, "epochs": 1, **more}
    with pytest.raises(DeltuneError, match=message):
        spec = tiny.spec(places, model=str(places / model), data=str(places / kind), task=kind, **values)
        train(spec, tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def test_tags_that_are_no_entities(places: Path) -> None:
    tokenizer, model = (
        AutoTokenizer.from_pretrained(places / "t5"),
        AutoModelForSeq2SeqLM.from_pretrained(places / "t5"),
    )
    from deltune.train.tasks.token_classification import SEQ2SEQ_TAGGING

    with pytest.raises(DeltuneError, match="the labels are NOUN, VERB"):
        SEQ2SEQ_TAGGING.encode(
            tokenizer, model, {"tokens": [["a"]]}, TaskOptions(label_words={"NOUN": "", "VERB": "", "O": ""}), False
        )


def test_words_of_one_token_need_one_pass(places: Path) -> None:
    """A row a text for words of one token, whatever their number; prompts of several rows are encoded once."""
    for folder, auto, kind in (
        ("gpt2", AutoModelForCausalLM, CAUSAL_CLASSIFICATION),
        ("t5", AutoModelForSeq2SeqLM, SEQ2SEQ_CLASSIFICATION),
    ):
        tokenizer, model = AutoTokenizer.from_pretrained(places / folder), auto.from_pretrained(places / folder)
        texts = ["the old", "a very small", "the"]
        for words, rows in ((("fig", "saw", "mole"), 3), (("the fig", "the saw", "a mole"), 6)):
            limits = TaskOptions(label_words=dict(zip("abc", words, strict=True)))
            encoded = kind.encode(tokenizer, model, {"text": texts}, limits, False)
            assert len(encoded) == rows and encoded.num_texts == 3
            if folder == "t5":
                padding_side(model)  # which is measured once
                seen: list[int] = []
                hook = model.get_encoder().register_forward_pre_hook(
                    lambda module, args, keywords, seen=seen: seen.append(len(keywords["input_ids"])), with_kwargs=True
                )
                kind.predict(InferenceContext(model, tokenizer, "abc", limits), encoded)
                hook.remove()
                assert seen == [3]


# -- predict


def trained(places: Path, folder: Path, kind: str, model: str, **more: Any) -> Path:
    spec = tiny.spec(
        places, model=str(places / model), data=str(places / kind), task=kind, method="layernorm", epochs=1,
        max_train_rows=8, **{"max_length": 32, "target_length": 4, **more},
    )  # fmt: skip
    train(spec, folder, progress=False)
    return folder


INPUTS: dict[str, tuple[str, list[Any], str, Any]] = {
    "tagging": (
        "bert", ["the old fig", ["the", "old", "fig"], {"tokens": ["the", "old", "fig"]}], "tokens", {"text": "x"}
    ),
    "choice": ("bert", [{"question": "a", "choices": ["fig", "saw"]}], "question (text), choices (a list of", "a"),
    "generation": ("t5", ["the old fig", {"source": "the old fig"}], "source (text)", ["a", "b"]),
    "language": ("gpt2", ["the old fig", {"text": "the old fig"}], "one text", 7),
}  # fmt: skip


@pytest.mark.parametrize("kind", INPUTS)
def test_predict(kind: str, places: Path, tmp_path: Path) -> None:
    """The ways of writing an input mean the same; what is none is refused with its number."""
    model, inputs, message, wrong = INPUTS[kind]
    run = load_run(trained(places, tmp_path / "run", kind, model))
    predictions = predict(run, inputs)
    assert len(predictions) == len(inputs) and all(answer == predictions[0] for answer in predictions)
    key = "label" if run.kind.predicts_label_ids else "prediction"
    assert set(predictions[0]) == {key, "scores"}
    if kind == "tagging":
        assert len(predictions[0]["prediction"]) == len(predictions[0]["scores"]) == 3
    if kind == "language":
        assert predictions[0]["scores"] > 1 > 0 > predictions[0]["prediction"]
        assert [answer["scores"] for answer in predict(run, ["", "the old fig", ""])][1] == predictions[0]["scores"]
    with pytest.raises(DeltuneError) as caught:
        predict(run, [*inputs, wrong])
    assert message in str(caught.value) and f"row {len(inputs) + 1} has something else" in str(caught.value)
    with pytest.raises(DeltuneError, match="classification by heads"):
        predict(run, inputs, rows=["default"] * len(inputs))


def test_predict_on_the_command_line(places: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from deltune.cli.app import app

    def printed(*arguments: str) -> str:
        app([*arguments], standalone_mode=False)
        return capsys.readouterr().out

    tags, choice = trained(places, tmp_path / "tags", "tagging", "bert"), tmp_path / "choice"
    trained(places, choice, "choice", "gpt2", answer="words", head="freeze")
    predictions = json.loads(printed("predict", str(tags), "--text", "the old fig", "--json"))
    assert predictions[0]["input"] == ["the", "old", "fig"] and set(predictions[0]) == {
        "id",
        "input",
        "prediction",
        "scores",
    }
    words = [  # tags stand behind their tokens
        token if tag == "O" else f"{token}/{tag}"
        for token, tag in zip(predictions[0]["input"], predictions[0]["prediction"], strict=True)
    ]
    assert " ".join(words) in printed("predict", str(tags), "--text", "the old fig")
    file = tiny.lines(tmp_path / "in.jsonl", [{"id": 7, "question": "the old", "choices": ["fig", "a saw"]}])
    predictions = json.loads(printed("predict", str(choice), "--file", str(file), "--json"))
    assert (
        predictions[0]["id"] == "7"
        and predictions[0]["prediction"] in (0, 1)
        and sum(predictions[0]["scores"]) == pytest.approx(1)
    )
    assert "the old | fig | a saw" in printed("predict", str(choice), "--file", str(file))
    tiny.lines(tmp_path / "in.jsonl", [{"question": "the old", "choices": "fig"}])
    with pytest.raises(DeltuneError, match="line 1: column 'choices' must be a list of texts"):
        printed("predict", str(choice), "--file", str(file))
    with pytest.raises(DeltuneError, match="row 1 has something else"):
        printed("predict", str(choice), "--text", "the old")
