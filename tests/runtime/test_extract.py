"""The difference of two models as a delta."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import deltune
from tables.families import FAMILIES
from tables.specimens import batch, build, differences, distance, facts, run, stir


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
@pytest.mark.parametrize(
    "text", ["lora(rank=3, at=('query', 'value'))", "lora(rank=2, at='ffn') + layernorm", "bitfit"]
)
def test_what_was_merged_is_found_again(family: str, text: str, tmp_path: Path) -> None:
    if family == "llama" and text == "bitfit":
        text = "lora(rank=2) + trainable_tokens(tokens=(5,))"
    base = build(FAMILIES[family], "base")
    tuned = copy.deepcopy(base)
    stir(deltune.attach(tuned, text)).merge()
    inputs = batch(base)
    expected, before = run(tuned, inputs), facts(base)
    extracted = deltune.extract(base, tuned, energy=1.0)
    assert distance(run(base, inputs), expected) < (1e-11 if FAMILIES[family].exact else 1e-4)
    if text.startswith("lora(rank=3"):
        assert repr(extracted.method) == "lora(rank=3)"
    assert not differences(before, facts(extracted.detach()))
    tuned.save_pretrained(tmp_path)
    if text.startswith("lora(rank=2, at='ffn')"):
        deltune.extract(base, tmp_path, text.replace("rank=2", "rank=?"), energy=1 - 1e-12)
        assert distance(run(base, inputs), expected) < (1e-11 if FAMILIES[family].exact else 1e-4)


def test_a_rank_follows_from_the_energy_and_what_is_left_out_is_said() -> None:
    base = build(FAMILIES["bert"], "base")
    tuned = copy.deepcopy(base)
    with torch.no_grad():
        for parameter in tuned.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    layers = zip(tuned.encoder.layer, base.encoder.layer, strict=True)
    queries = [t.attention.self.query.weight - b.attention.self.query.weight for t, b in layers]
    squares = [torch.linalg.svdvals(change).square() for change in queries]
    rank = next(r for r in range(1, 33) if sum(s[:r].sum() for s in squares) >= 0.6 * sum(s.sum() for s in squares))
    with pytest.warns(UserWarning, match=r"leaves out 9\d\.\d% of the energy"):
        extracted = deltune.extract(base, tuned, "lora(rank=?, at='query')", energy=0.6)
    assert extracted.method == deltune.parse(f"lora(rank={rank}, at='query')")


def test_heads_come_along() -> None:
    base, tuned = build(FAMILIES["bert"], "sequence"), build(FAMILIES["bert"], "sequence", num_labels=5)
    tuned.bert.load_state_dict(base.bert.state_dict())
    inputs = batch(base)
    expected = run(tuned, inputs)
    assert deltune.extract(base, tuned).method == deltune.parse("head")
    assert distance(run(base, inputs), expected) == 0 and base.config.num_labels == 5


@pytest.mark.parametrize(
    ("method", "options", "says"),
    [
        (None, {}, "nothing to extract"),
        ("adapter", {}, "is neither"),
        (None, {"energy": 2}, "energy=2"),
        ("lora(rnk=?)", {}, "rnk"),
    ],
)
def test_what_is_refused_leaves_the_base(method: str | None, options: dict, says: str) -> None:  # type: ignore[type-arg]
    base = build(FAMILIES["bert"], "base")
    tuned = copy.deepcopy(base)
    if method:
        stir(deltune.attach(tuned, "lora(rank=2)")).merge()
    before = facts(base)
    with pytest.raises(deltune.DeltuneError, match=says):
        deltune.extract(base, tuned, method, **options)
    with pytest.raises(deltune.DeltuneError, match="missing, or of another shape"):
        deltune.extract(base, build(FAMILIES["bert"], "base", intermediate_size=20))
    assert not differences(before, facts(base))


def tied_llama(tied: bool, **changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(**sizes, intermediate_size=24, tie_word_embeddings=tied, **changes)
    return LlamaForCausalLM(config).double().eval()


@pytest.mark.parametrize(("base_tied", "tuned_tied"), [(True, False), (True, True), (False, True)])
def test_tied_embeddings_are_compared_wherever_they_stand(base_tied: bool, tuned_tied: bool) -> None:
    base, tuned = tied_llama(base_tied), tied_llama(tuned_tied)
    with torch.no_grad():
        for parameter in tuned.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    ids = torch.arange(12).view(2, 6)
    expected = tuned(ids).logits
    deltune.extract(base, tuned, energy=1.0)
    assert torch.allclose(base(ids).logits, expected, atol=1e-10)
    if base_tied and tuned_tied:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            deltune.extract(base, tuned, "full", name="whole")
        assert torch.allclose(base(ids).logits, expected, atol=1e-10)


def test_what_computes_otherwise_is_no_tuned_model_of_the_base() -> None:
    base, tuned = tied_llama(True), tied_llama(True, rms_norm_eps=0.1, attention_dropout=0.2, eos_token_id=7)
    with pytest.raises(deltune.DeltuneError, match=r"config.rms_norm_eps: 0.1, and 1e-06 in the base$"):
        deltune.extract(base, tuned)
    stir(deltune.attach(with_lora := tied_llama(True), "lora"))
    with pytest.raises(deltune.DeltuneError, match=r"has deltas attached: .*tuned.merge"):
        deltune.extract(base, with_lora)
