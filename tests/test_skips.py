"""What tests are skipped for want of is said at the end, and fails where it is required."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import pytest

@pytest.mark.skipif(True, reason="no Chromium: none of these is on the PATH")
def test_mark(): ...

def test_call():
    pytest.skip("no Chromium: none of these is on the PATH")

def test_import():
    pytest.importorskip("no_such_library")

@pytest.mark.skip("it has no case here")
def test_other(): ...

def test_it(): ...
"""


@pytest.mark.parametrize(("required", "workers"), [("", "2"), ("Java", "0"), ("Chromium", "0"), ("Chromium", "2")])
def test_what_was_missing_stands_above_the_last_line(required: str, workers: str, tmp_path: Path) -> None:
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
    (tmp_path / "test_some.py").write_text(TESTS, encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-ra",
        "-n",
        workers,
        "-c",
        os.devnull,
        "--rootdir",
        tmp_path,
        tmp_path,
    ]
    ran = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "DELTUNE_REQUIRED": required, "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
    )
    lines = ran.stdout.strip().splitlines()
    browser = "" if required == "Chromium" else "Chromium (2), "
    assert lines[-2] == f"skipped for want of: {browser}no_such_library (1)"
    assert (ran.returncode != 0) == (required == "Chromium") == ("there is no Chromium here" in ran.stdout)
    counts = "1 failed, 1 passed, 2 skipped, 1 error" if required == "Chromium" else "1 passed, 4 skipped"
    assert lines[-1].startswith(counts)
