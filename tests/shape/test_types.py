"""What pyright says of a user's script; `make lint` has mypy check the same file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow  # it reads all of transformers: half a minute on a free core
def test_pyright_reports_the_mistakes_in_a_users_script_and_no_others() -> None:
    """It resolves the lazy exports. A comment `type: ignore` without a mistake is an error, as for mypy."""
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "tests/shape/user_script.py"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
