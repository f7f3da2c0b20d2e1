"""A small network beside the model, which reads its hidden states layer by layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ...errors import DeltuneError
from ..parser import Positive, Size
from .base import TEXT, Form, Place, Shapes, Specs, Tensors, Widths, parameter_specs
from .starts import kaiming_

if TYPE_CHECKING:
    import torch

_GAINS = ("attention_norm", "ffn_norm", "last_norm")


@dataclass(frozen=True, repr=False)
class Ladder(Form):
    """A side network of one small transformer layer for each layer (ladder side tuning, Sung et al. 2022).

    Δh = U n(g_L) with g_0 = D_0 h_0, g_i = T_i(μ_i g_{i-1} + (1 - μ_i) D_i h_i) and μ_i = σ(α_i / τ), where h_0 to h_L
    are the hidden states, which get no gradient. T_i is a layer as T5 has them: g + attention(n(g)), then g + W relu(V
    n(g)), without biases; its attention sees all tokens of a text, in a causal model the earlier ones, divides by the
    root of its head's width, and knows of positions what the hidden states say. n is an RMS norm. In the paper U n(g_L)
    takes the place of h_L; here it is added, so that the model starts as it is.

    Tensors: first D_0 (w, d) and down D (L, w, d), Kaiming uniform; alpha α (L,), 0; attention_norm and ffn_norm
        (L, w) and last_norm (w,), 1; projections (L, 4, w, w), of query, key, value and output, widen V (L, 4w, w) and
        narrow W (L, w, 4w), Kaiming uniform; up U (d, w), 0.

    Args:
        width: w, which the heads divide.
        heads: The number of heads of an attention.
        temperature: τ, above 0.
    """

    width: Size = 64
    heads: Size = 4
    temperature: Positive = 0.1

    needs: ClassVar[str] = "states"
    reads_text: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width % self.heads:
            raise DeltuneError(f"heads={self.heads} do not divide width={self.width}")

    def tensors(self, widths: Widths) -> Specs:
        layers, w, d = widths.states - 1, self.width, widths.out_width
        shapes: Shapes = {
            "first": (w, d), "down": (layers, w, d), "alpha": (layers,), "attention_norm": (layers, w),
            "projections": (layers, 4, w, w), "ffn_norm": (layers, w), "widen": (layers, 4 * w, w),
            "narrow": (layers, w, 4 * w), "last_norm": (w,), "up": (d, w),
        }  # fmt: skip
        return parameter_specs(shapes)

    def initialize(self, tensors: Tensors, at: Place | None) -> None:
        for name, tensor in tensors.items():
            if name in _GAINS:
                tensor.fill_(1.0)
            elif name in ("alpha", "up"):
                tensor.zero_()
            else:
                kaiming_(tensor)

    def fill_untrained(self, tensors: Tensors, buffers: Tensors) -> None:
        for name, tensor in tensors.items():
            tensor.fill_(1.0 if name in _GAINS else 0.0)

    def __call__(self, tensors: Tensors, u: torch.Tensor, at: Place) -> torch.Tensor:
        """Compute Δh (B, n, d) of the last hidden state from all of them (L + 1, B, n, d)."""
        import torch
        from torch.nn import functional as F

        u, t = u.detach(), {name: tensor.to(u.dtype) for name, tensor in tensors.items()}
        visible = at.facts.get(TEXT)
        if visible is None or visible.shape[-1] != u.shape[-2]:
            raise DeltuneError(
                f"{self!r} attends to a text, and this call does not say which of its {u.shape[-2]} tokens see each "
                "other: call the model itself"
            )
        visible = visible | torch.eye(visible.shape[-1], dtype=torch.bool, device=u.device)  # padding sees itself
        g = F.linear(u[0], t["first"])
        for i, gate in enumerate((t["alpha"] / self.temperature).sigmoid()):
            g = gate * g + (1 - gate) * F.linear(u[i + 1], t["down"][i])
            query, key, value, output = t["projections"][i]
            normed = F.rms_norm(g, g.shape[-1:], t["attention_norm"][i], 1e-6)
            q, k, v = (F.linear(normed, x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in (query, key, value))
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=visible[:, None])
            g = g + F.linear(attended.transpose(1, 2).flatten(-2), output)
            normed = F.rms_norm(g, g.shape[-1:], t["ffn_norm"][i], 1e-6)
            g = g + F.linear(F.linear(normed, t["widen"][i]).relu(), t["narrow"][i])
        return F.linear(F.rms_norm(g, g.shape[-1:], t["last_norm"], 1e-6), t["up"])
