"""What cannot be had, and why: classes that cannot be made, those that deltune refuses, what bare models refuse.

Every row is held both ways: a class of a table that can be had is a failure, as is one that cannot and is in none.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .behaviours import Behaviour
    from .specimens import Entry

LARGEST = 7_000_000  # parameters of a model that is called tiny


def _rows(*pairs: tuple[str, str]) -> dict[str, str]:
    return {name: reason for reason, names in pairs for name in names.split()}


UNMADE = _rows(
    ("parameters are too many", """
        blt gemma4_unified Llama4ForConditionalGeneration SeamlessM4TModel SeamlessM4Tv2Model vibevoice_asr"""),
    ("another package is required", "gemma3n layoutlmv2"),
    ("images, sounds or vectors are its input, too", "lxmert voxtral_realtime WhisperModel PerceiverModel"),
    ("its configuration wants parts that fit each other", """
        dots3_note Emu3Model gemma4_assistant gemma4_unified_assistant nemo_speechlm qwen4_exp
        qwen4_exp_text"""),
    ("its code fails in this version of transformers", "xlstm"),
)  # fmt: skip
"""Class or family -> why a tiny one cannot be made, or does not run on token ids."""

REFUSED = _rows(
    ("has no norm.gain or norm.bias", "ibert"),
)  # fmt: skip
"""Class or family -> what deltune's refusal says (a regular expression)."""

HIDDEN = _rows(
    ("is not the output of one linear", """
        axk2 dbrx deepseek_v2 deepseek_v32 deepseek_v4 dots3_note_text glm_moe_dsa hy_v4 pegasus_x t5gemma2
        zaya"""),
    ("has no site 'query'", """
        falcon_mamba fnet jetmoe mamba mamba2 mra ProphetNetForCausalLM reformer rwkv xlnet yoso zamba2"""),
)  # fmt: skip
"""Class or family in which queries and values do not show, so that LoRA goes elsewhere -> what the refusal says."""

ELSEWHERE = dict.fromkeys(("fnet", "jetmoe", "mra", "prophetnet", "rwkv", "xlnet"), "ffn_up")
"""Where LoRA goes in families of `HIDDEN` in which no output projection shows either."""

LAYERLESS = _rows(
    ("the layers of this model cannot be seen", "squeezebert"),
    ("has no site 'query'", "zamba"),
)  # fmt: skip
"""Class or family with no linear for LoRA to go to, so that layernorm is the only delta -> what the refusal says."""

NORMLESS = _rows(("has no norm.gain or norm.bias", "hrm_text nanochat neomme olmo"))
"""Families whose norms have no parameters, so that LoRA is the only delta -> what the refusal says."""

LIMITS: tuple[tuple[str, str, str], ...] = (
    ("", ".*", "does not support an attention implementation through"),
    ("", ".*", "does not take attn_implementation="),
    ("", "flex_attention", "Attention sinks cannot be run on CPU with flex attention"),
    ("", "(reentrant )?checkpointing", "does not support activation checkpointing"),
    ("", "quantised cache", "only supported for models with only full attention layers"),
    ("", "later tokens|greedy in two turns", "no (attribute ')?past_key_values"),
    ("", "greedy from embeddings", "doesn't have its forwarding implemented"),
    ("", "inputs_embeds", "must be Tensor, not NoneType|missing 1 required positional argument: 'input_ids'"),
    ("", "assisted.*", "not supported with stateful models|requires a cache"),
    ("", ".*chunks", "Cannot use prefill chunking without a cache"),
    ("rwkv", "beam.*", "cannot use beam search with a cache"),
    ("mamba mamba2 falcon_mamba rwkv xlnet",
     ".*two turns|.*chunks|.*cache given|assisted.*|.*every output|quantised cache",
     "are not used by the model|not iterable|must be integers or slices|no attribute"),  # their own states
    ("canine", "inputs_embeds|.*training|.*checkpointing|resized", "`get_input_embeddings` not auto.handled"),
    ("cpmant", "inputs_embeds|.* embeddings", "NoneType' object has no attribute|are not used by the model"),
    ("cpmant", "later tokens|.*guided|.*chunks|.*static cache.*", "must match the size of|out of bounds"),  # a prompt
    ("cpmant", ".*resiz.*", "index out of range"),  # its table of tokens holds the prompt's, too
    ("encoder-decoder", ".*resiz.*", "directly is not supported"),
    ("encoder-decoder", "assisted.*", "'NoneType' object has no attribute 'crop'"),
    ("EsmForMaskedLM", "resized", "The size of tensor a"),  # the bias of its head stays as it is
    ("GitForCausalLM", "loss", "Expected input batch_size"),  # its loss leaves places out for an image
    ("mpt", "assisted.*|.*chunks|static cache given", "use_cache=True|without a cache|out of bounds"),  # no cache
    ("musicgen musicgen_melody", ".*", "ModuleList|NoneType|are not used by the model|batch_size"),  # codebooks
    ("nllb-moe switch_transformers", "later tokens", "router_logits|`use_cache` can only be set"),
    ("openai-gpt", ".*cache given|quantised cache|.*two turns", "are not used by the model"),  # no cache
    ("openai-gpt", "assisted.*|.*chunks|.*guided", "no attribute 'past_key_values'|Expected size for first two"),
    ("prophetnet", "later tokens|greedy.*|sample.*|beam.*|assisted.*|.*cache.*",  # a cache of n-grams, and no padding
     "position_ids. are incorrect|mask should have size|decoder_input_ids. of length 1|expand.torch.FloatTensor"),
    ("led mvp", ".*chunks", "Attention mask should be of size"),
    ("xlnet", ".*two turns", "Passing a tuple of `past_key_values`"),  # its memories
    ("xlnet", "greedy in bfloat16", "to have the same dtype"),
    ("prophetnet", ".*static cache.*", "must match the size of"),
    ("recurrent_gemma", ".*chunks", "no attribute 'past_key_values'"),  # its own states
    ("reformer", ".*training", "multiply to sequence length"),  # its positions are a grid of one size in training
    ("reformer", ".*cache given|quantised cache|.*two turns", "no attribute '(get_start_idx|is_compileable)'"),
    ("reformer", ".*guided", "must match the existing size"),
    ("t5gemma2", ".*two turns|.*chunks", "must match the size of"),
    ("t5gemma2", ".*static cache.*", "full_attention"),
    ("xlm", ".*cache given|quantised cache|.*two turns", "are not used by the model"),  # no cache
    ("xlm", "assisted.*|.*chunks|.*guided", "no attribute 'past_key_values'|AssertionError"),
    ("deepseek_v4", "inputs_embeds|.* embeddings", "'NoneType' object has no attribute 'reshape'"),  # it hashes its ids
    ("deepseek_v4", ".*static cache.*", "heavily_compressed_attention"),
    ("fnet", "bfloat16|float16", "Unsupported dtype"),  # its Fourier transform
    ("mra", "bfloat16|float16", "must have the same dtype"),
    ("bros inkling2_text", ".*bfloat16|float16", "to have the same dtype"),
    ("minimax", ".*cache given", "uses cache of its own"),
    ("fsmt", ".* embeddings|later tokens", "missing 1 required positional argument: 'input_ids'"),
    ("fsmt", ".*two turns|.*chunks", "AssertionError"),
    ("t5 mt5 umt5", "flex_attention", "index 1 is out of bounds for dimension 0"),  # its bias has one row
)  # fmt: skip
"""Classes or families (all, where empty), behaviours (a regular expression of their names), and what a bare model says
that cannot do it."""


def looked_up(table: dict[str, str], entry: Entry) -> str | None:
    """The row of a class, or of its family."""
    return table.get(entry.class_name) or table.get(entry.model_type)


def limit(entry: Entry, row: Behaviour, error: Exception) -> str | None:
    """Why a bare model does not do this, where that is known of transformers; None is for a row that is wrong."""
    message = f"{type(error).__name__}: {error}"
    for names, behaviours, says in LIMITS:
        concerned = not names or entry.class_name in names.split() or entry.model_type in names.split()
        if concerned and re.fullmatch(behaviours, row.name) and re.search(says, message, re.DOTALL):
            return message.strip().splitlines()[0][:200]
    return None
