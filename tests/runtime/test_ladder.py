"""Ladder side tuning: a small transformer beside the model, through which alone gradients go."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import deltune
from tables.families import FAMILIES
from tables.specimens import build, stir

IDS = torch.tensor([[3, 7, 8, 4, 5], [1, 1, 5, 6, 9], [7, 8, 3, 4, 5]])
MASK = (IDS != 1).long()
CASES = [("llama", "causal", True), ("bert", "sequence", False)]


def run(model: Any, **more: Any) -> Any:
    with torch.no_grad():
        return model(input_ids=IDS, attention_mask=MASK, **more)


def papers(t: dict[str, torch.Tensor], states: tuple[torch.Tensor, ...], causal: bool) -> torch.Tensor:
    """Section 3 of Sung et al. 2022 with the blocks of its T5, one token and one head at a time."""

    def norm(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * gain

    rows = []
    for row in range(len(IDS)):
        g = states[0][row] @ t["first"].T
        for layer, h in enumerate(states[1:]):
            share = 1 / (1 + torch.exp(-t["alpha"][layer] / 0.1))
            g = share * g + (1 - share) * (h[row] @ t["down"][layer].T)
            q, k, v = (norm(g, t["attention_norm"][layer]) @ t["projections"][layer][i].T for i in range(3))
            heads = torch.zeros_like(g)
            for head in (slice(0, 2), slice(2, 4)):
                for i in range(IDS.shape[1]):
                    seen = [j for j in range(IDS.shape[1]) if (MASK[row, j] and (j <= i or not causal)) or j == i]
                    scores = torch.stack([q[i, head] @ k[j, head] / 2**0.5 for j in seen]).softmax(0)
                    heads[i, head] = sum(s * v[j, head] for s, j in zip(scores, seen, strict=True))
            g = g + heads @ t["projections"][layer][3].T
            g = g + (norm(g, t["ffn_norm"][layer]) @ t["widen"][layer].T).clamp(min=0) @ t["narrow"][layer].T
        rows.append(norm(g, t["last_norm"]) @ t["up"].T)
    return torch.stack(rows)


@pytest.mark.parametrize(("family", "role", "causal"), CASES)
def test_a_ladder_is_the_papers_formula(family: str, role: str, causal: bool) -> None:
    model = build(FAMILIES[family], role)
    states = run(model, output_hidden_states=True).hidden_states
    tuned = stir(deltune.attach(model, "ladder(width=4, heads=2)"), size=0.5)
    (edit,) = tuned.delta().all_edits()
    last: list[torch.Tensor] = []
    model.base_model.register_forward_hook(lambda module, args, output: last.append(output[0]))
    run(model)
    change = papers({name: tensor.detach() for name, tensor in edit.tensors().items()}, states, causal)
    shown = MASK.bool()
    assert change[shown].abs().max() > 1e-2
    assert torch.allclose((last[0] - states[-1])[shown], change[shown], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("family", "role", "causal"), CASES)
def test_no_gradient_goes_through_the_model(family: str, role: str, causal: bool) -> None:
    """Of a step the ladder keeps the hidden states and what is small; LoRA at the upper layer keeps what is wide."""
    model = build(FAMILIES[family], role)
    needs: list[bool] = []
    for layer in (m for m in model.modules() if type(m).__name__.endswith(("DecoderLayer", "BertLayer"))):
        layer.register_forward_hook(
            lambda module, args, output: needs.append(
                (output if isinstance(output, torch.Tensor) else output[0]).requires_grad
            )
        )
    tuned = stir(deltune.attach(model, "ladder(width=4, heads=2)", head="freeze"), size=0.5)
    output = model.train()(input_ids=IDS, attention_mask=MASK).logits
    output.sum().backward()
    assert needs and not any(needs)
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in tuned.trainable_parameters())


def test_a_ladder_beside_prompts_and_without_a_cache() -> None:
    model = build(FAMILIES["llama"], "causal")
    tuned = stir(deltune.attach(model, "ladder(width=4, heads=2)"), size=0.5)
    alone = run(model).logits
    stir(deltune.attach(model, "prompt(length=2)", name="prompt"), seed=2)
    prompt = run(model).logits
    for rows in (["default", "prompt", None], ["prompt", "default", None]):
        with tuned.disable():
            base = run(model).logits
        expected = [{"default": alone, "prompt": prompt, None: base}[name][i] for i, name in enumerate(rows)]
        with tuned.rows(rows):
            mixed = run(model).logits
        assert all(torch.allclose(mixed[i][m], expected[i][m], rtol=1e-9) for i, m in enumerate(MASK.bool()))
    tuned.use("default")
    options = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, "pad_token_id": 1}
    assert model.generate(input_ids=IDS, attention_mask=MASK, **options, use_cache=False).shape == (3, 8)
    with pytest.raises(deltune.DeltuneError, match="generate with use_cache=False"):
        model.generate(input_ids=IDS, attention_mask=MASK, **options)
    with pytest.raises(deltune.DeltuneError, match="a model with one stack of layers"):
        deltune.attach(build(FAMILIES["t5"], "seq2seq"), "ladder")
    with pytest.raises(deltune.DeltuneError, match="heads=3 do not divide width=64"):
        deltune.parse("ladder(heads=3)")
