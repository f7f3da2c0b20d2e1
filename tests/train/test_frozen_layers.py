"""The frozen layers: where they end, that they run without dropout, and that a pass from their states is whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import deltune
from deltune.errors import DeltuneError
from deltune.train.frozen_layers import FrozenLayers
from tables.families import FAMILIES, Family
from tables.specimens import batch, build, differences, facts, layers, main_role, roles, stir

UPPER = (
    "layernorm(layers='upper half')",
    "adapter(rank=4, layers=(3,))",
    "lora(rank=2, layers='upper half', at='output')",
    "parallel_adapter(rank=4, layers=(2, 3), x='residual')",
    "apet(adapter(rank=4, layers='upper half'), parameters=57)",
    "diff_pruning(sparsity=0.02, over='linear')",
)
"""Methods on upper layers, in the algebra's different ways; the last is on all layers, and leaves none frozen."""
ABOVE = ("three_vectors", "head")
"""Methods above all layers."""
DECODER = ("layernorm(stack='decoder')", "adapter(rank=4, stack='decoder', layers='upper half')")
"""Methods of a decoder whose encoder is frozen."""


def deep(family: Family, role: str) -> PreTrainedModel:
    """The family's model with four layers in a stack, and dropout wherever its sources have any."""
    model = build(family, role, torch.float64 if family.exact else torch.float32, **layers(family, 4))
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.2
        for name, value in list(module.__dict__.items()):
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.2)
    return model


def cases() -> list[Any]:
    parameters = []
    for family in FAMILIES.values():
        for role in roles(family):
            every = family.name in ("bert", "gpt2", "t5", "bart", "llama")
            if role not in ("sequence", "tokens", "choice", "causal", "seq2seq") or not (
                every or role in ("sequence", main_role(family))
            ):
                continue
            methods = [] if family.shared else [m for m in UPPER[:-1] if "stack" not in m]
            methods += [m for m in ABOVE if role in ("sequence", "tokens") or (m == "head" and role == "choice")]
            methods += DECODER if role in ("sequence", "seq2seq") and family.kind == "both" else ()
            short = methods if every else methods[:1] + methods[-1:]
            parameters += [pytest.param(family, role, m, id=f"{family.name} {role}: {m}") for m in dict.fromkeys(short)]
    return parameters


def passed(model: PreTrainedModel, inputs: dict[str, Any], real: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    """Logits of a training pass under one seed, at real tokens where they are of tokens, and gradients."""
    model.zero_grad()
    torch.manual_seed(1)
    logits = model(**inputs).logits
    logits = logits[real] if logits.shape[:2] == real.shape else logits
    logits.square().sum().backward()
    return logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("family", "role", "method"), cases())
@pytest.mark.sample(15)
def test_a_pass_from_states_is_the_whole_pass(family: Family, role: str, method: str) -> None:
    """Outputs and gradients in training with dropout, and outputs in eval mode; frozen layers do not run."""
    model = deep(family, role)
    before = facts(model)
    tuned = stir(deltune.attach(model, method))
    inputs = batch(model)
    if family.kind == "both" or hasattr(model.config, "use_cache"):
        inputs["use_cache"] = False
    trunk = FrozenLayers(tuned)
    mask = inputs["decoder_input_ids"].new_ones(2, 4) if "decoder_input_ids" in inputs else inputs["attention_mask"]
    real = mask.bool().flatten(0, -2)
    with torch.no_grad():
        trunk.examine(inputs)
        assert trunk.kept_states, "no state of this trunk can be kept"
        states = trunk.states(inputs)
    for name, value in states.items():
        padding = ~(real if trunk.is_decoder_argument(name) else inputs["attention_mask"].bool().flatten(0, -2))
        value[padding] = 0  # as on the disk, where it is not kept
        assert value.shape[2] == len(trunk.kept_states[name.removeprefix("trunk_")]), "what is read, and no more"
    ran: list[str] = []
    for station in trunk.layer_hooks:
        if station.skipped:
            for inner in station.module.modules():
                if not list(inner.children()) and list(inner.parameters()):
                    inner.register_forward_hook(lambda *_: ran.append("a layer of the trunk"))
    short = {**inputs, **states}
    close = {"rtol": 1e-9, "atol": 1e-9} if family.exact else {"rtol": 1e-3, "atol": 1e-4}
    for mode in (True, False):
        model.train(mode)
        whole, gradients = passed(model, inputs, real)
        assert ran
        ran.clear()
        output, others = passed(model, short, real)
        assert not ran
        torch.testing.assert_close(output, whole, **close)
        assert gradients.keys() == others.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(others[name], gradient, **close)
        assert all(module.training == mode for module in trunk.modules)
    model.eval()
    trunk.remove()
    tuned.detach()
    model.zero_grad()
    left = [d for d in differences(before, facts(model)) if not d.startswith("hooks of")]
    assert not left


@pytest.mark.parametrize("name", ["bert", "gpt2", "bart", "t5"])
def test_frozen_layers_have_no_dropout_and_what_is_above_has(name: str) -> None:
    family = FAMILIES[name]
    model = deep(family, "sequence")
    tuned = deltune.attach(model, "layernorm(layers='upper half')")
    trunk = FrozenLayers(tuned)
    inputs = batch(model)
    seen: list[tuple[str, bool]] = []
    half = {id(station.module) for station in trunk.layer_hooks}
    for layer in tuned.anatomy.layers:
        module = model.get_submodule(layer.path)
        module.register_forward_pre_hook(lambda m, *_: seen.append(("below" if id(m) in half else "above", m.training)))
    model.train()
    states = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        with torch.no_grad():
            states.append(trunk.states(inputs))
            model(**inputs)
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    below = {mode for where, mode in seen if where == "below"}
    above = {mode for where, mode in seen if where == "above"}
    assert below == {False} and above == {True}


@pytest.mark.parametrize(
    ("method", "what"),
    [
        ("layernorm", "embeddings.LayerNorm"), ("lora(rank=2)", "encoder.0.self"), ("prompt(length=3)", "embedding"),
        ("prefix(length=2)", "encoder.0.self"), ("full", "embeddings"), ("bitfit", "bias"),
        ("layernorm(layers='upper half') + prefix(length=2)", "encoder.0"), (UPPER[-1], "encoder.layer.0"),
        ("xlora(layers=(-1,))", "self.query"),  # its first pass runs every layer
    ],
)  # fmt: skip
def test_without_a_frozen_layer_below_it_is_an_error(method: str, what: str) -> None:
    tuned = deltune.attach(build(FAMILIES["bert"], "sequence"), method)
    with pytest.raises(DeltuneError, match="trunk_dropout=off needs frozen layers") as error:
        FrozenLayers(tuned)
    assert what in str(error.value)


@pytest.mark.parametrize(
    ("name", "role", "method", "layers", "keeps"),
    [
        ("bert", "sequence", "head", 4, {"encoder": (4,)}),
        ("bert", "sequence", "three_vectors", 4, {"encoder": (0, 1, 2, 3, 4)}),
        ("bert", "sequence", "ladder(width=4, heads=2)", 4, {"encoder": (0, 1, 2, 3, 4)}),
        ("bert", "sequence", "layernorm(layers=(3,)) + lora(rank=2, layers=(1, 3))", 1, {"encoder": (1,)}),
        ("bert", "sequence", "layernorm(layers=(2,)) + three_vectors", 2, {"encoder": (0, 1, 2)}),
        ("albert", "sequence", "three_vectors", 1, {"encoder": (0, 1, 2, 3, 4)}),
        ("gpt2", "sequence", "layernorm(layers=(1,), final=True)", 1, {"decoder": (1,)}),
        ("bart", "seq2seq", "layernorm(stack='decoder')", 4, {"encoder": (4,)}),
        ("bart", "seq2seq", "adapter(rank=4, stack='decoder', layers=(2,))", 6, {"encoder": (4,), "decoder": (2,)}),
        ("bart", "seq2seq", "layernorm(layers='upper half')", 2, {"encoder": (2,)}),
        ("mbart", "seq2seq", "layernorm(stack='encoder', layers=(3,), final=True)", 3, {"encoder": (3,)}),
        ("bart", "sequence", "head", 8, {"decoder": (4,)}),
    ],
)
def test_where_the_frozen_layers_end(
    name: str, role: str, method: str, layers: int, keeps: dict[str, tuple[int, ...]]
) -> None:
    tuned = deltune.attach(deep(FAMILIES[name], role), method)
    trunk = FrozenLayers(tuned)
    assert len(trunk.boundary.layers) == layers and trunk.kept_states == keeps
