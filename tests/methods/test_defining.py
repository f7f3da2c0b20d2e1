"""DoRA and VeRA as docs/library/define.md teaches to write them, from the papers, beside the library's own."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.init import kaiming_uniform_

import deltune
from deltune import TensorSpec
from deltune.methods.registry import VOCABULARY
from tables.families import FAMILIES
from tables.specimens import batch, build, distance, equal, run, stir


@dataclass(frozen=True, repr=False)
class OwnDoRA(deltune.WeightForm):
    """W' = m (W + B A) / ‖W + B A‖ by rows, whose norms are constants of the gradient."""

    rank: int = 8

    def tensors(self, widths: Any) -> Any:
        a, b, m = (self.rank, widths.in_width), (widths.out_width, self.rank), (widths.out_width,)
        return {"a": TensorSpec(a), "b": TensorSpec(b), "m": TensorSpec(m)}

    def initialize(self, tensors: Any, at: Any) -> None:
        kaiming_uniform_(tensors["a"], a=5**0.5)
        tensors["b"].zero_()
        tensors["m"].copy_(at.weight.norm(dim=1))

    def weight(self, tensors: Any, at: Any) -> torch.Tensor:
        changed = at.weight + tensors["b"] @ tensors["a"]
        return (tensors["m"] / changed.norm(dim=1).detach())[:, None] * changed


@dataclass(frozen=True, repr=False)
class OwnVeRA(deltune.FactorForm):
    """Δh = b ⊙ B (d ⊙ A x) with random A and B that all places share."""

    rank: int = 256

    def tensors(self, widths: Any) -> Any:
        random = {"A": (self.rank, widths.in_width), "B": (widths.out_width, self.rank)}
        fixed = {n: TensorSpec(s, trained=False, saved=False, shared="term", seed=0) for n, s in random.items()}
        return {"d": TensorSpec((self.rank,)), "b": TensorSpec((widths.out_width,)), **fixed}

    def draw(self, shapes: Any, generator: torch.Generator) -> Any:
        return {name: kaiming_uniform_(torch.empty(shape), generator=generator) for name, shape in shapes.items()}

    def initialize(self, tensors: Any, at: Any) -> None:
        tensors["d"].fill_(0.1)
        tensors["b"].zero_()

    def factors(self, tensors: Any) -> Any:
        return tensors["d"][:, None] * tensors["A"], tensors["b"][:, None] * tensors["B"]


CASES = {
    OwnDoRA: (deltune.dora(rank=4), {"a": "down", "b": "up", "m": "magnitude"}),
    OwnVeRA: (deltune.vera(rank=4), {"d": "d", "b": "b"}),
}
cases = pytest.mark.parametrize("form", CASES, ids=lambda form: form.__name__)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    for form in CASES:
        deltune.register(form)
    yield
    for form in CASES:
        del VOCABULARY[form.__name__]


def sum_at_projections(form: Any) -> deltune.Method:
    return deltune.Modification("query", form(4)) + deltune.Modification("value", form(4))


@cases
def test_it_is_the_librarys(form: Any) -> None:
    """Fewer than 20 lines give the library's outputs and gradients."""
    lines = [line for line in inspect.getsource(form).splitlines() if line.strip() and '"""' not in line]
    assert len(lines) < 20
    model = build(FAMILIES["bert"], "base")
    inputs, other = batch(model), copy.deepcopy(model)
    library, names = CASES[form]
    mine, ours = stir(deltune.attach(model, sum_at_projections(form))), deltune.attach(other, library)
    pairs = []
    for one, two in zip(mine.delta().all_edits(), ours.delta().all_edits(), strict=True):
        assert one.place.target.path == two.place.target.path
        for name, of_library in names.items():
            pairs.append((one.own_tensors()[name], two.own_tensors()[of_library]))
    with torch.no_grad():
        for one, two in pairs:
            two.copy_(one)
    outputs = [each(**inputs)[0] for each in (model, other)]
    assert torch.allclose(*outputs, rtol=0, atol=1e-12)
    gradients = [
        torch.autograd.grad(output.pow(3).sum(), side)
        for output, side in zip(outputs, zip(*pairs, strict=True), strict=True)
    ]
    for one, two in zip(*gradients, strict=True):
        assert float(one.abs().max()) > 1e-6 and float((one - two).abs().max() / one.abs().max()) < 1e-11


@cases
@pytest.mark.parametrize("numbers", [1, 60])
def test_under_a_mask_it_starts_at_the_base(form: Any, numbers: int, tmp_path: Path) -> None:
    """What the mask leaves out keeps its initial values, which are in the file, though the form says nothing of it."""
    model = build(FAMILIES["bert"], "base")
    inputs = batch(model)
    bare = run(model, inputs)
    tuned = deltune.attach(model, deltune.apet(sum_at_projections(form), parameters=numbers))
    assert distance(run(model, inputs), bare) <= 1e-12
    starts = {key: {n: t.clone() for n, t in edit.tensors().items()} for key, edit in tuned.delta().named_edits()}
    changed = 0
    with torch.no_grad():
        for parameter in tuned.trainable_parameters():
            parameter += 1
    for key, edit in tuned.delta().named_edits():
        changed += sum(int((t != starts[key][n]).sum()) for n, t in edit.tensors().items())
    assert changed == numbers == sum(p.numel() for p in tuned.trainable_parameters())
    trained = run(model, inputs)
    tuned.save(tmp_path / "delta")
    tuned.detach()
    assert equal(run(model, inputs), bare)
    loaded = deltune.load(model, tmp_path / "delta")
    assert equal(run(model, inputs), trained)
    loaded.merge()
    assert distance(run(model, inputs), trained) <= 1e-12


@cases
def test_it_mixes_merges_and_is_saved(form: Any, tmp_path: Path) -> None:
    model = build(FAMILIES["bert"], "base")
    inputs = batch(model)
    tuned = stir(deltune.attach(model, sum_at_projections(form), name="own"))
    deltune.attach(model, "lora(rank=2)", name="lora")
    with torch.no_grad():
        tuned.use(None)
        bare = model(**inputs)[0]
        tuned.use("own")
        alone = model(**inputs)[0]
        assert not torch.allclose(alone, bare, atol=1e-3)
        with tuned.rows([None, "own"]):
            mixed = model(**inputs)[0]
        assert torch.allclose(mixed, torch.stack((bare[0], alone[1])), rtol=0, atol=1e-12)
        tuned.save(tmp_path / "own", name="own")
        again = build(FAMILIES["bert"], "base")
        deltune.load(again, tmp_path / "own")
        assert torch.equal(again(**inputs)[0], alone)
        tuned.merge("own")
        assert torch.allclose(model(**inputs)[0], alone, rtol=0, atol=1e-12)
