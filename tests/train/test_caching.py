"""Tokenised rows on the disk: the same rows, found again by content and by nothing else."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import re
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tiny
from deltune.errors import DeltuneError
from deltune.files import CACHE_VARIABLE
from deltune.models import load_model, load_tokenizer
from deltune.train.data import rows as stored_rows
from deltune.train.data.formats import COLUMN
from deltune.train.progress import ProgressDisplay
from deltune.train.run import train
from deltune.train.tasks import token_cache
from deltune.train.tasks.base import TaskOptions
from deltune.train.tasks.chat import CHAT
from deltune.train.tasks.classification import CLASSIFICATION
from deltune.train.tasks.encoding import EncodedRows
from deltune.train.tasks.generation import LANGUAGE_MODELING

LIMITS = TaskOptions(max_length=8)


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    place = str(tiny.model(tmp_path_factory.mktemp("caching") / "model"))
    return load_tokenizer(place), load_model(place, "classification", ["a", "b", "c"])


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "rows"))
    return tmp_path / "rows"


COLUMNS = {
    "id": [str(i) for i in range(30)],
    "text": [row["text"] for row in tiny.sentences(30, 0)],
    "label": [i % 3 for i in range(30)],
}


def rows(
    parts: tuple[Any, Any], kind: Any = CLASSIFICATION, limits: TaskOptions = LIMITS, content: str = "x"
) -> EncodedRows:
    return token_cache.encode_splits(kind, *parts, {"train": COLUMNS}, limits, ("train",), content)["train"]


def counting(calls: list[int]) -> Any:
    """A classification that notes when its rows are tokenised."""

    @functools.wraps(CLASSIFICATION.encode)
    def encode(*arguments: Any) -> EncodedRows:
        calls.append(1)
        return CLASSIFICATION.encode(*arguments)

    return replace(CLASSIFICATION, encode=encode)


@pytest.mark.parametrize("kind", [LANGUAGE_MODELING, CHAT], ids=lambda kind: kind.name)
def test_many_rows_of_texts_go_through_a_file(
    kind: Any, parts: tuple[Any, Any], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are those of a few, which stay in memory, with a cache and without."""
    columns = COLUMNS | {COLUMN: [json.dumps({"text": text}) for text in COLUMNS["text"]]}
    straight = kind.encode(*parts, columns, LIMITS, True)
    monkeypatch.setattr(stored_rows, "NUMBERS_IN_MEMORY", 50)
    stored = kind.encode(*parts, columns, LIMITS, True)
    assert isinstance(straight.rows, list) and isinstance(stored.rows, stored_rows.ArrowRows)
    for encoded in (
        stored,
        token_cache.encode_splits(kind, *parts, {"train": columns}, LIMITS, ("train",), "x")["train"],
    ):
        assert list(encoded.rows) == straight.rows and encoded.lengths == straight.lengths
        assert encoded.__getitems__([9, 2]) == [straight[9], straight[2]] and encoded.notes == straight.notes


@pytest.mark.parametrize("limit", [1, 10**6])
def test_keys_that_come_later_are_refused_and_no_file_has_a_name(place: Path, limit: int) -> None:
    """A process that is killed leaves nothing; Arrow alone would leave the key out."""
    collector = stored_rows.RowCollector(limit=limit)
    collector.append({"a": 1})
    assert collector.in_memory == (limit > 1) and not [*place.glob("*"), *place.glob(".*")]
    with pytest.raises(DeltuneError, match="rows have b, and those before them have a alone"):
        collector.append({"a": 2, "b": 3})
        collector.table()


def test_the_rows_are_the_same(parts: tuple[Any, Any], place: Path) -> None:
    straight = CLASSIFICATION.encode(*parts, COLUMNS, LIMITS, True)
    for _ in range(2):
        cached = rows(parts)
        assert list(cached.rows) == list(straight.rows) and cached.lengths == straight.lengths
        assert cached.truncated == straight.truncated > 0 and len(cached) == 30
        assert cached[7] == straight[7] and cached.__getitems__([9, 2]) == [straight[9], straight[2]]
        assert cached.rows[3:5] == straight.rows[3:5]
        assert cached.__getitems__([]) == []
    assert len(list(place.glob("*.arrow"))) == 1


def test_tokenising_says_how_far_it_is_and_what_it_has_kept(
    parts: tuple[Any, Any], place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As training does: how much of it is done, and how long the rest takes."""
    caplog.set_level("INFO", "deltune")
    monkeypatch.setattr(stored_rows, "ROWS_AT_ONCE", 10)
    seconds = itertools.count(step=6)
    for _ in range(2):
        with ProgressDisplay(clock=lambda: float(next(seconds))) as bar:
            token_cache.encode_splits(
                CLASSIFICATION, *parts, {"train": COLUMNS}, LIMITS, ("train",), "x", bar.start_rows
            )
    first, *_, last = caplog.messages
    assert re.fullmatch(r"tokens of train 10/30 rows, \d:\d\d elapsed, \d:\d\d left", first)
    assert last == f"the tokens of train are read from the cache in {place}"


def test_rows_for_training_are_not_those_for_evaluation(parts: tuple[Any, Any], place: Path) -> None:
    for training in (("train",), ()):
        token_cache.encode_splits(CLASSIFICATION, *parts, {"train": COLUMNS}, LIMITS, training, "x")
    assert len(list(place.glob("*.arrow"))) == 2


def test_found_again_by_content(parts: tuple[Any, Any], place: Path, tmp_path: Path) -> None:
    """What the rows depend on makes another file; what they do not depend on does not."""
    calls: list[int] = []
    kind = counting(calls)
    tokenizer, model = parts
    rows(parts, kind)
    rows(parts, kind)
    rows(parts, kind, replace(LIMITS, generate_kwargs={"num_beams": 3}))
    rows((load_tokenizer(tokenizer.name_or_path), model), kind)
    assert len(calls) == 1
    rows(parts, kind, replace(LIMITS, max_length=9))
    rows(parts, kind, replace(LIMITS, template="{text}!"))
    rows(parts, kind, content="y")
    shutil.copytree(tokenizer.name_or_path, tmp_path / "other")
    file = tmp_path / "other" / "tokenizer.json"
    file.write_text(file.read_text().replace('"apple"', '"ample"'))
    rows((load_tokenizer(str(tmp_path / "other")), model), kind)
    assert len(calls) == 5


def test_a_torn_file_is_made_anew(parts: tuple[Any, Any], place: Path) -> None:
    rows(parts)
    (file,) = place.glob("*.arrow")
    file.write_bytes(file.read_bytes()[:100])
    assert list(rows(parts).rows) == list(CLASSIFICATION.encode(*parts, COLUMNS, LIMITS, True).rows)
    assert file.stat().st_size > 100


def test_a_folder_that_cannot_be_written_is_a_warning(
    parts: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="cannot be kept"):
        assert len(rows(parts)) == 30
    monkeypatch.setenv(CACHE_VARIABLE, "off")
    assert isinstance(rows(parts).rows, list)


def test_what_was_used_longest_ago_goes(parts: tuple[Any, Any], place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(3):
        rows(parts, content=str(i))
        for file in place.glob("*.arrow"):
            os.utime(file, (file.stat().st_atime - 10, file.stat().st_mtime - 10))
    size = max(file.stat().st_size for file in place.glob("*.arrow"))
    rows(parts, content="0")  # used again
    monkeypatch.setattr(token_cache, "MAX_BYTES", 2 * size + size // 2)
    rows(parts, content="new")
    calls: list[int] = []
    kind = counting(calls)
    rows(parts, kind, content="0")
    rows(parts, kind, content="new")
    assert len(list(place.glob("*.arrow"))) == 2 and not calls


def test_a_run_is_the_same_with_and_without(tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = tiny.spec(tmp_path, epochs=2)
    results = [train(spec, tmp_path / name).test for name in ("first", "again")]
    monkeypatch.setenv(CACHE_VARIABLE, "off")
    assert results == [train(spec, tmp_path / "off").test] * 2


def test_a_tokenizer_is_what_it_does_not_what_it_did(parts: tuple[Any, Any], place: Path) -> None:
    """A call that cuts and pads leaves its settings in the tokenizer; they are no part of its identity."""
    rows(parts, content="before")
    tokenizer, _ = parts
    for settings in ({"truncation": True, "max_length": 5}, {"padding": "max_length", "max_length": 9}):
        tokenizer(["a b c"], **settings)
        rows(parts, content="before")
    assert len(list(place.glob("*.arrow"))) == 1


def test_who_comes_second_waits_and_finds_the_rows(parts: tuple[Any, Any], place: Path) -> None:
    """Workers that begin a task at once tokenise it once."""
    calls, inside, begun = [], threading.Barrier(2), threading.Barrier(2)

    def encode(*arguments: Any) -> EncodedRows:
        calls.append(arguments)
        with contextlib.suppress(threading.BrokenBarrierError):
            inside.wait(timeout=1)  # there is nobody else
        return CLASSIFICATION.encode(*arguments)

    def worker() -> list[Any]:
        begun.wait()
        return list(rows(parts, replace(CLASSIFICATION, encode=encode)).rows)

    with ThreadPoolExecutor(2) as pool:
        first, second = [pool.submit(worker) for _ in range(2)]
        assert first.result() == second.result()
    assert len(calls) == 1 and inside.broken


def test_files_of_others_stay(parts: tuple[Any, Any], place: Path) -> None:
    """The folder may be anyone's: what is old and hidden, or in Arrow, but not ours, is not touched."""
    place.mkdir()
    others = [place / name for name in (".bashrc", ".env", "table.arrow")]
    ours = place / f"{token_cache.TEMPORARY_PREFIX}half"
    for path in (*others, ours):
        path.touch()
        os.utime(path, (0, 0))
    rows(parts)
    assert all(path.exists() for path in others) and not ours.exists()
