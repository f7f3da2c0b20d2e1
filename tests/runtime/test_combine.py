"""Sums of deltas as new deltas: exact for every method that merges, and equal to sums of merged weights."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.utils import merge_utils

import deltune
from deltune.runtime.combine import parse_combination
from tables.families import FAMILIES, Family
from tables.methods import METHODS, Row
from tables.specimens import batch, build, differences, distance, equal, facts, forward, run, stir

MERGING = [text for text, row in METHODS.items() if row.merges]


def changes(tuned: deltune.Tuned, name: str) -> dict[str, torch.Tensor]:
    """What merging a delta changes of each tensor."""
    before = {n: p.detach() for n, p in tuned.use(None).model.named_parameters() if not n.startswith("deltune")}
    merged = copy.deepcopy(tuned.use(name).model)
    deltune.tuned(merged).merge()
    return {n: p.detach() - before[n] for n, p in merged.named_parameters() if p.shape == before[n].shape}


def gap(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> float:
    size = max(float(t.abs().max()) for t in two.values())
    return max(float((one[n] - two[n]).abs().max()) for n in two) / size


@pytest.mark.parametrize(
    ("family", "row"),
    [
        pytest.param(family, row, id=f"{name}: {row.text}")
        for name, family in FAMILIES.items()
        if name in ("bert", "gpt2", "llama")
        for row in map(METHODS.get, MERGING)
        if row and not row.lacking(family) and all(need.holds(family) for need in row.merging)
    ],
)
@pytest.mark.sample(20)
def test_sums_are_exact(family: Family, row: Row, tmp_path: Path) -> None:
    """1 a is a; a - a is the base; w a + v b of another method merges into W + w (W_a - W) + v (W_b - W); files."""
    tolerance = 1e-10 if family.exact else 2e-4
    model = build(family, "base")
    stir(deltune.attach(model, row.text, name="a"), seed=1)
    tuned = stir(deltune.attach(model, "lora(rank=3, at=('query', 'value', 'ffn_down'))", name="b"), seed=2)
    inputs, of = batch(model), {name: changes(tuned, name) for name in "ab"}
    tuned.combine("1*a", name="same").combine("a - a", name="nothing").combine("0.5*a - 2*b", name="sum")
    outputs = {name: run(tuned.use(name).model, inputs) for name in (None, "a", "same", "nothing", "sum")}
    assert distance(outputs["same"], outputs["a"]) < tolerance
    assert distance(outputs["nothing"], outputs[None]) < tolerance
    expected = {n: 0.5 * of["a"][n] - 2 * of["b"][n] for n in of["a"]}
    assert gap(changes(tuned, "sum"), expected) < tolerance
    tuned.save(tmp_path / "sum", "sum")
    before = outputs["sum"]
    tuned.detach()
    assert equal(run(deltune.load(model, tmp_path / "sum").model, inputs), before)


def test_what_stays_what_it_is() -> None:
    tuned = build_two("bert", "lora(rank=2, at='query')", "lora(rank=3, at='query', scale=2)")
    stir(deltune.attach(tuned.model, "ia3", name="c"), seed=3)
    stir(deltune.attach(tuned.model, "vera(rank=4)", name="d"), seed=3)
    assert repr(tuned.combine("a + b", name="e").method) == "lora(rank=5, at='query')"
    assert repr(tuned.combine("2*c", name="f").method) == repr(tuned.delta("c").method)
    assert repr(tuned.combine("d", name="g").method) == "lora(rank=4)"
    assert repr(tuned.combine("a + d", name="h", rank=2).method).count("rank=2") == 1


def build_two(family: str, first: str, second: str, role: str = "base") -> deltune.Tuned:
    model = build(FAMILIES[family], role)
    stir(deltune.attach(model, first, name="a"), seed=1)
    return stir(deltune.attach(model, second, name="b"), seed=2)


@pytest.mark.parametrize("first", ["lora(rank=4)", "dora(rank=2)"])
def test_a_rank_is_the_best_of_its_size_and_says_what_it_loses(first: str) -> None:
    """Eckart and Young: the energy that is lost is the smallest singular values'."""
    tuned = build_two("llama", first, "lora(rank=4)")
    of = {name: changes(tuned, name) for name in "ab"}
    with pytest.warns(UserWarning, match=r"rank=3 .* by ([\d.]+)% \(relative") as warned:
        tuned.combine("a - b", name="c", rank=3)
    lost = total = 0.0
    for name, change in changes(tuned, "c").items():
        whole = of["a"][name] - of["b"][name]
        if whole.any():
            best = torch.linalg.svdvals(whole)
            assert torch.isclose((change - whole).norm(), best[3:].norm(), rtol=1e-6)
            lost, total = lost + float(best[3:].square().sum()), total + float(best.square().sum())
    assert f"{(lost / total) ** 0.5:.1%}" in str(warned[0].message)


@pytest.mark.parametrize("format", ["vllm", "llama.cpp"])
def test_servers_of_lora_read_any_method_that_merges(format: str, tmp_path: Path) -> None:
    tuned = build_two("llama", "dora(rank=2)", "oft(block_size=4, at='output')", "causal")
    model = tuned.model.float()
    with pytest.raises(deltune.DeltuneError):
        deltune.export(model, tmp_path / "no", format, "a")
    inputs = batch(model)
    expected = run(tuned.combine("a + 0.5*b", name="c").model, inputs)
    deltune.export(model, tmp_path / "lora", format, "c")
    tuned.detach()
    assert distance(run(deltune.load(model, tmp_path / "lora").model, inputs), expected) < 1e-5


HOWS = [
    (deltune.Ties(0.3), lambda changes, weights: merge_utils.ties(changes, weights, 0.3)),
    (deltune.Magnitude(0.3), lambda changes, weights: merge_utils.magnitude_prune(changes, weights, 0.3)),
]


@pytest.mark.parametrize(("how", "by_peft"), HOWS)
def test_ways_to_join_changes_equal_pefts_on_the_changes(how: deltune.Ties, by_peft) -> None:  # type: ignore[no-untyped-def]
    tuned = build_two("bert", "lora(rank=4)", "dora(rank=4, at='query') + layernorm")
    of = {name: changes(tuned, name) for name in "ab"}
    tuned.combine("0.7*a + 0.3*b", name="c", how=how)
    joined = changes(tuned, "c")
    for name in of["a"]:
        some = [(of[n][name], w) for n, w in (("a", 0.7), ("b", 0.3)) if of[n][name].any()]
        if some:
            expected = by_peft([c for c, _ in some], torch.tensor([w for _, w in some], dtype=torch.float64))
            assert torch.allclose(joined[name], expected, atol=1e-12), name


def test_dare_keeps_what_is_expected() -> None:
    tuned = build_two("bert", "layernorm", "layernorm")
    of = changes(tuned, "a")
    tuned.combine("a", name="c", how=deltune.Dare(0.25, seed=3))
    kept = torch.cat([(c[c != 0] / of[n][c != 0]).flatten() for n, c in changes(tuned, "c").items()])
    assert (
        torch.allclose(kept, torch.full_like(kept, 4.0))
        and 0.15 < len(kept) / sum(c.ne(0).sum() for c in of.values()) < 0.35
    )


@pytest.mark.parametrize("weights", ["scalar", "softmax", "attention", "fusion"])
def test_a_mix_starts_as_the_mean_and_trains_weights_alone(weights: Any, tmp_path: Path) -> None:
    tuned = build_two("gpt2", "lora(rank=2)", "dora(rank=3, at=('value', 'ffn_down'))")
    inputs = batch(tuned.model)
    mean = run(tuned.combine("0.5*a + 0.5*b", name="mean").model, inputs)
    mixed = run(tuned.combine("mix(a, b)", name="m", mixing=weights).model, inputs)
    assert distance(mixed, mean) < 1e-11
    trained = {name.rpartition(".")[2] for name, _ in tuned.named_trainable_parameters()}
    attends = {"attention": {"query", "key"}, "fusion": {"query", "key", "values"}}
    assert trained == attends.get(weights, {"weights"})
    forward(tuned.model, inputs)["last_hidden_state"].square().sum().backward()
    assert all(p.grad.abs().max() > 0 for n, p in tuned.named_trainable_parameters() if not n.endswith("query"))
    before = run(stir(tuned).model, inputs)
    tuned.save(tmp_path / "m")
    model = tuned.detach()
    assert distance(before, mean) > 1e-3
    assert equal(run(deltune.load(model, tmp_path / "m").model, inputs), before)


@pytest.mark.parametrize("bias", [False, True])
def test_adapter_fusion_is_the_papers_formula(bias: bool) -> None:
    """s_i = softmax(h Q ⊗ z_i K), o = Σ_i s_i z_i V, and z_i is what the adapter i adds to h (Pfeiffer et al. 2021)."""
    texts = (f"adapter(rank={rank}, bias={bias}, activation='gelu')" for rank in (4, 3))
    tuned = build_two("bert", *texts)
    model, inputs = tuned.model, batch(tuned.model)
    adapters = {n: [(e.place.target.path, e.full_tensors()) for e in tuned.delta(n).all_edits()] for n in "ab"}
    tuned.combine("mix(a, b)", name="m", mixing="fusion")
    fusion = {e.place.target.path: e.full_tensors() for e in stir(tuned).delta().all_edits()}
    assert {n.rpartition(".")[2] for n, _ in tuned.named_trainable_parameters()} == {"query", "key", "values"}
    fused = run(model, inputs)["last_hidden_state"]
    tuned.use(None)
    for places in zip(*adapters.values(), strict=True):

        def hook(module: Any, args: Any, h: torch.Tensor, places: Any = places) -> torch.Tensor:
            z = []
            for _, t in places:
                inner = torch.nn.functional.gelu(h @ t["down"].T + t.get("down_bias", 0))
                z.append(inner @ t["up"].T + t.get("up_bias", 0))
            t, z = fusion[places[0][0]], torch.stack(z, -2)
            scores = ((h @ t["query"].T)[..., None, :] * (z @ t["key"].T)).sum(-1)
            return h + (scores.softmax(-1)[..., None] * (z @ t["values"].T)).sum(-2)

        model.get_submodule(places[0][0]).register_forward_hook(hook)
    with torch.no_grad():
        assert torch.allclose(model(**inputs)["last_hidden_state"], fused, rtol=1e-10)


@pytest.mark.parametrize(("top_k", "temperature"), [(2, 0.5), (3, 1.0)])
def test_arrow_is_pefts(top_k: int, temperature: float, tmp_path: Path) -> None:
    """PEFT finds a prototype by 15 products in float32; with ours in its place it computes the same in float64."""
    peft = pytest.importorskip("peft", reason="no PEFT: pip install -e '.[peers]' -c constraints.txt")
    model = build(FAMILIES["bert"], "base")
    for number in range(4):
        experts = peft.get_peft_model(
            copy.deepcopy(model),
            peft.LoraConfig(r=3, lora_alpha=6, target_modules=["query", "value"], init_lora_weights=False),
        )
        with torch.no_grad():
            for name, parameter in experts.named_parameters():
                if "lora_A" in name:  # one direction is much stronger than the others, so that PEFT's products converge
                    parameter.normal_(generator=torch.Generator().manual_seed(number))
                    parameter[0] *= 30
        experts.save_pretrained(tmp_path / f"{number}")
    config = peft.ArrowConfig(top_k=top_k, router_temperature=temperature, rng_seed=1)
    folders = [str(tmp_path / f"{number}") for number in range(4)]
    peer = peft.create_arrow_model(copy.deepcopy(model), folders, config).double().eval()
    inputs = batch(model)
    for number, folder in enumerate(folders):
        tuned = deltune.load(model, folder, name=f"e{number}", use=False)
    tuned.combine("mix(e0, e1, e2, e3)", name="m", mixing=f"arrow(top_k={top_k}, temperature={temperature})")
    assert tuned.count(name="m").trained == 0
    alone, theirs = run(model, inputs), run(peer.base_model.model, inputs)
    assert distance(alone, theirs) < 1e-5
    with torch.no_grad():
        for edit in tuned.delta("m").all_edits():
            layer = peer.base_model.model.get_submodule(edit.place.target.path).lora_arrow["arrow_router"]
            signs = (layer.prototypes * edit.prototypes).sum(1, keepdim=True)
            assert torch.allclose(signs.abs(), torch.ones_like(signs), atol=1e-5)
            layer.prototypes.copy_(edit.prototypes * signs.sign())
    assert distance(run(peer.base_model.model, inputs), alone) < 1e-12
    tuned.save(tmp_path / "m", name="m")
    loaded = deltune.load(tuned.detach(), tmp_path / "m")
    assert equal(run(loaded.model, inputs), alone)
    with pytest.raises(deltune.DeltuneError, match="cannot be merged"):
        loaded.merge()


def test_arrow_takes_no_delta_that_leaves_a_place_alone() -> None:
    """At the values b changes nothing, so each token takes a whole."""
    model = build(FAMILIES["bert"], "base")
    stir(deltune.attach(model, "lora(rank=2, at='value')", name="a"), seed=1)
    tuned = stir(deltune.attach(model, "lora(rank=2, at='query')", name="b"), seed=2)
    tuned.combine("a + b", name="sum").combine("mix(a, b)", name="m", mixing="arrow")
    inputs = batch(model)
    assert distance(run(tuned.use("m").model, inputs), run(tuned.use("sum").model, inputs)) < 1e-12


def test_an_average_is_of_parameters_and_of_any_method() -> None:
    for text in ("prefix(length=2)", "adapter(rank=4) + layernorm"):
        tuned = build_two("bert", text, text, "sequence").combine("average(a, b)", name="c")
        parts = [tuned.attached.contents(name)[1] for name in "abc"]
        assert all(torch.allclose((a + b) / 2, c) for a, b, c in zip(*(p.values() for p in parts), strict=True)), text


def test_heads() -> None:
    tuned = build_two("bert", "lora(rank=2)", "lora(rank=2)", "sequence")
    with pytest.raises(deltune.DeltuneError, match=r"'a' and 'b' each have a head"):
        tuned.combine("a + b", name="c")
    assert tuned.names == ("a", "b")
    tuned.combine("a + b", name="c", head_of="a").combine("a + b", name="d", head_of="average")
    state, name = tuned.attached.state, tuned.delta("a").head[0]
    a, b, c, d = (state.delta_value(tuned.delta(n), name) for n in "abcd")
    assert torch.equal(a, c) and torch.allclose(d, (a + b) / 2)


@pytest.mark.parametrize(
    ("text", "weights"),
    [
        ("0.5*a + b - 2*c", {"a": 0.5, "b": 1, "c": -2}),
        ("-a", {"a": -1}),
        ("'my-task'*1" , None),
        ("1e-1*'my-task' - \"7\"", {"my-task": 0.1, "7": -1}),
        ("a+a", {"a": 2}),
        (" .5 * a", {"a": 0.5}),
        ("my-task", {"my": 1, "task": -1}),
        ("", None), ("a b", None), ("a +", None), ("2*3", None), ("a * b", None), ("(a)", None), ("1e999*a", None),
        ("7", None), ("average()", None), ("average(2*a, b)", None), ("--a", None), ("0.5a", None),
    ],
)  # fmt: skip
def test_expressions(text: str, weights: dict[str, float] | None) -> None:
    if weights is None:
        with pytest.raises(deltune.DeltuneError):
            parse_combination(text)
    else:
        assert parse_combination(text).weights == weights


@pytest.mark.parametrize(
    ("text", "options", "says"),
    [
        ("a + z", {}, "unknown delta 'z'"),
        ("b", {}, "prefix"),
        ("a", {"name": "a"}, "already attached"),
        ("a", {"rank": 0}, "rank=0"),
        ("a", {"how": "ties"}, "give Ties"),
        ("average(a, b)", {}, "the same method"),
        ("average(a, a)", {"rank": 2}, "no meaning"),
        ("mix(a, c)", {}, "changes of linears' weights"),
        ("mix(a, a)", {"mixing": "learned"}, "mixing"),
        ("mix(e, e)", {}, 'mixed by "attention" or "fusion"'),
        ("mix(e, e)", {"mixing": "arrow"}, 'mixed by "attention" or "fusion"'),
        ("mix(a, a)", {"mixing": "arrow(top=2)"}, "top"),
        ("mix(a, a)", {"mixing": "arrow(temperature=0.0)"}, "temperature=0.0: must be above 0"),
    ],
)
def test_what_is_refused_attaches_nothing(text: str, options: dict, says: str) -> None:  # type: ignore[type-arg]
    model = build(FAMILIES["bert"], "base")
    before = facts(model)
    tuned = stir(deltune.attach(model, "lora(rank=2)", name="a"))
    deltune.attach(model, "layernorm", name="c")
    deltune.attach(model, "adapter(rank=2)", name="e")
    deltune.attach(model, "prefix(length=2)", name="b")
    with pytest.raises(deltune.DeltuneError, match=says):
        tuned.combine(text, **{"name": "d", **options})
    assert tuned.names == ("a", "c", "e", "b") and tuned.active == "b"
    assert not [n for n in differences(before, facts(tuned.detach())) if n.startswith("value")]


def test_what_all_were_trained_on_stays_known(tmp_path: Path) -> None:
    tuned = build_two("llama", "lora(rank=2)", "lora(rank=4)", "causal")
    tuned.delta("a").trained = {"chat_template": "X", "end_tokens": [7], "max_length": 99}
    tuned.delta("b").trained = {"chat_template": "X", "end_tokens": [7], "max_length": 64}
    kept = {"chat_template": "X", "end_tokens": [7]}
    assert tuned.combine("a + b", name="c").delta("c").trained == kept
    tuned.save(tmp_path / "c")
    assert deltune.load(tuned.model, tmp_path / "c", name="d").delta("d").trained == kept
    tuned.delta("b").trained["chat_template"] = "Y"
    with pytest.raises(deltune.DeltuneError, match="a, b were trained with different chat templates"):
        tuned.combine("a + b", name="e")


@pytest.mark.parametrize("text", ["bitfit", "lora(rank=2, at='*')"])
def test_a_pooler_that_the_head_does_not_read_stays_out(text: str) -> None:
    model = build(FAMILIES["bert"], "sequence")
    stir(deltune.attach(model, text, name="a", pooling="mean"), seed=1)
    tuned = stir(deltune.attach(model, text, name="b"), seed=2)
    inputs = batch(model)
    expected = run(tuned.use(["a", "b"], head_of="a").model, inputs)
    assert distance(run(tuned.combine("a + b", name="c", head_of="a").model, inputs), expected) < 1e-10
    assert tuned.delta("c").pooling == "mean"
    if text != "bitfit":
        with pytest.raises(deltune.DeltuneError, match=r"needs the same pooling: .*'mean' of a, 'model' of b"):
            tuned.combine("average(a, b)", name="d", head_of="a")
