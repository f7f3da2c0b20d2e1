"""Sites beyond query and value: embeddings, vocabulary, gates, poolers, routers, experts, paths, and own attentions.

Which weights a site is, is written down from the families' own sources. PEFT's LoRA on the same weights must compute
the same outputs and gradients, and the count is that of the shapes of these weights.
"""

from __future__ import annotations

import contextlib
import copy
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import BertConfig, BertModel, DebertaV2Config, DebertaV2ForMaskedLM, PreTrainedModel

import deltune
from deltune.train.frozen_layers import find_boundary
from runtime.identity.configurations import tiny
from runtime.identity.specimens import random_model
from tables.families import FAMILIES
from tables.specimens import batch, build, differences, facts, loss, stir, tensors

RANK, ALPHA = 2, 6


def _blocks(groups: int, size: int, start: int, stop: int) -> list[int]:
    """The rows `start` to `stop` of each of `groups` blocks of `size` rows."""
    return [group * size + row for group in range(groups) for row in range(start, stop)]


@dataclass(frozen=True)
class Site:
    """A site on a model, and the weights that it is.

    Attributes:
        model: The model class.
        family: transformers' name of the family.
        at: The site, or several.
        weights: The weights by name, "{}" standing for the number of each layer.
        rows: The rows of these weights that are the site, where the weight is a fused one.
        layers: The layers that have the weights.
        changes: Settings beside those of the tiny configuration.
        experts: The argument of that name.
        tied: What the weight is shared with, so that it cannot be merged.
        mixed: Whether rows of a batch can have deltas of their own there.
        in_peft: Whether PEFT reaches the weights; it takes a name of DeepSeek's shared experts for those of others.
    """

    model: str
    family: str
    at: str | tuple[str, ...]
    weights: tuple[str, ...]
    rows: tuple[int, ...] | None = None
    layers: tuple[int, ...] = (0, 1)
    changes: dict[str, Any] = field(default_factory=dict)
    experts: str | tuple[int, ...] = "all"
    tied: str = ""
    mixed: bool = True
    in_peft: bool = True

    def __str__(self) -> str:
        chosen = "" if self.experts == "all" else f" {self.experts}"
        return f"{self.model} {self.at}{chosen}{' tied' if self.tied else ''}"

    @property
    def method(self) -> str:
        experts = "" if self.experts == "all" else f", experts={self.experts!r}"
        return f"lora(rank={RANK}, alpha={ALPHA}, at={self.at!r}{experts})"

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(name.format(layer) for layer in self.layers for name in self.weights))

    def build(self) -> PreTrainedModel:
        return random_model(self.model, tiny(self.family, **self.changes))


LLAMA = ("LlamaForCausalLM", "llama")
_IN_LLAMA = "model.layers.{}."
_EXPERTS = (
    ("MixtralForCausalLM", "mixtral", "mlp.gate", "mlp.experts", (0, 1)),
    ("Qwen2MoeForCausalLM", "qwen2_moe", "mlp.gate", "mlp.experts", (0, 1)),
    ("Qwen3MoeForCausalLM", "qwen3_moe", "mlp.gate", "mlp.experts", (0, 1)),
    ("GptOssForCausalLM", "gpt_oss", "mlp.router", "mlp.experts", (0, 1)),
    ("DeepseekV3ForCausalLM", "deepseek_v3", "mlp.gate", "mlp.experts", (1,)),
    ("PhimoeForCausalLM", "phimoe", "mlp.router", "mlp.experts", (0, 1)),
    ("OlmoeForCausalLM", "olmoe", "mlp.gate", "mlp.experts", (0, 1)),
    ("GraniteMoeForCausalLM", "granitemoe", "block_sparse_moe.router", "block_sparse_moe.experts", (0, 1)),
    ("Llama4ForCausalLM", "llama4_text", "feed_forward.router", "feed_forward.experts", (0, 1)),
)

OWN_ATTENTION = (
    Site("DebertaV2Model", "deberta-v2", "query", ("encoder.layer.{}.attention.self.query_proj.weight",)),
    Site("DebertaV2Model", "deberta-v2", "value", ("encoder.layer.{}.attention.self.value_proj.weight",)),
    Site("DebertaModel", "deberta", "key", ("encoder.layer.{}.attention.self.in_proj.weight",),
         tuple(_blocks(4, 24, 8, 16))),
    Site("BloomForCausalLM", "bloom", "value", ("transformer.h.{}.self_attention.query_key_value.weight",),
         tuple(_blocks(4, 24, 16, 24))),
    Site("FalconForCausalLM", "falcon", "query", ("transformer.h.{}.self_attention.query_key_value.weight",),
         tuple(range(32))),
    Site("FalconForCausalLM", "falcon", "value", ("transformer.h.{}.self_attention.query_key_value.weight",),
         tuple(range(40, 48))),
    Site("MptForCausalLM", "mpt", "key", ("transformer.blocks.{}.attn.Wqkv.weight",), tuple(range(32, 64))),
    Site("GPTJForCausalLM", "gptj", "value", ("transformer.h.{}.attn.v_proj.weight",)),
    Site("CodeGenForCausalLM", "codegen", "key", ("transformer.h.{}.attn.qkv_proj.weight",),
         tuple(_blocks(4, 24, 16, 24))),
    Site("BigBirdModel", "big_bird", "key", ("encoder.layer.{}.attention.self.key.weight",)),
    Site("MPNetModel", "mpnet", "query", ("encoder.layer.{}.attention.attn.q.weight",)),
    Site("RoFormerModel", "roformer", "value", ("encoder.layer.{}.attention.self.value.weight",)),
    Site("XLMModel", "xlm", "key", ("attentions.{}.k_lin.weight",)),
    Site("GPTNeoForCausalLM", "gpt_neo", "query", ("transformer.h.{}.attn.attention.q_proj.weight",)),
)  # fmt: skip

SITES = (
    Site(*LLAMA, "gate_proj", (f"{_IN_LLAMA}mlp.gate_proj.weight",)),
    Site(*LLAMA, "up_proj", (f"{_IN_LLAMA}mlp.up_proj.weight",)),
    Site(*LLAMA, "ffn_up", (f"{_IN_LLAMA}mlp.gate_proj.weight", f"{_IN_LLAMA}mlp.up_proj.weight")),
    Site(*LLAMA, "ffn_down", (f"{_IN_LLAMA}mlp.down_proj.weight",)),
    Site(*LLAMA, "embedding", ("model.embed_tokens.weight",)),
    Site(*LLAMA, "lm_head", ("lm_head.weight",)),
    Site(*LLAMA, "embedding", ("model.embed_tokens.weight",), changes={"tie_word_embeddings": True}, tied="lm_head"),
    Site(*LLAMA, "lm_head", ("lm_head.weight",), changes={"tie_word_embeddings": True}, tied="model.embed_tokens"),
    Site(*LLAMA, ("*.k_proj", "lm_head"), (f"{_IN_LLAMA}self_attn.k_proj.weight", "lm_head.weight")),
    Site("Phi3ForCausalLM", "phi3", "gate_proj", (f"{_IN_LLAMA}mlp.gate_up_proj.weight",), tuple(range(64))),
    Site("Phi3ForCausalLM", "phi3", "up_proj", (f"{_IN_LLAMA}mlp.gate_up_proj.weight",), tuple(range(64, 128))),
    Site("ModernBertForMaskedLM", "modernbert", "gate_proj", ("model.layers.{}.mlp.Wi.weight",), tuple(range(64))),
    Site("BertForSequenceClassification", "bert", "pooler", ("bert.pooler.dense.weight",)),
    Site("BertForMaskedLM", "bert", "lm_head", ("cls.predictions.decoder.weight",), tied="bert.embeddings"),
    Site("MambaForCausalLM", "mamba", "*.mixer.in_proj", ("backbone.layers.{}.mixer.in_proj.weight",)),
    *OWN_ATTENTION,
    *(
        Site(model, family, "router", (f"{_IN_LLAMA}{router}.weight",), layers=layers)
        for model, family, router, _, layers in _EXPERTS
    ),
    *(
        Site(
            model, family, at, (f"{_IN_LLAMA}{experts}.{leaf}",), layers=layers, experts="routed",
            mixed=family != "llama4_text",
        )
        for model, family, _, experts, layers in _EXPERTS
        for at, leaf in (("ffn_up", "gate_up_proj"), ("ffn_down", "down_proj"))
    ),
    Site(*_EXPERTS[0][:2], "ffn_down", (f"{_IN_LLAMA}mlp.experts.down_proj",), experts=(0, 2)),
    Site(*_EXPERTS[3][:2], "ffn_up", (f"{_IN_LLAMA}mlp.experts.gate_up_proj",), experts=(3,)),
    *(
        Site(
            model, family, "ffn_down", (f"{_IN_LLAMA}{shared}.down_proj.weight",), layers=layers, experts="shared",
            in_peft=family != "deepseek_v3",
        )
        for model, family, shared, layers in (
            ("Qwen2MoeForCausalLM", "qwen2_moe", "mlp.shared_expert", (0, 1)),
            ("DeepseekV3ForCausalLM", "deepseek_v3", "mlp.shared_experts", (1,)),
            ("Llama4ForCausalLM", "llama4_text", "feed_forward.shared_expert", (0, 1)),
        )
    ),
)  # fmt: skip

QUICK = (
    "LlamaForCausalLM gate_proj", "LlamaForCausalLM embedding", "LlamaForCausalLM lm_head tied",
    "Phi3ForCausalLM up_proj", "BertForSequenceClassification pooler", "MambaForCausalLM *.mixer.in_proj",
    "DebertaV2Model query", "FalconForCausalLM value", "CodeGenForCausalLM key", "MixtralForCausalLM router",
    "MixtralForCausalLM ffn_up routed", "GptOssForCausalLM ffn_up (3,)", "Qwen2MoeForCausalLM ffn_down shared",
    "Llama4ForCausalLM ffn_down routed",
)  # fmt: skip
EACH = pytest.mark.parametrize(
    "site", [pytest.param(s, id=str(s), marks=() if str(s) in QUICK else pytest.mark.slow) for s in SITES]
)


def _inputs(model: PreTrainedModel) -> dict[str, Any]:
    ids = torch.randint(12, 89, (2, 6), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _forward(model: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    outputs = dict(tensors(model(**_inputs(model))))
    return {name: value for name, value in outputs.items() if value.is_floating_point()}


def _run(model: Any) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        return _forward(model)


def _close(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> None:
    assert one.keys() == two.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, two[name], rtol=1e-4, atol=1e-5)


def _equal(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@EACH
def test_count(site: Site) -> None:
    """The count is that of two factors for every matrix of the weights that the site is."""
    model = site.build()
    expected = 0
    for name in site.names:
        weight = model.get_parameter(name)
        is_table = isinstance(model.get_submodule(name.rpartition(".")[0]), torch.nn.Embedding)
        rows = len(site.rows) if site.rows else weight.shape[-2]
        matrices = len(site.experts) if isinstance(site.experts, tuple) else weight[..., 0, 0].numel()
        assert not (is_table and site.rows)
        expected += matrices * RANK * (rows + weight.shape[-1])
    assert deltune.count(model, site.method).method == expected
    tuned = deltune.attach(model, site.method, head="freeze")
    assert sum(parameter.numel() for parameter in tuned.trainable_parameters()) == expected


@EACH
def test_life(site: Site, tmp_path: Path) -> None:
    """It changes nothing until it is trained, trains, is saved and loaded, mixed by row, merged and detached."""
    model = site.build()
    bare = _run(model)
    before = facts(model)
    tuned = deltune.attach(model, site.method, head="freeze")
    assert _equal(bare, _run(model))
    loss(_forward(model)).backward()
    assert all(parameter.grad is not None for parameter in tuned.trainable_parameters())
    stir(tuned)
    trained = _run(model)
    assert not _equal(bare, trained)
    tuned.save(tmp_path / "delta")
    if site.mixed:
        with tuned.rows([None, "default"]):
            mixed = _run(model)
        for name, value in mixed.items():
            torch.testing.assert_close(value[0], bare[name][0], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(value[1], trained[name][1], rtol=1e-4, atol=1e-5)
    else:
        with pytest.raises(deltune.DeltuneError, match="run its rows in a batch of their own"):
            tuned.rows([None, "default"]).__enter__()
    tuned.detach()
    model.requires_grad_(False)
    assert differences(before, facts(model)) == []
    assert _equal(bare, _run(model))
    tuned = deltune.load(model, tmp_path / "delta")
    assert _equal(trained, _run(model))
    if site.tied:
        with pytest.raises(deltune.DeltuneError, match=f"is tied to .*{re.escape(site.tied)}.* would change too"):
            tuned.merge()
    else:
        _close(trained, _run(tuned.merge()))


@EACH
def test_as_peft(site: Site) -> None:
    """PEFT's LoRA on the same weights has the same outputs and gradients."""
    if not site.in_peft:
        return
    model, other = site.build(), site.build()
    tuned = stir(deltune.attach(model, site.method, head="freeze"))
    ours = [edit for edit in tuned.delta().all_edits()]
    parameters = [name for name in site.names if not name.endswith(".weight") or _is_parameter(other, name)]
    modules = [name.removesuffix(".weight") for name in site.names if name not in parameters]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = peft.LoraConfig(
            r=RANK, lora_alpha=ALPHA, target_modules=modules, target_parameters=parameters or None, bias="none"
        )
        theirs = peft.get_peft_model(other, config).eval()
    pairs = [(edit, *_factors(theirs, other, edit)) for edit in ours]
    assert len(pairs) == len(site.names)
    with torch.no_grad():
        for edit, put, _ in pairs:
            put(edit.down.detach(), edit.up.detach(), site)
    _close(_run(model), _run(theirs))
    loss(_forward(model)).backward()
    loss(_forward(theirs)).backward()
    for edit, _, gradients in pairs:
        for one, two in zip((edit.down.grad, edit.up.grad), gradients(site), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-6)


def _is_parameter(model: PreTrainedModel, name: str) -> bool:
    """Whether PEFT reaches a weight as a parameter alone, since its module is no linear that returns its product."""
    module = model.get_submodule(name.removesuffix(".weight"))
    return not isinstance(module, torch.nn.Linear | torch.nn.Embedding) or "Router" in type(module).__name__


Put = Callable[[torch.Tensor, torch.Tensor, Site], None]


def _factors(theirs: Any, model: PreTrainedModel, edit: Any) -> tuple[Put, Callable[[Site], Iterator[torch.Tensor]]]:
    """Functions that put our factors into PEFT's for the same weight, and read their gradients as ours are laid out."""
    path = edit.place.target.path
    layer = next(m for name, m in theirs.named_modules() if name == f"base_model.model.{path}")
    if isinstance(layer, peft.tuners.lora.Embedding):
        a, b = layer.lora_embedding_A["default"], layer.lora_embedding_B["default"]
    else:
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    weight = edit.place.weight
    swapped = weight is not None and weight.transposed and layer._did_swap_in_out_features
    number = weight.number if weight is not None else 0
    chosen = list(edit.place.experts or range(number))

    def put(down: torch.Tensor, up: torch.Tensor, site: Site) -> None:
        a.zero_()
        b.zero_()
        if number:
            first, second = (up.mT, down.mT) if swapped else (down, up)
            a.view(number, RANK, -1)[chosen] = first
            b.view(b.shape[0], RANK, number)[..., chosen] = second.permute(1, 2, 0)
            return
        a.copy_(down)
        b[list(site.rows) if site.rows else slice(None)] = up

    def gradients(site: Site) -> Iterator[torch.Tensor]:
        if number:
            first = a.grad.view(number, RANK, -1)[chosen]
            second = b.grad.view(b.shape[0], RANK, number)[..., chosen].permute(2, 0, 1)
            yield from (second.mT, first.mT) if swapped else (first, second)
            return
        yield a.grad
        yield b.grad[list(site.rows) if site.rows else slice(None)]

    return put, gradients


def test_peft_folder(tmp_path: Path) -> None:
    """PEFT loads what is exported from embeddings and the vocabulary, and what it has at the vocabulary is read."""
    site = Site(*LLAMA, ("query", "embedding", "lm_head"), ())
    model = site.build()
    tuned = stir(deltune.attach(model, site.method))
    expected = _run(model)
    deltune.export(model, tmp_path / "theirs")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = peft.PeftModel.from_pretrained(site.build(), tmp_path / "theirs").eval()
    _close(expected, _run(theirs))
    tuned.detach()
    tuned = stir(deltune.attach(model, f"lora(rank={RANK}, alpha={ALPHA}, at=('query', 'lm_head'))"))
    expected = _run(model)
    deltune.export(model, tmp_path / "again")
    tuned.detach()
    deltune.load(model, tmp_path / "again")
    _close(expected, _run(model))


def test_layers_below_the_vocabulary_are_frozen() -> None:
    tuned = deltune.attach(Site(*LLAMA, "", ()).build(), "lora(rank=2, at='lm_head')")
    assert len(find_boundary(tuned.anatomy, tuned.delta()).layers) == 2


def test_projections_of_every_own_attention() -> None:
    """Query, key and value are known where attention is written as products, and what is hidden says why."""
    site = OWN_ATTENTION[0]
    anatomy = deltune.inspect(site.build())
    (attention,) = anatomy.layers[0].attentions
    stem = "encoder.layer.0.attention.self"
    observed = [linear and linear.path for linear in (attention.query, attention.key, attention.value)]
    assert observed == [f"{stem}.{role}_proj" for role in ("query", "key", "value")]
    assert attention.heads is None
    assert all(fact.startswith("heads of ") and "attention interface" in fact for fact in anatomy.unobserved)


def test_a_projection_that_is_called_on_what_all_rows_share() -> None:
    """DeBERTa may project its table of distances by the query's own linear, which has no rows of a batch."""
    shared = {"relative_attention": True, "share_att_key": True, "pos_att_type": ["p2c", "c2p"]}
    site = Site("DebertaV2Model", "deberta-v2", "key", (), changes={**shared, "max_relative_positions": 8})
    model = site.build()
    tuned = stir(deltune.attach(model, site.method))
    trained = _run(model)
    with pytest.raises(deltune.DeltuneError, match="run its rows in a batch of their own"):
        tuned.rows(["default", None]).__enter__()
    _close(trained, _run(tuned.merge()))


_BERT, _MIXTRAL = ("BertModel", "bert"), ("MixtralForCausalLM", "mixtral")
NOWHERE = (
    (LLAMA, "lora(at='router')", "no mixture of experts whose router"),
    (LLAMA, "lora(at='pooler')", "has no pooler"),
    (_BERT, "lora(at='lm_head')", "no projection to the vocabulary"),
    (_BERT, "lora(at='gate_proj')", "no FFN of this model shows a gate: take 'ffn_up'"),
    (LLAMA, "lora(at='*.qproj')", "paths here end in .*q_proj"),
    (LLAMA, "lora(at='ffn_up', experts='routed')", "experts='routed': this model has no mixture"),
    (_MIXTRAL, "lora(at='ffn_up', experts='shared')", "has an expert that every token goes through"),
    (_MIXTRAL, "lora(at='ffn_up', experts=(4,))", "has 4, 0 to 3, and no 4"),
    (_MIXTRAL, "lora(at='gate_proj')", "no projections of their own: take 'ffn_up'"),
    (_MIXTRAL, "lora(at='ffn_up', dropout=0.1)", "no x whose values could be dropped"),
    (_MIXTRAL, "Modification('ffn_up', Bottleneck(2))", "only a form that is a change of a weight"),
    (LLAMA, "lora(at='embedding', dropout=0.1)", "token ids have none: give dropout=0"),
    (LLAMA, "trainable_tokens(tokens=(98, 99))", "has 0 to 98: model.resize_token_embeddings\\(100\\)"),
    (None, "lora(at='query', experts='routed')", "chooses among linears of FFNs"),
    (None, "lora(at='ffn_up', experts='some')", "unknown experts 'some'"),
    (None, "lora(at='lm_head', layers='upper half')", "is in no layer"),
    (None, "apet(trainable_tokens(tokens=(1,)), parameters=3)", "put it outside of apet"),
    (None, "trainable_tokens(tokens=(1, 1))", "each once"),
    (None, "Modification('embedding', Bottleneck(2))", "reads token ids, which Bottleneck cannot"),
)
"""A model, or None where no model has it; an expression; and what the refusal says."""


def test_places_that_do_not_exist() -> None:
    models = {names: Site(*names, "", ()).build() for names in (LLAMA, _BERT, _MIXTRAL)}
    known = {names: facts(model) for names, model in models.items()}
    for names, text, says in NOWHERE:
        with pytest.raises(deltune.DeltuneError, match=says):
            deltune.parse(text) if names is None else deltune.attach(models[names], text)
        assert names is None or differences(known[names], facts(models[names])) == [], text


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("LlamaForCausalLM", "llama"),
        ("GPT2LMHeadModel", "gpt2"),
        ("BertForMaskedLM", "bert"),
        ("BartForConditionalGeneration", "bart"),
        ("T5ForConditionalGeneration", "t5"),
        ("WhisperForConditionalGeneration", "whisper"),
        ("LlavaForConditionalGeneration", "llava"),
    ],
)
def test_the_vocabulary_of_a_configuration(name: str, family: str) -> None:
    """AutoModel has no projection to it, so that the language model of the configuration is counted."""
    model = random_model(name, tiny(family))
    parts = ["lora(rank=2, at='lm_head')", "lora(rank=2, at=('query', 'lm_head')) + layernorm"]
    for text in (*parts, "trainable_tokens(tokens=(1, 2))", f"trainable_tokens(tokens=(1, 2)) + {parts[0]}"):
        of_model, of_config = deltune.count(model, text), deltune.count(model.config, text)
        note = f"counted on {name}, since the base model has no output embeddings"
        assert of_config == replace(of_model, scope=(note, *of_model.scope)) and of_config.method > 0
    budget = deltune.count(model, "lora(rank=3, at='lm_head')").method
    fitted = deltune.fit(model.config, "lora(rank=?, at='lm_head')", budget)
    assert fitted == deltune.parse("lora(rank=3, at='lm_head')")


def test_a_configuration_without_a_vocabulary() -> None:
    with pytest.raises(deltune.DeltuneError, match="ViTModel has no projection to the vocabulary"):
        deltune.count(tiny("vit"), "lora(at='lm_head')")


# -- rows of tokens, and tokens that were added


TOKENS = (20, 30)


@pytest.mark.parametrize("tied", [False, True])
def test_rows_of_tokens(tied: bool, tmp_path: Path) -> None:
    """Chosen rows are trained and no others, those of an output projection of its own included."""
    site = Site(*LLAMA, "", (), changes={"tie_word_embeddings": tied})
    model = site.build()
    bare, before = _run(model), facts(model)
    text = f"trainable_tokens(tokens={TOKENS})"
    tuned = deltune.attach(model, text)
    tables = 1 if tied else 2
    assert tuned.count().method == tables * len(TOKENS) * model.config.hidden_size
    assert _equal(bare, _run(model))
    loss(_forward(model)).backward()
    stir(tuned)
    trained = _run(model)
    with tuned.rows([None, "default"]):
        mixed = _run(model)["logits"]
    torch.testing.assert_close(mixed, torch.stack([bare["logits"][0], trained["logits"][1]]))
    tuned.save(tmp_path / "delta")
    tuned.detach()
    model.requires_grad_(False)
    assert differences(before, facts(model)) == []
    tuned = deltune.load(model, tmp_path / "delta")
    assert _equal(trained, _run(model))
    old = {name: value.clone() for name, value in site.build().named_parameters()}
    merged = tuned.merge()
    assert _equal(trained, _run(merged))
    for name, value in merged.named_parameters():
        changed = (value != old[name]).flatten(1).any(1).nonzero().flatten().tolist() if value.dim() > 1 else []
        assert changed == (list(TOKENS) if value.shape[0] == model.config.vocab_size else []), name


@pytest.mark.parametrize("name", ["llama", "llama tied", "t5"])
def test_added_tokens(name: str, tmp_path: Path) -> None:
    """A delta with the rows of added tokens loads on a base that has them anew, and says so of one that has not."""
    model = "T5ForConditionalGeneration" if name == "t5" else "LlamaForCausalLM"
    changes = {"tie_word_embeddings": True} if name == "llama tied" else {}
    base = Site(model, name.split()[0], "", (), changes=changes).build()
    size = base.get_input_embeddings().weight.shape[0]
    ids = torch.tensor([[20, size, 30, size + 1]])
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if name == "t5" else {})

    def resized(seed: int, more: int) -> PreTrainedModel:
        torch.manual_seed(seed)
        result = copy.deepcopy(base)
        result.resize_token_embeddings(size + more, mean_resizing=False)
        return result.requires_grad_(False)

    def logits(model: PreTrainedModel) -> torch.Tensor:
        with torch.no_grad():
            answer: torch.Tensor = model(**inputs)[0][..., : size + 2]
            return answer

    tuned = stir(deltune.attach(resized(1, 2), f"lora(rank=2) + trainable_tokens(tokens={(size, size + 1)})"))
    expected = logits(tuned.model)
    tuned.save(tmp_path / "delta")
    for fresh in (resized(2, 2), resized(3, 5)):
        assert not torch.equal(logits(fresh), expected)
        deltune.load(fresh, tmp_path / "delta")
        torch.testing.assert_close(logits(fresh), expected)
    for allowed in ("same", "any"):  # no base without these rows can take them
        with pytest.raises(
            deltune.DeltuneError,
            match=rf"has rows for tokens that were added to its base model .*It has {size + 2} token embeddings and "
            rf"this one {size}\. Call model\.resize_token_embeddings\({size + 2}\)",
        ):
            deltune.load(copy.deepcopy(base), tmp_path / "delta", base=allowed)
    other = resized(2, 2)
    with torch.no_grad():
        other.get_input_embeddings().weight[:size] += 1
    with pytest.raises(deltune.DeltuneError, match=r"the embedding of this one .* differ"):
        deltune.load(other, tmp_path / "delta")


def test_added_tokens_whose_rows_no_delta_has(tmp_path: Path) -> None:
    """A delta without the rows of the added tokens says what to do on each kind of base."""
    base = Site(*LLAMA, "", ()).build()
    deltune.attach(base, "lora(rank=2)").save(tmp_path / "before")
    deltune.tuned(base).detach()
    torch.manual_seed(1)
    larger = copy.deepcopy(base)
    larger.resize_token_embeddings(101, mean_resizing=False)
    deltune.load(larger, tmp_path / "before").detach()  # its rows are those of the base
    deltune.attach(larger, "lora(rank=2)").save(tmp_path / "after")
    with pytest.raises(deltune.DeltuneError, match=r"Call model\.resize_token_embeddings\(101\) before"):
        deltune.load(copy.deepcopy(base), tmp_path / "after")
    torch.manual_seed(2)
    base.resize_token_embeddings(101, mean_resizing=False)
    with pytest.raises(deltune.DeltuneError, match=r"trainable_tokens\(tokens="):
        deltune.load(base, tmp_path / "after")


@pytest.mark.parametrize(("name", "family"), [("XLNetModel", "xlnet"), ("FNetModel", "fnet")])
def test_what_mixes_the_tokens_otherwise(name: str, family: str) -> None:
    """XLNet multiplies by parameters of its own, FNet transforms: that their attention does not show is said."""
    anatomy = deltune.inspect(Site(name, family, "", ()).build())
    assert any(fact.startswith("what mixes the tokens in the ") for fact in anatomy.unobserved)
    assert all(layer.ffns and layer.norms for layer in anatomy.layers)


def test_observed_on_zeros() -> None:
    """`inspect` says that shapes alone were not enough, and why."""
    anatomy = deltune.inspect(Site("ReformerModel", "reformer", "", ()).build())
    assert anatomy.on_zeros and "observed on zeros" in str(anatomy) and anatomy.on_zeros in str(anatomy)
    assert not deltune.inspect(Site(*LLAMA, "", ()).build()).on_zeros


@pytest.mark.parametrize("method", ["lora(rank=2, at='lm_head')", "trainable_tokens(tokens=(5, 6))"])
def test_a_loss_that_reads_the_weight_of_lm_head_is_refused(method: str) -> None:
    """As TRL's trainers and Liger's kernels compute logits; what does not act there is served by such a loss."""
    model = build(FAMILIES["llama"], "causal")
    inputs = batch(model)["input_ids"]
    original = model.forward

    def fused(input_ids: torch.Tensor, fuse: bool = False) -> Any:
        if not fuse:
            return original(input_ids)
        return torch.nn.functional.linear(model.model(input_ids)[0], model.lm_head.weight)

    model.forward = fused
    tuned = stir(deltune.attach(model, method, name="there"))
    stir(deltune.attach(model, "lora(rank=2)", name="elsewhere"))
    expected = model(inputs).logits
    assert torch.allclose(model(inputs, fuse=True), expected)
    with tuned.disable():
        assert torch.allclose(model(inputs, fuse=True), model(inputs).logits)
    tuned.use("there")
    outputs = model(inputs).logits
    for scope in (contextlib.nullcontext(), tuned.rows(["elsewhere"] * (len(inputs) - 1) + ["there"])):
        with scope, pytest.raises(deltune.DeltuneError, match="did not call lm_head, so the delta did not act there"):
            model(inputs, fuse=True)
    assert torch.equal(model(inputs).logits, outputs)
    tuned.detach("there")
    assert torch.allclose(model(inputs, fuse=True), model(inputs).logits)


@pytest.mark.parametrize("part", ["forward", "lm_head", "all"])
def test_a_compiled_lm_head_is_called(part: str) -> None:
    """What is compiled inside of a pass counts as called."""
    model = build(FAMILIES["llama"], "causal")
    inputs = batch(model)["input_ids"]
    stir(deltune.attach(model, "lora(rank=2, at='lm_head')"))
    expected = model(inputs, use_cache=False).logits
    torch.compiler.reset()
    if part == "forward":
        model.forward = torch.compile(model.forward, backend="eager")
    elif part == "lm_head":
        model.lm_head.compile(backend="eager")
    else:
        model = torch.compile(model, backend="eager", fullgraph=True)
    for _ in range(2):
        assert torch.allclose(model(inputs, use_cache=False).logits, expected)
    torch.compiler.reset()


def test_a_linear_before_the_vocabulary_is_not_the_vocabulary() -> None:
    """DeBERTa's new head returns the linear before the product with the word embeddings as its output embeddings."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    model = DebertaV2ForMaskedLM(DebertaV2Config(legacy=False, vocab_size=64, **sizes))
    assert deltune.inspect(model).vocabulary is None
    with pytest.raises(deltune.DeltuneError, match="no projection to the vocabulary"):
        deltune.attach(model, "lora(rank=2, at='lm_head')")
    with pytest.raises(deltune.DeltuneError, match="may read the word embeddings"):
        deltune.attach(model, "trainable_tokens(tokens=(60,))")


def test_the_padding_token_gets_no_gradient() -> None:
    model = BertModel(BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4))
    with pytest.warns(UserWarning, match="token 0 is the padding token of embeddings.word_embeddings.weight"):
        deltune.attach(model, "trainable_tokens(tokens=(0, 5))")
