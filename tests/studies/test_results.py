"""The file of results: claims, reading where nothing can be written, damage of every kind."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from deltune.errors import DeltuneError
from deltune.studies.jobs import store as module
from deltune.studies.jobs.store import JobRecord, ResultStore


def row(name: str, error: str | None = None, size: int = 1) -> JobRecord:
    result = None if error else {"value": name * size}
    return JobRecord(name, "run", {"a": name}, result, error, 0.5, "error" if error else None)


ROWS = [*(row(f"run{i}", size=500) for i in range(20)), row("broken", error="it broke")]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file of results of some pages, which nobody has open."""
    with ResultStore(tmp_path / "folder" / "r.jsonl") as results:
        for one in ROWS:
            results.put(one)
    return tmp_path / "folder" / "r.jsonl"


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# -- claims


def test_a_claim_is_of_one_store_and_ends_with_its_process(tmp_path: Path) -> None:
    """Killed or not; of what is not claimed no file is left."""
    file = tmp_path / "r.jsonl"
    code = (
        "import sys, time; from deltune.studies.jobs.store import ResultStore\n"
        "store = ResultStore(sys.argv[1]); print(store.claim('b'), flush=True); time.sleep(20)"
    )
    with ResultStore(file) as one, ResultStore(file) as two:
        assert one.claim("a") and one.claim("a") and not two.claim("a")
        with subprocess.Popen([sys.executable, "-c", code, str(file)], stdout=subprocess.PIPE, text=True) as other:
            assert other.stdout is not None and other.stdout.readline() == "True\n"
            assert not two.claim("b") and two.claimed_jobs() == {"a", "b"}
            other.kill()
        assert two.claimed_jobs() == {"a"} and two.claim("b")
        two.release("a")
        assert not two.claim("a"), "a claim of another store"
        one.release()
        assert two.claim("a")
        two.put(row("a"))
        assert not one.claim("a") and one.claimed_jobs() == {"b"}
        two.put(row("c", error="it broke"))
        assert not one.claim("c") and one.claim("c", again=True)
    assert not list((tmp_path / "r.claims").iterdir())


def test_an_error_does_not_replace_a_result(tmp_path: Path) -> None:
    """As of a driver that was stopped for so long that another did its work."""
    with ResultStore(tmp_path / "r.jsonl") as one, ResultStore(tmp_path / "r.jsonl") as two:
        assert one.claim("a")
        two.put(row("a"))
        one.put(row("a", error="its worker died"))
        assert two.get("a") == row("a") and not two.claim("a", again=True)
        one.put(row("b", error="once"))
        one.put(row("b", error="twice"))
        assert two.get("b") == row("b", error="twice")
        one.put(row("b"))
        assert two.get("b") == row("b")


# -- reading


def test_reading_changes_nothing(file: Path) -> None:
    before = content(file.parent)
    with ResultStore(file, read_only=True) as results:
        assert results.records() == ROWS
        with pytest.raises(DeltuneError, match="cannot be written"):
            results.put(row("new"))
    assert content(file.parent) == before


@pytest.mark.parametrize("kind", get_args(module.ErrorKind))
def test_the_kind_of_an_error_is_stored_and_not_read_from_its_message(kind: module.ErrorKind, tmp_path: Path) -> None:
    """Also where the message mentions another; a kind that was changed in the file is found by the checksum."""
    message = "it needs a: the loss is nan: training diverged"
    with ResultStore(tmp_path / "r.jsonl") as results:
        results.put(replace(row("a", error=message), error_kind=kind))
        assert results.records() == [replace(row("a", error=message), error_kind=kind)]
    changed = results.path.read_text().replace(f'"error_kind":"{kind}"', '"error_kind":"other"')
    results.path.write_text(changed)
    with pytest.warns(UserWarning, match="checksum"):
        results.path.write_text(changed + changed)
        assert not ResultStore(results.path).records()


@pytest.mark.parametrize("kind", ["mount", "folder"])
def test_a_read_only_place(kind: str, file: Path, tmp_path: Path) -> None:
    """The system's own refusal: a disk that is mounted read-only, a folder of somebody else."""
    if kind == "mount":
        mounting = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'
        around = ["unshare", "-Urm", "sh", "-c", mounting, str(file.parent)]
    else:
        file.parent.chmod(0o555)
        around = ["env"]
        if os.getuid() == 0:  # who may write everywhere
            around = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
            for folder in (tmp_path, *tmp_path.parents[:3]):
                folder.chmod(folder.stat().st_mode | 0o055)
    try:
        subprocess.run([*around, sys.executable, "-c", ""], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no right to run as another user: {error}")
    code = (
        "import sys; from deltune.studies.jobs.store import ResultStore; from deltune.errors import DeltuneError\n"
        "with ResultStore(sys.argv[1], read_only=True) as results: print(len(results.records()))\n"
        "try: ResultStore(sys.argv[1])\n"
        "except DeltuneError as error: print(str(error))"
    )
    done = subprocess.run([*around, sys.executable, "-c", code, str(file)], capture_output=True, text=True)
    file.parent.chmod(0o755)
    assert done.returncode == 0, done.stderr
    count, refusal = done.stdout.splitlines()
    assert count == str(len(ROWS)) and "cannot be written" in refusal


# -- damage


FOREIGN = {
    "text": b"no results at all" * 100,
    "a database": b"SQLite format 3\0" * 10,
    "other lines": b'{"a": 1}\n' * 100,
    "zeros": bytes(4096),
}


@pytest.mark.parametrize("read_only", [True, False], ids=["read", "written"])
@pytest.mark.parametrize("name", FOREIGN)
def test_a_file_that_is_none_of_ours(name: str, read_only: bool, file: Path) -> None:
    file.write_bytes(FOREIGN[name])
    before = content(file.parent)
    with pytest.raises(DeltuneError, match="no results file or is damaged"):
        ResultStore(file, read_only=read_only)
    assert content(file.parent) == before, "it stays as it was"


@pytest.mark.parametrize("kind", ["a bit", "a byte", "a page", "cut", "a block elsewhere"])
def test_random_damage(kind: str, file: Path) -> None:
    """An error, or rows of which each is what was put there or, with a warning, missing; nothing is written."""
    whole, known = file.read_bytes(), {one.name: one for one in ROWS}
    for seed in range(60):
        chance = random.Random(f"{kind} {seed}")
        damaged, at = bytearray(whole), chance.randrange(len(whole))
        if kind == "a bit":
            damaged[at] ^= 1 << chance.randrange(8)
        elif kind == "a byte":
            damaged[at] = chance.randrange(256)
        elif kind == "a page":
            page = at // 4096 * 4096
            damaged[page : page + 4096] = bytes(4096)
        elif kind == "cut":
            del damaged[at:]
        else:
            start = chance.randrange(len(whole) - 64)
            at = min(at, len(whole) - 64)
            damaged[at : at + 64] = whole[start : start + 64]
        file.write_bytes(damaged)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                with ResultStore(file, read_only=True) as results:
                    rows = results.records()
            except DeltuneError as error:
                assert "\n" not in str(error), f"seed {seed}"
                rows = None
        assert file.read_bytes() == damaged, f"seed {seed}"
        if rows is not None and at:
            # A last line that is cut off is as a killed process leaves it.
            if len(rows) < len(ROWS) and kind != "cut" and damaged.endswith(b"\n"):
                assert any("is corrupt" in str(w.message) for w in caught), f"seed {seed}"
            for one in rows:
                assert replace(one, seconds=0.5) == known[one.name], f"seed {seed}"
