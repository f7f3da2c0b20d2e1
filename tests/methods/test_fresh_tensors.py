"""The tensors of a fresh delta are drawn as the papers and their released code say."""

from __future__ import annotations

import math

import pytest
import torch

import deltune
from tables.families import FAMILIES
from tables.specimens import build

BERT, LORA = {"down": ("normal", 0.02), "up": 0.0}, {"down": ("uniform", 32**-0.5), "up": 0.0}
"""BERT's: N(0, 0.02) and zeros; LoRA's: Kaiming's uniform draw of a = √5 is ±1 / √(inputs), and zeros."""

DRAWN: dict[str, dict[str, float | tuple[str, float]]] = {
    "adapter(rank=4, bias=True)": BERT | {"down_bias": 0.0, "up_bias": 0.0},
    "parallel_adapter(rank=4)": BERT,
    "scaled_parallel_adapter(rank=4, scale='learned(4)')": LORA | {"scale": 4.0},
    "multi_head_parallel_adapter(length=3)": {"keys": ("normal", 0.02), "values": 0.0},
    "prefix(length=3)": {"keys": ("normal", 0.02), "values": ("normal", 0.02)},
    # an embedding and two linears as torch makes them, the second one of 8 inputs
    "prefix(length=3, reparameterise=8)": {
        "rows": ("normal", 1.0), "down": ("uniform", 32**-0.5), "down_bias": ("uniform", 32**-0.5),
        "up": ("uniform", 8**-0.5), "up_bias": ("uniform", 8**-0.5),
    },
    "prompt(length=3)": {"rows": ("normal", 0.02)},
    "lora(rank=2)": LORA,
    "ia3": {"gain": 1.0},
    "three_vectors": {"gain": 1.0, "bias": 0.0},
    "ssf": {"gain": 1.0, "vector": 0.0},
    "vblora(rank=4, vectors=10, length=8)": {"bank": ("uniform", 0.02)},
    "unilora(rank=4, length=50)": {"theta": ("uniform", 0.02)},
    "ladder(width=8, heads=2)": {
        "attention_norm": 1.0, "ffn_norm": 1.0, "last_norm": 1.0, "alpha": 0.0, "up": 0.0,
        "first": ("uniform", 32**-0.5), "down": ("uniform", 32**-0.5), "projections": ("uniform", 8**-0.5),
        "widen": ("uniform", 8**-0.5), "narrow": ("uniform", 32**-0.5),
    },
}  # fmt: skip
"""Method -> our tensors: a constant, or the standard deviation of a normal or the bound of a uniform distribution."""


@pytest.mark.parametrize("method", DRAWN)
def test_fresh_tensors(method: str) -> None:
    model = build(FAMILIES["bert"], "sequence")
    torch.manual_seed(0)
    delta = deltune.attach(model, method).delta()
    drawn: dict[str, list[torch.Tensor]] = {}
    for name, parameter in delta.named_parameters():
        drawn.setdefault(name.rpartition(".")[2], []).append(parameter.detach().flatten())
    for name, expected in DRAWN[method].items():
        values = torch.cat(drawn[name])
        if isinstance(expected, float):
            assert (values == expected).all(), name
            continue
        kind, size = expected
        deviation = size if kind == "normal" else size / 3**0.5
        noise = len(values) ** -0.5  # four standard deviations of the mean, and more than that of the spread
        assert abs(values.mean()) < 4 * noise * deviation, name
        assert abs(math.log(values.square().mean().sqrt() / deviation)) < 4 * noise, name
        if kind == "uniform":
            assert values.abs().max() <= size, name
