"""What `make dist` builds, installed from the registry into empty environments: the core alone, and with its extras."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
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


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of an environment that holds the wheel and nothing but what it asks for."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder / "venv", with_pip=True)
    pip = (folder / "venv" / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    constraints = ROOT / "constraints.txt"
    torch = re.search(r"^torch==.*$", constraints.read_text(encoding="utf-8"), re.MULTILINE)
    assert torch is not None
    run_or_fail(*pip, torch.group(), cwd=folder)  # first and alone, as in the Makefile
    run_or_fail(*pip, wheel, "-c", constraints, cwd=folder)
    return folder / "venv" / "bin"


def test_the_core_alone_and_then_its_extras(environment: Path, wheel: Path, tmp_path: Path) -> None:
    python, deltune = environment / "python", environment / "deltune"
    assert run_or_fail(python, "-c", CORE_SCRIPT, cwd=tmp_path).startswith("0.1.0 ")

    # Commands say which extra they need.
    train = run(deltune, "train", "--model", "m", "--data", "d", "--method", "lora", "--output", "o", cwd=tmp_path)
    assert train.returncode == 2, train.stderr
    assert "pip install 'deltune[cli]'" in train.stderr
    study = run(deltune, "study", "list", cwd=tmp_path)
    assert study.returncode == 2, study.stderr
    assert "pip install 'deltune[studies]'" in study.stderr
    assert list(tmp_path.iterdir()) == []

    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", ROOT / "constraints.txt")
    run_or_fail(*pip, f"{wheel}[demo]", cwd=tmp_path)
    assert "prefix(length=16) + layernorm" in run_or_fail(deltune, "quickstart", cwd=tmp_path)
