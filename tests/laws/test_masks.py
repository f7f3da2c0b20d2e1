"""APET: exactly N live scalars, drawn the same everywhere, nested in N (METHODS §4)."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

import deltune
from deltune.algebra.elements import Masked
from deltune.mathematics.sparse import Side, Unit, draw, split

from .families import FAMILIES
from .specimens import batch, build, equal, forward, loss

PATTERNS = [(p, a) for p in ("discrete", "adjacent") for a in ("rows", "columns")]


def pair(name: str, rank: int, wide: int, high: int) -> Unit:
    ranks = np.arange(rank)
    return Unit(name, rank=rank, down=(Side("down", wide, ranks * wide, 1),), up=(Side("up", high, ranks, rank),))


@pytest.mark.parametrize(("pattern", "along"), PATTERNS)
@pytest.mark.parametrize(("rank", "wide", "high"), [(4, 6, 5), (1, 3, 3), (8, 32, 16)])
def test_a_product_keeps_exactly_n_live_scalars(rank: int, wide: int, high: int, pattern: str, along: str) -> None:
    """Every kept entry of one factor has a kept partner of its rank in the other, for every N."""
    unit = pair("w", rank, wide, high)
    for count in range(2, unit.size + 1):
        kept = draw(unit, count, pattern, along, seed=3)
        down, up = kept["down"], kept["up"]
        assert len(set(down)) + len(set(up)) == len(down) + len(up) == count
        assert set(down // wide) == set(up % rank)
        assert down.max() < rank * wide and up.max() < rank * high


@pytest.mark.parametrize(("pattern", "along"), PATTERNS)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("rank", "wide", "high"), [(4, 6, 5), (1, 3, 3), (8, 32, 16)])
def test_what_n_keeps_n_plus_one_keeps(rank: int, wide: int, high: int, pattern: str, along: str, seed: int) -> None:
    """As far as exactness allows: one more rank takes two scalars, so one of the others is given up for it."""
    unit = pair("w", rank, wide, high)
    before: set[tuple[str, int]] = set()
    for count in range(2, unit.size + 1):
        kept = {(leaf, i) for leaf, index in draw(unit, count, pattern, along, seed).items() for i in index.tolist()}
        by_rank = pattern == "adjacent" and along == "rows"
        opens = count % (wide + high) in (1, 2) if by_rank else count <= 2 * rank
        if opens:
            assert len(before - kept) <= (1 if pattern == "discrete" or by_rank else len(before))
        else:
            assert before <= kept, count
        before = kept


@pytest.mark.parametrize(("pattern", "along"), PATTERNS)
@pytest.mark.parametrize("shape", [(7,), (5, 4), (3, 2, 4)])
def test_a_plain_weight(shape: tuple[int, ...], pattern: str, along: str) -> None:
    """Exactly N entries; discrete draws are nested in N; adjacent ones are one run of rows or columns."""
    unit = Unit("x", shape, "w")
    before: set[int] = set()
    for count in range(1, unit.size + 1):
        kept = draw(unit, count, pattern, along, seed=1)["w"]
        assert len(set(kept)) == count and kept.max() < unit.size
        if pattern == "discrete":
            assert before <= set(kept)
        elif along == "rows" or len(shape) == 1:
            assert kept.max() - kept.min() == count - 1
        else:
            rows, columns = shape[0], unit.size // shape[0]
            flat = np.sort(kept % columns * rows + kept // columns)
            assert flat.max() - flat.min() == count - 1
        before = set(kept)


def test_discrete_is_uniform_and_known() -> None:
    """Golden indices (the same on every machine), and every entry of a weight is as likely as any other."""
    assert draw(Unit("x", (100,), "w"), 5, "discrete", "rows", 0)["w"].tolist() == GOLDEN
    hits = np.zeros(50)
    for seed in range(2000):
        hits[draw(Unit("x", (50,), "w"), 10, "discrete", "rows", seed)["w"]] += 1
    # 2000 draws of share 1/5: 400 each, standard deviation 18; five of them bound 50 entries
    assert abs(hits - 400).max() < 90


GOLDEN = [2, 17, 44, 58, 65]


def test_the_split_is_exact() -> None:
    units = [pair(f"w{i}", 4, 6, 5) for i in range(5)] + [Unit("s", (3,), "v")]
    whole = sum(unit.size for unit in units)
    for total in range(1, whole + 1):
        quotas = split(units, total)
        assert sum(quotas) == total
        assert all(q == 0 or unit.least <= q <= unit.size for q, unit in zip(quotas, units, strict=True))
    for wrong in (0, whole + 1):
        with pytest.raises(deltune.DeltuneError, match=f"give 1 to {whole}"):
            split(units, wrong)


def test_ten_thousand_of_seven_billion() -> None:
    """Drawing costs what is drawn, not what it is drawn from."""
    kept = draw(Unit("big", (4096 * 32, 11008 * 5), "w"), 10_000, "discrete", "rows", 0)["w"]
    assert len(set(kept)) == 10_000 and kept.max() > 2**32


def test_attached_on_the_meta_device() -> None:
    """No numbers are needed to attach: the shape of any model will do."""
    with torch.device("meta"):
        model = build(FAMILIES["llama"], "causal", torch.float32)
    for method in ("lora(rank=2)", "layernorm", "adapter(rank=2)", "full"):
        tuned = deltune.attach(model, f"apet({method}, parameters=40)")
        assert sum(p.numel() for p in tuned.parameters()) == 40
        tuned.detach()


@pytest.mark.parametrize("method", ["lora(rank=2)", "adapter(rank=2, bias=True)", "prefix(length=2)", "layernorm"])
def test_all_of_a_method_is_the_method(method: str) -> None:
    """apet(METHOD, N = all) = METHOD."""
    family = FAMILIES["bert"]
    model = build(family, "sequence")
    inputs = batch(model)
    whole = deltune.count(model, method).method
    tuned = deltune.attach(model, method)
    torch.manual_seed(0)
    with torch.no_grad():
        for edit in tuned.delta().all_edits():
            for parameter in edit.parameters():
                parameter.normal_()
    expected = forward(model, inputs)
    values = {k: t.clone() for k, t in tuned.delta().kept().items()}
    tuned.detach()
    masked = deltune.attach(model, Masked(deltune.parse(method), whole))
    assert masked.count().method == whole == sum(p.numel() for p in masked.parameters()) - masked.count().head
    with torch.no_grad():
        for key, edit in masked.delta().named_edits():
            for leaf, sparse in edit._sparse():
                sparse.values.copy_(values[f"edit.{key}.{leaf}"].reshape(-1))
    assert equal(forward(model, inputs), expected)


def test_a_share_of_the_model_and_bad_numbers() -> None:
    family = FAMILIES["bert"]
    model = build(family, "base")
    base = sum(p.numel() for p in model.parameters())
    assert deltune.count(model, "apet(full, parameters='1%')").method == base // 100
    for text, told in (
        ("apet(lora(rank=2), parameters=1)", "give 2 to 512"),
        ("apet(lora(rank=2), parameters=9999)", "give 2 to 512"),
        ("apet(lora, parameters='much')", "a number or a share"),
        ("apet(lora, parameters=5, pattern='scattered')", "one of 'adjacent', 'discrete'"),
        ("apet(apet(lora, parameters=5), parameters=5)", "mask on a mask"),
    ):
        with pytest.raises(deltune.DeltuneError, match=told):
            deltune.count(model, text)


@pytest.mark.parametrize(
    "method", ["full", "lora(rank=2) + layernorm", "three_vectors", "adapter(rank=4, activation='gelu')", "prefix"]
)
def test_every_scalar_learns_within_two_steps(method: str) -> None:
    """Plain SGD moves every trained scalar that this batch can reach."""
    model = build(FAMILIES["bert"], "sequence")
    tuned = deltune.attach(model, f"apet({method}, parameters=60, seed=5)")
    before = copy.deepcopy({name: p for name, p in tuned.trained()})
    inputs = batch(model, rows=8, length=20)
    for _ in range(3):
        model.zero_grad()
        loss(forward(model, inputs)).backward()
        with torch.no_grad():
            for parameter in tuned.parameters():
                parameter -= 0.5 * parameter.grad
    still = [n for n, p in tuned.trained() if "embeddings" not in n and (p == before[n]).any()]
    assert not still


def test_missing_biases_are_added_at_zero() -> None:
    """bitfit(add_missing=True): at the start the model is its own, and afterwards every linear has a bias."""
    model = build(FAMILIES["llama"], "causal")
    inputs = batch(model)
    expected = forward(model, inputs)
    with pytest.raises(deltune.DeltuneError, match="no bias"):
        deltune.attach(model, "bitfit")
    tuned = deltune.attach(model, "bitfit(add_missing=True)")
    assert equal(forward(model, inputs), expected)
    shapes = {e.place.name.split(".", 2)[2]: e.place.widths.out_width for e in tuned.delta().all_edits()}
    linears = {f"self.{name}" for name in ("query", "key", "value", "output")} | {"ffn_up", "ffn_up1", "ffn_down"}
    assert set(shapes) == linears | {"norm0", "norm1"}
    assert tuned.count().method == 2 * sum(shapes.values())
