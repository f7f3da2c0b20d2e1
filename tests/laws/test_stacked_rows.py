"""Passes without gradients, in which the edits of several deltas are stacked: each row gets what it gets alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import deltune
from deltune.methods.forms import Bottleneck, LowRank, Widths
from deltune.methods.registry import FORMS
from deltune.runtime import stacked_edits
from deltune.runtime.handle import inference_rows

from .families import FAMILIES, Family
from .methods import METHODS, Row, cells
from .specimens import batch, stir
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
            with inference_rows(tuned, [name]):
                alone.append(answer(tuned.model, of_rows(inputs, [row])))
        for _ in range(2):
            with inference_rows(tuned, names):
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
        assert all(any(delta is one for one in tuned.deltas.values()) for stack in _stacks(tuned) for delta in stack)
    finally:
        tuned.detach()


def _stacks(tuned: deltune.Tuned) -> list[Any]:
    return [stack.number_of for stack in tuned._passes.delta_cache.stacks.values()]


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
            with inference_rows(tuned, ["good"] * 3):
                expected = answer(model, inputs)
            with inference_rows(tuned, ["good", "bad", "good"]):
                mixed = answer(model, inputs)
        for row in (0, 2):
            assert (mixed[row] - expected[row]).abs().max() < 1e-10 * expected[row].abs().max()
    finally:
        tuned.detach()


WIDTHS = Widths(in_width=5, out_width=7)


@pytest.mark.parametrize(
    "form",
    [
        LowRank(rank=2),
        *(Bottleneck(rank=3, activation=a, bias=b) for a in ("relu", "gelu", "identity") for b in (False, True)),
    ],
    ids=repr,
)
def test_two_layers_are_what_the_form_computes(form: Any) -> None:
    torch.manual_seed(0)
    tensors = {name: torch.randn(shape, dtype=torch.float64) for name, shape in form.shapes(WIDTHS).items()}
    u = torch.randn(2, 3, WIDTHS.in_width, dtype=torch.float64)
    two = form.two_layers(tensors)
    inner = torch.nn.functional.linear(u, two.down, two.down_bias)
    inner = inner if two.activation == "identity" else getattr(torch.nn.functional, two.activation)(inner)
    expected = torch.nn.functional.linear(inner, two.up, two.up_bias)
    assert torch.allclose(form(tensors, u, False), expected, rtol=1e-12)


def test_every_form_that_has_two_layers_is_tried() -> None:
    having = {kind for kind in FORMS if kind.two_layers is not deltune.Form.two_layers}
    assert having == {LowRank, Bottleneck}


@dataclass(frozen=True, repr=False)
class HalfRank(LowRank):
    """A user's form that computes something else than the one that it derives from."""

    def inner(self, tensors: Any, u: torch.Tensor, training: bool) -> torch.Tensor:
        return 0.5 * super().inner(tensors, u, training)


def test_a_form_that_derives_from_another_computes_its_own_change() -> None:
    family = FAMILIES["bert"]
    model = model_of(family)
    tuned = stir(deltune.attach(model, deltune.Modification("ffn", HalfRank(rank=2), "parallel"), name="halved"))
    stir(deltune.attach(model, deltune.Modification("ffn", LowRank(rank=2), "parallel"), name="whole"))
    try:
        check(family, tuned, ["halved", "whole", None, "halved"], batch(model, rows=4))
    finally:
        tuned.detach()
