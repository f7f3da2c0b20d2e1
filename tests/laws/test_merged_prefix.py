"""A prefix attended to apart and merged (UV eq. 7) is the prefix joined to the model's own keys (UV eq. 5): the same
outputs, the same gradients, the same texts, in mixed batches too."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import PreTrainedModel

import deltune
from deltune.runtime.attention import MERGE_ABOVE, Block, How, finite_mask, kernel_for, merged_attention

from .families import FAMILIES, Family
from .methods import crossed
from .specimens import batch, build, forward, loss, main_role, stir

SOME = [FAMILIES[name] for name in ("bert", "gpt2", "llama", "bart")]
"""An encoder, a decoder, one with fewer heads of keys than of queries, and an encoder-decoder."""

METHOD = "prefix(length=3) + layernorm + lora(rank=2)"


def tuned_model(family: Family, **changes: Any) -> PreTrainedModel:
    model = build(family, main_role(family), attn_implementation="sdpa", **changes)
    stir(deltune.attach(model, METHOD), size=1.0)
    return model


def tolerance(family: Family) -> float:
    return 1e-11 if family.exact else 1e-5


def gradients(model: PreTrainedModel, inputs: dict[str, Any], how: How) -> dict[str, torch.Tensor]:
    """Outputs and gradients of every trained tensor, served as asked."""
    with deltune.prefix_attention(how):
        outputs = forward(model, inputs)
        loss(outputs).backward()
    served = set(deltune.prefix_report(model).values())
    assert served == {"merged" if how == "merged" else "joined: requested"}
    values = {name: value.detach() for name, value in outputs.items()}
    for name, parameter in deltune.tuned(model).named_trainable_parameters():
        if parameter.grad is not None:
            values[f"gradient of {name}"] = parameter.grad
            parameter.grad = None
    return values


def check(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    assert actual.keys() == expected.keys()
    for kind in (True, False):
        names = [name for name in expected if name.startswith("gradient") == kind]
        size = max(expected[name].abs().max().item() for name in names)
        for name in names:
            assert (actual[name] - expected[name]).abs().max() <= tolerance * size, name


@pytest.mark.parametrize("inputs", ["padded", "full", "bare"])
@pytest.mark.parametrize("family", SOME, ids=lambda f: f.name)
def test_training(family: Family, inputs: str) -> None:
    model = tuned_model(family).train()
    encoded = batch(model, pad=2 if inputs == "padded" else 0)
    if inputs == "bare":
        del encoded["attention_mask"]
    check(gradients(model, encoded, "merged"), gradients(model, encoded, "joined"), tolerance(family))


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bart"])
def test_generation(name: str, beams: int) -> None:
    """Left padding, and one query at a time before a cache."""
    model = tuned_model(FAMILIES[name])
    encoded = batch(model, rows=3, pad=0)
    encoded["input_ids"][1, :3], encoded["attention_mask"][1, :3] = model.config.pad_token_id, 0
    encoded.pop("decoder_input_ids", None)
    texts = {}
    for how in ("merged", "joined"):
        with deltune.prefix_attention(how):  # type: ignore[arg-type]
            texts[how] = model.generate(**encoded, num_beams=beams, max_new_tokens=6, do_sample=False)
        assert {report.split(":")[0] for report in deltune.prefix_report(model).values()} == {how}
    assert torch.equal(texts["merged"], texts["joined"])


@pytest.mark.parametrize("left", [False, True], ids=["padded right", "padded left"])
@pytest.mark.parametrize("family", SOME, ids=lambda f: f.name)
def test_mixed_batches(family: Family, left: bool) -> None:
    """Prefixes of two lengths, a row without one, and padding; what sees nothing gives nothing in both."""
    model = build(family, main_role(family), attn_implementation="sdpa")
    for name, text in (("one", METHOD), ("two", "prefix(length=5)"), ("three", "adapter(rank=2)")):
        tuned = stir(deltune.attach(model, text, name=name), size=1.0)
    encoded = batch(model, rows=5, pad=0)
    for row in (1, 3):
        columns = slice(0, 2) if left else slice(-2, None)
        encoded["input_ids"][row, columns], encoded["attention_mask"][row, columns] = model.config.pad_token_id, 0
    with tuned.use(None).rows(["one", "two", None, "three", "one"]):
        merged, joined = gradients(model, encoded, "merged"), gradients(model, encoded, "joined")
    check(merged, joined, tolerance(family))


@pytest.mark.parametrize(
    ("kv_heads", "kind", "dtype"),
    crossed(
        [4, 2], ["plain", "causal", "masked", "added", "one query"], [torch.float64, torch.float32, torch.bfloat16]
    ),
)
@pytest.mark.sample(4)
def test_the_kernel(kv_heads: int, kind: str, dtype: torch.dtype) -> None:
    """`merged` is attention over the joined keys; in float64 its gradients are also those of finite differences."""
    made = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=made, dtype=torch.float64).to(dtype).requires_grad_()

    queries = 1 if kind == "one query" else 6
    query, key, value = drawn(2, 4, queries, 8), drawn(2, kv_heads, 6, 8), drawn(2, kv_heads, 6, 8)
    keys, values = drawn(3, kv_heads, 8), drawn(3, kv_heads, 8)
    shown = torch.ones(2, 1, queries, 6, dtype=torch.bool)
    mask = None
    if kind in ("masked", "one query"):
        shown[0, ..., 4:], shown[1, ..., :2] = False, False
        shown[1, :, :1] = False
        mask = finite_mask(shown, dtype)
    if kind == "added":
        mask = torch.randn(1, 4, 6, 6, generator=made).to(dtype)
    if kind == "causal":
        shown = shown.tril()

    def by_row(t: torch.Tensor) -> torch.Tensor:
        return t.expand(2, 3, kv_heads, 8).transpose(1, 2)

    def apart(*tensors: torch.Tensor) -> torch.Tensor:
        block, other = Block(*tensors[1:3], mask, kind == "causal"), Block(*map(by_row, tensors[3:]), None, False)
        kernel = kernel_for(tensors[0], (block, other))
        assert kernel is not None
        return merged_attention(tensors[0], block, other, 0.3, kernel, may_see_nothing=False)

    def joined(*tensors: torch.Tensor) -> torch.Tensor:
        query, key, value, keys, values = (t.double() for t in tensors)
        whole = [
            torch.cat([by_row(p), t], dim=2).repeat_interleave(4 // kv_heads, 1)
            for p, t in ((keys, key), (values, value))
        ]
        added = torch.zeros(shown.shape, dtype=torch.float64).masked_fill(~shown, -torch.inf)
        added = mask.double() if kind == "added" and mask is not None else added
        return F.scaled_dot_product_attention(query, *whole, attn_mask=F.pad(added, (3, 0)), scale=0.3)

    tensors = (query, key, value, keys, values)
    grad = torch.randn(2, 4, queries, 8, generator=made)
    output, expected = apart(*tensors), joined(*tensors)
    limit = 10 * torch.finfo(dtype).eps
    assert (output - expected).abs().max() < limit * expected.abs().max()
    ours = torch.autograd.grad((output * grad).sum(), tensors)
    theirs = torch.autograd.grad((expected * grad).sum(), tensors)
    for mine, right in zip(ours, theirs, strict=True):
        assert (mine - right).abs().max() <= limit * right.abs().max()
    with torch.no_grad():
        assert torch.equal(apart(*tensors), output)
    if dtype == torch.float64:
        assert torch.autograd.gradcheck(apart, tensors)


def test_what_sees_nothing_gives_nothing() -> None:
    query, key = torch.randn(1, 2, 3, 4, requires_grad=True), torch.randn(1, 2, 3, 4, requires_grad=True)
    nothing = finite_mask(torch.tensor([True, False, True])[None, None, :, None].expand(1, 1, 3, 3), torch.float32)
    block, other = (
        Block(key, key, nothing, False),
        Block(key, key, finite_mask(torch.zeros(1, 1, 1, 3, dtype=torch.bool), torch.float32), False),
    )
    kernel = kernel_for(query, (block, other))
    assert kernel is not None
    output = merged_attention(query, block, other, 0.5, kernel, may_see_nothing=True)
    alone = F.scaled_dot_product_attention(query, key, key, scale=0.5)
    assert not output[:, :, 1].any() and torch.allclose(output[:, :, ::2], alone[:, :, ::2])
    gradient = torch.autograd.grad(output.square().sum(), (query, key))
    expected = torch.autograd.grad(alone[:, :, ::2].square().sum(), (query, key))
    assert all(torch.allclose(one, two, atol=1e-6) for one, two in zip(gradient, expected, strict=True))


REFUSED = {
    "dropout": ("bert", {"attention_probs_dropout_prob": 0.1}, "attention dropout of 0.1"),
    "eager": ("bert", {"attn_implementation": "eager"}, "eager attention"),
    "position bias": ("t5", {}, "a position bias"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_where_it_cannot_be_merged_it_is_joined_and_said(case: str) -> None:
    name, changes, reason = REFUSED[case]
    family = FAMILIES[name]
    model = build(family, main_role(family), **{"attn_implementation": "sdpa", **changes})
    for module in model.modules():
        if hasattr(module, "dropout") and "attention_probs_dropout_prob" in changes and hasattr(module, "query"):
            module.dropout.p = 0.1
    stir(deltune.attach(model, "prefix(length=3)"))
    model.train()
    with deltune.prefix_attention("merged"), pytest.warns(UserWarning, match=f"not possible here.*{reason}"):
        forward(model, batch(model))
    assert any(f"joined: {reason}" in report for report in deltune.prefix_report(model).values())


def test_by_default_what_is_faster() -> None:
    """A causal order left to the kernel, and a long text."""
    model = tuned_model(FAMILIES["llama"], max_position_embeddings=2 * MERGE_ABOVE)
    for length, served in ((8, "joined: as fast"), (MERGE_ABOVE + 8, "merged")):
        ids = torch.randint(5, 99, (1, length), generator=torch.Generator().manual_seed(0))
        logits = forward(model, {"input_ids": ids})["logits"]
        assert set(deltune.prefix_report(model).values()) == {served}
        with deltune.prefix_attention("joined"):
            expected = forward(model, {"input_ids": ids})["logits"]
        assert torch.allclose(logits, expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(deltune.DeltuneError, match="unknown prefix attention"), deltune.prefix_attention("both"):  # type: ignore[arg-type]
        pass


def test_tasks_that_overlap_leave_the_default() -> None:
    """Two asyncio tasks in one thread, of which the first to enter is the first to leave."""
    model = tuned_model(FAMILIES["bert"])
    inputs = batch(model)

    def served() -> set[str]:
        forward(model, inputs)
        return set(deltune.prefix_report(model).values())

    async def task(how: How, entered: asyncio.Event, leave: asyncio.Event) -> None:
        with deltune.prefix_attention(how):
            entered.set()
            await leave.wait()

    async def overlapping() -> list[set[str]]:
        events = [asyncio.Event() for _ in range(4)]
        first = asyncio.create_task(task("merged", *events[:2]))
        await events[0].wait()
        second = asyncio.create_task(task("joined", *events[2:]))
        await events[2].wait()
        events[1].set()
        await first
        reports = [served()]
        events[3].set()
        await second
        return [*reports, served()]

    assert asyncio.run(overlapping()) == [{"joined: requested"}, {"joined: as fast"}]
