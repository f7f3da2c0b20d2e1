"""The anatomy that one observed pass gives, against facts written down from each family's source."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig

import deltune
from deltune.anatomy.skeleton import structural_copy
from deltune.anatomy.types import FFN, Anatomy, Attention, Columns, Layer, Linear, is_inside
from tables.families import FAMILIES, Family, Stack
from tables.specimens import HEADS, build, config, differences, facts, roles, specimen

EACH = pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda f: f.name)
WIDTH, FFN_WIDTH, HEADS_OF_ATTENTION = 32, {"gpt2": 128, "gptj": 128, "bloom": 128}, 4


def layers_of(anatomy: Anatomy, family: Family) -> list[tuple[Stack, int, Layer]]:
    """Every layer with the stack and the number that it should have."""
    count = 1 if family.shared else 2
    expected = [(stack, i) for stack in family.stacks for i in range(count)]
    assert len(anatomy.layers) == len(expected)
    return [(stack, i, layer) for (stack, i), layer in zip(expected, anatomy.layers, strict=True)]


def stack_name(family: Family, stack: Stack) -> str:
    return "decoder" if family.kind == "decoder" or family.stacks[0] is not stack else "encoder"


@EACH
def test_stacks_and_layers(family: Family) -> None:
    anatomy = deltune.inspect(config(family))
    assert [s.name for s in anatomy.stacks] == {"both": ["encoder", "decoder"]}.get(family.kind, [family.kind])
    assert all(
        (s.depth, s.width, s.causal) == (2, WIDTH, f.causal) for s, f in zip(anatomy.stacks, family.stacks, strict=True)
    )
    for stack, i, layer in layers_of(anatomy, family):
        assert (layer.stack, layer.index) == (stack_name(family, stack), i)
        assert layer.path == f"{stack.layers}.{i}"
        assert layer.passes == (2 if family.shared else 1)
    assert anatomy.shared == family.shared
    assert bool(anatomy.unobserved) != family.interface


@EACH
def test_attentions(family: Family) -> None:
    for stack, _, layer in layers_of(deltune.inspect(config(family)), family):
        expected = {"self": stack.attention} | ({"cross": stack.cross} if stack.cross else {})
        assert [a.kind for a in layer.attentions] == list(expected)
        for attention in layer.attentions:
            names = [f"{layer.path}.{name}" for name in expected[attention.kind]]
            assert attention.output.path == names[3]
            assert (attention.output.out_width, attention.output.bias) == (WIDTH, "output" in family.biases)
            sizes = (attention.heads, attention.kv_heads, attention.head_width, attention.value_width)
            if family.interface:
                assert sizes == (HEADS_OF_ATTENTION, family.kv_heads, family.head_width, family.head_width)
                assert attention.causal == (stack.causal and attention.kind == "self")
            else:
                assert set(sizes) == {None}
            query_width, key_width = 4 * family.head_width, family.kv_heads * family.head_width
            assert attention.output.in_width == query_width
            for role, name, width, part in zip(
                ("query", "key", "value"), names, (query_width, key_width, key_width), range(3), strict=False
            ):
                linear: Linear = getattr(attention, role)
                assert (linear.path, linear.in_width, linear.out_width) == (name, WIDTH, width)
                assert linear.bias == (role in family.biases)
                columns = family.columns and Columns(family.columns[0], *family.columns[1][part])
                assert linear.columns == columns


@EACH
def test_ffns(family: Family) -> None:
    inner = FFN_WIDTH.get(family.name, 64)
    for stack, _, layer in layers_of(deltune.inspect(config(family)), family):
        assert len(layer.ffns) == 1
        ffn = layer.ffns[0]
        assert [linear.path for linear in (*ffn.inputs, ffn.output)] == [f"{layer.path}.{name}" for name in stack.ffn]
        assert ffn.gated == family.gated
        assert (ffn.output.in_width, ffn.output.out_width) == (inner, WIDTH)
        fused = family.gated and len(stack.ffn) == 2
        assert {(up.in_width, up.out_width) for up in ffn.inputs} == {(WIDTH, 2 * inner if fused else inner)}
        assert all(up.bias == ("ffn_up" in family.biases) for up in ffn.inputs)
        assert ffn.output.bias == ("ffn_down" in family.biases)
        assert ffn.input_module == ffn.inputs[0].path


@EACH
def test_norms(family: Family) -> None:
    anatomy = deltune.inspect(config(family))
    for stack, i, layer in layers_of(anatomy, family):
        expected = {f"{layer.path}.{path}": place for path, place in stack.norms.items()}
        if (family.name, i) == ("modernbert", 0):
            del expected[f"{layer.path}.attn_norm"]  # an Identity there
        assert {n.path: f"{n.place} {'+'.join(n.of)}" for n in layer.norms} == expected
        assert all(n.gain and n.bias == ("norm" in family.biases) for n in layer.norms)
        assert all(n.width == (WIDTH if n.place not in ("query", "key") else n.width) for n in layer.norms)
        parts: list[tuple[Attention | FFN, str]] = [(part, "attention") for part in layer.attentions]
        for part, of in [*parts, *((ffn, "ffn") for ffn in layer.ffns)]:
            for place in ("pre", "post"):
                path = getattr(part, place)
                assert (path is not None) == any(w.startswith(place) and of in w for w in expected.values())
                assert path is None or (expected[path].startswith(place) and of in expected[path])
        if stack.cross and "pre" in {n.place for n in layer.norms}:  # each attention has its own
            assert len({a.pre for a in layer.attentions}) == 2
    assert {n.path: n.place for n in anatomy.norms} == dict(family.outer)


@EACH
def test_embeddings_pooler_and_head(family: Family) -> None:
    anatomy = deltune.inspect(config(family))
    model = specimen(family.name, "base")
    assert (anatomy.pooler, anatomy.head, anatomy.base) == (family.pooler, (), "")
    words = model.get_input_embeddings().weight
    assert all(model.get_submodule(stack.words or "").weight is words for stack in anatomy.stacks)
    assert all((stack.positions is not None) == family.table for stack in anatomy.stacks)
    for stack in anatomy.stacks:
        if stack.positions is not None:
            assert model.get_submodule(stack.positions).weight.shape[0] >= 64
    outside = {t.name.rpartition(".")[0] for t in anatomy.tensors if t.area not in ("layers", "embedding")}
    shared_by_layers = {"encoder.rel_embeddings"} if family.name == "deberta-v2" else set()
    pooler = {b for b in family.beyond if family.pooler and b.startswith(family.pooler)}
    assert outside - shared_by_layers == pooler | {p for p, place in family.outer.items() if place == "final"}
    layered = [t for t in anatomy.tensors if t.area == "layers"]
    assert all(t.name.startswith(anatomy.layers[t.layer].path + ".") for t in layered if t.layer is not None)
    assert sum(t.numel for t in anatomy.tensors) == sum(p.numel() for p in model.parameters())


CLASSES = [(f, role) for f in FAMILIES.values() for role in roles(f)]


@pytest.mark.parametrize(("family", "role"), CLASSES, ids=[f"{f.name} as {role}" for f, role in CLASSES])
@pytest.mark.sample(18)
def test_the_live_model_has_the_anatomy_of_its_configuration(family: Family, role: str) -> None:
    """Paths inside the base model, layers and norms are the same; observing changes nothing."""
    model = specimen(family.name, role)
    before = facts(model)
    deltune.inspect.__globals__["_CACHE"].pop(model, None)
    live = deltune.inspect(model)
    assert differences(before, facts(model)) == []
    described = deltune.inspect(config(family))
    base_children = {name for name, _ in specimen(family.name, "base").named_children()} | {live.base.split(".")[0]}
    head = {name for name, module in model.named_children() if name not in base_children and list(module.parameters())}
    assert set(live.head) == (head if role in HEADS else set())
    if role == "causal" and family.kind == "both":
        return  # the decoder alone, without what it reads of an encoder
    stacks = {stack.name for stack in live.stacks}  # T5's token classes have an encoder alone
    assert bare(live, stacks, f"{live.base}." if live.base else "") == bare(described, stacks, "")


def bare(anatomy: Anatomy, stacks: set[str], prefix: str) -> str:
    """Layers, outer norms and stacks, with paths as in the base model."""
    named = [
        replace(part, embedding=part.embedding and replace(part.embedding, shared_with=()))
        if part in anatomy.stacks
        else part  # a live model may tie its output projection to them
        for part in (*anatomy.layers, *anatomy.stacks)
        if (part.stack if isinstance(part, Layer) else part.name) in stacks
    ]
    norms = [
        n for n in anatomy.norms if n.path.removeprefix(prefix).split(".")[0] not in {"encoder", "decoder"} - stacks
    ]
    text = repr((named, norms))
    return text.replace(f"'{prefix}", "'").replace(f"'{prefix.rstrip('.')}'", "''") if prefix else text


def test_observing_leaves_training_mode_and_implementation_alone() -> None:
    model = specimen("bart")
    model.train()
    before = facts(model)
    deltune.inspect.__globals__["_CACHE"].pop(model, None)
    deltune.inspect(model)
    assert differences(before, facts(model)) == []
    model.eval()


@pytest.mark.parametrize("name", ["deberta-v2", "bloom", "gptj"])
def test_what_hides_says_so(name: str) -> None:
    """Without the attention interface: layers, projections and norms are there, and a prefix is a clear error."""
    anatomy = deltune.inspect(config(FAMILIES[name]))
    assert len(anatomy.layers) == 2 and all(layer.ffns and layer.norms for layer in anatomy.layers)
    assert len(anatomy.unobserved) == 2 and all("not on the attention interface" in fact for fact in anatomy.unobserved)
    assert all(attention.query and attention.value for layer in anatomy.layers for attention in layer.attentions)
    with pytest.raises(deltune.DeltuneError, match=r"site 'heads' needs the attention .* attention interface"):
        deltune.count(config(FAMILIES[name]), "prefix(length=2)")


class _Unknown(PreTrainedConfig):
    model_type = "not-a-family"


def test_what_reads_neither_text_nor_images_nor_sounds() -> None:
    from transformers import PatchTSTConfig, PatchTSTModel

    model = PatchTSTModel(PatchTSTConfig(d_model=16, num_attention_heads=2, ffn_dim=16, num_hidden_layers=1))
    with pytest.raises(deltune.DeltuneError, match="only models of text, images or sounds can be inspected"):
        deltune.attach(model, "layernorm")
    assert not any("deltune" in name for name, _ in model.named_modules())
    with pytest.raises(deltune.DeltuneError, match="no model can be built from this _Unknown"):
        deltune.inspect(_Unknown())


@EACH
def test_the_tree_prints_every_part(family: Family) -> None:
    anatomy = deltune.inspect(config(family))
    text = str(anatomy)
    shown = set(re.findall(r"\[([^\]]+)\]$", text, re.MULTILINE))
    runs = [tuple(path.split(" to ")) for path in shown if " to " in path]  # equal layers are shown once
    paths = [layer.path for layer in anatomy.layers]
    folded = {path for first, last in runs for path in paths[paths.index(first) : paths.index(last) + 1]}
    for layer in anatomy.layers:
        assert (layer.path in shown) != (layer.path in folded)
        for part in (*(n.path for n in layer.norms), *(f.output.path for f in layer.ffns)):
            assert (part if layer.path in shown else part.replace(layer.path, "…", 1)) in shown
    assert all(norm.path in shown for norm in anatomy.norms)
    assert f"{sum(t.numel for t in anatomy.tensors):,}" in text.splitlines()[0]
    assert torch.get_default_device().type == "cpu"  # the meta device was left again


EMPTY: dict[str, Callable[[], nn.Module]] = {
    "ModuleList": nn.ModuleList, "ModuleDict": nn.ModuleDict, "Sequential": nn.Sequential,
    "ParameterList": nn.ParameterList, "ParameterDict": nn.ParameterDict,
}  # fmt: skip
"""Modules that are false in Python as long as nothing is in them."""


@pytest.mark.parametrize("kind", EMPTY)
def test_a_copy_of_the_structure_shares_no_module(kind: str) -> None:
    """Not even one that is empty and false, as models have where a configuration asks for no layer of some kind: a
    hook that observing the copy puts there would be the live model's."""
    model = build(FAMILIES["bert"], "base")
    model.extras = model.encoder.extras = EMPTY[kind]()
    model.nothing = None
    known = facts(model)
    twin, originals = structural_copy(model)
    assert not {id(module) for module in twin.modules()} & {id(module) for module in model.modules()}
    assert [path for path, _ in twin.named_modules()] == [path for path, _ in model.named_modules()]
    assert type(twin.extras) is type(model.extras) and twin.extras is twin.encoder.extras and twin.nothing is None
    assert originals[twin.extras] is model.extras
    deltune.attach(model, "lora(rank=2)").detach()
    assert differences(known, facts(model)) == []


@pytest.mark.parametrize(
    ("path", "parent", "inside"),
    [("a.1", "a.1", True), ("a.1.b", "a.1", True), ("a.10", "a.1", False), ("a", "a.1", False), ("a.1", "", True)],
)
def test_a_path_inside_another(path: str, parent: str, inside: bool) -> None:
    assert is_inside(path, parent) is inside


@pytest.mark.parametrize("name", ["FunnelModel", "FunnelBaseModel"])
def test_a_family_of_two_classes_needs_no_architecture_in_its_configuration(name: str) -> None:
    """AutoModel asks the configuration which of the two it builds; a model of one's own has none there."""
    config = transformers.FunnelConfig(
        vocab_size=50, d_model=16, n_head=2, d_head=8, d_inner=32, block_sizes=[1, 1], num_decoder_layers=1
    )
    assert config.architectures is None
    assert [layer.index for layer in deltune.inspect(getattr(transformers, name)(config)).layers][:2] == [0, 1]
    assert config.architectures is None
