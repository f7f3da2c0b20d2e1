"""Beyond dense text models: experts, mixers of tokens, images, sounds and several towers.

Facts are written down from the families' own sources, as in `families`.
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

import deltune
from deltune.methods.resolve import resolve
from deltune.runtime.modules import Delta
from runtime.identity.configurations import tiny
from runtime.identity.specimens import random_model
from tables.specimens import differences, facts, loss, stir, tensors
from tables.versions import needs

Batch = Callable[[torch.Generator], dict[str, Any]]


def _tokens(made: torch.Generator) -> dict[str, Any]:
    ids = torch.randint(12, 89, (2, 6), generator=made)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _image(made: torch.Generator) -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 3, 32, 32, generator=made)}


def _sound(made: torch.Generator) -> dict[str, Any]:
    return {"input_values": torch.randn(2, 2000, generator=made)}


def _spectrogram(made: torch.Generator) -> dict[str, Any]:
    return {
        "input_features": torch.randn(2, 80, 40, generator=made),
        "decoder_input_ids": torch.randint(12, 89, (2, 4), generator=made),
    }


PARALLEL = "parallel_adapter(at=('attention', 'ffn'), rank=2)"
VISION = {"image_size": 32, "patch_size": 8}


@dataclass(frozen=True)
class Kind:
    """A model class, and for each of its layers what mixes tokens and what follows, by paths inside the layer.

    Attributes:
        name: The model class.
        family: transformers' name of the family.
        layers: For each layer its path; then its mixers of tokens, each with its kind; then its FFNs; then its mixtures
            of experts, each with its number of experts and its router, None where it does not show.
        batch: Makes its inputs.
        changes: Settings beside those of the tiny configuration.
        lacks: Methods that it cannot have, with what the refusal says.
    """

    name: str
    family: str
    layers: tuple[tuple[str, dict[str, str], tuple[str, ...], dict[str, tuple[int, str | None]]], ...]
    batch: Batch = _tokens
    changes: dict[str, Any] = field(default_factory=dict)
    lacks: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    def build(self) -> PreTrainedModel:
        return random_model(self.name, tiny(self.family, **self.changes))

    def inputs(self) -> dict[str, Any]:
        return self.batch(torch.Generator().manual_seed(0))


_SELF, _MIXER = {"self_attn": "self"}, {"mixer": "mixer"}
_NO_BIAS = {"bitfit": "no bias in"}
_NO_QUERY = {"lora(rank=2)": "no site 'query'", "prefix(length=2)": "no site 'heads'"}
_NO_TOKENS = {"prompt(length=2)": "reads no token ids"}

_NO_ROUTER: dict[str, tuple[int, str | None]] = {"mlp": (4, None)}
KINDS = (
    Kind(
        "MixtralForCausalLM", "mixtral",
        tuple((f"model.layers.{i}", _SELF, (), {"mlp": (4, "mlp.gate")}) for i in range(2)), lacks=_NO_BIAS,
    ),
    Kind(
        "JambaForCausalLM", "jamba",
        (("model.layers.0", {"mamba": "mixer"}, ("feed_forward",), {}),
         ("model.layers.1", _SELF, (), {"feed_forward": (4, "feed_forward.router")})),
    ),
    Kind(
        "ViTForImageClassification", "vit",
        tuple((f"vit.layers.{i}", {"attention": "self"}, ("mlp",), {}) for i in range(2)), _image, VISION, _NO_TOKENS,
    ),
    Kind(
        "MambaForCausalLM", "mamba", tuple((f"backbone.layers.{i}", _MIXER, (), {}) for i in range(2)),
        lacks={**_NO_QUERY, "adapter(rank=2)": "no site 'ffn'", PARALLEL: "no site 'ffn'"},
    ),
    Kind(
        "GptOssForCausalLM", "gpt_oss",
        tuple((f"model.layers.{i}", _SELF, (), {"mlp": (4, "mlp.router")}) for i in range(2)),
    ),
    Kind(
        "Qwen2MoeForCausalLM", "qwen2_moe",
        tuple((f"model.layers.{i}", _SELF, (), {"mlp": (4, "mlp.gate")}) for i in range(2)),
    ),
    Kind(
        "DeepseekV3ForCausalLM", "deepseek_v3",
        (("model.layers.0", _SELF, ("mlp",), {}), ("model.layers.1", _SELF, (), {"mlp": (4, "mlp.gate")})),
        lacks=_NO_BIAS,
    ),
    Kind(
        "WhisperForConditionalGeneration", "whisper",
        (*((f"model.encoder.layers.{i}", _SELF, ("",), {}) for i in range(2)),
         *((f"model.decoder.layers.{i}", {**_SELF, "encoder_attn": "cross"}, ("",), {}) for i in range(2))),
        _spectrogram, {"max_source_positions": 20, "num_mel_bins": 80},
        _NO_TOKENS,
    ),
    # several residual streams, which each sub-layer is added to with weights of its own
    Kind(
        "DeepseekV4ForCausalLM", "deepseek_v4",
        tuple((f"model.layers.{i}", _SELF, (), _NO_ROUTER) for i in range(2)),
        lacks={**_NO_BIAS, "lora(rank=2)": "is not the output of one linear",
               "prompt(length=2)": "runs on inputs_embeds alone"},
    ),
    # a module adds the output of a sub-layer to the stream, both scaled and shifted
    Kind(
        "ZayaForCausalLM", "zaya", tuple((f"model.layers.{i}", _SELF, (), _NO_ROUTER) for i in range(2)),
        lacks={"lora(rank=2)": "is not the output of one linear"},
    ),
    # a convolution between a sub-layer and the stream, and a norm inside the table of words
    Kind(
        "InklingForCausalLM", "inkling_text",
        tuple((f"model.layers.{i}", _SELF, (), _NO_ROUTER) for i in range(2)), lacks=_NO_BIAS,
    ),
    # it pools its tokens, and does not run on a few
    Kind(
        "FunnelForMaskedLM", "funnel",
        (*((f"funnel.encoder.blocks.{i}.0", {"attention": "self"}, ("ffn",), {}) for i in range(2)),
         ("funnel.decoder.layers.0", {"attention": "self"}, ("ffn",), {})),
        changes={"block_sizes": [1, 1], "num_decoder_layers": 1},
        lacks={"prefix(length=2)": "attention interface"},
    ),
)  # fmt: skip

QUICK = ("MixtralForCausalLM", "JambaForCausalLM", "ViTForImageClassification")
EACH = pytest.mark.parametrize(
    "kind", [pytest.param(k, id=k.name, marks=() if k.name in QUICK else pytest.mark.slow) for k in KINDS]
)
METHODS = (
    "layernorm", "bitfit", "lora(rank=2)", "prefix(length=2)", "prompt(length=2)", "adapter(rank=2)", PARALLEL,
)  # fmt: skip


@EACH
def test_layers(kind: Kind) -> None:
    anatomy = deltune.inspect(kind.build())
    assert [layer.path for layer in anatomy.layers] == [path for path, *_ in kind.layers]
    for layer, (path, mixers, ffns, experts) in zip(anatomy.layers, kind.layers, strict=True):
        assert {a.path: a.kind for a in layer.attentions} == {f"{path}.{name}": k for name, k in mixers.items()}
        assert [ffn.path for ffn in layer.ffns] == [f"{path}.{name}".rstrip(".") for name in ffns]
        observed = {e.path: (e.number, e.router) for e in layer.experts}
        assert observed == {
            f"{path}.{name}": (n, router and f"{path}.{router}") for name, (n, router) in experts.items()
        }
        assert all(norm.of for norm in layer.norms if norm.place in ("pre", "post"))
    assert all(str(e.number) in str(anatomy) for layer in anatomy.layers for e in layer.experts)


def _run(model: PreTrainedModel, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        torch.manual_seed(0)
        return dict(tensors(model(**inputs)))


def _equal(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def life(model: PreTrainedModel, inputs: dict[str, Any], text: str, folder: Path, inside: str = "") -> deltune.Tuned:
    """Train a method, save it, detach it and load it again, and return its handle.

    Detaching leaves the model as it was, and some of what is trained `inside` modules of a name gets a gradient.
    """
    bare = _run(model, inputs)  # first: a model of transformers notes things at its first run
    before = facts(model)
    tuned = deltune.attach(model, text, head="freeze")
    if "prefix" not in text and "prompt" not in text:
        assert _equal(bare, _run(model, inputs)), f"{text} changes the outputs before it is trained"
    loss(dict(tensors(model(**inputs)))).backward()
    assert any(p.grad is not None for name, p in tuned.named_trainable_parameters() if inside in name)
    stir(tuned)
    trained = _run(model, inputs)
    assert not _equal(bare, trained), f"{text} has no effect"
    tuned.save(folder / "delta")
    tuned.detach()
    model.requires_grad_(False)
    assert differences(before, facts(model)) == [], text
    loaded = deltune.load(model, folder / "delta")
    assert _equal(trained, _run(model, inputs)), f"{text} is another one after it was loaded"
    return loaded


@EACH
def test_life(kind: Kind, tmp_path: Path) -> None:
    """Every method trains, saves and loads, and detaching or a refusal leaves the model as it was."""
    model, inputs = kind.build(), kind.inputs()
    bare = _run(model, inputs)
    before = facts(model)
    for text in METHODS:
        if text in kind.lacks:
            with pytest.raises(deltune.DeltuneError, match=kind.lacks[text]):
                deltune.attach(model, text)
            assert differences(before, facts(model)) == [], text
        else:
            life(model, inputs, text, tmp_path).detach()
            model.requires_grad_(False)
    assert _equal(bare, _run(model, inputs))


@EACH
def test_rows(kind: Kind) -> None:
    """Rows of a batch with deltas of their own give what each gives alone."""
    model, inputs = kind.build(), kind.inputs()
    methods = {"one": "layernorm + adapter(rank=2)", "two": "parallel_adapter(rank=2)"}
    if "adapter(rank=2)" in kind.lacks:
        methods = {"one": "layernorm", "two": "lora(rank=2, at='output')"}
    for seed, (name, text) in enumerate(methods.items()):
        tuned = stir(deltune.attach(model, text, name=name, head="freeze"), seed)
    alone = {}
    for name in methods:
        tuned.use(name)
        alone[name] = _run(model, inputs)["logits"]
    with tuned.rows(["one", "two"]):
        mixed = _run(model, inputs)["logits"]
    for row, name in enumerate(methods):
        torch.testing.assert_close(mixed[row], alone[name][row])


@pytest.mark.parametrize(("kind", "dense"), [(KINDS[0], None), (KINDS[1], (0,))], ids=str)
def test_inside_an_ffn_that_is_a_mixture_of_experts(kind: Kind, dense: tuple[int, ...] | None) -> None:
    """What the refusal of `ia3` advises can be had: its other parts, and the layers whose FFNs have no experts."""
    model = kind.build()
    with pytest.raises(deltune.DeltuneError, match=r"'ffn_inner' is inside an FFN, and .* is a mixture of 4") as caught:
        deltune.count(model, "ia3")
    message = str(caught.value)
    rest = message.split("the parts of ia3 that this model can have: ")[1]
    advised = re.search(r"layers=(\(.*?\)) have FFNs without experts", message)
    assert (advised and ast.literal_eval(advised[1])) == dense and ("as all FFNs of this decoder" in message) == (
        not dense
    )
    for text in (rest, *([f"Modification('ffn_inner', Rescale(), 'sequential', layers={dense})"] if dense else [])):
        tuned = deltune.attach(model, text, head="freeze")
        model(**kind.inputs()).logits.sum().backward()
        assert all(p.grad is not None for p in tuned.trainable_parameters())
        tuned.detach()
    assert {part.site for part in deltune.parse(rest).parts if isinstance(part, deltune.Modification)} == {
        "key",
        "value",
    }


def test_a_prompt_before_a_decoder_that_takes_no_mask_of_it() -> None:
    """FSMT gives its decoder the encoder's mask under another name, where no prompt can be shown to it."""
    model = random_model("FSMTForConditionalGeneration", tiny("fsmt"))
    before = facts(model)
    with pytest.raises(deltune.DeltuneError, match="FSMTDecoder has no argument encoder_attention_mask"):
        deltune.attach(model, "prompt(length=2)")
    assert differences(before, facts(model)) == []


def test_a_refusal_says_which_projections_exist() -> None:
    """A state-space model has no queries, and the message says what can be named in their place."""
    model = KINDS[3].build()
    with pytest.raises(
        deltune.DeltuneError, match=r"no site 'query' .*it has output; .* path, such as '(.*?)'"
    ) as caught:
        deltune.count(model, "lora")
    advised = re.findall(r"such as '(.*?)'", str(caught.value))
    assert deltune.count(model, f"lora(at={advised[0]!r})").method > 0


def test_keys_and_values_of_an_earlier_layer() -> None:
    """Gemma 3n's last layers have none of their own: LoRA acts where they are made, and the count says in how many."""
    model = random_model("Gemma3nForCausalLM", tiny("gemma3n_text"))
    attentions = [layer.attentions[0] for layer in deltune.inspect(model).layers]
    assert [a.reused for a in attentions] == [(), (), ("key", "value"), ("key", "value")]
    assert all(a.query is not None and (a.value is None) == bool(a.reused) for a in attentions)
    count = deltune.count(model, "lora(rank=2)")
    assert count.scope == ("site 'value' exists in 2 of 4 layers",)
    inputs = _tokens(torch.Generator().manual_seed(0))
    tuned = stir(deltune.attach(model, "lora(rank=2) + ia3"))
    loss(dict(tensors(model(**inputs)))).backward()
    assert all(p.grad is not None for p in tuned.trainable_parameters())
    trained = _run(model, inputs)["logits"]
    tuned.merge()
    torch.testing.assert_close(_run(model, inputs)["logits"], trained)


def test_layers_left_out_are_counted() -> None:
    model = KINDS[1].build()
    assert "site 'query' exists in 1 of 2 layers" in str(deltune.count(model, "lora(rank=2)"))
    assert deltune.count(model, "adapter(rank=2)").scope == ()
    few = "the mask has scalars at site 'output' in 1 of 2 layers"
    assert deltune.count(model, "apet(lora(rank=1, at='output'), parameters=2)").scope == (few,)
    part = str(deltune.count(model, "apet(lora(rank=2, at='query'), parameters=2)"))
    assert "site 'query' exists in 1 of 2 layers" in part and "mask" not in part


# -- several towers


def _llava(**changes: Any) -> PreTrainedModel:
    text, vision = tiny("llama"), tiny("clip_vision_model", **VISION)
    settings = {"image_token_id": 7, "image_seq_length": 16, **changes}
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, **settings)
    torch.manual_seed(0)
    return transformers.LlavaForConditionalGeneration(config).requires_grad_(False).eval()


@pytest.fixture(scope="module")
def llava() -> PreTrainedModel:
    return _llava()


def test_towers(llava: PreTrainedModel) -> None:
    """By default a method acts on the tower of text, a selection as a modification does, and the count says so."""
    anatomy = deltune.inspect(llava)
    assert anatomy.towers == ("text", "vision", "projector")
    vision = [name for name, _ in llava.named_parameters() if name.startswith("model.vision_tower.")]
    projector = [name for name, _ in llava.named_parameters() if name.startswith("model.multi_modal_projector.")]
    assert [t.name for t in anatomy.tensors if t.tower == "vision"] == vision
    assert [t.name for t in anatomy.tensors if t.tower == "projector"] == projector
    (part,) = anatomy.other_towers
    assert (part.tower, part.tower_path) == ("vision", "model.vision_tower")
    assert [layer.path for layer in part.layers] == [f"model.vision_tower.encoder.layers.{i}" for i in range(2)]
    for text in ("layernorm", "lora", "full", "adapter"):
        count = deltune.count(llava, text)
        left = [line.split(" with ")[0] for line in count.scope if line.startswith("the tower ")]
        assert left == ["the tower vision", "the tower projector"]
    sizes = {tower: deltune.count(llava, f"full(tower='{tower}')").method for tower in (*anatomy.towers, "all")}
    read = {t.name for t in anatomy.tensors if t.receives_gradient}
    assert sizes["all"] == sum(p.numel() for name, p in llava.named_parameters() if name in read)
    assert sizes["all"] == sum(sizes[t] for t in anatomy.towers)
    with pytest.raises(deltune.DeltuneError, match="tower='audio': this model has"):
        deltune.count(llava, "lora(tower='audio')")
    with pytest.raises(deltune.DeltuneError, match=r"no bias in .* of the tower text"):
        deltune.count(llava, "bitfit")


UNREAD = (
    "layer 1, and 2 other tensors, such as model.vision_tower.post_layernorm.weight, with 8,608 scalars, do not reach "
    "the output"
)


@needs("transformers", "5.23")
def test_a_count_says_that_it_cannot_be_seen_what_is_read_of_a_tower() -> None:
    model = _llava(vision_feature_layer=0)
    assert any("cannot be seen" in line for line in deltune.count(model, "lora(tower='vision')").scope)
    assert not any("cannot be seen" in line for line in deltune.count(model, "lora").scope)
    assert "which layers of the tower model.vision_tower" in str(deltune.inspect(model))


@pytest.mark.parametrize("after_a_run", [False, True])
def test_layers_that_the_model_does_not_read(after_a_run: bool) -> None:
    """LLaVA reads the vision tower's states before its last layer: what is behind them gets no gradient.

    `inspect` and the count say so, and a method leaves it. transformers notes at a model's first run where it captures
    hidden states, which must not change what is observed.
    """
    model = _llava()
    if after_a_run:
        _run(model, text_and_image())
    anatomy = deltune.inspect(model)
    assert anatomy.unread("vision") == UNREAD and UNREAD in str(anatomy)
    assert anatomy.unread("text") == anatomy.unread("projector") == "" and anatomy.unobserved == ()
    model.requires_grad_(True)
    loss(dict(tensors(model(**text_and_image())))).backward()
    vision = {name: p for name, p in model.named_parameters() if ".vision_tower." in name}
    assert {t.name for t in anatomy.tensors if not t.receives_gradient} == {
        n for n, p in vision.items() if p.grad is None
    }
    model.requires_grad_(False)


@pytest.mark.parametrize("text", ["full", "layernorm", "lora(rank=2)", "adapter(rank=2)", "lora(rank=2, at='*fc1')"])
def test_a_method_leaves_what_is_not_read(text: str) -> None:
    model, text = _llava(), f"{text.removesuffix(')')}{',' if '(' in text else '('}tower='vision')"
    tuned = stir(deltune.attach(model, text))
    assert f"of the tower vision, {UNREAD} and are left as they are" in tuned.count().scope
    loss(dict(tensors(model(**text_and_image())))).backward()
    assert all(p.grad is not None for _, p in tuned.named_trainable_parameters())


@pytest.mark.parametrize("text", ["layernorm", "lora"])
def test_a_method_where_nothing_is_read(llava: PreTrainedModel, text: str) -> None:
    with pytest.raises(deltune.DeltuneError, match="nothing would train there: of the tower vision, layer 1, and"):
        deltune.count(llava, f"{text}(layers=(1,), tower='vision')")


def test_a_tower_that_is_read_later() -> None:
    """Qwen3-VL's language model adds what the vision tower makes of earlier layers behind its own first layers."""
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64}
    vision = {
        "depth": 2,
        "num_heads": 4,
        "out_hidden_size": 32,
        "patch_size": 8,
        "deepstack_visual_indexes": [0],
        **sizes,
    }
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    text = {
        "vocab_size": 99, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "rope_parameters": rope, **sizes,
    }  # fmt: skip
    with torch.device("meta"):
        model = transformers.Qwen3VLForConditionalGeneration(
            transformers.Qwen3VLConfig(vision_config=vision, text_config=text, image_token_id=7)
        )
    anatomy = deltune.inspect(model)
    assert any("deepstack" in t.name for t in anatomy.tensors if t.tower == "vision")
    assert anatomy.unread("vision") == "" and anatomy.unobserved == ()


def _two_vision_towers() -> PreTrainedModel:
    """A model that reads its images twice, in a low and in a high resolution."""
    sizes: dict[str, Any] = {
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    }  # fmt: skip
    config = transformers.DeepseekVLHybridConfig(
        text_config={"model_type": "llama", "vocab_size": 99, **sizes},
        vision_config={"model_type": "siglip_vision_model", "image_size": 32, "patch_size": 8, **sizes},
        high_res_vision_config={
            "model_type": "sam_vision_model", "image_size": 32, "patch_size": 8, "window_size": 2, "mlp_dim": 32,
            "output_channels": 8, "global_attn_indexes": [1], **sizes,
        },
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.DeepseekVLHybridForConditionalGeneration(config).requires_grad_(False).eval()


def test_two_towers_of_one_name_are_both_tuned(tmp_path: Path) -> None:
    """Each of them has edits of its own: what is counted is trained, saved and loaded."""
    model, text = _two_vision_towers(), "adapter(rank=4, tower='vision')"
    assert [part.tower for part in deltune.inspect(model).other_towers] == ["vision", "vision"]
    count = deltune.count(model, text)
    scope = [line.split(" with ")[0].split(" the rest")[0] for line in count.scope]
    unseen = [f"which layers of the tower model.{name}" for name in ("high_res_vision_model", "vision_model")]
    assert scope == ["the tower text", "the tower projector", *unseen]
    tuned = deltune.attach(model, text)
    stir(tuned)
    trained = {name: p.detach().clone() for name, p in tuned.named_trainable_parameters()}
    for root in ("model.vision_model", "model.high_res_vision_model"):
        assert any(root.replace(".", "_") in name for name in trained), root
    assert sum(p.numel() for p in trained.values()) == count.trained
    tuned.save(tmp_path / "delta")
    tuned.detach()
    loaded = deltune.load(model, tmp_path / "delta")
    assert {name for name, _ in loaded.named_trainable_parameters()} == set(trained)
    assert all(torch.equal(p, trained[name]) for name, p in loaded.named_trainable_parameters())


def test_two_edits_of_one_key_are_refused() -> None:
    model = _two_vision_towers()
    method = deltune.parse("adapter(rank=4)")
    planned = resolve(deltune.inspect(model), method, lambda: 0)
    twice = replace(planned, edits=(planned.edits[0], planned.edits[0]))
    with pytest.raises(deltune.DeltuneError, match="two of its edits are called '0_"):
        Delta(method, twice, (), "train")


def text_and_image() -> dict[str, torch.Tensor]:
    """A row of LLaVA's: the places of an image's patches, a text, and the image."""
    made = torch.Generator().manual_seed(0)
    ids = torch.cat([torch.full((1, 16), 7), torch.randint(12, 89, (1, 4), generator=made)], dim=1)
    return {"input_ids": ids, "pixel_values": torch.randn(1, 3, 32, 32, generator=made)}


@pytest.mark.parametrize("text", ["lora(rank=2, tower='vision')", "adapter(rank=2, tower='all')"])
def test_a_method_in_another_tower(llava: PreTrainedModel, text: str, tmp_path: Path) -> None:
    life(llava, text_and_image(), text, tmp_path, "vision").detach()
    llava.requires_grad_(False)


@pytest.mark.parametrize(
    "text", ["lora(rank=2, at='*linear_*', tower='projector')", "lora(rank=2, at='*1', tower='all')"]
)
def test_linears_between_two_towers(llava: PreTrainedModel, text: str, tmp_path: Path) -> None:
    """No pass on one input calls the projector, so its linears are named by their paths; they train, save and merge."""
    inputs, model = text_and_image(), copy.deepcopy(llava)
    anatomy = deltune.inspect(model)
    assert [x.path.rpartition(".")[2] for x in anatomy.projector] == ["linear_1", "linear_2"]
    assert anatomy.projector[0].path in str(anatomy)
    loaded = life(model, inputs, text, tmp_path, "projector")
    with pytest.raises(deltune.DeltuneError, match="all rows of a batch share"), loaded.rows(["default"]):
        model(**inputs)
    trained = _run(model, inputs)["logits"]
    loaded.merge()
    torch.testing.assert_close(_run(model, inputs)["logits"], trained)


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("lora(at='*.q_proj', tower='all')", ["projector"]),
        ("lora(at='gate_proj', tower='all')", ["vision", "projector"]),
        ("lora(at='*fc1', tower='all')", ["text", "projector"]),
    ],
)
def test_all_towers_are_those_that_have_the_site(llava: PreTrainedModel, text: str, left: list[str]) -> None:
    """As for existing parameters, and the count names the others."""
    count = deltune.count(llava, text)
    scope = [line.split(" with ")[0] for line in count.scope if not line.startswith("of the tower vision, layer 1")]
    assert scope == [f"the tower {tower}" for tower in left]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("lora(at='*vision_tower*.q_proj')", "in the tower text; .* matches in another tower: tower='vision'"),
        ("lora(at='*linear_1')", "matches in another tower: tower='projector'"),
        ("lora(at='*nothing', tower='all')", "no linear of this model has a path .* in the tower text"),
        (
            "lora(tower='projector')",
            r"no layers, so give the paths of its linears as site: model\.multi_modal_projector",
        ),
        ("layernorm(tower='projector')", "tensors there: none$"),
    ],
)
def test_where_a_tower_lacks_a_site(llava: PreTrainedModel, text: str, says: str) -> None:
    with pytest.raises(deltune.DeltuneError, match=says):
        deltune.count(llava, text)


# -- images in windows, in lists of patches, and pages


def _swin() -> PreTrainedModel:
    sizes: dict[str, Any] = {"depths": [2, 1], "num_heads": [2, 2], "embed_dim": 16, "window_size": 2}
    config = transformers.SwinConfig(image_size=32, patch_size=4, num_labels=3, **sizes)
    return transformers.SwinForImageClassification(config).requires_grad_(False).eval()


def test_windows_and_a_step_that_joins_tokens() -> None:
    """Swin's downsampling returns a quarter of the tokens, and is no FFN; every second attention reads shifted windows.

    Rows keep their deltas in windows.
    """
    model = _swin()
    blocks = [f"swin.encoder.layers.{i}.blocks.{j}" for i, j in ((0, 0), (0, 1), (1, 0))]
    layers = deltune.inspect(model).layers
    assert [layer.path for layer in layers] == blocks
    assert all(len(layer.attentions) == 1 for layer in layers)
    assert [(ffn.path, ffn.output.path) for layer in layers for ffn in layer.ffns] == [
        (f"{block}.mlp", f"{block}.mlp.fc2") for block in blocks
    ]
    inputs = _image(torch.Generator().manual_seed(0))
    alone = {}
    for seed, text in enumerate(("lora(rank=2) + layernorm", "parallel_adapter(rank=2) + prefix(length=2)")):
        tuned = stir(deltune.attach(model, text, name=f"d{seed}", head="freeze"), seed)
        alone[seed] = _run(model, inputs)["logits"]
    with tuned.rows(["d0", "d1"]):
        mixed = _run(model, inputs)["logits"]
    for row in alone:
        torch.testing.assert_close(mixed[row], alone[row][row])


@pytest.mark.parametrize(
    ("build", "read"),
    [
        (_swin, "relative_position_bias_table"),
        (lambda: random_model("T5ForConditionalGeneration", tiny("t5")), "relative_attention_bias.weight"),
        (lambda: random_model("GptOssForCausalLM", tiny("gpt_oss")), "self_attn.sinks"),
    ],
    ids=["swin", "t5", "gpt_oss"],
)
def test_what_an_attention_reads_beside_its_projections(build: Callable[[], PreTrainedModel], read: str) -> None:
    """Biases of relative positions and sinks go into the attention and get a gradient, and `inspect` says so."""
    model = build()
    receives = [t.receives_gradient for t in deltune.inspect(model).tensors if t.name.endswith(read)]
    assert receives and all(receives)
    assert "without a gradient" not in str(deltune.inspect(model))


BLOCK = "Modification('block', Bottleneck(rank=2), insertion='{}')"


def test_the_output_of_layers_of_several_widths() -> None:
    """Each stage of Swin has a width of its own."""
    model = _swin()
    assert [(layer.in_width, layer.out_width) for layer in deltune.inspect(model).layers] == [(16, 16)] * 2 + [(32, 32)]
    for insertion in ("parallel", "sequential"):
        tuned = stir(deltune.attach(model, BLOCK.format(insertion), head="freeze"))
        loss(dict(tensors(model(**_image(torch.Generator().manual_seed(0)))))).backward()
        assert all(p.grad is not None for _, p in tuned.named_trainable_parameters())
        tuned.detach()


@pytest.mark.parametrize("size", [32, 64])
def test_features_that_are_not_the_last_axis(size: int) -> None:
    """ConvNext's stages return (batch, features, rows, columns), also where there are as many columns as features."""
    config = transformers.ConvNextConfig(
        image_size=size, hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, num_labels=3, patch_size=4
    )
    model = transformers.ConvNextForImageClassification(config).requires_grad_(False).eval()
    for insertion in ("parallel", "sequential"):
        with pytest.raises(deltune.DeltuneError, match="has its features in another axis than the last one"):
            deltune.count(model, BLOCK.format(insertion))
    assert deltune.inspect(model).stacks[0].width == 8
    tuned = stir(deltune.attach(model, "Modification('ffn', Bottleneck(rank=2))", head="freeze"))
    images = {"pixel_values": torch.randn(2, 3, size, size)}
    loss(dict(tensors(model(**images)))).backward()
    assert all(p.grad is not None for _, p in tuned.named_trainable_parameters())


def test_a_stage_that_returns_fewer_tokens_than_it_reads() -> None:
    model = random_model("HieraForImageClassification", tiny("hiera"), largest=10**8)
    assert deltune.count(model, BLOCK.format("sequential")).method
    with pytest.raises(deltune.DeltuneError, match="has no input of its own to read"):
        deltune.count(model, BLOCK.format("parallel"))


def _siglip2() -> PreTrainedModel:
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {"vocab_size": 99, **vision}
    config = transformers.Siglip2Config(text_config=text, vision_config={"patch_size": 8, "num_patches": 16, **vision})
    return transformers.Siglip2ForImageClassification(config)


def _pix2struct() -> PreTrainedModel:
    text = {"vocab_size": 99, "hidden_size": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    vision = {"hidden_size": 32, "d_kv": 8, "d_ff": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.Pix2StructConfig(text_config=text, vision_config={**vision, "patch_embed_hidden_size": 48})
    return transformers.Pix2StructForConditionalGeneration(config)


def _udop() -> PreTrainedModel:
    return random_model("UdopForConditionalGeneration", tiny("udop", image_size=32, patch_size=8))


@pytest.mark.parametrize(("build", "depths"), [(_siglip2, [2]), (_pix2struct, [2, 2]), (_udop, [2, 2])])
def test_patches_and_pages(build: Callable[[], PreTrainedModel], depths: list[int]) -> None:
    """Models that read images as patches, or words with their boxes on a page, are inspected and tuned."""
    model = build()
    anatomy = deltune.inspect(model)
    assert [stack.depth for stack in anatomy.stacks] == depths
    assert all(layer.attentions[0].query is not None and layer.ffns for layer in anatomy.layers)
    if depths == [2, 2] and build is not _udop:
        assert anatomy.stacks[0].words is None and anatomy.stacks[1].words == "decoder.embed_tokens"
    deltune.attach(model, "lora(rank=2) + adapter(rank=2) + layernorm")


def test_the_size_of_a_model_without_automodel() -> None:
    """A count is in shares of AutoModel's class, and where there is none, of the model without head and vocabulary."""
    encoder, decoder = tiny("wav2vec2"), tiny("gpt2", is_decoder=True, add_cross_attention=True)
    config = transformers.SpeechEncoderDecoderConfig(encoder=encoder.to_dict(), decoder=decoder.to_dict())
    with torch.device("meta"):
        model = transformers.SpeechEncoderDecoderModel(config)
    count = deltune.count(model, "layernorm")
    tied = model.decoder.lm_head.weight is model.decoder.transformer.wte.weight
    vocabulary = 0 if tied else model.decoder.lm_head.weight.numel()
    assert count.denominator_size == sum(p.numel() for p in model.parameters()) - vocabulary


# -- what is a head, a pooler, a norm


def _blip() -> PreTrainedModel:
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    text = {"vocab_size": 99, "encoder_hidden_size": 32, "max_position_embeddings": 40, **sizes}
    config = transformers.BlipConfig(text_config=text, vision_config={"image_size": 32, "patch_size": 8, **sizes})
    return transformers.BlipForConditionalGeneration(config)


def test_a_decoder_beside_the_base_model_is_no_head() -> None:
    """AutoModel's class of BLIP has no text decoder, whose embeddings would be trained whole if they were a head's."""
    model = _blip()
    anatomy = deltune.inspect(model)
    assert anatomy.head == ()
    tuned = deltune.attach(model, "lora(rank=2)")
    assert sum(p.numel() for p in tuned.trainable_parameters()) == tuned.count().method


def test_a_pooler_is_the_end_of_a_pass() -> None:
    """The pooler inside of an encoder is that module and not the encoder; experts that read one position are none."""
    encoder, decoder = tiny("vit", **VISION), tiny("gpt2", is_decoder=True, add_cross_attention=True)
    config = transformers.VisionEncoderDecoderConfig(encoder=encoder.to_dict(), decoder=decoder.to_dict())
    anatomy = deltune.inspect(transformers.VisionEncoderDecoderModel(config))
    assert anatomy.pooler == "encoder.pooler"
    assert {t.name for t in anatomy.tensors if t.area == "pooler"} == {
        "encoder.pooler.dense.weight", "encoder.pooler.dense.bias",
    }  # fmt: skip
    config = tiny("qwen4_exp").text_config
    with torch.device("meta"):
        model = transformers.Qwen4ExpForCausalLM(config)
    anatomy = deltune.inspect(model)
    assert anatomy.pooler is None and len(anatomy.layers) == 2
    norms = sum(t.numel for t in anatomy.tensors if t.role == "norm.gain" and t.receives_gradient)
    assert deltune.count(model, "layernorm").method == norms


@pytest.mark.parametrize(
    ("name", "family", "text", "left"),
    [
        ("GptOssForCausalLM", "gpt_oss", "bitfit", "biases of no linear or norm are left as they are: 4, such as "
         "model.layers.0.mlp.experts.gate_up_proj_bias"),
        ("DebertaModel", "deberta", "bitfit", "biases of no linear or norm are left as they are: 4, such as "
         "encoder.layer.0.attention.self.q_bias"),
        ("SqueezeBertModel", "squeezebert", "layernorm", "what may be norms over other axes is left as it is: 4, such "
         "as encoder.layers.0.post_attention.layernorm"),
        ("SqueezeBertModel", "squeezebert", "full", None),
        ("GptOssForCausalLM", "gpt_oss", "bitfit(which='attention')", None),
        ("BertForMaskedLM", "bert", "layernorm + bitfit", None),
    ],
)  # fmt: skip
def test_norms_and_biases_that_are_not_recognised_are_said(name: str, family: str, text: str, left: str | None) -> None:
    """A count names what looks like what a selection trains and is not trained."""
    assert deltune.count(random_model(name, tiny(family)), text).scope == ((left,) if left else ())


def test_above_the_base_model() -> None:
    """A count says what is trained and is not in what its percentage is of."""
    model = random_model("LlamaForCausalLM", tiny("llama", tie_word_embeddings=False))
    base, head = (sum(p.numel() for p in part.parameters()) for part in (model.model, model.lm_head))
    count = deltune.count(model, "full")
    assert (count.method, count.denominator_size) == (base + head, base) and count.percent > 100
    assert count.scope == (f"{head:,} of these scalars, such as those of lm_head, are not in the denominator",)
    assert count.scope[0] in str(count) and "not in the denominator" in count._repr_html_()
    assert deltune.attach(model, "full").count() == count
    tied = random_model("LlamaForCausalLM", tiny("llama", tie_word_embeddings=True))
    assert deltune.count(tied, "full").scope == () and deltune.count(tied, "full").percent == 100
    words = model.model.embed_tokens.weight.numel()
    assert deltune.count(model, "full", "untied").percent == 100
    assert f"{head + words:,} of these" in deltune.count(model, "full", "layers").scope[0]
    assert deltune.count(model, "full", 10).scope == deltune.count(model, "adapter(rank=3000)").scope == ()


def test_what_only_chooses_is_no_layer() -> None:
    """BLT's patcher decides where the bytes are cut, and no gradient of the outputs reaches it."""
    small = {"encoder_hash_byte_group_vocab": 64}
    config = tiny("blt", **small)
    config.encoder_config.hidden_size_global = config.decoder_config.hidden_size_global = 32
    anatomy = deltune.inspect(random_model("BltForCausalLM", config))
    assert anatomy.layers and not any("patcher" in layer.path for layer in anatomy.layers)
    assert sum("patcher" in fact and "no gradient" in fact for fact in anatomy.unobserved) == 2


def test_a_layer_that_runs_on_two_states() -> None:
    """PEGASUS-X's encoder layers run their modules on the tokens and on global tokens, which are no positions."""
    anatomy = deltune.inspect(random_model("PegasusXForConditionalGeneration", tiny("pegasus_x")))
    stacks = [(layer.stack, layer.path) for layer in anatomy.layers]
    assert stacks == [(side, f"model.{side}.layers.{i}") for side in ("encoder", "decoder") for i in range(2)]
    assert all(len(layer.attentions) == 1 + (layer.stack == "decoder") for layer in anatomy.layers)
    assert anatomy.stacks[0].words == "model.encoder.embed_tokens" and anatomy.stacks[0].positions is None


@needs("transformers", "5.23")
def test_queries_that_choose_a_mask_are_none() -> None:
    """Qwen4's indexer has queries and keys of its own, from which the mask of the attention is computed."""
    changes = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 16}
    types = {"layer_types": ["linear_attention", "indexed_attention"], "indexer_compress_ratio": 4}
    anatomy = deltune.inspect(random_model("Qwen4ExpForCausalLM", tiny("qwen4_exp_text", **changes, **types)))
    attention = anatomy.layers[1].attentions[0]
    assert attention.query and attention.query.path == "model.layers.1.self_attn.q_proj"
    assert attention.key and attention.key.path == "model.layers.1.self_attn.k_proj"


def test_words_under_a_mask() -> None:
    """The ids of images are replaced before the table is read; rows before the tokens do what these tokens do."""
    config = tiny("granite_speech")
    model = random_model("GraniteSpeechForConditionalGeneration", config)
    ids = torch.tensor([[20, 21, 22, 23, 24, 25]])
    with torch.no_grad():
        expected = model(input_ids=ids).logits[:, 2:]
        tuned = deltune.attach(model, "prompt(length=2, init_from=(20, 21))")
        assert tuned.anatomy.stacks[0].words == "model.language_model.embed_tokens"
        torch.testing.assert_close(model(input_ids=ids[:, 2:]).logits, expected)


def test_weights_that_a_family_freezes_are_trained() -> None:
    """IDEFICS freezes its layers when it is made; they are no computed numbers such as sinusoids."""
    config = tiny("idefics", vision_config={"image_size": 32, "patch_size": 8, "embed_dim": 32, "num_hidden_layers": 2,
                                            "num_attention_heads": 4, "intermediate_size": 64})  # fmt: skip
    anatomy = deltune.inspect(random_model("IdeficsForVisionText2Text", config))
    assert not any(tensor.computed for tensor in anatomy.tensors if tensor.role.startswith("norm"))


@pytest.mark.parametrize("name", ["PerceiverForMaskedLM", "PerceiverForImageClassificationLearned"])
def test_inputs_of_any_kind(name: str) -> None:
    config = tiny("perceiver", image_size=32)
    assert [layer.path for layer in deltune.inspect(random_model(name, config)).layers] == [
        f"perceiver.encoder.self_attends.{i}" for i in range(2)
    ]  # fmt: skip


def test_what_has_a_value_for_each_token() -> None:
    """A prompt is refused where another input has a value for each token, which its rows would lack."""
    config = tiny("udop", max_2d_position_embeddings=128)
    model = random_model("UdopForConditionalGeneration", config)
    with pytest.raises(deltune.DeltuneError, match="rows before the input embeddings need"):
        deltune.attach(model, "prompt(length=2)")
