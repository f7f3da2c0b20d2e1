"""Laws of attaching and detaching, for every method on every family."""

from __future__ import annotations

import copy
import io
import pickle
import re

import pytest
import torch
from safetensors.torch import load_file

import deltune
from deltune.attaching import existing
from deltune.catalogue import TABLE

from .families import FAMILIES, Family
from .methods import METHODS, ROWS, Row, cells, refused
from .specimens import HEADS, batch, build, config, differences, equal, facts, loss, main_role, roles, run, specimen, stir

SUMS = ("prefix(length=3) + lora(rank=2) + layernorm", "lora(rank=2, at='output') + layernorm", "prompt(length=3)")


def test_every_named_method_has_a_row() -> None:
    used = {name for row in ROWS for name in re.findall(r"[a-z_0-9]+", row.text)}
    assert set(TABLE) <= used


@cells()
def test_keys_and_values_of_the_base_stay(family: Family, row: Row) -> None:
    model = specimen(family.name)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    tuned = deltune.attach(model, row.text)
    after = model.state_dict()
    assert [k for k in after if not k.startswith("deltune.")] == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    stir(tuned)
    trained = {name for name, _ in tuned.trained()}
    assert all(torch.equal(after[name], before[name]) for name in before if not _aliases(model, name) & trained)
    tuned.use(None)
    assert all(torch.equal(model.state_dict()[name], before[name]) for name in before)
    tuned.detach()
    assert list(model.state_dict()) == list(before)


def _aliases(model: torch.nn.Module, name: str) -> set[str]:
    named = dict(model.named_parameters(remove_duplicate=False))
    return {other for other, value in named.items() if value is named.get(name)} | {name}


@cells()
def test_identity_until_trained(family: Family, row: Row) -> None:
    model = specimen(family.name)
    inputs = batch(model)
    before = run(model, inputs)
    tuned = deltune.attach(model, row.text)
    at_start = run(model, inputs)
    assert equal(at_start, before) == row.identity
    if "prefix" in row.text and "gate=False" not in row.text:  # not even a zero prefix: softmax mass moves to it
        with torch.no_grad():
            for name, parameter in tuned.trained():
                if name.startswith("deltune."):
                    parameter.zero_()
        assert not equal(run(model, inputs), before)
    if sum(p.numel() for p in tuned.parameters()):
        stir(tuned)
        assert not equal(run(model, inputs), at_start)
    tuned.detach()


@cells()
def test_detaching_leaves_no_trace(family: Family, row: Row) -> None:
    model = specimen(family.name)
    flags = {p: p.requires_grad for p in model.parameters()}
    for i, parameter in enumerate(flags):
        parameter.requires_grad_(i % 3 > 0)  # the user had frozen a third of it
    try:
        inputs = batch(model)
        before, known = run(model, inputs), facts(model)
        tuned = deltune.attach(model, row.text)
        if next(tuned.parameters(), None) is not None:
            loss(run(model, inputs)).backward()
        stir(tuned).detach()
        assert equal(run(model, inputs), before)
        assert differences(known, facts(model)) == []
        with pytest.raises(deltune.DeltuneError, match="detached"):
            _ = tuned.model
        with pytest.raises(deltune.DeltuneError, match="nothing is attached"):
            deltune.tuned(model)
    finally:
        for parameter, flag in flags.items():
            parameter.requires_grad_(flag)
            parameter.grad = None


@cells()
def test_count_is_what_is_trained_and_what_is_stored(family: Family, row: Row, tmp_path) -> None:
    model = specimen(family.name)
    tuned = deltune.attach(model, row.text)
    count = tuned.count()
    assert count == deltune.count(model, row.text)
    assert count.trained == sum(p.numel() for p in tuned.parameters())
    assert count.trained == sum(p.numel() for p in model.parameters() if p.requires_grad)
    numbers = load_file(tuned.save(tmp_path / "delta") / "delta.safetensors")
    assert count.stored == sum(tensor.numel() for tensor in numbers.values())
    tuned.detach()
    loaded = deltune.load(model, tmp_path / "delta")
    assert loaded.count().method == count.method
    assert loaded.count().trained == sum(p.numel() for p in loaded.parameters())
    loaded.detach()
    frozen = deltune.attach(model, row.text, head="freeze")
    assert (frozen.count().head, frozen.count().stored) == (0, count.stored)
    assert frozen.count().trained == sum(p.numel() for p in frozen.parameters())
    frozen.detach()


@cells()
def test_count_from_the_configuration_alone(family: Family, row: Row) -> None:
    described, live = deltune.count(config(family), row.text), deltune.count(specimen(family.name, "base"), row.text)
    assert described == live
    if row.text != "full":  # full trains a vocabulary projection too, which AutoModel has not
        assert described.method == deltune.count(specimen(family.name), row.text).method
    assert described.denominator_size == sum(p.numel() for p in specimen(family.name, "base").parameters())


@cells()
def test_gradients_reach_what_is_trained_and_nothing_else(family: Family, row: Row) -> None:
    model = specimen(family.name)
    inputs = batch(model)
    flags = {p: p.requires_grad for p in model.parameters()}
    model.requires_grad_(True)
    loss(run(model, inputs)).backward()
    plain = {name: p.grad for name, p in model.named_parameters()}  # None: the forward pass does not use it
    model.zero_grad()
    for parameter, flag in flags.items():
        parameter.requires_grad_(flag)
    tuned = deltune.attach(model, row.text)
    trained = dict(tuned.trained())
    if not any(plain.get(n, 1) is not None for n in trained):
        return _released(model, tuned)  # nothing of it is used
    loss(run(model, inputs)).backward()
    if row.identity:  # the base's tensors get the very gradients that they get in the plain model
        for name, parameter in trained.items():
            if name in plain:
                assert (parameter.grad is None) == (plain[name] is None), name
                assert parameter.grad is None or torch.allclose(parameter.grad, plain[name], rtol=1e-6, atol=1e-9), name
    model.zero_grad()
    loss(run(model, inputs) if row.identity and not stir(tuned) else run(stir(tuned).model, inputs)).backward()
    for name, parameter in model.named_parameters():
        if name not in trained:
            assert parameter.grad is None, f"{name} is frozen and got a gradient"
        elif name.startswith("deltune."):
            assert parameter.grad is not None and parameter.grad.any(), f"{name} gets no gradient"
    _released(model, tuned)


def _released(model: torch.nn.Module, tuned: deltune.Tuned) -> None:
    model.zero_grad()
    tuned.detach()


@cells()
def test_copies_are_their_own(family: Family, row: Row) -> None:
    model = specimen(family.name)
    inputs = batch(model)
    before = run(model, inputs)
    tuned = stir(deltune.attach(model, row.text))
    outputs = run(model, inputs)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (
        copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)
    ):  # fmt: skip
        handle = deltune.tuned(other)
        assert handle.model is other and handle is not tuned
        assert equal(run(other, inputs), outputs)
        assert not {id(p) for p in other.parameters()} & {id(p) for p in model.parameters()}
        stir(handle, seed=5)
        assert equal(run(model, inputs), outputs)
        handle.detach()
        assert equal(run(other, inputs), before)
        assert equal(run(model, inputs), outputs)
    tuned.detach()


@cells()
def test_using_and_disabling(family: Family, row: Row) -> None:
    model = specimen(family.name)
    inputs = batch(model)
    before = run(model, inputs)
    tuned = stir(deltune.attach(model, row.text, name="one"))
    one = run(model, inputs)
    stir(deltune.attach(model, "adapter(rank=2)", name="two"))
    two = run(model, inputs)
    assert tuned.names == ("one", "two") and tuned.active == "two" and repr(tuned.method) == "adapter(rank=2)"
    for name, wanted in (("one", one), (None, before), ("two", two), ("one", one), ("one", one), (None, before)):
        tuned.use(name)
        assert equal(run(model, inputs), wanted)
        assert (tuned.method is None) == (name is None)
    tuned.use("one")
    with tuned.disable():
        assert equal(run(model, inputs), before)
    assert equal(run(model, inputs), one)
    with pytest.raises(ZeroDivisionError), tuned.disable():
        raise ZeroDivisionError
    assert equal(run(model, inputs), one)
    tuned.detach("two")
    assert tuned.names == ("one",) and equal(run(model, inputs), one)
    tuned.detach("one")
    assert existing(model) is None and equal(run(model, inputs), before)


@refused()
def test_what_a_family_lacks_is_refused(family: Family, row: Row) -> None:
    for role in dict.fromkeys(("base", main_role(family))):
        model = specimen(family.name, role)
        known = facts(model)
        with pytest.raises(deltune.DeltuneError, match="(?s)" + row.lacking(family)[0].says):
            deltune.attach(model, row.text)
        assert differences(known, facts(model)) == []
    with pytest.raises(deltune.DeltuneError, match="(?s)" + row.lacking(family)[0].says):
        deltune.count(config(family), row.text)


CLASSES = [(f, role) for f in FAMILIES.values() for role in roles(f)]


@pytest.mark.parametrize(("family", "role"), CLASSES, ids=[f"{f.name} as {role}" for f, role in CLASSES])
@pytest.mark.parametrize("text", [*SUMS, "bitfit", "full"])
def test_every_auto_class(family: Family, role: str, text: str) -> None:
    """Outputs, head, count, gradients and detaching on all classes; head: what lies outside the base and maps to labels."""
    if METHODS[text].lacking(family):
        text = text.removeprefix("prefix(length=3) + lora(rank=2) + ")
        if METHODS[text].lacking(family):
            return
    model = specimen(family.name, role)
    inputs = batch(model)
    before, known = run(model, inputs), facts(model)
    tuned = deltune.attach(model, text)
    base = {id(p) for p in model.base_model.parameters()}
    outside = {n for n, p in model.named_parameters() if id(p) not in base and not n.startswith("deltune.")}
    in_use = {n for n, _ in tuned.trained()}
    if role in HEADS:
        assert {t.name for t in tuned.anatomy.tensors if t.area == "head"} == outside and outside <= in_use
    else:
        assert (text == "full") == bool(outside & in_use) or not outside
        assert tuned.count().head == 0
    stir(tuned)
    outputs = run(model, inputs)
    assert outputs.keys() == before.keys() and not equal(outputs, before)
    assert [v.shape for v in outputs.values()] == [v.shape for v in before.values()]
    loss(outputs).backward()
    assert all(torch.isfinite(p.grad).all() for p in tuned.parameters() if p.grad is not None)
    _released(model, tuned)
    assert equal(run(model, inputs), before)
    assert differences(known, facts(model)) == []


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda f: f.name)
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
    whole = not isinstance(kept[0], tuple)
    layer.forward = lambda h, *args, **kwargs: h if whole else (h, *kept[0][1:])
    known = facts(model)
    for text in ("adapter(rank=2)", "lora(rank=2, at='ffn_down')", *(["prefix(length=2)"] if family.interface else [])):
        with pytest.raises(deltune.DeltuneError, match=f"does not reach.*{stack}.0") as caught:
            deltune.attach(model, text)
        assert family.shared or f"{stack}.1" not in str(caught.value)
        assert differences(known, facts(model)) == []
