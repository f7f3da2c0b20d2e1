"""What the runs of one process share is read once, and each run is the same as if it had read everything itself."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import BartConfig, BartForConditionalGeneration

import tiny
from deltune.models import WeightsCache, load_model
from deltune.train.run import train
from deltune.train.setup import ModelCache

LAYERS = {"layers": 1, "attention_heads": 4, "ffn_dim": 32}


def test_a_head_of_another_seed_is_built_around_the_same_weights(tmp_path: Path) -> None:
    place, parts = str(tiny.model(tmp_path / "model")), ModelCache()
    for seed in (0, 1, 0, 2):
        state = parts.model(place, "classification", ("a", "b", "c"), seed).state_dict()
        expected = load_model(place, "classification", ("a", "b", "c"), "float32", seed).state_dict()
        assert state.keys() == expected.keys() and all(torch.equal(state[key], expected[key]) for key in expected)
    assert parts.read["models"] == 1
    parts.model(place, "tagging", ("a", "b"), 0)
    assert parts.read["models"] == 2


def test_what_is_built_around_kept_weights_is_what_the_files_say(tmp_path: Path) -> None:
    """Its name, which stands in deltas, and how it generates, which no weight tells."""
    sizes = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in LAYERS.items()}
    made = BartForConditionalGeneration(BartConfig(d_model=32, vocab_size=50, max_position_embeddings=64, **sizes))
    made.generation_config.update(num_beams=7, forced_bos_token_id=5, no_repeat_ngram_size=3)
    made.save_pretrained(tmp_path)
    kept = WeightsCache()
    one, two = (load_model(str(tmp_path), "seq2seq-lm", cache=kept) for _ in range(2))
    assert one is not two and two.name_or_path == two.config.name_or_path == str(tmp_path)
    assert two.generation_config.to_dict() == one.generation_config.to_dict()
    assert two.generation_config.num_beams == 7 and two.generation_config is not one.generation_config


def test_runs_that_share_are_the_runs_alone(tmp_path: Path) -> None:
    """Several methods and seeds one after the other, full tuning among them: the same numbers, everything read once."""
    parts = ModelCache()
    for method in ("full", "lora(rank=2)", "prefix(length=3) + layernorm", "bitfit", "head"):
        for seed in (0, 1):
            spec = tiny.spec(tmp_path, method=method, epochs=1, seed=seed)
            shared = train(spec, tmp_path / f"{method}-{seed}", cache=parts)
            if method in ("lora(rank=2)", "bitfit"):
                assert shared.test == train(spec, tmp_path / f"{method}-{seed}-alone").test
    assert parts.read == {"models": 1, "data": 1}
