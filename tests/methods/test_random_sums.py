"""Properties of random sums: what is counted is what is attached, masks keep exactly N, budgets are never passed."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, assume, given, settings

import deltune
from deltune.methods.budget import solve
from tables.specimens import batch, equal, forward, specimen, stir

SMALL = st.integers(1, 5)
WHERE = st.sampled_from(["", ", layers='upper half'", ", layers=[0]"])
SITES = st.sampled_from(["query", "key", "value", "output", "ffn_up", "ffn_down", "ffn"])
TERMS = st.one_of(
    st.builds("lora(rank={}, at='{}'{})".format, SMALL, SITES, WHERE),
    st.builds("adapter(style='{}', rank={}{})".format, st.sampled_from(["houlsby", "pfeiffer"]), SMALL, WHERE),
    st.builds("parallel_adapter(at='{}', rank={}{})".format, st.sampled_from(["ffn", "heads"]), SMALL, WHERE),
    st.builds("prefix(length={}{})".format, SMALL, WHERE),
    st.builds("prefix(length={}, gate=False{})".format, st.integers(2, 5), WHERE),
    st.builds("prompt(length={})".format, SMALL),
    st.builds("multi_head_parallel_adapter(length={}{})".format, SMALL, WHERE),
    st.builds("layernorm(terms='gain'{})".format, WHERE),
    st.just("ia3"),
)
SUMS = st.lists(TERMS, min_size=1, max_size=4).map(" + ".join).filter(lambda text: text.count("layernorm") < 2)
"""A selection that another one holds whole is refused."""
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("name", ["bert", "llama", *(pytest.param(n, marks=pytest.mark.slow) for n in ("gpt2", "t5"))])
@given(text=SUMS)
@unhurried
def test_what_is_counted_is_what_is_attached(name: str, text: str) -> None:
    model = specimen(name)
    inputs = batch(model)
    before = forward(model, inputs)
    counted = deltune.count(model, text)
    tuned = deltune.attach(model, text)
    try:
        assert (
            counted.method + counted.head
            == sum(p.numel() for p in tuned.trainable_parameters())
            == tuned.count().trained
        )
        stir(tuned)
        assert not equal(forward(model, inputs), before)
    finally:
        tuned.detach()
    assert equal(forward(model, inputs), before)


@pytest.mark.parametrize("name", ["bert", "llama"])
@given(text=SUMS, share=st.floats(0.001, 1), pattern=st.sampled_from(["discrete", "adjacent"]), seed=st.integers(0, 9))
@unhurried
def test_a_mask_has_exactly_n_ones(name: str, text: str, share: float, pattern: str, seed: int) -> None:
    model = specimen(name)
    expected = int(deltune.count(model, text).method * share)
    assume(expected >= 2)
    masked = f"apet({text}, parameters={expected}, pattern='{pattern}', seed={seed})"
    tuned = deltune.attach(model, masked, head="freeze")
    try:
        assert sum(p.numel() for p in tuned.trainable_parameters()) == expected == deltune.count(model, masked).method
    finally:
        tuned.detach()


OPEN = st.sampled_from(["prefix(length=?)", "lora(rank=?)", "adapter(rank=?, bias=True)", "prompt(length=?)"])


@pytest.mark.parametrize("name", ["bert", "llama"])
@given(opened=st.lists(OPEN, min_size=1, max_size=3), fixed=SUMS, budget=st.integers(1, 100_000), even=st.booleans())
@unhurried
def test_a_budget_is_never_passed(name: str, opened: list[str], fixed: str, budget: int, even: bool) -> None:
    model = specimen(name)
    text = " + ".join([*opened, fixed])
    weights = None if even else [i + 1.0 for i in range(len(opened))]
    try:
        result = solve(model, text, budget, weights=weights)
    except deltune.DeltuneError as error:
        assert "too small" in str(error)
        smallest = deltune.count(model, text.replace("?", "1")).method
        assert smallest > budget
        return
    assert result.count == deltune.count(model, result.method).method <= budget
    assert result.left == budget - result.count
