"""Attention with prefixes: trained keys and values before the model's own (UV eq. 5).

There is one attention function for each implementation that it extends, registered with transformers; a module without
a prefix in use runs the original. A prefix is no part of the cache: it is added after the cache was read, so positions,
cache lengths and beams are not affected. It is concatenated with the model's keys (eq. 5), or, where that is faster,
attended to separately and merged (eq. 7), which is the same function.

For the latter a fused kernel runs on each of two blocks of keys, and their outputs are merged by log-sum-exps. With
out_i (B, N_h, n, d_v) and z_i = log Σ_j exp(s_ij) (B, N_h, n) of a block's scores s_i = q K_iᵀ · scale + mask_i,

    out = (1 - λ) out_1 + λ out_2,  λ = exp z_2 / (exp z_1 + exp z_2) = σ(z_2 - z_1),  z = log(exp z_1 + exp z_2),

which is UV eq. 7 and 8 where block 2 is a prefix. Backwards, a key's weight is exp(s - z), and dL/ds = p ⊙ (dL/dp -
⟨dL/dout, out⟩): each block's own backward gives it exactly when it is told `out` and `z` of the whole (Ring Attention,
Liu et al. 2023).
"""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from ..anatomy.skeleton import base_modules
from ..compat import (
    cpu_attention,
    cpu_attention_backward,
    efficient_attention,
    efficient_attention_backward,
    flash_attention,
    flash_attention_backward,
    is_plain_inference,
)
from ..errors import DeltuneError, excerpt, unknown_name
from ..methods.attention_forms import Prefix
from .modules import Delta, Edit
from .rows import DeltaRows, all_rows_alike, stack_by_row

Extra = tuple[torch.Tensor | None, ...]
"""What a kernel's backward needs of its forward besides out and z."""
Grads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Block:
    """One block of keys (B, N_kv, m, d) and their values, and which of them a query sees.

    The mask is additive, (B or 1, N_h or 1, n, m), or None. If the block is causal, query i sees keys 0 … i only.
    """

    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    causal: bool

    def first_row(self) -> Block:
        """The block of the first row of the batch."""
        return Block(self.key[:1], self.value[:1], None if self.mask is None else self.mask[:1], self.causal)


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
    out, z = cpu_attention(query, block.key, block.value, 0.0, block.causal, **options)
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
    result: Grads = cpu_attention_backward(grad, query, block.key, block.value, out, z, 0.0, block.causal, **options)
    return result


def _flash(query: torch.Tensor, block: Block, scale: float) -> tuple[torch.Tensor, torch.Tensor, Extra]:
    out, z, *more = flash_attention(query, block.key, block.value, 0.0, block.causal, False, scale=scale)
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
    result: Grads = flash_attention_backward(
        grad, query, block.key, block.value, out, z, first_query, first_key, *sizes, 0.0, block.causal, *state,
        scale=scale,
    )  # fmt: skip
    return result


def _efficient(query: torch.Tensor, block: Block, scale: float) -> tuple[torch.Tensor, torch.Tensor, Extra]:
    """The log-sum-exps z have padding up to a multiple of 32 queries."""
    bias = _aligned(query, block)
    out, z, *state = efficient_attention(query, block.key, block.value, bias, True, 0.0, block.causal, scale=scale)
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
    dq, dk, dv, _ = efficient_attention_backward(
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
    """Attention of a query (B, N_h, n, d) over both blocks, once differentiable in query, keys and values.

    Args:
        query: The query (B, N_h, n, d).
        first: The first block.
        second: The second block.
        scale: The factor of the scores.
        kernel: The kernel that attends to each block.
        may_see_nothing: Whether a query may see no key of either block; its output is 0 then, with no gradient.

    Returns:
        The output (B, N_h, n, d).
    """
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
    out, z = _merge(out_1, z_1, out_2, z_2)
    if may_see_nothing:
        nothing = _sees_nothing(z, query)
        z = z.masked_fill(nothing, torch.inf)
        out = out.masked_fill(nothing[..., : query.shape[2], None], 0.0)
    return out, z, extra_1, extra_2


def _merge(
    out_1: torch.Tensor, z_1: torch.Tensor, out_2: torch.Tensor, z_2: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out and z of two blocks together."""
    share = torch.sigmoid(z_2 - z_1)[..., : out_1.shape[2], None].to(out_1.dtype)
    return torch.lerp(out_1, out_2, share), torch.logaddexp(z_1, z_2)


def _sees_nothing(z: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Which queries see no key, under `finite_mask`."""
    return z < torch.finfo(like.dtype).min / 2


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


PREFIX = "deltune_"

HOOK_ATTRIBUTE = "_deltune_port"
"""Where an attention module keeps its AttentionHook: in __dict__, so that it is no sub-module, and copies have it."""

AttentionFunction = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]

How = Literal["auto", "joined", "merged"]


class _Thread(threading.local):  # a context variable would be lost on torch.compile
    how: How = "auto"
    entered: tuple[tuple[object, How], ...] = ()
    """What the blocks choose that were entered in this thread and not left, each with its token, the innermost last."""


_thread = _Thread()


@contextlib.contextmanager
def prefix_attention(how: How) -> Iterator[None]:
    """Choose how attention to prefixes is computed inside a `with` block, in this thread.

    The results of the choices differ by rounding only. `prefix_report` says how it was computed. Where blocks of
    several asyncio tasks overlap, the one that was entered last holds for all of them.

    Args:
        how: "joined" concatenates prefixes with the model's keys. "merged" attends to them separately and merges the
            results, with a warning where that is not possible. "auto", which holds outside of any block, takes
            whichever was measured to be faster.

    Returns:
        A context manager.

    Raises:
        DeltuneError: `how` is none of the three.
    """
    if how not in ("auto", "joined", "merged"):
        raise DeltuneError(unknown_name("prefix attention", how, ("auto", "joined", "merged")))
    token = object()
    _thread.entered, _thread.how = (*_thread.entered, (token, how)), how
    try:
        yield
    finally:  # asyncio tasks of one thread may leave their blocks in any order
        _thread.entered = tuple(block for block in _thread.entered if block[0] is not token)
        _thread.how = _thread.entered[-1][1] if _thread.entered else "auto"


def prefix_report(model: torch.nn.Module) -> dict[str, str]:
    """Say for each attention how its prefix was computed in the last forward pass.

    Either it was "joined": it stood before the keys and values; or it was "merged": attention to the prefix and to the
    keys was computed apart and merged by the sums of both softmaxes.

    Args:
        model: A model with attached deltas.

    Returns:
        For the path of each attention with a prefix: "merged", or "joined: " and the reason.

    Raises:
        DeltuneError: `model` is no model.
    """
    if not isinstance(model, torch.nn.Module):
        raise DeltuneError(f"prefix_report takes a model, not {excerpt(model)}")
    hooks = (module.__dict__.get(HOOK_ATTRIBUTE) for _, module in base_modules(model))
    passes = next((hook.passes for hook in hooks if hook is not None), None)
    return {} if passes is None else dict(passes.report)


MERGE_ABOVE = 512
"""Above so many keys, in float32 on one core of a CPU, merging takes less time than joining where joining costs more
than a few keys: a causal kernel is given up for a mask (0.7 at 1,024 tokens, 1.0 at 512, 1.1 at 64), or a cache is
copied for a single query (0.68 at 1,024 keys, 0.96 at 256). With a mask, or without causal order, it takes 1.0 to 1.2
times as long at any length (12 heads of 32 and 64, 16 prefix keys)."""


def _eager(module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The eager attention of a model family, which transformers defines in the module of the attention class."""
    eager: AttentionFunction | None = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if eager is None:
        raise DeltuneError(f"{type(module).__name__} has no eager attention; load the model with sdpa attention")
    return eager(module, *args, **kwargs)


def _with_prefixes(original: AttentionFunction, additive: bool) -> AttentionFunction:
    """Return an attention function with prefixes.

    Args:
        original: The function that it extends.
        additive: Whether that adds masks to the scores (eager), instead of taking boolean masks.
    """

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
        call = Call(module, query, key, value, attention_mask, kwargs)
        if joining := [(edit, group) for edit, group in edits if edit.in_softmax]:
            prefixes, gates = _gated(joining, hook, call)
            gated_call = _widened(call, gates, scaling) if gates else call
            prefix = hook.kept_prefix(key)
            if prefix is None or (prefix.rows is not None and not _may_attend_by_row(call)):
                prefix = hook.keep_prefix(_prefix_of_rows(prefixes, call))
            attend = _attend_with_prefix if prefix.rows is None else _attend_by_row
            output, weights, served = attend(prefix, gated_call, original, additive, scaling)
            output = _narrowed(output, gates)
            hook.report(served)
        else:
            output, weights = original(module, query, key, value, attention_mask, **kwargs)
        for edit, group in edits:
            if not edit.in_softmax:
                delta = edit.modification.form.per_head(edit.tensors(), group.select(query), scaling)
                x = edit.resolve_input(hook.inputs(), None)
                x = None if x is None else group.select(x)
                output = group.replace(output, edit.compose(group.select(output), delta, x))
        return output, weights

    return attention


class Call(NamedTuple):
    """The arguments of an attention function."""

    module: torch.nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    options: dict[str, Any]

    def of_rows(self, rows: torch.Tensor) -> Call:
        """The same call for some rows of the batch."""
        query, key, value, mask = (
            tensor.index_select(0, rows) if tensor is not None and tensor.shape[0] == self.query.shape[0] else tensor
            for tensor in (self.query, self.key, self.value, self.mask)
        )
        assert query is not None and key is not None and value is not None
        return Call(self.module, query, key, value, mask, self.options)

    @property
    def causal(self) -> bool:
        """Whether the kernel applies the causal mask itself, as transformers decides it."""
        is_causal = self.options.get("is_causal")
        causal: bool = getattr(self.module, "is_causal", True) if is_causal is None else is_causal
        return self.mask is None and self.query.shape[2] > 1 and causal


Prefixes = list[tuple[DeltaRows, dict[str, torch.Tensor]]]
"""The keys (l, N_kv, d) and values (l, N_kv, d_v) of prefixes, each with the group that uses it."""


def _gated(edits: list[tuple[Edit, DeltaRows]], hook: Any, call: Call) -> tuple[Prefixes, list[torch.Tensor]]:
    """Return the prefixes, and the gates (B, n) by which the keys and values of some of them are multiplied.

    A gate is of one query, so its prefix cannot be multiplied beforehand. Instead every head is as wide as itself for
    each gate more: with queries [q, g q], keys [K, 0; 0, P_k] and values [V, 0; 0, P_v], the two parts of the output
    are o and o_P of one softmax, and o + g o_P is what attention to [g P_k; K] and [g P_v; V] gives.
    """
    gates: list[torch.Tensor] = []
    numbers: dict[DeltaRows, int] = {}  # of the last gate of each group
    placed: list[tuple[DeltaRows, Mapping[str, torch.Tensor], int]] = []
    for edit, group in edits:
        number = 0
        if edit.modification.compose.reads_x:
            x = edit.resolve_input(hook.inputs(), None)
            assert x is not None
            gate = edit.gates(group.select(x)).to(call.query.dtype)
            number = numbers[group] = numbers.get(group, 0) + 1
            if number > len(gates):
                gates.append(gate.new_zeros(x.shape[:2]))
            gates[number - 1] = group.replace(gates[number - 1], gate)
        placed.append((group, edit.tensors(), number))
    if not gates:
        return [(group, dict(tensors)) for group, tensors, _ in placed], gates
    parts = len(gates) + 1
    return [
        (group, {name: _in_part(tensors[name], number, parts) for name in ("keys", "values")})
        for group, tensors, number in placed
    ], gates


def _in_part(narrow: torch.Tensor, number: int, parts: int) -> torch.Tensor:
    """Put heads (…, d) into one of several parts of wider heads, beside zeros."""
    width = narrow.shape[-1]
    return F.pad(narrow, (number * width, (parts - 1 - number) * width))


def _widened(call: Call, gates: list[torch.Tensor], scaling: float) -> Call:
    """The call with heads that have a part for each gate, as `_gated` describes."""
    query = torch.cat([call.query, *(call.query * gate[:, None, :, None] for gate in gates)], dim=-1)
    key, value = (_in_part(tensor, 0, len(gates) + 1) for tensor in (call.key, call.value))
    return Call(call.module, query, key, value, call.mask, {**call.options, "scaling": scaling})


def _narrowed(output: torch.Tensor, gates: list[torch.Tensor]) -> torch.Tensor:
    """The output (B, n, N_h, d_v) of a call that `_widened` has made."""
    result, *parts = output.chunk(len(gates) + 1, dim=-1)
    for part, gate in zip(parts, gates, strict=True):
        result = torch.addcmul(result, part, gate[..., None, None].to(result.dtype))
    return result


class CacheablePrefix(NamedTuple):
    """The prefixes of a delta, where a cache may hold their keys and values before those of the text.

    Attributes:
        length: How many keys each layer has (l).
        layers: The edits of each layer, in the order of the cache's layers.
    """

    length: int
    layers: tuple[tuple[Edit, ...], ...]

    @property
    def edits(self) -> frozenset[Edit]:
        """All of its edits."""
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

    Args:
        delta: The delta.
        model: The model that it is attached to.
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
    """The prefix of every row, or of those that have one.

    Attributes:
        keys: Its keys (B, N_kv, l, d).
        values: Its values (B, N_kv, l, d_v).
        present: Which of the l are no padding, (B, l), or None for all.
        batch_size: How many rows the batch has.
        rows: The indices of the B rows in the batch, or None where they are all of its rows.
    """

    keys: torch.Tensor
    values: torch.Tensor
    present: torch.Tensor | None
    batch_size: int
    rows: torch.Tensor | None = None


def _prefix_of_rows(prefixes: Prefixes, call: Call) -> PrefixRows:
    """The prefixes in the dtype of the model's keys, of all rows or, where these are few, of those that have one.

    Several prefixes of a group are concatenated.
    """
    size, device = call.key.shape[0], call.key.device
    groups = list(dict.fromkeys(group for group, _ in prefixes))

    def of_groups(name: str) -> list[tuple[DeltaRows, torch.Tensor]]:
        parts = []
        for group in groups:
            tensors = [tensors[name].to(call.key.dtype) for other, tensors in prefixes if other is group]
            parts.append((group, tensors[0] if len(tensors) == 1 else torch.cat(tensors)))
        return parts

    rows = None
    if not all_rows_alike(groups) and _may_attend_by_row(call):
        rows = torch.cat([group.index(size, device) for group in groups])
        rows = rows if 2 * len(rows) <= size else None
    stack = stack_by_row if rows is None else _stack_one_by_one
    (keys, present), (values, _) = stack(of_groups("keys"), size), stack(of_groups("values"), size)
    return PrefixRows(keys.transpose(1, 2), values.transpose(1, 2), present, size, rows)


def _stack_one_by_one(
    parts: list[tuple[DeltaRows, torch.Tensor]], size: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Stack a tensor (l_i, …) of each group for each of its rows, group after group, padded to the longest.

    Returns:
        The tensor (rows of the groups, l, …), and which entries are no padding, or None where all are not.
    """
    longest = max(part.shape[0] for _, part in parts)
    counts = [len(group.index(size, part.device)) for group, part in parts]
    padded = [F.pad(part, (0, 0) * (part.dim() - 1) + (0, longest - part.shape[0])) for _, part in parts]
    whole = torch.cat([part.expand(count, *part.shape) for part, count in zip(padded, counts, strict=True)])
    lengths = [part.shape[0] for (_, part), count in zip(parts, counts, strict=True) for _ in range(count)]
    if min(lengths) == longest:
        return whole, None
    return whole, torch.arange(longest, device=whole.device) < torch.tensor(lengths, device=whole.device)[:, None]


def _may_attend_by_row(call: Call) -> bool:
    """Whether rows may be attended to apart: in passes without gradients, where all rows share the options."""
    if not is_plain_inference():
        return False
    bias = call.options.get("position_bias")
    shared = bias is None or bias.shape[0] == 1
    return shared and not call.options.get("dropout") and call.options.get("cache") is None


def _attend_by_row(
    prefix: PrefixRows, call: Call, original: AttentionFunction, additive: bool, scaling: float
) -> tuple[torch.Tensor, torch.Tensor | None, str]:
    """Attend without prefixes in all rows, and then to the prefixes in the rows that have one.

    Where few rows have a prefix, that takes less time than to extend the keys of all. Arguments and result are those of
    `_attend_with_prefix`.
    """
    rows = prefix.rows
    assert rows is not None
    if not additive and _thread.how != "joined" and _reason_to_join(call) is None:
        of_text, of_prefix = _blocks(prefix, call)
        kernel = kernel_for(call.query[:1], (of_text.first_row(), of_prefix.first_row()))
        if kernel is not None and kernel.grouped:
            output, z, _ = kernel.forward(call.query, of_text, scaling)
            joining, z_joining, _ = kernel.forward(call.query.index_select(0, rows), of_prefix, scaling)
            merged, _ = _merge(output.index_select(0, rows), z.index_select(0, rows), joining, z_joining)
            if of_text.mask is not None:  # only in rows without a prefix a query may see nothing
                output = output.masked_fill(_sees_nothing(z, output)[..., : output.shape[2], None], 0.0)
            return output.index_copy(0, rows, merged).transpose(1, 2).contiguous(), None, "merged"
    output, weights = original(call.module, call.query, call.key, call.value, call.mask, **call.options)
    some, weights_of_some, served = _attend_with_prefix(prefix, call.of_rows(rows), original, additive, scaling)
    if weights is not None and weights_of_some is not None:
        weights = weights.index_copy(0, rows, weights_of_some)
    return output.index_copy(0, rows, some.to(output.dtype)), weights, served


def _attend_with_prefix(
    prefix: PrefixRows, call: Call, original: AttentionFunction, additive: bool, scaling: float
) -> tuple[torch.Tensor, torch.Tensor | None, str]:
    """Return the output (B, n, N_h, d_v), the attention weights, and how the prefix was computed."""
    why = (
        "requested"
        if _thread.how == "joined"
        else "as fast"
        if _thread.how == "auto" and not _merging_is_faster(call)
        else None
    )
    if why is None:
        why = "eager attention" if additive else _reason_to_join(call)
        blocks = None if why else _blocks(prefix, call)
        kernel = None if blocks is None else kernel_for(call.query, blocks)
        if blocks is not None and kernel is not None:
            output = merged_attention(call.query, *blocks, scaling, kernel, may_see_nothing=prefix.present is not None)
            return output.transpose(1, 2).contiguous(), None, "merged"
        why = why or f"no fused kernel gives log-sum-exps of these {call.query.dtype} tensors"
        if _thread.how == "merged":
            warnings.warn(
                f"prefix_attention('merged') is not possible here, so the prefix is joined: {why}", stacklevel=2
            )
    mask, options = _extended_mask(prefix, call), call.options
    if additive and mask is not None and mask.dtype == torch.bool:
        mask = finite_mask(mask, call.query.dtype)
    if (bias := options.get("position_bias")) is not None:
        options = {**options, "position_bias": F.pad(bias, (prefix.keys.shape[2], 0))}
    key, value = torch.cat([prefix.keys, call.key], dim=2), torch.cat([prefix.values, call.value], dim=2)
    output, weights = original(call.module, call.query, key, value, mask, **options)
    # callers expect a column for each token; what a row lacks to 1 is the weight on the prefix
    weights = None if weights is None else weights[..., prefix.keys.shape[2] :]
    return output, weights, f"joined: {why}"


def _merging_is_faster(call: Call) -> bool:
    """Whether merging is faster than joining, by `MERGE_ABOVE`; it was measured on CPUs only."""
    if call.query.device.type != "cpu":
        return False
    rows, _, keys, _ = call.key.shape
    return keys > MERGE_ABOVE if call.causal else call.query.shape[2] == 1 and rows * keys > MERGE_ABOVE


def _reason_to_join(call: Call) -> str | None:
    """Why a prefix cannot be attended to separately, or None."""
    if dropout := call.options.get("dropout"):
        return f"attention dropout of {dropout}, with which the fused kernel gives no log-sum-exp"
    if call.options.get("position_bias") is not None:
        return "a position bias is added to the scores"
    if call.options.get("softcap") is not None:
        return "scores are capped"
    if call.options.get("cache") is not None:
        return "a paged cache"
    if call.mask is not None and (call.mask.requires_grad or call.mask.dtype not in (torch.bool, call.query.dtype)):
        return "a mask that is trained, or of another precision"
    if call.causal and call.query.shape[2] != call.key.shape[2]:
        return "causal order among keys of another length"
    return None


def _blocks(prefix: PrefixRows, call: Call) -> tuple[Block, Block]:
    """The model's own keys and the prefix, as blocks."""
    mask, present = call.mask, prefix.present
    if mask is not None:
        limit = torch.finfo(call.query.dtype).min
        mask = finite_mask(mask, call.query.dtype) if mask.dtype == torch.bool else mask.clamp(min=limit)
    shown = None if present is None else finite_mask(present[:, None, None], call.query.dtype)
    return Block(call.key, call.value, mask, call.causal), Block(prefix.keys, prefix.values, shown, False)


def _extended_mask(prefix: PrefixRows, call: Call) -> torch.Tensor | None:
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
    columns = columns if mask.dtype == torch.bool else finite_mask(columns, mask.dtype)
    return torch.cat([columns, mask.expand(present.shape[0], -1, -1, -1)], dim=-1)


_EXTENDED: dict[str, tuple[AttentionFunction, Callable[..., Any]]] = {
    "sdpa": (_with_prefixes(sdpa_attention_forward, additive=False), sdpa_mask),
    "eager": (_with_prefixes(_eager, additive=True), eager_mask),
}

for _name, (_function, _own_mask) in _EXTENDED.items():
    AttentionInterface.register(PREFIX + _name, _function)
    AttentionMaskInterface.register(PREFIX + _name, _own_mask)


def prefix_implementation(name: str | None, check: bool = True) -> str:
    """Return the name under which an attention implementation is registered with prefixes.

    Raises:
        DeltuneError: `check` is set, and there is no such implementation.
    """
    if name is not None and name.startswith(PREFIX):
        return name
    plain = name or "eager"
    if check and plain not in _EXTENDED:
        raise DeltuneError(
            f"attention {plain!r} does not support prefixes; load the model with attn_implementation= one of "
            f"{', '.join(sorted(_EXTENDED))}"
        )
    return PREFIX + plain
