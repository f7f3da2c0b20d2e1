"""evaluate, predict and merge on a finished run."""

from __future__ import annotations

import datetime
import io
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pandas
import pyarrow
import pytest
import torch
from pyarrow import parquet

import tiny
from deltune.errors import DeltuneError
from deltune.train import prediction_inputs
from deltune.train.config import RunConfig
from deltune.train.inference import evaluate, evaluate_model, load_run, merge_run, predict, predict_rows, rescore
from deltune.train.run import train
from deltune.train.run_folder import RunFolder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    root = tmp_path_factory.mktemp("tiny")
    train(tiny.spec(root, method="lora(rank=2) + bitfit", epochs=1), root / "run")
    return RunFolder(root / "run")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run on pairs of sentences."""
    root = tmp_path_factory.mktemp("pairs")
    for seed, split in enumerate(("train", "test")):
        rows = [
            {"a": r["text"], "b": "the old " + r["text"][:4], "label": r["label"]} for r in tiny.sentences(24, seed)
        ]
        tiny.lines(root / "data" / f"{split}.jsonl", rows)
    train(tiny.spec(root, epochs=1, columns=("a", "b", "label")), root / "run")
    return RunFolder(root / "run")


def test_a_run_gives_its_own_numbers_again(run: RunFolder, tmp_path: Path) -> None:
    scores = evaluate(run.folder, output=tmp_path)
    assert scores == {split: run.metrics.scores[split] for split in ("validation", "test")}
    for split in scores:
        assert (tmp_path / f"{split}.jsonl").read_text() == (run.predictions / f"{split}.jsonl").read_text()


def test_predictions_are_scored_without_the_model(run: RunFolder, tmp_path: Path) -> None:
    shutil.copytree(run.folder, tmp_path / "copy")
    spec = (tmp_path / "copy" / "spec.yaml").read_text()
    (tmp_path / "copy" / "spec.yaml").write_text(spec.replace(run.config.model.name, "/nowhere"))
    expected = {s: {n: v for n, v in run.metrics.scores[s].items() if n != "loss"} for s in ("validation", "test")}
    assert rescore(tmp_path / "copy") == expected
    assert set(rescore(tmp_path / "copy", ["f1_macro"])["test"]) == {"f1_macro"}
    with pytest.raises(DeltuneError, match="classification cannot be measured by bleu; it can by accuracy"):
        rescore(tmp_path / "copy", ["bleu"])


def test_a_run_can_be_moved(run: RunFolder, tmp_path: Path) -> None:
    shutil.copytree(run.folder, tmp_path / "moved")
    assert evaluate(tmp_path / "moved", splits=["test"]) == {"test": run.metrics.test}


def test_other_data(run: RunFolder, tmp_path: Path) -> None:
    tiny.data(tmp_path / "data", others=6)
    assert evaluate(run.folder, str(tmp_path / "data"), ["test"])["test"]["accuracy"] in [i / 6 for i in range(7)]
    rows = [{"text": "a plum", "label": "vegetable"}, {"text": "a saw", "label": "tool"}]
    tiny.lines(tmp_path / "data" / "test.jsonl", rows)
    with pytest.raises(DeltuneError, match="vegetable"):
        evaluate(run.folder, str(tmp_path / "data"), ["test"])


def test_all_rows_of_the_own_file_hold_those_of_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.lines(tmp_path / "rows.jsonl", tiny.sentences(20, 0))
    train(tiny.spec(tmp_path, data=str(tmp_path / "rows.jsonl"), epochs=1), tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    evaluate("run")
    assert "also those that the run was trained on" not in caplog.text
    evaluate("run", "rows.jsonl")
    assert "all rows of rows.jsonl are scored, also those that the run was trained on" in caplog.text


def test_other_data_need_no_train_split(run: RunFolder, tmp_path: Path) -> None:
    tiny.data(tmp_path / "data", others=6)
    whole = evaluate(run.folder, str(tmp_path / "data"), ["test"])
    for name in ("train", "validation"):
        for file in (tmp_path / "data").glob(f"{name}.*"):
            file.unlink()
    assert evaluate(run.folder, str(tmp_path / "data")) == whole
    for file in (tmp_path / "data").glob("test.*"):
        file.unlink()
    with pytest.raises(DeltuneError, match="no train or validation or test file"):
        evaluate(run.folder, str(tmp_path / "data"))


def test_splits_that_are_not_there(run: RunFolder, pairs: RunFolder) -> None:
    with pytest.raises(DeltuneError, match="unknown split 'exam'"):
        evaluate(run.folder, splits=["exam"])
    assert set(evaluate(run.folder, splits=["dev"])) == {"validation"}
    assert set(evaluate(pairs.folder)) == {"test"}


def test_predictions_are_those_of_the_evaluation(run: RunFolder) -> None:
    rows = tiny.objects(run.predictions / "test.jsonl")
    answers = predict(run.folder, [row["input"] for row in rows])
    assert [answer["label"] for answer in answers] == [row["prediction"] for row in rows]
    assert answers[0]["scores"] == pytest.approx(rows[0]["scores"])


def test_a_model_is_loaded_once_for_many_calls(run: RunFolder) -> None:
    loaded = load_run(run.folder)
    assert loaded.labels == ("beast", "fruit", "tool")
    assert predict(loaded, ["a saw"]) == predict(loaded, ["a saw"])
    assert loaded.model.config.id2label == {0: "beast", 1: "fruit", 2: "tool"}


def test_pairs(pairs: RunFolder) -> None:
    assert set(predict(pairs.folder, [("the saw", "is old")])[0]) == {"label", "scores"}
    with pytest.raises(DeltuneError, match="a text and its pair in every row; row 2 has something else"):
        predict(pairs.folder, [("a", "b"), "a"])


def test_texts_of_several_runs_in_one_batch(run: RunFolder, tmp_path: Path) -> None:
    """Each text has the answer of its own run, with that run's labels."""
    other = tmp_path / "other"
    rows = [{"text": r["text"], "label": "ABC"[i % 3]} for i, r in enumerate(tiny.sentences(24, 5))]
    for split in ("train", "test"):
        tiny.lines(other / "data" / f"{split}.jsonl", rows)
    spec = tiny.spec(run.folder.parent, method="prefix(length=2) + layernorm", epochs=1)
    train(spec.replace(data=str(other / "data")), other / "run")
    texts = [r["text"] for r in tiny.sentences(9, 7)]
    names = ["one", "two", "two"] * 3
    both = load_run({"one": run.folder, "two": other / "run"})
    mixed = predict(both, texts, rows=names)
    alone = {"one": predict(run.folder, texts), "two": predict(other / "run", texts)}
    for i, name in enumerate(names):
        assert mixed[i]["label"] == alone[name][i]["label"]
        assert mixed[i]["scores"] == pytest.approx(alone[name][i]["scores"], abs=1e-5)
    unusable: list[tuple[Any, str]] = [
        (names[:2], "of 2 texts, and there are 9"), (["thre"] * 9, "'thre'"), ("one", "rows is a list"),
        (None, r"several runs are given \(one, two\)"),
    ]  # fmt: skip
    for wrong, message in unusable:
        with pytest.raises(DeltuneError, match=message):
            predict(both, texts, rows=wrong)


def test_what_cannot_be_predicted(run: RunFolder, tmp_path: Path) -> None:
    with pytest.raises(DeltuneError, match="no texts"):
        predict(run.folder, [])
    with pytest.raises(DeltuneError, match="one text, no pair"):
        predict(run.folder, [("a", "b")])
    with pytest.raises(DeltuneError, match="is not a RUN folder"):
        predict(tmp_path, ["a"])
    shutil.copytree(run.folder, tmp_path / "run", ignore=shutil.ignore_patterns("delta"))
    with pytest.raises(DeltuneError, match="no delta yet"):
        predict(tmp_path / "run", ["a"])
    with pytest.raises(DeltuneError, match=f"Give one of {tmp_path / 'run'}"):
        predict(tmp_path, ["a"])


def test_merged_it_is_a_plain_checkpoint(run: RunFolder, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = merge_run(run.folder, tmp_path / "plain")
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [row["text"] for row in tiny.sentences(6, 9)]
    with torch.no_grad():
        probabilities = model(**tokenizer(texts, padding=True, return_tensors="pt")).logits.softmax(-1)
    for row, answer in zip(probabilities, predict(run.folder, texts), strict=True):
        assert row.tolist() == pytest.approx(list(answer["scores"].values()), abs=1e-5)
    assert model.config.id2label == {0: "beast", 1: "fruit", 2: "tool"}
    assert not [name for name in model.state_dict() if "deltune" in name]
    with pytest.raises(DeltuneError, match="not an empty folder"):
        merge_run(run.folder, folder)


def test_a_merged_model_knows_the_columns_and_lengths_of_its_run(tmp_path: Path) -> None:
    tiny.lines(
        tmp_path / "data" / "train.jsonl", [{"said": r["text"], "is": r["label"]} for r in tiny.sentences(12, 0)]
    )
    tiny.lines(tmp_path / "data" / "test.jsonl", [{"said": r["text"], "is": r["label"]} for r in tiny.sentences(12, 1)])
    spec = tiny.spec(tmp_path, method="lora", columns={"text": "said", "label": "is"}, epochs=1, max_length=5)
    train(spec, tmp_path / "run")
    (tmp_path / "texts.csv").write_text("is,said\nx,the old plum is on the table\n")
    for folder in (tmp_path / "run" / "delta", merge_run(tmp_path / "run", tmp_path / "merged")):
        (row,) = prediction_inputs.inputs_from_file(tmp_path / "texts.csv", folder)
        with pytest.warns(UserWarning, match="cut to the 5 tokens"):
            (answer,) = predict(folder, [row["input"]])
        with pytest.warns(UserWarning, match="cut to the 5 tokens"):
            (expected,) = predict(tmp_path / "run", ["the old plum is on the table"])
        assert answer["scores"] == pytest.approx(expected["scores"], abs=1e-5)
    scores = evaluate_model(str(tmp_path / "merged"), str(tmp_path / "data"), splits=["test"])["test"]
    assert scores == pytest.approx(evaluate(tmp_path / "run", splits=["test"])["test"], abs=1e-4)


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".json", ".parquet"])
def test_a_row_has_the_same_number_everywhere(suffix: str, run: RunFolder, tmp_path: Path) -> None:
    """From 1, without the header, however many lines a row or the file has."""
    table = pandas.DataFrame([("the plum\nand\nthe fig", "fruit"), ("a saw", "tool")], columns=["text", "label"])
    file = tmp_path / f"rows{suffix}"
    if suffix == ".csv":
        table.to_csv(file, index=False)
    elif suffix == ".parquet":
        table.to_parquet(file)
    else:
        table.to_json(file, orient="records", lines=suffix == ".jsonl", indent=None if suffix == ".jsonl" else 1)
    evaluate(run.folder, str(file), output=tmp_path / "scored")
    predicted = prediction_inputs.inputs_from_file(file, run.folder)
    assert [row["id"] for row in predicted] == ["1", "2"]
    assert [row["id"] for row in tiny.objects(tmp_path / "scored" / "test.jsonl")] == ["test-1", "test-2"]


def test_rows_of_parquet_are_written_as_json_has_them(
    run: RunFolder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Dates as texts, numbers that are none as null; bytes, which have no form, are left out and named."""
    day = datetime.datetime(2024, 2, 3, 4, 5, 6)
    rows = [
        {"text": "a fig", "at": day, "day": day.date(), "score": math.nan, "in": [math.inf, 1.5], "raw": b"x",
         "image": {"bytes": b"x", "path": "a"}, "took": datetime.timedelta(1), "mine": {"bytes": "x"}},
        {"text": "a saw", "at": None, "day": None, "score": 2.0, "in": [], "raw": None, "image": None, "took": None,
         "mine": None},
    ]  # fmt: skip
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    with caplog.at_level("INFO", "deltune"):
        inputs = prediction_inputs.inputs_from_file(tmp_path / "rows.parquet", run.folder)
    assert inputs == [
        {"id": "1", "input": {"text": "a fig"}, "at": "2024-02-03T04:05:06", "day": "2024-02-03", "score": None,
         "in": [None, 1.5], "mine": {"bytes": "x"}},
        {"id": "2", "input": {"text": "a saw"}, "at": None, "day": None, "score": 2.0, "in": [], "mine": None},
    ]  # fmt: skip
    assert "left out, as JSON has no such values: raw, image, took" in caplog.text


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ("text=Review Text", ""),
        ("text=Review Text,label=Stars", ""),
        ("Review Text", ""),
        ("txt=Review Text", "unknown role of a column 'txt'. Did you mean 'text'?"),
        (None, "unknown column 'text' in new.csv. Known: Review Text, Stars. What is read is --columns text=text"),
    ],
)
def test_a_file_to_predict_may_have_other_columns(
    columns: str | None, problem: str, run: RunFolder, tmp_path: Path
) -> None:
    (tmp_path / "new.csv").write_text("Review Text,Stars\na fig,3\n")
    if problem:
        with pytest.raises(DeltuneError, match=re.escape(problem)):
            prediction_inputs.inputs_from_file(tmp_path / "new.csv", run.folder, columns=columns)
    else:
        (row,) = prediction_inputs.inputs_from_file(tmp_path / "new.csv", run.folder, columns=columns)
        assert row["input"] == {"text": "a fig"}


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([None, 4, ...], ["1", "2", "3"]),
        ([None, 4, 5], ["None", "4", "5"]),
        ([7, 8, "9"], ["7", "8", "9"]),
        ([7, 7, 8], ["1", "2", "3"]),
    ],
)
def test_rows_have_the_same_ids_as_those_of_a_run(
    ids: list[Any], expected: list[str], run: RunFolder, tmp_path: Path
) -> None:
    rows = [{"text": "a fig", "label": "fruit", **({} if name is ... else {"id": name})} for name in ids]
    file = tiny.lines(tmp_path / "rows.jsonl", rows)
    written = [row["id"] for row in predict_rows(run.folder, prediction_inputs.inputs_from_file(file, run.folder))]
    evaluate(run.folder, str(file), output=tmp_path / "scored")
    scored = [row["id"] for row in tiny.objects(tmp_path / "scored" / "test.jsonl")]
    assert written == expected and [name.removeprefix("test-") for name in scored] == expected


def test_what_cannot_be_merged(pairs: RunFolder, tmp_path: Path) -> None:
    with pytest.raises(DeltuneError, match="cannot be merged"):
        merge_run(pairs.folder, tmp_path / "plain")
    assert not list(tmp_path.iterdir())


def test_blank_lines_are_told_and_ids_are_lines(
    tmp_path: Path, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "some.txt").write_text("one\n\nthree\n", encoding="utf-8")
    with pytest.warns(UserWarning, match="1 blank lines are left out"):
        inputs = prediction_inputs.inputs_from_file(tmp_path / "some.txt", run.folder)
    assert inputs == [{"id": "1", "input": "one"}, {"id": "3", "input": "three"}]
    for name, reason in (("sme.txt", r"unknown file 'sme.txt' in .*Did you mean 'some.txt'"), ("a.xlsx", "as CSV")):
        if name == "a.xlsx":
            (tmp_path / name).write_text("one")
        with pytest.raises(DeltuneError, match=reason):
            prediction_inputs.inputs_from_file(tmp_path / name, run.folder)
    monkeypatch.setattr("sys.stdin", io.StringIO("one\nthree\n"))
    assert [row["input"] for row in prediction_inputs.inputs_from_file(Path("-"), run.folder)] == ["one", "three"]


def test_an_unfinished_run_says_so(tmp_path: Path, run: RunFolder) -> None:
    shutil.copytree(run.folder, tmp_path / "run")
    (tmp_path / "run" / "metrics.json").unlink()
    with pytest.warns(UserWarning, match="not finished"):
        load_run(tmp_path / "run")
    with pytest.raises(DeltuneError, match="not finished"):
        rescore(tmp_path / "run")


def test_the_folder_of_known_tasks_may_move(tmp_path: Path) -> None:
    tiny.data(tmp_path / "old" / "rotten_tomatoes")
    tiny.model(tmp_path / "model")
    spec = RunConfig.from_flat(
        model=str(tmp_path / "model"), task="rotten_tomatoes", data_root=str(tmp_path / "old"), method="layernorm",
        epochs=1, batch_size=8, max_length=16,
    )  # fmt: skip
    scores = train(spec, tmp_path / "run", progress=False).scores
    (tmp_path / "old").rename(tmp_path / "new")
    with pytest.raises(DeltuneError, match="there is no folder"):
        evaluate(tmp_path / "run")
    moved = evaluate(tmp_path / "run", data_root=str(tmp_path / "new"))
    assert moved["test"]["accuracy"] == scores["test"]["accuracy"]
