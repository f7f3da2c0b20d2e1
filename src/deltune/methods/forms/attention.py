"""Forms that act inside an attention, on each head: prefixes and multi-head parallel adapters (UV §3.1, §3.3).

Shapes: q (B, N_h, n, d_h) is the model's own query, scaled as the model scales it; Δh (B, n, N_h, d_v).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from ...errors import DeltuneError
from ..masks import Factor
from ..parser import Size
from .base import Form, Place, Product, Specs, Tensors, TensorSpec, Widths, parameter_specs
from .low_rank import init_down_up

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, repr=False)
class Prefix(Form):
    """Attend to l trained keys and values, Δh = softmax(q P_kᵀ) P_v for each head (UV eq. 5, 7, 9; Li & Liang 2021).

    q is the model's own scaled query. The keys are not rotated and have no position bias. Tensors: keys P_k
    (l, N_kv, d_h) and values P_v (l, N_kv, d_v), N(0, 0.02) at the start.

    Args:
        length: l, at least 1.
        reparameterise: W: while training P = tanh(E W_down + b_down) W_up + b_up, with E (l, d) and E W_down (l, W)
            shared by all layers of one kind of attention (UV §A.3); saving computes P_k and P_v from it. None: P_k and
            P_v are trained themselves.
        shift_positions: Whether the positions of the tokens start at l, as where a prefix is the content of a cache
            (PEFT).
    """

    needs: ClassVar[str] = "attention"
    length: Size
    reparameterise: Size | None = None
    shift_positions: bool = field(default=False, kw_only=True)

    @property
    def starts_at_zero(self) -> bool:
        return False

    @property
    def shift(self) -> int:
        return self.length if self.shift_positions else 0

    def tensors(self, widths: Widths) -> Specs:
        keys_values = _keys_values(self.length, widths)
        if self.reparameterise is None:
            return keys_values
        inner, outputs = self.reparameterise, widths.kv_heads * (widths.head_width + widths.value_width)
        of_place = {"up": (outputs, inner), "up_bias": (outputs,)}
        shared = {"rows": (self.length, widths.in_width), "down": (inner, widths.in_width), "down_bias": (inner,)}
        specs = {name: TensorSpec(spec.shape, trained=False) for name, spec in keys_values.items()}
        specs |= {name: TensorSpec(shape, saved=False) for name, shape in of_place.items()}
        return specs | {name: TensorSpec(shape, saved=False, shared="group") for name, shape in shared.items()}

    def initialize(self, tensors: Tensors, at: Place | None) -> None:
        import torch

        if self.reparameterise is None:
            for tensor in tensors.values():
                torch.nn.init.normal_(tensor, std=0.02)
            return
        for name in ("up", "down"):  # as a fresh torch.nn.Linear
            if name == "down" and "rows" in tensors:
                torch.nn.init.normal_(tensors["rows"])
            if name in tensors:
                torch.nn.init.kaiming_uniform_(tensors[name], a=math.sqrt(5))
                bound = 1 / math.sqrt(tensors[name].shape[1])
                torch.nn.init.uniform_(tensors[f"{name}_bias"], -bound, bound)

    def fold(self, tensors: Tensors, widths: Widths) -> Tensors:
        from torch.nn import functional as F

        if self.reparameterise is None:
            return tensors
        inner = F.linear(tensors["rows"], tensors["down"], tensors["down_bias"]).tanh()
        rows = F.linear(inner, tensors["up"], tensors["up_bias"])
        keys, values = rows.split([widths.kv_heads * widths.head_width, widths.kv_heads * widths.value_width], dim=-1)
        specs = _keys_values(self.length, widths)
        return {"keys": keys.reshape(specs["keys"].shape), "values": values.reshape(specs["values"].shape)}

    def mask_factors(self, widths: Widths) -> Product:
        if self.reparameterise is not None:
            raise DeltuneError("a mask lies on P_k and P_v themselves: give reparameterise=None")
        return _keys_values_product(self.length, widths)

    def per_head(self, tensors: Tensors, query: torch.Tensor, scaling: float) -> torch.Tensor:
        from torch.nn import functional as F

        keys, values = _expand_to_query_heads(tensors, query)
        return F.scaled_dot_product_attention(query, keys, values, scale=scaling).transpose(1, 2)


def _expand_to_query_heads(tensors: Tensors, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return P_k and P_v (l, N_kv, d) as (B, N_h, l, d), each key-value head repeated for its query heads."""
    keys, values = (tensors[name].to(query.dtype).transpose(0, 1)[None] for name in ("keys", "values"))
    repeat = query.shape[1] // keys.shape[1]
    keys, values = (t.repeat_interleave(repeat, dim=1).expand(query.shape[0], -1, -1, -1) for t in (keys, values))
    return keys, values


@dataclass(frozen=True, repr=False)
class _Rows(Form):
    """A form of l rows for each head, whose values are 0 at the start."""

    length: Size
    zero_up: bool = field(default=True, kw_only=True)

    @property
    def starts_at_zero(self) -> bool:
        return self.zero_up


@dataclass(frozen=True, repr=False)
class MultiHead(_Rows):
    """Attend to l trained rows by relu instead of softmax, Δh = relu(q P_kᵀ) P_v for each head (UV §3.3, table 4).

    q is the model's own scaled query, so that the frozen W_q is part of the down projection, as in UV's code. Tensors:
    keys P_k (l, N_kv, d_h), N(0, 0.02) at the start, and values P_v (l, N_kv, d_v).

    Args:
        length: l, at least 1.
        zero_up: Whether P_v starts at 0, so that Δh = 0 at the start; else N(0, 0.02).
    """

    needs = "attention"

    def tensors(self, widths: Widths) -> Specs:
        return _keys_values(self.length, widths)

    def initialize(self, tensors: Tensors, at: Place | None) -> None:
        init_down_up(tensors["keys"], tensors["values"], "bert", self.zero_up)

    def mask_factors(self, widths: Widths) -> Product:
        return _keys_values_product(self.length, widths)

    def per_head(self, tensors: Tensors, query: torch.Tensor, scaling: float) -> torch.Tensor:
        keys, values = _expand_to_query_heads(tensors, query)
        return ((query @ keys.transpose(-1, -2) * scaling).relu() @ values).transpose(1, 2)


@dataclass(frozen=True, repr=False)
class OwnMultiHead(_Rows):
    """Add a bottleneck to each head, Δh = relu(u W_down) P_v with a W_down of its own for each head (UV §3.3).

    It acts at site "heads" only. Tensors: down (N_h l, d_in), N(0, 0.02) at the start, and values (l, N_h, d_v).

    Args:
        length: l, at least 1.
        zero_up: Whether P_v starts at 0, so that Δh = 0 at the start; else N(0, 0.02).
    """

    def incompatibility(self, widths: Widths) -> str | None:
        return None if widths.heads else "OwnMultiHead acts at site 'heads' of an attention whose heads can be seen"

    def tensors(self, widths: Widths) -> Specs:
        down, values = (widths.heads * self.length, widths.in_width), (self.length, widths.heads, widths.value_width)
        return parameter_specs({"down": down, "values": values})

    def initialize(self, tensors: Tensors, at: Place | None) -> None:
        init_down_up(tensors["down"], tensors["values"], "bert", self.zero_up)

    def mask_factors(self, widths: Widths) -> Product:
        heads, length, width = widths.heads, self.length, widths.value_width
        down = Factor("down", widths.in_width, widths.in_width, 1)
        values = Factor("values", width, heads * width, 1, block=length, outer=width)  # head after head, l ranks each
        return heads * length, (down,), (values,)

    def __call__(self, tensors: Tensors, u: torch.Tensor, at: Place) -> torch.Tensor:
        import torch
        from torch.nn import functional as F

        inner = F.linear(u, tensors["down"].to(u.dtype)).relu().unflatten(-1, (-1, self.length))
        return torch.einsum("...hl,lhd->...hd", inner, tensors["values"].to(inner.dtype)).flatten(-2)


def _keys_values(length: int, widths: Widths) -> Specs:
    """Return keys P_k (l, N_kv, d_h) and values P_v (l, N_kv, d_v)."""
    heads = (length, widths.kv_heads)
    return parameter_specs({"keys": (*heads, widths.head_width), "values": (*heads, widths.value_width)})


def _keys_values_product(length: int, widths: Widths) -> Product:
    """Return keys and values as a product with a rank for each row of each head, since heads do not mix."""
    keys, values = widths.head_width, widths.value_width
    return length * widths.kv_heads, (Factor("keys", keys, keys, 1),), (Factor("values", values, values, 1),)
