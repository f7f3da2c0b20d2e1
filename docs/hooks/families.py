"""Try deltune on a tiny model of every family of transformers, and write docs/library/families.md from what came out.

`python docs/hooks/families.py` makes every model (some minutes on one core) and writes the page. Names of families
after it try these alone; results are kept in build/families.json, and `--page` writes the page from them. An exception
that is no DeltuneError, a trained tensor without effect, a layer, norm or bias that a method leaves and its count does
not name, and a weight that is not restored end it with exit code 1.
"""

from __future__ import annotations

import inspect
import json
import sys
import textwrap
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import transformers  # noqa: E402
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel  # noqa: E402
from transformers.models.auto import modeling_auto  # noqa: E402
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES  # noqa: E402

import deltune  # noqa: E402
from deltune.methods.resolve import resolve  # noqa: E402
from tests.alarm import time_limit  # noqa: E402
from tests.runtime.identity.configurations import sizes, tiny  # noqa: E402
from tests.runtime.identity.specimens import random_model  # noqa: E402

RESULTS = ROOT / "build" / "families.json"
CLASSES = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "image": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "ctc": "MODEL_FOR_CTC_MAPPING_NAMES",
    "speech": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "image-text": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
}
"""The auto classes, each with the table of transformers that lists its families."""

METHODS = {
    "layernorm": "layernorm",
    "bitfit": "bitfit",
    "lora": "lora(rank=2)",
    "prefix": "prefix(length=2)",
    "prompt": "prompt(length=2)",
    "adapter": "adapter(rank=2)",
    "parallel_adapter": "parallel_adapter(rank=2)",
}
NOT_APPLICABLE = ("no norm.gain", "no norm of this model", "no bias in", "reads no token ids")
"""What a refusal says where the family has nothing that the method could train."""

LARGEST = 100_000_000  # parameters of a model that is called tiny
SECONDS = 40  # for one family
SMALLER: dict[str, Any] = {
    "image_size": 32, "patch_size": 8, "num_mel_bins": 16, "max_source_positions": 20, "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2, "num_feat_extract_layers": 2, "hidden_size": 32, "projection_dim": 16,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 32, "depth": 2, "crop_size": 32,
    "mlp_dim": 64, "depths": 2, "layer_depths": 2, "hidden_sizes": 16, "embed_dims": 16, "conv_dim": 16,
    "conv_stride": 2, "conv_kernel": 3, "neck_hidden_sizes": 16, "classifier_proj_size": 16, "codevector_dim": 16,
    "output_hidden_size": 32, "image_token_id": 7, "image_token_index": 7, "video_token_id": 8, "video_token_index": 8,
    "audio_token_id": 9, "audio_token_index": 9, "vision_start_token_id": 10, "vision_end_token_id": 11,
}  # fmt: skip
"""Small values for what models of images and sounds have, beside those of tests/runtime/identity/configurations.py."""


_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
_MROPE = {"text_config": {"rope_parameters": _ROPE}}
_WINDOWS = {
    "embed_dim": 16,
    "depths": [1, 1],
    "num_heads": [2, 2],
    "window_size": 2,
    "hidden_size": 32,
    "patch_size": 4,
}
_PYRAMID = {"hidden_sizes": [16, 16, 32, 32], "num_attention_heads": [1, 1, 2, 2], "depths": [2, 2, 1, 1]}
_CONVOLUTIONS = {
    "conv_dim": [16, 16], "conv_stride": [5, 2], "conv_kernel": [10, 3], "num_feat_extract_layers": 2,
}  # fmt: skip

_TOKENIZER = {"num_filters": 2, "depths": [1, 1, 1], "downsampling_ratios": [2, 2], "hidden_size": 8}
_QUANTIZED = {"base_channels": 32, "embed_dim": 8, "latent_channels": 8, "num_embeddings": 16, "num_res_blocks": 1}
_QUERIES = {"image_token_index": 7, "num_query_tokens": 4, "image_text_hidden_size": 16}

CHANGES: dict[str, dict[str, Any]] = {
    "bit": {"hidden_sizes": [32, 32, 32, 32], "num_groups": 4, "embedding_size": 32},
    "blip-2": _QUERIES,
    "blt": {
        "encoder_hash_byte_group_vocab": 64, "encoder_config": {"hidden_size_global": 32},
        "decoder_config": {"hidden_size_global": 32},
    },
    "chameleon": {"vocabulary_map": {"<image>": 7}, "vq_config": _QUANTIZED},
    "cosmos3_edge": {"text_config": {"rope_parameters": _ROPE}},
    "cvt": {"embed_dim": [16, 16, 32], "num_heads": [1, 1, 2], "depth": [1, 2, 3]},
    "deepseek_ocr2": {
        "text_config": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2},
        "vision_config": {"sam_config": {"downsample_channels": [16, 32], "output_channels": 16}},
    },
    "dia": {
        "decoder_config": {
            "cross_hidden_size": 32, "cross_num_attention_heads": 4, "cross_num_key_value_heads": 4,
            "cross_head_dim": 8,
        },
    },
    "donut-swin": _WINDOWS,
    "dots3_note": {
        "text_config": {"layer_types": ["sliding_attention", "indexed_attention"]},
        "vision_config": {
            "mlp_layer_types": ["dense", "sparse"], "adapter_in_dim": 32, "adapter_out_dim": 32,
            "moe_intermediate_size": 24,
        },
        "audio_config": {"adapter_out_dim": 32, "adapter_input_size": 32, "feature_size": 16},
    },
    "efficientnet": {"width_coefficient": 0.2, "depth_coefficient": 0.2, "hidden_dim": 256},
    "emu3": {
        "vocabulary_map": {"<image>": 7, "<|extra_200|>": 8}, "vq_config": {"base_channels": 32, "hidden_size": 32},
    },
    "ernie4_5_vl_moe": {
        "text_config": {
            "moe_intermediate_size": [24, 24], "num_attention_heads": 2, "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]},
        },
    },
    "florence2": {
        "vision_config": {
            "embed_dim": [16, 16, 32, 32], "num_heads": [2, 2, 2, 2], "num_groups": [2, 2, 2, 2], "depths": [1, 1,
            1, 1],
            "projection_dim": 32, "window_size": 2, "patch_size": [7, 3, 3, 3],
        },
    },
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 8}},
    "gemma4_assistant": {
        "text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_hidden_layers": 2},
    },
    "gemma4_unified_assistant": {"text_config": {"num_kv_shared_layers": 2}},
    "glm46v": _MROPE,
    "glm4v": _MROPE,
    "glm4v_moe": {"text_config": {"rope_parameters": {**_ROPE, "mrope_section": [1, 1, 0]}}},
    "glm5_next": {
        "text_config": {
            "index_topk": 16, "qk_rope_head_dim": 0, "layer_types": ["linear_attention", "indexed_attention"],
            "mlp_layer_types": ["dense", "sparse"],
        },
    },
    "glm_ocr": _MROPE,
    "granite4_vision": {
        "deepstack_layer_map": [[0, 0], [1, 1]], "spatial_target_layers": [0, 1, 0, 1], "downsample_rate": "1/2",
        "vision_config": {"hidden_size": 64}, "qformer_config": {"intermediate_size": 64},
    },
    "granite_docling": {"vision_config": {"out_hidden_size": 32}},
    "granite_speech5_ctc": {"context_size": 16, "encoder_config": {"context_size": 16, "num_key_value_heads": 4}},
    "hgnet_v2": {
        "hidden_sizes": [16, 16, 32, 32], "stem_channels": [3, 8, 8], "stage_in_channels": [8, 16, 16, 32],
        "stage_mid_channels": [8, 8, 8, 8], "stage_out_channels": [16, 16, 32, 32], "stage_num_blocks": [1, 1, 1, 1],
        "stage_numb_of_layers": [2, 2, 2, 2],
    },
    "hunyuan_vl": _MROPE,
    "inkling2": {"vision_config": {"text_hidden_size": 32}},
    "instructblip": _QUERIES,
    "instructblipvideo": {**_QUERIES, "video_token_index": 7},
    "janus": {
        "vq_config": {
            **_QUANTIZED, "projection_dim": 32, "image_token_embed_dim": 32}, "vision_config": {"projection_dim": 32,
        },
    },
    "kyutai_speech_to_text": {
        "codec_config": {
            "upsample_groups": 32, "num_filters": 4, "codebook_dim": 16, "vector_quantization_hidden_dimension": 16,
        },
        "num_codebooks": 2, "codebook_vocab_size": 20, "audio_bos_token_id": 10, "audio_pad_token_id": 9,
    },
    "kosmos-2": {"latent_query_num": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_vl": {"text_config": {"layer_types": ["conv", "full_attention"]}},
    "levit": {
        "hidden_sizes": [16, 32, 32], "num_attention_heads": [2, 2, 2], "depths": [2, 2, 2], "key_dim": [8, 8, 8],
        "image_size": 64, "patch_size": 16,
    },
    "mobilevitv2": {"image_size": 64},
    "molmo2": {"adapter_config": {"vision_feature_layer": [1, 0]}},
    "moonshine_streaming": {"num_key_value_heads": 4, "encoder_config": {"sliding_windows": [[4, 2], [4, 0]]}},
    "muse_spark": {
        "text_config": {"moe_hidden_size": 32},
        "audio_config": {
            "num_hidden_layers": 2, "patch_sizes": [4, 2], "hidden_sizes": [16, 32], "depths": [1, 1],
            "out_hidden_size": 32,
        },
    },
    "nemo_speechlm": {"audio_config": {"diarization_config": {"head_config": {"audio_hidden_size": 32}}}},
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}, "projector_hidden_size": 32},
    "paddleocr_vl": _MROPE,
    "pi0": {"vlm_config": {"projection_dim": 32, "vision_config": {"projection_dim": 32}}},
    "pvt": _PYRAMID,
    "pvt_v2": _PYRAMID,
    "qwen2_5_omni_thinker": {**_MROPE, "vision_start_token_id": 10},
    "qwen2_5_vl": _MROPE,
    "qwen2_vl": _MROPE,
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 10},
    "qwen4_exp": {
        "text_config": {
            "layer_types": ["linear_attention", "indexed_attention"], "indexer_n_heads": 2, "indexer_kv_heads": 1,
            "indexer_head_dim": 8, "indexer_budget": 16, "indexer_compress_ratio": 4,
        },
    },
    # it trains on inputs of certain lengths alone
    "reformer": {"axial_pos_embds": False, "local_attn_chunk_length": 2, "lsh_attn_chunk_length": 2},
    "sew": _CONVOLUTIONS,
    "sew-d": _CONVOLUTIONS,
    "shieldgemma2": {"yes_token_index": 20, "no_token_index": 21},
    "speech_to_text": {"conv_channels": 32},
    "swin": _WINDOWS,
    "swinv2": _WINDOWS,
    "textnet": {"hidden_sizes": [64, 16, 16, 16, 16]},
    "vibevoice": {
        "audio_config": _TOKENIZER, "semantic_model_config": _TOKENIZER,
        "diffusion_head_config": {"latent_size": 8, "frequency_embedding_size": 16},
    },
    "vibevoice_asr": {
        "acoustic_tokenizer_encoder_config": _TOKENIZER, "semantic_tokenizer_encoder_config": _TOKENIZER,
    },
    "xlstm": {"hidden_size": 64},
}  # fmt: skip
"""Settings of families that have no tiny value of their own; those of a configuration inside stand in a dictionary."""


def _boxes(ids: torch.Tensor, generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {"bbox": torch.zeros(*ids.shape, 4)}


def _patches(ids: torch.Tensor, generator: torch.Generator) -> dict[str, torch.Tensor]:
    patches = torch.randn(2, 8, 770, generator=generator)
    patches[..., :2] = torch.tensor([1.0, 1.0])  # row and column
    return {"flattened_patches": patches, "decoder_input_ids": ids[:, :4]}


def _grid_of_patches(ids: torch.Tensor, generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {
        "pixel_values": torch.randn(2, 4, 192, generator=generator),
        "pixel_attention_mask": torch.ones(2, 4, dtype=torch.long),
        "spatial_shapes": torch.tensor([[2, 2], [2, 2]]),
    }  # fmt: skip


def _images_in_text(ids: torch.Tensor, generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {
        "pixel_values": torch.randn(2, 1, 3, 32, 32, generator=generator),
        "image_attention_mask": torch.ones(2, ids.shape[1], 1),
    }


def _queries(ids: torch.Tensor, generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {"qformer_input_ids": ids, "pixel_values": torch.randn(2, 3, 32, 32, generator=generator)}


def _codes(ids: torch.Tensor, generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {"decoder_input_ids": ids[:, :4, None].expand(-1, -1, 9)}


def _queries_of_videos(ids: torch.Tensor, generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {"qformer_input_ids": ids, "pixel_values": torch.randn(2, 2, 3, 32, 32, generator=generator)}


def _places_of_image(ids: torch.Tensor, generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {"image_embeds_position_mask": (torch.arange(ids.shape[1]) < 4).expand(ids.shape).long()}


def _robot(ids: torch.Tensor, generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {
        "state": torch.randn(2, 32, generator=generator), "noise": torch.randn(2, 50, 32, generator=generator),
        "timestep": torch.rand(2, generator=generator), "input_ids": ids, "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.randn(2, 1, 3, 32, 32, generator=generator),
        "pixel_attention_mask": torch.ones(2, 1, dtype=torch.bool),
    }  # fmt: skip


def _channels(ids: torch.Tensor, generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {"input_ids": ids[:, :, None].expand(-1, -1, 3) % 20}


def _sound_beside_text(ids: torch.Tensor, generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {"input_features": torch.randn(2, 16, 8 * ids.shape[1], generator=generator)}


def _stacked_frames(ids: torch.Tensor, generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {"input_features": torch.randn(2, 40, 64, generator=generator)}


INPUTS: dict[str, Callable[[torch.Tensor, torch.Generator], dict[str, torch.Tensor]]] = {
    "dia": _codes, "granite_speech5_ctc": _stacked_frames, "idefics": _images_in_text, "instructblip": _queries,
    "instructblipvideo": _queries_of_videos, "kosmos-2": _places_of_image, "kyutai_speech_to_text": _channels,
    "pi0": _robot, "pix2struct": _patches, "siglip2": _grid_of_patches, "udop": _boxes,
    "voxtral_realtime": _sound_beside_text,
}  # fmt: skip
"""What families read beside the usual inputs, from the token ids."""


class TooLate(Exception):
    """A family has taken more than its seconds."""


def shrink(config: PreTrainedConfig) -> None:
    """Make what a configuration has of `SMALLER` small, in the configurations inside it too."""
    for field in fields(type(config)):
        if field.name not in SMALLER:
            continue
        value, small = getattr(config, field.name, None), SMALLER[field.name]
        default = field.default if field.default is not MISSING else value
        if isinstance(value, list | tuple) and value and isinstance(value[0], int):
            setattr(config, field.name, type(value)([small] * len(value)))
        elif isinstance(value, int) and not isinstance(value, bool) and isinstance(default, int):
            setattr(config, field.name, min(value, small) if not field.name.endswith(("_id", "_index")) else small)
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if isinstance(part, PreTrainedConfig):
            shrink(part)


def change(config: Any, changes: dict[str, Any]) -> None:
    """Set the settings of a table again that `shrink` may have changed."""
    for name, value in changes.items():
        part = getattr(config, name, None)
        if isinstance(part, PreTrainedConfig) and isinstance(value, dict):
            change(part, value)
        else:
            setattr(config, name, value)


def merged(usual: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return the changes, those of the configurations inside joined with the usual settings of these."""
    return {
        name: {**usual[name], **merged(usual[name], value)}
        if isinstance(value, dict) and isinstance(usual.get(name), dict)
        else value
        for name, value in changes.items()
    }


def configuration(model_type: str, kind: Any) -> PreTrainedConfig:
    """Return the tiny configuration of a family, or the part of it that a class is built from."""
    changes = CHANGES.get(model_type, {})
    config = tiny(model_type, **merged(sizes(CONFIG_MAPPING[model_type]), changes))
    shrink(config)
    change(config, changes)
    if not isinstance(config, kind.config_class):
        parts = [getattr(config, name) for name in config.sub_configs]
        config = next((part for part in parts if isinstance(part, kind.config_class)), config)
    return config


def build(auto: str, model_type: str, class_name: str) -> PreTrainedModel:
    """Build a tiny model with random weights, frozen and in eval mode."""
    kind = getattr(transformers, class_name)
    config = configuration(model_type, kind)
    if hasattr(config, "is_decoder") and not config.is_encoder_decoder:
        config.is_decoder = auto == "causal"
    return random_model(class_name, config, zlib.crc32(class_name.encode()), largest=LARGEST)


def batch(model: PreTrainedModel) -> dict[str, Any]:
    """Return inputs for a model, by the names that its forward takes."""
    accepted = inspect.signature(model.forward).parameters
    config: Any = model.config
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(12, 89, (2, 6), generator=generator)
    main = model.main_input_name
    if main in ("input_ids", "inputs_embeds") or (main not in accepted and "input_ids" in accepted):
        inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if config.is_encoder_decoder:
            inputs["decoder_input_ids"] = ids[:, :4]
    elif main == "pixel_values":
        vision = getattr(config, "vision_config", config)
        size, channels = getattr(vision, "image_size", 32), getattr(vision, "num_channels", 3)
        height, width = size if isinstance(size, list | tuple) else (size, size)
        inputs = {"pixel_values": torch.randn(2, channels, height, width, generator=generator)}
        if "input_ids" in accepted:
            inputs["input_ids"] = ids
    elif main == "input_features":
        parts = [config, *(getattr(config, name, None) for name in config.sub_configs)]
        names = ("feature_projection_input_dim", "input_feat_per_channel", "num_mel_bins")
        bins = next((vars(part)[n] for part in parts if part is not None for n in names if n in vars(part)), 80)
        frames = 2 * getattr(config, "max_source_positions", 20)
        first = "max_source_positions" in vars(config) and not any(n in vars(config) for n in names[:2])
        shape = (2, bins, frames) if first else (2, frames, bins)
        inputs = {"input_features": torch.randn(*shape, generator=generator)}
    elif main == "input_values" or (main == "inputs" and "input_values" in accepted):
        inputs = {"input_values": torch.randn(2, 2000, generator=generator)}
    elif main == "inputs":
        size = getattr(config, "image_size", 32)
        images = torch.randn(2, 3, size, size, generator=generator)
        inputs = {"inputs": ids if "MaskedLM" in type(model).__name__ else images}
    elif config.model_type in INPUTS:
        inputs = {}
    else:
        raise NotImplementedError(f"its input is {main}")
    if config.is_encoder_decoder and "decoder_input_ids" in accepted:
        inputs["decoder_input_ids"] = ids[:, :4]
    if config.model_type.removesuffix("_vision_model") in INPUTS:
        inputs |= INPUTS[config.model_type.removesuffix("_vision_model")](ids, generator)
    if not any(p.kind is p.VAR_KEYWORD for p in accepted.values()):
        inputs = {name: value for name, value in inputs.items() if name in accepted}
    if "use_cache" in accepted:
        inputs["use_cache"] = False
    return inputs


def floats(value: Any) -> list[torch.Tensor]:
    """Return the floating-point tensors inside an output, in order."""
    if isinstance(value, torch.Tensor):
        return [value] if value.is_floating_point() else []
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for part in parts for tensor in floats(part)]


def outputs_of(model: PreTrainedModel) -> list[torch.Tensor]:
    """Return what a model computes of `batch`. What it draws by chance is drawn from the same seed each time."""
    torch.manual_seed(0)
    with torch.no_grad():
        return floats(model(**batch(model)))


def attempt(model: PreTrainedModel, text: str) -> str:
    """Attach a method, run it forward and backward and detach it; return "" or what kept it from working.

    Raises:
        AssertionError: A gradient did not arrive, or the model is not what it was.
    """
    weights = {name: (tensor, tensor.clone()) for name, tensor in model.state_dict().items()}
    expected = outputs_of(model)
    refusal = ""
    try:
        tuned = deltune.attach(model, text, head="freeze")
    except deltune.DeltuneError as error:
        refusal = " ".join(str(error).split())
    else:
        try:
            outputs = outputs_of(model)
            if text == "layernorm":
                assert all(map(_same, expected, outputs)), "an untrained layernorm changes the outputs"
            parameters = list(tuned.trainable_parameters())
            assert parameters, "nothing is trained"
            # `inspect` tells of what is not read, and not every head reads the pooler
            unread = {t.name for t in tuned.anatomy.tensors if not t.receives_gradient or t.area == "pooler"}
            if unreached := without_gradient(model, unread):
                refusal = f"SCOPE: {unreached[0]} and {len(unreached) - 1} more get no gradient"
            if (left := left_unsaid(model, tuned)) and not tuned.count().scope:
                refusal = (
                    f"SCOPE: {left[0]} and {len(left) - 1} more are left as they are, and the count does not say so"
                )
        finally:
            tuned.detach()
            model.requires_grad_(False)
    after = model.state_dict()
    assert list(after) == list(weights), "the names of the weights have changed"
    assert all(_same(after[name], copy) for name, (_, copy) in weights.items()), "a weight has changed"
    assert all(map(_same, expected, outputs_of(model))), "the outputs have changed"
    return refusal


def left_unsaid(model: PreTrainedModel, tuned: deltune.Tuned) -> list[str]:
    """Return what a method seems to be meant for and leaves, by names and classes, which deltune does not look at.

    These are vectors of modules whose class is called a norm, for `layernorm`; vectors called a bias, for `bitfit`; and
    modules in a list beside others with the same parameters in which the method acts. A vocabulary's projection and a
    head are left by `layernorm` and `bitfit` everywhere.
    """
    anatomy, method = tuned.anatomy, tuned.method
    assert method is not None
    resolved = resolve(anatomy, method, lambda: 0)
    acted = {edit.place.target.path for edit in resolved.edits}
    selected = {t.name for t in (*resolved.selected, *resolved.trained_in_part)}
    text, left = repr(method).partition("(")[0], []
    if text in ("layernorm", "bitfit"):
        modules = dict(model.named_modules())
        for tensor in anatomy.tensors:
            path, _, leaf = tensor.name.rpartition(".")
            is_norm = "norm" in type(modules[path]).__name__.lower() and leaf in ("weight", "bias")
            dimensions = 1 if text == "layernorm" else 2
            if not (is_norm if text == "layernorm" else leaf.endswith("bias")) or len(tensor.shape) > dimensions:
                continue
            if tensor.area not in ("vocabulary", "head") and tensor.receives_gradient and tensor.name not in selected:
                left.append(tensor.name)
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and acted:
            alike: dict[Any, list[tuple[str, bool]]] = {}
            for number, child in enumerate(module):
                inside = f"{path}.{number}"
                acts = any(f"{place}.".startswith(f"{inside}.") for place in acted)
                kind = type(child), *(name for name, _ in child.named_parameters())
                alike.setdefault(kind, []).append((inside, acts))
            for children in alike.values():
                if any(acts for _, acts in children):
                    left += [inside for inside, acts in children if not acts]
    return left


def without_gradient(model: PreTrainedModel, unread: set[str]) -> list[str]:
    """Run a model backward, and return the names of trained parameters that get no gradient.

    Gradients are those of evaluation, without dropout. Reformer's layers compute them in training alone, and only if
    what they read wants a gradient, which transformers' `enable_input_require_grads` sees to.
    """
    unreached: list[str] = []
    for training in (False, True):
        try:
            model.train(training)
            if training:
                model.enable_input_require_grads()
            outputs = [tensor for tensor in floats(model(**batch(model))) if tensor.requires_grad]
            if outputs:
                torch.stack([tensor.float().square().mean() for tensor in outputs]).sum().backward()
        except AssertionError as error:
            if training or "model.train()" not in str(error):
                raise
            continue
        except RuntimeError as error:  # it adds to its embeddings in place, which are leaves then
            if not training or "a leaf Variable" not in str(error):
                raise
            break
        finally:
            model.eval()
            if training:
                model.disable_input_require_grads()
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad and name not in unread]
        unreached = [name for name, p in trained if p.grad is None]
        if not unreached or any(hasattr(m, "running_mean") for m in model.modules()):  # training would change it
            break
    return unreached


def _same(one: torch.Tensor, two: torch.Tensor) -> bool:
    return bool(((one == two) | ((one != one) & (two != two))).all())


def family(auto: str, model_type: str, class_name: str) -> dict[str, Any]:
    """Try every method on one class, and return a row of the page."""
    row: dict[str, Any] = {"auto": auto, "family": model_type, "class": class_name, "methods": {}, "why": ""}
    start = time.process_time()
    try:
        with time_limit(SECONDS, TooLate(f"more than {SECONDS} seconds")):
            try:
                model = build(auto, model_type, class_name)
                first, second = outputs_of(model), outputs_of(model)
                if not first or not all(map(_same, first, second)):
                    raise NotImplementedError("its outputs are no numbers, or other ones each time")
            except TooLate:
                raise
            except Exception as error:
                row |= {"verdict": "not made", "why": _line(error)}
                return row
            try:
                anatomy = deltune.inspect(model)
                row["hidden"] = list(anatomy.unobserved)
            except deltune.DeltuneError as error:
                row |= {"verdict": "refused", "why": _line(error)}
            for name, text in METHODS.items() if "verdict" not in row else [("layernorm", "layernorm")]:
                row["methods"][name] = attempt(model, text)
            row["verdict"] = _verdict(row["methods"]) if "verdict" not in row else row["verdict"]
    except TooLate as error:
        row |= {"verdict": "too slow", "why": str(error)}
    except AssertionError as error:
        row |= {"verdict": "WRONG", "why": f"{name}: {error}"}
    except Exception as error:
        row |= {"verdict": "RAW EXCEPTION", "why": f"{name}: {_line(error)}"}
    finally:
        row["seconds"] = round(time.process_time() - start, 2)
    return row


def _verdict(methods: dict[str, str]) -> str:
    missing = [why for why in methods.values() if why and not any(text in why for text in NOT_APPLICABLE)]
    return ("silent scope" if any(why.startswith("SCOPE") for why in missing) else "part") if missing else "whole"


INTRODUCTION = """\
# Families

This page is generated by `docs/hooks/families.py`, with transformers {version}. For every model class of the auto
classes below it makes a tiny model with random weights, inspects it, and for each of seven methods ({methods})
attaches it, runs it forward and backward, and detaches it again. "Whole" means that every method works that the family
has something for: `bitfit` where there are biases, `layernorm` where norms have parameters, `prompt` where token ids
are read first. Of a model of several towers, what reads token ids is tried. No method leaves a layer, a norm or a bias
that it seems to be meant for, by names and classes, without a word in its count. After every attempt, refusals
included, the model's weights and outputs were the same to the last bit.

A refusal is a `DeltuneError` that gives its reason; `deltune inspect` prints what cannot be seen of a model. "Not made"
says why the script could not make a tiny model of a family, which says nothing about deltune: a package that is not
installed here (timm, natten), or a family that fails in this version of transformers with any settings.
"""

WORDS = {
    "whose inside is hidden": "its attentions do not call transformers' attention interface",
    "is not the output of one linear": "a projection is not one linear of its own",
    "has no site": "it has no such site",
    "the layers of this model cannot be seen": "its layers cannot be told apart",
    "reads no token ids first": "it reads no token ids",
    "one state for each token": "it has several states for each token",
    "rows before the input embeddings": "it does not run on vectors in place of token ids",
    "mixture of": "its FFNs are mixtures of experts",
    "get no gradient": "some of what it trains gets no gradient",
}
"""Short reasons for what a refusal says."""


def page(kept: dict[str, Any]) -> str:
    """Return the page from the results."""
    verdicts = ["whole", "part", "refused", "not made"]
    verdicts += sorted({row["verdict"] for row in kept.values()} - set(verdicts))
    methods = ", ".join(f"`{text}`" for text in METHODS.values())
    lines = [INTRODUCTION.format(version=transformers.__version__, methods=methods)]
    lines += [f"| auto class | {' | '.join(verdicts)} |", "|---|" + "---:|" * len(verdicts)]
    for auto in CLASSES:
        numbers = Counter(row["verdict"] for row in kept.values() if row["auto"] == auto)
        lines.append(f"| {auto} | {' | '.join(str(numbers[verdict]) for verdict in verdicts)} |")
    numbers = Counter(row["verdict"] for row in kept.values())
    lines.append(f"| all | {' | '.join(str(numbers[verdict]) for verdict in verdicts)} |")
    for auto in CLASSES:
        of_kind = [(name, row) for name, row in sorted(kept.items()) if row["auto"] == auto]
        whole = [f"`{name}`" for name, row in of_kind if row["verdict"] == "whole"]
        lines += ["", f"## {auto}", "", '<details markdown="1">', f"<summary>{len(of_kind)} classes</summary>", ""]
        lines += textwrap.wrap(f"Whole: {', '.join(whole)}.", 120, break_long_words=False, break_on_hyphens=False)
        lines += ["", "| class | works | what is missing, and why |", "|---|---|---|"]
        lines += [
            f"| {name} | {row['verdict']} | {_missing(row)} |" for name, row in of_kind if row["verdict"] != "whole"
        ]
        lines += ["", "</details>"]
    return "\n".join(lines) + "\n"


def _missing(row: dict[str, Any]) -> str:
    """Return what a class lacks, with the reasons."""
    if row["why"]:
        return textwrap.shorten(row["why"].removeprefix("DeltuneError: "), 200, placeholder=" …").replace("|", "\\|")
    reasons: dict[str, list[str]] = {}
    for name, why in row["methods"].items():
        if why and not any(text in why for text in NOT_APPLICABLE):
            short = next((short for text, short in WORDS.items() if text in why), why.split(": ", 2)[-1])
            reasons.setdefault(short, []).append(f"`{name}`")
    return "; ".join(f"{', '.join(names)}: {short}" for short, names in reasons.items())


def _line(error: BaseException) -> str:
    return textwrap.shorten(f"{type(error).__name__}: {error}", 300, placeholder=" …")


def rows(names: list[str]) -> Iterator[tuple[str, str, str]]:
    """Iterate over auto class, family and model class; a model class comes once."""
    seen = set()
    for auto, table in CLASSES.items():
        for model_type, classes in getattr(modeling_auto, table).items():
            class_name = classes if isinstance(classes, str) else classes[0]
            if class_name in seen or model_type not in CONFIG_MAPPING_NAMES or (names and model_type not in names):
                continue
            if auto == "image-text" and class_name in seen:
                continue
            seen.add(class_name)
            yield auto, model_type, class_name


def main(arguments: list[str]) -> int:
    global RESULTS
    names = [argument for argument in arguments if not argument.startswith("-")]
    RESULTS = next((Path(a[10:]) for a in arguments if a.startswith("--results=")), RESULTS)
    kept = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    if "--page" not in arguments:
        every = next((int(a[8:]) for a in arguments if a.startswith("--every=")), 1)
        autos = next((a[7:].split(",") for a in arguments if a.startswith("--auto=")), list(CLASSES))
        verdicts = next((a[10:].split(",") for a in arguments if a.startswith("--verdict=")), None)
        for number, (auto, model_type, class_name) in enumerate(rows(names)):
            if auto not in autos or number % every:
                continue
            if verdicts is not None and kept.get(class_name, {}).get("verdict") not in verdicts:
                continue
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                row = family(auto, model_type, class_name)
            kept[class_name] = row  # results of classes that are not tried again stay
            missing = [name for name, why in row["methods"].items() if why]
            print(
                f"{auto:10} {class_name:44} {row['seconds']:5} {row['verdict']}: {row['why'][:150]}{missing}",
                flush=True,
            )
            RESULTS.parent.mkdir(exist_ok=True)
            RESULTS.write_text(json.dumps(kept, indent=1), encoding="utf-8")
    for verdict, number in Counter((row["auto"], row["verdict"]) for row in kept.values()).items():
        print(*verdict, number)
    print(Counter(row["verdict"] for row in kept.values()))
    if not names:
        (ROOT / "docs" / "library" / "families.md").write_text(page(kept), encoding="utf-8")
    return any(row["verdict"] in ("WRONG", "RAW EXCEPTION", "silent scope") for row in kept.values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
