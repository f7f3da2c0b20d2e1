"""Forms of a structure: products of Hadamard and Kronecker, blocks, subspaces, and a low rank with a frozen side."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from ...errors import DeltuneError, check_choice
from ..parser import Share, Size
from ..schedules import USUAL, RankSchedule
from .base import (
    BeforeUp,
    FactorForm,
    Form,
    MatrixForm,
    Place,
    Shapes,
    Specs,
    Tensors,
    TensorSpec,
    TwoLayers,
    Widths,
    parameter_specs,
)
from .hidden import ACTIVATIONS, activate
from .starts import at_least_float32, buffer_specs, down_up, indivisible, kaiming_, rank_above, singular
from .weights import ChangeForm

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, repr=False)
class LoHa(MatrixForm):
    """The Hadamard product of two low ranks, (A₁B₁ ⊙ A₂B₂) x (Hyeon-Woo et al. 2022; PEFT: LoHaConfig).

    Tensors: w1_a, w2_a (d_out, r) and w1_b, w2_b (r, d_in), Kaiming uniform but for w2_b, 0.

    Args:
        rank: r, at least 1.
    """

    acts_on_weights: ClassVar[bool] = False  # of experts, which have a stack of matrices
    rank: Size

    def tensors(self, widths: Widths) -> Specs:
        a, b = (widths.out_width, self.rank), (self.rank, widths.in_width)
        return parameter_specs({"w1_a": a, "w1_b": b, "w2_a": a, "w2_b": b})

    def initialize(self, tensors: Tensors, at: Place | None) -> None:
        for name, tensor in tensors.items():
            tensor.zero_() if name == "w2_b" else kaiming_(tensor)

    def matrix(self, tensors: Tensors) -> torch.Tensor:
        return (tensors["w1_a"] @ tensors["w1_b"]) * (tensors["w2_a"] @ tensors["w2_b"])


@dataclass(frozen=True, repr=False)
class LoKr(MatrixForm):
    """A Kronecker product, (C ⊗ B A) x (Yeh et al. 2024; PEFT: LoKrConfig).

    C is as large as both widths allow, which are the products of two factors. B A is one matrix where the rank is at
    least half of its greater side, and so is C unless both are decomposed.

    Tensors: w1, or w1_a and w1_b, and w2, or w2_a and w2_b; w1 or w1_a is 0, the others Kaiming uniform.

    Args:
        rank: r, at least 1.
        factor: The factor of the widths that gives the sides of C, or the greatest that it may be; -1: any.
        decompose_both: Whether C is a low rank too, where this is smaller.
    """

    acts_on_weights: ClassVar[bool] = False
    rank: Size
    factor: int = -1
    decompose_both: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.factor < 1 and self.factor != -1:
            raise DeltuneError(f"factor={self.factor}: must be at least 1, or -1")

    def tensors(self, widths: Widths) -> Specs:
        rows, columns = _two_factors(widths.out_width, self.factor), _two_factors(widths.in_width, self.factor)
        shapes: Shapes = {}
        for name, out, width, may in zip(("w1", "w2"), rows, columns, (self.decompose_both, True), strict=True):
            if may and self.rank < max(out, width) / 2:
                shapes |= {f"{name}_a": (out, self.rank), f"{name}_b": (self.rank, width)}
            else:
                shapes[name] = (out, width)
        return parameter_specs(shapes)

    def initialize(self, tensors: Tensors, at: Place | None) -> None:
        for name, tensor in tensors.items():
            tensor.zero_() if name in ("w1", "w1_a") else kaiming_(tensor)

    def matrix(self, tensors: Tensors) -> torch.Tensor:
        import torch

        def side(name: str) -> torch.Tensor:
            return tensors[name] if name in tensors else tensors[f"{name}_a"] @ tensors[f"{name}_b"]

        return torch.kron(side("w1"), side("w2"))


def _two_factors(width: int, factor: int) -> tuple[int, int]:
    """Return the two factors of a width that LyCORIS chooses, the smaller one first.

    One of them is `factor`, where it divides the width; else they are as near as they can be, the smaller one at most
    `factor`.
    """
    if factor > 0 and width % factor == 0:
        return min(factor, width // factor), max(factor, width // factor)
    most = math.isqrt(width) if factor == -1 else min(factor, math.isqrt(width))
    small = max(n for n in range(1, most + 1) if width % n == 0)
    return small, width // small


@dataclass(frozen=True, repr=False)
class MiSS(ChangeForm):
    """One matrix on the sum of the blocks of x, B Σ_k x_k with x_k (r,) (Kang and Yin 2024; PEFT: MissConfig).

    Tensor: block Bᵀ (r, d_out), 0; with `mini_rank` (r, mini_rank), repeated over the outputs.

    Args:
        rank: r, the width of the blocks, at least 1; the last block is filled up with zeros.
        mini_rank: How many outputs have rows of their own; it divides the output's width. None: all.
    """

    through_weight: ClassVar[bool] = False
    rank: Size
    mini_rank: Size | None = None

    def incompatibility(self, widths: Widths) -> str | None:
        if self.rank > widths.in_width:
            return f"rank={self.rank} is above the width {widths.in_width}"
        return indivisible("mini_rank", self.mini_rank, widths.out_width) if self.mini_rank else None

    def tensors(self, widths: Widths) -> Specs:
        return parameter_specs({"block": (self.rank, self.mini_rank or widths.out_width)})

    def initialize(self, tensors: Tensors, at: Place | None) -> None:
        tensors["block"].zero_()

    def _rows(self, tensors: Tensors, at: Place) -> torch.Tensor:
        if self.mini_rank is None:
            return tensors["block"]
        return tensors["block"].repeat(1, at.weight.shape[0] // self.mini_rank)

    def change(self, tensors: Tensors, at: Place) -> torch.Tensor:
        width = at.weight.shape[1]
        return self._rows(tensors, at).t().repeat(1, -(-width // self.rank))[:, :width]

    def split_at_up(self, tensors: Tensors, u: torch.Tensor, at: Place) -> BeforeUp:
        from torch.nn import functional as F

        missing = -u.shape[-1] % self.rank
        blocks = (F.pad(u, (0, missing)) if missing else u).unflatten(-1, (-1, self.rank))
        return blocks.sum(-2), self._rows(tensors, at).t(), None


@dataclass(frozen=True, repr=False)
class GraLoRA(MatrixForm):
    """k × k blocks with a low rank each (Jung et al. 2025; PEFT: GraloraConfig).

    Of the r rows of a block of the input, r / k go to each block of the output.

    Tensors: down (k, d_in / k, r), Kaiming uniform; up (k, r, d_out / k), 0.

    Args:
        rank: r, a multiple of k.
        blocks: k, which divides both widths.

    Raises:
        DeltuneError: An argument is out of its range.
    """

    acts_on_weights: ClassVar[bool] = False
    through_weight: ClassVar[bool] = False
    rank: Size
    blocks: Size = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank % self.blocks:
            raise DeltuneError(f"rank={self.rank}: must be a multiple of blocks={self.blocks}")

    def incompatibility(self, widths: Widths) -> str | None:
        return indivisible("blocks", self.blocks, widths.in_width, widths.out_width)

    def tensors(self, widths: Widths) -> Specs:
        k = self.blocks
        return parameter_specs(
            {"down": (k, widths.in_width // k, self.rank), "up": (k, self.rank, widths.out_width // k)}
        )

    def initialize(self, tensors: Tensors, at: Place | None) -> None:
        kaiming_(tensors["down"], fan_in=tensors["down"].shape[1])
        tensors["up"].zero_()

    def matrix(self, tensors: Tensors) -> torch.Tensor:
        import torch

        down, up = tensors["down"].unflatten(2, (self.blocks, -1)), tensors["up"].unflatten(1, (self.blocks, -1))
        return torch.einsum("nijr,jnro->joni", down, up).flatten(2, 3).flatten(0, 1)  # n: in, j: out

    def __call__(self, tensors: Tensors, u: torch.Tensor, at: Place) -> torch.Tensor:
        k, down, up = self.blocks, tensors["down"].to(u.dtype), tensors["up"].to(u.dtype)
        inner = u.reshape(-1, k, u.shape[-1] // k).transpose(0, 1) @ down  # (n, tokens, r), and r is (j, r / k)
        inner = inner.unflatten(-1, (k, -1)).permute(2, 1, 0, 3).flatten(2)  # (j, tokens, r)
        return (inner @ up).transpose(0, 1).reshape(*u.shape[:-1], -1)


@dataclass(frozen=True, repr=False)
class FrozenSide(FactorForm):
    """A low rank of which one matrix is frozen, B A x (LoRA-FA; Zhang et al. 2023; MiCA).

    PEFT: create_lorafa_optimizer, and LoraConfig(init_lora_weights="mica").

    Tensors: down A (r, d_in) and up B (d_out, r). Frozen is a random A (Kaiming uniform), or the last r left singular
        vectors of W as B; the other one is 0.

    Args:
        rank: r, at least 1.
        frozen: "down" or "up".
    """

    reads_weight: ClassVar[bool] = True
    rank: Size
    frozen: Literal["down", "up"] = "down"

    def incompatibility(self, widths: Widths) -> str | None:
        return rank_above(self.rank, widths)

    def tensors(self, widths: Widths) -> Specs:
        shapes = down_up(self.rank, widths)
        return buffer_specs({self.frozen: shapes.pop(self.frozen)}) | parameter_specs(shapes)

    def initialize(self, tensors: Tensors, at: Place | None) -> None:
        if self.frozen == "down":
            kaiming_(tensors["down"])
            tensors["up"].zero_()
        else:
            assert at is not None
            tensors["down"].zero_()
            tensors["up"].copy_(singular(at.weight, slice(min(at.weight.shape) - self.rank, None)).u)

    def factors(self, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        return tensors["down"], tensors["up"]


@dataclass(frozen=True, repr=False)
class SVD(FactorForm):
    """A product with the values of its ranks, s B diag(e) A x, and the ranks as its schedule allocates them (AdaLoRA).

    Tensors: down A (r, d_in) and up B (d_out, r), N(0, 0.02), like singular vectors; values e (r,), 0.

    Args:
        rank: r at the start, at least 1.
        scale: s.
        dropout: The probability of dropping a value of x while training.
        schedule: How the ranks are pruned.

    Raises:
        DeltuneError: An argument is out of its range.
    """

    rank: Size
    scale: float = 1.0
    dropout: Share = 0.0
    schedule: RankSchedule = USUAL

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.schedule.target > self.rank:
            raise DeltuneError(
                f"target={self.schedule.target}: the schedule prunes ranks, and there are {self.rank} at the start"
            )

    def tensors(self, widths: Widths) -> Specs:
        return parameter_specs(down_up(self.rank, widths) | {"values": (self.rank,)})

    def initialize(self, tensors: Tensors, at: Place | None) -> None:
        tensors["down"].normal_(std=0.02)
        tensors["up"].normal_(std=0.02)
        tensors["values"].zero_()

    def mask_factors(self, widths: Widths) -> None:
        raise DeltuneError("adalora cannot be masked: its schedule chooses whole ranks; mask lora")

    def factors(self, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        return tensors["values"][:, None] * tensors["down"], tensors["up"] * self.scale


@dataclass(frozen=True, repr=False)
class KroneckerBottleneck(Form):
    """A bottleneck f(u Dᵀ + d) Uᵀ + e whose matrices are Σ_i A_i ⊗ s_i t_i (Compacter; Karimi Mahabadi et al. 2021).

    Tensors: rules A_i (n, n, n), N(0, 0.01), which all places share; down_s (n, r / n, k) and up_s (n, d_out / n, k),
        down_t (n, k, d_in / n), Kaiming uniform; up_t (n, k, r / n), 0; down_bias (r,) and up_bias (d_out,), 0.

    Args:
        rank: r, a multiple of n.
        divisions: n, the number of Kronecker products, which divides the widths.
        inner_rank: k, the rank of the second factors.
        activation: f: "relu", "gelu", "silu", "tanh", "sigmoid" or "identity".

    Raises:
        DeltuneError: An argument is out of its range.
    """

    rank: Size
    divisions: Size = 4
    inner_rank: Size = 1
    activation: str = "gelu"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank % self.divisions:
            raise DeltuneError(f"rank={self.rank}: must be a multiple of divisions={self.divisions}")
        check_choice("activation", self.activation, ACTIVATIONS)

    def incompatibility(self, widths: Widths) -> str | None:
        return indivisible("divisions", self.divisions, widths.in_width, widths.out_width)

    def tensors(self, widths: Widths) -> Specs:
        n, k, shapes = self.divisions, self.inner_rank, down_up(self.rank, widths)
        parts: Shapes = {}
        for name, (rows, columns) in shapes.items():
            parts |= {f"{name}_s": (n, rows // n, k), f"{name}_t": (n, k, columns // n), f"{name}_bias": (rows,)}
        return parameter_specs(parts) | {"rules": TensorSpec((n, n, n), shared="term")}

    def initialize(self, tensors: Tensors, at: Place | None) -> None:
        for name, tensor in tensors.items():
            if name == "rules":
                tensor.normal_(std=0.01)
            else:
                tensor.zero_() if name == "up_t" or name.endswith("bias") else kaiming_(tensor)

    def _matrix(self, tensors: Tensors, name: str) -> torch.Tensor:
        import torch

        parts = tensors[f"{name}_s"] @ tensors[f"{name}_t"]
        return torch.einsum("iab,icd->acbd", tensors["rules"], parts).flatten(2, 3).flatten(0, 1)

    def two_layers(self, tensors: Tensors) -> TwoLayers:
        down, up = (self._matrix(tensors, name) for name in ("down", "up"))
        return TwoLayers(down, tensors["down_bias"], self.activation, up, tensors["up_bias"])

    def split_at_up(self, tensors: Tensors, u: torch.Tensor, at: Place) -> BeforeUp:
        from torch.nn import functional as F

        layers = self.two_layers(tensors)
        assert layers.down_bias is not None
        inner = F.linear(u, layers.down.to(u.dtype), layers.down_bias.to(u.dtype))
        return activate(self.activation, inner), layers.up, layers.up_bias


@dataclass(frozen=True, repr=False)
class LoReFT(Form):
    """An edit in a subspace, h + Rᵀ (W h + b - R h) with orthonormal rows R (Wu et al. 2024), at every position.

    Tensors: rotation (r, d), which R is made of; source W (r, d), R at the start; bias b (r,), 0.

    Args:
        rank: r, at least 1.
    """

    rank: Size

    def incompatibility(self, widths: Widths) -> str | None:
        if widths.in_width != widths.out_width:
            return f"LoReFT needs u as wide as h, here they are {widths.in_width} and {widths.out_width}"
        return rank_above(self.rank, widths)

    def tensors(self, widths: Widths) -> Specs:
        shape = (self.rank, widths.in_width)
        return parameter_specs({"rotation": shape, "source": shape, "bias": (self.rank,)})

    def initialize(self, tensors: Tensors, at: Place | None) -> None:
        tensors["rotation"].normal_()
        tensors["rotation"].copy_(self._rows(tensors))
        tensors["source"].copy_(self._rows(tensors))
        tensors["bias"].zero_()

    def mask_factors(self, widths: Widths) -> None:
        raise DeltuneError("loreft cannot be masked: entries left out of an orthonormal matrix change the others")

    def _rows(self, tensors: Tensors) -> torch.Tensor:
        """Return R, by a QR decomposition whose triangle has a positive diagonal."""
        import torch

        columns, triangle = torch.linalg.qr(at_least_float32(tensors["rotation"]).t())
        return (columns * triangle.diagonal().sign()).t().to(tensors["rotation"].dtype)

    def affine(self, tensors: Tensors, at: Place | None) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self._rows(tensors)
        return rows.t() @ (tensors["source"] - rows), rows.t() @ tensors["bias"]

    def split_at_up(self, tensors: Tensors, u: torch.Tensor, at: Place) -> BeforeUp:
        from torch.nn import functional as F

        rows = self._rows(tensors)
        return F.linear(u, (tensors["source"] - rows).to(u.dtype), tensors["bias"].to(u.dtype)), rows.t(), None
