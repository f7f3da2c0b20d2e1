"""Laws of loading many deltas: a model is rehearsed once, again after every change that could matter, and nothing that
a load does depends on what was loaded before."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import deltune
from deltune.anatomy import tracing
from deltune.anatomy.skeleton import structure_stamp
from deltune.anatomy.tracing import base_model
from tables.families import FAMILIES, Family
from tables.methods import Row, cells
from tables.specimens import batch, build, differences, equal, facts, main_role, run, specimen, stir

NAMES = ("bert", "llama", "bart")
EACH = pytest.mark.parametrize("name", NAMES)


@contextmanager
def rehearsals(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[PreTrainedModel]]:
    """The models that are traced inside the block, one entry for each trace."""
    traced: list[PreTrainedModel] = []
    record = tracing._record
    with monkeypatch.context() as patch:
        patch.setattr(tracing, "_record", lambda model, *how: (traced.append(model), record(model, *how))[1])
        yield traced


def first_layer(model: PreTrainedModel) -> nn.Module:
    return model.get_submodule(deltune.inspect(model).layers[0].path)


def first_norm(model: PreTrainedModel) -> tuple[nn.Module, str]:
    """The module around the first norm, and the norm's name there."""
    outer, _, leaf = deltune.inspect(model).layers[0].norms[0].path.rpartition(".")
    return model.get_submodule(outer), leaf


# -- what makes a rehearsal stale


def another_embedding_size(model: PreTrainedModel) -> None:
    model.resize_token_embeddings(model.get_input_embeddings().weight.shape[0] + 3)


def a_parameter_that_is_tied(model: PreTrainedModel) -> None:
    norms = deltune.inspect(model).layers[0].norms
    first, second = (model.get_submodule(norm.path) for norm in norms[:2])
    second.weight = first.weight


def a_module_of_another_type(model: PreTrainedModel) -> None:
    outer, leaf = first_norm(model)
    norm = outer._modules[leaf]
    setattr(outer, leaf, nn.Sequential(norm))


def a_module_without_a_bias(model: PreTrainedModel) -> None:
    linear = model.get_submodule(deltune.inspect(model).layers[0].ffns[0].output.path)
    linear.bias = (
        None if linear.bias is not None else nn.Parameter(torch.zeros(linear.weight.shape[0]).to(linear.weight))
    )


def a_layer_less(model: PreTrainedModel) -> None:
    outer, _, leaf = deltune.inspect(model).layers[-1].path.rpartition(".")
    del model.get_submodule(outer)[int(leaf)]  # type: ignore[operator]


def another_forward(model: PreTrainedModel) -> None:
    layer = first_layer(model)
    layer.forward = layer.forward  # type: ignore[method-assign]


def an_attribute(model: PreTrainedModel) -> None:
    model.get_submodule(deltune.inspect(model).layers[0].attentions[0].path).note = "new"


def a_value_of_the_configuration(model: PreTrainedModel) -> None:
    model.config.layer_norm_eps = 0.5


def gradient_checkpointing(model: PreTrainedModel) -> None:
    model.gradient_checkpointing_enable()


STALE: tuple[Callable[[PreTrainedModel], None], ...] = (
    another_embedding_size, a_parameter_that_is_tied, a_module_of_another_type, a_module_without_a_bias, a_layer_less,
    another_forward, an_attribute, a_value_of_the_configuration, gradient_checkpointing,
)  # fmt: skip


# -- what does not


def in_double_precision(model: PreTrainedModel) -> None:
    model.to(torch.float64 if next(model.parameters()).dtype == torch.float32 else torch.float32)


def other_values(model: PreTrainedModel) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data + 1


def in_training_mode(model: PreTrainedModel) -> None:
    model.train().requires_grad_(False)


def another_attention(model: PreTrainedModel) -> None:
    model.set_attn_implementation("eager")


def other_labels(model: PreTrainedModel) -> None:
    model.config.id2label = {0: "no", 1: "yes"}


def a_hook_of_the_user(model: PreTrainedModel) -> None:
    first_layer(model).register_forward_hook(lambda *call: None)


def a_pass(model: PreTrainedModel) -> None:
    run(model, batch(model))


def many_deltas(model: PreTrainedModel) -> None:
    for number, text in enumerate(("layernorm + adapter(rank=2)", "prefix(length=2)", "sparsity(0.1, layernorm)")):
        try:
            deltune.attach(model, text, name=f"d{number}")
        except deltune.DeltuneError:  # this family lacks something of it
            deltune.attach(model, "lora(rank=2)", name=f"d{number}")


FRESH: tuple[Callable[[PreTrainedModel], None], ...] = (
    in_double_precision, other_values, in_training_mode, another_attention, other_labels, a_hook_of_the_user,
    many_deltas,
)  # fmt: skip


@EACH
@pytest.mark.parametrize("change", (*STALE, *FRESH), ids=lambda change: change.__name__)
@pytest.mark.sample(24)
def test_a_change_of_the_model(name: str, change: Callable[[PreTrainedModel], None]) -> None:
    """The stamp of the base model differs after what could matter, so that it is rehearsed again, and only then."""
    model = build(FAMILIES[name], main_role(FAMILIES[name]))
    before = structure_stamp(base_model(model))
    change(model)
    assert (structure_stamp(base_model(model)) == before) == (change in FRESH)


def integers(model: PreTrainedModel) -> None:
    for parameter in first_layer(model).parameters():
        parameter.requires_grad_(False).data = parameter.data.to(torch.int8)


def of_inference(model: PreTrainedModel) -> None:
    with torch.inference_mode():
        for module in first_layer(model).modules():
            for leaf, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, leaf, nn.Parameter(parameter.detach().clone(), requires_grad=False))


@EACH
def test_a_method_of_a_class(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaced for all models of this class, the stamp differs; put back, it is what it was."""
    model = build(FAMILIES[name], "base")
    before, layer = structure_stamp(model), type(first_layer(model))
    with monkeypatch.context() as patch:
        patch.setattr(layer, "forward", lambda self, h, *args, **kwargs: h)
        assert structure_stamp(model) != before
    assert structure_stamp(model) == before


# -- what a load gives


@EACH
def test_one_rehearsal(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For an anatomy, every method and every file; another one after a change, or on another model."""
    model = build(FAMILIES[name], main_role(FAMILIES[name]))
    with rehearsals(monkeypatch) as traced:
        deltune.attach(model, "adapter(rank=2)").save(tmp_path / "one")
        assert traced == [model]
        deltune.attach(model, "lora(rank=2)", name="two").save(tmp_path / "two")
        for number in range(3):
            deltune.load(model, tmp_path / "one", name=f"one{number}")
            deltune.load(model, tmp_path / "two", name=f"two{number}")
        deltune.tuned(model).detach()
        deltune.load(model, tmp_path / "two")
        assert traced == [model]
        an_attribute(model)
        deltune.load(model, tmp_path / "one", name="one")
        assert traced == [model, model]
        twin = copy.deepcopy(model)
        deltune.load(twin, tmp_path / "one", name="again")
        assert traced == [model, model, twin]


SAVED = cells(
    "prefix(length=3) + lora(rank=2) + layernorm", "adapter(rank=4, bias=True, layer_norm=True, activation='gelu')",
    "prompt(length=3)", "diff_pruning(sparsity=0.02)", "full", families=lambda family: family.name in NAMES,
)  # fmt: skip


@SAVED
def test_a_load_after_others(family: Family, row: Row, tmp_path: Path) -> None:
    """The same file as the first on one model and as the fourth on another: equal in every tensor, flag and output."""
    model = specimen(family.name)
    inputs, known = batch(model), facts(model)
    stir(deltune.attach(model, row.text)).save(tmp_path / "one")
    deltune.tuned(model).detach()
    fresh = copy.deepcopy(model)
    first = deltune.load(fresh, tmp_path / "one", name="one")
    stir(deltune.attach(model, "layernorm + adapter(rank=2)", name="other"), seed=3)
    for name in ("two", "three", "one"):
        last = deltune.load(model, tmp_path / "one", name=name)
    assert last.active == first.active == "one"
    ours, theirs = (dict(tuned.named_trainable_parameters()) for tuned in (last, first))
    assert list(ours) == list(theirs) and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert equal(run(model, inputs), run(fresh, inputs))
    for name in ("two", "three"):
        assert equal(run(last.use(name).model, inputs), run(fresh, inputs))
        last.detach(name)
    assert equal(run(last.use("one").model, inputs), run(fresh, inputs))
    last.detach()
    assert differences(known, facts(model)) == []


CHANGES = (in_double_precision, in_training_mode, another_attention, gradient_checkpointing, an_attribute, a_pass)
"""Changes of a model with deltas after which others can be loaded."""


@EACH
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("text", ["prefix(length=2) + layernorm", "adapter(rank=2)"])
@pytest.mark.sample(9)
def test_a_load_after_a_change(name: str, text: str, change: Callable[[PreTrainedModel], None], tmp_path: Path) -> None:
    """It is what it would be on a model that was changed before anything was loaded: tensors, devices and outputs."""
    model = build(FAMILIES[name], main_role(FAMILIES[name]))
    fresh = copy.deepcopy(model)
    stir(deltune.attach(model, text)).save(tmp_path / "one")
    change(model)
    tuned = deltune.load(model, tmp_path / "one", name="one")
    change(fresh)
    other = deltune.load(fresh, tmp_path / "one", name="one")
    for (_, ours), (_, theirs) in zip(
        tuned.named_trainable_parameters(), other.named_trainable_parameters(), strict=True
    ):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    inputs = batch(model)
    assert equal(run(model, inputs), run(fresh, inputs))


# -- what is refused


def damaged(folder: Path, model: PreTrainedModel) -> str:
    numbers = folder / "delta.safetensors"
    numbers.write_bytes(numbers.read_bytes()[:-1] + b"\0")
    return "checksum differs"


def of_other_shapes(folder: Path, model: PreTrainedModel) -> str:
    content = json.loads((folder / "delta.json").read_text())
    for part in ("method", "explicit"):
        content[part] = content[part].replace("rank=2", "rank=3")
    (folder / "delta.json").write_text(json.dumps(content))
    return "has shape"


def not_finite(folder: Path, model: PreTrainedModel) -> str:
    tuned = deltune.load(copy.deepcopy(deltune.tuned(model).model), folder, name="wrong")
    with torch.no_grad():
        next(tuned.trainable_parameters()).fill_(float("inf"))
    tuned.save(folder)
    return "not finite"


def on_other_weights(folder: Path, model: PreTrainedModel) -> str:
    layer = first_layer(model)
    next(layer.parameters()).data.mul_(1.5)  # torch counts no version of a change of `data`
    return "another base model"


def on_weights_that_were_replaced(folder: Path, model: PreTrainedModel) -> str:
    parameter = next(first_layer(model).parameters())
    parameter.data = parameter.data * 1.5
    return "another base model"


def on_integers(folder: Path, model: PreTrainedModel) -> str:
    integers(model)
    return "quantised in a way"


def on_tensors_of_inference(folder: Path, model: PreTrainedModel) -> str:
    of_inference(model)
    return "inference_mode"


def on_a_replaced_module(folder: Path, model: PreTrainedModel) -> str:
    path = deltune.inspect(model).layers[0].attentions[0].path
    model.set_submodule(path, type(model)(model.config).to(model.dtype).eval().get_submodule(path))
    return "was replaced"


def on_a_silent_layer(folder: Path, model: PreTrainedModel) -> str:
    layer = first_layer(model)
    kept: list[Any] = []
    hook = layer.register_forward_hook(lambda *call: kept.append(call[-1]))
    run(model, batch(model))
    hook.remove()
    rest = kept[0][1:] if isinstance(kept[0], tuple) else None
    layer.forward = lambda h, *args, **kwargs: h if rest is None else (h, *rest)  # type: ignore[method-assign]
    return "does not call every module"


REFUSED: tuple[Callable[[Path, PreTrainedModel], str], ...] = (
    damaged, of_other_shapes, not_finite, on_other_weights, on_weights_that_were_replaced, on_integers,
    on_tensors_of_inference, on_a_replaced_module, on_a_silent_layer,
)  # fmt: skip


@EACH
@pytest.mark.parametrize("refusal", REFUSED, ids=lambda refusal: refusal.__name__)
@pytest.mark.sample(10)
def test_a_refused_load(name: str, refusal: Callable[[Path, PreTrainedModel], str], tmp_path: Path) -> None:
    """After several that were not refused: the model, its deltas and what is in use are as they were."""
    model = build(FAMILIES[name], main_role(FAMILIES[name]))
    tuned = stir(deltune.attach(model, "lora(rank=2) + adapter(rank=2)"))
    tuned.save(tmp_path / "one")
    for number in range(2):
        deltune.load(model, tmp_path / "one", name=f"d{number}")
    shutil.copytree(tmp_path / "one", tmp_path / "wrong")
    message = refusal(tmp_path / "wrong", model)
    known, hooks = facts(model), dict(tuned.attached.hooks.installed)
    for _ in range(2):
        with pytest.raises(deltune.DeltuneError, match=message):
            deltune.load(model, tmp_path / "wrong", name="wrong")
        assert differences(known, facts(model)) == []
        assert (
            tuned.names == ("default", "d0", "d1") and tuned.active == "d1" and tuned.attached.hooks.installed == hooks
        )


# -- many


def test_many_deltas(tmp_path: Path) -> None:
    """As many hooks as one delta of each kind needs, however many there are; each is of use, and each can go."""
    model = specimen("bert")
    inputs, known = batch(model), facts(model)
    expected = {}
    for kind in ("lora(rank=2)", "layernorm", "prefix(length=2)"):
        tuned = stir(deltune.attach(model, kind, name="one"))
        tuned.save(tmp_path / kind)
        expected[kind] = run(model, inputs)
        deltune.tuned(model).detach()
    kinds = [kind for _ in range(20) for kind in expected]
    installed = set()
    for number, kind in enumerate(kinds):
        tuned = deltune.load(model, tmp_path / kind, name=f"d{number}")
        installed.add(len(tuned.attached.hooks.installed) if number >= len(expected) else 0)
    assert len(installed) == 2
    for number in (0, 1, 2, 30, 59, 58):
        assert equal(run(tuned.use(f"d{number}").model, inputs), expected[kinds[number]])
    for number, kind in enumerate(kinds):
        if kind != "layernorm":
            tuned.detach(f"d{number}")
    assert not any(side in ("attention", "output") for _, side in tuned.attached.hooks.installed)
    assert equal(run(tuned.use("d31").model, inputs), expected["layernorm"])
    tuned.detach()
    assert differences(known, facts(model)) == []
