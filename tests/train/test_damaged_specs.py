"""Specs of any values and files of any bytes: a spec that works, or a DeltuneError."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from deltune.errors import DeltuneError
from deltune.train.config import RunConfig, read_config
from fuzz.damage import mutated_bytes, mutated_json, outcome

SEEDS: tuple[dict[str, Any], ...] = (
    {"model": "minilm", "data": "owner/data", "method": "prefix(length=4) + layernorm"},
    {"model": "minilm", "task": "sick", "data_root": "folder", "method": "lora(rank=2)", "protocol": "ln_nlu"},
    {
        "model": "owner/model", "data": "owner/data", "task": "generation", "method": {"a": 1}, "seeds": [0, 1],
        "search": {"lr": ["1e-3", 1e-2], "batch_size": [8, 16]}, "template": "{source}", "metrics": ["bleu"],
        "metric_options": {"bleu": {}}, "columns": {"source": "a", "targets": "b"}, "words": {"a": "b"},
    },
    {
        "model": "m", "data": "d", "method": "bitfit", "labels": ["a", "b"], "relabel": {"a": "x", "b": "y"},
        "adam_betas": [0.9, 0.99], "report_to": ["wandb"], "batch_size": 32, "device_batch_size": 4, "epochs": 2,
        "trunk_dropout": False, "warmup": 0.1, "steps": 10, "patience": 2, "metric": "loss", "seed": 3, "lr": 0.1,
    },
)  # fmt: skip


def used(spec: RunConfig) -> None:
    """Everything that a spec can be asked; it stays what it is when written and read."""
    assert len(spec.name) == 16 and hash(spec) is not None
    again = RunConfig.model_validate(yaml.safe_load(spec.yaml()))
    assert again.name == spec.name and spec.differences(again) == []
    for single in spec.search_configs()[:5] if spec.is_series else ():
        assert not single.is_series
    outcome(lambda: spec.optim.rows_per_device(3))


def of_values(seed: int) -> None:
    chance = random.Random(seed)
    values = mutated_json(chance.choice(SEEDS), chance)
    if isinstance(values, dict) and all(isinstance(key, str) for key in values):
        outcome(lambda: used(RunConfig.model_validate(values)))


def of_text(seed: int, folder: Path) -> None:
    chance = random.Random(seed)
    path = folder / "spec.yaml"
    text = yaml.safe_dump(chance.choice(SEEDS), sort_keys=False).encode()
    path.write_bytes(mutated_bytes(text, chance))
    outcome(lambda: used(read_config(path)), folder)


@pytest.mark.parametrize("seeds", [range(150), pytest.param(range(1000, 4000), marks=pytest.mark.slow)])
def test_any_values(seeds: range) -> None:
    for seed in seeds:
        of_values(seed)


@pytest.mark.parametrize("seeds", [range(150), pytest.param(range(1000, 4000), marks=pytest.mark.slow)])
def test_any_file(seeds: range, tmp_path: Path) -> None:
    for seed in seeds:
        of_text(seed, tmp_path)


LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}, *a{i - 1}, *a{i - 1}, *a{i - 1}, *a{i - 1}, *a{i - 1}, *a{i - 1}]\n"
    for i in range(1, 10)
)
MANY = list(range(1, 31))
FOUND: dict[str, tuple[str | bytes, str]] = {
    "aliases of aliases": (LAUGHS + "model: *a9\n", "more than 20,000 values"),
    "an alias of itself": ("model: &a [*a]\n", "inside of what it stands for"),
    "merged again and again": ("a: &a {b: 1}\nc: &c {<<: [*a, *a]}\nd: {<<: *c}\nmodel: [x]\n", "name: input should"),
    "deep": ("model: " + "[" * 500 + "]" * 500, "nested too deeply"),
    "very deep": ("model: " + "[" * 50_000, "nested too deeply"),
    "large": ("model: " + "x" * 300_000, "larger than 256 KiB"),
    "a month without a name": ("model: 2020-13-45\n", "broken YAML"),
    "a number without digits": ("model: !!int ''\n", "broken YAML"),
    "no true and no false": ("model: !!bool maybe\n", "broken YAML"),
    "bytes": ("model: !!binary AAAA\ndata: d\nmethod: lora\n", "model.name: .* is no text"),
    "a long number": ("model: m\ndata: d\nmethod: lora\nepochs: " + "9" * 5000, "broken YAML"),
    "a large number": ("model: m\ndata: d\nmethod: lora\nepochs: " + "9" * 50, "epochs: .* is too large a number"),
    "a large hexadecimal number": (
        "model: m\ndata: d\nmethod: lora\nseed: 0x" + "f" * 50_000, "seed: .* is too large a number"
    ),
    "half a character": ('model: "\\uD800"\ndata: d\nmethod: lora\n', "half a character"),
    "a NUL": ('model: "a\\0"\ndata: d\nmethod: lora\n', "holds a NUL"),
    "UTF-16": ("model: m\n".encode("utf-16"), "not UTF-8"),
    "a list for a task": ("model: m\nmethod: lora\ntask: [sick]\n", "task: input should be a valid string"),
    "a list for a protocol": ("model: m\nmethod: lora\ntask: sick\nprotocol: [x]\n", "protocol: input should be"),
    "a list for a method": ("model: m\ndata: d\nmethod: [lora]\n", "method.expression: "),
    "an unknown user": ("model: m\ndata: ~nosuch/x\nmethod: lora\n", "no such user"),
    "a long name": (f"model: m\ndata: {'x' * 300}\nmethod: lora\n", "File name too long"),
    "too many tries": (
        f"model: m\ndata: d\nmethod: lora\nsearch: {{epochs: {MANY}, steps: {MANY}, batch_size: {MANY}}}\n",
        "27,000 combinations",
    ),
    "rates that no optimiser takes": ("model: m\ndata: d\nmethod: lora\nadam_betas: [2, .nan]\n", "adam_betas"),
    "an option of another kind": (
        "model: m\ndata: d\nmethod: lora\nmetric_options: {bertscore: {model: [x], idf: 1}}\n",
        r"bertscore\.model: .* is not of the kind",
    ),
    "a negative seed among several": ("model: m\ndata: d\nmethod: lora\nseeds: [0, -1]\n", "seeds.1"),
}  # fmt: skip
"""What was a traceback, or took a minute, once: a file, and what is said of it now."""


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found(name: str, tmp_path: Path) -> None:
    text, expected = FOUND[name]
    (tmp_path / "spec.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    began = time.process_time()
    with pytest.raises(DeltuneError, match=expected) as caught:
        read_config(tmp_path / "spec.yaml")
    assert len(str(caught.value)) < 3000, "a message shows the beginning and the end of a value"
    assert time.process_time() - began < 20, "a hundredth of what it took"


def test_many_rows_that_do_not_add_up() -> None:
    """The list of what would fit ends."""
    spec = RunConfig.from_flat(model="m", data="d", method="lora", batch_size=2**31 - 1, device_batch_size=2)
    with pytest.raises(DeltuneError, match="no multiple"):
        spec.optim.rows_per_device(3)
