"""Tiny configurations of transformers' families, made by generic means: every configuration class gets small values for
the attributes that it has, and a table of overrides, written down from the families' own sources, says the rest."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

LENGTH = 64  # positions

_SMALL: tuple[tuple[int, str], ...] = (
    (32, """hidden_size d_model n_embd dim emb_dim n_embed word_embed_proj_dim embed_dim encoder_hidden_size
        decoder_hidden_size attention_hidden_size cross_attention_hidden_size hidden_channels router_hidden_size
        pronunciation_embed_dim shape_embed_dim backbone_hidden_size"""),
    (2, """num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers
        num_decoder_layers num_key_value_heads n_head_kv num_kv_heads attention_num_key_value_heads
        num_experts_per_tok moe_topk num_experts_per_token moe_k top_k_experts encoder_num_hidden_layers
        decoder_num_hidden_layers swa_num_key_value_heads l_layers x_layers r_layers linear_num_key_heads mamba_n_groups
        zero_expert_num index_n_heads o_groups"""),
    (4, """num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads
        encoder_num_attention_heads decoder_num_attention_heads num_experts num_local_experts n_routed_experts
        moe_num_experts sliding_window attention_window local_attention swa_num_attention_heads mamba_n_heads
        linear_num_value_heads linear_num_heads index_topk mamba_num_heads adapter_rank"""),
    (8, """head_dim d_kv d_head qk_rope_head_dim qk_nope_head_dim v_head_dim attention_head_dim global_head_dim
        swa_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim d_rel index_head_dim mamba_d_state
        dim_head vocab_size_per_layer_input hidden_size_per_layer_input laurel_rank num_qa_labels num_hash_buckets
        mamba_chunk_size"""),
    (16, "embedding_size q_lora_rank kv_lora_rank o_lora_rank mamba_head_dim ssm_state_size chunk_size"),
    (64, """intermediate_size d_ff ffn_dim d_inner hidden_dim n_inner encoder_ffn_dim decoder_ffn_dim ffn_hidden_size
        ffn_intermediate_size dff dim_ff feed_forward_size"""),
    (24, """moe_intermediate_size expert_ffn_hidden_size shared_expert_intermediate_size expert_dim
        shared_intermediate_size moe_shared_expert_intermediate_size"""),
    (1, "n_shared_experts num_shared_experts n_group topk_group moe_num_shared_experts first_k_dense_replace"),
    (99, """vocab_size entity_vocab_size decoder_vocab_size encoder_vocab_size src_vocab_size tgt_vocab_size
        vocab_size_per_layer_input pronunciation_vocab_size shape_vocab_size"""),
    (LENGTH, """max_position_embeddings n_positions max_source_positions max_target_positions max_sequence_length
        max_seq_len n_ctx original_max_position_embeddings initial_context_length max_encoder_position_embeddings
        max_decoder_position_embeddings rel_extent mamba_d_ssm"""),
)  # fmt: skip
SIZES: dict[str, int] = {name: size for size, names in _SMALL for name in names.split()}

TOKENS = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}

_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1}
_GATED_LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
_NO_GROUPS = {"num_key_value_heads": 4}  # as many heads of keys as of queries is all that the family has

OVERRIDES: dict[str, Mapping[str, Any]] = {
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "big_bird": {"attention_type": "original_full"},  # otherwise the first short input changes it for good
    "bigbird_pegasus": {"attention_type": "original_full"},
    "bros": {"hidden_size": 64},
    "canine": {"local_transformer_stride": 8, "num_hash_buckets": 64},
    "codegen": {"rotary_dim": 4},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
            "full_attention": None,
        },
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots3_note_text": _NO_GROUPS,
    "esmc": _NO_GROUPS,
    "gemma3n_text": {
        "num_hidden_layers": 4, "num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.0, 0.0, 0.0, 0.0],
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "intermediate_size": [64] * 4,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 4},
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lilt": {"hidden_size": 48, "max_2d_position_embeddings": 1024},
    "layoutlmv3": {"coordinate_size": 5, "shape_size": 6, "input_size": 32},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 2},
    "markuplm": {"xpath_unit_hidden_size": 8, "max_depth": 5},
    "musicgen_decoder": {"num_codebooks": 1},
    "musicgen_melody_decoder": {"num_codebooks": 1},
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "mlp"], "mamba_head_dim": 16, "n_groups": 2},
    "neomme": {"head_dim": 16},
    "perceiver": {
        "d_latents": 32, "num_latents": 8, "num_self_attends_per_block": 2, "num_self_attention_heads": 4,
        "num_cross_attention_heads": 4,
    },
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_5_moe_text": {"layer_types": ["linear_attention", "full_attention"]},
    "recurrent_gemma": {"num_hidden_layers": 3, "lru_width": 32},
    "reformer": {
        "attn_layers": ["local", "local"], "axial_pos_shape": [8, 8], "axial_pos_embds_dim": [16, 16],
        "local_attn_chunk_length": 4, "attention_head_size": 8,
    },
    "squeezebert": {"embedding_size": 32, "q_groups": 2, "k_groups": 2, "v_groups": 2},
    "t5": {"decoder_start_token_id": 1},
    "xlstm": {"num_heads": 4, "chunk_size": 16, "hidden_size": 64},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
              "attention_hidden_size": 64, "attention_head_dim": 16, "num_key_value_heads": 4},
    "zamba2": {"num_hidden_layers": 3, "layers_block_type": ["mamba", "mamba", "hybrid"], "num_key_value_heads": 4},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip


def tiny(model_type: str, **changes: Any) -> PreTrainedConfig:
    """The tiny configuration of a family."""
    kind = CONFIG_MAPPING[model_type]
    chosen = {**sizes(kind), **changes}
    config = kind(**chosen)
    types = getattr(config, "layer_types", None)
    derived = "layer_types" in _fields(kind) and "layer_types" not in chosen
    if derived and types and set(types) in ({"sliding_attention"}, {"linear_attention"}, {"conv"}):
        # The few layers are all of the kind that comes first; one of the other kind makes the family whole.
        config = kind(**chosen, layer_types=[*types[:-1], "full_attention"])
    return config


def _fields(kind: type[PreTrainedConfig]) -> dict[str, dataclasses.Field[Any]]:
    return {field.name: field for field in dataclasses.fields(kind)}


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def sizes(kind: type[PreTrainedConfig]) -> dict[str, Any]:
    """Small values for the attributes of a configuration class, and those of the configurations inside it."""
    fields = _fields(kind)
    chosen: dict[str, Any] = {}
    for name in (*SIZES, *TOKENS):
        for target in {name, kind.attribute_map.get(name, name)} & fields.keys():
            if isinstance(_default(fields[target]), list | tuple):
                continue  # one size for each stage
            chosen[target] = {**SIZES, **TOKENS}[name]
    for name, field in fields.items():
        default = field.default
        if name.endswith("_token_id") and name not in TOKENS and isinstance(default, int) and default >= 99:
            chosen[name] = 90
    if "kv_lora_rank" in fields:
        chosen |= _NO_GROUPS  # latent attention
    for name, inner in _parts(kind).items():
        chosen[name] = {"model_type": inner.model_type, **sizes(inner)}
    return chosen | dict(OVERRIDES.get(kind.model_type, {}))


def _parts(kind: type[PreTrainedConfig]) -> dict[str, type[PreTrainedConfig]]:
    """The classes of the configurations inside one, those that are AutoConfig as the defaults have them."""
    parts = dict(kind.sub_configs)
    if any(inner is AutoConfig for inner in parts.values()):
        try:
            made = kind()
        except Exception:  # the defaults of the family do not fit each other
            return {}
        parts = {name: type(getattr(made, name, None)) for name in parts}
    return {name: inner for name, inner in parts.items() if issubclass(inner, PreTrainedConfig)}
