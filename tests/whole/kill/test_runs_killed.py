"""A run that is killed again and again has in the end the results of an undisturbed run."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

import tiny
from processes import Started
from test_templates import END, PAD, byte_tokenizer

from .strikes import Strike, chance, content, train, whole

ROWS, OTHERS = 32, 12


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model and tiny data."""
    folder = tmp_path_factory.mktemp("kill")
    tiny.model(folder / "model")
    tiny.data(folder / "data", ROWS, OTHERS)
    tokenizer = byte_tokenizer(eos_token="<|end|>")
    sizes = {**tiny.FAMILIES["llama"], "max_position_embeddings": 256, "pad_token_id": PAD}
    config = AutoConfig.for_model("llama", **sizes, vocab_size=len(tokenizer), eos_token_id=END)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "decoder")
    tokenizer.save_pretrained(folder / "decoder")
    texts = [row["text"] for row in tiny.sentences(16, 0)]
    for split, part in (("train", texts[:12]), ("validation", texts[12:])):
        tiny.lines(
            folder / "pairs" / f"{split}.jsonl", [{"prompt": "a", "chosen": t, "rejected": t[::-1]} for t in part]
        )
        for name, step in (("chats", 1), ("others", -1)):
            chats = [{"prompt": f"{name} {text[:9]}", "completion": text[::step]} for text in part]
            tiny.lines(folder / name / f"{split}.jsonl", chats)
    return folder


SPECS: dict[str, dict[str, Any]] = {
    "epochs": {"method": "prefix(length=4) + lora(rank=2, dropout=0.1)", "epochs": 2},
    "steps": {"method": "full", "steps": 6, "validate_every": 2, "patience": 9},
    "several": {"method": "lora(rank=2)", "epochs": 1, "seeds": (0, 1)},
    **{
        name: {
            "model": "{root}/decoder", "method": "lora(rank=2, dropout=0.1)", "batch_size": 4, "max_length": 256,
            "epochs": 2, "validate_every": 2, **changes,
        }
        for name, changes in {
            "packed": {"data": "{root}/chats", "packing": True},
            "mixture": {"data": "{root}/chats=0.7,{root}/others=0.3"},
            "dpo": {"data": "{root}/pairs", "objective": "dpo", "lr": 1e-2},
        }.items()
    },
}  # fmt: skip
"""Those with `validate_every` have checkpoints in the middle of an epoch."""


class Undisturbed:
    """The undisturbed run of a spec, with which others are compared."""

    def __init__(self, root: Path, name: str) -> None:
        self.spec_file = root / f"{name}.yaml"
        values = {k: v.format(root=root) if isinstance(v, str) else v for k, v in SPECS[name].items()}
        self.spec_file.write_text(tiny.spec(root, **values).yaml())
        folder = root / name
        began = time.monotonic()
        started = Started(train, folder, str(self.spec_file), str(folder))
        assert started.wait() == 0, started.printed
        self.seconds, self.content = time.monotonic() - began, content(folder)

    def start(self, folder: Path, strike: Strike | None = None) -> Started:
        return Started(train, folder, str(self.spec_file), str(folder), strike)

    def finish(self, folder: Path, what: str) -> None:
        """Run it again to its end, and compare the results."""
        started = self.start(folder)
        assert started.wait() == 0, f"{what}: {started.printed}"
        assert content(folder) == self.content, what
        whole(folder)
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def undisturbed(root: Path) -> dict[str, Undisturbed]:
    return {"epochs": Undisturbed(root, "epochs")}


def undisturbed_run(name: str, root: Path, runs: dict[str, Undisturbed]) -> Undisturbed:
    if name not in runs:
        runs[name] = Undisturbed(root, name)
    return runs[name]


@pytest.mark.parametrize(
    ("name", "kills"),
    [
        ("epochs", 3),
        *(pytest.param(name, 8, marks=pytest.mark.slow) for name in ("steps", "several")),
        *(pytest.param(name, 4, marks=pytest.mark.slow) for name in ("packed", "mixture", "dpo")),
    ],
)
def test_killed_at_random_moments(
    name: str, kills: int, root: Path, tmp_path: Path, undisturbed: dict[str, Undisturbed]
) -> None:
    """SIGKILL after a random time; about half of the runs are killed once more before they may end."""
    plain, numbers = undisturbed_run(name, root, undisturbed), chance(f"{name} {kills}")
    struck = 0
    while struck < kills:
        folder = tmp_path / f"run{struck}"
        history: list[float] = []
        while struck < kills and (not history or numbers.random() < 0.5):
            started = plain.start(folder)
            history.append(numbers.uniform(0, plain.seconds))
            time.sleep(history[-1])
            struck += started.kill()
        plain.finish(folder, f"{name}, killed after {history} seconds")


@pytest.mark.parametrize(
    ("first", "step"), [(40, 80), *(pytest.param(first, 15, marks=pytest.mark.slow) for first in (1, 6, 11))]
)
def test_killed_at_every_write(
    first: int, step: int, root: Path, tmp_path: Path, undisturbed: dict[str, Undisturbed]
) -> None:
    """SIGKILL before the n-th change of the run's folder, for every fifth n (in parts, which may run side by side)."""
    plain, folder, at = undisturbed_run("epochs", root, undisturbed), tmp_path / "run", first
    while plain.start(folder, Strike(str(folder), at)).wait():
        plain.finish(folder, f"killed before change {at}")
        at += step
    assert at > first + step, "the run has more changes than that"


@pytest.mark.parametrize("times", [1, pytest.param(10, marks=pytest.mark.slow)])
def test_two_processes_at_one_folder(
    times: int, root: Path, tmp_path: Path, undisturbed: dict[str, Undisturbed]
) -> None:
    """One of them does the run; the other refuses, or comes when it is done and has nothing to do."""
    plain, numbers = undisturbed_run("epochs", root, undisturbed), chance("two")
    for i in range(times):
        folder = tmp_path / f"run{i}"
        one = plain.start(folder)
        time.sleep(numbers.choice([0.0, numbers.uniform(0, plain.seconds)]))
        both = [one, plain.start(folder)]
        codes = sorted(started.wait() for started in both)
        assert codes in ([0, 0], [0, 2]), [started.printed for started in both]
        refusals = [started.printed for started in both if started.process.exitcode == 2]
        assert all("another process is at work" in text and "Traceback" not in text for text in refusals)
        assert content(folder) == plain.content
        whole(folder)
