"""Sizes solved for a budget: never over it, equal shares, exact with masks."""

from __future__ import annotations

import pytest
from transformers import BertConfig, PreTrainedModel

import deltune
from deltune.anatomy.tracing import meta_model
from deltune.methods.budget import solve
from deltune.train.config import RunConfig
from tables.methods import product

CONFIG = BertConfig()
BASE = 109_482_240


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """What is made of the configuration, observed once for all tests."""
    return meta_model(CONFIG)


@pytest.mark.parametrize(
    ("method", "budget"),
    product(
        [
            "prefix(length=?) + scaled_parallel_adapter(at='ffn', rank=?, scale=4)",
            "prefix(length=?) + layernorm",
            "mam(length=?, rank=?)",
            "adapter(rank=?, bias=True)",
            "lora(rank=?) + adapter(rank=?) + prefix(length=?)",
        ],
        ["0.5%", "0.1%", 400_000, 3_000_001],
    ),
)
@pytest.mark.sample
def test_never_over_and_nothing_more_fits(method: str, budget: int | str, model: PreTrainedModel) -> None:
    result = solve(model, method, budget)
    assert result.count == deltune.count(model, result.method).method <= result.budget
    cheapest = 2 * 768 * 12  # one more of any of these sizes costs at least this
    assert result.left < 2 * cheapest + 2 * 768 * 12


def test_equal_shares_and_weights() -> None:
    even = deltune.fit(CONFIG, "prefix(length=?) + parallel_adapter(rank=?)", 2 * 768 * 12 * 40)
    assert even == deltune.parse("prefix(length=20) + parallel_adapter(rank=20)")
    uneven = deltune.fit(CONFIG, "prefix(length=?) + parallel_adapter(rank=?)", 2 * 768 * 12 * 40, weights=[3, 1])
    assert uneven == deltune.parse("prefix(length=30) + parallel_adapter(rank=10)")


@pytest.mark.parametrize("method", ["hra(rank=?)", "hra(rank=?) + layernorm", "prefix(length=?) + hra(rank=?)"])
@pytest.mark.parametrize("budget", [77_000, 150_000, "0.5%"])
def test_sizes_that_have_to_be_even(method: str, budget: int | str, model: PreTrainedModel) -> None:
    result = solve(model, method, budget)
    assert result.count == deltune.count(model, result.method).method <= result.budget
    assert result.left < 4 * 768 * 24  # two more of either size


def test_a_mask_fills_a_budget_exactly(model: PreTrainedModel) -> None:
    assert solve(model, "apet(lora, parameters=?)", "0.05%").left == 0
    method = deltune.fit(model, "apet(lora, parameters=?)", "0.05%")
    assert method == deltune.parse(f"apet(lora, parameters={BASE // 2000})")


def test_a_mask_is_never_asked_for_more_than_there_is(model: PreTrainedModel) -> None:
    """lora(rank=1) has 36,864 scalars; the rest of the budget goes to the other ?, or stays."""
    assert solve(model, "apet(lora(rank=1), parameters=?)", 50_000).left == 50_000 - 36_864
    result = solve(model, "apet(lora(rank=1), parameters=?) + prefix(length=?)", 500_000)
    assert (
        repr(result.method)
        == "apet(lora(rank=1), parameters=36864, pattern='discrete', along='rows', seed=0) + prefix(length=25)"
    )


def test_aligned_to_another_method(model: PreTrainedModel) -> None:
    """UV table 2: on a base model MAM 16 + 16 counts as LoRA of rank 16."""
    result = solve(model, "mam(length=?, rank=?)", deltune.parse("lora(rank=16)"))
    assert (repr(result.method), result.left) == ("mam(length=16, rank=16)", 0)


@pytest.mark.parametrize(
    ("method", "sizes", "printed"),
    [
        ("lora(rank=?)", (8,), "lora(rank=8)"),
        ("lora(?, at='query')", (8,), "lora(8, at='query')"),
        ("prefix(length=?) + lora(rank=?)", (16, 8), "prefix(length=16) + lora(rank=8)"),
        ("prefix(length=?) + lora(rank=?)", (16, 9), "prefix(length=16) + lora(rank=9)"),
        ("lora( rank = ? )", (9,), "lora(rank=9)"),
        ("mam(length=?)", (30,), "mam(length=30)"),
    ],
)
def test_a_solved_size_is_printed_also_where_it_is_the_default(method: str, sizes: tuple, printed: str) -> None:
    """In Python, in sums, and on the command line; the method is the same one."""
    parts = method.split("?")
    spelled = deltune.parse("".join(f"{part}{size}" for part, size in zip(parts, [*sizes, ""], strict=True)))
    weights = [deltune.count(CONFIG, part).method for part in spelled.terms] if len(sizes) > 1 else None
    solved = deltune.fit(CONFIG, method, deltune.count(CONFIG, spelled).method, weights=weights)
    assert (str(solved), repr(solved)) == (printed, printed)
    assert solved == spelled and hash(solved) == hash(spelled) and deltune.parse(printed) == solved
    assert str(solved + deltune.parse("layernorm")) == f"{printed} + layernorm"
    assert RunConfig.from_flat(model="m", data="d", method=solved) == RunConfig.from_flat(
        model="m", data="d", method=repr(spelled)
    )


@pytest.mark.parametrize(
    ("method", "budget", "message"),
    [
        ("lora", 5000, "leaves no size open"),
        ("lora(rank=?)", 10, "too small: .* has 36,864"),
        ("lora(rank=?)", "many", "a number of scalars or a share"),
        ("lora(rank=?)", "0%", "at least 1"),
        ("lora(rnk=?)", 5000, "no argument 'rnk'"),
        ("lora(rank=?, alpha=?)", 50_000, r"\? number 2 of .* changes no count"),
        ("three_vectors + lora(rank=?, stack='decoder')", 5000, "encoder only"),
    ],
)
def test_mistakes(method: str, budget: int | str, message: str, model: PreTrainedModel) -> None:
    with pytest.raises(deltune.DeltuneError, match=message):
        deltune.fit(model, method, budget)


def test_an_open_size_is_told_where_it_is_not_solved() -> None:
    with pytest.raises(deltune.DeltuneError, match="left open"):
        deltune.parse("lora(rank=?)")
