"""Passes without gradients, in which the edits of several deltas are stacked: each row gets what it gets alone."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import deltune
from deltune.methods.forms.base import Place, WeightPlace, Widths
from deltune.methods.forms.hidden import Bottleneck, Rescale
from deltune.methods.forms.low_rank import LowRank
from deltune.methods.forms.mix import Mix
from deltune.methods.forms.orthogonal import Householder, PrincipalRotation
from deltune.methods.forms.shared import NoLA, RandLoRA, TinyLoRA, UniLoRA, VBLoRA, VeRA
from deltune.methods.forms.spectral import SVFT, AdaMSS, Centred, LoRAXS
from deltune.methods.forms.structured import SVD, FrozenSide, KroneckerBottleneck
from deltune.methods.forms.weights import DeLoRA
from deltune.methods.registry import FORMS
from deltune.methods.schedules import RankSchedule
from deltune.runtime import rows, stacked_edits
from tables.families import FAMILIES, Family
from tables.methods import METHODS, Row, cells
from tables.specimens import batch, build, specimen, stir

from .test_rows import SOME, WHOLE, answer, model_of, of_rows, tolerance

SUMS = (
    "lora(rank=2) + ia3", "lora(rank=3) + parallel_adapter(rank=2, bias=True, activation='gelu')", "ia3",
    "adapter(rank=2)", "prefix(length=2) + lora(rank=4)", "scaled_parallel_adapter(rank=3)",
)  # fmt: skip


def check(family: Family, tuned: deltune.Tuned, names: Sequence[str | None], inputs: dict[str, Any]) -> None:
    """What a mixed batch gives is what its rows give alone, in the first pass and in one with what was stacked."""
    with torch.inference_mode():
        alone = []
        for row, name in enumerate(names):
            with tuned.attached.inference_rows([name]):
                alone.append(answer(tuned.model, of_rows(inputs, [row])))
        for _ in range(2):
            with tuned.attached.inference_rows(names):
                mixed = answer(tuned.model, inputs)
            for row, expected in enumerate(alone):
                gap = (mixed[row : row + 1, ..., : expected.shape[-1]] - expected).abs().max()
                assert gap < tolerance(family) * expected.abs().max(), names[row]


@pytest.mark.parametrize("most", [math.inf, 0], ids=["stacked", "apart"])
@cells(*(text for text in METHODS if not text.startswith(WHOLE)), families=lambda f: f.name in SOME)
@pytest.mark.sample(30)
def test_every_method(family: Family, row: Row, most: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacked_edits, "MOST_OPERATIONS", most)
    model = model_of(family)
    tuned = stir(deltune.attach(model, row.text, name="one"))
    stir(deltune.attach(model, row.text, name="other"), seed=7)
    stir(deltune.attach(model, "layernorm + adapter(rank=3)", name="two"))
    try:
        for names in (["one", None, "one", "other", "two"], ["two", "one", "one", None, None]):
            check(family, tuned, names, batch(model, rows=5))
    finally:
        tuned.detach()


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_rows_of_large_batches_are_changed_in_place(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Biases and norms of consecutive rows have a way of their own in batches larger than those of these tests."""
    monkeypatch.setattr(rows, "MANY_NUMBERS", 0)
    model = model_of(FAMILIES[name])
    tuned = stir(deltune.attach(model, "bitfit", name="one"))
    stir(deltune.attach(model, "layernorm", name="two"), seed=7)
    try:
        check(FAMILIES[name], tuned, ["one", "one", None, "two", "two"], batch(model, rows=5))
    finally:
        tuned.detach()


@pytest.mark.parametrize("most", [math.inf, 0], ids=["stacked", "apart"])
@pytest.mark.parametrize("name", SOME)
def test_sums_that_come_and_go(name: str, most: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of many deltas; what was stacked for some batch serves the next, and goes with a delta that is detached."""
    monkeypatch.setattr(stacked_edits, "MOST_OPERATIONS", most)
    family = FAMILIES[name]
    model = model_of(family)
    for number, text in enumerate(SUMS):
        tuned = stir(deltune.attach(model, text, name=f"d{number}"), seed=number)
    inputs = batch(model, rows=6)
    try:
        check(family, tuned, [f"d{number}" for number in range(6)], inputs)
        check(family, tuned, ["d1", "d0", None, "d1", "d4", "d0"], inputs)
        tuned.detach("d0")
        stir(deltune.attach(model, "lora(rank=5)", name="d0"), seed=9)
        check(family, tuned, ["d1", "d0", None, "d1", "d4", "d0"], inputs)
        attached = [*tuned.deltas.values()]
        assert all(delta in attached for stack in _stacks(tuned) for deltas in stack for delta in deltas)
    finally:
        tuned.detach()


def _stacks(tuned: deltune.Tuned) -> list[Any]:
    return [stack.number_of for stack in tuned.attached.passes.delta_cache.stacks.values()]


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e200], ids=["nan", "inf", "overflow"])
@pytest.mark.parametrize(
    "method", ["lora(rank=2)", "parallel_adapter(rank=2, bias=True)", "adapter(rank=2)", "ia3", "prefix(length=2)"]
)
@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_nothing_that_is_not_finite_reaches_another_row(name: str, method: str, bad: float) -> None:
    model = model_of(FAMILIES[name])
    tuned = stir(deltune.attach(model, method, name="good"))
    stir(deltune.attach(model, method, name="bad"))
    with torch.no_grad():
        for parameter in tuned.delta("bad").parameters():
            parameter.fill_(bad)
    inputs = batch(model, rows=3)
    try:
        with torch.inference_mode():
            with tuned.attached.inference_rows(["good"] * 3):
                expected = answer(model, inputs)
            with tuned.attached.inference_rows(["good", "bad", "good"]):
                mixed = answer(model, inputs)
        for row in (0, 2):
            assert (mixed[row] - expected[row]).abs().max() < 1e-10 * expected[row].abs().max()
    finally:
        tuned.detach()


WIDTHS = Widths(in_width=6, out_width=6)
FIELD = (
    VeRA(2), RandLoRA(2), VBLoRA(2, vectors=4, length=3), UniLoRA(2, length=9), TinyLoRA(2, parameters=3), NoLA(2),
    LoRAXS(2), FrozenSide(2), DeLoRA(2), Householder(2), PrincipalRotation(2), KroneckerBottleneck(6, divisions=3),
    SVD(2, schedule=RankSchedule(target=1)), SVFT(1), AdaMSS(2, clusters=2), Mix(2, rank=2), Centred(2),
)  # fmt: skip


@pytest.mark.parametrize(
    "form",
    [
        LowRank(rank=2),
        *(Bottleneck(rank=3, activation=a, bias=b) for a in ("relu", "gelu", "identity") for b in (False, True)),
        *FIELD,
    ],
    ids=repr,
)
def test_two_layers_are_what_the_form_computes(form: Any) -> None:
    torch.manual_seed(0)
    tensors = {
        name: torch.randn(spec.shape, dtype=torch.float64)
        if spec.below is None
        else torch.randint(min(9, spec.below), spec.shape)
        for name, spec in form.tensors(WIDTHS).items()
    }
    u = torch.randn(2, 3, WIDTHS.in_width, dtype=torch.float64)
    two = form.two_layers(tensors)
    inner = torch.nn.functional.linear(u, two.down, two.down_bias)
    inner = inner if two.activation == "identity" else getattr(torch.nn.functional, two.activation)(inner)
    expected = torch.nn.functional.linear(inner, two.up, two.up_bias)
    assert torch.allclose(form(tensors, u, WeightPlace(torch.empty(0))), expected, rtol=1e-12)


def test_every_form_that_has_two_layers_is_tried() -> None:
    having = {kind for kind in FORMS if kind.two_layers is not deltune.Form.two_layers}
    assert having == {LowRank, Bottleneck, *(type(form) for form in FIELD)}


@dataclass(frozen=True, repr=False)
class HalfRank(LowRank):
    """A user's form that computes something else than the one that it derives from."""

    def split_at_up(self, tensors: Any, u: torch.Tensor, at: Place) -> Any:
        v, up, bias = super().split_at_up(tensors, u, at)
        return 0.5 * v, up, bias


def test_a_form_that_derives_from_another_computes_its_own_change() -> None:
    family = FAMILIES["bert"]
    model = model_of(family)
    tuned = stir(deltune.attach(model, deltune.Modification("ffn", HalfRank(rank=2), "parallel"), name="halved"))
    stir(deltune.attach(model, deltune.Modification("ffn", LowRank(rank=2), "parallel"), name="whole"))
    try:
        check(family, tuned, ["halved", "whole", None, "halved"], batch(model, rows=4))
    finally:
        tuned.detach()


@dataclass(frozen=True, repr=False)
class ClampedGain(Rescale):
    """A user's form that scales by less than the one that it derives from."""

    def __call__(self, tensors: Any, u: torch.Tensor, at: Place) -> torch.Tensor:
        return super().__call__({"gain": tensors["gain"].clamp(0.99, 1.01)}, u, at)


def normed_layer_norm() -> deltune.Modification:
    return deltune.Modification("block", Bottleneck(rank=2, layer_norm=True), "sequential")


PAIRS: dict[str, tuple[Any, Any]] = {
    "factors of the normed state": (
        deltune.Modification("ffn", Rescale(), "sequential", x="normed"),
        "lora(rank=2)",
    ),
    "a form that derives from a factor": (
        deltune.Modification("ffn", ClampedGain(), "sequential", deltune.Scale(0.5)),
        deltune.Modification("ffn", Rescale(), "sequential", deltune.Scale(0.5)),
    ),
    "a factor beside what is not stacked": (
        deltune.Modification("block", Rescale(), "sequential"),
        normed_layer_norm(),
    ),
}


@pytest.mark.parametrize("case", PAIRS)
@pytest.mark.parametrize("transposed", [False, True], ids=["as it comes", "transposed in memory"])
def test_edits_that_are_no_part_of_a_stack(case: str, transposed: bool) -> None:
    """What cannot be stacked is computed apart, also where hidden states are not contiguous."""
    family = FAMILIES["bert"]
    model = model_of(family)
    hooks = []
    if transposed:
        for layer in model.base_model.encoder.layer:
            hooks.append(layer.register_forward_hook(lambda *a: a[2].transpose(0, 1).contiguous().transpose(0, 1)))
    first, second = PAIRS[case]
    tuned = stir(deltune.attach(model, first, name="a"))
    stir(deltune.attach(model, second, name="b"), seed=5)
    try:
        check(family, tuned, ["a", "b", "b", None], batch(model, rows=4))
    finally:
        tuned.detach()
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_padding_gets_what_it_gets_alone(name: str) -> None:
    """Also a query that sees no key, in a row without a prefix beside one that has a prefix."""
    family = FAMILIES[name]
    model = specimen(name, "base", dtype=torch.float64).eval()
    tuned = stir(deltune.attach(model, "prefix(length=3)", name="p"))
    inputs = batch(model, rows=4)
    inputs["attention_mask"][:2, :2] = 0
    try:
        check(family, tuned, [None, None, "p", None], inputs)
    finally:
        tuned.detach()


def test_a_model_that_is_put_in_train_mode_inside_the_block() -> None:
    """Every edit acts still, dropout included."""
    model = build(FAMILIES["bert"], "sequence").eval()
    for number, name in enumerate(("a", "b")):
        tuned = stir(deltune.attach(model, "lora(rank=2)", name=name), seed=number)
    inputs = batch(model, rows=2)
    try:
        with torch.no_grad(), tuned.attached.inference_rows(["a", "b"]):
            expected = answer(model, inputs)
            for _, module in model.named_modules():
                module.training = True
                if isinstance(module, torch.nn.Dropout):
                    module.p = 0.0
            gap = (answer(model, inputs) - expected).abs().max()
        assert gap < 1e-10 * expected.abs().max()
    finally:
        tuned.detach()


@pytest.mark.parametrize("method", ["lora(rank=2)", "bitfit", "layernorm", "adapter(rank=2)", "prefix(length=2)"])
def test_rows_are_traced(method: str) -> None:
    """torch.jit.trace compares a graph with gradients and one without."""
    model = build(FAMILIES["bert"], "sequence").eval()
    for number, name in enumerate(("a", "b")):
        tuned = stir(deltune.attach(model, method, name=name), seed=number)
    inputs = batch(model, rows=4)
    arguments = (inputs["input_ids"], inputs["attention_mask"])
    model.config.return_dict = False
    try:
        with tuned.rows(["a", "a", "b", None]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = model(*arguments)[0]
            traced = torch.jit.trace(model, arguments, strict=False)  # type: ignore[no-untyped-call]
            assert torch.allclose(traced(*arguments)[0], expected, rtol=1e-10)
    finally:
        tuned.detach()


def test_stacks_are_shared_by_batches_and_bounded() -> None:
    """Batches of the same deltas in another order have the same tensors, and lengths that differ keep none apart."""
    model = model_of(FAMILIES["bert"])
    for number in range(6):
        tuned = stir(deltune.attach(model, "parallel_adapter(rank=2, bias=True)", name=f"d{number}"), seed=number)
    cache = tuned.attached.passes.delta_cache
    try:
        with torch.inference_mode():
            for names in (["d0", "d1", "d2"], ["d2", "d0", "d1"], ["d1", "d1", "d0"]):
                with tuned.attached.inference_rows(names):
                    answer(model, batch(model, rows=3))
            first = dict(cache.stacks)
            with tuned.attached.inference_rows(["d3", "d4", "d5"]):
                answer(model, batch(model, rows=3))
            assert first and all(len(stack.number_of) == 3 for stack in first.values())
            assert all(len(stack.number_of) == 6 for stack in cache.stacks.values())
            with tuned.attached.inference_rows(["d0", "d4", "d1"]):
                again = dict(cache.stacks)
                answer(model, batch(model, rows=3))
            assert all(cache.stacks[place] is stack for place, stack in again.items())
    finally:
        tuned.detach()
    assert not cache.stacks
