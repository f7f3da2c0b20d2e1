"""Forms, compositions and named methods of the user's own: in expressions, in files, in mixed batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import deltune
from deltune.methods import registry
from deltune.methods.forms.base import check_form_class
from tables.families import FAMILIES
from tables.specimens import batch, build, equal, run, stir


@dataclass(frozen=True, repr=False)
class Shift(deltune.Form):
    """Δh = s tanh(w ⊙ u), a form of five lines."""

    size: float = 1.0

    def tensors(self, widths):  # type: ignore[no-untyped-def]
        return {"w": deltune.TensorSpec((widths.in_width,))}

    def initialize(self, tensors, at):  # type: ignore[no-untyped-def]
        tensors["w"].zero_()

    def __call__(self, tensors, u, at):  # type: ignore[no-untyped-def]
        return self.size * torch.tanh(tensors["w"] * u)


@dataclass(frozen=True, repr=False)
class Halved(deltune.Composition):
    """h + Δh / 2."""

    def __call__(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        h, delta, *_ = args
        return h + delta / 2


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


def test_what_is_not_registered_is_not_saved(tmp_path: Path) -> None:
    model = build(FAMILIES["bert"], "base")
    tuned = deltune.attach(model, shifted() + deltune.Modification("block", Shift(), "sequential", Halved()))
    with pytest.raises(deltune.DeltuneError, match=r"not registered") as error:
        tuned.save(tmp_path / "delta")
    for name in ("shifted", "Shift", "Halved"):
        assert f"deltune.register({name})" in str(error.value)
    assert not (tmp_path / "delta").exists()


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
    class LowRank(deltune.Form):
        pass

    class Loose(deltune.Form):
        pass

    @dataclass
    class Thawed(Loose):
        pass

    @dataclass(frozen=True, repr=False)
    class Empty(deltune.Form):
        pass

    @dataclass(frozen=True, repr=False)
    class Inside(Empty):
        needs = "attention"

    def plain() -> None: ...

    for term, says in (
        (LowRank, "the name 'LowRank' is taken by deltune.methods.forms.low_rank.LowRank"),
        (Loose, "frozen=True"),
        (Thawed, "frozen=True"),
        (Empty, r"(?s)no tensors and no initialize and no __call__; .*def tensors.*def initialize.*def __call__"),
        (Inside, "def per_head"),
        (plain, "@deltune.named_method above"),
        (deltune.lora(), "register takes a Form, a Composition or a named method"),
    ):
        with pytest.raises(deltune.DeltuneError, match=says):
            deltune.register(term)  # type: ignore[type-var]
        if term in (Loose, Thawed, Empty, Inside):  # nor can it be a part of a method
            with pytest.raises(deltune.DeltuneError, match=says):
                deltune.Modification("ffn", term())
    deltune.register(Shift)
    deltune.register(Shift)  # once more, as in a notebook


@dataclass(frozen=True, repr=False)
class Linear(deltune.Form):
    """Δh = W u + b, and `affine` that says so, or something else."""

    factor: float = 1.0
    shift: float = 0.0
    curve: float = 0.0

    def tensors(self, widths):  # type: ignore[no-untyped-def]
        return {
            "w": deltune.TensorSpec((widths.out_width, widths.in_width)),
            "b": deltune.TensorSpec((widths.out_width,)),
        }

    def initialize(self, tensors, at):  # type: ignore[no-untyped-def]
        tensors["w"].zero_(), tensors["b"].zero_()

    def affine(self, tensors, at):  # type: ignore[no-untyped-def]
        return tensors["w"] * self.factor, tensors["b"] + self.shift

    def __call__(self, tensors, u, at):  # type: ignore[no-untyped-def]
        delta = u @ tensors["w"].to(u.dtype).T
        return delta + self.curve * delta**3 + tensors["b"].to(u.dtype)


@pytest.mark.parametrize(
    ("form", "says"),
    [
        (Linear(), None),
        (Linear(factor=1.001), r"at a random u, A u \+ b differs from Δh by up to [0-9.]+, where Δh has values up to"),
        (Linear(shift=0.01), r"at u = 0, b differs from Δh by up to 0.01,"),
        (Linear(curve=1e-6), "A u \\+ b differs"),
    ],
)
def test_a_form_is_merged_only_where_affine_is_what_it_computes(form: Linear, says: str | None) -> None:
    model = build(FAMILIES["bert"], "base")
    inputs = batch(model)
    tuned = stir(deltune.attach(model, deltune.Modification("query", form)))
    trained, weights = run(model, inputs), {name: t.clone() for name, t in model.state_dict().items()}
    if says is None:
        merged = run(tuned.merge(), inputs)
        for name, value in trained.items():
            torch.testing.assert_close(merged[name], value)
        return
    with pytest.raises(deltune.DeltuneError, match=says):
        tuned.merge()
    with pytest.raises(deltune.DeltuneError) as error:
        tuned.merge()
    assert str(error.value).count("affine of Linear") == 1  # once, and not for each layer
    assert equal(trained, run(model, inputs))
    assert all(torch.equal(t, weights[name]) for name, t in model.state_dict().items())


@dataclass(frozen=True, repr=False)
class Silent(Linear):
    """Linear in its input, without an `affine` that says so."""

    affine = deltune.Form.affine


@dataclass(frozen=True, repr=False)
class Half(deltune.Composition):
    """h + Δh / 2, without a `factor` that says so."""

    def __call__(self, h, delta, tensors, x):  # type: ignore[no-untyped-def]
        return h + delta / 2


@pytest.mark.parametrize(
    ("part", "says"),
    [
        (deltune.Modification("query", Silent()), r"Silent has no affine, the A and b of Δh = A u \+ b"),
        (deltune.Modification("query", deltune.Bottleneck(2, "identity")), "Bottleneck has no affine"),
        (
            deltune.Modification("query", deltune.LowRank(2), compose=Half()),
            "Half has no factor: it depends on the input",
        ),
    ],
)
def test_what_is_not_defined_is_not_said_to_be_untrue(part: deltune.Modification, says: str) -> None:
    tuned = deltune.attach(build(FAMILIES["bert"], "base"), part)
    with pytest.raises(deltune.DeltuneError, match=says):
        tuned.merge()


def _form(**functions: Any) -> deltune.Form:
    """Make a form of Linear whose methods are other functions."""
    return dataclass(frozen=True, repr=False)(type("Odd", (Linear,), functions))()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("form", "says"),
    [
        (_form(__call__=lambda *_: torch.zeros(2, 8, 3)), r"Δh of shape \(2, 8, 3\) .* widths.out_width = "),
        (_form(__call__=lambda *_: None), "__call__ returns a NoneType"),
        (_form(__call__=lambda self, tensors, u, at: tensors["v"] * u), "__call__ raises KeyError: 'v'"),
        (_form(__call__=lambda self, tensors, u, at: u @ u), "__call__ raises RuntimeError: .*widths: in_width="),
        (_form(tensors=lambda self, widths: [3]), r"tensors returns \[3\]"),
        (_form(tensors=lambda self, widths: {"w": (widths.in_width,)}), "not a TensorSpec"),
        (_form(tensors=lambda self, widths: {"w": (widths.width,)}), "tensors raises AttributeError"),
        (_form(__call__=lambda self, tensors, u, at: u * (1 if bool(u.sum() > 0) else 2)), None),
        (_form(__call__=lambda self, tensors, u, at: tensors["b"]), None),
    ],
)
def test_what_a_form_returns_is_checked_when_it_is_attached(form: deltune.Form, says: str | None) -> None:
    model = build(FAMILIES["bert"], "base")
    inputs = batch(model)
    bare, method = run(model, inputs), deltune.Modification("ffn", form)
    if says is None:
        deltune.attach(model, method)
        return
    with pytest.raises(deltune.DeltuneError, match=says):
        deltune.attach(model, method)
    assert equal(bare, run(model, inputs))


def _of(leaf: str = "w", **facts: Any) -> Any:
    return lambda self, widths: {
        leaf: deltune.TensorSpec((widths.in_width,), **facts),
        "b": deltune.TensorSpec((widths.out_width,)),
    }


def _odd(**functions: Any) -> deltune.Form:
    """Make a form whose tensors and their values are other functions."""
    return _form(__call__=lambda self, tensors, u, at: u, **functions)


SEEDED = {"trained": False, "saved": False, "seed": 0}


@pytest.mark.parametrize(
    ("form", "says"),
    [
        (_odd(tensors=_of(**SEEDED)), r"w has a seed, and the form has no draw; write, for example:\n    def draw"),
        (
            _odd(tensors=_of(**SEEDED), draw=lambda self, *_: {}),
            r"draw returns tensors of the shapes {}, and was asked",
        ),
        (_odd(tensors=_of(**SEEDED), draw=lambda self, *_: {"w": torch.ones(3)}), r"draw returns .*\(3,\)"),
        (_odd(tensors=_of(trained=False, saved=False)), "a buffer that is not saved needs a seed"),
        (_odd(tensors=_of(seed=0)), "a seed is for trained=False, saved=False"),
        (_odd(tensors=_of(saved=False)), "w has saved=False, and the form has no fold"),
        (_odd(initialize=lambda self, tensors, at: None), "initialize leaves w, b without initial values"),
        (_odd(initialize=lambda self, tensors, at: tensors["w"].zero_()), "initialize leaves b without"),
        (_odd(initialize=lambda self, tensors, at: tensors.update(w=0)), "initialize leaves w, b without"),
        (_odd(initialize=lambda self, tensors, at: tensors["v"].zero_()), "initialize raises KeyError: 'v'"),
        (_odd(tensors=_of(trained=False, below=9), initialize=lambda self, t, at: t["b"].zero_()), "leaves w without"),
    ],
)
def test_a_tensor_without_a_value_is_named(form: deltune.Form, says: str) -> None:
    model = build(FAMILIES["bert"], "base")
    inputs = batch(model)
    bare = run(model, inputs)
    with pytest.raises(deltune.DeltuneError, match=says) as error:
        deltune.attach(model, deltune.Modification("ffn", form))
    assert str(error.value).count("Modification(") < 2
    assert equal(bare, run(model, inputs))
    deltune.attach(model, "lora(rank=2)")


@dataclass(frozen=True, repr=False)
class Weighed(deltune.Composition):
    """h + g ⊙ Δh, which sets g or forgets it."""

    forgets: bool = False

    def tensors(self, widths):  # type: ignore[no-untyped-def]
        return {"gain": deltune.TensorSpec((widths.out_width,))}

    def initialize(self, tensors):  # type: ignore[no-untyped-def]
        if not self.forgets:
            tensors["gain"].normal_()

    def __call__(self, h, delta, tensors, x):  # type: ignore[no-untyped-def]
        return h + tensors["gain"] * delta


def test_tensors_of_a_composition() -> None:
    """One without a value is named, and what a mask leaves out stays as it was drawn."""
    model = build(FAMILIES["bert"], "base")
    with pytest.raises(deltune.DeltuneError, match=r"Weighed.* leaves gain without initial values"):
        deltune.attach(model, deltune.Modification("ffn", Linear(), compose=Weighed(True)))
    part = deltune.Modification("ffn", deltune.LowRank(2), compose=Weighed())
    stir(deltune.attach(model, deltune.apet(part, parameters=50)))
    inputs = batch(model)
    assert equal(run(model, inputs), run(model, inputs))


@pytest.mark.parametrize("kind", [*registry.FORMS, Shift, Linear])
def test_a_form_has_what_it_needs_to_be_registered(kind: type[deltune.Form]) -> None:
    check_form_class(kind)
