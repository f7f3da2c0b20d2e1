"""One command in several processes: told which they are, ended together, with the first failure's exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deltune.cli.train import launch, launch_if_requested, sharding_mode
from deltune.errors import DeltuneError


def python(code: str) -> list[str]:
    return [sys.executable, "-c", "import os, sys, time\nrank = os.environ['RANK']\n" + code]


def gone(pid: int) -> bool:
    """Within a while."""
    until = time.monotonic() + 10
    while time.monotonic() < until:
        state = Path(f"/proc/{pid}/stat")
        if not state.exists() or state.read_text().split()[2] == "Z":
            return True
        time.sleep(0.05)
    return False


def test_each_is_told_which_it_is(tmp_path: Path) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    code = f"import json; open(f'{tmp_path}/{{rank}}', 'w').write(json.dumps([os.environ[n] for n in {names}]))"
    assert launch(3, python(code)) == 0
    variables = [json.loads((tmp_path / str(i)).read_text()) for i in range(3)]
    assert [values[:4] for values in variables] == [[str(i), str(i), "3", "3"] for i in range(3)]
    assert len({tuple(values[4:]) for values in variables}) == 1


@pytest.mark.parametrize(
    ("end", "code"), [("sys.exit(2)", 2), ("sys.exit(7)", 7), ("os.kill(os.getpid(), 9)", 137)], ids=str
)
def test_one_that_fails_ends_all(
    end: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The other would go on for a minute."""
    monkeypatch.setattr("deltune.cli.train.GRACE", 0.2)
    other = f"open('{tmp_path}/pid', 'w').write(str(os.getpid()))\ntime.sleep(60)"
    wait = f"while not os.path.exists('{tmp_path}/pid'): time.sleep(0.02)"
    assert launch(2, python(f"if rank == '0':\n  {wait}\n  {end}\n{other}")) == code
    assert gone(int((tmp_path / "pid").read_text()))
    assert ("process 1 of 2 was ended by signal 9" in capfd.readouterr().err) == (code == 137)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_they_end_with_their_launcher(how: signal.Signals, tmp_path: Path) -> None:
    child = (
        "from deltune.cli.train import exit_with_launcher; exit_with_launcher(); "
        f"open(f'{tmp_path}/{{rank}}', 'w').write(str(os.getpid()))"
    )
    command = python(child + "; time.sleep(60)")
    # a shell starts its background jobs with the signal ignored, and the tests may be one
    begin = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)"
    start = f"{begin}; from deltune.cli.train import launch; sys.exit(launch(2, {command!r}))"
    launcher = subprocess.Popen([sys.executable, "-c", start], stderr=subprocess.DEVNULL)
    while not all((tmp_path / rank).exists() and (tmp_path / rank).read_text() for rank in "01"):
        assert launcher.poll() is None
        time.sleep(0.02)
    launcher.send_signal(how)
    assert launcher.wait(20) == (130 if how == signal.SIGINT else -how)
    assert all(gone(int((tmp_path / rank).read_text())) for rank in "01")


def test_what_is_launched_is_not_launched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launch_if_requested(None) is None and launch_if_requested(1) is None
    with pytest.raises(DeltuneError, match="give 1 or more"):
        launch_if_requested(0)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert launch_if_requested(None) is None and launch_if_requested(2) is None
    with pytest.raises(DeltuneError, match="--launch 3 inside 2 processes"):
        launch_if_requested(3)


def test_accelerate_says_whether_to_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (sharding_mode(None), sharding_mode("fsdp")) == ("none", "fsdp")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert sharding_mode(None) == "fsdp" and "ACCELERATE_USE_FSDP" not in os.environ
