"""Training on real images: scikit-learn's digits, a ViT, and transformers' Trainer."""

from __future__ import annotations

import pytest
import torch

import deltune
from benchmarks import digits


@pytest.mark.slow
def test_a_vit_learns_digits_that_it_has_not_seen() -> None:
    """LoRA and layernorm learn what the head alone cannot, and the base is what it was."""
    base, accuracy = digits.pretrained(digits.WRITTEN, seed=0, epochs=30)
    assert accuracy > 0.95
    before = {name: value.clone() for name, value in base.state_dict().items()}
    head, none = digits.tune(digits.WRITTEN, base, "head", seed=0, epochs=15)
    both, count = digits.tune(digits.WRITTEN, base, "lora(rank=4) + layernorm", seed=0, epochs=15)
    assert none == 0 and count == 4 * 2 * 4 * (64 + 64) + 9 * 2 * 64  # query and value of 4 layers; 9 norms
    assert both > 0.85 and both > head + 0.15
    assert all(torch.equal(value, before[name]) for name, value in base.state_dict().items())


def test_a_step_on_images() -> None:
    """Every method of the table attaches to the ViT, and a step on real images changes its answers to them."""
    rows, _ = digits.WRITTEN.rows(5)
    batch = {"pixel_values": rows[:8]["pixel_values"], "labels": rows[:8]["labels"]}
    for method in digits.METHODS:
        torch.manual_seed(0)
        model = digits.small_vit()
        tuned = deltune.attach(model, method)
        outputs = model(**batch)
        outputs.loss.backward()
        torch.optim.AdamW(tuned.trainable_parameters(), lr=1e-2).step()
        assert not torch.allclose(model(**batch).logits, outputs.logits, atol=1e-4), method
