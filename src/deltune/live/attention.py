"""The one attention function: a model's own attention with trained keys and values before its own (UV eq. 5).

Registered once for each implementation it extends; a module without a prefix in use runs the original untouched. A
prefix is no cache entry: it joins after the cache was read, so positions, cache lengths and beams do not see it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from ..anatomy.trace import PORT
from ..errors import DeltuneError
from .uses import Use, by_row

PREFIX = "deltune_"

AttentionFunction = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


def _eager(module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The family's own eager attention, which transformers keeps beside each attention module's class."""
    own: AttentionFunction | None = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if own is None:
        raise DeltuneError(f"{type(module).__name__} has no eager attention; load the model with sdpa attention")
    return own(module, *args, **kwargs)


def _extended(original: AttentionFunction, additive: bool) -> AttentionFunction:
    """`original` with prefixes. additive: it adds its masks to the scores (eager) instead of reading truth values."""

    def attention(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """query (B, N_h, n, d_h), key and value (B, N_kv, m, ·) -> (B, n, N_h, d_v)."""
        port = module.__dict__.get(PORT)
        edits = port.edits() if port is not None else ()
        if not edits:
            return original(module, query, key, value, attention_mask, **kwargs)
        prefix = _prefix([(use, edit.tensors()) for edit, use in edits if edit.gated], key.shape[0])
        length, whole = 0, (key, value)
        if prefix is not None:
            rows, there = prefix
            length = rows["keys"].shape[1]
            attention_mask = _mask(module, query, key, attention_mask, length, there, kwargs.get("is_causal"))
            if additive and attention_mask is not None and attention_mask.dtype == torch.bool:
                visible = torch.zeros_like(attention_mask, dtype=query.dtype)
                attention_mask = visible.masked_fill(~attention_mask, torch.finfo(query.dtype).min)
            if (bias := kwargs.get("position_bias")) is not None:
                kwargs["position_bias"] = F.pad(bias, (length, 0))
            whole = (_join(rows["keys"], key), _join(rows["values"], value))
        output, weights = original(module, query, *whole, attention_mask, **kwargs)
        scaling = kwargs.get("scaling")
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        for edit, use in edits:
            if not edit.gated:
                delta = edit.modification.form.per_head(edit.tensors(), use.pick(query), scaling)
                output = use.put(output, edit.change(use.pick(output), delta, edit.take()))
        # the caller's picture has a column a token; the mass on the prefix is what is missing to one
        return output, weights[..., length:] if weights is not None and length else weights

    return attention


def _prefix(
    prefixes: list[tuple[Use, dict[str, torch.Tensor]]], size: int
) -> tuple[dict[str, torch.Tensor], torch.Tensor | None] | None:
    """keys and values (B, l, N_kv, d) of every row, those of one use one after the other, and which are there."""
    if not prefixes:
        return None
    uses = list(dict.fromkeys(use for use, _ in prefixes))
    rows, there = {}, None
    for name in ("keys", "values"):
        parts = [(use, torch.cat([t[name] for other, t in prefixes if other is use])) for use in uses]
        rows[name], there = by_row(parts, size)
    return rows, there


def _join(prefix: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """[P; own] along the keys: P (B, l, N_kv, d) before own (B, N_kv, m, d)."""
    return torch.cat([prefix.to(own.dtype).transpose(1, 2), own], dim=2)


def _mask(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    length: int,
    there: torch.Tensor | None,
    is_causal: bool | None,
) -> torch.Tensor | None:
    """The mask with `length` columns before it that every query sees, or those of its row that are `there` (B, l). A
    causal mask left to the kernel is written out: the kernel would align it to the first key, which is the prefix's."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if mask is None:
        if (not causal or query.shape[2] == 1) and (there is None or bool(there.all())):
            return None
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)[None, None]
        mask = mask.tril() if causal and query.shape[2] > 1 else mask
    if there is None:
        return F.pad(mask, (length, 0), value=True if mask.dtype == torch.bool else 0.0)
    columns = there[:, None, None].expand(-1, mask.shape[1], mask.shape[2], -1)
    if mask.dtype != torch.bool:
        shown = torch.zeros_like(columns, dtype=mask.dtype)
        columns = shown.masked_fill(~columns, torch.finfo(mask.dtype).min)
    return torch.cat([columns, mask.expand(there.shape[0], -1, -1, -1)], dim=-1)


_EXTENDED: dict[str, tuple[AttentionFunction, Callable[..., Any]]] = {
    "sdpa": (_extended(sdpa_attention_forward, additive=False), sdpa_mask),
    "eager": (_extended(_eager, additive=True), eager_mask),
}

for _name, (_function, _own_mask) in _EXTENDED.items():
    AttentionInterface.register(PREFIX + _name, _function)
    AttentionMaskInterface.register(PREFIX + _name, _own_mask)


def extended_name(name: str | None) -> str:
    """The name under which an implementation is registered with prefixes. Error: one that cannot take them."""
    if name is not None and name.startswith(PREFIX):
        return name
    plain = name or "eager"
    if plain not in _EXTENDED:
        raise DeltuneError(
            f"a prefix cannot join attention {plain!r}; load the model with attn_implementation= one of "
            f"{', '.join(sorted(_EXTENDED))}"
        )
    return PREFIX + plain
