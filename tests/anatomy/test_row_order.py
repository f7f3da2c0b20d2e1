"""`rows` refuses modules whose hidden states are not in the order of the batch's rows, and runs all others right."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel, PreTrainedModel

import deltune
from runtime.identity import specimens
from tables.families import FAMILIES
from tables.specimens import specimen

MOE = {
    "vocab_size": 64, "d_model": 32, "num_heads": 4, "num_experts": 2, "expert_capacity": 64,
}  # fmt: skip
ENCODER_DECODER = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "xlnet": {"vocab_size": 64, "d_model": 32, "n_layer": 1, "n_head": 4, "d_inner": 64},
    "fsmt": {**ENCODER_DECODER, "langs": ["en", "de"], "src_vocab_size": 64, "tgt_vocab_size": 64},
    "longformer": {
        "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64,
        "attention_window": 4, "max_position_embeddings": 32,
    },
    "nllb-moe": {
        **MOE, **ENCODER_DECODER, "encoder_sparse_step": 1, "decoder_sparse_step": 1, "router_dtype": "float32",
        "moe_eval_capacity_token_fraction": -1.0,
    },
    "switch_transformers": {
        **MOE, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_decoder_layers": 1, "num_sparse_encoder_layers": 1,
        "num_sparse_decoder_layers": 1,
    },
    "xmod": {
        "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64,
        "max_position_embeddings": 32, "pad_token_id": 1, "languages": ["en_XX"], "default_language": "en_XX",
    },
}  # fmt: skip

REFUSED = [
    ("xlnet", "layernorm", r"layer\.0\.rel_attn\.layer_norm"),
    ("xlnet", "bitfit", r"layer\.0\.rel_attn\.layer_norm"),
    ("xlnet", "lora(rank=2, at='*.layer_1')", r"layer\.0\.ff\.layer_1"),
    ("fsmt", "layernorm", r"encoder\.layers\.0\.self_attn_layer_norm"),
    ("fsmt", "bitfit", r"encoder\.layers\.0\.self_attn\.k_proj"),
    ("fsmt", "lora(rank=2)", r"encoder\.layers\.0\.self_attn\.v_proj"),
    ("longformer", "lora(rank=2)", r"encoder\.layer\.0\.attention\.self\.query"),
    ("nllb-moe", "bitfit", r"encoder\.layers\.0\.ffn\.experts\.expert_0\.fc1"),
    ("nllb-moe", "lora(rank=2, at='*decoder*expert_1.fc2')", r"decoder\.layers\.0\.ffn\.experts\.expert_1\.fc2"),
    ("switch_transformers", "lora(rank=2, at='encoder*expert_0.wi')", r"encoder\.block\.0.*expert_0\.wi"),
]
IN_ORDER = [
    ("longformer", "layernorm"),
    ("nllb-moe", "layernorm"),
    ("nllb-moe", "lora(rank=2)"),
    ("switch_transformers", "layernorm"),
    ("switch_transformers", "lora(rank=2)"),
    ("xmod", "lora(rank=2, at='*adapter_modules*dense1')"),
]
"""Other modules of the same models, and adapters of X-MOD, which take the whole rows in their language."""


def model_of(name: str) -> PreTrainedModel:
    config = AutoConfig.for_model(name, **CONFIGS[name])
    for key, value in config.to_dict().items():
        if isinstance(value, float) and ("drop" in key or "jitter" in key):
            setattr(config, key, 0.0)
    torch.manual_seed(0)
    return AutoModel.from_config(config).requires_grad_(False).eval()  # type: ignore[no-any-return]


def inputs_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = {"input_ids": torch.randint(5, 64, (2, 8), generator=generator)}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.randint(5, 64, (2, 5), generator=generator)
    return inputs


def attach_two(model: PreTrainedModel, method: str) -> deltune.Tuned:
    for name in ("one", "two"):
        tuned = deltune.attach(model, method, name=name, head="freeze")
        specimens.move(tuned)
        with torch.no_grad():  # the two differ
            for parameter in tuned.trainable_parameters():
                parameter.mul_(1.0 if name == "one" else -1.5)
    return tuned


def states(model: PreTrainedModel, inputs: Mapping[str, Any], rows: slice) -> torch.Tensor:
    with torch.no_grad():
        output = model(**{name: value[rows] for name, value in inputs.items()})
    return next(t for t in output.values() if isinstance(t, torch.Tensor) and t.is_floating_point() and t.dim() > 1)


def largest_difference(tuned: deltune.Tuned, inputs: Mapping[str, Any]) -> float:
    """By how much rows of a mixed batch differ from those rows alone, relative to the largest value."""
    alone = [states(tuned.use(name).model, inputs, slice(i, i + 1))[0] for i, name in enumerate(("one", "two"))]
    with tuned.rows(["one", "two"]):
        mixed = states(tuned.model, inputs, slice(None))
    errors = [(mixed[i] - expected).abs().max().item() for i, expected in enumerate(alone)]
    return max(errors) / max(expected.abs().max().item() for expected in alone)


@pytest.mark.parametrize(("name", "method", "module"), REFUSED)
def test_what_is_not_in_the_order_of_the_rows_is_refused(name: str, method: str, module: str) -> None:
    model = model_of(name)
    tuned = attach_two(model, method)
    with pytest.raises(deltune.DeltuneError, match=rf"changes {module}.*order of the batch's rows"):
        largest_difference(tuned, inputs_of(model))


@pytest.mark.parametrize(("name", "method"), IN_ORDER)
def test_other_modules_of_such_models_run_by_row(name: str, method: str) -> None:
    model = model_of(name)
    assert largest_difference(attach_two(model, method), inputs_of(model)) < 1e-4


@pytest.mark.parametrize("name", [family.name for family in FAMILIES.values() if family.interface])
def test_usual_transformers_have_every_module_in_order(name: str) -> None:
    anatomy = deltune.inspect(specimen(name))
    assert anatomy.not_by_row == ()


def test_paths_of_another_tower_begin_with_its_path() -> None:
    anatomy = deltune.inspect(model_of("xlnet"))
    assert anatomy.with_prefix("text_model").not_by_row == tuple(f"text_model.{path}" for path in anatomy.not_by_row)


FIRST = {entry.model_type: entry for entry in reversed(specimens.entries())}
"""A class of each family."""


@pytest.mark.slow
@pytest.mark.parametrize("entry", FIRST.values(), ids=str)
def test_every_family_is_refused_or_right(entry: specimens.Entry) -> None:
    try:
        model = specimens.build(entry)
        inputs = specimens.batch(entry, model, padding=None)
        base = states(model, inputs, slice(None))
    except Exception as error:  # tests/runtime/identity has a law on which classes can be built and run
        pytest.skip(f"it cannot be built and run here: {type(error).__name__}")
    alone = [states(model, inputs, slice(i, i + 1))[0] for i in range(2)]
    if max((base[i] - row).abs().max().item() for i, row in enumerate(alone)) > 1e-4:
        pytest.skip("its rows depend on each other without a delta as well")
    tried = 0
    for method in ("layernorm", "bitfit", "lora(rank=2)"):
        try:
            tuned = attach_two(model, method)
        except deltune.DeltuneError:
            continue  # the model has no such modules
        try:
            assert largest_difference(tuned, inputs) < 1e-3, method
        except deltune.DeltuneError as error:
            assert "in one batch" in str(error) or "rows() was given 2 names" in str(error), method
        tried += 1
        tuned.detach()
    if not tried:
        pytest.skip("no delta of these can be had on it")
