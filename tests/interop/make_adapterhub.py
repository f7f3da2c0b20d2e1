"""Makes tests/interop/adapterhub: tiny models and adapters written by AdapterHub's own library, and what it computes.

It runs in an environment of its own, since AdapterHub's library pins another transformers:

    python3 -m venv /tmp/adapterhub
    /tmp/adapterhub/bin/pip install torch==2.13.0 adapters==1.3.0 transformers==4.57.6
    OMP_NUM_THREADS=1 /tmp/adapterhub/bin/python tests/interop/make_adapterhub.py

For each family: base/ (config and float32 weights), a folder for each adapter, and logits.safetensors with the inputs
and the float64 logits of each. Versions are in versions.json.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import adapters
import torch
import transformers
from adapters import (
    ConfigUnion,
    DoubleSeqBnConfig,
    LoRAConfig,
    ParBnConfig,
    PrefixTuningConfig,
    SeqBnConfig,
)
from safetensors.torch import save_file

HERE = Path(__file__).parent / "adapterhub"
WIDTH, VOCABULARY = 8, 16

FAMILIES: dict[str, tuple[Any, Any]] = {
    "bert": (
        transformers.BertForSequenceClassification,
        transformers.BertConfig(
            hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2, intermediate_size=12, num_labels=3,
            vocab_size=VOCABULARY, max_position_embeddings=12,
        ),
    ),
    "gpt2": (
        transformers.GPT2LMHeadModel,
        transformers.GPT2Config(
            n_embd=WIDTH, n_layer=2, n_head=2, n_inner=12, vocab_size=VOCABULARY, n_positions=12, bos_token_id=0,
            eos_token_id=1, pad_token_id=2,
        ),
    ),
    "bart": (
        transformers.BartForConditionalGeneration,
        transformers.BartConfig(
            d_model=WIDTH, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
            encoder_ffn_dim=12, decoder_ffn_dim=12, vocab_size=VOCABULARY, max_position_embeddings=12,
        ),
    ),
}  # fmt: skip

ADAPTERS: dict[str, Any] = {
    "seq_bn": SeqBnConfig(reduction_factor=4),
    "normed_seq_bn": SeqBnConfig(reduction_factor=4, ln_before=True, non_linearity="gelu"),
    "block_bn": SeqBnConfig(reduction_factor=4, original_ln_after=False, residual_before_ln=False, scaling=0.5),
    "double_seq_bn": DoubleSeqBnConfig(reduction_factor=4),
    "par_bn": ParBnConfig(reduction_factor=4),
    "learned_par_bn": ParBnConfig(reduction_factor=4, scaling="learned", leave_out=[0]),
    "attention_par_bn": ParBnConfig(
        reduction_factor=4, mh_adapter=True, output_adapter=False, cross_adapter=True, scaling=2.0
    ),
    "lora": LoRAConfig(r=2, alpha=6, intermediate_lora=True, output_lora=True),
    "prefix_flat": PrefixTuningConfig(flat=True, prefix_length=3),
    "prefix_mlp": PrefixTuningConfig(prefix_length=3, bottleneck_size=8),
    "mam": ConfigUnion(PrefixTuningConfig(prefix_length=3, bottleneck_size=8), ParBnConfig(reduction_factor=4)),
}

AS_SAFETENSORS = ("double_seq_bn", "learned_par_bn", "lora")
"""The others are in torch's own format, AdapterHub's default; prefixes it can write in no other (shared tensors)."""

LEFT_OUT = {"gpt2": ("learned_par_bn", "normed_seq_bn"), "bart": ("learned_par_bn", "normed_seq_bn", "prefix_mlp")}
"""To keep the files small: what says no more than another."""

WITH_HEAD = (("bert", "seq_bn"), ("bert", "double_seq_bn"))


def stir(module: torch.nn.Module, only: str = "", size: float = 0.2) -> None:
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if only in name:
                parameter.add_(torch.randn_like(parameter), alpha=size)


def inputs(family: str) -> dict[str, torch.Tensor]:
    ids = torch.randint(4, VOCABULARY, (2, 7))
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    arguments = {"input_ids": ids, "attention_mask": mask}
    if family == "bart":
        arguments["decoder_input_ids"] = torch.randint(4, VOCABULARY, (2, 4))
    return arguments


def main() -> None:
    shutil.rmtree(HERE, ignore_errors=True)
    for family, (model_class, config) in FAMILIES.items():
        torch.manual_seed(0)
        for name, value in config.to_dict().items():
            if "drop" in name and isinstance(value, float):
                setattr(config, name, 0.0)
        config._attn_implementation = "eager"  # under sdpa, GPT-2's boolean mask hides AdapterHub's prefix
        model = model_class(config).eval()
        stir(model)
        original = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        model.save_pretrained(HERE / family / "base", safe_serialization=True)
        (HERE / family / "base" / "generation_config.json").unlink(missing_ok=True)
        adapters.init(model)
        arguments = inputs(family)
        recorded = dict(arguments)
        with torch.no_grad():
            recorded["none"] = model.double()(**arguments).logits
        for name, method in ADAPTERS.items():
            if name in LEFT_OUT.get(family, ()):
                continue
            model.float().add_adapter(name, config=method)
            stir(model, f".{name}.")
            if with_head := (family, name) in WITH_HEAD:
                stir(model.get_submodule("classifier"))
            model.save_adapter(
                str(HERE / family / name), name, with_head=with_head, use_safetensors=name in AS_SAFETENSORS
            )
            model.set_active_adapters(name)
            with torch.no_grad():
                recorded[name] = model.double()(**arguments).logits
            model.delete_adapter(name)
            model.load_state_dict(original, strict=False)  # the head may have been moved
        save_file(recorded, HERE / family / "logits.safetensors")
    versions = {"adapters": adapters.__version__, "transformers": transformers.__version__, "torch": torch.__version__}
    (HERE / "versions.json").write_text(json.dumps(versions, indent=1) + "\n")


if __name__ == "__main__":
    main()
