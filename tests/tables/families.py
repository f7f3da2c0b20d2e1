"""One row per family: a tiny configuration, and the facts about it that the laws and the anatomy are held against.

Facts are written down from the families' own sources, never from deltune: paths are those of AutoModel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

LENGTH = 64  # positions of the families that have a table of them
SITES = ("query", "key", "value", "output", "ffn_up", "ffn_down", "norm")

_SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 99,
    "max_position_embeddings": LENGTH, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
_BART = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_ffn_dim": 64,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "vocab_size": 99, "max_position_embeddings": LENGTH,
    "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": None,
}  # fmt: skip
_T5 = {
    "d_model": 32, "d_kv": 6, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 99, "pad_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 1, "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
}  # fmt: skip
_GPT = {
    "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 99, "n_positions": LENGTH, "pad_token_id": 1,
    "bos_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
_TWO_KV = {**_SIZES, "num_key_value_heads": 2}


@dataclass(frozen=True)
class Stack:
    """One stack: the path of its layers, and inside a layer the query, key, value and output of its attentions, the
    linears of its FFN (the output last), and its norms with their places."""

    layers: str
    attention: tuple[str, str, str, str]
    ffn: tuple[str, ...]
    norms: Mapping[str, str]
    cross: tuple[str, str, str, str] | None = None
    causal: bool = False


@dataclass(frozen=True)
class Family:
    """A family. biases: what has one, of SITES; outer: norms outside the layers; columns: of a fused query, key, value
    (groups, then start and stop of each); exact: nothing in it is computed in float32 when the model is float64."""

    name: str
    config: Mapping[str, Any]
    stacks: tuple[Stack, ...]
    biases: tuple[str, ...] = SITES
    outer: Mapping[str, Literal["embedding", "final"]] = field(default_factory=dict)
    positions: Literal["absolute", "relative", "rotary", "alibi"] = "absolute"
    longest: int = LENGTH
    pooler: str | None = None
    kv_heads: int = 4
    head_width: int = 8
    gated: bool = False
    columns: tuple[int, tuple[tuple[int, int], ...]] | None = None
    interface: bool = True
    shared: bool = False
    exact: bool = True
    kernels: tuple[str, ...] = ("sdpa", "eager")
    checkpoints: bool = True  # transformers can checkpoint its layers
    beyond: tuple[str, ...] = ()  # linears with biases outside the layers, norms apart

    @property
    def kind(self) -> Literal["encoder", "decoder", "both"]:
        return "both" if len(self.stacks) == 2 else "decoder" if self.stacks[0].causal else "encoder"

    @property
    def traits(self) -> tuple[str, ...]:
        """What methods are paired with."""
        return self.kind, self.positions

    @property
    def numbered(self) -> bool:
        """The tokens of its stacks have positions of their own, in a table or turned by."""
        return self.positions in ("absolute", "rotary")

    @property
    def table(self) -> bool:
        """It looks positions up in a table, so that its inputs have a greatest length."""
        return self.positions == "absolute"


def _qkvo(stem: str, *names: str) -> tuple[str, str, str, str]:
    q, k, v, o = (f"{stem}.{name}" for name in (names or ("q_proj", "k_proj", "v_proj", "o_proj")))
    return q, k, v, o


_BERT = Stack(
    "encoder.layer",
    _qkvo("attention", "self.query", "self.key", "self.value", "output.dense"),
    ("intermediate.dense", "output.dense"),
    {"attention.output.LayerNorm": "post attention", "output.LayerNorm": "post ffn"},
)
_BERT_OUTER = {"embeddings.LayerNorm": "embedding"}
_GATED_FFN = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_PRE = {"input_layernorm": "pre attention", "post_attention_layernorm": "pre ffn"}
_OWN_NORMS = {"self_attn.q_norm": "query attention", "self_attn.k_norm": "key attention"}
_LLAMA = Stack("layers", _qkvo("self_attn"), _GATED_FFN, _PRE, causal=True)


def _bart(place: str) -> tuple[Stack, Stack]:
    """Encoder and decoder of BART's kin, with norms `place` (pre or post) their sub-layers."""
    attention = _qkvo("self_attn", "q_proj", "k_proj", "v_proj", "out_proj")
    cross = _qkvo("encoder_attn", "q_proj", "k_proj", "v_proj", "out_proj")
    norms = {"self_attn_layer_norm": f"{place} attention", "final_layer_norm": f"{place} ffn"}
    encoder = Stack("encoder.layers", attention, ("fc1", "fc2"), norms)
    more = {**norms, "encoder_attn_layer_norm": f"{place} attention"}
    return encoder, Stack("decoder.layers", attention, ("fc1", "fc2"), more, cross, causal=True)


def _t5(*inputs: str) -> tuple[Stack, Stack]:
    attention = _qkvo("layer.0.SelfAttention", "q", "k", "v", "o")
    cross = _qkvo("layer.1.EncDecAttention", "q", "k", "v", "o")
    ffn = tuple(f"DenseReluDense.{name}" for name in (*inputs, "wo"))
    first = {"layer.0.layer_norm": "pre attention", "layer.1.layer_norm": "pre ffn"}
    second = {"layer.0.layer_norm": "pre attention", "layer.1.layer_norm": "pre attention"}
    return (
        Stack("encoder.block", attention, tuple(f"layer.1.{name}" for name in ffn), first),
        Stack(
            "decoder.block", attention, tuple(f"layer.2.{name}" for name in ffn),
            {**second, "layer.2.layer_norm": "pre ffn"}, cross, causal=True,
        ),
    )  # fmt: skip


def _ends(*names: str, place: Literal["embedding", "final"]) -> dict[str, Literal["embedding", "final"]]:
    return {f"{stack}.{name}": place for stack in ("encoder", "decoder") for name in names}


_QKV_BIAS = ("query", "key", "value")
_NOT_FLOAT64 = {"biases": (), "positions": "rotary", "exact": False}  # RMSNorm squares and sums in float32
_LLAMA_OUTER: dict[str, Literal["embedding", "final"]] = {"norm": "final"}

ROWS = (
    Family("bert", _SIZES, (_BERT,), outer=_BERT_OUTER, pooler="pooler", beyond=("pooler.dense",)),
    Family(
        "roberta", _SIZES, (_BERT,), outer=_BERT_OUTER, pooler="pooler", beyond=("pooler.dense",), longest=LENGTH - 2
    ),
    Family(
        "xlm-roberta", _SIZES, (_BERT,), outer=_BERT_OUTER, pooler="pooler", beyond=("pooler.dense",),
        longest=LENGTH - 2,
    ),
    Family(
        "electra", {**_SIZES, "embedding_size": 16}, (_BERT,), outer=_BERT_OUTER, beyond=("embeddings_project",)
    ),
    Family(
        "distilbert",
        {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "vocab_size": 99, "pad_token_id": 1,
         "max_position_embeddings": LENGTH},
        (Stack(
            "transformer.layer", _qkvo("attention", "q_lin", "k_lin", "v_lin", "out_lin"), ("ffn.lin1", "ffn.lin2"),
            {"sa_layer_norm": "post attention", "output_layer_norm": "post ffn"},
        ),),
        outer=_BERT_OUTER,
    ),
    Family(
        "albert", {**_SIZES, "embedding_size": 16},
        (Stack(
            "encoder.albert_layer_groups.0.albert_layers",
            _qkvo("attention", "query", "key", "value", "dense"), ("ffn", "ffn_output"),
            {"attention.LayerNorm": "post attention", "full_layer_layer_norm": "post ffn"},
        ),),
        outer=_BERT_OUTER, pooler="pooler", beyond=("encoder.embedding_hidden_mapping_in", "pooler"), shared=True,
        checkpoints=False,
    ),
    Family(
        "modernbert",
        {**_SIZES, "local_attention": 4, "global_attn_every_n_layers": 2, "cls_token_id": 0, "sep_token_id": 2},
        (Stack(
            "layers", _qkvo("attn", "Wqkv", "Wqkv", "Wqkv", "Wo"), ("mlp.Wi", "mlp.Wo"),
            {"attn_norm": "pre attention", "mlp_norm": "pre ffn"},  # the first layer's attn_norm is an Identity
        ),),
        biases=(), outer={"embeddings.norm": "embedding", "final_norm": "final"}, positions="rotary", gated=True,
        columns=(1, ((0, 32), (32, 64), (64, 96))),
    ),
    Family(
        "gpt2", _GPT,
        (Stack(
            "h", _qkvo("attn", "c_attn", "c_attn", "c_attn", "c_proj"), ("mlp.c_fc", "mlp.c_proj"),
            {"ln_1": "pre attention", "ln_2": "pre ffn"}, causal=True,
        ),),
        outer={"ln_f": "final"}, columns=(1, ((0, 32), (32, 64), (64, 96))),
    ),
    Family(
        "opt",
        {"hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99,
         "word_embed_proj_dim": 32, "max_position_embeddings": LENGTH, "pad_token_id": 1, "bos_token_id": 0},
        (Stack(
            "decoder.layers", _qkvo("self_attn", "q_proj", "k_proj", "v_proj", "out_proj"), ("fc1", "fc2"),
            {"self_attn_layer_norm": "pre attention", "final_layer_norm": "pre ffn"}, causal=True,
        ),),
        outer={"decoder.final_layer_norm": "final"},
    ),
    Family(
        "gpt_neox", _SIZES,
        (Stack(
            "layers", _qkvo("attention", *["query_key_value"] * 3, "dense"),
            ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"), _PRE, causal=True,
        ),),
        outer={"final_layer_norm": "final"}, positions="rotary", columns=(4, ((0, 8), (8, 16), (16, 24))),
    ),
    Family("llama", _TWO_KV, (_LLAMA,), outer=_LLAMA_OUTER, kv_heads=2, gated=True, **_NOT_FLOAT64),
    Family(
        "qwen2", _TWO_KV, (_LLAMA,), outer=_LLAMA_OUTER, kv_heads=2, gated=True,
        **{**_NOT_FLOAT64, "biases": _QKV_BIAS},
    ),
    Family(
        "qwen3", {**_TWO_KV, "head_dim": 6}, (Stack("layers", _qkvo("self_attn"), _GATED_FFN, {**_PRE, **_OWN_NORMS},
        causal=True),), outer=_LLAMA_OUTER, kv_heads=2, head_width=6, gated=True, **_NOT_FLOAT64,
    ),
    Family(
        "mistral", {**_TWO_KV, "sliding_window": 4}, (_LLAMA,), outer=_LLAMA_OUTER, kv_heads=2, gated=True,
        **_NOT_FLOAT64,
    ),
    Family(
        "gemma2",
        {**_TWO_KV, "head_dim": 6, "query_pre_attn_scalar": 6, "sliding_window": 4, "attn_logit_softcapping": 5.0},
        (Stack(
            "layers", _qkvo("self_attn"), _GATED_FFN,
            {"input_layernorm": "pre attention", "post_attention_layernorm": "output attention",
             "pre_feedforward_layernorm": "pre ffn", "post_feedforward_layernorm": "output ffn"}, causal=True,
        ),),
        outer=_LLAMA_OUTER, kv_heads=2, head_width=6, gated=True, kernels=("eager",), **_NOT_FLOAT64,  # caps its scores
    ),
    Family(
        "phi", _SIZES,
        (Stack(
            "layers", _qkvo("self_attn", "q_proj", "k_proj", "v_proj", "dense"), ("mlp.fc1", "mlp.fc2"),
            {"input_layernorm": "pre attention+ffn"}, causal=True,
        ),),
        outer={"final_layernorm": "final"}, positions="rotary",
    ),
    Family(
        "phi3", {**_TWO_KV, "sliding_window": 4},
        (Stack(
            "layers", _qkvo("self_attn", "qkv_proj", "qkv_proj", "qkv_proj", "o_proj"),
            ("mlp.gate_up_proj", "mlp.down_proj"), _PRE, causal=True,
        ),),
        outer=_LLAMA_OUTER, kv_heads=2, gated=True, columns=(1, ((0, 32), (32, 48), (48, 64))), **_NOT_FLOAT64,
    ),
    Family(
        "olmo2", _TWO_KV,
        (Stack(
            "layers", _qkvo("self_attn"), _GATED_FFN,
            {**_OWN_NORMS, "post_attention_layernorm": "output attention",
             "post_feedforward_layernorm": "output ffn"}, causal=True,
        ),),
        outer=_LLAMA_OUTER, kv_heads=2, gated=True, **_NOT_FLOAT64,
    ),
    Family("granite", _TWO_KV, (_LLAMA,), outer=_LLAMA_OUTER, kv_heads=2, gated=True, **_NOT_FLOAT64),
    Family(
        "starcoder2", {**_TWO_KV, "sliding_window": 4},
        (Stack("layers", _qkvo("self_attn"), ("mlp.c_fc", "mlp.c_proj"), _PRE, causal=True),),
        outer=_LLAMA_OUTER, positions="rotary", kv_heads=2,
    ),
    Family("bart", _BART, _bart("post"), outer=_ends("layernorm_embedding", place="embedding")),
    Family(
        "mbart", _BART, _bart("pre"),
        outer=_ends("layernorm_embedding", place="embedding") | _ends("layer_norm", place="final"),
    ),
    Family("pegasus", _BART, _bart("pre"), outer=_ends("layer_norm", place="final")),
    Family("blenderbot", _BART, _bart("pre"), outer=_ends("layer_norm", place="final")),
    Family("marian", _BART, _bart("post")),
    Family(
        "t5", _T5, _t5("wi"), biases=(), outer=_ends("final_layer_norm", place="final"), positions="relative",
        head_width=6, exact=False,
    ),
    Family(
        "mt5", {**_T5, "feed_forward_proj": "gated-gelu"}, _t5("wi_0", "wi_1"), biases=(), positions="relative",
        outer=_ends("final_layer_norm", place="final"), head_width=6, gated=True, exact=False,
    ),
    # not on the attention interface: what is inside their attentions is hidden
    Family(
        "deberta-v2",
        {**_SIZES, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "max_relative_positions": 8},
        (Stack(
            "encoder.layer", _qkvo("attention", "self.query_proj", "self.key_proj", "self.value_proj", "output.dense"),
            ("intermediate.dense", "output.dense"), _BERT.norms,
        ),),
        outer=_BERT_OUTER, interface=False, kernels=(),
    ),
    Family(
        "bloom",
        {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 99, "pad_token_id": 1, "bos_token_id": 0},
        (Stack(
            "h", _qkvo("self_attention", *["query_key_value"] * 3, "dense"),
            ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"), _PRE, causal=True,
        ),),
        outer={"word_embeddings_layernorm": "embedding", "ln_f": "final"}, positions="alibi", interface=False,
        columns=(4, ((0, 8), (8, 16), (16, 24))),
        kernels=(),
    ),
    Family(
        "gptj", {**_GPT, "rotary_dim": 4},
        (Stack(
            "h", _qkvo("attn", "q_proj", "k_proj", "v_proj", "out_proj"), ("mlp.fc_in", "mlp.fc_out"),
            {"ln_1": "pre attention+ffn"}, causal=True,
        ),),
        biases=("ffn_up", "ffn_down", "norm"), outer={"ln_f": "final"}, positions="rotary", interface=False, kernels=(),
    ),
)  # fmt: skip

FAMILIES = {row.name: row for row in ROWS}
