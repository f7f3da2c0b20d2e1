"""Modifications that act at some tokens of a text: which these are, and nowhere else, however the text is read."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

import deltune
from deltune.methods.positions import chosen_tokens
from tables.families import FAMILIES
from tables.specimens import build, stir

INVOKED = (7, 8)
TEXTS = torch.tensor([[3, 7, 8, 4, 5, 7, 8, 9], [3, 4, 5, 6, 9, 2, 3, 4], [7, 8, 3, 4, 5, 6, 7, 9]])
ALORA = f"alora(invocation={INVOKED}, rank=4, at=('query', 'value'))"
ENDS = "loreft(rank=3, positions='first 1 + last 2')"
LAST = [1, 1, 0, 0, 1, 1, 1]  # shown, with padding in between as no tokenizer makes it


@pytest.mark.parametrize(
    ("positions", "ids", "shown", "expected"),
    [
        ("first 2", [3, 4, 5, 6], [1, 1, 1, 1], [1, 1, 0, 0]),
        ("first 2", [0, 0, 5, 6, 7], [0, 0, 1, 1, 1], [0, 0, 1, 1, 0]),
        ("last 2", [3, 4, 5, 0], [1, 1, 1, 0], [0, 1, 1, 0]),
        ("first 1 + last 2", [9] * 7, LAST, [1, 0, 0, 0, 0, 1, 1]),
        ("last 9", [3, 4], [1, 1], [1, 1]),
        ((7, 8), [7, 8, 3, 7, 8, 4], [1] * 6, [0, 0, 0, 1, 1, 1]),
        ((7, 8), [7, 8], [1, 1], [1, 1]),
        ((7, 7), [7, 7, 7, 4], [1] * 4, [0, 1, 1, 1]),
        ((7, 8), [7, 3, 8], [1] * 3, [0, 0, 0]),
        ((7, 8), [8], [1], [0]),
    ],
)
def test_which_tokens_are_chosen(positions: Any, ids: list[int], shown: list[int], expected: list[int]) -> None:
    chosen = chosen_tokens(positions, torch.tensor([ids]), torch.tensor([shown]).bool())
    assert chosen.int().tolist() == [expected]


def llama(method: str) -> tuple[PreTrainedModel, deltune.Tuned]:
    model = build(FAMILIES["llama"], "causal")
    return model, stir(deltune.attach(model, method), size=0.3)


@pytest.mark.parametrize("form", ["LowRank(3)", "Bottleneck(3)", "HiRA(3)", "Vector()", "Householder(2)"])
def test_a_form_acts_at_its_tokens_as_everywhere_and_at_no_others(form: str) -> None:
    """The input of a projection, its output, and what is a function of its weight, in the first layer."""
    insertion = "input" if form.startswith("Householder") else "parallel"
    text = f"Modification('value', {form}, {insertion!r}, layers=(0,)"
    model = build(FAMILIES["llama"], "causal")

    def value() -> torch.Tensor:
        read: list[torch.Tensor] = []
        module = model.get_submodule("model.layers.0.self_attn.v_proj")
        handle = module.register_forward_hook(lambda module, args, output: read.append(output))
        model(TEXTS)
        handle.remove()
        return read[0]

    base, changed = value(), []
    for more in (")", ", positions='last 3')"):
        torch.manual_seed(0)
        tuned = stir(deltune.attach(model, text + more), size=0.3)
        changed.append(value())
        tuned.detach()
    everywhere, ends = changed
    assert torch.equal(ends[:, :-3], base[:, :-3]) and not torch.equal(everywhere[:, -3:], base[:, -3:])
    assert torch.allclose(ends[:, -3:], everywhere[:, -3:], rtol=1e-12)


def generated(model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor | None = None, **options: Any) -> Any:
    mask = torch.ones_like(ids) if mask is None else mask
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=1, **options
    )
    return out[:, ids.shape[1] :]


@pytest.mark.parametrize("method", [ALORA, ENDS])
def test_generation_goes_on_where_the_prompt_was_changed(method: str) -> None:
    """With and without a cache, with beams, in a batch beside others, with padding, in a loop of one's own."""
    model, tuned = llama(method)
    uncached = generated(model, TEXTS, use_cache=False)
    assert torch.equal(uncached, generated(model, TEXTS))
    with tuned.disable():
        assert not torch.equal(uncached, generated(model, TEXTS))
    beams = generated(model, TEXTS, num_beams=3)
    assert torch.equal(beams, generated(model, TEXTS, num_beams=3, use_cache=False))
    longer = torch.cat([torch.ones(3, 2, dtype=torch.long), TEXTS], 1)
    assert torch.equal(uncached, generated(model, longer, (longer != 1).long()))
    stir(deltune.attach(model, "lora(rank=2)", name="other"), seed=5)
    stir(deltune.attach(model, "prompt(length=3)", name="prompt"), seed=6)
    names = ["default", "other", "prompt", "default", None]
    rows = TEXTS[[0, 1, 1, 2, 0]]
    alone = []
    for name, row in zip(names, rows, strict=True):
        with tuned.rows([name]):
            alone.append(generated(model, row[None]))
    with tuned.rows(names):
        assert torch.equal(generated(model, rows), torch.cat(alone))
    tuned.use("default")
    ids, cache = TEXTS, None
    for _ in range(6):
        out = model(ids if cache is None else ids[:, -1:], past_key_values=cache, use_cache=True)
        ids, cache = torch.cat([ids, out.logits[:, -1:].argmax(-1)], 1), out.past_key_values
    assert torch.equal(ids[:, 8:], uncached)


def test_what_generate_adds_is_not_searched() -> None:
    """Also a sequence of one token, which the model itself writes."""
    model = build(FAMILIES["llama"], "causal")
    token = int(generated(model, TEXTS)[1, 1])
    assert token not in TEXTS[1]
    before = generated(model, TEXTS)
    stir(deltune.attach(model, f"alora(invocation=({token},), rank=4)"), size=0.5)
    cached = generated(model, TEXTS)
    assert torch.equal(cached, generated(model, TEXTS, use_cache=False)) and torch.equal(cached[1], before[1])
    read = torch.cat([TEXTS, before], 1)[1:2]
    assert not torch.allclose(model(read).logits[:, -1], deltune.tuned(model).detach()(read).logits[:, -1])


def test_the_cache_of_the_base_model_is_continued() -> None:
    """What aLoRA is for: what stands before the sequence is the base model's. A copy of a cache knows its rows too."""
    model, tuned = llama(ALORA)
    with torch.no_grad():
        whole = model(TEXTS).logits
        with tuned.disable():
            begun = model(TEXTS[:, :5]).past_key_values
        read = model(TEXTS[:, 5:], past_key_values=begun)
        assert torch.allclose(read.logits[0], whole[0, 5:], rtol=1e-12)
        further = torch.tensor([[4], [4], [4]])
        expected = model(torch.cat([TEXTS, further], 1)[:2]).logits[:, -1]
        for cache in (copy.deepcopy(read.past_key_values), read.past_key_values):
            assert torch.allclose(model(further, past_key_values=cache).logits[:2, -1], expected, rtol=1e-12)
        cache.batch_select_indices(torch.tensor([0]))
        with pytest.raises(deltune.DeltuneError, match=r"the cache has 3 rows of which"):
            model(further[:1], past_key_values=cache)


def gradients(model: PreTrainedModel, tuned: deltune.Tuned) -> list[torch.Tensor]:
    model.zero_grad()
    model(TEXTS).logits.square().sum().backward()
    return [parameter.grad.clone() for parameter in tuned.trainable_parameters()]


@pytest.mark.parametrize("method", [ALORA, ENDS])
def test_checkpointed(method: str) -> None:
    model, tuned = llama(method)
    expected = gradients(model, tuned)
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert all(torch.equal(one, two) for one, two in zip(gradients(model, tuned), expected, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("method", [ALORA, ENDS])
def test_compiled(method: str) -> None:
    model, _ = llama(method)
    logits = model(TEXTS).logits
    torch._dynamo.reset()
    assert torch._dynamo.explain(model)(TEXTS).graph_break_count == 0
    assert torch.allclose(torch.compile(model, backend="aot_eager")(TEXTS).logits, logits, rtol=1e-10)


def test_what_lacks_the_tokens_is_refused(tmp_path: Path) -> None:
    model, tuned = llama(ALORA)
    embeds = model.get_input_embeddings()(TEXTS)
    positions = torch.arange(4).repeat(2)[None].expand(3, -1)
    layer = model.model.layers[0]
    for call, message in (
        (lambda: model(inputs_embeds=embeds), "do not say which tokens"),
        (lambda: model(TEXTS, position_ids=positions), "several texts"),
        (lambda: layer.self_attn.v_proj(embeds), "call the model itself"),
        (lambda: tuned.merge(), r"acts at the tokens \(7, 8\), and a weight at all"),
    ):
        with pytest.raises(deltune.DeltuneError, match=message):
            call()
    whole_layer = layer.forward
    layer.forward = lambda *a, **k: checkpoint(whole_layer, *a, use_reentrant=False, **k)
    with pytest.raises(deltune.DeltuneError, match=r"gradient_checkpointing_enable\(\)"):
        model(TEXTS).logits.sum().backward()
    layer.forward = whole_layer
    tuned.save(tmp_path)
    expected = model(TEXTS).logits
    tuned.detach()
    deltune.load(model, tmp_path)
    assert torch.equal(model(TEXTS).logits, expected)


@pytest.mark.parametrize(
    ("family", "method", "message"),
    [
        ("bart", "loreft(rank=2, positions='last 2')", "a model with one stack"),
        ("bert", "loreft(rank=2, positions='middle 2')", 'give "all", ends such as'),
        ("bert", "Modification('pooler', LowRank(2), positions='last 2')", "'pooler' is in none"),
        ("gpt2", "Modification('query', Householder(2), 'input', positions='last 2')", "other parts read the same"),
        ("bert", "alora(invocation=())", 'give "all", ends such as'),
    ],
)
def test_places_without_tokens(family: str, method: str, message: str) -> None:
    with pytest.raises(deltune.DeltuneError, match=message):
        deltune.attach(build(FAMILIES[family], "base"), method)
