"""Laws of attaching: refusals, every auto class, edits that do not fire, where a prompt starts, names."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch
from torch.nn.utils import parametrize, prune
from transformers import AutoModel, OpenAIGPTConfig, PreTrainedModel

import deltune
from deltune.anatomy.tracing import meta_model
from deltune.methods.registry import REGISTRY
from tables.families import FAMILIES, Family
from tables.methods import ROWS, Row, refused
from tables.specimens import (
    HEADS,
    batch,
    build,
    config,
    differences,
    equal,
    facts,
    forward,
    loss,
    main_role,
    roles,
    run,
    shapes,
    specimen,
    stir,
)

EACH = pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda f: f.name)
CLASSES = [(f, role) for f in FAMILIES.values() for role in roles(f)]
EACH_CLASS = pytest.mark.parametrize(("family", "role"), CLASSES, ids=[f"{f.name} as {role}" for f, role in CLASSES])


def test_every_named_method_has_a_row() -> None:
    used = {name for row in ROWS for name in re.findall(r"[a-z_0-9]+", row.text)}
    assert {name for name in REGISTRY if name not in used} == {"corda", "eva", "lora_ga", "loftq"}, (
        "test_starts has these"
    )


@refused()
@pytest.mark.sample(18)
def test_what_a_family_lacks_is_refused(family: Family, row: Row) -> None:
    need = row.lacking(family)[0]
    says = "(?s)" + need.says
    for role in ("base", main_role(family)) if need.bare else (main_role(family),):
        model = specimen(family.name, role)
        known = facts(model)
        with pytest.raises(deltune.DeltuneError, match=says):
            deltune.attach(model, row.text)
        assert differences(known, facts(model)) == []
    if need.bare:
        with pytest.raises(deltune.DeltuneError, match=says):
            deltune.count(config(family), row.text)


def of_the_base(model: PreTrainedModel) -> dict[str, torch.nn.Parameter]:
    """Parameters of the base model; of a class that is its own base, those that AutoModel has too."""
    if model.base_model is not model:
        return dict(model.base_model.named_parameters())
    names = {name for name, _ in meta_model(model.config).named_parameters(remove_duplicate=False)}
    return {name: p for name, p in model.named_parameters() if name in names}


@EACH_CLASS
@pytest.mark.parametrize("text", ["{prefix}adapter(rank=2) + layernorm", "prompt(length=3)", "full"])
@pytest.mark.sample(25)
def test_every_auto_class(family: Family, role: str, text: str) -> None:
    """The head is what lies outside the base and maps to labels; outputs keep their names and shapes."""
    model = specimen(family.name, role)
    inputs = batch(model)
    before, known = run(model, inputs), facts(model)
    tuned = deltune.attach(model, text.format(prefix="prefix(length=3) + " if family.interface else ""))
    base = {id(p) for p in of_the_base(model).values()}
    outside = {n for n, p in model.named_parameters() if id(p) not in base and not n.startswith("deltune.")}
    trained = {name for name, _ in tuned.named_trainable_parameters()}
    head = {t.name for t in tuned.anatomy.tensors if t.area == "head"}
    assert head == (outside if role in HEADS else set())
    assert outside & trained == (outside if role in HEADS or text == "full" else set())
    outputs = run(stir(tuned).model, inputs)
    assert shapes(outputs) == shapes(before, grown=3 if "prompt" in text else 0)
    assert not equal(outputs, before)
    loss(forward(model, inputs)).backward()
    assert all(torch.isfinite(p.grad).all() for p in tuned.trainable_parameters() if p.grad is not None)
    model.zero_grad()
    tuned.detach()
    assert equal(run(model, inputs), before) and differences(known, facts(model)) == []


@EACH_CLASS
def test_bitfit_is_of_the_base(family: Family, role: str) -> None:
    """Every bias of the base model, its pooler included, and none of a vocabulary projection or a head."""
    model = specimen(family.name, role)
    biases = {n: p for n, p in of_the_base(model).items() if n.endswith("bias") and p.dim() == 1}
    if not biases:
        with pytest.raises(deltune.DeltuneError, match="no bias"):
            deltune.count(model, "bitfit", denominator=1000)
    else:
        assert deltune.count(model, "bitfit", denominator=1000).method == sum(p.numel() for p in biases.values())


@EACH
@pytest.mark.parametrize("main", [False, True], ids=["AutoModel", "its main class"])
@pytest.mark.parametrize("denominator", ["model", "no_pooler", "no_embeddings", "layers", "12,345"])
def test_denominators(family: Family, main: bool, denominator: str) -> None:
    """Sizes of AutoModel of the configuration, whatever class is attached."""
    sizes = {name: p.numel() for name, p in specimen(family.name, "base").named_parameters()}
    layers = sum(n for name, n in sizes.items() if name.startswith(tuple(f"{s.layers}." for s in family.stacks)))
    pooler = sum(n for name, n in sizes.items() if family.pooler and name.startswith(f"{family.pooler}."))
    final = sum(n for name, n in sizes.items() if family.outer.get(name.rpartition(".")[0]) == "final")
    shared_by_layers = sum(n for name, n in sizes.items() if name.startswith("encoder.rel_embeddings"))  # DeBERTa
    total = sum(sizes.values())
    expected = {
        "model": total,
        "no_pooler": total - pooler,
        "no_embeddings": layers + final + pooler + shared_by_layers,
        "layers": layers + final + shared_by_layers,
        "12,345": 12345,
    }
    model = specimen(family.name, main_role(family) if main else "base")
    assert deltune.count(model, "layernorm", denominator).denominator_size == expected[denominator]


@EACH
@pytest.mark.sample(15)
def test_a_silent_module_makes_attaching_fail_by_name(family: Family) -> None:
    """The first layer no longer calls its parts: every place in it is named, and the model is as it was."""
    model = build(family, "base")
    inputs = batch(model)
    deltune.inspect(model)
    layer = model.get_submodule(f"{family.stacks[0].layers}.0")
    stack = "decoder" if family.kind == "decoder" else "encoder"
    kept: list[object] = []
    hook = layer.register_forward_hook(lambda *of: kept.append(of[-1]))
    run(model, inputs)
    hook.remove()
    rest = kept[0][1:] if isinstance(kept[0], tuple) else None
    layer.forward = lambda h, *args, **kwargs: h if rest is None else (h, *rest)
    known = facts(model)
    for text in ("adapter(rank=2)", "lora(rank=2, at='ffn_down')", *(["prefix(length=2)"] if family.interface else [])):
        with pytest.raises(deltune.DeltuneError, match=rf"(?s)does not call every module.*{stack}\.0") as caught:
            deltune.attach(model, text)
        assert f"{stack}.1" not in str(caught.value)
        assert differences(known, facts(model)) == []


@EACH
def test_a_prompt_starts_from_given_tokens(family: Family) -> None:
    """Rows that are the embeddings of tokens compute what those tokens compute, written before the text."""
    model = specimen(family.name)
    inputs = batch(model, rows=1, pad=0)
    known = facts(model)
    ids = inputs["input_ids"]
    written = {**inputs, "input_ids": torch.cat([torch.tensor([[7, 8, 7]]), ids], 1)}
    written["attention_mask"] = torch.ones_like(written["input_ids"])
    expected = run(model, written)["logits"]
    tuned = deltune.attach(model, "prompt(length=3, init_from=(7, 8))")
    logits = run(model, inputs)["logits"]
    if family.kind == "decoder":
        expected = expected[:, 3:]
    if family.kind != "encoder":  # where a head reads the first position, the written text moves it
        assert torch.allclose(logits, expected, rtol=1e-5 if not family.exact else 1e-9, atol=1e-7)
    rows = next(p for n, p in tuned.named_trainable_parameters() if n.startswith("deltune."))
    embedded = model.get_input_embeddings()(torch.tensor([7, 8, 7]))
    assert torch.equal(rows, embedded)
    tuned.detach()
    with pytest.raises(deltune.DeltuneError, match=r"\[99\].*0 to 98"):
        deltune.attach(model, "prompt(length=3, init_from=(7, 99))")
    assert differences(known, facts(model)) == []


@pytest.mark.parametrize("text", ["trainable_tokens(tokens=(7,))", "lora(rank=2, at='embedding')"])
def test_a_prompt_starts_from_the_base_s_embeddings(text: str) -> None:
    """Another delta that changes the embeddings, and is in use, is not part of the base model."""
    model = specimen("bert")
    expected = model.get_input_embeddings()(torch.tensor([7, 8, 7])).detach().clone()
    other = deltune.attach(model, text, name="other")
    with torch.no_grad():
        for parameter in other.trainable_parameters():
            parameter.add_(1)
    tuned = deltune.attach(model, "prompt(length=3, init_from=(7, 8))")
    rows = next(p for n, p in tuned.named_trainable_parameters() if n.startswith("deltune.") and "rows" in n)
    assert torch.equal(rows, expected)


@pytest.mark.parametrize("name", ["", "a.b", "a b", "keys", "../x", "a/b", None, 3, "training", "_modules"])
def test_names_that_cannot_be(name: object) -> None:
    model = specimen("bert")
    known = facts(model)
    with pytest.raises(deltune.DeltuneError, match="name"):
        deltune.attach(model, "layernorm", name=name)  # type: ignore[arg-type]
    assert differences(known, facts(model)) == []


def test_what_is_no_model(tmp_path: Path) -> None:
    model = build(FAMILIES["bert"], "base")
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["query"]))
    for target, message in (
        (model.config, "not to a BertConfig"),
        ("lora", "load the model first"),
        (wrapped, "unload"),
    ):
        with pytest.raises(deltune.DeltuneError, match=message):
            deltune.attach(target, "lora")
        with pytest.raises(deltune.DeltuneError, match="holds no delta" if isinstance(target, str) else message):
            deltune.load(target, tmp_path)


def test_a_handle_that_was_taken_off_says_so() -> None:
    model = specimen("bert")
    tuned = deltune.attach(model, "lora", name="one")
    with pytest.raises(deltune.DeltuneError, match="call the model itself"):
        tuned(input_ids=torch.ones(1, 2, dtype=torch.long))
    tuned.detach()
    for attempt in (lambda: tuned.use("one"), tuned.merge, lambda: tuned.detach("one")):
        with pytest.raises(deltune.DeltuneError, match="detached or merged; attach or load returns a new one"):
            attempt()
    assert deltune.attach(model, "lora", name="one") is not tuned
    deltune.tuned(model).detach()


def test_a_name_in_use_and_a_name_unknown() -> None:
    model = specimen("bert")
    tuned = deltune.attach(model, "layernorm", name="one")
    with pytest.raises(deltune.DeltuneError, match="'one' is already attached"):
        deltune.attach(model, "lora", name="one")
    with pytest.raises(deltune.DeltuneError, match=r"(?s)unknown delta 'on'.*'one'"):
        tuned.use("on")
    with pytest.raises(deltune.DeltuneError, match="unknown delta 'two'"):
        tuned.detach("two")
    assert (tuned.names, tuned.active) == (("one",), "one")
    with pytest.raises(deltune.DeltuneError, match=r"unknown head.*freeze, train"):
        deltune.attach(model, "lora", name="two", head="frozen")  # type: ignore[arg-type]
    assert tuned.detach() is model


def inner(model: PreTrainedModel) -> PreTrainedModel:
    return model.base_model


def sibling(model: PreTrainedModel) -> PreTrainedModel:
    other = build(FAMILIES["bert"], "tokens")
    other.bert.encoder = model.bert.encoder
    return other


def with_the_same_embedding(model: PreTrainedModel) -> PreTrainedModel:
    other = build(FAMILIES["roberta"], "sequence")
    other.roberta.embeddings.LayerNorm = model.bert.embeddings.LayerNorm
    return other


@pytest.mark.parametrize("first", [True, False], ids=["the other first", "the other second"])
@pytest.mark.parametrize(
    ("relative", "path"),
    [(inner, "bert"), (sibling, "bert.encoder"), (with_the_same_embedding, "embeddings.LayerNorm")],
)
def test_models_that_share_modules(
    relative: Callable[[PreTrainedModel], PreTrainedModel], path: str, first: bool, tmp_path: Path
) -> None:
    """Only one of them has deltas at a time: each would take the other's tensors for the base's own."""
    model = build(FAMILIES["bert"], "sequence")
    other = relative(model)
    one, two = (other, model) if first else (model, other)
    known = facts(model), facts(other)
    tuned = stir(deltune.attach(one, "prefix(length=2) + layernorm"))
    tuned.save(tmp_path / "delta")
    inputs = batch(model)
    before = facts(two), run(one, inputs)
    for change in (deltune.attach, deltune.load):
        with pytest.raises(deltune.DeltuneError, match=f"(?s)({path}|this ).* also belongs to .*: attach to .* detach"):
            change(two, "layernorm" if change is deltune.attach else tmp_path / "delta")  # type: ignore[operator]
    assert differences(before[0], facts(two)) == [] and equal(run(one, inputs), before[1])
    stir(deltune.attach(one, "lora(rank=2)", name="beside")).detach()
    deltune.attach(two, "layernorm").detach()
    assert differences(known[0], facts(model)) == [] and differences(known[1], facts(other)) == []


def test_models_that_share_a_module_without_tensors() -> None:
    """transformers has one activation module for every OpenAI GPT of a process; each of them may have deltas."""
    config = OpenAIGPTConfig(n_embd=32, n_layer=2, n_head=4, vocab_size=99, n_positions=64)
    models = [AutoModel.from_config(config).eval() for _ in range(2)]
    assert models[0].h[0].mlp.act is models[1].h[0].mlp.act
    inputs = batch(models[0], pad=0)
    bare = [run(model, inputs) for model in models]
    tuned = [stir(deltune.attach(model, "lora(rank=2, at='ffn_up') + parallel_adapter(rank=2)")) for model in models]
    outputs = [run(model, inputs) for model in models]
    tuned[0].detach()
    assert equal(run(models[0], inputs), bare[0]) and equal(run(models[1], inputs), outputs[1])
    tuned[1].detach()
    assert equal(run(models[1], inputs), bare[1]) and not equal(outputs[1], bare[1])


@pytest.mark.parametrize(
    "text", ["lora(rank=2)", "prompt(length=2, init_from=(3,)) + layernorm", "diff_pruning(sparsity=0.01)", "unipelt"]
)
def test_inside_of_another_default_device(text: str, tmp_path: Path) -> None:
    """Deltas are made as outside of it, since a tensor on the meta device has no values to move."""
    model = build(FAMILIES["bert"], "sequence")
    inputs = batch(model)
    torch.manual_seed(0)
    expected = [p.detach().clone() for p in deltune.attach(model, text).trainable_parameters()]
    deltune.tuned(model).detach()
    torch.manual_seed(0)
    with torch.device("meta"):
        tuned = deltune.attach(model, text)
    assert all(torch.equal(a, b) for a, b in zip(tuned.trainable_parameters(), expected, strict=True))
    tuned.advance(0.0)
    outputs = run(stir(tuned).model, inputs)
    with torch.device("meta"):
        tuned.save(tmp_path / "delta")
        tuned.detach()
        deltune.load(model, tmp_path / "delta")
    assert equal(run(model, inputs), outputs)


class Halved(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / 2


def halve(module: torch.nn.Module) -> Callable[[], object]:
    parametrize.register_parametrization(module, "weight", Halved())
    return lambda: parametrize.remove_parametrizations(module, "weight", leave_parametrized=False)


def prune_half(module: torch.nn.Module) -> Callable[[], object]:
    prune.random_unstructured(module, "weight", 0.5)
    return lambda: prune.remove(module, "weight")


REPLACED = "was replaced or quantised after deltas were attached"


@pytest.mark.parametrize("replace", [halve, prune_half])
@pytest.mark.parametrize("text", ["lora(rank=2)", "layernorm", "full", "apet(full, parameters=50)"])
def test_a_parameter_that_is_none_any_more(
    text: str, replace: Callable[[torch.nn.Module], Callable[[], object]], tmp_path: Path
) -> None:
    """What needs it is refused and changes nothing, and goes on once the parameter is back."""
    model = build(FAMILIES["bert"], "sequence")
    tuned = stir(deltune.attach(model, text, name="one"))
    stir(deltune.attach(model, "layernorm", name="two"), seed=2)
    tuned.use("one")
    inputs, layer = batch(model), model.bert.encoder.layer[0]
    expected = run(model, inputs)
    undo = replace(layer.output.LayerNorm if text == "layernorm" else layer.attention.self.query)
    known = facts(model)
    changes: dict[str, Callable[[], object]] = {"merge": tuned.merge}
    if text != "lora(rank=2)":
        changes["pass"] = lambda: run(model, inputs)
    if text in ("layernorm", "full"):
        changes |= {"use": lambda: tuned.use("two"), "detach": tuned.detach, "no use": lambda: tuned.use(None)}
        changes |= {"save": lambda: tuned.save(tmp_path / "delta"), "disable": tuned.disable().__enter__}
        changes["attach"] = lambda: deltune.attach(model, "layernorm", name="three")
    for name, change in changes.items():
        with pytest.raises(deltune.DeltuneError, match=REPLACED):
            change()
        assert (tuned.active, tuned.names, tuned.attached.state.placed_delta) == ("one", ("one", "two"), "one"), name
        assert differences(known, facts(model)) == [], name
    undo()
    outputs = run(model, inputs)
    assert replace is prune_half or equal(outputs, expected)
    tuned.use("two").use("one")
    assert equal(run(model, inputs), outputs)
    tuned.detach()
