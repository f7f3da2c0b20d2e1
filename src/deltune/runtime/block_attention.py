"""Attention over two blocks of keys: a fused kernel runs on each, and their outputs are merged by log-sum-exps.

With out_i (B, N_h, n, d_v) and z_i = log Σ_j exp(s_ij) (B, N_h, n) of a block's scores s_i = q K_iᵀ · scale + mask_i,

    out = (1 - λ) out_1 + λ out_2,  λ = exp z_2 / (exp z_1 + exp z_2) = σ(z_2 - z_1),  z = log(exp z_1 + exp z_2),

which is UV eq. 7 and 8 where block 2 is a prefix. Backwards, a key's weight is exp(s - z), and dL/ds = p ⊙ (dL/dp -
⟨dL/dout, out⟩): each block's own backward gives it exactly when it is told `out` and `z` of the whole (Ring Attention,
Liu et al. 2023).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

aten = torch.ops.aten

Extra = tuple[torch.Tensor | None, ...]
"""What a kernel's backward needs of its forward besides out and z."""
Grads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Block:
    """Keys (B, N_kv, m, d) and values of one block, an additive mask (B or 1, N_h or 1, n, m) or None, and whether
    query i sees keys 0 ... i only."""

    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    causal: bool


@dataclass(frozen=True)
class Kernel:
    """A fused attention that returns z.

    Attributes:
        forward: Returns out, z and what backward needs.
        backward: Returns the gradients of query, key and value.
        grouped: Whether it accepts fewer heads of keys than of queries.
    """

    forward: Callable[[torch.Tensor, Block, float], tuple[torch.Tensor, torch.Tensor, Extra]]
    backward: Callable[[torch.Tensor, torch.Tensor, Block, torch.Tensor, torch.Tensor, Extra, float], Grads]
    grouped: bool = True


def _cpu(query: torch.Tensor, block: Block, scale: float) -> tuple[torch.Tensor, torch.Tensor, Extra]:
    options = {"attn_mask": block.mask, "scale": scale}
    out, z = aten._scaled_dot_product_flash_attention_for_cpu(
        query, block.key, block.value, 0.0, block.causal, **options
    )
    return out, z, ()


def _cpu_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    block: Block,
    out: torch.Tensor,
    z: torch.Tensor,
    extra: Extra,
    scale: float,
) -> Grads:
    options = {"attn_mask": block.mask, "scale": scale}
    result: Grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, block.key, block.value, out, z, 0.0, block.causal, **options
    )
    return result


def _flash(query: torch.Tensor, block: Block, scale: float) -> tuple[torch.Tensor, torch.Tensor, Extra]:
    out, z, *more = aten._scaled_dot_product_flash_attention(
        query, block.key, block.value, 0.0, block.causal, False, scale=scale
    )
    first_query, first_key, _, _, state, unused, _ = more
    return out, z, (first_query, first_key, state, unused)


def _flash_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    block: Block,
    out: torch.Tensor,
    z: torch.Tensor,
    extra: Extra,
    scale: float,
) -> Grads:
    first_query, first_key, *state = extra
    sizes = (query.shape[2], block.key.shape[2])
    result: Grads = aten._scaled_dot_product_flash_attention_backward(
        grad, query, block.key, block.value, out, z, first_query, first_key, *sizes, 0.0, block.causal, *state,
        scale=scale,
    )  # fmt: skip
    return result


def _efficient(query: torch.Tensor, block: Block, scale: float) -> tuple[torch.Tensor, torch.Tensor, Extra]:
    """z has padding up to a multiple of 32 queries."""
    bias = _aligned(query, block)
    out, z, *state = aten._scaled_dot_product_efficient_attention(
        query, block.key, block.value, bias, True, 0.0, block.causal, scale=scale
    )
    return out, z, tuple(state)


def _efficient_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    block: Block,
    out: torch.Tensor,
    z: torch.Tensor,
    extra: Extra,
    scale: float,
) -> Grads:
    bias, needed = _aligned(query, block), (True, True, True, False)
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        grad, query, block.key, block.value, bias, out, z, *extra, 0.0, needed, block.causal, scale=scale
    )
    return dq, dk, dv


def _aligned(query: torch.Tensor, block: Block) -> torch.Tensor | None:
    """The mask for every head, its rows at multiples of 16 numbers, as this kernel reads them."""
    if block.mask is None:
        return None
    length = block.mask.shape[-1]
    rows = F.pad(block.mask, (0, -length % 16))[..., :length]
    return rows.expand(query.shape[0], query.shape[1], query.shape[2], length)


CPU = Kernel(_cpu, _cpu_backward)
FLASH = Kernel(_flash, _flash_backward)
EFFICIENT = Kernel(_efficient, _efficient_backward, grouped=False)


def kernel_for(query: torch.Tensor, blocks: tuple[Block, Block]) -> Kernel | None:
    """Return a kernel that accepts both blocks, or None. On a GPU torch decides which one does (not run on one yet)."""
    kinds = {tensor.dtype for block in blocks for tensor in (block.key, block.value)} | {query.dtype}
    widths = {block.value.shape[-1] for block in blocks} | {query.shape[-1]}
    if len(kinds) > 1 or len(widths) > 1 or query.device.type not in ("cpu", "cuda"):
        return None
    if query.device.type == "cpu":
        return CPU if query.dtype != torch.float16 else None
    masked = any(block.mask is not None for block in blocks)  # without dropout: the caller sees to it
    if not masked and query.shape[-1] % 8 == 0 and all(_takes(query, block, flash=True) for block in blocks):
        return FLASH
    wide = tuple(_repeated(block, query.shape[1]) for block in blocks)
    return EFFICIENT if all(_takes(query, block, flash=False) for block in wide) else None


def _takes(query: torch.Tensor, block: Block, flash: bool) -> bool:
    from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention

    grouped = block.key.shape[1] != query.shape[1]
    parameters = SDPAParams(query, block.key, block.value, block.mask, 0.0, block.causal, grouped)
    return can_use_flash_attention(parameters) if flash else can_use_efficient_attention(parameters)


def _repeated(block: Block, heads: int) -> Block:
    """Repeat each head of keys and values for every query head that uses it."""
    times = heads // block.key.shape[1]
    if times == 1:
        return block
    key, value = (t.repeat_interleave(times, dim=1) for t in (block.key, block.value))
    return Block(key, value, block.mask, block.causal)


def merged_attention(
    query: torch.Tensor, first: Block, second: Block, scale: float, kernel: Kernel, may_see_nothing: bool
) -> torch.Tensor:
    """Attention of a query (B, N_h, n, d) over both blocks, (B, N_h, n, d), once differentiable in query, keys and
    values. may_see_nothing: a query may see no key of either block; its output is 0 then, with no gradient."""
    if not kernel.grouped:
        first, second = _repeated(first, query.shape[1]), _repeated(second, query.shape[1])
    tensors = (query, first.key, first.value, second.key, second.value)
    if not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors)):
        return _forward(query, first, second, scale, kernel, may_see_nothing)[0]
    result: torch.Tensor = _Merged.apply(*tensors, first, second, scale, kernel, may_see_nothing)
    return result


def finite_mask(shown: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return an additive mask with the least finite number for hidden keys; a kernel returns no z for -inf alone."""
    return torch.zeros(shown.shape, dtype=dtype, device=shown.device).masked_fill_(~shown, torch.finfo(dtype).min)


def _forward(
    query: torch.Tensor, first: Block, second: Block, scale: float, kernel: Kernel, may_see_nothing: bool
) -> tuple[torch.Tensor, torch.Tensor, Extra, Extra]:
    """Return out and z of both blocks together, and what the backward of each block needs."""
    out_1, z_1, extra_1 = kernel.forward(query, first, scale)
    out_2, z_2, extra_2 = kernel.forward(query, second, scale)
    z = torch.logaddexp(z_1, z_2)
    share = torch.sigmoid(z_2 - z_1)[..., : query.shape[2], None].to(out_1.dtype)
    out = torch.lerp(out_1, out_2, share)
    if may_see_nothing:
        nothing = z < torch.finfo(query.dtype).min / 2
        z = z.masked_fill(nothing, torch.inf)
        out = out.masked_fill(nothing[..., : query.shape[2], None], 0.0)
    return out, z, extra_1, extra_2


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        other_key: torch.Tensor,
        other_value: torch.Tensor,
        first: Block,
        second: Block,
        scale: float,
        kernel: Kernel,
        may_see_nothing: bool,
    ) -> torch.Tensor:
        out, z, extra, other_extra = _forward(query, first, second, scale, kernel, may_see_nothing)
        masks = (first.mask, second.mask)
        ctx.save_for_backward(query, key, value, other_key, other_value, *masks, out, z, *extra, *other_extra)
        ctx.causal, ctx.scale, ctx.kernel, ctx.extras = first.causal, scale, kernel, len(extra)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, other_key, other_value, mask, other_mask, out, z, *extra = ctx.saved_tensors
        first, second = Block(key, value, mask, ctx.causal), Block(other_key, other_value, other_mask, False)
        needs_query, needs_first, needs_second = (
            ctx.needs_input_grad[0],
            any(ctx.needs_input_grad[1:3]),
            ctx.needs_input_grad[3:5],
        )
        dq, none = None, (None, None)
        grads: list[tuple[torch.Tensor | None, torch.Tensor | None]] = []
        for block, needed, more in (
            (first, needs_first, extra[: ctx.extras]),
            (second, any(needs_second), extra[ctx.extras :]),
        ):
            if not (needs_query or needed):
                grads.append(none)
                continue
            dq_of_block, dk, dv = ctx.kernel.backward(grad, query, block, out, z, tuple(more), ctx.scale)
            dq = dq_of_block if dq is None else dq + dq_of_block
            grads.append((dk, dv))
        return (dq if needs_query else None, *grads[0], *grads[1], None, None, None, None, None)
