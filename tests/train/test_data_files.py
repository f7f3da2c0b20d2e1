"""Data files of any bytes: rows that are what the file says, or a DeltuneError with file and line, in bounded time."""

from __future__ import annotations

import gzip
import json
import random
import resource
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from deltune.errors import DeltuneError
from deltune.train.config import RunConfig
from deltune.train.data import loading, readers
from deltune.train.prediction_inputs import inputs_from_file
from deltune.train.records import collect_environment
from deltune.train.run_folder import RunFolder
from fuzz.damage import contents, mutated_bytes, mutated_file, mutated_json, outcome, text_of

ROWS: dict[str, list[dict[str, Any]]] = {
    "classification": [{"id": f"r{i}", "text": f"text number {i} ü", "label": "ab"[i % 2]} for i in range(12)],
    "tagging": [{"tokens": ["a", "b", f"c{i}"], "tags": ["O", "B-X", "I-X"]} for i in range(8)],
    "choice": [{"question": f"which {i}", "choices": ["x", "y", "z"], "answer": i % 3} for i in range(8)],
    "generation": [{"source": f"from {i}", "targets": [f"to {i}", "or"]} for i in range(8)],
}
META = {"fields": "id, text, label", "label_names": ["a", "b"]}


def folder_of(root: Path, kind: str, suffix: str) -> Path:
    """A folder with a train and a test file of one format."""
    root.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        rows, path = ROWS[kind], root / f"{split}{suffix}"
        if suffix == ".parquet":
            parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        elif suffix.startswith(".csv"):
            names = list(rows[0])
            text = "".join(",".join(f'"{row[name]}"' for name in names) + "\n" for row in rows)
            path.write_bytes((",".join(names) + "\n" + text).encode())
        else:
            path.write_bytes("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
        if suffix.endswith(".gz"):
            path.write_bytes(gzip.compress(path.read_bytes()))
    if kind == "classification":
        (root / "meta.json").write_text(json.dumps(META))
    return root


CASES = [(kind, suffix) for kind in ROWS for suffix in (".jsonl", ".jsonl.gz", ".parquet")]
CASES += [(kind, ".jsonl") for kind in ROWS] * 3
CASES += [("classification", ".csv"), ("classification", ".csv.gz"), ("classification", ".json")] * 2


def read_again(seed: int, root: Path) -> str:
    """One mutated file of one folder, read as training reads it, and its facts written as a run writes them."""
    chance = random.Random(seed)
    kind, suffix = chance.choice(CASES)
    folder = folder_of(root / str(seed), kind, suffix)
    path = chance.choice(sorted(folder.iterdir()))
    if suffix == ".jsonl" and path.name != "meta.json" and chance.random() < 0.7:
        rows = mutated_json(ROWS[kind], chance)
        path.write_text("".join(text_of(row) + "\n" for row in (rows if isinstance(rows, list) else [rows])))
    elif path.suffix == ".gz" and chance.random() < 0.5:  # what is inside, packed again
        path.write_bytes(gzip.compress(mutated_bytes(gzip.decompress(path.read_bytes()), chance)))
    else:
        mutated_file(path, chance)

    def load() -> None:
        facts = loading.load_data(str(folder), kind=chance.choice((None, kind))).summary
        json.dumps(collect_environment({"data": facts}), ensure_ascii=False).encode()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return outcome(load, folder)


@pytest.mark.parametrize("seeds", [range(120), pytest.param(range(1000, 3000), marks=pytest.mark.slow)])
def test_any_file(seeds: range, tmp_path: Path) -> None:
    outcomes = {read_again(seed, tmp_path) for seed in seeds}
    assert outcomes == {"fine", "refused"}


def jsonl(*texts: Any) -> bytes:
    return "".join(
        json.dumps({"text": t, "label": "ab"[i % 2]}, ensure_ascii=False) + "\n" for i, t in enumerate(texts)
    ).encode()


def bomb(piece: bytes, times: int) -> Callable[[Path], bytes]:
    """A small gzip file that a thousand times as much comes out of, in equal members."""
    return lambda _: gzip.compress(piece) * times


PLAIN = jsonl("one", "two", "three")
STRANGE = "one\u2028two\u0085three\x0cfour\x1cfive"
READ: dict[str, tuple[str, bytes, list[str]]] = {
    "a line separator in a text": ("train.jsonl", jsonl(STRANGE, "x"), [STRANGE, "x"]),
    "the same in CSV": ("train.csv", f"text,label\n{STRANGE},a\nx,b\n".encode(), [STRANGE, "x"]),
    "a byte order mark": ("train.jsonl", b"\xef\xbb\xbf" + PLAIN, ["one", "two", "three"]),
    "a byte order mark in CSV": ("train.csv", b"\xef\xbb\xbftext,label\none,a\ntwo,b\n", ["one", "two"]),
    "carriage returns alone": ("train.jsonl", PLAIN.replace(b"\n", b"\r"), ["one", "two", "three"]),
    "carriage returns alone in CSV": ("train.csv", b"text,label\rone,a\rtwo,b\r", ["one", "two"]),
    "both": ("train.jsonl", PLAIN.replace(b"\n", b"\r\n"), ["one", "two", "three"]),
    "an escaped NUL": ("train.jsonl", jsonl("a\0b", "x"), ["a\0b", "x"]),
    "a line within a field": ("train.csv", b'text,label\n"one\r\ntwo",a\nx,b\n', ["one\r\ntwo", "x"]),
    "an old way of packing": (
        "train.jsonl.gz",
        gzip.compress(PLAIN[:30]) + gzip.compress(PLAIN[30:]),
        ["one", "two", "three"],
    ),
}
"""What looks strange and is right: a file, its bytes, the texts in it."""


@pytest.mark.parametrize("name", READ)
def test_what_is_read(name: str, tmp_path: Path) -> None:
    file, content, expected = READ[name]
    (tmp_path / file).write_bytes(content)
    assert loading.load_data(str(tmp_path)).splits["train"]["text"][:] == expected


def ragged(path: Path) -> bytes:
    names = ["text", "label", "text"]
    parquet.write_table(pyarrow.Table.from_arrays([pyarrow.array(["a", "b"])] * 3, names), path)
    return path.read_bytes()


REFUSED: dict[str, tuple[str, bytes | Callable[[Path], bytes], str]] = {
    "nothing": ("train.jsonl", b"", r"train\.jsonl is empty"),
    "nothing in CSV": ("train.csv", b"", r"train\.csv is empty"),
    "nothing packed": ("train.jsonl.gz", b"", r"train\.jsonl\.gz is empty"),
    "NUL": ("train.jsonl", PLAIN.replace(b"two", b"t\0o"), "line 2 holds a NUL"),
    "NUL in CSV": ("train.csv", b"text,label\na,a\nt\0o,b\n", "line 3 holds a NUL"),
    "NUL alone": ("train.csv", b"\0" * 1000, "line 1 holds a NUL"),
    "UTF-16": ("train.jsonl", PLAIN.decode().encode("utf-16"), "line 1: the file is UTF-16"),
    "UTF-16, the other way round": ("train.csv", "\ufefftext,label\na,b\n".encode("utf-16-be"), "the file is UTF-16"),
    "UTF-16 without its mark": ("train.csv", "text,label\na,b\n".encode("utf-16-le"), "line 1 holds a NUL"),
    "UTF-32": ("train.jsonl", PLAIN.decode().encode("utf-32"), "line 1: the file is UTF-32"),
    "latin-1": ("train.jsonl", jsonl("one", "naïve").decode().encode("latin-1"), "line 2: byte 0xef is not UTF-8"),
    "latin-1 in CSV": ("train.csv", "text,label\na,b\nnaïve,a\n".encode("latin-1"), "line 3: byte 0xef is not UTF-8"),
    "ragged": ("train.csv", b"text,label\na,b\na,b,c\n", "line 3: 3 fields, the header has 2"),
    "a doubled column": ("train.csv", b"text,label,text\na,b,c\n", "line 1: a column name occurs twice"),
    "a doubled key": (
        "train.jsonl",
        PLAIN + b'{"text": "a", "label": "a", "text": "b"}\n',
        "line 4: .*'text' occurs twice",
    ),
    "a doubled column of Parquet": ("train.parquet", ragged, "a column name occurs twice"),
    "a line of 100 MB": (
        "train.jsonl",
        lambda _: PLAIN + b'{"text": "' + b"x" * 10**8 + b'"}\n',
        "line 4 is longer than",
    ),
    "a line of 100 MB in CSV": (
        "train.csv",
        lambda _: b"text,label\n" + b"x" * 10**8 + b",a\n",
        "line 2 is longer than",
    ),
    "a quote that never ends": (
        "train.csv",
        lambda _: b'text,label\na,a\n"' + b"x,b\n" * 10**7,
        "line 3: .*field larger than",
    ),
    "cut short": ("train.jsonl.gz", gzip.compress(jsonl(*map(str, range(9000))))[:-2000], "cannot be read to its end"),
    "a bomb of zeros": ("train.jsonl.gz", bomb(b"\0" * 10**6, 500), "line 1 holds a NUL"),
    "a bomb of one line": ("train.csv.gz", bomb(b"x" * 10**6, 500), "line 1 is longer than"),
    "deep": ("train.jsonl", PLAIN + b'{"text": ' + b"[" * 10**6 + b"\n", "line 4: broken JSON .*nested too deeply"),
    "a number of too many digits": (
        "train.jsonl",
        PLAIN + b'{"label": ' + b"9" * 10**5 + b"}\n",
        "line 4: broken JSON",
    ),
    "an infinite label": ("train.jsonl", PLAIN + b'{"text": "a", "label": 1e999}\n', "line 4: a label must be text"),
    "an empty list for a label": (
        "train.jsonl",
        PLAIN + b'{"text": "a", "label": []}\n',
        "line 4: column 'label' is not",
    ),
    "two labels": ("train.jsonl", PLAIN + b'{"text": "a", "label": ["a", "b"]}\n', "line 4: column 'label' is not"),
    "half an id": (
        "train.jsonl",
        PLAIN + b'{"text": "a", "label": "a", "id": "\\ud800"}\n',
        "line 4: column 'id' holds half",
    ),
    "half a name": ("train.jsonl", PLAIN + b'{"text": "a", "label": "a", "\\ud800": 1}\n', "line 4: the column name"),
    "half a label": (
        "train.jsonl",
        PLAIN + b'{"text": "a", "label": "\\ud800"}\n',
        "line 4: column 'label' holds half",
    ),
    "fields that are no names": ("meta.json", b'{"fields": {"text": ["a"]}}', "fields must name the columns"),
    "deep facts": ("meta.json", b"[" * 10**6, "meta.json is not a JSON object"),
}
"""What cannot be read: a file, its bytes, and what is said of it."""


HEAVY = ("a quote that never ends",)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in HEAVY else []) for n in REFUSED])
def test_what_is_refused(name: str, tmp_path: Path) -> None:
    """At once and in little memory, though some of these would fill any."""
    file, content, expected = REFUSED[name]
    if file == "meta.json":
        (tmp_path / "train.jsonl").write_bytes(PLAIN)
    (tmp_path / file).write_bytes(content if isinstance(content, bytes) else content(tmp_path / file))
    before, began = contents(tmp_path), time.process_time()
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DeltuneError, match=expected) as caught:
        loading.load_data(str(tmp_path))
    assert file in str(caught.value) and len(str(caught.value)) < 3000
    assert contents(tmp_path) == before
    assert time.process_time() - began < 60, "hours, without bounds"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - most < 2**21, "2 GiB"


def test_a_superscript_is_no_index(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"question": "q", "choices": ["a", "b"], "answer": "²"}\n')
    with pytest.raises(DeltuneError, match=r"train\.jsonl line 1: column 'answer' is not the index"):
        loading.load_data(str(tmp_path), kind="choice")


def test_a_folder_in_the_place_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").mkdir()
    with pytest.raises(DeltuneError, match="is not a file"):
        loading.load_data(str(tmp_path))


# -- texts to predict


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run_dir = RunFolder(tmp_path / "run")
    with run_dir.locked():
        run_dir.begin(
            RunConfig.from_flat(model="m", data="d", method="lora"),
            {"data": {"fingerprint": "abc", "columns": {"text": "text"}}},
        )
    return run_dir.folder


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (f"{STRANGE}\nx\n".encode(), [("1", STRANGE), ("2", "x")]),
        (b"\xef\xbb\xbfa\r\nb\r\n", [("1", "a"), ("2", "b")]),
        (b"a\rb", [("1", "a"), ("2", "b")]),
        (b"a\n\n b \n", [("1", "a"), ("3", " b ")]),
        (b"a\n\xe9\n", "line 2: byte 0xe9 is not UTF-8"),
        (b"a\nb\0\n", "line 2 holds a NUL"),
        ("a\n".encode("utf-16"), "the file is UTF-16"),
        (b"", "is empty"),
        (b"x" * (readers.MAX_LINE_LENGTH + 1), "line 1 is longer"),
    ],
    ids=["separators", "BOM", "CR", "blank", "latin-1", "NUL", "UTF-16", "empty", "long"],
)
@pytest.mark.filterwarnings("ignore:.*blank lines")
def test_texts_are_lines(content: bytes, expected: Any, run: Path, tmp_path: Path) -> None:
    """As many inputs as there are lines with something on them, each with the number of its line."""
    (tmp_path / "texts.txt").write_bytes(content)
    if isinstance(expected, str):
        with pytest.raises(DeltuneError, match=expected):
            inputs_from_file(tmp_path / "texts.txt", run)
    else:
        assert [(row["id"], row["input"]) for row in inputs_from_file(tmp_path / "texts.txt", run)] == expected
