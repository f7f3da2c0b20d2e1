"""Every kind of task: encoding, batches, answers, and a whole run on tiny random models."""

from __future__ import annotations

import io
import json
import logging
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

import tiny
from deltune.cli.formatting import run_table
from deltune.errors import DeltuneError
from deltune.models import tag_all_words
from deltune.train import checkpoints
from deltune.train.config import RunConfig
from deltune.train.inference import (
    evaluate,
    evaluate_model,
    generate,
    load_run,
    merge_run,
    predict,
    predict_rows,
    rescore,
)
from deltune.train.prediction_inputs import inputs_from_file
from deltune.train.report.advice import advice, read_finished
from deltune.train.report.error_analysis import analyse
from deltune.train.run import train
from deltune.train.run_folder import RunFolder
from deltune.train.series import verdict
from deltune.train.tasks.base import InferenceContext, TaskOptions
from deltune.train.tasks.classification import CHOICE
from deltune.train.tasks.encoding import IGNORE_INDEX, collate
from deltune.train.tasks.generation import CAUSAL_GENERATION, LANGUAGE_MODELING, SEQ2SEQ_GENERATION, fill_template
from deltune.train.tasks.registry import TASKS, find_task
from deltune.train.tasks.token_classification import TAGGING

KINDS = ("classification", "multilabel", "regression", "tagging", "choice", "generation", "language")
LIMITS = TaskOptions(max_length=16, max_target_length=8)


def rows(kind: str, count: int, seed: int) -> list[dict[str, Any]]:
    """A task of each kind that a child can do: name the word that is no filler."""
    result = []
    for i, row in enumerate(tiny.sentences(count, seed)):
        words = row["text"].split()
        names = {word: label for label, label_words in tiny.WORDS.items() for word in label_words}
        named = next(word for word in words if word in names)
        chance = random.Random(f"{seed} {i}")
        choices = [named, *chance.sample(sorted(set(names) - {named}), 2)]
        chance.shuffle(choices)
        result.append(
            {
                "classification": row,
                "multilabel": {"text": row["text"], "labels": [row["label"], "named"] if i % 2 else [row["label"]]},
                "regression": {"text": row["text"], "score": list(tiny.WORDS).index(row["label"]) + 0.5},
                "tagging": {"tokens": words, "tags": [f"B-{names[w]}" if w in names else "O" for w in words]},
                "choice": {"question": row["text"], "choices": choices, "answer": choices.index(named)},
                "generation": {"source": row["text"], "targets": [named]},
                "language": {"text": f"the old {named} is near my table" + " and very small" * (i % 3)},
            }[kind]
        )
    return result


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """bert, gpt2 and t5 with one tokenizer, and data of every kind."""
    root = tmp_path_factory.mktemp("kinds")
    for family in ("bert", "gpt2"):
        tiny.model(root / family, family)
    tokenizer = AutoTokenizer.from_pretrained(root / "bert")
    torch.manual_seed(1)
    tokenizer.add_tokens([":", ";", "none", *tiny.WORDS])
    sizes = {"vocab_size": len(tokenizer), "pad_token_id": 1, "eos_token_id": 3, "bos_token_id": 2}
    lm = AutoConfig.for_model("gpt2", **{**tiny.FAMILIES["gpt2"], **sizes})
    AutoModelForCausalLM.from_config(lm).save_pretrained(root / "gpt2")
    both = AutoConfig.for_model(
        "t5", d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=1, **sizes
    )
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    tokenizer.eos_token = "[SEP]"
    for folder in ("t5", "gpt2"):
        tokenizer.save_pretrained(root / folder)
    AutoModelForSeq2SeqLM.from_config(both).save_pretrained(root / "t5")
    for kind in KINDS:
        for seed, split in enumerate(("train", "validation", "test")):
            tiny.lines(root / kind / f"{split}.jsonl", rows(kind, 48 if split == "train" else 12, seed))
    return root


WORDS: dict[str, Any] = {"answer": "words", "head": "freeze"}
RUNS: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("multilabel", "bert", "label_f1", {}), ("regression", "bert", "mae", {}),
    ("tagging", "bert", "entity_f1", {}), ("choice", "bert", "accuracy", {}), ("generation", "gpt2", "exact", {}),
    ("generation", "t5", "exact", {}), ("language", "gpt2", "perplexity", {}),
    ("classification", "t5", "accuracy", WORDS),
    ("classification", "gpt2", "accuracy", {**WORDS, "words": "fruit=fig,tool=the saw,beast=the otter"}),
    ("choice", "t5", "accuracy", WORDS),
    ("choice", "gpt2", "accuracy", {**WORDS, "template": "{question} {choices} :"}),
    ("tagging", "t5", "entity_f1", {**WORDS, "target_length": 8}),
)  # fmt: skip


def _close(value: Any) -> Any:
    """Numbers to four digits, anything else as it is."""
    values = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else [value]
    return pytest.approx(value, rel=1e-4, abs=1e-6) if isinstance(values[0], float) else value


@pytest.mark.parametrize(
    ("kind", "model", "more"),
    [
        ("generation", "gpt2", {}),
        ("generation", "t5", {}),
        ("classification", "t5", {**WORDS, "words": "fruit=fig,tool=saw,beast=mole"}),
    ],
)
def test_a_merged_model_is_asked_as_its_run_was(
    kind: str, model: str, more: dict[str, Any], places: Path, tmp_path: Path
) -> None:
    """By the same template, words and lengths; so is the delta without its run. The scores and texts are the run's."""
    template = "the {source} is" if kind == "generation" else "the {text} is"
    options = {"model": str(places / model), "data": str(places / kind), "task": kind, "template": template, **more}
    train(tiny.spec(places, method="lora(rank=2)", steps=2, max_length=6, target_length=2, **options), tmp_path / "run")
    merged, data, splits = str(merge_run(tmp_path / "run", tmp_path / "merged")), str(places / kind), ["test"]
    expected = evaluate(tmp_path / "run", splits=splits)["test"]
    answer = more.get("answer", "head")
    assert evaluate_model(merged, data, answer=answer, splits=splits)["test"] == pytest.approx(expected, rel=1e-4)
    if kind == "generation":
        assert evaluate(tmp_path / "run" / "delta", data, splits)["test"] == pytest.approx(expected, rel=1e-4)
        prompts = ["my plum", "a very small and very old saw was near the table"]
        assert generate(merged, prompts, 3) == generate(tmp_path / "run", prompts, 3)
    facts = json.loads((tmp_path / "merged" / "trained.json").read_text())
    for name in ("template", "words") if more else ("template",):
        (tmp_path / "merged" / "trained.json").write_text(json.dumps({n: v for n, v in facts.items() if n != name}))
        other = evaluate_model(merged, data, answer=answer, splits=splits)["test"]
        assert other["loss"] != pytest.approx(expected["loss"], rel=1e-4), name


@pytest.mark.parametrize(("kind", "model", "metric", "more"), RUNS)
@pytest.mark.sample(5)
def test_a_whole_run(kind: str, model: str, metric: str, more: dict[str, Any], places: Path, tmp_path: Path) -> None:
    """Trained, scored, and scored again from the delta on the disk: the same numbers, a line of prediction a row; and
    the same predictions of the same inputs, beside the other columns of their rows."""
    spec = tiny.spec(
        places, model=str(places / model), data=str(places / kind), method="lora(rank=4) + layernorm", epochs=2,
        lr=1e-2, max_length=32, task=kind, metrics=(metric,), **{"target_length": 4, **more},
    )  # fmt: skip
    metrics = train(spec, tmp_path / "run", progress=False)
    run = RunFolder(tmp_path / "run")
    assert metrics.best.metric == metric and metrics.omitted == {}
    assert not more or metrics.count["head"] == 0, "in words there is no head"
    again = evaluate(run.folder, output=tmp_path / "again")
    for split in ("validation", "test"):
        assert again[split] == pytest.approx(metrics.scores[split], rel=1e-5)
        lines = tiny.objects(run.predictions / f"{split}.jsonl")
        assert len(lines) == 12 and set(lines[0]) == {"id", "input", "prediction", "reference", "scores"}
        assert (tmp_path / "again" / f"{split}.jsonl").read_text().count("\n") == 12
    predictions = predict_rows(run.folder, inputs_from_file(places / kind / "test.jsonl", run.folder))
    rows = tiny.objects(places / kind / "test.jsonl")
    for prediction, line, row in zip(predictions, lines, rows, strict=True):
        others = prediction.keys() - {"id", "input", "prediction", "scores"}
        assert others and {name: prediction[name] for name in others} == {name: row[name] for name in others}
        assert prediction["input"] == line["input"] and prediction["scores"] == _close(line["scores"])
        assert prediction["prediction"] == _close(line["prediction"])
    of_a_pass = ("loss", "token_accuracy")
    scored = {
        split: {n: v for n, v in metrics.scores[split].items() if n not in of_a_pass}
        for split in ("validation", "test")
    }
    assert {s: pytest.approx(v, rel=1e-9) for s, v in scored.items()} == rescore(run.folder)
    losses = tiny.objects(run.log_file)
    steps = [line["loss"] for line in losses if "loss" in line]
    assert sum(steps[-3:]) < sum(steps[:3])


@pytest.mark.parametrize(("kind", "model", "metric", "more"), RUNS)
@pytest.mark.sample(3)
def test_a_run_goes_on(
    kind: str, model: str, metric: str, more: Any, places: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped after a checkpoint in the middle of an epoch and begun again: the same numbers and predictions."""
    spec = tiny.spec(
        places, model=str(places / model), data=str(places / kind), method="lora(rank=4, dropout=0.1)", steps=12,
        validate_every=4, max_length=32, task=kind, metrics=(metric,), **{"target_length": 4, **more},
    )  # fmt: skip
    whole = train(spec, tmp_path / "whole")
    with monkeypatch.context() as patch:

        def stopped(*args: Any) -> Any:
            save(*args)
            raise KeyboardInterrupt

        save = checkpoints.save_checkpoint
        patch.setattr(checkpoints, "save_checkpoint", stopped)
        with pytest.raises(KeyboardInterrupt):
            train(spec, tmp_path / "run")
    again = train(spec, tmp_path / "run")
    times = {"seconds": 0, "cpu_seconds": 0}
    assert {**again.as_json(), **times} == {**whole.as_json(), **times}
    for split in ("validation", "test"):
        one, other = (RunFolder(tmp_path / name).predictions / f"{split}.jsonl" for name in ("whole", "run"))
        assert one.read_text() == other.read_text()


SMOOTHED = [
    (*run, smoothing)
    for run in (("classification", "bert", "accuracy", {}), *RUNS)
    for smoothing in (0.0, 0.1)
    if not smoothing or run[0] not in ("multilabel", "regression")  # which refuse it
]


@pytest.mark.parametrize(("kind", "model", "metric", "more", "smoothing"), SMOOTHED)
@pytest.mark.sample(6)
def test_the_loss_of_a_step_is_that_of_its_rows(
    kind: str, model: str, metric: str, more: Any, smoothing: float, places: Path, tmp_path: Path
) -> None:
    """10 rows at once, or 2 and 2, which differ in tokens; a last step of 3 rows, cut into 1, 1, 1, 0 and 0."""
    still = tiny.still(Path(shutil.copytree(places / model, tmp_path / model)))
    data = tiny.data(tmp_path / "data") if model == "bert" and kind == "classification" else places / kind
    spec = tiny.spec(
        places, model=str(still), data=str(data), method="lora(rank=2) + layernorm", epochs=1, lr=1e-2, max_length=32,
        task=kind, metrics=(metric,), max_train_rows=23, batch_size=10, label_smoothing=smoothing,
        **{"target_length": 4, **more},
    )  # fmt: skip
    train(spec, tmp_path / "whole", progress=False)
    cut = train(spec.replace(device_batch_size=2), tmp_path / "cut", progress=False)
    assert len(tiny.losses(tmp_path / "cut")) == 3
    assert tiny.losses(tmp_path / "cut") == pytest.approx(tiny.losses(tmp_path / "whole"), rel=1e-5)
    assert cut.test["loss"] == pytest.approx(RunFolder(tmp_path / "whole").metrics.test["loss"], rel=1e-4)


def test_tags_stand_at_first_sub_words(places: Path) -> None:
    """A tokenizer that cuts words: the first piece has the tag, the others and the special tokens none."""
    from transformers import AutoModelForTokenClassification, AutoTokenizer

    from deltune.models import packaged_minilm

    tokenizer = AutoTokenizer.from_pretrained(packaged_minilm())
    model = AutoModelForTokenClassification.from_pretrained(packaged_minilm(), num_labels=3)
    columns = {"tokens": [["Schwarzenegger", "visited", "Ouagadougou", "."], ["Hi"]], "tags": [[1, 0, 2, 0], [0]]}
    encoded = TAGGING.encode(tokenizer, model, columns, TaskOptions(max_length=64), True)
    for row, tokens, tags in zip(encoded.rows, columns["tokens"], columns["tags"], strict=True):
        pieces = tokenizer.convert_ids_to_tokens(row["input_ids"])
        shown = [(piece, tag) for piece, tag in zip(pieces, row["labels"], strict=True) if tag != IGNORE_INDEX]
        assert [tag for _, tag in shown] == tags
        assert all(word.lower().startswith(piece) for word, (piece, _) in zip(tokens, shown, strict=True))
    cut = TAGGING.encode(tokenizer, model, columns, TaskOptions(max_length=5), True)
    assert cut.truncated == 1
    answers = TAGGING.predict(
        InferenceContext(model, tokenizer, ("O", "B-A", "B-B"), TaskOptions(max_length=5), 2), cut
    )
    assert [len(p) for p in answers.predictions] == [4, 1] and answers.predictions[0][-1] == "O"


INVISIBLE = ("", " ", "\t", "\u200b", "\ufe0f", "\u00ad", "\x01", "\u0301", "\u200b\ufe0f")
TAGGED_LABELS = ("O", "B-X", "I-X")


def _word_tokenizers(shared: Path) -> dict[str, Any]:
    """WordPiece, byte-level BPE, Unigram with what T5 normalises, and one that adds no token of its own."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from deltune.models import load_tokenizer

    texts = ["Ada left Paris", "Bob saw Rome too"] * 9
    unigram = Tokenizer(models.Unigram())
    unigram.normalizer = normalizers.Sequence([normalizers.Nmt(), normalizers.NFKC()])
    unigram.pre_tokenizer, unigram.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    made = trainers.UnigramTrainer(vocab_size=80, special_tokens=["<pad>", "<unk>"], unk_token="<unk>")
    unigram.train_from_iterator(texts, made)
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    bpe.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=300, special_tokens=["<end>"]))
    return {
        "WordPiece": load_tokenizer("minilm"),
        "Unigram": PreTrainedTokenizerFast(tokenizer_object=unigram, unk_token="<unk>", pad_token="<pad>"),
        "byte-level BPE": PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<end>", pad_token="<end>"),
        "BART": load_tokenizer(str(shared / "models" / "g2p-en-us-bart")),
        "Llama": load_tokenizer(str(shared / "models" / "stories260k-llama")),
    }


@pytest.mark.parametrize("side", ["right", "left"])
def test_every_word_has_its_own_tag(shared: Path, side: str) -> None:
    """Whatever a tokenizer drops or cuts: each word has the likeliest tag at its own first token, and one that has none
    is O, or inside the entity around it."""
    from transformers import AutoModelForTokenClassification

    texts = [["Ada", word, "left", "Paris", word] for word in INVISIBLE]
    texts += [[*INVISIBLE, "Ada"], ["", ""], ["\u200b"], ["Bob"], ["Ada", "left"] * 12]
    for name, tokenizer in _word_tokenizers(shared).items():
        tokenizer.truncation_side = side
        sizes = {**tiny.FAMILIES["bert"], "vocab_size": len(tokenizer), "num_labels": len(TAGGED_LABELS)}
        torch.manual_seed(0)
        model = AutoModelForTokenClassification.from_config(AutoConfig.for_model("bert", **sizes)).eval()
        model.classifier.weight.data.mul_(20)
        columns = {"tokens": texts, "tags": [[i % 3 for i in range(len(text))] for text in texts]}
        encoded = TAGGING.encode(tokenizer, model, columns, TaskOptions(max_length=12), True)
        context = InferenceContext(model, tokenizer, TAGGED_LABELS, TaskOptions(max_length=12), 3)
        answers, seen = TAGGING.predict(context, encoded), 0
        for text, row, tags, scores in zip(texts, encoded.rows, answers.predictions, answers.scores, strict=True):
            tokens = tokenizer(text, is_split_into_words=True, truncation=True, max_length=12)
            first = {word: i for i, word in reversed(list(enumerate(tokens.word_ids()))) if word is not None}
            assert len(tags) == len(scores) == len(text)
            assert [row["labels"][first[word]] for word in first] == [word % 3 for word in first], name
            if first:
                with torch.no_grad():
                    best = model(input_ids=torch.tensor([tokens["input_ids"]])).logits[0].softmax(-1).max(-1)
            for word in range(len(text)):
                if word in first:
                    assert tags[word] == TAGGED_LABELS[best.indices[first[word]]], (name, text, tags)
                    assert scores[word] == pytest.approx(best.values[first[word]].item(), abs=1e-5)
                    seen += 1
                else:
                    assert scores[word] is None and tags[word] in ("O", "I-X")
        assert seen > 20 and encoded.truncated >= 1


UNSEEN = {
    "outside": ("B-X ? B-X", "B-X O B-X"),
    "within": ("B-X ? ? I-X", "B-X I-X I-X I-X"),
    "at the ends": ("? I-X ? O ?", "O I-X O O O"),
    "of another type": ("B-X ? I-Y", "B-X O I-Y"),
    "nothing seen": ("? ?", "O O"),
    "plain": ("? NOUN ? VERB ?", "NOUN NOUN NOUN VERB VERB"),
    "nothing seen of plain tags": ("? ?", "DET DET"),
}


@pytest.mark.parametrize("case", UNSEEN)
def test_a_word_that_the_model_does_not_see_has_a_tag(case: str) -> None:
    seen, expected = (text.split() for text in UNSEEN[case])
    labels = ("DET", "NOUN", "VERB") if "plain" in case else ("O", "B-X", "I-X", "I-Y")
    assert tag_all_words({i: tag for i, tag in enumerate(seen) if tag != "?"}, len(seen), labels) == expected


def test_words_without_a_token_change_no_score(places: Path, tmp_path: Path) -> None:
    """The same run with and without them, from the training labels to the scores of the test split."""
    results = []
    for name, extra in (("plain", []), ("before", [""]), ("behind", ["", ""])):
        for seed, split in enumerate(("train", "validation", "test")):
            tagged = rows("tagging", 48, seed)
            for row in tagged:
                at = 0 if name == "before" else 2
                row["tokens"][at:at], row["tags"][at:at] = extra, ["O"] * len(extra)
            tiny.lines(tmp_path / name / f"{split}.jsonl", tagged)
        spec = tiny.spec(places, model=str(places / "bert"), data=str(tmp_path / name), method="full", epochs=6)
        results.append(train(spec.replace(lr=1e-2, max_length=32), tmp_path / f"run {name}", progress=False).test)
        lines = tiny.objects(RunFolder(tmp_path / f"run {name}").predictions / "test.jsonl")
        assert all(len(line["input"]) == len(line["prediction"]) == len(line["scores"]) for line in lines)
        words = [{"id": "1", "input": ["", "fig", ""]}]
        assert len(predict_rows(tmp_path / f"run {name}", words)[0]["prediction"]) == 3
    assert results[0]["entity_f1"] > 0.5
    assert results[1] == pytest.approx(results[0]) and results[2] == pytest.approx(results[0])


def test_a_run_on_spans_answers_in_spans(places: Path, tmp_path: Path) -> None:
    """From a text and from a file the entities that its tags have, by their characters in the text as it is."""
    for seed, split in enumerate(("train", "validation", "test")):
        tagged = []
        for row in tiny.sentences(48, seed):
            named = rf"\b({'|'.join(word for kind in tiny.WORDS.values() for word in kind)})\b"
            spans = [{"start": m.start(), "end": m.end(), "label": "X"} for m in re.finditer(named, row["text"])]
            tagged.append({"text": row["text"], "entities": spans})
        tiny.lines(tmp_path / "data" / f"{split}.jsonl", tagged)
    spec = tiny.spec(places, model=str(places / "bert"), data=str(tmp_path / "data"), method="full", epochs=6, lr=1e-2)
    run = train(spec.replace(max_length=32), tmp_path / "run", progress=False)
    assert run.test["entity_f1"] > 0.5
    texts = ["a plum(the  hammer),", "the fig.", "table"]
    tiny.lines(tmp_path / "new.jsonl", [{"text": text, "entities": None, "id": text} for text in texts])
    by_file = predict_rows(tmp_path / "run", inputs_from_file(tmp_path / "new.jsonl", tmp_path / "run"))
    for text, answer, row in zip(texts, predict(tmp_path / "run", texts), by_file, strict=True):
        assert row["entities"] == answer["entities"] and row["prediction"] == answer["prediction"]
        tagged = [word for word, tag in zip(row["input"], row["prediction"], strict=True) if tag == "B-X"]
        assert [entity["text"] for entity in answer["entities"]] == tagged, text
        assert all(text[e["start"] : e["end"]] == e["text"] and e["label"] == "X" for e in answer["entities"])
    assert any(row["entities"] for row in by_file)
    assert "entities" not in predict(tmp_path / "run", [["a", "plum"]])[0]  # words have no characters between them


SCHEME_RUNS = {
    "IOB1": ("IOB1", None, ("entity_f1",)),
    "BIOES": ("BIOES", None, ("entity_f1",)),
    "converted": ("IOB2", "iob2", ("entity_f1",)),
    "plain": ("plain", None, ("accuracy", "f1_macro")),
}


@pytest.mark.parametrize("name", SCHEME_RUNS)
def test_a_run_keeps_the_scheme_of_its_tags(
    name: str, places: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Recognised once, said in the first lines, and used wherever the run is scored again."""
    scheme, option, metrics = SCHEME_RUNS[name]
    prefix = {"BIOES": "S-", "plain": "", "IOB2": "S-"}.get(scheme, "I-")
    for seed, split in enumerate(("train", "validation", "test")):
        tagged = rows("tagging", 48, seed)
        for row in tagged:
            row["tags"] = [tag.replace("B-", prefix) for tag in row["tags"]]
        tiny.lines(tmp_path / "data" / f"{split}.jsonl", tagged)
    with caplog.at_level("INFO", logger="deltune"):
        spec = tiny.spec(
            places, model=str(places / "bert"), data=str(tmp_path / "data"), method="full", epochs=6, lr=1e-2,
            max_length=32, tag_scheme=option,
        )  # fmt: skip
        result = train(spec, tmp_path / "run", progress=False)
    assert f"tags: {scheme}" in caplog.text and ("--tag-scheme" in caplog.text or scheme == "plain")
    run = RunFolder(tmp_path / "run")
    assert run.data.tag_scheme == scheme and set(result.test) == {"loss", *metrics}
    assert all(value > 0.5 for metric, value in result.test.items() if metric != "loss")
    assert all(f"scheme:{scheme}" in result.signatures[metric] for metric in metrics if metric == "entity_f1")
    for scores in (evaluate(run.folder)["test"], rescore(run.folder)["test"]):
        assert {metric: scores[metric] for metric in metrics} == {metric: result.test[metric] for metric in metrics}
    lines = [{**line, "prediction": line["reference"]} for line in tiny.objects(run.predictions / "test.jsonl")]
    tiny.lines(run.predictions / "test.jsonl", lines)
    assert set(rescore(run.folder)["test"].values()) == {1.0}
    assert analyse("tagging", lines, run.data.labels, scheme).wrong == ()
    if scheme == "plain":
        with pytest.raises(DeltuneError, match="and the tags are plain: O, beast, fruit, tool"):
            train(spec.replace(metrics=("entity_f1",)), tmp_path / "other", progress=False)
    elif option is None:
        with pytest.raises(DeltuneError, match=rf"and the tags are {scheme}; give --tag-scheme iob2"):
            train(spec.replace(model=str(places / "t5"), answer="words"), tmp_path / "other", progress=False)


def test_a_target_ends(shared: Path) -> None:
    """Once, whether the tokenizer sees to it or leaves it to the caller."""
    for name in ("aren-translit-blenderbot", "g2p-en-us-bart"):
        tokenizer = AutoTokenizer.from_pretrained(shared / "models" / name)
        model = AutoModelForSeq2SeqLM.from_pretrained(shared / "models" / name)
        columns = {"source": ["hello", "hi"], "targets": [["hello"], ["a" * 20]]}
        for row in SEQ2SEQ_GENERATION.encode(tokenizer, model, columns, LIMITS, True).rows:
            assert row["labels"][-1] == tokenizer.eos_token_id and row["labels"].count(tokenizer.eos_token_id) == 1
            assert len(row["labels"]) <= LIMITS.max_target_length


def test_the_loss_is_on_the_target_alone(places: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(places / "gpt2")
    model = AutoModelForCausalLM.from_pretrained(places / "gpt2")
    columns = {"source": ["the old fig is near", "a saw"], "targets": [["fig", "the fig"], ["saw"]]}
    training = CAUSAL_GENERATION.encode(tokenizer, model, columns, LIMITS, True)
    assert len(training) == 3, "a row for every reference"
    for row, target in zip(training.rows, ("fig", "the fig", "saw"), strict=True):
        target_ids = [label for label in row["labels"] if label != IGNORE_INDEX]
        assert target_ids == [*tokenizer(target, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        assert (
            row["input_ids"][-len(target_ids) :] == target_ids
            and row["labels"][: row["prompt_length"]] == [IGNORE_INDEX] * row["prompt_length"]
        )
    assert len(CAUSAL_GENERATION.encode(tokenizer, model, columns, LIMITS, False)) == 2, "one row for each source"
    batch = collate(tokenizer, model, training.rows)
    loss = model(**batch).loss
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1].log_softmax(-1)
    shown = batch["labels"][:, 1:] != IGNORE_INDEX
    by_hand = -logits.gather(-1, batch["labels"][:, 1:].clamp(min=0)[..., None])[..., 0][shown].mean()
    assert torch.isclose(loss, by_hand)
    long = CAUSAL_GENERATION.encode(tokenizer, model, {"source": ["the old fig " * 9]}, TaskOptions(5, 4), False)
    assert (long.truncated, long.rows[0]["prompt_length"]) == (1, 5)


def test_generated_answers_do_not_depend_on_the_batch(places: Path) -> None:
    """Prompts of different lengths, padded on the left: alone and together the same text."""
    columns = {name: [row[name] for row in rows("generation", 8, 5)] for name in ("source", "targets")}
    for folder, auto, kind in (
        ("gpt2", AutoModelForCausalLM, CAUSAL_GENERATION),
        ("t5", AutoModelForSeq2SeqLM, SEQ2SEQ_GENERATION),
    ):
        tokenizer, model = AutoTokenizer.from_pretrained(places / folder), auto.from_pretrained(places / folder)
        model.generation_config.pad_token_id = tokenizer.pad_token_id
        encoded = kind.encode(tokenizer, model, columns, LIMITS, False)
        batched, alone = (
            kind.predict(InferenceContext(model, tokenizer, (), LIMITS, size), encoded) for size in (8, 1)
        )
        assert batched.predictions == alone.predictions
        assert batched.loss == pytest.approx(alone.loss, rel=1e-5)


def test_choices_stand_side_by_side(places: Path) -> None:
    from transformers import AutoModelForMultipleChoice

    tokenizer = AutoTokenizer.from_pretrained(places / "bert")
    model = AutoModelForMultipleChoice.from_pretrained(places / "bert").eval()
    columns_of_rows = rows("choice", 3, 1)
    columns = {name: [row[name] for row in columns_of_rows] for name in ("question", "choices", "answer")}
    encoded = CHOICE.encode(tokenizer, model, columns, LIMITS, True)
    batch = collate(tokenizer, model, encoded.rows)
    assert batch["input_ids"].shape[:2] == (3, 3) and batch["labels"].tolist() == columns["answer"]
    batched = CHOICE.predict(InferenceContext(model, tokenizer, (), LIMITS, 3), encoded)
    alone = CHOICE.predict(InferenceContext(model, tokenizer, (), LIMITS, 1), encoded)
    assert batched.predictions == alone.predictions and sum(batched.scores[0]) == pytest.approx(1)
    columns["choices"][1] = ["one", "two"]
    with pytest.raises(DeltuneError, match="2 or 3 choices"):
        CHOICE.encode(tokenizer, model, columns, LIMITS, True)


def bytes_model(folder: Path, side: str = "right", **special: str) -> Path:
    """GPT-2 whose tokenizer writes nothing around a text, a token a byte; `special` are its special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({"<|end|>": 0} | {letter: i + 1 for i, letter in enumerate(letters)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    made.add_special_tokens(["<|end|>"])
    PreTrainedTokenizerFast(tokenizer_object=made, padding_side=side, **special).save_pretrained(folder)
    torch.manual_seed(0)
    config = AutoConfig.for_model("gpt2", **tiny.FAMILIES["gpt2"], vocab_size=257)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


EMPTY: dict[str, tuple[list[dict[str, Any]], list[Any], dict[str, Any]]] = {
    "classification": ([{"text": "good", "label": "a"}, {"text": "", "label": "b"}], ["", " ", "bad"], {}),
    "in words": (
        [{"text": "good", "label": "a"}, {"text": "", "label": "b"}], ["", " ", "bad"],
        {"answer": "words", "head": "freeze", "words": "a=yes,b=no"},
    ),
    "pairs": (
        [{"a": "", "b": "", "label": "x"}, {"a": "one", "b": "", "label": "y"}, {"a": "", "b": "two", "label": "y"}],
        [["", ""], ["one", ""], ["", "a longer one"]], {"columns": ("a", "b", "label")},
    ),
    "choice": (
        [{"question": "", "choices": ["x", "yy"], "answer": 0}, {"question": "q", "choices": ["x", "y"], "answer": 1}],
        [{"question": "", "choices": ["x", "y"]}, {"question": " ", "choices": ["x", "y"]}],
        {"answer": "words", "head": "freeze"},
    ),
    "generation": (
        [{"source": "", "targets": "x"}, {"source": "a", "targets": ""}, {"source": "b", "targets": "y"}],
        ["", " ", "abc"], {"target_length": 3},
    ),
    "language": ([{"text": ""}, {"text": "one and two"}, {"text": "x"}], ["", "x", "abc"], {}),
}  # fmt: skip


@pytest.mark.parametrize("case", EMPTY)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.sample
def test_texts_without_tokens_and_their_neighbours(case: str, side: str, tmp_path: Path) -> None:
    """They begin with the token that begins a text, in training, in scoring and in predictions, alone or in company."""
    rows, texts, more = EMPTY[case]
    model = tiny.still(bytes_model(tmp_path / "model", side, eos_token="<|end|>"))
    for split in ("train", "test"):
        tiny.lines(tmp_path / "data" / f"{split}.jsonl", rows * 3)
    kind = {"pairs": "classification", "in words": "classification"}.get(case, case)
    spec = {"model": str(model), "data": str(tmp_path / "data"), "method": "lora", "task": kind, "epochs": 1, **more}
    test = train(RunConfig.from_flat(**spec, batch_size=4), tmp_path / "run", progress=False).test
    apart = train(RunConfig.from_flat(**spec, batch_size=4, device_batch_size=1), tmp_path / "apart", progress=False)
    assert tiny.losses(tmp_path / "apart") == pytest.approx(tiny.losses(tmp_path / "run"), rel=1e-4)
    assert apart.test["loss"] == pytest.approx(test["loss"], rel=1e-4)
    run = load_run(tmp_path / "run")
    in_batch, alone = predict(run, texts), [predict(run, [text])[0] for text in texts]
    for one, other in zip(in_batch, alone, strict=True):
        assert {name: _close(value) for name, value in one.items()} == other


def test_a_text_without_tokens_needs_a_token_that_begins_a_text(tmp_path: Path) -> None:
    model = bytes_model(tmp_path / "model", pad_token="<|end|>")
    tiny.lines(tmp_path / "data" / "train.jsonl", [{"text": "a", "label": "x"}, {"text": "", "label": "y"}])
    spec = RunConfig.from_flat(model=str(model), data=str(tmp_path / "data"), method="lora", epochs=1)
    with pytest.raises(DeltuneError, match=r"row train-2: the text has no tokens.*set bos_token"):
        train(spec, tmp_path / "run", progress=False)
    with pytest.raises(DeltuneError, match="the text has no tokens"):
        generate(model, [""])
    with pytest.raises(DeltuneError, match="no prompts"):
        generate(model, [])
    tiny.lines(tmp_path / "lines" / "train.jsonl", [{"source": "a", "targets": "x"}, {"source": "b", "targets": ""}])
    spec = spec.replace(data=str(tmp_path / "lines"), task="generation")
    with pytest.raises(DeltuneError, match=r"row train-2: the target has no tokens.*set eos_token"):
        train(spec, tmp_path / "run", progress=False)
    bytes_model(tmp_path / "model", eos_token="<|end|>")
    assert len(generate(model, ["", "\n"], max_tokens=2)) == 2
    tiny.lines(tmp_path / "short" / "train.jsonl", [{"text": ""}, {"text": "x"}])
    with pytest.raises(DeltuneError, match="no text of train has two tokens"):
        train(spec.replace(data=str(tmp_path / "short"), task="language"), tmp_path / "run", progress=False)


def test_no_token_of_running_text_is_lost(places: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(places / "gpt2")
    model = AutoModelForCausalLM.from_pretrained(places / "gpt2")
    texts = ["the old fig " * 7, "a saw", "the"]
    encoded = LANGUAGE_MODELING.encode(tokenizer, model, {"text": texts}, TaskOptions(max_length=8), True)
    for number, text in enumerate(texts):
        parts = [row["input_ids"] for row in encoded.rows if row["text_index"] == number]
        whole, joined = tokenizer(text)["input_ids"], [token for part in parts for token in part]
        assert joined == whole[: len(joined)] and len(whole) - len(joined) <= 1
        assert all(len(part) <= 8 for part in parts)


def test_a_template_names_roles() -> None:
    columns = {"source": ["x", "y"], "targets": [["a"], ["b"]]}
    assert fill_template(columns, "Say {source} again:") == ["Say x again:", "Say y again:"]
    with pytest.raises(DeltuneError, match="unknown role 'sorce'"):
        fill_template(columns, "{sorce}")


def test_tasks_by_name(shared: Path) -> None:
    """Every folder of the shared data is a task of the table, with the columns that its files have."""
    folders = {task.folder for task in TASKS.values()}
    available = {p.name for p in (shared / "data").iterdir() if p.is_dir()}
    assert available <= folders
    for name, task in TASKS.items():
        if task.folder in available:
            known_task, where = find_task(name, str(shared / "data"))
            assert isinstance(where, str)
            assert known_task is task and Path(where).name == task.folder
            fields = json.loads((Path(where) / "meta.json").read_text())["fields"]
            listed = fields if isinstance(fields, list) else [f.split("(")[0].strip() for f in fields.split(",")]
            assert set(task.columns.values()) <= set(listed) | {"summary", "targets"}, name
    with pytest.raises(DeltuneError, match="Did you mean 'sst2'"):
        find_task("sst-2", None)
    with pytest.raises(DeltuneError, match="has no hub id; give data_root"):
        find_task("g2p_us_to_gb", None)


def test_a_metric_with_a_model(places: Path, tmp_path: Path) -> None:
    """BERTScore: left out and said without a model, there with one, and so in its name."""
    values = {"data": str(places / "generation"), "task": "generation", "metrics": ("exact", "bertscore"), "epochs": 1}
    spec = tiny.spec(places, model=str(places / "t5"), target_length=4, max_length=16, **values)
    assert "bertscore" in train(spec, tmp_path / "without").omitted
    options = {"bertscore": {"model": str(places / "bert"), "layers": 1}}
    other = tiny.spec(
        places, model=str(places / "t5"), target_length=4, max_length=16, metric_options=options, **values
    )
    metrics = train(other, tmp_path / "with")
    assert not metrics.omitted and spec.name != other.name
    assert rescore(tmp_path / "with")["test"]["bertscore"] == pytest.approx(metrics.test["bertscore"])
    unused = spec.replace(metric_options={"bleu": {"lowercase": True}})
    with pytest.raises(DeltuneError, match="options of bleu, which this run does not compute; it computes exact, bert"):
        train(unused, tmp_path / "unused")
    with pytest.raises(DeltuneError, match="unknown option"):
        tiny.spec(places, model=str(places / "t5"), metric_options={"bertscore": {"modell": "x"}}, **values)


def short_answers(places: Path, folder: Path, **values: Any) -> RunConfig:
    """A config of a model that answers in a word; it learns too little to answer anything right."""
    options = {"model": str(places / "gpt2"), "data": str(places / "generation"), "task": "generation"}
    return tiny.spec(folder, **{**options, "max_length": 16, "target_length": 4, "epochs": 2, "lr": 1e-6, **values})


def test_a_metric_that_cannot_be_computed_chooses_nothing(
    places: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """BLEU of answers of a word: the next metric chooses the epoch, and where all are equal the loss, openly."""
    config = short_answers(places, tmp_path)
    with caplog.at_level(logging.INFO, "deltune"):
        metrics = train(config, tmp_path / "run")
    assert "bleu not computed: " in caplog.text and "the best epoch is chosen by rougeL (--metric)" in caplog.text
    assert metrics.best.metric == "rougeL" and "no reference has 4 words" in metrics.omitted["bleu"]
    losses = [line["eval_loss"] for line in tiny.objects(tmp_path / "run" / "log.jsonl") if "eval_loss" in line]
    assert metrics.best.epoch == 1 + losses.index(min(losses))
    assert [line for line in caplog.messages if " best" in line][-1].count(" best") == 1
    (note,) = (text for text in advice(read_finished(RunFolder(tmp_path / "run"))) if "at every validation" in text)
    assert re.match(r"rougeL was \d+\.\d{4} at every validation, so the epoch with the lowest validation loss", note)
    with pytest.raises(DeltuneError, match="--metric bleu cannot choose the best epoch: it counts runs of up to 4"):
        train(config.replace(metric="bleu"), tmp_path / "asked")


def test_a_search_says_by_what_it_chose(places: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The method it chose is the one that is named, and a method beside it is said not to be tried."""
    search = {"method": ["lora(rank=2)", "lora(rank=8)"], "lr": [1e-6]}
    with caplog.at_level(logging.INFO, "deltune"):
        metrics = train(short_answers(places, tmp_path, epochs=1, method="lora(rank=4)", search=search), tmp_path / "a")
    assert "method lora(rank=4) was given and is not tried" in caplog.text
    assert "up to 2 values tried under seed 0" in caplog.text
    tied = verdict(metrics.runs)
    assert tied in caplog.text
    assert re.fullmatch(
        r"the lowest validation loss of 2 tried; rougeL is \d+\.\d{4} in all of them, so it decides nothing", tied
    )
    shown = {"lora(rank=2)": "lora(rank=2)", "lora": "lora(rank=8)"}  # the size is what they differ in
    assert "seed0-try2: seed 0, method lora(rank=8), lr 1e-06" in caplog.text
    by_loss = min(metrics.runs, key=lambda run: run.validation["loss"])
    finished = read_finished(RunFolder(tmp_path / "a"))
    table = io.StringIO()
    Console(file=table, width=300).print(run_table(finished, "a"))
    assert by_loss.chosen and table.getvalue().startswith(f"{shown[by_loss.tried['method']]} at 1e-06: ")
    caplog.clear()
    folder = shutil.copytree(places / "generation", tmp_path / "generation")
    (folder / "validation.jsonl").unlink()
    config = short_answers(places, tmp_path, data=str(folder), epochs=1, search={"method": ["lora(rank=2)", "lora"]})
    config = RunConfig.from_flat(**{name: value for name, value in config.flat().items() if name != "method"})
    assert config.method.expression == "lora(rank=2)", "of several methods the first is the run's"
    with caplog.at_level(logging.INFO, "deltune"):
        metrics = train(config, tmp_path / "b")
    assert "was given" not in caplog.text
    assert verdict(metrics.runs) == "the first of 2 tried, without a validation split nothing decides"


def test_runs_of_several_kinds_are_for_several_calls(places: Path, tmp_path: Path) -> None:
    """One call of `predict` answers one kind of task, though the runs have one base and one sort of head."""
    fixed = {"model": str(places / "bert"), "method": "lora(rank=1)", "steps": 1, "max_length": 16}
    for kind in ("classification", "multilabel", "tagging"):
        train(tiny.spec(places, data=str(places / kind), task=kind, **fixed), tmp_path / kind, progress=False)
    for other in ("multilabel", "tagging"):
        runs = {"a": tmp_path / "classification", "b": tmp_path / other}
        with pytest.raises(DeltuneError, match=f"here is a for classification and b for {other}: make a call for each"):
            predict(runs, ["a plum"] * 2, rows=["a", "b"])
