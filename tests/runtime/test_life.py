"""Laws of a delta's life, for every method on every family: attach, train, copy, save, detach, load, switch, merge.

A cell attaches once. Laws that change anything get a deep copy of the attached model, except the last ones, which take
the original through detaching and loading. Each law is a subtest, so that one that fails hides no other.
"""

from __future__ import annotations

import copy
import functools
import io
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

import deltune
from deltune.anatomy.tracing import meta_model
from tables.families import FAMILIES, Family
from tables.methods import Row, cells
from tables.specimens import (
    Outputs,
    batch,
    config,
    differences,
    distance,
    equal,
    facts,
    forward,
    loss,
    run,
    specimen,
    stir,
)

FROM_THE_CONFIGURATION = "prompt(length=3)"
"""The method that is counted for a configuration itself; the others take what count makes of it, observed once."""


@functools.cache
def observed(name: str) -> PreTrainedModel:
    return meta_model(config(FAMILIES[name]))


@dataclass
class Cell:
    """One method attached to one family's model, with what the model was and gave before."""

    family: Family
    row: Row
    folder: Path
    model: PreTrainedModel
    inputs: dict[str, Any]
    facts: dict[str, Any]
    state: dict[str, torch.Tensor]
    before: Outputs
    plain: dict[str, torch.Tensor | None]
    tuned: deltune.Tuned = field(init=False)
    at_start: Outputs = field(init=False)

    def added(self) -> set[int]:
        """What lives in the tuned object."""
        return {id(p) for n, p in self.model.named_parameters() if n.startswith("deltune.")}

    def copied(self) -> tuple[PreTrainedModel, deltune.Tuned]:
        other = copy.deepcopy(self.model)
        return other, deltune.tuned(other)

    def outputs(self, model: PreTrainedModel | None = None) -> Outputs:
        return run(model or self.model, self.inputs)


def attached(family: Family, row: Row, folder: Path) -> Cell:
    model = specimen(family.name)
    inputs = batch(model)
    flags = [p.requires_grad for p in model.parameters()]
    model.requires_grad_(True)
    loss(forward(model, inputs)).backward()
    plain = {name: p.grad for name, p in model.named_parameters()}  # None: the forward pass does not use it
    model.zero_grad()
    for parameter, flag in zip(model.parameters(), flags, strict=True):
        parameter.requires_grad_(flag)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    cell = Cell(family, row, folder, model, inputs, facts(model), state, run(model, inputs), plain)
    cell.tuned = deltune.attach(model, row.text)
    cell.at_start = run(model, inputs)
    return cell


def law_keys_and_values(cell: Cell) -> None:
    """The base's keys and values are unchanged, added keys live under the one prefix."""
    other, tuned = cell.copied()
    for use in ("default", None):
        after = tuned.use(use).model.state_dict()
        assert [key for key in after if not key.startswith("deltune.")] == list(cell.state)
        assert all(torch.equal(after[name], value) for name, value in cell.state.items())
    stir(tuned.use("default"))
    trained = {id(p) for p in tuned.trainable_parameters()}
    named = dict(other.named_parameters(remove_duplicate=False))
    after = other.state_dict()
    for name, value in cell.state.items():
        moved = name in named and id(named[name]) in trained
        assert moved != torch.equal(after[name], value), name
    assert all(torch.equal(tuned.use(None).model.state_dict()[name], value) for name, value in cell.state.items())


def law_identity(cell: Cell) -> None:
    """Outputs are the base's until it is trained; under a prefix or a prompt never, not even a zero one."""
    other, tuned = cell.copied()
    if cell.row.identity is None:
        assert distance(cell.at_start, cell.before) < (1e-12 if cell.family.exact else 1e-5)
    else:
        assert equal(cell.at_start, cell.before) == cell.row.identity
    if any(word in cell.row.text for word in ("prefix", "prompt", "mam")) and "gate=False" not in cell.row.text:
        with torch.no_grad():
            for name, parameter in tuned.named_trainable_parameters():
                if name.startswith("deltune."):
                    parameter.zero_()
        assert not equal(cell.outputs(other), cell.before)
    if any(True for _ in tuned.trainable_parameters()):
        stir(tuned)
        assert distance(cell.outputs(other), cell.at_start) > 1e-6


def law_count(cell: Cell) -> None:
    """What is counted is what the optimiser sees, what the file holds, and what the configuration alone tells."""
    count = cell.tuned.count(denominator=1000)  # a number: the sizes of bases have a law of their own
    assert count.trained == sum(p.numel() for p in cell.tuned.trainable_parameters())
    assert count.trained == sum(p.numel() for p in cell.model.parameters() if p.requires_grad)
    numbers = load_file(cell.tuned.save(cell.folder / "start") / "delta.safetensors")
    assert count.stored == sum(tensor.numel() for tensor in numbers.values())
    source = config(cell.family) if cell.row.text == FROM_THE_CONFIGURATION else observed(cell.family.name)
    described = deltune.count(source, cell.row.text, denominator=1000)
    whole = specimen(cell.family.name, "base")  # AutoModel; a class may lack its pooler, and has a head besides
    assert described == deltune.count(whole, cell.row.text, denominator=1000)
    if [n for n, _ in whole.named_parameters()] == [n for n, _ in cell.model.base_model.named_parameters()]:
        base = {id(p) for p in cell.model.base_model.parameters()}
        outside = sum(
            p.numel() for p in cell.tuned.trainable_parameters() if id(p) not in base and id(p) not in cell.added()
        )
        masked = cell.tuned.delta().planned.masked  # rows of a vocabulary that is not tied are in no base model
        outside += sum(mask.count for tensor, mask in masked if tensor.area == "vocabulary")
        assert described.method == count.method - (outside - count.head)


def law_gradients(cell: Cell) -> None:
    """Gradients reach all that is trained and only that; in place, they are those of the plain model."""
    other, tuned = cell.copied()
    trained = dict(tuned.named_trainable_parameters())
    used = [name for name in trained if cell.plain.get(name, 0) is not None]
    if not trained:  # a head of a language model is no new one
        assert not cell.row.trains or (cell.row.text == "head" and cell.family.kind != "encoder")
        assert not loss(forward(other, cell.inputs)).requires_grad
        return
    assert used, "nothing that the method trains is used by the forward pass"
    if cell.row.identity:
        loss(forward(other, cell.inputs)).backward()
        for name, expected in cell.plain.items():
            if name in trained:
                gradient = trained[name].grad
                assert (gradient is None) == (expected is None), name
                assert expected is None or torch.allclose(gradient, expected, rtol=1e-9, atol=1e-12), name
        other.zero_grad()
    other.train()  # learned gates are drawn there; nothing else differs, for nothing has dropout
    for seed in range(4):  # a ReLU may be closed for every token of one batch
        stir(tuned, seed)
        loss(forward(other, batch(other, seed=seed))).backward()
    for name, parameter in other.named_parameters():
        if name not in trained:
            assert parameter.grad is None, f"{name} is frozen and got a gradient"
        elif name in used:
            assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), f"{name} gets no gradient"
            assert not name.startswith("deltune.") or parameter.grad.any(), f"{name} gets a gradient of zeros"


def law_copies(cell: Cell) -> None:
    """deepcopy, pickle and torch.save give models of their own, which detach on their own."""
    original, tuned = cell.copied()
    stir(tuned)
    loss(forward(original, cell.inputs)).backward() if list(tuned.trainable_parameters()) else None
    outputs = cell.outputs(original)
    file = io.BytesIO()
    torch.save(original, file)
    file.seek(0)
    ways = (copy.deepcopy(original), torch.load(file, weights_only=False))  # torch.save pickles the module
    for other in ways:
        handle = deltune.tuned(other)
        assert handle.model is other and handle is not tuned
        assert not {id(p) for p in other.parameters()} & {id(p) for p in original.parameters()}
        assert equal(cell.outputs(other), outputs)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.add_(1)
        assert equal(cell.outputs(original), outputs)
        handle.detach()
    assert equal(cell.outputs(original), outputs) and deltune.tuned(original) is tuned


def law_disabling(cell: Cell) -> None:
    """The base inside the context, the delta again after it, also when it is left by an exception."""
    other, tuned = cell.copied()
    outputs = cell.outputs(stir(tuned).model)
    with tuned.disable():
        assert equal(cell.outputs(other), cell.before)
    assert equal(cell.outputs(other), outputs)
    with pytest.raises(ZeroDivisionError), tuned.disable():
        raise ZeroDivisionError
    assert tuned.active == "default" and equal(cell.outputs(other), outputs)


def law_inference_mode(cell: Cell) -> None:
    """The same numbers, and training goes on afterwards: nothing made in inference mode is kept."""
    other, tuned = cell.copied()
    outputs = cell.outputs(stir(tuned).model)
    training = forward(other, cell.inputs)
    with torch.inference_mode():
        assert equal(forward(other, cell.inputs), outputs)
    again = forward(other, cell.inputs)
    assert equal(again, training)
    loss(again).backward() if any(v.requires_grad for v in again.values()) else None


def law_merging(cell: Cell) -> None:
    """Folded into the weights it is a plain model with the tuned outputs; what is no weight is refused by name."""
    other, tuned = cell.copied()
    outputs = cell.outputs(stir(tuned).model)
    if not cell.row.merges or not all(need.holds(cell.family) for need in cell.row.merging):
        state = {name: value.clone() for name, value in other.state_dict().items()}
        with pytest.raises(
            deltune.DeltuneError,
            match=r"(?s)cannot be merged.*(it depends on the input|not linear|no single weight|acts at|"
            r"or one that cannot)",
        ):
            tuned.merge()
        assert all(torch.equal(value, state[name]) for name, value in other.state_dict().items())
        assert tuned.active == "default" and equal(cell.outputs(other), outputs)
        return
    assert tuned.merge() is other
    assert list(other.state_dict()) == list(cell.state)
    changed = {fact.split(" ")[0] for fact in differences(cell.facts, facts(other))}
    assert changed <= {"value", "identity", "configuration", "attention"}  # the latter by identity: it is a copy
    assert {str(c.to_dict()) for c in _configurations(other)} == {str(c.to_dict()) for c in _configurations(cell.model)}
    with pytest.raises(deltune.DeltuneError, match="nothing is attached"):
        deltune.tuned(other)
    assert distance(cell.outputs(other), outputs) < (1e-12 if cell.family.exact else 1e-5)


def law_detaching(cell: Cell) -> None:
    """Outputs, values, the parameters themselves, flags, hooks and configurations are as before, bit for bit."""
    if any(True for _ in cell.tuned.trainable_parameters()):
        loss(forward(cell.model, cell.inputs)).backward()
    cell.model.zero_grad()
    stir(cell.tuned).save(cell.folder / "one")
    outputs = cell.outputs()
    torch.save(outputs, cell.folder / "outputs.pt")
    handle = cell.tuned
    assert handle.detach() is cell.model
    assert equal(cell.outputs(), cell.before)
    assert differences(cell.facts, facts(cell.model)) == []
    with pytest.raises(deltune.DeltuneError, match="detached"):
        _ = handle.model


def law_loading(cell: Cell) -> None:
    """Loaded under another name, beside another delta, the outputs are those it was saved with, bit for bit."""
    one = torch.load(cell.folder / "outputs.pt")
    handle = deltune.load(cell.model, cell.folder / "one", name="one")
    assert (handle.names, handle.active, handle.method) == (("one",), "one", deltune.parse(cell.row.text))
    assert equal(cell.outputs(), one)
    assert handle.count(denominator=1000).trained == sum(p.numel() for p in handle.trainable_parameters())
    loss(forward(cell.model, cell.inputs)).backward() if any(True for _ in handle.trainable_parameters()) else None
    cell.model.zero_grad()
    stir(deltune.attach(cell.model, "layernorm + adapter(rank=2)", name="two"), seed=2)
    expected = {"one": one, "two": cell.outputs(), None: cell.before}
    assert not equal(expected["two"], one)
    for name in ("one", None, "two", "one", "two", "two", None, "one"):
        assert equal(cell.outputs(handle.use(name).model), expected[name])
        assert (handle.method is None) == (name is None)
    handle.use("two").save(cell.folder / "again", name="one")  # not in use
    for file in ("delta.safetensors", "delta.json"):
        assert (cell.folder / "again" / file).read_bytes() == (cell.folder / "one" / file).read_bytes()
    handle.detach("one")
    assert handle.names == ("two",) and equal(cell.outputs(), expected["two"])
    handle.detach("two")
    assert equal(cell.outputs(), cell.before)
    assert differences(cell.facts, facts(cell.model)) == []


def _configurations(model: PreTrainedModel) -> list[Any]:
    return [m.config for m in model.modules() if hasattr(m, "config")]


LAWS: tuple[Callable[[Cell], None], ...] = (
    law_keys_and_values, law_identity, law_count, law_gradients, law_copies, law_disabling, law_inference_mode,
    law_merging, law_detaching, law_loading,
)  # fmt: skip


@cells()
@pytest.mark.sample(30)
def test_life(family: Family, row: Row, tmp_path: Path, subtests: pytest.Subtests) -> None:
    cell = attached(family, row, tmp_path)
    for law in LAWS:
        with subtests.test(law.__name__.removeprefix("law_")):
            law(cell)
