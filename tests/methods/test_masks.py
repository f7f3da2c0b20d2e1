"""APET: exactly N live scalars, drawn the same everywhere, nested in N."""

from __future__ import annotations

import copy
import re
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import deltune
from deltune.methods.forms.base import Widths
from deltune.methods.masks import Factor, MaskGroup, draw_indices, split_budget
from deltune.methods.spec import MaskedMethod
from tables.families import FAMILIES
from tables.methods import ROWS
from tables.specimens import batch, build, differences, distance, equal, facts, forward, loss, run, specimen, stir

PATTERNS = [(p, a) for p in ("discrete", "adjacent") for a in ("rows", "columns")]


def pair(name: str, rank: int, wide: int, high: int) -> MaskGroup:
    return MaskGroup(name, rank=rank, down=(Factor("down", wide, wide, 1),), up=(Factor("up", high, 1, rank),))


@pytest.mark.parametrize(("pattern", "along"), PATTERNS)
@pytest.mark.parametrize(("rank", "wide", "high"), [(4, 6, 5), (1, 3, 3), (8, 32, 16)])
def test_a_product_keeps_exactly_n_live_scalars(rank: int, wide: int, high: int, pattern: str, along: str) -> None:
    """Every kept entry of one factor has a kept partner of its rank in the other, for every N."""
    group = pair("w", rank, wide, high)
    for count in range(2, group.size + 1):
        indices = draw_indices(group, count, pattern, along, seed=3)
        down, up = indices["down"], indices["up"]
        assert len(set(down)) + len(set(up)) == len(down) + len(up) == count
        assert set(down // wide) == set(up % rank)
        assert down.max() < rank * wide and up.max() < rank * high


@pytest.mark.parametrize(("pattern", "along"), PATTERNS)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("rank", "wide", "high"), [(4, 6, 5), (1, 3, 3), (8, 32, 16)])
@pytest.mark.sample(20)
def test_what_n_keeps_n_plus_one_keeps(rank: int, wide: int, high: int, pattern: str, along: str, seed: int) -> None:
    """As far as exactness allows: one more rank takes two scalars, so one of the others is given up for it."""
    group = pair("w", rank, wide, high)
    before: set[tuple[str, int]] = set()
    for count in range(2, group.size + 1):
        indices = {
            (leaf, i)
            for leaf, index in draw_indices(group, count, pattern, along, seed).items()
            for i in index.tolist()
        }
        by_rank = pattern == "adjacent" and along == "rows"
        opens = count % (wide + high) in (1, 2) if by_rank else count <= 2 * rank
        if opens:
            assert len(before - indices) <= (1 if pattern == "discrete" or by_rank else len(before))
        else:
            assert before <= indices, count
        before = indices


@pytest.mark.parametrize(("pattern", "along"), [*PATTERNS, ("uniform", "rows")])
@pytest.mark.parametrize("shape", [(7,), (5, 4), (3, 2, 4)])
def test_a_plain_weight(shape: tuple[int, ...], pattern: str, along: str) -> None:
    """Exactly N entries; discrete draws are nested in N; adjacent ones are one run of rows or columns."""
    group = MaskGroup("x", shape, "w")
    before: set[int] = set()
    for count in range(1, group.size + 1):
        indices = draw_indices(group, count, pattern, along, seed=1)["w"]
        assert len(set(indices)) == count and indices.max() < group.size
        if pattern in ("discrete", "uniform"):
            assert before <= set(indices)
        elif along == "rows" or len(shape) == 1:
            assert indices.max() - indices.min() == count - 1
        else:
            rows, columns = shape[0], group.size // shape[0]
            flat = np.sort(indices % columns * rows + indices // columns)
            assert flat.max() - flat.min() == count - 1
        before = set(indices)


def test_discrete_is_uniform_and_known() -> None:
    """Golden indices (the same on every machine), and every entry of a weight is as likely as any other."""
    assert draw_indices(MaskGroup("x", (100,), "w"), 5, "discrete", "rows", 0)["w"].tolist() == GOLDEN
    hits = np.zeros(50)
    for seed in range(2000):
        hits[draw_indices(MaskGroup("x", (50,), "w"), 10, "discrete", "rows", seed)["w"]] += 1
    # 2000 draws of share 1/5: 400 each, standard deviation 18; five of them bound 50 entries
    assert abs(hits - 400).max() < 90


GOLDEN = [2, 17, 44, 58, 65]


def test_uniform_is_uniform_in_products_too() -> None:
    """Exactly N entries, nested in N, each as likely as any other; the discrete ones are not, since all live."""
    group = pair("w", 8, 16, 16)
    before: set[tuple[str, int]] = set()
    for count in range(1, group.size + 1):
        drawn = draw_indices(group, count, "uniform", "rows", seed=3)
        indices = {(leaf, i) for leaf, index in drawn.items() for i in index.tolist()}
        assert len(indices) == count and before <= indices
        before = indices
    dead, alone = [], []
    for seed in range(300):
        drawn = draw_indices(group, 16, "uniform", "rows", seed)
        down, up = (drawn.get(leaf, np.array([], dtype=int)) for leaf in ("down", "up"))
        dead.append(sum(i // 16 not in set(up % 8) for i in down) + sum(i % 8 not in set(down // 16) for i in up))
        alone.append(len(down))
    # a scalar is dead where none of the 16 partners of its rank was drawn: C(239, 15) / C(255, 15) = .3676 of 16
    assert np.mean(dead) == pytest.approx(16 * 0.3676, abs=0.6) and np.mean(alone) == pytest.approx(8, abs=0.4)


def test_a_uniform_mask_trains(tmp_path: Path) -> None:
    """N scalars are counted and attached; those without a partner have a gradient of 0; a saved one loads again."""
    model = specimen("bert")
    masked = "apet(lora(rank=8) + prefix(length=2) + bitfit, parameters=60, pattern='uniform', seed=1)"
    tuned = deltune.attach(model, masked, head="freeze")
    assert tuned.count().method == sum(p.numel() for p in tuned.trainable_parameters()) == 60
    stir(tuned)
    loss(forward(model, batch(model))).backward()
    gradients = torch.cat([p.grad.reshape(-1) for p in tuned.trainable_parameters() if p.grad is not None])
    assert 0 < int((gradients != 0).sum()) < 60
    expected = forward(model, batch(model))
    saved = tuned.save(tmp_path / "delta")
    tuned.detach()
    again = deltune.load(model, saved)
    assert equal(forward(model, batch(model)), expected)
    again.detach()


def test_the_split_is_exact() -> None:
    groups = [pair(f"w{i}", 4, 6, 5) for i in range(5)] + [MaskGroup("s", (3,), "v")]
    available = sum(group.size for group in groups)
    for total in range(1, available + 1):
        quotas = split_budget(groups, total)
        assert sum(quotas) == total
        assert all(q == 0 or group.min_scalars <= q <= group.size for q, group in zip(quotas, groups, strict=True))
    for wrong in (0, available + 1):
        with pytest.raises(deltune.DeltuneError, match=f"give 1 to {available}"):
            split_budget(groups, wrong)


def test_what_acts_through_others_gets_none_without_them() -> None:
    """Gates and learned scales, for every total."""
    groups = [pair("a", 2, 3, 3), pair("b", 1, 5, 4), MaskGroup("gate", (6,), "gate"), MaskGroup("scale", (), "scale")]
    needs = {2: [0, 1], 3: [1]}
    available = sum(group.size for group in groups)
    for total in range(2, available + 1):
        quotas = split_budget(groups, total, needs)
        assert sum(quotas) == total
        assert all(q == 0 or group.min_scalars <= q <= group.size for q, group in zip(quotas, groups, strict=True))
        assert all(not quotas[i] or any(quotas[j] for j in others) for i, others in needs.items())
    with pytest.raises(deltune.DeltuneError, match=f"give 2 to {available}"):
        split_budget(groups, 1, needs)


@pytest.mark.parametrize("pattern", ["discrete", "adjacent"])
@pytest.mark.parametrize("along", ["rows", "columns"])
def test_no_rank_is_kept_by_its_bias_alone(pattern: str, along: str) -> None:
    """f(0 + b) is 0 at the start and up too, so that neither would ever have a gradient."""
    rank, wide, high = 4, 3, 2
    down = (Factor("down", wide, wide, 1), Factor("down_bias", 1, 1, 1, constant=True))
    for seed in range(20):
        group = MaskGroup(f"w{seed}", rank=rank, down=down, up=(Factor("up", high, 1, rank),))
        for count in range(2, group.size + 1):
            indices = draw_indices(group, count, pattern, along, seed)
            assert sum(map(len, indices.values())) == count
            assert set(indices["down"] // wide) == set(indices["up"] % rank) >= set(indices.get("down_bias", ()))


@pytest.mark.parametrize("rank", [10**6, 10**12, 2**50])
@pytest.mark.parametrize(("pattern", "along"), PATTERNS)
def test_a_huge_rank_costs_what_is_kept(rank: int, pattern: str, along: str) -> None:
    began = time.monotonic()
    indices = draw_indices(pair("w", rank, 768, 768), 1000, pattern, along, seed=0)
    assert sum(map(len, indices.values())) == 1000 and time.monotonic() - began < 5


SMOOTH = (
    "Modification('ffn', Bottleneck(4, activation='gelu', bias=True), compose=SigmoidGate('g'))",
    "Modification('ffn', Bottleneck(4, activation='tanh'), compose=Scale(2, learned=True)) + layernorm",
    "Modification('heads', Prefix(3), compose=SigmoidGate('p')) + Modification('query', LowRank(2))",
    "prefix(length=3) + prefix(length=2, gate=False) + lora(rank=2)",
)


@pytest.mark.parametrize("name", ["bert", "llama"])
@pytest.mark.parametrize("text", SMOOTH)
def test_what_is_counted_is_what_trains(name: str, text: str) -> None:
    """N scalars are counted, N have requires_grad, and each of them has a gradient once training has begun."""
    model = specimen(name)
    inputs = [batch(model, rows=4, length=20, seed=seed) for seed in range(3)]
    for number in (2, 20, 120):
        masked = f"apet({text}, parameters={number}, seed=1)"
        tuned = deltune.attach(model, masked, head="freeze")
        assert deltune.count(model, masked).method == sum(p.numel() for p in tuned.trainable_parameters()) == number
        stir(tuned)
        for one in inputs:
            loss(forward(model, one)).backward()
        still = [n for n, p in tuned.named_trainable_parameters() if p.grad is None or (p.grad == 0).any()]
        model.zero_grad(set_to_none=True)
        tuned.detach()
        assert not still, masked


@pytest.mark.parametrize("form", [deltune.MultiHead(3), deltune.Prefix(3)])
@pytest.mark.parametrize(("pattern", "along"), PATTERNS)
def test_a_head_keeps_keys_and_values(form: deltune.MultiHead | deltune.Prefix, pattern: str, along: str) -> None:
    """Heads do not mix: a key moves the output through a value of its own row and head."""
    widths = Widths(8, 8, heads=4, kv_heads=2, head_width=5, value_width=3)
    rank, down, up = form.mask_factors(widths)
    for count in range(2, rank * 8 + 1):
        indices = draw_indices(MaskGroup("w", rank=rank, down=down, up=up), count, pattern, along, seed=2)
        assert set(indices["keys"] // 5) == set(indices["values"] // 3)
        assert sum(map(len, indices.values())) == count


def test_a_tensor_read_past_its_module_is_not_trained_in_part() -> None:
    """DeBERTa reads its relative embeddings directly: no hook would put what is trained of them in their place."""
    model = specimen("deberta-v2")
    before = facts(model)
    read_without_call = [t.name for t in deltune.inspect(model).tensors if t.read_without_call]
    assert read_without_call == ["deberta.encoder.rel_embeddings.weight"]
    for text in ("apet(full, parameters=100)", "diff_pruning(over='all')"):
        with pytest.raises(deltune.DeltuneError, match=r"rel_embeddings.weight cannot be trained in part"):
            deltune.attach(model, text)
    assert differences(before, facts(model)) == []
    deltune.attach(model, "full").detach()


@pytest.mark.parametrize("name", ["pegasus", "marian"])
def test_what_the_model_computes_is_not_trained(name: str) -> None:
    """Sinusoids stand in parameters that have no gradient."""
    model = specimen(name)
    tuned = deltune.attach(model, "full")
    trained = dict(tuned.named_trainable_parameters())
    assert not any("embed_positions" in tensor for tensor in trained)
    assert sum(p.numel() for p in trained.values()) == tuned.count().method
    tuned.detach()


def test_ten_thousand_of_seven_billion() -> None:
    """Drawing costs what is drawn, not what it is drawn from."""
    indices = draw_indices(MaskGroup("big", (4096 * 32, 11008 * 5), "w"), 10_000, "discrete", "rows", 0)["w"]
    assert len(set(indices)) == 10_000 and indices.max() > 2**32


def test_attached_on_the_meta_device() -> None:
    """No numbers are needed to attach: the shape of any model will do."""
    with torch.device("meta"):
        model = build(FAMILIES["llama"], "causal", torch.float32)
    for method in ("lora(rank=2)", "layernorm", "adapter(rank=2)", "full"):
        tuned = deltune.attach(model, f"apet({method}, parameters=40)")
        assert sum(p.numel() for p in tuned.trainable_parameters()) == 40
        tuned.detach()


@pytest.mark.parametrize("method", ["lora(rank=2)", "adapter(rank=2, bias=True)", "prefix(length=2)", "layernorm"])
def test_all_of_a_method_is_the_method(method: str) -> None:
    """apet(METHOD, N = all) = METHOD."""
    family = FAMILIES["bert"]
    model = build(family, "sequence")
    inputs = batch(model)
    unmasked = deltune.count(model, method).method
    tuned = deltune.attach(model, method)
    torch.manual_seed(0)
    with torch.no_grad():
        for edit in tuned.delta().all_edits():
            for parameter in edit.parameters():
                parameter.normal_()
    expected = forward(model, inputs)
    values = {k: t.clone() for k, t in tuned.delta().tensors_to_save().items()}
    tuned.detach()
    masked = deltune.attach(model, MaskedMethod(deltune.parse(method), unmasked))
    assert (
        masked.count().method == unmasked == sum(p.numel() for p in masked.trainable_parameters()) - masked.count().head
    )
    with torch.no_grad():
        for key, edit in masked.delta().named_edits():
            for leaf, sparse in edit.sparse_parameters().items():
                sparse.values.copy_(values[f"edit.{key}.{leaf}"].reshape(-1))
    assert equal(forward(model, inputs), expected)


EXACT = [row.text for row in ROWS if row.identity and row.trains and not row.lacking(FAMILIES["bert"])]
"""The methods that change nothing until they are trained."""
UNMASKED = "cannot be masked|of its own: give layer_norm=False|put it outside of apet|instead of apet|0 scalars here"
"""Why some of them have no mask."""


@pytest.mark.parametrize("text", [text for text in EXACT if "apet" not in text])
def test_what_a_mask_leaves_out_changes_nothing(text: str) -> None:
    """In float64, whatever values the entries have that are not trained."""
    model = build(FAMILIES["bert"], "base")
    inputs = batch(model)
    bare, number = run(model, inputs), max(1, deltune.count(model, text).method // 2)
    try:
        tuned = deltune.attach(model, f"apet({text}, parameters={number})")
    except deltune.DeltuneError as error:
        assert re.search(UNMASKED, str(error))
        return
    assert distance(run(model, inputs), bare) <= 1e-12
    for edit in tuned.delta().all_edits():
        if "magnitude" in edit.sparse_parameters():  # of DoRA: every entry is a norm of W, trained or not
            norms = model.get_submodule(edit.place.target.path).weight.norm(dim=1)
            assert (edit.tensors()["magnitude"] - norms).abs().max() <= 1e-14


@pytest.mark.parametrize(("rows", "pool"), [("prompt(length=3)", "lora(rank=16)"), ("prefix(length=2)", "full")])
@pytest.mark.parametrize("pattern", ["adjacent", "uniform"])
def test_rows_are_there_whatever_is_drawn(rows: str, pool: str, pattern: str, tmp_path: Path) -> None:
    """AP eq. 15 concatenates W ⊙ m: with its scalars at zero, or none drawn, a model reads that many rows of zeros."""
    model = build(FAMILIES["bert"], "sequence")
    inputs = batch(model)
    tuned = deltune.attach(model, rows)
    with torch.no_grad():
        for parameter in (p for edit in tuned.delta().all_edits() for p in edit.parameters()):
            parameter.zero_()
    expected = forward(model, inputs)
    tuned.detach()
    assert not equal(forward(model, inputs), expected)
    drawn = []
    for n, seed in ((2, 0), (2, 1), (40, 0)):
        tuned = deltune.attach(model, f"apet({rows} + {pool}, parameters={n}, pattern={pattern!r}, seed={seed})")
        edits = [edit for edit in tuned.delta().all_edits() if repr(edit.form).startswith(rows[:6].capitalize())]
        drawn.append(sum(parameter.numel() for edit in edits for parameter in edit.parameters()))
        assert tuned.count().method == n == sum(p.numel() for p in tuned.trainable_parameters()) - tuned.count().head
        with torch.no_grad():
            for edit in edits:
                for parameter in edit.parameters():
                    parameter.zero_()
        assert equal(forward(model, inputs), expected)
        tuned.save(tmp_path / f"{n}-{seed}")
        tuned.detach()
        tuned = deltune.load(model, tmp_path / f"{n}-{seed}")
        assert equal(forward(model, inputs), expected)
        tuned.detach()
    assert drawn[0] == 0, "nothing of the rows is trained, and they are there all the same"


def test_a_share_of_the_model_and_bad_numbers() -> None:
    family = FAMILIES["bert"]
    model = build(family, "base")
    base = sum(p.numel() for p in model.parameters())
    assert deltune.count(model, "apet(full, parameters='1%')").method == base // 100
    for text, message in (
        ("apet(lora(rank=2), parameters=1)", "give 2 to 512"),
        ("apet(lora(rank=2), parameters=9999)", "give 2 to 512"),
        ("apet(lora, parameters='much')", "a number or a share"),
        ("apet(lora, parameters=5, pattern='scattered')", "one of 'adjacent', 'discrete', 'uniform'"),
        ("apet(apet(lora, parameters=5), parameters=5)", "mask on a mask"),
    ):
        with pytest.raises(deltune.DeltuneError, match=message):
            deltune.count(model, text)


@pytest.mark.parametrize(
    "method", ["full", "lora(rank=2) + layernorm", "three_vectors", "adapter(rank=4, activation='gelu')", "prefix"]
)
def test_every_scalar_learns_within_two_steps(method: str) -> None:
    """Plain SGD moves every trained scalar that this batch can reach."""
    model = build(FAMILIES["bert"], "sequence")
    tuned = deltune.attach(model, f"apet({method}, parameters=60, seed=5)")
    before = copy.deepcopy({name: p for name, p in tuned.named_trainable_parameters()})
    inputs = batch(model, rows=8, length=20)
    for _ in range(3):
        model.zero_grad()
        loss(forward(model, inputs)).backward()
        with torch.no_grad():
            for parameter in tuned.trainable_parameters():
                parameter -= 0.5 * parameter.grad
    still = [n for n, p in tuned.named_trainable_parameters() if "embeddings" not in n and (p == before[n]).any()]
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
