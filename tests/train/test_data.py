"""Reading data: every format and shape, the real data sets, and one clear error for everything that can be wrong."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas
import pytest
from typer.testing import CliRunner

import tiny
from deltune.cli.app import app
from deltune.errors import DeltuneError
from deltune.train.config import RunConfig
from deltune.train.data import loading, readers
from deltune.train.overview import data_notes, overview
from deltune.train.run import log_data

ROWS = [
    {"text": "Where is my parcel?", "label": "delivery"},
    {"text": "I want my money back.", "label": "refund"},
    {"text": "It says delivered, but nothing came.", "label": "delivery"},
    {"text": "Please cancel and refund “all” of it,\nüber and out.", "label": "refund"},
]


def lines(rows: Sequence[object]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def write(folder: Path, **texts: str | Sequence[object]) -> str:
    """Files by name (train_jsonl -> train.jsonl), each a text or a list of rows."""
    for name, text in texts.items():
        stem, _, suffix = name.partition("_")
        (folder / f"{stem}.{suffix}").write_text(text if isinstance(text, str) else lines(text), encoding="utf-8")
    return str(folder)


def message(source: str, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(DeltuneError) as caught:
        loading.load_data(source, *args, **kwargs)
    return str(caught.value)


BLANK: dict[str, tuple[list[dict[str, Any]], list[str]]] = {
    "a text": (
        [{"text": text, "label": "ab"[i % 2]} for i, text in enumerate(["x", "", "y", " \n", "z"])],
        ["2 rows of train without text: train-2, train-4"],
    ),
    "a pair, with keys": (
        [{"id": f"k{i}", "text": "", "other": f"a b {i}"[i:], "label": "ab"[i % 2]} for i in range(6)],
        ["6 rows of train without text: k0, k1, k2, k3, k4, k5", "1 row of train without pair: k5"],
    ),
    "tokens": (
        [{"tokens": tokens, "tags": ["B-X", "O"][: len(tokens)]} for tokens in (["Ada", ""], ["", " "], ["it"])],
        ["1 row of train without tokens: train-2"],
    ),
    "a target": (
        [{"source": f"s{i}", "targets": targets} for i, targets in enumerate(["t", "", ["", "t"], [""]])],
        ["2 rows of train without targets: train-2, train-4"],
    ),
    "many": (
        [{"text": "", "label": "ab"[i % 2]} for i in range(12)],
        ["12 rows of train without text: " + ", ".join(f"train-{i}" for i in range(1, 11)) + " and 2 more"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BLANK)
def test_empty_texts_are_named(case: str, tmp_path: Path) -> None:
    rows, expected = BLANK[case]
    columns = {"text": "text", "pair": "other", "label": "label"} if "pair" in case else None
    columns = {"text": "text", "label": "label"} if case == "many" else columns
    notes = data_notes(loading.load_data(write(tmp_path, train_jsonl=rows), columns))
    assert [note for note in notes if "without" in note] == expected


@pytest.mark.parametrize(
    ("labels", "doubts"),
    [
        (["neg", "Neg ", "pos"], ["the labels 'Neg ' and 'neg' differ in case or blanks alone, and each is a class"]),
        (["0", "1", "neg", "pos"], ["some labels are numbers and others words, such as '0' and 'neg'"]),
        (["neg", "pos", "nan"], ["the label 'nan' is a class; leave rows out that have no label"]),
        (["a b", "A  b", "N/A"], ["'A  b' and 'a b' differ", "the label 'N/A' is a class"]),
        (["neg", "pos", "page 2"], []),
        (["1", "2", "3+"], []),
    ],
)
def test_labels_that_may_be_mistakes_are_named(labels: list[str], doubts: list[str], tmp_path: Path) -> None:
    rows = [{"text": f"some words {i}", "label": label} for i, label in enumerate(2 * labels)]
    notes = [n for n in data_notes(loading.load_data(write(tmp_path, train_jsonl=rows))) if "label" in n]
    assert len(notes) == len(doubts) and all(doubt in note for doubt, note in zip(doubts, notes, strict=True))


def test_a_run_says_what_deltune_data_says(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [*ROWS, ROWS[0], {"text": ROWS[0]["text"], "label": "refund"}, {"text": "", "label": "refund"}]
    config = RunConfig.from_flat(model="minilm", data=write(tmp_path, train_jsonl=rows), method="head")
    notes = overview(config).notes
    assert [note.partition(" in train")[0] for note in notes[1:]] == ["1 repeated row", "3 rows"]
    caplog.set_level("INFO")
    log_data(config.data, loading.load_data(str(tmp_path)), "classification")
    assert [f"data: {note}" for note in notes] == [m for m in caplog.messages if m.startswith("data: ")]


# --- what is read -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "rows", "columns", "labels"),
    [
        ("sst2", (67349, 872, 1821), "sentence", "negative positive"),
        ("imdb", (8000, 1000, 5000), "text", "negative positive"),
        ("sick", (4500, 500, 4927), "premise hypothesis", "entailment neutral contradiction"),
        ("snli", (8842, 1000, 9824), "premise hypothesis", "entailment neutral contradiction"),
        ("mnli", (6969, 1000, 2500), "premise hypothesis", "entailment neutral contradiction"),
        ("rte", (2240, 250, 277), "premise hypothesis", "entailment not_entailment"),
        ("cb", (200, 50, 56), "premise hypothesis", "entailment neutral contradiction"),
        ("qnli", (3963, 500, 1000), "question sentence", "entailment not_entailment"),
        ("qqp", (6600, 1000, 2000), "question1 question2", "not_duplicate duplicate"),
    ],
)
@pytest.mark.sample(5)
def test_real_data(shared: Path, name: str, rows: tuple[int, ...], columns: str, labels: str) -> None:
    got = loading.load_data(str(shared / "data" / name))
    assert tuple(len(got.splits[s]) for s in ("train", "validation", "test")) == rows
    assert got.labels == tuple(labels.split())
    assert got.columns == {**dict(zip(("text", "pair"), columns.split(), strict=False)), "label": "label"}
    assert set(got.splits["train"]["label"]) == set(range(len(got.labels)))
    with gzip.open(shared / "data" / name / "test.jsonl.gz", "rt", encoding="utf-8") as stream:
        last = [json.loads(line) for line in stream][-1]
    want = {role: last[column] for role, column in got.columns.items()}
    assert got.splits["test"][-1] == {"id": f"test-{rows[2]}", **want}


OTHERS = {
    "conll04": ("tagging", "tokens=tokens tags=tags", 9),
    "broad_twitter": ("tagging", "tokens=tokens tags=tags", 7),
    "commonsense_qa": ("choice", "question=question choices=choices answer=answer", 0),
    "social_iqa": ("choice", "context=context question=question choices=choices answer=answer", 0),
    "e2e_nlg": ("generation", "source=source targets=targets", 0),
    "dart": ("generation", "source=source targets=targets", 0),
    "samsum": ("generation", "source=dialogue targets=summary", 0),
    "xsum": ("generation", "source=document targets=summary", 0),
    "wmt16_en_ro": ("generation", "source=source targets=targets", 0),
    "g2p_us_to_gb": ("generation", "source=source targets=targets", 0),
    "nq_open": ("generation", "source=question targets=answers", 0),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.sample(6)
def test_real_data_of_other_kinds(shared: Path, name: str) -> None:
    """The kind of task, its columns and labels are found without being told; every row is as its file has it."""
    kind, columns, labels = OTHERS[name]
    got = loading.load_data(str(shared / "data" / name))
    assert (got.kind, len(got.labels)) == (kind, labels)
    assert got.columns == dict(pair.split("=") for pair in columns.split())
    with gzip.open(shared / "data" / name / "test.jsonl.gz", "rt", encoding="utf-8") as stream:
        last = [json.loads(line) for line in stream][-1]
    row = got.splits["test"][-1]
    for role, column in got.columns.items():
        value = last[column]
        if role == "tags":
            assert [got.labels[i] for i in row[role]] == [t if isinstance(t, str) else got.labels[t] for t in value]
        else:
            assert row[role] == ([value] if role == "targets" and isinstance(value, str) else value)


def test_two_texts_and_a_label_are_classification(tmp_path: Path) -> None:
    rows = [{"prompt": f"p {i}", "output": f"o {i}", "label": i % 2} for i in range(20)]
    got = loading.load_data(write(tmp_path, train_jsonl=rows))
    assert (got.kind, got.columns) == ("classification", {"text": "prompt", "pair": "output", "label": "label"})


def test_a_key_is_no_text(tmp_path: Path) -> None:
    rows = [{"key": f"r{i}", "review": f"it was {i} times good", "label": i % 2} for i in range(20)]
    assert loading.load_data(write(tmp_path, train_jsonl=rows)).columns == {"text": "review", "label": "label"}


def test_running_text_is_asked_for(shared: Path) -> None:
    source = str(shared / "data" / "imdb_text")
    assert "If it is running text, give --task language. " in message(source)
    assert loading.load_data(source, kind="language").columns == {"text": "text"}
    assert "no train file" in message(str(shared / "data" / "wikitext2_eval"))


def as_csv(path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as stream:
        table = csv.DictWriter(stream, ["text", "label"])
        table.writeheader()
        table.writerows(ROWS)


def as_parquet(path: Path) -> None:
    from datasets import Dataset

    Dataset.from_list(ROWS).to_parquet(path)


def as_gzip(path: Path) -> None:
    path.write_bytes(gzip.compress(lines(ROWS).encode()))


FORMATS = {
    "jsonl": lambda path: path.write_text(lines(ROWS)),
    "json": lambda path: path.write_text("\ufeff" + lines(ROWS) + "\n\n", encoding="utf-8"),
    "jsonl.gz": as_gzip,
    "csv": as_csv,
    "parquet": as_parquet,
}


@pytest.mark.parametrize("suffix", FORMATS)
def test_formats_give_the_same(tmp_path: Path, suffix: str) -> None:
    (tmp_path / "a").mkdir()
    want = loading.load_data(write(tmp_path / "a", train_jsonl=ROWS))
    FORMATS[suffix](tmp_path / f"train.{suffix}")
    got = loading.load_data(str(tmp_path))
    assert got.labels == ("delivery", "refund") and list(got.splits) == ["train"]
    assert got.splits["train"]["text"][:] == [row["text"] for row in ROWS]
    assert got.splits["train"]["label"][:] == [0, 1, 0, 1]
    assert got.fingerprint == want.fingerprint


@pytest.mark.parametrize("stem", ["validation", "valid", "dev"])
def test_names_of_validation(tmp_path: Path, stem: str) -> None:
    assert list(
        loading.load_data(write(tmp_path, train_jsonl=ROWS, **{f"{stem}_csv": "text,label\nHello,refund\n"})).splits
    ) == [
        "train",
        "validation",
    ]


@pytest.mark.parametrize(
    ("rows", "columns", "expected"),
    [
        ([{"q": "a b", "a": "c", "Intent": "x"}, {"q": "d", "a": "e", "Intent": "y"}], None, "q a Intent"),
        ([{"label": 1, "s": "a b", "score": 4.5, "pair_id": 3}, {"label": 0, "s": "c", "score": 1.0}], None, "s label"),
        ([{"x": "a", "y": "b", "z": "c", "k": "u"}, {"x": "d", "y": "e", "z": "f", "k": "v"}], ["y", "k"], "y k"),
        (
            [{"x": "a", "y": "b", "z": "c", "k": "u"}, {"x": "d", "y": "e", "z": "f", "k": "v"}],
            ["z", "x", "k"],
            "z x k",
        ),
        (
            [{"x": "a", "y": "b", "z": "c", "k": "u"}, {"x": "d", "y": "e", "z": "f", "k": "v"}],
            {"label": "k", "pair": "x", "text": "z"},
            "z x k",
        ),
        ([{"id": f"n{i}", "text": f"t{i}", "label": i % 2, "genre": "fiction"} for i in range(50)], None, "text label"),
        ([{"text": f"t{i}", "label": i % 2, "category": f"c{i}"} for i in range(5)], None, "text label"),
    ],
)
def test_columns(tmp_path: Path, rows: list[dict], columns: Any, expected: str) -> None:
    assert list(loading.load_data(write(tmp_path, train_jsonl=rows), columns).columns.values()) == expected.split()


def test_csv_columns_of_numbers_are_not_text(tmp_path: Path) -> None:
    got = loading.load_data(write(tmp_path, train_csv="n,text,score,label\n1,a,4.5,10\n2,b,1.0,9\n3,c,,10\n"))
    assert got.columns == {"text": "text", "label": "label"}
    assert got.labels == ("9", "10") and got.splits["train"]["label"][:] == [1, 0, 1]


CONLL = "-DOCSTART- O\n\n# id 1\nAda B-PER\nlives O\n\n\nin O\nNew\u00a0York B-LOC\n"


@pytest.mark.parametrize("text", [CONLL.replace("\u00a0", ""), CONLL.replace("# id 1\n", "").replace(" ", "\t")])
def test_conll(tmp_path: Path, text: str) -> None:
    """Tokens and tags a line, with blanks or tabs, and with columns between; the rows are those of JSON lines."""
    got = loading.load_data(write(tmp_path, train_conll=text))
    assert got.kind == "tagging" and got.labels == ("O", "B-LOC", "B-PER")
    assert [len(tokens) for tokens in got.splits["train"]["tokens"]] == [2, 2]
    assert got.splits["train"]["tags"][:] == [[2, 0], [0, 1]]
    (tmp_path / "wide.bio").write_text("Ada NNP x B-PER\nlives VBZ y O\n")
    (tmp_path / "tokens.conll").write_text("Ada\nlives\n")
    (tmp_path / "hash.bio").write_text("# O\ntag O\n# a comment of some words\n# B-X\n")
    assert list(readers.read_rows(tmp_path / "hash.bio").rows) == [
        (1, {"tokens": ["#", "tag", "#"], "tags": ["O", "O", "B-X"]})
    ]
    rows = [list(readers.read_rows(tmp_path / name).rows) for name in ("wide.bio", "tokens.conll")]
    between = {"column 2": ["NNP", "VBZ"], "column 3": ["x", "y"]}
    both = {"tokens": ["Ada", "lives"], **between, "tags": ["B-PER", "O"]}
    assert rows == [[(1, both)], [(1, {"tokens": ["Ada", "lives"]})]]


@pytest.mark.parametrize(
    ("values", "labels", "meta", "expected", "ids"),
    [
        (["b", "a", "b"], None, None, ("a", "b"), [1, 0, 1]),
        (["b", "a", "b"], ["b", "c", "a"], None, ("b", "c", "a"), [0, 2, 0]),
        ([2, 10, 2], None, None, ("2", "10"), [0, 1, 0]),
        ([True, False], None, None, ("False", "True"), [1, 0]),
        ([0, 1], None, ["no", "yes"], ("no", "yes"), [0, 1]),
        (["1", "0"], None, ["no", "yes"], ("no", "yes"), [1, 0]),
        (["yes", "no"], None, ["no", "yes"], ("no", "yes"), [1, 0]),
        ([0, 1], ["n", "y"], ["no", "yes"], ("n", "y"), [0, 1]),
        ([1, 2], ["2", "1"], None, ("2", "1"), [1, 0]),  # names that are numbers are names, not indices
    ],
)
def test_labels(
    tmp_path: Path, values: list, labels: list | None, meta: list | None, expected: tuple[str, ...], ids: list[int]
) -> None:
    source = write(tmp_path, train_jsonl=[{"text": f"t {i}", "label": v} for i, v in enumerate(values)])
    if meta:
        write(tmp_path, meta_json=json.dumps({"fields": "text, label (index)", "label_names": meta}))
    got = loading.load_data(source, labels=labels)
    assert (got.labels, got.splits["train"]["label"][:]) == (expected, ids)


def test_ids(tmp_path: Path) -> None:
    rows = [{"id": f"q{i}", **row} for i, row in enumerate(ROWS)]
    got = loading.load_data(write(tmp_path, train_jsonl=rows, test_jsonl=[{**row, "id": 1} for row in rows]))
    assert got.splits["train"]["id"][:] == ["q0", "q1", "q2", "q3"]
    assert got.splits["test"]["id"][:] == ["test-1", "test-2", "test-3", "test-4"]  # the file's own are not distinct


def test_sample_of_train(tmp_path: Path) -> None:
    rows = [{"text": f"text {i}", "label": i % 2} for i in range(40)]
    source = write(tmp_path, train_jsonl=rows, test_jsonl=rows)
    one, same, other = (loading.load_data(source, max_rows={"train": 10}, seed=s) for s in (1, 1, 2))
    assert len(one.splits["train"]) == 10 and len(one.splits["test"]) == 40
    assert one.splits["train"][:] == same.splits["train"][:] and one.fingerprint == same.fingerprint
    assert one.splits["train"][:] != other.splits["train"][:] and one.fingerprint != other.fingerprint
    assert loading.load_data(source, max_rows={"train": 99}).fingerprint == loading.load_data(source).fingerprint
    for row in one.splits["train"]:  # ids are those of the whole file
        assert row["id"] == f"train-{int(row['text'].split()[1]) + 1}"


def test_fingerprint_follows_the_content(tmp_path: Path) -> None:
    before = loading.load_data(write(tmp_path, train_jsonl=ROWS)).fingerprint
    assert loading.load_data(str(tmp_path), labels=["refund", "delivery"]).fingerprint != before
    assert loading.load_data(write(tmp_path, test_jsonl=ROWS)).fingerprint != before


def test_hidden_labels_leave_the_split_out(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"every label in test\.jsonl is -1"):
        got = loading.load_data(write(tmp_path, train_jsonl=ROWS, test_jsonl=[{"text": "a", "label": -1}]))
    assert list(got.splits) == ["train"]


def test_hub_data_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """The conversion of what `load_dataset` gives; the download itself needs a network."""
    from datasets import ClassLabel, Dataset, DatasetDict, Features, Value

    features = Features({"idx": Value("int32"), "sentence": Value("string"), "label": ClassLabel(names=["no", "yes"])})
    table = Dataset.from_dict({"idx": [0, 1], "sentence": ["ay", "nay"], "label": [1, 0]}, features)
    requests = []

    def load_dataset(*args: object, revision: str | None) -> DatasetDict:
        requests.append((*args, revision))
        return DatasetDict(train=table, dev=table, other=table)

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    monkeypatch.setattr(loading, "why_not_on_hub", lambda name, kind: "")
    got = loading.load_data("some/set:part")
    loading.load_data("some/set@refs/pr/4")
    assert requests == [("some/set", "part", None), ("some/set", None, "refs/pr/4")]
    assert got.labels == ("no", "yes") and got.columns == {"text": "sentence", "label": "label"}
    assert {split: d["label"][:] for split, d in got.splits.items()} == {"train": [1, 0], "validation": [1, 0]}


# --- what could be taken for something else ---------------------------------------------------------------------------

ALPACA = [{"instruction": f"Translate {i}", "input": f"red {i}", "output": f"rot {i}"} for i in range(12)]
FLAT = "n,token,label\n" + "1,Ada,B-PER\n1,lives,O\n2,Rome,B-LOC\n" * 4
QUESTIONS = [{"question": f"q {i}", "options": ["a", "b"], "label": "AB"[i % 2]} for i in range(6)]
TOPICS = [{"text": f"t {i}", "sentiment": "ab"[i % 2], "topic": "cd"[i % 2]} for i in range(6)]
COMMAS = "text,labels\n" + "Ada in Rome,B-PER O B-LOC\nhi,O\n" * 4
LISTS = "text,labels\n" + "Ada in Rome,\"['B-PER', 'O', 'B-LOC']\"\nhi,['O']\n" * 4
DOUBTS: dict[str, tuple[dict[str, Any], str, dict[str, Any], str]] = {
    "instructions": (
        {"train_jsonl": [{"instruction": r["instruction"], "response": r["output"]} for r in ALPACA]},
        "--task generation --columns source=…,targets=…",
        {"columns": {"source": "instruction", "targets": "response"}}, "generation",
    ),
    "a context": (
        {"train_jsonl": [{"context": "a b", "question": f"q {i}", "answers": ["x"]} for i in range(4)]},
        "context would not be read", {"columns": {"source": "question", "targets": "answers"}}, "generation",
    ),
    "a title": (
        {"train_jsonl": [{"document": f"a{i}", "summary": f"b{i}", "title": f"t of five words {i}"} for i in range(4)]},
        "title would not be read", {"columns": {"source": "document", "targets": "summary"}}, "generation",
    ),
    "two summaries": (
        {"train_jsonl": [{"document": f"a {i}", "summary": f"b{i}", "highlights": f"t{i}"} for i in range(4)]},
        "highlights would not be read", {"columns": {"source": "document", "targets": "summary"}}, "generation",
    ),
    "options": (
        {"train_jsonl": QUESTIONS},
        "options would not be read", {"columns": ["question", "label"]}, "classification",
    ),
    "a letter for an index": (
        {"train_jsonl": [{"question": "q", "choices": ["a", "b"], "answer": "B"}] * 2},
        "'answer' is not the index of a choice but 'B'", {}, "",
    ),
    "two labels": (
        {"train_jsonl": TOPICS},
        "topic would not be read", {"columns": ["text", "topic"]}, "classification",
    ),
    "a word a row": (
        {"train_csv": FLAT},
        "--columns sentence=…,tokens=token,tags=label; if", {"kind": "classification"}, "classification",
    ),
    "a word a row, in order": (
        {"train_csv": FLAT},
        "such as 'O', 'B-LOC', 'B-PER'", {"columns": {"text": "token", "label": "label"}}, "classification",
    ),
    "a word in each row of a tagging": (
        {"train_csv": "n,tokens,tags\n1,Ada,B-PER\n1,lives,O\n2,Rome,B-LOC\n"},
        "one word. Say which column numbers the sentences: --columns sentence=…,tokens=tokens,tags=tags",
        {"columns": {"sentence": "n", "tokens": "tokens", "tags": "tags"}}, "tagging",
    ),
    "several labels in one text": (
        {"train_csv": "text,label\n" + "one,a\ntwo,b\nboth,a|b\n" * 4},
        "--task multilabel --label-separator '|'", {"kind": "multilabel", "label_separator": "|"}, "multilabel",
    ),
    "a separator that is not named": (
        {"train_jsonl": [{"text": f"t {i}", "labels": ["a", "b"] if i else "a; b"} for i in range(4)]},
        "--label-separator ';'", {"label_separator": ";", "kind": "multilabel"}, "multilabel",
    ),
    "a word in its context": (
        {"train_csv": "sentence,word,label\n" + "".join(f"my bank has a shop {i},bank,{i % 2}\n" for i in range(9))},
        "a text and a word of it are to be classified, --columns text=sentence,pair=word,label=label",
        {"columns": {"text": "sentence", "pair": "word", "label": "label"}}, "classification",
    ),
    "a word of each document": (
        {"train_csv": "doc_id,word,label\n" + "".join(f"{i},w{i},{'ny'[i % 2]}\n" for i in range(9))},
        "say what numbers the sentences: --columns sentence=…,tokens=word,tags=label", {"kind": "tagging", "columns": {
            "sentence": "doc_id", "tokens": "word", "tags": "label"}}, "tagging",
    ),
    "a score beside flags": (
        {"train_csv": "text,score,late,rude\na b,0.5,1,0\nc d,1.5,0,1\n"},
        "multilabel, and score would not be read",
        {"columns": {"text": "text", "score": "score"}}, "regression",
    ),
    "stars beside flags": (
        {"train_csv": "text,stars,late,rude\na b,5,1,0\nc d,2,0,1\n"},
        "and stars would not be read", {"columns": {"text": "text", "labels": "late+rude"}}, "multilabel",
    ),
    "numbers but one": (
        {"train_csv": "text,label\n" + "".join(f"t {i},{i / 8 or 'n/a'}\n" for i in range(16))},
        "94% of the column 'label' of train.csv are numbers, and others are not, such as 'n/a'",
        {"kind": "classification"}, "classification",
    ),
    "large numbers": ({"train_csv": "text,score\na,100.5\nb,90000\n"}, "divide them by 100000", {}, ""),
    "tags in a text": (
        {"train_csv": COMMAS},
        "tags of words in its column 'labels'", {"kind": "classification"}, "classification",
    ),
    "tags as Python writes lists": ({"train_csv": LISTS}, "is no list in JSON; pandas writes one by", {}, ""),
    "tags as JSON writes lists": (
        {"train_csv": LISTS.replace("'", '""').replace('[""O""]', '"[""O""]"')},
        "tags of words in its column 'labels'", {"kind": "tagging", "columns": ["text", "labels"]}, "tagging",
    ),
    "spans that overlap": (
        {"train_jsonl": [{"text": "Ada Byron", "entities": [[0, 9, "PER"], [4, 9, "PER"]]}]},
        "line 1: the span 4 to 9 (PER) overlaps the span before it", {}, "",
    ),
    "a sentence in two places": (
        {"train_csv": "sentence_id,token,tag\n1,a,O\n2,b,O\n1,c,O\n"}, "keep its words together", {}, "",
    ),
    "a tag too few": (
        {"train_jsonl": [{"tokens": ["a", "b"], "tags": ["O"]}]}, "2 tokens and 1 tags; give one tag for each", {}, "",
    ),
    "answers as labels": (
        {"train_jsonl": [{"text": f"q {i}", "target": f"an answer {i}"} for i in range(12)]},
        "--task generation --columns source=text,targets=target",
        {"kind": "generation", "columns": {"source": "text", "targets": "target"}}, "generation",
    ),
    "CoNLL as text": (
        {"train_txt": "-DOCSTART- -X- O\n\nAda NNP B-PER\nlives VB O\n"},
        "rename it to .conll", {"kind": "language"}, "language",
    ),
    "a table as text": ({"train_txt": "good\tpos\nbad\tneg\n"}, "rename it to .tsv", {"kind": "language"}, "language"),
    "commas as text": ({"train_txt": "text,label\na b,x\n"}, "rename it to .csv", {"kind": "language"}, "language"),
    "JSON as text": ({"train_txt": '{"text": "a"}\n{"text": "b"}\n'}, ".jsonl", {"kind": "language"}, "language"),
    "words as text": ({"train_txt": "Ada NOUN\nleft VERB\n"}, "rename it to .conll", {"kind": "language"}, "language"),
    "fastText": ({"train_txt": "__label__a b\n__label__b c\n"}, "fastText", {"kind": "language"}, "language"),
    "CoNLL-U": ({"train_conll": "1\tAda\tNOUN\n2\tgoes\tVERB\n"}, "the first column counts the tokens", {}, ""),
    "tags first": ({"train_conll": "B-PER Ada\nO lives\n"}, "the tags stand before the tokens", {}, ""),
    "two separators": ({"train_csv": "text;label,x\na b;x\n"}, "separated by ',' or ';'; put", {}, ""),
    "quotes in .tsv": ({"train_tsv": 'text\tlabel\n"he ""x"""\ta\n'}, "line 2: '\"he \"\"x\"\"\"' is quoted", {}, ""),
}  # fmt: skip
"""Files, what is said of them, and what is given to read them nevertheless with the kind of task that they then are."""


@pytest.mark.parametrize("case", DOUBTS)
def test_what_may_be_something_else_is_asked(tmp_path: Path, case: str) -> None:
    files, expected, options, kind = DOUBTS[case]
    source = write(tmp_path, **files)
    text = message(source)
    assert expected in text and len(text) < 1200
    if kind:
        assert loading.load_data(source, **options).kind == kind


@pytest.mark.parametrize("mark", [";", "\t", "|"])
def test_a_csv_has_the_separator_of_its_header(mark: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [("it costs 1,5; or more", "1.5"), ("a tab\t, a bar |", "0.5")]
    pandas.DataFrame(rows, columns=["text", "score"]).to_csv(tmp_path / "train.csv", sep=mark, index=False)
    with caplog.at_level("INFO", "deltune"):
        got = loading.load_data(str(tmp_path))
    split = got.splits["train"]
    assert got.kind == "regression" and split["text"][:] == [text for text, _ in rows]
    assert split["score"][:] == [float(score) for _, score in rows]
    assert f"separated by {mark!r}" in caplog.text


@pytest.mark.parametrize("first", ["sep=;\r\n", '"sep=;"\r\n', ""])
def test_a_file_of_excel_where_a_comma_is_decimal(first: str, tmp_path: Path) -> None:
    """Excel names the separator in a line before the header; pandas reads the rest."""
    table = pandas.DataFrame({"text": ['one; "two"', "three\r\nlines", "four"], "score": ["1,25", "-0,125", "2"]})
    rest = table.to_csv(sep=";", index=False, lineterminator="\r\n")
    (tmp_path / "train.csv").write_bytes(codecs.BOM_UTF8 + (first + rest).encode())
    data = loading.load_data(str(tmp_path))
    assert data.kind == "regression" and data.splits["train"]["text"][:] == [*table["text"]]
    assert data.splits["train"]["score"][:] == [*pandas.read_csv(io.StringIO(rest), sep=";", decimal=",")["score"]]
    assert data.notes == ("the numbers in 'score' have a decimal comma: 1,25 is 1.25",)
    (tmp_path / "train.csv").write_text(f"{first}text;score\na;1,5\nb;1,500\n")
    line = 3 + bool(first)
    assert f"line {line}: column 'score' is not a number (1.5 or 1,5; not 1,500) but '1,500'" in message(
        str(tmp_path), {"text": "text", "score": "score"}
    )


def test_a_mark_in_a_quoted_name_separates_nothing(tmp_path: Path) -> None:
    table = pandas.DataFrame(
        {"of two\nlines": [0, 1], "text": ["a; b", "c"], "label": ["x", "y"], "score, of 0; 1|2": [1, 0]}
    )
    for mark in ",;":
        table.to_csv(tmp_path / "train.csv", sep=mark, index=False)
        got = loading.load_data(str(tmp_path), {"text": "text", "label": "label"})
        assert got.splits["train"]["text"][:] == ["a; b", "c"], mark


def test_a_flag_may_never_be_set(tmp_path: Path) -> None:
    got = loading.load_data(write(tmp_path, train_csv="text,late,rude\na b,1,0\nc d,0,0\n"))
    assert (got.labels, got.splits["train"]["labels"][:]) == (("late", "rude"), [[0], []])


def test_columns_that_are_not_read_are_known(tmp_path: Path) -> None:
    rows = [{"text": f"t {i}", "label": "ab"[i % 2], "topic": "c", "id": i, "score": 0.5} for i in range(4)]
    source = write(tmp_path, train_jsonl=rows)
    assert loading.load_data(source).unread == ("topic", "score")
    assert loading.load_data(source, ["text", "label"]).unread == ()
    write(tmp_path, meta_json='{"fields": ["text", "label"]}')
    assert loading.load_data(source).unread == ()
    (tmp_path / "wide").mkdir()
    wide = loading.load_data(write(tmp_path / "wide", train_conll="Ada NNP B-PER\nlives VBZ O\n"))
    assert (wide.kind, wide.unread) == ("tagging", ("column 2",))
    parts = loading.load_data(wide.source, {"tokens": "tokens", "tags": "column 2"})
    assert parts.labels == ("NNP", "VBZ") and parts.tag_scheme == "plain"


def test_tabs(tmp_path: Path) -> None:
    """Every line is a row, and quotes are characters as any other."""
    got = loading.load_data(write(tmp_path, train_tsv='text\tlabel\nhe said "x", to\ta\n"foo" bar\tb\n"foo"\tb\n'))
    assert got.splits["train"]["text"][:] == ['he said "x", to', '"foo" bar', '"foo"'] and got.labels == ("a", "b")
    assert "train.tsv line 2: 3 fields, the header has 2" in message(
        write(tmp_path, train_tsv="text\tlabel\na\tb\tc\n")
    )


# --- tag schemes ------------------------------------------------------------------------------------------------------


def tagged(*rows: str) -> list[dict[str, list[str]]]:
    return [{"tokens": [f"w{i}" for i in range(len(row.split()))], "tags": row.split()} for row in rows]


TAGS = {
    "IOB1": (("I-A I-A O I-B", "O I-A B-A"), "O B-A I-A I-B"),
    "IOB2": (("B-A I-A O B-B", "O O"), "O B-A B-B I-A"),
    "BIOES": (("B-A I-A E-A O", "S-B O"), "O B-A E-A I-A S-B"),
    "BILOU": (("B-A L-A O", "U-B O"), "O B-A L-A U-B"),
    "plain": (("NOUN VERB", "DET NOUN"), "DET NOUN VERB"),
}


@pytest.mark.parametrize("scheme", TAGS)
def test_tags_have_a_scheme(tmp_path: Path, scheme: str) -> None:
    rows, labels = TAGS[scheme]
    source = write(tmp_path, train_jsonl=tagged(*rows), test_jsonl=tagged("O O") if scheme != "plain" else [])
    (tmp_path / "test.jsonl").unlink() if scheme == "plain" else None
    got = loading.load_data(source)
    assert (got.tag_scheme, got.labels, got.summary["tag_scheme"]) == (scheme, tuple(labels.split()), scheme)
    assert loading.load_data(source, tag_scheme="plain").tag_scheme == "plain"
    if scheme == "plain":
        assert "cannot be converted" in message(source, tag_scheme="iob2")
        return
    converted = loading.load_data(source, tag_scheme="iob2")
    assert converted.tag_scheme == "IOB2" and converted.labels == ("O", "B-A", "B-B", "I-A", "I-B")
    (tmp_path / "train.jsonl").unlink()
    alone = loading.load_data(source, tag_scheme="iob2", iob2_labels=converted.labels, training=False)
    assert alone.labels == converted.labels and alone.tag_scheme is None


def test_numbers_are_converted_by_their_names(tmp_path: Path) -> None:
    rows = [{"tokens": ["a", "b"], "tags": [1, 0]}, {"tokens": ["a"], "tags": [1]}]
    got = loading.load_data(write(tmp_path, train_jsonl=rows), labels=["O", "I-X"], tag_scheme="iob2")
    assert got.labels == ("O", "B-X", "I-X") and got.splits["train"]["tags"][:] == [[1, 0], [1]]
    assert "numbers need names first" in message(tmp_path, tag_scheme="iob2")


@pytest.mark.parametrize("more", [{"source": 3}, {"history": []}, {"context": None}])
def test_a_column_without_text_is_no_input(tmp_path: Path, more: dict[str, Any]) -> None:
    rows = [{"text": f"some text {i}", "label": "ab"[i % 2], **more} for i in range(6)]
    assert loading.load_data(write(tmp_path, train_jsonl=rows)).kind == "classification"


def test_whole_numbers_with_a_point_are_classes(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("text,label\nfine,1.0\nbad,0.0\ngood,1.0\n")
    assert loading.load_data(str(tmp_path)).labels == ("0", "1")


def test_small_letters_are_no_classes(tmp_path: Path) -> None:
    source = write(tmp_path, train_jsonl=tagged("b-per i-per o"))
    assert "are small letters, such as 'b-per'" in message(source)
    assert loading.load_data(source, tag_scheme="plain").tag_scheme == "plain"


MIXED = {
    "two files": ({"train_jsonl": tagged("B-A I-A", "B-A O"), "test_jsonl": tagged("I-A O")}, "test.jsonl line 1 (I-A"),
    "a row": ({"train_jsonl": tagged("B-A O", "B-A I-A", "O I-A")}, "train.jsonl line 3 (I-A after O, as in IOB1)"),
    "two endings": ({"train_jsonl": tagged("B-A E-A", "S-A E-A")}, "train.jsonl line 2 (E-A after S-A)"),
    "a class": ({"train_jsonl": tagged("B-A O", "NOUN O")}, "'NOUN' in train.jsonl line 2 is not"),
    "IOE": ({"train_conll": "a I-A\nb E-A\n\nc O\n"}, "IOE, where E ends an entity"),
}


@pytest.mark.parametrize("case", MIXED)
def test_tags_of_no_single_scheme_are_named(tmp_path: Path, case: str) -> None:
    files, expected = MIXED[case]
    source = write(tmp_path, **files)
    assert expected in message(source)
    option: Any = "plain" if case == "a class" else "iob2"
    assert f"--tag-scheme {option}" in message(source)
    assert loading.load_data(source, tag_scheme=option).tag_scheme == {"plain": "plain", "iob2": "IOB2"}[option]


# --- what can be wrong ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ({}, ["no train file (train.jsonl, train.json, train.csv, ", "the folder holds: nothing"]),
        ({"test_jsonl": ROWS, "train_xlsx": "a"}, ["no train file", "the folder holds: test.jsonl, train.xlsx"]),
        ({"train_jsonl": ROWS, "train_csv": "text,label\n"}, ["more than one file for train: train.csv, train.jsonl"]),
        ({"train_jsonl": ROWS, "dev_jsonl": ROWS, "valid_jsonl": ROWS}, ["for validation: dev.jsonl, valid.jsonl"]),
        ({"train_jsonl": ""}, ["train.jsonl is empty"]),
        ({"train_csv": "text,label\n"}, ["train.csv is empty"]),
        ({"train_parquet": ""}, ["train.parquet: cannot be read"]),
        ({"train_jsonl": ROWS, "test_jsonl": "\n"}, ["test.jsonl is empty"]),
        ({"train_jsonl": lines(ROWS) + '{"text": "a"\n'}, ["train.jsonl line 5: broken JSON"]),
        ({"train_jsonl": [*ROWS, 3]}, ["train.jsonl line 5: not a JSON object but 3 (int)"]),
        ({"train_json": json.dumps([*ROWS, 3])}, ["train.json row 5: not a JSON object but 3"]),
        ({"train_conll": "a O\nb\n"}, ["train.conll line 2: 1 columns, the lines before it have 2"]),
        ({"train_bio": "a\tO\nb\t\n"}, ["train.bio line 2: an empty column"]),
        ({"train_csv": "text,label\na,x\nb\n"}, ["train.csv line 3: 1 fields, the header has 2"]),
        ({"train_csv": 'text,label\na,x\n"b,y\n'}, ["train.csv line 3: cannot be read from here to its end"]),
        ({"train_csv": "text,text,label\na,b,x\n"}, ["train.csv line 1: a column name occurs twice"]),
        (
            {"train_jsonl": [{"text": "a", "lable": 1}]},
            [
                "no column named label",
                "Its columns: text, lable",
                "--columns text=text,label=lable",
                "If it is running text, give --task language",
            ],
        ),
        ({"train_jsonl": [{"n": 3, "label": 1}]}, ["no column of text", "Its columns: n, label"]),
        (
            {"train_jsonl": [{"x": "a", "y": "b", "z": "c", "label": 1}]},
            [
                "3 columns of text (x, y, z) and needs one or two",
                "Say which is which: --columns text=…,label=label; or choose another kind",
            ],
        ),
        (
            {"train_csv": "this was good,pos\nso it is,pos\nthat was bad,neg\n"},
            ["the first line of train.csv looks like a row, since 'pos' is a value of its column: give"],
        ),
        (
            {"train_csv": "Review Text (EN),Bewertung\nso it is,1\nthat was bad,0\nsee you,1\n"},
            ["--columns 'text=Review Text (EN),label=Bewertung'; or choose"],
        ),
        (
            {
                "train_jsonl": [
                    {"text": "a b c", "pair": "d e", "kind's": 1},
                    {"text": "f g", "pair": "h i", "kind's": 0},
                ]
            },
            ["--columns 'text=…,label=kind'\"'\"'s'; or choose"],
        ),
        (
            {"train_jsonl": ROWS, "test_csv": "txt,label\na,refund\n"},
            ["unknown column 'text' in test.csv. Did you mean 'txt'? Known: label, txt."],
        ),
        ({"train_jsonl": [*ROWS, {"label": "refund"}]}, ["train.jsonl line 5: column 'text' is missing"]),
        ({"train_jsonl": [*ROWS, {"text": "a"}]}, ["train.jsonl line 5: column 'label' is missing"]),
        (
            {"train_jsonl": [*ROWS, {"text": ["a"], "label": "refund"}]},
            ["train.jsonl line 5: column 'text' is not text but ['a'] (list)"],
        ),
        ({"train_jsonl": [*ROWS, {"text": None, "label": "refund"}]}, ["line 5: column 'text' is not text but None"]),
        ({"train_jsonl": [*ROWS, {"text": "\ud83d", "label": "refund"}]}, ["line 5: column 'text' holds half a char"]),
        (
            {"train_jsonl": [*ROWS, {"text": "a", "label": 0.5}]},
            ["line 5: a label must be text or a whole number, not 0.5"],
        ),
        (
            {"train_jsonl": [*ROWS, {"text": "a", "label": None}]},
            ["line 5: the label is missing"],
        ),
        (
            {"train_csv": "text,label\na,x\nb,y\nc,\n"},
            ["train.csv line 4: the label is missing"],
        ),
        ({"train_jsonl": ROWS[:1]}, ["train.jsonl has one label only, 'delivery'"]),
        (
            {
                "train_jsonl": ROWS,
                "test_jsonl": [ROWS[0], {"text": "a", "label": "refnd"}, {"text": "b", "label": "refnd"}],
            },
            ["label 'refnd' is in test.jsonl line 2 and 1 more but nowhere in train.jsonl. Did you mean 'refund'?"],
        ),
        (
            {
                "train_jsonl": ROWS,
                "meta_json": '{"label_names": ["delivery", "refund", "praise"]}',
                "test_jsonl": [{"text": "a", "label": 2}, {"text": "a", "label": 3}],
            },
            ["label '2' is in test.jsonl line 1 but nowhere in train.jsonl", "unknown label '3' in test.jsonl line 2"],
        ),
        (
            {"train_jsonl": ROWS, "meta_json": '{"label_names": ["deliver", "refund"]}'},
            ["unknown label 'delivery' in train.jsonl line 1 and 1 more.", "'deliver'? Known: deliver, refund."],
        ),
        (
            {"train_jsonl": ROWS, "meta_json": '{"label_names": ["refund", "refund"]}'},
            ["label names must be different"],
        ),
        ({"train_jsonl": ROWS, "meta_json": '{"label_names": {"0": "a"}}'}, ["meta.json: label_names must be a list"]),
        (
            {"train_jsonl": ROWS, "meta_json": '{"fields": 3}'},
            ["meta.json: fields must name the columns, but it is 3 (int)"],
        ),
        ({"train_jsonl": ROWS, "meta_json": "{"}, ["meta.json is not a JSON object"]),
        ({"train_jsonl": ROWS, "meta_json": "[]"}, ["meta.json is not a JSON object"]),
    ],
)
def test_error(tmp_path: Path, texts: dict[str, Any], expected: list[str]) -> None:
    text = message(write(tmp_path, **texts))
    assert text.startswith(f"data {tmp_path}")
    for part in expected:
        assert part in text


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"text": "tekst", "label": "label"}, "unknown column 'tekst' in train.jsonl. Did you mean 'text'?"),
        ({"txt": "text", "label": "label"}, "unknown role of a column 'txt'. Did you mean 'text'?"),
        (
            {"txt": "text", "label": "label"},
            "read as classification, whose columns are text, (pair,) (task,) label. Say which is",
        ),
        (
            {"text": "text"},
            "no column is named for label. train.jsonl has text, label. The data is read as classification",
        ),
        (["text"], "no column is named for label. train.jsonl has"),
        (["text", "text"], "['text', 'text'] names a column twice. train.jsonl has text, label. The data is read"),
        (["a", "b", "c", "d"], "['a', 'b', 'c', 'd'] names more columns than the 2 that are read. train.jsonl has"),
        (
            {"text": "text", "spans": "label"},
            "columns of spans of a text are spans, tokens, and here are text, spans: --columns spans=label,tokens=…",
        ),
        (
            {"sentence": "text", "tags": "label"},
            "columns of a word a row are sentence, tokens, tags, and here are sentence, tags:",
        ),
    ],
)
def test_wrong_columns(tmp_path: Path, columns: Any, expected: str) -> None:
    assert expected in message(write(tmp_path, train_jsonl=ROWS), columns)


def test_truncated_gzip(tmp_path: Path) -> None:
    rows = [{"text": f"text number {i * i}", "label": i % 2} for i in range(3000)]
    (tmp_path / "train.jsonl.gz").write_bytes(gzip.compress(lines(rows).encode())[:-2000])
    assert "train.jsonl.gz: cannot be read to its end" in message(str(tmp_path))


def test_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_bytes("text,label\nnaïve,x\nb,y\n".encode("latin-1"))
    assert "train.csv line 2: byte 0xef is not UTF-8" in message(str(tmp_path))


def test_all_problems_at_once_and_no_endless_list(tmp_path: Path) -> None:
    text = message(
        write(
            tmp_path,
            train_jsonl=[*ROWS, {"text": 1, "label": "refund"}],
            dev_jsonl="",
            test_jsonl=[{"text": "a", "label": "other"}],
        ),
        max_rows={"train": 0},
    )
    assert "4 problems" in text
    for part in ("max_rows of train must be at least 1", "train.jsonl line 5", "dev.jsonl is empty", "label 'other'"):
        assert part in text
    text = message(write(tmp_path, train_jsonl=[*ROWS, *[{"text": i, "label": "refund"} for i in range(50)]]))
    assert "52 problems" in text and f"… and {52 - text.count('  - '):,} more" in text


def test_no_such_folder(tmp_path: Path) -> None:
    (tmp_path / "tickets").mkdir()
    write(tmp_path / "tickets", train_jsonl=ROWS)
    (tmp_path / "tikets2").mkdir()
    text = message(str(tmp_path / "tikets"))
    assert (
        f"unknown data set '{tmp_path / 'tikets'}'. Did you mean '{tmp_path / 'tickets'}'?" in text
        and "tikets2" not in text
    )
    assert "no such file or folder here" in text and "Give a folder with train.jsonl" in text


def test_read_one_file(tmp_path: Path) -> None:
    write(tmp_path, more_jsonl=ROWS)
    assert readers.read_rows(tmp_path / "more.jsonl").rows[1] == (2, ROWS[1])
    for name, expected in (
        ("more.xlsx", "unknown file format '.xlsx' in more.xlsx. Save the sheet as CSV"),
        ("none.csv", "cannot be read"),
    ):
        with pytest.raises(DeltuneError, match=expected):
            readers.read_rows(tmp_path / name)


def test_one_file_is_split_by_the_seed(tmp_path: Path) -> None:
    rows = [*tiny.sentences(40, 0), {"text": "once", "label": "rare"}]
    tiny.lines(tmp_path / "a.jsonl", rows)
    (tmp_path / "b.json").write_text(json.dumps(rows, indent=1))
    one, array, other = (
        loading.load_data(str(tmp_path / f), seed=s) for f, s in (("a.jsonl", 0), ("b.json", 0), ("a.jsonl", 1))
    )
    assert {split: len(of) for split, of in one.splits.items()} == {"train": 33, "validation": 4, "test": 4}
    assert all(one.splits[split]["id"][:] == array.splits[split]["id"][:] for split in one.splits)
    assert one.fingerprint == array.fingerprint != other.fingerprint and "seed 0 (--seed): 33 train" in one.notes[0]
    drawn = {int(name.removeprefix("row-")) for split in one.splits.values() for name in split["id"]}
    assert drawn == {*range(1, 42)} and "row-41" in one.splits["train"]["id"]  # which has a label of its own
    for split in ("validation", "test"):  # in the shares of the labels, of which the rare one has too few
        assert {*one.splits[split]["label"]} == {0, 1, 3} and one.labels[2] == "rare"
    scored = loading.load_data(str(tmp_path / "a.jsonl"), labels=one.labels, training=False)
    assert list(scored.splits) == ["test"] and len(scored.splits["test"]) == 41
    tiny.lines(tmp_path / "few.jsonl", rows[:19])
    few = loading.load_data(str(tmp_path / "few.jsonl"))
    assert list(few.splits) == ["train"] and few.notes == (
        "few.jsonl has 19 rows, too few to hold some out: all are trained",
    )


def test_rows_with_one_input_stay_in_one_split(tmp_path: Path) -> None:
    rows = [{"text": f"t {i}", "label": "ab"[i % 2]} for i in range(30)] * 3
    got = loading.load_data(str(tiny.lines(tmp_path / "a.jsonl", rows)))
    texts = [{*split["text"]} for split in got.splits.values()]
    assert [len(split) for split in texts] == [24, 3, 3] and len(set.union(*texts)) == 30
    assert got.notes[0].endswith("72 train, 9 validation, 9 test; rows with the same input stay together")
    few = loading.load_data(str(tiny.lines(tmp_path / "b.jsonl", rows[:19] * 2)))
    assert "has 19 different inputs, too few to hold some out" in few.notes[0]


GUIDE = Path(__file__).parents[2] / "docs" / "train" / "data.md"
ROWS_OF_GUIDE = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in GUIDE.read_text().split("| what is recognised |")[1].split("\n\n")[0].splitlines()[2:]
]


@pytest.mark.parametrize(("file", "shown", "line"), [row[1:] for row in ROWS_OF_GUIDE])
def test_the_table_of_files(file: str, shown: str, line: str, tmp_path: Path) -> None:
    """Each file that the guide shows is read as it says: the first lines once, the rows many times."""
    suffix, *options = [part.strip("` ") for part in file.split("` `")]
    values = dict(re.findall(r"--(\S+) \"?([^ \"]+)", " ".join(options)))
    head, *lines = [text.strip("`").replace("→", "\t").replace("*blank line*", "") for text in shown.split("<br>")]
    header, rows = ([head], lines) if suffix in (".csv", ".tsv") else ([], [head, *lines])
    path = tmp_path / f"file{suffix}"
    if "sentence_id" in head:
        rows = [row.replace("1,", f"{i},", 1) for i in range(8) for row in rows]
    path.write_text("\n".join([*header, *(rows if "sentence_id" in head else rows * 8)]) + "\n")
    arguments = [part for name, value in values.items() for part in (f"--{name}", value)]
    result = CliRunner().invoke(app, ["data", str(path), *arguments, "--quiet"])
    assert result.output.splitlines()[0] == f"{path}: {line}", result.output
