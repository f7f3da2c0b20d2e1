"""Rows of several tasks: their column on the command line, the numbers of their names, and every step they pass."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

import deltune
import tiny
from deltune.cli import app
from deltune.errors import DeltuneError
from deltune.models import load_model, load_tokenizer
from deltune.serve import Server
from deltune.serve.engine.requests import Request
from deltune.serve.errors import InvalidRequest
from deltune.train.config import RunConfig
from deltune.train.inference import evaluate, load_run, predict
from deltune.train.prediction_inputs import inputs_from_file, inputs_from_texts
from deltune.train.run import train
from deltune.train.tasks.base import InferenceContext, TaskKind, TaskOptions
from deltune.train.tasks.classification import CAUSAL_CLASSIFICATION, SEQ2SEQ_CLASSIFICATION
from deltune.train.tasks.generation import CAUSAL_GENERATION
from tables.specimens import stir

NAMES = ("same", "turned")
COLUMNS = "text=text,label=label,task=job"


def rows(number: int, seed: int) -> list[dict[str, Any]]:
    """Sentences whose label depends on the task as much as on the words."""
    labels, made = sorted(tiny.WORDS), []
    for i, row in enumerate(tiny.sentences(number, seed)):
        turned = i // 3 % 2
        made.append({**row, "label": labels[(labels.index(row["label"]) + turned) % 3], "job": NAMES[turned]})
    return made


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tasks")
    for seed, (split, number) in enumerate({"train": 96, "validation": 24, "test": 24}.items()):
        tiny.lines(root / "data" / f"{split}.jsonl", rows(number, seed))
    tiny.still(tiny.model(root / "model"))
    return root


def spec(root: Path, method: str, columns: str | None = COLUMNS, **more: Any) -> RunConfig:
    return tiny.spec(root, method=method, columns=columns, **{"epochs": 1, **more})


@pytest.fixture(scope="module", params=["poly(rank=4, tasks=2)", "mtl_lora(rank=4, tasks=2)"])
def run(request: pytest.FixtureRequest, root: Path) -> Path:
    folder: Path = root / request.param.partition("(")[0]
    train(spec(root, request.param, lr=0.3, epochs=2), folder, progress=False)
    return folder


def expected(run: Path, text: str, task: str) -> list[float]:
    """The probabilities of the labels, by transformers and `condition` alone."""
    source = str(run.parent / "model")
    model, tokenizer = load_model(source, "classification", sorted(tiny.WORDS)).eval(), load_tokenizer(source)
    tuned = deltune.load(model, run)
    with torch.no_grad(), tuned.condition(task_ids=[NAMES.index(task)]):
        return model(**tokenizer(text, return_tensors="pt")).logits[0].softmax(-1).tolist()


def test_the_names_of_the_tasks_go_with_the_delta(run: Path) -> None:
    assert json.loads((run / "delta" / "delta.json").read_text())["trained"]["tasks"] == list(NAMES)


def test_a_run_gives_its_own_numbers_again_and_answers_by_the_task(run: Path, root: Path, tmp_path: Path) -> None:
    evaluate(run, output=tmp_path)
    lines = tiny.objects(tmp_path / "test.jsonl")
    assert lines == tiny.objects(run / "predictions" / "test.jsonl")
    by_file = inputs_from_file(root / "data" / "test.jsonl", run)
    assert [line["input"]["task"] for line in by_file] == [row["job"] for row in rows(24, 2)]
    answers = predict(run, [line["input"] for line in by_file])
    assert [answer["label"] for answer in answers] == [line["prediction"] for line in lines]
    text = "the old hammer"
    for task in NAMES:
        (answer,) = predict(run, [line["input"] for line in inputs_from_texts([text], [], task, run)])
        assert list(answer["scores"].values()) == pytest.approx(expected(run, text, task), abs=1e-5)
    assert expected(run, text, NAMES[0]) != pytest.approx(expected(run, text, NAMES[1]), abs=1e-3)


def test_rows_of_several_runs_have_the_tasks_of_their_own(run: Path, root: Path) -> None:
    train(spec(root, "lora(rank=2)", "text=text,label=label"), root / "plain", progress=False, resume=True)
    loaded = load_run({"many": run, "one": root / "plain"})
    inputs = [{"text": "a plum", "task": NAMES[1]}, "a plum", {"text": "a plum", "task": NAMES[0]}]
    answers = predict(loaded, inputs, rows=["many", "one", "many"])
    for answer, name in ((answers[0], NAMES[1]), (answers[2], NAMES[0])):
        assert list(answer["scores"].values()) == pytest.approx(expected(run, "a plum", name), abs=1e-5)


def test_a_server_is_told_the_task_of_each_request(run: Path, root: Path) -> None:
    model, tokenizer = (
        load_model(str(root / "model"), "classification", sorted(tiny.WORDS)),
        load_tokenizer(str(root / "model")),
    )
    with Server(model, tokenizer) as server:
        server.load("many", run)
        requests = [Request("classify", text="my saw", delta="many", row_task=task) for task in (*NAMES, *NAMES)]
        futures = [server.submit(request) for request in requests]
        for request, future in zip(requests, futures, strict=True):
            scores = [*(future.result(60).scores or {}).values()]
            assert scores == pytest.approx(expected(run, "my saw", request.row_task or ""), abs=1e-5)
        for task, says in ((None, "name the one of the input"), ("third", "unknown task 'third'")):
            with pytest.raises(InvalidRequest, match=says):
                server.submit(Request("classify", text="my saw", delta="many", row_task=task)).result(60)


def test_the_command_line_takes_the_task_of_texts(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = {}
    for task in NAMES:
        monkeypatch.setattr(
            sys, "argv", ["deltune", "predict", str(run), "--text", "my saw", "--row-task", task, "--json"]
        )
        with pytest.raises(SystemExit) as ended:
            app.main()
        assert not ended.value.code
        (answers[task],) = json.loads(capsys.readouterr().out)
        assert [*answers[task]["scores"].values()] == pytest.approx(expected(run, "my saw", task), abs=1e-5)


def test_answers_in_words_are_trained_by_task(root: Path) -> None:
    """Each reference of a source is a row with the task of its source."""
    labels = {"same": ["a fig", "my fig"], "turned": ["a saw"]}
    for seed, split in enumerate(("train", "validation", "test")):
        some = [{"source": r["text"], "target": labels[r["job"]], "job": r["job"]} for r in rows(24, seed)]
        tiny.lines(root / "answers" / f"{split}.jsonl", some)
    folder = tiny.model(root / "llama", "llama")
    sizes = {**tiny.FAMILIES["llama"], "vocab_size": len(load_tokenizer(str(folder))), "eos_token_id": 3}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes)).save_pretrained(folder)
    columns = "source=source,targets=target,task=job"
    config = spec(root, "mtl_lora(rank=4, tasks=2)", columns, task="generation", target_length=4, max_length=16)
    config = config.replace(model=str(folder), data=str(root / "answers"))
    train(config, root / "words", progress=False)
    evaluate(root / "words", output=root / "again")
    assert tiny.objects(root / "again" / "test.jsonl") == tiny.objects(root / "words" / "predictions" / "test.jsonl")
    with pytest.raises(DeltuneError, match="packing has texts of several tasks"):
        train(config.replace(packing=True), root / "packed", progress=False)


@pytest.mark.parametrize(
    "kind",
    [CAUSAL_GENERATION, SEQ2SEQ_CLASSIFICATION, CAUSAL_CLASSIFICATION],
    ids=lambda kind: f"{kind.head} {kind.name}",
)
def test_an_answer_in_words_is_of_the_task_of_its_row(kind: TaskKind, root: Path) -> None:
    """Prompts are put into another order than their batch, and an encoder reads each of them once."""
    tokenizer = load_tokenizer(str(root / "model"))
    sizes = {**tiny.FAMILIES["llama"], "vocab_size": len(tokenizer), "eos_token_id": 3, "pad_token_id": 0}
    if kind.head == "seq2seq-lm":
        sizes = {
            "d_model": 32,
            "d_kv": 8,
            "num_heads": 4,
            "d_ff": 64,
            "num_layers": 2,
            "decoder_start_token_id": 0,
            **sizes,
        }
    config = AutoConfig.for_model("t5" if kind.head == "seq2seq-lm" else "llama", **sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = (AutoModelForSeq2SeqLM if kind.head == "seq2seq-lm" else AutoModelForCausalLM).from_config(config)
    stir(deltune.attach(model, "mtl_lora(rank=4, tasks=2)"), size=1.0)
    texts = ["a fig", "the old saw or my plum", "my hammer", "a plum and the fig", "or a saw"]
    columns: dict[str, Any] = {"task": ["0", "1", "1", "0", "1"]}
    if kind is CAUSAL_GENERATION:
        columns |= {"source": texts, "targets": [["a fig or the old saw"], ["a"], ["my saw"], ["a"], ["the fig a saw"]]}
    else:
        columns |= {"text": texts, "label": [0, 1, 0, 1, 1]}
    options = TaskOptions(16, 8, label_words={"one": "my fig", "two": "old saw"})

    def answers(*chosen: int) -> list[Any]:
        part = {role: [values[i] for i in chosen] for role, values in columns.items()}
        encoded = kind.encode(tokenizer, model, part, options, False)
        predicted = kind.predict(InferenceContext(model, tokenizer, ("one", "two"), options), encoded)
        return predicted.predictions if kind is CAUSAL_GENERATION else [[*one.values()] for one in predicted.scores]

    in_one_batch, alone = answers(*range(5)), [answers(i)[0] for i in range(5)]
    if kind is CAUSAL_GENERATION:
        assert in_one_batch == alone
    else:
        for one, other in zip(in_one_batch, alone, strict=True):
            assert one == pytest.approx(other, abs=1e-5)
    columns["task"] = ["1", "0", "0", "1", "0"]
    assert answers(*range(5)) != in_one_batch


@pytest.mark.parametrize(
    ("method", "columns", "says"),
    [
        ("lora(rank=2)", COLUMNS, r"lora\(rank=2\) has no tasks"),
        ("poly(rank=2)", COLUMNS, "has no tasks"),
        ("poly(rank=2, tasks=2)", "text=text,label=label", r"does not say which one a row has.*task=NAME"),
        ("poly(rank=2, tasks=3)", COLUMNS, r"has 2 tasks \(same, turned\).*give tasks=2"),
        ("poly(rank=2, tasks=2)", "text=text,label=label,task=nothing", "unknown column 'nothing'"),
    ],
)
def test_what_does_not_fit_is_refused_before_training(root: Path, method: str, columns: str, says: str) -> None:
    with pytest.raises(DeltuneError, match=says):
        train(spec(root, method, columns), root / "refused", progress=False)
    assert not (root / "refused" / "delta").exists()


def test_a_task_that_the_delta_does_not_know_is_refused(run: Path, root: Path, tmp_path: Path) -> None:
    tiny.lines(tmp_path / "test.jsonl", [{**row, "job": "third"} for row in rows(6, 4)])
    with pytest.raises(DeltuneError, match="unknown task 'third'"):
        evaluate(run, str(tmp_path))
    with pytest.raises(DeltuneError, match=r"takes text .*task"):
        predict(run, ["a plum"])
    with pytest.raises(DeltuneError, match="unknown task 'third'"):
        predict(run, [{"text": "a plum", "task": "third"}])
