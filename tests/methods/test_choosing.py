"""layers=, stack=, attention= and the options of selections choose what they say, on every family."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import pytest
import torch

import deltune
from tables.families import FAMILIES, Family
from tables.specimens import batch, differences, facts, run, specimen, stir

EACH = pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda f: f.name)
TWO = [f for f in FAMILIES.values() if f.kind == "both"]
ONE = [f for f in FAMILIES.values() if f.kind != "both"]

WHERE = {"all": {0, 1}, "lower half": {0}, "upper half": {1}, (0,): {0}, (1,): {1}, (0, 1): {0, 1}}


def chosen(tuned: deltune.Tuned) -> set[tuple[str, int]]:
    """(stack, layer) of every place that was edited."""
    return {(e.place.name.split(".")[0], int(e.place.name.split(".")[1])) for e in tuned.delta().all_edits()}


def moved(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> set[str]:
    return {name for name in before if not torch.equal(before[name], after[name])}


@pytest.mark.parametrize("layers", WHERE, ids=str)
@pytest.mark.parametrize("form", ["adapter(rank=2{})", "lora(rank=2, at='ffn'{})", "prefix(length=2{})"])
@pytest.mark.parametrize("family", [f for f in FAMILIES.values() if not f.shared], ids=lambda f: f.name)
@pytest.mark.sample(22)
def test_layers(family: Family, form: str, layers: str | tuple[int, ...]) -> None:
    """Hidden states below the first chosen layer stay, the one after it moves; numbers count within each stack."""
    if form.startswith("prefix") and not family.interface:
        form = "parallel_adapter(at='heads', rank=2{})"
    model = specimen(family.name, "base")
    inputs = batch(model)
    options = {"output_hidden_states": True}
    before = run(model, inputs, **options)
    tuned = stir(deltune.attach(model, form.format(f", layers={layers!r}")))
    stacks = {"both": ("encoder", "decoder"), "encoder": ("encoder",), "decoder": ("decoder",)}[family.kind]
    assert chosen(tuned) == {(stack, i) for stack in stacks for i in WHERE[layers]}
    after = run(model, inputs, **options)
    states = "encoder_hidden_states" if family.kind == "both" else "hidden_states"
    first = min(WHERE[layers])
    changed = {name for name in moved(before, after) if name.startswith(f"{states}.")}
    assert f"{states}.0" in before and f"{states}.{first + 1}" in changed
    assert not changed & {f"{states}.{i}" for i in range(first + 1)}
    tuned.detach()


@pytest.mark.parametrize("layers", [*WHERE, None], ids=str)
@EACH
@pytest.mark.sample(17)
def test_layers_of_a_selection(family: Family, layers: str | tuple[int, ...] | None) -> None:
    model = specimen(family.name, "base")
    if family.shared and layers not in ("all", None):
        return _shares_its_layers(family, layers)
    argument = "" if layers is None else f"(layers={layers!r})"
    outside = layers in ("all", None)
    expected = set(_norms(family, WHERE[layers or "all"]))
    expected |= {f"{path}." for path in family.outer} if outside else set()
    selected = {
        t.name.rpartition(".")[0] + "." for t in deltune.attach(model, f"layernorm{argument}").delta().planned.selected
    }
    deltune.tuned(model).detach()
    assert selected == expected


def _norms(family: Family, layers: Iterable[int], of: str = "both") -> Iterable[str]:
    for stack in family.stacks:
        for i in [0] if family.shared else layers:
            for path, place in stack.norms.items():
                missing = (family.name, i, path) == ("modernbert", 0, "attn_norm")  # an Identity there
                if not missing and (of == "both" or of in place):
                    yield f"{stack.layers}.{i}.{path}."


def _shares_its_layers(family: Family, layers: object) -> None:
    model = specimen(family.name, "base")
    known = facts(model)
    for form in ("layernorm({})", "adapter({})", "lora({})", "bitfit('layers', {})"):
        with pytest.raises(deltune.DeltuneError, match="shares one set of modules"):
            deltune.attach(model, form.format(f"layers={layers!r}"))
    assert differences(known, facts(model)) == []


@EACH
@pytest.mark.parametrize("of", ["attention", "ffn"])
@pytest.mark.parametrize("outer", ["", ", embedding=True", ", final=True", ", embedding=True, final=True"])
def test_norms_of_a_sub_layer(family: Family, of: str, outer: str) -> None:
    model = specimen(family.name, "base")
    tuned = deltune.attach(model, f"layernorm(of={of!r}{outer})")
    selected = {t.name.rpartition(".")[0] + "." for t in tuned.delta().planned.selected}
    tuned.detach()
    outside = {f"{path}." for path, place in family.outer.items() if f"{place}=True" in outer}
    assert selected == set(_norms(family, (0, 1), of)) | outside


@EACH
@pytest.mark.parametrize("terms", ["gain", "bias", "both"])
def test_terms_of_norms(family: Family, terms: str) -> None:
    if terms == "bias" and "norm" not in family.biases:
        return  # refused, by a law of its own
    model = specimen(family.name, "base")
    tuned = deltune.attach(model, f"layernorm(terms={terms!r})")
    leaves = {t.name.rpartition(".")[2] for t in tuned.delta().planned.selected}
    tuned.detach()
    has_bias = "norm" in family.biases
    assert (
        leaves == {"gain": {"weight"}, "bias": {"bias"}, "both": {"weight", "bias"} if has_bias else {"weight"}}[terms]
    )


@pytest.mark.parametrize("stack", ["encoder", "decoder"])
@pytest.mark.parametrize("form", ["prefix(length=2, stack={!r})", "adapter(rank=2, stack={!r})"])
@pytest.mark.parametrize("family", TWO, ids=lambda f: f.name)
def test_stacks(family: Family, form: str, stack: str) -> None:
    model = specimen(family.name, "base")
    inputs = batch(model)
    before = run(model, inputs)
    tuned = stir(deltune.attach(model, form.format(stack)))
    assert chosen(tuned) == {(stack, 0), (stack, 1)}
    changed = moved(before, run(model, inputs))
    assert changed == {"last_hidden_state"} | ({"encoder_last_hidden_state"} if stack == "encoder" else set())
    tuned.detach()


@pytest.mark.parametrize("attention", ["self", "cross"])
@pytest.mark.parametrize("form", ["prefix(length=2{})", "lora(rank=2{})", "parallel_adapter(at='attention', rank=2{})"])
@pytest.mark.parametrize("family", TWO, ids=lambda f: f.name)
def test_attention_kinds(family: Family, form: str, attention: str) -> None:
    model = specimen(family.name, "base")
    inputs = batch(model)
    before = run(model, inputs)
    tuned = stir(deltune.attach(model, form.format(f", attention={attention!r}")))
    paths = {e.place.target.path for e in tuned.delta().all_edits()}
    edited = {modules for modules in _attentions(family) if any(path.startswith(modules) for path in paths)}
    assert edited == {m for m, kind in _attentions(family).items() if kind == attention}
    changed = moved(before, run(model, inputs))
    assert ("encoder_last_hidden_state" in changed) == (attention == "self")
    assert "last_hidden_state" in changed
    tuned.detach()


def _attentions(family: Family) -> dict[str, str]:
    """Paths of all attentions with their kinds."""
    attentions = {}
    for stack in family.stacks:
        for i in (0, 1):
            for kind, names in (("self", stack.attention), ("cross", stack.cross)):
                if names:
                    attentions[f"{stack.layers}.{i}.{names[0]}".rpartition(".")[0]] = kind
    return attentions


@pytest.mark.parametrize("family", ONE, ids=lambda f: f.name)
def test_what_one_stack_lacks(family: Family) -> None:
    model = specimen(family.name, "base")
    known = facts(model)
    other = "decoder" if family.kind == "encoder" else "encoder"
    for text, says in (
        (f"adapter(stack={other!r})", f"this model has {family.kind} only"),
        ("parallel_adapter(at='attention', attention='cross')", "this model has self attention only"),
        ("adapter(layers=[0, 2])", "shares one set" if family.shared else "has 2 layers, 0 to 1"),
        ("layernorm(layers=[7])", "shares one set" if family.shared else "has 2 layers, 0 to 1"),
    ):
        with pytest.raises(deltune.DeltuneError, match=says):
            deltune.attach(model, text)
    assert differences(known, facts(model)) == []


SITES = {"query": 0, "key": 1, "value": 2, "output": 3}


@pytest.mark.parametrize("site", [*SITES, "ffn_up", "ffn_down"])
@pytest.mark.parametrize("family", [f for f in FAMILIES.values() if f.interface], ids=lambda f: f.name)
@pytest.mark.sample(15)
def test_projections_are_the_true_ones(family: Family, site: str) -> None:
    """LoRA at a site edits exactly the modules that the family's source calls so, and merges into their weights alone,
    in a fused projection into the site's own rows (or columns, where the weight is transposed)."""
    model = specimen(family.name, "base")
    expected = set()
    for stack in family.stacks:
        for i in [0] if family.shared else (0, 1):
            names = {"ffn_up": stack.ffn[:-1], "ffn_down": stack.ffn[-1:]}.get(site)
            if names is None:
                names = tuple(a[SITES[site]] for a in (stack.attention, stack.cross) if a)
            expected |= {f"{stack.layers}.{i}.{name}" for name in names}
    tuned = stir(deltune.attach(model, f"lora(rank=2, at={site!r})"))
    assert {e.place.target.path for e in tuned.delta().all_edits()} == expected
    tuned.detach()
    other = copy.deepcopy(model)
    before = {name: p.clone() for name, p in other.named_parameters()}
    stir(deltune.attach(other, f"lora(rank=2, at={site!r})")).merge()
    changed = {name: p - before[name] for name, p in other.named_parameters() if not torch.equal(p, before[name])}
    assert set(changed) == {f"{path}.weight" for path in expected}
    if family.columns and site in ("query", "key", "value"):
        groups, parts = family.columns
        start, stop = parts[SITES[site]]
        for name, change in changed.items():
            out = change.T if family.name == "gpt2" else change  # Conv1D holds (in, out)
            rows = out.unflatten(0, (groups, -1))
            touched = rows[:, start:stop].ne(0).any(-1)
            assert touched.all() and not torch.cat([rows[:, :start], rows[:, stop:]], 1).any(), name
