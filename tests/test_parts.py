"""What runs of one process share: read once, given out bare, and the same as if each had read its own."""

from __future__ import annotations

from pathlib import Path

import torch

import tiny
from deltune.runs.parts import Parts
from deltune.runs.train import train
from deltune.sources.models import load_model


def test_a_head_of_another_seed_is_built_around_the_same_weights(tmp_path: Path) -> None:
    place, parts = str(tiny.model(tmp_path / "model")), Parts()
    for seed in (0, 1, 0, 2):
        found = parts.model(place, "classification", ("a", "b", "c"), seed).state_dict()
        wanted = load_model(place, "classification", ("a", "b", "c"), "float32", seed).state_dict()
        assert found.keys() == wanted.keys() and all(torch.equal(found[key], wanted[key]) for key in wanted)
    assert parts.read["models"] == 1
    parts.model(place, "tagging", ("a", "b"), 0)
    assert parts.read["models"] == 2


def test_runs_that_share_are_the_runs_alone(tmp_path: Path) -> None:
    """Several methods and seeds one after the other, full tuning among them: the same numbers, everything read once."""
    parts = Parts()
    for method in ("full", "lora(rank=2)", "prefix(length=3) + layernorm", "bitfit", "head"):
        for seed in (0, 1):
            spec = tiny.spec(tmp_path, method=method, epochs=1, seed=seed)
            shared = train(spec, tmp_path / f"{method}-{seed}", parts=parts)
            if method in ("lora(rank=2)", "bitfit"):
                assert shared["test"] == train(spec, tmp_path / f"{method}-{seed}-alone")["test"]
    assert parts.read == {"models": 1, "data": 1}
