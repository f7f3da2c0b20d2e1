"""Attention with prefixes: trained keys and values before the model's own (UV eq. 5).

There is one attention function for each implementation that it extends, registered with transformers; a module without
a prefix in use runs the original. A prefix is no part of the cache: it is added after the cache was read, so positions,
cache lengths and beams are not affected.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from ..errors import DeltuneError
from ..methods.forms.attention import Prefix
from .modules import Delta, Edit, ReadInput, input_reader
from .rows import DeltaRows, stack_by_row

PREFIX = "deltune_"

HOOK_ATTRIBUTE = "_deltune_port"
"""Where an attention module keeps its AttentionHook: in __dict__, so that it is no sub-module, and copies have it."""

AttentionFunction = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
EditsOfRows = list[tuple[Edit, DeltaRows]]
Prefixes = list[tuple[DeltaRows, dict[str, torch.Tensor]]]


def _eager(module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The eager attention of a model family, which transformers defines in the module of the attention class."""
    eager: AttentionFunction | None = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if eager is None:
        raise DeltuneError(f"{type(module).__name__} has no eager attention; load the model with sdpa attention")
    return eager(module, *args, **kwargs)


def _with_prefixes(original: AttentionFunction, additive: bool) -> AttentionFunction:
    """Return an attention function with prefixes; `additive`: the original adds masks to the scores (eager)."""

    def attention(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The attention of query (B, N_h, n, d_h) to key and value (B, N_kv, m, ·) -> (B, n, N_h, d_v)."""
        hook = module.__dict__.get(HOOK_ATTRIBUTE)
        if hook is None or not (edits := hook.edits()):
            return original(module, query, key, value, attention_mask, **kwargs)
        scaling = kwargs.get("scaling")
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        call, read = AttentionCall(module, query, key, value, attention_mask, kwargs), input_reader(hook.inputs())
        if joining := [(edit, group) for edit, group in edits if edit.in_softmax]:
            gates = _gates(joining, read, query)
            prefix = hook.prefix_of_rows(key, lambda: _stack_prefixes(_prefixes(joining, len(gates)), key))
            output, weights = _attend_with_prefix(prefix, _widened(call, gates, scaling), original, additive)
            output = _narrowed(output, gates)
        else:
            output, weights = original(module, query, key, value, attention_mask, **kwargs)
        for edit, group in edits:
            if not edit.in_softmax:
                delta = edit.modification.form.per_head(edit.tensors(), group.select(query), scaling)
                x = read(edit)
                x = None if x is None else group.select(x)
                output = group.replace(output, edit.compose(group.select(output), delta, x))
        return output, weights

    return attention


class AttentionCall(NamedTuple):
    """The arguments of an attention function."""

    module: torch.nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    options: dict[str, Any]

    @property
    def causal(self) -> bool:
        """Whether the kernel applies the causal mask itself, as transformers decides it."""
        is_causal = self.options.get("is_causal")
        causal: bool = getattr(self.module, "is_causal", True) if is_causal is None else is_causal
        return self.mask is None and self.query.shape[2] > 1 and causal


# A gate is of one query, so its prefix cannot be multiplied beforehand. Instead heads get a part for each gate: with
# queries [q, g q], keys [K, 0; 0, P_k] and values [V, 0; 0, P_v], the two parts of the output are o and o_P of one
# softmax, and o + g o_P is what attention to [g P_k; K] and [g P_v; V] gives.


def _parts(edits: EditsOfRows) -> list[int]:
    """Return the part of each prefix: 0 without a gate, i for the i-th gate of its rows."""
    seen: dict[DeltaRows, int] = {}
    parts: list[int] = []
    for edit, group in edits:
        gated = edit.modification.compose.reads_x
        seen[group] = seen.get(group, 0) + gated
        parts.append(seen[group] if gated else 0)
    return parts


def _gates(edits: EditsOfRows, read: ReadInput, query: torch.Tensor) -> list[torch.Tensor]:
    """Return the gates (B, n) of each part but the first; rows without such a gate have 0."""
    gates: list[torch.Tensor] = []
    for (edit, group), part in zip(edits, _parts(edits), strict=True):
        if part:
            x = read(edit)
            assert x is not None
            gate = edit.gates(group.select(x)).to(query.dtype)
            if part > len(gates):
                gates.append(gate.new_zeros(x.shape[:2]))
            gates[part - 1] = group.replace(gates[part - 1], gate)
    return gates


def _in_part(narrow: torch.Tensor, part: int, gates: int) -> torch.Tensor:
    """Put heads (…, d) into a part of heads with a part for each gate, beside zeros."""
    width = narrow.shape[-1]
    return F.pad(narrow, (part * width, (gates - part) * width)) if gates else narrow


def _prefixes(edits: EditsOfRows, gates: int) -> Prefixes:
    """Return the keys (l, N_kv, d) and values (l, N_kv, d_v) of prefixes, each in its part."""
    return [
        (group, {name: _in_part(edit.tensors()[name], part, gates) for name in ("keys", "values")})
        for (edit, group), part in zip(edits, _parts(edits), strict=True)
    ]


def _widened(call: AttentionCall, gates: list[torch.Tensor], scaling: float) -> AttentionCall:
    """Return the call with heads that have a part for each gate."""
    if not gates:
        return call
    query = torch.cat([call.query, *(call.query * gate[:, None, :, None] for gate in gates)], dim=-1)
    key, value = (_in_part(tensor, 0, len(gates)) for tensor in (call.key, call.value))
    return AttentionCall(call.module, query, key, value, call.mask, {**call.options, "scaling": scaling})


def _narrowed(output: torch.Tensor, gates: list[torch.Tensor]) -> torch.Tensor:
    """Return o + Σ g o_P of an output (B, n, N_h, …) that has a part for each gate."""
    result, *parts = output.chunk(len(gates) + 1, dim=-1)
    for part, gate in zip(parts, gates, strict=True):
        result = torch.addcmul(result, part, gate[..., None, None].to(result.dtype))
    return result


class CacheablePrefix(NamedTuple):
    """The prefixes of a delta, where a cache may hold their keys and values before the text."""

    length: int  # how many keys each layer has (l)
    layers: tuple[tuple[Edit, ...], ...]  # the edits of each layer, in the order of the cache's layers

    @property
    def edits(self) -> frozenset[Edit]:
        return frozenset(edit for edits in self.layers for edit in edits)

    def states(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the keys (1, N_kv, l, d) and values (1, N_kv, l, d_v) of each layer."""
        tensors = [[edit.tensors() for edit in edits] for edits in self.layers]
        joined = [[torch.cat([one[name] for one in some]) for name in ("keys", "values")] for some in tensors]
        return [(keys.transpose(0, 1)[None], values.transpose(0, 1)[None]) for keys, values in joined]


def cacheable_prefix(delta: Delta, model: torch.nn.Module) -> CacheablePrefix | None:
    """Return the prefixes of a delta if a cache may hold them, or None.

    It may where every layer has as many keys, since one mask is for all layers, and where no query has a gate of its
    own. A sliding window would hide them, and a position bias would take them for text: that is for the caller to know.
    """
    by_layer: dict[int, list[Edit]] = {}
    for edit in delta.all_edits():
        if edit.in_softmax:
            layer = getattr(model.get_submodule(edit.place.target.path), "layer_idx", None)
            if not isinstance(layer, int) or edit.modification.compose.reads_x:
                return None
            by_layer.setdefault(layer, []).append(edit)
    lengths = {sum(_prefix_length(edit) for edit in edits) for edits in by_layer.values()}
    if len(lengths) != 1 or sorted(by_layer) != list(range(len(by_layer))):
        return None
    return CacheablePrefix(lengths.pop(), tuple(tuple(by_layer[layer]) for layer in range(len(by_layer))))


def _prefix_length(edit: Edit) -> int:
    assert isinstance(edit.form, Prefix)
    return edit.form.length


class PrefixRows(NamedTuple):
    """The prefix of every row of a batch."""

    keys: torch.Tensor  # its keys (B, N_kv, l, d)
    values: torch.Tensor  # its values (B, N_kv, l, d_v)
    present: torch.Tensor | None  # which of the l are no padding, (B, l), or None for all


def _stack_prefixes(prefixes: Prefixes, key: torch.Tensor) -> PrefixRows:
    """Stack the prefix of every row in the dtype of the model's keys; several prefixes of a group are concatenated."""

    def stack(name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        by_group: dict[DeltaRows, list[torch.Tensor]] = {}
        for group, tensors in prefixes:
            by_group.setdefault(group, []).append(tensors[name].to(key.dtype))
        joined = [(group, some[0] if len(some) == 1 else torch.cat(some)) for group, some in by_group.items()]
        stacked, present = stack_by_row(joined, key.shape[0])
        return stacked.transpose(1, 2), present

    (keys, present), (values, _) = stack("keys"), stack("values")
    return PrefixRows(keys, values, present)


def _attend_with_prefix(
    prefix: PrefixRows, call: AttentionCall, original: AttentionFunction, additive: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the output (B, n, N_h, d_v) and the attention weights."""
    mask, options = _extended_mask(prefix, call), call.options
    if additive and mask is not None and mask.dtype == torch.bool:
        mask = _finite_mask(mask, call.query.dtype)
    if (bias := options.get("position_bias")) is not None:
        options = {**options, "position_bias": F.pad(bias, (prefix.keys.shape[2], 0))}
    key, value = torch.cat([prefix.keys, call.key], dim=2), torch.cat([prefix.values, call.value], dim=2)
    output, weights = original(call.module, call.query, key, value, mask, **options)
    # callers expect a column for each token; what a row lacks to 1 is the weight on the prefix
    return output, None if weights is None else weights[..., prefix.keys.shape[2] :]


def _finite_mask(shown: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return an additive mask with the least finite number for hidden keys."""
    return torch.zeros(shown.shape, dtype=dtype, device=shown.device).masked_fill_(~shown, torch.finfo(dtype).min)


def _extended_mask(prefix: PrefixRows, call: AttentionCall) -> torch.Tensor | None:
    """The mask with columns for the prefix before it, which every query sees, except for padding.

    A causal mask that is left to the kernel is written out, since the kernel would align it to the prefix's first key.
    """
    mask, present, query, key = call.mask, prefix.present, call.query, call.key
    if mask is None:
        if not call.causal and (present is None or bool(present.all())):
            return None
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)[None, None]
        mask = mask.tril() if call.causal else mask
    if present is None:
        return F.pad(mask, (prefix.keys.shape[2], 0), value=True if mask.dtype == torch.bool else 0.0)
    columns = present[:, None, None].expand(-1, mask.shape[1], mask.shape[2], -1)
    columns = columns if mask.dtype == torch.bool else _finite_mask(columns, mask.dtype)
    return torch.cat([columns, mask.expand(present.shape[0], -1, -1, -1)], dim=-1)


_EXTENDED: dict[str, tuple[AttentionFunction, Callable[..., Any]]] = {
    "sdpa": (_with_prefixes(sdpa_attention_forward, additive=False), sdpa_mask),
    "eager": (_with_prefixes(_eager, additive=True), eager_mask),
}

for _name, (_function, _own_mask) in _EXTENDED.items():
    AttentionInterface.register(PREFIX + _name, _function)
    AttentionMaskInterface.register(PREFIX + _name, _own_mask)


def prefix_implementation(name: str | None, check: bool = True) -> str:
    """Return the name under which an attention implementation is registered with prefixes."""
    if name is not None and name.startswith(PREFIX):
        return name
    plain = name or "eager"
    if check and plain not in _EXTENDED:
        raise DeltuneError(
            f"attention {plain!r} does not support prefixes; load the model with attn_implementation= one of "
            f"{', '.join(sorted(_EXTENDED))}"
        )
    return PREFIX + plain
