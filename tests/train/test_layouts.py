"""Tasks on the hub: what its data sets hold, read as the same rows that a folder of ours gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, List, Value

import tiny
from deltune.errors import DeltuneError
from deltune.train.data import loading
from deltune.train.data.loading import HubLayout, apply_layout
from deltune.train.inference import load_run
from deltune.train.run import train
from deltune.train.tasks.registry import TASKS, find_task

TEXT, NUMBER = Value("string"), Value("int32")
NLI = ["entailment", "neutral", "contradiction"]


def glue(first: str, second: str, names: list[str]) -> dict[str, Any]:
    pair = {first: TEXT, second: TEXT} if second else {first: TEXT}
    return {**pair, "label": ClassLabel(names=names), "idx": NUMBER}


def words(features: Any, i: int, at: str = "") -> Any:
    """A value of a feature, another one for every row."""
    if isinstance(features, ClassLabel):
        return i % len(features.names)
    if isinstance(features, dict):
        return {name: words(inner, i, name) for name, inner in features.items()}
    if isinstance(features, List):
        return [words(features.feature, i, f"{at}{n}") for n in range(3)]
    return i if "int" in features.dtype or "float" in features.dtype else f"{at} {i}"


SPAN = {"type": TEXT, "start": NUMBER, "end": NUMBER}
USUAL, HIDDEN = ("train", "validation", "test"), ("train", "validation", "-test")

HUB: dict[str, tuple[dict[str, Any], tuple[str, ...], dict[str, Any]]] = {
    "sst2": (glue("sentence", "", ["negative", "positive"]), HIDDEN, {}),
    "imdb": ({"text": TEXT, "label": ClassLabel(names=["neg", "pos"])}, ("train", "test", "-unsupervised"), {}),
    "rotten_tomatoes": ({"text": TEXT, "label": ClassLabel(names=["neg", "pos"])}, USUAL, {}),
    "sick": (
        {
            "id": TEXT, "sentence_A": TEXT, "sentence_B": TEXT, "label": ClassLabel(names=NLI),
            "relatedness_score": Value("float32"), "entailment_AB": TEXT, "sentence_A_original": TEXT,
        }, USUAL, {},
    ),
    "snli": ({"premise": TEXT, "hypothesis": TEXT, "label": ClassLabel(names=NLI)}, USUAL, {"label": [0, 1, 2, -1]}),
    "mnli": (
        glue("premise", "hypothesis", NLI),
        ("train", "validation_matched", "validation_mismatched", "-test_matched", "-test_mismatched"), {},
    ),
    "cb": (glue("premise", "hypothesis", ["entailment", "contradiction", "neutral"]), HIDDEN, {}),
    "rte": (glue("sentence1", "sentence2", ["entailment", "not_entailment"]), HIDDEN, {}),
    "qnli": (glue("question", "sentence", ["entailment", "not_entailment"]), HIDDEN, {}),
    "qqp": (glue("question1", "question2", ["not_duplicate", "duplicate"]), HIDDEN, {}),
    "mrpc": (glue("sentence1", "sentence2", ["not_equivalent", "equivalent"]), USUAL, {}),
    "conll04": (
        {"entities": List(SPAN), "tokens": List(TEXT), "relations": List({"type": TEXT}), "orig_id": NUMBER}, USUAL,
        {
            "tokens": [["Ann", "Lee", "in", "New", "York"]],
            "entities": [
                [{"type": "Peop", "start": 0, "end": 2}, {"type": "Loc", "start": 3, "end": 5}],
                [{"type": "Org", "start": 0, "end": 2}, {"type": "Other", "start": 3, "end": 5}],
            ],
        },
    ),
    "broad_twitter": (
        {"tokens": List(TEXT), "tags": List(Value("int64"))}, USUAL,
        {"tokens": [["Ann", "Lee", "of", "UN"]], "tags": [[2, 5, 6, 1], [0, 3, 6, 1], [1, 4, 6, 6]]},
    ),
    "commonsense_qa": (
        {"id": TEXT, "question": TEXT, "question_concept": TEXT, "choices": {"label": List(TEXT), "text": List(TEXT)},
         "answerKey": TEXT}, HIDDEN, {"answerKey": ["C", "A"]},
    ),
    "social_iqa": (
        {**dict.fromkeys(("context", "question", "answerA", "answerB", "answerC", "label"), TEXT)},
        ("train", "validation"), {"label": ["3", "1"]},
    ),
    "e2e_nlg": (
        {"meaning_representation": TEXT, "human_reference": TEXT}, USUAL,
        {"meaning_representation": ["name[A]", "name[B]"]},
    ),
    "dart": (
        {"tripleset": List(List(TEXT)), "subtree_was_extended": Value("bool"),
         "annotations": {"source": List(TEXT), "text": List(TEXT)}},
        USUAL, {"tripleset": [[["Mars Hill", "JOINED", "1973"], ["Mars Hill", "LOCATION", "NC"]]],
                "subtree_was_extended": [True]},
    ),
    "webnlg": (
        {"gem_id": TEXT, "input": List(TEXT), "target": TEXT, "references": List(TEXT), "category": TEXT}, USUAL,
        {"input": [["A | r | B", "B | q | C"]], "references": [[], ["one", "two"]]},
    ),
    "samsum": ({"id": TEXT, "dialogue": TEXT, "summary": TEXT}, USUAL, {}),
    "xsum": ({"document": TEXT, "summary": TEXT, "id": TEXT}, USUAL, {}),
    "multi_news": ({"document": TEXT, "summary": TEXT}, USUAL, {}),
    "wmt16_en_ro": ({"translation": {"ro": TEXT, "en": TEXT}}, USUAL, {}),
    "nq_open": ({"question": TEXT, "answer": List(TEXT)}, ("train", "validation"), {}),
    "imdb_text": ({"text": TEXT, "label": ClassLabel(names=["neg", "pos"])}, ("train", "test", "-unsupervised"), {}),
    "wikitext2": ({"text": TEXT}, USUAL, {}),
}  # fmt: skip
"""Task -> what its data set on the hub holds: features, splits (with a minus: labels hidden), values that matter."""


def on_hub(name: str) -> tuple[DatasetDict, int]:
    """The data set of a task as the hub has it, with a few made-up rows; its layout's held-out rows fit in them."""
    features, splits, values = HUB[name]
    splits_by_name = {}
    for split in splits:
        rows = [words(features, i) for i in range(12)]
        for column, column_values in values.items():
            for i, row in enumerate(rows):
                row[column] = column_values[i % len(column_values)]
        if split.startswith("-"):
            for row in rows:
                row |= {"label": -1} if "label" in row else {"answerKey": ""}
        splits_by_name[split.lstrip("-")] = Dataset.from_list(rows, Features(features))
    return DatasetDict(splits_by_name), len(splits)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """A hub with the data sets of all tasks, at the one place where it is asked; what it was asked for."""
    requests: list[tuple[Any, ...]] = []
    by_source = {task.hub.source: name for name, task in TASKS.items() if task.hub}

    def load_dataset(path: str, part: str | None = None, **options: Any) -> DatasetDict:
        requests.append((path, part, options))
        files = options.get("data_files")
        if files is None:
            source = path + (f"@{options['revision']}" if options["revision"] else "") + (f":{part}" if part else "")
            return on_hub(by_source[source])[0]
        folder = {file.removeprefix("hf://datasets/") for file in files.values()}
        source = next(s for s in by_source if all(file.startswith(f"{s}/") for file in folder))
        datasets = on_hub(by_source[source])[0]
        return DatasetDict({split: datasets[split] for split in files})

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    monkeypatch.setattr(loading, "why_not_on_hub", lambda name, kind: "")
    return requests


def read(name: str) -> loading.TaskData:
    task, where = find_task(name, None)
    assert isinstance(where, HubLayout)
    return loading.load_data(where.source, kind=task.kind, layout=where)


def shape(value: Any) -> Any:
    """The types of a value; of a list, of what it holds."""
    return [shape(value[0])] if isinstance(value, list) else type(value).__name__


def test_every_task_with_a_hub_id_is_here() -> None:
    assert set(HUB) == {name for name, task in TASKS.items() if task.hub}


@pytest.mark.filterwarnings("ignore:.*have no label")
@pytest.mark.parametrize("name", HUB)
@pytest.mark.sample(12)
def test_the_hub_gives_the_rows_of_a_folder(name: str, hub: list[Any], shared: Path) -> None:
    """All three splits, the roles and types of the folder's rows, labels of the same names, every label in words."""
    task, got = TASKS[name], read(name)
    assert set(got.splits) == {"train", "validation", "test"} and all(len(rows) for rows in got.splits.values())
    for split, rows in got.splits.items():
        if "id" in HUB[name][0]:  # the hub's own ids
            assert len(set(rows["id"])) == len(rows) and set(rows["id"]) <= {f"id {i}" for i in range(12)}, split
        else:
            assert rows["id"][:] == [f"{split}-{i + 1}" for i in range(len(rows))]
    if task.words:
        assert set(got.labels) == set(task.words)
    folder = shared / "data" / task.folder
    if folder.is_dir() and (folder / "train.jsonl.gz").is_file():
        want = loading.load_data(str(folder), task.columns, kind=task.kind, max_rows={"train": 500})
        assert set(got.labels) == set(want.labels)
        for split, rows in got.splits.items():
            assert shape(rows[0]) == shape(want.splits[split][0]), split


@pytest.mark.parametrize(
    ("name", "split", "row"),
    [
        ("rte", "test", {"text": "sentence1 0", "pair": "sentence2 0", "label": 0}),
        ("conll04", "test", {"tokens": ["Ann", "Lee", "in", "New", "York"], "tags": "B-PER I-PER O B-LOC I-LOC"}),
        ("broad_twitter", "train", {"tokens": ["Ann", "Lee", "of", "UN"], "tags": "B-PER I-PER O B-ORG"}),
        ("commonsense_qa", "test",
         {"question": "question 0", "choices": ["text0 0", "text1 0", "text2 0"], "answer": 2}),
        ("social_iqa", "test",
         {"context": "context 0", "question": "question 0", "choices": ["answerA 0", "answerB 0", "answerC 0"],
          "answer": 2}),
        ("e2e_nlg", "train", {"source": "name[A]", "targets": ["human_reference 0"]}),
        ("e2e_nlg", "test", {"source": "name[A]", "targets": [f"human_reference {i}" for i in range(0, 12, 2)]}),
        ("dart", "train",
         {"source": "Mars Hill : JOINED : 1973 | Mars Hill : LOCATION : NC",
          "targets": ["text0 0", "text1 0", "text2 0"]}),
        ("webnlg", "train", {"source": "A : r : B | B : q : C", "targets": ["target 0"]}),
        ("wmt16_en_ro", "test", {"source": "en 0", "targets": ["ro 0"]}),
        ("nq_open", "test", {"source": "question 0", "targets": ["answer0 0", "answer1 0", "answer2 0"]}),
    ],
)  # fmt: skip
def test_a_row(name: str, split: str, row: dict[str, Any], hub: list[Any]) -> None:
    got = read(name)
    first = {key: value for key, value in got.splits[split][0].items() if key != "id"}
    if "tags" in first:
        first["tags"] = " ".join(got.labels[i] for i in first["tags"])
    assert first == row


def test_what_is_asked_of_the_hub(hub: list[Any]) -> None:
    for name in ("mnli", "sick", "broad_twitter"):
        read(name)
    sick = "hf://datasets/RobZamp/sick@refs/convert/parquet/default"
    assert hub[0] == ("nyu-mll/glue", "mnli", {"revision": None})
    assert hub[1] == (
        "parquet", None, {"data_files": {s: f"{sick}/{s}/*.parquet" for s in ("train", "validation", "test")}},
    )  # fmt: skip
    assert hub[2][0] == "json" and hub[2][2]["data_files"]["validation"] == "hf://datasets/tner/btc/dataset/valid.json"


def test_held_out_rows_are_no_training_rows_and_always_the_same(hub: list[Any]) -> None:
    got, again = read("rte"), read("rte")
    texts = [set(got.splits[split]["text"]) for split in ("train", "validation")]
    assert not texts[0] & texts[1] and texts[0] | texts[1] == {f"sentence1 {i}" for i in range(12)}
    assert got.fingerprint == again.fingerprint


def test_rows_without_a_label_are_left_out_and_said(hub: list[Any]) -> None:
    with pytest.warns(
        UserWarning, match=r"3 of 12 rows of (train|validation|test) have no label \(-1\) and are left out"
    ):
        assert len(read("snli").splits["train"]) == 9


def test_a_layout_that_is_no_longer_true(hub: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeltuneError, match=r"has no validation_matchd split; it has: train, validation_matched"):
        loading.load_data(
            "nyu-mll/glue:mnli", layout=HubLayout("nyu-mll/glue:mnli", splits={"test": "validation_matchd"})
        )
    monkeypatch.setitem(HUB, "wmt16_en_ro", ({"en": TEXT, "ro": TEXT}, USUAL, {}))
    with pytest.raises(DeltuneError, match=r"train row 1 is not laid out as it was.*Its columns: en, ro. Give data"):
        read("wmt16_en_ro")


def test_nothing_is_held_out_of_nothing() -> None:
    files: dict[str, Any] = {}
    apply_layout(files, HubLayout("a/b", held_out=5), [])
    assert files == {}


def test_a_run_of_a_task_of_the_hub(hub: list[Any], tmp_path: Path) -> None:
    """`deltune train --task cb` without a data root: trained, scored on all splits, and in use again."""
    spec = tiny.spec(tmp_path, data=None, task="cb", method="head", epochs=1)
    metrics = train(spec, tmp_path / "run", progress=False)
    assert {"validation", "test"} <= set(metrics.scores)
    recorded = json.loads((tmp_path / "run" / "environment.json").read_text())["data"]
    assert recorded["source"] == "aps/super_glue:cb" and recorded["rows"] == {"train": 6, "validation": 6, "test": 12}
    assert load_run(tmp_path / "run").labels == ("entailment", "contradiction", "neutral")
