"""UV eq. 7 and 8: a prefix by concatenation is (1 - λ) attention + λ softmax(q P_kᵀ) P_v.

Computed here from the query, keys, values and mask that a model really hands to its attention, and compared with what
the attention function of a model with a prefix returns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import deltune
from tables.families import FAMILIES, Family
from tables.specimens import batch, build, configurations, run, stir

LENGTH = 3


@dataclass
class Call:
    """What one attention got and gave."""

    module: torch.nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    options: dict[str, Any]
    output: torch.Tensor


def listen(model: PreTrainedModel, kernel: str) -> list[Call]:
    """Every attention call from now on, the model's masks those of the kernel, its attention the one with prefixes."""
    calls: list[Call] = []

    def spy(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        output = ALL_ATTENTION_FUNCTIONS[f"deltune_{kernel}"](module, query, key, value, mask, **options)
        calls.append(Call(module, query, key, value, mask, options, output[0]))
        return output

    AttentionInterface.register("deltune_spy", spy)  # the prefix of the name says that it takes prefixes
    AttentionMaskInterface.register("deltune_spy", {"sdpa": sdpa_mask, "eager": eager_mask}[kernel])
    for config in configurations(model):
        config._attn_implementation = "deltune_spy"
    return calls


def scores(call: Call, key: torch.Tensor) -> torch.Tensor:
    """q Kᵀ as the family scales (and caps) it: (B, N_h, n, m)."""
    scaling = call.options.get("scaling")
    key = key.repeat_interleave(call.query.shape[1] // key.shape[1], dim=1)
    products = call.query @ key.transpose(-1, -2) * (call.query.shape[-1] ** -0.5 if scaling is None else scaling)
    cap = call.options.get("softcap")
    return products if cap is None else torch.tanh(products / cap) * cap


def own_scores(call: Call, causal: bool) -> torch.Tensor:
    """Those of the tokens, with mask, causal order and position bias added."""
    products = scores(call, call.key)
    if (bias := call.options.get("position_bias")) is not None:
        products = products + bias
    mask = call.mask
    if mask is None:
        if not causal:
            return products
        mask = torch.ones(products.shape[-2:], dtype=torch.bool).tril()
    if mask.dtype == torch.bool:
        return products.masked_fill(~mask, -torch.inf)
    return products + mask


def equation(call: Call, keys: torch.Tensor, values: torch.Tensor, causal: bool) -> torch.Tensor:
    """Eq. 7 with λ of eq. 8, (B, n, N_h, d_v). keys, values: (l, N_kv, d)."""
    groups = call.query.shape[1] // call.key.shape[1]
    on_prefix, on_text = scores(call, keys.transpose(0, 1)[None]), own_scores(call, causal)
    mass = torch.stack([on_prefix.logsumexp(-1), on_text.logsumexp(-1)])
    gate = mass.softmax(0)[0].unsqueeze(-1)
    text = torch.nan_to_num(on_text.softmax(-1)) @ call.value.repeat_interleave(groups, dim=1)  # nan: all is masked
    prefix = on_prefix.softmax(-1) @ values.transpose(0, 1)[None].repeat_interleave(groups, dim=1)
    return ((1 - gate) * text + gate * prefix).transpose(1, 2)


PADDED: dict[str, Callable[[PreTrainedModel], dict[str, Any]]] = {
    "padded": lambda model: batch(model),
    "full": lambda model: batch(model, pad=0),
    "bare": lambda model: {k: v for k, v in batch(model, pad=0).items() if k != "attention_mask"},
}


KERNELS = [(f, kernel) for f in FAMILIES.values() for kernel in f.kernels]


@pytest.mark.parametrize("inputs", PADDED)
@pytest.mark.parametrize(("family", "kernel"), KERNELS, ids=[f"{f.name}: {kernel}" for f, kernel in KERNELS])
@pytest.mark.sample(16)
def test_prefix_is_a_gated_sum(family: Family, kernel: str, inputs: str) -> None:
    model = build(family, "base", attn_implementation=kernel)
    tuned = stir(deltune.attach(model, f"prefix(length={LENGTH})"), size=1.0)
    prefixes = {edit.place.target.path: edit.tensors() for edit in tuned.delta().all_edits()}
    calls = listen(model, kernel)
    run(model, PADDED[inputs](model))
    paths = {module: path for path, module in model.named_modules()}
    cross = {f"{s.layers}.{i}.{s.cross[0]}" for s in family.stacks if s.cross for i in (0, 1)}
    passes = 2 if family.shared else 1
    assert any(c.options.get("position_bias") is not None for c in calls) == (family.positions == "relative")
    assert len(calls) == passes * len(prefixes) == 2 * len(family.stacks) + len(cross)
    for call in calls:
        path = paths[call.module]
        assert call.query.shape[1:][::2] == (4, family.head_width) and call.key.shape[1] == family.kv_heads
        is_cross = any(name.startswith(f"{path}.") for name in cross)
        causal = not is_cross and any(s.causal and path.startswith(f"{s.layers}.") for s in family.stacks)
        output, kept = call.output, prefixes[path]
        expected = equation(call, kept["keys"].detach(), kept["values"].detach(), causal)
        assert output.shape == expected.shape
        # eager attention takes its softmax in float32 in most families, sdpa in float64 in all
        tolerance = 1e-12 if kernel == "sdpa" else 2e-6
        assert torch.allclose(output, expected, rtol=tolerance, atol=tolerance), (path, (output - expected).abs().max())
        plain = equation(call, torch.zeros_like(kept["keys"]), torch.zeros_like(kept["values"]), causal)
        assert not torch.allclose(output, plain, atol=1e-3)


@pytest.mark.parametrize(("family", "kernel"), KERNELS, ids=[f"{f.name}: {kernel}" for f, kernel in KERNELS])
@pytest.mark.sample(16)
def test_a_gate_multiplies_keys_and_values_of_its_prefix(family: Family, kernel: str) -> None:
    """UniPELT's prefix, beside a prefix without a gate and one with another gate: all share the softmax."""
    model = build(family, "base", attn_implementation=kernel)
    gated = "Modification('heads', Prefix(2), compose=PrefixGate('p'))"
    tuned = stir(deltune.attach(model, f"{gated} + prefix(length=1) + {gated}"), size=1.0)
    by_path: dict[str, list[Any]] = {}
    for edit in tuned.delta().all_edits():
        by_path.setdefault(edit.place.target.path, []).append(edit)
    read: dict[str, list[torch.Tensor]] = {}
    for path, (edit, *_) in by_path.items():

        def note(_: Any, args: Any, kwargs: Any, path: str = path) -> None:
            read.setdefault(path, []).append((*args, *kwargs.values())[0])

        model.get_submodule(edit.source_path).register_forward_pre_hook(note, with_kwargs=True)
    calls = listen(model, kernel)
    run(model, batch(model))
    paths = {module: path for path, module in model.named_modules()}
    cross = {f"{s.layers}.{i}.{s.cross[0]}" for s in family.stacks if s.cross for i in (0, 1)}
    for call in calls:
        path = paths[call.module]
        is_cross = any(name.startswith(f"{path}.") for name in cross)
        causal = not is_cross and any(s.causal and path.startswith(f"{s.layers}.") for s in family.stacks)
        x = read[path].pop(0)
        expected = several(call, by_path[path], x, causal)
        tolerance = 1e-12 if kernel == "sdpa" else 2e-6
        assert torch.allclose(call.output, expected, rtol=tolerance, atol=tolerance)
        assert not torch.allclose(expected, several(call, by_path[path], 0 * x, causal), atol=1e-4)


def several(call: Call, edits: list[Any], x: torch.Tensor, causal: bool) -> torch.Tensor:
    """softmax(q [g P_k; K]ᵀ) [g P_v; V] for prefixes that each have a gate σ(x · w) or none, (B, n, N_h, d_v)."""
    groups = call.query.shape[1] // call.key.shape[1]
    columns, values = [own_scores(call, causal)], [call.value.repeat_interleave(groups, dim=1)[:, :, None]]
    for edit in edits:
        prefix = {name: tensor.detach().transpose(0, 1)[None] for name, tensor in edit.tensors().items()}
        gates = torch.ones_like(x[..., 0])
        if edit.modification.compose.reads_x:
            (vector,) = (table.get(name, shape) for name, (table, shape) in edit.shared.items())
            gates = (x @ vector.detach()).sigmoid()
        gates = gates[:, None, :, None]
        columns.append(scores(replace(call, query=call.query * gates), prefix["keys"]))
        values.append(gates[..., None] * prefix["values"].repeat_interleave(groups, dim=1)[:, :, None])
    parts = torch.cat(columns, dim=-1).softmax(-1).split([c.shape[-1] for c in columns], dim=-1)
    return sum(  # type: ignore[return-value]
        (part[..., None] * value).sum(-2) for part, value in zip(parts, values, strict=True)
    ).transpose(1, 2)


@pytest.mark.parametrize("family", [f for f in FAMILIES.values() if "sdpa" in f.kernels], ids=lambda f: f.name)
@pytest.mark.sample(13)
def test_prefix_without_its_gate(family: Family) -> None:
    """gate=False: the attention as it is, plus softmax(q P_kᵀ) P_v (UV table 4)."""
    model = build(family, "base", attn_implementation="sdpa")
    tuned = stir(deltune.attach(model, f"prefix(length={LENGTH}, gate=False)"), size=1.0)
    prefixes = {edit.place.target.path: edit.tensors() for edit in tuned.delta().all_edits()}
    calls = listen(model, "sdpa")
    with torch.no_grad():
        run(model, batch(model))
    paths = {module: path for path, module in model.named_modules()}
    for call in calls:
        keys, values = (t.detach().transpose(0, 1)[None] for t in prefixes[paths[call.module]].values())
        plain = ALL_ATTENTION_FUNCTIONS["sdpa"](
            call.module, call.query, call.key, call.value, call.mask, **call.options
        )
        added = scores(call, keys).softmax(-1) @ values.repeat_interleave(call.query.shape[1] // values.shape[1], dim=1)
        assert torch.allclose(call.output, plain[0] + added.transpose(1, 2), rtol=1e-12, atol=1e-12)


def test_a_scores_cap_caps_the_prefix_too() -> None:
    """Gemma2 caps its scores, eager attention only; the cap is in the equation, and moves the result."""
    model = build(FAMILIES["gemma2"], "base", attn_implementation="eager")
    stir(deltune.attach(model, "prefix(length=3)"), size=3.0)
    calls = listen(model, "eager")
    with torch.no_grad():
        run(model, batch(model))
    assert all(call.options.get("softcap") == 5.0 for call in calls)
