"""Files that need not fit into memory: what a process needs at most does not grow with the file that it reads."""

from __future__ import annotations

import csv
import ctypes
import datetime
import importlib
import json
import random
import threading
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet
from transformers import AutoConfig, AutoModelForCausalLM

import tiny
from deltune.train.data import rows as stored_rows
from deltune.train.data.loading import load_data
from processes import Started, deltune

SMALL, TIMES = 400, 8
"""Rows of the small file, and how many times more the large one has."""
MOST = 16 * 2**20
"""Bytes by which the large file may need more than the small one: half of what it needs at least with all rows in
memory (34 MB more for messages, 56 for classes)."""


def _text(words: int, chance: random.Random) -> str:
    return " ".join(chance.choices(tiny.FILLERS, k=words))


def _row(form: str, chance: random.Random) -> dict[str, Any]:
    question, answer, other = (f"{_text(150, chance)} " for _ in range(3))
    return {
        "messages": {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]},
        "Alpaca": {"instruction": question, "input": "", "output": answer},
        "prompts": {"prompt": question, "completion": answer},
        "preferences": {"prompt": question, "chosen": answer, "rejected": other},
        "texts": {"text": f"{question} {answer}"},
        "classes": {"text": f"{question} {answer}", "label": chance.choice("abc")},
    }[form]


def _rows(form: str, count: int) -> Iterator[dict[str, Any]]:
    chance = random.Random(0)
    return (_row(form, chance) for _ in range(count))


def _jsonl(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    with path.open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def _csv(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    first = next(rows)
    with path.open("w") as file:
        writer = csv.DictWriter(file, first)
        writer.writeheader()
        writer.writerow(first)
        writer.writerows(rows)


def _parquet(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    table = pyarrow.Table.from_pylist(list(rows))
    parquet.write_table(table, path, row_group_size=500, use_dictionary=False)


WRITERS: dict[str, Callable[[Path, Iterator[dict[str, Any]]], None]] = {
    "jsonl": _jsonl, "csv": _csv, "parquet": _parquet,
}  # fmt: skip


def _anonymous_bytes() -> int:
    """What the process has in memory, but for pages of files, which the system gives back when it needs them."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("RssAnon:")[2].split()[0])


def _peak(place: str, words: tuple[str, ...]) -> None:
    """Run a command, and write how many bytes it needed at most.

    What is freed goes back to the system at once, since what an allocator keeps differed by 30 MB between two runs, and
    the library of the probe, which is as large, is imported before.
    """
    importlib.import_module("sklearn.linear_model")
    mallopt = ctypes.CDLL(None).mallopt
    assert mallopt(-3, 2**16) and mallopt(-1, 2**16) and mallopt(-8, 1)  # when to map, when to trim, one arena
    stored_rows.NUMBERS_IN_MEMORY, stored_rows.LETTERS_IN_MEMORY, stored_rows.ROWS_AT_ONCE = 2**16, 2**17, 100
    begin, highest, done = _anonymous_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal highest
        while not done.wait(0.01):
            highest = max(highest, _anonymous_bytes())

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        deltune(*words)
    finally:
        done.set()
        watching.join()
        Path(place).write_text(str(highest - begin))


CASES = [
    ("messages", "jsonl", "data"),
    ("classes", "csv", "data"),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("Alpaca", "csv", "data"), ("prompts", "parquet", "data"), ("preferences", "parquet", "data"),
            ("texts", "jsonl", "data"), ("messages", "mixture", "data"), ("messages", "jsonl", "train"),
            ("classes", "parquet", "train"),
        )
    ),
]  # fmt: skip


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="what a process needs is read from /proc")
@pytest.mark.parametrize(("form", "suffix", "command"), CASES)
def test_memory_does_not_grow_with_the_file(form: str, suffix: str, command: str, tmp_path: Path) -> None:
    model = tiny.model(tmp_path / "model", "llama")
    configuration = AutoConfig.from_pretrained(model, max_position_embeddings=512)
    AutoModelForCausalLM.from_config(configuration).save_pretrained(model)
    template = tmp_path / "plain.jinja"
    template.write_text("{% for m in messages %}{{ m.role }} {{ m.content }} [SEP] {% endfor %}")
    peaks = []
    for name, count in (("small", SMALL), ("large", TIMES * SMALL)):
        (tmp_path / name).mkdir()
        files = [tmp_path / name / f"train.{suffix}"]
        if suffix == "mixture":
            files = [tmp_path / name / "a.jsonl", tmp_path / name / "b.jsonl"]
        for file in files:
            WRITERS[file.suffix[1:]](file, _rows(form, count // len(files)))
        source = ",".join(f"{file}=0.5" for file in files) if suffix == "mixture" else str(tmp_path / name)
        words = [command, source]
        if command == "train":
            words = [command, "--data", source, "--output", str(tmp_path / f"{name}-run"), "--steps", "2", "--quiet"]
            words += ["--method", "lora(rank=2)"]
        words += ["--model", str(model), "--max-length", "400"]
        words += ["--template", str(template)] if form in ("messages", "Alpaca") else []
        place = tmp_path / f"{name}.txt"
        started = Started(_peak, tmp_path / name, str(place), tuple(words))
        assert started.wait() == 0, started.printed
        peaks.append(int(place.read_text()))
    small, large = peaks
    assert large - small < MOST, f"{small:,} bytes for {SMALL} rows, and {large:,} for {TIMES} times as many"


def test_rows_are_the_same_on_the_disk_as_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dates and decimals of a Parquet file are no JSON, as which rows are on the disk."""
    days = [datetime.date(2020, 1, 1) + datetime.timedelta(days=i) for i in range(40)]
    scores = pyarrow.array([Decimal(f"{i % 5}.5") for i in range(40)])
    table = pyarrow.table({"id": days, "text": [f"text {i}" for i in range(40)], "score": scores, "day": days})
    parquet.write_table(table, tmp_path / "rows.parquet")
    in_memory = load_data(str(tmp_path / "rows.parquet"))
    monkeypatch.setattr(stored_rows, "LETTERS_IN_MEMORY", 100)
    on_disk = load_data(str(tmp_path / "rows.parquet"))
    assert in_memory.kind == on_disk.kind == "regression" and in_memory.fingerprint == on_disk.fingerprint
    assert in_memory.splits["train"]["id"][:] == on_disk.splits["train"]["id"][:]
    assert in_memory.splits["train"][0]["id"] == "2020-01-01"


def test_sentences_may_have_any_numbers(tmp_path: Path) -> None:
    """Python hashes -1 as it hashes -2."""
    words = [(sentence, word, tag) for sentence in (-1, -2, -3) for word, tag in (("a", "B-X"), ("b", "O"))]
    rows = [{"sentence": sentence, "word": word, "tag": tag} for sentence, word, tag in words]
    _jsonl(tmp_path / "train.jsonl", iter(rows))
    data = load_data(str(tmp_path), columns={"sentence": "sentence", "tokens": "word", "tags": "tag"})
    assert data.splits["train"]["id"][:] == ["-1", "-2", "-3"]
