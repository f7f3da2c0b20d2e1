"""What `make dist` builds, installed from the registry into empty environments: the core alone, with its extras, and
under other versions of Python and of libraries than the pinned ones."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # a minute for each environment, most of it downloads

ROOT = Path(__file__).parents[2]

CORE_SCRIPT = """
import sys, tempfile
import torch
from transformers import BertConfig, BertForSequenceClassification
import deltune

config = BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=50)
model = BertForSequenceClassification(config).eval()
ids = torch.arange(12).view(2, 6)
before = model(ids).logits
tuned = deltune.attach(model, "prefix(length=4) + lora(rank=2) + layernorm")
optimizer = torch.optim.AdamW(tuned.trainable_parameters(), lr=0.1)
model(ids, labels=torch.tensor([0, 1])).loss.backward()
optimizer.step()
after = model(ids).logits
assert not torch.equal(before, after)
with tempfile.TemporaryDirectory() as folder:
    tuned.save(folder)
    tuned.detach()
    assert torch.equal(model(ids).logits, before)
    deltune.load(model, folder)
assert torch.equal(model(ids).logits, after)
unwanted = {"datasets", "sklearn", "scipy", "pyarrow", "matplotlib"} & set(sys.modules)
assert not unwanted, unwanted
print(deltune.__version__, deltune.count(model.config, "lora"))
"""


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command outside of the checkout, without its sources on the path."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


def run_or_fail(*command: str | Path, cwd: Path) -> str:
    done = run(*command, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    run_or_fail(sys.executable, "-m", "build", "--quiet", "--outdir", folder, ROOT, cwd=folder)
    files = sorted(folder.iterdir())
    assert [path.suffix for path in files] == [".whl", ".gz"]
    run_or_fail(sys.executable, "-m", "twine", "check", "--strict", *files, cwd=folder)
    return files[0]


CONSTRAINTS = ROOT / "constraints.txt"
PINNED = dict(re.findall(r"^([^#=]+)==(.*)$", CONSTRAINTS.read_text(encoding="utf-8"), re.MULTILINE))


def installer(folder: Path, python: str, **others: str) -> tuple[Path, tuple[str | Path, ...]]:
    """Make an environment with torch in it; its `bin`, and the command that installs more, pinned but for `others`."""
    run_or_fail(python, "-m", "venv", folder, cwd=folder.parent)
    pip = (folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    pins = PINNED | others
    run_or_fail(*pip, f"torch=={pins['torch']}", cwd=folder)  # first and alone, as in the Makefile
    lines = [f"{name}=={version}" for name, version in pins.items()]
    (folder / "constraints.txt").write_text("\n".join(lines), encoding="utf-8")
    return folder / "bin", (*pip, "-c", folder / "constraints.txt")


def test_the_core_alone_and_then_its_extras(
    wheel: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    commands, pip = installer(tmp_path_factory.mktemp("environment") / "venv", sys.executable)
    run_or_fail(*pip, wheel, cwd=tmp_path)
    python, deltune = commands / "python", commands / "deltune"
    assert run_or_fail(python, "-c", CORE_SCRIPT, cwd=tmp_path).startswith("0.1.0 ")

    # Commands say which extra they need.
    train = run(deltune, "train", "--model", "m", "--data", "d", "--method", "lora", "--output", "o", cwd=tmp_path)
    assert train.returncode == 2, train.stderr
    assert "pip install 'deltune[train]'" in train.stderr
    study = run(deltune, "study", "list", cwd=tmp_path)
    assert study.returncode == 2, study.stderr
    assert "pip install 'deltune[studies]'" in study.stderr
    assert list(tmp_path.iterdir()) == []

    run_or_fail(*pip, f"{wheel}[demo]", cwd=tmp_path)
    assert "test accuracy: probe 0.7" in run_or_fail(deltune, "quickstart", cwd=tmp_path)


def version_of(python: str) -> str | None:
    """The version of an interpreter on the PATH; None where there is none, or a shim that runs nothing."""
    if shutil.which(python) is None:
        return None
    done = run(python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])", cwd=ROOT)
    return done.stdout.strip() if done.returncode == 0 else None


ENDS = os.environ.get("DELTUNE_ENDS", "").split()
"""`make test-ends ENDS="python3.13 python3.13@torch=2.15.0,peft=0.22.0"`: interpreters, with what is not pinned.
The Makefile has the oldest torch and transformers, and the pinned ones, where none are given."""

LAWS = (
    "tests/anatomy/test_anatomy.py", "tests/runtime/test_equivalences.py", "tests/runtime/test_prefix_equation.py",
    "tests/runtime/test_threads.py", "tests/runtime/test_token_positions.py", "tests/runtime/test_sharded.py",
    "tests/runtime/test_rest_of_life.py::test_compiled", "tests/runtime/test_rest_of_life.py::test_exported",
    "tests/train/test_devices.py", "tests/train/test_kinds.py::test_the_loss_of_a_step_is_that_of_its_rows",
)  # fmt: skip
"""Families, formulas, kernels, threads, checkpointing, shards, torch.compile, torch.export and losses of steps: what
another Python, torch or transformers may change."""
PEERS = {"peft": "tests/interop/test_peft.py", "trl": "tests/whole/test_trl.py"}
"""What another version of these may change."""


@pytest.mark.parametrize("end", ENDS or ["python3.12", "python3.13", "python3.14"])
def test_another_python_or_torch(end: str, wheel: Path, tmp_path: Path) -> None:
    """The wheel and a handful of laws, with the pinned versions of everything else."""
    python, _, listed = end.partition("@")
    others = dict(pin.split("=") for pin in listed.split(",") if pin)
    version = version_of(python)
    if version is None and not ENDS:
        pytest.skip(f"no {python} on the PATH; name one: make test-ends ENDS=…")
    assert version is not None, f"{python} does not run"
    commands, pip = installer(tmp_path / "venv", python, **others)
    run_or_fail(*pip, wheel, cwd=tmp_path)
    assert run_or_fail(commands / "python", "-c", CORE_SCRIPT, cwd=tmp_path).startswith("0.1.0 ")
    run_or_fail(*pip, f"{wheel}[demo]", "pytest", "hypothesis", *others, cwd=tmp_path)
    laws = (*LAWS, *(tests for name, tests in PEERS.items() if name in others))
    options = ("-q", "-m", "not slow", "-p", "no:cacheprovider", "--basetemp", tmp_path / "basetemp")
    print(version, listed, run_or_fail(commands / "python", "-m", "pytest", *options, *laws, cwd=ROOT))
