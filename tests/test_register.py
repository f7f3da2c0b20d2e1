"""Forms, compositions and named methods of the user's own: in expressions, in files, in mixed batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import deltune
from deltune.methods import registry
from tests.laws.families import FAMILIES
from tests.laws.specimens import batch, build, equal, run, stir


@dataclass(frozen=True, repr=False)
class Shift(deltune.Form):
    """Δh = s tanh(w ⊙ u), a form of five lines."""

    size: float = 1.0

    def shapes(self, widths):  # type: ignore[no-untyped-def]
        return {"w": (widths.in_width,)}

    def initialize(self, tensors):  # type: ignore[no-untyped-def]
        tensors["w"].zero_()

    def __call__(self, tensors, u, training):  # type: ignore[no-untyped-def]
        return self.size * torch.tanh(tensors["w"] * u)


@dataclass(frozen=True, repr=False)
class Halved(deltune.Composition):
    """h + Δh / 2."""

    def __call__(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        h, delta, *_ = args
        return h + delta / 2


@dataclass(frozen=True, repr=False)
class Rolled(deltune.Form):
    """Δh = w ⊙ u moved on by one, and its A as it is or transposed."""

    transposed: bool = False

    def shapes(self, widths):  # type: ignore[no-untyped-def]
        return {"w": (widths.in_width,)}

    def initialize(self, tensors):  # type: ignore[no-untyped-def]
        tensors["w"].zero_()

    def affine(self, tensors):  # type: ignore[no-untyped-def]
        a = torch.diag(tensors["w"]).roll(1, 0)
        return (a.t() if self.transposed else a), None

    def __call__(self, tensors, u, training):  # type: ignore[no-untyped-def]
        return (tensors["w"] * u).roll(1, -1)


@deltune.named_method
def shifted(size: float = 2.0):  # type: ignore[no-untyped-def]
    """Train a shift after every FFN and the norms."""
    return (deltune.Modification("ffn", Shift(size), "sequential"), *deltune.layernorm().parts)


@pytest.fixture(autouse=True)
def _vocabulary() -> Iterator[None]:
    known = dict(registry.VOCABULARY)
    yield
    registry.VOCABULARY.clear()
    registry.VOCABULARY.update(known)
    registry._parse_cached.cache_clear()


def test_expressions_files_and_rows(tmp_path: Path) -> None:
    assert deltune.register(Shift) is Shift
    deltune.register(shifted)
    method = deltune.parse("shifted(size=3) + Modification('attention', Shift(0.5), 'sequential')")
    assert deltune.parse(repr(method)) == method
    model = build(FAMILIES["bert"], "sequence")
    inputs = batch(model)
    bare = run(model, inputs)
    tuned = deltune.attach(model, method, name="own")
    assert equal(bare, run(model, inputs))
    stir(tuned)
    trained = run(model, inputs)
    tuned.save(tmp_path / "delta")
    tuned.detach()
    deltune.load(model, tmp_path / "delta", name="own")
    tuned = stir(deltune.attach(model, "lora(rank=2)", name="other"), seed=2)
    other = run(model, inputs)
    with tuned.rows(["own", "other"]):
        mixed = run(model, inputs)["logits"]
    torch.testing.assert_close(mixed, torch.stack([trained["logits"][0], other["logits"][1]]))


def test_an_affine_that_is_not_what_the_form_computes_is_not_merged() -> None:
    model = build(FAMILIES["bert"], "sequence")
    inputs = batch(model)
    bare = run(model, inputs)
    tuned = stir(deltune.attach(model, deltune.Modification("query", Rolled(transposed=True))))
    trained = run(model, inputs)
    with pytest.raises(deltune.DeltuneError, match=r"Rolled\.affine is not what it computes: A u \+ b differs by"):
        tuned.merge()
    assert equal(trained, run(model, inputs)), "nothing was merged"
    tuned.detach()
    assert equal(bare, run(model, inputs))
    tuned = stir(deltune.attach(model, deltune.Modification("query", Rolled())))
    trained = run(model, inputs)
    tuned.merge()
    torch.testing.assert_close(run(model, inputs)["logits"], trained["logits"])


def test_what_is_not_registered_is_not_saved(tmp_path: Path) -> None:
    model = build(FAMILIES["bert"], "base")
    tuned = deltune.attach(model, shifted() + deltune.Modification("block", Shift(), "sequential", Halved()))
    with pytest.raises(deltune.DeltuneError, match=r"not registered") as error:
        tuned.save(tmp_path / "delta")
    for name in ("shifted", "Shift", "Halved"):
        assert f"deltune.register({name})" in str(error.value)
    assert not (tmp_path / "delta").exists()


def test_an_expression_with_a_part_of_ones_own_says_how_to_register_it() -> None:
    with pytest.raises(deltune.DeltuneError, match=r"unknown name 'TanhLowRank'.*deltune\.register\(TanhLowRank\)"):
        deltune.parse("Modification('ffn', TanhLowRank(4)) + layernorm")
    with pytest.raises(deltune.DeltuneError) as error:
        deltune.parse("Modification('ffn', lowrank(4))")
    assert "register" not in str(error.value), "a name of ours that is written otherwise"


def test_a_file_with_a_form_that_is_not_registered_here(tmp_path: Path) -> None:
    deltune.register(Shift)
    model = build(FAMILIES["bert"], "base")
    deltune.attach(model, deltune.Modification("ffn", Shift(), "sequential")).save(tmp_path / "delta")
    del registry.VOCABULARY["Shift"]
    registry._parse_cached.cache_clear()
    with pytest.raises(deltune.DeltuneError, match=r"(?s)unknown name 'Shift'.*deltune\.register\(Shift\)"):
        deltune.load(build(FAMILIES["bert"], "base"), tmp_path / "delta")


def test_what_cannot_be_registered() -> None:
    @dataclass(frozen=True, repr=False)
    class LowRank(Shift):
        pass

    class Loose(deltune.Form):
        pass

    @dataclass(frozen=True, repr=False)
    class Half(deltune.Form):
        def shapes(self, widths):  # type: ignore[no-untyped-def]
            return {}

    def plain() -> None: ...

    for term, says in (
        (Half, r"(?s)Half lacks what every form has.*def initialize\(self, tensors\).*def __call__"),
        (LowRank, "the name 'LowRank' is taken by deltune.methods.forms.LowRank"),
        (Loose, "frozen=True"),
        (plain, "@deltune.named_method above"),
        (deltune.lora(), "register takes a Form, a Composition or a named method"),
    ):
        with pytest.raises(deltune.DeltuneError, match=says):
            deltune.register(term)  # type: ignore[type-var]
    deltune.register(Shift)
    deltune.register(Shift)  # once more, as in a notebook
